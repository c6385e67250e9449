"""A role attached to a terminal, replaced by pipes; closing the connection acts as Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mqproc.errors import BadRequestError, StoreBusyError
from mqproc.layout import control as layout
from mqproc.wire.operations import Operation, RoleRequest, RunAnswer, RunRequest, StatusAnswer
from tests.supervisor.running_group import RunningGroup, alive, answer_to, wait_until

StartGroup = Callable[..., RunningGroup]

FEW = "--roles=writer,dispatcher"
IMPATIENT = ("--set=heartbeat_timeout_ms=1500", "--set=busy_timeout_ms=1500")


class Terminal:
    """Two pipes: input and output."""

    def __init__(self) -> None:
        self._role_reads, self._typed = os.pipe()
        self._seen, self._role_writes = os.pipe()
        os.set_blocking(self._seen, False)
        self.text = ""

    def request(self, role: str, *, debug: bool = False) -> RunRequest:
        """A request to run the role at this terminal."""
        own = f"/proc/{os.getpid()}/fd"
        out = f"{own}/{self._role_writes}"
        return RunRequest(role, f"{own}/{self._role_reads}", out, out, debug)

    def type(self, line: str) -> None:
        os.write(self._typed, f"{line}\n".encode())

    def shows(self, text: str) -> bool:
        """True if the text has been written here."""
        with contextlib.suppress(BlockingIOError):
            self.text += os.read(self._seen, 1 << 16).decode()
        return text in self.text

    def close(self) -> None:
        for fd in (self._role_reads, self._typed, self._seen, self._role_writes):
            os.close(fd)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.close()


def attached(group: RunningGroup, role: str) -> bool:
    return group.word(role, "supervised") == layout.LENT


def serves_again(group: RunningGroup, role: str, incarnation: int) -> None:
    """Wait until the role runs unattached and works."""
    wait_until(lambda: group.running(role) and group.word(role, "incarnation") == incarnation, f"{role} again")
    before = group.cycles(role)
    wait_until(lambda: group.cycles(role) > before, f"work of {role}")


def at_prompt(group: RunningGroup, role: str, terminal: Terminal) -> int:
    """Wait for the debugger's prompt; return the role's pid."""
    wait_until(lambda: terminal.shows("(Pdb)") and group.pid(role) != 0, "the debugger's prompt")
    return group.pid(role)


def test_debug_attach_role_uses_terminal_until_disconnect(start_group: StartGroup, terminal: Terminal) -> None:
    group = start_group(FEW)
    with group.send(Operation.RUN_ROLE, terminal.request("writer")):
        wait_until(lambda: terminal.shows("attached to this terminal"), "the role's log")
        wait_until(lambda: attached(group, "writer"))
        before = group.cycles("writer")
        wait_until(lambda: group.cycles("writer") > before, "work at the terminal")
        descriptors = [os.readlink(f"/proc/{group.pid('writer')}/fd/{fd}") for fd in range(3)]
        assert all(name.startswith("pipe:") for name in descriptors)
        assert descriptors[1] == descriptors[2]
        status = group.ask(Operation.STATUS)
        assert isinstance(status, StatusAnswer)
        assert status.roles["writer"]["state"] == "LENT"
    serves_again(group, "writer", 3)
    assert group.word("writer", "restarts") == 0
    assert group.events.count("writer close") == 2
    assert any(line.startswith("writer LENT, pid") and f"terminal of pid {os.getpid()}" in line for line in group.lines)
    assert group.stop() == 0


def test_debug_attach_stopped_role_is_not_aborted(start_group: StartGroup, terminal: Terminal) -> None:
    group = start_group(FEW, *IMPATIENT)
    with group.send(Operation.RUN_ROLE, terminal.request("dispatcher", debug=True)):
        pid, before = at_prompt(group, "dispatcher", terminal), group.cycles("dispatcher")
        time.sleep(2.5)  # Longer than the heartbeat timeout after which a role is aborted.
        assert (group.pid("dispatcher"), group.cycles("dispatcher")) == (pid, before)
        terminal.type("p role.name")
        wait_until(lambda: terminal.shows("'dispatcher'"), "the debugger's answer")
        terminal.type("c")
        wait_until(lambda: group.cycles("dispatcher") > before, "work after the debugger")
        assert group.pid("dispatcher") == pid
    serves_again(group, "dispatcher", 3)


# Since Python 3.14 pdb asks for confirmation.
QUIT = "q\ny" if sys.version_info >= (3, 14) else "q"


def test_debug_attach_role_end_is_no_death(start_group: StartGroup, terminal: Terminal) -> None:
    group = start_group(FEW)
    for times in range(6):  # More than the number of deaths at which a group halts.
        with group.send(Operation.RUN_ROLE, terminal.request("writer", debug=True)) as client:
            terminal.type(QUIT)
            assert answer_to(client, Operation.RUN_ROLE) == RunAnswer("exit code 1", False)
        serves_again(group, "writer", 3 + 2 * times)
    assert terminal.shows("left by the debugger")
    assert group.word("writer", "restarts") == 0


def test_debug_attach_role_left_at_prompt_is_taken_back(start_group: StartGroup, terminal: Terminal) -> None:
    group = start_group("--roles=writer,commitlog-flusher", "--timing=take_back_ms=300")
    with group.send(Operation.RUN_ROLE, terminal.request("commitlog-flusher", debug=True)):
        pid = at_prompt(group, "commitlog-flusher", terminal)
    serves_again(group, "commitlog-flusher", 3)
    assert not alive(pid)
    assert "commitlog-flusher did not stop within 0.3 s: aborted" in group.lines
    assert "sync for commitlog-flusher" in group.events


def test_debug_attach_role_is_attached_once_and_not_restarted(start_group: StartGroup, terminal: Terminal) -> None:
    group = start_group(FEW)
    with group.send(Operation.RUN_ROLE, terminal.request("writer")):
        wait_until(lambda: attached(group, "writer"))
        lent_to = f"writer is attached to the terminal of pid {os.getpid()}"
        with pytest.raises(StoreBusyError, match=lent_to):
            group.ask(Operation.RUN_ROLE, terminal.request("writer"))
        with pytest.raises(StoreBusyError, match=lent_to):
            group.ask(Operation.RESTART_ROLE, RoleRequest("writer"))
        assert attached(group, "writer")


# Above the limit of open files.
NEVER_OPEN = f"/proc/{os.getpid()}/fd/{1 << 30}"


@pytest.mark.parametrize(
    "path",
    ["/proc/1/fd/0", "/dev/null", "/proc/self/fd/0", f"/proc/{os.getpid()}/fd/0/../1", NEVER_OPEN],
    ids=["another process", "no descriptor", "self", "a way around", "not open"],
)
def test_debug_attach_accepts_callers_open_files_only(start_group: StartGroup, terminal: Terminal, path: str) -> None:
    group = start_group(FEW)
    good = terminal.request("writer")
    with pytest.raises(BadRequestError, match=r"not an open file of pid|cannot be attached"):
        group.ask(Operation.RUN_ROLE, RunRequest("writer", good.stdin, path, good.stderr))
    assert (group.running("writer"), group.word("writer", "incarnation")) == (True, 1)


def test_debug_attach_role_stops_with_group(start_group: StartGroup, terminal: Terminal) -> None:
    group = start_group(FEW)
    with group.send(Operation.RUN_ROLE, terminal.request("writer")) as client:
        wait_until(lambda: terminal.shows("attached to this terminal"), "the role's log")
        before = group.cycles("writer")
        wait_until(lambda: group.cycles("writer") > before)
        assert group.stop() == 0
        assert answer_to(client, Operation.RUN_ROLE) == RunAnswer("exit code 0", True)
    assert not (Path(group.root) / "abort").exists()
