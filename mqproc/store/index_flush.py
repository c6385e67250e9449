"""Making index files durable: the index-flusher's half of the engine.

The dispatcher stores entries in another process; what is dirty follows from the newest file's name and item count,
which it publishes, against what was synced last. Read `dispatched` before them: when a pass is `complete`, all entries
of records below it are durable.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mqproc.config import PAGE_BYTES
from mqproc.io import StoreIO
from mqproc.ipc.words import Words
from mqproc.layout import control as words_of
from mqproc.layout import index_file as layout
from mqproc.store.final_syncs import SINGLE_SYNCS_MAX, Syncing
from mqproc.store.index_headers import file_ms, index_file_names

ITEMS_PER_PAGE: Final = PAGE_BYTES // layout.ITEM_SIZE
# A dispatcher that commits a step in the midst of each of so many looks would be faster than any.
_LOOKS_MAX: Final = 1000
_NOTHING_SYNCED: Final = -1


@dataclass(frozen=True, slots=True)
class IndexState:
    """The newest file's name as a time (0 = no file) and its count, as the dispatcher publishes them."""

    file_ms: int
    items: int


def committed_state(words: Words) -> IndexState | None:
    """The index at the dispatcher's last committed step; None when it could not be caught between two steps.

    Name and count stand together in a step's slot. Taken from the two words of the newest file they may belong to two
    files, and a count that is too high would let its items pass for synced.
    """
    for _ in range(_LOOKS_MAX):
        sequence = words[words_of.COMMIT_SEQUENCE]
        slot = sequence & 1
        state = IndexState(words[words_of.COMMIT_INDEX_MS[slot]], words[words_of.COMMIT_INDEX_ITEMS[slot]])
        # The slot is stored to again only after the next step's number has been published.
        if words[words_of.COMMIT_SEQUENCE] == sequence:
            return state
    return None


@dataclass(frozen=True, slots=True)
class IndexPass:
    """What one pass did. `complete`: every entry published before it is durable now. `full_end_ms`: end time of the
    newest full file that was synced, 0 when none was."""

    synced_files: int
    complete: bool
    full_end_ms: int = 0


class IndexFlush:
    """Syncs the index files that changed.

    A new one knows nothing of what recovery or its predecessor left dirty: its first pass syncs all files. A role gives
    its FinalSyncs as `syncs`; after any OSError the same files are dirty still.
    """

    def __init__(self, io: StoreIO, syncs: Syncing, folder: Path) -> None:
        self._io = io
        self._syncs = syncs
        self._folder = folder
        self._synced = IndexState(_NOTHING_SYNCED, 0)

    def pass_(self, state: IndexState, least_pages: int) -> IndexPass:
        """Sync what is due for a state read before; `least_pages` 0 forces everything. Raises OSError."""
        if state == self._synced or state.file_ms == 0:
            return IndexPass(0, complete=True)
        same_file = state.file_ms == self._synced.file_ms
        pages = (state.items - self._synced.items) // ITEMS_PER_PAGE
        if same_file and pages < least_pages:
            return IndexPass(0, complete=False)
        names = self._changed_files(state)
        if len(names) > SINGLE_SYNCS_MAX:
            self._sync_file_system()
        else:
            self._sync_files(names, new_names=not same_file)
        full_end_ms = self._end_ms(names[-2]) if len(names) > 1 else 0
        self._synced = state
        return IndexPass(len(names), complete=True, full_end_ms=full_end_ms)

    def _changed_files(self, state: IndexState) -> list[str]:
        names = index_file_names(self._io, self._folder)
        return [name for name in names if self._synced.file_ms <= file_ms(name) <= state.file_ms]

    def _sync_files(self, names: list[str], *, new_names: bool) -> None:
        for name in names:
            try:
                fd = self._io.open(self._folder / name, write=True)
            except FileNotFoundError:
                continue  # Deleted by retention meanwhile.
            try:
                self._syncs.sync(fd)
            finally:
                self._io.close(fd)
        if new_names:
            self._syncs.sync_folder(self._folder)
            self._syncs.sync_folder(self._folder.parent)

    def _sync_file_system(self) -> None:
        fd = self._io.open(self._folder)
        try:
            self._syncs.sync_file_system(fd)
        finally:
            self._io.close(fd)

    def _end_ms(self, name: str) -> int:
        """End time of a full file; 0 when retention has deleted it meanwhile."""
        try:
            fd = self._io.open(self._folder / name)
        except FileNotFoundError:
            return 0
        try:
            data = self._io.pread(fd, layout.HEADER_SIZE, 0)
        finally:
            self._io.close(fd)
        return int.from_bytes(data[layout.END_TIMESTAMP : layout.END_TIMESTAMP + 8], "big", signed=True)
