"""`messages(…)` returns the same rows, types and errors as `format("mqproc")`."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import pytest

from mqproc.errors import BadRequestError
from mqproc.spark import messages
from tests.support.store_builders import FIRST_MS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore::ResourceWarning")]


def source(spark: SparkSession, *paths: Path, **given: Any) -> DataFrame:
    reader = spark.read.format("mqproc").options(**{name: str(value) for name, value in given.items()})
    return reader.load([str(path) for path in paths])


def plan_of(frame: DataFrame) -> str:
    plan: str = frame._jdf.queryExecution().executedPlan().toString()
    return plan


def rows_of(frame: DataFrame) -> list[str]:
    return sorted(repr(row) for row in frame.collect())


@pytest.fixture
def new_york(spark: SparkSession) -> Iterator[SparkSession]:
    """The session with a time zone other than UTC."""
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    yield spark
    spark.conf.set("spark.sql.session.timeZone", "UTC")


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ({}, 640),
        ({"splitBytes": 50_000, "batchRows": 7}, 640),
        ({"naming": "rocketmq"}, 640),
        ({"columns": "body,store_timestamp,tag,keys"}, 640),
        ({"startingTimestamp": FIRST_MS + 50, "endingTimestamp": FIRST_MS + 300, "clockStepMs": 0}, None),
        ({"assign": '{"First": [1]}', "byUnits": True}, None),
        ({"subscribe": "First,Second", "queueId": 2, "minPartitions": 3}, None),
        ({"topic": "Nobody"}, 0),
    ],
)
def test_the_same_rows(spark: SparkSession, rolled_store: Path, given: dict[str, Any], count: int | None) -> None:
    by_source, by_helper = source(spark, rolled_store, **given), messages(spark, rolled_store, **given)
    assert by_helper.schema == by_source.schema
    rows = rows_of(by_helper)
    assert rows == rows_of(by_source)
    assert len(rows) == count if count is not None else rows


def test_the_same_rows_of_several_stores_in_another_zone(
    new_york: SparkSession, rolled_store: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(rolled_store, other)
    by_helper = messages(new_york, [rolled_store, other], columns=["store", "queue_offset", "born_timestamp"])
    rows = rows_of(by_helper)
    assert len(rows) == 2 * 640
    assert rows == rows_of(source(new_york, rolled_store, other, columns="store,queue_offset,born_timestamp"))


def test_rows_are_converted_once(spark: SparkSession, rolled_store: Path) -> None:
    assert plan_of(source(spark, rolled_store)).startswith("Project")
    assert plan_of(messages(spark, rolled_store)).startswith("MapInArrow")


def test_frame_is_evaluated_per_use(spark: SparkSession, rolled_store: Path) -> None:
    frame = messages(spark, rolled_store)
    first = frame.where("topic = 'First'").count()
    assert 0 < first < frame.count() == 640
    assert frame.union(frame.where("topic = 'First'")).count() == 640 + first
    joined = frame.alias("a").join(frame.alias("b"), "physical_offset")
    # Spark does not know the size of a store: no side of the join is broadcast.
    assert "Broadcast" not in plan_of(joined)
    assert joined.count() == 640


def test_filter_pushdown_option_moves_filters_to_kernel(spark: SparkSession, rolled_store: Path) -> None:
    frame = messages(spark, rolled_store, filterPushdown=True).where("topic = 'Second'")
    assert " Filter (" not in plan_of(frame)
    assert rows_of(frame) == rows_of(messages(spark, rolled_store, topic="Second"))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"subscribes": "First"}, "option 'subscribes' is unknown"),
        ({"maxOffsetsPerTrigger": 3}, "option 'maxOffsetsPerTrigger' is for streams"),
        ({"startingOffsets": "latest"}, "leaves nothing to read"),
        ({"columns": "topics"}, "unknown column 'topics'"),
        ({"naming": "ours"}, "option naming = 'ours'"),
        ({"minPartitions": 0}, r"minPartitions = 0 is not in \[1, "),
    ],
)
def test_same_errors_for_invalid_options(
    spark: SparkSession, rolled_store: Path, given: dict[str, Any], says: str
) -> None:
    with pytest.raises(Exception, match=says):
        source(spark, rolled_store, **given).count()
    with pytest.raises(BadRequestError, match=says):
        messages(spark, rolled_store, **given)


def test_arguments_invalid_selection_raises(spark: SparkSession, rolled_store: Path) -> None:
    for name, option in (("topic", "subscribe"), ("queue_id", "queueId"), ("tag", "tag"), ("key", "key")):
        given: dict[str, Any] = {name: []}
        with pytest.raises(BadRequestError, match=rf"option {option} = '\[\]' names nothing"):
            messages(spark, rolled_store, **given)
    for name, moment in (
        ("begin", "2026-11-25"),
        ("end", date(2026, 11, 25)),
        ("begin", 1.5),
        ("end", datetime(2026, 1, 1)),
    ):
        given = {name: moment}
        with pytest.raises(BadRequestError, match=rf"{name} = .* is neither Unix ms as an int nor a datetime with a t"):
            messages(spark, rolled_store, **given)


def test_arguments_of_other_libraries(spark: SparkSession, rolled_store: Path) -> None:
    few = messages(
        spark,
        rolled_store,
        topic=pd.Series(["First", "Second"]),
        queue_id=np.array([1, 2]),
        begin=np.int64(FIRST_MS),
        columns=np.array(["topic", "queue_id"]),
        starting_offsets={"First": {np.int64(1): np.int64(50)}},
    )
    same = messages(
        spark, rolled_store, topic=["First", "Second"], queue_id=[1, 2], starting_offsets={"First": {1: 50}}
    )
    assert (few.count(), few.columns) == (same.count(), ["topic", "queue_id"])
    assert messages(spark, rolled_store, queue_id=np.int32(3)).count() == 160
    for given, says in (
        ({"tag": None}, "tag = None is neither a word nor several"),
        ({"queue_id": True}, "option queueId = 'true' is not an integer"),
        ({"starting_offsets": {"First": 5}}, "starting_offsets = {'First': 5}; it is like {'orders': {0: 23}}"),
        ({"ending_offsets": [1]}, "ending_offsets = [1]; it is like"),
        ({"ending_offsets": {"First": {0: object}}}, "it is like {'orders': {0: 23}}"),
    ):
        with pytest.raises(BadRequestError, match=re.escape(says)):
            messages(spark, rolled_store, **given)


def test_times_between_milliseconds_are_rounded_up(spark: SparkSession, rolled_store: Path) -> None:
    begin = datetime.fromtimestamp(FIRST_MS / 1000, UTC) + timedelta(milliseconds=16, microseconds=500)
    whole = messages(spark, rolled_store, begin=FIRST_MS + 17, end=FIRST_MS + 33)
    between = messages(spark, rolled_store, begin=begin, end=begin + timedelta(milliseconds=16))
    assert between.count() == whole.count() == 16


def test_list_arguments_may_contain_commas(spark: SparkSession, rolled_store: Path) -> None:
    assert messages(spark, rolled_store, key=["n0,n1", "n2"], columns=["queue_offset"]).count() == 1


def test_same_errors_for_stores(spark: SparkSession, rolled_store: Path, tmp_path: Path) -> None:
    missing, damaged = tmp_path / "missing", tmp_path / "damaged"
    (damaged / "commitlog").mkdir(parents=True)
    for segment in sorted((rolled_store / "commitlog").iterdir())[:3]:
        (damaged / "commitlog" / segment.name).write_bytes(segment.read_bytes())
    inside = damaged / "commitlog" / f"{65_536:020d}"
    data = bytearray(inside.read_bytes())
    data[30_000] ^= 0xFF
    inside.write_bytes(data)
    with pytest.raises(BadRequestError, match="no path is given"):
        messages(spark, [])
    for path, says in (
        (missing, "no such folder"),
        (damaged, r"no intact record in bytes \[29,.*failOnDataLoss=false"),
    ):
        for frame in (source(spark, path), messages(spark, path)):
            with pytest.raises(Exception, match=says) as caught:
                frame.count()
            assert "mqproc.errors." in str(caught.value)
    rows = rows_of(messages(spark, damaged, fail_on_data_loss=False))
    assert rows == rows_of(source(spark, damaged, failOnDataLoss=False)) != []
