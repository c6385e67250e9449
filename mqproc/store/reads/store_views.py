"""Where reading learns what there is to read: from a group that runs, or once from a store's files."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from mqproc.config import Options
from mqproc.errors import CorruptStoreError
from mqproc.io import StoreIO
from mqproc.ipc.lock import holder_of
from mqproc.ipc.words import Words
from mqproc.kernels import scan
from mqproc.layout import control as words_of
from mqproc.layout.consume_queue import FILLER_SIZE
from mqproc.paths import StorePaths
from mqproc.store import damage
from mqproc.store.consume_queue import ConsumeQueueFiles, as_units
from mqproc.store.damage import merged
from mqproc.store.deleted_topics import Deletion
from mqproc.store.queue_folders import queues_on_disk
from mqproc.store.queue_table import QueueTable
from mqproc.store.reads.log_records import LogRecords, Visible
from mqproc.store.reads.queue_bounds import Deletions, FoundQueues, QueueBounds, Queues, TableQueues, each_queue
from mqproc.store.segments import LogSegments
from mqproc.store.topics import Topics

RUNNING_STATES = frozenset({words_of.GROUP_STARTING, words_of.GROUP_READY, words_of.GROUP_STOPPING})


class StoreView(Protocol):
    """What can be read of a store."""

    @property
    def queues(self) -> Queues: ...

    def visible(self) -> Visible:
        """The part of the log that may be read now."""
        ...

    def newest_index_ms(self) -> int:
        """The newest index file's name as a time; another value says that there may be other files."""
        ...

    def deletions(self) -> Deletions:
        """What has been deleted by now."""
        ...

    def close(self) -> None: ...


class WordsView:
    """The view of a process that has the group's control words and queue table."""

    def __init__(self, words: Words, table: QueueTable, *, sync_flush: bool) -> None:
        self._words = words.cells
        self._sync_flush = sync_flush
        self._table = table
        self._queues = TableQueues(table)

    @property
    def queues(self) -> Queues:
        return self._queues

    def visible(self) -> Visible:
        """Up to what is confirmed. A queue's units are published a moment before `dispatched` moves past them."""
        words = self._words
        if self._sync_flush:
            end = max(words[words_of.WRITER_SYNCED], words[words_of.FLUSHER_SYNCED])
        else:
            end = words[words_of.WRITTEN]
        return Visible(words[words_of.MIN_PHYSICAL_OFFSET], end)

    def newest_index_ms(self) -> int:
        return self._words[words_of.INDEX_FILE_MS]

    def deletions(self) -> Deletions:
        words = self._words
        return Deletions(
            words[words_of.MIN_PHYSICAL_OFFSET],
            words[words_of.RETENTION_QUEUE_FILES],
            words[words_of.RETENTION_INDEX_FILES],
            self._table.gone,
        )

    def close(self) -> None:
        self._table.close()


class GroupView(WordsView):
    """The same from outside the group, over its control file."""

    @classmethod
    def open(cls, io: StoreIO, paths: StorePaths, options: Options) -> GroupView | None:
        """None when no group runs on the store."""
        if holder_of(io, paths) is None:
            return None
        words = open_control(io, paths.control)
        if words is None or words[words_of.GROUP_STATE] not in RUNNING_STATES:
            return None
        try:
            return cls(words, QueueTable(io, paths.queues), sync_flush=options.sync_flush)
        except (FileNotFoundError, CorruptStoreError):
            return None

    def is_current(self, io: StoreIO, paths: StorePaths) -> bool:
        """False when the store, or another one in its place, was started since, and so has another control file."""
        words = open_control(io, paths.control)
        return words is not None and identity_of(words.cells) == identity_of(self._words)


def identity_of(cells: memoryview) -> tuple[int, ...]:
    """What tells the group of a control file's words from others."""
    return tuple(int(cells[word]) for word in words_of.IDENTITY)


def open_control(io: StoreIO, path: Path) -> Words | None:
    try:
        fd = io.open(path)
    except FileNotFoundError:
        return None
    try:
        if io.size(fd) != words_of.FILE_SIZE:
            return None
        words = Words(io.map(fd, words_of.FILE_SIZE))
    finally:
        io.close(fd)
    magic, version = words[words_of.HEADER_MAGIC], words[words_of.HEADER_VERSION]
    return words if (magic, version) == (words_of.MAGIC, words_of.VERSION) else None


class FilesView:
    """What the files of a store say, looked at once.

    With `whole` false a segment that is short holds what is there; else it raises CorruptStoreError.
    """

    def __init__(self, io: StoreIO, paths: StorePaths, options: Options, *, whole: bool = True) -> None:
        segments = LogSegments(io, paths.commit_log, options.mapped_file_size_commit_log, whole=whole, still=True)
        files = ConsumeQueueFiles(io, paths.consume_queue, options.consume_queue_file_bytes)
        try:
            starts = segments.starts()
            begin = starts[0] if starts else 0
            records = LogRecords(segments, lambda: Visible(begin, starts[-1] + segments.segment_size if starts else 0))
            self._queues = FoundQueues(
                {name: _bounds(files, *name, begin) for name in queues_on_disk(io, paths.consume_queue)[0]},
                _deletions_of(io, paths),
            )
            reached = max((_reached(files, records, *queue) for queue in each_queue(self._queues)), default=begin)
            self._visible = Visible(begin, _log_end(segments, starts, reached, _known_holes(io, paths)))
        finally:
            files.close()
            segments.close()

    @property
    def queues(self) -> Queues:
        return self._queues

    def visible(self) -> Visible:
        return self._visible

    def newest_index_ms(self) -> int:
        """Files do not change, so any number does."""
        return 0

    def deletions(self) -> Deletions:
        return Deletions()

    def close(self) -> None:
        """Nothing is held open."""


def _deletions_of(io: StoreIO, paths: StorePaths) -> dict[str, Deletion]:
    """Topics that were deleted, made again or not; none when the settings cannot be read."""
    topics = Topics(io, paths)
    try:
        topics.load()
    except (CorruptStoreError, IsADirectoryError, msgspec.MsgspecError):
        return {}
    return topics.deletions


def _bounds(files: ConsumeQueueFiles, topic: str, queue_id: int, log_begin: int) -> QueueBounds:
    """A queue's bounds: from the first unit that does not point below the log, to where its units end."""
    found = files.extent(topic, queue_id)
    low = files.first_at_or_above(topic, queue_id, found.first_offset, found.max_offset, log_begin)
    return QueueBounds(0, low, found.max_offset)


def _reached(files: ConsumeQueueFiles, records: LogRecords, topic: str, queue_id: int, bounds: QueueBounds) -> int:
    """Where the record of a queue's last unit ends, 0 when there is none."""
    if bounds.min_offset >= bounds.max_offset:
        return 0
    unit = as_units(files.read_units(topic, queue_id, bounds.max_offset - 1, 1))[0]
    physical_offset, size = int(unit["physical_offset"]), int(unit["size"])
    if size == FILLER_SIZE or records.store_timestamp_ms(physical_offset) < 0:
        return 0
    return physical_offset + size


def _known_holes(io: StoreIO, paths: StorePaths) -> list[tuple[int, int]]:
    """Damaged ranges that recovery knows of."""
    try:
        return merged((hole.start, hole.stop) for hole in damage.load(io, paths).holes)
    except msgspec.MsgspecError:
        return []


def _log_end(segments: LogSegments, starts: list[int], reached: int, holes: list[tuple[int, int]]) -> int:
    """End of the whole records from `reached` on, where a record ends or the log begins; it goes on behind `holes`."""
    out = np.zeros(scan.SCAN_SIZE, np.int64)
    end = reached
    while True:
        end = next((stop for start, stop in holes if start <= end < stop), end)
        if segments.start_of(end) not in starts:
            return end
        start = segments.start_of(end)
        view = segments.view(start)
        reason = scan.scan_records(view, end - start, len(view), start, 0, out)
        segments.let_go(start, 0, len(view))
        if reason in (scan.BLANK, scan.REACHED_STOP) and len(view) == segments.segment_size:
            end = start + segments.segment_size
            continue
        end = start + int(out[scan.STOPPED_AT])
        if not any(first <= end < stop for first, stop in holes):
            return end
