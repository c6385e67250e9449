"""The keeper role: delivers delayed and timed messages, runs retention, watches disk usage."""

from __future__ import annotations

from mqproc.config.options import Options
from mqproc.io.store_io import FailedSyncError
from mqproc.layout import control
from mqproc.roles.delivery_queue import DeliveryQueue
from mqproc.roles.keeper.levels import LevelDelivery
from mqproc.roles.keeper.timer import TimerDelivery
from mqproc.roles.role import Role, RoleContext
from mqproc.roles.role_log import get_logger
from mqproc.store.commitlog.flush import sync_log
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.read.queries import StoreQueries
from mqproc.store.read.views import WordsView
from mqproc.store.retention.delete import Retention
from mqproc.store.schedule.delivery_marks import DeliveryMarks
from mqproc.store.sync_guard import SyncGuard

INTERVAL_NS = 1_000_000_000
# Limit of a stopping keeper for the outcome of deliveries that the writer has.
STOP_WAIT_NS = 3_000_000_000
STOP_STEP_S = 0.05
# Polling interval of dispatch while a message that is due soon is not dispatched yet.
DISPATCH_POLL_S = 0.001


class Keeper(Role):
    """The keeper. Checks the disk every second; runs due retention steps and deliveries."""

    name = control.KEEPER

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._clock = context.clock
        self._words = context.control.words
        self._options = context.options
        self._log = get_logger()
        self._due_ns = 0
        io, paths = context.io, context.paths
        self._table = QueueTable(io, paths.queues, write=True)
        self._syncs = SyncGuard(io, paths, self._words, self.name, control.KEEPER_SYNC_ERRNO)
        now_ns = self._clock.monotonic_ns()
        self._retention = Retention(
            io, paths, context.options, self._words, self._table, self._syncs, self._log.info, now_ns
        )
        self._view = WordsView(self._words, self._table, sync_flush=context.options.sync_flush)
        self._reading = StoreQueries(io, paths, context.options, self._view)
        self._deliveries = DeliveryQueue(context, DeliveryMarks(self._reading.segments))
        self._levels = LevelDelivery(context, self._reading, self._deliveries, self._syncs)
        self._timer = TimerDelivery(context, self._reading, self._deliveries, self._syncs)
        self._stop_by_ns = 0
        # Position up to which dispatch is awaited. At a start levels and timer wait for the whole log.
        self._awaited = self._words[control.WRITTEN]

    def do_work(self) -> int:
        now_ns = self._clock.monotonic_ns()
        done = 0
        if now_ns >= self._due_ns:
            self._due_ns = now_ns + INTERVAL_NS
            self._watch_disk()
            self._retention.poll_request()
            self._levels.recheck()
            self._words[control.DELAYED_MESSAGES] = self._levels.count_pending()
            self._words[control.TIMED_MESSAGES] = self._timer.pending
            done = 1
        done += self._deliveries.step() + self._levels.step() + self._timer.step()
        done += self._retention.step(now_ns, self._clock.time_ms())
        self._reading.close_deleted(self._view.deletions())
        return done

    def wait(self, timeout_s: float) -> None:
        due_ns = min(
            self._due_ns, self._retention.due_ns, self._deliveries.due_ns, self._levels.due_ns, self._timer.due_ns
        )
        until_due_s = min(timeout_s, max(0.0, (due_ns - self._clock.monotonic_ns()) / 1e9))
        awaited = max(self._awaited, self._timer.rolls.dispatch_target)
        if self._words[control.DISPATCHED] < awaited and not self._words[control.DISPATCH_ERRNO]:
            until_due_s = min(until_due_s, DISPATCH_POLL_S)
        if self._deliveries.producer.has_work:
            self._deliveries.producer.wait(until_due_s)
            return
        if self._context.bell.wait(until_due_s):
            # The writer rang for a message that is due soon; it becomes readable once it is dispatched.
            self._awaited = self._words[control.WRITTEN]

    def reload(self, options: Options) -> None:
        """Apply disk and retention options."""
        self._options = options
        self._retention.reload(options, self._clock.monotonic_ns())

    def on_stop(self) -> bool:
        """Wait for deliveries under way, then save delivery progress.

        Retention finishes the segments that it has begun to delete; the next start deletes what refers to them.
        """
        now_ns = self._clock.monotonic_ns()
        if not self._retention.finish(now_ns):
            return False
        self._stop_by_ns = self._stop_by_ns or now_ns + STOP_WAIT_NS
        self._deliveries.step()
        if self._deliveries.under_way and self._clock.monotonic_ns() < self._stop_by_ns:
            self._deliveries.producer.wait(STOP_STEP_S)
            return False
        if self._levels.changed or self._timer.changed:
            self._save_final()
        return True

    def close(self) -> None:
        self._timer.close()
        self._deliveries.close()
        self._reading.close()
        self._retention.close()
        self._table.close()

    def _save_final(self) -> None:
        """Sync the log, then save: the files may only count deliveries that are durable."""
        end = self._words[control.WRITTEN]
        try:
            sync_log(self._reading.segments, self._syncs, self._context.control.flushed, end)
        except (FailedSyncError, FileNotFoundError) as error:
            event = "delivery progress was not saved; the next start reads it from the log"
            self._context.heartbeat.log_error(event, error=str(error))
            return
        self._levels.save(durable=end)
        self._timer.save(durable=end)

    def _watch_disk(self) -> None:
        """Publish disk usage as `df` shows it: blocks reserved for root are not free."""
        used, free = self._context.io.disk_usage(self._context.paths.root)
        self._words[control.DISK_USED_BYTES] = used
        self._words[control.DISK_FREE_BYTES] = free
        full = bool(self._options.disk_refusal(used, free))
        if full != bool(self._words[control.DISK_FULL]):
            self._words[control.DISK_FULL] = int(full)
            self._log.warning("disk nearly full" if full else "disk has room again", used_bytes=used, free_bytes=free)
