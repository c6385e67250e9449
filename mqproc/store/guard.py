"""Keeping RocketMQ's hands off the files of a running group.

RocketMQ looks at the lock of a store only after it has loaded it: by then it has deleted the segments that lie ready
and the newest index file. But it loads nothing when the last name in `commitlog/` is of another length than a segment.
So while a group runs such a name is there, a link into the supervisor's own open files. When the supervisor is gone,
however that came, the link leads nowhere; RocketMQ takes it for an empty last file, removes it and goes on.
"""

from __future__ import annotations

import fcntl
import os
from typing import Final

from mqproc.io import StoreIO
from mqproc.paths import StorePaths

# Hardly any other process that is given our pid later has so many files open.
_LOWEST_FD: Final = 700


class Guard:
    """One group's guard. The supervisor holds the store's lock while it makes and removes it."""

    def __init__(self, io: StoreIO, paths: StorePaths) -> None:
        """Raise it, in the place of one that a killed group left. Raises OSError."""
        self._io = io
        self._path = paths.guard
        # `abort` has been written by now; its few digits are no segment's length.
        fd = io.open(paths.abort)
        try:
            self._fd = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _LOWEST_FD)
        finally:
            io.close(fd)
        io.unlink(self._path)
        io.make_link(self._path, f"/proc/{os.getpid()}/fd/{self._fd}")

    def remove(self) -> None:
        """The group has ended."""
        self._io.unlink(self._path)
        self._io.close(self._fd)
