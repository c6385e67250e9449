"""What a client tries for as long as it lives: pauses between the tries, and a word to the log when nothing comes.

A restarted role is back within a fraction of a second, so its absence is not worth a word. What lasts (no group, too
many clients) must not look like a topic in which nothing happens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from mqproc.client.retry import ConnectionLost, RetryPolicy
from mqproc.errors import MqprocError, RequestTimeoutError

QUIET_S: Final = 2.0
AGAIN_S: Final = 60.0


class Outage:
    """Failures in a row. `logger` is told of one that lasts, first after `QUIET_S`, then every `AGAIN_S`."""

    def __init__(
        self, logger: str, what: str, policy: RetryPolicy, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`what` is tried, in words that "has failed" may follow."""
        self._log = logging.getLogger(logger)
        self._what = what
        self._policy = policy
        self._clock = clock
        self._failures = 0
        self._since = self._tell_at = 0.0
        self._told = False

    def failed(self, error: MqprocError | ConnectionLost | None = None, stood_s: float = 0.0) -> float:
        """Seconds to wait before the next try; without an `error` it failed with one that was told before.

        A try that stood for a while, as one does that waits for messages, and was then cut off was none that failed.
        """
        now = self._clock()
        if stood_s > QUIET_S and not isinstance(error, RequestTimeoutError):
            self.over()
        if not self._failures:
            self._since, self._tell_at = now, now + QUIET_S
        if error is not None and now >= self._tell_at:
            seconds = now - self._since
            self._log.warning("%s has failed for %.0f s, and is tried on: %s", self._what, seconds, _told(error))
            self._told, self._tell_at = True, now + AGAIN_S
        hint_ms = error.hint_ms if isinstance(error, MqprocError) else 0
        pause_s = self._policy.pause_s(self._failures, hint_ms)
        self._failures += 1
        return pause_s

    def over(self) -> None:
        """A try has succeeded."""
        if self._told:
            self._log.warning("%s works again", self._what)
        self._failures, self._told = 0, False


def _told(error: MqprocError | ConnectionLost) -> MqprocError:
    return error.told() if isinstance(error, ConnectionLost) else error
