"""Real failures of tasks, stages, jobs and the driver during writes, streams and replays: each row is stored once."""

from __future__ import annotations

import os
import random
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.dataset as ds
import pytest

from mqproc.layout import record
from mqproc.spark.jobs.copies import plan_compaction
from mqproc.spark.jobs.output import write_batches
from mqproc.spark.jobs.parquet_files import Layout
from tests.spark import failing
from tests.spark.support import messages_of
from tests.support.store_builders import LiveStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

SEED = int(os.environ.get("MQPROC_FAILING_SEED", "4"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[failing.Place]:
    found = failing.Place(tmp_path_factory.mktemp("failing"))
    yield found
    found.close()


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("batch", "raise"),
        ("batch", "stop"),
        pytest.param("stream", "raise", marks=pytest.mark.slow),
        pytest.param("stream", "stop", marks=pytest.mark.slow),
        ("shuffled", "shuffle"),
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


def test_replay_with_lost_shuffle_copies_each_once(spark: SparkSession, place: failing.Place) -> None:
    failing.run_in_session(place, spark, "replay", "shuffle", 0, 0, local=spark_folder(spark))


def test_compact_with_lost_shuffle_keeps_every_key(spark: SparkSession, rolled_store: Path, tmp_path: Path) -> None:
    """The rows of an attempt whose input is lost end early; Spark repeats it."""
    out, done, deleted = tmp_path / "out", threading.Event(), threading.Event()

    def delete_once() -> None:
        while not done.wait(0.001):
            if any(out.glob("_temporary/*/driver")) and failing.delete_shuffle(spark_folder(spark)):
                deleted.set()
                return

    keys = sorted(key for message in messages_of(rolled_store) for key in message.keys)
    deleting = threading.Thread(target=delete_once)
    deleting.start()
    try:
        read = plan_compaction(spark, rolled_store, drop_empty=False, columns=["keys"])
        written = write_batches(read, out, [rolled_store], mode="error", layout=Layout(list(read.types)))
    finally:
        done.set()
        deleting.join()
    assert deleted.is_set()
    assert written.messages == len(keys)
    assert sorted(ds.dataset(out).to_table(columns=["key"]).column("key").to_pylist()) == keys


def test_write_of_compressed_bodies_stores_plain_ones_once(
    spark: SparkSession, place: failing.Place, tmp_path: Path
) -> None:
    store = LiveStore(tmp_path / "source")
    for number in range(40):
        store.append("Packed", [zlib.compress(b"%d " % number * 1000)], sys_flag=record.SYS_FLAG_COMPRESSED)
    store.close()
    read = spark.read.format("mqproc").option("plainBodies", "true").load(str(tmp_path / "source"))
    for _ in range(2):
        write = read.select("body").write.format("mqproc").mode("append").option("topic", "Plain")
        write.option("writeId", "plain").save(str(place.target.store))
    place.target.wait_dispatched()
    found = messages_of(place.target.store, topic="Plain")
    assert sorted(message.body for message in found) == sorted(b"%d " % number * 1000 for number in range(40))
    assert {message.sys_flag & record.SYS_FLAG_BODY for message in found} == {0}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["batch", "stream"])
def test_write_with_killed_driver_stores_each_row_once(place: failing.Place, kind: str) -> None:
    """The second driver repeats failed tasks itself."""
    failing.run_in_driver(place, kind, 0, random.Random(f"{SEED}{kind}").randrange(failing.ROWS))


def spark_folder(spark: SparkSession) -> Path:
    return Path(str(spark.sparkContext.getConf().get("spark.local.dir")))
