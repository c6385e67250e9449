"""Reads by queue units return the same rows as reads of the log, or are not used."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from mqproc.errors import CorruptStoreError
from mqproc.spark.batches import read_partition
from mqproc.spark.partitions import LogPartition, QueueSlice, partitioned
from mqproc.spark.planning import plan
from mqproc.store.consumequeue.files import filler_units
from tests.golden.fixtures import load_fixture
from tests.spark.support import messages_of, offsets_of, options_of, partitions_of, rows_in, rows_of
from tests.support.group import Group
from tests.support.store_builders import FIRST_MS, StoppedStore, write_at


def by_units(partitions: list[LogPartition]) -> int:
    return sum(map(rows_in, partitions))


@pytest.mark.parametrize(
    "given",
    [
        {"topic": "Second", "queueId": 2},
        {"subscribePattern": "F.*", "queueId": "0,3"},
        {"assign": '{"First": [0], "Third": [1]}', "minPartitions": 3},
        {"subscribe": "First,Second", "startingTimestamp": FIRST_MS + 90, "endingTimestamp": FIRST_MS + 301},
        {"topic": "First", "startingOffsets": json.dumps({"First": {"1": 20}}), "batchRows": 7},
        {"assign": '{"First": [2]}', "endingOffsets": json.dumps({"First": {"2": 33}})},
        {"topic": "First", "tag": "none"},
        {"topic": "Nobody"},
    ],
)
def test_the_same_rows_by_units_and_from_the_log(rolled_store: Path, given: dict[str, Any]) -> None:
    from_log = offsets_of(rolled_store, byUnits=False, **given)
    assert offsets_of(rolled_store, byUnits=True, **given) == from_log
    partitions = partitions_of(rolled_store, byUnits=True, **given)
    assert not any(partition.ranges for partition in partitions)
    assert by_units(partitions_of(rolled_store, byUnits=False, **given)) == 0


def test_by_units_is_used_only_for_less_work(rolled_store: Path) -> None:
    few = partitions_of(rolled_store, topic="Second", queueId=2)
    assert (by_units(few), any(each.ranges for each in few)) == (52, False)
    assert by_units(partitions_of(rolled_store, subscribe="First,Second")) == 0
    assert by_units(partitions_of(rolled_store, topic="Second", queueId=2, verifyCrc=True)) == 0
    assert by_units(partitions_of(rolled_store, byUnits=True)) == 0


def test_queues_with_missing_units_are_read_from_log(tmp_path: Path) -> None:
    selection = {"topic": "Second", "queueId": 2}
    made = StoppedStore(tmp_path / "made").root
    offsets = offsets_of(made, byUnits=False, **selection)
    for number, lost in enumerate(
        ("consumequeue/Second/2", f"consumequeue/Second/2/{800:020d}", "mqproc/queues", "mqproc/marks/consumequeue")
    ):
        store = shutil.copytree(made, tmp_path / f"{number}")
        path = store / lost
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        assert by_units(partitions_of(store, **selection)) == 0, lost
        assert offsets_of(store, **selection) == offsets, lost


def test_rocketmq_store_is_read_from_log(tmp_path: Path) -> None:
    store = load_fixture("a_basic", tmp_path).store
    topic = messages_of(store)[0].topic
    assert by_units(partitions_of(store, topic=topic, queueId=0, byUnits=True)) == 0


def test_damage_to_units_and_records(tmp_path: Path) -> None:
    store = StoppedStore(tmp_path / "store").root
    harmed = messages_of(store, topic="Second", queue_id=2)[7]
    write_at(store / "commitlog" / f"{harmed.physical_offset // 65536 * 65536:020d}",
             harmed.physical_offset % 65536 + 120, b"\xff")  # fmt: skip
    selection = {"topic": "Second", "queueId": 2}
    with pytest.raises(CorruptStoreError, match=r"offset 7 of queue 2 of Second has no intact record .* CRC; failOn"):
        rows_of(store, ["body"], **selection)
    assert len(rows_of(store, ["body"], **selection, failOnDataLoss=False)) == 51
    unit = store / "consumequeue" / "Second" / "2" / f"{0:020d}"
    # Move the unit's position slightly past its record.
    write_at(unit, 20 * 8 + 7, bytes([unit.read_bytes()[20 * 8 + 7] ^ 1]))
    with pytest.raises(CorruptStoreError, match=r"offset 8 of .* no intact record .*byUnits=false reads the log"):
        offsets_of(store, **selection, startingOffsets='{"Second": {"2": 8}}')
    assert len(offsets_of(store, **selection, byUnits=False)) == 52


@pytest.mark.parametrize("harm", ["astray", "beyond", "gone"])
@pytest.mark.parametrize("harmed", [[0], [8], [7, 8, 9], [12, 14], [13, 51], [50, 51], [26]])
@pytest.mark.parametrize("given", [{}, {"minPartitions": 4}, {"tag": "none"}, {"batchRows": 1}])
def test_skipped_damage_of_units_loses_no_message(
    rolled_store: Path, tmp_path: Path, harmed: list[int], harm: str, given: dict[str, Any]
) -> None:
    selection = {"topic": "Second", "queueId": 2, "columns": "topic,queue_id,queue_offset,physical_offset,body"} | given
    store = shutil.copytree(rolled_store, tmp_path / "store")
    whole = rows_of(store, byUnits=False, **selection)
    options = options_of(store, byUnits=True, failOnDataLoss=False, **selection)
    partitions = plan(options)
    assert not any(partition.ranges for partition in partitions)
    for offset in harmed:
        harm_unit(store / "consumequeue" / "Second" / "2", offset, harm)
    batches = [batch for each in partitions for batch in read_partition(options, options.columns, each)]
    found = [row for batch in batches for row in batch.to_pylist()]
    assert sorted(found, key=lambda row: int(row["queue_offset"])) == whole


def harm_unit(folder: Path, offset: int, harm: str) -> None:
    """Make a unit point to another record or past the log's end, or clear it."""
    path = folder / f"{20 * offset // 800 * 800:020d}"
    at = 20 * offset % 800
    place, size, code = struct.unpack_from(">qiq", path.read_bytes(), at)
    unit = {"astray": (place + 3, size, code), "beyond": (place | 1 << 40, size, code), "gone": (0, 0, 0)}[harm]
    write_at(path, at, struct.pack(">qiq", *unit))


def test_units_deleted_after_planning_return_no_rows(rolled_store: Path, tmp_path: Path) -> None:
    store = shutil.copytree(rolled_store, tmp_path / "store")
    options = options_of(store, byUnits=True, failOnDataLoss=False, topic="Second", queueId=2)
    partitions = plan(options)
    shutil.rmtree(store / "consumequeue" / "Second")
    assert [batch for each in partitions for batch in read_partition(options, ["body"], each)] == []


def test_segment_deleted_after_planning_returns_remaining_rows(rolled_store: Path, tmp_path: Path) -> None:
    store = shutil.copytree(rolled_store, tmp_path / "store")
    options = options_of(store, byUnits=True, failOnDataLoss=False, topic="Second", queueId=2)
    partitions = plan(options)
    (store / "commitlog" / f"{0:020d}").unlink()
    batches = [batch for each in partitions for batch in read_partition(options, ["physical_offset"], each)]
    found = [row["physical_offset"] for batch in batches for row in batch.to_pylist()]
    assert found == [at for at in offsets_of(rolled_store, topic="Second", queueId=2) if at >= 65536]


def test_damaged_units_are_not_used(tmp_path: Path) -> None:
    store = StoppedStore(tmp_path / "store")
    selection = {"topic": "Second", "queueId": 2}
    every = messages_of(store.root, topic="Second", queue_id=2)
    places = [each.physical_offset for each in every]
    since = {"startingTimestamp": every[10].store_timestamp_ms, "clockStepMs": 0}
    later = [each.physical_offset for each in every if each.store_timestamp_ms >= every[10].store_timestamp_ms]
    file = store.queue_file("Second", 2)
    whole = file.read_bytes()
    filler = filler_units(1).tobytes()
    for first, units in ((0, bytes(40)), (9, bytes(20)), (10, bytes(40)), (20, filler), (8, whole[180:200])):
        file.write_bytes(whole)
        write_at(file, 20 * first, units)
        assert by_units(partitions_of(store.root, **selection)) == 0
        for loss in (True, False):
            assert offsets_of(store.root, **selection, failOnDataLoss=loss) == places
            assert offsets_of(store.root, **selection, **since, failOnDataLoss=loss, byUnits=True) == later


def test_by_units_with_running_group_and_deleted_topic(group: Group) -> None:
    with group.client() as client:
        client.create_topic("Many", 4)
        client.create_topic("Few", 1)
        client.send_batch("Many", [b"x"] * 900)
        client.send_batch("Few", [b"old"] * 20)
        client.delete_topic("Few")
        client.create_topic("Few", 1)
        client.send_batch("Few", [b"new"] * 30)
        group.wait_dispatched()
        partitions = partitions_of(group.store, topic="Few")
        assert by_units(partitions) == 30
        assert len(offsets_of(group.store, topic="Few")) == 30
        assert offsets_of(group.store, topic="Few") == offsets_of(group.store, topic="Few", byUnits=False)


def test_slices_are_split_and_packed() -> None:
    slices = [(0, QueueSlice("A", 0, 100, 1_100)), (0, QueueSlice("A", 1, 0, 500)), (1, QueueSlice("B", 0, 7, 10))]
    for most, least in ((0, 1), (400, 1), (2, 1), (0, 5), (10_000, 501)):
        parts = partitioned(slices, most, least)
        assert all(parts)
        assert len(parts) >= min(least, 1503)
        for store, of in slices:
            mine = [each for part in parts for number, each in part if (number, each.topic, each.queue_id) ==
                    (store, of.topic, of.queue_id)]  # fmt: skip
            assert [each.start for each in mine] == [of.start, *(each.stop for each in mine[:-1])]
            assert mine[-1].stop == of.stop
        if most:
            assert max(sum(len(each) for _store, each in part) for part in parts) <= most
    assert partitioned([], 0, 1) == []
    many = [(0, QueueSlice("A", number, 0, 3)) for number in range(1000)]
    assert sum(len(part) for part in partitioned(many, 100, 1)) < 1100
