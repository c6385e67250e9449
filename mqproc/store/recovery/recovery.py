"""Recovery: makes log, queues and index consistent after any kind of stop.

    files     fix unexpected names and lengths (`store_files`); later, when the disk cannot read a file of the queues
              or the index, quarantine the file and start again
    log       walk from its durable mark, record damage, cut the torn tail, sync (`log`)
    queues    trust units below the ConsumeQueue mark, find queues that lost units (`queues`)
    index     trust entries below the index mark (`index`)
    dispatch  dispatch the log once, with the engine's own code: lost queues first, then all to the end (`rebuild`)
    table     write the queue table with the offsets of every queue (`finalize`)
    groups    lower group offsets beyond a queue's end to it (`finalize`)
    marks     sync everything, move marks and checkpoint to the end of the log (`finalize`)
    words     set all positions of the control file to the end of the log

Nothing else has the store open. Every step is idempotent; a second run changes nothing. A mark whose log has changed
is not trusted: then that part is compared with the log from its beginning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from mqproc.config.options import Options, RetentionGuard
from mqproc.errors import CorruptStoreError
from mqproc.io.store_io import StoreIO
from mqproc.ipc.control_words import Words
from mqproc.kernels.dispatch import IndexEntries
from mqproc.layout import control
from mqproc.layout.consume_queue import UNIT_SIZE
from mqproc.paths import StorePaths, segment_start
from mqproc.store import compat
from mqproc.store import topics as deleted_topics
from mqproc.store.commitlog.segments import LogSegments, adopted_segment_size
from mqproc.store.compat import Maker
from mqproc.store.consumequeue.files import ConsumeQueueFiles, adopted_file_bytes
from mqproc.store.consumequeue.table import QueueSnapshots, QueueTable, read_next_offsets, read_queue_snapshots
from mqproc.store.damage import DamageLedger, unreadable_file
from mqproc.store.dispatch import index_entries
from mqproc.store.durable_marks import DistrustedMark, DurableMark, ensure_checkpoint
from mqproc.store.index.files import IndexFiles, adopted_index_shape, last_offset
from mqproc.store.index.tags import adopted_index_tags, oldest_is_indexed
from mqproc.store.lost_messages import LostMessages, lines_about, merged_losses
from mqproc.store.recovery.finalize import complete_table, lower_group_offsets, make_durable, store_words
from mqproc.store.recovery.index import IndexStep
from mqproc.store.recovery.log import LOG_BYTES_MAX, LogRecovery, LogState, LogStep, OpenStore
from mqproc.store.recovery.queues import QueueRecovery, check_queue_types, messages_after
from mqproc.store.recovery.rebuild import NO_SCANNERS, DispatchStep, Rebuild, RebuildResult, Scanners
from mqproc.store.recovery.store_files import StoreFiles
from mqproc.store.topics import Topics, check_queue_limit, restore_deletions
from mqproc.store.unsupported import refuse_unreadable
from mqproc.util.units import counted

Report = Callable[[str], None]
# Number of topics listed by name in a report line.
TOPICS_LISTED: Final = 5
# Number of ranges of lost messages that are reported.
LOST_LISTED: Final = 100
_ADOPTING_TRIES: Final = 10
_MARKS: Final = ("commitlog", "consumequeue", "index")


def adopt_sizes(io: StoreIO, paths: StorePaths, options: Options, report: Report) -> Options:
    """Return the options with the store's own file sizes, index entries and retention guard."""
    for _ in range(_ADOPTING_TRIES):
        lines: list[str] = []
        # Retention of a running group may delete a file that is about to be read: then look at the others.
        with contextlib.suppress(FileNotFoundError):
            adopted = _adopted(io, paths, options, lines.append)
            for line in lines:
                report(line)
            return adopted
    return _adopted(io, paths, options, report)


def _adopted(io: StoreIO, paths: StorePaths, options: Options, report: Report) -> Options:
    segment = adopted_segment_size(io, paths.commit_log, options.mapped_file_size_commit_log)
    queue = adopted_file_bytes(io, paths.consume_queue, options.consume_queue_file_bytes)
    slots, items = adopted_index_shape(io, paths.index, options.max_hash_slot_num, options.max_index_num)
    changes: dict[str, Any] = {}
    for name, found, configured in (
        ("mapped_file_size_commit_log", segment, options.mapped_file_size_commit_log),
        ("mapped_file_size_consume_queue", queue, options.consume_queue_file_bytes),
        ("max_hash_slot_num", slots, options.max_hash_slot_num),
        ("max_index_num", items, options.max_index_num),
    ):
        if found != configured:
            report(f"{name}: the store's files have {found:,}, the option says {configured:,}: {found:,} is used")
            changes[name] = found
    if options.retention_guard is RetentionGuard.AUTO:
        maker = compat.maker_of(io, paths)
        changes["retention_guard"] = RetentionGuard.GROUPS if maker is not Maker.ROCKETMQ else RetentionGuard.NONE
        if maker is Maker.ROCKETMQ:
            report("retention_guard: none, as in RocketMQ, which made the store: unconsumed messages expire")
        elif maker is Maker.UNKNOWN:
            report(f"retention_guard: groups: {paths.opened}, which names the store's maker, is lost or unreadable")
    return _with_index_tags(io, paths, dataclasses.replace(options, **changes), report)


def _with_index_tags(io: StoreIO, paths: StorePaths, options: Options, report: Report) -> Options:
    """The options with the entries of the store's index; they have the sizes of its files."""
    found = adopted_index_tags(io, paths, options)
    if found and not options.message_index_tags:
        report("message_index_tags: the index has entries for tags, as RocketMQ's since 5.4: more are made")
    elif options.message_index_tags and not found:
        report(
            "message_index_tags: the index has no entries for tags, so none are made; to index them, stop the group and"
            f" remove {paths.index}, which the next start rebuilds"
        )
    return dataclasses.replace(options, message_index_tags=found)


class Recovery:
    """Recovery of one store. `words`: the new control file's; `clean`: no `abort` was found."""

    def __init__(
        self,
        io: StoreIO,
        paths: StorePaths,
        options: Options,
        words: Words,
        report: Report,
        *,
        clean: bool,
        scanners: Scanners = NO_SCANNERS,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        """`scanners` are processes that scan long ranges of the log ahead of dispatch.

        They are forked from this process, which must be single-threaded. Without any, this process does everything,
        with the same result.
        """
        self._io = io
        self._paths = paths
        self._options = options
        self._words = words
        self._report = report
        self._clean = self._was_closed = clean
        self._mark_type: type[DurableMark] = DurableMark
        self._keep_tail = clean
        self._scanners = scanners
        self._now_ms = now_ms
        self._step_started = 0.0
        self._segments = LogSegments(io, paths.commit_log, options.mapped_file_size_commit_log)
        self._files = StoreFiles(io, paths, options, report)
        self._is_checked = False
        self._unreadable: set[Path] = set()
        self._cut_messages: list[LostMessages] = []
        self.lost: list[LostMessages] = []
        """Messages that this recovery found to be lost; earlier recoveries have reported others."""

    def check(self) -> None:
        """Check names, types and number of queues. Raises StoreAccessError and the like.

        Raises ConfigurationError if `max_queues` is too small for the store. Changes nothing, so callers mark the store
        as open between this and `run`.
        """
        self._files.check()
        check_queue_types(self._io, self._paths)
        refuse_unreadable(self._io, self._paths)
        check_queue_limit(self._io, self._paths, self._options.max_queues)
        self._is_checked = True

    def distrust_marks(self) -> None:
        """Check the whole store whatever the marks say. For a repair, which keeps own copies."""
        self._mark_type = DistrustedMark
        self._keep_tail = False

    def run(self) -> None:
        """Recover and set all positions. Raises StoreAccessError, CorruptStoreError, OSError.

        An unreadable file of queues or index is quarantined and recovery restarts: the log has its content.
        """
        started = time.perf_counter()
        if not self._is_checked:
            self.check()
        while (lost := self._run()) is not None:
            self._restart_without(lost)
        for line in lines_about(self.lost, LOST_LISTED):
            self._report(f"recovery: {line}")
        self._set_progress(control.STEP_NONE)
        self._words[control.RECOVERY_US] = int((time.perf_counter() - started) * 1_000_000)

    def _run(self) -> Path | None:
        """Recover once; return the file that the disk cannot read, None on success."""
        opened = contextlib.ExitStack()
        lost = None
        try:
            self._recover(opened)
        except OSError as error:
            lost = unreadable_file(error, self._paths)
            if lost is None or lost in self._unreadable:
                raise
        opened.close()
        return lost

    def _restart_without(self, lost: Path) -> None:
        """Quarantine a file and reset; the work done so far is as after a kill."""
        self._lower_queue_mark(lost)
        self._files.quarantine(lost, "the disk cannot read it, it is rebuilt")
        self._unreadable.add(lost)
        self._clean = False
        self._files = StoreFiles(self._io, self._paths, self._options, self._report)
        self._files.check()
        self._segments = LogSegments(self._io, self._paths.commit_log, self._options.mapped_file_size_commit_log)

    def _lower_queue_mark(self, lost: Path) -> None:
        """Lower the queues' mark below a lost file's units, which the queue table may not cover."""
        begins = self._segments.starts()
        if self._paths.consume_queue not in lost.parents or not begins:
            return
        end, start, folder = 0, segment_start(lost.name), lost.parent
        if start is not None:
            queues = ConsumeQueueFiles(self._io, self._paths.consume_queue, self._options.consume_queue_file_bytes)
            with contextlib.closing(queues), contextlib.suppress(OSError):
                end = queues.last_end(folder.parent.name, int(folder.name), start // UNIT_SIZE)
        self._marks["consumequeue"].lower(max(end, begins[0]))

    def _recover(self, opened: contextlib.ExitStack) -> None:
        self._files.normalize_markers()
        self._make_folders()
        self._marks = {name: self._mark_type(self._io, self._paths.mark(name), self._segments) for name in _MARKS}
        self._ledger = DamageLedger(self._io, self._paths, self._options, self._report)
        file_bytes = self._options.consume_queue_file_bytes
        self._queues = ConsumeQueueFiles(self._io, self._paths.consume_queue, file_bytes, write=True, sync_follows=True)
        opened.callback(self._queues.close)
        opened.callback(self._segments.close)
        self._files.normalize_queues()
        self._files.normalize_index()
        log = self._recover_log()
        table = QueueTable.create(self._io, self._paths.next_queues, self._options.max_queues)
        opened.callback(table.close)
        slots, items = self._options.max_hash_slot_num, self._options.max_index_num
        index = IndexFiles(self._io, self._paths.index, slots, items, sync_follows=True)
        opened.callback(index.close)
        store = self._store = OpenStore(
            self._io,
            self._paths,
            self._options,
            table,
            self._segments,
            self._queues,
            index,
            self._ledger,
            log,
            self._now_ms,
            self._report,
        )
        rebuild = Rebuild(store, self._scanners, functools.partial(self._set_progress, control.STEP_DISPATCH))
        self._topics = self._load_topics()
        self._changed = not self._clean
        queue_recovery = QueueRecovery(store, self._files.queues)
        self._inspect_queues(queue_recovery)
        index_step, index_at = self._recover_index()
        self._begin_step()
        step = DispatchStep(store, rebuild, queue_recovery, index_step, self._marks["consumequeue"])
        done = step.run(index_at)
        self._changed |= index_step is not None and index_step.changed
        self._io.crash_point("recover.cq_rebuilt")
        self._finish_queues(step, done)
        complete_table(store, self._topics, queue_recovery, self._files.queues, step.rebuilt)
        if done.position < log.end:
            rebuild.advance_next_offsets(done.position, log.end)
        lower_group_offsets(store)
        self._set_progress(control.STEP_DURABLE)
        rows = ["consumequeue", *(["index"] if self._options.message_index_enable else [])]
        marks_valid = self._files.nothing_reported and not self._unreadable
        marks_valid = marks_valid and all(self._trusted_up_to(name) is not None for name in rows)
        make_durable(store, self._marks, done.position, marks_valid=marks_valid, changed=self._changed)
        store_words(store, self._words, done.position)

    def _begin_step(self) -> None:
        """Start the timing of a step."""
        self._step_started = time.perf_counter()
        self._set_progress(control.STEP_NONE)

    def _set_progress(self, step: int, done: int = 0, extent: int = 0) -> None:
        """Publish progress in the control words for the monitor."""
        self._words[control.RECOVERY_STEP] = step
        self._words[control.RECOVERY_DONE] = done
        self._words[control.RECOVERY_EXTENT] = extent

    def _end_step(self, text: str) -> None:
        """Report a finished step in one line, with its duration."""
        self._report(f"recovery: {text} ({(time.perf_counter() - self._step_started) * 1000:.0f} ms)")

    def _make_folders(self) -> None:
        paths = self._paths
        for folder in (paths.commit_log, paths.consume_queue, paths.index, paths.config):
            self._io.make_folder(folder)
        for folder in (paths.own, paths.marks):
            self._io.make_folder(folder, mode=0o700)
        ensure_checkpoint(self._io, paths.checkpoint)

    # The log

    def _recover_log(self) -> LogState:
        self._begin_step()
        step = LogStep(
            self._paths,
            self._segments,
            self._files,
            self._ledger,
            self._marks["commitlog"],
            self._now_ms,
            LogRecovery(self._segments, functools.partial(self._set_progress, control.STEP_LOG)),
            self._note_cut_records,
            keep_tail=self._keep_tail,
        )
        log = step.run(self._known_end)
        found = log.found
        start = f"{log.started_from} {found.start:,}"
        text = f"log: {counted(found.records, 'record')} from the {start} to the end {log.end:,}"
        if found.cut_bytes:
            text += f"; cut {counted(found.cut_bytes, 'byte')} ({found.cut_reason or 'unfinished'})"
        if found.removed_segments:
            text += f"; removed {counted(found.removed_segments, 'segment')} after it"
        if log.kept is not None:
            text += f"; another program opened the store and left the log intact up to {log.kept:,}"
        if holes := len(self._ledger.holes):
            text += f"; {counted(holes, 'damaged range')}, {len(log.fresh)} of them new"
        self._end_step(text)
        self._words[control.RECOVERY_CUT_BYTES] += found.cut_bytes  # Includes cuts before a restart of recovery.
        return log

    def _note_cut_records(self, end: int) -> None:
        self._cut_messages = messages_after(self._segments, end)

    def _known_end(self) -> int:
        """End of the log according to marks, queues and index, for a log without segments."""
        ends = [mark.mark.offset for mark in self._marks.values() if mark.mark is not None]
        ends += [self._queues.extent(*queue).last_physical_end for queue in self._files.queues]
        ends += [last_offset(self._io, self._paths.index / name) + 1 for name in self._files.index_names]
        return max((end for end in ends if 0 < end < LOG_BYTES_MAX), default=0)

    # Queues and index

    def _trusted_up_to(self, name: str) -> int | None:
        """Log position up to which a part can be trusted by its mark; None without a valid mark."""
        log = self._store.log
        mark = self._marks[name].valid()
        if mark is None or (log.kept is not None and mark.offset > log.kept):
            return None
        return max(min(mark.offset, log.end, log.rebuild_from), log.begin)

    def _inspect_queues(self, queue_recovery: QueueRecovery) -> None:
        """Inspect the queues and find those that lost units below their mark."""
        self._begin_step()
        hints = self._known_queues()
        log, trusted = self._store.log, self._trusted_up_to("consumequeue")
        limit = log.begin if trusted is None or hints is None else trusted
        self._remove_deleted(limit)
        queue_recovery.inspect(limit, hints or {}, damaged_since=limit == log.rebuild_from < log.end)
        restore_deletions(self._store.table, self._topics.deletions)
        text = f"queues: {len(self._files.queues):,}"
        if limit > log.begin:
            text += f" durable up to {limit:,}"
        elif log.end > log.begin:
            text += ", to be compared with the log"
        if queue_recovery.lost:
            text += f"; {counted(len(queue_recovery.lost), 'queue')} with lost units"
        self._end_step(text)

    def _known_queues(self) -> QueueSnapshots | None:
        """Queues known to the last run whose topics still exist."""
        hints = read_queue_snapshots(self._io, self._paths)
        if hints is None:
            return None
        present = set(self._topics.names())
        return {
            queue: hint
            for queue, hint in hints.items()
            if (queue in self._files.queues or queue[0] in present or not present)
            and not self._is_deleted(*queue, hint.max_offset, hint.physical_end)
        }

    def _remove_deleted(self, limit: int) -> None:
        """Remove files of deleted topics; units above `limit` of topics created again are rebuilt."""
        for topic, queue_id in [queue for queue in self._files.queues if queue[0] in self._topics.deletions]:
            extent = self._queues.extent_below(topic, queue_id, limit)
            if self._is_deleted(topic, queue_id, extent.max_offset, extent.last_physical_end):
                self._queues.remove(topic, queue_id)
                del self._files.queues[topic, queue_id]
                self._changed = True

    def _is_deleted(self, topic: str, queue_id: int, max_offset: int, physical_end: int) -> bool:
        deletion = self._topics.deletions.get(topic)
        return deletion is not None and deletion.covers(queue_id, max_offset, physical_end)

    def _recover_index(self) -> tuple[IndexStep | None, int]:
        """Cut the index to its trusted part; return its step and where it is complete."""
        if not self._options.message_index_enable:
            return None, self._store.log.end
        self._begin_step()
        step = IndexStep(self._store, self._marks["index"], self._required_entries())
        at, text = step.run(self._trusted_up_to("index"), clean=self._clean)
        self._end_step(text)
        self._io.crash_point("recover.index_cut")
        return step, at

    def _required_entries(self) -> IndexEntries:
        """Entries that all records must have; those of tags may be missing before RocketMQ 5.4."""
        entries = index_entries(self._options)
        if entries is not IndexEntries.KEYS_AND_TAGS:
            return entries
        return IndexEntries.KEYS if oldest_is_indexed(self._io, self._paths, self._options) is False else entries

    def _finish_queues(self, step: DispatchStep, done: RebuildResult) -> None:
        """Fill queue offsets without records and remove units after the queues' ends."""
        queue_recovery, log = step.queues, self._store.log
        limit = queue_recovery.limit
        filled = self._fill_queues(step, done)
        # Without records in the log, the queues were not compared.
        untouched = self._clean and limit > log.begin and limit == log.end and not filled
        cleared = self._cut_queues(done, queue_recovery, untouched=untouched)
        self._io.crash_point("recover.cq_cut")
        self._changed |= bool(done.repaired_units or done.entries or filled or cleared or queue_recovery.lost)
        if limit < log.end or done.records or cleared or filled:
            self._end_step(_dispatch_text(done, filled, cleared))
        if done.no_room is not None:
            self._report(f"recovery: dispatch waits at {done.position:,}: {done.no_room.strerror}")

    def _fill_queues(self, step: DispatchStep, done: RebuildResult) -> int:
        """Fill gaps and damage; return the number of units of damaged records."""
        queue_recovery, log, holes = step.queues, self._store.log, self._ledger.ranges
        limit = queue_recovery.limit
        trusted = limit > log.begin
        gaps = done.gaps
        if gaps and trusted:
            # The missing units lie below the mark, where nothing was compared yet.
            rebuilt = step.rebuild_queues({gap.number: max(gap.physical_end, log.begin) for gap in gaps}, limit)
            done.repaired_units += rebuilt.repaired_units
            gaps = [*gaps, *rebuilt.gaps]
        for gap in [*step.implausible, *queue_recovery.implausible(gaps)]:
            topic, queue_id = self._store.table.name(gap.number)
            where = f"the record at {gap.physical_stop:,} has queue offset {gap.stop:,} of {topic} queue {queue_id}"
            self._report(f"recovery: {where}, which ends at {gap.first:,}: implausible, omitted from the queue")
        queue_recovery.keep_empty_starts(holes)
        queue_recovery.fill(done.gaps, holes, keep_units=trusted)
        # Units below the mark are older than the damage. Above it only the log shows where a queue ends.
        unfilled = [hole for hole in self._ledger.holes if not (trusted and hole.filled and hole.stop <= limit)]
        return queue_recovery.fill_holes((hole.start, hole.stop) for hole in unfilled)

    def _cut_queues(self, done: RebuildResult, queue_recovery: QueueRecovery, *, untouched: bool) -> int:
        """Remove units after the queues' ends, and unused queues; return how many had such units."""
        log_end = self._store.log.end
        if not untouched:
            queue_recovery.keep_multi_dispatched()
        if self._was_closed and not untouched and (beyond := queue_recovery.scan_beyond_end()) > log_end:
            # The store was closed properly, so the log once had all records that its queues know.
            self._ledger.record_cut(log_end, beyond, self._now_ms())
        if not untouched:
            self._find_lost(queue_recovery, all_dispatched=done.no_room is None)
        cleared = queue_recovery.clear(queue_recovery.lost if untouched else None)
        if queue_recovery.lost or (not untouched and (done.gaps or self._ledger.holes)):
            self._changed |= queue_recovery.seal_ends() > 0
        if not untouched and done.no_room is None:
            self._remove_unused(queue_recovery)
        return cleared

    def _find_lost(self, queue_recovery: QueueRecovery, *, all_dispatched: bool) -> None:
        """Find messages in new damage, and after the queues' ends before these are cleared."""
        log_end, is_comparable = self._store.log.end, all_dispatched and self._store.log.kept is None
        next_offsets = read_next_offsets(self._io, self._paths) if is_comparable else {}
        cut = queue_recovery.find_cut(log_end, self._cut_messages, next_offsets)
        self._ledger.record_lost(log_end, cut)
        holes = [(hole.start, hole.stop) for hole in self._ledger.holes if not hole.filled]
        self.lost = merged_losses([*self.lost, *cut, *queue_recovery.find_lost(holes)])

    def _remove_unused(self, queue_recovery: QueueRecovery) -> None:
        """Remove files of queues that never had a record, and topics unknown elsewhere."""
        present = len(self._files.queues)
        unknown = queue_recovery.remove_unused(self._topics.names())
        self._changed |= len(self._files.queues) < present
        if unknown:
            names = ", ".join(unknown[:TOPICS_LISTED]) + ", …" * (len(unknown) > TOPICS_LISTED)
            self._report(f"recovery: queues of {counted(len(unknown), 'topic')} without a record removed: {names}")

    # Topics

    def _load_topics(self) -> Topics:
        """Load topics; unreadable files are quarantined, and the queues then define the topics."""
        try:
            deleted_topics.load_deletions(self._io, self._paths)
        except CorruptStoreError as error:
            self._quarantine(self._paths.deleted_topics, error)
        topics = Topics(self._io, self._paths)
        try:
            topics.load()
        except CorruptStoreError as error:
            self._quarantine(self._paths.topics, error)
            topics.load()
        if topics.remark:
            self._report(f"recovery: topics: {topics.remark}")
        return topics

    def _quarantine(self, path: Path, why: CorruptStoreError) -> None:
        """Quarantine a config file and its copy."""
        for each in (path, path.with_name(path.name + ".bak")):
            self._files.quarantine(each, str(why).removeprefix(f"{path}: "))


def _dispatch_text(done: RebuildResult, filled: int, cleared: int) -> str:
    text = f"dispatch: {counted(done.records, 'record')} and {counted(done.entries, 'index entry')} from {done.start:,}"
    text += f"; {counted(done.repaired_units, 'unit')} missing or wrong" if done.repaired_units else ""
    text += f"; {counted(filled, 'unit')} of damaged records" if filled else ""
    return text + (f"; {counted(cleared, 'queue')} with units after the end" if cleared else "")
