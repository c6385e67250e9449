"""Clocks, passed to roles as an object that tests can replace."""

from __future__ import annotations

import time


class Clock:
    """Monotonic time for intervals and heartbeats, Unix time for timestamps."""

    # The function itself, without a call in between: it runs several times per message.
    monotonic_ns = staticmethod(time.monotonic_ns)
    """Nanoseconds that never decrease; the same for all processes of a machine."""

    def time_ms(self) -> int:
        """Unix time in milliseconds. It may jump in both directions, so it orders nothing."""
        return time.time_ns() // 1_000_000

    def sleep(self, seconds: float) -> None:
        """Sleep for so long."""
        time.sleep(seconds)
