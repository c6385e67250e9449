"""What is told of a request without an answer in time: who gave none, after how long, and why, where that is known."""

from __future__ import annotations

import contextlib
from pathlib import Path

from mqproc.control_words import read_words
from mqproc.errors import MqprocError, RequestTimeoutError
from mqproc.io import StoreIO
from mqproc.metrics.health import ready_problems_of
from mqproc.paths import StorePaths
from mqproc.store.settings import read_settings


def no_answer(socket: Path, waited_s: float) -> RequestTimeoutError:
    """The error of a request to the role that listens at `socket`."""
    why = "; ".join(_problems(socket))
    return RequestTimeoutError(f"{socket}: no answer in {round(waited_s, 2):g} s{f', {why}' if why else ''}")


def _problems(socket: Path) -> list[str]:
    """What the group's control file says is wrong: none where nothing is, or where that cannot be read."""
    paths = StorePaths(socket.parent.parent)
    if paths.socket(socket.stem) != socket:
        return []
    with contextlib.suppress(MqprocError, OSError, ValueError):
        timeout_ms = read_settings(StoreIO(), paths).heartbeat_timeout_ms
        return ready_problems_of(read_words(paths), timeout_ms * 1_000_000)
    return []
