"""The pages of the log that query reads: many stay present while it reads, none when it has not for a while."""

from __future__ import annotations

from typing import Final

from mqproc.store.segments import LogSegments

PRESENT_BYTES_MAX: Final = 64 << 20
"""So much stays present: the pulls of a topic's other queues find the pages that the last one has read."""

LET_GO_NS: Final = 1_000_000_000
"""After so long without work all are let go: present pages count as the group's memory, which is small when idle."""


class ReadPages:
    """Lets go of the pages of one role's `segments`."""

    def __init__(self, segments: LogSegments) -> None:
        self._segments = segments
        self._let_go_ns = 0

    def worked(self, now_ns: int) -> None:
        """Something was done that may have read."""
        self._let_go_ns = now_ns + LET_GO_NS

    def seconds_left(self, now_ns: int, at_most_s: float) -> float:
        """Let go when it is time, for a role that is about to wait; how long it may until it is."""
        if not self._segments.present_bytes:
            return at_most_s
        if now_ns < self._let_go_ns:
            return min(at_most_s, (self._let_go_ns - now_ns) / 1e9)
        self._segments.let_go_all()
        return at_most_s
