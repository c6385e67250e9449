"""Fork server: runs programs in forks of a process with the modules of `mqproc up` loaded.

A new interpreter spends seconds of processor time on imports and compiled code, which tests of a group do not test. A
forked process runs `mqproc up`, or a test's own program, from the parsing of its arguments. The server is a process
without threads; when the process that runs the tests ends, the server ends with all forked processes.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

MESSAGE_BYTES_MAX = 1 << 17
START_TIMEOUT_S = 120.0


class Running(Protocol):
    """The part of subprocess.Popen that tests use for a supervisor."""

    pid: int

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float) -> int: ...

    def kill(self) -> None: ...

    def send_signal(self, sig: int) -> None: ...


class ForkServer:
    """The client's side of the fork server."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.support.fork_server", str(theirs.fileno())]
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
        # Forked programs buffer their output, like programs whose output is a file or a pipe.
        environment.pop("PYTHONUNBUFFERED", None)
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        self._socket = ours
        self._lock = threading.Lock()
        self._codes: dict[int, int] = {}
        self._owner = os.getpid()
        atexit.register(self.close)

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], stdout: int, stderr: int | None = None
    ) -> ForkedProcess:
        """Run a module like `python -m`, with these arguments and variables.

        Without `stderr` errors go to stdout. The caller's descriptors remain open.
        """
        request = json.dumps([list(command), dict(environment), os.getcwd()]).encode()
        assert len(request) <= MESSAGE_BYTES_MAX, "so many variables do not fit into a message"
        with self._lock:
            socket.send_fds(self._socket, [request], [stdout, stdout if stderr is None else stderr])
            deadline = time.monotonic() + START_TIMEOUT_S
            while (pid := self._receive(deadline - time.monotonic())) is None:
                assert time.monotonic() < deadline, "the fork server does not answer"
        return ForkedProcess(self, pid)

    def code_of(self, pid: int, timeout_s: float = 0.0) -> int | None:
        """Exit code of a process; None if it has not ended within the timeout."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                self._receive(0.0)
                if pid in self._codes:
                    return self._codes[pid]
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.002)

    def close(self) -> None:
        """End the server and all processes that it has forked."""
        if os.getpid() == self._owner:
            atexit.unregister(self.close)
            self._socket.close()
            self._process.wait(START_TIMEOUT_S)

    def _receive(self, timeout_s: float) -> int | None:
        """Read messages of the server; return the pid of the requested process, if received."""
        self._socket.settimeout(max(0.0, timeout_s))
        with contextlib.suppress(BlockingIOError, TimeoutError):
            while message := self._socket.recv(MESSAGE_BYTES_MAX):
                pid, code = json.loads(message)
                if code is None:
                    # Process ids are reused after thousands of processes.
                    self._codes.pop(pid, None)
                    return int(pid)
                self._codes[pid] = code
                self._socket.settimeout(0.0)
            raise AssertionError("the fork server has ended")
        return None


_servers: dict[int, ForkServer] = {}


def fork_server() -> ForkServer:
    """The fork server of this process."""
    if os.getpid() not in _servers:
        _servers[os.getpid()] = ForkServer()
    return _servers[os.getpid()]


def run_forked(command: Sequence[str], timeout_s: float = START_TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    """Run a module with its arguments to its end, like subprocess.run."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = fork_server().start(command, os.environ, out.fileno(), err.fileno())
        try:
            code = process.wait(timeout_s)
        except BaseException:
            process.kill()
            raise
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(command, code, out.read(), err.read())


class ForkedProcess:
    """A process of the fork server, as its test sees it."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server = server
        self.pid = pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return self._server.code_of(self.pid)

    def wait(self, timeout: float) -> int:
        code = self._server.code_of(self.pid, timeout)
        if code is None:
            raise subprocess.TimeoutExpired("mqproc up", timeout)
        return code

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            # It may have ended, and its end not be reported yet.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)


def serve(fd: int) -> None:
    """Main loop of the fork server."""
    import setproctitle

    from mqproc.cli import main
    from mqproc.cli.admin import engine_hooks
    from mqproc.cli.admin.engine_hooks import make_ready
    from mqproc.roles import registry

    assert engine_hooks
    assert registry.SPECS
    assert main
    make_ready()
    # The first title determines the available space: arguments and variables before they change.
    setproctitle.setproctitle("test-fork-server")
    # A garbage collection in a forked process would touch, and so copy, all loaded objects.
    gc.freeze()
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
            request, outputs, _flags, _address = socket.recv_fds(asked, MESSAGE_BYTES_MAX, 2)
            if not request:
                return
            pid = os.fork()
            if pid == 0:
                ready.close()
                for own in (asked.detach(), wake, woken):
                    os.close(own)
                _live(outputs, *json.loads(request))
            for fd in outputs:
                os.close(fd)
            asked.send(json.dumps([pid, None]).encode())
        _tell_ends(asked)


def _tell_ends(asked: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            asked.send(json.dumps([ended[0], os.waitstatus_to_exitcode(ended[1])]).encode())


def _live(outputs: list[int], command: list[str], environment: dict[str, str], folder: str) -> None:
    """Run in a forked process. Does not return."""
    from mqproc.supervisor import signals as prctl

    code = 0
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        prctl.die_with_parent()
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        for fd, standard in zip(outputs, (1, 2), strict=True):
            os.dup2(fd, standard)
            os.close(fd)
        sys.argv = command
        runpy.run_module(command[0], run_name="__main__")
    except SystemExit as ended:
        code = _code_of(ended)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _code_of(ended: SystemExit) -> int:
    if ended.code is None or isinstance(ended.code, int):
        return ended.code or 0
    print(ended.code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    serve(int(sys.argv[1]))
