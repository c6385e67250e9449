"""The two clocks. Roles get one as an object, so that a test can put its own in place."""

from __future__ import annotations

import time


class Clock:
    """The machine's clocks: monotonic for intervals and heartbeats, Unix time for what people read."""

    # The function itself: it is asked several times for each message.
    monotonic_ns = staticmethod(time.monotonic_ns)
    """Nanoseconds that never go back; the same for all processes of a machine."""

    def time_ms(self) -> int:
        """Unix time in milliseconds; may step either way, so nothing is ordered by it."""
        return time.time_ns() // 1_000_000

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        time.sleep(seconds)
