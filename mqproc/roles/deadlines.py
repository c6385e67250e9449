"""When each of many is due: one time each, which may be set again, and nobody wakes for a time that does not count."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
COMPACT_MIN: Final = 64


class Deadlines(Generic[Key]):
    """Times in ns by key. Where a role waits for the earliest of them, it is woken by none that was set anew since."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Key]] = []
        self._newest: dict[Key, int] = {}
        self._number = 0

    def set(self, key: Key, due_ns: int) -> None:
        """It is due then, whatever was said before."""
        self._number += 1
        self._newest[key] = self._number
        heapq.heappush(self._heap, (due_ns, self._number, key))
        self._compact()

    def forget(self, key: Key) -> None:
        """It is never due."""
        self._newest.pop(key, None)
        self._compact()

    def take(self, now_ns: int) -> list[Key]:
        """Those that are due, earliest first. They are forgotten."""
        due = []
        self._drop_old()
        while self._heap and self._heap[0][0] <= now_ns:
            key = heapq.heappop(self._heap)[2]
            del self._newest[key]
            due.append(key)
            self._drop_old()
        return due

    def seconds_left(self, now_ns: int, at_most_s: float) -> float:
        """How long none is due."""
        self._drop_old()
        return min(at_most_s, max(0, self._heap[0][0] - now_ns) / 1e9) if self._heap else at_most_s

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._newest) + COMPACT_MIN:
            self._heap = [entry for entry in self._heap if self._counts(entry)]
            heapq.heapify(self._heap)

    def _drop_old(self) -> None:
        while self._heap and not self._counts(self._heap[0]):
            heapq.heappop(self._heap)

    def _counts(self, entry: tuple[int, int, Key]) -> bool:
        return self._newest.get(entry[2]) == entry[1]
