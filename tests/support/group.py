"""Group: a real group of processes, started as a user starts it; waiting for conditions."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from mqproc.errors import CorruptStoreError, NotRunningError
from mqproc.io.store_io import StoreIO
from mqproc.ipc.control import Control
from mqproc.layout import control as words_of
from mqproc.paths import StorePaths
from tests.support.fork_server import Running, fork_server

ROOT = Path(__file__).parents[2]
AS_NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 60.0
PATIENCE_S = 60.0
"""For conditions that come true by themselves on a busy machine. It measures no promised time."""
# Small files, so that tests cover every kind of roll.
SMALL: dict[str, Any] = {
    "mapped_file_size_commit_log": 1 << 20,
    "mapped_file_size_consume_queue": 20_000,
    "max_hash_slot_num": 5_000,
    "max_index_num": 20_000,
    "max_message_size": 1 << 18,
    "metrics_port": 0,
    # Old stores written by RocketMQ must not lose files when tests run at the hour of deletion.
    "file_reserved_time": 1 << 20,
}


def wait_until(condition: Callable[[], Any], timeout_s: float = PATIENCE_S, what: str = "condition") -> Any:
    """Wait until the condition is true and return its value. Fails after the timeout."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"{what} not reached within {timeout_s:g} s")
        time.sleep(0.002)
    return found


def keeps_below(limit: float, measure: Callable[[], float], rounds: int = 10) -> None:
    """Measure until a round stays below the limit; fail if none does.

    Other load makes a time longer, never shorter.
    """
    seen: list[float] = []
    while not seen or seen[-1] >= limit:
        if len(seen) == rounds:
            pytest.fail(f"{seen}: none is below {limit:g}")
        seen.append(measure())


class Group:
    """A group on a store: started, observed through its control file, killed in any way."""

    def __init__(self, store: Path, **options: Any) -> None:
        self.store = store
        self.paths = StorePaths(store)
        self.options = SMALL | options
        self.environment: dict[str, str] = {}
        """Variables beside this process's own. With LD_PRELOAD it is a program of its own that is started, for the
        loader to see it."""
        self.process: Running | None = None
        self.output = store.with_name(store.name + ".log")

    def start(self) -> Group:
        flags = [part for name, value in self.options.items() for part in ("--set", f"{name}={value}")]
        self.launch(["up", "--store", str(self.store), *flags])
        wait_until(self.ready, START_TIMEOUT_S, f"group ready: {self.output.read_text()[-2000:]}")
        return self

    def launch(self, arguments: list[str]) -> None:
        """Run `mqproc` with these arguments as this group's supervisor, without waiting."""
        self.output.touch(0o600)
        environment = os.environ | self.environment
        with self.output.open("ab") as output:
            if "LD_PRELOAD" not in self.environment:
                self.process = fork_server().start(["mqproc", *arguments], environment, output.fileno())
                return
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mqproc", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
            )

    def ready(self) -> bool:
        if self.process is not None and self.process.poll() is not None:
            pytest.fail(f"the group ended with {self.process.returncode}:\n{self.output.read_text()[-4000:]}")
        return self.is_ready()

    def is_ready(self) -> bool:
        """Like `ready`, but the group may have ended."""
        words = self.words()
        if not words or words["group_state"] != words_of.GROUP_READY:
            return False
        return self.process is None or words["supervisor_pid"] == self.process.pid

    def words(self) -> dict[str, int]:
        """All control words; empty before the file exists."""
        try:
            control = Control.open(StoreIO(), self.paths)
        except (NotRunningError, CorruptStoreError):
            return {}
        try:
            return control.snapshot()
        finally:
            control.close()

    def pid(self, role: str) -> int:
        """A role's pid; waits during its restart.

        A signal to pid 0 would go to the whole process group of the tests.
        """
        word = "supervisor_pid" if role == words_of.SUPERVISOR else f"{role}.pid"
        found: int = wait_until(lambda: self.words()[word], what=f"a running {role}")
        return found

    def went_round(self, role: str) -> None:
        """Wait until a role has begun and finished a whole step after this call.

        The heartbeat marks the beginning of a step: after two heartbeats one step is complete.
        """
        word, since_ns = f"{role}.heartbeat_ns", time.monotonic_ns()
        first_ns = wait_until(lambda: max(0, self.words()[word] - since_ns), what=f"a step of {role}")
        wait_until(lambda: self.words()[word] - since_ns > first_ns, what=f"the next step of {role}")

    @contextlib.contextmanager
    def held_up(self, role: str) -> Iterator[None]:
        """Stop a role for the duration of the block."""
        pid = self.pid(role)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def caught_up(self) -> bool:
        words = self.words()
        return words["dispatched"] >= words["written"]

    def wait_dispatched(self) -> None:
        wait_until(self.caught_up, what="dispatch at the end of the log")

    def client(self, **settings: Any) -> Any:
        from mqproc import Client

        return Client(self.store, **settings)

    def stop(self) -> int:
        """Stop cleanly; return the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_TIMEOUT_S)

    def kill(self) -> None:
        """Kill the supervisor; all other processes die with it."""
        assert self.process is not None
        pids = [self.pid(role) for role in words_of.ROLES]
        self.process.kill()
        self.process.wait(STOP_TIMEOUT_S)
        for pid in pids:
            wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), what=f"end of {pid}")

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(STOP_TIMEOUT_S)


def skip_unless_nobody_can_run() -> None:
    """Skip a test where starting a program as another user is not possible."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can switch users")
    command = [*AS_NOBODY, sys.executable, "-c", "import mqproc"]
    environment = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, timeout=60, check=False)
    if done.returncode:
        pytest.skip(f"others may not read {sys.prefix} or {ROOT}")


# HeldGroup: a group of real roles whose recovery stops at named points until the test continues it. This module,
# run as a program, is `mqproc up` with such a recovery.


POINTS: Final = ("recover.scanned", "recover.cq_rebuilt", "recover.marked")
"""In the order in which recovery comes to them: the log is read, all is dispatched, the marks are moved."""


class HeldIO(StoreIO):
    """A StoreIO that blocks at each of POINTS until the test continues."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def crash_point(self, name: str) -> None:
        if name in POINTS:
            (self._folder / f"at {name}").touch()
            while not (self._folder / f"go {name}").exists():
                time.sleep(0.005)


class HeldGroup(Group):
    """A group on an existing store, killed before so that recovery runs completely."""

    def begin(self) -> None:
        """Start without waiting."""
        flags = [f"{name}={value}" for name, value in self.options.items()]
        with self.output.open("ab") as output:
            command = ["tests.support.group", str(self.store), *flags]
            self.process = fork_server().start(command, os.environ, output.fileno())

    def until_at(self, point: str) -> None:
        """Wait until recovery is at this point."""
        assert self.process is not None
        there = self.store.parent / f"at {point}"

        def stands() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, self.output.read_text()[-3000:]
            return there.exists()

        wait_until(stands, START_TIMEOUT_S, f"recovery at {point}")

    def go_on(self, *points: str) -> None:
        """Continue recovery from these points."""
        for point in points:
            (self.store.parent / f"go {point}").touch()

    def url(self) -> str:
        """The monitor's URL."""
        port = wait_until(lambda: self.words()["monitor_port"], what="the monitor listens")
        return f"http://127.0.0.1:{port}"

    def get(self, path: str) -> tuple[int, str]:
        """Status and text of a response."""
        try:
            with urllib.request.urlopen(self.url() + path, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()


def main(store: str, *flags: str) -> int:
    from mqproc.cli.admin.engine_hooks import adopted_options, engine_hooks
    from mqproc.config.parse import load_options
    from mqproc.roles.registry import SPECS
    from mqproc.supervisor import supervise

    paths = StorePaths(Path(store))
    options = adopted_options(paths, load_options(flags=list(flags), environment={}), print)
    return supervise(paths, options, SPECS, engine_hooks(), io=HeldIO(paths.root.parent)).exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
