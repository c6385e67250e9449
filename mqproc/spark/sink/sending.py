"""The rows of one partition as messages: in order, each once, with ids by which the store is asked what it has.

rows of a topic  0 1 2 3 4 5 6 7 … last     id = digest of (write, partition, topic), block, counter of 65,536
                 └─ stored ──┘└─ sent, a frame at a time, each answered before the next
                              ▲
                              found by doubling and halving: stored rows are the first ones

The last row's id is made of another digest: so a write that is done again with more rows in a partition, as behind
another cut into partitions, is known before it sends any.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from mqproc.client import Client, core, sending
from mqproc.client.batch import Batch
from mqproc.client.connection import FRAME_BYTES_MAX
from mqproc.client.encoding import encode_batch
from mqproc.client.replay import OWN_PROPERTIES
from mqproc.client.settling import PATIENCE_S, UNSETTLED, Patience, Runs, check_index, settle
from mqproc.client.unique_id import COUNTERS, unique_id
from mqproc.errors import BadRequestError, MessageTooLargeError, MqprocError, TopicExistsError
from mqproc.io import StoreIO
from mqproc.message import StoredMessage
from mqproc.paths import StorePaths
from mqproc.quantities import counted
from mqproc.spark.sink.options import WriteOptions
from mqproc.spark.sink.turns import Turn
from mqproc.store.reads.reader import settings_of
from mqproc.store.topics import check_sendable

# A frame goes out when the one before is answered, so larger ones cost fewer waits.
_FRAME_ROWS: Final = 8192
_FRAME_BYTES: Final = 8 << 20
_PAUSE_S: Final = 0.1
# 28 characters of prefix: a digest, and which block of 65,536 rows.
_DIGEST_CHARACTERS: Final = 20
_BLOCK_CHARACTERS: Final = 8
# Where retention has deleted the first rows, others are looked for among so many: found if a fifth or more are left.
_ROWS_MAX: Final = 1 << 24
_LOOKUPS_IN_FLIGHT: Final = 64


class RowSender:
    """Sends what one task is given to a store whose group runs."""

    def __init__(self, options: WriteOptions, identity: str, partition: int, *, looks: bool) -> None:
        """`identity` names write and partition. With `looks` the store is asked which rows it has."""
        self._options = options
        self._identity = identity
        self._partition = partition
        self._looks = looks
        if looks:
            check_index(options.store)
        self._client = Client(options.store)
        try:
            self._turn = Turn(StorePaths(Path(options.store)), identity)
        except BaseException:
            self._client.close()
            raise
        self._topics: dict[str, TopicRows] = {}
        self._queues: dict[str, int] | None = None

    @property
    def sent(self) -> int:
        """Rows that this task has sent."""
        return sum(rows.sent for rows in self._topics.values())

    @property
    def found(self) -> int:
        """Rows that were there."""
        return sum(rows.found for rows in self._topics.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._client.close()
        self._turn.close()

    def send(self, batch: pa.RecordBatch) -> None:
        """Send the rows that are not there yet; a topic's newest row waits for the next one, or for `end`.

        Raises BadRequestError for rows that are no messages, and for others than those that are there.
        """
        table = {name: batch.column(name) for name in batch.schema.names}
        if self._options.topic or not batch.num_rows:
            self._send_rows(self._options.topic, table, batch.num_rows)
            return
        for topic in table["topic"].unique().to_pylist():
            if not topic:
                raise BadRequestError("column topic: a row has none, and the option topic is not given")
            of_topic = pc.indices_nonzero(pc.equal(table["topic"], topic))
            self._send_rows(topic, {name: column.take(of_topic) for name, column in table.items()}, len(of_topic))

    def _send_rows(self, topic: str, table: dict[str, pa.Array], count: int) -> None:
        if not count:
            return
        columns = self._columns(table)
        rows = self._topics.get(topic)
        if rows is None:
            # Asked for with a queue of all rows too: a missing topic is made here, and not by the store's own default.
            queues = self._queues_of(topic, columns)
            queue_id = self._partition % queues if self._options.queue_id is None else None
            rows = self._topics[topic] = TopicRows(
                self._client, topic, self._identity, queue_id, store=self._options.store
            )
            if self._looks:
                # Once a task is enough: what one before it has left is of all topics.
                rows.look(drained=len(self._topics) > 1)
                if rows.has_none and any(queue.min_offset for queue in self._client.queues(topic)):
                    rows.look_behind_deleted(self._client)
        rows.send(columns, count)

    def end(self) -> None:
        """Send what has waited: there are no more rows. Raises BadRequestError when more of them are stored."""
        for rows in self._topics.values():
            rows.end()

    def _queues_of(self, topic: str, columns: dict[str, pa.Array]) -> int:
        """How many queues a topic has; it is made when it is missing and its first rows are messages."""
        if self._queues is None:
            self._queues = {info.topic: info.queues for info in self._client.topics()}
        if topic not in self._queues:
            self._check(topic, columns)
            try:
                self._client.create_topic(topic, self._options.queues)
            except TopicExistsError:
                # Another task has made it.
                return len(self._client.queues(topic)) or self._options.queues
            self._queues[topic] = self._options.queues
        return self._queues[topic]

    def _check(self, topic: str, columns: dict[str, pa.Array]) -> None:
        """Raise BadRequestError for rows that a store would refuse, so that they leave no topic behind."""
        check_sendable(topic)
        self._check_queues(topic, columns)
        limit = settings_of(StoreIO(), StorePaths(Path(self._options.store))).max_message_size
        largest = pc.max(pc.binary_length(columns["body"])).as_py()
        if largest > limit:
            raise MessageTooLargeError(f"topic {topic}: body of {largest:,} bytes; max_message_size is {limit:,}")
        for _frame in encode_batch(_batch(topic, columns, 0, None), FRAME_BYTES_MAX):
            pass

    def _check_queues(self, topic: str, columns: dict[str, pa.Array]) -> None:
        """Raise BadRequestError for rows of a queue that the topic would not have when it is made."""
        if "queue_id" not in columns:
            return
        largest = pc.max(columns["queue_id"]).as_py()
        if largest is not None and largest >= self._options.queues:
            raise BadRequestError(
                f"topic {topic} is missing, and option queues = {self._options.queues:,} makes it without "
                f"queue {largest:,}; give more, or make the topic before"
            )

    def _columns(self, table: dict[str, pa.Array]) -> dict[str, pa.Array]:
        columns = {name: column for name, column in table.items() if name != "topic"}
        if columns["body"].null_count:
            raise BadRequestError(f"column body: {counted(columns['body'].null_count, 'row')} without one")
        if self._options.queue_id is not None:
            columns["queue_id"] = pa.array(np.full(len(columns["body"]), self._options.queue_id, np.int32))
        return columns


class TopicRows:
    """The rows of one topic of a partition. The first `_stored` are there, and behind them the last one if `_ended`."""

    def __init__(
        self,
        client: Runs,
        topic: str,
        identity: str,
        queue_id: int | None,
        patience: Patience | None = None,
        *,
        store: str = "",
    ) -> None:
        """`store` is the client's: it must be one that can be asked. "" where that is known."""
        self._client = client
        self._store = store
        self._patience = patience or Patience()
        self._topic = topic
        self._queue_id = queue_id
        self._digest = _prefix_of(identity, topic)
        self._last_digest = _prefix_of(identity, topic, "last")
        self._at = 0
        self._stored = 0
        self._ended = False
        # The newest row: whether it is the last one is not known.
        self._newest: dict[str, pa.Array] = {}
        self._seen: dict[int, bytes] = {}
        self.sent = 0
        self.found = 0

    @property
    def has_none(self) -> bool:
        """Whether no row is known to be stored."""
        return not self._stored and not self._ended

    def send(self, columns: dict[str, pa.Array], count: int) -> None:
        """Send the next `count` rows that are not there, but for the newest one.

        Raises BadRequestError when those that are there are others: what would be sent may be there, elsewhere.
        """
        if self._newest:
            self._send_rows(self._newest, 1)
        self._send_rows({name: column[: count - 1] for name, column in columns.items()}, count - 1)
        # A slice would keep the whole batch.
        self._newest = {name: column.take(pa.array([count - 1])) for name, column in columns.items()}

    def end(self) -> None:
        """Send the newest row as the last one. Raises BadRequestError when more rows are stored."""
        if self._stored > self._at:
            before = f"{'' if self._ended else 'at least '}{self._stored + 1:,}"
            raise self._not_the_same(f"there are {self._at + 1:,} rows, and were {before} before")
        if self._ended:
            self._check_same(self._newest["body"], 1)
            self.found += 1
        else:
            self._send_patiently(self._newest, 1, is_last=True)
            self.sent += 1

    def _send_rows(self, columns: dict[str, pa.Array], count: int) -> None:
        """Send the next `count` rows that are not there; more come behind them."""
        found = min(max(self._stored - self._at, 0), count)
        self._check_same(columns["body"], found)
        if self._ended and found < count:
            raise self._not_the_same(f"there are more rows than the {self._stored + 1:,} before")
        self._at += found
        self._send_patiently({name: column[found:] for name, column in columns.items()}, count - found)
        self.found += found
        self.sent += count - found

    def _send_patiently(self, columns: dict[str, pa.Array], count: int, *, is_last: bool = False) -> None:
        """Send rows from `_at` on; after a lost answer those of them that are not there."""
        first, end = self._at, self._at + count
        failed_s: float | None = None
        while self._at < end:
            at = self._at
            stop = min(end, at + _frame_rows(columns["body"], at - first), (at // COUNTERS + 1) * COUNTERS)
            frame = {name: column[at - first : stop - first] for name, column in columns.items()}
            try:
                self._send_frame(frame, self._unique(at, is_last=is_last))
                self._at, failed_s = stop, None
            except UNSETTLED as error:
                failed_s = self._now_s() if failed_s is None else failed_s
                self._pause_after(error, failed_s)
                self._stored = at
                self.look()
                self._at = end if is_last and self._ended else min(self._stored, end)

    def _check_same(self, bodies: pa.Array, found: int) -> None:
        """Raise BadRequestError when one of the next `found` rows is not the one that was seen in its place."""
        for row, digest in self._seen.items():
            if 0 <= row - self._at < found and _digest_of(bodies[row - self._at].as_py()) != digest:
                raise self._not_the_same(f"row {row:,} is another one than is stored")

    def _not_the_same(self, what: str) -> BadRequestError:
        return BadRequestError(
            f"topic {self._topic}: {what}: a write that is done again needs the same rows in the same partitions and "
            "order; behind a shuffle, write what was saved before, or under another writeId what may come twice"
        )

    def look_behind_deleted(self, client: Client) -> None:
        """Find stored rows behind some that retention has deleted, when `look` has found none."""
        probes, row = [], 1
        while row < _ROWS_MAX:
            probes.append(row)
            row += max(1, row // 4)
        answers = client.run_all(map(self._lookup, probes), core.QUERY, _LOOKUPS_IN_FLIGHT)
        there = [row for row, answer in zip(probes, answers, strict=True) if answer]
        if there:
            self._look_from(there[-1])

    def look(self, *, drained: bool = False) -> None:
        """Find out how many rows are stored, as soon as that can be said; `drained`: no socket holds any of them.

        Raises BadRequestError when the store has no index to say it by.
        """
        if self._store:
            check_index(self._store)
        since_s = self._now_s()
        while True:
            try:
                if not drained:
                    settle(self._client, self._patience)
                self._look_from(self._stored)
                return
            except UNSETTLED as error:
                drained = False
                self._pause_after(error, since_s)

    def _look_from(self, known: int) -> None:
        self._stored = self._count_stored(known)
        self._ended = self._is_stored(self._stored, is_last=True)

    def _now_s(self) -> float:
        return self._patience.clock.monotonic_ns() / 1e9

    def _pause_after(self, error: MqprocError, since_s: float) -> None:
        """Wait a little, unless it has been failing for long: then raise the error."""
        if self._now_s() - since_s > PATIENCE_S:
            raise error
        self._patience.clock.sleep(_PAUSE_S)

    def _count_stored(self, known: int) -> int:
        """How many rows from the first on are stored, at least `known`: doubling steps, then halves."""
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

    def _is_stored(self, row: int, *, is_last: bool = False) -> bool:
        found = self._client.run(self._lookup(row, is_last=is_last))
        if found:
            self._seen[row] = _digest_of(found[0].body)
        return bool(found)

    def _lookup(self, row: int, *, is_last: bool = False) -> core.Call[list[StoredMessage]]:
        unique = unique_id(*self._unique(row, is_last=is_last))
        return core.by_key(self._topic, unique, None, None, 1, True, "store")

    def _unique(self, row: int, *, is_last: bool = False) -> tuple[str, int]:
        block, counter = divmod(row, COUNTERS)
        return f"{self._last_digest if is_last else self._digest}{block:0{_BLOCK_CHARACTERS}X}", counter

    def _send_frame(self, columns: dict[str, pa.Array], unique: tuple[str, int]) -> None:
        """One frame, or a few when rows are large, one after the other: what is stored is always the first rows."""
        batch = _batch(self._topic, columns, self._queue_id, unique)
        for call in sending.send_batch(batch, FRAME_BYTES_MAX):
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


def _digest_of(body: bytes | str) -> bytes:
    return hashlib.sha256(body.encode() if isinstance(body, str) else body).digest()


def _frame_rows(bodies: pa.Array, first: int) -> int:
    """How many rows from `first` on make a frame."""
    mean = max(1, int(bodies.nbytes) // max(1, len(bodies)))
    return max(1, min(_FRAME_ROWS, _FRAME_BYTES // mean, len(bodies) - first))


def _integers(columns: dict[str, pa.Array], name: str, default: int) -> NDArray[np.int32] | None:
    column = columns.get(name)
    if column is None:
        return None
    values: NDArray[np.int32] = column.fill_null(default).to_numpy(zero_copy_only=False)
    return values


def _born_ms(columns: dict[str, pa.Array]) -> NDArray[np.int64] | None:
    """Milliseconds of the times; rows without one were born now."""
    column = columns.get("born_timestamp")
    if column is None:
        return None
    now_us = time.time_ns() // 1000
    micros: NDArray[np.int64] = column.cast(pa.int64()).fill_null(now_us).to_numpy(zero_copy_only=False)
    return micros // 1000


def _properties(columns: dict[str, pa.Array]) -> list[dict[str, str]] | None:
    """Without those that say of another record how it went its way."""
    column = columns.get("properties")
    if column is None:
        return None
    return [{name: value for name, value in pairs or () if name not in OWN_PROPERTIES} for pairs in column.to_pylist()]
