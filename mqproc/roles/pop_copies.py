"""Messages of check points as they come again (`store/groups/README.md`, "Simple consumers")."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from mqproc.layout.record_codec import decode_records
from mqproc.message import PullStatus
from mqproc.names import RETRY_PREFIX
from mqproc.roles.appender import NewMessage
from mqproc.roles.group_retries import ORIGIN, Identity, bare_copy, copy_of, has_room, identity
from mqproc.roles.parked_again import is_of_message
from mqproc.store.groups.check_points import CheckPoint
from mqproc.store.groups.settings import retry_topic
from mqproc.store.groups.unwritable import UNWRITABLE
from mqproc.store.reads.queue_messages import batches
from mqproc.store.slices import Slices

if TYPE_CHECKING:
    from mqproc.errors import MqprocError
    from mqproc.roles.group_state import GroupState
    from mqproc.store.reads.reading import StoreReading

AGAIN_MS: Final = 200
AGAIN_MS_MAX: Final = 30_000


class PopCopies:
    """Makes the copies that are sent when a time is over, and knows which of them the log has."""

    def __init__(self, reading: StoreReading, state: GroupState, max_bytes: int) -> None:
        self._reading = reading
        self._state = state
        self._max_bytes = max_bytes
        self._found: dict[Identity, int] = {}
        """Where in the log copies were found that may be of messages which are open."""
        self._last_found = -1

    def missing(self, found: CheckPoint, offsets: Iterable[int]) -> dict[int, NewMessage]:
        """Copies of a check point's messages that the log does not have, by their offsets.

        None is made of a message that is gone, or whose group was deleted.
        """
        if found.dropped:
            return {}
        left = (offset for offset in offsets if offset not in found.copied)
        copies = {offset: copy for offset in left if (copy := self._copy(found, offset)) is not None}
        return {offset: copy for offset, copy in copies.items() if not self._is_found(found, copy)}

    def has(self, found: CheckPoint, offset: int) -> bool:
        """Whether the log has a copy of a check point's message: it comes again, though it be acknowledged now."""
        if offset in found.copied:
            return True
        if self._last_found < found.log_begin:
            return False
        copy = self._copy(found, offset)
        return copy is not None and self._is_found(found, copy)

    def _is_found(self, found: CheckPoint, copy: NewMessage) -> bool:
        return self._found.get(identity(copy), -1) >= found.log_begin

    def find(self, topics: Iterable[str], begin: int) -> Slices[None]:
        """Find out which copies lie at or behind a position of the log."""
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

    def pause_ms(self, found: CheckPoint, error: MqprocError) -> int:
        """How long to wait before a check point's copies are sent again.

        Each time longer where they are refused for their own sake, as without room for the topic: there may be
        thousands of them, and the others wait meanwhile.
        """
        if not is_of_message(error):
            return AGAIN_MS
        found.again_ms = min(max(AGAIN_MS, 2 * found.again_ms), AGAIN_MS_MAX)
        return found.again_ms

    def begin_progress(self, group: str, copies: Iterable[NewMessage]) -> bool:
        """Have the group's progress where copies come again; False without room for it. Raises OSError."""
        try:
            for topic in {copy.topic for copy in copies if copy.topic.startswith(RETRY_PREFIX)}:
                self._state.begin_retries(group, topic, 0)
        except OSError as error:
            if error.errno not in UNWRITABLE:
                raise
            return False
        return True

    def _copy(self, found: CheckPoint, offset: int) -> NewMessage | None:
        pulled = self._reading.pull(found.topic, found.queue_id, offset, 1, self._max_bytes)
        if pulled.status is not PullStatus.FOUND:
            return None
        message = decode_records(pulled.records.tobytes())[0]
        if message.queue_offset != offset:
            return None
        origin = found.first_topic
        if found.topic == retry_topic(found.group):
            origin = message.properties.get("RETRY_TOPIC", origin)
        own = {"RETRY_TOPIC": origin, ORIGIN: message.properties.get(ORIGIN, message.message_id), "WAIT": "false"}
        times = message.reconsume_times
        dead = times >= self._state.settings.of(found.group).retry_max_times
        copy = copy_of(message, found.copied_to[dead], 0, own, times + 1)
        # One that is refused would keep those that were received with it from coming again.
        return copy if has_room(copy) else bare_copy(message, found.copied_to[True], times + 1)
