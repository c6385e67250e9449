"""Processes as greenlets of one process: at each storage call, and at each pause, another one may go on."""

from __future__ import annotations

import random
from collections.abc import Callable

from greenlet import getcurrent, greenlet

from mqproc.io.clock import Clock
from tests.crash.journal import Journal
from tests.crash.recording_io import Killed

LONG_JUMP_MS = 1_100
STORE_TIME_AHEAD_MS = 60_000


class Schedule:
    """Runs tasks in turns that a seed decides. `failure` is what ended a task that should not have ended."""

    def __init__(self, rng: random.Random, journal: Journal) -> None:
        self._rng = rng
        self._journal = journal
        self._main = getcurrent()
        self._tasks: dict[str, greenlet] = {}
        self._names: list[str] = []
        self.failure: BaseException | None = None

    def add(self, name: str, work: Callable[[], None]) -> None:
        """A task of that name, from the next turn on."""
        self._tasks[name] = greenlet(lambda: self._guarded(name, work), parent=self._main)
        self._names = sorted(self._tasks)

    def _guarded(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Killed:
            pass
        except BaseException as error:
            error.add_note(f"in task {name}")
            self.failure = error
        finally:
            self._forget(name)

    def _forget(self, name: str) -> None:
        self._tasks.pop(name, None)
        self._names = sorted(self._tasks)

    @property
    def names(self) -> list[str]:
        return self._names

    def turn(self, name: str = "") -> None:
        """Let one task go on, a random one unless named, to its next pause."""
        names = [name] if name else self.names
        task = self._tasks.get(chosen := self._rng.choice(names)) if names else None
        if task is not None:
            self._journal.note("turn", chosen)
            task.switch()
        if self.failure is not None:
            raise self.failure

    def pause(self) -> None:
        """Called by a task: others may go on. The main task, which runs alone, has no others."""
        if getcurrent() is not self._main:
            self._main.switch()

    def end(self, name: str) -> None:
        """Unwind a task whose storage is dead already."""
        task = self._tasks.get(name)
        if task is None:
            return
        while not task.dead:
            try:
                task.throw(Killed)
            except Killed:
                break  # It had not begun.
        self._forget(name)

    def end_all(self) -> None:
        """Unwind all tasks."""
        for name in self.names:
            self.end(name)


class SimulatedClock(Clock):
    """Time that passes when the schedule lets it, and in sleeps."""

    def __init__(self, schedule: Schedule, time_ms: int) -> None:
        self._schedule = schedule
        self._ns = 1_000_000_000
        self._offset_ms = time_ms - 1_000
        self.latest_ms = time_ms
        """The latest time that anybody was told."""
        self.set_back = False
        """It was set back by more than store times stay ahead of it."""

    def monotonic_ns(self) -> int:
        return self._ns

    def time_ms(self) -> int:
        now_ms = self._offset_ms + self._ns // 1_000_000
        self.latest_ms = max(self.latest_ms, now_ms)
        return now_ms

    def sleep(self, seconds: float) -> None:
        self._ns += int(seconds * 1e9)
        self._schedule.pause()

    def advance(self, ms: int) -> None:
        """Time passes."""
        self._ns += ms * 1_000_000

    def step(self, ms: int) -> None:
        """Somebody sets the machine's clock by this much."""
        self._offset_ms += ms
        self.set_back = self.set_back or ms < -STORE_TIME_AHEAD_MS
