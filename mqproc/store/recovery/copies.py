"""Copies of what a repair is about to change, kept under the store's own names.

    mqproc/repaired/TIME/repair.json    what was found, planned, and changed
    mqproc/repaired/TIME/files/         every file that was changed, removed or moved, as it was before

So a repair is taken back, as long as nothing has run since, by deleting what `repair.json` lists as made, and the names
that it lists files as moved to, and copying `files/` over the store.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec

from mqproc.io import Kind, StoreIO
from mqproc.paths import StorePaths
from mqproc.store.recovery.dry_run_io import Change

_CHUNK: Final = 1 << 20
# Where a second name for a file cannot be made, its bytes are copied.
_NO_LINK: Final = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP})


class Copies:
    """One repair's folder of copies. Nobody else changes the store."""

    def __init__(self, io: StoreIO, paths: StorePaths, folder: Path) -> None:
        self._io = io
        self._paths = paths
        self.folder = folder

    @staticmethod
    def place(folder: Path, paths: StorePaths, path: Path) -> Path:
        """Where a file's copy lies in a folder of copies."""
        return folder / "files" / path.relative_to(paths.root)

    def keep(self, changes: Iterable[Change], document: dict[str, Any]) -> None:
        """Copy what will change and write down what that is, all durable. Raises OSError, then nothing is left."""
        self._io.make_folder(self.folder, mode=0o700)
        try:
            # A file that is moved is told again when another one gets its name.
            differing = [change for change in changes if change.what != "made"]
            stored_to = {change.path for change in differing if change.in_place}
            for path in dict.fromkeys(change.path for change in differing):
                self._keep(path, in_place=path in stored_to)
            text = msgspec.json.format(msgspec.json.encode(document), indent=1)
            self._io.write_file_atomically(self.folder / "repair.json", text, mode=0o600)
            self._sync()
        except OSError:
            self._io.remove_folder(self.folder)
            raise

    def _keep(self, path: Path, *, in_place: bool) -> None:
        entry = self._io.entry(path)
        if entry is None or entry.kind is not Kind.FILE:
            # A folder that is moved as a whole.
            return
        target = self.place(self.folder, self._paths, path)
        self._io.make_folder(target.parent, mode=0o700, sync=False)
        if in_place:
            self._copy(path, target)
            return
        try:
            # The name will stand for another file, or none; the bytes stay as they are.
            self._io.keep_link(path, target)
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            self._copy(path, target)

    def _copy(self, path: Path, target: Path) -> None:
        """Copy a file, what was never written of it left out."""
        source = self._io.open(path)
        try:
            copy = self._io.open(target, write=True, create=True, mode=0o600)
            try:
                size = self._io.size(source)
                self._io.set_size(copy, size)
                at = 0
                while (data := self._io.next_data(source, at)) is not None:
                    at = self._io.next_hole(source, data)
                    for place in range(data, at, _CHUNK):
                        self._io.pwrite(copy, self._io.pread(source, min(_CHUNK, at - place), place), place)
            finally:
                self._io.close(copy)
        finally:
            self._io.close(source)

    def _sync(self) -> None:
        fd = self._io.open(self.folder)
        try:
            self._io.sync_file_system(fd)
        finally:
            self._io.close(fd)
