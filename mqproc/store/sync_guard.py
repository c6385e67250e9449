"""Syncs of a store. An fsync failure is final; everything dirty gets synced.

After a failed sync the kernel marks the pages as clean: a retry would succeed although data is lost. So once one role's
sync has failed, no role syncs again and no durable position moves. The errno in the control file informs all roles, and
the file `mqproc/read_only` all later groups, until the store is repaired.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar

from mqproc.config.options import Options
from mqproc.io.store_io import FailedSyncError, StoreIO
from mqproc.ipc.control_words import Words
from mqproc.layout import control
from mqproc.paths import StorePaths, segment_name

SINGLE_SYNCS_MAX: Final = 64
"""More dirty files than this are synced with their whole file system: 22 ms for 4,000 files."""

# Errors from opening a folder, not from syncing it: it was deleted, or descriptors have run out.
_OF_OPENING: Final = frozenset({errno.ENOENT, errno.EMFILE, errno.ENFILE})


class Syncing(Protocol):
    """Makes data and names durable: a StoreIO, or a role's SyncGuard."""

    def sync(self, fd: int) -> None: ...

    def sync_file_system(self, fd: int) -> None: ...

    def sync_folder(self, folder: Path) -> None: ...

    def rename(self, source: Path, target: Path, between: Callable[[], None] | None = None) -> None: ...

    def write_file_atomically(self, path: Path, data: bytes, mode: int = 0o644) -> None: ...


class SyncGuard:
    """One role's syncs; once any role's sync has failed, they raise FailedSyncError at once.

    `errno_word` is the role's word among SYNC_ERRNO_WORDS; it is set before FailedSyncError is raised.
    """

    def __init__(self, io: StoreIO, paths: StorePaths, words: Words, role: str, errno_word: int) -> None:
        assert errno_word in control.SYNC_ERRNO_WORDS, errno_word
        self._io = io
        self._paths = paths
        self._words = words
        self._role = role
        self._errno_word = errno_word
        self._is_first = False

    def has_failed(self) -> bool:
        """Whether any sync has failed: then nothing may be synced or reported as durable."""
        return control.sync_errno(self._words) != 0

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
        """Make the names in a folder durable. Raises FailedSyncError or FileNotFoundError."""
        with self._final(str(folder)):
            self._io.sync_folder(folder)

    def rename(self, source: Path, target: Path, between: Callable[[], None] | None = None) -> None:
        """Rename durably. Raises FailedSyncError, or OSError if the rename failed."""
        self._check()
        try:
            self._io.rename(source, target, between)
        except OSError as error:
            if self._io.exists(source):
                raise
            self._fail(error, str(target.parent))

    def write_file_atomically(self, path: Path, data: bytes, mode: int = 0o644) -> None:
        """Replace a small file. Raises FailedSyncError, or OSError if it was not replaced."""
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
        if failed := control.sync_errno(self._words):
            raise FailedSyncError(failed, f"{os.strerror(failed)} (an earlier sync)")

    def _note(self, error: OSError) -> int:
        if not control.sync_errno(self._words):
            self._is_first = True
        number = error.errno or errno.EIO
        self._words[self._errno_word] = number
        return number

    def _fail(self, error: OSError, place: str) -> None:
        # Set the word first: other roles must not sync while the file is written.
        number = self._note(error)
        if self._is_first:
            # Only the first failure writes the file: a second sync of it may fail on the same disk.
            remember_failed_sync(self._io, self._paths, f"{self._role}: {place}: {os.strerror(number)}")
        raise FailedSyncError(number, os.strerror(number), place) from error


def remember_failed_sync(io: StoreIO, paths: StorePaths, what: str) -> bool:
    """Record a failed sync in `read_only`, which keeps the store read-only until it is repaired.

    An existing record stays. Returns whether it is recorded: the failing disk may fail this write, too; then the
    control words keep the state while the group runs.
    """
    try:
        if io.exists(paths.read_only):
            return True
        with io.opened(paths.read_only, write=True, create=True, mode=0o600) as fd:
            # Written in place: the name alone is significant, so an empty file does no harm.
            io.pwrite(fd, f"{what}\n".encode(), 0)
            io.sync(fd)
        io.sync_folder(paths.own)
    except OSError:
        return False
    return True


def sync_files(io: StoreIO, syncs: Syncing, paths: Iterable[Path]) -> None:
    """Make files durable, except those that are deleted meanwhile. Raises FailedSyncError."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError), io.opened(path, write=True) as fd:
            syncs.sync(fd)


# Dirty files

Key = TypeVar("Key", bound=Hashable)


class DirtyFiles(Generic[Key]):
    """Changed files of one folder tree that recovery must sync; keys are converted by `path_of`.

    They are synced one by one: the file system may have many dirty pages of other programs. Only for very many files
    the whole file system is synced.
    """

    def __init__(self, io: StoreIO, folder: Path, path_of: Callable[[Key], Path]) -> None:
        self._io = io
        self._folder = folder
        self._path_of = path_of
        self._keys: set[Key] = set()

    def note(self, key: Key) -> None:
        """Add a file whose bytes, length or name may not be durable."""
        # Bounded, since long-running processes never sync here; beyond the limit the file system is synced.
        if len(self._keys) <= SINGLE_SYNCS_MAX:
            self._keys.add(key)

    def sync(self) -> None:
        """Make all noted files durable. Raises FailedSyncError."""
        if len(self._keys) > SINGLE_SYNCS_MAX:
            self.sync_all()
        else:
            self._sync_each([self._path_of(key) for key in self._keys])
        self._keys.clear()

    def sync_all(self) -> None:
        """Make the whole file system durable."""
        if self._io.exists(self._folder):
            with self._io.opened(self._folder) as fd:
                self._io.sync_file_system(fd)

    def _sync_each(self, paths: list[Path]) -> None:
        folders: set[Path] = set()
        for path in sorted(paths):
            if self._io.exists(path):
                with self._io.opened(path) as fd:
                    self._io.sync(fd)
            depth = len(path.parts) - len(self._folder.parts)
            folders.update(list(path.parents)[: depth + 1])
        # Bottom-up: a name must not become durable before its target.
        for folder in sorted(folders, reverse=True):
            if self._io.exists(folder):
                self._io.sync_folder(folder)


# The supervisor's watch


class SyncWatch:
    """The supervisor's descriptors of everything that the flushers sync.

    A failed sync is reported once to each descriptor that was open before. If a flusher sees the error and dies before
    it can report it, these descriptors still report it. They cover the log's segments from the synced position on. The
    ConsumeQueues may be too many files, so their folder and the folder of the index are held: a sync of the file system
    reports every failure since they were opened. Empty until `open`.
    """

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}
        self._folders: dict[str, int] = {}
        self._segment_size = 0

    def open(self, io: StoreIO, paths: StorePaths, options: Options, words: Words) -> None:
        """Open the files of a recovered store."""
        self._io = io
        self._words = words
        self._log_folder = paths.commit_log
        self._segment_size = options.mapped_file_size_commit_log
        folders: dict[str, Path] = {control.CQ_FLUSHER: paths.consume_queue, control.INDEX_FLUSHER: paths.index}
        self._folders = {role: io.open(folder) for role, folder in folders.items()}
        self.follow()

    def follow(self) -> None:
        """Open new segments, and close full segments that are synced."""
        if self._segment_size == 0:
            return
        words, size = self._words, self._segment_size
        flushed = max(words[control.WRITER_SYNCED], words[control.FLUSHER_SYNCED])
        first = flushed - flushed % size
        for start in [start for start in self._fds if start < first]:
            self._io.close(self._fds.pop(start))
        for start in range(first, words[control.SEGMENTS_READY_END], size):
            path = self._log_folder / segment_name(start)
            if start not in self._fds and self._io.exists(path):
                # A stopping flusher deletes segments that were created ahead.
                with contextlib.suppress(FileNotFoundError):
                    self._fds[start] = self._io.open(path, write=True)

    def lost_segment(self) -> Path | None:
        """Path of the current segment if it was deleted, moved or replaced; else None."""
        written, size = self._words[control.WRITTEN] if self._segment_size else 0, self._segment_size
        # At a segment's end retention may delete the segment, and a stopping flusher may delete the next segment.
        if not size or not written % size:
            return None
        start = written - written % size
        fd, path = self._fds.get(start), self._log_folder / segment_name(start)
        return None if fd is None or self._io.leads_to(path, fd) else path

    def sync(self, role: str) -> int:
        """Sync the files of a role that died; returns the errno of the first failure, 0 for none."""
        try:
            if role in self._folders:
                self._io.sync_file_system(self._folders[role])
            elif self._fds and role in (control.COMMITLOG_FLUSHER, control.WRITER):
                # No file is opened here: a descriptor opened after the failure would not report it.
                for fd in self._fds.values():
                    self._io.sync(fd)
        except OSError as error:
            return error.errno or errno.EIO
        return 0
