"""When a request is made again, and after how long. Only what was surely not carried out is, and reads; sends too where
the writer knows them again by their unique ids.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from mqproc.client.amounts import not_below_zero, true_or_false
from mqproc.errors import (
    BadRequestError,
    MqprocError,
    NotRunningError,
    RequestTimeoutError,
    RetryLaterError,
    SendOutcomeUnknownError,
)

RESTART_MS: Final = 100
"""A role that has died is there again about so long later, if its group runs."""
# What a program has seeded stays as it is, and forked ones differ.
_RANDOM: Final = random.SystemRandom()


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential pauses with jitter, until the request's timeout leaves no time for another attempt.

    The nth pause is `base_ms` · 2ⁿ, at most `max_ms`, times a random factor from 1 − `jitter` to 1, and never shorter
    than what the server asked for. `enabled` False raises the first error instead.

    `repeat_sends`: a send whose answer was lost is made again, with the same unique ids. For stores whose writer drops
    repeats (option `dedupe_window_messages`); elsewhere messages may come twice.
    """

    base_ms: float = 1.0
    max_ms: float = 250.0
    jitter: float = 0.5
    enabled: bool = True
    repeat_sends: bool = False

    def __post_init__(self) -> None:
        """Raises BadRequestError for what would be an error of Python's in the first outage."""
        for name, value in (("base_ms", self.base_ms), ("max_ms", self.max_ms)):
            not_below_zero(name, value)
        if not_below_zero("jitter", self.jitter) > 1:
            raise BadRequestError(f"jitter = {self.jitter!r} is out of range: from 0 to 1")
        true_or_false("enabled", self.enabled)
        true_or_false("repeat_sends", self.repeat_sends)

    def pause_s(self, attempt: int, hint_ms: int = 0) -> float:
        """Seconds to wait after failed attempt number `attempt`, which counts from 0."""
        longest = min(float(self.max_ms), float(self.base_ms) * 2.0 ** min(attempt, 30))
        pause_ms = longest * (1.0 - float(self.jitter) * _RANDOM.random())
        return max(pause_ms, float(hint_ms)) / 1000


NO_RETRY = RetryPolicy(enabled=False)


def policy_of(retry: RetryPolicy | None) -> RetryPolicy:
    """A client's policy, the usual one where none is given. Raises BadRequestError for what is none."""
    if retry is not None and not isinstance(retry, RetryPolicy):
        raise BadRequestError(f"retry = {repr(retry)[:64]} is no RetryPolicy, such as RetryPolicy(max_ms=1000)")
    return retry or RetryPolicy()


class ConnectionLost(Exception):
    """A connection broke, or could not be made where `connected` is False.

    `taken`: the server may have carried the request out. `ever_connected`: the role was there once.
    """

    def __init__(self, reason: str, *, taken: bool, connected: bool = True, ever_connected: bool = True) -> None:
        super().__init__(reason)
        self.taken = taken
        self.connected = connected
        self.ever_connected = ever_connected

    def told(self) -> MqprocError:
        """What a user sees whose request may be made again: the role is being restarted, or nobody is there."""
        if self.connected:
            return RetryLaterError(f"{self}; the role is being restarted, or has ended", hint_ms=RESTART_MS)
        return NotRunningError(
            f"{self}; no group serves this store now: mqproc up starts one, mqproc status says whether one is starting"
        )


class Attempts:
    """One request's attempts: says how long to wait before the next, or raises what the user shall see."""

    __slots__ = ("_count", "_deadline", "_known_again", "_policy", "_repeatable", "_taken")

    def __init__(self, policy: RetryPolicy, deadline: float, *, repeatable: bool, is_send: bool = False) -> None:
        self._policy = policy
        self._deadline = deadline
        self._repeatable = repeatable
        self._known_again = is_send and policy.repeat_sends
        self._taken = False  # An attempt that changes something may have been carried out.
        self._count = 0

    def pause_after(self, error: MqprocError | ConnectionLost, now: float) -> float:
        """Seconds to wait before trying again; raises when it must not be, or when the time is over."""
        if isinstance(error, ConnectionLost):
            self._taken |= error.taken and not self._repeatable
            seen = self._seen_after_loss(error)
            again = (not self._taken or self._known_again) and error.ever_connected
            hint_ms = 0
        else:
            seen = self._seen_after_timeout(error) if isinstance(error, RequestTimeoutError) else error
            if self._taken:
                seen = SendOutcomeUnknownError(f"{error}; an earlier attempt may have been carried out")
            again = error.retryable
            hint_ms = error.hint_ms
        pause_s = self._policy.pause_s(self._count, hint_ms)
        self._count += 1
        # An answer that the deadline cuts off would make an unknown outcome of what is known now.
        answered_s = min(pause_s, self._policy.max_ms / 1000)
        if not again or not self._policy.enabled or now + pause_s + answered_s >= self._deadline:
            raise seen from None
        return pause_s

    def given_up(self, why: str) -> MqprocError:
        """What a user sees whose request is not made again after all, for a reason of the client's own."""
        if self._taken:
            return SendOutcomeUnknownError(f"{why}; the request may have been carried out")
        return BadRequestError(why)

    def _seen_after_loss(self, error: ConnectionLost) -> MqprocError:
        if self._taken:
            return SendOutcomeUnknownError(f"{error}; the request may have been carried out")
        return error.told()

    def _seen_after_timeout(self, error: RequestTimeoutError) -> MqprocError:
        return error if self._repeatable else SendOutcomeUnknownError(f"{error}; the request may be carried out yet")
