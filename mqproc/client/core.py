"""Every request that a client can make, and how its answer is read: shared by the sync and the async client.

A `Call` is a request without I/O. What sends it, waits, and tries again is `sync.py` or `aio.py`.
"""

from __future__ import annotations

import datetime
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar

import msgspec
import numpy as np

from mqproc.client.encoding import FRAME_MESSAGES_MAX, AppendFrame, Batch, encode_batch, encode_message, encode_messages
from mqproc.client.unique_id import unique_id
from mqproc.errors import (
    BadMessageError,
    BadRequestError,
    MessageNotFoundError,
    NoSuchQueueError,
    ProtocolError,
    RequestTimeoutError,
    TopicNotFoundError,
)
from mqproc.layout.record_codec import decode_records, host_hex
from mqproc.message import (
    BatchResult,
    Health,
    Message,
    PullResult,
    PullStatus,
    QueueInfo,
    SendResult,
    StoredMessage,
    TopicInfo,
)
from mqproc.paths import StorePaths
from mqproc.wire.checks import check_topic, parse_tags
from mqproc.wire.operations import (
    ANSWERS,
    WRITER_OPERATIONS,
    ByKeyRequest,
    CountRequest,
    CreateTopicRequest,
    DeleteTopicRequest,
    Empty,
    GetRequest,
    OffsetAtRequest,
    Operation,
    Options,
    PullRequest,
    QueryMessageRequest,
    QueuesRequest,
    RangeRequest,
    ScanRequest,
)

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from mqproc.client.arrow import ArrowPullResult

T = TypeVar("T")
# How often a wait for dispatch looks.
DISPATCH_LOOK_S: Final = 0.001
Time = int | float | str | datetime.datetime | None
"""A moment: Unix ms, a datetime (a naive one is local time), or None for no bound."""
TimeKind = Literal["store", "born"]

TIMEOUT_S: Final = 30.0
IN_FLIGHT: Final = 4
WRITER: Final = "writer"
QUERY: Final = "query"
TIME_MAX_MS: Final = 1 << 62
# Messages of one frame, where a client cuts a stream of them.
GROUP_MESSAGES_MAX: Final = 1000
GROUP_BYTES_MAX: Final = 1 << 20
PULL_MESSAGES: Final = 1024
PULL_BYTES: Final = 8 << 20

_encode = msgspec.msgpack.Encoder().encode
_DECODERS: dict[int, msgspec.msgpack.Decoder[Any]] = {
    int(operation): msgspec.msgpack.Decoder(kind) for operation, kind in ANSWERS.items()
}
_decode_append = _DECODERS[Operation.APPEND].decode
_APPEND = int(Operation.APPEND)
_ONE_ROW = struct.Struct("<qqi")
_MASK64: Final = (1 << 64) - 1


@dataclass(slots=True)
class Call(Generic[T]):
    """A request. `repeatable`: may be made again although its answer was lost. `wait_s`: the server may hold it."""

    role: str
    operation: int
    options: bytes
    payload: Sequence[ReadableBuffer]
    parse: Callable[[memoryview, memoryview], T]
    repeatable: bool = True
    wait_s: float = 0.0
    oneway: bool = False


class DispatchWait:
    """Waiting until dispatch has passed what was written when the waiting began."""

    def __init__(self, timeout_s: float) -> None:
        self._target = -1
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s

    def reached(self, words: Mapping[str, int]) -> bool:
        """Look at the control words. Raises RequestTimeoutError when the time is over."""
        if self._target < 0:
            self._target = words["written"]
        if words["dispatched"] >= self._target:
            return True
        if time.monotonic() > self._deadline:
            behind = self._target - words["dispatched"]
            raise RequestTimeoutError(f"dispatch is still {behind:,} bytes behind after {self._timeout_s:g} s")
        return False


def socket_paths(store_or_socket: str | Path) -> dict[str, Path]:
    """The roles' sockets of a store, given its folder or one of its sockets."""
    path = Path(store_or_socket).expanduser().absolute()
    if path.suffix == ".sock":
        return {name: path.with_name(f"{name}.sock") for name in (WRITER, QUERY)}
    return {name: StorePaths(path).socket(name) for name in (WRITER, QUERY)}


def time_ms(moment: Time, default: int) -> int:
    """A moment as Unix ms: a number is that already, text is ISO 8601, local time where it names no zone.

    Raises BadRequestError for a text that is none.
    """
    if moment is None:
        return default
    if isinstance(moment, str):
        try:
            moment = datetime.datetime.fromisoformat(moment)
        except ValueError:
            raise BadRequestError(f"{moment!r} is no ISO 8601 time") from None
    if isinstance(moment, datetime.datetime):
        return round(moment.timestamp() * 1000)
    return int(moment)


def _decode_options(operation: int, options: memoryview) -> Any:
    try:
        return _DECODERS[operation].decode(options)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"answer to {Operation(operation).name} cannot be read: {error}") from None


def _call(
    operation: Operation, options: Options, parse: Callable[[Any, memoryview], T], *, repeatable: bool = True
) -> Call[T]:
    """A call whose answer's options are decoded before `parse` gets them."""
    number = int(operation)
    role = WRITER if operation in WRITER_OPERATIONS else QUERY
    return Call(
        role, number, _encode(options), (), lambda found, rows: parse(_decode_options(number, found), rows), repeatable
    )


def _nothing(_options: Any, _payload: memoryview) -> None:
    return None


# Sending


def message_of(
    topic: Message | str,
    body: bytes | None,
    tag: str,
    keys: str | Sequence[str],
    properties: Mapping[str, str] | None,
    queue_id: int | None,
    flag: int,
    born_timestamp_ms: int | None,
) -> Message:
    """The message that `send` was given, whole or in parts."""
    if isinstance(topic, Message):
        if body is not None:
            raise BadRequestError("give a Message, or a topic and a body, not both")
        return topic
    if body is None:
        raise BadMessageError("a message needs a body")
    several = (keys,) if isinstance(keys, str) and keys else keys or ()
    return Message(topic, body, tag, several, properties or {}, queue_id, flag, born_timestamp_ms)


def _append_call(frame: AppendFrame, parse: Callable[[memoryview, memoryview], T], *, oneway: bool = False) -> Call[T]:
    return Call(WRITER, _APPEND, frame.options, frame.payload, parse, False, 0.0, oneway)


def send(message: Message, *, wait: bool = True) -> Call[SendResult]:
    """One message."""
    frame = encode_message(message, wait=wait)

    def parse(options: memoryview, payload: memoryview) -> SendResult:
        answer = _decode_append(options)
        physical_offset, queue_offset, queue_id = _ONE_ROW.unpack(payload)
        return SendResult(
            f"{host_hex(answer.store_host)}{physical_offset & _MASK64:016X}",
            message.unique_id or unique_id(frame.unique_prefix, frame.unique_counter),
            queue_id,
            queue_offset,
            physical_offset,
            answer.store_timestamp_ms,
        )

    return _append_call(frame, _checked(parse))


def _checked(parse: Callable[[memoryview, memoryview], T]) -> Callable[[memoryview, memoryview], T]:
    """An append answer of the wrong shape is the server's fault, not the caller's."""

    def checked(options: memoryview, payload: memoryview) -> T:
        try:
            return parse(options, payload)
        except (msgspec.DecodeError, struct.error, ValueError) as error:
            raise ProtocolError(f"answer to APPEND cannot be read: {error}") from None

    return checked


def send_oneway(message: Message) -> Call[None]:
    """One message that is not answered."""
    frame = encode_message(message, wait=False, oneway=True)
    return _append_call(frame, _nothing, oneway=True)


def _columns(payload: memoryview, count: int) -> tuple[Any, Any, Any]:
    """An append answer's columns: physical offsets, queue offsets, queue ids, as arrays of their own."""
    data = bytes(payload)
    if len(data) != count * _ONE_ROW.size:
        raise ValueError(f"{len(data)} bytes for {count} messages")
    return (
        np.frombuffer(data, "<i8", count),
        np.frombuffer(data, "<i8", count, 8 * count),
        np.frombuffer(data, "<i4", count, 16 * count),
    )


def send_group(messages: Sequence[Message], *, wait: bool = True) -> Call[list[SendResult]]:
    """Messages of one topic in one frame; either all name a queue or none does."""
    frame = encode_messages(messages, wait=wait)

    def parse(options: memoryview, payload: memoryview) -> list[SendResult]:
        answer = _decode_append(options)
        host, store_timestamp_ms = host_hex(answer.store_host), answer.store_timestamp_ms
        physical_offsets, queue_offsets, queue_ids = _columns(payload, frame.count)
        rows = zip(messages, physical_offsets.tolist(), queue_offsets.tolist(), queue_ids.tolist(), strict=True)
        return [
            SendResult(
                f"{host}{physical_offset & _MASK64:016X}",
                message.unique_id or unique_id(frame.unique_prefix, frame.unique_counter + index),
                queue_id,
                queue_offset,
                physical_offset,
                store_timestamp_ms,
            )
            for index, (message, physical_offset, queue_offset, queue_id) in enumerate(rows)
        ]

    return _append_call(frame, _checked(parse))


def send_batch(batch: Batch, frame_bytes_max: int) -> Iterator[Call[BatchResult]]:
    """A batch: one call, or several when it is larger than a frame may be."""
    for frame in encode_batch(batch, frame_bytes_max):
        yield _batch_call(frame)


def _batch_call(frame: AppendFrame) -> Call[BatchResult]:
    topic, count = frame.topic, frame.count

    def parse(options: memoryview, payload: memoryview) -> BatchResult:
        physical_offsets, queue_offsets, queue_ids = _columns(payload, count)
        return BatchResult(
            topic, queue_ids, queue_offsets, physical_offsets, _decode_append(options).store_timestamp_ms
        )

    return _append_call(frame, _checked(parse))


def joined(topic: str, results: Sequence[BatchResult]) -> BatchResult:
    """The results of a batch's frames as one; its store time is the last frame's."""
    if len(results) == 1:
        return results[0]
    if not results:
        empty = np.empty(0, np.int64)
        return BatchResult(topic, np.empty(0, np.int32), empty, empty, 0)
    return BatchResult(
        topic,
        np.concatenate([result.queue_ids for result in results]),
        np.concatenate([result.queue_offsets for result in results]),
        np.concatenate([result.physical_offsets for result in results]),
        results[-1].store_timestamp_ms,
    )


class Grouping:
    """Cuts a stream of messages into frames: one topic each, and each either with queues or without."""

    def __init__(self, messages_max: int = GROUP_MESSAGES_MAX, bytes_max: int = GROUP_BYTES_MAX) -> None:
        self._messages_max = min(messages_max, FRAME_MESSAGES_MAX)
        self._bytes_max = bytes_max
        self._groups: dict[tuple[str, bool], list[tuple[int, Message]]] = {}
        self._bytes: dict[tuple[str, bool], int] = {}

    def add(self, index: int, message: Message) -> list[tuple[int, Message]] | None:
        """Put a message to its group; returns the group when it is full, with each message's index."""
        key = (message.topic, message.queue_id is None)
        group = self._groups.setdefault(key, [])
        group.append((index, message))
        size = self._bytes[key] = self._bytes.get(key, 0) + len(message.body)
        if len(group) < self._messages_max and size < self._bytes_max:
            return None
        del self._bytes[key]
        return self._groups.pop(key)

    def rest(self) -> list[list[tuple[int, Message]]]:
        """The groups that are not full, oldest first."""
        groups = list(self._groups.values())
        self._groups.clear()
        self._bytes.clear()
        return groups


def groups_of(messages: Iterable[Message]) -> Iterator[list[tuple[int, Message]]]:
    """A stream of messages as groups, one frame each."""
    grouping = Grouping()
    for index, message in enumerate(messages):
        group = grouping.add(index, message)
        if group is not None:
            yield group
    yield from grouping.rest()


# Topics


def create_topic(topic: str, queues: int, perm: int) -> Call[None]:
    check_topic(topic)
    return _call(Operation.CREATE_TOPIC, CreateTopicRequest(topic, queues, perm), _nothing)


def delete_topic(topic: str) -> Call[None]:
    check_topic(topic)
    return _call(Operation.DELETE_TOPIC, DeleteTopicRequest(topic), _nothing, repeatable=False)


def topics() -> Call[list[TopicInfo]]:
    return _call(Operation.TOPICS, Empty(), lambda answer, _: [TopicInfo(*row) for row in answer.topics])


def queues(topic: str) -> Call[list[QueueInfo]]:
    return _call(Operation.QUEUES, QueuesRequest(topic), lambda answer, _: [QueueInfo(*row) for row in answer.queues])


def queue(topic: str, queue_id: int) -> Call[QueueInfo]:
    """One queue of a topic. Raises TopicNotFoundError or NoSuchQueueError."""

    def parse(answer: Any, _: memoryview) -> QueueInfo:
        found = [QueueInfo(*row) for row in answer.queues]
        if not found:
            raise TopicNotFoundError(f"no topic {topic!r}")
        for info in found:
            if info.queue_id == queue_id:
                return info
        raise NoSuchQueueError(f"topic {topic!r} has no queue {queue_id}; it has {len(found)}")

    return _call(Operation.QUEUES, QueuesRequest(topic), parse)


# Reading


def pull_request(
    topic: str,
    queue_id: int,
    offset: int,
    max_messages: int,
    max_bytes: int,
    tags: str,
    timeout: float,
    rocketmq_limits: bool,
) -> PullRequest:
    """The options of a pull; `timeout` in seconds is how long the server may wait for a message."""
    timeout_ms = max(0, round(timeout * 1000))
    return PullRequest(topic, queue_id, offset, max_messages, max_bytes, parse_tags(tags), timeout_ms, rocketmq_limits)


def pull(request: PullRequest) -> Call[PullResult]:
    """Messages of one queue as objects."""

    def parse(answer: Any, payload: memoryview) -> PullResult:
        return PullResult(
            PullStatus(answer.status),
            decode_records(payload),
            answer.next_offset,
            answer.min_offset,
            answer.max_offset,
        )

    return pull_as(request, parse)


def pull_as(request: PullRequest, parse: Callable[[Any, memoryview], T]) -> Call[T]:
    """Messages of one queue, made by `parse` of the PullAnswer and the records."""
    call = _call(Operation.PULL, request, parse)
    call.wait_s = request.timeout_ms / 1000
    return call


def arrow_parser(columns: Sequence[str] | None) -> Callable[[Any, memoryview], ArrowPullResult]:
    """What makes a pull's answer into Arrow."""
    # pyarrow and the kernels take half a second to import: only who asks for Arrow pays.
    from mqproc.client.arrow import parser

    return parser(columns)


def get(message_id: str, topic: str) -> Call[StoredMessage]:
    """The message with an offset id or a unique id."""

    def parse(_: Any, payload: memoryview) -> StoredMessage:
        found = decode_records(payload)
        if not found:
            raise MessageNotFoundError(f"no message {message_id}")
        return found[0]

    return _call(Operation.GET, GetRequest(message_id, topic), parse)


def by_key(
    topic: str, key: str, begin: Time, end: Time, max_messages: int, unique: bool, time: TimeKind
) -> Call[list[StoredMessage]]:
    """Messages by key, oldest first as the server gives them."""
    if not key:
        raise BadRequestError("key is empty")
    begin_ms, end_ms = _bounds(begin, end)
    request = ByKeyRequest(topic, key, begin_ms, end_ms, max_messages, unique, _is_born(time))
    return _call(Operation.BY_KEY, request, lambda _, payload: decode_records(payload))


def _bounds(begin: Time, end: Time) -> tuple[int, int]:
    begin_ms, end_ms = time_ms(begin, 0), time_ms(end, TIME_MAX_MS)
    if end_ms < begin_ms:
        raise BadRequestError(f"the end {end_ms} is before the begin {begin_ms}")
    return begin_ms, end_ms


def _is_born(time: str) -> bool:
    if time not in ("store", "born"):
        raise BadRequestError(f"time is {time!r}, neither 'store' nor 'born'")
    return time == "born"


@dataclass(frozen=True, slots=True)
class Page:
    """Part of a long answer; `next_call` asks for the next part, None after the last."""

    messages: list[StoredMessage]
    next_call: Call[Page] | None


def range_page(topic: str, begin: Time, end: Time, tags: str, page_messages: int, time: TimeKind) -> Call[Page]:
    """The first page of the messages with begin ≤ time < end."""
    begin_ms, end_ms = _bounds(begin, end)
    request = RangeRequest(topic, begin_ms, end_ms, parse_tags(tags), page_messages, _is_born(time))
    return _page_call(Operation.RANGE, request)


def scan_page(request: ScanRequest) -> Call[Page]:
    """The first page of a pass over the log."""
    return _page_call(Operation.SCAN, request)


def _page_call(operation: Operation, request: RangeRequest | ScanRequest) -> Call[Page]:
    def parse(answer: Any, payload: memoryview) -> Page:
        messages = decode_records(payload)
        if answer.complete or not answer.cursor or answer.cursor[0] < 0:
            return Page(messages, None)
        following = _continued(request, answer.cursor)
        if following == request:
            raise ProtocolError(f"{operation.name} does not go on from cursor {answer.cursor}")
        return Page(messages, _page_call(operation, following))

    return _call(operation, request, parse)


def _continued(request: RangeRequest | ScanRequest, cursor: list[int]) -> RangeRequest | ScanRequest:
    if isinstance(request, RangeRequest):
        return msgspec.structs.replace(request, cursor=cursor)
    return msgspec.structs.replace(request, physical_offset=cursor[0])


def scan_request(
    topic: str,
    begin: Time,
    end: Time,
    properties: Mapping[str, str] | None,
    body_contains: bytes,
    physical_offset: int,
    page_messages: int,
) -> ScanRequest:
    """The options of a scan; at most one property can be asked for."""
    if properties and len(properties) > 1:
        raise BadRequestError(f"a scan looks for one property, not {len(properties)}")
    begin_ms, end_ms = _bounds(begin, end)
    name, value = next(iter(properties.items())) if properties else ("", "")
    return ScanRequest(topic, physical_offset, begin_ms, end_ms, name, value, body_contains, max_messages=page_messages)


def count(topic: str, begin: Time, end: Time, tags: str, time: TimeKind) -> Call[int]:
    """How many messages have begin ≤ time < end."""
    begin_ms, end_ms = _bounds(begin, end)
    request = CountRequest(topic, begin_ms, end_ms, parse_tags(tags), _is_born(time))
    return _call(Operation.COUNT, request, lambda answer, _: int(answer.count))


def offset_at(topic: str, queue_id: int, moment: Time, upper: bool) -> Call[int]:
    request = OffsetAtRequest(topic, queue_id, time_ms(moment, 0), upper)
    return _call(Operation.OFFSET_AT, request, lambda answer, _: int(answer.offset))


@dataclass(frozen=True, slots=True)
class QueryMessageResult:
    """RocketMQ's answer to `queryMessage`: what the index points to by hash, colliding keys included."""

    physical_offsets: tuple[int, ...]
    index_last_update_timestamp_ms: int
    index_last_update_physical_offset: int
    messages: tuple[StoredMessage, ...] = ()


def query_message(topic: str, key: str, max_messages: int, begin: Time, end: Time) -> Call[QueryMessageResult]:
    begin_ms, end_ms = _bounds(begin, end)
    request = QueryMessageRequest(topic, key, max_messages, begin_ms, end_ms)

    def parse(answer: Any, payload: memoryview) -> QueryMessageResult:
        return QueryMessageResult(
            tuple(answer.physical_offsets),
            answer.index_last_update_timestamp_ms,
            answer.index_last_update_physical_offset,
            tuple(decode_records(payload)),
        )

    return _call(Operation.QUERY_MESSAGE, request, parse)


# State


def stats() -> Call[dict[str, int]]:
    return _call(Operation.STATS, Empty(), lambda answer, _: dict(answer.words))


def health() -> Call[Health]:
    def parse(answer: Any, _: memoryview) -> Health:
        return Health(answer.ready, answer.read_only, answer.dispatch_behind_bytes, tuple(answer.problems))

    return _call(Operation.HEALTH, Empty(), parse)


def ping(role: str) -> Call[None]:
    call = _call(Operation.PING, Empty(), _nothing)
    call.role = role
    return call
