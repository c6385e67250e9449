"""What the supervisor is given: it keeps processes alive, and knows nothing of logs, queues and indexes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from mqproc.config import Options
from mqproc.control import Control
from mqproc.io import StoreIO
from mqproc.ipc.clock import Clock
from mqproc.paths import StorePaths

Report = Callable[[str], None]
"""Takes one line for people: a change of state, a step of recovery."""


def lenient(report: Report) -> Report:
    """A reader of the lines that has gone away must not end the group."""

    def tell(line: str) -> None:
        with contextlib.suppress(OSError):
            report(line)

    return tell


@dataclass(frozen=True, slots=True)
class GroupContext:
    """The store as the supervisor's own process has it."""

    paths: StorePaths
    options: Options
    io: StoreIO
    clock: Clock
    control: Control
    report: Report
    clean: bool
    """No `abort` file was there: the last group, ours or RocketMQ's, stopped in order."""


def _nothing(context: GroupContext) -> None:
    return


def _no_sync(role: str) -> int:
    return 0


def _no_finish(context: GroupContext, clean: bool) -> None:
    return


@dataclass(frozen=True, slots=True)
class Hooks:
    """The engine's part of a group's life. All run in the supervisor; a MqprocError ends the start with its code."""

    warm: Callable[[GroupContext], None] = _nothing
    """Load and call everything compiled, so that forked roles find it ready. Before the template is forked."""

    check: Callable[[GroupContext], None] = _nothing
    """Raise for what a start refuses at first sight. It changes nothing; `abort` is not written yet."""

    recover: Callable[[GroupContext], None] = _nothing
    """Make files, control words and queue table agree. After the template is forked, before any role but the monitor
    starts, which reads none of it until the group's state is another."""

    sync_active_segments: Callable[[str], int] = _no_sync
    """A role that syncs (its name is given) has died: sync what it had open through descriptors that were open
    before, which report an error that the dead one may have seen. Returns an errno, 0 when all is well. Not called
    any more once a sync has failed."""

    watch: Callable[[], None] = lambda: None
    """Called at each tick while the group runs: keep those descriptors at the segments in use."""

    finish: Callable[[GroupContext, bool], None] = _no_finish
    """All but the monitor have stopped, in order if the flag is true: marks and checkpoint. Then `abort` goes."""

    reload: Callable[[], Options] | None = None
    """Read the options again; raises ConfigurationError."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How often the supervisor looks, and how long it waits. Tests shorten these."""

    tick_ms: int = 250
    ring_ms: int = 1_000
    """Every bell is posted this often: a semaphore's wait goes by the wall clock, which may be set back."""
    abort_grace_ms: int = 2_000
    """From SIGABRT, which leaves a stack in the log, to SIGKILL."""
    stop_ms: int = 120_000
    """From SIGTERM to SIGABRT."""
    quick_stop_ms: int = 2_000
    """The same after a second SIGINT."""
    take_back_ms: int = 2_000
    """The same for a lent role whose borrower has gone: it may sit in a debugger that nobody answers."""
    spawn_ms: int = 5_000
    """For the template's answer."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a group ended."""

    exit_code: int
    reason: str
