"""The verify job matches `mqproc store verify` per store; duplicate messages are found."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.sql import functions

from mqproc.io.store_io import StoreIO
from mqproc.paths import StorePaths
from mqproc.spark.jobs import duplicates, verify
from mqproc.store.read.reader import settings_of
from mqproc.store.verify import verify_store
from tests.golden.fixtures import load_fixture
from tests.spark.support import messages_of
from tests.support.store_builders import write_at

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("ignore::ResourceWarning")]


@pytest.fixture
def stores(rolled_store: Path, tmp_path: Path) -> Path:
    """Three stores: intact, with a damaged body and a wrong unit, and without an index."""
    for name in ("whole", "damaged", "no_index"):
        shutil.copytree(rolled_store, tmp_path / name)
    lost = messages_of(tmp_path / "damaged")[100]
    log = tmp_path / "damaged" / "commitlog" / f"{lost.physical_offset // 65536 * 65536:020d}"
    write_at(log, lost.physical_offset % 65536 + 120, b"\xff")
    write_at(tmp_path / "damaged" / "consumequeue" / "First" / "1" / f"{0:020d}", 20 * 3, b"\0\1")
    shutil.rmtree(tmp_path / "no_index" / "index")
    return tmp_path


def test_verify_of_several_stores_matches_each_store_alone(spark: SparkSession, stores: Path) -> None:
    rows = {Path(row.store).name: row for row in verify(spark, stores / "*", share_bytes=80_000).collect()}
    assert {name: row.clean for name, row in rows.items()} == {"whole": True, "damaged": False, "no_index": False}
    io = StoreIO()
    for name, row in rows.items():
        paths = StorePaths(stores / name)
        alone = verify_store(io, paths, settings_of(io, paths), jobs=1)
        assert (row.records, row.units, row.index_entries) == (alone.records, alone.units, alone.items)
        assert (row.queues, row.bytes, row.log_end) == (alone.queues, alone.size, alone.log_end)
        reported = [(each["kind"], each["file"], each["offset"], each["count"]) for each in row.findings]
        assert reported == [(str(each.kind), each.file, each.offset, each.count) for each in alone.findings.in_order()]
    assert rows["damaged"].damage >= 2


def test_verify_session_with_large_types(spark: SparkSession, stores: Path) -> None:
    usual = verify(spark, stores / "*").orderBy("store").collect()
    spark.conf.set("spark.sql.execution.arrow.useLargeVarTypes", "true")
    try:
        assert verify(spark, stores / "*").orderBy("store").collect() == usual
    finally:
        spark.conf.unset("spark.sql.execution.arrow.useLargeVarTypes")
    assert [row.clean for row in usual] == [False, False, True]


def test_verify_few_stores_few_partitions(spark: SparkSession, stores: Path) -> None:
    partitions = spark.conf.get("spark.sql.shuffle.partitions")
    spark.conf.set("spark.sql.shuffle.partitions", "200")
    try:
        found = verify(spark, stores / "*").persist()
        assert found.count() == 3
        assert found.rdd.getNumPartitions() == 12
        found.unpersist()
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", partitions)


def test_duplicates_stored_twice_are_found(spark: SparkSession, tmp_path: Path) -> None:
    store = load_fixture("b_transaction", tmp_path).store
    shutil.copytree(store, tmp_path / "zcopy")
    copies = Counter((message.topic, message.unique_id) for message in messages_of(store) if message.unique_id)
    alone = {(row.topic, row.unique_id): row.copies for row in duplicates(spark, store).collect()}
    assert alone == {place: count for place, count in copies.items() if count > 1}
    both = duplicates(spark, [store, tmp_path / "zcopy"]).collect()
    assert {(row.topic, row.unique_id): row.copies for row in both} == {
        place: 2 * count for place, count in copies.items()
    }
    assert both
    assert {(row.stores, row["first"].store, row["last"].store) for row in both} == {
        (2, str(store), str(tmp_path / "zcopy"))
    }


def test_duplicates_with_equal_hashes_are_distinguished(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = load_fixture("b_transaction", tmp_path).store
    shutil.copytree(store, tmp_path / "zcopy")
    order = ["topic", "unique_id"]
    usual = duplicates(spark, [store, tmp_path / "zcopy"]).orderBy(order).collect()
    monkeypatch.setattr(functions, "xxhash64", lambda *columns: functions.lit(7).cast("bigint"))
    assert duplicates(spark, [store, tmp_path / "zcopy"]).orderBy(order).collect() == usual
    assert len(usual) > 1


def test_duplicates_shuffle_rows_once(
    spark: SparkSession, rolled_store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    duplicates(spark, rolled_store).explain()
    plan = capsys.readouterr().out
    assert [plan.count(each) for each in ("Exchange ", "hashpartitioning(hash#")] == [1, 1]
