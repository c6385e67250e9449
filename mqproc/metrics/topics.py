"""Figures by topic, from the queue table: a few array operations, however many queues there are."""

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
"""The label of all topics beyond the bound; no topic can be called so."""

_GROWTH: Final = 1024


@dataclass(frozen=True, slots=True)
class TopicFigures:
    """One topic's queues together."""

    topic: str
    queues: int
    appended: int
    """Messages ever appended: the sum of the next offsets, those of deleted queues too."""
    stored: int
    """Messages that can be read."""
    delivered: int
    """Messages handed out since the group started, from queues that were deleted since, too."""
    last_store_timestamp_ms: int
    """Of the queues that are there; 0 while they have got none."""


@dataclass(frozen=True, slots=True)
class TableFigures:
    """The whole table. `topics` has at most the bound's number of entries, and one for all others; `every` has all."""

    topics: list[TopicFigures]
    every: list[TopicFigures]
    topic_count: int
    queue_count: int
    used_ratio: float
    unit_bytes: int
    """Of ConsumeQueue units that are kept."""
    unit_files: int


class TopicTable:
    """Adds a queue table up by topic. Which topic a number belongs to is read once, since it never changes."""

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
        """Topics that have an entry of their own; each stays where it was put, since counts must not move."""
        self._shared: set[str] = set()

    def figures(self) -> TableFigures:
        """The table as it is now."""
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
        # The dispatcher's and the keeper's words may still be those of a queue that was deleted.
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
        """Learn the topics of queues that were made since the last look."""
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
        """All topics in the order in which they were made, deleted ones too: sums, and the newest store time.

        Queues that were deleted are in the sums: what counts must not go back when a topic is made again with fewer.
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
        """Topics that have queues, but for those that found no room; these added up, with what was deleted of them."""
        live = [topic for topic in topics if topic.queues]
        room = self._topics_max - sum(topic.topic in self._own for topic in live)
        for topic in live:
            if topic.topic not in self._own and topic.topic not in self._shared:
                (self._own if room > 0 else self._shared).add(topic.topic)
                room -= 1
        kept = [topic for topic in live if topic.topic in self._own]
        others = [topic for topic in topics if topic.topic in self._shared]
        if not others:
            return kept
        together = TopicFigures(
            OTHERS,
            sum(topic.queues for topic in others),
            sum(topic.appended for topic in others),
            sum(topic.stored for topic in others),
            sum(topic.delivered for topic in others),
            max(topic.last_store_timestamp_ms for topic in others),
        )
        return [*kept, together]
