"""A group of the real roles whose recovery stands still at named points, until it is let go on.

Run as a program it is `mqproc up` but for that: see `HeldGroup`.
"""

from __future__ import annotations

import os
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Final

from mqproc.io.store_io import StoreIO
from mqproc.paths import StorePaths
from tests.conftest import START_TIMEOUT_S, Group, wait_until
from tests.nursery import nursery

POINTS: Final = ("recover.scanned", "recover.cq_rebuilt", "recover.marked")
"""In the order in which recovery comes to them: the log is read, all is dispatched, the marks are moved."""


class HeldIO(StoreIO):
    """Whoever comes to one of POINTS waits there."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def crash_point(self, name: str) -> None:
        if name in POINTS:
            (self._folder / f"at {name}").touch()
            while not (self._folder / f"go {name}").exists():
                time.sleep(0.005)


class HeldGroup(Group):
    """A group on an existing store; it must have been killed, for all of recovery to be gone through."""

    def begin(self) -> None:
        """Start, and wait for nothing."""
        flags = [f"{name}={value}" for name, value in self.options.items()]
        with self.output.open("ab") as output:
            command = ["tests.metrics.held_recovery", str(self.store), *flags]
            self.process = nursery().start(command, os.environ, output.fileno())

    def until_at(self, point: str) -> None:
        """Wait until recovery stands there."""
        assert self.process is not None
        there = self.store.parent / f"at {point}"

        def stands() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, self.output.read_text()[-3000:]
            return there.exists()

        wait_until(stands, START_TIMEOUT_S, f"recovery at {point}")

    def go_on(self, *points: str) -> None:
        """Let it go on from there."""
        for point in points:
            (self.store.parent / f"go {point}").touch()

    def url(self) -> str:
        """Where the monitor answers."""
        port = wait_until(lambda: self.words()["monitor_port"], what="the monitor listens")
        return f"http://127.0.0.1:{port}"

    def get(self, path: str) -> tuple[int, str]:
        """Status and text of an answer."""
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
