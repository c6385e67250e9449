"""RocketMQ's DefaultMessageStore and mqproc read and extend the same stores in turn.

The stores were stopped cleanly, killed, or written like system topics; `java_stores` has the steps. RocketMQ's dumps
are compared with the acknowledged messages, and with mqproc's reader on copies of the same files: records, queues and
keys.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from mqproc import StoreReader
from mqproc.layout.checkpoint import decode as decode_checkpoint
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
from tests.interop.rocketmq import Dump, RocketMq
from tests.support.group import Group, rebuilt

# The first test waits for the build, which downloads about 100 MB if Maven's repository is empty, and for the stories
# of all stores.
pytestmark = pytest.mark.timeout(1000)

WHOLE = ("stopped", "killed", "internal", "retained")
# The copy with the files of each dump.
MOMENTS = {"first": "left", "second": "extended", "third": "ended"}
PULL_BYTES_MAX = 128 << 20
TIME_MAX = (1 << 63) - 1
LOCKED = 7
RECOVERY_MARGIN_MS = 3000
CRC_NAME = "__CRC32#"

Stories = tuple[dict[str, Story], subprocess.CompletedProcess[str]]
Moment = tuple[Story, str, StoreReader]


@pytest.fixture(scope="module")
def stories_run(rocketmq: RocketMq, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stories]:
    """All stories by name, and the result of `mqproc up` on a store that RocketMQ held."""
    folder = tmp_path_factory.mktemp("java")
    killed_group = java_stores.KilledGroup(folder)
    stories: list[Story] = []
    try:
        stories += [Story(make(folder)) for make in (java_stores.stopped, java_stores.internal, java_stores.retained)]
        stories.append(Story(killed_group.kill()))
        refused = run_stories(stories, rocketmq)
        yield {story.store.name: story for story in stories}, refused
    finally:
        killed_group.close()
        for story in stories:
            story.store.group.close()


@pytest.fixture(params=WHOLE)
def story(request: pytest.FixtureRequest, stories_run: Stories) -> Story:
    return stories_run[0][request.param]


@pytest.fixture(params=[(name, moment) for name in WHOLE for moment in MOMENTS], ids="-".join)
def view(request: pytest.FixtureRequest, stories_run: Stories) -> Iterator[Moment]:
    """A store, a moment, and mqproc's reader on a copy of RocketMQ's files at that moment."""
    name, moment = request.param
    story = stories_run[0][name]
    folder = story.folder(MOMENTS[moment])
    if (name, moment) == ("killed", "first"):
        # RocketMQ dumps the store after its recovery, so the killed store is recovered here too.
        folder = rebuilt(Group(folder, **story.store.group.options)).root
    with StoreReader(folder, story.store.options) as reader:
        yield story, moment, reader


# Opening


def test_rocketmq_opens_and_closes_our_store(story: Story) -> None:
    """RocketMQ first opens the killed store after a crash, all others after a clean stop."""
    assert (story.folder("left") / "abort").exists() is (story.store.name == "killed")
    assert story.opened["loaded"]
    assert story.opened["minPhyOffset"] == story.store.begin
    assert (story.store.begin > 0) is (story.store.name == "retained")
    assert story.closed == [{"clean": True}, {"clean": True}]


def test_rocketmqs_recovery_begins_after_first_segment(stories_run: Stories) -> None:
    """mqproc's checkpoint permits it: the units and entries of earlier segments are written."""
    killed = stories_run[0]["killed"]
    checkpoint = decode_checkpoint((killed.folder("left") / "checkpoint").read_bytes())
    vouched = min(checkpoint.physic_timestamp_ms, checkpoint.logics_timestamp_ms) - RECOVERY_MARGIN_MS
    later = [line for line in killed.dumps["first"].records.values() if line["offset"] >= SEGMENT_SIZE]
    assert later[0]["storeTimestamp"] <= min(vouched, checkpoint.index_timestamp_ms)


def test_stories_roll_files_of_every_kind(stories_run: Stories) -> None:
    """mqproc writes several segments, files of a queue and index files; RocketMQ adds others."""
    stories, _ = stories_run
    counts = {name: [_count_files(stories[name].folder(moment)) for moment in MOMENTS.values()] for name in WHOLE}
    left, extended, ended = counts["stopped"]
    assert min(left) >= 2
    assert all(later > earlier for earlier, later in zip(left[:2], extended[:2], strict=True))
    assert min(*counts["killed"][0][:1], *counts["internal"][0][:1]) >= 2
    assert extended[2] > left[2]
    assert ended >= extended


def test_retention_deleted_files_of_every_kind(stories_run: Stories) -> None:
    """Files of the log, a queue and the index; a queue without messages keeps its end."""
    story = stories_run[0]["retained"]
    left = story.folder("left")
    assert story.store.begin >= 3 * SEGMENT_SIZE
    queues = {
        path.parent: min(int(each.name) for each in path.parent.iterdir())
        for path in left.glob("consumequeue/orders/*/*")
    }
    assert all(queues.values())
    first = story.dumps["first"]
    headers = [path.read_bytes()[16:24] for path in sorted((left / "index").iterdir())]
    assert int.from_bytes(headers[0], "big") > SEGMENT_SIZE, "the first index file of all began at the log's begin"
    gone = {queue: line for queue, line in first.queues.items() if queue[0] == "gone"}
    assert sum(line["maxOffset"] for line in gone.values()) == 10
    for line in gone.values():
        assert (line["minOffset"], line["units"]) == (line["maxOffset"], [])
    orders = [line for queue, line in first.queues.items() if queue[0] == "orders"]
    assert all(0 < line["minOffset"] < line["maxOffset"] for line in orders)


def _count_files(folder: Path) -> tuple[int, int, int]:
    queues = [len(list(queue.iterdir())) for queue in (folder / "consumequeue").glob("*/*")]
    return len(list((folder / "commitlog").iterdir())), max(queues), len(list((folder / "index").iterdir()))


def test_up_on_store_opened_by_rocketmq_fails(stories_run: Stories, rocketmq: RocketMq) -> None:
    _, refused = stories_run
    assert refused.returncode == LOCKED
    assert f"in use by pid {rocketmq.pid} " in refused.stderr


# RocketMQ reads the acknowledged messages


def test_rocketmq_reads_our_acknowledged_messages(story: Story) -> None:
    dump = story.dumps["first"]
    assert len(story.store.sent) > 200
    assert_dumped(dump, story.store.sent)


def test_rocketmq_reads_messages_we_appended_after_it(story: Story) -> None:
    second, third = story.dumps["second"], story.dumps["third"]
    assert_dumped(third, story.store.sent | story.added)
    assert min(story.added) >= second.max_physical_offset
    parked = second.due_undelivered(TIME_MAX)
    for queue, line in third.queues.items():
        begin = second.queues[queue]["maxOffset"] if queue in second.queues else 0
        ours = [sent.queue_offset for sent in story.added.values() if (sent.topic, sent.queue_id) == queue]
        delivered = [
            each["queueOffset"]
            for each in third.records.values()
            if each["preparedTransactionOffset"] in parked and (each["topic"], each["queueId"]) == queue
        ]
        assert ours == sorted(ours)
        assert sorted(ours + delivered) == list(range(begin, line["maxOffset"])), queue
    assert {offset: third.records[offset]["sha256"] for offset in second.records} == {
        offset: line["sha256"] for offset, line in second.records.items()
    }


# RocketMQ and mqproc's reader on the same files


def test_log_equals_rocketmqs(view: Moment) -> None:
    story, moment, reader = view
    dump = story.dumps[moment]
    messages = list(reader.scan())
    assert [message.physical_offset for message in messages] == list(dump.records)
    assert not dump.lines("bad")
    segment_ends = [line["offset"] + line["size"] for line in dump.lines("blank")]
    begin, end = story.store.begin // SEGMENT_SIZE, dump.max_physical_offset // SEGMENT_SIZE
    assert segment_ends == [SEGMENT_SIZE * (index + 1) for index in range(begin, end)]
    assert dump.lines("store")[0]["earliestMessageTime"] == messages[0].store_timestamp_ms
    for message in messages:
        line = dump.records[message.physical_offset]
        raw = reader.record_bytes(message.physical_offset)
        assert raw is not None
        assert hashlib.sha256(raw.data).hexdigest() == line["sha256"]
        assert as_line(message) == {name: line[name] for name in as_line(message)} | {
            "properties": {name: value for name, value in line["properties"].items() if name != CRC_NAME}
        }


def test_rocketmq_verifies_our_record_crcs(view: Moment) -> None:
    """RocketMQ requires them under forceVerifyPropCRC; where mqproc wrote none it finds none."""
    story, moment, _ = view
    lines = story.dumps[moment].records.values()
    for line in lines:
        assert line["covered"] is (CRC_NAME in line["properties"]), line
    assert {line["covered"] for line in lines} == ({True, False} if story.store.name == "internal" else {True})


def test_queues_equal_rocketmqs(view: Moment) -> None:
    """Bounds equal those of mqproc's reader, units equal the records."""
    story, moment, reader = view
    dump = story.dumps[moment]
    ours = {(each.topic, each.queue_id): (each.min_offset, each.max_offset) for each in reader.queues()}
    theirs = {queue: (line["minOffset"], line["maxOffset"]) for queue, line in dump.queues.items()}
    assert {queue: bounds for queue, bounds in ours.items() if bounds[1]} == theirs
    for queue, line in dump.queues.items():
        assert line["units"] == _units(dump, queue)
        assert line["alone"] == []
        assert dump.pulled(*queue) == [unit[0] for unit in line["units"]]


def _units(dump: Dump, queue: tuple[str, int]) -> list[list[int]]:
    lines = [
        line
        for line in dump.records.values()
        if (line["topic"], line["queueId"]) == queue and line["sysFlag"] & 0xC in (0, 8)
    ]
    minimum = dump.queues[queue]["minOffset"]
    assert [line["queueOffset"] for line in lines] == list(range(minimum, minimum + len(lines)))
    return [[line["offset"], line["size"], line["tagsCode"]] for line in lines]


def test_pulls_equal_rocketmqs(view: Moment) -> None:
    story, moment, reader = view
    lines = story.dumps[moment].lines("pull")
    assert {line["tag"] != "" for line in lines} == {True, False}
    for line in lines:
        tags = [line["tag"]] if line["tag"] else []
        place = line["topic"], line["queueId"], line["offset"]
        found = reader.pull(*place, 32, max_bytes=PULL_BYTES_MAX, tags=tags, rocketmq_limits=True)
        ours = {
            "status": found.status.value,
            "next": found.next_offset,
            "queueOffsets": [message.queue_offset for message in found.messages],
            "physicalOffsets": [message.physical_offset for message in found.messages],
        }
        assert ours == {name: line[name] for name in ours}, line


def test_keys_equal_rocketmqs(view: Moment) -> None:
    """RocketMQ's answers, which match by hash, include those that follow from the records."""
    story, moment, reader = view
    dump = story.dumps[moment]
    assert len(dump.keys) > 200
    # After a kill RocketMQ indexes the last record of the index again.
    form: Callable[[Sequence[int]], list[int]] = list if story.store.name != "killed" else _without_doubles
    for (topic, key), offsets in dump.keys.items():
        ours = reader.query_message(topic, key, 64, 0, TIME_MAX).offsets
        assert form(ours) == form(offsets), (topic, key)
    for (topic, key, _), offsets in keys_of(dump.records.values()).items():
        assert {*offsets[-64:]} <= {*dump.keys[(topic, key)]}, (topic, key)


def _without_doubles(offsets: Sequence[int]) -> list[int]:
    return sorted(set(offsets))


def test_times_equal_rocketmqs(view: Moment) -> None:
    story, moment, reader = view
    lines = story.dumps[moment].lines("time")
    assert len(lines) > 50
    for line in lines:
        place = line["topic"], line["queueId"], line["time"]
        ours = reader.offset_at(*place), reader.offset_at(*place, upper=True)
        assert ours == (line["lower"], line["upper"]), line


# RocketMQ extends mqproc's store, and mqproc extends RocketMQ's


def test_rocketmq_appends_after_our_end(story: Story) -> None:
    first, second = story.dumps["first"], story.dumps["second"]
    last: dict[tuple[str, int], int] = {}
    for given, answer in zip(story.messages, story.answers, strict=True):
        assert answer["status"] == "PUT_OK"
        line = second.records[answer["physicalOffset"]]
        assert (line["topic"], line["queueId"]) == (given["topic"], given["queueId"])
        if given["sysFlag"] & 0xC not in (0, 8):
            continue
        queue = given["topic"], given["queueId"]
        begin = first.queues[queue]["maxOffset"] if queue in first.queues else 0
        assert line["queueOffset"] == last.get(queue, begin) == answer["queueOffset"]
        last[queue] = line["queueOffset"] + answer["count"]
    assert second.records.keys() - first.records.keys() >= {answer["physicalOffset"] for answer in story.answers}


def test_group_serves_rocketmqs_messages(story: Story) -> None:
    dump = story.dumps["second"]
    served = {queue: messages for queue, messages in story.served.queues.items() if messages}
    assert served.keys() == {queue for queue, line in dump.queues.items() if line["units"]}
    for queue, messages in served.items():
        pulled = dump.pulled(*queue)
        assert [message.physical_offset for message in messages[: len(pulled)]] == pulled
        for message in messages[: len(pulled)]:
            line = dump.records[message.physical_offset]
            assert as_line(message)["body"] == line["body"]
            assert message.queue_offset == line["queueOffset"]
    assert story.served.keys == keys_of(dump.records.values())
    assert_delivered(story, {queue: messages[len(dump.pulled(*queue)) :] for queue, messages in served.items()})
