"""Members of one consumer group and the queues that they hold; without I/O or clock.

    free ──assign──▶ held ──revoke──▶ revoked ──release, or timeout──▶ free

A queue that moves to another member is revoked first: its holder learns this with its next assignment, finishes its
current work, commits and releases the queue. Only then is it assigned to the other member. Each assignment of a queue
has its own epoch, and a commit with an older epoch is refused, so a member that was too slow changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from mqproc.roles.groups.assignment import Queue, assign

NOT_REVOKED: Final = 0


@dataclass(slots=True, eq=False)
class MemberSession:
    """A consumer; `generation` of its last assignment, `last_seen_ns` of its last request."""

    member_id: str
    name: str
    topics: tuple[str, ...]
    session_ns: int
    last_seen_ns: int
    owner: object
    """Connection; the member is removed when it closes."""
    pid: int = 0
    filter: str = "*"
    generation: int = 0


@dataclass(slots=True)
class Holding:
    """A queue held by a member. `revoked_in`: the generation in which it was revoked."""

    member_id: str
    epoch: int
    revoked_in: int = NOT_REVOKED
    revoke_deadline_ns: int = 0


@dataclass(slots=True)
class GroupMembers:
    """One group. `allocate_epoch(above)` returns a number above `above` and all earlier numbers.

    `newest_epochs`: the epoch of each queue's last assignment or reset, which outlives the members. A member that
    rejoins with an older epoch does not get the queue back, since others may have held it.
    `oldest_epoch_of(topic, queue_id)` is the lower bound for queues without an entry, as after a restart.
    """

    allocate_epoch: Callable[[int], int]
    newest_epochs: dict[Queue, int] = field(default_factory=dict)
    oldest_epoch_of: Callable[[str, int], int] = lambda _topic, _queue_id: 0
    members: dict[str, MemberSession] = field(default_factory=dict)
    holdings: dict[Queue, Holding] = field(default_factory=dict)
    generation: int = 0
    _assignment: dict[Queue, str] = field(default_factory=dict)

    @property
    def topics(self) -> list[str]:
        """Topics of all members, sorted."""
        return sorted({topic for member in self.members.values() for topic in member.topics})

    def join(self, member: MemberSession, holding: Iterable[tuple[str, int, int]] = ()) -> bool:
        """Add a member or let it rejoin; returns whether another member has lost a queue to it.

        `holding`: queues with epochs that it has held. If two members hold a queue, the newer epoch wins.
        """
        before = self.members.get(member.member_id)
        if before is not None:
            member.generation = before.generation
        self.members[member.member_id] = member
        losers: set[str] = set()
        for topic, queue_id, epoch in holding:
            queue = topic, queue_id
            newest_epochs = self.newest_epochs.get(queue) or self.oldest_epoch_of(topic, queue_id)
            if topic in member.topics and (
                epoch > newest_epochs or (epoch == newest_epochs and queue not in self.holdings)
            ):
                if queue in self.holdings:
                    losers.add(self.holdings[queue].member_id)
                self.allocate_epoch(epoch)
                self.newest_epochs[queue] = epoch
                self.holdings[queue] = Holding(member.member_id, epoch)
                self._assignment[queue] = member.member_id
        return self._change(losers)

    def leave(self, *member_ids: str) -> None:
        """Remove members; their queues become free."""
        for member_id in member_ids:
            del self.members[member_id]
        self.holdings = {queue: of for queue, of in self.holdings.items() if of.member_id in self.members}

    def release(self, member_id: str, generation: int) -> int:
        """Free the queues that a member releases, revoked up to `generation`; returns how many."""
        released = [
            queue
            for queue, of in self.holdings.items()
            if of.member_id == member_id and NOT_REVOKED < of.revoked_in <= generation
        ]
        for queue in released:
            del self.holdings[queue]
        return len(released)

    def free_overdue(self, now_ns: int) -> int:
        """Free revoked queues that were not released in time; returns how many."""
        overdue = [
            queue
            for queue, of in self.holdings.items()
            if of.revoked_in != NOT_REVOKED and now_ns > of.revoke_deadline_ns
        ]
        for queue in overdue:
            del self.holdings[queue]
        return len(overdue)

    def rebalance(self, queues: Mapping[str, Sequence[int]], now_ns: int) -> bool:
        """Reassign the queues of the subscribed topics; returns whether any member's queues changed."""
        subscribers: dict[str, list[str]] = {}
        for member_id in sorted(self.members):
            for topic in self.members[member_id].topics:
                subscribers.setdefault(topic, []).append(member_id)
        self._assignment = assign(queues, subscribers, self._assignment)
        next_generation = self.generation + 1
        changed: set[str] = set()
        for queue, of in self.holdings.items():
            if of.revoked_in == NOT_REVOKED and self._assignment.get(queue) != of.member_id:
                of.revoked_in = next_generation
                of.revoke_deadline_ns = now_ns + self.members[of.member_id].session_ns
                changed.add(of.member_id)
        free = [(queue, member_id) for queue, member_id in self._assignment.items() if queue not in self.holdings]
        if free:
            epoch = self.allocate_epoch(0)
            for queue, member_id in free:
                self.newest_epochs[queue] = epoch
                self.holdings[queue] = Holding(member_id, epoch)
                changed.add(member_id)
        return self._change(changed)

    def renew_epochs(self, queues: Iterable[Queue]) -> bool:
        """Give queues new epochs after a reset; returns whether any is held."""
        changed: set[str] = set()
        epoch = self.allocate_epoch(0)
        for queue in queues:
            self.newest_epochs[queue] = epoch
            of = self.holdings.get(queue)
            if of is not None:
                # A member that is releasing it does not learn the new epoch, so its commits cannot undo the reset.
                of.epoch = epoch
                if of.revoked_in == NOT_REVOKED:
                    changed.add(of.member_id)
        return self._change(changed)

    def _change(self, changed: set[str]) -> bool:
        if changed:
            self.generation += 1
            for member_id in changed:
                self.members[member_id].generation = self.generation
        return bool(changed)

    def queues_of(self, member_id: str) -> list[tuple[Queue, int]]:
        """Assigned queues of a member, with epochs."""
        return sorted(
            (queue, of.epoch)
            for queue, of in self.holdings.items()
            if of.member_id == member_id and of.revoked_in == NOT_REVOKED
        )

    def queues_by_member(self) -> dict[str, list[tuple[Queue, int]]]:
        """`queues_of` of all members that have any, in one pass over the group's queues."""
        found: dict[str, list[tuple[Queue, int]]] = {}
        for queue, of in self.holdings.items():
            if of.revoked_in == NOT_REVOKED:
                found.setdefault(of.member_id, []).append((queue, of.epoch))
        for queues in found.values():
            queues.sort()
        return found

    def holder_of(self, queue: Queue) -> str:
        """Member that holds a queue, "" if none."""
        of = self.holdings.get(queue)
        return of.member_id if of is not None else ""

    def may_commit(self, member_id: str, queue: Queue, epoch: int) -> bool:
        """Whether a member holds a queue with this epoch."""
        of = self.holdings.get(queue)
        return of is not None and (of.member_id, of.epoch) == (member_id, epoch)
