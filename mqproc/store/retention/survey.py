"""Survey: what retention would delete, of any store; and retention of a stopped store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mqproc.config.options import Options, RetentionGuard
from mqproc.errors import CorruptStoreError, StoreAccessError, StoreReadOnlyError
from mqproc.io.store_io import StoreIO
from mqproc.ipc.control_words import Words
from mqproc.layout import control
from mqproc.paths import StorePaths, shell_quoted
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.cooperative import finish
from mqproc.store.durable_marks import DurableMark
from mqproc.store.index.files import committed_state, file_ms, index_file_names
from mqproc.store.offsets.consumer_offset_json import UnconsumedRange, skipped
from mqproc.store.offsets.offset_store import EventLog, OffsetCorrector, OffsetStore, committed_offsets
from mqproc.store.offsets.pop_receipts import OpenCheckPoints, revive_start_offsets
from mqproc.store.read.queries import StoreQueries
from mqproc.store.read.views import FilesView, each_queue
from mqproc.store.retention.delete import Retention
from mqproc.store.retention.plan import (
    DeletionLimit,
    DeletionRequest,
    Due,
    ExpiredQueueFiles,
    LogPlanner,
    QueueOffsets,
    SegmentDeletion,
    durable_limits,
    group_limits,
    index_files_below,
)
from mqproc.store.schedule.timer_store import read_timer_check

_MARKS = {
    "commitlog": control.COMMITLOG_MARK,
    "consumequeue": control.CQ_SYNCED,
    "index": control.INDEX_SYNCED,
}
_ALL = 1 << 62


@dataclass(frozen=True, slots=True)
class FileDeletion:
    """A file to delete. `part` is commitlog, consumequeue or index; `bytes` is its size on disk."""

    part: str
    path: Path
    bytes: int
    segment: SegmentDeletion | None = None


@dataclass(frozen=True, slots=True)
class MovedMinimum:
    """A queue whose first readable offset would change."""

    topic: str
    queue_id: int
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Survey:
    """Files to delete, oldest first; changed minima; unconsumed messages that are deleted.

    `held` is the limit for the next due segment. `progress_error`: why offsets could not be read, "" if they were.
    """

    files: list[FileDeletion]
    minimum_before: int
    minimum_after: int
    queues: list[MovedMinimum]
    skipped: list[UnconsumedRange]
    held: DeletionLimit | None
    progress_error: str


def survey(
    io: StoreIO, paths: StorePaths, options: Options, words: Words, queues: QueueOffsets, due: Due, now_ms: int
) -> Survey:
    """Determine due deletions. `words` and `queues`: from a group or a `StoppedStore`."""
    segments = LogSegments(io, paths.commit_log, options.mapped_file_size_commit_log, whole=False, static=True)
    files = ExpiredQueueFiles(io, paths.consume_queue, options.consume_queue_file_bytes, queues)
    with contextlib.closing(segments), contextlib.closing(files):
        limits = durable_limits(words, segments, options)
        limits += finish(group_limits(io, paths, words, options, queues, files))
        before = words[control.MIN_PHYSICAL_OFFSET]
        plan = finish(LogPlanner(segments).plan(before, words[control.WRITTEN], due, limits, now_ms, batch_max=_ALL))
        deletions = [FileDeletion("commitlog", segments.path(of.start), of.bytes, of) for of in plan.deletions]
        minima: dict[tuple[str, int], int] = {}
        moved: list[MovedMinimum] = []
        for number, topic, queue_id in list(queues.live()):
            first = files.first_readable(number, topic, queue_id, plan.minimum)
            minima[topic, queue_id] = first
            if first != queues.min_offset(number):
                moved.append(MovedMinimum(topic, queue_id, queues.min_offset(number), first))
            for start in files.files_below(number, topic, queue_id, plan.minimum, first):
                path = files.path(topic, queue_id, start)
                deletions.append(FileDeletion("consumequeue", path, io.allocated_of(path)))
    state = committed_state(words)
    for name in index_files_below(io, paths.index, plan.minimum, state.file_ms if state else 0):
        deletions.append(FileDeletion("index", paths.index / name, io.allocated_of(paths.index / name)))
    unconsumed: list[UnconsumedRange] = []
    progress_error = ""
    try:
        unconsumed = skipped(committed_offsets(io, paths), lambda topic, queue_id: minima.get((topic, queue_id)))
    except CorruptStoreError as error:
        progress_error = str(error)
    return Survey(deletions, before, plan.minimum, moved, unconsumed, plan.held, progress_error)


class StoppedStore:
    """A stopped store as control words and queues, for retention.

    A short segment counts with its records; one without any ends the log where it begins.
    """

    def __init__(self, io: StoreIO, paths: StorePaths, options: Options) -> None:
        view = FilesView(io, paths, options, whole=False)
        self._queues = list(each_queue(view.queues))
        self._numbers = {(topic, queue_id): number for number, (topic, queue_id, _) in enumerate(self._queues)}
        self._minima = [bounds.min_offset for _topic, _queue_id, bounds in self._queues]
        self.words = Words(bytearray(control.FILE_SIZE))
        begin, end = view.visible()
        received_from = _received_from(io, paths, options, view)
        view.close()
        self.words[control.MIN_PHYSICAL_OFFSET] = begin
        self.words[control.WRITTEN] = self.words[control.DISPATCHED] = end
        self.words[control.RECEIVED_FROM] = received_from
        segments = LogSegments(io, paths.commit_log, options.mapped_file_size_commit_log, static=True)
        for name, word in _MARKS.items():
            # A store without our marks was closed by RocketMQ, which synced everything.
            mark = DurableMark(io, paths.mark(name), segments).valid()
            self.words[word] = end if mark is None else min(mark.offset, end)
        names = index_file_names(io, paths.index)
        self.words[control.COMMIT_INDEX_MS[0]] = file_ms(names[-1]) if names else 0

    def live(self) -> Iterator[tuple[int, str, int]]:
        """(number, topic, queue id) of every queue."""
        for number, (topic, queue_id, _bounds) in enumerate(self._queues):
            yield number, topic, queue_id

    def find(self, topic: str, queue_id: int) -> int:
        """A queue's number, −1 if none exists."""
        return self._numbers.get((topic, queue_id), -1)

    def generation(self, number: int) -> int:
        """The number: no queue is deleted meanwhile."""
        return number

    def min_offset(self, number: int) -> int:
        return self._minima[number]

    def max_offset(self, number: int) -> int:
        return self._queues[number][2].max_offset

    def raise_min_offset(self, number: int, offset: int) -> None:
        self._minima[number] = max(self._minima[number], offset)


def _received_from(io: StoreIO, paths: StorePaths, options: Options, view: FilesView) -> int:
    """The value of RECEIVED_FROM that the query role would compute, if retention uses it."""
    if options.retention_guard is not RetentionGuard.GROUPS:
        return 0
    found = OpenCheckPoints()
    with contextlib.closing(StoreQueries(io, paths, options, view)) as queries:
        try:
            begins = revive_start_offsets(committed_offsets(io, paths))
            finish(found.read(queries, begins, read_timer_check(io, paths).read_ms))
        except CorruptStoreError:
            return 0  # Unreadable offsets hold everything back.
    return found.log_begin


def check_stopped_in_order(io: StoreIO, paths: StorePaths) -> None:
    """Raise if the durable part of a stopped store is unknown without recovery."""
    if io.exists(paths.read_only):
        raise StoreReadOnlyError(f"{paths.root}: a sync has failed: run mqproc store repair first")
    if io.exists(paths.abort):
        command = f"mqproc up --store {shell_quoted(paths.root)}"
        raise StoreAccessError(
            f"{paths.root}: the store was not shut down cleanly; recover it with {command}, then retry"
        )


def delete_now(
    io: StoreIO,
    paths: StorePaths,
    options: Options,
    store: StoppedStore,
    reserved_ms: int | None,
    now_ms: int,
    event_log: EventLog,
) -> None:
    """Delete everything due of a stopped, locked store. Raises OSError, CorruptStoreError."""
    problems: list[str] = []

    def record_event(event: str, **figures: Any) -> None:
        if "error" in figures:
            problems.append(str(figures["error"]))
        event_log(event, **figures)

    io.make_folder(paths.own, mode=0o700)
    words, now_ns = store.words, 0
    with contextlib.closing(Retention(io, paths, options, words, store, io, record_event, now_ns)) as retention:
        retention.execute_request(DeletionRequest(reserved_ms))
        while not words[control.RETENTION_ANSWERED] or retention.has_pending_space:
            retention.step(now_ns, now_ms)
            if words[control.RETENTION_ERRNO]:
                raise OSError(words[control.RETENTION_ERRNO], problems[-1], str(paths.root))
            # Pauses are skipped: no other process is running.
            now_ns = max(now_ns + 1, retention.due_ns)
    correct_groups(io, paths, store, words, now_ms, event_log)


def correct_groups(
    io: StoreIO, paths: StorePaths, queues: QueueOffsets, words: Words, now_ms: int, event_log: EventLog
) -> None:
    """Raise offsets to the minima of a stopped store, as query does. Raises OSError."""
    try:
        committed_offsets(io, paths)
    except CorruptStoreError as error:
        event_log("consumer progress cannot be read, so it is not corrected", problem=str(error))
        return
    with contextlib.closing(OffsetStore(io, paths, io, event_log)) as progress:
        if OffsetCorrector(io, paths, io, words, queues, progress, event_log).raise_to_minima():
            progress.save(now_ms)
