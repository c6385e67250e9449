"""Lag of consumer groups, in messages and in seconds.

Lag is counted from the committed offset to the queue's maximum offset. Its age is the store time of the oldest message
not consumed, which must be read from the log. Store times never change, so each is read once, and an idle group costs
nothing. A limited number of changed queues is read each time, in turn; others keep their previous age.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import structlog

from mqproc.config.options import Options
from mqproc.errors import CorruptStoreError
from mqproc.io.store_io import StoreIO
from mqproc.ipc.words import Words
from mqproc.metrics.topics import OTHERS
from mqproc.paths import StorePaths
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.consumequeue.files import ConsumeQueueFiles
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.damage import KnownHoles
from mqproc.store.offsets.offset_store import committed_offsets
from mqproc.store.read.by_time import QueueTimes
from mqproc.store.read.records import LogRecords
from mqproc.store.read.views import WordsView

TIMES_MAX: Final = 256
"""Number of queues whose store times are read per scrape."""

REST_FACTOR: Final = 20
"""Results are reused for this multiple of the time that reading them took: at most 5 % of the time is spent here."""


@dataclass(frozen=True, slots=True)
class GroupLag:
    """One group in one topic."""

    group: str
    topic: str
    messages: int
    seconds: float | None
    """Age of the oldest message not consumed; 0 without one, None when unknown.

    It is unknown before the queue's turn, and for a message that cannot be read.
    """
    consumed: int = 0
    """Messages consumed while the monitor watched; a reset backwards subtracts nothing."""

    @property
    def place(self) -> tuple[str, str]:
        return self.group, self.topic


@dataclass(frozen=True, slots=True)
class _Behind:
    """A group in a queue: its offset and remaining messages."""

    group: str
    topic: str
    queue_id: int
    offset: int
    messages: int

    @property
    def key(self) -> tuple[str, str, int]:
        return self.group, self.topic, self.queue_id


@dataclass(frozen=True, slots=True)
class _Age:
    """Last result: message offset, store time (−1 unreadable), age, number of the pass."""

    offset: int
    stored_ms: int
    seconds: float
    look: int


class GroupLags:
    """Lags of a running store's groups."""

    def __init__(self, io: StoreIO, paths: StorePaths, options: Options, words: Words, table: QueueTable) -> None:
        self._io = io
        self._paths = paths
        self._options = options
        self._view = WordsView(words, table, sync_flush=options.sync_flush)
        self._found: list[GroupLag] = []
        self._ages: dict[tuple[str, str, int], _Age] = {}
        self._looks = 0
        self._fresh_until = 0.0
        self._stood: dict[tuple[str, str], dict[int, int]] = {}
        """Offsets at the last pass, by group and topic, then queue id."""
        self._consumed: dict[tuple[str, str], int] = {}
        self._own: set[tuple[str, str]] = set()
        """Groups with their own series. Each keeps it as long as it exists, since counters must not move."""
        self._shared: set[tuple[str, str]] = set()
        self._gone = 0
        """Messages consumed by deleted groups without own series, so that the count of others never decreases."""

    def figures(self) -> list[GroupLag]:
        """Lags, sorted by group and topic."""
        began = time.monotonic()
        if began >= self._fresh_until:
            self._found = self._look()
            ended = time.monotonic()
            self._fresh_until = ended + REST_FACTOR * (ended - began)
        return self._found

    def _look(self) -> list[GroupLag]:
        try:
            progress = list(committed_offsets(self._io, self._paths))
        except (CorruptStoreError, OSError):
            # The query role reports it; the lags are unknown.
            return []
        behind: dict[tuple[str, str], list[_Behind]] = {}
        for at in progress:
            bounds = self._view.queues.bounds(at.topic, at.queue_id)
            if bounds is None:
                continue
            offset = max(at.offset, bounds.min_offset)
            left = max(0, bounds.max_offset - offset)
            behind.setdefault((at.group, at.topic), []).append(_Behind(at.group, at.topic, at.queue_id, offset, left))
        self._count(behind)
        self._look_up([queue for queues in behind.values() for queue in queues if queue.messages])
        now_ms = time.time() * 1000
        return [
            GroupLag(
                group,
                topic,
                sum(queue.messages for queue in queues),
                self._seconds([queue for queue in queues if queue.messages], now_ms),
                self._consumed[group, topic],
            )
            for (group, topic), queues in sorted(behind.items())
        ]

    def _count(self, behind: dict[tuple[str, str], list[_Behind]]) -> None:
        """Add the messages consumed since the last pass; a new queue adds nothing.

        Deleted groups are forgotten: a group created again starts at 0, as counters may.
        """
        for place in self._consumed.keys() - behind.keys():
            consumed = self._consumed.pop(place)
            self._own.discard(place)
            if place in self._shared:
                self._shared.remove(place)
                self._gone += consumed
        stood: dict[tuple[str, str], dict[int, int]] = {}
        for place, queues in behind.items():
            before = self._stood.get(place, {})
            past = sum(max(0, queue.offset - before.get(queue.queue_id, queue.offset)) for queue in queues)
            self._consumed[place] = self._consumed.get(place, 0) + past
            stood[place] = {queue.queue_id: queue.offset for queue in queues}
        self._stood = stood

    def bounded(self, lags: list[GroupLag], most: int) -> list[GroupLag]:
        """At most `most` groups, and one sum of all others, deleted ones included."""
        room = most - len(self._own)
        for lag in lags:
            if lag.place not in self._own and lag.place not in self._shared:
                (self._own if room > 0 else self._shared).add(lag.place)
                room -= 1
        kept = [lag for lag in lags if lag.place in self._own]
        if not self._shared and not self._gone:
            return kept
        others = [lag for lag in lags if lag.place in self._shared]
        together = GroupLag(
            OTHERS,
            OTHERS,
            sum(lag.messages for lag in others),
            _oldest(lag.seconds for lag in others),
            self._gone + sum(self._consumed[place] for place in self._shared),
        )
        return [*kept, together]

    def _seconds(self, lagging: list[_Behind], now_ms: float) -> float | None:
        """Age of the oldest message of these queues; None while one of them is unknown."""
        ages = []
        for queue in lagging:
            age = self._ages.get(queue.key)
            if age is None:
                return None
            if age.offset == queue.offset and age.stored_ms >= 0:
                ages.append(max(0.0, (now_ms - age.stored_ms) / 1000))
            else:
                ages.append(age.seconds)
        oldest = max(ages, default=0.0)
        return oldest if oldest >= 0 else None

    def _look_up(self, lagging: list[_Behind]) -> None:
        """Read unknown store times: first queues without a result, then the others in turn."""
        self._looks += 1
        known = self._ages
        self._ages = {queue.key: known[queue.key] for queue in lagging if queue.key in known}
        wanted = [queue for queue in lagging if not self._is_known(queue)]
        wanted.sort(key=lambda queue: (self._ages[queue.key].look if queue.key in self._ages else -1, -queue.messages))
        if not wanted:
            return
        io, paths, options = self._io, self._paths, self._options
        segments = LogSegments(io, paths.commit_log, options.mapped_file_size_commit_log)
        records = LogRecords(segments, self._view.visible, KnownHoles(io, paths, segments.segment_size))
        files = ConsumeQueueFiles(io, paths.consume_queue, options.consume_queue_file_bytes)
        times = QueueTimes(self._view.queues, files, records)
        now_ms = time.time() * 1000
        try:
            for queue in wanted[:TIMES_MAX]:
                stored_ms = _store_time_ms(times, queue)
                seconds = max(0.0, (now_ms - stored_ms) / 1000) if stored_ms >= 0 else -1.0
                self._ages[queue.key] = _Age(queue.offset, stored_ms, seconds, self._looks)
        finally:
            # An open descriptor would keep the space of files that retention deletes.
            files.close()
            segments.close()

    def _is_known(self, queue: _Behind) -> bool:
        age = self._ages.get(queue.key)
        return age is not None and age.offset == queue.offset and age.stored_ms >= 0


def _store_time_ms(times: QueueTimes, queue: _Behind) -> int:
    """Store time of a group's oldest message; below 0 when it cannot be read."""
    try:
        return times.store_time_ms(queue.topic, queue.queue_id, queue.offset)
    except (CorruptStoreError, OSError) as error:
        # The other values are valid, and must be reported in this situation above all.
        structlog.get_logger().warning(
            "a message's age is not known", topic=queue.topic, queue_id=queue.queue_id, error=str(error)
        )
        return -1


def _oldest(ages: Iterable[float | None]) -> float | None:
    """The greatest known age, or None."""
    return max((age for age in ages if age is not None), default=None)
