"""The store's lock: an open-file-description lock on byte 0 of `<store>/lock`.

It conflicts with the POSIX lock that RocketMQ takes on the same byte, in both directions. Unlike a POSIX lock it
belongs to the open file, not to the process: every role inherits it by fork, so it is free only when the last process
of a group is gone, and closing another descriptor of the file does not drop it.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from mqproc.errors import StoreAccessError, StoreLockedError
from mqproc.io.store_io import Kind, StoreIO
from mqproc.layout import control as layout
from mqproc.paths import StorePaths

CONTENT = b"lock"  # RocketMQ's
PATIENCE_S = 2.0
"""How long to wait for roles that a dead supervisor left: the kernel kills them, which takes some milliseconds."""

_RETRY_S = 0.01
_FLOCK = struct.Struct("hhqqi4x")  # struct flock where off_t has 64 bits: type, whence, start, length, pid
_LOCK_SIZE = 1
_NO_ACCESS = frozenset({errno.EROFS, errno.EACCES, errno.EPERM, errno.EISDIR})
# A process's start is told in ticks since boot; a clock set forward after the group started adds to it.
_CLOCKS_APART_MS = 3_600_000
# What a descriptor's fdinfo says when it has such a lock, and how titles of a group's processes begin.
_LOCK_TOLD = "OFDLCK"
_TITLE = "mqproc: "
_WORD = struct.Struct("=q")
# What lies beyond them is no pid and no time, but damage.
_PID_MAX = 1 << 22
_SINCE_MS_MAX = 4_102_444_800_000  # the year 2100


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a store's lock, as far as can be told: 0 and None stand for unknown."""

    pid: int
    since_ms: int | None
    ended: bool = False

    def __str__(self) -> str:
        if not self.pid:
            return "another process"
        if self.ended:
            return f"processes that pid {self.pid} left behind"
        if self.since_ms is None:
            return f"pid {self.pid}"
        since = datetime.datetime.fromtimestamp(self.since_ms / 1000).astimezone()
        return f"pid {self.pid} since {since.isoformat(timespec='seconds')}"


class StoreLock:
    """A held lock. `fd` is what roles inherit; the lock ends with its last copy."""

    def __init__(self, io: StoreIO, fd: int) -> None:
        self._io = io
        self.fd = fd

    @classmethod
    def acquire(cls, io: StoreIO, paths: StorePaths, *, patience_s: float = PATIENCE_S) -> StoreLock:
        """Take the lock; raises StoreLockedError naming the holder, StoreAccessError where there can be none.

        Roles outlive a killed supervisor by some milliseconds, so a lock whose supervisor has ended is tried for
        `patience_s` more.
        """
        if _is_no_file(io, paths.lock):
            raise StoreAccessError(f"{paths.lock}: not a file")
        try:
            fd = io.open(paths.lock, write=True, create=True)
        except OSError as error:
            if error.errno not in _NO_ACCESS:
                raise
            raise StoreAccessError(f"{paths.lock}: {error.strerror}") from None
        deadline = time.monotonic() + patience_s
        try:
            while not try_lock(fd):
                holder = _holder(io, paths, fd)
                if not holder.ended or time.monotonic() >= deadline:
                    raise StoreLockedError(f"{paths.root}: the store is in use by {_surely(holder, fd)}")
                time.sleep(_RETRY_S)
            if io.pread(fd, len(CONTENT) + 1, 0) != CONTENT:
                io.set_size(fd, 0)
                io.pwrite(fd, CONTENT, 0)
        except BaseException:
            io.close(fd)
            raise
        return cls(io, fd)

    def close(self) -> None:
        """Close this process's copy. The lock stays as long as another process has one."""
        if self.fd >= 0:
            self._io.close(self.fd)
            self.fd = -1


def holder_of(io: StoreIO, paths: StorePaths) -> Holder | None:
    """Who holds the lock of a store now, None when nobody does. Changes nothing."""
    if _is_no_file(io, paths.lock):
        return None
    try:
        fd = io.open(paths.lock)
    except FileNotFoundError:
        return None
    try:
        return _surely(_holder(io, paths, fd), fd) if _conflict(fd) is not None else None
    finally:
        io.close(fd)


def try_lock(fd: int, byte: int = 0) -> bool:
    """Lock one byte of a file that is open for writing, until its last descriptor is closed; False: another has it."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, _LOCK_SIZE, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


def _is_no_file(io: StoreIO, lock: Path) -> bool:
    """Whether a folder, a pipe or the like lies in its place, with which no group starts."""
    found = io.entry(lock)
    return found is not None and found.kind in (Kind.FOLDER, Kind.OTHER)


def _conflict(fd: int) -> int | None:
    """Pid of a POSIX lock in the way, −1 for an open-file-description lock, None when there is none."""
    question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, _LOCK_SIZE, 0)
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, question))
    return None if kind == fcntl.F_UNLCK else int(pid)


def _holder(io: StoreIO, paths: StorePaths, fd: int) -> Holder:
    posix_pid = _conflict(fd) or 0
    if posix_pid > 0:
        return Holder(posix_pid, _started_ms(posix_pid))
    pid, since_ms = _from_control(io, paths)
    if not pid:
        pid = _from_abort(io, paths)
        since_ms = _started_ms(pid) if pid else None
    return Holder(pid, since_ms, ended=bool(pid) and _has_ended(pid, since_ms))


def _surely(holder: Holder, fd: int) -> Holder:
    """The store's files tell of groups only: when the last one's supervisor has ended, a command may have the lock."""
    pid = _command_that_holds(fd) if holder.ended else 0
    return Holder(pid, _started_ms(pid)) if pid else holder


def _command_that_holds(fd: int) -> int:
    """A process that is none of a group's, and has the lock of this file; 0: none that may be looked at."""
    path = os.readlink(f"/proc/self/fd/{fd}")
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):  # It may end meanwhile, or be another user's.
            for name in os.listdir(f"/proc/{pid}/fd"):
                if os.readlink(f"/proc/{pid}/fd/{name}") != path:
                    continue
                told = Path(f"/proc/{pid}/fdinfo/{name}").read_text()
                if _LOCK_TOLD in told and not " ".join(psutil.Process(pid).cmdline()).startswith(_TITLE):
                    return int(pid)
    return 0


def _from_control(io: StoreIO, paths: StorePaths) -> tuple[int, int | None]:
    """Pid and start of the supervisor that made the control file; zeros when there is no valid one."""

    def word(index: int) -> int:
        return int(_WORD.unpack(io.pread(fd, _WORD.size, index * _WORD.size))[0])

    try:
        fd = io.open(paths.control)
    except OSError:
        return 0, None
    try:
        if io.size(fd) != layout.FILE_SIZE or word(layout.HEADER_MAGIC) != layout.MAGIC:
            return 0, None
        pid, since_ms = word(layout.SUPERVISOR_PID), word(layout.GROUP_STARTED_MS)
        return (pid, since_ms) if 0 < pid <= _PID_MAX and 0 < since_ms <= _SINCE_MS_MAX else (0, None)
    finally:
        io.close(fd)


def _from_abort(io: StoreIO, paths: StorePaths) -> int:
    """The pid that `abort` tells; RocketMQ writes its own there too."""
    try:
        text = io.read_file(paths.abort).strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() and len(text) < 10 else 0


def _has_ended(pid: int, since_ms: int | None) -> bool:
    """Also true of a process that nobody has waited for yet, and of another one that got the same pid later."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return True
        return since_ms is not None and process.create_time() * 1000 > since_ms + _CLOCKS_APART_MS
    except psutil.Error:
        return True


def _started_ms(pid: int) -> int | None:
    try:
        return int(psutil.Process(pid).create_time() * 1000)
    except psutil.Error:
        return None
