"""Filters of a group's live consumers: which count as live, which filters are equal."""

from __future__ import annotations

import pytest

from mqproc.errors import FilterMismatchError
from mqproc.io.store_io import Clock
from mqproc.roles.groups.filters import LIVE_NS, UNKNOWN_PID, GroupFilters
from mqproc.roles.groups.members import GroupMembers, MemberSession
from mqproc.topic_names import filter_text, parse_tags

PID = 77


class ClockAt(Clock):
    """A clock that the test sets."""

    now_ns = 0

    def monotonic_ns(self) -> int:
        return self.now_ns


@pytest.fixture
def clock() -> ClockAt:
    return ClockAt()


def is_refused(filters: GroupFilters, filter: str) -> bool:
    try:
        filters.check("g", ["T"], filter)
    except FilterMismatchError:
        return True
    return False


def test_filter_text_is_equal_for_the_same_tags() -> None:
    assert filter_text(parse_tags("b || a||b "), "") == filter_text(parse_tags("a||b"), "") == "a || b"
    assert filter_text(parse_tags("*"), "") == filter_text([], "") == "*"
    assert filter_text([], " x > 1 ") == "SQL92: x > 1"


@pytest.mark.parametrize("pid", [PID, UNKNOWN_PID])
@pytest.mark.parametrize("invisible_ns", [0, 10 * LIVE_NS])
def test_receiver_counts_as_live_until_its_time_is_over(clock: ClockAt, pid: int, invisible_ns: int) -> None:
    filters = GroupFilters(clock, {}, lambda _pid: True)
    filters.received("g", "T", "a", pid, invisible_ns)
    clock.now_ns = max(LIVE_NS, invisible_ns) - 1
    assert is_refused(filters, "b")
    assert filters.of_group("g") == {"T": "a"}
    clock.now_ns += 1
    assert not is_refused(filters, "b")
    assert filters.of_group("g") == {}


def test_receivers_that_ended_are_forgotten_beside_a_live_one(clock: ClockAt) -> None:
    """Short-lived programs that receive, beside a service: each has another process id."""
    asked: list[int] = []
    filters = GroupFilters(clock, {}, lambda pid: asked.append(pid) or pid == PID)
    for pid in range(PID, PID + 100):
        for topic in ("T", "U", "V"):
            filters.received("g", topic, "a", pid, 0)
    filters.forget_ended()
    assert [list(each.live_until_ns) for each in filters._receivers.values()] == [[PID]] * 3
    assert len(asked) == 100, "a process is looked up once, however many topics it has"


def test_receiver_of_an_ended_process_is_not_live(clock: ClockAt) -> None:
    running = {PID}
    filters = GroupFilters(clock, {}, running.__contains__)
    filters.received("g", "T", "a", PID, 0)
    assert is_refused(filters, "b")
    running.clear()
    assert not is_refused(filters, "b")


def test_forget_ended_keeps_live_receivers(clock: ClockAt) -> None:
    filters = GroupFilters(clock, {}, lambda _pid: True)
    filters.received("g", "T", "a", PID, 0)
    filters.received("other", "T", "a", PID, 10 * LIVE_NS)
    clock.now_ns = LIVE_NS
    filters.forget_ended()
    clock.now_ns = 0
    assert filters.of_group("g") == {}
    assert filters.of_group("other") == {"T": "a"}


def test_member_does_not_conflict_with_itself_or_by_its_retries(clock: ClockAt) -> None:
    members = GroupMembers(lambda above: above + 1)
    members.join(MemberSession("one", "one", ("T", "%RETRY%g"), 1, 0, "one", filter="a"))
    filters = GroupFilters(clock, {"g": members})
    filters.check("g", ("T", "%RETRY%g"), "b", "one")
    filters.check("g", ("U", "%RETRY%g"), "b")
    assert filters.of_group("g") == {"T": "a"}
    assert is_refused(filters, "b")
