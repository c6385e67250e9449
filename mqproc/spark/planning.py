"""Plan a batch read: cut logs into partitions, without parts that cannot match.

    StoreSurvey ──times, offsets, keys──▶ spans of the log ──segments, splits──▶ LogRanges ──packed──▶ LogPartitions
       └──few queues──▶ slices of queues ──────────────────────────────────────────────────────────────┘

A span is left out only when store times, queue offsets or keys of its records prove that it can be. The kernel selects
among the remaining records.

By time: store times ascend along the log while the clock does, so a binary search over the records' own times finds the
span. It is widened by `clock_step_ms` on both sides for a clock that was set back.

By key: each index file covers a range of the log and has an item for every key in it. So the records that its items
name are read, and all of the log that no file covers. This needs named topics, since an item's hash is of topic and
key.

By units, where that is less work and the units are complete:

    [low ──────── proven) by units      [proven ──── high) by the log

A running group has dispatched everything below `dispatched`. In a stopped store, the durable mark of the ConsumeQueues
proves all units below it, if the log before it is the same and each queue matches the queue table. Otherwise a
queue may lack units and the log is read; so it is when a unit is zero, a filler, or out of order, as the log may have
the record.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Final

import numpy as np

from mqproc.errors import BadRequestError, CorruptStoreError
from mqproc.io.store_io import StoreIO
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.kernels.record_check import record_size
from mqproc.layout import control, index_file, record
from mqproc.layout.consume_queue import FILLER_SIZE
from mqproc.spark.options import EARLIEST, LATEST, TIME_MAX, TIME_MIN, Queue, ReadOptions, ReadSelection
from mqproc.spark.partitions import LogPartition, LogRange, QueueSlice, Slices, StoreSelection, partitioned
from mqproc.spark.record_reader import SegmentView
from mqproc.spark.segment_bytes import open_segment
from mqproc.spark.survey import StoreSurvey, find_stores, survey_store
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.consumequeue.bounds import as_units
from mqproc.store.consumequeue.files import ConsumeQueueFiles
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.damage import merged
from mqproc.store.durable_marks import DurableMark
from mqproc.store.index.files import index_file_names, read_header
from mqproc.store.index.lookup import IndexReader
from mqproc.store.read.reader import StoreReader
from mqproc.store.read.views import QueueBounds, each_queue, open_control
from mqproc.types import PullStatus
from mqproc.util.units import MIB

SPLIT_BYTES_MIN: Final = 256 * MIB
# Without bodies a task takes a third of the time for the same log.
SPLIT_BYTES_MIN_WITHOUT_BODIES: Final = 512 * MIB
SPLIT_BYTES_MAX: Final = 1024 * MIB
# Each task costs tens of milliseconds of processor time; this many occupy any machine.
_SPLITS: Final = 64
# This many tasks cost an hour of processor time.
_SPLITS_MAX: Final = 100_000
# This many take as long to start as a scan of gigabytes, for which smaller parts are a mistake.
_SMALL_SPLITS_MAX: Final = 1000
_SMALL_SPLIT_BYTES: Final = MIB

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
    with ExitStack() as surveys:
        for uri in find_stores(options.paths):
            survey = surveys.enter_context(closing(survey_store(uri)))
            if survey.damage and options.fail_on_data_loss:
                raise CorruptStoreError(f"{uri}: {survey.damage}; failOnDataLoss=false reads what there is")
            _check_offsets(survey, options)
            of_queues, of_log = _prune(survey, options)
            spans.append((len(stores), survey, of_log))
            slices += [(len(stores), each) for each in of_queues]
            file_bytes = survey.reader.options.consume_queue_file_bytes if survey.reader is not None else 0
            stores.append(StoreSelection(uri, survey.segment_size, options.selection, survey.deleted, file_bytes))
        by_units = [partition_of(stores, [], some) for some in partitioned(slices, 0, options.min_partitions)]
        return [*by_units, *_pack(stores, spans, options)] or [LogPartition([], [])]


def _check_offsets(survey: StoreSurvey, options: ReadOptions) -> None:
    """Raise BadRequestError for queues that the store lacks, CorruptStoreError for offsets."""
    selection = options.selection
    if survey.reader is None or not options.fail_on_data_loss:
        return
    for queue in dict.fromkeys([*selection.starting.by_queue, *selection.ending.by_queue]):
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


def _prune(survey: StoreSurvey, options: ReadOptions) -> tuple[list[QueueSlice], list[Span]]:
    """The slices of queues and the ascending spans of the log that must be read of a store."""
    if not survey.segments:
        return [], []
    selection, last = options.selection, survey.segments[-1]
    begin, end = time_span(survey, survey.begin, last.start + last.limit, selection, options.clock_step_ms)
    by_units = slices_by_units(survey, options, begin, end)
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
    starts = [_position(survey.reader, queue, selection.starting.of(*queue), begin) for queue in queues]
    stops = [_position(survey.reader, queue, selection.ending.of(*queue), end) for queue in queues]
    return max(begin, min(starts)), min(end, max(stops))


def _position(reader: StoreReader, queue: Queue, offset: int, unknown: int) -> int:
    """Log position of the record at an offset; `unknown` for EARLIEST, LATEST or no record."""
    if offset < 0:
        return unknown
    pulled = reader.pull(*queue, offset, 1)
    if pulled.status is not PullStatus.FOUND or pulled.messages[0].queue_offset != offset:
        return unknown
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
    reads_bodies = not options.columns or "body" in options.columns
    least = SPLIT_BYTES_MIN if reads_bodies else SPLIT_BYTES_MIN_WITHOUT_BODIES
    split = options.split_bytes or min(SPLIT_BYTES_MAX, max(least, -(-total // _SPLITS)))
    of_parts = max(1, -(-total // options.min_partitions))
    name, value = ("splitBytes", split) if split <= of_parts else ("minPartitions", options.min_partitions)
    split = min(split, of_parts)
    limit = _SMALL_SPLITS_MAX if split < _SMALL_SPLIT_BYTES else _SPLITS_MAX
    if total // split > limit:
        raise BadRequestError(
            f"option {name} = {value:,} makes {total // split:,} partitions of {total:,} bytes of log; the limit is "
            f"{limit:,}, or {_SPLITS_MAX:,} of {_SMALL_SPLIT_BYTES:,} bytes and more"
        )
    return split


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


# By time

# The search ends at this many bytes of log: reading them costs less than another probe.
_RESOLUTION_BYTES: Final = 64 << 10


def time_span(
    survey: StoreSurvey, begin: int, end: int, selection: ReadSelection, clock_step_ms: int
) -> tuple[int, int]:
    """The part of [begin, end) that can hold messages of the selected time.

    All of it where store times may descend. On remote storage they are taken to ascend, apart from `clock_step_ms`.
    """
    ordered = begin
    if survey.reader is not None:
        ordered = min(max(begin, survey.reader.time_ordered_from), end)
    low, high = begin, end
    if selection.begin_ms > TIME_MIN and ordered == begin:
        low, _ = _around_time(survey, begin, end, selection.begin_ms - clock_step_ms)
    if selection.end_ms < TIME_MAX:
        _, high = _around_time(survey, max(low, ordered), end, selection.end_ms + clock_step_ms)
    return low, high


def _around_time(survey: StoreSurvey, begin: int, end: int, time_ms: int) -> Span:
    """Close positions: of an older record or `begin`, and of a later record or `end`."""
    below, above = low, high = begin, end
    # In an archive a probe costs as much as decompressing its segment up to there.
    close = survey.segment_size if survey.archived else _RESOLUTION_BYTES
    while high - low > close:
        middle = (low + high) // 2
        probed = _first_record(survey, middle, high)
        if probed is None:
            high = middle
        elif probed[1] < time_ms:
            below = probed[0]
            low = max(middle, below)
        else:
            above = probed[0]
            high = middle
    return below, above


def _first_record(survey: StoreSurvey, position: int, stop: int) -> tuple[int, int] | None:
    """(position, store time) of the first record in [position, stop) of the log."""
    for segment in survey.segments:
        at = max(0, position - segment.start)
        if at >= segment.limit or segment.start >= stop:
            continue
        with closing(open_segment(survey.uri, segment.start, survey.segment_size, segment.size)) as opened:
            view = SegmentView(opened, LogRange(segment.start, 0, segment.limit, segment.limit, survey.segment_size))
            boundary = view.boundary(at, min(segment.limit, stop - segment.start))
            stored = None if boundary is None else view.store_time_ms(boundary)
        if boundary is not None and stored is not None:
            return segment.start + boundary, stored
    return None


# By key

# With more hits than this, reading all of the log is no more work.
_HITS_MAX: Final = 16_384


def key_spans(survey: StoreSurvey, selection: ReadSelection, low: int, high: int) -> Iterator[Span]:
    """Ascending, disjoint spans of [low, high) that can hold messages with a selected key."""
    topics = selection.topics or tuple(dict.fromkeys(topic for topic, _queue in selection.queues))
    covered = _covered_ranges(survey, low, high) if topics else []
    hits = _hits(survey, topics, selection.keys) if covered else []
    if not covered or hits is None:
        yield low, high
        return
    inside = [hit for hit in hits if low <= hit < high and any(start <= hit < stop for start, stop in covered)]
    yield from merged([*_uncovered_ranges(covered, low, high), *_records(survey, inside)])


def _covered_ranges(survey: StoreSurvey, low: int, high: int) -> list[Span]:
    """The ranges that index files cover; empty when their headers are inconsistent."""
    assert survey.reader is not None
    io, paths = StoreIO(), survey.reader.paths
    covered: list[Span] = []
    for name in index_file_names(io, paths.index):
        with io.opened(paths.index / name) as fd:
            size = io.size(fd)
            # A file without a whole header covers nothing, and an empty one cannot be mapped.
            header = read_header(as_kernel_array(io.map(fd, size))) if size >= index_file.HEADER_SIZE else None
        if header is not None and header.count > 1:
            covered.append((header.begin_physical_offset, header.end_physical_offset))
    borders = [border for span in covered for border in span]
    if borders != sorted(borders) or (borders and borders[-1] >= high + survey.segment_size):
        return []
    return [(max(start, low), min(stop, high)) for start, stop in covered if start < high and stop > low]


def _uncovered_ranges(covered: list[Span], low: int, high: int) -> Iterator[Span]:
    """The rest of [low, high), with last covered records, whose keys may be incomplete."""
    at = low
    for start, stop in covered:
        if at < start:
            yield at, start
        at = stop
    if at < high:
        yield at, high


def _hits(survey: StoreSurvey, topics: tuple[str, ...], keys: tuple[str, ...]) -> list[int] | None:
    """Log positions that the index has for the keys; None when there are too many."""
    assert survey.reader is not None
    options = survey.reader.options
    index = IndexReader(
        StoreIO(), survey.reader.paths.index, options.max_hash_slot_num, options.max_index_num, _HITS_MAX
    )
    hits: set[int] = set()
    with closing(index):
        index.refresh(0)
        for topic, key in itertools.product(topics, keys):
            offsets = index.query_offset(topic, key, _HITS_MAX, TIME_MIN, TIME_MAX).offsets
            hits.update(offsets)
            # Several keys of one message with the same hash are several hits, so a full result may be incomplete.
            if index.skipped or max(len(offsets), len(hits)) >= _HITS_MAX:
                return None
    return sorted(hits)


def _records(survey: StoreSurvey, positions: list[int]) -> Iterator[Span]:
    """The span of each record; of a damaged one, its first bytes."""
    assert survey.reader is not None
    log = LogSegments(StoreIO(), survey.reader.paths.commit_log, survey.segment_size, whole=False, static=True)
    sizes = {segment.start: min(segment.size, segment.limit) for segment in survey.segments}
    for position in positions:
        base = log.start_of(position)
        size = record.BLANK_SIZE
        if sizes.get(base, 0) > position - base:
            size = max(size, int(record_size(log.view(base), position - base, sizes[base])))
            log.note_read(position, size)
        yield position, position + size
    log.close()


# By units

# Reading a record by its unit costs as much as scanning this many records, and pages are read whole.
_WALK_RECORDS: Final = 4
_UNITS_AT_ONCE: Final = 1 << 18


def slices_by_units(
    survey: StoreSurvey, options: ReadOptions, low: int, high: int
) -> tuple[list[QueueSlice], int] | None:
    """(slices in the log's [low, proven), proven) of the selected queues, or None.

    Offsets are limited to existing offsets; the planner rejects others.
    """
    selection, reader = options.selection, survey.reader
    # Keys use the index, and verifyCrc also needs the records in between.
    needs_log = survey.damage or options.by_units is False or selection.keys or options.verify_crc
    if reader is None or needs_log or not selection.is_narrow:
        return None
    proven = min(high, _proven_position(reader, selection))
    if proven <= low:
        return None
    files, slices, stored = reader.reading.files, [], 0
    wider: list[QueueSlice] = []
    for topic, queue_id, bounds in each_queue(reader.reading.queues):
        stored += bounds.max_offset - bounds.min_offset
        if selection.includes(topic, queue_id):
            queue_slice = _slice(files, selection, (topic, queue_id), bounds, low, proven)
            slices.append(queue_slice)
            # Include the units that determined the bounds: a damaged unit would have moved them.
            start, stop = max(bounds.min_offset, queue_slice.start - 1), min(bounds.max_offset, queue_slice.stop + 1)
            wider.append(QueueSlice(topic, queue_id, start, stop))
    if options.by_units is None and sum(map(len, slices)) * _WALK_RECORDS > stored:
        return None
    if not all(_is_complete(files, queue_slice) for queue_slice in wider):
        return None
    return list(filter(len, slices)), proven


def _slice(
    files: ConsumeQueueFiles, selection: ReadSelection, queue: Queue, bounds: QueueBounds, low: int, proven: int
) -> QueueSlice:
    first, stop = bounds.min_offset, bounds.max_offset
    starting, ending = selection.starting.of(*queue), selection.ending.of(*queue)
    first = first if starting == EARLIEST else min(max(first, starting), stop)
    stop = stop if ending == LATEST else min(max(first, ending), stop)
    try:
        first = files.first_at_or_above(*queue, first, stop, low)
        stop = files.first_at_or_above(*queue, first, stop, proven)
    except FileNotFoundError:
        # Retention has deleted segments in the meantime; the task reports missing messages.
        pass
    return QueueSlice(*queue, first, stop)


def _is_complete(files: ConsumeQueueFiles, queue_slice: QueueSlice) -> bool:
    """Whether each unit of a slice names a record that begins after the previous one."""
    end = 0
    for first in range(queue_slice.start, queue_slice.stop, _UNITS_AT_ONCE):
        count = min(_UNITS_AT_ONCE, queue_slice.stop - first)
        try:
            units = as_units(files.read_units(queue_slice.topic, queue_slice.queue_id, first, count))
        except FileNotFoundError:
            return False
        starts, sizes = units["physical_offset"].astype(np.int64), units["size"].astype(np.int64)
        if len(units) < count or (sizes <= 0).any() or (sizes == FILLER_SIZE).any():
            return False
        if starts[0] < end or (starts[1:] < starts[:-1] + sizes[:-1]).any():
            return False
        end = int(starts[-1] + sizes[-1])
    return True


def _proven_position(reader: StoreReader, selection: ReadSelection) -> int:
    """The log position below which the selected queues have all units; 0 when nothing proves it."""
    io, paths = StoreIO(), reader.paths
    if reader.running:
        words = open_control(io, paths.control)
        return words[control.DISPATCHED] if words is not None else 0
    with closing(LogSegments(io, paths.commit_log, reader.options.mapped_file_size_commit_log)) as segments:
        mark = DurableMark(io, paths.mark("consumequeue"), segments).valid()
    if mark is None or not _matches_queue_table(io, reader, selection):
        return 0
    return mark.offset


def _matches_queue_table(io: StoreIO, reader: StoreReader, selection: ReadSelection) -> bool:
    try:
        table = QueueTable(io, reader.paths.queues)
    except (FileNotFoundError, CorruptStoreError):
        return False
    with closing(table):
        for number, topic, queue_id in table.live():
            if not selection.includes(topic, queue_id) or not table.max_offset(number):
                continue
            bounds = reader.reading.queues.bounds(topic, queue_id)
            if bounds is None or bounds.max_offset < table.max_offset(number):
                return False
            if bounds.min_offset > max(table.min_offset(number), 0) and bounds.min_offset < bounds.max_offset:
                return False
    return True
