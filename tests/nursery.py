"""Groups that are forked from a process that has loaded what `mqproc up` loads: many starts, cheaply.

A program that is started anew spends seconds of processor time on imports and compiled code, which tests of a group
are not about. What such a group runs is `mqproc up` all the same, from the parsing of its arguments on, in a process
of its own. The nursery is a process without threads beside the one that runs tests; it ends, and takes all that it has
forked along, when that one ends.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

MESSAGE_BYTES_MAX = 1 << 17
START_TIMEOUT_S = 120.0


class Running(Protocol):
    """What tests do with a supervisor's process: a part of subprocess.Popen."""

    pid: int

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float) -> int: ...

    def kill(self) -> None: ...

    def send_signal(self, sig: int) -> None: ...


class Nursery:
    """The side of whoever wants groups."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.nursery", str(theirs.fileno())]
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        self._socket = ours
        self._lock = threading.Lock()
        self._codes: dict[int, int] = {}
        self._owner = os.getpid()
        atexit.register(self.close)

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], output: Path) -> Forked:
        """Run `mqproc` with these arguments and variables; what it says goes behind what is in `output`."""
        request = json.dumps([list(arguments), dict(environment), os.getcwd(), str(output)]).encode()
        assert len(request) <= MESSAGE_BYTES_MAX, "so many variables do not fit into a message"
        with self._lock:
            self._socket.send(request)
            deadline = time.monotonic() + START_TIMEOUT_S
            while (pid := self._hear(deadline - time.monotonic())) is None:
                assert time.monotonic() < deadline, "the nursery does not answer"
        return Forked(self, pid)

    def code_of(self, pid: int, timeout_s: float = 0.0) -> int | None:
        """How a process has ended, None when it has not within this time."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                self._hear(0.0)
                if pid in self._codes:
                    return self._codes[pid]
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.002)

    def close(self) -> None:
        """End it, and all that it has forked."""
        if os.getpid() == self._owner:
            atexit.unregister(self.close)
            self._socket.close()
            self._process.wait(START_TIMEOUT_S)

    def _hear(self, timeout_s: float) -> int | None:
        """Take what was said; the pid of the process that was asked for, if that was."""
        self._socket.settimeout(max(0.0, timeout_s))
        with contextlib.suppress(BlockingIOError, TimeoutError):
            while message := self._socket.recv(MESSAGE_BYTES_MAX):
                pid, code = json.loads(message)
                if code is None:
                    return int(pid)
                self._codes[pid] = code
                self._socket.settimeout(0.0)
            raise AssertionError("the nursery has ended")
        return None


_nurseries: dict[int, Nursery] = {}


def nursery() -> Nursery:
    """The one of this process."""
    if os.getpid() not in _nurseries:
        _nurseries[os.getpid()] = Nursery()
    return _nurseries[os.getpid()]


class Forked:
    """A process of the nursery's, as its test sees it."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery = nursery
        self.pid = pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return self._nursery.code_of(self.pid)

    def wait(self, timeout: float) -> int:
        code = self._nursery.code_of(self.pid, timeout)
        if code is None:
            raise subprocess.TimeoutExpired("mqproc up", timeout)
        return code

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)


def serve(fd: int) -> None:
    """The nursery's life."""
    from mqproc.cli import engine
    from mqproc.cli.warm_kernels import make_ready

    assert engine.SPECS
    make_ready()
    asked = socket.socket(fileno=fd)
    wake, woken = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    ready = selectors.DefaultSelector()
    ready.register(asked, selectors.EVENT_READ)
    ready.register(wake, selectors.EVENT_READ)
    while True:
        for key, _ in ready.select():
            if key.fd == wake:
                os.read(wake, 4096)
                continue
            request = asked.recv(MESSAGE_BYTES_MAX)
            if not request:
                return
            pid = os.fork()
            if pid == 0:
                ready.close()
                for own in (asked.detach(), wake, woken):
                    os.close(own)
                _live(*json.loads(request))
            asked.send(json.dumps([pid, None]).encode())
        _tell_ends(asked)


def _tell_ends(asked: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            asked.send(json.dumps([ended[0], os.waitstatus_to_exitcode(ended[1])]).encode())


def _live(arguments: list[str], environment: dict[str, str], folder: str, output: str) -> None:
    """A forked process's life. Does not return."""
    from mqproc.cli.main import main
    from mqproc.supervisor import prctl

    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        prctl.die_with_parent()
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)
        sys.argv = ["mqproc", *arguments]
        code = main(arguments)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
