"""Read the selected records of log ranges and of slices of queues; detect damage.

    range ──boundaries proven──▶ walk ──positions of selected records──▶ columns
                                  └──no record where one must be──▶ error, or the next intact record

A range has the records that begin between two boundaries. A boundary is found by the same rule from the bytes after a
position, so the tasks of neighbouring ranges agree without communication. Each walk must end exactly at its boundary,
so a false boundary makes the task of the range before it fail.

    slices ──units──▶ (log position, queue, offset) ──sorted──▶ segment by segment ──kernel──▶ selected positions

Each record of a slice must carry this queue and this offset. Positions ascend with offsets in a queue, so its messages
stay in order. When damage is skipped, the log is searched for messages whose units do not lead to them:

    units of a queue   … 4 ──▶ a        5 ──▶ nowhere        6 ──▶ b …
    log                   a ───── record of 5, if it exists ───── b
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.errors import CorruptStoreError
from mqproc.io.store_io import StoreIO
from mqproc.kernels import log_range as kernels
from mqproc.kernels.jit.intrinsics import load_be32
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.kernels.log_range import AT, BASE, FOUND, FULL, LIMIT
from mqproc.kernels.record_check import (
    BLANK,
    REACHED_STOP,
    REASON_NAMES,
    VERIFY_ALL,
    VERIFY_CRCS,
    VERIFY_NOTHING,
    stored_at_ms,
    topic_of,
)
from mqproc.layout import record
from mqproc.layout.consume_queue import FILLER_SIZE
from mqproc.paths import StorePaths, segment_name, segment_start
from mqproc.spark.options import EARLIEST, LATEST, OFFSET_MAX, TIME_MAX, Offsets, Queue, ReadSelection
from mqproc.spark.partitions import LogRange, QueueSlice, StoreSelection
from mqproc.spark.segment_bytes import MappedSegment, SegmentBytes
from mqproc.store.consumequeue.bounds import as_units
from mqproc.store.consumequeue.files import ConsumeQueueFiles
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.read.unit_walk import compile_filter

_INITIAL_QUEUES = 256
_RELEASE_BYTES: Final = 32 << 20
# Bytes per call of the kernel, and per request to remote storage.
_PART_BYTES: Final = 32 << 20
BAD_TOPIC: Final = kernels.CUT_BY_VIEW + 1
# Descriptions of the reasons for which a walk stops at damage.
_DAMAGE: Final = {reason: name for reason, name in enumerate(REASON_NAMES) if reason not in (REACHED_STOP, BLANK)} | {
    BAD_TOPIC: "a topic that is not UTF-8"
}


class KernelSelection:
    """A selection as the kernel reads it; queues are added when the log first names them."""

    def __init__(self, selection: ReadSelection, deleted: Mapping[Queue, tuple[int, int]]) -> None:
        self.selection = selection
        self._deleted = deleted
        self.table = QueueTable.in_memory(_INITIAL_QUEUES)
        self.verdicts = np.zeros(kernels.VERDICT_COLUMNS * _INITIAL_QUEUES, np.int64)
        self.tags, self.tag_ends = _texts(selection.tags)
        self.keys, self.key_ends = _texts(selection.keys)

    def add_queue(self, view: NDArray[np.uint8], at: int) -> bool:
        """Add the queue of the record at `at`; False when its topic is not UTF-8."""
        first, size = map(int, topic_of(view, at))
        try:
            topic = view[first : first + size].tobytes().decode()
        except UnicodeDecodeError:
            return False
        self._add((topic, load_be32(view, at + record.QUEUE_ID)))
        return True

    def queue_number(self, queue: Queue) -> int:
        """The queue's number in the table; adds the queue if needed."""
        if self.table.find(*queue) < 0:
            self._add(queue)
        return self.table.find(*queue)

    def _add(self, queue: Queue) -> None:
        if self.table.count == self.table.capacity:
            self._grow()
        number = self.table.create_queue(*queue)
        row = self.verdicts[kernels.VERDICT_COLUMNS * number :]
        row[kernels.FIRST_OFFSET], row[kernels.STOP_OFFSET] = self._offsets(queue)
        row[kernels.DELETED_AT], row[kernels.DELETED_NEXT] = self._deleted.get(queue, (0, 0))

    def _offsets(self, queue: Queue) -> tuple[int, int]:
        if not self.selection.includes(*queue):
            return 0, 0
        stop = self.selection.ending.of(*queue)
        return max(0, self.selection.starting.of(*queue)), OFFSET_MAX if stop == LATEST else stop

    def _grow(self) -> None:
        queues = [self.table.name(number) for number in range(self.table.count)]
        self.table = QueueTable.in_memory(2 * len(queues))
        self.verdicts = np.concatenate([self.verdicts, np.zeros_like(self.verdicts)])
        for queue in queues:
            self.table.create_queue(*queue)


def _texts(texts: tuple[str, ...]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    encoded = [text.encode() for text in texts]
    ends = np.cumsum([len(each) for each in encoded], dtype=np.int64)
    return as_kernel_array(bytearray(b"".join(encoded))), ends


class Verify(enum.Enum):
    """Checks besides sizes: (of selected records, of other records in the ranges)."""

    NOTHING = (VERIFY_NOTHING, VERIFY_NOTHING)
    SELECTED = (VERIFY_CRCS, VERIFY_NOTHING)
    # Everything that `mqproc store verify` reports as damage.
    EVERYTHING = (VERIFY_ALL, VERIFY_ALL)


@dataclass(frozen=True, slots=True)
class FoundRecords:
    """Selected records at `positions` int64[n] of `view` uint8[m]; valid until the next read."""

    view: NDArray[np.uint8]
    positions: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RecordLimits:
    """Records and bytes of a batch, checks, and whether damage is an error."""

    batch_rows: int
    batch_bytes: int
    verify: Verify
    fail_on_data_loss: bool

    def kernel_state(self, selection: ReadSelection) -> NDArray[np.int64]:
        """The kernels' state for a selection, int64[STATE_SIZE]."""
        state = np.zeros(kernels.STATE_SIZE, np.int64)
        state[kernels.BEGIN_MS], state[kernels.END_MS] = selection.begin_ms, selection.end_ms
        state[kernels.VERIFY], state[kernels.VERIFY_UNWANTED] = self.verify.value
        state[kernels.BYTES_MAX] = self.batch_bytes
        return state


class RangeReader:
    """Reads ranges of one store's log."""

    def __init__(self, selection: KernelSelection, limits: RecordLimits) -> None:
        self._selection = selection
        self._positions = np.zeros(limits.batch_rows, np.int64)
        self._state = limits.kernel_state(selection.selection)
        self._fail_on_data_loss = limits.fail_on_data_loss

    def records(self, segment: SegmentBytes, log_range: LogRange, place: str) -> Iterator[FoundRecords]:
        """The selected records of a range.

        Raises CorruptStoreError for damage; `place` names the segment in it.
        """
        window = SegmentView(segment, log_range)
        start = log_range.start if log_range.exact_start else window.boundary(log_range.start, log_range.limit)
        if start is None:
            return
        stop = log_range.stop if log_range.exact_stop else window.boundary(log_range.stop, log_range.limit)
        at, stop = start, log_range.limit if stop is None else stop
        released = at
        while at < stop:
            reason, following = self._walk(window, at, stop)
            if self._state[kernels.FOUND]:
                yield FoundRecords(window.view, self._positions[: int(self._state[kernels.FOUND])])
            at = following
            if at - released > _RELEASE_BYTES:
                segment.release_pages(released, at)
                released = at
            if reason == BLANK:
                at = self._after_blank(log_range, at, stop, place)
                break
            if reason in _DAMAGE:
                intact = window.boundary(at + 1, window.limit, successor=False)
                end = stop if intact is None else min(intact, stop)
                if intact is not None or not log_range.open_end:
                    self._check_skip(at, end, _DAMAGE[reason], place)
                at = end
        segment.release_pages(released, at)
        if at != stop and not log_range.open_end:
            raise CorruptStoreError(
                f"{place}: the records from byte {start:,} end at {at:,}, but the next ones begin at {stop:,}; bodies "
                f"seem to contain copies of records: read with splitBytes of a segment's size, {window.segment_size:,}"
            )

    def _after_blank(self, log_range: LogRange, at: int, stop: int, place: str) -> int:
        """Where a range ends that has a BLANK at `at`: a segment has no records after its BLANK."""
        if stop != log_range.limit and log_range.exact_stop and not log_range.open_end:
            # Records were expected here, for instance by the index.
            self._check_skip(at, stop, "a BLANK", place)
        # A boundary found by search would be a false one.
        return stop if stop == log_range.limit or log_range.exact_stop else at

    def _walk(self, window: SegmentView, at: int, stop: int) -> tuple[int, int]:
        """Select records from `at` on; (reason, position where the walk stopped)."""
        until = min(stop, at + _PART_BYTES)
        if not window.first <= at < window.end:
            window.show(at, until)
        while True:
            reason, stopped = self._select(window, at, until)
            if reason != kernels.CUT_BY_VIEW or stopped != at:
                return reason, stopped
            # The record at `at` ends after the loaded part.
            window.show(at, min(window.limit, max(until, at + 2 * (window.end - at))))

    def _select(self, window: SegmentView, at: int, until: int) -> tuple[int, int]:
        """Run the kernel over the bytes in view, adding each new queue it meets."""
        selection, state = self._selection, self._state
        base = window.first
        state[kernels.AT], state[kernels.STOP] = at - base, until - base
        state[kernels.LIMIT], state[kernels.SEGMENT_STOP] = window.limit - base, window.segment_size - base
        state[kernels.BASE] = window.log_range.segment + base
        state[kernels.FOUND] = state[kernels.FOUND_BYTES] = 0
        while True:
            table = selection.table
            reason = int(
                kernels.select_positions(
                    window.view,
                    table.bytes_view,
                    table.cells,
                    table.slots,
                    selection.verdicts,
                    selection.tags,
                    selection.tag_ends,
                    selection.keys,
                    selection.key_ends,
                    self._positions,
                    state,
                )
            )
            at = int(state[kernels.AT])
            if reason != kernels.UNKNOWN_QUEUE:
                return reason, at + base
            if not selection.add_queue(window.view, at):
                return BAD_TOPIC, at + base

    def _check_skip(self, start: int, stop: int, reason: str, place: str) -> None:
        """Raise CorruptStoreError for bytes without records unless damage is skipped."""
        if self._fail_on_data_loss:
            raise CorruptStoreError(
                f"{place}: no intact record in bytes [{start:,}, {stop:,}): {reason}; "
                "failOnDataLoss=false leaves such ranges out"
            )


class SegmentView:
    """The part of a segment in memory. Positions are bytes from the segment's start."""

    def __init__(self, segment: SegmentBytes, log_range: LogRange) -> None:
        self._segment = segment
        self.log_range = log_range
        self.segment_size = log_range.segment_size
        self.limit = min(log_range.limit, segment.size)
        self.first = 0
        self.view = np.zeros(0, np.uint8)
        self._out = np.zeros(kernels.BOUNDARY_SIZE, np.int64)

    def show(self, start: int, stop: int) -> None:
        self.view, self.first = self._segment.part(start, stop)

    @property
    def end(self) -> int:
        return self.first + len(self.view)

    def store_time_ms(self, at: int) -> int | None:
        """Store time of the record at a boundary; None for a BLANK."""
        stored = int(stored_at_ms(self.view, at - self.first, len(self.view), self.log_range.segment + at))
        return None if stored < 0 else stored

    def boundary(self, start: int, stop: int, *, successor: bool = True) -> int | None:
        """The first boundary in [start, stop).

        Without `successor`, the first intact record, whatever follows it.
        """
        until = start + (1 << 16)
        while True:
            self.show(start, until)
            base = self.first
            found = int(
                kernels.find_boundary(
                    self.view,
                    start - base,
                    stop - base,
                    self.log_range.segment + base,
                    self.limit - base,
                    self.segment_size - base,
                    int(successor),
                    self._out,
                )
            )
            if found == kernels.NOWHERE:
                return None
            if found != kernels.NEEDS_MORE:
                return base + found
            until = max(base + int(self._out[kernels.NEEDED]), start + 2 * (until - start))


def segment_uri(uri: str, log_range: LogRange) -> str:
    """The segment file of a range, for messages."""
    return f"{uri}/commitlog/{segment_name(log_range.segment)}"


# Slices of queues

_NOWHERE: Final = TIME_MAX
# The log may have records that a queue has lost.
_BY_LOG: Final = "; a batch read with byUnits=false reads the log alone"
Words = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Listed:
    """Records by ascending log position, with their queue numbers and offsets."""

    positions: Words
    numbers: Words
    offsets: Words

    def part(self, first: int, stop: int) -> _Listed:
        return _Listed(self.positions[first:stop], self.numbers[first:stop], self.offsets[first:stop])


class SliceReader:
    """Reads slices of one store in a folder of this machine."""

    def __init__(self, store: StoreSelection, limits: RecordLimits) -> None:
        self._store = store
        self._paths = StorePaths(Path(store.uri))
        self._io = StoreIO()
        self._selection = KernelSelection(store.selection, {})
        self._positions = np.zeros(limits.batch_rows, np.int64)
        self._state = limits.kernel_state(store.selection)
        self._fail_on_data_loss = limits.fail_on_data_loss
        self._limits = limits
        self._missed: dict[Queue, list[int]] = {}

    def records(self, slices: Sequence[QueueSlice]) -> Iterator[FoundRecords]:
        """The selected records of slices.

        Raises CorruptStoreError for missing messages when limits say so; else those found in the log come last.
        """
        self._missed = {}
        listed = self._list_units(slices)
        size = self._store.segment_size
        segments = listed.positions // size
        borders = [0, *(np.flatnonzero(np.diff(segments)) + 1).tolist(), len(segments)]
        for first, stop in itertools.pairwise(borders):
            if first < stop:
                yield from self._of_segment(int(segments[first]) * size, listed.part(first, stop))
        for queue, offsets in self._missed.items():
            missed = np.array(offsets, np.int64)
            there = (listed.numbers == self._selection.queue_number(queue)) & ~np.isin(listed.offsets, missed)
            yield from self._missed_records(queue, missed, listed.offsets[there], listed.positions[there])

    # Units

    def _queue_files(self) -> ConsumeQueueFiles:
        return ConsumeQueueFiles(self._io, self._paths.consume_queue, self._store.queue_file_bytes)

    def _list_units(self, slices: Sequence[QueueSlice]) -> _Listed:
        with closing(self._queue_files()) as files:
            parts = [self._of_queue(files, queue_slice) for queue_slice in slices]
        positions, numbers, offsets = (np.concatenate([part[row] for part in parts]) for row in range(3))
        order = np.argsort(positions, kind="stable")
        return _Listed(positions[order], numbers[order], offsets[order])

    def _of_queue(self, files: ConsumeQueueFiles, queue_slice: QueueSlice) -> tuple[Words, Words, Words]:
        """(positions, queue numbers, offsets) of the records that a slice's units name.

        Units whose tag hash excludes them are left out.
        """
        queue = queue_slice.topic, queue_slice.queue_id
        try:
            units = as_units(files.read_units(*queue, queue_slice.start, len(queue_slice)))
        except FileNotFoundError:
            units = as_units(b"")
        sizes, positions = units["size"].astype(np.int64), units["physical_offset"].astype(np.int64)
        offsets = np.arange(queue_slice.start, queue_slice.start + len(units), dtype=np.int64)
        there = sizes > 0
        if not there.all() or len(units) < len(queue_slice):
            zeros = offsets[~there].tolist()
            missing = min([*zeros, queue_slice.start + len(units)])
            self._report_absent(queue, missing, queue_slice.stop, "the queue does not have them")
            self._miss(queue, zeros)
        keep = there & (sizes != FILLER_SIZE)
        if (keep != there).any():
            filler = queue_slice.start + int(np.argmax(keep != there))
            cause = "the queue has fillers in their place, as for damaged records"
            self._report_absent(queue, filler, filler + 1, cause)
        codes = compile_filter(queue_slice.topic, self._store.selection.tags).codes
        if len(codes):
            keep &= np.isin(units["tags_code"].astype(np.int64), codes)
        if not keep.all():
            positions, offsets = positions[keep], offsets[keep]
        return positions, np.full(len(positions), self._selection.queue_number(queue), np.int64), offsets

    def _report_absent(self, queue: Queue, start: int, stop: int, reason: str) -> None:
        if self._fail_on_data_loss:
            raise CorruptStoreError(
                f"{self._store.uri}: offsets [{start:,}, {stop:,}) of queue {queue[1]} of {queue[0]}: {reason}; "
                f"failOnDataLoss=false leaves such offsets out{_BY_LOG}"
            )

    # Records

    def _of_segment(self, start: int, listed: _Listed) -> Iterator[FoundRecords]:
        try:
            segment = MappedSegment(self._io, self._paths.commit_log / segment_name(start), self._store.segment_size)
        except FileNotFoundError:
            if self._fail_on_data_loss:
                file = f"{self._store.uri}/commitlog/{segment_name(start)}"
                raise CorruptStoreError(
                    f"{file}: its part of the log is deleted, with {len(listed.positions):,} selected messages; "
                    "failOnDataLoss=false leaves them out"
                ) from None
            for number in np.unique(listed.numbers).tolist():
                self._miss(self._selection.table.name(number), listed.offsets[listed.numbers == number].tolist())
            return
        with closing(segment):
            yield from self._select_listed(segment, start, listed)

    def _select_listed(self, segment: MappedSegment, start: int, listed: _Listed) -> Iterator[FoundRecords]:
        selection, state = self._selection, self._state
        view, _first = segment.part(0, segment.size)
        state[AT], state[BASE], state[LIMIT] = 0, start, segment.size
        released, reason = 0, FULL
        while reason != REACHED_STOP:
            reason = int(
                kernels.select_by_unit(
                    view,
                    listed.positions,
                    listed.numbers,
                    listed.offsets,
                    selection.table.bytes_view,
                    selection.table.cells,
                    selection.table.slots,
                    selection.tags,
                    selection.tag_ends,
                    selection.keys,
                    selection.key_ends,
                    self._positions,
                    state,
                )
            )
            if state[FOUND]:
                found = self._positions[: int(state[FOUND])]
                yield FoundRecords(view, found)
                if int(found[-1]) - released > _RELEASE_BYTES:
                    segment.release_pages(released, int(found[-1]))
                    released = int(found[-1])
            if reason not in (REACHED_STOP, FULL):
                self._handle_damage(listed, int(state[AT]), reason)
                state[AT] += 1

    def _miss(self, queue: Queue, offsets: Sequence[int]) -> None:
        """Note existing messages whose units do not lead to them."""
        if offsets:
            self._missed.setdefault(queue, []).extend(offsets)

    def _handle_damage(self, listed: _Listed, index: int, reason: int) -> None:
        topic, queue_id = self._selection.table.name(int(listed.numbers[index]))
        offset, position = int(listed.offsets[index]), int(listed.positions[index])
        if self._fail_on_data_loss:
            cause = "a record of another place" if reason == kernels.OTHER_PLACE else REASON_NAMES[reason]
            raise CorruptStoreError(
                f"{self._store.uri}: offset {offset:,} of queue {queue_id} of {topic} has no intact record at log "
                f"position {position:,}: {cause}; failOnDataLoss=false leaves such messages out{_BY_LOG}"
            )
        self._miss((topic, queue_id), [offset])

    # Messages whose units do not lead to them

    def _missed_records(self, queue: Queue, missed: Words, offsets: Words, positions: Words) -> Iterator[FoundRecords]:
        """The selected messages among the messages `missed` of a queue.

        The queue's other records, with `offsets`, are at `positions`.
        """
        missed, order = np.unique(missed), np.argsort(offsets)
        offsets, positions = offsets[order], positions[order]
        for run in np.split(missed, np.flatnonzero(np.diff(missed) != 1) + 1):
            first, last = int(run[0]), int(run[-1])
            before, after = int(np.searchsorted(offsets, first)) - 1, int(np.searchsorted(offsets, last))
            low = int(positions[before]) if before >= 0 else self._position_of(queue, first - 1, 0)
            high = int(positions[after]) if after < len(positions) else self._position_of(queue, last + 1, _NOWHERE)
            yield from self._select_range(low, high, queue, first, last + 1)

    def _position_of(self, queue: Queue, offset: int, otherwise: int) -> int:
        """The log position in the unit of a neighbouring message of another slice."""
        with closing(self._queue_files()) as files:
            try:
                units = as_units(files.read_units(*queue, offset, 1)) if offset >= 0 else as_units(b"")
            except FileNotFoundError:
                return otherwise
        return int(units["physical_offset"][0]) if len(units) and units["size"][0] > 0 else otherwise

    def _select_range(self, low: int, high: int, queue: Queue, first: int, stop: int) -> Iterator[FoundRecords]:
        """The selected records in [low, high) of the log that are messages [first, stop) of a queue."""
        selection = dataclasses.replace(
            self._store.selection,
            queues=(queue,),
            starting=Offsets(EARLIEST, {queue: first}),
            ending=Offsets(LATEST, {queue: stop}),
        )
        limits = dataclasses.replace(self._limits, fail_on_data_loss=False)
        reader = RangeReader(KernelSelection(selection, self._store.deleted), limits)
        size = self._store.segment_size
        starts = (segment_start(name) for name in self._io.names(self._paths.commit_log))
        for start in sorted(start for start in starts if start is not None):
            begin, end = max(low - start, 0), min(high - start, size)
            if begin >= end:
                continue
            log_range = LogRange(start, begin, end, size, size, exact_start=not begin, exact_stop=True, open_end=True)
            try:
                segment = MappedSegment(self._io, self._paths.commit_log / segment_name(start), size)
            except FileNotFoundError:
                continue
            with closing(segment):
                yield from reader.records(segment, log_range, segment_uri(self._store.uri, log_range))
