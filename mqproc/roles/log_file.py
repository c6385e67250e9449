"""Standard output and error in a file that somebody else may move away, as logrotate does.

A process and all that are forked from it write to the same open file. So each of them opens the file's name again when
it is told to, and what was written before stays in the file that was moved.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import FrameType

from mqproc.io import StoreIO

# Read too: whether the last line has its end.
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
_MODE = 0o600

_own: Path | None = None


def write_to(path: Path) -> None:
    """Standard output and error go to the end of the file from here on, here and in what is forked. Raises OSError."""
    global _own
    _open(path)
    _own = path


def leave() -> None:
    """Standard output and error have become something else in this process."""
    global _own
    _own = None


def reopen() -> bool:
    """Open the file of `write_to` by its name again. False when there is none; raises OSError and keeps the old one."""
    if _own is None:
        return False
    _open(_own)
    return True


def on_signal(number: int, frame: FrameType | None) -> None:
    """Handler of SIGUSR1 in what is forked from the supervisor, which tells when the file cannot be opened."""
    with contextlib.suppress(OSError):
        reopen()


def write_line(fd: int, line: bytes) -> None:
    """Write a line, behind the end of one of which a full disk has taken no more than a part. Raises OSError.

    Whoever writes next ends it: whose it was has nothing more to write, perhaps.
    """
    os.write(fd, line if _has_whole_lines(fd) else b"\n" + line)


def _has_whole_lines(fd: int) -> bool:
    io = StoreIO()
    try:
        size = io.size(fd)
        return not size or io.pread(fd, 1, size - 1) == b"\n"
    except OSError:
        # Not to be read from: somebody else's file.
        return True


def _open(path: Path) -> None:
    fd = os.open(path, _FLAGS, _MODE)
    try:
        os.dup2(fd, 1)
        os.dup2(fd, 2)
    finally:
        os.close(fd)
