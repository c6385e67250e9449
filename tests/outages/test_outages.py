"""A story of each kind holds, levels go on where they ended, and nothing of them is left. More: `--level ci`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mqproc.armed_io import CRASH_POINTS
from tests.outages import disks
from tests.outages.kills import points_of
from tests.outages.levels import KINDS, LEVELS, NEED_DISKS

ROOT = Path(__file__).resolve().parents[2]


def outages(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.outages", *arguments, "--workers", "1"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.timeout(600)
def test_a_story_of_each_kind_holds_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """And a level that has been gone through is not gone through again."""
    folder, progress = tmp_path / "stories", tmp_path / "progress.json"
    folder.mkdir()
    done = outages("--level", "brief", "--folder", str(folder), "--progress", str(progress))
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(folder.iterdir())
    # Neither mounts nor loop devices outlive the command.
    assert str(folder) not in Path("/proc/mounts").read_text()
    backing = Path("/sys/block").glob("loop*/loop/backing_file")
    assert not [file for file in backing if str(folder) in file.read_text()]
    again = outages("--level", "brief", "--folder", str(folder), "--progress", str(progress))
    assert again.stdout.splitlines()[-1] == done.stdout.splitlines()[-1]
    if reason := disks.missing():
        pytest.skip(f"no stories of {', '.join(sorted(NEED_DISKS))}: {reason}")
    assert set(KINDS) == {line.split()[0] for line in done.stdout.splitlines() if line.endswith("outages")}


def test_a_level_kills_at_every_point_and_fails_calls_of_storage() -> None:
    for level in ("ci", "nightly"):
        assert {point for seed in LEVELS[level]["kills"] for point in points_of(seed)} == {*CRASH_POINTS}
    assert sum(len(points_of(seed)) for seed in LEVELS["ci"]["kills"]) == 50


def test_without_the_right_to_mount_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert disks.missing() == "only root may mount a file system"
