"""A group, and clients, forked from this process, which has loaded what they need: many starts, cheaply."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from mqproc.cli.admin import engine_hooks
from mqproc.cli.admin.warm import make_ready
from mqproc.cli.main import main
from mqproc.io.store_io import StoreIO
from mqproc.ipc.store_lock import lock_holder
from mqproc.roles import registry
from mqproc.supervisor import signals as prctl
from tests.conftest import START_TIMEOUT_S, Group, wait_until

END_TIMEOUT_S = 30.0
LOAD_TIMEOUT_S = 60.0
_FORK = multiprocessing.get_context("fork")


def warm() -> None:
    """Load what a group needs, once for all that are forked afterwards."""
    assert engine_hooks
    assert registry.SPECS
    make_ready()


def forked(work: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Run `work` in a process that ends with this one."""
    process = _FORK.Process(target=_live, args=(os.getpid(), work, arguments), daemon=True)
    process.start()
    return process


def _live(parent: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    prctl.die_with_parent()
    if os.getppid() == parent:
        work(*arguments)


class WarmGroup(Group):
    """`mqproc up` without its first second and a half, with variables in its environment."""

    def start(self, environment: Mapping[str, str] | None = None) -> WarmGroup:
        """Start and wait until every role serves."""
        self.begin(environment)
        wait_until(self.ready, START_TIMEOUT_S, "group ready")
        return self

    def begin(self, environment: Mapping[str, str] | None = None) -> None:
        """Start and wait for nothing."""
        flags = [part for name, value in self.options.items() for part in ("--set", f"{name}={value}")]
        arguments = ["up", "--store", str(self.store), *flags]
        self.process = _Forked(forked(_mqproc, arguments, dict(environment or {}), self.output))

    def comes_up(self, environment: Mapping[str, str]) -> bool:
        """Start and wait until every role serves, True, or until the supervisor has ended."""
        self.begin(environment)
        process = self.process
        assert process is not None
        what = f"a start with {environment}"
        wait_until(lambda: process.poll() is not None or self.is_ready(), START_TIMEOUT_S, what)
        return process.poll() is None

    def run(self, *arguments: str) -> int:
        """A command of `mqproc`; its exit code."""
        process = forked(_mqproc, list(arguments), {}, self.output)
        process.join(START_TIMEOUT_S)
        assert process.exitcode is not None, f"mqproc {' '.join(arguments)} takes longer than {START_TIMEOUT_S:g} s"
        return process.exitcode

    def goes_on(self, messages: int) -> None:
        """Wait until so many more are appended."""
        goal = self.words()["appended_messages"] + messages
        wait_until(lambda: self.words()["appended_messages"] >= goal, LOAD_TIMEOUT_S, "load goes on")

    def wait_ended(self) -> int:
        """Wait until the supervisor and all that held the store are gone; the exit code, -9 for a kill."""
        assert self.process is not None
        code = self.process.wait(END_TIMEOUT_S)
        self.wait_free()
        return code

    def wait_free(self) -> None:
        """Wait until nobody holds the store's lock."""
        wait_until(lambda: lock_holder(StoreIO(), self.paths) is None, END_TIMEOUT_S, "the lock free")

    def kill(self) -> None:
        """kill -9 of the supervisor, which takes everything along."""
        assert self.process is not None
        self.process.kill()
        self.wait_ended()

    def close(self) -> None:
        """The same, whatever has happened."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(END_TIMEOUT_S)


class _Forked:
    """The part of subprocess.Popen that a Group uses."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        assert process.pid is not None
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("mqproc up", timeout)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, sig: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, sig)


def _mqproc(arguments: list[str], environment: dict[str, str], output: Path) -> None:
    fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for standard in (1, 2):
        os.dup2(fd, standard)
    os.close(fd)
    os.environ.update(environment)
    sys.exit(main(arguments))
