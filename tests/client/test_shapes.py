"""The short way of single messages makes what the general way makes, of whatever it is given, and takes few steps."""

from __future__ import annotations

import re
import time
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mqproc.client import sending, shapes
from mqproc.client.core import Call
from mqproc.client.encoding import encode_message
from mqproc.client.sending import message_of, send
from mqproc.errors import MqprocError, ProtocolError
from mqproc.message import Message, SendResult
from mqproc.wire.operations import AppendAnswer, AppendRequest
from tests.client.steps import steps_of

USUAL: dict[str, Any] = {
    "topic": "orders",
    "body": b"body",
    "tag": "new",
    "keys": "order-1",
    "properties": None,
    "queue_id": None,
    "flag": 0,
    "born_timestamp_ms": None,
    "sharding_key": "",
    "delay_level": 0,
    "deliver_at": None,
    "delay": None,
    "wait": True,
}
ANSWER = msgspec.msgpack.encode(AppendAnswer(1_700_000_000_000, bytes([127, 0, 0, 1, 0, 0, 0x2A, 0x9F])))
ROW = (200).to_bytes(8, "little") + (7).to_bytes(8, "little") + (3).to_bytes(4, "little")


class Text(str):
    """A text that is sent as another than it equals."""

    def __str__(self) -> str:
        return "other"


texts = st.sampled_from(["", "a", "ключ", "a b", "a\x01", "a\x02", "\ud800", "k" * 1025, "x" * 40_000, Text("a")])
odd = st.sampled_from([None, True, False, 0, 1, -1, 0.0, 1 << 40, np.int64(1), np.zeros(2), "", "text", b"", (), []])
bodies = st.sampled_from([b"", b"body", bytes(8192), bytes(8193), bytearray(b"body"), memoryview(b"body"), "text"])
topics = st.sampled_from(["orders", "a.b", "", "t" * 200, Text("orders"), Message("orders", b"whole")])
several = st.sampled_from([(), [], ("a", "b"), ["a"], ("",), (1,)])
given_parts = st.fixed_dictionaries(
    {},
    optional={
        "topic": topics | odd,
        "body": bodies | odd,
        "tag": texts | odd,
        "keys": texts | several | odd,
        "properties": st.sampled_from([{}, {"colour": "red"}, {"TAGS": "x"}]) | odd,
        "queue_id": st.integers(-1, 3) | odd,
        "flag": odd,
        "born_timestamp_ms": odd,
        "sharding_key": texts | odd,
        "delay_level": odd,
        "deliver_at": odd,
        "delay": odd,
        "wait": odd,
    },
)


def message_from(parts: dict[str, Any]) -> Message:
    names = ("topic", "body", "tag", "keys", "properties", "queue_id", "flag", "born_timestamp_ms")
    named = ("delay_level", "deliver_at", "delay", "sharding_key")
    return message_of(*(parts[name] for name in names), **{name: parts[name] for name in named})


def short(parts: dict[str, Any]) -> Call[SendResult]:
    return send(message_from(parts), wait=parts["wait"])


def general(parts: dict[str, Any]) -> Call[SendResult]:
    with mock.patch.object(sending, "encode_single", encode_message):
        return short(parts)


def request_of(call: Call[SendResult]) -> tuple[object, ...]:
    """A call as the server and the client see it, but for its unique id and the time, which are looked at here."""
    payload = re.sub(rb"UNIQ_KEY\x01\w{32}", b"", b"".join(call.payload))
    try:
        options = msgspec.msgpack.decode(call.options, type=AppendRequest)
    except msgspec.ValidationError as error:
        return str(error), payload
    result = call.parse(memoryview(ANSWER), memoryview(ROW))
    if options.unique_prefix:
        assert result.unique_id == f"{options.unique_prefix}{options.unique_counter:04X}"
    options = msgspec.structs.replace(options, unique_prefix="", unique_counter=0)
    for name in ("born_timestamp_ms", "deliver_at_ms"):
        if abs(time.time_ns() // 1_000_000 - getattr(options, name)) < 60_000:
            options = msgspec.structs.replace(options, **{name: -1})
    rest = call.role, call.operation, call.repeatable, call.wait_s, call.oneway, call.is_send
    return options, payload, rest, msgspec.structs.replace(result, unique_id="")


def outcome(way: Any, parts: dict[str, Any]) -> object:
    try:
        return request_of(way(parts))
    except (MqprocError, TypeError, ValueError, AttributeError) as error:
        return type(error), str(error)


@given(given_parts)
@example({"queue_id": True})
@example({"queue_id": 1.0})
@example({"topic": Text("orders")})
@example({"keys": "\ud800"})
@example({"tag": "\ud800"})
@example({"flag": False})
@example({"wait": 1})
@example({"tag": "x" * 40_000})
def test_both_ways_make_the_same_of_anything(changed: dict[str, Any]) -> None:
    shapes._known.clear()
    short(USUAL)
    short({**USUAL, "queue_id": 1, "tag": "a"})
    short({**USUAL, "tag": ""})
    parts = {**USUAL, **changed}
    expected = outcome(general, parts)
    for _ in range(2):  # The first of a shape goes the general way.
        assert outcome(short, parts) == expected


def test_ids_and_times_are_new_each_time() -> None:
    before_ms = time.time_ns() // 1_000_000
    calls = [short(USUAL) for _ in range(100)]
    found = [msgspec.msgpack.decode(call.options, type=AppendRequest) for call in calls]
    assert len({(options.unique_prefix, options.unique_counter) for options in found}) == 100
    assert all(before_ms <= options.born_timestamp_ms <= time.time_ns() // 1_000_000 for options in found)


def test_shapes_are_forgotten_when_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "_SHAPES_MAX", 10)
    for number in range(25):
        call = short({**USUAL, "tag": f"tag-{number}"})
        assert request_of(call) == request_of(general({**USUAL, "tag": f"tag-{number}"}))
        assert len(shapes._known) <= 10


@pytest.mark.parametrize(("options", "row"), [(b"\xc1", ROW), (ANSWER, ROW[:-1]), (b"", b"")])
def test_an_answer_of_another_shape_is_the_servers_fault(options: bytes, row: bytes) -> None:
    for call in (general(USUAL), short(USUAL), short(USUAL)):
        with pytest.raises(ProtocolError, match="answer to APPEND cannot be read"):
            call.parse(memoryview(options), memoryview(row))


def test_a_usual_send_takes_few_steps() -> None:
    message = message_from(USUAL)
    send(message)
    call, steps = steps_of(lambda: send(message))
    assert request_of(call) == request_of(general(USUAL))
    expected = {"send", "encode_single", "_encode_known", "reserve", "_set_time", "_month_bounds_ms"}
    assert set(steps) <= expected, steps
