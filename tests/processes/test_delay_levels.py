"""Delay levels in a real group: never early, in order, exactly once despite kills."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mqproc.errors import TooManyQueuesError
from mqproc.layout.control import DISPATCHER, KEEPER, WRITER
from mqproc.store import rocketmq_json
from mqproc.topic_names import SCHEDULE_TOPIC, TIMER_TOPIC
from mqproc.types import Message, StoredMessage
from tests.support.group import Group, assert_below, wait_until

LEVEL_MS = {1: 1000, 2: 5000}


def received(client: Any, topic: str, queues: int = 8) -> list[StoredMessage]:
    """All messages of a topic in store order."""
    found: list[StoredMessage] = []
    for queue_id in range(queues):
        offset = 0
        while messages := client.pull(topic, queue_id, offset, 4096, max_bytes=32 << 20).messages:
            found += messages
            offset = messages[-1].queue_offset + 1
    return sorted(found, key=lambda message: message.physical_offset)


def wait_for(client: Any, topic: str, count: int) -> list[StoredMessage]:
    wait_until(lambda: len(received(client, topic)) >= count, what=f"{count} messages of {topic}")
    return received(client, topic)


def test_delay_level_message_arrives_at_its_time(group: Group) -> None:
    with group.client() as client:
        sent = send_slowly(client, 20)
        group.wait_dispatched()
        early = client.by_key("orders", "k1")
        now_ms = time.time_ns() // 1_000_000
        parked = client.pull(SCHEDULE_TOPIC, 0, 0).messages
        assert len(early) <= sum(message.store_timestamp_ms + LEVEL_MS[1] <= now_ms for message in parked)
        assert [message.queue_offset for message in parked] == [result.queue_offset for result in sent]
        assert parked[0].properties["REAL_TOPIC"] == "orders"
        assert (parked[0].properties["REAL_QID"], parked[0].properties["DELAY"]) == ("3", "1")
        found = wait_for(client, "orders", 20)
        pairs = list(zip(parked, found, strict=True))
        for before, after in pairs:
            assert (after.queue_id, after.body, after.tag, after.keys) == (3, b"body", "new", ("k1",))
            assert (after.unique_id, after.properties) == (before.unique_id, before.properties)
            assert (after.born_timestamp_ms, after.born_host) == (before.born_timestamp_ms, before.born_host)
        wait_until(lambda: group.words()["delayed_messages"] == 0)
        assert group.words()["delivered_messages"] == 20


def send_slowly(client: Any, count: int) -> list[Any]:
    return [
        client.send("orders", b"body", tag="new", keys="k1", properties={"p": "v"}, queue_id=3, delay_level=1)
        for _ in range(count)
        if not time.sleep(0.02)
    ]


def test_delay_level_message_is_neither_early_nor_late(group: Group) -> None:
    with group.client() as client:
        rounds = itertools.count(1)

        def worst_late_ms() -> int:
            sent = send_slowly(client, 20)
            count = 20 * next(rounds)
            found = wait_for(client, "orders", count)[-20:]
            parked = client.pull(SCHEDULE_TOPIC, 0, sent[0].queue_offset).messages
            pairs = zip(parked, found, strict=True)
            late_ms = [after.store_timestamp_ms - before.store_timestamp_ms - LEVEL_MS[1] for before, after in pairs]
            assert min(late_ms) >= 0, f"early: {late_ms}"
            return max(late_ms)

        assert_below(50, worst_late_ms)


def test_delay_level_applies_to_every_kind_of_send(group: Group) -> None:
    """Messages are delivered in the order in which they were sent.

    Covers single sends, batches with per-message properties, a producer, and columns with one time for all or one each.
    """
    messages = [Message("t", b"%03d" % number, properties={"n": str(number)}, delay_level=1) for number in range(100)]
    with group.client() as client:
        client.send_many(messages[:50])
        with client.producer() as producer:
            for message in messages[50:]:
                producer.send(message)
        for number in range(100, 116):
            client.send("t", b"%03d" % number, delay_level=1)
        bodies = [b"%d" % number for number in range(6)]
        all_at_once = client.send_batch("batch", bodies, delay=0.5)
        assert len(set(all_at_once.queue_ids.tolist())) == 1
        due_ms = time.time_ns() // 1_000_000 + np.array([7900, 7600, 7900, 7600, 8200, 0])
        sent = client.send_batch("each", bodies, deliver_at=due_ms, queue_id=2, tags=list("abcdef"))
        client.send_batch("level", bodies, delay_level=[1, 0, 2, 1, 2, 1], queue_id=0)
        client.wait_dispatched()
        for number in range(5):
            assert client.pull(TIMER_TOPIC, 0, int(sent.queue_offsets[number])).messages[0].body == bodies[number]
        each = wait_for(client, "each", 6)
        assert [message.body for message in each] == [b"5", b"1", b"3", b"0", b"2", b"4"]
        assert [message.tag for message in each] == ["f", "b", "d", "a", "c", "e"]
        assert all(message.store_timestamp_ms >= due_ms[int(message.body)] for message in each)
        assert [message.body for message in wait_for(client, "batch", 6)] == bodies
        assert [message.body for message in wait_for(client, "level", 6)] == [b"1", b"0", b"3", b"5", b"2", b"4"]
        found = wait_for(client, "t", 116)
    assert [message.body for message in found] == [b"%03d" % number for number in range(116)]
    assert found[7].properties["n"] == "7"
    assert len({message.queue_id for message in found[100:]}) == 8, "each send's queue is the next one"
    assert {message.topic for message in found} == {"t"}


def test_delay_levels_10000_due_at_once_delivered_in_1_s(group: Group) -> None:
    count = 10_000
    with group.client() as client:
        rounds = itertools.count(1)

        def late_ms() -> int:
            client.send_many(Message(f"burst-{number % 4}", bytes(200), delay_level=1) for number in range(count))
            total = count * next(rounds)
            wait_until(lambda: group.words()["delivered_messages"] == total)
            group.wait_dispatched()
            stored = client.pull(SCHEDULE_TOPIC, 0, total - 1, 1)
            found = [message for topic in range(4) for message in received(client, f"burst-{topic}")]
            assert len(found) == total
            last_due_ms = stored.messages[0].store_timestamp_ms + LEVEL_MS[1]
            return max(message.store_timestamp_ms for message in found) - last_due_ms

        assert_below(1000, late_ms)


def test_delay_level_2000_per_second_are_delivered_in_time(group: Group) -> None:
    """Sent for a second and due for a second: at most 50 ms late in the best round."""
    with group.client() as client:
        topics = itertools.count()

        def late_ms() -> int:
            topic, begin_s = f"steady-{next(topics)}", time.monotonic()
            due_ms: list[int] = []
            for frame in range(100):
                wait_until(lambda frame=frame: time.monotonic() >= begin_s + frame / 100, what="the next frame's time")
                bodies = [b"%d" % number for number in range(20 * frame, 20 * frame + 20)]
                sent = client.send_batch(topic, bodies, delay_level=1)
                due_ms += [sent.store_timestamp_ms + LEVEL_MS[1]] * 20
            found = wait_for(client, topic, 2000)
            late = [message.store_timestamp_ms - due_ms[int(message.body)] for message in found]
            assert min(late) >= 0
            return max(late)

        assert_below(50, late_ms)


def kill(group: Group, role: str) -> None:
    os.kill(group.pid(role), signal.SIGKILL)


def test_each_message_arrives_once_whoever_is_killed(group: Group) -> None:
    count = 6000
    with group.client() as client:
        client.send_many(Message("t", b"%05d" % number, queue_id=0, delay_level=1) for number in range(count))
        wait_until(lambda: group.words()["delivered_messages"] > 0, what="the first delivery")
        for role in (KEEPER, WRITER, DISPATCHER, KEEPER):
            pid = group.pid(role)
            kill(group, role)
            wait_until(lambda role=role, pid=pid: group.pid(role) not in (0, pid), what=f"the next {role}")
        bodies = [message.body for message in wait_for(client, "t", count)]
        assert bodies == [b"%05d" % number for number in range(count)]
        # No messages follow.
        wait_until(lambda: group.words()["delayed_messages"] == 0)
        assert len(received(client, "t")) == count


def test_delay_levels_killed_group_delivers_each_once(make_group: Callable[..., Group]) -> None:
    count = 20_000
    group = make_group(mapped_file_size_commit_log=32 << 20)
    with group.client() as client:
        client.send_many(Message("t", b"%05d" % number, queue_id=0, delay_level=1) for number in range(count))
    wait_until(lambda: group.words()["delivered_messages"] > 0, what="the first delivery")
    group.kill()
    group.start()
    with group.client() as client:
        assert [message.body for message in wait_for(client, "t", count)] == [b"%05d" % i for i in range(count)]
        wait_until(lambda: group.words()["delayed_messages"] == 0)
        assert len(received(client, "t")) == count


def test_delay_levels_stopped_group_resumes_from_rocketmq_file(make_group: Callable[..., Group]) -> None:
    group = make_group()
    with group.client() as client:
        for level in (1, 2, 1):
            client.send("t", b"level %d" % level, delay_level=level)
        wait_for(client, "t", 2)
    assert group.stop() == 0
    saved = rocketmq_json.parse(group.paths.delay_offsets.read_text())
    # Messages delayed by 5 s have been delivered if the steps before took longer.
    late = {"2": 1} if group.words()["delivered_messages"] == 3 else {}
    assert saved["offsetTable"] == {"1": 2} | late
    assert "{1:2" in "".join(group.paths.delay_offsets.read_text().split()), "keys are unquoted, as RocketMQ's"
    group.start()
    with group.client() as client:
        assert sorted(message.body for message in wait_for(client, "t", 3)) == [b"level 1", b"level 1", b"level 2"]
        group.stop()
    assert rocketmq_json.parse(group.paths.delay_offsets.read_text())["offsetTable"] == {"1": 2, "2": 1}


@pytest.mark.parametrize("lost", ["file", "garbled"])
def test_delay_levels_without_offset_file_use_the_log(make_group: Callable[..., Group], lost: str) -> None:
    group = make_group()
    with group.client() as client:
        client.send_many(Message("t", b"%02d" % number, delay_level=1) for number in range(10))
        wait_for(client, "t", 10)
        client.send("t", b"later", delay_level=2)
    group.stop()
    for path in group.paths.delay_offsets.parent.glob("delayOffset.json*"):
        path.unlink() if lost == "file" else path.write_text("{]")
    group.start()
    with group.client() as client:
        assert [message.body for message in wait_for(client, "t", 11)][10:] == [b"later"]
        assert len(received(client, "t")) == 11


def test_delay_levels_deleted_topic_is_recreated(group: Group) -> None:
    with group.client() as client:
        client.create_topic("gone", 2)
        client.send("gone", b"x", queue_id=1, delay_level=1)
        client.delete_topic("gone")
        found = wait_for(client, "gone", 1)
        assert [(message.body, message.queue_id) for message in found] == [(b"x", 1)]


def test_delay_levels_refused_delivery_is_retried(make_group: Callable[..., Group]) -> None:
    """The topic was deleted, and the queue table has no space for the default number of queues.

    Then the topic is recreated with its previous number of queues.
    """
    group = make_group(max_queues=64)
    with group.client() as client:
        client.create_topic("orders", 4)
        with group.stopped_role(KEEPER):
            for number in range(5):
                client.send("orders", b"level %d" % number, delay_level=1)
                client.send("orders", b"time %d" % number, delay=4)
            client.wait_dispatched()
            client.delete_topic("orders")
            fill_up(client)
        wait_until(lambda: group.words()["deliveries_refused"] >= 4, what="deliveries of both kinds are refused")
        assert group.words()["delivered_messages"] == 0
        client.create_topic("orders", 4)
        found = wait_for(client, "orders", 10)
        wait_until(lambda: group.words()["delayed_messages"] == group.words()["timed_messages"] == 0, what="all done")
        wanted = sorted(b"%s %d" % (kind, number) for kind in (b"level", b"time") for number in range(5))
        assert sorted(message.body for message in found) == wanted
        assert len(received(client, "orders")) == group.words()["delivered_messages"] == 10


@pytest.mark.parametrize("killed", [False, True])
def test_delay_levels_refused_delivery_blocks_no_other(make_group: Callable[..., Group], killed: bool) -> None:
    """Messages of a deleted topic wait until it can be recreated, also through restarts.

    Until then the queue table is full.
    """
    group = make_group(max_queues=64)
    with group.client() as client:
        client.create_topic("others", 1)
        client.create_topic("orders", 2)
        with group.stopped_role(KEEPER):
            client.send("orders", b"level", queue_id=1, delay_level=1)
            client.send("orders", b"time", queue_id=1, delay=4)
            client.delete_topic("orders")
            fill_up(client)
        wait_until(lambda: group.words()["deliveries_refused"] >= 2, what="deliveries of both kinds are refused")
        client.send("others", b"level", delay_level=1)
        client.send("others", b"time", delay=1)
        found = wait_for(client, "others", 2)
        assert sorted(message.body for message in found) == [b"level", b"time"]
        if killed:
            os.kill(group.pid(KEEPER), signal.SIGKILL)
    if killed:
        group.kill()
        group.start()
    with group.client() as client:
        client.create_topic("orders", 2)
        found = wait_for(client, "orders", 2)
        wait_until(lambda: group.words()["delayed_messages"] == group.words()["timed_messages"] == 0, what="all done")
        assert sorted((message.body, message.queue_id) for message in received(client, "orders")) == [
            (b"level", 1),
            (b"time", 1),
        ]
        assert len(received(client, "others")) == 2
        if not killed:
            assert group.words()["delivered_messages"] == 4


def test_delay_levels_refusal_affects_its_queue_only(make_group: Callable[..., Group]) -> None:
    """The topic was recreated with fewer queues; the queue table has no space for the others."""
    for level, delay_ms in ((3, 10_000), (4, 30_000), (5, 60_000)):
        group = make_group(f"level-{level}", max_queues=64)
        with group.client() as client:
            client.create_topic("orders", 2)
            due_ms = time.time_ns() // 1_000_000 + delay_ms
            for queue_id in (1, 0, 1, 0):
                client.send("orders", b"level", queue_id=queue_id, delay_level=level)
                client.send("orders", b"time", queue_id=queue_id, deliver_at=due_ms)
            client.delete_topic("orders")
        # A start reuses the table entries of deleted queues.
        assert group.stop() == 0
        group.start()
        with group.client() as client:
            client.create_topic("orders", 1)
            fill_up(client)
        if time.time_ns() // 1_000_000 < due_ms:
            break  # On a busy machine a start may take longer than the first delays.
        group.close()
    with group.client() as client:
        found = wait_for(client, "orders", 4)
        assert sorted(message.body for message in found) == [b"level"] * 2 + [b"time"] * 2
        wait_until(lambda: group.words()["delivered_messages"] == 4, what="all that there is room for is delivered")


def fill_up(client: Any) -> None:
    """Create topics of one queue each until the queue table is full."""
    with contextlib.suppress(TooManyQueuesError):
        for number in itertools.count():
            client.create_topic(f"filler-{number}", 1)


def test_delay_levels_file_never_exceeds_durable_offset(make_group: Callable[..., Group]) -> None:
    """A power loss removes unsynced deliveries; the file must not count them."""
    group = make_group(flush_commit_log_thorough_interval=600_000, flush_commit_log_least_pages=1 << 20)
    with group.client() as client:
        client.send("t", b"x", delay_level=1)
        wait_for(client, "t", 1)
    later = group.words()["keeper.heartbeat_ns"] + 3_000_000_000
    wait_until(lambda: group.words()["keeper.heartbeat_ns"] >= later, what="looks of the keeper, once a second")
    words = group.words()
    assert max(words["flusher_synced"], words["writer_synced"]) < words["written"]
    assert not group.paths.delay_offsets.exists()
    assert group.stop() == 0
    assert rocketmq_json.parse(group.paths.delay_offsets.read_text())["offsetTable"] == {"1": 1}
