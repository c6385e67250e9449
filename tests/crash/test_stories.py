"""Stories of a few seeds hold, and planted bugs are noticed. More seeds: `python -m tests.crash FIRST:STOP`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.crash.planted import PLANTS
from tests.crash.program import Story

ROOT = Path(__file__).resolve().parents[2]
SEEDS_PER_PLANT = 60
IMAGES = 2
# Where to begin looking: a seed that noticed the bug when it was planted first.
NOTICED_AT = {
    "a commit is answered and its message not stored": 7,
    "a cut tail stays as it is": 0,
    "a failed sync is tried again": 2,
    "a new writer clears nothing": 4,
    "a new writer counts nothing": 3,
    "a record that has lost its CRC is taken for whole": 12,
    "a start passes what is received in the order of the revive queues": 544,
    "an acknowledgement is answered and not stored": 4,
    "answer without the sync": 0,
    "damage is cut as if it were torn": 0,
    "flushed is published without a sync": 7,
    "index entries twice after a restart": 17,
    "index files are trusted above their mark": 0,
    "names are not synced": 1,
    "progress of a member that has lost the queue is taken": 2,
    "progress passes what is received before its check point": 2,
    "publish before the bytes are written": 0,
    "queues' and index's marks run ahead of the log's": 3,
    "readers do not look at CRCs": 2,
    "recovery leaves queues open": 0,
    "segments behind the end stay": 2,
    "the checkpoint confirms what is not flushed": 3,
    "the log's mark runs ahead of what is flushed": 5,
    "the queues' mark moves though files are dirty": 11,
}


@pytest.mark.proven
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(8))
def test_a_store_outlasts_kills_power_losses_and_faults(seed: int, tmp_path: Path) -> None:
    tally = Story(seed, tmp_path / "story", images=IMAGES).run()
    assert tally.lives
    assert tally.messages


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [3])
def test_a_seed_tells_the_same_story_whatever_the_file_system_and_the_folder(seed: int, tmp_path: Path) -> None:
    """And whatever order sets of texts have, which is another in each process."""
    here = Story(seed, tmp_path / "story", images=2).run()
    shared_memory = Path("/dev/shm")
    elsewhere = shared_memory if os.access(shared_memory, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=elsewhere, prefix="a-folder-with-a-longer-name-") as folder:
        program = "import sys; from tests.crash.program import Story; from pathlib import Path;"
        program += "print(Story(int(sys.argv[1]), Path(sys.argv[2]) / 'again', images=2).run().digest)"
        command = [sys.executable, "-c", program, str(seed), folder]
        environment = os.environ | {"PYTHONHASHSEED": str(seed)}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=True
        )
    assert here.images
    assert done.stdout.splitlines()[-1] == here.digest


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(PLANTS))
def test_a_planted_bug_is_noticed(name: str, tmp_path: Path) -> None:
    """And the story in which it is holds without it."""
    seed = NOTICED_AT[name]
    command = [sys.executable, "-m", "tests.crash", f"{seed}:{seed + SEEDS_PER_PLANT}", "--plant", name]
    options = ["--images", str(IMAGES), "--until-failure", "--folder", str(tmp_path)]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert "tests.crash.placed.Broken: " in done.stderr, done.stdout + done.stderr[-2000:]
    repeat = re.search(rf'repeat: python -m tests.crash (\d+) --images {IMAGES} --plant "{name}"', done.stdout)
    assert repeat, done.stdout
    Story(int(repeat[1]), tmp_path / "without", images=IMAGES).run()
