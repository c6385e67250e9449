"""CommitLog segments with names that contradict their records, after a faulty copy.

The first record of a segment, confirmed by the second, has its physical offset and thus the segment's name. Renames
take two steps, since two segments may have swapped names: each file first gets the right name plus SUFFIX, then all
lose the suffix. After a kill in between, the files are found as misnamed again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from mqproc.io.store_io import Kind, StoreIO, dirty_end
from mqproc.kernels import record_check
from mqproc.kernels.jit.intrinsics import load_be32, load_be64
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.kernels.record_check import checked_size
from mqproc.layout import record
from mqproc.paths import is_deleted_on_nfs, printable_path, segment_name, segment_start

SUFFIX: Final = ".misnamed"


@dataclass(frozen=True, slots=True)
class MisnamedSegment:
    """A file `name` in the log's folder that is the segment at `start`.

    `taken`: another file has that name. `displaces`: that file is empty or was never written, and gives way.
    """

    name: str
    start: int
    taken: bool = False
    displaces: bool = False

    @property
    def right_name(self) -> str:
        return segment_name(self.start)


def find_misnamed(io: StoreIO, folder: Path, segment_size: int) -> list[MisnamedSegment]:
    """Files in the log's folder whose records belong to another segment, ordered by name."""
    found: list[tuple[str, int]] = []
    settled: set[int] = set()
    silent: set[int] = set()
    empty: set[int] = set()
    for entry in io.entries(folder):
        if entry.kind is not Kind.FILE or is_deleted_on_nfs(entry.name):
            continue
        own = segment_start(entry.name)
        if not entry.size:
            if own is not None:
                empty.add(own)
            continue
        start = None
        # Retention of a running group may delete segments.
        with contextlib.suppress(FileNotFoundError):
            start = claimed_start(io, folder / entry.name, segment_size)
        if start is not None and start != own:
            found.append((entry.name, start))
        elif own is not None:
            settled.add(own)
            if start is None:
                silent.add(own)
    misnamed = []
    for name, start in found:
        # A copy whose name is not a segment's displaces no other file.
        displaces = start in empty or (
            start in silent and segment_start(name) is not None and _is_unwritten(io, folder, start)
        )
        misnamed.append(MisnamedSegment(name, start, taken=start in settled and not displaces, displaces=displaces))
        settled.add(start)
        silent.discard(start)
        empty.discard(start)
    return misnamed


def _is_unwritten(io: StoreIO, folder: Path, start: int) -> bool:
    """Whether a segment's file contains only zeros."""
    with io.opened(folder / segment_name(start)) as fd:
        return dirty_end(io, fd, 0) == 0


def claimed_start(io: StoreIO, path: Path, segment_size: int) -> int | None:
    """Segment start according to a file's first record; None if damaged or contradicted.

    A record's own position may lie outside its CRC, so a contradiction is damage in the first record.
    """
    with io.opened(path) as fd:
        first = _size_and_start(io, fd, 0, segment_size)
        second = None if first is None else _size_and_start(io, fd, first[0], segment_size)
    if first is None or first[1] < 0 or first[1] % segment_size:
        return None
    return first[1] if second is None or second[1] == first[1] else None


def _size_and_start(io: StoreIO, fd: int, at: int, segment_size: int) -> tuple[int, int] | None:
    """Size of an intact record at `at` of a file, and the file's start in the log by it."""
    head = as_kernel_array(np.frombuffer(io.pread(fd, record.FIXED_SIZE_V4, at), np.uint8))
    if len(head) < record.FIXED_SIZE_V4:
        return None
    size, place = int(load_be32(head, record.TOTAL_SIZE)), int(load_be64(head, record.PHYSICAL_OFFSET))
    # Other entries, such as a BLANK, may be as long as the segment.
    is_record = load_be32(head, record.MAGIC) in (record.MAGIC_V1, record.MAGIC_V2)
    if not is_record or not len(head) <= size <= segment_size - at:
        return None
    whole = as_kernel_array(np.frombuffer(io.pread(fd, size, at), np.uint8))
    return (size, place - at) if checked_size(whole, 0, len(whole), place, record_check.VERIFY_ALL) == size else None


def begin_rename(io: StoreIO, folder: Path, misnamed: MisnamedSegment) -> None:
    """First step for one file: rename it to the right name with SUFFIX."""
    if misnamed.displaces:
        io.unlink(folder / misnamed.right_name)
    target = folder / (misnamed.right_name + SUFFIX)
    if misnamed.name != target.name:
        io.rename(folder / misnamed.name, target)


def finish_renames(io: StoreIO, folder: Path) -> None:
    """Second step for all files: remove SUFFIX."""
    for name in io.names(folder):
        target = folder / name.removesuffix(SUFFIX)
        if name.endswith(SUFFIX) and segment_start(target.name) is not None and not io.exists(target):
            io.rename(folder / name, target)


def rename_misnamed(
    io: StoreIO, folder: Path, misnamed: Sequence[MisnamedSegment], report: Callable[[str], None]
) -> None:
    """Rename the misnamed segments whose right names are free."""
    for each in (each for each in misnamed if not each.taken):
        begin_rename(io, folder, each)
        report(f"{printable_path(folder / each.name)}: its records belong to {each.right_name}, renamed")
    finish_renames(io, folder)


def conflicting_segments(misnamed: Iterable[MisnamedSegment]) -> list[MisnamedSegment]:
    """Duplicate segments that also occupy the name of a third one."""
    return [each for each in misnamed if each.taken and segment_start(each.name) is not None]
