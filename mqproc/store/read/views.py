"""Views of a store, running or stopped: queues, bounds, and the readable part of the log."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import msgspec
import numpy as np

from mqproc.config.options import Options
from mqproc.errors import CorruptStoreError
from mqproc.io.store_io import StoreIO
from mqproc.ipc.control_words import Words
from mqproc.ipc.store_lock import lock_holder
from mqproc.kernels import record_check, scan
from mqproc.layout import control
from mqproc.layout import queue_table as layout
from mqproc.layout.consume_queue import FILLER_SIZE, UNIT_SIZE
from mqproc.paths import StorePaths
from mqproc.store import compat, damage
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.consumequeue.bounds import as_units
from mqproc.store.consumequeue.files import ConsumeQueueFiles, queues_on_disk
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.damage import merged
from mqproc.store.read.records import LogRecords, Visible
from mqproc.store.topics import TopicDeletion, Topics

# Queues and their bounds


class QueueBounds(msgspec.Struct, frozen=True):
    """Readable queue offsets [min_offset, max_offset).

    `number` distinguishes the queue from a deleted queue of the same name; 0 without a queue table.
    """

    number: int
    min_offset: int
    max_offset: int


class DeletionCounts(NamedTuple):
    """Deletions so far: minimum of the log, counts of queue and index files, deleted queues."""

    min_physical_offset: int = 0
    queue_files: int = 0
    index_files: int = 0
    queues: tuple[int, int] = (0, 0)


class Queues(Protocol):
    """Queues for reading; every answer is current."""

    def bounds(self, topic: str, queue_id: int) -> QueueBounds | None:
        """A queue's bounds, None for an unknown queue."""
        ...

    def ids(self, topic: str) -> list[int]:
        """The topic's queue ids, ascending; empty for an unknown topic."""
        ...

    def topics(self) -> list[str]:
        """Topics that have a queue, sorted."""
        ...

    def deletion(self, topic: str, queue_id: int) -> tuple[int, int]:
        """Ends of log and queue offsets at the last deletion of a queue of this name, or (0, 0).

        Records below both belong to the deleted queue.
        """
        ...


_FIRST_STATE: Final = layout.entry_word(0, layout.STATE)


class TableQueues:
    """Queues of a running group, by its queue table."""

    def __init__(self, table: QueueTable) -> None:
        self._table = table
        self._numbers: dict[str, list[int]] = {}
        self._known = 0

    def bounds(self, topic: str, queue_id: int) -> QueueBounds | None:
        found = self._table.bounds(topic, queue_id)
        return None if found is None else QueueBounds(*found)

    def ids(self, topic: str) -> list[int]:
        self._read_new()
        name_of = self._table.name
        return sorted(name_of(number)[1] for number in self._live(self._numbers.get(topic, ())))

    def topics(self) -> list[str]:
        self._read_new()
        return sorted(topic for topic, numbers in self._numbers.items() if any(True for _ in self._live(numbers)))

    def deletion(self, topic: str, queue_id: int) -> tuple[int, int]:
        number = self._table.entry(topic, queue_id) if self._table.deletions else -1
        return self._table.deletion(number) if number >= 0 else (0, 0)

    def _live(self, numbers: Iterable[int]) -> Iterator[int]:
        # Inlined: a topic may have thousands of queues.
        cells, first, size, live = self._table.words.cells, _FIRST_STATE, layout.ENTRY_WORDS, layout.STATE_LIVE
        return (number for number in numbers if cells[first + size * number] == live)

    def _read_new(self) -> None:
        # Read once: the writer may create a queue meanwhile.
        count = self._table.count
        for number in range(self._known, count):
            self._numbers.setdefault(self._table.name(number)[0], []).append(number)
        self._known = count


class FoundQueues:
    """Queues of a stopped store, found in its files once."""

    def __init__(
        self, found: Mapping[tuple[str, int], QueueBounds], deletions: Mapping[str, TopicDeletion] | None = None
    ) -> None:
        self._found = dict(found)
        self._deletions = dict(deletions or {})
        self._ids: dict[str, list[int]] = {}
        for topic, queue_id in sorted(self._found):
            self._ids.setdefault(topic, []).append(queue_id)

    def bounds(self, topic: str, queue_id: int) -> QueueBounds | None:
        return self._found.get((topic, queue_id))

    def ids(self, topic: str) -> list[int]:
        return list(self._ids.get(topic, ()))

    def topics(self) -> list[str]:
        return list(self._ids)

    def deletion(self, topic: str, queue_id: int) -> tuple[int, int]:
        found = self._deletions.get(topic)
        return (found.physical_offset, found.next_offset(queue_id)) if found is not None else (0, 0)


class RocketmqQueues:
    """The same queues with RocketMQ's bounds.

    RocketMQ creates an empty queue for each unknown one that is requested. It searches the minimum in the first file
    only: a file whose units all point below the log counts until its next cleanup.
    """

    def __init__(self, queues: Queues, files: ConsumeQueueFiles) -> None:
        self._queues = queues
        self._files = files
        self.ids = queues.ids
        self.topics = queues.topics

    def bounds(self, topic: str, queue_id: int) -> QueueBounds:
        found = self._queues.bounds(topic, queue_id)
        if found is None:
            return QueueBounds(0, 0, 0)
        if not 0 < found.min_offset < found.max_offset:
            return found
        starts = self._files.starts(topic, queue_id)
        if not starts or found.min_offset * UNIT_SIZE < starts[0] + self._files.file_bytes:
            return found
        return msgspec.structs.replace(found, min_offset=starts[0] // UNIT_SIZE)

    def deletion(self, topic: str, queue_id: int) -> tuple[int, int]:
        """(0, 0): RocketMQ does not track deletions."""
        return 0, 0


def each_queue(queues: Queues, topics: Iterable[str] | None = None) -> Iterator[tuple[str, int, QueueBounds]]:
    """(topic, queue id, bounds) of every queue of the topics (None: all), in order."""
    for topic in queues.topics() if topics is None else topics:
        for queue_id in queues.ids(topic):
            bounds = queues.bounds(topic, queue_id)
            if bounds is not None:
                yield topic, queue_id, bounds


RUNNING_STATES = frozenset({control.GROUP_STARTING, control.GROUP_READY, control.GROUP_STOPPING})


class StoreView(Protocol):
    """The readable content of a store."""

    @property
    def queues(self) -> Queues: ...

    def visible(self) -> Visible:
        """The readable part of the log."""
        ...

    def time_ordered_from(self) -> int:
        """Log position from which store times are known to ascend."""
        ...

    def newest_index_ms(self) -> int:
        """The newest index file's name as a time; it changes when there are new files."""
        ...

    def deletions(self) -> DeletionCounts: ...

    def close(self) -> None: ...


class WordsView:
    """View of a process that has the group's control words and queue table."""

    def __init__(self, words: Words, table: QueueTable, *, sync_flush: bool) -> None:
        self._words = words.cells
        self._sync_flush = sync_flush
        self._table = table
        self._queues = TableQueues(table)

    @property
    def queues(self) -> Queues:
        return self._queues

    def visible(self) -> Visible:
        """Up to the confirmed end; units are published shortly before `dispatched` passes them."""
        words = self._words
        if self._sync_flush:
            end = max(words[control.WRITER_SYNCED], words[control.FLUSHER_SYNCED])
        else:
            end = words[control.WRITTEN]
        return Visible(words[control.MIN_PHYSICAL_OFFSET], end)

    def time_ordered_from(self) -> int:
        return self._words[control.TIME_ORDERED_FROM]

    def newest_index_ms(self) -> int:
        return self._words[control.INDEX_FILE_MS]

    def deletions(self) -> DeletionCounts:
        words = self._words
        return DeletionCounts(
            words[control.MIN_PHYSICAL_OFFSET],
            words[control.RETENTION_QUEUE_FILES],
            words[control.RETENTION_INDEX_FILES],
            self._table.gone,
        )

    def close(self) -> None:
        self._table.close()


class GroupView(WordsView):
    """View from outside the group, by its control file."""

    @classmethod
    def open(cls, io: StoreIO, paths: StorePaths, options: Options) -> GroupView | None:
        """Open the view; None if no group runs on the store."""
        if lock_holder(io, paths) is None:
            return None
        words = open_control(io, paths.control)
        if words is None or words[control.GROUP_STATE] not in RUNNING_STATES:
            return None
        try:
            return cls(words, QueueTable(io, paths.queues), sync_flush=options.sync_flush)
        except (FileNotFoundError, CorruptStoreError):
            return None

    def is_current(self, io: StoreIO, paths: StorePaths) -> bool:
        """Whether the store still has this control file; a restarted or replaced store has another."""
        words = open_control(io, paths.control)
        return words is not None and identity_of(words.cells) == identity_of(self._words)


def identity_of(cells: memoryview) -> tuple[int, ...]:
    """Identifies the group of a control file."""
    return tuple(int(cells[word]) for word in control.IDENTITY)


def open_control(io: StoreIO, path: Path) -> Words | None:
    """The words of a control file; None without one of this version."""
    try:
        with io.opened(path) as fd:
            if io.size(fd) != control.FILE_SIZE:
                return None
            words = Words(io.map(fd, control.FILE_SIZE))
    except FileNotFoundError:
        return None
    magic, version = words[control.HEADER_MAGIC], words[control.HEADER_VERSION]
    return words if (magic, version) == (control.MAGIC, control.VERSION) else None


class FilesView:
    """View of a stopped store, determined once from its files.

    `whole`: a short segment raises CorruptStoreError; else it counts with its content.
    """

    def __init__(self, io: StoreIO, paths: StorePaths, options: Options, *, whole: bool = True) -> None:
        segments = LogSegments(io, paths.commit_log, options.mapped_file_size_commit_log, whole=whole, static=True)
        files = ConsumeQueueFiles(io, paths.consume_queue, options.consume_queue_file_bytes)
        with contextlib.closing(segments), contextlib.closing(files):
            starts = segments.starts()
            begin = starts[0] if starts else 0
            records = LogRecords(segments, lambda: Visible(begin, starts[-1] + segments.segment_size if starts else 0))
            self._queues = FoundQueues(
                {name: _bounds(files, *name, begin) for name in queues_on_disk(io, paths.consume_queue)[0]},
                _deletions_of(io, paths),
            )
            reached = max(
                (_last_record_end(files, records, *queue) for queue in each_queue(self._queues)), default=begin
            )
            self._visible = Visible(begin, _log_end(segments, starts, reached, _known_holes(io, paths)))
        ours = not compat.was_opened_elsewhere(io, paths)
        self._time_ordered_from = compat.time_ordered_from(io, paths) if ours else compat.TIME_ORDER_UNKNOWN

    @property
    def queues(self) -> Queues:
        return self._queues

    def visible(self) -> Visible:
        return self._visible

    def time_ordered_from(self) -> int:
        return self._time_ordered_from

    def newest_index_ms(self) -> int:
        """A constant: the files do not change."""
        return 0

    def deletions(self) -> DeletionCounts:
        return DeletionCounts()

    def close(self) -> None:
        """Nothing is open."""


def _deletions_of(io: StoreIO, paths: StorePaths) -> dict[str, TopicDeletion]:
    """Deletions of topics; empty if the settings are unreadable."""
    topics = Topics(io, paths)
    try:
        topics.load()
    except (CorruptStoreError, IsADirectoryError, msgspec.MsgspecError):
        return {}
    return topics.deletions


def _bounds(files: ConsumeQueueFiles, topic: str, queue_id: int, log_begin: int) -> QueueBounds:
    """A queue's bounds: from the first unit that does not point below the log to its last unit."""
    found = files.extent(topic, queue_id)
    low = files.first_at_or_above(topic, queue_id, found.first_offset, found.max_offset, log_begin)
    return QueueBounds(0, low, found.max_offset)


def _last_record_end(
    files: ConsumeQueueFiles, records: LogRecords, topic: str, queue_id: int, bounds: QueueBounds
) -> int:
    """End of the record of a queue's last unit, 0 if none exists."""
    if bounds.min_offset >= bounds.max_offset:
        return 0
    unit = as_units(files.read_units(topic, queue_id, bounds.max_offset - 1, 1))[0]
    physical_offset, size = int(unit["physical_offset"]), int(unit["size"])
    if size == FILLER_SIZE or records.store_timestamp_ms(physical_offset) < 0:
        return 0
    return physical_offset + size


def _known_holes(io: StoreIO, paths: StorePaths) -> list[tuple[int, int]]:
    """Damaged ranges that recovery has recorded."""
    try:
        return merged((hole.start, hole.stop) for hole in damage.load(io, paths).holes)
    except msgspec.MsgspecError:
        return []


def _log_end(segments: LogSegments, starts: list[int], reached: int, holes: list[tuple[int, int]]) -> int:
    """End of the complete records that follow `reached`, the end of a record; skips `holes`."""
    out = np.zeros(scan.SCAN_SIZE, np.int64)
    end = reached
    while True:
        end = next((stop for start, stop in holes if start <= end < stop), end)
        if segments.start_of(end) not in starts:
            return end
        start = segments.start_of(end)
        view = segments.view(start)
        reason = scan.scan_records(view, end - start, len(view), start, 0, out)
        segments.drop_pages(start, 0, len(view))
        if reason in (record_check.BLANK, record_check.REACHED_STOP) and len(view) == segments.segment_size:
            end = start + segments.segment_size
            continue
        end = start + int(out[scan.STOPPED_AT])
        if not any(first <= end < stop for first, stop in holes):
            return end
