"""A task's writes: order, each row once across killed attempts, rejected input."""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
from collections.abc import Mapping, Sequence
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
    MqprocError,
    NotRunningError,
    SendOutcomeUnknownError,
    StoreAccessError,
    TopicReservedError,
)
from mqproc.io.store_io import StoreIO
from mqproc.paths import StorePaths
from mqproc.spark import attempts
from mqproc.spark.attempts import CompleteWrites
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
    complete: Mapping[str, int] | None = None,
    ends: bool = True,
) -> tuple[int, int]:
    """(sent, found) of partition 3 of a write that ends or fails after the batches."""
    with RowSender(WriteOptions(str(group.store), topic, queues=4), write, 3, complete) as sender:
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
        there, _ = send(running, begun, write=write, ends=cut % 2 == 0)
        assert there == cut
        assert send(running, whole, write=write) == (1000 - there, there)
        assert send(running, whole, write=write) == (0, 1000)
    every = [int(message.body) for topic in topics for message in stored(running, topic)]
    assert sorted(every) == sorted(list(range(1000)) * 8)


def test_send_repeated_with_other_batch_sizes(running: Group) -> None:
    assert send(running, [rows(0, 100)], "Borders", ends=False) == (100, 0)
    small = [rows(first, first + 7) for first in range(0, 140, 7)]
    assert send(running, small, "Borders") == (40, 100)
    assert send(running, small, "Borders") == (0, 140)


def test_send_repeated_with_other_rows_is_rejected(running: Group) -> None:
    """A repeated sort draws new bounds and a source may grow: rows may be stored elsewhere."""
    assert send(running, [rows(0, 300)], "Others") == (300, 0)
    for others in ([rows(100, 500)], [rows(0, 150), rows(151, 500)], [rows(0, 299), rows(300, 301)]):
        with pytest.raises(BadRequestError, match=r"Others: row \d+ differs from the stored one: a repeated"):
            send(running, others, "Others")
    for fewer in (1, 200, 299):
        with pytest.raises(BadRequestError, match=f"Others: {fewer} rows now, at least 300 before: a repeated write"):
            send(running, [rows(0, fewer)], "Others")
    assert [int(message.body) for message in stored(running, "Others")] == list(range(300))
    texts = pa.RecordBatch.from_pydict({"body": [f"{number}" for number in range(300)]})
    assert send(running, [texts], "Others") == (0, 300)


@pytest.mark.parametrize("column", ["tag", "keys"])
def test_send_repeated_with_other_tags_or_keys_is_rejected(running: Group, column: str) -> None:
    topic = f"Same{column}"
    batches = [
        pa.RecordBatch.from_pydict({"body": [b""] * 40, column: [f"n{number}" for number in order]})
        for order in (range(40), range(39, -1, -1))
    ]
    assert send(running, batches[:1], topic, ends=False) == (40, 0)
    with pytest.raises(BadRequestError, match="differs from the stored one"):
        send(running, batches[1:], topic)
    assert send(running, batches[:1], topic) == (0, 40)


def test_send_repeated_after_complete_write_needs_same_number(running: Group) -> None:
    topics = ["Complete0", "Complete1"]
    complete = dict.fromkeys(topics, 150)
    assert send(running, [rows(0, 300, topics)]) == (300, 0)
    assert send(running, [rows(0, 200, topics), rows(200, 300, topics)], complete=complete) == (0, 300)
    for more in ([rows(0, 500, topics)], [rows(0, 300, topics), rows(300, 301, topics)]):
        with pytest.raises(BadRequestError, match="topic Complete0: more rows than the 150 before: a repeated write"):
            send(running, more, complete=complete)
    with pytest.raises(BadRequestError, match="topic Complete2: more rows than the 0 before"):
        send(running, [rows(0, 3, [*topics, "Complete2"])], complete=complete)
    with pytest.raises(BadRequestError, match="topic Complete1: 0 rows now, 150 before"):
        send(running, [rows(0, 300, topics).filter(pa.array([True, False] * 150))], complete=complete)
    with running.client() as client:
        assert "Complete2" not in [info.topic for info in client.topics()]
    for topic in topics:
        assert len(stored(running, topic)) == 150


def test_send_repeated_sends_lost_rows_of_complete_write(running: Group) -> None:
    """A power loss may take the log's last records, under ASYNC_FLUSH."""
    assert send(running, [rows(0, 120)], "Lost", ends=False) == (120, 0)
    assert send(running, [rows(0, 150)], "Lost", complete={"Lost": 150}) == (30, 120)


def test_complete_writes_keep_newest_and_report_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = CompleteWrites(str(tmp_path))
    writes.add("no store here", {0: {"t": 1}})
    assert writes.rows("no store here") is None
    assert list(tmp_path.iterdir()) == []
    folder = StorePaths(tmp_path).spark_writes
    folder.parent.mkdir()
    monkeypatch.setattr(attempts, "_WRITES_MAX", 3)
    for number in range(5):
        writes.add(f"w{number}", {0: {"t": number}, 7: {}})
        for path in folder.iterdir():
            os.utime(path, (path.stat().st_mtime - 10, path.stat().st_mtime - 10))
    assert [writes.rows(f"w{number}") for number in range(2)] == [None, None]
    assert [writes.rows(f"w{number}") for number in range(2, 5)] == [{0: {"t": each}, 7: {}} for each in range(2, 5)]
    for path in folder.iterdir():
        path.write_text("{")
    with pytest.raises(StoreAccessError, match=r"spark_writes/\w+\.json: .*; remove it if the write 'w4' is not"):
        writes.rows("w4")


def test_send_tag_and_keys_of_properties_are_kept(running: Group) -> None:
    kinds = pa.map_(pa.string(), pa.string())
    properties = pa.array([[("TAGS", "t"), ("KEYS", "k1 k2"), ("a", "1")], [("a", "2")], None], kinds)
    bare = pa.RecordBatch.from_pydict({"body": [b"1", b"2", b"3"], "properties": properties})
    assert send(running, [bare], "Bare") == (3, 0)
    assert send(running, [bare], "Bare") == (0, 3)
    found = [(message.tag, message.keys, message.properties.get("a")) for message in stored(running, "Bare")]
    assert found == [("t", ("k1", "k2"), "1"), ("", (), "2"), ("", (), None)]
    named = bare.append_column("tag", pa.array(["own", "x", None], pa.string()))
    assert send(running, [named], "Named") == (3, 0)
    found = [(message.tag, message.keys, message.properties.get("a")) for message in stored(running, "Named")]
    assert found == [("own", ("k1", "k2"), "1"), ("x", (), "2"), ("", (), None)]


def test_send_lost_response_to_last_rows(running: Group) -> None:
    with RowSender(WriteOptions(str(running.store), "Last", queues=4), "w", 0) as sender:
        sender.send(rows(0, 10))
        really, lost = TopicRows.send_frame, [1]

        def losing(topic_rows: TopicRows, *frame: Any) -> None:
            really(topic_rows, *frame)
            if lost:
                lost.clear()
                raise SendOutcomeUnknownError("lost")

        with mock.patch.object(TopicRows, "send_frame", losing):
            sender.send(rows(10, 13))
        sender.end()
        assert (sender.sent, sender.found) == (13, 0)
    assert [int(message.body) for message in stored(running, "Last")] == list(range(13))


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
    group.wait_dispatched()
    assert send(group, whole, "Deleted", complete={"Deleted": 12_000}) == (0, 12_000)
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
    with RowSender(WriteOptions(store, "Killed"), write, 0) as sender:
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
    with RowSender(WriteOptions(str(group.store), "Killed"), "killed", 0) as sender:
        for first in range(0, ROWS, PER_BATCH):
            sender.send(rows(first, first + PER_BATCH))
        sender.end()
        return sender.sent, sender.found


def test_send_concurrent_attempts_of_task_are_serialized(running: Group) -> None:
    with running.client() as client, ThreadPoolExecutor() as threads:
        client.create_topic("Turns", 4)
        with RowSender(WriteOptions(str(running.store), "Turns"), "turns", 3) as first:
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
            RowSender(WriteOptions(str(tmp_path / name), "Topic"), "w", 0)


def test_send_to_store_of_other_user_is_rejected(running: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_given: Any, **_more: Any) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(StoreIO, "open", refused)
    with pytest.raises(StoreAccessError, match=r"spark.lock: Permission denied; only the user of the store's group"):
        RowSender(WriteOptions(str(running.store), "Topic"), "w", 0)
    monkeypatch.setattr(StoreIO, "read_json", refused)
    with pytest.raises(StoreAccessError, match=r"spark_writes/\w+\.json: Permission denied; only the user"):
        CompleteWrites(str(running.store)).rows("w")
    with pytest.raises(MqprocError, match="the write is not recorded as complete: repeat it under the same writeId"):
        CompleteWrites(str(running.store)).add("w", {})


@pytest.mark.parametrize("by_column", [False, True])
def test_send_creates_topic_when_rows_name_queues(running: Group, by_column: bool) -> None:
    def send_to(topic: str, queue_id: int) -> None:
        options = WriteOptions(str(running.store), topic, None if by_column else queue_id, queues=2)
        columns: dict[str, Any] = {"body": [b"1", b"2"]}
        if by_column:
            columns["queue_id"] = pa.array([queue_id, None], pa.int32())
        with RowSender(options, "w", 1) as sender:
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


def test_send_without_message_index_is_rejected(tmp_path: Path) -> None:
    own = tmp_path / "store" / "mqproc"
    own.mkdir(parents=True)
    (own / "settings.json").write_text('{"message_index_enable": false}')
    with pytest.raises(BadRequestError, match="message_index_enable is off"):
        RowSender(WriteOptions(str(tmp_path / "store"), "Topic"), "w", 0)


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
