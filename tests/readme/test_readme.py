"""The README's Python example runs as it stands, and its commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_python_example_runs(tmp_path: Path) -> None:
    (example,) = blocks("python")
    done = subprocess.run(
        [sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["b'hello'", "0 0 b'hello'", "1"]


def test_every_command_of_the_readme_exists() -> None:
    commands = {match for block in blocks("sh") for match in re.findall(r"(?<!/)\bmqproc ([a-z]+)", block)}
    assert {"up", "send", "tail", "message", "stat"} <= commands
    for command in sorted(commands):
        help_text = subprocess.run(
            [sys.executable, "-m", "mqproc", command, "--help"], capture_output=True, text=True, timeout=60, check=False
        )
        assert help_text.returncode == 0, command
