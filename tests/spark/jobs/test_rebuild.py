"""Queues and index rebuilt from the log equal the ones that dispatch or RocketMQ wrote."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from mqproc.errors import BadRequestError, CorruptStoreError, MqprocError, StoreAccessError
from mqproc.layout import index_file as layout
from mqproc.layout.consume_queue import FILLER_SIZES
from mqproc.spark.jobs import rebuild, rebuilding
from mqproc.spark.jobs.rebuilding import RebuildJob
from mqproc.spark.jobs.tasks import Row, batches_of
from mqproc.store.read.reader import StoreReader
from tests.golden.fixtures import GOLDEN, directories
from tests.spark.support import files_below, messages_of
from tests.support.store_builders import TaggedStore, write_at

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_ITEM = np.dtype([("hash", ">i4"), ("offset", ">i8"), ("seconds", ">i4"), ("previous", ">i4")])


def rebuild_here(store: Path, to: Path, *, share_bytes: int = 20_000, fail_on_data_loss: bool = True) -> list[Row]:
    """Rebuild by running the job's steps in sequence; returns the rows of the queues."""
    job = RebuildJob.of(store, to, share_bytes=share_bytes, fail_on_data_loss=fail_on_data_loss)
    walked = _table(rebuilding.WALKED, (row for share in job.snapshot.shares for row in job.walk(share)))
    joined = _table(rebuilding.JOINED, job.join(walked)).to_pylist()
    files = [row for row in joined if row["file"] is not None]
    built = _table(rebuilding.BUILT, (built for row in files for built in job.build(row)))
    if len(built):
        assert len(list(job.name(built))) == len(files)
    return [row for row in joined if row["file"] is None]


def _table(schema: pa.Schema, rows: Iterable[Row]) -> pa.Table:
    return pa.Table.from_batches(list(batches_of(schema, rows)), schema)


def units_from(files: dict[str, bytes], log_begin: int) -> dict[tuple[str, int], bytes]:
    """Queue units by file and position, without zeros, fillers and units of expired records."""
    found = {}
    for name, data in files.items():
        for at in range(0, len(data), 20):
            unit = data[at : at + 20]
            size = int.from_bytes(unit[8:12], "big")
            if size > 0 and size not in FILLER_SIZES and int.from_bytes(unit[:8], "big") >= log_begin:
                found[name, at] = unit
    return found


def entries_of(store: Path, folder: Path, log_begin: int = 0) -> list[tuple[int, int]]:
    """(key hash, log position) of each index item in a folder; `store` gives the shape."""
    with StoreReader(store) as reader:
        slots: int = reader.options.max_hash_slot_num
    found: list[tuple[int, int]] = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        count = int.from_bytes(data[layout.ITEM_COUNT : layout.ITEM_COUNT + 4], "big")
        items: Any = np.frombuffer(data, _ITEM, max(0, count - 1), layout.item_offset(slots, layout.FIRST_ITEM))
        found += zip(items["hash"].tolist(), items["offset"].tolist(), strict=True)
    return [entry for entry in found if entry[1] >= log_begin]


FIXTURES = {str(each): each for each in directories(GOLDEN)}
# RocketMQ's stores: with a complete, dispatched log, and with a log whose beginning is lost.
WHOLE = [
    name
    for name, each in FIXTURES.items()
    if not each.damaged and name != "c2_killed_dispatch_behind/before" and "retention" not in name
]
# After a kill RocketMQ adds some index entries a second time.
INDEXED_AGAIN = ("c1_killed/after", "c4_killed_settled/after", "c4_killed_settled/clean")
EXPIRED = [name for name in FIXTURES if "retention" in name]


@pytest.mark.spark
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_rebuild_on_spark_with_rolled_files(spark: SparkSession, rolled_store: Path, tmp_path: Path) -> None:
    built = rebuild(spark, rolled_store, tmp_path / "built", share_bytes=100_000)
    for folder in ("consumequeue", "index"):
        assert files_below(tmp_path / "built" / folder) == files_below(rolled_store / folder), folder
    assert not (tmp_path / "built" / "index.building").exists()
    sums = built.queues.selectExpr("sum(units)", "sum(fillers + missing + repeated)", "count(1)").first()
    assert tuple(sums or ()) == (640, 0, 12)
    names = [row.name for row in built.index.orderBy("name").collect()]
    assert names == [path.name for path in sorted((rolled_store / "index").iterdir())]
    built.unpersist()
    with pytest.raises(BadRequestError, match="not empty"):
        rebuild(spark, rolled_store, tmp_path / "built")


@pytest.mark.parametrize("share_bytes", [1 << 30, 5_000])
def test_rebuild_any_share_size_gives_same_files(rolled_store: Path, tmp_path: Path, share_bytes: int) -> None:
    rows = rebuild_here(rolled_store, tmp_path, share_bytes=share_bytes)
    for folder in ("consumequeue", "index"):
        assert files_below(tmp_path / folder) == files_below(rolled_store / folder), folder
    assert {(row["topic"], row["queue_id"]): row["max_offset"] for row in rows} == {
        (queue.topic, queue.queue_id): queue.max_offset for queue in StoreReader(rolled_store).queues()
    }


@pytest.mark.parametrize("name", WHOLE)
def test_rebuild_matches_rocketmq_files(name: str, tmp_path: Path) -> None:
    store, to = FIXTURES[name].unpack(tmp_path), tmp_path / "to"
    rebuild_here(store, to)
    assert files_below(to / "consumequeue") == files_below(store / "consumequeue")
    built, live = entries_of(store, to / "index"), entries_of(store, store / "index")
    if name in INDEXED_AGAIN:
        assert len(built) < len(live)
        built, live = sorted(set(built)), sorted(set(live))
    assert built == live != []


@pytest.mark.parametrize("name", EXPIRED)
def test_rebuild_skips_units_of_lost_log(name: str, tmp_path: Path) -> None:
    store, to = FIXTURES[name].unpack(tmp_path), tmp_path / "to"
    rows = rebuild_here(store, to)
    begin = min(int(path.name) for path in (store / "commitlog").iterdir())
    live = files_below(store / "consumequeue")
    assert units_from(files_below(to / "consumequeue"), 0) == units_from(live, begin) != {}
    assert entries_of(store, to / "index") == entries_of(store, store / "index", begin)
    with StoreReader(store) as reader:
        minima = {(queue.topic, queue.queue_id): queue.min_offset for queue in reader.queues()}
    assert all(row["min_offset"] == minima[row["topic"], row["queue_id"]] for row in rows)


def test_rebuild_includes_undispatched_messages(tmp_path: Path) -> None:
    killed = FIXTURES["c2_killed_dispatch_behind/before"]
    store, to = killed.unpack(tmp_path), tmp_path / "to"
    rebuild_here(store, to)
    live = units_from(files_below(store / "consumequeue"), 0)
    built = units_from(files_below(to / "consumequeue"), 0)
    assert live.items() < built.items()
    assert len(built) == len(killed.expected["records"])


def test_rebuild_damage_raises_or_becomes_fillers(rolled_store: Path, tmp_path: Path) -> None:
    store = shutil.copytree(rolled_store, tmp_path / "store")
    lost = messages_of(store)[300]
    log = store / "commitlog" / f"{lost.physical_offset // 65536 * 65536:020d}"
    write_at(log, lost.physical_offset % 65536 + 100, b"\xff" * 8)
    with pytest.raises(CorruptStoreError, match=rf"no intact record in \[{lost.physical_offset:,}, "):
        rebuild_here(store, tmp_path / "refused")
    rows = rebuild_here(store, tmp_path / "to", fail_on_data_loss=False)
    assert sum(row["fillers"] for row in rows) == 1
    (damaged,) = (row for row in rows if row["lost"])
    assert (damaged["topic"], damaged["queue_id"]) == (lost.topic, lost.queue_id)
    assert damaged["lost"] == [{"first_offset": lost.queue_offset, "last_offset": lost.queue_offset}]
    live = units_from(files_below(store / "consumequeue"), 0)
    built = units_from(files_below(tmp_path / "to" / "consumequeue"), 0)
    ((_name, _at), unit) = (live.items() - built.items()).pop()
    assert int.from_bytes(unit[:8], "big") == lost.physical_offset
    assert len(built) == len(live) - 1
    assert len(entries_of(store, tmp_path / "to" / "index")) == len(entries_of(store, store / "index")) - 1


@pytest.mark.spark
def test_rebuild_rejects_paths_without_store(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(StoreAccessError, match="not a store"):
        rebuild(spark, tmp_path, tmp_path / "to")
    with pytest.raises(BadRequestError, match="needs a store in a folder"):
        rebuild(spark, "memory://stores/one", tmp_path / "to")


@pytest.mark.spark
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_rebuild_session_with_large_types(spark: SparkSession, rolled_store: Path, tmp_path: Path) -> None:
    spark.conf.set("spark.sql.execution.arrow.useLargeVarTypes", "true")
    try:
        built = rebuild(spark, rolled_store, tmp_path / "built")
        assert sum(row.units for row in built.queues.collect()) == 640
    finally:
        spark.conf.unset("spark.sql.execution.arrow.useLargeVarTypes")
    built.unpersist()
    assert files_below(tmp_path / "built" / "index") == files_below(rolled_store / "index")


@pytest.mark.parametrize("tags", [(True,), (False,), (False, True), (True, False)])
def test_rebuild_makes_entries_for_tags_as_the_store(tmp_path: Path, tags: tuple[bool, ...]) -> None:
    """The newest part of the index decides; RocketMQ makes such entries since 5.4."""
    built = TaggedStore(tmp_path / "store")
    for each in tags:
        built.add(300, tags=each)
    store = built.close_as_rocketmq()
    rebuild_here(store, tmp_path / "to")
    whole = TaggedStore(tmp_path / "whole")
    for _each in tags:
        whole.add(300, tags=tags[-1])
    assert files_below(tmp_path / "to/index") == files_below(whole.close_as_rocketmq() / "index")
    assert entries_of(store, tmp_path / "to/index") == entries_of(store, tmp_path / "whole/index")


def test_rebuild_with_part_of_its_rows_raises(rolled_store: Path, tmp_path: Path) -> None:
    """As when Spark gives a task up: its rows end early, and fillers would replace units."""
    job = RebuildJob.of(rolled_store, tmp_path, share_bytes=20_000, fail_on_data_loss=True)
    walked = _table(rebuilding.WALKED, (row for share in job.snapshot.shares for row in job.walk(share)))
    before = files_below(tmp_path)
    for part in (walked.slice(0, len(walked) - 1), walked.slice(1), walked.slice(0, 1), walked.slice(0, 0)):
        with pytest.raises(MqprocError, match=r"\d+ of \d+ (shares of the log|runs of units): the task was cut off"):
            list(job.join(part))
    assert files_below(tmp_path) == before
    joined = _table(rebuilding.JOINED, job.join(walked)).to_pylist()
    files = [row for row in joined if row["file"] is not None]
    built = _table(rebuilding.BUILT, (built for row in files for built in job.build(row)))
    with pytest.raises(MqprocError, match=f"{len(files) - 1} of {len(files)} index files: the task was cut off"):
        list(job.name(built.slice(1)))
    assert len(list(job.name(built))) == len(files) > 1
