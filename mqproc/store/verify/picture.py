"""What every worker of one verify knows: files, positions at the beginning, shares of the log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from mqproc.io import StoreIO
from mqproc.kernels.views import as_kernel_array
from mqproc.layout import index_file
from mqproc.store.index_headers import IndexHeader, read_header
from mqproc.store.verify.deletions import Deleted
from mqproc.store.verify.inventory import Inventory, Queue

# Shares are smaller than this only in small stores.
SHARE_BYTES_MIN = 32 << 20
SHARES_PER_JOB = 4
# Totals of all queues for each share are kept.
TOTALS_MAX = 2_000_000


@dataclass(frozen=True, slots=True)
class Positions:
    """Where the log is looked at: records of [begin, end); those below `dispatched` must be in queues and index.

    None: not known, as nothing runs; the log then ends where its records do.
    """

    begin: int
    end: int | None = None
    dispatched: int | None = None
    running: bool = False


@dataclass(frozen=True, slots=True)
class Share:
    """Log positions [start, stop); `exact`: a record begins at `start`. Without `compared` only records are checked."""

    number: int
    start: int
    stop: int
    exact: bool = False
    compared: bool = True


@dataclass(frozen=True, slots=True)
class IndexFile:
    """An index file as its header told at the beginning. `previous_end_ms`: when the one before ended, −1 = unknown."""

    name: str
    header: IndexHeader
    previous_end_ms: int


@dataclass(slots=True)
class Picture:
    """One store at one moment. `delays_ms` are those of its delay levels, the first level's first.

    `deleted` tells records of deleted queues from those of queues that have their names now.
    """

    inventory: Inventory
    positions: Positions
    delays_ms: Sequence[int]
    shares: list[Share] = field(default_factory=list)
    index: list[IndexFile] = field(default_factory=list)
    deleted: Deleted = field(default_factory=dict)

    @property
    def queues(self) -> list[Queue]:
        """All queues that have a folder, sorted; the first numbers of every worker's table."""
        return sorted(self.inventory.queues)

    @property
    def borders(self) -> NDArray[np.int64]:
        """Where shares begin, and where the last one ends: int64[shares + 1]."""
        if not self.shares:
            return np.zeros(1, np.int64)
        return np.array([*(share.start for share in self.shares), self.shares[-1].stop], np.int64)


def cut_into_shares(
    io: StoreIO, inventory: Inventory, positions: Positions, shares: int, share_bytes: int = SHARE_BYTES_MIN
) -> list[Share]:
    """The written part of the log in so many shares, or fewer of `share_bytes`; in order, without gaps between them."""
    found = _written(io, inventory, positions)
    written = [(start, start + size) for start, size in sorted(found.items()) if size]
    total = sum(stop - start for start, stop in written)
    if not total:
        return []
    most = max(1, TOTALS_MAX // max(1, len(inventory.queues)))
    count = max(1, min(shares, most, total // share_bytes))
    size = -(-total // count)
    # A segment of which nothing is written, before others that are, lacks what it had: it is looked at too.
    starts = [min(found)]
    taken = 0
    for start, stop in written:
        while taken + (stop - start) > size:
            start += size - taken
            taken = 0
            starts.append(start)
        taken += stop - start
    end = written[-1][1]
    dispatched = positions.dispatched
    if dispatched is not None and starts[0] < dispatched < end:
        starts = sorted({*starts, dispatched})
    segment = inventory.sizes.segment
    return [
        Share(
            number,
            start,
            stop,
            exact=start % segment == 0 or start in (dispatched, positions.begin),
            compared=dispatched is None or start < dispatched,
        )
        for number, (start, stop) in enumerate(zip(starts, [*starts[1:], end], strict=True))
    ]


def _written(io: StoreIO, inventory: Inventory, positions: Positions) -> dict[int, int]:
    """By segment, how many of its bytes may hold records: space that was never written has none."""
    found: dict[int, int] = {}
    for start, size in inventory.segments.items():
        size = min(size, inventory.sizes.segment)
        if positions.end is not None:
            size = min(size, positions.end - start)
        if size > 0:
            found[start] = min(size, _written_end(io, inventory, start))
    return found


def _written_end(io: StoreIO, inventory: Inventory, start: int) -> int:
    """End of the last written range of a segment, in it."""
    fd = io.open(inventory.paths.commit_log / f"{start:020d}")
    end = 0
    try:
        while (data := io.next_data(fd, end)) is not None:
            end = io.next_hole(fd, data)
    finally:
        io.close(fd)
    return end


def read_index_headers(io: StoreIO, inventory: Inventory) -> list[IndexFile]:
    """The headers of all index files, oldest first. Counts are of this moment."""
    found: list[IndexFile] = []
    for name in inventory.index:
        fd = io.open(inventory.paths.index / name)
        try:
            # By a call: a map of what cannot be read ends the process.
            header = read_header(as_kernel_array(io.pread(fd, index_file.HEADER_SIZE, 0)))
        finally:
            io.close(fd)
        header = msgspec.structs.replace(header, count=min(header.count, inventory.sizes.items))
        found.append(IndexFile(name, header, found[-1].header.end_timestamp_ms if found else -1))
    return found
