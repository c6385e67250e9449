"""Children that the supervisor has without knowing them.

A template that died between two forks leaves some; as process 1 of a container, and as subreaper, the supervisor gets
every orphan.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Final

import psutil

_ROUNDS_MAX: Final = 100


class Strays:
    """Made before the first fork: children that the process had already are not ours to end."""

    def __init__(self) -> None:
        self._foreign = _children()

    def reap(self, known: frozenset[int] = frozenset()) -> int:
        """Kill and wait for every child but the known ones; returns how many there were.

        In rounds, because a stray may have forked before it was killed: its child is then ours in the next round.
        """
        count = 0
        for _ in range(_ROUNDS_MAX):
            strays = _children() - known - self._foreign
            if not strays:
                break
            for pid in strays:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for pid in strays:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
            count += len(strays)
        return count

    def bury(self, known: frozenset[int]) -> int:
        """Wait for those that have ended by themselves, the known ones left out; returns how many there were."""
        count = 0
        for pid in _children() - known - self._foreign:
            with contextlib.suppress(ChildProcessError):
                count += os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG) is not None
        return count


def _children() -> frozenset[int]:
    """Living and dead children of this process."""
    pid = os.getpid()
    try:
        with open(f"/proc/self/task/{pid}/children", encoding="ascii") as file:
            return frozenset(map(int, file.read().split()))
    except FileNotFoundError:  # The kernel was built without this file.
        return frozenset(child.pid for child in psutil.Process(pid).children())
