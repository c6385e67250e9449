"""Heartbeats: how long they are held, many answered at once; and members that share an id and nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqproc.errors import NotAMemberError, StoreBusyError
from mqproc.process.groups import SESSION_MS_MAX, SESSION_MS_MIN, TICKS_PER_SESSION, held_until_ns
from mqproc.wire.group_operations import EARLIEST, GroupAssignment, GroupHeartbeatRequest, GroupJoinRequest
from mqproc.wire.operations import Operation
from tests.process.test_query import PATIENCE_S, Caller, Group

MS = 1_000_000


@pytest.mark.parametrize("session_ms", [SESSION_MS_MIN, 1_001, 10_000, SESSION_MS_MAX])
def test_heartbeats_are_answered_at_ticks_well_within_the_session(session_ms: int) -> None:
    session_ns = session_ms * MS
    asked = [1_000_000_007 + number * session_ns // 1000 for number in range(1000)]
    held = [held_until_ns(heard_ns, session_ns) - heard_ns for heard_ns in asked]
    assert min(held) >= session_ns // 3
    # Until the answer to the next one a member is sure to be one by what it asked before.
    assert 2 * max(held) < 0.8 * session_ns
    answered = {heard_ns + pause_ns for heard_ns, pause_ns in zip(asked, held, strict=True)}
    assert len(answered) <= TICKS_PER_SESSION + 1


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Group]:
    made = Group(tmp_path / "store")
    made.put("Orders", 0)
    made.dispatch()
    yield made
    made.close()


def join(caller: Caller, group: str, member_id: str, session_ms: int = 60_000) -> GroupAssignment:
    request = GroupJoinRequest(group, ["Orders"], member_id, session_timeout_ms=session_ms, start=EARLIEST)
    found: GroupAssignment = caller.call(Operation.GROUP_JOIN, request)[0]
    return found


def beat(caller: Caller, group: str, assigned: GroupAssignment) -> int:
    return caller.ask(Operation.GROUP_HEARTBEAT, GroupHeartbeatRequest(group, assigned.member_id, assigned.generation))


def test_members_of_two_groups_may_have_one_id(store: Group) -> None:
    first, second, third = store.connect(), store.connect(), store.connect()
    beats = {}
    for caller, group in ((first, "billing"), (second, "audit")):
        beats[caller] = beat(caller, group, join(caller, group, "one"))
        assert caller.answer() is None
    join(third, "billing", "other")
    answer = first.answer()
    assert answer is not None
    assert (answer[0], answer[1].member_id, answer[1].changed) == (beats[first], "one", True)
    assert second.answer() is None, "nothing has changed in its group"
    first.sock.close()
    deadline = time.monotonic() + PATIENCE_S
    while "one" in store.role._groups.members()["billing"].members:
        assert time.monotonic() < deadline
        store.step()
    assert second.answer() is None
    assert list(store.role._groups.members()["audit"].members) == ["one"]


def test_the_end_of_a_session_is_its_own_groups(store: Group) -> None:
    short, long = store.connect(), store.connect()
    join(short, "billing", "one", SESSION_MS_MIN)
    join(long, "audit", "one")
    deadline = time.monotonic() + PATIENCE_S
    while "billing" in store.role._groups.members():
        assert time.monotonic() < deadline
        store.step()
    assert list(store.role._groups.members()) == ["audit"]


def test_a_member_comes_back_when_its_old_connection_is_closed_and_not_before(store: Group) -> None:
    old, new = store.connect(), store.connect()
    assigned = join(old, "billing", "one")
    with pytest.raises(StoreBusyError, match="another connection"):
        join(new, "billing", "one")
    with pytest.raises(NotAMemberError):
        new.call(Operation.GROUP_HEARTBEAT, GroupHeartbeatRequest("billing", assigned.member_id, assigned.generation))
    old.sock.close()
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            again = join(new, "billing", "one")
            break
        except StoreBusyError:
            assert time.monotonic() < deadline
    assert [queue[:2] for queue in again.queues] == [queue[:2] for queue in assigned.queues]
    beat(new, "billing", again)
    assert new.answer() is None
