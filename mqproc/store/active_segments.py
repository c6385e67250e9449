"""The supervisor's own descriptors of the log's active segments.

A failed sync is reported once to each descriptor that was open before. A flusher that saw the error and died before it
could say so would take it along; these descriptors still report it.
"""

from __future__ import annotations

import errno

from mqproc.config import Options
from mqproc.io import StoreIO
from mqproc.layout import control as words_of
from mqproc.paths import StorePaths
from mqproc.shm.words import Words
from mqproc.store.segments import LogSegments


class ActiveSegments:
    """Descriptors of the segments from the synced position on. Empty until `open`."""

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}
        self._segments: LogSegments | None = None

    def open(self, io: StoreIO, paths: StorePaths, options: Options, words: Words) -> None:
        """Take a recovered store's segments."""
        self._io = io
        self._words = words
        self._segments = LogSegments(io, paths.commit_log, options.mapped_file_size_commit_log)
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
                self._fds[start] = self._io.open(self._segments.path(start), write=True)

    def sync(self, role: str) -> int:
        """Sync them all after `role` died; errno of the first failure, 0 when all is well."""
        if role not in (words_of.COMMITLOG_FLUSHER, words_of.WRITER):
            return 0
        self.follow()
        for fd in self._fds.values():
            try:
                self._io.sync(fd)
            except OSError as error:
                return error.errno or errno.EIO
        return 0
