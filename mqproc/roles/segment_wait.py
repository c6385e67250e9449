"""What the writer does at the end of a segment that has no successor yet: it hurries who makes them, and waits."""

from __future__ import annotations

import errno
import os
from typing import Final

from mqproc.errors import DiskFullError, StoreBusyError, StoreReadOnlyError
from mqproc.io import reason_of
from mqproc.layout import control as words_of
from mqproc.roles.loop import RoleContext
from mqproc.store.final_syncs import FinalSyncs

WAIT_NS: Final = 5_000_000_000
POLL_S: Final = 0.0005


class SegmentWait:
    """Segments are made by the CommitLog flusher, ahead of the writer as long as it keeps up."""

    def __init__(self, context: RoleContext, syncs: FinalSyncs) -> None:
        self._context = context
        self._clock = context.clock
        self._words = context.control.words
        self._syncs = syncs
        self._flusher_bell = context.bells[words_of.COMMITLOG_FLUSHER]

    def wait_for(self, start: int) -> None:
        """Return when the segment that begins at `start` is there.

        Raises DiskFullError, StoreReadOnlyError, and StoreBusyError after WAIT_NS.
        """
        words = self._words
        if words[words_of.SEGMENTS_READY_END] > start:
            return
        words.add(words_of.WRITER_SEGMENT_WAITS, 1)
        began_ns = self._clock.monotonic_ns()
        try:
            with self._context.heart.busy(words_of.STATE_ALLOCATING):
                self._wait_until_made(start, began_ns + WAIT_NS)
        finally:
            words.add(words_of.WRITER_SEGMENT_WAIT_US, (self._clock.monotonic_ns() - began_ns) // 1000)

    def _wait_until_made(self, start: int, deadline_ns: int) -> None:
        words = self._words
        while words[words_of.SEGMENTS_READY_END] <= start:
            self._flusher_bell.ring()
            if self._syncs.ended():
                raise StoreReadOnlyError(f"segment {start:020d} is not made: a sync failed")
            failed = words[words_of.SEGMENT_ERRNO]
            if failed in (errno.ENOSPC, errno.EDQUOT):
                _, free = self._context.io.disk_usage(self._context.paths.root)
                size = self._context.options.mapped_file_size_commit_log
                raise DiskFullError(
                    f"no room for a segment: {size:,} bytes are needed, {free:,} are free", hint_ms=1000
                )
            if failed == errno.EFBIG:
                raise DiskFullError(f"no segment: {reason_of(OSError(failed, os.strerror(failed)))}", hint_ms=1000)
            if self._clock.monotonic_ns() > deadline_ns:
                raise StoreBusyError(f"segment {start:020d} is not ready (errno {failed})", hint_ms=100)
            self._clock.sleep(POLL_S)
