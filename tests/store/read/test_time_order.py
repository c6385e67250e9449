"""Searches by time when store times step back: the answers are those of a scan."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from mqproc import Message, StoreReader
from mqproc.kernels.gather import TIME_MAX, TIME_MIN
from mqproc.layout import control as words_of
from mqproc.layout.record_codec import decode_record, decode_records
from mqproc.store import compat
from mqproc.store.cooperative import finish
from mqproc.store.read.records import Conditions
from mqproc.types import StoredMessage
from tests.support.group import Group
from tests.support.store_builders import FIRST_MS, NumberedStore
from tests.support.store_checks import NOW_MS, recover

TOPIC = "Orders"
YEAR_MS = 400 * 86_400_000
FRAMES = 40
# The clock is a year ahead in the first frames, then right, then an hour ahead, then right.
JUMPS_MS = [YEAR_MS] * 12 + [0] * 10 + [3_600_000] * 8 + [0] * 10
LAST_DESCENT = 30


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NumberedStore]:
    new = NumberedStore(tmp_path_factory.mktemp("store"))
    fill(new)
    yield new
    new.close()


def fill(store: NumberedStore) -> None:
    for frame, jump_ms in enumerate(JUMPS_MS):
        store.append(
            TOPIC,
            [f"{frame} {number}".encode() for number in range(6)],
            FIRST_MS + 100 * frame + jump_ms,
            keys=["k"] * 6,
            tags=["a", "b"] * 3,
            rotation=frame % 4,
        )
    store.dispatch()


def all_of(store: NumberedStore) -> list[StoredMessage]:
    found = finish(store.reading.scan(Conditions(), -1, max_messages=9999, max_bytes=1 << 30, max_scan_bytes=1 << 40))
    return [decode_record(record) for record in found.records]


def position_of(messages: list[StoredMessage], frame: int) -> int:
    return next(one.physical_offset for one in messages if one.body.startswith(b"%d " % frame))


@pytest.fixture(params=["noted", "later", "unknown"])
def ordered(request: pytest.FixtureRequest, store: NumberedStore) -> NumberedStore:
    """The store with a note of the last descent, with one amid later records, or without one."""
    messages = all_of(store)
    notes = {
        "noted": position_of(messages, LAST_DESCENT),
        "later": position_of(messages, 35),
        "unknown": compat.TIME_ORDER_UNKNOWN,
    }
    store.engine.words[words_of.TIME_ORDERED_FROM] = notes[request.param]
    return store


def bounds() -> Iterator[tuple[int, int]]:
    random = Random(7)
    times = [FIRST_MS + 100 * frame + jump for frame, jump in enumerate(JUMPS_MS)]
    edges = [TIME_MIN, TIME_MAX, *times, *(time + 1 for time in times), FIRST_MS - 1, max(times) + 1]
    yield TIME_MIN, TIME_MAX
    for _ in range(60):
        yield random.choice(edges), random.choice(edges)


@pytest.mark.parametrize("tags", [(), ("a",)])
def test_count_and_range_with_descending_times_equal_scan(ordered: NumberedStore, tags: tuple[str, ...]) -> None:
    messages = all_of(ordered)
    for begin_ms, end_ms in bounds():
        expected = sorted(
            (one.queue_id, one.queue_offset)
            for one in messages
            if begin_ms <= one.store_timestamp_ms < end_ms and (not tags or one.tag in tags)
        )
        assert finish(ordered.reading.count(TOPIC, begin_ms, end_ms, tags=tags)) == len(expected)
        found: list[tuple[int, int]] = []
        cursor: tuple[int, ...] = ()
        complete = False
        while not complete:
            page = finish(
                ordered.reading.range(
                    TOPIC, begin_ms, end_ms, tags=tags, cursor=cursor, max_messages=7, max_bytes=1 << 20
                )
            )
            found += [(one.queue_id, one.queue_offset) for part in page.records for one in decode_records(part)]
            cursor, complete = page.cursor, page.complete
        assert found == expected


def test_offset_at_with_descending_times_equals_scan(ordered: NumberedStore) -> None:
    messages = all_of(ordered)
    for queue_id in range(4):
        of_queue = [(one.queue_offset, one.store_timestamp_ms) for one in messages if one.queue_id == queue_id]
        for time_ms, _ in bounds():
            after = [offset for offset, stored_ms in of_queue if stored_ms >= time_ms]
            before = [offset for offset, stored_ms in of_queue if stored_ms <= time_ms]
            assert finish(ordered.reading.offset_at(TOPIC, queue_id, time_ms)) == min(after, default=len(of_queue))
            upper = finish(ordered.reading.offset_at(TOPIC, queue_id, time_ms, upper=True))
            assert upper == max(before, default=0)


def test_by_key_with_descending_times_equals_scan(ordered: NumberedStore) -> None:
    messages = all_of(ordered)
    for begin_ms, end_ms in bounds():
        if begin_ms > end_ms:
            continue
        found = finish(
            ordered.reading.by_key(TOPIC, "k", begin_ms, end_ms, max_messages=9999, max_bytes=1 << 30)
        ).records
        expected = [one.physical_offset for one in messages if begin_ms <= one.store_timestamp_ms < end_ms]
        assert [decode_record(record).physical_offset for record in found] == expected


def test_recovery_finds_and_notes_where_times_descend(tmp_path: Path) -> None:
    store = NumberedStore(tmp_path / "store")
    fill(store)
    descent = position_of(all_of(store), LAST_DESCENT)
    store.close()
    recovered = recover(tmp_path / "store", store.options)
    assert recovered.words[words_of.TIME_ORDERED_FROM] == descent
    assert compat.time_ordered_from(store.engine.io, recovered.paths) == descent
    # Below its mark the second recovery reads nothing.
    assert recover(tmp_path / "store", store.options).words[words_of.TIME_ORDERED_FROM] == descent


def test_reader_of_store_without_note_equals_scan(tmp_path: Path) -> None:
    store = NumberedStore(tmp_path / "store")
    fill(store)
    messages = all_of(store)
    store.close()
    with StoreReader(tmp_path / "store") as reader:
        for begin_ms, end_ms in bounds():
            expected = sum(begin_ms <= one.store_timestamp_ms < end_ms for one in messages)
            assert reader.count(TOPIC, begin_ms, end_ms) == expected
            assert sum(1 for _ in reader.range(TOPIC, begin_ms, end_ms)) == expected


def test_group_searches_like_a_scan_after_its_clock_was_ahead(tmp_path: Path) -> None:
    store = NumberedStore(tmp_path / "store")
    store.append(TOPIC, [b"%d" % number for number in range(6)], NOW_MS + 20 * YEAR_MS)
    store.dispatch()
    store.close()
    group = Group(tmp_path / "store").start()
    try:
        with group.client() as client:
            for number in range(4):
                client.send(Message(TOPIC, b"later %d" % number))
            group.wait_dispatched()
            sent = list(client.scan(topic=TOPIC, end=NOW_MS + 10 * YEAR_MS))
            begin_ms = min(one.store_timestamp_ms for one in sent)
            assert len(sent) == 4
            assert client.count(TOPIC, begin_ms, NOW_MS + 10 * YEAR_MS) == 4
            assert [one.body for one in client.range(TOPIC, begin_ms, NOW_MS + 10 * YEAR_MS)] == [
                one.body for one in sorted(sent, key=lambda one: (one.queue_id, one.queue_offset))
            ]
            assert client.count(TOPIC) == 10
            for one in sent:
                assert client.offset_at(TOPIC, one.queue_id, one.store_timestamp_ms, upper=True) >= one.queue_offset
    finally:
        group.close()
    with StoreReader(tmp_path / "store") as reader:
        assert reader.count(TOPIC, begin_ms, NOW_MS + 10 * YEAR_MS) == 4
