"""Recover and verify stores in the test's process; kill recovery at any call."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mqproc.config.options import Options
from mqproc.io.fault_injection import io_from_environment
from mqproc.io.store_io import FailedSyncError, StoreIO
from mqproc.ipc.words import Words
from mqproc.layout import control as words_of
from mqproc.paths import StorePaths
from mqproc.store import damage
from mqproc.store.consumequeue.files import ConsumeQueueFiles, as_units
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.recovery.rebuild import NO_SCANNERS, Scanners
from mqproc.store.recovery.recovery import Recovery, adopt_sizes
from mqproc.store.verify import Finding, VerifyResult, verify_store

NOW_MS = 1_800_000_000_000
PAGE = 4096
Unit = tuple[int, int, int]


class Killed(BaseException):
    """Simulates the kill of the process."""


class RecordingIO(StoreIO):
    """Records every modifying call; raises `Killed` instead of call `kill_at`, counted from 1."""

    def __init__(self, kill_at: int = 0) -> None:
        super().__init__()
        self.calls: list[str] = []
        self._kill_at = kill_at
        self._paths: dict[int, Path] = {}

    @property
    def lasting_calls(self) -> list[str]:
        """The calls without those for the queue table, which every start rebuilds."""
        return [call for call in self.calls if not call.split("/")[-1].startswith("queues")]

    def _note(self, call: str, path: Path) -> None:
        self.calls.append(f"{call} {path}")
        if len(self.calls) == self._kill_at:
            raise Killed(self.calls[-1])

    def open(self, path: Path, *, write: bool = False, create: bool = False, mode: int = 0o644) -> int:
        if create and not path.exists():
            self._note("create", path)
        fd = super().open(path, write=write, create=create, mode=mode)
        self._paths[fd] = path
        return fd

    def make_folder(self, folder: Path, mode: int = 0o755, *, sync: bool = True) -> None:
        if not folder.exists():
            self._note("make_folder", folder)
        super().make_folder(folder, mode, sync=sync)

    def write_file_atomically(
        self, path: Path, data: bytes, mode: int = 0o644, failed: Callable[[FailedSyncError], object] | None = None
    ) -> None:
        self._note("replace", path)
        super().write_file_atomically(path, data, mode, failed)

    def rename(self, source: Path, target: Path, between: Callable[[], None] | None = None) -> None:
        self._note("rename", target)
        super().rename(source, target, between)

    def unlink(self, path: Path) -> None:
        if path.exists():
            self._note("unlink", path)
        super().unlink(path)

    def pwrite(self, fd: int, data: Any, offset: int) -> None:
        self._note("pwrite", self._paths.get(fd, Path("?")))
        super().pwrite(fd, data, offset)

    def zero(self, fd: int, offset: int, size: int) -> None:
        self._note("zero", self._paths[fd])
        super().zero(fd, offset, size)

    def allocate(self, fd: int, offset: int, size: int) -> None:
        self._note("allocate", self._paths[fd])
        super().allocate(fd, offset, size)

    def set_size(self, fd: int, size: int) -> None:
        self._note("set_size", self._paths[fd])
        super().set_size(fd, size)

    def sync(self, fd: int) -> None:
        self._note("sync", self._paths[fd])
        super().sync(fd)


@dataclass(slots=True)
class Recovered:
    """A store after recovery. `said` are the reported lines."""

    paths: StorePaths
    options: Options
    words: Words
    said: list[str]

    @property
    def end(self) -> int:
        return self.words[words_of.WRITTEN]

    @property
    def begin(self) -> int:
        return self.words[words_of.MIN_PHYSICAL_OFFSET]

    @property
    def dispatched(self) -> int:
        return self.words[words_of.DISPATCHED]

    @property
    def holes(self) -> list[tuple[int, int, str]]:
        """The holes in damage.json."""
        return [(hole.start, hole.stop, hole.kind) for hole in damage.load(StoreIO(), self.paths).holes]

    @property
    def cuts(self) -> list[tuple[int, int]]:
        return [(cut.end, cut.durable_end) for cut in damage.load(StoreIO(), self.paths).cuts]

    def queues(self) -> dict[tuple[str, int], tuple[int, int]]:
        """(minimum, maximum) of every queue that has or had a message."""
        table = QueueTable(StoreIO(), self.paths.queues)
        try:
            bounds = {
                (topic, queue_id): (table.min_offset(number), table.max_offset(number))
                for number, topic, queue_id in table.live()
            }
            ends = [table.next_offset(number) for number, _topic, _queue_id in table.live()]
            assert ends == [maximum for _minimum, maximum in bounds.values()]
        finally:
            table.close()
        return {queue: ends for queue, ends in bounds.items() if ends[1]}

    def units(self, topic: str, queue_id: int) -> dict[int, Unit]:
        """(physical offset, size, tags code) of the queue's units, by queue offset."""
        return self.units_of({(topic, queue_id): self.queues()[topic, queue_id]})[topic, queue_id]

    def units_of(self, queues: Mapping[tuple[str, int], tuple[int, int]]) -> dict[tuple[str, int], dict[int, Unit]]:
        """Units of these queues, which are given with their (minimum, maximum)."""
        found = {}
        files = ConsumeQueueFiles(StoreIO(), self.paths.consume_queue, self.options.consume_queue_file_bytes)
        try:
            for queue, (minimum, maximum) in queues.items():
                data = files.read_units(*queue, minimum, maximum - minimum) if maximum > minimum else b""
                units: list[Unit] = as_units(data).tolist()
                assert len(units) == maximum - minimum
                found[queue] = dict(enumerate(units, minimum))
        finally:
            files.close()
        return found

    def said_of(self, step: str) -> str:
        """The line of a step of recovery."""
        (line,) = [line for line in self.said if line.startswith(f"recovery: {step}:")]
        return line


def recover(
    root: Path,
    options: Options,
    *,
    clean: bool | None = None,
    io: StoreIO | None = None,
    scanners: Scanners = NO_SCANNERS,
) -> Recovered:
    """Recover the store at `root`. `clean`: it was closed; None = by its `abort` file."""
    io, paths, said = io or io_from_environment(os.environ), StorePaths(root), list[str]()
    options = adopt_sizes(io, paths, options, said.append)
    words = Words(bytearray(words_of.FILE_SIZE))
    clean = not paths.abort.exists() if clean is None else clean
    recovery = Recovery(io, paths, options, words, said.append, clean=clean, scanners=scanners, now_ms=lambda: NOW_MS)
    recovery.run()
    return Recovered(paths, options, words, said)


# Files that each start rebuilds.
_REBUILT = ("mqproc/queues", "mqproc/queues.next", "mqproc/queues.next.tmp", "mqproc/control")


def contents(root: Path, *, without: Container[str] = _REBUILT) -> dict[str, tuple[int, bytes]]:
    """Length and nonzero pages of a store's files, without those that each start rebuilds."""
    found = {name: entry.path for name, entry in entries_below(root) if entry.is_file()}
    return {name: _nonzero_pages(path) for name, path in found.items() if name not in without}


def entries_below(root: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """The entries below a folder, with paths relative to `root`, sorted by path parts."""
    return _below(str(root), "")


def _below(folder: str, prefix: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    with os.scandir(folder) as scanned:
        entries = sorted(scanned, key=_name)
    for entry in entries:
        name = prefix + entry.name
        yield name, entry
        if entry.is_dir(follow_symlinks=False):
            yield from _below(entry.path, f"{name}/")


def _name(entry: os.DirEntry[str]) -> str:
    return entry.name


def _nonzero_pages(path: str) -> tuple[int, bytes]:
    """Length, and nonzero pages, each after its offset; holes are not read."""
    pages = []
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        for start, stop in written_ranges(fd, size):
            data = os.pread(fd, stop - start, start)
            for at in range(0, len(data), PAGE):
                page = data[at : at + PAGE]
                if page.count(0) != len(page):
                    pages += [(start + at).to_bytes(8, "little"), page]
    finally:
        os.close(fd)
    return size, b"".join(pages)


def written_ranges(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Ranges of a file outside its holes."""
    at = 0
    while at < size:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return
        at = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, at


# Verify, with findings as short rows


class Row(NamedTuple):
    """A finding without its text."""

    kind: str
    file: str
    offset: int | None
    physical_offset: int | None


def verify(store: Path, *, jobs: int = 1, shares: int = 1, **options: Any) -> VerifyResult:
    """Verify a store; one job runs in this process."""
    return verify_store(StoreIO(), StorePaths(store), Options(**options), jobs=jobs, shares=shares, share_bytes=100)


def row_of(finding: Finding) -> Row:
    return Row(str(finding.kind), finding.file, finding.offset, finding.physical_offset)


def damage_of(found: VerifyResult) -> list[Row]:
    """Findings of damage, causes first."""
    return [row_of(finding) for finding in found.findings.in_order() if finding.severity == "damage"]


def notes_of(found: VerifyResult) -> list[Row]:
    """Findings that are notes."""
    return [row_of(finding) for finding in found.findings.in_order() if finding.severity == "note"]


def flip(path: Path, offset: int, bits: int = 1) -> None:
    """Change bits of one byte of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ bits]))


def overwrite(path: Path, offset: int, data: bytes) -> None:
    """Overwrite bytes of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
