"""What waits in the timer's queue when filing begins, or goes on behind a failure or behind a dispatch that was late.

Nothing is delivered before it is filed, since the last of it may cancel the first. That may be in the log and not in
its queue yet, as when dispatch has waited for room on the disk, or hung.
"""

from __future__ import annotations

from typing import Final

from mqproc.ipc.words import Words
from mqproc.layout import control as words_of

# What is in the log for longer and not dispatched yet may cancel what is due.
LATE_MS: Final = 50
# While its end is not known, dispatch is looked at again after so long, and sooner where it has only just become late.
LOOK_NS: Final = 25_000_000
LATE_LOOK_NS: Final = 2_000_000
_NEVER: Final = 1 << 62


class Backlog:
    """One keeper's. `end`: all of it lies below this offset of the queue; nobody knows it before all is dispatched."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self.end = 0
        self.is_late = False
        """Whether dispatch was late when it was last looked at."""
        self.until_ms = 0
        """What is due by then may go though the backlog is not filed: what the log had by then is."""
        self._written = 0
        self._began_ms = 0

    @property
    def is_dispatched(self) -> bool:
        """Whether its end is known."""
        return self.end != _NEVER

    def look_ns(self, now_ns: int, now_ms: int) -> int:
        """When to look for its end, which is not known."""
        if self._words[words_of.DISPATCHED] >= self._written:
            return now_ns
        # One that waits for room, or hangs, may do so for long.
        comes_soon = self.is_late and not self._words[words_of.DISPATCH_ERRNO] and now_ms < self._began_ms + LATE_MS
        return now_ns + (LATE_LOOK_NS if comes_soon else LOOK_NS)

    def begin(self, now_ms: int) -> None:
        """It is what the log has now."""
        self._written, self._began_ms, self.end = self._words[words_of.WRITTEN], now_ms, _NEVER

    def dispatched(self, now_ms: int) -> int:
        """Up to where the log is dispatched."""
        newest_ms, dispatched = self._words[words_of.DISPATCHED_STORE_TIMESTAMP_MS], self._words[words_of.DISPATCHED]
        self.is_late = newest_ms < now_ms - LATE_MS and dispatched < self._words[words_of.WRITTEN]
        return dispatched

    def look(self, dispatched: int, queue_end: int, filed_to: int, now_ms: int) -> None:
        """The queue ended at `queue_end`, or further, when the log was dispatched so far. It is filed up to `filed_to`.

        As long as dispatch is late the next one begins where one ends.
        """
        if self.is_late and filed_to >= self.end:
            self.until_ms = self._began_ms
            self.begin(now_ms)
        if not self.is_dispatched and dispatched >= self._written:
            self.end = queue_end
