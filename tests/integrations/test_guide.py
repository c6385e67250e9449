"""The programs of the guide to integrations run as shown, against a real store."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.group import PATIENCE_S, ROOT, Group, bodies, wait_until

GUIDE = (ROOT / "mqproc/guides/integrations.md").read_text()
PROGRAMS = dict(re.findall(r"```python notest\n# (\S+)\n(.*?)```", GUIDE, re.DOTALL))
LINES_MAX = 20


@pytest.fixture
def folder(tmp_path: Path, group: Group, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, code in PROGRAMS.items():
        (tmp_path / name).write_text(code.replace("/var/lib/store", str(group.store)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextlib.contextmanager
def running(*command: str, folder: Path) -> Iterator[Path]:
    """A program, ended with SIGTERM; its output is in the file."""
    log = folder / "log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [sys.executable, "-m", *command], stdout=output, stderr=output, start_new_session=True
        ) as started,
    ):
        try:
            yield log
            assert started.poll() is None, log.read_text()
            started.terminate()
            assert started.wait(PATIENCE_S) == 0, log.read_text()
        finally:
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGKILL)


def test_programs_are_short() -> None:
    assert sorted(PROGRAMS) == ["app.py", "tasks.py", "test_orders.py", "traced.py"]
    assert [name for name, code in PROGRAMS.items() if len(code.splitlines()) >= LINES_MAX] == []


def test_celery_program_runs(folder: Path) -> None:
    (folder / "call.py").write_text("import mqproc.integrations.celery\nfrom tasks import add\nadd.delay(2, 3)\n")
    (folder / "sitecustomize.py").write_text("import mqproc.integrations.celery\n")
    subprocess.run([sys.executable, "call.py"], check=True, timeout=PATIENCE_S)
    with running("celery", "-A", "tasks", "worker", "--concurrency", "1", folder=folder) as log:
        wait_until(lambda: "\n5\n" in log.read_text() or "] 5" in log.read_text(), what="the sum")


def test_faststream_program_runs(folder: Path, group: Group) -> None:
    with running("faststream", "run", "app:app", folder=folder), group.client() as client:
        wait_until(lambda: client.queues("invoices") and bodies(client, "invoices"), what="the invoice")
        assert bodies(client, "invoices") == [b'{"order":7,"paid":false}']


def test_opentelemetry_program_runs(folder: Path, group: Group) -> None:
    with group.client() as client:
        client.send("orders", b"x", properties={"traceparent": f"00-{1:032x}-{2:016x}-01"})
    command = ["worker", "traced:handle", "--topic", "orders", "--group", "billing", "--from", "earliest"]
    with running("mqproc", *command, "--store", str(group.store), folder=folder) as log:
        wait_until(lambda: f"in span 00-{1:032x}" in log.read_text(), what="the handler")


def test_pytest_program_runs(folder: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "test_orders.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
