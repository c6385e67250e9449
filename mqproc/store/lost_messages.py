"""Messages whose records are lost, by queue and queue offset.

A ConsumeQueue keeps the offsets of lost records: as units that point into a damaged range of the log or beyond its end,
or as the fillers that replaced them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mqproc.errors import CorruptStoreError
from mqproc.io.store_io import StoreIO
from mqproc.kernels.record_check import stored_at_ms
from mqproc.layout.consume_queue import FILLER_SIZE, UNIT_SIZE
from mqproc.layout.record import FIXED_SIZE_V4
from mqproc.paths import StorePaths
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.consumequeue.bounds import as_units, filler_position
from mqproc.store.consumequeue.files import ConsumeQueueFiles
from mqproc.util.units import counted, format_time

_CHUNK_UNITS: Final = 512
_TOPICS_MAX: Final = 8

Queue = tuple[str, int]
Range = tuple[int, int]


@dataclass(frozen=True, slots=True, order=True)
class LostMessages:
    """Queue offsets [first, stop) of a queue, stored between two times; 0: unknown."""

    topic: str
    queue_id: int
    first: int
    stop: int
    after_ms: int = 0
    before_ms: int = 0

    def __str__(self) -> str:
        is_single = self.stop - self.first == 1
        offsets = f"offset {self.first:,}" if is_single else f"offsets {self.first:,} to {self.stop - 1:,}"
        return f"{self.topic} queue {self.queue_id}, {offsets}{self._when()}"

    def _when(self) -> str:
        if self.after_ms and self.after_ms == self.before_ms:
            return f", stored at {format_time(self.after_ms)}"
        if self.after_ms and self.before_ms:
            return f", stored between {format_time(self.after_ms)} and {format_time(self.before_ms)}"
        if self.after_ms:
            return f", stored after {format_time(self.after_ms)}"
        return f", stored before {format_time(self.before_ms)}" if self.before_ms else ""

    def to_json(self) -> dict[str, Any]:
        return {
            "topic": self.topic,
            "queue_id": self.queue_id,
            "first_offset": self.first,
            "last_offset": self.stop - 1,
            "messages": self.stop - self.first,
            "after_ms": self.after_ms or None,
            "before_ms": self.before_ms or None,
        }


def count_of(lost: Iterable[LostMessages]) -> int:
    """Number of messages."""
    return sum(each.stop - each.first for each in lost)


def lines_about(lost: Sequence[LostMessages], most: int) -> list[str]:
    """A summary and a line for each range, up to `most`; nothing for no messages."""
    if not lost:
        return []
    summary = f"{counted(count_of(lost), 'message')} cannot be recovered"
    if len(lost) == 1:
        return [f"{summary}: {lost[0]}"]
    lines = [f"{summary}:", *(f"  {each}" for each in lost[:most])]
    return lines + ([f"  and {len(lost) - most:,} more ranges"] if len(lost) > most else [])


def errors_about(lost: Iterable[LostMessages], place: str) -> list[str]:
    """A text for each topic, for the error log, which merges texts that differ in numbers.

    `place` is where all messages are named.
    """
    by_topic: dict[str, list[LostMessages]] = {}
    for each in lost:
        by_topic.setdefault(each.topic, []).append(each)
    texts = []
    for topic, ranges in list(by_topic.items())[:_TOPICS_MAX]:
        more = f"; {counted(len(ranges) - 1, 'more range')}: see {place}" if len(ranges) > 1 else ""
        texts.append(f"{counted(count_of(ranges), 'message')} of topic {topic} cannot be recovered: {ranges[0]}{more}")
    if len(by_topic) > _TOPICS_MAX:
        texts.append(f"messages of {len(by_topic) - _TOPICS_MAX:,} more topics cannot be recovered: see {place}")
    return texts


def merged_losses(lost: Iterable[LostMessages]) -> list[LostMessages]:
    """The same messages in order, each once."""
    found: list[LostMessages] = []
    for each in sorted(lost):
        last = found[-1] if found else None
        if last is None or (last.topic, last.queue_id) != (each.topic, each.queue_id) or last.stop < each.first:
            found.append(each)
            continue
        times = [time_ms for time_ms in (last.after_ms, each.after_ms) if time_ms]
        stop, before_ms = max(last.stop, each.stop), max(last.before_ms, each.before_ms)
        found[-1] = LostMessages(each.topic, each.queue_id, last.first, stop, min(times, default=0), before_ms)
    return found


class LossSearch:
    """Finds the queue offsets of lost records in ConsumeQueues."""

    def __init__(self, files: ConsumeQueueFiles, segments: LogSegments) -> None:
        self._files = files
        self._segments = segments

    def search(self, queues: Iterable[Queue], holes: Iterable[Range]) -> list[LostMessages]:
        """Lost messages of some queues in ranges [start, stop) of the log that have no records."""
        ranges = [(hole, self.time_of(hole[1])) for hole in sorted(holes)]
        return [each for queue in queues for each in self._of_queue(queue, ranges)] if ranges else []

    def _of_queue(self, queue: Queue, ranges: Sequence[tuple[Range, int]]) -> Iterator[LostMessages]:
        starts = self._files.starts(*queue)
        if not starts:
            return
        done = low = starts[0] // UNIT_SIZE
        end = max(low, self._files.extent(*queue).max_offset)
        for hole, before_ms in ranges:
            at = self._files.first_at_or_above(*queue, low, end, hole[0])
            # Fillers count as the next unit; after the last unit they count as the last unit.
            first = max(done, self._first_lost(queue, low, at, hole) if at == end else at)
            stop = self._first_kept(queue, at, hole)
            if stop > first:
                yield LostMessages(*queue, first, stop, self.time_of_unit(queue, first - 1), before_ms)
                done = stop

    def _first_kept(self, queue: Queue, at: int, hole: Range) -> int:
        while len(lost := self._are_lost(queue, at, _CHUNK_UNITS, hole)):
            if not lost.all():
                return at + int(lost.argmin())
            at += len(lost)
        return at

    def _first_lost(self, queue: Queue, low: int, end: int, hole: Range) -> int:
        """First of the lost units right before `end`, from `low` on."""
        while end > low:
            count = min(end - low, _CHUNK_UNITS)
            lost = self._are_lost(queue, end - count, count, hole)
            if len(lost) < count:
                return end
            if not lost.all():
                return end - int(lost[::-1].argmin())
            end -= count
        return end

    def _are_lost(self, queue: Queue, first: int, count: int, hole: Range) -> NDArray[np.bool_]:
        """Which units from a queue offset on have no record because of a hole: bool[up to count]."""
        try:
            units = as_units(self._files.read_units(*queue, first, count))
        except FileNotFoundError:
            return np.zeros(0, bool)
        physical, size = units["physical_offset"].astype(np.int64), units["size"]
        fillers = (size == FILLER_SIZE) & (physical == filler_position(hole[0], self._segments.segment_size))
        records = (size >= FIXED_SIZE_V4) & (size != FILLER_SIZE) & (physical >= hole[0]) & (physical < hole[1])
        lost: NDArray[np.bool_] = fillers | records
        return lost

    def time_of_unit(self, queue: Queue, queue_offset: int) -> int:
        """Store time of a unit's record; 0 without one."""
        try:
            units = as_units(self._files.read_units(*queue, max(0, queue_offset), 1))
        except FileNotFoundError:
            return 0
        is_record = queue_offset >= 0 and len(units) > 0 and int(units[0]["size"]) != FILLER_SIZE
        return self.time_of(int(units[0]["physical_offset"])) if is_record else 0

    def time_of(self, physical_offset: int) -> int:
        """Store time of the record at a log position; 0 without one."""
        return store_time_at(self._segments, physical_offset)


@contextlib.contextmanager
def opened_search(io: StoreIO, paths: StorePaths, segment_size: int, queue_file_bytes: int) -> Iterator[LossSearch]:
    """A search in a store, with files of its own."""
    segments = LogSegments(io, paths.commit_log, segment_size, whole=False, static=True)
    files = ConsumeQueueFiles(io, paths.consume_queue, queue_file_bytes)
    with contextlib.closing(files), contextlib.closing(segments):
        yield LossSearch(files, segments)


def store_time_at(segments: LogSegments, physical_offset: int) -> int:
    """Store time of the record at a log position; 0 without one."""
    base = segments.start_of(physical_offset)
    try:
        view = segments.view(base)
    except (FileNotFoundError, CorruptStoreError):
        return 0
    return max(0, int(stored_at_ms(view, physical_offset - base, len(view), physical_offset)))
