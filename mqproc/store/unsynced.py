"""Files of one folder that a process has changed and nobody has synced: recovery syncs these, and no others.

The whole file system may have much to write that is not the store's, so it is synced only for very many files.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Generic, TypeVar

from mqproc.io import StoreIO
from mqproc.store.final_syncs import SINGLE_SYNCS_MAX

Key = TypeVar("Key", bound=Hashable)


class Unsynced(Generic[Key]):
    """Files at any depth below `folder`, by keys that `path_of` makes paths of."""

    def __init__(self, io: StoreIO, folder: Path, path_of: Callable[[Key], Path]) -> None:
        self._io = io
        self._folder = folder
        self._path_of = path_of
        self._keys: set[Key] = set()

    def note(self, key: Key) -> None:
        """A file's bytes, its length or its name may not be on the disk."""
        # Who works all the time never syncs here, so there is a bound; beyond it single ones are not asked for.
        if len(self._keys) <= SINGLE_SYNCS_MAX:
            self._keys.add(key)

    def sync(self) -> None:
        """Make all of it durable. Raises FailedSyncError."""
        if len(self._keys) > SINGLE_SYNCS_MAX:
            self.sync_all()
        else:
            self._sync_each([self._path_of(key) for key in self._keys])
        self._keys.clear()

    def sync_all(self) -> None:
        """Make the whole file system durable."""
        if self._io.exists(self._folder):
            self._sync_one(self._folder, self._io.sync_file_system)

    def _sync_each(self, paths: list[Path]) -> None:
        folders: set[Path] = set()
        for path in sorted(paths):
            if self._io.exists(path):
                self._sync_one(path, self._io.sync)
            depth = len(path.parts) - len(self._folder.parts)
            folders.update(list(path.parents)[: depth + 1])
        # From below, so that a name is durable only with what it leads to.
        for folder in sorted(folders, reverse=True):
            if self._io.exists(folder):
                self._io.sync_folder(folder)

    def _sync_one(self, path: Path, sync: Callable[[int], None]) -> None:
        fd = self._io.open(path)
        try:
            sync(fd)
        finally:
            self._io.close(fd)
