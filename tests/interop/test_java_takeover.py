"""A RocketMQ broker and mqproc take over each other's pending work.

A group of mqproc is stopped with offsets, retries, dead letters, transactions and delayed messages pending. The broker
opens the store unchanged; RocketMQ's own consumers and producer work there and leave pending work too. It is shut down,
and mqproc's group is started. Pending messages are delivered once, completed ones never.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mqproc import Message, StoreReader
from mqproc.client._sync.consumer import Consumer
from mqproc.store import rocketmq_json
from mqproc.topic_names import SCHEDULE_TOPIC
from mqproc.types import StoredMessage
from tests.interop.rocketmq import SIZES, Line, RocketMq, rocketmq_options
from tests.support.group import Group, wait_until

pytestmark = pytest.mark.timeout(1000)

TOPIC, GROUP, LETTERS, PRODUCERS = "Handed", "workers", "letters", "tellers"
DEAD = f"%DLQ%{GROUP}"
QUEUES, TIMES_MAX = 2, 7
SENT, DONE, NACKED, DEAD_AT_ONCE = 20, 10, 3, 5
"""Of the first messages of the topic so many are done, one of them by a nack, one as a dead letter."""
SOON_LEVEL, LATER_LEVEL, THEIR_LATER_LEVEL = 1, 2, 3
# On a busy machine the group may stop too late: then the first part is repeated with more time.
LATER_S = (12, 30, 60)
# The broker's shutdown takes a dozen seconds.
THEIR_LATER_S = 20
TIMEOUT_MS = 90_000
QUIET_S = 1.0
THEIR_SETTINGS = {
    "transactionTimeOut": "3000",
    "transactionCheckInterval": "1000",
    "transactionCheckMax": "1000",
    # Otherwise it checks ended transactions until their op messages are stored.
    "transactionOpBatchInterval": "100",
    # Its topics and groups are those in mqproc's files.
    "autoCreateTopicEnable": "false",
    "autoCreateSubscriptionGroup": "false",
}

FROM_US = Counter(
    [
        *((f"m{number}", 0) for number in range(DONE, SENT)),
        (f"m{NACKED}", 1),
        *((body, 0) for body in ("soon", "soon by the timer", "later", "later by the timer")),
        *((body, 0) for body in ("committed", "undecided")),
    ]
)
"""(body, times) of our messages that the broker's consumer must receive."""
WHILE_THEY_RUN = Counter((body, 0) for body in ("their soon", "their committed", "their dead", "again"))
FROM_THEM = Counter(
    [
        *((body, 0) for body in ("left 0", "left 1", "left 2", "left 3", "their later", "their later by the timer")),
        ("their undecided", 0),
        ("again", 1),
    ]
)


@dataclass
class Results:
    """The results of each side, in order."""

    begun: Line = field(default_factory=dict)
    """The broker's state loaded from our files."""
    theirs: Counter[tuple[str, int]] = field(default_factory=Counter)
    letters: Counter[tuple[str, int]] = field(default_factory=Counter)
    checked: set[str] = field(default_factory=set)
    stored: Counter[str] = field(default_factory=Counter)
    """How often which message is in the topic when the broker is shut down."""
    ours: Counter[tuple[str, int]] = field(default_factory=Counter)
    ours_after: list[str] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)
    progress: dict[str, int] = field(default_factory=dict)
    levels: dict[str, int] = field(default_factory=dict)
    ends: dict[str, dict[str, int]] = field(default_factory=dict)


def options(later_s: int) -> dict[str, Any]:
    levels = f"1s {later_s}s {THEIR_LATER_S}s"
    return SIZES | {"mapped_file_size_timer_log": 1024, "broker_name": "broker-a", "message_delay_level": levels}


@pytest.fixture(scope="module")
def results(rocketmq: RocketMq, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results]:
    folder = tmp_path_factory.mktemp("java_takeover")
    group = left_waiting(folder)
    try:
        results = Results()
        run_broker(rocketmq, group, results)
        run_group_again(group, results)
        yield results
    finally:
        group.close()


def left_waiting(folder: Path) -> Group:
    """Run mqproc's part; stop before the waiting messages are due."""
    for later_s in LATER_S:
        group = Group(folder / f"store-{later_s}", **options(later_s))
        try:
            if leave_ours(group, later_s):
                return group
        except BaseException:
            group.close()
            raise
    pytest.fail(f"a group was not stopped within {LATER_S[-1]} s")


def leave_ours(group: Group, later_s: int) -> bool:
    """Leave pending work; True if the group was stopped before the waiting messages were due."""
    group.start()
    with group.client() as client:
        client.create_topic(TOPIC, QUEUES)
        client.groups.change(GROUP, retry_max_times=TIMES_MAX)
        client.groups.change(LETTERS, retry_max_times=TIMES_MAX)
        for number in range(SENT):
            client.send(TOPIC, b"m%d" % number, queue_id=number % QUEUES)
        client.transaction(PRODUCERS, Message(TOPIC, b"committed")).begin().commit()
        client.transaction(PRODUCERS, Message(TOPIC, b"rolled back")).begin().rollback()
        client.transaction(PRODUCERS, Message(TOPIC, b"undecided")).begin()
        client.send(TOPIC, b"soon", delay_level=SOON_LEVEL)
        client.send(TOPIC, b"soon by the timer", delay=1)
        with client.consumer(GROUP, TOPIC, start="earliest") as consumer:
            found = received(consumer, SENT + 3)
            numbered = {message.body.decode(): message for message in found}
            later_by = time.monotonic() + later_s
            client.send(TOPIC, b"later", delay_level=LATER_LEVEL)
            client.send(TOPIC, b"later by the timer", delay=later_s)
            consumer.nack(numbered[f"m{NACKED}"], delay_level=LATER_LEVEL)
            consumer.nack(numbered[f"m{DEAD_AT_ONCE}"], delay_level=-1)
            consumer.ack(*(numbered[f"m{number}"] for number in range(DONE) if number not in (NACKED, DEAD_AT_ONCE)))
    assert group.stop() == 0
    return time.monotonic() < later_by


def received(consumer: Consumer, count: int) -> list[StoredMessage]:
    found: list[StoredMessage] = []

    def came() -> bool:
        found.extend(consumer.receive(64, timeout=0.5))
        return len(found) >= count

    wait_until(came, 60.0, f"{count} messages")
    return found


def counted(messages: list[Line]) -> Counter[tuple[str, int]]:
    return Counter((each["body"], each["times"]) for each in messages)


def run_broker(rocketmq: RocketMq, group: Group, results: Results) -> None:
    store = group.store
    rocketmq.ask("broker", store, options=rocketmq_options(group.options) | THEIR_SETTINGS)
    results.begun = rocketmq.ask("state", store, topic=TOPIC, group=GROUP)
    refuse = {"again": THEIR_LATER_LEVEL, "their dead": -1}
    rocketmq.ask("consume", store, group=GROUP, topic=TOPIC, refuse=refuse)
    rocketmq.ask("consume", store, group=LETTERS, topic=DEAD, refuse={})
    rocketmq.ask("produce", store, group=PRODUCERS, topic=TOPIC, answers={"undecided": True})
    rocketmq.ask("consumed", store, group=GROUP, messages=FROM_US.total(), waitMs=TIMEOUT_MS)
    leave_brokers_work(rocketmq, store, results)
    assert rocketmq.ask("stop", store) == {"clean": True}
    with StoreReader(store) as reader:
        results.stored = Counter(message.body.decode() for message in reader.range(TOPIC))


def leave_brokers_work(rocketmq: RocketMq, store: Path, results: Results) -> None:
    def put(body: str, **how: Any) -> None:
        assert rocketmq.ask("put", store, topic=TOPIC, body=body, **how) == "SEND_OK"

    put("their soon", level=SOON_LEVEL)
    put("their committed", commit=True)
    put("their rolled back", commit=False)
    put("their undecided", commit=None)
    put("their dead")
    put("again")
    expected = FROM_US + WHILE_THEY_RUN
    rocketmq.ask("consumed", store, group=GROUP, messages=expected.total(), waitMs=TIMEOUT_MS)
    put("their later", level=THEIR_LATER_LEVEL)
    put("their later by the timer", deliverMs=time.time_ns() // 1_000_000 + THEIR_LATER_S * 1000)
    # The undecided one is the last in the half topic: all other checks come before it.
    wait_until(lambda: "their undecided" in rocketmq.ask("checked", store), 60.0, "a check")
    results.checked = set(rocketmq.ask("checked", store))
    results.letters = counted(rocketmq.ask("consumed", store, group=LETTERS, messages=2, waitMs=TIMEOUT_MS))
    rocketmq.ask("endConsumer", store, group=GROUP)
    results.theirs = counted(rocketmq.ask("consumed", store, group=GROUP, messages=0, waitMs=0))
    for number in range(4):
        put(f"left {number}")


def run_group_again(group: Group, results: Results) -> None:
    def checker(message: StoredMessage) -> bool:
        results.asked.add(message.body.decode())
        return True

    group.start()
    with group.client() as client:
        with client.transaction_producer(PRODUCERS, checker), client.consumer(GROUP, TOPIC) as consumer:
            found = received(consumer, FROM_THEM.total())
            results.ours = Counter((message.body.decode(), message.reconsume_times) for message in found)
            consumer.ack(*found)
            results.ours_after = [message.body.decode() for message in consumer.receive(64, timeout=QUIET_S)]
        results.dead = {message.body.decode() for message in client.groups.dead_letters(GROUP)}
        for topic in (TOPIC, SCHEDULE_TOPIC):
            results.ends[topic] = {str(queue.queue_id): queue.max_offset for queue in client.queues(topic)}
    assert group.stop() == 0
    results.progress = rocketmq_json.parse(group.paths.consumer_offsets.read_text())["offsetTable"][f"{TOPIC}@{GROUP}"]
    results.levels = rocketmq_json.parse(group.paths.delay_offsets.read_text())["offsetTable"]


def test_broker_loads_our_config_files(results: Results) -> None:
    begun = results.begun
    assert begun["progress"] == {"0": DONE // QUEUES, "1": DONE // QUEUES}
    assert begun["levels"] == {str(SOON_LEVEL): 1}
    assert (begun["queues"], begun["retryMaxTimes"]) == (QUEUES, TIMES_MAX)


def test_brokers_consumer_receives_pending_messages_once(results: Results) -> None:
    assert results.theirs == FROM_US + WHILE_THEY_RUN
    assert results.letters == Counter({(f"m{DEAD_AT_ONCE}", 1): 1, ("their dead", 1): 1})


def test_broker_checks_open_transactions_only(results: Results) -> None:
    assert results.checked == {"undecided", "their undecided"}
    assert results.stored.keys() & {"rolled back", "their rolled back"} == set()
    assert results.stored["committed"] == results.stored["their committed"] == results.stored["undecided"] == 1


def test_topic_has_no_duplicates(results: Results) -> None:
    assert results.stored.keys() >= {body for body, times in FROM_US if not times}
    assert set(results.stored.values()) == {1}


def test_our_consumer_receives_brokers_pending_messages_once(results: Results) -> None:
    assert results.ours == FROM_THEM
    assert results.ours_after == []
    assert results.dead == {f"m{DEAD_AT_ONCE}", "their dead"}
    assert results.progress == results.ends[TOPIC]
    assert results.levels == {str(int(queue) + 1): end for queue, end in results.ends[SCHEDULE_TOPIC].items() if end}


def test_our_producers_are_asked_about_open_transactions_only(results: Results) -> None:
    assert results.asked == {"their undecided"}
