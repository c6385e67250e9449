"""`--detach`: the report to the caller, the background start, and the log file."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil

from mqproc.layout import control as layout
from mqproc.wire.operations import Operation
from tests.supervisor.running_group import RunningGroup, wait_until
from tests.support.command_line import call

StartGroup = Callable[..., RunningGroup]
FEW = "--roles=writer,dispatcher"


class TestDetach:
    def test_detach_returns_when_ready_and_group_continues(self, start_group: StartGroup) -> None:
        group = start_group(FEW, "--detach", wait=False)
        assert group.wait() == 0
        assert group.lines[-1] == "outcome 0: ready"
        assert "writer RUNNING" in " ".join(group.lines)
        pid = group.pid("supervisor")
        assert psutil.Process(pid).ppid() != os.getpid()
        assert os.getsid(pid) not in (pid, os.getsid(0))
        assert group.control.load(layout.GROUP_STATE) == layout.GROUP_READY
        log = (group.root / "mqproc" / "log.jsonl").read_text()
        assert '"event": "group ready"' in log
        group.ask(Operation.STOP_GROUP)
        wait_until(lambda: group.lock_is_free)

    def test_detach_failed_start_returns_reason(self, start_group: StartGroup) -> None:
        group = start_group(FEW, "--detach", "--recovery=refuse", wait=False)
        assert group.wait() == 6
        assert group.lines[-1] == "outcome 6: damaged below the mark"

    def test_detach_names_unreadable_page_of_recovery(self, start_group: StartGroup) -> None:
        """After SIGBUS the supervisor ended without a report."""
        group = start_group(FEW, "--detach", "--recovery=cut", wait=False)
        assert group.wait() == 1
        message = f"{group.root}/short: offset 5,000: the file was truncated while it was read"
        assert group.lines[-1] == f"outcome 1: {message}"
        wait_until(lambda: group.lock_is_free)
        assert message in (group.root / "mqproc" / "log.jsonl").read_text()

    def test_detach_unwritable_log_is_reported(self, start_group: StartGroup, tmp_path: Path) -> None:
        log = tmp_path / "store" / "mqproc" / "log.jsonl"
        log.parent.mkdir(parents=True, mode=0o700)
        log.symlink_to(tmp_path / "gone" / "log")
        group = start_group(FEW, "--detach", wait=False)
        assert group.wait() == 3
        assert group.lines[-1] == f"outcome 3: {log}: a symlink, through which nothing is written"
        assert group.errors == []

    def test_detach_timeout_leaves_start_running(self, start_group: StartGroup) -> None:
        group = start_group(FEW, "--detach", "--timeout=0.5", "--recovery=held", wait=False)
        assert group.wait() == 4
        assert group.lines[-1] == (
            f"outcome 4: {group.root}: the group is not ready after 0.5 s; the start continues in the background: "
            f"mqproc status --store {group.root} shows its progress, mqproc down --store {group.root} ends it"
        )
        _let_start_and_stop(group)

    def test_detach_timeout_includes_earlier_work(self, start_group: StartGroup) -> None:
        group = start_group(FEW, "--detach", "--timeout=600", "--began-before=601", "--recovery=held", wait=False)
        assert group.wait() == 4
        assert "the group is not ready after 600 s; the start continues" in group.lines[-1]
        wait_until(lambda: "recover clean" in group.events, "recovery")
        _let_start_and_stop(group)

    def test_detach_ctrl_c_ends_wait_and_is_reported(self, start_group: StartGroup) -> None:
        group = start_group(FEW, "--detach", "--recovery=held", wait=False)
        wait_until(lambda: "recover clean" in group.events, "recovery")
        group.process.send_signal(signal.SIGINT)
        assert group.wait() == 130
        assert f"outcome 130: {group.root}: wait interrupted; the start continues" in group.lines[-1]
        _let_start_and_stop(group)

    def test_detach_ctrl_c_before_setsid_does_not_end_start(self, start_group: StartGroup) -> None:
        group = start_group(FEW, "--detach", "--ctrl-c-at-setsid", wait=False)
        assert group.wait() == 0
        assert group.lines[-1] == "outcome 0: ready"
        group.ask(Operation.STOP_GROUP)
        wait_until(lambda: group.lock_is_free)

    def test_detach_group_is_found_while_kernels_compile(self, start_group: StartGroup) -> None:
        group = start_group(FEW, "--detach", "--timeout=0.1", "--recovery=warms", wait=False)
        assert group.wait() == 4
        wait_until(lambda: "warm" in group.events, "kernels are made ready")
        status = call("status", "--store", group.root)
        assert (status.code, f"{group.root}: recovering, not ready" in status.out) == (1, True), status
        assert "✗ the group is recovering: making kernels ready" in status.out
        assert call("down", "--store", group.root).code == 0
        wait_until(lambda: group.lock_is_free)
        assert not list(group.paths.own.glob("*.sock")), "no names stay"


def _let_start_and_stop(group: RunningGroup) -> None:
    (group.root / "go").touch()
    wait_until(lambda: group.control.load(layout.GROUP_STATE) == layout.GROUP_READY, "group ready")
    group.ask(Operation.STOP_GROUP)
    wait_until(lambda: group.lock_is_free)


class TestRotatedLog:
    """SIGUSR1 after the log file was moved away."""

    def test_reopen_log_moves_every_process_to_new_file(self, start_group: StartGroup) -> None:
        group = start_group(FEW, "--detach", wait=False)
        assert group.wait() == 0
        log = group.paths.log
        moved = log.rename(log.with_suffix(".1"))
        group.kill("supervisor", signal.SIGUSR1)
        wait_until(log.exists)
        everybody = ("supervisor", "template", "writer", "dispatcher")
        wait_until(lambda: {_output_of(group.pid(role)) for role in everybody} == {(log.stat().st_ino,) * 2})
        wait_until(lambda: "log file reopened" in log.read_text())
        assert "reopened" not in moved.read_text()
        group.kill_and_wait("writer")
        assert _output_of(group.pid("writer")) == (log.stat().st_ino,) * 2
        assert "writer EXITED" in log.read_text()
        group.ask(Operation.STOP_GROUP)
        wait_until(lambda: group.lock_is_free)

    def test_reopen_log_failure_keeps_old_file(self, start_group: StartGroup) -> None:
        group = start_group(FEW, "--detach", wait=False)
        assert group.wait() == 0
        log = group.paths.log
        moved = log.rename(log.with_suffix(".1"))
        log.mkdir()
        group.kill("supervisor", signal.SIGUSR1)
        wait_until(lambda: "log file not reopened, the old one is used: [Errno 21]" in moved.read_text())
        group.ask(Operation.STOP_GROUP)
        wait_until(lambda: group.lock_is_free)

    def test_reopen_log_foreground_group_keeps_output(self, start_group: StartGroup) -> None:
        group = start_group(FEW)
        before = _output_of(group.process.pid)
        for role in ("supervisor", "template", "writer"):
            group.kill(role, signal.SIGUSR1)
        group.ask(Operation.STATUS)
        assert _output_of(group.process.pid) == before
        assert not group.paths.log.exists()
        assert group.stop() == 0


def _output_of(pid: int) -> tuple[int, int]:
    """Inodes of a process's standard output and error."""
    return os.stat(f"/proc/{pid}/fd/1").st_ino, os.stat(f"/proc/{pid}/fd/2").st_ino
