"""The system clock in its units, and the tests' manual clock."""

from __future__ import annotations

import time

from mqproc.io.store_io import Clock
from tests.support.fakes import ManualClock


def test_clock_reads_monotonic_ns_and_unix_ms() -> None:
    clock = Clock()
    assert time.monotonic_ns() <= clock.monotonic_ns() <= time.monotonic_ns()
    assert abs(clock.time_ms() - time.time() * 1000) < 1000


def test_manual_clock_advances_both_clocks_or_sets_unix_time() -> None:
    clock = ManualClock(time_ms=5_000)
    before = clock.monotonic_ns()
    clock.advance(ms=20)
    assert (clock.monotonic_ns() - before, clock.time_ms()) == (20_000_000, 5_020)
    clock.set_time_ms(1_000)
    assert (clock.monotonic_ns() - before, clock.time_ms()) == (20_000_000, 1_000)
