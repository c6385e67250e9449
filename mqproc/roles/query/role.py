"""The query role: answers everything that is asked of the store, and holds the long polls.

    socket ──request──▶ queue ──▶ pull, look-ups: at once              ──▶ answer
                              ├─▶ long questions: a slice a step       ──▶ answer
                              └─▶ pulls with nothing to give: held     ──bell──▶ tried again ──▶ answer

A step works for a bounded time and then lets the loop look at the sockets again, so that one client's long question
keeps nobody waiting. Records go out as the buffers that they were gathered in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from mqproc.config import options as config
from mqproc.errors import CorruptStoreError, InternalError, MqprocError, StoreReadOnlyError
from mqproc.io.store_io import FailedSyncError
from mqproc.ipc.error_counters import error_counter
from mqproc.ipc.histogram import Histogram
from mqproc.ipc.words import Words
from mqproc.layout import control, histograms
from mqproc.layout import control as layout
from mqproc.roles.groups.coordinator import GROUP_OPERATIONS, GroupCoordinator
from mqproc.roles.groups.retries import GroupRetries
from mqproc.roles.groups.state import ConsumerGroupState
from mqproc.roles.internal_producer import InternalProducer
from mqproc.roles.pop.receivers import POP_OPERATIONS, PopReceivers
from mqproc.roles.query.admission import Job, ReadAdmission
from mqproc.roles.query.long_poll import PullHandler
from mqproc.roles.query.reads import GROUP_READS, READS, GroupReads, ReadRequests
from mqproc.roles.request_limits import Payload, PendingRequest, client_limits, within_limits
from mqproc.roles.role import SAMPLE_NS, SLOW_STEP_NS, RoleContext
from mqproc.roles.role_log import get_logger
from mqproc.roles.transactions.coordinator import TRANSACTION_OPERATIONS, TransactionCoordinator
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.offsets.offset_store import UNWRITABLE_ERRNOS, unwritable_error
from mqproc.store.read.queries import StoreQueries
from mqproc.store.read.views import WordsView
from mqproc.store.unreadable_files import unreadable_file
from mqproc.wire.codec import FrameOptions
from mqproc.wire.connection import Request, ServerConnection
from mqproc.wire.operations import Operation
from mqproc.wire.server import SocketServer

# --- request_times ---
# How long requests of the query role take: three histograms, pulls by samples.


LATE_NS: Final = SLOW_STEP_NS // 2
"""A request that has waited for so long when a step begins may be slow by its end: a step takes no longer."""


_KEYS = frozenset({int(Operation.GET), int(Operation.BY_KEY), int(Operation.QUERY_MESSAGE)})


class RequestLatency:
    """Every request that is answered at once is counted. A pull stands for all pulls since the one before it.

    `next_ns`: from then on the next pull is to be told. `held_pulls`: how many pulls were answered after they had been
    held; the time of those says nothing.
    """

    __slots__ = ("_counted", "_keys", "_others", "_pulls", "_words", "next_ns")

    def __init__(self, words: Words) -> None:
        self._words = words
        self._pulls = Histogram(words, histograms.PULL_REQUESTS)
        self._keys = Histogram(words, histograms.KEY_REQUESTS)
        self._others = Histogram(words, histograms.OTHER_REQUESTS)
        self._counted = words[layout.PULLS]
        self.next_ns = 0

    def answered(self, operation: int, taken_ns: int, now_ns: int, held_pulls: int) -> None:
        """A request came off its socket at `taken_ns` and has been answered at `now_ns`."""
        took_ns = now_ns - taken_ns
        if operation == _PULL:
            self._pulled(took_ns, now_ns, held_pulls)
        elif operation in _KEYS:
            self._keys.observe(took_ns)
        else:
            self._others.observe(took_ns)

    def _pulled(self, took_ns: int, now_ns: int, held_pulls: int) -> None:
        """A slow pull counts for itself alone."""
        pulls = self._words[layout.PULLS] - held_pulls - self._counted
        if took_ns >= SLOW_STEP_NS:
            pulls = min(pulls, 1)
        else:
            self.next_ns = now_ns + SAMPLE_NS
        self._pulls.observe(took_ns, pulls)
        self._counted += pulls


# --- read_pages ---
# The pages of the log that query reads: many stay present while it reads, none when it has not for a while.


RESIDENT_BYTES_MAX: Final = 64 << 20
"""So much stays present: the pulls of a topic's other queues find the pages that the last one has read."""

LET_GO_NS: Final = 1_000_000_000
"""After so long without work all are let go: present pages count as the group's memory, which is small when idle."""


class PageRelease:
    """Lets go of the pages of one role's `segments`."""

    def __init__(self, segments: LogSegments) -> None:
        self._segments = segments
        self._let_go_ns = 0

    def worked(self, now_ns: int) -> None:
        """Something was done that may have read."""
        self._let_go_ns = now_ns + LET_GO_NS

    def seconds_left(self, now_ns: int, at_most_s: float) -> float:
        """Let go when it is time, for a role that is about to wait; how long it may until it is."""
        if not self._segments.resident_bytes:
            return at_most_s
        if now_ns < self._let_go_ns:
            return min(at_most_s, (self._let_go_ns - now_ns) / 1e9)
        self._segments.drop_all_pages()
        return at_most_s


STEP_NS = 5_000_000
"""A step takes no new request and no further slice after this time."""

WAITING_REQUESTS_MAX = 4096
"""With more requests than this waiting, the sockets are not read."""

# A stopping role waits this long for clients to read their answers and so let their next requests be served.
STOP_SERVE_NS = 1_000_000_000
STOP_DRAIN_S = 1.0

QUERY_OPERATIONS = frozenset(
    {
        Operation.PULL,
        Operation.GROUP_NACK,
        Operation.GROUP_RESEND,
        *READS,
        *GROUP_OPERATIONS,
        *GROUP_READS,
        *POP_OPERATIONS,
        *TRANSACTION_OPERATIONS,
    }
)
"""All operations of the role."""

_PULL = int(Operation.PULL)


@dataclass(slots=True)
class _Waiting:
    """A request whose options are decoded: its frame's buffer is no longer needed."""

    connection: ServerConnection
    request_id: int
    operation: int
    options: Any
    taken_ns: int = 0
    """When it came off the socket."""
    after_ns: int = 0
    """When the sockets were looked at before: whatever came by then is served before it."""
    answered: bool = False


class Query:
    """The role. It holds nothing that a successor needs."""

    name = control.QUERY

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._clock = context.clock
        self._words = context.control.words
        self._cells = self._words.cells
        self._log = get_logger()
        options, io, paths = context.options, context.io, context.paths
        self._table = QueueTable(io, paths.queues, write=True)
        view = self._view = WordsView(self._words, self._table, sync_flush=options.sync_flush)
        self._reading = StoreQueries(io, paths, options, view, RESIDENT_BYTES_MAX)
        self._read_pages = PageRelease(self._reading.segments)
        self._questions = ReadRequests(context, self._reading)
        self._times = RequestLatency(self._words)
        self._pulls = PullHandler(context, self._reading, self._table, self._guarded)
        self._held = self._pulls.held
        self._producer = InternalProducer(context.paths.socket("writer"), self._words, self._clock)
        if context.incarnation > 1:
            self._producer.await_predecessor()
        state = self._group_state = ConsumerGroupState(context, self._reading, self._table)
        self._retries = GroupRetries(context, self._reading, state, self._producer, self._answer, self._refuse)
        self._groups = GroupCoordinator(context, state, view.queues, self._table, self._answer)
        self._pops = PopReceivers(
            context, self._reading, self._groups, self._producer, self._table, self._answer, self._refuse
        )
        self._transactions = TransactionCoordinator(
            context, self._reading, state.progress, self._producer, self._answer, self._refuse
        )
        self._group_questions = GroupReads(context, self._reading, self._groups)
        self._server = SocketServer(
            context.sockets["query"],
            client_limits(options),
            operations=QUERY_OPERATIONS,
            on_close=self._drop,
            on_reject=error_counter(self._words, self.name),
            on_partial=lambda: self._words.add(control.QUERY_PARTIAL_FRAMES, 1),
        )
        # The loop drains the bell before the next wait.
        self._server.register(context.bell.fileno(), lambda: None)
        self._server.register(self._producer.fileno(), lambda: None)
        self._dispatcher_bell = context.bells[control.DISPATCHER]
        self._waiting: deque[_Waiting] = deque()
        self._unread: list[_Waiting] = []
        """Requests of clients that do not read their answers."""
        self._looked_ns = self._clock.monotonic_ns()
        self._has_looked = False
        """The wait has looked at the sockets: the step behind it need not."""
        self._jobs: deque[Job[_Waiting]] = deque()
        self._gathering: ReadAdmission[_Waiting] = ReadAdmission.by(options)
        self._stop_by_ns = 0
        self._told = (0, 0)
        self._news = (-1, self._table.changes)

    # The loop's side

    def do_work(self) -> int:
        self._news = self._cells[control.DISPATCHED], self._table.changes
        if self._has_looked:
            self._has_looked = False
        elif len(self._waiting) < WAITING_REQUESTS_MAX:
            self._take(self._server.poll(0))
        end_ns = self._clock.monotonic_ns() + STEP_NS
        # When it was the bell that rang, who waits for a message comes before what nobody waits for.
        done = 0 if self._waiting else self._pulls.look(end_ns)
        self._reading.close_deleted(self._view.deletions())
        if self._waiting or self._unread:
            done += self._serve(end_ns)
            done += self._pulls.look(end_ns)
        done += self._step_jobs(end_ns)
        if self._producer.has_work:
            done += self._producer.step()
        else:
            self._retries.none_is_open()
        now_ns = self._clock.monotonic_ns()
        done += self._groups.step(now_ns, self._waiting[0].after_ns if self._waiting else now_ns)
        done += self._pops.step(self._clock.monotonic_ns())
        done += self._transactions.step(self._clock.monotonic_ns())
        self._tell_waiting()
        waiting = len(self._waiting) + len(self._unread) + len(self._jobs) + len(self._gathering)
        told = (waiting, len(self._server.connections))
        if told != self._told:
            self._told = told
            self._words[control.QUERY_WAITING], self._words[control.QUERY_CONNECTIONS] = told
        if self._reading.walks.queries:
            self._reading.walks.add_to(self._words)
        if done:
            self._read_pages.worked(now_ns)
        return done

    def has_news(self) -> bool:
        """Whether the dispatcher has moved, or the writer made or deleted queues: all else has a time, or a socket."""
        return self._news != (self._cells[control.DISPATCHED], self._table.changes)

    def wait(self, timeout_s: float) -> None:
        now_ns = self._clock.monotonic_ns()
        timeout_s = self._read_pages.seconds_left(now_ns, timeout_s)
        timeout_s = self._producer.seconds_left(self._held.seconds_left(now_ns, timeout_s))
        timeout_s = self._transactions.seconds_left(now_ns, self._pops.seconds_left(now_ns, timeout_s))
        self._take(self._server.poll(self._groups.seconds_left(now_ns, timeout_s)))
        self._has_looked = True

    def reload(self, options: config.Options) -> None:
        """What transactions go by may change while running."""
        self._transactions.reload(options)

    def on_stop(self) -> bool:
        """Answer what is there, let held pulls go with what they have, send what is queued."""
        self._server.stop_accepting()
        self._has_looked = False
        self.do_work()
        self._pulls.let_go()
        self._pops.let_go()
        self._transactions.let_go()
        self._stop_by_ns = self._stop_by_ns or self._clock.monotonic_ns() + STOP_SERVE_NS
        if self._jobs or self._waiting or (self._unread and self._clock.monotonic_ns() < self._stop_by_ns):
            return False
        self._groups.on_stop()
        self._server.drain(STOP_DRAIN_S)
        return True

    def close(self) -> None:
        self._server.close()
        self._producer.close()
        self._group_state.close()
        self._reading.close()
        self._table.close()

    def _tell_waiting(self) -> None:
        """Say how many wait for dispatch. The first one hurries the dispatcher, which lies low while there is none."""
        waiting, before = len(self._held) + self._pops.waiting, self._cells[control.WAITING_PULLS]
        if waiting != before:
            self._cells[control.WAITING_PULLS] = waiting
            if not before:
                self._dispatcher_bell.expedite()

    # Requests

    def _take(self, requests: list[Request]) -> None:
        """Decode what came: the frames' bytes are valid until the next poll only."""
        now_ns = self._clock.monotonic_ns()
        after_ns, self._looked_ns = self._looked_ns, now_ns
        for request in requests:
            try:
                options = within_limits(request.decode())
            except MqprocError as error:
                self._count_reject()
                request.refuse(error)
                continue
            asked = request.connection, request.request_id, request.operation, options
            self._waiting.append(_Waiting(*asked, now_ns, after_ns))

    def _serve(self, end_ns: int) -> int:
        """Requests in order, for a bounded time. One whose client does not read its answers waits."""
        if self._unread:
            self._take_up_unread()
        if not self._waiting:
            return 0
        done = 0
        began_ns = end_ns - STEP_NS
        timing = began_ns >= self._times.next_ns or began_ns - self._waiting[0].taken_ns >= LATE_NS
        for _ in range(len(self._waiting)):
            request = self._waiting.popleft()
            if request.connection.closed:
                continue
            if request.connection.paused:
                self._unread.append(request)
                continue
            self._guarded(request, self._handler_of(request), request)
            done += 1
            now_ns = self._clock.monotonic_ns()
            # One pull of many is timed, and all that could be slow: which waited, or which the step ends with.
            if timing or request.operation != _PULL or now_ns >= end_ns:
                self._time(request, now_ns)
            if request.operation != _PULL and not self._gathering.keeps(request):
                self._words.add(control.QUERY_REQUESTS, 1)
            if now_ns >= end_ns:
                break
        return done

    def _take_up_unread(self) -> None:
        """Have those go first whose clients read again."""
        unread = [asked for asked in self._unread if not asked.connection.closed]
        self._unread = [asked for asked in unread if asked.connection.paused]
        if len(self._unread) < len(unread):
            self._waiting.extendleft(asked for asked in reversed(unread) if not asked.connection.paused)

    def _handler_of(self, request: _Waiting) -> Callable[[_Waiting], None]:
        operation = request.operation
        if operation == Operation.PULL:
            return self._pulls.take
        if operation in POP_OPERATIONS:
            return self._pops.take
        if operation in GROUP_OPERATIONS:
            return self._groups.take
        if operation in TRANSACTION_OPERATIONS:
            return self._transactions.take
        if operation == Operation.GROUP_NACK:
            return lambda asked: self._retries.nack(asked, asked.options)
        if operation == Operation.GROUP_RESEND:
            return lambda asked: self._retries.resend(asked, asked.options)
        return self._ask

    def _drop(self, connection: ServerConnection) -> None:
        """Forget what a client that is gone waited for, and whose member it was."""
        self._held.drop(connection)
        self._gathering.drop(connection)
        self._groups.drop(connection)
        self._transactions.drop(connection)

    def _time(self, request: _Waiting, now_ns: int) -> None:
        """Count how long an answered request took; one that is held waits for others, so it is not counted."""
        if request.answered:
            self._times.answered(request.operation, request.taken_ns, now_ns, self._pulls.held_answers)

    def _guarded(self, request: PendingRequest, handle: Callable[..., None], *arguments: Any) -> None:
        """A request that fails is refused; the role goes on."""
        try:
            handle(*arguments)
        except MqprocError as error:
            self._refuse(request, error)
        except FailedSyncError as error:
            self._refuse(request, StoreReadOnlyError(f"a sync has failed: {error}; run mqproc store repair"))
        except OSError as error:
            if error.errno in UNWRITABLE_ERRNOS:
                self._refuse(request, unwritable_error(error))
                return
            self._context.heartbeat.failed()
            self._log.error("reading failed", error=str(error), operation=request.operation)
            self._refuse(request, self._failed_read(error))
        except Exception as error:
            self._context.heartbeat.failed()
            self._log.exception("unexpected error", operation=request.operation)
            self._refuse(request, InternalError(f"{type(error).__name__}: {error}"))

    def _failed_read(self, error: OSError) -> MqprocError:
        """Nobody is led past units that cannot be read: their messages are in the log."""
        lost = unreadable_file(error, self._context.paths)
        if lost is None:
            return InternalError(f"reading failed: {error.strerror or error}")
        return CorruptStoreError(
            f"{lost}: a part cannot be read; no message is lost by that: when the group is stopped, mqproc store "
            "repair makes the file again from the log"
        )

    def _answer(self, request: PendingRequest, options: FrameOptions, payload: Payload = ()) -> None:
        request.answered = True
        request.connection.answer(request.request_id, request.operation, options, payload, owned=True)

    def _refuse(self, request: PendingRequest, error: MqprocError) -> None:
        request.answered = True
        self._count_reject()
        if request.operation == _PULL:
            self._words.add(control.QUERY_REQUESTS, 1)
        request.connection.refuse(request.request_id, request.operation, error)

    def _count_reject(self) -> None:
        self._words.add(control.QUERY_REJECTS, 1)

    # Long questions

    def _ask(self, request: _Waiting) -> None:
        """The first slice now; most questions have no second one."""
        asks = self._group_questions if request.operation in GROUP_READS else self._questions
        self._go_on_with(Job(request, asks.ask(request.operation, request.options)))

    def _go_on_with(self, job: Job[_Waiting]) -> None:
        ended = True
        try:
            next(job.slices)
            ended = False
        except StopIteration as end:
            options, payload = end.value
            self._answer(job.request, options, payload)
        finally:
            if ended and (following := self._gathering.ended(job)) is not None:
                # It is the next that is served: what came before the one behind it has been.
                following.after_ns = self._waiting[0].after_ns if self._waiting else self._looked_ns
                self._waiting.appendleft(following)
        if not ended and self._gathering.goes_on(job):
            self._jobs.append(job)

    def _step_jobs(self, end_ns: int) -> int:
        """One slice for each job, as far as the time goes."""
        done = 0
        for _ in range(len(self._jobs)):
            if done and self._clock.monotonic_ns() >= end_ns:
                break
            job = self._jobs.popleft()
            done += 1
            if job.request.connection.closed:
                job.slices.close()
            else:
                self._guarded(job.request, self._go_on_with, job)
                self._time(job.request, self._clock.monotonic_ns())
        return done
