"""A group that had simple consumers and has members now: what came again to those goes to where these read it.

    %RETRY%group_topic, from the group's progress on ──copies──▶ %RETRY%group ──stored──▶ progress goes past them

Simple consumers read both, so nothing is to be moved the other way.
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
    from mqproc.roles.groups.state import GroupState
    from mqproc.roles.internal_producer import ReliableAppend
    from mqproc.roles.pop.revive import PopCopies
    from mqproc.store.read.queries import StoreQueries

MOVED_MESSAGES: Final = 256
LOOK_NS: Final = 1_000_000_000
Place = tuple[str, str, int]
"""Group, topic, queue id."""


class PopMigration:
    """Moves a part of one queue at a time. A kill between the copies and the progress has that part come twice."""

    def __init__(
        self,
        io: StoreIO,
        reading: StoreQueries,
        state: GroupState,
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
        self._look_ns = 0
        self._under_way = False
        self._refused: Place | None = None
        """The last place whose copies were refused: the others behind it are first now."""
        self._moved: dict[Place, tuple[int, set[int]]] = {}
        """Where progress stood when copies were refused, and the offsets of those that were stored all the same."""

    def is_due(self, now_ns: int) -> bool:
        """Whether it is time to look for something to move."""
        return now_ns >= self._look_ns and not self._under_way

    def move(self, now_ns: int, members: Mapping[str, GroupMembers], busy: Container[Place]) -> int:
        """Send a part of what groups with members have left; 0: there is nothing. `busy` are being received from."""
        self._look_ns = now_ns + LOOK_NS
        if not members or not self._writes.has_room or not self._state.progress.writable:
            return 0
        return next((1 for place in self._in_turn(members) if place not in busy and self._move_of(place)), 0)

    def _in_turn(self, members: Mapping[str, GroupMembers]) -> list[Place]:
        """All that may be moved; one that is refused, as without room for the topic, does not keep the others."""
        places = list(self._left(members))
        first = places.index(self._refused) + 1 if self._refused in places else 0
        return places[first:] + places[:first]

    def _left(self, members: Mapping[str, GroupMembers]) -> Iterator[Place]:
        for group, of in members.items():
            begin = pop_retry_topic(group, "")
            if topics := [topic for topic in self._state.progress.topics(group) if topic.startswith(begin)]:
                # One that members name as a topic of theirs is theirs as it is.
                for topic in sorted(set(topics).difference(of.topics)):
                    yield from ((group, topic, queue_id) for queue_id in self._reading.queues.ids(topic))

    def _move_of(self, place: Place) -> bool:
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
            # Those that were refused are gone, as by damage.
            self._moved.pop(place, None)
            self._state.progress.set(*place, pulled.next_offset)
            return True
        if not self._copies.begin_progress(group, copies.values()):
            return False
        self._moved[place] = at, moved
        self._send(place, at, pulled.next_offset, copies)
        return True

    def _send(self, place: Place, at: int, next_offset: int, copies: Mapping[int, NewMessage]) -> None:
        self._under_way = True

        def part(some: Sequence[NewMessage]) -> None:
            told = set(map(id, some))
            self._moved[place][1].update(offset for offset, copy in copies.items() if id(copy) in told)

        def stored(_offset: int) -> None:
            self._io.crash_point("pop.moved")
            # A reset may have moved it meanwhile, a deletion may have taken it.
            if self._state.progress.offset(*place) == at:
                self._state.progress.set(*place, next_offset)
            self._moved.pop(place, None)
            self._under_way, self._look_ns = False, 0

        def refused(_error: MqprocError) -> None:
            self._under_way = False
            self._refused = place

        self._writes.store([*copies.values()], stored, refused, part)


def _moved(message: StoredMessage, group: str) -> NewMessage:
    topic, times = retry_topic(group), message.reconsume_times
    copy = copy_of(message, topic, 0, _own(message, group), times)
    return copy if has_room(copy) else bare_copy(message, topic, times)


def _own(message: StoredMessage, group: str) -> dict[str, str]:
    """What tells of a copy where it was first; RocketMQ's simple consumers leave it out."""
    first = {"RETRY_TOPIC": message.topic.removeprefix(pop_retry_topic(group, "")), ORIGIN: message.message_id}
    return {name: message.properties.get(name, value) for name, value in first.items()}
