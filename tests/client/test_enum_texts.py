"""Members of enums that are texts, given as names: each call uses the member's value."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mqproc import AsyncClient, Client, Message, ResetTo, StoredMessage, TransactionResolution
from mqproc.client.group_requests import start_of
from mqproc.client.send_requests import joined
from mqproc.client.subscription import broadcast_path, named, subscription
from mqproc.client.transaction_requests import resolution_of
from mqproc.paths import checked_path
from mqproc.types import BatchResult
from tests.support.group import PATIENCE_S, Group, fill, open_transaction, wait_until


class Plain(str):
    """Keeps `Name` from being taken for a StrEnum, whose `str` and `format` are its value."""

    __slots__ = ()


class Name(Plain, enum.Enum):
    """A text whose `str`, `format` and `hash` are those of the member's name."""

    SYNC_GROUP = "my_sync"
    ASYNC_GROUP = "my_async"
    SYNC_TOPIC = "sync-topic"
    ASYNC_TOPIC = "async-topic"
    COPY = "copy"
    MEMBER = "member-1"
    COLUMN = "queue_offset"
    FIRST = "earliest"
    BEGIN = "beginning"
    YES = "COMMIT"
    FOLDER = "/var/lib/store"

    def __hash__(self) -> int:
        return hash(self.name)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """A group whose retries follow at once."""
    group = Group(tmp_path_factory.mktemp("enums") / "store", message_delay_level=" ".join(["0s"] * 18)).start()
    yield group
    group.close()


@pytest.fixture
def client(shared: Group) -> Iterator[Client]:
    with shared.client() as client:
        yield client


def value_of(text: str) -> str:
    """The text as a format shows it."""
    return f"{text}"


# Transactions


def test_transaction_enum_group_is_stored_as_value(client: Client) -> None:
    left = open_transaction(client, Name.SYNC_GROUP, Message("paid", b"left"))
    (found,) = wait_until(lambda: client.transactions.open("my_sync"), what="the open transaction")
    assert found.transaction_id == left.transaction_id
    with client.transaction(Name.SYNC_GROUP, Message("paid", b"committed")):
        pass
    client.wait_dispatched()
    assert [each.body for each in client.range("paid")] == [b"committed"]
    client.transactions.rollback(found)


def test_async_transaction_enum_group_is_stored_as_value(shared: Group) -> None:
    async def program() -> None:
        async with AsyncClient(shared.store) as client:
            async with client.transaction(Name.ASYNC_GROUP, Message("paid-async", b"x")):
                pass
            await client.wait_dispatched()
            assert [each.body async for each in client.range("paid-async")] == [b"x"]

    asyncio.run(program())


def test_transaction_producer_enum_group_is_asked(client: Client) -> None:
    asked: list[StoredMessage] = []
    with client.transaction_producer(Name.SYNC_GROUP, lambda message: bool(asked.append(message)) or True) as producer:
        assert value_of(producer.group) == "my_sync"
        with producer.transaction(Message("asked", b"x")) as transaction:
            transaction.leave()
        client.transactions.check(*wait_until(lambda: client.transactions.open("my_sync"), what="the transaction"))
        wait_until(lambda: not client.transactions.open("my_sync"), what="the end of the checked transaction")
    assert {each.properties["PGROUP"] for each in asked} == {"my_sync"}


def test_async_transaction_producer_enum_group_is_value(shared: Group) -> None:
    async def program() -> None:
        async with (
            AsyncClient(shared.store) as client,
            client.transaction_producer(Name.ASYNC_GROUP, lambda _: True) as producer,
        ):
            assert value_of(producer.group) == "my_async"

    asyncio.run(program())


def test_resolution_of_enum_is_its_value() -> None:
    assert resolution_of(Name.YES) is TransactionResolution.COMMIT


# Consumers


def test_consumer_enum_group_gets_its_redeliveries(client: Client) -> None:
    fill(client, Name.SYNC_TOPIC.value, 1, queues=1)
    of = Name.SYNC_GROUP, [Name.SYNC_TOPIC]
    with client.consumer(*of, start=Name.FIRST, name=Name.MEMBER) as consumer:
        consumer.nack(*consumer.receive(1, timeout=PATIENCE_S))
        (again,) = consumer.receive(1, timeout=PATIENCE_S)
        assert (again.topic, again.reconsume_times) == ("sync-topic", 1)
        assert [each.name for each in client.groups.info("my_sync").members] == ["member-1"]
        assert repr(consumer) == "Consumer('my_sync', ['sync-topic'])"
        consumer.ack(again)


def test_async_consumer_enum_group_gets_its_redeliveries(client: Client, shared: Group) -> None:
    fill(client, Name.ASYNC_TOPIC.value, 1, queues=1)

    async def program() -> None:
        of = Name.ASYNC_GROUP, Name.ASYNC_TOPIC
        async with AsyncClient(shared.store) as client, client.consumer(*of, start=Name.FIRST) as consumer:
            await consumer.nack(*await consumer.receive(1, timeout=PATIENCE_S))
            (again,) = await consumer.receive(1, timeout=PATIENCE_S)
            assert (again.topic, again.reconsume_times) == ("async-topic", 1)
            await consumer.ack(again)

    asyncio.run(program())


def test_subscription_of_enums_has_plain_texts() -> None:
    found = subscription(Name.SYNC_GROUP, Name.SYNC_TOPIC, Name.MEMBER, 10.0, Name.BEGIN)
    texts = found.group, *found.topics, found.name, found.start
    assert list(map(value_of, texts)) == ["my_sync", "sync-topic", "member-1", "earliest"]
    assert list(map(value_of, named([Name.COPY]))) == ["copy"]
    assert start_of(Name.FIRST) == ("earliest", 0)


def test_broadcast_path_of_enums_has_their_values(tmp_path: Path) -> None:
    path = broadcast_path(tmp_path, Name.SYNC_GROUP, Name.MEMBER, None, broadcast=True)
    assert Path(path).name == "my_sync@member-1.json"


# Administration


def test_plan_reset_enum_topic_has_the_moves_before(client: Client) -> None:
    fill(client, "copy", 2, queues=1)
    client.groups.commit("my_sync", "copy", 0, 2)
    (move,) = client.groups.plan_reset(Name.SYNC_GROUP, ResetTo(earliest=True), Name.COPY)
    assert (move.before, move.after) == (2, 0)
    assert value_of(client.groups.info(Name.SYNC_GROUP).group) == "my_sync"


def test_replay_of_enums_is_the_replay_of_their_values(client: Client) -> None:
    fill(client, "sync-topic", 1, queues=1)
    stored = client.max_offset("sync-topic", 0)
    client.create_topic("copy", 8)
    first = client.replay(Name.SYNC_TOPIC, Name.COPY, name=Name.MEMBER)
    client.wait_dispatched()
    again = client.replay("sync-topic", "copy", name="member-1")
    assert (first.sent, again.sent, again.found) == (stored, 0, stored)


def test_async_replay_of_enums_is_that_of_their_values(client: Client, shared: Group) -> None:
    fill(client, "async-topic", 1, queues=1)
    stored = client.max_offset("async-topic", 0)
    client.create_topic("copy", 8)

    async def program() -> int:
        async with AsyncClient(shared.store) as client:
            return (await client.replay(Name.ASYNC_TOPIC, Name.COPY, name=Name.MEMBER)).sent

    assert asyncio.run(program()) == stored
    client.wait_dispatched()
    assert client.replay("async-topic", "copy", name="member-1").found == stored


def test_pull_arrow_enum_column_has_its_type(client: Client) -> None:
    fill(client, "arrow", 2, queues=1)
    found = client.pull_arrow("arrow", 0, 0, columns=[Name.COLUMN]).batch
    assert found.to_pylist() == [{"queue_offset": 0}, {"queue_offset": 1}]


def test_send_batch_enum_topic_is_value_in_the_result(client: Client) -> None:
    client.create_topic("sync-topic", 1)
    result = client.send_batch(Name.SYNC_TOPIC, [b"x"])
    empty = np.empty(0, np.int64)
    several = joined(Name.SYNC_TOPIC, [BatchResult("sync-topic", empty, empty, empty, 0)] * 2)
    none = client.send_batch(Name.SYNC_TOPIC, [])
    assert [value_of(each.topic) for each in (result, several, none)] == ["sync-topic"] * 3


def test_checked_path_enum_is_its_value() -> None:
    assert checked_path(Name.FOLDER) == Path("/var/lib/store")
