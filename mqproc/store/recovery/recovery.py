"""Recovery: after any kind of stop, make log, queues and index agree, and say what was found, cut and rebuilt.

    files    a rule for each name and length that is not as it should be (`store_files`); later, when the disk cannot
             read one of queues or index, that goes aside and all begins anew
    log      from its durable mark: walk, note damage, cut the torn tail, sync (`log_step`)
    queues   what the ConsumeQueue mark vouches for, and which queues have lost units (`queue_recovery`)
    index    what the index mark vouches for (`index_step`)
    dispatch once over the log, by the engine's own dispatch: lost queues, then all to its end (`dispatch_step`)
    table    the queue table with every queue's offsets (`table_step`)
    groups   progress beyond a queue's end set back to it (`progress_step`)
    marks    everything synced, marks and checkpoint at the end of the log (`settling`)
    words    all positions at the end of the log

Nothing else has the store open. Every step can be repeated; a second run finds nothing to do. A mark whose log is not
what it was vouches for nothing: then that part is compared with the log from its beginning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from mqproc.config import Options
from mqproc.errors import CorruptStoreError
from mqproc.io import StoreIO
from mqproc.ipc.words import Words
from mqproc.layout import control as words_of
from mqproc.paths import StorePaths, segment_start
from mqproc.quantities import counted
from mqproc.store import checkpoint_file, deleted_topics
from mqproc.store.consume_queue import UNIT_SIZE, ConsumeQueueFiles
from mqproc.store.damage import DamageLedger
from mqproc.store.deleted_topics import tell_table
from mqproc.store.derived import unreadable_file
from mqproc.store.index_files import IndexFiles
from mqproc.store.index_headers import last_offset
from mqproc.store.index_shape import adopted_index_shape
from mqproc.store.marks import DistrustedMark, DurableMark
from mqproc.store.queue_folders import adopted_file_bytes
from mqproc.store.queue_hints import Hints, read_hints
from mqproc.store.queue_table import QueueTable
from mqproc.store.recovery.dispatch_step import DispatchStep
from mqproc.store.recovery.index_step import IndexStep
from mqproc.store.recovery.log_step import LogState, LogStep
from mqproc.store.recovery.progress_step import ProgressStep
from mqproc.store.recovery.queue_kinds import check_queue_kinds
from mqproc.store.recovery.queue_recovery import LOG_BYTES_MAX, QueueRecovery
from mqproc.store.recovery.redispatch import Redispatch, Redispatched
from mqproc.store.recovery.scan_ahead import NO_SCANNERS, Scanners
from mqproc.store.recovery.settling import Settling
from mqproc.store.recovery.store_files import StoreFiles
from mqproc.store.recovery.table_step import TableStep
from mqproc.store.segments import LogSegments, adopted_segment_size
from mqproc.store.topics import Topics

Report = Callable[[str], None]
# Of more topics than these only the first are named.
TOPICS_TOLD: Final = 5
_MARKS: Final = ("commitlog", "consumequeue", "index")


def adopt_sizes(io: StoreIO, paths: StorePaths, options: Options, report: Report) -> Options:
    """The options with the file sizes that the store already has."""
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
            report(f"{name}: the store's files have {found:,}, the option says {configured:,}: theirs is used")
            changes[name] = found
    return dataclasses.replace(options, **changes)


class Recovery:
    """Recovery of one store. `words` are the new control file's; `clean` says that no `abort` file was there."""

    def __init__(
        self,
        io: StoreIO,
        paths: StorePaths,
        options: Options,
        words: Words,
        report: Report,
        *,
        clean: bool,
        trust_marks: bool = True,
        scanners: Scanners = NO_SCANNERS,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        """Without `trust_marks` everything is looked at, whatever the marks say.

        `scanners` are processes that scan a long range of the log ahead of dispatch, forked from this one, which must
        have one thread only. Without any, this process does everything; the result is the same.
        """
        self._io = io
        self._paths = paths
        self._options = options
        self._words = words
        self._report = report
        self._clean = self._was_closed = clean
        self._mark_type = DurableMark if trust_marks else DistrustedMark
        # A repair, which trusts no marks, keeps copies of its own.
        self._keeps = clean and trust_marks
        self._scanners = scanners
        self._now_ms = now_ms
        self._began = 0.0
        self._segments = LogSegments(io, paths.commit_log, options.mapped_file_size_commit_log)
        self._files = StoreFiles(io, paths, options, report)
        self._is_checked = False
        self._without: set[Path] = set()

    def check(self) -> None:
        """Raise StoreAccessError for files that are never touched, and what `check_queue_kinds` raises.

        Nothing has been changed by then, so whoever marks the store as open does it between this and `run`.
        """
        self._files.check()
        check_queue_kinds(self._io, self._paths)
        self._is_checked = True

    def run(self) -> None:
        """Recover and set all positions. Raises StoreAccessError, CorruptStoreError, OSError.

        A file of queues or index that the disk cannot read goes aside, and all begins anew: the log has what it held.
        """
        started = time.perf_counter()
        if not self._is_checked:
            self.check()
        while (lost := self._run()) is not None:
            self._begin_without(lost)
        self._tell(words_of.STEP_NONE)
        self._words[words_of.RECOVERY_US] = int((time.perf_counter() - started) * 1_000_000)

    def _run(self) -> Path | None:
        """Recover; the file that cannot be read and is to be made again, None when all went well."""
        opened = contextlib.ExitStack()
        lost = None
        try:
            self._go(opened)
        except OSError as error:
            lost = unreadable_file(error, self._paths)
            if lost is None or lost in self._without:
                raise
        opened.close()
        return lost

    def _begin_without(self, lost: Path) -> None:
        """What was done by now is left as a kill would leave it."""
        self._take_mark_back(lost)
        self._files.set_aside(lost, "the disk cannot read it, it is made again")
        self._without.add(lost)
        self._clean = False
        self._files = StoreFiles(self._io, self._paths, self._options, self._report)
        self._files.check()
        self._segments = LogSegments(self._io, self._paths.commit_log, self._options.mapped_file_size_commit_log)

    def _take_mark_back(self, lost: Path) -> None:
        """The mark of the queues vouches for what a file of theirs held, of which the last run's table may not know."""
        begins = self._segments.starts()
        if self._paths.consume_queue not in lost.parents or not begins:
            return
        end, start, folder = 0, segment_start(lost.name), lost.parent
        if start is not None:
            queues = ConsumeQueueFiles(self._io, self._paths.consume_queue, self._options.consume_queue_file_bytes)
            with contextlib.closing(queues), contextlib.suppress(OSError):
                end = queues.last_end(folder.parent.name, int(folder.name), start // UNIT_SIZE)
        self._marks["consumequeue"].take_back(max(end, begins[0]))

    def _go(self, opened: contextlib.ExitStack) -> None:
        self._files.put_markers_in_order()
        self._make_folders()
        self._marks = {name: self._mark_type(self._io, self._paths.mark(name), self._segments) for name in _MARKS}
        self._ledger = DamageLedger(self._io, self._paths, self._options, self._report)
        self._queues = ConsumeQueueFiles(
            self._io,
            self._paths.consume_queue,
            self._options.consume_queue_file_bytes,
            write=True,
            sync_follows=True,
        )
        opened.callback(self._queues.close)
        opened.callback(self._segments.close)
        self._files.put_queues_in_order()
        self._files.put_index_in_order()
        log = self._recover_log()
        self._table = QueueTable.create(self._io, self._paths.next_queues, self._options.max_queues)
        opened.callback(self._table.close)
        self._index = IndexFiles(
            self._io,
            self._paths.index,
            self._options.max_hash_slot_num,
            self._options.max_index_num,
            sync_follows=True,
        )
        opened.callback(self._index.close)
        redispatch = Redispatch(
            self._io,
            self._options,
            self._table,
            self._segments,
            self._queues,
            self._index,
            self._ledger,
            log.begin,
            self._now_ms,
            self._report,
            self._scanners,
            functools.partial(self._tell, words_of.STEP_DISPATCH),
        )
        self._topics = self._load_topics()
        self._changed = not self._clean
        mender = QueueRecovery(self._queues, self._table, self._segments, self._files.queues, log.begin)
        self._look_at_queues(log, mender)
        index_step, index_at = self._recover_index(log)
        self._begin()
        mark = self._marks["consumequeue"]
        dispatch_step = DispatchStep(redispatch, mender, index_step, self._ledger, log, mark, self._report)
        done = dispatch_step.run(index_at)
        self._changed |= index_step is not None and index_step.changed
        self._io.crash_point("recover.cq_rebuilt")
        self._finish_queues(dispatch_step, done, log, mender)
        table_step = TableStep(self._io, self._paths, self._table, self._topics, self._queues, self._ledger)
        table_step.run(log, mender, self._files.queues, dispatch_step.rebuilt)
        if done.position < log.end:
            redispatch.count_on(done.position, log.end)
        ProgressStep(self._io, self._paths, self._table, self._report, self._now_ms).run()
        self._settle(log, done.position)

    def _begin(self) -> None:
        """A step begins."""
        self._began = time.perf_counter()
        self._tell(words_of.STEP_NONE)

    def _tell(self, step: int, done: int = 0, extent: int = 0) -> None:
        """What is done now, for those who ask the monitor."""
        self._words[words_of.RECOVERY_STEP] = step
        self._words[words_of.RECOVERY_DONE] = done
        self._words[words_of.RECOVERY_EXTENT] = extent

    def _end(self, text: str) -> None:
        """A step has ended: one line, with the time that it took."""
        self._report(f"recovery: {text} ({(time.perf_counter() - self._began) * 1000:.0f} ms)")

    def _make_folders(self) -> None:
        paths = self._paths
        for folder in (paths.commit_log, paths.consume_queue, paths.index, paths.config):
            self._io.make_folder(folder)
        for folder in (paths.own, paths.marks):
            self._io.make_folder(folder, mode=0o700)
        checkpoint_file.ensure(self._io, paths.checkpoint)

    # The log

    def _recover_log(self) -> LogState:
        self._begin()
        step = LogStep(
            self._io,
            self._paths,
            self._segments,
            self._files,
            self._ledger,
            self._marks["commitlog"],
            self._now_ms,
            functools.partial(self._tell, words_of.STEP_LOG),
            keeps=self._keeps,
        )
        log = step.run(self._known_end)
        found = log.found
        text = f"log: {counted(found.records, 'record')} from the {log.whence} {found.start:,} to the end {log.end:,}"
        if found.cut_bytes:
            text += f"; cut {counted(found.cut_bytes, 'byte')} ({found.cut_reason or 'unfinished'})"
        if found.removed_segments:
            text += f"; removed {counted(found.removed_segments, 'segment')} behind it"
        if log.kept is not None:
            text += f"; another program has held the store, and kept the log up to {log.kept:,}"
        if holes := len(self._ledger.holes):
            text += f"; {counted(holes, 'damaged range')} served around, {len(log.fresh)} of them new"
        self._end(text)
        self._words[words_of.RECOVERY_CUT_BYTES] += found.cut_bytes  # What was cut before all began anew counts, too.
        return log

    def _known_end(self) -> int:
        """Up to where marks, queues and index know the log, when nothing of it is left."""
        ends = [mark.mark.offset for mark in self._marks.values() if mark.mark is not None]
        ends += [self._queues.extent(*queue).last_physical_end for queue in self._files.queues]
        ends += [last_offset(self._io, self._paths.index / name) + 1 for name in self._files.index_names]
        return max((end for end in ends if 0 < end < LOG_BYTES_MAX), default=0)

    # Queues and index

    def _trusted(self, name: str, log: LogState) -> int | None:
        """Up to which log position a row can be trusted by its mark; None without a valid mark."""
        mark = self._marks[name].valid()
        if mark is None or (log.kept is not None and mark.offset > log.kept):
            return None
        return max(min(mark.offset, log.end, log.redispatch_from), log.begin)

    def _look_at_queues(self, log: LogState, mender: QueueRecovery) -> None:
        """Take stock of the queues, and of which have lost units below their mark."""
        self._begin()
        hints = self._hints()
        trusted = self._trusted("consumequeue", log)
        limit = log.begin if trusted is None or hints is None else trusted
        self._remove_deleted(limit)
        mender.look(limit, hints or {}, set_back=limit == log.redispatch_from < log.end)
        tell_table(self._table, self._topics.deletions)
        text = f"queues: {len(self._files.queues):,}"
        if limit > log.begin:
            text += f" durable up to {limit:,}"
        elif log.end > log.begin:
            text += ", each to be compared with the log"
        if mender.lost:
            text += f"; {counted(len(mender.lost), 'queue')} with lost units"
        self._end(text)

    def _hints(self) -> Hints | None:
        """What the last run knew of queues whose topics there are still."""
        hints = read_hints(self._io, self._paths)
        if hints is None:
            return None
        there = set(self._topics.names())
        return {
            queue: hint
            for queue, hint in hints.items()
            if (queue in self._files.queues or queue[0] in there or not there)
            and not self._is_deleted(*queue, hint.max_offset, hint.physical_end)
        }

    def _remove_deleted(self, limit: int) -> None:
        """Remove files that are left of deleted topics; units of their successors above `limit` are made again."""
        for topic, queue_id in [queue for queue in self._files.queues if queue[0] in self._topics.deletions]:
            extent = self._queues.extent_below(topic, queue_id, limit)
            if self._is_deleted(topic, queue_id, extent.max_offset, extent.last_physical_end):
                self._queues.remove(topic, queue_id)
                del self._files.queues[topic, queue_id]
                self._changed = True

    def _is_deleted(self, topic: str, queue_id: int, max_offset: int, physical_end: int) -> bool:
        deletion = self._topics.deletions.get(topic)
        return deletion is not None and deletion.covers(queue_id, max_offset, physical_end)

    def _recover_index(self, log: LogState) -> tuple[IndexStep | None, int]:
        """Cut the index to what can be trusted; its step, and up to where it then holds every entry."""
        if not self._options.message_index_enable:
            return None, log.end
        self._begin()
        mark = self._marks["index"]
        step = IndexStep(self._io, self._paths, self._options, self._segments, self._index, self._ledger, log, mark)
        at, text = step.run(self._trusted("index", log), clean=self._clean)
        self._end(text)
        self._io.crash_point("recover.index_cut")
        return step, at

    def _finish_queues(self, step: DispatchStep, done: Redispatched, log: LogState, mender: QueueRecovery) -> None:
        """What no record explains gets fillers, and what lies behind the queues' ends goes."""
        holes, queues_at = self._ledger.ranges, mender.limit
        trusted = mender.limit > log.begin
        gaps = done.gaps
        if gaps and trusted:
            # What is missing lies below the mark, where nothing was looked at yet.
            rebuilt = step.rebuild({gap.number: max(gap.physical_end, log.begin) for gap in gaps}, mender.limit)
            done.mended_units += rebuilt.mended_units
            gaps = [*gaps, *rebuilt.gaps]
        for gap in [*step.not_believed, *mender.not_believed(gaps)]:
            topic, queue_id = self._table.name(gap.number)
            said = f"the record at {gap.physical_stop:,} says queue offset {gap.stop:,} of {topic} queue {queue_id}"
            self._report(f"recovery: {said}, which ends at {gap.first:,}: not believed, no unit leads to it")
        mender.keep_names(holes)
        mender.fill(done.gaps, holes, keep_units=trusted)
        # Units below the mark were there before the damage was. Above it the log alone tells how far a queue goes.
        unfilled = [hole for hole in self._ledger.holes if not (trusted and hole.filled and hole.stop <= queues_at)]
        filled = mender.fill_holes((hole.start, hole.stop) for hole in unfilled)
        # Of a log without records the queues were looked at nowhere.
        untouched = self._clean and trusted and queues_at == log.end and not filled
        if not untouched:
            mender.keep_multi_dispatched()
        if self._was_closed and not untouched and (beyond := mender.look_beyond()) > log.end:
            # It was closed in order, so the log had what its queues knew.
            self._ledger.note_cut(log.end, beyond, self._now_ms())
        cleared = mender.clear(mender.lost if untouched else None)
        if mender.lost or (not untouched and (done.gaps or self._ledger.holes)):
            self._changed |= mender.seal_ends() > 0
        if not untouched and done.no_room is None:
            self._remove_unused(mender)
        self._io.crash_point("recover.cq_cut")
        self._changed |= bool(done.mended_units or done.entries or filled or cleared or mender.lost)
        if queues_at < log.end or done.records or cleared or filled:
            entries = counted(done.entries, "index entry")
            text = f"dispatch: {counted(done.records, 'record')} and {entries} from {done.start:,}"
            text += f"; {counted(done.mended_units, 'unit')} missing or wrong" if done.mended_units else ""
            text += f"; {counted(filled, 'unit')} into damage" if filled else ""
            text += f"; {counted(cleared, 'queue')} with units behind the end" if cleared else ""
            self._end(text)
        if done.no_room is not None:
            self._report(f"recovery: dispatch waits at {done.position:,} for room on the disk: {done.no_room.strerror}")

    def _remove_unused(self, mender: QueueRecovery) -> None:
        """Queues that have never had a record lose their files, and their topic where nothing else knows of it."""
        there = len(self._files.queues)
        unknown = mender.remove_unused(self._topics.names())
        self._changed |= len(self._files.queues) < there
        if unknown:
            names = ", ".join(unknown[:TOPICS_TOLD]) + ", …" * (len(unknown) > TOPICS_TOLD)
            self._report(f"recovery: queues of {counted(len(unknown), 'topic')} without a record removed: {names}")

    # Topics

    def _load_topics(self) -> Topics:
        """Topics of the config files; a file that nobody can read goes aside, and queues tell their topics."""
        try:
            deleted_topics.load(self._io, self._paths)
        except CorruptStoreError as error:
            self._set_aside(self._paths.deleted_topics, error)
        topics = Topics(self._io, self._paths)
        try:
            topics.load()
        except CorruptStoreError as error:
            self._set_aside(self._paths.topics, error)
            topics.load()
        if topics.remark:
            self._report(f"recovery: topics: {topics.remark}")
        return topics

    def _set_aside(self, path: Path, why: CorruptStoreError) -> None:
        """Move a config file and its copy away."""
        for each in (path, path.with_name(path.name + ".bak")):
            self._files.set_aside(each, str(why).removeprefix(f"{path}: "))

    # What is durable

    def _settle(self, log: LogState, dispatched: int) -> None:
        self._tell(words_of.STEP_DURABLE)
        rows = ["consumequeue", *(["index"] if self._options.message_index_enable else [])]
        vouched = self._files.all_in_order and not self._without
        vouched = vouched and all(self._trusted(name, log) is not None for name in rows)
        settling = Settling(self._io, self._paths, self._options, self._marks, log, dispatched, vouched=vouched)
        settling.make_durable(self._queues, self._index, self._ledger, changed=self._changed)
        settling.store_words(self._words, self._segments, self._index, self._ledger)
