"""The first failed sync of a store is its last.

After a failed sync the kernel takes the pages for clean: another one would succeed although the data is lost. So when
one role's sync has failed nobody syncs any more, and no position that stands for durable data moves. The errno in the
control file tells every role at once, the file `mqproc/read_only` every later group, until the store is repaired.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Protocol

from mqproc.io import FailedSyncError, StoreIO
from mqproc.ipc.words import Words
from mqproc.layout import control as words_of
from mqproc.paths import StorePaths

SINGLE_SYNCS_MAX: Final = 64
"""More dirty files than this are synced with their whole file system: 22 ms for 4,000 files."""

# These come from opening a folder, never from a sync: the folder has been deleted, or descriptors have run out.
_OF_OPENING: Final = frozenset({errno.ENOENT, errno.EMFILE, errno.ENFILE})


class Syncing(Protocol):
    """What makes data and names durable: a StoreIO by itself, or FinalSyncs."""

    def sync(self, fd: int) -> None: ...

    def sync_file_system(self, fd: int) -> None: ...

    def sync_folder(self, folder: Path) -> None: ...

    def rename(self, source: Path, target: Path, between: Callable[[], None] | None = None) -> None: ...

    def write_file_atomically(self, path: Path, data: bytes, mode: int = 0o644) -> None: ...


class FinalSyncs:
    """One role's syncs. All of them raise FailedSyncError once any role's sync has failed, and then do nothing.

    `errno_word` is the role's own word among SYNC_ERRNO_WORDS; it is set before FailedSyncError is raised.
    """

    def __init__(self, io: StoreIO, paths: StorePaths, words: Words, role: str, errno_word: int) -> None:
        assert errno_word in words_of.SYNC_ERRNO_WORDS, errno_word
        self._io = io
        self._paths = paths
        self._words = words
        self._role = role
        self._errno_word = errno_word
        self._is_first = False

    def ended(self) -> bool:
        """A sync has failed, so nothing may be synced or said to be durable any more."""
        return words_of.sync_errno(self._words) != 0

    def sync(self, fd: int) -> None:
        """Make a file's data durable. Raises FailedSyncError."""
        self._check()
        try:
            self._io.sync(fd)
        except OSError as error:
            self._fail(error, self._io.path_of(fd))

    def sync_file_system(self, fd: int) -> None:
        """Make everything on the file system of `fd` durable. Raises FailedSyncError."""
        with self._final(f"file system of {self._io.path_of(fd)}"):
            self._io.sync_file_system(fd)

    def sync_folder(self, folder: Path) -> None:
        """Make the names in a folder durable. Raises FailedSyncError, FileNotFoundError."""
        with self._final(str(folder)):
            self._io.sync_folder(folder)

    def rename(self, source: Path, target: Path, between: Callable[[], None] | None = None) -> None:
        """Rename and make the names durable. Raises FailedSyncError; OSError when it is not renamed."""
        self._check()
        try:
            self._io.rename(source, target, between)
        except OSError as error:
            if self._io.exists(source):
                raise
            self._fail(error, str(target.parent))

    def write_file_atomically(self, path: Path, data: bytes, mode: int = 0o644) -> None:
        """Replace a small file. Raises FailedSyncError; OSError when it is not replaced."""
        self._check()
        try:
            self._io.write_file_atomically(path, data, mode, self._note)
        except FailedSyncError as error:
            self._fail(error, str(path))

    @contextlib.contextmanager
    def _final(self, place: str) -> Iterator[None]:
        self._check()
        try:
            yield
        except OSError as error:
            if error.errno in _OF_OPENING:
                raise
            self._fail(error, place)

    def _check(self) -> None:
        if failed := words_of.sync_errno(self._words):
            raise FailedSyncError(failed, f"{os.strerror(failed)} (an earlier sync)")

    def _note(self, error: OSError) -> int:
        if not words_of.sync_errno(self._words):
            self._is_first = True
        number = error.errno or errno.EIO
        self._words[self._errno_word] = number
        return number

    def _fail(self, error: OSError, place: str) -> None:
        # The word first: others must not sync while the file is written.
        number = self._note(error)
        if self._is_first:
            # Another one, whose sync was under way, would sync that file again: the disk that fails may fail that too.
            remember_failed_sync(self._io, self._paths, f"{self._role}: {place}: {os.strerror(number)}")
        raise FailedSyncError(number, os.strerror(number), place) from error


def remember_failed_sync(io: StoreIO, paths: StorePaths, what: str) -> bool:
    """Write down that a sync failed, so that the store stays read-only until it is repaired.

    What was written down first stays. Returns whether it is written down: the disk that failed a sync may fail this
    too, and then the control words say it as long as the group runs.
    """
    try:
        if io.exists(paths.read_only):
            return True
        fd = io.open(paths.read_only, write=True, create=True, mode=0o600)
        try:
            # In place, since the name alone says it: a file that is left empty does no harm.
            io.pwrite(fd, f"{what}\n".encode(), 0)
            io.sync(fd)
        finally:
            io.close(fd)
        io.sync_folder(paths.own)
    except OSError:
        return False
    return True
