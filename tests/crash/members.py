"""Members of a simulated group: they join, consume what they are given, commit, leave, and die.

A queue is one member's at a time: what somebody commits who has lost it is refused.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from mqproc.client import group_requests as group_calls
from mqproc.errors import NotAMemberError
from mqproc.paths import StorePaths
from mqproc.types import PullStatus
from mqproc.wire.operations.groups import EARLIEST, GroupAssignment, GroupJoinRequest
from tests.crash.consumers import MESSAGES_PER_PULL, pull
from tests.crash.parties import Commits, Found, Queue, in_queue
from tests.crash.placed import expect
from tests.crash.schedule import Schedule, SimulatedClock
from tests.crash.senders import TOPICS
from tests.crash.tasks import Caller

GROUP = "members"
SESSION_MS = 3_000
WORKS_MAX = 120
LOOK_CHANCE = 0.2
PATIENT_COUNT = 500


@dataclass(slots=True)
class _Held:
    """A queue in a member's hands."""

    epoch: int
    position: int


@dataclass(slots=True)
class _Member:
    name: str
    generation: int = -1
    queues: dict[Queue, _Held] = field(default_factory=dict)


@dataclass(slots=True)
class Members:
    """What one group's members were told, over all lives of a store."""

    rng: random.Random
    patient: bool = False
    commits: Commits = field(default_factory=lambda: Commits(GROUP))
    _given: dict[Queue, tuple[int, str]] = field(default_factory=dict)
    """Who was told last that it has a queue, and by which epoch."""
    _names: int = 0

    def run(self, paths: StorePaths, schedule: Schedule, clock: SimulatedClock) -> None:
        while True:
            caller = Caller(paths.socket("query"), schedule)
            self._names += 1
            try:
                self._be_member(caller, schedule, _Member(f"member{self._names}"))
            finally:
                caller.close()

    def _be_member(self, caller: Caller, schedule: Schedule, member: _Member) -> None:
        """From a join to leaving, or to death: then only the connection is closed."""
        joined = self._join(caller, member)
        for _ in range(self.rng.randint(1, WORKS_MAX)):
            schedule.pause()
            if not joined:
                joined = self._join(caller, member)
            elif not member.queues or self.rng.random() < LOOK_CHANCE:
                joined = self._look(caller, member)
            else:
                joined = self._work(caller, member)
        if self.rng.random() < 0.5:
            caller.call(group_calls.leave(GROUP, member.name))

    def _join(self, caller: Caller, member: _Member) -> bool:
        holding = [(*queue, held.epoch) for queue, held in member.queues.items()]
        request = GroupJoinRequest(GROUP, list(TOPICS), member.name, "", SESSION_MS, EARLIEST, 0, holding)
        outcome = caller.call(group_calls.join(request))
        if outcome.error is None:
            self._take(caller, member, outcome.value)
        return outcome.error is None

    def _look(self, caller: Caller, member: _Member) -> bool:
        """Ask for news: held until there is some, or answered at once."""
        generation = self.rng.choice((member.generation, -1))
        outcome = caller.call(group_calls.heartbeat(GROUP, member.name, generation, SESSION_MS / 1000))
        if outcome.error is not None:
            return False
        if outcome.value.changed:
            self._take(caller, member, outcome.value)
        return True

    def _take(self, caller: Caller, member: _Member, given: GroupAssignment) -> None:
        """Work on what was given from now on, and let go of the rest."""
        queues: dict[Queue, _Held] = {}
        for topic, queue_id, epoch, offset in given.queues:
            queue = topic, queue_id
            committed = self.commits.committed.get(queue, 0)
            expect(offset >= committed, f"{member.name} begins {queue} at {offset}, but {committed} was committed")
            last_epoch, last = self._given.get(queue, (0, ""))
            expect(epoch != last_epoch or last == member.name, f"{queue} was given to {last} and {member.name}")
            self._given[queue] = epoch, member.name
            held = member.queues.get(queue)
            queues[queue] = held if held is not None and held.epoch == epoch else _Held(epoch, offset)
        gone = member.queues.keys() - queues.keys()
        member.queues, member.generation = queues, given.generation
        if gone:
            caller.call(group_calls.release(GROUP, member.name, given.generation))

    def _work(self, caller: Caller, member: _Member) -> bool:
        """Consume some messages of one queue; whether it is still a member."""
        queue = self.rng.choice(sorted(member.queues))
        held = member.queues[queue]
        pulled = pull(caller, queue, held.position, PATIENT_COUNT if self.patient else MESSAGES_PER_PULL)
        if pulled is None or pulled.next_offset <= held.position:
            return True
        if pulled.status is not PullStatus.FOUND:
            held.position = max(held.position, pulled.min_offset)
            return True
        self.commits.ask(queue, pulled.next_offset)
        given = self._given[queue]
        commit = group_calls.commit_of_member(GROUP, member.name, [(*queue, held.epoch, pulled.next_offset)])
        outcome = caller.call(commit)
        if outcome.error is not None:
            return not isinstance(outcome.error, NotAMemberError)
        if outcome.value:
            del member.queues[queue]  # It is somebody else's, or was begun anew.
            return True
        mine = given[0] < held.epoch or given == (held.epoch, member.name)
        expect(mine, f"{member.name} committed {queue} by epoch {held.epoch} when {given} had it")
        self.commits.answered(queue, pulled.next_offset)
        held.position = pulled.next_offset
        return True

    # What must be true

    def forget(self, topic: str) -> None:
        self.commits.forget(topic)

    def go_on(self, found: Found, *, power_loss: bool) -> None:
        self.commits.go_on(power_loss=power_loss)
        if power_loss:
            self._given.clear()

    def check(self, found: Found, *, power_loss: bool) -> None:
        self.commits.check(found, power_loss=power_loss)

    def left(self, found: Found) -> int:
        """Messages that nobody has consumed."""
        progress = found.of_group(GROUP)
        queues = {(placed.message.topic, placed.message.queue_id) for placed in found.records}
        return sum(
            offset >= progress.get(queue, 0)
            for queue in queues
            if queue[0] in TOPICS and queue[0] not in self.commits.deleted
            for offset, _ in in_queue(queue, found)
        )
