"""Deletion of expired files in small steps, as `retention.plan` decides: the keeper's part.

    log       plan; raise the aim, each queue's minimum, the log's minimum; then per segment: unlink, sync the folder
    follow    delete files of queues and index once the segments below a minimum are durably deleted
    space     release the space of deleted files piece by piece

Minima are words in shared memory: after a power loss the log begins with its first segment. A successor continues from
`retention_aim`, `min_physical_offset` and the files below it.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mqproc.config.options import Options
from mqproc.errors import BadRequestError, CorruptStoreError
from mqproc.io.store_io import FailedSyncError, StoreIO
from mqproc.ipc.control_words import Words
from mqproc.layout import control
from mqproc.paths import StorePaths
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.cooperative import Slices
from mqproc.store.index.files import committed_state
from mqproc.store.offsets.offset_store import EventLog
from mqproc.store.retention import plan as retention_request
from mqproc.store.retention.plan import (
    QUEUES_PER_SLICE,
    DeletionRequest,
    Due,
    ExpiredQueueFiles,
    LastPass,
    LogPlan,
    LogPlanner,
    QueueOffsets,
    RetentionReport,
    due_now,
    durable_limits,
    group_limits,
    index_files_below,
)
from mqproc.store.sync_guard import Syncing, remember_failed_sync
from mqproc.util.units import MIB

# Deleted files whose space is still in use

STEP_BYTES: Final = 16 * MIB
# A file that is in use for longer than this is closed: its last user frees it.
PATIENCE_NS: Final = 120_000_000_000


@dataclass(slots=True)
class _Deleted:
    """A file without a name: pages below `dropped` are released, `size` bytes are left."""

    fd: int
    size: int
    since_ns: int
    dropped: int = 0


class DeletedFiles:
    """Deletes files in steps to avoid stalls: the name first, then the space.

    Freeing 1 GiB at once keeps the file system busy for a quarter of a second, and concurrent writes wait for tens of
    milliseconds. So a large file is kept open while it is unlinked, its cached pages are dropped piece by piece, and
    then it is truncated piece by piece, but only when no reader can reach it. `close` frees the rest at once.
    """

    def __init__(self, io: StoreIO) -> None:
        self._io = io
        self._files: deque[_Deleted] = deque()

    def delete(self, path: Path, now_ns: int) -> int:
        """Unlink a file if it exists; returns its bytes on disk. The caller syncs the folder."""
        try:
            size = self._io.allocated_of(path)
            fd = self._io.open(path, write=True) if size > STEP_BYTES else -1
        except FileNotFoundError:
            return 0
        if fd < 0:
            self._io.unlink(path)
            return size
        try:
            length = self._io.size(fd)
            self._io.unlink(path)
        except OSError:
            self._io.close(fd)
            raise
        self._files.append(_Deleted(fd, length, now_ns))
        return size

    def __len__(self) -> int:
        return len(self._files)

    @property
    def pending_bytes(self) -> int:
        """Space that deleted files still use."""
        return sum(file.size for file in self._files)

    def step(self, now_ns: int) -> bool:
        """Release a piece; False if nothing can be done now: no file is left, or all are in use."""
        for _ in range(len(self._files)):
            file = self._files[0]
            if self._step(file):
                if file.size == 0:
                    self._forget_first()
                return True
            if now_ns - file.since_ns > PATIENCE_NS:
                self._forget_first()
                return True
            self._files.rotate(-1)
        return False

    def close(self) -> None:
        while self._files:
            self._forget_first()

    def _step(self, file: _Deleted) -> bool:
        if file.dropped < file.size:
            # Harmless: readers keep their pages or read them from disk.
            self._io.drop_cache(file.fd, file.dropped, STEP_BYTES)
            file.dropped += STEP_BYTES
            return True
        if not self._io.is_unreachable(file.fd):
            return False
        file.size = max(0, file.size - STEP_BYTES)
        file.dropped = file.size
        self._io.set_size(file.fd, file.size)
        return True

    def _forget_first(self) -> None:
        self._io.close(self._files.popleft().fd)


NS_PER_MS: Final = 1_000_000
RELEASE_PAUSE_NS: Final = 5 * NS_PER_MS
# Pause while all deleted files are still in use by readers.
IN_USE_PAUSE_NS: Final = 1000 * NS_PER_MS
RETRY_PAUSE_NS: Final = 1000 * NS_PER_MS
# Limit of deleted files, each of which holds a descriptor.
PENDING_FILES_MAX: Final = 64
_NEVER: Final = 1 << 62
_NOT_KNOWN: Final = -1

Work = Generator[int | None, None, None]
"""Work in slices, each of which yields the pause in ns before the next one, None for none."""


class _Task:
    """At most one piece of work in progress."""

    def __init__(self) -> None:
        self._work: Work | None = None
        self.due_ns = _NEVER

    @property
    def idle(self) -> bool:
        return self._work is None

    def begin(self, work: Work, now_ns: int) -> None:
        self._work, self.due_ns = work, now_ns

    def expedite(self, now_ns: int) -> None:
        self.due_ns = min(self.due_ns, now_ns) if self._work is not None else _NEVER

    def step(self, now_ns: int) -> bool:
        """Run a slice if it is due; returns whether it did. An exception of the work ends it."""
        if self._work is None or now_ns < self.due_ns:
            return False
        work, self._work, self.due_ns = self._work, None, _NEVER
        try:
            pause_ns = next(work)
        except StopIteration:
            return True
        self._work, self.due_ns = work, now_ns + (pause_ns or 0)
        return True


class Retention:
    """Retention of one store; owns `min_physical_offset`, queue minima, `retention_…` words."""

    def __init__(
        self,
        io: StoreIO,
        paths: StorePaths,
        options: Options,
        words: Words,
        queues: QueueOffsets,
        syncs: Syncing,
        event_log: EventLog,
        now_ns: int,
    ) -> None:
        """`syncs` is the role's SyncGuard. A predecessor's work is finished at once."""
        self._io = io
        self._paths = paths
        self._options = options
        self._words = words
        self._queues = queues
        self._syncs = syncs
        self._event_log = event_log
        self._segments = LogSegments(io, paths.commit_log, options.mapped_file_size_commit_log, whole=False)
        self._planner = LogPlanner(self._segments)
        self._files = ExpiredQueueFiles(io, paths.consume_queue, options.consume_queue_file_bytes, queues)
        self._deleted = DeletedFiles(io)
        self._last = LastPass()
        self._request: DeletionRequest | None = None
        self._request_path: Path | None = None
        self._request_drained = False
        self._log = _Task()
        self._follow = _Task()
        self._look_ns = now_ns + options.clean_resource_interval * NS_PER_MS
        self._follow_ns = now_ns
        self._release_ns = now_ns
        self._gone_below = self._followed = _NOT_KNOWN
        self._oldest_of = _NOT_KNOWN
        self._ends = False
        self._log.begin(self._finish_log(now_ns), now_ns)

    def reload(self, options: Options, now_ns: int) -> None:
        """Apply changed options; a pause in progress ends, since it has the old length."""
        self._options = options
        self._log.expedite(now_ns)
        self._follow.expedite(now_ns)
        self._look_ns = min(self._look_ns, now_ns + options.clean_resource_interval * NS_PER_MS)

    def finish(self, now_ns: int) -> bool:
        """Delete segments below raised minima at a stop, without pauses; whether it is finished.

        Otherwise the queue table would contradict the log. `step` must not be called any more.
        """
        if not self._ends:
            self._ends = True
            self._log.begin(self._finish_log(now_ns), now_ns)
        self._log.expedite(now_ns)
        try:
            self._log.step(now_ns)
        except (OSError, CorruptStoreError) as error:
            self._handle_error(error, now_ns)
        return self._log.idle

    def close(self) -> None:
        """Close files and mappings; the space of deleted files is freed at once."""
        self._files.close()
        self._segments.close()
        self._deleted.close()

    # Scheduling

    @property
    def due_ns(self) -> int:
        """Time of the next action on the monotonic clock."""
        look_ns = self._look_ns if self._log.idle else _NEVER
        follow_ns = self._follow_ns if self._must_follow else _NEVER
        give_ns = self._release_ns if self._deleted.pending_bytes else _NEVER
        return min(look_ns, follow_ns, give_ns, self._log.due_ns, self._follow.due_ns)

    @property
    def has_pending_space(self) -> bool:
        """Whether deleted files still use space."""
        return self._deleted.pending_bytes > 0

    @property
    def _must_follow(self) -> bool:
        return self._follow.idle and self._followed != self._gone_below

    def poll_request(self) -> None:
        """Begin a pending request unless one is in progress."""
        path = retention_request.find_request(self._io, self._paths) if self._request is None else None
        if path is None:
            return
        try:
            self.execute_request(retention_request.read_request(self._paths, path), path)
        except BadRequestError as error:
            self._event_log("a request to retention cannot be read", error=str(error))
            self._io.unlink(path)

    def execute_request(self, request: DeletionRequest, path: Path | None = None) -> None:
        """Delete everything due by a request, then increment RETENTION_ANSWERED.

        `path` is the request's file.
        """
        self._request, self._request_drained, self._request_path = request, False, path
        self._look_ns = 0

    def step(self, now_ns: int, now_ms: int) -> int:
        """Do a bounded piece of work; returns whether there was any."""
        done = 0
        try:
            done += self._release_space(now_ns)
            done += self._step_log(now_ns, now_ms)
            done += self._step_follow(now_ns, now_ms)
            if self._request is not None and self._request_drained and not self._must_follow and self._follow.idle:
                self._answer()
        except (OSError, CorruptStoreError) as error:
            self._handle_error(error, now_ns)
            done += 1
        self._words[control.RETENTION_PENDING_BYTES] = self._deleted.pending_bytes
        return done

    def _step_log(self, now_ns: int, now_ms: int) -> int:
        if self._log.idle and now_ns >= self._look_ns:
            self._look_ns = now_ns + self._options.clean_resource_interval * NS_PER_MS
            self._log.begin(self._look(now_ns, now_ms), now_ns)
        return self._log.step(now_ns)

    def _step_follow(self, now_ns: int, now_ms: int) -> int:
        if self._must_follow and now_ns >= self._follow_ns:
            self._follow.begin(self._follow_log(self._gone_below, now_ns, now_ms), now_ns)
        return self._follow.step(now_ns)

    def _release_space(self, now_ns: int) -> int:
        if not self._deleted.pending_bytes or now_ns < self._release_ns:
            return 0
        released = self._deleted.step(now_ns)
        self._release_ns = now_ns + (RELEASE_PAUSE_NS if released else IN_USE_PAUSE_NS)
        return int(released)

    def _handle_error(self, error: OSError | CorruptStoreError, now_ns: int) -> None:
        """End the current work for a later retry, unless a sync failed, which is final."""
        number = getattr(error, "errno", None) or errno.EIO
        self._words[control.RETENTION_ERRNO] = number
        if isinstance(error, FailedSyncError) and not self._sync_has_failed:
            self._words[control.KEEPER_SYNC_ERRNO] = number
            remember_failed_sync(self._io, self._paths, f"{control.KEEPER}: {error}")
        self._follow_ns = now_ns + RETRY_PAUSE_NS
        if self._request is not None and self._log.idle:
            self._look_ns = now_ns + RETRY_PAUSE_NS
        self._event_log("retention waits", error=str(error))

    @property
    def _sync_has_failed(self) -> bool:
        """Whether any sync has failed: durable data is unknown then, so nothing is deleted."""
        return control.sync_errno(self._words) != 0

    def _answer(self) -> None:
        self._request = None
        self._words.add(control.RETENTION_ANSWERED, 1)
        if self._request_path is not None:
            self._io.unlink(self._request_path)

    # The log

    def _look(self, now_ns: int, now_ms: int) -> Work:
        """Plan deletions and execute them."""
        words, options = self._words, self._options
        request = self._request
        reserved_ms = None if request is None else request.reserved_ms_by(options)
        due = due_now(options, now_ms, *self._io.disk_usage(self._paths.root), requested_ms=reserved_ms)
        words.add(control.RETENTION_PASSES, 1)
        words[control.RETENTION_PASS_MS] = now_ms
        words[control.RETENTION_TRIGGER] = due.trigger if due else control.DUE_NOTHING
        # The minimum must not advance while segments below it cannot be deleted.
        yield from self._finish_log(now_ns)
        words[control.RETENTION_ERRNO] = 0
        plan = yield from self._plan(due, now_ms)
        self._report_plan(plan)
        if due is not None and plan.deletions:
            self._last.time_ms, self._last.trigger = now_ms, control.DUE_NAMES[due.trigger]
            words[control.RETENTION_AIM] = max(words[control.RETENTION_AIM], plan.minimum)
        yield from self._finish_log(now_ns)
        if request is not None and request is self._request:
            self._request_drained = not plan.deletions
            if plan.deletions:
                self._look_ns = now_ns

    def _plan(self, due: Due | None, now_ms: int) -> Slices[LogPlan]:
        words, options = self._words, self._options
        minimum = words[control.MIN_PHYSICAL_OFFSET]
        if due is None:
            return LogPlan([], minimum)
        limits = durable_limits(words, self._segments, options)
        limits += yield from group_limits(self._io, self._paths, words, options, self._queues, self._files)
        batch_max, pending_bytes = options.delete_file_batch_max, self._deleted.pending_bytes
        written = words[control.WRITTEN]
        return (
            yield from self._planner.plan(
                minimum, written, due, limits, now_ms, batch_max=batch_max, pending_bytes=pending_bytes
            )
        )

    def _report_plan(self, plan: LogPlan) -> None:
        by = plan.held.by if plan.held else control.HELD_NOTHING
        if plan.held and by != self._words[control.RETENTION_HELD_BY]:
            self._event_log("segments that are due are held back", by=control.HELD_NAMES[by], detail=plan.held.detail)
        self._words[control.RETENTION_HELD_BY] = by
        if plan.deletions:
            size = sum(deletion.bytes for deletion in plan.deletions)
            self._event_log("deleting segments", segments=len(plan.deletions), bytes=size, minimum=plan.minimum)

    def _finish_log(self, now_ns: int) -> Work:
        """Raise the minima to the aim and delete segments below them."""
        if self._sync_has_failed:
            return
        yield from self._move_minima()
        yield from self._unlink_segments(now_ns)
        self._gone_below = self._words[control.MIN_PHYSICAL_OFFSET]
        self._find_oldest(self._gone_below)

    def _move_minima(self) -> Work:
        """Raise the queues' minima, then the log's: every visible unit has its record at all times."""
        words = self._words
        aim = words[control.RETENTION_AIM]
        if aim <= words[control.MIN_PHYSICAL_OFFSET]:
            return
        for count, (number, topic, queue_id) in enumerate(list(self._queues.live())):
            self._queues.raise_min_offset(number, self._files.first_readable(number, topic, queue_id, aim))
            if count % QUEUES_PER_SLICE == QUEUES_PER_SLICE - 1:
                yield None
        words[control.MIN_PHYSICAL_OFFSET] = aim
        self._io.crash_point("retention.min_stored")
        yield None

    def _unlink_segments(self, now_ns: int) -> Work:
        """Delete the oldest first, each durably before the next: a power loss leaves no gap."""
        minimum = self._words[control.MIN_PHYSICAL_OFFSET]
        self._segments.forget_below(minimum)
        self._planner.times.forget_below(minimum)
        for start in self._segments.starts():
            if start >= minimum:
                break
            while len(self._deleted) >= PENDING_FILES_MAX and not self._ends:
                yield RELEASE_PAUSE_NS
            size = self._deleted.delete(self._segments.path(start), now_ns)
            self._syncs.sync_folder(self._paths.commit_log)
            self._io.crash_point("retention.log_unlinked")
            self._last.segments += 1
            self._count(control.RETENTION_SEGMENTS, size)
            yield self._options.delete_commit_log_files_interval * NS_PER_MS

    def _find_oldest(self, minimum: int) -> None:
        """Find the first record's store time, once per minimum."""
        if minimum == self._oldest_of or self._words[control.WRITTEN] == minimum:
            return
        oldest_ms = self._planner.times.first_ms(self._segments.start_of(minimum))
        self._words[control.OLDEST_STORE_TIMESTAMP_MS] = oldest_ms or 0
        self._oldest_of = minimum

    # Queues and index

    def _follow_log(self, minimum: int, now_ns: int, now_ms: int) -> Work:
        """Delete queue and index files below a minimum whose segments are durably deleted."""
        yield from self._unlink_queue_files(minimum, now_ns)
        self._unlink_index_files(minimum, now_ns)
        yield None
        last = self._last
        if not self._sync_has_failed and (last.segments or last.queue_files or last.index_files):
            last.time_ms, last.minimum = last.time_ms or now_ms, minimum
            retention_request.write_report(self._io, self._paths, RetentionReport(last=last))
            self._last = LastPass()
        self._followed = minimum

    def _unlink_queue_files(self, minimum: int, now_ns: int) -> Work:
        for count, (number, topic, queue_id) in enumerate(list(self._queues.live())):
            if self._sync_has_failed:
                return
            readable = self._queues.min_offset(number)
            below = self._files.files_below(number, topic, queue_id, minimum, readable)
            for start in below:
                size = self._deleted.delete(self._files.path(topic, queue_id, start), now_ns)
                self._io.crash_point("retention.cq_unlinked")
                self._last.queue_files += 1
                self._count(control.RETENTION_QUEUE_FILES, size)
            if below:
                self._files.forget(topic, queue_id)
                yield self._options.delete_consume_queue_files_interval * NS_PER_MS
            elif count % QUEUES_PER_SLICE == QUEUES_PER_SLICE - 1:
                yield None

    def _unlink_index_files(self, minimum: int, now_ns: int) -> None:
        state = committed_state(self._words)
        if state is None or self._sync_has_failed:
            return  # The dispatcher commits too fast: the next minimum covers these files.
        for name in index_files_below(self._io, self._paths.index, minimum, state.file_ms):
            size = self._deleted.delete(self._paths.index / name, now_ns)
            self._io.crash_point("retention.index_unlinked")
            self._last.index_files += 1
            self._count(control.RETENTION_INDEX_FILES, size)

    def _count(self, word: int, size: int) -> None:
        self._last.bytes += size
        self._words.add(word, 1)
        self._words.add(control.RETENTION_BYTES, size)
