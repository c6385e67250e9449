"""All queries on a store, for the query role and for `StoreReader`.

    pulls ──▶ QueuePulls ──┐
    times ──▶ QueueTimes ──┼──▶ QueueWalk: units × segments ──▶ records
    ranges ─▶ QueueRanges ─┘
    keys ───▶ KeySearch ───▶ index ──▶ LogRecords
    scans ──▶ LogScan

Queries change nothing. Long ones are cooperative generators (`store.cooperative`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.config.options import Options
from mqproc.errors import BadRequestError, MessageNotFoundError
from mqproc.io.store_io import StoreIO
from mqproc.kernels.gather import match_units
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.layout.consume_queue import FILLER_SIZE, UNIT_SIZE
from mqproc.layout.record_codec import decode_message_id, decode_record, decode_records
from mqproc.paths import StorePaths
from mqproc.store.commitlog.segments import RESIDENT_BYTES_MAX, LogSegments
from mqproc.store.consumequeue.files import ConsumeQueueFiles, as_units
from mqproc.store.cooperative import Slices
from mqproc.store.damage import KnownHoles
from mqproc.store.index.lookup import IndexAnswer, IndexReader
from mqproc.store.read.by_key import CANDIDATES_MAX, KeySearch
from mqproc.store.read.by_time import QueueRanges, QueueTimes
from mqproc.store.read.filter_program import compile_filter
from mqproc.store.read.pull import QueuePulls
from mqproc.store.read.records import LogRecords
from mqproc.store.read.scan import LogScan
from mqproc.store.read.views import DeletionCounts, RocketmqQueues, StoreView, each_queue
from mqproc.store.topics import TopicConfig, Topics
from mqproc.types import PullStatus, QueueInfo, StoredMessage, TopicInfo

# Searching one topic's index for a unique id takes a fraction of a millisecond.
_TOPICS_PER_SLICE = 16
_QUEUES_PER_SLICE = 512
MESSAGE_ID_CHARACTERS_MAX = 512
UNITS_LOOKED_AT = 65_536


class StoreQueries:
    """Queries on one store, whose `view` determines the readable part."""

    def __init__(
        self,
        io: StoreIO,
        paths: StorePaths,
        options: Options,
        view: StoreView,
        resident_bytes_max: int = RESIDENT_BYTES_MAX,
        *,
        whole: bool = True,
        static: bool = False,
    ) -> None:
        """`resident_bytes_max` limits the log's pages in this process's memory.

        `whole`: a short segment is an error; else it counts with its content. `static`: no process appends.
        """
        self._io = io
        self._paths = paths
        self.options = options
        queues = self.queues = view.queues
        size = options.mapped_file_size_commit_log
        self.segments = LogSegments(
            io, paths.commit_log, size, whole=whole, static=static, resident_bytes_max=resident_bytes_max
        )
        self.records = LogRecords(self.segments, view.visible, KnownHoles(io, paths, self.segments.segment_size))
        self.files = ConsumeQueueFiles(io, paths.consume_queue, options.consume_queue_file_bytes)
        self._index = IndexReader(io, paths.index, options.max_hash_slot_num, options.max_index_num, CANDIDATES_MAX)
        self.walks = self._index.walks
        self._pulls = QueuePulls(queues, self.files, self.records, options)
        self.times = QueueTimes(queues, self.files, self.records)
        self._ranges = QueueRanges(queues, self.files, self.records, self.times)
        self._keys = KeySearch(self._index, self.records, queues, view.newest_index_ms)
        self._scans = LogScan(self.records)
        self._deletions = DeletionCounts()
        self.pull = self._pulls.pull
        self.scan = self._scans.scan
        self.count = self._ranges.count
        self.range = self._ranges.range
        self.by_key = self._keys.by_key
        self.offset_at = self.times.offset_at
        self.store_time_ms = self.times.store_time_ms
        # RocketMQ's own answers
        self.rocketmq_queues = RocketmqQueues(queues, self.files)
        self.get_message = self._pulls.get_message
        self.offset_in_queue_by_time = QueueTimes(self.rocketmq_queues, self.files, self.records).offset_at

    def close_deleted(self, deletions: DeletionCounts) -> None:
        """Close files deleted by retention or with a topic, if `deletions` has changed.

        Their space stays in use while any process has them open or mapped.
        """
        if deletions == self._deletions:
            return
        self._deletions = deletions
        self.segments.forget_below(deletions.min_physical_offset)
        self.files.forget_deleted(self._kept_of)
        self._index.forget_deleted()

    def _kept_of(self, topic: str, queue_id: int) -> tuple[int, int] | None:
        bounds = self.queues.bounds(topic, queue_id)
        return (bounds.number, bounds.min_offset) if bounds else None

    def close(self) -> None:
        self.files.close()
        self.segments.close()
        self._index.close()

    # Single records

    def record_at(self, physical_offset: int) -> NDArray[np.uint8] | None:
        """The record at a physical offset, None if none begins there."""
        return self.records.record(physical_offset)

    def get(self, message_id: str, topic: str = "") -> Slices[NDArray[np.uint8]]:
        """The record with an offset message id, or the newest with a unique id in `topic` or any.

        Raises MessageNotFoundError.
        """
        if not 0 < len(message_id) <= MESSAGE_ID_CHARACTERS_MAX:
            raise BadRequestError(f"message id {message_id[:64]!r} has {len(message_id)} characters")
        record = self._by_offset_id(message_id)
        if record is not None:
            return record
        for number, name in enumerate([topic] if topic else self.queues.topics()):
            if number % _TOPICS_PER_SLICE == _TOPICS_PER_SLICE - 1:
                yield
            found = yield from self._keys.by_key(
                name, message_id, unique=True, max_messages=1, max_bytes=self.options.max_pull_bytes
            )
            if found.count:
                return found.records[0]
        raise MessageNotFoundError(f"no message has the id {message_id!r}{f' in topic {topic}' if topic else ''}")

    def _by_offset_id(self, message_id: str) -> NDArray[np.uint8] | None:
        """The record with this offset message id; None for any other id, such as a unique one."""
        try:
            _host, physical_offset = decode_message_id(message_id)
        except BadRequestError:
            return None
        record = self.records.record(physical_offset)
        if record is None or decode_record(record.data, check_crc=False).message_id != message_id.upper():
            return None
        return record

    # RocketMQ's own answers

    def query_message(self, topic: str, key: str, max_messages: int, begin_ms: int, end_ms: int) -> Slices[IndexAnswer]:
        """`queryMessage`: all hash hits, at most `max_msgs_num_batch`."""
        return self._keys.query_message(
            topic, key, min(max_messages, self.options.max_msgs_num_batch), begin_ms, end_ms
        )

    # Queues

    def queue_infos(self, topic: str = "") -> Slices[list[QueueInfo]]:
        topics = [topic] if topic else self.queues.topics()
        infos = []
        for name, queue_id, bounds in each_queue(self.queues, topics):
            infos.append(QueueInfo(name, queue_id, bounds.min_offset, bounds.max_offset))
            if len(infos) % _QUEUES_PER_SLICE == 0:
                yield
        return infos

    def topic_infos(self) -> Slices[list[TopicInfo]]:
        """Topics with a queue or an entry in `config/topics.json`, sorted."""
        configured = Topics(self._io, self._paths)
        configured.load()
        infos = []
        for number, name in enumerate(sorted({*self.queues.topics(), *configured.names()})):
            if number % _TOPICS_PER_SLICE == _TOPICS_PER_SLICE - 1:
                yield
            queues = yield from self.queue_infos(name)
            count = sum(queue.max_offset - queue.min_offset for queue in queues)
            config = configured.get(name) or TopicConfig(name, len(queues))
            infos.append(TopicInfo(name, config.queues, config.perm, count, config.attributes))
        return infos

    def first_candidate(self, topic: str, queue_id: int, first: int, tags: Sequence[str], sql: str = "") -> int:
        """First offset from `first` on whose unit matches by hash: where a held pull continues.

        It reads at most UNITS_LOOKED_AT units; returns the maximum offset if none matches.
        """
        codes = compile_filter(topic, tuple(tags), sql).codes
        bounds = self.queues.bounds(topic, queue_id) if len(codes) else None
        if bounds is None or not bounds.min_offset <= first < bounds.max_offset:
            return first
        count = min(bounds.max_offset - first, UNITS_LOOKED_AT)
        try:
            units = as_kernel_array(self.files.read_units(topic, queue_id, first, count, bounds.number))
        except FileNotFoundError:
            return first
        count = len(units) // UNIT_SIZE
        matches = np.empty(count, np.int64)
        # Fillers match no tag, but a pull must report them as CORRUPT.
        fillers = np.flatnonzero(as_units(units)["size"] == FILLER_SIZE)
        candidates = [int(fillers[0])] if len(fillers) else []
        if match_units(units, 0, count, codes, matches):
            candidates.append(int(matches[0]))
        return first + min(candidates, default=count)


# Messages of one queue

BATCH_MESSAGES: Final = 1024


def batches(
    reading: StoreQueries, topic: str, queue_id: int, offset: int, tags: Sequence[str] = ()
) -> Iterator[tuple[list[StoredMessage], int]]:
    """Messages from an offset to the queue's end in batches, with the next offset.

    With `tags` only messages with one of them.
    """
    bounds = reading.queues.bounds(topic, queue_id)
    at = max(offset, bounds.min_offset) if bounds is not None else 0
    while bounds is not None and at < bounds.max_offset:
        pulled = reading.pull(topic, queue_id, at, BATCH_MESSAGES, reading.options.max_pull_bytes, tags)
        if pulled.next_offset <= at:
            return
        at = pulled.next_offset
        yield decode_records(pulled.records.tobytes()) if pulled.status is PullStatus.FOUND else [], at
