"""The asynchronous group consumer against a real group, in one event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mqproc import (
    AsyncClient,
    AsyncConsumer,
    BadRequestError,
    FilterSyntaxError,
    GroupNotFoundError,
    NotRunningError,
    SqlFilter,
    StaleOffsetError,
    StoredMessage,
    TagFilter,
)
from mqproc.client.assignment import HOLD_S
from mqproc.client.group_requests import ResetTo
from tests.support.group import PATIENCE_S, Group, all_batches_of_async, all_of_async, hide_from_one_pull

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
            async with asyncio.timeout(200), AsyncClient(shared.store) as client:
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
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        pytest.fail(what)


def test_async_consumer_gets_messages_once_in_order_and_commits(run: Callable[[Program], None]) -> None:
    async def program(client: AsyncClient) -> None:
        sent = await fill(client, "Once", 2000)
        async with client.consumer("once", "Once", start="earliest", pull_messages=100) as consumer:
            found = await all_of_async(consumer, len(sent))
            assert len(consumer.queues) == 4
            assert await consumer.lag() == 0
        assert sorted((message.body for message in found), key=int) == sent
        for queue_id in range(4):
            assert [message.queue_offset for message in found if message.queue_id == queue_id] == list(range(500))
        assert await offsets(client, "once") == [500] * 4
        assert (await client.groups.info("once")).members == ()

    run(program)


def test_loop_left_commits_done_messages(run: Callable[[Program], None]) -> None:
    async def program(client: AsyncClient) -> None:
        sent = await fill(client, "Left", 20, queues=1)
        async with client.consumer("left", "Left", start="earliest") as consumer:
            async for message in consumer:
                if message.body == b"7":
                    break
        assert await offsets(client, "left") == [8]
        async with client.consumer("left", "Left") as consumer:
            assert [message.body for message in await all_of_async(consumer, 12)] == sent[8:]

    run(program)


def test_loop_with_filter_left_commits_its_last_message(run: Callable[[Program], None]) -> None:
    async def program(client: AsyncClient) -> None:
        await client.create_topic("Every", queues=1)
        await client.send_batch("Every", [b"0", b"1", b"2", b"3"], tags=["no", "yes"] * 2)
        await client.wait_dispatched()
        for body in (b"1", b"3"):
            async with client.consumer("every", "Every", filter="yes", start="earliest") as consumer:
                assert (await anext(consumer.messages(PATIENCE_S))).body == body
            assert await offsets(client, "every") == [int(body) + 1]

    run(program)


def test_waiting_receive_gets_released_message_at_once(
    run: Callable[[Program], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mqproc.client._async.consumer.LOOK_S", PATIENCE_S)

    async def program(client: AsyncClient) -> None:
        await fill(client, "Next", 2, queues=1)
        async with client.consumer("next", "Next", start="earliest") as consumer:
            async for message in consumer:
                assert message.body == b"0"
                break
            began_s = time.monotonic()
            (first,) = await consumer.receive(1, PATIENCE_S)
            asyncio.get_running_loop().call_soon(consumer.take_back, [first])
            (first,) = await consumer.receive(1, PATIENCE_S, ordered=True)
            done = asyncio.ensure_future(consumer.ack(first))
            assert [message.body for message in await consumer.receive(1, PATIENCE_S, ordered=True)] == [b"1"]
            assert time.monotonic() - began_s < PATIENCE_S / 2
            await done

    run(program)


async def check_left(client: AsyncClient, group: str, topic: str) -> None:
    """The consumer is the only member: another one that joins gets all four queues."""
    async with asyncio.timeout(PATIENCE_S), client.consumer(group, topic) as successor:
        await reached(lambda: len(successor.queues) == 4, "all queues")


def test_cancelled_close_leaves_the_group(run: Callable[[Program], None]) -> None:
    async def program(client: AsyncClient) -> None:
        await fill(client, "Cancelled", 4)
        consumer = await client.consumer("cancelled", "Cancelled", start="earliest")
        leaving = asyncio.ensure_future(consumer._member.leave())
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        await check_left(client, "cancelled", "Cancelled")
        await consumer.close()

    run(program)


def test_cancelled_during_close_is_no_member(run: Callable[[Program], None]) -> None:
    """A second cancellation comes so, behind the one that has ended the block."""

    async def program(client: AsyncClient) -> None:
        await fill(client, "Twice", 4)
        consumer = await client.consumer("twice", "Twice", start="earliest")
        assert await consumer.receive(1, PATIENCE_S)
        closing = asyncio.ensure_future(consumer.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        await check_left(client, "twice", "Twice")

    run(program)


def test_close_without_commit_sends_no_leave_request(
    run: Callable[[Program], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def program(client: AsyncClient) -> None:
        await fill(client, "Unheard", 4)
        consumer = await client.consumer("unheard", "Unheard", start="earliest")
        messages = await consumer.receive(1, PATIENCE_S)
        monkeypatch.setattr(consumer, "_commit_at", time.monotonic() + PATIENCE_S)
        await consumer.ack(*messages)
        asked: list[Any] = []

        async def fail(call: Any) -> Any:
            asked.append(call)
            raise NotRunningError("no group serves this store now")

        monkeypatch.setattr(client, "run", fail)
        with pytest.raises(NotRunningError):
            await consumer.close()
        assert len(asked) == 1

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
        async with client.consumer("arrow", "Arrow", start="earliest") as consumer:
            batches = await all_batches_of_async(consumer, ["body"], len(sent))
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

        async with client.consumer(group, topic, start="earliest") as consumer:
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


def test_nacked_message_is_redelivered_until_dead_letter(run: Callable[[Program], None]) -> None:
    async def program(client: AsyncClient) -> None:
        await fill(client, "NackedAsync", 4, queues=1)
        async with client.consumer("nacked-async", "NackedAsync", start="earliest") as consumer:
            first = await consumer.receive(4, timeout=PATIENCE_S)
            assert len(first) == 4
            await consumer.ack(first[0], first[2])
            await consumer.nack(first[1], delay_level=1)
            await consumer.nack(first[3], delay_level=-1)
            (again,) = await consumer.receive(4, timeout=PATIENCE_S)
            assert (again.stored_topic, again.body, again.reconsume_times) == ("%RETRY%nacked-async", b"1", 1)
            assert again.properties["RETRY_TOPIC"] == "NackedAsync"
            await consumer.ack(again)
        await client.wait_dispatched()
        dead = [letter.body async for letter in client.groups.dead_letters("nacked-async")]
        assert dead == [b"3"]
        info = await client.groups.info("nacked-async")
        assert (info.lag, [queue.offset for queue in info.queues if queue.topic == "NackedAsync"]) == (0, [4])

    run(program)


def test_broadcast_keeps_its_own_progress(run: Callable[[Program], None], tmp_path: Path) -> None:
    async def program(client: AsyncClient) -> None:
        sent = await fill(client, "Cast", 50)
        for expected in (sent, []):
            consumer = await client.consumer(
                "cast", "Cast", start="earliest", broadcast=True, offsets_path=tmp_path / "offsets.json"
            )
            async with consumer:
                found = [message.body for message in await all_of_async(consumer, len(expected))]
            assert sorted(found, key=int) == expected

    run(program)


def test_recreated_topic_is_consumed_from_its_beginning(
    run: Callable[[Program], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def program(client: AsyncClient) -> None:
        sent = await fill(client, "Hidden", 3, queues=1)
        asked = hide_from_one_pull(monkeypatch, "Hidden")
        async with client.consumer("hidden", "Hidden", start="earliest") as consumer:
            assert [message.body for message in await all_of_async(consumer, 3)] == sent
        assert asked[:2] == [0, 0]
        assert await offsets(client, "hidden") == [3]

    run(program)


def test_consumer_used_before_join_raises_bad_request(run: Callable[[Program], None]) -> None:
    async def program(client: AsyncClient) -> None:
        forgotten: Any = client.consumer("forgotten", "NotYet")
        with pytest.raises(AttributeError, match="receive: this consumer has not joined its group yet: `async with "):
            await forgotten.receive(1)
        with pytest.raises(GroupNotFoundError):
            await client.groups.info("forgotten")

    run(program)


def test_join_with_invalid_filter_is_refused(run: Callable[[Program], None]) -> None:
    async def program(client: AsyncClient) -> None:
        with pytest.raises(FilterSyntaxError, match="character 4 "):
            await client.consumer("mistyped", "NotYet", filter=SqlFilter("a >"))
        with pytest.raises(GroupNotFoundError):
            await client.groups.info("mistyped")

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


def test_progress_skips_filtered_messages_at_once(run: Callable[[Program], None]) -> None:
    async def program(client: AsyncClient) -> None:
        await client.create_topic("AioPassed", 1)
        await client.send_batch("AioPassed", [b"%d" % n for n in range(100)], tags=["b"] + ["a"] * 99)
        await client.wait_dispatched()
        consumer = await client.consumer("aio-passed", "AioPassed", filter=TagFilter("b"), start="earliest")
        async with consumer:
            assert len(await all_of_async(consumer, 1)) == 1
            for end in (100, 105, 110):
                async with asyncio.timeout(HOLD_S / 2):
                    while await offsets(client, "aio-passed") != [end]:
                        assert await consumer.receive(1, timeout=0.05) == []
                await client.send_batch("AioPassed", [b"more"] * 5, tags=["a"] * 5)
            await client.send("AioPassed", b"found", tag="b")
            assert [message.body for message in await consumer.receive(1, timeout=PATIENCE_S)] == [b"found"]

    run(program)


def test_consumer_continues_where_it_seeks(run: Callable[[Program], None], tmp_path: Path) -> None:
    async def bodies(consumer: AsyncConsumer, count: int) -> list[bytes]:
        return sorted([message.body for message in await all_of_async(consumer, count)], key=int)

    async def program(client: AsyncClient) -> None:
        sent = await fill(client, "AioSought", 20, queues=2)
        async with client.consumer("aio-sought", "AioSought") as consumer:
            await consumer.seek(ResetTo(offset=7))
            assert await bodies(consumer, 6) == sent[14:]
            await consumer.seek(ResetTo(shift=-1))
            assert await bodies(consumer, 2) == sent[18:]
            assert consumer.positions() == {("AioSought", 0): 10, ("AioSought", 1): 10}
        path = tmp_path / "offsets.json"
        async with client.consumer("aio-sought", "AioSought", broadcast=True, offsets_path=path) as consumer:
            await consumer.seek(ResetTo(earliest=True))
            assert await bodies(consumer, len(sent)) == sent

    run(program)
