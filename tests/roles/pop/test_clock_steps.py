"""Invisible times of received messages when the clock is set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mqproc.roles.pop.receivers import PopReceivers
from mqproc.store.offsets.pop_receipts import PopCheckPoint
from tests.roles.query.test_role import Group
from tests.support.fakes import ManualClock

INVISIBLE_MS = 5_000
HOUR_MS = 3_600_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def pops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: ManualClock) -> Iterator[PopReceivers]:
    group = Group(tmp_path / "store")
    pops = group.role._pops
    monkeypatch.setattr(pops, "_clock", clock)
    monkeypatch.setattr(pops, "_revive", lambda found: None)
    yield pops
    group.close()


def receive(pops: PopReceivers, at_ms: int) -> None:
    pops._register(PopCheckPoint("g", "Orders", 0, 0, (0,), at_ms, INVISIBLE_MS, 0, "mqproc"), 0)


@pytest.mark.parametrize("step_ms", [-2 * HOUR_MS, 2 * HOUR_MS], ids=["back", "forward"])
def test_pop_clock_step_keeps_invisible_time(pops: PopReceivers, clock: ManualClock, step_ms: int) -> None:
    receive(pops, clock.time_ms())
    clock.set_time_ms(clock.time_ms() + step_ms)
    clock.advance(INVISIBLE_MS - 1)
    assert pops._revive_due() == 0
    clock.advance(1)
    assert pops._revive_due() == 1


def test_pop_receipt_of_the_future_is_due_after_its_time(pops: PopReceivers, clock: ManualClock) -> None:
    """The clock was set back while the store was stopped."""
    receive(pops, clock.time_ms() + HOUR_MS)
    clock.advance(INVISIBLE_MS)
    assert pops._revive_due() == 1
