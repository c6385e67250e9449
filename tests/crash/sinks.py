"""Tasks of Spark's sink, micro-batch after micro-batch: they send rows, are killed, and are done again.

A micro-batch is over when one of its tasks has ended well; until then its rows are sent again, and go on behind the
last one that the store has. Another task that was begun for it may still come behind: it finds all rows. As the sink's
tasks do by a lock, these take turns.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from mqproc.client.dispatch_barrier import Patience
from mqproc.client.requests import TIMEOUT_S, Call
from mqproc.client.retry import Attempts, ConnectionLost, RetryPolicy
from mqproc.errors import MqprocError
from mqproc.paths import StorePaths
from tests.crash.parties import Found
from tests.crash.placed import Placed, expect
from tests.crash.schedule import Schedule, SimulatedClock
from tests.crash.senders import Senders, Sent
from tests.crash.tasks import Caller

if TYPE_CHECKING:
    import pyarrow as pa

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
