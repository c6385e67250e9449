"""Deployment: units that systemd accepts, and a container's entry point as process 1.

The entry point is the Dockerfile's own command line, run in a separate pid namespace.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import psutil
import pytest

from mqproc.layout import control as layout
from mqproc.paths import StorePaths
from mqproc.supervisor.supervise import EXIT_INTERRUPTED
from tests.supervisor.running_group import PROGRAM
from tests.support.group import SMALL, Group, skip_unless_nobody_can_run, wait_until

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "supervisor" / "deploy"
UNITS = ["mqproc.service", "mqproc@.service"]
EXPOSURE_MAX = 2.0


@pytest.fixture
def unit_folder(tmp_path: Path) -> Path:
    """The units, with a program that exists on this machine."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not here: apt-get install systemd")
    program = tmp_path / "mqproc"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    for name in UNITS:
        text = (DEPLOY / name).read_text().replace("/usr/local/bin/mqproc", str(program))
        (tmp_path / name.replace("@", "@billing")).write_text(text)
    return tmp_path


@pytest.mark.parametrize("name", UNITS)
def test_unit_is_accepted_by_systemd(name: str, unit_folder: Path) -> None:
    unit = unit_folder / name.replace("@", "@billing")
    command = ["systemd-analyze", "verify", "--man=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("name", UNITS)
def test_unit_is_hardened(name: str, unit_folder: Path) -> None:
    unit = unit_folder / name.replace("@", "@billing")
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if "Unknown" in done.stderr or "unrecognized" in done.stderr:
        pytest.skip(f"this systemd-analyze knows no --offline: {done.stderr.strip()}")
    exposure = re.search(r"exposure level for \S+ ([\d.]+)", done.stdout)
    assert exposure is not None, done.stderr
    assert float(exposure[1]) <= EXPOSURE_MAX


def test_units_differ_in_names_only() -> None:
    def settings(name: str) -> list[str]:
        text = (DEPLOY / name).read_text().replace(" --config /etc/mqproc/%i.toml", "").replace("/%i", "")
        lines = (line for line in text.replace(" group %i", "").splitlines() if line and not line.startswith("#"))
        return list(lines)

    assert settings("mqproc.service") == settings("mqproc@.service")


def test_unit_permits_cpu_affinity_calls() -> None:
    unit = (DEPLOY / "mqproc.service").read_text()
    permitted = {
        name for line in re.findall(r"^SystemCallFilter=([^~@].*)$", unit, re.MULTILINE) for name in line.split()
    }
    placing = (ROOT / "mqproc" / "roles" / "role.py").read_text()
    assert set(re.findall(r"os\.((?:sched_)?set\w+)\(", placing)) == {"sched_setaffinity", "setpriority"} < permitted


def test_unit_does_not_restart_permanent_exit_codes() -> None:
    unit = (DEPLOY / "mqproc.service").read_text()
    prevented = re.search(r"^RestartPreventExitStatus=(.*)$", unit, re.MULTILINE)
    assert prevented is not None
    assert set(map(int, prevented[1].split())) == {2, 6, 7, 8, EXIT_INTERRUPTED}
    # A group stopped during recovery has not failed.
    assert f"\nSuccessExitStatus={EXIT_INTERRUPTED}\n" in unit


# Container


def test_image_contains_all_package_sources() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {line[1:] for line in lines if line.startswith("!")}
    assert "*" in lines
    sources = {"pyproject.toml", "setup.py", "build_backend.py", "mqproc", "supervisor"}
    assert kept == {*sources, project["readme"], *project["license-files"]}
    assert all((ROOT / name).exists() for name in kept)


def entry_point() -> list[str]:
    """ENTRYPOINT and CMD of the Dockerfile."""
    text = (DEPLOY / "Dockerfile").read_text()
    parts = [json.loads(found) for found in re.findall(r"^(?:ENTRYPOINT|CMD) (\[.*\])$", text, re.MULTILINE)]
    assert len(parts) == 2
    return [word for part in parts for word in part]


class Container:
    """The entry point as process 1 of a pid namespace.

    `/store` is a temporary folder, the port any free one.
    """

    def __init__(self, store: Path) -> None:
        command = [str(store) if word == "/store" else word for word in entry_point()]
        assert command[0] == "mqproc"
        settings = SMALL | {"metrics_host": "127.0.0.1"}
        flags = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        own = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
        self.group = Group(store)
        self._epoch = self.group.words().get("epoch", 0)
        self.output = store.parent / "out"
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [*own, sys.executable, "-m", *command, *flags],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        wait_until(self._ready, 90, "the container's group")
        (self.first,) = psutil.Process(self.process.pid).children()

    def _ready(self) -> bool:
        assert self.process.poll() is None, self.output.read_text()[-3000:]
        words = self.group.words()
        return words.get("group_state") == layout.GROUP_READY and words["epoch"] > self._epoch

    def run(self, script: str) -> None:
        """Run a process in the namespace like `docker exec`; its orphans go to process 1."""
        command = ["nsenter", "--target", str(self.first.pid), "--pid", "--mount", "sh", "-c", script]
        subprocess.run(command, check=True, timeout=60)

    def processes(self) -> list[psutil.Process]:
        """All processes of the namespace except the first."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return list(self.first.children(recursive=True))
        return []


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """The container's store."""
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("nsenter") is None:
        pytest.skip("a pid namespace needs root, unshare and nsenter")
    tried = subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip(f"no pid namespace can be made here: {tried.stderr.decode().strip()}")
    return tmp_path / "store"


def _children(process: psutil.Process) -> list[tuple[str, str]]:
    """Names and states of children that still exist."""
    found: list[tuple[str, str]] = []
    for child in process.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append((child.name(), child.status()))
    return found


def test_entry_point_starts_reaps_stops_and_recovers(store: Path) -> None:
    container = Container(store)
    try:
        assert container.group.words()["supervisor_pid"] == 1
        with container.group.client() as client:
            client.send_batch("orders", [b"kept"] * 100)
        # They exit after their input has been written.
        held = store.with_name("held")
        os.mkfifo(held)
        container.run(f"(read line; exit 3) <{held} & (exec cat) <{held} & exit 0")
        names = {"cat", "sh"}
        wait_until(lambda: sum(name in names for name, _ in _children(container.first)) == 2, what="orphans")
        held.write_bytes(b"")
        wait_until(
            lambda: (
                not any(name in names or status == psutil.STATUS_ZOMBIE for name, status in _children(container.first))
            ),
            what="orphans waited for",
        )
        others = container.processes()
        assert len(others) == len(layout.ROLES) + 1
        container.first.send_signal(signal.SIGKILL)
        container.process.wait(60)
        wait_until(lambda: not any(process.is_running() for process in others), what="everything gone")
        assert StorePaths(store).abort.exists()
    finally:
        container.process.kill()
        container.process.wait(10)

    container = Container(store)
    try:
        with container.group.client() as client:
            client.wait_dispatched()
            assert client.count("orders") == 100
        container.first.send_signal(signal.SIGTERM)
        assert container.process.wait(60) == 0
        assert not StorePaths(store).abort.exists()
    finally:
        container.process.kill()
        container.process.wait(10)


# Unprivileged user


def test_group_runs_as_unprivileged_user() -> None:
    """Files, sockets and processes belong to the unprivileged user; no privileges are needed."""
    skip_unless_nobody_can_run()
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        root = Path(folder) / "store"
        os.chown(folder, 65534, 65534)
        rights = ["--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs", "--bounding-set=-all"]
        environment = {"NUMBA_CACHE_DIR": f"{folder}/compiled", "HOME": folder, "PATH": os.environ["PATH"]}
        environment |= {"PYTHONPATH": str(PROGRAM.parents[2]), "PYTHONDONTWRITEBYTECODE": "1"}
        command = ["setpriv", *rights, sys.executable, str(PROGRAM), str(root), "--roles=writer,dispatcher"]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            assert any("all serve" in line for line in lines), process.communicate(timeout=10)[1]
            for path in (root, *root.rglob("*")):
                assert path.lstat().st_uid == 65534, path
            members = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            assert {member.uids().effective for member in members} == {65534}
            assert StorePaths(root).own.stat().st_mode & 0o777 == 0o700
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.communicate()
