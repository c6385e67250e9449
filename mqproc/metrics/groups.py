"""Lag of consumer groups, in messages and in seconds.

Lag is counted from the committed offset to the queue's maximum offset. Its age is the store time of the oldest message
not consumed, which must be read from the log. Store times never change, so each is read once, and an idle group costs
nothing. A limited number of changed queues is read each time, in turn; others keep their previous age.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Final

import numpy as np
import structlog
from numpy.typing import NDArray

from mqproc.config.options import Options
from mqproc.errors import CorruptStoreError
from mqproc.io.store_io import StoreIO
from mqproc.ipc.control_words import Words
from mqproc.layout import queue_table as layout
from mqproc.layout.consume_queue import UNIT_SIZE
from mqproc.paths import StorePaths
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.consumequeue.files import ConsumeQueueFiles
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.damage import KnownHoles
from mqproc.store.offsets.offset_store import committed_offsets
from mqproc.store.offsets.settings import group_names
from mqproc.store.read.by_time import QueueTimes
from mqproc.store.read.queries import StoreQueries
from mqproc.store.read.records import LogRecords
from mqproc.store.read.views import WordsView
from mqproc.store.schedule.waiting_retries import WaitingRetries
from mqproc.topic_names import DEAD_LETTER_PREFIX

# Per-topic statistics from the queue table, by array operations over all queues.


OTHERS: Final = "(others)"
"""Label of all topics above the limit; no topic can have this name."""

_GROWTH: Final = 1024


@dataclass(frozen=True, slots=True)
class TopicFigures:
    """Sums over one topic's queues."""

    topic: str
    queues: int
    appended: int
    """Messages ever appended: the sum of next offsets, deleted queues included."""
    stored: int
    """Messages that can be read."""
    delivered: int
    """Messages delivered since the group started, from deleted queues too."""
    last_store_timestamp_ms: int
    """Store time of the newest message in existing queues; 0 while they are empty."""


@dataclass(frozen=True, slots=True)
class TableFigures:
    """The whole table. `topics` is limited, with one entry for all others; `every` has all."""

    topics: list[TopicFigures]
    every: list[TopicFigures]
    topic_count: int
    queue_count: int
    used_ratio: float
    unit_bytes: int
    """Size of the existing ConsumeQueue units."""
    unit_files: int
    dead_letters: Mapping[str, int]
    """Messages ever appended to dead-letter topics, including deleted topics, by group."""


class TopicTable:
    """Sums a queue table by topic. A queue number's topic never changes, so it is read once."""

    def __init__(self, table: QueueTable, topics_max: int, file_bytes: int) -> None:
        """`file_bytes`: size of a ConsumeQueue file."""
        self.table = table
        self._topics_max = topics_max
        self._units_per_file = file_bytes // UNIT_SIZE
        self._topics: list[str] = []
        self._places: dict[str, int] = {}
        self._place_of: NDArray[np.int64] = np.zeros(0, np.int64)
        self._known = 0
        self._own: set[str] = set()
        """Topics with their own series. Each keeps it, since counters must not move."""
        self._shared: set[str] = set()

    def figures(self) -> TableFigures:
        table = self.table
        count = table.count
        self._read_new(count)
        live = table.column(layout.STATE)[:count] == layout.STATE_LIVE
        first, next_, maximum, minimum, delivered, last_ms = (
            table.column(word)[:count]
            for word in (
                layout.FIRST_OFFSET,
                layout.NEXT_OFFSET,
                layout.MAX_OFFSET,
                layout.MIN_OFFSET,
                layout.DELIVERED,
                layout.LAST_STORE_TIMESTAMP_MS,
            )
        )
        # The dispatcher's and the keeper's words may still describe a deleted queue.
        last_ms = np.where(live & (maximum > first), last_ms, 0)
        minimum = np.maximum(minimum, first)
        maximum = np.maximum(np.maximum(maximum, first), minimum)
        stored = np.where(live, maximum - minimum, 0)
        per_file = self._units_per_file
        files = np.where(live & (maximum > 0), -(-maximum // per_file) - minimum // per_file, 0)
        topics = self._by_topic(live, (next_, stored, delivered), last_ms)
        every = [topic for topic in topics if topic.queues]
        return TableFigures(
            topics=self._limit_topics(topics),
            every=every,
            topic_count=len(every),
            queue_count=int(live.sum()),
            used_ratio=count / table.capacity,
            unit_bytes=int(stored.sum()) * UNIT_SIZE,
            unit_files=int(files.sum()),
            dead_letters={
                topic.topic.removeprefix(DEAD_LETTER_PREFIX): topic.appended
                for topic in topics
                if topic.topic.startswith(DEAD_LETTER_PREFIX)
            },
        )

    def _read_new(self, count: int) -> None:
        """Read the topics of new queues."""
        if count > len(self._place_of):
            self._place_of = np.concatenate([self._place_of, np.zeros(count - len(self._place_of) + _GROWTH, np.int64)])
        for number in range(self._known, count):
            topic, _ = self.table.name(number)
            place = self._places.setdefault(topic, len(self._topics))
            if place == len(self._topics):
                self._topics.append(topic)
            self._place_of[number] = place
        self._known = count

    def _by_topic(
        self, live: NDArray[np.bool_], added_up: Sequence[NDArray[np.int64]], last_ms: NDArray[np.int64]
    ) -> list[TopicFigures]:
        """All topics, including deleted topics, in order of creation: sums, newest store time.

        Deleted queues count: sums must not decrease when a topic is created again with fewer queues.
        """
        places = self._place_of[: len(live)]
        size = len(self._topics)
        queues = np.bincount(places[live], minlength=size)
        sums = [np.zeros(size, np.int64) for _ in added_up]
        for total, column in zip(sums, added_up, strict=True):
            np.add.at(total, places, column)
        last = np.zeros(size, np.int64)
        np.maximum.at(last, places, last_ms)
        columns = (column.tolist() for column in (queues, *sums, last))
        return [TopicFigures(*row) for row in zip(self._topics, *columns, strict=True)]

    def _limit_topics(self, topics: list[TopicFigures]) -> list[TopicFigures]:
        """Topics with their own series, and the sum of all other topics, including deleted topics."""
        live = [topic for topic in topics if topic.queues]
        room = self._topics_max - sum(topic.topic in self._own for topic in live)
        for topic in live:
            if topic.topic not in self._own and topic.topic not in self._shared:
                (self._own if room > 0 else self._shared).add(topic.topic)
                room -= 1
        kept = [topic for topic in live if topic.topic in self._own]
        others = [topic for topic in topics if topic.topic in self._shared]
        return [*kept, _sum_of(others)] if others else kept


def _sum_of(topics: list[TopicFigures]) -> TopicFigures:
    return TopicFigures(
        OTHERS,
        sum(topic.queues for topic in topics),
        sum(topic.appended for topic in topics),
        sum(topic.stored for topic in topics),
        sum(topic.delivered for topic in topics),
        max(topic.last_store_timestamp_ms for topic in topics),
    )


TIMES_MAX: Final = 256
"""Number of queues whose store times are read per scrape."""

WAITING_BATCHES_MAX: Final = 16
"""Batches of delayed messages that are read per scrape."""

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
class _QueueLag:
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
    pass_number: int


class GroupLabels:
    """Labels of groups: the first `groups_max` have their own, the others share one.

    A group keeps its label as long as it exists, since counters must not move.
    """

    def __init__(self, groups_max: int) -> None:
        self._groups_max = groups_max
        self._own: set[str] = set()
        self._shared: set[str] = set()

    def of(self, groups: Iterable[str]) -> dict[str, str]:
        """The label of each group."""
        names = sorted(set(groups))
        self._own.intersection_update(names)
        self._shared.intersection_update(names)
        for name in names:
            if name not in self._own and name not in self._shared:
                (self._own if len(self._own) < self._groups_max else self._shared).add(name)
        return {name: name if name in self._own else OTHERS for name in names}


class GroupLags:
    def __init__(
        self,
        io: StoreIO,
        paths: StorePaths,
        options: Options,
        words: Words,
        table: QueueTable,
        *,
        cached: bool = True,
    ) -> None:
        """`cached`: whether results may be reused, as REST_FACTOR says."""
        self._cached = cached
        self._io = io
        self._paths = paths
        self._options = options
        self._view = WordsView(words, table, sync_flush=options.sync_flush)
        self._found: list[GroupLag] = []
        self._ages: dict[tuple[str, str, int], _Age] = {}
        self._passes = 0
        self._fresh_until = 0.0
        self._last_offsets: dict[tuple[str, str], dict[int, int]] = {}
        """Offsets at the last pass, by group and topic, then queue id."""
        self._consumed: dict[tuple[str, str], int] = {}
        self._own: set[tuple[str, str]] = set()
        """Groups with their own series. Each keeps it as long as it exists, since counters must not move."""
        self._shared: set[tuple[str, str]] = set()
        self._retries = WaitingRetries(words)
        self.waiting_retries: Counter[str] = Counter()
        """Messages in a delay level, by retry topic."""
        self.created: list[str] = []
        """Groups with settings: each has them from its first use on."""
        self._gone = 0
        """Messages consumed by deleted groups without own series, so that the count of others never decreases."""

    def figures(self) -> list[GroupLag]:
        """Lags, sorted by group and topic."""
        began = time.monotonic()
        if began >= self._fresh_until:
            self._found = self._read()
            ended = time.monotonic()
            self._fresh_until = ended + REST_FACTOR * (ended - began) if self._cached else ended
        return self._found

    def _read(self) -> list[GroupLag]:
        try:
            progress = list(committed_offsets(self._io, self._paths))
        except (CorruptStoreError, OSError):
            # The query role reports it; the lags are unknown.
            return []
        with contextlib.suppress(CorruptStoreError, OSError):  # The query role reports it, too.
            self.created = group_names(self._io, self._paths)
        lags: dict[tuple[str, str], list[_QueueLag]] = {}
        for at in progress:
            bounds = self._view.queues.bounds(at.topic, at.queue_id)
            if bounds is None:
                continue
            offset = max(at.offset, bounds.min_offset)
            left = max(0, bounds.max_offset - offset)
            lags.setdefault((at.group, at.topic), []).append(_QueueLag(at.group, at.topic, at.queue_id, offset, left))
        self._count(lags)
        self._read_waiting()
        self._read_ages([queue for queues in lags.values() for queue in queues if queue.messages])
        now_ms = time.time() * 1000
        return [
            GroupLag(
                group,
                topic,
                sum(queue.messages for queue in queues),
                self._seconds([queue for queue in queues if queue.messages], now_ms),
                self._consumed[group, topic],
            )
            for (group, topic), queues in sorted(lags.items())
        ]

    def _read_waiting(self) -> None:
        """Count waiting retries, after reading those that arrived since the last pass."""
        try:
            with closing(StoreQueries(self._io, self._paths, self._options, self._view)) as reading:
                batches = itertools.islice(self._retries.update(reading), WAITING_BATCHES_MAX)
                if sum(1 for _ in batches) < WAITING_BATCHES_MAX:
                    self.waiting_retries = self._retries.counts()
        except (CorruptStoreError, OSError) as error:
            structlog.get_logger().warning("waiting retries are not known", error=str(error))

    def _count(self, lags: dict[tuple[str, str], list[_QueueLag]]) -> None:
        """Add the messages consumed since the last pass; a new queue adds nothing.

        Deleted groups are forgotten: a group created again starts at 0, as counters may.
        """
        for place in self._consumed.keys() - lags.keys():
            consumed = self._consumed.pop(place)
            self._own.discard(place)
            if place in self._shared:
                self._shared.remove(place)
                self._gone += consumed
        offsets: dict[tuple[str, str], dict[int, int]] = {}
        for place, queues in lags.items():
            before = self._last_offsets.get(place, {})
            past = sum(max(0, queue.offset - before.get(queue.queue_id, queue.offset)) for queue in queues)
            self._consumed[place] = self._consumed.get(place, 0) + past
            offsets[place] = {queue.queue_id: queue.offset for queue in queues}
        self._last_offsets = offsets

    def bounded(self, lags: list[GroupLag], groups_max: int) -> list[GroupLag]:
        """At most `groups_max` groups, and one sum of all others, including deleted groups."""
        room = groups_max - len(self._own)
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

    def _seconds(self, lagging: list[_QueueLag], now_ms: float) -> float | None:
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

    def _read_ages(self, lagging: list[_QueueLag]) -> None:
        """Read unknown store times: first queues without a result, then the others in turn."""
        self._passes += 1
        known = self._ages
        self._ages = {queue.key: known[queue.key] for queue in lagging if queue.key in known}
        ages = self._ages
        unknown = [queue for queue in lagging if not self._is_known(queue)]
        unknown.sort(key=lambda queue: (ages[queue.key].pass_number if queue.key in ages else -1, -queue.messages))
        if not unknown:
            return
        io, paths, options = self._io, self._paths, self._options
        segments = LogSegments(io, paths.commit_log, options.mapped_file_size_commit_log)
        records = LogRecords(segments, self._view.visible, KnownHoles(io, paths, segments.segment_size))
        files = ConsumeQueueFiles(io, paths.consume_queue, options.consume_queue_file_bytes)
        times = QueueTimes(self._view.queues, files, records)
        now_ms = time.time() * 1000
        try:
            for queue in unknown[:TIMES_MAX]:
                stored_ms = _store_time_ms(times, queue)
                seconds = max(0.0, (now_ms - stored_ms) / 1000) if stored_ms >= 0 else -1.0
                self._ages[queue.key] = _Age(queue.offset, stored_ms, seconds, self._passes)
        finally:
            # An open descriptor would keep the space of files that retention deletes.
            files.close()
            segments.close()

    def _is_known(self, queue: _QueueLag) -> bool:
        age = self._ages.get(queue.key)
        return age is not None and age.offset == queue.offset and age.stored_ms >= 0


def _store_time_ms(times: QueueTimes, queue: _QueueLag) -> int:
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
