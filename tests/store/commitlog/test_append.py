"""The appender: record bytes, publication order, segment ends, batches and rollback."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from mqproc.errors import (
    BadMessageError,
    BadPropertyError,
    DiskFullError,
    MessageTooLargeError,
    MqprocError,
    NoSuchQueueError,
)
from mqproc.io.store_io import StoreIO
from mqproc.layout import control as words_of
from mqproc.layout import queue_table as table_layout
from mqproc.layout import record
from tests.support.store_builders import Engine

VECTOR = bytes.fromhex(
    "0000007bdaa320a73610a68600000003000000070000000000000005000000000000000000000000"
    "0000018bcfe568007f000001000013880000018bcfe56801c0a8010200002a9f0000000000000000"
    "000000000000000568656c6c6f09546f7069635465737400124b455953016b31025441475301546167"
    "4102"
)


def test_append_record_has_rocketmqs_bytes(tmp_path: Path) -> None:
    """The vector orders KEYS before TAGS, so the properties are a constant part."""
    engine = Engine(tmp_path, enabled_append_prop_crc=False)
    number = engine.table.create_queue("TopicTest", 3)
    engine.table.store(number, table_layout.NEXT_OFFSET, 5)
    engine.appender.read_next_offsets()
    properties = b"KEYS\x01k1\x02TAGS\x01TagA\x02"
    plan_changes = {"fixed_queue": 3, "flag": 7, "parts": (properties, b"", b"", b"")}
    engine.append("TopicTest", [b"hello"], **plan_changes)
    assert engine.log_bytes(0, 123) == VECTOR


def test_append_publishes_positions_in_order(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.appender.add(engine.plan("T", [b"a" * 100] * 8), 5)
    assert engine.written == 0
    assert engine.words[words_of.RESERVED_END] == 0
    engine.appender.write_out()
    assert engine.words[words_of.RESERVED_END] == engine.appender.end
    assert engine.written == 0
    engine.appender.publish()
    assert engine.written == engine.words[words_of.TABLE_AT] == engine.appender.end
    assert [engine.table.next_offset(number) for number in range(4)] == [2, 2, 2, 2]


def test_append_queue_rotation_continues_across_frames(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    plan = engine.plan("T", [b"x"] * 3)
    engine.appender.add(plan, 1)
    assert plan.rotation == 3
    answer = engine.appender.add(engine.plan("T", [b"y"] * 2, rotation=plan.rotation), 1)
    assert answer[32:].view(np.int32).tolist() == [3, 0]


def test_append_full_segment_ends_with_a_blank(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    offsets = engine.append("T", [b"b" * 1000] * 100)
    size = engine.segments.segment_size
    first_of_second = int(offsets[offsets >= size][0])
    assert first_of_second == size
    last_of_first = int(offsets[offsets < size][-1])
    total = int.from_bytes(engine.log_bytes(last_of_first, last_of_first + 4), "big")
    blank = engine.log_bytes(last_of_first + total, last_of_first + total + 8)
    assert int.from_bytes(blank[:4], "big") == size - last_of_first - total
    assert int.from_bytes(blank[4:], "big", signed=True) == record.MAGIC_BLANK


@pytest.mark.parametrize("room_after", [8, 9, 7])
def test_append_record_leaves_room_for_a_blank(tmp_path: Path, room_after: int) -> None:
    engine = Engine(tmp_path, enabled_append_prop_crc=False)
    size = engine.segments.segment_size
    overhead = record.FIXED_SIZE_V4 + len("T")
    engine.append("T", [b"x" * 30000] * 2)
    left = size - engine.written
    (offset,) = engine.append("T", [b"y" * (left - overhead - room_after)])
    assert (offset == size) == (room_after < record.BLANK_SIZE)


def test_append_batch_stays_in_one_segment(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.append("T", [b"x" * 30000] * 2)
    offsets = engine.append("T", [b"y" * 10000] * 3, batch=True)
    assert offsets[0] == engine.segments.segment_size
    # 1,000 empty bodies: headers, topic and CRC.
    with pytest.raises(MessageTooLargeError, match="batch of 112,000 bytes; a segment takes 65,536"):
        engine.append("T", [b""] * 1000, batch=True)


def test_append_invalid_frame_raises_and_changes_nothing(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    with pytest.raises(MessageTooLargeError, match="message 1: body of 32,769 bytes; max_message_size is 32,768"):
        engine.append("T", [b"", b"x" * 32769])
    with pytest.raises(BadPropertyError, match="KEYS"):
        engine.append("T", [b"x"], keys=["a\x01b"])
    with pytest.raises(BadPropertyError, match="TAGS"):
        engine.append("T", [b"x"], tags=["\x02"])
    plan = engine.plan("T", [b"x", b"y"])
    plan.payload[0] = 200
    with pytest.raises(BadMessageError, match="columns"):
        engine.appender.add(plan, 1)
    bad_queue = engine.plan("T", [b"x"], fixed_queue=-2)
    queue_column = np.frombuffer(bytearray((9).to_bytes(4, "little")), np.uint8)
    at = len(bad_queue.payload)
    bad_queue.payload = np.concatenate([bad_queue.payload, queue_column])
    bad_queue.columns = (*bad_queue.columns[:9], at, *bad_queue.columns[10:])
    with pytest.raises(NoSuchQueueError, match="queue id 9; topic has 4 queues"):
        engine.appender.add(bad_queue, 1)
    assert engine.appender.end == engine.written == 0
    assert engine.append("T", [b"z"]).tolist() == [0]


def test_append_without_next_segment_is_rolled_back(tmp_path: Path) -> None:
    engine = Engine(tmp_path, segments_max=1)
    engine.append("T", [b"first"])
    end = engine.written
    with pytest.raises((MqprocError, OSError)):
        engine.append("T", [b"x" * 1000] * 200)
    assert engine.written == engine.words[words_of.RESERVED_END] == engine.appender.end == end
    assert not any(engine.log_bytes(end, engine.segments.segment_size))
    assert engine.append("T", [b"second"], fixed_queue=0).tolist() == [end]
    assert engine.table.next_offset(0) == 2


class FullDiskIO(StoreIO):
    """Fails writes after `writes_left` more."""

    writes_left = 1 << 30

    def pwrite(self, fd: int, data: object, offset: int) -> None:
        self.writes_left -= 1
        if self.writes_left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().pwrite(fd, data, offset)  # type: ignore[arg-type]


def test_append_full_disk_raises_until_there_is_room(tmp_path: Path) -> None:
    io = FullDiskIO()
    engine = Engine(tmp_path, io=io)
    engine.append("T", [b"first"])
    end = engine.written
    io.writes_left = 0
    with pytest.raises(DiskFullError):
        engine.append("T", [b"second"])
    assert engine.written == engine.appender.end == end
    io.writes_left = 1 << 30
    assert engine.append("T", [b"third"]).tolist() == [end]


def test_append_frame_larger_than_staging_buffer_is_split(tmp_path: Path) -> None:
    engine = Engine(tmp_path, mapped_file_size_commit_log=8 << 20)
    bodies = [bytes([n % 251]) * 30000 for n in range(100)]
    offsets = engine.append("T", bodies)
    for body, offset in zip(bodies, offsets.tolist(), strict=True):
        assert engine.log_bytes(offset + record.BODY, offset + record.BODY + len(body)) == body


def test_append_copies_may_exceed_the_message_limit(tmp_path: Path) -> None:
    """Stored messages can still be delivered and retried after the limit is lowered."""
    engine = Engine(tmp_path, mapped_file_size_commit_log=8 << 20)
    body = bytes(range(256)) * (3 << 12)
    engine.append("T", [b"staged before"])
    with pytest.raises(MessageTooLargeError):
        engine.append("T", [body])
    for _ in range(2):
        (offset,) = engine.append("T", [body], copies=True).tolist()
        assert engine.log_bytes(offset + record.BODY, offset + record.BODY + len(body)) == body
    with pytest.raises(MessageTooLargeError):
        engine.append("T", [body])
    with pytest.raises(MessageTooLargeError, match="a segment takes 8,388,600"):
        engine.append("T", [bytes(8 << 20)], copies=True)


def test_sync_advances_the_writers_position(tmp_path: Path) -> None:
    engine = Engine(tmp_path, flush_disk_type="SYNC_FLUSH")
    engine.append("T", [b"x" * 1000] * 100)
    assert engine.words[words_of.WRITER_SYNCED] == 0
    engine.appender.sync()
    assert engine.words[words_of.WRITER_SYNCED] == engine.written
