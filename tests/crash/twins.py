"""Kernels as the plain functions they were written as: what they store in maps is seen line by line.

A compiled kernel stores in a map without a call that could be told of; interpreted ones (NUMBA_DISABLE_JIT=1) are
traced. Each line's store is a version of its page that a power loss may leave, and behind each a role may be killed.
"""

from __future__ import annotations

import random
import sys
import weakref
from types import FrameType
from typing import Any, Final

from greenlet import getcurrent

from mqproc.kernels import index
from mqproc.kernels.jit import compile as jit
from tests.crash.recording_io import Killed, Machine

# The kernels that store in maps of files that a power loss leaves; all other files are written by calls.
STORING: Final = frozenset(
    jit.plain(kernel).__code__
    for kernel in (index.put_entries, index.roll_back, index.rebuild_links, index.store_slots)
)
LINES_UNTIL_KILL_MAX: Final = 200


class Lines:
    """Sees what kernels store in the files of machines; nothing, and at no cost, where they are compiled."""

    def __init__(self) -> None:
        self._machines: weakref.WeakSet[Machine] = weakref.WeakSet()
        self._main = getcurrent()
        self.seen = 0
        """Lines that have run."""

    def watch(self, machine: Machine) -> None:
        """See what kernels store on one machine more, as long as it is there."""
        self._machines.add(machine)

    def kill_amid(self, machine: Machine, rng: random.Random) -> None:
        """Have the role killed there that runs one of the next lines, any of them."""
        if not jit.COMPILED:
            machine.lines_until_kill = rng.randint(1, LINES_UNTIL_KILL_MAX)

    def __enter__(self) -> None:
        self.go_on()

    def __exit__(self, *_error: object) -> None:
        if not jit.COMPILED:
            sys.settrace(None)

    def go_on(self) -> None:
        """Begin, or go on after a kill: Python ends a trace that raises."""
        if not jit.COMPILED:
            sys.settrace(self._enter)

    def _enter(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        return self._line if frame.f_code in STORING else None

    def _line(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        """Before each line, and when a kernel returns."""
        self.seen += 1
        for machine in list(self._machines):
            if machine.disk.has_maps:
                machine.disk.observe()
            if machine.lines_until_kill and not machine.over and getcurrent() is not self._main:
                machine.lines_until_kill -= 1
                if not machine.lines_until_kill:
                    self._kill(machine, frame)
        return self._line

    def _kill(self, machine: Machine, frame: FrameType) -> None:
        machine.journal.note("point", f"{frame.f_code.co_name}:{frame.f_lineno}")
        raise Killed
