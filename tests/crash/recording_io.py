"""A StoreIO that tells a `Disk` what happens, lets others run before each call, and fails or ends when told to."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mqproc.io import FailedSyncError, StoreIO
from tests.crash.disk import Disk


class Killed(BaseException):
    """The process ends here."""


# Words shared by the group's processes: derived, dropped by every start, and too busy to keep versions of.
SHARED_ONLY = ("mqproc/control", "mqproc/control.tmp", "mqproc/queues", "mqproc/queues.next", "mqproc/queues.next.tmp")


@dataclass(slots=True)
class Fault:
    """The `nth` call (from 1) of kind `call`, or of any kind when that is empty, fails; all later ones if `sticky`."""

    call: str
    nth: int
    errno: int
    sticky: bool = False


@dataclass(slots=True)
class Machine:
    """What all processes of a machine share: its disk, the calls counted so far, what shall fail."""

    disk: Disk
    calls: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    fault: Fault | None = None
    kill_at: int = 0
    """The whole group ends before this call, from 1; 0 = never."""
    over: bool = False
    """The machine has lost its power, or all of its processes were killed."""
    between: Callable[[], None] = lambda: None
    """Called before each call: other processes may run in it."""

    def fails(self, call: str) -> int:
        """The errno that this call is to fail with, 0 = none."""
        fault = self.fault
        if fault is None or (fault.call and fault.call != call):
            return 0
        count = self.kinds.get(call, 0) if fault.call else self.calls
        return fault.errno if count == fault.nth or (fault.sticky and count > fault.nth) else 0


class RecordingIO(StoreIO):
    """The storage calls of one process. `dead`: it was killed, and no call of it does anything any more."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine
        self._disk = machine.disk
        self.dead = False

    # One call

    def _begin(self, call: str, path: Path | None = None) -> None:
        machine = self._machine
        self._check_alive()
        machine.between()
        self._check_alive()
        machine.calls += 1
        machine.kinds[call] = machine.kinds.get(call, 0) + 1
        if machine.calls == machine.kill_at:
            machine.over = True
            raise Killed
        if number := machine.fails(call):
            raise OSError(number, os.strerror(number), str(path) if path else None)

    def _check_alive(self) -> None:
        if self.dead or self._machine.over:
            raise Killed

    def _tracked(self, path: Path | str) -> bool:
        return not str(path).endswith(SHARED_ONLY)

    def _tracked_fd(self, fd: int) -> bool:
        return self._tracked(self.path_of(fd))

    def crash_point(self, name: str) -> None:
        self._begin(f"point {name}")

    # Names

    def _make_one_folder(self, folder: Path, mode: int) -> None:
        self._begin("mkdir", folder)
        super()._make_one_folder(folder, mode)
        self._disk.made_folder(folder)

    def _rename(self, source: Path, target: Path) -> None:
        self._begin("rename", source)
        super()._rename(source, target)
        if self._tracked(target):
            self._disk.renamed(source, target)

    def unlink(self, path: Path) -> None:
        self._begin("unlink", path)
        if not path.exists() and not path.is_symlink():
            return
        super().unlink(path)
        if self._tracked(path):
            self._disk.named(path, 0)

    def keep_link(self, path: Path, target: Path) -> None:
        self._begin("link", path)
        super().keep_link(path, target)
        self._disk.named(target, target.stat().st_ino)

    def make_link(self, path: Path, target: str) -> None:
        self._begin("symlink", path)
        super().make_link(path, target)
        self._disk.linked(path, target)

    def remove_folder(self, folder: Path) -> None:
        self._begin("rmtree", folder)
        if folder.exists():
            super().remove_folder(folder)
            self._disk.removed_folder(folder)

    # Files

    def open(self, path: Path, *, write: bool = False, create: bool = False, mode: int = 0o644) -> int:
        self._begin("create" if create else "open", path)
        new = create and not path.exists()
        fd = super().open(path, write=write, create=create, mode=mode)
        if new and self._tracked(path):
            self._disk.named(path, os.fstat(fd).st_ino)
        return fd

    def pwrite(self, fd: int, data: Any, offset: int) -> None:
        self._begin("pwrite", Path(self.path_of(fd)))
        super().pwrite(fd, data, offset)
        self._changed(fd, offset, memoryview(data).nbytes)

    def zero(self, fd: int, offset: int, size: int) -> None:
        self._begin("zero", Path(self.path_of(fd)))
        size = min(size, self.size(fd) - offset)
        if size > 0:
            os.pwrite(fd, bytes(size), offset)
            self._changed(fd, offset, size)

    def allocate(self, fd: int, offset: int, size: int) -> None:
        self._begin("allocate", Path(self.path_of(fd)))
        if os.fstat(fd).st_size < offset + size:
            os.ftruncate(fd, offset + size)
            self._changed(fd, 0, 0)

    def set_size(self, fd: int, size: int) -> None:
        self._begin("set_size", Path(self.path_of(fd)))
        if os.fstat(fd).st_size != size:
            os.ftruncate(fd, size)
            self._changed(fd, 0, 0)

    def _changed(self, fd: int, offset: int, size: int) -> None:
        if self._tracked_fd(fd):
            self._disk.sized(fd)
            self._disk.stored(fd, offset, size)

    # Syncs

    def sync(self, fd: int) -> None:
        tracked = self._tracked_fd(fd)
        try:
            self._begin("sync", Path(self.path_of(fd)))
        except OSError as error:
            if tracked:
                self._disk.sync_failed(fd)
            raise _failed(error, self.path_of(fd)) from error
        if tracked:
            self._disk.synced(fd)

    def sync_folder(self, folder: Path) -> None:
        try:
            self._begin("sync_folder", folder)
        except OSError as error:
            raise _failed(error, str(folder)) from error
        self._disk.synced_folder(folder)

    def sync_file_system(self, fd: int) -> None:
        try:
            self._begin("sync_file_system", Path(self.path_of(fd)))
        except OSError as error:
            self._disk.sync_of_all_failed()
            raise _failed(error, self.path_of(fd)) from error
        self._disk.synced_all()

    # Maps

    def map(self, fd: int, size: int, *, write: bool = False) -> mmap.mmap:
        self._begin("map", Path(self.path_of(fd)))
        mapping = super().map(fd, size, write=write)
        if write and self._tracked_fd(fd):
            self._disk.mapped(fd)
        return mapping


def _failed(error: OSError, path: str) -> FailedSyncError:
    return FailedSyncError(error.errno, error.strerror, path)
