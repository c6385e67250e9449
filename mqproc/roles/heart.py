"""A role's own words in the control file: that it is alive, what it is at, what it has done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from mqproc.control import Control
from mqproc.ipc.clock import Clock
from mqproc.ipc.histogram import Histogram
from mqproc.layout import control as layout
from mqproc.layout.figures import STEPS

BEAT_NS: Final = 50_000_000
"""A working role stores its heartbeat this often: far below the 250 ms at which the supervisor looks."""


class Heart:
    """A role's own words: heartbeat, state, counts. `changed` tells the supervisor that the state is another."""

    def __init__(self, control: Control, role: str, clock: Clock, changed: Callable[[], None] = lambda: None) -> None:
        self._control = control
        self._cells = control.words.cells
        self._clock = clock
        self._changed = changed
        self._heartbeat = layout.role_word(role, "heartbeat_ns")
        self._state = layout.role_word(role, "state")
        self._since = layout.role_word(role, "state_since_ns")
        self._cycles = layout.role_word(role, "cycles")
        self._errors = layout.role_word(role, "errors")
        self.due_ns = 0
        """When the next heartbeat is due."""
        self._steps = Histogram(control.words, STEPS[role])

    def beat(self) -> int:
        """Say "alive". Long work without `busy` calls this between its parts. Returns the clock's time."""
        now_ns = self._clock.monotonic_ns()
        self.due_ns = now_ns + BEAT_NS
        self._cells[self._heartbeat] = now_ns
        return now_ns

    def beat_if_due(self) -> None:
        """The same, cheap enough to be called often."""
        if self._clock.monotonic_ns() >= self.due_ns:
            self.beat()

    def enter(self, state: int) -> None:
        """Change the state: since when first, then what."""
        self.say(state)
        self._changed()

    def busy(self, state: int) -> Busy:
        """Around a call that may take seconds: STATE_SYNCING, STATE_ALLOCATING or STATE_RECOVERING."""
        return Busy(self, state)

    def say(self, state: int) -> int:
        """Be in this state from now on, for who looks; returns the one before."""
        cells = self._cells
        before = cells[self._state]
        now_ns = self._clock.monotonic_ns()
        self.due_ns = now_ns + BEAT_NS
        cells[self._heartbeat] = cells[self._since] = now_ns
        cells[self._state] = state
        return before

    def worked(self, steps: int) -> None:
        """Count steps that did something."""
        self._control.add(self._cycles, steps)

    def timed(self, took_ns: int, steps: int) -> None:
        """One step took so long, and counts for so many."""
        self._steps.observe(took_ns, steps)

    def failed(self) -> None:
        """Count a logged error."""
        self._control.add(self._errors, 1)


class Busy:
    """The time of a call that may take seconds. A class of its own: each message of a SYNC_FLUSH store has one."""

    __slots__ = ("_before", "_heart", "_state")

    def __init__(self, heart: Heart, state: int) -> None:
        self._heart = heart
        self._state = self._before = state

    def __enter__(self) -> None:
        self._before = self._heart.say(self._state)

    def __exit__(self, *_: object) -> None:
        self._heart.say(self._before)
