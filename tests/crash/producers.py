"""Producers of a simulated group with transactions: half messages, ends, and answers to what they are asked.

What becomes of a transaction is decided when it begins, as by a database. A message is delivered once when that says so
and never else, whoever ends the transaction.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from mqproc.client import transaction_requests as transaction_calls
from mqproc.client.retry import ConnectionLost
from mqproc.client.transaction_requests import Handle
from mqproc.errors import MqprocError, StoreReadOnlyError, TransactionNotFoundError, TransactionOverdueError
from mqproc.io.store_io import StoreIO
from mqproc.ipc.control import Control
from mqproc.layout import control as words_of
from mqproc.paths import StorePaths
from mqproc.store.schedule.delivery_marks import mark_of
from mqproc.store.transactions import decode_op_body
from mqproc.topic_names import CHECK_MAX_TIME_TOPIC, HALF_TOPIC, OP_HALF_TOPIC
from tests.crash.copies import is_copy, sent_of
from tests.crash.parties import Found
from tests.crash.placed import Placed, expect
from tests.crash.schedule import Schedule, SimulatedClock
from tests.crash.senders import Fate, Senders
from tests.crash.tasks import Caller, tries

GROUP = "producers"
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
        half = transaction_calls.half_message(GROUP, self.senders.message_of(sent), self.rng.choice((None, None, 2)))
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
        outcome = query.call(transaction_calls.poll(GROUP, self.rng.choice((0.0, 0.0, 0.3))))
        for message in outcome.value if outcome.error is None else ():
            number = self.senders.number_of(message)
            expect(number in self.decided, f"nobody began a transaction with message {number}")
            if self.patient or self.rng.random() < 0.8:
                self._end(paths, query, number, transaction_calls.handle_of_asked(GROUP, message), from_check=True)

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
