"""The arrays that a dispatch scan fills (kernels/dispatch.py), and what one found as views of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import DTypeLike, NDArray

from mqproc.delay_levels import DELAYS_MS
from mqproc.kernels.dispatch import (
    CACHE_SIZE,
    DELAYS,
    ENTRIES,
    LEVELS,
    REASON,
    RECORD_ENTRIES_MAX,
    RECORDS,
    RUN_COLUMNS,
    RUNS,
    STATE_SIZE,
    STOPPED_AT,
    STORE_TIMESTAMP_MS,
    UNITS,
    WITH_ENTRIES,
    StopReason,
    scan,
    sort_units,
)
from mqproc.layout import queue_table
from mqproc.layout.consume_queue import UNIT_SIZE


class ScanResult(msgspec.Struct, frozen=True, eq=False):
    """What a scan found. `stopped_at` is a byte of the segment; arrays are views of the buffers until the next scan.

    `runs` int64[runs, RUN_COLUMNS], in the order of their first records: a queue's last run holds its newest record.
    Index entries, in the order of the log: `hashes` int32[entries], `offsets` and `times` int64[entries].
    """

    stopped_at: int
    reason: StopReason
    records: int
    store_timestamp_ms: int
    runs: NDArray[np.int64]
    units: NDArray[np.uint8]
    hashes: NDArray[np.int32]
    offsets: NDArray[np.int64]
    times: NDArray[np.int64]

    @property
    def entries(self) -> int:
        return len(self.hashes)


class ScanProgress(NamedTuple):
    """How far a scan has come: a byte of the segment, why no further, and what it has found since `begin`."""

    stopped_at: int
    reason: StopReason
    records: int
    runs: int


# An enum's member takes ten times as long to find by its value.
_REASONS = tuple(StopReason)
assert [int(reason) for reason in _REASONS] == list(range(len(_REASONS)))
Zeros = Callable[[int, DTypeLike], NDArray[Any]]


class DispatchBuffers:
    """The arrays that scans fill, allocated once."""

    def __init__(
        self,
        queues: int,
        records_max: int,
        entries_max: int,
        zeros: Zeros = np.zeros,
        delays_ms: Sequence[int] = DELAYS_MS,
    ) -> None:
        """Buffers for tables of `queues` queues and scans of up to `records_max` records.

        `delays_ms` are those of the delay levels, the first level's first.
        `zeros` makes the arrays: where another process scans, it makes them in shared memory.
        """
        self.records_max = records_max
        entries_max = max(entries_max, RECORD_ENTRIES_MAX)
        self._state = zeros(STATE_SIZE, np.int64)
        self._state[LEVELS] = len(delays_ms)
        self._state[DELAYS : DELAYS + len(delays_ms)] = delays_ms
        self._hashes = zeros(entries_max, np.int32)
        self._offsets = zeros(entries_max, np.int64)
        self._times = zeros(entries_max, np.int64)
        self._cache = zeros(2 * CACHE_SIZE, np.int64)
        self._units = zeros(UNIT_SIZE * records_max, np.uint8)
        self._sorted_units = zeros(UNIT_SIZE * records_max, np.uint8)
        self._run_of_unit = zeros(records_max, np.int32)
        self._run_of_queue = zeros(queues, np.int32)
        self._runs = zeros(RUN_COLUMNS * records_max, np.int64)
        self._is_finished = True

    def scan(
        self,
        log: NDArray[np.uint8],
        table: NDArray[np.uint8],
        cells: NDArray[np.int64],
        slots: NDArray[np.int32],
        *,
        start: int,
        limit: int,
        stop: int,
        segment_start: int,
        with_entries: bool = True,
    ) -> ScanResult:
        """Scan the records of a segment that begin in [start, limit); nothing at or above `stop` is read."""
        self.begin()
        self.add(
            log,
            table,
            cells,
            slots,
            start=start,
            limit=limit,
            stop=stop,
            segment_start=segment_start,
            records_max=self.records_max,
            with_entries=with_entries,
        )
        return self.finish()

    def begin(self) -> None:
        """Forget what was found before, also when that never came to its `finish`."""
        if not self._is_finished:
            self._run_of_queue[:] = 0
        self._is_finished = False
        self._state[RECORDS : STORE_TIMESTAMP_MS + 1] = 0

    def add(
        self,
        log: NDArray[np.uint8],
        table: NDArray[np.uint8],
        cells: NDArray[np.int64],
        slots: NDArray[np.int32],
        *,
        start: int,
        limit: int,
        stop: int,
        segment_start: int,
        records_max: int,
        with_entries: bool = True,
    ) -> int:
        """As `scan`, of up to `records_max` records behind those that were added since `begin`; `finish` ends it.

        Returns how far it has come: a byte of the segment.
        """
        state = self._state
        records_end = min(int(state[RECORDS]) + records_max, self.records_max)
        state[: WITH_ENTRIES + 1] = (start, min(limit, stop), stop, segment_start, records_end, with_entries)
        scan(
            log,
            state,
            table,
            cells,
            slots,
            self._cache,
            self._units,
            self._run_of_unit,
            self._run_of_queue,
            self._runs,
            self._hashes,
            self._offsets,
            self._times,
        )
        return int(state[STOPPED_AT])

    def progress(self) -> ScanProgress:
        """How far the scan has come."""
        said = self._state.tolist()
        return ScanProgress(said[STOPPED_AT], _REASONS[said[REASON]], said[RECORDS], said[RUNS])

    def finish(self) -> ScanResult:
        """What was found since `begin`."""
        sort_units(self._units, self._sorted_units, self._run_of_unit, self._run_of_queue, self._runs, self._state)
        self._is_finished = True
        return self.result()

    def result(self) -> ScanResult:
        """What the last scan found, also when another process has made it."""
        said = self._state.tolist()
        run_count, entry_count = said[RUNS], said[ENTRIES]
        return ScanResult(
            stopped_at=said[STOPPED_AT],
            reason=_REASONS[said[REASON]],
            records=said[RECORDS],
            store_timestamp_ms=said[STORE_TIMESTAMP_MS],
            runs=self._runs[: RUN_COLUMNS * run_count].reshape(run_count, RUN_COLUMNS),
            units=self._sorted_units[: UNIT_SIZE * said[UNITS]],
            hashes=self._hashes[:entry_count],
            offsets=self._offsets[:entry_count],
            times=self._times[:entry_count],
        )


def warm() -> None:
    """Compile or load these kernels."""
    buffers = DispatchBuffers(1, 1, 1)
    blank = np.zeros(8, np.uint8)
    table = np.zeros(queue_table.HEADER_SIZE, np.uint8)
    buffers.scan(blank, table, table.view(np.int64), np.zeros(16, np.int32), start=0, limit=8, stop=8, segment_start=0)
