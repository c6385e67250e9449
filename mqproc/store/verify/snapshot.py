"""Snapshot of a store, shared by the workers of one verify: files, positions, log shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from mqproc.errors import CorruptStoreError
from mqproc.io.store_io import StoreIO
from mqproc.kernels.dispatch import IndexEntries
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.layout import index_file
from mqproc.paths import StorePaths
from mqproc.store import topics as deleted_topics
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.index.files import IndexHeader, read_header
from mqproc.store.topics import Topics
from mqproc.store.verify.inventory import Inventory, Queue

# Deleted topics: their records stay in the log until they expire, but belong to no queue

Deleted = dict[Queue, tuple[int, int]]
"""End of the log and next queue offset at each queue's last deletion."""


def read_deleted(io: StoreIO, paths: StorePaths, *, running: bool) -> Deleted:
    """Read deletions from the files, or from a running group's queue table, which is newer."""
    if running:
        return _deletions_in_table(io, paths)
    try:
        deletions = deleted_topics.load_deletions(io, paths)
    except (CorruptStoreError, IsADirectoryError):
        # StateFindings reports the unreadable file.
        return {}
    return {
        (topic, queue_id): (deletion.physical_offset, next_offset)
        for topic, deletion in deletions.items()
        for queue_id, next_offset in enumerate(deletion.next_offsets)
    }


def _deletions_in_table(io: StoreIO, paths: StorePaths) -> Deleted:
    try:
        table = QueueTable(io, paths.queues)
    except (FileNotFoundError, CorruptStoreError):
        return {}
    try:
        found = {table.name(number): table.deletion(number) for number in range(table.count)}
    finally:
        table.close()
    return {queue: deletion for queue, deletion in found.items() if deletion != (0, 0)}


def known_topics(io: StoreIO, paths: StorePaths) -> set[str] | None:
    """Topics of the settings; None if missing or unreadable."""
    topics = Topics(io, paths)
    try:
        topics.load()
    except (CorruptStoreError, IsADirectoryError, msgspec.MsgspecError):
        return None
    return set(topics.names()) or None


# Minimum size of a share, except in small stores.
SHARE_BYTES_MIN = 32 << 20
SHARES_PER_JOB = 4
# Limit of shares × queues: totals of each pair are kept in memory.
TOTALS_MAX = 2_000_000


@dataclass(frozen=True, slots=True)
class LogPositions:
    """Bounds of the log. Records below `dispatched` must be in queues and index.

    None in a store that is not running: the log ends with its records.
    """

    begin: int
    end: int | None = None
    dispatched: int | None = None
    running: bool = False


@dataclass(frozen=True, slots=True)
class Share:
    """Log range. `exact`: a record begins at `start`. Not `compared`: check only records."""

    number: int
    start: int
    stop: int
    exact: bool = False
    compared: bool = True


@dataclass(frozen=True, slots=True)
class IndexFile:
    """An index file and its header. `previous_end_ms`: end of the previous file, −1 = unknown."""

    name: str
    header: IndexHeader
    previous_end_ms: int


@dataclass(slots=True)
class Snapshot:
    """One store at one moment. `delays_ms`: delays of its delay levels, starting with level 1.

    `deleted` distinguishes records of deleted queues from records of new queues of the same name. `entries`:
    kinds of entries in the index: by default at least keys, perhaps tags.
    """

    inventory: Inventory
    positions: LogPositions
    delays_ms: Sequence[int]
    shares: list[Share] = field(default_factory=list)
    index: list[IndexFile] = field(default_factory=list)
    deleted: Deleted = field(default_factory=dict)
    entries: IndexEntries = IndexEntries.KEYS_AND_MARKED_TAGS

    @property
    def queues(self) -> list[Queue]:
        """Queues that have a folder, sorted; they get the first numbers in each worker's table."""
        return sorted(self.inventory.queues)

    @property
    def borders(self) -> NDArray[np.int64]:
        """Starts of the shares and the stop of the last one: int64[shares + 1]."""
        if not self.shares:
            return np.zeros(1, np.int64)
        return np.array([*(share.start for share in self.shares), self.shares[-1].stop], np.int64)


def cut_into_shares(
    io: StoreIO, inventory: Inventory, positions: LogPositions, shares: int, share_bytes: int = SHARE_BYTES_MIN
) -> list[Share]:
    """Cut the written log into at most `shares` contiguous shares of at least `share_bytes`."""
    found = _written_bytes(io, inventory, positions)
    written = [(start, start + size) for start, size in sorted(found.items()) if size]
    total = sum(stop - start for start, stop in written)
    if not total:
        return []
    shares_max = max(1, TOTALS_MAX // max(1, len(inventory.queues)))
    count = max(1, min(shares, shares_max, total // share_bytes))
    size = -(-total // count)
    # Include unwritten segments before written segments: they have lost their data.
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


def _written_bytes(io: StoreIO, inventory: Inventory, positions: LogPositions) -> dict[int, int]:
    """Number of bytes of each segment that may hold records: up to its last written byte."""
    found: dict[int, int] = {}
    for start, size in inventory.segments.items():
        size = min(size, inventory.sizes.segment)
        if positions.end is not None:
            size = min(size, positions.end - start)
        if size > 0:
            found[start] = min(size, _written_end(io, inventory, start))
    return found


def _written_end(io: StoreIO, inventory: Inventory, start: int) -> int:
    """End of the last written range of a segment."""
    end = 0
    with io.opened(inventory.paths.commit_log / f"{start:020d}") as fd:
        while (data := io.next_data(fd, end)) is not None:
            end = io.next_hole(fd, data)
    return end


def read_index_headers(io: StoreIO, inventory: Inventory) -> list[IndexFile]:
    """Read the headers of all index files, oldest first."""
    found: list[IndexFile] = []
    for name in inventory.index:
        with io.opened(inventory.paths.index / name) as fd:
            # Use a read: mapping an unreadable page ends the process.
            header = read_header(as_kernel_array(io.pread(fd, index_file.HEADER_SIZE, 0)))
        header = msgspec.structs.replace(header, count=min(header.count, inventory.sizes.items))
        found.append(IndexFile(name, header, found[-1].header.end_timestamp_ms if found else -1))
    return found
