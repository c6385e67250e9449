"""Consumer retries: nacked messages are redelivered with delay, finally become dead letters.

    nack ──copy──▶ SCHEDULE_TOPIC_XXXX, queue level − 1 ──keeper, when due──▶ %RETRY%group ──▶ redelivered
         └─copy, after retry_max_times, on request, or without room for the properties──▶ %DLQ%group

A nack is answered when the copy is stored, and only then does the consumer commit the original. A message is therefore
always in at least one of the topics. Copies have RocketMQ's properties.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from mqproc.errors import BadLevelError, BadRequestError, GroupNotFoundError, MqprocError, StoreBusyError
from mqproc.layout import control, properties
from mqproc.layout.record_codec import decode_records
from mqproc.roles.groups.state import ConsumerGroupState
from mqproc.roles.internal_producer import (
    BYTES_MAX,
    ORIGIN,
    Identity,
    InternalProducer,
    NewMessage,
    ReliableAppend,
    bare_copy,
    copy_of,
    count_copies,
    has_room,
    identity,
)
from mqproc.roles.request_limits import PendingRequest
from mqproc.roles.role import RoleContext
from mqproc.store.cooperative import Slices
from mqproc.store.offsets.settings import GroupSettings
from mqproc.store.read.queries import StoreQueries
from mqproc.store.read.records import Conditions
from mqproc.topic_names import SCHEDULE_TOPIC, check_retry_topic, dead_letter_topic, retry_owner, retry_topic
from mqproc.types import PullStatus, StoredMessage
from mqproc.util.units import DELAY_LEVELS, delays_ms_of
from mqproc.wire.operations import (
    FrameOptions,
    GroupNackAnswer,
    GroupNackRequest,
    GroupResendAnswer,
    GroupResendRequest,
)

T = TypeVar("T")

MESSAGES_MAX: Final = 1024
FIRST_RETRY_LEVEL: Final = 3
"""Level of the first retry: 10 seconds. Each further retry waits one level longer."""
DEAD: Final = 0
GONE: Final = -1
NOT_NOW: Final = -2
UNANSWERED_BYTES_MAX: Final = 256 << 20
MESSAGES_PER_SLICE: Final = 64
SLICE_BYTES: Final = 4 << 20


class GroupRetries:
    """Nacks, and resends of dead letters, of all groups."""

    def __init__(
        self, context: RoleContext, reading: StoreQueries, state: ConsumerGroupState, producer: InternalProducer
    ) -> None:
        self._io = context.io
        self._words = context.control.words
        self._max_bytes = context.options.max_pull_bytes
        self._levels = len(delays_ms_of(context.options.message_delay_level))
        self._reading = reading
        self._state = state
        self._writes = ReliableAppend(reading, producer, self._max_bytes)
        self._unread = context.incarnation > 1
        self._known: set[Identity] = set()
        self._unanswered = (0, 0)
        """Range of the log that may have copies whose nacks were not answered."""
        self._searched: set[str] = set()
        """Topics searched in that range for copies without origin property."""
        if not self._unread:
            self.mark_all_answered()

    def mark_all_answered(self) -> None:
        """Record that every nack is answered: after a kill only later copies may be unanswered."""
        if not self._unread:
            self._words[control.NACKS_FROM] = self._words[control.WRITTEN]

    def nack(self, request: PendingRequest) -> Slices[None]:
        """Store copies of nacked messages, in slices.

        They raise GroupNotFoundError, BadLevelError, BadRequestError, StoreBusyError.
        """
        options: GroupNackRequest = request.options
        settings = self._settings_of(options.group)
        check_retry_topic(retry_topic(options.group))
        if options.delay_level > DELAY_LEVELS:
            raise BadLevelError(f"delay level {options.delay_level} is above {DELAY_LEVELS}")
        yield from self._read_unanswered()
        copies: list[NewMessage | None] = []
        levels: list[int] = []
        copy: NewMessage | None
        work = _CopyWork()
        for place in _check_count(options.messages):
            if work.is_slice_over():
                yield
                # It may have been deleted meanwhile.
                settings = self._settings_of(options.group)
            message = self._message(*place) if work.has_room else None
            if message is not None:
                copy, level = self._retry(settings, options, message)
            else:
                copy, level = None, self._absent(*place) if work.has_room else NOT_NOW
            work.add(copy)
            copies.append(copy)
            levels.append(level)
        for number, copy in enumerate(copies):
            if copy is not None and (yield from self._was_stored(copy)):
                copies[number] = None
        self._send(request, copies, levels, GroupNackAnswer)

    def resend(self, request: PendingRequest) -> Slices[None]:
        """Copy dead letters to the group's retry topic with their attempts reset, as `nack`.

        Both members and simple consumers read the retry topic.
        """
        options: GroupResendRequest = request.options
        self._settings_of(options.group)
        check_retry_topic(retry_topic(options.group))
        topic = dead_letter_topic(options.group)
        self._state.init_retry_offset(options.group, retry_topic(options.group), 0)
        copies: list[NewMessage | None] = []
        work = _CopyWork()
        for offset in _check_count(options.offsets):
            if work.is_slice_over():
                yield
                self._settings_of(options.group)
            message = self._message(topic, 0, offset) if work.has_room else None
            copies.append(None if message is None else _resent(message, options.group))
            work.add(copies[-1])
        levels = [GONE if copy is None else 1 for copy in copies]
        self._send(request, copies, levels, lambda levels: GroupResendAnswer(levels.count(1)))

    def _settings_of(self, group: str) -> GroupSettings:
        found = self._state.settings.get(group)
        if found is None:
            raise GroupNotFoundError(f"no group {group!r}")
        return found

    def _message(self, topic: str, queue_id: int, offset: int) -> StoredMessage | None:
        """Message at a queue offset, None when it is gone."""
        pulled = self._reading.pull(topic, queue_id, offset, 1, self._max_bytes)
        if pulled.status is not PullStatus.FOUND:
            return None
        message = decode_records(pulled.records.data)[0]
        return message if message.queue_offset == offset else None

    def _absent(self, topic: str, queue_id: int, offset: int) -> int:
        """Answer to a nack of a missing message."""
        bounds = self._reading.queues.bounds(topic, queue_id)
        lagging = self._words[control.DISPATCHED] < self._words[control.WRITTEN]
        return NOT_NOW if lagging and (bounds is None or offset >= bounds.max_offset) else GONE

    def _retry(
        self, settings: GroupSettings, options: GroupNackRequest, message: StoredMessage
    ) -> tuple[NewMessage, int]:
        """Copy of a nacked message, and its delay level."""
        group, times = settings.group, message.reconsume_times
        max_times = options.max_times if options.max_times >= 0 else settings.retry_max_times
        own = {"RETRY_TOPIC": message.topic, ORIGIN: message.message_id} | {
            name: value for name, value in message.properties.items() if name in ("RETRY_TOPIC", ORIGIN)
        }
        own |= {properties.WAIT: "false"} | retry_owner(group)
        if times >= max_times or options.delay_level < 0:
            own[properties.DELAY] = "0"
            copy = copy_of(message, dead_letter_topic(group), 0, own, times + 1)
            return copy if has_room(copy) else bare_copy(message, copy.topic, times + 1), DEAD
        level = min(options.delay_level or FIRST_RETRY_LEVEL + times, self._levels)
        queues = max(1, min(settings.retry_queue_nums, len(self._state.consumed.ids(retry_topic(group)))))
        own[properties.DELAY] = str(level)
        queue_id = (message.queue_id + message.queue_offset) % queues
        own[properties.REAL_TOPIC], own[properties.REAL_QID] = retry_topic(group), str(queue_id)
        copy = copy_of(message, SCHEDULE_TOPIC, level - 1, own, times + 1)
        if not has_room(copy):
            return bare_copy(message, dead_letter_topic(group), times + 1), DEAD
        self._state.init_retry_offset(group, retry_topic(group), queue_id)
        return copy, level

    # Nacks that a killed query role had stored without answering: clients repeat them

    def _read_unanswered(self) -> Slices[None]:
        if not self._unread:
            return
        if not self._writes.predecessor_done:
            raise StoreBusyError("copies of earlier nacks are not read yet", hint_ms=20)
        end = self._words[control.WRITTEN]
        begin = max(self._words[control.NACKS_FROM], end - UNANSWERED_BYTES_MAX)
        found = yield from self._copies_in(Conditions(property_name=ORIGIN), begin, end)
        if self._unread:  # Another nack may have read them meanwhile.
            self._known, self._unanswered, self._unread = found, (begin, end), False

    def _copies_in(self, conditions: Conditions, begin: int, end: int) -> Slices[set[Identity]]:
        found: set[Identity] = set()
        at = begin
        while at < end:
            batch = yield from self._reading.scan(
                conditions, at, max_messages=MESSAGES_MAX, max_bytes=self._max_bytes, max_scan_bytes=end - at
            )
            for records in batch.records:
                found.update(map(identity, decode_records(records.data)))
            if batch.complete:
                break
            at = batch.cursor[0]
            yield
        return found

    def _was_stored(self, copy: NewMessage) -> Slices[bool]:
        key = identity(copy)
        if copy.prepared_transaction_offset and copy.topic not in self._searched:
            found = yield from self._copies_in(Conditions(copy.topic), *self._unanswered)
            if copy.topic not in self._searched:  # Another nack may have searched it meanwhile.
                self._searched.add(copy.topic)
                # The others are known since the start, and some may have been matched since.
                self._known |= {each for each in found if _is_bare(each)}
        if key not in self._known:
            return False
        # Matches once: the attempts of a dead letter that is resent start again.
        self._known.discard(key)
        return True

    # Storing the copies

    def _send(
        self,
        request: PendingRequest,
        found: Sequence[NewMessage | None],
        levels: list[int],
        answer: Callable[[list[int]], FrameOptions],
    ) -> None:
        """Store copies, then answer; messages that were not stored are answered with NOT_NOW."""
        # Index of the message by `id()` of its copy, until that is stored.
        missing = {id(copy): index for index, copy in enumerate(found) if copy is not None}
        new = [copy for copy in found if copy is not None]

        def part(some: Sequence[NewMessage]) -> None:
            if some:
                self._io.crash_point("retry.copied")
            count_copies(self._words, some)
            for copy in some:
                del missing[id(copy)]

        def stored(_offset: int = -1) -> None:
            request.answer(answer(levels))

        def refused(error: MqprocError) -> None:
            for index in missing.values():
                levels[index] = NOT_NOW
            if all(level in (NOT_NOW, GONE) for level in levels):
                request.refuse(error)
            else:
                stored()

        if new:
            self._writes.store(new, stored, refused, part)
        else:
            stored()


@dataclass(slots=True)
class _CopyWork:
    """Bytes of the copies of a request, and the work of its current slice in bytes."""

    size: int = 0
    _of_slice: int = 0

    @property
    def has_room(self) -> bool:
        """Whether the request may have more copies."""
        return self.size < BYTES_MAX

    def add(self, copy: NewMessage | None) -> None:
        """Count a message, and its copy if it has one."""
        size = len(copy.body) + len(copy.properties) if copy is not None else 0
        self.size += size
        self._of_slice += size + SLICE_BYTES // MESSAGES_PER_SLICE

    def is_slice_over(self) -> bool:
        """Whether the caller must yield now, after which the next slice begins."""
        is_over = self._of_slice >= SLICE_BYTES
        if is_over:
            self._of_slice = 0
        return is_over


def _is_bare(key: Identity) -> bool:
    """Whether the key identifies a copy without origin property."""
    return key[2] != 0


def _check_count(messages: Sequence[T]) -> Sequence[T]:
    if not 1 <= len(messages) <= MESSAGES_MAX:
        raise BadRequestError(f"{len(messages):,} messages in one request; from 1 to {MESSAGES_MAX:,}")
    return messages


def _resent(message: StoredMessage, group: str) -> NewMessage:
    """Copy of a dead letter with its attempts reset.

    One without origin property is identified by its position.
    """
    topic = retry_topic(group)
    copy = copy_of(message, topic, 0, retry_owner(group), 0)
    return copy if ORIGIN in message.properties and has_room(copy) else bare_copy(message, topic, 0)
