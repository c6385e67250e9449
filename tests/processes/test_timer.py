"""Timed messages in a real group: to the millisecond, once, through kills and restarts."""

from __future__ import annotations

import functools
import itertools
import math
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mqproc.client.message_fields import SystemProperties
from mqproc.client.send_requests import send_system
from mqproc.errors import BadLevelError, BadRequestError, BadTimeError, MessageNotFoundError
from mqproc.layout import timer_files
from mqproc.layout.control import KEEPER, WRITER
from mqproc.topic_names import TIMER_TOPIC
from mqproc.types import Message
from tests.processes.test_delay_levels import received, wait_for
from tests.support.command_line import call
from tests.support.group import Group, assert_below, wait_until

# As documented; RocketMQ's own timer is exact to a slot of 1,000 ms.
LATE_MS = 50


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def has_come(moment_ms: int) -> bool:
    return now_ms() > moment_ms


def worst_late_ms(client: Any, topic: str, count: int) -> int:
    """The greatest lateness of a topic's messages, from the times in their bodies.

    Fails if any is early.
    """
    late = [message.store_timestamp_ms - int(message.body) for message in wait_for(client, topic, count)]
    assert min(late) >= 0, f"early: {late}"
    return max(late)


def send_due_in(client: Any, topic: str, *after_ms: int) -> None:
    for ms in after_ms:
        due_ms = now_ms() + ms
        client.send(Message(topic, b"%d" % due_ms, deliver_at_ms=due_ms))


def test_timer_messages_arrive_at_their_millisecond(group: Group) -> None:
    with group.client() as client:
        topics = itertools.count()

        def late_ms() -> int:
            topic = f"t{next(topics)}"
            send_due_in(client, topic, 300, 1700, 950, 2400, 60, 1001, 1000, 999)
            return worst_late_ms(client, topic, 8)

        assert_below(LATE_MS, late_ms)
        topic = f"t{next(topics) - 1}"
        found = received(client, topic)
        assert [int(message.body) for message in found] == sorted(int(message.body) for message in found)
        assert "REAL_TOPIC" not in found[0].properties, "as RocketMQ's timer delivers it"
        timed = client.pull(TIMER_TOPIC, 0, 0, 1000).messages
        parked = next(message for message in timed if message.properties["REAL_TOPIC"] == topic)
        assert parked.properties["TIMER_DELIVER_MS"] == parked.body.decode()
        assert int(parked.properties["TIMER_OUT_MS"]) == (int(parked.body) - 1) // 1000 * 1000
        wait_until(lambda: group.words()["timed_messages"] == 0)


def test_timer_past_time_is_delivered_at_once(group: Group) -> None:
    with group.client() as client:
        client.send("t", b"at once", deliver_at=now_ms() - 1)
        client.send("t", b"this instant", delay=0)
        group.wait_dispatched()
        assert len(received(client, "t")) == 2
        with pytest.raises(BadTimeError, match="timer_max_delay_sec"):
            client.send("t", b"too far", delay=259_200 + 10)
        with pytest.raises(BadLevelError):
            client.send("t", b"no such level", delay_level=19)


def test_timer_slot_limit_is_enforced(make_group: Callable[..., Group]) -> None:
    """RocketMQ's flow control, at 100 messages; other slots do not count."""
    group = make_group(timer_congest_num_each_slot=100)
    slot_ms = now_ms() // 1000 * 1000 + 600_000
    with group.client() as client:
        for number in range(100):
            client.send("t", b"%d" % number, deliver_at=slot_ms + 1 + number)
        wait_until(lambda: group.words()["timed_messages"] == 100, what="all are in the wheel")
        with pytest.raises(BadTimeError, match="holds 100 messages; timer_congest_num_each_slot = 100"):
            client.send("t", b"one too many", deliver_at=slot_ms + 500)
        client.send("t", b"a second later", deliver_at=slot_ms + 1500)


def kept_waiting_ms(group: Group) -> float:
    """Milliseconds for which keeper and writer were ready to run without a processor.

    A tenth of the elapsed time is not counted: the group's roles wait for each other that long.
    """
    waited = (Path(f"/proc/{group.pid(role)}/schedstat").read_text().split()[1] for role in (KEEPER, WRITER))
    return sum(map(int, waited)) / 1e6 - 100 * time.monotonic()


def own_late_ms(group: Group, client: Any, topic: str, count: int) -> float:
    """The greatest lateness from now on, without the time spent waiting for a processor."""
    waited_ms = kept_waiting_ms(group)
    late_ms = worst_late_ms(client, topic, count)
    return late_ms - max(0.0, kept_waiting_ms(group) - waited_ms)


def test_timer_10000_per_second_are_delivered_in_time(group: Group) -> None:
    """10,000 messages due within one second, sent in advance: none is later than documented.

    Time spent waiting for a processor is subtracted.
    """
    with group.client() as client:
        topics = itertools.count()

        def round_ms() -> float:
            for ahead_ms in (4000, 20_000):
                topic, begin_ms = f"t{next(topics)}", now_ms() + ahead_ms
                client.send_many(
                    Message(topic, b"%d" % (begin_ms + number // 10), deliver_at_ms=begin_ms + number // 10)
                    for number in range(10_000)
                )
                if now_ms() < begin_ms:
                    wait_until(functools.partial(has_come, begin_ms), 30, "the first is due")
                    return own_late_ms(group, client, topic, 10_000)
            pytest.fail("10,000 messages take longer to send than 20 s")

        assert_below(LATE_MS, round_ms)


def test_timer_2000_per_second_meet_promised_time(group: Group) -> None:
    """2,000 messages due within one second: none is later than documented.

    Time spent waiting for a processor is subtracted.
    """
    with group.client() as client:
        topics = itertools.count()

        def late_ms() -> float:
            topic, begin_ms = f"t{next(topics)}", now_ms() + 3000
            client.send_many(
                Message(topic, b"%d" % (begin_ms + number // 2), deliver_at_ms=begin_ms + number // 2)
                for number in range(2000)
            )
            if now_ms() >= begin_ms:
                return math.inf  # Messages sent after their time do not count.
            wait_until(functools.partial(has_come, begin_ms), 30, "the first is due")
            return own_late_ms(group, client, topic, 2000)

        assert_below(LATE_MS, late_ms)


def test_timer_message_is_delivered_after_failed_filing(group: Group) -> None:
    """Writes to the wheel fail as on a full disk until after the messages' time."""
    with group.client() as client:
        client.send("t", b"first", delay=0.1)
        wait_for(client, "t", 1)
        keeper = group.pid(KEEPER)
        # The slots of the near future are further on in the wheel's file.
        resource.prlimit(keeper, resource.RLIMIT_FSIZE, (1 << 12, resource.RLIM_INFINITY))
        failed = group.words()[f"{KEEPER}.errors"]
        due_ms = now_ms() + 6000
        client.send("t", b"second", deliver_at=due_ms)
        wait_until(lambda: group.words()[f"{KEEPER}.errors"] > failed, what="filing fails")
        wait_until(lambda: now_ms() > due_ms + 2500, what="the slot is over")
        resource.prlimit(keeper, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        found = wait_for(client, "t", 2)
        assert [message.body for message in found] == [b"first", b"second"]
        assert group.pid(KEEPER) == keeper
        wait_until(lambda: group.words()["timed_messages"] == 0, what="nothing waits")


def test_each_message_arrives_once_whoever_is_killed(group: Group) -> None:
    begin_ms = now_ms() + 2500
    with group.client() as client:
        client.send_many(
            Message("t", b"%d" % (begin_ms + number), deliver_at_ms=begin_ms + number) for number in range(3000)
        )
        for number, role in enumerate((KEEPER, WRITER, KEEPER, KEEPER)):
            kill_ms = begin_ms + 600 * number
            wait_until(functools.partial(has_come, kill_ms), what="a time to kill")
            os.kill(group.pid(role), signal.SIGKILL)
        bodies = [message.body for message in wait_for(client, "t", 3000)]
        assert len(set(bodies)) == len(bodies) == 3000
        wait_until(lambda: group.words()["timed_messages"] == 0)
        assert len(received(client, "t")) == 3000


def test_timer_other_slot_width_delivers_once_and_in_time(make_group: Callable[..., Group]) -> None:
    group = make_group(timer_precision_ms=100)
    with group.client() as client:
        send_due_in(client, "t", *range(100, 1300, 100), *range(6000, 6900, 100))
        wait_for(client, "t", 12)
    for precision_ms in (60_000, 300):
        assert group.stop() == 0
        group.options["timer_precision_ms"] = precision_ms
        group.start()
    with group.client() as client:
        worst_late_ms(client, "t", 21)
        wait_until(lambda: group.words()["timed_messages"] == 0, what="nothing waits")
        bodies = [message.body for message in received(client, "t")]
    assert len(bodies) == len(set(bodies)) == 21
    assert group.stop() == 0
    verified = call("store", "verify", str(group.store))
    assert verified.code == 0, verified.out


def test_timer_killed_group_delivers_overdue_messages(make_group: Callable[..., Group]) -> None:
    group = make_group()
    begin_ms = now_ms() + 1500
    with group.client() as client:
        client.send_many(
            Message("t", b"%d" % (begin_ms + number), deliver_at_ms=begin_ms + number) for number in range(2000)
        )
        wait_for(client, "t", 200)
    group.kill()
    group.start()
    with group.client() as client:
        bodies = [message.body for message in wait_for(client, "t", 2000)]
        assert len(set(bodies)) == len(bodies) == 2000


@pytest.mark.parametrize("lost", ["nothing", "slots", "log", "check"])
def test_timer_stopped_group_resumes_from_rocketmq_files(make_group: Callable[..., Group], lost: str) -> None:
    """250 messages survive stop and start if either timer file is damaged.

    Each file is rebuilt from the other data.
    """
    group = make_group()
    with group.client() as client:
        begin_ms = now_ms() + 6000  # All are to be filed before the first is due.
        client.send_many(
            Message("t", b"%d" % (begin_ms + 10 * number), deliver_at_ms=begin_ms + 10 * number)
            for number in range(250)
        )
        wait_for(client, "t", 5)
        group.stop()
    paths = group.paths
    check = timer_files.decode_check(paths.timer_check.read_bytes())
    assert check.queue_offset == 250
    assert check.timer_log_flushed == 250 * 52
    assert paths.timer_wheel.stat().st_size == timer_files.WHEEL_FILE_SIZE
    assert paths.timer_check.stat().st_size == timer_files.CHECK_FILE_SIZE
    if lost == "slots":
        paths.timer_wheel.write_bytes(b"\x07" * timer_files.WHEEL_FILE_SIZE)
    elif lost == "log":
        for path in paths.timer_log.iterdir():
            path.unlink()
    elif lost == "check":
        paths.timer_check.unlink()
    group.start()
    with group.client() as client:
        bodies = [message.body for message in wait_for(client, "t", 250)]
        assert len(set(bodies)) == len(bodies) == 250
        group.stop()


def test_timer_distant_message_is_rolled(make_group: Callable[..., Group]) -> None:
    """With RocketMQ's roll window of 2 slots the message is rolled once and delivered in time."""
    group = make_group(timer_roll_window_slot=2)
    with group.client() as client:
        topics = itertools.count()

        def late_ms() -> float:
            topic = f"t{next(topics)}"
            send_due_in(client, topic, 3300, 3500, 3650, 3800, 3950)
            worst = worst_late_ms(client, topic, 5)
            rolls = {found.properties.get("TIMER_ROLL_TIMES") for found in received(client, topic)}
            return worst if rolls == {"1"} else math.inf

        assert_below(LATE_MS, late_ms)


def send_cancellation(client: Any, topic: str, key: str, due_ms: int) -> None:
    """Send what RocketMQ's producers send to cancel a message."""
    own = SystemProperties({"TIMER_DEL_UNIQKEY": key})
    client.run(send_system(Message(topic, b"", properties=own, deliver_at_ms=due_ms)))


@pytest.mark.parametrize("key", ["{id}", "t{id}", "t+{id}"])
def test_timer_message_is_cancelled_by_unique_id(group: Group, key: str) -> None:
    """For each form in which RocketMQ releases write the key.

    Another id or topic cancels nothing; a repeated cancellation has no further effect.
    """
    with group.client() as client:
        due_ms = now_ms() + 8000
        first, second = (client.send("t", body, deliver_at=due_ms) for body in (b"first", b"second"))
        keys = [key.format(id=first.unique_id)] * 2 + ["unknown", f"u+{second.unique_id}", f"u{second.unique_id}"]
        for each in keys:
            send_cancellation(client, "t", each, due_ms)
        wait_until(lambda: now_ms() > due_ms + 200)
        wait_until(lambda: group.words()["timed_messages"] == 0)
        group.wait_dispatched()
        assert [message.unique_id for message in received(client, "t")] == [second.unique_id]
        with pytest.raises(BadTimeError):
            send_cancellation(client, "t", second.unique_id, now_ms() - 1)


def test_timer_cancellation_of_another_topic_has_no_effect(group: Group) -> None:
    with group.client() as client:
        due_ms = now_ms() + 3000
        sent = client.send("t", b"kept", deliver_at=due_ms)
        send_cancellation(client, "u", sent.unique_id, due_ms)
        assert [message.body for message in wait_for(client, "t", 1)] == [b"kept"]
        group.wait_dispatched()
        assert received(client, "u") == []


@pytest.mark.parametrize("by", ["message_id", "unique_id"])
def test_cancel_affects_only_its_message(group: Group, by: str) -> None:
    with group.client() as client:
        due_ms = now_ms() + 4000
        first, second = (client.send("t", body, tag="x", keys="k", deliver_at=due_ms) for body in (b"first", b"second"))
        client.wait_dispatched()
        client.cancel(getattr(first, by))
        client.cancel(getattr(first, by))  # Once more has no further effect.
        wait_until(lambda: now_ms() > due_ms + 200)
        wait_until(lambda: group.words()["timed_messages"] == 0)
        group.wait_dispatched()
        assert [message.body for message in received(client, "t")] == [b"second"]
        with pytest.raises(BadTimeError, match="was due at"):
            client.cancel(second.message_id)


def test_cancel_of_a_message_that_does_not_wait_is_refused(group: Group) -> None:
    with group.client() as client:
        sent, levelled = client.send("t", b"now"), client.send("t", b"later", delay_level=18)
        client.wait_dispatched()
        with pytest.raises(MessageNotFoundError, match="does not wait"):
            client.cancel(sent.message_id)
        with pytest.raises(BadRequestError, match="delay level"):
            client.cancel(levelled.message_id)
        for missing in (sent.unique_id, "00" * 16, "unknown"):
            with pytest.raises(MessageNotFoundError):
                client.cancel(missing)


def test_cancel_command_shows_its_plan_and_executes_it(group: Group) -> None:
    with group.client() as client:
        sent = client.send("t", b"later", deliver_at=now_ms() + 3_600_000)
        client.wait_dispatched()
        plan = call("message", "cancel", sent.message_id, "--json", "--detailed-exitcode", "--store", group.store)
        assert (plan.code, plan.json["topic"], plan.json["cancelled"]) == (2, "t", False)
        assert client.pull(TIMER_TOPIC, 0, 0).max_offset == 1
        done = call("message", "cancel", sent.message_id, "--json", "--execute", "--store", group.store)
        assert (done.code, done.json["cancelled"]) == (0, True)
        client.wait_dispatched()
        cancellation = client.pull(TIMER_TOPIC, 0, 1).messages[0]
        assert cancellation.properties["TIMER_DEL_UNIQKEY"] == sent.unique_id
        assert call("message", "cancel", "00" * 16, "--store", group.store).code == 5
