"""Transactions in the query role (`roles/transactions/README.md`): ends, checks, and what becomes of half messages.

half topic ──bell──▶ open ──commit──▶ the message ──stored──▶ answer, mark
                      │ ├──rollback──▶ mark ──stored──▶ answer
                      │ └──due──▶ copy ──bell──▶ open again, and a producer is asked
                      └──too often, too old──▶ TRANS_CHECK_MAX_TIME_TOPIC ──stored──▶ mark
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

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
from mqproc.roles.internal_producer import InternalProducer, ReliableAppend, has_room
from mqproc.roles.role_log import get_logger
from mqproc.roles.transactions.checks import CheckPolls, DueChecks
from mqproc.roles.transactions.op_messages import OpMessages, checked, committed, given_up, row
from mqproc.roles.transactions.open_transactions import OpenTransactions
from mqproc.roles.transactions.search import TransactionSearch
from mqproc.store.cooperative import Slices
from mqproc.store.offsets.offset_store import UNWRITABLE_ERRNOS
from mqproc.store.read.queries import batches
from mqproc.store.schedule.delivery_marks import DeliveryMarks, mark_of
from mqproc.store.transactions import QUEUE, TRANSACTION_GROUP, HalfMessage, decode_op_body, parse_half
from mqproc.topic_names import HALF_TOPIC, OP_HALF_TOPIC
from mqproc.types import StoredMessage
from mqproc.wire.operations import Empty, Operation
from mqproc.wire.operations.transactions import (
    TransactionCheckAnswer,
    TransactionCheckRequest,
    TransactionEndRequest,
    TransactionPollRequest,
    TransactionsAnswer,
    TransactionsRequest,
)

if TYPE_CHECKING:
    from mqproc.roles.request_limits import Payload, PendingRequest
    from mqproc.roles.role import RoleContext
    from mqproc.store.offsets.offset_store import OffsetStore
    from mqproc.store.read.queries import StoreQueries
    from mqproc.wire.codec import FrameOptions
    from mqproc.wire.connection import ServerConnection

# --- transaction_start ---
# What a start reads: marks, half messages, and which of these something was made of already.
#
# marks from progress on ──▶ half messages from progress on ──▶ open ──▶ a walk over the log ──▶ marks that lack


MARKS_BEHIND: Final = 3
"""What was made before the message of so many marks from the end is marked."""


class TransactionStart:
    """Reads what a start needs. `old` are half messages that a copy was found of, `made` those something else was."""

    def __init__(self, reading: StoreQueries, table: OpenTransactions, max_open: int) -> None:
        self._reading = reading
        self._table = table
        self._max_open = max_open
        self.old: list[HalfMessage] = []
        self.made: list[HalfMessage] = []
        self.made_marks: set[int] = set()
        """What the log has made messages of, as far as it was looked through."""
        self._marked: set[int] = set()

    def read(self, half_progress: int, mark_progress: int, written: int) -> Slices[None]:
        """Fill the table. The queues have what the log has below `written`."""
        newest_marks = yield from self._read_marks(half_progress, mark_progress)
        self._table.walked = half_progress
        yield from self._read_halves()
        places = {mark_of(half.physical_offset): half for half in self._table.all() if self._table.is_newest(half)}
        if not places:
            return
        begin = min(half.physical_offset for half in places.values())
        if len(newest_marks) == MARKS_BEHIND:
            begin = max(begin, newest_marks[0])
        self.made_marks = yield from DeliveryMarks(self._reading.segments).slices(begin, written)
        self.made = [half for mark, half in places.items() if mark in self.made_marks]

    def _read_marks(self, half_progress: int, mark_progress: int) -> Slices[deque[int]]:
        """The physical offsets of the newest ones."""
        newest: deque[int] = deque(maxlen=MARKS_BEHIND)
        bounds = self._reading.queues.bounds(OP_HALF_TOPIC, QUEUE)
        begin = min(mark_progress, bounds.max_offset - MARKS_BEHIND) if bounds is not None else 0
        for messages, _next in batches(self._reading, OP_HALF_TOPIC, QUEUE, begin):
            for message in messages:
                newest.append(message.physical_offset)
                offsets = decode_op_body(message.body)
                self._table.marked(message.queue_offset, offsets)
                self._marked.update(offsets)
                for offset in offsets:
                    if offset >= half_progress:
                        self._table.done(offset)
            yield
        return newest

    def _read_halves(self) -> Slices[None]:
        for messages, following in batches(self._reading, HALF_TOPIC, QUEUE, self._table.walked):
            for message in messages:
                if len(self._table) >= self._max_open:
                    return
                half = parse_half(message)
                if self._table.walk_past(half.offset) and half.is_whole:
                    old = self._table.add(half)
                    if old is not None:
                        self.old.append(old)
                    if half.requeued in self._marked:
                        self.old.append(half)  # RocketMQ's mark of the first one is meant for its copies too.
            self._table.walk_to(following)
            yield


OPEN_MAX: Final = 65_536
BUSY_MAX: Final = 128
WAITING_MAX: Final = 4096
LISTED_MAX: Final = 10_000
AGAIN_MS: Final = 1_000
AGAIN_MS_MAX: Final = 30_000
TELL_AGAIN_NS: Final = 60_000_000_000
LOOK_NS: Final = 1_000_000_000
_MS_PER_HOUR: Final = 3_600_000


@dataclass(slots=True)
class _End:
    request: PendingRequest
    options: TransactionEndRequest


class TransactionCoordinator:
    """The transactions of one store."""

    def __init__(
        self,
        context: RoleContext,
        reading: StoreQueries,
        progress: OffsetStore,
        producer: InternalProducer,
        answer: Callable[[PendingRequest, FrameOptions, Payload], None],
        refuse: Callable[[PendingRequest, MqprocError], None],
    ) -> None:
        options = context.options
        self._io = context.io
        self._clock = context.clock
        self._words = context.control.words
        self._options = options
        self._log = get_logger()
        self._heartbeat = context.heartbeat
        self._reading = reading
        self._progress = progress
        self._answer = answer
        self._refuse = refuse
        self._table = OpenTransactions()
        self._writes = ReliableAppend(reading, producer, options.max_pull_bytes)
        self._marks = OpMessages(self._writes, self._clock, self._on_marked)
        self._polls = CheckPolls(self._question, answer)
        self._search = TransactionSearch(context, reading, self._table, self._add)
        self._due = DueChecks(self._table)
        self._busy: set[int] = set()
        self._waiting: deque[_End] = deque()
        self._dispatched = -1
        self._look_ns = 0
        self._made_marks: set[int] = set()
        self._told_ns = -TELL_AGAIN_NS
        self._read_from = -1
        """Where the log ended when this process took over: its queues must have come so far."""
        self._start: Slices[None] | None = self._begin()

    # The role's side

    def take(self, request: PendingRequest) -> None:
        """Answer a request or hold it. Raises what it is refused with."""
        if request.operation == Operation.TRANSACTION_POLL:
            self._poll(request, request.options)
            return
        if self._start is not None:
            raise StoreBusyError("open transactions are not read yet", hint_ms=20)
        if request.operation == Operation.TRANSACTION_END:
            self._take_end(_End(request, request.options))
        elif request.operation == Operation.TRANSACTIONS:
            self._list(request, request.options)
        else:
            self._check_now(request, request.options)

    def step(self, now_ns: int) -> int:
        """What dispatch and time ask for."""
        done = self._polls.step(now_ns)
        if self._start is not None:
            return done + self._go_on_starting()
        done += self._follow_queue()
        done += self._serve_waiting()
        done += self._check_due()
        done += self._marks.step(now_ns)
        if now_ns >= self._look_ns:
            self._look_ns = now_ns + LOOK_NS
            self._move_progress()
            self._tell()
        return done

    def seconds_left(self, now_ns: int, at_most_s: float) -> float:
        """How long `step` has nothing to do unless something comes."""
        left_s = self._polls.seconds_left(now_ns, at_most_s)
        if self._start is not None:
            return 0.0 if self._may_start else min(left_s, 0.01)
        left_s = self._marks.seconds_left(now_ns, left_s)
        return self._due.seconds_left(self._clock.time_ms(), left_s) if self._has_room else left_s

    def reload(self, options: config.Options) -> None:
        """`file_reserved_time` may change while running."""
        self._options = options

    def drop(self, connection: ServerConnection) -> None:
        """A client is gone."""
        self._polls.drop(connection)

    def let_go(self) -> None:
        """At the end: nobody is asked any more."""
        self._polls.let_go()
        if self._start is None:
            self._move_progress()

    # The start

    @property
    def _may_start(self) -> bool:
        behind = self._words[control.DISPATCHED] < self._read_from
        return self._read_from >= 0 and not behind and self._progress.writable

    def _go_on_starting(self) -> int:
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
        for half in [*start.old, *start.made]:
            self._mark(half)
        if len(self._table) >= OPEN_MAX:
            self._made_marks = start.made_marks  # For those that there was no room to read yet.
        options, now_ms = self._options, self._clock.time_ms()
        for half in self._table.all():
            if not half.busy:
                # Producers need time to come back.
                self._expect(
                    half, now_ms + (options.transaction_check_interval if half.checks else options.transaction_timeout)
                )
        if len(self._table):
            self._log.info("transactions are open", transactions=len(self._table), ended=len(start.made))

    def _offset(self, topic: str) -> int:
        return self._progress.offset(TRANSACTION_GROUP, topic, QUEUE) or 0

    # Half messages

    def _follow_queue(self) -> int:
        dispatched = self._words[control.DISPATCHED]
        if dispatched == self._dispatched or len(self._table) >= OPEN_MAX:
            return 0
        self._dispatched = dispatched
        bounds = self._reading.queues.bounds(HALF_TOPIC, QUEUE)
        if bounds is None or bounds.max_offset <= self._table.walked:
            return 0
        for messages, following in batches(self._reading, HALF_TOPIC, QUEUE, self._table.walked):
            for message in messages:
                half = parse_half(message)
                if self._table.walk_past(half.offset) and half.is_whole:
                    self._add(half)
            self._table.walk_to(following)
            if following < bounds.max_offset:
                self._dispatched = -1  # The rest in the next step.
            return max(1, len(messages))
        return 0

    def _add(self, half: HalfMessage) -> None:
        old = self._table.add(half)
        if old is not None:
            self._mark(old)
        if self._made_marks and mark_of(half.physical_offset) in self._made_marks:
            self._mark(half)
        else:
            self._expect(half)

    def _mark(self, half: HalfMessage) -> None:
        self._be_busy(half)
        self._marks.add(half.offset)

    def _expect(self, half: HalfMessage, not_before_ms: int = 0) -> None:
        """Have it checked when that is due, or stored anew before; a checked copy is there to be asked about."""
        options = self._options
        check_ms = half.first_due_ms(options.transaction_timeout, options.transaction_check_interval)
        half.check_ms = max(check_ms, not_before_ms)
        self._due.set(half, max(min(check_ms, half.stored_ms + options.transaction_check_interval), not_before_ms))
        if half.checks and self._table.is_newest(half):
            self._polls.ask(half)

    @property
    def _has_room(self) -> bool:
        return len(self._busy) < BUSY_MAX and self._writes.has_room

    def _be_busy(self, half: HalfMessage) -> None:
        half.busy = True
        self._busy.add(half.offset)
        self._polls.forget(half)

    def _not_busy(self, half: HalfMessage) -> None:
        half.busy = False
        self._busy.discard(half.offset)

    def _on_marked(self, mark_offset: int, offsets: list[int]) -> None:
        self._table.marked(mark_offset, offsets)
        for offset in offsets:
            self._table.done(offset)
            self._busy.discard(offset)

    def _message(self, half: HalfMessage) -> StoredMessage | None:
        """The half message from the log, None when retention has taken it. Raises CorruptStoreError."""
        found = self._reading.look(half.physical_offset)
        if found is not None:
            return decode_record(found.data, check_crc=False)
        if half.physical_offset >= self._words[control.MIN_PHYSICAL_OFFSET]:
            raise CorruptStoreError(f"no record begins at {half.physical_offset:,} of the log any more")
        return None

    # Ends

    def _take_end(self, end: _End) -> None:
        if len(self._waiting) >= WAITING_MAX:
            raise StoreBusyError(f"{WAITING_MAX:,} ends of transactions wait already", hint_ms=20)
        if self._waiting or not self._end(end.request, end.options):
            self._waiting.append(end)

    def _serve_waiting(self) -> int:
        """Ends that had to wait: for room, or for a copy that is on its way."""
        done = 0
        for _ in range(len(self._waiting)):
            if len(self._busy) >= BUSY_MAX:
                break
            end = self._waiting.popleft()
            if end.request.connection.closed:
                continue
            try:
                if self._end(end.request, end.options):
                    done += 1
                else:
                    self._waiting.append(end)
            except MqprocError as error:
                self._refuse(end.request, error)
        return done

    def _end(self, request: PendingRequest, options: TransactionEndRequest) -> bool:
        """Commit or roll back; whether that could be begun."""
        half = self._search.find(options)
        if half is None:
            self._answer(request, Empty(), ())
            return True
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
        self._be_busy(half)

        def stored(_offset: int) -> None:
            self._io.crash_point("transaction.committed")
            self._words.add(control.TRANSACTION_COMMITS, 1)
            self._table.ended(half, committed=True)
            self._marks.add(half.offset)
            self._answer(request, Empty(), ())

        def refused(error: MqprocError) -> None:
            self._not_busy(half)
            self._check_soon(half)
            self._refuse(request, error)

        self._writes.store([new], stored, refused)

    def _roll_back(self, request: PendingRequest, half: HalfMessage) -> None:
        self._be_busy(half)

        def marked() -> None:
            self._io.crash_point("transaction.rolled_back")
            self._words.add(control.TRANSACTION_ROLLBACKS, 1)
            self._table.ended(half, committed=False)
            self._answer(request, Empty(), ())

        def refused(error: MqprocError) -> None:
            self._not_busy(half)
            self._check_soon(half)
            self._refuse(request, error)

        self._marks.add(half.offset, marked, refused)

    # Checks

    def _check_due(self) -> int:
        if not len(self._table):
            return 0
        done = 0
        now_ms = self._clock.time_ms()
        while self._has_room and (half := self._due.take(now_ms)) is not None:
            self._look_at(half, now_ms)
            done += 1
        return done

    def _look_at(self, half: HalfMessage, now_ms: int) -> None:
        options = self._options
        try:
            message = self._message(half)
        except CorruptStoreError as error:
            self._heartbeat.failed()
            self._log.error("half message is damaged", transaction=half.transaction_id, error=str(error))
            self._due.set(half, now_ms + options.transaction_check_interval)
            return
        if message is None:
            self._lose(half)
            return
        self._be_busy(half)
        old = now_ms - half.born_ms > options.file_reserved_time * _MS_PER_HOUR
        if half.checks >= options.transaction_check_max or old:
            self._give_up(half, message)
        else:
            self._copy(half, message, check=half.check_ms <= now_ms)

    def _copy(self, half: HalfMessage, message: StoredMessage, *, check: bool) -> None:
        """Store it anew: when its queue shows that, the old one is marked, and after a `check` a producer asked."""

        def stored(_offset: int) -> None:
            self._words.add(control.TRANSACTION_CHECKS, int(check))

        copy = checked(message, half.checks + check)
        if not has_room(copy):
            # Its checks are counted here alone, and anew by a restart: a copy without the count was never checked.
            self._not_busy(half)
            half.checks, half.stored_ms = half.checks + check, self._clock.time_ms()
            stored(half.offset)
            self._expect(half)
            return
        self._writes.store([copy], stored, lambda error: self._check_again(half, error))

    def _give_up(self, half: HalfMessage, message: StoredMessage) -> None:

        def stored(_offset: int) -> None:
            self._words.add(control.TRANSACTION_DISCARDS, 1)
            self._log.warning(
                "transaction is given up", transaction=half.transaction_id, group=half.group, checks=half.checks
            )
            self._table.ended(half, committed=False)
            self._marks.add(half.offset)

        self._writes.store([given_up(message)], stored, lambda error: self._check_again(half, error))

    def _check_again(self, half: HalfMessage, error: MqprocError) -> None:
        now_ns = self._clock.monotonic_ns()
        if now_ns >= self._told_ns + TELL_AGAIN_NS:
            self._told_ns = now_ns
            self._log.warning("checks cannot be stored, and are tried until they can", error=str(error))
        self._not_busy(half)
        # There may be thousands, and others wait meanwhile.
        half.again_ms = min(max(AGAIN_MS, 2 * half.again_ms), AGAIN_MS_MAX)
        self._check_soon(half, half.again_ms)

    def _check_soon(self, half: HalfMessage, pause_ms: int = AGAIN_MS) -> None:
        self._due.set(half, max(half.due_ms, self._clock.time_ms() + pause_ms))

    def _lose(self, half: HalfMessage) -> None:
        self._log.warning("half message is deleted", transaction=half.transaction_id, group=half.group)
        self._table.ended(half, committed=False)
        self._mark(half)

    def _poll(self, request: PendingRequest, options: TransactionPollRequest) -> None:
        if not options.group:
            raise BadRequestError("a producer that can be asked has a group")
        self._polls.poll(request, options, self._clock.monotonic_ns())

    def _question(self, half: HalfMessage) -> bytes | None:
        if half.busy or not self._table.is_newest(half):
            return None
        (record,) = self._reading.records.copies([half.physical_offset])
        return record

    # What operators ask

    def _list(self, request: PendingRequest, options: TransactionsRequest) -> None:
        found = self._search.open(options)
        oldest = heapq.nsmallest(min(options.max_transactions, LISTED_MAX), found, key=lambda half: half.born_ms)
        rows = [row(half) for half in oldest]
        producers = self._polls.of(options.group) if options.group else self._polls.count
        self._answer(request, TransactionsAnswer(len(found), producers, rows), ())

    def _check_now(self, request: PendingRequest, options: TransactionCheckRequest) -> None:
        places = {*options.physical_offsets}
        found = [half for half in self._search.open(TransactionsRequest()) if places.intersection(half.places)]
        for half in found:
            half.check_ms = self._clock.time_ms()
            self._due.set(half, half.check_ms)
        self._answer(request, TransactionCheckAnswer(len(found)), ())

    def _tell(self) -> None:
        words, table = self._words, self._table
        words[control.OPEN_TRANSACTIONS] = len(table)
        words[control.OLDEST_TRANSACTION_MS] = min((half.born_ms for half in table.all()), default=0)
        words[control.TRANSACTION_PRODUCERS] = self._polls.count

    # Progress

    def _move_progress(self) -> None:
        """Let the next start begin to read at the first half message that is open."""
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
            # The next start reads more than it needs to.


TRANSACTION_OPERATIONS = frozenset(
    {
        Operation.TRANSACTION_END,
        Operation.TRANSACTION_POLL,
        Operation.TRANSACTIONS,
        Operation.TRANSACTION_CHECK,
    }
)
"""What `take` answers."""
