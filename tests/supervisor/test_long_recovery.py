"""During a long recovery the monitor runs; it ends if recovery fails.

Recovery runs in the supervisor, which does not watch roles until it is over. The loop then adopts the running monitor.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from mqproc.layout import control as layout
from tests.supervisor.running_group import RunningGroup, alive, wait_until

StartGroup = Callable[..., RunningGroup]

ROLES = "--roles=writer,monitor"
SILENT_MS = 2000


def in_recovery(start_group: StartGroup, *arguments: str) -> RunningGroup:
    """A group in recovery until `resume_recovery`, with a running monitor."""
    silent = f"--set=heartbeat_timeout_ms={SILENT_MS}"
    group = start_group(ROLES, "--recovery=held", silent, *arguments, wait=False)
    wait_until(lambda: any(line.startswith("recover ") for line in group.events), "recovery")
    wait_until(lambda: group.cycles(layout.MONITOR) > 0, "the monitor at work")
    return group


def resume_recovery(group: RunningGroup) -> None:
    (group.root / "go").touch()


def test_recovery_monitor_runs_during_and_after(start_group: StartGroup) -> None:
    before_ns = time.monotonic_ns()
    group = in_recovery(start_group)
    pid = group.pid(layout.MONITOR)
    began_ns = time.monotonic_ns()
    beaten = group.control.load(layout.SUPERVISOR_HEARTBEAT_NS)
    wait_until(lambda: time.monotonic_ns() - began_ns > 1.25e6 * SILENT_MS, "as long as would be silent")
    cycles = group.cycles(layout.MONITOR)
    wait_until(lambda: group.cycles(layout.MONITOR) > cycles, "it works on")
    assert group.control.load(layout.GROUP_STATE) == layout.GROUP_RECOVERING
    assert group.control.load(layout.SUPERVISOR_HEARTBEAT_NS) == beaten
    assert group.pid(layout.WRITER) == 0
    resume_recovery(group)
    group.wait_for_line("all serve")
    assert (group.pid(layout.MONITOR), group.word(layout.MONITOR, "incarnation")) == (pid, 1)
    assert not any("aborted" in line for line in group.lines)
    states = [line.split()[:2] for line in group.lines if line.startswith(("monitor", "writer", "recovery"))]
    assert states == [
        ["monitor", "STARTING,"],
        ["recovery:", "nothing"],
        ["monitor", "RUNNING,"],
        ["writer", "STARTING,"],
        ["writer", "RUNNING,"],
    ]
    (said,) = [line for line in group.lines if line.startswith("monitor RUNNING")]
    took_ms = float(said.split()[-2])
    assert took_ms <= (began_ns - before_ns) / 1e6, "its own start, not recovery's"
    assert group.stop() == 0


def test_recovery_dead_monitor_is_restarted_after(start_group: StartGroup) -> None:
    group = in_recovery(start_group)
    before = group.kill(layout.MONITOR)
    resume_recovery(group)
    group.wait_for_line("all serve")
    wait_until(lambda: group.running(layout.MONITOR) and group.pid(layout.MONITOR) not in (0, before), "a successor")
    assert (group.word(layout.MONITOR, "incarnation"), group.word(layout.MONITOR, "restarts")) == (2, 1)
    assert not alive(before)
    assert group.stop() == 0


def test_recovery_hung_monitor_is_replaced_after(start_group: StartGroup) -> None:
    group = in_recovery(start_group)
    wait_until(lambda: group.control.load(layout.role_word(layout.MONITOR, "sleeping")), "it waits")
    before = group.kill(layout.MONITOR, signal.SIGSTOP)
    resume_recovery(group)
    group.wait_for_line("while running: aborted")
    wait_until(lambda: group.running(layout.MONITOR) and group.pid(layout.MONITOR) not in (0, before), "a successor")
    assert group.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_recovery_interrupted_ends_monitor(start_group: StartGroup, number: signal.Signals) -> None:
    group = in_recovery(start_group)
    pid = group.pid(layout.MONITOR)
    assert group.stop(number) == 130
    assert not alive(pid)
    assert group.lock_is_free
    assert (group.root / "abort").exists()
    assert group.control.load(layout.GROUP_STATE) == layout.GROUP_DOWN


def test_recovery_failed_ends_monitor(start_group: StartGroup) -> None:
    group = start_group(ROLES, "--recovery=refuse", wait=False)
    assert group.wait() == 6
    assert group.errors == ["damaged below the mark"]
    assert any(line.startswith("monitor STARTING") for line in group.lines)
    assert group.lock_is_free


def test_recovery_killed_supervisor_ends_monitor(start_group: StartGroup) -> None:
    group = in_recovery(start_group)
    pid = group.pid(layout.MONITOR)
    group.process.kill()
    wait_until(lambda: not alive(pid), "no monitor")
    wait_until(lambda: group.lock_is_free, "no lock")
