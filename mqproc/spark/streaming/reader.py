"""`readStream.format("mqproc")`: what Spark asks while a query runs.

    initialOffset ──▶ latestOffset(start, limit) ──▶ partitions(start, end) ──▶ read, in tasks
                           ▲─────────────────────────────────────────────────────────┘

Offsets are kept by Spark's checkpoint alone. Rows of a micro-batch follow from its two offsets and nothing else, so one
that is done again after a crash has the same rows in the same partitions.

A query's first micro-batch is empty: it writes down where the query begins. A queue or store that appears later begins
at its first message, which is written down in the same way before anything of it is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from mqproc.errors import BadRequestError, CorruptStoreError
from mqproc.spark.options import EARLIEST, LATEST, Queue, Selection, StreamOptions
from mqproc.spark.ranges import LogPartition, QueueSlice, StoreSelection
from mqproc.spark.streaming.offsets import Place, Position, StorePosition, from_json, shared, to_json

if TYPE_CHECKING:
    import pyarrow as pa

    from mqproc.spark.streaming.live import Bounds, LiveStore, LiveStores

_NO_LIMIT: Final = 1 << 60


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream of the queues of stores. It lives as long as the query runs; `read` alone is called elsewhere."""

    def __init__(self, options: StreamOptions, names: Sequence[str]) -> None:
        self.options = options
        self.names = list(names)
        self._stores: LiveStores | None = None
        self._target: Position | None = None
        self._checked = False
        self._is_new = False
        self._told: dict[Place, int] = {}
        self._told_of: dict[str, Any] = {}

    # Where a query begins

    def initialOffset(self) -> dict[str, Any]:
        """Asked of a query without a checkpoint, or whose first micro-batch is done again."""
        self._is_new = True
        found = self._live().all_queues(self._selection)
        return to_json({uri: StorePosition(self._beginning(uri, queues)) for uri, queues in found.items()})

    def _beginning(self, uri: str, queues: dict[Queue, Bounds]) -> dict[Queue, int]:
        for queue in self.options.starting.by_queue:
            if queue not in queues and self._selection.takes(*queue) and self._fails:
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

    # How far it may go

    def getDefaultReadLimit(self) -> ReadLimit:
        # Never "all": that is how a trigger says that this is the only micro-batch.
        return ReadMaxRows(self.options.offsets_per_trigger_max or _NO_LIMIT)

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = _ends(self._live().all_queues(self._selection))

    def reportLatestOffset(self) -> dict[str, Any]:
        """For progress reports: the ends of all queues."""
        return to_json(_ends(self._live().queues(self._selection)))

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Up to where the next micro-batch goes. Raises CorruptStoreError for messages that are lost."""
        is_new, self._is_new = self._is_new, False
        if is_new and not isinstance(limit, ReadAllAvailable):
            return start
        position = from_json(start)
        self._check(position)
        found = self._live().queues(self._selection)
        self._check_anchors(position, found.keys())
        self._check_gone(position, found)
        if not is_new:
            self._tell(start, position)
        lags: dict[Place, int] = {}
        for uri, queues in found.items():
            for queue, bounds in queues.items():
                self._lag(position, lags, (uri, queue), bounds)
        self._advance(position, shared(limit.max_rows if isinstance(limit, ReadMaxRows) else _NO_LIMIT, lags))
        return to_json(position)

    def _tell(self, start: dict[str, Any], position: Position) -> None:
        """Say in the stores how far the query is, when a consumer group was named.

        Spark asks for the next micro-batch when the one that ends at `start` is committed, behind the last one too;
        `commit` it calls with the next one only. It asks often, so each position is told once.
        """
        if self.options.consumer_group and start != self._told_of:
            from mqproc.spark.streaming.progress import tell

            self._told = tell(self.options.consumer_group, position, self._told)
            self._told_of = start

    def _lag(self, position: Position, lags: dict[Place, int], place: Place, bounds: Bounds) -> None:
        """Note how many messages wait in a queue; a new queue enters the position, at its first message."""
        uri, queue = place
        of = position.setdefault(uri, StorePosition())
        offsets = of.offsets
        if queue not in offsets:
            offsets[queue] = bounds.low
            return
        if not bounds.low <= offsets[queue] <= bounds.high:
            offsets[queue] = self._lost(place, offsets[queue], bounds)
            if of.anchor is not None and of.anchor.queue == queue and of.anchor.queue_offset >= bounds.high:
                of.anchor = None  # It is gone as well, and another message will have its place.
        stop = bounds.high
        if self._target is not None:
            stop = min(stop, self._target.get(uri, StorePosition()).offsets.get(queue, 0))
        if stop > offsets[queue]:
            lags[place] = stop - offsets[queue]

    def _lost(self, place: Place, at: int, bounds: Bounds) -> int:
        """Where to go on in a queue that does not have the next message."""
        uri, (topic, queue_id) = place
        if self._fails:
            what = (
                f"offsets [{at:,}, {bounds.low:,}) are deleted and have not been read"
                if at < bounds.low
                else f"the next offset is {at:,}, but it ends at {bounds.high:,}: what was read is gone"
            )
            raise CorruptStoreError(
                f"{uri}: queue {queue_id} of {topic}: {what}; failOnDataLoss=false goes on where it can"
            )
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

    # Whether the stores are those of the checkpoint

    def _check(self, position: Position) -> None:
        """When a query goes on. What it goes on with is looked at each time."""
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

    def _check_anchor(self, store: LiveStore, of: StorePosition) -> None:
        known = of.anchor
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
        """Raise CorruptStoreError for stores and queues that were not read to their end and are not there any more."""
        if not self._fails:
            return
        there = {store.uri for store in self._live().all()}
        for uri, of in position.items():
            if uri not in there:
                raise CorruptStoreError(f"{uri}: the store is gone; failOnDataLoss=false goes on without it")
            if uri in found:
                self._check_queues(uri, of, found[uri])

    def _check_queues(self, uri: str, of: StorePosition, found: dict[Queue, Bounds]) -> None:
        gone = {queue for queue in of.offsets.keys() - found.keys() if self._selection.takes(*queue)}
        ended = self._live().get(uri).deleted() if gone else {}
        for queue in sorted(gone):
            if of.offsets[queue] < ended.get(queue, _NO_LIMIT):
                raise CorruptStoreError(
                    f"{uri}: queue {queue[1]} of {queue[0]} is gone, and was not read to its end; "
                    "failOnDataLoss=false goes on without it"
                )

    # A micro-batch

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        from mqproc.spark.planning import partition_of
        from mqproc.spark.slicing import partitioned

        self._is_new = False
        first, last = from_json(start), from_json(end)
        self._check(last)
        stores: list[StoreSelection] = []
        slices: list[tuple[int, QueueSlice]] = []
        for uri, of in last.items():
            found = self._slices(uri, first.get(uri, StorePosition()).offsets, of.offsets)
            if found:
                slices += [(len(stores), each) for each in found]
                stores.append(self._live().get(uri).selected(self._selection))
        return [
            partition_of(stores, [], some)
            for some in partitioned(slices, self.options.records_per_partition_max, self.options.read.min_partitions)
        ]

    def _slices(self, uri: str, begins: dict[Queue, int], ends: dict[Queue, int]) -> list[QueueSlice]:
        """What lies between two offsets; of a queue that enters the position now, nothing."""
        begins = {queue: begins.get(queue, stop) for queue, stop in ends.items()}
        if not self._fails:
            there = self._live().get(uri).queues(self._selection) or {}
            begins = {queue: max(at, there[queue].low) if queue in there else at for queue, at in begins.items()}
        return [QueueSlice(*queue, begins[queue], stop) for queue, stop in ends.items() if begins[queue] < stop]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from mqproc.spark.tasks import read_partition
        from mqproc.spark.worker import as_task

        found: LogPartition = partition  # type: ignore[assignment]
        return as_task(read_partition(self.options.read, self.names, found))

    def stop(self) -> None:
        if self._stores is not None:
            self._stores.close()

    @property
    def _fails(self) -> bool:
        return self.options.read.fail_on_data_loss

    @property
    def _selection(self) -> Selection:
        return self.options.read.selection

    def _live(self) -> LiveStores:
        from mqproc.spark.streaming.live import LiveStores

        if self._stores is None:
            self._stores = LiveStores(self.options.read.paths)
        return self._stores


def _ends(found: dict[str, dict[Queue, Bounds]]) -> Position:
    return {
        uri: StorePosition({queue: bounds.high for queue, bounds in queues.items()}) for uri, queues in found.items()
    }
