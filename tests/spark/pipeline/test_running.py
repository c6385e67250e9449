"""Running a pipeline leaves no processes behind; a script replaces Spark's tool."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from mqproc.errors import InternalError
from mqproc.spark.jobs import pipeline
from mqproc.spark.jobs.pipeline import PipelineFolder, prepare, run
from tests.support.group import PATIENCE_S, wait_until


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PipelineFolder:
    monkeypatch.setattr(pipeline, "_TOOL", "spark-pipelines-of-a-test")
    monkeypatch.setattr(pipeline, "_EXIT_TIMEOUT_S", 0.5)
    monkeypatch.setattr(pipeline, "prepare_environment", lambda master: None)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    (tmp_path / "bin").mkdir()
    return prepare(tmp_path / "pipeline", tmp_path / "store")


def tool(folder: PipelineFolder, script: str) -> None:
    program = folder.root.parent / "bin" / "spark-pipelines-of-a-test"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def is_running(pid: int) -> bool:
    """Whether a process is running. A process killed a moment ago may still be listed."""
    ends_s = time.monotonic() + PATIENCE_S
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() >= ends_s:
                return True
            time.sleep(0.01)
    return False


SERVER = "sleep 300 & echo $! > server; echo begun; "


@pytest.mark.parametrize("takes_sigterm", [True, False])
def test_run_timeout_kills_processes(
    folder: PipelineFolder, monkeypatch: pytest.MonkeyPatch, takes_sigterm: bool
) -> None:
    tool(folder, ("" if takes_sigterm else "trap '' TERM; ") + SERVER + "sleep 300")

    class Begun(subprocess.Popen[bytes]):
        """The timeout counts from the tool's start, which may be slow on a busy machine."""

        def wait(self, timeout: float | None = None) -> int:
            wait_until(lambda: "begun" in (folder.root / "last-run.log").read_text(), what="the tool begins")
            return super().wait(timeout)

    monkeypatch.setattr(pipeline.subprocess, "Popen", Begun)
    with pytest.raises(InternalError, match="the pipeline failed:\nbegun"):
        run(folder, "local[1]", {}, timeout_s=0.2)
    assert not is_running(int((folder.root / "server").read_text()))


def test_run_interrupted_kills_processes(folder: PipelineFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(folder, SERVER + "sleep 300")
    server = folder.root / "server"
    waited: list[object] = []

    class Interrupted(subprocess.Popen[bytes]):
        """Raises KeyboardInterrupt while waiting for the started tool."""

        def wait(self, timeout: float | None = None) -> int:
            if not waited:
                waited.append(self)
                wait_until(lambda: server.exists() and server.read_text(), what="the tool's process")
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(pipeline.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(folder, "local[1]", {})
    assert not is_running(int(server.read_text()))


def test_run_interrupted_during_start_kills_processes(folder: PipelineFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(folder, "sleep 300")
    started: list[int] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            started.append(self.pid)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(pipeline.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(folder, "local[1]", {})
    assert not is_running(*started)


def test_run_completed_leaves_no_processes(folder: PipelineFolder) -> None:
    tool(folder, "exit 0")
    run(folder, "local[1]", {})
    tool(folder, SERVER + "exit 3")
    with pytest.raises(InternalError, match="the pipeline failed:\nbegun"):
        run(folder, "local[1]", {})
    assert not is_running(int((folder.root / "server").read_text()))
