"""Redelivery of check points: copies of messages, start offsets in the revive topic."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from mqproc.layout.record_codec import decode_records
from mqproc.roles.delivery_queue import RedeliveryBackoff, is_message_error
from mqproc.roles.internal_producer import ORIGIN, Identity, NewMessage, bare_copy, copy_of, has_room, identity
from mqproc.store.cooperative import Slices
from mqproc.store.offsets.offset_store import UNWRITABLE_ERRNOS
from mqproc.store.offsets.pop_receipts import PopCheckPoint
from mqproc.store.read.queries import batches
from mqproc.store.schedule.timer_store import read_timer_check
from mqproc.topic_names import RETRY_PREFIX, REVIVE_GROUP, REVIVE_TOPIC, retry_topic
from mqproc.types import PullStatus

if TYPE_CHECKING:
    from mqproc.errors import MqprocError
    from mqproc.roles.groups.state import ConsumerGroupState
    from mqproc.roles.internal_producer import ReliableAppend
    from mqproc.roles.role import RoleContext
    from mqproc.store.offsets.offset_store import OffsetStore
    from mqproc.store.offsets.pop_receipts import OpenCheckPoints
    from mqproc.store.read.queries import StoreQueries

RETRY_MS: Final = 200
BACKOFF: Final = RedeliveryBackoff(first_ms=RETRY_MS, max_ms=30_000)


class PopCopies:
    """Copies of messages for redelivery, and which of them are in the log."""

    def __init__(self, reading: StoreQueries, state: ConsumerGroupState, max_bytes: int) -> None:
        self._reading = reading
        self._state = state
        self._max_bytes = max_bytes
        self._found: dict[Identity, int] = {}
        """Log positions of copies found at the start."""
        self._last_found = -1

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
            bounds = self._reading.queues.bounds(topic, 0)
            if bounds is None:
                continue
            span = bounds.min_offset, bounds.max_offset
            first = self._reading.files.first_at_or_above(topic, 0, *span, begin, bounds.number)
            for messages, _next in batches(self._reading, topic, 0, first):
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
                self._state.init_retry_offset(group, topic, 0)
        except OSError as error:
            if error.errno not in UNWRITABLE_ERRNOS:
                raise
            return False
        return True

    def _copy(self, found: PopCheckPoint, offset: int) -> NewMessage | None:
        pulled = self._reading.pull(found.topic, found.queue_id, offset, 1, self._max_bytes)
        if pulled.status is not PullStatus.FOUND:
            return None
        message = decode_records(pulled.records.tobytes())[0]
        if message.queue_offset != offset:
            return None
        origin = found.original_topic
        if found.topic == retry_topic(found.group):
            origin = message.properties.get("RETRY_TOPIC", origin)
        own = {"RETRY_TOPIC": origin, ORIGIN: message.properties.get(ORIGIN, message.message_id), "WAIT": "false"}
        times = message.reconsume_times
        dead = times >= self._state.settings.of(found.group).retry_max_times
        copy = copy_of(message, found.retry_targets[dead], 0, own, times + 1)
        # A copy that is refused would block the redelivery of messages received together with it.
        return copy if has_room(copy) else bare_copy(message, found.retry_targets[True], times + 1)


class ReviveOffsets:
    """Offsets of the system group in the revive topic, up to the first open check point."""

    def __init__(
        self,
        context: RoleContext,
        reading: StoreQueries,
        progress: OffsetStore,
        writes: ReliableAppend,
        open_points: OpenCheckPoints,
    ) -> None:
        self._io, self._paths = context.io, context.paths
        self._reading = reading
        self._progress = progress
        self._writes = writes
        self._open = open_points

    def move(self) -> None:
        """Advance the offsets up to the first open check point of each queue."""
        if self._writes.under_way or not self._progress.writable or not self._is_delivered():
            return
        first = self._open.oldest_revive_offsets()
        for queue_id in self._reading.queues.ids(REVIVE_TOPIC):
            bounds = self._reading.queues.bounds(REVIVE_TOPIC, queue_id)
            offset = first.get(queue_id, bounds.max_offset if bounds is not None else 0)
            before = self._progress.offset(REVIVE_GROUP, REVIVE_TOPIC, queue_id)
            if offset > (before or 0):
                try:
                    self._progress.set(REVIVE_GROUP, REVIVE_TOPIC, queue_id, offset)
                except OSError as error:
                    if error.errno not in UNWRITABLE_ERRNOS:
                        raise
                    # The next start reads more than necessary.
                    return

    def _is_delivered(self) -> bool:
        """Whether timed messages present at the start are delivered to the revive topic.

        An ack may precede its check point.
        """
        if (
            self._open.parked_until_ms >= 0
            and read_timer_check(self._io, self._paths).read_ms > self._open.parked_until_ms
        ):
            self._open.parked_until_ms = -1
        return self._open.parked_until_ms < 0
