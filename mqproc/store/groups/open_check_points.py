"""Check points whose messages are not all acknowledged: in the memory of who serves them, and read from their topic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from mqproc.names import REVIVE_TOPIC
from mqproc.store.groups import check_points
from mqproc.store.groups.check_points import REVIVE_GROUP, CheckPoint, Key
from mqproc.store.groups.offsets_json import Progress
from mqproc.store.reads.queue_messages import batches
from mqproc.store.reads.reading import StoreReading
from mqproc.store.slices import Slices

_FOUND_PER_SLICE: Final = 1024
NOWHERE: Final = 1 << 62
"""Above every position of a log."""


class OpenCheckPoints:
    """The open check points of one store, by key."""

    def __init__(self) -> None:
        self._open: dict[Key, CheckPoint] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[CheckPoint]:
        return iter(self._open.values())

    def get(self, key: Key) -> CheckPoint | None:
        """None when all its messages are done, or nobody knows it."""
        return self._open.get(key)

    def add(self, found: CheckPoint) -> None:
        self._open[found.key] = found

    def done(self, found: CheckPoint, offsets: Iterable[int]) -> None:
        """Messages of a check point are acknowledged."""
        found.open.difference_update(offsets)
        found.acking.difference_update(offsets)
        if not found.open:
            self._open.pop(found.key, None)

    @property
    def log_begin(self) -> int:
        """No open message lies below this position of the log."""
        return min((found.physical_offset for found in self), default=NOWHERE)

    def revive_begins(self) -> dict[int, int]:
        """Where the first open one lies in each queue of the revive topic that has some."""
        first: dict[int, int] = {}
        for found in self:
            first[found.revive_queue] = min(first.get(found.revive_queue, found.revive_offset), found.revive_offset)
        return first

    def read(self, reading: StoreReading, begins: dict[int, int]) -> Slices[None]:
        """Find out what is open from the revive topic: `begins` is where to begin in its queues."""
        newest: dict[tuple[str, str, int, int], CheckPoint] = {}
        # RocketMQ may store an acknowledgement before its check point.
        early: dict[Key, set[int]] = {}
        for queue_id in reading.queues.ids(REVIVE_TOPIC):
            for messages, _next in batches(reading, REVIVE_TOPIC, queue_id, begins.get(queue_id, 0)):
                for message in messages:
                    said = check_points.read(message)
                    if isinstance(said, CheckPoint):
                        self._take_over(said, newest)
                        self.done(said, early.pop(said.key, ()))
                    elif said is not None and (found := self.get(said.key)) is not None:
                        self.done(found, said.offsets)
                    elif said is not None:
                        early.setdefault(said.key, set()).update(said.offsets)
                yield
        for number, found in enumerate(list(self)):
            if number % _FOUND_PER_SLICE == _FOUND_PER_SLICE - 1:
                yield
            bounds = reading.queues.bounds(found.topic, found.queue_id)
            place = found.topic, found.queue_id, min(found.open)
            at = reading.files.position_at(*place, bounds.number) if bounds is not None else None
            found.physical_offset = NOWHERE if at is None else at

    def _take_over(self, said: CheckPoint, newest: dict[tuple[str, str, int, int], CheckPoint]) -> None:
        """A message is its newest check point's: the one before may not have got its acknowledgement."""
        self.add(said)
        for offset in said.offsets:
            place = said.group, said.topic, said.queue_id, offset
            before = newest.setdefault(place, said)
            if before.pop_time_ms < said.pop_time_ms:
                self.done(before, [offset])
                newest[place] = said
            elif before.pop_time_ms > said.pop_time_ms:
                self.done(said, [offset])


def begins_of(progress: Iterable[Progress]) -> dict[int, int]:
    """Where to begin in the queues of the revive topic, of the progress of all groups."""
    return {at.queue_id: at.offset for at in progress if (at.group, at.topic) == (REVIVE_GROUP, REVIVE_TOPIC)}
