"""Rate limit for a log line that would repeat while a condition lasts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

INTERVAL_NS: Final = 60_000_000_000


class RateLimitedLog:
    """Writes one kind of line at most once per interval."""

    def __init__(self, write: Callable[..., object], interval_ns: int = INTERVAL_NS) -> None:
        """`write` is a method of a logger, such as `get_logger().error`."""
        self._write = write
        self._interval_ns = interval_ns
        self._next_ns: int | None = None

    def write(self, now_ns: int, event: str, **fields: object) -> bool:
        """Write the line unless one was written within the interval; returns whether it was written."""
        if self._next_ns is not None and now_ns < self._next_ns:
            return False
        self._next_ns = now_ns + self._interval_ns
        self._write(event, **fields)
        return True

    def reset(self) -> None:
        """Let the next line pass, since it describes a different condition."""
        self._next_ns = None
