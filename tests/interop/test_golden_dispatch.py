"""Dispatch of a golden store's CommitLog writes RocketMQ's ConsumeQueue and index files.

Queues and index are rebuilt from the log in steps of several sizes and must be equal byte for byte. Index files are
compared in order: RocketMQ names them by its own clock.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mqproc.config.options import Options
from mqproc.io.store_io import StoreIO
from mqproc.paths import StorePaths, index_name_time_ms
from mqproc.store.commitlog.segments import LogSegments, adopted_segment_size
from mqproc.store.consumequeue.files import ConsumeQueueFiles, adopted_file_bytes
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.cooperative import finish
from mqproc.store.dispatch import LIMITS, Dispatch, StepLimits
from mqproc.store.index.files import IndexFiles
from mqproc.store.index.lookup import IndexReader
from tests.golden.fixtures import Fixture, load_fixture

SLOTS, ITEMS = 200, 800


def dispatch_all(fixture: Fixture, root: Path, limits: StepLimits = LIMITS) -> StorePaths:
    """Build queues and index below `root` from the fixture's log."""
    io = StoreIO()
    theirs, ours = StorePaths(fixture.store), StorePaths(root)
    for folder in (ours.own, ours.consume_queue, ours.index):
        io.make_folder(folder)
    table = QueueTable.create(io, ours.queues, 1024)
    for record in fixture.expected["records"]:
        table.create_queue(record["topic"], record["queueId"])
    options = Options(max_hash_slot_num=SLOTS, max_index_num=ITEMS)
    segments = LogSegments(io, theirs.commit_log, adopted_segment_size(io, theirs.commit_log, 0))
    file_bytes = adopted_file_bytes(io, theirs.consume_queue, options.consume_queue_file_bytes)
    queues = ConsumeQueueFiles(io, ours.consume_queue, file_bytes, write=True)
    dispatch = Dispatch(io, options, table, segments, queues, IndexFiles(io, ours.index, SLOTS, ITEMS), limits=limits)
    position, records = 0, 0
    end = fixture.expected["maxPhyOffset"]
    while position < end:
        step = dispatch.step(position, end)
        assert not step.stuck, step
        position = step.position
        records += step.records
    assert position == end
    assert records == fixture.expected["recordCount"]
    dispatch.close()
    return ours


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("name", ["a_basic", "b_transaction", "e_delay", "f_batch"])
@pytest.mark.parametrize(
    "limits", [LIMITS, StepLimits(piece_records=7), StepLimits(piece_bytes=1000)], ids=["whole", "records", "bytes"]
)
def test_dispatch_writes_rocketmqs_files(name: str, limits: StepLimits, tmp_path: Path) -> None:
    fixture = load_fixture(name, tmp_path / "theirs")
    ours = dispatch_all(fixture, tmp_path / "ours", limits)
    theirs = StorePaths(fixture.store)
    assert files_below(ours.consume_queue) == files_below(theirs.consume_queue)
    our_index, their_index = files_below(ours.index), files_below(theirs.index)
    assert list(our_index.values()) == list(their_index.values())
    headers = fixture.expected["disk"]["indexFiles"]
    assert [index_name_time_ms(found) for found in our_index][:1] == [headers[0]["beginTimestamp"]]
    assert len(our_index) == len(headers)


@pytest.mark.parametrize("name", ["a_basic", "b_transaction", "e_delay", "f_batch"])
def test_query_message_on_dispatched_index_equals_rocketmq(name: str, tmp_path: Path) -> None:
    """Compare the recorded `queryMessage` answers with the index that dispatch built."""
    fixture = load_fixture(name, tmp_path / "theirs")
    ours = dispatch_all(fixture, tmp_path / "ours")
    there = {record["phyOffset"] for record in fixture.expected["records"]}
    reader = IndexReader(StoreIO(), ours.index, SLOTS, ITEMS, Options().max_msgs_num_batch)
    reader.refresh(1)
    asked = [answer for answer in fixture.expected["answers"] if answer["op"] == "queryMessage"]
    assert asked
    for answer in asked:
        asking = reader.query_message(
            answer["topic"], answer["key"], answer["maxNum"], answer["begin"], answer["end"], there.__contains__
        )
        found = finish(asking)
        expected = answer["result"]
        assert found.offsets == expected["phyOffsets"], answer
        assert found.last_update_timestamp_ms == expected["indexLastUpdateTimestamp"]
        assert found.last_update_physical_offset == expected["indexLastUpdatePhyoffset"]


def test_dispatch_twice_changes_nothing(tmp_path: Path) -> None:
    fixture = load_fixture("a_basic", tmp_path / "theirs")
    ours = dispatch_all(fixture, tmp_path / "ours")
    queues = files_below(ours.consume_queue)
    shutil.rmtree(ours.index)
    again = dispatch_all(fixture, tmp_path / "ours", StepLimits(piece_records=50))
    assert files_below(again.consume_queue) == queues
