"""Users of a group started by `mqproc.open`: the last one stops it.

Each user holds a shared lock on a file whose text identifies a group that one of them started; the group writes it,
since that user may have ended by then. A leaving user requests the exclusive lock, and gets it if there are no others.
Locks end with their process, also when it is killed: the group checks periodically for remaining users.
"""

from __future__ import annotations

import errno
import math
import os
import time
from contextlib import closing, suppress
from typing import Final

from mqproc.errors import CorruptStoreError, NotRunningError, StartError
from mqproc.io.store_io import Kind, StoreIO
from mqproc.ipc.control import Control
from mqproc.layout import control as layout
from mqproc.paths import StorePaths
from mqproc.util.file_lock import try_flock, unlock, wait_for_flock

RETRY_S: Final = 0.05
UNUSED_S: Final = 10.0
"""A group continues for this long after all its users were killed."""
_CHECK_EVERY_S: Final = 2.0
_GROUP_CHECK_S: Final = 0.002
_TEXT_MAX: Final = 64


class UsageLock:
    """One user of a store's group, from `join` to `leave`."""

    def __init__(self, paths: StorePaths) -> None:
        self._io = StoreIO()
        self._paths = paths
        self._fd = -1

    def join(self, timeout_s: float) -> bool:
        """Become a user; return False if this object was one already.

        Waits while another user stops the group; raises StartError after `timeout_s`. Does nothing when the file cannot
        be opened: there is no store yet, or it belongs to another user account.
        """
        if self._fd >= 0:
            return False
        with suppress(OSError):
            self._fd = _open_lock(self._io, self._paths)
        if self._fd >= 0 and not wait_for_flock(self._fd, timeout_s, shared=True, poll_s=RETRY_S):
            raise StartError(f"{self._paths.root}: the group has been stopping for {timeout_s:g} s")
        return self._fd >= 0

    def is_last(self) -> bool:
        """Whether the running group has no other users, and was started by one of them.

        No user can join after that until `leave`. Call it once, when leaving.
        """
        # Retry once: the group itself may have locked the file for a check.
        if self._fd < 0 or not wait_for_flock(self._fd, _GROUP_CHECK_S, poll_s=_GROUP_CHECK_S):
            return False
        running = _running_group(self._io, self._paths)
        return bool(running) and self._io.pread(self._fd, _TEXT_MAX, 0) == running

    def leave(self) -> None:
        """Stop being a user."""
        if self._fd >= 0:
            unlock(self._fd)  # A forked process may still have the descriptor.
            self._io.close(self._fd)
            self._fd = -1


class IdleWatch:
    """The group's own periodic check for users."""

    def __init__(self, paths: StorePaths) -> None:
        self._io = StoreIO()
        self._paths = paths
        self._fd = -1
        self._check_at_s = 0.0
        # Counts from the first check: a start may take minutes, and waiting users join after it.
        self._used_s = math.inf

    def unused_too_long(self) -> bool:
        """Whether the group had no users for `UNUSED_S`; true once, then no user can join."""
        now_s = time.monotonic()
        if now_s < self._check_at_s:
            return False
        self._check_at_s = now_s + _CHECK_EVERY_S
        with suppress(OSError):
            if self._fd < 0:
                self._fd = self._io.open(self._paths.usage_lock, write=True)
            if try_flock(self._fd):
                self._used_s = min(self._used_s, now_s)
                if now_s - self._used_s >= UNUSED_S:
                    self._check_at_s = math.inf
                    return True
                unlock(self._fd)
                return False
        self._used_s = now_s
        return False


def _open_lock(io: StoreIO, paths: StorePaths) -> int:
    """Open the file. Raises OSError, also for a pipe, which can be locked but holds no text."""
    found = io.entry(paths.usage_lock)
    if found is not None and found.kind is Kind.OTHER:
        raise OSError(errno.EINVAL, "not a file", os.fspath(paths.usage_lock))
    return io.open(paths.usage_lock, write=True, create=True, mode=0o600)


def mark_stoppable_by_last_user(paths: StorePaths) -> None:
    """Allow the last user to stop this process's group. Raises StartError."""
    io = StoreIO()
    try:
        fd = _open_lock(io, paths)
        try:
            io.set_size(fd, 0)
            io.pwrite(fd, _running_group(io, paths), 0)
        finally:
            io.close(fd)
    except OSError as error:
        raise StartError(f"{paths.usage_lock}: {error.strerror or error}") from None


def _running_group(io: StoreIO, paths: StorePaths) -> bytes:
    """Identify the running group; empty without one."""
    try:
        with closing(Control.open(io, paths)) as control:
            pid, started_ms = control.load(layout.SUPERVISOR_PID), control.load(layout.GROUP_STARTED_MS)
    except (NotRunningError, CorruptStoreError):
        return b""
    return f"{pid} {started_ms}\n".encode()
