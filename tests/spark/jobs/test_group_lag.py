"""Lag of consumer groups, from RocketMQ's consumerOffset.json and from an mqproc store."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mqproc.spark.jobs import backlog, lag
from mqproc.store.read.reader import StoreReader
from tests.golden.fixtures import load_fixture
from tests.spark.support import messages_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("ignore::ResourceWarning")]


def test_lag_by_queue_with_times(spark: SparkSession, tmp_path: Path) -> None:
    store = load_fixture("a_basic", tmp_path).store
    with StoreReader(store) as reader:
        queues = [queue for queue in reader.queues() if queue.max_offset > 2][:4]
    offsets = {queue: number for number, queue in enumerate(queues)} | {queues[3]: queues[3].max_offset}
    table: dict[str, dict[str, int]] = {}
    for queue, offset in offsets.items():
        table.setdefault(f"{queue.topic}@Readers", {})[str(queue.queue_id)] = offset
    (store / "config").mkdir(exist_ok=True)
    (store / "config" / "consumerOffset.json").write_text(json.dumps({"offsetTable": table}))
    rows = {(row.topic, row.queue_id): row for row in lag(spark, [store]).collect()}
    assert len(rows) == 4
    for queue, offset in offsets.items():
        row, stored = rows[queue.topic, queue.queue_id], messages_of(store, topic=queue.topic, queue_id=queue.queue_id)
        assert (row.group, row.offset, row.max_offset) == ("Readers", offset, queue.max_offset)
        assert (row.behind, row.expired) == (queue.max_offset - offset, 0)
        left = [message.store_timestamp_ms for message in stored if message.queue_offset >= offset]
        assert (row.oldest_stored is None) == (not left)
    windows = backlog(spark, store, window="1 hour").collect()
    expected = Counter[str]()
    for queue, offset in offsets.items():
        expected[queue.topic] += queue.max_offset - offset
    found = Counter[str]()
    for row in windows:
        found[row.topic] += row.messages
    assert +found == +expected


def test_lag_store_without_groups(spark: SparkSession, rolled_store: Path) -> None:
    assert lag(spark, rolled_store).count() == 0
