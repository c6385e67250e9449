"""Copying records of selected topics and times; moved records keep valid CRCs."""

from __future__ import annotations

import numpy as np
import pytest

from mqproc.kernels import log_match
from mqproc.kernels.jit.compile import plain
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.layout.record_codec import decode_records
from mqproc.store.consumequeue.table import QueueTable
from tests.support.records import BASE, SmallLog, check_record, small_log


@pytest.fixture(scope="module")
def log() -> SmallLog:
    return small_log(count=60)


def table_of(topics: list[str]) -> QueueTable:
    table = QueueTable.in_memory(16)
    for topic in topics:
        table.create_queue(topic, log_match.CHOSEN_QUEUE)
    return table


def selected(
    log: SmallLog,
    topics: list[str],
    *,
    room: int = 1 << 20,
    begin_ms: int = 0,
    end_ms: int = 1 << 62,
    deleted: QueueTable | None = None,
) -> tuple[bytes, list[int], bool, int]:
    """(records, counts by topic, whether they fit, end); the plain twin must return the same."""
    found = []
    chosen, gone = table_of(topics), deleted or QueueTable.in_memory(16)
    for kernel in (log_match.select_records, plain(log_match.select_records)):
        state = np.zeros(log_match.STATE_SIZE, np.int64)
        state[log_match.STOP], state[log_match.BASE] = log.end, BASE
        state[log_match.BEGIN_MS], state[log_match.END_MS] = begin_ms, end_ms
        out, counts = np.zeros(room, np.uint8), np.zeros(len(topics), np.int64)
        enough = kernel(
            as_kernel_array(bytearray(log.segment)), chosen.bytes_view, chosen.cells, chosen.slots,
            gone.bytes_view, gone.cells, gone.slots, out, counts, state,
        )  # fmt: skip
        data = out[: state[log_match.FILLED]].tobytes()
        found.append((data, counts.tolist(), bool(enough), int(state[log_match.AT])))
    assert found[0] == found[1]
    return found[0]


def test_chosen_topics_are_copied_in_order(log: SmallLog) -> None:
    everything = decode_records(log.records)
    for topics in (["Orders"], ["Pay", "T" * 200], ["Orders", "Pay", "T" * 200], ["Nobody"]):
        data, counts, enough, at = selected(log, topics)
        expected = [message for message in everything if message.topic in topics]
        assert decode_records(data) == expected
        assert counts == [sum(message.topic == topic for message in everything) for topic in topics]
        assert (enough, at) == (True, log.end)


def test_time_bounds_limit_records(log: SmallLog) -> None:
    data, _counts, _enough, _at = selected(log, ["Orders"], begin_ms=2_000_010, end_ms=2_000_020)
    times = [message.store_timestamp_ms for message in decode_records(data)]
    assert times == [2_000_012, 2_000_014, 2_000_016, 2_000_018]


def test_full_buffer_excludes_record_that_does_not_fit(log: SmallLog) -> None:
    whole = selected(log, ["Orders"])[0]
    sizes = [message.size for message in decode_records(whole)]
    room = sum(sizes[:5]) + sizes[5] - 1
    data, counts, enough, at = selected(log, ["Orders"], room=room)
    assert (len(data), counts, enough) == (sum(sizes[:5]), [5], False)
    assert at == decode_records(whole)[5].physical_offset - BASE


def test_records_of_deleted_queue_are_excluded(log: SmallLog) -> None:
    deleted = QueueTable.in_memory(16)
    border = log.places[30][0]
    deleted.remember_deletion("Orders", 0, BASE + border, 1 << 40)
    kept = decode_records(selected(log, ["Orders"], deleted=deleted)[0])
    expected = [
        message
        for message in decode_records(log.records)
        if message.topic == "Orders" and not (message.queue_id == 0 and message.physical_offset < BASE + border)
    ]
    assert kept == expected


@pytest.mark.parametrize("room", [1 << 30, 5000, 700])
def test_moved_records_change_only_their_position(log: SmallLog, room: int) -> None:
    found = []
    for kernel in (log_match.relocate_records, plain(log_match.relocate_records)):
        records = as_kernel_array(bytearray(log.records))
        end = int(kernel(records, 0, len(records), 1_000_000, room))
        found.append((records.tobytes(), end))
    assert found[0] == found[1]
    data, end = found[0]
    before, after = decode_records(log.records), decode_records(data[:end])
    assert end + 8 <= room or end == len(data)
    assert end == len(data) or end + before[len(after)].size + 8 > room
    place = 1_000_000
    for old, new in zip(before, after, strict=False):
        assert new.physical_offset == place
        assert (new.topic, new.queue_offset, new.body, new.keys) == (old.topic, old.queue_offset, old.body, old.keys)
        with_crc = "__CRC32#" in data[place - 1_000_000 :][: new.size].decode("latin-1")
        check = check_record(data, place - 1_000_000, check_property_crc=with_crc)
        assert (check.size, check.success) == (new.size, True)
        place += new.size


def test_each_kernel_is_compiled_once() -> None:
    log_match.warm()
    for kernel in (log_match.select_records, log_match.relocate_records):
        assert len(getattr(kernel, "signatures", [0])) == 1
