"""CommitLog segments that lie under another name than their records tell, as a copy that went wrong leaves them.

The first record of a segment is intact and says where in the log it lies, and the second one agrees: that is the
segment's name. Names are put right in two steps, since two segments may have each other's: all that move get the right
name and SUFFIX, and lose the suffix then. What a kill leaves between them is found as any other wrong name is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from mqproc.io import Kind, StoreIO
from mqproc.kernels import scan
from mqproc.kernels.intrinsics import load_be32, load_be64
from mqproc.kernels.record_check import checked_size
from mqproc.kernels.views import as_kernel_array
from mqproc.layout import record
from mqproc.paths import segment_name, segment_start, shown
from mqproc.store.clearing import dirty_end

SUFFIX: Final = ".misnamed"


@dataclass(frozen=True, slots=True)
class Misnamed:
    """A file `name` in the log's folder that is the segment at `start`; `taken` when another one has that place.

    `displaces`: the other one has never been written to, as one that was made ready, or has no bytes, and gives the
    place up.
    """

    name: str
    start: int
    taken: bool = False
    displaces: bool = False

    @property
    def right_name(self) -> str:
        return segment_name(self.start)


def find_misnamed(io: StoreIO, folder: Path, segment_size: int) -> list[Misnamed]:
    """Files in the log's folder, in the order of their names, whose records belong to another segment."""
    found: list[tuple[str, int]] = []
    settled: set[int] = set()
    silent: set[int] = set()
    empty: set[int] = set()
    for entry in io.entries(folder):
        if entry.kind is not Kind.FILE:
            continue
        own = segment_start(entry.name)
        if not entry.size:
            if own is not None:
                empty.add(own)
            continue
        start = None
        # Retention deletes segments of a group that runs.
        with contextlib.suppress(FileNotFoundError):
            start = start_told(io, folder / entry.name, segment_size)
        if start is not None and start != own:
            found.append((entry.name, start))
        elif own is not None:
            settled.add(own)
            if start is None:
                silent.add(own)
    misnamed = []
    for name, start in found:
        # A copy under a name of its own takes nobody's place.
        displaces = start in empty or (
            start in silent and segment_start(name) is not None and _is_unwritten(io, folder, start)
        )
        misnamed.append(Misnamed(name, start, taken=start in settled and not displaces, displaces=displaces))
        settled.add(start)
        silent.discard(start)
        empty.discard(start)
    return misnamed


def _is_unwritten(io: StoreIO, folder: Path, start: int) -> bool:
    """Whether a segment's file has nothing but zeros."""
    fd = io.open(folder / segment_name(start))
    try:
        return dirty_end(io, fd, 0) == 0
    finally:
        io.close(fd)


def start_told(io: StoreIO, path: Path, segment_size: int) -> int | None:
    """Where the segment begins that an intact record at a file's begin tells of; None without one.

    None too where an intact record behind it tells of another: no CRC need cover what a record says of its own place,
    so it is damage in the first one.
    """
    fd = io.open(path)
    try:
        first = _size_and_start(io, fd, 0, segment_size)
        second = None if first is None else _size_and_start(io, fd, first[0], segment_size)
    finally:
        io.close(fd)
    if first is None or first[1] < 0 or first[1] % segment_size:
        return None
    return first[1] if second is None or second[1] == first[1] else None


def _size_and_start(io: StoreIO, fd: int, at: int, segment_size: int) -> tuple[int, int] | None:
    """Bytes of an intact record at `at` in a file, and where that begins in the log by what the record says."""
    head = as_kernel_array(np.frombuffer(io.pread(fd, record.FIXED_SIZE_V4, at), np.uint8))
    if len(head) < record.FIXED_SIZE_V4:
        return None
    size, place = int(load_be32(head, record.TOTAL_SIZE)), int(load_be64(head, record.PHYSICAL_OFFSET))
    # What is no record, as a BLANK, may be as long as the segment.
    is_record = load_be32(head, record.MAGIC) in (record.MAGIC_V1, record.MAGIC_V2)
    if not is_record or not len(head) <= size <= segment_size - at:
        return None
    whole = as_kernel_array(np.frombuffer(io.pread(fd, size, at), np.uint8))
    return (size, place - at) if checked_size(whole, 0, len(whole), place, scan.VERIFY_ALL) == size else None


def move(io: StoreIO, folder: Path, misnamed: Misnamed) -> None:
    """The first step, for one file."""
    if misnamed.displaces:
        io.unlink(folder / misnamed.right_name)
    target = folder / (misnamed.right_name + SUFFIX)
    if misnamed.name != target.name:
        io.rename(folder / misnamed.name, target)


def settle(io: StoreIO, folder: Path) -> None:
    """The second step, for all that have been moved."""
    for name in io.names(folder):
        target = folder / name.removesuffix(SUFFIX)
        if name.endswith(SUFFIX) and segment_start(target.name) is not None and not io.exists(target):
            io.rename(folder / name, target)


def put_right(io: StoreIO, folder: Path, misnamed: Sequence[Misnamed], report: Callable[[str], None]) -> None:
    """Give segments that no other one stands in the way of their names."""
    for each in (each for each in misnamed if not each.taken):
        move(io, folder, each)
        report(f"{shown(folder / each.name)}: its records belong to {each.right_name}, renamed")
    settle(io, folder)


def in_the_way(misnamed: Iterable[Misnamed]) -> list[Misnamed]:
    """Segments that are there twice, and have the name of a third one."""
    return [each for each in misnamed if each.taken and segment_start(each.name) is not None]
