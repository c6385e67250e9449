"""Consumers of a simulated group: they pull, give back, and commit, and remember what they were told.

A message that was not consumed is given back (nack) before its queue's progress goes past it, as every client does. So
what progress has passed was consumed, or a copy of it is in the group's retry topic or among its dead letters.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from mqproc.client import group_requests as group_calls
from mqproc.client import requests as core
from mqproc.errors import StaleOffsetError
from mqproc.paths import StorePaths
from mqproc.topic_names import RETRY_PREFIX
from mqproc.types import PullResult, PullStatus
from tests.crash.copies import is_for_group, sent_of
from tests.crash.parties import Commits, Found, Queue
from tests.crash.placed import expect
from tests.crash.schedule import Schedule, SimulatedClock
from tests.crash.senders import TOPICS, Senders
from tests.crash.tasks import Caller

GROUP = "workers"
RETRIES_MAX = 2
MESSAGES_PER_PULL = 5
PULL_BYTES = 1 << 20
NACK_CHANCE = 0.3


@dataclass(slots=True)
class Consumers:
    """What one group's consumers were told, over all lives of a store."""

    rng: random.Random
    senders: Senders
    queues: int
    patient: bool = False
    commits: Commits = field(default_factory=lambda: Commits(GROUP))
    given_back: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    """By number: the place of a message whose nack was answered."""

    def run(self, paths: StorePaths, schedule: Schedule, clock: SimulatedClock) -> None:
        caller = Caller(paths.socket("query"), schedule)
        positions: dict[Queue, int] = {}
        try:
            while caller.call(group_calls.change(GROUP, RETRIES_MAX, 1, None)).error is not None:
                schedule.pause()
            while True:
                topic = self.rng.choice((*TOPICS, RETRY_PREFIX + GROUP))
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
            # Retention moves a queue's beginning; where there is nothing yet the same is asked again.
            positions[queue] = max(positions[queue], pulled.next_offset if pulled.min_offset > positions[queue] else 0)
            return
        end = self._end_of_consumed(caller, queue, pulled)
        if end > positions[queue]:
            self._commit(caller, queue, end, positions)

    def _end_of_consumed(self, caller: Caller, queue: Queue, pulled: PullResult) -> int:
        """Behind the last message that was consumed or given back."""
        for message in pulled.messages:
            number = self.senders.number_of(message)
            if self.rng.random() > NACK_CHANCE:
                continue
            level = self.rng.choice((0, 1, 1, 2, -1))
            outcome = caller.call(group_calls.nack(GROUP, [(*queue, message.queue_offset)], level, -1))
            if outcome.error is not None or outcome.value[0] == group_calls.NOT_NOW:
                return message.queue_offset
            # What another consumer has committed since this one pulled it is done, whatever becomes of one more copy.
            if outcome.value[0] >= 0 and message.queue_offset >= self.commits.committed.get(queue, 0):
                self.given_back[number] = (*queue, message.queue_offset)
        return pulled.next_offset

    def _commit(self, caller: Caller, queue: Queue, end: int, positions: dict[Queue, int]) -> None:
        self.commits.ask(queue, end)
        error = caller.call(group_calls.commit(GROUP, *queue, end)).error
        if error is None:
            positions[queue] = end
            self.commits.answered(queue, end)
        elif isinstance(error, StaleOffsetError):
            positions.pop(queue)  # Another consumer was faster.

    def _ask_for_progress(self, caller: Caller, queue: Queue, positions: dict[Queue, int]) -> bool:
        committed = self.commits.committed.get(queue, 0)
        outcome = caller.call(group_calls.info(GROUP))
        if outcome.error is not None:
            return False
        found = {(each.topic, each.queue_id): each.offset or 0 for each in outcome.value.queues}
        expect(found.get(queue, 0) >= committed, f"{queue}: progress {found.get(queue)}, but {committed} was committed")
        positions[queue] = found.get(queue, 0)
        return True

    # What must be true

    def forget(self, topic: str) -> None:
        self.commits.forget(topic)

    def go_on(self, found: Found, *, power_loss: bool) -> None:
        """What the group stands before comes again, and may be consumed then, whatever became of its copy."""
        self.commits.go_on(power_loss=power_loss)
        progress = found.of_group(GROUP)
        for number, (topic, queue_id, offset) in list(self.given_back.items()):
            if progress.get((topic, queue_id), 0) <= offset:
                del self.given_back[number]

    def check(self, found: Found, *, power_loss: bool) -> None:
        """Progress is neither lost nor invented, and nothing that was given back is behind it without a copy."""
        self.commits.check(found, power_loss=power_loss)
        progress = found.of_group(GROUP)
        copied = {
            sent_of(placed, self.senders).number for placed in found.records if is_for_group(placed.message, GROUP)
        }
        there = {
            (placed.message.topic, placed.message.queue_id, placed.message.queue_offset) for placed in found.records
        }
        for number, (topic, queue_id, offset) in self.given_back.items():
            passed = progress.get((topic, queue_id), 0) > offset
            # A copy lies behind the original, and is not gone by retention while that is there.
            if passed and (topic, queue_id, offset) in there:
                expect(number in copied, f"message {number} at {topic} {queue_id} {offset} was given back, and is gone")

    def left(self, found: Found) -> int:
        """It never ends: what is given back comes again."""
        return 0


def pull(caller: Caller, queue: Queue, offset: int, count: int = MESSAGES_PER_PULL) -> PullResult | None:
    """A few messages from `offset` on; None when there is no answer."""
    request = core.pull_request(*queue, offset, count, PULL_BYTES, "", 0.0, False)
    outcome = caller.call(core.pull(request))
    result: PullResult | None = outcome.value if outcome.error is None else None
    return result
