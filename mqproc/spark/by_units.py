"""Reading a few queues by their units instead of all of the log: where that is less work, and their units are complete.

    [low ──────── proven) by units      [proven ──── high) by the log itself

Dispatch of a running group has done everything below `dispatched`; of a store that nobody runs the durable mark of the
ConsumeQueues vouches for what lies below it, as long as the log before it is the same and each queue has what the last
run's table says. Without that a queue may lack units, and the log is read. So it is where units that are to be read are
zeros, fillers, or out of order: the log may well have what they have lost.
"""

from __future__ import annotations

from contextlib import closing
from typing import Final

import numpy as np

from mqproc.errors import CorruptStoreError
from mqproc.io import StoreIO
from mqproc.layout import control as words_of
from mqproc.layout.consume_queue import FILLER_SIZE
from mqproc.spark.options import EARLIEST, LATEST, Queue, ReadOptions, Selection
from mqproc.spark.ranges import QueueSlice
from mqproc.spark.stores import Survey
from mqproc.store.consume_queue import ConsumeQueueFiles, as_units
from mqproc.store.marks import DurableMark
from mqproc.store.queue_table import QueueTable
from mqproc.store.reads.queue_bounds import QueueBounds, each_queue
from mqproc.store.reads.reader import StoreReader
from mqproc.store.reads.store_views import open_control
from mqproc.store.segments import LogSegments

# A record that is looked at by its unit costs as much as so many that a walk passes over, and pages are read whole.
_WALK_RECORDS: Final = 4
_UNITS_AT_ONCE: Final = 1 << 18


def slices_by_units(
    found: Survey, selection: Selection, options: ReadOptions, low: int, high: int
) -> tuple[list[QueueSlice], int] | None:
    """Slices of the wanted queues with what lies in the log's [low, proven), and `proven`; None to read the log.

    Wanted offsets are cut at what there is; offsets that are not there are the planner's to refuse.
    """
    if not _is_possible(found, selection, options):
        return None
    assert found.reader is not None
    proven = min(high, _proven(found.reader, selection))
    if proven <= low:
        return None
    queues = found.reader.reading.queues
    slices, wider, stored = [], [], 0
    for topic, queue_id, bounds in each_queue(queues):
        stored += bounds.max_offset - bounds.min_offset
        if selection.takes(topic, queue_id):
            of = _slice(found, selection, (topic, queue_id), bounds, low, proven)
            slices.append(of)
            wider.append(_with_neighbours(of, bounds))
    rows = sum(map(len, slices))
    if options.by_units is None and rows * _WALK_RECORDS > stored:
        return None
    if not all(_are_whole(found.reader.reading.files, of) for of in wider):
        return None
    return [each for each in slices if len(each)], proven


def _is_possible(found: Survey, selection: Selection, options: ReadOptions) -> bool:
    if found.reader is None or found.trouble or options.by_units is False:
        return False
    # Keys have the index; and verifyCrc asks for the records in between too.
    return selection.is_narrow and not selection.keys and options.verify_crc is not True


def _slice(found: Survey, selection: Selection, queue: Queue, bounds: QueueBounds, low: int, proven: int) -> QueueSlice:
    assert found.reader is not None
    files = found.reader.reading.files
    first, stop = bounds.min_offset, bounds.max_offset
    starting, ending = selection.starting.of(*queue), selection.ending.of(*queue)
    first = first if starting == EARLIEST else min(max(first, starting), stop)
    stop = stop if ending == LATEST else min(max(first, ending), stop)
    try:
        first = files.first_at_or_above(*queue, first, stop, low)
        stop = files.first_at_or_above(*queue, first, stop, proven)
    except FileNotFoundError:
        # Retention has just moved on: the task tells what it lacks.
        pass
    return QueueSlice(*queue, first, stop)


def _with_neighbours(of: QueueSlice, bounds: QueueBounds) -> QueueSlice:
    """A slice and the units that showed where it begins and ends: a damaged one would have shown another place."""
    start, stop = max(bounds.min_offset, of.start - 1), min(bounds.max_offset, of.stop + 1)
    return QueueSlice(of.topic, of.queue_id, start, stop)


def _are_whole(files: ConsumeQueueFiles, of: QueueSlice) -> bool:
    """Whether each unit of a slice names a record, behind that of the one before it."""
    end = 0
    for first in range(of.start, of.stop, _UNITS_AT_ONCE):
        count = min(_UNITS_AT_ONCE, of.stop - first)
        try:
            units = as_units(files.read_units(of.topic, of.queue_id, first, count))
        except FileNotFoundError:
            return False
        starts, sizes = units["physical_offset"].astype(np.int64), units["size"].astype(np.int64)
        if len(units) < count or (sizes <= 0).any() or (sizes == FILLER_SIZE).any():
            return False
        if starts[0] < end or (starts[1:] < starts[:-1] + sizes[:-1]).any():
            return False
        end = int(starts[-1] + sizes[-1])
    return True


def _proven(reader: StoreReader, selection: Selection) -> int:
    """The log position below which the wanted queues surely have all units; 0 for none."""
    io, paths = StoreIO(), reader.paths
    if reader.running:
        words = open_control(io, paths.control)
        return words[words_of.DISPATCHED] if words is not None else 0
    with closing(LogSegments(io, paths.commit_log, reader.options.mapped_file_size_commit_log)) as segments:
        mark = DurableMark(io, paths.mark("consumequeue"), segments).valid()
    if mark is None or not _has_what_the_last_run_knew(io, reader, selection):
        return 0
    return mark.offset


def _has_what_the_last_run_knew(io: StoreIO, reader: StoreReader, selection: Selection) -> bool:
    try:
        table = QueueTable(io, reader.paths.queues)
    except (FileNotFoundError, CorruptStoreError):
        return False
    with closing(table):
        for number, topic, queue_id in table.live():
            if not selection.takes(topic, queue_id) or not table.max_offset(number):
                continue
            bounds = reader.reading.queues.bounds(topic, queue_id)
            if bounds is None or bounds.max_offset < table.max_offset(number):
                return False
            if bounds.min_offset > max(table.min_offset(number), 0) and bounds.min_offset < bounds.max_offset:
                return False
    return True
