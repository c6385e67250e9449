"""Messages of consumer groups that wait in a delay level for their retry.

They are in no queue that the group reads, so they are no part of its lag. Each is read when it is new and again when it
is delivered, so that only a number for each group is kept of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from mqproc.ipc.control_words import Words
from mqproc.layout import control
from mqproc.layout.properties import REAL_TOPIC
from mqproc.layout.record_codec import decode_records
from mqproc.store.cooperative import Slices
from mqproc.store.read.queries import StoreQueries
from mqproc.topic_names import RETRY_PREFIX, SCHEDULE_TOPIC
from mqproc.types import PullStatus

BATCH_MESSAGES: Final = 256
BATCH_BYTES: Final = 1 << 20


@dataclass(slots=True)
class _Level:
    """Retries in queue offsets [begin, next) of a level, by retry topic."""

    begin: int = 0
    next: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def start_at(self, offset: int) -> None:
        self.begin = self.next = offset
        self.counts.clear()


class WaitingRetries:
    """Counts waiting retries of all groups. `words`: the keeper's delivered offsets."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._levels = [_Level() for _ in control.LEVEL_OFFSETS]

    def update(self, reading: StoreQueries) -> Slices[None]:
        """Subtract delivered messages, and add those that came since the last call."""
        for queue_id, word in enumerate(control.LEVEL_OFFSETS):
            bounds = reading.queues.bounds(SCHEDULE_TOPIC, queue_id)
            if bounds is None:
                continue
            level, begin = self._levels[queue_id], max(self._words[word], bounds.min_offset)
            if not bounds.min_offset <= level.begin <= begin < level.next:
                # All are delivered, or it is not known which: retention has deleted some.
                level.start_at(begin)
            while level.begin < begin < level.next:
                level.begin, topics = self._read(reading, queue_id, level.begin, begin)
                level.counts -= topics
                yield
            while level.next < bounds.max_offset:
                level.next, topics = self._read(reading, queue_id, level.next, bounds.max_offset)
                level.counts += topics
                yield

    def _read(self, reading: StoreQueries, queue_id: int, at: int, stop: int) -> tuple[int, Counter[str]]:
        """Count a batch of retries below an offset; returns the next offset and them."""
        pulled = reading.pull(SCHEDULE_TOPIC, queue_id, at, min(BATCH_MESSAGES, stop - at), BATCH_BYTES)
        topics: Counter[str] = Counter()
        if pulled.status is PullStatus.FOUND:
            for message in decode_records(pulled.records.data):
                topic = message.properties.get(REAL_TOPIC, "")
                if topic.startswith(RETRY_PREFIX) and message.queue_offset < stop:
                    topics[topic] += 1
        return min(max(at + 1, pulled.next_offset), stop), topics

    def counts(self) -> Counter[str]:
        """Number of waiting messages by retry topic."""
        total: Counter[str] = Counter()
        for level in self._levels:
            total += level.counts
        return total
