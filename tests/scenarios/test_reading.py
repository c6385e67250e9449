"""Read a store by offset, time, count and size, across files; messages not yet visible."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mqproc.config.options import FlushDiskType
from mqproc.layout import control as words_of
from mqproc.layout import record
from mqproc.layout.record_codec import decode_records
from mqproc.roles.dispatcher import Dispatcher
from mqproc.store.cooperative import finish
from mqproc.store.read.pull import Pulled
from mqproc.types import PullStatus
from mqproc.util.units import MIB
from tests.roles.rigs import Rig
from tests.support.store_builders import EVERYTHING, FIRST_MS, LiveStore

OpenStore = Callable[..., LiveStore]
NOWHERE = ("Nowhere", 0)


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[OpenStore]:
    made: list[LiveStore] = []

    def make(**options: Any) -> LiveStore:
        made.append(LiveStore(tmp_path / "store", **options))
        return made[-1]

    yield make
    for store in made:
        store.close()


def put(store: LiveStore, count: int, step_ms: int = 10) -> list[int]:
    """Append messages to one queue, one per frame, `step_ms` apart; return their log offsets."""
    places = []
    for number in range(count):
        told = store.append("T", [b"body %d" % number], FIRST_MS + step_ms * number, queues=1)
        places.append(int(told.physical_offsets[0]))
    return places


def pull(store: LiveStore, offset: int = 0, count: int = 32) -> Pulled:
    return store.reading.pull("T", 0, offset, count, EVERYTHING)


# By offset


def test_first_and_last_message_are_found_by_offset(open_store: OpenStore) -> None:
    store = open_store()
    places = put(store, 10)
    store.dispatch()
    for number in (0, 9):
        found = store.reading.record_at(places[number])
        assert found is not None
        assert decode_records(found)[0].body == b"body %d" % number
    assert store.reading.record_at(store.engine.written) is None


# By time


def test_offset_is_found_by_store_time(open_store: OpenStore) -> None:
    """Search the exact time of each message, 2 ms before it, and 20 s before all.

    RocketMQ gives the same answers.
    """
    store = open_store()
    put(store, 10)
    store.dispatch()
    for offset_at in (store.reading.offset_at, store.reading.offset_in_queue_by_time):
        for number in range(10):
            assert finish(offset_at("T", 0, FIRST_MS + 10 * number)) == number
            assert finish(offset_at("T", 0, FIRST_MS + 10 * number - 2)) == number
        assert finish(offset_at("T", 0, FIRST_MS - 20_000)) == 0
        assert finish(offset_at(*NOWHERE, FIRST_MS)) == 0


def test_store_time_is_known_for_each_message(open_store: OpenStore) -> None:
    store = open_store()
    places = put(store, 10)
    store.dispatch()
    assert [store.reading.store_time_ms("T", 0, number) for number in range(10)] == [
        FIRST_MS + 10 * number for number in range(10)
    ]
    assert store.reading.store_time_ms("T", 0, -1) == -1
    assert store.reading.store_time_ms("T", 0, 10) == -1
    assert store.reading.store_time_ms(*NOWHERE, 0) == -1
    # Below the log's minimum.
    store.engine.words[words_of.MIN_PHYSICAL_OFFSET] = places[1]
    assert store.reading.records.store_timestamp_ms(places[0]) == -1
    assert store.reading.records.store_timestamp_ms(places[1]) == FIRST_MS + 10


# By count and size


@pytest.mark.parametrize("count", [32, 20, 10])
def test_pull_returns_as_many_as_requested(open_store: OpenStore, count: int) -> None:
    store = open_store()
    put(store, 32)
    store.dispatch()
    for pulled in (pull(store, 0, count), store.reading.get_message("T", 0, 0, count, EVERYTHING)):
        assert (pulled.status, pulled.count, pulled.next_offset) == (PullStatus.FOUND, count, count)
        assert len(decode_records(pulled.records)) == count


def test_large_bodies_are_read_across_files(open_store: OpenStore) -> None:
    """Ten bodies of 2 MiB in segments of 5 MiB."""
    store = open_store(mapped_file_size_commit_log=5 * MIB, max_message_size=4 * MIB, max_pull_bytes=64 * MIB)
    bodies = [bytes([number]) * (2 * MIB) for number in range(10)]
    for body in bodies:
        store.append("T", [body], queues=1)
    assert store.engine.written > 4 * 5 * MIB
    store.dispatch()
    assert [message.body for message in store.messages("T")] == bodies
    assert [message.body for message in decode_records(pull(store).records)] == bodies


def test_pull_result_has_record_sizes(open_store: OpenStore) -> None:
    """Three records of 4, 8 and 16 KiB: 28 KiB in total."""
    store = open_store(enabled_append_prop_crc=False)
    sizes = [4 << 10, 8 << 10, 16 << 10]
    for size in sizes:
        store.append("T", [bytes(size - record.FIXED_SIZE_V4 - 1)], queues=1)
    store.dispatch()
    pulled = pull(store)
    assert (pulled.count, len(pulled.records)) == (3, 28 << 10)
    assert [message.size for message in decode_records(pulled.records)] == sizes


def test_count_is_exact(open_store: OpenStore) -> None:
    """An empty queue counts 0; larger counts are exact, not estimated from a sample."""
    store = open_store(mapped_file_size_commit_log=8 * MIB)
    store.engine.table.create_queue("T", 0)
    assert finish(store.reading.count("T")) == 0
    for frame in range(3):
        tags = ["even", "odd"] * 5000
        store.append("T", [b"x"] * 10_000, FIRST_MS + frame, queues=1, tags=tags)
    store.dispatch()
    assert finish(store.reading.count("T")) == 30_000
    assert finish(store.reading.count("T", FIRST_MS + 1, FIRST_MS + 2)) == 10_000
    assert finish(store.reading.count("T", tags=["odd"])) == 15_000
    assert finish(store.reading.count("T", tags=["none"])) == 0


# Visibility


@pytest.mark.parametrize("flush_disk_type", list(FlushDiskType))
def test_sync_flush_hides_messages_not_durable(tmp_path: Path, flush_disk_type: FlushDiskType) -> None:
    """Ten messages of 1,580 bytes are written but not flushed.

    The queue's maximum is 0 under SYNC_FLUSH, and 10 under ASYNC_FLUSH.
    """
    options = {
        "flush_disk_type": flush_disk_type,
        "enabled_append_prop_crc": False,
        "mapped_file_size_commit_log": 65536,
    }
    rig = Rig(tmp_path, **options)
    store = LiveStore(tmp_path, words=rig.control.words, **options)
    rig.options = store.options
    dispatcher = Dispatcher(rig.context(words_of.DISPATCHER))
    store.append("T", [bytes(158 - record.FIXED_SIZE_V4 - 1)] * 10, queues=1)
    assert store.engine.written == 1580
    dispatcher.do_work()
    if flush_disk_type is FlushDiskType.SYNC_FLUSH:
        pulled = pull(store)
        assert (pulled.status, pulled.max_offset) == (PullStatus.NO_MESSAGE_IN_QUEUE, 0)
        store.engine.appender.sync()
        dispatcher.do_work()
    pulled = pull(store)
    assert (pulled.count, pulled.max_offset) == (10, 10)
    dispatcher.close()
    store.close()


def test_queue_maximum_follows_dispatch_next_offset_the_log(open_store: OpenStore) -> None:
    """Three messages dispatched, two only appended: consumers see 3, the next message gets 5."""
    store = open_store()
    put(store, 3)
    store.dispatch()
    number = store.engine.table.find("T", 0)
    assert store.engine.table.max_offset(number) == store.engine.table.next_offset(number) == 3
    put(store, 2)
    assert pull(store).max_offset == store.engine.table.max_offset(number) == 3
    assert store.engine.table.next_offset(number) == 5
    assert pull(store, 3).status is PullStatus.OFFSET_OVERFLOW_ONE
