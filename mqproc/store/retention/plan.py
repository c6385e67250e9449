"""What retention may delete of the log, and why: what is due, what has expired, what holds it back. Changes nothing."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from mqproc.config import Options, RetentionGuard, delete_hours
from mqproc.errors import CorruptStoreError
from mqproc.io import StoreIO
from mqproc.ipc.words import Words
from mqproc.layout import control as words_of
from mqproc.paths import StorePaths
from mqproc.store.delays import delay_offsets, timer_waiting
from mqproc.store.groups.progress import all_progress
from mqproc.store.retention.expired_files import ExpiredQueueFiles, QueueWords
from mqproc.store.retention.request import MS_PER_HOUR
from mqproc.store.retention.segment_times import SegmentTimes
from mqproc.store.segments import LogSegments
from mqproc.store.slices import Slices

# Queues that are looked at between two slices: some milliseconds.
QUEUES_PER_SLICE: Final = 64


@dataclass(frozen=True, slots=True)
class Due:
    """What is due: `trigger` is one of DUE_…, segments of more than `reserved_ms` have expired.

    `wanted_bytes` are to be freed whatever their age.
    """

    trigger: int
    reserved_ms: int
    wanted_bytes: int = 0


def due_now(options: Options, now_ms: int, used: int, free: int, *, requested_ms: int | None = None) -> Due | None:
    """What is due at a moment, with so many bytes of the disk used and free; None for nothing.

    `requested_ms`: somebody asks for deletion now of what is older than that.
    """
    reserved_ms = options.file_reserved_time * MS_PER_HOUR if requested_ms is None else requested_ms
    too_much = bytes_above(used, free, options.disk_space_clean_forcibly_ratio)
    if too_much and options.clean_file_forcibly_enable:
        return Due(words_of.DUE_FORCED, reserved_ms, too_much)
    if requested_ms is not None:
        return Due(words_of.DUE_REQUEST, reserved_ms)
    if too_much or bytes_above(used, free, options.disk_max_used_space_ratio):
        return Due(words_of.DUE_DISK, reserved_ms)
    if local_hour(now_ms) in delete_hours(options.delete_when):
        return Due(words_of.DUE_HOUR, reserved_ms)
    return None


def bytes_above(used: int, free: int, ratio: int) -> int:
    """How many bytes must go until no more than `ratio` percent of the disk are used; 0 for none."""
    return max(0, -((ratio * (used + free) - 100 * used) // 100))


def local_hour(time_ms: int) -> int:
    """The hour that a local clock shows."""
    return datetime.datetime.fromtimestamp(time_ms / 1000).hour


@dataclass(frozen=True, slots=True)
class Limit:
    """Nothing at or above `position` of the log may go; `by` is one of HELD_…, `detail` says more."""

    position: int
    by: int
    detail: str = ""


def durable_limits(words: Words, segments: LogSegments, options: Options) -> list[Limit]:
    """What is not surely dispatched and durable."""
    if words_of.sync_errno(words):
        return [Limit(0, words_of.HELD_SYNC, "a sync has failed: what is durable is not known")]
    marks = [(words_of.COMMITLOG_MARK, words_of.HELD_LOG_MARK), (words_of.CQ_SYNCED, words_of.HELD_QUEUE_MARK)]
    if options.message_index_enable:
        marks.append((words_of.INDEX_SYNCED, words_of.HELD_INDEX_MARK))
    limits = [Limit(words[words_of.DISPATCHED], words_of.HELD_DISPATCH)]
    for word, by in marks:
        # A mark is checked by the bytes before it, so the segment that they lie in stays too.
        limits.append(Limit(segments.start_of(max(0, words[word] - 1)), by))
    return limits


def group_limits(
    io: StoreIO, paths: StorePaths, words: Words, options: Options, queues: QueueWords, files: ExpiredQueueFiles
) -> Slices[list[Limit]]:
    """What groups have not consumed, when that is to be kept: the lowest of it. So is what waits for its time."""
    if options.retention_guard is not RetentionGuard.GROUPS:
        return []
    try:
        check = timer_waiting.saved_check(io, paths)
        known = [*all_progress(io, paths), *delay_offsets.waiting(io, paths), timer_waiting.filed(check)]
    except (CorruptStoreError, OSError) as error:
        return [Limit(0, words_of.HELD_PROGRESS, str(error))]
    # Read behind progress: it is lowered before progress passes a message that is received.
    lowest = Limit(words[words_of.RECEIVED_FROM], words_of.HELD_RECEIVED, "received, and not acknowledged yet")
    for count, at in enumerate(known):
        if count % QUEUES_PER_SLICE == QUEUES_PER_SLICE - 1:
            yield
        number = queues.find(at.topic, at.queue_id)
        if number < 0:
            continue
        offset = max(at.offset, queues.min_offset(number))
        if offset >= queues.max_offset(number):
            continue
        position = files.unit_at(number, at.topic, at.queue_id, offset)
        if position is not None and position < lowest.position:
            where = f"group {at.group} stands at {at.offset:,} of {at.topic}/{at.queue_id}"
            lowest = Limit(position, words_of.HELD_GROUP, where)
    timed = yield from timer_waiting.first_waiting(io, paths, check, words[words_of.MIN_PHYSICAL_OFFSET])
    if timed is not None and timed < lowest.position:
        lowest = Limit(timed, words_of.HELD_GROUP, f"the message at {timed:,} waits in the timer")
    return [lowest]


@dataclass(frozen=True, slots=True)
class Going:
    """A segment that goes. `last_ms` is the store time of its last record, None without one."""

    start: int
    bytes: int
    last_ms: int | None
    expired: bool


@dataclass(frozen=True, slots=True)
class LogPlan:
    """Segments that go, oldest first; the log's minimum then; and what holds back the next one that is due."""

    going: Sequence[Going]
    minimum: int
    held: Limit | None = None


class LogPlanner:
    """Chooses among the segments of one log."""

    def __init__(self, segments: LogSegments) -> None:
        self._segments = segments
        self.times = SegmentTimes(segments)

    def plan(
        self,
        minimum: int,
        written: int,
        due: Due,
        limits: Sequence[Limit],
        now_ms: int,
        *,
        batch_max: int,
        pending_bytes: int = 0,
    ) -> Slices[LogPlan]:
        """The oldest segments of [minimum, written) that are full and due, `batch_max` at most, up to the lowest limit.

        `pending_bytes` have been deleted already and will be free soon.
        """
        going: list[Going] = []
        freed = pending_bytes
        limit = min(limits, key=lambda limit: limit.position)
        for start, following, newest_ms in self._ages(minimum, written):
            expired = newest_ms is not None and newest_ms + due.reserved_ms <= now_ms
            if len(going) >= batch_max or not (expired or freed < due.wanted_bytes):
                break
            if start + self._segments.segment_size > limit.position:
                return LogPlan(going, minimum, limit)
            size = self._segments.io.allocated_of(self._segments.path(start))
            going.append(Going(start, size, newest_ms, expired))
            freed += size
            minimum = following
            yield
        return LogPlan(going, minimum)

    def _ages(self, minimum: int, written: int) -> Iterator[tuple[int, int, int | None]]:
        """(start, start of the following one, store time of the newest record up to its end) of each full segment.

        A segment is no older than the ones before it, and than its own first record: store times that go back are
        those of a clock that was set back. One without an intact record is as old as the one behind it.
        """
        newest_ms: int | None = None
        starts = [start for start in self._segments.starts() if start >= minimum]
        for index, (start, following) in enumerate(itertools.pairwise(starts)):
            if start + self._segments.segment_size > written:
                return
            span = self.times.of_full(start)
            own_ms = self._first_behind(starts[index + 1 :], written) if span is None else max(span)
            newest_ms = max((time for time in (newest_ms, own_ms) if time is not None), default=None)
            yield start, following, newest_ms

    def _first_behind(self, starts: Sequence[int], written: int) -> int | None:
        found = (self.times.first_ms(start) for start in starts if start < written)
        return next((time for time in found if time is not None), None)
