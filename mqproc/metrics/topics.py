"""Per-topic statistics from the queue table, by array operations over all queues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.layout import queue_table as layout
from mqproc.layout.consume_queue import UNIT_SIZE
from mqproc.store.consumequeue.table import QueueTable

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
    """Of existing queues; 0 while they are empty."""


@dataclass(frozen=True, slots=True)
class TableFigures:
    """The whole table. `topics` is limited, with one entry for all others; `every` has all."""

    topics: list[TopicFigures]
    every: list[TopicFigures]
    topic_count: int
    queue_count: int
    used_ratio: float
    unit_bytes: int
    """Of existing ConsumeQueue units."""
    unit_files: int


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
        """Read the table now."""
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
            topics=self._bounded(topics),
            every=every,
            topic_count=len(every),
            queue_count=int(live.sum()),
            used_ratio=count / table.capacity,
            unit_bytes=int(stored.sum()) * UNIT_SIZE,
            unit_files=int(files.sum()),
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
        """All topics in the order of creation, deleted ones included: sums, and newest store time.

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

    def _bounded(self, topics: list[TopicFigures]) -> list[TopicFigures]:
        """Topics with their own series, and the sum of all others, deleted ones included."""
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
