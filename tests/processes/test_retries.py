"""A message whose consumption fails: delay levels, retry topic, dead letters, and kills."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from mqproc import AsyncClient, MessageNotFoundError
from mqproc.client import group_requests as group_calls
from mqproc.layout.control import KEEPER, QUERY, WRITER
from mqproc.topic_names import SCHEDULE_TOPIC
from mqproc.types import StoredMessage
from mqproc.util.units import DELAY_LEVELS
from tests.processes.test_retention import RETAINING
from tests.support.group import PATIENCE_S, Group, wait_until

TIMES = 2
FULL = 32_700
"""A value of so many characters and a unique id fill a message's properties."""


def received(consumer: Any, count: int) -> list[StoredMessage]:
    found: list[StoredMessage] = []
    while len(found) < count:
        messages = consumer.receive(count - len(found), timeout=PATIENCE_S)
        assert messages, f"{len(found)} of {count} came"
        found += messages
    return found


def parked(client: Any, level: int) -> list[StoredMessage]:
    client.wait_dispatched()
    return list(client.pull(SCHEDULE_TOPIC, level - 1, 0, 1000).messages)


def test_nack_redelivers_until_dead_letter(group: Group) -> None:
    with group.client() as client:
        client.create_topic("orders", 1)
        client.groups.change("billing", retry_max_times=TIMES)
        sent = [client.send("orders", b"%d" % number, tag="new", keys="k") for number in range(3)]
        client.wait_dispatched()
        with client.consumer("billing", "orders", start="earliest") as consumer:
            first = received(consumer, 3)
            consumer.ack(first[1])
            consumer.nack(first[0], first[2], delay_level=1)
            os.kill(group.pid(KEEPER), signal.SIGKILL)
            for times in range(1, TIMES + 1):
                again = received(consumer, 2)
                assert [(each.stored_topic, each.reconsume_times) for each in again] == [("%RETRY%billing", times)] * 2
                assert sorted(each.body for each in again) == [b"0", b"2"]
                for each in again:
                    origin = sent[int(each.body)]
                    assert each.properties["RETRY_TOPIC"] == "orders"
                    assert each.properties["ORIGIN_MESSAGE_ID"] == origin.message_id
                    assert (each.tag, each.keys, each.unique_id) == ("new", ("k",), origin.unique_id)
                consumer.nack(*again, delay_level=1)
            assert consumer.receive(10, timeout=1.5) == []
        client.wait_dispatched()
        dead = list(client.groups.dead_letters("billing"))
        assert sorted((each.body, each.reconsume_times) for each in dead) == [(b"0", TIMES + 1), (b"2", TIMES + 1)]
        assert client.groups.info("billing").lag == 0
        words = group.words()
        assert (words["group_retries"], words["group_dead_letters"]) == (2 * TIMES, 2)
        assert client.groups.resend("billing", *dead) == 2
        words = group.words()
        assert (words["group_retries"], words["group_dead_letters"]) == (2 * TIMES + 2, 2)


def test_nack_16_retries_follow_levels_then_dead_letter(
    make_group: Callable[..., Group],
) -> None:
    """Nacks without a level use level 3 plus the number of redeliveries. All delays are zero."""
    group = make_group(message_delay_level=" ".join(["0s"] * DELAY_LEVELS))
    with group.client() as client:
        client.create_topic("orders", 1)
        client.groups.change("billing")
        sent = client.send("orders", b"x")
        client.wait_dispatched()
        seen: list[tuple[str, int]] = []
        with client.consumer("billing", "orders", start="earliest") as consumer:
            for _ in range(17):
                (message,) = received(consumer, 1)
                seen.append((message.stored_topic, message.reconsume_times))
                assert message.unique_id == sent.unique_id
                consumer.nack(message)
        assert seen == [("orders", 0), *(("%RETRY%billing", times) for times in range(1, 17))]
        levels = {level: parked(client, level) for level in range(1, DELAY_LEVELS + 1)}
        assert [len(levels[level]) for level in (1, 2)] == [0, 0]
        waited = [message for level in range(3, DELAY_LEVELS + 1) for message in levels[level]]
        assert [(each.queue_id + 1, each.reconsume_times) for each in waited] == [(n + 2, n) for n in range(1, 17)]
        assert [each.physical_offset for each in waited] == sorted(each.physical_offset for each in waited)
        assert {each.properties["DELAY"] for each in waited} == {str(level) for level in range(3, 19)}
        (dead,) = client.groups.dead_letters("billing")
        assert (dead.body, dead.reconsume_times, dead.unique_id) == (b"x", 17, sent.unique_id)
        words = group.words()
        assert (words["group_retries"], words["group_dead_letters"]) == (16, 1)
        assert client.groups.info("billing").lag == 0


def test_nack_message_without_property_space_is_dead_letter(group: Group) -> None:
    with group.client() as client:
        client.create_topic("orders", 1)
        client.groups.change("gives-up", retry_max_times=0)
        properties = {"a": "v" * FULL}
        for body in (b"full", b"empty"):
            client.send("orders", body, properties=properties if body == b"full" else {})
        client.wait_dispatched()
        for name in ("billing", "gives-up"):
            with client.consumer(name, "orders", start="earliest") as consumer:
                consumer.nack(*received(consumer, 2), delay_level=1)
                client.wait_dispatched()
                (letter, *others) = client.groups.dead_letters(name)
                assert (letter.body, letter.properties["a"], letter.reconsume_times) == (b"full", properties["a"], 1)
                assert [each.body for each in others] == ([b"empty"] if name == "gives-up" else [])
                assert client.groups.resend(name, letter) == 1
                assert b"full" in {each.body for each in received(consumer, 1 if others else 2)}


def test_nack_retried_after_kill_counts_once(group: Group) -> None:
    """Query is killed after the copy is stored, before the answer; the client retries."""
    with group.client(timeout=30) as client:
        client.create_topic("orders", 1)
        client.groups.change("billing")
        client.send_batch("orders", [b"0", b"1", b"2"])
        client.wait_dispatched()
        client.run(group_calls.nack("billing", [("orders", 0, 0)], 18, -1))
        levels: list[list[int]] = []

        def nack() -> None:
            with group.client(timeout=30) as other:
                levels.append(other.run(group_calls.nack("billing", [("orders", 0, 1)], 18, -1)))

        asking = threading.Thread(target=nack)
        writer, query = group.pid(WRITER), group.pid(QUERY)
        before = group.words()
        os.kill(writer, signal.SIGSTOP)
        try:
            asking.start()
            wait_until(lambda: group.words()["query_requests"] > before["query_requests"], what="the nack is taken")
            group.wait_for_step(QUERY)  # The request has also reached the writer.
            os.kill(query, signal.SIGSTOP)
        finally:
            os.kill(writer, signal.SIGCONT)
        wait_until(lambda: group.words()["written"] > before["written"], what="the copy is stored")
        os.kill(query, signal.SIGKILL)
        asking.join(PATIENCE_S)
        assert levels == [[18]]
        client.run(group_calls.nack("billing", [("orders", 0, 2)], 18, -1))
        assert [each.body for each in parked(client, 18)] == [b"0", b"1", b"2"]
        # A later failure is counted.
        client.run(group_calls.nack("billing", [("orders", 0, 1)], 18, -1))
        assert [each.body for each in parked(client, 18)] == [b"0", b"1", b"2", b"1"]


@pytest.mark.parametrize("point", ["retry.copied", "ack.before_send:2"])
def test_dead_letter_without_origin_survives_kill_once(
    make_group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """Query or the writer is killed after storing, before the answer; the client retries."""
    monkeypatch.setenv("MQPROC_CRASH", point)
    group = make_group()
    with group.client(timeout=30) as client:
        client.send("orders", b"full", queue_id=0, properties={"a": "v" * FULL})
        client.wait_dispatched()
        client.groups.change("billing")
        client.groups.change("other")
        for name in ("billing", "other"):
            nack = group_calls.nack(name, [("orders", 0, 0)], 1, -1)
            if client.run(nack) == [-2]:
                assert client.run(nack) == [0]
            client.wait_dispatched()
            assert [each.body for each in client.groups.dead_letters(name)] == [b"full"]


# Deleted messages


def end_of(client: Any, topic: str) -> None:
    """Have retention delete all messages of a topic."""
    client.wait_dispatched()
    for _ in range(4):
        client.send_batch("fill", [b"x" * 1000] * 50)

    def is_empty() -> bool:
        (queue,) = client.queues(topic)
        return bool(queue.min_offset == queue.max_offset)

    wait_until(is_empty, what="retention")


def test_nack_names_deleted_messages_and_stores_others(make_group: Callable[..., Group]) -> None:
    with make_group(**RETAINING, retention_guard="none").client() as client:
        client.create_topic("orders", 1)
        client.send_batch("orders", [b"0", b"1"])
        client.wait_dispatched()
        with client.consumer("billing", "orders", start="earliest") as consumer:
            gone = received(consumer, 2)
            end_of(client, "orders")
            client.send("orders", b"2")
            (there,) = received(consumer, 1)
            with pytest.raises(MessageNotFoundError, match="orders/0 offset 0; orders/0 offset 1 cannot be delivered"):
                consumer.nack(gone[0], there, gone[1], delay_level=18)
            assert [each.body for each in parked(client, 18)] == [b"2"]
            assert consumer.positions()["orders", 0] == 0, "it is not done"
            consumer.ack(*gone)
            assert consumer.positions()["orders", 0] == 3, "the one that is stored was"


def test_async_nack_names_deleted_messages(make_group: Callable[..., Group]) -> None:
    group = make_group(**RETAINING, retention_guard="none")

    async def nack_gone() -> None:
        async with (
            AsyncClient(group.store) as client,
            await client.consumer("billing", "orders", start="earliest") as consumer,
        ):
            (gone,) = await consumer.receive(1, timeout=PATIENCE_S)
            with group.client() as other:
                await asyncio.to_thread(end_of, other, "orders")
            await client.send("orders", b"1")
            (there,) = await consumer.receive(1, timeout=PATIENCE_S)
            with pytest.raises(MessageNotFoundError, match="orders/0 offset 0 cannot be delivered"):
                await consumer.nack(gone, there, delay_level=18)
            assert consumer.positions()["orders", 0] == 0
            await consumer.ack(gone)
            assert consumer.positions()["orders", 0] == 2

    with group.client() as client:
        client.create_topic("orders", 1)
        client.send("orders", b"0")
        client.wait_dispatched()
        asyncio.run(nack_gone())
        assert [each.body for each in parked(client, 18)] == [b"1"]


@pytest.mark.parametrize("ordered", [False, True])
def test_handler_continues_after_deleted_message(
    make_group: Callable[..., Group], ordered: bool, caplog: pytest.LogCaptureFixture
) -> None:
    group = make_group(**RETAINING, retention_guard="none")
    stop = threading.Event()
    seen: list[bytes] = []

    def handle(message: StoredMessage) -> None:
        seen.append(message.body)
        if message.body == b"0":
            with group.client() as other:
                end_of(other, "orders")
                other.send("orders", b"1")
            raise ValueError("not this one")
        stop.set()

    with group.client() as client:
        client.create_topic("orders", 1)
        client.groups.change("billing", retry_max_times=0 if ordered else 16)
        client.send("orders", b"0")
        client.wait_dispatched()
        with client.consumer("billing", "orders", start="earliest") as consumer:
            consumer.run(handle, ordered=ordered, stop=stop)
        assert seen == [b"0", b"1"]
        assert "is skipped: orders/0 offset 0 cannot be delivered" in caplog.text
        assert client.groups.info("billing").lag == 0
        words = group.words()
        assert (words["group_retries"], words["group_dead_letters"]) == (0, 0)


def test_async_handler_continues_after_deleted_message(
    make_group: Callable[..., Group], caplog: pytest.LogCaptureFixture
) -> None:
    group = make_group(**RETAINING, retention_guard="none")
    seen: list[bytes] = []

    async def run() -> None:
        stop = asyncio.Event()

        async def handle(message: StoredMessage) -> None:
            seen.append(message.body)
            if message.body == b"0":
                with group.client() as other:
                    await asyncio.to_thread(end_of, other, "orders")
                    other.send("orders", b"1")
                raise ValueError("not this one")
            stop.set()

        async with (
            AsyncClient(group.store) as client,
            await client.consumer("billing", "orders", start="earliest") as consumer,
        ):
            await consumer.run(handle, stop=stop)

    with group.client() as client:
        client.create_topic("orders", 1)
        client.send("orders", b"0")
        client.wait_dispatched()
        asyncio.run(run())
        assert seen == [b"0", b"1"]
        assert "is skipped: orders/0 offset 0 cannot be delivered" in caplog.text
        assert client.groups.info("billing").lag == 0
