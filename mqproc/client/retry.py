"""Client retry: which requests are repeated, and after which pause.

Reads and requests that were certainly not carried out are repeated. Sends are repeated, too, where the writer drops
repeats by their unique ids.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from mqproc.errors import (
    BadRequestError,
    MqprocError,
    NotRunningError,
    RequestTimeoutError,
    RetryLaterError,
    SendOutcomeUnknownError,
)
from mqproc.util.arguments import not_below_zero, true_or_false

RESTART_MS: Final = 100
"""Typical time until the supervisor has restarted a role that died."""
# Leaves the program's seeded generator alone, and differs between forked processes.
_RANDOM: Final = random.SystemRandom()


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential pauses with jitter, within the request's timeout.

    The nth pause is `base_ms` · 2ⁿ, at most `max_ms`, times a random factor from 1 − `jitter` to 1, and never shorter
    than the server's hint. `enabled` False raises the first error instead.

    `repeat_sends`: repeat a send whose answer was lost, with the same unique ids. For stores whose writer drops repeats
    (option `dedupe_window_messages`); in other stores it may duplicate messages.
    """

    base_ms: float = 1.0
    max_ms: float = 250.0
    jitter: float = 0.5
    enabled: bool = True
    repeat_sends: bool = False

    def __post_init__(self) -> None:
        """Raise BadRequestError for a value that would fail in the first outage."""
        for name, value in (("base_ms", self.base_ms), ("max_ms", self.max_ms)):
            not_below_zero(name, value)
        if not_below_zero("jitter", self.jitter) > 1:
            raise BadRequestError(f"jitter = {self.jitter!r} is out of range: from 0 to 1")
        true_or_false("enabled", self.enabled)
        true_or_false("repeat_sends", self.repeat_sends)

    def pause_s(self, attempt: int, hint_ms: int = 0) -> float:
        """Seconds to wait after failed attempt number `attempt`, counted from 0.

        Example: `RetryPolicy(max_ms=1000).pause_s(3)`
        """
        longest = min(float(self.max_ms), float(self.base_ms) * 2.0 ** min(attempt, 30))
        pause_ms = longest * (1.0 - float(self.jitter) * _RANDOM.random())
        return max(pause_ms, float(hint_ms)) / 1000


NO_RETRY = RetryPolicy(enabled=False)


def policy_of(retry: RetryPolicy | None) -> RetryPolicy:
    """A client's policy, or the default one. Raises BadRequestError for another object."""
    if retry is not None and not isinstance(retry, RetryPolicy):
        raise BadRequestError(f"retry = {repr(retry)[:64]} is no RetryPolicy, such as RetryPolicy(max_ms=1000)")
    return retry or RetryPolicy()


class ConnectionLost(Exception):
    """A connection was lost, or not established when `connected` is False.

    `taken`: the server may have carried the request out. `ever_connected`: the role has answered before.
    """

    def __init__(self, reason: str, *, taken: bool, connected: bool = True, ever_connected: bool = True) -> None:
        super().__init__(reason)
        self.taken = taken
        self.connected = connected
        self.ever_connected = ever_connected

    def user_error(self) -> MqprocError:
        """The error that a user gets: the role is being restarted, or no group runs."""
        if self.connected:
            return RetryLaterError(f"{self}; the role is being restarted, or has ended", hint_ms=RESTART_MS)
        return NotRunningError(
            f"{self}; no group serves this store now: mqproc up starts one, mqproc status says whether one is starting"
        )


class Attempts:
    """Attempts of one request: the pause before the next one, or the error that the user gets."""

    __slots__ = ("_count", "_deadline", "_policy", "_repeatable", "_repeats_sends", "_taken")

    def __init__(self, policy: RetryPolicy, deadline: float, *, repeatable: bool, is_send: bool = False) -> None:
        self._policy = policy
        self._deadline = deadline
        self._repeatable = repeatable
        self._repeats_sends = is_send and policy.repeat_sends
        self._taken = False  # An attempt that is not repeatable may have been carried out.
        self._count = 0

    def pause_after(self, error: MqprocError | ConnectionLost, now: float) -> float:
        """Seconds to wait before the next attempt; raises when no attempt is left."""
        if isinstance(error, ConnectionLost):
            self._taken |= error.taken and not self._repeatable
            seen = self._seen_after_loss(error)
            again = (not self._taken or self._repeats_sends) and error.ever_connected
            hint_ms = 0
        else:
            seen = self._seen_after_timeout(error) if isinstance(error, RequestTimeoutError) else error
            if self._taken:
                seen = SendOutcomeUnknownError(f"{error}; an earlier attempt may have been carried out")
            again = error.retryable
            hint_ms = error.hint_ms
        pause_s = self._policy.pause_s(self._count, hint_ms)
        self._count += 1
        # The outcome is known now; an attempt that the deadline cuts off would make it unknown.
        answered_s = min(pause_s, self._policy.max_ms / 1000)
        if not again or not self._policy.enabled or now + pause_s + answered_s >= self._deadline:
            raise seen from None
        return pause_s

    def given_up(self, why: str) -> MqprocError:
        """The error of a request that the client itself stops repeating."""
        if self._taken:
            return SendOutcomeUnknownError(f"{why}; the request may have been carried out")
        return BadRequestError(why)

    def _seen_after_loss(self, error: ConnectionLost) -> MqprocError:
        if self._taken:
            return SendOutcomeUnknownError(f"{error}; the request may have been carried out")
        return error.user_error()

    def _seen_after_timeout(self, error: RequestTimeoutError) -> MqprocError:
        return error if self._repeatable else SendOutcomeUnknownError(f"{error}; the request may be carried out yet")


# Outages

QUIET_S: Final = 2.0
"""An outage is logged after this time: a restarted role is back within a fraction of a second."""
AGAIN_S: Final = 60.0
"""Interval at which a lasting outage is logged again."""


class OutageLog:
    """Pauses and log messages for work that is retried as long as a client lives.

    A lasting outage (no group, too many clients) must not look like a topic without messages.
    """

    def __init__(
        self, logger: logging.Logger, work: str, policy: RetryPolicy, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`work` is the subject of the log message "… has failed for 3 s".

        `logger` is made at import: an exception of a signal handler could leave the lock of `getLogger` taken.
        """
        self._log = logger
        self._work = work
        self._policy = policy
        self._clock = clock
        self._failures = 0
        self._since = self._log_at = 0.0
        self._logged = False

    def failed(self, error: MqprocError | ConnectionLost | None = None, connected_s: float = 0.0) -> float:
        """Seconds to wait before the next try; without `error` it failed like the last one.

        A try that was connected for a while, as a long poll is, and was then cut off starts a new series of failures.
        """
        now = self._clock()
        if connected_s > QUIET_S and not isinstance(error, RequestTimeoutError):
            self.over()
        if not self._failures:
            self._since, self._log_at = now, now + QUIET_S
        if error is not None and now >= self._log_at:
            seconds = now - self._since
            shown = error.user_error() if isinstance(error, ConnectionLost) else error
            self._log.warning("%s has failed for %.0f s, and is retried: %s", self._work, seconds, shown)
            self._logged, self._log_at = True, now + AGAIN_S
        hint_ms = error.hint_ms if isinstance(error, MqprocError) else 0
        pause_s = self._policy.pause_s(self._failures, hint_ms)
        self._failures += 1
        return pause_s

    def over(self) -> None:
        """Record a successful try."""
        if self._logged:
            self._log.warning("%s works again", self._work)
        self._failures, self._logged = 0, False
