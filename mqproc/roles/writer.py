"""The writer: the only process that appends to the CommitLog.

A step takes the frames that are there, encodes them one behind the other, writes, publishes and answers. Frames of
one step share the write, and under SYNC_FLUSH the sync: group commit without another process in the way.
"""

from __future__ import annotations

import ipaddress
from typing import Any

import msgspec

from mqproc.config import Options
from mqproc.errors import (
    BadRequestError,
    FlushFailedError,
    MqprocError,
    PermissionDeniedError,
    TooManyQueuesError,
    TopicExistsError,
    TopicNotFoundError,
    UnknownCommandError,
)
from mqproc.io import FailedSyncError
from mqproc.ipc.code_counts import code_counter
from mqproc.ipc.histogram import Histogram
from mqproc.kernels.append_run import ANSWERS_FULL, COMMIT, DONE, NOT_KNOWN
from mqproc.layout import control as words_of
from mqproc.layout import figures
from mqproc.roles.append_answers import AppendAnswers
from mqproc.roles.append_conditions import AppendConditions
from mqproc.roles.append_plans import AppendPlans
from mqproc.roles.append_times import AppendTimes
from mqproc.roles.limits import client_limits
from mqproc.roles.log import get_logger
from mqproc.roles.loop import RoleContext
from mqproc.roles.open_topics import OpenTopics
from mqproc.roles.segment_wait import SegmentWait
from mqproc.store.append import COMMIT_BYTES, CommitLogAppender, as_refusal
from mqproc.store.final_syncs import FinalSyncs
from mqproc.store.queue_table import NoRoomForQueuesError, QueueTable
from mqproc.store.repeats import RepeatWindow
from mqproc.store.segments import LogSegments
from mqproc.store.succession import take_over
from mqproc.store.topics import check_changeable
from mqproc.wire.connection import FrameRun, Request
from mqproc.wire.operations import (
    REQUESTS,
    WRITER_OPERATIONS,
    AppendRequest,
    CreateTopicRequest,
    DeleteTopicRequest,
    Empty,
    Operation,
)
from mqproc.wire.options import not_decodable
from mqproc.wire.runs import RunCutter
from mqproc.wire.server import SocketServer

# The keeper looks for messages with a time to deliver at each second; it is told of one that is due before it looks.
NEAR_MS = 2000
NEVER_BYTES = 1 << 62
# A step's answers leave together, up to this much of the log: each send wakes its client, which takes the processor.
ANSWER_BYTES = 1 << 20
# A clock that steps back holds store time still for at most this long; beyond it, it is followed with an alarm.
CLOCK_CLAMP_MAX_MS = 60_000
# A stopping writer refuses for at most this long what clients go on sending, then sends for at most this long.
STOP_REFUSE_NS = 1_000_000_000
STOP_DRAIN_S = 3.0
AUTO_CREATED_SAVE_NS = 1_000_000_000
_append_request = msgspec.msgpack.Decoder(AppendRequest)
# Looked at for each frame: as plain numbers, since an enum's members take as long to find as a call.
_APPEND_OWN = int(Operation.APPEND_OWN)
_APPENDS = (int(Operation.APPEND), _APPEND_OWN)
_decoders: dict[int, Any] = {operation: msgspec.msgpack.Decoder(kind) for operation, kind in REQUESTS.items()}
# Errors that say: nothing was changed, other frames of the step are not touched.
_REFUSED_ALONE = (
    BadRequestError,
    NoRoomForQueuesError,
    PermissionDeniedError,
    TooManyQueuesError,
    TopicExistsError,
    TopicNotFoundError,
)


class Writer:
    """The role. Built in its own process; a restarted one first puts its predecessor's work in order."""

    name = words_of.WRITER

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._options = context.options
        self._sync_flush = context.sync_flush
        self._rings_early = context.options.max_spin_us > 0 and not context.sync_flush
        # Under SYNC_FLUSH all frames of a step share one sync.
        self._commit_bytes = NEVER_BYTES if context.sync_flush else COMMIT_BYTES
        self._io = context.io
        self._clock = context.clock
        self._words = context.control.words
        self._cells = self._words.cells
        self._log = get_logger()
        self._table = QueueTable(self._io, context.paths.queues, write=True)
        segment_size = context.options.mapped_file_size_commit_log
        self._segments = LogSegments(self._io, context.paths.commit_log, segment_size)
        self._syncs = FinalSyncs(self._io, context.paths, self._words, self.name, words_of.WRITER_SYNC_ERRNO)
        if context.incarnation > 1:
            with context.heart.busy(words_of.STATE_RECOVERING):
                take_over(
                    self._io,
                    self._syncs,
                    self._words,
                    self._segments,
                    self._table,
                    sync_flush=context.options.sync_flush,
                )
            # A map would keep the space of a segment that retention deletes later.
            self._segments.close()
        self._topics = OpenTopics(
            self._io, self._syncs, context.paths, context.options, self._table, context.heart.failed
        )
        self._topics.save(self._clock.time_ms())
        self._topics_due_ns = 0
        self._plans = AppendPlans(self._topics)
        self._appender = CommitLogAppender(
            self._io,
            self._syncs,
            context.options,
            self._words,
            self._table,
            self._segments,
            store_host(context.options),
            SegmentWait(context, self._syncs).wait_for,
            self._topics.rounds,
            self._commit_bytes,
        )
        self._known = self._appender.known
        self._known_changes = self._topics.changes
        self._repeats: RepeatWindow | None = None
        if context.options.dedupe_window_messages:
            with context.heart.busy(words_of.STATE_RECOVERING):
                self._repeats = RepeatWindow(
                    self._words, self._table, self._segments, self._appender, context.options.dedupe_window_messages
                )
        self._conditions = AppendConditions(context)
        self._times = AppendTimes(self._words)
        self._connections = 0
        self._sync_times = Histogram(self._words, figures.WRITER_SYNCS)
        self._sync_took_ns = -1  # of the last one while it is not counted
        self._answered_to = self._appender.end
        self._requests: list[Request | FrameRun] = []
        self._topic_requests: list[Request] = []
        limits = client_limits(context.options)
        self._server = SocketServer(
            context.sockets["writer"],
            limits,
            operations=WRITER_OPERATIONS,
            on_reject=code_counter(self._words, self.name),
            on_partial=lambda: self._words.add(words_of.WRITER_PARTIAL_FRAMES, 1),
            # A message that is known again is looked for frame by frame.
            runs=RunCutter(Operation.APPEND, limits.frame_bytes) if self._repeats is None else None,
        )
        self._answers = AppendAnswers(
            self._server,
            self._known,
            self._appender.store_host,
            lambda: self._words.add(words_of.APPEND_REJECTS, 1),
        )
        # The loop drains the bell before the next wait.
        self._server.register(context.bell.fileno(), lambda: None)
        self._dispatcher_bell = context.bells[words_of.DISPATCHER]
        self._keeper_bell = context.bells[words_of.KEEPER]
        self._query_bell = context.bells[words_of.QUERY]
        self._stop_by_ns = 0
        self._to_ring = False
        self._to_ring_keeper = False
        self._closed_by: MqprocError | None = None

    # The loop's side

    def do_work(self) -> int:
        requests = self._requests or self._server.poll_runs(0)
        self._requests = []
        if not requests:
            self._tell_connections()
            return self._save_topics_when_due()
        messages = self._cells[words_of.APPENDED_MESSAGES]
        if len(requests) == 1 and self._append_alone(requests[0]):
            self._after_appends()
            return self._cells[words_of.APPENDED_MESSAGES] - messages or 1
        self._closed_by = self._conditions.look()
        self._server.hold_answers()
        for request in requests:
            if isinstance(request, FrameRun):
                self._append_run(request)
            else:
                self._handle(request)
        self._commit()
        self._answer_topic_requests()
        self._answers.send()
        self._server.send_answers()
        self._after_appends()
        return max(len(requests), self._cells[words_of.APPENDED_MESSAGES] - messages)

    def _after_appends(self) -> None:
        """What nobody waits for."""
        self._count_sync()
        self._tell_connections()
        self._save_topics_when_due()
        if self._to_ring:
            # Once a step: a bell for each frame would cost a call and a wake-up that nobody needs.
            self._to_ring = False
            self._dispatcher_bell.ring()
            if self._to_ring_keeper:
                self._to_ring_keeper = False
                self._keeper_bell.ring()

    def _tell_connections(self) -> None:
        if len(self._server.connections) != self._connections:
            self._connections = self._cells[words_of.WRITER_CONNECTIONS] = len(self._server.connections)

    def timed(self, began_ns: int, ended_ns: int, *, alone: bool) -> None:
        self._times.timed(began_ns, ended_ns, alone=alone)

    def has_news(self) -> bool:
        """All work comes by sockets."""
        return False

    def wait(self, timeout_s: float) -> None:
        self._requests = self._server.poll_runs(timeout_s)
        if self._cells[words_of.WAITING_PULLS] and self._requests and self._rings_early:
            # Somebody waits for what has come: the dispatcher wakes while it is stored, and looks out for it.
            self._dispatcher_bell.ring()

    def on_stop(self) -> bool:
        """Take what has come, refuse what still comes, save the topics, send the answers that are queued.

        A request that nobody answers leaves its client not knowing what became of it.
        """
        if self._conditions.taking:
            self._server.stop_accepting()
            self.do_work()
            self._conditions.taking = False
            self._stop_by_ns = self._clock.monotonic_ns() + STOP_REFUSE_NS
        if self.do_work() and self._clock.monotonic_ns() < self._stop_by_ns:
            return False
        self._topics.save(self._clock.time_ms())
        self._server.drain(STOP_DRAIN_S)
        self._server.hang_up()
        while self.do_work():
            pass  # What came meanwhile is refused: no more than sockets hold, since nobody can send behind it.
        return True

    def reload(self, options: Options) -> None:
        """`max_message_size` may change while running."""
        self._options = self._conditions.options = options
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
                self._create_topic(request, _decoders[operation].decode(request.options))
            elif operation == Operation.DELETE_TOPIC:
                self._delete_topic(request, _decoders[operation].decode(request.options))
            elif operation == Operation.PING:
                request.answer(Empty())
            else:
                raise UnknownCommandError(f"operation {operation} is not one of the writer's")
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            named = Operation(operation)
            self._refuse(request, not_decodable(named.name, REQUESTS[named], request.options, error))
        except _REFUSED_ALONE as error:
            self._refuse(request, error)
        except (MqprocError, OSError) as error:
            self._refuse(request, self._fail(error))

    def _append_alone(self, run: Request | FrameRun) -> bool:
        """A single frame of a known shape, the way that the most hurried clients take: whether that was all to do."""
        if (
            type(run) is not FrameRun
            or run.frames != 1
            or not self._conditions.taking
            or self._known_changes != self._topics.changes
        ):
            return False
        try:
            if not self._appender.add_alone(run.buffer, run.at, self._clock.time_ms()):
                return False
            # At once: the dispatcher takes it for the time of what has just been published.
            self._cells[words_of.WRITTEN_NS] = self._clock.monotonic_ns()
            failure = self._sync() if self._sync_flush else None
        except (MqprocError, OSError) as error:
            failure = self._fail(error)
        if failure is not None:
            self._answers.add_run(run, 0)
            self._answers.refuse(failure)
            self._answers.send()
            return True
        self._io.crash_point("ack.before_send")
        self._answers.send_alone(run.connection)
        self._to_ring = True
        return True

    def _append_run(self, run: FrameRun) -> None:
        """Frames of one client, as many at a time as the kernel takes by itself; the others are handled one by one."""
        known = self._known
        known.begin(run.at, run.end)
        reason = COMMIT
        while reason != DONE:
            reason = self._append_known(run) if self._closed_by is None else NOT_KNOWN
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
                known.go_on_at(end)

    def _append_known(self, run: FrameRun) -> int:
        """Frames from where the run stands, as far as their shapes are known; returns why it goes no further."""
        known = self._known
        if self._known_changes != self._topics.changes:
            self._known_changes = self._topics.changes
            known.forget()
        store_timestamp_ms = self._store_timestamp()
        known.store_at(store_timestamp_ms)
        at = known.answers_end
        try:
            reason = self._appender.add_run(run.buffer, store_timestamp_ms)
        except (MqprocError, OSError) as error:
            self._answers.add_run(run, at)
            request, end = run.request_at(known.at)
            self._refuse(request, self._fail(error))
            known.go_on_at(end)
            return DONE if end == run.end else COMMIT
        self._answers.add_run(run, at)
        return reason

    def _append(self, request: Request, store_timestamp_ms: int | None) -> None:
        """A frame by itself, stored now or at the time that its run was to be stored at."""
        options = _append_request.decode(request.options)
        if self._closed_by is not None:
            raise self._closed_by
        if store_timestamp_ms is None:
            store_timestamp_ms = self._store_timestamp()
        own = request.operation == _APPEND_OWN
        if 0 < options.deliver_at_ms <= store_timestamp_ms + NEAR_MS:
            self._to_ring_keeper = True
        try:
            plan, topic = self._plans.plan(options, request.payload, store_timestamp_ms, own=own)
        except OSError as error:
            # There is no room for a new queue, say. Nothing is encoded: what the step has taken before goes on.
            self._refuse(request, as_refusal(error, "the topic", "the topic could not be made"))
            return
        if self._repeats is None or own:
            # The group's own roles copy messages on purpose, with their ids.
            answer = self._appender.add(plan, store_timestamp_ms)
        else:
            before = self._repeats.dropped
            answer = self._repeats.add(plan, store_timestamp_ms, self._commit)
            self._words.add(words_of.DROPPED_REPEATS, self._repeats.dropped - before)
        topic.rotation = plan.rotation
        may_be_known = plan.shape.lasting and self._repeats is None and not plan.shape.batch
        if may_be_known and (options.wait or not self._sync_flush):
            self._appender.know(request.options, plan.shape, answered=not options.oneway)
        self._answers.add(request, answer, store_timestamp_ms, wait=options.wait, oneway=options.oneway)
        if self._appender.staged_bytes >= self._commit_bytes:
            self._commit()

    def _commit(self) -> None:
        """Write, publish and answer everything that is pending; under SYNC_FLUSH sync in between."""
        if not self._answers and self._appender.end == self._cells[words_of.WRITTEN]:
            return
        try:
            self._appender.write_out()
        except (MqprocError, OSError) as error:
            self._fail(error)
            return
        self._appender.publish()
        self._cells[words_of.WRITTEN_NS] = self._clock.monotonic_ns()
        if self._sync_flush:
            self._answers.give_unwaited()
            if self._sync() is not None:
                return
        self._io.crash_point("ack.before_send")
        self._answers.give()
        self._to_ring = True
        if self._appender.end - self._answered_to >= ANSWER_BYTES:
            self._answered_to = self._appender.end
            self._answers.send()
            self._server.send_answers(hold=True)

    def _sync(self) -> MqprocError | None:
        """Make what is published durable; returns what clients are told when that fails."""
        began_ns = self._clock.monotonic_ns()
        try:
            self._appender.sync()
        except OSError as error:
            self._context.heart.failed()
            self._log.error("sync failed, the store is read-only from now on", error=str(error))
            return self._fail(FlushFailedError(f"the sync failed: {error.strerror}; run mqproc store repair"))
        self._count_sync()
        self._sync_took_ns = self._clock.monotonic_ns() - began_ns
        return None

    def _count_sync(self) -> None:
        """Count the last one, which somebody has waited for: behind its answers, or before the next."""
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
        self._topics.delete(options.topic, self._cells[words_of.WRITTEN])
        self._topic_requests.append(request)

    def _answer_topic_requests(self) -> None:
        """One sync of the journal for all topics that were made or deleted in this step."""
        if not self._topic_requests:
            return
        requests, self._topic_requests = self._topic_requests, []
        try:
            self._topics.topics.commit()
        except OSError as error:
            for request in requests:
                self._refuse(request, as_refusal(error, "topics", "topics could not be saved"))
            return
        for request in requests:
            request.answer(Empty())
        # Pulls may wait for a queue that is gone now.
        self._query_bell.ring()

    def _fail(self, error: MqprocError | OSError) -> MqprocError:
        """Nothing that waits is published, nor will be; perhaps no more is taken. Returns what clients are told."""
        self._closed_by = self._conditions.reason_to_refuse()
        if isinstance(error, FailedSyncError) and self._closed_by is not None:
            self._context.heart.failed()
            self._log.error("the store is read-only from now on", error=str(error))
            failure = self._closed_by
        else:
            failure = error if isinstance(error, MqprocError) else as_refusal(error, "topics", "it could not be done")
        self._answers.refuse(failure)
        return failure

    def _refuse(self, request: Request, error: MqprocError) -> None:
        self._words.add(words_of.APPEND_REJECTS, 1)
        request.refuse(error)

    # Conditions

    def _store_timestamp(self) -> int:
        now_ms = self._clock.time_ms()
        last_ms = self._appender.last_store_timestamp_ms
        if now_ms >= last_ms:
            return now_ms
        self._words.add(words_of.WRITER_CLOCK_STEPS, 1)
        if last_ms - now_ms > CLOCK_CLAMP_MAX_MS:
            self._context.heart.failed()
            self._log.error("the clock stepped back", behind_ms=last_ms - now_ms, followed=True)
            return now_ms
        return last_ms

    def _save_topics_when_due(self) -> int:
        """Topics made by a first send are saved within a second: the journal has them."""
        if not self._topics.unsaved:
            return 0
        now_ns = self._clock.monotonic_ns()
        if now_ns < self._topics_due_ns:
            return 0
        self._topics_due_ns = now_ns + AUTO_CREATED_SAVE_NS
        self._topics.save(self._clock.time_ms())
        return 1


def store_host(options: Options) -> bytes:
    """The host that records bear: address and port. Raises ConfigurationError's kin for a bad address."""
    return ipaddress.ip_address(options.broker_ip).packed + options.listen_port.to_bytes(4, "big")
