"""Export to Parquet by topic and day, and compaction to the last message of each key."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from mqproc.errors import BadRequestError, CorruptStoreError
from mqproc.spark.batch_read import flags_of
from mqproc.spark.jobs import compact, copies, export
from mqproc.spark.jobs.copies import PositionReader
from mqproc.util.units import parse_time_ms
from tests.spark.support import messages_of
from tests.support.store_builders import FIRST_MS, LiveStore, StoppedStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("ignore::ResourceWarning")]


@pytest.fixture(scope="module")
def keyed_store(tmp_path_factory: pytest.TempPathFactory) -> StoppedStore:
    """A store whose last frames update existing keys and delete some of them."""
    store = StoppedStore(tmp_path_factory.mktemp("keyed") / "store")
    time_ms = FIRST_MS + 2 * 86_400_000
    store.engine.append("First", [b"new"] * 8, time_ms, keys=[f"n{number}" for number in range(8)], queues=4)
    store.engine.append("First", [b""] * 4, time_ms, keys=["n0", "n1", "n50 n2", "n100"], queues=4)
    store.engine.append("First", [b"no key"], time_ms, queues=4)
    store.recover()
    return store


def test_export_writes_parquet_by_topic_and_day(spark: SparkSession, keyed_store: StoppedStore, tmp_path: Path) -> None:
    done = export(spark, keyed_store.root, tmp_path / "out", topic=["First", "Third"])
    stored = [message for message in messages_of(keyed_store.root) if message.topic != "Second"]
    assert (done.messages, done.size) == (len(stored), sum(message.size for message in stored))
    folders = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").glob("*/*"))
    assert folders == ["topic=First/day=2023-11-14", "topic=First/day=2023-11-16", "topic=Third/day=2023-11-14"]
    rows = ds.dataset(tmp_path / "out", partitioning="hive").to_table().to_pylist()
    assert sorted((row["physical_offset"], row["topic"], row["body"], row["keys"]) for row in rows) == [
        (message.physical_offset, message.topic, message.body, list(message.keys)) for message in stored
    ]
    export(spark, keyed_store.root, tmp_path / "few", topic="Third", columns="queue_offset")
    few = ds.dataset(tmp_path / "few", partitioning="hive").to_table()
    assert sorted(few.column_names) == ["day", "queue_offset", "topic"]
    with pytest.raises(BadRequestError, match="mode = 'merge'; must be one of error"):
        export(spark, keyed_store.root, tmp_path / "out", mode="merge")
    with pytest.raises(BadRequestError, match="columns = topic: it names the folders"):
        export(spark, keyed_store.root, tmp_path / "folders", columns=["topic"])
    with pytest.raises(Exception, match="already exists"):
        export(spark, keyed_store.root, tmp_path / "out")


def test_export_days_are_utc_in_session_zone_with_dst(spark: SparkSession, tmp_path: Path) -> None:
    store = LiveStore(tmp_path / "store")
    store.append("Topic", [b"1"], parse_time_ms("2025-03-29T23:30:00Z"))
    store.close()
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "America/Scoresbysund")
    try:
        export(spark, tmp_path / "store", tmp_path / "out", columns=["body"])
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)
    assert [path.name for path in (tmp_path / "out").glob("*/day=*")] == ["day=2025-03-29"]


def test_compact_keeps_last_message_of_each_key(spark: SparkSession, keyed_store: StoppedStore) -> None:
    last = {(each.topic, key): each for each in messages_of(keyed_store.root) for key in each.keys}
    rows = compact(spark, keyed_store.root).collect()
    assert {(row.topic, row.key): (row.physical_offset, bytes(row.body)) for row in rows} == {
        place: (message.physical_offset, message.body) for place, message in last.items()
    }
    assert len(rows) == len(last)
    kept = compact(spark, keyed_store.root, drop_empty=True, columns=["topic", "queue_offset"], topic="First")
    assert compact(spark, keyed_store.root, columns="queue_offset").columns == ["key", "queue_offset"]
    assert {row.key for row in kept.collect()} == {
        key for (topic, key), message in last.items() if topic == "First" and message.body
    }
    # The last message of n50 also has the key n2; n2 has a later message of its own.
    assert [row.key for row in compact(spark, keyed_store.root, columns=["topic"], key="n50").collect()] == ["n50"]


def test_compact_segment_deleted_before_read(keyed_store: StoppedStore, tmp_path: Path) -> None:
    store = shutil.copytree(keyed_store.root, tmp_path / "store")
    (store / "commitlog" / f"{65536:020d}").unlink()
    stored = [each for each in messages_of(keyed_store.root) if each.keys]
    columns = {
        "key": [each.keys[0] for each in stored],
        "store": [str(store)] * len(stored),
        "physical_offset": [each.physical_offset for each in stored],
        "size": [each.size for each in stored],
    }
    batch = pa.RecordBatch.from_pydict(columns)
    strict, lax = (
        PositionReader({str(store): 65536}, ["physical_offset"], drop_empty=False, fail_on_data_loss=fails)
        for fails in (True, False)
    )
    with pytest.raises(CorruptStoreError, match=r"commitlog/0+65536: deleted since its keys were read, and \d+ last"):
        list(strict.read(iter([batch])))
    found = [row["physical_offset"] for each in lax.read(iter([batch])) for row in each.to_pylist()]
    assert found == [each.physical_offset for each in stored if each.physical_offset // 65536 != 1]


def test_compact_one_message_for_many_keys_bounds_batches(
    keyed_store: StoppedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The body is repeated per key; the size of a batch stays bounded."""
    monkeypatch.setattr(copies, "_SPAN_BYTES", 10_000)
    deleted, *stored = reversed([each for each in messages_of(keyed_store.root) if each.keys][-30:])
    rows = [(str(number), stored[0]) for number in range(500)] + [("gone", deleted)]
    columns = {
        "key": [key for key, _message in rows],
        "store": [str(keyed_store.root)] * len(rows),
        "physical_offset": [message.physical_offset for _key, message in rows],
        "size": [message.size for _key, message in rows],
    }
    reader = PositionReader({str(keyed_store.root): 65536}, ["size"], drop_empty=False, fail_on_data_loss=True)
    made = list(reader.read(iter([pa.RecordBatch.from_pydict(columns)])))
    assert [row["key"] for batch in made for row in batch.to_pylist()] == columns["key"]
    assert max(sum(batch.column("size").to_pylist()) for batch in made) <= 10_000


PASSED_OVER: list[dict[str, Any]] = [
    {"fail_on_data_loss": False},
    {"failOnDataLoss": False},
    {"failondataloss": "FALSE"},
    {"fail_on_data_loss": True, "failOnDataLoss": "false"},
]


@pytest.mark.parametrize("given", PASSED_OVER)
def test_copies_skip_damage_with_either_option_name(
    spark: SparkSession,
    keyed_store: StoppedStore,
    tmp_path: Path,
    given: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strictness: list[bool] = []

    class Recorded(PositionReader):
        def __init__(self, *args: Any, **named: Any) -> None:
            strictness.append(named["fail_on_data_loss"])
            super().__init__(*args, **named)

    store = shutil.copytree(keyed_store.root, tmp_path / "store")
    (store / "commitlog" / f"{65536:020d}").unlink()
    with pytest.raises(CorruptStoreError, match="is missing"):
        export(spark, store, tmp_path / "out", columns="queue_id")
    done = export(spark, store, tmp_path / "out", columns="queue_id", **given)
    whole = [each for each in messages_of(keyed_store.root) if each.physical_offset // 65536 != 1]
    assert len(whole) - 2 <= done.messages <= len(whole)
    monkeypatch.setattr(copies, "PositionReader", Recorded)
    compact(spark, store, columns="queue_id")
    compact(spark, store, columns="queue_id", **given)
    assert strictness == [True, False]


def test_selection_damage_and_body_options() -> None:
    assert [flags_of(given).fail_on_data_loss for given in ({}, *PASSED_OVER)] == [True, False, False, False, False]
    flags = flags_of({"VERIFYCRC": "true", "PlainBodies": False, "topic": ["First"], "begin": 5})
    assert (flags.verify_crc, flags.plain_bodies, flags.fail_on_data_loss) == (True, False, True)
    assert (flags_of({}).verify_crc, flags_of({}).plain_bodies) == (None, True)
    with pytest.raises(BadRequestError, match="failOnDataLoss = 'no' is neither true nor false"):
        flags_of({"failOnDataLoss": "no"})
