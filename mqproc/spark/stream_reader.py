"""`readStream.format("mqproc")`: the calls of a query, and the stores that it follows.

    initialOffset ──▶ latestOffset(start, limit) ──▶ partitions(start, end) ──▶ read, in tasks
                           ▲─────────────────────────────────────────────────────────┘

Only Spark's checkpoint keeps offsets. The rows and partitions of a micro-batch depend on its two offsets alone, so that
repeating it after a crash gives the same rows.

The first micro-batch of a query is empty and records where the query starts. A queue or store that appears later starts
at its first message, which an offset records before anything of it is read.

    {"/stores/a": {"queues": {"orders": {"0": 23, "1": 19}},
                   "anchor": {"topic": "orders", "queue_id": 0, "queue_offset": 22, "physical_offset": 9180,
                              "store_timestamp_ms": 1700000000000}}}

A queue's offset is that of its next message. The anchor is a message that was read; it identifies the store, in case
another one takes its path. Keys are sorted because Spark compares offsets as strings.

Positions of a running group come from shared memory, so its reader stays open. The files of a stopped store are read
again at most once a second. While a group recovers, its queues are being rebuilt: the stream waits.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from mqproc.client import Client
from mqproc.config.options import Options
from mqproc.errors import (
    BadRequestError,
    CorruptStoreError,
    MqprocError,
    NoSuchQueueError,
    NotRunningError,
    RequestTimeoutError,
    RetryLaterError,
    SendOutcomeUnknownError,
    StaleOffsetError,
    StoreAccessError,
    TopicNotFoundError,
)
from mqproc.io.store_io import StoreIO
from mqproc.ipc.store_lock import lock_holder
from mqproc.layout import control
from mqproc.paths import StorePaths
from mqproc.spark.options import EARLIEST, LATEST, Queue, ReadSelection, StreamOptions
from mqproc.spark.partitions import LogPartition, QueueSlice, StoreSelection
from mqproc.spark.survey import find_stores
from mqproc.store.consumequeue.bounds import as_units
from mqproc.store.read.reader import StoreReader
from mqproc.store.read.views import QueueBounds, each_queue, identity_of, open_control
from mqproc.store.verify.snapshot import read_deleted

if TYPE_CHECKING:
    import pyarrow as pa

_NO_LIMIT: Final = 1 << 60
# After these errors the next micro-batch commits again.
_RETRIED: Final = (NotRunningError, RequestTimeoutError, RetryLaterError, SendOutcomeUnknownError)
_FILES_AGE_S: Final = 1.0
_WAIT_S: Final = 30.0
_POLL_S: Final = 0.05

Place = tuple[str, Queue]
"""A queue of a store."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """A message that a stream has read: its place in queue and log, and its store time."""

    topic: str
    queue_id: int
    queue_offset: int
    physical_offset: int
    store_timestamp_ms: int

    @property
    def queue(self) -> Queue:
        return self.topic, self.queue_id


@dataclass(slots=True)
class StorePosition:
    """A stream's position in one store."""

    offsets: dict[Queue, int] = field(default_factory=dict)
    anchor: Anchor | None = None


Position = dict[str, StorePosition]
"""Positions by store, named by the path that the stream has found it at."""


def to_json(position: Position) -> dict[str, Any]:
    """Serialize a position for Spark's checkpoint."""
    found: dict[str, Any] = {}
    for uri, of_store in sorted(position.items()):
        queues: dict[str, dict[str, int]] = {}
        for topic, queue_id in sorted(of_store.offsets):
            queues.setdefault(topic, {})[str(queue_id)] = of_store.offsets[topic, queue_id]
        found[uri] = {"queues": queues} | ({"anchor": asdict(of_store.anchor)} if of_store.anchor else {})
    return found


def from_json(found: Mapping[str, Any]) -> Position:
    """Parse a position of Spark's checkpoint. Raises BadRequestError when it is not mqproc's."""
    position: Position = {}
    try:
        for uri, of_store in found.items():
            offsets = {
                (topic, int(queue_id)): int(offset)
                for topic, queues in of_store["queues"].items()
                for queue_id, offset in queues.items()
            }
            position[uri] = StorePosition(offsets, Anchor(**of_store["anchor"]) if "anchor" in of_store else None)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadRequestError(f"the checkpoint's offsets are not mqproc's: {str(found)[:200]}: {error}") from None
    return position


def share_limit(limit: int, lags: Mapping[Any, int]) -> dict[Any, int]:
    """Share `limit` messages among queues in proportion to their lag."""
    total = sum(lags.values())
    if total <= limit:
        return dict(lags)
    shares = {queue: limit * lag // total for queue, lag in lags.items()}
    # The remainder goes to the queues that lost most by rounding down.
    by_loss = sorted(lags, key=lambda queue: (-(limit * lags[queue] % total), queue))
    for queue in by_loss[: limit - sum(shares.values())]:
        shares[queue] += 1
    return shares


class LiveStore:
    """One store in a folder of this machine."""

    def __init__(self, uri: str) -> None:
        """Raises BadRequestError for a store on remote storage."""
        if "://" in uri:
            raise BadRequestError(f"{uri}: a stream reads a store's queues, which remote storage does not have")
        self.uri = uri
        self._io = StoreIO()
        self._paths = StorePaths(Path(uri))
        self._reader: StoreReader | None = None
        self._opened_s = 0.0
        self._group: tuple[int, ...] = ()
        self._options: Options | None = None

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def state(self) -> tuple[tuple[int, ...], bool]:
        """(identity of the running group or (), whether queues are complete).

        They are not while the group recovers.
        """
        words = open_control(self._io, self._paths.control) if lock_holder(self._io, self._paths) else None
        if words is None:
            return (), True
        recovers = words[control.GROUP_STATE] in (control.GROUP_RECOVERING, control.GROUP_DOWN)
        return identity_of(words.cells), not recovers

    @property
    def reader(self) -> StoreReader:
        """A current reader. Raises StoreAccessError when the store does not exist."""
        group = self.state()[0]
        age_s = time.monotonic() - self._opened_s
        if self._reader is None or group != self._group or (not group and age_s > _FILES_AGE_S):
            self.close()
            self._group = group
            self._reader = StoreReader(self.uri)
            self._options = self._reader.options
            self._opened_s = time.monotonic()
        return self._reader

    def queues(self, selection: ReadSelection) -> dict[Queue, QueueBounds] | None:
        """The existing selected queues; None while a group recovers."""
        before = self.state()
        while before[1]:
            try:
                found = self._queues(selection)
            except (OSError, MqprocError):
                if self.state() == before:
                    raise
            else:
                if self.state() == before:
                    return found
            self.close()
            before = self.state()
        return None

    def _queues(self, selection: ReadSelection) -> dict[Queue, QueueBounds]:
        queues = self.reader.reading.queues
        topics = [topic for topic in queues.topics() if selection.includes_topic(topic)]
        return {
            (topic, queue_id): bounds
            for topic, queue_id, bounds in each_queue(queues, topics)
            if selection.includes(topic, queue_id)
        }

    def deleted(self) -> Mapping[Queue, int]:
        """The end offset of each deleted queue."""
        found = read_deleted(self._io, self._paths, running=self.reader.running)
        return {queue: next_offset for queue, (_place, next_offset) in found.items()}

    def anchor(self, queue: Queue, offset: int) -> Anchor | None:
        """The message at an offset, or None."""
        reader = self.reader
        stored_ms = reader.store_time_ms(*queue, offset)
        if stored_ms < 0:
            return None
        try:
            units = as_units(reader.reading.files.read_units(*queue, offset, 1))
        except FileNotFoundError:
            return None
        return Anchor(*queue, offset, int(units["physical_offset"][0]), stored_ms) if len(units) else None

    def store_selection(self, selection: ReadSelection) -> StoreSelection:
        """The store as a task needs it. File sizes are fixed, so it may be recovering now."""
        options = self._options or self.reader.options
        size, queue_file_bytes = options.mapped_file_size_commit_log, options.consume_queue_file_bytes
        return StoreSelection(self.uri, size, selection, queue_file_bytes=queue_file_bytes)


class LiveStores:
    """All stores at some paths; new stores are found as they appear."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = tuple(paths)
        self._stores: dict[str, LiveStore] = {}

    def close(self) -> None:
        for store in self._stores.values():
            store.close()
        self._stores = {}

    def all(self) -> list[LiveStore]:
        """The existing stores. Raises StoreAccessError when a path names none."""
        return [self.get(uri) for uri in find_stores(self._paths)]

    def get(self, uri: str) -> LiveStore:
        """The store that a checkpoint names."""
        return self._stores.setdefault(uri, LiveStore(uri))

    def queues(self, selection: ReadSelection) -> dict[str, dict[Queue, QueueBounds]]:
        """The selected queues of all stores that do not recover."""
        return {store.uri: found for store in self.all() if (found := store.queues(selection)) is not None}

    def all_queues(self, selection: ReadSelection) -> dict[str, dict[Queue, QueueBounds]]:
        """The selected queues of all stores once none recovers. Raises StoreAccessError."""
        deadline = time.monotonic() + _WAIT_S
        while len(found := self.queues(selection)) < len(stores := self.all()):
            if time.monotonic() > deadline:
                busy = next(store.uri for store in stores if store.uri not in found)
                raise StoreAccessError(f"{busy}: its group still recovers after {_WAIT_S:g} s")
            time.sleep(_POLL_S)
        return found


# The reader


def commit_progress(group: str, position: Position, committed: dict[Place, int]) -> None:
    """Commit a position as a consumer group's, for lag and retention.

    `committed` holds the offsets that earlier calls have committed. Raises GroupInUseError when consumers own the
    queues.
    """
    for uri, of_store in position.items():
        new = {queue: offset for queue, offset in of_store.offsets.items() if committed.get((uri, queue)) != offset}
        if not new:
            continue
        with suppress(*_RETRIED), Client(uri) as client:
            for queue, offset in new.items():
                # The query restarted from an older checkpoint, and committed offsets do not go back; or its
                # checkpoint has a queue that was deleted.
                with suppress(StaleOffsetError, NoSuchQueueError, TopicNotFoundError):
                    client.groups.commit(group, *queue, offset)
                committed[uri, queue] = offset


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream of the queues of stores, for one query; `read` runs in other processes."""

    def __init__(self, options: StreamOptions, names: Sequence[str]) -> None:
        self.options = options
        self.names = list(names)
        self._stores: LiveStores | None = None
        self._target: Position | None = None
        self._checked = False
        self._is_new = False
        self._committed: dict[Place, int] = {}
        self._committed_at: dict[str, Any] = {}

    # The start of a query

    def initialOffset(self) -> dict[str, Any]:
        """Called for a query without a checkpoint, and when its first micro-batch is repeated."""
        self._is_new = True
        found = self._live().all_queues(self._selection)
        return to_json({uri: StorePosition(self._beginning(uri, queues)) for uri, queues in found.items()})

    def _beginning(self, uri: str, queues: dict[Queue, QueueBounds]) -> dict[Queue, int]:
        for queue in self.options.starting.by_queue:
            if queue not in queues and self._selection.includes(*queue) and self._fails:
                raise BadRequestError(f"{uri}: startingOffsets: there is no queue {queue[1]} of {queue[0]}")
        return {queue: self._begin(uri, queue, bounds) for queue, bounds in queues.items()}

    def _begin(self, uri: str, queue: Queue, bounds: QueueBounds) -> int:
        if self.options.starting_ms is not None:
            return self._live().get(uri).reader.offset_at(*queue, self.options.starting_ms)
        offset = self.options.starting.of(*queue)
        if offset in (EARLIEST, LATEST):
            return bounds.min_offset if offset == EARLIEST else bounds.max_offset
        if not bounds.min_offset <= offset <= bounds.max_offset and self._fails:
            raise BadRequestError(
                f"{uri}: startingOffsets {offset:,} of queue {queue[1]} of {queue[0]}: offsets there are "
                f"[{bounds.min_offset:,}, {bounds.max_offset:,})"
            )
        return min(max(offset, bounds.min_offset), bounds.max_offset)

    # Limits

    def getDefaultReadLimit(self) -> ReadLimit:
        # ReadAllAvailable would mean that this is the only micro-batch.
        return ReadMaxRows(self.options.offsets_per_trigger_max or _NO_LIMIT)

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = _ends(self._live().all_queues(self._selection))

    def reportLatestOffset(self) -> dict[str, Any]:
        """The ends of all queues, for progress reports."""
        return to_json(_ends(self._live().queues(self._selection)))

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """The end of the next micro-batch. Raises CorruptStoreError when messages are lost."""
        is_new, self._is_new = self._is_new, False
        if is_new and not isinstance(limit, ReadAllAvailable):
            return start
        position = from_json(start)
        self._check(position)
        found = self._live().queues(self._selection)
        self._check_anchors(position, found.keys())
        self._check_gone(position, found)
        if not is_new:
            self._commit_progress(start, position)
        places = {(uri, queue): bounds for uri, queues in found.items() for queue, bounds in queues.items()}
        lags = {place: lag for place, bounds in places.items() if (lag := self._lag(position, place, bounds)) > 0}
        self._advance(position, share_limit(limit.max_rows if isinstance(limit, ReadMaxRows) else _NO_LIMIT, lags))
        return to_json(position)

    def _commit_progress(self, start: dict[str, Any], position: Position) -> None:
        """Commit the query's progress for the option `consumerGroup`.

        Spark asks for the next micro-batch once the one that ends at `start` is committed, also after the last one, but
        calls `commit` only with the next one. It asks often, so each position is committed once.
        """
        if self.options.consumer_group and start != self._committed_at:
            commit_progress(self.options.consumer_group, position, self._committed)
            self._committed_at = start

    def _lag(self, position: Position, place: Place, bounds: QueueBounds) -> int:
        """Unread messages of a queue; 0 for a new one, which enters at its first message."""
        uri, queue = place
        of_store = position.setdefault(uri, StorePosition())
        offsets, anchor = of_store.offsets, of_store.anchor
        if queue not in offsets:
            offsets[queue] = bounds.min_offset
            return 0
        if not bounds.min_offset <= offsets[queue] <= bounds.max_offset:
            offsets[queue] = self._lost(place, offsets[queue], bounds)
            if anchor is not None and anchor.queue == queue and anchor.queue_offset >= bounds.max_offset:
                of_store.anchor = None  # It is gone too, and another message will take its place.
        stop = bounds.max_offset
        if self._target is not None:
            stop = min(stop, self._target.get(uri, StorePosition()).offsets.get(queue, 0))
        return stop - offsets[queue]

    def _lost(self, place: Place, at: int, bounds: QueueBounds) -> int:
        """Where to continue in a queue whose next message is missing."""
        uri, (topic, queue_id) = place
        if self._fails:
            low, high = bounds.min_offset, bounds.max_offset
            cause = f"the next offset is {at:,}, but it ends at {high:,}: messages that were read are gone"
            if at < low:
                cause = f"offsets [{at:,}, {low:,}) were deleted before they were read"
            raise CorruptStoreError(f"{uri}: queue {queue_id} of {topic}: {cause}; failOnDataLoss=false continues")
        return min(max(at, bounds.min_offset), bounds.max_offset)

    def _advance(self, position: Position, shares: dict[Place, int]) -> None:
        largest: dict[str, tuple[int, Queue]] = {}
        for (uri, queue), count in shares.items():
            position[uri].offsets[queue] += count
            if count:
                largest[uri] = max(largest.get(uri, (0, queue)), (count, queue))
        for uri, (_count, queue) in largest.items():
            anchor = self._live().get(uri).anchor(queue, position[uri].offsets[queue] - 1)
            position[uri].anchor = anchor or position[uri].anchor

    # Checks that the stores are those of the checkpoint

    def _check(self, position: Position) -> None:
        """Check once, when a query starts or continues."""
        if self._checked:
            return
        there = self._live().all_queues(self._selection)
        if position and not position.keys() & there.keys():
            raise BadRequestError(f"the checkpoint is of {', '.join(position)}; the path means {', '.join(there)}")
        self._check_anchors(position, there.keys())
        self._checked = True

    def _check_anchors(self, position: Position, there: Collection[str]) -> None:
        for uri in position.keys() & there:
            if (known := position[uri].anchor) is None:
                continue
            store = self._live().get(uri)
            found = store.anchor(known.queue, known.queue_offset)
            if found not in (None, known) and known.queue_offset >= store.reader.min_offset(*known.queue):
                raise BadRequestError(
                    f"{uri}: the checkpoint is of another store: it has read offset {known.queue_offset:,} of queue "
                    f"{known.queue_id} of {known.topic} at log position {known.physical_offset:,}, where this one has "
                    f"another message"
                )

    def _check_gone(self, position: Position, found: dict[str, dict[Queue, QueueBounds]]) -> None:
        """Raise CorruptStoreError for missing stores and queues that were not read to their end."""
        if not self._fails:
            return
        there = {store.uri for store in self._live().all()}
        for uri, of_store in position.items():
            if uri not in there:
                raise CorruptStoreError(f"{uri}: the store is gone; failOnDataLoss=false continues without it")
            if uri in found:
                self._check_queues(uri, of_store, found[uri])

    def _check_queues(self, uri: str, of_store: StorePosition, found: dict[Queue, QueueBounds]) -> None:
        gone = {queue for queue in of_store.offsets.keys() - found.keys() if self._selection.includes(*queue)}
        ended = self._live().get(uri).deleted() if gone else {}
        for queue in sorted(gone):
            if of_store.offsets[queue] < ended.get(queue, _NO_LIMIT):
                raise CorruptStoreError(
                    f"{uri}: queue {queue[1]} of {queue[0]} is gone, and was not read to its end; "
                    "failOnDataLoss=false continues without it"
                )

    # Micro-batches

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        from mqproc.spark.partitions import partitioned
        from mqproc.spark.planning import partition_of

        self._is_new = False
        first, last = from_json(start), from_json(end)
        self._check(last)
        stores: list[StoreSelection] = []
        slices: list[tuple[int, QueueSlice]] = []
        for uri, of_store in last.items():
            found = self._slices(uri, first.get(uri, StorePosition()).offsets, of_store.offsets)
            if found:
                slices += [(len(stores), each) for each in found]
                stores.append(self._live().get(uri).store_selection(self._selection))
        return [
            partition_of(stores, [], some)
            for some in partitioned(slices, self.options.records_per_partition_max, self.options.read.min_partitions)
        ]

    def _slices(self, uri: str, begins: dict[Queue, int], ends: dict[Queue, int]) -> list[QueueSlice]:
        """The messages between two offsets; none of a queue that enters the position now."""
        begins = {queue: begins.get(queue, stop) for queue, stop in ends.items()}
        if not self._fails:
            there = self._live().get(uri).queues(self._selection) or {}
            begins = {queue: max(at, there[queue].min_offset) if queue in there else at for queue, at in begins.items()}
        return [QueueSlice(*queue, begins[queue], stop) for queue, stop in ends.items() if begins[queue] < stop]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from mqproc.spark.batches import read_partition
        from mqproc.spark.worker import run_task

        found: LogPartition = partition  # type: ignore[assignment]
        return run_task(read_partition(self.options.read, self.names, found))

    def stop(self) -> None:
        if self._stores is not None:
            self._stores.close()

    @property
    def _fails(self) -> bool:
        return self.options.read.fail_on_data_loss

    @property
    def _selection(self) -> ReadSelection:
        return self.options.read.selection

    def _live(self) -> LiveStores:
        if self._stores is None:
            self._stores = LiveStores(self.options.read.paths)
        return self._stores


def _ends(found: dict[str, dict[Queue, QueueBounds]]) -> Position:
    return {
        uri: StorePosition({queue: bounds.max_offset for queue, bounds in queues.items()})
        for uri, queues in found.items()
    }
