"""A clock that stands still until a test moves it."""

from __future__ import annotations

from mqproc.io.clock import Clock


class ManualClock(Clock):
    """Both clocks under a test's hand; Unix time may be set back on its own."""

    def __init__(self, time_ms: int = 1_700_000_000_000) -> None:
        self._monotonic_ns = 1_000_000_000
        self._time_ms = time_ms

    def monotonic_ns(self) -> int:
        return self._monotonic_ns

    def time_ms(self) -> int:
        return self._time_ms

    def advance(self, ms: int) -> None:
        """Time passes."""
        self._monotonic_ns += ms * 1_000_000
        self._time_ms += ms

    def set_time_ms(self, time_ms: int) -> None:
        """Somebody sets the machine's clock."""
        self._time_ms = time_ms
