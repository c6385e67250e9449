"""A group of tiny roles in separate processes: output lines, control words and pids."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import fcntl
import math
import mmap
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import msgspec
import psutil

from mqproc.config.options import Options
from mqproc.config.parse import load_options
from mqproc.errors import ConfigurationError, CorruptStoreError, MqprocError
from mqproc.io.store_io import FailedSyncError, StoreIO
from mqproc.ipc import bell
from mqproc.ipc.control import Control
from mqproc.ipc.store_lock import lock_holder
from mqproc.layout import control as layout
from mqproc.layout import frame
from mqproc.paths import StorePaths
from mqproc.roles.role import BellKind, Role, RoleContext, RoleSpec
from mqproc.supervisor import GroupContext, Hooks, Outcome, RestartPolicy, Timing, detach, supervise
from mqproc.wire.address import connect
from mqproc.wire.frames import FrameReader, decode_refusal, encode_frame, encode_options
from mqproc.wire.operations import ANSWERS, Empty, FrameOptions, Operation
from tests.support.fork_server import fork_server

# The program: a supervisor with tiny roles, run as a process of its own.
#
# Each role counts its steps in its word `cycles`, holds a file lock (which detects two processes of a role), and
# appends its events to `events`. `--bad ROLE:FAULT` makes a role misbehave.

WITH_SOCKETS = {layout.WRITER, layout.QUERY}
LAZY_S = 0.02
STEP_NS = 5_000_000
SLOW_SYNC_LOOKS = 6000


def note(root: Path, line: str) -> None:
    """Append a line to the test's event log in one write."""
    fd = os.open(root / "events", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, f"{line}\n".encode())
    os.close(fd)


class Counter(Role):
    """A role that works a little, waits at its bell, and counts."""

    def __init__(self, context: RoleContext, bad: str) -> None:
        self.name = context.name
        self._context = context
        self._bad = bad
        self._root = context.paths.root
        self._lock = os.open(self._root / f"{self.name}.one", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            note(self._root, f"{self.name} two-at-once")
        note(self._root, f"{self.name} start {context.incarnation}")
        if bad == "boot":
            raise CorruptStoreError("unexpected bytes")
        if bad == "boot-bug":
            raise RuntimeError("a bug in the factory")
        if bad == "slow-sync":
            # The supervisor checks by its own clock; the role is in its first step by then.
            context.heartbeat._changed = lambda: None
        self._stops = 3
        self._due_ns = 0

    def do_work(self) -> int:
        if self._bad == "bug":
            raise RuntimeError("a bug in the role")
        if self._bad == "sleep":
            while True:
                time.sleep(60)
        if self._bad == "slow-sync":
            with self._context.heartbeat.busy(layout.STATE_SYNCING):
                for _ in range(SLOW_SYNC_LOOKS):
                    if (self._root / "synced").exists():
                        break
                    time.sleep(STEP_NS / 1e9)
        now = self._context.clock.monotonic_ns()
        if now < self._due_ns:
            return 0
        self._due_ns = now + STEP_NS
        return 1

    def wait(self, timeout_s: float) -> None:
        self._context.bell.wait(min(timeout_s, LAZY_S))

    def on_stop(self) -> bool:
        if self._bad == "deaf":
            time.sleep(0.05)
            return False
        self._stops -= 1
        return self._stops == 0

    def reload(self, options: Options) -> None:
        note(self._root, f"{self.name} reload {options.max_message_size}")

    def close(self) -> None:
        note(self._root, f"{self.name} close")
        os.close(self._lock)


def make_specs(names: list[str], bad: dict[str, str]) -> list[RoleSpec]:
    def spec(name: str) -> RoleSpec:
        sockets = (name,) if name in WITH_SOCKETS else ()
        bell = BellKind.EVENT if name in WITH_SOCKETS else BellKind.SEMAPHORE
        return RoleSpec(name, lambda context: Counter(context, bad.get(name, "")), bell, sockets)

    return [spec(name) for name in names]


def refused(path: Path, *, write: bool = False, create: bool = False, mode: int = 0o644) -> int:
    """Replaces `open` on a file system that has become read-only: fails for writing."""
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))


def make_hooks(arguments: argparse.Namespace) -> Hooks:
    def recover(context: GroupContext) -> None:
        note(context.paths.root, f"recover {'clean' if context.clean else 'unclean'}")
        if arguments.recovery == "refuse":
            raise CorruptStoreError("damaged below the mark")
        if arguments.recovery == "cut":
            with (context.paths.root / "short").open("w+b") as file:
                file.truncate(8192)
                mapping = mmap.mmap(file.fileno(), 8192)
                file.truncate(4096)
                mapping[5000]
        if arguments.recovery == "unsynced":
            raise FailedSyncError(5, "Input/output error", "commitlog/00000000000000000000")
        if arguments.recovery == "held":
            while not (context.paths.root / "go").exists():
                time.sleep(0.002)
        if arguments.recovery == "read-only":
            context.io.open = refused  # type: ignore[method-assign]
        if arguments.recovery == "slow":
            for _ in range(6000):  # In steps: a signal that arrives just before a sleep is handled after it.
                time.sleep(0.01)
        context.report("recovery: nothing to do")

    def warm(context: GroupContext) -> None:
        note(context.paths.root, "warm")
        if arguments.recovery == "warms":
            while True:
                time.sleep(0.01)

    def finish(context: GroupContext, clean: bool) -> None:
        note(context.paths.root, f"finish {'clean' if clean else 'unclean'}")

    def reload() -> Options:
        size = int((Path(arguments.store) / "new_size").read_text())
        if size < 10:
            raise ConfigurationError("max_message_size is too small")
        return load_options(flags=[*arguments.set, f"max_message_size={size}", "max_queues=99"], environment={})

    def sync(role: str) -> int:
        note(Path(arguments.store), f"sync for {role}")
        return arguments.sync_errno

    return Hooks(warm=warm, recover=recover, finish=finish, reload=reload, sync_active_segments=sync)


def noting_kernels_of_bells(root: Path) -> None:
    """Record an event when the supervisor warms the bells' kernels."""
    warm = bell.warm

    def noted() -> None:
        note(root, "bells warm")
        warm()

    bell.warm = noted


def interrupted(call: Callable[[], None]) -> Callable[[], None]:
    """Return `call` preceded by SIGINT."""

    def made() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        call()

    return made


def refused_while(path: Path, fork: Callable[[], int]) -> Callable[[], int]:
    """Return a `fork` that fails with EAGAIN while the file exists."""

    def made() -> int:
        if path.exists():
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return fork()

    return made


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("store")
    parser.add_argument("--roles", default=",".join(layout.ROLES))
    parser.add_argument("--bad", action="append", default=[])
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--recovery", default="")
    parser.add_argument("--sync-errno", type=int, default=0)
    parser.add_argument("--detach", action="store_true")
    parser.add_argument("--ctrl-c-at-setsid", action="store_true")
    parser.add_argument("--timeout", type=float, default=math.inf)
    parser.add_argument("--began-before", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--timing", action="append", default=[], metavar="NAME=MS")
    parser.add_argument("--files", type=int, default=0, help="how many may be open, at most")
    parser.add_argument("--window-ms", type=int, default=60_000, help="in which five deaths of a role are too many")
    arguments = parser.parse_args()
    if arguments.files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (arguments.files, arguments.files))
    bad = dict(item.split(":") for item in arguments.bad)
    paths = StorePaths(Path(arguments.store))
    noting_kernels_of_bells(paths.root)
    os.fork = refused_while(paths.root / "no-room", os.fork)
    specs = make_specs(arguments.roles.split(","), bad)
    options = load_options(flags=arguments.set, environment={})
    # A short tick; only a role that must time out gets its time from the test.
    patient = dict.fromkeys(("stop_ms", "quick_stop_ms", "take_back_ms", "spawn_ms"), 20000)
    shorter = {name: int(ms) for name, ms in (item.split("=") for item in arguments.timing)}
    timing = dataclasses.replace(Timing(tick_ms=50, abort_grace_ms=300), **patient | shorter)
    policy = RestartPolicy(back_off_ms=20, window_ms=arguments.window_ms)

    def run(report, ready, _progress=None) -> Outcome:  # type: ignore[no-untyped-def]
        hooks = make_hooks(arguments)
        on_ready = lambda control: ready()  # noqa: E731
        return supervise(paths, options, specs, hooks, report=report, ready=on_ready, timing=timing, policy=policy)

    def say(line: str) -> None:
        print(line, flush=True)

    began_s = time.monotonic() - arguments.began_before
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if arguments.ctrl_c_at_setsid:
        os.setsid = interrupted(os.setsid)
    print("begin")  # Not flushed: a fork must not write it twice.
    try:
        if arguments.detach:
            outcome = detach(run, paths, say, timeout_s=arguments.timeout, began_s=began_s)
        else:
            outcome = run(say, lambda: say("all serve"))
    except MqprocError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    say(f"outcome {outcome.exit_code}: {outcome.reason}")
    return outcome.exit_code


PROGRAM = Path(__file__)
MODULE = "tests.supervisor.running_group"

PATIENCE_S = 60.0


def wait_until(condition: Callable[[], object], what: str = "", timeout_s: float = PATIENCE_S) -> float:
    """Poll until the condition is true; return the elapsed time in ms."""
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
    """One run of this module's program."""

    def __init__(self, root: Path, *arguments: str, wait: bool = True, stdout: int | None = None) -> None:
        self.root = root
        self.paths = StorePaths(root)
        self.lines: list[str] = []
        self.errors: list[str] = []
        self._control: Control | None = None
        self._readers: list[threading.Thread] = []
        output = self._collected(self.lines) if stdout is None else os.dup(stdout)
        errors = self._collected(self.errors)
        self.process = fork_server().start([MODULE, str(root), *arguments], os.environ, output, errors)
        for fd in (output, errors):
            os.close(fd)
        for reader in self._readers:
            reader.start()
        if wait:
            self.wait_for_line("all serve")

    # Output

    def _collected(self, lines: list[str]) -> int:
        """A descriptor to write to; the written lines are appended to `lines`."""
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

    # State

    @property
    def control(self) -> Control:
        if self._control is None:
            self._control = Control.open(StoreIO(), self.paths)
        return self._control

    def word(self, role: str, name: str) -> int:
        return self.control.load(layout.role_word(role, name))

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

    # Actions

    def kill(self, role: str, number: signal.Signals = signal.SIGKILL) -> int:
        pid = self.pid(role)
        os.kill(pid, number)
        return pid

    def kill_and_wait(self, role: str) -> float:
        """SIGKILL a role; return the ms until its successor has done work."""
        before, incarnation = self.cycles(role), self.word(role, "incarnation")
        self.kill(role)
        return wait_until(
            lambda: self.word(role, "incarnation") > incarnation and self.running(role) and self.cycles(role) > before,
            f"{role} again",
        )

    def ask(self, operation: Operation, options: FrameOptions | None = None) -> FrameOptions:
        """Send one request to the control socket; return the answer."""
        with self.send(operation, options) as client:
            return answer_to(client, operation)

    def send(self, operation: Operation, options: FrameOptions | None = None) -> socket.socket:
        """Send one request to the control socket; return the connection."""
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        client.settimeout(PATIENCE_S)
        connect(client, self.paths.socket("ctl"))
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
        """End all remaining processes."""
        if self.process.poll() is None:
            self.process.kill()
        self.wait()
        if self._control is not None:
            self._control.close()


@contextlib.contextmanager
def first_in_line(*pids: int) -> Iterator[None]:
    """Raise the priority of these processes, their children and this thread, if run as root."""
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
    """The supervisor's answer; a refusal is raised."""
    reader = FrameReader(1 << 20)
    while (found := reader.next_frame()) is None:
        count = client.recv_into(reader.writable())
        assert count, "the supervisor closed the connection without an answer"
        reader.received(count)
    if found.operation & frame.REFUSAL:
        raise decode_refusal(found.options)
    return msgspec.msgpack.decode(found.options, type=ANSWERS[operation])


def alive(pid: int) -> bool:
    """True if a process is running; a zombie is not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def titles_of(root: Path) -> dict[int, str]:
    """Running processes whose titles name this store."""
    found = {}
    for process in psutil.process_iter(["cmdline", "status"]):
        title = " ".join(process.info["cmdline"] or ()).strip()
        if title.startswith("mqproc: ") and title.endswith(f"[{root}]"):
            found[process.pid] = title
    return found


if __name__ == "__main__":
    sys.exit(main())
