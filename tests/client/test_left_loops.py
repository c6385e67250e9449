"""Loops and receives that are left, cancelled or ended by user code lose and hide nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from mqproc.client._async.client import AsyncClient
from mqproc.client._async.consumer import AsyncConsumer
from mqproc.client._sync.client import Client
from mqproc.client.subscription import SESSION_TIMEOUT_S
from mqproc.errors import StoreBusyError
from mqproc.types import Message, StoredMessage
from tests.support.group import PATIENCE_S, Group, wait_until

COUNT = 100


@pytest.fixture
def topic(shared: Group) -> Iterator[str]:
    with shared.client() as client:
        name = f"left-{time.monotonic_ns()}"
        client.create_topic(name, queues=1)
        yield name


def test_new_loop_takes_message_of_left_one_as_done(shared: Group, topic: str) -> None:
    with shared.client() as client:
        with client.consumer("left", topic, start="earliest") as consumer:
            client.send_many(Message(topic, b"%d" % number) for number in range(4))
            bodies = [next(iter(consumer.messages(timeout=PATIENCE_S))).body for _ in range(2)]
            for message in consumer:
                bodies.append(message.body)
                break
            kept = consumer.messages(timeout=PATIENCE_S)
            bodies.append(next(kept).body)
            assert bodies == [b"0", b"1", b"2", b"3"]
            assert list(consumer.messages(timeout=0.01)) == [], "a loop that is not over is left as well"
            assert consumer.positions() == {(topic, 0): 4}
        client.close()
        before = os.listdir("/proc/self/fd")
        kept.close()
        assert os.listdir("/proc/self/fd") == before, "a loop that is closed last opens no connection"


def test_async_loop_survives_cancelled_anext(shared: Group, topic: str) -> None:
    async def run() -> list[bytes]:
        async with AsyncClient(shared.store) as client, client.consumer("cancelled", topic, start="earliest") as one:
            messages = one.messages()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(messages), 0.05)
            for number in range(3):
                await client.send(topic, b"%d" % number)
            return [(await anext(messages)).body for _ in range(3)]

    assert asyncio.run(run()) == [b"0", b"1", b"2"]


def test_async_range_survives_cancelled_anext(shared: Group, topic: str) -> None:
    async def run() -> list[bytes]:
        async with AsyncClient(shared.store) as client:
            await client.send_many(Message(topic, b"%d" % number) for number in range(5))
            await client.wait_dispatched(PATIENCE_S)
            messages, found = client.range(topic, page_messages=1), []
            while True:
                step = asyncio.ensure_future(anext(messages, None))
                await asyncio.sleep(0)
                if len(found) % 2:
                    step.cancel()
                message: StoredMessage | BaseException | None
                (message,) = await asyncio.gather(step, return_exceptions=True)
                if isinstance(message, asyncio.CancelledError):
                    message = await anext(messages, None)
                if message is None:
                    return found
                assert isinstance(message, StoredMessage)
                found.append(message.body)

    assert asyncio.run(run()) == [b"0", b"1", b"2", b"3", b"4"]


def test_async_receive_cancelled_hands_messages_back(shared: Group, topic: str) -> None:
    """Each message is received long before its invisible time is over."""

    async def run() -> set[bytes]:
        async with AsyncClient(shared.store) as client:
            consumer = client.simple_consumer("handed-back", topic, start="earliest")

            async def send() -> None:
                for number in range(COUNT):
                    await client.send(topic, b"%d" % number)
                    await asyncio.sleep(0.003)

            sending, found = asyncio.ensure_future(send()), set()
            deadline, rounds = time.monotonic() + PATIENCE_S, 0
            while len(found) < COUNT and time.monotonic() < deadline:
                # Every other one is cancelled about when a message arrives, so none becomes a dead letter.
                rounds += 1
                wait_s = 0.004 if rounds % 2 else PATIENCE_S
                try:
                    messages = await asyncio.wait_for(consumer.receive(8, 300, timeout=0.2), wait_s)
                except TimeoutError:
                    continue
                found |= {message.body for message in messages}
                await consumer.ack(*messages)
            await sending
            return found

    assert len(asyncio.run(run())) == COUNT


@pytest.mark.filterwarnings("ignore:.*unclosed <socket:ResourceWarning")  # Of the client that is left open.
def test_async_receive_at_loop_end_hands_messages_back(shared: Group, topic: str) -> None:
    async def leave_waiting() -> None:
        consumer = AsyncClient(shared.store).simple_consumer("loop-end", topic, start="earliest")
        waiting = asyncio.ensure_future(consumer.receive(8, 300, timeout=PATIENCE_S))
        async with asyncio.timeout(PATIENCE_S):
            while not shared.words()["waiting_pulls"]:
                await asyncio.sleep(0.01)
        with shared.client() as client:  # Blocks the loop, which ends before it has read the answer.
            client.send(topic, b"x")
            wait_until(lambda: not shared.words()["waiting_pulls"])
        assert not waiting.done()

    async def receive() -> list[bytes]:
        async with AsyncClient(shared.store) as client:
            consumer = client.simple_consumer("loop-end", topic, start="earliest")
            return [message.body for message in await consumer.receive(8, 300, timeout=5)]

    asyncio.run(leave_waiting())
    assert asyncio.run(receive()) == [b"x"]
    gc.collect()


class Failed(Exception):
    """Raised by the program of an event loop."""


async def in_loop(consumer: AsyncConsumer, left: list[object]) -> None:
    left.append(messages := consumer.messages())
    await anext(messages)


async def waiting(consumer: AsyncConsumer, left: list[object]) -> None:
    await in_loop(consumer, left)
    left.append(asyncio.ensure_future(consumer.receive(1, timeout=PATIENCE_S)))
    await asyncio.sleep(0.01)


async def handling(consumer: AsyncConsumer, left: list[object]) -> None:
    begun = asyncio.Event()

    async def handle(_message: StoredMessage) -> None:
        begun.set()
        await asyncio.sleep(PATIENCE_S)

    left.append(asyncio.ensure_future(consumer.run(handle)))
    await begun.wait()


async def cancelled(consumer: AsyncConsumer, left: list[object]) -> None:
    await in_loop(consumer, left)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


async def failed(consumer: AsyncConsumer, left: list[object]) -> None:
    await in_loop(consumer, left)
    raise Failed


async def at_once(_consumer: AsyncConsumer, _left: list[object]) -> None:
    pass


@pytest.mark.filterwarnings("ignore:.*unclosed <socket:ResourceWarning")  # Of the client that is left open.
@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("leave", [at_once, in_loop, waiting, handling, cancelled, failed])
def test_second_event_loop_gets_messages_of_left_consumer_at_once(
    shared: Group, topic: str, tmp_path: Path, leave: Callable[..., Coroutine[Any, Any, None]], broadcast: bool
) -> None:
    left: list[object] = []
    group = f"{topic}-{leave.__name__}"
    path = tmp_path / "progress.json" if broadcast else None

    async def begin() -> AsyncConsumer:
        client = AsyncClient(shared.store)
        consumer = await client.consumer(group, topic, start="earliest", broadcast=broadcast, offsets_path=path)
        left.extend((client, consumer))
        return consumer

    async def leave_open() -> None:
        await leave(await begin(), left)

    async def receive() -> tuple[float, bytes]:
        consumer = await begin()
        began_s = time.monotonic()
        message = await anext(consumer.messages())
        return time.monotonic() - began_s, message.body

    with shared.client() as client:
        client.send(topic, b"x")
    with contextlib.suppress(Failed):
        asyncio.run(leave_open())
    waited_s, body = asyncio.run(receive())
    assert body == b"x"
    assert waited_s < SESSION_TIMEOUT_S / 2
    left.clear()
    gc.collect()


def test_consumer_without_descriptor_raises_store_busy(shared: Group, topic: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with shared.client() as client:
        client.ping()
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            with pytest.raises(StoreBusyError, match="descriptor"):
                client.consumer("descriptors", topic)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        with client.consumer("descriptors", topic):
            pass


def test_producer_callback_that_exits_does_not_end_it(shared: Group, topic: str) -> None:
    with shared.client() as client, client.producer(linger_ms=0) as producer:
        for _ in range(2):
            assert producer.send(topic, b"x", on_done=lambda _: sys.exit()).result(PATIENCE_S)
        assert producer.send(topic, b"x").result(PATIENCE_S)


def test_transaction_checker_that_exits_is_asked_again(shared: Group, topic: str) -> None:
    asked: list[str] = []

    def check(message: StoredMessage) -> bool:
        asked.append(message.message_id)
        if len(asked) == 1:
            sys.exit()
        return True

    with shared.client() as client:
        transaction = client.transaction("exits", Message(topic, b"x")).begin()
        with client.transaction_producer("exits", check) as producer:
            for count in (1, 2):
                wait_until(lambda count=count: ask(client) and len(asked) >= count)
            assert producer.failure is None
        assert transaction.transaction_id


def ask(client: Client) -> bool:
    """Have the producers asked now."""
    client.transactions.check(*client.transactions.open("exits"))
    return True
