"""Stored state of consumer groups: committed offsets and settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from mqproc.errors import (
    GroupNotFoundError,
    NoSuchQueueError,
    OffsetOutOfRangeError,
    PermissionDeniedError,
    StoreBusyError,
)
from mqproc.layout import control
from mqproc.roles.role import RoleContext
from mqproc.roles.role_log import get_logger
from mqproc.store.commitlog.flush import sync_log
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.cooperative import Slices
from mqproc.store.offsets.offset_store import OffsetCorrector, OffsetStore
from mqproc.store.offsets.settings import GroupSettings, SubscriptionGroups
from mqproc.store.read.queries import StoreQueries
from mqproc.store.read.views import QueueBounds
from mqproc.store.sync_guard import SyncGuard
from mqproc.store.topics import ConsumedQueues
from mqproc.topic_names import RETRY_PREFIX, check_group, check_new_group, reject_system_group
from mqproc.wire.operations import AT_TIME, EARLIEST, LATEST, GroupSettingsRequest

QUEUES_PER_SLICE: Final = 256
AWAITED_TOPICS_MAX: Final = 4096
"""Subscribed topics without queues that are remembered for each group."""
NO_OFFSETS: Final[Mapping[int, int]] = {}


class ConsumerGroupState:
    """Offsets and settings of all groups. The query role is the only writer of their files."""

    def __init__(self, context: RoleContext, reading: StoreQueries, table: QueueTable) -> None:
        self._clock = context.clock
        self._control = context.control
        self._words = context.control.words
        self._log_error = context.heartbeat.log_error
        self._reading = reading
        self._queues = reading.queues
        self.consumed = ConsumedQueues(context.io, context.paths, reading.queues.ids)
        self._options = context.options
        io, paths = context.io, context.paths
        self._io = io
        self._syncs = syncs = SyncGuard(io, paths, self._words, control.QUERY, control.QUERY_SYNC_ERRNO)
        successor = context.incarnation > 1
        warn = get_logger().warning
        self.progress = OffsetStore(io, paths, syncs, warn, successor=successor)
        self.settings = SubscriptionGroups(io, paths, syncs, warn)
        # A successor finds new files instead of the lost files.
        self._words[control.OFFSETS_LOST] |= int(self.progress.lost)
        self._words[control.GROUP_SETTINGS_LOST] |= int(self.settings.lost)
        self._corrections = OffsetCorrector(io, paths, syncs, self._words, table, self.progress, warn)
        # Subscribed topics that had no queue yet: they are read from their beginning.
        self._awaited_topics: dict[str, set[str]] = {}
        self._deleted_ends: dict[tuple[str, str, int], int] = {}
        """Ends of retry queues when their group was deleted: a new group of that name starts there."""
        self.changes = 0
        """Number of resets, deletions and changes of settings; held receives are retried when it changes."""
        self.is_closing: Callable[[str], bool] = lambda _group: False
        """Whether simple consumers of a deleted group have open check points."""
        self._words[control.PROGRESS_AT] = -1

    def step(self, now_ns: int) -> int:
        """Follow retention, and save when due."""
        done = 0
        if not self.progress.writable:
            done += self.progress.create_when_due(now_ns)
        if self.progress.writable:
            done += self._follow_minimum()
        written, durable = self._words[control.WRITTEN], self._control.flushed
        done += self.progress.save_when_due(now_ns, self._clock.time_ms(), written, durable)
        self._words[control.OFFSETS_ERRNO] = self.progress.save_errno
        return done

    def _follow_minimum(self) -> int:
        """Raise offsets to the minima after retention, and count the messages lost to groups."""
        minimum = self._words[control.MIN_PHYSICAL_OFFSET]
        has_moved = minimum != self._words[control.PROGRESS_AT]
        try:
            done = self._corrections.raise_to_minima() if has_moved else self._corrections.count()
        except OSError as error:
            self._log_error("messages that groups have not consumed could not be counted", error=str(error))
            done = 1
        self._words[control.PROGRESS_AT] = minimum
        return int(has_moved or done > 0)

    def save(self) -> None:
        """Save at the stop. After an error the offsets are still in `mqproc/progress`."""
        try:
            self._save_now()
        except OSError as error:
            self._log_error("consumer offsets could not be saved", error=str(error))

    def _save_now(self) -> None:
        """Sync the log that the offsets refer to, then save. Raises OSError."""
        sync_log(self._reading.segments, self._syncs, self._control.flushed, self._words[control.WRITTEN])
        self.progress.save(self._clock.time_ms())

    def close(self) -> None:
        self.progress.close()

    # Groups

    def ensure_group(self, group: str) -> GroupSettings:
        """Settings of a group, which is created if allowed.

        Raises GroupNotFoundError, and StoreBusyError while a deleted group of this name is being closed.
        """
        check_group(group)
        found = self.settings.get(group)
        if found is None:
            if not self._options.auto_create_subscription_group:
                raise GroupNotFoundError(f"no group {group!r}, and auto_create_subscription_group is off")
            self._check_new(group)
            self._check_closed(group)
            found = GroupSettings(group)
            self.settings.add(found, self._clock.time_ms())
        return found

    def _check_new(self, group: str) -> None:
        """Raise BadRequestError for a name that only a group with offsets from RocketMQ may have."""
        if group not in self.progress.groups():
            check_new_group(group)

    def _check_closed(self, group: str) -> None:
        """Raise StoreBusyError while check points of a deleted group are open.

        Otherwise a new group of this name could get their messages after a kill.
        """
        if self.is_closing(group):
            raise StoreBusyError(f"messages received by the deleted group {group} are not closed yet", hint_ms=20)

    def check_may_consume(self, group: str) -> None:
        """Raise PermissionDeniedError for a disabled group."""
        if not self.settings.of(group).consume_enable:
            raise PermissionDeniedError(f"group {group} may not consume: consumeEnable is false")

    def change_settings(self, options: GroupSettingsRequest) -> None:
        """Create or change a group. Raises BadRequestError, StoreBusyError, OSError."""
        check_group(options.group)
        if self.settings.get(options.group) is None:
            self._check_new(options.group)
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
        """Delete a group durably. Raises GroupNotFoundError, BadRequestError, OSError."""
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
        self.forget_awaited(group)
        self._save_now()
        self.settings.delete(group, self._clock.time_ms())
        self.changes += 1

    # Offsets

    def init_offsets(self, group: str, topic: str, start: str, found: Mapping[int, int] = NO_OFFSETS) -> list[int]:
        """Set a group's start offsets in queues of a topic that lack one; returns all queue ids.

        Queues that are added to a topic that the group already reads or has waited for are read from their beginning.
        `found`: offsets of a start time.
        """
        ids, missing = self._missing(group, topic)
        if not ids:
            self._await_topic(group, topic)
        if self._starts_earliest(group, topic, ids, missing):
            start = EARLIEST
        for queue_id in missing:
            bounds = self._queues.bounds(topic, queue_id)
            if bounds is not None:
                # A queue that was created during the search has newer messages only.
                offset = found.get(queue_id, bounds.max_offset if start == LATEST else bounds.min_offset)
                end = self._deleted_ends.get((group, topic, queue_id), 0)
                self.progress.set(group, topic, queue_id, max(offset, min(end, bounds.max_offset)))
        return ids

    def start_offsets(self, group: str, topics: Iterable[str], start: str, start_ms: int) -> Slices[None]:
        """`init_offsets` for topics, also with AT_TIME, in slices."""
        queues = 0
        for topic in topics:
            ids, missing = self._missing(group, topic)
            found: dict[int, int] = {}
            if start == AT_TIME and not self._starts_earliest(group, topic, ids, missing):
                for queue_id in missing:
                    found[queue_id] = yield from self._reading.offset_at(topic, queue_id, start_ms)
                    yield
            self.init_offsets(group, topic, start, found)
            queues += 1 + len(ids)
            if queues >= QUEUES_PER_SLICE:
                queues = 0
                yield

    def _missing(self, group: str, topic: str) -> tuple[list[int], list[int]]:
        """All queue ids of a topic, and those in which the group has no offset."""
        ids, known = self.consumed.ids(topic), self.progress.offsets(group, topic)
        return ids, [queue_id for queue_id in ids if queue_id not in known]

    def _starts_earliest(self, group: str, topic: str, ids: Sequence[int], missing: Sequence[int]) -> bool:
        """Whether queues without an offset are read from their beginning in any case."""
        is_awaited = topic in self._awaited_topics.get(group, ())
        return len(missing) < len(ids) or is_awaited or topic.startswith(RETRY_PREFIX)

    def _await_topic(self, group: str, topic: str) -> None:
        topics = self._awaited_topics.setdefault(group, set())
        if len(topics) < AWAITED_TOPICS_MAX:
            topics.add(topic)

    def init_retry_offset(self, group: str, topic: str, queue_id: int) -> None:
        """Set a group's start offset in a retry queue, so that all copies count as unconsumed.

        Raises OSError.
        """
        self.init_offsets(group, topic, EARLIEST)
        if self.progress.offset(group, topic, queue_id) is None:
            self.progress.set(group, topic, queue_id, 0)

    def forget_awaited(self, group: str) -> None:
        """Forget the topics that a group without members has waited for."""
        self._awaited_topics.pop(group, None)

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Commit an offset. Raises as `OffsetStore.commit`, NoSuchQueueError."""
        self.progress.commit(group, topic, queue_id, offset, self.bounds(topic, queue_id).max_offset)
        self._io.crash_point("retry.original_done")

    def reset(
        self,
        group: str,
        offsets: Sequence[tuple[str, int, int]],
        on_reset: Callable[[Sequence[tuple[str, int, int]]], None],
    ) -> Slices[None]:
        """Reset all offsets durably or none, in slices; `on_reset` gets those of each slice.

        Raises NoSuchQueueError, OffsetOutOfRangeError, OSError.
        """
        parts = [offsets[at : at + QUEUES_PER_SLICE] for at in range(0, len(offsets), QUEUES_PER_SLICE)]
        for part in parts:
            self._check_reset(part)
            yield
        self.progress.record_reset(self._words[control.WRITTEN])
        for part in parts:
            for topic, queue_id, offset in part:
                self.progress.reset_offset(group, topic, queue_id, offset)
            on_reset(part)
            yield
        self.changes += 1
        self._save_now()

    def _check_reset(self, offsets: Iterable[tuple[str, int, int]]) -> None:
        for topic, queue_id, offset in offsets:
            bounds = self.bounds(topic, queue_id)
            if not bounds.min_offset <= offset <= bounds.max_offset:
                raise OffsetOutOfRangeError(
                    f"{topic}/{queue_id} has {bounds.min_offset:,} to {bounds.max_offset:,}; {offset:,} is outside",
                    min_offset=bounds.min_offset,
                    max_offset=bounds.max_offset,
                )

    def count_lost(self, group: str, topic: str, queue_id: int, offsets: Iterable[int]) -> None:
        """Count messages that a group will not get again because retention has deleted them."""
        self._corrections.count_missing(group, topic, queue_id, offsets)

    def bounds(self, topic: str, queue_id: int) -> QueueBounds:
        """Bounds of a queue. Raises NoSuchQueueError."""
        bounds = self._queues.bounds(topic, queue_id)
        if bounds is None:
            raise NoSuchQueueError(f"no queue {queue_id} of topic {topic!r}")
        return bounds
