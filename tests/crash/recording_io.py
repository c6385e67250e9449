"""A StoreIO that reports to a `Disk`, yields before each call, and fails or dies on request.

The story also makes the decisions of a file system (which zeros are holes, how full it is): a seed gives the same
story on every file system.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import sys
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final

from greenlet import getcurrent

from mqproc.io.store_io import FailedSyncError, StoreIO
from mqproc.kernels import index
from mqproc.kernels.jit import compile as jit
from tests.crash.disk import PAGE, Broken, Disk, Journal, Unheard


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
    journal: Journal = field(default_factory=Unheard)
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
            digest = zlib.crc32(data) if self._machine.journal.heard else 0
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
    for kernel in (index.put_entries, index.roll_back, index.rebuild_links, index.store_slots)
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
        self.go_on()

    def __exit__(self, *_error: object) -> None:
        if not jit.COMPILED:
            sys.settrace(None)

    def go_on(self) -> None:
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
