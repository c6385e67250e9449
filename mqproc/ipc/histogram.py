"""A histogram in the control file: its owner adds, everybody reads."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from mqproc.ipc.words import Words
from mqproc.layout.figures import Place


class Histogram:
    """Counts values by bucket. For what happens at each message a kernel counts instead, into the same words."""

    __slots__ = ("_bounds", "_counts", "_first", "_sum")

    def __init__(self, words: Words, place: Place) -> None:
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
    """What a histogram holds: the count of each bucket, not added up, the last one without bound; the sum."""

    bounds: tuple[float, ...]
    """In base units."""
    counts: tuple[int, ...]
    total: float

    def plus(self, other: Buckets) -> Buckets:
        """Both as one: two roles that do the same thing."""
        counts = tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        return Buckets(self.bounds, counts, self.total + other.total)

    def quantile(self, share: float) -> float:
        """The value below which this share of what was counted lies, by the bucket's upper bound; 0 without any."""
        wanted = share * sum(self.counts)
        below = 0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            below += count
            if below >= wanted and below:
                return bound
        return float("inf") if below < sum(self.counts) else 0.0

    def minus(self, earlier: Buckets) -> Buckets:
        """What was counted since an earlier look."""
        counts = tuple(a - b for a, b in zip(self.counts, earlier.counts, strict=True))
        return Buckets(self.bounds, counts, self.total - earlier.total)


def read_buckets(words: Words, place: Place) -> Buckets:
    """A histogram's content now."""
    counts = words.cells[place.index : place.sum_index].tolist()
    bounds = tuple(float(f"{bound * place.unit:.6g}") for bound in place.bounds)
    return Buckets(bounds, tuple(counts), words.cells[place.sum_index] * place.unit)
