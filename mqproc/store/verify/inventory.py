"""What lies in a store by name, kind and length, and which of it is not as it should be. Opens nothing."""

from __future__ import annotations

import itertools
import stat
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mqproc.errors import StoreAccessError
from mqproc.io import Entry, StoreIO
from mqproc.io import Kind as EntryKind
from mqproc.layout import index_file, timer_log
from mqproc.layout.consume_queue import EXTENSION_FOLDER
from mqproc.names import MULTI_DISPATCH_PREFIX
from mqproc.paths import SOCKETS, StorePaths, file_type, index_name_time_ms, segment_start, shown
from mqproc.quantities import counted
from mqproc.store.queue_folders import (
    bars_queue,
    bars_topic,
    has_rocksdb_queues,
    is_queue_id,
    is_topic,
    rocksdb_config,
)
from mqproc.store.verify.findings import LISTED_MAX, Finding, Kind

Queue = tuple[str, int]
"""Topic and queue id."""

# Parts of a store that RocketMQ has and we do not look into.
_UNKNOWN_PARTS = ("batchconsumequeue", EXTENSION_FOLDER, "compaction")

_MARKS = ("commitlog", "consumequeue", "index")
_NO_LOG = frozenset({stat.S_IFDIR, stat.S_IFIFO, stat.S_IFSOCK})
# A file far behind its row has millions missing before it: so many of a gap are told one by one.
MISSING_ALONE_MAX = LISTED_MAX


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths that a store's files have."""

    segment: int
    queue_file: int
    slots: int
    items: int

    @property
    def index_file(self) -> int:
        return index_file.file_size(self.slots, self.items)


@dataclass(slots=True)
class Inventory:
    """A store's usable files with their lengths; `findings` tells of the others.

    `segments` by log offset, `queues` by topic and queue id, each with its files by their begin in bytes, `index` the
    names of the index files of the right length, oldest first, `timer_log` its files by their begin in bytes.
    """

    root: Path
    sizes: Sizes
    segments: dict[int, int] = field(default_factory=dict)
    queues: dict[Queue, dict[int, int]] = field(default_factory=dict)
    index: list[str] = field(default_factory=list)
    timer_log: dict[int, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    unchecked_topics: set[str] = field(default_factory=set)
    unreadable: set[Path] = field(default_factory=set)
    has_rocksdb_queues: bool = False

    @property
    def paths(self) -> StorePaths:
        return StorePaths(self.root)

    @property
    def timer_log_size(self) -> int:
        """The length of the timer log's files: the one that most of them have, if any can be it."""
        sizes = [size for size in self.timer_log.values() if size >= timer_log.FILE_SIZE_MIN]
        return max(sizes, key=lambda size: (sizes.count(size), size), default=timer_log.FILE_SIZE)

    @property
    def log_begin(self) -> int:
        """Where the first segment begins, 0 without any."""
        return min(self.segments, default=0)

    def segment_name(self, physical_offset: int) -> str:
        """The file, relative to the store, that holds a log position, whether or not it is there."""
        start = physical_offset - physical_offset % self.sizes.segment
        return f"commitlog/{start:020d}"

    def queue_name(self, queue: Queue, queue_offset: int, unit_size: int) -> tuple[str, int]:
        """(file relative to the store, byte in it) of a unit."""
        position = queue_offset * unit_size
        start = position - position % self.sizes.queue_file
        return f"consumequeue/{queue[0]}/{queue[1]}/{start:020d}", position - start


def take_inventory(
    io: StoreIO, paths: StorePaths, sizes: Sizes, *, was_killed: bool = False, unreadable: Collection[Path] = ()
) -> Inventory:
    """Look at every name of a store, which nobody runs and nobody has closed if it `was_killed`.

    Of queues and index `unreadable` files count as not there.

    Raises StoreAccessError when its folder cannot be listed.
    """
    return _Look(io, paths, sizes, was_killed=was_killed, unreadable=unreadable).run()


class _Look:
    """One look at a store's names."""

    def __init__(
        self, io: StoreIO, paths: StorePaths, sizes: Sizes, *, was_killed: bool, unreadable: Collection[Path]
    ) -> None:
        self._io = io
        self._paths = paths
        self._sizes = sizes
        self._was_killed = was_killed
        self._unreadable = unreadable
        self._found = Inventory(paths.root, sizes)

    def run(self) -> Inventory:
        self._look_at_log()
        self._found.has_rocksdb_queues = has_rocksdb_queues(self._io, self._paths.consume_queue)
        if self._found.has_rocksdb_queues:
            self._tell(Kind.NOT_CHECKED, self._paths.consume_queue, text="queues of RocksDB", as_note=True)
            topics: list[Entry] = []
        else:
            topics = self._list(self._paths.consume_queue)
        for topic in topics:
            self._look_at_topic(self._paths.consume_queue / topic.name, topic)
        self._tell_light_queues()
        self._look_at_index()
        self._look_at_timer()
        self._look_at_others()
        return self._found

    def _list(self, folder: Path) -> list[Entry]:
        """Entries of a folder but its symlinks, which are told."""
        own = self._io.entry(folder)
        if own is not None and own.kind is EntryKind.SYMLINK:
            # What it leads to is all that the store has: it is not to go aside.
            self._tell(Kind.SYMLINK, folder)
        elif own is not None and own.kind is not EntryKind.FOLDER:
            self._tell(Kind.MISPLACED_FILE, folder, text="not a folder")
        try:
            entries = self._io.entries(folder)
        except PermissionError as error:
            raise StoreAccessError(f"{folder}: {error.strerror}") from None
        entries = [entry for entry in entries if folder / entry.name != self._paths.guard]
        for entry in entries:
            if entry.kind is EntryKind.SYMLINK:
                self._tell(Kind.SYMLINK, folder / entry.name)
        return [entry for entry in entries if entry.kind is not EntryKind.SYMLINK]

    def _tell(
        self,
        kind: Kind,
        path: Path,
        *,
        offset: int | None = None,
        physical_offset: int | None = None,
        size: int = 0,
        text: str = "",
        as_note: bool = False,
    ) -> None:
        file = shown(path.relative_to(self._paths.root))
        self._found.findings.append(Finding(kind, file, offset, physical_offset, size=size, text=text, as_note=as_note))

    def _is_begun(self, path: Path, size: int, *, is_newest: bool) -> bool:
        """Whether a kill has left a file without a length; told then. Files are made, and get their length next."""
        is_begun = self._was_killed and is_newest and size == 0
        if is_begun:
            self._tell(Kind.FILE_BEGUN, path, offset=0)
        return is_begun

    def _is_unreadable(self, path: Path) -> bool:
        """Whether the disk cannot read a file; told then."""
        is_unreadable = path in self._unreadable
        if is_unreadable:
            self._found.unreadable.add(path)
            self._tell(Kind.FILE_UNREADABLE, path, text="the disk cannot read it")
        return is_unreadable

    # The log

    def _look_at_log(self) -> None:
        folder, whole = self._paths.commit_log, self._sizes.segment
        empty: list[tuple[int, Path]] = []
        for entry in self._list(folder):
            path, start = folder / entry.name, segment_start(entry.name)
            if entry.kind is EntryKind.FOLDER and start is None:
                self._tell(Kind.STRAY_FILE, path, text="a folder, which RocketMQ passes over", as_note=True)
            elif start is None:
                self._tell(Kind.STRAY_FILE, path, size=entry.size)
            elif entry.kind is not EntryKind.FILE:
                self._tell(Kind.MISPLACED_FILE, path, text=entry.kind.value)
            elif start % whole:
                self._tell(Kind.MISPLACED_FILE, path, text=f"no segment of {whole:,} bytes begins there")
            elif entry.size == 0:
                empty.append((start, path))
            else:
                self._found.segments[start] = entry.size
                self._check_length(path, start, entry.size)
        for start, path in empty:
            if not self._is_begun(path, 0, is_newest=start > max(self._found.segments, default=-1)):
                self._tell(Kind.SEGMENT_EMPTY, path, offset=0, physical_offset=start, text="0 bytes")
        for start, size in _missing(self._found.segments, whole):
            self._tell(
                Kind.SEGMENT_MISSING,
                folder / f"{start:020d}",
                offset=0,
                physical_offset=start,
                size=size,
                text="a segment before it and one behind it are there",
            )

    def _check_length(self, path: Path, start: int, size: int) -> None:
        whole = self._sizes.segment
        kind = Kind.SEGMENT_SHORT if size < whole else Kind.SEGMENT_LONG
        if size != whole:
            offset = min(size, whole)
            text = f"{size:,} bytes; a segment has {whole:,}"
            self._tell(kind, path, offset=offset, physical_offset=start + offset, size=abs(size - whole), text=text)

    # Queues

    def _look_at_topic(self, folder: Path, topic: Entry) -> None:
        if bars_topic(topic):
            self._tell(Kind.MISPLACED_FILE, folder, text=f"{topic.kind.value}, where a topic's folder would be")
            return
        if not is_topic(topic):
            self._tell(Kind.STRAY_FILE, folder, size=topic.size, text="RocketMQ passes over it", as_note=True)
            return
        for entry in self._list(folder):
            name = entry.name
            if entry.kind is EntryKind.FOLDER and is_queue_id(name):
                self._look_at_queue((topic.name, int(name)), folder / name)
            elif bars_queue(entry):
                self._tell(
                    Kind.MISPLACED_FILE, folder / name, text=f"{entry.kind.value}, where a queue's folder would be"
                )
            else:
                self._tell(
                    Kind.STRAY_FILE, folder / name, size=entry.size, text="RocketMQ passes over it", as_note=True
                )

    def _look_at_queue(self, queue: Queue, folder: Path) -> None:
        whole = self._sizes.queue_file
        files = self._found.queues.setdefault(queue, {})
        for entry in self._list(folder):
            path, start = folder / entry.name, segment_start(entry.name)
            if start is None:
                self._tell(Kind.STRAY_FILE, path, size=entry.size)
            elif entry.kind is not EntryKind.FILE:
                self._tell(Kind.MISPLACED_FILE, path, text=entry.kind.value)
            elif start % whole:
                self._tell(Kind.MISPLACED_FILE, path, text=f"no file of {whole:,} bytes begins there")
            elif not self._is_unreadable(path):
                files[start] = entry.size
        for start, size in files.items():
            path = folder / f"{start:020d}"
            if size != whole and not self._is_begun(path, size, is_newest=start == max(files)):
                text = f"{size:,} bytes; the others have {whole:,}"
                offset = min(size, whole)
                self._tell(Kind.QUEUE_FILE_LENGTH, path, offset=offset, size=abs(size - whole), text=text)
        for start, size in _missing(files, whole):
            self._tell(Kind.QUEUE_FILE_MISSING, folder / f"{start:020d}", offset=0, size=size)

    def _tell_light_queues(self) -> None:
        """Their units lead to records of other topics, which those name: all of RocketMQ's multi-dispatch."""
        light = sorted({topic for topic, _ in self._found.queues if topic.startswith(MULTI_DISPATCH_PREFIX)})
        if light:
            text = f"units of RocketMQ's light queues: {counted(len(light), 'such topic')}"
            self._tell(Kind.NOT_CHECKED, self._paths.consume_queue / light[0], text=text, as_note=True)

    # The index and the rest

    def _look_at_index(self) -> None:
        folder, whole = self._paths.index, self._sizes.index_file
        entries = self._list(folder)
        newest = max((entry.name for entry in entries if index_name_time_ms(entry.name) is not None), default="")
        for entry in entries:
            path = folder / entry.name
            if index_name_time_ms(entry.name) is None:
                self._tell(Kind.STRAY_FILE, path, size=entry.size, text="RocketMQ passes over it", as_note=True)
            elif entry.kind is not EntryKind.FILE:
                self._tell(Kind.MISPLACED_FILE, path, text=entry.kind.value)
            elif self._is_begun(path, entry.size, is_newest=entry.name == newest) or self._is_unreadable(path):
                continue
            elif entry.size != whole:
                text = (
                    f"{entry.size:,} bytes; {self._sizes.slots:,} slots and {self._sizes.items:,} items take {whole:,}"
                )
                self._tell(
                    Kind.INDEX_FILE_LENGTH,
                    path,
                    offset=min(entry.size, whole),
                    size=abs(entry.size - whole),
                    text=text,
                )
            else:
                self._found.index.append(entry.name)

    def _look_at_timer(self) -> None:
        folder, files = self._paths.timer_log, self._found.timer_log
        for entry in self._list(folder):
            path, start = folder / entry.name, segment_start(entry.name)
            if start is None:
                self._tell(Kind.STRAY_FILE, path, size=entry.size)
            elif entry.kind is not EntryKind.FILE:
                self._tell(Kind.MISPLACED_FILE, path, text=entry.kind.value)
            else:
                files[start] = entry.size
        whole = self._found.timer_log_size
        for start, size in sorted(files.items()):
            path = folder / f"{start:020d}"
            if size != whole and not self._is_begun(path, size, is_newest=start == max(files)):
                text = f"{size:,} bytes; the others have {whole:,}"
                offset = min(size, whole)
                self._tell(Kind.TIMER_FILE_LENGTH, path, offset=offset, text=text)
        for earlier, later in itertools.pairwise(sorted(files)):
            if later != earlier + whole:
                self._tell(Kind.TIMER_FILE_MISSING, folder / f"{earlier + whole:020d}", offset=0, size=whole)

    def _look_at_others(self) -> None:
        paths = self._paths
        settings = [paths.config / entry.name for entry in self._list(paths.config)]
        markers = (paths.checkpoint, paths.abort, paths.timer_wheel, paths.timer_check)
        ours = (paths.progress, paths.queues, paths.settings, *(paths.mark(name) for name in _MARKS))
        more = (paths.opened, paths.topics_journal, paths.retention_report, paths.unconsumed)
        # A start refuses to go on with something else in the place of these. Who wants no log links it to a device.
        log = [paths.log] if file_type(paths.log) in _NO_LOG else []
        opened_first = (paths.control, paths.errors, paths.next_queues, *log)
        for path in (paths.lock, paths.damage):
            # What else lies there is told by who needs it.
            if (entry := self._io.entry(path)) is not None and entry.kind is EntryKind.SYMLINK:
                self._tell(Kind.SYMLINK, path)
            elif path == paths.lock and entry is not None and entry.kind is not EntryKind.FILE:
                self._tell(Kind.LOCK_MISPLACED, path, text=entry.kind.value)
        for path in (*markers, *ours, *more, *opened_first, *(path for path in settings if path.suffix == ".json")):
            entry = self._io.entry(path)
            if entry is not None and entry.kind is EntryKind.SYMLINK:
                self._tell(Kind.SYMLINK, path)
            elif entry is not None and entry.kind is not EntryKind.FILE:
                self._tell(Kind.MISPLACED_FILE, path, text=entry.kind.value)
        # A group that starts replaces all else in the place of a socket.
        folders = {path: {EntryKind.FOLDER} for path in map(paths.socket, SOCKETS)}
        # A pipe takes locks, but openers write down their group there.
        locked = {path: {EntryKind.FOLDER, EntryKind.OTHER} for path in (paths.openers, paths.spark_lock)}
        for path, kinds in (folders | locked).items():
            if (entry := self._io.entry(path)) is not None and entry.kind in kinds:
                self._tell(Kind.MISPLACED_FILE, path, text=entry.kind.value)
        if (config := rocksdb_config(self._io, paths.config)) is not None:
            self._tell(Kind.NOT_CHECKED, config, text="topics and progress in RocksDB", as_note=True)
        marks = self._io.entry(paths.marks)
        if marks is not None and marks.kind in (EntryKind.FILE, EntryKind.OTHER):
            self._tell(Kind.MISPLACED_FILE, paths.marks, text="not a folder")
        for name in _UNKNOWN_PARTS:
            entry = self._io.entry(paths.root / name)
            if entry is None or (entry.kind is EntryKind.FOLDER and not self._io.names(paths.root / name)):
                continue
            self._tell(Kind.NOT_CHECKED, paths.root / name, as_note=True)
            if name in ("batchconsumequeue", EXTENSION_FOLDER):
                self._found.unchecked_topics.update(self._io.names(paths.root / name))


def _missing(starts: Iterable[int], whole: int) -> Iterator[tuple[int, int]]:
    """(begin, bytes) of what a row of files of `whole` bytes lacks between them: file by file, much of it as one."""
    for earlier, later in itertools.pairwise(sorted(starts)):
        alone = min(later, earlier + (1 + MISSING_ALONE_MAX) * whole)
        for start in range(earlier + whole, alone, whole):
            yield start, whole
        if alone < later:
            yield alone, later - alone
