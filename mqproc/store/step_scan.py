"""The scan of a dispatch step: records of a bounded range of one segment, as units by queue and index entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np

from mqproc.config import MIB
from mqproc.delay_levels import DELAYS_MS
from mqproc.kernels.dispatch import StopReason
from mqproc.kernels.dispatch_buffers import DispatchBuffers, ScanResult, Zeros
from mqproc.store.queue_table import QueueTable
from mqproc.store.segments import LogSegments

STEP_BYTES_MAX: Final = 8 * MIB
STEP_RECORDS_MAX: Final = 65_536
# Two and some more; a step with more of them just ends earlier.
ENTRIES_PER_RECORD: Final = 4
STEP_ENTRIES_MAX: Final = ENTRIES_PER_RECORD * STEP_RECORDS_MAX

# After these the log goes on where the scan ended.
GOING_ON: Final = frozenset({StopReason.LIMIT, StopReason.RECORDS, StopReason.BLANK, StopReason.ENTRIES_FULL})


class Scans(Protocol):
    """Where dispatch gets its scans from."""

    def scan(self, start: int, stop: int) -> ScanResult:
        """What records of [start, stop) give, from the one at `start` on; no more than one segment's, or one step's.

        The result is valid until the next call. Raises FileNotFoundError when the segment is gone, CorruptStoreError.
        """
        ...


class StepScan:
    """Scans in this process."""

    def __init__(
        self,
        table: QueueTable,
        segments: LogSegments,
        *,
        with_entries: bool = True,
        step_bytes: int = STEP_BYTES_MAX,
        step_records: int = STEP_RECORDS_MAX,
        zeros: Zeros = np.zeros,
        delays_ms: Sequence[int] = DELAYS_MS,
    ) -> None:
        """Queues are looked up in `table`. `zeros` makes the arrays for the results. `delays_ms`: of the levels."""
        self._table = table
        self._segments = segments
        self._with_entries = with_entries
        self._step_bytes = step_bytes
        entries = min(STEP_ENTRIES_MAX, ENTRIES_PER_RECORD * step_records)
        self._buffers = DispatchBuffers(table.capacity, step_records, entries, zeros, delays_ms)

    def scan(self, start: int, stop: int) -> ScanResult:
        return self.scan_below(start, start + self._step_bytes, stop)

    def scan_below(self, start: int, limit: int, stop: int) -> ScanResult:
        """As `scan`, of records that begin below `limit`, which lies in the segment or at its end."""
        table = self._table
        base = self._segments.start_of(start)
        result = self._buffers.scan(
            self._segments.view(base),
            table.bytes_view,
            table.cells,
            table.slots,
            start=start - base,
            limit=limit - base,
            stop=min(stop - base, self._segments.segment_size),
            segment_start=base,
            with_entries=self._with_entries,
        )
        self._segments.touched(start, result.stopped_at - (start - base))
        return result

    def result(self) -> ScanResult:
        """The last scan's result, also when it was made by a process that shares the arrays."""
        return self._buffers.result()
