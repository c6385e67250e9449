"""The keeper: deletes what is old, and watches the disk that the store lies on."""

from __future__ import annotations

from mqproc.config import Options
from mqproc.layout import control as words_of
from mqproc.process.log import get_logger
from mqproc.process.loop import RoleContext
from mqproc.store.final_syncs import FinalSyncs
from mqproc.store.queue_table import QueueTable
from mqproc.store.retention.retention import Retention

INTERVAL_NS = 1_000_000_000


class Keeper:
    """The role: looks at the disk and for requests once a second, and does retention's steps when they are due."""

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
        syncs = FinalSyncs(io, paths, self._words, self.name, words_of.KEEPER_SYNC_ERRNO)
        now_ns = self._clock.monotonic_ns()
        self._retention = Retention(io, paths, context.options, self._words, self._table, syncs, self._log.info, now_ns)

    def do_work(self) -> int:
        now_ns = self._clock.monotonic_ns()
        done = 0
        if now_ns >= self._due_ns:
            self._due_ns = now_ns + INTERVAL_NS
            self._watch_disk()
            self._retention.take_request()
            done = 1
        return done + self._retention.step(now_ns, self._clock.time_ms())

    def wait(self, timeout_s: float) -> None:
        due_ns = min(self._due_ns, self._retention.due_ns)
        until_due_s = max(0.0, (due_ns - self._clock.monotonic_ns()) / 1e9)
        self._context.bell.wait(min(timeout_s, until_due_s))

    def reload(self, options: Options) -> None:
        """Use these options from the next look on."""
        self._options = options
        self._retention.reload(options, self._clock.monotonic_ns())

    def on_stop(self) -> bool:
        """What is under way is left: the next start goes on from the files that are there."""
        return True

    def close(self) -> None:
        self._retention.close()
        self._table.close()

    def _watch_disk(self) -> None:
        """The file system's use as `df` counts it: what root keeps back is not free."""
        used, free = self._context.io.disk_usage(self._context.paths.root)
        self._words[words_of.DISK_USED_BYTES] = used
        self._words[words_of.DISK_FREE_BYTES] = free
        full = 100 * used > self._options.disk_space_warning_level_ratio * (used + free)
        if full != bool(self._words[words_of.DISK_FULL]):
            self._words[words_of.DISK_FULL] = int(full)
            self._log.warning("disk nearly full" if full else "disk has room again", used_bytes=used, free_bytes=free)
