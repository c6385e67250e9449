"""Slots of the timer that are up: when what is filed in them leaves."""

from __future__ import annotations

import numpy as np

from mqproc.roles.keeper.slots import release_times
from mqproc.store.schedule.timer_store import TimerUnits

UNKNOWN_MS = 0


def leaves_ms(slot_ms: int, due_ms: int, *, rolls: bool) -> int:
    slots, none, dues = (np.array([value], np.int64) for value in (slot_ms, 0, due_ms))
    return int(release_times(TimerUnits(slots, none, none, none, dues), np.array([rolls]), 1000)[0])


def test_messages_leave_at_their_time_or_with_their_slot() -> None:
    assert leaves_ms(5000, 5001, rolls=False) == 5001
    assert leaves_ms(5000, UNKNOWN_MS, rolls=False) == 6000
    assert leaves_ms(5000, 2001, rolls=False) == 2001, "filed when it was past"


def test_one_that_is_parked_again_leaves_a_slot_before_its_own_begins() -> None:
    """With a window of few slots there is no more time; filed late it lies in a slot behind its time."""
    assert leaves_ms(5000, 9001, rolls=True) == 6000
    assert leaves_ms(5000, 7001, rolls=True) == 6000
    assert leaves_ms(5000, 7000, rolls=True) == 5000
    assert leaves_ms(5000, 6001, rolls=True) == 5000
    assert leaves_ms(5000, 2001, rolls=True) == 1000
    assert leaves_ms(5000, UNKNOWN_MS, rolls=True) == 6000
