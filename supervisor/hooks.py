"""The supervisor's interface to the engine, and the restart policy of roles."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mqproc.config.options import Options
from mqproc.io.store_io import Clock, StoreIO
from mqproc.ipc.control import Control
from mqproc.paths import StorePaths

Report = Callable[[str], None]
"""Receives a line for people: a state change, or a step of recovery."""


def lenient(report: Report) -> Report:
    """Wrap a report so that a closed output does not end the group."""

    def lenient_report(line: str) -> None:
        with contextlib.suppress(OSError):
            report(line)

    return lenient_report


@dataclass(frozen=True, slots=True)
class GroupContext:
    """The store as the supervisor's process has it open."""

    paths: StorePaths
    options: Options
    io: StoreIO
    clock: Clock
    control: Control
    report: Report
    clean: bool
    """No `abort` file existed: the previous group, of mqproc or RocketMQ, stopped cleanly."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """The engine's part of a group's life. An MqprocError aborts the start."""

    warm: Callable[[GroupContext], None] = lambda context: None
    """Load all compiled code before the template is forked, so that roles inherit it."""

    check: Callable[[GroupContext], None] = lambda context: None
    """Reject a store at first sight, without changes; `abort` is not written yet."""

    recover: Callable[[GroupContext], None] = lambda context: None
    """Recover files, control words and queue table, after the fork of the template and before any role but the
    monitor, which reads none of them in this state.
    """

    sync_active_segments: Callable[[str], int] = lambda role: 0
    """After the death of a role that syncs: sync its files through descriptors opened earlier, which report
    errors that it may have consumed. Return an errno or 0. Not called after a failed sync.
    """

    watch: Callable[[], None] = lambda: None
    """Called at each tick: keep the descriptors for these syncs open on the segments in use."""

    lost_file: Callable[[], Path | None] = lambda: None
    """Called at each tick: return a file in use that was deleted, moved or replaced; then the group ends."""

    finish: Callable[[GroupContext, bool], None] = lambda context, clean: None
    """Called after all roles but the monitor have stopped: after a clean stop, write marks and checkpoint."""

    reload: Callable[[], Options] | None = None
    """Read the options again. Raises ConfigurationError."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Intervals and timeouts of the supervisor. Tests shorten them."""

    tick_ms: int = 250
    ring_ms: int = 1_000
    """Interval of posting every bell: semaphores wait by the wall clock, which may be set back."""
    abort_grace_ms: int = 2_000
    """Time from SIGABRT, which logs a stack, to SIGKILL."""
    stop_ms: int = 120_000
    """Time from SIGTERM to SIGABRT."""
    quick_stop_ms: int = 2_000
    """The same after a second SIGINT."""
    take_back_ms: int = 2_000
    """The same for an attached role without client, which may be stopped in a debugger."""
    spawn_ms: int = 5_000
    """Timeout of the template's answer."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a group ended."""

    exit_code: int
    reason: str


# Restart policy, over a role's last unexpected deaths:
#
#     first death                    restart at once
#     repeated early deaths          wait 0.1 s, 0.2 s, 0.4 s … before the next start
#     fifth death within 60 s        halt the group
#     fifth death before it ran      halt the group, also if each start hung for minutes
#     exit code 2, 3, 6, 7 or 8      halt the group with it: a restart would not help
#
# After a long life the next death counts as the first. A start for which no process can be created, as at a limit of
# processes, is no death: it is repeated with the same pauses.


FINAL_EXIT_CODES: Final = frozenset({2, 3, 6, 7, 8})
EXIT_FAILED: Final = 1
EXIT_NOT_BOOTED: Final = 3
EXIT_INTERRUPTED: Final = 130
_DOUBLINGS_MAX: Final = 16
_REMARKS: Final = {signal.SIGKILL: "perhaps out of memory", signal.SIGBUS: "an inaccessible mapped page"}


@dataclass(frozen=True, slots=True)
class Death:
    """How a process ended: exit code, or signal (then `code` is −1)."""

    code: int
    signal: int = 0
    lived_ms: float = 0.0

    @classmethod
    def of(cls, result: os.waitid_result, lived_ms: float) -> Death:
        """Convert the result of `os.waitid`."""
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
    """Parameters of the policy. A death is early within `early_ms` of the start."""

    early_ms: int = 10_000
    back_off_ms: int = 100
    back_off_ms_max: int = 5_000
    deaths_max: int = 5
    window_ms: int = 60_000

    def delay_ms(self, tries: int) -> int:
        """Pause before the next start, after this number of failed starts."""
        return min(self.back_off_ms << min(tries - 1, _DOUBLINGS_MAX), self.back_off_ms_max)


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
    """Deaths of one role."""

    def __init__(self, role: str, policy: RestartPolicy) -> None:
        self._role = role
        self._policy = policy
        self._times_ns: deque[int] = deque(maxlen=policy.deaths_max)
        self._early = 0
        self._deaths_before_run = 0

    def decide(self, death: Death, now_ns: int, *, has_run: bool = True) -> Restart | Halt:
        """Record a death and decide; `has_run`: this process or an earlier one reached its loop."""
        if death.code in FINAL_EXIT_CODES:
            return Halt(death.code, f"{self._role} ended with {death}, which a restart does not fix")
        policy = self._policy
        self._times_ns.append(now_ns)
        within_ms = (now_ns - self._times_ns[0]) // 1_000_000
        if len(self._times_ns) == policy.deaths_max and within_ms <= policy.window_ms:
            times = f"{policy.deaths_max} times within {policy.window_ms // 1000} s"
            return Halt(EXIT_FAILED, f"{self._role} died {times}, last by {death}")
        self._deaths_before_run = 0 if has_run else self._deaths_before_run + 1
        if self._deaths_before_run == policy.deaths_max:
            return Halt(
                EXIT_FAILED, f"{self._role} died {self._deaths_before_run} times before it ran, last by {death}"
            )
        if death.lived_ms >= policy.early_ms:
            self._early = 0
            return Restart(0)
        self._early += 1
        return Restart(self._back_off_ms())

    def _back_off_ms(self) -> int:
        if self._early < 2:
            return 0
        return self._policy.delay_ms(self._early - 1)
