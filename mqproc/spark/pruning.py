"""Find the parts of a log that can hold selected messages: by time, key and units.

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

import contextlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Final

import numpy as np

from mqproc.errors import CorruptStoreError
from mqproc.io.store_io import StoreIO
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.kernels.record_check import record_size
from mqproc.layout import control, index_file, record
from mqproc.layout.consume_queue import FILLER_SIZE
from mqproc.paths import StorePaths
from mqproc.spark.log_reader import SegmentView
from mqproc.spark.options import EARLIEST, LATEST, TIME_MAX, TIME_MIN, Queue, ReadOptions, ReadSelection
from mqproc.spark.partitions import LogRange, QueueSlice
from mqproc.spark.segment_bytes import open_segment
from mqproc.spark.survey import Segment, StoreSurvey
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.consumequeue.files import ConsumeQueueFiles, as_units
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.damage import merged
from mqproc.store.durable_marks import DurableMark
from mqproc.store.index.files import index_file_names, read_header
from mqproc.store.index.lookup import IndexReader
from mqproc.store.read.reader import StoreReader
from mqproc.store.read.views import QueueBounds, each_queue, open_control

# The search ends at this many bytes of log: reading them costs less than another probe.
_RESOLUTION_BYTES: Final = 64 << 10


def time_span(
    survey: StoreSurvey, begin: int, end: int, selection: ReadSelection, clock_step_ms: int
) -> tuple[int, int]:
    """The part of [begin, end) that can hold messages of the selected time."""
    low, high = begin, end
    if selection.begin_ms > TIME_MIN:
        low = _TimeSearch(survey, begin, end).last_below(selection.begin_ms - clock_step_ms)
    if selection.end_ms < TIME_MAX:
        high = _TimeSearch(survey, low, end).first_at_or_above(selection.end_ms + clock_step_ms)
    return low, high


class _TimeSearch:
    """Binary search for a store time in the log positions [begin, end)."""

    def __init__(self, survey: StoreSurvey, begin: int, end: int) -> None:
        self._found = survey
        self._begin = begin
        self._end = end

    def last_below(self, time_ms: int) -> int:
        """A record's position before which all are older; `begin` if no record is older."""
        low, _high = self._halve(time_ms)
        return low

    def first_at_or_above(self, time_ms: int) -> int:
        """A record's position from which on no record is older; `end` when there is no such record."""
        _low, high = self._halve(time_ms)
        return high

    def _halve(self, time_ms: int) -> tuple[int, int]:
        """Close positions of an older record or `begin`, and of a later one or `end`."""
        below, above = self._begin, self._end
        low, high = self._begin, self._end
        # In an archive a probe costs as much as decompressing its segment up to there.
        close = self._found.segment_size if self._found.archived else _RESOLUTION_BYTES
        while high - low > close:
            middle = (low + high) // 2
            probed = self._probe(middle, high)
            if probed is None:
                # No record begins after the middle: search before it.
                high = middle
            elif probed[1] < time_ms:
                below = probed[0]
                low = max(middle, below)
            else:
                above = probed[0]
                high = middle
        return below, above

    def _probe(self, position: int, stop: int) -> tuple[int, int] | None:
        """(position, store time) of the first record in [position, stop) of the log."""
        for segment in self._found.segments:
            at = max(0, position - segment.start)
            if at >= segment.limit or segment.start >= stop:
                continue
            with self._view(segment) as view:
                boundary = view.boundary(at, min(segment.limit, stop - segment.start))
                stored = None if boundary is None else view.store_time_ms(boundary)
            if boundary is not None and stored is not None:
                return segment.start + boundary, stored
        return None

    @contextmanager
    def _view(self, segment: Segment) -> Iterator[SegmentView]:
        survey = self._found
        with closing(open_segment(survey.uri, segment.start, survey.segment_size, segment.size)) as opened:
            log_range = LogRange(segment.start, 0, segment.limit, segment.limit, survey.segment_size)
            yield SegmentView(opened, log_range)


# By key

# With more hits than this, reading all of the log is no more work.
_HITS_MAX: Final = 16_384

Span = tuple[int, int]


def key_spans(survey: StoreSurvey, selection: ReadSelection, low: int, high: int) -> Iterator[Span]:
    """Ascending, disjoint spans of [low, high) that can hold messages with a selected key."""
    topics = selection.topics or tuple(dict.fromkeys(topic for topic, _queue in selection.queues))
    covered = _covered(survey, low, high) if topics else []
    hits = _hits(survey, topics, selection.keys) if covered else []
    if not covered or hits is None:
        yield low, high
        return
    inside = [hit for hit in hits if low <= hit < high and any(start <= hit < stop for start, stop in covered)]
    yield from merged([*_uncovered(covered, low, high), *_records(survey, inside)])


def _covered(survey: StoreSurvey, low: int, high: int) -> list[Span]:
    """The ranges that index files cover; empty when their headers are inconsistent."""
    assert survey.reader is not None
    io, paths = StoreIO(), StorePaths(survey.reader.paths.root)
    covered: list[Span] = []
    for name in index_file_names(io, paths.index):
        fd = io.open(paths.index / name)
        try:
            size = io.size(fd)
            # A file without a whole header covers nothing, and an empty one cannot be mapped.
            header = read_header(as_kernel_array(io.map(fd, size))) if size >= index_file.HEADER_SIZE else None
        finally:
            io.close(fd)
        if header is None or header.count <= 1:
            continue
        covered.append((header.begin_physical_offset, header.end_physical_offset))
    borders = [border for span in covered for border in span]
    if borders != sorted(borders) or (borders and borders[-1] >= high + survey.segment_size):
        return []
    return [(max(start, low), min(stop, high)) for start, stop in covered if start < high and stop > low]


def _uncovered(covered: list[Span], low: int, high: int) -> Iterator[Span]:
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
    with contextlib.closing(index):
        index.refresh(0)
        for topic in topics:
            for key in keys:
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
    survey: StoreSurvey, selection: ReadSelection, options: ReadOptions, low: int, high: int
) -> tuple[list[QueueSlice], int] | None:
    """(slices in the log's [low, proven), proven) of the selected queues, or None.

    Offsets are limited to existing ones; the planner rejects others.
    """
    if not _is_possible(survey, selection, options):
        return None
    assert survey.reader is not None
    proven = min(high, _proven(survey.reader, selection))
    if proven <= low:
        return None
    queues = survey.reader.reading.queues
    slices, wider, stored = [], [], 0
    for topic, queue_id, bounds in each_queue(queues):
        stored += bounds.max_offset - bounds.min_offset
        if selection.includes(topic, queue_id):
            queue_slice = _slice(survey, selection, (topic, queue_id), bounds, low, proven)
            slices.append(queue_slice)
            wider.append(_with_neighbours(queue_slice, bounds))
    rows = sum(map(len, slices))
    if options.by_units is None and rows * _WALK_RECORDS > stored:
        return None
    if not all(_are_complete(survey.reader.reading.files, queue_slice) for queue_slice in wider):
        return None
    return [each for each in slices if len(each)], proven


def _is_possible(survey: StoreSurvey, selection: ReadSelection, options: ReadOptions) -> bool:
    if survey.reader is None or survey.damage or options.by_units is False:
        return False
    # Keys use the index, and verifyCrc also needs the records in between.
    return selection.is_narrow and not selection.keys and options.verify_crc is not True


def _slice(
    survey: StoreSurvey, selection: ReadSelection, queue: Queue, bounds: QueueBounds, low: int, proven: int
) -> QueueSlice:
    assert survey.reader is not None
    files = survey.reader.reading.files
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


def _with_neighbours(queue_slice: QueueSlice, bounds: QueueBounds) -> QueueSlice:
    """A slice with the units that determined its bounds, as a damaged one would have moved them."""
    start, stop = max(bounds.min_offset, queue_slice.start - 1), min(bounds.max_offset, queue_slice.stop + 1)
    return QueueSlice(queue_slice.topic, queue_slice.queue_id, start, stop)


def _are_complete(files: ConsumeQueueFiles, queue_slice: QueueSlice) -> bool:
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


def _proven(reader: StoreReader, selection: ReadSelection) -> int:
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
