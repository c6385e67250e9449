"""The keeper: watches the disk that the store lies on and says when no more may be written."""

from __future__ import annotations

from mqproc.layout import control as words_of
from mqproc.process.log import get_logger
from mqproc.process.loop import RoleContext

INTERVAL_NS = 1_000_000_000


class Keeper:
    """The role: once a second."""

    name = words_of.KEEPER

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._clock = context.clock
        self._words = context.control.words
        self._log = get_logger()
        self._due_ns = 0

    def do_work(self) -> int:
        now_ns = self._clock.monotonic_ns()
        if now_ns < self._due_ns:
            return 0
        self._due_ns = now_ns + INTERVAL_NS
        self._watch_disk()
        return 1

    def wait(self, timeout_s: float) -> None:
        until_due_s = max(0.0, (self._due_ns - self._clock.monotonic_ns()) / 1e9)
        self._context.bell.wait(min(timeout_s, until_due_s))

    def on_stop(self) -> bool:
        return True

    def close(self) -> None:
        """Nothing is kept open between steps."""

    def _watch_disk(self) -> None:
        """The file system's use as `df` counts it: what root keeps back is not free."""
        used, free = self._context.io.disk_usage(self._context.paths.root)
        self._words[words_of.DISK_USED_BYTES] = used
        self._words[words_of.DISK_FREE_BYTES] = free
        full = 100 * used > self._context.options.disk_space_warning_level_ratio * (used + free)
        if full != bool(self._words[words_of.DISK_FULL]):
            self._words[words_of.DISK_FULL] = int(full)
            self._log.warning("disk nearly full" if full else "disk has room again", used_bytes=used, free_bytes=free)
