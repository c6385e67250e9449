"""Deleting what is old: the keeper's half of the engine, in small steps. What may go, `retention_plan` tells.

    look      plan, aim, each queue's minimum, the log's minimum, then segment by segment: unlink, sync of the folder
    follow    queues and index, once the segments below a minimum are surely gone
    giving    the deleted files' space back, piece by piece

Minima are words in shared memory: after a loss of power the log begins with the first segment that is there. A
successor goes on from `retention_aim`, from `min_physical_offset` and from the files that lie below it.
"""

from __future__ import annotations

import errno
from collections.abc import Generator
from pathlib import Path
from typing import Final

from mqproc.config import Options
from mqproc.errors import BadRequestError, CorruptStoreError
from mqproc.io import FailedSyncError, StoreIO
from mqproc.ipc.words import Words
from mqproc.layout import control as words_of
from mqproc.paths import StorePaths
from mqproc.store.final_syncs import Syncing, remember_failed_sync
from mqproc.store.groups.progress import Tell
from mqproc.store.index_flush import committed_state
from mqproc.store.retention import request as retention_request
from mqproc.store.retention.deleted_files import DeletedFiles
from mqproc.store.retention.expired_files import ExpiredQueueFiles, QueueWords, index_files_below
from mqproc.store.retention.plan import (
    QUEUES_PER_SLICE,
    Due,
    LogPlan,
    LogPlanner,
    due_now,
    durable_limits,
    group_limits,
)
from mqproc.store.retention.request import LastPass, Report, Request
from mqproc.store.segments import LogSegments
from mqproc.store.slices import Slices

NS_PER_MS: Final = 1_000_000
GIVE_PAUSE_NS: Final = 5 * NS_PER_MS
# Nothing can be given back now: somebody reads it still.
IN_USE_PAUSE_NS: Final = 1000 * NS_PER_MS
RETRY_PAUSE_NS: Final = 1000 * NS_PER_MS
# Each of them takes a descriptor until its space is given back.
PENDING_FILES_MAX: Final = 64
_NEVER: Final = 1 << 62
_NOT_KNOWN: Final = -1

Work = Generator[int | None, None, None]
"""Work in slices; each yields after how many ns it wants to go on, None for at once."""


class _Task:
    """One piece of work under way, or none."""

    def __init__(self) -> None:
        self._work: Work | None = None
        self.due_ns = _NEVER

    @property
    def idle(self) -> bool:
        return self._work is None

    def begin(self, work: Work, now_ns: int) -> None:
        self._work, self.due_ns = work, now_ns

    def hurry(self, now_ns: int) -> None:
        """End the pause that it is in."""
        self.due_ns = min(self.due_ns, now_ns) if self._work is not None else _NEVER

    def step(self, now_ns: int) -> bool:
        """A slice, if it is time for one. Raises what the work raises; then there is none any more."""
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
    """Retention of one store. Owns `min_physical_offset`, the queues' minima and the `retention_…` words."""

    def __init__(
        self,
        io: StoreIO,
        paths: StorePaths,
        options: Options,
        words: Words,
        queues: QueueWords,
        syncs: Syncing,
        tell: Tell,
        now_ns: int,
    ) -> None:
        """`syncs` are the role's FinalSyncs, `tell` its log. What a predecessor has begun is finished at once."""
        self._io = io
        self._paths = paths
        self._options = options
        self._words = words
        self._queues = queues
        self._syncs = syncs
        self._tell = tell
        self._segments = LogSegments(io, paths.commit_log, options.mapped_file_size_commit_log, whole=False)
        self._planner = LogPlanner(self._segments)
        self._files = ExpiredQueueFiles(io, paths.consume_queue, options.consume_queue_file_bytes, queues)
        self._deleted = DeletedFiles(io)
        self._last = LastPass()
        self._request: Request | None = None
        self._request_path: Path | None = None
        self._request_drained = False
        self._log = _Task()
        self._follow = _Task()
        self._look_ns = now_ns + options.clean_resource_interval * NS_PER_MS
        self._follow_ns = now_ns
        self._give_ns = now_ns
        self._gone_below = self._followed = _NOT_KNOWN
        self._oldest_of = _NOT_KNOWN
        self._ends = False
        self._log.begin(self._finish_log(now_ns), now_ns)

    def reload(self, options: Options, now_ns: int) -> None:
        """Use these options from now on: a pause that is under way ends, or it would last as the old ones say."""
        self._options = options
        self._log.hurry(now_ns)
        self._follow.hurry(now_ns)
        self._look_ns = min(self._look_ns, now_ns + options.clean_resource_interval * NS_PER_MS)

    def finish(self, now_ns: int) -> bool:
        """A piece of what a stop does not leave: segments below minima that have moved on go, without pauses.

        Else the table of queues would tell of a store whose segments are gone already. Returns whether that is done;
        `step` is not called any more.
        """
        if not self._ends:
            self._ends = True
            self._log.begin(self._finish_log(now_ns), now_ns)
        self._log.hurry(now_ns)
        try:
            self._log.step(now_ns)
        except (OSError, CorruptStoreError) as error:
            self._failed(error, now_ns)
        return self._log.idle

    def close(self) -> None:
        """Let go of files and maps; the space of deleted files goes at once."""
        self._files.close()
        self._segments.close()
        self._deleted.close()

    # What to do when

    @property
    def due_ns(self) -> int:
        """When there is something to do next, by the monotonic clock."""
        look_ns = self._look_ns if self._log.idle else _NEVER
        follow_ns = self._follow_ns if self._must_follow else _NEVER
        give_ns = self._give_ns if self._deleted.pending_bytes else _NEVER
        return min(look_ns, follow_ns, give_ns, self._log.due_ns, self._follow.due_ns)

    @property
    def gives_back(self) -> bool:
        """Whether space of deleted files is taken still."""
        return self._deleted.pending_bytes > 0

    @property
    def _must_follow(self) -> bool:
        return self._follow.idle and self._followed != self._gone_below

    def take_request(self) -> None:
        """Look whether somebody asks for deletion now."""
        if self._request is not None:
            return
        path = retention_request.find(self._io, self._paths)
        if path is None:
            return
        try:
            self.carry_out(retention_request.read(self._paths, path), path)
        except BadRequestError as error:
            self._tell("a request to retention cannot be read", error=str(error))
            self._io.unlink(path)

    def carry_out(self, request: Request, path: Path | None = None) -> None:
        """Delete what is due by a request, until nothing is left of it; then RETENTION_ANSWERED is one more.

        `path` is the file that asks.
        """
        self._request, self._request_drained, self._request_path = request, False, path
        self._look_ns = 0

    def step(self, now_ns: int, now_ms: int) -> int:
        """A bounded piece of work; returns whether there was any."""
        done = 0
        try:
            done += self._give_back(now_ns)
            done += self._step_log(now_ns, now_ms)
            done += self._step_follow(now_ns, now_ms)
            if self._request is not None and self._request_drained and not self._must_follow and self._follow.idle:
                self._answer()
        except (OSError, CorruptStoreError) as error:
            self._failed(error, now_ns)
            done += 1
        self._words[words_of.RETENTION_PENDING_BYTES] = self._deleted.pending_bytes
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

    def _give_back(self, now_ns: int) -> int:
        if not self._deleted.pending_bytes or now_ns < self._give_ns:
            return 0
        given = self._deleted.step(now_ns)
        self._give_ns = now_ns + (GIVE_PAUSE_NS if given else IN_USE_PAUSE_NS)
        return int(given)

    def _failed(self, error: OSError | CorruptStoreError, now_ns: int) -> None:
        """What was under way ends early and is tried again later, unless a sync failed, which is final."""
        number = getattr(error, "errno", None) or errno.EIO
        self._words[words_of.RETENTION_ERRNO] = number
        if isinstance(error, FailedSyncError) and not self._syncs_ended:
            self._words[words_of.KEEPER_SYNC_ERRNO] = number
            remember_failed_sync(self._io, self._paths, f"{words_of.KEEPER}: {error}")
        self._follow_ns = now_ns + RETRY_PAUSE_NS
        if self._request is not None and self._log.idle:
            self._look_ns = now_ns + RETRY_PAUSE_NS
        self._tell("retention waits", error=str(error))

    @property
    def _syncs_ended(self) -> bool:
        """What is durable is not known any more: nothing is deleted."""
        return words_of.sync_errno(self._words) != 0

    def _answer(self) -> None:
        """Say that a request has been carried out."""
        self._request = None
        self._words.add(words_of.RETENTION_ANSWERED, 1)
        if self._request_path is not None:
            self._io.unlink(self._request_path)

    # The log

    def _look(self, now_ns: int, now_ms: int) -> Work:
        """One look at what is due, and its deletion."""
        words, options = self._words, self._options
        request = self._request
        reserved_ms = None if request is None else request.reserved_ms_by(options)
        due = due_now(options, now_ms, *self._io.disk_usage(self._paths.root), requested_ms=reserved_ms)
        words.add(words_of.RETENTION_PASSES, 1)
        words[words_of.RETENTION_PASS_MS] = now_ms
        words[words_of.RETENTION_TRIGGER] = due.trigger if due else words_of.DUE_NOTHING
        # No minimum moves on while segments below it cannot be deleted.
        yield from self._finish_log(now_ns)
        words[words_of.RETENTION_ERRNO] = 0
        plan = yield from self._plan(due, now_ms)
        self._tell_of(plan)
        if due is not None and plan.going:
            self._last.time_ms, self._last.trigger = now_ms, words_of.DUE_NAMES[due.trigger]
            words[words_of.RETENTION_AIM] = max(words[words_of.RETENTION_AIM], plan.minimum)
        yield from self._finish_log(now_ns)
        if request is not None and request is self._request:
            self._request_drained = not plan.going
            if plan.going:
                self._look_ns = now_ns

    def _plan(self, due: Due | None, now_ms: int) -> Slices[LogPlan]:
        words, options = self._words, self._options
        minimum = words[words_of.MIN_PHYSICAL_OFFSET]
        if due is None:
            return LogPlan([], minimum)
        limits = durable_limits(words, self._segments, options)
        limits += yield from group_limits(self._io, self._paths, words, options, self._queues, self._files)
        plan = yield from self._planner.plan(
            minimum,
            words[words_of.WRITTEN],
            due,
            limits,
            now_ms,
            batch_max=options.delete_file_batch_max,
            pending_bytes=self._deleted.pending_bytes,
        )
        return plan

    def _tell_of(self, plan: LogPlan) -> None:
        by = plan.held.by if plan.held else words_of.HELD_NOTHING
        if plan.held and by != self._words[words_of.RETENTION_HELD_BY]:
            self._tell("segments that are due are held back", by=words_of.HELD_NAMES[by], detail=plan.held.detail)
        self._words[words_of.RETENTION_HELD_BY] = by
        if plan.going:
            size = sum(going.bytes for going in plan.going)
            self._tell("deleting segments", segments=len(plan.going), bytes=size, minimum=plan.minimum)

    def _finish_log(self, now_ns: int) -> Work:
        """Bring minima and segments to where they are to be."""
        if self._syncs_ended:
            return
        yield from self._move_minima()
        yield from self._unlink_segments(now_ns)
        self._gone_below = self._words[words_of.MIN_PHYSICAL_OFFSET]
        self._look_at_oldest(self._gone_below)

    def _move_minima(self) -> Work:
        """First the queues', then the log's: a unit that can be seen has its record all the time."""
        words = self._words
        aim = words[words_of.RETENTION_AIM]
        if aim <= words[words_of.MIN_PHYSICAL_OFFSET]:
            return
        for count, (number, topic, queue_id) in enumerate(list(self._queues.live())):
            self._queues.raise_min_offset(number, self._files.first_readable(number, topic, queue_id, aim))
            if count % QUEUES_PER_SLICE == QUEUES_PER_SLICE - 1:
                yield None
        words[words_of.MIN_PHYSICAL_OFFSET] = aim
        self._io.crash_point("retention.min_stored")
        yield None

    def _unlink_segments(self, now_ns: int) -> Work:
        """Oldest first, each surely gone before the next: a loss of power leaves no hole in the log."""
        minimum = self._words[words_of.MIN_PHYSICAL_OFFSET]
        self._segments.forget_below(minimum)
        self._planner.times.forget_below(minimum)
        for start in self._segments.starts():
            if start >= minimum:
                break
            while len(self._deleted) >= PENDING_FILES_MAX and not self._ends:
                yield GIVE_PAUSE_NS
            size = self._deleted.delete(self._segments.path(start), now_ns)
            self._syncs.sync_folder(self._paths.commit_log)
            self._io.crash_point("retention.log_unlinked")
            self._last.segments += 1
            self._count(words_of.RETENTION_SEGMENTS, size)
            yield self._options.delete_commit_log_files_interval * NS_PER_MS

    def _look_at_oldest(self, minimum: int) -> None:
        """Find the first record's store time, once for each minimum."""
        if minimum == self._oldest_of or self._words[words_of.WRITTEN] == minimum:
            return
        oldest_ms = self._planner.times.first_ms(self._segments.start_of(minimum))
        self._words[words_of.OLDEST_STORE_TIMESTAMP_MS] = oldest_ms or 0
        self._oldest_of = minimum

    # What follows the log

    def _follow_log(self, minimum: int, now_ns: int, now_ms: int) -> Work:
        """Delete what of queues and index points below a minimum whose segments are surely gone."""
        yield from self._unlink_queue_files(minimum, now_ns)
        self._unlink_index_files(minimum, now_ns)
        yield None
        last = self._last
        if not self._syncs_ended and (last.segments or last.queue_files or last.index_files):
            last.time_ms, last.minimum = last.time_ms or now_ms, minimum
            retention_request.write_report(self._io, self._paths, Report(last=last))
            self._last = LastPass()
        self._followed = minimum

    def _unlink_queue_files(self, minimum: int, now_ns: int) -> Work:
        for count, (number, topic, queue_id) in enumerate(list(self._queues.live())):
            if self._syncs_ended:
                return
            readable = self._queues.min_offset(number)
            below = self._files.files_below(number, topic, queue_id, minimum, readable)
            for start in below:
                size = self._deleted.delete(self._files.path(topic, queue_id, start), now_ns)
                self._io.crash_point("retention.cq_unlinked")
                self._last.queue_files += 1
                self._count(words_of.RETENTION_QUEUE_FILES, size)
            if below:
                self._files.forget(topic, queue_id)
                yield self._options.delete_consume_queue_files_interval * NS_PER_MS
            elif count % QUEUES_PER_SLICE == QUEUES_PER_SLICE - 1:
                yield None

    def _unlink_index_files(self, minimum: int, now_ns: int) -> None:
        state = committed_state(self._words)
        if state is None or self._syncs_ended:
            return  # The dispatcher is in a hurry: the next minimum takes them along.
        for name in index_files_below(self._io, self._paths.index, minimum, state.file_ms):
            size = self._deleted.delete(self._paths.index / name, now_ns)
            self._io.crash_point("retention.index_unlinked")
            self._last.index_files += 1
            self._count(words_of.RETENTION_INDEX_FILES, size)

    def _count(self, word: int, size: int) -> None:
        self._last.bytes += size
        self._words.add(word, 1)
        self._words.add(words_of.RETENTION_BYTES, size)
