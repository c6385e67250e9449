"""Fakes: StoreIOs with failing calls, a control file without a group, a manual clock."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

from prometheus_client.exposition import generate_latest
from prometheus_client.registry import CollectorRegistry

from mqproc.config.options import Options
from mqproc.config.parse import load_options
from mqproc.io.store_io import Clock, FailedSyncError, StoreIO
from mqproc.ipc.control import Control
from mqproc.layout import control as layout
from mqproc.layout import queue_table, record
from mqproc.metrics.catalogue import Samples
from mqproc.metrics.collector import MetricsCollector
from mqproc.metrics.exposition import PrometheusCollector
from mqproc.paths import StorePaths, segment_name
from mqproc.store.access import write_settings
from mqproc.store.consumequeue.table import QueueTable

IO = StoreIO()


def beat(control: Control) -> None:
    """Renew the heartbeats of all roles and the supervisor."""
    now_ns = Clock().monotonic_ns()
    control.store(layout.SUPERVISOR_HEARTBEAT_NS, now_ns)
    for role in layout.ROLES:
        control.store(layout.role_word(role, "heartbeat_ns"), now_ns)


def make_control(store: Path) -> Control:
    """A ready group: 9,000 bytes in 90 messages, 60 of them dispatched, half of it flushed.

    The last dispatched message has a fixed old time; the next one is current.
    """
    paths = StorePaths(store)
    control = Control.create(IO, paths, Clock(), os.getpid())
    now_ns = Clock().monotonic_ns()
    now_ms = Clock().time_ms()
    write_record(store, 6000, now_ms)
    write_settings(IO, paths, Options())
    control.store(layout.GROUP_STATE, layout.GROUP_READY)
    control.store(layout.role_word(layout.TEMPLATE, "supervised"), layout.RUNNING)
    for role in layout.ROLES:
        control.store(layout.role_word(role, "supervised"), layout.RUNNING)
        control.store(layout.role_word(role, "pid"), os.getpid())
        control.store(layout.role_word(role, "state"), layout.STATE_RUNNING)
    for index, value in (
        (layout.WRITTEN, 9000),
        (layout.WRITTEN_NS, now_ns),
        (layout.WRITTEN_STORE_TIMESTAMP_MS, now_ms),
        (layout.APPENDED_MESSAGES, 90),
        (layout.FLUSHER_SYNCED, 4500),
        (layout.ALL_FLUSHED_NS, now_ns - 7_000_000_000),
        (layout.DISPATCHED, 6000),
        (layout.DISPATCHED_STORE_TIMESTAMP_MS, 1_700_000_001_000),
        (layout.DISPATCHED_MESSAGES, 60),
        (layout.DISK_USED_BYTES, 30),
        (layout.DISK_FREE_BYTES, 70),
        (layout.MONITOR_PORT, 5557),
    ):
        control.store(index, value)
    beat(control)
    return control


def write_record(store: Path, at: int, stored_ms: int, *, segment: int = 0, born_v6: bool = False) -> None:
    """Write a record's head, up to its store time, into the segment that begins at `segment`."""
    flags = record.SYS_FLAG_BORN_HOST_V6 if born_v6 else 0
    host = bytes(record.HOST_V6_SIZE if born_v6 else record.HOST_V4_SIZE)
    head = record.HEAD.pack(100, record.MAGIC_V1, 0, 0, 0, 0, at, flags, stored_ms)
    write_log(store, at, head + host + stored_ms.to_bytes(8, "big"), segment=segment)


def write_log(store: Path, at: int, data: bytes, *, segment: int = 0) -> None:
    """Write bytes at an offset of the log."""
    path = StorePaths(store).commit_log / segment_name(segment)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("r+b" if path.exists() else "w+b") as file:
        file.seek(at - segment)
        file.write(data)


def make_queues(store: Path, topics: int, queues: int, messages: int, room: int = 0) -> None:
    """Create a queue table with these numbers of topics, queues per topic, messages per queue.

    The first two messages of each queue have expired. Of each queue of the nth topic n messages have been read. `room`
    is the number of further queues that fit.
    """
    paths = StorePaths(store)
    paths.own.mkdir(parents=True, exist_ok=True)
    table = QueueTable.create(IO, paths.queues, topics * queues + room)
    for topic in range(topics):
        for queue_id in range(queues):
            number = table.create_queue(f"topic-{topic}", queue_id, messages, 2)
            table.store(number, queue_table.DELIVERED, topic + 1)
            table.store(number, queue_table.LAST_STORE_TIMESTAMP_MS, 1_700_000_000_000 + topic)
    table.close()


def options(**changes: object) -> Options:
    """The default options with these changes."""
    return load_options(flags=[f"{name}={value}" for name, value in changes.items()], environment={})


def render(samples: Mapping[str, Samples]) -> bytes:
    """Samples as a scrape in the text format."""
    registry = CollectorRegistry()
    registry.register(PrometheusCollector(lambda: samples))
    return generate_latest(registry)


def make_collector(store: Path, control: Control, **changes: object) -> MetricsCollector:
    """A collector over a fake store."""
    return MetricsCollector(control, IO, StorePaths(store), options(**changes), "1.2.3")


class ManualClock(Clock):
    """Clocks that only the test advances; Unix time can be set separately."""

    def __init__(self, time_ms: int = 1_700_000_000_000) -> None:
        self._monotonic_ns = 1_000_000_000
        self._time_ms = time_ms

    def monotonic_ns(self) -> int:
        return self._monotonic_ns

    def time_ms(self) -> int:
        return self._time_ms

    def advance(self, ms: int) -> None:
        """Advance all clocks."""
        self._monotonic_ns += ms * 1_000_000
        self._time_ms += ms

    def set_time_ms(self, time_ms: int) -> None:
        """Set only the Unix time, as an administrator does."""
        self._time_ms = time_ms


class CountedName(str):
    """A string that counts comparisons of its class.

    For code that must not scan every queue once per topic.
    """

    __slots__ = ()
    compared: ClassVar[int] = 0

    __hash__ = str.__hash__

    def __eq__(self, other: Any) -> bool:
        CountedName.compared += 1
        return str.__eq__(self, other)

    @classmethod
    def many(cls, count: int) -> list[CountedName]:
        """Return `count` names and reset the comparison counter."""
        cls.compared = 0
        return [cls(f"topic-{number:04}") for number in range(count)]


# StoreIOs that record syncs, fail chosen calls, have no room, or have unreadable pages


class FaultyIO(StoreIO):
    """Record every sync and fail chosen calls.

    `synced` holds the paths of all attempted syncs; a folder ends with a slash, a file system with a star.
    `failing` maps a part of a path to the errno of its syncs, `refusing` to the errno of opening and allocating.
    `before_sync` is called with the path before each sync.
    """

    def __init__(self) -> None:
        super().__init__()
        self.synced: list[str] = []
        self.failing: dict[str, int] = {}
        self.refusing: dict[str, int] = {}
        self.before_sync: Callable[[str], None] = lambda path: None

    def sync(self, fd: int) -> None:
        self._note(self.path_of(fd))
        super().sync(fd)

    def sync_folder(self, folder: Path) -> None:
        self._note(f"{folder}/")
        super().sync_folder(folder)

    def sync_file_system(self, fd: int) -> None:
        self._note(f"{self.path_of(fd)}*")
        super().sync_file_system(fd)

    def open(self, path: Path, *, write: bool = False, create: bool = False, mode: int = 0o644) -> int:
        self._fail(str(path), self.refusing)
        return super().open(path, write=write, create=create, mode=mode)

    def allocate(self, fd: int, offset: int, size: int) -> None:
        self._fail(self.path_of(fd), self.refusing)
        super().allocate(fd, offset, size)

    def tried(self, part: str = "") -> list[str]:
        """Return the names of synced paths that contain `part`, and forget all syncs."""
        found = [path for path in self.synced if part in path]
        self.synced.clear()
        return [Path(path).name + "/" * path.endswith("/") for path in found]

    def _note(self, path: str) -> None:
        self.synced.append(path)
        self.before_sync(path)
        self._fail(path, self.failing, FailedSyncError)

    def _fail(self, path: str, faults: dict[str, int], error: type[OSError] = OSError) -> None:
        for part, number in faults.items():
            if part in path:
                raise error(number, os.strerror(number))


class NoRoomForQueues(StoreIO):
    """A disk that is full for ConsumeQueues only."""

    def allocate(self, fd: int, offset: int, size: int) -> None:
        if "/consumequeue/" in self.path_of(fd):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().allocate(fd, offset, size)


PAGE: Final = 4096


class BadSectors(StoreIO):
    """Fail reads of the pages in `lost`, also after a rename; `tried` counts these reads."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: set[tuple[int, int]] = set()
        self.tried = 0

    def lose(self, path: Path, page: int) -> None:
        """Make a page of a file unreadable."""
        self.lost.add((path.stat().st_ino, page))

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        self._fail_if_lost(fd, size, offset)
        return super().pread(fd, size, offset)

    def pread_into(self, fd: int, buffer: Any, offset: int) -> int:
        self._fail_if_lost(fd, len(buffer), offset)
        return super().pread_into(fd, buffer, offset)

    def _fail_if_lost(self, fd: int, size: int, offset: int) -> None:
        pages = range(offset // PAGE, (offset + size - 1) // PAGE + 1)
        if any(inode == os.fstat(fd).st_ino and page in pages for inode, page in self.lost):
            self.tried += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO), self.path_of(fd))
