"""Producers of a simulated group with transactions: half messages, ends, and answers to what they are asked.

What becomes of a transaction is decided when it begins, as by a database. A message is delivered once when that says so
and never else, whoever ends the transaction.
"""

from __future__ import annotations

import enum
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from mqproc.client import send_requests as sending
from mqproc.client import transaction_requests as transaction_calls
from mqproc.client import unique_id
from mqproc.client.connection import CallOutcome, Connection
from mqproc.client.dispatch_barrier import Patience
from mqproc.client.requests import TIMEOUT_S, Call
from mqproc.client.retry import Attempts, ConnectionLost, RetryPolicy
from mqproc.client.transaction_requests import Handle
from mqproc.errors import MqprocError, StoreReadOnlyError, TransactionNotFoundError, TransactionOverdueError
from mqproc.io.store_io import StoreIO
from mqproc.ipc.control import Control
from mqproc.layout import control as words_of
from mqproc.layout import properties
from mqproc.layout.java_hash import java_hash
from mqproc.paths import StorePaths
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.offsets.offset_store import committed_offsets
from mqproc.store.schedule.delivery_marks import mark_of
from mqproc.store.transactions import decode_op_body
from mqproc.topic_names import (
    CHECK_MAX_TIME_TOPIC,
    DEAD_LETTER_PREFIX,
    HALF_TOPIC,
    OP_HALF_TOPIC,
    RETRY_PREFIX,
    REVIVE_TOPIC,
    SCHEDULE_TOPIC,
    TIMER_TOPIC,
)
from mqproc.types import Message, SendResult, StoredMessage
from mqproc.util.units import DELAY_LEVELS, DELAYS_MS
from tests.crash.disk import Broken, Placed, expect
from tests.crash.group import Caller, Schedule, SimulatedClock, connect, tries

if TYPE_CHECKING:
    import pyarrow as pa

# --- copies ---
# Records that the group made itself: of messages that had waited, were committed, or come again; and its notes.


WAITING_TOPICS = (SCHEDULE_TOPIC, TIMER_TOPIC)
PARKED_TOPICS = (*WAITING_TOPICS, HALF_TOPIC, CHECK_MAX_TIME_TOPIC)
# What query remembers in the log: which transactions have ended, what simple consumers have received.
NOTE_TOPICS = (OP_HALF_TOPIC, REVIVE_TOPIC)
OF_GROUPS = (RETRY_PREFIX, DEAD_LETTER_PREFIX)


def tags_code(message: StoredMessage) -> int:
    """What a record's unit bears: its tag's hash, or when it is due."""
    if message.topic == SCHEDULE_TOPIC:
        return message.store_timestamp_ms + DELAYS_MS[message.queue_id]
    return java_hash(message.tag) if message.tag else 0


def goes_to(message: StoredMessage) -> str:
    """The topic that a message is for: its own, or where it goes when it has waited, or is committed."""
    return message.properties.get(properties.REAL_TOPIC, "") if message.topic in PARKED_TOPICS else message.topic


def is_for_group(message: StoredMessage, group: str) -> bool:
    """Whether a message comes to a group again, or is one of its dead letters."""
    topic, again = goes_to(message), RETRY_PREFIX + group
    return topic in (again, DEAD_LETTER_PREFIX + group) or topic.startswith(f"{again}_")


def is_note(placed: Placed) -> bool:
    """Whether a record is none of a message."""
    return placed.message.topic in NOTE_TOPICS


def is_copy(placed: Placed) -> bool:
    """Whether the group made the record, and not a sender."""
    message = placed.message
    return goes_to(message).startswith(OF_GROUPS) or message.prepared_transaction_offset > 0


def sent_of(placed: Placed, senders: Senders) -> Sent:
    """The message that a record was sent as, or made of; raises Broken when nobody sent it."""
    return senders.sent[senders.number_of(placed.message)]


def originals(records: Sequence[Placed], senders: Senders) -> list[tuple[int, Placed]]:
    """(number, record) of every record that a sender made, in the order of the log."""
    found = ((sent_of(placed, senders), placed) for placed in records if not is_note(placed))
    return [(sent.number, placed) for sent, placed in found if not is_copy(placed)]


def check_copies(records: Sequence[Placed], senders: Senders, gone: set[int]) -> None:
    """What waited is delivered to its own topic, once, and never what a crash has taken.

    So it is with half messages: of each one thing is made, and of a copy of it the next.
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
    """Offsets of records that wait still."""
    made = {placed.message.prepared_transaction_offset for placed in records if is_copy(placed)}
    return [
        placed.offset
        for placed in records
        if placed.message.topic in WAITING_TOPICS and mark_of(placed.offset) not in made
    ]


# --- senders ---
# Clients of a simulated group: they send messages with numbered bodies and remember what became of each.


TOPICS = ("Alpha", "Beta", "Gamma-with-a-longer-name")
NUMBER_DIGITS = 10
# Every so many messages has properties of its own, which takes all of its frame another way.
PROPERTIES_EACH = 4
IN_FLIGHT_MAX = 3


class Fate(enum.Enum):
    """What a sender was told."""

    SENT = "no answer yet"
    STORED = "stored"
    REFUSED = "refused"
    UNKNOWN = "outcome unknown"


@dataclass(slots=True)
class Sent:
    """One message and what its sender knows of it."""

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
    """Its sender waited for the sync where the store syncs."""

    @property
    def waits(self) -> bool:
        """It is stored twice: to wait for its time, and when that has come."""
        return bool(self.delay_level or self.deliver_at_ms)


class SimulatedIds(unique_id.UniqueIds):
    """Unique ids that are the same in every run."""

    def __init__(self, frames: int = 0) -> None:
        """So many have been taken before."""
        super().__init__()
        self.frames = frames

    def reserve(self, count: int) -> tuple[str, int]:
        self.frames += 1
        return f"{self.frames:0{unique_id.PREFIX_CHARACTERS}X}", 0


class Senders:
    """All messages that were ever sent to a store, over all its lives."""

    def __init__(self, rng: random.Random, *, delays: bool = False, properties: bool = False) -> None:
        """With `delays` some messages are to be delivered later, with `properties` some have some of their own."""
        self._rng = rng
        self._delays = delays
        self._properties = properties
        self.sent: list[Sent] = []
        self.time_ms = 0
        """When what is made now is born."""

    def make(self, count: int, *, at_once: bool = False, topics: Sequence[str] = TOPICS) -> list[Sent]:
        """New messages of one topic, remembered; with `at_once` they do not wait for a time."""
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
        """A level, or a time to deliver at, or neither."""
        if not self._delays or self._rng.random() < 0.6:
            return 0, 0
        if self._rng.random() < 0.7:
            return self._rng.choice((1, 1, 2, 3, self._rng.randint(1, DELAY_LEVELS))), 0
        return 0, self.time_ms + self._rng.choice((10, 500, 3_000, 200_000))

    def of_body(self, body: bytes) -> Sent | None:
        """The message that a body belongs to, None when nobody sent it."""
        digits = body[:NUMBER_DIGITS]
        if not digits.isdigit() or int(digits) >= len(self.sent):
            return None
        sent = self.sent[int(digits)]
        return sent if sent.body == body else None

    def number_of(self, message: StoredMessage) -> int:
        """The number of the message that somebody got; raises Broken when nobody sent it."""
        sent = self.of_body(message.body)
        if sent is None:
            where = f"{message.topic} {message.queue_id} {message.queue_offset}"
            raise Broken(f"the message at {where} was never sent: {message.body[:40]!r}")
        return sent.number

    def run(self, paths: StorePaths, schedule: Schedule, frames: int) -> None:
        """A sender's life: a task of the schedule."""
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
                    self._hear(connection, flying)
                schedule.pause()
        finally:
            if connection is not None:
                connection.close()

    def _send(self, connection: Connection, flying: dict[int, list[Sent]]) -> None:
        group = self.make(self._rng.choice((1, 1, 2, 5, 20)))
        call = sending.send_group([self.message_of(one) for one in group], wait=group[0].waited)
        flying[connection.submit(call)] = group

    def _hear(self, connection: Connection, flying: dict[int, list[Sent]]) -> None:
        for request_id in list(flying):
            outcome = connection.done.pop(request_id, None)
            if outcome is not None:
                self.settle(flying.pop(request_id), outcome, outcome.value)

    def message_of(self, sent: Sent) -> Message:
        """As its sender gives it to the client."""
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
        """Remember what the senders of some messages were told."""
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


# --- parties ---
# What all clients of a story have in common, and what those that belong to consumer groups share.


Queue = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Found:
    """What a store holds: its log's records, and where groups stand."""

    records: Sequence[Placed]
    progress: Mapping[str, Mapping[Queue, int]]
    """By group."""
    sync_flush: bool
    minima: Mapping[Queue, int]
    """Each queue's first offset: of a topic that was deleted and made again it lies behind what went."""
    minimum: int = 0
    """Retention was to delete the log up to here, and has taken groups past it; some of it may be there yet."""

    def of_group(self, group: str) -> Mapping[Queue, int]:
        return self.progress.get(group, {})


def found_in(paths: StorePaths, records: Sequence[Placed], *, sync_flush: bool, minimum: int = 0) -> Found:
    """What the store at `paths` holds, as far as `records` are its log."""
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
    """Clients of one kind over all lives of a store, and what they were told."""

    patient: bool
    """In a last life without trouble nothing is left undone."""

    def run(self, paths: StorePaths, schedule: Schedule, clock: SimulatedClock) -> None:
        """The life of one of them: a task of the schedule."""

    def forget(self, topic: str) -> None:
        """Somebody deletes a topic."""

    def go_on(self, found: Found, *, power_loss: bool) -> None:
        """A life is over, and the next one begins with this."""

    def check(self, found: Found, *, power_loss: bool) -> None:
        """Raise Broken unless what was told holds."""

    def left(self, found: Found) -> int:
        """How much is still to be done."""


@dataclass(slots=True)
class Commits:
    """How far one group has come, as its consumers were told."""

    group: str
    committed: dict[Queue, int] = field(default_factory=dict)
    """Commits that were answered; a power loss may take them."""
    asked: dict[Queue, int] = field(default_factory=dict)
    """The furthest that was ever asked for."""
    deleted: set[str] = field(default_factory=set)

    def ask(self, queue: Queue, end: int) -> None:
        """Somebody commits."""
        self.asked[queue] = max(self.asked.get(queue, 0), end)

    def answered(self, queue: Queue, end: int) -> None:
        """The commit was taken."""
        if queue[0] not in self.deleted:
            self.committed[queue] = max(self.committed.get(queue, 0), end)

    def forget(self, topic: str) -> None:
        """A topic is deleted, and with it what the group had consumed of it, now or when the writer comes to it."""
        self.deleted.add(topic)
        for queue in [queue for queue in self.committed if queue[0] == topic]:
            del self.committed[queue]

    def go_on(self, *, power_loss: bool) -> None:
        """The next life begins; a power loss may have taken what was answered."""
        if power_loss:
            self.committed.clear()

    def check(self, found: Found, *, power_loss: bool) -> None:
        """Progress is neither lost nor invented."""
        progress = found.of_group(self.group)
        for queue, offset in progress.items():
            if queue[0] in self.deleted:
                continue  # It was raised to the queue's end, if the crash came before it was forgotten.
            asked = self.asked.get(queue, 0)
            raised_to = max(_minimum(queue, found), found.minima.get(queue, 0))
            expect(offset <= max(asked, raised_to), f"{queue}: {offset} is beyond {asked}")
        for queue, offset in {} if power_loss else self.committed.items():
            expect(progress.get(queue, 0) >= offset, f"{queue}: {progress.get(queue)} is below the commit of {offset}")


def _minimum(queue: Queue, found: Found) -> int:
    """The first offset of a queue that the log has, or is to have: progress is raised to it."""
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
    """What one group's producers were told, over all lives of a store."""

    rng: random.Random
    senders: Senders
    patient: bool = False
    decided: dict[int, bool] = field(default_factory=dict)
    """By number: whether its transaction commits."""
    ended: set[int] = field(default_factory=set)
    """Those whose end was answered; a power loss may take it."""
    _asked: dict[int, int] = field(default_factory=dict)
    """By number: the log's end when somebody asked to end its transaction first; what is made of it lies behind."""

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
        """A short life: one transaction that is committed, and one that is rolled back."""
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
            expect(number in self.decided, f"nobody began a transaction with message {number}")
            if self.patient or self.rng.random() < 0.8:
                self._end(
                    paths, query, number, transaction_calls.handle_of_asked(PRODUCERS_GROUP, message), from_check=True
                )

    # What must be true

    def forget(self, topic: str) -> None:
        """A transaction does not ask whether its topic is there."""

    def go_on(self, found: Found, *, power_loss: bool) -> None:
        if power_loss and not found.sync_flush:
            self.ended.clear()
        end = max((placed.offset + placed.size for placed in found.records), default=0)
        self._asked = {number: min(begin, end) for number, begin in self._asked.items()}

    def check(self, found: Found, *, power_loss: bool) -> None:
        """Committed once, rolled back never, and no half message marked before what was made of it."""
        delivered = Counter(
            sent_of(placed, self.senders).number for placed in found.records if self._is_committed(placed)
        )
        wrong = [number for number in delivered if not self.decided[number]]
        expect(not wrong, f"messages {wrong[:5]} are delivered, though their transactions were rolled back")
        twice = [number for number, count in delivered.items() if count > 1]
        expect(not twice, f"messages {twice[:5]} were committed twice")
        if not power_loss or found.sync_flush:
            begin = min((placed.offset for placed in found.records), default=0)
            # Retention may have deleted what lies below the log's begin.
            there = [number for number in sorted(self.ended) if begin <= self._asked[number] and self.decided[number]]
            gone = [number for number in there if number not in delivered]
            expect(not gone, f"messages {gone[:5]} were committed, and are not there")
        made = {placed.message.prepared_transaction_offset for placed in found.records if is_copy(placed)}
        marked = _marked(found)
        for placed in _halves(found):
            number = sent_of(placed, self.senders).number
            if placed.message.queue_offset in marked and self.decided[number]:
                expect(mark_of(placed.offset) in made, f"the half message {number} is marked, and nothing made of it")

    def _is_committed(self, placed: Placed) -> bool:
        """Whether a record is the message that a transaction was for."""
        if placed.message.topic in (HALF_TOPIC, CHECK_MAX_TIME_TOPIC) or not is_copy(placed):
            return False
        sent = sent_of(placed, self.senders)
        return sent.number in self.decided and placed.message.topic == sent.topic

    def left(self, found: Found) -> int:
        """Half messages that are not marked."""
        marked = _marked(found)
        return sum(placed.message.queue_offset not in marked for placed in _halves(found))


def _log_end(paths: StorePaths) -> int:
    """What is asked for from now on lies behind it."""
    control = Control.open(StoreIO(), paths)
    try:
        return control.load(words_of.WRITTEN)
    finally:
        control.close()


def _halves(found: Found) -> list[Placed]:
    return [placed for placed in found.records if placed.message.topic == HALF_TOPIC]


def _marked(found: Found) -> set[int]:
    """Queue offsets of half messages that are done."""
    return {
        offset
        for placed in found.records
        if placed.message.topic == OP_HALF_TOPIC
        for offset in decode_op_body(placed.message.body)
    }


# --- sinks ---
# Tasks of Spark's sink, micro-batch after micro-batch: they send rows, are killed, and are done again.
#
# A micro-batch is over when one of its tasks has ended well; until then its rows are sent again, and go on behind the
# last one that the store has. Another task that was begun for it may still come behind: it finds all rows. As the sink's
# tasks do by a lock, these take turns.


TOPIC: Final = "Sink"
QUEUE: Final = 0
ROWS_MAX = 24
ROWS_PER_BATCH_MAX = 10
CALLS_UNTIL_KILL_MAX = 25
KILL_CHANCE = 0.4
# A dead task's connection and a new one have been read when a few calls of the latter were answered.
PATIENT_PINGS = 3


class TaskKilled(Exception):
    """The task's process is no more."""


class _Client:
    """What a task makes its calls with, as often as a client would; killed amid the last of so many, 0 = never."""

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
    """What one query's tasks were told, over all lives of a store."""

    rng: random.Random
    senders: Senders
    patient: bool = False
    epoch: int = 0
    rows: list[Sent] = field(default_factory=list)
    """Of the micro-batch under way."""
    ended: set[int] = field(default_factory=set)
    """Numbers of rows of micro-batches that are over; a power loss may take them."""
    tasks: int = 0
    found: int = 0
    """Rows that a task before had stored."""
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
        """One task. A micro-batch that was under way when it began may be over when it comes to its turn."""
        # Here, so that a bug can be planted before, and who has no such tasks needs no Arrow.
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
            expect(task.found == len(rows), f"of {len(rows)} rows of a micro-batch over {task.found} were found")
            return
        self.ended |= {row.number for row in rows}
        self.epoch, self.rows = epoch + 1, []

    # What must be true

    def forget(self, topic: str) -> None:
        """Its topic is nobody else's."""

    def check(self, found: Found, *, power_loss: bool) -> None:
        """What is over is there, and of what is under way the first rows are; that none is twice others look at."""
        there = _numbers(found, self.senders)
        if not power_loss or found.sync_flush:
            gone = sorted(self.ended - set(there))
            expect(not gone, f"rows {gone[:5]} were stored, and are not there")
        under_way = [row.number for row in self.rows]
        stored = [number for number in there if number in set(under_way)]
        expect(stored == under_way[: len(stored)], f"of rows {under_way} there are {stored}")

    def go_on(self, found: Found, *, power_loss: bool) -> None:
        """A row that a power loss took is sent again: told by its body from the one that must not come back."""
        if not power_loss:
            return
        if not found.sync_flush:
            self.ended.clear()
        there = set(_numbers(found, self.senders))
        again = [row for row in self.rows if row.number not in there]
        kept = self.rows[: len(self.rows) - len(again)]
        self.rows = kept + (self.senders.make(len(again), at_once=True, topics=(TOPIC,)) if again else [])

    def left(self, found: Found) -> int:
        """Rows of a micro-batch that is not over."""
        return len(self.rows)


def _numbers(found: Found, senders: Senders) -> list[int]:
    """Of all rows that the log has, in its order."""
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
