"""The dispatcher: brings ConsumeQueues and index to the end of what may be seen of the log (reput)."""

from __future__ import annotations

import errno
import os
import struct

from mqproc.ipc.histogram import Histogram
from mqproc.ipc.words import Words
from mqproc.kernels.dispatch import StopReason
from mqproc.kernels.dispatched import POSITION, RECORDS, publish_step
from mqproc.layout import control as words_of
from mqproc.layout import figures
from mqproc.roles.log import get_logger
from mqproc.roles.loop import RoleContext
from mqproc.store.consume_queue import ConsumeQueueFiles
from mqproc.store.damage import DamageLedger
from mqproc.store.dispatcher import Dispatch, DispatchStep
from mqproc.store.index_files import IndexCommit, IndexFiles
from mqproc.store.queue_table import QueueTable
from mqproc.store.recovery.resync import Resync
from mqproc.store.segments import LogSegments
from mqproc.store.step_scan import WIDE_RECORDS_MAX

# After a failed step (a full disk) the next one waits this long, so that it does not spin.
RETRY_NS = 100_000_000
# The log says again that dispatch waits for the same reason after this time.
TELL_AGAIN_NS = 60_000_000_000
STOP_WAIT_S = 0.001
NS_PER_MS = 1_000_000
# What the kernel is told of a step: POSITION … INDEX_END.
_SAID = struct.Struct("=9q")
_SAID_AT = POSITION * words_of.WORD_SIZE
# Store times are whole milliseconds: a delay that is hardly longer is told by the writer's last publication.
BACKLOG_MS = 2
# A reader that does not wait sees a message so much later; a dozen of single sends share what dispatch takes.
LINGER_S = 0.001


class Dispatcher:
    """The role. A restarted one rolls the index back to the last committed step and goes on there."""

    name = words_of.DISPATCHER

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._clock = context.clock
        self._words = context.control.words
        self._cells = self._words.cells
        self._control_cells = context.control.cells
        self._sync_flush = context.sync_flush
        self._log = get_logger()
        options, io, paths = context.options, context.io, context.paths
        self._table = QueueTable(io, paths.queues, write=True)
        self._segments = LogSegments(io, paths.commit_log, options.mapped_file_size_commit_log, mapped_max=2)
        queues = ConsumeQueueFiles(io, paths.consume_queue, options.consume_queue_file_bytes, write=True)
        index = IndexFiles(io, paths.index, options.max_hash_slot_num, options.max_index_num)
        if context.incarnation > 1 and options.message_index_enable:
            with context.heart.busy(words_of.STATE_RECOVERING):
                index.roll_back(committed(self._words))
        self._ledger = DamageLedger(io, paths, options, lambda line: self._log.error(line))
        holes = self._ledger.ranges
        self._dispatch = Dispatch(
            io,
            options,
            self._table,
            self._segments,
            queues,
            index,
            holes=holes,
            wide_records=WIDE_RECORDS_MAX,
            breathe=context.heart.beat_if_due,
        )
        self._bell = context.bell
        self._spin_ns = options.max_spin_us * 1000
        self._query_bell = context.bells[words_of.QUERY]
        self._index_bell = context.bells[words_of.INDEX_FLUSHER]
        self._full_files = index.full_files
        self._retry_ns = 0
        self._deletions = self._words[words_of.MIN_PHYSICAL_OFFSET], self._table.gone
        self._told_ns = -TELL_AGAIN_NS
        self._delays = Histogram(self._words, figures.DISPATCH_DELAYS)
        self._delays_of = self._words[words_of.DISPATCHED_MESSAGES]

    def do_work(self) -> int:
        words = self._cells
        minimum = words[words_of.MIN_PHYSICAL_OFFSET]
        if (deletions := (minimum, self._table.gone)) != self._deletions:
            self._deletions = deletions
            self._dispatch.let_go_of_deleted(minimum)
        dispatched, confirmed = words[words_of.DISPATCHED], self._confirmed()
        if dispatched >= confirmed or (self._retry_ns and self._clock.monotonic_ns() < self._retry_ns):
            return 0
        if dispatched < minimum:
            return self._jump_to_minimum(dispatched)
        try:
            if self._dispatch.step_alone(dispatched, confirmed, self._control_cells):
                if self._publish_said():
                    # Query often is to run on this processor.
                    os.sched_yield()
                return 1
            step = self._dispatch.step(dispatched, confirmed)
            if step.position == dispatched:
                return self._explain(step, confirmed)
        except OSError as error:
            self._hold_up(error)
            return 0
        self._publish(step)
        return max(1, step.records)

    def linger_s(self) -> float:
        """While messages come one after the other and nobody waits for them, some are dispatched together.

        The query role hurries this one when somebody begins to wait.
        """
        return 0.0 if self._cells[words_of.WAITING_PULLS] else LINGER_S

    def wait(self, timeout_s: float) -> None:
        until_retry_s = (self._retry_ns - self._clock.monotonic_ns()) / 1e9
        if self._bell.wait(min(timeout_s, until_retry_s) if until_retry_s > 0 else timeout_s):
            self._look_out()

    def _look_out(self) -> None:
        """Rung by a writer that has yet to store what it has got: that takes less time than a wake-up."""
        if self._spin_ns and self._cells[words_of.WAITING_PULLS] and not self._is_behind():
            # So the writer need not ring again.
            self._bell.awake()
            end_ns = self._clock.monotonic_ns() + self._spin_ns
            while not self._is_behind() and self._clock.monotonic_ns() < end_ns:
                os.sched_yield()

    def _is_behind(self) -> bool:
        return self._cells[words_of.DISPATCHED] < self._confirmed()

    def on_stop(self) -> bool:
        """Reach the end of what is confirmed; the supervisor gives up on one that cannot."""
        if self.do_work():
            return False
        confirmed = self._confirmed()
        if self._words[words_of.DISPATCHED] >= confirmed or self._words[words_of.DISPATCH_ERRNO]:
            return True
        self._clock.sleep(STOP_WAIT_S)
        return False

    def close(self) -> None:
        self._dispatch.close()
        self._segments.close()
        self._table.close()

    def _publish(self, step: DispatchStep) -> None:
        index = self._dispatch.index_commit
        _SAID.pack_into(
            self._words.mapping,
            _SAID_AT,
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
        self._publish_said()
        if self._dispatch.index.full_files != self._full_files:
            self._full_files = self._dispatch.index.full_files
            self._words[words_of.INDEX_FULL_FILES] = self._full_files
            self._index_bell.ring()

    def _publish_said(self) -> int:
        """Publish the step in hand and wake query if pulls wait; returns how many do."""
        # Nobody need be woken while no pull is held; query stores the count before it fences and looks once more.
        waiting = publish_step(self._control_cells)
        if waiting:
            self._query_bell.ring()
        return waiting

    def _confirmed(self) -> int:
        return self._context.control.confirmed(sync_flush=self._sync_flush)

    def timed(self, began_ns: int, ended_ns: int, *, alone: bool) -> None:
        """Count the delay of the newest record for all since the last time, or `alone` for those of this step."""
        messages = self._words[words_of.DISPATCHED_MESSAGES] - self._delays_of
        if alone:
            messages = min(messages, self._words[RECORDS])
        if messages:
            self._delays.observe(self._delay_ns(ended_ns), messages)
            self._delays_of += messages

    def _delay_ns(self, now_ns: int) -> int:
        """From the append of the newest record that is dispatched to now."""
        words = self._words
        delay_ms = self._clock.time_ms() - words[words_of.DISPATCHED_STORE_TIMESTAMP_MS]
        if delay_ms > BACKLOG_MS or words[words_of.DISPATCHED] < words[words_of.WRITTEN]:
            return max(0, delay_ms) * NS_PER_MS
        return max(0, now_ns - words[words_of.WRITTEN_NS])

    def _hold_up(self, error: OSError) -> None:
        """Nothing is skipped: the same step is tried again until it goes well."""
        number = error.errno or errno.EIO
        now_ns = self._clock.monotonic_ns()
        self._retry_ns = now_ns + RETRY_NS
        if self._words[words_of.DISPATCH_ERRNO] == number and now_ns < self._told_ns + TELL_AGAIN_NS:
            return
        self._told_ns = now_ns
        self._words[words_of.DISPATCH_ERRNO] = number
        self._context.heart.failed()
        self._log.error("dispatch waits", error=str(error), position=self._words[words_of.DISPATCHED])

    def _explain(self, step: DispatchStep, confirmed: int) -> int:
        """A step that got nowhere: for lack of a queue, or for damage, which is written down and passed."""
        if step.reason is StopReason.UNKNOWN_QUEUE:
            self._hold_up(OSError(errno.ENOENT, f"the record at {step.position} belongs to no known queue"))
            return 0
        if step.reason is not StopReason.BAD_RECORD:
            return 0
        if step.position < self._words[words_of.MIN_PHYSICAL_OFFSET]:
            return self._jump_to_minimum(step.position)
        self._pass_damage(step.position, confirmed)
        return 1

    def _pass_damage(self, position: int, confirmed: int) -> None:
        """The log goes on at the next intact record, or at `confirmed`, where one begins in any case."""
        words = self._words
        with self._context.heart.busy(words_of.STATE_RECOVERING):
            hole = Resync(self._segments).hole_at(position, confirmed)
        self._context.heart.failed()
        self._ledger.add(hole, self._context.clock.time_ms())
        self._dispatch.add_hole(hole.start, hole.stop)
        words.add(words_of.DISPATCH_HOLES, 1)
        # This step dispatched nothing: its time is no message's.
        words[RECORDS] = 0
        words[words_of.DISPATCH_READ_ONLY] = int(self._ledger.read_only)

    def _jump_to_minimum(self, dispatched: int) -> int:
        """Retention has taken what was to be dispatched: it is lost to queues and index."""
        minimum = self._words[words_of.MIN_PHYSICAL_OFFSET]
        self._words.add(words_of.DISPATCH_GAP_BYTES, minimum - dispatched)
        self._context.heart.failed()
        self._log.error("log was deleted before it was dispatched", first=dispatched, stop=minimum)
        self._publish(DispatchStep(minimum, 0, 0, 0, StopReason.LIMIT))
        return 1


def committed(words: Words) -> IndexCommit:
    """Where the index stood at the last committed step."""
    slot = words[words_of.COMMIT_SEQUENCE] & 1
    words[words_of.DISPATCHED] = words[words_of.COMMIT_DISPATCHED[slot]]
    words[words_of.DISPATCHED_MESSAGES] = words[words_of.COMMIT_MESSAGES[slot]]
    return IndexCommit(
        file_ms=words[words_of.COMMIT_INDEX_MS[slot]],
        count=words[words_of.COMMIT_INDEX_ITEMS[slot]],
        slots_used=words[words_of.COMMIT_INDEX_SLOTS[slot]],
        end_timestamp_ms=words[words_of.COMMIT_INDEX_END_MS[slot]],
        end_physical_offset=words[words_of.COMMIT_INDEX_END[slot]],
    )
