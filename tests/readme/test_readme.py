"""The README's Python example runs as it stands, and its commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


# What each Python example prints: by a word of it.
PRINTED = {
    'b"hello"': ["b'hello'", "0 0 b'hello'", "1"],
    "shipping": ["bill b'order 0'", "bill b'order 2'", "bill b'order 4'", "dead 3", "again 6"],
    "simple_consumer": ["job b'job 0' 1", "job b'job 1' 1", "job b'job 2' 1"],
    "reminders": ["now b'to the millisecond'", "now b'first'", "now b'second'", "now b'by level'"],
    "became_of": ["the card was refused", "booked b'paid'", "booked b'paid too'"],
    "SqlFilter": ["11 10", "b'order 7' 70.5", "b'order 8' 80.5", "b'order 9' 90.5", "FOUND", "3 0"],
}


@pytest.mark.parametrize("word", PRINTED)
def test_the_python_examples_run(tmp_path: Path, word: str) -> None:
    (example,) = (block for block in blocks("python") if word in block)
    done = subprocess.run(
        [sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(PRINTED[word])


def test_every_python_example_is_run() -> None:
    for block in blocks("python"):
        assert any(word in block for word in PRINTED), block


def test_every_command_of_the_readme_exists() -> None:
    commands = {match for block in blocks("sh") for match in re.findall(r"(?<!/)\bmqproc ([a-z]+)", block)}
    assert {"up", "send", "tail", "message", "stat"} <= commands
    for command in sorted(commands):
        help_text = subprocess.run(
            [sys.executable, "-m", "mqproc", command, "--help"], capture_output=True, text=True, timeout=60, check=False
        )
        assert help_text.returncode == 0, command
