"""Tests of levels and of a sample of the sweep."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from mqproc.config.options import FlushDiskType
from tests.crash.levels import STORE, Case, Level, Ran, Seen, Whole, case_of, cases, run_level
from tests.support.store_checks import contents

# Sampled from all calls, and from those of which all failures are compared.
EVERY = 29
COMPARED_EVERY = 149


@pytest.mark.timeout(600)
def test_level_with_progress_file_resumes(tmp_path: Path) -> None:
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
def test_sweep_sample_loses_no_message(flush: FlushDiskType, tmp_path: Path) -> None:
    whole = Whole(tmp_path / "whole", flush)
    of_all = [case for ways in cases(whole.calls) for case in ways]
    assert all(case_of(str(case), whole.calls) == case for case in of_all)
    for is_short in (False, True):
        sample = [case for case in of_all if case.short is is_short][::EVERY]
        assert sample
        for case in sample:
            whole.run(tmp_path / str(case), case)


@pytest.mark.proven
@pytest.mark.timeout(600)
def test_sweep_skipped_cases_leave_the_same_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every case runs in full, including those that a sweep would skip."""
    added = list[str]()
    monkeypatch.setattr(Seen, "__contains__", lambda self, digest: False)
    monkeypatch.setattr(Seen, "add", lambda self, digest: added.append(digest))
    whole = Whole(tmp_path / "whole", FlushDiskType.SYNC_FLUSH)
    of_ways, of_begun = 0, dict[str, dict[str, tuple[int, bytes]]]()
    again = 0
    for ways in list(cases(whole.calls))[::COMPARED_EVERY]:
        ran = list[tuple[Ran, dict[str, tuple[int, bytes]]]]()
        for case in ways:
            added.clear()
            place = tmp_path / str(case)
            ended = whole.run(place, case)
            # If a path is too long for a socket, a file has its address.
            left = {name: what for name, what in contents(place / STORE).items() if not name.endswith(".sock")}
            equal = [other for first, other in ran if first.is_also(case)]
            of_ways += bool(equal)
            begun = [digest for digest in added if not digest.startswith("checked ")]
            equal += [of_begun[digest] for digest in begun if digest in of_begun]
            again += any(digest in of_begun for digest in begun)
            for other in equal:
                unlike = [name for name in left.keys() | other.keys() if left.get(name) != other.get(name)]
                assert not unlike, case
            of_begun |= dict.fromkeys(begun, left)
            if not any(first.is_also(case) for first, _left in ran):
                ran.append((ended, left))
    assert of_ways
    assert again


def test_ran_is_also_needs_an_observed_difference() -> None:
    once, other, stays, short = (
        Case(7, "pwrite", errno.EIO),
        Case(7, "pwrite", errno.ENOSPC),
        Case(7, "pwrite", errno.ENOSPC, sticky=True),
        Case(7, "pwrite", errno.ENOSPC, short=True),
    )
    found = {
        (asked, again): [case for case in (other, stays, short) if Ran(once, asked, again).is_also(case)]
        for asked in (False, True)
        for again in (False, True)
    }
    assert found == {
        (False, False): [other, stays],
        (False, True): [other],
        (True, False): [],
        (True, True): [],
    }


@pytest.mark.parametrize("flush", list(FlushDiskType), ids=lambda flush: flush.value)
def test_sweep_program_is_deterministic_and_uses_all_clients(flush: FlushDiskType, tmp_path: Path) -> None:
    whole, again = (Whole(tmp_path / name, flush) for name in ("whole", "again"))
    assert again.calls == whole.calls
    assert whole.program.have_worked
