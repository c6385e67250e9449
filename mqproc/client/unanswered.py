"""What is told of a request without an answer in time: who gave none, after how long, and why, where that is known."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Final

from mqproc.control_words import read_words
from mqproc.errors import MqprocError, RequestTimeoutError
from mqproc.io import StoreIO
from mqproc.metrics.health import ready_problems_of
from mqproc.paths import StorePaths
from mqproc.store.settings import read_settings

# Requests run out of time by thousands together: to look for each of them would take longer than they have waited.
_KNOWN_FOR_S: Final = 0.2
_known: dict[Path, tuple[float, list[str]]] = {}


def no_answer(socket: Path, waited_s: float) -> RequestTimeoutError:
    """The error of a request to the role that listens at `socket`."""
    why = "; ".join(_problems_lately(socket))
    return RequestTimeoutError(f"{socket}: no answer in {round(waited_s, 2):g} s{f', {why}' if why else ''}")


def _problems_lately(socket: Path) -> list[str]:
    """What `_problems` says, or has said a moment ago."""
    now_s = time.monotonic()
    until_s, problems = _known.get(socket, (0.0, []))
    if now_s >= until_s:
        problems = _problems(socket)
        for other, (ended_s, _) in list(_known.items()):
            if now_s >= ended_s:
                _known.pop(other, None)
        _known[socket] = time.monotonic() + _KNOWN_FOR_S, problems
    return problems


def _problems(socket: Path) -> list[str]:
    """What the group's control file says is wrong: none where nothing is, or where that cannot be read."""
    paths = StorePaths(socket.parent.parent)
    if paths.socket(socket.stem) != socket:
        return []
    with contextlib.suppress(MqprocError, OSError, ValueError):
        timeout_ms = read_settings(StoreIO(), paths).heartbeat_timeout_ms
        return ready_problems_of(read_words(paths), timeout_ms * 1_000_000)
    return []
