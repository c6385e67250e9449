"""The first second of `mqproc up`, in which it loads its program.

Nobody has the store's lock by then, and its folder may not be there yet. So whoever starts a group listens at an
address that is named after the store and lies in no folder; it goes with its process, however that ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket

from mqproc.errors import NotRunningError
from mqproc.paths import StorePaths


class Beginning:
    """What says that a group is about to start on a store, until it is closed."""

    def __init__(self, paths: StorePaths) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Two at once: one of them is enough to be seen, and the lock decides who goes on.
        with contextlib.suppress(OSError):
            self._socket.bind(_address(paths))
            self._socket.listen()

    def close(self) -> None:
        """The group can be asked itself, or does not start."""
        self._socket.close()


def check_not_beginning(paths: StorePaths) -> None:
    """Raise NotRunningError, saying so, when a group is about to start on a store that nobody answers for yet."""
    if _has_begun(paths):
        raise NotRunningError(f"{paths.root}: mqproc up has begun here and still loads its program; ask again")


def _has_begun(paths: StorePaths) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        try:
            sock.connect(_address(paths))
        except BlockingIOError:
            return True  # So many ask that its queue is full.
        except OSError:
            return False
    return True


def _address(paths: StorePaths) -> str:
    """Of Linux's abstract namespace. A store may be reached by several names."""
    name = hashlib.sha256(os.fsencode(os.path.realpath(paths.root))).hexdigest()
    return f"\0mqproc-up:{name}"
