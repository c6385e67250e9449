"""One index file from the shares of the log that have its entries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mqproc.io import StoreIO
from mqproc.layout.index_file import FIRST_ITEM
from mqproc.store.index_files import IndexFiles
from mqproc.store.index_headers import IndexHeader
from mqproc.store.verify.log_pass import LogShare, Scanner
from mqproc.store.verify.picture import Picture

Entries = tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]
"""Key hashes, log positions, store times."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Entries [skip, skip + take) of the log positions [begin, end), where `faults` are known to have no records."""

    begin: int
    end: int
    faults: Sequence[tuple[int, int]]
    skip: int
    take: int


@dataclass(frozen=True, slots=True)
class Built:
    """A file: its entries, and the store time of the first one."""

    entries: int
    first_stored_ms: int


def pieces_of_files(shares: Sequence[LogShare], items: int) -> Iterator[list[Piece]]:
    """The pieces of each index file of `items` items, in order; from the second file on with the entry before it."""
    capacity = items - FIRST_ITEM
    total = sum(found.entries for found in shares)
    for first in range(0, total, capacity):
        yield list(_pieces(shares, max(0, first - 1), min(total, first + capacity)))


def _pieces(shares: Sequence[LogShare], first: int, stop: int) -> Iterator[Piece]:
    before = 0
    for found in shares:
        low, high = max(first, before), min(stop, before + found.entries)
        if low < high and found.begin is not None:
            faults = [(fault.start, fault.stop) for fault in found.faults]
            yield Piece(found.begin, found.end, faults, low - before, high - low)
        before += found.entries


class IndexBuild:
    """Builds one file in a folder of its own."""

    def __init__(self, io: StoreIO, picture: Picture, folder: Path) -> None:
        sizes = picture.inventory.sizes
        io.remove_folder(folder)
        self._scanner = Scanner(io, picture)
        self._files = IndexFiles(io, folder, sizes.slots, sizes.items)
        self._behind: IndexHeader | None = None
        self._built = Built(0, 0)

    def run(self, pieces: Sequence[Piece], *, is_first: bool) -> Built:
        """Put the entries of all pieces; of a file that is not the first one the first of them belongs to another."""
        entries = (each for piece in pieces for each in self._entries(piece))
        for hashes, offsets, times in entries:
            at = 0
            if not is_first and self._behind is None:
                self._behind = IndexHeader(0, int(times[0]), 0, int(offsets[0]), 0, 0)
                at = 1
            if at < len(hashes):
                self._put(hashes[at:], offsets[at:], times[at:])
        self._files.sync()
        self._files.close()
        self._scanner.views.close()
        return self._built

    def _entries(self, piece: Piece) -> Iterator[Entries]:
        skip, left = piece.skip, piece.take
        for result in self._scanner.walk(piece.begin, piece.end, piece.faults):
            low, high = min(skip, result.entries), min(skip + left, result.entries)
            if low < high:
                yield result.hashes[low:high], result.offsets[low:high], result.times[low:high]
            skip -= low
            left -= high - low
            if not left:
                return

    def _put(self, hashes: NDArray[np.int32], offsets: NDArray[np.int64], times: NDArray[np.int64]) -> None:
        if not self._built.entries:
            if self._behind is not None:
                self._files.begin_behind(self._behind, int(times[0]))
            self._built = Built(0, int(times[0]))
        self._files.put(hashes, offsets, times, len(hashes))
        self._built = Built(self._built.entries + len(hashes), self._built.first_stored_ms)
