"""Messages in MessagePack as columns, against the columns that clients make; damaged bytes."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqproc.client.encoding import encode_messages, is_plain
from mqproc.errors import BadMessageError
from mqproc.kernels import append_messages as kernel
from mqproc.kernels.jit.compile import plain
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.roles.writer.append_plan import ColumnWriter
from mqproc.types import Message
from mqproc.wire.operations import AppendRequest
from tests.client.memory_roles import Row, read_append

encode = msgspec.msgpack.Encoder().encode
TEXTS = st.text(st.characters(exclude_categories=("Cs", "Cc", "Z")), max_size=40)
LONG = st.sampled_from(["", "a", "é" * 31, "x" * 32, "y" * 255, "z" * 256, "w" * 3000])
KEYS = st.lists((TEXTS | LONG).filter(bool), max_size=4).map(tuple)
BODIES = st.binary(max_size=300) | st.sampled_from([b"", bytes(255), bytes(256), bytes(65_535), bytes(65_536)])
INT32S = st.integers(-1 << 31, (1 << 31) - 1) | st.sampled_from([0, -1, 127, 128, 255, 256, 65_535, 65_536])
INT64S = st.integers(-1 << 63, (1 << 63) - 1)


@st.composite
def plain_messages(draw: Any) -> list[Message]:
    """Messages of one frame: all or none with a queue; sharding keys without queues."""
    has_queue = draw(st.booleans())
    return [
        Message(
            "topic",
            draw(BODIES),
            draw(st.sampled_from(["", "tag", "é" * 20, "t" * 300])),
            draw(KEYS),
            queue_id=draw(st.integers(0, (1 << 31) - 1)) if has_queue else None,
            flag=draw(st.just(0) | INT32S),
            born_timestamp_ms=draw(st.none() | INT64S),
            sharding_key="" if has_queue else draw(TEXTS),
        )
        for _ in range(draw(st.integers(1, 20)))
    ]


def rows_of(messages: list[Message], columns: ColumnWriter) -> tuple[list[Row], list[Row]]:
    """The rows of a frame of columns, and those that the writer makes of the messages."""
    frame = encode_messages(messages)
    options = msgspec.msgpack.decode(frame.options, type=AppendRequest)
    ids = options.unique_prefix, options.unique_counter, options.born_timestamp_ms
    request = AppendRequest(
        "topic", len(messages), unique_prefix=ids[0], unique_counter=ids[1], born_timestamp_ms=ids[2]
    )
    made, payload = columns.of(request, memoryview(encode(messages)))
    return read_append(options, b"".join(map(bytes, frame.payload))), read_append(made, bytes(payload))


@settings(max_examples=150, deadline=None)
@given(plain_messages())
def test_columns_of_messages_equal_the_clients(messages: list[Message]) -> None:
    assert all(map(is_plain, messages))
    expected, found = rows_of(messages, ColumnWriter())
    assert found == expected


def test_columns_larger_than_the_buffer_and_then_small_ones() -> None:
    columns = ColumnWriter()
    for bodies in ([bytes(3 << 20)] * 3, [b"small"], [b"%d" % number for number in range(70_000)]):
        messages = [Message("topic", body, "tag", ("key",)) for body in bodies[:65_536]]
        expected, found = rows_of(messages, columns)
        assert found == expected


GOOD = Message("topic", b"body", "tag", ("key",))
REFUSED: dict[str, tuple[Any, str]] = {
    "another topic": (Message("topik", b""), "message 1: topic"),
    "a longer topic": (Message("topics", b""), "message 1: topic"),
    "a text as body": (Message("topic", "body"), "message 1: body"),  # type: ignore[arg-type]
    "no tag": (Message("topic", b"", None), "message 1: tag"),  # type: ignore[arg-type]
    "properties": (Message("topic", b"", properties={"a": "b"}), "message 1: properties"),
    "a text as keys": (Message("topic", b"", keys="key"), "message 1: keys"),
    "a key with a space": (Message("topic", b"", keys=("a b",)), "message 1: keys"),
    "an empty key": (Message("topic", b"", keys=("a", "")), "message 1: keys"),
    "bytes as key": (Message("topic", b"", keys=(b"a",)), "message 1: keys"),  # type: ignore[arg-type]
    "keys too long": (Message("topic", b"", keys=("k" * 32_768,) * 2), "message 1: keys"),
    "a tag too long": (Message("topic", b"", "t" * 65_536), "message 1: tag"),
    "a sharding key too long": (Message("topic", b"", sharding_key="t" * 65_536), "message 1: sharding_key"),
    "a unique id": (Message("topic", b"", unique_id="x"), "message 1: unique_id"),
    "a delay": (Message("topic", b"", delay_level=1), "message 1: delay_level"),
    "a time": (Message("topic", b"", deliver_at_ms=1 << 41), "message 1: deliver_at_ms"),
    "a boolean": (Message("topic", b"", flag=True), "message 1: flag"),
    "a large flag": (Message("topic", b"", flag=1 << 31), "message 1: flag"),
    "a small flag": (Message("topic", b"", flag=-(1 << 31) - 1), "message 1: flag"),
    "a late born time": (Message("topic", b"", born_timestamp_ms=1 << 63), "message 1: born_timestamp_ms"),
    "a queue below 0": (Message("topic", b"", queue_id=-1), "message 1: queue_id"),
    "a queue too large": (Message("topic", b"", queue_id=1 << 31), "message 1: queue_id"),
    "a queue beside none": (Message("topic", b"", queue_id=0), "it names a queue"),
    "no array": (7, "message 1: no array"),
    "too few fields": (["topic", b"body"], "message 1: no array"),
    "too many fields": ([*msgspec.structs.astuple(GOOD), ""], "message 1: no array"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_message_outside_the_columns_is_refused(name: str) -> None:
    message, says = REFUSED[name]
    with pytest.raises(BadMessageError, match=says):
        ColumnWriter().of(AppendRequest("topic", 2), memoryview(encode([GOOD, message])))


def test_sharding_key_beside_a_queue_is_refused() -> None:
    messages = [Message("topic", b"", queue_id=0), Message("topic", b"", queue_id=0, sharding_key="a")]
    with pytest.raises(BadMessageError, match="sharding key"):
        ColumnWriter().of(AppendRequest("topic", 2), memoryview(encode(messages)))


@pytest.mark.parametrize("count", [-1, 0, 1, 3, 1 << 40])
def test_count_that_differs_is_refused(count: int) -> None:
    with pytest.raises(BadMessageError):
        ColumnWriter().of(AppendRequest("topic", count), memoryview(encode([GOOD, GOOD])))


@pytest.mark.parametrize("data", [b"", b"\x92", encode([GOOD, GOOD]) + b"\0", encode([GOOD, GOOD])[:-1]])
def test_payload_of_another_size_is_refused(data: bytes) -> None:
    with pytest.raises(BadMessageError):
        ColumnWriter().of(AppendRequest("topic", 2), memoryview(data))


MESSAGES = [
    Message("topic", b"first", "tag", ("k1", "k2")),
    Message("topic", b"second" * 60, queue_id=None, flag=-7, born_timestamp_ms=1 << 40),
    Message("topic", b"", sharding_key="shard"),
]
HEADS = (0x80, 0x90, 0x9C, 0xC0, 0xC1, 0xC4, 0xC6, 0xCA, 0xCF, 0xD3, 0xD4, 0xD9, 0xDB, 0xDC, 0xDD, 0xDE, 0xDF, 0xFF)


def damaged(seed: int) -> bytes:
    random, data = Random(seed), bytearray(encode(MESSAGES))
    for _ in range(random.randint(1, 3)):
        at = random.randrange(len(data))
        match random.randrange(4):
            case 0:
                data[at] = random.choice(HEADS)
            case 1:
                data[at] = random.randrange(256)
            case 2:
                data[at : at + random.randint(1, 9)] = random.randbytes(random.randint(0, 9))
            case _:
                del data[max(1, at) :]
    return bytes(data)


def converted(data: bytes, run: Callable[[Any], Any]) -> tuple[int, bytes]:
    """Result of the check, and the columns if there are some; uncompiled reads outside the payload raise IndexError."""
    payload, topic, found = as_kernel_array(data), as_kernel_array(b"topic"), np.zeros(kernel.FOUND_WORDS, np.int64)
    result = int(run(kernel.check_messages)(payload, len(data), len(MESSAGES), topic, len(topic), found))
    if result != kernel.MESSAGES_OK:
        return result, b""
    columns = np.zeros(int(found[kernel.COLUMNS_SIZE]), np.uint8)
    run(kernel.write_columns)(payload, len(data), len(MESSAGES), 77, found, columns)
    return result, columns.tobytes()


def test_damaged_messages_are_refused_or_read_within_the_payload() -> None:
    accepted = 0
    called = ("_item", "_equal", "_has_space", "_has_defaults", "big_endian")
    for seed in range(1500):
        data = damaged(seed)
        with mock.patch.multiple(kernel, **{name: plain(getattr(kernel, name)) for name in called}):
            expected = converted(data, plain)
        assert converted(data, lambda compiled: compiled) == expected, seed
        accepted += expected[0] == kernel.MESSAGES_OK
    assert 20 < accepted < 1000


def test_kernel_fields_are_those_of_message() -> None:
    names = [name.removesuffix("_timestamp_ms").removesuffix("_ms").upper() for name in Message.__struct_fields__]
    assert [getattr(kernel, name) for name in names] == list(range(kernel.FIELDS))


def test_kernels_have_one_signature() -> None:
    ColumnWriter().of(AppendRequest("topic", 1), memoryview(bytearray(encode([GOOD]))))
    for each in (kernel.check_messages, kernel.write_columns):
        assert len(getattr(each, "signatures", [None])) == 1
