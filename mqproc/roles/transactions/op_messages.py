"""Messages derived from half messages: op messages, commits, check copies, discards.

An op message in RMQ_SYS_TRANS_OP_HALF_TOPIC names half messages that are done. Every derived message holds the position
of its half message in `preparedTransactionOffset`, by which a start recognises it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from mqproc.errors import BadRequestError, MqprocError
from mqproc.io.store_io import Clock
from mqproc.layout import properties, record
from mqproc.roles.internal_producer import NewMessage, ReliableAppend, copy_of
from mqproc.store.schedule.delivery_marks import mark_of
from mqproc.store.transactions import OP_PROPERTIES, QUEUE, HalfMessage, encode_op_body
from mqproc.topic_names import CHECK_MAX_TIME_TOPIC, HALF_TOPIC, OP_HALF_TOPIC
from mqproc.types import StoredMessage
from mqproc.wire.operations import TransactionRow

RETRY_NS: Final = 100_000_000


class _Mark(NamedTuple):
    offset: int
    marked: Callable[[], None] | None
    refused: Callable[[MqprocError], None] | None


class OpMessages:
    """Stores op messages, one at a time with all half messages that are done.

    `on_marked` gets the queue offsets of the op message and of the half messages.
    """

    def __init__(self, writes: ReliableAppend, clock: Clock, on_marked: Callable[[int, list[int]], None]) -> None:
        self._writes = writes
        self._clock = clock
        self._on_marked = on_marked
        self._due: list[_Mark] = []
        self._under_way = False
        self._retry_ns = 0

    def add(
        self,
        offset: int,
        marked: Callable[[], None] | None = None,
        refused: Callable[[MqprocError], None] | None = None,
    ) -> None:
        """Mark a half message as done; without `refused` it is retried until stored."""
        self._due.append(_Mark(offset, marked, refused))

    def step(self, now_ns: int) -> int:
        """Store pending marks unless an op message is under way; returns their number."""
        if not self._due or self._under_way or now_ns < self._retry_ns:
            return 0
        marks, self._due = self._due, []
        self._under_way = True
        offsets = [mark.offset for mark in marks]
        message = NewMessage(
            OP_HALF_TOPIC, encode_op_body(offsets), OP_PROPERTIES, QUEUE, born_timestamp_ms=self._clock.time_ms()
        )

        def stored(mark_offset: int) -> None:
            self._under_way = False
            self._on_marked(mark_offset, offsets)
            for mark in marks:
                if mark.marked is not None:
                    mark.marked()

        def refused(error: MqprocError) -> None:
            self._under_way = False
            self._retry_ns = self._clock.monotonic_ns() + RETRY_NS
            self._due = [mark for mark in marks if mark.refused is None] + self._due
            for mark in marks:
                if mark.refused is not None:
                    mark.refused(error)

        self._writes.store([message], stored, refused)
        return len(marks)

    def seconds_left(self, now_ns: int, at_most_s: float) -> float:
        """Time until `step` has work, `at_most_s` at most."""
        if not self._due or self._under_way:
            return at_most_s
        return min(at_most_s, max(0, self._retry_ns - now_ns) / 1e9)


def committed(message: StoredMessage) -> NewMessage:
    """Committed message for the target topic. Raises BadRequestError without a valid target."""
    pairs = message.properties
    topic, queue_id = pairs.get(properties.REAL_TOPIC, ""), pairs.get(properties.REAL_QID, "")
    if not topic or not queue_id.isdecimal():
        raise BadRequestError(f"the half message {message.message_id} names no target topic or queue")
    new = copy_of(message, topic, int(queue_id), {}, message.reconsume_times)
    flags = new.sys_flag & ~record.SYS_FLAG_TRANSACTION_MASK | record.SYS_FLAG_COMMIT
    return _with_mark(new._replace(sys_flag=flags), message)


def is_committed(message: StoredMessage) -> bool:
    return message.sys_flag & record.SYS_FLAG_TRANSACTION_MASK == record.SYS_FLAG_COMMIT


def check_copy(message: StoredMessage, checks: int) -> NewMessage:
    """Copy of a half message with its number of checks."""
    times = {properties.TRANSACTION_CHECK_TIMES: str(checks)} if checks else {}
    return _with_mark(copy_of(message, HALF_TOPIC, QUEUE, times, message.reconsume_times), message)


def discarded_copy(message: StoredMessage) -> NewMessage:
    """Copy of a discarded half message, in RocketMQ's topic of undecided half messages."""
    return _with_mark(copy_of(message, CHECK_MAX_TIME_TOPIC, QUEUE, {}, message.reconsume_times), message)


def _with_mark(new: NewMessage, message: StoredMessage) -> NewMessage:
    return new._replace(prepared_transaction_offset=mark_of(message.physical_offset))


def transaction_row(half: HalfMessage) -> TransactionRow:
    names = half.transaction_id, half.message_id, half.group, half.topic
    return *names, half.physical_offset, half.size, half.born_ms, half.stored_ms, half.checks, half.check_ms
