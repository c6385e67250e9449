"""Tests of outages: a story of each kind, levels, and cleanup."""

from __future__ import annotations

import secrets
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import posix_ipc
import pytest

from mqproc.io.fault_injection import CRASH_POINTS
from mqproc.ipc.bell import semaphore_name, semaphore_names
from tests.outages import rig
from tests.outages import stories as cuts
from tests.outages.stories import KINDS, LEVELS, NEED_DISKS, Progress, StoryResult, points_of
from tests.support.group import wait_until

ROOT = Path(__file__).resolve().parents[2]


def outages(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.outages", *arguments, "--workers", "1"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.proven
@pytest.mark.timeout(600)
def test_outages_of_each_kind_pass_and_leave_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "stories"
    folder.mkdir()
    done = outages("--level", "brief", "--folder", str(folder))
    # The command itself reports files, mounts and loop devices that are left.
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(folder.iterdir())
    assert rig.remaining_of(folder) == []
    if reason := rig.why_no_disks():
        pytest.skip(f"no stories of {', '.join(sorted(NEED_DISKS))}: {reason}")
    assert set(KINDS) == {line.split()[0] for line in done.stdout.splitlines() if line.endswith("outages")}


def test_cuts_during_start_leaves_no_semaphores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_id = secrets.randbits(63)
    names = [semaphore_name(store_id, 2, role) for role in (1, 2)]
    group = Mock(store=tmp_path, words=lambda: {"store_id": store_id})
    monkeypatch.setattr(cuts, "Disk", lambda *_: Mock(folder=tmp_path))
    monkeypatch.setattr(cuts, "WarmGroup", lambda *_, **_options: group)
    story = cuts.Cuts(0, tmp_path)
    for name in names:
        posix_ipc.Semaphore(name, posix_ipc.O_CREX, mode=0o600)
    story.cut_start()
    assert semaphore_names(store_id) == []


def test_progress_done_seeds_are_not_repeated(tmp_path: Path) -> None:
    progress = tmp_path / "progress.json"
    done = Progress(progress)
    for kind in KINDS:
        done.add(StoryResult(kind, 0, 3), 1.5)
    again = outages("--level", "brief", "--folder", str(tmp_path), "--progress", str(progress))
    assert (again.returncode, again.stdout.splitlines()[-1]) == (0, done.summary())


@pytest.mark.skipif(bool(rig.why_no_disks()), reason=rig.why_no_disks() or "there are disks")
def test_disks_mounted_disk_is_reported_as_left(tmp_path: Path) -> None:
    """The mount is visible to processes in its mount namespace, and is gone with the last one."""
    program = "import sys; from pathlib import Path; from tests.outages import rig; rig.hide_mounts();"
    program += "folder = Path(sys.argv[1]); rig.Disk(folder / 'disk', folder / 'image', 16 << 20);"
    program += "print(*rig.remaining_of(folder), sep='\\n')"
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    mount, loop = done.stdout.splitlines()
    assert str(tmp_path / "disk") in mount
    assert loop.endswith(str(tmp_path / "image"))
    wait_until(lambda: not rig.remaining_of(tmp_path), what="the end of its loop device")


def test_level_covers_every_crash_point_and_failing_calls() -> None:
    for level in ("ci", "nightly"):
        assert {point for seed in LEVELS[level]["kills"] for point in points_of(seed)} == {*CRASH_POINTS}
    assert sum(len(points_of(seed)) for seed in LEVELS["ci"]["kills"]) >= 50


def test_disks_without_mount_permission_reports_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert rig.why_no_disks() == "only root may mount a file system"
