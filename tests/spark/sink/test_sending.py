"""A task's writes: order, each row once across killed attempts, rejected input."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from pyspark.sql import types

from mqproc.errors import (
    BadMessageError,
    BadPropertyError,
    BadRequestError,
    NotRunningError,
    SendOutcomeUnknownError,
    TopicReservedError,
)
from mqproc.io.store_io import StoreIO
from mqproc.paths import StorePaths
from mqproc.spark.options import SINK_COLUMNS, WriteOptions, check_columns, write_options
from mqproc.spark.sink import RowSender, TopicRows
from mqproc.store.retention.plan import submit_request
from mqproc.types import StoredMessage
from tests.spark.support import messages_of
from tests.support.group import Group, wait_until
from tests.support.processes import loaded_context

KILLS = 4
ROWS = 60_000
PER_BATCH = 2_000


def rows(first: int, stop: int, topics: Sequence[str] = ()) -> pa.RecordBatch:
    columns: dict[str, Any] = {"body": [b"%d" % number for number in range(first, stop)]}
    if topics:
        columns["topic"] = [topics[number % len(topics)] for number in range(first, stop)]
    return pa.RecordBatch.from_pydict(columns)


def send(
    group: Group,
    batches: Sequence[pa.RecordBatch],
    topic: str = "",
    *,
    write: str = "w",
    check_stored: bool = True,
    ends: bool = True,
) -> tuple[int, int]:
    """(sent, found) of partition 3 of a write that completes or is cut off after the batches."""
    with RowSender(WriteOptions(str(group.store), topic, queues=4), write, 3, check_stored=check_stored) as sender:
        for batch in batches:
            sender.send(batch)
        if ends:
            sender.end()
        return sender.sent, sender.found


def stored(group: Group, topic: str) -> list[StoredMessage]:
    group.wait_dispatched()
    return messages_of(group.store, topic=topic)


def test_send_keeps_order_of_partition(running: Group) -> None:
    assert send(running, [rows(0, 500), rows(500, 900)], "Order") == (900, 0)
    found = stored(running, "Order")
    assert [int(message.body) for message in found] == list(range(900))
    assert {message.queue_id for message in found} == {3}


def test_send_repeated_stores_each_row_once(running: Group) -> None:
    topics = ["Once0", "Once1", "Once2"]
    whole = [rows(0, 700, topics), rows(700, 1000, topics)]
    for cut in (0, 1, 2, 3, 333, 700, 998, 1000):
        write = f"cut {cut}"
        begun = [batch.slice(0, max(0, cut - first)) for first, batch in ((0, whole[0]), (700, whole[1]))]
        there, _ = send(running, begun, write=write, ends=False)
        assert there == cut - min(cut, len(topics)), "the newest row of each topic waits"
        assert send(running, whole, write=write) == (1000 - there, there)
        assert send(running, whole, write=write) == (0, 1000)
    every = [int(message.body) for topic in topics for message in stored(running, topic)]
    assert sorted(every) == sorted(list(range(1000)) * 8)


def test_send_repeated_with_other_batch_sizes(running: Group) -> None:
    assert send(running, [rows(0, 101)], "Borders", ends=False) == (100, 0)
    small = [rows(first, first + 7) for first in range(0, 140, 7)]
    assert send(running, small, "Borders") == (40, 100)
    assert send(running, small, "Borders") == (0, 140)


def test_send_repeated_with_other_partitioning_is_rejected(running: Group) -> None:
    """A repeated sort draws new bounds and a source may grow: rows may be stored elsewhere."""
    assert send(running, [rows(0, 300)], "Others") == (300, 0)
    for others in ([rows(100, 500)], [rows(0, 150), rows(151, 500)], [rows(0, 299), rows(300, 301)]):
        with pytest.raises(BadRequestError, match=r"Others: row \d+ differs from the stored one: a repeated"):
            send(running, others, "Others")
    for more in ([rows(0, 500)], [rows(0, 300), rows(300, 301)], [rows(0, 299), rows(300, 500)]):
        with pytest.raises(BadRequestError, match="topic Others: more rows than the 300 before: a repeated write"):
            send(running, more, "Others")
    for fewer in (1, 200, 299):
        with pytest.raises(BadRequestError, match=f"Others: {fewer} rows now, 300 before: a repeated write"):
            send(running, [rows(0, fewer)], "Others")
    assert [int(message.body) for message in stored(running, "Others")] == list(range(300))
    texts = pa.RecordBatch.from_pydict({"body": [f"{number}" for number in range(300)]})
    assert send(running, [texts], "Others") == (0, 300)


def test_send_repeated_with_fewer_rows_is_rejected(running: Group) -> None:
    assert send(running, [rows(0, 301)], "Begun", ends=False) == (300, 0)
    with pytest.raises(BadRequestError, match="300 rows now, at least 301 before: a repeated write"):
        send(running, [rows(0, 300)], "Begun")
    assert send(running, [rows(0, 301)], "Begun") == (1, 300)


def test_send_lost_response_to_last_row(running: Group) -> None:
    with RowSender(WriteOptions(str(running.store), "Last", queues=4), "w", 0, check_stored=False) as sender:
        sender.send(rows(0, 10))
        really, lost = TopicRows.send_frame, [1]

        def losing(topic_rows: TopicRows, *frame: Any) -> None:
            really(topic_rows, *frame)
            if lost:
                lost.clear()
                raise SendOutcomeUnknownError("lost")

        with mock.patch.object(TopicRows, "send_frame", losing):
            sender.end()
        assert (sender.sent, sender.found) == (10, 0)
    assert [int(message.body) for message in stored(running, "Last")] == list(range(10))


@pytest.mark.parametrize("cut", [8_000, 11_500])
def test_send_repeated_after_retention_sends_no_duplicates(group: Group, cut: int) -> None:
    whole = [rows(first, first + 500) for first in range(0, 12_000, 500)]
    begun, _ = send(group, whole[: cut // 500], "Deleted", ends=False)
    group.wait_dispatched()
    with group.client() as client:

        def first_left() -> int:
            # Ask again: a retention pass may run before the first segment can be deleted.
            asked = submit_request(StoreIO(), StorePaths(group.store), 0)
            wait_until(lambda: not asked.exists(), what="retention")
            return client.min_offset("Deleted", 3)

        first = wait_until(first_left, what="a segment that is deleted")
        assert first < cut
    assert send(group, whole, "Deleted") == (12_000 - begun, begun)
    assert [int(message.body) for message in stored(group, "Deleted")] == list(range(first, 12_000))


def test_all_columns(running: Group) -> None:
    born = datetime(2020, 1, 2, 3, 4, 5, 678_000, UTC)
    properties = pa.array([[("a", "1"), ("UNIQ_KEY", "x")], None], pa.map_(pa.string(), pa.string()))
    batch = pa.RecordBatch.from_pydict(
        {
            "topic": ["All", "All"],
            "body": ["text", ""],
            "tag": ["t", None],
            "keys": pa.array([["k1", "k2"], None], pa.list_(pa.string())),
            "queue_id": pa.array([2, None], pa.int32()),
            "properties": properties,
            "flag": pa.array([7, None], pa.int32()),
            "born_timestamp": pa.array([born, born + timedelta(seconds=1)], pa.timestamp("us", "UTC")),
        }
    )
    assert send(running, [batch]) == (2, 0)
    assert send(running, [batch]) == (0, 2)
    first, second = stored(running, "All")
    assert (first.body, first.tag, first.keys, first.queue_id, first.flag) == (b"text", "t", ("k1", "k2"), 2, 7)
    assert first.properties["a"] == "1"
    assert first.properties["UNIQ_KEY"] != "x"
    assert first.born_timestamp_ms == round(born.timestamp() * 1000) == second.born_timestamp_ms - 1000
    assert (second.body, second.tag, second.keys, second.queue_id, second.flag) == (b"", "", (), 3, 0)


def _send_all(store: str, write: str) -> None:
    with RowSender(WriteOptions(store, "Killed"), write, 0, check_stored=True) as sender:
        for first in range(0, ROWS, PER_BATCH):
            sender.send(rows(first, first + PER_BATCH))


def test_send_killed_repeatedly_stores_each_row_once(running: Group) -> None:
    chance = random.Random(5)
    context = loaded_context()
    codes = []
    with running.client() as client:
        client.create_topic("Killed", 4)
        for kill in range(KILLS):
            process = context.Process(target=_send_all, args=(str(running.store), "killed"))
            process.start()
            # No kill falls into the last part: the process must have rows left when it is observed.
            above = chance.randrange(kill * ROWS // (KILLS + 1) + 1, (kill + 1) * ROWS // (KILLS + 1))
            wait_until(lambda above=above: client.max_offset("Killed", 0) > above, 60, "some rows")
            process.kill()
            process.join(30)
            codes.append(process.exitcode)
    # One process may have finished before it was observed.
    assert codes.count(-signal.SIGKILL) >= KILLS - 1
    sent, found = send_again(running)
    assert sent + found == ROWS
    assert found > ROWS // 2
    assert [int(message.body) for message in stored(running, "Killed")] == list(range(ROWS))


def send_again(group: Group) -> tuple[int, int]:
    with RowSender(WriteOptions(str(group.store), "Killed"), "killed", 0, check_stored=True) as sender:
        for first in range(0, ROWS, PER_BATCH):
            sender.send(rows(first, first + PER_BATCH))
        sender.end()
        return sender.sent, sender.found


def test_send_concurrent_attempts_of_task_are_serialized(running: Group) -> None:
    with running.client() as client, ThreadPoolExecutor() as threads:
        client.create_topic("Turns", 4)
        with RowSender(WriteOptions(str(running.store), "Turns"), "turns", 3, check_stored=True) as first:
            first.send(rows(0, 100))
            second = threads.submit(send, running, [rows(0, 200)], "Turns", write="turns")
            other = threads.submit(send, running, [rows(0, 100)], "Other", write="another write")
            assert other.result(60) == (100, 0)
            first.send(rows(100, 200))
            first.end()
            assert not second.done()
        assert second.result(60) == (0, 200)
    assert [int(message.body) for message in stored(running, "Turns")] == list(range(200))


def test_send_survives_kill_of_writer(running: Group) -> None:
    done: list[tuple[int, int]] = []
    with running.client() as client:
        client.create_topic("Writer", 4)
        sending = threading.Thread(
            target=lambda: done.append(send(running, [rows(at, at + 500) for at in range(0, 40_000, 500)], "Writer"))
        )
        sending.start()
        for above in (3_000, 20_000):
            wait_until(lambda above=above: client.max_offset("Writer", 3) > above or done, 60, "some rows")
            os.kill(running.pid("writer"), signal.SIGKILL)
        sending.join(120)
    assert sum(done[0]) == 40_000
    assert [int(message.body) for message in stored(running, "Writer")] == list(range(40_000))


# Rejected input


@pytest.mark.parametrize(
    ("columns", "error", "says"),
    [
        ({"body": [None]}, BadRequestError, "column body: 1 row without a body"),
        ({"body": [b"x"], "tag": ["a\x02"]}, BadPropertyError, "separator byte"),
        ({"body": [b"x"], "keys": [["a b"]]}, BadPropertyError, "separator byte"),
        ({"body": [b"x" * (1 << 19)]}, BadRequestError, "max_message_size|exceeds"),
        ({"body": [b"x"], "flag": pa.array([2**40])}, BadMessageError, "flags"),
    ],
)
def test_send_invalid_rows_raise(running: Group, columns: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        send(running, [pa.RecordBatch.from_pydict(columns)], "Refused")
    with running.client() as client:
        assert "Refused" not in [info.topic for info in client.topics()]


def test_send_to_folder_without_group_is_rejected(tmp_path: Path) -> None:
    for name in ("missing", "another's"):
        if name != "missing":
            (tmp_path / name / "commitlog").mkdir(parents=True)
        with pytest.raises(NotRunningError, match=rf"{name}: no group has run on a store here"):
            RowSender(WriteOptions(str(tmp_path / name), "Topic"), "w", 0, check_stored=False)


@pytest.mark.parametrize("by_column", [False, True])
def test_send_creates_topic_when_rows_name_queues(running: Group, by_column: bool) -> None:
    def send_to(topic: str, queue_id: int) -> None:
        options = WriteOptions(str(running.store), topic, None if by_column else queue_id, queues=2)
        columns: dict[str, Any] = {"body": [b"1", b"2"]}
        if by_column:
            columns["queue_id"] = pa.array([queue_id, None], pa.int32())
        with RowSender(options, "w", 1, check_stored=True) as sender:
            sender.send(pa.RecordBatch.from_pydict(columns))
            sender.end()

    topic = f"Two{by_column}"
    for queue_id in (2, 5):
        with pytest.raises(BadRequestError, match=f"option queues = 2 creates it without queue {queue_id};"):
            send_to(topic, queue_id)
    with running.client() as client:
        assert topic not in [info.topic for info in client.topics()]
        send_to(topic, 1)
        assert len(client.queues(topic)) == 2
        # The option does not affect an existing topic.
        client.create_topic(f"Six{by_column}", 6)
        send_to(f"Six{by_column}", 5)
    assert {message.queue_id for message in stored(running, topic)} == {1}
    assert 5 in {message.queue_id for message in stored(running, f"Six{by_column}")}


def test_send_does_not_create_system_topics(running: Group) -> None:
    for topic in ("SCHEDULE_TOPIC_XXXX", "%DLQ%x"):
        with pytest.raises(TopicReservedError, match="the system's own"):
            send(running, [rows(0, 1)], topic)
    with running.client() as client:
        assert "%DLQ%x" not in [info.topic for info in client.topics()]


def test_send_row_without_topic_is_rejected(running: Group) -> None:
    with pytest.raises(BadRequestError, match="column topic: a row has no topic"):
        send(running, [pa.RecordBatch.from_pydict({"topic": ["Some", None], "body": [b"", b""]})])


def test_send_check_stored_without_message_index_is_rejected(tmp_path: Path) -> None:
    own = tmp_path / "store" / "mqproc"
    own.mkdir(parents=True)
    (own / "settings.json").write_text('{"message_index_enable": false}')
    with pytest.raises(BadRequestError, match="message_index_enable is off"):
        RowSender(WriteOptions(str(tmp_path / "store"), "Topic"), "w", 0, check_stored=True)


def test_send_lost_response_without_message_index_raises(tmp_path: Path) -> None:
    group = Group(tmp_path / "store", message_index_enable=False).start()
    with RowSender(WriteOptions(str(group.store), "Topic", queues=1), "w", 0, check_stored=False) as sender:
        sender.send(rows(0, 10))
        with (
            mock.patch.object(TopicRows, "send_frame", side_effect=SendOutcomeUnknownError("lost")),
            pytest.raises(BadRequestError, match="message_index_enable is off"),
        ):
            sender.send(rows(10, 20))
    assert len(stored(group, "Topic")) == 9
    group.close()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"path": ""}, "must be the folder of one store"),
        ({"path": "s3://bucket/store"}, "must be the folder of one store"),
        ({"subscribe": "a"}, "option 'subscribe' is unknown; options are path, queueId, queues, topic"),
        ({"queues": "0"}, r"queues = 0 is not in \[1, 65,536\]"),
        ({"queueId": "one"}, "queueId = 'one' is not an integer"),
    ],
)
def test_write_options_invalid_values_raise(given: dict[str, str], says: str) -> None:
    with pytest.raises(BadRequestError, match=says):
        write_options({"path": "/store"} | given, overwrite=False)


def test_write_mode_overwrite_is_rejected() -> None:
    with pytest.raises(BadRequestError, match="cannot be overwritten"):
        write_options({"path": "/store"}, overwrite=True)


def test_write_options_accept_file_url() -> None:
    for path in ("/store", "file:///store", "file:/store"):
        assert write_options({"path": path}, overwrite=False).store == "/store"


WRITEABLE = {
    "topic": types.StringType(),
    "body": types.BinaryType(),
    "keys": types.ArrayType(types.StringType()),
    "queue_id": types.IntegerType(),
    "properties": types.MapType(types.StringType(), types.StringType()),
    "born_timestamp": types.TimestampType(),
}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"value": types.BinaryType()}, "column value cannot be written; select from topic, body, tag"),
        ({"body": None}, "column body is missing"),
        ({"topic": None}, "column topic is missing; the option topic"),
        ({"body": types.ArrayType(types.IntegerType())}, "column body is array<int>; it must be binary or string"),
        ({"queue_id": types.LongType()}, "column queue_id is bigint; it must be int"),
    ],
)
def test_write_schema_invalid_columns_raise(changes: dict[str, Any], says: str) -> None:
    check_columns(WriteOptions("/store"), schema_ddl(WRITEABLE))
    assert set(WRITEABLE) < set(SINK_COLUMNS)
    with pytest.raises(BadRequestError, match=says):
        check_columns(WriteOptions("/store"), schema_ddl(WRITEABLE | changes))


def schema_ddl(columns: dict[str, Any]) -> types.StructType:
    return types.StructType([types.StructField(name, kind) for name, kind in columns.items() if kind is not None])
