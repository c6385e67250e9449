"""The supervisor's own descriptors of what the flushers make durable.

A failed sync is reported once to each descriptor that was open before. A flusher that saw the error and died before it
could say so would take it along; these descriptors still report it. ConsumeQueues may be too many files to hold open,
so a descriptor of their folder is held: a sync of its file system reports every failure since it was opened.
"""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path

from mqproc.config import Options
from mqproc.io import StoreIO
from mqproc.ipc.words import Words
from mqproc.layout import control as words_of
from mqproc.paths import StorePaths
from mqproc.store.segments import LogSegments


class ActiveSegments:
    """Descriptors of the log's segments from the synced position on, and of the folders of queues and index.

    Empty until `open`.
    """

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}
        self._folders: dict[str, int] = {}
        self._segments: LogSegments | None = None

    def open(self, io: StoreIO, paths: StorePaths, options: Options, words: Words) -> None:
        """Take a recovered store's files."""
        self._io = io
        self._words = words
        self._segments = LogSegments(io, paths.commit_log, options.mapped_file_size_commit_log)
        folders: dict[str, Path] = {words_of.CQ_FLUSHER: paths.consume_queue, words_of.INDEX_FLUSHER: paths.index}
        self._folders = {role: io.open(folder) for role, folder in folders.items()}
        self.follow()

    def follow(self) -> None:
        """Open the segments that were made since, close those that are synced and full."""
        if self._segments is None:
            return
        words, size = self._words, self._segments.segment_size
        flushed = max(words[words_of.WRITER_SYNCED], words[words_of.FLUSHER_SYNCED])
        first = self._segments.start_of(flushed)
        for start in [start for start in self._fds if start < first]:
            self._io.close(self._fds.pop(start))
        for start in range(first, words[words_of.SEGMENTS_READY_END], size):
            if start not in self._fds and self._io.exists(self._segments.path(start)):
                # One that was made ready goes just now when its flusher stops.
                with contextlib.suppress(FileNotFoundError):
                    self._fds[start] = self._io.open(self._segments.path(start), write=True)

    def sync(self, role: str) -> int:
        """Sync after `role` died what it may have had open; errno of the first failure, 0 when all is well."""
        try:
            if role in self._folders:
                self._io.sync_file_system(self._folders[role])
            elif self._fds and role in (words_of.COMMITLOG_FLUSHER, words_of.WRITER):
                # None is opened now: a descriptor of after the failure would not be told of it.
                for fd in self._fds.values():
                    self._io.sync(fd)
        except OSError as error:
            return error.errno or errno.EIO
        return 0
