"""Whether the writer takes appends now: it slows down while dispatch is far behind, and refuses what cannot be kept."""

from __future__ import annotations

import operator
from typing import Final

from mqproc.client.retry import RESTART_MS
from mqproc.config import Options
from mqproc.control_words import why_read_only
from mqproc.errors import DiskFullError, MqprocError, RetryLaterError, StoreBusyError, StoreReadOnlyError
from mqproc.layout import control as words_of
from mqproc.quantities import counted
from mqproc.roles.loop import RoleContext

# How long one step is held back when dispatch is nearly `max_dispatch_behind_bytes` behind.
SLOW_STEP_S: Final = 0.005
_closing_words = operator.itemgetter(*words_of.CLOSING_WORDS)


class AppendConditions:
    """Looked at once for all frames of a step. `taking` is False in a writer that stops."""

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._words = context.control.words
        self._cells = self._words.cells
        self.options = context.options
        self.taking = True

    @property
    def options(self) -> Options:
        """Those that hold now."""
        return self._options

    @options.setter
    def options(self, options: Options) -> None:
        self._options = options
        self._behind_max = options.max_dispatch_behind_bytes

    def look(self) -> MqprocError | None:
        """Hold the step back where dispatch is far behind; returns why no append is taken."""
        cells = self._cells
        behind = cells[words_of.WRITTEN] - cells[words_of.DISPATCHED]
        if behind * 2 <= self._behind_max and self.taking and not any(_closing_words(cells)):
            return None
        self._hold_back(behind)
        return self.reason_to_refuse()

    def reason_to_refuse(self) -> MqprocError | None:
        """Why no append is taken now."""
        control, words = self._context.control, self._cells
        if not self.taking:
            if words[words_of.GROUP_STATE] == words_of.GROUP_STOPPING:
                return StoreBusyError("the store is being stopped", hint_ms=1000)
            return RetryLaterError("the writer is being restarted", hint_ms=RESTART_MS)
        if failed := control.sync_errno:
            return StoreReadOnlyError(f"{why_read_only(failed)}; run mqproc store repair")
        if control.damage_read_only:
            place = self._context.paths.damage
            return StoreReadOnlyError(
                f"the log has {counted(control.damage_holes, 'damaged range')} and on_damage = read_only; see {place}"
            )
        if words[words_of.DISK_FULL]:
            used, free = words[words_of.DISK_USED_BYTES], words[words_of.DISK_FREE_BYTES]
            needed = (100 - self._options.disk_space_warning_level_ratio) * (used + free) // 100
            return DiskFullError(f"disk nearly full: {needed:,} bytes must be free, {free:,} are", hint_ms=1000)
        behind = words[words_of.WRITTEN] - words[words_of.DISPATCHED]
        if behind > self._behind_max:
            limit = self._behind_max
            return StoreBusyError(f"dispatch is {behind:,} bytes behind; the limit is {limit:,}", hint_ms=100)
        return None

    def _hold_back(self, behind: int) -> None:
        """Slow down, the more the nearer dispatch is to its limit, before anything must be refused."""
        limit = self._behind_max
        if behind * 2 > limit:
            pause_s = SLOW_STEP_S * min(1.0, (behind * 2 - limit) / limit)
            self._context.clock.sleep(pause_s)
            self._words.add(words_of.WRITER_SLOWED_MS, max(1, round(pause_s * 1000)))
