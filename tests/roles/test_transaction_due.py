"""When half messages are due: one time each, and nothing kept of those that are done."""

from __future__ import annotations

from mqproc.roles.transactions.checks import COMPACT_MIN, DueChecks
from mqproc.roles.transactions.open_transactions import OpenTransactions
from tests.roles.test_transaction_table import half, seen


def test_each_has_one_time_and_the_earliest_comes_first() -> None:
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


def test_times_of_those_that_are_done_do_not_pile_up() -> None:
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
