"""What waits in the timer's queue when filing begins, or goes on behind a failure.

Nothing is delivered before it is filed, since the last of it may cancel the first. That may be in the log and not in
its queue yet, as when dispatch has waited for room on the disk.
"""

from __future__ import annotations

from typing import Final

_NEVER: Final = 1 << 62


class Backlog:
    """One keeper's. `end`: all of it lies below this offset of the queue; nobody knows it before all is dispatched."""

    def __init__(self) -> None:
        self.end = 0
        self._written = 0

    @property
    def is_dispatched(self) -> bool:
        """Whether its end is known."""
        return self.end != _NEVER

    def begin(self, written: int) -> None:
        """It is what the log has below `written`."""
        self._written, self.end = written, _NEVER

    def look(self, dispatched: int, queue_end: int) -> None:
        """The queue ended at `queue_end`, or further, when the log was dispatched so far."""
        if not self.is_dispatched and dispatched >= self._written:
            self.end = queue_end
