"""After lost answers: until the index knows of every message that the writer may have taken."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from mqproc.client import requests as core
from mqproc.client.arguments import moment_after
from mqproc.errors import (
    BadRequestError,
    ConfigurationError,
    NotRunningError,
    RequestTimeoutError,
    SendOutcomeUnknownError,
    StoreBusyError,
)
from mqproc.io.clock import Clock
from mqproc.io.store_io import StoreIO
from mqproc.ipc.health import error_text
from mqproc.paths import StorePaths
from mqproc.store.settings import read_settings

UNSETTLED: Final = (SendOutcomeUnknownError, NotRunningError, RequestTimeoutError, StoreBusyError)
"""Errors after which it is not known which of the messages under way are stored."""

# Each answer is a step of the writer's, and each step reads every connection that has bytes.
DRAIN_PINGS: Final = 256
PATIENCE_S: Final = 60.0
_POLL_S: Final = 0.005


class Runs(Protocol):
    """What makes calls, again when that is safe: a client."""

    def run(self, call: core.Call[Any]) -> Any:
        """The call's value; raises its error."""


def _tell_nobody(text: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Patience:
    """How one waits for a store, and who is told, once, of what keeps it."""

    clock: Clock = field(default_factory=Clock)
    pings: int = DRAIN_PINGS
    seconds: float = PATIENCE_S
    told: Callable[[str], None] = _tell_nobody


def has_index(store_or_socket: str | Path) -> bool:
    """Whether a store can say which messages it has; True also for one that does not tell its options."""
    paths = _paths_of(store_or_socket)
    try:
        return read_settings(StoreIO(), paths).message_index_enable
    except (OSError, ValueError, ConfigurationError):
        return True


def check_index(store_or_socket: str | Path, instead: str = "") -> None:
    """Raise BadRequestError when a store has no index: asked for a message by its id, it says that it has none.

    `instead` is what else one may do, for the error.
    """
    if not has_index(store_or_socket):
        raise BadRequestError(
            f"{_paths_of(store_or_socket).root}: message_index_enable is off, so the store cannot say which messages "
            f"it has: they might come twice{instead}"
        )


def _paths_of(store_or_socket: str | Path) -> StorePaths:
    return StorePaths(core.socket_paths(store_or_socket)[core.WRITER].parent.parent)


def settle(client: Runs, patience: Patience | None = None) -> None:
    """Return when the index holds all that anybody had sent before this call. Raises RequestTimeoutError.

    What a client that is dead or cut off left in a socket has been taken by then, or is lost.
    """
    patience = patience or Patience()
    for _ in range(patience.pings):
        client.run(core.ping(core.WRITER))
    target = client.run(core.stats())["written"]
    deadline_ns = patience.clock.monotonic_ns() + int(patience.seconds * 1e9)
    held_up = ""
    while (words := client.run(core.stats()))["dispatched"] < target:
        if (waits := _what_holds_up(words)) and not held_up:
            patience.told(f"{waits}; this waits {patience.seconds:g} s for it")
        held_up = waits
        if patience.clock.monotonic_ns() > deadline_ns:
            why = held_up or "it is slow or stands still: mqproc status tells more"
            left = f"{target - words['dispatched']:,} bytes are left"
            raise RequestTimeoutError(f"dispatch has not caught up in {patience.seconds:g} s: {left}; {why}")
        patience.clock.sleep(_POLL_S)


def _what_holds_up(words: Mapping[str, int]) -> str:
    """What dispatch says that it waits for; "" when it goes on."""
    return f"dispatch waits: {error_text(words['dispatch_errno'])}" if words["dispatch_errno"] else ""


# --- dispatch_wait ---
# Waiting until what is written can be read from its queues, without I/O: shared by the sync and the async client.


class DispatchWait:
    """Waiting until dispatch has passed what was written when the waiting began."""

    def __init__(self, timeout_s: float) -> None:
        self._target = -1
        self._timeout_s = timeout_s
        self._deadline = moment_after("timeout", timeout_s)

    def reached(self, words: Mapping[str, int]) -> bool:
        """Look at the control words. Raises RequestTimeoutError when the time is over."""
        if self._target < 0:
            self._target = words["written"]
        if words["dispatched"] >= self._target:
            return True
        if time.monotonic() > self._deadline:
            behind = self._target - words["dispatched"]
            raise RequestTimeoutError(f"dispatch is still {behind:,} bytes behind after {self._timeout_s:g} s")
        return False
