"""Transaction coordinator of the query role: commit, rollback and checks of half messages.

    half topic ──bell──▶ open ──commit──▶ the message ──stored──▶ answer, op message
                          │ ├──rollback──▶ op message ──stored──▶ answer
                          │ └──due──▶ copy ──bell──▶ open again, and a producer is asked
                          └──too many checks, or too old──▶ TRANS_CHECK_MAX_TIME_TOPIC ──stored──▶ op message

README.md in this folder describes topics, guarantees and limits.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from mqproc.config import options as config
from mqproc.errors import (
    BadRequestError,
    CorruptStoreError,
    MqprocError,
    StoreBusyError,
    TransactionNotFoundError,
)
from mqproc.layout import control
from mqproc.layout.record_codec import decode_record
from mqproc.roles.delivery_queue import RedeliveryBackoff
from mqproc.roles.internal_producer import InternalProducer, ReliableAppend, has_room
from mqproc.roles.request_limits import PendingRequest, Reply
from mqproc.roles.role import RoleContext
from mqproc.roles.role_log import RateLimitedLog, get_logger
from mqproc.roles.transactions.checks import CheckPolls, DueChecks
from mqproc.roles.transactions.op_messages import OpMessages, check_copy, committed, discarded_copy, transaction_row
from mqproc.roles.transactions.open_transactions import OpenTransactions, TransactionSearch
from mqproc.store.cooperative import Slices, finish
from mqproc.store.offsets.offset_store import UNWRITABLE_ERRNOS, OffsetStore
from mqproc.store.read.queries import StoreQueries, batches
from mqproc.store.schedule.delivery_marks import DeliveryMarks, mark_of
from mqproc.store.transactions import QUEUE, TRANSACTION_GROUP, HalfMessage, decode_op_body, parse_half
from mqproc.topic_names import HALF_TOPIC, OP_HALF_TOPIC
from mqproc.types import StoredMessage
from mqproc.wire.connection import ServerConnection
from mqproc.wire.operations import (
    Empty,
    Operation,
    TransactionCheckAnswer,
    TransactionCheckRequest,
    TransactionEndRequest,
    TransactionPollRequest,
    TransactionRow,
    TransactionsAnswer,
    TransactionsRequest,
)

OVERLAP_MARKS: Final = 3
"""Number of op messages to read back: messages derived before the third last one have been marked."""
OPEN_MAX: Final = 65_536
BUSY_MAX: Final = 128
WAITING_MAX: Final = 4096
LISTED_MAX: Final = 10_000
RETRY_MS: Final = 1_000
CHECK_BACKOFF: Final = RedeliveryBackoff(first_ms=RETRY_MS, max_ms=30_000)
PERIOD_NS: Final = 1_000_000_000
_MS_PER_HOUR: Final = 3_600_000
_born_ms: Final = operator.attrgetter("born_ms")
LONG_TRANSACTION_OPERATIONS = frozenset(
    {Operation.TRANSACTION_END, Operation.TRANSACTIONS, Operation.TRANSACTION_CHECK}
)
"""Operations of `start`: they look at all open transactions, or search the log for an ended one."""
ROWS_PER_SLICE: Final = 1024


@dataclass(slots=True)
class TransactionStart:
    """Reads open transactions at a start.

    op messages from the offset on ──▶ half messages from the offset on ──▶ open ──▶ log scan ──▶ missing op messages

    `old` are half messages with a copy, `derived` those whose commit or discard is in the log.
    """

    reading: StoreQueries
    table: OpenTransactions
    max_open: int
    old: list[HalfMessage] = field(default_factory=list)
    derived: list[HalfMessage] = field(default_factory=list)
    derived_marks: set[int] = field(default_factory=set)
    """Marks of derived messages in the scanned range of the log."""
    _marked: set[int] = field(default_factory=set)

    def read(self, half_progress: int, mark_progress: int, written: int) -> Slices[None]:
        """Fill the table. The log is dispatched up to `written`."""
        newest_marks = yield from self._read_marks(half_progress, mark_progress)
        self.table.scanned_to = half_progress
        yield from self._read_halves()
        places = {mark_of(half.physical_offset): half for half in self.table.all() if self.table.is_newest(half)}
        if not places:
            return
        begin = min(half.physical_offset for half in places.values())
        if len(newest_marks) == OVERLAP_MARKS:
            begin = max(begin, newest_marks[0])
        self.derived_marks = yield from DeliveryMarks(self.reading.segments).slices(begin, written)
        self.derived = [half for mark, half in places.items() if mark in self.derived_marks]

    def _read_marks(self, half_progress: int, mark_progress: int) -> Slices[deque[int]]:
        """Read op messages; returns the physical offsets of the newest op messages."""
        newest: deque[int] = deque(maxlen=OVERLAP_MARKS)
        bounds = self.reading.queues.bounds(OP_HALF_TOPIC, QUEUE)
        begin = min(mark_progress, bounds.max_offset - OVERLAP_MARKS) if bounds is not None else 0
        for messages, _next in batches(self.reading, OP_HALF_TOPIC, QUEUE, begin):
            for message in messages:
                newest.append(message.physical_offset)
                offsets = decode_op_body(message.body)
                self.table.marked(message.queue_offset, offsets)
                self._marked.update(offsets)
                for offset in offsets:
                    if offset >= half_progress:
                        self.table.done(offset)
            yield
        return newest

    def _read_halves(self) -> Slices[None]:
        for messages, following in batches(self.reading, HALF_TOPIC, QUEUE, self.table.scanned_to):
            for message in messages:
                if len(self.table) >= self.max_open:
                    return
                half = parse_half(message)
                if self.table.scan_past(half.offset) and half.is_whole:
                    old = self.table.add(half)
                    if old is not None:
                        self.old.append(old)
                    if half.requeued in self._marked:
                        self.old.append(half)  # RocketMQ's op message for the first one covers its copies.
            self.table.scan_to(following)
            yield


class TransactionCoordinator:
    """Coordinates the transactions of a store."""

    def __init__(
        self,
        context: RoleContext,
        reading: StoreQueries,
        progress: OffsetStore,
        producer: InternalProducer,
        refuse: Callable[[PendingRequest, Exception], None],
    ) -> None:
        """`refuse` refuses a waiting request for any error, from the except block."""
        options = context.options
        self._refuse = refuse
        self._io = context.io
        self._clock = context.clock
        self._words = context.control.words
        self._options = options
        self._log = get_logger()
        self._log_error = context.heartbeat.log_error
        self._reading = reading
        self._progress = progress
        self._table = OpenTransactions()
        self._writes = ReliableAppend(reading, producer, options.max_pull_bytes)
        self._marks = OpMessages(self._writes, self._clock, self._on_marked)
        self._check_polls = CheckPolls(self._record_to_check)
        self._search = TransactionSearch(context, reading, self._table, self._add)
        self._due_checks = DueChecks(self._table)
        self._busy: set[int] = set()
        self._waiting: deque[PendingRequest] = deque()
        """Commits and rollbacks."""
        self._dispatched = -1
        self._period_ns = 0
        self._derived_marks: set[int] = set()
        self._retry_log = RateLimitedLog(self._log.warning)
        self._read_from = -1
        """End of the log when this process took over; it must be dispatched before the start reads the queues."""
        self._start: Slices[None] | None = self._begin()

    # Called by the role

    def start(self, request: PendingRequest) -> Slices[Reply] | Slices[None]:
        """Slices of one of LONG_TRANSACTION_OPERATIONS. They raise the error that refuses it."""
        self._check_started()
        if request.operation == Operation.TRANSACTION_END:
            return self._handle_end(request)
        if request.operation == Operation.TRANSACTIONS:
            return self._list(request.options)
        return self._check_now(request.options)

    def _check_started(self) -> None:
        if self._start is not None:
            raise StoreBusyError("open transactions are not read yet", hint_ms=20)

    def step(self, now_ns: int) -> int:
        """Read new half messages, serve held requests, run due checks."""
        done = self._check_polls.step(now_ns)
        if self._start is not None:
            return done + self._continue_start()
        done += self._read_new_halves()
        done += self._serve_waiting()
        done += self._check_due()
        done += self._marks.step(now_ns)
        if now_ns >= self._period_ns:
            self._period_ns = now_ns + PERIOD_NS
            self._move_progress()
            self._publish_counts()
        return done

    def seconds_left(self, now_ns: int, at_most_s: float) -> float:
        """Time until `step` has work, `at_most_s` at most."""
        left_s = self._check_polls.seconds_left(now_ns, at_most_s)
        if self._start is not None:
            return 0.0 if self._may_start else min(left_s, 0.01)
        left_s = self._marks.seconds_left(now_ns, left_s)
        return self._due_checks.seconds_left(self._clock.time_ms(), left_s) if self._has_room else left_s

    def reload(self, options: config.Options) -> None:
        """Apply `file_reserved_time`."""
        self._options = options

    def drop(self, connection: ServerConnection) -> None:
        self._check_polls.drop(connection)

    def on_stop(self) -> None:
        """Answer held polls and advance the offsets for the next start."""
        self._check_polls.release_all()
        if self._start is None:
            self._move_progress()

    # The start

    @property
    def _may_start(self) -> bool:
        lagging = self._words[control.DISPATCHED] < self._read_from
        return self._read_from >= 0 and not lagging and self._progress.writable

    def _continue_start(self) -> int:
        if self._read_from < 0 and self._writes.predecessor_done:
            self._read_from = self._words[control.WRITTEN]
        if not self._may_start:
            return 0
        assert self._start is not None
        try:
            next(self._start)
        except StopIteration:
            self._start = None
        return 1

    def _begin(self) -> Slices[None]:
        yield
        start = TransactionStart(self._reading, self._table, OPEN_MAX)
        yield from start.read(self._offset(HALF_TOPIC), self._offset(OP_HALF_TOPIC), self._read_from)
        for half in [*start.old, *start.derived]:
            self._mark(half)
        if len(self._table) >= OPEN_MAX:
            self._derived_marks = start.derived_marks  # For half messages that did not fit into the table yet.
        options, now_ms = self._options, self._clock.time_ms()
        for half in self._table.all():
            if not half.busy:
                # Producers need time to reconnect.
                self._schedule_check(
                    half, now_ms + (options.transaction_check_interval if half.checks else options.transaction_timeout)
                )
        if len(self._table):
            self._log.info("open transactions", transactions=len(self._table), ended=len(start.derived))

    def _offset(self, topic: str) -> int:
        return self._progress.offset(TRANSACTION_GROUP, topic, QUEUE) or 0

    # Half messages

    def _read_new_halves(self) -> int:
        dispatched = self._words[control.DISPATCHED]
        if dispatched == self._dispatched or len(self._table) >= OPEN_MAX:
            return 0
        self._dispatched = dispatched
        bounds = self._reading.queues.bounds(HALF_TOPIC, QUEUE)
        if bounds is None or bounds.max_offset <= self._table.scanned_to:
            return 0
        for messages, following in batches(self._reading, HALF_TOPIC, QUEUE, self._table.scanned_to):
            for message in messages:
                half = parse_half(message)
                if self._table.scan_past(half.offset) and half.is_whole:
                    self._add(half)
            self._table.scan_to(following)
            if following < bounds.max_offset:
                self._dispatched = -1  # The rest in the next step.
            return max(1, len(messages))
        return 0

    def _add(self, half: HalfMessage) -> None:
        old = self._table.add(half)
        if old is not None:
            self._mark(old)
        if self._derived_marks and mark_of(half.physical_offset) in self._derived_marks:
            self._mark(half)
        else:
            self._schedule_check(half)

    def _mark(self, half: HalfMessage) -> None:
        self._set_busy(half)
        self._marks.add(half.offset)

    def _schedule_check(self, half: HalfMessage, not_before_ms: int = 0) -> None:
        """Schedule the next check, or copy without check; a producer is asked about a checked copy."""
        options = self._options
        check_ms = half.first_due_ms(options.transaction_timeout, options.transaction_check_interval)
        half.check_ms = max(check_ms, not_before_ms)
        self._due_checks.set(
            half, max(min(check_ms, half.stored_ms + options.transaction_check_interval), not_before_ms)
        )
        if half.checks and self._table.is_newest(half):
            self._check_polls.ask(half)

    @property
    def _has_room(self) -> bool:
        return len(self._busy) < BUSY_MAX and self._writes.has_room

    def _set_busy(self, half: HalfMessage) -> None:
        half.busy = True
        self._busy.add(half.offset)
        self._check_polls.forget(half)

    def _clear_busy(self, half: HalfMessage) -> None:
        half.busy = False
        self._busy.discard(half.offset)

    def _on_marked(self, mark_offset: int, offsets: list[int]) -> None:
        self._table.marked(mark_offset, offsets)
        for offset in offsets:
            self._table.done(offset)
            self._busy.discard(offset)

    def _message(self, half: HalfMessage) -> StoredMessage | None:
        """Half message from the log, None when retention has deleted it. Raises CorruptStoreError."""
        found = self._reading.record_at(half.physical_offset)
        if found is not None:
            return decode_record(found.data)
        if half.physical_offset >= self._words[control.MIN_PHYSICAL_OFFSET]:
            raise CorruptStoreError(f"no record begins at {half.physical_offset:,} of the log")
        return None

    # Ends

    def _handle_end(self, request: PendingRequest) -> Slices[None]:
        if len(self._waiting) >= WAITING_MAX:
            raise StoreBusyError(f"{WAITING_MAX:,} commits and rollbacks wait already", hint_ms=20)
        half = yield from self._search.find(request.options)
        if half is None:
            request.answer(Empty())
        elif self._waiting or not self._end(request, half):
            self._waiting.append(request)

    def _serve_waiting(self) -> int:
        """Retry ends that waited for room or for a copy being stored."""
        done = 0
        for _ in range(len(self._waiting)):
            if len(self._busy) >= BUSY_MAX:
                break
            request = self._waiting.popleft()
            if request.connection.closed:
                continue
            try:
                # This does not search the log, since the transaction was open when the request began to wait.
                half = finish(self._search.find(request.options))
                if half is None:
                    request.answer(Empty())
                elif not self._end(request, half):
                    self._waiting.append(request)
                    continue
                done += 1
            except Exception as error:
                self._refuse(request, error)
        return done

    def _end(self, request: PendingRequest, half: HalfMessage) -> bool:
        """Begin a commit or rollback; False if it must wait."""
        options: TransactionEndRequest = request.options
        if half.busy or not self._has_room:
            return False
        if options.commit:
            self._commit(request, half)
        else:
            self._roll_back(request, half)
        return True

    def _commit(self, request: PendingRequest, half: HalfMessage) -> None:
        message = self._message(half)
        if message is None:
            self._lose(half)
            raise TransactionNotFoundError(f"the half message of {half.transaction_id} is deleted")
        new = committed(message)
        self._set_busy(half)

        def stored(_offset: int) -> None:
            self._io.crash_point("transaction.committed")
            self._words.add(control.TRANSACTION_COMMITS, 1)
            self._table.ended(half, committed=True)
            self._marks.add(half.offset)
            request.answer(Empty())

        self._writes.store([new], stored, lambda error: self._refuse_end(request, half, error))

    def _roll_back(self, request: PendingRequest, half: HalfMessage) -> None:
        self._set_busy(half)

        def marked() -> None:
            self._io.crash_point("transaction.rolled_back")
            self._words.add(control.TRANSACTION_ROLLBACKS, 1)
            self._table.ended(half, committed=False)
            request.answer(Empty())

        self._marks.add(half.offset, marked, lambda error: self._refuse_end(request, half, error))

    def _refuse_end(self, request: PendingRequest, half: HalfMessage, error: MqprocError) -> None:
        self._clear_busy(half)
        self._check_soon(half)
        request.refuse(error)

    # Checks

    def _check_due(self) -> int:
        if not len(self._table):
            return 0
        done = 0
        now_ms = self._clock.time_ms()
        while self._has_room and (half := self._due_checks.pop_due(now_ms)) is not None:
            self._check_half(half, now_ms)
            done += 1
        return done

    def _check_half(self, half: HalfMessage, now_ms: int) -> None:
        options = self._options
        try:
            message = self._message(half)
        except CorruptStoreError as error:
            self._log_error("half message is damaged", transaction=half.transaction_id, error=str(error))
            self._due_checks.set(half, now_ms + options.transaction_check_interval)
            return
        if message is None:
            self._lose(half)
            return
        self._set_busy(half)
        old = now_ms - half.born_ms > options.file_reserved_time * _MS_PER_HOUR
        if half.checks >= options.transaction_check_max or old:
            self._give_up(half, message)
        else:
            self._copy(half, message, check=half.check_ms <= now_ms)

    def _copy(self, half: HalfMessage, message: StoredMessage, *, check: bool) -> None:
        """Store a copy; once it is dispatched mark the old message, and with `check` ask a producer."""

        def stored(_offset: int) -> None:
            self._words.add(control.TRANSACTION_CHECKS, int(check))

        copy = check_copy(message, half.checks + check)
        if not has_room(copy):
            # The checks are counted in memory only: a copy without the count would count as unchecked.
            self._clear_busy(half)
            half.checks, half.stored_ms = half.checks + check, self._clock.time_ms()
            stored(half.offset)
            self._schedule_check(half)
            return
        self._writes.store([copy], stored, lambda error: self._retry_check(half, error))

    def _give_up(self, half: HalfMessage, message: StoredMessage) -> None:

        def stored(_offset: int) -> None:
            self._words.add(control.TRANSACTION_DISCARDS, 1)
            self._log.warning(
                "transaction discarded", transaction=half.transaction_id, group=half.group, checks=half.checks
            )
            self._table.ended(half, committed=False)
            self._marks.add(half.offset)

        self._writes.store([discarded_copy(message)], stored, lambda error: self._retry_check(half, error))

    def _retry_check(self, half: HalfMessage, error: MqprocError) -> None:
        self._retry_log.write(self._clock.monotonic_ns(), "checks cannot be stored, retrying", error=str(error))
        self._clear_busy(half)
        # Retry with back-off: there may be thousands of messages, and others wait meanwhile.
        half.again_ms = CHECK_BACKOFF.next_ms(half.again_ms)
        self._check_soon(half, half.again_ms)

    def _check_soon(self, half: HalfMessage, pause_ms: int = RETRY_MS) -> None:
        self._due_checks.set(half, max(half.due_ms, self._clock.time_ms() + pause_ms))

    def _lose(self, half: HalfMessage) -> None:
        self._log.warning("half message is deleted", transaction=half.transaction_id, group=half.group)
        self._table.ended(half, committed=False)
        self._mark(half)

    def poll(self, request: PendingRequest) -> None:
        """Answer a poll or hold it. Raises the error that refuses it."""
        options: TransactionPollRequest = request.options
        if not options.group:
            raise BadRequestError("a producer that polls for checks needs a group")
        self._check_polls.poll(request, options, self._clock.monotonic_ns())

    def _record_to_check(self, half: HalfMessage) -> bytes | None:
        if half.busy or not self._table.is_newest(half):
            return None
        (record,) = self._reading.records.copies([half.physical_offset])
        return record

    # Administration

    def _list(self, options: TransactionsRequest) -> Slices[Reply]:
        found = yield from self._search.open(options)
        found.sort(key=_born_ms)
        rows: list[TransactionRow] = []
        for half in found[: max(0, min(options.max_transactions, LISTED_MAX))]:
            rows.append(transaction_row(half))
            if len(rows) % ROWS_PER_SLICE == 0:
                yield
        producers = self._check_polls.of(options.group) if options.group else self._check_polls.count
        return TransactionsAnswer(len(found), producers, rows), ()

    def _check_now(self, options: TransactionCheckRequest) -> Slices[Reply]:
        found: set[HalfMessage] = set()
        for number, place in enumerate(options.physical_offsets, 1):
            if number % ROWS_PER_SLICE == 0:
                yield
            half = self._table.at(place)
            if half is not None and half not in found and self._table.how_ended(half.physical_offset) is None:
                found.add(half)
                half.check_ms = self._clock.time_ms()
                self._due_checks.set(half, half.check_ms)
        return TransactionCheckAnswer(len(found)), ()

    def _publish_counts(self) -> None:
        words, table = self._words, self._table
        words[control.OPEN_TRANSACTIONS] = len(table)
        words[control.OLDEST_TRANSACTION_MS] = min((half.born_ms for half in table.all()), default=0)
        words[control.TRANSACTION_PRODUCERS] = self._check_polls.count

    # Offsets

    def _move_progress(self) -> None:
        """Advance the offsets so that the next start reads from the first open half message."""
        half_progress = self._table.half_progress()
        marks = self._reading.queues.bounds(OP_HALF_TOPIC, QUEUE)
        mark_progress = self._table.mark_progress(half_progress)
        if mark_progress is None and not self._busy and marks is not None:
            mark_progress = marks.max_offset
        self._set(HALF_TOPIC, half_progress)
        if mark_progress is not None:
            self._set(OP_HALF_TOPIC, mark_progress)

    def _set(self, topic: str, offset: int) -> None:
        if self._reading.queues.bounds(topic, QUEUE) is None or offset <= self._offset(topic):
            return
        try:
            self._progress.set(TRANSACTION_GROUP, topic, QUEUE, offset)
        except OSError as error:
            if error.errno not in UNWRITABLE_ERRNOS:
                raise
            # The next start reads more than necessary.
