"""Levels go over seeds in order and go on where they ended, and a sample of the sweep holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqproc.config import FlushDiskType
from tests.crash.levels import Level, run_level
from tests.crash.sweep import Whole, case_of, cases

# Prime to the three ways in which a call can fail, so that a sample has all of them.
EVERY = 29


@pytest.mark.timeout(600)
def test_a_level_goes_on_where_it_ended(tmp_path: Path) -> None:
    progress = tmp_path / "progress.json"
    first = run_level(Level(2, 7, images_per_crash=1), tmp_path, 1, progress)
    assert first.images >= 2
    assert first.next_seed == 7 + first.stories
    assert first.failed == []
    second = run_level(Level(first.images + 1, 7, images_per_crash=1), tmp_path, 1, progress)
    assert second.stories > first.stories
    assert second.next_seed == 7 + second.stories
    assert run_level(Level(2, 7, images_per_crash=1), tmp_path, 1, progress) == second


@pytest.mark.proven
@pytest.mark.timeout(600)
@pytest.mark.parametrize("flush", list(FlushDiskType), ids=lambda flush: flush.value)
def test_a_sample_of_single_failures_loses_nothing(flush: FlushDiskType, tmp_path: Path) -> None:
    whole = Whole(tmp_path / "whole", flush)
    of_all = list(cases(whole.calls))
    assert all(case_of(str(case), whole.calls) == case for case in of_all)
    for is_short in (False, True):
        sample = [case for case in of_all if case.short is is_short][::EVERY]
        assert sample
        for case in sample:
            whole.run(tmp_path / str(case), case)


@pytest.mark.parametrize("flush", list(FlushDiskType), ids=lambda flush: flush.value)
def test_the_swept_program_is_the_same_in_every_run_and_has_all_parties_at_work(
    flush: FlushDiskType, tmp_path: Path
) -> None:
    whole, again = (Whole(tmp_path / name, flush) for name in ("whole", "again"))
    assert again.calls == whole.calls
    assert whole.program.have_worked
