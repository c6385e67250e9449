"""Read requests other than pulls: each becomes slices that end in the reply."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Generic, Self, TypeVar

import numpy as np

from mqproc.config import options as config
from mqproc.errors import BadRequestError, StoreBusyError
from mqproc.ipc.health import group_health
from mqproc.roles.groups.coordinator import GroupCoordinator
from mqproc.roles.request_limits import Payload, PendingRequest, Reply
from mqproc.roles.role import RoleContext
from mqproc.store.cooperative import RecordPage, Slices
from mqproc.store.read.queries import StoreQueries
from mqproc.store.read.records import Conditions
from mqproc.store.schedule.waiting_retries import WaitingRetries
from mqproc.topic_names import RETRY_PREFIX, retry_topic
from mqproc.wire.connection import ServerConnection
from mqproc.wire.operations import (
    ByKeyRequest,
    ByTagRequest,
    CountAnswer,
    CountRequest,
    Empty,
    FrameOptions,
    GetRequest,
    GroupInfoAnswer,
    GroupQueueRow,
    GroupRequest,
    GroupsAnswer,
    HealthAnswer,
    OffsetAnswer,
    OffsetAtRequest,
    Operation,
    QueryMessageAnswer,
    QueryMessageRequest,
    QueuesAnswer,
    QueuesRequest,
    RangeRequest,
    RecordsAnswer,
    ScanRequest,
    StatsAnswer,
    TopicsAnswer,
)

MESSAGES_MAX = 65_536

# Cursor of a complete answer.
END = [-1]
QUEUES_PER_SLICE: Final = 256
SLICE_BYTES: Final = 8 << 20
PARTS_MAX: Final = 1024
ROWS_PER_SLICE: Final = 4096
UNKNOWN: Final = -1


@dataclass(frozen=True, slots=True)
class ReadRequests:
    """Read requests for messages, queues, topics, consumer groups and the state of the roles.

    Those for consumer groups run in slices, since a store may have many queues.
    """

    context: RoleContext
    reading: StoreQueries
    coordinator: GroupCoordinator
    waiting: WaitingRetries

    def start(self, operation: int, options: Any) -> Slices[Reply]:
        """Slices of one of READS. They raise the error that refuses the request."""
        return HANDLERS[operation](self, options)

    def ping(self, _options: Empty) -> Slices[Reply]:
        return at_once(Empty())

    def get(self, options: GetRequest) -> Slices[Reply]:
        """One record by unique id or offset id."""
        record = yield from self.reading.get(options.message_id, options.topic)
        return RecordsAnswer(1, END), (record.data,)

    def by_key(self, options: ByKeyRequest) -> Slices[Reply]:
        """Newest records by key or unique id; the cursor continues with older records.

        Raises BadRequestError for an invalid `max_messages`.
        """
        _check_number(options.max_messages)
        batch = yield from self.reading.by_key(
            options.topic,
            options.key,
            options.begin_ms,
            options.end_ms,
            unique=options.unique,
            born_time=options.born_time,
            below=options.below,
            max_messages=options.max_messages,
            max_bytes=self._max_bytes(options.max_bytes),
        )
        return (yield from _records(batch))

    def by_tag(self, options: ByTagRequest) -> Slices[Reply]:
        """Newest records by tag, as `by_key`."""
        _check_number(options.max_messages)
        batch = yield from self.reading.by_tag(
            options.topic,
            options.tag,
            options.begin_ms,
            options.end_ms,
            born_time=options.born_time,
            below=options.below,
            max_messages=options.max_messages,
            max_bytes=self._max_bytes(options.max_bytes),
        )
        return (yield from _records(batch))

    def range(self, options: RangeRequest) -> Slices[Reply]:
        if options.cursor == END:
            return RecordsAnswer(0, END), ()
        batch = yield from self.reading.range(
            options.topic,
            options.begin_ms,
            options.end_ms,
            tags=options.tags,
            sql=options.sql,
            born_time=options.born_time,
            cursor=options.cursor,
            max_messages=_message_limit(options.max_messages),
            max_bytes=self._max_bytes(options.max_bytes),
        )
        return (yield from _records(batch))

    def count(self, options: CountRequest) -> Slices[Reply]:
        count = yield from self.reading.count(
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
        batch = yield from self.reading.scan(
            conditions,
            options.physical_offset,
            max_messages=_message_limit(options.max_messages),
            max_bytes=self._max_bytes(options.max_bytes),
            max_scan_bytes=options.max_scan_bytes,
        )
        return (yield from _records(batch))

    def offset_at(self, options: OffsetAtRequest) -> Slices[Reply]:
        offset = yield from self.reading.offset_at(
            options.topic, options.queue_id, options.time_ms, upper=options.upper
        )
        return OffsetAnswer(offset), ()

    def query_message(self, options: QueryMessageRequest) -> Slices[Reply]:
        """RocketMQ's query by key, with the intact records."""
        found = yield from self.reading.query_message(
            options.topic, options.key, options.max_messages, options.begin_ms, options.end_ms
        )
        records, size = [], 0
        for offset in found.offsets:
            record = self.reading.records.intact(offset)
            if record is None:
                continue
            records.append(record.data)
            size += len(record)
            if size >= SLICE_BYTES:
                size = 0
                yield
        answer = QueryMessageAnswer(found.offsets, found.last_update_timestamp_ms, found.last_update_physical_offset)
        return answer, records

    def queues(self, options: QueuesRequest) -> Slices[Reply]:
        infos = yield from self.reading.queue_infos(options.topic)
        if options.consumed:
            consumed = set(self.coordinator.state.consumed.ids(options.topic))
            infos = [info for info in infos if info.queue_id in consumed]
        rows: list[tuple[str, int, int, int]] = []
        for first in range(0, len(infos), ROWS_PER_SLICE):
            part = infos[first : first + ROWS_PER_SLICE]
            rows += [(info.topic, info.queue_id, info.min_offset, info.max_offset) for info in part]
            yield
        return QueuesAnswer(rows), ()

    def topics(self, _options: Empty) -> Slices[Reply]:
        infos = yield from self.reading.topic_infos()
        rows: list[tuple[str, int, int, int, dict[str, str], int, int]] = []
        for first in range(0, len(infos), ROWS_PER_SLICE):
            rows += [
                (each.topic, each.queues, each.perm, each.message_count, dict(each.attributes), *each.used_queues)
                for each in infos[first : first + ROWS_PER_SLICE]
            ]
            yield
        return TopicsAnswer(rows), ()

    def stats(self, _options: Empty) -> Slices[Reply]:
        return at_once(StatsAnswer(self.context.control.snapshot()))

    def health(self, _options: Empty) -> Slices[Reply]:
        """Readiness of the group, by the rules of /readyz."""
        control = self.context.control
        found = group_health(self.context.io, self.context.paths, control.snapshot(), self.context.options)
        takes_nothing = control.read_only or control.damage_read_only
        problems = [str(problem) for problem in found.problems]
        return at_once(HealthAnswer(found.ready, takes_nothing, control.dispatch_behind_bytes, problems))

    def group_list(self, _options: Empty) -> Slices[Reply]:
        """All groups with their lag."""
        rows = []
        # Counted over all groups: a store may have thousands with a few queues each.
        work = 0
        members, state = self.coordinator.members(), self.coordinator.state
        yield from self.waiting.update(self.reading)
        waiting = self.waiting.counts()
        for group in sorted({*state.settings.names(), *state.progress.groups(), *members}):
            lag = retry_lag = 0
            topics = set()
            work += 1
            for topic, queue_id, _offset in self.queues_of(group):
                work += 1
                if work >= QUEUES_PER_SLICE:
                    work = 0
                    yield
                topics.add(topic)
                queue_lag = self._lag(group, topic, queue_id)
                lag += queue_lag
                retry_lag += queue_lag if topic.startswith(RETRY_PREFIX) else 0
            if work >= QUEUES_PER_SLICE:
                work = 0
                yield
            count = len(members[group].members) if group in members else 0
            rows.append((group, count, len(topics), lag, retry_lag, waiting[retry_topic(group)]))
        return GroupsAnswer(rows), ()

    def group_info(self, options: GroupRequest) -> Slices[Reply]:
        """Settings, members and queues of a group."""
        group, state = options.group, self.coordinator.state
        settings = state.settings.of(group)
        members = self.coordinator.members().get(group)
        rows = []
        for number, (topic, queue_id, offset) in enumerate(self.queues_of(group)):
            if number % QUEUES_PER_SLICE == QUEUES_PER_SLICE - 1:
                yield
            holder = members.holder_of((topic, queue_id)) if members is not None else ""
            rows.append(self._row(topic, queue_id, offset, holder))
        yield from self.waiting.update(self.reading)
        known = state.settings.get(group) is not None or bool(rows) or members is not None
        answer = GroupInfoAnswer(
            group,
            known,
            members.generation if members is not None else 0,
            settings.retry_max_times,
            settings.retry_queue_nums,
            settings.consume_enable,
            self._members_of(group),
            rows,
            self.coordinator.filters.of_group(group),
            self.waiting.counts()[retry_topic(group)],
        )
        return answer, ()

    def _members_of(self, group: str) -> list[tuple[str, str, list[str], int, int, int, str]]:
        members = self.coordinator.members().get(group)
        if members is None:
            return []
        now_ns = self.context.clock.monotonic_ns()
        queues = members.queues_by_member()
        return [
            (
                member_id,
                of.name,
                list(of.topics),
                len(queues.get(member_id, ())),
                max(0, now_ns - of.last_seen_ns) // 1_000_000,
                of.pid,
                of.filter,
            )
            for member_id, of in sorted(members.members.items())
        ]

    def queues_of(self, group: str) -> Iterator[tuple[str, int, int]]:
        """(topic, queue id, offset or UNKNOWN) of each queue with an offset or subscription."""
        progress, consumed = self.coordinator.state.progress, self.coordinator.state.consumed
        members = self.coordinator.members().get(group)
        subscribed = members.topics if members is not None else []
        for topic in sorted({*progress.topics(group), *subscribed}):
            offsets = progress.offsets(group, topic)
            if not offsets and topic not in subscribed:
                continue
            for queue_id in sorted({*consumed.ids(topic), *offsets}):
                yield topic, queue_id, offsets.get(queue_id, UNKNOWN)

    def _lag(self, group: str, topic: str, queue_id: int) -> int:
        bounds = self.reading.queues.bounds(topic, queue_id)
        if bounds is None:
            return 0
        offset = self.coordinator.state.progress.offset(group, topic, queue_id)
        return bounds.max_offset - max(bounds.min_offset, offset or 0)

    def _row(self, topic: str, queue_id: int, offset: int, member_id: str) -> GroupQueueRow:
        bounds = self.reading.queues.bounds(topic, queue_id)
        if bounds is None:
            return topic, queue_id, offset, 0, 0, UNKNOWN, member_id
        time_ms = self.reading.store_time_ms(topic, queue_id, max(offset, bounds.min_offset))
        return topic, queue_id, offset, bounds.min_offset, bounds.max_offset, time_ms, member_id

    def _max_bytes(self, max_bytes: int) -> int:
        """Limit of record bytes in an answer."""
        return min(max(max_bytes, 1), self.context.options.max_pull_bytes)


HANDLERS: dict[int, Callable[[ReadRequests, Any], Slices[Reply]]] = {
    Operation.PING: ReadRequests.ping,
    Operation.GET: ReadRequests.get,
    Operation.BY_KEY: ReadRequests.by_key,
    Operation.BY_TAG: ReadRequests.by_tag,
    Operation.RANGE: ReadRequests.range,
    Operation.COUNT: ReadRequests.count,
    Operation.OFFSET_AT: ReadRequests.offset_at,
    Operation.QUEUES: ReadRequests.queues,
    Operation.TOPICS: ReadRequests.topics,
    Operation.QUERY_MESSAGE: ReadRequests.query_message,
    Operation.SCAN: ReadRequests.scan,
    Operation.STATS: ReadRequests.stats,
    Operation.HEALTH: ReadRequests.health,
    Operation.GROUPS: ReadRequests.group_list,
    Operation.GROUP_INFO: ReadRequests.group_info,
}
READS = frozenset(HANDLERS)
"""Operations of `start`."""


def at_once(options: FrameOptions, payload: Payload = ()) -> Slices[Reply]:
    """Reply without further slices."""
    yield from ()
    return options, payload


def _records(batch: RecordPage) -> Slices[Reply]:
    """Answer of a page. Thousands of parts are joined, since they would take long to send."""
    cursor = END if batch.complete else list(batch.cursor)
    parts = batch.records
    if len(parts) > PARTS_MAX:
        joined = []
        for first in range(0, len(parts), PARTS_MAX):
            joined.append(np.concatenate(parts[first : first + PARTS_MAX]))
            yield
        parts = joined
    return RecordsAnswer(batch.count, cursor, batch.complete), [part.data for part in parts]


def _check_number(max_messages: int) -> None:
    if not 1 <= max_messages <= MESSAGES_MAX:
        raise BadRequestError(f"max_messages = {max_messages:,} is out of range: from 1 to {MESSAGES_MAX:,}")


def _message_limit(max_messages: int) -> int:
    return min(max(max_messages, 1), MESSAGES_MAX)


# Admission of long read requests: a limited number per client, others wait
#
# A partial result stays in memory until the answer is complete: a client that sends a thousand such requests must not
# have a thousand partial answers. Most requests end with their first slice, which does not wait; other clients and
# operations are not affected.


LIMITED_OPERATIONS: Final = frozenset({Operation.BY_KEY, Operation.BY_TAG, Operation.RANGE, Operation.SCAN})
WAITING_MAX: Final = 4096
"""Waiting requests of one client; further requests are refused with STORE_BUSY."""
_HINT_MS: Final = 100
T = TypeVar("T", bound=PendingRequest)


@dataclass(slots=True)
class Job(Generic[T]):
    """A read request under way; `counted` is set by ReadAdmission."""

    request: T
    slices: Slices[Reply] | Slices[Reply | None]
    counted: bool = False


class ReadAdmission(Generic[T]):
    """Number of requests under way per client, and those that wait for one of them to end."""

    def __init__(self, limit: int) -> None:
        """`limit` is the number of requests of a client at once."""
        self.limit = limit
        self._under_way: Counter[ServerConnection] = Counter()
        self._waiting: dict[ServerConnection, deque[T]] = {}

    @classmethod
    def by(cls, options: config.Options) -> Self:
        """Limit from the options: as many complete answers as may be queued for a client."""
        return cls(max(1, options.client_output_bytes // options.max_pull_bytes))

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def is_waiting(self, request: T) -> bool:
        """Whether a request that was just started waits and will be started again."""
        waiting = self._waiting.get(request.connection)
        return waiting is not None and waiting[-1] is request

    def admit(self, job: Job[T]) -> bool:
        """Whether a request that did not end with its first slice may continue now.

        Otherwise its partial result is dropped and it waits until `finish` returns it, to be started again. Raises
        StoreBusyError.
        """
        connection = job.request.connection
        if job.counted or job.request.operation not in LIMITED_OPERATIONS:
            return True
        if self._under_way[connection] < self.limit:
            self._under_way[connection] += 1
            job.counted = True
            return True
        job.slices.close()
        waiting = self._waiting.setdefault(connection, deque())
        if len(waiting) >= WAITING_MAX:
            raise StoreBusyError(f"{WAITING_MAX:,} requests of this client wait already", hint_ms=_HINT_MS)
        waiting.append(job.request)
        return False

    def finish(self, job: Job[T]) -> T | None:
        """Note that a request has ended; returns the client's next waiting one if it may start."""
        connection = job.request.connection
        if job.counted and connection in self._under_way:
            self._under_way[connection] -= 1
            if not self._under_way[connection]:
                del self._under_way[connection]
        elif job.request.operation not in LIMITED_OPERATIONS or self._under_way[connection] >= self.limit:
            # Below the limit, this request itself had waited and ended with its first slice, as when its topic is
            # gone: other requests may wait after it.
            return None
        waiting = self._waiting.get(connection)
        if waiting is None:
            return None
        next_request = waiting.popleft()
        if not waiting:
            del self._waiting[connection]
        return next_request

    def drop(self, connection: ServerConnection) -> None:
        """Forget a closed connection."""
        self._under_way.pop(connection, None)
        self._waiting.pop(connection, None)
