"""Lazily decoded messages equal messages that are decoded at once."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqproc.errors import CorruptStoreError
from mqproc.layout.record_codec import RecordNames, UnreadRecords, decode_records, host_bytes, lazy_records
from mqproc.types import StoredMessage
from tests.support.records import encode_record

FIELDS = [field.name for field in dataclasses.fields(StoredMessage)]
HOSTS = [host_bytes("127.0.0.1", 10911), host_bytes("2001:db8::1", 1)]
TEXT = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF), max_size=12)


@st.composite
def records(draw: st.DrawFn) -> bytes:
    pairs = draw(st.dictionaries(st.sampled_from(["KEYS", "TAGS", "UNIQ_KEY", "colour"]), TEXT))
    return encode_record(
        topic=draw(st.sampled_from(["a", "orders", "t" * 130])),
        body=draw(st.binary(max_size=60)),
        properties="".join(f"{name}\x01{value}\x02" for name, value in pairs.items()),
        queue_id=draw(st.integers(0, 9)),
        flag=draw(st.integers(-5, 5)),
        queue_offset=draw(st.integers(0, 1 << 40)),
        physical_offset=draw(st.integers(0, 1 << 50)),
        born_timestamp_ms=draw(st.integers(0, 1 << 42)),
        born_host=draw(st.sampled_from(HOSTS)),
        store_timestamp_ms=draw(st.integers(0, 1 << 42)),
        store_host=draw(st.sampled_from(HOSTS)),
        reconsume_times=draw(st.integers(0, 16)),
        append_crc=draw(st.booleans()),
    )


@given(st.lists(records(), max_size=4), st.permutations(FIELDS))
def test_fields_are_equal_in_any_order_of_access(parts: list[bytes], order: list[str]) -> None:
    data = b"".join(parts)
    for eager, lazy in zip(decode_records(data), lazy_records(memoryview(data)), strict=True):
        for name in order:
            assert getattr(lazy, name) == getattr(eager, name), name
        assert (lazy, repr(lazy), lazy.to_json()) == (eager, repr(eager), eager.to_json())


def one(**fields: object) -> StoredMessage:
    properties = "TAGS\x01new\x02KEYS\x01k1 k2\x02"
    data = encode_record(topic="orders", body=b"body", properties=properties, queue_offset=7, **fields)  # type: ignore[arg-type]
    (message,) = lazy_records(data)
    return message


def test_lazy_message_behaves_like_eager_message() -> None:
    eager = dataclasses.replace(one())
    assert type(one()) is StoredMessage
    assert one() == eager
    assert eager == one()
    assert pickle.loads(pickle.dumps(one())) == eager
    assert copy.copy(one()) == copy.deepcopy(one()) == eager
    assert dataclasses.asdict(one()) == dataclasses.asdict(eager)
    assert dataclasses.replace(one(), tag="old").keys == ("k1", "k2")
    with pytest.raises(dataclasses.FrozenInstanceError):
        one().body = b""  # type: ignore[misc]
    with pytest.raises(AttributeError, match="'StoredMessage' object has no attribute 'bodies'"):
        one().bodies  # type: ignore[attr-defined]  # noqa: B018


def test_concurrent_access_is_safe() -> None:
    messages = [one() for _ in range(300)]
    wrong: list[object] = []

    def look(names: list[str]) -> None:
        for message in messages:
            found = [getattr(message, name) for name in names]
            if found != [getattr(expected, name) for name in names]:
                wrong.append(found)

    expected = one()
    threads = [threading.Thread(target=look, args=(FIELDS[::step],)) for step in (1, -1, 1, -1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert wrong == []


def test_host_id_is_set_before_its_text() -> None:
    """Another thread that finds the host's text expects its id to be present."""
    names = RecordNames()

    class Hosts(dict[bytes, str]):
        def __setitem__(self, host: bytes, text: str) -> None:
            assert host in names.ids
            super().__setitem__(host, text)

    names.hosts = Hosts()
    assert names.add_host(bytes([10, 0, 0, 1, 0, 0, 0x2A, 0x9F])) == "10.0.0.1:10911"


def test_invalid_records_are_rejected() -> None:
    data = encode_record(topic="orders", body=b"body", properties="a\x01b\x02")
    assert lazy_records(b"") == []
    for wrong in (data[:-1], data + b"x", data + data[:50], bytes(100), b"\x00\x00\x00\x05" + data[4:]):
        with pytest.raises(CorruptStoreError, match="no record at byte"):
            lazy_records(wrong)


@given(st.integers(0, 9), st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), max_size=12))
def test_records_are_read_in_steps_and_put_back(count: int, steps: list[tuple[int, int]]) -> None:
    data = b"".join(encode_record(topic="orders", body=b"%d" % at, queue_offset=2 * at) for at in range(count))
    unread, at = UnreadRecords(memoryview(data), count), 0
    for most, kept in steps:
        messages = unread.take(most)
        assert [message.queue_offset for message in messages] == list(range(2 * at, 2 * min(at + most, count), 2))
        if kept < len(messages):
            unread.put_back(2 * (at + kept) - 1)
            messages = messages[:kept]
        at += len(messages)
        assert len(unread) == count - at
        if at < count:
            assert unread.next_queue_offset == 2 * at
    assert unread.take(count + 1) == lazy_records(data)[at:]
    assert unread.take(1) == []


def test_unread_invalid_records_are_rejected() -> None:
    data = encode_record(topic="orders", body=b"body")
    for wrong, count, whole in ((data[:-1], 1, 0), (data + b"x", 2, 1), (data, 2, 1), (data + data, 1, 1), (b"", 1, 0)):
        unread = UnreadRecords(wrong, count)
        if whole:
            assert len(unread.take(3)) == whole
        with pytest.raises(CorruptStoreError, match="no record at byte"):
            unread.take(3)
    with pytest.raises(CorruptStoreError, match="no record at byte 0 of 3"):
        UnreadRecords(b"abc", 1).next_queue_offset  # noqa: B018


def test_unreadable_field_error_names_message() -> None:
    data = bytearray(encode_record(topic="orders", body=b"body", physical_offset=4711))
    data[4:8] = b"\x01\x02\x03\x04"
    (message,) = lazy_records(data)
    assert message.body == b"body"
    with pytest.raises(CorruptStoreError, match="topic of the record at 4711"):
        message.topic  # noqa: B018
