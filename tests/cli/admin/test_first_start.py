"""The first start on a machine: a group serves before all its kernels are compiled."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from mqproc import Client, RetryPolicy, SqlFilter
from mqproc.errors import StoreBusyError
from mqproc.kernels.jit import cache
from mqproc.kernels.jit.compile import COMPILED
from mqproc.kernels.modules import LATER_NAMES
from tests.support.group import ROOT, SMALL, wait_until

pytestmark = pytest.mark.skipif(not COMPILED, reason="nothing is compiled")

PATIENCE_S = 240
PROGRESS = re.compile(r"kernels: \d+ of \d+ compiled(, \d+ s left)?")


class Machine:
    """An environment of its own, with an installation and a cache that lacks some kernels."""

    def __init__(self, folder: Path, missing: Sequence[str]) -> None:
        shutil.copytree(ROOT / "mqproc", folder / "mqproc", ignore=shutil.ignore_patterns("__pycache__"))
        full = cache.full_folder()
        assert full is not None
        self.folder = folder / "cache" / "mqproc" / full.name
        self.folder.mkdir(parents=True)
        for path in full.glob("*.nbc"):
            if not path.name.startswith(tuple(missing)):
                shutil.copy(path, self.folder)
        self.store = folder / "store"
        kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        self._environment = kept | {"PYTHONPATH": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Python with these arguments."""
        return subprocess.run(
            [sys.executable, "-P", *arguments],
            env=self._environment,
            cwd="/",
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def mqproc(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run("-m", "mqproc", command, "--store", str(self.store), *arguments)

    @contextlib.contextmanager
    def group(self) -> Iterator[list[str]]:
        """A running group; the lines of standard error during its start."""
        settings = [part for name, value in SMALL.items() for part in ("--set", f"{name}={value}")]
        started = self.mqproc("up", "--detach", *settings)
        try:
            assert started.returncode == 0, started.stderr
            yield started.stderr.splitlines()
        finally:
            self.mqproc("down")


def test_first_start_serves_while_filters_are_compiled(tmp_path: Path) -> None:
    machine = Machine(tmp_path, (*LATER_NAMES, "dispatch_step."))
    with machine.group() as lines:
        assert lines
        assert all(map(PROGRESS.fullmatch, lines)), lines
        chosen = SqlFilter("a = '1'")
        with Client(machine.store, timeout=PATIENCE_S) as client:
            client.create_topic("t", queues=1)
            client.send("t", b"body", properties={"a": "1"})
            client.wait_dispatched()
            assert len(client.pull("t", 0, 0).messages) == 1
            with (
                Client(machine.store, retry=RetryPolicy(enabled=False)) as impatient,
                pytest.raises(StoreBusyError, match=r"kernels for SQL92 filters are being compiled"),
            ):
                impatient.pull("t", 0, 0, filter=chosen)
            status = machine.mqproc("status", "--json")
            found = json.loads(status.stdout)
            assert (status.returncode, found["state"], found["problems"]) == (0, "ready", [])
            assert "left to compile" in found["warnings"][0]
            assert len(client.pull("t", 0, 0, filter=chosen).messages) == 1, "the client waits"
    assert not cache.is_full(machine.folder)


def test_first_start_is_full_after_background_compilation(tmp_path: Path) -> None:
    machine = Machine(tmp_path, ("verify.", "dispatch_step."))
    program = f"import mqproc\nwith mqproc.open({str(machine.store)!r}, options={SMALL!r}) as client: client.health()"
    opened = machine.run("-c", program)
    assert opened.returncode == 0, opened.stderr
    assert all(map(PROGRESS.fullmatch, opened.stderr.splitlines())), opened.stderr
    assert opened.stderr
    with machine.group():
        wait_until(lambda: cache.is_full(machine.folder), PATIENCE_S, "all kernels are compiled")
    with machine.group() as lines:
        assert not lines
        assert not json.loads(machine.mqproc("status", "--json").stdout)["warnings"]


@pytest.mark.slow
def test_first_start_compiles_everything(tmp_path: Path) -> None:
    machine = Machine(tmp_path, ("",))
    with machine.group() as lines:
        assert any(line.endswith("s left") for line in lines)
        with Client(machine.store, timeout=PATIENCE_S) as client:
            client.send("t", b"body", properties={"a": "1"})
            client.wait_dispatched()
            assert len(client.pull("t", 0, 0, filter=SqlFilter("a = '1'")).messages) == 1
        wait_until(lambda: cache.is_full(machine.folder), PATIENCE_S, "all kernels are compiled")
