"""Delivery with retry: each scheduled message is stored exactly once while the log lives.

    deliver(messages) ──▶ producer ──Stored──▶ …all stored: on_done()
          ▲                 │ Refused: the same frame again after a pause
          └─────────────────┘ Unknown: the log shows which messages it has; the others are appended again

Deliveries are retried without limit. A message that cannot be accepted, such as one for a topic that
cannot be created, would block the others: it is rescheduled instead, with exponential back-off, in the system topic
where it waited (`reschedule_timed`, `reschedule_delayed`). The rescheduled message is stored in place of the delivery
and bears the same mark. Deliveries of a killed keeper are found in the log by their marks (`delivered_marks`) and not
repeated.

`RedeliveryBackoff` is the retry policy of all redelivery: of the timer here, of pop consumption and of transaction
checks in their own packages. `IncrementalSave` saves the progress of deliveries without blocking them.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.errors import (
    BadRequestError,
    DiskFullError,
    MqprocError,
    StoreBusyError,
    StoreReadOnlyError,
    TooManyQueuesError,
)
from mqproc.io.store_io import Clock
from mqproc.layout import control, record
from mqproc.layout.properties import DELAY, REAL_QID, REAL_TOPIC, TIMER_DELIVER_MS, TIMER_OUT_MS, TIMER_ROLL_TIMES
from mqproc.roles.internal_producer import AppendColumns, AppendOutcome, InternalProducer, Refused, Unknown
from mqproc.roles.role import RoleContext
from mqproc.roles.role_log import RateLimitedLog, get_logger
from mqproc.roles.scheduled_records import PropertyColumns, append_pairs
from mqproc.store.schedule.delivery_marks import DeliveryMarks, marks_of
from mqproc.topic_names import SCHEDULE_TOPIC, TIMER_TOPIC

RETRY_NS: Final = 100_000_000
SAVE_INTERVAL_NS: Final = 5_000_000_000
_NEVER_NS: Final = 1 << 62
_DOUBLINGS_MAX: Final = 30
_WAITING_TOPICS: Final = (SCHEDULE_TOPIC, TIMER_TOPIC)
_ERRNOS: Final[dict[type[MqprocError], int]] = {DiskFullError: errno.ENOSPC, StoreReadOnlyError: errno.EROFS}
"""errno reported for a refusal by the writer; EBUSY for other refusals."""
Reschedule = Callable[[AppendColumns], AppendColumns]


# Retry policy


@dataclass(frozen=True, slots=True)
class RedeliveryBackoff:
    """Exponential back-off of redelivery: `first_ms`, doubled up to `max_ms`."""

    first_ms: int
    max_ms: int

    def next_ms(self, previous_ms: int) -> int:
        """Delay after `previous_ms`, which is 0 before the first one."""
        return min(max(self.first_ms, 2 * previous_ms), self.max_ms)

    def after(self, attempts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Delays after so many attempts, int64[n]."""
        delays_ms: NDArray[np.int64] = np.minimum(self.first_ms << np.minimum(attempts, _DOUBLINGS_MAX), self.max_ms)
        return delays_ms


TIMER_BACKOFF: Final = RedeliveryBackoff(first_ms=2_000, max_ms=3_600_000)
"""Each attempt adds a record to the log, hence the long delays. Delay levels are used up to the same maximum."""


def is_message_error(error: MqprocError) -> bool:
    """Whether the message or its topic is refused, rather than the store being unable to append."""
    return isinstance(error, BadRequestError | TooManyQueuesError)


def reschedule_timed(refused: AppendColumns, now_ms: int, precision_ms: int) -> AppendColumns:
    """Put refused messages of the timer back into it, after TIMER_BACKOFF.

    The delay is at least the time since the message was due, since some messages have no room for the attempt count.
    """
    before = _properties_of(refused)
    times = np.maximum(before.numbers(TIMER_ROLL_TIMES), 0)
    due_ms = before.numbers(TIMER_DELIVER_MS)
    late_ms = np.where(due_ms > 0, now_ms - due_ms, 0)
    waits_ms = np.minimum(np.maximum(TIMER_BACKOFF.after(times), late_ms), TIMER_BACKOFF.max_ms)
    out_ms = (now_ms + waits_ms) // precision_ms * precision_ms
    assert refused.queue_ids is not None
    own = zip(out_ms.tolist(), refused.queue_ids.tolist(), (times + 1).tolist(), strict=True)
    kept = before.without(REAL_TOPIC, REAL_QID, TIMER_OUT_MS, TIMER_ROLL_TIMES).strings()
    strings = [
        # The attempt count only sets the next delay.
        append_pairs(
            string, {REAL_TOPIC: refused.topic, REAL_QID: queue_id, TIMER_OUT_MS: at_ms}, {TIMER_ROLL_TIMES: count}
        )
        for string, (at_ms, queue_id, count) in zip(kept, own, strict=True)
    ]
    return _waiting(refused, TIMER_TOPIC, np.zeros(len(refused), np.int32), strings)


def reschedule_delayed(refused: AppendColumns, level: int, delays_ms: Sequence[int]) -> AppendColumns:
    """Put refused messages of a delay level into the next longer one."""
    before, longer = _properties_of(refused), longer_level(level, delays_ms)
    strings = [append_pairs(string, {DELAY: longer}, {}) for string in before.without(DELAY).strings()]
    if max(map(len, strings)) > record.PROPERTIES_SIZE_SURE:
        longer, strings = level, before.strings()
    return _waiting(refused, SCHEDULE_TOPIC, np.full(len(refused), longer - 1, np.int32), strings)


def longer_level(level: int, delays_ms: Sequence[int]) -> int:
    """Next longer level within the maximum of TIMER_BACKOFF, else the longest one, else `level`."""
    short = [(delay_ms, number) for number, delay_ms in enumerate(delays_ms, 1) if delay_ms <= TIMER_BACKOFF.max_ms]
    own_ms = delays_ms[min(level, len(delays_ms)) - 1]
    longer = [each for each in short if each[0] > own_ms]
    return min(longer)[1] if longer else max(short, default=(0, level))[1]


def _properties_of(columns: AppendColumns) -> PropertyColumns:
    offsets = np.append(0, np.cumsum(columns.property_lengths, dtype=np.int64))
    return PropertyColumns(offsets, columns.properties)


def _waiting(refused: AppendColumns, topic: str, queue_ids: NDArray[np.int32], strings: list[bytes]) -> AppendColumns:
    return replace(
        refused,
        topic=topic,
        queue_ids=queue_ids,
        property_lengths=np.fromiter(map(len, strings), np.uint16, len(strings)),
        properties=np.frombuffer(b"".join(strings), np.uint8),
    )


# Delivery


@dataclass(slots=True, eq=False)
class _Batch:
    begin: int
    left: int
    on_done: Callable[[], None]
    reschedule: Reschedule


class DeliveryQueue:
    """Deliveries of the keeper under way, over one internal producer."""

    def __init__(self, context: RoleContext, delivery_marks: DeliveryMarks) -> None:
        self._clock = context.clock
        self._words = context.control.words
        self._heartbeat = context.heartbeat
        self._refusal_log = RateLimitedLog(get_logger().error)
        self.delivery_marks = delivery_marks
        self.producer = InternalProducer(context.paths.socket("writer"), self._words, self._clock)
        self._awaited = self._words[control.WRITTEN] if context.incarnation == 1 else 0
        if context.incarnation > 1:
            self.producer.await_predecessor()
        self.delivered_marks: set[int] = set()
        """Marks of deliveries of earlier keepers in the log."""
        self._open: list[_Batch] = []
        self._refused: list[tuple[int, AppendColumns, _Batch]] = []
        self._errnos: dict[str, int] = {}

    @property
    def ready(self) -> bool:
        """Whether deliveries of a killed keeper are in the log, and the queues are complete.

        Positions are clamped to the ends of the queues at a start, and a full disk may delay dispatch.
        """
        return self.producer.predecessor_done and self._words[control.DISPATCHED] >= self._awaited

    @property
    def under_way(self) -> int:
        return len(self._open)

    @property
    def begin(self) -> int:
        """Log position at or above which every stored message of an incomplete batch lies."""
        return min((batch.begin for batch in self._open), default=self._words[control.WRITTEN])

    def start(self, messages: Sequence[AppendColumns], on_done: Callable[[], None], reschedule: Reschedule) -> None:
        """Deliver messages; `on_done` is called when all are stored, possibly at once.

        `reschedule` turns messages that cannot be accepted into messages that wait again.
        """
        begin = self._words[control.WRITTEN]
        if self.delivered_marks:
            messages = [columns for each in messages if len(columns := each.chosen(self._undelivered(each)))]
        if not messages:
            on_done()
            return
        batch = _Batch(begin, sum(map(len, messages)), on_done, reschedule)
        self._open.append(batch)
        for columns in messages:
            self._append(columns, batch)

    def step(self) -> int:
        """Handle outcomes and retry refused frames; returns the amount of work done."""
        done = self.producer.step()
        if self._refused and self._refused[0][0] <= self._clock.monotonic_ns():
            refused, self._refused = self._refused, []
            for _due_ns, messages, batch in refused:
                self._append(messages, batch)
            done += 1
        return done

    @property
    def due_ns(self) -> int:
        return self._refused[0][0] if self._refused else _NEVER_NS

    def close(self) -> None:
        self.producer.close()

    def note_errno(self, work: str, number: int) -> None:
        """Publish the errno that blocks a part of scheduled delivery; 0 once that part has advanced."""
        if self._errnos.get(work, 0) != number:
            self._errnos[work] = number
            self._words[control.DELIVERY_ERRNO] = next(filter(None, self._errnos.values()), 0)

    def was_delivered(self, physical_offsets: NDArray[np.int64]) -> bool:
        """Whether an earlier keeper delivered any of the records at these log positions."""
        return bool(self.delivered_marks) and not self.delivered_marks.isdisjoint(marks_of(physical_offsets).tolist())

    def _undelivered(self, messages: AppendColumns) -> NDArray[np.bool_]:
        """Mask of messages that earlier keepers did not deliver. A mark matches once."""
        undelivered = np.ones(len(messages), np.bool_)
        for place, mark in enumerate(messages.prepared_transaction_offsets.tolist()):
            if mark in self.delivered_marks:
                self.delivered_marks.discard(mark)
                undelivered[place] = False
        return undelivered

    def _append(self, messages: AppendColumns, batch: _Batch) -> None:
        try:
            self.producer.append_columns(messages, lambda frame, outcome: self._on_outcome(frame, outcome, batch))
        except StoreBusyError:
            self._retry_later(messages, batch)

    def _on_outcome(self, frame: AppendColumns, outcome: AppendOutcome, batch: _Batch) -> None:
        if isinstance(outcome, Refused):
            self._words.add(control.DELIVERIES_REFUSED, 1)
            self._log_refused(outcome)
            if is_message_error(outcome.error) and frame.topic not in _WAITING_TOPICS:
                self._append_or_reschedule(frame.halves(), batch)
            else:
                self.note_errno("append", _ERRNOS.get(type(outcome.error), errno.EBUSY))
                self._retry_later(frame, batch)
            return
        self.note_errno("append", 0)
        stored = len(frame)
        if isinstance(outcome, Unknown):
            found = self.delivery_marks.marks(outcome.begin, outcome.end)
            marks = frame.prepared_transaction_offsets.tolist()
            missing = frame.chosen(np.fromiter((mark not in found for mark in marks), np.bool_, len(frame)))
            stored -= len(missing)
            if len(missing):
                self._append(missing, batch)
        if frame.topic not in _WAITING_TOPICS:
            self._words.add(control.DELIVERED_MESSAGES, stored)
        batch.left -= stored
        if batch.left == 0:
            self._open.remove(batch)
            batch.on_done()

    def _append_or_reschedule(self, parts: Sequence[AppendColumns], batch: _Batch) -> None:
        """Retry with fewer queues, finally reschedule one.

        A recreated topic may lack only some of its queues.
        """
        alone = len(parts) == 1
        for part in parts:
            self._append(batch.reschedule(part) if alone else part, batch)

    def _retry_later(self, messages: AppendColumns, batch: _Batch) -> None:
        self._refused.append((self._clock.monotonic_ns() + RETRY_NS, messages, batch))

    def _log_refused(self, outcome: Refused) -> None:
        event = "delivery refused, retrying"
        if self._refusal_log.write(self._clock.monotonic_ns(), event, error=str(outcome.error)):
            self._heartbeat.failed()


# Progress of deliveries


class IncrementalSave:
    """Saves a file in parts, each of which may wait for the disk, with deliveries in between.

    `steps` yields the parts of one save. Its argument is a position up to which the log is durable; with 0 it waits for
    the flushers. `failed` receives the OSError that ended a save.
    """

    def __init__(self, clock: Clock, steps: Callable[[int], Iterator[None]], failed: Callable[[OSError], None]) -> None:
        self._clock = clock
        self._steps = steps
        self._failed = failed
        self._left: Iterator[None] | None = None
        self.due_ns = 0
        """Time from which the next save may begin."""

    @property
    def under_way(self) -> bool:
        return self._left is not None

    def step(self) -> None:
        """Do the next part, of a new save if none is under way."""
        if self._left is None:
            self.due_ns = self._clock.monotonic_ns() + SAVE_INTERVAL_NS
            self._left = self._steps(0)
        self._part(self._left)

    def save_all(self, durable: int) -> None:
        """Do a complete save; the log is durable up to `durable`."""
        self._left = self._steps(durable)
        while self._left is not None:
            self._part(self._left)

    def _part(self, left: Iterator[None]) -> None:
        try:
            next(left)
        except StopIteration:
            self._left = None
        except OSError as error:
            self._left = None
            self._failed(error)
