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
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_story_of_each_kind_holds(kind: str, tmp_path: Path) -> None:
    if kind in NEED_DISKS and (reason := disks.missing()):
        pytest.skip(reason)
    done = outages(kind, "0", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 of 1 stories failed" in done.stdout
    # Neither processes nor mounts nor loop devices outlive the command.
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
    assert not list(tmp_path.iterdir())
    backing = Path("/sys/block").glob("loop*/loop/backing_file")
    assert not [file for file in backing if str(tmp_path) in file.read_text()]


@pytest.mark.timeout(600)
def test_a_level_goes_on_where_it_ended(tmp_path: Path) -> None:
    progress = tmp_path / "progress.json"
    first = outages("faults", "0:1", "--progress", str(progress))
    assert first.returncode == 0, first.stdout + first.stderr
    again = outages("faults", "0:1", "--progress", str(progress))
    assert again.stdout.splitlines() == first.stdout.splitlines()[-1:]


def test_a_level_kills_at_every_point_and_fails_calls_of_storage() -> None:
    for level in LEVELS.values():
        assert {point for seed in level["kills"] for point in points_of(seed)} == {*CRASH_POINTS}
    assert sum(len(points_of(seed)) for seed in LEVELS["ci"]["kills"]) == 50


def test_without_the_right_to_mount_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert disks.missing() == "only root may mount a file system"
