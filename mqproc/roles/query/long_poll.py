"""Pulls and long polling: a pull is answered at once or held for new messages.

    pull ──▶ records, or a status                          ──▶ answer
         └─▶ nothing yet: held ──dispatcher's bell──▶ single new record  ──▶ answer
                                                   └─▶ else: pulled again ──▶ answer, or held on

When the bell rings, the maximum offset of each held queue is compared with the last one seen, many in one array
operation, and only the pulls of queues that have moved are retried.

A client that reads a queue in order as objects finds its next answer prepared: the role reads and packs it while the
client decodes the previous one. A prepared answer is used once, by the pull that was expected, and counted only then.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from mqproc.errors import BadRequestError
from mqproc.layout import control
from mqproc.layout import queue_table as layout
from mqproc.roles.request_limits import Payload, PendingRequest, TimerQueue, answer_payload
from mqproc.roles.role import RoleContext
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.read.pull import Pulled, ReadAhead, SingleRecordPulls
from mqproc.store.read.queries import StoreQueries
from mqproc.store.read.unit_walk import FilterProgram, PullCounters, compile_filter
from mqproc.store.read.views import QueueBounds
from mqproc.types import PullStatus
from mqproc.wire.connection import ServerConnection
from mqproc.wire.operations import Operation, PullAnswer, PullRequest

NO_QUEUE = -1
NEVER_SEEN = -1
NEVER_LISTED = (-1, -1, -1)
NEVER_NS = 1 << 62
HELD_PULLS_MIN = 16_384
# Number of rows kept for queues without held pulls, which are often waited for again.
IDLE_ROWS_MAX = 1024
# Up to this many rows are compared one by one: after a wait the first array operations take ten microseconds.
FEW_ROWS = 16

_PULL = int(Operation.PULL)

# Statuses at which a waiting pull is held.
_NOTHING_YET = frozenset(
    {PullStatus.OFFSET_OVERFLOW_ONE, PullStatus.NO_MESSAGE_IN_QUEUE, PullStatus.NO_MATCHED_LOGIC_QUEUE}
)
# Statuses at which it continues from the next offset.
CONTINUE_STATUSES = frozenset({PullStatus.NO_MATCHED_MESSAGE, PullStatus.MESSAGE_WAS_REMOVING})
HOLD_MS_MAX: Final = 60_000
PREPARED_BYTES_MAX: Final = 4 << 20
"""Size limit of the records of a prepared answer."""


@dataclass(slots=True, eq=False)
class HeldPull:
    """A held pull. It continues at `offset`; `last` is its answer if it ended now.

    `progress_ns`: time from which it is answered as soon as it has passed messages that do not match.
    `tag_filter_program`: its tag filter, None for a pull with other conditions.
    """

    connection: ServerConnection
    request_id: int
    options: PullRequest
    offset: int
    deadline_ns: int
    last: Pulled
    progress_ns: int = NEVER_NS
    tag_filter_program: FilterProgram | None = None
    released: bool = False
    due: bool = False
    answered: bool = False
    operation: int = _PULL

    @property
    def queue(self) -> tuple[str, int]:
        return self.options.topic, self.options.queue_id


class LongPolls:
    """Held pulls by queue, client and deadline."""

    def __init__(self, table: QueueTable, queues_max: int = HELD_PULLS_MIN) -> None:
        """`queues_max` is the maximum number of queues of the store.

        A consumer of all queues holds a pull for each. A pull beyond the limit is answered at once and then repeated.
        """
        self._table = table
        self._limit = max(HELD_PULLS_MIN, queues_max)
        self._by_queue: dict[tuple[str, int], list[HeldPull]] = {}
        self._by_connection: dict[ServerConnection, set[HeldPull]] = {}
        self._deadlines: TimerQueue[HeldPull] = TimerQueue()
        self.due: deque[HeldPull] = deque()
        """Pulls to retry, including released pulls, for `set_due` and `take_due`."""
        self.count = 0
        """Number of held pulls."""
        # Compared arrays, a row per queue: index of its table word (−1 = no such queue), last maximum seen.
        self._queues: list[tuple[str, int]] = []
        self._known: set[tuple[str, int]] = set()
        self._new: list[tuple[str, int]] = []
        self._cells: NDArray[np.int64] = np.empty(0, np.int64)
        self._without: NDArray[np.intp] = np.empty(0, np.intp)
        self._seen: NDArray[np.int64] = np.empty(0, np.int64)
        self._table_changes = NEVER_LISTED

    def __len__(self) -> int:
        return self.count

    @property
    def is_full(self) -> bool:
        return self.count >= self._limit

    def hold(self, pull: HeldPull) -> None:
        """Hold a pull. The caller must check the queue once more afterwards (`moved`)."""
        self._by_queue.setdefault(pull.queue, []).append(pull)
        if pull.queue not in self._known:
            self._known.add(pull.queue)
            self._new.append(pull.queue)
        self._by_connection.setdefault(pull.connection, set()).add(pull)
        self._deadlines.set(pull, pull.deadline_ns)
        self.count += 1

    def hasten(self, pull: HeldPull) -> None:
        """Shorten the deadline of a pull that has passed messages, to report its progress."""
        if pull.progress_ns < pull.deadline_ns and not pull.released:
            pull.deadline_ns = pull.progress_ns
            self._deadlines.set(pull, pull.deadline_ns)

    def release(self, pull: HeldPull) -> None:
        """Remove an answered pull."""
        if pull.released:
            return
        pull.released = True
        self.count -= 1
        pulls = self._by_queue[pull.queue]
        pulls.remove(pull)
        if not pulls:
            # The row stays: usually a pull of the same queue follows at once.
            del self._by_queue[pull.queue]
        of_connection = self._by_connection[pull.connection]
        of_connection.discard(pull)
        if not of_connection:
            del self._by_connection[pull.connection]
        self._deadlines.forget(pull)

    def drop(self, connection: ServerConnection) -> None:
        """Remove the pulls of a closed connection."""
        for pull in list(self._by_connection.get(connection, ())):
            self.release(pull)

    @property
    def queues_changed(self) -> bool:
        """Whether queues were created or deleted, or newly waited for, since the last `moved`."""
        return bool(self._new) or self._table.changes != self._table_changes

    def moved(self) -> list[HeldPull]:
        """Pulls of queues whose maximum offset has changed since the last call, or that are new."""
        table = self._table
        changes = table.changes
        if changes != self._table_changes or len(self._queues) > 2 * len(self._by_queue) + IDLE_ROWS_MAX:
            self._list_queues()
            self._table_changes = changes
        elif self._new:
            self._add_queues()
        moved: list[HeldPull] = []
        for row in self._changed_rows() if len(self._queues) > FEW_ROWS else self._changed_of_few():
            moved += self._by_queue.get(self._queues[row], ())
        return moved

    def _changed_rows(self) -> list[int]:
        """Rows of queues that have moved; records their maxima as seen."""
        maxima = self._table.cells.take(self._cells)
        if len(self._without):
            maxima[self._without] = 0
        changed: list[int] = (maxima != self._seen).nonzero()[0].tolist()
        self._seen = maxima
        return changed

    def _changed_of_few(self) -> list[int]:
        """As `_changed_rows`, one by one."""
        maximum_at, seen = self._table.cells.item, self._seen
        changed = []
        for row, cell in enumerate(self._cells.tolist()):
            maximum = maximum_at(cell) if cell != NO_QUEUE else 0
            if maximum != seen[row]:
                seen[row] = maximum
                changed.append(row)
        return changed

    def set_due(self, pull: HeldPull) -> None:
        """Schedule a retry of a pull."""
        if not pull.due:
            pull.due = True
            self.due.append(pull)

    def take_due(self) -> HeldPull | None:
        """Next pull to retry."""
        while self.due:
            pull = self.due.popleft()
            pull.due = False
            if not pull.released:
                return pull
        return None

    def expired(self, now_ns: int) -> list[HeldPull]:
        """Remove and return the pulls that have timed out."""
        return self._deadlines.pop_due(now_ns)

    def seconds_left(self, now_ns: int, at_most_s: float) -> float:
        """Time until a pull times out, `at_most_s` at most."""
        return self._deadlines.seconds_left(now_ns, at_most_s)

    def all(self) -> list[HeldPull]:
        return [pull for pulls in self._by_queue.values() for pull in pulls]

    def _list_queues(self) -> None:
        """Rebuild the rows. Queues that are new or have another number count as moved."""
        before = dict(zip(self._queues, zip(self._cells.tolist(), self._seen.tolist(), strict=True), strict=True))
        queues = list(self._by_queue)
        cells = [self._cell_of(queue) for queue in queues]
        seen = []
        for queue, cell in zip(queues, cells, strict=True):
            cell_before, seen_before = before.get(queue, (NO_QUEUE, NEVER_SEEN))
            seen.append(seen_before if cell == cell_before else NEVER_SEEN)
        self._queues = queues
        self._known = set(queues)
        self._new.clear()
        self._cells = np.array(cells, np.int64)
        self._without = np.flatnonzero(self._cells == NO_QUEUE)
        self._seen = np.array(seen, np.int64)

    def _add_queues(self) -> None:
        """Add rows for new queues only: a consumer of many queues starts with one after another."""
        new, rows = np.array([self._cell_of(queue) for queue in self._new], np.int64), len(self._queues)
        self._queues += self._new
        self._new.clear()
        self._cells = np.concatenate((self._cells, new))
        self._without = np.concatenate((self._without, rows + np.flatnonzero(new == NO_QUEUE)))
        self._seen = np.concatenate((self._seen, np.full(len(new), NEVER_SEEN)))

    def _cell_of(self, queue: tuple[str, int]) -> int:
        number = self._table.find(*queue)
        return layout.entry_word(number, layout.MAX_OFFSET) if number >= 0 else NO_QUEUE


def tag_filter(options: PullRequest) -> FilterProgram | None:
    """Tag filter of a pull; None if it has other conditions."""
    if options.sql or options.rocketmq_limits:
        return None
    return compile_filter(options.topic, tuple(options.tags))


def has_advanced(pulled: Pulled, options: PullRequest) -> bool:
    """Whether a pull has advanced past its requested offset."""
    return pulled.next_offset > options.offset


def must_wait(pulled: Pulled, offset: int) -> bool:
    """Whether a waiting pull with this result remains held."""
    if pulled.status in _NOTHING_YET:
        # An offset beyond an empty or unknown queue stays wrong.
        return pulled.status is PullStatus.OFFSET_OVERFLOW_ONE or offset == 0
    return pulled.status in CONTINUE_STATUSES


@dataclass(slots=True, eq=False)
class ExpectedPull:
    """The pull that follows an answered one if its client reads the queue in order.

    `number`: number of the queue, which distinguishes a deleted queue of the same name. `prepare`: its answer is to be
    read in advance. `pulled` and `payload`: the prepared answer.
    """

    connection: ServerConnection
    options: PullRequest
    number: int
    prepare: bool
    pulled: Pulled | None = None
    payload: Payload = ()


class PullHandler:
    """Answers pulls. `guarded` calls a function and refuses the request if it raises."""

    def __init__(
        self, context: RoleContext, reading: StoreQueries, table: QueueTable, guarded: Callable[..., None]
    ) -> None:
        self._words = context.control.words
        self._cells = self._words.cells
        self._clock = context.clock
        self._reading = reading
        self._table = table
        self._guarded = guarded
        self._counts = PullCounters(context.control.cells, table.cells)
        self._single = SingleRecordPulls(table, reading.files, reading.records, self._counts)
        self._read_ahead = ReadAhead(context.io, reading.files, reading.segments)
        self.held = LongPolls(table, context.options.max_queues)
        self.held_answers = 0
        """Pulls that were answered after they had been held."""
        self._dispatched = -1
        self._expected: ExpectedPull | None = None
        """One is enough: the role has time to prepare answers while few clients pull."""

    def handle(self, request: PendingRequest) -> None:
        """Answer a pull, or hold it."""
        options: PullRequest = request.options
        bounds = self._reading.queues.bounds(options.topic, options.queue_id)
        expected = self._expected_by(request, bounds)
        if bounds is not None:
            if expected is not None and self._answer_prepared(request, expected, bounds):
                return
            self._read_ahead.before_pull(options.topic, options.queue_id, bounds, options.offset)
        pulled = self._pull_from(options, options.offset)
        reports_progress = options.progress_ms == 0 and has_advanced(pulled, options)
        may_wait = options.timeout_ms > 0 and not reports_progress and must_wait(pulled, options.offset)
        if not may_wait or self.held.is_full:
            request.answered = True
            self._answer(request, pulled)
            self._expect_next(request, pulled, bounds, in_order=expected is not None)
            return
        self._forget_expected(request.connection)
        offset = pulled.next_offset if pulled.status in CONTINUE_STATUSES else options.offset
        now_ns = self._clock.monotonic_ns()
        deadline_ns = now_ns + min(options.timeout_ms, HOLD_MS_MAX) * 1_000_000
        pull = HeldPull(request.connection, request.request_id, options, offset, deadline_ns, pulled)
        pull.tag_filter_program = tag_filter(options)
        if options.progress_ms >= 0:
            pull.progress_ns = now_ns + options.progress_ms * 1_000_000
        self.held.hold(pull)
        self._continue(pull)
        # Messages may have arrived since the pull: check held queues in this step.
        self._dispatched = -1

    def prepare(self) -> int:
        """Prepare the answer of the expected pull, once; returns the number of pulls read."""
        expected = self._expected
        if expected is None or not expected.prepare or expected.connection.closed or expected.connection.paused:
            return 0
        expected.prepare = False
        options = expected.options
        place = options.topic, options.queue_id, options.offset, options.max_messages, options.max_bytes
        # An error is reported by the pull itself, which reads again; a pull that does not follow has no error.
        with contextlib.suppress(Exception):
            pulled = self._reading.pull(*place, options.tags, sql=options.sql)
            if pulled.count and len(pulled.records) <= PREPARED_BYTES_MAX:
                expected.payload = answer_payload(options, (pulled.records.data,))
                expected.pulled = pulled
        return 1

    def drop(self, connection: ServerConnection) -> None:
        """Remove the held pulls and the prepared answer of a closed connection."""
        self.held.drop(connection)
        self._forget_expected(connection)

    def retry_held(self, end_ns: int) -> int:
        """Retry held pulls of queues that have moved, answer those that time out; returns how many."""
        held = self.held
        if not held.count:
            return 0
        done = 0
        dispatched = self._cells[control.DISPATCHED]
        if dispatched != self._dispatched or held.queues_changed:
            self._dispatched = dispatched
            moved = held.moved()
            if len(moved) == 1 and not held.due:
                self._guarded(moved[0], self._retry, moved[0])
                done = 1
            else:
                for pull in moved:
                    held.set_due(pull)
        if held.due and not done:
            done = self._retry_due(end_ns)
        for pull in held.expired(self._clock.monotonic_ns()):
            self._guarded(pull, self._answer_last, pull)
            done += 1
        return done

    def on_stop(self) -> None:
        """Answer all held pulls with their last result."""
        for pull in self.held.all():
            self._guarded(pull, self._answer_last, pull)

    def _expected_by(self, request: PendingRequest, bounds: QueueBounds | None) -> ExpectedPull | None:
        """The expected pull if this request is it."""
        expected = self._expected
        if expected is None or bounds is None or expected.connection is not request.connection:
            return None
        return expected if expected.number == bounds.number and expected.options == request.options else None

    def _answer_prepared(self, request: PendingRequest, expected: ExpectedPull, bounds: QueueBounds) -> bool:
        """Answer the expected pull as if it was read now; False if it must be read."""
        pulled, options = expected.pulled, expected.options
        if pulled is None or options.offset < bounds.min_offset:
            return False
        if pulled.next_offset >= pulled.max_offset and pulled.max_offset != bounds.max_offset:
            # It ended with the queue, which has grown: more messages may fit in the answer.
            return False
        self._expected = None
        # As the kernel counts records that it gathers for an answer.
        add = self._words.add
        add(control.PULLED_MESSAGES, pulled.count)
        add(control.PULLED_BYTES, len(pulled.records))
        add(control.PULLS, 1)
        add(control.QUERY_REQUESTS, 1)
        entry = self._table.entry(options.topic, options.queue_id)
        self._table.words.add(layout.entry_word(entry, layout.DELIVERED), pulled.count)
        pulled = msgspec.structs.replace(pulled, min_offset=bounds.min_offset, max_offset=bounds.max_offset)
        request.answered = True
        self._send(request, pulled, expected.payload)
        self._expect_next(request, pulled, bounds, in_order=True)
        return True

    def _expect_next(
        self, request: PendingRequest, pulled: Pulled, bounds: QueueBounds | None, *, in_order: bool
    ) -> None:
        """Expect the pull after an answered one; prepare it from the second pull in order on."""
        options: PullRequest = request.options
        # Sending may have closed the connection, and then nothing would free the answer.
        if pulled.status is not PullStatus.FOUND or bounds is None or request.connection.closed:
            self._forget_expected(request.connection)
        elif options.object_bytes > 0 and not options.rocketmq_limits:
            following = msgspec.structs.replace(options, offset=pulled.next_offset)
            # The next answer is usually as large as this one: do not read large ones only to discard them.
            fits = len(pulled.records) <= PREPARED_BYTES_MAX
            prepare = in_order and fits and pulled.next_offset < pulled.max_offset
            self._expected = ExpectedPull(request.connection, following, bounds.number, prepare)

    def _forget_expected(self, connection: ServerConnection) -> None:
        """Drop the expected pull and its answer if it is of this connection."""
        if self._expected is not None and self._expected.connection is connection:
            self._expected = None

    def _retry_due(self, end_ns: int) -> int:
        """Retry due pulls in turn until `end_ns`, so that a costly filter does not delay others."""
        done = 0
        for _ in range(len(self.held.due)):
            if done and self._clock.monotonic_ns() >= end_ns:
                break
            pull = self.held.take_due()
            if pull is None:
                break
            self._guarded(pull, self._retry, pull)
            done += 1
        return done

    def _retry(self, pull: HeldPull) -> None:
        """Retry a held pull; answer it or keep holding it."""
        options = pull.options
        try:
            single = None
            if pull.tag_filter_program is not None:
                single = self._single.pull(options.topic, options.queue_id, pull.offset, pull.tag_filter_program)
            if single is not None:
                pull.last = single
                self._answer_found(pull)
                return
            first = self._reading.first_candidate(
                options.topic, options.queue_id, pull.offset, options.tags, options.sql
            )
            pulled = self._pull_from(options, first)
        except BaseException:
            self.held.release(pull)
            raise
        unknown = PullStatus.NO_MATCHED_LOGIC_QUEUE
        is_deleted = pulled.status is unknown and pull.last.status is not unknown
        pull.last, pull.offset = pulled, first
        if is_deleted or not must_wait(pulled, first):
            self._answer_found(pull)
        else:
            if pulled.status in CONTINUE_STATUSES:
                pull.offset = pulled.next_offset
            self._continue(pull)

    def _continue(self, pull: HeldPull) -> None:
        """Schedule a retry if more units are available, and report progress in time."""
        if has_advanced(pull.last, pull.options):
            self.held.hasten(pull)
        if pull.last.status in CONTINUE_STATUSES and pull.offset < pull.last.max_offset:
            self.held.set_due(pull)

    def _answer_found(self, pull: HeldPull) -> None:
        """Answer a held pull; after the last one yield the processor to its client."""
        try:
            self._answer(pull, pull.last)
            if not self.held.due:
                os.sched_yield()
        finally:
            # Release it even after an error: the pull is then refused and must not be answered again.
            self._release(pull)

    def _answer_last(self, pull: HeldPull) -> None:
        """Answer a held pull with its last result."""
        self._release(pull)
        self._answer(pull, pull.last)

    def _release(self, pull: HeldPull) -> None:
        self.held.release(pull)
        self.held_answers += 1

    def _pull_from(self, options: PullRequest, offset: int) -> Pulled:
        place = options.topic, options.queue_id, offset, options.max_messages, options.max_bytes
        if not options.rocketmq_limits:
            return self._reading.pull(*place, options.tags, sql=options.sql, counts=self._counts)
        if options.sql:
            raise BadRequestError("RocketMQ's limits apply to filters by tags, not by properties")
        return self._reading.get_message(*place, "||".join(options.tags), self._counts)

    def _answer(self, request: PendingRequest | HeldPull, pulled: Pulled) -> None:
        if not pulled.count:
            # Pulls with records are counted when the records are gathered.
            self._words.add(control.PULLS, 1)
            self._words.add(control.EMPTY_PULLS, 1)
            self._words.add(control.QUERY_REQUESTS, 1)
        payload = answer_payload(request.options, (pulled.records.data,)) if pulled.count else ()
        self._send(request, pulled, payload)

    def _send(self, request: PendingRequest | HeldPull, pulled: Pulled, payload: Payload) -> None:
        answer = PullAnswer(
            pulled.status, pulled.next_offset, pulled.min_offset, pulled.max_offset, pulled.count, pulled.detail
        )
        request.connection.answer(request.request_id, Operation.PULL, answer, payload, owned=True)
