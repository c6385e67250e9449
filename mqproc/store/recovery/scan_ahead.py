"""Scans of a long range of the log by other processes, a few steps ahead of the dispatch that takes them in order.

    scanner 0:  piece 0 ──▶ piece 2 ──▶ …        shared arrays        dispatch:  piece 0, 1, 2, 3 …
    scanner 1:  piece 1 ──▶ piece 3 ──▶ …   ───────────────────────▶    writes units, puts entries

The range is cut into pieces of a step's size, wherever that falls: a scanner begins at the first intact record of its
piece. Its result counts only if dispatch then stands just there, so that it is what dispatch would have found itself;
else, and where a scanner could not go on (damage, a queue that is not in the table yet), dispatch scans the piece. So
scanners need not know anything, change nothing, and may be killed at any time.
"""

from __future__ import annotations

import bisect
import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mqproc.config import MIB
from mqproc.delay_levels import DELAYS_MS
from mqproc.kernels.dispatch_buffers import ScanResult
from mqproc.store.forking import leave_signals_to_the_parent, signals_held
from mqproc.store.queue_table import QueueTable
from mqproc.store.recovery.resync import Resync
from mqproc.store.segments import LogSegments
from mqproc.store.step_scan import GOING_ON, STEP_BYTES_MAX, StepScan

if TYPE_CHECKING:
    _Pipe = Connection[Any, Any]

# Taking a piece takes dispatch about as long as scanning it.
_SCANNERS_MAX: Final = 2
# So that neither waits when the other one is held up for a moment.
_PIECES_EACH: Final = 4
# A piece takes a fraction of a second even from a slow disk.
_PATIENCE_S: Final = 60.0
_NOWHERE: Final = -1


@dataclass(frozen=True, slots=True)
class Scanners:
    """So many processes scan ranges of at least `range_bytes_min`, in pieces; with a `count` of 0 none ever does."""

    count: int = 0
    # Less is done before a process has begun.
    range_bytes_min: int = 64 * MIB
    piece_bytes: int = STEP_BYTES_MAX


NO_SCANNERS: Final = Scanners()


def usable_scanners() -> Scanners:
    """As many as have a processor, beside the one that dispatch takes."""
    return Scanners(min(len(os.sched_getaffinity(0)) - 1, _SCANNERS_MAX))


class ScanAhead:
    """Scans of [start, stop) for one dispatch, which takes them in order. Close it to end the scanners."""

    def __init__(
        self,
        table: QueueTable,
        segments: LogSegments,
        start: int,
        stop: int,
        scanners: Scanners,
        report: Callable[[str], None],
        *,
        with_entries: bool = True,
        delays_ms: Sequence[int] = DELAYS_MS,
    ) -> None:
        """Forks the processes, which see the table grow. `report` is told when one cannot begin, or ends too early."""
        self._segments = segments
        self._report = report
        self._starts, self._limits = _pieces(start, stop, segments.segment_size, scanners.piece_bytes)
        self._here = StepScan(table, segments, with_entries=with_entries, delays_ms=delays_ms)
        # By piece, in turns: a scanner's next piece goes to the same arrays only after what it had put there was taken.
        self._scans = [
            StepScan(table, segments, with_entries=with_entries, zeros=self._shared_zeros, delays_ms=delays_ms)
            for _ in range(_PIECES_EACH * scanners.count)
        ]
        self._handed = 0
        self._taken = _NOWHERE
        self._pipes: list[_Pipe] = []
        self._processes: list[BaseProcess] = []
        try:
            for _ in range(scanners.count):
                self._start()
        except OSError as error:
            self._give_up(str(error))
        except BaseException:
            self.close()
            raise

    def scan(self, start: int, stop: int, pieces: int = 1) -> ScanResult:
        """As `Scans` says; what a scanner has scanned is a step."""
        piece = bisect.bisect_right(self._limits, start)
        if piece > self._taken:
            self._taken = piece
            if self._pipes and self._begin_of(piece) == start:
                result = self._scans[piece % len(self._scans)].result()
                end = self._segments.start_of(start) + result.stopped_at
                # A scanner knows nothing of damage ahead, and its table may be older than dispatch's.
                if result.reason in GOING_ON and (end < stop or stop == self._limits[-1]):
                    return result
        return self._here.scan_below(start, self._limits[piece], stop)

    def close(self) -> None:
        """End the scanners, also those that are at work."""
        for pipe in self._pipes:
            pipe.close()
        self._pipes = []
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes = []

    def _begin_of(self, piece: int) -> int:
        """Where the result of a piece begins that is in its arrays now, _NOWHERE without one. Hands on what is free."""
        pipe = self._pipes[piece % len(self._pipes)]
        try:
            self._handed = max(self._handed, piece)
            while self._handed < min(piece + len(self._scans), len(self._limits)):
                self._pipes[self._handed % len(self._pipes)].send(self._handed)
                self._handed += 1
            while pipe.poll(_PATIENCE_S):
                found, begin = pipe.recv()
                if found == piece:
                    return int(begin)
            why = f"no answer in {_PATIENCE_S:.0f} s"
        except (EOFError, ConnectionResetError, BrokenPipeError):
            wait([process.sentinel for process in self._processes], _PATIENCE_S)
            codes = [process.exitcode for process in self._processes if not process.is_alive()]
            why = f"exit code {', '.join(map(str, codes))}"
        self._give_up(why)
        return _NOWHERE

    def _give_up(self, why: str) -> None:
        self._report(f"recovery: no processes scan the log ahead any more: {why}")
        self.close()

    def _shared_zeros(self, count: int, dtype: DTypeLike) -> NDArray[Any]:
        size = count * np.dtype(dtype).itemsize
        return np.frombuffer(self._segments.io.shared_memory(size), dtype, count)

    def _start(self) -> None:
        here, there = multiprocessing.Pipe()
        others = [*self._pipes, here]
        process = multiprocessing.get_context("fork").Process(target=self._serve, args=(there, others), daemon=True)
        with signals_held():
            process.start()
            self._pipes.append(here)
            self._processes.append(process)
        there.close()

    # A scanner's side

    def _serve(self, pipe: _Pipe, others: Sequence[_Pipe]) -> None:
        """A scanner's whole life: numbers of pieces in, where their results begin out, until dispatch hangs up."""
        # A copy of its end would keep this process from seeing that it is gone.
        for other in others:
            other.close()
        leave_signals_to_the_parent()
        resync = Resync(self._segments)
        try:
            while True:
                piece = pipe.recv()
                pipe.send((piece, self._scan_piece(piece, resync)))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return

    def _scan_piece(self, piece: int, resync: Resync) -> int:
        """Scan a piece into its arrays; where its first record begins, _NOWHERE without one."""
        limit = self._limits[piece]
        # Dispatch asks too, but a scanner is as far ahead of it as it asks.
        self._segments.read_ahead(self._starts[piece], self._limits[-1])
        begin = resync.next_record(self._starts[piece], limit)
        if begin is None:
            return _NOWHERE
        self._scans[piece % len(self._scans)].scan_below(begin, limit, self._limits[-1])
        return begin


def _pieces(start: int, stop: int, segment_size: int, piece_bytes: int) -> tuple[list[int], list[int]]:
    """(starts, limits) of the pieces of [start, stop), none of which reaches over a segment's end."""
    starts, limits = [], []
    while start < stop:
        starts.append(start)
        segment_end = start - start % segment_size + segment_size
        start = min(start + piece_bytes, segment_end, stop)
        limits.append(start)
    return starts, limits
