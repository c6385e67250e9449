"""RocketMQ's DefaultMessageStore 5.3.3 opens stores of ours with holes, goes on with them, and we with what it wrote.

Seen here of RocketMQ:

* A bad record in the last file cuts the log there when RocketMQ opens the store, intact records behind it included;
  their bytes stay. In an earlier file of a store that was stopped in order a bad record is not noticed.
* The last unit of a queue is for RocketMQ the end of what the queue has of the log: `store/end_fillers`.
* What RocketMQ cuts stays in the index, whose newest file then takes no key of what is appended below its end.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mqproc.layout.consume_queue import FILLER_SIZES
from mqproc.message import StoredMessage
from tests.interop import java_stores
from tests.interop.java_checks import as_line, assert_delivered, assert_told
from tests.interop.java_stores import SEGMENT_SIZE
from tests.interop.java_story import Story, keys_of, tell
from tests.interop.rocketmq import RocketMq

# The first test waits for the build and for both stories.
pytestmark = pytest.mark.timeout(1000)


@pytest.fixture(scope="module")
def told(rocketmq: RocketMq, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Story]]:
    """The stories of three damaged copies of one store, by name."""
    folder = tmp_path_factory.mktemp("java")
    stopped = java_stores.stopped(folder)
    early = Story(*java_stores.damaged(stopped, "hole_early", java_stores.in_an_early_segment))
    # RocketMQ appends less than it cuts there.
    last = Story(*java_stores.damaged(stopped, "hole_last", java_stores.in_the_last_segment), 3)
    end = Story(*java_stores.damaged(stopped, "hole_at_end", java_stores.at_a_queues_end, without=()))
    try:
        tell([early, last, end], rocketmq)
        yield {"early": early, "last": last, "end": end}
    finally:
        for each in (stopped, early.handed, last.handed, end.handed):
            each.group.close()


@pytest.fixture
def hole_early(told: dict[str, Story]) -> Story:
    return told["early"]


@pytest.fixture
def hole_last(told: dict[str, Story]) -> Story:
    return told["last"]


@pytest.fixture
def hole_at_end(told: dict[str, Story]) -> Story:
    return told["end"]


def test_a_hole_in_an_early_segment_cuts_nothing(hole_early: Story) -> None:
    """RocketMQ's walk goes on in the next segment; what lies between is read by queue, key and offset."""
    first, victim = hole_early.dumps["first"], hole_early.victim
    after = victim - victim % SEGMENT_SIZE + SEGMENT_SIZE
    assert [(line["offset"], line["next"]) for line in first.lines("bad")] == [(victim, after)]
    sent = hole_early.handed.sent
    walked = {offset: each for offset, each in sent.items() if not victim < offset < after}
    assert_told(first, walked)
    for offset in sent.keys() - walked.keys():
        queue = sent[offset].topic, sent[offset].queue_id
        assert first.queues[queue]["units"][sent[offset].queue_offset][0] == offset
    for (topic, key, _), offsets in keys_of(first.records.values()).items():
        assert {*offsets[-64:]} <= {*first.keys[(topic, key)]}, (topic, key)


def test_rocketmq_steps_over_a_hole(hole_early: Story) -> None:
    first = hole_early.dumps["first"]
    for queue, line in first.queues.items():
        assert first.pulled(*queue) == [unit[0] for unit in line["units"] if unit[1] not in FILLER_SIZES]


def test_rocketmq_goes_on_with_a_queue_that_ends_in_a_hole(hole_at_end: Story) -> None:
    """Each message has its unit, and each start goes on behind the last one's."""
    first, second, third = (hole_at_end.dumps[moment].queues["batched", 1] for moment in ("first", "second", "third"))
    assert first["alone"] == [[first["maxOffset"] - 1, "MESSAGE_WAS_REMOVING"]]
    answers = zip(hole_at_end.messages, hole_at_end.answers, strict=True)
    (answer,) = [answer for given, answer in answers if given["topic"] == "batched"]
    assert answer["queueOffset"] == first["maxOffset"]
    assert second["maxOffset"] == first["maxOffset"] + answer["count"]
    assert second["units"][first["maxOffset"]][0] == answer["physicalOffset"]
    assert third["units"] == second["units"]


def test_our_group_serves_what_rocketmq_wrote_behind_a_hole(hole_early: Story) -> None:
    dump = hole_early.dumps["second"]
    behind: dict[tuple[str, int], list[StoredMessage]] = {}
    for queue, line in dump.queues.items():
        units = [unit[0] for unit in line["units"] if unit[1] not in FILLER_SIZES]
        served = hole_early.served.queues[queue]
        assert [message.physical_offset for message in served[: len(units)]] == units
        behind[queue] = served[len(units) :]
    assert_delivered(hole_early, behind)
    assert {answer["status"] for answer in hole_early.answers} == {"PUT_OK"}
    assert_told(hole_early.dumps["third"], hole_early.added)


def test_rocketmq_cuts_the_log_at_a_hole_in_the_last_segment(hole_last: Story) -> None:
    first, victim = hole_last.dumps["first"], hole_last.victim
    assert first.max_physical_offset == victim
    assert_told(first, {offset: each for offset, each in hole_last.handed.sent.items() if offset < victim})
    assert max(line["maxOffset"] for line in first.queues.values()) > 0
    assert hole_last.answers[0]["physicalOffset"] == victim


def test_our_group_serves_what_rocketmq_wrote_where_it_had_cut(hole_last: Story) -> None:
    dump = hole_last.dumps["second"]
    for queue in dump.queues:
        served = {message.physical_offset: message for message in hole_last.served.queues[queue]}
        for offset in dump.pulled(*queue):
            assert as_line(served[offset])["body"] == dump.records[offset]["body"]
            assert served[offset].queue_offset == dump.records[offset]["queueOffset"]


def test_what_we_append_where_rocketmq_had_cut_is_what_it_reads(hole_last: Story) -> None:
    assert_told(hole_last.dumps["third"], hole_last.added)
