"""Log scan: search by topic, property, body content or time; bounded and resumable."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mqproc.errors import BadRequestError, CorruptStoreError
from mqproc.kernels import log_match, record_check, scan
from mqproc.kernels.gather import TIME_MAX, TIME_MIN
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.store.cooperative import RecordPage, Slices
from mqproc.store.read.records import LogRecords

SLICE_BYTES = 16 << 20
_MATCHES_PER_SLICE = 256


@dataclass(frozen=True, slots=True)
class Conditions:
    """Conditions for messages; empty ones accept all. begin_ms ≤ store time < end_ms."""

    topic: str = ""
    property_name: str = ""
    property_value: str = ""
    body_contains: bytes = b""
    begin_ms: int = TIME_MIN
    end_ms: int = TIME_MAX


class LogScan:
    """Scans of the log of one store."""

    def __init__(self, records: LogRecords) -> None:
        self._records = records

    def scan(
        self, conditions: Conditions, physical_offset: int, *, max_messages: int, max_bytes: int, max_scan_bytes: int
    ) -> Slices[RecordPage]:
        """Matching messages from a physical offset on (below 0: from the log's beginning).

        The offset may lie inside a record. Ends after `max_messages`, `max_bytes` of them, or `max_scan_bytes` of log;
        the cursor (physical offset,) continues. Damaged records are skipped.
        """
        if conditions.property_value and not conditions.property_name:
            raise BadRequestError("property_value is given without property_name")
        found = _Found(conditions, max(1, max_messages), max_bytes)
        begin, end = self._records.visible()
        at = max(begin, physical_offset)
        stop = min(end, at + max(1, max_scan_bytes))
        while at < stop and not found.full:
            at = self.scan_slice(found, at, min(stop, at + SLICE_BYTES), end)
            yield
        complete = at >= end and not found.full
        return RecordPage(len(found.records), found.records, () if complete else (at,), complete)

    def scan_slice(self, found: _Found, at: int, stop: int, end: int) -> int:
        """Scan a part of one segment; returns where to continue, above `at` unless `found` is full."""
        segments = self._records.segments
        entered = self._records.segment(at)
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
                record = self._records.record(start + position)
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
        self._state = np.zeros(log_match.STATE_SIZE, np.int64)
        self._state[log_match.BEGIN_MS] = max(conditions.begin_ms, TIME_MIN)
        self._state[log_match.END_MS] = min(conditions.end_ms, TIME_MAX)
        self._state[log_match.MATCHES_MAX] = _MATCHES_PER_SLICE

    def run(self, view: NDArray[np.uint8], at: int, stop: int, base: int) -> int:
        """Match view[at:stop]; returns the kernel's stop reason."""
        topic, name, value, part = self._parts
        self._state[log_match.AT], self._state[log_match.STOP], self._state[log_match.BASE] = at, stop, base
        return int(log_match.match_records(view, topic, name, value, part, self.matches, self._state))

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
