"""Who uses a group that `mqproc.open` has started: the last of them stops it.

Each holds a shared lock on a file of the store's, whose text says which group one of them started: the group writes it,
since who started it may have ended by then. Who leaves asks to have the file alone, and gets it when nobody else is
there. A lock ends with its process, however that ends: the group looks now and then whether all have been killed.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import time
from contextlib import suppress
from typing import Final

from mqproc.errors import CorruptStoreError, NotRunningError, StartError
from mqproc.io.store_io import Kind, StoreIO
from mqproc.ipc.control import Control
from mqproc.paths import StorePaths

LOOK_AGAIN_S: Final = 0.05
UNUSED_S: Final = 10.0
"""So long a group goes on that all its users have left without stopping it."""
_LOOK_S: Final = 2.0
_MOMENT_S: Final = 0.002
_TEXT_MAX: Final = 64


class Openers:
    """One of those who use a store's group, until it leaves."""

    def __init__(self, paths: StorePaths) -> None:
        self._io = StoreIO()
        self._paths = paths
        self._fd = -1

    def join(self, timeout_s: float) -> bool:
        """Be one of them; whether this was none before.

        Waits while somebody stops the group, and raises StartError when that takes too long. Who cannot open the file
        is none: there is no store yet, or it is another user's.
        """
        if self._fd >= 0:
            return False
        with suppress(OSError):
            self._fd = _opened(self._io, self._paths)
        deadline = time.monotonic() + timeout_s
        while self._fd >= 0 and not self._locks(fcntl.LOCK_SH):
            if time.monotonic() >= deadline:
                raise StartError(f"{self._paths.root}: the group has been stopping for {timeout_s:g} s")
            time.sleep(LOOK_AGAIN_S)
        return self._fd >= 0

    def is_last(self) -> bool:
        """Whether nobody else uses the group that runs, and one of them started it; then nobody can join until `leave`.

        Asked of once, by the one who leaves.
        """
        if self._fd < 0 or not (self._locks(fcntl.LOCK_EX) or self._locks_soon()):
            return False
        running = _running(self._io, self._paths)
        return bool(running) and self._io.pread(self._fd, _TEXT_MAX, 0) == running

    def leave(self) -> None:
        """Let the others know."""
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # A forked process may have the descriptor still.
            self._io.close(self._fd)
            self._fd = -1

    def _locks(self, how: int) -> bool:
        return _locks(self._fd, how)

    def _locks_soon(self) -> bool:
        """The group may have had the file for the moment of its look."""
        time.sleep(_MOMENT_S)
        return self._locks(fcntl.LOCK_EX)


class Unused:
    """The group's own look at those who use it."""

    def __init__(self, paths: StorePaths) -> None:
        self._io = StoreIO()
        self._paths = paths
        self._fd = -1
        self._look_s = 0.0
        # Since the first look: a start may have taken minutes, and who waits for its end joins then.
        self._used_s = math.inf

    def is_so(self) -> bool:
        """Whether nobody has used it for `UNUSED_S`, told once; nobody can join from then until this process ends."""
        now_s = time.monotonic()
        if now_s < self._look_s:
            return False
        self._look_s = now_s + _LOOK_S
        with suppress(OSError):
            if self._fd < 0:
                self._fd = self._io.open(self._paths.openers, write=True)
            if _locks(self._fd, fcntl.LOCK_EX):
                self._used_s = min(self._used_s, now_s)
                if now_s - self._used_s >= UNUSED_S:
                    self._look_s = math.inf
                    return True
                fcntl.flock(self._fd, fcntl.LOCK_UN)
                return False
        self._used_s = now_s
        return False


def _opened(io: StoreIO, paths: StorePaths) -> int:
    """The file's descriptor. Raises OSError, for a pipe, too, which takes locks and holds no text."""
    found = io.entry(paths.openers)
    if found is not None and found.kind is Kind.OTHER:
        raise OSError(errno.EINVAL, "not a file", os.fspath(paths.openers))
    return io.open(paths.openers, write=True, create=True, mode=0o600)


def _locks(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def let_last_one_stop(paths: StorePaths) -> None:
    """The group that runs now, this process's own, is one that its last user stops. Raises StartError."""
    io = StoreIO()
    try:
        fd = _opened(io, paths)
        try:
            io.set_size(fd, 0)
            io.pwrite(fd, _running(io, paths), 0)
        finally:
            io.close(fd)
    except OSError as error:
        raise StartError(f"{paths.openers}: {error.strerror or error}") from None


def _running(io: StoreIO, paths: StorePaths) -> bytes:
    """What tells this group from those before and after it; empty when there is none."""
    try:
        control = Control.open(io, paths)
    except (NotRunningError, CorruptStoreError):
        return b""
    try:
        words = control.snapshot()
    finally:
        control.close()
    return f"{words['supervisor_pid']} {words['group_started_ms']}\n".encode()
