"""The members of one consumer group and who has which queue. Nothing here knows sockets, files or the clock.

    nobody's ──give──▶ a member's ──take away──▶ given up ──release, or its time is over──▶ nobody's

A queue that shall go from one member to another is first taken away: its member learns so with its next assignment,
finishes what it is at, commits, and releases. Only then does the other get it. Each giving has an epoch of its own;
a commit with an older one is refused, so who was too late changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from mqproc.roles.groups.assignment import Queue, share

NOT_GIVEN_UP: Final = 0


@dataclass(slots=True, eq=False)
class Member:
    """One consumer. `generation` is that of its last change of queues, `heard_ns` when its last request came."""

    member_id: str
    name: str
    topics: tuple[str, ...]
    session_ns: int
    heard_ns: int
    owner: object
    """What the member ends with: its connection."""
    pid: int = 0
    generation: int = 0


@dataclass(slots=True)
class Giving:
    """A queue in a member's hands. `given_up`: the generation in which it was taken away from it."""

    member_id: str
    epoch: int
    given_up: int = NOT_GIVEN_UP
    free_by_ns: int = 0


@dataclass(slots=True)
class GroupMembers:
    """One group. `take_epoch(above)` gives a number larger than all before it and than `above`.

    `newest`: the epoch of each queue's last giving or reset, which outlives the group's members. Who comes back with an
    older one does not get the queue by it: others may have had it since. `oldest_of(topic, queue_id)` says the same of
    queues that nothing is known of yet, as after a restart.
    """

    allocate_epoch: Callable[[int], int]
    newest: dict[Queue, int] = field(default_factory=dict)
    oldest_of: Callable[[str, int], int] = lambda _topic, _queue_id: 0
    members: dict[str, Member] = field(default_factory=dict)
    givings: dict[Queue, Giving] = field(default_factory=dict)
    generation: int = 0
    _plan: dict[Queue, str] = field(default_factory=dict)

    @property
    def topics(self) -> list[str]:
        """What any member wants, sorted."""
        return sorted({topic for member in self.members.values() for topic in member.topics})

    def join(self, member: Member, holding: Iterable[tuple[str, int, int]] = ()) -> bool:
        """Take a member in, or the same one anew; whether another has lost a queue to it.

        `holding`: queues with epochs that it has from an earlier life. Of two that hold a queue the newer one has it.
        """
        before = self.members.get(member.member_id)
        if before is not None:
            member.generation = before.generation
        self.members[member.member_id] = member
        losers: set[str] = set()
        for topic, queue_id, epoch in holding:
            queue = topic, queue_id
            newest = self.newest.get(queue) or self.oldest_of(topic, queue_id)
            if topic in member.topics and (epoch > newest or (epoch == newest and queue not in self.givings)):
                if queue in self.givings:
                    losers.add(self.givings[queue].member_id)
                self.allocate_epoch(epoch)
                self.newest[queue] = epoch
                self.givings[queue] = Giving(member.member_id, epoch)
                self._plan[queue] = member.member_id
        return self._change(losers)

    def leave(self, member_id: str) -> None:
        """Let a member go; its queues are nobody's."""
        del self.members[member_id]
        self.givings = {queue: of for queue, of in self.givings.items() if of.member_id != member_id}

    def release(self, member_id: str, generation: int) -> int:
        """A member has let go of what was taken from it up to `generation`; how many queues those are."""
        gone = [
            queue
            for queue, of in self.givings.items()
            if of.member_id == member_id and NOT_GIVEN_UP < of.given_up <= generation
        ]
        for queue in gone:
            del self.givings[queue]
        return len(gone)

    def free_overdue(self, now_ns: int) -> int:
        """Take queues from members that do not release them in time; how many."""
        overdue = [
            queue for queue, of in self.givings.items() if of.given_up != NOT_GIVEN_UP and now_ns > of.free_by_ns
        ]
        for queue in overdue:
            del self.givings[queue]
        return len(overdue)

    def rebalance(self, queues: Mapping[str, Sequence[int]], now_ns: int) -> bool:
        """Share the queues of the wanted topics anew; whether any member's queues changed."""
        subscribers: dict[str, list[str]] = {}
        for member_id in sorted(self.members):
            for topic in self.members[member_id].topics:
                subscribers.setdefault(topic, []).append(member_id)
        self._plan = share(queues, subscribers, self._plan)
        following = self.generation + 1
        changed: set[str] = set()
        for queue, of in self.givings.items():
            if of.given_up == NOT_GIVEN_UP and self._plan.get(queue) != of.member_id:
                of.given_up = following
                of.free_by_ns = now_ns + self.members[of.member_id].session_ns
                changed.add(of.member_id)
        for queue, member_id in self._plan.items():
            if queue not in self.givings:
                self.givings[queue] = Giving(member_id, self._new_epoch(queue))
                changed.add(member_id)
        return self._change(changed)

    def renew(self, queues: Iterable[Queue]) -> bool:
        """Let who has, or had, these queues begin anew at their progress; whether any member has one of them."""
        changed: set[str] = set()
        for queue in queues:
            epoch = self._new_epoch(queue)
            of = self.givings.get(queue)
            if of is not None:
                # Who is giving it up does not know the new one, so what it has done before cannot undo this.
                of.epoch = epoch
                if of.given_up == NOT_GIVEN_UP:
                    changed.add(of.member_id)
        return self._change(changed)

    def _new_epoch(self, queue: Queue) -> int:
        self.newest[queue] = epoch = self.allocate_epoch(0)
        return epoch

    def _change(self, changed: set[str]) -> bool:
        if changed:
            self.generation += 1
            for member_id in changed:
                self.members[member_id].generation = self.generation
        return bool(changed)

    def queues_of(self, member_id: str) -> list[tuple[Queue, int]]:
        """What a member has to work on, with epochs."""
        return sorted(
            (queue, of.epoch)
            for queue, of in self.givings.items()
            if of.member_id == member_id and of.given_up == NOT_GIVEN_UP
        )

    def member_of(self, queue: Queue) -> str:
        """Who has a queue in its hands, "" when nobody has."""
        of = self.givings.get(queue)
        return of.member_id if of is not None else ""

    def may_commit(self, member_id: str, queue: Queue, epoch: int) -> bool:
        """Whether a member has the queue, by the assignment of that epoch."""
        of = self.givings.get(queue)
        return of is not None and (of.member_id, of.epoch) == (member_id, epoch)
