"""Notifications to systemd: READY, STATUS with the lag, WATCHDOG, RELOADING, STOPPING."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mqproc.io.store_io import Clock, StoreIO
from mqproc.ipc.control import Control
from mqproc.layout import control as layout
from mqproc.paths import StorePaths
from mqproc.supervisor.notify import ServiceManager
from tests.supervisor.running_group import PATIENCE_S, RunningGroup

StartGroup = Callable[..., RunningGroup]
FEW = "--roles=writer,dispatcher"


class Manager:
    """The receiving end of NOTIFY_SOCKET: every message with its sender's pid.

    A socket holds about ten unread messages: read it while a group starts.
    """

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.settimeout(0.05)
        # A socket's path is limited to 107 bytes, which a test's folder may exceed.
        before = Path.cwd()
        os.chdir(path.parent)
        try:
            self._socket.bind(path.name)
        finally:
            os.chdir(before)
        self.messages: list[str] = []
        self.senders: set[int] = set()

    def take(self) -> list[str]:
        """All messages received so far."""
        while True:
            try:
                data, extra, _flags, _address = self._socket.recvmsg(4096, socket.CMSG_SPACE(12))
            except TimeoutError:
                return self.messages
            self.messages.append(data.decode())
            self.senders |= {int.from_bytes(credentials[:4], "little") for _level, _kind, credentials in extra}

    def until(self, text: str, count: int = 1, timeout_s: float = PATIENCE_S) -> str:
        """The nth message that contains the text."""
        deadline = time.monotonic() + timeout_s
        while len(found := [message for message in self.take() if text in message]) < count:
            if time.monotonic() > deadline:
                pytest.fail(f"{text!r} not {count} times in {self.messages}")
        return found[count - 1]

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    path = Path("/tmp") / f"mqproc-notify-{os.getpid()}"
    path.unlink(missing_ok=True)
    found = Manager(path)
    monkeypatch.setenv("NOTIFY_SOCKET", str(path))
    monkeypatch.setenv("WATCHDOG_USEC", "400000")
    yield found
    found.close()
    path.unlink(missing_ok=True)


def test_notify_reports_each_step_of_group(manager: Manager, start_group: StartGroup) -> None:
    group = start_group(wait=False)
    manager.until("READY=1")
    assert manager.messages[0] == "STATUS=recovering"
    status = manager.until("STATUS=ready; ")
    assert status == "STATUS=ready; dispatch behind by 0 bytes (0 messages); flush behind by 0 bytes"
    manager.until("WATCHDOG=1", count=3)
    (group.root / "new_size").write_text("777")
    group.process.send_signal(signal.SIGHUP)
    reloading = manager.until("RELOADING=1")
    assert "MONOTONIC_USEC=" in reloading
    manager.until("READY=1", count=2)
    group.wait_for_line("options reloaded: max_message_size = 777; a restart of the group is needed for max_queues")
    group.process.send_signal(signal.SIGSTOP)
    manager.take()
    count = sum("WATCHDOG" in message for message in manager.messages)
    time.sleep(0.6)
    assert sum("WATCHDOG" in message for message in manager.take()) <= count + 1
    group.process.send_signal(signal.SIGCONT)
    assert group.stop() == 0
    manager.until("STOPPING=1\nSTATUS=stopping")
    assert manager.senders == {group.process.pid}


def test_notify_status_has_lag_and_dead_roles(manager: Manager, start_group: StartGroup) -> None:
    group = start_group(FEW, wait=False)
    manager.until("STATUS=commitlog-flusher STOPPED, ")
    control = Control.open(StoreIO(), group.paths, write=True)
    control.store(layout.WRITTEN, 4096)
    manager.until("dispatch behind by 4,096 bytes (0 messages); flush behind by 4,096 bytes")
    control.store(layout.FLUSHER_SYNC_ERRNO, 5)
    manager.until("READ-ONLY after a failed sync")
    control.close()


def test_notify_variables_are_not_inherited_by_roles(manager: Manager, start_group: StartGroup) -> None:
    environment: dict[str, str] = {"NOTIFY_SOCKET": "@abstract", "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}
    ServiceManager.from_environment(environment)
    assert environment == {}
    start_group(FEW, wait=False)
    manager.until("READY=1")


def test_notify_slow_manager_gets_each_state(manager: Manager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manager's socket is full, but READY must still arrive."""
    speaker = ServiceManager.from_environment(os.environ)
    states = [layout.GROUP_RECOVERING, layout.GROUP_STARTING] * 10 + [layout.GROUP_READY]
    for state in states:
        speaker.say_state(state)
    assert len(manager.take()) < len(states)
    paths = StorePaths(tmp_path)
    paths.own.mkdir()
    control = Control.create(StoreIO(), paths, Clock(), os.getpid())
    now_ns = 0
    while not any("READY=1" in message for message in manager.take()):
        now_ns += 1
        speaker.tick(now_ns, control)
    control.close()
    statuses = [message.rpartition("STATUS=")[2] for message in manager.messages if "WATCHDOG" not in message]
    assert statuses[: len(states)] == [layout.GROUP_NAMES[state] for state in states]


def test_notify_embedded_group_is_silent(
    manager: Manager, start_group: StartGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SYSTEMD_EXEC_PID", str(os.getpid()))
    assert start_group(FEW).stop() == 0
    assert manager.take() == []


def test_notify_without_manager_sends_nothing(start_group: StartGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere/notify")
    monkeypatch.setenv("WATCHDOG_USEC", "not a number")
    assert start_group(FEW).stop() == 0
