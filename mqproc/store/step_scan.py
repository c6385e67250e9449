"""The scan of a dispatch step: records of a bounded range of one segment, as units by queue and index entries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import numpy as np

from mqproc.config import MIB
from mqproc.delay_levels import DELAYS_MS
from mqproc.kernels.dispatch import StopReason
from mqproc.kernels.dispatch_buffers import DispatchBuffers, ScanProgress, ScanResult, Zeros
from mqproc.store.queue_table import QueueTable
from mqproc.store.segments import LogSegments

STEP_BYTES_MAX: Final = 8 * MIB
STEP_RECORDS_MAX: Final = 65_536
# Two and some more; a step with more of them just ends earlier.
ENTRIES_PER_RECORD: Final = 4

# Runs of fewer units than this on the average are short.
SHORT_RUN_UNITS: Final = 16
# A step of several pieces of the log ends at these.
WIDE_PIECES_MAX: Final = 16
WIDE_RECORDS_MAX: Final = 4 * STEP_RECORDS_MAX
WIDE_RUNS_MAX: Final = 65_536

# A piece is done, and the next one may follow in the same step.
_PIECE_DONE: Final = frozenset({StopReason.LIMIT, StopReason.RECORDS})
# After these the log goes on where the scan ended.
GOING_ON: Final = frozenset({StopReason.LIMIT, StopReason.RECORDS, StopReason.BLANK, StopReason.ENTRIES_FULL})


def runs_are_short(runs: int, records: int) -> bool:
    """Whether a write of a run, and with many queues the opening of its file, costs more than its units do."""
    return SHORT_RUN_UNITS * runs > records


class Scans(Protocol):
    """Where dispatch gets its scans from."""

    def scan(self, start: int, stop: int, pieces: int = 1) -> ScanResult:
        """What records of [start, stop) give, from the one at `start` on; no more than one segment's, or one step's.

        A step is `pieces` pieces of the log where that can be chosen. The result is valid until the next call. Raises
        FileNotFoundError when the segment is gone, CorruptStoreError.
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
        wide_records: int = 0,
        zeros: Zeros = np.zeros,
        delays_ms: Sequence[int] = DELAYS_MS,
        breathe: Callable[[], None] = lambda: None,
    ) -> None:
        """Queues are looked up in `table`. `zeros` makes the arrays for the results. `delays_ms`: of the levels.

        A step is a piece of up to `step_bytes` and `step_records`, or several ones with up to `wide_records`; `breathe`
        is called between them.
        """
        self._table = table
        self._segments = segments
        self._with_entries = with_entries
        self._step_bytes = step_bytes
        self._step_records = step_records
        self._breathe = breathe
        records_max = max(step_records, wide_records)
        entries = ENTRIES_PER_RECORD * records_max
        self._buffers = DispatchBuffers(table.capacity, records_max, entries, zeros, delays_ms)

    def scan(self, start: int, stop: int, pieces: int = 1) -> ScanResult:
        if pieces == 1 or stop - start <= self._step_bytes:
            return self.scan_below(start, start + self._step_bytes, stop)
        base = self._segments.start_of(start)
        end = min(stop, base + self._segments.segment_size)
        self._buffers.begin()
        at = start
        for piece in range(pieces):
            if piece:
                self._breathe()
            self._add(at, at + self._step_bytes, stop)
            found = self._buffers.progress()
            at = base + found.stopped_at
            if found.reason not in _PIECE_DONE or at >= end or self._is_enough(found):
                break
        return self._buffers.finish()

    def _is_enough(self, found: ScanProgress) -> bool:
        """Whether a further piece has no room, or would spare little."""
        if found.records >= self._buffers.records_max or found.runs >= WIDE_RUNS_MAX:
            return True
        return not runs_are_short(found.runs, found.records)

    def scan_below(self, start: int, limit: int, stop: int) -> ScanResult:
        """One piece, of records that begin below `limit`, which lies in the segment or at its end."""
        self._buffers.begin()
        self._add(start, limit, stop)
        return self._buffers.finish()

    def _add(self, start: int, limit: int, stop: int) -> None:
        table = self._table
        base = self._segments.start_of(start)
        stopped_at = self._buffers.add(
            self._segments.view(base),
            table.bytes_view,
            table.cells,
            table.slots,
            start=start - base,
            limit=limit - base,
            stop=min(stop - base, self._segments.segment_size),
            segment_start=base,
            records_max=self._step_records,
            with_entries=self._with_entries,
        )
        self._segments.touched(start, stopped_at - (start - base))

    def result(self) -> ScanResult:
        """The last scan's result, also when it was made by a process that shares the arrays."""
        return self._buffers.result()
