"""Clients of a simulated group: producers and consumers of every kind, and their checks.

Producers: senders, transactional producers, Spark's sink. Consumers: pulling consumers, group members, simple
consumers.

The outcome of a transaction is decided when it begins, as by a database. A committed message is delivered once and a
rolled-back one never, by whichever way the transaction ends.
"""

from __future__ import annotations

import enum
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from mqproc.client import group_requests as group_calls
from mqproc.client import message_fields as unique_id
from mqproc.client import requests as core
from mqproc.client import send_requests as sending
from mqproc.client import transaction_requests as transaction_calls
from mqproc.client.connection import CallOutcome, Connection
from mqproc.client.dispatch_barrier import Patience
from mqproc.client.requests import TIMEOUT_S, Call
from mqproc.client.retry import Attempts, ConnectionLost, RetryPolicy
from mqproc.client.transaction_requests import Handle
from mqproc.errors import (
    MqprocError,
    NotAMemberError,
    StaleOffsetError,
    StoreReadOnlyError,
    TransactionNotFoundError,
    TransactionOverdueError,
)
from mqproc.io.store_io import StoreIO
from mqproc.ipc.control import Control
from mqproc.layout import control as words_of
from mqproc.layout import properties
from mqproc.layout.properties import java_hash
from mqproc.paths import StorePaths
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.offsets import pop_receipts as check_points
from mqproc.store.offsets.offset_store import committed_offsets
from mqproc.store.offsets.pop_receipts import PopAck, PopCheckPoint
from mqproc.store.schedule.delivery_marks import mark_of
from mqproc.store.transactions import decode_op_body
from mqproc.topic_names import (
    CHECK_MAX_TIME_TOPIC,
    DEAD_LETTER_PREFIX,
    HALF_TOPIC,
    OP_HALF_TOPIC,
    RETRY_PREFIX,
    REVIVE_GROUP,
    REVIVE_TOPIC,
    SCHEDULE_TOPIC,
    TIMER_TOPIC,
    pop_retry_topic,
)
from mqproc.types import Message, PullResult, PullStatus, SendResult, StoredMessage
from mqproc.util.units import DELAY_LEVELS, DELAYS_MS
from mqproc.wire.operations import EARLIEST, GroupAssignment, GroupJoinRequest, GroupReceiveRequest
from tests.crash.disk import Broken, Placed, expect
from tests.crash.group import Caller, Schedule, SimulatedClock, connect, tries

if TYPE_CHECKING:
    import pyarrow as pa

# Records written by the group itself: delivered, committed and redelivered copies, and internal records.


WAITING_TOPICS = (SCHEDULE_TOPIC, TIMER_TOPIC)
PARKED_TOPICS = (*WAITING_TOPICS, HALF_TOPIC, CHECK_MAX_TIME_TOPIC)
# Internal records of the query role: ended transactions, and receives by simple consumers.
NOTE_TOPICS = (OP_HALF_TOPIC, REVIVE_TOPIC)
OF_GROUPS = (RETRY_PREFIX, DEAD_LETTER_PREFIX)


def tags_code(message: StoredMessage) -> int:
    """The tags code of a record's unit: the hash of its tag, or its delivery time."""
    if message.topic == SCHEDULE_TOPIC:
        return message.store_timestamp_ms + DELAYS_MS[message.queue_id]
    return java_hash(message.tag) if message.tag else 0


def goes_to(message: StoredMessage) -> str:
    """The topic that a message is for: its own, or its target after a delay or a commit."""
    return message.properties.get(properties.REAL_TOPIC, "") if message.topic in PARKED_TOPICS else message.topic


def is_for_group(message: StoredMessage, group: str) -> bool:
    """Whether a message is a retry or a dead letter of a group."""
    topic, again = goes_to(message), RETRY_PREFIX + group
    return topic in (again, DEAD_LETTER_PREFIX + group) or topic.startswith(f"{again}_")


def is_note(placed: Placed) -> bool:
    """Whether a record is internal and not a message."""
    return placed.message.topic in NOTE_TOPICS


def is_copy(placed: Placed) -> bool:
    """Whether the record was written by the group and not sent."""
    message = placed.message
    return goes_to(message).startswith(OF_GROUPS) or message.prepared_transaction_offset > 0


def sent_of(placed: Placed, senders: Senders) -> Sent:
    """The message of a record or copy; raises Broken if it was never sent."""
    return senders.sent[senders.number_of(placed.message)]


def originals(records: Sequence[Placed], senders: Senders) -> list[tuple[int, Placed]]:
    """(number, record) of each sent record, in log order."""
    found = ((sent_of(placed, senders), placed) for placed in records if not is_note(placed))
    return [(sent.number, placed) for sent, placed in found if not is_copy(placed)]


def check_copies(records: Sequence[Placed], senders: Senders, gone: set[int]) -> None:
    """Check that each delayed message is delivered to its topic once, and no lost one.

    The same holds for half messages: each has one copy, and the copy the next one.
    """
    made: Counter[int] = Counter()
    for placed in records:
        if is_note(placed) or not is_copy(placed):
            continue
        sent, message = sent_of(placed, senders), placed.message
        expect(sent.number not in gone, f"message {sent.number} was gone, but there is a copy at {placed.offset}")
        if goes_to(message).startswith(OF_GROUPS):
            continue
        expect(
            goes_to(message) == sent.topic, f"message {sent.number} for {sent.topic} was delivered to {message.topic}"
        )
        source = message.prepared_transaction_offset
        made[source] += 1
        expect(made[source] == 1, f"message {sent.number}, parked at {source}, is delivered twice")
        expect(source < placed.offset, f"message {sent.number} at {placed.offset} is made from {source}")


def undelivered(records: Sequence[Placed]) -> list[int]:
    """Offsets of records that are not delivered yet."""
    made = {placed.message.prepared_transaction_offset for placed in records if is_copy(placed)}
    return [
        placed.offset
        for placed in records
        if placed.message.topic in WAITING_TOPICS and mark_of(placed.offset) not in made
    ]


# Senders: they send messages with numbered bodies and remember each outcome.


TOPICS = ("Alpha", "Beta", "Gamma-with-a-longer-name")
NUMBER_DIGITS = 10
# Every n-th message has its own properties, which need another frame format.
PROPERTIES_EACH = 4
IN_FLIGHT_MAX = 3


class Fate(enum.Enum):
    """The outcome that a sender was given."""

    SENT = "no answer yet"
    STORED = "stored"
    REFUSED = "refused"
    UNKNOWN = "outcome unknown"


@dataclass(slots=True)
class Sent:
    """A message and the outcome known to its sender."""

    number: int
    topic: str
    body: bytes
    key: str
    tag: str
    delay_level: int = 0
    deliver_at_ms: int = 0
    fate: Fate = Fate.SENT
    physical_offset: int = -1
    queue_id: int = -1
    queue_offset: int = -1
    waited: bool = True
    """The sender waited for the sync, if the store syncs."""

    @property
    def waits(self) -> bool:
        """Whether it is stored twice: when sent, and when delivered."""
        return bool(self.delay_level or self.deliver_at_ms)


class SimulatedIds(unique_id.UniqueIds):
    """Unique ids that are the same in every run."""

    def __init__(self, frames: int = 0) -> None:
        """Start after the ids of `frames` frames."""
        super().__init__()
        self.frames = frames

    def reserve(self, count: int) -> tuple[str, int]:
        self.frames += 1
        return f"{self.frames:0{unique_id.PREFIX_CHARACTERS}X}", 0


class Senders:
    """All messages ever sent to a store, over all its lives."""

    def __init__(self, rng: random.Random, *, delays: bool = False, properties: bool = False) -> None:
        """With `delays`, some messages are delayed; with `properties`, some have properties."""
        self._rng = rng
        self._delays = delays
        self._properties = properties
        self.sent: list[Sent] = []
        self.time_ms = 0
        """Born timestamp of new messages."""

    def make(self, count: int, *, at_once: bool = False, topics: Sequence[str] = TOPICS) -> list[Sent]:
        """New messages for one topic; with `at_once`, not delayed."""
        topic, wait = self._rng.choice(topics), self._rng.random() < 0.8
        level, deliver_at_ms = (0, 0) if at_once else self._delay()
        made = []
        for _ in range(count):
            number = len(self.sent)
            body = b"%0*d" % (NUMBER_DIGITS, number) + b"." * self._rng.choice((0, 10, 100, 900))
            tag = self._rng.choice(("", "red", "green"))
            message = Sent(number, topic, body, f"key{number}", tag, level, deliver_at_ms, waited=wait)
            self.sent.append(message)
            made.append(message)
        return made

    def _delay(self) -> tuple[int, int]:
        """A delay level, a delivery time, or neither."""
        if not self._delays or self._rng.random() < 0.6:
            return 0, 0
        if self._rng.random() < 0.7:
            return self._rng.choice((1, 1, 2, 3, self._rng.randint(1, DELAY_LEVELS))), 0
        return 0, self.time_ms + self._rng.choice((10, 500, 3_000, 200_000))

    def of_body(self, body: bytes) -> Sent | None:
        """The message with a body; None if it was never sent."""
        digits = body[:NUMBER_DIGITS]
        if not digits.isdigit() or int(digits) >= len(self.sent):
            return None
        sent = self.sent[int(digits)]
        return sent if sent.body == body else None

    def number_of(self, message: StoredMessage) -> int:
        """The number of a received message; raises Broken if it was never sent."""
        sent = self.of_body(message.body)
        if sent is None:
            where = f"{message.topic} {message.queue_id} {message.queue_offset}"
            raise Broken(f"the message at {where} was never sent: {message.body[:40]!r}")
        return sent.number

    def run(self, paths: StorePaths, schedule: Schedule, frames: int) -> None:
        """Life of a sender: a task of the schedule."""
        connection: Connection | None = None
        flying: dict[int, list[Sent]] = {}
        try:
            while frames or flying:
                if connection is None or connection.closed:
                    connection = connect(paths.socket("writer"))
                if connection is not None:
                    if frames and len(flying) < IN_FLIGHT_MAX and self._rng.random() < 0.6:
                        frames -= 1
                        self._send(connection, flying)
                    connection.flush()
                    connection.receive()
                    self._receive(connection, flying)
                schedule.pause()
        finally:
            if connection is not None:
                connection.close()

    def _send(self, connection: Connection, flying: dict[int, list[Sent]]) -> None:
        group = self.make(self._rng.choice((1, 1, 2, 5, 20)))
        call = sending.send_group([self.message_of(one) for one in group], wait=group[0].waited)
        flying[connection.submit(call)] = group

    def _receive(self, connection: Connection, flying: dict[int, list[Sent]]) -> None:
        for request_id in list(flying):
            outcome = connection.done.pop(request_id, None)
            if outcome is not None:
                self.settle(flying.pop(request_id), outcome, outcome.value)

    def message_of(self, sent: Sent) -> Message:
        """The message as given to the client."""
        return Message(
            sent.topic,
            sent.body,
            sent.tag,
            (sent.key,),
            {"property": "value"} if self._properties and sent.number % PROPERTIES_EACH == 0 else {},
            born_timestamp_ms=self.time_ms,
            delay_level=sent.delay_level,
            deliver_at_ms=sent.deliver_at_ms,
        )

    def settle(self, group: Sequence[Sent], outcome: CallOutcome, results: Sequence[SendResult]) -> None:
        """Remember the outcome of some messages."""
        error = outcome.error
        if error is None:
            for one, result in zip(group, results, strict=True):
                one.fate = Fate.STORED
                one.physical_offset = result.physical_offset
                one.queue_id, one.queue_offset = result.queue_id, result.queue_offset
            return
        unknown = error.taken if isinstance(error, ConnectionLost) else _may_be_stored(error)
        for one in group:
            one.fate = Fate.UNKNOWN if unknown else Fate.REFUSED


def _may_be_stored(error: MqprocError) -> bool:
    return error.code in ("FLUSH_FAILED", "INTERNAL", "SEND_OUTCOME_UNKNOWN")


# Shared by all clients of a story, and by clients of consumer groups.


Queue = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Found:
    """Contents of a store: the records of its log, and the committed offsets."""

    records: Sequence[Placed]
    progress: Mapping[str, Mapping[Queue, int]]
    """By group."""
    sync_flush: bool
    minima: Mapping[Queue, int]
    """First offset of each queue: in a topic that was deleted and created again, it follows the deleted messages."""
    minimum: int = 0
    """Retention was to delete the log below this and has corrected committed offsets; part of it may still exist."""

    def of_group(self, group: str) -> Mapping[Queue, int]:
        return self.progress.get(group, {})


def found_in(paths: StorePaths, records: Sequence[Placed], *, sync_flush: bool, minimum: int = 0) -> Found:
    """Contents of the store at `paths` whose log has these `records`."""
    progress: dict[str, dict[Queue, int]] = {}
    for at in committed_offsets(StoreIO(), paths):
        progress.setdefault(at.group, {})[at.topic, at.queue_id] = at.offset
    table = QueueTable(StoreIO(), paths.queues)
    try:
        minima = {(topic, queue_id): table.min_offset(number) for number, topic, queue_id in table.live()}
    finally:
        table.close()
    return Found(records, progress, sync_flush, minima, minimum)


class Party(Protocol):
    """Clients of one kind over all lives of a store, and the outcomes they were given."""

    patient: bool
    """In a last life without faults, nothing is left undone."""

    def run(self, paths: StorePaths, schedule: Schedule, clock: SimulatedClock) -> None:
        """Life of one client: a task of the schedule."""

    def forget(self, topic: str) -> None:
        """A topic is deleted."""

    def resume(self, found: Found, *, power_loss: bool) -> None:
        """Prepare for the next life, which begins with `found`."""

    def check(self, found: Found, *, power_loss: bool) -> None:
        """Raise Broken unless the outcomes hold."""

    def left(self, found: Found) -> int:
        """Amount of work left."""


@dataclass(slots=True)
class Commits:
    """Commits of one group as answered to its consumers."""

    group: str
    committed: dict[Queue, int] = field(default_factory=dict)
    """Answered commits; a power loss may lose them."""
    asked: dict[Queue, int] = field(default_factory=dict)
    """The highest offset ever requested."""
    deleted: set[str] = field(default_factory=set)

    def ask(self, queue: Queue, end: int) -> None:
        """A commit was requested."""
        self.asked[queue] = max(self.asked.get(queue, 0), end)

    def answered(self, queue: Queue, end: int) -> None:
        """The commit was answered."""
        if queue[0] not in self.deleted:
            self.committed[queue] = max(self.committed.get(queue, 0), end)

    def forget(self, topic: str) -> None:
        """A topic is deleted, with its committed offsets, now or when the writer processes it."""
        self.deleted.add(topic)
        for queue in [queue for queue in self.committed if queue[0] == topic]:
            del self.committed[queue]

    def resume(self, *, power_loss: bool) -> None:
        """The next life begins; a power loss may have lost answered commits."""
        if power_loss:
            self.committed.clear()

    def check(self, found: Found, *, power_loss: bool) -> None:
        """Check that no commit is lost or invented."""
        progress = found.of_group(self.group)
        for queue, offset in progress.items():
            if queue[0] in self.deleted:
                continue  # Raised to the queue's end, if the crash came before the deletion.
            asked = self.asked.get(queue, 0)
            raised_to = max(_minimum(queue, found), found.minima.get(queue, 0))
            expect(offset <= max(asked, raised_to), f"{queue}: {offset} is beyond the requested {asked}")
        for queue, offset in {} if power_loss else self.committed.items():
            expect(
                progress.get(queue, 0) >= offset,
                f"{queue}: {progress.get(queue)} is below the answered commit {offset}",
            )


def _minimum(queue: Queue, found: Found) -> int:
    """First offset of a queue after retention: committed offsets are raised to it."""
    offsets = (offset for offset, placed in in_queue(queue, found) if placed.offset >= found.minimum)
    return min(offsets, default=1 << 62)


def in_queue(queue: Queue, found: Found) -> list[tuple[int, Placed]]:
    """(queue offset, record) of the records of a queue."""
    return [
        (placed.message.queue_offset, placed)
        for placed in found.records
        if (placed.message.topic, placed.message.queue_id) == queue
    ]


PRODUCERS_GROUP = "producers"
TRANSACTIONS_MAX = 15
COMMIT_CHANCE = 0.6


@dataclass(slots=True)
class Producers:
    """Outcomes of one group's transactional producers, over all lives of a store."""

    rng: random.Random
    senders: Senders
    patient: bool = False
    decided: dict[int, bool] = field(default_factory=dict)
    """Whether the transaction commits, by number."""
    ended: set[int] = field(default_factory=set)
    """Answered ends; a power loss may lose them."""
    _asked: dict[int, int] = field(default_factory=dict)
    """The log's end at the first request to end the transaction, by number: copies come after it."""

    def run(self, paths: StorePaths, schedule: Schedule, clock: SimulatedClock) -> None:
        writer, query = Caller(paths.socket("writer"), schedule), Caller(paths.socket("query"), schedule)
        left = self.rng.randint(1, TRANSACTIONS_MAX)
        begun: list[tuple[int, Handle]] = []
        try:
            while True:
                schedule.pause()
                chance = self.rng.random()
                if left and chance < 0.3 and not self.patient:
                    left -= 1
                    begun += self._begin(writer, commit=self.rng.random() < COMMIT_CHANCE)
                elif begun and chance < 0.5:
                    number, handle = begun.pop(self.rng.randrange(len(begun)))
                    if self.rng.random() < 0.7:
                        self._end(paths, query, number, handle)
                else:
                    self._be_asked(paths, query)
        finally:
            writer.close()
            query.close()

    def run_once(self, paths: StorePaths, schedule: Schedule) -> None:
        """A short life: one committed and one rolled-back transaction."""
        writer, query = Caller(paths.socket("writer"), schedule), Caller(paths.socket("query"), schedule)
        try:
            for commit in (True, False):
                for number, handle in self._begin(writer, commit=commit):
                    for _ in tries(schedule):
                        error = self._end(paths, query, number, handle)
                        if isinstance(error, TransactionOverdueError):
                            self._be_asked(paths, query)
                        if number in self.ended or isinstance(error, StoreReadOnlyError):
                            break
        finally:
            writer.close()
            query.close()

    def _begin(self, writer: Caller, *, commit: bool) -> list[tuple[int, Handle]]:
        (sent,) = self.senders.make(1, at_once=True)
        self.decided[sent.number] = commit
        half = transaction_calls.half_message(
            PRODUCERS_GROUP, self.senders.message_of(sent), self.rng.choice((None, None, 2))
        )
        outcome = writer.call(transaction_calls.send_half(half, wait=sent.waited))
        self.senders.settle([sent], outcome, [outcome.value])
        if sent.fate is not Fate.STORED:
            return []
        return [(sent.number, transaction_calls.handle_of_sent(half, outcome.value))]

    def _end(
        self, paths: StorePaths, query: Caller, number: int, handle: Handle, *, from_check: bool = False
    ) -> MqprocError | ConnectionLost | None:
        call = transaction_calls.end(handle, commit=self.decided[number], from_check=from_check)
        self._asked.setdefault(number, _log_end(paths))
        error = query.call(call).error
        expect(not isinstance(error, TransactionNotFoundError), f"transaction {number} is unknown: {error}")
        if error is None:
            self.ended.add(number)
        return error

    def _be_asked(self, paths: StorePaths, query: Caller) -> None:
        outcome = query.call(transaction_calls.poll(PRODUCERS_GROUP, self.rng.choice((0.0, 0.0, 0.3))))
        for message in outcome.value if outcome.error is None else ():
            number = self.senders.number_of(message)
            expect(number in self.decided, f"no transaction was begun with message {number}")
            if self.patient or self.rng.random() < 0.8:
                self._end(
                    paths, query, number, transaction_calls.handle_of_asked(PRODUCERS_GROUP, message), from_check=True
                )

    # Invariants

    def forget(self, topic: str) -> None:
        """Ignored: transactions do not check whether their topic exists."""

    def resume(self, found: Found, *, power_loss: bool) -> None:
        if power_loss and not found.sync_flush:
            self.ended.clear()
        end = max((placed.offset + placed.size for placed in found.records), default=0)
        self._asked = {number: min(begin, end) for number, begin in self._asked.items()}

    def check(self, found: Found, *, power_loss: bool) -> None:
        """Check: committed once, rolled back never, no half message marked before its copy."""
        delivered = Counter(
            sent_of(placed, self.senders).number for placed in found.records if self._is_committed(placed)
        )
        wrong = [number for number in delivered if not self.decided[number]]
        expect(not wrong, f"messages {wrong[:5]} are delivered, though their transactions were rolled back")
        twice = [number for number, count in delivered.items() if count > 1]
        expect(not twice, f"messages {twice[:5]} were committed twice")
        if not power_loss or found.sync_flush:
            begin = min((placed.offset for placed in found.records), default=0)
            # Retention may have deleted messages below the log's first offset.
            there = [number for number in sorted(self.ended) if begin <= self._asked[number] and self.decided[number]]
            gone = [number for number in there if number not in delivered]
            expect(not gone, f"messages {gone[:5]} were committed and are missing")
        made = {placed.message.prepared_transaction_offset for placed in found.records if is_copy(placed)}
        marked = _marked(found)
        for placed in _halves(found):
            number = sent_of(placed, self.senders).number
            if placed.message.queue_offset in marked and self.decided[number]:
                expect(mark_of(placed.offset) in made, f"half message {number} is marked without a copy")

    def _is_committed(self, placed: Placed) -> bool:
        """Whether a record is the committed message of a transaction."""
        if placed.message.topic in (HALF_TOPIC, CHECK_MAX_TIME_TOPIC) or not is_copy(placed):
            return False
        sent = sent_of(placed, self.senders)
        return sent.number in self.decided and placed.message.topic == sent.topic

    def left(self, found: Found) -> int:
        """Half messages without a mark; the coordinator may not know those that retention was to delete."""
        marked = _marked(found)
        return sum(
            placed.offset >= found.minimum and placed.message.queue_offset not in marked for placed in _halves(found)
        )


def _log_end(paths: StorePaths) -> int:
    """Copies of ends requested from now on come after it."""
    control = Control.open(StoreIO(), paths)
    try:
        return control.load(words_of.WRITTEN)
    finally:
        control.close()


def _halves(found: Found) -> list[Placed]:
    return [placed for placed in found.records if placed.message.topic == HALF_TOPIC]


def _marked(found: Found) -> set[int]:
    """Queue offsets of marked half messages."""
    return {
        offset
        for placed in found.records
        if placed.message.topic == OP_HALF_TOPIC
        for offset in decode_op_body(placed.message.body)
    }


# Tasks of Spark's sink: they send the rows of micro-batches, are killed, and are retried.
#
# A micro-batch is complete when one of its tasks succeeds; until then its rows are sent again, after the last stored
# one. A late task of a complete micro-batch finds all rows stored. Tasks take turns, as the sink's tasks do by a lock.


TOPIC: Final = "Sink"
QUEUE: Final = 0
ROWS_MAX = 24
ROWS_PER_BATCH_MAX = 10
CALLS_UNTIL_KILL_MAX = 25
KILL_CHANCE = 0.4
# After a few answered calls of a new connection, the server has also read the dead task's connection.
PATIENT_PINGS = 3


class TaskKilled(Exception):
    """The task's process was killed."""


class _Client:
    """The calls of a task, as by a real client; killed in the call of this number, 0 = never."""

    def __init__(self, paths: StorePaths, schedule: Schedule, clock: SimulatedClock, calls_until_kill: int) -> None:
        self._callers = {role: Caller(paths.socket(role), schedule) for role in ("writer", "query")}
        self._clock = clock
        self._left = calls_until_kill

    def run(self, call: Call[Any]) -> Any:
        self._left -= 1
        if not self._left:
            self._callers[call.role].leave(call)
            raise TaskKilled
        policy, deadline = RetryPolicy(jitter=0.0), self._now_s() + TIMEOUT_S
        attempts = Attempts(policy, deadline, repeatable=call.repeatable, is_send=call.is_send)
        while True:
            outcome = self._callers[call.role].call(call)
            if outcome.error is None:
                return outcome.value
            assert isinstance(outcome.error, MqprocError | ConnectionLost)
            self._clock.sleep(attempts.pause_after(outcome.error, self._now_s()))

    def _now_s(self) -> float:
        return self._clock.monotonic_ns() / 1e9

    def close(self) -> None:
        for caller in self._callers.values():
            caller.close()


@dataclass(slots=True)
class Sinks:
    """Outcomes of one query's tasks, over all lives of a store."""

    rng: random.Random
    senders: Senders
    patient: bool = False
    epoch: int = 0
    rows: list[Sent] = field(default_factory=list)
    """Rows of the current micro-batch."""
    ended: set[int] = field(default_factory=set)
    """Rows of complete micro-batches, by number; a power loss may lose them."""
    tasks: int = 0
    found: int = 0
    """Rows that an earlier task had stored."""
    _has_turn: bool = False

    def run(self, paths: StorePaths, schedule: Schedule, clock: SimulatedClock) -> None:
        while self.rows or not self.patient:
            self.rows = self.rows or self.senders.make(self.rng.randint(1, ROWS_MAX), at_once=True, topics=(TOPIC,))
            epoch, rows = self.epoch, self.rows
            while self._has_turn:
                schedule.pause()
            self._has_turn = True
            try:
                self._send(epoch, rows, paths, schedule, clock)
            except (MqprocError, TaskKilled):
                schedule.pause()
            finally:
                self._has_turn = False

    def _send(self, epoch: int, rows: list[Sent], paths: StorePaths, schedule: Schedule, clock: SimulatedClock) -> None:
        """Run one task. Its micro-batch may be complete when its turn comes."""
        # Imported here so that bugs can be planted first, and Arrow is only needed by these stories.
        from mqproc.spark.sink import TopicRows

        may_live = self.patient or self.rng.random() > KILL_CHANCE
        client = _Client(paths, schedule, clock, 0 if may_live else self.rng.randint(1, CALLS_UNTIL_KILL_MAX))
        self.tasks += 1
        try:
            task = TopicRows(client, TOPIC, f"query\0{epoch}\0{QUEUE}", QUEUE, Patience(clock, PATIENT_PINGS))
            task.find_stored()
            at = 0
            while at < len(rows):
                stop = min(len(rows), at + self.rng.randint(1, ROWS_PER_BATCH_MAX))
                task.send(_columns(rows[at:stop], clock), stop - at)
                at = stop
            task.end()
        finally:
            client.close()
        self.found += task.found
        if epoch < self.epoch:
            expect(
                task.found == len(rows), f"only {task.found} of {len(rows)} rows of a complete micro-batch were found"
            )
            return
        self.ended |= {row.number for row in rows}
        self.epoch, self.rows = epoch + 1, []

    # Invariants

    def forget(self, topic: str) -> None:
        """Ignored: no other client uses its topic."""

    def check(self, found: Found, *, power_loss: bool) -> None:
        """Check that complete micro-batches are stored, and a prefix of the current one."""
        there = _numbers(found, self.senders)
        if not power_loss or found.sync_flush:
            gone = sorted(self.ended - set(there))
            expect(not gone, f"rows {gone[:5]} were stored and are missing")
        under_way = [row.number for row in self.rows]
        stored = [number for number in there if number in set(under_way)]
        expect(stored == under_way[: len(stored)], f"rows {stored} are no prefix of {under_way}")

    def resume(self, found: Found, *, power_loss: bool) -> None:
        """Send rows lost by a power loss again, with new bodies: the lost ones must not reappear."""
        if not power_loss:
            return
        if not found.sync_flush:
            self.ended.clear()
        there = set(_numbers(found, self.senders))
        again = [row for row in self.rows if row.number not in there]
        kept = self.rows[: len(self.rows) - len(again)]
        self.rows = kept + (self.senders.make(len(again), at_once=True, topics=(TOPIC,)) if again else [])

    def left(self, found: Found) -> int:
        """Rows of an incomplete micro-batch."""
        return len(self.rows)


def _numbers(found: Found, senders: Senders) -> list[int]:
    """Numbers of all rows in the log, in order."""
    return [senders.number_of(placed.message) for placed in found.records if _is_row(placed)]


def _is_row(placed: Placed) -> bool:
    return placed.message.topic == TOPIC


def _columns(rows: Sequence[Sent], clock: SimulatedClock) -> dict[str, pa.Array]:
    import pyarrow as pa

    return {
        "body": pa.array([row.body for row in rows], pa.binary()),
        "keys": pa.array([row.key for row in rows]),
        "tag": pa.array([row.tag for row in rows]),
        "born_timestamp": pa.array([clock.time_ms() * 1000] * len(rows), pa.timestamp("us", "UTC")),
    }


# Consumers: pulling, members, simple consumers; deletion of topics.
#
# A message that was not consumed is nacked before the committed offset passes it, as by every client. So each message
# below the committed offset was consumed, or has a copy in the retry topic or the dead-letter queue.


CONSUMERS_GROUP = "workers"
RETRIES_MAX = 2
MESSAGES_PER_PULL = 5
PULL_BYTES = 1 << 20
NACK_CHANCE = 0.3


@dataclass(slots=True)
class Consumers:
    """Outcomes of one group's consumers, over all lives of a store."""

    rng: random.Random
    senders: Senders
    queues: int
    patient: bool = False
    commits: Commits = field(default_factory=lambda: Commits(CONSUMERS_GROUP))
    nacked: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    """The place of each message whose nack was answered, by number."""

    def run(self, paths: StorePaths, schedule: Schedule, clock: SimulatedClock) -> None:
        caller = Caller(paths.socket("query"), schedule)
        positions: dict[Queue, int] = {}
        try:
            while caller.call(group_calls.change(CONSUMERS_GROUP, RETRIES_MAX, 1, None)).error is not None:
                schedule.pause()
            while True:
                topic = self.rng.choice((*TOPICS, RETRY_PREFIX + CONSUMERS_GROUP))
                queue = topic, self.rng.randrange(self.queues)
                self._consume(caller, queue, positions)
                schedule.pause()
        finally:
            caller.close()

    def _consume(self, caller: Caller, queue: Queue, positions: dict[Queue, int]) -> None:
        if queue not in positions and not self._ask_for_progress(caller, queue, positions):
            return
        pulled = pull(caller, queue, positions[queue])
        if pulled is None:
            return
        if pulled.status is not PullStatus.FOUND:
            # Retention moves a queue's first offset; in an empty queue the same offset is pulled again.
            positions[queue] = max(positions[queue], pulled.next_offset if pulled.min_offset > positions[queue] else 0)
            return
        end = self._end_of_consumed(caller, queue, pulled)
        if end > positions[queue]:
            self._commit(caller, queue, end, positions)

    def _end_of_consumed(self, caller: Caller, queue: Queue, pulled: PullResult) -> int:
        """The offset after the last message that was consumed or nacked."""
        for message in pulled.messages:
            number = self.senders.number_of(message)
            if self.rng.random() > NACK_CHANCE:
                continue
            level = self.rng.choice((0, 1, 1, 2, -1))
            outcome = caller.call(group_calls.nack(CONSUMERS_GROUP, [(*queue, message.queue_offset)], level, -1))
            if outcome.error is not None or outcome.value[0] == group_calls.NOT_NOW:
                return message.queue_offset
            # Committed meanwhile by another consumer: an extra copy does not matter.
            if outcome.value[0] >= 0 and message.queue_offset >= self.commits.committed.get(queue, 0):
                self.nacked[number] = (*queue, message.queue_offset)
        return pulled.next_offset

    def _commit(self, caller: Caller, queue: Queue, end: int, positions: dict[Queue, int]) -> None:
        self.commits.ask(queue, end)
        error = caller.call(group_calls.commit(CONSUMERS_GROUP, *queue, end)).error
        if error is None:
            positions[queue] = end
            self.commits.answered(queue, end)
        elif isinstance(error, StaleOffsetError):
            positions.pop(queue)  # Another consumer was faster.

    def _ask_for_progress(self, caller: Caller, queue: Queue, positions: dict[Queue, int]) -> bool:
        committed = self.commits.committed.get(queue, 0)
        outcome = caller.call(group_calls.info(CONSUMERS_GROUP))
        if outcome.error is not None:
            return False
        found = {(each.topic, each.queue_id): each.offset or 0 for each in outcome.value.queues}
        expect(found.get(queue, 0) >= committed, f"{queue}: offset {found.get(queue)} is below the commit {committed}")
        positions[queue] = found.get(queue, 0)
        return True

    # Invariants

    def forget(self, topic: str) -> None:
        self.commits.forget(topic)

    def resume(self, found: Found, *, power_loss: bool) -> None:
        """Messages above the committed offset are redelivered, whatever happened to their copies."""
        self.commits.resume(power_loss=power_loss)
        progress = found.of_group(CONSUMERS_GROUP)
        for number, (topic, queue_id, offset) in list(self.nacked.items()):
            if progress.get((topic, queue_id), 0) <= offset:
                del self.nacked[number]

    def check(self, found: Found, *, power_loss: bool) -> None:
        """Check commits, and that each nacked message below the offset has a copy."""
        self.commits.check(found, power_loss=power_loss)
        progress = found.of_group(CONSUMERS_GROUP)
        copied = {
            sent_of(placed, self.senders).number
            for placed in found.records
            if is_for_group(placed.message, CONSUMERS_GROUP)
        }
        there = {
            (placed.message.topic, placed.message.queue_id, placed.message.queue_offset) for placed in found.records
        }
        for number, (topic, queue_id, offset) in self.nacked.items():
            passed = progress.get((topic, queue_id), 0) > offset
            # A copy has a higher offset than its original: retention deletes it later.
            if passed and (topic, queue_id, offset) in there:
                expect(number in copied, f"message {number} at {topic} {queue_id} {offset} was nacked and is lost")

    def left(self, found: Found) -> int:
        """0: nacked messages are redelivered forever."""
        return 0


def pull(caller: Caller, queue: Queue, offset: int, count: int = MESSAGES_PER_PULL) -> PullResult | None:
    """Pull a few messages from `offset`; None without an answer."""
    request = core.pull_request(*queue, offset, count, PULL_BYTES)
    outcome = caller.call(core.pull(request))
    result: PullResult | None = outcome.value if outcome.error is None else None
    return result


# Members of a group: they join, consume their queues, commit, leave, and die.
#
# A queue has one owner: a commit by a former owner is rejected.


MEMBERS_GROUP = "members"
SESSION_MS = 3_000
WORKS_MAX = 120
LOOK_CHANCE = 0.2
PATIENT_COUNT = 500


@dataclass(slots=True)
class _Held:
    """A queue that a member owns."""

    epoch: int
    position: int


@dataclass(slots=True)
class _Member:
    name: str
    generation: int = -1
    queues: dict[Queue, _Held] = field(default_factory=dict)


@dataclass(slots=True)
class Members:
    """Outcomes of one group's members, over all lives of a store."""

    rng: random.Random
    patient: bool = False
    commits: Commits = field(default_factory=lambda: Commits(MEMBERS_GROUP))
    _given: dict[Queue, tuple[int, str]] = field(default_factory=dict)
    """Last known owner and epoch of each queue."""
    _names: int = 0

    def run(self, paths: StorePaths, schedule: Schedule, clock: SimulatedClock) -> None:
        while True:
            caller = Caller(paths.socket("query"), schedule)
            self._names += 1
            try:
                self._be_member(caller, schedule, _Member(f"member{self._names}"))
            finally:
                caller.close()

    def _be_member(self, caller: Caller, schedule: Schedule, member: _Member) -> None:
        """From join to leave, or to death, which only closes the connection."""
        joined = self._join(caller, member)
        for _ in range(self.rng.randint(1, WORKS_MAX)):
            schedule.pause()
            if not joined:
                joined = self._join(caller, member)
            elif not member.queues or self.rng.random() < LOOK_CHANCE:
                joined = self._look(caller, member)
            else:
                joined = self._work(caller, member)
        if self.rng.random() < 0.5:
            caller.call(group_calls.leave(MEMBERS_GROUP, member.name))

    def _join(self, caller: Caller, member: _Member) -> bool:
        holding = [(*queue, held.epoch) for queue, held in member.queues.items()]
        request = GroupJoinRequest(MEMBERS_GROUP, list(TOPICS), member.name, "", SESSION_MS, EARLIEST, 0, holding)
        outcome = caller.call(group_calls.join(request))
        if outcome.error is None:
            self._take(caller, member, outcome.value)
        return outcome.error is None

    def _look(self, caller: Caller, member: _Member) -> bool:
        """Poll for an assignment: held until it changes, or answered immediately."""
        generation = self.rng.choice((member.generation, -1))
        outcome = caller.call(group_calls.heartbeat(MEMBERS_GROUP, member.name, generation, SESSION_MS / 1000))
        if outcome.error is not None:
            return False
        if outcome.value.changed:
            self._take(caller, member, outcome.value)
        return True

    def _take(self, caller: Caller, member: _Member, given: GroupAssignment) -> None:
        """Adopt an assignment; drop all other queues."""
        queues: dict[Queue, _Held] = {}
        for topic, queue_id, epoch, offset in given.queues:
            queue = topic, queue_id
            committed = self.commits.committed.get(queue, 0)
            expect(offset >= committed, f"{member.name} begins {queue} at {offset}, but {committed} was committed")
            last_epoch, last = self._given.get(queue, (0, ""))
            expect(epoch != last_epoch or last == member.name, f"{queue} was given to {last} and {member.name}")
            self._given[queue] = epoch, member.name
            held = member.queues.get(queue)
            queues[queue] = held if held is not None and held.epoch == epoch else _Held(epoch, offset)
        gone = member.queues.keys() - queues.keys()
        member.queues, member.generation = queues, given.generation
        if gone:
            caller.call(group_calls.release(MEMBERS_GROUP, member.name, given.generation))

    def _work(self, caller: Caller, member: _Member) -> bool:
        """Consume some messages of one queue; whether it is still a member."""
        queue = self.rng.choice(sorted(member.queues))
        held = member.queues[queue]
        pulled = pull(caller, queue, held.position, PATIENT_COUNT if self.patient else MESSAGES_PER_PULL)
        if pulled is None or pulled.next_offset <= held.position:
            return True
        if pulled.status is not PullStatus.FOUND:
            held.position = max(held.position, pulled.min_offset)
            return True
        self.commits.ask(queue, pulled.next_offset)
        given = self._given[queue]
        commit = group_calls.commit_of_member(MEMBERS_GROUP, member.name, [(*queue, held.epoch, pulled.next_offset)])
        outcome = caller.call(commit)
        if outcome.error is not None:
            return not isinstance(outcome.error, NotAMemberError)
        if outcome.value:
            del member.queues[queue]  # It has another owner or epoch.
            return True
        mine = given[0] < held.epoch or given == (held.epoch, member.name)
        expect(mine, f"{member.name} committed {queue} by epoch {held.epoch} when {given} had it")
        self.commits.answered(queue, pulled.next_offset)
        held.position = pulled.next_offset
        return True

    # Invariants

    def forget(self, topic: str) -> None:
        self.commits.forget(topic)

    def resume(self, found: Found, *, power_loss: bool) -> None:
        self.commits.resume(power_loss=power_loss)
        if power_loss:
            self._given.clear()

    def check(self, found: Found, *, power_loss: bool) -> None:
        self.commits.check(found, power_loss=power_loss)

    def left(self, found: Found) -> int:
        """Messages that were not consumed."""
        progress = found.of_group(MEMBERS_GROUP)
        queues = {(placed.message.topic, placed.message.queue_id) for placed in found.records}
        return sum(
            offset >= progress.get(queue, 0)
            for queue in queues
            if queue[0] in TOPICS and queue[0] not in self.commits.deleted
            for offset, _ in in_queue(queue, found)
        )


# Simple consumers: they receive, acknowledge, extend the visibility timeout, and abandon messages.
#
# A received message that is not acknowledged is in an open check point or was redelivered. An acknowledged message is
# never redelivered, and no message before its timeout. After a power loss, messages received before it may be
# redelivered once more, except a contiguous run of open ones from the committed offset, which the next start skips. Any
# message may be after the clock was set back by more than the minute that store timestamps stay ahead of it.


POP_GROUP = "receivers"
OWN_TOPICS = (*TOPICS, *(pop_retry_topic(POP_GROUP, topic) for topic in TOPICS))
POP_RETRIES_MAX = 3
IN_HAND_MAX = 20
HOARD_MAX = 12
INVISIBLE_MS = (1_000, 1_000, 5_000, 60_000)
QueueOffset = tuple[str, int, int]


@dataclass(slots=True)
class Receivers:
    """Outcomes of one group's simple consumers, over all lives of a store."""

    rng: random.Random
    senders: Senders
    hoards: bool = False
    """Keeps many check points open for long."""
    patient: bool = False
    acked: set[int] = field(default_factory=set)
    """Messages whose acknowledgement was answered, by number; a power loss may lose it."""
    tried: Counter[int] = field(default_factory=Counter)
    """Acknowledgement requests of each message that were not rejected as too late."""
    repeatable: set[int] = field(default_factory=set)
    """Messages that may be redelivered after an acknowledgement."""
    deleted: set[str] = field(default_factory=set)
    _not_before_ms: dict[int, int] = field(default_factory=dict)
    """Earliest redelivery time of each message, by number."""
    _latest_ms: int = 0
    """The latest time of all lives: clocks are set back."""
    _set_back: bool = False

    def run(self, paths: StorePaths, schedule: Schedule, clock: SimulatedClock) -> None:
        caller = Caller(paths.socket("query"), schedule)
        hand: list[StoredMessage] = []
        try:
            while caller.call(group_calls.change(POP_GROUP, POP_RETRIES_MAX, 1, None)).error is not None:
                schedule.pause()
            while True:
                self._act(caller, hand, clock)
                schedule.pause()
        finally:
            caller.close()

    def run_once(self, paths: StorePaths, schedule: Schedule, clock: SimulatedClock) -> None:
        """A short life: receive some messages, acknowledge the first, abandon the others."""
        caller = Caller(paths.socket("query"), schedule)
        try:
            for _ in tries(schedule):
                if hand := self._receive(caller, clock):
                    self._ack(caller, hand[:1])
                    break
        finally:
            caller.close()

    def _act(self, caller: Caller, hand: list[StoredMessage], clock: SimulatedClock) -> None:
        chance = self.rng.random()
        if self.hoards and not self.patient and chance < 0.6 and len(hand) < IN_HAND_MAX:
            self._hoard(caller, hand, clock)
        elif not hand or (chance < 0.4 and len(hand) < IN_HAND_MAX):
            hand += self._receive(caller, clock)
        elif self.patient or chance < 0.7:
            count = len(hand) if self.patient else self.rng.randint(1, len(hand))
            if not self.patient and self.rng.random() < 0.5:
                self.rng.shuffle(hand)
            self._ack(caller, [hand.pop(0) for _ in range(count)])
        elif chance < 0.8:
            hand += self._ask_for_time(caller, hand.pop(self.rng.randrange(len(hand))))
        elif chance < 0.9:
            hand.pop(self.rng.randrange(len(hand)))

    def _hoard(self, caller: Caller, hand: list[StoredMessage], clock: SimulatedClock) -> None:
        """Open many check points for long, with a few messages each."""
        for _ in range(self.rng.randint(2, HOARD_MAX)):
            received = self._receive(caller, clock, self.rng.randint(1, 2), INVISIBLE_MS[-1])
            hand += received
            if not received:
                return

    def _receive(
        self, caller: Caller, clock: SimulatedClock, count: int = 0, invisible_ms: int = 0
    ) -> list[StoredMessage]:
        invisible_ms = invisible_ms or self.rng.choice(INVISIBLE_MS)
        timeout_ms = self.rng.choice((0, 0, 200))
        count = count or (PATIENT_COUNT if self.patient else self.rng.randint(1, 8))
        request = GroupReceiveRequest(POP_GROUP, list(TOPICS), count, invisible_ms, timeout_ms, EARLIEST, 0)
        outcome = caller.call(group_calls.receive(request))
        received: list[StoredMessage] = outcome.value if outcome.error is None else []
        self._latest_ms = max(self._latest_ms, clock.latest_ms)
        self._set_back = self._set_back or clock.set_back
        for message in received:
            number = self.senders.number_of(message)
            what = f"message {number} of {message.topic} {message.queue_id} {message.queue_offset} is redelivered"
            if not self._may_repeat(number):
                expect(number not in self.acked, f"{what} after its acknowledgement")
                early_ms = self._not_before_ms.get(number, 0) - self._latest_ms
                expect(early_ms <= 0, f"{what} {early_ms} ms before its time")
            self._see(number, message)
        return received

    def _may_repeat(self, number: int) -> bool:
        return self._set_back or number in self.repeatable

    def _see(self, number: int, message: StoredMessage) -> None:
        received_ms, invisible_ms = map(int, message.properties[group_calls.HANDLE].split()[1:3])
        self._not_before_ms[number] = received_ms + invisible_ms

    def _ack(self, caller: Caller, messages: list[StoredMessage]) -> None:
        numbers = {self.senders.number_of(message) for message in messages}
        self.tried.update(numbers)
        outcome = caller.call(group_calls.ack(POP_GROUP, messages))
        if outcome.error is None and outcome.value == len(messages):
            self.acked |= numbers
        elif outcome.error is None and not outcome.value:
            self.tried.subtract(numbers)

    def _ask_for_time(self, caller: Caller, message: StoredMessage) -> list[StoredMessage]:
        number = self.senders.number_of(message)
        # Without an answer, the timeout in effect is unknown.
        self._not_before_ms.pop(number, None)
        seconds = self.rng.choice(INVISIBLE_MS) / 1000
        outcome = caller.call(group_calls.change_invisible(POP_GROUP, message, seconds))
        if outcome.error is not None:
            return []
        self._see(number, outcome.value)
        return [outcome.value]

    # Invariants

    def forget(self, topic: str) -> None:
        self.deleted |= {topic, pop_retry_topic(POP_GROUP, topic)}

    def resume(self, found: Found, *, power_loss: bool) -> None:
        if not power_loss:
            return
        # The committed offset may be older than the receives. A contiguous run of open messages from it is skipped.
        checked = _CheckPoints(found)
        passed = checked.passed_from(found.of_group(POP_GROUP))
        numbers = {place: self.senders.number_of(placed.message) for place, placed in self._of_topics(found)}
        received = self.tried.keys() | self._not_before_ms.keys()
        received |= {number for place, number in numbers.items() if place in checked.newest}
        waiting = {numbers[place]: due_ms for place, due_ms in passed.items() if place in numbers}
        self.repeatable |= received - waiting.keys()
        self._not_before_ms |= waiting
        # Open although acknowledged: the acknowledgement was lost, and the message is redelivered after its timeout.
        self.acked -= waiting.keys()

    def check(self, found: Found, *, power_loss: bool) -> None:
        """Check that each message below the offset is open, acknowledged, or redelivered once."""
        checked = _CheckPoints(found)
        times = Counter(
            (sent_of(placed, self.senders).number, placed.message.reconsume_times)
            for placed in found.records
            if is_for_group(placed.message, POP_GROUP)
        )
        twice = [number for (number, _), count in times.items() if count > 1 and not self._may_repeat(number)]
        expect(not twice, f"messages {twice[:5]} were redelivered twice")
        revived = found.of_group(REVIVE_GROUP)
        for place, placed in self._received(found):
            point = checked.newest.get(place)
            expect(point is not None, f"the committed offset passes {place}, which was never received")
            assert point is not None
            number = sent_of(placed, self.senders).number
            if not checked.is_open(place):
                again = times[number, placed.message.reconsume_times + 1]
                expect(
                    self.tried[number] > 0 or again > 0,
                    f"message {number} at {place} is lost without an acknowledgement",
                )
                continue
            lost = not power_loss and number in self.acked and not self._may_repeat(number)
            expect(not lost, f"message {number} at {place} is open although acknowledged")
            begin = revived.get((REVIVE_TOPIC, point.revive_queue), 0)
            expect(
                point.revive_offset >= begin,
                f"{place} waits at {point.revive_offset} of revive queue {point.revive_queue}, read from {begin} on",
            )

    def _received(self, found: Found) -> Iterator[tuple[QueueOffset, Placed]]:
        progress = found.of_group(POP_GROUP)
        for place, placed in self._of_topics(found):
            if place[2] < progress.get(place[:2], 0) and placed.offset >= found.minimum:
                yield place, placed

    def _of_topics(self, found: Found) -> Iterator[tuple[QueueOffset, Placed]]:
        for placed in found.records:
            message = placed.message
            if message.topic in OWN_TOPICS and message.topic not in self.deleted:
                yield (message.topic, message.queue_id, message.queue_offset), placed

    def left(self, found: Found) -> int:
        """Messages that were not received or not acknowledged."""
        checked, progress = _CheckPoints(found), found.of_group(POP_GROUP)
        return sum(
            place[2] >= progress.get(place[:2], 0) or checked.is_open(place) for place, _ in self._of_topics(found)
        )


class _CheckPoints:
    """The check points of a log, and their acknowledgements."""

    def __init__(self, found: Found) -> None:
        self.newest: dict[QueueOffset, PopCheckPoint] = {}
        self._done: set[tuple[check_points.Key, int]] = set()
        for placed in found.records:
            said = check_points.read(placed.message) if placed.message.topic == REVIVE_TOPIC else None
            if isinstance(said, PopAck):
                self._done.update((said.key, offset) for offset in said.offsets)
            elif isinstance(said, PopCheckPoint) and said.group == POP_GROUP:
                self._add(said)

    def _add(self, point: PopCheckPoint) -> None:
        for place in _places_of(point):
            before = self.newest.get(place)
            if before is None or before.pop_time_ms < point.pop_time_ms:
                self.newest[place] = point

    def passed_from(self, progress: Mapping[tuple[str, int], int]) -> dict[QueueOffset, int]:
        """Open places that a start skips, each with its earliest redelivery time in ms."""
        points = {id(point): point for point in self.newest.values()}.values()
        positions, passed = dict(progress), dict[QueueOffset, int]()
        for point in sorted(points, key=lambda point: point.key):
            queue = point.topic, point.queue_id
            open_ = [place for place in _places_of(point) if self.newest[place] is point and self.is_open(place)]
            if open_ and queue in positions and point.offsets[0] <= positions[queue] < point.next_offset:
                positions[queue] = point.next_offset
                passed |= dict.fromkeys(open_, point.due_ms)
        return passed

    def is_open(self, place: QueueOffset) -> bool:
        """Whether a place was received and is not acknowledged."""
        point = self.newest.get(place)
        return point is not None and (point.key, place[2]) not in self._done


def _places_of(point: PopCheckPoint) -> list[QueueOffset]:
    return [(point.topic, point.queue_id, offset) for offset in point.offsets]


# Deleted topics, and which records must or must not have a unit in a queue.


PAUSES = (20, 400)


class Place(enum.Enum):
    """Whether a record has a unit in its queue."""

    MUST = "it is there"
    MAY = "it may be there"
    MUST_NOT = "it went with its topic"


@dataclass(slots=True)
class Deletions:
    """Deletions over all lives of a store."""

    rng: random.Random
    senders: Senders
    others: Sequence[Party] = ()
    """Clients that must be notified of deletions."""
    topics: set[str] = field(default_factory=set)
    """Topics whose deletion was requested."""
    _asked: str = ""
    """The topic whose deletion has no answer yet."""
    _gone: set[int] = field(default_factory=set)
    _unsure: set[int] = field(default_factory=set)

    def run(self, paths: StorePaths, schedule: Schedule) -> None:
        """A client that deletes topics: a task of the schedule."""
        caller = Caller(paths.socket("writer"), schedule)
        try:
            while True:
                for _ in range(self.rng.randint(*PAUSES)):
                    schedule.pause()
                self._delete(caller, self.rng.choice(TOPICS))
        finally:
            self._end()
            caller.close()

    def _delete(self, caller: Caller, topic: str) -> None:
        stored = {sent.number for sent in self._of(topic) if sent.fate is Fate.STORED}
        self._asked = topic
        self.topics.add(topic)
        for other in self.others:
            other.forget(topic)
        error = caller.call(core.delete_topic(topic)).error
        self._end()
        if error is None:
            self._gone |= stored

    def _end(self) -> None:
        """Messages sent before the answer may be on either side of the deletion."""
        self._unsure.update(sent.number for sent in self._of(self._asked))
        self._asked = ""

    def _of(self, topic: str) -> list[Sent]:
        return [sent for sent in self.senders.sent if sent.topic == topic]

    def place(self, placed: Placed) -> Place:
        """The expected state of a record."""
        topic = placed.message.topic
        if topic not in self.topics or is_note(placed):
            return Place.MUST
        number = sent_of(placed, self.senders).number
        if is_copy(placed):
            return Place.MAY
        if number in self._gone:
            return Place.MUST_NOT
        return Place.MAY if topic == self._asked or number in self._unsure else Place.MUST
