"""The sink of `format("mqproc")`: tasks send rows as messages, each once, in order.

    task ──ids of (write, partition, topic, row)──▶ how many rows are stored? ──▶ the rest, in order ──▶ writer

    rows of a topic  0 1 2 3 4 5 6 7 8 9 …      id = digest of (write, partition, topic), block, counter of 65,536
                     └─ stored ──┘└─ sent, a frame at a time, each answered before the next
                                  ▲
                                  found by exponential and binary search: stored rows are a prefix

A row is visible once it is sent. A repeated task or micro-batch gives its rows the same ids and skips those that the
store has. Each attempt looks for them when its turn has come (`attempts.py`).

The end of a task's rows proves nothing: they also end when their source fails or the task is killed. A write with a
`writeId` is complete when the driver commits it. The commit records the number of rows; a repetition with other rows is
then an error, before any is sent.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from mqproc.client import Client, requests, send_requests
from mqproc.client.batch import Batch
from mqproc.client.connection import FRAME_BYTES_MAX
from mqproc.client.dispatch_barrier import (
    OUTCOME_UNKNOWN,
    PATIENCE_S,
    CallRunner,
    Patience,
    check_index,
    wait_for_index,
)
from mqproc.client.encoding import encode_batch
from mqproc.client.message_fields import COUNTERS, unique_id
from mqproc.client.replay import OWN_PROPERTIES
from mqproc.errors import (
    BadRequestError,
    MessageTooLargeError,
    MqprocError,
    TopicExistsError,
)
from mqproc.io.store_io import StoreIO
from mqproc.layout.properties import KEY_SEPARATOR, KEYS, TAGS
from mqproc.paths import StorePaths
from mqproc.spark.attempts import CompleteWrites, SendTurn
from mqproc.spark.options import WriteOptions, check_columns
from mqproc.store.read.reader import settings_of
from mqproc.store.topics import check_sendable
from mqproc.types import StoredMessage
from mqproc.util.units import counted

# Each frame waits for the previous answer, so large frames save waits.
_FRAME_ROWS: Final = 8192
_FRAME_BYTES: Final = 8 << 20
_PAUSE_S: Final = 0.1
# The 28 characters of an id's prefix: a digest and the block of 65,536 rows.
_DIGEST_CHARACTERS: Final = 20
_BLOCK_CHARACTERS: Final = 8
# After retention has deleted the first rows, this many are probed, which succeeds when at least a fifth are left.
_ROWS_MAX: Final = 1 << 24
_LOOKUPS_IN_FLIGHT: Final = 64
# The part of a row that a repeated write compares.
_COMPARED: Final = ("body", "tag", "keys")
# Properties that Spark sets for the tasks of a micro-batch.
_QUERY: Final = "sql.streaming.queryId"
_EPOCH: Final = "streaming.sql.batchId"


@dataclass(frozen=True, slots=True)
class Sent(WriterCommitMessage):
    """Result of a task: partition, rows of each topic, and how many were stored already."""

    partition: int
    rows: dict[str, int]
    found: int


class BatchWriter(DataSourceArrowWriter):
    """One write of a DataFrame. Repeating it under one `writeId` stores no row twice."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        check_columns(options, schema)
        self.write_options = options
        self.write_id = options.write_id or str(uuid.uuid4())

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Sent:
        options, partition, complete = self.write_options, _context().partitionId(), None
        if options.write_id and (rows := CompleteWrites(options.store).rows(self.write_id)) is not None:
            complete = rows.get(partition, {})
        return _write(options, self.write_id, iterator, complete)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Record a write with a name as complete: all tasks are done."""
        if self.write_options.write_id:
            done = [message for message in messages if isinstance(message, Sent)]
            rows = {message.partition: message.rows for message in done}
            CompleteWrites(self.write_options.store).add(self.write_id, rows)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Sent rows stay; a repeated write continues after them."""


class StreamWriter(DataSourceStreamArrowWriter):
    """The sink of a streaming query, for all its micro-batches."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        check_columns(options, schema)
        if options.write_id:
            raise BadRequestError("option writeId is for batch writes; a query is identified by its checkpoint")
        self.write_options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Sent:
        context = _context()
        query, epoch = context.getLocalProperty(_QUERY), context.getLocalProperty(_EPOCH)
        if query is None or epoch is None:
            raise BadRequestError("Spark names neither query nor micro-batch, so rows cannot be identified")
        return _write(self.write_options, f"{query}\0{epoch}", iterator, None)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Do nothing: Spark's checkpoint records complete micro-batches."""

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Sent rows stay; the repeated micro-batch continues after them."""


def _context() -> TaskContext:
    context = TaskContext.get()
    assert context is not None
    return context


def _write(
    options: WriteOptions, write: str, batches: Iterator[pa.RecordBatch], complete: Mapping[str, int] | None
) -> Sent:
    from mqproc.spark.worker import exclude_loaded_from_gc

    partition = _context().partitionId()
    with RowSender(options, f"{write}\0{partition}", partition, complete) as sender:
        for batch in batches:
            sender.send(batch)
        sender.end()
        exclude_loaded_from_gc()
        return Sent(partition, sender.rows(), sender.found)


class RowSender:
    """Sends the rows of one task to a running store, except those that it has."""

    def __init__(
        self, options: WriteOptions, identity: str, partition: int, complete: Mapping[str, int] | None = None
    ) -> None:
        """`identity` names write and partition; `complete` has a complete write's rows by topic.

        Raises BadRequestError when the store has no index, and errors of `SendTurn`.
        """
        self._options = options
        self._identity = identity
        self._partition = partition
        self._complete = complete
        check_index(options.store)
        self._client = Client(options.store)
        try:
            self._turn = SendTurn(options.store, identity)
        except BaseException:
            self._client.close()
            raise
        self._topics: dict[str, TopicRows] = {}
        self._queues: dict[str, int] | None = None

    @property
    def sent(self) -> int:
        return sum(rows.sent for rows in self._topics.values())

    @property
    def found(self) -> int:
        """Rows that were stored already."""
        return sum(rows.found for rows in self._topics.values())

    def rows(self) -> dict[str, int]:
        """The rows of each topic."""
        return {topic: rows.sent + rows.found for topic, rows in self._topics.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()
        self._turn.close()

    def send(self, batch: pa.RecordBatch) -> None:
        """Send rows that are not stored.

        Raises BadRequestError for invalid rows, and when stored rows differ.
        """
        table = {name: batch.column(name) for name in batch.schema.names}
        if self._options.topic or not batch.num_rows:
            self._send_rows(self._options.topic, table, batch.num_rows)
            return
        for topic in table["topic"].unique().to_pylist():
            if not topic:
                raise BadRequestError("column topic: a row has no topic, and the option topic is not set")
            of_topic = pc.indices_nonzero(pc.equal(table["topic"], topic))
            self._send_rows(topic, {name: column.take(of_topic) for name, column in table.items()}, len(of_topic))

    def _send_rows(self, topic: str, table: dict[str, pa.Array], count: int) -> None:
        if not count:
            return
        columns = self._columns(table)
        rows = self._topics.get(topic)
        if rows is None:
            if self._complete is not None and topic not in self._complete:
                raise mismatch(topic, "more rows than the 0 before")
            # Even for a fixed queue: this creates a missing topic with the option's number of queues.
            queues = self._queues_of(topic, columns)
            queue_id = self._partition % queues if self._options.queue_id is None else None
            rows = TopicRows(self._client, topic, self._identity, queue_id, store=self._options.store)
            rows.complete = None if self._complete is None else self._complete[topic]
            self._topics[topic] = rows
            # One settling per task is enough: rows of an earlier attempt, of any topic, are then indexed.
            rows.find_stored(drained=len(self._topics) > 1)
            if rows.nothing_stored and any(queue.min_offset for queue in self._client.queues(topic)):
                rows.find_stored_after_deleted(self._client)
        rows.send(columns, count)

    def end(self) -> None:
        """End the task's rows. Raises BadRequestError when there were more before."""
        for topic, before in (self._complete or {}).items():
            if before and topic not in self._topics:
                raise mismatch(topic, f"0 rows now, {before:,} before")
        for rows in self._topics.values():
            rows.end()

    def _queues_of(self, topic: str, columns: dict[str, pa.Array]) -> int:
        """The number of a topic's write queues; creates a missing topic if its rows are valid."""
        if self._queues is None:
            self._queues = {info.topic: info.write_queues for info in self._client.topics()}
        if topic not in self._queues:
            self._check(topic, columns)
            try:
                self._client.create_topic(topic, self._options.queues)
            except TopicExistsError:
                # Another task has created it.
                return len(self._client.queues(topic)) or self._options.queues
            self._queues[topic] = self._options.queues
        return self._queues[topic]

    def _check(self, topic: str, columns: dict[str, pa.Array]) -> None:
        """Raise BadRequestError for rows that the store would reject, before creating the topic."""
        check_sendable(topic)
        last_queue = pc.max(columns["queue_id"]).as_py() if "queue_id" in columns else None
        if last_queue is not None and last_queue >= self._options.queues:
            raise BadRequestError(
                f"topic {topic} is missing, and option queues = {self._options.queues:,} creates it without "
                f"queue {last_queue:,}; set more queues, or create the topic before"
            )
        limit = settings_of(StoreIO(), StorePaths(Path(self._options.store))).max_message_size
        largest = pc.max(pc.binary_length(columns["body"])).as_py()
        if largest > limit:
            raise MessageTooLargeError(f"topic {topic}: body of {largest:,} bytes; max_message_size is {limit:,}")
        for _frame in encode_batch(_batch(topic, columns, 0, None), FRAME_BYTES_MAX):
            pass

    def _columns(self, table: dict[str, pa.Array]) -> dict[str, pa.Array]:
        columns = {name: column for name, column in table.items() if name != "topic"}
        if columns["body"].null_count:
            raise BadRequestError(f"column body: {counted(columns['body'].null_count, 'row')} without a body")
        _add_from_properties(columns)
        if self._options.queue_id is not None:
            columns["queue_id"] = pa.array(np.full(len(columns["body"]), self._options.queue_id, np.int32))
        return columns


class TopicRows:
    """The rows of one topic of a partition, of which the first `_stored` are stored."""

    def __init__(
        self,
        client: CallRunner,
        topic: str,
        identity: str,
        queue_id: int | None,
        patience: Patience | None = None,
        *,
        store: str = "",
    ) -> None:
        """`store` is the client's, whose index is checked before lookups; "" to skip the check."""
        self._client = client
        self._store = store
        self._patience = patience or Patience()
        self._topic = topic
        self._queue_id = queue_id
        self._digest = _prefix_of(identity, topic)
        self._at = 0
        self._stored = 0
        self._seen: dict[int, bytes] = {}
        self.complete: int | None = None
        """Number of rows if the write is complete."""
        self.sent = 0
        self.found = 0

    @property
    def nothing_stored(self) -> bool:
        """Whether no stored row is known."""
        return not self._stored

    def send(self, columns: dict[str, pa.Array], count: int) -> None:
        """Send those of the next `count` rows that are not stored.

        Raises BadRequestError when stored rows differ: then the rows may be stored elsewhere.
        """
        found = min(max(self._stored - self._at, 0), count)
        self._check_unchanged(columns, found)
        if self.complete is not None and self._at + count > self.complete:
            raise mismatch(self._topic, f"more rows than the {self.complete:,} before")
        self._at += found
        self._send_patiently({name: column[found:] for name, column in columns.items()}, count - found)
        self.found += found
        self.sent += count - found

    def end(self) -> None:
        """End the rows. Raises BadRequestError when there were more before."""
        if self.complete is not None and self.complete > self._at:
            raise mismatch(self._topic, f"{self._at:,} rows now, {self.complete:,} before")
        if self._stored > self._at:
            raise mismatch(self._topic, f"{self._at:,} rows now, at least {self._stored:,} before")

    def _send_patiently(self, columns: dict[str, pa.Array], count: int) -> None:
        """Send rows from `_at` on; after a lost answer, those that are not stored."""
        first, end = self._at, self._at + count
        failed_s: float | None = None
        while self._at < end:
            at = self._at
            stop = min(end, at + _frame_rows(columns["body"], at - first), (at // COUNTERS + 1) * COUNTERS)
            frame = {name: column[at - first : stop - first] for name, column in columns.items()}
            try:
                self.send_frame(frame, self._unique(at))
                self._at, failed_s = stop, None
            except OUTCOME_UNKNOWN as error:
                failed_s = self._now_s() if failed_s is None else failed_s
                self._pause_after(error, failed_s)
                self._stored = at
                self.find_stored()
                self._at = min(self._stored, end)

    def _check_unchanged(self, columns: dict[str, pa.Array], found: int) -> None:
        """Raise BadRequestError when one of the next `found` rows differs from a stored one."""
        for row, digest in self._seen.items():
            at = row - self._at
            if 0 <= at < found and _digest_of(*(_value(columns, name, at) for name in _COMPARED)) != digest:
                raise mismatch(self._topic, f"row {row:,} differs from the stored one")

    def find_stored_after_deleted(self, client: Client) -> None:
        """Find stored rows after some that retention has deleted, when `find_stored` has found none.

        Of a complete write all were stored, though too few may be left to find them.
        """
        probes, row = [], 1
        while row < _ROWS_MAX:
            probes.append(row)
            row += max(1, row // 4)
        answers = client.run_all(map(self._lookup, probes), _LOOKUPS_IN_FLIGHT)
        there = [row for row, answer in zip(probes, answers, strict=True) if answer]
        self._stored = self._count_stored(there[-1]) if there else self.complete or 0

    def find_stored(self, *, drained: bool = False) -> None:
        """Find how many rows are stored, after waiting for dispatch unless `drained`.

        Raises BadRequestError when the store has no index for the lookup.
        """
        if self._store:
            check_index(self._store)
        since_s = self._now_s()
        while True:
            try:
                if not drained:
                    wait_for_index(self._client, self._patience)
                self._stored = self._count_stored(self._stored)
                return
            except OUTCOME_UNKNOWN as error:
                drained = False
                self._pause_after(error, since_s)

    def _now_s(self) -> float:
        return self._patience.clock.monotonic_ns() / 1e9

    def _pause_after(self, error: MqprocError, since_s: float) -> None:
        """Wait a little; raise the error once it has persisted for long."""
        if self._now_s() - since_s > PATIENCE_S:
            raise error
        self._patience.clock.sleep(_PAUSE_S)

    def _count_stored(self, known: int) -> int:
        """The number of stored rows, at least `known`: exponential, then binary search."""
        low, step = known, 1
        while self._is_stored(low + step - 1):
            low += step
            step *= 2
        high = low + step - 1
        while low < high:
            middle = (low + high) // 2
            if self._is_stored(middle):
                low = middle + 1
            else:
                high = middle
        return low

    def _is_stored(self, row: int) -> bool:
        found = self._client.run(self._lookup(row))
        if found:
            self._seen[row] = _digest_of(found[0].body, found[0].tag, found[0].keys)
        return bool(found)

    def _lookup(self, row: int) -> requests.Call[list[StoredMessage]]:
        return requests.by_unique_id(self._topic, unique_id(*self._unique(row)))

    def _unique(self, row: int) -> tuple[str, int]:
        block, counter = divmod(row, COUNTERS)
        return f"{self._digest}{block:0{_BLOCK_CHARACTERS}X}", counter

    def send_frame(self, columns: dict[str, pa.Array], unique: tuple[str, int]) -> None:
        """Send one frame, or several in order, so that stored rows are always a prefix."""
        batch = _batch(self._topic, columns, self._queue_id, unique)
        for call in send_requests.send_batch(batch, FRAME_BYTES_MAX):
            self._client.run(call)


def _prefix_of(*names: str) -> str:
    digest = hashlib.sha256("\0".join(names).encode()).hexdigest()
    return digest[:_DIGEST_CHARACTERS].upper()


def _batch(topic: str, columns: dict[str, pa.Array], queue_id: int | None, unique: tuple[str, int] | None) -> Batch:
    return Batch(
        topic,
        columns["body"],
        columns.get("keys"),
        columns.get("tag"),
        queue_id=None if "queue_id" in columns else queue_id,
        queue_ids=_integers(columns, "queue_id", queue_id or 0),
        born_timestamps_ms=_born_ms(columns),
        properties=_properties(columns),
        flags=_integers(columns, "flag", 0),
        unique=unique,
    )


def mismatch(topic: str, what: str) -> BadRequestError:
    """The error for a repeated write with other rows."""
    return BadRequestError(
        f"topic {topic}: {what}: a repeated write needs the same rows in the same partitions and "
        "order; after a shuffle write a saved result, or use another writeId and accept duplicates"
    )


def _value(columns: dict[str, pa.Array], name: str, row: int) -> Any:
    return columns[name][row].as_py() if name in columns else None


def _digest_of(body: bytes | str, tag: str | None, keys: str | Sequence[str] | None) -> bytes:
    """Digest of the part of a row that a repeated write compares."""
    words = [keys] if isinstance(keys, str) else keys or ()
    text = "\0".join([tag or "", *filter(None, words)])
    digest = hashlib.sha256(f"{len(text)}\0{text}".encode())
    digest.update(body.encode() if isinstance(body, str) else body)
    return digest.digest()


def _frame_rows(bodies: pa.Array, first: int) -> int:
    """Rows from `first` on that make one frame."""
    mean = max(1, int(bodies.nbytes) // max(1, len(bodies)))
    return max(1, min(_FRAME_ROWS, _FRAME_BYTES // mean, len(bodies) - first))


def _integers(columns: dict[str, pa.Array], name: str, default: int) -> NDArray[np.int32] | None:
    column = columns.get(name)
    if column is None:
        return None
    values: NDArray[np.int32] = column.fill_null(default).to_numpy(zero_copy_only=False)
    return values


def _born_ms(columns: dict[str, pa.Array]) -> NDArray[np.int64] | None:
    """Born times in ms; rows without one are born now."""
    column = columns.get("born_timestamp")
    if column is None:
        return None
    now_us = time.time_ns() // 1000
    micros: NDArray[np.int64] = column.cast(pa.int64()).fill_null(now_us).to_numpy(zero_copy_only=False)
    return micros // 1000


def _add_from_properties(columns: dict[str, pa.Array]) -> None:
    """Add the columns `tag` and `keys` that are missing, as far as properties have them."""
    if "properties" not in columns or {"tag", "keys"} <= set(columns):
        return
    pairs = [dict(each or ()) for each in columns["properties"].to_pylist()]
    if "tag" not in columns:
        columns["tag"] = pa.array([each.get(TAGS) for each in pairs], pa.string())
    if "keys" not in columns:
        keys = [each.get(KEYS, "").split(KEY_SEPARATOR) for each in pairs]
        columns["keys"] = pa.array([list(filter(None, some)) for some in keys], pa.list_(pa.string()))


def _properties(columns: dict[str, pa.Array]) -> list[dict[str, str]] | None:
    """Properties, without those that describe the delivery of another record."""
    column = columns.get("properties")
    if column is None:
        return None
    return [{name: value for name, value in pairs or () if name not in OWN_PROPERTIES} for pairs in column.to_pylist()]
