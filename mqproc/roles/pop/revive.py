"""Redelivery of check points: copies of messages, start offsets in the revive topic."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from mqproc.errors import MqprocError
from mqproc.io.store_io import StoreIO
from mqproc.layout.record_codec import decode_records
from mqproc.roles.delivery_queue import RedeliveryBackoff, is_message_error
from mqproc.roles.groups.members import GroupMembers
from mqproc.roles.groups.state import ConsumerGroupState
from mqproc.roles.internal_producer import (
    ORIGIN,
    Identity,
    NewMessage,
    ReliableAppend,
    bare_copy,
    copy_of,
    has_room,
    identity,
)
from mqproc.roles.role import RoleContext
from mqproc.store.cooperative import Slices
from mqproc.store.offsets.offset_store import UNWRITABLE_ERRNOS, OffsetStore
from mqproc.store.offsets.pop_receipts import OpenCheckPoints, PopCheckPoint
from mqproc.store.read.queries import StoreQueries, batches
from mqproc.store.schedule.timer_store import read_timer_check
from mqproc.topic_names import (
    RETRY_GROUP,
    RETRY_PREFIX,
    REVIVE_GROUP,
    REVIVE_TOPIC,
    pop_retry_topic,
    retries_of_topic,
    retry_owner,
    retry_topic,
)
from mqproc.types import PullStatus, StoredMessage

RETRY_MS: Final = 200
BACKOFF: Final = RedeliveryBackoff(first_ms=RETRY_MS, max_ms=30_000)


@dataclass(slots=True)
class PopCopies:
    """Copies of messages for redelivery, and which of them are in the log."""

    reading: StoreQueries
    state: ConsumerGroupState
    max_bytes: int
    """Limit of record bytes in a pull."""
    _found: dict[Identity, int] = field(default_factory=dict)
    """Log positions of copies found at the start."""
    _last_found: int = -1

    def missing(self, found: PopCheckPoint, offsets: Iterable[int]) -> dict[int, NewMessage]:
        """Copies that are not in the log, by offset, of a check point's messages.

        Messages that are gone, or whose group was deleted, have no copy.
        """
        if found.dropped:
            return {}
        left = (offset for offset in offsets if offset not in found.copied)
        copies = {offset: copy for offset in left if (copy := self._copy(found, offset)) is not None}
        return {offset: copy for offset, copy in copies.items() if not self._is_found(found, copy)}

    def has(self, found: PopCheckPoint, offset: int) -> bool:
        """Whether the log has a copy of a message, which is redelivered even if acknowledged now."""
        if offset in found.copied:
            return True
        if self._last_found < found.log_begin:
            return False
        copy = self._copy(found, offset)
        return copy is not None and self._is_found(found, copy)

    def _is_found(self, found: PopCheckPoint, copy: NewMessage) -> bool:
        return self._found.get(identity(copy), -1) >= found.log_begin

    def find(self, topics: Iterable[str], begin: int) -> Slices[None]:
        """Find copies at or after a log position."""
        for topic in topics:
            bounds = self.reading.queues.bounds(topic, 0)
            if bounds is None:
                continue
            span = bounds.min_offset, bounds.max_offset
            first = self.reading.files.first_at_or_above(topic, 0, *span, begin, bounds.number)
            for messages, _next in batches(self.reading, topic, 0, first):
                self._found |= {identity(message): message.physical_offset for message in messages}
                self._last_found = max([self._last_found, *(message.physical_offset for message in messages)])
                yield

    def retry_delay_ms(self, found: PopCheckPoint, error: MqprocError) -> int:
        """Delay before copies of a check point are retried, with back-off if refused.

        There may be thousands of those, as without room for their topic, and other check points wait meanwhile.
        """
        if not is_message_error(error):
            return RETRY_MS
        found.retry_delay_ms = BACKOFF.next_ms(found.retry_delay_ms)
        return found.retry_delay_ms

    def init_offsets(self, group: str, copies: Iterable[NewMessage]) -> bool:
        """Set start offsets in the retry topics; False without room. Raises OSError."""
        try:
            for topic in {copy.topic for copy in copies if copy.topic.startswith(RETRY_PREFIX)}:
                self.state.init_retry_offset(group, topic, 0)
        except OSError as error:
            if error.errno not in UNWRITABLE_ERRNOS:
                raise
            return False
        return True

    def _copy(self, found: PopCheckPoint, offset: int) -> NewMessage | None:
        pulled = self.reading.pull(found.topic, found.queue_id, offset, 1, self.max_bytes)
        if pulled.status is not PullStatus.FOUND:
            return None
        message = decode_records(pulled.records.tobytes())[0]
        if message.queue_offset != offset:
            return None
        origin = found.original_topic
        if found.topic == retry_topic(found.group):
            origin = message.properties.get("RETRY_TOPIC", origin)
        own = {"RETRY_TOPIC": origin, ORIGIN: message.properties.get(ORIGIN, message.message_id), "WAIT": "false"}
        own[RETRY_GROUP] = found.group
        times = message.reconsume_times
        dead = times >= self.state.settings.of(found.group).retry_max_times
        copy = copy_of(message, found.retry_targets[dead], 0, own, times + 1)
        # A copy that is refused would block the redelivery of messages received together with it.
        return copy if has_room(copy) else bare_copy(message, found.retry_targets[True], times + 1)


@dataclass(frozen=True, slots=True)
class ReviveOffsets:
    """Offsets of the system group in the revive topic, up to the first open check point."""

    context: RoleContext
    reading: StoreQueries
    progress: OffsetStore
    writes: ReliableAppend
    open: OpenCheckPoints

    def move(self) -> None:
        """Advance the offsets up to the first open check point of each queue."""
        if self.writes.under_way or not self.progress.writable or not self._is_delivered():
            return
        first = self.open.oldest_revive_offsets()
        for queue_id in self.reading.queues.ids(REVIVE_TOPIC):
            bounds = self.reading.queues.bounds(REVIVE_TOPIC, queue_id)
            offset = first.get(queue_id, bounds.max_offset if bounds is not None else 0)
            before = self.progress.offset(REVIVE_GROUP, REVIVE_TOPIC, queue_id)
            if offset > (before or 0):
                try:
                    self.progress.set(REVIVE_GROUP, REVIVE_TOPIC, queue_id, offset)
                except OSError as error:
                    if error.errno not in UNWRITABLE_ERRNOS:
                        raise
                    # The next start reads more than necessary.
                    return

    def _is_delivered(self) -> bool:
        """Whether timed messages present at the start are delivered to the revive topic.

        An ack may precede its check point.
        """
        parked_until_ms = self.open.parked_until_ms
        if parked_until_ms >= 0 and read_timer_check(self.context.io, self.context.paths).read_ms > parked_until_ms:
            self.open.parked_until_ms = -1
        return self.open.parked_until_ms < 0


# Migration of retries when a group changes from simple consumers to members.
#
#     %RETRY%group_topic, from the group's offset on ──copies──▶ %RETRY%group ──stored──▶ offset passes them
#
# Members read the second topic only. Simple consumers read both, so the opposite direction needs no migration.


MOVED_MESSAGES: Final = 256
PERIOD_NS: Final = 1_000_000_000
Place = tuple[str, str, int]
"""Group, topic, queue id."""


@dataclass(slots=True)
class PopMigration:
    """Moves a part of one queue at a time. A kill between copies and offset repeats that part."""

    io: StoreIO
    reading: StoreQueries
    state: ConsumerGroupState
    copies: PopCopies
    writes: ReliableAppend
    _period_ns: int = 0
    _busy: bool = False
    _last_refused: Place | None = None
    """Last queue whose copies were refused: the queues after it come first next time."""
    _moved: dict[Place, tuple[int, set[int]]] = field(default_factory=dict)
    """Offset when some copies were refused, and the offsets of those that were stored."""

    def is_due(self, now_ns: int) -> bool:
        return now_ns >= self._period_ns and not self._busy

    def move(self, now_ns: int, members: Mapping[str, GroupMembers], busy: Container[Place]) -> int:
        """Move a part of the retries of groups with members; 0 if nothing is left."""
        self._period_ns = now_ns + PERIOD_NS
        if not members or not self.writes.has_room or not self.state.progress.writable:
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
            if topics := [topic for topic in self.state.progress.topics(group) if topic.startswith(begin)]:
                # Members may subscribe to such a topic directly.
                for topic in sorted(set(topics).difference(of.topics)):
                    yield from ((group, topic, queue_id) for queue_id in self.reading.queues.ids(topic))

    def _move_from(self, place: Place) -> bool:
        group, topic, queue_id = place
        bounds, at = self.reading.queues.bounds(topic, queue_id), self.state.progress.offset(*place)
        if bounds is None or at is None or at >= bounds.max_offset:
            return False
        own = retries_of_topic(group, topic.removeprefix(pop_retry_topic(group, "")))
        pulled = self.reading.pull(topic, queue_id, at, MOVED_MESSAGES, self.copies.max_bytes, sql=own)
        if pulled.next_offset <= at:
            return False
        if pulled.status is not PullStatus.FOUND:
            self.state.progress.set(*place, pulled.next_offset)
            return True
        moved_at, moved = self._moved.get(place, (at, set()))
        if moved_at != at:
            moved = set()
        messages = decode_records(pulled.records.tobytes())
        copies = {each.queue_offset: _retry_message(each, group) for each in messages if each.queue_offset not in moved}
        if not copies:
            # The messages whose copies were refused are gone, as by damage.
            self._moved.pop(place, None)
            self.state.progress.set(*place, pulled.next_offset)
            return True
        if not self.copies.init_offsets(group, copies.values()):
            return False
        self._moved[place] = at, moved
        self._send(place, at, pulled.next_offset, copies)
        return True

    def _send(self, place: Place, at: int, next_offset: int, copies: Mapping[int, NewMessage]) -> None:
        self._busy = True

        def part(some: Sequence[NewMessage]) -> None:
            self._moved[place][1].update(stored_offsets(copies, some))

        def stored(_offset: int) -> None:
            self.io.crash_point("pop.moved")
            # Meanwhile a reset may have moved the offset, or a deletion removed it.
            if self.state.progress.offset(*place) == at:
                self.state.progress.set(*place, next_offset)
            self._moved.pop(place, None)
            self._busy, self._period_ns = False, 0

        def refused(_error: MqprocError) -> None:
            self._busy = False
            self._last_refused = place

        self.writes.store([*copies.values()], stored, refused, part)


def stored_offsets(copies: Mapping[int, NewMessage], stored: Iterable[NewMessage]) -> set[int]:
    """Offsets of the copies that are among the stored messages."""
    stored_ids = set(map(id, stored))
    return {offset for offset, copy in copies.items() if id(copy) in stored_ids}


def _retry_message(message: StoredMessage, group: str) -> NewMessage:
    topic, times = retry_topic(group), message.reconsume_times
    copy = copy_of(message, topic, 0, _own(message, group), times)
    return copy if has_room(copy) else bare_copy(message, topic, times)


def _own(message: StoredMessage, group: str) -> dict[str, str]:
    """Origin properties of a copy, which RocketMQ's simple consumers leave out."""
    first = {"RETRY_TOPIC": message.topic.removeprefix(pop_retry_topic(group, "")), ORIGIN: message.message_id}
    return {name: message.properties.get(name, value) for name, value in first.items()} | retry_owner(group)
