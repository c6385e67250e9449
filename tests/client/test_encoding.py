"""Append frames: equal columns from all forms of messages; invalid messages are refused.

Frames are decoded by `read_append`, in plain Python.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqproc.client.batch import Batch
from mqproc.client.encoding import (
    FRAME_MESSAGES_MAX,
    AppendFrame,
    check_message,
    encode_batch,
    encode_message,
    encode_messages,
)
from mqproc.errors import (
    BadMessageError,
    BadPropertyError,
    BadRequestError,
    BadTopicError,
    FrameTooLargeError,
    MqprocError,
    NoSuchQueueError,
    PropertiesTooLargeError,
)
from mqproc.layout import properties
from mqproc.types import Message
from mqproc.wire.operations import QUEUE_ANY, AppendRequest
from tests.client.memory_roles import Row, read_append

FRAME_BYTES_MAX = 64 << 20
BODIES = [b"first", b"", b"\x00\xff third"]

texts = st.text(st.characters(exclude_characters="\x01\x02 ", exclude_categories=["Cs"]), min_size=1, max_size=12)
names = texts.filter(lambda name: name not in properties.RESERVED and not name.startswith("__RMQ.TRANSIENT."))
messages = st.builds(
    Message,
    topic=st.just("orders"),
    body=st.binary(max_size=50),
    tag=st.one_of(st.just(""), texts.filter(lambda tag: tag == tag.strip() and tag != "*" and "||" not in tag)),
    keys=st.lists(texts, max_size=3),
    properties=st.dictionaries(names, texts, max_size=3),
    queue_id=st.one_of(st.none(), st.integers(0, 7)),
    flag=st.integers(-(1 << 31), (1 << 31) - 1),
    born_timestamp_ms=st.one_of(st.none(), st.integers(0, 1 << 50)),
)


def options_of(frame: AppendFrame) -> AppendRequest:
    return msgspec.msgpack.decode(frame.options, type=AppendRequest)


def rows_of(frame: AppendFrame) -> list[Row]:
    options = options_of(frame)
    assert options.count == frame.count
    return read_append(options, b"".join(frame.payload))


def rows(bodies: object, topic: str = "orders", **columns: object) -> list[Row]:
    (frame,) = encode_batch(Batch(topic, bodies, **columns), FRAME_BYTES_MAX)
    return rows_of(frame)


def check_row(row: Row, message: Message) -> None:
    expected = dict(message.properties)
    if message.tag:
        expected["TAGS"] = message.tag
    if message.keys:
        expected["KEYS"] = " ".join(message.keys)
    pairs = row.pairs
    assert len(pairs.pop("UNIQ_KEY")) == 32
    assert pairs == expected
    assert row.body == message.body
    assert row.flag == message.flag
    if message.born_timestamp_ms is not None:
        assert row.born_timestamp_ms == message.born_timestamp_ms


@given(messages)
def test_a_single_message_round_trips(message: Message) -> None:
    (row,) = rows_of(encode_message(message))
    check_row(row, message)
    assert row.queue_id == (QUEUE_ANY if message.queue_id is None else message.queue_id)


@given(st.lists(messages, min_size=1, max_size=8), st.booleans())
def test_several_messages_round_trip(several: list[Message], with_queue: bool) -> None:
    several = [message for message in several if (message.queue_id is not None) == with_queue]
    if several:
        found = rows_of(encode_messages(several))
        assert len({row.pairs["UNIQ_KEY"] for row in found}) == len(several)
        for row, message in zip(found, several, strict=True):
            check_row(row, message)
            assert row.queue_id == (message.queue_id if with_queue else QUEUE_ANY)


@given(messages)
def test_properties_stand_in_rocketmqs_order(message: Message) -> None:
    (row,) = rows_of(encode_message(message))
    order = [part.partition("\x01")[0] for part in row.properties.split("\x02")[:-1]]
    assert order == sorted(order, key=properties.bucket)


@given(st.dictionaries(names, texts, max_size=6))
def test_constant_properties_stand_where_a_messages_own_would(constant: dict[str, str]) -> None:
    (shared,) = rows([b"x"], tags="t", keys=["k"], properties=constant)
    (own,) = rows([b"x"], tags="t", keys=["k"], properties=[constant])
    unique, other = shared.pairs["UNIQ_KEY"], own.pairs["UNIQ_KEY"]
    assert shared.properties == own.properties.replace(other, unique)


@pytest.mark.parametrize(
    "bodies",
    [
        BODIES,
        tuple(BODIES),
        np.array(BODIES, object),
        pa.array(BODIES),
        pa.array(BODIES, pa.large_binary()),
        pa.array([b"before", *BODIES, b"after"])[1:4],
        pa.chunked_array([BODIES[:1], BODIES[1:]]),
        pa.array(BODIES).dictionary_encode(),
        [memoryview(body) for body in BODIES],
        [bytearray(body) for body in BODIES],
    ],
    ids=lambda bodies: type(bodies).__name__,
)
def test_bodies_in_every_form(bodies: object) -> None:
    assert [row.body for row in rows(bodies)] == BODIES


@pytest.mark.parametrize("count", [3, 20_000], ids=["small", "large"])
def test_bodies_of_items_of_more_than_a_byte(count: int) -> None:
    numbers = np.arange(count, dtype=np.int32)
    square, single = numbers[:2].reshape(1, 2), np.array(7, np.int64)
    bodies = [numbers, b"plain", square, memoryview(numbers), single, b"", numbers[:0]]
    expected = [bytes(memoryview(body).tobytes()) for body in bodies]
    assert [row.body for row in rows(bodies)] == expected
    assert [rows_of(encode_message(Message("orders", body)))[0].body for body in bodies] == expected


@pytest.mark.parametrize("last", ["text", 5, None, np.arange(9)[::2], [1, 2]])
def test_batch_body_of_none_names_its_place(last: object) -> None:
    with pytest.raises(BadMessageError, match=f"body 2 is a {type(last).__name__}, not bytes"):
        rows([b"a", bytes(40_000), last])


def test_bodies_as_texts_and_of_fixed_width() -> None:
    assert [row.body for row in rows(pa.array(["é", "b"]))] == ["é".encode(), b"b"]
    assert [row.body for row in rows(pa.array([b"ab", b"cd", b"ef"], pa.binary(2))[1:])] == [b"cd", b"ef"]


def test_bodies_as_numpy_arrays() -> None:
    square = np.arange(12, dtype=np.uint8).reshape(3, 4)
    assert [row.body for row in rows(square)] == [bytes(line) for line in square]
    assert [row.body for row in rows(square[:, ::2])] == [bytes(line) for line in square[:, ::2]]
    assert [row.body for row in rows(square[1:2])] == [bytes(square[1])]
    assert [row.body for row in rows(np.array([b"a", b"", b"ccc"], "S3"))] == [b"a", b"", b"ccc"]
    assert [row.body for row in rows(np.array([b"aaa", b"ccc"], "S3"))] == [b"aaa", b"ccc"]


def shares_memory(frame: AppendFrame, data: np.ndarray) -> bool:
    return any(np.shares_memory(np.frombuffer(part, np.uint8), data) for part in frame.payload)


def test_large_bodies_are_sent_from_where_they_lie() -> None:
    bodies = [bytes([65 + index]) * 100_000 for index in range(3)]
    (frame,) = encode_batch(Batch("orders", bodies), FRAME_BYTES_MAX)
    assert [row.body for row in rows_of(frame)] == bodies
    assert shares_memory(frame, np.frombuffer(bodies[1], np.uint8))
    column = pa.array(bodies)
    (frame,) = encode_batch(Batch("orders", column), FRAME_BYTES_MAX)
    assert shares_memory(frame, np.frombuffer(column.buffers()[2], np.uint8))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["a", "", "é"], ["a", None, "é"]),
        ([["a", "b"], [], "c"], ["a b", None, "c"]),
        ([None, ("x",), "y"], [None, "x", "y"]),
        ("same", ["same", "same", "same"]),
        (pa.array(["a", None, "c"]), ["a", None, "c"]),
        (pa.array(["x", "a", "b", "c"])[1:], ["a", "b", "c"]),
        (pa.array([["a", "b"], [], ["c"]]), ["a b", None, "c"]),
        (np.array(["a", "bb", "é"]), ["a", "bb", "é"]),
        (pa.array(["a", "b", "a"]).dictionary_encode(), ["a", "b", "a"]),
        (pa.array(["a", None, "é"]).dictionary_encode(), ["a", None, "é"]),
        (pa.array([b"a", None, "é".encode()]), ["a", None, "é"]),
        (pa.array([b"ab", None, b"cd"], pa.binary(2)), ["ab", None, "cd"]),
        (pa.array(["a", None, "c"], pa.string_view()), ["a", None, "c"]),
        (pa.nulls(3), [None, None, None]),
    ],
)
def test_keys_in_every_form(keys: object, expected: list[str | None]) -> None:
    assert [row.pairs.get("KEYS") for row in rows(BODIES, keys=keys)] == expected


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        (["a", "", "two words"], ["a", None, "two words"]),
        ("all", ["all", "all", "all"]),
        (["a", None, "c"], ["a", None, "c"]),
        (pa.array(["a", "é", "c"]), ["a", "é", "c"]),
    ],
)
def test_tags_in_every_form(tags: object, expected: list[str | None]) -> None:
    assert [row.pairs.get("TAGS") for row in rows(BODIES, tags=tags)] == expected


def test_columns_of_numbers() -> None:
    found = rows(BODIES, queue_ids=[0, 5, 2], born_timestamps_ms=np.array([1, 2, 3]), flags=[-1, 0, 7])
    assert [(row.queue_id, row.born_timestamp_ms, row.flag) for row in found] == [(0, 1, -1), (5, 2, 0), (2, 3, 7)]
    assert {row.queue_id for row in rows(BODIES, queue_id=4)} == {4}


def test_options_of_a_frame() -> None:
    (frame,) = encode_batch(Batch("orders", BODIES, batch=True, wait=False), FRAME_BYTES_MAX)
    options = options_of(frame)
    assert (options.batch, options.wait, options.oneway) == (True, False, False)
    assert options_of(encode_message(Message("t", b""), oneway=True, wait=False)).oneway


def test_unique_ids_of_a_batch_are_all_different() -> None:
    found = [row.pairs["UNIQ_KEY"] for row in rows([b""] * 3000)]
    assert len(set(found)) == 3000


def test_an_own_unique_id_is_kept() -> None:
    (row,) = rows_of(encode_message(Message("orders", b"x", unique_id="MINE")))
    assert row.pairs["UNIQ_KEY"] == "MINE"


@pytest.mark.parametrize(
    ("columns", "error"),
    [
        ({"topic": "a b"}, BadTopicError),
        ({"bodies": b"abc"}, BadMessageError),
        ({"bodies": "abc"}, BadMessageError),
        ({"bodies": ["text"]}, BadMessageError),
        ({"bodies": [1]}, BadMessageError),
        ({"bodies": np.zeros(3, np.int64)}, BadMessageError),
        ({"bodies": pa.array([b"a", None])}, BadMessageError),
        ({"bodies": pa.array([1, 2])}, BadMessageError),
        ({"bodies": pa.DictionaryArray.from_arrays(pa.array([0, 1, 0]), pa.array([b"a", None]))}, BadMessageError),
        ({"bodies": pa.nulls(3)}, BadMessageError),
        ({"bodies": pa.table({"body": BODIES})}, BadMessageError),
        ({"bodies": (body for body in BODIES)}, BadMessageError),
        ({"keys": pa.array([b"a", b"\xff", b"c"])}, BadPropertyError),
        ({"keys": pa.array([b"a", b"\xff", b"c"]).dictionary_encode()}, BadPropertyError),
        ({"keys": pa.array([b"\xfe\xff"] * 3, pa.binary(2))}, BadPropertyError),
        ({"keys": pa.array([b"a", b"\xff", b"c"]), "properties": [{}, {}, {}]}, BadPropertyError),
        ({"keys": [b"a", b"b", b"c"]}, BadPropertyError),
        ({"keys": pa.table({"key": ["a", "b", "c"]})}, BadMessageError),
        ({"tags": pa.array([b"a", None, b"\xed\xa0\x80"])}, BadPropertyError),
        ({"sharding_keys": pa.array([b"a", b"\xc3", b"c"])}, BadPropertyError),
        ({"keys": ["a b", "", ""]}, BadPropertyError),
        ({"keys": ["a\x01", "", ""]}, BadPropertyError),
        ({"keys": ["a\x02", "", ""]}, BadPropertyError),
        ({"keys": [["a", "b c"], "", ""]}, BadPropertyError),
        ({"keys": [["a", ""], "", ""]}, BadPropertyError),
        ({"keys": "a b"}, BadPropertyError),
        ({"keys": pa.array(["a b", "", ""])}, BadPropertyError),
        ({"keys": [1, 2, 3]}, BadPropertyError),
        ({"keys": ["\ud800", "", ""]}, BadPropertyError),
        ({"keys": ["a"]}, BadMessageError),
        ({"keys": 5}, BadPropertyError),
        ({"keys": ["k" * 32_768, "", ""]}, PropertiesTooLargeError),
        ({"keys": ["k" * 20_000, "", ""], "tags": ["t" * 20_000, "", ""]}, PropertiesTooLargeError),
        ({"tags": "a\x01b"}, BadPropertyError),
        ({"tags": ["a\x02b", "", ""]}, BadPropertyError),
        ({"tags": ["a", "b"]}, BadMessageError),
        ({"queue_id": -1}, NoSuchQueueError),
        ({"queue_ids": [0, -1, 2]}, NoSuchQueueError),
        ({"queue_ids": [0, 1]}, BadMessageError),
        ({"queue_ids": [0, 1, 1 << 31]}, BadMessageError),
        ({"queue_ids": [0.5, 1, 2]}, BadMessageError),
        ({"flags": ["a", "b", "c"]}, BadMessageError),
        ({"born_timestamps_ms": [1 << 64, 1, 2]}, BadMessageError),
        ({"properties": {"a": ""}}, BadPropertyError),
        ({"properties": {"": "a"}}, BadPropertyError),
        ({"properties": {"a\x01": "b"}}, BadPropertyError),
        ({"properties": {"a": "b\x02"}}, BadPropertyError),
        ({"properties": {"KEYS": "b"}}, BadPropertyError),
        ({"properties": {"__CRC32#": "b"}}, BadPropertyError),
        ({"properties": {"__RMQ.TRANSIENT.x": "b"}}, BadPropertyError),
        ({"properties": {"a": 5}}, BadPropertyError),
        ({"properties": {"a": None}}, BadPropertyError),
        ({"properties": {"a": "b" * 33_000}}, PropertiesTooLargeError),
        ({"properties": [{"a": "b"}]}, BadMessageError),
        ({"properties": [{"WAIT": "b"}, {}, {}]}, BadPropertyError),
        ({"properties": [{}, {}, {}], "keys": ["a b", "", ""]}, BadPropertyError),
        ({"properties": [{}, {}, {}], "tags": ["a\x01b", "", ""]}, BadPropertyError),
    ],
)
def test_encode_invalid_message_is_refused(columns: dict[str, object], error: type[MqprocError]) -> None:
    with pytest.raises(error) as caught:
        rows(**({"topic": "orders", "bodies": BODIES} | columns))
    assert type(caught.value) is error
    assert isinstance(caught.value, BadRequestError)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (Message("", b""), BadTopicError),
        (Message("t", "text"), BadMessageError),  # type: ignore[arg-type]
        (Message("t", b"", tag="\x01"), BadPropertyError),
        (Message("t", b"", tag="t" * 40_000), PropertiesTooLargeError),
        (Message("t", b"", keys="word"), BadPropertyError),
        (Message("t", b"", keys=("a b",)), BadPropertyError),
        (Message("t", b"", keys=("",)), BadPropertyError),
        (Message("t", b"", keys=("k" * 40_000,)), PropertiesTooLargeError),
        (Message("t", b"", properties={"TAGS": "x"}), BadPropertyError),
        (Message("t", b"", properties={"a": "x" * 40_000}), PropertiesTooLargeError),
        (Message("t", b"", queue_id=-1), NoSuchQueueError),
        (Message("t", b"", flag=1 << 31), BadMessageError),
        (Message("t", b"", unique_id="a b"), BadPropertyError),
    ],
)
def test_a_message_that_cannot_be_stored_is_refused_alone_and_among_others(
    message: Message, error: type[MqprocError]
) -> None:
    for attempt in (encode_message, lambda message: encode_messages([message]), check_message):
        with pytest.raises(error) as caught:
            attempt(message)
        assert type(caught.value) is error


def test_a_batch_larger_than_a_frame_is_cut() -> None:
    bodies = [b"%d" % index for index in range(2 * FRAME_MESSAGES_MAX + 1)]
    frames = list(encode_batch(Batch("orders", bodies, keys=[body.decode() for body in bodies]), FRAME_BYTES_MAX))
    assert max(frame.count for frame in frames) <= FRAME_MESSAGES_MAX
    assert [row.body for frame in frames for row in rows_of(frame)] == bodies


def test_a_batch_of_more_bytes_than_a_frame_is_cut() -> None:
    bodies = [bytes(100_000), b"small", bytes(200_000), bytes(150_000)]
    frames = list(encode_batch(Batch("orders", pa.array(bodies), tags=["a", "b", "c", "d"]), 400_000))
    assert len(frames) > 1
    assert [row.body for frame in frames for row in rows_of(frame)] == bodies
    assert [row.pairs["TAGS"] for frame in frames for row in rows_of(frame)] == ["a", "b", "c", "d"]


def test_encode_atomic_batch_beyond_a_frame_is_refused() -> None:
    for batch in (Batch("t", [bytes(300_000)] * 2, batch=True), Batch("t", [bytes(500_000)])):
        with pytest.raises(FrameTooLargeError, match="400,000"):
            list(encode_batch(batch, 400_000))


def test_encode_empty_batch_makes_no_frame() -> None:
    assert list(encode_batch(Batch("orders", []), FRAME_BYTES_MAX)) == []


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"keys": [1, 2]}, "message 0: keys must be a sequence of texts, not 1 of type int"),
        ({"keys": np.array([0, 2])}, "message 0: keys must be a sequence of texts, not 0 of type int"),
        ({"keys": ["a", 2.5]}, "message 1: keys must be a sequence of texts, not 2.5 of type float"),
        ({"keys": [["a"], ["b", 7]]}, "message 1: key 7 is empty or no text"),
        ({"keys": [["a"], ["b c"]]}, "message 1: key 'b c' holds the separator byte 0x20"),
        ({"tags": ["a", float("nan")]}, "tags: not all of them are texts: nan of message 1 is of type float"),
        ({"tags": [None, 7]}, "tags: not all of them are texts: 7 of message 1 is of type int"),
        (
            {"sharding_keys": ["a", b"b"]},
            "sharding keys: not all of them are texts: b'b' of message 1 is of type bytes",
        ),
    ],
)
def test_batch_value_not_text_names_message_and_type(columns: dict[str, Any], expected: str) -> None:
    with pytest.raises(BadPropertyError) as error:
        list(encode_batch(Batch("t", [b"a", b"b"], **columns), FRAME_BYTES_MAX))
    assert str(error.value) == expected


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"keys": ["a b", "c", "d"]}, "keys: one holds the separator byte 0x20: 'a b' of message 0"),
        ({"keys": ["", "Öü", "é f"]}, "keys: one holds the separator byte 0x20: 'é f' of message 2"),
        ({"keys": pa.array(["a", None, "x b"])}, "keys: one holds the separator byte 0x20: 'x b' of message 2"),
        ({"tags": ["", "\x01", ""]}, "tags: one holds the separator byte 0x01: '\\x01' of message 1"),
        ({"tags": ["ok", "a\x02", "b"]}, "tags: one holds the separator byte 0x02: 'a\\x02' of message 1"),
        ({"sharding_keys": ["", "", "\x02"]}, "sharding keys: one holds the separator byte 0x02: '\\x02' of message 2"),
        (
            {"keys": ["c", "x\ud800", "d"]},
            "keys: 'x\\ud800' of message 1: 'utf-8' codec can't encode character '\\ud800' in position 1: "
            "surrogates not allowed",
        ),
    ],
)
def test_batch_invalid_value_names_message_and_value(columns: dict[str, Any], expected: str) -> None:
    with pytest.raises(BadPropertyError) as error:
        list(encode_batch(Batch("t", [b"a", b"b", b"c"], **columns), FRAME_BYTES_MAX))
    assert str(error.value) == expected


def test_batch_invalid_key_names_its_place_over_frames() -> None:
    keys = ["k"] * (FRAME_MESSAGES_MAX + 2)
    keys[-1] = "a b"
    half = len(keys) // 2
    with pytest.raises(BadPropertyError) as error:
        list(encode_batch(Batch("t", [b""] * len(keys), keys=keys), FRAME_BYTES_MAX))
    expected = f"keys: one holds the separator byte 0x20: 'a b' of message {len(keys) - half - 1:,}"
    assert str(error.value) == f"after the first {half:,} messages: {expected}"


def test_batch_of_one_message_error_names_no_place() -> None:
    with pytest.raises(BadPropertyError, match=r"^tags: one holds the separator byte 0x01: 'a.x01'$"):
        list(encode_batch(Batch("t", [b"a"], tags=["a\x01"]), FRAME_BYTES_MAX))
    with pytest.raises(BadPropertyError, match=r"^keys must be a sequence of texts, not 7 of type int$"):
        list(encode_batch(Batch("t", [b"a"], keys=[7]), FRAME_BYTES_MAX))
