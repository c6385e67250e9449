"""Messages held until they are due go as from one heap, whatever runs they came in."""

from __future__ import annotations

import heapq
import random

import numpy as np
import pytest

from mqproc.roles.keeper.slots import HeapEntries, TimerHeap

NEVER_MS = 1 << 62


def held(*rows: tuple[int, int, int]) -> HeapEntries:
    """By due time, physical offset and size; of slot 7."""
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
def test_they_go_as_from_one_heap(seed: int) -> None:
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


def test_a_batch_ends_before_it_is_too_large_but_has_one_message_at_least() -> None:
    messages = TimerHeap()
    messages.add(held((1, 10, 60), (2, 20, 40), (3, 30, 1)))
    assert rows_of(messages.pop_due(9, 100, 100)) == [(1, 10, 60), (2, 20, 40)]
    messages.add(held((2, 5, 500)))
    assert rows_of(messages.pop_due(9, 100, 100)) == [(2, 5, 500)]
    assert rows_of(messages.pop_due(9, 100, 100)) == [(3, 30, 1)]
    assert (len(messages), messages.first_due_ms) == (0, NEVER_MS)


def test_what_is_not_due_stays() -> None:
    messages = TimerHeap()
    messages.add(held())
    assert len(messages.pop_due(NEVER_MS, 10, 10)) == 0
    messages.add(held((5, 1, 1), (5, 2, 1), (6, 3, 1)))
    assert len(messages.pop_due(4, 10, 10)) == 0
    assert rows_of(messages.pop_due(5, 1, 10)) == [(5, 1, 1)]
    assert rows_of(messages.pop_due(5, 10, 10)) == [(5, 2, 1)]
    assert messages.first_due_ms == 6
