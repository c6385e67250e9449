"""What the writer counts of its steps: durations of appends, sizes of messages. Cheap for single sends too."""

from __future__ import annotations

from typing import Final

from mqproc.layout import figures
from mqproc.shm.histogram import Histogram, SampledHistogram
from mqproc.shm.words import Words

SLOW_NS: Final = 10_000_000
"""An append that takes longer is counted for itself: a single one of a second must be seen."""


class AppendFigures:
    """The writer's two histograms."""

    def __init__(self, words: Words) -> None:
        self._times = SampledHistogram(Histogram(words, figures.APPENDS), SLOW_NS)
        self._sizes = SampledHistogram(Histogram(words, figures.MESSAGE_SIZES))

    def committed(self, took_ns: int, requests: int) -> None:
        """So many requests were carried out, all of them within this time."""
        self._times.observe(took_ns, requests)

    def appended(self, size: int, messages: int) -> None:
        """A step has appended so many messages, of so many bytes together.

        Their mean is what counts: a look at each message would cost more than all else that is counted.
        """
        self._sizes.observe(size // messages, messages)
