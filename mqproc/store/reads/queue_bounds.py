"""Which queues there are and what of them can be read: from the shared queue table, or found in a store's files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

import msgspec

from mqproc.layout import queue_table as layout
from mqproc.store.consume_queue import UNIT_SIZE, ConsumeQueueFiles
from mqproc.store.deleted_topics import Deletion
from mqproc.store.queue_table import QueueTable


class QueueBounds(msgspec.Struct, frozen=True):
    """Queue offsets in [min_offset, max_offset) can be read.

    `number` tells the queue from others, and from a deleted one that had its name; 0 without a queue table.
    """

    number: int
    min_offset: int
    max_offset: int


class Deletions(NamedTuple):
    """What has gone so far: the log's minimum, files of queues and index that retention deleted, queues of topics."""

    min_physical_offset: int = 0
    queue_files: int = 0
    index_files: int = 0
    queues: tuple[int, int] = (0, 0)


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

    def deletion(self, topic: str, queue_id: int) -> tuple[int, int]:
        """Where log and queue offsets ended when a queue of this name was deleted the last time: records below both
        were that one's. (0, 0) when it never was.
        """
        ...


class TableQueues:
    """Queues of a running group, by its queue table."""

    def __init__(self, table: QueueTable) -> None:
        self._table = table
        self._numbers: dict[str, list[int]] = {}
        self._known = 0

    def bounds(self, topic: str, queue_id: int) -> QueueBounds | None:
        found = self._table.bounds(topic, queue_id)
        return None if found is None else QueueBounds(*found)

    def ids(self, topic: str) -> list[int]:
        self._read_new()
        table = self._table
        live = (number for number in self._numbers.get(topic, ()) if self._is_live(number))
        return sorted(table.name(number)[1] for number in live)

    def topics(self) -> list[str]:
        self._read_new()
        return sorted(topic for topic, numbers in self._numbers.items() if any(map(self._is_live, numbers)))

    def deletion(self, topic: str, queue_id: int) -> tuple[int, int]:
        number = self._table.entry(topic, queue_id) if self._table.deletions else -1
        return self._table.deletion(number) if number >= 0 else (0, 0)

    def _is_live(self, number: int) -> bool:
        return self._table.words[layout.entry_word(number, layout.STATE)] == layout.STATE_LIVE

    def _read_new(self) -> None:
        # Read once: the writer may make another queue meanwhile.
        count = self._table.count
        for number in range(self._known, count):
            self._numbers.setdefault(self._table.name(number)[0], []).append(number)
        self._known = count


class FoundQueues:
    """Queues of a store that nobody runs, as its files told once."""

    def __init__(
        self, found: Mapping[tuple[str, int], QueueBounds], deletions: Mapping[str, Deletion] | None = None
    ) -> None:
        self._found = dict(found)
        self._deletions = dict(deletions or {})
        self._ids: dict[str, list[int]] = {}
        for topic, queue_id in sorted(self._found):
            self._ids.setdefault(topic, []).append(queue_id)

    def bounds(self, topic: str, queue_id: int) -> QueueBounds | None:
        return self._found.get((topic, queue_id))

    def ids(self, topic: str) -> list[int]:
        return list(self._ids.get(topic, ()))

    def topics(self) -> list[str]:
        return list(self._ids)

    def deletion(self, topic: str, queue_id: int) -> tuple[int, int]:
        found = self._deletions.get(topic)
        return (found.physical_offset, found.next_offset(queue_id)) if found is not None else (0, 0)


class RocketmqQueues:
    """The same queues with the bounds that RocketMQ gives them.

    It makes an empty queue of each one that is asked about. It looks for a queue's minimum in the first file only: one
    whose units all point below the log, which its next cleaning deletes, still counts from its start.
    """

    def __init__(self, queues: Queues, files: ConsumeQueueFiles) -> None:
        self._queues = queues
        self._files = files

    def bounds(self, topic: str, queue_id: int) -> QueueBounds:
        found = self._queues.bounds(topic, queue_id)
        if found is None:
            return QueueBounds(0, 0, 0)
        if not 0 < found.min_offset < found.max_offset:
            return found
        starts = self._files.starts(topic, queue_id)
        if not starts or found.min_offset * UNIT_SIZE < starts[0] + self._files.file_bytes:
            return found
        return msgspec.structs.replace(found, min_offset=starts[0] // UNIT_SIZE)

    def ids(self, topic: str) -> list[int]:
        return self._queues.ids(topic)

    def topics(self) -> list[str]:
        return self._queues.topics()

    def deletion(self, topic: str, queue_id: int) -> tuple[int, int]:
        """RocketMQ knows of none."""
        return 0, 0


def each_queue(queues: Queues, topics: Iterable[str] | None = None) -> Iterator[tuple[str, int, QueueBounds]]:
    """(topic, queue id, bounds) of every queue of the topics (None: of all), in order."""
    for topic in queues.topics() if topics is None else topics:
        for queue_id in queues.ids(topic):
            bounds = queues.bounds(topic, queue_id)
            if bounds is not None:
                yield topic, queue_id, bounds
