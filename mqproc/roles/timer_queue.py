"""Priority queue of deadlines by key; rescheduling a key invalidates its old entry."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
COMPACT_MIN: Final = 64


class TimerQueue(Generic[Key]):
    """Deadlines in ns by key. A superseded deadline never wakes the role."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Key]] = []
        self._newest: dict[Key, int] = {}
        self._number = 0

    def set(self, key: Key, due_ns: int) -> None:
        """Schedule a key, replacing its earlier deadline."""
        self._number += 1
        self._newest[key] = self._number
        heapq.heappush(self._heap, (due_ns, self._number, key))
        self._compact()

    def forget(self, key: Key) -> None:
        """Remove a key."""
        self._newest.pop(key, None)
        self._compact()

    def pop_due(self, now_ns: int) -> list[Key]:
        """Remove and return the keys that are due, earliest first."""
        due = []
        self._drop_superseded()
        while self._heap and self._heap[0][0] <= now_ns:
            key = heapq.heappop(self._heap)[2]
            del self._newest[key]
            due.append(key)
            self._drop_superseded()
        return due

    def seconds_left(self, now_ns: int, at_most_s: float) -> float:
        """Time until the earliest deadline, `at_most_s` at most."""
        self._drop_superseded()
        return min(at_most_s, max(0, self._heap[0][0] - now_ns) / 1e9) if self._heap else at_most_s

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._newest) + COMPACT_MIN:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)

    def _drop_superseded(self) -> None:
        while self._heap and not self._is_current(self._heap[0]):
            heapq.heappop(self._heap)

    def _is_current(self, entry: tuple[int, int, Key]) -> bool:
        return self._newest.get(entry[2]) == entry[1]
