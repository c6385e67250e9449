"""Migration of retries when a group changes from simple consumers to members.

    %RETRY%group_topic, from the group's offset on ──copies──▶ %RETRY%group ──stored──▶ offset passes them

Members read the second topic only. Simple consumers read both, so the opposite direction needs no migration.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from mqproc.errors import MqprocError
from mqproc.layout.record_codec import decode_records
from mqproc.roles.internal_producer import ORIGIN, NewMessage, bare_copy, copy_of, has_room
from mqproc.store.offsets.pop_receipts import pop_retry_topic
from mqproc.topic_names import retry_topic
from mqproc.types import PullStatus, StoredMessage

if TYPE_CHECKING:
    from mqproc.io.store_io import StoreIO
    from mqproc.roles.groups.members import GroupMembers
    from mqproc.roles.groups.state import ConsumerGroupState
    from mqproc.roles.internal_producer import ReliableAppend
    from mqproc.roles.pop.revive import PopCopies
    from mqproc.store.read.queries import StoreQueries

MOVED_MESSAGES: Final = 256
PERIOD_NS: Final = 1_000_000_000
Place = tuple[str, str, int]
"""Group, topic, queue id."""


class PopMigration:
    """Moves a part of one queue at a time. A kill between copies and offset repeats that part."""

    def __init__(
        self,
        io: StoreIO,
        reading: StoreQueries,
        state: ConsumerGroupState,
        copies: PopCopies,
        writes: ReliableAppend,
        max_bytes: int,
    ) -> None:
        self._io = io
        self._reading = reading
        self._state = state
        self._copies = copies
        self._writes = writes
        self._max_bytes = max_bytes
        self._period_ns = 0
        self._busy = False
        self._last_refused: Place | None = None
        """Last queue whose copies were refused: the queues after it come first next time."""
        self._moved: dict[Place, tuple[int, set[int]]] = {}
        """Offset when some copies were refused, and the offsets of those that were stored."""

    def is_due(self, now_ns: int) -> bool:
        """Whether it is time to check for retries to move."""
        return now_ns >= self._period_ns and not self._busy

    def move(self, now_ns: int, members: Mapping[str, GroupMembers], busy: Container[Place]) -> int:
        """Move a part of the retries of groups with members; 0 if nothing is left."""
        self._period_ns = now_ns + PERIOD_NS
        if not members or not self._writes.has_room or not self._state.progress.writable:
            return 0
        return next((1 for place in self._candidates(members) if place not in busy and self._move_from(place)), 0)

    def _candidates(self, members: Mapping[str, GroupMembers]) -> list[Place]:
        """Queues to move, rotated so that one that is refused does not block the others."""
        places = list(self._places(members))
        first = places.index(self._last_refused) + 1 if self._last_refused in places else 0
        return places[first:] + places[:first]

    def _places(self, members: Mapping[str, GroupMembers]) -> Iterator[Place]:
        for group, of in members.items():
            begin = pop_retry_topic(group, "")
            if topics := [topic for topic in self._state.progress.topics(group) if topic.startswith(begin)]:
                # Members may subscribe to such a topic directly.
                for topic in sorted(set(topics).difference(of.topics)):
                    yield from ((group, topic, queue_id) for queue_id in self._reading.queues.ids(topic))

    def _move_from(self, place: Place) -> bool:
        group, topic, queue_id = place
        bounds, at = self._reading.queues.bounds(topic, queue_id), self._state.progress.offset(*place)
        if bounds is None or at is None or at >= bounds.max_offset:
            return False
        pulled = self._reading.pull(topic, queue_id, at, MOVED_MESSAGES, self._max_bytes)
        if pulled.next_offset <= at:
            return False
        if pulled.status is not PullStatus.FOUND:
            self._state.progress.set(*place, pulled.next_offset)
            return True
        moved_at, moved = self._moved.get(place, (at, set()))
        if moved_at != at:
            moved = set()
        messages = decode_records(pulled.records.tobytes())
        copies = {each.queue_offset: _moved(each, group) for each in messages if each.queue_offset not in moved}
        if not copies:
            # The messages whose copies were refused are gone, as by damage.
            self._moved.pop(place, None)
            self._state.progress.set(*place, pulled.next_offset)
            return True
        if not self._copies.init_offsets(group, copies.values()):
            return False
        self._moved[place] = at, moved
        self._send(place, at, pulled.next_offset, copies)
        return True

    def _send(self, place: Place, at: int, next_offset: int, copies: Mapping[int, NewMessage]) -> None:
        self._busy = True

        def part(some: Sequence[NewMessage]) -> None:
            stored_ids = set(map(id, some))
            self._moved[place][1].update(offset for offset, copy in copies.items() if id(copy) in stored_ids)

        def stored(_offset: int) -> None:
            self._io.crash_point("pop.moved")
            # Meanwhile a reset may have moved the offset, or a deletion removed it.
            if self._state.progress.offset(*place) == at:
                self._state.progress.set(*place, next_offset)
            self._moved.pop(place, None)
            self._busy, self._period_ns = False, 0

        def refused(_error: MqprocError) -> None:
            self._busy = False
            self._last_refused = place

        self._writes.store([*copies.values()], stored, refused, part)


def _moved(message: StoredMessage, group: str) -> NewMessage:
    topic, times = retry_topic(group), message.reconsume_times
    copy = copy_of(message, topic, 0, _own(message, group), times)
    return copy if has_room(copy) else bare_copy(message, topic, times)


def _own(message: StoredMessage, group: str) -> dict[str, str]:
    """Origin properties of a copy, which RocketMQ's simple consumers leave out."""
    first = {"RETRY_TOPIC": message.topic.removeprefix(pop_retry_topic(group, "")), ORIGIN: message.message_id}
    return {name: message.properties.get(name, value) for name, value in first.items()}
