"""Inventory of a store: names, types and lengths of its files, without opening them."""

from __future__ import annotations

import itertools
import stat
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mqproc.errors import StoreAccessError
from mqproc.io.file_limits import oversized, size_limit
from mqproc.io.store_io import FolderEntry, StoreIO
from mqproc.io.store_io import Kind as EntryKind
from mqproc.layout import index_file, timer_files
from mqproc.layout.consume_queue import EXTENSION_FOLDER
from mqproc.paths import (
    SOCKETS,
    StorePaths,
    file_type,
    index_name_time_ms,
    is_deleted_on_nfs,
    printable_path,
    segment_start,
)
from mqproc.store.commitlog.misnamed_segments import find_misnamed
from mqproc.store.consumequeue.files import (
    bars_queue,
    bars_topic,
    has_rocksdb_queues,
    is_queue_id,
    is_topic,
)
from mqproc.store.unsupported import find_unsupported
from mqproc.store.verify.findings import LISTED_MAX, Finding, FindingKind
from mqproc.topic_names import MULTI_DISPATCH_PREFIX
from mqproc.util.units import counted

Queue = tuple[str, int]
"""Topic and queue id."""

# Parts of RocketMQ stores that verify does not check.
_UNKNOWN_PARTS = ("batchconsumequeue", EXTENSION_FOLDER, "compaction")

_PASSED_OVER = "RocketMQ passes over it"
_MARKS = ("commitlog", "consumequeue", "index")
_NOT_FILES = frozenset({EntryKind.FOLDER, EntryKind.OTHER})
_INVALID_LOG_TYPES = frozenset({stat.S_IFDIR, stat.S_IFIFO, stat.S_IFSOCK})
# Number of missing files of a gap that are reported one by one: a stray file name may imply millions.
MISSING_ALONE_MAX = LISTED_MAX


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths of a store's files."""

    segment: int
    queue_file: int
    slots: int
    items: int

    @property
    def index_file(self) -> int:
        return index_file.file_size(self.slots, self.items)


@dataclass(slots=True)
class Inventory:
    """Usable files of a store with their lengths; `findings` covers the others.

    `segments` by log offset; `queues` by topic and queue id, each with its files by first byte; `index`: names of the
    index files of the right length, oldest first; `timer_log`: its files by first byte.
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
        """Length of the timer log's files: the most frequent valid one."""
        sizes = [size for size in self.timer_log.values() if size >= timer_files.LOG_FILE_SIZE_MIN]
        return max(sizes, key=lambda size: (sizes.count(size), size), default=timer_files.LOG_FILE_SIZE)

    @property
    def log_begin(self) -> int:
        """Start of the first segment; 0 without segments."""
        return min(self.segments, default=0)

    def segment_name(self, physical_offset: int) -> str:
        """File of a log position, relative to the store, whether or not it exists."""
        start = physical_offset - physical_offset % self.sizes.segment
        return f"commitlog/{start:020d}"

    def log_place(self, physical_offset: int) -> tuple[str, int]:
        """File of a log position, relative to the store, and its first byte in it."""
        return self.segment_name(physical_offset), physical_offset % self.sizes.segment

    def queue_name(self, queue: Queue, queue_offset: int, unit_size: int) -> tuple[str, int]:
        """File of a unit, relative to the store, and its first byte in it."""
        position = queue_offset * unit_size
        start = position - position % self.sizes.queue_file
        return f"consumequeue/{queue[0]}/{queue[1]}/{start:020d}", position - start


def take_inventory(
    io: StoreIO, paths: StorePaths, sizes: Sizes, *, was_killed: bool = False, unreadable: Collection[Path] = ()
) -> Inventory:
    """Take inventory of a store. `was_killed`: it is not running and was not closed properly.

    `unreadable` files of queues and index are treated as missing. Raises StoreAccessError if the store cannot be
    listed.
    """
    return _Inspection(io, paths, sizes, was_killed=was_killed, unreadable=unreadable).run()


class _Inspection:
    """One pass over the names of a store."""

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
        self._inspect_log()
        self._found.has_rocksdb_queues = has_rocksdb_queues(self._io, self._paths.consume_queue)
        if self._found.has_rocksdb_queues:
            topics: list[FolderEntry] = []
        else:
            topics = self._list(self._paths.consume_queue)
        for topic in topics:
            self._inspect_topic(self._paths.consume_queue / topic.name, topic)
        self._note_light_queues()
        self._inspect_index()
        self._inspect_timer()
        self._inspect_others()
        return self._found

    def _list(self, folder: Path) -> list[FolderEntry]:
        """Entries of a folder without symlinks, which become findings."""
        own = self._io.entry(folder)
        if own is not None and own.kind is EntryKind.SYMLINK:
            # A repair must not move it away: its target holds all the data.
            self._add(FindingKind.SYMLINK, folder)
        elif own is not None and own.kind is not EntryKind.FOLDER:
            self._add(FindingKind.MISPLACED_FILE, folder, text="not a folder")
        try:
            entries = self._io.entries(folder)
        except PermissionError as error:
            raise StoreAccessError(f"{folder}: {error.strerror}") from None
        entries = [entry for entry in entries if folder / entry.name != self._paths.guard]
        for entry in entries:
            if entry.kind is EntryKind.SYMLINK:
                self._add(FindingKind.SYMLINK, folder / entry.name)
        return [entry for entry in entries if entry.kind is not EntryKind.SYMLINK]

    def _add(
        self,
        kind: FindingKind,
        path: Path,
        *,
        offset: int | None = None,
        physical_offset: int | None = None,
        size: int = 0,
        text: str = "",
        as_note: bool = False,
    ) -> None:
        file = printable_path(path.relative_to(self._paths.root))
        if kind is FindingKind.STRAY_FILE and is_deleted_on_nfs(path.name):
            as_note, text = True, "deleted, and still open in a program: NFS removes it once that ends"
        self._found.findings.append(Finding(kind, file, offset, physical_offset, size=size, text=text, as_note=as_note))

    def _is_unfinished(self, path: Path, size: int, *, is_newest: bool) -> bool:
        """Report an empty newest file that a kill left during creation; return whether it is one."""
        is_begun = self._was_killed and is_newest and size == 0
        if is_begun:
            self._add(FindingKind.FILE_BEGUN, path, offset=0)
        return is_begun

    def _is_unreadable(self, path: Path) -> bool:
        """Report a file that the disk cannot read; return whether it is one."""
        is_unreadable = path in self._unreadable
        if is_unreadable:
            self._found.unreadable.add(path)
            self._add(FindingKind.FILE_UNREADABLE, path, text="the disk cannot read it")
        return is_unreadable

    def _sequence(
        self, folder: Path, whole: int, unit: str = "file", folder_text: str = ""
    ) -> Iterator[tuple[int, FolderEntry, Path]]:
        """(first byte, entry, path) of the files of a sequence; every other entry becomes a finding.

        A `unit` begins every `whole` bytes (1: anywhere). With `folder_text`, other folders are only a note.
        """
        for entry in self._list(folder):
            path, start = folder / entry.name, segment_start(entry.name)
            if start is None and entry.kind is EntryKind.FOLDER and folder_text:
                self._add(FindingKind.STRAY_FILE, path, text=folder_text, as_note=True)
            elif start is None:
                self._add(FindingKind.STRAY_FILE, path, size=entry.size)
            elif entry.kind is not EntryKind.FILE:
                self._add(FindingKind.MISPLACED_FILE, path, text=entry.kind.value)
            elif start % whole:
                self._add(FindingKind.MISPLACED_FILE, path, text=f"no {unit} of {whole:,} bytes begins there")
            else:
                yield start, entry, path

    def _wrong_lengths(self, folder: Path, files: dict[int, int], whole: int) -> Iterator[tuple[Path, int, str]]:
        """(path, length, text) of the files of a sequence that do not have `whole` bytes."""
        for start, size in sorted(files.items()):
            path = folder / f"{start:020d}"
            if size != whole and not self._is_unfinished(path, size, is_newest=start == max(files)):
                yield path, size, f"{size:,} bytes; the others have {whole:,}"

    # The log

    def _inspect_log(self) -> None:
        folder, whole = self._paths.commit_log, self._sizes.segment
        empty: list[tuple[int, Path]] = []
        for start, entry, path in self._sequence(folder, whole, "segment", "a folder, which RocketMQ passes over"):
            if entry.size == 0:
                empty.append((start, path))
            else:
                self._found.segments[start] = entry.size
                self._check_segment_length(path, start, entry.size)
        for start, path in empty:
            if not self._is_unfinished(path, 0, is_newest=start > max(self._found.segments, default=-1)):
                self._add(FindingKind.SEGMENT_EMPTY, path, offset=0, physical_offset=start, text="0 bytes")
        for start, size in _missing(self._found.segments, whole):
            path, text = folder / f"{start:020d}", "the segments before and after it exist"
            self._add(FindingKind.SEGMENT_MISSING, path, offset=0, physical_offset=start, size=size, text=text)

    def _check_segment_length(self, path: Path, start: int, size: int) -> None:
        whole = self._sizes.segment
        kind = FindingKind.SEGMENT_SHORT if size < whole else FindingKind.SEGMENT_LONG
        if size != whole:
            offset = min(size, whole)
            text = f"{size:,} bytes; a segment has {whole:,}"
            self._add(kind, path, offset=offset, physical_offset=start + offset, size=abs(size - whole), text=text)

    # Queues

    def _inspect_topic(self, folder: Path, topic: FolderEntry) -> None:
        if bars_topic(topic):
            self._add(FindingKind.MISPLACED_FILE, folder, text=f"{topic.kind.value}, where a topic's folder would be")
            return
        if not is_topic(topic):
            self._add(FindingKind.STRAY_FILE, folder, size=topic.size, text=_PASSED_OVER, as_note=True)
            return
        for entry in self._list(folder):
            name = entry.name
            if entry.kind is EntryKind.FOLDER and is_queue_id(name):
                self._inspect_queue((topic.name, int(name)), folder / name)
            elif bars_queue(entry):
                text = f"{entry.kind.value}, where a queue's folder would be"
                self._add(FindingKind.MISPLACED_FILE, folder / name, text=text)
            else:
                self._add(FindingKind.STRAY_FILE, folder / name, size=entry.size, text=_PASSED_OVER, as_note=True)

    def _inspect_queue(self, queue: Queue, folder: Path) -> None:
        whole = self._sizes.queue_file
        files = self._found.queues.setdefault(queue, {})
        for start, entry, path in self._sequence(folder, whole):
            if not self._is_unreadable(path):
                files[start] = entry.size
        for path, size, text in self._wrong_lengths(folder, files, whole):
            offset, more = min(size, whole), abs(size - whole)
            self._add(FindingKind.QUEUE_FILE_LENGTH, path, offset=offset, size=more, text=text)
        for start, size in _missing(files, whole):
            self._add(FindingKind.QUEUE_FILE_MISSING, folder / f"{start:020d}", offset=0, size=size)

    def _note_light_queues(self) -> None:
        """Report light queues, whose units point to records of other topics (multi-dispatch)."""
        light = sorted({topic for topic, _ in self._found.queues if topic.startswith(MULTI_DISPATCH_PREFIX)})
        if light:
            text = f"units of RocketMQ's light queues: {counted(len(light), 'such topic')}"
            self._add(FindingKind.NOT_CHECKED, self._paths.consume_queue / light[0], text=text, as_note=True)

    # The index and the rest

    def _inspect_index(self) -> None:
        folder, whole = self._paths.index, self._sizes.index_file
        entries = self._list(folder)
        newest = max((entry.name for entry in entries if index_name_time_ms(entry.name) is not None), default="")
        for entry in entries:
            path = folder / entry.name
            if index_name_time_ms(entry.name) is None:
                self._add(FindingKind.STRAY_FILE, path, size=entry.size, text=_PASSED_OVER, as_note=True)
            elif entry.kind is not EntryKind.FILE:
                self._add(FindingKind.MISPLACED_FILE, path, text=entry.kind.value)
            elif self._is_unfinished(path, entry.size, is_newest=entry.name == newest) or self._is_unreadable(path):
                continue
            elif entry.size != whole:
                room = f"{self._sizes.slots:,} slots and {self._sizes.items:,} items take {whole:,}"
                offset, more = min(entry.size, whole), abs(entry.size - whole)
                text = f"{entry.size:,} bytes; {room}"
                self._add(FindingKind.INDEX_FILE_LENGTH, path, offset=offset, size=more, text=text)
            else:
                self._found.index.append(entry.name)

    def _inspect_timer(self) -> None:
        folder, files = self._paths.timer_log, self._found.timer_log
        for start, entry, _path in self._sequence(folder, 1):
            files[start] = entry.size
        whole = self._found.timer_log_size
        for path, size, text in self._wrong_lengths(folder, files, whole):
            self._add(FindingKind.TIMER_FILE_LENGTH, path, offset=min(size, whole), text=text)
        for earlier, later in itertools.pairwise(sorted(files)):
            if later != earlier + whole:
                self._add(FindingKind.TIMER_FILE_MISSING, folder / f"{earlier + whole:020d}", offset=0, size=whole)

    def _inspect_others(self) -> None:
        paths = self._paths
        settings = [paths.config / entry.name for entry in self._list(paths.config)]
        markers = (paths.checkpoint, paths.abort, paths.timer_wheel, paths.timer_check)
        ours = (paths.progress, paths.queues, paths.settings, *(paths.mark(name) for name in _MARKS))
        more = (paths.opened, paths.topics_journal, paths.retention_report, paths.unconsumed)
        # A start rejects anything else in place of these. Users link the log to a device to discard it.
        log = [paths.log] if file_type(paths.log) in _INVALID_LOG_TYPES else []
        opened_first = (paths.control, paths.errors, paths.next_queues, *log)
        if not self._is_symlink(paths.lock):
            self._check_type(paths.lock, _NOT_FILES, FindingKind.LOCK_MISPLACED)
        # Other types are reported by its reader.
        self._is_symlink(paths.damage)
        for path in (*markers, *ours, *more, *opened_first, *(path for path in settings if path.suffix == ".json")):
            if not self._is_symlink(path):
                self._check_type(path, _NOT_FILES)
            if path not in (paths.progress, paths.queues, paths.timer_wheel, *opened_first):
                self._check_length(path)
        # A start replaces anything in place of a socket except a folder.
        for path in map(paths.socket, SOCKETS):
            self._check_type(path, {EntryKind.FOLDER})
        # A pipe can be locked, but users write their group into these files.
        for path in (paths.usage_lock, paths.spark_lock):
            self._check_type(path, _NOT_FILES)
        for path in (paths.marks, paths.spark_writes):
            self._check_type(path, {EntryKind.FILE, EntryKind.OTHER}, text="not a folder")
        self._note_unchecked_parts()

    def _is_symlink(self, path: Path) -> bool:
        """Report a symlink; return whether it is one."""
        entry = self._io.entry(path)
        is_symlink = entry is not None and entry.kind is EntryKind.SYMLINK
        if is_symlink:
            self._add(FindingKind.SYMLINK, path)
        return is_symlink

    def _check_type(
        self, path: Path, wrong: Collection[EntryKind], kind: FindingKind = FindingKind.MISPLACED_FILE, text: str = ""
    ) -> None:
        """Report an entry of one of these types."""
        if (entry := self._io.entry(path)) is not None and entry.kind in wrong:
            self._add(kind, path, text=text or entry.kind.value)

    def _check_length(self, path: Path) -> None:
        """Report a small file that is too long to be read."""
        entry, limit = self._io.entry(path), size_limit(path)
        if entry is not None and entry.kind is EntryKind.FILE and entry.size > limit:
            self._add(FindingKind.MISPLACED_FILE, path, text=oversized(entry.size, limit))

    def _note_unchecked_parts(self) -> None:
        for each in find_unsupported(self._io, self._paths):
            text = f"{each.feature.what} ({each.feature.option}), which mqproc does not read"
            self._add(FindingKind.NOT_CHECKED, each.path, text=text, as_note=True)
        for name in _UNKNOWN_PARTS:
            path = self._paths.root / name
            entry = self._io.entry(path)
            if entry is None or (entry.kind is EntryKind.FOLDER and not self._io.names(path)):
                continue
            self._add(FindingKind.NOT_CHECKED, path, as_note=True)
            if name in ("batchconsumequeue", EXTENSION_FOLDER):
                self._found.unchecked_topics.update(self._io.names(path))


def _missing(starts: Iterable[int], whole: int) -> Iterator[tuple[int, int]]:
    """(start, bytes) of gaps in a sequence of files of `whole` bytes; a long gap's rest is one."""
    for earlier, later in itertools.pairwise(sorted(starts)):
        alone = min(later, earlier + (1 + MISSING_ALONE_MAX) * whole)
        for start in range(earlier + whole, alone, whole):
            yield start, whole
        if alone < later:
            yield alone, later - alone


# Misnamed segments


_CONSEQUENCES = frozenset({FindingKind.STRAY_FILE, FindingKind.MISPLACED_FILE, FindingKind.RECORD_OFFSET})


def misnamed_segments(io: StoreIO, inventory: Inventory) -> list[Finding]:
    """Misnamed segments. An extra copy under a name of its own is only a stray file."""
    folder = inventory.paths.commit_log
    findings = []
    for each in find_misnamed(io, folder, inventory.sizes.segment):
        if each.taken and segment_start(each.name) is None:
            continue
        file = printable_path((folder / each.name).relative_to(inventory.root))
        text = f"its records belong to commitlog/{each.right_name}" + (", which exists" if each.taken else "")
        findings.append(Finding(FindingKind.SEGMENT_MISNAMED, file, 0, each.start, text=text))
    return findings


def without_consequences(misnamed: Iterable[Finding], findings: Iterable[Finding]) -> Iterator[Finding]:
    """Remove findings that only follow from a segment's wrong name."""
    files = {finding.file for finding in misnamed}
    return (finding for finding in findings if finding.file not in files or finding.kind not in _CONSEQUENCES)
