"""A RocketMQ broker and mqproc redeliver each other's unacknowledged messages.

A group of mqproc is stopped with received messages, some of them acknowledged. The broker opens the store and
redelivers the others when they are due; some are received and acknowledged there. It is shut down, and the group is
started again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mqproc.client._sync.consumer import SimpleConsumer
from mqproc.store import rocketmq_json
from mqproc.topic_names import REVIVE_GROUP, REVIVE_TOPIC
from mqproc.types import StoredMessage
from tests.interop.rocketmq import POP_GROUP, POP_TAG, POP_TOPIC, SIZES, RocketMq, ack, pop, pop_all, rocketmq_options
from tests.support.group import Group, wait_until

pytestmark = pytest.mark.timeout(1000)

OPTIONS = SIZES | {"mapped_file_size_timer_log": 1024, "broker_name": "ours-and-theirs"}
SENT = 40
LEFT = [0, 31, 32, 38, 39]
"""Not acknowledged; they are in several check points of one receive."""
INVISIBLE_S = 12
"""Longer than it takes a busy machine to stop our group."""
# The broker's shutdown takes a dozen seconds.
THEIRS_S = 16


@dataclass
class Results:
    """The results in order."""

    theirs: list[tuple[str, int]] = field(default_factory=list)
    """(body, times) of the broker's redeliveries."""
    theirs_after: list[str] = field(default_factory=list)
    ours: list[tuple[str, int]] = field(default_factory=list)
    ours_after: list[str] = field(default_factory=list)
    early_by_s: float = 0.0
    progress: dict[str, int] = field(default_factory=dict)


@pytest.fixture(scope="module")
def results(rocketmq: RocketMq, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results]:
    folder = tmp_path_factory.mktemp("java_pops")
    group = Group(folder / "popped", **OPTIONS)
    try:
        results = Results()
        _receive(group)
        due_s = _run_broker(rocketmq, group.store, results)
        _run_group_again(group, results, due_s)
        yield results
    finally:
        group.close()


def _all(consumer: SimpleConsumer, count: int, invisible_s: float) -> list[StoredMessage]:
    found: list[StoredMessage] = []

    def came() -> bool:
        found.extend(consumer.receive(count - len(found), invisible_s, timeout=1))
        return len(found) >= count

    wait_until(came, what=f"{count} messages")
    return found


def _receive(group: Group) -> None:
    group.start()
    with group.client() as client:
        client.create_topic(POP_TOPIC, 1)
        consumer = client.simple_consumer(POP_GROUP, POP_TOPIC, start="earliest")
        client.send(POP_TOPIC, b"done", tag=POP_TAG)
        # The offset in the revive topic advances when check points are done.
        assert len(_all(consumer, 1, 1)) == 1
        (again,) = _all(consumer, 1, 60)
        assert (again.reconsume_times, consumer.ack(again)) == (1, 1)
        client.send_batch(POP_TOPIC, [b"%d" % number for number in range(SENT)], tags=[POP_TAG] * SENT)
        group.wait_dispatched()
        found = consumer.receive(SENT, INVISIBLE_S, timeout=10)
        assert len(found) == SENT
        done = [message for message in found if int(message.body) not in LEFT]
        assert consumer.ack(*done) == len(done)
        consumer.change_invisible_duration(found[LEFT[-1]], INVISIBLE_S + 1)
        due = time.monotonic() + INVISIBLE_S + 1
    assert group.stop() == 0
    assert time.monotonic() < due


def _run_broker(rocketmq: RocketMq, store: Path, results: Results) -> float:
    """Run the broker; return when its last unacknowledged message is due again."""
    rocketmq.ask("broker", store, options=rocketmq_options(OPTIONS))
    found = pop_all(rocketmq, store, len(LEFT), THEIRS_S * 1000)
    results.theirs = sorted((each["body"], each["times"]) for each in found)
    due_s = 0.0
    for message in found:
        _, popped_ms, invisible_ms, *_ = message["handle"].split(" ")
        if message["body"] in ("0", "32"):
            ack(rocketmq, store, message)
        else:
            due_s = max(due_s, (int(popped_ms) + int(invisible_ms)) / 1000)
    results.theirs_after = [each["body"] for each in pop(rocketmq, store, 32, 60_000)]
    assert rocketmq.ask("stop", store) == {"clean": True}
    return due_s


def _run_group_again(group: Group, results: Results, due_s: float) -> None:
    group.start()
    with group.client() as client:
        consumer = client.simple_consumer(POP_GROUP, POP_TOPIC)
        found = _all(consumer, 3, 60)
        results.early_by_s = due_s - time.time()
        results.ours = sorted((message.body.decode(), message.reconsume_times) for message in found)
        assert consumer.ack(*found) == len(found)
        results.ours_after = [message.body.decode() for message in consumer.receive(32, timeout=3)]
    assert group.stop() == 0
    saved = rocketmq_json.parse(group.paths.consumer_offsets.read_text())["offsetTable"]
    results.progress = saved[f"{POP_TOPIC}@{POP_GROUP}"]
    assert f"{REVIVE_TOPIC}@{REVIVE_GROUP}" in saved


def test_broker_redelivers_our_unacknowledged_messages(results: Results) -> None:
    assert results.theirs == [(str(number), 1) for number in sorted(LEFT, key=str)]
    assert results.theirs_after == []
    assert results.progress == {"0": SENT + 1}


def test_group_redelivers_brokers_unacknowledged_when_due(results: Results) -> None:
    assert results.ours == [("31", 2), ("38", 2), ("39", 2)]
    assert results.ours_after == []
    assert results.early_by_s <= 1.0
