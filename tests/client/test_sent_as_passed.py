"""Sends use the arguments as passed: reused buffers, subclasses of str, None."""

from __future__ import annotations

import asyncio
import ctypes
import enum
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from mqproc.client._async.client import AsyncClient
from mqproc.client._sync.client import Client
from mqproc.client.batch import Batch
from mqproc.client.encoding import FRAME_MESSAGES_MAX, check_message, encode_message
from mqproc.client.send_requests import Batcher, Limits, ProducerGroup, send_batches, text_bytes
from mqproc.errors import BadMessageError, BadPropertyError
from mqproc.types import Message
from tests.client.memory_roles import MemoryRoles

COUNT = 20
"""Messages of which each reuses the objects of the one before."""


class Reused:
    """Objects that a program passes again and again."""

    def __init__(self) -> None:
        self.body = bytearray(2)
        self.keys: list[str] = [""]
        self.properties: dict[str, str] = {}

    def set(self, number: int) -> None:
        self.body[:] = b"%02d" % number
        self.keys[0] = f"key-{number:02d}"
        self.properties["number"] = f"{number:02d}"

    @property
    def arguments(self) -> dict[str, Any]:
        return {"keys": self.keys, "properties": self.properties}

    def messages(self) -> Iterator[Message]:
        for number in range(COUNT):
            self.set(number)
            yield Message("t", memoryview(self.body), **self.arguments)


def contents(roles: MemoryRoles) -> list[tuple[bytes, tuple[str, ...], str]]:
    return sorted((each.body, each.keys, each.properties["number"]) for each in roles.messages)


EXPECTED = [(b"%02d" % number, (f"key-{number:02d}",), f"{number:02d}") for number in range(COUNT)]


def test_producer_reused_arguments_sends_each_as_passed(client: Client, roles: MemoryRoles) -> None:
    reused = Reused()
    with client.producer(linger_ms=1000) as producer:
        for number in range(COUNT):
            reused.set(number)
            producer.send("t", memoryview(reused.body), **reused.arguments)
    assert contents(roles) == EXPECTED


def test_producer_reused_in_messages_sends_each_as_passed(client: Client, roles: MemoryRoles) -> None:
    with client.producer(linger_ms=1000) as producer:
        for message in Reused().messages():
            producer.send(message)
    assert contents(roles) == EXPECTED


def test_async_producer_reused_arguments_sends_as_passed(roles: MemoryRoles) -> None:
    async def send_all() -> None:
        reused = Reused()
        async with AsyncClient(roles.store) as client, client.producer(linger_ms=1000) as producer:
            for number in range(COUNT):
                reused.set(number)
                await producer.send("t", memoryview(reused.body), **reused.arguments)

    asyncio.run(send_all())
    assert contents(roles) == EXPECTED


def test_send_many_reused_arguments_sends_each_as_passed(client: Client, roles: MemoryRoles) -> None:
    client.send_many(Reused().messages())
    assert contents(roles) == EXPECTED


def test_async_send_many_reused_arguments_sends_as_passed(roles: MemoryRoles) -> None:
    async def send_all() -> None:
        async with AsyncClient(roles.store) as client:
            await client.send_many(Reused().messages())

    asyncio.run(send_all())
    assert contents(roles) == EXPECTED


def test_transaction_reused_body_sends_it_as_passed(client: Client) -> None:
    body = bytearray(b"first")
    half = client.transaction("g", Message("t", memoryview(body)))
    body[:] = b"other"
    assert half._half.body == b"first"


@pytest.mark.parametrize("shape", ["large bodies", "rows", "texts", "numbers"])
def test_send_batches_reused_arrays_keep_what_was_passed(shape: str) -> None:
    """A frame that is sent again, when the generator has moved on, must not have changed."""
    large = bytearray(b"a" * (64 << 10))
    rows = np.full((2, 8), ord("a"), np.uint8)
    texts = np.array([b"aa", b"aa"])
    queues = np.zeros(2, np.int32)
    batches = {
        "large bodies": Batch("t", [memoryview(large), large]),
        "rows": Batch("t", rows),
        "texts": Batch("t", texts),
        "numbers": Batch("t", [b"a", b"a"], queue_ids=queues, born_timestamps_ms=np.zeros(2, np.int64)),
    }
    (call,) = send_batches([batches[shape]], 64 << 20)
    before = b"".join(call.payload)
    large[:] = b"b" * len(large)
    rows[:] = ord("b")
    texts[:] = b"bb"
    queues[:] = 1
    assert b"".join(call.payload) == before


# Subclasses of str


class Plain(str):
    """Keeps `Kind` from being taken for a StrEnum, whose `str` and `format` are its value."""

    __slots__ = ()


class Kind(Plain, enum.Enum):
    """A text whose `str`, `format` and `hash` are those of its name."""

    NEW = "new"
    NAME = "kind"
    TOPIC = "topic"
    TAGS = "TAGS"


class Text(str):
    """A text that is shown differently."""

    __slots__ = ()

    def __str__(self) -> str:
        return "shown"

    def __format__(self, spec: str) -> str:
        return "shown"


def sent_singly(client: Client, message: Message) -> None:
    client.send(message)


def sent_by_producer(client: Client, message: Message) -> None:
    with client.producer() as producer:
        producer.send(message)


def sent_as_stream(client: Client, message: Message) -> None:
    client.send_many([message])


def sent_oneway(client: Client, message: Message) -> None:
    client.send_oneway(message)
    client.ping()


def sent_as_batch(client: Client, message: Message) -> None:
    columns = {"keys": [list(message.keys)], "tags": message.tag, "properties": message.properties}
    client.send_batch(message.topic, [message.body], sharding_keys=message.sharding_key or None, **columns)


def sent_as_batch_of_rows(client: Client, message: Message) -> None:
    columns = {"keys": [list(message.keys)], "tags": [message.tag], "properties": [message.properties]}
    client.send_batch(message.topic, [message.body], sharding_keys=[message.sharding_key], **columns)


SENDS = [sent_singly, sent_by_producer, sent_as_stream, sent_oneway, sent_as_batch, sent_as_batch_of_rows]


@pytest.mark.parametrize("send", SENDS)
@pytest.mark.parametrize("new", [Kind.NEW, Text("new")], ids=["enum", "subclass"])
@pytest.mark.parametrize("further", ["", "properties", "sharding key"])
def test_send_subclass_of_str_stores_its_value(
    client: Client, roles: MemoryRoles, send: Callable[[Client, Message], None], new: str, further: str
) -> None:
    properties = {Kind.NAME: new} if further else {}
    sharding_key = new if further == "sharding key" else ""
    for _ in range(2):  # The second one by the template of the first, where there is one.
        send(client, Message(Kind.TOPIC, b"x", new, [new], properties, sharding_key=sharding_key))
    for stored in roles.messages:
        assert (stored.topic, stored.tag, stored.keys) == ("topic", "new", ("new",))
        assert stored.sharding_key == sharding_key
        assert stored.properties.get("kind", "") == ("new" if further else "")
    assert len(roles.messages) == 2


@pytest.mark.parametrize("check", [check_message, encode_message])
def test_send_reserved_property_of_enum_is_refused(check: Callable[[Message], object]) -> None:
    with pytest.raises(BadPropertyError, match="TAGS"):
        check(Message("t", b"x", properties={Kind.TAGS: "x"}))


# None


@pytest.mark.parametrize("send", SENDS[:4])
def test_send_none_for_optional_texts_is_not_given(
    client: Client, roles: MemoryRoles, send: Callable[[Client, Message], None]
) -> None:
    nothing: Any = None
    names = "tag", "keys", "properties", "sharding_key", "unique_id"
    send(client, Message("t", b"x", **dict.fromkeys(names, nothing)))
    send(client, Message("t", b"x", tag=nothing, keys=nothing))
    send(client, Message("t", b"x", tag=nothing, keys=["k"], properties={"a": "b"}))
    found = [(each.tag, each.keys, each.properties.get("a"), each.sharding_key) for each in roles.messages]
    assert found == [("", (), None, ""), ("", (), None, ""), ("", ("k",), "b", "")]


def test_send_none_as_arguments_is_not_given(client: Client, roles: MemoryRoles) -> None:
    nothing: Any = None
    arguments = {"tag": nothing, "keys": nothing, "properties": nothing, "sharding_key": nothing}
    client.send("t", b"x", **arguments)
    with client.producer() as producer:
        producer.send("t", b"x", **arguments)
    client.send_oneway("t", b"x", **arguments)
    client.ping()
    assert [(each.tag, each.keys) for each in roles.messages] == [("", ())] * 3


def test_send_batch_none_among_properties_is_not_given(client: Client, roles: MemoryRoles) -> None:
    nothing: Any = None
    client.send_batch("t", [b"x"], properties=[nothing])
    client.send_batch("t", [b"x", b"x"], properties=[nothing, {"a": "b"}], sharding_keys="s")

    async def send() -> None:
        async with AsyncClient(roles.store) as client:
            await client.send_batch("t", [b"x"], properties=[nothing], tags="new")

    asyncio.run(send())
    found = [(each.properties.get("a"), each.sharding_key, each.tag) for each in roles.messages]
    assert found == [(None, "", ""), (None, "s", ""), ("b", "s", ""), (None, "", "new")]
    with pytest.raises(BadPropertyError, match="mapping"):
        client.send_batch("t", [b"x"], properties=[""])  # type: ignore[list-item]


# Memory addresses


ADDRESSES = [
    np.array([b"secret"], dtype=object),
    np.array([(b"secret", 1)], dtype=[("body", "O"), ("P", "i4")]),
    (ctypes.c_void_p * 2)(),
    (ctypes.py_object * 1)(b"secret"),
]


@pytest.mark.parametrize("send", SENDS)
@pytest.mark.parametrize("body", ADDRESSES, ids=["objects", "fields", "pointers", "ctypes"])
def test_send_body_of_addresses_is_refused(
    client: Client, roles: MemoryRoles, send: Callable[[Client, Message], None], body: Any
) -> None:
    with pytest.raises(BadMessageError, match="addresses"):
        send(client, Message("t", body))
    assert not roles.messages


def test_send_fields_without_addresses_are_bytes(client: Client, roles: MemoryRoles) -> None:
    """A field's name is not a type."""
    client.send("t", np.array([(1, 2)], dtype=[("P", "u1"), ("O", "u1")]))
    assert [each.body for each in roles.messages] == [b"\x01\x02"]


# Bounded buffers


@pytest.mark.parametrize(
    "fields",
    [
        {"properties": {"name": "x" * 1000}},
        {"properties": {"x" * 1000: "value"}},
        {"keys": ["x" * 500] * 2},
        {"tag": "x" * 1000},
        {"sharding_key": "x" * 1000},
    ],
    ids=["values", "names", "keys", "tag", "sharding key"],
)
def test_buffer_bound_counts_all_fields_of_a_message(fields: dict[str, Any]) -> None:
    batcher = Batcher(Limits(1.0, FRAME_MESSAGES_MAX, 1 << 30, 1, 100_000), ProducerGroup)
    message, count = Message("t", b"", **fields), 0
    while batcher.has_room(text_bytes(message)):
        batcher.add(message, text_bytes(message))
        count += 1
    assert count * 1000 <= 100_000
