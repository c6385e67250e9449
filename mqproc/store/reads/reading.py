"""Everything that can be asked of a store: what stands behind the query role and behind `StoreReader`.

    pulls ──▶ QueuePulls ──┐
    times ──▶ QueueTimes ──┼──▶ Walk: units × segments ──▶ records
    ranges ─▶ QueueRanges ─┘
    keys ───▶ KeySearch ───▶ index ──▶ LogRecords
    scans ──▶ LogScan

It owns no files of its own and changes nothing. Long questions are generators of slices (`store.slices`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from mqproc.config import Options
from mqproc.errors import BadRequestError, MessageNotFoundError
from mqproc.io import StoreIO
from mqproc.kernels.gather import match_units
from mqproc.kernels.views import as_kernel_array
from mqproc.layout.consume_queue import FILLER_SIZE
from mqproc.layout.record_codec import decode_message_id, decode_record
from mqproc.message import QueueInfo, TopicInfo
from mqproc.paths import StorePaths
from mqproc.store.consume_queue import UNIT_SIZE, ConsumeQueueFiles, as_units
from mqproc.store.damage import KnownHoles
from mqproc.store.reads.index_query import IndexAnswer, IndexReader
from mqproc.store.reads.key_search import CANDIDATES_MAX, KeySearch
from mqproc.store.reads.log_records import LogRecords, Visible
from mqproc.store.reads.log_scan import LogScan
from mqproc.store.reads.passing import passing
from mqproc.store.reads.pull import QueuePulls
from mqproc.store.reads.queue_bounds import Deletions, Queues, RocketmqQueues, each_queue
from mqproc.store.reads.queue_ranges import QueueRanges
from mqproc.store.reads.queue_times import QueueTimes
from mqproc.store.segments import PRESENT_BYTES_MAX, LogSegments
from mqproc.store.slices import Slices
from mqproc.store.topics import TopicConfig, Topics

# A topic's index is asked for a unique id in a fraction of a millisecond; this many are asked between two slices.
_TOPICS_PER_SLICE = 16
_QUEUES_PER_SLICE = 512
MESSAGE_ID_CHARACTERS_MAX = 512
UNITS_LOOKED_AT = 65_536


class StoreReading:
    """Questions to one store. `queues` and `visible` say what may be read at this moment."""

    def __init__(
        self,
        io: StoreIO,
        paths: StorePaths,
        options: Options,
        queues: Queues,
        visible: Callable[[], Visible],
        newest_index_ms: Callable[[], int],
        present_bytes_max: int = PRESENT_BYTES_MAX,
        *,
        whole: bool = True,
        still: bool = False,
    ) -> None:
        """`present_bytes_max` is how much of the log may be present in this process's memory.

        With `whole` false a segment that is short holds what is there; with `still` nobody appends to the store.
        """
        self._io = io
        self._paths = paths
        self.options = options
        self.queues = queues
        size = options.mapped_file_size_commit_log
        self.segments = LogSegments(
            io, paths.commit_log, size, whole=whole, still=still, present_bytes_max=present_bytes_max
        )
        self.records = LogRecords(self.segments, visible, KnownHoles(io, paths, self.segments.segment_size))
        self.files = ConsumeQueueFiles(io, paths.consume_queue, options.consume_queue_file_bytes)
        self._index = IndexReader(io, paths.index, options.max_hash_slot_num, options.max_index_num, CANDIDATES_MAX)
        self.walks = self._index.walks
        self._pulls = QueuePulls(queues, self.files, self.records, options)
        self.times = QueueTimes(queues, self.files, self.records)
        self._ranges = QueueRanges(queues, self.files, self.records, self.times)
        self._keys = KeySearch(self._index, self.records, queues, newest_index_ms)
        self._scans = LogScan(self.records)
        self._deletions = Deletions()
        self.pull = self._pulls.pull
        self.scan = self._scans.scan
        self.count = self._ranges.count
        self.range = self._ranges.range
        self.by_key = self._keys.by_key
        self.offset_at = self.times.offset_at
        self.store_time_ms = self.times.store_time_ms
        # RocketMQ's own answers, where ours are others.
        self.rocketmq_queues = RocketmqQueues(queues, self.files)
        self.get_message = self._pulls.get_message
        self.offset_in_queue_by_time = QueueTimes(self.rocketmq_queues, self.files, self.records).offset_at

    def let_go_of_deleted(self, deletions: Deletions) -> None:
        """Let go of files that are deleted, by retention or with a topic, when `deletions` is another than last time.

        Their space stays taken as long as anybody has them open or mapped.
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
        """Let go of files and maps."""
        self.files.close()
        self.segments.close()
        self._index.close()

    # Single records

    def look(self, physical_offset: int) -> NDArray[np.uint8] | None:
        """The record at a physical offset, None when none begins there."""
        return self.records.record(physical_offset)

    def get(self, message_id: str, topic: str = "") -> Slices[NDArray[np.uint8]]:
        """The record that an offset message id or a unique id names; a unique id's newest, in `topic` or in any.

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
        """The record whose own offset message id this is; any other id, a unique one among them, names none."""
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
        """`queryMessage`: hash hits and all, at most `max_msgs_num_batch`."""
        return self._keys.query_message(
            topic, key, min(max_messages, self.options.max_msgs_num_batch), begin_ms, end_ms
        )

    # Queues

    def queue_infos(self, topic: str = "") -> Slices[list[QueueInfo]]:
        """Queues of a topic, or of all topics."""
        topics = [topic] if topic else self.queues.topics()
        infos = []
        for name, queue_id, bounds in each_queue(self.queues, topics):
            infos.append(QueueInfo(name, queue_id, bounds.min_offset, bounds.max_offset))
            if len(infos) % _QUEUES_PER_SLICE == 0:
                yield
        return infos

    def topic_infos(self) -> Slices[list[TopicInfo]]:
        """Topics that have a queue or an entry in `config/topics.json`, sorted; without the latter with defaults."""
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
        """The first queue offset from `first` on whose unit may match by its hash: where a held pull goes on.

        Looks at UNITS_LOOKED_AT units at most; the maximum offset when none of a queue's last ones matches.
        """
        codes = passing(topic, tuple(tags), sql).codes
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
        # Fillers match no tag, but a pull that meets one says CORRUPT.
        fillers = np.flatnonzero(as_units(units)["size"] == FILLER_SIZE)
        candidates = [int(fillers[0])] if len(fillers) else []
        if match_units(units, 0, count, codes, matches):
            candidates.append(int(matches[0]))
        return first + min(candidates, default=count)
