"""Starting a group in the background, interrupted."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mqproc.cli.admin import supervisor_client as spawned_group
from mqproc.cli.admin.supervisor_client import start_detached
from tests.support.command_line import call


def test_start_detached_interrupted_leaves_no_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[str]] = []

    class Interrupted(subprocess.Popen[str]):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            started.append(self)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(spawned_group.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        start_detached(tmp_path / "store", ["metrics_port=0"], None, print)
    assert [child.poll() for child in started] == [0]
    assert call("status", "--store", tmp_path / "store").code == 9
