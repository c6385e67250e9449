"""Deleting a group deletes its messages to be redelivered."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from mqproc import AsyncClient, Client, GroupNotFoundError
from mqproc.client import group_requests as group_calls
from tests.support.group import PATIENCE_S, Group, fill, wait_until

INVISIBLE_S = 1.0


@pytest.fixture
def client(shared: Group) -> Iterator[Client]:
    with shared.client() as client:
        yield client


def names(client: Client) -> set[str]:
    return {topic.topic for topic in client.topics()}


def test_recreated_group_gets_no_redelivery_of_the_deleted_one(client: Client) -> None:
    fill(client, "Orders", 4, queues=1)
    for name in ("billing", "billing_more"):
        first = client.simple_consumer(name, "Orders", start="earliest")
        assert len(first.receive(2, INVISIBLE_S, timeout=PATIENCE_S)) == 2
        wait_until(lambda topic=f"%RETRY%{name}_Orders": topic in names(client), what="copies")
    with client.consumer("third", "Orders", start="earliest") as member:
        member.nack(*member.receive(1, timeout=PATIENCE_S), delay_level=1)
        wait_until(lambda: "%RETRY%third" in names(client), what="a copy")
    consumer = client.simple_consumer("billing", "Orders", start="earliest")
    had = consumer.receive(4, INVISIBLE_S, timeout=PATIENCE_S)
    client.groups.delete("billing")
    client.groups.delete("third")
    assert consumer.ack(*had) == 0
    consumer = client.simple_consumer("billing", "Orders", start="latest")
    assert consumer.receive(32, timeout=3 * INVISIBLE_S) == []
    client.wait_dispatched()
    assert names(client) & {"%RETRY%third", "%RETRY%billing_Orders"} == set()
    assert "%RETRY%billing_more_Orders" in names(client), "another group's"


def test_so_it_is_for_asyncio(shared: Group, client: Client) -> None:
    async def delete() -> None:
        async with AsyncClient(shared.store) as made:
            await made.groups.delete("aio")

    fill(client, "Aio", 1, queues=1)
    client.simple_consumer("aio", "Aio", start="earliest").receive(1, INVISIBLE_S, timeout=PATIENCE_S)
    wait_until(lambda: "%RETRY%aio_Aio" in names(client), what="a copy")
    asyncio.run(delete())
    assert "%RETRY%aio_Aio" not in names(client)


def test_group_deletion_interrupted_is_finished_by_a_repeat(shared: Group, client: Client) -> None:
    """A repeated deletion deletes the retry topics, though the group is gone."""

    async def delete() -> None:
        async with AsyncClient(shared.store) as made:
            await made.groups.delete("half-async")

    fill(client, "Half", 1, queues=1)
    for name in ("half", "half-async"):
        client.simple_consumer(name, "Half", start="earliest").receive(1, INVISIBLE_S, timeout=PATIENCE_S)
        wait_until(lambda topic=f"%RETRY%{name}_Half": topic in names(client), what="a copy")
        client.run(group_calls.delete(name))
    with pytest.raises(GroupNotFoundError, match="no group 'half'"):
        client.groups.delete("half")
    with pytest.raises(GroupNotFoundError, match="no group 'half-async'"):
        asyncio.run(delete())
    assert names(client) & {"%RETRY%half_Half", "%RETRY%half-async_Half"} == set()
