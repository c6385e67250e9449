"""Requests about consumer groups, and steps of several requests. No I/O.

Steps are generators of calls: `value = yield call`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mqproc.client import requests
from mqproc.client.assignment import Queue
from mqproc.client.message_fields import plain_text
from mqproc.client.requests import Call, Steps, call_of, nothing
from mqproc.errors import (
    ERROR_BY_CODE,
    BadRequestError,
    GroupNotFoundError,
    InternalError,
    MessageNotFoundError,
    MqprocError,
    NoSuchQueueError,
    StoreBusyError,
    TopicNotFoundError,
)
from mqproc.layout.record_codec import as_redelivered, messages_of, with_properties
from mqproc.topic_names import CHECK_POINT_MESSAGES, RETRY_PREFIX, dead_letter_topic, pop_retry_topic
from mqproc.types import GroupInfo, GroupMember, GroupQueue, GroupSummary, QueueInfo, StoredMessage
from mqproc.util.arguments import Time, each_of, milliseconds, time_ms, true_or_false, whole_number
from mqproc.util.units import counted
from mqproc.wire.operations import (
    AT_TIME,
    EARLIEST,
    LATEST,
    Assigned,
    Empty,
    GroupAckRequest,
    GroupAssignment,
    GroupCommitRequest,
    GroupHeartbeatRequest,
    GroupInvisibleRequest,
    GroupJoinRequest,
    GroupLeaveRequest,
    GroupNackRequest,
    GroupReceiveRequest,
    GroupReleaseRequest,
    GroupRequest,
    GroupResendRequest,
    GroupResetRequest,
    GroupSettingsRequest,
    Operation,
)

NO_EPOCH = -1
HANDLE = "POP_CK"
"""Property with the handle of a received message, as in RocketMQ."""
GONE = -1
NOT_NOW = -2
NAMED_MAX: Final = 1024
"""Messages that one request may name."""
RESENT_AT_ONCE: Final = 256
COPIED_BYTES_MAX: Final = 8 << 20
"""Bytes of messages that one request has copied, but one message at least: other requests wait meanwhile."""
Refusals = dict[tuple[str, int], MqprocError]


_OTHER_WORDS: Final = {"beginning": EARLIEST, "end": LATEST}
"""Those of `mqproc tail`."""


def start_of(start: Time) -> tuple[str, int]:
    """Start position of a group for a join: "earliest", "latest", or a time."""
    start = plain_text(start)
    if isinstance(start, str) and (word := _OTHER_WORDS.get(start, start)) in (EARLIEST, LATEST):
        return word, 0
    if start is None:
        raise BadRequestError('start is None: give "earliest", "latest" or a time')
    try:
        return AT_TIME, time_ms(start, 0)
    except BadRequestError as error:
        raise BadRequestError(f'start is "earliest", "latest" or a time: {error}') from None


# Members


def join(request: GroupJoinRequest) -> Call[GroupAssignment]:
    return call_of(Operation.GROUP_JOIN, request, lambda answer, _: answer)


def heartbeat(group: str, member_id: str, generation: int, wait_s: float) -> Call[GroupAssignment]:
    """A heartbeat; the server holds the answer until the assignment changes, `wait_s` at most."""
    request = GroupHeartbeatRequest(group, member_id, generation)
    call: Call[GroupAssignment] = call_of(Operation.GROUP_HEARTBEAT, request, lambda answer, _: answer)
    call.wait_s = wait_s
    return call


def release(group: str, member_id: str, generation: int) -> Call[None]:
    return call_of(Operation.GROUP_RELEASE, GroupReleaseRequest(group, member_id, generation), nothing)


def leave(group: str, member_id: str) -> Call[None]:
    return call_of(Operation.GROUP_LEAVE, GroupLeaveRequest(group, member_id), nothing)


def commit_of_member(group: str, member_id: str, offsets: Sequence[Assigned]) -> Call[Refusals]:
    """Commit offsets of a member's queues; the value has the refused offsets by queue."""
    return call_of(Operation.GROUP_COMMIT, GroupCommitRequest(group, list(offsets), member_id), _refusals)


def _refusals(answer: Any, _: memoryview) -> Refusals:
    return {(topic, queue_id): _error(code, text) for topic, queue_id, code, text in answer.refused}


def _error(code: str, text: str) -> MqprocError:
    return ERROR_BY_CODE.get(code, InternalError)(text)


def commit(group: str, topic: str, queue_id: int, offset: int) -> Call[None]:
    """Commit one offset without being a member; raises a refusal."""

    def parse(answer: Any, payload: memoryview) -> None:
        for error in _refusals(answer, payload).values():
            raise error

    return call_of(Operation.GROUP_COMMIT, GroupCommitRequest(group, [(topic, queue_id, NO_EPOCH, offset)]), parse)


# Messages that could not be consumed


def nack(group: str, places: Sequence[tuple[str, int, int]], delay_level: int, max_times: int) -> Call[list[int]]:
    """Nack messages; the value has the outcome of each, see GroupNackAnswer."""
    request = GroupNackRequest(group, list(places), delay_level, max_times)
    return call_of(Operation.GROUP_NACK, request, lambda answer, _: list(answer.levels))


def copied_at_once(
    messages: Sequence[StoredMessage], most: int
) -> tuple[Sequence[StoredMessage], Sequence[StoredMessage]]:
    """Split messages into those that one request may have copied, at least one, and the rest."""
    ends = itertools.accumulate(message.size for message in messages[:most])
    count = max(1, sum(1 for _ in itertools.takewhile(lambda end: end <= COPIED_BYTES_MAX, ends)))
    return messages[:count], messages[count:]


def resends(group: str, letters: Sequence[Any]) -> Iterator[Call[int]]:
    """Resend dead letters; the sum of the values is the number sent.

    Raises BadRequestError for a message of another topic: the dead letter with its offset would be sent instead.
    """
    topic = dead_letter_topic(group)
    for (found, _), offset in places_of(letters):
        if found != topic:
            raise BadRequestError(f"{found} offset {offset:,} is no dead letter of group {group}: {topic} has those")
    while letters:
        asked, letters = copied_at_once(letters, RESENT_AT_ONCE)
        request = GroupResendRequest(group, [letter.queue_offset for letter in asked])
        # After a lost answer the caller decides whether to send them twice.
        yield call_of(Operation.GROUP_RESEND, request, lambda answer, _: int(answer.sent), repeatable=False)


# Simple consumers


def receive(request: GroupReceiveRequest) -> Call[list[StoredMessage]]:
    """Receive messages, with their handles as a property.

    The server holds the answer until there are some.
    """

    def parse(answer: Any, payload: memoryview) -> list[StoredMessage]:
        found = messages_of(payload)
        if found and found[0].topic.startswith(RETRY_PREFIX):
            origins = [topic for topic in request.topics if found[0].topic == pop_retry_topic(request.group, topic)]
            found = [as_redelivered(message, *origins) for message in found]
        return [
            _with_handle(message, f"{answer.handles[number // CHECK_POINT_MESSAGES]} {message.queue_offset}")
            for number, message in enumerate(found)
        ]

    call: Call[list[StoredMessage]] = call_of(Operation.GROUP_RECEIVE, request, parse)
    call.wait_s = request.timeout_ms / 1000
    call.hand_back = lambda messages: [change_invisible(request.group, message, 0) for message in messages]
    return call


def _with_handle(message: StoredMessage, handle: str) -> StoredMessage:
    return with_properties(message, {HANDLE: handle})


def ack(group: str, messages: Sequence[StoredMessage]) -> Call[int]:
    """Acknowledge messages; the value is the number that were still the receiver's."""
    request = GroupAckRequest(group, list(map(_handle_of, messages)))
    return call_of(Operation.GROUP_ACK, request, lambda answer, _: int(answer.accepted))


def acks(group: str, messages: Sequence[StoredMessage]) -> Iterator[Call[int]]:
    """As `ack`, for any number of messages: several calls."""
    return (ack(group, messages[at : at + NAMED_MAX]) for at in range(0, len(messages), NAMED_MAX))


def change_invisible(group: str, message: StoredMessage, duration_s: float) -> Call[StoredMessage]:
    """Change the invisible time; the value is the message with its new handle."""
    duration_ms = milliseconds("invisible_duration", duration_s)
    request = GroupInvisibleRequest(group, *_handle_of(message), duration_ms)
    # After a lost answer the handle is no longer valid.
    return call_of(
        Operation.GROUP_INVISIBLE, request, lambda answer, _: _with_handle(message, answer.handle), repeatable=False
    )


def places_of(messages: Sequence[Any]) -> list[tuple[tuple[str, int], int]]:
    """Queue and offset of each message. Raises BadRequestError for another object."""
    for message in messages:
        if not isinstance(message, StoredMessage):
            raise no_message(message)
    return [((message.stored_topic, message.queue_id), message.queue_offset) for message in messages]


def no_message(value: object) -> BadRequestError:
    """The error for an object that is not a message."""
    shown = repr(value)[:64]
    return BadRequestError(
        f"a {type(value).__name__} is no StoredMessage: {shown}; give messages one by one, *messages"
    )


def _handle_of(message: Any) -> tuple[str, str]:
    """Topic and handle of a received message. Raises BadRequestError for another object."""
    if not isinstance(message, StoredMessage):
        raise no_message(message)
    if HANDLE not in message.properties:
        raise BadRequestError(f"message {message.message_id} was not received by a simple consumer: no {HANDLE} in it")
    return message.stored_topic, message.properties[HANDLE]


# Administration


def groups() -> Call[list[GroupSummary]]:
    return call_of(Operation.GROUPS, Empty(), lambda answer, _: [GroupSummary(*row) for row in answer.groups])


def info(group: str) -> Call[GroupInfo]:
    """Raises GroupNotFoundError."""

    def parse(answer: Any, _: memoryview) -> GroupInfo:
        if not answer.known:
            raise GroupNotFoundError(f"no group {group!r}")
        members = [GroupMember(row[0], row[1], tuple(row[2]), *row[3:]) for row in answer.members]
        queues = [
            GroupQueue(topic, queue_id, None if at < 0 else at, low, high, None if moment < 0 else moment, member)
            for topic, queue_id, at, low, high, moment, member in answer.queues
        ]
        return GroupInfo(
            plain_text(group),
            answer.generation,
            answer.retry_max_times,
            answer.retry_queue_nums,
            answer.consume_enable,
            tuple(members),
            tuple(queues),
            answer.filters,
            answer.waiting_retries,
        )

    return call_of(Operation.GROUP_INFO, GroupRequest(group), parse)


def reset(group: str, offsets: Sequence[tuple[str, int, int]]) -> Call[None]:
    return call_of(Operation.GROUP_RESET, GroupResetRequest(group, list(offsets)), nothing)


def change(group: str, retry_max_times: int | None, retry_queue_nums: int | None, enabled: bool | None) -> Call[None]:
    """Change settings; None keeps one. Raises BadRequestError for an invalid value."""
    for name, value in (("retry_max_times", retry_max_times), ("retry_queue_nums", retry_queue_nums)):
        if value is not None and whole_number(name, value) < 0:
            raise BadRequestError(f"{name} = {value} is out of range: 0 at least")
    if enabled is not None:
        true_or_false("enabled", enabled)
    numbers = [-1 if value is None else int(value) for value in (retry_max_times, retry_queue_nums, enabled)]
    return call_of(Operation.GROUP_SETTINGS, GroupSettingsRequest(group, *numbers), nothing)


def delete(group: str) -> Call[None]:
    return call_of(Operation.GROUP_DELETE, GroupRequest(group), nothing, repeatable=False)


# Steps


@dataclass(frozen=True, slots=True)
class ResetTo:
    """Target of a reset: exactly one of the fields. `shift` is relative to the current offset.

    An offset outside a queue is cut to its beginning or end, and the move has it as `requested`.
    """

    earliest: bool = False
    latest: bool = False
    offset: int | None = None
    time: Time = None
    shift: int | None = None


def check_reset(to: Any) -> None:
    """Raise BadRequestError unless `to` is a ResetTo with exactly one target."""
    if not isinstance(to, ResetTo):
        raise BadRequestError(f"to = {to!r} is no ResetTo, such as ResetTo(earliest=True)")
    ends = [true_or_false("earliest", to.earliest), true_or_false("latest", to.latest)]
    targets = [*ends, to.offset is not None, to.time is not None, to.shift is not None]
    if sum(targets) != 1:
        raise BadRequestError("a reset goes to exactly one of earliest, latest, an offset, a time, or by a shift")
    for name, value in (("offset", to.offset), ("shift", to.shift)):
        if value is not None:
            whole_number(name, value)


@dataclass(frozen=True, slots=True)
class Move:
    """A planned change of a queue's progress from `before` (None: no progress) to `after`.

    `requested`: the target when it lies outside the queue, whose first or last offset `after` is then; else None.
    """

    topic: str
    queue_id: int
    before: int | None
    after: int
    requested: int | None = None

    @property
    def messages(self) -> int:
        """Number of messages to consume again (above 0) or to skip (below 0)."""
        return 0 if self.before is None else self.before - self.after


def plan_reset(
    group: str, to: ResetTo, topics: tuple[str, ...] = (), queues: tuple[int, ...] = ()
) -> Steps[list[Move]]:
    """Compute the moves of a reset, of the given topics or of all with progress.

    Retry topics have offsets of their own: they are reset only by `latest`, which skips all messages.

    Raises TopicNotFoundError, GroupNotFoundError, NoSuchQueueError for queue ids that no topic has.
    """
    check_reset(to)
    known = yield from _known_offsets(group, must_exist=not topics)
    moves = []
    missing = set(queues)
    for topic in topics or sorted({topic for topic, _ in known if to.latest or not topic.startswith(RETRY_PREFIX)}):
        # Without queue ids only those that consumers read: the others would lag for ever.
        found: list[QueueInfo] = yield requests.queues(topic, consumed=not queues)
        if not found and topics:
            raise TopicNotFoundError(f"no topic {topic!r}")
        missing -= {queue.queue_id for queue in found}
        for queue in found:
            if queues and queue.queue_id not in queues:
                continue
            before = known.get((topic, queue.queue_id))
            move = yield from _move(queue, to, before)
            if before != move.after or move.requested is not None:
                moves.append(move)
    if missing:
        raise NoSuchQueueError(f"no topic of the reset has a queue {', '.join(map(str, sorted(missing)))}")
    return moves


def _known_offsets(group: str, *, must_exist: bool) -> Steps[dict[Queue, int | None]]:
    """A group's offsets by queue; empty for a missing group, unless it must exist."""
    try:
        progress: GroupInfo = yield info(group)
    except GroupNotFoundError:
        if must_exist:
            raise
        return {}  # Moves create it.
    return {(queue.topic, queue.queue_id): queue.offset for queue in progress.queues}


def _move(queue: QueueInfo, to: ResetTo, before: int | None) -> Steps[Move]:
    if to.earliest:
        target = queue.min_offset
    elif to.latest:
        target = queue.max_offset
    elif to.offset is not None:
        target = to.offset
    elif to.shift is not None:
        target = (queue.max_offset if before is None else before) + to.shift
    else:
        target = yield requests.offset_at(queue.topic, queue.queue_id, to.time, False)
    after = min(max(target, queue.min_offset), queue.max_offset)
    requested = target if to.time is None and target != after else None
    return Move(queue.topic, queue.queue_id, before, after, requested)


def seek_moves(positions: dict[Queue, int], to: ResetTo) -> Steps[list[Move]]:
    """Move of each queue of a consumer at `positions`, including unchanged positions."""
    check_reset(to)
    moves = []
    for topic in sorted({topic for topic, _ in positions}):
        found: list[QueueInfo] = yield requests.queues(topic)
        for queue in found:
            before = positions.get((topic, queue.queue_id))
            if before is not None:
                moves.append((yield from _move(queue, to, before)))
    return moves


def lag_behind(positions: dict[Queue, int]) -> Steps[int]:
    """Number of messages that a consumer at `positions` has not consumed."""
    lag = 0
    for topic in sorted({topic for topic, _ in positions}):
        found: list[QueueInfo] = yield requests.queues(topic)
        for queue in found:
            at = positions.get((topic, queue.queue_id), queue.max_offset)
            lag += queue.max_offset - min(max(at, queue.min_offset), queue.max_offset)
    return lag


def execute(group: str, moves: Iterable[Any]) -> Steps[None]:
    """Apply planned moves, all or nothing. Raises BadRequestError for other objects."""
    targets = []
    for number, move in enumerate(each_of("moves", moves)):
        if not isinstance(move, Move):
            raise BadRequestError(f"item {number} of moves is no Move: {repr(move)[:64]}; give what plan_reset gives")
        targets.append((move.topic, move.queue_id, move.after))
    if targets:
        yield reset(group, targets)


def delete_steps(group: str) -> Steps[None]:
    """Delete a group, then the retry topics that only it uses; its dead letters stay.

    Raises GroupNotFoundError for a missing group, after the topics: an earlier deletion may have been interrupted, or
    its answer lost, before it deleted them.
    """
    missing: GroupNotFoundError | None = None
    try:
        yield delete(group)
    except GroupNotFoundError as error:
        missing = error
    # Groups after topics: then all groups that may own one of the topics are known.
    topics = yield requests.topics()
    summaries = yield groups()
    others = [other.group for other in summaries if other.group != group]
    for topic in topics:
        if _is_retry_topic_of(topic.topic, group) and not any(_is_retry_topic_of(topic.topic, name) for name in others):
            with contextlib.suppress(TopicNotFoundError):
                yield requests.delete_topic(topic.topic)
    if missing is not None:
        raise missing


def _is_retry_topic_of(topic: str, group: str) -> bool:
    """Whether a topic's name makes it a retry topic of a group."""
    own = RETRY_PREFIX + group
    return topic == own or topic.startswith(f"{own}_")


def check_read(info: GroupInfo, topics: tuple[str, ...]) -> None:
    """Raise TopicNotFoundError for a topic without progress of the group."""
    for topic in topics:
        if all(queue.topic != topic for queue in info.queues):
            raise TopicNotFoundError(f"group {info.group} has no progress in topic {topic!r}")


def plan_clone(source: str, target: str, topics: tuple[str, ...] = ()) -> Steps[list[Move]]:
    """Compute the moves that give `target` the progress of `source`, without retry topics.

    Raises GroupNotFoundError, TopicNotFoundError for a topic without progress of `source`.
    """
    origin: GroupInfo = yield info(source)
    check_read(origin, topics)
    before = yield from _known_offsets(target, must_exist=False)
    moves = []
    for queue in origin.queues:
        if queue.offset is None or queue.is_retry or (topics and queue.topic not in topics):
            continue
        after = min(max(queue.offset, queue.min_offset), queue.max_offset)
        at = before.get((queue.topic, queue.queue_id))
        if at != after:
            moves.append(Move(queue.topic, queue.queue_id, at, after))
    return moves


# Nacks


_NAMED_IN_ERROR: Final = 8
"""Messages that an error names; it counts the others."""


class Nacking:
    """The messages of one `nack`. `left`: still to be stored for redelivery.

    `gone`: no longer stored.
    """

    def __init__(self, group: str, messages: Sequence[Any], delay_level: int) -> None:
        self._group = group
        self._delay_level = delay_level
        places_of(messages)
        self.left: list[StoredMessage] = list(messages)
        self.gone: list[StoredMessage] = []
        self.is_busy = False
        """Whether the store refused some messages of the last call for now."""

    def call(self) -> Call[list[int]]:
        """The next request."""
        asked, _others = self._next()
        places = [(message.stored_topic, message.queue_id, message.queue_offset) for message in asked]
        return nack(self._group, places, self._delay_level, -1)

    def _next(self) -> tuple[Sequence[StoredMessage], Sequence[StoredMessage]]:
        return copied_at_once(self.left, NAMED_MAX)

    def answered(self, levels: list[int]) -> list[StoredMessage]:
        """Process the outcomes of the request; returns the stored messages."""
        asked, others = self._next()
        outcomes = list(zip(asked, levels, strict=True))
        refused = [message for message, level in outcomes if level == NOT_NOW]
        self.left, self.is_busy = [*others, *refused], bool(refused)
        self.gone += [message for message, level in outcomes if level == GONE]
        return [message for message, level in outcomes if level not in (NOT_NOW, GONE)]

    def check_gone(self) -> None:
        """Raise MessageNotFoundError when messages are gone."""
        if self.gone:
            raise MessageNotFoundError(
                f"{_list_of(self.gone)} cannot be delivered to group {self._group} again: retention, damage or the "
                f"deletion of a topic took {'it' if len(self.gone) == 1 else 'them'}"
            )

    def busy(self) -> StoreBusyError:
        """The error when no time is left."""
        return StoreBusyError(f"{counted(len(self.left), 'message')} could not be stored for a later delivery")


def _list_of(messages: Sequence[StoredMessage]) -> str:
    named = [f"{each.stored_topic}/{each.queue_id} offset {each.queue_offset:,}" for each in messages[:_NAMED_IN_ERROR]]
    more = len(messages) - len(named)
    return "; ".join(named) + (f" and {more:,} more" if more else "")
