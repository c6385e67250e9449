"""Random programs of sends, receives, acks, nacks, commits, joins, deaths and kills, against what must hold all along:

every message is consumed at least once; a queue gives what it gave before, or what comes right behind that; progress
never goes back and never passes what nobody has settled; every nack makes one copy for later, no more.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections import Counter, defaultdict
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from mqproc import Client
from mqproc.layout import control as words_of
from mqproc.names import DEAD_LETTER_PREFIX, RETRY_PREFIX
from tests.conftest import Group, wait_until

QUEUES = 5
STEPS = 120
MEMBERS_MAX = 4
RETRIES = 2
NACKS_LEAST = 8
"""Of a whole program: its end makes up for what its steps did not do."""
QUERY_KILLS_MAX = 2
"""Five deaths of a role within a minute end the group."""
SESSION_S = 1.0
ANSWER_S = 30.0
Place = tuple[str, int, int]
"""Topic, queue id, queue offset."""


def serve(store: Path, group: str, topic: str, pipe: Connection) -> None:
    """A member in a process of its own, which does what it is told: (what, argument) → answer."""
    held: dict[Place, Any] = {}
    with (
        Client(store) as client,
        client.consumer(group, topic, start="earliest", session_timeout=SESSION_S, pull_messages=8) as consumer,
    ):
        pipe.send(consumer.member_id)
        while True:
            what, argument = pipe.recv()
            if what == "receive":
                found = {
                    (each.topic, each.queue_id, each.queue_offset): each for each in consumer.receive(argument, 0.05)
                }
                held |= found
                pipe.send([(place, message.body) for place, message in found.items()])
            elif what == "leave":
                break
            else:
                messages = [held.pop(place) for place in argument]
                if what == "ack":
                    consumer.ack(*messages)
                elif what == "nack":
                    consumer.nack(*messages, delay_level=1)
                else:
                    consumer.commit()
                pipe.send(None)
    pipe.send(None)


class Member:
    """The test's end of one."""

    def __init__(self, store: Path, group: str, topic: str) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(store, group, topic, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.held: list[tuple[Place, bytes]] = []
        self.member_id = self._answer()

    def ask(self, what: str, argument: Any = ()) -> Any:
        self._pipe.send((what, argument))
        return self._answer()

    def _answer(self) -> Any:
        assert self._pipe.poll(ANSWER_S), "a member does not answer"
        return self._pipe.recv()

    def end(self) -> None:
        self.process.kill()
        self.process.join(10)
        self._pipe.close()


class Program:
    """One run: what was done, what was seen, and what must hold of it."""

    def __init__(self, group: Group, client: Client, seed: int) -> None:
        self.random = random.Random(seed)
        self.group = group
        self.client = client
        self.topic, self.name = f"model-{seed}", f"model-group-{seed}"
        self.members: list[Member] = []
        self.query_kills = 0
        self.sent: list[bytes] = []
        self.settled: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
        """Offsets that somebody has acknowledged or nacked."""
        self.seen: Counter[tuple[str, int]] = Counter()
        """How far each queue was given out, without a gap."""
        self.acked: set[bytes] = set()
        self.nacks: Counter[bytes] = Counter()
        self.progress: Counter[tuple[str, int]] = Counter()
        client.create_topic(self.topic, QUEUES)
        client.groups.change(self.name, retry_max_times=RETRIES)

    # Steps

    def step(self) -> None:
        steps = [(self.send, 14), (self.receive, 40), (self.ack, 25), (self.nack, 6), (self.commit, 4), (self.join, 8)]
        steps += [(self.leave, 3), (self.kill_member, 3), (self.stop_member, 1), (self.kill_query, 1)]
        (chosen,) = self.random.choices([step for step, _ in steps], [weight for _, weight in steps])
        chosen()

    def _any_member(self) -> Member | None:
        return self.random.choice(self.members) if self.members else None

    def send(self) -> None:
        bodies = [b"%d" % (len(self.sent) + number) for number in range(self.random.randint(1, 30))]
        self.client.send_batch(self.topic, bodies, queue_ids=[self.random.randrange(QUEUES) for _ in bodies])
        self.sent += bodies

    def join(self) -> None:
        if len(self.members) < MEMBERS_MAX:
            self.members.append(Member(self.group.store, self.name, self.topic))

    def receive(self) -> None:
        if member := self._any_member():
            self._take(member, self.random.randint(1, 20))

    def _take(self, member: Member, count: int) -> None:
        for place, body in member.ask("receive", count):
            topic, queue_id, offset = place
            assert offset <= self.seen[topic, queue_id], (
                f"{place} came before {self.seen[topic, queue_id]} of its queue"
            )
            self.seen[topic, queue_id] = max(self.seen[topic, queue_id], offset + 1)
            member.held = [each for each in member.held if each[0] != place] + [(place, body)]

    def ack(self) -> None:
        if (member := self._any_member()) and member.held:
            self._settle(member, "ack", self.random.randint(1, len(member.held)))

    def nack(self) -> None:
        if (member := self._any_member()) and member.held:
            self._settle(member, "nack", self.random.randint(1, min(3, len(member.held))))

    def _settle(self, member: Member, what: str, count: int) -> None:
        self.random.shuffle(member.held)
        chosen, member.held = member.held[:count], member.held[count:]
        for (topic, queue_id, offset), body in chosen:
            self.settled[topic, queue_id].add(offset)
            if what == "nack":
                self.nacks[body] += 1
            else:
                self.acked.add(body)
        member.ask(what, [place for place, _ in chosen])

    def commit(self) -> None:
        if member := self._any_member():
            member.ask("commit")

    def leave(self) -> None:
        if member := self._any_member():
            self.members.remove(member)
            member.ask("leave")
            member.end()

    def kill_member(self) -> None:
        if member := self._any_member():
            self.members.remove(member)
            member.end()

    def stop_member(self) -> None:
        """Silent for longer than its session: others get its queues, and it comes back."""
        if member := self._any_member():
            os.kill(member.process.pid or 0, signal.SIGSTOP)
            try:
                wait_until(lambda: member.member_id not in self._member_ids(), what="end of a silent member")
            finally:
                os.kill(member.process.pid or 0, signal.SIGCONT)

    def _member_ids(self) -> set[str]:
        return {member.member_id for member in self.client.groups.info(self.name).members}

    def kill_query(self) -> None:
        if self.query_kills < QUERY_KILLS_MAX:
            self.query_kills += 1
            os.kill(self.group.pid(words_of.QUERY), signal.SIGKILL)

    # What holds

    def check(self) -> None:
        for queue in self.client.groups.info(self.name).queues:
            key, at = (queue.topic, queue.queue_id), queue.offset or 0
            assert self.progress[key] <= at <= queue.max_offset, f"{key}: from {self.progress[key]} to {at}"
            self.progress[key] = at
            early = set(range(at)) - self.settled[key]
            assert not early, f"{key}: progress is at {at}, nobody has settled {sorted(early)}"

    def finish(self) -> None:
        """Somebody consumes all that is left, also what comes again later."""
        while len(self.members) > 1:
            self.leave()
        if not self.members:
            self.join()
        (last,) = self.members
        wait_until(lambda: self._has_nacked(last), 60, "enough nacks")
        wait_until(lambda: self._drained(last), 60, "everything consumed")
        dead = Counter(letter.body for letter in self.client.groups.dead_letters(self.name))
        assert self.acked | set(dead) == set(self.sent)
        retried = Counter(message.body for message in self.client.range(RETRY_PREFIX + self.name))
        assert retried + dead == self.nacks
        self.check()

    def _has_nacked(self, last: Member) -> bool:
        missing = NACKS_LEAST - self.nacks.total()
        if missing > 0 and last.held:
            self._settle(last, "nack", min(missing, len(last.held)))
        elif missing > 0:
            self.send()
            self._take(last, 20)
        return missing <= 0

    def _drained(self, last: Member) -> bool:
        self._take(last, 64)
        if last.held:
            self._settle(last, "ack", len(last.held))
        last.ask("commit")
        copies = sum(
            queue.max_offset
            for prefix in (RETRY_PREFIX, DEAD_LETTER_PREFIX)
            for queue in self.client.queues(prefix + self.name)
        )
        return copies >= self.nacks.total() and self.client.groups.info(self.name).lag == 0

    def close(self) -> None:
        for member in self.members:
            member.end()


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    started = Group(tmp_path_factory.mktemp("model") / "store").start()
    yield started
    started.close()


@pytest.mark.parametrize("seed", [1, 2])
def test_random_programs_hold(group: Group, seed: int) -> None:
    with group.client(timeout=20.0) as client:
        program = Program(group, client, seed)
        try:
            for _ in range(STEPS):
                program.step()
                program.check()
            program.finish()
        finally:
            program.close()
    # A program in which nothing happened would prove nothing.
    assert len(program.sent) > 100
    assert program.nacks.total() >= NACKS_LEAST
