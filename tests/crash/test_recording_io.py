"""Tests of interpreted kernels: line-by-line stores and kills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.crash.levels import INTERPRETED

ROOT = Path(__file__).resolve().parents[2]
TOLD = """
import json, sys
from pathlib import Path
from tests.crash.disk import Disk
from tests.crash.story import Story
from tests.crash.recording_io import Lines

killed = []
kill = Lines._kill
Lines._kill = lambda lines, machine, frame: (killed.append(frame.f_lineno), kill(lines, machine, frame))
most = 0
stored = Disk.stored
def stored_and_counted(disk, fd, offset, size):
    global most
    stored(disk, fd, offset, size)
    for number in disk._mapped:
        most = max([most, *map(len, disk._nodes[number].pending.values())])
Disk.stored = stored_and_counted
tally = Story(int(sys.argv[1]), Path(sys.argv[2]) / "story", images=1).run()
print(json.dumps([tally.lines, most, len(set(killed)), tally.digest]))
"""
# A seed with kills, whose roles put entries in the index.
SEED = 0


def traced_story(folder: Path, environment: dict[str, str]) -> list[Any]:
    """Lines seen, most versions of an index page, lines with kills, and the digest."""
    folder.mkdir()
    command = [sys.executable, "-c", TOLD, str(SEED), str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=600, check=True
    )
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.timeout(900)
def test_lines_of_interpreted_kernels_make_page_versions_and_kill_points(tmp_path: Path) -> None:
    lines, versions, killed, digest = traced_story(tmp_path / "twins", INTERPRETED)
    assert lines > 100
    assert killed > 0
    compiled_lines, compiled_versions, compiled_killed, _digest = traced_story(tmp_path / "compiled", {})
    assert (compiled_lines, compiled_killed) == (0, 0)
    assert versions > 3 * compiled_versions
    assert traced_story(tmp_path / "again", INTERPRETED)[-1] == digest
