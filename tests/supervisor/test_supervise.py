"""The supervisor with real processes and signals: restarts, halts, and the resulting state.

The fixture checks after every test: no process of the store is left, and no role ever ran twice at a time.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import statistics
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from mqproc.errors import BadRequestError, ConfigurationError, StoreAccessError, UnknownCommandError
from mqproc.io.store_io import REPLACING_SUFFIX, StoreIO
from mqproc.ipc.control import Control
from mqproc.ipc.error_log import seen_errors
from mqproc.layout import control as layout
from mqproc.wire.operations import Operation, RoleRequest, StatusAnswer
from tests.supervisor.running_group import RunningGroup, alive, first_in_line, titles_of, wait_until
from tests.support.command_line import call
from tests.support.group import assert_below

StartGroup = Callable[..., RunningGroup]

SETTLED_MS = 100  # documented maximum for a role's restart
STOPS = ["keeper", "writer", "commitlog-flusher", "dispatcher", "query"]
FEW = "--roles=writer,dispatcher"


def closes(group: RunningGroup) -> list[str]:
    """Roles in the order of their end; `finish` is the write of marks and checkpoint."""
    return [line.split()[0] for line in group.events if line.endswith(" close") or line == "finish clean"]


class TestRunning:
    """A running group observed from outside; these tests change nothing."""

    def test_processes_have_titles(self, quiet_group: RunningGroup) -> None:
        names = {title.split()[1] for title in titles_of(quiet_group.root).values()}
        assert names == {"supervisor", "template", *layout.ROLES}

    def test_roles_are_children_of_supervisor(self, quiet_group: RunningGroup) -> None:
        children = {child.pid for child in psutil.Process(quiet_group.process.pid).children()}
        assert children == {quiet_group.pid(name) for name in (*layout.ROLES, "template")}

    def test_kernels_are_compiled_by_children_first(self, quiet_group: RunningGroup) -> None:
        """The compiler's 34 MB would remain in the supervisor."""
        assert quiet_group.events[:2] == ["warm", "bells warm"]

    def test_ctrl_c_reaches_supervisor_only(self, quiet_group: RunningGroup) -> None:
        assert os.getpgid(quiet_group.pid("writer")) != os.getpgid(quiet_group.process.pid)

    def test_role_has_only_its_own_sockets(self, quiet_group: RunningGroup) -> None:
        def sockets(role: str) -> int:
            folder = Path(f"/proc/{quiet_group.pid(role)}/fd")
            return sum(os.readlink(link).startswith("socket:") for link in folder.iterdir())

        assert [sockets(role) for role in ("writer", "query", "dispatcher")] == [1, 1, 0]

    def test_roles_hold_the_lock(self, quiet_group: RunningGroup) -> None:
        lock = str(quiet_group.paths.lock)
        for role in (*layout.ROLES, "template"):
            folder = Path(f"/proc/{quiet_group.pid(role)}/fd")
            assert lock in [os.readlink(link) for link in folder.iterdir()], role

    def test_semaphores_are_unlinked(self, quiet_group: RunningGroup) -> None:
        prefix = f"sem.{quiet_group.control.load(layout.STORE_ID):016x}"
        assert not [name for name in os.listdir("/dev/shm") if name.startswith(prefix)]

    def test_idle_roles_send_heartbeats(self, quiet_group: RunningGroup) -> None:
        index = layout.role_word("keeper", "heartbeat_ns")

        def silent_ms() -> float:
            before = quiet_group.control.load(index)
            return wait_until(lambda: quiet_group.control.load(index) > before, "a heartbeat")

        assert_below(2000, silent_ms, rounds=10)

    def test_status_lists_roles(self, quiet_group: RunningGroup) -> None:
        status = quiet_group.ask(Operation.STATUS)
        assert isinstance(status, StatusAnswer)
        assert (status.group, status.epoch, status.pid) == ("ready", 1, quiet_group.process.pid)
        assert status.store == str(quiet_group.root)
        assert set(status.roles) == {"template", *layout.ROLES}
        expected = {"state": "RUNNING", "pid": quiet_group.pid("writer"), "incarnation": 1, "restarts": 0}
        assert status.roles["writer"] == expected
        assert status.roles["template"]["state"] == "RUNNING"

    def test_unknown_roles_and_operations_are_refused(self, quiet_group: RunningGroup) -> None:
        with pytest.raises(BadRequestError, match="unknown role 'editor'; roles are writer, commitlog-flusher"):
            quiet_group.ask(Operation.RESTART_ROLE, RoleRequest("editor"))
        with pytest.raises(UnknownCommandError):
            quiet_group.ask(Operation.TOPICS)

    @pytest.mark.parametrize("how", ["foreground", "detached"])
    def test_second_supervisor_exits_7_and_names_the_first(self, quiet_group: RunningGroup, how: str) -> None:
        second = RunningGroup(quiet_group.root, *(["--detach"] if how == "detached" else []), wait=False)
        try:
            assert second.wait() == 7
            said = second.errors + second.lines
            assert len(said) == 2
            assert any(f"is in use by pid {quiet_group.process.pid} since 20" in line for line in said)
        finally:
            second.close()


class TestStartAndStop:
    def test_roles_start_and_stop_in_order(self, start_group: StartGroup) -> None:
        group = start_group()
        started = [line.split()[0] for line in group.events if " start " in line or "recover" in line]
        # The monitor starts during recovery and is not awaited: its line may be among the others.
        started.remove("monitor")
        assert started == ["recover", *(role for role in layout.ROLES if role != "monitor")]
        assert group.control.load(layout.GROUP_STATE) == layout.GROUP_READY
        assert (group.root / "abort").read_text() == str(group.process.pid)
        assert group.stop() == 0
        order = closes(group)
        assert order[:5] == STOPS
        assert set(order[5:7]) == {"cq-flusher", "index-flusher"}
        assert order[7:] == ["finish", "monitor"]
        assert not (group.root / "abort").exists()
        assert group.lock_is_free
        assert not list((group.root / "mqproc").glob("*.sock"))
        assert group.control.load(layout.GROUP_STATE) == layout.GROUP_DOWN

    def test_supervisor_logs_one_line_per_state_change(self, start_group: StartGroup) -> None:
        group = start_group(FEW)
        group.stop()
        words = [" ".join(line.replace(",", "").split()[:2]) for line in group.lines]
        assert words == [
            "begin",
            "template RUNNING",
            "recovery: nothing",
            "group starting",
            "writer STARTING",
            "writer RUNNING",
            "dispatcher STARTING",
            "dispatcher RUNNING",
            "group ready",
            "all serve",
            "group stopping",
            "writer STOPPING",
            "writer STOPPED",
            "dispatcher STOPPING",
            "dispatcher STOPPED",
            "group down",
            "outcome 0:",
        ]
        assert not group.errors

    def test_epoch_counts_starts_and_the_store_keeps_its_id(self, start_group: StartGroup) -> None:
        first = start_group(FEW)
        store_id = first.control.load(layout.STORE_ID)
        first.stop()
        second = start_group(FEW)
        assert second.control.load(layout.EPOCH) == first.control.load(layout.EPOCH) + 1 == 2
        assert second.control.load(layout.STORE_ID) == store_id
        assert not first.control.is_current(StoreIO(), first.paths)

    def test_supervise_world_writable_folder_is_refused(self, start_group: StartGroup, tmp_path: Path) -> None:
        (tmp_path / "store").mkdir()
        (tmp_path / "store").chmod(0o777)
        group = start_group(FEW, wait=False)
        assert group.wait() == 3
        assert "writable by everyone" in group.errors[0]
        assert not (tmp_path / "store" / "lock").exists()

    def test_group_continues_after_output_reader_ends(self, start_group: StartGroup) -> None:
        reader, writer = os.pipe()
        group = start_group(FEW, wait=False, stdout=writer)
        os.close(writer)
        os.close(reader)
        wait_until(group.paths.control.exists)
        wait_until(lambda: group.control.load(layout.GROUP_STATE) == layout.GROUP_READY)
        group.kill_and_wait("writer")
        group.stop()  # The program itself fails at its last line, after the supervisor.
        assert not (group.root / "abort").exists()


class TestStopping:
    def test_role_that_does_not_stop_is_aborted_and_abort_file_stays(self, start_group: StartGroup) -> None:
        group = start_group(FEW, "--bad=dispatcher:deaf", "--timing=stop_ms=2000")
        assert group.stop() == 1
        assert "dispatcher did not stop within 2 s: aborted" in group.lines
        assert "dispatcher died while the group stopped (SIGABRT)" in group.lines[-1]
        assert "finish unclean" in group.events
        assert (group.root / "abort").exists()

    def test_abort_file_stays_when_restarting_role_dies(self, start_group: StartGroup) -> None:
        group = start_group(FEW, "--bad=dispatcher:deaf", "--timing=stop_ms=2000")
        with group.send(Operation.RESTART_ROLE, RoleRequest("dispatcher")):
            group.wait_for_line("dispatcher STOPPING")
            assert group.stop() == 1
        assert "dispatcher did not stop within 2 s: aborted" in group.lines
        assert "dispatcher died while the group stopped (SIGABRT)" in group.lines[-1]
        assert "finish unclean" in group.events
        assert (group.root / "abort").exists()

    def test_abort_file_stays_when_dispatch_is_behind(self, start_group: StartGroup) -> None:
        group = start_group(FEW)
        _store_word(group, layout.WRITTEN, 4096)
        assert group.stop() == 1
        text = "outcome 1: dispatch has a backlog of 4,096 bytes; the last 4,096 bytes of the log are not durable"
        assert group.lines[-1] == text
        assert (group.root / "abort").exists()

    def test_second_interrupt_stops_faster(self, start_group: StartGroup) -> None:
        group = start_group("--bad=keeper:deaf", "--timing=quick_stop_ms=2000")
        group.process.send_signal(signal.SIGINT)
        group.wait_for_line("keeper STOPPING")
        assert group.stop(signal.SIGINT) == 130
        assert "keeper did not stop within 2 s: aborted" in group.lines
        assert (group.root / "abort").exists()
        assert set(closes(group)) == {*layout.ROLES} - {"keeper"}

    def test_recovery_can_be_interrupted(self, start_group: StartGroup) -> None:
        group = start_group(FEW, "--recovery=slow", wait=False)
        wait_until(lambda: "recover clean" in group.events)
        assert group.stop(signal.SIGINT) == 130
        assert (group.root / "abort").exists()
        assert group.lock_is_free

    def test_recovery_refusal_ends_start(self, start_group: StartGroup) -> None:
        group = start_group(FEW, "--recovery=refuse", wait=False)
        assert group.wait() == 6
        assert group.errors == ["damaged below the mark"]
        assert group.lock_is_free

    def test_recovery_failed_sync_leaves_store_read_only(self, start_group: StartGroup) -> None:
        group = start_group(FEW, "--recovery=unsynced", wait=False)
        assert group.wait() == 1
        assert group.errors == [
            "recovery: a sync failed: [Errno 5] Input/output error: 'commitlog/00000000000000000000'; "
            "run mqproc store repair"
        ]
        assert group.paths.read_only.exists()
        assert (group.root / "abort").exists()

    def test_recovery_gets_clean_flag_of_last_stop(self, start_group: StartGroup) -> None:
        start_group(FEW).stop()
        killed = start_group(FEW)
        killed.process.kill()
        killed.wait()
        start_group(FEW).stop()
        recoveries = [line for line in killed.events if "recover" in line]
        assert recoveries == ["recover clean", "recover clean", "recover unclean"]


class TestKills:
    @pytest.mark.timeout(600)
    def test_killed_role_restarts_within_100_ms(self, start_group: StartGroup) -> None:
        def median_ms() -> float:
            group = start_group()
            with first_in_line(group.process.pid, group.pid("template")):
                took = {role: group.kill_and_wait(role) for role in layout.ROLES}
            print({role: f"{ms:.1f} ms" for role, ms in took.items()})
            assert all(group.word(role, "restarts") == 1 for role in layout.ROLES)
            assert sum("SIGKILL (perhaps out of memory)" in line for line in group.lines) == len(layout.ROLES)
            assert group.stop() == 0
            # In one round: the minimum of many rounds would also pass for a role that polls in time by chance.
            return statistics.median(took.values())

        assert_below(SETTLED_MS, median_ms, rounds=20)

    def test_dead_flusher_makes_supervisor_sync(self, start_group: StartGroup) -> None:
        group = start_group("--roles=writer,commitlog-flusher", "--sync-errno=5")
        group.kill_and_wait("writer")
        assert not any(line.startswith("sync") for line in group.events)
        group.kill_and_wait("commitlog-flusher")
        assert "sync for commitlog-flusher" in group.events
        assert group.control.read_only
        assert group.control.load(layout.SUPERVISOR_SYNC_ERRNO) == 5
        assert "Input/output error" in group.paths.read_only.read_text()
        group.kill_and_wait("commitlog-flusher")
        assert group.events.count("sync for commitlog-flusher") == 1, "never a second sync after a failed one"
        assert group.stop() == 1
        assert (group.root / "abort").exists()

    @pytest.mark.parametrize("word", [layout.WRITER_SYNC_ERRNO, layout.FLUSHER_SYNC_ERRNO, layout.CQ_SYNC_ERRNO])
    @pytest.mark.parametrize("ending", ["killed", "stopped"])
    def test_unrecorded_failed_sync_is_recorded(self, start_group: StartGroup, word: int, ending: str) -> None:
        """The process that detected the failure stored its word and died, or found the disk full."""
        group = start_group("--roles=writer,cq-flusher")
        with contextlib.closing(Control.open(StoreIO(), group.paths, write=True)) as control:
            control.store(word, 5)
        if ending == "killed":
            group.kill_and_wait("cq-flusher")
            assert group.paths.read_only.exists()
        assert group.stop() == 1
        assert group.paths.read_only.exists()
        assert not any(line.startswith("sync") for line in group.events)

    @pytest.mark.parametrize("role", ["commitlog-flusher", "cq-flusher", "index-flusher"])
    def test_flusher_dying_at_stop_makes_supervisor_sync(self, start_group: StartGroup, role: str) -> None:
        group = start_group(f"--roles={role}", f"--bad={role}:deaf", "--sync-errno=5", "--timing=stop_ms=300")
        assert group.stop() == 1
        assert group.events.count(f"sync for {role}") == 1
        assert group.paths.read_only.exists()

    def test_killed_template_is_replaced_and_roles_continue(self, start_group: StartGroup) -> None:
        group = start_group()
        pids = {role: group.pid(role) for role in layout.ROLES}
        before = group.kill("template")
        wait_until(lambda: group.running("template") and group.pid("template") not in (0, before))
        assert {role: group.pid(role) for role in layout.ROLES} == pids
        took = group.kill_and_wait("writer")
        print(f"from the new template: {took:.1f} ms")
        assert group.stop() == 0

    def test_template_fork_failure_is_retried_when_role_needs_it(self, start_group: StartGroup) -> None:
        group = start_group(FEW)
        no_room = group.root / "no-room"
        no_room.touch()
        group.kill("template")
        group.wait_for_line("template could not be started: Resource temporarily unavailable")
        assert group.pid("template") == 0
        group.ask(Operation.STATUS)
        no_room.unlink()
        group.kill_and_wait("writer")
        assert group.running("template")
        assert group.stop() == 0

    def test_start_without_process_is_retried_while_others_run(self, start_group: StartGroup) -> None:
        """At a limit of processes; five such starts within a minute ended the group."""
        group = start_group()
        no_room = group.root / "no-room"
        no_room.touch()
        for role in ("writer", "query"):
            group.kill(role)
        refused = "could not be started: Resource temporarily unavailable"
        for role in ("writer", "query"):
            group.wait_for_line(f"{role} EXITED, {refused}", count=7)
        assert any("a role could not be started" in error.text for error in seen_errors(StoreIO(), group.paths))
        cycles = group.cycles("keeper")
        wait_until(lambda: group.cycles("keeper") > cycles)
        no_room.unlink()
        wait_until(lambda: group.running("writer") and group.running("query"))
        assert group.word("writer", "restarts") == 1
        assert group.stop() == 0

    def test_group_stops_while_no_process_can_be_made(self, start_group: StartGroup) -> None:
        group = start_group(FEW)
        (group.root / "no-room").touch()
        group.kill("dispatcher")
        group.wait_for_line("dispatcher EXITED, could not be started", count=2)
        assert group.stop() == 1
        assert "dispatcher was not running when the group stopped" in group.lines[-1]

    def test_group_that_never_got_a_process_ends(self, start_group: StartGroup, tmp_path: Path) -> None:
        group = start_group(FEW, "--recovery=held", "--window-ms=300", wait=False)
        wait_until(lambda: "recover clean" in group.events or "recover unclean" in group.events)
        (group.root / "no-room").touch()
        (group.root / "go").touch()
        assert group.wait() == 3
        assert "writer could not be started: Resource temporarily unavailable" in group.lines[-1]

    def test_template_that_hangs_is_killed_and_replaced(self, start_group: StartGroup) -> None:
        group = start_group(FEW, "--set=heartbeat_timeout_ms=500", "--timing=spawn_ms=5000")
        group.kill("template", signal.SIGSTOP)
        group.kill_and_wait("writer")
        assert group.word("template", "restarts") == 1

    def test_killed_supervisor_ends_all_and_frees_lock(self, start_group: StartGroup) -> None:
        killed = itertools.count(1)

        def gone_ms() -> float:
            group = start_group()
            assert group.control.load(layout.EPOCH) == next(killed)
            pids = [group.pid(role) for role in (*layout.ROLES, "template")]
            group.process.kill()
            took = wait_until(lambda: group.lock_is_free)
            print(f"lock free after {took:.1f} ms")
            took = wait_until(lambda: not any(alive(pid) for pid in pids))
            group.wait()
            return took

        assert_below(1000, gone_ms, rounds=10)
        again = start_group()
        assert again.control.load(layout.EPOCH) == next(killed)
        assert again.stop() == 0

    def test_starting_role_dies_with_supervisor(self, start_group: StartGroup) -> None:
        group = start_group(wait=False)
        group.wait_for_line("writer STARTING")
        group.process.kill()
        group.wait()
        wait_until(lambda: group.lock_is_free)

    def test_hung_role_is_aborted_with_stack_logged_and_replaced(self, start_group: StartGroup) -> None:
        group = start_group(FEW, "--set=heartbeat_timeout_ms=500")
        lives = itertools.count(2)

        def asleep() -> bool:
            # The role may not have begun to wait yet.
            said = group.control.load(layout.role_word("writer", "sleeping"))
            return bool(said) and psutil.Process(group.pid("writer")).status() == psutil.STATUS_SLEEPING

        def silent_s() -> float:
            wait_until(asleep)
            group.kill("writer", signal.SIGSTOP)
            group.wait_for_line("writer RUNNING", count=next(lives))
            pattern = r"writer was unresponsive for ([\d.]+) s while running: aborted"
            return float([found[1] for line in group.lines if (found := re.fullmatch(pattern, line))][-1])

        assert_below(1.0, silent_s, rounds=4)  # the fifth death would end the group
        assert any("SIGABRT" in line for line in group.lines)
        # Errors use another path than lines.
        aborted = re.compile(r'"event": "a role was aborted".*it was unresponsive for [\d.]+ s.*in wait')
        wait_until(lambda: any(aborted.search(line) for line in group.errors))
        (error,) = [error for error in seen_errors(StoreIO(), group.paths) if "a role was aborted" in error.text]
        assert "reason=it was unresponsive for" in error.text
        assert re.search(r"at=\S+\.py:\d+ in ", error.text)

    def test_crashes_are_logged_with_their_stacks(self, start_group: StartGroup) -> None:
        group = start_group(FEW)
        for times in (2, 3):
            group.kill("writer", signal.SIGABRT)
            group.wait_for_line("writer RUNNING", count=times)
        wait_until(lambda: sum("a role crashed" in line for line in group.errors) == 2)
        crashes = [line for line in group.errors if "a role crashed" in line]
        assert [line.count("Fatal Python error: Aborted") for line in crashes] == [1, 1]
        assert not any("\\u0000" in line for line in crashes)

    def test_role_sleeping_in_its_step_is_aborted(self, start_group: StartGroup) -> None:
        group = start_group(FEW, "--set=heartbeat_timeout_ms=500", "--bad=writer:sleep")
        group.wait_for_line("while running: aborted")
        wait_until(lambda: any("in do_work" in line for line in group.errors))

    def test_role_waiting_for_disk_in_first_step_is_running(self, start_group: StartGroup) -> None:
        """The next role is started at once: the supervisor may only ever see SYNCING."""
        group = start_group(FEW, "--bad=writer:slow-sync")
        assert group.running("writer")
        assert group.control.load(layout.role_word("writer", "state")) == layout.STATE_SYNCING
        (group.root / "synced").touch()
        assert group.stop() == 0


class TestHalt:
    def test_group_halts_after_five_deaths_with_back_off(self, start_group: StartGroup) -> None:
        group = start_group(FEW)
        for times in range(2, 6):
            group.kill("writer")
            group.wait_for_line("writer RUNNING", count=times)
        group.kill("writer")
        assert group.wait() == 1
        assert sum("writer BACKOFF" in line for line in group.lines) == 3
        assert group.lines[-1].startswith("outcome 1: writer died 5 times within 60 s, last by SIGKILL")
        assert "writer FATAL" in group.lines
        assert (group.root / "abort").exists()
        assert group.control.load(layout.role_word("writer", "supervised")) == layout.FATAL
        assert "dispatcher close" in group.events

    @pytest.mark.parametrize(("what", "code"), [("boot", 6), ("boot-bug", 3), ("bug", 3)])
    def test_group_that_cannot_boot_halts(self, start_group: StartGroup, what: str, code: int) -> None:
        group = start_group(FEW, f"--bad=dispatcher:{what}", wait=False)
        # A role that fails at work has reported RUNNING before, so the group may briefly have been ready.
        assert group.wait() in ((1, 3) if what == "bug" else (code,))
        starts = sum("dispatcher start" in line for line in group.events)
        assert starts == (1 if what == "boot" else 5)
        assert "writer close" in group.events
        assert (group.root / "abort").exists()

    def test_start_ends_after_spread_deaths_of_role_never_running(self, start_group: StartGroup) -> None:
        group = start_group(FEW, "--bad=dispatcher:boot-bug", "--window-ms=1", wait=False)
        assert group.wait() == 3
        assert "outcome 3: dispatcher died 5 times before it ran, last by exit code 1" in group.lines[-1]
        assert sum("dispatcher start" in line for line in group.events) == 5

    def test_halt_on_read_only_file_system_is_reported(self, start_group: StartGroup) -> None:
        """The roles that died could not store their errors."""
        group = start_group(FEW, "--bad=dispatcher:boot-bug", "--recovery=read-only", wait=False)
        assert group.wait() == 3
        why = "last by exit code 1: the file system has become read-only, as after a disk error"
        assert why in group.lines[-1]
        assert why in call("errors", "--store", group.root).out


class TestControlSocket:
    def test_restart_and_stop_answer_when_done(self, start_group: StartGroup) -> None:
        group = start_group(FEW)
        before = group.pid("writer")
        group.ask(Operation.RESTART_ROLE, RoleRequest("writer"))
        assert group.pid("writer") not in (0, before)
        assert (group.word("writer", "incarnation"), group.word("writer", "restarts")) == (2, 0)
        assert "writer close" in group.events
        group.ask(Operation.STOP_GROUP)
        assert "finish clean" in group.events
        assert group.wait() == 0

    def test_reload_reaches_running_and_later_roles(self, start_group: StartGroup) -> None:
        group = start_group(FEW)
        (group.root / "new_size").write_text("777")
        group.ask(Operation.RELOAD)
        wait_until(lambda: {"writer reload 777", "dispatcher reload 777"} <= set(group.events))
        group.wait_for_line("options reloaded: max_message_size = 777; a restart of the group is needed for max_queues")
        (group.root / "new_size").write_text("5")
        with pytest.raises(ConfigurationError):
            group.ask(Operation.RELOAD)

    def test_reload_unsaved_options_are_not_applied(self, start_group: StartGroup) -> None:
        group = start_group(FEW)
        settings = group.paths.settings
        # As on a full disk.
        in_the_way = settings.with_name(settings.name + REPLACING_SUFFIX)
        in_the_way.mkdir()
        (group.root / "new_size").write_text("777")
        group.process.send_signal(signal.SIGHUP)
        message = f"options not reloaded: {settings}: Is a directory"
        wait_until(lambda: any(message in line for line in group.errors), message)
        assert message in call("errors", "--store", group.root).out
        with pytest.raises(StoreAccessError):
            group.ask(Operation.RELOAD)
        in_the_way.rmdir()
        group.ask(Operation.RELOAD)
        group.wait_for_line("options reloaded: max_message_size = 777")
        wait_until(lambda: "writer reload 777" in group.events)
        assert group.stop() == 0

    def test_reload_unreadable_options_leave_group_unchanged(self, start_group: StartGroup) -> None:
        group = start_group(FEW)
        (group.root / "new_size").write_text("no number")
        group.process.send_signal(signal.SIGHUP)
        wait_until(lambda: any("options not reloaded" in line for line in group.errors), "a report of it")
        assert any("invalid literal for int()" in line for line in group.errors)
        assert group.stop() == 0


def _store_word(group: RunningGroup, index: int, value: int) -> None:
    control = Control.open(StoreIO(), group.paths, write=True)
    control.store(index, value)
    control.close()
