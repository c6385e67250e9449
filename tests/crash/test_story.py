"""Stories of a few seeds, and planted bugs. More seeds: `python -m tests.crash FIRST:STOP`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Hashable
from pathlib import Path

import pytest

from tests.crash.invariants import Recovered
from tests.crash.levels import catch
from tests.crash.planted import PLANTS
from tests.crash.story import Story

ROOT = Path(__file__).resolve().parents[2]
IMAGES = 2
IMAGES_OF_ONE_LOOK = 10
# The second one's simple consumers leave open messages of several topics.
SEEDS_TOLD_TWICE = (3, 7)


@pytest.mark.proven
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(8))
def test_store_survives_kills_power_losses_and_faults(seed: int, tmp_path: Path) -> None:
    tally = Story(seed, tmp_path / "story", images=IMAGES).run()
    assert tally.lives
    assert tally.messages


def digests(folder: Path, **environment: str) -> list[str]:
    """Digests of some stories run by a process with this environment."""
    program = "import sys; from tests.crash.story import Story; from pathlib import Path;"
    program += "print(*(Story(int(seed), Path(sys.argv[1]) / seed, images=2).run().digest for seed in sys.argv[2:]))"
    command = [sys.executable, "-c", program, str(folder), *map(str, SEEDS_TOLD_TWICE)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=300, check=True
    )
    return done.stdout.splitlines()[-1].split()


@pytest.mark.timeout(600)
def test_story_of_a_seed_is_identical_in_every_process(tmp_path: Path) -> None:
    """Independent of file system, folder, time zone and hash seed."""
    shared_memory = Path("/dev/shm")
    elsewhere = shared_memory if os.access(shared_memory, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=elsewhere, prefix="a-folder-with-a-longer-name-") as folder:
        there = digests(Path(folder), PYTHONHASHSEED="1", TZ="EST5")
    assert digests(tmp_path, PYTHONHASHSEED="0", TZ="UTC0") == there
    assert len(set(there)) == len(SEEDS_TOLD_TWICE)


@pytest.mark.proven
@pytest.mark.timeout(600)
def test_story_skipped_images_pass_all_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every image is checked, including those that a story would skip."""
    whole, states = Recovered.state, list[Hashable]()

    def state_of_its_own(found: Recovered) -> Hashable:
        states.append(whole(found))
        return len(states)

    usual = Story(1, tmp_path / "usual", images=IMAGES_OF_ONE_LOOK).run()
    monkeypatch.setattr(Recovered, "state", state_of_its_own)
    assert Story(1, tmp_path / "each", images=IMAGES_OF_ONE_LOOK).run() == usual
    assert len(set(states)) < len(states), "no two stores have counted as one"


def test_planted_bug_matches_one_source_line() -> None:
    """A stale plant fails fast."""
    places = {name: ROOT.joinpath(*plant.module.split(".")).with_suffix(".py") for name, plant in PLANTS.items()}
    found = {name: place.read_text().split("\n").count(PLANTS[name].line) for name, place in places.items()}
    assert found == dict.fromkeys(PLANTS, 1)


@pytest.mark.proven
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(PLANTS))
def test_planted_bug_is_caught(name: str, tmp_path: Path) -> None:
    """The story that catches it passes without it."""
    caught = catch(name, tmp_path)
    assert not caught.failure, f"{caught.failure}repeat: {caught.repeat}"
