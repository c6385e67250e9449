"""How far consumer groups are behind, in messages and in seconds.

A group's progress is what `store.groups` keeps; what it has still to consume ends at the queue's maximum offset. The
age of the oldest such message is its record's store time, so it is looked up for a bounded number of queues.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from mqproc.config import Options
from mqproc.errors import CorruptStoreError
from mqproc.io import StoreIO
from mqproc.metrics.topics import OTHERS
from mqproc.paths import StorePaths
from mqproc.shm.words import Words
from mqproc.store.consume_queue import ConsumeQueueFiles
from mqproc.store.damage import KnownHoles
from mqproc.store.groups.progress import all_progress
from mqproc.store.queue_table import QueueTable
from mqproc.store.reads.log_records import LogRecords
from mqproc.store.reads.queue_times import QueueTimes
from mqproc.store.reads.store_views import WordsView
from mqproc.store.segments import LogSegments

TIMES_MAX: Final = 256
"""The ages of so many queues' oldest messages are looked up for one answer: those with the largest lag."""

REST_FACTOR: Final = 20
"""After an answer the same one is given for so many times as long as it took: a look costs 5 % of the time at most."""


@dataclass(frozen=True, slots=True)
class GroupLag:
    """One group in one topic."""

    group: str
    topic: str
    messages: int
    seconds: float
    """Age of the oldest message not consumed; 0 when there is none, or when it could not be looked up."""
    consumed: int = 0
    """Messages that the group has gone past in the topic's queues, ever: its offsets, added up."""


@dataclass(frozen=True, slots=True)
class _Behind:
    topic: str
    queue_id: int
    offset: int
    messages: int


class GroupLags:
    """Lags of one running store's groups."""

    def __init__(self, io: StoreIO, paths: StorePaths, options: Options, words: Words, table: QueueTable) -> None:
        self._io = io
        self._paths = paths
        self._options = options
        self._view = WordsView(words, table, sync_flush=options.sync_flush)
        self._found: list[GroupLag] = []
        self._fresh_until = 0.0

    def figures(self) -> list[GroupLag]:
        """Groups and topics in order, at most `metrics_series_max` and one for all others together."""
        began = time.monotonic()
        if began >= self._fresh_until:
            self._found = self._bounded(self._look())
            ended = time.monotonic()
            self._fresh_until = ended + REST_FACTOR * (ended - began)
        return self._found

    def _look(self) -> list[GroupLag]:
        try:
            progress = list(all_progress(self._io, self._paths))
        except (CorruptStoreError, OSError):
            # The query role tells of it; of these groups nothing is known.
            return []
        behind: dict[tuple[str, str], list[_Behind]] = {}
        for at in progress:
            bounds = self._view.queues.bounds(at.topic, at.queue_id)
            if bounds is None:
                continue
            offset = max(at.offset, bounds.min_offset)
            left = max(0, bounds.max_offset - offset)
            behind.setdefault((at.group, at.topic), []).append(_Behind(at.topic, at.queue_id, offset, left))
        ages = self._ages(queue for queues in behind.values() for queue in queues)
        return [
            GroupLag(
                group,
                topic,
                sum(queue.messages for queue in queues),
                max((ages.get((topic, queue.queue_id, queue.offset), 0.0) for queue in queues), default=0.0),
                sum(queue.offset for queue in queues),
            )
            for (group, topic), queues in sorted(behind.items())
        ]

    def _ages(self, queues: Iterable[_Behind]) -> dict[tuple[str, int, int], float]:
        """Age of the first message of each, by topic, queue and offset; of those furthest behind."""
        lagging = sorted((queue for queue in queues if queue.messages), key=lambda queue: -queue.messages)
        if not lagging:
            return {}
        io, paths, options = self._io, self._paths, self._options
        segments = LogSegments(io, paths.commit_log, options.mapped_file_size_commit_log)
        records = LogRecords(segments, self._view.visible, KnownHoles(io, paths, segments.segment_size))
        files = ConsumeQueueFiles(io, paths.consume_queue, options.consume_queue_file_bytes)
        times = QueueTimes(self._view.queues, files, records)
        now_ms = time.time() * 1000
        found = {}
        try:
            for queue in lagging[:TIMES_MAX]:
                stored_ms = times.store_time_ms(queue.topic, queue.queue_id, queue.offset)
                if stored_ms >= 0:
                    found[queue.topic, queue.queue_id, queue.offset] = max(0.0, (now_ms - stored_ms) / 1000)
        finally:
            # An open file would keep the space of one that retention deletes.
            files.close()
            segments.close()
        return found

    def _bounded(self, lags: list[GroupLag]) -> list[GroupLag]:
        most = self._options.metrics_series_max
        others = lags[most:]
        if not others:
            return lags
        together = GroupLag(
            OTHERS,
            OTHERS,
            sum(lag.messages for lag in others),
            max(lag.seconds for lag in others),
            sum(lag.consumed for lag in others),
        )
        return [*lags[:most], together]
