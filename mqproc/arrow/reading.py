"""Reads of a topic as a lazy Arrow stream, the same from a group and from a store's files.

    read(topic, …) ──▶ TopicRead ──queues, offsets at times──▶ ReadPlan ──page by page──▶ ArrowStream ──▶ batches

A plan names the offsets of each queue: each use of its stream reads the same messages, whatever arrives meanwhile. A
stream has one page in memory, that of a client also the next answer. Importing this module needs pyarrow (`pip install
mqproc[arrow]`).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mqproc.arrow.batches import message_columns, sent_batches
from mqproc.arrow.columns import Columns, column_names, needs_package
from mqproc.errors import (
    BadRequestError,
    BadTopicError,
    CorruptStoreError,
    NoSuchQueueError,
    OffsetOutOfRangeError,
    TopicNotFoundError,
)
from mqproc.filters.selection import TIME_MAX_MS, TIME_MIN_MS, Selection, TimeKind, chosen, is_born, time_bounds
from mqproc.kernels import record_decode
from mqproc.types import Filter, PullStatus, QueueInfo
from mqproc.util.arguments import Time, each_of, true_or_false, whole_number

if TYPE_CHECKING:
    import pandas
    import polars

PAGE_MESSAGES: Final = 32_768
_TIMES: Final = ("store_timestamp_ms", "born_timestamp_ms")
# Statuses of a pull that lost nothing; retention deletes messages whether they are read or not.
_INTACT: Final = frozenset({PullStatus.FOUND, PullStatus.NO_MATCHED_MESSAGE, PullStatus.MESSAGE_WAS_REMOVING})


class QueueSpan(NamedTuple):
    """Offsets [begin, end) of a queue."""

    queue_id: int
    begin: int
    end: int


class ReadPage(NamedTuple):
    """Batches of one page, and the offset that the next one begins at."""

    batches: Sequence[pa.RecordBatch]
    next_offset: int


@dataclass(frozen=True, slots=True)
class TopicRead:
    """The arguments of a read, checked."""

    topic: str
    begin_ms: int
    end_ms: int
    is_born: bool
    queue_ids: tuple[int, ...] | None
    starting_offsets: Mapping[int, int]
    ending_offsets: Mapping[int, int]
    selection: Selection
    columns: tuple[str, ...]
    fail_on_data_loss: bool

    @classmethod
    def of_user(
        cls,
        topic: str,
        begin: Time,
        end: Time,
        *,
        time: TimeKind,
        queue_ids: int | Sequence[int] | None,
        starting_offsets: Mapping[int, int] | None,
        ending_offsets: Mapping[int, int] | None,
        tags: str,
        filter: Filter | None,
        columns: Columns,
        fail_on_data_loss: bool,
    ) -> TopicRead:
        """Check a user's arguments. Raises BadRequestError."""
        if not isinstance(topic, str) or not topic:
            raise BadTopicError(f"topic = {repr(topic)[:64]} is no name")
        names = column_names(columns)
        if not names:
            raise BadRequestError("columns names none: name one at least")
        queues = None if queue_ids is None else tuple(dict.fromkeys(_queue_ids(queue_ids)))
        return cls(
            str.__str__(topic),
            *time_bounds(begin, end),
            is_born(time),
            queues,
            _offsets("starting_offsets", starting_offsets),
            _offsets("ending_offsets", ending_offsets),
            chosen(tags, filter),
            names,
            true_or_false("fail_on_data_loss", fail_on_data_loss),
        )

    @property
    def times(self) -> tuple[int, int] | None:
        """Bounds in ms by which the read selects; None for all times."""
        bounds = self.begin_ms, self.end_ms
        return None if bounds == (TIME_MIN_MS, TIME_MAX_MS) else bounds

    def spans(self, queues: Sequence[QueueInfo]) -> list[QueueSpan]:
        """Offsets to read, given all queues of the topic.

        Raises TopicNotFoundError, NoSuchQueueError and OffsetOutOfRangeError.
        """
        if not queues:
            raise TopicNotFoundError(f"no topic {self.topic!r}")
        by_id = {info.queue_id: info for info in queues}
        wanted = by_id if self.queue_ids is None else self.queue_ids
        for queue_id in (*wanted, *self.starting_offsets, *self.ending_offsets):
            if queue_id not in by_id:
                raise NoSuchQueueError(f"topic {self.topic!r} has no queue {queue_id}; it has {len(by_id):,}")
        return [self._span(by_id[queue_id]) for queue_id in wanted]

    def _span(self, info: QueueInfo) -> QueueSpan:
        low, high = info.min_offset, info.max_offset
        begin = self.starting_offsets.get(info.queue_id, low)
        end = self.ending_offsets.get(info.queue_id, high)
        for name, offset in (("starting_offsets", begin), ("ending_offsets", end)):
            if not low <= offset <= high and self.fail_on_data_loss:
                raise OffsetOutOfRangeError(
                    f"{name}: {offset:,} of queue {info.queue_id} of {self.topic} is outside of {low:,} to {high:,}; "
                    "fail_on_data_loss=False reads the rest",
                    min_offset=low,
                    max_offset=high,
                )
        return QueueSpan(info.queue_id, max(low, begin), min(high, end))


def _queue_ids(values: Any) -> Iterator[int]:
    several = [values] if hasattr(values, "__index__") else each_of("queue_ids", values)
    return (whole_number("queue_ids", value) for value in several)


def _offsets(name: str, offsets: Mapping[int, int] | None) -> Mapping[int, int]:
    if offsets is None:
        return {}
    if not isinstance(offsets, Mapping):
        raise BadRequestError(f"{name} = {repr(offsets)[:64]}: give a mapping of queue ids to offsets, like {{0: 23}}")
    return {whole_number(name, queue_id): whole_number(name, offset) for queue_id, offset in offsets.items()}


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """A read, and the offsets that it reads of each queue. `store` is for errors."""

    read: TopicRead
    spans: Sequence[QueueSpan]
    store: str | Path

    @property
    def schema(self) -> pa.Schema:
        return message_columns(self.read.columns).schema

    def page(
        self,
        at: QueueSpan,
        status: PullStatus,
        records: memoryview | NDArray[np.uint8],
        count: int,
        next_offset: int,
        detail: str,
    ) -> ReadPage:
        """Make a page of the answer to a pull of `at`.

        Raises CorruptStoreError for lost messages, BadMessageError for a body that cannot be decompressed.
        """
        if status not in _INTACT and self.read.fail_on_data_loss:
            lost = detail or f"messages from offset {at.begin:,} on are gone since the read began ({status})"
            where = f"queue {at.queue_id} of {self.read.topic}"
            raise CorruptStoreError(f"{self.store}: {where}: {lost}; fail_on_data_loss=False skips them")
        batches = self._batches(records, count, at.end if next_offset > at.end else None) if count else []
        return ReadPage(batches, after(at, next_offset).begin)

    def _batches(
        self, records: memoryview | NDArray[np.uint8], count: int, end: int | None
    ) -> Sequence[pa.RecordBatch]:
        """Batches of the records that are selected by time, and below the offset `end`."""
        time = _TIMES[self.read.is_born]
        rows = message_columns(self.read.columns).rows | record_decode.rows_of([time])
        buf, places, count = record_decode.locate(records, count, rows)
        keep: Any = None
        if self.read.times is not None:
            times: Any = record_decode.copy_column(buf, places, count, time)
            keep = (times >= self.read.begin_ms) & (times < self.read.end_ms)
        if end is not None:
            below = record_decode.copy_column(buf, places, count, "queue_offset") < end  # type: ignore[operator]
            keep = below if keep is None else keep & below
        if keep is not None and not keep.all():
            positions = np.ascontiguousarray(places[:count][keep])
            count = len(positions)
            if not count:
                return []
            places = record_decode.places_at(buf, positions, rows)
        return list(sent_batches(self.read.columns, buf, places, count, str(self.store)))


def after(at: QueueSpan, next_offset: int) -> QueueSpan:
    """The rest of a span after a pull."""
    # A queue that is gone, or ends before the plan, gives no later offset.
    return at._replace(begin=next_offset if next_offset > at.begin else at.end)


def with_times(spans: Sequence[QueueSpan], bounds: Sequence[tuple[int, int]]) -> list[QueueSpan]:
    """The spans narrowed to the first and the last offset that may have a selected time."""
    return [
        QueueSpan(span.queue_id, max(span.begin, first), min(span.end, last + 1))
        for span, (first, last) in zip(spans, bounds, strict=True)
    ]


class ReadResult:
    """Description of a read: `schema`, and the offsets by queue that it begins and ends at."""

    def __init__(self, plan: ReadPlan) -> None:
        self.schema = plan.schema
        self.starting_offsets = {span.queue_id: span.begin for span in plan.spans}
        self.ending_offsets = {span.queue_id: max(span.begin, span.end) for span in plan.spans}
        self._plan = plan

    def __repr__(self) -> str:
        count = sum(max(0, span.end - span.begin) for span in self._plan.spans)
        names = ", ".join(self._plan.read.columns)
        return f"<{type(self).__name__} of {self._plan.read.topic}: up to {count:,} messages, columns {names}>"


_PYARROW_OBJECT: Any = pa.lib._Weakrefable


class ArrowStream(ReadResult, _PYARROW_OBJECT):  # type: ignore[misc] # polars.from_arrow asks whether pyarrow made it
    """Messages of a topic as a lazy Arrow stream, made by `read`.

        stream = client.read("orders")
        polars.from_arrow(stream)
        duckdb.sql("select tag, count(*) from stream group by tag")
        stream.to_pandas()

    Everything that takes Arrow streams (`__arrow_c_stream__`) takes this, and reads it page by page, in the order of
    queues and offsets. Each use reads the same messages from the store: those that existed when `read` was called.
    """

    def __init__(self, plan: ReadPlan, pages: Callable[[], Generator[ReadPage]]) -> None:
        """`pages` begins to read the plan."""
        super().__init__(plan)
        self._pages = pages

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        empty = True
        with contextlib.closing(self._pages()) as pages:
            for page in pages:
                yield from page.batches
                empty = empty and not page.batches
        if empty:  # Some readers take the schema from the first batch.
            yield pa.RecordBatch.from_pylist([], self.schema)

    def __array__(self, *_: object, **__: object) -> NDArray[Any]:
        """Raise BadRequestError: pandas.DataFrame would make one cell of each batch."""
        raise BadRequestError("a stream is no array: to_pandas() makes a DataFrame of it")

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.to_reader().__arrow_c_stream__(requested_schema)

    def __arrow_c_schema__(self) -> object:
        return self.schema.__arrow_c_schema__()

    def to_reader(self) -> pa.RecordBatchReader:
        """A pyarrow.RecordBatchReader of the messages, for one use.

        Example: `client.read("orders").to_reader().read_next_batch()`
        """
        return pa.RecordBatchReader.from_batches(self.schema, iter(self))

    def to_arrow(self) -> pa.Table:
        """All messages as a pyarrow.Table. Example: `client.read("orders").to_arrow()`"""
        return pa.Table.from_batches(iter(self), self.schema)

    def to_polars(self) -> polars.DataFrame:
        """All messages as a polars.DataFrame. Example: `client.read("orders").to_polars()`"""
        return as_polars(self.to_arrow())

    def to_pandas(self) -> pandas.DataFrame:
        """All messages as a pandas.DataFrame; topic and tag are categories.

        Example: `client.read("orders", columns=["tag", "body"]).to_pandas()`
        """
        return as_pandas(self.to_arrow())


class AsyncArrowStream(ReadResult):
    """Messages of a topic as lazy Arrow batches, made by `read` of an asynchronous client.

        stream = await client.read("orders")
        async for batch in stream:
            print(batch.num_rows)
        frame = await stream.to_polars()

    Otherwise as `ArrowStream`, without `__arrow_c_stream__`, which would stop the event loop.
    """

    def __init__(self, plan: ReadPlan, fetch: Callable[[QueueSpan], Awaitable[ReadPage]]) -> None:
        super().__init__(plan)
        self._fetch = fetch

    async def __aiter__(self) -> AsyncIterator[pa.RecordBatch]:
        for span in self._plan.spans:
            while span.begin < span.end:
                page = await self._fetch(span)
                span = span._replace(begin=page.next_offset)
                for batch in page.batches:
                    yield batch

    async def to_arrow(self) -> pa.Table:
        """All messages as a pyarrow.Table.

        Example: `await (await client.read("orders")).to_arrow()`
        """
        return pa.Table.from_batches([batch async for batch in self], self.schema)

    async def to_polars(self) -> polars.DataFrame:
        """All messages as a polars.DataFrame.

        Example: `await (await client.read("orders")).to_polars()`
        """
        return as_polars(await self.to_arrow())

    async def to_pandas(self) -> pandas.DataFrame:
        """All messages as a pandas.DataFrame.

        Example: `await (await client.read("orders")).to_pandas()`
        """
        return as_pandas(await self.to_arrow())


def as_polars(table: pa.Table) -> polars.DataFrame:
    with needs_package("analysis"):
        import polars
    frame = polars.from_arrow(table)
    assert isinstance(frame, polars.DataFrame)
    return frame


def as_pandas(table: pa.Table) -> pandas.DataFrame:
    with needs_package("analysis"):
        import pandas

    def dtype_of(kind: pa.DataType) -> Any:
        """Lists and maps stay Arrow's: Python objects would take most of the time and memory."""
        return pandas.ArrowDtype(kind) if pa.types.is_nested(kind) else None

    # Few bodies are equal, and to look for them takes as long as all the rest.
    return table.to_pandas(types_mapper=dtype_of, split_blocks=True, deduplicate_objects=False)
