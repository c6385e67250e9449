"""The data source inside Spark: rows, types, pushed filters, and errors shown to users."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mqproc.spark import messages
from mqproc.spark.options import MQPROC_COLUMNS, ROCKETMQ_COLUMNS
from mqproc.spark.session import LOOKUP_FOLDER
from tests.spark.support import comparable, messages_of, row_of
from tests.support.store_builders import FIRST_MS, LiveStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore::ResourceWarning")]


def load(spark: SparkSession, store: Path, schema: str = "", **given: Any) -> DataFrame:
    reader = spark.read.format("mqproc").options(**{name: str(value) for name, value in given.items()})
    return (reader.schema(schema) if schema else reader).load(str(store))


def test_rows_are_the_stores_messages(spark: SparkSession, rolled_store: Path) -> None:
    frame = load(spark, rolled_store, splitBytes=50_000)
    assert dict(frame.dtypes) == MQPROC_COLUMNS
    rows = [comparable(row.asDict()) for row in frame.orderBy("physical_offset").collect()]
    expected = [row_of(message, rolled_store) for message in messages_of(rolled_store)]
    for row in expected:
        for name in ("born_timestamp", "store_timestamp"):
            row[name] = row[name].replace(tzinfo=None)
    assert rows == expected


def test_dataframe_can_be_reused(spark: SparkSession, rolled_store: Path) -> None:
    frame = load(spark, rolled_store)
    first = messages_of(rolled_store, topic="First")
    assert frame.where("topic = 'First'").count() == len(first)
    assert frame.count() == 640
    assert frame.where("topic = 'First' or topic = 'Second'").count() == 640 - len(
        messages_of(rolled_store, topic="Third")
    )
    assert frame.union(frame.where("queue_id = 1")).count() == 640 + len(messages_of(rolled_store, queue_id=1))
    frame.createOrReplaceTempView("messages")
    joined = spark.sql(
        "select count(*) from messages a join messages b using (physical_offset) where a.topic = 'First'"
    )
    assert joined.collect()[0][0] == len(first)


def test_columns_by_schema_option_and_helper(spark: SparkSession, rolled_store: Path) -> None:
    by_schema = load(spark, rolled_store, "store_timestamp timestamp, topic string")
    by_option = load(spark, rolled_store, columns="store_timestamp,topic")
    by_helper = messages(spark, rolled_store, columns=["store_timestamp", "topic"])
    assert by_schema.dtypes == by_option.dtypes == by_helper.dtypes
    counted = sorted(map(tuple, by_schema.groupBy("topic").count().collect()))
    assert counted == sorted(map(tuple, by_helper.groupBy("topic").count().collect()))
    assert sum(count for _topic, count in counted) == 640
    few = messages(spark, rolled_store, topic="First", queue_id=[0, 1], begin=FIRST_MS + 50, end=FIRST_MS + 300)
    expected = [
        each
        for each in messages_of(rolled_store, topic="First")
        if each.queue_id in (0, 1) and FIRST_MS + 50 <= each.store_timestamp_ms < FIRST_MS + 300
    ]
    assert few.count() == len(expected) > 0
    assert messages(spark, rolled_store, topic=["First", "Second", "Third"], key="n77").count() == 1
    assert messages(spark, rolled_store, topic="Nobody").count() == 0


def test_names_of_rocketmqs_connector(spark: SparkSession, rolled_store: Path) -> None:
    frame = load(spark, rolled_store, naming="rocketmq")
    assert frame.dtypes == [(name, kind) for name, (_ours, kind) in ROCKETMQ_COLUMNS.items()]
    row = (
        frame.where("topic = 'First' and queueId = 0 and queueOffset = 0")
        .selectExpr("get_json_object(properties, '$.KEYS')")
        .collect()
    )
    assert row[0][0] == messages_of(rolled_store, topic="First", queue_id=0)[0].keys[0]


def test_filters_are_pushed_down_only_by_option(spark: SparkSession, rolled_store: Path) -> None:
    def pushed(frame: DataFrame) -> bool:
        plan = frame._jdf.queryExecution().executedPlan().toString()
        return " Filter (" not in plan

    expected = messages_of(rolled_store, topic="Second", queue_id=2)
    condition = "topic = 'Second' and queue_id = 2"
    assert not pushed(load(spark, rolled_store).where(condition))
    frame = load(spark, rolled_store, filterPushdown=True).where(condition)
    assert pushed(frame)
    assert frame.count() == len(expected)
    from_then = load(spark, rolled_store, filterPushdown=True).where(
        f"store_timestamp > timestamp_millis({FIRST_MS + 50}) and store_timestamp <= timestamp_millis({FIRST_MS + 300})"
    )
    assert pushed(from_then.select("topic").where("topic is not null"))
    assert from_then.count() == sum(50 < m.store_timestamp_ms - FIRST_MS <= 300 for m in messages_of(rolled_store))


def test_filter_with_replacement_character_is_not_pushed_down(spark: SparkSession, tmp_path: Path) -> None:
    store = LiveStore(tmp_path / "store")
    store.append("Topic", [b"0", b"1"], tags=["tag-1", "other"], queues=1)
    store.close()
    segment = next((tmp_path / "store" / "commitlog").iterdir())
    segment.write_bytes(segment.read_bytes().replace(b"tag-1", b"tag\xff1"))
    for condition in ("tag = 'tag\ufffd1'", "tag in ('tag\ufffd1', 'none')"):
        for pushdown in (False, True):
            frame = load(spark, tmp_path / "store", columns="tag", filterPushdown=pushdown)
            assert frame.where(condition).count() == 1


@pytest.mark.parametrize(
    ("given", "schema", "says"),
    [
        ({"subscribes": "First"}, "", "option 'subscribes' is unknown"),
        ({"startingOffsets": "latest"}, "", "leaves nothing to read"),
        ({"columns": "topics"}, "", "unknown column 'topics'"),
        ({}, "topic int", "column topic is string; the schema asks for int"),
        ({"minPartitions": 0}, "", r"minPartitions = 0 is not in \[1, "),
    ],
)
def test_invalid_options_raise(
    spark: SparkSession, rolled_store: Path, given: dict[str, Any], schema: str, says: str
) -> None:
    with pytest.raises(Exception, match=says):
        load(spark, rolled_store, schema, **given).count()


def test_missing_or_damaged_store_raises(spark: SparkSession, rolled_store: Path, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="no such folder"):
        load(spark, tmp_path / "missing").count()
    log = tmp_path / "store" / "commitlog"
    log.mkdir(parents=True)
    data = bytearray((rolled_store / "commitlog" / f"{0:020d}").read_bytes())
    data[3_000] ^= 0xFF
    (log / f"{0:020d}").write_bytes(data)
    with pytest.raises(Exception, match=r"the log ends at 2,9.*failOnDataLoss=false"):
        load(spark, tmp_path / "store").count()
    whole = sum(message.physical_offset < 65_536 for message in messages_of(rolled_store))
    assert load(spark, tmp_path / "store", failOnDataLoss=False).count() == whole - 1


def test_source_is_registered_by_import() -> None:
    """Spark's lookup in a fresh process: it imports all modules named pyspark_…"""
    program = (
        "from pyspark.sql.datasource import DataSource\n"
        "import pkgutil, importlib, sys\n"
        "names = [m.name for m in pkgutil.iter_modules() if m.name.startswith('pyspark_')]\n"
        "found = [importlib.import_module(name).DefaultSource for name in names]\n"
        "assert [each.name() for each in found if issubclass(each, DataSource)] == ['mqproc'], names\n"
        "assert 'numba' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    environment = os.environ | {"PYTHONPATH": str(LOOKUP_FOLDER)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    project = Path(__file__).parents[2]
    found = tomllib.loads((project / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    assert LOOKUP_FOLDER.relative_to(project).as_posix() in found["where"]
