"""Searches by key: matches, and continuation after an answer, a round or a slice."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqproc import Message, StoreReader
from mqproc.errors import BadRequestError
from mqproc.layout import record
from mqproc.store.cooperative import finish
from mqproc.store.index import lookup
from mqproc.store.read import queries
from tests.support.command_line import call
from tests.support.group import Group
from tests.support.store_builders import (
    FIRST_MS,
    FRAME_COUNT,
    FRAME_MESSAGES,
    MESSAGE_COUNT,
    NumberedStore,
    all_numbers,
    numbers_of,
)


def test_by_key_compares_the_keys_themselves(store: NumberedStore) -> None:
    batch = finish(store.reading.by_key("Orders", "key-7", max_messages=1000, max_bytes=1 << 20))
    assert all_numbers(batch) == list(range(7, MESSAGE_COUNT, 100))
    newest = finish(store.reading.by_key("Orders", "key-7", max_messages=3, max_bytes=1 << 20))
    assert (all_numbers(newest), newest.complete) == (list(range(7, MESSAGE_COUNT, 100))[-3:], False)
    assert finish(store.reading.by_key("Orders", "key-", max_messages=9, max_bytes=1 << 20)).count == 0
    # The other topic's messages have the same keys.
    assert all_numbers(finish(store.reading.by_key("Pay", "n3", max_messages=9, max_bytes=1 << 20))) == [3]


def test_by_key_byte_limit_loses_nothing(store: NumberedStore) -> None:
    """Pages start with the newest messages."""
    below, found = -1, []
    for _ in range(MESSAGE_COUNT):
        batch = finish(store.reading.by_key("Orders", "key-7", below=below, max_messages=64, max_bytes=450))
        assert len(batch.records) <= 2
        found[:0] = [number for part in batch.records for number in numbers_of(part)]
        if batch.complete:
            break
        (below,) = batch.cursor
    assert found == list(range(7, MESSAGE_COUNT, 100))


def test_by_key_more_matches_than_a_round_holds(fresh: NumberedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first entry of a later index file reads too late."""
    for frame in range(FRAME_COUNT):
        fresh.put("T", 100 * frame, keys=["same"] * FRAME_MESSAGES)
    fresh.dispatch()
    assert len(list(fresh.engine.paths.index.iterdir())) > 2
    for held in range(20, 60):
        monkeypatch.setattr(queries, "CANDIDATES_MAX", held)
        batch = finish(fresh.reading.by_key("T", "same", max_messages=2 * MESSAGE_COUNT, max_bytes=1 << 30))
        assert batch.count == MESSAGE_COUNT, held


def test_by_key_page_reads_few_index_entries(fresh: NumberedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "CANDIDATES_MIN", 8)
    for frame in range(FRAME_COUNT):
        fresh.put("T", 100 * frame, keys=["same"] * FRAME_MESSAGES)
    fresh.dispatch()
    below, found = -1, 0
    while found < MESSAGE_COUNT:
        matches = fresh.reading.walks.matches
        batch = finish(fresh.reading.by_key("T", "same", below=below, max_messages=5, max_bytes=1 << 20))
        assert fresh.reading.walks.matches - matches <= 10
        below, found = batch.cursor[0] if batch.cursor else -1, found + batch.count
    assert (found, batch.complete) == (MESSAGE_COUNT, True)


def test_by_key_time_range_is_exact(store: NumberedStore) -> None:
    """Times are exact to the millisecond, although the index stores seconds."""
    for number in range(0, MESSAGE_COUNT, 37):
        stored = FIRST_MS + 100 * (number // FRAME_MESSAGES)
        for begin, end, expected in ((stored, stored + 1, 1), (stored + 1, 1 << 60, 0), (0, stored, 0)):
            batch = finish(store.reading.by_key("Orders", f"n{number}", begin, end, max_messages=9, max_bytes=1 << 20))
            assert all_numbers(batch) == [number] * expected, number
    with pytest.raises(BadRequestError):
        finish(store.reading.by_key("Orders", "n1", 5, 4, max_messages=9, max_bytes=1))
    with pytest.raises(BadRequestError):
        finish(store.reading.by_key("Orders", "", max_messages=9, max_bytes=1))


@pytest.mark.parametrize("damaged", range(FRAME_COUNT))
def test_by_key_time_range_skips_damaged_record(fresh: NumberedStore, damaged: int) -> None:
    """A record without a valid header has no time for the binary search."""
    for frame in range(FRAME_COUNT):
        fresh.put("T", frame, 1, keys=["same"], queues=1)
    fresh.dispatch()
    fresh.damage(fresh.offsets[damaged], 0, b"\xff" * record.BODY)
    left = [frame for frame in range(FRAME_COUNT) if frame != damaged]
    for frame in (0, 1, damaged, FRAME_COUNT - 1):
        stored = FIRST_MS + 100 * frame
        later = finish(fresh.reading.by_key("T", "same", stored, max_messages=99, max_bytes=1 << 20))
        earlier = finish(fresh.reading.by_key("T", "same", 0, stored + 1, max_messages=99, max_bytes=1 << 20))
        assert all_numbers(later) == [FRAME_MESSAGES * each for each in left if each >= frame]
        assert all_numbers(earlier) == [FRAME_MESSAGES * each for each in left if each <= frame]


@pytest.mark.parametrize("born", [False, True])
def test_by_key_equal_times_across_rounds(fresh: NumberedStore, monkeypatch: pytest.MonkeyPatch, born: bool) -> None:
    """All have one store time, so the search cannot resume at a time. The index rolls."""
    monkeypatch.setattr(queries, "CANDIDATES_MAX", 8)
    for number in range(8):
        early = number < 4
        time_ms = FIRST_MS if early else FIRST_MS + 10
        bodies = [b"body %d" % (100 * number + place) for place in range(100)]
        fresh.engine.append("T", bodies, time_ms, born_timestamp_ms=time_ms, keys=["same twice"] * 100, queues=1)
    fresh.dispatch()
    assert len(list(fresh.engine.paths.index.iterdir())) > 1
    for end_ms, count in ((FIRST_MS + 1, 400), (FIRST_MS + 10, 400), (FIRST_MS + 11, 800)):
        for most in (3, 399, 400, 9999):
            search = fresh.reading.by_key("T", "same", 0, end_ms, born_time=born, max_messages=most, max_bytes=1 << 30)
            batch = finish(search)
            assert (all_numbers(batch), batch.complete) == (list(range(count))[-most:], count <= most)


def test_by_key_slices_are_bounded_by_bytes(fresh: NumberedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages outside the time range may be large."""
    fresh.engine.append("T", [b"body 0" + bytes(1000)] * 40, FIRST_MS, keys=["k"] * 40, queues=1)
    fresh.dispatch()
    monkeypatch.setattr(queries, "SLICE_BYTES", 5000)
    slices = fresh.reading.by_key("T", "k", 0, 5, born_time=True, max_messages=9, max_bytes=1 << 30)
    assert sum(1 for _ in slices) >= 8


def test_by_key_slices_are_bounded_by_files(fresh: NumberedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing key is searched in all index files; a small `max_index_num` makes many."""
    monkeypatch.setattr(lookup, "FILES_PER_SLICE", 2)
    for number in range(8):
        fresh.engine.append("T", [b"body 0"] * 100, FIRST_MS + number, keys=["k k2"] * 100, queues=1)
    fresh.dispatch()
    files = len(list(fresh.engine.paths.index.iterdir()))
    assert files >= 4
    for slices in (
        fresh.reading.by_key("T", "none", max_messages=9, max_bytes=1 << 30),
        fresh.reading.query_message("T", "none", 9, 0, 1 << 60),
    ):
        assert sum(1 for _ in slices) == files // 2


def test_search_with_the_index_off_is_an_error(tmp_path: Path) -> None:
    """The index may hold messages of a time when it was on, so no answer would be whole."""
    store = NumberedStore(tmp_path / "store", message_index_enable=False)
    store.put("T", 0)
    store.dispatch()
    unique_id = store.messages("T")[0].unique_id or "0" * 32
    reading = store.reading
    for search in (
        reading.by_key("T", "key-1", max_messages=9, max_bytes=1 << 20),
        reading.by_key("T", unique_id, unique=True, max_messages=9, max_bytes=1 << 20),
        reading.query_message("T", "key-1", 9, 0, 1 << 60),
        reading.get(unique_id),
    ):
        with pytest.raises(BadRequestError, match="message_index_enable is off"):
            finish(search)
    store.close()


def test_reader_and_command_with_the_index_off_say_so(tmp_path: Path) -> None:
    group = Group(tmp_path / "store", message_index_enable=False).start()
    try:
        with group.client() as client:
            client.send(Message("T", b"x", keys=["k"]))
            with pytest.raises(BadRequestError, match="message_index_enable is off"):
                client.by_key("T", "k")
        shown = call("message", "key", "T", "k", "--store", group.store)
        assert (shown.code, "message_index_enable is off" in shown.err) == (2, True)
    finally:
        group.stop()
        group.close()
    with StoreReader(group.store) as reader, pytest.raises(BadRequestError, match="message_index_enable is off"):
        reader.by_key("T", "k")
