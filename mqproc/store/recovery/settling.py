"""The end of recovery: all is made durable, marks and checkpoint say so, and all positions stand at the log's end."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Mapping

from mqproc.config import Options
from mqproc.io import StoreIO
from mqproc.ipc.words import Words
from mqproc.layout import checkpoint as checkpoint_layout
from mqproc.layout import control as words_of
from mqproc.paths import StorePaths
from mqproc.store import checkpoint_file, visitor
from mqproc.store.consume_queue import ConsumeQueueFiles
from mqproc.store.damage import DamageLedger
from mqproc.store.index_files import IndexFiles
from mqproc.store.marks import DurableMark
from mqproc.store.recovery.log_step import LogState
from mqproc.store.segments import LogSegments


class Settling:
    """The end of one recovery, whose log ends at `log.end`; queues and index have all records below `dispatched`."""

    def __init__(
        self,
        io: StoreIO,
        paths: StorePaths,
        options: Options,
        marks: Mapping[str, DurableMark],
        log: LogState,
        dispatched: int,
        *,
        vouched: bool,
    ) -> None:
        """`vouched`: of queues and index the marks vouch for everything that recovery has not gone over."""
        self._io = io
        self._paths = paths
        self._marks = marks
        self._log = log
        self._dispatched = dispatched
        self._vouched = vouched
        self._writes_record_crcs = options.enabled_append_prop_crc
        self._ends = {"commitlog": log.end, "consumequeue": dispatched}
        if options.message_index_enable:
            self._ends["index"] = dispatched

    def make_durable(
        self, queues: ConsumeQueueFiles, index: IndexFiles, ledger: DamageLedger, *, changed: bool
    ) -> None:
        """Sync, move the marks, then the checkpoint; nothing where all stands there already and nothing has `changed`.

        Raises FailedSyncError, OSError.
        """
        if self._io.exists(self._paths.read_only):
            # A sync has failed: what is durable is not known, and another sync would not tell.
            return
        behind = [name for name, end in self._ends.items() if not self._marks[name].stands_at(end)]
        if behind or changed:
            self._sync(queues, index)
        ledger.mark_filled()
        visitor.remember(self._io, self._paths)
        for name in behind:
            self._marks[name].move(self._ends[name], self._log.found.last_store_timestamp_ms)
        # Not before: above the mark lay records of the run that has ended.
        written = self._writes_record_crcs and self._marks["commitlog"].stands_at(self._log.end)
        visitor.remember_record_crcs(self._io, self._paths, written=written)
        self._io.crash_point("recover.marked")
        self._store_checkpoint()
        self._io.crash_point("recover.ckpt")

    def _sync(self, queues: ConsumeQueueFiles, index: IndexFiles) -> None:
        if self._vouched:
            queues.sync()
            index.sync()
            return
        fd = self._io.open(self._paths.root)
        try:
            self._io.sync_file_system(fd)
        finally:
            self._io.close(fd)

    def _store_checkpoint(self) -> None:
        """RocketMQ's checkpoint: never later than what the log holds."""
        there = checkpoint_file.read(self._io, self._paths.checkpoint)
        last_ms = self._log.found.last_store_timestamp_ms
        index_ms = there.index_timestamp_ms if 0 <= there.index_timestamp_ms <= last_ms else 0
        wanted = dataclasses.replace(
            there,
            physic_timestamp_ms=last_ms,
            logics_timestamp_ms=last_ms,
            index_timestamp_ms=index_ms,
            confirm_physical_offset=self._log.end,
        )
        if wanted != there:
            words = {
                checkpoint_layout.PHYSIC_TIMESTAMP: wanted.physic_timestamp_ms,
                checkpoint_layout.LOGICS_TIMESTAMP: wanted.logics_timestamp_ms,
                checkpoint_layout.INDEX_TIMESTAMP: wanted.index_timestamp_ms,
                checkpoint_layout.CONFIRM_PHYSICAL_OFFSET: wanted.confirm_physical_offset,
            }
            checkpoint_file.store_words(self._io, self._paths.checkpoint, words, self._io)

    def store_words(self, words: Words, segments: LogSegments, index: IndexFiles, ledger: DamageLedger) -> None:
        """Set the positions that the roles go on from."""
        log, dispatched = self._log, self._dispatched
        last_ms = log.found.last_store_timestamp_ms
        words[words_of.MIN_PHYSICAL_OFFSET] = log.begin
        words[words_of.WRITTEN_STORE_TIMESTAMP_MS] = last_ms
        words[words_of.WRITER_SYNCED_STORE_TIMESTAMP_MS] = last_ms
        words[words_of.DISPATCHED_STORE_TIMESTAMP_MS] = last_ms
        for word in (
            words_of.RESERVED_END,
            words_of.WRITTEN,
            words_of.TABLE_AT,
            words_of.WRITER_SYNCED,
            words_of.FLUSHER_SYNCED,
        ):
            words[word] = log.end
        words[words_of.DISPATCHED] = dispatched
        words[words_of.SEGMENTS_READY_END] = segments.starts()[-1] + segments.segment_size
        commit = index.commit()
        words[words_of.INDEX_FILE_MS] = commit.file_ms
        words[words_of.INDEX_ITEMS] = commit.count
        for slot in (0, 1):
            words[words_of.COMMIT_DISPATCHED[slot]] = dispatched
            words[words_of.COMMIT_INDEX_MS[slot]] = commit.file_ms
            words[words_of.COMMIT_INDEX_ITEMS[slot]] = commit.count
            words[words_of.COMMIT_INDEX_SLOTS[slot]] = commit.slots_used
            words[words_of.COMMIT_INDEX_END_MS[slot]] = commit.end_timestamp_ms
            words[words_of.COMMIT_INDEX_END[slot]] = commit.end_physical_offset
        words[words_of.DAMAGE_HOLES] = len(ledger.holes)
        words[words_of.DAMAGE_READ_ONLY] = int(ledger.read_only)
        if self._io.exists(self._paths.read_only):
            words[words_of.SUPERVISOR_SYNC_ERRNO] = errno.EIO
