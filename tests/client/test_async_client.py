"""The asynchronous client: the same calls, many at once over one connection a role."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from mqproc.client._async.client import AsyncClient
from mqproc.client._async.connection import AsyncConnections
from mqproc.client._sync.client import Client
from mqproc.client._sync.connection_pool import Connections
from mqproc.client.batch import Batch
from mqproc.client.retry import RetryPolicy
from mqproc.errors import (
    NoSuchQueueError,
    NotRunningError,
    RequestTimeoutError,
    SendOutcomeUnknownError,
    StoreBusyError,
    TooManyConnectionsError,
)
from mqproc.types import Message, PullStatus
from mqproc.wire.connection import Request
from mqproc.wire.operations import Operation
from mqproc.wire.server import ServerLimits
from tests.client.memory_roles import MemoryRoles, first
from tests.client.test_async_consumer import reached
from tests.support.group import PATIENCE_S


def run(steps: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(steps, 60))


def test_async_client_has_the_calls_of_the_synchronous_one() -> None:
    of_connections = {name for kind in (Connections, AsyncConnections) for name in vars(kind)} - {"close"}
    calls = [
        {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")} - of_connections
        for kind in (Client, AsyncClient)
    ]
    assert calls[0] == calls[1]
    for name in calls[0] - {"producer"}:
        sync, asynchronous = (
            [str(each).replace("Async", "") for each in inspect.signature(getattr(kind, name)).parameters.values()]
            for kind in (Client, AsyncClient)
        )
        assert sync == asynchronous, name


def test_async_calls_return_the_results_of_synchronous_ones(roles: MemoryRoles) -> None:
    async def go() -> None:
        async with AsyncClient(roles.store, timeout=60) as client:
            await client.create_topic("orders", 4)
            result = await client.send("orders", b"hello", tag="new", keys="k1")
            await client.send_batch("orders", [b"a", b"b"], keys=["k2", "k3"], queue_id=0)
            many = await client.send_many(Message(f"t{index % 3}", b"%d" % index) for index in range(3000))
            assert (await client.get(many[1234].message_id)).body == b"1234"
            await client.send_oneway("orders", b"oneway")
            await client.ping()
            with Client(roles.store) as sync:
                assert await client.get(result.message_id) == sync.get(result.message_id)
                assert await client.by_key("orders", "k3") == sync.by_key("orders", "k3")
                assert await client.pull("orders", 0, 0) == sync.pull("orders", 0, 0)
                arrow = await client.pull_arrow("orders", 0, 0)
                assert arrow.batch == sync.pull_arrow("orders", 0, 0).batch
                assert await client.topics() == sync.topics()
                assert await client.queues("orders") == sync.queues("orders")
                assert await client.count("orders") == sync.count("orders") == 4
                assert await client.offset_at("orders", 0, 1) == sync.offset_at("orders", 0, 1)
                assert await client.min_offset("orders", 0) == sync.min_offset("orders", 0)
                assert await client.max_offset("orders", 0) == sync.max_offset("orders", 0)
                assert await client.query_message("orders", "k1") == sync.query_message("orders", "k1")
                assert await client.stats() == sync.stats()
                assert await client.health() == sync.health()
                assert [message async for message in client.range("t0", page_messages=300)] == list(sync.range("t0"))
                assert [message async for message in client.scan("t0")] == list(sync.scan("t0"))
            await client.delete_topic("orders")
            with pytest.raises(NoSuchQueueError):
                await client.send("t0", b"x", queue_id=77)

    run(go())


def test_many_calls_at_once_share_a_connection(roles: MemoryRoles) -> None:
    async def go() -> None:
        async with AsyncClient(roles.store, timeout=60) as client:
            results = await asyncio.gather(*(client.send("orders", b"%d" % index) for index in range(1000)))
            assert len({result.physical_offset for result in results}) == 1000
            bodies = await asyncio.gather(*(client.get(result.message_id) for result in results[::50]))
            assert [message.body for message in bodies] == [b"%d" % index for index in range(0, 1000, 50)]
            assert [len(server.connections) for server in roles.servers] == [1, 1]

    run(go())


def test_batches_are_pipelined_in_order(roles: MemoryRoles) -> None:
    async def go() -> None:
        async with AsyncClient(roles.store, timeout=60) as client:
            batches = (Batch("orders", [os.urandom(100_000)] * 10, queue_id=0) for _ in range(30))
            offsets = [result.queue_offsets[0] async for result in client.send_batches(batches, in_flight=5)]
            assert offsets == list(range(0, 300, 10))

    run(go())


def test_a_long_poll_does_not_keep_others_waiting(roles: MemoryRoles) -> None:
    async def go() -> None:
        async with AsyncClient(roles.store, timeout=PATIENCE_S) as client:
            await client.create_topic("orders", 1)
            client.timeout_s = 1.0  # For the poll alone: on a busy machine the others may need more.
            poll = asyncio.ensure_future(client.pull("orders", 0, 0, timeout=60))
            await reached(lambda: roles.held_pulls == 1, "the poll is held")
            client.timeout_s = PATIENCE_S
            await asyncio.sleep(1.5)
            assert len(await client.topics()) == 1
            await client.send("orders", b"x", queue_id=0)
            assert [message.body for message in (await poll).messages] == [b"x"]
            empty = await client.pull("orders", 0, 1, timeout=0.05)
            assert empty.status is PullStatus.OFFSET_OVERFLOW_ONE

    run(go())


def test_async_client_repeats_safe_requests_only(roles: MemoryRoles) -> None:
    async def go() -> None:
        async with AsyncClient(roles.store, timeout=60) as client:
            roles.behaviour = first(2, lambda request: request.refuse(StoreBusyError("busy", hint_ms=5)))
            await client.send("orders", b"a")
            roles.behaviour = first(1, lambda request: request.connection.close())
            with pytest.raises(SendOutcomeUnknownError):
                await client.send("orders", b"b")
            roles.behaviour = first(2, lambda request: request.connection.close(), Operation.COUNT)
            assert await client.count("orders") == 1
            roles.stop()
            roles.start()
            await client.send("orders", b"c")
            assert [message.body for message in roles.messages] == [b"a", b"c"]

    run(go())


def test_async_client_timeout_and_missing_group_raise(roles: MemoryRoles) -> None:
    async def go() -> None:
        async with AsyncClient(roles.store / "elsewhere") as nowhere:
            with pytest.raises(NotRunningError):
                await nowhere.send("orders", b"x")
        async with AsyncClient(roles.store, timeout=1.0) as client:
            roles.behaviour = lambda request: True
            with pytest.raises(RequestTimeoutError):
                await client.count("orders")
            with pytest.raises(SendOutcomeUnknownError):
                await client.send("orders", b"x")
            roles.behaviour = lambda request: False
            client.timeout_s = PATIENCE_S
            await client.send("orders", b"y")

    run(go())


def test_send_many_that_is_cancelled_leaves_no_task_behind(roles: MemoryRoles) -> None:
    taken = threading.Event()

    def take(request: Request) -> bool:
        taken.set()
        return True

    async def go() -> None:
        async with AsyncClient(roles.store, timeout=60) as client:
            await client.send("t", b"x")
            before = asyncio.all_tasks()
            roles.behaviour = take
            sending = asyncio.ensure_future(client.send_many([Message("t", b"x")] * 1000, in_flight=1))
            await asyncio.to_thread(taken.wait, 60)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            assert asyncio.all_tasks() == before

    run(go())


def test_a_cancelled_call_leaves_the_connection_usable(roles: MemoryRoles) -> None:
    async def go() -> None:
        async with AsyncClient(roles.store, timeout=60) as client:
            await client.create_topic("orders", 1)
            poll = asyncio.ensure_future(client.pull("orders", 0, 0, timeout=2.0))
            await reached(lambda: roles.held_pulls == 1, "the poll is held")
            poll.cancel()
            with pytest.raises(asyncio.CancelledError):
                await poll
            await reached(lambda: roles.held_pulls == 0, "the poll is answered, though its caller has left")
            assert len(await client.topics()) == 1
            assert [len(server.connections) for server in roles.servers] == [1, 1]

    run(go())


@pytest.mark.parametrize("repeats", [False, True])
def test_closing_ends_calls_under_way(roles: MemoryRoles, repeats: bool) -> None:
    """Sends in flight have an unknown outcome, also if they could be repeated."""

    async def go() -> None:
        client = AsyncClient(roles.store, timeout=60, retry=RetryPolicy(repeat_sends=repeats))
        taken: list[Request] = []
        roles.behaviour = lambda request: taken.append(request) is None
        send = asyncio.ensure_future(client.send("orders", b"x"))
        await reached(lambda: len(taken) == 1, "the send is under way")
        await client.close()
        start = time.monotonic()
        with pytest.raises(SendOutcomeUnknownError):
            await send
        assert time.monotonic() - start < 30

    run(go())


def test_a_full_server_turns_away(tmp_path: Any) -> None:
    # Asked at 0 and 2 s: the next time would be too late, and none is under way when the timeout is over.
    patient = RetryPolicy(base_ms=2000, max_ms=4000, jitter=0)

    async def go(roles: MemoryRoles) -> None:
        async with AsyncClient(roles.store) as only, AsyncClient(roles.store, timeout=10.0, retry=patient) as other:
            await only.send("orders", b"x")
            with pytest.raises(TooManyConnectionsError):
                await other.send("orders", b"y")

    with MemoryRoles(tmp_path, ServerLimits(connections=1)) as roles:
        run(go(roles))
    assert [message.body for message in roles.messages] == [b"x"]


def test_another_event_loop_gets_a_connection_of_its_own(roles: MemoryRoles) -> None:
    client = AsyncClient(roles.store, timeout=60)
    for _ in range(2):
        run(client.ping())
    run(client.close())
