"""What can be asked about consumer groups, in slices, since a store may have many queues."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from mqproc.names import RETRY_PREFIX
from mqproc.roles.groups import Groups
from mqproc.roles.loop import RoleContext
from mqproc.roles.questions import Payload, Reply
from mqproc.store.reads.reading import StoreReading
from mqproc.store.slices import Slices
from mqproc.wire.group_operations import GroupInfoAnswer, GroupQueueRow, GroupRequest, GroupsAnswer
from mqproc.wire.operations import Empty, Operation

QUEUES_PER_SLICE: Final = 256
UNKNOWN: Final = -1
_NOTHING: Payload = ()


class GroupQuestions:
    """Questions about the groups of one store."""

    def __init__(self, context: RoleContext, reading: StoreReading, groups: Groups) -> None:
        self._clock = context.clock
        self._reading = reading
        self._groups = groups

    def ask(self, operation: int, options: Any) -> Slices[Reply]:
        """The slices of one of GROUP_QUESTIONS."""
        return self.groups(options) if operation == Operation.GROUPS else self.info(options)

    def groups(self, _options: Empty) -> Slices[Reply]:
        """All groups with what they have not consumed."""
        groups = self._groups
        rows = []
        # Of all groups together: a store may have thousands with a few queues each.
        looked_at = 0
        members = groups.members()
        for group in sorted({*groups.state.settings.names(), *groups.state.progress.groups(), *members}):
            lag = retry_lag = 0
            topics = set()
            for topic, queue_id, _offset in self._queues_of(group):
                looked_at += 1
                if looked_at % QUEUES_PER_SLICE == 0:
                    yield
                topics.add(topic)
                behind = self._lag(group, topic, queue_id)
                lag += behind
                retry_lag += behind if topic.startswith(RETRY_PREFIX) else 0
            count = len(members[group].members) if group in members else 0
            rows.append((group, count, len(topics), lag, retry_lag))
        return GroupsAnswer(rows), _NOTHING

    def info(self, options: GroupRequest) -> Slices[Reply]:
        """One group: settings, members, queues."""
        groups, group = self._groups, options.group
        settings = groups.state.settings.of(group)
        members = groups.members().get(group)
        rows = []
        for number, (topic, queue_id, offset) in enumerate(self._queues_of(group)):
            if number % QUEUES_PER_SLICE == QUEUES_PER_SLICE - 1:
                yield
            has = members.member_of((topic, queue_id)) if members is not None else ""
            rows.append(self._row(topic, queue_id, offset, has))
        known = groups.state.settings.get(group) is not None or bool(rows) or members is not None
        answer = GroupInfoAnswer(
            group,
            known,
            members.generation if members is not None else 0,
            settings.retry_max_times,
            settings.retry_queue_nums,
            settings.consume_enable,
            self._members_of(group),
            rows,
        )
        return answer, _NOTHING

    def _members_of(self, group: str) -> list[tuple[str, str, list[str], int, int, int]]:
        members = self._groups.members().get(group)
        if members is None:
            return []
        now_ns = self._clock.monotonic_ns()
        return [
            (
                member_id,
                of.name,
                list(of.topics),
                len(members.queues_of(member_id)),
                max(0, now_ns - of.heard_ns) // 1_000_000,
                of.pid,
            )
            for member_id, of in sorted(members.members.items())
        ]

    def _queues_of(self, group: str) -> Iterator[tuple[str, int, int]]:
        """(topic, queue id, offset or UNKNOWN) of every queue that a group has progress in or wants."""
        progress, queues = self._groups.state.progress, self._reading.queues
        members = self._groups.members().get(group)
        wanted = members.topics if members is not None else []
        known: dict[str, dict[int, int]] = {}
        for at in progress.of(group):
            known.setdefault(at.topic, {})[at.queue_id] = at.offset
        for topic in sorted({*known, *wanted}):
            offsets = known.get(topic, {})
            for queue_id in sorted({*queues.ids(topic), *offsets}):
                yield topic, queue_id, offsets.get(queue_id, UNKNOWN)

    def _lag(self, group: str, topic: str, queue_id: int) -> int:
        bounds = self._reading.queues.bounds(topic, queue_id)
        if bounds is None:
            return 0
        offset = self._groups.state.progress.offset(group, topic, queue_id)
        return bounds.max_offset - max(bounds.min_offset, offset or 0)

    def _row(self, topic: str, queue_id: int, offset: int, member_id: str) -> GroupQueueRow:
        bounds = self._reading.queues.bounds(topic, queue_id)
        if bounds is None:
            return topic, queue_id, offset, 0, 0, UNKNOWN, member_id
        time_ms = self._reading.store_time_ms(topic, queue_id, max(offset, bounds.min_offset))
        return topic, queue_id, offset, bounds.min_offset, bounds.max_offset, time_ms, member_id


GROUP_QUESTIONS = frozenset({Operation.GROUPS, Operation.GROUP_INFO})
"""What `ask` answers."""
