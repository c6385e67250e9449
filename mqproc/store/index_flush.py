"""Making index files durable: the index-flusher's half of the engine.

The dispatcher stores entries in another process; what is dirty follows from the newest file's name and item count,
which it publishes, against what was synced last.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mqproc.config import PAGE_BYTES
from mqproc.io import StoreIO
from mqproc.layout import index_file as layout
from mqproc.store.index_files import file_ms, index_file_names

ITEMS_PER_PAGE: Final = PAGE_BYTES // layout.ITEM_SIZE


@dataclass(frozen=True, slots=True)
class IndexState:
    """The newest file's name as a time (0 = no file) and its count, as the dispatcher publishes them."""

    file_ms: int
    items: int


@dataclass(frozen=True, slots=True)
class IndexPass:
    """What one pass did. `complete`: every entry published before it is durable now. `full_end_ms`: end time of the
    newest full file that was synced, 0 when none was."""

    synced_files: int
    complete: bool
    full_end_ms: int = 0


class IndexFlush:
    """Syncs the index files that changed. A new one knows nothing and syncs the newest two files at its first pass.

    The first failed sync raises OSError and is final for the caller.
    """

    def __init__(self, io: StoreIO, folder: Path, now_ns: int) -> None:
        self._io = io
        self._folder = folder
        self._synced = IndexState(-1, 0)
        self.forced_ns = now_ns

    def pass_(self, state: IndexState, least_pages: int, now_ns: int) -> IndexPass:
        """Sync what is due for a state read before; `least_pages` 0 forces everything. Raises OSError."""
        if least_pages == 0:
            self.forced_ns = now_ns
        if state == self._synced or state.file_ms == 0:
            return IndexPass(0, complete=True)
        same_file = state.file_ms == self._synced.file_ms
        pages = (state.items - self._synced.items) // ITEMS_PER_PAGE
        if same_file and pages < least_pages:
            return IndexPass(0, complete=False)
        names = self._changed_files(state)
        for name in names:
            self._sync(name)
        if not same_file:
            self._io.sync_folder(self._folder)
            self._io.sync_folder(self._folder.parent)
        full_end_ms = self._end_ms(names[-2]) if len(names) > 1 else 0
        self._synced = state
        return IndexPass(len(names), complete=True, full_end_ms=full_end_ms)

    def _changed_files(self, state: IndexState) -> list[str]:
        names = [name for name in index_file_names(self._io, self._folder) if file_ms(name) <= state.file_ms]
        if self._synced.file_ms < 0:
            return names[-2:]
        return [name for name in names if file_ms(name) >= self._synced.file_ms]

    def _sync(self, name: str) -> None:
        try:
            fd = self._io.open(self._folder / name, write=True)
        except FileNotFoundError:
            return  # Deleted by retention meanwhile.
        try:
            self._io.sync(fd)
        finally:
            self._io.close(fd)

    def _end_ms(self, name: str) -> int:
        fd = self._io.open(self._folder / name)
        try:
            data = self._io.pread(fd, layout.HEADER_SIZE, 0)
        finally:
            self._io.close(fd)
        return int.from_bytes(data[layout.END_TIMESTAMP : layout.END_TIMESTAMP + 8], "big", signed=True)
