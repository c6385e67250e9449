"""Admission of appends: back-pressure, disk full, read-only."""

from __future__ import annotations

import errno
import operator
import os
from pathlib import Path
from typing import Final

from mqproc.client.retry import RESTART_MS
from mqproc.config.options import Options
from mqproc.errors import (
    DiskFullError,
    MqprocError,
    RetryLaterError,
    StoreAccessError,
    StoreBusyError,
    StoreReadOnlyError,
)
from mqproc.io.store_io import reason_of
from mqproc.ipc.control_words import why_read_only
from mqproc.layout import control
from mqproc.roles.role import RoleContext
from mqproc.store.sync_guard import SyncGuard
from mqproc.util.units import counted

# Pause of one step when the dispatch lag approaches `max_dispatch_behind_bytes`.
SLOW_STEP_S: Final = 0.005
_closing_words = operator.itemgetter(*control.CLOSING_WORDS)
WAIT_NS: Final = 5_000_000_000
POLL_S: Final = 0.0005


class AppendAdmission:
    """Checked once for all frames of a step. `taking` is False while the writer stops."""

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._words = context.control.words
        self._cells = self._words.cells
        self.options = context.options
        self.taking = True
        self._lost: Path | None = None

    def close_for(self, lost: Path) -> None:
        """Refuse all appends from now on; the supervisor ends the group."""
        self._lost = lost
        self.taking = False

    @property
    def options(self) -> Options:
        return self._options

    @options.setter
    def options(self, options: Options) -> None:
        self._options = options
        self._lag_max_bytes = options.max_dispatch_behind_bytes

    def check(self) -> MqprocError | None:
        """Slow the step down when dispatch lags; returns the error that refuses appends, if any."""
        cells = self._cells
        lag_bytes = cells[control.WRITTEN] - cells[control.DISPATCHED]
        if lag_bytes * 2 <= self._lag_max_bytes and self.taking and not any(_closing_words(cells)):
            return None
        self._slow_down(lag_bytes)
        return self.reason_to_refuse()

    def reason_to_refuse(self) -> MqprocError | None:
        """Return the error that refuses appends now, if any."""
        group, words = self._context.control, self._cells
        if self._lost is not None:
            return StoreAccessError(f"{self._lost} was deleted, moved or replaced: nothing is stored, the group ends")
        if not self.taking:
            if words[control.GROUP_STATE] == control.GROUP_STOPPING:
                return StoreBusyError("the store is being stopped", hint_ms=1000)
            return RetryLaterError("the writer is being restarted", hint_ms=RESTART_MS)
        if failed := group.sync_errno:
            return StoreReadOnlyError(f"{why_read_only(failed)}; run mqproc store repair")
        if group.damage_read_only:
            place = self._context.paths.damage
            return StoreReadOnlyError(
                f"the log has {counted(group.damage_holes, 'damaged range')} and on_damage = read_only; see {place}"
            )
        if words[control.DISK_FULL]:
            used, free = words[control.DISK_USED_BYTES], words[control.DISK_FREE_BYTES]
            reason = self._options.disk_refusal(used, free) or f"{free:,} bytes are free"
            return DiskFullError(f"disk nearly full: {reason}", hint_ms=1000)
        lag_bytes = words[control.WRITTEN] - words[control.DISPATCHED]
        if lag_bytes > self._lag_max_bytes:
            limit = self._lag_max_bytes
            return StoreBusyError(f"dispatch lag of {lag_bytes:,} bytes; the limit is {limit:,}", hint_ms=100)
        return None

    def _slow_down(self, lag_bytes: int) -> None:
        """Pause the step in proportion to the dispatch lag, before the limit refuses appends."""
        limit = self._lag_max_bytes
        if lag_bytes * 2 > limit:
            pause_s = SLOW_STEP_S * min(1.0, (lag_bytes * 2 - limit) / limit)
            self._context.clock.sleep(pause_s)
            self._words.add(control.WRITER_SLOWED_MS, max(1, round(pause_s * 1000)))


class SegmentWait:
    """Wait at the end of a segment whose successor the commitlog-flusher has not allocated yet."""

    def __init__(self, context: RoleContext, syncs: SyncGuard) -> None:
        self._context = context
        self._clock = context.clock
        self._words = context.control.words
        self._syncs = syncs
        self._flusher_bell = context.bells[control.COMMITLOG_FLUSHER]

    def wait_for(self, start: int) -> None:
        """Ring the flusher and return when the segment that begins at `start` exists.

        Raises DiskFullError, StoreReadOnlyError, and StoreBusyError after WAIT_NS.
        """
        words = self._words
        if words[control.SEGMENTS_READY_END] > start:
            return
        words.add(control.WRITER_SEGMENT_WAITS, 1)
        began_ns = self._clock.monotonic_ns()
        try:
            with self._context.heartbeat.busy(control.STATE_ALLOCATING):
                self._wait_until_made(start, began_ns + WAIT_NS)
        finally:
            words.add(control.WRITER_SEGMENT_WAIT_US, (self._clock.monotonic_ns() - began_ns) // 1000)

    def _wait_until_made(self, start: int, deadline_ns: int) -> None:
        words = self._words
        while words[control.SEGMENTS_READY_END] <= start:
            self._flusher_bell.ring()
            if self._syncs.has_failed():
                raise StoreReadOnlyError(f"segment {start:020d} cannot be created: a sync failed")
            failed = words[control.SEGMENT_ERRNO]
            if failed in (errno.ENOSPC, errno.EDQUOT):
                _, free = self._context.io.disk_usage(self._context.paths.root)
                size = self._context.options.mapped_file_size_commit_log
                raise DiskFullError(
                    f"no room for a segment: {size:,} bytes are needed, {free:,} are free", hint_ms=1000
                )
            if failed == errno.EFBIG:
                raise DiskFullError(
                    f"no segment can be created: {reason_of(OSError(failed, os.strerror(failed)))}", hint_ms=1000
                )
            if self._clock.monotonic_ns() > deadline_ns:
                raise StoreBusyError(f"segment {start:020d} is not ready (errno {failed})", hint_ms=100)
            self._clock.sleep(POLL_S)
