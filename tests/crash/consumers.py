"""Consumers of a simulated group: pulling, members, simple consumers; deletion of topics.

A message that was not consumed is nacked before the committed offset passes it, as by every client. So each message
below the committed offset was consumed, or has a copy in the retry topic or the dead-letter queue.
"""

from __future__ import annotations

import enum
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mqproc.client import group_requests as group_calls
from mqproc.client import requests as core
from mqproc.errors import NotAMemberError, StaleOffsetError
from mqproc.paths import StorePaths
from mqproc.store.offsets import pop_receipts as check_points
from mqproc.store.offsets.pop_receipts import PopAck, PopCheckPoint, pop_retry_topic
from mqproc.topic_names import RETRY_PREFIX, REVIVE_GROUP, REVIVE_TOPIC
from mqproc.types import PullResult, PullStatus, StoredMessage
from mqproc.wire.operations.groups import EARLIEST, GroupAssignment, GroupJoinRequest, GroupReceiveRequest
from tests.crash.disk import Placed, expect
from tests.crash.group import Caller, Schedule, SimulatedClock, tries
from tests.crash.producers import (
    TOPICS,
    Commits,
    Fate,
    Found,
    Party,
    Queue,
    Senders,
    Sent,
    in_queue,
    is_copy,
    is_for_group,
    is_note,
    sent_of,
)

CONSUMERS_GROUP = "workers"
RETRIES_MAX = 2
MESSAGES_PER_PULL = 5
PULL_BYTES = 1 << 20
NACK_CHANCE = 0.3


@dataclass(slots=True)
class Consumers:
    """Outcomes of one group's consumers, over all lives of a store."""

    rng: random.Random
    senders: Senders
    queues: int
    patient: bool = False
    commits: Commits = field(default_factory=lambda: Commits(CONSUMERS_GROUP))
    given_back: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    """The place of each message whose nack was answered, by number."""

    def run(self, paths: StorePaths, schedule: Schedule, clock: SimulatedClock) -> None:
        caller = Caller(paths.socket("query"), schedule)
        positions: dict[Queue, int] = {}
        try:
            while caller.call(group_calls.change(CONSUMERS_GROUP, RETRIES_MAX, 1, None)).error is not None:
                schedule.pause()
            while True:
                topic = self.rng.choice((*TOPICS, RETRY_PREFIX + CONSUMERS_GROUP))
                queue = topic, self.rng.randrange(self.queues)
                self._consume(caller, queue, positions)
                schedule.pause()
        finally:
            caller.close()

    def _consume(self, caller: Caller, queue: Queue, positions: dict[Queue, int]) -> None:
        if queue not in positions and not self._ask_for_progress(caller, queue, positions):
            return
        pulled = pull(caller, queue, positions[queue])
        if pulled is None:
            return
        if pulled.status is not PullStatus.FOUND:
            # Retention moves a queue's first offset; in an empty queue the same offset is pulled again.
            positions[queue] = max(positions[queue], pulled.next_offset if pulled.min_offset > positions[queue] else 0)
            return
        end = self._end_of_consumed(caller, queue, pulled)
        if end > positions[queue]:
            self._commit(caller, queue, end, positions)

    def _end_of_consumed(self, caller: Caller, queue: Queue, pulled: PullResult) -> int:
        """The offset after the last message that was consumed or nacked."""
        for message in pulled.messages:
            number = self.senders.number_of(message)
            if self.rng.random() > NACK_CHANCE:
                continue
            level = self.rng.choice((0, 1, 1, 2, -1))
            outcome = caller.call(group_calls.nack(CONSUMERS_GROUP, [(*queue, message.queue_offset)], level, -1))
            if outcome.error is not None or outcome.value[0] == group_calls.NOT_NOW:
                return message.queue_offset
            # Committed meanwhile by another consumer: an extra copy does not matter.
            if outcome.value[0] >= 0 and message.queue_offset >= self.commits.committed.get(queue, 0):
                self.given_back[number] = (*queue, message.queue_offset)
        return pulled.next_offset

    def _commit(self, caller: Caller, queue: Queue, end: int, positions: dict[Queue, int]) -> None:
        self.commits.ask(queue, end)
        error = caller.call(group_calls.commit(CONSUMERS_GROUP, *queue, end)).error
        if error is None:
            positions[queue] = end
            self.commits.answered(queue, end)
        elif isinstance(error, StaleOffsetError):
            positions.pop(queue)  # Another consumer was faster.

    def _ask_for_progress(self, caller: Caller, queue: Queue, positions: dict[Queue, int]) -> bool:
        committed = self.commits.committed.get(queue, 0)
        outcome = caller.call(group_calls.info(CONSUMERS_GROUP))
        if outcome.error is not None:
            return False
        found = {(each.topic, each.queue_id): each.offset or 0 for each in outcome.value.queues}
        expect(found.get(queue, 0) >= committed, f"{queue}: offset {found.get(queue)} is below the commit {committed}")
        positions[queue] = found.get(queue, 0)
        return True

    # Invariants

    def forget(self, topic: str) -> None:
        self.commits.forget(topic)

    def go_on(self, found: Found, *, power_loss: bool) -> None:
        """Messages above the committed offset are redelivered, whatever happened to their copies."""
        self.commits.go_on(power_loss=power_loss)
        progress = found.of_group(CONSUMERS_GROUP)
        for number, (topic, queue_id, offset) in list(self.given_back.items()):
            if progress.get((topic, queue_id), 0) <= offset:
                del self.given_back[number]

    def check(self, found: Found, *, power_loss: bool) -> None:
        """Check commits, and that each nacked message below the offset has a copy."""
        self.commits.check(found, power_loss=power_loss)
        progress = found.of_group(CONSUMERS_GROUP)
        copied = {
            sent_of(placed, self.senders).number
            for placed in found.records
            if is_for_group(placed.message, CONSUMERS_GROUP)
        }
        there = {
            (placed.message.topic, placed.message.queue_id, placed.message.queue_offset) for placed in found.records
        }
        for number, (topic, queue_id, offset) in self.given_back.items():
            passed = progress.get((topic, queue_id), 0) > offset
            # A copy has a higher offset than its original: retention deletes it later.
            if passed and (topic, queue_id, offset) in there:
                expect(number in copied, f"message {number} at {topic} {queue_id} {offset} was nacked and is lost")

    def left(self, found: Found) -> int:
        """0: nacked messages are redelivered forever."""
        return 0


def pull(caller: Caller, queue: Queue, offset: int, count: int = MESSAGES_PER_PULL) -> PullResult | None:
    """Pull a few messages from `offset`; None without an answer."""
    request = core.pull_request(*queue, offset, count, PULL_BYTES)
    outcome = caller.call(core.pull(request))
    result: PullResult | None = outcome.value if outcome.error is None else None
    return result


# Members of a group: they join, consume their queues, commit, leave, and die.
#
# A queue has one owner: a commit by a former owner is rejected.


MEMBERS_GROUP = "members"
SESSION_MS = 3_000
WORKS_MAX = 120
LOOK_CHANCE = 0.2
PATIENT_COUNT = 500


@dataclass(slots=True)
class _Held:
    """A queue that a member owns."""

    epoch: int
    position: int


@dataclass(slots=True)
class _Member:
    name: str
    generation: int = -1
    queues: dict[Queue, _Held] = field(default_factory=dict)


@dataclass(slots=True)
class Members:
    """Outcomes of one group's members, over all lives of a store."""

    rng: random.Random
    patient: bool = False
    commits: Commits = field(default_factory=lambda: Commits(MEMBERS_GROUP))
    _given: dict[Queue, tuple[int, str]] = field(default_factory=dict)
    """Last known owner and epoch of each queue."""
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
        """From join to leave, or to death, which only closes the connection."""
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
            caller.call(group_calls.leave(MEMBERS_GROUP, member.name))

    def _join(self, caller: Caller, member: _Member) -> bool:
        holding = [(*queue, held.epoch) for queue, held in member.queues.items()]
        request = GroupJoinRequest(MEMBERS_GROUP, list(TOPICS), member.name, "", SESSION_MS, EARLIEST, 0, holding)
        outcome = caller.call(group_calls.join(request))
        if outcome.error is None:
            self._take(caller, member, outcome.value)
        return outcome.error is None

    def _look(self, caller: Caller, member: _Member) -> bool:
        """Poll for an assignment: held until it changes, or answered immediately."""
        generation = self.rng.choice((member.generation, -1))
        outcome = caller.call(group_calls.heartbeat(MEMBERS_GROUP, member.name, generation, SESSION_MS / 1000))
        if outcome.error is not None:
            return False
        if outcome.value.changed:
            self._take(caller, member, outcome.value)
        return True

    def _take(self, caller: Caller, member: _Member, given: GroupAssignment) -> None:
        """Adopt an assignment; drop all other queues."""
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
            caller.call(group_calls.release(MEMBERS_GROUP, member.name, given.generation))

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
        commit = group_calls.commit_of_member(MEMBERS_GROUP, member.name, [(*queue, held.epoch, pulled.next_offset)])
        outcome = caller.call(commit)
        if outcome.error is not None:
            return not isinstance(outcome.error, NotAMemberError)
        if outcome.value:
            del member.queues[queue]  # It has another owner or epoch.
            return True
        mine = given[0] < held.epoch or given == (held.epoch, member.name)
        expect(mine, f"{member.name} committed {queue} by epoch {held.epoch} when {given} had it")
        self.commits.answered(queue, pulled.next_offset)
        held.position = pulled.next_offset
        return True

    # Invariants

    def forget(self, topic: str) -> None:
        self.commits.forget(topic)

    def go_on(self, found: Found, *, power_loss: bool) -> None:
        self.commits.go_on(power_loss=power_loss)
        if power_loss:
            self._given.clear()

    def check(self, found: Found, *, power_loss: bool) -> None:
        self.commits.check(found, power_loss=power_loss)

    def left(self, found: Found) -> int:
        """Messages that were not consumed."""
        progress = found.of_group(MEMBERS_GROUP)
        queues = {(placed.message.topic, placed.message.queue_id) for placed in found.records}
        return sum(
            offset >= progress.get(queue, 0)
            for queue in queues
            if queue[0] in TOPICS and queue[0] not in self.commits.deleted
            for offset, _ in in_queue(queue, found)
        )


# Simple consumers: they receive, acknowledge, extend the visibility timeout, and abandon messages.
#
# A received message that is not acknowledged is in an open check point or was redelivered. An acknowledged message is
# never redelivered, and no message before its timeout. After a power loss, messages received before it may be
# redelivered once more, except a contiguous run of open ones from the committed offset, which the next start skips. Any
# message may be after the clock was set back by more than the minute that store timestamps stay ahead of it.


POP_GROUP = "receivers"
OWN_TOPICS = (*TOPICS, *(pop_retry_topic(POP_GROUP, topic) for topic in TOPICS))
POP_RETRIES_MAX = 3
IN_HAND_MAX = 20
HOARD_MAX = 12
INVISIBLE_MS = (1_000, 1_000, 5_000, 60_000)
QueueOffset = tuple[str, int, int]


@dataclass(slots=True)
class Receivers:
    """Outcomes of one group's simple consumers, over all lives of a store."""

    rng: random.Random
    senders: Senders
    hoards: bool = False
    """Keeps many check points open for long."""
    patient: bool = False
    acked: set[int] = field(default_factory=set)
    """Messages whose acknowledgement was answered, by number; a power loss may lose it."""
    tried: Counter[int] = field(default_factory=Counter)
    """Acknowledgement requests of each message that were not rejected as too late."""
    repeatable: set[int] = field(default_factory=set)
    """Messages that may be redelivered after an acknowledgement."""
    deleted: set[str] = field(default_factory=set)
    _not_before_ms: dict[int, int] = field(default_factory=dict)
    """Earliest redelivery time of each message, by number."""
    _latest_ms: int = 0
    """The latest time of all lives: clocks are set back."""
    _set_back: bool = False

    def run(self, paths: StorePaths, schedule: Schedule, clock: SimulatedClock) -> None:
        caller = Caller(paths.socket("query"), schedule)
        hand: list[StoredMessage] = []
        try:
            while caller.call(group_calls.change(POP_GROUP, POP_RETRIES_MAX, 1, None)).error is not None:
                schedule.pause()
            while True:
                self._act(caller, hand, clock)
                schedule.pause()
        finally:
            caller.close()

    def run_once(self, paths: StorePaths, schedule: Schedule, clock: SimulatedClock) -> None:
        """A short life: receive some messages, acknowledge the first, abandon the others."""
        caller = Caller(paths.socket("query"), schedule)
        try:
            for _ in tries(schedule):
                if hand := self._receive(caller, clock):
                    self._ack(caller, hand[:1])
                    break
        finally:
            caller.close()

    def _act(self, caller: Caller, hand: list[StoredMessage], clock: SimulatedClock) -> None:
        chance = self.rng.random()
        if self.hoards and not self.patient and chance < 0.6 and len(hand) < IN_HAND_MAX:
            self._hoard(caller, hand, clock)
        elif not hand or (chance < 0.4 and len(hand) < IN_HAND_MAX):
            hand += self._receive(caller, clock)
        elif self.patient or chance < 0.7:
            count = len(hand) if self.patient else self.rng.randint(1, len(hand))
            if not self.patient and self.rng.random() < 0.5:
                self.rng.shuffle(hand)
            self._ack(caller, [hand.pop(0) for _ in range(count)])
        elif chance < 0.8:
            hand += self._ask_for_time(caller, hand.pop(self.rng.randrange(len(hand))))
        elif chance < 0.9:
            hand.pop(self.rng.randrange(len(hand)))

    def _hoard(self, caller: Caller, hand: list[StoredMessage], clock: SimulatedClock) -> None:
        """Open many check points for long, with a few messages each."""
        for _ in range(self.rng.randint(2, HOARD_MAX)):
            received = self._receive(caller, clock, self.rng.randint(1, 2), INVISIBLE_MS[-1])
            hand += received
            if not received:
                return

    def _receive(
        self, caller: Caller, clock: SimulatedClock, count: int = 0, invisible_ms: int = 0
    ) -> list[StoredMessage]:
        invisible_ms = invisible_ms or self.rng.choice(INVISIBLE_MS)
        timeout_ms = self.rng.choice((0, 0, 200))
        count = count or (PATIENT_COUNT if self.patient else self.rng.randint(1, 8))
        request = GroupReceiveRequest(POP_GROUP, list(TOPICS), count, invisible_ms, timeout_ms, EARLIEST, 0)
        outcome = caller.call(group_calls.receive(request))
        received: list[StoredMessage] = outcome.value if outcome.error is None else []
        self._latest_ms = max(self._latest_ms, clock.latest_ms)
        self._set_back = self._set_back or clock.set_back
        for message in received:
            number = self.senders.number_of(message)
            what = f"message {number} of {message.topic} {message.queue_id} {message.queue_offset} is redelivered"
            if not self._may_repeat(number):
                expect(number not in self.acked, f"{what} after its acknowledgement")
                early_ms = self._not_before_ms.get(number, 0) - self._latest_ms
                expect(early_ms <= 0, f"{what} {early_ms} ms before its time")
            self._see(number, message)
        return received

    def _may_repeat(self, number: int) -> bool:
        return self._set_back or number in self.repeatable

    def _see(self, number: int, message: StoredMessage) -> None:
        received_ms, invisible_ms = map(int, message.properties[group_calls.HANDLE].split()[1:3])
        self._not_before_ms[number] = received_ms + invisible_ms

    def _ack(self, caller: Caller, messages: list[StoredMessage]) -> None:
        numbers = {self.senders.number_of(message) for message in messages}
        self.tried.update(numbers)
        outcome = caller.call(group_calls.ack(POP_GROUP, messages))
        if outcome.error is None and outcome.value == len(messages):
            self.acked |= numbers
        elif outcome.error is None and not outcome.value:
            self.tried.subtract(numbers)

    def _ask_for_time(self, caller: Caller, message: StoredMessage) -> list[StoredMessage]:
        number = self.senders.number_of(message)
        # Without an answer, the timeout in effect is unknown.
        self._not_before_ms.pop(number, None)
        seconds = self.rng.choice(INVISIBLE_MS) / 1000
        outcome = caller.call(group_calls.change_invisible(POP_GROUP, message, seconds))
        if outcome.error is not None:
            return []
        self._see(number, outcome.value)
        return [outcome.value]

    # Invariants

    def forget(self, topic: str) -> None:
        self.deleted |= {topic, pop_retry_topic(POP_GROUP, topic)}

    def go_on(self, found: Found, *, power_loss: bool) -> None:
        if not power_loss:
            return
        # The committed offset may be older than the receives. A contiguous run of open messages from it is skipped.
        checked = _CheckPoints(found)
        passed = checked.passed_from(found.of_group(POP_GROUP))
        numbers = {place: self.senders.number_of(placed.message) for place, placed in self._of_topics(found)}
        received = self.tried.keys() | self._not_before_ms.keys()
        received |= {number for place, number in numbers.items() if place in checked.newest}
        waiting = {numbers[place]: due_ms for place, due_ms in passed.items() if place in numbers}
        self.repeatable |= received - waiting.keys()
        self._not_before_ms |= waiting
        # Open although acknowledged: the acknowledgement was lost, and the message is redelivered after its timeout.
        self.acked -= waiting.keys()

    def check(self, found: Found, *, power_loss: bool) -> None:
        """Check that each message below the offset is open, acknowledged, or redelivered once."""
        checked = _CheckPoints(found)
        times = Counter(
            (sent_of(placed, self.senders).number, placed.message.reconsume_times)
            for placed in found.records
            if is_for_group(placed.message, POP_GROUP)
        )
        twice = [number for (number, _), count in times.items() if count > 1 and not self._may_repeat(number)]
        expect(not twice, f"messages {twice[:5]} were redelivered twice")
        revived = found.of_group(REVIVE_GROUP)
        for place, placed in self._received(found):
            point = checked.newest.get(place)
            expect(point is not None, f"the committed offset passes {place}, which was never received")
            assert point is not None
            number = sent_of(placed, self.senders).number
            if not checked.is_open(place):
                again = times[number, placed.message.reconsume_times + 1]
                expect(
                    self.tried[number] > 0 or again > 0,
                    f"message {number} at {place} is lost without an acknowledgement",
                )
                continue
            lost = not power_loss and number in self.acked and not self._may_repeat(number)
            expect(not lost, f"message {number} at {place} is open although acknowledged")
            begin = revived.get((REVIVE_TOPIC, point.revive_queue), 0)
            expect(
                point.revive_offset >= begin,
                f"{place} waits at {point.revive_offset} of revive queue {point.revive_queue}, read from {begin} on",
            )

    def _received(self, found: Found) -> Iterator[tuple[QueueOffset, Placed]]:
        progress = found.of_group(POP_GROUP)
        for place, placed in self._of_topics(found):
            if place[2] < progress.get(place[:2], 0) and placed.offset >= found.minimum:
                yield place, placed

    def _of_topics(self, found: Found) -> Iterator[tuple[QueueOffset, Placed]]:
        for placed in found.records:
            message = placed.message
            if message.topic in OWN_TOPICS and message.topic not in self.deleted:
                yield (message.topic, message.queue_id, message.queue_offset), placed

    def left(self, found: Found) -> int:
        """Messages that were not received or not acknowledged."""
        checked, progress = _CheckPoints(found), found.of_group(POP_GROUP)
        return sum(
            place[2] >= progress.get(place[:2], 0) or checked.is_open(place) for place, _ in self._of_topics(found)
        )


class _CheckPoints:
    """The check points of a log, and their acknowledgements."""

    def __init__(self, found: Found) -> None:
        self.newest: dict[QueueOffset, PopCheckPoint] = {}
        self._done: set[tuple[check_points.Key, int]] = set()
        for placed in found.records:
            said = check_points.read(placed.message) if placed.message.topic == REVIVE_TOPIC else None
            if isinstance(said, PopAck):
                self._done.update((said.key, offset) for offset in said.offsets)
            elif isinstance(said, PopCheckPoint) and said.group == POP_GROUP:
                self._add(said)

    def _add(self, point: PopCheckPoint) -> None:
        for place in _places_of(point):
            before = self.newest.get(place)
            if before is None or before.pop_time_ms < point.pop_time_ms:
                self.newest[place] = point

    def passed_from(self, progress: Mapping[tuple[str, int], int]) -> dict[QueueOffset, int]:
        """Open places that a start skips, each with its earliest redelivery time in ms."""
        points = {id(point): point for point in self.newest.values()}.values()
        stands, passed = dict(progress), dict[QueueOffset, int]()
        for point in sorted(points, key=lambda point: point.key):
            queue = point.topic, point.queue_id
            open_ = [place for place in _places_of(point) if self.newest[place] is point and self.is_open(place)]
            if open_ and queue in stands and point.offsets[0] <= stands[queue] < point.next_offset:
                stands[queue] = point.next_offset
                passed |= dict.fromkeys(open_, point.due_ms)
        return passed

    def is_open(self, place: QueueOffset) -> bool:
        """Whether a place was received and is not acknowledged."""
        point = self.newest.get(place)
        return point is not None and (point.key, place[2]) not in self._done


def _places_of(point: PopCheckPoint) -> list[QueueOffset]:
    return [(point.topic, point.queue_id, offset) for offset in point.offsets]


# Deleted topics, and which records must or must not have a unit in a queue.


PAUSES = (20, 400)


class Place(enum.Enum):
    """Whether a record has a unit in its queue."""

    MUST = "it is there"
    MAY = "it may be there"
    MUST_NOT = "it went with its topic"


@dataclass(slots=True)
class Deletions:
    """Deletions over all lives of a store."""

    rng: random.Random
    senders: Senders
    others: Sequence[Party] = ()
    """Clients that must be notified of deletions."""
    topics: set[str] = field(default_factory=set)
    """Topics whose deletion was requested."""
    _asked: str = ""
    """The topic whose deletion has no answer yet."""
    _gone: set[int] = field(default_factory=set)
    _unsure: set[int] = field(default_factory=set)

    def run(self, paths: StorePaths, schedule: Schedule) -> None:
        """A client that deletes topics: a task of the schedule."""
        caller = Caller(paths.socket("writer"), schedule)
        try:
            while True:
                for _ in range(self.rng.randint(*PAUSES)):
                    schedule.pause()
                self._delete(caller, self.rng.choice(TOPICS))
        finally:
            self._end()
            caller.close()

    def _delete(self, caller: Caller, topic: str) -> None:
        stored = {sent.number for sent in self._of(topic) if sent.fate is Fate.STORED}
        self._asked = topic
        self.topics.add(topic)
        for other in self.others:
            other.forget(topic)
        error = caller.call(core.delete_topic(topic)).error
        self._end()
        if error is None:
            self._gone |= stored

    def _end(self) -> None:
        """Messages sent before the answer may be on either side of the deletion."""
        self._unsure.update(sent.number for sent in self._of(self._asked))
        self._asked = ""

    def _of(self, topic: str) -> list[Sent]:
        return [sent for sent in self.senders.sent if sent.topic == topic]

    def place(self, placed: Placed) -> Place:
        """The expected state of a record."""
        topic = placed.message.topic
        if topic not in self.topics or is_note(placed):
            return Place.MUST
        number = sent_of(placed, self.senders).number
        if is_copy(placed):
            return Place.MAY
        if number in self._gone:
            return Place.MUST_NOT
        return Place.MAY if topic == self._asked or number in self._unsure else Place.MUST
