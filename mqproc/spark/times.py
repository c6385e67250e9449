"""Which span of a log can hold messages of a store time: found by halving over the records' own times.

Store times ascend along the log as long as the clock does. It may have been set back now and then, so the span is taken
wider by `clock_step_ms` on both sides; a clock that was set back further needs a larger one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Final

from mqproc.spark.options import TIME_MAX, TIME_MIN, Selection
from mqproc.spark.ranges import LogRange
from mqproc.spark.reading import SegmentView
from mqproc.spark.segment_bytes import open_segment
from mqproc.spark.stores import Segment, Survey

# Halving ends at so many bytes of log: reading them costs less than another probe.
_RESOLUTION_BYTES: Final = 64 << 10


def time_span(found: Survey, begin: int, end: int, selection: Selection, clock_step_ms: int) -> tuple[int, int]:
    """[start, stop) of [begin, end) with the messages of the selection's time; both are where records begin."""
    low, high = begin, end
    if selection.begin_ms > TIME_MIN:
        low = _Halving(found, begin, end).last_below(selection.begin_ms - clock_step_ms)
    if selection.end_ms < TIME_MAX:
        high = _Halving(found, low, end).first_at_or_above(selection.end_ms + clock_step_ms)
    return low, high


class _Halving:
    """Looks for a time in the log positions [begin, end) of a store."""

    def __init__(self, found: Survey, begin: int, end: int) -> None:
        self._found = found
        self._begin = begin
        self._end = end

    def last_below(self, time_ms: int) -> int:
        """A record's position such that all before it are older than a time; `begin` when there is none."""
        low, _high = self._halve(time_ms)
        return low

    def first_at_or_above(self, time_ms: int) -> int:
        """A record's position such that it and all behind it have a time or a later one; `end` when there is none."""
        _low, high = self._halve(time_ms)
        return high

    def _halve(self, time_ms: int) -> tuple[int, int]:
        """Positions of a record that is older, or `begin`, and of one that is not, or `end`; close to one another."""
        below, above = self._begin, self._end
        low, high = self._begin, self._end
        # In an archive a probe costs as much as reading its segment up to there.
        close = self._found.segment_size if self._found.archived else _RESOLUTION_BYTES
        while high - low > close:
            middle = (low + high) // 2
            probed = self._probe(middle, high)
            if probed is None:
                # No record begins behind the middle: look before it.
                high = middle
            elif probed[1] < time_ms:
                below = probed[0]
                low = max(middle, below)
            else:
                above = probed[0]
                high = middle
        return below, above

    def _probe(self, position: int, stop: int) -> tuple[int, int] | None:
        """(position, store time) of the first record at or behind a log position, below `stop`."""
        for segment in self._found.segments:
            at = max(0, position - segment.start)
            if at >= segment.limit or segment.start >= stop:
                continue
            with self._view(segment) as view:
                boundary = view.boundary(at, min(segment.limit, stop - segment.start))
                stored = None if boundary is None else view.store_time_ms(boundary)
            if boundary is not None and stored is not None:
                return segment.start + boundary, stored
        return None

    @contextmanager
    def _view(self, segment: Segment) -> Iterator[SegmentView]:
        found = self._found
        with closing(open_segment(found.uri, segment.start, found.segment_size, segment.size)) as opened:
            of = LogRange(segment.start, 0, segment.limit, segment.limit, found.segment_size)
            yield SegmentView(opened, of)
