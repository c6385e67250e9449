"""Recovery: after any kind of stop, make log, queues and index agree, and say what was found, cut and rebuilt.

    files    a rule for each name and length that is not as it should be (`store_files`)
    log      from its durable mark: walk, note damage, cut the torn tail, sync (`log_recovery`)
    queues   what the ConsumeQueue mark vouches for; lost ones rebuilt (`queue_recovery`)
    index    what the index mark vouches for (`index_recovery`)
    dispatch from the lower of both to the end of the log, by the engine's own dispatch, which mends what differs
    table    the queue table with every queue's offsets
    marks    everything synced, marks and checkpoint at the end of the log
    words    all positions at the end of the log

Nothing else has the store open. Every step can be repeated; a second run finds nothing to do. A mark whose log is not
what it was vouches for nothing: then that part is compared with the log from its beginning.
"""

from __future__ import annotations

import dataclasses
import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from mqproc.config import Options
from mqproc.errors import CorruptStoreError
from mqproc.io import StoreIO
from mqproc.layout import checkpoint as checkpoint_layout
from mqproc.layout import control as words_of
from mqproc.layout import queue_table as table_layout
from mqproc.paths import StorePaths
from mqproc.shm.words import Words
from mqproc.store import checkpoint_file, deleted_topics, rocketmq_json
from mqproc.store.consume_queue import UNIT_SIZE, ConsumeQueueFiles, adopted_file_bytes
from mqproc.store.damage import DamageLedger
from mqproc.store.deleted_topics import tell_table
from mqproc.store.index_files import IndexFiles, index_file_names, last_offset
from mqproc.store.index_shape import adopted_index_shape
from mqproc.store.marks import DistrustedMark, DurableMark
from mqproc.store.queue_table import QueueTable
from mqproc.store.reads.log_records import LogRecords, Visible
from mqproc.store.recovery import visitor
from mqproc.store.recovery.index_recovery import IndexCheck
from mqproc.store.recovery.log_step import LogState, LogStep
from mqproc.store.recovery.queue_hints import Hints, read_hints
from mqproc.store.recovery.queue_kinds import check_queue_kinds
from mqproc.store.recovery.queue_recovery import LOG_BYTES_MAX, QueueRecovery
from mqproc.store.recovery.redispatch import Redispatch, Redispatched
from mqproc.store.recovery.store_files import StoreFiles
from mqproc.store.segments import LogSegments, adopted_segment_size
from mqproc.store.topics import Topics

Report = Callable[[str], None]
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
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        """Without `trust_marks` everything is looked at, whatever the marks say."""
        self._io = io
        self._paths = paths
        self._options = options
        self._words = words
        self._report = report
        self._clean = clean
        self._mark_type = DurableMark if trust_marks else DistrustedMark
        self._now_ms = now_ms
        self._began = 0.0
        self._segments = LogSegments(io, paths.commit_log, options.mapped_file_size_commit_log)

    def run(self) -> None:
        """Recover and set all positions. Raises StoreAccessError, CorruptStoreError, OSError."""
        started = time.perf_counter()
        self._files = StoreFiles(self._io, self._paths, self._options, self._report)
        self._files.check()
        self._files.put_markers_in_order()
        check_queue_kinds(self._io, self._paths)
        self._make_folders()
        self._marks = {name: self._mark_type(self._io, self._paths.mark(name), self._segments) for name in _MARKS}
        self._ledger = DamageLedger(self._io, self._paths, self._options, self._report)
        self._queues = ConsumeQueueFiles(
            self._io, self._paths.consume_queue, self._options.consume_queue_file_bytes, write=True
        )
        self._files.put_queues_in_order()
        self._files.put_index_in_order()
        log = self._recover_log()
        self._table = QueueTable.create(self._io, self._paths.next_queues, self._options.max_queues)
        self._index = IndexFiles(
            self._io, self._paths.index, self._options.max_hash_slot_num, self._options.max_index_num
        )
        self._redispatch = Redispatch(
            self._io,
            self._options,
            self._table,
            self._segments,
            self._queues,
            self._index,
            self._ledger,
            log.begin,
            self._now_ms,
        )
        self._topics = self._load_topics()
        self._changed = False
        self._rebuilt: set[int] = set()
        mender = QueueRecovery(self._queues, self._table, self._segments, self._files.queues, log.begin)
        queues_at = self._recover_queues(log, mender)
        index_at = self._recover_index(log)
        self._begin()
        done = self._dispatch(queues_at, index_at, log)
        self._finish_queues(queues_at, done, log, mender)
        dispatched = done.position
        self._finish_table(log, mender)
        if dispatched < log.end:
            self._redispatch.count_on(dispatched, log.end)
        self._settle(log, dispatched)
        self._store_words(log, dispatched)
        self._queues.close()
        self._index.close()
        self._segments.close()
        self._table.close()
        self._words[words_of.RECOVERY_US] = int((time.perf_counter() - started) * 1_000_000)

    def _begin(self) -> None:
        """A step begins."""
        self._began = time.perf_counter()

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
            self._io, self._paths, self._segments, self._files, self._ledger, self._marks["commitlog"], self._now_ms
        )
        log = step.run(self._known_end)
        found = log.found
        text = f"log: {found.records:,} records from the {log.whence} {found.start:,} to the end {log.end:,}"
        if found.cut_bytes or found.removed_segments:
            text += f"; cut {found.cut_bytes:,} bytes"
            text += f" ({found.cut_reason or 'unfinished'})" if found.cut_bytes else ""
            text += f" and {found.removed_segments} segments behind it"
        if log.kept is not None:
            text += f"; another program has held the store, and kept the log up to {log.kept:,}"
        if holes := len(self._ledger.holes):
            text += f"; {holes} damaged ranges are served around, {len(log.fresh)} of them new"
        self._end(text)
        self._words[words_of.RECOVERY_CUT_BYTES] = found.cut_bytes
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

    def _recover_queues(self, log: LogState, mender: QueueRecovery) -> int:
        """Take stock of the queues, rebuild lost ones; the log position that all of them stand at then."""
        self._begin()
        hints = self._hints()
        trusted = self._trusted("consumequeue", log)
        limit = log.begin if trusted is None or hints is None else trusted
        self._remove_deleted(limit)
        mender.look(limit, hints or {})
        tell_table(self._table, self._topics.deletions)
        text = f"queues: {len(self._files.queues):,}"
        if limit > log.begin:
            text += f" durable up to {limit:,}"
        elif log.end > log.begin:
            text += ", each to be compared with the log"
        if mender.lost:
            done = self._rebuild(mender.lost, limit)
            mender.top_up(self._ledger.ranges)
            text += f"; {len(mender.lost):,} had lost units, {done.mended_units:,} were made again"
        self._end(text)
        self._io.crash_point("recover.cq_rebuilt")
        return limit

    def _rebuild(self, lost: dict[int, int], limit: int) -> Redispatched:
        """Build queues again up to a log position: by number, from where on."""
        done = self._redispatch.run(min(lost.values()), limit, put_entries=False, only=lost)
        if done.no_room is not None:
            raise done.no_room
        self._rebuilt.update(lost)
        return done

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

    def _recover_index(self, log: LogState) -> int:
        """Cut the index to what can be trusted; up to where it then holds every entry."""
        options = self._options
        if not options.message_index_enable:
            return log.end
        self._begin()
        names = self._files.index_names
        trusted = self._trusted("index", log)
        # RocketMQ leaves no mark, but a store that it has closed has a whole index, as far as its files are there; it
        # does not index anew what it appends where it has cut.
        closed = log.end if log.kept is None else min(log.end, log.kept)
        limit = trusted if trusted is not None else closed if self._clean else log.begin
        reached = last_offset(self._io, self._paths.index / names[-1]) if names else -1
        if not self._clean or reached >= limit or limit < log.end:
            self._cut_index(limit, log)
        at = self._index_check().complete_up_to(index_file_names(self._io, self._paths.index), log.begin, limit)
        if at < limit:
            self._cut_index(at, log)
        text = f"index: {len(names):,} files"
        if log.end > log.begin:
            text += f", whole up to {at:,}" if at > log.begin else ", to be made again"
        if at < limit:
            text += f"; entries from there to {limit:,} were missing or wrong"
        self._end(text)
        self._io.crash_point("recover.index_cut")
        return at

    def _index_check(self) -> IndexCheck:
        slots = self._options.max_hash_slot_num
        return IndexCheck(self._io, self._paths, self._segments, slots, self._ledger.ranges)

    def _cut_index(self, position: int, log: LogState) -> None:
        records = LogRecords(self._segments, lambda: Visible(log.begin, log.end))

        def store_timestamp_ms(offset: int) -> int | None:
            found = records.store_timestamp_ms(offset)
            return found if found >= 0 else None

        self._index.rebuild(position, store_timestamp_ms)
        self._changed = True

    def _dispatch(self, queues_at: int, index_at: int, log: LogState) -> Redispatched:
        """Bring queues and index to the end of the log; both stand at the position that the answer has."""
        done = Redispatched(queues_at)
        if queues_at < index_at:
            done = self._redispatch.run(queues_at, index_at, put_entries=False)
            if queues_at == log.begin and done.no_room is None and self._lacks_entries(done.entries, log.begin):
                self._report(f"recovery: index: entries are missing below {index_at:,}; it is made again")
                self._cut_index(log.begin, log)
                index_at = log.begin
            done.entries = 0
        if done.no_room is None:
            # Units are compared, so that going over some again does no harm; entries are put once.
            done.add(self._redispatch.run(index_at, log.end))
        elif self._options.message_index_enable:
            # One position stands for both: what the index has above it would be put again.
            self._cut_index(done.position, log)
        return done

    def _lacks_entries(self, expected: int, begin: int) -> bool:
        """Whether the index holds fewer entries than the log has; RocketMQ puts some twice."""
        if not self._options.message_index_enable:
            return False
        names = index_file_names(self._io, self._paths.index)
        return self._index_check().count_entries(names, begin) < expected

    def _finish_queues(self, queues_at: int, done: Redispatched, log: LogState, mender: QueueRecovery) -> None:
        """What no record explains gets fillers, and what lies behind the queues' ends goes."""
        holes = self._ledger.ranges
        trusted = mender.limit > log.begin
        if done.gaps and trusted:
            # What is missing lies below the mark, where nothing was looked at yet.
            lost = {gap.number: max(gap.physical_end, log.begin) for gap in done.gaps}
            done.mended_units += self._rebuild(lost, mender.limit).mended_units
        mender.fill(done.gaps, holes, keep_units=trusted)
        # Units below the mark were there before the damage was.
        unfilled = [hole for hole in self._ledger.holes if not (trusted and hole.filled)]
        filled = mender.fill_holes((hole.start, hole.stop) for hole in unfilled)
        untouched = self._clean and queues_at == log.end and not filled
        if not untouched:
            mender.keep_multi_dispatched()
        if self._clean and not untouched and (beyond := mender.look_beyond()) > log.end:
            # It was closed in order, so the log had what its queues knew.
            self._ledger.note_cut(log.end, beyond, self._now_ms())
        cleared = mender.clear(mender.lost if untouched else None)
        self._io.crash_point("recover.cq_cut")
        self._changed |= bool(done.mended_units or done.entries or filled or cleared or mender.lost)
        if queues_at < log.end or done.records or cleared or filled:
            text = f"dispatch: {done.records:,} records and {done.entries:,} index entries from {queues_at:,}"
            text += f"; {done.mended_units:,} units were not as they should be" if done.mended_units else ""
            text += f"; {filled:,} units point into damage" if filled else ""
            text += f"; {cleared:,} queues had units behind the end" if cleared else ""
            self._end(text)
        if done.no_room is not None:
            self._report(f"recovery: dispatch waits at {done.position:,} for room on the disk: {done.no_room.strerror}")

    # The table

    def _load_topics(self) -> Topics:
        """Topics of the config files; a file that nobody can read goes aside, and queues tell their topics."""
        try:
            deleted_topics.load(self._io, self._paths)
        except CorruptStoreError as error:
            self._set_aside(self._paths.deleted_topics, error)
        try:
            rocketmq_json.load(self._io, self._paths.topics)
        except CorruptStoreError as error:
            self._set_aside(self._paths.topics, error)
        topics = Topics(self._io, self._paths)
        topics.load()
        if topics.remark:
            self._report(f"recovery: topics: {topics.remark}")
        return topics

    def _set_aside(self, path: Path, why: CorruptStoreError) -> None:
        """Move a config file and its copy away."""
        for each in (path, path.with_name(path.name + ".bak")):
            self._files.set_aside(each, str(why))

    def _finish_table(self, log: LogState, mender: QueueRecovery) -> None:
        """Queues of topics without messages, next offsets, minimum offsets; then the table takes its place."""
        for name in self._topics.names():
            config = self._topics.get(name)
            assert config is not None
            for queue_id in range(config.queues):
                self._table.create_queue(name, queue_id)
        compared = mender.limit == log.begin
        for number, topic, queue_id in self._table.live():
            max_offset = self._table.max_offset(number)
            self._table.store(number, table_layout.NEXT_OFFSET, max_offset)
            is_new = (topic, queue_id) not in self._files.queues
            if log.begin > 0 or compared or is_new or number in self._rebuilt:
                minimum = self._first_readable(topic, queue_id, max_offset, log.begin)
                self._table.store(number, table_layout.MIN_OFFSET, minimum)
        self._sync_table()

    def _first_readable(self, topic: str, queue_id: int, max_offset: int, log_begin: int) -> int:
        """The first queue offset whose record has not been deleted with the log's beginning; `max_offset` for none."""
        starts = self._queues.starts(topic, queue_id)
        if not starts:
            return max_offset
        if log_begin > 0:
            low = min(self._queues.first_offset(topic, queue_id, starts[0]), max_offset)
            return self._queues.first_at_or_above(topic, queue_id, low, max_offset, log_begin)
        if self._ledger.holes:
            # Nothing has expired, so fillers that the queue begins with stand for what is damaged.
            return min(starts[0] // UNIT_SIZE, max_offset)
        return min(self._queues.first_offset(topic, queue_id, starts[0]), max_offset)

    def _sync_table(self) -> None:
        """The table takes its place when it is whole: what the last run knew is needed until then, and by the next."""
        fd = self._io.open(self._paths.next_queues, write=True)
        try:
            self._io.sync(fd)
        finally:
            self._io.close(fd)
        self._io.rename(self._paths.next_queues, self._paths.queues)

    # What is durable

    def _settle(self, log: LogState, dispatched: int) -> None:
        """Make queues and index durable and say so: marks at the end of the log, the checkpoint behind them."""
        if self._io.exists(self._paths.read_only):
            # A sync has failed: what is durable is not known, and another sync would not tell.
            return
        ends = {"commitlog": log.end, "consumequeue": dispatched}
        if self._options.message_index_enable:
            ends["index"] = dispatched
        behind = [name for name, end in ends.items() if not self._stands_at(name, end)]
        if behind or self._changed or not self._clean:
            self._queues.sync()
            self._sync_index()
        self._ledger.mark_filled()
        visitor.remember(self._io, self._paths)
        for name in behind:
            self._marks[name].move(ends[name], log.found.last_store_timestamp_ms)
        self._io.crash_point("recover.marked")
        self._store_checkpoint(log)
        self._io.crash_point("recover.ckpt")

    def _stands_at(self, name: str, end: int) -> bool:
        mark = self._marks[name].valid()
        return mark is not None and mark.offset == end

    def _sync_index(self) -> None:
        fd = self._io.open(self._paths.index)
        try:
            self._io.sync_file_system(fd)
        finally:
            self._io.close(fd)

    def _store_checkpoint(self, log: LogState) -> None:
        """RocketMQ's checkpoint: never later than what the log holds."""
        there = checkpoint_file.read(self._io, self._paths.checkpoint)
        last_ms = log.found.last_store_timestamp_ms
        index_ms = there.index_timestamp_ms if 0 <= there.index_timestamp_ms <= last_ms else 0
        wanted = dataclasses.replace(
            there,
            physic_timestamp_ms=last_ms,
            logics_timestamp_ms=last_ms,
            index_timestamp_ms=index_ms,
            confirm_physical_offset=log.end,
        )
        if wanted != there:
            words = {
                checkpoint_layout.PHYSIC_TIMESTAMP: wanted.physic_timestamp_ms,
                checkpoint_layout.LOGICS_TIMESTAMP: wanted.logics_timestamp_ms,
                checkpoint_layout.INDEX_TIMESTAMP: wanted.index_timestamp_ms,
                checkpoint_layout.CONFIRM_PHYSICAL_OFFSET: wanted.confirm_physical_offset,
            }
            checkpoint_file.store_words(self._io, self._paths.checkpoint, words, self._io)

    # Words

    def _store_words(self, log: LogState, dispatched: int) -> None:
        words = self._words
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
        words[words_of.SEGMENTS_READY_END] = self._segments.starts()[-1] + self._segments.segment_size
        commit = self._index.commit()
        words[words_of.INDEX_FILE_MS] = commit.file_ms
        words[words_of.INDEX_ITEMS] = commit.count
        for slot in (0, 1):
            words[words_of.COMMIT_DISPATCHED[slot]] = dispatched
            words[words_of.COMMIT_INDEX_MS[slot]] = commit.file_ms
            words[words_of.COMMIT_INDEX_ITEMS[slot]] = commit.count
            words[words_of.COMMIT_INDEX_SLOTS[slot]] = commit.slots_used
            words[words_of.COMMIT_INDEX_END_MS[slot]] = commit.end_timestamp_ms
            words[words_of.COMMIT_INDEX_END[slot]] = commit.end_physical_offset
        words[words_of.DAMAGE_HOLES] = len(self._ledger.holes)
        words[words_of.DAMAGE_READ_ONLY] = int(self._ledger.read_only)
        if self._io.exists(self._paths.read_only):
            words[words_of.SUPERVISOR_SYNC_ERRNO] = errno.EIO
