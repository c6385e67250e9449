"""FastStream's real application on the broker: 10,000 messages and a kill, acknowledgements, replies, routers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import pytest
from faststream import AckPolicy, Context, FastStream
from faststream.exceptions import FeatureNotSupportedException, NackMessage
from faststream.specification.asyncapi import AsyncAPI

from mqproc import BadRequestError, Client, NotRunningError
from mqproc.integrations.faststream import MqprocBroker, MqprocRouter, MqprocStreamMessage
from tests.support.group import PATIENCE_S, ROOT, Group, bodies, offsets, wait_until

APP = """
import asyncio, os
from faststream import FastStream
from mqproc.integrations.faststream import MqprocBroker

broker = MqprocBroker({store!r}, log_level=30)
app = FastStream(broker)

@broker.subscriber("Many", group="many", start="earliest", max_workers=8)
async def work(number: int) -> None:
    while number >= 5_000 and not os.path.exists("continue"):
        await asyncio.sleep(0.05)
    fd = os.open("done", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, b"%d\\n" % number)
    os.close(fd)
"""
MESSAGES = 10_000
POLL_S = 0.2
"""Pause between looks at a file that the workers need the processors for."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    group = Group(tmp_path_factory.mktemp("faststream") / "store").start()
    yield group
    group.close()


@pytest.fixture
def client(shared: Group) -> Iterator[Client]:
    with shared.client() as client:
        yield client


@pytest.fixture
def broker(shared: Group) -> MqprocBroker:
    return MqprocBroker(shared.store, logger=None)


@asynccontextmanager
async def running(broker: MqprocBroker) -> AsyncIterator[None]:
    await broker.start()
    try:
        yield
    finally:
        await broker.stop()


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


def done(folder: Path) -> list[int]:
    path = folder / "done"
    return list(map(int, path.read_text().split())) if path.exists() else []


def log_of(folder: Path) -> str:
    return (folder / "log").read_text()[-3000:]


@pytest.mark.timeout(300)
def test_no_message_is_lost_when_an_application_is_killed(tmp_path: Path, shared: Group, broker: MqprocBroker) -> None:
    (tmp_path / "app.py").write_text(APP.format(store=str(shared.store)))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "faststream", "run", "app:app"]
        with (tmp_path / "log").open("ab") as log:
            return subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)

    async def publish() -> None:
        async with broker:
            for number in range(MESSAGES):
                await broker.publish(number, "Many")

    asyncio.run(publish())
    with start() as first:
        wait_until(lambda: time.sleep(POLL_S) or len(done(tmp_path)) >= MESSAGES // 4, 120, log_of(tmp_path))
        first.kill()
    assert len(done(tmp_path)) < MESSAGES
    (tmp_path / "continue").touch()
    with start() as second:
        wait_until(lambda: time.sleep(POLL_S) or len(set(done(tmp_path))) == MESSAGES, 120, log_of(tmp_path))
        second.send_signal(signal.SIGTERM)
        assert second.wait(PATIENCE_S) == 0, log_of(tmp_path)
    again = [number for number, count in Counter(done(tmp_path)).items() if count > 1]
    # Messages since the last commit, which is at most 5 s old, are handled again.
    assert len(again) < MESSAGES
    with shared.client() as client:
        assert client.groups.info("many").lag == 0


def test_message_fields_and_reply(broker: MqprocBroker, client: Client) -> None:
    seen: list[MqprocStreamMessage] = []
    replies: list[Any] = []

    @broker.subscriber("Asked", group="asked", start="earliest")
    async def answer(body: dict[str, int], message: Annotated[Any, Context()]) -> dict[str, int]:
        seen.append(message)
        return {"n": body["n"] + 1}

    @broker.subscriber("Answers", group="answers", start="earliest")
    async def collect(body: dict[str, int]) -> None:
        replies.append(body)

    async def main() -> None:
        async with running(broker):
            sent = await broker.publish({"n": 1}, "Asked", headers={"a": "b"}, reply_to="Answers", keys="k-1", tag="t")
            await until(lambda: replies)
            assert sent.unique_id == seen[0].message_id
            assert await broker.ping(5)

    asyncio.run(main())
    assert replies == [{"n": 2}]
    stored = seen[0].raw_message
    assert (stored.body, stored.keys, stored.tag, seen[0].headers["a"]) == (b'{"n":1}', ("k-1",), "t", "b")
    assert offsets(client, "asked", "Asked")[stored.queue_id] == 1


def test_failed_message_is_redelivered_and_rejected_one_is_dead(broker: MqprocBroker, client: Client) -> None:
    tries: list[tuple[str, int]] = []

    @broker.subscriber("Failing", group="failing", start="earliest")
    async def fail(body: str, message: Annotated[Any, Context()]) -> None:
        tries.append((body, message.raw_message.reconsume_times))
        if body == "reject":
            await message.reject()
        elif body == "soon" and not message.raw_message.reconsume_times:
            raise NackMessage(delay_level=1)
        elif body == "later":
            raise ValueError("later")

    async def main() -> None:
        async with running(broker):
            for body in ("reject", "soon", "later"):
                await broker.publish(body, "Failing")
            await until(lambda: ("soon", 1) in tries and len(tries) == 4)

    asyncio.run(main())
    assert [letter.body for letter in client.groups.dead_letters("failing")] == [b"reject"]
    assert client.groups.info("failing").waiting_retries == 1


@pytest.mark.parametrize("policy", [AckPolicy.ACK, AckPolicy.REJECT_ON_ERROR, AckPolicy.MANUAL])
def test_ack_policy_decides_about_failures(broker: MqprocBroker, client: Client, policy: AckPolicy) -> None:
    name = f"Policy-{policy.value}"
    tries: list[str] = []

    @broker.subscriber(name, group=name, start="earliest", ack_policy=policy)
    async def fail(body: str) -> None:
        tries.append(body)
        raise ValueError(body)

    async def main() -> None:
        async with running(broker):
            await broker.publish("x", name)
            await until(lambda: tries)

    asyncio.run(main())
    info = client.groups.info(name)
    assert info.waiting_retries == 0
    assert info.lag == (1 if policy is AckPolicy.MANUAL else 0)
    assert len(list(client.groups.dead_letters(name))) == (policy is AckPolicy.REJECT_ON_ERROR)


def test_router_prefix_publisher_and_specification(broker: MqprocBroker, client: Client) -> None:
    router = MqprocRouter("shop-")
    results: list[int] = []

    @router.subscriber("in", group="router", start="earliest", filter="t")
    @router.publisher("out", tag="result")
    async def double(body: int) -> int:
        results.append(body)
        return 2 * body

    broker.include_router(router)

    async def main() -> None:
        async with running(broker):
            await broker.publish(4, "shop-in", tag="t")
            await broker.publish(5, "shop-in", tag="u")
            await until(lambda: results)

    asyncio.run(main())
    assert (results, bodies(client, "shop-out")) == ([4], [b"8"])
    schema = AsyncAPI(broker).to_specification().to_jsonable()
    assert {each["address"] for each in schema["channels"].values()} == {"shop-in", "shop-out"}


def test_ended_consumer_is_replaced(broker: MqprocBroker, client: Client) -> None:
    client.create_topic("Replaced", 1)
    handled: list[int] = []

    @broker.subscriber("Replaced", group="replaced", start="earliest", filter="a")
    async def handle(body: int) -> None:
        handled.append(body)

    async def until_ping(expected: bool) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while await broker.ping(PATIENCE_S) is not expected:
                await asyncio.sleep(0.01)

    async def main() -> None:
        async with running(broker):
            await broker.publish(1, "Replaced", tag="a")
            await until(lambda: handled == [1])
            assert await broker.ping(PATIENCE_S)
            other = await asyncio.to_thread(client.consumer, "replaced", "Replaced", filter="b", change_filter=True)
            await until_ping(False)
            await asyncio.to_thread(other.close)
            await broker.publish(2, "Replaced", tag="a")  # Earlier, the other one would have skipped it for the group.
            await until(lambda: handled == [1, 2])
            await until_ping(True)

    asyncio.run(main())
    assert offsets(client, "replaced", "Replaced") == [2]


def test_stop_finishes_messages_in_the_handlers(broker: MqprocBroker, client: Client) -> None:
    begun, ended = [], []

    @broker.subscriber("Stopped", group="stopped", start="earliest", max_workers=2)
    async def slow(body: int) -> None:
        begun.append(body)
        await asyncio.sleep(0.5)
        ended.append(body)

    async def main() -> None:
        async with running(broker):
            for number in range(6):
                await broker.publish(number, "Stopped")
            await until(lambda: len(begun) == 2)

    asyncio.run(main())
    assert sorted(begun) == sorted(ended)
    assert sum(filter(None, offsets(client, "stopped", "Stopped"))) == len(ended)


def test_messages_without_handler_are_read_one_by_one(broker: MqprocBroker, client: Client) -> None:
    subscriber = broker.subscriber("Single", group="single", start="earliest")

    async def main() -> None:
        async with running(broker):
            await broker.publish({"n": 1}, "Single")
            message = await subscriber.get_one(timeout=PATIENCE_S)
            assert message is not None
            assert await message.decode() == {"n": 1}
            await message.ack()
            assert await subscriber.get_one(timeout=0.1) is None

    asyncio.run(main())
    assert client.groups.info("single").lag == 0


def test_what_is_not_supported_is_refused(broker: MqprocBroker, tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(NotRunningError, match="not connected"):
            await broker.publish("x", "T")
        async with broker:
            with pytest.raises(FeatureNotSupportedException, match="reply_to"):
                await broker.request("x", "T")
        with pytest.raises(BadRequestError, match="max_workers"):
            broker.subscriber("T", group="g", max_workers=0)
        with pytest.raises(NotRunningError):
            await MqprocBroker(tmp_path).connect()

    asyncio.run(main())
    assert FastStream(broker).broker is broker
