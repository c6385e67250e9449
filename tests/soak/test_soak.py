"""A short soak by default, a long one for MQPROC_SOAK minutes."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from mqproc.layout import control as words_of
from tests.soak.soak import SAMPLES_MIN, Soak, Taken, Worked, grown, growth_per_hour, medians

MINUTES = float(os.environ.get("MQPROC_SOAK", "0"))


@pytest.mark.timeout(600 + 60 * MINUTES)
def test_soak_mixed_load_and_kills_loses_nothing(tmp_path: Path) -> None:
    soak = Soak(tmp_path, 60 * MINUTES) if MINUTES else Soak(tmp_path, 12.0, kill_every_s=1.0)
    soak.run()
    assert soak.kills.keys() == set(words_of.ROLES) if MINUTES else soak.kills


# Offsets beyond the members' reports are detected.


def test_worked_checks_offsets_against_reports_of_all_members(tmp_path: Path) -> None:
    first, second = tmp_path / "member-0.1.report", tmp_path / "member-1.1.report"
    worked = Worked(tmp_path, "member")
    first.write_text("at a 0 0\ndone x\nat a 0 2\nat b")
    worked.check({("a", 0): 1, ("b", 1): 0})
    with pytest.raises(AssertionError, match=r"offset of \('a', 0\) is 3, but 1 was not reported"):
        worked.check({("a", 0): 3})
    second.write_text("at a 0 1\nat a 0 1\n")
    first.write_text(first.read_text() + " 1 0\n")
    worked.check({("a", 0): 3, ("b", 1): 1})
    with pytest.raises(AssertionError, match="is 4, but 3 was not reported"):
        worked.check({("a", 0): 4})


# Only lasting growth counts: medians, beyond the allowance for small files.


STEADY = Taken(
    pss_bytes=200 << 20, descriptors=170, maps=5_700, shared_names=5, lasting_descriptors=40, lasting_maps=900
)


def test_grown_reports_lasting_growth() -> None:
    much = {"pss_bytes": 300 << 20, "descriptors": 300, "maps": 8_000, "shared_names": 20}
    much |= {"lasting_descriptors": 43, "lasting_maps": 903}
    for name, more in much.items():
        larger = dataclasses.replace(STEADY, **{name: more})
        (growth,) = grown([STEADY] * (SAMPLES_MIN // 2) + [larger] * (SAMPLES_MIN // 2))
        assert growth == f"{name}: from {getattr(STEADY, name):,} to {more:,}"


def test_grown_ignores_spikes_and_warmup() -> None:
    small, large = dataclasses.replace(STEADY, descriptors=20), dataclasses.replace(STEADY, descriptors=900)
    samples = [small] * (SAMPLES_MIN // 5) + [STEADY] * SAMPLES_MIN + [large]
    assert grown(samples) == []
    assert medians(samples) == (STEADY, STEADY)


def test_growth_per_hour_ignores_warmup_and_reports_each_role() -> None:
    warming = [(float(at), {"query": 10 * at, "writer": 5}) for at in range(0, 900, 10)]
    steady = [(float(at), {"query": 9_000 + at, "writer": 5}) for at in range(900, 3600, 10)]
    growth = growth_per_hour(warming + steady)
    assert growth["query"] == pytest.approx(3600)
    assert growth["writer"] == pytest.approx(0, abs=1e-6)
