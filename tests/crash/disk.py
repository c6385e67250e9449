"""The simulated disk: page versions since the last sync, and names not durable yet.

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
import functools
import hashlib
import os
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from mqproc.layout.record import BLANK_SIZE, BODY, IPV6_EXTRA
from mqproc.layout.record_codec import check_record, decode_record, fixed_of
from mqproc.types import StoredMessage
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

    heard = True
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


class Unheard(Journal):
    """Discards all events, where no digest is needed."""

    heard = False

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

    def let_go(self) -> None:
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
            if journal.heard and name != CONTROL:
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
            behind = now[start + len(sector.rstrip(b"\0")) : start + SECTOR]
            if stored := behind.lstrip(b"\0"):
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
