"""RocketMQ's DefaultMessageStore and mqproc extend stores with holes in turn.

RocketMQ's behaviour that the tests show:

* When RocketMQ opens a store, a damaged record in the last file truncates the log there, including later intact
records, whose bytes remain. It does not detect a damaged record in an earlier file of a cleanly stopped store.
* RocketMQ takes the end of a queue's records from the queue's last unit: `mqproc/store/consumequeue/bounds.py`.
* Cut records stay in the index, whose newest file then accepts no keys of records that are appended below its end.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mqproc.layout.consume_queue import FILLER_SIZES
from mqproc.types import StoredMessage
from tests.interop import java_stores
from tests.interop.java_stores import (
    SEGMENT_SIZE,
    Story,
    as_line,
    assert_delivered,
    assert_dumped,
    keys_of,
    run_stories,
)
from tests.interop.rocketmq import RocketMq

# The first test waits for the build and for both stories.
pytestmark = pytest.mark.timeout(1000)


@pytest.fixture(scope="module")
def stories(rocketmq: RocketMq, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Story]]:
    """The stories of three damaged copies of one store, by name."""
    folder = tmp_path_factory.mktemp("java")
    stopped = java_stores.stopped(folder)
    early = Story(*java_stores.damaged(stopped, "hole_early", java_stores.in_an_early_segment))
    # RocketMQ appends less than it cut there.
    last = Story(*java_stores.damaged(stopped, "hole_last", java_stores.in_the_last_segment), 3)
    end = Story(*java_stores.damaged(stopped, "hole_at_end", java_stores.at_a_queues_end, without=()))
    try:
        run_stories([early, last, end], rocketmq)
        yield {"early": early, "last": last, "end": end}
    finally:
        for each in (stopped, early.store, last.store, end.store):
            each.group.close()


@pytest.fixture
def hole_early(stories: dict[str, Story]) -> Story:
    return stories["early"]


@pytest.fixture
def hole_last(stories: dict[str, Story]) -> Story:
    return stories["last"]


@pytest.fixture
def hole_at_end(stories: dict[str, Story]) -> Story:
    return stories["end"]


def test_hole_in_early_segment_cuts_nothing(hole_early: Story) -> None:
    """RocketMQ's scan continues in the next segment; queue, key and offset find the rest."""
    first, victim = hole_early.dumps["first"], hole_early.victim
    after = victim - victim % SEGMENT_SIZE + SEGMENT_SIZE
    assert [(line["offset"], line["next"]) for line in first.lines("bad")] == [(victim, after)]
    sent = hole_early.store.sent
    walked = {offset: each for offset, each in sent.items() if not victim < offset < after}
    assert_dumped(first, walked)
    for offset in sent.keys() - walked.keys():
        queue = sent[offset].topic, sent[offset].queue_id
        assert first.queues[queue]["units"][sent[offset].queue_offset][0] == offset
    for (topic, key, _), offsets in keys_of(first.records.values()).items():
        assert {*offsets[-64:]} <= {*first.keys[(topic, key)]}, (topic, key)


def test_rocketmq_skips_hole(hole_early: Story) -> None:
    first = hole_early.dumps["first"]
    for queue, line in first.queues.items():
        assert first.pulled(*queue) == [unit[0] for unit in line["units"] if unit[1] not in FILLER_SIZES]


def test_rocketmq_continues_queue_ending_in_hole(hole_at_end: Story) -> None:
    """Each message has its unit, and each start continues after the last one."""
    first, second, third = (hole_at_end.dumps[moment].queues["batched", 1] for moment in ("first", "second", "third"))
    assert first["alone"] == [[first["maxOffset"] - 1, "MESSAGE_WAS_REMOVING"]]
    answers = zip(hole_at_end.messages, hole_at_end.answers, strict=True)
    (answer,) = [answer for given, answer in answers if given["topic"] == "batched"]
    assert answer["queueOffset"] == first["maxOffset"]
    assert second["maxOffset"] == first["maxOffset"] + answer["count"]
    assert second["units"][first["maxOffset"]][0] == answer["physicalOffset"]
    assert third["units"] == second["units"]


def test_group_serves_rocketmqs_messages_after_hole(hole_early: Story) -> None:
    dump = hole_early.dumps["second"]
    behind: dict[tuple[str, int], list[StoredMessage]] = {}
    for queue, line in dump.queues.items():
        units = [unit[0] for unit in line["units"] if unit[1] not in FILLER_SIZES]
        served = hole_early.served.queues[queue]
        assert [message.physical_offset for message in served[: len(units)]] == units
        behind[queue] = served[len(units) :]
    assert_delivered(hole_early, behind)
    assert {answer["status"] for answer in hole_early.answers} == {"PUT_OK"}
    assert_dumped(hole_early.dumps["third"], hole_early.added)


def test_rocketmq_cuts_log_at_hole_in_last_segment(hole_last: Story) -> None:
    first, victim = hole_last.dumps["first"], hole_last.victim
    assert first.max_physical_offset == victim
    assert_dumped(first, {offset: each for offset, each in hole_last.store.sent.items() if offset < victim})
    assert max(line["maxOffset"] for line in first.queues.values()) > 0
    assert hole_last.answers[0]["physicalOffset"] == victim


def test_group_serves_rocketmqs_messages_after_its_cut(hole_last: Story) -> None:
    dump = hole_last.dumps["second"]
    for queue in dump.queues:
        served = {message.physical_offset: message for message in hole_last.served.queues[queue]}
        for offset in dump.pulled(*queue):
            assert as_line(served[offset])["body"] == dump.records[offset]["body"]
            assert served[offset].queue_offset == dump.records[offset]["queueOffset"]


def test_rocketmq_reads_our_messages_after_its_cut(hole_last: Story) -> None:
    assert_dumped(hole_last.dumps["third"], hole_last.added)
