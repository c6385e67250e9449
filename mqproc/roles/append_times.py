"""How long appends take: the writer's histogram of it, fed by the steps that the loop times."""

from __future__ import annotations

from mqproc.ipc.histogram import Histogram
from mqproc.ipc.words import Words
from mqproc.kernels.append_counts import UNPUBLISHED_FRAMES
from mqproc.layout import control as layout
from mqproc.layout import figures


class AppendTimes:
    """Each frame is counted with the time of a step: its own, or that of the next one that is timed.

    What a slow step carried out is counted with its time alone. It may have written several times: the frames before
    its last write are counted with the others.
    """

    def __init__(self, words: Words) -> None:
        self._words = words
        self._times = Histogram(words, figures.APPENDS)
        self._counted = words[layout.APPENDED_FRAMES]

    def timed(self, began_ns: int, ended_ns: int, *, alone: bool) -> None:
        """A step took so long: for all frames since the last time, or only for those that it wrote."""
        if self._words[layout.WRITTEN_NS] < began_ns:
            return
        frames = self._words[layout.APPENDED_FRAMES] - self._counted
        if alone:
            frames = min(frames, self._words[UNPUBLISHED_FRAMES])
        self._times.observe(ended_ns - began_ns, frames)
        self._counted += frames
