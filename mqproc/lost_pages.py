"""A mapped page that cannot be had ends a process by SIGBUS, without a word: here it names the file before.

So it is where a disk cannot read what a file has there, where the file was cut meanwhile, and where a store to a page
finds no room, as on a file system that takes new room for each write. Nobody can go on from there: whatever touched the
page would touch it again.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final

from mqproc.errors import CorruptStoreError
from mqproc.io import StoreIO
from mqproc.paths import shown

_FAILED: Final = 1
_SA_SIGINFO: Final = 4
_ADDRESS: Final = 16
"""Where `siginfo_t` has the address, on machines of 64 bits."""
_Handler: Final = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_libc = ctypes.CDLL(None)
_libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)


class _SigAction(ctypes.Structure):
    _fields_ = (
        ("handler", _Handler),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_kept: _SigAction | None = None
"""The C library knows the handler by its address only."""


def name_lost_pages(tell: Callable[[str, int], object]) -> None:
    """Have `tell` called with what is wrong and an exit code for it, before this process dies by the signal.

    It may end the process itself. Who is forked dies without it: its parent is to tell.
    """
    mine = os.getpid()

    def die(_number: int, info: int, _context: int) -> None:
        # Python's own handlers run when the interpreter comes to it, which it never would: this is within the access.
        _libc.signal(signal.SIGBUS, None)
        os.kill(os.getpid(), signal.SIGBUS)
        if os.getpid() == mine:
            tell(*_told_of(ctypes.c_size_t.from_address(info + _ADDRESS).value))

    global _kept
    _kept = _SigAction(_Handler(die), flags=_SA_SIGINFO)
    _libc.sigaction(signal.SIGBUS, ctypes.byref(_kept), None)


def _told_of(address: int) -> tuple[str, int]:
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _mode, offset, _device, _inode, *name = line.split(maxsplit=5)
        start, stop = (int(part, 16) for part in span.split("-"))
        if start <= address < stop and name:
            return _why(Path(name[0]), int(offset, 16) + address - start)
    return "a page of memory could not be had", _FAILED


def _why(path: Path, offset: int) -> tuple[str, int]:
    io, place = StoreIO(), f"{shown(path)}: offset {offset:,}"
    try:
        fd = io.open(path)
        try:
            if io.pread(fd, 1, offset):
                return f"{place}: there is no room for a page of the file: make room on the disk", _FAILED
        finally:
            io.close(fd)
    except OSError as error:
        remedy = "put the file back from a copy, or copy what can be read of it (ddrescue) and run mqproc store repair"
        return f"{place} cannot be read: {error.strerror}; {remedy}", CorruptStoreError.exit_code
    return f"{place}: the file was cut while it was read", _FAILED
