"""Producers that poll for checks, and the times when checks are due."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from mqproc.errors import StoreBusyError
from mqproc.roles.transactions import checks as module
from mqproc.roles.transactions.checks import COMPACT_MIN, MESSAGES_MAX, CheckPolls, DueChecks
from mqproc.roles.transactions.open_transactions import OpenTransactions
from mqproc.store.transactions import HalfMessage
from mqproc.wire.operations import TransactionPollRequest
from tests.roles.transactions.test_open_transactions import half, seen

SECOND = 1_000_000_000


@dataclass(eq=False)
class PendingRequest:
    """A poll of some connection."""

    connection: Any
    options: TransactionPollRequest
    answers: list[tuple[Any, list[bytes]]]
    request_id: int = 0
    operation: int = 0
    answered: bool = False

    def answer(self, _options: Any, payload: Any = ()) -> None:
        self.answers.append((self, [bytes(record) for record in payload]))


@dataclass
class Rig:
    polls: CheckPolls = field(init=False)
    gone: set[str] = field(default_factory=set)
    answers: list[tuple[PendingRequest, list[bytes]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.polls = CheckPolls(self._record)

    def _record(self, half_message: HalfMessage) -> bytes | None:
        return None if half_message.transaction_id in self.gone else half_message.transaction_id.encode()

    def poll(
        self, group: str = "g", timeout_s: float = 10, connection: object = None, most: int = 32
    ) -> PendingRequest:
        options = TransactionPollRequest(group, most, round(timeout_s * 1000))
        asked = PendingRequest(connection or object(), options, self.answers)
        self.polls.poll(asked, options, 0)  # type: ignore[arg-type]
        return asked


def half_message(name: str, group: str = "g") -> HalfMessage:
    return HalfMessage(0, 0, 0, name, group, "T", name, 0, 0, 1, 0, 0)


def test_checks_go_to_the_longest_waiting_producer_of_the_group() -> None:
    rig = Rig()
    first, second, _other = rig.poll(), rig.poll(), rig.poll("other")
    rig.polls.ask(half_message("a"))
    rig.polls.ask(half_message("b"))
    rig.polls.ask(half_message("c"))
    assert rig.answers == [(first, [b"a"]), (second, [b"b"])]
    assert (rig.polls.of("g"), rig.polls.of("other"), rig.polls.count) == (0, 1, 1)
    third = rig.poll()
    assert rig.answers[2:] == [(third, [b"c"])]


def test_poll_returns_waiting_checks_up_to_its_limit() -> None:
    rig = Rig()
    for name in "abcde":
        rig.polls.ask(half_message(name))
    rig.gone.add("b")
    rig.polls.forget(half_message("c"))  # Another half message of the same name is not waiting for a check.
    rig.poll(most=2)
    rig.poll(most=10_000)
    assert [rows for _, rows in rig.answers] == [[b"a", b"c"], [b"d", b"e"]]


def test_check_requested_repeatedly_is_sent_once() -> None:
    rig = Rig()
    halves = [half_message("a"), half_message("a"), half_message("b")]
    for each in halves:
        rig.polls.ask(each)
    rig.polls.forget(halves[0])
    rig.polls.forget(halves[2])
    rig.poll()
    assert [rows for _, rows in rig.answers] == [[b"a"]]
    many = Rig()
    for number in range(MESSAGES_MAX + 1):
        many.polls.ask(half_message(f"{number}"))
    many.poll(most=1 << 40)
    assert len(many.answers[0][1]) == MESSAGES_MAX


def test_polls_end_at_timeout_or_disconnect(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    connection = object()
    dropped = [rig.poll(connection=connection) for _ in range(3)]
    short, long = rig.poll(timeout_s=1), rig.poll(timeout_s=3600)
    at_once = rig.poll(timeout_s=0)
    assert rig.answers == [(at_once, [])]
    rig.polls.drop(connection)  # type: ignore[arg-type]
    rig.polls.drop(connection)  # type: ignore[arg-type]
    assert rig.polls.count == 2
    assert rig.polls.seconds_left(0, 99.0) == 1.0
    assert rig.polls.step(SECOND - 1) == 0
    assert rig.polls.step(SECOND) == 1
    assert rig.answers[1:] == [(short, [])]
    # None is held for more than a minute.
    assert rig.polls.step(60 * SECOND) == 1
    assert rig.answers[2:] == [(long, [])]
    assert all(asked not in dropped for asked, _ in rig.answers)
    assert rig.polls.seconds_left(0, 99.0) == 99.0
    monkeypatch.setattr(module, "POLLS_MAX", 2)
    rig.poll()
    kept = rig.poll()
    with pytest.raises(StoreBusyError, match="2 producers poll already"):
        rig.poll()
    rig.polls.ask(half_message("a"))
    rig.polls.release_all()
    assert rig.answers[-1] == (kept, [])
    assert (rig.polls.count, rig.polls.of("g")) == (0, 0)


# DueChecks


def test_due_checks_return_the_earliest_first_and_once() -> None:
    table = OpenTransactions()
    due = DueChecks(table)
    halves = [half(number) for number in range(4)]
    for each in halves:
        seen(table, each)
        due.set(each, 1000 - each.offset)
    due.set(halves[3], 2000)
    assert due.pop_due(997) is None
    assert due.seconds_left(0, 9.0) == 0.998
    assert due.pop_due(1000) is halves[2]
    table.done(1)
    halves[0].busy = True
    assert due.pop_due(1500) is None, "one is done, one on its way"
    halves[2].busy = True
    assert due.seconds_left(1500, 9.0) == 0.5
    assert due.pop_due(2000) is halves[3]
    assert due.seconds_left(0, 9.0) == 9.0


def test_due_checks_compact_finished_entries() -> None:
    table = OpenTransactions()
    due = DueChecks(table)
    kept = half(0)
    seen(table, kept)
    due.set(kept, 5)
    for offset in range(1, 4 * COMPACT_MIN):
        each = half(offset)
        seen(table, each)
        due.set(each, 1 << 40)
        table.done(offset)
    assert len(due._heap) <= COMPACT_MIN + 1
    assert len(table._offsets) <= COMPACT_MIN + 1
    assert due.pop_due(5) is kept
    assert table.half_progress() == 0
