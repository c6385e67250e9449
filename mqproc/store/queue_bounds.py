"""Which queues there are and what of them can be read: from the shared queue table, or found in a store's files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from mqproc.layout import queue_table as layout
from mqproc.store.queue_table import QueueTable


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """Queue offsets in [min_offset, max_offset) can be read. `number` is the queue's in the table, 0 without one."""

    number: int
    min_offset: int
    max_offset: int


class Queues(Protocol):
    """What reading asks about queues; every answer is of this moment."""

    def bounds(self, topic: str, queue_id: int) -> QueueBounds | None:
        """None when there is no such queue."""
        ...

    def ids(self, topic: str) -> list[int]:
        """The topic's queue ids, ascending; none for an unknown topic."""
        ...

    def topics(self) -> list[str]:
        """Topics that have a queue, sorted."""
        ...


class TableQueues:
    """Queues of a running group, by its queue table."""

    def __init__(self, table: QueueTable) -> None:
        self._table = table
        self._numbers: dict[str, list[int]] = {}
        self._known = 0

    def bounds(self, topic: str, queue_id: int) -> QueueBounds | None:
        number = self._table.find(topic, queue_id)
        if number < 0:
            return None
        # The minimum first: it never passes the maximum that is read after it.
        minimum = self._table.min_offset(number)
        return QueueBounds(number, minimum, self._table.max_offset(number))

    def ids(self, topic: str) -> list[int]:
        self._read_new()
        table = self._table
        live = (number for number in self._numbers.get(topic, ()) if self._is_live(number))
        return sorted(table.name(number)[1] for number in live)

    def topics(self) -> list[str]:
        self._read_new()
        return sorted(topic for topic, numbers in self._numbers.items() if any(map(self._is_live, numbers)))

    def _is_live(self, number: int) -> bool:
        return self._table.words[layout.entry_word(number, layout.STATE)] == layout.STATE_LIVE

    def _read_new(self) -> None:
        for number in range(self._known, self._table.count):
            self._numbers.setdefault(self._table.name(number)[0], []).append(number)
        self._known = max(self._known, self._table.count)


class FoundQueues:
    """Queues of a store that nobody runs, as its files told once."""

    def __init__(self, found: Mapping[tuple[str, int], QueueBounds]) -> None:
        self._found = dict(found)
        self._ids: dict[str, list[int]] = {}
        for topic, queue_id in sorted(self._found):
            self._ids.setdefault(topic, []).append(queue_id)

    def bounds(self, topic: str, queue_id: int) -> QueueBounds | None:
        return self._found.get((topic, queue_id))

    def ids(self, topic: str) -> list[int]:
        return list(self._ids.get(topic, ()))

    def topics(self) -> list[str]:
        return list(self._ids)


def each_queue(queues: Queues, topics: Iterable[str] | None = None) -> Iterator[tuple[str, int, QueueBounds]]:
    """(topic, queue id, bounds) of every queue of the topics (None: of all), in order."""
    for topic in queues.topics() if topics is None else topics:
        for queue_id in queues.ids(topic):
            bounds = queues.bounds(topic, queue_id)
            if bounds is not None:
                yield topic, queue_id, bounds
