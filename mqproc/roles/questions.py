"""What the query role can be asked beside pulls: each question's options become slices that end in the reply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mqproc.errors import BadRequestError
from mqproc.metrics.health import ready_problems
from mqproc.roles.loop import RoleContext
from mqproc.store.reads.log_scan import Conditions
from mqproc.store.reads.reading import StoreReading
from mqproc.store.slices import Batch, Slices
from mqproc.wire.operations import (
    ByKeyRequest,
    CountAnswer,
    CountRequest,
    Empty,
    GetRequest,
    HealthAnswer,
    OffsetAnswer,
    OffsetAtRequest,
    Operation,
    Options,
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

# The cursor of an answer that is complete.
END = [-1]

Payload = Sequence[memoryview]
Reply = tuple[Options, Payload]


class Questions:
    """The questions, over one store's reading and the group's control words."""

    def __init__(self, context: RoleContext, reading: StoreReading) -> None:
        self._context = context
        self._reading = reading
        self._max_bytes = context.options.max_pull_bytes

    def ask(self, operation: int, options: Any) -> Slices[Reply]:
        """The slices of one of QUESTIONS. They raise what the question is refused with."""
        return _QUESTIONS[operation](self, options)

    def ping(self, _options: Empty) -> Slices[Reply]:
        """An empty answer."""
        return at_once(Empty())

    def get(self, options: GetRequest) -> Slices[Reply]:
        """One record by either kind of id."""
        record = yield from self._reading.get(options.message_id, options.topic)
        return RecordsAnswer(1, END), (record.data,)

    def by_key(self, options: ByKeyRequest) -> Slices[Reply]:
        """Records by key or unique id, the newest; the cursor goes on with older ones.

        Raises BadRequestError for a number of them that one answer cannot have.
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
        """Records of a time."""
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
        """How many records a time has."""
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
        """Records by a pass over the log."""
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
        """A queue offset by time."""
        offset = self._reading.offset_at(options.topic, options.queue_id, options.time_ms, upper=options.upper)
        return at_once(OffsetAnswer(offset))

    def query_message(self, options: QueryMessageRequest) -> Slices[Reply]:
        """RocketMQ's own answer by key, with the records that are intact."""
        found = yield from self._reading.query_message(
            options.topic, options.key, options.max_messages, options.begin_ms, options.end_ms
        )
        look = self._reading.records.intact
        records = [record.data for offset in found.offsets if (record := look(offset)) is not None]
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
        """Every control word."""
        return at_once(StatsAnswer(self._context.control.snapshot()))

    def health(self, _options: Empty) -> Slices[Reply]:
        """Whether the group is ready, by the same rules as /readyz."""
        control = self._context.control
        problems = ready_problems(control, self._context.options.heartbeat_timeout_ms * 1_000_000)
        takes_nothing = control.read_only or control.damage_read_only
        return at_once(HealthAnswer(not problems, takes_nothing, control.dispatch_behind_bytes, problems))

    def _most_bytes(self, wanted: int) -> int:
        """Of records in an answer to who takes `wanted`."""
        return min(max(wanted, 1), self._max_bytes)


_QUESTIONS: dict[int, Callable[[Questions, Any], Slices[Reply]]] = {
    Operation.PING: Questions.ping,
    Operation.GET: Questions.get,
    Operation.BY_KEY: Questions.by_key,
    Operation.RANGE: Questions.range,
    Operation.COUNT: Questions.count,
    Operation.OFFSET_AT: Questions.offset_at,
    Operation.QUEUES: Questions.queues,
    Operation.TOPICS: Questions.topics,
    Operation.QUERY_MESSAGE: Questions.query_message,
    Operation.SCAN: Questions.scan,
    Operation.STATS: Questions.stats,
    Operation.HEALTH: Questions.health,
}
QUESTIONS = frozenset(_QUESTIONS)
"""What `ask` answers."""


def at_once(options: Options, payload: Payload = ()) -> Slices[Reply]:
    """A reply that needs no slice."""
    yield from ()
    return options, payload


def _records(batch: Batch) -> Reply:
    cursor = END if batch.complete else list(batch.cursor)
    return RecordsAnswer(batch.count, cursor, batch.complete), [part.data for part in batch.records]


def _message_limit(wanted: int) -> int:
    return min(max(wanted, 1), MESSAGES_MAX)
