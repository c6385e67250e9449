"""`readStream.format("mqproc")`: the calls that Spark makes while a query runs.

    initialOffset ──▶ latestOffset(start, limit) ──▶ partitions(start, end) ──▶ read, in tasks
                           ▲─────────────────────────────────────────────────────────┘

Only Spark's checkpoint keeps offsets. The rows and partitions of a micro-batch depend on its two offsets alone, so that
repeating it after a crash gives the same rows.

The first micro-batch of a query is empty and records where the query starts. A queue or store that appears later starts
at its first message, which an offset records before anything of it is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from mqproc.client import Client
from mqproc.errors import (
    BadRequestError,
    CorruptStoreError,
    NoSuchQueueError,
    NotRunningError,
    RequestTimeoutError,
    RetryLaterError,
    SendOutcomeUnknownError,
    StaleOffsetError,
    TopicNotFoundError,
)
from mqproc.spark.options import EARLIEST, LATEST, Queue, ReadSelection, StreamOptions
from mqproc.spark.partitions import LogPartition, QueueSlice, StoreSelection
from mqproc.spark.stream_stores import (
    Bounds,
    LiveStore,
    LiveStores,
    Place,
    Position,
    StorePosition,
    from_json,
    share_limit,
    to_json,
)

if TYPE_CHECKING:
    import pyarrow as pa

_NO_LIMIT: Final = 1 << 60
# After these errors the next micro-batch commits again.
_RETRIED: Final = (NotRunningError, RequestTimeoutError, RetryLaterError, SendOutcomeUnknownError)


def commit_progress(group: str, position: Position, committed: Mapping[Place, int]) -> dict[Place, int]:
    """Commit a position as a consumer group's, for lag and retention.

    Returns the committed offsets by queue, which `committed` holds from earlier calls. Raises GroupInUseError when
    consumers own the queues.
    """
    done = dict(committed)
    for uri, store_position in position.items():
        new = {queue: offset for queue, offset in store_position.offsets.items() if done.get((uri, queue)) != offset}
        if not new:
            continue
        try:
            with Client(uri) as client:
                for queue, offset in new.items():
                    _commit(client, group, *queue, offset)
                    done[uri, queue] = offset
        except _RETRIED:
            continue
    return done


def _commit(client: Client, group: str, topic: str, queue_id: int, offset: int) -> None:
    try:
        client.groups.commit(group, topic, queue_id, offset)
    except (StaleOffsetError, NoSuchQueueError, TopicNotFoundError):
        # The query restarted from an older checkpoint, and committed offsets do not go back; or its checkpoint has a
        # queue that was deleted.
        return


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

    def _beginning(self, uri: str, queues: dict[Queue, Bounds]) -> dict[Queue, int]:
        for queue in self.options.starting.by_queue:
            if queue not in queues and self._selection.includes(*queue) and self._fails:
                raise BadRequestError(f"{uri}: startingOffsets: there is no queue {queue[1]} of {queue[0]}")
        return {queue: self._begin(uri, queue, bounds) for queue, bounds in queues.items()}

    def _begin(self, uri: str, queue: Queue, bounds: Bounds) -> int:
        if self.options.starting_ms is not None:
            return self._live().get(uri).reader.offset_at(*queue, self.options.starting_ms)
        offset = self.options.starting.of(*queue)
        if offset in (EARLIEST, LATEST):
            return bounds.low if offset == EARLIEST else bounds.high
        if not bounds.low <= offset <= bounds.high and self._fails:
            raise BadRequestError(
                f"{uri}: startingOffsets {offset:,} of queue {queue[1]} of {queue[0]}: offsets there are "
                f"[{bounds.low:,}, {bounds.high:,})"
            )
        return min(max(offset, bounds.low), bounds.high)

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
        lags: dict[Place, int] = {}
        for uri, queues in found.items():
            for queue, bounds in queues.items():
                self._lag(position, lags, (uri, queue), bounds)
        self._advance(position, share_limit(limit.max_rows if isinstance(limit, ReadMaxRows) else _NO_LIMIT, lags))
        return to_json(position)

    def _commit_progress(self, start: dict[str, Any], position: Position) -> None:
        """Commit the query's progress for the option `consumerGroup`.

        Spark asks for the next micro-batch once the one that ends at `start` is committed, also after the last one, but
        calls `commit` only with the next one. It asks often, so each position is committed once.
        """
        if self.options.consumer_group and start != self._committed_at:
            self._committed = commit_progress(self.options.consumer_group, position, self._committed)
            self._committed_at = start

    def _lag(self, position: Position, lags: dict[Place, int], place: Place, bounds: Bounds) -> None:
        """Note a queue's lag. A new queue enters the position at its first message."""
        uri, queue = place
        store_position = position.setdefault(uri, StorePosition())
        offsets = store_position.offsets
        if queue not in offsets:
            offsets[queue] = bounds.low
            return
        if not bounds.low <= offsets[queue] <= bounds.high:
            offsets[queue] = self._lost(place, offsets[queue], bounds)
            if (
                store_position.anchor is not None
                and store_position.anchor.queue == queue
                and store_position.anchor.queue_offset >= bounds.high
            ):
                store_position.anchor = None  # It is gone too, and another message will take its place.
        stop = bounds.high
        if self._target is not None:
            stop = min(stop, self._target.get(uri, StorePosition()).offsets.get(queue, 0))
        if stop > offsets[queue]:
            lags[place] = stop - offsets[queue]

    def _lost(self, place: Place, at: int, bounds: Bounds) -> int:
        """Where to continue in a queue whose next message is missing."""
        uri, (topic, queue_id) = place
        if self._fails:
            cause = (
                f"offsets [{at:,}, {bounds.low:,}) were deleted before they were read"
                if at < bounds.low
                else f"the next offset is {at:,}, but it ends at {bounds.high:,}: messages that were read are gone"
            )
            raise CorruptStoreError(f"{uri}: queue {queue_id} of {topic}: {cause}; failOnDataLoss=false continues")
        return min(max(at, bounds.low), bounds.high)

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
            self._check_anchor(self._live().get(uri), position[uri])

    def _check_anchor(self, store: LiveStore, store_position: StorePosition) -> None:
        known = store_position.anchor
        if known is None:
            return
        found = store.anchor(known.queue, known.queue_offset)
        if found not in (None, known) and known.queue_offset >= store.reader.min_offset(*known.queue):
            raise BadRequestError(
                f"{store.uri}: the checkpoint is of another store: it has read offset {known.queue_offset:,} of queue "
                f"{known.queue_id} of {known.topic} at log position {known.physical_offset:,}, where this one has "
                f"another message"
            )

    def _check_gone(self, position: Position, found: dict[str, dict[Queue, Bounds]]) -> None:
        """Raise CorruptStoreError for missing stores and queues that were not read to their end."""
        if not self._fails:
            return
        there = {store.uri for store in self._live().all()}
        for uri, store_position in position.items():
            if uri not in there:
                raise CorruptStoreError(f"{uri}: the store is gone; failOnDataLoss=false continues without it")
            if uri in found:
                self._check_queues(uri, store_position, found[uri])

    def _check_queues(self, uri: str, store_position: StorePosition, found: dict[Queue, Bounds]) -> None:
        gone = {queue for queue in store_position.offsets.keys() - found.keys() if self._selection.includes(*queue)}
        ended = self._live().get(uri).deleted() if gone else {}
        for queue in sorted(gone):
            if store_position.offsets[queue] < ended.get(queue, _NO_LIMIT):
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
        for uri, store_position in last.items():
            found = self._slices(uri, first.get(uri, StorePosition()).offsets, store_position.offsets)
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
            begins = {queue: max(at, there[queue].low) if queue in there else at for queue, at in begins.items()}
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


def _ends(found: dict[str, dict[Queue, Bounds]]) -> Position:
    return {
        uri: StorePosition({queue: bounds.high for queue, bounds in queues.items()}) for uri, queues in found.items()
    }
