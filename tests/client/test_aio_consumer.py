"""The asynchronous group consumer against a real group: the same as the synchronous one, in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from mqproc import AsyncClient, AsyncConsumer, BadRequestError, GroupNotFoundError, StaleOffsetError, StoredMessage
from mqproc.client.group_steps import ResetTo
from tests.client.test_consumer import QUIET_S
from tests.conftest import Group

Program = Callable[[AsyncClient], Awaitable[None]]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    group = Group(tmp_path_factory.mktemp("consumers") / "store").start()
    yield group
    group.close()


@pytest.fixture
def run(shared: Group) -> Callable[[Program], None]:
    """Runs a program with a client in an event loop of its own."""

    def run(program: Program) -> None:
        async def main() -> None:
            async with asyncio.timeout(60), AsyncClient(shared.store) as client:
                await program(client)

        asyncio.run(main())

    return run


async def fill(client: AsyncClient, topic: str, count: int, queues: int = 4) -> list[bytes]:
    await client.create_topic(topic, queues)
    bodies = [b"%d" % number for number in range(count)]
    if bodies:
        await client.send_batch(topic, bodies, queue_ids=[number % queues for number in range(count)])
    await client.wait_dispatched()
    return bodies


async def offsets(client: AsyncClient, group: str) -> list[int | None]:
    return [queue.offset for queue in (await client.groups.info(group)).queues]


async def reached(condition: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        pytest.fail(what)


def test_every_message_comes_once_in_order_and_is_committed(run: Callable[[Program], None]) -> None:
    async def program(client: AsyncClient) -> None:
        sent = await fill(client, "Once", 2000)
        async with await client.consumer("once", "Once", start="earliest", pull_messages=100) as consumer:
            found = [message async for message in consumer.messages(timeout=QUIET_S)]
            assert len(consumer.queues) == 4
            assert await consumer.lag() == 0
        assert sorted((message.body for message in found), key=int) == sent
        for queue_id in range(4):
            assert [message.queue_offset for message in found if message.queue_id == queue_id] == list(range(500))
        assert await offsets(client, "once") == [500] * 4
        assert (await client.groups.info("once")).members == ()

    run(program)


def test_a_loop_that_is_left_commits_what_is_done(run: Callable[[Program], None]) -> None:
    async def program(client: AsyncClient) -> None:
        sent = await fill(client, "Left", 20, queues=1)
        async with await client.consumer("left", "Left", start="earliest") as consumer:
            async for message in consumer:
                if message.body == b"7":
                    break
        assert await offsets(client, "left") == [8]
        async with await client.consumer("left", "Left") as consumer:
            assert [message.body async for message in consumer.messages(timeout=QUIET_S)] == sent[8:]

    run(program)


def test_members_share_and_hand_over(run: Callable[[Program], None]) -> None:
    async def program(client: AsyncClient) -> None:
        await fill(client, "Shared", 0, queues=6)
        first = await client.consumer("shared", "Shared")
        assert len(first.queues) == 6
        second = await client.consumer("shared", "Shared")
        await reached(lambda: len(first.queues) == len(second.queues) == 3, "three queues each")
        await first.close()
        await reached(lambda: len(second.queues) == 6, "all queues at the one that is left")
        await second.close()

    run(program)


def test_batches_are_arrow(run: Callable[[Program], None]) -> None:
    async def program(client: AsyncClient) -> None:
        sent = await fill(client, "Arrow", 300)
        async with await client.consumer("arrow", "Arrow", start="earliest") as consumer:
            batches = [batch async for batch in consumer.batches(["body"], timeout=QUIET_S)]
            with pytest.raises(BadRequestError, match="either"):
                await consumer.receive()
        assert sorted((body for batch in batches for body in batch["body"].to_pylist()), key=int) == sent
        assert await offsets(client, "arrow") == [75] * 4

    run(program)


@pytest.mark.parametrize("ordered", [False, True])
def test_handlers_run_as_tasks(run: Callable[[Program], None], ordered: bool) -> None:
    async def program(client: AsyncClient) -> None:
        topic, group = f"Handled{ordered}", f"handled{ordered}"
        await fill(client, topic, 200)
        await client.groups.change(group, retry_max_times=0)
        seen: list[StoredMessage] = []
        stop = asyncio.Event()

        async def handle(message: StoredMessage) -> None:
            await asyncio.sleep(0)
            if message.body == b"50":
                raise ValueError("never")
            seen.append(message)
            if len(seen) == 199:
                stop.set()

        async with await client.consumer(group, topic, start="earliest") as consumer:
            await consumer.run(handle, workers=8, ordered=ordered, stop=stop, pause_s=0.01)
        assert len({message.body for message in seen}) == 199
        if ordered:
            for queue_id in range(4):
                found = [message.queue_offset for message in seen if message.queue_id == queue_id]
                assert found == sorted(found)
        await client.wait_dispatched()
        assert [letter.body async for letter in client.groups.dead_letters(group)] == [b"50"]
        assert (await client.groups.info(group)).lag == 0

    run(program)


def test_broadcast_keeps_its_own_progress(run: Callable[[Program], None], tmp_path: Path) -> None:
    async def program(client: AsyncClient) -> None:
        sent = await fill(client, "Cast", 50)
        for expected in (sent, []):
            consumer = await client.consumer(
                "cast", "Cast", start="earliest", broadcast=True, offsets_path=tmp_path / "offsets.json"
            )
            async with consumer:
                found = [message.body async for message in consumer.messages(timeout=QUIET_S)]
            assert sorted(found, key=int) == expected

    run(program)


def test_progress_by_hand(run: Callable[[Program], None]) -> None:
    async def program(client: AsyncClient) -> None:
        await fill(client, "Hand", 10, queues=1)
        groups = client.groups
        await groups.commit("hand", "Hand", 0, 5)
        with pytest.raises(StaleOffsetError):
            await groups.commit("hand", "Hand", 0, 4)
        await groups.execute("hand", await groups.plan_reset("hand", ResetTo(shift=-3)))
        assert await offsets(client, "hand") == [2]
        await groups.execute("copied", await groups.plan_clone("hand", "copied"))
        assert {group.group for group in await groups.all()} >= {"hand", "copied"}
        await groups.delete("copied")
        with pytest.raises(GroupNotFoundError):
            await groups.info("copied")

    run(program)


def test_a_consumer_goes_on_from_where_it_seeks(run: Callable[[Program], None], tmp_path: Path) -> None:
    async def bodies(consumer: AsyncConsumer) -> list[bytes]:
        return sorted([message.body async for message in consumer.messages(timeout=QUIET_S)], key=int)

    async def program(client: AsyncClient) -> None:
        sent = await fill(client, "AioSought", 20, queues=2)
        async with await client.consumer("aio-sought", "AioSought") as consumer:
            await consumer.seek(ResetTo(offset=7))
            assert await bodies(consumer) == sent[14:]
            await consumer.seek(ResetTo(shift=-1))
            assert await bodies(consumer) == sent[18:]
            assert consumer.positions() == {("AioSought", 0): 10, ("AioSought", 1): 10}
        path = tmp_path / "offsets.json"
        async with await client.consumer("aio-sought", "AioSought", broadcast=True, offsets_path=path) as consumer:
            await consumer.seek(ResetTo(earliest=True))
            assert await bodies(consumer) == sent

    run(program)
