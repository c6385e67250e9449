"""What the supervisor is given: it keeps processes alive, and knows nothing of logs, queues and indexes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from mqproc.config.options import Options
from mqproc.io.clock import Clock
from mqproc.io.store_io import StoreIO
from mqproc.ipc.control import Control
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


# --- restarts ---
# What to do when a role has died unasked: a policy over its last deaths, no processes.
#
#     first death                    start again at once
#     dies early again and again     wait 0.1 s, 0.2 s, 0.4 s … before the next start
#     the fifth death within 60 s    the group halts
#     the fifth before it ever ran   the group halts, also where each start has hung for minutes
#     exit code 2, 3, 6, 7 or 8      the group halts with it: a restart would not cure it
#
# A long life makes the next death a first one again.


FINAL_EXIT_CODES: Final = frozenset({2, 3, 6, 7, 8})
EXIT_FAILED: Final = 1
_REMARKS: Final = {signal.SIGKILL: "perhaps out of memory", signal.SIGBUS: "an inaccessible mapped page"}


@dataclass(frozen=True, slots=True)
class Death:
    """How a process ended: by an exit code, or by a signal (then `code` is −1)."""

    code: int
    signal: int = 0
    lived_ms: float = 0.0

    @classmethod
    def of(cls, result: os.waitid_result, lived_ms: float) -> Death:
        """From what `os.waitid` says."""
        if result.si_code == os.CLD_EXITED:
            return cls(result.si_status, 0, lived_ms)
        return cls(-1, result.si_status, lived_ms)

    @property
    def clean(self) -> bool:
        return self.code == 0

    def __str__(self) -> str:
        if not self.signal:
            return f"exit code {self.code}"
        try:
            name = signal.Signals(self.signal).name
        except ValueError:
            name = f"signal {self.signal}"
        remark = _REMARKS.get(self.signal)  # type: ignore[call-overload]
        return f"{name} ({remark})" if remark else name


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """The numbers. An early death is one within `early_ms` of the start."""

    early_ms: int = 10_000
    back_off_ms: int = 100
    back_off_ms_max: int = 5_000
    deaths_max: int = 5
    window_ms: int = 60_000


@dataclass(frozen=True, slots=True)
class Restart:
    """Start again after a pause."""

    delay_ms: int


@dataclass(frozen=True, slots=True)
class Halt:
    """Stop the group with this exit code."""

    exit_code: int
    reason: str


class Deaths:
    """The deaths of one role, and what follows from each."""

    def __init__(self, role: str, policy: RestartPolicy) -> None:
        self._role = role
        self._policy = policy
        self._times_ns: deque[int] = deque(maxlen=policy.deaths_max)
        self._early = 0
        self._in_vain = 0

    def decide(self, death: Death, now_ns: int, *, has_run: bool = True) -> Restart | Halt:
        """Count a death and say what to do; `has_run`: this process or one before it has come to its work."""
        if death.code in FINAL_EXIT_CODES:
            return Halt(death.code, f"{self._role} ended with {death}, which a restart does not cure")
        policy = self._policy
        self._times_ns.append(now_ns)
        within_ms = (now_ns - self._times_ns[0]) // 1_000_000
        if len(self._times_ns) == policy.deaths_max and within_ms <= policy.window_ms:
            times = f"{policy.deaths_max} times within {policy.window_ms // 1000} s"
            return Halt(EXIT_FAILED, f"{self._role} died {times}, at last by {death}")
        self._in_vain = 0 if has_run else self._in_vain + 1
        if self._in_vain == policy.deaths_max:
            return Halt(EXIT_FAILED, f"{self._role} died {self._in_vain} times before it ever ran, at last by {death}")
        if death.lived_ms >= policy.early_ms:
            self._early = 0
            return Restart(0)
        self._early += 1
        return Restart(self._back_off_ms())

    def _back_off_ms(self) -> int:
        if self._early < 2:
            return 0
        return min(self._policy.back_off_ms << (self._early - 2), self._policy.back_off_ms_max)
