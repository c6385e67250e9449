"""Requests about topics, reading and state, and the decoding of their answers. No I/O.

`_sync` and `_async` send a `Call`, wait and retry. The other requests are in `send_requests`, `group_requests` and
`transaction_requests`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

import msgspec

from mqproc.arrow.columns import Columns, needs_package
from mqproc.client.message_fields import not_properties
from mqproc.client.messages import FetchedMessages
from mqproc.errors import (
    BadRequestError,
    BadTopicError,
    MessageNotFoundError,
    NoSuchQueueError,
    ProtocolError,
    TopicNotFoundError,
    UnknownCommandError,
)
from mqproc.filters.selection import (
    EVERYTHING,
    TIME_MAX_MS,
    TIME_MIN_MS,
    Selection,
    TimeKind,
    chosen,
    is_born,
    time_bounds,
)
from mqproc.layout.record_codec import messages_of
from mqproc.paths import StorePaths, checked_path
from mqproc.topic_names import check_topic
from mqproc.types import (
    Filter,
    Health,
    PullResult,
    PullStatus,
    QueueInfo,
    StoredMessage,
    TopicInfo,
)
from mqproc.util.arguments import Time, milliseconds, time_ms, whole_number
from mqproc.wire.operations import (
    ANSWERS,
    UNDECODABLE,
    WRITER_OPERATIONS,
    ByKeyRequest,
    ByTagRequest,
    CountRequest,
    CreateTopicRequest,
    DeleteTopicRequest,
    Empty,
    FrameOptions,
    GetRequest,
    OffsetAtRequest,
    Operation,
    PullRequest,
    QueryMessageRequest,
    QueuesRequest,
    RangeRequest,
    ScanRequest,
    encoded,
)

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from mqproc.client.arrow import ArrowPullResult

T = TypeVar("T")
DISPATCH_POLL_S: Final = 0.001
"""Interval at which a wait for dispatch polls."""

TIMEOUT_S: Final = 30.0
IN_FLIGHT: Final = 4
MANY_IN_FLIGHT: Final = 8
"""Of `send_many`, whose frames have 1 MiB at most: client, writer and dispatcher need not wait for each other."""
WRITER: Final = "writer"
QUERY: Final = "query"
PULL_MESSAGES: Final = 1024
KEY_MESSAGES_MAX: Final = 65_536
PULL_BYTES: Final = 8 << 20

_DECODERS: dict[int, msgspec.msgpack.Decoder[Any]] = {
    int(operation): msgspec.msgpack.Decoder(kind) for operation, kind in ANSWERS.items()
}
_PULL: Final = int(Operation.PULL)
_SENDS: Final = (Operation.APPEND, Operation.APPEND_MESSAGES)
# Calling an enum class takes two Python calls.
_STATUSES: Final = {status.value: status for status in PullStatus}


# The last: of a writer of an earlier release.
NOT_TAKEN: Final = (BadRequestError, UnknownCommandError)


class Call(msgspec.Struct, Generic[T]):
    """A request.

    `repeatable`: it may be repeated after its answer was lost. `wait_s`: how long the server may hold it. `again`: the
    request that replaces it when it is repeated. `hand_back`: requests that return the messages of an
    answer that arrives after a cancellation. `instead`: makes the request that is sent when the server does not take
    this one, with an error of NOT_TAKEN.
    """

    role: str
    operation: int
    options: bytes
    payload: Sequence[ReadableBuffer]
    parse: Callable[[memoryview, memoryview], T]
    repeatable: bool = True
    wait_s: float = 0.0
    oneway: bool = False
    again: Call[T] | None = None
    hand_back: Callable[[T], list[Call[Any]]] | None = None
    instead: Callable[[], Call[T]] | None = None

    @property
    def is_send(self) -> bool:
        return self.operation in _SENDS


Steps = Generator[Call[Any], Any, T]


def socket_paths(store_or_socket: str | Path) -> dict[str, Path]:
    """Sockets of a store's roles, given its folder or one of its sockets."""
    path = checked_path(store_or_socket)
    if path.suffix == ".sock" and not path.is_dir():
        return {name: path.with_name(f"{name}.sock") for name in (WRITER, QUERY)}
    return {name: StorePaths(path).socket(name) for name in (WRITER, QUERY)}


def _decode_options(operation: int, options: memoryview) -> Any:
    try:
        return _DECODERS[operation].decode(options)
    except UNDECODABLE as error:
        raise ProtocolError(f"answer to {Operation(operation).name} cannot be read: {error}") from None


def call_of(
    operation: Operation, options: FrameOptions, parse: Callable[[Any, memoryview], T], *, repeatable: bool = True
) -> Call[T]:
    """Make a call; `parse` gets the decoded options and the payload of the answer."""
    number = int(operation)
    role = WRITER if operation in WRITER_OPERATIONS else QUERY
    return Call(
        role,
        number,
        encoded(options),
        (),
        lambda found, rows: parse(_decode_options(number, found), rows),
        repeatable,
    )


def nothing(_options: Any, _payload: memoryview) -> None:
    """Parse an answer without a value."""
    return


# Topics


def create_topic(topic: str, queues: int, perm: int | None) -> Call[None]:
    check_topic(topic)
    return call_of(Operation.CREATE_TOPIC, CreateTopicRequest(topic, queues, perm), nothing)


def delete_topic(topic: str) -> Call[None]:
    check_topic(topic)
    return call_of(Operation.DELETE_TOPIC, DeleteTopicRequest(topic), nothing, repeatable=False)


def topics() -> Call[list[TopicInfo]]:
    return call_of(Operation.TOPICS, Empty(), lambda answer, _: [TopicInfo(*row) for row in answer.topics])


def queues(topic: str, *, consumed: bool = False) -> Call[list[QueueInfo]]:
    """Queues of a topic, or of all; `consumed`: only those of the topic that consumers read."""
    request = QueuesRequest(topic, consumed)
    return call_of(Operation.QUEUES, request, lambda answer, _: [QueueInfo(*row) for row in answer.queues])


def queue(topic: str, queue_id: int) -> Call[QueueInfo]:
    """One queue of a topic. Raises TopicNotFoundError or NoSuchQueueError."""
    if not isinstance(topic, str) or not topic:
        raise BadTopicError("topic is empty" if isinstance(topic, str) else f"topic is {topic!r}, not text")
    number = whole_number("queue_id", queue_id)

    def parse(answer: Any, _: memoryview) -> QueueInfo:
        found = [QueueInfo(*row) for row in answer.queues]
        if not found:
            raise TopicNotFoundError(f"no topic {topic!r}")
        for info in found:
            if info.queue_id == number:
                return info
        raise NoSuchQueueError(f"topic {topic!r} has no queue {queue_id}; it has {len(found)}")

    return call_of(Operation.QUEUES, QueuesRequest(topic), parse)


# Reading


def pull_request(
    topic: str,
    queue_id: int,
    offset: int,
    max_messages: int,
    max_bytes: int,
    selection: Selection = EVERYTHING,
    timeout: float = 0.0,
    progress: float | None = None,
) -> PullRequest:
    """The options of a pull; the server waits up to `timeout` seconds for a message.

    `progress`: seconds after which it reports its progress through messages that do not match; None: never.
    """
    timeout_ms = max(0, milliseconds("timeout", timeout))
    progress_ms = -1 if progress is None else round(progress * 1000)
    names, sql = selection
    place = topic, queue_id, offset, max_messages, max_bytes
    return PullRequest(*place, names, timeout_ms, False, sql, progress_ms)


def pull(request: PullRequest, object_bytes: int = 0) -> Call[PullResult]:
    """Messages of one queue as objects.

    `object_bytes`: limit of an answer with an array of messages, which is faster than records.
    """
    request = msgspec.structs.replace(request, object_bytes=object_bytes)
    return Call(QUERY, _PULL, encoded(request), (), _pull_result, True, request.timeout_ms / 1000)


def _pull_result(options: memoryview, payload: memoryview) -> PullResult:
    """Parse a pull.

    A consumer that has caught up pulls each message singly, so this makes few calls.
    """
    answer = _decode_options(_PULL, options)
    status = _STATUSES.get(answer.status) or status_of(answer)
    return PullResult(
        status, messages_of(payload), answer.next_offset, answer.min_offset, answer.max_offset, answer.detail
    )


def status_of(answer: Any) -> PullStatus:
    """A pull's status. Raises ProtocolError for a status of another version."""
    if status := _STATUSES.get(answer.status):
        return status
    raise ProtocolError(f"answer to PULL has the status {answer.status[:64]!r}, which this version does not know")


class UnreadPull(NamedTuple):
    """One pull's answer with undecoded messages; otherwise as PullResult."""

    status: PullStatus
    next_offset: int
    batch: FetchedMessages


def unread_pull(answer: Any, payload: memoryview) -> UnreadPull:
    """Parse a pull into undecoded messages."""
    return UnreadPull(status_of(answer), answer.next_offset, FetchedMessages(payload, answer.count))


def redelivered_pull(parse: Callable[[Any, memoryview], Any]) -> Callable[[Any, memoryview], Any]:
    """A parser like `unread_pull` or `arrow_parser` that restores the original topics."""
    if parse is unread_pull:
        return _unread_retries
    from mqproc.client.arrow import redelivered_parser

    return redelivered_parser(parse)


def _unread_retries(answer: Any, payload: memoryview) -> UnreadPull:
    return UnreadPull(status_of(answer), answer.next_offset, FetchedMessages(payload, answer.count, are_retries=True))


def pull_as(request: PullRequest, parse: Callable[[Any, memoryview], T]) -> Call[T]:
    """Messages of one queue; `parse` converts the PullAnswer and the records."""
    call = call_of(Operation.PULL, request, parse)
    call.wait_s = request.timeout_ms / 1000
    return call


def arrow_parser(columns: Columns) -> Callable[[Any, memoryview], ArrowPullResult]:
    """A parser of pulls into Arrow. Raises ConfigurationError when pyarrow is not installed."""
    # pyarrow and the kernels take half a second to import.
    with needs_package("arrow"):
        from mqproc.client.arrow import parser
    return parser(columns, status_of)


def get(message_id: str, topic: str) -> Call[StoredMessage]:
    """The message with an offset id or a unique id."""

    def parse(_: Any, payload: memoryview) -> StoredMessage:
        found = messages_of(payload)
        if not found:
            raise MessageNotFoundError(f"no message {message_id}")
        return found[0]

    return call_of(Operation.GET, GetRequest(message_id, topic), parse)


def by_unique_id(topic: str, unique_id: str) -> Call[list[StoredMessage]]:
    """The newest message with a unique id, or none."""
    request = ByKeyRequest(topic, unique_id, TIME_MIN_MS, TIME_MAX_MS, 1, True)
    return call_of(Operation.BY_KEY, request, lambda _, payload: messages_of(payload))


def _newest_page(operation: Operation, request: ByKeyRequest | ByTagRequest) -> Call[Page]:
    def parse(answer: Any, payload: memoryview) -> Page:
        messages = messages_of(payload)
        left = request.max_messages - len(messages)
        # A group of an older version gives no cursor.
        if answer.complete or not messages or not left or not answer.cursor:
            return Page(messages, None)
        following = msgspec.structs.replace(request, max_messages=left, below=answer.cursor[0])
        return Page(messages, _newest_page(operation, following))

    return call_of(operation, request, parse)


def all_by_key(
    topic: str, key: str, begin: Time, end: Time, max_messages: int, unique: bool, time: TimeKind, page_bytes: int
) -> Steps[list[StoredMessage]]:
    """Find the newest `max_messages` by key, oldest first, page by page."""
    if isinstance(key, str) and not key:
        raise BadRequestError("key is empty")
    begin_ms, end_ms = time_bounds(begin, end)
    place = topic, key, begin_ms, end_ms, max_messages, unique, is_born(time)
    request = ByKeyRequest(*place, max_bytes=page_bytes, object_bytes=page_bytes)
    return (yield from _all_pages(_newest_page(Operation.BY_KEY, request)))


def all_by_tag(
    topic: str, tag: str, begin: Time, end: Time, max_messages: int, time: TimeKind, page_bytes: int
) -> Steps[list[StoredMessage]]:
    """Find the newest `max_messages` by tag, oldest first, page by page."""
    if isinstance(tag, str) and not tag:
        raise BadRequestError("tag is empty")
    begin_ms, end_ms = time_bounds(begin, end)
    place = topic, tag, begin_ms, end_ms, max_messages, is_born(time)
    request = ByTagRequest(*place, max_bytes=page_bytes, object_bytes=page_bytes)
    return (yield from _all_pages(_newest_page(Operation.BY_TAG, request)))


def _all_pages(call: Call[Page] | None) -> Steps[list[StoredMessage]]:
    pages: list[list[StoredMessage]] = []
    while call is not None:
        page: Page = yield call
        pages.append(page.messages)
        call = page.next_call
    return pages[0] if len(pages) == 1 else [message for messages in reversed(pages) for message in messages]


def with_key(
    topic: str, key: str, begin_ms: int, end_ms: int, *, max_bytes: int, unique: bool = False, below: int = -1
) -> Call[tuple[list[StoredMessage], bool]]:
    """The newest messages by key within a range of store times, and whether these are all.

    `below`: only messages below this log offset.
    """
    place = topic, key, begin_ms, end_ms, KEY_MESSAGES_MAX, unique
    request = ByKeyRequest(*place, below=below, max_bytes=max_bytes, object_bytes=max_bytes)
    return call_of(Operation.BY_KEY, request, lambda answer, rows: (messages_of(rows), bool(answer.complete)))


@dataclass(frozen=True, slots=True)
class Page:
    """Part of a long answer; `next_call` requests the next part, None after the last."""

    messages: list[StoredMessage]
    next_call: Call[Page] | None


def range_page(
    topic: str,
    begin: Time,
    end: Time,
    selection: Selection,
    page_messages: int,
    page_bytes: int,
    time: TimeKind,
    cursor: Sequence[int] = (),
) -> Call[Page]:
    """The first page of messages with begin ≤ time < end, from the `cursor` on."""
    begin_ms, end_ms = time_bounds(begin, end)
    names, sql = selection
    place = topic, begin_ms, end_ms, names, page_messages, is_born(time), list(cursor)
    request = RangeRequest(*place, sql, page_bytes, page_bytes)
    return _page_call(Operation.RANGE, request)


def scan_page(request: ScanRequest) -> Call[Page]:
    """The first page of a scan of the log."""
    return _page_call(Operation.SCAN, request)


def _page_call(operation: Operation, request: RangeRequest | ScanRequest) -> Call[Page]:
    def parse(answer: Any, payload: memoryview) -> Page:
        messages = messages_of(payload)
        if answer.complete or not answer.cursor or answer.cursor[0] < 0:
            return Page(messages, None)
        following = _next_request(request, answer.cursor)
        if following == request:
            raise ProtocolError(f"{operation.name} does not advance from cursor {answer.cursor}")
        return Page(messages, _page_call(operation, following))

    return call_of(operation, request, parse)


def _next_request(request: RangeRequest | ScanRequest, cursor: list[int]) -> RangeRequest | ScanRequest:
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
    page_bytes: int,
) -> ScanRequest:
    """The options of a scan, for at most one property."""
    if properties is not None and not isinstance(properties, Mapping):
        raise not_properties(properties)
    if properties and len(properties) > 1:
        raise BadRequestError(f"a scan looks for one property, not {len(properties)}")
    begin_ms, end_ms = time_bounds(begin, end)
    name, value = next(iter(properties.items())) if properties else ("", "")
    place = topic, physical_offset, begin_ms, end_ms, name, value, body_contains
    return ScanRequest(*place, max_messages=page_messages, max_bytes=page_bytes, object_bytes=page_bytes)


def count(topic: str, begin: Time, end: Time, tags: str, filter: Filter | None, time: TimeKind) -> Call[int]:
    """Count messages with begin ≤ time < end."""
    begin_ms, end_ms = time_bounds(begin, end)
    names, sql = chosen(tags, filter)
    request = CountRequest(topic, begin_ms, end_ms, names, is_born(time), sql)
    return call_of(Operation.COUNT, request, lambda answer, _: int(answer.count))


def offset_at(topic: str, queue_id: int, moment: Time, upper: bool) -> Call[int]:
    return offset_at_ms(topic, queue_id, time_ms(moment, 0), upper=upper)


def offset_at_ms(topic: str, queue_id: int, moment_ms: int, *, upper: bool = False) -> Call[int]:
    request = OffsetAtRequest(topic, queue_id, moment_ms, upper)
    return call_of(Operation.OFFSET_AT, request, lambda answer, _: int(answer.offset))


@dataclass(frozen=True, slots=True)
class QueryMessageResult:
    """RocketMQ's answer to `queryMessage`, with messages of colliding keys.

    `messages` omits damaged messages.
    """

    physical_offsets: tuple[int, ...]
    index_last_update_timestamp_ms: int
    index_last_update_physical_offset: int
    messages: tuple[StoredMessage, ...] = ()


def query_message(topic: str, key: str, max_messages: int, begin: Time, end: Time) -> Call[QueryMessageResult]:
    begin_ms, end_ms = time_bounds(begin, end)
    request = QueryMessageRequest(topic, key, max_messages, begin_ms, end_ms)

    def parse(answer: Any, payload: memoryview) -> QueryMessageResult:
        return QueryMessageResult(
            tuple(answer.physical_offsets),
            answer.index_last_update_timestamp_ms,
            answer.index_last_update_physical_offset,
            tuple(messages_of(payload)),
        )

    return call_of(Operation.QUERY_MESSAGE, request, parse)


# State


def stats() -> Call[dict[str, int]]:
    return call_of(Operation.STATS, Empty(), lambda answer, _: dict(answer.words))


def health() -> Call[Health]:
    def parse(answer: Any, _: memoryview) -> Health:
        return Health(answer.ready, answer.read_only, answer.dispatch_behind_bytes, tuple(answer.problems))

    return call_of(Operation.HEALTH, Empty(), parse)


def ping(role: str) -> Call[None]:
    call = call_of(Operation.PING, Empty(), nothing)
    call.role = role
    return call
