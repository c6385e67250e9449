"""Stories of a few seeds hold, and planted bugs are noticed. More seeds: `python -m tests.crash FIRST:STOP`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Hashable
from pathlib import Path

import pytest

from tests.crash.checks import Recovered
from tests.crash.levels import catch
from tests.crash.planted import PLANTS
from tests.crash.program import Story

ROOT = Path(__file__).resolve().parents[2]
IMAGES = 2
IMAGES_OF_ONE_LOOK = 10


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


@pytest.mark.proven
@pytest.mark.timeout(600)
def test_stores_that_count_as_one_are_all_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is checked, though recovery has left the same of another image, and the story goes on as it does."""
    whole, states = Recovered.state, list[Hashable]()

    def state_of_its_own(found: Recovered) -> Hashable:
        states.append(whole(found))
        return len(states)

    usual = Story(1, tmp_path / "usual", images=IMAGES_OF_ONE_LOOK).run()
    monkeypatch.setattr(Recovered, "state", state_of_its_own)
    assert Story(1, tmp_path / "each", images=IMAGES_OF_ONE_LOOK).run() == usual
    assert len(set(states)) < len(states), "no two stores have counted as one"


@pytest.mark.proven
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(PLANTS))
def test_a_planted_bug_is_noticed(name: str, tmp_path: Path) -> None:
    """And the story in which it is holds without it."""
    told = catch(name, tmp_path)
    assert not told.failure, f"{told.failure}repeat: {told.repeat}"
