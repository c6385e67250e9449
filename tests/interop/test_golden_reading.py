"""Every question that RocketMQ answered about its own stores, asked of a StoreReader over the same files.

Each answer of the fixtures is one comparison: status, offsets, next offset, bytes. Where ours differs on purpose, the
difference has a name in DIFFERENCES, and the answer given instead is checked.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mqproc.config import Options
from mqproc.store.reader import StoreReader
from mqproc.store.slices import finish
from mqproc.wire.checks import parse_tags
from tests.golden.fixtures import Fixture, load_fixture

FIXTURES = ("a_basic", "b_transaction", "e_delay", "f_batch")
ROCKETMQ_BYTES_MAX = 128 << 20

# Where our status is another than RocketMQ's: (theirs, ours).
DIFFERENCES = {
    # It makes a queue object for every queue that is asked about, and answers for the empty queue it has just made.
    "unknown queue": ("NO_MESSAGE_IN_QUEUE", "NO_MATCHED_LOGIC_QUEUE"),
    # A filter of blanks has no tag, so nothing matches there; ours takes it for an empty one, which means all.
    "blank filter": ("NO_MATCHED_MESSAGE", "FOUND"),
}

Answer = dict[str, Any]


@pytest.fixture(scope="module", params=FIXTURES)
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fixture, Any]]:
    fixture = load_fixture(request.param, tmp_path_factory.mktemp(request.param))
    config = fixture.expected["config"]
    options = Options(max_hash_slot_num=int(config["maxHashSlotNum"]), max_index_num=int(config["maxIndexNum"]))
    with StoreReader(fixture.store, options) as reader:
        yield fixture, reader


def questions(fixture: Fixture, operation: str) -> list[Answer]:
    return [answer for answer in fixture.expected["answers"] if answer["op"] == operation]


def compare(fixture: Fixture, operation: str, ask: Callable[[Answer], Answer]) -> Counter[str]:
    """Ask all questions of a kind; returns how many answers differed in a named way."""
    named: Counter[str] = Counter()
    wrong = []
    for question in questions(fixture, operation):
        expected, found = question["result"], ask(question)
        difference = found.pop("difference", None)
        if difference is not None:
            assert (expected["status"], found["status"]) == DIFFERENCES[difference], question
            named[difference] += 1
        elif found != expected:
            wrong.append((question, found))
    assert not wrong, f"{len(wrong)} answers differ; the first: {wrong[0]}"
    return named


def test_sizes_are_taken_from_the_files(golden: tuple[Fixture, StoreReader]) -> None:
    fixture, reader = golden
    config = fixture.expected["config"]
    assert reader.options.mapped_file_size_commit_log == int(config["mappedFileSizeCommitLog"])
    assert reader.options.consume_queue_file_bytes == int(config["mappedFileSizeConsumeQueue"])
    assert not reader.running
    visible = reader.reading.records.visible()
    assert (visible.begin, visible.end) == (fixture.expected["minPhyOffset"], fixture.expected["maxPhyOffset"])


def test_queues(golden: tuple[Fixture, StoreReader]) -> None:
    fixture, reader = golden
    theirs = [
        (queue["topic"], queue["queueId"], queue["minOffset"], queue["maxOffset"])
        for queue in fixture.expected["queues"]
        if queue["maxOffset"] > 0
    ]
    ours = [dataclasses.astuple(queue) for queue in reader.queues() if queue.max_offset > 0]
    assert sorted(ours) == sorted(theirs)


def test_get_message(golden: tuple[Fixture, StoreReader]) -> None:
    fixture, reader = golden

    def ask(question: Answer) -> Answer:
        tags = parse_tags(question.get("filter", ""))
        pulled = reader.reading.pull(
            question["topic"],
            question["queueId"],
            question["offset"],
            question["maxMsgNums"],
            question.get("maxTotalMsgSize", ROCKETMQ_BYTES_MAX),
            tags,
            rocketmq_limits=True,
        )
        found = reader.pull(
            question["topic"],
            question["queueId"],
            question["offset"],
            question["maxMsgNums"],
            max_bytes=question.get("maxTotalMsgSize", ROCKETMQ_BYTES_MAX),
            tags=tags,
            rocketmq_limits=True,
        )
        assert (found.status, found.next_offset) == (pulled.status, pulled.next_offset)
        answer = {
            "status": pulled.status.value,
            "nextBeginOffset": pulled.next_offset,
            "minOffset": pulled.min_offset,
            "maxOffset": pulled.max_offset,
            "bufferTotalSize": len(pulled.records),
            "queueOffsets": [message.queue_offset for message in found.messages],
            "phyOffsets": [message.physical_offset for message in found.messages],
        }
        if reader.reading.queues.bounds(question["topic"], question["queueId"]) is None:
            assert (pulled.next_offset, pulled.min_offset, pulled.max_offset) == (0, 0, 0)
            answer["difference"] = "unknown queue"
        elif question.get("filter", "*").isspace() and answer["status"] == "FOUND":
            answer["difference"] = "blank filter"
        return answer

    assert compare(fixture, "getMessage", ask)["unknown queue"] > 0


def test_query_message(golden: tuple[Fixture, StoreReader]) -> None:
    fixture, reader = golden

    def ask(question: Answer) -> Answer:
        found = reader.query_message(
            question["topic"], question["key"], question["maxNum"], question["begin"], question["end"]
        )
        return {
            "phyOffsets": found.offsets,
            "indexLastUpdateTimestamp": found.last_update_timestamp_ms,
            "indexLastUpdatePhyoffset": found.last_update_physical_offset,
        }

    compare(fixture, "queryMessage", ask)


def test_offset_by_time(golden: tuple[Fixture, StoreReader]) -> None:
    fixture, reader = golden

    def ask(question: Answer) -> Answer:
        upper = question.get("boundary") == "UPPER"
        return {"offset": reader.offset_at(question["topic"], question["queueId"], question["timestamp"], upper=upper)}

    compare(fixture, "offsetByTime", ask)


def test_min_max(golden: tuple[Fixture, StoreReader]) -> None:
    fixture, reader = golden

    def ask(question: Answer) -> Answer:
        queue = (question["topic"], question["queueId"])
        return {"minOffset": reader.min_offset(*queue), "maxOffset": reader.max_offset(*queue)}

    compare(fixture, "minMax", ask)


def test_store_time(golden: tuple[Fixture, StoreReader]) -> None:
    fixture, reader = golden

    def ask(question: Answer) -> Answer:
        return {"timestamp": reader.store_time_ms(question["topic"], question["queueId"], question["offset"])}

    compare(fixture, "storeTime", ask)


def test_look(golden: tuple[Fixture, StoreReader]) -> None:
    fixture, reader = golden

    def ask(question: Answer) -> Answer:
        message = reader.look(question["phyOffset"])
        if message is None:
            return {"found": False}
        return {
            "found": True,
            "topic": message.topic,
            "queueId": message.queue_id,
            "queueOffset": message.queue_offset,
        }

    compare(fixture, "look", ask)


def test_a_scan_without_conditions_gives_every_record(golden: tuple[Fixture, StoreReader]) -> None:
    fixture, reader = golden
    found = list(reader.scan())
    assert [message.physical_offset for message in found] == [each["phyOffset"] for each in fixture.expected["records"]]
    assert [message.message_id for message in found] == [each["msgId"] for each in fixture.expected["records"]]
    for message, record in zip(found, fixture.expected["records"], strict=True):
        raw = reader.record_bytes(message.physical_offset)
        assert raw is not None
        assert hashlib.sha256(raw.data).hexdigest() == record["recordSha256"]


def test_every_message_is_found_by_its_key(golden: tuple[Fixture, StoreReader]) -> None:
    """Ours compares the records: no colliding key's message, none twice, in the log's order."""
    fixture, reader = golden
    by_key: dict[tuple[str, str], set[int]] = {}
    for record in fixture.expected["records"]:
        for key in (record["keys"] or "").split(" "):
            # Rolled back messages are not indexed.
            if key and record["sysFlag"] & 0xC != 0xC:
                by_key.setdefault((record["topic"], key), set()).add(record["phyOffset"])
    for (topic, key), offsets in by_key.items():
        found = reader.by_key(topic, key, max_messages=1000)
        assert [message.physical_offset for message in found] == sorted(offsets), (topic, key)


def test_ranges_and_counts_agree_with_the_records(golden: tuple[Fixture, StoreReader]) -> None:
    fixture, reader = golden
    in_queues = [unit[0] for queue in fixture.expected["queues"] for unit in queue["units"]]
    records = {each["phyOffset"]: each for each in fixture.expected["records"]}
    times = sorted({records[offset]["storeTimestamp"] for offset in in_queues})
    begin, end = times[len(times) // 3], times[2 * len(times) // 3]
    for topic in sorted({queue["topic"] for queue in fixture.expected["queues"]}):
        expected = sorted(
            offset
            for offset in in_queues
            if records[offset]["topic"] == topic and begin <= records[offset]["storeTimestamp"] < end
        )
        assert sorted(message.physical_offset for message in reader.range(topic, begin, end)) == expected
        assert reader.count(topic, begin, end) == len(expected)
        tag = next((records[offset]["tags"] for offset in expected if records[offset]["tags"]), None)
        if tag is not None:
            tagged = [offset for offset in expected if records[offset]["tags"] == tag]
            assert reader.count(topic, begin, end, tags=[tag]) == len(tagged)
            assert sorted(message.physical_offset for message in reader.range(topic, begin, end, tags=[tag])) == tagged


def test_messages_are_found_by_both_kinds_of_id(golden: tuple[Fixture, StoreReader]) -> None:
    fixture, reader = golden
    for record in fixture.expected["records"][::7]:
        assert reader.get(record["msgId"]).physical_offset == record["phyOffset"]
        if record["uniqKey"] and record["sysFlag"] & 0xC != 0xC:
            found = finish(reader.reading.get(record["uniqKey"]))
            assert reader.get(record["uniqKey"], record["topic"]).unique_id == record["uniqKey"]
            assert len(found) > 0
