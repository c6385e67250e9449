"""How many descriptors a group may have; after a fork, closing what belongs to the parent or to other roles."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from mqproc.errors import StartError

OPEN_FILES_MIN: Final = 768
"""Without clients; the engine's guard has a number of its own, 700 or more."""
_OPEN = Path("/proc/self/fd")
_STANDARD = frozenset({0, 1, 2})


def raise_open_files() -> None:
    """Each client of a role is a descriptor; the usual soft limit is 1,024, and roles wait by epoll, not by select.

    Raises StartError when the hard limit is too low for any group, or when nothing tells what is open.
    """
    if not _OPEN.exists():
        raise StartError("/proc is not mounted: a group cannot live without; mount -t proc proc /proc")
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < OPEN_FILES_MIN:
        raise StartError(
            f"{hard} files may be open at most, and a group needs {OPEN_FILES_MIN} and one for each client: raise the "
            "hard limit, by ulimit -Hn 65536 as root or LimitNOFILE=65536 in the unit"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def close_others(keep: Iterable[int], keep_files: Iterable[Path] = ()) -> None:
    """Close every descriptor but 0, 1, 2, `keep`, and those of the files `keep_files`.

    Files are kept by identity because a Python mmap has a descriptor of its own whose number it does not tell. The
    Python objects of what is closed here must never be closed or collected afterwards, or they would close numbers
    that have been used again: so a forked process runs inside its parent's frames and leaves by `os._exit`.
    """
    kept = _STANDARD.union(keep)
    identities = {_identity(path.stat()) for path in keep_files}
    for fd in _open_descriptors():
        if fd in kept:
            continue
        # EBADF: the descriptor was the one that listed the folder.
        with contextlib.suppress(OSError):
            if _identity(os.fstat(fd)) not in identities:
                os.close(fd)


def _open_descriptors() -> list[int]:
    return [int(name) for name in os.listdir(_OPEN)]


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
