"""Error text of a timed-out request: peer, elapsed time, probable cause."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Final

from mqproc.client.connection import running_options
from mqproc.errors import MqprocError, RequestTimeoutError
from mqproc.ipc.control_words import read_words
from mqproc.ipc.health import ready_problems_of
from mqproc.paths import StorePaths

# Thousands of requests time out together: reading the control file for each would take longer than they have waited.
_CACHED_FOR_S: Final = 0.2
_cached: dict[Path, tuple[float, list[str]]] = {}


def no_answer(socket: Path, waited_s: float) -> RequestTimeoutError:
    """The error of a request to the role that listens at `socket`."""
    reason = "; ".join(_cached_problems(socket))
    return RequestTimeoutError(f"{socket}: no answer in {round(waited_s, 2):g} s{f', {reason}' if reason else ''}")


def _cached_problems(socket: Path) -> list[str]:
    now_s = time.monotonic()
    until_s, problems = _cached.get(socket, (0.0, []))
    if now_s >= until_s:
        problems = _problems(socket)
        for other, (ended_s, _) in list(_cached.items()):
            if now_s >= ended_s:
                _cached.pop(other, None)
        _cached[socket] = time.monotonic() + _CACHED_FOR_S, problems
    return problems


def _problems(socket: Path) -> list[str]:
    """Problems that the group's control file shows, if it can be read."""
    paths = StorePaths(socket.parent.parent)
    if paths.socket(socket.stem) != socket:
        return []
    with contextlib.suppress(MqprocError, OSError, ValueError):
        timeout_ms = running_options(paths).heartbeat_timeout_ms
        return ready_problems_of(read_words(paths), timeout_ms * 1_000_000)
    return []
