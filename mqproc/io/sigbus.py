"""A mapped page that cannot be had ends a process by SIGBUS, without a word: here it names the file before.

So it is where a disk cannot read what a file has there, where the file was cut meanwhile, and where a store to a page
finds no room, as on a file system that takes new room for each write. Nobody can go on from there: whatever touched the
page would touch it again. But who only reads, and knows damage by its CRCs, or asks for it (`zeros_put`), may be given
zeros for the page.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mqproc.errors import CorruptStoreError
from mqproc.io.store_io import StoreIO
from mqproc.paths import shown

_FAILED: Final = 1
_SA_SIGINFO: Final = 4
_ADDRESS: Final = 16
"""Where `siginfo_t` has the address, on machines of 64 bits."""
_Handler: Final = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_libc = ctypes.CDLL(None)
_libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)


@dataclass(frozen=True, slots=True)
class Zeros:
    """Pages of files of some folders that are mapped for reading only are zeros where they cannot be had.

    `tell` is called with what is wrong, once for each file, and with what `folders` say that it means.
    """

    folders: Mapping[Path, str]
    tell: Callable[[str], object]


@dataclass(frozen=True, slots=True)
class _Place:
    path: Path
    offset: int
    is_read_only: bool


class _SigAction(ctypes.Structure):
    _fields_ = (
        ("handler", _Handler),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_kept: _SigAction | None = None
"""The C library knows the handler by its address only."""
_zeros_put = 0


def zeros_put() -> int:
    """How many pages this process has got zeros for so far."""
    return _zeros_put


def name_lost_pages(tell: Callable[[str, int], object], zeros: Zeros | None = None) -> None:
    """Have `tell` called with what is wrong and an exit code for it, before this process dies by the signal.

    It may end the process itself. Who is forked dies without it: its parent is to tell. With `zeros` the process goes
    on where these can stand in.
    """
    mine = os.getpid()
    meanings = {folder.resolve(): meaning for folder, meaning in zeros.folders.items()} if zeros else {}
    told: set[Path] = set()
    again: set[int] = set()

    def lost(_number: int, info: int, _context: int) -> None:
        # Python's own handlers run when the interpreter comes to it, which it never would: this is within the access.
        address = ctypes.c_size_t.from_address(info + _ADDRESS).value
        place = _place_of(address) if os.getpid() == mine else None
        if zeros and place and place.is_read_only and place.path.parent in meanings:
            if address not in again and _can_be_read(place):
                again.add(address)  # The error has passed, if this was one that does.
                return
            if StoreIO().put_zeros(address):
                global _zeros_put
                _zeros_put += 1
                if place.path not in told:
                    told.add(place.path)
                    zeros.tell(f"{_why(place)[0]}; {meanings[place.path.parent]}")
                return
        _libc.signal(signal.SIGBUS, None)
        # For this thread, which has it when this handler is left: any other, as numpy's, would end the process at once.
        signal.raise_signal(signal.SIGBUS)
        if os.getpid() == mine:
            tell(*(_why(place) if place else ("a page of memory could not be had", _FAILED)))

    global _kept
    _kept = _SigAction(_Handler(lost), flags=_SA_SIGINFO)
    _libc.sigaction(signal.SIGBUS, ctypes.byref(_kept), None)


def _place_of(address: int) -> _Place | None:
    """What file has its page at an address; None where nobody can tell, as without `/proc`.

    Raises nothing: the access would come here again and again.
    """
    with contextlib.suppress(OSError, ValueError):
        # A file's name need not be text, and may have what ends a line elsewhere.
        for line in os.fsdecode(Path("/proc/self/maps").read_bytes()).removesuffix("\n").split("\n"):
            span, mode, offset, _device, _inode, *name = line.split(maxsplit=5)
            start, stop = (int(part, 16) for part in span.split("-"))
            if start <= address < stop and name:
                return _Place(Path(name[0]), int(offset, 16) + address - start, "w" not in mode)
    return None


def _byte_of(place: _Place) -> bytes:
    """What a file has there now: a byte, or nothing behind its end. Raises OSError."""
    io = StoreIO()
    fd = io.open(place.path)
    try:
        return io.pread(fd, 1, place.offset)
    finally:
        io.close(fd)


def _can_be_read(place: _Place) -> bool:
    try:
        return bool(_byte_of(place))
    except OSError:
        return False


def _why(lost: _Place) -> tuple[str, int]:
    place = f"{shown(lost.path)}: offset {lost.offset:,}"
    try:
        if _byte_of(lost):
            if lost.is_read_only:
                return f"{place} could not be read", CorruptStoreError.exit_code
            return f"{place}: there is no room for a page of the file: make room on the disk", _FAILED
    except OSError as error:
        remedy = "put the file back from a copy, or copy what can be read of it (ddrescue) and run mqproc store repair"
        return f"{place} cannot be read: {error.strerror}; {remedy}", CorruptStoreError.exit_code
    return f"{place}: the file was cut while it was read", _FAILED
