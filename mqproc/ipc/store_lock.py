"""The store's lock: an open-file-description lock on byte 0 of `<store>/lock`.

It conflicts with RocketMQ's POSIX lock of the same byte, in both directions. Unlike a POSIX lock it belongs to the open
file, not to the process: roles inherit it by fork, so it is free only after the last process of a group has ended, and
closing another descriptor of the file does not release it.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from mqproc.errors import StoreAccessError, StoreLockedError
from mqproc.io.store_io import Kind, StoreIO
from mqproc.ipc.control_words import is_own_namespace, read_word
from mqproc.layout import control as layout
from mqproc.paths import StorePaths
from mqproc.util.file_lock import byte_lock_holder, try_lock_byte
from mqproc.util.procfs import processes_with_byte_lock

CONTENT = b"lock"  # RocketMQ's
PATIENCE_S = 2.0
"""How long to wait for the end of roles whose supervisor has died; the kernel kills them within milliseconds."""

_RETRY_S = 0.01
_NO_ACCESS = frozenset({errno.EROFS, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP})
# Process start times count ticks since boot; setting the clock forward afterwards adds to them.
_CLOCKS_APART_MS = 3_600_000
# Titles of a group's processes begin with this.
_TITLE = "mqproc: "
# Values above these are damage, not pids or times.
_PID_MAX = 1 << 22
_SINCE_MS_MAX = 4_102_444_800_000  # the year 2100


@dataclass(frozen=True, slots=True)
class LockHolder:
    """Holder of a store's lock, as far as known: 0 and None mean unknown.

    `elsewhere`: a group in another PID namespace, as of a container, whose process ids are not valid here.
    """

    pid: int
    since_ms: int | None
    ended: bool = False
    elsewhere: bool = False

    def __str__(self) -> str:
        if not (self.pid or self.elsewhere):
            return "another process"
        if self.ended:
            return f"processes that pid {self.pid} left behind"
        holder = "a group in another PID namespace, as of a container," if self.elsewhere else f"pid {self.pid}"
        if self.since_ms is None:
            return holder
        since = datetime.datetime.fromtimestamp(self.since_ms / 1000).astimezone()
        return f"{holder} since {since.isoformat(timespec='seconds')}"


@dataclass(slots=True)
class StoreLock:
    """A held lock. Roles inherit `fd`; the lock ends with its last copy."""

    io: StoreIO
    fd: int

    @classmethod
    def acquire(cls, io: StoreIO, paths: StorePaths, *, patience_s: float = PATIENCE_S) -> StoreLock:
        """Acquire the lock.

        Raises StoreLockedError naming the holder, StoreAccessError when the file cannot be a lock. If the holder's
        supervisor has ended or is in another PID namespace, retries for `patience_s`: roles outlive a killed
        supervisor by milliseconds.
        """
        if _is_no_file(io, paths.lock):
            raise StoreAccessError(f"{paths.lock}: not a file")
        _check_folders(paths)
        try:
            fd = io.open(paths.lock, write=True, create=True)
        except OSError as error:
            if error.errno not in _NO_ACCESS:
                raise
            raise StoreAccessError(f"{paths.lock}: {error.strerror}") from None
        deadline = time.monotonic() + patience_s
        try:
            while not try_lock_byte(fd):
                holder = _holder(io, paths, fd)
                if not (holder.ended or holder.elsewhere) or time.monotonic() >= deadline:
                    raise StoreLockedError(f"{paths.root}: the store is in use by {_or_command(holder, fd)}")
                time.sleep(_RETRY_S)
            if io.pread(fd, len(CONTENT) + 1, 0) != CONTENT:
                io.set_size(fd, 0)
                io.pwrite(fd, CONTENT, 0)
        except BaseException:
            io.close(fd)
            raise
        return cls(io, fd)

    def close(self) -> None:
        """Close this process's copy; the lock remains while another process has one."""
        if self.fd >= 0:
            self.io.close(self.fd)
            self.fd = -1


def lock_holder(io: StoreIO, paths: StorePaths) -> LockHolder | None:
    """Current holder of a store's lock, or None. Changes nothing."""
    if _is_no_file(io, paths.lock):
        return None
    try:
        with io.opened(paths.lock) as fd:
            return _or_command(_holder(io, paths, fd), fd) if byte_lock_holder(fd) is not None else None
    except FileNotFoundError:
        return None


def _check_folders(paths: StorePaths) -> None:
    """Raise StoreAccessError if root would write through a symlink in another user's store."""
    owner = paths.root.stat().st_uid
    if os.geteuid() != 0 or owner == 0:
        return
    folders = (paths.own, paths.commit_log, paths.consume_queue, paths.index, paths.config, paths.timer_log)
    for folder in (*folders, paths.marks, paths.quarantine, paths.repaired):
        if folder.is_symlink():
            raise StoreAccessError(
                f"{folder}: a symlink; root changes nothing through it in the store of user {owner}: run this as that "
                f"user, with sudo -u '#{owner}'"
            )


def _is_no_file(io: StoreIO, lock: Path) -> bool:
    """Whether a folder, a pipe or the like is at the path; no group can start then."""
    found = io.entry(lock)
    return found is not None and found.kind in (Kind.FOLDER, Kind.OTHER)


def _holder(io: StoreIO, paths: StorePaths, fd: int) -> LockHolder:
    posix_pid = byte_lock_holder(fd)
    if posix_pid is not None and posix_pid >= 0:
        return LockHolder(posix_pid, _started_ms(posix_pid))
    pid, since_ms, namespace = _from_control(io, paths)
    if not is_own_namespace(namespace):
        return LockHolder(0, since_ms, elsewhere=True)
    if not pid:
        pid = _from_abort(io, paths)
        since_ms = _started_ms(pid) if pid else None
    return LockHolder(pid, since_ms, ended=bool(pid) and _has_ended(pid, since_ms))


def _or_command(holder: LockHolder, fd: int) -> LockHolder:
    """Replace a holder that has ended or is elsewhere by a command that holds the lock.

    The store's files name groups only, not commands.
    """
    pid = _command_that_holds(fd) if holder.ended or holder.elsewhere else 0
    return LockHolder(pid, _started_ms(pid)) if pid else holder


def _command_that_holds(fd: int) -> int:
    """A process outside of groups that holds the lock of this file; 0 when none is found."""
    for pid in processes_with_byte_lock(fd):
        with contextlib.suppress(psutil.Error):  # It may have ended.
            if not " ".join(psutil.Process(pid).cmdline()).startswith(_TITLE):
                return pid
    return 0


def _from_control(io: StoreIO, paths: StorePaths) -> tuple[int, int | None, int]:
    """Pid, start and PID namespace of the control file's supervisor; 0, None, 0 if invalid."""
    try:
        with io.opened(paths.control) as fd:
            if io.size(fd) == layout.FILE_SIZE and read_word(io, fd, layout.HEADER_MAGIC) == layout.MAGIC:
                pid = read_word(io, fd, layout.SUPERVISOR_PID)
                since_ms = read_word(io, fd, layout.GROUP_STARTED_MS)
                if 0 < pid <= _PID_MAX and 0 < since_ms <= _SINCE_MS_MAX:
                    return pid, since_ms, read_word(io, fd, layout.PID_NAMESPACE)
    except OSError:
        pass
    return 0, None, 0


def _from_abort(io: StoreIO, paths: StorePaths) -> int:
    """The pid in `abort`; RocketMQ writes its own there too."""
    try:
        text = io.read_file(paths.abort).strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() and len(text) < 10 else 0


def _has_ended(pid: int, since_ms: int | None) -> bool:
    """Also true for zombies, and for another process that got the same pid later."""
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
