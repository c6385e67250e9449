"""All words of a control file, read at one moment, and what follows from several of them.

Tools that must start at once need nothing else: no numpy, nothing but a map and a copy.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
from collections.abc import Mapping
from typing import Final

from mqproc.errors import CorruptStoreError, NotRunningError, OtherVersionError
from mqproc.io.store_io import StoreIO
from mqproc.ipc.words import Words
from mqproc.layout import control as layout
from mqproc.paths import StorePaths

SUPERVISOR_TIMEOUT_NS: Final = 3_000_000_000
"""A supervisor that has been silent for so long is not there any more."""

# Of a process that nobody has waited for yet, and of one that ends just now.
_ENDED_STATES: Final = ("Z", "X", "")
_SYNC_ERRNOS = tuple(name for name, word in layout.WORDS.items() if word.index in layout.SYNC_ERRNO_WORDS)
# A time is read before the position that it belongs to, and what follows the log before the log: so neither dispatch
# nor a sync seems ahead of the writer. The state before all: a group that does not recover has its positions.
_READ_FIRST = (
    "group_state",
    "dispatched_store_timestamp_ms",
    "dispatched",
    "writer_synced_store_timestamp_ms",
    "writer_synced",
    "flusher_synced",
    "written_store_timestamp_ms",
    "written",
)
_READ_ORDER = (*_READ_FIRST, *(name for name in layout.WORDS if name not in _READ_FIRST))


def map_file(io: StoreIO, paths: StorePaths, *, write: bool = False) -> mmap.mmap:
    """The file as it is. Raises NotRunningError when there is none, CorruptStoreError when it cannot be read, an
    OtherVersionError when that is for another version of mqproc to do.
    """
    try:
        fd = io.open(paths.control, write=write)
    except FileNotFoundError:
        raise NotRunningError(f"{paths.control}: no group has run on this store") from None
    except IsADirectoryError:
        raise CorruptStoreError(f"{paths.control}: not a file") from None
    try:
        size = io.size(fd)
        if size != layout.FILE_SIZE:
            raise CorruptStoreError(f"{paths.control}: expected {layout.FILE_SIZE:,} bytes, found {size:,}")
        mapping = io.map(fd, size, write=write)
    finally:
        io.close(fd)
    with contextlib.closing(Words(mapping)) as words:
        _check_header(words, paths)
    return mapping


def _check_header(words: Words, paths: StorePaths) -> None:
    if (found := words[layout.HEADER_MAGIC]) != layout.MAGIC:
        place = f"{paths.control}: magic at byte {layout.HEADER_MAGIC * layout.WORD_SIZE}"
        raise CorruptStoreError(f"{place}: expected {layout.MAGIC:#x}, found {found & (1 << 64) - 1:#x}")
    if (found := words[layout.HEADER_VERSION]) != layout.VERSION:
        # Of whoever runs another version than the one that is installed now: an upgrade is no damage.
        versions = f"of layout {found}, and not {layout.VERSION}"
        mend = "mqproc down stops its group if it still runs, mqproc up starts one that this version reads"
        raise OtherVersionError(f"{paths.control}: from another version of mqproc, {versions}: {mend}")


def read_words(paths: StorePaths) -> dict[str, int]:
    """Every word by name, in the layout's order. Raises as `map_file`."""
    with contextlib.closing(map_file(StoreIO(), paths)) as mapping, contextlib.closing(Words(mapping)) as words:
        return take_words(words)


def take_words(words: Words) -> dict[str, int]:
    """Every word of a mapped file by name, in the layout's order."""
    found = {name: words[layout.WORDS[name].index] for name in _READ_ORDER}
    return {name: found[name] for name in layout.WORDS}


def is_alive(words: Mapping[str, int], now_ns: int) -> bool:
    """Whether the supervisor beats, or recovers the store. A beat from before a reboot may lie ahead of the clock."""
    silent_ns = now_ns - words["supervisor_heartbeat_ns"]
    if words["group_state"] == layout.GROUP_DOWN or silent_ns < 0:
        return False
    return silent_ns <= SUPERVISOR_TIMEOUT_NS or recovers(words)


def recovers(words: Mapping[str, int]) -> bool:
    """Whether the supervisor recovers the store, for which it does not beat: so its process is looked for."""
    return words["group_state"] == layout.GROUP_RECOVERING and _runs(words["supervisor_pid"])


def positions_known(words: Mapping[str, int]) -> bool:
    """Whether recovery has come to its end: before that, and when it was cut short, positions are nothing but zeros."""
    state = words["group_state"]
    return state != layout.GROUP_RECOVERING and (state != layout.GROUP_DOWN or words["recovery_us"] > 0)


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state = file.read().rpartition(")")[2].lstrip()[:1]
    except OSError:
        return False
    return state not in _ENDED_STATES


def flushed(words: Mapping[str, int]) -> int:
    """The log is durable below this."""
    return max(words["writer_synced"], words["flusher_synced"])


def dispatch_behind_bytes(words: Mapping[str, int]) -> int:
    """How much of the log is not in queues and index yet."""
    return max(0, words["written"] - words["dispatched"])


def dispatch_behind_messages(words: Mapping[str, int]) -> int:
    """How many messages are not in queues and index yet."""
    return max(0, words["appended_messages"] - words["dispatched_messages"])


def flush_behind_bytes(words: Mapping[str, int]) -> int:
    """How much of the log a power loss could take."""
    return max(0, words["written"] - flushed(words))


def sync_errno(words: Mapping[str, int]) -> int:
    """errno of a failed sync of any role, 0 when none failed."""
    return next((words[name] for name in _SYNC_ERRNOS if words[name]), 0)


def read_only(words: Mapping[str, int]) -> bool:
    """A sync failed, so nothing more is taken."""
    return sync_errno(words) != 0


def takes_nothing(words: Mapping[str, int]) -> bool:
    """No messages are taken: a sync failed, or there is damage and `on_damage = read_only`."""
    return read_only(words) or bool(words["damage_read_only"] or words["dispatch_read_only"])


def why_read_only(failed: int) -> str:
    """What `sync_errno` tells of, in words."""
    if failed == errno.EROFS:
        return "the file system has become read-only, as an error of its disk leaves it"
    return f"a sync failed with errno {failed}"


def damage_holes(words: Mapping[str, int]) -> int:
    """Damaged ranges of the log that are served around."""
    return words["damage_holes"] + words["dispatch_holes"]
