"""Direct read access to the files of any store, ours or RocketMQ's, without any write.

    with mqproc.StoreReader("/var/lib/store") as reader:
        for message in reader.messages("orders"):
            print(message.queue_offset, message.body)

For a running store, positions come from its control file and queue table and advance, even across restarts of its
group. For any other store the queues are listed from their folders, each ends with its last unit, and the log ends
with its last whole record; this is determined once, at opening.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from mqproc.arrow.columns import needs_package
from mqproc.config.options import Options
from mqproc.errors import BadRequestError, ConfigurationError
from mqproc.filters.selection import TimeKind
from mqproc.io.store_io import StoreIO
from mqproc.kernels.gather import TIME_MAX, TIME_MIN
from mqproc.kernels.pack import packed
from mqproc.layout.record_codec import decode_record, messages_of
from mqproc.paths import StorePaths, checked_path
from mqproc.store.access import check_is_store, read_values
from mqproc.store.commitlog.segments import adopted_segment_size
from mqproc.store.consumequeue.files import adopted_file_bytes
from mqproc.store.cooperative import RecordPage, Slices, finish
from mqproc.store.index.files import adopted_index_shape
from mqproc.store.index.lookup import IndexAnswer
from mqproc.store.read.pull import Pulled
from mqproc.store.read.queries import StoreQueries
from mqproc.store.read.records import Conditions, Visible
from mqproc.store.read.views import FilesView, GroupView, StoreView
from mqproc.types import Filter, PullResult, PullStatus, QueueInfo, StoredMessage, TopicInfo
from mqproc.util.arguments import BOOLEAN_TYPE_NAMES, Time
from mqproc.util.user_object import UserObject

if TYPE_CHECKING:
    from mqproc.arrow.reading import ArrowStream, QueueSpan, ReadPage, ReadPlan

# Arguments of StoreReader's methods: type checks with clear errors, serialized calls.


class SerializedCalls(Protocol):
    """An object whose calls are serialized by a lock."""

    @property
    def _lock(self) -> AbstractContextManager[Any]: ...


A = TypeVar("A", bound=SerializedCalls)
P = ParamSpec("P")
R = TypeVar("R", bound=Any)
T = TypeVar("T")
_INT64: Final = range(-(1 << 63), 1 << 63)
_SHOWN_CHARACTERS: Final = 64


def checked_call(method: Callable[Concatenate[A, P], T]) -> Callable[Concatenate[A, P], T]:
    """Decorate a method to check its arguments by their annotations. Raises BadRequestError.

    numpy scalars are converted to Python's. Calls hold the object's lock, except for generators, which take it per
    page.
    """
    _, *parameters = inspect.signature(method).parameters.values()
    places = [(parameter.name, _PLAIN.get(str(parameter.annotation), _as_it_is)) for parameter in parameters]
    plain = dict(places)
    pages = inspect.isgeneratorfunction(method)

    @functools.wraps(method)
    def call(self: A, /, *positional: Any, **named: Any) -> T:
        # The method itself rejects surplus and unknown arguments.
        values = [plain_of(name, value) for (name, plain_of), value in zip(places, positional, strict=False)]
        values += positional[len(places) :]
        for name in named:
            named[name] = plain.get(name, _as_it_is)(name, named[name])
        if pages:
            return method(self, *values, **named)
        with self._lock:
            return method(self, *values, **named)

    return call


def checked_fields(record: R) -> R:
    """Check the fields of a dataclass by their annotations. Raises BadRequestError."""
    return dataclasses.replace(
        record,
        **{
            field.name: _PLAIN.get(str(field.type), _as_it_is)(field.name, getattr(record, field.name))
            for field in dataclasses.fields(record)
        },
    )


def _as_it_is(name: str, value: Any) -> Any:
    return value


def _whole_number(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise _error(name, value, "a whole number") from None
    if number not in _INT64:
        raise _error(name, value, "a number of 64 bits")
    return number


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _error(name, value, "text")
    return value


def _bytes(name: str, value: Any) -> bytes:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise _error(name, value, "bytes")
    return bytes(value)


def _flag(name: str, value: Any) -> bool:
    # numpy's types are recognized by name: not every reader has loaded numpy.
    if not isinstance(value, bool) and type(value).__name__ not in BOOLEAN_TYPE_NAMES:
        raise _error(name, value, "true or false")
    return bool(value)


def _texts(name: str, value: Any) -> Sequence[str]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise _error(name, value, "a list of texts")
    texts = [_text(name, one) for one in value]
    for text in texts:
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            raise _error(name, text, "UTF-8")
    return texts


def _whole_number_or_none(name: str, value: Any) -> int | None:
    return None if value is None else _whole_number(name, value)


def _error(name: str, value: Any, expected: str) -> BadRequestError:
    return BadRequestError(f"{name} = {repr(value)[:_SHOWN_CHARACTERS]} is not {expected}")


_PLAIN: Final[dict[str, Callable[[str, Any], Any]]] = {
    "int": _whole_number,
    "int | None": _whole_number_or_none,
    "str": _text,
    "bytes": _bytes,
    "bool": _flag,
    "Sequence[str]": _texts,
}


PAGE_MESSAGES = 4096
_PAGE_BYTES: Final = 8 << 20
MESSAGES_MAX = 1 << 31
SCAN_BYTES_MAX = 1 << 30
# RocketMQ's default size limit of a pull.
ROCKETMQ_PULL_BYTES = 128 << 20
# Interval of checks whether a running store was restarted.
_CHECK_INTERVAL_S: Final = 0.1
# Options that must be those of the running group.
_OF_THE_GROUP: Final = (
    "flush_disk_type",
    "mapped_file_size_commit_log",
    "mapped_file_size_consume_queue",
    "max_hash_slot_num",
    "max_index_num",
    "message_index_tags",
)

# After a fork, locks may be held by a thread that does not exist in the child.
_readers: weakref.WeakSet[StoreReader] = weakref.WeakSet()


class StoreReader(UserObject):
    """A store's files, opened read-only. Times are Unix ms.

    Threads may share a reader, but calls are serialized: separate readers are faster.
    """

    _internal = frozenset({"options", "paths", "reading"})

    def __init__(self, path: str | Path, options: Options | None = None, *, whole: bool = True) -> None:
        """Open the store at `path`; file sizes are detected whatever `options` say.

        `whole`: a short segment is an error; else it counts with its content. Raises StoreAccessError if there is no
        store, CorruptStoreError if its files contradict each other.
        """
        self.paths = StorePaths(checked_path(path))
        self._io = StoreIO()
        self._lock = threading.RLock()
        check_is_store(self._io, self.paths)
        self.options = with_sizes_of_files(self._io, self.paths, options or settings_of(self._io, self.paths))
        self._whole = whole
        view = GroupView.open(self._io, self.paths, self.options)
        self._view: StoreView = view or FilesView(self._io, self.paths, self.options, whole=whole)
        self._reading = self._queries_of(self._view)
        self._check_at_s = time.monotonic() + _CHECK_INTERVAL_S
        _readers.add(self)

    def _queries_of(self, view: StoreView) -> StoreQueries:
        return StoreQueries(
            self._io,
            self.paths,
            self.options,
            view,
            whole=self._whole,
            static=not isinstance(view, GroupView),
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
        """Close the store's files.

        Example: `reader.close()`
        """
        with self._lock:
            self._check_at_s = float("inf")
            self._reading.close()
            self._view.close()

    @property
    def reading(self) -> StoreQueries:
        """Queries on the store as of now, for use by one thread."""
        self._follow()
        return self._reading

    def _follow(self) -> None:
        """Switch to a restarted group's positions.

        Until it has recovered, those of the previous group apply.
        """
        now_s = time.monotonic()
        if now_s < self._check_at_s or not isinstance(self._view, GroupView):
            return
        self._check_at_s = now_s + _CHECK_INTERVAL_S
        if self._view.is_current(self._io, self.paths):
            return
        # The new group may have another flush mode, and so other visible messages; another store in this place may have
        # other file sizes, or no files yet.
        current = settings_of(self._io, self.paths)
        options = dataclasses.replace(self.options, **{name: getattr(current, name) for name in _OF_THE_GROUP})
        view = GroupView.open(self._io, self.paths, options)
        if view is not None:
            self.options = with_sizes_of_files(self._io, self.paths, options)
            old = self._reading
            self._view, self._reading = view, self._queries_of(view)
            # The old view's table is released with its last user.
            old.close()

    @property
    def running(self) -> bool:
        """Whether positions come from a running group."""
        return isinstance(self._view, GroupView)

    @property
    def visible(self) -> Visible:
        """The readable part of the log."""
        with self._lock:
            self._follow()
            return self._view.visible()

    @property
    def time_ordered_from(self) -> int:
        """Log position from which store times are known to ascend."""
        with self._lock:
            self._follow()
            return self._view.time_ordered_from()

    # Queues and topics

    @checked_call
    def topics(self) -> list[TopicInfo]:
        """Topics with a queue or an entry in `config/topics.json`, sorted.

        Example: `reader.topics()`
        """
        return finish(self.reading.topic_infos())

    @checked_call
    def queues(self, topic: str = "") -> list[QueueInfo]:
        """Queues of a topic, or of all topics. Example: `reader.queues("orders")`"""
        return finish(self.reading.queue_infos(topic))

    @checked_call
    def min_offset(self, topic: str, queue_id: int) -> int:
        """First readable queue offset; 0 for an unknown queue, as in RocketMQ.

        Example: `reader.min_offset("orders", 0)`
        """
        bounds = self.reading.queues.bounds(topic, queue_id)
        return bounds.min_offset if bounds else 0

    @checked_call
    def max_offset(self, topic: str, queue_id: int) -> int:
        """Queue offset of the next message; 0 for an unknown queue, as in RocketMQ.

        Example: `reader.max_offset("orders", 0)`
        """
        bounds = self.reading.queues.bounds(topic, queue_id)
        return bounds.max_offset if bounds else 0

    # Messages

    @checked_call
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
        """The next messages of a queue, with RocketMQ's statuses and next offsets.

        With `rocketmq_limits` the answer of `get_message`.
        Example: `reader.pull("orders", 0, 0, tags=["new"]).messages`
        """
        reading = self.reading
        reading.close_deleted(self._view.deletions())
        if rocketmq_limits:
            return _pull_result(reading.get_message(topic, queue_id, offset, max_messages, max_bytes, "||".join(tags)))
        pulled = reading.pull(topic, queue_id, offset, max_messages, max_bytes, tags)
        return _pull_result(pulled)

    # RocketMQ's own answers, under its names

    @checked_call
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
        """RocketMQ's `getMessage`: tags by hash, its limits, no CRC, unknown queues are empty.

        Example: `reader.get_message("orders", 0, 0, expression="new || paid").status`
        """
        return _pull_result(self.reading.get_message(topic, queue_id, offset, max_messages, max_bytes, expression))

    @checked_call
    def query_message(
        self, topic: str, key: str, max_messages: int = 32, begin_ms: int = TIME_MIN, end_ms: int = TIME_MAX
    ) -> IndexAnswer:
        """RocketMQ's `queryMessage` by key: all hash hits of the index.

        Example: `reader.query_message("orders", "order-1").offsets`
        """
        return finish(self.reading.query_message(topic, key, max_messages, begin_ms, end_ms))

    @checked_call
    def min_offset_in_queue(self, topic: str, queue_id: int) -> int:
        """RocketMQ's `getMinOffsetInQueue`, which searches the queue's first file only.

        Example: `reader.min_offset_in_queue("orders", 0)`
        """
        return self.reading.rocketmq_queues.bounds(topic, queue_id).min_offset

    @checked_call
    def offset_in_queue_by_time(self, topic: str, queue_id: int, time_ms: int, *, upper: bool = False) -> int:
        """RocketMQ's `getOffsetInQueueByTime`, within its bounds of the queue.

        Example: `reader.offset_in_queue_by_time("orders", 0, message.store_timestamp_ms)`
        """
        return finish(self.reading.offset_in_queue_by_time(topic, queue_id, time_ms, upper=upper))

    # Messages by id, key and time

    @checked_call
    def get(self, message_id: str, topic: str = "") -> StoredMessage:
        """The message with an offset id or a unique id. Raises MessageNotFoundError.

        Example: `reader.get(message.message_id)`
        """
        return decode_record(finish(self.reading.get(message_id, topic)).data)

    @checked_call
    def look(self, physical_offset: int) -> StoredMessage | None:
        """The message whose record begins at a physical offset; None if none does.

        Example: `reader.look(message.physical_offset)`
        """
        record = self.reading.record_at(physical_offset)
        return None if record is None else decode_record(record.data)

    @checked_call
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
        """The newest messages with a key (`unique`: unique id), begin_ms ≤ time < end_ms, ascending.

        Example: `reader.by_key("orders", "order-1")`
        """
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

    @checked_call
    def by_tag(
        self,
        topic: str,
        tag: str,
        begin_ms: int = TIME_MIN,
        end_ms: int = TIME_MAX,
        *,
        max_messages: int = 64,
        born_time: bool = False,
    ) -> list[StoredMessage]:
        """The newest messages with a tag, as `by_key`.

        Raises BadRequestError if the index has no entries for tags. Example: `reader.by_tag("orders", "paid")`
        """
        limits = {"max_messages": max_messages, "max_bytes": MESSAGES_MAX}
        return _messages_of(finish(self.reading.by_tag(topic, tag, begin_ms, end_ms, born_time=born_time, **limits)))

    @checked_call
    def messages(self, topic: str = "", queue_id: int | None = None) -> Iterator[StoredMessage]:
        """All messages of a topic, or of all topics, by queue from its minimum offset on.

        Example: `[message.body for message in reader.messages("orders")]`
        """
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

    @checked_call
    def range(
        self,
        topic: str,
        begin_ms: int = TIME_MIN,
        end_ms: int = TIME_MAX,
        *,
        tags: Sequence[str] = (),
        born_time: bool = False,
    ) -> Iterator[StoredMessage]:
        """Messages with begin_ms ≤ time < end_ms, by queue.

        Example: `list(reader.range("orders", end_ms=message.store_timestamp_ms, tags=["new"]))`
        """

        def page(cursor: Sequence[int]) -> Slices[RecordPage]:
            size, times = self.options.max_pull_bytes, (begin_ms, end_ms)
            return self.reading.range(
                topic, *times, tags=tags, born_time=born_time, cursor=cursor, max_messages=PAGE_MESSAGES, max_bytes=size
            )

        yield from self._pages(page)

    def _pages(self, page: Callable[[Sequence[int]], Slices[RecordPage]]) -> Iterator[StoredMessage]:
        """Messages of all pages; `page` returns the one at a cursor, which is empty for the first."""
        cursor: Sequence[int] = ()
        while True:
            with self._lock:
                batch = finish(page(cursor))
                messages = _messages_of(batch)
            yield from messages
            if batch.complete:
                return
            cursor = batch.cursor

    def read(
        self,
        topic: str,
        begin: Time = None,
        end: Time = None,
        *,
        queue_ids: int | Sequence[int] | None = None,
        starting_offsets: Mapping[int, int] | None = None,
        ending_offsets: Mapping[int, int] | None = None,
        tags: str = "",
        filter: Filter | None = None,
        time: TimeKind = "store",
        columns: Sequence[str] | str | None = None,
        fail_on_data_loss: bool = True,
    ) -> ArrowStream:
        """Read a topic's messages as a lazy Arrow stream, as `Client.read`: no group need run.

        Example: `reader.read("orders", columns=["keys", "body"]).to_arrow()`
        """
        with needs_package("arrow"):
            from mqproc.arrow.reading import ArrowStream, ReadPlan, TopicRead, with_times
        read = TopicRead.of_user(
            topic,
            begin,
            end,
            time=time,
            queue_ids=queue_ids,
            starting_offsets=starting_offsets,
            ending_offsets=ending_offsets,
            tags=tags,
            filter=filter,
            columns=columns,
            fail_on_data_loss=fail_on_data_loss,
        )
        spans = read.spans(self.queues(topic))
        if read.times is not None and not read.is_born:
            first, last = read.begin_ms, read.end_ms - 1
            bounds = [
                (self.offset_at(topic, queue, first), self.offset_at(topic, queue, last, upper=True))
                for queue, _begin, _end in spans
            ]
            spans = with_times(spans, bounds)
        plan = ReadPlan(read, spans, self.paths.root)
        return ArrowStream(plan, functools.partial(self._read_pages, plan))

    def _read_pages(self, plan: ReadPlan) -> Generator[ReadPage]:
        for span in plan.spans:
            while span.begin < span.end:
                page = self._read_page(plan, span)
                span = span._replace(begin=page.next_offset)
                yield page

    def _read_page(self, plan: ReadPlan, at: QueueSpan) -> ReadPage:
        from mqproc.arrow.reading import PAGE_MESSAGES

        tags, sql = plan.read.selection
        with self._lock:
            reading = self.reading
            reading.close_deleted(self._view.deletions())
            place = plan.read.topic, at.queue_id, at.begin, min(PAGE_MESSAGES, at.end - at.begin)
            pulled = reading.pull(*place, _PAGE_BYTES, tags, sql=sql)
            return plan.page(at, pulled.status, pulled.records, pulled.count, pulled.next_offset, pulled.detail)

    @checked_call
    def count(
        self,
        topic: str,
        begin_ms: int = TIME_MIN,
        end_ms: int = TIME_MAX,
        *,
        tags: Sequence[str] = (),
        born_time: bool = False,
    ) -> int:
        """Number of messages that `range` yields.

        By store time without tags only border records are read, so damaged records that recovery has not found yet are
        counted. Example: `reader.count("orders")`
        """
        return finish(self.reading.count(topic, begin_ms, end_ms, tags=tags, born_time=born_time))

    @checked_call
    def offset_at(self, topic: str, queue_id: int, time_ms: int, *, upper: bool = False) -> int:
        """First queue offset stored at or after a time; with `upper` the last one at or before it.

        0 for an unknown queue. Example: `reader.offset_at("orders", 0, message.store_timestamp_ms)`
        """
        return finish(self.reading.offset_at(topic, queue_id, time_ms, upper=upper))

    @checked_call
    def store_time_ms(self, topic: str, queue_id: int, offset: int) -> int:
        """Store time of the message at a queue offset, −1 if none exists.

        Example: `reader.store_time_ms("orders", 0, 0)`
        """
        return self.reading.store_time_ms(topic, queue_id, offset)

    @checked_call
    def scan(self, conditions: Conditions | None = None, physical_offset: int = -1) -> Iterator[StoredMessage]:
        """Messages that meet the conditions, found by a scan of the whole log, in its order.

        Example: `list(reader.scan(Conditions(topic="orders", body_contains=b"paid")))`
        """
        if conditions is not None and not isinstance(conditions, Conditions):
            raise BadRequestError(f"conditions = {repr(conditions)[:64]} is not of the type Conditions")
        checked = Conditions() if conditions is None else checked_fields(conditions)

        def page(cursor: Sequence[int]) -> Slices[RecordPage]:
            begin, size = cursor[0] if cursor else physical_offset, self.options.max_pull_bytes
            return self.reading.scan(
                checked, begin, max_messages=PAGE_MESSAGES, max_bytes=size, max_scan_bytes=SCAN_BYTES_MAX
            )

        yield from self._pages(page)

    @checked_call
    def record_bytes(self, physical_offset: int) -> NDArray[np.uint8] | None:
        """The raw record at a physical offset, uint8[size]; None if none begins there.

        Example: `reader.record_bytes(message.physical_offset)`
        """
        return self.reading.record_at(physical_offset)


def _replace_locks() -> None:
    for reader in _readers:
        reader._lock = threading.RLock()


os.register_at_fork(after_in_child=_replace_locks)


def _pull_result(pulled: Pulled) -> PullResult:
    messages = _decoded([pulled.records])
    return PullResult(pulled.status, messages, pulled.next_offset, pulled.min_offset, pulled.max_offset, pulled.detail)


def _messages_of(batch: RecordPage) -> list[StoredMessage]:
    return _decoded(batch.records)


def _decoded(records: Sequence[NDArray[np.uint8]]) -> list[StoredMessage]:
    array = packed([part.data for part in records], sys.maxsize)
    return messages_of(b"".join(part.data for part in records) if array is None else array)


def settings_of(io: StoreIO, paths: StorePaths) -> Options:
    """Options of the last group; defaults if none exist or they are unreadable."""
    try:
        return Options(**read_values(io, paths))
    except (FileNotFoundError, ValueError, ConfigurationError):
        return Options()


def with_sizes_of_files(io: StoreIO, paths: StorePaths, options: Options) -> Options:
    """The options with the sizes of the store's files."""
    slots, items = adopted_index_shape(io, paths.index, options.max_hash_slot_num, options.max_index_num)
    return dataclasses.replace(
        options,
        max_hash_slot_num=slots,
        max_index_num=items,
        mapped_file_size_commit_log=adopted_segment_size(io, paths.commit_log, options.mapped_file_size_commit_log),
        mapped_file_size_consume_queue=adopted_file_bytes(io, paths.consume_queue, options.consume_queue_file_bytes),
    )
