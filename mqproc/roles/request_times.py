"""How long requests of the query role take: three histograms, pulls by samples."""

from __future__ import annotations

from typing import Final

from mqproc.ipc.histogram import Histogram
from mqproc.ipc.words import Words
from mqproc.layout import control as layout
from mqproc.layout import figures
from mqproc.roles.loop import SAMPLE_NS, SLOW_STEP_NS
from mqproc.wire.operations import Operation

LATE_NS: Final = SLOW_STEP_NS // 2
"""A request that has waited for so long when a step begins may be slow by its end: a step takes no longer."""

_PULL = int(Operation.PULL)
_KEYS = frozenset({int(Operation.GET), int(Operation.BY_KEY), int(Operation.QUERY_MESSAGE)})


class RequestTimes:
    """Every request that is answered at once is counted. A pull stands for all pulls since the one before it.

    `next_ns`: from then on the next pull is to be told. `held_pulls`: how many pulls were answered after they had been
    held; the time of those says nothing.
    """

    __slots__ = ("_counted", "_keys", "_others", "_pulls", "_words", "held_pulls", "next_ns")

    def __init__(self, words: Words) -> None:
        self._words = words
        self._pulls = Histogram(words, figures.PULL_REQUESTS)
        self._keys = Histogram(words, figures.KEY_REQUESTS)
        self._others = Histogram(words, figures.OTHER_REQUESTS)
        self._counted = words[layout.PULLS]
        self.held_pulls = 0
        self.next_ns = 0

    def answered(self, operation: int, taken_ns: int, now_ns: int) -> None:
        """A request came off its socket at `taken_ns` and has been answered at `now_ns`."""
        took_ns = now_ns - taken_ns
        if operation == _PULL:
            self._pulled(took_ns, now_ns)
        elif operation in _KEYS:
            self._keys.observe(took_ns)
        else:
            self._others.observe(took_ns)

    def _pulled(self, took_ns: int, now_ns: int) -> None:
        """A slow pull counts for itself alone."""
        pulls = self._words[layout.PULLS] - self.held_pulls - self._counted
        if took_ns >= SLOW_STEP_NS:
            pulls = min(pulls, 1)
        else:
            self.next_ns = now_ns + SAMPLE_NS
        self._pulls.observe(took_ns, pulls)
        self._counted += pulls
