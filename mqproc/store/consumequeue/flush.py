"""Flush of ConsumeQueue files: the cq-flusher's part of the engine.

The dispatcher writes units in another process, so dirty units follow from the last synced offset and the current
`max_offset` in the queue table. Read `dispatched` before a pass: after a `complete` pass all units of records below it
are durable.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.io.store_io import StoreIO
from mqproc.layout import queue_table as table_layout
from mqproc.layout.consume_queue import UNIT_SIZE
from mqproc.paths import segment_name, segment_start
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.sync_guard import SINGLE_SYNCS_MAX, Syncing
from mqproc.util.units import PAGE_BYTES

# Synced offset of a queue that existed before the flusher.
_UNKNOWN: Final = -1


@dataclass(frozen=True, slots=True)
class QueueFlushPass:
    """Result of a pass. `complete`: every unit published before the pass is durable.

    `waiting_queues` have too few dirty pages for this pass.
    """

    synced_files: int
    synced_queues: int
    waiting_queues: int
    whole_file_system: bool

    @property
    def complete(self) -> bool:
        return self.waiting_queues == 0


class ConsumeQueueFlush:
    """Syncs the ConsumeQueue files of all queues in passes.

    A new object does not know the state of its predecessor: its first pass syncs the whole file system if there is any
    queue. Roles pass their SyncGuard as `syncs`; after an OSError the same queues are still dirty.
    """

    def __init__(self, io: StoreIO, syncs: Syncing, folder: Path, file_bytes: int, table: QueueTable) -> None:
        self._io = io
        self._syncs = syncs
        self._folder = folder
        self._file_bytes = file_bytes
        self._table = table
        self._synced = np.full(table.capacity, 0, np.int64)
        self._synced[: table.count] = _UNKNOWN

    @property
    def synced(self) -> NDArray[np.int64]:
        """int64[queues]: durable end of each queue by number; a view."""
        return self._synced[: self._table.count]

    def pass_(self, least_pages: int) -> QueueFlushPass:
        """Sync every queue with at least `least_pages` dirty pages; 0 syncs all. Raises OSError."""
        max_offsets = self._table.column(table_layout.MAX_OFFSET)
        synced = self._synced[: len(max_offsets)]
        # A deleted queue has no files, so it has nothing to sync.
        states = self._table.column(table_layout.STATE)[: len(max_offsets)]
        changed = (max_offsets != synced) & (states == table_layout.STATE_LIVE)
        due = changed & self._enough(synced, max_offsets, least_pages)
        numbers = np.flatnonzero(due)
        files = self._sync(numbers, max_offsets) if len(numbers) else 0
        self._synced[numbers] = max_offsets[numbers]
        return QueueFlushPass(
            synced_files=max(files, 0),
            synced_queues=len(numbers),
            waiting_queues=int(np.count_nonzero(changed)) - len(numbers),
            whole_file_system=files < 0,
        )

    def _enough(self, synced: NDArray[np.int64], written: NDArray[np.int64], least_pages: int) -> NDArray[np.bool_]:
        """Whether enough dirty pages lie between two offsets, as in RocketMQ; full files count."""
        first = synced * UNIT_SIZE
        stop = written * UNIT_SIZE
        pages = stop % self._file_bytes // PAGE_BYTES - first % self._file_bytes // PAGE_BYTES
        other_file = stop // self._file_bytes != first // self._file_bytes
        enough: NDArray[np.bool_] = other_file | (pages >= least_pages) | (synced == _UNKNOWN)
        return enough

    def _sync(self, numbers: NDArray[np.int64], max_offsets: NDArray[np.int64]) -> int:
        """Sync the files of these queues; returns their number, −1 for the whole file system."""
        if self._synced[numbers].min() == _UNKNOWN:
            return self._sync_file_system()
        paths: list[tuple[Path, bool]] = []
        for number in numbers.tolist():
            paths += self._dirty_files(number, int(self._synced[number]), int(max_offsets[number]))
            if len(paths) > SINGLE_SYNCS_MAX:
                return self._sync_file_system()
        return self._sync_files(paths)

    def _dirty_files(self, number: int, synced: int, written: int) -> Iterator[tuple[Path, bool]]:
        """(path, whether its name may be new) of the files of units [synced, written)."""
        topic, queue_id = self._table.name(number)
        folder = self._folder / topic / str(queue_id)
        # A deleted and newly created queue has new files, whatever its offsets.
        begin = self._table.first_offset(number) * UNIT_SIZE
        first = synced * UNIT_SIZE // self._file_bytes * self._file_bytes
        stop = written * UNIT_SIZE
        if stop - first > SINGLE_SYNCS_MAX * self._file_bytes or synced == 0:
            # A queue need not begin at 0: list the files.
            found = (segment_start(name) for name in self._io.names(folder))
            starts = [start for start in found if start is not None and first <= start < stop]
        else:
            starts = list(range(first, stop, self._file_bytes))
        for start in starts:
            yield folder / segment_name(start), max(start, begin) >= synced * UNIT_SIZE

    def _sync_files(self, paths: list[tuple[Path, bool]]) -> int:
        folders: set[Path] = set()
        for path, is_new in paths:
            try:
                fd = self._io.open(path, write=True)
            except FileNotFoundError:
                continue  # Deleted by retention.
            try:
                self._syncs.sync(fd)
            finally:
                self._io.close(fd)
            if is_new:
                folders.update((path.parent, path.parent.parent, self._folder))
        if folders:
            folders.add(self._folder.parent)
        for folder in sorted(folders):
            self._sync_folder(folder)
        return len(paths)

    def _sync_folder(self, folder: Path) -> None:
        try:
            self._syncs.sync_folder(folder)
        except FileNotFoundError:
            return  # The topic was deleted.

    def _sync_file_system(self) -> int:
        try:
            fd = self._io.open(self._folder)
        except FileNotFoundError:
            return 0  # Nothing was ever written.
        try:
            self._syncs.sync_file_system(fd)
        finally:
            self._io.close(fd)
        return -1
