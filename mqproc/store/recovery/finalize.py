"""Last steps of recovery: queue table, group offsets, sync, marks, checkpoint, words."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Callable, Collection, Mapping
from typing import Any

from mqproc.config.options import Options
from mqproc.errors import CorruptStoreError, TooManyQueuesError
from mqproc.io.store_io import StoreIO
from mqproc.ipc.words import Words
from mqproc.layout import checkpoint as checkpoint_layout
from mqproc.layout import control
from mqproc.layout import queue_table as table_layout
from mqproc.layout.consume_queue import UNIT_SIZE
from mqproc.paths import StorePaths
from mqproc.store import checkpoint as checkpoint_file
from mqproc.store import compat as visitor
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.consumequeue.files import ConsumeQueueFiles
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.damage import DamageLedger
from mqproc.store.durable_marks import DurableMark
from mqproc.store.index.files import IndexFiles
from mqproc.store.offsets.consumer_offset_json import CommittedOffset
from mqproc.store.offsets.offset_store import OffsetStore, committed_offsets
from mqproc.store.recovery.log import LogState
from mqproc.store.recovery.queues import QueueRecovery
from mqproc.store.topics import Topics
from mqproc.util.units import counted


class Finalizer:
    """Makes a recovery durable. Queues and index have all records below `dispatched`."""

    def __init__(
        self,
        io: StoreIO,
        paths: StorePaths,
        options: Options,
        marks: Mapping[str, DurableMark],
        log: LogState,
        dispatched: int,
        *,
        marks_valid: bool,
    ) -> None:
        """`marks_valid`: valid marks cover all of queues and index that was not compared."""
        self._io = io
        self._paths = paths
        self._marks = marks
        self._log = log
        self._dispatched = dispatched
        self._marks_valid = marks_valid
        self._writes_record_crcs = options.enabled_append_prop_crc
        self._ends = {"commitlog": log.end, "consumequeue": dispatched}
        if options.message_index_enable:
            self._ends["index"] = dispatched

    def make_durable(
        self, queues: ConsumeQueueFiles, index: IndexFiles, ledger: DamageLedger, *, changed: bool
    ) -> None:
        """Sync, then move the marks, then the checkpoint; skip if up to date and not `changed`.

        Raises FailedSyncError, OSError.
        """
        if self._io.exists(self._paths.read_only):
            # After a failed sync nothing is known to be durable, and another sync would not detect that.
            return
        behind = [name for name, end in self._ends.items() if not self._marks[name].is_at(end)]
        if behind or changed:
            self._sync(queues, index)
        ledger.mark_filled()
        visitor.remember(self._io, self._paths)
        for name in behind:
            self._marks[name].move(self._ends[name], self._log.found.last_store_timestamp_ms)
        # Only now: until the mark moved, records of the previous run lay above it.
        written = self._writes_record_crcs and self._marks["commitlog"].is_at(self._log.end)
        visitor.remember_record_crcs(self._io, self._paths, written=written)
        self._io.crash_point("recover.marked")
        self._store_checkpoint()
        self._io.crash_point("recover.ckpt")

    def _sync(self, queues: ConsumeQueueFiles, index: IndexFiles) -> None:
        if self._marks_valid:
            queues.sync()
            index.sync()
            return
        fd = self._io.open(self._paths.root)
        try:
            self._io.sync_file_system(fd)
        finally:
            self._io.close(fd)

    def _store_checkpoint(self) -> None:
        """Store RocketMQ's checkpoint, never ahead of the log."""
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
        """Set the control words from which the roles continue."""
        log, dispatched = self._log, self._dispatched
        last_ms = log.found.last_store_timestamp_ms
        words[control.MIN_PHYSICAL_OFFSET] = log.begin
        words[control.WRITTEN_STORE_TIMESTAMP_MS] = last_ms
        words[control.WRITER_SYNCED_STORE_TIMESTAMP_MS] = last_ms
        words[control.DISPATCHED_STORE_TIMESTAMP_MS] = last_ms
        for word in (
            control.RESERVED_END,
            control.WRITTEN,
            control.TABLE_AT,
            control.WRITER_SYNCED,
            control.FLUSHER_SYNCED,
        ):
            words[word] = log.end
        words[control.DISPATCHED] = dispatched
        words[control.SEGMENTS_READY_END] = segments.starts()[-1] + segments.segment_size
        commit = index.commit()
        words[control.INDEX_FILE_MS] = commit.file_ms
        words[control.INDEX_ITEMS] = commit.count
        for slot in (0, 1):
            words[control.COMMIT_DISPATCHED[slot]] = dispatched
            words[control.COMMIT_INDEX_MS[slot]] = commit.file_ms
            words[control.COMMIT_INDEX_ITEMS[slot]] = commit.count
            words[control.COMMIT_INDEX_SLOTS[slot]] = commit.slots_used
            words[control.COMMIT_INDEX_END_MS[slot]] = commit.end_timestamp_ms
            words[control.COMMIT_INDEX_END[slot]] = commit.end_physical_offset
        words[control.DAMAGE_HOLES] = len(ledger.holes)
        words[control.DAMAGE_READ_ONLY] = int(ledger.read_only)
        if self._io.exists(self._paths.read_only):
            words[control.SUPERVISOR_SYNC_ERRNO] = errno.EIO


# Queue table


class TableStep:
    """Completes the queue table that recovery has filled."""

    def __init__(
        self,
        io: StoreIO,
        paths: StorePaths,
        table: QueueTable,
        topics: Topics,
        queues: ConsumeQueueFiles,
        ledger: DamageLedger,
    ) -> None:
        self._io = io
        self._paths = paths
        self._table = table
        self._topics = topics
        self._queues = queues
        self._ledger = ledger

    def run(
        self,
        log: LogState,
        queue_recovery: QueueRecovery,
        on_disk: Collection[tuple[str, int]],
        rebuilt: Collection[int],
    ) -> None:
        """Add queues without messages, set next and minimum offsets, then install the table.

        `on_disk` are the queues that had files, `rebuilt` the numbers of rebuilt queues.
        """
        for name in self._topics.names():
            config = self._topics.get(name)
            assert config is not None
            try:
                for queue_id in range(config.queues):
                    self._table.create_queue(name, queue_id)
            except TooManyQueuesError as error:
                text = f"{self._paths.topics}: topic {name!r} has {counted(config.queues, 'queue')}: {error}"
                raise TooManyQueuesError(text) from None
        compared = queue_recovery.limit == log.begin
        for number, topic, queue_id in self._table.live():
            max_offset = self._table.max_offset(number)
            self._table.store(number, table_layout.NEXT_OFFSET, max_offset)
            is_new = (topic, queue_id) not in on_disk
            if log.begin > 0 or compared or is_new or number in rebuilt:
                minimum = self._first_readable(topic, queue_id, max_offset, log.begin)
                self._table.store(number, table_layout.MIN_OFFSET, minimum)
        self._install()

    def _first_readable(self, topic: str, queue_id: int, max_offset: int, log_begin: int) -> int:
        """First queue offset whose record is still in the log; `max_offset` without one."""
        starts = self._queues.starts(topic, queue_id)
        if not starts:
            return max_offset
        if log_begin > 0:
            low = min(self._queues.first_offset(topic, queue_id, starts[0]), max_offset)
            return self._queues.first_at_or_above(topic, queue_id, low, max_offset, log_begin)
        if self._ledger.holes:
            # Nothing has expired, so fillers at the start of the queue represent damaged records.
            return min(starts[0] // UNIT_SIZE, max_offset)
        return min(self._queues.first_offset(topic, queue_id, starts[0]), max_offset)

    def _install(self) -> None:
        """Replace the last run's table, which is needed until the new one is complete."""
        fd = self._io.open(self._paths.next_queues, write=True)
        try:
            self._io.sync(fd)
        finally:
            self._io.close(fd)
        self._io.rename(self._paths.next_queues, self._paths.queues)


# Group offsets


class OffsetStep:
    """Lowers group offsets beyond a queue's end: those groups would miss the next messages."""

    def __init__(
        self,
        io: StoreIO,
        paths: StorePaths,
        table: QueueTable,
        report: Callable[[str], None],
        now_ms: Callable[[], int],
    ) -> None:
        self._io = io
        self._paths = paths
        self._table = table
        self._report = report
        self._now_ms = now_ms

    def run(self) -> None:
        """Lower the offsets durably and report each. Raises OSError, FailedSyncError."""
        if self._io.exists(self._paths.read_only):
            # After a failed sync another one would not detect lost data: wait for the repair.
            return
        beyond = [at for at in self._progress() if self._is_beyond(at)]
        if not beyond:
            return
        progress = OffsetStore(self._io, self._paths, self._io, self._log_event)
        try:
            progress.lower_to_maxima(self._end_of)
            progress.save(self._now_ms())
        finally:
            progress.close()
        for at in beyond:
            queue, end = f"{at.topic} queue {at.queue_id}", self._end_of(at.topic, at.queue_id)
            self._report(f"recovery: group {at.group}: {queue}: set back from {at.offset:,} to its end {end:,}")

    def _progress(self) -> list[CommittedOffset]:
        try:
            return list(committed_offsets(self._io, self._paths))
        except CorruptStoreError as error:
            self._report(f"recovery: groups: {error}; they start without offsets")
            return []

    def _is_beyond(self, at: CommittedOffset) -> bool:
        end = self._end_of(at.topic, at.queue_id)
        return end is not None and at.offset > end

    def _end_of(self, topic: str, queue_id: int) -> int | None:
        """Next offset of a queue, including records not dispatched yet.

        None for an unknown queue.
        """
        number = self._table.entry(topic, queue_id)
        return self._table.next_offset(number) if number >= 0 else None

    def _log_event(self, event: str, **figures: Any) -> None:
        self._report(f"recovery: groups: {event}: {', '.join(f'{name} {value}' for name, value in figures.items())}")
