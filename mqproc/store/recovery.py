"""Recovery: after any kind of stop, make log, queues and index agree, and say what was found, cut and rebuilt.

    log      from its durable mark: walk, cut the torn tail, sync
    queues   cut to the ConsumeQueue mark, or trusted after a clean stop, or rebuilt
    index    cut to the index mark, or trusted after a clean stop, or rebuilt
    dispatch from the lower of both to the end of the log, by the engine's own dispatch
    table    the queue table with every queue's offsets
    words    all positions at the end of the log

Nothing else has the store open. Every step can be repeated; a second run finds nothing to do.
"""

from __future__ import annotations

import dataclasses
import errno
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from mqproc.config import OnDamage, Options
from mqproc.errors import CorruptStoreError
from mqproc.io import StoreIO
from mqproc.kernels.dispatch import StopReason
from mqproc.kernels.intrinsics import load_be32
from mqproc.kernels.record_check import signed_topic_length, topic_length_at, topic_length_size
from mqproc.layout import control as words_of
from mqproc.layout import queue_table as table_layout
from mqproc.layout import record
from mqproc.paths import StorePaths
from mqproc.shm.words import Words
from mqproc.store import checkpoint_file
from mqproc.store.consume_queue import UNIT_SIZE, ConsumeQueueFiles, adopted_file_bytes, as_units, queues_on_disk
from mqproc.store.dispatcher import Dispatch
from mqproc.store.index_files import IndexFiles, index_file_names
from mqproc.store.log_flush import make_segment
from mqproc.store.log_records import LogRecords, Visible
from mqproc.store.log_recovery import LogEnd, LogRecovery
from mqproc.store.marks import DurableMark
from mqproc.store.queue_table import QueueTable
from mqproc.store.segments import LogSegments, adopted_segment_size
from mqproc.store.topics import Topics

Report = Callable[[str], None]


def adopt_sizes(io: StoreIO, paths: StorePaths, options: Options, report: Report) -> Options:
    """The options with the file sizes that the store already has. Raises CorruptStoreError when those are mixed."""
    segment = adopted_segment_size(io, paths.commit_log, options.mapped_file_size_commit_log)
    queue = adopted_file_bytes(io, paths.consume_queue, options.consume_queue_file_bytes)
    changes: dict[str, Any] = {}
    for name, found, configured in (
        ("mapped_file_size_commit_log", segment, options.mapped_file_size_commit_log),
        ("mapped_file_size_consume_queue", queue, options.consume_queue_file_bytes),
    ):
        if found != configured:
            report(f"{name}: the store's files have {found:,} bytes, the option says {configured:,}: theirs are used")
            changes[name] = found
    return dataclasses.replace(options, **changes)


@dataclass(slots=True)
class _Step:
    """Reports one line with the time that a step took."""

    report: Report
    started: float = 0.0

    def begin(self) -> None:
        self.started = time.perf_counter()

    def end(self, text: str) -> None:
        self.report(f"recovery: {text} ({(time.perf_counter() - self.started) * 1000:.0f} ms)")


class Recovery:
    """Recovery of one store. `words` are the new control file's; `clean` says that no `abort` file was there."""

    def __init__(
        self, io: StoreIO, paths: StorePaths, options: Options, words: Words, report: Report, *, clean: bool
    ) -> None:
        self._io = io
        self._paths = paths
        self._options = options
        self._words = words
        self._clean = clean
        self._step = _Step(report)
        self._segments = LogSegments(io, paths.commit_log, options.mapped_file_size_commit_log)
        self._marks = {
            name: DurableMark(io, paths.mark(name), self._segments) for name in ("commitlog", "consumequeue", "index")
        }

    def run(self) -> None:
        """Recover and set all positions. Raises CorruptStoreError, OSError."""
        started = time.perf_counter()
        self._make_folders()
        log = self._recover_log()
        self._table = QueueTable.create(self._io, self._paths.queues, self._options.max_queues)
        self._queues = ConsumeQueueFiles(
            self._io, self._paths.consume_queue, self._options.consume_queue_file_bytes, write=True
        )
        queues_at = self._recover_queues(log)
        self._index = IndexFiles(
            self._io, self._paths.index, self._options.max_hash_slot_num, self._options.max_index_num
        )
        start = self._recover_index(log, queues_at)
        self._dispatch(start, log)
        self._finish_table(log)
        self._store_words(log)
        self._queues.close()
        self._index.close()
        self._segments.close()
        self._table.close()
        self._words[words_of.RECOVERY_US] = int((time.perf_counter() - started) * 1_000_000)

    def _make_folders(self) -> None:
        paths = self._paths
        for folder in (paths.commit_log, paths.consume_queue, paths.index, paths.config):
            self._io.make_folder(folder)
        for folder in (paths.own, paths.marks):
            self._io.make_folder(folder, mode=0o700)
        checkpoint_file.ensure(self._io, paths.checkpoint)

    # The log

    def _recover_log(self) -> LogEnd:
        self._step.begin()
        recovery = LogRecovery(self._io, self._segments)
        self._finish_short_segment()
        mark = self._marks["commitlog"].valid()
        found = recovery.find_end(mark)
        self._judge_holes(found)
        removed = recovery.cut(found)
        recovery.sync(found.start, found.end)
        if not self._segments.starts():
            make_segment(self._io, self._paths, 0, self._segments.segment_size)
        whence = "durable mark" if mark is not None else "beginning"
        text = f"log: {found.records:,} records from the {whence} {found.start:,} to the end {found.end:,}"
        if found.cut_bytes or removed:
            reason = found.cut_reason or "unfinished"
            text += f"; cut {found.cut_bytes:,} bytes ({reason}) and {removed} segments behind it"
        if found.holes:
            text += f"; {len(found.holes)} damaged ranges are served around"
        self._step.end(text)
        self._words[words_of.RECOVERY_CUT_BYTES] = found.cut_bytes
        return found

    def _finish_short_segment(self) -> None:
        """The last segment of a group that was killed while making it may be short or empty: complete or remove it."""
        for start in reversed(self._segments.starts()[-1:]):
            path = self._segments.path(start)
            size = self._io.size_of(path)
            if size == 0:
                self._io.unlink(path)
                self._io.sync_folder(path.parent)
            elif size < self._segments.segment_size:
                fd = self._io.open(path, write=True)
                try:
                    self._io.allocate(fd, 0, self._segments.segment_size)
                    self._io.sync(fd)
                finally:
                    self._io.close(fd)

    def _judge_holes(self, found: LogEnd) -> None:
        self._words[words_of.DAMAGE_HOLES] = len(found.holes)
        if not found.holes:
            return
        start, stop = found.holes[0]
        path = self._segments.path(self._segments.start_of(start))
        if self._options.on_damage is OnDamage.REFUSE:
            raise CorruptStoreError(f"{path}: offset {start % self._segments.segment_size}: damage up to {stop:,}")
        holes = [{"start": first, "stop": last} for first, last in found.holes]
        self._io.write_file_atomically(
            self._paths.damage, msgspec.json.format(msgspec.json.encode({"holes": holes}), indent=1), mode=0o600
        )

    @property
    def _min_offset(self) -> int:
        starts = self._segments.starts()
        return starts[0] if starts else 0

    # Queues and index

    def _trusted_offset(self, name: str, log: LogEnd) -> int | None:
        """Up to which log position a row can be trusted by its mark; None without a valid mark."""
        mark = self._marks[name].valid()
        return None if mark is None else max(min(mark.offset, log.end), self._min_offset)

    def _recover_queues(self, log: LogEnd) -> int:
        """Cut the queues to what can be trusted and put them into the table; the log position they then stand at."""
        self._step.begin()
        trusted = self._trusted_offset("consumequeue", log)
        limit = trusted if trusted is not None else log.end if self._clean else self._min_offset
        on_disk, strays = queues_on_disk(self._io, self._paths.consume_queue)
        reached = self._min_offset
        changed = 0
        for topic, queue_id in on_disk:
            extent = self._queues.cut(topic, queue_id, limit)
            changed += extent.changed
            number = self._table.create_queue(topic, queue_id, extent.max_offset, extent.first_offset)
            self._table.store(number, table_layout.LAST_PHYSICAL_END, extent.last_physical_end)
            reached = max(reached, extent.last_physical_end)
        if changed:
            self._queues.sync()
        position = limit if trusted is not None else min(reached, log.end)
        text = f"queues: {len(on_disk):,} stand at {position:,}"
        text += f"; {changed:,} were cut" if changed else ""
        text += f"; {len(strays)} strays passed over" if strays else ""
        self._step.end(text)
        return position

    def _recover_index(self, log: LogEnd, queues_at: int) -> int:
        """Cut the index; where dispatch goes on."""
        if not self._options.message_index_enable:
            return queues_at
        self._step.begin()
        names = index_file_names(self._io, self._paths.index)
        trusted = self._trusted_offset("index", log)
        if trusted is None:
            trusted = log.end if self._clean and names else self._min_offset
        start = min(queues_at, trusted)
        if start < log.end or not self._clean:
            records = LogRecords(self._segments, lambda: Visible(self._min_offset, log.end))

            def store_timestamp_ms(offset: int) -> int | None:
                found = records.store_timestamp_ms(offset)
                return found if found >= 0 else None

            kept = self._index.rebuild(start, store_timestamp_ms)
            self._io.sync_folder(self._paths.index)
            self._step.end(f"index: {len(names)} files cut back to {start:,}, {kept:,} entries kept in the newest")
        else:
            self._step.end(f"index: {len(names)} files stand at {start:,}")
        return start

    def _dispatch(self, start: int, log: LogEnd) -> None:
        """Bring queues and index to the end of the log."""
        self._step.begin()
        dispatch = Dispatch(
            self._io, self._options, self._table, self._segments, self._queues, self._index, holes=log.holes
        )
        position, records, entries = start, 0, 0
        while position < log.end:
            step = dispatch.step(position, log.end)
            records += step.records
            entries += step.entries
            if step.reason is StopReason.UNKNOWN_QUEUE:
                self._table.create_queue(*self._queue_at(step.position))
            elif step.reason is StopReason.BAD_RECORD:
                base = self._segments.start_of(step.position)
                place = f"{self._segments.path(base)}: offset {step.position - base}"
                raise CorruptStoreError(f"{place}: no intact record below the durable mark")
            position = step.position
        if start < log.end:
            self._step.end(f"dispatch: {records:,} records and {entries:,} index entries from {start:,}")

    def _queue_at(self, physical_offset: int) -> tuple[str, int]:
        """(topic, queue id) of the record at an offset, whose sizes hold."""
        base = self._segments.start_of(physical_offset)
        view, at = self._segments.view(base), physical_offset - base
        width = topic_length_size(view, at)
        length_at = topic_length_at(view, at)
        start = length_at + width
        size = signed_topic_length(view, length_at, width)
        return bytes(view[start : start + size]).decode(), load_be32(view, at + record.QUEUE_ID)

    def _finish_table(self, log: LogEnd) -> None:
        """Queues of topics without messages, next offsets, minimum offsets."""
        topics = Topics(self._io, self._paths)
        topics.load()
        for name in topics.names():
            config = topics.get(name)
            assert config is not None
            for queue_id in range(config.queues):
                self._table.create_queue(name, queue_id)
        for number, topic, queue_id in self._table.live():
            max_offset = self._table.max_offset(number)
            self._table.store(number, table_layout.NEXT_OFFSET, max_offset)
            if self._min_offset > 0:
                minimum = self._first_readable(topic, queue_id, max_offset)
                self._table.store(number, table_layout.MIN_OFFSET, minimum)

    def _first_readable(self, topic: str, queue_id: int, max_offset: int) -> int:
        """The first queue offset whose record has not been deleted with the log's beginning; `max_offset` for none."""
        starts = self._queues.starts(topic, queue_id)
        low = min(starts[0] // UNIT_SIZE, max_offset) if starts else max_offset
        high = max_offset
        while low < high:
            middle = (low + high) // 2
            unit = as_units(self._queues.read_units(topic, queue_id, middle, 1))[0]
            if int(unit["physical_offset"]) < self._min_offset:
                low = middle + 1
            else:
                high = middle
        return low

    # Words

    def _store_words(self, log: LogEnd) -> None:
        words = self._words
        end = log.end
        words[words_of.MIN_PHYSICAL_OFFSET] = self._min_offset
        words[words_of.WRITTEN_STORE_TIMESTAMP_MS] = log.last_store_timestamp_ms
        words[words_of.DISPATCHED_STORE_TIMESTAMP_MS] = log.last_store_timestamp_ms
        for word in (
            words_of.RESERVED_END,
            words_of.WRITTEN,
            words_of.TABLE_AT,
            words_of.WRITER_SYNCED,
            words_of.FLUSHER_SYNCED,
            words_of.DISPATCHED,
        ):
            words[word] = end
        words[words_of.SEGMENTS_READY_END] = self._segments.starts()[-1] + self._segments.segment_size
        commit = self._index.commit()
        words[words_of.INDEX_FILE_MS] = commit.file_ms
        words[words_of.INDEX_ITEMS] = commit.count
        for slot in (0, 1):
            words[words_of.COMMIT_DISPATCHED[slot]] = end
            words[words_of.COMMIT_INDEX_MS[slot]] = commit.file_ms
            words[words_of.COMMIT_INDEX_ITEMS[slot]] = commit.count
            words[words_of.COMMIT_INDEX_SLOTS[slot]] = commit.slots_used
            words[words_of.COMMIT_INDEX_END_MS[slot]] = commit.end_timestamp_ms
            words[words_of.COMMIT_INDEX_END[slot]] = commit.end_physical_offset
        if self._io.exists(self._paths.read_only):
            words[words_of.SUPERVISOR_SYNC_ERRNO] = errno.EIO
