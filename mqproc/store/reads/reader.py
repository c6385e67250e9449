"""Reading a store's files directly: any store, running or not, ours or RocketMQ's, with no server and no write.

    with mqproc.StoreReader("/var/lib/store") as reader:
        for message in reader.messages("orders"):
            print(message.queue_offset, message.body)

Of a store that runs, positions come from its control file and queue table and move on by themselves, also when its
group is stopped and started again meanwhile. Of any other store the queues are listed from their folders, each one's
end is where its units end, and the log ends where its last whole record does; that is found once, at opening.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.config import Options
from mqproc.errors import BadRequestError, ConfigurationError
from mqproc.io import StoreIO
from mqproc.kernels.gather import TIME_MAX, TIME_MIN
from mqproc.layout.record_codec import decode_record, decode_records
from mqproc.message import PullResult, PullStatus, QueueInfo, StoredMessage, TopicInfo
from mqproc.paths import StorePaths, given_path
from mqproc.store.existing import check_is_store
from mqproc.store.index_shape import adopted_index_shape
from mqproc.store.queue_folders import adopted_file_bytes
from mqproc.store.reads.given import checked, question
from mqproc.store.reads.index_query import IndexAnswer
from mqproc.store.reads.log_records import Visible
from mqproc.store.reads.log_scan import Conditions
from mqproc.store.reads.pull import Pulled
from mqproc.store.reads.reading import StoreReading
from mqproc.store.reads.store_views import FilesView, GroupView, StoreView
from mqproc.store.segments import adopted_segment_size
from mqproc.store.settings import read_values
from mqproc.store.slices import Batch, finish

PAGE_MESSAGES = 4096
MESSAGES_MAX = 1 << 31
# What RocketMQ takes for a pull whose size nobody limits.
ROCKETMQ_PULL_BYTES = 128 << 20
# So often a reader of a running store looks whether that has been started anew.
_LOOK_EVERY_S: Final = 0.1
# What a reader must know of the group that runs, whatever options it was given.
_OF_THE_GROUP: Final = (
    "flush_disk_type",
    "mapped_file_size_commit_log",
    "mapped_file_size_consume_queue",
    "max_hash_slot_num",
    "max_index_num",
)

# A forked process may have got locks that another thread held.
_readers: weakref.WeakSet[StoreReader] = weakref.WeakSet()


class StoreReader:
    """A store's files, opened read-only. Times are Unix ms; nothing here changes the store.

    Threads may share one: it answers one at a time, so a reader of its own for each is faster.
    """

    def __init__(self, path: str | Path, options: Options | None = None, *, whole: bool = True) -> None:
        """Open the store at `path`, with the sizes that its files have whatever `options` say.

        With `whole` false a segment that is short holds what is there; else it is an error. Raises StoreAccessError
        when there is no store, CorruptStoreError when its files contradict each other.
        """
        self.paths = StorePaths(given_path(path))
        self._io = StoreIO()
        self._asking = threading.RLock()
        check_is_store(self._io, self.paths)
        self.options = _with_sizes_of_files(self._io, self.paths, options or settings_of(self._io, self.paths))
        self._whole = whole
        view = GroupView.open(self._io, self.paths, self.options)
        self._view: StoreView = view or FilesView(self._io, self.paths, self.options, whole=whole)
        self._reading = self._reading_of(self._view)
        self._look_at_s = time.monotonic() + _LOOK_EVERY_S
        _readers.add(self)

    def _reading_of(self, view: StoreView) -> StoreReading:
        return StoreReading(
            self._io,
            self.paths,
            self.options,
            view.queues,
            view.visible,
            view.newest_index_ms,
            whole=self._whole,
            still=not isinstance(view, GroupView),
        )

    def __repr__(self) -> str:
        return f"StoreReader({str(self.paths.root)!r})"

    def __enter__(self) -> StoreReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of files and maps."""
        with self._asking:
            self._look_at_s = float("inf")
            self._reading.close()
            self._view.close()

    @property
    def reading(self) -> StoreReading:
        """Questions to the store as it is now, for one thread alone."""
        self._follow()
        return self._reading

    def _follow(self) -> None:
        """Go on with the positions of the group that runs, when that is another than at opening.

        Until it has recovered those of the one before hold.
        """
        now_s = time.monotonic()
        if now_s < self._look_at_s or not isinstance(self._view, GroupView):
            return
        self._look_at_s = now_s + _LOOK_EVERY_S
        if self._view.is_current(self._io, self.paths):
            return
        # The new one may flush in another way, and so confirm other messages; another store may have files of other
        # sizes, or no file yet.
        present = settings_of(self._io, self.paths)
        options = dataclasses.replace(self.options, **{name: getattr(present, name) for name in _OF_THE_GROUP})
        view = GroupView.open(self._io, self.paths, options)
        if view is not None:
            self.options = _with_sizes_of_files(self._io, self.paths, options)
            old = self._reading
            self._view, self._reading = view, self._reading_of(view)
            # The old view's table goes with the last one who looks at its queues.
            old.close()

    @property
    def running(self) -> bool:
        """Whether positions come from a group that runs."""
        return isinstance(self._view, GroupView)

    @property
    def visible(self) -> Visible:
        """The part of the log that may be read now."""
        with self._asking:
            self._follow()
            return self._view.visible()

    # Queues and topics

    @question
    def topics(self) -> list[TopicInfo]:
        """Topics that have a queue or an entry in `config/topics.json`, sorted."""
        return finish(self.reading.topic_infos())

    @question
    def queues(self, topic: str = "") -> list[QueueInfo]:
        """Queues of a topic, or of all."""
        return finish(self.reading.queue_infos(topic))

    @question
    def min_offset(self, topic: str, queue_id: int) -> int:
        """First queue offset that can be read; 0 for an unknown queue, as RocketMQ says."""
        bounds = self.reading.queues.bounds(topic, queue_id)
        return bounds.min_offset if bounds else 0

    @question
    def max_offset(self, topic: str, queue_id: int) -> int:
        """Queue offset of the next message; 0 for an unknown queue, as RocketMQ says."""
        bounds = self.reading.queues.bounds(topic, queue_id)
        return bounds.max_offset if bounds else 0

    # Messages

    @question
    def pull(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_messages: int = 1024,
        *,
        max_bytes: int = 8 << 20,
        tags: Sequence[str] = (),
        rocketmq_limits: bool = False,
    ) -> PullResult:
        """The next messages of a queue, with RocketMQ's statuses and next offsets."""
        reading = self.reading
        reading.let_go_of_deleted(self._view.deletions())
        pulled = reading.pull(topic, queue_id, offset, max_messages, max_bytes, tags, rocketmq_limits=rocketmq_limits)
        return _pull_result(pulled)

    # RocketMQ's own answers, where ours are others: the names are its own

    @question
    def get_message(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_messages: int = 32,
        *,
        max_bytes: int = ROCKETMQ_PULL_BYTES,
        expression: str = "*",
    ) -> PullResult:
        """RocketMQ's `getMessage`: tags of `expression` by hash, its limits, no CRC, unknown queues are empty."""
        return _pull_result(self.reading.get_message(topic, queue_id, offset, max_messages, max_bytes, expression))

    @question
    def query_message(
        self, topic: str, key: str, max_messages: int = 32, begin_ms: int = TIME_MIN, end_ms: int = TIME_MAX
    ) -> IndexAnswer:
        """RocketMQ's `queryMessage` by key: whatever the index points to by hash."""
        return finish(self.reading.query_message(topic, key, max_messages, begin_ms, end_ms))

    @question
    def min_offset_in_queue(self, topic: str, queue_id: int) -> int:
        """RocketMQ's `getMinOffsetInQueue`, which looks for it in the queue's first file only."""
        return self.reading.rocketmq_queues.bounds(topic, queue_id).min_offset

    @question
    def offset_in_queue_by_time(self, topic: str, queue_id: int, time_ms: int, *, upper: bool = False) -> int:
        """RocketMQ's `getOffsetInQueueByTime`, within the bounds that it gives the queue."""
        return self.reading.offset_in_queue_by_time(topic, queue_id, time_ms, upper=upper)

    # Messages by id, key and time

    @question
    def get(self, message_id: str, topic: str = "") -> StoredMessage:
        """The message with an offset id or a unique id. Raises MessageNotFoundError."""
        return decode_record(finish(self.reading.get(message_id, topic)).data, check_crc=False)

    @question
    def look(self, physical_offset: int) -> StoredMessage | None:
        """The message whose record begins at a physical offset; None when none does."""
        record = self.reading.look(physical_offset)
        return None if record is None else decode_record(record.data, check_crc=False)

    @question
    def by_key(
        self,
        topic: str,
        key: str,
        begin_ms: int = TIME_MIN,
        end_ms: int = TIME_MAX,
        *,
        max_messages: int = 64,
        unique: bool = False,
        born_time: bool = False,
    ) -> list[StoredMessage]:
        """The newest messages that have the key, begin_ms ≤ time ≤ end_ms, oldest first; `unique`: the unique id."""
        batch = finish(
            self.reading.by_key(
                topic,
                key,
                begin_ms,
                end_ms,
                unique=unique,
                born_time=born_time,
                max_messages=max_messages,
                max_bytes=MESSAGES_MAX,
            )
        )
        return _messages_of(batch)

    @question
    def messages(self, topic: str = "", queue_id: int | None = None) -> Iterator[StoredMessage]:
        """All messages of a topic, or of all topics, queue by queue from its minimum offset on."""
        for queue in self.queues(topic):
            if queue_id is None or queue.queue_id == queue_id:
                yield from self._queue_messages(queue)

    def _queue_messages(self, queue: QueueInfo) -> Iterator[StoredMessage]:
        offset = queue.min_offset
        while offset < queue.max_offset:
            result = self.pull(queue.topic, queue.queue_id, offset, PAGE_MESSAGES)
            if result.status in (PullStatus.OFFSET_OVERFLOW_ONE, PullStatus.OFFSET_OVERFLOW_BADLY):
                return
            yield from (message for message in result.messages if message.queue_offset < queue.max_offset)
            if result.next_offset <= offset:
                return
            offset = result.next_offset

    @question
    def range(
        self,
        topic: str,
        begin_ms: int = TIME_MIN,
        end_ms: int = TIME_MAX,
        *,
        tags: Sequence[str] = (),
        born_time: bool = False,
    ) -> Iterator[StoredMessage]:
        """Messages with begin_ms ≤ time < end_ms, queue by queue."""
        cursor: Sequence[int] = ()
        while True:
            with self._asking:
                batch = finish(
                    self.reading.range(
                        topic,
                        begin_ms,
                        end_ms,
                        tags=tags,
                        born_time=born_time,
                        cursor=cursor,
                        max_messages=PAGE_MESSAGES,
                        max_bytes=self.options.max_pull_bytes,
                    )
                )
                page = _messages_of(batch)
            yield from page
            if batch.complete:
                return
            cursor = batch.cursor

    @question
    def count(
        self,
        topic: str,
        begin_ms: int = TIME_MIN,
        end_ms: int = TIME_MAX,
        *,
        tags: Sequence[str] = (),
        born_time: bool = False,
    ) -> int:
        """How many messages `range` gives.

        By store time without tags only those at the borders are read, so each of damage that no recovery has found yet
        counts.
        """
        return finish(self.reading.count(topic, begin_ms, end_ms, tags=tags, born_time=born_time))

    @question
    def offset_at(self, topic: str, queue_id: int, time_ms: int, *, upper: bool = False) -> int:
        """First queue offset stored at or after a time; with `upper` the last one at or before it."""
        return self.reading.offset_at(topic, queue_id, time_ms, upper=upper)

    @question
    def store_time_ms(self, topic: str, queue_id: int, offset: int) -> int:
        """Store time of the message at a queue offset, −1 when there is none."""
        return self.reading.store_time_ms(topic, queue_id, offset)

    @question
    def scan(self, conditions: Conditions | None = None, physical_offset: int = -1) -> Iterator[StoredMessage]:
        """Messages found by a pass over the whole log, in its order."""
        wanted = Conditions() if conditions is None else conditions
        if not isinstance(wanted, Conditions):
            raise BadRequestError(f"conditions = {repr(wanted)[:64]} are no Conditions")
        wanted = checked(wanted)
        while True:
            with self._asking:
                batch = finish(
                    self.reading.scan(
                        wanted,
                        physical_offset,
                        max_messages=PAGE_MESSAGES,
                        max_bytes=self.options.max_pull_bytes,
                        max_scan_bytes=1 << 30,
                    )
                )
                page = _messages_of(batch)
            yield from page
            if batch.complete:
                return
            physical_offset = batch.cursor[0]

    @question
    def record_bytes(self, physical_offset: int) -> NDArray[np.uint8] | None:
        """The raw record at a physical offset, uint8[size]."""
        return self.reading.look(physical_offset)


def _ask_anew() -> None:
    for reader in _readers:
        reader._asking = threading.RLock()


os.register_at_fork(after_in_child=_ask_anew)


def _pull_result(pulled: Pulled) -> PullResult:
    messages = decode_records(pulled.records.data)
    return PullResult(pulled.status, messages, pulled.next_offset, pulled.min_offset, pulled.max_offset, pulled.detail)


def _messages_of(batch: Batch) -> list[StoredMessage]:
    return [message for part in batch.records for message in decode_records(part.data)]


def settings_of(io: StoreIO, paths: StorePaths) -> Options:
    """The options that our group ran with; defaults when none has, or when nobody can read what it ran with."""
    try:
        return Options(**read_values(io, paths))
    except (FileNotFoundError, ValueError, ConfigurationError):
        return Options()


def _with_sizes_of_files(io: StoreIO, paths: StorePaths, options: Options) -> Options:
    slots, items = adopted_index_shape(io, paths.index, options.max_hash_slot_num, options.max_index_num)
    return dataclasses.replace(
        options,
        max_hash_slot_num=slots,
        max_index_num=items,
        mapped_file_size_commit_log=adopted_segment_size(io, paths.commit_log, options.mapped_file_size_commit_log),
        mapped_file_size_consume_queue=adopted_file_bytes(io, paths.consume_queue, options.consume_queue_file_bytes),
    )
