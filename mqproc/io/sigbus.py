"""SIGBUS handler: reports the file of an inaccessible mapped page before the process dies.

SIGBUS means that the disk cannot read the page, that the file was truncated meanwhile, or that a store found no space,
as on a copy-on-write file system. The faulting access cannot continue, as it would fault again. A process that only
reads, and detects damage by CRCs or by `zero_filled_pages`, may get zeros in place of the page.
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
from mqproc.paths import printable_path

_FAILED: Final = 1
_SA_SIGINFO: Final = 4
_ADDRESS: Final = 16
"""Offset of the address in `siginfo_t` on 64-bit machines."""
_Handler: Final = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_libc = ctypes.CDLL(None)
_libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)


@dataclass(frozen=True, slots=True)
class ZeroFill:
    """Replace inaccessible pages of read-only maps by zeros, for files in some folders.

    `report` is called once per file with the cause, and the consequence that `folders` states.
    """

    folders: Mapping[Path, str]
    report: Callable[[str], object]


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
"""Keeps the handler alive: the C library has only its address."""
_zeros_put = 0


def zero_filled_pages() -> int:
    """Number of pages that this process has replaced by zeros."""
    return _zeros_put


def install_sigbus_handler(report: Callable[[str, int], object], zeros: ZeroFill | None = None) -> None:
    """Call `report` with a message and exit code before a SIGBUS ends this process.

    `report` may end the process itself. Forked processes die without it: their parent reports it. With `zeros` the
    process continues where they can replace the page.
    """
    mine = os.getpid()
    meanings = {folder.resolve(): meaning for folder, meaning in zeros.folders.items()} if zeros else {}
    reported: set[Path] = set()
    retried: set[int] = set()

    def lost(_number: int, info: int, _context: int) -> None:
        # A Python signal handler would run in the interpreter, which never resumes from this access.
        address = ctypes.c_size_t.from_address(info + _ADDRESS).value
        place = _place_of(address) if os.getpid() == mine else None
        if zeros and place and place.is_read_only and place.path.parent in meanings:
            if address not in retried and _can_be_read(place):
                retried.add(address)  # A transient error.
                return
            if StoreIO().map_zero_page(address):
                global _zeros_put
                _zeros_put += 1
                if place.path not in reported:
                    reported.add(place.path)
                    zeros.report(f"{_cause(place)[0]}; {meanings[place.path.parent]}")
                return
        _libc.signal(signal.SIGBUS, None)
        # To this thread, on return from this handler. Other threads, such as numpy's, would die at once.
        signal.raise_signal(signal.SIGBUS)
        if os.getpid() == mine:
            report(*(_cause(place) if place else ("a page of memory is inaccessible", _FAILED)))

    global _kept
    _kept = _SigAction(_Handler(lost), flags=_SA_SIGINFO)
    _libc.sigaction(signal.SIGBUS, ctypes.byref(_kept), None)


def _place_of(address: int) -> _Place | None:
    """The mapped file at an address; None when unknown, as without `/proc`.

    Raises nothing: the access would fault again.
    """
    with contextlib.suppress(OSError, ValueError):
        # File names may contain arbitrary bytes, including line separators of other encodings.
        for line in os.fsdecode(Path("/proc/self/maps").read_bytes()).removesuffix("\n").split("\n"):
            span, mode, offset, _device, _inode, *name = line.split(maxsplit=5)
            start, stop = (int(part, 16) for part in span.split("-"))
            if start <= address < stop and name:
                return _Place(Path(name[0]), int(offset, 16) + address - start, "w" not in mode)
    return None


def _byte_of(place: _Place) -> bytes:
    """The file's byte there, empty after its end. Raises OSError."""
    io = StoreIO()
    with io.opened(place.path) as fd:
        return io.pread(fd, 1, place.offset)


def _can_be_read(place: _Place) -> bool:
    try:
        return bool(_byte_of(place))
    except OSError:
        return False


def _cause(lost: _Place) -> tuple[str, int]:
    """Message and exit code."""
    place = f"{printable_path(lost.path)}: offset {lost.offset:,}"
    try:
        if _byte_of(lost):
            if lost.is_read_only:
                return f"{place} could not be read", CorruptStoreError.exit_code
            return f"{place}: no space for a page of the file: free space on the disk", _FAILED
    except OSError as error:
        remedy = "restore the file from a copy, or copy its readable part (ddrescue) and run mqproc store repair"
        return f"{place} cannot be read: {error.strerror}; {remedy}", CorruptStoreError.exit_code
    return f"{place}: the file was truncated while it was read", _FAILED
