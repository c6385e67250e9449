"""Messages that are held until they are due, in columns: what is due first goes first, as stored where times are equal.

They lie in runs, each of them sorted, that are merged as they come: every message is moved a few times in all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

_NEVER_MS: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Held:
    """Messages of slots that are up, int64[n] each."""

    due_ms: NDArray[np.int64]
    physical_offsets: NDArray[np.int64]
    slots_ms: NDArray[np.int64]
    sizes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.due_ms)

    def chosen(self, which: NDArray[np.intp] | NDArray[np.bool_] | slice) -> Held:
        """Some of them, in the order of `which`."""
        return Held(
            self.due_ms[which],
            self.physical_offsets[which],
            self.slots_ms[which],
            self.sizes[which],
        )


class HeldMessages:
    """All that one keeper holds."""

    def __init__(self) -> None:
        self._runs: list[Held] = []

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    @property
    def first_due_ms(self) -> int:
        """When the first one is due, far in the future without any."""
        return min((int(run.due_ms[0]) for run in self._runs), default=_NEVER_MS)

    def add(self, messages: Held) -> None:
        """Hold these too."""
        if not len(messages):
            return
        run = _sorted(messages)
        while self._runs and len(self._runs[-1]) <= 2 * len(run):
            run = _sorted(_joined([self._runs.pop(), run]))
        self._runs.append(run)

    def take(self, until_ms: int, messages_max: int, bytes_max: int) -> Held:
        """The next ones that are due by then, by their times; the first may be larger than `bytes_max`."""
        due = [part for run in self._runs if len(part := self._due_of(run, until_ms, messages_max))]
        batch = _joined(due) if len(due) < 2 else _sorted(_joined(due))
        count = min(len(batch), messages_max)
        ends = np.cumsum(batch.sizes[:count])
        count = min(count, max(1, int(np.searchsorted(ends, bytes_max, "right"))))
        batch = batch.chosen(slice(0, count))
        # What is taken of a sorted run is the beginning of it.
        last = (int(batch.due_ms[-1]), int(batch.physical_offsets[-1])) if len(batch) else (-1, -1)
        runs = [run.chosen(slice(_count_up_to(run, *last), None)) for run in self._runs]
        self._runs = [run for run in runs if len(run)]
        return batch

    def _due_of(self, run: Held, until_ms: int, at_most: int) -> Held:
        return run.chosen(slice(0, min(at_most, int(np.searchsorted(run.due_ms, until_ms, "right")))))


def _count_up_to(run: Held, due_ms: int, physical_offset: int) -> int:
    """How many messages of a run go no later than the one that is due then and lies there."""
    first, stop = (int(np.searchsorted(run.due_ms, due_ms, side)) for side in ("left", "right"))
    return first + int(np.searchsorted(run.physical_offsets[first:stop], physical_offset, "right"))


def _joined(parts: list[Held]) -> Held:
    if len(parts) == 1:
        return parts[0]
    return Held(
        np.concatenate([_NO_WORDS, *(part.due_ms for part in parts)]),
        np.concatenate([_NO_WORDS, *(part.physical_offsets for part in parts)]),
        np.concatenate([_NO_WORDS, *(part.slots_ms for part in parts)]),
        np.concatenate([_NO_WORDS, *(part.sizes for part in parts)]),
    )


def _sorted(messages: Held) -> Held:
    return messages.chosen(np.lexsort((messages.physical_offsets, messages.due_ms)))


_NO_WORDS = np.zeros(0, np.int64)
