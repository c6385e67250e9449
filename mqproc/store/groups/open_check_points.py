"""Check points whose messages are not all acknowledged: in the memory of who serves them, and read from their topic.

RocketMQ parks check points and acknowledgements in its timer until they are nearly due. Those that it has parked are
read where they wait; when the keeper delivers them to the revive topic later, they say nothing new.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from mqproc.layout.properties import REAL_QID, REAL_TOPIC, TIMER_OUT_MS
from mqproc.message import StoredMessage
from mqproc.names import REVIVE_GROUP, REVIVE_TOPIC, TIMER_TOPIC
from mqproc.store.groups import check_points
from mqproc.store.groups.check_points import NEVER, TAGS, CheckPoint, Key
from mqproc.store.groups.offsets_json import Progress
from mqproc.store.reads.queue_messages import batches
from mqproc.store.reads.reading import StoreReading
from mqproc.store.slices import Slices

_FOUND_PER_SLICE: Final = 1024
ACKS_KEPT: Final = 16_384
"""So many messages it is known of that they were acknowledged, the last ones of each queue of the revive topic."""


class OpenCheckPoints:
    """The open check points of one store, by key."""

    def __init__(self) -> None:
        self._open: dict[Key, CheckPoint] = {}
        self.parked_until_ms = -1
        """The last slot of the timer in which something was parked when it was read."""
        self._acknowledged: dict[int, deque[tuple[Key, int]]] = {}
        """By queue of the revive topic, those that were read; who was to be told of the last of them may have died."""
        self._done_before: set[tuple[Key, int]] = set()

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

    def was_acknowledged(self, key: Key, offset: int) -> bool:
        """Whether a message was, shortly before this was read."""
        return (key, offset) in self._done_before

    def acknowledged(self, key: Key, offsets: Iterable[int], revive_queue: int) -> None:
        """Messages of a check point were, as a queue of the revive topic says."""
        kept = self._acknowledged.setdefault(revive_queue, deque(maxlen=ACKS_KEPT))
        kept.extend((key, offset) for offset in offsets)

    @property
    def log_begin(self) -> int:
        """No open message lies below this position of the log."""
        return min((found.physical_offset for found in self), default=NEVER)

    def revive_begins(self) -> dict[int, int]:
        """Where the first open one lies in each queue of the revive topic that has some."""
        first: dict[int, int] = {}
        for found in self:
            first[found.revive_queue] = min(first.get(found.revive_queue, found.revive_offset), found.revive_offset)
        return first

    def read(self, reading: StoreReading, begins: dict[int, int], timer_read_ms: int) -> Slices[None]:
        """Find out what is open: `begins` says where to begin in the revive topic, `timer_read_ms` in the timer."""
        said = _Said(self)
        for queue_id in reading.queues.ids(REVIVE_TOPIC):
            for messages, _next in batches(reading, REVIVE_TOPIC, queue_id, begins.get(queue_id, 0)):
                for message in messages:
                    said.take(message)
                yield
        for messages, _next in batches(reading, TIMER_TOPIC, 0, 0, TAGS):
            for message in messages:
                if message.properties.get(REAL_TOPIC) == REVIVE_TOPIC:
                    self._take_parked(message, said, begins, timer_read_ms)
            yield
        self._done_before = set().union(*self._acknowledged.values())
        self._acknowledged.clear()
        for number, found in enumerate(list(self)):
            if number % _FOUND_PER_SLICE == _FOUND_PER_SLICE - 1:
                yield
            bounds = reading.queues.bounds(found.topic, found.queue_id)
            place = found.topic, found.queue_id, min(found.open)
            at = reading.files.position_at(*place, bounds.number) if bounds is not None else None
            found.physical_offset = NEVER if at is None else at

    def _take_parked(self, message: StoredMessage, said: _Said, begins: dict[int, int], timer_read_ms: int) -> None:
        """What the timer has not delivered yet will lie behind what the revive topic has now."""
        slot, queue = message.properties.get(TIMER_OUT_MS, ""), message.properties.get(REAL_QID, "")
        if slot.isdigit() and queue.isdigit() and int(slot) >= timer_read_ms:
            self.parked_until_ms = max(self.parked_until_ms, int(slot))
            queue_id = int(queue)
            said.take(replace(message, queue_id=queue_id, queue_offset=begins.get(queue_id, 0)))


class _Said:
    """What check points and acknowledgements say, in whatever order they are read, and however often."""

    def __init__(self, found: OpenCheckPoints) -> None:
        self._found = found
        self._known: set[Key] = set()
        self._early: dict[Key, set[int]] = {}
        """Of acknowledgements that were read before their check points."""
        self._newest: dict[tuple[str, str, int, int], CheckPoint] = {}

    def take(self, message: StoredMessage) -> None:
        said = check_points.read(message)
        if isinstance(said, CheckPoint):
            if said.key not in self._known:
                self._known.add(said.key)
                self._add(said)
                self._found.done(said, self._early.pop(said.key, ()))
        elif said is not None and said.key not in self._known:
            self._early.setdefault(said.key, set()).update(said.offsets)
        elif said is not None and (found := self._found.get(said.key)) is not None:
            # Later ones may be of messages that were sent again.
            if message.store_timestamp_ms < found.due_ms:
                self._found.acknowledged(found.key, sorted(found.open.intersection(said.offsets)), message.queue_id)
            self._found.done(found, said.offsets)

    def _add(self, said: CheckPoint) -> None:
        """A message is its newest check point's: the one before may not have got its acknowledgement."""
        self._found.add(said)
        for offset in said.offsets:
            place = said.group, said.topic, said.queue_id, offset
            before = self._newest.setdefault(place, said)
            if said.is_newer(before):
                self._found.done(before, [offset])
                self._newest[place] = said
            elif before.is_newer(said):
                self._found.done(said, [offset])


def begins_of(progress: Iterable[Progress]) -> dict[int, int]:
    """Where to begin in the queues of the revive topic, of the progress of all groups."""
    return {at.queue_id: at.offset for at in progress if (at.group, at.topic) == (REVIVE_GROUP, REVIVE_TOPIC)}
