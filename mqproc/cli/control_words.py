"""The control file's words for tools that must start at once: no numpy, nothing but a map and a copy.

`mqproc.control.Control` has the same for roles; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping

from mqproc.errors import CorruptStoreError, NotRunningError
from mqproc.io import StoreIO
from mqproc.layout import control as layout
from mqproc.paths import StorePaths
from mqproc.shm.words import Words

_SYNC_ERRNOS = tuple(name for name, word in layout.WORDS.items() if word.index in layout.SYNC_ERRNO_WORDS)
# What follows the log is read before the log, so neither dispatch nor a sync seems ahead of the writer; times before
# positions.
_READ_FIRST = (
    "dispatched_store_timestamp_ms",
    "dispatched",
    "writer_synced_store_timestamp_ms",
    "writer_synced",
    "flusher_synced",
    "written_store_timestamp_ms",
    "written",
)
_READ_ORDER = (*_READ_FIRST, *(name for name in layout.WORDS if name not in _READ_FIRST))


def read_words(paths: StorePaths) -> dict[str, int]:
    """Every word by name, in the layout's order. Raises NotRunningError when there is no file, CorruptStoreError."""
    io = StoreIO()
    try:
        fd = io.open(paths.control)
    except FileNotFoundError:
        raise NotRunningError(f"{paths.control}: no group has run on this store") from None
    try:
        size = io.size(fd)
        if size != layout.FILE_SIZE:
            raise CorruptStoreError(f"{paths.control}: expected {layout.FILE_SIZE:,} bytes, found {size:,}")
        mapping = io.map(fd, size)
    finally:
        io.close(fd)
    words = Words(mapping)
    found = {name: words[layout.WORDS[name].index] for name in _READ_ORDER}
    words.close()
    mapping.close()
    for name, expected in (("magic", layout.MAGIC), ("version", layout.VERSION)):
        if found[name] != expected:
            raise CorruptStoreError(f"{paths.control}: {name}: expected {expected:#x}, found {found[name]:#x}")
    return {name: found[name] for name in layout.WORDS}


def flushed(words: Mapping[str, int]) -> int:
    """The log is durable below this."""
    return max(words["writer_synced"], words["flusher_synced"])


def dispatch_behind_bytes(words: Mapping[str, int]) -> int:
    """How much of the log is not in queues and index yet."""
    return max(0, words["written"] - words["dispatched"])


def dispatch_behind_ms(words: Mapping[str, int]) -> int:
    """Store time between the last dispatched and the last written record, 0 when all is dispatched."""
    behind = words["written_store_timestamp_ms"] - words["dispatched_store_timestamp_ms"]
    return max(0, behind) if words["written"] > words["dispatched"] else 0


def flush_behind_bytes(words: Mapping[str, int]) -> int:
    """How much of the log a power loss could take."""
    return max(0, words["written"] - flushed(words))


def read_only(words: Mapping[str, int]) -> bool:
    """A sync failed, so nothing more is taken."""
    return any(words[name] for name in _SYNC_ERRNOS)


def damage_holes(words: Mapping[str, int]) -> int:
    """Damaged ranges of the log that are served around."""
    return words["damage_holes"] + words["dispatch_holes"]
