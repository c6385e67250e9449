"""Clients of a simulated group: they send messages with numbered bodies and remember what became of each."""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass

from mqproc.client import send_requests as sending
from mqproc.client import unique_id
from mqproc.client.connection import CallOutcome, Connection
from mqproc.client.retry import ConnectionLost
from mqproc.errors import MqprocError
from mqproc.paths import StorePaths
from mqproc.types import Message, SendResult, StoredMessage
from mqproc.util.units import DELAY_LEVELS
from tests.crash.placed import Broken
from tests.crash.schedule import Schedule
from tests.crash.tasks import connect

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
