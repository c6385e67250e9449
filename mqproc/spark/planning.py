"""Cutting the logs of stores into partitions: what cannot hold a wanted message is left out.

    Survey ──times, offsets, keys──▶ spans of the log ──at segments and splits──▶ LogRanges ──packed──▶ LogPartitions
       └──few queues──▶ slices of queues ───────────────────────────────────────────────────────────────────┘

A span is left out only on proof: a record whose own store time or queue offset says so. Which of the records in the
rest are wanted, the kernel decides.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final

from mqproc.errors import BadRequestError, CorruptStoreError
from mqproc.message import PullStatus
from mqproc.spark.by_units import slices_by_units
from mqproc.spark.key_spans import key_spans
from mqproc.spark.options import EARLIEST, LATEST, TIME_MAX, TIME_MIN, Offsets, Queue, ReadOptions, Selection
from mqproc.spark.ranges import LogPartition, LogRange, QueueSlice, StoreSelection
from mqproc.spark.slicing import Slices, partitioned
from mqproc.spark.stores import Survey, find_stores, survey
from mqproc.spark.times import time_span

MIB: Final = 1 << 20
SPLIT_BYTES_MIN: Final = 256 * MIB
# A task that passes over bodies is through with so much in a third of the time.
SPLIT_BYTES_MIN_WITHOUT_BODIES: Final = 512 * MIB
SPLIT_BYTES_MAX: Final = 1024 * MIB
# Each task costs tens of milliseconds of a core: so many are enough for any machine.
_SPLITS: Final = 64
# An hour of a core's.
_SPLITS_MAX: Final = 100_000

Span = tuple[int, int]
"""Log positions [start, stop). Where one begins or ends inside a segment, a record does."""


def plan(options: ReadOptions) -> list[LogPartition]:
    """The partitions of a batch read, one at least.

    Raises StoreAccessError for a path without a store, CorruptStoreError for damage that is seen already now, or for
    offsets that are not there, BadRequestError for queues that are not there, unless `fail_on_data_loss` is off.
    """
    stores: list[StoreSelection] = []
    spans: list[tuple[int, Survey, list[Span]]] = []
    slices: Slices = []
    surveys: list[Survey] = []
    try:
        for uri in find_stores(options.paths):
            found = survey(uri)
            surveys.append(found)
            if found.trouble and options.fail_on_data_loss:
                raise CorruptStoreError(f"{uri}: {found.trouble}; failOnDataLoss=false reads what there is")
            selection = _resolved(found, options)
            of_queues, of_log = _taken(found, selection, options)
            spans.append((len(stores), found, of_log))
            slices += [(len(stores), each) for each in of_queues]
            stores.append(StoreSelection(uri, found.segment_size, selection, found.deleted, _queue_file_bytes(found)))
        by_units = [partition_of(stores, [], some) for some in partitioned(slices, 0, options.min_partitions)]
        return [*by_units, *_pack(stores, spans, options)] or [LogPartition([], [])]
    finally:
        for each in surveys:
            each.close()


def _resolved(found: Survey, options: ReadOptions) -> Selection:
    """The selection with its offsets looked up in the store's queues."""
    selection = options.selection
    given = [*selection.starting.by_queue, *selection.ending.by_queue]
    if found.reader is None or not options.fail_on_data_loss:
        return selection
    for queue in dict.fromkeys(given):
        if not selection.takes(*queue):
            continue
        if found.reader.reading.queues.bounds(*queue) is None:
            name = "startingOffsets" if queue in selection.starting.by_queue else "endingOffsets"
            raise BadRequestError(
                f"{found.uri}: {name}: there is no queue {queue[1]} of {queue[0]}; failOnDataLoss=false reads others"
            )
        low, high = found.reader.min_offset(*queue), found.reader.max_offset(*queue)
        for name, offset in (("starting", selection.starting.of(*queue)), ("ending", selection.ending.of(*queue))):
            if offset >= 0 and not low <= offset <= high:
                raise CorruptStoreError(
                    f"{found.uri}: {name}Offsets {offset:,} of queue {queue[1]} of {queue[0]}: offsets there are "
                    f"[{low:,}, {high:,}); failOnDataLoss=false takes what there is of them"
                )
    return selection


def _queue_file_bytes(found: Survey) -> int:
    return found.reader.options.consume_queue_file_bytes if found.reader is not None else 0


def _taken(found: Survey, selection: Selection, options: ReadOptions) -> tuple[list[QueueSlice], list[Span]]:
    """Which slices of queues and which spans of the log, ascending, have to be looked at of a store."""
    if not found.segments:
        return [], []
    last = found.segments[-1]
    begin, end = found.begin, last.start + last.limit
    if (selection.begin_ms, selection.end_ms) != (TIME_MIN, TIME_MAX):
        begin, end = time_span(found, begin, end, selection, options.clock_step_ms)
    by_units = slices_by_units(found, selection, options, begin, end)
    if by_units is not None:
        slices, begin = by_units
        return slices, [(begin, end)] if begin < end else []
    low, high = _offset_span(found, selection, begin, end)
    if low >= high:
        return [], []
    if selection.keys and found.reader is not None:
        return [], list(key_spans(found, selection, low, high))
    return [], [(low, high)]


def _offset_span(found: Survey, selection: Selection, begin: int, end: int) -> Span:
    """Narrowed to where the named queues have the wanted offsets: positions ascend with offsets in each queue."""
    queues = selection.named_queues()
    if found.reader is None or not queues or any(queue in found.deleted for queue in queues):
        return begin, end
    starts = [_position(found, queue, selection.starting, EARLIEST) for queue in queues]
    stops = [_position(found, queue, selection.ending, LATEST) for queue in queues]
    low = max(begin, min(each for each in starts if each is not None)) if None not in starts else begin
    high = min(end, max(each for each in stops if each is not None)) if None not in stops else end
    return low, high


def _position(found: Survey, queue: Queue, offsets: Offsets, none: int) -> int | None:
    """Log position of the record with a queue's starting or ending offset; None when nothing proves one."""
    assert found.reader is not None
    offset = offsets.of(*queue)
    if offset == none or offset < 0:
        return None
    pulled = found.reader.pull(*queue, offset, 1)
    if pulled.status is not PullStatus.FOUND or pulled.messages[0].queue_offset != offset:
        return None
    return pulled.messages[0].physical_offset


def _pack(
    stores: list[StoreSelection], spans: Sequence[tuple[int, Survey, list[Span]]], options: ReadOptions
) -> list[LogPartition]:
    """Ranges of at most a split each, small ones together in a partition."""
    total = sum(stop - start for _number, _found, of_store in spans for start, stop in of_store)
    split = split_bytes(total, options)
    packed: list[list[tuple[int, LogRange]]] = []
    room = 0
    for number, found, of_store in spans:
        for of in _cut(found, of_store, max(split, found.segment_size) if found.archived else split):
            size = of.stop - of.start
            if not packed or size > room:
                packed.append([])
                room = split
            packed[-1].append((number, of))
            room -= size
    return [partition_of(stores, ranges, []) for ranges in packed]


def partition_of(stores: list[StoreSelection], ranges: list[tuple[int, LogRange]], slices: Slices) -> LogPartition:
    """With the stores that it needs only: every task carries them."""
    needed = sorted({number for number, _of in [*ranges, *slices]})
    return LogPartition(
        [stores[number] for number in needed],
        [(needed.index(number), of) for number, of in ranges],
        [(needed.index(number), each) for number, each in slices],
    )


def split_bytes(total: int, options: ReadOptions) -> int:
    """Bytes of log for each task, of `total`. Raises BadRequestError for so few that no driver gets through them."""
    if options.split_bytes and total // options.split_bytes > _SPLITS_MAX:
        raise BadRequestError(
            f"option splitBytes = {options.split_bytes:,} makes {total // options.split_bytes:,} partitions of "
            f"{total:,} bytes of log; the limit is {_SPLITS_MAX:,}"
        )
    reads_bodies = not options.columns or "body" in options.columns
    least = SPLIT_BYTES_MIN if reads_bodies else SPLIT_BYTES_MIN_WITHOUT_BODIES
    split = options.split_bytes or min(SPLIT_BYTES_MAX, max(least, -(-total // _SPLITS)))
    return max(1, min(split, -(-total // options.min_partitions)))


def _cut(found: Survey, spans: Sequence[Span], split: int) -> Iterator[LogRange]:
    """Spans cut at the ends of segments and into pieces of a split at most, equal ones within a segment."""
    size = found.segment_size
    for start, stop in spans:
        for segment in found.segments:
            low, high = max(start - segment.start, 0), min(stop - segment.start, segment.limit)
            if low >= high:
                continue
            pieces = -(-(high - low) // split)
            borders = [low + (high - low) * piece // pieces for piece in range(pieces + 1)]
            is_open = found.end is None and segment is found.segments[-1]
            for first, last in itertools.pairwise(borders):
                yield LogRange(
                    segment.start,
                    first,
                    last,
                    segment.limit,
                    size,
                    exact_start=first == low,
                    exact_stop=last == high,
                    open_end=is_open,
                )
