"""Single messages by template: the same frames as by the general path, in few calls."""

from __future__ import annotations

import re
import time
from types import MappingProxyType
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mqproc.client import send_requests as sending
from mqproc.client.encoding import encode_message
from mqproc.client.requests import Call
from mqproc.client.send_requests import message_of, send
from mqproc.errors import MqprocError, ProtocolError
from mqproc.types import Message, SendResult
from mqproc.wire.operations import AppendAnswer, AppendRequest
from tests.client.conftest import steps_of

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


LONG_TAG = "x" * 31_700
TEXTS = ["", "a", "ключ", "a b", "a\x01", "a\x02", "\ud800", "k" * 1025, "x" * 40_000, Text("a"), LONG_TAG]
FAR = 1 << 40
ODD = [None, True, False, 0, 1, -1, 0.0, FAR, np.int64(1), np.zeros(2), "", "text", b"", (), []]
BODIES = [b"body", bytes(8192), bytes(8193), bytearray(b"body"), memoryview(b"body")]
SEVERAL = [("a", "b"), ["a"], ("",), (1,), (Text("a"),)]
WHOLE = [{}, {"keys": "a"}, {"keys": ["a"]}, {"unique_id": "own"}, {"sharding_key": "a"}, {"properties": None}]
# What each part may be.
PARTS: dict[str, list[Any]] = {
    "topic": ["a.b", "t" * 200, Text("orders"), *(Message("orders", b"whole", **parts) for parts in WHOLE), *ODD],
    "body": [*BODIES, *ODD],
    "tag": [*TEXTS, *ODD],
    "keys": [*TEXTS, *SEVERAL, *ODD],
    "properties": [{}, {"colour": "red"}, {"TAGS": "x"}, MappingProxyType({}), *ODD],
    "queue_id": [2, 3, *ODD],
    "flag": ODD,
    "born_timestamp_ms": ODD,
    "sharding_key": [*TEXTS, *ODD],
    "delay_level": ODD,
    "deliver_at": ODD,
    "delay": [value for value in ODD if value is not FAR],  # Its time differs by the millisecond between two calls.
    "wait": ODD,
}
several_parts = st.sets(st.sampled_from(sorted(PARTS)), min_size=2, max_size=3).flatmap(
    lambda names: st.fixed_dictionaries({name: st.sampled_from(PARTS[name]) for name in sorted(names)})
)


def message_from(parts: dict[str, Any]) -> Message:
    if isinstance(parts["topic"], Message):
        return parts["topic"]
    texts = (parts[name] for name in ("topic", "body", "tag", "keys", "properties", "sharding_key"))
    queue_id, flag, born, level, at, delay = (
        parts[name] for name in ("queue_id", "flag", "born_timestamp_ms", "delay_level", "deliver_at", "delay")
    )
    return message_of(*texts, (queue_id, flag, born), (level, at, delay))


def short(parts: dict[str, Any]) -> Call[SendResult]:
    return send(message_from(parts), wait=parts["wait"])


def make_known(parts: dict[str, Any]) -> None:
    """The third message of a shape goes the short way."""
    for _ in range(2):
        short(parts)


def general(parts: dict[str, Any]) -> Call[SendResult]:
    with mock.patch.object(sending, "encode_single", encode_message):
        return short(parts)


def request_of(call: Call[SendResult]) -> tuple[object, ...]:
    """A call as server and client see it, without its unique id and time, which are checked."""
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


def check_both_ways(changed: dict[str, Any]) -> None:
    sending.single_templates.clear()
    for parts in ({}, {"queue_id": 1, "tag": "a"}, {"tag": ""}, {"tag": LONG_TAG}):
        make_known({**USUAL, **parts})
    parts = {**USUAL, **changed}
    expected = outcome(general, parts)
    for _ in range(3):  # The first two of a shape go the general way.
        assert outcome(short, parts) == expected, changed


@pytest.mark.parametrize("name", PARTS)
def test_template_and_general_path_make_equal_frames(name: str) -> None:
    for value in PARTS[name]:
        check_both_ways({name: value})


@given(several_parts)
@example({"queue_id": True, "tag": "a"})
@example({"queue_id": 1.0, "tag": "a"})
@example({"tag": LONG_TAG, "keys": "k" * 1024})
def test_both_ways_make_the_same_of_anything(changed: dict[str, Any]) -> None:
    check_both_ways(changed)


def test_ids_and_times_are_new_each_time() -> None:
    before_ms = time.time_ns() // 1_000_000
    calls = [short(USUAL) for _ in range(100)]
    found = [msgspec.msgpack.decode(call.options, type=AppendRequest) for call in calls]
    assert len({(options.unique_prefix, options.unique_counter) for options in found}) == 100
    assert all(before_ms <= options.born_timestamp_ms <= time.time_ns() // 1_000_000 for options in found)


def test_templates_are_cleared_at_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "SINGLE_TEMPLATES_MAX", 10)
    for number in range(25):
        parts = {**USUAL, "tag": f"tag-{number}"}
        make_known(parts)
        assert request_of(short(parts)) == request_of(general(parts))
        assert len(sending.single_templates) <= 10


def test_template_is_made_after_the_second_message(monkeypatch: pytest.MonkeyPatch) -> None:
    sending.single_templates.clear()
    monkeypatch.setattr(sending, "SINGLE_TEMPLATES_MAX", 10)
    for number in range(40):
        short({**USUAL, "tag": f"tag-{number % 20}"})
        assert not any(sending.single_templates.values())
        assert len(sending.single_templates) <= 10
    make_known(USUAL)
    assert any(sending.single_templates.values())


@pytest.mark.parametrize(("options", "row"), [(b"\xc1", ROW), (ANSWER, ROW[:-1]), (b"", b"")])
def test_append_answer_malformed_raises_protocol_error(options: bytes, row: bytes) -> None:
    make_known(USUAL)
    for call in (general(USUAL), short(USUAL)):
        with pytest.raises(ProtocolError, match="answer to APPEND cannot be read"):
            call.parse(memoryview(options), memoryview(row))


@pytest.mark.parametrize("keys", ["order-1", ("order-1",), ["order-1"], []])
def test_send_by_template_takes_few_calls(keys: Any) -> None:
    parts = {**USUAL, "keys": keys}
    make_known(parts)
    message = message_from(parts)
    call, steps = steps_of(lambda: send(message))
    assert request_of(call) == request_of(general(parts))
    expected = {"send", "encode_single", "_encode_by_template", "reserve", "_set_time", "_month_bounds_ms"}
    assert set(steps) <= expected, steps
