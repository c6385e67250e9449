"""A group of tiny roles in processes of its own, seen from a test: its lines, its words, its pids."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import msgspec
import psutil

from mqproc.io.store_io import StoreIO
from mqproc.ipc.control import Control
from mqproc.ipc.store_lock import lock_holder
from mqproc.layout import control as layout
from mqproc.layout import frame
from mqproc.paths import StorePaths
from mqproc.wire.address import connect_path
from mqproc.wire.codec import FrameOptions
from mqproc.wire.frames import FrameReader, decode_refusal, encode_frame, encode_options
from mqproc.wire.operations import ANSWERS, Empty, Operation
from tests.nursery import nursery

PROGRAM = Path(__file__).with_name("group_program.py")
MODULE = "tests.supervisor.group_program"

PATIENCE_S = 60.0


def wait_until(condition: Callable[[], object], what: str = "", timeout_s: float = PATIENCE_S) -> float:
    """Look until it is true; returns how long that took in ms."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > timeout_s:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.0003)
    return (time.monotonic() - began) * 1000


def _collect(stream: TextIO, lines: list[str]) -> None:
    with stream:
        for line in stream:
            lines.append(line.rstrip())


class RunningGroup:
    """One run of `group_program.py`."""

    def __init__(self, root: Path, *arguments: str, wait: bool = True, stdout: int | None = None) -> None:
        self.root = root
        self.paths = StorePaths(root)
        self.lines: list[str] = []
        self.errors: list[str] = []
        self._control: Control | None = None
        self._readers: list[threading.Thread] = []
        told = self._collected(self.lines) if stdout is None else os.dup(stdout)
        complained = self._collected(self.errors)
        self.process = nursery().start([MODULE, str(root), *arguments], os.environ, told, complained)
        for fd in (told, complained):
            os.close(fd)
        for reader in self._readers:
            reader.start()
        if wait:
            self.wait_for_line("all serve")

    # What it says

    def _collected(self, lines: list[str]) -> int:
        """Where to write what becomes these lines."""
        reads, writes = os.pipe()
        self._readers.append(threading.Thread(target=_collect, args=(os.fdopen(reads), lines)))
        return writes

    def wait_for_line(self, text: str, count: int = 1) -> float:
        def there() -> bool:
            return sum(text in line for line in self.lines) >= count or self.process.poll() is not None

        took = wait_until(there, f"{text!r} in {self.lines} {self.errors}")
        assert sum(text in line for line in list(self.lines)) >= count, (self.lines, self.errors)
        return took

    @property
    def events(self) -> list[str]:
        try:
            return (self.root / "events").read_text().splitlines()
        except FileNotFoundError:
            return []

    # What it is

    @property
    def control(self) -> Control:
        if self._control is None:
            self._control = Control.open(StoreIO(), self.paths)
        return self._control

    def word(self, role: str, name: str) -> int:
        return self.control.load(layout.supervised_word(role, name))

    def pid(self, role: str) -> int:
        if role == layout.SUPERVISOR:
            return self.control.load(layout.SUPERVISOR_PID)
        return self.word(role, "pid")

    def cycles(self, role: str) -> int:
        return self.control.load(layout.role_word(role, "cycles"))

    def running(self, role: str) -> bool:
        return self.word(role, "supervised") == layout.RUNNING

    @property
    def lock_is_free(self) -> bool:
        return lock_holder(StoreIO(), self.paths) is None

    # What is done to it

    def kill(self, role: str, number: signal.Signals = signal.SIGKILL) -> int:
        pid = self.pid(role)
        os.kill(pid, number)
        return pid

    def kill_and_wait(self, role: str) -> float:
        """SIGKILL; ms until a successor has done work."""
        before, incarnation = self.cycles(role), self.word(role, "incarnation")
        self.kill(role)
        return wait_until(
            lambda: self.word(role, "incarnation") > incarnation and self.running(role) and self.cycles(role) > before,
            f"{role} again",
        )

    def ask(self, operation: Operation, options: FrameOptions | None = None) -> FrameOptions:
        """One request at the control socket."""
        with self.send(operation, options) as client:
            return answer_to(client, operation)

    def send(self, operation: Operation, options: FrameOptions | None = None) -> socket.socket:
        """The same without waiting for the answer."""
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        client.settimeout(PATIENCE_S)
        client.connect(str(connect_path(self.paths.socket("ctl"))))
        client.sendall(b"".join(encode_frame(operation, 1, encode_options(options or Empty()), ())))
        return client

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait(PATIENCE_S)
        for reader in self._readers:
            reader.join(PATIENCE_S)
        return code

    def close(self) -> None:
        """End everything that is left of it."""
        if self.process.poll() is None:
            self.process.kill()
        self.wait()
        if self._control is not None:
            self._control.close()


@contextlib.contextmanager
def first_in_line(*pids: int) -> Iterator[None]:
    """These processes, what they start, and this thread have a processor before others want it, if root says so."""
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.suppress(PermissionError):
        for pid in (*pids, 0):
            os.setpriority(os.PRIO_PROCESS, pid, -20)
    try:
        yield
    finally:
        if os.getpriority(os.PRIO_PROCESS, 0) != usual:
            os.setpriority(os.PRIO_PROCESS, 0, usual)


def answer_to(client: socket.socket, operation: Operation) -> FrameOptions:
    """What the supervisor answers; a refusal is raised."""
    reader = FrameReader(1 << 20)
    while (found := reader.next_frame()) is None:
        count = client.recv_into(reader.writable())
        assert count, "the supervisor closed the connection without an answer"
        reader.received(count)
    if found.operation & frame.REFUSAL:
        raise decode_refusal(found.options)
    return msgspec.msgpack.decode(found.options, type=ANSWERS[operation])


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def titles_of(root: Path) -> dict[int, str]:
    """Living processes that say they belong to this store."""
    found = {}
    for process in psutil.process_iter(["cmdline", "status"]):
        title = " ".join(process.info["cmdline"] or ()).strip()
        if title.startswith("mqproc: ") and title.endswith(f"[{root}]"):
            found[process.pid] = title
    return found
