"""Python processes started by Spark: the PySpark they import, sockets, silent exit."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest

from mqproc.spark.session import python_program, socket_settings

PACKAGE = Path(pyspark.__file__).parent
TIMEOUT_S = 60


def test_workers_import_installed_pyspark() -> None:
    program = [python_program(), "-c", "import pyspark; print(pyspark.__file__)"]
    found = []
    for path in (PACKAGE / "python" / "lib" / "pyspark.zip", ""):
        environment = os.environ | {"PYTHONPATH": str(path)}
        done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        found.append(Path(done.stdout.strip()).resolve().parent)
    assert found == [PACKAGE.resolve()] * 2


def test_sockets_folder_is_private() -> None:
    folder = Path(socket_settings(python_program())["spark.python.unix.domain.socket.dir"])
    assert folder.is_dir()
    assert folder.parent.stat().st_mode & 0o077 == 0


def test_sockets_are_off_for_long_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 60)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(deep))
    assert socket_settings(python_program()) == {}


def test_sockets_of_killed_sessions_are_removed_at_start(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(short_folder))
    folder = Path(socket_settings(python_program())["spark.python.unix.domain.socket.dir"])
    names = (".living.sock", ".fresh.sock", ".killed.sock")
    sockets = [socket.socket(socket.AF_UNIX) for _name in names]
    for each, name in zip(sockets, names, strict=True):
        each.bind(str(folder / name))
    for each in sockets[1:]:
        each.close()
    (folder / ".no socket.sock").touch()
    for name in (".living.sock", ".killed.sock", ".no socket.sock"):
        os.utime(folder / name, (0, 0))
    socket_settings(python_program())
    sockets[0].close()
    assert sorted(each.name for each in folder.iterdir()) == [".fresh.sock", ".living.sock", ".no socket.sock"]


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="mqproc-") as folder:
        yield Path(folder)


@pytest.mark.parametrize("module", ["pyspark.daemon", "mqproc.spark.worker"])
def test_worker_exits_silently_when_java_closes_first(module: str, short_folder: Path) -> None:
    """Java closes first, as at the end of a session. Spark's own module prints a traceback."""
    own = module == "mqproc.spark.worker"
    # By the script, mqproc's module replaces Spark's.
    program = [python_program(), "-m", "pyspark.daemon"] if own else [sys.executable, "-m", module]
    environment = os.environ | {
        "PYTHON_UNIX_DOMAIN_ENABLED": "true",
        "PYTHON_WORKER_FACTORY_SOCK_DIR": str(short_folder),
        "PYTHON_DAEMON_KILL_WORKER_ON_FLUSH_FAILURE": "1",
        "SPARK_REUSE_WORKER": "1",
    }
    with subprocess.Popen(
        [*program, "pyspark.worker"], env=environment,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as daemon:  # fmt: skip
        try:
            assert daemon.stdin
            assert daemon.stdout
            assert daemon.stderr
            path = daemon.stdout.read(int.from_bytes(daemon.stdout.read(4), "big"))
            with socket.socket(socket.AF_UNIX) as java:
                java.settimeout(TIMEOUT_S)
                java.connect(path)
                worker = os.pidfd_open(int.from_bytes(java.recv(4, socket.MSG_WAITALL), "big"))
            assert select.select([worker], [], [], TIMEOUT_S)[0] == [worker]
            os.close(worker)
            daemon.stdin.close()
            daemon.wait(TIMEOUT_S)
            said = daemon.stderr.read().decode()
        finally:
            daemon.kill()
    assert ("Traceback" in said) is not own, said
