"""What is stored of consumer groups, as requests, retention and time change it: their progress and their settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mqproc.errors import (
    GroupNotFoundError,
    NoSuchQueueError,
    OffsetOutOfRangeError,
    PermissionDeniedError,
    StoreBusyError,
)
from mqproc.layout import control
from mqproc.roles.role_log import get_logger
from mqproc.store.commitlog.flush import sync_log
from mqproc.store.offsets.offset_store import OffsetCorrector, OffsetStore
from mqproc.store.offsets.settings import GroupSettings, SubscriptionGroups
from mqproc.store.sync_guard import SyncGuard
from mqproc.topic_names import RETRY_PREFIX, check_group, reject_system_group
from mqproc.wire.operations.groups import EARLIEST, LATEST, GroupSettingsRequest

if TYPE_CHECKING:
    from mqproc.roles.role import RoleContext
    from mqproc.store.consumequeue.table import QueueTable
    from mqproc.store.read.queries import StoreQueries
    from mqproc.store.read.views import QueueBounds


class GroupState:
    """The groups of one store. The query role is the one writer of their files."""

    def __init__(self, context: RoleContext, reading: StoreQueries, table: QueueTable) -> None:
        self._clock = context.clock
        self._control = context.control
        self._words = context.control.words
        self._log = get_logger()
        self._heartbeat = context.heartbeat
        self._reading = reading
        self._queues = reading.queues
        self._options = context.options
        io, paths = context.io, context.paths
        self._io = io
        self._syncs = syncs = SyncGuard(io, paths, self._words, control.QUERY, control.QUERY_SYNC_ERRNO)
        successor = context.incarnation > 1
        self.progress = OffsetStore(io, paths, syncs, self._log.warning, successor=successor)
        self.settings = SubscriptionGroups(io, paths, syncs, self._log.warning)
        self._corrections = OffsetCorrector(io, paths, syncs, self._words, table, self.progress, self._log.warning)
        # Topics that were wanted before they had a queue: they are read from their beginning.
        self._awaited: set[tuple[str, str]] = set()
        self._deleted_ends: dict[tuple[str, str, int], int] = {}
        """Where retry queues ended when their group was deleted: one of its name does not get what lies before."""
        self.changes = 0
        """Counts resets, deletions and changes of settings, which receives that wait look for."""
        self.is_closing: Callable[[str], bool] = lambda _group: False
        """Whether simple consumers of a group that was deleted have messages which are not closed yet."""
        self._words[control.PROGRESS_AT] = -1

    def step(self, now_ns: int) -> int:
        """Follow retention, and save when it is time."""
        done = 0
        if not self.progress.writable:
            done += self.progress.create_when_due(now_ns)
        if self.progress.writable:
            done += self._follow_minimum()
        written, durable = self._words[control.WRITTEN], self._control.flushed
        done += self.progress.save_when_due(now_ns, self._clock.time_ms(), written, durable)
        return done

    def _follow_minimum(self) -> int:
        """Raise progress when retention has moved the minima, and count what went."""
        minimum = self._words[control.MIN_PHYSICAL_OFFSET]
        has_moved = minimum != self._words[control.PROGRESS_AT]
        try:
            done = self._corrections.raise_to_minima() if has_moved else self._corrections.count()
        except OSError as error:
            self._heartbeat.failed()
            self._log.error("what groups have not consumed could not be counted", error=str(error))
            done = 1
        self._words[control.PROGRESS_AT] = minimum
        return int(has_moved or done > 0)

    def save(self) -> None:
        """At the end; what cannot be saved now is in `mqproc/progress` still."""
        try:
            self._save_now()
        except OSError as error:
            self._heartbeat.failed()
            self._log.error("progress of consumer groups could not be saved", error=str(error))

    def _save_now(self) -> None:
        """Save, with the log synced that progress rests on. Raises OSError."""
        sync_log(self._reading.segments, self._syncs, self._control.flushed, self._words[control.WRITTEN])
        self.progress.save(self._clock.time_ms())

    def close(self) -> None:
        self.progress.close()

    # Groups

    def known(self, group: str) -> GroupSettings:
        """A group's settings; one that nobody has made is made.

        Raises GroupNotFoundError when that may not be, StoreBusyError when it may not be yet.
        """
        check_group(group)
        found = self.settings.get(group)
        if found is None:
            if not self._options.auto_create_subscription_group:
                raise GroupNotFoundError(f"no group {group!r}, and auto_create_subscription_group is off")
            self._check_closed(group)
            found = GroupSettings(group)
            self.settings.add(found, self._clock.time_ms())
        return found

    def _check_closed(self, group: str) -> None:
        """Raise StoreBusyError for a group that may not be made again yet: after a kill it would get what is open."""
        if self.is_closing(group):
            raise StoreBusyError(f"what consumers of the deleted group {group} had is not closed yet", hint_ms=20)

    def check_may_consume(self, group: str) -> None:
        """Raise PermissionDeniedError for a group that was told to stop."""
        if not self.settings.of(group).consume_enable:
            raise PermissionDeniedError(f"group {group} may not consume: consumeEnable is false")

    def change_settings(self, options: GroupSettingsRequest) -> None:
        """Make a group, or change it. Raises BadRequestError, StoreBusyError, OSError."""
        check_group(options.group)
        if self.settings.get(options.group) is None:
            self._check_closed(options.group)
        changes: dict[str, Any] = {}
        for name in ("retry_max_times", "retry_queue_nums"):
            if (value := getattr(options, name)) >= 0:
                changes[name] = value
        if options.consume_enable >= 0:
            changes["consume_enable"] = bool(options.consume_enable)
        self.settings.add(replace(self.settings.of(options.group), **changes), self._clock.time_ms())
        self.changes += 1

    def delete(self, group: str) -> None:
        """Forget a group, durably. Raises GroupNotFoundError, BadRequestError for the system's own, OSError."""
        reject_system_group(group)
        if group not in self.progress.groups() and self.settings.get(group) is None:
            raise GroupNotFoundError(f"no group {group!r}")
        self.progress.record_reset(self._words[control.WRITTEN])
        ends = self._deleted_ends.items()
        self._deleted_ends = {place: end for place, end in ends if self._queues.bounds(*place[1:]) is not None}
        for at in self.progress.of(group):
            bounds = self._queues.bounds(at.topic, at.queue_id)
            if bounds is not None and at.topic.startswith(RETRY_PREFIX):
                self._deleted_ends[group, at.topic, at.queue_id] = bounds.max_offset
        self.progress.delete_group(group)
        self.forget_waiting(group)
        self._save_now()
        self.settings.delete(group, self._clock.time_ms())
        self.changes += 1

    # Progress

    def begin(self, group: str, topic: str, start: str, start_ms: int) -> None:
        """Give a group a place to begin at in the queues of a topic where it has none.

        Queues that come to a topic which the group reads already, or has waited for, are read from their beginning.
        """
        ids = self._queues.ids(topic)
        if not ids:
            self._awaited.add((group, topic))
            return
        missing = [queue_id for queue_id in ids if self.progress.offset(group, topic, queue_id) is None]
        if not missing:
            return
        if len(missing) < len(ids) or (group, topic) in self._awaited or topic.startswith(RETRY_PREFIX):
            start = EARLIEST
        for queue_id in missing:
            bounds = self._queues.bounds(topic, queue_id)
            if bounds is not None:
                offset = self._start(topic, queue_id, bounds, start, start_ms)
                end = self._deleted_ends.get((group, topic, queue_id), 0)
                self.progress.set(group, topic, queue_id, max(offset, min(end, bounds.max_offset)))

    def begin_retries(self, group: str, topic: str, queue_id: int) -> None:
        """Give a group a place in a retry queue before copies go there, so that all count as not consumed.

        Raises OSError.
        """
        self.begin(group, topic, EARLIEST, 0)
        if self.progress.offset(group, topic, queue_id) is None:
            self.progress.set(group, topic, queue_id, 0)

    def _start(self, topic: str, queue_id: int, bounds: QueueBounds, start: str, start_ms: int) -> int:
        if start == EARLIEST:
            return bounds.min_offset
        if start == LATEST:
            return bounds.max_offset
        return self._reading.offset_at(topic, queue_id, start_ms)

    def forget_waiting(self, group: str) -> None:
        """Nobody of a group waits for topics any more."""
        self._awaited = {(name, topic) for name, topic in self._awaited if name != group}

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Everything below `offset` is consumed. Raises as `GroupProgress.commit`, NoSuchQueueError."""
        self.progress.commit(group, topic, queue_id, offset, self.bounds(topic, queue_id).max_offset)
        self._io.crash_point("retry.original_done")

    def reset(self, group: str, offsets: Sequence[tuple[str, int, int]]) -> None:
        """Begin at these offsets, durably; all or nothing. Raises NoSuchQueueError, OffsetOutOfRangeError, OSError."""
        for topic, queue_id, offset in offsets:
            bounds = self.bounds(topic, queue_id)
            if not bounds.min_offset <= offset <= bounds.max_offset:
                raise OffsetOutOfRangeError(
                    f"{topic}/{queue_id} has {bounds.min_offset:,} to {bounds.max_offset:,}; {offset:,} is outside",
                    min_offset=bounds.min_offset,
                    max_offset=bounds.max_offset,
                )
        self.progress.record_reset(self._words[control.WRITTEN])
        for topic, queue_id, offset in offsets:
            self.progress.reset_offset(group, topic, queue_id, offset)
        self.changes += 1
        self._save_now()

    def went(self, group: str, topic: str, queue_id: int, offsets: Iterable[int]) -> None:
        """A group does not get these messages of a queue again; those that retention took before are counted."""
        self._corrections.count_missing(group, topic, queue_id, offsets)

    def bounds(self, topic: str, queue_id: int) -> QueueBounds:
        """Raises NoSuchQueueError."""
        bounds = self._queues.bounds(topic, queue_id)
        if bounds is None:
            raise NoSuchQueueError(f"no queue {queue_id} of topic {topic!r}")
        return bounds
