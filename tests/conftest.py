"""A real group of processes for tests, started by the command that a user would type."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from mqproc.cli.admin.kernel_cache import fill_cache
from mqproc.errors import CorruptStoreError, NotRunningError
from mqproc.io.store_io import StoreIO
from mqproc.ipc.control import Control
from mqproc.kernels.jit import compile as jit
from mqproc.layout import control as words_of
from mqproc.paths import StorePaths
from tests.allocator import map_large_blocks
from tests.nursery import Running, nursery

# The same examples in every run: a test that fails now and then says nothing about the change at hand.
# How fast examples are made says nothing about it either.
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")

# Here, since a process that only hands tests to others (`-n`) loads no conftest.py further in.
pytest_plugins = ["tests.interop.ledger"]

ROOT = Path(__file__).parents[1]
AS_NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 60.0
PATIENCE_S = 60.0
"""For what comes by itself, on a machine that is busy with other things too. No promise is measured by it."""
# Small files, so that tests see every kind of roll.
SMALL: dict[str, Any] = {
    "mapped_file_size_commit_log": 1 << 20,
    "mapped_file_size_consume_queue": 20_000,
    "max_hash_slot_num": 5_000,
    "max_index_num": 20_000,
    "max_message_size": 1 << 18,
    "metrics_port": 0,
    # Stores that RocketMQ wrote long ago are not to lose files when tests run at the hour of deletion.
    "file_reserved_time": 1 << 20,
}


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """A third of what it takes to collect thousands of tests went into looking for garbage among them.

    It is looked for among what tests make.
    """
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Have the kernels compiled once: the processes that run tests would each do it, within a test's time.

    A shell without jobs of its own (`pytest &` in a script) has what it starts beside it pass over Ctrl-C, and `nohup`
    over SIGHUP: so would all that tests interrupt or hang up.
    """
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)
    map_large_blocks()
    if jit.COMPILED and not hasattr(session.config, "workerinput"):
        fill_cache()


def wait_until(condition: Callable[[], Any], timeout_s: float = PATIENCE_S, what: str = "condition") -> Any:
    """The condition's value once it is true. Fails after the timeout."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"{what} not reached within {timeout_s:g} s")
        time.sleep(0.002)
    return found


def keeps_below(limit: float, measure: Callable[[], float], rounds: int = 10) -> None:
    """Measure until a round stays below the limit; fails when none does.

    Whatever else wants the processor makes a time longer, never shorter.
    """
    seen: list[float] = []
    while not seen or seen[-1] >= limit:
        if len(seen) == rounds:
            pytest.fail(f"{seen}: none is below {limit:g}")
        seen.append(measure())


class Group:
    """A group on a store: started, watched through its control file, killed in any way."""

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
        """Run `mqproc` with these arguments as this group's supervisor, and wait for nothing."""
        self.output.touch(0o600)
        environment = os.environ | self.environment
        with self.output.open("ab") as output:
            if "LD_PRELOAD" not in self.environment:
                self.process = nursery().start(["mqproc", *arguments], environment, output.fileno())
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
        """As `ready`, of a group that may as well have ended."""
        words = self.words()
        if not words or words["group_state"] != words_of.GROUP_READY:
            return False
        return self.process is None or words["supervisor_pid"] == self.process.pid

    def words(self) -> dict[str, int]:
        """Every control word, empty before there is a file."""
        try:
            control = Control.open(StoreIO(), self.paths)
        except (NotRunningError, CorruptStoreError):
            return {}
        try:
            return control.snapshot()
        finally:
            control.close()

    def pid(self, role: str) -> int:
        """A role's process, the next one when it is being started again: a signal to 0 would be one to all of us."""
        word = "supervisor_pid" if role == words_of.SUPERVISOR else f"{role}.pid"
        found: int = wait_until(lambda: self.words()[word], what=f"a running {role}")
        return found

    def went_round(self, role: str) -> None:
        """Wait until a role has begun and ended a step: what was to be done by now it has done.

        It beats when a step begins, so two beats later a whole one lies behind it.
        """
        word, since_ns = f"{role}.heartbeat_ns", time.monotonic_ns()
        first_ns = wait_until(lambda: max(0, self.words()[word] - since_ns), what=f"a step of {role}")
        wait_until(lambda: self.words()[word] - since_ns > first_ns, what=f"the next step of {role}")

    @contextlib.contextmanager
    def held_up(self, role: str) -> Iterator[None]:
        """A role that does nothing for a moment."""
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
        """Stop in order; returns the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_TIMEOUT_S)

    def kill(self) -> None:
        """Kill the supervisor; everything else goes with it."""
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


@pytest.fixture
def make_group(tmp_path: Path) -> Iterator[Callable[..., Group]]:
    """Start groups on stores below `tmp_path`; all are gone after the test."""
    groups: list[Group] = []

    def make(name: str = "store", **options: Any) -> Group:
        groups.append(Group(tmp_path / name, **options))
        return groups[-1].start()

    yield make
    for group in groups:
        group.close()


@pytest.fixture
def group(make_group: Callable[..., Group]) -> Group:
    """A running group with small files."""
    return make_group()


def skip_unless_nobody_can_run() -> None:
    """Skip a test that starts a program as another user where that is not possible."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can become somebody else")
    command = [*AS_NOBODY, sys.executable, "-c", "import mqproc"]
    environment = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, timeout=60, check=False)
    if done.returncode:
        pytest.skip(f"others may not read {sys.prefix} or {ROOT}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `-n …` files that declare a longer time begin first, then those of many tests: none is long at the end."""
    if not hasattr(config, "workerinput"):
        return
    times_s: dict[Path, float] = {}
    counts: Counter[Path] = Counter(item.path for item in items)
    for item in items:
        declared = item.get_closest_marker("timeout")
        time_s = float(declared.args[0]) if declared and declared.args else 0.0
        times_s[item.path] = max(time_s, times_s.get(item.path, 0.0))
    items.sort(key=lambda item: (-times_s[item.path], -counts[item.path], item.path))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What takes over a minute is run when it is asked for."""
    if item.get_closest_marker("slow") and "slow" not in item.config.option.markexpr:
        pytest.skip("takes over a minute; run with -m slow")


OWN_SPARK = {"tests/spark/jobs/test_cluster.py"}
"""What starts Spark as other programs, and shares no session with the rest."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n …` a file's tests stay together, and all that need Spark share one session."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "spark" if file.startswith("tests/spark/") and file not in OWN_SPARK else file

    # In the order in which they are collected.
    config.option.loadscopereorder = False
    return ByFile(config, log)
