"""The writer role: the only process that appends to the CommitLog.

A step takes all available frames, encodes them, writes, publishes and answers. Frames of one step share the write and,
under SYNC_FLUSH, the sync: this is group commit.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from mqproc.config.options import Options
from mqproc.errors import (
    BadRequestError,
    FlushFailedError,
    InternalError,
    MqprocError,
    PermissionDeniedError,
    TooManyQueuesError,
    TopicExistsError,
    TopicNotFoundError,
    UnknownCommandError,
)
from mqproc.io.store_io import FailedSyncError
from mqproc.ipc.control_words import Words
from mqproc.ipc.counters import Histogram, error_counter
from mqproc.kernels.append_frame import UNPUBLISHED_FRAMES
from mqproc.kernels.append_run import ANSWERS_FULL, COMMIT, DONE, NOT_KNOWN
from mqproc.layout import control, histograms
from mqproc.roles.request_limits import client_limits
from mqproc.roles.role import Role, RoleContext
from mqproc.roles.writer.admission import AppendAdmission, SegmentWait
from mqproc.roles.writer.append_plan import AppendPlanner, ColumnWriter
from mqproc.roles.writer.topics import WriterTopics
from mqproc.store.commitlog.append import CommitLogAppender, append_error
from mqproc.store.commitlog.append_templates import COMMIT_BYTES, AppendTemplates
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.commitlog.takeover import take_over
from mqproc.store.compat import note_time_order
from mqproc.store.consumequeue.table import NoRoomForQueuesError, QueueTable
from mqproc.store.dedupe import DedupeWindow
from mqproc.store.sync_guard import SyncGuard
from mqproc.store.topics import check_changeable
from mqproc.wire.connection import FrameBatch, FrameBatcher, Request, ServerConnection
from mqproc.wire.operations import (
    WRITER_OPERATIONS,
    AppendAnswer,
    AppendRequest,
    CreateTopicRequest,
    DeleteTopicRequest,
    Empty,
    Operation,
)
from mqproc.wire.server import SocketServer

# Answers to appends, held back until publication and sent together per client.
#
# Answers to frames that were handled one by one are kept here as columns. Answers to a run of frames are written by the
# kernel as consecutive whole frames and are sent from its buffer.


_encode = msgspec.msgpack.Encoder().encode
# A placeholder as long as any timestamp: the kernel writes the store time of each answer in its place.
_ANY_TIME_MS: Final = 0x0123456789ABCDEF


class _Frame(msgspec.Struct, eq=False):
    """An encoded frame; `answer` is uint8[20 × messages]."""

    request: Request
    answer: NDArray[np.uint8]
    store_timestamp_ms: int
    wait: bool
    oneway: bool


class _Run(msgspec.Struct, eq=False):
    """Encoded frames whose answers lie in [at, end) of the kernel's buffer."""

    connection: ServerConnection
    at: int
    end: int
    wait: bool = True


class AppendAnswers:
    """Pending answers. `on_refusal` is called for each encoded frame that is refused."""

    def __init__(
        self, server: SocketServer, known: AppendTemplates, store_host: bytes, on_refusal: Callable[[], None]
    ) -> None:
        self._server = server
        self._templates = known
        self._store_host = store_host
        self._on_refusal = on_refusal
        self._encoded = b""
        self._encoded_of_ms = -1
        options = self._options(_ANY_TIME_MS)
        known.set_answer_options(options, options.index(_ANY_TIME_MS.to_bytes(8, "big")))
        self._pending: list[_Frame | _Run] = []
        self._sendable: list[_Run] = []

    def __len__(self) -> int:
        """Number of frames, or runs of them, whose messages are not published."""
        return len(self._pending)

    def _options(self, store_timestamp_ms: int) -> bytes:
        """Encoded options of an answer."""
        if store_timestamp_ms != self._encoded_of_ms:
            self._encoded_of_ms = store_timestamp_ms
            self._encoded = _encode(AppendAnswer(store_timestamp_ms, self._store_host))
        return self._encoded

    def add(
        self, request: Request, answer: NDArray[np.uint8], store_timestamp_ms: int, *, wait: bool, oneway: bool
    ) -> None:
        """Add an encoded frame; without `wait` it is answered before the sync."""
        self._pending.append(_Frame(request, answer, store_timestamp_ms, wait, oneway))

    def add_run(self, run: FrameBatch, at: int) -> None:
        """Add encoded frames of a run, whose answers begin at `at`."""
        end = self._templates.answers_end
        if end > at:
            self._pending.append(_Run(run.connection, at, end))

    def answer_without_sync(self) -> None:
        """Answer frames that do not wait for the next sync."""
        pending = self._pending
        self._pending = [one for one in pending if not one.wait]
        if self._pending:
            self.answer_published()
            self._server.send_answers(hold=True)
        self._pending = [one for one in pending if one.wait]

    def answer_published(self) -> None:
        """Answer every pending frame, now published; kernel answers leave with `send`."""
        for one in self._pending:
            if isinstance(one, _Run):
                self._sendable.append(one)
            elif not one.oneway:
                one.request.answer(self._options(one.store_timestamp_ms), (one.answer.data,), owned=True)
        self._pending = []

    def send(self) -> None:
        """Send the kernel's answers; consecutive answers to a client in one piece."""
        sendable = self._sendable
        if sendable:
            self._sendable = []
            first = sendable[0]
            connection, at, end = first.connection, first.at, first.end
            for run in sendable[1:]:
                if run.connection is not connection or run.at != end:
                    self._send(connection, at, end)
                    connection, at = run.connection, run.at
                end = run.end
            self._send(connection, at, end)
        if not self._pending:
            self._templates.clear_answers()

    def send_single(self, connection: ServerConnection) -> None:
        """Send the kernel's answers to the only run of a step, now published."""
        end = self._templates.answers_end
        if end:
            self._server.send_one(connection, self._templates.views[:end])
            self._templates.clear_answers()

    def _send(self, connection: ServerConnection, at: int, end: int) -> None:
        if not connection.closed:
            self._server.send(connection, (self._templates.views[at:end],), owned=False)

    def refuse(self, error: MqprocError) -> None:
        """Refuse every pending frame: it was not published and never will be."""
        for one in self._pending:
            if isinstance(one, _Run):
                for operation, request_id in self._templates.answers_between(one.at, one.end):
                    self._on_refusal()
                    one.connection.refuse(request_id, operation, error)
            elif not one.oneway:
                self._on_refusal()
                one.request.refuse(error)
        self._pending = []


# The keeper reads new timed messages every second; it is rung for one that is due before that.
NEAR_MS = 2000
NEVER_BYTES = 1 << 62
# Interval of checks that the log's current segment has not been deleted, moved or replaced.
SEGMENT_CHECK_NS = 5_000_000
# Answers of a step are sent together up to this many log bytes: each send wakes a client, which takes the processor.
ANSWER_BYTES = 1 << 20
# A clock that steps back by up to this much holds the store time still; a larger step is followed, with an error.
CLOCK_CLAMP_MAX_MS = 60_000
# Limits of a stopping writer: how long it refuses further requests, and how long it then sends queued answers.
STOP_REFUSE_NS = 1_000_000_000
STOP_DRAIN_S = 3.0
AUTO_CREATED_SAVE_NS = 1_000_000_000
# Plain numbers, since they are compared for each frame and an enum member lookup costs as much as a call.
_APPEND_OWN = int(Operation.APPEND_OWN)
_APPEND_MESSAGES = int(Operation.APPEND_MESSAGES)
_APPENDS = (int(Operation.APPEND), _APPEND_OWN, _APPEND_MESSAGES)
# Errors of a single frame: nothing was changed, other frames of the step are unaffected.
_REFUSED_ALONE = (
    BadRequestError,
    NoRoomForQueuesError,
    PermissionDeniedError,
    TooManyQueuesError,
    TopicExistsError,
    TopicNotFoundError,
)


class AppendLatency:
    """Histogram of append latency, fed by the steps that the loop times.

    Each frame counts with the duration of its own step or of the next timed one. Frames of a slow step count with its
    duration alone; when that step wrote several times, those before its last write count with the others.
    """

    def __init__(self, words: Words) -> None:
        self._words = words
        self._times = Histogram(words, histograms.APPENDS)
        self._counted = words[control.APPENDED_FRAMES]

    def timed(self, began_ns: int, ended_ns: int, *, alone: bool) -> None:
        """Record a step for all frames since the last one, or `alone` for its own."""
        if self._words[control.WRITTEN_NS] < began_ns:
            return
        frames = self._words[control.APPENDED_FRAMES] - self._counted
        if alone:
            frames = min(frames, self._words[UNPUBLISHED_FRAMES])
        self._times.observe(ended_ns - began_ns, frames)
        self._counted += frames


@dataclass(frozen=True, slots=True)
class WriterParts:
    """Collaborators of the writer, composed by `compose`."""

    table: QueueTable
    segments: LogSegments
    topics: WriterTopics
    planner: AppendPlanner
    appender: CommitLogAppender
    dedupe: DedupeWindow | None
    server: SocketServer
    answers: AppendAnswers


def compose(context: RoleContext) -> WriterParts:
    """Build the writer's collaborators, after taking over from a killed predecessor."""
    io, paths, options, words = context.io, context.paths, context.options, context.control.words
    table = QueueTable(io, paths.queues, write=True)
    segments = LogSegments(io, paths.commit_log, options.mapped_file_size_commit_log)
    syncs = SyncGuard(io, paths, words, control.WRITER, control.WRITER_SYNC_ERRNO)
    if context.incarnation > 1:
        with context.heartbeat.busy(control.STATE_RECOVERING):
            take_over(io, syncs, words, segments, table, sync_flush=options.sync_flush)
        # An open mapping would keep the space of a segment that retention deletes later.
        segments.close()
    topics = WriterTopics(io, syncs, paths, options, table, context.heartbeat.log_error)
    topics.save(context.clock.time_ms())
    appender = CommitLogAppender(
        syncs,
        options,
        words,
        table,
        segments,
        store_host(options),
        SegmentWait(context, syncs).wait_for,
        AppendTemplates(table.capacity, topics.rounds, _commit_bytes(context)),
    )
    dedupe = None
    if options.dedupe_window_messages:
        with context.heartbeat.busy(control.STATE_RECOVERING):
            dedupe = DedupeWindow(words, table, segments, appender, options.dedupe_window_messages)
    server = _server(context, by_frame=dedupe is not None)
    answers = AppendAnswers(
        server, appender.templates, appender.store_host, lambda: words.add(control.APPEND_REJECTS, 1)
    )
    return WriterParts(table, segments, topics, AppendPlanner(topics), appender, dedupe, server, answers)


def _server(context: RoleContext, *, by_frame: bool) -> SocketServer:
    """The socket server; `by_frame` disables runs of frames, as for deduplication."""
    words, limits = context.control.words, client_limits(context.options)
    server = SocketServer(
        context.sockets["writer"],
        limits,
        operations=WRITER_OPERATIONS,
        on_reject=error_counter(words, control.WRITER),
        on_partial=lambda: words.add(control.WRITER_PARTIAL_FRAMES, 1),
        on_error=context.heartbeat.log_connection_error,
        batches=None if by_frame else FrameBatcher(Operation.APPEND, limits.frame_bytes),
    )
    # The loop drains the bell before the next wait.
    server.register(context.bell.fileno(), lambda: None)
    return server


def _commit_bytes(context: RoleContext) -> int:
    """Staged bytes after which a step commits; under SYNC_FLUSH a step has one sync."""
    return NEVER_BYTES if context.sync_flush else COMMIT_BYTES


class Writer(Role):
    """The writer role."""

    name = control.WRITER

    def __init__(self, context: RoleContext) -> None:
        parts = compose(context)
        self._context = context
        self._options = context.options
        self._sync_flush = context.sync_flush
        self._rings_early = context.options.max_spin_us > 0 and not context.sync_flush
        self._io = context.io
        self._clock = context.clock
        self._words = context.control.words
        self._cells = self._words.cells
        self._log_error = context.heartbeat.log_error
        self._table = parts.table
        self._segments = parts.segments
        self._topics = parts.topics
        self._topics_due_ns = 0
        self._planner = parts.planner
        self._columns = ColumnWriter()
        self._appender = parts.appender
        self._templates = parts.appender.templates
        self._template_changes = parts.topics.changes
        self._dedupe = parts.dedupe
        self._commit_bytes = _commit_bytes(context)
        self._admission = AppendAdmission(context)
        self._times = AppendLatency(self._words)
        self._connections = 0
        self._sync_times = Histogram(self._words, histograms.WRITER_SYNCS)
        self._sync_took_ns = -1  # Duration of the last sync until it is recorded.
        self._answered_to = self._appender.end
        self._requests: list[Request | FrameBatch] = []
        self._topic_requests: list[Request] = []
        self._server = parts.server
        self._answers = parts.answers
        self._dispatcher_bell = context.bells[control.DISPATCHER]
        self._keeper_bell = context.bells[control.KEEPER]
        self._query_bell = context.bells[control.QUERY]
        self._stop_by_ns = 0
        self._segment_check_ns = 0
        self._to_ring = False
        self._to_ring_keeper = False
        self._closed_by: MqprocError | None = None

    # Called by the loop

    def do_work(self) -> int:
        requests = self._requests or self._server.poll_batches(0)
        self._requests = []
        if not requests:
            self._report_connections()
            return self._save_topics_when_due()
        if (now_ns := self._clock.monotonic_ns()) >= self._segment_check_ns:
            self._segment_check_ns = now_ns + SEGMENT_CHECK_NS
            if (lost := self._appender.lost_segment()) is not None:
                self._admission.close_for(lost)
        messages = self._cells[control.APPENDED_MESSAGES]
        if len(requests) == 1 and self._append_single(requests[0]):
            self._after_appends()
            return self._cells[control.APPENDED_MESSAGES] - messages or 1
        self._closed_by = self._admission.check()
        self._server.hold_answers()
        for request in requests:
            try:
                if isinstance(request, FrameBatch):
                    self._append_run(request)
                else:
                    self._handle(request)
            except Exception as error:
                self._undo(request.connection, error)
        self._commit()
        self._answer_topic_requests()
        self._answers.send()
        self._server.send_answers()
        self._after_appends()
        return max(len(requests), self._cells[control.APPENDED_MESSAGES] - messages)

    def _after_appends(self) -> None:
        """Do the work that no client waits for."""
        self._count_sync()
        self._report_connections()
        self._save_topics_when_due()
        if self._to_ring:
            # Once a step rather than once a frame.
            self._to_ring = False
            self._dispatcher_bell.ring()
            if self._to_ring_keeper:
                self._to_ring_keeper = False
                self._keeper_bell.ring()

    def _report_connections(self) -> None:
        if len(self._server.connections) != self._connections:
            self._connections = self._cells[control.WRITER_CONNECTIONS] = len(self._server.connections)

    def timed(self, began_ns: int, ended_ns: int, *, alone: bool) -> None:
        self._times.timed(began_ns, ended_ns, alone=alone)

    def has_news(self) -> bool:
        """All work arrives by sockets, which end a wait."""
        return False

    def wait(self, timeout_s: float) -> None:
        self._requests = self._server.poll_batches(timeout_s)
        if self._cells[control.WAITING_PULLS] and self._requests and self._rings_early:
            # A consumer waits: wake the dispatcher while the messages are being stored, so that it polls for them.
            self._dispatcher_bell.ring()

    def on_stop(self) -> bool:
        """Handle arrived requests, refuse later requests, save the topics, send queued answers.

        Every request is answered, since a client without an answer does not know the outcome.
        """
        if self._admission.taking:
            self._server.stop_accepting()
            self.do_work()
            self._admission.taking = False
            self._stop_by_ns = self._clock.monotonic_ns() + STOP_REFUSE_NS
        if self.do_work() and self._clock.monotonic_ns() < self._stop_by_ns:
            return False
        self._topics.save(self._clock.time_ms())
        self._server.drain(STOP_DRAIN_S)
        self._server.hang_up()
        while self.do_work():
            pass  # Refuse the rest of the sockets; the peers cannot send any more.
        return True

    def reload(self, options: Options) -> None:
        """Apply `max_message_size`."""
        self._options = self._admission.options = options
        self._appender.set_options(options)

    def close(self) -> None:
        self._server.close()
        self._appender.close()
        self._segments.close()
        self._table.close()

    # Requests

    def _handle(self, request: Request, store_timestamp_ms: int | None = None) -> None:
        operation = request.operation
        try:
            if operation in _APPENDS:
                self._append(request, store_timestamp_ms)
            elif operation == Operation.CREATE_TOPIC:
                self._create_topic(request, cast(CreateTopicRequest, request.decode()))
            elif operation == Operation.DELETE_TOPIC:
                self._delete_topic(request, cast(DeleteTopicRequest, request.decode()))
            elif operation == Operation.PING:
                request.answer(Empty())
            else:
                raise UnknownCommandError(f"operation {operation} is not one of the writer's")
        except _REFUSED_ALONE as error:
            self._refuse(request, error)
        except (MqprocError, OSError) as error:
            self._refuse(request, self._fail(error))

    def _append_single(self, run: Request | FrameBatch) -> bool:
        """Append a single frame with a known template; False when that does not apply."""
        if (
            type(run) is not FrameBatch
            or run.frames != 1
            or not self._admission.taking
            or self._template_changes != self._topics.changes
        ):
            return False
        try:
            if not self._appender.add_single(run.buffer, run.at, self._clock.time_ms()):
                return False
            # Immediately: the dispatcher uses it as the time of the newest publication.
            self._cells[control.WRITTEN_NS] = self._clock.monotonic_ns()
            failure = self._sync() if self._sync_flush else None
        except (MqprocError, OSError) as error:
            failure = self._fail(error)
        if failure is not None:
            self._answers.add_run(run, 0)
            self._answers.refuse(failure)
            self._answers.send()
            return True
        self._io.crash_point("ack.before_send")
        self._answers.send_single(run.connection)
        self._to_ring = True
        return True

    def _append_run(self, run: FrameBatch) -> None:
        """Append a client's frames: runs with known templates in the kernel, others singly."""
        known = self._templates
        known.begin(run.at, run.end)
        reason = COMMIT
        while reason != DONE:
            reason = self._append_by_template(run) if self._closed_by is None else NOT_KNOWN
            if reason == COMMIT:
                self._commit()
            elif reason == ANSWERS_FULL:
                self._commit()
                self._answers.send()
            elif reason == NOT_KNOWN:
                request, end = run.request_at(known.at)
                self._handle(request, known.stored_at_ms)
                if end == run.end:
                    return
                known.skip_to(end)

    def _append_by_template(self, run: FrameBatch) -> int:
        """Append frames of a run while their templates are known; returns why it stopped."""
        known = self._templates
        if self._template_changes != self._topics.changes:
            self._template_changes = self._topics.changes
            known.clear()
        store_timestamp_ms = self._store_timestamp()
        known.set_store_time(store_timestamp_ms)
        at = known.answers_end
        try:
            reason = self._appender.add_run(run.buffer, store_timestamp_ms)
        except (MqprocError, OSError) as error:
            self._answers.add_run(run, at)
            request, end = run.request_at(known.at)
            self._refuse(request, self._fail(error))
            known.skip_to(end)
            return DONE if end == run.end else COMMIT
        self._answers.add_run(run, at)
        return reason

    def _append(self, request: Request, store_timestamp_ms: int | None) -> None:
        """Append one frame, with the store time of its run if it is part of one."""
        options, payload = cast(AppendRequest, request.decode()), request.payload
        if self._closed_by is not None:
            raise self._closed_by
        has_columns = request.operation != _APPEND_MESSAGES
        if not has_columns:
            options, payload = self._columns.of(options, payload)
        if store_timestamp_ms is None:
            store_timestamp_ms = self._store_timestamp()
        own = request.operation == _APPEND_OWN
        if 0 < options.deliver_at_ms <= store_timestamp_ms + NEAR_MS:
            self._to_ring_keeper = True
        try:
            plan, topic = self._planner.plan(options, payload, store_timestamp_ms, own=own)
        except OSError as error:
            # There may be no room for a new queue. Nothing is encoded; earlier frames of the step are unaffected.
            self._refuse(request, append_error(error, "the topic", "the topic could not be made"))
            return
        if self._dedupe is None or own:
            # Copies by the group's own roles keep their unique ids and are not duplicates.
            answer = self._appender.add(plan, store_timestamp_ms)
        else:
            before = self._dedupe.dropped
            answer = self._dedupe.add(plan, store_timestamp_ms, self._commit)
            self._words.add(control.DROPPED_REPEATS, self._dedupe.dropped - before)
        topic.rotation = plan.rotation
        may_be_known = plan.template.reusable and self._dedupe is None and not plan.template.batch
        if may_be_known and has_columns and (options.wait or not self._sync_flush):
            self._appender.add_template(request.options, plan.template, answered=not options.oneway)
        self._answers.add(request, answer, store_timestamp_ms, wait=options.wait, oneway=options.oneway)
        if self._appender.staged_bytes >= self._commit_bytes:
            self._commit()

    def _commit(self) -> None:
        """Write, publish and answer all pending frames; under SYNC_FLUSH sync before the answers."""
        if not self._answers and self._appender.end == self._cells[control.WRITTEN]:
            return
        try:
            self._appender.write_out()
        except (MqprocError, OSError) as error:
            self._fail(error)
            return
        self._appender.publish()
        self._cells[control.WRITTEN_NS] = self._clock.monotonic_ns()
        if self._sync_flush:
            self._answers.answer_without_sync()
            if self._sync() is not None:
                return
        self._io.crash_point("ack.before_send")
        self._answers.answer_published()
        self._to_ring = True
        if self._appender.end - self._answered_to >= ANSWER_BYTES:
            self._answered_to = self._appender.end
            self._answers.send()
            self._server.send_answers(hold=True)

    def _sync(self) -> MqprocError | None:
        """Sync published messages; returns the error for clients when the sync fails."""
        began_ns = self._clock.monotonic_ns()
        try:
            self._appender.sync()
        except OSError as error:
            self._log_error("sync failed, the store is read-only from now on", error=str(error))
            return self._fail(FlushFailedError(f"the sync failed: {error.strerror}; run mqproc store repair"))
        self._count_sync()
        self._sync_took_ns = self._clock.monotonic_ns() - began_ns
        return None

    def _count_sync(self) -> None:
        """Record the last sync: after its answers were sent, or before the next one."""
        if self._sync_took_ns >= 0:
            self._sync_times.observe(self._sync_took_ns)
            self._sync_took_ns = -1

    def _create_topic(self, request: Request, options: CreateTopicRequest) -> None:
        check_changeable(options.topic)
        self._commit()
        self._topics.create(options.topic, options.queues, options.perm)
        self._topic_requests.append(request)

    def _delete_topic(self, request: Request, options: DeleteTopicRequest) -> None:
        check_changeable(options.topic)
        self._commit()
        self._topics.delete(options.topic, self._cells[control.WRITTEN])
        self._topic_requests.append(request)

    def _answer_topic_requests(self) -> None:
        """Sync the topics' journal once for all topics created or deleted in this step, then answer."""
        if not self._topic_requests:
            return
        requests, self._topic_requests = self._topic_requests, []
        try:
            self._topics.topics.commit()
        except OSError as error:
            for request in requests:
                self._refuse(request, append_error(error, "topics", "topics could not be saved"))
            return
        for request in requests:
            request.answer(Empty())
        # Pulls may be held for a queue that no longer exists.
        self._query_bell.ring()

    def _fail(self, error: MqprocError | OSError) -> MqprocError:
        """Refuse all pending frames, which will never be published; returns the error for clients."""
        self._closed_by = self._admission.reason_to_refuse()
        if isinstance(error, FailedSyncError) and self._closed_by is not None:
            self._log_error("the store is read-only from now on", error=str(error))
            failure = self._closed_by
        else:
            failure = error if isinstance(error, MqprocError) else append_error(error, "topics", "it could not be done")
        self._answers.refuse(failure)
        return failure

    def _undo(self, connection: ServerConnection, error: Exception) -> None:
        """Refuse all pending frames after an unexpected error, and close its connection.

        The error is raised if it came amid a publication, which only a successor can complete.
        """
        if self._cells[control.TABLE_AT] != self._cells[control.WRITTEN]:
            raise error
        self._appender.roll_back()
        self._answers.refuse(InternalError(f"an unexpected error: {type(error).__name__}: {error}"))
        self._server.fail(connection, error)

    def _refuse(self, request: Request, error: MqprocError) -> None:
        self._words.add(control.APPEND_REJECTS, 1)
        request.refuse(error)

    # Store time and topics

    def _store_timestamp(self) -> int:
        now_ms = self._clock.time_ms()
        last_ms = self._appender.last_store_timestamp_ms
        if now_ms >= last_ms:
            return now_ms
        self._words.add(control.WRITER_CLOCK_STEPS, 1)
        if last_ms - now_ms > CLOCK_CLAMP_MAX_MS and self._note_descent():
            self._log_error("the clock stepped back", behind_ms=last_ms - now_ms, followed=True)
            return now_ms
        return last_ms

    def _note_descent(self) -> bool:
        """Note for searches that store times descend at the next record; False on failure."""
        if self._cells[control.TIME_ORDERED_FROM] == self._appender.end:
            return True
        try:
            note_time_order(self._io, self._context.paths, self._appender.end)
        except OSError as error:
            self._log_error("the clock stepped back; the store time stays, as no note can be written", error=str(error))
            return False
        self._cells[control.TIME_ORDERED_FROM] = self._appender.end
        return True

    def _save_topics_when_due(self) -> int:
        """Save auto-created topics within a second; until then the journal holds them."""
        if not self._topics.unsaved:
            return 0
        now_ns = self._clock.monotonic_ns()
        if now_ns < self._topics_due_ns:
            return 0
        self._topics_due_ns = now_ns + AUTO_CREATED_SAVE_NS
        self._topics.save(self._clock.time_ms())
        self._words[control.TOPICS_ERRNO] = self._topics.save_errno
        return 1


def store_host(options: Options) -> bytes:
    """Store host of the records: address and port. Raises ValueError for an invalid address."""
    return ipaddress.ip_address(options.broker_ip).packed + options.listen_port.to_bytes(4, "big")
