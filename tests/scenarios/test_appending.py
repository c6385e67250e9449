"""Appends to the log: batches at a segment's end, records' own CRC, sizes at the limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mqproc.errors import BadTopicError, CorruptStoreError, MessageTooLargeError, PropertiesTooLargeError
from mqproc.layout import record
from mqproc.layout.record_codec import decode_message_id, host_bytes
from mqproc.store.cooperative import finish
from mqproc.topic_names import check_topic
from mqproc.types import BatchResult, PullStatus
from mqproc.util.units import MIB
from tests.support.records import check_record, encode_message_id
from tests.support.store_builders import BORN_HOST, EVERYTHING, STORE_HOST, LiveStore

V4 = (BORN_HOST, STORE_HOST)
V6 = (host_bytes("2001:db8::7", 5000), host_bytes("2001:db8::1:0:0:9", 10911))
HOSTS = pytest.mark.parametrize("hosts", [V4, V6], ids=["IPv4", "IPv6"])
BODY_MAX = 4 * MIB
MakeStore = Callable[..., LiveStore]


@pytest.fixture
def make_store(tmp_path: Path) -> Iterator[MakeStore]:
    """Create stores below `tmp_path` whose records have these `hosts`."""
    made: list[LiveStore] = []

    def make(hosts: tuple[bytes, bytes] = V4, **options: Any) -> LiveStore:
        made.append(LiveStore(tmp_path / f"store{len(made)}", **options))
        made[-1].engine.appender.store_host = hosts[1]
        return made[-1]

    yield make
    for store in made:
        store.close()


def put_ten(store: LiveStore, hosts: tuple[bytes, bytes], *, batch: bool = True) -> BatchResult:
    """Append ten messages with bodies of four bytes and a tag to one queue in one frame."""
    bodies = [b"b%03d" % number for number in range(10)]
    return store.append(
        "test-topic", bodies, tags=["abc"] * 10, queues=1, fixed_queue=0, batch=batch, born_host=hosts[0]
    )


def leave(store: LiveStore, left: int) -> int:
    """Fill the segment until this many bytes are left; return where they begin."""
    size = store.engine.segments.segment_size
    host_extra = len(store.engine.appender.store_host) - record.HOST_V4_SIZE
    body = size - left - store.engine.written - record.FIXED_SIZE_V4 - host_extra - len("filler")
    store.append("filler", [bytes(body)])
    assert size - store.engine.written == left
    return size - left


@HOSTS
def test_batch_that_does_not_fit_writes_only_eight_byte_blank(
    make_store: MakeStore, hosts: tuple[bytes, bytes]
) -> None:
    """A batch larger than the remaining 1,000 bytes starts the next segment.

    The rest of the old segment is a BLANK of size 1,000, of which eight bytes are written. Queue offsets begin at 0.
    """
    store = make_store(hosts, mapped_file_size_commit_log=4096, enabled_append_prop_crc=False)
    end = leave(store, 1000)
    store.overwrite(end, b"\xaa" * 1000)
    before = store.engine.written
    told = put_ten(store, hosts)
    assert told.physical_offsets[0] == 4096 == before + 1000
    assert told.queue_offsets.tolist() == list(range(10))
    blank = (1000).to_bytes(4, "big") + (record.MAGIC_BLANK & 0xFFFFFFFF).to_bytes(4, "big")
    assert store.engine.log_bytes(end, 4096) == blank + b"\xaa" * 992
    store.dispatch()
    assert [message.body for message in store.messages("test-topic")] == [b"b%03d" % number for number in range(10)]


@HOSTS
def test_batch_is_contiguous_with_one_store_time(make_store: MakeStore, hosts: tuple[bytes, bytes]) -> None:
    """10 KiB are left: ten messages with ten ids of 32 or 56 characters and consecutive offsets."""
    store = make_store(hosts, mapped_file_size_commit_log=10 << 10)
    told = put_ten(store, hosts)
    assert len(told) == 10
    assert told.queue_offsets.tolist() == list(range(10))
    ids = [encode_message_id(hosts[1], int(offset)) for offset in told.physical_offsets]
    assert len(set(ids)) == 10
    assert {len(message_id) for message_id in ids} == {32 if hosts is V4 else 56}
    store.dispatch()
    found = store.messages("test-topic")
    assert [message.message_id for message in found] == ids
    assert {message.store_timestamp_ms for message in found} == {told.store_timestamp_ms}
    ends = [message.physical_offset + message.size for message in found]
    assert [message.physical_offset for message in found] == [0, *ends[:-1]]
    assert store.engine.written == ends[-1] < 10 << 10


@pytest.mark.parametrize("batch", [False, True], ids=["singles", "batch"])
def test_changed_property_byte_breaks_record_crc(make_store: MakeStore, batch: bool) -> None:
    store = make_store(enabled_append_prop_crc=True)
    if batch:
        told = [put_ten(store, V4)]
    else:
        told = [store.append("test-topic", [b"body"], tags=["abc"], queues=1) for _number in range(10)]
    store.dispatch()
    offsets = [int(offset) for frame in told for offset in frame.physical_offsets]
    ends = [*offsets[1:], store.engine.written]
    records = [store.engine.log_bytes(offset, end) for offset, end in zip(offsets, ends, strict=True)]
    assert len(records) == 10
    assert all(check_record(data, check_property_crc=True).success for data in records)
    assert len(store.messages("test-topic")) == 10

    properties = records[9].index(b"TAGS\x01")
    store.overwrite(offsets[9] + (properties + len(records[9])) // 2, b"?")
    changed = store.engine.log_bytes(offsets[9], ends[9])
    assert not check_record(changed, check_property_crc=True).success
    assert len(store.messages("test-topic")) == 9
    assert store.reading.pull("test-topic", 0, 9, 1, EVERYTHING).status is PullStatus.CORRUPT
    with pytest.raises(CorruptStoreError, match=rf"record \[{offsets[9]}, {ends[9]}\)"):
        store.reading.record_at(offsets[9])


@HOSTS
def test_batch_messages_are_read_by_offset_and_id(make_store: MakeStore, hosts: tuple[bytes, bytes]) -> None:
    store = make_store(hosts)
    put_ten(store, hosts)
    told = put_ten(store, hosts)
    store.dispatch()
    for number, (queue_offset, physical_offset) in enumerate(
        zip(told.queue_offsets.tolist(), told.physical_offsets.tolist(), strict=True)
    ):
        (message,) = store.messages("test-topic", 0, queue_offset, 1)
        assert message.body == b"b%03d" % number
        assert decode_message_id(message.message_id) == (hosts[1], physical_offset)
        found = finish(store.reading.get(message.message_id)).tobytes()
        assert found == store.engine.log_bytes(physical_offset, physical_offset + message.size)


# Limits


def properties_of(size: int) -> tuple[bytes, bytes, bytes, bytes]:
    """Constant properties of this many bytes."""
    return b"k\x01" + b"v" * (size - 3) + b"\x02", b"", b"", b""


@pytest.fixture
def large(make_store: MakeStore) -> LiveStore:
    return make_store(mapped_file_size_commit_log=16 * MIB, max_message_size=BODY_MAX, enabled_append_prop_crc=False)


def test_largest_message_is_stored(large: LiveStore) -> None:
    """One record with a body of 4 MiB, a topic of 127 bytes and properties of 32,767 bytes."""
    topic = "t" * 127
    check_topic(topic)
    told = large.append(topic, [b"b" * BODY_MAX], queues=1, parts=properties_of(32767))
    large.dispatch()
    (message,) = large.messages(topic)
    assert message.physical_offset == told.physical_offsets[0]
    assert message.body == b"b" * BODY_MAX
    assert message.properties == {"k": "v" * (32767 - 3)}
    assert message.size == record.FIXED_SIZE_V4 + BODY_MAX + 127 + 32767


@pytest.mark.parametrize("beyond", [1, 64 << 10])
def test_body_above_limit_is_refused(large: LiveStore, beyond: int) -> None:
    with pytest.raises(MessageTooLargeError, match=f"body of {BODY_MAX + beyond:,} bytes"):
        large.append("t" * 127, [bytes(BODY_MAX + beyond)], parts=properties_of(32767))
    assert large.engine.written == 0


def test_properties_above_limit_are_refused(large: LiveStore) -> None:
    with pytest.raises(PropertiesTooLargeError, match="properties of 32,768 bytes; the limit is 32,767"):
        large.append("t" * 127, [bytes(BODY_MAX)], parts=properties_of(32768))
    assert large.engine.written == 0


def test_topic_of_32767_bytes_is_refused() -> None:
    with pytest.raises(BadTopicError, match="topic of 32767 bytes exceeds 127"):
        check_topic("t" * 32767)


def test_batch_with_body_above_limit_is_refused_whole(large: LiveStore) -> None:
    halves = [bytes(BODY_MAX // 2), bytes(BODY_MAX // 2)]
    assert len(large.append("T", halves, batch=True)) == 2
    end = large.engine.written
    with pytest.raises(
        MessageTooLargeError, match="batch with bodies of 4,194,305 bytes; max_message_size is 4,194,304"
    ):
        large.append("T", [*halves, b"x"], batch=True)
    assert large.engine.written == end
    # Messages that need not be contiguous may exceed the limit together.
    assert len(large.append("T", [*halves, b"x"])) == 3


def test_max_message_size_can_change_under_load(large: LiveStore) -> None:
    """The limit is raised by ten bytes, then lowered to ten, without a restart."""
    body = bytes(BODY_MAX + 10)

    def limit(size: int) -> None:
        large.engine.appender.set_options(dataclasses.replace(large.options, max_message_size=size))

    with pytest.raises(MessageTooLargeError):
        large.append("T", [body])
    limit(BODY_MAX + 10)
    large.append("T", [body], queues=1)
    limit(10)
    with pytest.raises(MessageTooLargeError, match="body of 11 bytes; max_message_size is 10"):
        large.append("T", [bytes(11)], queues=1)
    large.append("T", [bytes(10)], queues=1)
    large.dispatch()
    assert [len(message.body) for message in large.messages("T")] == [BODY_MAX + 10, 10]
