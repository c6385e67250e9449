"""Searching the log without a key: by topic, a property, bytes in the body, a time. Compiled, bounded, resumable."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mqproc.errors import BadRequestError, CorruptStoreError
from mqproc.kernels import match, scan
from mqproc.kernels.gather import TIME_MAX, TIME_MIN
from mqproc.kernels.views import as_kernel_array
from mqproc.store.reads.log_records import LogRecords
from mqproc.store.slices import Batch, Slices

SLICE_BYTES = 16 << 20
_MATCHES_PER_SLICE = 256


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a message must have; empty ones hold for all. BEGIN ≤ store time < END, in ms."""

    topic: str = ""
    property_name: str = ""
    property_value: str = ""
    body_contains: bytes = b""
    begin_ms: int = TIME_MIN
    end_ms: int = TIME_MAX


class LogScan:
    """Passes over the log of one store."""

    def __init__(self, records: LogRecords) -> None:
        self._records = records

    def scan(
        self, conditions: Conditions, physical_offset: int, *, max_messages: int, max_bytes: int, max_scan_bytes: int
    ) -> Slices[Batch]:
        """Matching messages from a physical offset on (below 0: the log's beginning), which may lie inside a record.

        Ends after `max_messages`, `max_bytes` of them, or `max_scan_bytes` of log; the cursor (physical offset,) goes
        on. Damaged records are passed over.
        """
        if conditions.property_value and not conditions.property_name:
            raise BadRequestError("a property's value is given without its name")
        found = _Found(conditions, max(1, max_messages), max_bytes)
        begin, end = self._records.visible()
        at = max(begin, physical_offset)
        stop = min(end, at + max(1, max_scan_bytes))
        while at < stop and not found.full:
            at = self._slice(found, at, min(stop, at + SLICE_BYTES), end)
            yield
        complete = at >= end and not found.full
        return Batch(len(found.records), found.records, () if complete else (at,), complete)

    def _slice(self, found: _Found, at: int, stop: int, end: int) -> int:
        """Look at a part of one segment; the physical offset to go on at, above `at` unless `found` is full."""
        segments = self._records.segments
        entered = self._records.segment(at)
        following = segments.start_of(at) + segments.segment_size
        if entered is None:
            return following
        start, view = entered
        limit = min(len(view), end - start)
        reason = scan.REACHED_STOP
        stopped = at
        # A record that the slice cuts is looked at whole, however long it is.
        for slice_stop in (stop - start, at - start + SLICE_BYTES, limit):
            if reason == scan.REACHED_STOP and stopped == at:
                reason = found.run(view, at - start, min(slice_stop, limit), start)
                stopped = start + found.stopped_at
        segments.let_go(start, at - start, stopped - at)
        if not self._take(found, start):
            return found.rejected_at
        if reason in (scan.REACHED_STOP, match.MATCHES_FULL) and stopped > at:
            return stopped
        if reason == scan.BLANK:
            return following
        next_record = int(scan.find_record(view, stopped - start + 1, limit, start, found.out))
        return start + next_record if next_record >= 0 else min(following, end)

    def _take(self, found: _Found, start: int) -> bool:
        """Add what a slice matched to the answer, as far as it has room."""
        for position in found.matches[: found.match_count].tolist():
            try:
                record = self._records.record(start + position)
            except CorruptStoreError:
                continue
            if record is not None and not found.add(record, start + position):
                return False
        return True


class _Found:
    """The answer so far, and the kernel's arguments."""

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
        # What is no UTF-8 is of no record.
        self._parts = [as_kernel_array(bytearray(text.encode(errors="surrogatepass"))) for text in texts]
        self._parts.append(as_kernel_array(bytearray(conditions.body_contains)))
        self._state = np.zeros(match.STATE_SIZE, np.int64)
        self._state[match.BEGIN_MS] = max(conditions.begin_ms, TIME_MIN)
        self._state[match.END_MS] = min(conditions.end_ms, TIME_MAX)
        self._state[match.MATCHES_MAX] = _MATCHES_PER_SLICE

    def run(self, view: NDArray[np.uint8], at: int, stop: int, base: int) -> int:
        """Match view[at:stop]; the kernel's reason."""
        topic, name, value, part = self._parts
        self._state[match.AT], self._state[match.STOP], self._state[match.BASE] = at, stop, base
        return int(match.match_records(view, topic, name, value, part, self.matches, self._state))

    @property
    def stopped_at(self) -> int:
        return int(self._state[match.AT])

    @property
    def match_count(self) -> int:
        return int(self._state[match.MATCHES])

    def add(self, record: NDArray[np.uint8], physical_offset: int) -> bool:
        """Add a record unless the answer is full: then the next answer begins with it."""
        fits = not self.records or self._size + len(record) <= self._max_bytes
        if len(self.records) >= self._max_messages or not fits:
            self.full, self.rejected_at = True, physical_offset
            return False
        self.records.append(record)
        self._size += len(record)
        return True
