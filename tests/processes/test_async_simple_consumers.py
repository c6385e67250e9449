"""Simple consumers of the asyncio client: expiry, changes, restarts, cancellation."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest

from mqproc import AsyncClient, BadRequestError, StoredMessage
from mqproc.client._async.consumer import AsyncSimpleConsumer
from mqproc.layout.control import QUERY
from tests.processes.test_simple_consumers import CHANGED_S
from tests.support.group import Group, wait_until

Program = Callable[[AsyncClient], Awaitable[None]]
PATIENCE_S = 60.0
LONG_S = 300.0


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """One group for all tests that kill nothing."""
    group = Group(tmp_path_factory.mktemp("simple") / "store").start()
    yield group
    group.close()


def run(group: Group, program: Program) -> None:
    async def main() -> None:
        async with asyncio.timeout(250), AsyncClient(group.store) as client:
            await program(client)

    asyncio.run(main())


async def fill(client: AsyncClient, topic: str, count: int) -> list[bytes]:
    """Create a topic of one queue with this many messages."""
    await client.create_topic(topic, 1)
    bodies = [b"%d" % number for number in range(count)]
    if bodies:
        await client.send_batch(topic, bodies)
    await client.wait_dispatched()
    return bodies


async def received(consumer: AsyncSimpleConsumer, count: int, invisible_s: float = LONG_S) -> list[StoredMessage]:
    """Receive until there are this many messages."""
    found: list[StoredMessage] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} came"
        found += await consumer.receive(count - len(found), invisible_s, timeout=2)
    return found


async def connections_are(client: AsyncClient, count: int) -> None:
    """Wait until query has this many connections and has read all requests sent before."""
    while (await client.stats())["query_connections"] != count:
        await asyncio.sleep(0.001)
    await client.stats()


def kill_query(group: Group) -> None:
    """Kill query; return when its successor runs."""
    query = group.pid(QUERY)
    os.kill(query, signal.SIGKILL)
    wait_until(lambda: group.pid(QUERY) != query, what="another query role")


def bodies_of(messages: list[StoredMessage]) -> list[bytes]:
    return sorted(message.body for message in messages)


def test_receive_waits_for_its_timeout(shared: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Query holds a receive for at most one minute."""
    monkeypatch.setattr("mqproc.client.subscription.RECEIVE_MS_MAX", 200)

    async def program(client: AsyncClient) -> None:
        await fill(client, "Waits", 0)
        consumer = client.simple_consumer("waits", "Waits", start="earliest")
        waiting = asyncio.ensure_future(consumer.receive(timeout=PATIENCE_S))
        assert await consumer.receive(timeout=0.5) == []
        assert not waiting.done()
        await client.send("Waits", b"0")
        assert await consumer.ack(*await waiting) == 1

    run(shared, program)


def test_receive_expired_message_is_redelivered_and_old_receipt_void(shared: Group) -> None:
    async def program(client: AsyncClient) -> None:
        await fill(client, "Expired", 3)
        one = client.simple_consumer("expired", "Expired", start="earliest")
        other = client.simple_consumer("expired", "Expired")
        (kept,) = await received(one, 1)
        began = time.monotonic()
        first, second = await received(one, 2, invisible_s=1.0)
        assert await one.ack(kept) == 1
        again = await received(other, 2)
        assert time.monotonic() - began >= 1.0, "they were the first receiver's for a second"
        assert bodies_of(again) == [b"1", b"2"]
        assert {(each.stored_topic, each.reconsume_times) for each in again} == {("%RETRY%expired_Expired", 1)}
        assert await one.ack(first, second) == 0, "too late"
        with pytest.raises(BadRequestError, match="no longer held by this receiver"):
            await one.change_invisible_duration(first, 60)
        assert await other.ack(*again) == 2
        assert await other.ack(*again) == 0, "done before"
        assert (await client.groups.info("expired")).lag == 0
        assert await one.receive(1, timeout=1.2) == []

    run(shared, program)


def test_receive_invisible_time_can_be_changed(shared: Group) -> None:
    async def program(client: AsyncClient) -> None:
        await fill(client, "Changed", 2)
        consumer = client.simple_consumer("changed", "Changed", start="earliest")
        longer, shorter = await received(consumer, 2, invisible_s=CHANGED_S)
        kept = await consumer.change_invisible_duration(longer, LONG_S)
        given = await consumer.change_invisible_duration(shorter, 1)
        (again,) = await received(consumer, 1)
        assert again.body == shorter.body
        assert await consumer.receive(1, timeout=CHANGED_S) == [], "the other one's time has become longer"
        assert await consumer.ack(longer, given) == 0, "previous handles"
        assert await consumer.ack(kept, again) == 2
        for seconds in (0.5, 43_201):
            with pytest.raises(BadRequestError, match="from 1 to 43200 s"):
                await consumer.receive(1, seconds)

    run(shared, program)


def test_receive_waiting_tasks_share_messages(shared: Group) -> None:
    async def program(client: AsyncClient) -> None:
        await fill(client, "Tasks", 0)
        consumer = client.simple_consumer("tasks", "Tasks", start="earliest")
        waiting = [asyncio.create_task(consumer.receive(1, LONG_S, timeout=PATIENCE_S)) for _ in range(20)]
        sent = [b"%02d" % number for number in range(20)]
        for body in sent:
            await client.send("Tasks", body)
        found = [message for messages in await asyncio.gather(*waiting) for message in messages]
        assert bodies_of(found) == sent
        acked = await asyncio.gather(*(consumer.ack(message) for message in found))
        assert acked == [1] * 20

    run(shared, program)


def test_receive_cancelled_leaves_message_to_the_next(shared: Group) -> None:
    async def program(client: AsyncClient) -> None:
        await fill(client, "Cancelled", 0)
        before = (await client.stats())["query_connections"]
        consumer = client.simple_consumer("cancelled", "Cancelled", start="earliest")
        waiting = asyncio.create_task(consumer.receive(1, LONG_S, timeout=PATIENCE_S))
        await connections_are(client, before + 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await connections_are(client, before)
        await client.send("Cancelled", b"1")
        (message,) = await received(consumer, 1)
        assert (message.body, message.reconsume_times, await consumer.ack(message)) == (b"1", 0, 1)

    run(shared, program)


def test_client_close_ends_waiting_receives_and_connections(shared: Group) -> None:
    async def program(_: AsyncClient) -> None:
        async with AsyncClient(shared.store) as closed:
            await fill(closed, "Closed", 0)
            before = (await closed.stats())["query_connections"]
            consumer = closed.simple_consumer("closed", "Closed", start="earliest")
            waiting = asyncio.create_task(consumer.receive(1, LONG_S, timeout=PATIENCE_S))
            await connections_are(closed, before + 1)
        async with asyncio.timeout(PATIENCE_S / 2):
            with pytest.raises(BadRequestError, match="the client was closed"):
                await waiting
        # The consumer remains usable, and the next receive gets the message.
        await closed.send("Closed", b"1")
        (message,) = await received(consumer, 1)
        assert (message.body, await consumer.ack(message)) == (b"1", 1)
        await closed.close()

    run(shared, program)


def test_receive_survives_query_restarts(group: Group) -> None:
    """Acknowledged messages stay so, received ones stay invisible, waiting receives continue."""

    async def program(client: AsyncClient) -> None:
        sent = await fill(client, "orders", 6)
        consumer = client.simple_consumer("billing", "orders", start="earliest")
        first = await received(consumer, 4)
        assert await consumer.ack(*first[:2]) == 2
        rest = await received(consumer, 2)
        assert bodies_of(first + rest) == sent
        waiting = asyncio.create_task(consumer.receive(16, LONG_S, timeout=PATIENCE_S))
        for _ in range(2):
            await asyncio.to_thread(kill_query, group)
        await client.send("orders", b"6")
        assert [message.body for message in await waiting] == [b"6"], "nothing that is acknowledged or in hands"
        last = await consumer.change_invisible_duration(first[2], LONG_S)
        assert await consumer.ack(last, first[3], *rest) == 4
        assert await consumer.ack(*first) == 2, "earlier acks count again: the caller may not have got the answer"
        assert await consumer.receive(1, timeout=1.0) == []

    run(group, program)
