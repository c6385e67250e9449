"""Retention on stores that RocketMQ's cleaner has partly deleted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mqproc.config.options import Options
from mqproc.io.store_io import StoreIO
from mqproc.layout import control as words_of
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.read.reader import StoreReader
from mqproc.store.retention.delete import Retention
from mqproc.types import PullStatus
from tests.golden.fixtures import fixtures_folder, load_fixture, options_of
from tests.interop.golden_store import Opened, recovered
from tests.support.store_builders import ALL_HOURS

RETENTIONS = ("g1_retention", "g2_retention_commitlog_only")
UNIT = 20


@dataclass(slots=True)
class Cleaned:
    """A recovered store, RocketMQ's description of it, and retention on it."""

    opened: Opened
    expected: dict[str, Any]
    table: QueueTable
    last_ms: int

    def run(self, age_ms: int, **options: Any) -> None:
        """Run retention at a time after the last record was stored."""
        words, io, paths = self.opened.words, StoreIO(), self.opened.paths
        for word in (words_of.COMMITLOG_MARK, words_of.CQ_SYNCED, words_of.INDEX_SYNCED):
            words[word] = words[words_of.WRITTEN]
        settings = {"delete_when": ALL_HOURS, "file_reserved_time": 1, "clean_resource_interval": 1000} | options
        chosen = {name: getattr(self.opened.options, name) for name in _SIZES} | settings
        retention = Retention(
            io, paths, Options(**chosen), words, self.table, io, lambda event, **figures: None, now_ns=0
        )
        now_ns = 0
        while now_ns < 10_000_000_000:
            while retention.step(now_ns, self.last_ms + age_ms):
                pass
            now_ns = max(now_ns + 1, retention.due_ns)
        retention.close()

    def files(self) -> set[str]:
        """Segments, queue and index files as RocketMQ's listing names them."""
        root = self.opened.paths.root
        found = {path.relative_to(root) for path in root.rglob("*") if path.is_file()}
        return {str(path) for path in found if path.parts[0] in ("commitlog", "consumequeue", "index")}


_SIZES = (
    "mapped_file_size_commit_log",
    "mapped_file_size_consume_queue",
    "max_hash_slot_num",
    "max_index_num",
    "max_message_size",
)


@pytest.fixture(params=RETENTIONS)
def cleaned(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cleaned]:
    fixture = load_fixture(request.param, tmp_path, fixtures_folder())
    options = options_of(fixture.expected)
    with recovered(fixture.store, options) as opened:
        table = QueueTable(StoreIO(), opened.paths.queues, write=True)
        last_ms = max(record["storeTimestamp"] for record in fixture.expected["records"])
        yield Cleaned(opened, fixture.expected, table, last_ms)
        table.close()


def left_by_rocketmq(expected: dict[str, Any]) -> set[str]:
    return {
        file["path"]
        for file in expected["disk"]["files"]
        if file["path"].split("/")[0] in ("commitlog", "consumequeue", "index")
    }


def expected_files(expected: dict[str, Any]) -> set[str]:
    """The files that RocketMQ's cleaner of queues and index keeps, by its rules and the units."""
    minimum, file_bytes = expected["minPhyOffset"], int(expected["config"]["mappedFileSizeConsumeQueue"])
    files = left_by_rocketmq(expected)
    for queue in expected["liveBeforeShutdown"]["queues"]:
        folder = f"consumequeue/{queue['topic']}/{queue['queueId']}/"
        starts = sorted(int(path.removeprefix(folder)) for path in files if path.startswith(folder))
        for start in starts[:-1]:
            last_unit = (start + file_bytes) // UNIT - 1 - queue["minOffset"]
            if last_unit < 0 or queue["units"][last_unit][0] < minimum:
                files.discard(f"{folder}{start:020d}")
    for index in expected["disk"]["indexFiles"][:-1]:
        if index["endPhyOffset"] < minimum:
            files.discard(f"index/{index['name']}")
    return files


def test_retention_keeps_queue_and_index_files_as_rocketmq(cleaned: Cleaned) -> None:
    before = cleaned.files()
    assert before == left_by_rocketmq(cleaned.expected)
    cleaned.run(age_ms=1000)
    assert cleaned.files() == expected_files(cleaned.expected)
    if cleaned.expected["fixture"].endswith("commitlog_only"):
        # RocketMQ's second cleaner has not run yet.
        assert len(before) > len(cleaned.files())
    else:
        assert before == cleaned.files()
    assert cleaned.opened.words[words_of.MIN_PHYSICAL_OFFSET] == cleaned.expected["minPhyOffset"]


def test_queue_minimum_is_its_first_record(cleaned: Cleaned) -> None:
    cleaned.run(age_ms=1000)
    reading, minimum = cleaned.opened.reading, cleaned.expected["minPhyOffset"]
    for queue in cleaned.expected["liveBeforeShutdown"]["queues"]:
        topic, queue_id = queue["topic"], queue["queueId"]
        offsets = [offset for offset, unit in enumerate(queue["units"], queue["minOffset"]) if unit[0] >= minimum]
        first = offsets[0] if offsets else queue["maxOffset"]
        ours = reading.queues.bounds(topic, queue_id)
        assert ours is not None
        assert (ours.min_offset, ours.max_offset) == (first, queue["maxOffset"])
        # RocketMQ would now give the same answer: the first file is one with a record, or the last.
        assert reading.rocketmq_queues.bounds(topic, queue_id).min_offset == first
        if first > 0:
            found = reading.get_message(topic, queue_id, first - 1, 32, 1 << 20)
            assert (found.status, found.next_offset) == (PullStatus.OFFSET_TOO_SMALL, first)
        if offsets:
            assert reading.get_message(topic, queue_id, first, 1, 1 << 20).count == 1


def test_restart_after_retention_finds_the_same(cleaned: Cleaned) -> None:
    cleaned.run(age_ms=1000)
    before = cleaned.files()
    bounds = {name: cleaned.opened.reading.queues.bounds(*name) for name in _queues(cleaned)}
    with recovered(cleaned.opened.paths.root, cleaned.opened.options) as again:
        for name, ours in bounds.items():
            found = again.reading.queues.bounds(*name)
            assert found is not None
            assert ours is not None
            assert (found.min_offset, found.max_offset) == (ours.min_offset, ours.max_offset), name
    assert cleaned.files() == before


def _queues(cleaned: Cleaned) -> list[tuple[str, int]]:
    return [(queue["topic"], queue["queueId"]) for queue in cleaned.expected["queues"]]


def test_retention_deletes_all_but_last_segment(cleaned: Cleaned) -> None:
    cleaned.run(age_ms=2 * 3_600_000)
    segment = cleaned.opened.options.mapped_file_size_commit_log
    end = cleaned.expected["maxPhyOffset"]
    begin = end - end % segment
    starts = sorted(int(path.split("/")[1]) for path in cleaned.files() if path.startswith("commitlog/"))
    assert starts[0] == begin
    assert cleaned.opened.words[words_of.MIN_PHYSICAL_OFFSET] == begin
    kept = {tuple(place) for place in _places(cleaned, begin)}
    with StoreReader(cleaned.opened.paths.root, cleaned.opened.options) as reader:
        found = {(m.topic, m.queue_id, m.queue_offset, m.physical_offset) for m in reader.messages()}
    assert found == kept
    # An empty queue keeps its end.
    for queue in cleaned.expected["queues"]:
        bounds = cleaned.opened.reading.queues.bounds(queue["topic"], queue["queueId"])
        assert bounds is not None
        assert bounds.max_offset == queue["maxOffset"]


def _places(cleaned: Cleaned, begin: int) -> list[tuple[str, int, int, int]]:
    return [
        (record["topic"], record["queueId"], record["queueOffset"], record["phyOffset"])
        for record in cleaned.expected["records"]
        if record["phyOffset"] >= begin
    ]
