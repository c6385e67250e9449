"""The timer's messages that are parked again on their way: when they go, and what waits for them."""

from __future__ import annotations

import numpy as np

from mqproc.roles.keeper.slots import HeapEntries, TimerRolls

NEVER_MS = 1 << 62
SLOT_MS = 1000


def rolls(*due_ms: int) -> TimerRolls:
    made = TimerRolls(SLOT_MS)
    add(made, *due_ms)
    return made


def add(to: TimerRolls, *due_ms: int) -> None:
    dues = np.array(due_ms, np.int64)
    to.heap.add(HeapEntries(dues, dues, dues, np.ones(len(dues), np.int64)))


def taken(of: TimerRolls, until_ms: int, at_most: int = 100) -> list[int]:
    found: list[int] = of.pop_due(until_ms, until_ms, at_most, 1 << 20).due_ms.tolist()
    return found


def test_all_that_are_late_go_at_once_and_what_they_may_cancel_waits_until_all_are_filed() -> None:
    late = rolls(10_000, 20_000, 30_000, 40_000)
    assert late.safe_until_ms == 10_000 + SLOT_MS, "while they are held, too"
    assert taken(late, 35_000, at_most=2) == [10_000, 20_000]
    late.rescheduled(500)
    assert late.first_due_ms == 30_000
    assert taken(late, 35_500, at_most=2) == [30_000]
    late.rescheduled(800)
    assert late.dispatch_target == 800
    late.update(799, 7, 7)
    assert (late.safe_until_ms, late.returning_from_ms) == (11_000, 11_000), "not dispatched"
    late.update(800, 9, 8)
    assert late.safe_until_ms == 11_000, "not filed"
    late.update(900, 99, 9)
    assert (late.safe_until_ms, late.returning_from_ms) == (40_000 + SLOT_MS, NEVER_MS)


def test_those_that_were_not_due_when_the_first_went_wait_for_it() -> None:
    """So there is an end to what is to be filed, however many come."""
    many = rolls(1000, 2000)
    assert taken(many, 1500) == [1000]
    many.rescheduled(10)
    assert many.first_due_ms == NEVER_MS
    assert many.next_due_ms(1900, queue_readable=False) == 1900
    assert many.next_due_ms(2100, queue_readable=False) == NEVER_MS
    assert many.next_due_ms(2100, queue_readable=True) == 2000
    many.update(10, 1, 1)
    assert many.first_due_ms == 2000


def test_the_queue_is_not_looked_at_while_some_are_on_their_way_into_the_log() -> None:
    some = rolls(1000, 1001)
    assert taken(some, 1500, at_most=1) == [1000]
    some.rescheduled(10)
    assert taken(some, 1500, at_most=1) == [1001]
    some.update(10, 5, 5)
    assert some.safe_until_ms == 2000
    some.rescheduled(20)
    some.update(20, 6, 6)
    assert some.safe_until_ms == NEVER_MS
