"""Slots of the timer: release times, backlog, heap and rolls."""

from __future__ import annotations

import errno
import heapq
import random

import numpy as np
import pytest

from mqproc.ipc.control_words import Words
from mqproc.layout import control as words_of
from mqproc.roles.keeper.slots import (
    LATE_MS,
    LATE_POLL_NS,
    POLL_NS,
    HeapEntries,
    TimerBacklog,
    TimerHeap,
    TimerRolls,
    release_times,
)
from mqproc.store.schedule.timer_store import TimerUnits

UNKNOWN_MS = 0


def leaves_ms(slot_ms: int, due_ms: int, *, rolls: bool) -> int:
    slots, none, dues = (np.array([value], np.int64) for value in (slot_ms, 0, due_ms))
    return int(release_times(TimerUnits(slots, none, none, none, dues), np.array([rolls]), 1000)[0])


def test_slot_releases_at_due_time_or_slot_end() -> None:
    assert leaves_ms(5000, 5001, rolls=False) == 5001
    assert leaves_ms(5000, UNKNOWN_MS, rolls=False) == 6000
    assert leaves_ms(5000, 2001, rolls=False) == 2001, "filed when it was past"


def test_slot_rolled_message_leaves_one_slot_earlier() -> None:
    """A small window leaves no more time; filed late, it is in a slot after its due time."""
    assert leaves_ms(5000, 9001, rolls=True) == 6000
    assert leaves_ms(5000, 7001, rolls=True) == 6000
    assert leaves_ms(5000, 7000, rolls=True) == 5000
    assert leaves_ms(5000, 6001, rolls=True) == 5000
    assert leaves_ms(5000, 2001, rolls=True) == 1000
    assert leaves_ms(5000, UNKNOWN_MS, rolls=True) == 6000


# TimerBacklog


NOW_MS = 1_700_000_000_000


def test_timer_backlog_late_dispatch_is_polled_less_often() -> None:
    """On a full disk, or with a hung dispatcher, the keeper polled 500 times a second."""
    words = Words(bytearray(words_of.FILE_SIZE))
    words[words_of.WRITTEN] = 1
    backlog = TimerBacklog(words)
    backlog.update(backlog.check_dispatch(NOW_MS), 0, 0, NOW_MS)
    assert backlog.poll_ns(0, NOW_MS) == LATE_POLL_NS
    assert backlog.poll_ns(0, NOW_MS + LATE_MS) == POLL_NS
    words[words_of.DISPATCH_ERRNO] = errno.ENOSPC
    assert backlog.poll_ns(0, NOW_MS) == POLL_NS
    words[words_of.DISPATCHED] = 1
    assert backlog.poll_ns(0, NOW_MS) == 0


# TimerHeap


NEVER_MS = 1 << 62


def held(*rows: tuple[int, int, int]) -> HeapEntries:
    """By due time, physical offset and size, in slot 7."""
    columns = np.array(rows, np.int64).reshape(-1, 3)
    count = len(columns)
    return HeapEntries(
        columns[:, 0].copy(),
        columns[:, 1].copy(),
        np.full(count, 7, np.int64),
        columns[:, 2].copy(),
    )


def rows_of(messages: HeapEntries) -> list[tuple[int, int, int]]:
    columns = messages.due_ms, messages.physical_offsets, messages.sizes
    return list(zip(*(column.tolist() for column in columns), strict=True))


@pytest.mark.parametrize("seed", range(5))
def test_timer_heap_pops_runs_as_one_heap(seed: int) -> None:
    chance = random.Random(seed)
    messages, heap = TimerHeap(), list[tuple[int, int, int]]()
    offset = 0
    for now_ms in range(0, 3000, 10):
        for _ in range(chance.randrange(3)):
            rows = []
            for _ in range(chance.choice((1, 1, 5, 100))):
                offset += chance.randrange(1, 300)
                rows.append((now_ms + chance.randrange(200), offset, chance.randrange(1, 50)))
            chance.shuffle(rows)
            messages.add(held(*rows))
            for row in rows:
                heapq.heappush(heap, row)
        assert messages.first_due_ms == (heap[0][0] if heap else NEVER_MS)
        at_most = chance.choice((1, 7, 1000))
        taken = messages.pop_due(now_ms, at_most, 1 << 30)
        expected = []
        while heap and heap[0][0] <= now_ms and len(expected) < at_most:
            expected.append(heapq.heappop(heap))
        assert rows_of(taken) == expected
        assert len(messages) == len(heap)


def test_timer_heap_batch_is_limited_but_not_empty() -> None:
    messages = TimerHeap()
    messages.add(held((1, 10, 60), (2, 20, 40), (3, 30, 1)))
    assert rows_of(messages.pop_due(9, 100, 100)) == [(1, 10, 60), (2, 20, 40)]
    messages.add(held((2, 5, 500)))
    assert rows_of(messages.pop_due(9, 100, 100)) == [(2, 5, 500)]
    assert rows_of(messages.pop_due(9, 100, 100)) == [(3, 30, 1)]
    assert (len(messages), messages.first_due_ms) == (0, NEVER_MS)


def test_timer_heap_keeps_messages_not_due() -> None:
    messages = TimerHeap()
    messages.add(held())
    assert len(messages.pop_due(NEVER_MS, 10, 10)) == 0
    messages.add(held((5, 1, 1), (5, 2, 1), (6, 3, 1)))
    assert len(messages.pop_due(4, 10, 10)) == 0
    assert rows_of(messages.pop_due(5, 1, 10)) == [(5, 1, 1)]
    assert rows_of(messages.pop_due(5, 10, 10)) == [(5, 2, 1)]
    assert messages.first_due_ms == 6


# TimerRolls


FAR_MS = 1 << 62
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


def test_timer_rolls_late_ones_leave_at_once_before_cancellations() -> None:
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
    assert (late.safe_until_ms, late.returning_from_ms) == (40_000 + SLOT_MS, FAR_MS)


def test_timer_rolls_later_ones_wait_for_the_first() -> None:
    """This bounds the backlog to file, however many messages arrive."""
    many = rolls(1000, 2000)
    assert taken(many, 1500) == [1000]
    many.rescheduled(10)
    assert many.first_due_ms == FAR_MS
    assert many.next_due_ms(1900, queue_readable=False) == 1900
    assert many.next_due_ms(2100, queue_readable=False) == FAR_MS
    assert many.next_due_ms(2100, queue_readable=True) == 2000
    many.update(10, 1, 1)
    assert many.first_due_ms == 2000


def test_timer_rolls_queue_is_not_read_while_appends_are_pending() -> None:
    some = rolls(1000, 1001)
    assert taken(some, 1500, at_most=1) == [1000]
    some.rescheduled(10)
    assert taken(some, 1500, at_most=1) == [1001]
    some.update(10, 5, 5)
    assert some.safe_until_ms == 2000
    some.rescheduled(20)
    some.update(20, 6, 6)
    assert some.safe_until_ms == FAR_MS
