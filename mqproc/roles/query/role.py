"""The query role: serves pulls, read requests, consumer groups and transactions.

    socket ──request──▶ queue ──▶ pull, lookups: at once            ──▶ answer
                              ├─▶ long requests: one slice per step ──▶ answer
                              └─▶ pulls that must wait: held        ──bell──▶ retried ──▶ answer

A step works for a bounded time and then polls the sockets again, so that a long request does not delay other clients.
Records are sent from the buffers in which they were gathered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from mqproc.config import options as config
from mqproc.errors import CorruptStoreError, InternalError, MqprocError, StoreReadOnlyError
from mqproc.io.store_io import FailedSyncError
from mqproc.ipc.control_words import Words
from mqproc.ipc.counters import Histogram, error_counter
from mqproc.layout import control, histograms
from mqproc.roles.groups.coordinator import GROUP_OPERATIONS, LONG_GROUP_OPERATIONS, GroupCoordinator
from mqproc.roles.groups.retries import GroupRetries
from mqproc.roles.groups.state import ConsumerGroupState
from mqproc.roles.internal_producer import InternalProducer
from mqproc.roles.pop.receivers import POP_OPERATIONS, PopReceivers
from mqproc.roles.query.long_poll import HeldPull, PullHandler
from mqproc.roles.query.reads import READS, Job, ReadAdmission, ReadRequests
from mqproc.roles.request_limits import Payload, PendingRequest, Reply, answer_payload, client_limits, within_limits
from mqproc.roles.role import SAMPLE_NS, SLOW_STEP_NS, Role, RoleContext
from mqproc.roles.transactions.coordinator import LONG_TRANSACTION_OPERATIONS, TransactionCoordinator
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.cooperative import Slices
from mqproc.store.damage import unreadable_file
from mqproc.store.offsets.offset_store import UNWRITABLE_ERRNOS, unwritable_error
from mqproc.store.read.queries import StoreQueries
from mqproc.store.read.views import WordsView
from mqproc.store.schedule.waiting_retries import WaitingRetries
from mqproc.wire.connection import Request, ServerConnection
from mqproc.wire.operations import FrameOptions, Operation
from mqproc.wire.server import SocketServer

LATE_NS: Final = SLOW_STEP_NS // 2
"""A request that has waited this long at the begin of a step may be slow by its end."""


_KEYS = frozenset(map(int, (Operation.GET, Operation.BY_KEY, Operation.BY_TAG, Operation.QUERY_MESSAGE)))
RESIDENT_BYTES_MAX: Final = 64 << 20
"""Log pages kept resident: pulls of a topic's other queues find the pages that the last one has read."""
RELEASE_NS: Final = 1_000_000_000
"""Idle time after which the pages are released, to keep the memory of an idle group small."""
STEP_NS = 5_000_000
"""Time after which a step starts no further request or slice."""
WAITING_REQUESTS_MAX = 4096
"""Number of waiting requests at which the sockets are no longer read."""
# Time for paused clients to read their answers while the role stops.
STOP_SERVE_NS = 1_000_000_000
STOP_DRAIN_S = 1.0
QUERY_OPERATIONS = frozenset(
    {
        Operation.PULL,
        Operation.GROUP_NACK,
        Operation.GROUP_RESEND,
        Operation.GROUP_RECEIVE,
        *READS,
        *GROUP_OPERATIONS,
        *LONG_GROUP_OPERATIONS,
        *POP_OPERATIONS,
        Operation.TRANSACTION_POLL,
        *LONG_TRANSACTION_OPERATIONS,
    }
)
"""All operations of the role."""
_PULL = int(Operation.PULL)


class RequestLatency:
    """Histograms of request latency: pulls by samples, key lookups and others each.

    A sampled pull counts for all pulls since the last sample; from `next_ns` on the next one is sampled. Held pulls are
    not counted, since they wait for their messages.
    """

    __slots__ = ("_counted", "_keys", "_others", "_pulls", "_words", "next_ns")

    def __init__(self, words: Words) -> None:
        self._words = words
        self._pulls = Histogram(words, histograms.PULL_REQUESTS)
        self._keys = Histogram(words, histograms.KEY_REQUESTS)
        self._others = Histogram(words, histograms.OTHER_REQUESTS)
        self._counted = words[control.PULLS]
        self.next_ns = 0

    def answered(self, operation: int, taken_ns: int, now_ns: int, held_pulls: int) -> None:
        """Record an answered request; `held_pulls` is the number of held pulls answered so far."""
        took_ns = now_ns - taken_ns
        if operation == _PULL:
            self._count_pull(took_ns, now_ns, held_pulls)
        elif operation in _KEYS:
            self._keys.observe(took_ns)
        else:
            self._others.observe(took_ns)

    def _count_pull(self, took_ns: int, now_ns: int, held_pulls: int) -> None:
        """Record a pull; a slow one counts for itself alone."""
        pulls = self._words[control.PULLS] - held_pulls - self._counted
        if took_ns >= SLOW_STEP_NS:
            pulls = min(pulls, 1)
        else:
            self.next_ns = now_ns + SAMPLE_NS
        self._pulls.observe(took_ns, pulls)
        self._counted += pulls


@dataclass(slots=True)
class PageRelease:
    """Releases the log pages of `segments` when the role is idle."""

    segments: LogSegments
    _release_ns: int = 0

    def worked(self, now_ns: int) -> None:
        """Note work that may have read pages."""
        self._release_ns = now_ns + RELEASE_NS

    def seconds_left(self, now_ns: int, at_most_s: float) -> float:
        """Release pages when due, before a wait; returns the time that the role may wait."""
        if not self.segments.resident_bytes:
            return at_most_s
        if now_ns < self._release_ns:
            return min(at_most_s, (self._release_ns - now_ns) / 1e9)
        self.segments.drop_all_pages()
        return at_most_s


@dataclass(slots=True)
class _Waiting:
    """A request with decoded options, independent of its frame's buffer."""

    query: Query
    connection: ServerConnection
    request_id: int
    operation: int
    options: Any
    taken_ns: int = 0
    """Time at which the request was read from the socket."""
    after_ns: int = 0
    """Time of the previous poll: all requests that arrived by then are served before it."""
    answered: bool = False

    def answer(self, options: FrameOptions, payload: Payload = ()) -> None:
        self.answered = True
        payload = answer_payload(self.options, payload)
        self.connection.answer(self.request_id, self.operation, options, payload, owned=True)

    def refuse(self, error: MqprocError) -> None:
        self.query.refuse(self, error)


class Query(Role):
    """The query role. Its memory holds nothing that a successor needs."""

    name = control.QUERY

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._clock = context.clock
        self._words = context.control.words
        self._cells = self._words.cells
        options, io, paths = context.options, context.io, context.paths
        self._table = QueueTable(io, paths.queues, write=True)
        view = self._view = WordsView(self._words, self._table, sync_flush=options.sync_flush)
        self._reading = StoreQueries(io, paths, options, view, RESIDENT_BYTES_MAX)
        self._read_pages = PageRelease(self._reading.segments)
        self._times = RequestLatency(self._words)
        self._pulls = PullHandler(context, self._reading, self._table, self._guard)
        self._long_polls = self._pulls.held
        self._producer = InternalProducer(context.paths.socket("writer"), self._words, self._clock)
        if context.incarnation > 1:
            self._producer.await_predecessor()
        state = self._group_state = ConsumerGroupState(context, self._reading, self._table)
        self._retries = GroupRetries(context, self._reading, state, self._producer)
        self._groups = GroupCoordinator(context, state, self._table)
        self._pops = PopReceivers(
            context, self._reading, self._groups, self._producer, self._table, self._refuse_failed
        )
        self._transactions = TransactionCoordinator(
            context, self._reading, state.progress, self._producer, self._refuse_failed
        )
        self._reads = ReadRequests(context, self._reading, self._groups, WaitingRetries(self._words))
        self._server = SocketServer(
            context.sockets["query"],
            client_limits(options),
            operations=QUERY_OPERATIONS,
            on_close=self._drop,
            on_reject=error_counter(self._words, self.name),
            on_partial=lambda: self._words.add(control.QUERY_PARTIAL_FRAMES, 1),
            on_error=context.heartbeat.log_connection_error,
        )
        # The loop drains the bell before the next wait.
        self._server.register(context.bell.fileno(), lambda: None)
        self._server.register(self._producer.fileno(), lambda: None)
        self._dispatcher_bell = context.bells[control.DISPATCHER]
        self._waiting: deque[_Waiting] = deque()
        self._paused: list[_Waiting] = []
        """Requests of clients that do not read their answers."""
        self._polled_ns = self._clock.monotonic_ns()
        self._has_polled = False
        """Whether the wait has polled the sockets, so that the next step need not."""
        self._jobs: deque[Job[_Waiting]] = deque()
        self._admission: ReadAdmission[_Waiting] = ReadAdmission.by(options)
        self._stop_by_ns = 0
        self._published = (0, 0)
        self._news = (-1, self._table.changes)

    # Called by the loop

    def do_work(self) -> int:
        self._news = self._cells[control.DISPATCHED], self._table.changes
        if self._has_polled:
            self._has_polled = False
        elif len(self._waiting) < WAITING_REQUESTS_MAX:
            self._enqueue(self._server.poll(0))
        end_ns = self._clock.monotonic_ns() + STEP_NS
        # After a bell held pulls come first.
        done = 0 if self._waiting else self._pulls.retry_held(end_ns)
        self._reading.close_deleted(self._view.deletions())
        if self._waiting or self._paused:
            done += self._serve(end_ns)
            done += self._pulls.retry_held(end_ns)
        done += self._step_jobs(end_ns)
        if self._producer.has_work:
            done += self._producer.step()
        else:
            self._retries.mark_all_answered()
        now_ns = self._clock.monotonic_ns()
        done += self._groups.step(now_ns, self._waiting[0].after_ns if self._waiting else now_ns)
        done += self._pops.step(self._clock.monotonic_ns())
        done += self._transactions.step(self._clock.monotonic_ns())
        self._publish_waiting()
        waiting = len(self._waiting) + len(self._paused) + len(self._jobs) + len(self._admission)
        counts = (waiting, len(self._server.connections))
        if counts != self._published:
            self._published = counts
            self._words[control.QUERY_WAITING], self._words[control.QUERY_CONNECTIONS] = counts
        if not self._waiting and not self._jobs:
            # After all other work, since no client waits for it yet.
            done += self._pulls.prepare()
        if self._reading.walks.queries:
            self._reading.walks.add_to(self._words)
        if done:
            self._read_pages.worked(now_ns)
        return done

    def has_news(self) -> bool:
        """Whether messages were dispatched or queues changed; other work ends the wait itself."""
        return self._news != (self._cells[control.DISPATCHED], self._table.changes)

    def wait(self, timeout_s: float) -> None:
        now_ns = self._clock.monotonic_ns()
        timeout_s = self._read_pages.seconds_left(now_ns, timeout_s)
        timeout_s = self._producer.seconds_left(self._long_polls.seconds_left(now_ns, timeout_s))
        timeout_s = self._transactions.seconds_left(now_ns, self._pops.seconds_left(now_ns, timeout_s))
        self._enqueue(self._server.poll(self._groups.seconds_left(now_ns, timeout_s)))
        self._has_polled = True

    def reload(self, options: config.Options) -> None:
        """Apply options of transactions."""
        self._transactions.reload(options)

    def on_stop(self) -> bool:
        """Serve waiting requests, answer held requests with their last result, send queued answers."""
        self._server.stop_accepting()
        self._has_polled = False
        self.do_work()
        self._pulls.on_stop()
        self._pops.on_stop()
        self._transactions.on_stop()
        self._stop_by_ns = self._stop_by_ns or self._clock.monotonic_ns() + STOP_SERVE_NS
        if self._jobs or self._waiting or (self._paused and self._clock.monotonic_ns() < self._stop_by_ns):
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

    def _publish_waiting(self) -> None:
        """Publish the number of held requests. The first one ends the pause of the dispatcher."""
        waiting, before = len(self._long_polls) + self._pops.waiting, self._cells[control.WAITING_PULLS]
        if waiting != before:
            self._cells[control.WAITING_PULLS] = waiting
            if not before:
                self._dispatcher_bell.expedite()

    # Requests

    def _enqueue(self, requests: list[Request]) -> None:
        """Decode new requests, since the bytes of their frames are valid until the next poll only."""
        now_ns = self._clock.monotonic_ns()
        after_ns, self._polled_ns = self._polled_ns, now_ns
        for request in requests:
            try:
                options = within_limits(request.decode())
            except MqprocError as error:
                self._count_reject()
                request.refuse(error)
                continue
            except Exception as error:
                self._server.fail(request.connection, error)
                continue
            fields = request.connection, request.request_id, request.operation, options
            self._waiting.append(_Waiting(self, *fields, now_ns, after_ns))

    def _serve(self, end_ns: int) -> int:
        """Serve requests in order until `end_ns`. Requests of a paused client wait."""
        if self._paused:
            self._resume_paused()
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
                self._paused.append(request)
                continue
            self._guard(request, self._handler_of(request), request)
            done += 1
            now_ns = self._clock.monotonic_ns()
            # Pulls are sampled; pulls that may be slow are always timed: after a wait, or last in the step.
            if timing or request.operation != _PULL or now_ns >= end_ns:
                self._record_latency(request, now_ns)
            if request.operation != _PULL and not self._admission.is_waiting(request):
                self._words.add(control.QUERY_REQUESTS, 1)
            if now_ns >= end_ns:
                break
        return done

    def _resume_paused(self) -> None:
        """Serve requests first whose clients read again."""
        connected = [request for request in self._paused if not request.connection.closed]
        self._paused = [request for request in connected if request.connection.paused]
        if len(self._paused) < len(connected):
            self._waiting.extendleft(request for request in reversed(connected) if not request.connection.paused)

    def _handler_of(self, request: _Waiting) -> Callable[[_Waiting], None]:
        operation = request.operation
        if operation == Operation.PULL:
            return self._pulls.handle
        if operation in POP_OPERATIONS:
            return self._pops.handle
        if operation in GROUP_OPERATIONS:
            return self._groups.handle
        if operation == Operation.TRANSACTION_POLL:
            return self._transactions.poll
        return self._start_job

    def _slices_of(self, request: _Waiting) -> Slices[Reply | None]:
        """Slices of a long request; they end in the reply, or answer or hold the request themselves."""
        operation = request.operation
        if operation in LONG_GROUP_OPERATIONS:
            return self._groups.start(request)
        if operation == Operation.GROUP_RECEIVE:
            return self._pops.receive(request)
        if operation in LONG_TRANSACTION_OPERATIONS:
            return self._transactions.start(request)
        if operation == Operation.GROUP_NACK:
            return self._retries.nack(request)
        if operation == Operation.GROUP_RESEND:
            return self._retries.resend(request)
        return self._reads.start(operation, request.options)

    def _drop(self, connection: ServerConnection) -> None:
        """Drop the held requests and the membership of a closed connection."""
        self._pulls.drop(connection)
        self._admission.drop(connection)
        self._groups.drop(connection)
        self._transactions.drop(connection)

    def _record_latency(self, request: _Waiting, now_ns: int) -> None:
        """Record the latency of an answered request; held requests are not recorded."""
        if request.answered:
            self._times.answered(request.operation, request.taken_ns, now_ns, self._pulls.held_answers)

    def _guard(self, request: PendingRequest | HeldPull, handle: Callable[..., None], *arguments: Any) -> None:
        """Call a handler and refuse the request if it raises."""
        try:
            handle(*arguments)
        except Exception as error:
            self._refuse_failed(request, error)

    def _refuse_failed(self, request: PendingRequest | HeldPull, error: Exception) -> None:
        """Refuse a request whose handler raised an error, from the except block."""
        self.refuse(request, self._refusal_of(error, request.operation))

    def _refusal_of(self, error: Exception, operation: int) -> MqprocError:
        if isinstance(error, MqprocError):
            return error
        if isinstance(error, FailedSyncError):
            return StoreReadOnlyError(f"a sync has failed: {error}; run mqproc store repair")
        if isinstance(error, OSError):
            if error.errno in UNWRITABLE_ERRNOS:
                return unwritable_error(error)
            self._context.heartbeat.log_error("reading failed", error=str(error), operation=operation)
            return self._failed_read(error)
        self._context.heartbeat.log_exception("unexpected error", operation=operation)
        return InternalError(f"{type(error).__name__}: {error}")

    def _failed_read(self, error: OSError) -> MqprocError:
        """Error of a failed read. An unreadable queue or index file is rebuilt by a repair."""
        lost = unreadable_file(error, self._context.paths)
        if lost is None:
            return InternalError(f"reading failed: {error.strerror or error}")
        return CorruptStoreError(
            f"{lost}: a part cannot be read; no message is lost: stop the group and run mqproc store repair, which "
            "rebuilds the file from the log"
        )

    def refuse(self, request: PendingRequest | HeldPull, error: MqprocError) -> None:
        """Send the error that refuses a request, and count it."""
        request.answered = True
        self._count_reject()
        if request.operation == _PULL:
            self._words.add(control.QUERY_REQUESTS, 1)
        request.connection.refuse(request.request_id, request.operation, error)

    def _count_reject(self) -> None:
        self._words.add(control.QUERY_REJECTS, 1)

    # Long requests

    def _start_job(self, request: _Waiting) -> None:
        """Run the first slice; most requests need no second one."""
        self._continue_job(Job(request, self._slices_of(request)))

    def _continue_job(self, job: Job[_Waiting]) -> None:
        finish = True
        try:
            next(job.slices)
            finish = False
        except StopIteration as end:
            if end.value is not None:
                job.request.answer(*end.value)
        finally:
            if finish and (next_request := self._admission.finish(job)) is not None:
                # Served next: every request that arrived before its successor has been served.
                next_request.after_ns = self._waiting[0].after_ns if self._waiting else self._polled_ns
                self._waiting.appendleft(next_request)
        if not finish and self._admission.admit(job):
            self._jobs.append(job)

    def _step_jobs(self, end_ns: int) -> int:
        """Run one slice of each job until `end_ns`."""
        done = 0
        for _ in range(len(self._jobs)):
            if done and self._clock.monotonic_ns() >= end_ns:
                break
            job = self._jobs.popleft()
            done += 1
            if job.request.connection.closed:
                job.slices.close()
            else:
                self._guard(job.request, self._continue_job, job)
                self._record_latency(job.request, self._clock.monotonic_ns())
        return done
