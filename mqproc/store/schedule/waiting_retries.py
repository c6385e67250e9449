"""Messages of consumer groups that wait in a delay level for their retry.

They are in no queue that the group reads, so they are no part of its lag. Each is read once.
"""

from __future__ import annotations

from collections import Counter, deque
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


class WaitingRetries:
    """Counts waiting retries of all groups. `words`: the keeper's delivered offsets."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._next = [0] * len(control.LEVEL_OFFSETS)
        self._waiting: list[deque[tuple[int, str]]] = [deque() for _ in control.LEVEL_OFFSETS]
        """By level: queue offset and retry topic."""

    def update(self, reading: StoreQueries) -> Slices[None]:
        """Drop delivered messages, and read those that came since the last call."""
        for queue_id, word in enumerate(control.LEVEL_OFFSETS):
            bounds = reading.queues.bounds(SCHEDULE_TOPIC, queue_id)
            if bounds is None:
                continue
            waiting, begin = self._waiting[queue_id], max(self._words[word], bounds.min_offset)
            while waiting and waiting[0][0] < begin:
                waiting.popleft()
            while (at := max(self._next[queue_id], begin)) < bounds.max_offset:
                self._next[queue_id] = self._read(reading, queue_id, at)
                yield

    def _read(self, reading: StoreQueries, queue_id: int, at: int) -> int:
        """Read a batch; returns the next offset."""
        pulled = reading.pull(SCHEDULE_TOPIC, queue_id, at, BATCH_MESSAGES, BATCH_BYTES)
        if pulled.status is PullStatus.FOUND:
            for message in decode_records(pulled.records.data):
                topic = message.properties.get(REAL_TOPIC, "")
                if topic.startswith(RETRY_PREFIX):
                    self._waiting[queue_id].append((message.queue_offset, topic))
        return max(at + 1, pulled.next_offset)

    def counts(self) -> Counter[str]:
        """Number of waiting messages by retry topic."""
        return Counter(topic for waiting in self._waiting for _offset, topic in waiting)
