"""Real failures of tasks, stages and drivers: each row is stored once, results are whole."""

from __future__ import annotations

import os
import random
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.dataset as ds
import pytest

from mqproc.layout import record
from mqproc.spark.jobs import duplicates, rebuild
from mqproc.spark.jobs.copies import plan_compaction
from mqproc.spark.jobs.output import write_batches
from mqproc.spark.jobs.parquet_files import Layout
from tests.golden.fixtures import load_fixture
from tests.spark import failing
from tests.spark.support import end_session, files_below, messages_of
from tests.support.store_builders import LiveStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

SEED = int(os.environ.get("MQPROC_FAILING_SEED", "4"))


@pytest.fixture(scope="module", autouse=True)
def own_session() -> Iterator[None]:
    """End the session after these tests: its Java has had many failures."""
    yield
    end_session()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[failing.Place]:
    found = failing.Place(tmp_path_factory.mktemp("failing"))
    yield found
    found.close()


@pytest.mark.proven
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("batch", "raise"),
        ("batch", "stop"),
        ("stream", "raise"),
        ("stream", "stop"),
        ("stream", "damage"),
        ("shuffled", "shuffle"),
        ("unnamed", "shuffle"),
        ("replay", "stop"),
        ("replay", "damage"),
        ("replay", "shuffle"),
    ],
)
def test_write_with_failure_stores_each_row_once(
    spark: SparkSession, place: failing.Place, kind: str, how: str
) -> None:
    """With this session's `local[2]` an error of a task fails the job, and the run repeats it."""
    row = random.Random(f"{SEED}{kind}{how}").randrange(failing.ROWS)
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "500")
    try:
        failing.run_in_session(place, spark, kind, how, len(how), row, local=spark_folder(spark))
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")


def test_compact_with_lost_shuffles_keeps_every_key(spark: SparkSession, rolled_store: Path, tmp_path: Path) -> None:
    """The rows of an attempt whose input is lost end early; Spark repeats it."""
    keys = sorted(key for message in messages_of(rolled_store) for key in message.keys)

    def compact(out: Path) -> None:
        read = plan_compaction(spark, rolled_store, drop_empty=False, columns=["keys"])
        written = write_batches(read, out, [rolled_store], mode="error", layout=Layout(list(read.types)))
        assert written.messages == len(keys)
        assert sorted(ds.dataset(out).to_table(columns=["key"]).column("key").to_pylist()) == keys

    lose_shuffles(spark, compact, tmp_path)


def test_rebuild_with_lost_shuffles_makes_same_files(spark: SparkSession, rolled_store: Path, tmp_path: Path) -> None:
    def rebuild_all(out: Path) -> None:
        built = rebuild(spark, rolled_store, out, share_bytes=20_000)
        assert sum(row.units for row in built.queues.collect()) == 640
        built.unpersist()
        assert [path.name for path in sorted(out.iterdir())] == ["consumequeue", "index"]
        for folder in ("consumequeue", "index"):
            assert files_below(out / folder) == files_below(rolled_store / folder), folder

    lose_shuffles(spark, rebuild_all, tmp_path)


def test_duplicates_with_lost_shuffles_are_all_found(spark: SparkSession, tmp_path: Path) -> None:
    store = load_fixture("b_transaction", tmp_path).store
    shutil.copytree(store, tmp_path / "copy")
    copies = Counter((message.topic, message.unique_id) for message in messages_of(store) if message.unique_id)

    def find(out: Path) -> None:
        found = {
            (row.topic, row.unique_id): row.copies for row in duplicates(spark, [store, tmp_path / "copy"]).collect()
        }
        assert found == {message: 2 * count for message, count in copies.items()}

    lose_shuffles(spark, find, tmp_path)


def lose_shuffles(spark: SparkSession, job: Callable[[Path], None], folder: Path) -> None:
    """Run a job, with a folder for its output, while its shuffles are lost.

    Runs it again until Spark has repeated a stage.
    """
    for number in range(20):
        stages = failing.repeated_stages(spark)
        with failing.losing_shuffles(spark_folder(spark)):
            job(folder / f"out{number}")
        if failing.repeated_stages(spark) - stages:
            return
    pytest.fail("Spark has repeated no stage")


def test_write_of_compressed_bodies_stores_plain_ones_once(
    spark: SparkSession, place: failing.Place, tmp_path: Path
) -> None:
    store = LiveStore(tmp_path / "source")
    for number in range(40):
        store.append("Packed", [zlib.compress(b"%d " % number * 1000)], sys_flag=record.SYS_FLAG_COMPRESSED)
    store.close()
    read = spark.read.format("mqproc").load(str(tmp_path / "source"))
    for _ in range(2):
        write = read.select("body").write.format("mqproc").mode("append").option("topic", "Plain")
        write.option("writeId", "plain").save(str(place.target.store))
    place.target.wait_dispatched()
    found = messages_of(place.target.store, topic="Plain")
    assert sorted(message.body for message in found) == sorted(b"%d " % number * 1000 for number in range(40))
    assert {message.sys_flag & record.SYS_FLAG_BODY for message in found} == {0}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["batch", "stream", "replay"])
def test_write_with_killed_driver_stores_each_row_once(place: failing.Place, kind: str) -> None:
    failing.run_in_drivers(place, kind, "kill", 0, random.Random(f"{SEED}{kind}").randrange(failing.ROWS))


@pytest.mark.slow
def test_write_and_replay_with_speculation_store_each_row_once(place: failing.Place, tmp_path: Path) -> None:
    """Two attempts of a task run at once."""
    with failing.cluster(tmp_path) as url:
        for kind in ("batch", "replay"):
            failing.run_in_drivers(place, kind, "slow", 0, 5_000, master=url)


def spark_folder(spark: SparkSession) -> Path:
    return Path(str(spark.sparkContext.getConf().get("spark.local.dir")))
