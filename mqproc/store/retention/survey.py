"""What retention would do to a store, running or not, and doing it to one that nobody runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mqproc.config import Options, RetentionGuard
from mqproc.errors import CorruptStoreError, StoreAccessError, StoreReadOnlyError
from mqproc.io import StoreIO
from mqproc.ipc.words import Words
from mqproc.layout import control as words_of
from mqproc.paths import StorePaths, in_shell
from mqproc.store.delays.timer_waiting import saved_check
from mqproc.store.groups.corrections import Corrections
from mqproc.store.groups.offsets_json import Progress, Skipped, skipped
from mqproc.store.groups.open_check_points import OpenCheckPoints, begins_of
from mqproc.store.groups.progress import GroupProgress, Tell, all_progress
from mqproc.store.index_flush import committed_state
from mqproc.store.index_headers import file_ms, index_file_names
from mqproc.store.marks import DurableMark
from mqproc.store.reads.queue_bounds import QueueBounds, each_queue
from mqproc.store.reads.reading import StoreReading
from mqproc.store.reads.store_views import FilesView
from mqproc.store.retention.expired_files import ExpiredQueueFiles, QueueWords, index_files_below
from mqproc.store.retention.plan import Due, Going, Limit, LogPlanner, durable_limits, group_limits
from mqproc.store.retention.request import Request
from mqproc.store.retention.retention import Retention
from mqproc.store.segments import LogSegments
from mqproc.store.slices import finish

_MARKS = {
    "commitlog": words_of.COMMITLOG_MARK,
    "consumequeue": words_of.CQ_SYNCED,
    "index": words_of.INDEX_SYNCED,
}
_ALL = 1 << 62


@dataclass(frozen=True, slots=True)
class GoingFile:
    """A file that would go. `part` is commitlog, consumequeue or index; `bytes` what it takes on disk."""

    part: str
    path: Path
    bytes: int
    segment: Going | None = None


@dataclass(frozen=True, slots=True)
class MovedMinimum:
    """A queue whose first readable offset would move."""

    topic: str
    queue_id: int
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Survey:
    """What would go, oldest first; how far minima would move; what groups have not consumed of it.

    `held` keeps the next segment that is due. `progress_error` says why progress could not be read, "" when it was.
    """

    files: list[GoingFile]
    minimum_before: int
    minimum_after: int
    queues: list[MovedMinimum]
    skipped: list[Skipped]
    held: Limit | None
    progress_error: str


def survey(
    io: StoreIO, paths: StorePaths, options: Options, words: Words, queues: QueueWords, due: Due, now_ms: int
) -> Survey:
    """Look at what is due. Changes nothing. `words` and `queues` are a group's, or a `StoppedStore`'s."""
    segments = LogSegments(io, paths.commit_log, options.mapped_file_size_commit_log, whole=False, still=True)
    files = ExpiredQueueFiles(io, paths.consume_queue, options.consume_queue_file_bytes, queues)
    try:
        limits = durable_limits(words, segments, options)
        limits += finish(group_limits(io, paths, words, options, queues, files))
        before = words[words_of.MIN_PHYSICAL_OFFSET]
        plan = finish(LogPlanner(segments).plan(before, words[words_of.WRITTEN], due, limits, now_ms, batch_max=_ALL))
        going = [GoingFile("commitlog", segments.path(of.start), of.bytes, of) for of in plan.going]
        minima: dict[tuple[str, int], int] = {}
        moved: list[MovedMinimum] = []
        for number, topic, queue_id in list(queues.live()):
            first = files.first_readable(number, topic, queue_id, plan.minimum)
            minima[topic, queue_id] = first
            if first != queues.min_offset(number):
                moved.append(MovedMinimum(topic, queue_id, queues.min_offset(number), first))
            for start in files.files_below(number, topic, queue_id, plan.minimum, first):
                path = files.path(topic, queue_id, start)
                going.append(GoingFile("consumequeue", path, io.allocated_of(path)))
    finally:
        files.close()
        segments.close()
    state = committed_state(words)
    for name in index_files_below(io, paths.index, plan.minimum, state.file_ms if state else 0):
        going.append(GoingFile("index", paths.index / name, io.allocated_of(paths.index / name)))
    unconsumed, error = _unconsumed(lambda: all_progress(io, paths), minima)
    return Survey(going, before, plan.minimum, moved, unconsumed, plan.held, error)


def _unconsumed(
    progress: Callable[[], Iterable[Progress]], minima: dict[tuple[str, int], int]
) -> tuple[list[Skipped], str]:
    try:
        return skipped(progress(), lambda topic, queue_id: minima.get((topic, queue_id))), ""
    except CorruptStoreError as error:
        return [], str(error)


class StoppedStore:
    """A store that nobody runs, in the shape that retention knows: control words, and queues with their offsets.

    A segment that is short counts with the records that are in it; one without any ends the log where it begins.
    """

    def __init__(self, io: StoreIO, paths: StorePaths, options: Options) -> None:
        view = FilesView(io, paths, options, whole=False)
        self._queues = [(topic, queue_id, bounds) for topic, queue_id, bounds in each_queue(view.queues)]
        self._numbers = {(topic, queue_id): number for number, (topic, queue_id, _) in enumerate(self._queues)}
        self._minima = [bounds.min_offset for _topic, _queue_id, bounds in self._queues]
        self.words = Words(bytearray(words_of.FILE_SIZE))
        begin, end = view.visible()
        received_from = _received_from(io, paths, options, view)
        view.close()
        self.words[words_of.MIN_PHYSICAL_OFFSET] = begin
        self.words[words_of.WRITTEN] = self.words[words_of.DISPATCHED] = end
        self.words[words_of.RECEIVED_FROM] = received_from
        segments = LogSegments(io, paths.commit_log, options.mapped_file_size_commit_log, still=True)
        for name, word in _MARKS.items():
            # A store without our marks was closed by RocketMQ, which syncs everything.
            mark = DurableMark(io, paths.mark(name), segments).valid()
            self.words[word] = end if mark is None else min(mark.offset, end)
        names = index_file_names(io, paths.index)
        self.words[words_of.COMMIT_INDEX_MS[0]] = file_ms(names[-1]) if names else 0

    def live(self) -> Iterator[tuple[int, str, int]]:
        """(number, topic, queue id) of every queue."""
        for number, (topic, queue_id, _bounds) in enumerate(self._queues):
            yield number, topic, queue_id

    def find(self, topic: str, queue_id: int) -> int:
        """A queue's number, −1 when there is none."""
        return self._numbers.get((topic, queue_id), -1)

    def generation(self, number: int) -> int:
        """Nobody deletes a queue meanwhile."""
        return number

    def min_offset(self, number: int) -> int:
        return self._minima[number]

    def max_offset(self, number: int) -> int:
        bounds: QueueBounds = self._queues[number][2]
        return bounds.max_offset

    def raise_min_offset(self, number: int, offset: int) -> None:
        self._minima[number] = max(self._minima[number], offset)


def _received_from(io: StoreIO, paths: StorePaths, options: Options, view: FilesView) -> int:
    """What query would say in RECEIVED_FROM, when it matters."""
    if options.retention_guard is not RetentionGuard.GROUPS:
        return 0
    reading = StoreReading(io, paths, options, view.queues, view.visible, view.newest_index_ms)
    try:
        found = OpenCheckPoints()
        finish(found.read(reading, begins_of(all_progress(io, paths)), saved_check(io, paths).read_ms))
        return found.log_begin
    except CorruptStoreError:
        return 0  # Progress cannot be read: that holds everything back.
    finally:
        reading.close()


def check_stopped_in_order(io: StoreIO, paths: StorePaths) -> None:
    """Raise when what is durable of a stopped store is not known without recovery."""
    if io.exists(paths.read_only):
        raise StoreReadOnlyError(f"{paths.root}: a sync has failed: run mqproc store repair first")
    if io.exists(paths.abort):
        command = f"mqproc up --store {in_shell(paths.root)}"
        raise StoreAccessError(f"{paths.root}: it was not stopped in order; {command} recovers it, then ask again")


def delete_now(
    io: StoreIO,
    paths: StorePaths,
    options: Options,
    store: StoppedStore,
    reserved_ms: int | None,
    now_ms: int,
    tell: Tell,
) -> None:
    """Delete what is due of a store that nobody runs; the caller holds its lock. Raises OSError, CorruptStoreError."""
    problems: list[str] = []

    def told(event: str, **figures: Any) -> None:
        if "error" in figures:
            problems.append(str(figures["error"]))
        tell(event, **figures)

    io.make_folder(paths.own, mode=0o700)
    words, now_ns = store.words, 0
    retention = Retention(io, paths, options, words, store, io, told, now_ns)
    retention.carry_out(Request(reserved_ms))
    try:
        while not words[words_of.RETENTION_ANSWERED] or retention.gives_back:
            retention.step(now_ns, now_ms)
            if words[words_of.RETENTION_ERRNO]:
                raise OSError(words[words_of.RETENTION_ERRNO], problems[-1], str(paths.root))
            # Nobody else is here to be held up: pauses take no time.
            now_ns = max(now_ns + 1, retention.due_ns)
    finally:
        retention.close()
    correct_groups(io, paths, store, words, now_ms, tell)


def correct_groups(io: StoreIO, paths: StorePaths, queues: QueueWords, words: Words, now_ms: int, tell: Tell) -> None:
    """Raise progress of groups to the minima of a store that nobody runs, as the query role does. Raises OSError."""
    try:
        all_progress(io, paths)
    except CorruptStoreError as error:
        tell("consumer progress cannot be read, so it is not corrected", problem=str(error))
        return
    progress = GroupProgress(io, paths, io, tell)
    try:
        if Corrections(io, paths, io, words, queues, progress, tell).raise_to_minima():
            progress.save(now_ms)
    finally:
        progress.close()
