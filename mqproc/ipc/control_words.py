"""Shared 8-byte words in mapped files; snapshot and derived values of the control file.

It imports neither numpy nor the kernels, for tools that must start fast.

Words are native-endian and aligned, and stored by one instruction. Never use `struct.pack_into`: other processes would
see a zero in between. x86-64 keeps stores in order; where the order of a store and a later load matters, `fence` first.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import sys
from collections.abc import Mapping
from typing import Final

from mqproc.errors import CorruptStoreError, NotRunningError, OtherVersionError
from mqproc.io.store_io import StoreIO
from mqproc.layout import control as layout
from mqproc.paths import StorePaths
from mqproc.util.file_lock import byte_lock_holder
from mqproc.util.procfs import is_running, pid_namespace

SUPERVISOR_TIMEOUT_NS: Final = 3_000_000_000
"""A supervisor without a heartbeat for longer is gone."""

_SYNC_ERRNOS = tuple(name for name, word in layout.WORDS.items() if word.index in layout.SYNC_ERRNO_WORDS)
# A time is read before its position, and followers of the log before the log, so that neither dispatch nor a sync
# appears ahead of the writer. The state is read first: a group that is not recovering has valid positions.
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
_POSITIONS_SIZE: Final = layout.WORD_SIZE * (1 + max(layout.WRITTEN, layout.DISPATCHED))
_HEADER: Final = layout.MAGIC, layout.VERSION


class Words:
    """int64 view of a shared map: `words[i]` loads, `words[i] = value` stores atomically."""

    __slots__ = ("cells", "mapping")

    def __init__(self, mapping: mmap.mmap | bytearray | memoryview) -> None:
        self.mapping = mapping
        self.cells = memoryview(mapping).cast("q")
        """The words as an int64 memoryview, for fast loops and numpy views."""

    def __getitem__(self, index: int) -> int:
        return self.cells[index]

    def __setitem__(self, index: int, value: int) -> None:
        self.cells[index] = value

    def __len__(self) -> int:
        return len(self.cells)

    def add(self, index: int, value: int) -> None:
        """Add to a word that only this process stores."""
        self.cells[index] += value

    def close(self) -> None:
        """Release the view; the map remains open."""
        self.cells.release()


def map_file(io: StoreIO, paths: StorePaths, *, write: bool = False) -> mmap.mmap:
    """Map the control file.

    Raises NotRunningError without a file, CorruptStoreError for an invalid one, OtherVersionError for the layout of
    another version of mqproc.
    """
    try:
        with io.opened(paths.control, write=write) as fd:
            size = io.size(fd)
            if size != layout.FILE_SIZE:
                raise CorruptStoreError(f"{paths.control}: expected {layout.FILE_SIZE:,} bytes, found {size:,}")
            mapping = io.map(fd, size, write=write)
    except FileNotFoundError:
        raise NotRunningError(f"{paths.control}: no group has run on this store") from None
    except IsADirectoryError:
        raise CorruptStoreError(f"{paths.control}: not a file") from None
    with contextlib.closing(Words(mapping)) as words:
        _check_header(words, paths)
    return mapping


def read_word(io: StoreIO, fd: int, index: int) -> int:
    """Read one word of an open control file, 0 after its end."""
    return int.from_bytes(io.pread(fd, layout.WORD_SIZE, index * layout.WORD_SIZE), sys.byteorder, signed=True)


def log_positions(paths: StorePaths) -> tuple[int, int]:
    """End of the log as written, and as dispatched. Cheaper than `read_words`.

    Raises OSError, and CorruptStoreError for a file that is not a control file of this version.
    """
    io = StoreIO()
    with io.opened(paths.control) as fd:
        data = io.pread(fd, _POSITIONS_SIZE, 0)
    cells = memoryview(data).cast("q")
    if len(data) < _POSITIONS_SIZE or (cells[layout.HEADER_MAGIC], cells[layout.HEADER_VERSION]) != _HEADER:
        raise CorruptStoreError(f"{paths.control}: not a control file of this version")
    return cells[layout.WRITTEN], cells[layout.DISPATCHED]


def _check_header(words: Words, paths: StorePaths) -> None:
    if (found := words[layout.HEADER_MAGIC]) != layout.MAGIC:
        place = f"{paths.control}: magic at byte {layout.HEADER_MAGIC * layout.WORD_SIZE}"
        raise CorruptStoreError(f"{place}: expected {layout.MAGIC:#x}, found {found & (1 << 64) - 1:#x}")
    if (found := words[layout.HEADER_VERSION]) != layout.VERSION:
        # Its group runs another version than the installed one: an upgrade, not damage.
        versions = f"layout {found} instead of {layout.VERSION}"
        remedy = "mqproc down stops its group if it still runs, mqproc up starts one with this version"
        raise OtherVersionError(f"{paths.control}: from another version of mqproc, {versions}: {remedy}")


def read_words(paths: StorePaths) -> dict[str, int]:
    """Every word by name, in the layout's order. Raises as `map_file`."""
    with contextlib.closing(map_file(StoreIO(), paths)) as mapping, contextlib.closing(Words(mapping)) as words:
        return snapshot_words(words)


def snapshot_words(words: Words) -> dict[str, int]:
    """Every word of a mapped file by name, in the layout's order."""
    found = {name: words[layout.WORDS[name].index] for name in _READ_ORDER}
    return {name: found[name] for name in layout.WORDS}


def has_valid_pids(words: Mapping[str, int]) -> bool:
    """Whether the group's process ids are valid here, and not those of another PID namespace.

    A process in a container has another id outside, and its id there may be another process here.
    """
    return is_own_namespace(words["pid_namespace"])


def is_own_namespace(found: int) -> bool:
    """Whether a PID namespace is this process's, or unknown."""
    return found in (0, pid_namespace())


def supervisor_alive(paths: StorePaths, words: Mapping[str, int], now_ns: int) -> bool:
    """Whether the supervisor sends heartbeats, or recovers the store.

    A heartbeat that precedes a reboot may be ahead of the clock.
    """
    silent_ns = now_ns - words["supervisor_heartbeat_ns"]
    if words["group_state"] == layout.GROUP_DOWN or silent_ns < 0:
        return False
    return silent_ns <= SUPERVISOR_TIMEOUT_NS or is_recovering(paths, words)


def is_recovering(paths: StorePaths, words: Mapping[str, int]) -> bool:
    """Whether the supervisor recovers the store: without heartbeats, but its process runs.

    Outside of its PID namespace the lock that it holds shows that.
    """
    if words["group_state"] != layout.GROUP_RECOVERING:
        return False
    return is_running(words["supervisor_pid"]) if has_valid_pids(words) else _is_locked(paths)


def _is_locked(paths: StorePaths) -> bool:
    io = StoreIO()
    try:
        with io.opened(paths.lock) as fd:
            return byte_lock_holder(fd) is not None
    except OSError:
        return False


def positions_known(words: Mapping[str, int]) -> bool:
    """Whether recovery has finished; until then, and after an aborted one, positions are 0."""
    state = words["group_state"]
    return state != layout.GROUP_RECOVERING and (state != layout.GROUP_DOWN or words["recovery_us"] > 0)


def flushed(words: Mapping[str, int]) -> int:
    """Log position below which everything is durable."""
    return max(words["writer_synced"], words["flusher_synced"])


def dispatch_behind_bytes(words: Mapping[str, int]) -> int:
    """Bytes of the log that are not in queues and index yet."""
    return max(0, words["written"] - words["dispatched"])


def dispatch_behind_messages(words: Mapping[str, int]) -> int:
    """Messages that are not in queues and index yet."""
    return max(0, words["appended_messages"] - words["dispatched_messages"])


def flush_behind_bytes(words: Mapping[str, int]) -> int:
    """Bytes of the log that a power loss could take."""
    return max(0, words["written"] - flushed(words))


def sync_errno(words: Mapping[str, int]) -> int:
    """errno of a failed sync of any role, 0 without one."""
    return next((words[name] for name in _SYNC_ERRNOS if words[name]), 0)


def read_only(words: Mapping[str, int]) -> bool:
    """Whether a sync failed, so that the store takes no more writes."""
    return sync_errno(words) != 0


def refuses_messages(words: Mapping[str, int]) -> bool:
    """Whether messages are refused: a sync failed, or damage with `on_damage = read_only`."""
    return read_only(words) or bool(words["damage_read_only"] or words["dispatch_read_only"])


def why_read_only(failed: int) -> str:
    """Text for the cause in `sync_errno`."""
    if failed == errno.EROFS:
        return "the file system has become read-only, as after a disk error"
    return f"a sync failed with errno {failed}"


def damage_holes(words: Mapping[str, int]) -> int:
    """Number of damaged log ranges that reads skip."""
    return words["damage_holes"] + words["dispatch_holes"]
