"""A histogram in the control file: its owner adds, everybody reads."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

from mqproc.layout.figures import Place
from mqproc.shm.words import Words

PER_SAMPLE: Final = 16
LIGHT: Final = 128
"""An observation is some 0.4 µs: for so many messages at once a few ns each."""


class Histogram:
    """Counts values by bucket: an addition or two, no call into numpy, cheap enough for every step of a role."""

    __slots__ = ("_bounds", "_counts", "_first", "_sum", "_sums", "_unit")

    def __init__(self, words: Words, place: Place) -> None:
        self._bounds = place.bounds
        self._counts = words.cells
        self._sums = words.floats
        self._first = place.index
        self._sum = place.sum_index
        self._unit = place.unit

    def observe(self, value: int, weight: int = 1) -> None:
        """Count a value, in the unit of the bounds, `weight` times."""
        self._counts[self._first + bisect_left(self._bounds, value)] += weight
        self._sums[self._sum] += value * self._unit * weight


class SampledHistogram:
    """A histogram for what happens so often, and is so small, that counting all of it would be felt.

    Of values that stand for fewer than LIGHT things one in PER_SAMPLE is counted, for all since the one before, so
    counts and sums stay right on the average. Values from `exact_from` on are counted one by one, for themselves: what
    is slow is rare, and it is what one looks for.
    """

    __slots__ = ("_exact_from", "_held", "_histogram", "_left")

    def __init__(self, histogram: Histogram, exact_from: float = float("inf")) -> None:
        self._histogram = histogram
        self._exact_from = exact_from
        self._held = 0
        self._left = 0

    def observe(self, value: int, weight: int) -> None:
        """Count a value, or hold its weight for the next one that is counted."""
        if value >= self._exact_from:
            self._histogram.observe(value, weight)
        elif self._left and weight < LIGHT:
            self._left -= 1
            self._held += weight
        else:
            self._left = PER_SAMPLE - 1
            self._histogram.observe(value, weight + self._held)
            self._held = 0


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
    return Buckets(bounds, tuple(counts), words.floats[place.sum_index])
