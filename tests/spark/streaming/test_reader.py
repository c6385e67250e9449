"""The stream reader: each message once, through new queues, losses, limits and repeats."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from mqproc.errors import BadRequestError, CorruptStoreError
from mqproc.spark.options import stream_options
from mqproc.spark.stream_reader import StreamReader
from tests.spark.support import Row, messages_of, rows_in
from tests.support.group import Group
from tests.support.store_builders import FIRST_MS, LiveStore, StoppedStore, write_at

COLUMNS = ["store", "topic", "queue_id", "queue_offset", "body"]
BATCHES_MAX = 500
Place = tuple[str, int, int]


class Query:
    """A query with its checkpoint; `restart` simulates a new process that resumes it."""

    def __init__(self, path: Path | str, **given: Any) -> None:
        self._given = {"path": str(path)} | {name: str(value) for name, value in given.items()}
        self.ends: list[str] = []
        self.rows: list[Row] = []
        self.partitions: list[list[Any]] = []
        self.restart()

    def restart(self, **given: Any) -> Query:
        self._given |= {name: str(value) for name, value in given.items()}
        self.reader = StreamReader(stream_options(self._given), COLUMNS)
        return self

    def start(self) -> dict[str, Any]:
        return json.loads(self.ends[-1]) if self.ends else self.reader.initialOffset()

    def plan(self, *, once: bool = False) -> bool:
        """Ask for the end of the next micro-batch; False when there is no new data."""
        limit = ReadAllAvailable() if once else self.reader.getDefaultReadLimit()
        end = json.dumps(self.reader.latestOffset(self.start(), limit))
        if self.ends and end == self.ends[-1]:
            return False
        self.ends.append(end)
        return True

    def read(self) -> list[Row]:
        """Rows of the newest micro-batch; may be called repeatedly."""
        start = json.loads(self.ends[-2]) if len(self.ends) > 1 else self.reader.initialOffset()
        partitions = self.reader.partitions(start, json.loads(self.ends[-1]))
        self.partitions.append(partitions)
        return [row for each in partitions for batch in self.reader.read(each) for row in batch.to_pylist()]

    def run(self, *, available_now: bool = False) -> list[Row]:
        """Run micro-batches until no new data is left; returns their rows."""
        if available_now:
            self.reader.prepareForTriggerAvailableNow()
        found: list[Row] = []
        for _ in range(BATCHES_MAX):
            if not self.plan():
                self.rows += found
                return found
            found += self.read()
        raise AssertionError(f"no end after {BATCHES_MAX} micro-batches")

    @property
    def position(self) -> dict[str, Any]:
        return json.loads(self.ends[-1])


def places(rows: list[Row]) -> list[Place]:
    return sorted((row["topic"], row["queue_id"], row["queue_offset"]) for row in rows)


def stored(store: Path, **values: Any) -> list[tuple[str, int, int]]:
    return sorted((each.topic, each.queue_id, each.queue_offset) for each in messages_of(store, **values))


def test_reader_returns_each_message_once_within_limit(rolled_store: Path) -> None:
    query = Query(rolled_store, startingOffsets="earliest", maxOffsetsPerTrigger=99, maxRecordsPerPartition=10)
    found = query.run()
    assert places(found) == stored(rolled_store)
    assert [sum(map(rows_in, parts)) for parts in query.partitions] == [0, *([99] * 6), 46]
    assert all(rows_in(part) <= 10 for parts in query.partitions for part in parts)
    bodies = {(each.topic, each.queue_id, each.queue_offset): each.body for each in messages_of(rolled_store)}
    assert all(row["body"] == bodies[row["topic"], row["queue_id"], row["queue_offset"]] for row in found)


def test_queues_are_read_in_order(rolled_store: Path) -> None:
    rows = Query(rolled_store, startingOffsets="earliest", maxOffsetsPerTrigger=37).run()
    of_queue = [row["queue_offset"] for row in rows if (row["topic"], row["queue_id"]) == ("Second", 3)]
    assert of_queue == list(range(52))


def test_reader_starting_offsets(rolled_store: Path) -> None:
    assert Query(rolled_store).run() == []
    middle = FIRST_MS + 300
    later = [each for each in messages_of(rolled_store) if each.store_timestamp_ms >= middle]
    assert len(Query(rolled_store, startingTimestamp=middle).run()) == len(later)
    given = json.dumps({"First": {"0": 50, "1": -1, "2": -2}})
    found = places(Query(rolled_store, subscribe="First", startingOffsets=given).run())
    assert [sum(queue == each for _topic, queue, _offset in found) for each in range(4)] == [6, 0, 56, 56]


def test_reader_filters_and_columns(rolled_store: Path) -> None:
    by_key = Query(rolled_store, startingOffsets="earliest", topic="First", key="n0,n1,n600,nowhere").run()
    assert {row["body"][:4].strip() for row in by_key} == {b"0", b"1"}
    by_queue = Query(rolled_store, startingOffsets="earliest", assign='{"Third": [1, 3]}').run()
    assert places(by_queue) == sorted(place for place in stored(rolled_store, topic="Third") if place[1] in (1, 3))


def test_reader_repeated_micro_batch_has_same_partitions(running: Group) -> None:
    with running.client() as client:
        client.create_topic("Again", 3)
        client.send_batch("Again", [b"%d" % number for number in range(900)])
        running.wait_dispatched()
        query = Query(
            running.store,
            subscribe="Again,Again2",
            startingOffsets="earliest",
            maxOffsetsPerTrigger=200,
            minPartitions=4,
        )
        query.plan()
        query.read()
        query.plan()
        first = query.read()
        client.send_batch("Again", [b"%d" % number for number in range(900, 1200)])
        client.send_batch("Again2", [b"other"])
        running.wait_dispatched()
        query.restart()
        assert query.read() == first
        assert [part.slices for part in query.partitions[-1]] == [part.slices for part in query.partitions[-2]]
        assert len(query.partitions[-1]) >= 4
        assert places([*first, *query.run()]) == stored(running.store, topic="Again") + stored(
            running.store, topic="Again2"
        )


def test_reader_first_micro_batch_fixes_start(running: Group) -> None:
    with running.client() as client:
        client.create_topic("Pin", 2)
        client.send_batch("Pin", [b"before"] * 10, queue_id=0)
        running.wait_dispatched()
        query = Query(running.store, topic="Pin")
        assert query.plan()
        client.send_batch("Pin", [b"after"] * 4, queue_id=0)
        running.wait_dispatched()
        # Kill before the first micro-batch is committed: the start position is kept.
        query.restart()
        assert query.read() == []
        assert [row["body"] for row in query.run()] == [b"after"] * 4


def test_reader_finds_new_queues_topics_and_stores(running: Group) -> None:
    with running.client() as client:
        client.create_topic("Tin", 1)
        running.wait_dispatched()
        query = Query(f"{running.store.parent}/s*", subscribePattern="T.*")
        assert query.run() == []
        client.send_batch("Tin", [b"a"] * 3)
        client.send_batch("Toys", [b"b"] * 5)
        client.send_batch("Others", [b"c"] * 5)
        running.wait_dispatched()
        StoppedStore(running.store.parent / "s2")
        assert len(query.run()) == 3 + 5 + len(messages_of(running.store.parent / "s2", topic="Third"))
        query.restart()
        client.send_batch("Toys", [b"b"] * 5)
        running.wait_dispatched()
        assert [row["body"] for row in query.run(available_now=True)] == [b"b"] * 5


def test_reader_available_now_stops_at_initial_end(running: Group) -> None:
    with running.client() as client:
        client.send_batch("Now", [b"early"] * 50)
        running.wait_dispatched()
        query = Query(running.store, topic="Now", startingOffsets="earliest", maxOffsetsPerTrigger=20)
        query.reader.prepareForTriggerAvailableNow()
        client.send_batch("Now", [b"late"] * 50)
        running.wait_dispatched()
        found = []
        while query.plan():
            found += query.read()
        assert [row["body"] for row in found] == [b"early"] * 50
        query.restart()
        assert [row["body"] for row in query.run(available_now=True)] == [b"late"] * 50
        assert query.restart().run(available_now=True) == []
        once = Query(running.store, topic="Now", startingOffsets="earliest")
        once.plan(once=True)
        assert len(once.read()) == 100


def test_reader_survives_restarts_of_group(group: Group) -> None:
    query = Query(group.store, startingOffsets="earliest")
    for life in range(3):
        with group.client() as client:
            client.send_batch("Topic", [b"%d" % life] * 40)
            group.wait_dispatched()
        query.run()
        if life:
            group.stop()
        else:
            group.kill()
        assert query.run() == []
        group.start()
    assert sorted(row["body"] for row in query.rows) == sorted([b"0"] * 40 + [b"1"] * 40 + [b"2"] * 40)
    assert query.position[str(group.store)]["queues"]["Topic"]


def test_reader_waits_while_store_recovers(running: Group) -> None:
    with running.client() as client:
        client.send_batch("Held", [b"x"] * 10)
        running.wait_dispatched()
    query = Query(running.store, topic="Held", startingOffsets="earliest")
    query.run()
    store = query.reader._live().get(str(running.store))
    recovering = store.state()[0], False
    store.state = lambda: recovering  # type: ignore[method-assign]
    assert query.run() == []


# Losses


def test_reader_deleted_offsets(tmp_path: Path) -> None:
    store = StoppedStore(tmp_path / "retained").root
    query = Query(store, startingOffsets="earliest", maxOffsetsPerTrigger=64)
    query.plan()
    query.read()
    query.plan()
    first = query.read()
    (store / "commitlog" / f"{0:020d}").unlink()
    left = stored(store)
    assert len(left) < 640
    query.restart()
    with pytest.raises(CorruptStoreError, match=r"offsets \[\d+, \d+\) were deleted before they were read"):
        query.run()
    query.restart(failOnDataLoss=False)
    found = places(query.run())
    assert found == [place for place in left if place not in places(first)]


def test_reader_messages_deleted_during_read(tmp_path: Path) -> None:
    store = StoppedStore(tmp_path / "store").root
    query = Query(store, startingOffsets="earliest")
    query.plan()
    query.read()
    query.plan()
    start, end = (json.loads(each) for each in query.ends)
    partitions = query.reader.partitions(start, end)
    (store / "commitlog" / f"{0:020d}").unlink()
    with pytest.raises(CorruptStoreError, match=r"its part of the log is deleted, with \d+ selected messages"):
        [list(query.reader.read(each)) for each in partitions]
    query.restart(failOnDataLoss=False)
    rows = sum(batch.num_rows for each in partitions for batch in query.reader.read(each))
    assert 0 < rows == len(messages_of(store))


def test_reader_damage_raises_or_is_skipped(tmp_path: Path) -> None:
    store = StoppedStore(tmp_path / "store").root
    harmed = messages_of(store)[100]
    write_at(store / "commitlog" / f"{0:020d}", harmed.physical_offset + 120, b"\xff")
    unit = messages_of(store, topic="Second", queue_id=2)[5]
    write_at(store / "consumequeue" / "Second" / "2" / f"{0:020d}", 20 * unit.queue_offset + 7, b"\x01")
    with pytest.raises(CorruptStoreError, match=r"offset \d+ of queue \d of \w+ has no intact record at log position"):
        Query(store, startingOffsets="earliest").run()
    # The log still has the message of the damaged unit.
    assert len(Query(store, startingOffsets="earliest", failOnDataLoss=False).run()) == 639


def test_reader_queue_with_missing_units(tmp_path: Path) -> None:
    store = StoppedStore(tmp_path / "store").root
    query = Query(store, startingOffsets="earliest", assign='{"First": [0]}')
    query.plan()
    query.read()
    query.plan()
    (store / "consumequeue" / "First" / "0" / f"{800:020d}").unlink()
    with pytest.raises(
        CorruptStoreError, match=r"offsets \[40, 56\) of queue 0 of First: the queue does not have them"
    ):
        query.read()


def test_reader_rejects_checkpoints_of_other_stores(tmp_path: Path, rolled_store: Path) -> None:
    mine = StoppedStore(tmp_path / "mine").root
    query = Query(mine, startingOffsets="earliest")
    query.run()
    with pytest.raises(BadRequestError, match=r"the checkpoint is of .*mine; the path means .*store"):
        query.restart(path=rolled_store).run()
    shutil.rmtree(mine)
    other = StoppedStore(tmp_path / "other")
    shutil.copytree(other.root, mine)
    assert query.restart(path=mine).run() == []
    shutil.rmtree(mine)
    write_other(mine)
    with pytest.raises(BadRequestError, match="the checkpoint is of another store"):
        query.restart(path=mine).run()
    query.ends.append('{"x": 3}')
    with pytest.raises(BadRequestError, match="not mqproc's"):
        query.run()


def test_reader_rejects_replaced_store(make_group: Callable[..., Group]) -> None:
    first = make_group()
    with first.client() as client:
        client.create_topic("T", 1)
        client.send_batch("T", [b"old"] * 5)
        client.wait_dispatched()
    query = Query(first.store, startingOffsets="earliest")
    assert len(query.run()) == 5
    first.stop()
    shutil.rmtree(first.store)
    with make_group().client() as client:
        client.create_topic("T", 1)
        client.send_batch("T", [b"newer"] * 12)
        client.wait_dispatched()
    with pytest.raises(BadRequestError, match="the checkpoint is of another store"):
        query.run()


@pytest.mark.parametrize("sizes", [{}, {"mapped_file_size_commit_log": 2 << 20, "mapped_file_size_consume_queue": 200}])
def test_reader_replaced_store_resumes_without_fail_on_data_loss(
    make_group: Callable[..., Group], sizes: dict[str, int]
) -> None:
    first = make_group()
    with first.client() as client:
        client.create_topic("T", 1)
        client.send_batch("T", [b"old"] * 5)
        client.wait_dispatched()
    query = Query(first.store, startingOffsets="earliest", failOnDataLoss=False)
    assert len(query.run()) == 5
    first.stop()
    shutil.rmtree(first.store)
    with make_group(**sizes).client() as client:
        client.create_topic("T", 1)
        client.send("T", b"behind")
        client.wait_dispatched()
        assert query.run() == []
        client.send_batch("T", [b"new"] * 20)
        client.wait_dispatched()
    assert [row["body"] for row in query.run()] == [b"new"] * 20


def write_other(root: Path) -> None:
    """A store with the same queues and messages of another length."""
    store = LiveStore(root)
    for number in range(300):
        for topic in ("First", "Second", "Third"):
            store.append(topic, [b"%d" % number * 3] * 4, FIRST_MS + number)
    store.dispatch()
    store.close()


def test_reader_deleted_topic(running: Group) -> None:
    with running.client() as client:
        client.create_topic("Gone", 1)
        client.send_batch("Gone", [b"x"] * 5)
        running.wait_dispatched()
        read, behind = (Query(running.store, topic="Gone", startingOffsets="earliest") for _ in range(2))
        read.run()
        behind.plan()
        behind.read()
        client.delete_topic("Gone")
        running.wait_dispatched()
        assert read.run() == []
        with pytest.raises(CorruptStoreError, match="queue 0 of Gone is gone, and was not read to its end"):
            behind.run()
        assert behind.restart(failOnDataLoss=False).run() == []


def test_reader_commits_offsets_of_consumer_group(running: Group) -> None:
    with running.client() as client:
        client.send_batch("Progress", [b"x"] * 30)
        running.wait_dispatched()
        Query(running.store, topic="Progress", startingOffsets="earliest", consumerGroup="readers").run(
            available_now=True
        )
        assert client.groups.info("readers").lag == 0


def test_reader_commits_nothing_for_deleted_topic(running: Group) -> None:
    with running.client() as client:
        for topic in ("Going", "Staying"):
            client.create_topic(topic, 1)
            client.send(topic, b"x")
        client.wait_dispatched()
        query = Query(running.store, subscribe="Going,Staying", startingOffsets="earliest", consumerGroup="Leaver")
        assert len(query.run()) == 2
        client.delete_topic("Going")
        client.send("Staying", b"y")
        client.wait_dispatched()
        assert len(query.restart().run()) == 1
        assert client.groups.info("Leaver").lag == 0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"endingOffsets": "latest"}, "endingOffsets' is for batch reads"),
        ({"splitBytes": "9"}, "splitBytes' is for batch reads"),
        ({"maxOffsetsPerTrigger": "0"}, r"maxOffsetsPerTrigger = 0 is not in \[1, "),
        ({"startingOffsets": "latest", "startingTimestamp": "1"}, "exclude one another in a stream"),
        ({"startingOffsets": '{"First": {"0": -3}}'}, "-3 is not an offset"),
        ({"kafka.x": "1"}, "option 'kafka.x' is unknown"),
    ],
)
def test_reader_invalid_options_raise(given: dict[str, str], says: str) -> None:
    with pytest.raises(BadRequestError, match=says):
        stream_options({"path": "/store"} | given)


def test_reader_missing_offsets_and_queues_raise(rolled_store: Path) -> None:
    for given, says in (
        ('{"First": {"0": 57}}', r"startingOffsets 57 of queue 0 of First: offsets there are \[0, 56\)"),
        ('{"First": {"9": 0}}', "there is no queue 9 of First"),
    ):
        with pytest.raises(BadRequestError, match=says):
            Query(rolled_store, startingOffsets=given).run()
        assert Query(rolled_store, startingOffsets=given, failOnDataLoss=False, maxOffsetsPerTrigger=640).run()
    with pytest.raises(BadRequestError, match="which remote storage does not have"):
        Query("memory://stores/a").run()


def test_reader_read_limit_of_trigger_is_kept(rolled_store: Path) -> None:
    query = Query(rolled_store, startingOffsets="earliest")
    query.plan()
    end = query.reader.latestOffset(query.position, ReadMaxRows(7))
    assert sum(sum(queues.values()) for queues in end[str(rolled_store)]["queues"].values()) == 7
