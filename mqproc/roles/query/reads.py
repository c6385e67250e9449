"""Read requests other than pulls: each becomes slices that end in the reply."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from mqproc.errors import BadRequestError
from mqproc.ipc.health import ready_problems
from mqproc.roles.groups.coordinator import GroupCoordinator
from mqproc.roles.request_limits import Payload, Reply
from mqproc.roles.role import RoleContext
from mqproc.store.cooperative import RecordPage, Slices
from mqproc.store.read.queries import StoreQueries
from mqproc.store.read.scan import Conditions
from mqproc.topic_names import RETRY_PREFIX
from mqproc.wire.codec import FrameOptions
from mqproc.wire.operations import Empty, HealthAnswer, Operation, StatsAnswer
from mqproc.wire.operations.groups import GroupInfoAnswer, GroupQueueRow, GroupRequest, GroupsAnswer
from mqproc.wire.operations.log import (
    ByKeyRequest,
    CountAnswer,
    CountRequest,
    GetRequest,
    OffsetAnswer,
    OffsetAtRequest,
    QueryMessageAnswer,
    QueryMessageRequest,
    QueuesAnswer,
    QueuesRequest,
    RangeRequest,
    RecordsAnswer,
    ScanRequest,
    TopicsAnswer,
)

MESSAGES_MAX = 65_536

# Cursor of a complete answer.
END = [-1]
QUEUES_PER_SLICE: Final = 256
UNKNOWN: Final = -1
_NOTHING: Payload = ()
GROUP_READS = frozenset({Operation.GROUPS, Operation.GROUP_INFO})
"""Operations of `start`."""


class ReadRequests:
    """Read requests for messages, queues, topics and the state of the group."""

    def __init__(self, context: RoleContext, reading: StoreQueries) -> None:
        self._context = context
        self._reading = reading
        self._max_bytes = context.options.max_pull_bytes

    def start(self, operation: int, options: Any) -> Slices[Reply]:
        """Slices of one of READS. They raise the error that refuses the request."""
        return HANDLERS[operation](self, options)

    def ping(self, _options: Empty) -> Slices[Reply]:
        """Answer without content."""
        return at_once(Empty())

    def get(self, options: GetRequest) -> Slices[Reply]:
        """One record by unique id or offset id."""
        record = yield from self._reading.get(options.message_id, options.topic)
        return RecordsAnswer(1, END), (record.data,)

    def by_key(self, options: ByKeyRequest) -> Slices[Reply]:
        """Newest records by key or unique id; the cursor continues with older ones.

        Raises BadRequestError for an invalid `max_messages`.
        """
        if not 1 <= options.max_messages <= MESSAGES_MAX:
            given = f"max_messages = {options.max_messages:,}"
            raise BadRequestError(f"{given} is out of range: from 1 to {MESSAGES_MAX:,}")
        batch = yield from self._reading.by_key(
            options.topic,
            options.key,
            options.begin_ms,
            options.end_ms,
            unique=options.unique,
            born_time=options.born_time,
            below=options.below,
            max_messages=options.max_messages,
            max_bytes=self._most_bytes(options.max_bytes),
        )
        return _records(batch)

    def range(self, options: RangeRequest) -> Slices[Reply]:
        """Records of a time range."""
        if options.cursor == END:
            return RecordsAnswer(0, END), ()
        batch = yield from self._reading.range(
            options.topic,
            options.begin_ms,
            options.end_ms,
            tags=options.tags,
            sql=options.sql,
            born_time=options.born_time,
            cursor=options.cursor,
            max_messages=_message_limit(options.max_messages),
            max_bytes=self._most_bytes(options.max_bytes),
        )
        return _records(batch)

    def count(self, options: CountRequest) -> Slices[Reply]:
        """Number of records of a time range."""
        count = yield from self._reading.count(
            options.topic,
            options.begin_ms,
            options.end_ms,
            tags=options.tags,
            sql=options.sql,
            born_time=options.born_time,
        )
        return CountAnswer(count), ()

    def scan(self, options: ScanRequest) -> Slices[Reply]:
        """Records by a scan of the log."""
        conditions = Conditions(
            options.topic,
            options.property_name,
            options.property_value,
            options.body_contains,
            options.begin_ms,
            options.end_ms,
        )
        batch = yield from self._reading.scan(
            conditions,
            options.physical_offset,
            max_messages=_message_limit(options.max_messages),
            max_bytes=self._most_bytes(options.max_bytes),
            max_scan_bytes=options.max_scan_bytes,
        )
        return _records(batch)

    def offset_at(self, options: OffsetAtRequest) -> Slices[Reply]:
        """Queue offset by time."""
        offset = self._reading.offset_at(options.topic, options.queue_id, options.time_ms, upper=options.upper)
        return at_once(OffsetAnswer(offset))

    def query_message(self, options: QueryMessageRequest) -> Slices[Reply]:
        """RocketMQ's query by key, with the intact records."""
        found = yield from self._reading.query_message(
            options.topic, options.key, options.max_messages, options.begin_ms, options.end_ms
        )
        intact = self._reading.records.intact
        records = [record.data for offset in found.offsets if (record := intact(offset)) is not None]
        answer = QueryMessageAnswer(found.offsets, found.last_update_timestamp_ms, found.last_update_physical_offset)
        return answer, records

    def queues(self, options: QueuesRequest) -> Slices[Reply]:
        """Queues with their offsets."""
        infos = yield from self._reading.queue_infos(options.topic)
        rows = [(info.topic, info.queue_id, info.min_offset, info.max_offset) for info in infos]
        return QueuesAnswer(rows), ()

    def topics(self, _options: Empty) -> Slices[Reply]:
        """Topics with their settings."""
        infos = yield from self._reading.topic_infos()
        rows = [(info.topic, info.queues, info.perm, info.message_count, dict(info.attributes)) for info in infos]
        return TopicsAnswer(rows), ()

    def stats(self, _options: Empty) -> Slices[Reply]:
        """All control words."""
        return at_once(StatsAnswer(self._context.control.snapshot()))

    def health(self, _options: Empty) -> Slices[Reply]:
        """Readiness of the group, by the rules of /readyz."""
        control = self._context.control
        problems = ready_problems(control, self._context.options.heartbeat_timeout_ms * 1_000_000)
        takes_nothing = control.read_only or control.damage_read_only
        return at_once(HealthAnswer(not problems, takes_nothing, control.dispatch_behind_bytes, problems))

    def _most_bytes(self, wanted: int) -> int:
        """Limit of record bytes in an answer."""
        return min(max(wanted, 1), self._max_bytes)


HANDLERS: dict[int, Callable[[ReadRequests, Any], Slices[Reply]]] = {
    Operation.PING: ReadRequests.ping,
    Operation.GET: ReadRequests.get,
    Operation.BY_KEY: ReadRequests.by_key,
    Operation.RANGE: ReadRequests.range,
    Operation.COUNT: ReadRequests.count,
    Operation.OFFSET_AT: ReadRequests.offset_at,
    Operation.QUEUES: ReadRequests.queues,
    Operation.TOPICS: ReadRequests.topics,
    Operation.QUERY_MESSAGE: ReadRequests.query_message,
    Operation.SCAN: ReadRequests.scan,
    Operation.STATS: ReadRequests.stats,
    Operation.HEALTH: ReadRequests.health,
}
READS = frozenset(HANDLERS)
"""Operations of `start`."""


def at_once(options: FrameOptions, payload: Payload = ()) -> Slices[Reply]:
    """Reply without further slices."""
    yield from ()
    return options, payload


def _records(batch: RecordPage) -> Reply:
    cursor = END if batch.complete else list(batch.cursor)
    return RecordsAnswer(batch.count, cursor, batch.complete), [part.data for part in batch.records]


def _message_limit(wanted: int) -> int:
    return min(max(wanted, 1), MESSAGES_MAX)


class GroupReads:
    """Read requests for consumer groups, in slices since a store may have many queues."""

    def __init__(self, context: RoleContext, reading: StoreQueries, groups: GroupCoordinator) -> None:
        self._clock = context.clock
        self._reading = reading
        self._groups = groups

    def start(self, operation: int, options: Any) -> Slices[Reply]:
        """Slices of one of GROUP_READS."""
        return self.groups(options) if operation == Operation.GROUPS else self.info(options)

    def groups(self, _options: Empty) -> Slices[Reply]:
        """All groups with their lag."""
        groups = self._groups
        rows = []
        # Counted over all groups: a store may have thousands with a few queues each.
        queues_read = 0
        members = groups.members()
        for group in sorted({*groups.state.settings.names(), *groups.state.progress.groups(), *members}):
            lag = retry_lag = 0
            topics = set()
            for topic, queue_id, _offset in self._queues_of(group):
                queues_read += 1
                if queues_read % QUEUES_PER_SLICE == 0:
                    yield
                topics.add(topic)
                queue_lag = self._lag(group, topic, queue_id)
                lag += queue_lag
                retry_lag += queue_lag if topic.startswith(RETRY_PREFIX) else 0
            count = len(members[group].members) if group in members else 0
            rows.append((group, count, len(topics), lag, retry_lag))
        return GroupsAnswer(rows), _NOTHING

    def info(self, options: GroupRequest) -> Slices[Reply]:
        """Settings, members and queues of a group."""
        groups, group = self._groups, options.group
        settings = groups.state.settings.of(group)
        members = groups.members().get(group)
        rows = []
        for number, (topic, queue_id, offset) in enumerate(self._queues_of(group)):
            if number % QUEUES_PER_SLICE == QUEUES_PER_SLICE - 1:
                yield
            holder = members.holder_of((topic, queue_id)) if members is not None else ""
            rows.append(self._row(topic, queue_id, offset, holder))
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
                max(0, now_ns - of.last_seen_ns) // 1_000_000,
                of.pid,
            )
            for member_id, of in sorted(members.members.items())
        ]

    def _queues_of(self, group: str) -> Iterator[tuple[str, int, int]]:
        """(topic, queue id, offset or UNKNOWN) of each queue with an offset or subscription."""
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
