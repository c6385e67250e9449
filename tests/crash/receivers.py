"""Simple consumers of a simulated group: they receive, acknowledge, ask for more time, and forget.

What was received and not acknowledged is in an open check point, or was sent again. What was acknowledged never comes
again, and nothing comes again before its time is over. What was received before a loss of power may come once more, but
for what is open in a row from the group's progress on, which the next start passes; anything may when the clock is set
back by more than the minute that store times stay ahead of it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from mqproc.client import group_requests as group_calls
from mqproc.paths import StorePaths
from mqproc.store.offsets import pop_receipts as check_points
from mqproc.store.offsets.pop_receipts import PopAck, PopCheckPoint, pop_retry_topic
from mqproc.topic_names import REVIVE_GROUP, REVIVE_TOPIC
from mqproc.types import StoredMessage
from mqproc.wire.operations.groups import EARLIEST, GroupReceiveRequest
from tests.crash.copies import is_for_group, sent_of
from tests.crash.parties import Found
from tests.crash.placed import Placed, expect
from tests.crash.schedule import Schedule, SimulatedClock
from tests.crash.senders import TOPICS, Senders
from tests.crash.tasks import Caller, tries

GROUP = "receivers"
OWN_TOPICS = (*TOPICS, *(pop_retry_topic(GROUP, topic) for topic in TOPICS))
RETRIES_MAX = 3
IN_HAND_MAX = 20
PATIENT_COUNT = 500
HOARD_MAX = 12
INVISIBLE_MS = (1_000, 1_000, 5_000, 60_000)
Place = tuple[str, int, int]


@dataclass(slots=True)
class Receivers:
    """What one group's simple consumers were told, over all lives of a store."""

    rng: random.Random
    senders: Senders
    hoards: bool = False
    """They have many check points open at a time, for long."""
    patient: bool = False
    acked: set[int] = field(default_factory=set)
    """Numbers of messages whose acknowledgement was answered; a power loss may take it."""
    tried: Counter[int] = field(default_factory=Counter)
    """How often somebody asked to acknowledge a message, and was not told that it was too late."""
    repeatable: set[int] = field(default_factory=set)
    """Those that may be there twice."""
    deleted: set[str] = field(default_factory=set)
    _not_before_ms: dict[int, int] = field(default_factory=dict)
    """By number: when a message may come again."""
    _latest_ms: int = 0
    """The latest time of all lives: clocks are set back."""
    _set_back: bool = False

    def run(self, paths: StorePaths, schedule: Schedule, clock: SimulatedClock) -> None:
        caller = Caller(paths.socket("query"), schedule)
        hand: list[StoredMessage] = []
        try:
            while caller.call(group_calls.change(GROUP, RETRIES_MAX, 1, None)).error is not None:
                schedule.pause()
            while True:
                self._act(caller, hand, clock)
                schedule.pause()
        finally:
            caller.close()

    def run_once(self, paths: StorePaths, schedule: Schedule, clock: SimulatedClock) -> None:
        """A short life: some messages are received, the first of them acknowledged, and the others forgotten."""
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
        """Many check points at a time, all open for long: a few messages in each."""
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
        request = GroupReceiveRequest(GROUP, list(TOPICS), count, invisible_ms, timeout_ms, EARLIEST, 0)
        outcome = caller.call(group_calls.receive(request))
        received: list[StoredMessage] = outcome.value if outcome.error is None else []
        self._latest_ms = max(self._latest_ms, clock.latest_ms)
        self._set_back = self._set_back or clock.set_back
        for message in received:
            number = self.senders.number_of(message)
            what = f"message {number} of {message.topic} {message.queue_id} {message.queue_offset} comes again"
            if not self._may_repeat(number):
                expect(number not in self.acked, f"{what}, though it is done")
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
        outcome = caller.call(group_calls.ack(GROUP, messages))
        if outcome.error is None and outcome.value == len(messages):
            self.acked |= numbers
        elif outcome.error is None and not outcome.value:
            self.tried.subtract(numbers)

    def _ask_for_time(self, caller: Caller, message: StoredMessage) -> list[StoredMessage]:
        number = self.senders.number_of(message)
        # Without an answer nobody knows which time counts.
        self._not_before_ms.pop(number, None)
        seconds = self.rng.choice(INVISIBLE_MS) / 1000
        outcome = caller.call(group_calls.change_invisible(GROUP, message, seconds))
        if outcome.error is not None:
            return []
        self._see(number, outcome.value)
        return [outcome.value]

    # What must be true

    def forget(self, topic: str) -> None:
        self.deleted |= {topic, pop_retry_topic(GROUP, topic)}

    def go_on(self, found: Found, *, power_loss: bool) -> None:
        if not power_loss:
            return
        # The group's progress may be from before they were received. What is open in a row from there on is passed.
        checked = _CheckPoints(found)
        passed = checked.passed_from(found.of_group(GROUP))
        numbers = {place: self.senders.number_of(placed.message) for place, placed in self._of_topics(found)}
        received = self.tried.keys() | self._not_before_ms.keys()
        received |= {number for place, number in numbers.items() if place in checked.newest}
        waiting = {numbers[place]: due_ms for place, due_ms in passed.items() if place in numbers}
        self.repeatable |= received - waiting.keys()
        self._not_before_ms |= waiting
        # What was acknowledged and is open has lost that, and comes when its time is over.
        self.acked -= waiting.keys()

    def check(self, found: Found, *, power_loss: bool) -> None:
        """What progress has passed is open where the next start looks for it, or done, or was sent again, once."""
        checked = _CheckPoints(found)
        times = Counter(
            (sent_of(placed, self.senders).number, placed.message.reconsume_times)
            for placed in found.records
            if is_for_group(placed.message, GROUP)
        )
        twice = [number for (number, _), count in times.items() if count > 1 and not self._may_repeat(number)]
        expect(not twice, f"messages {twice[:5]} were sent again twice")
        revived = found.of_group(REVIVE_GROUP)
        for place, placed in self._received(found):
            point = checked.newest.get(place)
            expect(point is not None, f"progress is past {place}, which nobody has received")
            assert point is not None
            number = sent_of(placed, self.senders).number
            if not checked.is_open(place):
                again = times[number, placed.message.reconsume_times + 1]
                expect(self.tried[number] > 0 or again > 0, f"message {number} at {place} is gone, and nobody was done")
                continue
            lost = not power_loss and number in self.acked and not self._may_repeat(number)
            expect(not lost, f"message {number} at {place} is open, though it is done")
            begin = revived.get((REVIVE_TOPIC, point.revive_queue), 0)
            expect(
                point.revive_offset >= begin,
                f"{place} waits at {point.revive_offset} of revive queue {point.revive_queue}, read from {begin} on",
            )

    def _received(self, found: Found) -> Iterator[tuple[Place, Placed]]:
        progress = found.of_group(GROUP)
        for place, placed in self._of_topics(found):
            if place[2] < progress.get(place[:2], 0) and placed.offset >= found.minimum:
                yield place, placed

    def _of_topics(self, found: Found) -> Iterator[tuple[Place, Placed]]:
        for placed in found.records:
            message = placed.message
            if message.topic in OWN_TOPICS and message.topic not in self.deleted:
                yield (message.topic, message.queue_id, message.queue_offset), placed

    def left(self, found: Found) -> int:
        """Messages that were not received, or are not done."""
        checked, progress = _CheckPoints(found), found.of_group(GROUP)
        return sum(
            place[2] >= progress.get(place[:2], 0) or checked.is_open(place) for place, _ in self._of_topics(found)
        )


class _CheckPoints:
    """The check points in a log, and what was acknowledged of them."""

    def __init__(self, found: Found) -> None:
        self.newest: dict[Place, PopCheckPoint] = {}
        self._done: set[tuple[check_points.Key, int]] = set()
        for placed in found.records:
            said = check_points.read(placed.message) if placed.message.topic == REVIVE_TOPIC else None
            if isinstance(said, PopAck):
                self._done.update((said.key, offset) for offset in said.offsets)
            elif isinstance(said, PopCheckPoint) and said.group == GROUP:
                self._add(said)

    def _add(self, point: PopCheckPoint) -> None:
        for place in _places_of(point):
            before = self.newest.get(place)
            if before is None or before.pop_time_ms < point.pop_time_ms:
                self.newest[place] = point

    def passed_from(self, progress: Mapping[tuple[str, int], int]) -> dict[Place, int]:
        """Open places that a start has progress pass, with the time in ms before which nobody gets them again."""
        points = {id(point): point for point in self.newest.values()}.values()
        stands, passed = dict(progress), dict[Place, int]()
        for point in sorted(points, key=lambda point: point.key):
            queue = point.topic, point.queue_id
            open_ = [place for place in _places_of(point) if self.newest[place] is point and self.is_open(place)]
            if open_ and queue in stands and point.offsets[0] <= stands[queue] < point.next_offset:
                stands[queue] = point.next_offset
                passed |= dict.fromkeys(open_, point.due_ms)
        return passed

    def is_open(self, place: Place) -> bool:
        """Whether somebody has received what lies there, and it is not done."""
        point = self.newest.get(place)
        return point is not None and (point.key, place[2]) not in self._done


def _places_of(point: PopCheckPoint) -> list[Place]:
    return [(point.topic, point.queue_id, offset) for offset in point.offsets]
