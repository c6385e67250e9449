"""RocketMQ's TimerMessageStore and mqproc's timer take over each other's files.

A group of mqproc is stopped with waiting messages. RocketMQ opens the store, lists the waiting messages, adds more,
delivers those that are due, and closes it. `store verify` finds its files clean. The group is started again.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from mqproc import StoreReader
from mqproc.layout import timer_files
from mqproc.topic_names import TIMER_TOPIC
from tests.interop.rocketmq import SIZES, Line, RocketMq, rocketmq_options, timer_units
from tests.support.command_line import call
from tests.support.group import Group, wait_until
from tests.support.store_checks import damage_in

pytestmark = pytest.mark.timeout(1000)

OPTIONS = SIZES | {"mapped_file_size_timer_log": 1024}
TOPIC = "later"
OURS_WAITING, OURS_DUE, THEIRS_WAITING, THEIRS_DUE = 40, 6, 10, 4
HOUR_MS = 3_600_000
# Long enough for the group to be stopped before; either side may deliver the due messages.
DUE_AFTER_S = 15


@dataclass
class Results:
    """The results of each side, in order."""

    ours: list[tuple[int, int]] = field(default_factory=list)
    """(slot, physical offset) of units that wait."""
    opened: Line = field(default_factory=dict)
    delivered: Line = field(default_factory=dict)
    verified: tuple[int, Any] = 0, None
    theirs: list[tuple[int, int]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    """Bodies of the topic at the end."""
    waiting: int = 0


def timer_message(number: int, due_ms: int) -> Line:
    """A message in the form in which RocketMQ's broker stores it in the timer topic."""
    return {
        "topic": TIMER_TOPIC,
        "queueId": 0,
        "body": base64.b64encode(b"theirs %d" % number).decode(),
        "properties": {
            "UNIQ_KEY": f"THEIRS{number:026d}",
            "TIMER_DELIVER_MS": str(due_ms),
            "TIMER_OUT_MS": str(due_ms // 1000 * 1000),
            "REAL_TOPIC": TOPIC,
            "REAL_QID": "0",
        },
        "sysFlag": 0,
        "bornHost": "10.1.2.3",
        "storeHost": "192.168.1.2",
    }


@pytest.fixture(scope="module")
def results(rocketmq: RocketMq, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results]:
    folder = tmp_path_factory.mktemp("java_timer")
    group = Group(folder / "timed", **OPTIONS)
    try:
        yield _run(group, rocketmq)
    finally:
        group.close()


def _run(group: Group, rocketmq: RocketMq) -> Results:
    results, root = Results(), group.store
    group.start()
    with group.client() as client:
        client.create_topic(TOPIC, 1)
        for number in range(OURS_WAITING):
            client.send(TOPIC, b"ours %d" % number, delay=HOUR_MS / 1000 + number % 4)
        for number in range(OURS_DUE):
            client.send(TOPIC, b"ours due %d" % number, delay=DUE_AFTER_S)
        wait_until(lambda: group.words()["timed_messages"] >= OURS_WAITING)
        group.wait_dispatched()
    assert group.stop() == 0
    results.ours = timer_units(root)
    opened = rocketmq.ask("open", root, options=rocketmq_options(OPTIONS))
    assert opened["started"], opened
    results.opened = rocketmq.ask("timer", root)
    now_ms = time.time_ns() // 1_000_000
    messages = [timer_message(number, now_ms + HOUR_MS + 1000 * (number % 3)) for number in range(THEIRS_WAITING)]
    # RocketMQ delivers messages that are already due at once. Those come last: no unit follows in its timer log.
    messages += [timer_message(100 + number, now_ms + 2000 - 4000 * (number // 2)) for number in range(THEIRS_DUE)]
    assert {each["status"] for each in rocketmq.ask("append", root, messages=messages)} == {"PUT_OK"}
    results.delivered = rocketmq.ask("deliver", root, topic=TOPIC, messages=OURS_DUE + THEIRS_DUE)
    assert rocketmq.ask("close", root) == {"clean": True}
    verified = call("store", "verify", root, "--json")
    results.verified = verified.code, verified.json
    results.theirs = timer_units(root)
    group.start()
    wait_until(lambda: group.words()["timed_messages"] >= OURS_WAITING + THEIRS_WAITING)
    results.waiting = group.words()["timed_messages"]
    group.wait_dispatched()
    assert group.stop() == 0
    with StoreReader(root) as reader:
        results.bodies = [message.body for message in reader.range(TOPIC)]
    return results


def test_rocketmq_lists_waiting_messages_of_our_files(results: Results) -> None:
    opened = results.opened
    assert opened["loaded"]
    assert opened["queueOffset"] == OURS_WAITING + OURS_DUE
    assert sorted((unit[0], unit[2]) for unit in opened["units"]) == results.ours
    assert opened["messages"] == len(results.ours) >= OURS_WAITING
    assert {unit[4] for unit in opened["units"]} == {timer_files.MAGIC_DEFAULT}


def test_rocketmq_delivers_due_messages(results: Results) -> None:
    assert results.delivered["delivered"] == OURS_DUE + THEIRS_DUE
    assert results.delivered["queueOffset"] == OURS_WAITING + OURS_DUE + THEIRS_WAITING + THEIRS_DUE
    assert results.delivered["messages"] == OURS_WAITING + THEIRS_WAITING


def test_verify_of_rocketmqs_timer_files_is_clean(results: Results) -> None:
    code, document = results.verified
    assert damage_in(document) == [], document["findings"]
    assert [each for each in document["findings"] if each["kind"].startswith("timer")] == []
    assert code == 0


def test_group_continues_after_rocketmqs_timer(results: Results) -> None:
    assert results.waiting == len(results.theirs) == OURS_WAITING + THEIRS_WAITING
    ours = [b"ours due %d" % number for number in range(OURS_DUE)]
    theirs = [b"theirs %d" % (100 + number) for number in range(THEIRS_DUE)]
    assert sorted(results.bodies) == sorted(ours + theirs)
