"""Streaming queries inside Spark: store to store, restarts at any point, error messages."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import mqproc.spark
from tests.spark.streaming import restarting
from tests.spark.support import messages_of
from tests.support.group import Group, wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore::ResourceWarning")]

KILLS, STOPS = 5, 20


def stream(spark: SparkSession, path: Path | str, **given: Any) -> DataFrame:
    return (
        spark.readStream.format("mqproc").options(**{name: str(each) for name, each in given.items()}).load(str(path))
    )


def run(frame: DataFrame, checkpoint: Path, to: Path, **given: str) -> StreamingQuery:
    """Write all available messages to a store."""
    write = frame.writeStream.format("mqproc").options(**given).option("checkpointLocation", str(checkpoint))
    query = write.trigger(availableNow=True).start(str(to))
    assert query.awaitTermination(120)
    return query


def test_stream_copies_store_to_store(spark: SparkSession, rolled_store: Path, running: Group, tmp_path: Path) -> None:
    first = messages_of(rolled_store, topic="First")
    frame = stream(spark, rolled_store, subscribe="First", startingOffsets="earliest", maxOffsetsPerTrigger=100)
    query = run(frame.select("topic", "body", "keys", "queue_id"), tmp_path / "checkpoint", running.store)
    assert [each["numInputRows"] for each in query.recentProgress if each["numInputRows"]] == [100, 100, 24]
    run(frame.select("topic", "body", "keys", "queue_id"), tmp_path / "checkpoint", running.store)
    running.wait_dispatched()
    copies = messages_of(running.store, topic="First")
    for queue_id in range(4):
        expected = [(each.keys, each.body) for each in first if each.queue_id == queue_id]
        assert [(each.keys, each.body) for each in copies if each.queue_id == queue_id] == expected


def test_batch_write_repeated_stores_no_duplicates(spark: SparkSession, rolled_store: Path, running: Group) -> None:
    frame = spark.read.format("mqproc").load(str(rolled_store)).select("topic", "body", "tag", "keys", "properties")
    write = frame.write.format("mqproc").mode("append").option("writeId", "mine").option("topic", "Batch")
    write.save(str(running.store))
    write.save(str(running.store))
    running.wait_dispatched()
    copies = messages_of(running.store, topic="Batch")
    assert sorted(each.keys for each in copies) == sorted(each.keys for each in messages_of(rolled_store))


@pytest.mark.parametrize("partitions", [1, 2, 3])
def test_batch_write_repeated_in_fewer_partitions_has_no_duplicates(
    spark: SparkSession, running: Group, partitions: int
) -> None:
    topic = f"Fewer{partitions}"

    def write(count: int) -> None:
        rows = spark.range(0, 100, 1, count).selectExpr("cast(id as string) body")
        done = rows.write.format("mqproc").mode("append").option("writeId", topic).option("topic", topic)
        done.save(str(running.store))

    write(4)
    with pytest.raises(Exception, match=r"more rows than the 25 before|differs from the stored one"):
        write(partitions)
    write(4)
    running.wait_dispatched()
    copies = messages_of(running.store, topic=topic)
    assert sorted(int(each.body) for each in copies) == list(range(100))


def test_the_readmes_example(spark: SparkSession, running: Group) -> None:
    text = (Path(mqproc.spark.__file__).parent / "README.md").read_text()
    (example,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "readStream" in block)
    with running.client() as client:
        client.send_batch("orders", [b"1", b"2"], tags="new", keys=["a", "b"])
    running.wait_dispatched()
    for name in ("./store", "./other-store"):
        assert name in example
        example = example.replace(f'"{name}"', repr(str(running.store)))
    example = example.replace("./checkpoint", str(running.store.parent / "example"))
    exec(example, {"spark": spark})
    running.wait_dispatched()
    assert sorted(each.body for each in messages_of(running.store, topic="orders", tag="new")) == [
        b"1",
        b"1",
        b"2",
        b"2",
    ]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[restarting.Place]:
    found = restarting.Place(tmp_path)
    yield found
    found.close()


def test_stream_stopped_and_killed_loses_nothing(spark: SparkSession, place: restarting.Place) -> None:
    chance = random.Random(11)
    folder = place.folder
    producer = restarting.Producer(place.source.store)
    try:
        for kind in chance.sample(["kill"] * KILLS + ["stop"] * STOPS, KILLS + STOPS):
            query = restarting.start(spark, folder)
            if kind == "kill" or chance.random() < 0.5:
                # Kill in the middle of the work; the other kills happen while a query starts.
                assert restarting.await_committed(folder), (query.status, query.exception())
            time.sleep(chance.uniform(0.0, 0.5))
            if kind == "kill":
                wait_until(lambda: restarting.kill_python(driver_pid(spark)), 60, "a query to kill")
                wait_until(lambda query=query: not query.isActive, 60, "a query whose source is gone to end")
                assert query.exception() is not None
            query.stop()
    finally:
        sent = producer.stop()
    restarting.finish(spark, folder)
    found = place.compare(sent)
    assert (found["missing"], found["doubles"]) == (0, 0), found
    assert found["deleted_by_retention"] > 0


def driver_pid(spark: SparkSession) -> int:
    return int(spark._jvm.java.lang.ProcessHandle.current().pid())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"endingOffsets": "latest"}, "endingOffsets' is for batch reads"),
        ({"subscribes": "First"}, "option 'subscribes' is unknown"),
        ({"startingOffsets": '{"First": {"0": 99}}'}, r"offsets there are \[0, 56\)"),
    ],
)
def test_stream_errors_are_reported(
    spark: SparkSession, rolled_store: Path, running: Group, tmp_path: Path, given: dict[str, str], says: str
) -> None:
    with pytest.raises(Exception, match=says):
        run(stream(spark, rolled_store, **given).select("topic", "body"), tmp_path / "checkpoint", running.store)


def test_stream_path_checkpoint_and_column_errors(
    spark: SparkSession, rolled_store: Path, running: Group, tmp_path: Path
) -> None:
    rows = stream(spark, rolled_store, startingOffsets="earliest", subscribe="Third")
    with pytest.raises(Exception, match="no such folder"):
        run(stream(spark, tmp_path / "missing").select("topic", "body"), tmp_path / "0", running.store)
    with pytest.raises(Exception, match="column queue_offset cannot be written"):
        run(rows.select("topic", "body", "queue_offset"), tmp_path / "1", running.store)
    with pytest.raises(Exception, match="NotRunningError"):
        run(rows.select("topic", "body"), tmp_path / "2", rolled_store)
    run(rows.select("topic", "body"), tmp_path / "3", running.store)
    other = stream(spark, running.store, subscribe="Third").select("topic", "body")
    with pytest.raises(Exception, match="the checkpoint is of"):
        run(other, tmp_path / "3", running.store, topic="Others")
    with pytest.raises(Exception, match="maxOffsetsPerTrigger' is for streams"):
        spark.read.format("mqproc").option("maxOffsetsPerTrigger", "3").load(str(rolled_store)).count()
