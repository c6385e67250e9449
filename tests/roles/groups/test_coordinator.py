"""Heartbeats: how long they are held, many at once, and members that share an id."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mqproc.errors import NotAMemberError, StoreBusyError
from mqproc.ipc.bell import MAX_WAIT_S
from mqproc.layout import control as words_of
from mqproc.roles.groups import coordinator
from mqproc.roles.groups.coordinator import HEARTBEAT_SESSION_NS_MAX, TICKS_PER_SESSION, heartbeat_due_ns
from mqproc.roles.groups.members import GroupMembers
from mqproc.wire.connection import ServerConnection
from mqproc.wire.operations import (
    EARLIEST,
    SESSION_MS_MAX,
    SESSION_MS_MIN,
    Empty,
    GroupAssignment,
    GroupCommitRequest,
    GroupHeartbeatRequest,
    GroupJoinRequest,
    GroupResetRequest,
    Operation,
)
from tests.roles.query.test_role import PATIENCE_S, Caller, Group
from tests.support.group import wait_until

MS = 1_000_000


@pytest.mark.parametrize("session_ms", [SESSION_MS_MIN, 1_001, 10_000, SESSION_MS_MAX])
def test_heartbeats_are_answered_well_within_the_session(session_ms: int) -> None:
    session_ns = min(session_ms * MS, HEARTBEAT_SESSION_NS_MAX)
    asked = [1_000_000_007 + number * session_ns // 1000 for number in range(1000)]
    held = [heartbeat_due_ns(last_seen_ns, session_ms * MS) - last_seen_ns for last_seen_ns in asked]
    assert min(held) >= session_ns // 3
    assert max(held) < 5_000 * MS, "finished messages are committed with them"
    # The member stays a member by its previous request until the next is answered.
    assert 2 * max(held) < 0.8 * session_ns
    answered = {last_seen_ns + pause_ns for last_seen_ns, pause_ns in zip(asked, held, strict=True)}
    assert len(answered) <= TICKS_PER_SESSION + 1


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Group]:
    made = Group(tmp_path / "store")
    made.put("Orders", 0)
    made.dispatch()
    yield made
    made.close()


def join(
    caller: Caller, group: str, member_id: str, session_ms: int = 60_000, held: Sequence[tuple[str, int, int]] = ()
) -> GroupAssignment:
    request = GroupJoinRequest(
        group, ["Orders"], member_id, session_timeout_ms=session_ms, start=EARLIEST, holding=list(held)
    )
    found: GroupAssignment = caller.call(Operation.GROUP_JOIN, request)[0]
    return found


def beat(caller: Caller, group: str, assigned: GroupAssignment) -> int:
    return caller.ask(Operation.GROUP_HEARTBEAT, GroupHeartbeatRequest(group, assigned.member_id, assigned.generation))


def test_members_of_two_groups_may_share_an_id(store: Group) -> None:
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


def test_session_expiry_affects_only_its_group(store: Group) -> None:
    short, long = store.connect(), store.connect()
    join(short, "billing", "one", SESSION_MS_MIN)
    join(long, "audit", "one")
    deadline = time.monotonic() + PATIENCE_S
    while "billing" in store.role._groups.members():
        assert time.monotonic() < deadline
        store.step()
    assert list(store.role._groups.members()) == ["audit"]


def holding(assigned: GroupAssignment) -> list[tuple[str, int, int]]:
    return [(topic, queue_id, epoch) for topic, queue_id, epoch, _ in assigned.queues]


def test_restart_does_not_let_a_member_undo_an_unseen_reset(store: Group) -> None:
    """The member slept through the reset. A member of another group keeps its queues."""
    first, second = store.connect(), store.connect()
    slept, awake = join(first, "billing", "one"), join(second, "audit", "two")
    entries = [(topic, queue_id, epoch, 1) for topic, queue_id, epoch, _ in slept.queues]
    assert first.call(Operation.GROUP_COMMIT, GroupCommitRequest("billing", entries, "one"))[0].refused == []
    resets = [(topic, queue_id, 0) for topic, queue_id, _, _ in entries]
    second.call(Operation.GROUP_RESET, GroupResetRequest("billing", resets))
    store.restart()
    first, second = store.connect(), store.connect()
    again = join(first, "billing", "one", held=holding(slept))
    assert set(holding(again)) & set(holding(slept)) == set()
    refused = first.call(Operation.GROUP_COMMIT, GroupCommitRequest("billing", entries, "one"))[0].refused
    assert [entry[:2] for entry in refused] == [entry[:2] for entry in entries]
    assert holding(join(second, "audit", "two", held=holding(awake))) == holding(awake)
    deadline = time.monotonic() + PATIENCE_S
    while not again.queues:
        assert time.monotonic() < deadline
        again = join(first, "billing", "one")
    assert {(topic, queue_id, offset) for topic, queue_id, _, offset in again.queues} >= set(resets)


def test_groups_are_rebalanced_in_order(store: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new role, unreleased queues and a disconnected client with members of all groups.

    In every process: the order of a set of texts is another one in each.
    """
    store.restart()
    groups, names, shared = store.role._groups, [f"g{number:02}" for number in range(20)], list[str]()
    groups._rebalance_from_ns = time.monotonic_ns() + SESSION_MS_MAX * MS
    assign, first, second = groups._rebalance, store.connect(), store.connect()

    def noted(group: str) -> None:
        shared.append(group)
        assign(group)

    for name in names[::-1]:
        join(first, name, "one")
    monkeypatch.setattr(groups, "_rebalance", noted)
    groups._rebalance_from_ns = 0
    wait_until(lambda: store.step() >= 0 and len(shared) == len(names), PATIENCE_S, "rebalances")
    assert shared == names
    for name in names[::-1]:
        join(second, name, "two")
    shared.clear()
    groups._run_periodic(time.monotonic_ns() + SESSION_MS_MAX * MS)
    wait_until(lambda: store.step() >= 0 and len(shared) == len(names), PATIENCE_S, "rebalances")
    assert shared == names
    shared.clear()
    first.sock.close()
    wait_until(lambda: store.step() >= 0 and len(shared) == len(names), PATIENCE_S, "the end of members")
    assert shared == names


def test_groups_are_rebalanced_in_steps_after_a_new_queue(store: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """One group a step, so that thousands of them do not delay other clients."""
    monkeypatch.setattr(coordinator, "STEP_NS", 0)
    caller, names = store.connect(), [f"g{number:02}" for number in range(20)]
    joined = {name: len(join(caller, name, "one").queues) for name in names}
    store.store.engine.table.create_queue("Orders", 4)

    def wider() -> list[str]:
        members = store.role._groups.members()
        return [name for name in names if len(members[name].queues_of("one")) > joined[name]]

    for step in range(1, len(names) + 1):
        store.step()
        assert wider() == names[:step]
    assert caller.call(Operation.PING, Empty())[0] == Empty()


def test_members_of_a_closed_connection_leave_in_one_rebalance(store: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = store.connect(), store.connect()
    for number in range(30):
        join(first, "billing", f"m{number}")
    join(second, "billing", "stays")
    rebalanced = []
    monkeypatch.setattr(GroupMembers, "rebalance", lambda *given: rebalanced.append(given) or True)
    first.sock.close()
    members = store.role._groups.members()["billing"].members
    wait_until(lambda: store.step() >= 0 and len(members) == 1, PATIENCE_S, "the end of members")
    store.step()
    assert len(rebalanced) == 1


def test_member_can_rejoin_only_after_its_old_connection_closes(store: Group) -> None:
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


def test_slow_reader_does_not_delay_heartbeats_or_session_expiry(store: Group) -> None:
    """Requests of the slow reader wait; the role sleeps until the next deadline of the others."""
    slow, stays, silent = store.connect(), store.connect(), store.connect()
    slow.call(Operation.PING, Empty())
    unread = next(iter(store.role._server.connections.values()))
    slow.ask(Operation.PING, Empty())
    store.role._enqueue(store.role._server.poll(0))
    unread.paused = True
    join(silent, "audit", "silent", SESSION_MS_MIN)
    beating = beat(stays, "billing", join(stays, "billing", "stays", SESSION_MS_MIN))
    found = wait_until(stays.answer, PATIENCE_S, "an answer to the heartbeat")
    assert (found[0], found[1].changed) == (beating, False)
    wait_until(lambda: store.step() >= 0 and "audit" not in store.role._groups.members(), PATIENCE_S, "a session's end")
    join(stays, "billing", "stays", SESSION_MS_MAX)

    def is_idle() -> bool:
        return store.step() == 0 and store.role._groups.seconds_left(time.monotonic_ns(), 9.0) == 9.0

    wait_until(is_idle, PATIENCE_S, "a role that sleeps")
    assert store.control.words[words_of.QUERY_WAITING] == 1
    unread.paused = False
    assert slow.answer() is not None


def test_heartbeats_are_answered_under_constant_requests(store: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new request arrives with each step: no member may expire, as silence is not known."""
    monkeypatch.setattr("mqproc.roles.query.role.STEP_NS", 0)
    member, others = store.connect(), [store.connect() for _ in range(4)]
    beating = beat(member, "billing", join(member, "billing", "one", SESSION_MS_MIN))

    def answered() -> Any:
        for other in others:
            other.ask(Operation.PING, Empty())
        return member.answer()

    found = wait_until(answered, PATIENCE_S, "an answer to the heartbeat")
    assert (found[0], found[1].changed) == (beating, False)
    assert store.control.words[words_of.QUERY_WAITING] > 0


def test_session_expires_only_after_requests_in_it_were_served(store: Group) -> None:
    caller = store.connect()
    join(caller, "billing", "one", SESSION_MS_MIN)
    groups = store.role._groups
    last_seen_ns = groups.members()["billing"].members["one"].last_seen_ns
    over_ns = last_seen_ns + SESSION_MS_MIN * MS + 2
    groups.step(over_ns, last_seen_ns + SESSION_MS_MIN * MS)
    assert "billing" in groups.members(), "its heartbeat may be among what waits"
    groups.step(over_ns, over_ns)
    assert "billing" not in groups.members()


def test_idle_role_does_not_extend_sessions(store: Group) -> None:
    """The role wakes shortly after MAX_WAIT_S; only a stopped role has missed requests."""
    caller = store.connect()
    join(caller, "billing", "one", 5_000)
    groups = store.role._groups
    last_seen_ns = groups.members()["billing"].members["one"].last_seen_ns
    for waits in range(1, 6):
        now_ns = last_seen_ns + waits * round(1.001 * MAX_WAIT_S * 1e9)
        groups.step(now_ns, now_ns)
        assert ("billing" in groups.members()) is (waits < 5)
    join(caller, "billing", "two", 5_000)
    last_seen_ns = groups.members()["billing"].members["two"].last_seen_ns
    groups.step(last_seen_ns, last_seen_ns)
    groups.step(last_seen_ns + 60_000 * MS, last_seen_ns + 60_000 * MS)
    assert "billing" in groups.members(), "nothing was read meanwhile"


def test_clients_with_many_members_may_fail_together(store: Group) -> None:
    """Reporting the end of each member to the others finds their connections closed."""
    stays, callers = store.connect(), [store.connect() for _ in range(8)]
    for number, caller in enumerate(callers):
        join(caller, "billing", f"m{number}", SESSION_MS_MIN)
    for number, caller in enumerate(callers):
        beat(caller, "billing", join(caller, "billing", f"m{number}", SESSION_MS_MIN))
    assert stays.answer() is None
    members = store.role._groups.members()
    assert len(members["billing"].members) == 8
    for caller in callers:
        caller.sock.close()
    wait_until(lambda: store.step() >= 0 and "billing" not in members, PATIENCE_S, "the end of all")
    assert "Orders" in {queue[0] for queue in join(stays, "billing", "new").queues}


@pytest.mark.parametrize("at", ["heartbeat", "deadline", "join", "stop"])
def test_member_may_be_lost_while_answering_it(store: Group, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    stays, dies = store.connect(), store.connect()
    assigned = join(dies, "billing", "dies", SESSION_MS_MIN)
    beat(dies, "billing", assigned)
    assert stays.answer() is None
    groups = store.role._groups
    (dying,) = groups._of_connection
    answer = ServerConnection.answer

    def lost(connection: ServerConnection, *given: Any, **named: Any) -> None:
        if connection is dying:
            connection.close()
        answer(connection, *given, **named)

    monkeypatch.setattr(ServerConnection, "answer", lost)
    now_ns = time.monotonic_ns()
    if at == "heartbeat":
        beat(dies, "billing", assigned)
        store.step()
    elif at == "deadline":
        groups.step(now_ns + SESSION_MS_MIN * MS // 2, now_ns + SESSION_MS_MIN * MS // 2)
    elif at == "join":
        beat(stays, "billing", join(stays, "billing", "other"))
        found = stays.answer()
        assert found is not None
        assert [queue[:2] for queue in found[1].queues] == [queue[:2] for queue in assigned.queues]
    else:
        groups.on_stop()
    assert dying.closed
    assert [list(members.members) for members in groups.members().values()] == ([["other"]] if at == "join" else [])
    over_ns = now_ns + 2 * SESSION_MS_MIN * MS
    groups.step(over_ns, over_ns)
    assert groups.seconds_left(over_ns, 9.0) > 0
