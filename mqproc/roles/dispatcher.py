"""The dispatcher role (RocketMQ's reput): builds ConsumeQueues and index from the log."""

from __future__ import annotations

import errno
import os
import struct

from mqproc.ipc.control_words import Words
from mqproc.ipc.counters import Histogram
from mqproc.kernels.dispatch import StopReason
from mqproc.kernels.dispatch_step import STEP_END, STEP_RECORDS, publish_step
from mqproc.layout import control, histograms
from mqproc.roles.role import Role, RoleContext
from mqproc.roles.role_log import RateLimitedLog, get_logger
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.consumequeue.files import ConsumeQueueFiles
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.damage import DamageLedger
from mqproc.store.dispatch import WIDE_RECORDS_MAX, Dispatch, DispatchResult, StepLimits
from mqproc.store.index.files import IndexCommit, IndexFiles
from mqproc.store.lost_messages import LostMessages, errors_about
from mqproc.store.recovery.log import Resync

# Pause after a failed step, as on a full disk.
RETRY_NS = 100_000_000
STOP_WAIT_S = 0.001
NS_PER_MS = 1_000_000
# Control words of a step for the kernel that publishes it: STEP_END … INDEX_END.
_STEP = struct.Struct("=9q")
_STEP_AT = STEP_END * control.WORD_SIZE
# Store times are whole milliseconds: shorter delays are measured from the writer's last publication.
BACKLOG_MS = 2
# Pause between steps while no consumer waits: it delays visibility and lets several sends share one step.
LINGER_S = 0.001


class Dispatcher(Role):
    """The dispatcher. After a restart it rolls the index back to the last committed step."""

    name = control.DISPATCHER

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._clock = context.clock
        self._words = context.control.words
        self._cells = self._words.cells
        self._control_cells = context.control.cells
        self._sync_flush = context.sync_flush
        options, io, paths = context.options, context.io, context.paths
        self._table = QueueTable(io, paths.queues, write=True)
        self._segments = LogSegments(io, paths.commit_log, options.mapped_file_size_commit_log, mapped_max=2)
        queues = ConsumeQueueFiles(io, paths.consume_queue, options.consume_queue_file_bytes, write=True)
        index = IndexFiles(io, paths.index, options.max_hash_slot_num, options.max_index_num)
        if context.incarnation > 1 and options.message_index_enable:
            with context.heartbeat.busy(control.STATE_RECOVERING):
                index.roll_back(committed(self._words))
        self._ledger = DamageLedger(io, paths, options, context.heartbeat.log_error)
        self._dispatch = Dispatch(
            io,
            options,
            self._table,
            self._segments,
            queues,
            index,
            holes=self._ledger.ranges,
            limits=StepLimits(wide_records=WIDE_RECORDS_MAX, between_pieces=context.heartbeat.beat_if_due),
        )
        self._dispatch.on_lost = self._report_lost
        self._bell = context.bell
        self._spin_ns = options.max_spin_us * 1000
        self._query_bell = context.bells[control.QUERY]
        self._index_bell = context.bells[control.INDEX_FLUSHER]
        self._full_files = index.full_files
        self._retry_ns = 0
        self._deletions = self._words[control.MIN_PHYSICAL_OFFSET], self._table.gone
        self._waiting_log = RateLimitedLog(get_logger().error)
        self._delays = Histogram(self._words, histograms.DISPATCH_DELAYS)
        self._delays_of = self._words[control.DISPATCHED_MESSAGES]

    def do_work(self) -> int:
        words = self._cells
        minimum = words[control.MIN_PHYSICAL_OFFSET]
        if (deletions := (minimum, self._table.gone)) != self._deletions:
            self._deletions = deletions
            self._dispatch.close_deleted(minimum)
        dispatched, confirmed = words[control.DISPATCHED], self._confirmed()
        if dispatched >= confirmed or (self._retry_ns and self._clock.monotonic_ns() < self._retry_ns):
            return 0
        if dispatched < minimum:
            return self._jump_to_minimum(dispatched)
        try:
            if self._dispatch.step_single(dispatched, confirmed, self._control_cells):
                if self._publish_step():
                    # The query role often runs on this processor next.
                    os.sched_yield()
                return 1
            step = self._dispatch.step(dispatched, confirmed)
            if step.position == dispatched:
                return self._handle_stop(step, confirmed)
        except OSError as error:
            self._retry_later(error)
            return 0
        self._publish(step)
        return max(1, step.records)

    def linger_s(self) -> float:
        """Batch messages while no consumer waits; the query role ends the pause when one does."""
        return 0.0 if self._cells[control.WAITING_PULLS] else LINGER_S

    def wait(self, timeout_s: float) -> None:
        until_retry_s = (self._retry_ns - self._clock.monotonic_ns()) / 1e9
        if self._bell.wait(min(timeout_s, until_retry_s) if until_retry_s > 0 else timeout_s):
            self._spin_for_publication()

    def _spin_for_publication(self) -> None:
        """Spin for messages that a writer is storing, which takes less time than a wake-up."""
        if self._spin_ns and self._cells[control.WAITING_PULLS] and not self._is_behind():
            # The writer then need not ring again.
            self._bell.awake()
            end_ns = self._clock.monotonic_ns() + self._spin_ns
            while not self._is_behind() and self._clock.monotonic_ns() < end_ns:
                os.sched_yield()

    def _is_behind(self) -> bool:
        return self._cells[control.DISPATCHED] < self._confirmed()

    def on_stop(self) -> bool:
        """Dispatch up to the confirmed position; the supervisor enforces a time limit."""
        if self.do_work():
            return False
        confirmed = self._confirmed()
        if self._words[control.DISPATCHED] >= confirmed or self._words[control.DISPATCH_ERRNO]:
            return True
        self._clock.sleep(STOP_WAIT_S)
        return False

    def close(self) -> None:
        self._dispatch.close()
        self._segments.close()
        self._table.close()

    def _publish(self, step: DispatchResult) -> None:
        index = self._dispatch.index_commit
        _STEP.pack_into(
            self._words.mapping,
            _STEP_AT,
            step.position,
            step.records,
            step.entries,
            step.store_timestamp_ms,
            index.file_ms,
            index.count,
            index.slots_used,
            index.end_timestamp_ms,
            index.end_physical_offset,
        )
        self._publish_step()
        if self._dispatch.index.full_files != self._full_files:
            self._full_files = self._dispatch.index.full_files
            self._words[control.INDEX_FULL_FILES] = self._full_files
            self._index_bell.ring()

    def _publish_step(self) -> int:
        """Publish the step and wake the query role if pulls are held; returns their number."""
        # No wake-up is lost: the query role stores the count, fences, and then checks the queues once more.
        waiting = publish_step(self._control_cells)
        if waiting:
            self._query_bell.ring()
        return waiting

    def _confirmed(self) -> int:
        return self._context.control.confirmed(sync_flush=self._sync_flush)

    def timed(self, began_ns: int, ended_ns: int, *, alone: bool) -> None:
        """Record the newest record's delay for all since the last, or `alone` for this step."""
        messages = self._words[control.DISPATCHED_MESSAGES] - self._delays_of
        if alone:
            messages = min(messages, self._words[STEP_RECORDS])
        if messages:
            self._delays.observe(self._delay_ns(ended_ns), messages)
            self._delays_of += messages

    def _delay_ns(self, now_ns: int) -> int:
        """Time since the append of the newest dispatched record."""
        words = self._words
        delay_ms = self._clock.time_ms() - words[control.DISPATCHED_STORE_TIMESTAMP_MS]
        if delay_ms > BACKLOG_MS or words[control.DISPATCHED] < words[control.WRITTEN]:
            return max(0, delay_ms) * NS_PER_MS
        return max(0, now_ns - words[control.WRITTEN_NS])

    def _retry_later(self, error: OSError) -> None:
        """Schedule a retry of the same step; nothing is skipped."""
        number = error.errno or errno.EIO
        now_ns = self._clock.monotonic_ns()
        self._retry_ns = now_ns + RETRY_NS
        if self._words[control.DISPATCH_ERRNO] != number:
            self._waiting_log.reset()
        position = self._words[control.DISPATCHED]
        if self._waiting_log.write(now_ns, "dispatch waits", error=str(error), position=position):
            self._words[control.DISPATCH_ERRNO] = number
            self._context.heartbeat.failed()

    def _handle_stop(self, step: DispatchResult, confirmed: int) -> int:
        """Handle a step without progress: retry for an unknown queue, record and skip damage."""
        if step.reason is StopReason.UNKNOWN_QUEUE:
            self._retry_later(OSError(errno.ENOENT, f"the record at {step.position} belongs to no known queue"))
            return 0
        if step.reason is not StopReason.BAD_RECORD:
            return 0
        if step.position < self._words[control.MIN_PHYSICAL_OFFSET]:
            return self._jump_to_minimum(step.position)
        self._skip_damage(step.position, confirmed)
        return 1

    def _skip_damage(self, position: int, confirmed: int) -> None:
        """Continue at the next intact record, or at `confirmed`, which is always a record boundary."""
        words = self._words
        with self._context.heartbeat.busy(control.STATE_RECOVERING):
            hole = Resync(self._segments).hole_at(position, confirmed)
        self._ledger.add(hole, self._context.clock.time_ms())
        self._dispatch.add_hole(hole.start, hole.stop)
        words.add(control.DISPATCH_HOLES, 1)
        # This step dispatched nothing, so its duration must not count for messages.
        words[STEP_RECORDS] = 0
        words[control.DISPATCH_READ_ONLY] = int(self._ledger.read_only)

    def _report_lost(self, lost: LostMessages) -> None:
        for text in errors_about([lost], "mqproc store verify"):
            self._context.heartbeat.log_error(text)

    def _jump_to_minimum(self, dispatched: int) -> int:
        """Skip records that retention deleted before dispatch: queues and index lack them."""
        minimum = self._words[control.MIN_PHYSICAL_OFFSET]
        self._words.add(control.DISPATCH_GAP_BYTES, minimum - dispatched)
        self._context.heartbeat.log_error("log was deleted before it was dispatched", first=dispatched, stop=minimum)
        self._publish(DispatchResult(minimum, 0, 0, 0, StopReason.LIMIT))
        return 1


def committed(words: Words) -> IndexCommit:
    """Index position at the last committed step, to which DISPATCHED and its count are reset."""
    slot = words[control.COMMIT_SEQUENCE] & 1
    words[control.DISPATCHED] = words[control.COMMIT_DISPATCHED[slot]]
    words[control.DISPATCHED_MESSAGES] = words[control.COMMIT_MESSAGES[slot]]
    return IndexCommit(
        file_ms=words[control.COMMIT_INDEX_MS[slot]],
        count=words[control.COMMIT_INDEX_ITEMS[slot]],
        slots_used=words[control.COMMIT_INDEX_SLOTS[slot]],
        end_timestamp_ms=words[control.COMMIT_INDEX_END_MS[slot]],
        end_physical_offset=words[control.COMMIT_INDEX_END[slot]],
    )
