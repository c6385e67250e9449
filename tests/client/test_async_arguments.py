"""Coroutines of sends that run later use the arguments as they were at the call."""

from __future__ import annotations

import array
import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from mqproc.client._async.client import AsyncClient
from mqproc.client._async.producer import AsyncProducer
from mqproc.errors import BadMessageError
from mqproc.types import Message, SendResult
from tests.client.memory_roles import MemoryRoles
from tests.client.test_sent_as_passed import ADDRESSES, COUNT, EXPECTED, Reused, contents


async def sent_at_once(roles: MemoryRoles, begin: Callable[[AsyncClient, Reused], Coroutine[Any, Any, object]]) -> None:
    """Begin sends that reuse their objects; run them together."""
    reused, sends = Reused(), []
    async with AsyncClient(roles.store) as client:
        for number in range(COUNT):
            reused.set(number)
            sends.append(begin(client, reused))
        await asyncio.gather(*sends)
        await client.ping()


@pytest.mark.parametrize(
    "begin",
    [
        lambda client, reused: client.send("t", memoryview(reused.body), **reused.arguments),
        lambda client, reused: client.send("t", body=reused.body, **reused.arguments),
        lambda client, reused: client.send("t", np.frombuffer(reused.body, np.uint8), **reused.arguments),
        lambda client, reused: client.send(Message("t", reused.body, **reused.arguments)),
        lambda client, reused: client.send_oneway("t", reused.body, **reused.arguments),
        lambda client, reused: client.send_batch("t", [memoryview(reused.body)], **reused.arguments),
        lambda client, reused: client.send_batch(
            "t", np.frombuffer(reused.body, "S2"), keys=[reused.keys], properties=[reused.properties]
        ),
    ],
    ids=["view", "named body", "array", "message", "oneway", "batch of a list", "batch of rows"],
)
def test_async_send_run_later_sends_as_passed(
    roles: MemoryRoles, begin: Callable[[AsyncClient, Reused], Coroutine[Any, Any, object]]
) -> None:
    asyncio.run(sent_at_once(roles, begin))
    assert contents(roles) == EXPECTED


@pytest.mark.parametrize("as_message", [False, True])
def test_async_producer_send_run_later_sends_as_passed(roles: MemoryRoles, as_message: bool) -> None:
    async def send_all() -> None:
        reused, sends = Reused(), []
        async with AsyncClient(roles.store) as client, client.producer(linger_ms=1) as producer:
            for number in range(COUNT):
                reused.set(number)
                body = memoryview(reused.body)
                message = Message("t", body, **reused.arguments)
                sends.append(producer.send(message) if as_message else producer.send("t", body, **reused.arguments))
            await asyncio.gather(*sends)

    asyncio.run(send_all())
    assert contents(roles) == EXPECTED


def test_async_batch_run_later_uses_numbers_as_passed(roles: MemoryRoles) -> None:
    queues: list[Any] = [np.zeros(1, np.int32), array.array("i", [0]), memoryview(np.zeros(1, np.int32)), [0]]

    async def send_all() -> None:
        async with AsyncClient(roles.store) as client:
            sends = [client.send_batch("t", [b"x"], queue_ids=each, flags=each) for each in queues]
            for each in queues:
                each[0] = 1
            await asyncio.gather(*sends)

    asyncio.run(send_all())
    assert [(each.queue_id, each.flag) for each in roles.messages] == [(0, 0)] * len(queues)


def test_async_send_refuses_arguments_when_it_runs(roles: MemoryRoles) -> None:
    async def send_all() -> list[object]:
        nothing: Any = None
        async with AsyncClient(roles.store) as client:
            sends = [client.send("t", each) for each in (b"x", nothing, *ADDRESSES)]
            sends.append(client.send(Message("t", nothing)))
            return await asyncio.gather(*sends, return_exceptions=True)

    stored, *refused = asyncio.run(send_all())
    assert isinstance(stored, SendResult)
    assert [type(each) for each in refused] == [BadMessageError] * (len(ADDRESSES) + 2)


@pytest.mark.parametrize("send", [AsyncClient.send, AsyncProducer.send])
def test_async_send_that_is_not_awaited_is_named(send: Callable[..., Coroutine[Any, Any, object]]) -> None:
    coroutine = send(object(), "t", b"x")
    assert coroutine.__qualname__ == send.__qualname__
    coroutine.close()
