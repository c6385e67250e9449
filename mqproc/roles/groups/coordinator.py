"""Group coordinator of the query role: membership, queue assignment, committed offsets.

    join ──▶ member ──heartbeat, held until its queues change──▶ assignment
                   ──commit──▶ a word of mqproc/progress ──every 5 s──▶ consumerOffset.json
                   ──connection closed, or session timeout──▶ its queues are reassigned

Offsets and settings are persistent (`store.offsets`). Membership is not: after a restart of the role members rejoin.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from mqproc.errors import BadRequestError, GroupInUseError, MqprocError, NotAMemberError, StoreBusyError
from mqproc.ipc.bell import MAX_WAIT_S
from mqproc.ipc.counters import error_counter
from mqproc.layout import control
from mqproc.roles.groups.assignment import Queue
from mqproc.roles.groups.filters import GroupFilters
from mqproc.roles.groups.members import GroupMembers, MemberSession
from mqproc.roles.groups.state import ConsumerGroupState
from mqproc.roles.request_limits import PendingRequest, TimerQueue
from mqproc.roles.role import RoleContext
from mqproc.roles.role_log import get_logger
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.cooperative import Slices
from mqproc.store.offsets.offset_store import UNWRITABLE_ERRNOS
from mqproc.topic_names import check_topic, retry_topic
from mqproc.util.units import counted
from mqproc.wire.address import peer_pid
from mqproc.wire.connection import ServerConnection
from mqproc.wire.operations import (
    AT_TIME,
    EARLIEST,
    LATEST,
    SESSION_MS_MAX,
    SESSION_MS_MIN,
    Assigned,
    Empty,
    GroupAssignment,
    GroupCommitAnswer,
    GroupCommitRequest,
    GroupHeartbeatRequest,
    GroupJoinRequest,
    GroupLeaveRequest,
    GroupReleaseRequest,
    GroupRequest,
    GroupResetRequest,
    GroupSettingsRequest,
    Operation,
)

HEARTBEATS_PER_SESSION: Final = 3
HEARTBEAT_SESSION_NS_MAX: Final = 12_000_000_000
"""Longer sessions have heartbeats as often as this one: offsets are committed with them, within 5 s."""
TICKS_PER_SESSION: Final = 20
"""Held heartbeats are answered at common ticks, since a wake-up of the role costs more than several answers. Two holds
with their ticks fit well into a session, so a member has its answer before it must assume that it was removed."""
MEMBERS_OF_A_GROUP_MAX: Final = 4096
TOPICS_OF_A_MEMBER_MAX: Final = 4096
REJOIN_NS: Final = 300_000_000
"""Time for members to rejoin after a restart of the role, before queues are assigned."""
PERIOD_NS: Final = 100_000_000
STEP_NS: Final = 5_000_000
COMMITS_PER_SLICE: Final = 1024
STALL_NS: Final = round(2 * MAX_WAIT_S * 1e9)
"""A stall of the role itself for longer than this extends all sessions. It exceeds the wait of an idle role, or each
wait would extend them and a dead member might stay for minutes."""
NO_EPOCH: Final = -1
EPOCH_MAX: Final = 1 << 53
"""Far above any allocated epoch, far below the range of the file's word."""
MemberKey = tuple[str, str]
"""Group and member id. Clients choose the id when they rejoin, so an id is unique within its group only."""


class DeferredDisconnects:
    """Defers disconnects, which sending an answer may detect, to the end of a `with` block."""

    def __init__(self, forget: Callable[[ServerConnection], None]) -> None:
        """`forget` may detect further disconnects, which are handled after it."""
        self._forget = forget
        self._disconnects: list[ServerConnection] = []
        self._at_work = False

    def add(self, connection: ServerConnection) -> None:
        """Handle a disconnect, after the `with` block if inside one."""
        self._disconnects.append(connection)
        if not self._at_work:
            self.__exit__()

    def __enter__(self) -> None:
        self._at_work = True

    def __exit__(self, *_: object) -> None:
        self._at_work = True
        try:
            while self._disconnects:
                self._forget(self._disconnects.pop())
        finally:
            self._at_work = False


class GroupCoordinator:
    """Coordinates all consumer groups of a store."""

    def __init__(self, context: RoleContext, state: ConsumerGroupState, table: QueueTable) -> None:
        self._clock = context.clock
        self._words = context.control.words
        self._count_refusal = error_counter(self._words, control.QUERY)
        self._log = get_logger()
        self.state = state
        self._table = table
        self._groups: dict[str, GroupMembers] = {}
        self.filters = GroupFilters(context.clock, self._groups)
        self._epochs: dict[str, dict[Queue, int]] = {}
        """Newest epochs of the groups' queues, also of groups without members."""
        self._held: dict[MemberKey, tuple[PendingRequest, int]] = {}
        """Heartbeats that are answered when the assignment changes, or at their deadline in monotonic ns."""
        self._of_connection: dict[ServerConnection, set[MemberKey]] = {}
        self._disconnects = DeferredDisconnects(self._remove_members_of)
        self._deadlines: TimerQueue[MemberKey] = TimerQueue()
        self._table_changes = table.changes
        now_ns = self._clock.monotonic_ns()
        self._rebalance_from_ns = now_ns + REJOIN_NS if context.incarnation > 1 else now_ns
        self._pending_rebalance: set[str] = set()
        self._changed: dict[str, None] = {}
        """Groups to rebalance in the next steps, in order."""
        self._rebalanced: set[str] = set()
        self._seen_ns = self._period_ns = now_ns

    def members(self) -> Mapping[str, GroupMembers]:
        return self._groups

    # Called by the role

    def handle(self, request: PendingRequest) -> None:
        """Answer a request or hold it. Raises the error that refuses it."""
        with self._disconnects:
            _HANDLERS[Operation(request.operation)](self, request, request.options)

    def start(self, request: PendingRequest) -> Slices[None]:
        """Slices that answer one of LONG_GROUP_OPERATIONS, or raise the error that refuses it."""
        return _LONG_HANDLERS[Operation(request.operation)](self, request, request.options)

    def step(self, now_ns: int, served_to_ns: int) -> int:
        """Handle timeouts and queue changes; requests up to `served_to_ns` have been handled."""
        with self._disconnects:
            done = self._check_table()
            if now_ns - self._seen_ns > STALL_NS:
                self._extend_sessions(now_ns - self._seen_ns)
            self._seen_ns = now_ns
            done += self._expire(now_ns, served_to_ns)
            if now_ns >= self._period_ns:
                self._period_ns = now_ns + PERIOD_NS
                done += self._run_periodic(now_ns)
            done += self._rebalance_changed()
        return done

    def seconds_left(self, now_ns: int, at_most_s: float) -> float:
        """Time until `step` has work, `at_most_s` at most."""
        if self._changed:
            return 0.0
        left_s = self._deadlines.seconds_left(now_ns, at_most_s)
        if self._pending_rebalance or self._revoking_groups():
            left_s = min(left_s, max(0.0, (self._period_ns - now_ns) / 1e9))
        return left_s

    def drop(self, connection: ServerConnection) -> None:
        """Remove the members of a closed connection, deferred until the current call has ended."""
        self._disconnects.add(connection)

    def _remove_members_of(self, connection: ServerConnection) -> None:
        self._remove_members(self._of_connection.pop(connection, ()), "its connection is closed")

    def on_stop(self) -> None:
        """Answer held heartbeats and save offsets."""
        with self._disconnects:
            for key in list(self._held):
                self._answer_heartbeat(key)
        self.state.save()

    def _run_periodic(self, now_ns: int) -> int:
        done = 0
        for group in sorted(self._revoking_groups()):
            if freed := self._groups[group].free_overdue(now_ns):
                self._log.warning("queues were not released in time", group=group, queues=freed)
                self._changed[group] = None
                done += 1
        if self._pending_rebalance and now_ns >= self._rebalance_from_ns:
            self._changed |= dict.fromkeys(sorted(self._pending_rebalance))
            self._pending_rebalance.clear()
            done += 1
        return done + self.state.step(now_ns)

    def _check_table(self) -> int:
        changes = self._table.changes
        if changes == self._table_changes:
            return 0
        self._table_changes = changes
        self._changed |= dict.fromkeys(self._groups)
        return 1

    # Deadlines: one per member, of its held heartbeat or of its session

    def _set_deadline(self, group: str, member: MemberSession) -> None:
        key = group, member.member_id
        held = self._held.get(key)
        due_ns = held[1] if held is not None else member.last_seen_ns + member.session_ns + 1
        self._deadlines.set(key, due_ns)

    def _expire(self, now_ns: int, served_to_ns: int) -> int:
        due = self._deadlines.pop_due(now_ns)
        silent: dict[int, list[MemberKey]] = {}
        for key in due:
            group, member_id = key
            members = self._groups.get(group)
            member = members.members.get(member_id) if members is not None else None
            if member is None:
                continue
            if key in self._held:
                self._answer_heartbeat(key)
            elif served_to_ns - member.last_seen_ns > member.session_ns:
                silent.setdefault(member.session_ns, []).append(key)
            else:
                self._set_deadline(group, member)
        for session_ns, keys in silent.items():
            self._remove_members(keys, f"silent for {session_ns / 1e9:g} s")
        return len(due)

    def _extend_sessions(self, stall_ns: int) -> None:
        for group, of in self._groups.items():
            for member in of.members.values():
                member.last_seen_ns += stall_ns
                self._set_deadline(group, member)

    # Members

    def _join(self, request: PendingRequest, options: GroupJoinRequest) -> Slices[None]:
        topics = _topics_of(options)
        _check_holding(options)
        with self._disconnects:
            self._admit(request, options, topics)
        # A member that rejoins has been waiting for these topics all the time.
        start = EARLIEST if options.member_id else options.start
        yield from self.state.start_offsets(options.group, topics, start, options.start_ms)
        with self._disconnects:
            # Again, since other members may have joined meanwhile.
            self._admit(request, options, topics)
            self._add_member(request, options, topics)

    def _admit(self, request: PendingRequest, options: GroupJoinRequest, topics: Sequence[str]) -> None:
        """Check whether a member may join; if asked to, change the group's filter for it."""
        group = options.group
        self._check_disconnected(request, options)
        if not options.change_filter:
            self.filters.check(group, topics, options.filter, options.member_id)
        self.state.ensure_group(group)
        if not options.member_id:
            self.state.check_may_consume(group)
        self.state.progress.check_writable()
        if options.change_filter:
            self._change_filter(group, topics, options.filter)

    def _add_member(self, request: PendingRequest, options: GroupJoinRequest, topics: tuple[str, ...]) -> None:
        group = options.group
        members = self._groups.setdefault(group, self._empty_members(group))
        if len(members.members) >= MEMBERS_OF_A_GROUP_MAX and options.member_id not in members.members:
            raise BadRequestError(f"group {group} has {MEMBERS_OF_A_GROUP_MAX:,} members already")
        member_id = options.member_id or secrets.token_hex(8)
        session_ms = min(max(options.session_timeout_ms, SESSION_MS_MIN), SESSION_MS_MAX)
        now_ns = self._clock.monotonic_ns()
        pid = peer_pid(request.connection.sock)
        session = session_ms * 1_000_000, now_ns, request.connection, pid, options.filter
        member = MemberSession(member_id, options.name, topics, *session)
        if member_id in members.members:
            self._forget_connection(group, members.members[member_id])
        took = members.join(member, options.holding)
        self._of_connection.setdefault(request.connection, set()).add((group, member_id))
        self._set_deadline(group, member)
        self._log.info("joined", group=group, member=member_id, name=options.name, pid=pid)
        if took:
            self._notify_members(group)
        self._rebalance(group)
        request.answer(self._assignment(group, member))

    def _change_filter(self, group: str, topics: Sequence[str], filter: str) -> None:
        """Remove members with another filter; when they join again they are refused."""
        others = self.filters.other_members(group, topics, filter)
        self._remove_members(
            ((group, member.member_id) for member, _ in others), f"the group's filter is {filter!r} now"
        )
        self.filters.forget(group, topics)

    def _empty_members(self, group: str) -> GroupMembers:
        progress = self.state.progress
        oldest_epoch_of = functools.partial(progress.oldest_epoch, group)
        return GroupMembers(progress.allocate_epoch, self._epochs.setdefault(group, {}), oldest_epoch_of)

    def _check_disconnected(self, request: PendingRequest, options: GroupJoinRequest) -> None:
        """Raise StoreBusyError while the old connection of a rejoining member is open.

        Both connections would own its queues.
        """
        members = self._groups.get(options.group)
        before = members.members.get(options.member_id) if members is not None else None
        if before is None or before.owner is request.connection:
            return
        assert isinstance(before.owner, ServerConnection)
        if not before.owner.closed:
            place = f"member {options.member_id!r} of group {options.group}"
            raise StoreBusyError(f"{place} is still on another connection", hint_ms=20)

    def _forget_connection(self, group: str, member: MemberSession) -> None:
        assert isinstance(member.owner, ServerConnection)
        self._of_connection.get(member.owner, set()).discard((group, member.member_id))

    def _heartbeat(self, request: PendingRequest, options: GroupHeartbeatRequest) -> None:
        member = self._touch(options.group, options.member_id, request.connection)
        key = options.group, member.member_id
        if key in self._held:
            self._answer_heartbeat(key)
        if member.generation != options.generation:
            request.answer(self._assignment(options.group, member))
        else:
            self._held[key] = request, heartbeat_due_ns(member.last_seen_ns, member.session_ns)
        self._set_deadline(options.group, member)

    def _answer_heartbeat(self, key: MemberKey, queues: Sequence[tuple[Queue, int]] | None = None) -> None:
        """Answer a held heartbeat, with the assignment if it has changed, as `_assignment`."""
        request, _ = self._held.pop(key)
        options: GroupHeartbeatRequest = request.options
        members = self._groups.get(options.group)
        member = members.members.get(options.member_id) if members else None
        if member is None:
            return
        if member.generation == options.generation:
            request.answer(GroupAssignment(options.member_id, member.generation, changed=False))
        else:
            request.answer(self._assignment(options.group, member, queues))
        self._set_deadline(options.group, member)

    def _assignment(
        self, group: str, member: MemberSession, queues: Sequence[tuple[Queue, int]] | None = None
    ) -> GroupAssignment:
        """The member's queues, which are looked up unless given as `queues`."""
        if queues is None:
            queues = self._groups[group].queues_of(member.member_id)
        assigned = [
            (topic, queue_id, epoch, self.state.progress.offset(group, topic, queue_id) or 0)
            for (topic, queue_id), epoch in queues
        ]
        heartbeat_ms = min(member.session_ns, HEARTBEAT_SESSION_NS_MAX) // HEARTBEATS_PER_SESSION // 1_000_000
        return GroupAssignment(member.member_id, member.generation, True, assigned, heartbeat_ms)

    def _release(self, request: PendingRequest, options: GroupReleaseRequest) -> None:
        self._touch(options.group, options.member_id)
        if self._groups[options.group].release(options.member_id, options.generation):
            self._rebalance(options.group)
        request.answer(Empty())

    def _leave(self, request: PendingRequest, options: GroupLeaveRequest) -> None:
        members = self._groups.get(options.group)
        if members is not None and options.member_id in members.members:
            self._remove_members([(options.group, options.member_id)], "it left")
        request.answer(Empty())

    def _touch(self, group: str, member_id: str, connection: ServerConnection | None = None) -> MemberSession:
        """Find the member of a request and renew its session; `connection` must be its own if given."""
        members = self._groups.get(group)
        member = members.members.get(member_id) if members is not None else None
        if member is None or connection not in (None, member.owner):
            raise NotAMemberError(f"group {group} has no member {member_id!r} now")
        member.last_seen_ns = self._clock.monotonic_ns()
        return member

    def _remove_members(self, keys: Iterable[MemberKey], why: str) -> None:
        """Remove members; the queues of each of their groups are reassigned once."""
        by_group: dict[str, list[str]] = {}
        for group, member_id in sorted(keys):
            by_group.setdefault(group, []).append(member_id)
        for group, member_ids in by_group.items():
            members = self._groups[group]
            for member_id in member_ids:
                self._forget_connection(group, members.members[member_id])
                self._deadlines.forget((group, member_id))
                held = self._held.pop((group, member_id), None)
                if held is not None:
                    # Answer without queues; its next request is refused with NotAMemberError.
                    held[0].answer(GroupAssignment(member_id, members.generation + 1))
                self._log.info("left", group=group, member=member_id, why=why)
            members.leave(*member_ids)
            if members.members:
                self._changed[group] = None
            else:
                self._remove_group(group)

    def _remove_group(self, group: str) -> None:
        """Drop a group without members; its offsets and settings are stored."""
        del self._groups[group]
        self._pending_rebalance.discard(group)
        self._changed.pop(group, None)
        self.state.forget_awaited(group)
        self._publish_member_count()

    def _revoking_groups(self) -> set[str]:
        """Groups with revoked queues that their members have not released yet."""
        for group in list(self._rebalanced):
            members = self._groups.get(group)
            if members is None or not any(holding.revoked_in for holding in members.holdings.values()):
                self._rebalanced.discard(group)
        return self._rebalanced

    # Assignment

    def _rebalance_changed(self) -> int:
        """Rebalance groups whose queues or members have changed until the step's time is over."""
        end_ns, done = self._clock.monotonic_ns() + STEP_NS, 0
        while self._changed and (not done or self._clock.monotonic_ns() < end_ns):
            self._rebalance(next(iter(self._changed)))
            done += 1
        return done

    def _rebalance(self, group: str) -> None:
        """Reassign a group's queues and notify members whose queues have changed."""
        self._changed.pop(group, None)
        now_ns = self._clock.monotonic_ns()
        if now_ns < self._rebalance_from_ns:
            self._pending_rebalance.add(group)
            return
        members = self._groups[group]
        try:
            queues = {topic: self.state.init_offsets(group, topic, EARLIEST) for topic in members.topics}
        except OSError as error:
            if error.errno not in UNWRITABLE_ERRNOS:
                raise
            self._log.warning("rebalance is delayed: the group's offsets cannot be written", group=group)
            self._pending_rebalance.add(group)
            return
        # Members of a disabled group stay, without queues.
        if members.rebalance(queues if self.state.settings.of(group).consume_enable else {}, now_ns):
            self._rebalanced.add(group)
            self._words.add(control.GROUP_REBALANCES, 1)
            self._notify_members(group)
        self._publish_member_count()

    def _notify_members(self, group: str) -> None:
        members, changed = self._groups[group], []
        for member_id, member in members.members.items():
            held = self._held.get((group, member_id))
            if held is not None and held[0].options.generation != member.generation:
                changed.append(member_id)
        queues = members.queues_by_member() if changed else {}
        for member_id in changed:
            self._answer_heartbeat((group, member_id), queues.get(member_id, ()))

    def _publish_member_count(self) -> None:
        self._words[control.GROUP_MEMBERS] = sum(len(of.members) for of in self._groups.values())

    # Offsets and settings

    def _commit(self, request: PendingRequest, options: GroupCommitRequest) -> Slices[None]:
        if options.member_id:
            self._touch(options.group, options.member_id)
        else:
            self.state.ensure_group(options.group)
        refused = []
        for number, entry in enumerate(options.offsets, 1):
            if number % COMMITS_PER_SLICE == 0:
                yield
            try:
                self._commit_one(options.group, options.member_id, entry)
            except MqprocError as error:
                refused.append((entry[0], entry[1], error.code, str(error)))
                self._count_refusal(error.code)
        self._words.add(control.GROUP_COMMITS, len(options.offsets) - len(refused))
        request.answer(GroupCommitAnswer(refused))

    def _commit_one(self, group: str, member_id: str, entry: Assigned) -> None:
        topic, queue_id, epoch, offset = entry
        members = self._groups.get(group)
        if epoch == NO_EPOCH:
            if members is not None and (holder := members.holder_of((topic, queue_id))):
                raise GroupInUseError(f"group {group}: member {holder} has {topic}/{queue_id}")
        elif members is None or not members.may_commit(member_id, (topic, queue_id), epoch):
            raise NotAMemberError(f"group {group}: {topic}/{queue_id} is not with member {member_id} any more")
        self.state.commit(group, topic, queue_id, offset)

    def _reset(self, request: PendingRequest, options: GroupResetRequest) -> Slices[None]:
        group = options.group
        self.state.ensure_group(group)

        def renew_epochs(offsets: Sequence[tuple[str, int, int]]) -> None:
            members = self._groups.get(group) or self._empty_members(group)
            members.renew_epochs((topic, queue_id) for topic, queue_id, _ in offsets)

        yield from self.state.reset(group, options.offsets, renew_epochs)
        with self._disconnects:
            if group in self._groups:
                self._notify_members(group)
            request.answer(Empty())

    def _change_settings(self, request: PendingRequest, options: GroupSettingsRequest) -> None:
        self.state.change_settings(options)
        if options.group in self._groups:
            self._rebalance(options.group)
        request.answer(Empty())

    def _delete(self, request: PendingRequest, options: GroupRequest) -> None:
        group = options.group
        if group in self._groups:
            raise GroupInUseError(f"group {group} has {counted(len(self._groups[group].members), 'member')} now")
        self.state.delete(group)
        self._epochs.pop(group, None)
        self.filters.forget_group(group)
        request.answer(Empty())


_HANDLERS: dict[Operation, Callable[[GroupCoordinator, PendingRequest, Any], None]] = {
    Operation.GROUP_HEARTBEAT: GroupCoordinator._heartbeat,
    Operation.GROUP_RELEASE: GroupCoordinator._release,
    Operation.GROUP_LEAVE: GroupCoordinator._leave,
    Operation.GROUP_SETTINGS: GroupCoordinator._change_settings,
    Operation.GROUP_DELETE: GroupCoordinator._delete,
}
GROUP_OPERATIONS = frozenset(_HANDLERS)
"""Operations of `handle`."""
_LONG_HANDLERS: dict[Operation, Callable[[GroupCoordinator, PendingRequest, Any], Slices[None]]] = {
    Operation.GROUP_JOIN: GroupCoordinator._join,
    Operation.GROUP_COMMIT: GroupCoordinator._commit,
    Operation.GROUP_RESET: GroupCoordinator._reset,
}
LONG_GROUP_OPERATIONS = frozenset(_LONG_HANDLERS)
"""Operations of `start`: they may name thousands of queues."""


def _check_holding(options: GroupJoinRequest) -> None:
    """Raise BadRequestError for an epoch outside the range of allocated epochs."""
    for topic, queue_id, epoch in options.holding:
        if not 0 < epoch <= EPOCH_MAX:
            held = f"a member of group {options.group} has {topic}/{queue_id} of epoch {epoch:,}"
            raise BadRequestError(f"{held}; from 1 to {EPOCH_MAX:,}")


def heartbeat_due_ns(last_seen_ns: int, session_ns: int) -> int:
    """Time to answer a heartbeat without changes: the tick after its fraction of the session."""
    session_ns = min(session_ns, HEARTBEAT_SESSION_NS_MAX)
    due_ns = last_seen_ns + session_ns // HEARTBEATS_PER_SESSION
    return due_ns + -due_ns % (session_ns // TICKS_PER_SESSION)


def _topics_of(options: GroupJoinRequest) -> tuple[str, ...]:
    """Topics of a member: those that it names and the group's retry topic."""
    if not 1 <= len(options.topics) <= TOPICS_OF_A_MEMBER_MAX:
        limit = f"from 1 to {TOPICS_OF_A_MEMBER_MAX:,}"
        raise BadRequestError(f"a member of group {options.group} wants {len(options.topics)} topics; {limit}")
    for topic in options.topics:
        check_topic(topic)
    if options.start not in (EARLIEST, LATEST, AT_TIME):
        raise BadRequestError(f"start = {options.start!r} is not one of {EARLIEST}, {LATEST}, {AT_TIME}")
    return tuple(dict.fromkeys((*options.topics, retry_topic(options.group))))
