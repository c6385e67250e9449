"""StoreReader's public methods on RocketMQ's stores, without a server and without recovery.

`test_conformance.py` compares all recorded answers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest

from mqproc.config.options import Options
from mqproc.store.cooperative import finish
from mqproc.store.read.reader import ROCKETMQ_PULL_BYTES, StoreReader
from tests.golden.fixtures import Fixture, load_fixture, options_of

FIXTURES = ("a_basic", "b_transaction", "e_delay", "f_batch")

Answer = dict[str, Any]


@pytest.fixture(scope="module", params=FIXTURES)
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fixture, Any]]:
    fixture = load_fixture(request.param, tmp_path_factory.mktemp(request.param))
    made_with = options_of(fixture.expected)
    options = Options(max_hash_slot_num=made_with.max_hash_slot_num, max_index_num=made_with.max_index_num)
    with StoreReader(fixture.store, options) as reader:
        yield fixture, reader


def questions(fixture: Fixture, operation: str) -> list[Answer]:
    return [answer for answer in fixture.expected["answers"] if answer["op"] == operation]


def test_reader_takes_sizes_from_files(golden: tuple[Fixture, StoreReader]) -> None:
    fixture, reader = golden
    config = fixture.expected["config"]
    assert reader.options.mapped_file_size_commit_log == int(config["mappedFileSizeCommitLog"])
    assert reader.options.consume_queue_file_bytes == int(config["mappedFileSizeConsumeQueue"])
    assert not reader.running
    visible = reader.reading.records.visible()
    assert (visible.begin, visible.end) == (fixture.expected["minPhyOffset"], fixture.expected["maxPhyOffset"])


def test_get_message_equals_rocketmq(golden: tuple[Fixture, StoreReader]) -> None:
    fixture, reader = golden
    for question in questions(fixture, "getMessage"):
        found = reader.get_message(
            question["topic"],
            question["queueId"],
            question["offset"],
            question["maxMsgNums"],
            max_bytes=question.get("maxTotalMsgSize", ROCKETMQ_PULL_BYTES),
            expression=question.get("filter", "*"),
        )
        expected = question["result"]
        assert (found.status, found.next_offset) == (expected["status"], expected["nextBeginOffset"]), question
        assert (found.min_offset, found.max_offset) == (expected["minOffset"], expected["maxOffset"]), question
        assert [message.physical_offset for message in found.messages] == expected["phyOffsets"], question


def test_query_message_equals_rocketmq(golden: tuple[Fixture, StoreReader]) -> None:
    fixture, reader = golden
    for question in questions(fixture, "queryMessage"):
        found = reader.query_message(
            question["topic"], question["key"], question["maxNum"], question["begin"], question["end"]
        )
        assert found.offsets == question["result"]["phyOffsets"], question


def test_offset_by_time_and_bounds_equal_rocketmq(golden: tuple[Fixture, StoreReader]) -> None:
    fixture, reader = golden
    for question in questions(fixture, "offsetByTime"):
        queue = question["topic"], question["queueId"]
        upper = question.get("boundary") == "UPPER"
        for offset_at in (reader.offset_in_queue_by_time, reader.offset_at):
            assert offset_at(*queue, question["timestamp"], upper=upper) == question["result"]["offset"], question
    for question in questions(fixture, "minMax"):
        queue = question["topic"], question["queueId"]
        assert reader.min_offset_in_queue(*queue) == reader.min_offset(*queue) == question["result"]["minOffset"]
        assert reader.max_offset(*queue) == question["result"]["maxOffset"]


def test_scan_without_conditions_returns_every_record(golden: tuple[Fixture, StoreReader]) -> None:
    fixture, reader = golden
    found = list(reader.scan())
    assert [message.physical_offset for message in found] == [each["phyOffset"] for each in fixture.expected["records"]]
    assert [message.message_id for message in found] == [each["msgId"] for each in fixture.expected["records"]]
    for message, record in zip(found, fixture.expected["records"], strict=True):
        raw = reader.record_bytes(message.physical_offset)
        assert raw is not None
        assert hashlib.sha256(raw.data).hexdigest() == record["recordSha256"]


def test_by_key_finds_every_message(golden: tuple[Fixture, StoreReader]) -> None:
    """mqproc compares the records: no message of a colliding key, no duplicate, in log order."""
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


def test_range_and_count_equal_records(golden: tuple[Fixture, StoreReader]) -> None:
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


def test_by_id_finds_messages_by_both_kinds_of_id(golden: tuple[Fixture, StoreReader]) -> None:
    fixture, reader = golden
    for record in fixture.expected["records"][::7]:
        assert reader.get(record["msgId"]).physical_offset == record["phyOffset"]
        if record["uniqKey"] and record["sysFlag"] & 0xC != 0xC:
            found = finish(reader.reading.get(record["uniqKey"]))
            assert reader.get(record["uniqKey"], record["topic"]).unique_id == record["uniqKey"]
            assert len(found) > 0
