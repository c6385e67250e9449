"""Waits until all messages written before can be found by queue, key and time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from mqproc.client import requests
from mqproc.client.connection import running_options
from mqproc.errors import (
    BadRequestError,
    ConfigurationError,
    NotRunningError,
    RequestTimeoutError,
    SendOutcomeUnknownError,
    StoreBusyError,
)
from mqproc.ipc.health import error_text
from mqproc.paths import StorePaths
from mqproc.util.arguments import moment_after

OUTCOME_UNKNOWN: Final = (SendOutcomeUnknownError, NotRunningError, RequestTimeoutError, StoreBusyError)
"""Errors after which the messages in flight may or may not be stored."""

# Each answer takes a step of the writer, and each step reads all connections with bytes.
DRAIN_PINGS: Final = 256
PATIENCE_S: Final = 60.0
_POLL_S: Final = 0.005


class CallRunner(Protocol):
    """A client."""

    def run(self, call: requests.Call[Any]) -> Any:
        """Make a call, again when that is safe; return its value or raise its error."""


class MonotonicClock(Protocol):
    """A monotonic clock."""

    def monotonic_ns(self) -> int: ...

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The system's monotonic clock."""

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@dataclass(frozen=True, slots=True)
class Patience:
    """Limits of a wait for dispatch, and a callback that gets the reason of a delay, once."""

    clock: MonotonicClock = field(default_factory=SystemClock)
    pings: int = DRAIN_PINGS
    seconds: float = PATIENCE_S
    on_delay: Callable[[str], None] = lambda text: None


def has_index(store_or_socket: str | Path) -> bool:
    """Whether a store can look up messages by id; True also when its options cannot be read."""
    try:
        return running_options(_paths_of(store_or_socket)).message_index_enable
    except (OSError, ValueError, ConfigurationError):
        return True


def check_index(store_or_socket: str | Path, instead: str = "") -> None:
    """Raise BadRequestError when a store has no index: it would find no message by its id.

    `instead` is an alternative, for the error.
    """
    if not has_index(store_or_socket):
        raise BadRequestError(
            f"{_paths_of(store_or_socket).root}: message_index_enable is off, so the store cannot say which messages "
            f"it has: they might be stored twice{instead}"
        )


def _paths_of(store_or_socket: str | Path) -> StorePaths:
    return StorePaths(requests.socket_paths(store_or_socket)[requests.WRITER].parent.parent)


def wait_for_index(client: CallRunner, patience: Patience | None = None) -> None:
    """Return when the index holds all messages that any client sent before this call.

    Raises RequestTimeoutError.

    Bytes that a dead client left in a socket have been processed by then, or are lost.
    """
    patience = patience or Patience()
    for _ in range(patience.pings):
        client.run(requests.ping(requests.WRITER))
    target = client.run(requests.stats())["written"]
    deadline_ns = patience.clock.monotonic_ns() + int(patience.seconds * 1e9)
    held_up = ""
    while (words := client.run(requests.stats()))["dispatched"] < target:
        if (waits := _dispatch_error(words)) and not held_up:
            patience.on_delay(f"{waits}; this waits {patience.seconds:g} s for it")
        held_up = waits
        if patience.clock.monotonic_ns() > deadline_ns:
            reason = held_up or "it is slow or blocked: see mqproc status"
            left = f"{target - words['dispatched']:,} bytes are left"
            raise RequestTimeoutError(f"dispatch has not caught up in {patience.seconds:g} s: {left}; {reason}")
        patience.clock.sleep(_POLL_S)


def _dispatch_error(words: Mapping[str, int]) -> str:
    """The error that dispatch waits for, "" without one."""
    return f"dispatch waits: {error_text(words['dispatch_errno'])}" if words["dispatch_errno"] else ""


class DispatchWait:
    """A wait until dispatch has passed the end of the log at its beginning. Without I/O."""

    def __init__(self, timeout_s: float) -> None:
        self._target = -1
        self._timeout_s = timeout_s
        self._deadline = moment_after("timeout", timeout_s)

    def reached(self, words: Mapping[str, int]) -> bool:
        """Check the control words. Raises RequestTimeoutError when the time is over."""
        if self._target < 0:
            self._target = words["written"]
        if words["dispatched"] >= self._target:
            return True
        if time.monotonic() > self._deadline:
            left = self._target - words["dispatched"]
            raise RequestTimeoutError(f"dispatch has not caught up in {self._timeout_s:g} s: {left:,} bytes are left")
        return False
