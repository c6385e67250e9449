"""Simple consumers: invisible messages, acknowledgement, redelivery, and kills."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest

from mqproc import BadRequestError, Client, FilterSyntaxError, GroupInUseError, GroupNotFoundError, SqlFilter
from mqproc.cli.admin.supervisor_client import ask_supervisor
from mqproc.client import group_requests as group_calls
from mqproc.client._sync.consumer import SimpleConsumer
from mqproc.io.store_io import StoreIO
from mqproc.layout.control import QUERY, WRITER
from mqproc.paths import StorePaths
from mqproc.store.offsets import consumer_offset_json
from mqproc.store.offsets import pop_receipts as check_points
from mqproc.topic_names import REVIVE_GROUP, REVIVE_QUEUES, REVIVE_TOPIC
from mqproc.types import StoredMessage
from mqproc.wire.operations import Operation, RoleRequest
from tests.support.group import Group, assert_below, wait_until

PATIENCE_S = 60.0
CHANGED_S = 10.0
"""A redelivered message stays its receiver's after a short stall of the machine."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """One group for all tests that kill nothing."""
    group = Group(tmp_path_factory.mktemp("simple") / "store").start()
    yield group
    group.close()


@pytest.fixture
def client(shared: Group) -> Iterator[Client]:
    with shared.client() as client:
        yield client


def fill(client: Client, topic: str, count: int, queues: int = 2) -> list[bytes]:
    client.create_topic(topic, queues)
    bodies = [b"%d" % number for number in range(count)]
    client.send_batch(topic, bodies, queue_ids=[number % queues for number in range(count)])
    client.wait_dispatched()
    return bodies


def received(consumer: SimpleConsumer, count: int, invisible_s: float = 300.0) -> list[StoredMessage]:
    """Receive until there are this many messages."""
    found: list[StoredMessage] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} came"
        found += consumer.receive(count - len(found), invisible_s, timeout=2)
    return found


def bodies_of(messages: list[StoredMessage]) -> list[bytes]:
    return sorted((message.body for message in messages), key=int)


@pytest.mark.parametrize("limit_ms", [60_000, 200], ids=["restart", "limit"])
def test_receive_waits_for_its_timeout(
    shared: Group, client: Client, monkeypatch: pytest.MonkeyPatch, limit_ms: int
) -> None:
    """Query ends a receive when it restarts, and after at most a minute."""
    monkeypatch.setattr("mqproc.client.subscription.RECEIVE_MS_MAX", limit_ms)
    topic = f"Waits{limit_ms}"
    fill(client, topic, 0)
    consumer = client.simple_consumer("waits", topic, start="earliest")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(consumer.receive, timeout=PATIENCE_S)
        wait_until(lambda: shared.words()["waiting_pulls"] == 1)
        if limit_ms == 200:
            assert consumer.receive(timeout=0.5) == []
        else:
            ask_supervisor(StorePaths(shared.store), Operation.RESTART_ROLE, RoleRequest(QUERY), PATIENCE_S)
        assert not waiting.done()
        client.send(topic, b"0")
        assert [consumer.ack(message) for message in waiting.result()] == [1]


class Interrupted(Exception):
    """Raised by a signal handler."""


def test_receive_interrupted_hands_back_arriving_messages(shared: Group, client: Client) -> None:
    fill(client, "Interrupted", 0)
    consumer = client.simple_consumer("interrupted", "Interrupted", start="earliest")

    def interrupt(number: int, frame: FrameType | None) -> None:
        client.send("Interrupted", b"0")
        wait_until(lambda: shared.words()["waiting_pulls"] == 0)
        raise Interrupted

    def signal_when_waiting() -> None:
        wait_until(lambda: shared.words()["waiting_pulls"] == 1)
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(signal_when_waiting)
            with pytest.raises(Interrupted):
                consumer.receive(invisible_duration=600, timeout=PATIENCE_S)
    finally:
        signal.signal(signal.SIGUSR1, before)
    (message,) = received(consumer, 1)
    assert (message.body, consumer.ack(message)) == (b"0", 1)


def test_receive_waiting_on_deleted_group_raises(shared: Group, client: Client) -> None:
    """The receive returned all messages, as if the group had started from the beginning."""
    fill(client, "Deleted", 4)
    consumer = client.simple_consumer("deleted", "Deleted")
    assert consumer.receive() == []
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(consumer.receive, timeout=PATIENCE_S)
        wait_until(lambda: shared.words()["waiting_pulls"] == 1)
        client.groups.delete("deleted")
        client.send("Deleted", b"4")
        with pytest.raises(GroupNotFoundError, match="group deleted was deleted"):
            waiting.result()
    assert "deleted" not in [group.group for group in client.groups.all()]


def test_receive_gives_message_to_one_until_acknowledged(shared: Group, client: Client) -> None:
    sent = fill(client, "Each", 20)
    before = shared.words()["pulled_messages"]
    one = client.simple_consumer("each", "Each", start="earliest")
    other = client.simple_consumer("each", "Each")
    first, second = received(one, 7), received(other, 13)
    assert bodies_of(first + second) == sent
    assert one.receive(10) == []
    assert shared.words()["pulled_messages"] - before == 20
    assert one.ack(*first) == 7
    # Any consumer of the group may do it, once.
    assert one.ack(*second) == 13
    assert other.ack(*second) == 0
    assert client.groups.info("each").lag == 0


def test_receive_waiting_is_woken_by_message(client: Client) -> None:
    """Without a wake-up, query polls about once a second."""
    client.create_topic("Woken", 1)
    consumer = client.simple_consumer("woken", "Woken", start="earliest")

    def took_s() -> float:
        began = time.monotonic()
        for number in range(20):
            sender = threading.Timer(0.05, client.send, ("Woken", b"%d" % number))
            sender.start()
            assert [message.body for message in consumer.receive(1, timeout=PATIENCE_S)] == [b"%d" % number]
            sender.join()
        return time.monotonic() - began

    assert_below(12.0, took_s, rounds=3)  # 20 polls take 15 s.


def test_acknowledge_accepts_any_number(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_calls, "NAMED_MAX", 4)
    fill(client, "AnyNumber", 10)
    consumer = client.simple_consumer("any-number", "AnyNumber", start="earliest")
    assert consumer.ack(*received(consumer, 10)) == 10
    assert consumer.ack() == 0


def test_receive_waits_for_messages(client: Client) -> None:
    fill(client, "Wait", 0)
    consumer = client.simple_consumer("wait", "Wait", start="earliest")
    began = time.monotonic()
    assert consumer.receive(1, timeout=0.3) == []
    assert 0.3 <= time.monotonic() - began < PATIENCE_S / 2
    client.send("Wait", b"1")
    (message,) = received(consumer, 1)
    assert message.properties["POP_CK"].split(" ")[5:] == ["mqproc", str(message.queue_id), "0"]


def test_receive_unacknowledged_is_redelivered_then_dead_letter(shared: Group, client: Client) -> None:
    before = shared.words()
    client.groups.change("twice", retry_max_times=1)
    fill(client, "Twice", 3, queues=1)
    consumer = client.simple_consumer("twice", "Twice", start="earliest")
    (done,) = received(consumer, 1)
    one, two = received(consumer, 2, invisible_s=1.0)
    assert consumer.ack(done) == 1
    again = received(consumer, 2, invisible_s=1.0)
    assert {(each.stored_topic, each.body, each.reconsume_times) for each in again} == {
        ("%RETRY%twice_Twice", b"1", 1),
        ("%RETRY%twice_Twice", b"2", 1),
    }
    assert again[0].properties["RETRY_TOPIC"] == "Twice"
    assert {each.properties["ORIGIN_MESSAGE_ID"] for each in again} == {one.message_id, two.message_id}
    assert consumer.ack(one, two) == 0, "too late"
    wait_until(lambda: len(list(client.groups.dead_letters("twice"))) == 2, what="dead letters")
    assert {each.reconsume_times for each in client.groups.dead_letters("twice")} == {2}
    counted = ("group_retries", "group_dead_letters")
    wait_until(lambda: [shared.words()[name] - before[name] for name in counted] == [2, 2], what="both counted")
    assert consumer.receive(10, timeout=0.3) == []


def test_receive_invisible_time_can_be_changed(client: Client) -> None:
    fill(client, "Longer", 2, queues=1)
    consumer = client.simple_consumer("longer", "Longer", start="earliest")
    longer, shorter = received(consumer, 2, invisible_s=CHANGED_S)
    kept = consumer.change_invisible_duration(longer, 60)
    given = consumer.change_invisible_duration(shorter, 1)
    assert [each.body for each in received(consumer, 1)] == [shorter.body]
    assert consumer.receive(1, timeout=CHANGED_S) == []
    assert consumer.ack(longer, given) == 0
    assert consumer.ack(kept) == 1
    with pytest.raises(BadRequestError, match="no longer held by this receiver"):
        consumer.change_invisible_duration(kept, 60)
    for seconds in (0.5, 43_201):
        with pytest.raises(BadRequestError, match="from 1 to 43200 s"):
            consumer.receive(1, seconds)


def test_acknowledge_invalid_receipt_is_refused(client: Client) -> None:
    fill(client, "Not", 1, queues=1)
    consumer = client.simple_consumer("not", "Not", start="earliest")
    with pytest.raises(BadRequestError, match="no POP_CK"):
        consumer.ack(client.pull("Not", 0, 0).messages[0])
    with client.consumer("not", "Not"), pytest.raises(GroupInUseError, match="has members"):
        consumer.receive(1)


def test_revive_topic_records_equal_rocketmq(client: Client) -> None:
    fill(client, "Said", 35, queues=1)
    consumer = client.simple_consumer("said", "Said", start="earliest")
    messages = received(consumer, 35)
    assert consumer.ack(messages[1]) == 1
    assert consumer.ack(messages[0], messages[2]) == 2
    assert consumer.ack(messages[33]) == 1
    client.wait_dispatched()
    said = [
        message
        for queue_id in range(REVIVE_QUEUES)
        for message in client.pull(REVIVE_TOPIC, queue_id, 0, 1000).messages
        if b'"c":"said"' in message.body
    ]
    assert [message.tag for message in said] == ["ck", "ck", "ack", "bAck", "ack"]
    points = [check_points.read(each) for each in said[:2]]
    for found, offsets in zip(points, (range(32), range(32, 35)), strict=True):
        assert isinstance(found, check_points.PopCheckPoint)
        assert (found.topic, found.queue_id, found.invisible_ms) == ("Said", 0, 300_000)
        assert (found.start, found.offsets) == (offsets[0], tuple(offsets))
    assert [check_points.read(each).offsets for each in said[2:]] == [(1,), (0, 2), (33,)]
    # RocketMQ takes the newest of these as the current time.
    times = [int(each.properties["TIMER_DELIVER_MS"]) for each in said]
    assert times == sorted(times)
    assert times[-1] <= time.time() * 1000


def test_receive_progress_is_saved_under_load(shared: Group, client: Client) -> None:
    """RocketMQ's file lags by a few seconds at most: 5 s plus the sync of the log."""
    client.create_topic("steady", 1)
    consumer = client.simple_consumer("steady", "steady", start="earliest")

    def saved_progress() -> int:
        client.send_batch("steady", [b"x"] * 8)
        consumer.ack(*consumer.receive(8, timeout=5))
        found = consumer_offset_json.load(StoreIO(), shared.paths).progress
        return next((at.offset for at in found if at.topic == "steady"), 0)

    first = wait_until(saved_progress, what="a first save")
    wait_until(lambda: saved_progress() > first, what="another one")


def test_receive_accepts_filters_and_several_topics(client: Client) -> None:
    for topic in ("fruit", "roots"):
        client.create_topic(topic, 3)
        tags = ["sweet" if number % 10 == 0 else "sour" for number in range(60)]
        keys = [str(number) for number in range(60)]
        client.send_batch(
            topic,
            [f"{topic}-{number}".encode() for number in range(60)],
            tags=tags,
            keys=keys,
            queue_ids=[number % 3 for number in range(60)],
        )
    client.wait_dispatched()
    wanted = {f"{topic}-{number}".encode() for topic in ("fruit", "roots") for number in range(0, 60, 10)}
    for group, filter in (("sweet", "sweet"), ("sql", SqlFilter("TAGS = 'sweet'"))):
        consumer = client.simple_consumer(group, ["fruit", "roots"], filter=filter, start="earliest")
        messages = received(consumer, len(wanted))
        assert {message.body for message in messages} == wanted
        assert {message.queue_id for message in messages} == {0, 1, 2}
        assert consumer.ack(*messages) == len(wanted)
        assert consumer.receive(timeout=0.2) == []
        lags = {(each.topic, each.queue_id): each.lag for each in client.groups.info(group).queues}
        assert len(lags) == 6
        assert set(lags.values()) == {0}, "the group has passed the filtered messages"
    with pytest.raises(FilterSyntaxError):
        client.simple_consumer("bad", "fruit", filter=SqlFilter("a and between 2 and 10")).receive()


@pytest.mark.parametrize("count", [32, 64])
def test_receive_busy_queue_starves_no_other(client: Client, count: int) -> None:
    """A receive of 64 uses two check points, which made the rotation always pick the same queue."""
    topic = f"Full{count}"
    fill(client, topic, 40 * count, queues=2)
    consumer = client.simple_consumer(topic, topic, start="earliest")
    assert {consumer.receive(count)[0].queue_id for _ in range(19)} == {0, 1}, "a queue has twenty receives in it"


def test_receive_large_with_filter_advances_past_its_messages(client: Client) -> None:
    """It uses several check points, with filtered-out messages between them."""
    client.create_topic("mixed", 1)
    client.send_batch("mixed", [b"%d" % number for number in range(200)], tags=["wanted", "other"] * 100)
    client.wait_dispatched()
    consumer = client.simple_consumer("large", "mixed", filter="wanted", start="earliest")
    found = [message.queue_offset for _ in range(3) for message in consumer.receive(64, 300)]
    assert found == list(range(0, 200, 2)), "each is one receiver's"


def test_receive_message_without_property_space_blocks_no_other(client: Client) -> None:
    """It becomes a dead letter; if it were refused, messages received with it would be stuck."""
    client.create_topic("full", 1)
    client.send("full", b"full", properties={"a": "v" * 32_700})
    client.send("full", b"empty")
    client.wait_dispatched()
    consumer = client.simple_consumer("hoarders", "full", start="earliest")
    assert len(consumer.receive(2, 1.0)) == 2
    (again,) = received(consumer, 1)
    assert (again.body, again.reconsume_times) == (b"empty", 1)
    client.wait_dispatched()
    (letter,) = client.groups.dead_letters("hoarders")
    assert (letter.body, letter.reconsume_times, dict(letter.properties)["a"]) == (b"full", 1, "v" * 32_700)


def test_receive_redelivered_message_matches_waiting_filter(client: Client) -> None:
    client.create_topic("late", 1)
    consumer = client.simple_consumer("late", "late", filter="wanted", start="earliest")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(consumer.receive, 8, 1.0, timeout=PATIENCE_S)
        client.send_batch("late", [b"%d" % number for number in range(100)], tags=["other"] * 99 + ["wanted"])
        (message,) = waiting.result()
        assert message.body == b"99"
    (again,) = consumer.receive(8, timeout=PATIENCE_S)
    assert (again.body, again.tag, again.reconsume_times) == (b"99", "wanted", 1)
    assert consumer.ack(again) == 1


# Groups that change to members or back, and dead letters


def test_receive_resent_dead_letters(client: Client) -> None:
    client.groups.change("resent", retry_max_times=1)
    fill(client, "Resent", 1, queues=1)
    consumer = client.simple_consumer("resent", "Resent", start="earliest")

    def dead_letters(count: int) -> list[StoredMessage]:
        consumer.receive(1, 1.0)
        found = list(client.groups.dead_letters("resent"))
        return found if len(found) == count else []

    (dead,) = wait_until(lambda: dead_letters(1), what="a dead letter")
    assert client.groups.resend("resent", dead) == 1
    (again,) = received(consumer, 1, invisible_s=1.0)
    assert (again.stored_topic, again.body, again.reconsume_times) == ("%RETRY%resent", b"0", 0)
    # If not acknowledged, it takes the same path again: its origin, then the dead letters.
    (last,) = received(consumer, 1, invisible_s=1.0)
    assert (last.stored_topic, last.reconsume_times, last.properties["RETRY_TOPIC"]) == ("%RETRY%resent", 1, "Resent")
    first, second = wait_until(lambda: dead_letters(2), what="another dead letter")
    assert first.properties["ORIGIN_MESSAGE_ID"] == second.properties["ORIGIN_MESSAGE_ID"]
    assert client.groups.resend("resent", second) == 1
    assert consumer.ack(*received(consumer, 1)) == 1
    assert consumer.receive(1, timeout=1.5) == []
    assert client.groups.info("resent").lag == 0


def test_receive_messages_nacked_by_members(client: Client) -> None:
    fill(client, "Before", 2, queues=1)
    with client.consumer("before", "Before", start="earliest") as member:
        one, two = member.receive(2, timeout=PATIENCE_S)
        member.nack(one, delay_level=1)
        member.nack(two, delay_level=-1)
    (dead,) = wait_until(lambda: list(client.groups.dead_letters("before")), what="a dead letter")
    assert client.groups.resend("before", dead) == 1
    consumer = client.simple_consumer("before", "Before")
    nacked, resent = sorted(received(consumer, 2), key=lambda each: each.body)
    assert [(each.stored_topic, each.body) for each in (nacked, resent)] == [
        ("%RETRY%before", b"0"),
        ("%RETRY%before", b"1"),
    ]
    for each in (nacked, resent):
        consumer.change_invisible_duration(each, 1)
    again = received(consumer, 2)
    assert {(each.stored_topic, each.body, each.reconsume_times, each.properties["RETRY_TOPIC"]) for each in again} == {
        ("%RETRY%before", b"0", 2, "Before"),
        ("%RETRY%before", b"1", 1, "Before"),
    }
    assert consumer.ack(*again) == 2
    assert consumer.receive(2, timeout=0.3) == []
    assert client.groups.info("before").lag == 0


def test_members_get_redeliveries_of_simple_consumers(shared: Group, client: Client) -> None:
    """Including messages not due before there are members; acknowledged ones are not delivered."""
    before = shared.words()["group_retries"]
    fill(client, "After", 4, queues=1)
    consumer = client.simple_consumer("after", "After", start="earliest")
    pending, done, late, kept = received(consumer, 4)
    assert consumer.ack(done) == 1
    consumer.change_invisible_duration(late, 4)
    consumer.change_invisible_duration(pending, 1)

    def waiting() -> int:
        lags = {each.topic: each.lag for each in client.groups.info("after").queues}
        return lags.get("%RETRY%after_After", 0)

    wait_until(waiting, what="the first copy")
    with client.consumer("after", "After") as member:
        found: list[StoredMessage] = []
        while len(found) < 2:
            found += (messages := member.receive(2, timeout=PATIENCE_S))
            assert messages
        assert [(each.stored_topic, each.body, each.reconsume_times) for each in found] == [
            ("%RETRY%after", pending.body, 1),
            ("%RETRY%after", late.body, 1),
        ]
        assert {each.properties["RETRY_TOPIC"] for each in found} == {"After"}
        assert [each.properties["ORIGIN_MESSAGE_ID"] for each in found] == [pending.message_id, late.message_id]
        member.ack(*found)
        assert consumer.ack(kept) == 1, "a message still held can be acknowledged"
        assert member.receive(1, timeout=1.5) == []
    assert client.groups.info("after").lag == 0
    assert shared.words()["group_retries"] - before == 2, "each moved message counts once"


def test_redelivery_with_same_retry_topic_stays_in_its_group(client: Client) -> None:
    """`%RETRY%east_side` has redeliveries of `side` for `east` and nacks of `east_side`."""
    fill(client, "side", 1, queues=1)
    fill(client, "Main", 1, queues=1)
    east = client.simple_consumer("east", "side", start="earliest")
    received(east, 1, invisible_s=1.0)
    wait_until(lambda: len(client.queues("%RETRY%east_side")), what="the copy")
    other = client.simple_consumer("east_side", "Main", start="earliest")
    assert other.ack(*received(other, 1)) == 1
    assert other.receive(1, timeout=0.5) == []
    assert [each.stored_topic for each in received(east, 1)] == ["%RETRY%east_side"]


# Kills


def test_receive_restarts_lose_nothing_and_keep_acknowledgements(group: Group) -> None:
    """Query, the writer and the whole group are killed between receives, acks and redeliveries."""
    seen: Counter[bytes] = Counter()
    done: set[bytes] = set()
    came_after_ack: set[bytes] = set()

    def restart(number: int) -> None:
        if number == 2:
            group.kill()
            group.start()
        elif number == 4:
            assert group.stop() == 0
            group.start()
        else:
            os.kill(group.pid(WRITER if number == 3 else QUERY), signal.SIGKILL)

    with group.client() as client:
        sent = fill(client, "orders", 60, queues=3)
    for number in range(6):
        with group.client(timeout=30) as client:
            consumer: Any = client.simple_consumer("billing", "orders", start="earliest")
            for _ in range(3):
                messages = consumer.receive(6, 2.0, timeout=5)
                came_after_ack |= {message.body for message in messages} & done
                seen.update(message.body for message in messages)
                kept = messages[::2]
                if kept and consumer.ack(*kept) == len(kept):
                    done |= {message.body for message in kept}
            restart(number)
    with group.client(timeout=30) as client:
        consumer = client.simple_consumer("billing", "orders", start="earliest")
        deadline = time.monotonic() + 120
        while len(done) < len(sent):
            assert time.monotonic() < deadline, f"{sorted(set(sent) - done, key=int)} were not redelivered"
            messages = consumer.receive(32, 20.0, timeout=1)
            came_after_ack |= {message.body for message in messages} & done
            if messages and consumer.ack(*messages) == len(messages):
                done |= {message.body for message in messages}
        assert came_after_ack == set()
        assert consumer.receive(32, timeout=2.5) == []
        assert list(client.groups.dead_letters("billing")) == []


def test_redelivery_with_killed_query_sends_none_twice(
    make_group: Callable[..., Group],
) -> None:
    """The copies are stored, but their check point is not closed yet."""
    group = make_group(heartbeat_timeout_ms=10 * int(1000 * CHANGED_S))  # The writer is stopped until then.
    with group.client(timeout=30) as client:
        sent = fill(client, "orders", 10, queues=1)
        consumer = client.simple_consumer("billing", "orders", start="earliest")
        received(consumer, 10, invisible_s=CHANGED_S)
        expired_s = time.monotonic() + CHANGED_S
        writer = group.pid(WRITER)
        os.kill(writer, signal.SIGSTOP)
        try:
            wait_until(lambda: time.monotonic() > expired_s, what="the end of their time")
            for _ in range(2):  # One step creates the copies, the next one may send them.
                group.wait_for_step(QUERY)
            os.kill(group.pid(QUERY), signal.SIGSTOP)
        finally:
            before = group.words()["written"]
            os.kill(writer, signal.SIGCONT)
        wait_until(lambda: group.words()["written"] > before, what="copies are stored")
        os.kill(group.pid(QUERY), signal.SIGKILL)
        again = received(consumer, 10)
        assert bodies_of(again) == sent
        assert consumer.ack(*again) == 10
        assert consumer.receive(10, timeout=1.0) == []

        def unread() -> int | None:
            """Messages of the revive topic that the next start would read."""
            return next((each.lag for each in client.groups.all() if each.group == REVIVE_GROUP), None)

        wait_until(lambda: unread() == 0, what="no check point open")
