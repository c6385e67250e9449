"""The keeper: delivers what waits for its time, deletes what is old, and watches the disk that the store lies on."""

from __future__ import annotations

from mqproc.config import Options
from mqproc.io import FailedSyncError
from mqproc.layout import control as words_of
from mqproc.roles.level_deliveries import LevelDeliveries
from mqproc.roles.log import get_logger
from mqproc.roles.loop import RoleContext
from mqproc.roles.releases import Releases
from mqproc.roles.timer_deliveries import TimerDeliveries
from mqproc.store.delays.made_from import MadeFrom
from mqproc.store.final_syncs import FinalSyncs
from mqproc.store.log_flush import sync_log
from mqproc.store.queue_table import QueueTable
from mqproc.store.reads.reading import StoreReading
from mqproc.store.reads.store_views import WordsView
from mqproc.store.retention.retention import Retention

INTERVAL_NS = 1_000_000_000
# A stopping keeper waits at most this long for the outcome of what it has given to the writer.
STOP_WAIT_NS = 3_000_000_000
STOP_STEP_S = 0.05
# How often dispatch is looked at while a message that is due soon is on its way.
DISPATCH_LOOK_S = 0.001


class Keeper:
    """The role: looks at the disk and for requests once a second, does retention's steps when they are due, and
    releases parked messages when they are due."""

    name = words_of.KEEPER

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._clock = context.clock
        self._words = context.control.words
        self._options = context.options
        self._log = get_logger()
        self._due_ns = 0
        io, paths = context.io, context.paths
        self._table = QueueTable(io, paths.queues, write=True)
        self._syncs = FinalSyncs(io, paths, self._words, self.name, words_of.KEEPER_SYNC_ERRNO)
        now_ns = self._clock.monotonic_ns()
        self._retention = Retention(
            io, paths, context.options, self._words, self._table, self._syncs, self._log.info, now_ns
        )
        self._view = WordsView(self._words, self._table, sync_flush=context.options.sync_flush)
        self._reading = StoreReading(
            io, paths, context.options, self._view.queues, self._view.visible, self._view.newest_index_ms
        )
        made_from = MadeFrom(self._reading.segments)
        self._releases = Releases(context, made_from)
        self._levels = LevelDeliveries(context, self._reading, self._releases, made_from, self._syncs)
        self._timer = TimerDeliveries(context, self._reading, self._releases, made_from, self._syncs)
        self._stop_by_ns = 0
        # A start that finds something to be dispatched waits with levels and timer until it is.
        self._awaited = self._words[words_of.WRITTEN]

    def do_work(self) -> int:
        now_ns = self._clock.monotonic_ns()
        done = 0
        if now_ns >= self._due_ns:
            self._due_ns = now_ns + INTERVAL_NS
            self._watch_disk()
            self._retention.take_request()
            self._levels.look_again()
            self._words[words_of.DELAYED_MESSAGES] = self._levels.count_pending()
            self._words[words_of.TIMED_MESSAGES] = self._timer.pending
            done = 1
        done += self._releases.step() + self._levels.step() + self._timer.step()
        done += self._retention.step(now_ns, self._clock.time_ms())
        self._reading.let_go_of_deleted(self._view.deletions())
        return done

    def wait(self, timeout_s: float) -> None:
        due_ns = min(
            self._due_ns, self._retention.due_ns, self._releases.due_ns, self._levels.due_ns, self._timer.due_ns
        )
        until_due_s = min(timeout_s, max(0.0, (due_ns - self._clock.monotonic_ns()) / 1e9))
        awaited = max(self._awaited, self._timer.rolls.parked_to)
        if self._words[words_of.DISPATCHED] < awaited and not self._words[words_of.DISPATCH_ERRNO]:
            until_due_s = min(until_due_s, DISPATCH_LOOK_S)
        if self._releases.appender.has_work:
            self._releases.appender.wait(until_due_s)
            return
        if self._context.bell.wait(until_due_s):
            # The writer rings for a message that is due soon; it can be seen when it is dispatched.
            self._awaited = self._words[words_of.WRITTEN]

    def reload(self, options: Options) -> None:
        """Use these options from the next look on."""
        self._options = options
        self._retention.reload(options, self._clock.monotonic_ns())

    def on_stop(self) -> bool:
        """Wait for what is under way, then write down how far deliveries have come.

        Retention ends with the segments that it has begun to delete; the next start deletes what points into them.
        """
        now_ns = self._clock.monotonic_ns()
        if not self._retention.finish(now_ns):
            return False
        self._stop_by_ns = self._stop_by_ns or now_ns + STOP_WAIT_NS
        self._releases.step()
        if self._releases.under_way and self._clock.monotonic_ns() < self._stop_by_ns:
            self._releases.appender.wait(STOP_STEP_S)
            return False
        if self._levels.changed or self._timer.changed:
            self._save_for_good()
        return True

    def close(self) -> None:
        self._timer.close()
        self._releases.close()
        self._reading.close()
        self._retention.close()
        self._table.close()

    def _save_for_good(self) -> None:
        """Nobody syncs the log before the file is written, so it is done here; a kill then costs nothing either."""
        end = self._words[words_of.WRITTEN]
        try:
            sync_log(self._reading.segments, self._syncs, self._context.control.flushed, end)
        except (FailedSyncError, FileNotFoundError) as error:
            self._context.heart.failed()
            self._log.error("how far deliveries have come is not saved; the log tells the next start", error=str(error))
            return
        self._levels.save(durable=end)
        self._timer.save(durable=end)

    def _watch_disk(self) -> None:
        """The file system's use as `df` counts it: what root keeps back is not free."""
        used, free = self._context.io.disk_usage(self._context.paths.root)
        self._words[words_of.DISK_USED_BYTES] = used
        self._words[words_of.DISK_FREE_BYTES] = free
        full = 100 * used > self._options.disk_space_warning_level_ratio * (used + free)
        if full != bool(self._words[words_of.DISK_FULL]):
            self._words[words_of.DISK_FULL] = int(full)
            self._log.warning("disk nearly full" if full else "disk has room again", used_bytes=used, free_bytes=free)
