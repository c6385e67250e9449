"""The simulated disk: pages and names that are not durable yet; the StoreIO of processes.

    current state     the real files, as left by a killed process
    crash image       a copy as a disk may be after a power loss: each page has one of its versions since the last
                      successful sync, each name and size is the old or the new one

A sync makes a file's pages and size durable; the sync of a folder makes the names in it durable. `ORDERED` file
systems lose changes of names and sizes from the end backwards, `FREE` ones lose any of them.

Inode numbers are simulated: a real file system reuses the number of a removed file.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import functools
import hashlib
import mmap
import os
import random
import sys
import weakref
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final, TextIO

from greenlet import getcurrent

from mqproc.io.store_io import FailedSyncError, StoreIO
from mqproc.kernels import index, index_rebuild
from mqproc.kernels.jit import compile as jit
from mqproc.layout.record import BLANK_SIZE, BODY, IPV6_EXTRA
from mqproc.layout.record_codec import fixed_of
from mqproc.types import StoredMessage
from tests.support.records import check_record, decode_record
from tests.support.store_checks import PAGE, entries_below, written_ranges

# Records of the log, decoded in plain Python.


# More than the log of a story has.
RECORDS_KEPT = 4_096
# Most bytes before a body: both hosts have IPv6 addresses.
HEAD_MAX = BODY + 2 * IPV6_EXTRA


class Broken(AssertionError):
    """A violated invariant."""


def expect(true: bool, what: str) -> None:
    """Raise Broken unless `true`."""
    if not true:
        raise Broken(what)


@contextlib.contextmanager
def must_end_well(who: str) -> Iterator[None]:
    """Report any error that ends a role or a recovery as a violated invariant."""
    try:
        yield
    except (Broken, ImportError):
        raise
    except Exception as error:
        raise Broken(f"{who} ended with {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class Placed:
    """A record and its place in the log."""

    offset: int
    size: int
    message: StoredMessage


def walk_log(commit_log: Path) -> list[Placed]:
    """Records from the first segment on, up to the first invalid one."""
    found: list[Placed] = []
    segments = sorted(path for path in commit_log.iterdir() if path.name.isdigit())
    expected = int(segments[0].name) if segments else 0
    for path in segments:
        start = int(path.name)
        if start != expected:
            break
        data = path.read_bytes()
        expected = start + len(data)
        at = 0
        while placed := _record(start + at, _bytes_of_record(data, at)):
            if placed.message.physical_offset != placed.offset:
                return found
            found.append(placed)
            at += placed.size
        if len(data) - at >= BLANK_SIZE and not check_record(data, at).success:
            return found
    return found


def _bytes_of_record(data: bytes, at: int) -> bytes:
    """The bytes of a record by its size field; at the end of a segment, all that are left."""
    head = data[at : at + HEAD_MAX]
    return data[at : at + max(0, fixed_of(head)[0])] if len(head) == HEAD_MAX else head


@functools.lru_cache(RECORDS_KEPT)
def _record(offset: int, data: bytes) -> Placed | None:
    """Decode these bytes as a record at `offset`; None if invalid.

    Cached: most records of an image are also in the next one.
    """
    check = check_record(data)
    if not check.success or not check.size:
        return None
    return Placed(offset, check.size, decode_record(data, check_crc=False))


# The journal of a story. Two identical runs of a seed have the same digest.


class Journal:
    """Events of a story. With a `file`, also written there: `diff` shows where two runs diverge."""

    enabled = True
    """Whether events are recorded."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._file = file

    def note(self, *parts: object) -> None:
        """Record an event."""
        line = " ".join(map(str, parts)) + "\n"
        self._hash.update(line.encode())
        if self._file is not None:
            self._file.write(line)

    @property
    def digest(self) -> str:
        """Digest of all events so far."""
        return self._hash.hexdigest()


class SilentJournal(Journal):
    """Discards all events, where no digest is needed."""

    enabled = False

    def note(self, *parts: object) -> None:
        """Discard the event."""


SECTOR = 512
_ZERO_PAGE = bytes(PAGE)
# A socket with a path that is too long leaves a file, which depends on the store's folder.
SOCKET_SUFFIX = ".sock"
# Files that only grow by appends. In other files a sector had other content before: it is written whole.
ROWS = ("commitlog/", "consumequeue/", "index/")
# Contains durations of real work, and nothing that a start reads.
CONTROL = "mqproc/control"


class Metadata(enum.Enum):
    """The order in which a file system loses changes of names and sizes."""

    ORDERED = "ordered"
    FREE = "free"


class Grain(enum.Enum):
    """The unit in which writes reach the disk."""

    PAGE = "page"
    SECTOR = "sector"


class Pick(enum.Enum):
    """How an image chooses among the versions of a page."""

    NONE = "nothing that was not synced"
    ALL = "everything"
    RANDOM = "any version of each"
    ONE_MISSING = "everything but one page"
    ONE_PRESENT = "one page only"
    PREFIX = "all pages up to one, in the order of files and pages"
    SUFFIX = "all from one on"


@dataclass(frozen=True, slots=True)
class Loss:
    """How to choose one image."""

    metadata: Metadata
    grain: Grain
    pick: Pick
    garbage: bool = False
    """The sector being written at the power loss has neither its old nor its new content."""


@dataclass(slots=True)
class _Node:
    """A file. `pages` are the durable pages, `pending` the later versions, oldest first."""

    pages: dict[int, bytes] = field(default_factory=dict)
    size: int = 0
    pending: dict[int, list[bytes]] = field(default_factory=dict)
    failed_syncs: int = 0


@dataclass(slots=True)
class _Change:
    """A change of a name or size that is not durable yet."""

    kind: str  # "name": `path` gets `node`, or goes when that is 0 · "rename" · "folder" · "link" · "size"
    path: str
    node: int = 0
    source: str = ""
    size: int = 0
    link: str = ""


class Disk:
    """All files below `root` and their durable state. Paths are relative to `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._nodes: dict[int, _Node] = {}
        self._numbers: dict[int, int] = {}
        self._names: dict[str, int] = {}
        self._folders: set[str] = set()
        self._links: dict[str, str] = {}
        self._changes: list[_Change] = []
        self._mapped: dict[int, int] = {}
        self._seen: dict[int, bytes] = {}
        """The last observed pages of mapped files."""

    @classmethod
    def of(cls, root: Path) -> Disk:
        """A disk on which everything below `root` is durable."""
        disk = cls(root)
        for name, entry in entries_below(root):
            if entry.is_symlink():
                disk._links[name] = os.readlink(entry.path)
            elif entry.is_dir():
                disk._folders.add(name)
            elif entry.is_file() and not name.endswith(SOCKET_SUFFIX):
                disk._names[name] = disk._take(entry.path)
        return disk

    def _take(self, path: str) -> int:
        """Add a durable file; its number."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            of = os.fstat(fd)
            number = self._number(of)
            node = self._node(number)
            node.size = of.st_size
            for start, stop in written_ranges(fd, node.size):
                node.pages.update(_pages(fd, start, stop - start))
        finally:
            os.close(fd)
        return number

    def _add(self, inode: int) -> int:
        """Number a new file, which may reuse the inode of a removed one."""
        number = self._numbers[inode] = len(self._nodes) + 1
        self._nodes[number] = _Node()
        return number

    def _number(self, of: os.stat_result) -> int:
        found = self._numbers.get(of.st_ino)
        return self._add(of.st_ino) if found is None else found

    def _number_of(self, fd: int) -> int:
        return self._number(os.fstat(fd))

    def _node(self, number: int) -> _Node:
        return self._nodes.setdefault(number, _Node())

    # What happens

    def stored(self, fd: int, offset: int, size: int) -> None:
        """Bytes of a file changed: record the current pages as a version, and the size as a change."""
        node = self._node(self._number_of(fd))
        for page, data in _pages(fd, offset, size, holes=True):
            versions = node.pending.get(page)
            last = versions[-1] if versions else node.pages.get(page, _ZERO_PAGE)
            if data != last:
                node.pending.setdefault(page, []).append(data)

    def sized(self, fd: int) -> None:
        """The length of a file may have changed."""
        number, size = self._number_of(fd), os.fstat(fd).st_size
        before = next(
            (change.size for change in reversed(self._changes) if change.kind == "size" and change.node == number),
            self._node(number).size,
        )
        if size != before:
            self._changes.append(_Change("size", "", number, size=size))

    def made(self, path: Path, fd: int) -> None:
        """A file was created."""
        self._changes.append(_Change("name", self._relative(path), self._add(os.fstat(fd).st_ino)))

    def named(self, path: Path) -> None:
        """A file has one more name."""
        self._changes.append(_Change("name", self._relative(path), self._number(path.stat())))

    def removed(self, path: Path) -> None:
        """A name was removed."""
        self._changes.append(_Change("name", self._relative(path)))

    def renamed(self, source: Path, target: Path) -> None:
        """A name was replaced atomically. The new entry needs no earlier one to be durable."""
        number = 0 if target.is_symlink() or target.is_dir() else self._number(target.stat())
        self._changes.append(_Change("rename", self._relative(target), number, self._relative(source)))

    def made_folder(self, path: Path) -> None:
        """A folder was created."""
        self._changes.append(_Change("folder", self._relative(path)))

    def removed_folder(self, path: Path) -> None:
        """A folder was removed with its contents."""
        self._changes.append(_Change("no folder", self._relative(path)))

    def linked(self, path: Path, target: str) -> None:
        """A symlink was created."""
        self._changes.append(_Change("link", self._relative(path), link=target))

    def mapped(self, fd: int) -> None:
        """A file is mapped for writing from now on: its pages are compared when needed."""
        number = self._number_of(fd)
        if number not in self._mapped:
            self._mapped[number] = os.dup(fd)

    @property
    def has_maps(self) -> bool:
        """Whether files are mapped for writing."""
        return bool(self._mapped)

    def observe(self) -> None:
        """Record stores through maps as versions."""
        for number in self._mapped:
            self._observe(number)

    def _observe(self, number: int) -> None:
        fd = self._mapped[number]
        size = os.fstat(fd).st_size
        now = os.pread(fd, size, 0)
        if now != self._seen.get(number):
            self._seen[number] = now
            self.stored(fd, 0, size)

    def release_maps(self) -> None:
        """Forget all maps."""
        for fd in self._mapped.values():
            os.close(fd)
        self._mapped.clear()
        self._seen.clear()

    def synced(self, fd: int) -> None:
        """The data and length of a file are durable."""
        number = self._number_of(fd)
        node = self._node(number)
        expect(not node.failed_syncs, f"file {number} is synced again after a failed sync")
        if number in self._mapped:
            self._observe(number)
        for page, versions in node.pending.items():
            node.pages[page] = versions[-1]
        node.pending.clear()
        node.size = os.fstat(fd).st_size
        self._changes = [change for change in self._changes if not (change.kind == "size" and change.node == number)]

    def failed_syncs(self, fd: int) -> int:
        """Failed syncs of a file: whichever process had it open gets the error from its next sync."""
        return self._node(self._number_of(fd)).failed_syncs

    def sync_failed(self, fd: int) -> None:
        """A sync failed: the file's pages count as clean, but their contents never reached the disk."""
        self.observe()
        number = self._number_of(fd)
        node = self._node(number)
        node.pending.clear()
        node.failed_syncs += 1
        self._seen.pop(number, None)

    def sync_of_all_failed(self) -> None:
        """A sync of all files failed."""
        self.observe()
        for node in self._nodes.values():
            node.pending.clear()
            node.failed_syncs += 1
        self._seen.clear()

    def synced_folder(self, folder: Path) -> None:
        """The names in a folder are durable; a rename is durable with its new name."""
        place = self._relative(folder)
        kept: list[_Change] = []
        for change in self._changes:
            if change.kind == "size" or place != _parent(change.path):
                kept.append(change)
                continue
            self._apply(change)
            if change.kind == "rename":
                kept = [other for other in kept if other.path != change.source]
        self._changes = kept

    def synced_all(self) -> None:
        """Everything is durable."""
        self.observe()
        for change in self._changes:
            self._apply(change)
        self._changes.clear()
        for node in self._nodes.values():
            for page, versions in node.pending.items():
                node.pages[page] = versions[-1]
            node.pending.clear()

    @property
    def open_choices(self) -> int:
        """Number of pages and names that could be lost now."""
        return len(self._changes) + sum(len(node.pending) for node in self._nodes.values())

    def unsynced_names(self, folder: str) -> list[str]:
        """New names below a folder that a power loss may remove."""
        return [
            change.path
            for change in self._changes
            if (change.node or change.kind == "rename") and change.path.startswith(folder + "/")
        ]

    def unsynced(self, folder: str) -> Iterator[tuple[str, bytes, bytes]]:
        """(path, durable bytes, current bytes) of each file below a folder with unsynced pages."""
        self.observe()
        for name, entry in entries_below(self.root / folder):
            node = self._nodes[self._number(entry.stat())] if entry.is_file() else _Node()
            if node.pending:
                pages = range(max(node.pending) + 1)
                durable = {page: node.pages.get(page, _ZERO_PAGE) for page in pages}
                now = durable | {page: versions[-1] for page, versions in node.pending.items()}
                yield f"{folder}/{name}", b"".join(durable.values()), b"".join(now[page] for page in pages)

    # Images

    def image(self, target: Path, loss: Loss, rng: random.Random, journal: Journal) -> None:
        """Create at `target`, which must not exist, an image of the disk after a power loss now."""
        shown = Disk(target)
        shown._names, shown._folders = dict(self._names), set(self._folders)
        shown._links = dict(self._links)
        shown._nodes = {number: _Node(size=node.size) for number, node in self._nodes.items()}
        for change in self._arrived(loss, rng):
            shown._apply(change)
        target.mkdir(parents=True)
        folders = shown._folders | {os.path.dirname(name) for name in (*shown._names, *shown._links)}
        for folder in sorted(folders):
            os.makedirs(target / folder, exist_ok=True)
        in_rows = {number for name, number in shown._names.items() if name.startswith(ROWS)}
        chooser = _Chooser(self._nodes, loss, rng, in_rows)
        for name, number in sorted(shown._names.items()):
            size, pages = shown._node(number).size, chooser.pages(number)
            if journal.enabled and name != CONTROL:
                journal.note("image", name, size, _fingerprint(size, pages))
            _write(f"{target}/{name}", size, pages)
        for name, link in shown._links.items():
            os.symlink(link, target / name)

    def _arrived(self, loss: Loss, rng: random.Random) -> list[_Change]:
        if loss.pick is Pick.NONE:
            return []
        if loss.pick is not Pick.RANDOM:
            return self._changes
        if loss.metadata is Metadata.ORDERED:
            return self._changes[: rng.randint(0, len(self._changes))]
        return [change for change in self._changes if rng.random() < 0.5]

    def _apply(self, change: _Change) -> None:
        if change.kind == "size":
            self._node(change.node).size = change.size
        elif change.kind == "folder":
            self._folders.add(change.path)
        elif change.kind == "no folder":
            self._folders = {folder for folder in self._folders if not _within(folder, change.path)}
            self._names = {name: node for name, node in self._names.items() if not _within(name, change.path)}
        elif change.kind == "link":
            self._links[change.path] = change.link
        elif change.kind == "rename":
            self._rename(change.source, change.path, change.node)
        elif change.node:
            self._names[change.path] = change.node
        else:
            self._names.pop(change.path, None)
            self._links.pop(change.path, None)

    def _rename(self, source: str, target: str, node: int) -> None:
        if node:
            self._names.pop(source, None)
            self._names[target] = node
            return
        for names in (self._names, self._links):
            for name in [name for name in names if _within(name, source)]:
                names[target + name[len(source) :]] = names.pop(name)  # type: ignore[assignment]
        for folder in [folder for folder in self._folders if _within(folder, source)]:
            self._folders.discard(folder)
            self._folders.add(target + folder[len(source) :])

    def _relative(self, path: Path) -> str:
        return "." if path == self.root else str(path).removeprefix(f"{self.root}/")


class _Chooser:
    """Chooses a version of each page for one image."""

    def __init__(self, nodes: dict[int, _Node], loss: Loss, rng: random.Random, in_rows: set[int]) -> None:
        self._nodes = nodes
        self._loss = loss
        self._rng = rng
        open_pages = [(number, page) for number, node in sorted(nodes.items()) for page in sorted(node.pending)]
        # The version that is missing or present, the last of a prefix, or the first of a suffix.
        self._one = rng.choice(open_pages) if open_pages else (0, 0)
        self._garbage: tuple[int, int, range] | None = None
        if loss.garbage:
            places = [place for place in open_pages if place[0] in in_rows]
            unsynced = [(*place, bytes_) for place in places for bytes_ in self._never_synced(*place)]
            self._garbage = rng.choice(unsynced) if unsynced else None

    def pages(self, number: int) -> dict[int, bytes]:
        """The pages of a file in the image."""
        node = self._nodes.get(number, _Node())
        chosen = dict(node.pages)
        for page, versions in sorted(node.pending.items()):
            chosen[page] = self._choose(number, page, [node.pages.get(page, _ZERO_PAGE), *versions])
        if self._garbage is not None and self._garbage[0] == number:
            _, page, bytes_ = self._garbage
            data = chosen[page]
            chosen[page] = data[: bytes_.start] + self._rng.randbytes(len(bytes_)) + data[bytes_.stop :]
        return chosen

    def _never_synced(self, number: int, page: int) -> Iterator[range]:
        """For each sector of a page: the range from the first byte stored after its durable part."""
        node = self._nodes[number]
        durable, now = node.pages.get(page, _ZERO_PAGE), node.pending[page][-1]
        for start in range(0, PAGE, SECTOR):
            sector = durable[start : start + SECTOR]
            rest = now[start + len(sector.rstrip(b"\0")) : start + SECTOR]
            if stored := rest.lstrip(b"\0"):
                yield range(start + SECTOR - len(stored), start + SECTOR)

    def _choose(self, number: int, page: int, versions: list[bytes]) -> bytes:
        if self._loss.pick is not Pick.RANDOM:
            return versions[-1] if self._is_present((number, page)) else versions[0]
        if self._loss.grain is Grain.PAGE:
            return self._rng.choice(versions)
        return b"".join(self._rng.choice(versions)[at : at + SECTOR] for at in range(0, PAGE, SECTOR))

    def _is_present(self, place: tuple[int, int]) -> bool:
        match self._loss.pick:
            case Pick.ONE_MISSING:
                return place != self._one
            case Pick.ONE_PRESENT:
                return place == self._one
            case Pick.PREFIX:
                return place <= self._one
            case Pick.SUFFIX:
                return place >= self._one
        return self._loss.pick is Pick.ALL


def _pages(fd: int, offset: int, size: int, *, holes: bool = False) -> Iterator[tuple[int, bytes]]:
    """Pages of a range, zero-padded; pages of zeros only with `holes`."""
    first, stop = offset // PAGE, -(-(offset + size) // PAGE)
    read = os.pread(fd, (stop - first) * PAGE, first * PAGE).ljust((stop - first) * PAGE, b"\0")
    for page in range(first, stop):
        data = read[(page - first) * PAGE : (page - first + 1) * PAGE]
        if holes or data != _ZERO_PAGE:
            yield page, data


def _fingerprint(size: int, pages: dict[int, bytes]) -> int:
    value = 0
    for page, data in sorted(pages.items()):
        if page * PAGE < size and data != _ZERO_PAGE:
            value = zlib.crc32(data, zlib.crc32(page.to_bytes(8, "big"), value))
    return value


def _write(path: str, size: int, pages: dict[int, bytes]) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.ftruncate(fd, size)
        for page, data in pages.items():
            room = size - page * PAGE
            if room > 0 and data != _ZERO_PAGE:
                os.pwrite(fd, data[:room], page * PAGE)
    finally:
        os.close(fd)


def _parent(path: str) -> str:
    return os.path.dirname(path) or "."


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")


# A StoreIO that reports to a `Disk`, yields before each call, and fails or dies on request.
#
# The story also makes the decisions of a file system (which zeros are holes, how full it is): a seed gives the same
# story on every file system.


class Killed(BaseException):
    """Ends the process."""


# Shared control words: derived, dropped by every start, and too frequently changed to keep versions of.
SHARED_ONLY = ("mqproc/control", "mqproc/control.tmp", "mqproc/queues", "mqproc/queues.next", "mqproc/queues.next.tmp")


DISK_BYTES = 100 << 20
HOLE_RUN_PAGES = 2


@dataclass(slots=True)
class Fault:
    """The `nth` call (from 1) of kind `call`, or of any kind if empty, fails."""

    call: str
    nth: int
    errno: int
    sticky: bool = False
    """All later calls of its kind by the same process fail too."""
    short: bool = False
    """Half of a `pwrite` is written."""
    errno_asked: bool = False
    """The error number was read: another error might have changed the run."""
    met_again: bool = False
    """The process that met the failure made another call of its kind, or was checked for being stuck."""


class _Failure(OSError):
    """A call that failed on request; records whether its error number is read."""

    fault: Fault

    @property
    def errno(self) -> int:  # type: ignore[override]
        self.fault.errno_asked = True
        found = super().errno
        assert found is not None
        return found


@dataclass(frozen=True, slots=True)
class Holes:
    """Which pages of zeros are reported as holes: some of 256 runs of pages, chosen by `salt`."""

    salt: int = 0
    of_256: int = 256

    def is_hole(self, page: int) -> bool:
        run = (self.salt + page // HOLE_RUN_PAGES) & 0xFFFFFFFF
        return zlib.crc32(run.to_bytes(4, "big")) & 0xFF < self.of_256


@dataclass(slots=True, weakref_slot=True, eq=False)
class Machine:
    """State shared by all processes of a machine: its disk, the calls so far, planned faults."""

    disk: Disk
    journal: Journal = field(default_factory=SilentJournal)
    holes: Holes = field(default_factory=lambda: Holes())
    used_bytes: int = 3 * DISK_BYTES // 10
    """Of DISK_BYTES."""
    calls: int = 0
    calls_max: int = 0
    """Most calls allowed; 0 = unlimited."""
    kinds: dict[str, int] = field(default_factory=dict)
    fault: Fault | None = None
    history: list[str] | None = None
    """Collects the kinds of all calls."""
    failed: bool = False
    """A call has failed on request."""
    kill_at: int = 0
    """The whole group dies before this call, from 1; 0 = never."""
    deadly_point: str = ""
    """The next process at this crash point is killed."""
    lines_until_kill: int = 0
    """The role is killed after this many more lines of interpreted kernels; 0 = never."""
    over: bool = False
    """The machine lost power, or all of its processes were killed."""
    keeps_versions: bool = True
    """Calls are reported to the disk. Not needed without power loss and failed syncs."""
    names_moved: int = 0
    """Number of renames and removals so far."""
    between: Callable[[], None] = lambda: None
    """Called before each call: other processes may run in it."""

    def kills_at(self, point: str) -> bool:
        """Whether a process is to be killed at a crash point: once."""
        if point != self.deadly_point:
            return False
        self.deadly_point = ""
        return True

    def fails(self, call: str) -> int:
        """The errno with which this call is to fail; 0 = none."""
        fault = self.fault
        if fault is None or (fault.call and fault.call != call):
            return 0
        count = self.kinds.get(call, 0) if fault.call else self.calls
        return fault.errno if count == fault.nth else 0


class RecordingIO(StoreIO):
    """The storage calls of one process. `dead`: it was killed, and its calls have no effect."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine
        self._disk = machine.disk
        self._here = f"{os.getcwd()}/"
        self._open_fds: dict[int, int] = {}
        """Failed syncs of the file that happened before its opening, by descriptor."""
        self._tracked_fds: set[int] = set()
        self._paths: dict[int, tuple[str, int]] = {}
        """Paths of open files, each with `names_moved` when it was looked up."""
        self._stuck_with: dict[str, int] = {}
        """Kinds of calls that fail from now on, with their errno."""
        self._met = ""
        """Kind of the call that has failed on request."""
        self.dead = False

    def holes_allocate_on_read(self, fd: int) -> bool:
        """True, as on a disk: the story must not depend on the real file system."""
        return False

    # One call

    def _begin(self, call: str, path: Path | str, *details: object) -> None:
        self._let_others_run()
        self._machine.journal.note(call, path, *details)
        self._count(call, path)

    def _let_others_run(self) -> None:
        self._check_alive()
        self._machine.between()
        self._check_alive()

    def _count(self, call: str, path: Path | str | int) -> None:
        """Count a call, which may fail or be the last. `path` may be a descriptor."""
        machine = self._machine
        self._check_alive()
        machine.calls += 1
        machine.kinds[call] = machine.kinds.get(call, 0) + 1
        if machine.history is not None:
            machine.history.append(call)
        if 0 < machine.calls_max < machine.calls:
            raise Broken(f"more than {machine.calls_max:,} storage calls")
        if machine.calls == machine.kill_at:
            machine.over = True
            raise Killed
        fault = machine.fault
        if fault is None:
            return
        fault.met_again = fault.met_again or call == self._met
        if number := self._stuck_with.get(call) or machine.fails(call):
            machine.failed = True
            self._met = call
            if fault.sticky:
                self._stuck_with[call] = number
            where = self.path_of(path) if isinstance(path, int) else str(path)
            failure = _Failure(number, os.strerror(number), where)
            failure.fault = fault
            raise failure

    def _check_alive(self) -> None:
        if self.dead or self._machine.over:
            raise Killed

    def _tracked(self, path: Path | str) -> bool:
        return self._machine.keeps_versions and not str(path).endswith(SHARED_ONLY)

    def crash_point(self, name: str) -> None:
        self._let_others_run()
        self._machine.journal.note("point", name)
        if self._machine.kills_at(name):
            self.dead = True
            raise Killed

    def crash_amid(self, name: str, fd: int, data: Any, offset: int) -> None:
        """Kill the process after half of a write; without a kill, the write is a normal call."""
        self._check_alive()
        if self._machine.kills_at(name):
            half = memoryview(data).cast("B")[: memoryview(data).nbytes // 2 + 1]
            self._machine.journal.note("point", name)
            os.pwrite(fd, half, offset)
            self._changed(fd, offset, len(half))
            self.dead = True
            raise Killed

    def path_of(self, fd: int) -> str:
        path, moved = self._paths.get(fd, ("", -1))
        if moved != self._machine.names_moved:
            path = super().path_of(fd).removeprefix(self._here)
            self._paths[fd] = path, self._machine.names_moved
        return path

    # Decided by the file system

    def disk_usage(self, folder: Path) -> tuple[int, int]:
        used = self._machine.used_bytes
        return used, DISK_BYTES - used

    def allocated_of(self, path: Path) -> int:
        return self.size_of(path)

    def is_unreachable(self, fd: int) -> bool:
        """False: no leases here."""
        return False

    def next_data(self, fd: int, offset: int) -> int | None:
        size = self.size(fd)
        for page in range(offset // PAGE, -(-size // PAGE) if offset < size else 0):
            if not self._is_hole(fd, page):
                return max(offset, page * PAGE)
        return None

    def next_hole(self, fd: int, offset: int) -> int:
        size = self.size(fd)
        if offset >= size:
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO), self.path_of(fd))
        for page in range(offset // PAGE, -(-size // PAGE)):
            if self._is_hole(fd, page):
                return max(offset, page * PAGE)
        return size

    def _is_hole(self, fd: int, page: int) -> bool:
        if not self._machine.holes.is_hole(page):
            return False
        data = os.pread(fd, PAGE, page * PAGE)
        return data.count(0) == len(data)

    # Names

    def _make_one_folder(self, folder: Path, mode: int) -> None:
        self._begin("mkdir", folder)
        super()._make_one_folder(folder, mode)
        self._disk.made_folder(folder)

    def _rename(self, source: Path, target: Path) -> None:
        self._begin("rename", source)
        super()._rename(source, target)
        self._machine.names_moved += 1
        if self._tracked(target):
            self._disk.renamed(source, target)

    def unlink(self, path: Path) -> None:
        self._begin("unlink", path)
        if not path.exists() and not path.is_symlink():
            return
        super().unlink(path)
        self._machine.names_moved += 1
        if self._tracked(path):
            self._disk.removed(path)

    def keep_link(self, path: Path, target: Path) -> None:
        self._begin("link", path)
        super().keep_link(path, target)
        self._disk.named(target)

    def make_link(self, path: Path, target: str) -> None:
        self._begin("symlink", path)
        super().make_link(path, target)
        self._disk.linked(path, target)

    def remove_folder(self, folder: Path) -> None:
        self._begin("rmtree", folder)
        if folder.exists():
            super().remove_folder(folder)
            self._machine.names_moved += 1
            self._disk.removed_folder(folder)

    # Files

    def open(self, path: Path, *, write: bool = False, create: bool = False, mode: int = 0o644) -> int:
        self._begin("create" if create else "open", path)
        new = create and not path.exists()
        fd = super().open(path, write=write, create=create, mode=mode)
        self._open_fds[fd] = 0
        self._paths[fd] = str(path).removeprefix(self._here), self._machine.names_moved
        if self._tracked(path):
            self._tracked_fds.add(fd)
            if new:
                self._disk.made(path, fd)
            self._open_fds[fd] = self._disk.failed_syncs(fd)
        return fd

    def close(self, fd: int) -> None:
        super().close(fd)
        self._open_fds.pop(fd, None)
        self._paths.pop(fd, None)
        self._tracked_fds.discard(fd)

    @property
    def stuck(self) -> bool:
        """Whether its calls keep failing."""
        if self._met and self._machine.fault is not None:
            self._machine.fault.met_again = True
        return bool(self._stuck_with)

    @property
    def open_files(self) -> list[str]:
        """Paths of open files."""
        return [self.path_of(fd) for fd in self._open_fds]

    def close_all(self) -> None:
        """Close all descriptors, as at the end of a process."""
        for fd in list(self._open_fds):
            self.close(fd)

    # Reads: invisible to others, but each may fail

    def read_file(self, path: Path) -> bytes:
        self._count("read", path)
        return super().read_file(path)

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        self._count("read", fd)
        return super().pread(fd, size, offset)

    def pread_into(self, fd: int, buffer: Any, offset: int) -> int:
        self._count("read", fd)
        return super().pread_into(fd, buffer, offset)

    # Changes of files

    def pwrite(self, fd: int, data: Any, offset: int) -> None:
        try:
            digest = zlib.crc32(data) if self._machine.journal.enabled else 0
            self._begin("pwrite", self.path_of(fd), offset, memoryview(data).nbytes, digest)
        except OSError:
            fault = self._machine.fault
            if fault is not None and fault.short:
                half = memoryview(data).cast("B")[: memoryview(data).nbytes // 2]
                os.pwrite(fd, half, offset)
                self._changed(fd, offset, len(half))
            raise
        super().pwrite(fd, data, offset)
        self._changed(fd, offset, memoryview(data).nbytes)

    def zero(self, fd: int, offset: int, size: int) -> None:
        self._begin("zero", self.path_of(fd), offset, size)
        size = min(size, self.size(fd) - offset)
        if size > 0:
            os.pwrite(fd, bytes(size), offset)
            self._changed(fd, offset, size)

    def allocate(self, fd: int, offset: int, size: int) -> None:
        self._begin("allocate", self.path_of(fd), offset, size)
        if os.fstat(fd).st_size < offset + size:
            os.ftruncate(fd, offset + size)
            self._changed(fd, 0, 0)

    def set_size(self, fd: int, size: int) -> None:
        self._begin("set_size", self.path_of(fd), size)
        if os.fstat(fd).st_size != size:
            os.ftruncate(fd, size)
            self._changed(fd, 0, 0)

    def _changed(self, fd: int, offset: int, size: int) -> None:
        if fd in self._tracked_fds:
            self._disk.sized(fd)
            self._disk.stored(fd, offset, size)

    # Syncs

    def sync(self, fd: int) -> None:
        tracked = fd in self._tracked_fds
        try:
            self._begin("sync", self.path_of(fd))
        except OSError as error:
            if tracked:
                self._disk.sync_failed(fd)
                self._open_fds[fd] = self._disk.failed_syncs(fd)
            raise _failed(error, self.path_of(fd)) from error
        if tracked:
            self._tell_of_failed(fd)
            self._disk.synced(fd)

    def _tell_of_failed(self, fd: int) -> None:
        """Fail once if a sync through another descriptor has failed since this one was opened."""
        failed = self._disk.failed_syncs(fd)
        if failed != self._open_fds[fd]:
            self._open_fds[fd] = failed
            raise FailedSyncError(errno.EIO, os.strerror(errno.EIO), self.path_of(fd))

    def sync_folder(self, folder: Path) -> None:
        try:
            self._begin("sync_folder", folder)
        except OSError as error:
            raise _failed(error, str(folder)) from error
        self._disk.synced_folder(folder)

    def sync_file_system(self, fd: int) -> None:
        try:
            self._begin("sync_file_system", self.path_of(fd))
        except OSError as error:
            self._disk.sync_of_all_failed()
            raise _failed(error, self.path_of(fd)) from error
        self._disk.synced_all()

    # Maps

    def map(self, fd: int, size: int, *, write: bool = False) -> mmap.mmap:
        self._begin("map", self.path_of(fd))
        mapping = super().map(fd, size, write=write)
        if write and fd in self._tracked_fds:
            self._disk.mapped(fd)
        return mapping


def _failed(error: OSError, path: str) -> FailedSyncError:
    return FailedSyncError(error.errno, error.strerror, path)


# Line-by-line kills in interpreted kernels.
#
# Compiled kernels store in maps without a call that could be recorded; interpreted ones (NUMBA_DISABLE_JIT=1) are
# traced. Each storing line makes a version of its page that a power loss may leave, and a role may be killed after it.


# Kernels that store in mapped files that survive a power loss; other files are written by calls.
STORING: Final = frozenset(
    jit.plain(kernel).__code__
    for kernel in (index.put_entries, index.roll_back, index_rebuild.rebuild_links, index_rebuild.store_slots)
)
LINES_UNTIL_KILL_MAX: Final = 200


class Lines:
    """Traces stores of kernels in files of machines; without effect if kernels are compiled."""

    def __init__(self) -> None:
        self._machines: weakref.WeakSet[Machine] = weakref.WeakSet()
        self._main = getcurrent()
        self.seen = 0
        """Lines run so far."""

    def watch(self, machine: Machine) -> None:
        """Trace stores on another machine while it exists."""
        self._machines.add(machine)

    def kill_amid(self, machine: Machine, rng: random.Random) -> None:
        """Kill the role that runs one of the next lines, chosen at random."""
        if not jit.COMPILED:
            machine.lines_until_kill = rng.randint(1, LINES_UNTIL_KILL_MAX)

    def __enter__(self) -> None:
        self.resume()

    def __exit__(self, *_error: object) -> None:
        if not jit.COMPILED:
            sys.settrace(None)

    def resume(self) -> None:
        """Start or resume tracing: Python ends a trace that raises."""
        if not jit.COMPILED:
            sys.settrace(self._enter)

    def _enter(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        return self._line if frame.f_code in STORING else None

    def _line(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        """Runs before each line and when a kernel returns."""
        self.seen += 1
        for machine in list(self._machines):
            if machine.disk.has_maps:
                machine.disk.observe()
            if machine.lines_until_kill and not machine.over and getcurrent() is not self._main:
                machine.lines_until_kill -= 1
                if not machine.lines_until_kill:
                    self._kill(machine, frame)
        return self._line

    def _kill(self, machine: Machine, frame: FrameType) -> None:
        machine.journal.note("point", f"{frame.f_code.co_name}:{frame.f_lineno}")
        raise Killed
