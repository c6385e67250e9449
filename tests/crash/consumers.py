"""Consumers of a simulated group: they pull, give back, and commit, and remember what they were told.

A message that was not consumed is given back (nack) before its queue's progress goes past it, as every client does. So
what progress has passed was consumed, or a copy of it is in the group's retry topic or among its dead letters.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from mqproc.client import core, group_calls
from mqproc.errors import StaleOffsetError
from mqproc.message import PullResult, PullStatus
from mqproc.names import RETRY_PREFIX
from mqproc.paths import StorePaths
from mqproc.store.groups.offsets_json import Progress
from tests.crash.copies import OF_GROUPS, goes_to, is_copy, sent_of
from tests.crash.placed import Placed, expect
from tests.crash.schedule import Schedule
from tests.crash.senders import TOPICS, Senders
from tests.crash.tasks import Caller

GROUP = "workers"
RETRIES_MAX = 2
MESSAGES_PER_PULL = 5
PULL_BYTES = 1 << 20
NACK_CHANCE = 0.3
Queue = tuple[str, int]


@dataclass(slots=True)
class Consumers:
    """What one group's consumers were told, over all lives of a store."""

    rng: random.Random
    senders: Senders
    committed: dict[Queue, int] = field(default_factory=dict)
    """Commits that were answered; a power loss may take them."""
    asked: dict[Queue, int] = field(default_factory=dict)
    """The furthest that was ever asked for."""
    deleted: set[str] = field(default_factory=set)
    given_back: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    """By number: the place of a message whose nack was answered."""

    def run(self, paths: StorePaths, schedule: Schedule, queues: int) -> None:
        """A consumer's life: a task of the schedule."""
        caller = Caller(paths.socket("query"), schedule)
        positions: dict[Queue, int] = {}
        try:
            while caller.call(group_calls.change(GROUP, RETRIES_MAX, 1, None)).error is not None:
                schedule.pause()
            while True:
                topic = self.rng.choice((*TOPICS, RETRY_PREFIX + GROUP))
                queue = topic, self.rng.randrange(queues)
                self._consume(caller, queue, positions)
                schedule.pause()
        finally:
            caller.close()

    def _consume(self, caller: Caller, queue: Queue, positions: dict[Queue, int]) -> None:
        if queue not in positions and not self._ask_for_progress(caller, queue, positions):
            return
        request = core.pull_request(*queue, positions[queue], MESSAGES_PER_PULL, PULL_BYTES, "", 0.0, False)
        outcome = caller.call(core.pull(request))
        if outcome.error is not None:
            return
        pulled: PullResult = outcome.value
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
            expect(self.senders.of_body(message.body) is not None, f"{queue}: nobody sent what lies at {message}")
            if self.rng.random() > NACK_CHANCE:
                continue
            level = self.rng.choice((0, 1, 1, 2, -1))
            outcome = caller.call(group_calls.nack(GROUP, [(*queue, message.queue_offset)], level, -1))
            if outcome.error is not None or outcome.value[0] == group_calls.NOT_NOW:
                return message.queue_offset
            sent = self.senders.of_body(message.body)
            if sent is not None and outcome.value[0] >= 0:
                self.given_back[sent.number] = (*queue, message.queue_offset)
        return pulled.next_offset

    def _commit(self, caller: Caller, queue: Queue, end: int, positions: dict[Queue, int]) -> None:
        self.asked[queue] = max(self.asked.get(queue, 0), end)
        error = caller.call(group_calls.commit(GROUP, *queue, end)).error
        if error is None:
            positions[queue] = end
            if queue[0] not in self.deleted:
                self.committed[queue] = max(self.committed.get(queue, 0), end)
        elif isinstance(error, StaleOffsetError):
            positions.pop(queue)  # Another consumer was faster.

    def _ask_for_progress(self, caller: Caller, queue: Queue, positions: dict[Queue, int]) -> bool:
        committed = self.committed.get(queue, 0)
        outcome = caller.call(group_calls.info(GROUP))
        if outcome.error is not None:
            return False
        found = {(each.topic, each.queue_id): each.offset or 0 for each in outcome.value.queues}
        expect(found.get(queue, 0) >= committed, f"{queue}: progress {found.get(queue)}, but {committed} was committed")
        positions[queue] = found.get(queue, 0)
        return True

    # What must be true

    def lost_power(self) -> None:
        """Commits may be gone with what was not durable."""
        self.committed.clear()

    def go_on(self, found: Iterable[Progress]) -> None:
        """What the group stands before comes again, and may be consumed then, whatever became of its copy."""
        progress = {(at.topic, at.queue_id): at.offset for at in found if at.group == GROUP}
        for number, (topic, queue_id, offset) in list(self.given_back.items()):
            if progress.get((topic, queue_id), 0) <= offset:
                del self.given_back[number]

    def forget(self, topic: str) -> None:
        """A topic is deleted, and with it what the group had consumed of it, now or when the writer comes to it."""
        self.deleted.add(topic)
        for queue in [queue for queue in self.committed if queue[0] == topic]:
            del self.committed[queue]

    def check(self, found: Iterable[Progress], records: list[Placed], begin: int, *, power_loss: bool) -> None:
        """Progress is neither lost nor invented, and nothing that was given back is behind it without a copy."""
        progress = {(at.topic, at.queue_id): at.offset for at in found if at.group == GROUP}
        for queue, offset in progress.items():
            asked = self.asked.get(queue, 0)
            expect(offset <= asked or offset <= self._minimum(queue, records), f"{queue}: {offset} is beyond {asked}")
        for queue, offset in {} if power_loss else self.committed.items():
            expect(progress.get(queue, 0) >= offset, f"{queue}: {progress.get(queue)} is below the commit of {offset}")
        copied = {
            sent_of(placed, self.senders).number
            for placed in records
            if is_copy(placed) and goes_to(placed.message).startswith(OF_GROUPS)
        }
        there = {(placed.message.topic, placed.message.queue_id, placed.message.queue_offset) for placed in records}
        for number, (topic, queue_id, offset) in self.given_back.items():
            passed = progress.get((topic, queue_id), 0) > offset
            # A copy lies behind the original, and is not gone by retention while that is there.
            if passed and (topic, queue_id, offset) in there:
                expect(number in copied, f"message {number} at {topic} {queue_id} {offset} was given back, and is gone")

    def _minimum(self, queue: Queue, records: list[Placed]) -> int:
        """The first offset of a queue that the log has: progress is raised to it."""
        of_queue = [
            placed.message.queue_offset
            for placed in records
            if (placed.message.topic, placed.message.queue_id) == queue
        ]
        return min(of_queue, default=1 << 62)
