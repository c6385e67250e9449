"""Broadcast: every consumer reads every queue, and keeps its own progress in a file of its own.

{"orders": {"0": 24, "1": 16}}
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from mqproc.client import requests as core
from mqproc.client.assignment import Cursor
from mqproc.client.requests import Steps
from mqproc.client.subscription import Subscription
from mqproc.errors import BadRequestError, CorruptStoreError, GroupInUseError
from mqproc.io.store_io import StoreIO
from mqproc.types import QueueInfo
from mqproc.util.file_lock import try_flock, unlock
from mqproc.wire.operations.groups import EARLIEST, LATEST, Assigned, GroupAssignment

if TYPE_CHECKING:
    pass

LOOK_S: Final = 1.0
"""How often new queues are looked for, and progress is saved."""
Offsets = dict[str, dict[int, int]]


def load_offsets(path: Path) -> Offsets:
    """Progress by topic and queue id; none when there is no file. Raises CorruptStoreError."""
    try:
        return StoreIO().read_json(path, Offsets)
    except FileNotFoundError:
        return {}
    except msgspec.MsgspecError as error:
        raise CorruptStoreError(f"{path}: {error}") from None


class LocalProgress:
    """One consumer's own progress, in memory and in its file."""

    def __init__(self, path: Path) -> None:
        """Raises GroupInUseError when another consumer that lives keeps its own there: one would take messages from the
        other. BadRequestError when no file can be there, CorruptStoreError when it is there and is none.
        """
        if path.is_dir():
            raise BadRequestError(f"offsets_path = {str(path)!r} is a folder: give the name of a file")
        self._path = path
        self._io = StoreIO()
        self._pid = os.getpid()
        self._lock_fd = -1
        try:
            self._io.make_folder(path.parent, mode=0o700)
            self._lock_fd = _locked(self._io, path)
            self._offsets = load_offsets(path)
        except OSError as error:
            self.close()
            raise BadRequestError(f"offsets_path = {str(path)!r} can be no file: {error.strerror or error}") from None
        except BaseException:
            self.close()
            raise
        self._known_topics = set(self._offsets)
        self._changed = False
        self._lock = threading.Lock()
        self._saving = threading.Lock()

    def offset(self, topic: str, queue_id: int) -> int | None:
        """None for a queue that this consumer has never read."""
        with self._lock:
            return self._offsets.get(topic, {}).get(queue_id)

    def reads(self, topic: str) -> bool:
        """Whether it read any queue of a topic before: then new ones are read from their beginning."""
        return topic in self._known_topics

    def begin(self, topic: str) -> None:
        """From now on queues that come to the topic are read from their beginning, though it has none so far.

        What is in them was sent after this consumer had begun, so "latest" includes it. RocketMQ's broker tells a group
        the same of a queue whose first message is still there; its own broadcast consumers begin at the end that such a
        queue has when they find it, up to 30 s later, and never see what was sent before.
        """
        self._known_topics.add(topic)

    def put(self, topic: str, queue_id: int, offset: int) -> None:
        """Everything below `offset` is done."""
        with self._lock:
            self._offsets.setdefault(topic, {})[queue_id] = offset
            self._changed = True

    def save(self) -> None:
        """Write the file when something changed. Raises OSError."""
        if os.getpid() != self._pid:
            return  # What this process was forked from goes on, and may have come further.
        # A consumer's commit and its thread may both save: the file beside it that is renamed is one.
        with self._saving:
            with self._lock:
                if not self._changed:
                    return
                text = msgspec.json.encode(self._offsets)
                self._changed = False
            try:
                self._io.make_folder(self._path.parent, mode=0o700)
                self._io.write_file_atomically(self._path, text, 0o600)
            except BaseException:  # Ctrl-C too, in a user's thread that commits.
                self._changed = True
                raise

    def close(self) -> None:
        """Let another consumer have the file."""
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            if os.getpid() == self._pid:
                # Processes that were forked from this one have it open too, and hold nothing by it.
                unlock(fd)
            self._io.close(fd)


def _locked(io: StoreIO, path: Path) -> int:
    """A descriptor whose lock says that the file is somebody's, as long as it is open. Raises GroupInUseError."""
    fd = io.open(path.with_name(path.name + ".lock"), write=True, create=True)
    if not try_flock(fd):
        io.close(fd)
        raise GroupInUseError(
            f"{path} has the progress of another broadcast consumer: give this one a name or an offsets_path of its own"
        )
    return fd


class OwnProgress:
    """What a consumer that keeps its own progress knows, whoever looks for its queues."""

    def __init__(
        self,
        subscription: Subscription,
        path: str,
        on_assignment: Callable[[GroupAssignment], None],
        on_end: Callable[[BaseException], None],
    ) -> None:
        self._subscription = subscription
        self._on_assignment = on_assignment
        self._on_end = on_end
        self._progress = LocalProgress(Path(path))
        self._known: list[tuple[str, int]] | None = None
        self._generation = 0
        self.valid_until = math.inf
        """Nobody else reads for this consumer."""

    def commit(self, sent: Sequence[tuple[Cursor[Any], int]]) -> None:
        """Positions are this consumer's progress now."""
        for cursor, position in sent:
            self._progress.put(cursor.topic, cursor.queue_id, position)

    def save(self) -> None:
        """Write the file. Raises OSError."""
        self._progress.save()

    def end(self) -> None:
        """Write the file, and let another consumer have it. Raises OSError."""
        try:
            self.save()
        finally:
            self._progress.close()

    def give_up(self) -> None:
        """It could not begin."""
        self._progress.close()

    def find_queues(self) -> Steps[None]:
        """Find the queues, and save; when they are others than before, assign all of them. Raises OSError."""
        found: list[QueueInfo] = []
        for topic in self._subscription.topics:
            found += yield core.queues(topic)
        known = sorted((info.topic, info.queue_id) for info in found)
        if known != self._known:
            rows: list[Assigned] = []
            for info in found:
                rows.append((info.topic, info.queue_id, 0, (yield from self._offset_of(info))))
            self._known = known
            self._generation += 1
            self._on_assignment(GroupAssignment(self._subscription.name, self._generation, True, rows))
        for topic in self._subscription.topics:
            self._progress.begin(topic)
        # The first time too: who is killed and comes again would begin at a later "latest".
        self.save()

    def _offset_of(self, info: QueueInfo) -> Steps[int]:
        offset = self._progress.offset(info.topic, info.queue_id)
        if offset is None:
            offset = yield from self._start_in(info)
            self._progress.put(info.topic, info.queue_id, offset)
        return offset

    def _start_in(self, info: QueueInfo) -> Steps[int]:
        """Where this consumer begins in a queue that it has never read."""
        start = EARLIEST if self._progress.reads(info.topic) else self._subscription.start
        if start == EARLIEST:
            return info.min_offset
        if start == LATEST:
            return info.max_offset
        offset: int = yield core.offset_at(info.topic, info.queue_id, self._subscription.start_ms, False)
        return offset
