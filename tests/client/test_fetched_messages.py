"""Messages of one answer, taken in steps, whether an array or records."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqproc.client.messages import FetchedMessages
from mqproc.errors import CorruptStoreError, ProtocolError
from mqproc.kernels.pack import packed
from mqproc.layout.record_codec import decode_records, messages_of
from tests.support.records import encode_record

RECORD = encode_record(topic="orders", body=b"body")


@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), max_size=12),
    st.booleans(),
)
def test_messages_are_taken_in_steps_and_again(count: int, steps: list[tuple[int, int]], as_array: bool) -> None:
    data = b"".join(encode_record(topic="orders", body=b"%d" % at, queue_offset=2 * at) for at in range(count))
    payload = packed([memoryview(data)], 1 << 20) if as_array else memoryview(data)
    assert payload is not None
    fetched, at = FetchedMessages(payload, count), 0
    for most, kept in steps:
        messages = fetched.take(most)
        assert [message.queue_offset for message in messages] == list(range(2 * at, 2 * min(at + most, count), 2))
        if kept < len(messages):
            fetched.go_to(2 * (at + kept) - 1)
            messages = messages[:kept]
        at += len(messages)
        assert len(fetched) == count - at
        if at < count:
            assert fetched.next_queue_offset == 2 * at
    assert fetched.take(count + 1) == decode_records(data)[at:]
    assert fetched.take(1) == []


def test_memory_of_the_answer_may_be_used_again() -> None:
    memory = bytearray(RECORD)
    fetched = FetchedMessages(memoryview(memory), 1)
    memory[:] = bytes(len(memory))
    assert fetched.take(1) == decode_records(RECORD)


def test_invalid_messages_are_reported_each_time() -> None:
    assert messages_of(b"") == []
    for wrong in (RECORD[:-1], RECORD + b"x", RECORD + RECORD[:50], bytes(100), b"\0\0\0\5" + RECORD[4:]):
        fetched = FetchedMessages(memoryview(wrong), 1)
        for _ in range(2):
            with pytest.raises(CorruptStoreError, match="no record at byte"):
                fetched.take(1)
    with pytest.raises(ProtocolError, match="an answer of 2 messages has 1"):
        FetchedMessages(memoryview(RECORD), 2).take(1)
