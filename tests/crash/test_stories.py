"""Stories of a few seeds hold, and planted bugs are noticed. More seeds: `python -m tests.crash FIRST:STOP`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.crash.planted import PLANTS
from tests.crash.program import Story

ROOT = Path(__file__).resolve().parents[2]
SEEDS_PER_PLANT = 60
# Where to begin looking: a seed that noticed the bug when it was planted first.
NOTICED_AT = {
    "a failed sync is tried again": 14,
    "a new writer clears nothing": 2,
    "flushed is published without a sync": 3,
    "index entries twice after a restart": 10,
    "names are not synced": 2,
    "segments behind the end stay": 2,
    "the queues' mark moves though files are dirty": 30,
    "the queues' mark runs ahead of the log's": 8,
}


@pytest.mark.parametrize("seed", range(16))
def test_a_store_outlasts_kills_power_losses_and_faults(seed: int, tmp_path: Path) -> None:
    tally = Story(seed, tmp_path / "story", images=4).run()
    assert tally.lives
    assert tally.messages


def test_the_same_seed_tells_the_same_story(tmp_path: Path) -> None:
    first = Story(3, tmp_path / "first", images=1).run()
    assert Story(3, tmp_path / "second", images=1).run() == first


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(PLANTS))
def test_a_planted_bug_is_noticed(name: str, tmp_path: Path) -> None:
    seed = NOTICED_AT.get(name, 0)
    command = [sys.executable, "-m", "tests.crash", f"{seed}:{seed + SEEDS_PER_PLANT}", "--plant", name]
    options = ["--images", "5", "--until-failure", "--folder", str(tmp_path)]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    noticed = any(name in done.stderr for name in ("tests.crash.checks.Broken", "CorruptStoreError"))
    assert noticed, done.stdout + done.stderr[-2000:]
    assert f"--plant {name!r}" in done.stdout
