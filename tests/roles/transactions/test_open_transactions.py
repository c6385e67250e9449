"""Open transactions by offset, id and order: against a plain model, and single cases."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mqproc.roles.transactions.open_transactions import ENDED_MAX, OpenTransactions
from mqproc.store.transactions import HalfMessage

STEP = 100


def half(offset: int, transaction_id: str = "", checks: int = 0, made_from: int = 0, place: int = -1) -> HalfMessage:
    at = offset * STEP if place < 0 else place
    name = transaction_id or f"t{offset}"
    return HalfMessage(offset, at, STEP, f"m{offset}", "g", "T", name, 0, 0, checks, 0, made_from, places=[at])


def seen(table: OpenTransactions, found: HalfMessage) -> HalfMessage | None:
    """As the walk over the queue does it."""
    return table.add(found) if table.scan_past(found.offset) else None


def test_copy_replaces_the_half_message_it_names() -> None:
    table = OpenTransactions()
    first, other = half(0, "a"), half(1, "b")
    assert seen(table, first) is None
    assert seen(table, other) is None
    copy = half(2, "a", checks=1, made_from=1)  # 0 means unknown, so 1 is the log's first record.
    assert seen(table, copy) is first
    assert copy.places == [0, 200]
    assert table.find(0, first.key) is table.find(200, first.key) is copy
    assert (table.is_newest(first), table.is_newest(copy)) == (False, True)
    # The old one holds the offset until it is marked.
    assert table.half_progress() == 0
    table.done(0)
    assert table.half_progress() == 1
    table.done(1)
    assert table.half_progress() == 2
    assert table.find(0, copy.key) is copy
    table.done(2)
    assert (table.find(0, copy.key), table.half_progress(), len(table)) == (None, 3, 0)


def test_rocketmq_copy_is_found_by_id_and_count() -> None:
    table = OpenTransactions()
    first = half(0, "a")
    seen(table, first)
    assert seen(table, half(1, "a")) is None, "another message with the same id is no copy"
    assert seen(table, half(2, "b", checks=1)) is None
    copy = half(3, "a", checks=1)
    assert seen(table, copy) is not None
    # After a restart the offset of the first half message is unknown; its id is known.
    assert table.find(123_456, copy.key) is copy
    assert table.find(123_456, ("g", "T", "c")) is None
    assert table.find(123_456, ("else", "T", "a")) is None


def test_id_alone_does_not_match_a_half_message() -> None:
    table = OpenTransactions()
    seen(table, half(0, "a"))
    assert table.find(777, ("g", "T", "a")) is None
    assert table.find(0, ("g", "T", "b")) is None


def test_mark_before_its_half_message_prevents_opening() -> None:
    table = OpenTransactions()
    table.done(1)
    assert not table.was_scanned(0)
    assert table.was_scanned(1)
    assert seen(table, half(0)) is None
    assert not table.scan_past(1)
    assert (len(table), table.scanned_to) == (1, 2)
    # Found by its offset before dispatch had shown it.
    table.add(half(5))
    assert not table.scan_past(5)
    assert table.half_progress() == 0
    table.done(0)
    assert table.half_progress() == 5


def test_marks_below_offset_when_all_named_messages_are() -> None:
    table = OpenTransactions()
    for offset in range(4):
        seen(table, half(offset))
    assert table.mark_progress(0) is None
    for mark, offsets in enumerate([[1], [0, 2], []]):
        table.marked(mark, offsets)
        for offset in offsets:
            table.done(offset)
    assert table.half_progress() == 3
    assert table.mark_progress(2) == 1
    assert table.mark_progress(3) is None


def test_ended_transactions_are_remembered_up_to_a_limit() -> None:
    table = OpenTransactions()
    for offset in range(ENDED_MAX + 1):
        table.ended(half(offset), committed=bool(offset % 2))
    assert [table.how_ended(place * STEP) for place in (0, 1, ENDED_MAX)] == [None, True, False]


class AgainstModel(RuleBasedStateMachine):
    """Half messages arrive, are copied, found early and marked in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.table = OpenTransactions()
        self.queue: list[HalfMessage] = []
        self.done: set[int] = set()
        self.scanned_to = 0

    @rule()
    def store(self) -> None:
        self.queue.append(half(len(self.queue)))

    @rule(which=st.integers(0, 10_000))
    def copy(self, which: int) -> None:
        newest = [each for each in self.queue[: self.scanned_to] if self.table.is_newest(each)]
        if newest:
            old = newest[which % len(newest)]
            made_from = old.physical_offset or 1
            self.queue.append(half(len(self.queue), old.transaction_id, old.checks + 1, made_from))

    @rule()
    def walk(self) -> None:
        for each in self.queue[self.scanned_to :]:
            seen(self.table, each)
        self.scanned_to = len(self.queue)

    @rule(which=st.integers(0, 10_000))
    def end(self, which: int) -> None:
        left = [each.offset for each in self.queue if each.offset not in self.done]
        if left:
            offset = left[which % len(left)]
            self.done.add(offset)
            self.table.done(offset)

    @invariant()
    def agree(self) -> None:
        open_now = [each.offset for each in self.queue[: self.scanned_to] if each.offset not in self.done]
        assert sorted(each.offset for each in self.table.all()) == open_now
        assert self.table.half_progress() == (open_now[0] if open_now else self.scanned_to)
        # One whose copy was finished first is no longer open, and waits for its mark.
        for each in filter(self.table.is_newest, self.table.all()):
            assert all(self.table.find(place, each.key) is each for place in each.places)


TestAgainstModel = AgainstModel.TestCase
TestAgainstModel.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
