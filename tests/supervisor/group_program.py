"""A supervisor with tiny roles, for the tests of this folder: run as a process of its own.

Each role counts into its word `cycles`, holds a file lock of its own (two of a role at once would be seen), and appends
to `events` what happened to it. What a role is to do wrong is told by `--bad ROLE:WHAT`.
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import fcntl
import math
import mmap
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from mqproc.config.options import Options
from mqproc.config.parse import load_options
from mqproc.errors import ConfigurationError, CorruptStoreError, MqprocError
from mqproc.io.store_io import FailedSyncError
from mqproc.ipc import bell
from mqproc.layout import control as layout
from mqproc.paths import StorePaths
from mqproc.roles.role import BellKind, RoleContext, RoleSpec
from mqproc.supervisor import GroupContext, Hooks, Outcome, RestartPolicy, Timing, detach, supervise

WITH_SOCKETS = {layout.WRITER, layout.QUERY}
LAZY_S = 0.02
STEP_NS = 5_000_000
SLOW_SYNC_LOOKS = 6000


def note(root: Path, line: str) -> None:
    """Append a line to the test's own record of what happened, in one write."""
    fd = os.open(root / "events", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, f"{line}\n".encode())
    os.close(fd)


class Counter:
    """Works a little, waits at its bell, counts."""

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
            raise CorruptStoreError("bytes are not what they must be")
        if bad == "boot-bug":
            raise RuntimeError("a bug in the factory")
        if bad == "slow-sync":
            # The supervisor looks by its clock, and the role is in its first step by then.
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
    """An `open` for writing, on a file system that has become read-only."""
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
            for _ in range(6000):  # In steps: a signal that comes just before a sleep is heard after it.
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
    """Have it noted when the supervisor makes the kernels ready that bells call."""
    warm = bell.warm

    def noted() -> None:
        note(root, "bells warm")
        warm()

    bell.warm = noted


def interrupted(call: Callable[[], None]) -> Callable[[], None]:
    """The call, just behind a Ctrl-C."""

    def made() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        call()

    return made


def refused_while(path: Path, fork: Callable[[], int]) -> Callable[[], int]:
    """The fork of a machine that has no room for another process as long as the file is there."""

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
    # Looked at often; whoever is to be too slow has its time from the test, so that nobody else is.
    patient = dict.fromkeys(("stop_ms", "quick_stop_ms", "take_back_ms", "spawn_ms"), 20000)
    shorter = {name: int(ms) for name, ms in (item.split("=") for item in arguments.timing)}
    timing = dataclasses.replace(Timing(tick_ms=50, abort_grace_ms=300), **patient | shorter)
    policy = RestartPolicy(back_off_ms=20, window_ms=arguments.window_ms)

    def run(report, ready) -> Outcome:  # type: ignore[no-untyped-def]
        hooks = make_hooks(arguments)
        told = lambda control: ready()  # noqa: E731
        return supervise(paths, options, specs, hooks, report=report, ready=told, timing=timing, policy=policy)

    def say(line: str) -> None:
        print(line, flush=True)

    began_s = time.monotonic() - arguments.began_before
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if arguments.ctrl_c_at_setsid:
        os.setsid = interrupted(os.setsid)
    print("begin")  # Not flushed: a fork must not write it a second time.
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


if __name__ == "__main__":
    sys.exit(main())
