"""Histograms in the control file: one owner adds, every process may read."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from operator import add, sub

from mqproc.ipc.control_words import Words
from mqproc.layout.histograms import CODES, REJECTS, HistogramLayout


class Histogram:
    """Counts values by bucket. Per-message values are counted by kernels, in the same words."""

    __slots__ = ("_bounds", "_counts", "_first", "_sum")

    def __init__(self, words: Words, place: HistogramLayout) -> None:
        self._bounds = place.bounds
        self._counts = words.cells
        self._first = place.index
        self._sum = place.sum_index

    def observe(self, value: int, weight: int = 1) -> None:
        """Count a value, in the unit of the bounds, `weight` times."""
        self._counts[self._first + bisect_left(self._bounds, value)] += weight
        self._counts[self._sum] += value * weight


@dataclass(frozen=True, slots=True)
class Buckets:
    """Contents of a histogram: counts per bucket, not cumulative, and the sum."""

    bounds: tuple[float, ...]
    """Upper bounds of the buckets, in base units."""
    counts: tuple[int, ...]
    total: float

    def plus(self, other: Buckets) -> Buckets:
        """Add another histogram of the same kind, such as another role's."""
        return Buckets(self.bounds, tuple(map(add, self.counts, other.counts)), self.total + other.total)

    def minus(self, earlier: Buckets) -> Buckets:
        """Values counted since an earlier read."""
        return Buckets(self.bounds, tuple(map(sub, self.counts, earlier.counts)), self.total - earlier.total)

    def quantile(self, share: float) -> float:
        """Upper bound of the bucket with this share of the values below it; 0 when empty."""
        threshold = share * sum(self.counts)
        for bound, below in zip((*self.bounds, math.inf), accumulate(self.counts), strict=False):
            if below >= threshold and below:
                return bound
        return 0.0


def read_buckets(words: Words, place: HistogramLayout) -> Buckets:
    """Read a histogram's current contents."""
    counts = words.cells[place.index : place.sum_index].tolist()
    bounds = tuple(float(f"{bound * place.unit:.6g}") for bound in place.bounds)
    return Buckets(bounds, tuple(counts), words.cells[place.sum_index] * place.unit)


# Counters of refusals by error code in the control file, one set per role with a socket.


def _error_words(role: str) -> dict[str, int]:
    """Index of each error code's counter."""
    return {code: REJECTS[role] + place for place, code in enumerate(CODES)}


def error_counter(words: Words, role: str) -> Callable[[str], None]:
    """Return a function that counts a refusal by its error code."""
    indexes = _error_words(role)
    return lambda code: words.add(indexes[code], 1)


def read_error_counters(words: Words, role: str) -> dict[str, int]:
    """Refusals by code, for all codes."""
    return {code: words[index] for code, index in _error_words(role).items()}
