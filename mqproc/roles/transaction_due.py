"""When open half messages are looked at again: to have their producers asked, or to be stored anew."""

from __future__ import annotations

import heapq
from typing import Final

from mqproc.roles.transaction_table import OpenHalves
from mqproc.store.transactions.halves import Half

COMPACT_MIN: Final = 4096


class DueHalves:
    """Times of the half messages of one table, one for each. Those that are not open any more fall out."""

    def __init__(self, table: OpenHalves) -> None:
        self._table = table
        self._heap: list[tuple[int, int, Half]] = []
        self._number = 0

    def set(self, half: Half, due_ms: int) -> None:
        """It is due then, whatever was said before."""
        half.due_ms = due_ms
        self._number += 1
        heapq.heappush(self._heap, (due_ms, self._number, half))
        if len(self._heap) > COMPACT_MIN and len(self._heap) > 2 * len(self._table):
            self._heap = [entry for entry in self._heap if self._counts(entry[0], entry[2])]
            heapq.heapify(self._heap)

    def take(self, now_ms: int) -> Half | None:
        """One that is due, None when none is."""
        while self._heap and self._heap[0][0] <= now_ms:
            due_ms, _, half = heapq.heappop(self._heap)
            if self._counts(due_ms, half) and not half.busy:
                return half
        return None

    def seconds_left(self, now_ms: int, at_most_s: float) -> float:
        """How long none is due."""
        while self._heap and not self._counts(self._heap[0][0], self._heap[0][2]):
            heapq.heappop(self._heap)
        return min(at_most_s, max(0.0, (self._heap[0][0] - now_ms) / 1e3)) if self._heap else at_most_s

    def _counts(self, due_ms: int, half: Half) -> bool:
        """Whether no other time has been set since, and the half message is open."""
        return due_ms == half.due_ms and self._table.is_newest(half)
