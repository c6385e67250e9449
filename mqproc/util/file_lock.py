"""Locks on open files: flock on whole files, open-file-description locks on bytes.

Both belong to the open file description: forked processes share them, and they end with the last descriptor.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from typing import Final

_POLL_S: Final = 0.01
# struct flock with a 64-bit off_t: type, whence, start, length, pid.
_FLOCK: Final = struct.Struct("hhqqi4x")


def try_flock(fd: int, *, shared: bool = False) -> bool:
    """Lock a file without waiting; return False when another open file has a conflicting lock."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_for_flock(fd: int, timeout_s: float, *, shared: bool = False, poll_s: float = _POLL_S) -> bool:
    """Lock a file, waiting up to `timeout_s`; return whether it is locked."""
    deadline_s = time.monotonic() + timeout_s
    while not try_flock(fd, shared=shared):
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(poll_s)
    return True


def unlock(fd: int) -> None:
    """Release a flock now, although forked processes may still have the descriptor."""
    fcntl.flock(fd, fcntl.LOCK_UN)


def try_lock_byte(fd: int, byte: int = 0) -> bool:
    """Lock one byte of a file open for writing; return False when another process holds it.

    The lock conflicts with POSIX locks of the same byte.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


def byte_lock_holder(fd: int, byte: int = 0) -> int | None:
    """Pid with a POSIX lock on a byte, −1 for an open-file-description lock, None without one."""
    request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, request))
    return None if kind == fcntl.F_UNLCK else int(pid)
