"""RocketMQ's own DefaultMessageStore 5.3.3 reads what we wrote and goes on with it, and we go on with what it wrote.

Stores stopped in order, killed, written as the system's topics are, and damaged go the way that `java_story` tells.
What RocketMQ told is compared with what our reader finds in copies of the very files, record by record, queue by
queue, key by key; and with what was acknowledged.

RocketMQ differs here, all of it seen by these tests:

* A bad record in the last file cuts the log there when RocketMQ opens the store, intact records behind it included;
  their bytes stay. In an earlier file of a store that was stopped in order a bad record is not noticed.
* What RocketMQ cuts stays in the index, whose newest file then takes no key of what is appended below its end.
* RocketMQ loads a store before it takes the lock. On a running store of ours it fails to start, as it should, but has
  by then deleted the newest index file and the segments behind the log's end.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from mqproc import Message, StoreReader
from mqproc.layout.checkpoint import decode as decode_checkpoint
from mqproc.layout.consume_queue import FILLER_SIZE
from mqproc.message import StoredMessage
from tests.conftest import Group
from tests.interop import java_stores
from tests.interop.java_stores import SEGMENT_SIZE, SIZES, Sent
from tests.interop.java_story import Story, keys_of, tell
from tests.interop.rocketmq import Dump, Line, RocketMq, rocketmq_options
from tests.processes.rebuild import rebuilt

# The first test waits for the build, which downloads some 100 MB where Maven's repository is empty, and for the
# stories of all stores.
pytestmark = pytest.mark.timeout(1000)

WHOLE = ("stopped", "killed", "internal", "retained")
HOLED = ("hole_early", "hole_last")
# The folder that holds the files of which RocketMQ told.
MOMENTS = {"first": "left", "second": "extended", "third": "ended"}
PULL_BYTES_MAX = 128 << 20
TIME_MAX = (1 << 63) - 1
LOCKED = 7
RECOVERY_MARGIN_MS = 3000
CRC_NAME = "__CRC32#"

Told = tuple[dict[str, Story], subprocess.CompletedProcess[str]]
Seen = tuple[Story, str, StoreReader]


@pytest.fixture(scope="module")
def rocketmq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocketMq]:
    with RocketMq(tmp_path_factory.mktemp("rocketmq")) as program:
        yield program


@pytest.fixture(scope="module")
def told(rocketmq: RocketMq, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    """The stories of all stores by name, and what `mqproc up` said of a store that RocketMQ held."""
    folder = tmp_path_factory.mktemp("java")
    doomed = java_stores.Doomed(folder)
    stories: list[Story] = []
    try:
        stopped = java_stores.stopped(folder)
        stories += [Story(stopped), Story(java_stores.internal(folder)), Story(java_stores.retained(folder))]
        stories.append(Story(*java_stores.damaged(stopped, "hole_early", java_stores.in_an_early_segment)))
        # RocketMQ appends less than it cuts there.
        stories.append(Story(*java_stores.damaged(stopped, "hole_last", java_stores.in_the_last_segment), 3))
        stories.append(Story(doomed.kill()))
        refused = tell(stories, rocketmq)
        yield {story.handed.name: story for story in stories}, refused
    finally:
        doomed.close()
        for story in stories:
            story.handed.group.close()


@pytest.fixture(params=WHOLE)
def story(request: pytest.FixtureRequest, told: Told) -> Story:
    return told[0][request.param]


@pytest.fixture(params=[(name, moment) for name in WHOLE for moment in MOMENTS], ids="-".join)
def seen(request: pytest.FixtureRequest, told: Told) -> Iterator[Seen]:
    """A store, a moment, and our reader over a copy of the files that RocketMQ had then."""
    name, moment = request.param
    story = told[0][name]
    folder = story.folder(MOMENTS[moment])
    if (name, moment) == ("killed", "first"):
        # RocketMQ recovered the store before it told of it, so we recover what the kill left, too.
        folder = rebuilt(Group(folder, **story.handed.group.options)).root
    with StoreReader(folder, story.handed.options) as reader:
        yield story, moment, reader


# Opening, and who may


def test_rocketmq_opens_and_closes_what_we_wrote(story: Story) -> None:
    """Its first start of the killed store is one after a crash, all others follow a stop in order."""
    assert (story.folder("left") / "abort").exists() is (story.handed.name == "killed")
    assert story.opened["loaded"]
    assert story.opened["minPhyOffset"] == story.handed.begin
    assert (story.handed.begin > 0) is (story.handed.name == "retained")
    assert story.closed == [{"clean": True}, {"clean": True}]


def test_rocketmqs_recovery_begins_behind_the_first_segment(told: Told) -> None:
    """Our checkpoint lets it: what queues and index hold of the segments before was made by us."""
    killed = told[0]["killed"]
    checkpoint = decode_checkpoint((killed.folder("left") / "checkpoint").read_bytes())
    vouched = min(checkpoint.physic_timestamp_ms, checkpoint.logics_timestamp_ms) - RECOVERY_MARGIN_MS
    later = [line for line in killed.dumps["first"].records.values() if line["offset"] >= SEGMENT_SIZE]
    assert later[0]["storeTimestamp"] <= min(vouched, checkpoint.index_timestamp_ms)


def test_files_of_every_kind_have_rolled(told: Told) -> None:
    """Segments, files of one queue, index files: several from us, and RocketMQ begins others."""
    counts = {name: [_count_files(told[0][name].folder(moment)) for moment in MOMENTS.values()] for name in WHOLE}
    left, extended, ended = counts["stopped"]
    assert min(left) >= 2
    assert all(later > earlier for earlier, later in zip(left[:2], extended[:2], strict=True))
    assert min(*counts["killed"][0][:1], *counts["internal"][0][:1]) >= 2
    assert extended[2] > left[2]
    assert ended >= extended


def test_retention_has_deleted_files_of_every_kind(told: Told) -> None:
    """Of the log, of a queue, and of the index; a queue of which all has gone keeps where it stood."""
    story = told[0]["retained"]
    left = story.folder("left")
    assert story.handed.begin >= 3 * SEGMENT_SIZE
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


def test_we_do_not_start_while_rocketmq_holds_the_store(told: Told, rocketmq: RocketMq) -> None:
    _, refused = told
    assert refused.returncode == LOCKED
    assert f"in use by pid {rocketmq.pid} " in refused.stderr


@pytest.fixture
def intruded(rocketmq: RocketMq, make_group: Callable[..., Group]) -> tuple[Group, dict[int, Sent]]:
    """A running group on whose store RocketMQ has tried to start, and what had been acknowledged before."""
    group = make_group("held", **SIZES)
    handed = java_stores.Handed("held", group)
    with group.client() as client:
        for number in range(200):
            message = Message("held", b"before %d" % number, keys=[f"before-{number}"], queue_id=number % 4)
            handed.note(message, client.send(message))
    group.wait_dispatched()
    opened = rocketmq.ask("open", group.store, options=rocketmq_options(SIZES))
    assert not opened["started"]
    assert not opened["loaded"] or "Lock failed" in opened["error"]
    return group, handed.sent


def test_rocketmq_does_not_start_on_a_running_store(intruded: tuple[Group, dict[int, Sent]]) -> None:
    """What was acknowledged before is there, now and after a new start."""
    group, sent = intruded
    assert _as_sent(group, sent) == sent
    group.stop()
    group.start()
    assert _as_sent(group, sent) == sent


def _as_sent(group: Group, sent: dict[int, Sent]) -> dict[int, Sent]:
    with group.client() as client:
        return {
            found.physical_offset: Sent(
                found.topic, found.queue_id, found.queue_offset, found.body, found.tag, found.keys
            )
            for found in client.range("held")
            if found.physical_offset in sent
        }


def test_keys_are_indexed_after_rocketmq_has_tried(intruded: tuple[Group, dict[int, Sent]]) -> None:
    group, _ = intruded
    with group.client() as client:
        told = client.send("held", b"after", keys="after")
        group.wait_dispatched()
        assert [message.physical_offset for message in client.by_key("held", "after")] == [told.physical_offset]


# What was acknowledged is what RocketMQ reads


def test_what_we_acknowledged_is_what_rocketmq_reads(story: Story) -> None:
    dump = story.dumps["first"]
    assert len(story.handed.sent) > 200
    _assert_told(dump, story.handed.sent)


def test_what_we_appended_behind_rocketmq_is_what_it_reads(story: Story) -> None:
    second, third = story.dumps["second"], story.dumps["third"]
    _assert_told(third, story.handed.sent | story.added)
    assert min(story.added) >= second.max_physical_offset
    parked = second.parked(TIME_MAX)
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


def _assert_told(dump: Dump, sent: dict[int, Sent]) -> None:
    """RocketMQ's log holds the messages, its queues those that have a place in one."""
    for offset, each in sent.items():
        line = dump.records[offset]
        properties = line["properties"]
        found = Sent(
            line["topic"],
            line["queueId"],
            line["queueOffset"],
            base64.b64decode(line["body"]),
            properties.get("TAGS", ""),
            tuple(properties.get("KEYS", "").split()),
            each.queued,
        )
        assert found == each
        assert (_unit_at(dump, each) == offset) is each.queued, each


def _unit_at(dump: Dump, sent: Sent) -> int | None:
    """The place in the log that RocketMQ's queue has for a message; None where its queue has none."""
    queue = dump.queues.get((sent.topic, sent.queue_id), {"minOffset": 0, "units": []})
    place = sent.queue_offset - queue["minOffset"]
    return queue["units"][place][0] if 0 <= place < len(queue["units"]) else None


# RocketMQ and our reader, over the same files


def test_the_logs_agree(seen: Seen) -> None:
    story, moment, reader = seen
    dump = story.dumps[moment]
    messages = list(reader.scan())
    assert [message.physical_offset for message in messages] == list(dump.records)
    assert not dump.lines("bad")
    segment_ends = [line["offset"] + line["size"] for line in dump.lines("blank")]
    begin, end = story.handed.begin // SEGMENT_SIZE, dump.max_physical_offset // SEGMENT_SIZE
    assert segment_ends == [SEGMENT_SIZE * (index + 1) for index in range(begin, end)]
    assert dump.lines("store")[0]["earliestMessageTime"] == messages[0].store_timestamp_ms
    for message in messages:
        line = dump.records[message.physical_offset]
        raw = reader.record_bytes(message.physical_offset)
        assert raw is not None
        assert hashlib.sha256(raw.data).hexdigest() == line["sha256"]
        assert _as_line(message) == {name: line[name] for name in _as_line(message)} | {
            "properties": {name: value for name, value in line["properties"].items() if name != CRC_NAME}
        }


def _as_line(message: StoredMessage) -> Line:
    """Our message with the names and forms of StoreDump.java."""
    return {
        "offset": message.physical_offset,
        "physicalOffset": message.physical_offset,
        "size": message.size,
        "messageId": message.message_id,
        "topic": message.topic,
        "queueId": message.queue_id,
        "queueOffset": message.queue_offset,
        "flag": message.flag,
        "sysFlag": message.sys_flag,
        "bornTimestamp": message.born_timestamp_ms,
        "bornHost": _host(message.born_host),
        "storeTimestamp": message.store_timestamp_ms,
        "storeHost": _host(message.store_host),
        "reconsumeTimes": message.reconsume_times,
        "preparedTransactionOffset": message.prepared_transaction_offset,
        "bodyCrc": message.body_crc,
        "body": base64.b64encode(message.body).decode(),
        "properties": dict(message.properties),
    }


def _host(text: str) -> str:
    address, _, port = text.rpartition(":")
    return f"{ipaddress.ip_address(address.strip('[]')).packed.hex()}:{port}"


def test_rocketmq_verifies_the_crcs_of_whole_records(seen: Seen) -> None:
    """It demands them under forceVerifyPropCRC; where we wrote none it finds none."""
    story, moment, _ = seen
    lines = story.dumps[moment].records.values()
    for line in lines:
        assert line["covered"] is (CRC_NAME in line["properties"]), line
    assert {line["covered"] for line in lines} == ({True, False} if story.handed.name == "internal" else {True})


def test_the_queues_agree(seen: Seen) -> None:
    """Bounds as our reader finds them; units as the records say."""
    story, moment, reader = seen
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


def test_the_pulls_agree(seen: Seen) -> None:
    story, moment, reader = seen
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


def test_the_keys_agree(seen: Seen) -> None:
    """RocketMQ's own answers, by hash; and what the records say is among them."""
    story, moment, reader = seen
    dump = story.dumps[moment]
    assert len(dump.keys) > 200
    # After a kill RocketMQ indexes a record again that the index ends with.
    form: Callable[[Sequence[int]], list[int]] = list if story.handed.name != "killed" else _without_doubles
    for (topic, key), offsets in dump.keys.items():
        ours = reader.query_message(topic, key, 64, 0, TIME_MAX).offsets
        assert form(ours) == form(offsets), (topic, key)
    for (topic, key, _), offsets in keys_of(dump.records.values()).items():
        assert {*offsets[-64:]} <= {*dump.keys[(topic, key)]}, (topic, key)


def _without_doubles(offsets: Sequence[int]) -> list[int]:
    return sorted(set(offsets))


def test_the_times_agree(seen: Seen) -> None:
    story, moment, reader = seen
    lines = story.dumps[moment].lines("time")
    assert len(lines) > 50
    for line in lines:
        place = line["topic"], line["queueId"], line["time"]
        ours = reader.offset_at(*place), reader.offset_at(*place, upper=True)
        assert ours == (line["lower"], line["upper"]), line


# RocketMQ goes on with our store, and our group with RocketMQ's


def test_rocketmq_goes_on_where_we_stopped(story: Story) -> None:
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


def test_our_group_serves_what_rocketmq_wrote(story: Story) -> None:
    dump = story.dumps["second"]
    served = {queue: messages for queue, messages in story.served.queues.items() if messages}
    assert served.keys() == {queue for queue, line in dump.queues.items() if line["units"]}
    for queue, messages in served.items():
        pulled = dump.pulled(*queue)
        assert [message.physical_offset for message in messages[: len(pulled)]] == pulled
        for message in messages[: len(pulled)]:
            line = dump.records[message.physical_offset]
            assert _as_line(message)["body"] == line["body"]
            assert message.queue_offset == line["queueOffset"]
    assert story.served.keys == keys_of(dump.records.values())
    _assert_delivered(story, {queue: messages[len(dump.pulled(*queue)) :] for queue, messages in served.items()})


def _assert_delivered(story: Story, behind: dict[tuple[str, int], list[StoredMessage]]) -> None:
    """Behind what RocketMQ wrote lie the messages whose time had come, each once and where it was to go."""
    early, late = (story.dumps["second"].parked(moment_ms) for moment_ms in story.served_ms)
    origins: list[int] = []
    for queue, messages in behind.items():
        for message in messages:
            line = late[message.prepared_transaction_offset]
            properties = line["properties"]
            assert queue == (properties["REAL_TOPIC"], int(properties["REAL_QID"]))
            assert _as_line(message)["body"] == line["body"]
            origins.append(line["offset"])
    assert len(set(origins)) == len(origins)
    assert early.keys() <= set(origins)
    assert early, "no message of this store was due"


# Damage


@pytest.fixture
def hole_early(told: Told) -> Story:
    return told[0]["hole_early"]


@pytest.fixture
def hole_last(told: Told) -> Story:
    return told[0]["hole_last"]


def test_a_hole_in_an_early_segment_cuts_nothing(hole_early: Story) -> None:
    """RocketMQ's walk goes on in the next segment; what lies between is read by queue, key and offset."""
    first, victim = hole_early.dumps["first"], hole_early.victim
    after = victim - victim % SEGMENT_SIZE + SEGMENT_SIZE
    assert [(line["offset"], line["next"]) for line in first.lines("bad")] == [(victim, after)]
    sent = hole_early.handed.sent
    walked = {offset: each for offset, each in sent.items() if not victim < offset < after}
    _assert_told(first, walked)
    for offset in sent.keys() - walked.keys():
        queue = sent[offset].topic, sent[offset].queue_id
        assert first.queues[queue]["units"][sent[offset].queue_offset][0] == offset
    for (topic, key, _), offsets in keys_of(first.records.values()).items():
        assert {*offsets[-64:]} <= {*first.keys[(topic, key)]}, (topic, key)


def test_rocketmq_steps_over_a_hole(hole_early: Story) -> None:
    first = hole_early.dumps["first"]
    for queue, line in first.queues.items():
        assert first.pulled(*queue) == [unit[0] for unit in line["units"] if unit[1] != FILLER_SIZE]


def test_our_group_serves_what_rocketmq_wrote_behind_a_hole(hole_early: Story) -> None:
    dump = hole_early.dumps["second"]
    behind: dict[tuple[str, int], list[StoredMessage]] = {}
    for queue, line in dump.queues.items():
        units = [unit[0] for unit in line["units"] if unit[1] != FILLER_SIZE]
        served = hole_early.served.queues[queue]
        assert [message.physical_offset for message in served[: len(units)]] == units
        behind[queue] = served[len(units) :]
    _assert_delivered(hole_early, behind)
    assert {answer["status"] for answer in hole_early.answers} == {"PUT_OK"}
    _assert_told(hole_early.dumps["third"], hole_early.added)


def test_rocketmq_cuts_the_log_at_a_hole_in_the_last_segment(hole_last: Story) -> None:
    first, victim = hole_last.dumps["first"], hole_last.victim
    assert first.max_physical_offset == victim
    _assert_told(first, {offset: each for offset, each in hole_last.handed.sent.items() if offset < victim})
    assert max(line["maxOffset"] for line in first.queues.values()) > 0
    assert hole_last.answers[0]["physicalOffset"] == victim


def test_our_group_serves_what_rocketmq_wrote_where_it_had_cut(hole_last: Story) -> None:
    dump = hole_last.dumps["second"]
    for queue in dump.queues:
        served = {message.physical_offset: message for message in hole_last.served.queues[queue]}
        for offset in dump.pulled(*queue):
            assert _as_line(served[offset])["body"] == dump.records[offset]["body"]
            assert served[offset].queue_offset == dump.records[offset]["queueOffset"]


def test_what_we_append_where_rocketmq_had_cut_is_what_it_reads(hole_last: Story) -> None:
    _assert_told(hole_last.dumps["third"], hole_last.added)
