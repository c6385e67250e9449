"""Simple consumers get the first message of a topic that is created while query is down."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from mqproc import AsyncClient, StoredMessage
from mqproc.layout.control import QUERY, SUPERVISOR
from tests.support.group import PATIENCE_S, Group, wait_until

TOPICS = ("There", "Coming")


def receive(group: Group) -> list[StoredMessage]:
    with group.client() as client:
        return client.simple_consumer("g", TOPICS).receive(timeout=PATIENCE_S)


def receive_async(group: Group) -> list[StoredMessage]:
    async def main() -> list[StoredMessage]:
        async with AsyncClient(group.store) as client:
            return await client.simple_consumer("g", TOPICS).receive(timeout=PATIENCE_S)

    return asyncio.run(main())


@pytest.mark.parametrize("receives", [receive, receive_async])
def test_first_message_during_query_restart_reaches_new_waiter(
    make_group: Callable[..., Group], receives: Callable[[Group], list[StoredMessage]]
) -> None:
    """The receive was retried after the message, so that "latest" excluded it."""
    group = make_group()
    with group.client() as client, ThreadPoolExecutor(1) as pool:
        client.send("There", b"before")
        client.wait_dispatched()
        waiting = pool.submit(receives, group)
        wait_until(lambda: group.words()["waiting_pulls"] == 1, what="a receive that waits")
        with group.stopped_role(SUPERVISOR):
            os.kill(group.pid(QUERY), signal.SIGKILL)
            client.send("Coming", b"first")
        assert [message.body for message in waiting.result()] == [b"first"]


def look(group: Group, first_comes: Callable[[], None]) -> list[StoredMessage]:
    with group.client() as client:
        consumer = client.simple_consumer("g", TOPICS)
        assert consumer.receive() == []
        first_comes()
        return consumer.receive()


def look_async(group: Group, first_comes: Callable[[], None]) -> list[StoredMessage]:
    async def main() -> list[StoredMessage]:
        async with AsyncClient(group.store) as client:
            consumer = client.simple_consumer("g", TOPICS)
            assert await consumer.receive() == []
            first_comes()
            return await consumer.receive()

    return asyncio.run(main())


@pytest.mark.parametrize("looks", [look, look_async])
def test_first_message_during_query_restart_reaches_old_waiter(
    make_group: Callable[..., Group], looks: Callable[[Group, Callable[[], None]], list[StoredMessage]]
) -> None:
    group = make_group()

    def first_comes() -> None:
        with group.client() as client:
            with group.stopped_role(SUPERVISOR):
                os.kill(group.pid(QUERY), signal.SIGKILL)
                client.send("Coming", b"first")
            client.wait_dispatched()

    with group.client() as client:
        client.send("There", b"before")
        client.wait_dispatched()
        assert [message.body for message in looks(group, first_comes)] == [b"first"]
        # A group with an offset in the topic continues there; another group begins at the end.
        assert client.simple_consumer("g", TOPICS).receive() == []
        assert client.simple_consumer("h", TOPICS).receive() == []
