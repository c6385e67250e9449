"""Long polls: pulls that found nothing, held until their queue has more, their time is over, or their client is gone.

The bell only says "look": then each held queue's maximum offset is compared with the one last seen, many in one array
operation, and only the pulls of queues that moved are tried again.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.errors import BadRequestError
from mqproc.layout import control
from mqproc.layout import queue_table as layout
from mqproc.roles.request_limits import PendingRequest
from mqproc.roles.role import RoleContext
from mqproc.roles.timer_queue import TimerQueue
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.read.filter_program import FilterProgram, compile_filter
from mqproc.store.read.pull import Pulled, ReadAhead, SingleRecordPulls
from mqproc.store.read.queries import StoreQueries
from mqproc.store.read.unit_walk import PullCounters
from mqproc.types import PullStatus
from mqproc.wire.connection import ServerConnection
from mqproc.wire.operations import Operation
from mqproc.wire.operations.log import PullAnswer, PullRequest

NO_QUEUE = -1
NEVER_SEEN = -1
NEVER_LISTED = (-1, -1, -1)
NEVER_NS = 1 << 62
HELD_PULLS_MIN = 16_384
# Rows of queues that nobody waits for any more, kept because somebody may again.
IDLE_ROWS_MAX = 1024
# Up to so many rows are compared one by one: behind a wait the first array operations take ten microseconds.
FEW_ROWS = 16

_PULL = int(Operation.PULL)

# Statuses that say "nothing yet": a pull that waits is held at them.
_NOTHING_YET = frozenset(
    {PullStatus.OFFSET_OVERFLOW_ONE, PullStatus.NO_MESSAGE_IN_QUEUE, PullStatus.NO_MATCHED_LOGIC_QUEUE}
)
# Those at which it goes on at once from the next offset.
GO_ON = frozenset({PullStatus.NO_MATCHED_MESSAGE, PullStatus.MESSAGE_WAS_REMOVING})


@dataclass(slots=True, eq=False)
class HeldPull:
    """A held request. `offset` is where it goes on, `last` what it would be answered now.

    `progress_ns`: from when on it is answered as soon as it has passed messages that do not match. `chosen`: what
    passes its tags; None for a pull that goes by something else too.
    """

    connection: ServerConnection
    request_id: int
    options: PullRequest
    offset: int
    deadline_ns: int
    last: Pulled
    progress_ns: int = NEVER_NS
    chosen: FilterProgram | None = None
    released: bool = field(default=False)
    due: bool = field(default=False)
    answered: bool = field(default=False)
    operation: int = field(default=_PULL)

    @property
    def queue(self) -> tuple[str, int]:
        return self.options.topic, self.options.queue_id


class LongPolls:
    """All held pulls, by queue, by client and by deadline."""

    def __init__(self, table: QueueTable, queues_max: int = HELD_PULLS_MIN) -> None:
        """`queues_max`: as many queues the store may have. A consumer of all of them has a pull held for each; one that
        is not held is answered at once, and asked again and again."""
        self._table = table
        self._most = max(HELD_PULLS_MIN, queues_max)
        self._by_queue: dict[tuple[str, int], list[HeldPull]] = {}
        self._by_connection: dict[ServerConnection, set[HeldPull]] = {}
        self._deadlines: TimerQueue[HeldPull] = TimerQueue()
        self.due: deque[HeldPull] = deque()
        """The pulls to be tried again, released ones among them: for `set_due` and `take_due`."""
        self.count = 0
        """Pulls that are held."""
        # What is compared, a row each queue: its place among the table's words (−1 = no such queue), the maximum seen.
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
        """Whether no more are held."""
        return self.count >= self._most

    def hold(self, pull: HeldPull) -> None:
        """Keep a pull. The caller looks at the queue once more afterwards (`moved`)."""
        self._by_queue.setdefault(pull.queue, []).append(pull)
        if pull.queue not in self._known:
            self._known.add(pull.queue)
            self._new.append(pull.queue)
        self._by_connection.setdefault(pull.connection, set()).add(pull)
        self._deadlines.set(pull, pull.deadline_ns)
        self.count += 1

    def hasten(self, pull: HeldPull) -> None:
        """Have a pull that has passed messages answered in time to tell so."""
        if pull.progress_ns < pull.deadline_ns and not pull.released:
            pull.deadline_ns = pull.progress_ns
            self._deadlines.set(pull, pull.deadline_ns)

    def release(self, pull: HeldPull) -> None:
        """Forget a pull that is answered."""
        if pull.released:
            return
        pull.released = True
        self.count -= 1
        pulls = self._by_queue[pull.queue]
        pulls.remove(pull)
        if not pulls:
            # The row stays: most often the same queue is waited for again at once.
            del self._by_queue[pull.queue]
        of_connection = self._by_connection[pull.connection]
        of_connection.discard(pull)
        if not of_connection:
            del self._by_connection[pull.connection]
        self._deadlines.forget(pull)

    def drop(self, connection: ServerConnection) -> None:
        """Forget the pulls of a client that is gone."""
        for pull in list(self._by_connection.get(connection, ())):
            self.release(pull)

    @property
    def queues_changed(self) -> bool:
        """Whether queues were made or deleted, or new ones are waited for, since `moved` was called."""
        return bool(self._new) or self._table.changes != self._table_changes

    def moved(self) -> list[HeldPull]:
        """The pulls of queues whose maximum offset is another than at the last call, or that were not compared yet."""
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
        """The rows whose queues have moved; they are seen now."""
        maxima = self._table.cells.take(self._cells)
        if len(self._without):
            maxima[self._without] = 0
        changed: list[int] = (maxima != self._seen).nonzero()[0].tolist()
        self._seen = maxima
        return changed

    def _changed_of_few(self) -> list[int]:
        """The same, one by one."""
        maximum_at, seen = self._table.cells.item, self._seen
        changed = []
        for row, cell in enumerate(self._cells.tolist()):
            maximum = maximum_at(cell) if cell != NO_QUEUE else 0
            if maximum != seen[row]:
                seen[row] = maximum
                changed.append(row)
        return changed

    def set_due(self, pull: HeldPull) -> None:
        """Have a pull tried again, after those that are to be already."""
        if not pull.due:
            pull.due = True
            self.due.append(pull)

    def take_due(self) -> HeldPull | None:
        """The next pull to try again."""
        while self.due:
            pull = self.due.popleft()
            pull.due = False
            if not pull.released:
                return pull
        return None

    def expired(self, now_ns: int) -> list[HeldPull]:
        """The pulls whose time is over."""
        return self._deadlines.pop_due(now_ns)

    def seconds_left(self, now_ns: int, at_most_s: float) -> float:
        """How long nothing expires."""
        return self._deadlines.seconds_left(now_ns, at_most_s)

    def all(self) -> list[HeldPull]:
        """Every held pull."""
        return [pull for pulls in self._by_queue.values() for pull in pulls]

    def _list_queues(self) -> None:
        """Make the rows anew. A queue that had none, or whose number is another now, is looked at in any case."""
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
        """Rows for those alone that have none: a consumer of many queues begins to wait at one after the other."""
        new, rows = np.array([self._cell_of(queue) for queue in self._new], np.int64), len(self._queues)
        self._queues += self._new
        self._new.clear()
        self._cells = np.concatenate((self._cells, new))
        self._without = np.concatenate((self._without, rows + np.flatnonzero(new == NO_QUEUE)))
        self._seen = np.concatenate((self._seen, np.full(len(new), NEVER_SEEN)))

    def _cell_of(self, queue: tuple[str, int]) -> int:
        number = self._table.find(*queue)
        return layout.entry_word(number, layout.MAX_OFFSET) if number >= 0 else NO_QUEUE


def chosen_by_tags(options: PullRequest) -> FilterProgram | None:
    """What passes a pull's tags; None for one that goes by something else too."""
    if options.sql or options.rocketmq_limits:
        return None
    return compile_filter(options.topic, tuple(options.tags))


def has_no_queue(pulled: Pulled) -> bool:
    """Whether a pull has found no such queue."""
    return pulled.status is PullStatus.NO_MATCHED_LOGIC_QUEUE


def has_passed(pulled: Pulled, options: PullRequest) -> bool:
    """Whether a pull has come further than it was asked from."""
    return pulled.next_offset > options.offset


def finds_nothing_yet(pulled: Pulled, offset: int) -> bool:
    """Whether a pull that waits goes on waiting at this answer: nothing is there yet."""
    if pulled.status in _NOTHING_YET:
        # An offset that an empty or unknown queue does not have is wrong now and later.
        return pulled.status is PullStatus.OFFSET_OVERFLOW_ONE or offset == 0
    return pulled.status in GO_ON


# --- pulls ---
# Pulls: answered at once, or held until their queue has something for them.
#
# pull ──▶ records, or a status                     ──▶ answer
#      └─▶ nothing yet: held ──dispatcher's bell──▶ the lone record that has come ──▶ answer
#                                               └─▶ all else: pulled again        ──▶ answer, or held further on


HOLD_MS_MAX: Final = 60_000


class PullHandler:
    """The pulls of one store. `guarded` calls a function for a request, which is refused if that fails."""

    def __init__(
        self,
        context: RoleContext,
        reading: StoreQueries,
        table: QueueTable,
        guarded: Callable[..., None],
    ) -> None:
        self._words = context.control.words
        self._cells = self._words.cells
        self._clock = context.clock
        self._reading = reading
        self._guarded = guarded
        self._counts = PullCounters(context.control.cells, table.cells)
        self._lone = SingleRecordPulls(table, reading.files, reading.records, self._counts)
        self._read_ahead = ReadAhead(context.io, reading.files, reading.segments)
        self.held = LongPolls(table, context.options.max_queues)
        self.held_answers = 0
        """Pulls that were answered after they had been held."""
        self._dispatched = -1

    def take(self, request: PendingRequest) -> None:
        """Answer a pull, or hold it."""
        options: PullRequest = request.options
        bounds = self._reading.queues.bounds(options.topic, options.queue_id)
        if bounds is not None:
            self._read_ahead.before_pull(options.topic, options.queue_id, bounds, options.offset)
        pulled = self._pull_from(options, options.offset)
        tells = options.progress_ms == 0 and has_passed(pulled, options)
        may_wait = options.timeout_ms > 0 and not tells and finds_nothing_yet(pulled, options.offset)
        if not may_wait or self.held.is_full:
            request.answered = True
            self._answer(request.connection, request.request_id, pulled)
            return
        offset = pulled.next_offset if pulled.status in GO_ON else options.offset
        now_ns = self._clock.monotonic_ns()
        deadline_ns = now_ns + min(options.timeout_ms, HOLD_MS_MAX) * 1_000_000
        pull = HeldPull(request.connection, request.request_id, options, offset, deadline_ns, pulled)
        pull.chosen = chosen_by_tags(options)
        if options.progress_ms >= 0:
            pull.progress_ns = now_ns + options.progress_ms * 1_000_000
        self.held.hold(pull)
        self._go_on(pull)
        # What came since the pull looked has rung already: look at held queues in this very step.
        self._dispatched = -1

    def look(self, end_ns: int) -> int:
        """Answer held pulls whose queue has something for them, or whose time is over; how many were looked at."""
        held = self.held
        if not held.count:
            return 0
        done = 0
        dispatched = self._cells[control.DISPATCHED]
        if dispatched != self._dispatched or held.queues_changed:
            self._dispatched = dispatched
            moved = held.moved()
            if len(moved) == 1 and not held.due:
                self._guarded(moved[0], self._try_again, moved[0])
                done = 1
            else:
                for pull in moved:
                    held.set_due(pull)
        if held.due and not done:
            done = self._try_due(end_ns)
        for pull in held.expired(self._clock.monotonic_ns()):
            self._let_go(pull)
            done += 1
        return done

    def let_go(self) -> None:
        """Answer all that are held with what they have."""
        for pull in self.held.all():
            self._let_go(pull)

    def _try_due(self, end_ns: int) -> int:
        """Try held pulls again in turn, as far as the time goes: one with a costly filter keeps nobody waiting."""
        done = 0
        for _ in range(len(self.held.due)):
            if done and self._clock.monotonic_ns() >= end_ns:
                break
            pull = self.held.take_due()
            if pull is None:
                break
            self._guarded(pull, self._try_again, pull)
            done += 1
        return done

    def _try_again(self, pull: HeldPull) -> None:
        """Look at what a held pull's queue has now; answer it, or hold it further on."""
        options = pull.options
        try:
            lone = None
            if pull.chosen is not None:
                lone = self._lone.pull(options.topic, options.queue_id, pull.offset, pull.chosen)
            if lone is not None:
                pull.last = lone
                self._found(pull)
                return
            first = self._reading.first_candidate(
                options.topic, options.queue_id, pull.offset, options.tags, options.sql
            )
            pulled = self._pull_from(options, first)
        except BaseException:
            self.held.release(pull)
            raise
        is_deleted = has_no_queue(pulled) and not has_no_queue(pull.last)
        pull.last, pull.offset = pulled, first
        if is_deleted or not finds_nothing_yet(pulled, first):
            self._found(pull)
        else:
            if pulled.status in GO_ON:
                pull.offset = pulled.next_offset
            self._go_on(pull)

    def _go_on(self, pull: HeldPull) -> None:
        """Have a pull tried again soon when more units wait than one pull looks at; what it has passed is told."""
        if has_passed(pull.last, pull.options):
            self.held.hasten(pull)
        if pull.last.status in GO_ON and pull.offset < pull.last.max_offset:
            self.held.set_due(pull)

    def _found(self, pull: HeldPull) -> None:
        """Answer what a held pull has found; behind the last one have its client run, which often is to be here."""
        try:
            self._answer(pull.connection, pull.request_id, pull.last)
            if not self.held.due:
                # What is left of the step can wait.
                os.sched_yield()
        finally:
            # Who could not be answered is refused, and would be answered again.
            self._forget(pull)

    def _let_go(self, pull: HeldPull) -> None:
        """Answer what a held pull has found the last time: nothing."""
        self._answer(pull.connection, pull.request_id, pull.last)
        self._forget(pull)

    def _forget(self, pull: HeldPull) -> None:
        self.held.release(pull)
        self.held_answers += 1

    def _pull_from(self, options: PullRequest, offset: int) -> Pulled:
        place = options.topic, options.queue_id, offset, options.max_messages, options.max_bytes
        if not options.rocketmq_limits:
            return self._reading.pull(*place, options.tags, sql=options.sql, counts=self._counts)
        if options.sql:
            raise BadRequestError("RocketMQ's limits apply to filters by tags, not by properties")
        return self._reading.get_message(*place, "||".join(options.tags), self._counts)

    def _answer(self, connection: ServerConnection, request_id: int, pulled: Pulled) -> None:
        if not pulled.count:
            # The others were counted when their records were gathered.
            self._words.add(control.PULLS, 1)
            self._words.add(control.EMPTY_PULLS, 1)
            self._words.add(control.QUERY_REQUESTS, 1)
        answer = PullAnswer(
            pulled.status,
            pulled.next_offset,
            pulled.min_offset,
            pulled.max_offset,
            pulled.count,
            pulled.detail,
        )
        payload = (pulled.records.data,) if pulled.count else ()
        connection.answer(request_id, Operation.PULL, answer, payload, owned=True)
