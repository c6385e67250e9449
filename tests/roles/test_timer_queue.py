"""Priority queue of deadlines: earliest first; rescheduling invalidates the old entry."""

from __future__ import annotations

from mqproc.roles.request_limits import COMPACT_MIN, DUE_MAX, TimerQueue

FAR_NS = 60_000_000_000


def test_timer_queue_pops_each_once_earliest_first() -> None:
    deadlines: TimerQueue[str] = TimerQueue()
    deadlines.set("late", 30)
    deadlines.set("early", 10)
    deadlines.set("never", 20)
    deadlines.forget("never")
    assert deadlines.pop_due(9) == []
    assert deadlines.pop_due(30) == ["early", "late"]
    assert deadlines.pop_due(FAR_NS) == []


def test_timer_queue_pops_a_bounded_number_at_once() -> None:
    deadlines: TimerQueue[int] = TimerQueue()
    for number in range(2 * DUE_MAX + 1):
        deadlines.set(number, number)
    popped = [deadlines.pop_due(FAR_NS) for _ in range(4)]
    assert [len(part) for part in popped] == [DUE_MAX, DUE_MAX, 1, 0]
    assert [number for part in popped for number in part] == list(range(2 * DUE_MAX + 1))


def test_timer_queue_rescheduled_entry_ignores_its_old_time() -> None:
    deadlines: TimerQueue[str] = TimerQueue()
    deadlines.set("member", 1_000_000_000)
    deadlines.set("member", 3_000_000_000)
    assert deadlines.seconds_left(0, 9.0) == 3.0
    assert deadlines.pop_due(2_000_000_000) == []
    deadlines.set("member", 2_500_000_000)
    assert deadlines.seconds_left(2_000_000_000, 9.0) == 0.5
    deadlines.forget("member")
    assert deadlines.seconds_left(0, 9.0) == 9.0


def test_timer_queue_compacts_stale_entries() -> None:
    deadlines: TimerQueue[int] = TimerQueue()
    for number in range(100 * COMPACT_MIN):
        deadlines.set(0, FAR_NS + number)
        deadlines.set(number + 1, FAR_NS)
        deadlines.forget(number + 1)
    assert len(deadlines._heap) <= COMPACT_MIN + 2
    assert deadlines.pop_due(2 * FAR_NS) == [0]
