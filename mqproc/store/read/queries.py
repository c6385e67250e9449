"""All queries on a store, for the query role and for `StoreReader`.

    pulls ──▶ QueuePulls ──┐
    times ──▶ QueueTimes ──┼──▶ QueueWalk: units × segments ──▶ records
    ranges ─▶ QueueRanges ─┘
    keys ───▶ KeySearch ───▶ index ──▶ LogRecords
    scans ──▶ LogScan

Queries change nothing. Long queries are cooperative generators (`store.cooperative`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.config.options import Options
from mqproc.errors import BadRequestError, MessageNotFoundError
from mqproc.io.store_io import StoreIO
from mqproc.kernels.gather import TIME_MAX, TIME_MIN, match_units
from mqproc.kernels.jit.intrinsics import load_be32, load_be64
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.kernels.log_match import has_key, has_value
from mqproc.kernels.record_check import store_timestamp_at
from mqproc.layout import properties
from mqproc.layout.consume_queue import FILLER_SIZE, UNIT_SIZE
from mqproc.layout.index_file import tag_key
from mqproc.layout.record import BORN_TIMESTAMP, FIXED_SIZE_V4, QUEUE_ID, QUEUE_OFFSET
from mqproc.layout.record_codec import decode_message_id, decode_record, decode_records
from mqproc.paths import StorePaths
from mqproc.store.commitlog.segments import RESIDENT_BYTES_MAX, LogSegments
from mqproc.store.consumequeue.bounds import as_units
from mqproc.store.consumequeue.files import ConsumeQueueFiles
from mqproc.store.cooperative import RecordPage, Slices
from mqproc.store.damage import KnownHoles
from mqproc.store.index.lookup import FILES_PER_SLICE, LOG_END_MAX, IndexAnswer, IndexReader
from mqproc.store.index.tags import tags_indexed_from
from mqproc.store.read.by_time import QueueRanges, QueueTimes
from mqproc.store.read.pull import QueuePulls
from mqproc.store.read.records import LogRecords, LogScan
from mqproc.store.read.unit_walk import compile_filter
from mqproc.store.read.views import DeletionCounts, Queues, RocketmqQueues, StoreView, each_queue
from mqproc.store.topics import TopicConfig, Topics
from mqproc.types import PullStatus, QueueInfo, StoredMessage, TopicInfo
from mqproc.util.units import format_time

# Search by key or unique id: the index gives candidates, the records decide.
#
# The index has hashes and whole seconds only. So candidates are looked up from a second before the begin to the newest
# (in a rolled file the first item's time is too late by an unknown amount), then limited by the records' own store
# times where they ascend with their offsets; where they may descend all hits are candidates. Each remaining record is
# compared by topic, key and time.


# Time resolution of the index.
INDEX_STEP_MS: Final = 1000
CANDIDATES_MAX: Final = 65_536
"""Index hits per round; keys with more hits take several rounds."""
CANDIDATES_MIN: Final = 256
# Factor by which rounds grow: all hits of many small rounds may lie outside the time range.
_LARGER: Final = 4

SLICE_RECORDS: Final = 256
SLICE_BYTES: Final = 8 << 20
"""A slice ends after this many records or bytes: the CRC of a record of mebibytes takes long."""

_ROUNDS_MAX: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class KeySearch:
    """Searches in one store's index, which must give up to CANDIDATES_MAX results."""

    index: IndexReader
    records: LogRecords
    queues: Queues
    newest_ms: Callable[[], int]
    """Returns the newest index file's name as a time."""
    ordered_from: Callable[[], int]
    """Returns the log position from which store times ascend."""
    check_tags: Callable[[int], Slices[None]]
    """Raises BadRequestError if tags stored since a time in ms are not indexed."""

    def by_key(
        self,
        topic: str,
        key: str,
        begin_ms: int = TIME_MIN,
        end_ms: int = TIME_MAX,
        *,
        unique: bool = False,
        born_time: bool = False,
        below: int = -1,
        max_messages: int,
        max_bytes: int,
    ) -> Slices[RecordPage]:
        """The newest messages with a key (`unique`: a unique id) and begin_ms ≤ time < end_ms.

        The time is the store time, or with `born_time` the unordered born time. The answer is sorted by physical offset
        without duplicates. With more than `max_messages` or `max_bytes` it is incomplete: its cursor (physical offset,)
        is the `below` for older messages. Messages of a deleted topic are not found in a new topic of that name.
        """
        _check_search(topic, key, begin_ms, end_ms)
        name = properties.UNIQ_KEY if unique else properties.KEYS
        conditions = _Conditions(topic, name, key, begin_ms, end_ms, born_time=born_time)
        return self._search(key, conditions, below, max_messages, max_bytes)

    def by_tag(
        self,
        topic: str,
        tag: str,
        begin_ms: int = TIME_MIN,
        end_ms: int = TIME_MAX,
        *,
        born_time: bool = False,
        below: int = -1,
        max_messages: int,
        max_bytes: int,
    ) -> Slices[RecordPage]:
        """The newest messages with a tag, as `by_key`.

        Raises BadRequestError if the store's index has no entries for tags, or not for all of that time.
        """
        _check_search(topic, tag, begin_ms, end_ms, "tag")
        yield from self.check_tags(TIME_MIN if born_time else begin_ms)
        conditions = _Conditions(topic, properties.TAGS, tag, begin_ms, end_ms, born_time=born_time)
        return (yield from self._search(tag_key(tag), conditions, below, max_messages, max_bytes))

    def _search(
        self, index_key: str, conditions: _Conditions, below: int, max_messages: int, max_bytes: int
    ) -> Slices[RecordPage]:
        self.index.refresh(self.newest_ms())
        topic, begin_ms, end_ms = conditions.topic, conditions.begin_ms, conditions.end_ms
        if conditions.born_time:
            begin_ms, end_ms = TIME_MIN, TIME_MAX
        found: list[NDArray[np.uint8]] = []
        # In bytes; each record also counts a fixed cost.
        looked_at = 0
        size, oldest_found = 0, 0
        below = LOG_END_MAX if below < 0 else below
        is_ordered = self.ordered_from() <= self.records.visible().begin
        begin = max(TIME_MIN, begin_ms - INDEX_STEP_MS) if is_ordered else TIME_MIN
        # A small page looks up few candidates, so that paging through a key with many hits stays linear.
        candidates = max(CANDIDATES_MIN, 2 * min(max_messages, max_bytes // FIXED_SIZE_V4))
        for _ in range(_ROUNDS_MAX):
            candidates = min(candidates, CANDIDATES_MAX)
            looked_up = yield from self.index.look_up(topic, index_key, candidates, begin, TIME_MAX, below)
            hits = looked_up.offsets
            offsets = sorted(set(hits))
            for offset in reversed(self._in_time(offsets, begin_ms, end_ms)):
                record = self.records.intact(offset)
                looked_at += SLICE_BYTES // SLICE_RECORDS + (len(record) if record is not None else 0)
                if looked_at >= SLICE_BYTES:
                    looked_at = 0
                    yield
                if record is None or not conditions.is_met_by(record) or self._is_deleted(topic, offset, record):
                    continue
                if found and (len(found) >= max_messages or size + len(record) > max_bytes):
                    return RecordPage(len(found), found[::-1], (oldest_found,), complete=False)
                found.append(record)
                size += len(record)
                oldest_found = offset
            if len(hits) < candidates:
                break
            # There are more hits than a round has: continue below its oldest one.
            below = offsets[0]
            candidates *= _LARGER
            yield
        return RecordPage(len(found), found[::-1])

    def query_message(self, topic: str, key: str, max_messages: int, begin_ms: int, end_ms: int) -> Slices[IndexAnswer]:
        """RocketMQ's `queryMessage`: all hash hits, a message once per matching key."""
        self.index.refresh(self.newest_ms())
        time_of = self.records.store_timestamp_ms
        return self.index.query_message(topic, key, max_messages, begin_ms, end_ms, lambda at: time_of(at) >= 0)

    def _is_deleted(self, topic: str, offset: int, record: NDArray[np.uint8]) -> bool:
        """Whether a record belongs to a deleted queue of this name."""
        log_end, next_offset = self.queues.deletion(topic, int(load_be32(record, QUEUE_ID)))
        return offset < log_end and int(load_be64(record, QUEUE_OFFSET)) < next_offset

    def _in_time(self, offsets: list[int], begin_ms: int, end_ms: int) -> list[int]:
        """The ascending offsets whose records may lie in the time range.

        Offsets are included where store times may descend. Damaged records have no time: at a border they are
        included.
        """
        time_of = self.records.store_timestamp_ms
        split = bisect_left(offsets, self.ordered_from())
        first = bisect_left(offsets, begin_ms, split, key=self._latest_time) if begin_ms > TIME_MIN else split
        stop = bisect_left(offsets, end_ms, first, key=time_of) if end_ms < TIME_MAX else len(offsets)
        return offsets[:split] + offsets[first:stop]

    def _latest_time(self, offset: int) -> int:
        """Store time of a record in ms; TIME_MAX if it is damaged, −1 if retention has deleted it."""
        time_ms = self.records.store_timestamp_ms(offset)
        return TIME_MAX if time_ms < 0 and offset >= self.records.visible().begin else time_ms


def _check_search(topic: str, key: str, begin_ms: int, end_ms: int, what: str = "key") -> None:
    if not key or not topic:
        raise BadRequestError(f"a search needs a topic and a {what}")
    if end_ms < begin_ms:
        raise BadRequestError(f"the search ends ({end_ms}) before it begins ({begin_ms})")


class _Conditions:
    """Conditions for a record."""

    def __init__(self, topic: str, name: str, text: str, begin_ms: int, end_ms: int, *, born_time: bool) -> None:
        """`text` is a word of the property `name`, or the tag."""
        self.topic = topic
        self.begin_ms = begin_ms
        self.end_ms = end_ms
        self.born_time = born_time
        # Texts that are not valid UTF-8 match no record.
        texts = (each.encode(errors="surrogatepass") for each in (topic, name, text))
        self._arguments = tuple(as_kernel_array(bytearray(each)) for each in texts)
        self._compared = has_value if name == properties.TAGS else has_key

    def is_met_by(self, record: NDArray[np.uint8]) -> bool:
        """Whether a whole record, uint8[n], meets the conditions."""
        time_at = BORN_TIMESTAMP if self.born_time else store_timestamp_at(record, 0)
        time_ms = load_be64(record, int(time_at))
        # A missing bound accepts any time, and a born time may be any number.
        is_too_early = self.begin_ms > TIME_MIN and time_ms < self.begin_ms
        is_too_late = self.end_ms < TIME_MAX and time_ms >= self.end_ms
        if is_too_early or is_too_late:
            return False
        return bool(self._compared(record, 0, len(record), *self._arguments))


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
        self._index = IndexReader(
            io,
            paths.index,
            options.max_hash_slot_num,
            options.max_index_num,
            CANDIDATES_MAX,
            enabled=options.message_index_enable,
        )
        self.walks = self._index.walks
        self._pulls = QueuePulls(queues, self.files, self.records, options)
        self.times = QueueTimes(queues, self.files, self.records, view.time_ordered_from)
        self._ranges = QueueRanges(queues, self.files, self.records, self.times)
        self._keys = KeySearch(
            self._index, self.records, queues, view.newest_index_ms, view.time_ordered_from, self._check_tags
        )
        self._tags_from: int | None = None
        self._tags_known = False
        self._scans = LogScan(self.records)
        self._deletions = DeletionCounts()
        self.record_at = self.records.record
        self.pull = self._pulls.pull
        self.scan = self._scans.scan
        self.count = self._ranges.count
        self.range = self._ranges.range
        self.by_key = self._keys.by_key
        self.by_tag = self._keys.by_tag
        self.offset_at = self.times.offset_at
        self.store_time_ms = self.times.store_time_ms
        # RocketMQ's own answers
        self.rocketmq_queues = RocketmqQueues(queues, self.files)
        self.get_message = self._pulls.get_message
        self.offset_in_queue_by_time = QueueTimes(self.rocketmq_queues, self.files, self.records).offset_at

    def _check_tags(self, begin_ms: int) -> Slices[None]:
        """Raise BadRequestError unless all tags of messages stored since a time are indexed."""
        root = self._paths.root
        self._index.check_enabled()
        if not self._tags_known:
            self._tags_from = yield from tags_indexed_from(self._io, self._paths, self.options)
            # With the option, the newest record may get its entry in a moment; without it, a group makes none.
            self._tags_known = self._tags_from is not None or not self.options.message_index_tags
        if self._tags_from is None:
            raise BadRequestError(
                f"{root}: the index has no entries for tags (see message_index_tags); a range with a filter finds them"
            )
        from_ms = self.records.store_timestamp_ms(self._tags_from) if self._tags_from > 0 else TIME_MIN
        if begin_ms < from_ms and self._tags_from > self.records.visible().begin:
            raise BadRequestError(
                f"{root}: tags are indexed only of messages stored since {format_time(from_ms)}: search from then on by"
                " store time, or a range with a filter"
            )

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

    def get(self, message_id: str, topic: str = "") -> Slices[NDArray[np.uint8]]:
        """The record with an offset message id, or the newest with a unique id in `topic` or any.

        Raises MessageNotFoundError.
        """
        if not 0 < len(message_id) <= MESSAGE_ID_CHARACTERS_MAX:
            raise BadRequestError(f"message id {message_id[:64]!r} has {len(message_id)} characters")
        record = self._by_offset_id(message_id)
        if record is not None:
            return record
        looked_at = 0
        for name in [topic] if topic else self.queues.topics():
            looked_at += max(FILES_PER_SLICE // _TOPICS_PER_SLICE, self._index.file_count)
            if looked_at >= FILES_PER_SLICE:
                looked_at = 0
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
        if record is None or decode_record(record.data).message_id != message_id.upper():
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
        yield from configured.load_slices()
        infos = []
        for number, name in enumerate(sorted({*self.queues.topics(), *configured.names()})):
            if number % _TOPICS_PER_SLICE == _TOPICS_PER_SLICE - 1:
                yield
            queues = yield from self.queue_infos(name)
            count = sum(queue.max_offset - queue.min_offset for queue in queues)
            config = configured.get(name) or TopicConfig(name, len(queues))
            widths = config.queues, config.perm, count
            infos.append(TopicInfo(name, *widths, config.attributes, config.read_queues, config.write_queues))
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
