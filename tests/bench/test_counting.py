"""What `mqproc bench counting` says of its figures is so."""

from __future__ import annotations

import pytest

from mqproc.bench import counting
from mqproc.ipc.clock import Clock
from tests.cli.calling import call

STEPS = 200


def test_the_clocks_reading_is_in_both_runs_of_a_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = 0

    class CountedClock(Clock):
        def monotonic_ns(self) -> int:
            nonlocal reads
            reads += 1
            return super().monotonic_ns()

    monkeypatch.setattr(counting, "Clock", CountedClock)
    with counting._steps(1) as (counted, uncounted):
        counted(STEPS)
        assert reads >= STEPS
        reads = 0
        uncounted(STEPS)
        assert reads >= STEPS


def test_small_figures_are_called_noise() -> None:
    said = " ".join(call("bench", "counting", "--help").out.split())
    assert "The loop's reading of the clock is in both, so it is not in the figures." in said
    assert "negative ones too, are noise." in said
