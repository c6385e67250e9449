"""Progress of a broadcast consumer, kept in a file of its own.

{"orders": {"0": 24, "1": 16}}
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, Final

import msgspec

from mqproc.client import requests
from mqproc.client.assignment import Assignment, Cursor
from mqproc.client.connection import NO_DESCRIPTOR
from mqproc.client.requests import Steps
from mqproc.client.subscription import Subscription
from mqproc.errors import BadRequestError, CorruptStoreError, GroupInUseError, StoreBusyError
from mqproc.types import QueueInfo
from mqproc.util.file_lock import try_flock, unlock
from mqproc.wire.operations import EARLIEST, LATEST, Assigned, GroupAssignment

# Small files outside the store that are replaced as a whole and survive a crash.


def make_private_folder(folder: Path) -> None:
    """Create a folder and its parents for this user alone; sync each new name. Raises OSError."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for new in reversed(missing):
        new.mkdir(mode=0o700, exist_ok=True)
        _sync_folder(new.parent)


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file of this user: temporary file, sync, rename, folder sync. Raises OSError."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(
            os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "wb"
        ) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    temporary.rename(path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


LOOK_S: Final = 1.0
"""Interval at which new queues are searched and progress is saved."""
Offsets = dict[str, dict[int, int]]


def load_offsets(path: Path) -> Offsets:
    """Load offsets by topic and queue id; empty when there is no file. Raises CorruptStoreError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Offsets)
    except FileNotFoundError:
        return {}
    except msgspec.MsgspecError as error:
        raise CorruptStoreError(f"{path}: {error}") from None


@contextlib.contextmanager
def _descriptors_for(path: Path) -> Iterator[None]:
    """Raise StoreBusyError when no descriptor is left for the file within the block."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_DESCRIPTOR:
            raise
        raise StoreBusyError(f"{path}: no descriptor for it: {error.strerror}", hint_ms=100) from None


class LocalProgress:
    """Offsets of one consumer, in memory and in its file. Thread-safe."""

    _lock_file: FileIO | None = None

    def __init__(self, path: Path) -> None:
        """Progress in a file that is not open yet."""
        self._path = path
        self._pid = os.getpid()
        self._offsets: Offsets = {}
        self._known_topics: set[str] = set()
        self._changed = False
        self._lock = threading.Lock()
        self._saving = threading.Lock()

    def open(self) -> None:
        """Lock and load the file. After any exception `close` must be called.

        Raises GroupInUseError when another consumer uses it, BadRequestError when it cannot be created,
        CorruptStoreError when it cannot be read, StoreBusyError when no descriptor is left.
        """
        path = self._path
        if path.is_dir():
            raise BadRequestError(f"offsets_path = {str(path)!r} is a folder: give the name of a file")
        try:
            with _descriptors_for(path):
                make_private_folder(path.parent)
                self._lock_file = _locked(path)
                self._offsets = load_offsets(path)
        except OSError as error:
            raise BadRequestError(f"offsets_path = {str(path)!r} can be no file: {error.strerror or error}") from None
        self._known_topics = set(self._offsets)

    def offset(self, topic: str, queue_id: int) -> int | None:
        """Offset of a queue; None for one that this consumer has never read."""
        with self._lock:
            return self._offsets.get(topic, {}).get(queue_id)

    def reads(self, topic: str) -> bool:
        """Whether the topic was read before; its new queues are then read from their beginning."""
        return topic in self._known_topics

    def begin(self, topic: str) -> None:
        """Read queues that the topic gets from now on from their beginning.

        Their messages are newer than the start of this consumer, so "latest" includes them. RocketMQ's broker does the
        same for a group while the queue's first message is stored. RocketMQ's broadcast consumers do not: they find a
        new queue up to 30 s later, begin at its end, and miss the messages before.
        """
        self._known_topics.add(topic)

    def put(self, topic: str, queue_id: int, offset: int) -> None:
        """Set the offset below which all messages of a queue are done."""
        with self._lock:
            self._offsets.setdefault(topic, {})[queue_id] = offset
            self._changed = True

    def save(self) -> None:
        """Write the file when an offset has changed; not in a forked process.

        Raises OSError, or StoreBusyError when no descriptor is left.
        """
        if os.getpid() != self._pid:
            return  # The parent process continues, and its offsets may be newer.
        # A commit and the background thread may save at the same time, to the same temporary file.
        with self._saving:
            try:
                with self._lock:
                    if not self._changed:
                        return
                    text = msgspec.json.encode(self._offsets)
                    self._changed = False
                with _descriptors_for(self._path):
                    make_private_folder(self._path.parent)
                    replace_file(self._path, text)
            except BaseException:  # Including Ctrl-C: a user's thread may commit.
                self._changed = True
                raise

    def close(self) -> None:
        """Unlock the file for another consumer."""
        file, self._lock_file = self._lock_file, None
        if file is not None:
            if os.getpid() == self._pid:
                # Forked processes share the open file, but do not hold the lock.
                unlock(file.fileno())
            file.close()

    def __del__(self) -> None:
        # An interrupt or the end of an event loop may have left the consumer open.
        self.close()


def _locked(path: Path) -> FileIO:
    """A file object that holds the lock of an offsets file while it is open.

    An object, because an interrupt may come before a descriptor has an owner: Python closes the object.
    Raises GroupInUseError.
    """
    file = FileIO(path.with_name(path.name + ".lock"), "a")
    try:
        if not try_flock(file.fileno()):
            raise GroupInUseError(
                f"{path} has the progress of another broadcast consumer: give this one a name or an offsets_path of "
                "its own"
            )
    except BaseException:
        file.close()
        raise
    return file


class OwnProgress(LocalProgress):
    """Assignment of all queues to a broadcast consumer, from its own progress.

    A subclass runs the search for queues.
    """

    def __init__(
        self,
        subscription: Subscription,
        path: str,
        on_assignment: Callable[[GroupAssignment], None],
        on_end: Callable[[BaseException], None],
    ) -> None:
        super().__init__(Path(path))
        self._subscription = subscription
        self._on_assignment = on_assignment
        self._on_end = on_end
        self._known: list[tuple[str, int]] | None = None
        self._generation = 0
        self._committing = threading.Lock()
        self.valid_until = math.inf
        """The queues are never reassigned to another consumer."""

    def commit(self, sent: Sequence[tuple[Cursor[Any], int]]) -> None:
        """Set the progress to the positions of cursors."""
        for cursor, position in sent:
            self.put(cursor.topic, cursor.queue_id, position)

    def commit_done(self, assignment: Assignment[Any]) -> None:
        """Set the progress to the finished messages; two threads may call it."""
        with self._committing:
            sent = assignment.to_commit()
            self.commit(sent)
            assignment.committed(sent, {})

    def end(self) -> None:
        """Write and unlock the file. Raises as `save`."""
        try:
            self.save()
        finally:
            self.close()

    def find_queues(self) -> Steps[None]:
        """Find the queues, assign them when they have changed, and save. Raises as `save`."""
        found: list[QueueInfo] = []
        for topic in self._subscription.topics:
            found += yield requests.queues(topic, consumed=True)
        known = sorted((info.topic, info.queue_id) for info in found)
        if known != self._known:
            rows: list[Assigned] = []
            for info in found:
                rows.append((info.topic, info.queue_id, 0, (yield from self._offset_of(info))))
            self._known = known
            self._generation += 1
            self._on_assignment(GroupAssignment(self._subscription.name, self._generation, True, rows))
        for topic in self._subscription.topics:
            self.begin(topic)
        # Save start offsets, too: after a kill the consumer would begin at a later "latest".
        self.save()

    def _offset_of(self, info: QueueInfo) -> Steps[int]:
        offset = self.offset(info.topic, info.queue_id)
        if offset is None:
            offset = yield from self._start_in(info)
            self.put(info.topic, info.queue_id, offset)
        return offset

    def _start_in(self, info: QueueInfo) -> Steps[int]:
        """Start offset in a queue that was never read."""
        start = EARLIEST if self.reads(info.topic) else self._subscription.start
        if start == EARLIEST:
            return info.min_offset
        if start == LATEST:
            return info.max_offset
        offset: int = yield requests.offset_at(info.topic, info.queue_id, self._subscription.start_ms, False)
        return offset
