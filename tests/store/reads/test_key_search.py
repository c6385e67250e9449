"""Searches by key: which messages they find, and how they go on where an answer, a round or a slice ends."""

from __future__ import annotations

import pytest

from mqproc.errors import BadRequestError
from mqproc.layout import record
from mqproc.store.cooperative import finish
from mqproc.store.index import lookup as index_query
from mqproc.store.read import by_key as key_search
from tests.store.live_store import FIRST_MS
from tests.store.reads.numbered import COUNT, FRAMES, PER_FRAME, Store, all_numbers, numbers_of


def test_keys_are_compared_themselves(store: Store) -> None:
    batch = finish(store.reading.by_key("Orders", "key-7", max_messages=1000, max_bytes=1 << 20))
    assert all_numbers(batch) == list(range(7, COUNT, 100))
    newest = finish(store.reading.by_key("Orders", "key-7", max_messages=3, max_bytes=1 << 20))
    assert (all_numbers(newest), newest.complete) == (list(range(7, COUNT, 100))[-3:], False)
    assert finish(store.reading.by_key("Orders", "key-", max_messages=9, max_bytes=1 << 20)).count == 0
    # The other topic's messages have the same keys.
    assert all_numbers(finish(store.reading.by_key("Pay", "n3", max_messages=9, max_bytes=1 << 20))) == [3]


def test_keys_by_bytes_lose_nothing(store: Store) -> None:
    """Newest first, page by page."""
    below, found = -1, []
    for _ in range(COUNT):
        batch = finish(store.reading.by_key("Orders", "key-7", below=below, max_messages=64, max_bytes=450))
        assert len(batch.records) <= 2
        found[:0] = [number for part in batch.records for number in numbers_of(part)]
        if batch.complete:
            break
        (below,) = batch.cursor
    assert found == list(range(7, COUNT, 100))


def test_keys_with_more_hits_than_a_round_holds(fresh: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first entry of an index file that was begun long after the one before reads too late, by as long."""
    for frame in range(FRAMES):
        fresh.put("T", 100 * frame, keys=["same"] * PER_FRAME)
    fresh.dispatch()
    assert len(list(fresh.engine.paths.index.iterdir())) > 2
    for held in range(20, 60):
        monkeypatch.setattr(key_search, "CANDIDATES_MAX", held)
        batch = finish(fresh.reading.by_key("T", "same", max_messages=2 * COUNT, max_bytes=1 << 30))
        assert batch.count == COUNT, held


def test_a_page_takes_few_of_a_keys_many_messages_from_the_index(fresh: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_search, "CANDIDATES_MIN", 8)
    for frame in range(FRAMES):
        fresh.put("T", 100 * frame, keys=["same"] * PER_FRAME)
    fresh.dispatch()
    below, found = -1, 0
    while found < COUNT:
        matches = fresh.reading.walks.matches
        batch = finish(fresh.reading.by_key("T", "same", below=below, max_messages=5, max_bytes=1 << 20))
        assert fresh.reading.walks.matches - matches <= 10
        below, found = batch.cursor[0] if batch.cursor else -1, found + batch.count
    assert (found, batch.complete) == (COUNT, True)


def test_keys_within_a_time(store: Store) -> None:
    """To the millisecond, although the index knows seconds, and also for a rolled file's first item."""
    for number in range(0, COUNT, 37):
        stored = FIRST_MS + 100 * (number // PER_FRAME)
        for begin, end, there in ((stored, stored, 1), (stored + 1, 1 << 60, 0), (0, stored - 1, 0)):
            batch = finish(store.reading.by_key("Orders", f"n{number}", begin, end, max_messages=9, max_bytes=1 << 20))
            assert all_numbers(batch) == [number] * there, number
    with pytest.raises(BadRequestError):
        finish(store.reading.by_key("Orders", "n1", 5, 4, max_messages=9, max_bytes=1))
    with pytest.raises(BadRequestError):
        finish(store.reading.by_key("Orders", "", max_messages=9, max_bytes=1))


@pytest.mark.parametrize("damaged", range(FRAMES))
def test_keys_within_a_time_beside_a_damaged_record(fresh: Store, damaged: int) -> None:
    """A record without a header has no time, and the binary search may look at any."""
    for frame in range(FRAMES):
        fresh.put("T", frame, 1, keys=["same"], queues=1)
    fresh.dispatch()
    fresh.damage(fresh.offsets[damaged], 0, b"\xff" * record.BODY)
    left = [frame for frame in range(FRAMES) if frame != damaged]
    for frame in (0, 1, damaged, FRAMES - 1):
        stored = FIRST_MS + 100 * frame
        later = finish(fresh.reading.by_key("T", "same", stored, max_messages=99, max_bytes=1 << 20))
        earlier = finish(fresh.reading.by_key("T", "same", 0, stored, max_messages=99, max_bytes=1 << 20))
        assert all_numbers(later) == [PER_FRAME * each for each in left if each >= frame]
        assert all_numbers(earlier) == [PER_FRAME * each for each in left if each <= frame]


@pytest.mark.parametrize("born", [False, True])
def test_a_key_of_more_messages_than_a_round_looks_at(
    fresh: Store, monkeypatch: pytest.MonkeyPatch, born: bool
) -> None:
    """All of one moment: a time is no place to go on at. Others have the same key later, and the index rolls."""
    monkeypatch.setattr(key_search, "CANDIDATES_MAX", 8)
    for number in range(8):
        early = number < 4
        time_ms = FIRST_MS if early else FIRST_MS + 10
        bodies = [b"body %d" % (100 * number + place) for place in range(100)]
        fresh.engine.append("T", bodies, time_ms, born_timestamp_ms=time_ms, keys=["same twice"] * 100, queues=1)
    fresh.dispatch()
    assert len(list(fresh.engine.paths.index.iterdir())) > 1
    for end_ms, count in ((FIRST_MS, 400), (FIRST_MS + 9, 400), (FIRST_MS + 10, 800)):
        for most in (3, 399, 400, 9999):
            search = fresh.reading.by_key("T", "same", 0, end_ms, born_time=born, max_messages=most, max_bytes=1 << 30)
            batch = finish(search)
            assert (all_numbers(batch), batch.complete) == (list(range(count))[-most:], count <= most)


def test_a_search_by_key_looks_at_few_bytes_between_other_requests(
    fresh: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages that are none of its time may be large ones."""
    fresh.engine.append("T", [b"body 0" + bytes(1000)] * 40, FIRST_MS, keys=["k"] * 40, queues=1)
    fresh.dispatch()
    monkeypatch.setattr(key_search, "SLICE_BYTES", 5000)
    slices = fresh.reading.by_key("T", "k", 0, 5, born_time=True, max_messages=9, max_bytes=1 << 30)
    assert sum(1 for _ in slices) >= 8


def test_a_search_by_key_looks_at_few_files_between_other_requests(
    fresh: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a small `max_index_num` there are many, and a key that nothing has is looked for in all of them."""
    monkeypatch.setattr(index_query, "FILES_PER_SLICE", 2)
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
