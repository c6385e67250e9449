"""Sharding keys: the queue they choose, stored properties and errors, for every send call.

The frames go to roles in memory, which choose a queue as the writer does; the writer itself is in
`tests/processes/test_sharding.py`.
"""

from __future__ import annotations

import asyncio
import itertools

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqproc.client import encoding
from mqproc.client._async.client import AsyncClient
from mqproc.client._sync.client import Client
from mqproc.client.batch import Batch
from mqproc.client.encoding import encode_batch, encode_message, encode_messages
from mqproc.errors import (
    BadMessageError,
    BadPropertyError,
    BadRequestError,
    PropertiesTooLargeError,
    StoreBusyError,
)
from mqproc.kernels.hashing import queue_of_hash as compiled_queue_of_hash
from mqproc.layout import properties
from mqproc.layout.properties import java_hash, queue_of_hash
from mqproc.types import Message, SendResult
from mqproc.wire.connection import Request
from mqproc.wire.operations import COLUMN_ABSENT, AppendRequest, Operation
from tests.client.memory_roles import MemoryRoles, Row, read_append

FRAME_BYTES_MAX = 64 << 20
# Computed by a JVM with RocketMQ's SelectMessageQueueByHash, over 8 and over 7 queues. The hash code of
# "polygenelubricants" is −2³¹, whose absolute value is no int.
JAVAS_QUEUES = {
    "order-1": (6, 6),
    "a": (1, 6),
    "Aa": (0, 5),
    "BB": (0, 5),
    "polygenelubricants": (0, 2),
    "é": (1, 2),
    "価格": (3, 3),
    "\U0001f600": (3, 2),
    "order 1": (1, 3),
}


@pytest.mark.parametrize("key", JAVAS_QUEUES)
def test_a_key_picks_the_queue_that_rocketmqs_selector_picks(key: str) -> None:
    assert (queue_of_hash(java_hash(key), 8), queue_of_hash(java_hash(key), 7)) == JAVAS_QUEUES[key]


@given(st.integers(-(1 << 31), (1 << 31) - 1), st.integers(1, 1 << 16))
def test_compiled_and_plain_pick_the_same_queue(hashed: int, queues: int) -> None:
    picked = queue_of_hash(hashed, queues)
    assert compiled_queue_of_hash(hashed, queues) == picked
    assert 0 <= picked < queues


def rows(frame: object) -> list[Row]:
    options = msgspec.msgpack.decode(frame.options, type=AppendRequest)  # type: ignore[attr-defined]
    return read_append(options, b"".join(frame.payload))  # type: ignore[attr-defined]


def batch_rows(bodies: list[bytes], **columns: object) -> list[Row]:
    (frame,) = encode_batch(Batch("orders", bodies, **columns), FRAME_BYTES_MAX)  # type: ignore[arg-type]
    return rows(frame)


def test_a_sharding_key_is_stored_in_rocketmqs_order() -> None:
    own = {"TIMER_LIKE": "t", "CLUSTER": "c", "zone": "z"}
    (row,) = rows(encode_message(Message("orders", b"x", "tag", ("k",), own, sharding_key="order-1")))
    assert row.sharding_key == row.pairs["__SHARDINGKEY"] == "order-1"
    order = [part.partition("\x01")[0] for part in row.properties.split("\x02")[:-1]]
    assert order == sorted(order, key=properties.bucket)


def test_messages_with_and_without_a_key_share_a_frame() -> None:
    messages = [Message("orders", b"x", sharding_key="a"), Message("orders", b"y"), Message("orders", b"z", "t")]
    found = rows(encode_messages(messages))
    assert [row.sharding_key for row in found] == ["a", "", ""]
    assert [row.pairs.get("__SHARDINGKEY") for row in found] == ["a", None, None]


@pytest.mark.parametrize(
    "keys",
    [["a", "", "é"], ["a", None, "é"], pa.array(["a", None, "é"]), np.array(["a", "", "é"])],
    ids=["list", "list with None", "Arrow", "numpy"],
)
def test_a_column_of_keys_in_every_form(keys: object) -> None:
    found = batch_rows([b"1", b"2", b"3"], sharding_keys=keys, properties={"zone": "z"})
    assert [row.pairs.get("__SHARDINGKEY") for row in found] == ["a", None, "é"]
    own = batch_rows([b"1", b"2", b"3"], sharding_keys=keys, properties=[{"zone": "z"}] * 3)
    assert [row.sharding_key for row in own] == [row.sharding_key for row in found] == ["a", "", "é"]
    without_ids = [{**row.pairs, "UNIQ_KEY": ""} for row in found]
    assert [{**row.pairs, "UNIQ_KEY": ""} for row in own] == without_ids


def test_sharding_key_for_a_whole_batch() -> None:
    assert [row.sharding_key for row in batch_rows([b"1", b"2"], sharding_keys="all")] == ["all", "all"]
    (frame,) = encode_batch(Batch("orders", [b"1", b"2"], sharding_keys=["", ""]), FRAME_BYTES_MAX)
    assert msgspec.msgpack.decode(frame.options, type=AppendRequest).sharding_bytes == COLUMN_ABSENT


def test_a_batch_beyond_a_frame_keeps_each_messages_key() -> None:
    keys = [f"k{number % 5}" for number in range(70_000)]
    frames = list(encode_batch(Batch("orders", [b"x"] * len(keys), sharding_keys=keys), FRAME_BYTES_MAX))
    assert len(frames) == 2
    assert [row.sharding_key for frame in frames for row in rows(frame)] == keys


def test_every_way_to_send_goes_to_the_keys_queue(client: Client, roles: MemoryRoles) -> None:
    client.create_topic("orders", 8)
    queue_id = JAVAS_QUEUES["order-1"][0]
    message = Message("orders", b"whole", sharding_key="order-1")
    results = [client.send(message), client.send("orders", b"parts", sharding_key="order-1")]
    results += client.send_many([message, Message("orders", b"many", properties={"a": "b"}, sharding_key="order-1")])
    with client.producer() as producer:
        futures = [producer.send(message), producer.send("orders", b"parts", sharding_key="order-1")]
    results += [future.result() for future in futures]
    batch = client.send_batch("orders", [b"1", b"2"], sharding_keys="order-1")
    client.send_oneway("orders", b"unanswered", sharding_key="order-1")
    client.ping()
    assert {result.queue_id for result in results} | set(batch.queue_ids.tolist()) == {queue_id}
    offsets = [result.queue_offset for result in results] + batch.queue_offsets.tolist()
    assert offsets == list(range(8)), "the queue has them in the order in which they were sent"
    stored = client.pull("orders", queue_id, 0).messages
    assert [message.sharding_key for message in stored] == ["order-1"] * 9
    assert roles.queues["orders"][queue_id] == list(range(9))


def test_every_asynchronous_way_goes_to_the_keys_queue(roles: MemoryRoles) -> None:
    queue_id = JAVAS_QUEUES["order-1"][0]

    async def steps() -> None:
        async with AsyncClient(roles.store) as client:
            await client.create_topic("orders", 8)
            message = Message("orders", b"whole", sharding_key="order-1")
            results = [await client.send(message), await client.send("orders", b"parts", sharding_key="order-1")]
            results += await client.send_many([message] * 2)
            async with client.producer() as producer:
                futures = [await producer.send(message), await producer.send("orders", b"x", sharding_key="order-1")]
            results += await asyncio.gather(*futures)
            batch = await client.send_batch("orders", [b"1", b"2"], sharding_keys=["order-1"] * 2)
            await client.send_oneway("orders", b"unanswered", sharding_key="order-1")
            assert {result.queue_id for result in results} | set(batch.queue_ids.tolist()) == {queue_id}
            assert [result.queue_offset for result in results] == list(range(6))
            assert [message.sharding_key for message in (await client.pull("orders", queue_id, 0)).messages] == [
                "order-1"
            ] * 9

    asyncio.run(steps())


@pytest.fixture
def frames_of_a_thousand(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a batch of several frames is not one of hundreds of thousands of messages."""
    monkeypatch.setattr(encoding, "FRAME_MESSAGES_MAX", 1000)


def refuse_every_other(roles: MemoryRoles) -> None:
    """Every second frame is refused for now."""
    frames = itertools.count()

    def behave(request: Request) -> bool:
        if request.operation != Operation.APPEND or next(frames) % 2:
            return False
        request.refuse(StoreBusyError("busy", hint_ms=1))
        return True

    roles.behaviour = behave


def test_one_frame_in_flight_keeps_key_order_over_refusals(client: Client, roles: MemoryRoles) -> None:
    refuse_every_other(roles)
    with client.producer(max_in_flight=1, max_batch_messages=2) as producer:
        futures = [producer.send("orders", b"%d" % number, sharding_key="order-1") for number in range(20)]
    assert [future.result().queue_offset for future in futures] == list(range(20))


@pytest.mark.usefixtures("frames_of_a_thousand")
def test_a_batch_of_several_frames_keeps_a_keys_order_over_refusals(client: Client, roles: MemoryRoles) -> None:
    refuse_every_other(roles)
    sent = client.send_batch("orders", [b"x"] * 3_000, sharding_keys="order-1")
    assert roles.frames == 4
    assert sent.queue_offsets.tolist() == list(range(3_000))


@pytest.mark.usefixtures("frames_of_a_thousand")
def test_a_batch_of_several_frames_keeps_a_keys_order_in_asyncio_too(roles: MemoryRoles) -> None:
    async def steps() -> list[int]:
        async with AsyncClient(roles.store) as client:
            sent = await client.send_batch("orders", [b"x"] * 3_000, sharding_keys="order-1")
            return sent.queue_offsets.tolist()

    refuse_every_other(roles)
    assert asyncio.run(steps()) == list(range(3_000))
    assert roles.frames == 4


def test_batch_with_invalid_sharding_keys_sends_nothing(client: Client, roles: MemoryRoles) -> None:
    with pytest.raises(BadMessageError, match="one sharding key for all"):
        client.send_batch("orders", [b"now", b"later"], sharding_keys=["a", "b"], delay_level=[0, 1])
    assert not roles.messages
    client.send_batch("orders", [b"now", b"now"], sharding_keys=["a", "b"], delay_level=[0, 0])


def test_one_frame_in_flight_keeps_key_order_async(roles: MemoryRoles) -> None:
    async def steps() -> list[asyncio.Future[SendResult]]:
        async with (
            AsyncClient(roles.store) as client,
            client.producer(max_in_flight=1, max_batch_messages=2) as producer,
        ):
            return [await producer.send("orders", b"%d" % number, sharding_key="order-1") for number in range(20)]

    refuse_every_other(roles)
    futures = asyncio.run(steps())
    assert [future.result().queue_offset for future in futures] == list(range(20))


def test_messages_without_a_key_take_turns_beside_those_with_one(client: Client) -> None:
    client.create_topic("orders", 4)
    messages = [Message("orders", b"%d" % n, sharding_key="" if n % 2 else "order-1") for n in range(16)]
    results = client.send_many(messages)
    (queue_id,) = {result.queue_id for result in results[::2]}
    assert queue_id == queue_of_hash(java_hash("order-1"), 4)
    assert sorted(result.queue_id for result in results[1::2]) == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("lists", [True, False], ids=["a message", "a message among others"])
@pytest.mark.parametrize(
    ("message", "error", "says"),
    [
        (Message("orders", b"x", queue_id=1, sharding_key="a"), BadRequestError, "not both"),
        (Message("orders", b"x", sharding_key="a\x01b"), BadPropertyError, "0x01"),
        (Message("orders", b"x", sharding_key="a\x02b"), BadPropertyError, "0x02"),
        (Message("orders", b"x", sharding_key=7), BadPropertyError, "no text"),  # type: ignore[arg-type]
        (Message("orders", b"x", sharding_key="a", properties={"__SHARDINGKEY": "b"}), BadPropertyError, "beside"),
        (Message("orders", b"x", sharding_key="a" * 33_000), PropertiesTooLargeError, "32,767"),
    ],
    ids=["a queue too", "byte 1", "byte 2", "a number", "the property too", "too long"],
)
def test_a_key_that_cannot_pick_a_queue_is_refused(
    client: Client, message: Message, error: type[Exception], says: str, lists: bool
) -> None:
    with pytest.raises(error, match=says):
        client.send_many([message]) if lists else client.send(message)
    with client.producer() as producer, pytest.raises(error, match=says):
        producer.send(message)
    assert "orders" not in {topic.topic for topic in client.topics()}


@pytest.mark.parametrize(
    ("columns", "error", "says"),
    [
        ({"sharding_keys": "a", "queue_id": 1}, BadRequestError, "not both"),
        ({"sharding_keys": ["a", "b"], "queue_ids": [0, 1]}, BadRequestError, "not both"),
        ({"sharding_keys": ["a"]}, BadMessageError, "1 sharding keys for 2 bodies"),
        ({"sharding_keys": ["a", 7]}, BadPropertyError, "texts"),
        ({"sharding_keys": ["a", "b\x01"]}, BadPropertyError, "0x01"),
        ({"sharding_keys": ["a", "b"], "properties": {"__SHARDINGKEY": "c"}}, BadPropertyError, "beside"),
        ({"sharding_keys": ["a", "b"], "properties": [{}, {"__SHARDINGKEY": "c"}]}, BadPropertyError, "beside"),
        ({"sharding_keys": ["a", "b"], "delay_level": 1}, BadMessageError, "one sharding key for all"),
        ({"sharding_keys": ["a", "b"], "delay": [1.0, 2.0]}, BadMessageError, "one sharding key for all"),
        ({"sharding_keys": ["a", "b" * 33_000]}, PropertiesTooLargeError, "32,767"),
    ],
)
def test_columns_that_cannot_pick_queues_are_refused(
    client: Client, columns: dict[str, object], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        client.send_batch("orders", [b"1", b"2"], **columns)  # type: ignore[arg-type]
