"""Flush of index files: the index-flusher's part of the engine.

The dispatcher stores entries in another process, so dirty entries follow from the newest file's name and item count,
which it publishes, and the last synced ones. Read `dispatched` before them: after a `complete` pass all entries of
records below it are durable.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mqproc.io.store_io import StoreIO
from mqproc.ipc.words import Words
from mqproc.layout import control
from mqproc.layout import index_file as layout
from mqproc.store.index.files import file_ms, index_file_names
from mqproc.store.sync_guard import SINGLE_SYNCS_MAX, Syncing
from mqproc.util.units import PAGE_BYTES

ITEMS_PER_PAGE: Final = PAGE_BYTES // layout.ITEM_SIZE
# Bound of retries: no dispatcher commits a step during each of them.
_LOOKS_MAX: Final = 1000
_NOTHING_SYNCED: Final = -1


@dataclass(frozen=True, slots=True)
class IndexState:
    """Name of the newest file as a time (0 = none) and its item count, as published."""

    file_ms: int
    items: int


def committed_state(words: Words) -> IndexState | None:
    """The index at the dispatcher's last committed step; None if reads kept racing with commits.

    Name and count come from one slot of a step. The two words of the newest file could belong to different files, and
    a count that is too high would mark unsynced items as synced.
    """
    for _ in range(_LOOKS_MAX):
        sequence = words[control.COMMIT_SEQUENCE]
        slot = sequence & 1
        state = IndexState(words[control.COMMIT_INDEX_MS[slot]], words[control.COMMIT_INDEX_ITEMS[slot]])
        # The slot is reused only after the next step's number has been published.
        if words[control.COMMIT_SEQUENCE] == sequence:
            return state
    return None


@dataclass(frozen=True, slots=True)
class IndexFlushPass:
    """Result of a pass. `complete`: every entry published before it is durable.

    `full_end_ms` is the end time of the newest full file that was synced, 0 for none.
    """

    synced_files: int
    complete: bool
    full_end_ms: int = 0


class IndexFlush:
    """Syncs changed index files.

    A new object does not know what recovery or its predecessor left dirty: its first pass syncs all files. Roles pass
    their SyncGuard as `syncs`; after an OSError the same files are still dirty.
    """

    def __init__(self, io: StoreIO, syncs: Syncing, folder: Path) -> None:
        self._io = io
        self._syncs = syncs
        self._folder = folder
        self._synced = IndexState(_NOTHING_SYNCED, 0)

    def pass_(self, state: IndexState, least_pages: int) -> IndexFlushPass:
        """Sync the due files for a state read before; `least_pages` 0 syncs all. Raises OSError."""
        if state == self._synced or state.file_ms == 0:
            return IndexFlushPass(0, complete=True)
        same_file = state.file_ms == self._synced.file_ms
        pages = (state.items - self._synced.items) // ITEMS_PER_PAGE
        if same_file and pages < least_pages:
            return IndexFlushPass(0, complete=False)
        names = self._changed_files(state)
        if len(names) > SINGLE_SYNCS_MAX:
            self._sync_file_system()
        else:
            self._sync_files(names, new_names=not same_file)
        full_end_ms = self._end_ms(names[-2]) if len(names) > 1 else 0
        self._synced = state
        return IndexFlushPass(len(names), complete=True, full_end_ms=full_end_ms)

    def _changed_files(self, state: IndexState) -> list[str]:
        names = index_file_names(self._io, self._folder)
        return [name for name in names if self._synced.file_ms <= file_ms(name) <= state.file_ms]

    def _sync_files(self, names: list[str], *, new_names: bool) -> None:
        for name in names:
            try:
                fd = self._io.open(self._folder / name, write=True)
            except FileNotFoundError:
                continue  # Deleted by retention.
            try:
                self._syncs.sync(fd)
            finally:
                self._io.close(fd)
        if new_names:
            self._syncs.sync_folder(self._folder)
            self._syncs.sync_folder(self._folder.parent)

    def _sync_file_system(self) -> None:
        with self._io.opened(self._folder) as fd:
            self._syncs.sync_file_system(fd)

    def _end_ms(self, name: str) -> int:
        """End time of a full file; 0 if retention has deleted it."""
        try:
            fd = self._io.open(self._folder / name)
        except FileNotFoundError:
            return 0
        try:
            data = self._io.pread(fd, layout.HEADER_SIZE, 0)
        finally:
            self._io.close(fd)
        return int.from_bytes(data[layout.END_TIMESTAMP : layout.END_TIMESTAMP + 8], "big", signed=True)
