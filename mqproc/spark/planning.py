"""Plan a batch read: cut logs into partitions, without parts that cannot match.

    StoreSurvey ──times, offsets, keys──▶ spans of the log ──segments, splits──▶ LogRanges ──packed──▶ LogPartitions
       └──few queues──▶ slices of queues ──────────────────────────────────────────────────────────────┘

A span is left out only when store times or queue offsets of its records prove that it can be. The kernel selects among
the remaining records.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final

from mqproc.errors import BadRequestError, CorruptStoreError
from mqproc.spark.options import EARLIEST, LATEST, TIME_MAX, TIME_MIN, Offsets, Queue, ReadOptions, ReadSelection
from mqproc.spark.partitions import LogPartition, LogRange, QueueSlice, Slices, StoreSelection, partitioned
from mqproc.spark.pruning import key_spans, slices_by_units, time_span
from mqproc.spark.survey import StoreSurvey, find_stores, survey_store
from mqproc.types import PullStatus

MIB: Final = 1 << 20
SPLIT_BYTES_MIN: Final = 256 * MIB
# Without bodies a task takes a third of the time for the same log.
SPLIT_BYTES_MIN_WITHOUT_BODIES: Final = 512 * MIB
SPLIT_BYTES_MAX: Final = 1024 * MIB
# Each task costs tens of milliseconds of processor time; this many occupy any machine.
_SPLITS: Final = 64
# This many tasks cost an hour of processor time.
_SPLITS_MAX: Final = 100_000

Span = tuple[int, int]
"""Log positions [start, stop). A bound inside a segment is the start of a record."""


def plan(options: ReadOptions) -> list[LogPartition]:
    """Plan the partitions of a batch read, at least one.

    Raises StoreAccessError for a path without a store and, unless `fail_on_data_loss` is off, CorruptStoreError for
    damage and for missing offsets, BadRequestError for missing queues.
    """
    stores: list[StoreSelection] = []
    spans: list[tuple[int, StoreSurvey, list[Span]]] = []
    slices: Slices = []
    surveys: list[StoreSurvey] = []
    try:
        for uri in find_stores(options.paths):
            survey = survey_store(uri)
            surveys.append(survey)
            if survey.damage and options.fail_on_data_loss:
                raise CorruptStoreError(f"{uri}: {survey.damage}; failOnDataLoss=false reads what there is")
            selection = _resolved(survey, options)
            of_queues, of_log = _pruned(survey, selection, options)
            spans.append((len(stores), survey, of_log))
            slices += [(len(stores), each) for each in of_queues]
            stores.append(
                StoreSelection(uri, survey.segment_size, selection, survey.deleted, _queue_file_bytes(survey))
            )
        by_units = [partition_of(stores, [], some) for some in partitioned(slices, 0, options.min_partitions)]
        return [*by_units, *_pack(stores, spans, options)] or [LogPartition([], [])]
    finally:
        for each in surveys:
            each.close()


def _resolved(survey: StoreSurvey, options: ReadOptions) -> ReadSelection:
    """The selection, with its offsets checked against the store's queues."""
    selection = options.selection
    given = [*selection.starting.by_queue, *selection.ending.by_queue]
    if survey.reader is None or not options.fail_on_data_loss:
        return selection
    for queue in dict.fromkeys(given):
        if not selection.includes(*queue):
            continue
        if survey.reader.reading.queues.bounds(*queue) is None:
            name = "startingOffsets" if queue in selection.starting.by_queue else "endingOffsets"
            raise BadRequestError(
                f"{survey.uri}: {name}: there is no queue {queue[1]} of {queue[0]}; failOnDataLoss=false reads others"
            )
        low, high = survey.reader.min_offset(*queue), survey.reader.max_offset(*queue)
        for name, offset in (("starting", selection.starting.of(*queue)), ("ending", selection.ending.of(*queue))):
            if offset >= 0 and not low <= offset <= high:
                raise CorruptStoreError(
                    f"{survey.uri}: {name}Offsets {offset:,} of queue {queue[1]} of {queue[0]}: offsets there are "
                    f"[{low:,}, {high:,}); failOnDataLoss=false takes what there is of them"
                )
    return selection


def _queue_file_bytes(survey: StoreSurvey) -> int:
    return survey.reader.options.consume_queue_file_bytes if survey.reader is not None else 0


def _pruned(survey: StoreSurvey, selection: ReadSelection, options: ReadOptions) -> tuple[list[QueueSlice], list[Span]]:
    """The slices of queues and the ascending spans of the log that must be read of a store."""
    if not survey.segments:
        return [], []
    last = survey.segments[-1]
    begin, end = survey.begin, last.start + last.limit
    if (selection.begin_ms, selection.end_ms) != (TIME_MIN, TIME_MAX):
        begin, end = time_span(survey, begin, end, selection, options.clock_step_ms)
    by_units = slices_by_units(survey, selection, options, begin, end)
    if by_units is not None:
        slices, begin = by_units
        return slices, [(begin, end)] if begin < end else []
    low, high = _offset_span(survey, selection, begin, end)
    if low >= high:
        return [], []
    if selection.keys and survey.reader is not None:
        return [], list(key_spans(survey, selection, low, high))
    return [], [(low, high)]


def _offset_span(survey: StoreSurvey, selection: ReadSelection, begin: int, end: int) -> Span:
    """Narrow [begin, end) to the selected offsets of the named queues."""
    queues = selection.named_queues()
    if survey.reader is None or not queues or any(queue in survey.deleted for queue in queues):
        return begin, end
    starts = [_position(survey, queue, selection.starting, EARLIEST) for queue in queues]
    stops = [_position(survey, queue, selection.ending, LATEST) for queue in queues]
    low = max(begin, min(each for each in starts if each is not None)) if None not in starts else begin
    high = min(end, max(each for each in stops if each is not None)) if None not in stops else end
    return low, high


def _position(survey: StoreSurvey, queue: Queue, offsets: Offsets, none: int) -> int | None:
    """Log position of a queue's starting or ending record; None if it is unknown."""
    assert survey.reader is not None
    offset = offsets.of(*queue)
    if offset == none or offset < 0:
        return None
    pulled = survey.reader.pull(*queue, offset, 1)
    if pulled.status is not PullStatus.FOUND or pulled.messages[0].queue_offset != offset:
        return None
    return pulled.messages[0].physical_offset


def _pack(
    stores: list[StoreSelection], spans: Sequence[tuple[int, StoreSurvey, list[Span]]], options: ReadOptions
) -> list[LogPartition]:
    """Pack ranges of at most one split into partitions."""
    total = sum(stop - start for _number, _found, of_store in spans for start, stop in of_store)
    split = split_bytes(total, options)
    packed: list[list[tuple[int, LogRange]]] = []
    room = 0
    for number, survey, of_store in spans:
        for log_range in _cut(survey, of_store, max(split, survey.segment_size) if survey.archived else split):
            size = log_range.stop - log_range.start
            if not packed or size > room:
                packed.append([])
                room = split
            packed[-1].append((number, log_range))
            room -= size
    return [partition_of(stores, ranges, []) for ranges in packed]


def partition_of(stores: list[StoreSelection], ranges: list[tuple[int, LogRange]], slices: Slices) -> LogPartition:
    """A partition with only the stores that it needs, as every task carries them."""
    needed = sorted({number for number, _of in [*ranges, *slices]})
    return LogPartition(
        [stores[number] for number in needed],
        [(needed.index(number), log_range) for number, log_range in ranges],
        [(needed.index(number), each) for number, each in slices],
    )


def split_bytes(total: int, options: ReadOptions) -> int:
    """Bytes of log per task. Raises BadRequestError when that makes too many tasks."""
    if options.split_bytes and total // options.split_bytes > _SPLITS_MAX:
        raise BadRequestError(
            f"option splitBytes = {options.split_bytes:,} makes {total // options.split_bytes:,} partitions of "
            f"{total:,} bytes of log; the limit is {_SPLITS_MAX:,}"
        )
    reads_bodies = not options.columns or "body" in options.columns
    least = SPLIT_BYTES_MIN if reads_bodies else SPLIT_BYTES_MIN_WITHOUT_BODIES
    split = options.split_bytes or min(SPLIT_BYTES_MAX, max(least, -(-total // _SPLITS)))
    return max(1, min(split, -(-total // options.min_partitions)))


def _cut(survey: StoreSurvey, spans: Sequence[Span], split: int) -> Iterator[LogRange]:
    """Cut spans at segment ends and into equal pieces of at most one split."""
    size = survey.segment_size
    for start, stop in spans:
        for segment in survey.segments:
            low, high = max(start - segment.start, 0), min(stop - segment.start, segment.limit)
            if low >= high:
                continue
            pieces = -(-(high - low) // split)
            borders = [low + (high - low) * piece // pieces for piece in range(pieces + 1)]
            is_open = survey.end is None and segment is survey.segments[-1]
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
