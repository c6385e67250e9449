"""Prometheus' own tools, where they are installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

REASON = "Prometheus is not installed: apt-get install prometheus"
needs_prometheus = pytest.mark.skipif(
    shutil.which("promtool") is None or shutil.which("prometheus") is None, reason=REASON
)


def promtool(*arguments: str | Path, stdin: str = "") -> None:
    """Run promtool; fails with what it says when it finds anything."""
    command = ["promtool", *map(str, arguments)]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
