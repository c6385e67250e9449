"""Records of the CommitLog, by physical offset or by a scan, verified on access."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mqproc.errors import BadRequestError, CorruptStoreError
from mqproc.kernels import gather, log_match, record_check, scan
from mqproc.kernels.gather import TIME_MAX, TIME_MIN
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.kernels.record_check import REASON_NAMES, VERIFY_ALL, checked_size, stored_at_ms
from mqproc.layout import record
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.consumequeue.bounds import UNIT_DTYPE
from mqproc.store.cooperative import RecordPage, Slices
from mqproc.store.damage import Hole, KnownHoles

_NO_BYTES = np.zeros(0, np.uint8)
_NO_WORDS = np.zeros(0, np.int64)


class Visible(NamedTuple):
    """The readable part of the log: physical offsets [begin, end)."""

    begin: int
    end: int


class LogRecords:
    """Records by offset. `visible` returns the readable part, `holes` knows damaged ranges."""

    def __init__(self, segments: LogSegments, visible: Callable[[], Visible], holes: KnownHoles | None = None) -> None:
        self.segments = segments
        self.visible = visible
        self._holes = holes

    def have_holes(self) -> bool:
        """Whether damaged ranges of the log are known."""
        return self._holes is not None and self._holes.any()

    def holes_named(self, position: int, begin: int, end: int) -> list[Hole]:
        """As `KnownHoles.named`."""
        return self._holes.named(position, begin, end) if self._holes is not None else []

    def segment(self, physical_offset: int) -> tuple[int, NDArray[np.uint8]] | None:
        """(start, view) of the segment that contains an offset; None if it does not exist.

        Raises CorruptStoreError for a short file.
        """
        start = self.segments.start_of(physical_offset)
        try:
            return start, self.segments.view(start)
        except FileNotFoundError:
            return None

    def record(self, physical_offset: int) -> NDArray[np.uint8] | None:
        """A copy of the record at an offset; None outside the log or if no record begins there.

        Raises CorruptStoreError if the record's CRC is wrong.
        """
        found = self._find(physical_offset)
        if found is None:
            return None
        start, view, limit = found
        at = physical_offset - start
        size = checked_size(view, at, limit, physical_offset, 0)
        if size < 0:
            return None
        reason = -checked_size(view, at, limit, physical_offset, VERIFY_ALL)
        if reason > 0:
            place = f"{self.segments.path(start)}: record [{physical_offset}, {physical_offset + size})"
            raise CorruptStoreError(f"{place}: {REASON_NAMES[reason]}")
        self.segments.note_read(physical_offset, size)
        return view[at : at + size].copy()

    def intact(self, physical_offset: int) -> NDArray[np.uint8] | None:
        """The same, but None for a damaged record, which status and `damage.json` report."""
        try:
            return self.record(physical_offset)
        except CorruptStoreError:
            return None

    def copies(self, places: Iterable[int]) -> list[bytes | None]:
        """Records at several offsets; None for each that is deleted or has a wrong CRC."""
        found: list[bytes | None] = []
        begin, end = self.visible()
        segments = self.segments
        start, limit, view = -1, 0, _NO_BYTES
        for place in places:
            if start < 0 or not start <= place < start + segments.segment_size:
                entered = self.segment(place) if begin <= place < end else None
                start, view = entered or (-1, _NO_BYTES)
                limit = min(len(view), end - start)
            at = place - start
            size = checked_size(view, at, limit, place, VERIFY_ALL) if start >= 0 else 0
            found.append(view[at : at + size].tobytes() if size > 0 else None)
            segments.note_read(place, size)
        return found

    def gathered(self, places: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """Concatenated records at several offsets, and which offsets have one, bool[n].

        Deleted records and records with a wrong CRC are left out.
        """
        begin, end = self.visible()
        found = (places >= begin) & (places < end)
        starts = places - places % self.segments.segment_size
        edges = [0, *(np.flatnonzero(starts[1:] != starts[:-1]) + 1).tolist(), len(places)]
        parts = [_NO_BYTES]
        for first, stop in itertools.pairwise(edges):
            entered = self.segment(int(places[first])) if found[first:stop].any() else None
            if entered is None:
                found[first:stop] = False
            else:
                parts.append(self._gather(*entered, end, places[first:stop], found[first:stop]))
        return np.concatenate(parts), found

    def _gather(
        self, start: int, view: NDArray[np.uint8], end: int, places: NDArray[np.int64], found: NDArray[np.bool_]
    ) -> NDArray[np.uint8]:
        """Records of one segment; sets `found` to False where none begins."""
        limit = min(len(view), end - start)
        found &= places - start + record.FIXED_SIZE_V4 <= limit
        rows = np.flatnonzero(found)
        ats = places[rows] - start
        units = np.zeros(len(rows), UNIT_DTYPE)
        units["physical_offset"] = places[rows]
        units["size"] = view[ats[:, None] + np.arange(record.TOTAL_SIZE, record.TOTAL_SIZE + 4)].view(">i4")[:, 0]
        sizes = units["size"].astype(np.int64)
        out = np.empty(int(sizes[(sizes > 0) & (ats + sizes <= limit)].sum()), np.uint8)
        state = np.zeros(gather.STATE_SIZE, np.int64)
        state[gather.UNIT_STOP], state[gather.BASE], state[gather.LOG_STOP] = len(rows), start, end
        state[gather.VERIFY], state[gather.COPY] = VERIFY_ALL, 1
        state[gather.COUNT_LIMIT] = state[gather.BYTES_LIMIT] = state[gather.SCAN_BUDGET] = 1 << 62
        state[gather.BORN_BEGIN_MS] = state[gather.STORE_BEGIN_MS] = gather.TIME_MIN
        state[gather.BORN_END_MS] = state[gather.STORE_END_MS] = gather.TIME_MAX
        codes, tags, ends, program, texts, scratch = _NO_WORDS, _NO_BYTES, _NO_WORDS, _NO_WORDS, _NO_BYTES, _NO_WORDS
        cells = units.view(np.uint8)
        walk = (cells, view, codes, tags, ends, program, texts, scratch, out, state)
        while gather.gather(*walk) != gather.UNITS_DONE:
            found[rows[state[gather.UNIT]]] = False
            state[gather.UNIT] += 1
        self.segments.note_reads(places[rows])
        return out[: int(state[gather.OUT_AT])]

    def store_timestamp_ms(self, physical_offset: int) -> int:
        """Store time of the record at an offset, −1 if none exists."""
        found = self._find(physical_offset)
        if found is None:
            return -1
        start, view, limit = found
        self.segments.note_read(physical_offset)
        return int(stored_at_ms(view, physical_offset - start, limit, physical_offset))

    def _find(self, physical_offset: int) -> tuple[int, NDArray[np.uint8], int] | None:
        """(segment's start, its view, end of its readable part)."""
        begin, end = self.visible()
        if not begin <= physical_offset < end:
            return None
        found = self.segment(physical_offset)
        if found is None:
            return None
        start, view = found
        return start, view, min(len(view), end - start)


# Log scan: search by topic, property, body content or time; bounded and resumable

SLICE_BYTES = 4 << 20
_MATCHES_PER_SLICE = 256
BODY_CONTAINS_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Conditions:
    """Conditions for messages; an empty condition accepts all. begin_ms ≤ store time < end_ms."""

    topic: str = ""
    property_name: str = ""
    property_value: str = ""
    body_contains: bytes = b""
    begin_ms: int = TIME_MIN
    end_ms: int = TIME_MAX


@dataclass(frozen=True, slots=True)
class LogScan:
    """Scans of the log of one store."""

    records: LogRecords

    def scan(
        self, conditions: Conditions, physical_offset: int, *, max_messages: int, max_bytes: int, max_scan_bytes: int
    ) -> Slices[RecordPage]:
        """Matching messages from a physical offset on (below 0: from the log's beginning).

        The offset may lie inside a record. Ends after `max_messages`, `max_bytes` of them, or `max_scan_bytes` of log;
        the cursor (physical offset,) continues. Damaged records are skipped.
        """
        if conditions.property_value and not conditions.property_name:
            raise BadRequestError("property_value is given without property_name")
        if (size := len(conditions.body_contains)) > BODY_CONTAINS_MAX:
            raise BadRequestError(f"body_contains of {size:,} bytes exceeds {BODY_CONTAINS_MAX:,}")
        found = _Found(conditions, max(1, max_messages), max_bytes)
        begin, end = self.records.visible()
        at = max(begin, physical_offset)
        stop = min(end, at + max(1, max_scan_bytes))
        while at < stop and not found.full:
            at = self.scan_slice(found, at, min(stop, at + SLICE_BYTES), end)
            yield
        complete = at >= end and not found.full
        return RecordPage(len(found.records), found.records, () if complete else (at,), complete)

    def scan_slice(self, found: _Found, at: int, stop: int, end: int) -> int:
        """Scan a part of one segment; returns where to continue, above `at` unless `found` is full."""
        segments = self.records.segments
        entered = self.records.segment(at)
        following = segments.start_of(at) + segments.segment_size
        if entered is None:
            return following
        start, view = entered
        limit = min(len(view), end - start)
        reason = record_check.REACHED_STOP
        stopped = at
        # A record that crosses the end of the slice is scanned as a whole.
        for slice_stop in (stop - start, at - start + SLICE_BYTES, limit):
            if reason == record_check.REACHED_STOP and stopped == at:
                reason = found.run(view, at - start, min(slice_stop, limit), start)
                stopped = start + found.stopped_at
        segments.drop_pages(start, at - start, stopped - at)
        if not self._collect(found, start):
            return found.rejected_at
        if reason in (record_check.REACHED_STOP, log_match.MATCHES_FULL) and stopped > at:
            return stopped
        if reason == record_check.BLANK:
            return following
        next_record = int(scan.find_record(view, stopped - start + 1, limit, start, found.out))
        return start + next_record if next_record >= 0 else min(following, end)

    def _collect(self, found: _Found, start: int) -> bool:
        """Add a slice's matches to the answer; False when it is full."""
        for position in found.matches[: found.match_count].tolist():
            try:
                record = self.records.record(start + position)
            except CorruptStoreError:
                continue
            if record is not None and not found.add(record, start + position):
                return False
        return True


class _Found:
    """The answer so far, with the kernel's arguments."""

    def __init__(self, conditions: Conditions, max_messages: int, max_bytes: int) -> None:
        self.records: list[NDArray[np.uint8]] = []
        self.matches = np.zeros(_MATCHES_PER_SLICE, np.int64)
        self.out = np.zeros(scan.SCAN_SIZE, np.int64)
        self.full = False
        self.rejected_at = 0
        self._size = 0
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        texts = (conditions.topic, conditions.property_name, conditions.property_value)
        # Texts that are not valid UTF-8 match no record.
        self._parts = [as_kernel_array(bytearray(text.encode(errors="surrogatepass"))) for text in texts]
        self._parts.append(as_kernel_array(bytearray(conditions.body_contains)))
        self._borders = np.zeros(len(conditions.body_contains), np.int64)
        log_match.find_borders(self._parts[-1], self._borders)
        self._state = np.zeros(log_match.STATE_SIZE, np.int64)
        self._state[log_match.BEGIN_MS] = max(conditions.begin_ms, TIME_MIN)
        self._state[log_match.END_MS] = min(conditions.end_ms, TIME_MAX)
        self._state[log_match.MATCHES_MAX] = _MATCHES_PER_SLICE

    def run(self, view: NDArray[np.uint8], at: int, stop: int, base: int) -> int:
        """Match view[at:stop]; returns the kernel's stop reason."""
        topic, name, value, part = self._parts
        self._state[log_match.AT], self._state[log_match.STOP], self._state[log_match.BASE] = at, stop, base
        arguments = topic, name, value, part, self._borders, self.matches, self._state
        return int(log_match.match_records(view, *arguments))

    @property
    def stopped_at(self) -> int:
        return int(self._state[log_match.AT])

    @property
    def match_count(self) -> int:
        return int(self._state[log_match.MATCHES])

    def add(self, record: NDArray[np.uint8], physical_offset: int) -> bool:
        """Add a record, unless the answer is full: then the next answer begins with it."""
        fits = not self.records or self._size + len(record) <= self._max_bytes
        if len(self.records) >= self._max_messages or not fits:
            self.full, self.rejected_at = True, physical_offset
            return False
        self.records.append(record)
        self._size += len(record)
        return True
