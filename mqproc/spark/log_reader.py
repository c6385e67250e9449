"""Read the selected records of one range of a log, and detect damage in it.

    range ──boundaries proven──▶ walk ──positions of selected records──▶ columns
                                  └──no record where one must be──▶ error, or the next intact record

A range has the records that begin between two boundaries. A boundary is found by the same rule from the bytes after a
position, so the tasks of neighbouring ranges agree without communication. Each walk must end exactly at its boundary,
so a false boundary makes the task of the range before it fail.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.errors import CorruptStoreError
from mqproc.kernels import log_range as kernels
from mqproc.kernels.jit.intrinsics import load_be32
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.kernels.record_check import (
    BLANK,
    REACHED_STOP,
    REASON_NAMES,
    VERIFY_ALL,
    VERIFY_CRCS,
    VERIFY_NOTHING,
    signed_topic_length,
    stored_at_ms,
    topic_length_at,
    topic_length_size,
)
from mqproc.layout import record
from mqproc.paths import segment_name
from mqproc.spark.options import LATEST, OFFSET_MAX, Queue, ReadSelection
from mqproc.spark.partitions import LogRange
from mqproc.spark.segment_bytes import SegmentBytes
from mqproc.store.consumequeue.table import QueueTable

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
        width = int(topic_length_size(view, at))
        length_at = int(topic_length_at(view, at))
        first = length_at + width
        size = int(signed_topic_length(view, length_at, width))
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
    WANTED = (VERIFY_CRCS, VERIFY_NOTHING)
    # Everything that `mqproc store verify` reports as damage.
    EVERYTHING = (VERIFY_ALL, VERIFY_ALL)


@dataclass(frozen=True, slots=True)
class FoundRecords:
    """Selected records at `positions` int64[n] of `view` uint8[m], until the next ones."""

    view: NDArray[np.uint8]
    positions: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SkippedRange:
    """Log positions [start, stop) without intact records."""

    start: int
    stop: int
    reason: str


class RangeReader:
    """Reads ranges of one store's log."""

    def __init__(
        self, selection: KernelSelection, *, batch_rows: int, batch_bytes: int, verify: Verify, fail_on_data_loss: bool
    ) -> None:
        self._selection = selection
        self._positions = np.zeros(batch_rows, np.int64)
        self._state = np.zeros(kernels.STATE_SIZE, np.int64)
        self._state[kernels.BEGIN_MS] = selection.selection.begin_ms
        self._state[kernels.END_MS] = selection.selection.end_ms
        self._state[kernels.VERIFY], self._state[kernels.VERIFY_UNWANTED] = verify.value
        self._state[kernels.BYTES_MAX] = batch_bytes
        self._fail_on_data_loss = fail_on_data_loss
        self.skipped: list[SkippedRange] = []
        """Damaged ranges that were skipped without `fail_on_data_loss`."""

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
                at = self._after_damage(window, at, stop, _DAMAGE[reason], place)
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
            self._skip(log_range, at, stop, "a BLANK", place)
        # A boundary found by search would be a false one.
        return stop if stop == log_range.limit or log_range.exact_stop else at

    def _walk(self, window: SegmentView, at: int, stop: int) -> tuple[int, int]:
        """Select records from `at` on; (reason, position where the walk stopped)."""
        until = min(stop, at + _PART_BYTES)
        window.ensure(at, until)
        while True:
            reason, stopped = self._select(window, at, until)
            if reason != kernels.CUT_BY_VIEW or stopped != at:
                return reason, stopped
            window.extend(at, until)

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

    def _after_damage(self, window: SegmentView, at: int, stop: int, reason: str, place: str) -> int:
        """Where records continue after damage. Raises CorruptStoreError unless it is skipped."""
        following = window.intact(at + 1, window.limit)
        if following is None and window.log_range.open_end:
            return stop
        end = stop if following is None else min(following, stop)
        self._skip(window.log_range, at, end, reason, place)
        return end

    def _skip(self, log_range: LogRange, start: int, stop: int, reason: str, place: str) -> None:
        """Note bytes without records. Raises CorruptStoreError unless damage is skipped."""
        if self._fail_on_data_loss:
            raise CorruptStoreError(
                f"{place}: no intact record in bytes [{start:,}, {stop:,}): {reason}; "
                "failOnDataLoss=false leaves such ranges out"
            )
        self.skipped.append(SkippedRange(log_range.segment + start, log_range.segment + stop, reason))


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

    def ensure(self, at: int, stop: int) -> None:
        """Load bytes from `at` on, unless some are loaded."""
        if not self.first <= at < self._end:
            self.show(at, stop)

    def extend(self, at: int, stop: int) -> None:
        """Load [at, stop) and more of the record at `at`, which ends after the loaded part."""
        self.show(at, min(self.limit, max(stop, at + 2 * (self._end - at))))

    @property
    def _end(self) -> int:
        return self.first + len(self.view)

    def boundary(self, start: int, stop: int) -> int | None:
        """The first boundary in [start, stop)."""
        return self._find(start, stop, successor=1)

    def intact(self, start: int, stop: int) -> int | None:
        """The first intact record in [start, stop), whatever follows it."""
        return self._find(start, stop, successor=0)

    def store_time_ms(self, at: int) -> int | None:
        """Store time of the record at a boundary; None for a BLANK."""
        stored = int(stored_at_ms(self.view, at - self.first, len(self.view), self.log_range.segment + at))
        return None if stored < 0 else stored

    def _find(self, start: int, stop: int, successor: int) -> int | None:
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
                    successor,
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
