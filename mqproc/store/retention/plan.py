"""Retention plan: segments that are due for deletion, and limits that hold them back."""

from __future__ import annotations

import datetime
import itertools
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import msgspec
import numpy as np

from mqproc.config.options import Options, RetentionGuard
from mqproc.config.parse import delete_hours
from mqproc.errors import BadRequestError, CorruptStoreError
from mqproc.io.store_io import Kind, StoreIO
from mqproc.ipc.control_words import Words
from mqproc.kernels import record_check, scan
from mqproc.layout import control
from mqproc.layout.consume_queue import UNIT_SIZE
from mqproc.paths import StorePaths
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.consumequeue.files import ConsumeQueueFiles
from mqproc.store.cooperative import Slices
from mqproc.store.index.files import file_ms, index_file_names, last_offset
from mqproc.store.offsets.offset_store import committed_offsets
from mqproc.store.schedule import levels, timer_store
from mqproc.util.units import KIB, MIB

# Files for requests to the retention of a running group, and for its report.
#
# mqproc/retention.request.*   one per request, empty: the name has the arguments, so that it fits onto a full disk. The
#                              keeper deletes it after execution; until then a successor finds it
# mqproc/retention.json        the last pass that deleted something


MS_PER_HOUR: Final = 3_600_000
# Suffix of an incomplete file.
_TEMPORARY: Final = ".tmp"
_NAME: Final = re.compile(r"[0-9a-f]+\.(?:(?P<reserved_ms>\d+)ms|as-the-options-say)", re.ASCII)


class DeletionRequest(msgspec.Struct, frozen=True):
    """`reserved_ms`: age at which segments expire; None: as configured."""

    reserved_ms: int | None = None

    def reserved_ms_by(self, options: Options) -> int:
        """Age at which segments expire."""
        return options.file_reserved_time * MS_PER_HOUR if self.reserved_ms is None else self.reserved_ms


def submit_request(io: StoreIO, paths: StorePaths, reserved_ms: int | None = None) -> Path:
    """Submit a request; returns its file, which is deleted after execution."""
    what = "as-the-options-say" if reserved_ms is None else f"{reserved_ms}ms"
    path = paths.retention_request(f"{secrets.token_hex(8)}.{what}")
    io.write_file_atomically(path, b"", mode=0o600)
    return path


def find_request(io: StoreIO, paths: StorePaths) -> Path | None:
    """A pending request, or one that a predecessor did not finish."""
    first = paths.retention_request("")
    for name in io.names(first.parent):
        if name.startswith(first.name) and not name.endswith(_TEMPORARY):
            entry = io.entry(first.with_name(name))
            if entry is not None and entry.kind is not Kind.FOLDER:
                return first.with_name(name)
    return None


def read_request(paths: StorePaths, path: Path) -> DeletionRequest:
    """Parse a request's file name. Raises BadRequestError."""
    found = _NAME.fullmatch(path.name.removeprefix(paths.retention_request("").name))
    if found is None:
        raise BadRequestError(f"{path}: the name is not a valid request")
    reserved_ms = found["reserved_ms"]
    return DeletionRequest(None if reserved_ms is None else int(reserved_ms))


class LastPass(msgspec.Struct):
    """Result of a pass: `bytes` on disk, the log's `minimum` then, `trigger` as the reason."""

    time_ms: int = 0
    trigger: str = "nothing"
    minimum: int = 0
    segments: int = 0
    queue_files: int = 0
    index_files: int = 0
    bytes: int = 0


class RetentionReport(msgspec.Struct):
    """The report; `last` is None before anything was deleted."""

    schema_version: int = 1
    last: LastPass | None = None


def write_report(io: StoreIO, paths: StorePaths, report: RetentionReport) -> None:
    """Replace the report. Raises OSError."""
    io.write_file_atomically(paths.retention_report, msgspec.json.format(msgspec.json.encode(report), indent=1), 0o600)


# Queues per slice: some milliseconds.
QUEUES_PER_SLICE: Final = 64


@dataclass(frozen=True, slots=True)
class Due:
    """Due deletions: segments older than `reserved_ms`; `trigger` is one of DUE_….

    `bytes_to_free` must be freed regardless of age.
    """

    trigger: int
    reserved_ms: int
    bytes_to_free: int = 0


def due_now(options: Options, now_ms: int, used: int, free: int, *, requested_ms: int | None = None) -> Due | None:
    """Due deletions now, given the disk's used and free bytes; None for nothing.

    `requested_ms`: age of an explicit deletion request.
    """
    reserved_ms = options.file_reserved_time * MS_PER_HOUR if requested_ms is None else requested_ms
    too_much = bytes_above(used, free, options.disk_space_clean_forcibly_ratio)
    if too_much and options.clean_file_forcibly_enable:
        return Due(control.DUE_FORCED, reserved_ms, too_much)
    if requested_ms is not None:
        return Due(control.DUE_REQUEST, reserved_ms)
    if too_much or bytes_above(used, free, options.disk_max_used_space_ratio):
        return Due(control.DUE_DISK, reserved_ms)
    if local_hour(now_ms) in delete_hours(options.delete_when):
        return Due(control.DUE_HOUR, reserved_ms)
    return None


def bytes_above(used: int, free: int, ratio: int) -> int:
    """Number of bytes to free until at most `ratio` percent of the disk are used; 0 for none."""
    return max(0, -((ratio * (used + free) - 100 * used) // 100))


def local_hour(time_ms: int) -> int:
    return datetime.datetime.fromtimestamp(time_ms / 1000).hour


@dataclass(frozen=True, slots=True)
class DeletionLimit:
    """Nothing at or above `position` of the log may be deleted; `by` is one of HELD_…."""

    position: int
    by: int
    detail: str = ""


def durable_limits(words: Words, segments: LogSegments, options: Options) -> list[DeletionLimit]:
    """Limits for data that may not be dispatched and durable."""
    if control.sync_errno(words):
        return [DeletionLimit(0, control.HELD_SYNC, "a sync has failed: the durable data is unknown")]
    marks = [(control.COMMITLOG_MARK, control.HELD_LOG_MARK), (control.CQ_SYNCED, control.HELD_QUEUE_MARK)]
    if options.message_index_enable:
        marks.append((control.INDEX_SYNCED, control.HELD_INDEX_MARK))
    limits = [DeletionLimit(words[control.DISPATCHED], control.HELD_DISPATCH)]
    for word, by in marks:
        # A mark is verified by the bytes before it, so their segment stays, too.
        limits.append(DeletionLimit(segments.start_of(max(0, words[word] - 1)), by))
    return limits


def group_limits(
    io: StoreIO, paths: StorePaths, words: Words, options: Options, queues: QueueOffsets, files: ExpiredQueueFiles
) -> Slices[list[DeletionLimit]]:
    """The lowest limit for unconsumed and delayed messages, if `retention_guard` keeps them."""
    if options.retention_guard is not RetentionGuard.GROUPS:
        return []
    try:
        check = timer_store.read_timer_check(io, paths)
        known = [
            *committed_offsets(io, paths),
            *levels.level_progress(io, paths),
            timer_store.enqueue_progress(check),
        ]
    except (CorruptStoreError, OSError) as error:
        return [DeletionLimit(0, control.HELD_PROGRESS, str(error))]
    # Read after the offsets: it is lowered before an offset passes a received message.
    lowest = DeletionLimit(words[control.RECEIVED_FROM], control.HELD_RECEIVED, "received, and not acknowledged yet")
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
            where = f"group {at.group} is at {at.offset:,} of {at.topic}/{at.queue_id}"
            lowest = DeletionLimit(position, control.HELD_GROUP, where)
    timed = yield from timer_store.first_pending(io, paths, check, words[control.MIN_PHYSICAL_OFFSET])
    if timed is not None and timed < lowest.position:
        lowest = DeletionLimit(timed, control.HELD_GROUP, f"the message at {timed:,} waits in the timer")
    return [lowest]


@dataclass(frozen=True, slots=True)
class SegmentDeletion:
    """A segment to delete. `last_ms` is the store time of its last record, None without one."""

    start: int
    bytes: int
    last_ms: int | None
    expired: bool


@dataclass(frozen=True, slots=True)
class LogPlan:
    """Segments to delete, oldest first, the log's minimum then, and the limit of the next one."""

    deletions: Sequence[SegmentDeletion]
    minimum: int
    held: DeletionLimit | None = None


class LogPlanner:
    """Selects segments of one log for deletion."""

    def __init__(self, segments: LogSegments) -> None:
        self._segments = segments
        self.times = SegmentTimes(segments)

    def plan(
        self,
        minimum: int,
        written: int,
        due: Due,
        limits: Sequence[DeletionLimit],
        now_ms: int,
        *,
        batch_max: int,
        pending_bytes: int = 0,
    ) -> Slices[LogPlan]:
        """Oldest full and due segments of [minimum, written), up to `batch_max` and the limits.

        `pending_bytes` belong to deleted files and will be free soon.
        """
        deletions: list[SegmentDeletion] = []
        freed = pending_bytes
        limit = min(limits, key=lambda limit: limit.position)
        for start, following, newest_ms in self._ages(minimum, written):
            expired = newest_ms is not None and newest_ms + due.reserved_ms <= now_ms
            if len(deletions) >= batch_max or not (expired or freed < due.bytes_to_free):
                break
            if start + self._segments.segment_size > limit.position:
                return LogPlan(deletions, minimum, limit)
            size = self._segments.io.allocated_of(self._segments.path(start))
            deletions.append(SegmentDeletion(start, size, newest_ms, expired))
            freed += size
            minimum = following
            yield
        return LogPlan(deletions, minimum)

    def _ages(self, minimum: int, written: int) -> Iterator[tuple[int, int, int | None]]:
        """(start, next start, store time of the newest record up to its end) of full segments.

        A segment is at least as new as its predecessors and its own first record, since the clock may have been set
        back. A segment without an intact record is as old as the next one.
        """
        newest_ms: int | None = None
        starts = [start for start in self._segments.starts() if start >= minimum]
        for index, (start, following) in enumerate(itertools.pairwise(starts)):
            if start + self._segments.segment_size > written:
                return
            span = self.times.full_span(start)
            own_ms = self._first_after(starts[index + 1 :], written) if span is None else max(span)
            newest_ms = max((time for time in (newest_ms, own_ms) if time is not None), default=None)
            yield start, following, newest_ms

    def _first_after(self, starts: Sequence[int], written: int) -> int | None:
        found = (self.times.first_ms(start) for start in starts if start < written)
        return next((time for time in found if time is not None), None)


# Expired files of queues and index


class QueueOffsets(Protocol):
    """Queues with their offsets: the queue table of a group, or the files of a stopped store."""

    def live(self) -> Iterator[tuple[int, str, int]]:
        """(number, topic, queue id) of every queue."""
        ...

    def find(self, topic: str, queue_id: int) -> int:
        """A queue's number, −1 if none exists."""
        ...

    def min_offset(self, number: int) -> int: ...

    def max_offset(self, number: int) -> int: ...

    def generation(self, number: int) -> int:
        """Changes when a queue is deleted and created again: old open files must not be read then."""
        ...

    def raise_min_offset(self, number: int, offset: int) -> None: ...


class ExpiredQueueFiles:
    """Expired files of the ConsumeQueues of one store; deletes nothing."""

    def __init__(self, io: StoreIO, folder: Path, file_bytes: int, queues: QueueOffsets) -> None:
        self._queues = queues
        self._files = ConsumeQueueFiles(io, folder, file_bytes)
        self.path = self._files.path
        self.forget = self._files.forget
        self.close = self._files.close
        # By queue number: first unit of a queue's second file. Nothing is deleted while an earlier unit is readable.
        self._second_file: dict[int, int] = {}

    def first_readable(self, number: int, topic: str, queue_id: int, minimum: int) -> int:
        """First offset from the queue's minimum on whose record is at or above a log position.

        The queue's maximum if all its units have expired.
        """
        low, high = self._queues.min_offset(number), self._queues.max_offset(number)
        # Most queues have no record in the expiring segment; quiet queues may have no others.
        for probe in (low, high - 1):
            if low < high and self._points_below(number, topic, queue_id, probe, minimum):
                low = probe + 1
            elif probe == low:
                return low
        return self._files.first_at_or_above(topic, queue_id, low, high, minimum, self._queues.generation(number))

    def unit_at(self, number: int, topic: str, queue_id: int, offset: int) -> int | None:
        """Log position of a unit, or of the next unit for a filler; None if the file is missing."""
        return self._files.position_at(topic, queue_id, offset, self._queues.generation(number))

    def files_below(self, number: int, topic: str, queue_id: int, minimum: int, readable: int) -> list[int]:
        """Starts of a queue's files, except the last, whose last unit points below a log position.

        `readable` is the queue's first readable offset.
        """
        if readable < self._second_file.get(number, 0):
            return []
        starts = self._files.starts(topic, queue_id)
        units = self._files.units_per_file
        below = []
        for start in starts[:-1]:
            last_unit = start // UNIT_SIZE + units - 1
            if last_unit >= readable or not self._points_below(number, topic, queue_id, last_unit, minimum):
                break
            below.append(start)
        if not below:
            # Not cached while files remain: deletion may fail, and the next call must find them again.
            self._second_file[number] = starts[0] // UNIT_SIZE + units if starts else 0
        return below

    def _points_below(self, number: int, topic: str, queue_id: int, offset: int, minimum: int) -> bool:
        """Whether a unit is missing or points below a log position."""
        position = self.unit_at(number, topic, queue_id, offset)
        return position is None or position < minimum


def index_files_below(io: StoreIO, folder: Path, minimum: int, committed_ms: int) -> list[str]:
    """Names of index files, except the newest, whose last entry points below a log position.

    The file of the dispatcher's last commit (`committed_ms`, 0 = none) is kept, too: its successor needs it.
    """
    below = []
    for name in index_file_names(io, folder)[:-1]:
        if committed_ms and file_ms(name) >= committed_ms:
            break
        if not 0 <= last_offset(io, folder / name) < minimum:
            break
        below.append(name)
    return below


# Store times of segments
#
# File times are not used: a copy has different times, and a repair touches segments.

# Bytes at a segment's end that are searched for a record; the next size is used if the record is not there.
_TAIL_BYTES: Final = (64 * KIB, MIB, 16 * MIB, 1 << 40)


class SegmentTimes:
    """Store times of the first and last records of segments, in ms; caches full segments."""

    def __init__(self, segments: LogSegments) -> None:
        self._segments = segments
        self._out = np.zeros(scan.SCAN_SIZE, np.int64)
        self._cached: dict[int, tuple[int, int] | None] = {}

    def full_span(self, start: int) -> tuple[int, int] | None:
        """(first, last) of a full segment: its first store time, and the greatest of the last ones.

        None without an intact record. Raises FileNotFoundError.
        """
        if start not in self._cached:
            first_ms, last_ms = self.first_ms(start), self._last_records_ms(start)
            self._cached[start] = None if first_ms is None or last_ms is None else (first_ms, last_ms)
        return self._cached[start]

    def first_ms(self, start: int) -> int | None:
        """Time of any segment's first intact record; None without one. Raises FileNotFoundError."""
        found = self._cached.get(start)
        return self._first_record_ms(start) if found is None else found[0]

    def forget_below(self, physical_offset: int) -> None:
        """Drop cached times of segments below an offset."""
        for start in [start for start in self._cached if start < physical_offset]:
            del self._cached[start]

    def _first_record_ms(self, start: int) -> int | None:
        view = self._segments.view(start)
        found = int(scan.find_record(view, 0, len(view), start, self._out))
        self._segments.note_read(start)
        if found < 0 or not self._out[scan.COUNT]:
            return None
        return int(self._out[scan.LAST_STORE_TIMESTAMP_MS])

    def _last_records_ms(self, start: int) -> int | None:
        view = self._segments.view(start)
        for tail in _TAIL_BYTES:
            first = max(0, len(view) - tail)
            latest = self._latest_from(view, first, start)
            self._segments.note_read(start + first, len(view) - first)
            if latest is not None or first == 0:
                return latest
        return None

    def _latest_from(self, view: np.ndarray, at: int, start: int) -> int | None:
        """Greatest store time of records that begin at or after `at`, skipping damage."""
        latest: int | None = None
        out = self._out
        while (found := int(scan.find_record(view, at, len(view), start, out))) >= 0 and out[scan.COUNT]:
            scan.scan_records(view, found, len(view), start, record_check.VERIFY_ALL, out)
            latest = max(latest or 0, int(out[scan.MAX_STORE_TIMESTAMP_MS]))
            at = int(out[scan.STOPPED_AT]) + 1
        return latest
