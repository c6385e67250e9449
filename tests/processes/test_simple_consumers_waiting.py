"""Simple consumers that wait for a topic which comes, with its first message, while the role they wait at is away."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from mqproc import AsyncClient, StoredMessage
from mqproc.layout.control import QUERY, SUPERVISOR
from tests.conftest import Group, wait_until

PATIENCE_S = 20.0
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
def test_what_comes_first_into_a_topic_while_query_is_away_is_for_who_waits_for_it(
    make_group: Callable[..., Group], receives: Callable[[Group], list[StoredMessage]]
) -> None:
    """The receive was made again, "latest" was behind the message by then, and the group never got it."""
    group = make_group()
    with group.client() as client, ThreadPoolExecutor(1) as pool:
        client.send("There", b"before")
        client.wait_dispatched()
        waiting = pool.submit(receives, group)
        wait_until(lambda: group.words()["waiting_pulls"] == 1, what="a receive that waits")
        with group.held_up(SUPERVISOR):
            os.kill(group.pid(QUERY), signal.SIGKILL)
            client.send("Coming", b"first")
        assert [message.body for message in waiting.result()] == [b"first"]
