"""Every request about consumer groups, without I/O: shared by the sync and the async client."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from mqproc.client.amounts import milliseconds, true_or_false, whole_number
from mqproc.client.core import Call, Time, call_of, nothing
from mqproc.client.moments import time_ms
from mqproc.errors import ERROR_BY_CODE, BadRequestError, GroupNotFoundError, InternalError, MqprocError
from mqproc.groups import GroupInfo, GroupMember, GroupQueue, GroupSummary
from mqproc.layout.record_codec import decode_records
from mqproc.message import StoredMessage
from mqproc.names import CHECK_POINT_MESSAGES
from mqproc.store.groups.settings import dead_letter_topic
from mqproc.wire.group_operations import (
    AT_TIME,
    EARLIEST,
    LATEST,
    Assigned,
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
)
from mqproc.wire.operations import Empty, Operation

NO_EPOCH = -1
HANDLE = "POP_CK"
"""The property that a received message bears its handle in, as in RocketMQ."""
GONE = -1
NOT_NOW = -2
NAMED_MAX: Final = 1024
"""So many messages one request may name; more of them are asked for in several."""
RESENT_AT_ONCE: Final = 256
COPIED_BYTES_MAX: Final = 8 << 20
"""A request that has messages copied names more than one only up to so many bytes of them: others wait meanwhile."""
Refusals = dict[tuple[str, int], MqprocError]


def start_of(start: Time) -> tuple[str, int]:
    """Where a group begins, as a join says it: "earliest", "latest", or a time."""
    if isinstance(start, str) and start in (EARLIEST, LATEST):
        return str(start), 0
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
    """The answer is held until there is news, `wait_s` at most."""
    request = GroupHeartbeatRequest(group, member_id, generation)
    call: Call[GroupAssignment] = call_of(Operation.GROUP_HEARTBEAT, request, lambda answer, _: answer)
    call.wait_s = wait_s
    return call


def release(group: str, member_id: str, generation: int) -> Call[None]:
    return call_of(Operation.GROUP_RELEASE, GroupReleaseRequest(group, member_id, generation), nothing)


def leave(group: str, member_id: str) -> Call[None]:
    return call_of(Operation.GROUP_LEAVE, GroupLeaveRequest(group, member_id), nothing)


def commit_of_member(group: str, member_id: str, offsets: Sequence[Assigned]) -> Call[Refusals]:
    """What was refused, by queue."""
    return call_of(Operation.GROUP_COMMIT, GroupCommitRequest(group, list(offsets), member_id), _refusals)


def _refusals(answer: Any, _: memoryview) -> Refusals:
    return {(topic, queue_id): _error(code, text) for topic, queue_id, code, text in answer.refused}


def _error(code: str, text: str) -> MqprocError:
    return ERROR_BY_CODE.get(code, InternalError)(text)


def commit(group: str, topic: str, queue_id: int, offset: int) -> Call[None]:
    """One offset, of who is no member; a refusal is raised."""

    def parse(answer: Any, payload: memoryview) -> None:
        for error in _refusals(answer, payload).values():
            raise error

    return call_of(Operation.GROUP_COMMIT, GroupCommitRequest(group, [(topic, queue_id, NO_EPOCH, offset)]), parse)


# Messages that could not be consumed


def nack(group: str, places: Sequence[tuple[str, int, int]], delay_level: int, max_times: int) -> Call[list[int]]:
    """What became of each message; see GroupNackAnswer."""
    request = GroupNackRequest(group, list(places), delay_level, max_times)
    return call_of(Operation.GROUP_NACK, request, lambda answer, _: list(answer.levels))


def copied_at_once(
    messages: Sequence[StoredMessage], most: int
) -> tuple[Sequence[StoredMessage], Sequence[StoredMessage]]:
    """(Those that one request has copied, the others): the first `most`, or `COPIED_BYTES_MAX`, but one at least."""
    ends = itertools.accumulate(message.size for message in messages[:most])
    count = max(1, sum(1 for _ in itertools.takewhile(lambda end: end <= COPIED_BYTES_MAX, ends)))
    return messages[:count], messages[count:]


def resends(group: str, letters: Sequence[Any]) -> Iterator[Call[int]]:
    """How many dead letters were sent, in the sum of all calls. Raises BadRequestError for what is none of the group's:
    the dead letter that has its offset would be sent in its place."""
    topic = dead_letter_topic(group)
    for (found, _), offset in places_of(letters):
        if found != topic:
            raise BadRequestError(f"{found} offset {offset:,} is no dead letter of group {group}: {topic} has those")
    return _resends(group, letters)


def _resends(group: str, letters: Sequence[StoredMessage]) -> Iterator[Call[int]]:
    while letters:
        asked, letters = copied_at_once(letters, RESENT_AT_ONCE)
        request = GroupResendRequest(group, [letter.queue_offset for letter in asked])
        # Made again after a lost answer it would send them twice, which the caller shall decide.
        yield call_of(Operation.GROUP_RESEND, request, lambda answer, _: int(answer.sent), repeatable=False)


# Simple consumers


def receive(request: GroupReceiveRequest) -> Call[list[StoredMessage]]:
    """Messages with their handle among the properties. The answer is held until some come."""

    def parse(answer: Any, payload: memoryview) -> list[StoredMessage]:
        found = decode_records(bytes(payload)) if answer.count else []
        return [
            _with_handle(message, f"{answer.handles[number // CHECK_POINT_MESSAGES]} {message.queue_offset}")
            for number, message in enumerate(found)
        ]

    call: Call[list[StoredMessage]] = call_of(Operation.GROUP_RECEIVE, request, parse)
    call.wait_s = request.timeout_ms / 1000
    return call


def _with_handle(message: StoredMessage, handle: str) -> StoredMessage:
    return replace(message, properties={**message.properties, HANDLE: handle})


def ack(group: str, messages: Sequence[StoredMessage]) -> Call[int]:
    """How many were still the receiver's."""
    request = GroupAckRequest(group, list(map(_handled, messages)))
    return call_of(Operation.GROUP_ACK, request, lambda answer, _: int(answer.accepted))


def acks(group: str, messages: Sequence[StoredMessage]) -> Iterator[Call[int]]:
    """As `ack`, of any number, in the sum of all calls."""
    return (ack(group, messages[at : at + NAMED_MAX]) for at in range(0, len(messages), NAMED_MAX))


def change_invisible(group: str, message: StoredMessage, duration_s: float) -> Call[StoredMessage]:
    """The message with its new handle."""
    duration_ms = milliseconds("invisible_duration", duration_s)
    request = GroupInvisibleRequest(group, *_handled(message), duration_ms)
    # Made again after a lost answer it would name a handle that is not the message's any more.
    return call_of(
        Operation.GROUP_INVISIBLE, request, lambda answer, _: _with_handle(message, answer.handle), repeatable=False
    )


def places_of(messages: Sequence[Any]) -> list[tuple[tuple[str, int], int]]:
    """Queue and offset of each. Raises BadRequestError when one is no message."""
    for message in messages:
        if not isinstance(message, StoredMessage):
            raise no_message(message)
    return [((message.topic, message.queue_id), message.queue_offset) for message in messages]


def no_message(given: object) -> BadRequestError:
    """What is said of what is given in the place of a message."""
    shown = repr(given)[:64]
    return BadRequestError(
        f"a {type(given).__name__} is no StoredMessage: {shown}; give messages one by one, *messages"
    )


def _handled(message: StoredMessage) -> tuple[str, str]:
    handle = _handle_of(message)
    return message.topic, handle


def _handle_of(message: Any) -> str:
    if not isinstance(message, StoredMessage):
        raise no_message(message)
    if HANDLE not in message.properties:
        raise BadRequestError(f"message {message.message_id} was not received by a simple consumer: no {HANDLE} in it")
    return str(message.properties[HANDLE])


# Looking and changing


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
            group,
            answer.generation,
            answer.retry_max_times,
            answer.retry_queue_nums,
            answer.consume_enable,
            tuple(members),
            tuple(queues),
        )

    return call_of(Operation.GROUP_INFO, GroupRequest(group), parse)


def reset(group: str, offsets: Sequence[tuple[str, int, int]]) -> Call[None]:
    return call_of(Operation.GROUP_RESET, GroupResetRequest(group, list(offsets)), nothing)


def change(group: str, retry_max_times: int | None, retry_queue_nums: int | None, enabled: bool | None) -> Call[None]:
    """Settings that are None stay as they are. Raises BadRequestError for what is none."""
    for name, value in (("retry_max_times", retry_max_times), ("retry_queue_nums", retry_queue_nums)):
        if value is not None and whole_number(name, value) < 0:
            raise BadRequestError(f"{name} = {value} is out of range: 0 at least")
    if enabled is not None:
        true_or_false("enabled", enabled)
    numbers = [-1 if value is None else int(value) for value in (retry_max_times, retry_queue_nums, enabled)]
    return call_of(Operation.GROUP_SETTINGS, GroupSettingsRequest(group, *numbers), nothing)


def delete(group: str) -> Call[None]:
    return call_of(Operation.GROUP_DELETE, GroupRequest(group), nothing, repeatable=False)
