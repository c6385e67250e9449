"""A random program: sends, receives, acks, nacks, commits, joins, deaths, and kills.

Every message is consumed at least once. A queue delivers the next message, or redelivers earlier ones; to ordered
members only when all before it are done. Committed offsets never move back and never pass an unsettled message. Every
nack makes exactly one copy. Members receive and loop, several in one process, also with asyncio. A loop yields a
message when all before it are done; the message is done when the loop continues, or another one begins after it was
left, or the member leaves. A simple consumer of another group also gets every message, and none again that it has
acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import multiprocessing
import os
import random
import signal
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Generic, TypeVar, cast

from mqproc import AsyncClient, Client, SendOutcomeUnknownError
from mqproc.client._async.consumer import AsyncConsumer
from mqproc.client._sync.consumer import Consumer
from mqproc.layout import control as words_of
from mqproc.topic_names import DEAD_LETTER_PREFIX, RETRY_PREFIX
from mqproc.types import StoredMessage
from tests.support.group import Group, wait_until

# Members of a group in processes of their own, one or several in each, controlled by the test.
#
# A process has members of either the synchronous or the asyncio client.


SESSION_S = 1.0
LOOK_S = 0.05
PATIENCE_S = 60.0
"""Longer than a restart of a killed role."""
Place = tuple[str, int, int]
"""Topic, queue id, queue offset."""
Seen = tuple[Place, bytes]


C = TypeVar("C", Consumer, AsyncConsumer)


class _Member(Generic[C]):
    """Common to members of both clients."""

    def __init__(self, consumer: C, ordered: bool) -> None:
        self._consumer = consumer
        self._ordered = ordered
        self._held: dict[Place, StoredMessage] = {}
        self._given: StoredMessage | None = None

    def joined(self) -> str:
        return self._consumer.member_id

    def ack(self, places: Iterable[Place]) -> Awaitable[None] | None:
        return self._consumer.ack(*map(self._held.pop, places))

    def _took(self, found: list[StoredMessage]) -> list[Seen]:
        self._held |= {_place(message): message for message in found}
        return _seen(found)


class Served(_Member[Consumer]):
    """A member in its process, with the commands that it accepts."""

    def __init__(self, consumer: Consumer, ordered: bool) -> None:
        super().__init__(consumer.__enter__(), ordered)
        self._loop: Iterator[StoredMessage] | None = None

    def receive(self, count: int) -> list[Seen]:
        return self._took(self._consumer.receive(count, LOOK_S, ordered=self._ordered))

    def iterate(self, count: int) -> tuple[list[Seen], bool]:
        """Continue or begin a loop: the messages, and whether it ended, so that all are done."""
        found: list[StoredMessage] = []
        while len(found) < count:
            self._loop = self._loop or self._consumer.messages(LOOK_S)
            message = next(self._loop, None)
            if message is None:
                self._loop = None
                break
            found.append(message)
            self._given = message
        return _seen(found), self._loop is None

    def break_off(self) -> None:
        """Leave the loop with a message that is not done."""
        self._loop = None

    def first(self) -> list[Seen]:
        """Loop over the consumer itself, which never ends, and leave it at once."""
        for message in self._consumer:
            return _seen([message])
        raise AssertionError("the loop has ended")

    def nack(self, places: Iterable[Place]) -> None:
        self._consumer.nack(*map(self._held.pop, places), delay_level=1)

    def nack_given(self) -> None:
        """Nack the messages given by the loop."""
        assert self._given is not None
        self._consumer.nack(self._given, delay_level=1)

    def commit(self) -> None:
        self._consumer.commit()

    def leave(self) -> None:
        """Leave, as at the end of a `with` block: messages given by the loop are done."""
        self._consumer.__exit__(None, None, None)


class AsyncServed(_Member[AsyncConsumer]):
    """A member of the asyncio client."""

    def __init__(self, consumer: AsyncConsumer, ordered: bool) -> None:
        super().__init__(consumer, ordered)
        self._loop: AsyncGenerator[StoredMessage] | None = None

    async def receive(self, count: int) -> list[Seen]:
        return self._took(await self._consumer.receive(count, LOOK_S, ordered=self._ordered))

    async def iterate(self, count: int) -> tuple[list[Seen], bool]:
        found: list[StoredMessage] = []
        while len(found) < count:
            self._loop = self._loop or _generator(self._consumer.messages(LOOK_S))
            message = await anext(self._loop, None)
            if message is None:
                self._loop = None
                break
            found.append(message)
            self._given = message
        return _seen(found), self._loop is None

    async def break_off(self) -> None:
        if self._loop is not None:
            await self._loop.aclose()
        self._loop = None

    async def first(self) -> list[Seen]:
        async with contextlib.aclosing(_generator(aiter(self._consumer))) as loop:
            return _seen([await anext(loop)])

    async def nack(self, places: Iterable[Place]) -> None:
        await self._consumer.nack(*map(self._held.pop, places), delay_level=1)

    async def nack_given(self) -> None:
        assert self._given is not None
        await self._consumer.nack(self._given, delay_level=1)

    async def commit(self) -> None:
        await self._consumer.commit()

    async def leave(self) -> None:
        await self._consumer.__aexit__(None, None, None)


def _generator(loop: Any) -> AsyncGenerator[StoredMessage]:
    return cast("AsyncGenerator[StoredMessage]", loop)


def _place(message: StoredMessage) -> Place:
    return message.stored_topic, message.queue_id, message.queue_offset


def _seen(messages: Iterable[StoredMessage]) -> list[Seen]:
    return [(_place(message), message.body) for message in messages]


def serve(store: Path, group: str, topic: str, ordered: bool, pipe: Connection) -> None:
    """Main of a process: (member, command, arguments) → answer. Members share one client."""
    members: dict[int, Served] = {}
    with Client(store, timeout=PATIENCE_S) as client:
        while True:
            number, what, arguments = pipe.recv()
            if number not in members:
                consumer = client.consumer(
                    group, topic, start="earliest", session_timeout=SESSION_S, pull_messages=8, name=f"m{number}"
                )
                members[number] = Served(consumer, ordered)
            pipe.send(getattr(members[number], what)(*arguments))
            if what == "leave":
                del members[number]


def serve_async(store: Path, group: str, topic: str, ordered: bool, pipe: Connection) -> None:
    """Main of a process with the asyncio client."""
    asyncio.run(_serve_async(store, group, topic, ordered, pipe))


async def _serve_async(store: Path, group: str, topic: str, ordered: bool, pipe: Connection) -> None:
    members: dict[int, AsyncServed] = {}
    async with AsyncClient(store, timeout=PATIENCE_S) as client:
        while True:
            number, what, arguments = await asyncio.to_thread(pipe.recv)
            if number not in members:
                consumer = await client.consumer(
                    group, topic, start="earliest", session_timeout=SESSION_S, pull_messages=8, name=f"a{number}"
                )
                members[number] = AsyncServed(await consumer.__aenter__(), ordered)
            answer = getattr(members[number], what)(*arguments)
            pipe.send(await answer if inspect.isawaitable(answer) else answer)
            if what == "leave":
                del members[number]


class Host:
    """The test's end of a process."""

    def __init__(self, store: Path, group: str, topic: str, *, ordered: bool, is_async: bool) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        target = serve_async if is_async else serve
        self.process = context.Process(target=target, args=(store, group, topic, ordered, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, number: int, what: str, *arguments: Any) -> Any:
        self._pipe.send((number, what, arguments))
        assert self._pipe.poll(2 * PATIENCE_S), "a member does not answer"
        return self._pipe.recv()

    def end(self) -> None:
        self.process.kill()
        self.process.join(10)
        self._pipe.close()


@dataclass(eq=False)
class Member:
    """The test's end of a member."""

    host: Host
    number: int
    member_id: str = ""
    held: list[Seen] = field(default_factory=list)
    """Received and not acknowledged."""
    in_loop: Seen | None = None
    """Message given by its loop, which has not continued yet."""
    is_nacked: bool = False
    """Whether `in_loop` was nacked."""
    left: list[Seen] = field(default_factory=list)
    """Messages given by abandoned loops: done when another one begins, or the member leaves."""

    def __post_init__(self) -> None:
        self.member_id = self.ask("joined")

    def ask(self, what: str, *arguments: Any) -> Any:
        return self.host.ask(self.number, what, *arguments)


QUEUES: Final = 5
STEPS: Final = 120
MEMBERS_MAX: Final = 5
ALONE: Final = 0.5
"""Probability that a member has its own process although it could join another."""
ASYNC: Final = 0.4
"""Probability that a process uses the asyncio client."""
RETRIES: Final = 2
SENT_LEAST: Final = 100
NACKS_LEAST: Final = 8
"""In a whole program: its end adds those that its steps did not make."""
ROLES: Final = tuple(role for role in words_of.ROLES if role != words_of.SUPERVISOR)
DEATHS_MAX: Final = 3
"""Of a role within `DEATHS_WITHIN_S`: five within a minute end the group."""
DEATHS_WITHIN_S: Final = 65.0
GROUP_KILLS_MAX: Final = 1
PROGRAM_PATIENCE_S: Final = 120.0


class Deaths:
    """Times of the kills of a group's roles."""

    def __init__(self) -> None:
        self._moments: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=DEATHS_MAX))

    def allows(self, role: str) -> bool:
        """Whether the role may be killed once more; counts the kill."""
        moments, now = self._moments[role], time.monotonic()
        if len(moments) == DEATHS_MAX and now - moments[0] < DEATHS_WITHIN_S:
            return False
        moments.append(now)
        return True

    def forget(self) -> None:
        """A new group was started."""
        self._moments.clear()


class Simple:
    """A simple consumer of its own group, with visibility timeouts from a second up."""

    def __init__(self, client: Client, group: str, topic: str, chance: random.Random) -> None:
        self._consumer = client.simple_consumer(group, topic, start="earliest")
        self._random = chance
        self._held: list[StoredMessage] = []
        self._asked: set[bytes] = set()
        self._acked: set[bytes] = set()

    def receive(self) -> None:
        self._take(self._random.choice((1.0, 2.0, PROGRAM_PATIENCE_S)))

    def _take(self, invisible_s: float) -> None:
        found = self._consumer.receive(self._random.randint(1, 32), invisible_s, timeout=0.05)
        again = self._acked.intersection(message.body for message in found)
        assert not again, f"{sorted(again)} were redelivered although acknowledged"
        self._held += found

    def ack(self) -> None:
        self._random.shuffle(self._held)
        for _ in range(self._random.randint(0, len(self._held))):
            message = self._held.pop()
            self._asked.add(message.body)
            if self._consumer.ack(message):
                self._acked.add(message.body)

    def finish(self, sent: set[bytes]) -> None:
        """Receive until every sent message was acknowledged in time."""

        def done() -> bool:
            self._take(PROGRAM_PATIENCE_S)
            for message in self._held:
                if self._consumer.ack(message):
                    self._acked.add(message.body)
            self._held.clear()
            return self._acked | self._asked >= sent

        wait_until(done, PROGRAM_PATIENCE_S, "everything received by the simple consumer")


class Program:
    """One run: actions, observations and invariants. Members of every other seed are ordered."""

    def __init__(self, group: Group, client: Client, seed: int, deaths: Deaths) -> None:
        self.random = random.Random(seed)
        self.ordered = seed % 2 == 1
        self.group = group
        self.client = client
        self.deaths = deaths
        self.kills: Counter[str] = Counter()
        """By role, and of the group."""
        self.topic, self.name = f"model-{seed}", f"model-group-{seed}"
        self.members: list[Member] = []
        self.member_numbers = itertools.count()
        self.numbers = itertools.count()
        self.sent: list[bytes] = []
        self.settled: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
        """Offsets acknowledged or nacked."""
        self.seen: Counter[tuple[str, int]] = Counter()
        """End of the contiguous deliveries of each queue."""
        self.acked: set[bytes] = set()
        self.nacks: Counter[tuple[Place, bytes]] = Counter()
        self.progress: Counter[tuple[str, int]] = Counter()
        client.create_topic(self.topic, QUEUES)
        client.groups.change(self.name, retry_max_times=RETRIES)
        self.simple = Simple(client, f"{self.name}-simple", self.topic, self.random)

    # Steps

    def step(self) -> None:
        steps: list[tuple[Callable[[], None], float]]
        steps = [(self.send, 14), (self.receive, 25), (self.ack, 18), (self.nack, 6), (self.commit, 4), (self.join, 8)]
        steps += [(self.iterate, 20), (self.break_off, 3), (self.leave, 3)]
        steps += [(self.kill_host, 3), (self.stop_host, 1), (self.kill_role, 3)]
        steps += [(self.simple.receive, 10), (self.simple.ack, 8), (self.kill_group, 0.4)]
        (chosen,) = self.random.choices([step for step, _ in steps], [weight for _, weight in steps])
        chosen()

    def _any_member(self) -> Member | None:
        return self.random.choice(self.members) if self.members else None

    def send(self) -> None:
        if self._send_some(self.random.randint(1, 30)):
            return
        # It died with the writer. A successor that answers has processed everything in progress.
        while not self._send_some(1):
            pass
        self.client.wait_dispatched()
        stored = [message.body for message in self.client.range(self.topic)]
        missing = Counter(self.sent) - Counter(stored)
        assert not missing, f"acknowledged and not stored: {sorted(missing)}"
        self.sent = stored

    def _send_some(self, count: int) -> bool:
        """Whether they are known to be stored."""
        bodies = [b"%d" % next(self.numbers) for _ in range(count)]
        try:
            self.client.send_batch(self.topic, bodies, queue_ids=[self.random.randrange(QUEUES) for _ in bodies])
        except SendOutcomeUnknownError:
            return False
        self.sent += bodies
        return True

    def join(self) -> None:
        if len(self.members) < MEMBERS_MAX:
            hosts = self._hosts()
            if not hosts or self.random.random() < ALONE:
                is_async = self.random.random() < ASYNC
                hosts = [Host(self.group.store, self.name, self.topic, ordered=self.ordered, is_async=is_async)]
            self.members.append(Member(self.random.choice(hosts), next(self.member_numbers)))

    def _hosts(self) -> list[Host]:
        """Processes with members, each once, in the order of their first ones."""
        return list(dict.fromkeys(member.host for member in self.members))

    def receive(self) -> None:
        if member := self._any_member():
            self._take(member, self.random.randint(1, 20))

    def _take(self, member: Member, count: int) -> None:
        found: list[Seen] = member.ask("receive", count)
        if self.ordered:
            self._check_order(found)
        for place, body in found:
            self._see(place)
            member.held = [each for each in member.held if each[0] != place] + [(place, body)]

    def _see(self, place: Place) -> None:
        topic, queue_id, offset = place
        assert offset <= self.seen[topic, queue_id], f"{place} came before {self.seen[topic, queue_id]} of its queue"
        self.seen[topic, queue_id] = max(self.seen[topic, queue_id], offset + 1)

    def iterate(self) -> None:
        if member := self._any_member():
            self._iterate(member, self.random.randint(1, 20))

    def _iterate(self, member: Member, count: int) -> None:
        """Continue a loop: a message is done when the next one is requested, or the loop ends."""
        if member.in_loop is None:
            self._loops_are_left(member)
        found, is_over = member.ask("iterate", count)
        for each in found:
            self._loop_went_on(member)
            self._check_before([each])
            self._see(each[0])
            member.in_loop = each
        if is_over:
            self._loop_went_on(member)

    def _loops_are_left(self, member: Member) -> None:
        """A new loop begins: the messages that earlier ones were left with are done."""
        for seen in member.left:
            self._done_in_loop(seen, is_nacked=False)
        member.left.clear()

    def _loop_went_on(self, member: Member) -> None:
        if member.in_loop is not None:
            self._done_in_loop(member.in_loop, is_nacked=member.is_nacked)
        member.in_loop, member.is_nacked = None, False

    def _done_in_loop(self, seen: Seen, *, is_nacked: bool) -> None:
        (topic, queue_id, offset), body = seen
        self.settled[topic, queue_id].add(offset)
        if not is_nacked:
            self.acked.add(body)

    def break_off(self) -> None:
        """Leave a loop; its message is not done until its member begins another one, or leaves."""
        if (member := self._any_member()) and member.in_loop is not None:
            member.ask("break_off")
            if not member.is_nacked:
                member.left.append(member.in_loop)
            member.in_loop, member.is_nacked = None, False

    def _check_order(self, found: list[Seen]) -> None:
        """Check that a queue's messages came in order without gaps, and all before were done."""
        offsets: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        for (topic, queue_id, offset), _ in found:
            offsets[topic, queue_id].append(offset)
        for queue, came in offsets.items():
            assert came == list(range(came[0], came[0] + len(came))), f"{queue}: {came} is no order"
        self._check_before(found)

    def _check_before(self, found: list[Seen]) -> None:
        """Check that all before the first message of each queue were done."""
        first: dict[tuple[str, int], int] = {}
        for (topic, queue_id, offset), _ in found:
            first.setdefault((topic, queue_id), offset)
        for queue, offset in first.items():
            open_before = set(range(offset)) - self.settled[queue]
            assert not open_before, f"{queue}: {offset} came while {sorted(open_before)} were not done"

    def ack(self) -> None:
        if (member := self._any_member()) and member.held:
            self._settle(member, "ack", self.random.randint(1, len(member.held)))

    def nack(self) -> None:
        member = self._any_member()
        if member and member.in_loop is not None and not member.is_nacked:
            self._nack_in_loop(member, member.in_loop)
        elif member and member.held:
            self._settle(member, "nack", self.random.randint(1, min(3, len(member.held))))

    def _nack_in_loop(self, member: Member, seen: Seen) -> None:
        """Nack it; the loop continues after it with the next step."""
        self.nacks[seen] += 1
        self._done_in_loop(seen, is_nacked=True)
        member.is_nacked = True
        member.ask("nack_given")

    def _settle(self, member: Member, what: str, count: int) -> None:
        self.random.shuffle(member.held)
        self._settle_these(member, what, member.held[:count])

    def _settle_these(self, member: Member, what: str, chosen: list[Seen]) -> None:
        member.held = [each for each in member.held if each not in chosen]
        for place, body in chosen:
            topic, queue_id, offset = place
            self.settled[topic, queue_id].add(offset)
            if what == "nack":
                self.nacks[place, body] += 1
            else:
                self.acked.add(body)
        member.ask(what, [place for place, _ in chosen])

    def commit(self) -> None:
        if member := self._any_member():
            member.ask("commit")

    def leave(self) -> None:
        if member := self._any_member():
            self.members.remove(member)
            self._loop_went_on(member)
            self._loops_are_left(member)
            member.ask("leave")
            if member.host not in self._hosts():
                member.host.end()

    def kill_host(self) -> None:
        if member := self._any_member():
            self.members = [each for each in self.members if each.host is not member.host]
            member.host.end()

    def stop_host(self) -> None:
        """Stop a process for longer than its sessions: others get its queues until it returns."""
        if member := self._any_member():
            process = member.host.process
            silent = {each.member_id for each in self.members if each.host is member.host}
            os.kill(process.pid or 0, signal.SIGSTOP)
            try:
                wait_until(lambda: not silent & self._member_ids(), what="end of silent members")
            finally:
                os.kill(process.pid or 0, signal.SIGCONT)

    def _member_ids(self) -> set[str]:
        return {member.member_id for member in self.client.groups.info(self.name).members}

    def kill_role(self) -> None:
        role = self.random.choice(ROLES)
        if self.deaths.allows(role):
            self.kills[role] += 1
            os.kill(self.group.pid(role), signal.SIGKILL)

    def kill_group(self) -> None:
        """Kill the group and its consumers; uncommitted messages are redelivered."""
        if self.kills["group"] < GROUP_KILLS_MAX:
            self.kills["group"] += 1
            self.close()
            self.group.kill()
            self.group.start()
            self.deaths.forget()

    # Invariants

    def check(self) -> None:
        for queue in self.client.groups.info(self.name).queues:
            key, at = (queue.topic, queue.queue_id), queue.offset or 0
            assert self.progress[key] <= at <= queue.max_offset, f"{key}: from {self.progress[key]} to {at}"
            self.progress[key] = at
            early = set(range(at)) - self.settled[key]
            assert not early, f"{key}: the offset {at} passes unsettled {sorted(early)}"

    def finish(self) -> None:
        """Consume everything left, including redeliveries."""
        while len(self.sent) < SENT_LEAST:
            self.send()
        while len(self.members) > 1:
            self.leave()
        if not self.members:
            self.join()
        (last,) = self.members
        wait_until(lambda: self._has_no_loop(last), PROGRAM_PATIENCE_S, "the end of a loop")
        self._loop_for_ever(last)
        wait_until(lambda: self._has_nacked(last), PROGRAM_PATIENCE_S, "enough nacks")
        wait_until(lambda: self._has_buried(last), PROGRAM_PATIENCE_S, "a dead letter")
        wait_until(lambda: self._drained(last), PROGRAM_PATIENCE_S, "everything consumed")
        self._check_copies()
        self.simple.finish(set(self.sent))
        self.check()

    def _check_copies(self) -> None:
        """Check that each nack made one copy: a retry while allowed, else a dead letter."""
        dead = list(self.client.groups.dead_letters(self.name))
        assert self.acked | {letter.body for letter in dead} == set(self.sent)
        retried = list(self.client.range(RETRY_PREFIX + self.name))
        times = {(each.stored_topic, each.queue_id, each.queue_offset): each.reconsume_times for each in retried}
        all_expected = Counter((body, times.get(place, 0) + 1) for place, body in self.nacks.elements())
        for copies, expected in (
            (retried, {copy: count for copy, count in all_expected.items() if copy[1] <= RETRIES}),
            (dead, {copy: count for copy, count in all_expected.items() if copy[1] > RETRIES}),
        ):
            assert Counter((each.body, each.reconsume_times) for each in copies) == expected

    def _has_no_loop(self, last: Member) -> bool:
        if last.in_loop is not None:
            self._iterate(last, 20)
        return last.in_loop is None

    def _loop_for_ever(self, last: Member) -> None:
        """Check a loop over the consumer itself: its message is done when another loop begins."""
        if last.held:
            self._settle(last, "ack", len(last.held))
        self.send()
        self._loops_are_left(last)
        found: list[Seen] = last.ask("first")
        self._check_before(found)
        for place, _body in found:
            self._see(place)
        last.left += found

    def _has_nacked(self, last: Member) -> bool:
        missing = NACKS_LEAST - self.nacks.total()
        if missing > 0 and last.held:
            self._settle(last, "nack", min(missing, len(last.held)))
        elif missing > 0:
            self.send()
            self._take(last, 20)
        return missing <= 0

    def _has_buried(self, last: Member) -> bool:
        """Nack redeliveries until one becomes a dead letter."""
        if next(iter(self.client.groups.dead_letters(self.name)), None) is not None:
            return True
        self._take(last, 20)
        again = [each for each in last.held if each[0][0].startswith(RETRY_PREFIX)]
        if again:
            self._settle_these(last, "nack", again)
        elif last.held:
            self._settle(last, "nack", 1)
            self._settle(last, "ack", len(last.held))
        else:
            self.send()
        return False

    def _drained(self, last: Member) -> bool:
        if self.random.random() < 0.5:
            self._take(last, 64)
        else:
            self._iterate(last, 64)
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
        """End all processes of members."""
        for host in self._hosts():
            host.end()
        self.members.clear()


def run(group: Group, seed: int, deaths: Deaths) -> Program:
    """Run a program; raises AssertionError on a violation."""
    with group.client(timeout=PROGRAM_PATIENCE_S) as client:
        program = Program(group, client, seed, deaths)
        try:
            for _ in range(STEPS):
                program.step()
                program.check()
            program.finish()
        finally:
            program.close()
    return program
