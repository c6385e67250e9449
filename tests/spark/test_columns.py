"""Time columns are instants even in sessions whose `timestamp` type has no time zone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mqproc.spark import messages
from mqproc.spark.jobs import compact
from tests.spark.support import messages_of
from tests.support.group import Group
from tests.support.store_builders import FIRST_MS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore::ResourceWarning")]

TIMES = ("born_timestamp", "store_timestamp")


@pytest.fixture
def without_zones(spark: SparkSession) -> Iterator[SparkSession]:
    """The session with `timestamp` as a type without time zone, and a zone other than UTC."""
    spark.conf.set("spark.sql.timestampType", "TIMESTAMP_NTZ")
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    yield spark
    spark.conf.unset("spark.sql.timestampType")
    spark.conf.set("spark.sql.session.timeZone", "UTC")


@pytest.mark.parametrize("naming", ["mqproc", "rocketmq"])
def test_read_times_are_instants(without_zones: SparkSession, rolled_store: Path, naming: str) -> None:
    time = "store_timestamp" if naming == "mqproc" else "storeTimestamp"
    source = without_zones.read.format("mqproc").option("naming", naming).load(str(rolled_store))
    late = sum(message.store_timestamp_ms >= FIRST_MS + 100 for message in messages_of(rolled_store))
    for frame in (source, messages(without_zones, rolled_store, naming=naming)):
        assert dict(frame.dtypes)[time] == "timestamp"
        assert frame.where(f"{time} >= timestamp_millis({FIRST_MS + 100})").count() == late > 0


def test_read_times_with_user_schema(without_zones: SparkSession, rolled_store: Path) -> None:
    read = without_zones.read.format("mqproc")
    frame = read.schema("store_timestamp timestamp_ltz").load(str(rolled_store))
    assert frame.where(f"store_timestamp < timestamp_millis({FIRST_MS})").count() == 0
    with pytest.raises(Exception, match="store_timestamp is timestamp_ltz; the schema asks for timestamp_ntz"):
        read.schema("store_timestamp timestamp").load(str(rolled_store)).count()


def test_compact_times_are_instants(without_zones: SparkSession, rolled_store: Path) -> None:
    found = compact(without_zones, rolled_store, columns=["physical_offset", *TIMES], topic="First", key="n0")
    assert [dict(found.dtypes)[name] for name in TIMES] == ["timestamp", "timestamp"]
    [row] = found.selectExpr("physical_offset", *(f"unix_millis({name})" for name in TIMES)).collect()
    times = {
        message.physical_offset: (message.born_timestamp_ms, message.store_timestamp_ms)
        for message in messages_of(rolled_store, topic="First")
    }
    assert times[row[0]] == (row[1], row[2])


def test_read_rows_can_be_written(without_zones: SparkSession, rolled_store: Path, group: Group) -> None:
    first = messages(without_zones, rolled_store, topic="First", columns=["topic", "body", "born_timestamp"])
    first.write.format("mqproc").mode("append").save(str(group.store))
    group.wait_dispatched()
    born = sorted(message.born_timestamp_ms for message in messages_of(group.store, topic="First"))
    assert born == sorted(message.born_timestamp_ms for message in messages_of(rolled_store, topic="First"))
