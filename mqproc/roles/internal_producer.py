"""Appends by a role: non-blocking, and with retries across restarts of the writer.

    producer = InternalProducer(context.paths.socket("writer"), context.control.words, context.clock)
    server.register(producer.fileno(), lambda: None)      # or wait at it: producer.wait(timeout_s)
    …
    producer.append([NewMessage("orders", body, properties)], on_done)      # any topic, also system topics
    …
    done += producer.step()                               # in do_work: sends, receives, calls on_done

`append` groups messages into frames: a frame has messages with equal topic, sys flag, reconsume times and born host, in
the given order, and they are stored together in this order. `on_done(messages, outcome)` is called once per frame, from
`step`:

    Stored      where each message was stored
    Refused     nothing of the frame is stored; `error.retryable` says whether a retry may succeed
    Unknown     the writer died. If the frame was stored, it lies in [`begin`, `end`) of the log, completely or only its
                first messages. The outcome is reported once a successor runs, so that this range no longer changes

Frames are stored in the order of `append` while none is refused; a frame that a dying writer certainly did not receive
is sent to its successor. `append` raises StoreBusyError and accepts nothing when more than `BYTES_MAX` bytes or
`FRAMES_MAX` frames would be in flight; check `has_room` first.

`fileno` is one descriptor for the producer's lifetime, readable when `step` has work; its connection is
replaced when the writer is restarted, and frames wait meanwhile. `seconds_left` bounds the time to the next `step`.
Answers have no deadline: the supervisor ends a writer that hangs, which closes the connection, and giving up on a
living writer would leave the outcome open.

`ReliableAppend` adds retries: it finds out which messages of an Unknown frame were stored and appends the others again.
"""

from __future__ import annotations

import functools
import itertools
import select
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from mqproc.client import requests
from mqproc.client.connection import CallOutcome as Answered
from mqproc.client.connection import Connection, open_socket
from mqproc.client.retry import ConnectionLost
from mqproc.errors import MqprocError, NotRunningError, ProtocolError, StoreBusyError
from mqproc.io.store_io import Clock
from mqproc.ipc.control_words import Words
from mqproc.layout import control, properties, record
from mqproc.layout.record_codec import decode_records, host_bytes
from mqproc.store.cooperative import finish
from mqproc.store.read.records import Conditions
from mqproc.store.schedule.delivery_marks import mark_of
from mqproc.topic_names import DEAD_LETTER_PREFIX
from mqproc.types import StoredMessage
from mqproc.wire.operations import QUEUE_ANY, QUEUE_COLUMN, UNDECODABLE, AppendAnswer, AppendRequest, Operation

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from mqproc.store.read.queries import StoreQueries

FRAME_BYTES_MAX: Final = 4 << 20
FRAME_MESSAGES_MAX: Final = 4096
BYTES_MAX: Final = 32 << 20
FRAMES_MAX: Final = 4096
SCAN_MESSAGES_MAX: Final = 1024
RECONNECT_NS: Final = 20_000_000
LOCAL_HOST: Final = b"\x7f\0\0\x01\0\0\0\0"
_ROW_BYTES: Final = 20
_encode = msgspec.msgpack.Encoder().encode
_decode_answer = msgspec.msgpack.Decoder(AppendAnswer).decode
ORIGIN: Final = "ORIGIN_MESSAGE_ID"
_IDENTITY_PROPERTIES: Final = (ORIGIN, properties.DELAY, properties.REAL_TOPIC, properties.REAL_QID)
Identity = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class AppendColumns:
    """New messages of one topic, sys flag, reconsume times and born host, as columns.

    Bodies and properties are concatenated. `queue_ids` None lets the writer rotate. For the other columns see
    NewMessage.
    """

    topic: str
    sys_flag: int
    reconsume_times: int
    born_host: bytes
    body_lengths: NDArray[np.uint32]
    bodies: NDArray[np.uint8]
    property_lengths: NDArray[np.uint16]
    properties: NDArray[np.uint8]
    born_timestamps_ms: NDArray[np.int64]
    queue_ids: NDArray[np.int32] | None
    flags: NDArray[np.int32]
    prepared_transaction_offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.body_lengths)

    @property
    def size(self) -> int:
        return len(self.bodies) + len(self.properties)

    def chosen(self, which: NDArray[np.bool_]) -> AppendColumns:
        """Select messages by a mask, bool[n]."""
        if which.all():
            return self
        bodies = self.bodies[np.repeat(which, self.body_lengths)]
        return self._select(which, bodies, self.properties[np.repeat(which, self.property_lengths)])

    def parts(self, edges: Sequence[int]) -> Iterator[AppendColumns]:
        bodies = np.append(0, np.cumsum(self.body_lengths, dtype=np.int64))
        properties = np.append(0, np.cumsum(self.property_lengths, dtype=np.int64))
        for first, stop in itertools.pairwise(edges):
            yield self._select(
                slice(first, stop),
                self.bodies[bodies[first] : bodies[stop]],
                self.properties[properties[first] : properties[stop]],
            )

    def _select(
        self, which: NDArray[np.bool_] | slice, bodies: NDArray[np.uint8], properties: NDArray[np.uint8]
    ) -> AppendColumns:
        return replace(
            self,
            body_lengths=self.body_lengths[which],
            bodies=bodies,
            property_lengths=self.property_lengths[which],
            properties=properties,
            born_timestamps_ms=self.born_timestamps_ms[which],
            queue_ids=None if self.queue_ids is None else self.queue_ids[which],
            flags=self.flags[which],
            prepared_transaction_offsets=self.prepared_transaction_offsets[which],
        )

    def halves(self) -> list[AppendColumns]:
        """Split into the lower and the higher half of the queues; one part if there is one queue."""
        if self.queue_ids is None:
            return [self]
        ids = np.unique(self.queue_ids)
        if len(ids) < 2:
            return [self]
        lower = self.queue_ids < ids[len(ids) // 2]
        return [self.chosen(lower), self.chosen(~lower)]

    def frames(self) -> Iterator[AppendColumns]:
        """Split into parts that fit into a frame; a single message may be larger."""
        if self.size <= FRAME_BYTES_MAX and len(self) <= FRAME_MESSAGES_MAX:
            return iter((self,))
        ends = np.cumsum(self.body_lengths.astype(np.int64) + self.property_lengths)
        edges = [0]
        while edges[-1] < len(self):
            first = edges[-1]
            before = int(ends[first - 1]) if first else 0
            stop = int(np.searchsorted(ends, before + FRAME_BYTES_MAX, "right"))
            edges.append(min(max(stop, first + 1), first + FRAME_MESSAGES_MAX, len(self)))
        return self.parts(edges)


class NewMessage(NamedTuple):
    """A message to append. Only the writer's kernel checks it.

    `properties` is the whole string to store. `queue_id` −1 lets the writer rotate; either all messages of a frame name
    a queue or none. `prepared_transaction_offset` is the mark of the record that this message is derived from, by which
    a role finds out whether a message with an unknown outcome was stored.
    """

    topic: str
    body: bytes | memoryview
    properties: bytes | memoryview = b""
    queue_id: int = QUEUE_ANY
    flag: int = 0
    sys_flag: int = 0
    born_timestamp_ms: int = 0
    born_host: bytes = LOCAL_HOST
    reconsume_times: int = 0
    prepared_transaction_offset: int = 0


@dataclass(frozen=True, slots=True)
class Stored:
    """The frame was stored; arrays int64[n], int64[n], int32[n]."""

    physical_offsets: NDArray[np.int64]
    queue_offsets: NDArray[np.int64]
    queue_ids: NDArray[np.int32]
    store_timestamp_ms: int
    store_host: bytes


@dataclass(frozen=True, slots=True)
class Refused:
    error: MqprocError


@dataclass(frozen=True, slots=True)
class Unknown:
    """Messages that were stored, if any, have their records in [`begin`, `end`) of the log."""

    begin: int
    end: int
    reason: str


AppendOutcome = Stored | Refused | Unknown
OnDone = Callable[[Sequence[NewMessage], AppendOutcome], None]
OnColumnsDone = Callable[[AppendColumns, AppendOutcome], None]


@dataclass(slots=True, eq=False)
class _Frame:
    columns: AppendColumns
    on_done: Callable[[AppendOutcome], None]
    size: int
    begin: int = 0
    reason: str = ""


class InternalProducer:
    """A role's client of the writer. Single-threaded, like the role."""

    def __init__(self, path: Path, words: Words, clock: Clock) -> None:
        """`path` is the writer's socket, `words` are the control words."""
        self._path = path
        self._words = words
        self._clock = clock
        self._epoll = select.epoll()
        self._connection: Connection | None = None
        self._mask = 0
        self._retry_ns = 0
        self._waiting: deque[_Frame] = deque()
        self._sent: dict[int, _Frame] = {}
        self._unknown: list[_Frame] = []
        self._ping = 0  # the request that a new connection begins with; 0 when it is answered
        self._awaiting_predecessor = False
        self._bytes = 0

    # Interface for the role

    @property
    def in_flight(self) -> int:
        return len(self._waiting) + len(self._sent) + len(self._unknown)

    @property
    def has_room(self) -> bool:
        """Whether `append` would accept a few messages."""
        return self._bytes < BYTES_MAX // 2 and self.in_flight < FRAMES_MAX // 2

    def await_predecessor(self) -> None:
        """Find out when the writer is done with frames of a killed predecessor of the role."""
        self._awaiting_predecessor = True

    @property
    def predecessor_done(self) -> bool:
        """Whether frames of a predecessor are in the log by now, or never will be."""
        return not self._awaiting_predecessor

    @property
    def has_work(self) -> bool:
        """Whether `step` must be called."""
        return bool(self._waiting or self._sent or self._unknown or self._awaiting_predecessor)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def append(self, messages: Iterable[NewMessage], on_done: OnDone) -> None:
        """Append messages. Raises StoreBusyError, accepting none, when too many are in flight."""
        groups = [(group, _columns(group)) for group in _groups(messages)]
        self._add([_Frame(columns, functools.partial(on_done, group), columns.size) for group, columns in groups])

    def append_columns(self, columns: AppendColumns, on_done: OnColumnsDone) -> None:
        """Append messages given as columns, in as many frames as needed; as `append`."""
        self._add([_Frame(part, functools.partial(on_done, part), part.size) for part in columns.frames()])

    def _add(self, frames: list[_Frame]) -> None:
        size = sum(frame.size for frame in frames)
        if self.in_flight and (self._bytes + size > BYTES_MAX or self.in_flight + len(frames) > FRAMES_MAX):
            raise StoreBusyError(f"{self._bytes:,} bytes wait for the writer", hint_ms=10)
        self._bytes += size
        self._waiting.extend(frames)
        if not self._ping:
            self._send_waiting()

    def step(self) -> int:
        """Send and receive without blocking; returns the number of frames with an outcome."""
        self._connect()
        before = self.in_flight
        connection = self._connection
        if connection is None:
            return 0
        if connection.sending:
            connection.flush()
        while connection.receive():
            pass
        self._handle_outcomes(connection)
        self._listen_unless_closed()
        return before - self.in_flight

    def wait(self, timeout_s: float) -> None:
        """Sleep until `step` has work, for a role without its own epoll."""
        self._epoll.poll(self.seconds_left(timeout_s))

    def seconds_left(self, at_most_s: float) -> float:
        """Time until `step` must be called although the descriptor is not readable."""
        if not self.has_work:
            return at_most_s
        if self._connection is not None:
            return 0.0 if self._connection.closed else at_most_s
        return min(at_most_s, max(0, self._retry_ns - self._clock.monotonic_ns()) / 1e9)

    def close(self) -> None:
        """Close the connection; frames without outcome get none."""
        if self._connection is not None:
            self._connection.close()
        self._epoll.close()

    # The connection

    def _connect(self) -> None:
        """Connect if needed and due; the first request is a ping.

        The writer answers in order, so once the ping is answered all frames of an earlier connection are decided:
        stored and published, or lost with their process.
        """
        if self._connection is not None or not self.has_work or self._clock.monotonic_ns() < self._retry_ns:
            return
        try:
            connection = Connection(open_socket(self._path))
        except MqprocError as error:
            if not isinstance(error, NotRunningError | StoreBusyError):
                raise
            self._retry_ns = self._clock.monotonic_ns() + RECONNECT_NS
            return
        self._connection = connection
        self._mask = select.EPOLLIN
        self._epoll.register(connection.fd, self._mask)
        self._ping = connection.submit(requests.ping(requests.WRITER))

    def _listen_unless_closed(self) -> None:
        connection = self._connection
        if connection is None or connection.closed:
            return
        mask = select.EPOLLIN | (select.EPOLLOUT if connection.sending else 0)
        if mask != self._mask:
            self._mask = mask
            self._epoll.modify(connection.fd, mask)

    def _send_waiting(self) -> None:
        connection = self._connection
        if connection is None:
            self._connect()
            return
        while self._waiting and not connection.closed:
            frame = self._waiting.popleft()
            frame.begin = self._words[control.WRITTEN]
            self._sent[connection.submit(_call(frame.columns))] = frame
        self._listen_unless_closed()

    def _handle_outcomes(self, connection: Connection) -> None:
        unsent: list[_Frame] = []
        # A callback may append more, which is sent at once and may detect that the connection is lost.
        while connection.done:
            for request_id in sorted(connection.done):
                self._handle_outcome(request_id, connection.done.pop(request_id), unsent)
        self._waiting.extendleft(reversed(unsent))
        if connection.closed:
            self._on_disconnect()

    def _handle_outcome(self, request_id: int, outcome: Answered, unsent: list[_Frame]) -> None:
        error = outcome.error
        if request_id == self._ping:
            self._on_ping(error)
            return
        frame = self._sent.pop(request_id)
        if error is None:
            self._finish(frame, outcome.value)
        elif isinstance(error, ConnectionLost) and not error.taken:
            unsent.append(frame)
        elif isinstance(error, ConnectionLost | ProtocolError):
            frame.reason = str(error)
            self._unknown.append(frame)
        else:
            self._finish(frame, Refused(error))

    def _on_ping(self, error: MqprocError | ConnectionLost | None) -> None:
        """Handle the outcome of the ping, which decides the open frames of the last connection."""
        if error is not None:
            return  # The connection is closed, or will be: the next one pings again.
        self._ping = 0
        self._awaiting_predecessor = False
        unknown, self._unknown = self._unknown, []
        end = self._words[control.WRITTEN]
        for frame in unknown:
            self._finish(frame, Unknown(frame.begin, end, frame.reason))
        self._send_waiting()

    def _on_disconnect(self) -> None:
        # The kernel removes a closed descriptor from the epoll.
        self._connection = None
        if self._ping:
            # Turned away, as with too many connections.
            self._ping = 0
            self._retry_ns = self._clock.monotonic_ns() + RECONNECT_NS
        self._connect()

    def _finish(self, frame: _Frame, outcome: AppendOutcome) -> None:
        self._bytes -= frame.size
        frame.on_done(outcome)


def _groups(messages: Iterable[NewMessage]) -> list[list[NewMessage]]:
    """Group messages by the fields that a frame shares, in order, none too large."""
    open_groups: dict[tuple[Any, ...], list[NewMessage]] = {}
    sizes: dict[tuple[Any, ...], int] = {}
    found: list[list[NewMessage]] = []
    for message in messages:
        shared = message.topic, message.sys_flag, message.reconsume_times, message.born_host
        key = *shared, message.queue_id == QUEUE_ANY
        size = len(message.body) + len(message.properties)
        group = open_groups.get(key)
        if group is None or len(group) >= FRAME_MESSAGES_MAX or sizes[key] + size > FRAME_BYTES_MAX:
            group = open_groups[key] = []
            sizes[key] = 0
            found.append(group)
        group.append(message)
        sizes[key] += size
    return found


def _columns(messages: Sequence[NewMessage]) -> AppendColumns:
    first = messages[0]
    count = len(messages)
    return AppendColumns(
        first.topic,
        first.sys_flag,
        first.reconsume_times,
        first.born_host,
        np.fromiter((len(message.body) for message in messages), np.uint32, count),
        np.frombuffer(b"".join([message.body for message in messages]), np.uint8),
        np.fromiter((len(message.properties) for message in messages), np.uint16, count),
        np.frombuffer(b"".join([message.properties for message in messages]), np.uint8),
        np.fromiter((message.born_timestamp_ms for message in messages), np.int64, count),
        None
        if first.queue_id == QUEUE_ANY
        else np.fromiter((message.queue_id for message in messages), np.int32, count),
        np.fromiter((message.flag for message in messages), np.int32, count),
        np.fromiter((message.prepared_transaction_offset for message in messages), np.int64, count),
    )


def _call(columns: AppendColumns) -> requests.Call[Stored]:
    queue_ids = columns.queue_ids
    payload: list[ReadableBuffer] = [
        columns.body_lengths.astype("<u4", copy=False).data,
        columns.bodies.data,
        columns.property_lengths.astype("<u2", copy=False).data,
        columns.properties.data,
        columns.born_timestamps_ms.astype("<i8", copy=False).data,
    ]
    if queue_ids is not None:
        payload.append(queue_ids.astype("<i4", copy=False).data)
    payload.append(columns.flags.astype("<i4", copy=False).data)
    payload.append(columns.prepared_transaction_offsets.astype("<i8", copy=False).data)
    options = AppendRequest(
        topic=columns.topic,
        count=len(columns),
        queue_id=QUEUE_ANY if queue_ids is None else QUEUE_COLUMN,
        bodies_bytes=len(columns.bodies),
        properties_bytes=len(columns.properties),
        has_born=True,
        has_queues=queue_ids is not None,
        has_flags=True,
        has_prepared=True,
        born_host=columns.born_host,
        sys_flag=columns.sys_flag,
        reconsume_times=columns.reconsume_times,
    )
    return requests.Call(
        requests.WRITER, int(Operation.APPEND_OWN), _encode(options), payload, _parse, repeatable=False
    )


def _parse(options: memoryview, payload: memoryview) -> Stored:
    try:
        answer = _decode_answer(options)
    except UNDECODABLE as error:
        raise ProtocolError(f"answer to APPEND_OWN cannot be read: {error}") from None
    data = bytes(payload)
    count = len(data) // _ROW_BYTES
    return Stored(
        np.frombuffer(data, "<i8", count),
        np.frombuffer(data, "<i8", count, 8 * count),
        np.frombuffer(data, "<i4", count, 16 * count),
        answer.store_timestamp_ms,
        answer.store_host,
    )


# Appends that survive a restart of the writer


@dataclass(slots=True, eq=False)
class _Writing:
    """Messages being appended. `head_offset` is the queue offset of the first one."""

    head: NewMessage
    left: int
    stored: Callable[[int], None]
    refused: Callable[[MqprocError], None]
    part: Callable[[Sequence[NewMessage]], None]
    head_offset: int = -1
    error: MqprocError | None = None


class ReliableAppend:
    """Appends messages until all are stored or refused. `under_way` counts open calls."""

    def __init__(self, reading: StoreQueries, producer: InternalProducer, max_bytes: int) -> None:
        self._reading = reading
        self._producer = producer
        self._max_bytes = max_bytes
        self.under_way = 0

    @property
    def has_room(self) -> bool:
        return self._producer.has_room

    @property
    def predecessor_done(self) -> bool:
        return self._producer.predecessor_done

    def store(
        self,
        messages: Sequence[NewMessage],
        stored: Callable[[int], None],
        refused: Callable[[MqprocError], None],
        part: Callable[[Sequence[NewMessage]], None] = lambda _some: None,
    ) -> None:
        """Append messages; `stored` gets the queue offset of the first, or `refused` the error.

        `part` gets, before either, those that are stored, some at a time.
        """
        writing = _Writing(messages[0], len(messages), stored, refused, part)
        self.under_way += 1
        self._append(writing, messages)

    def _append(self, writing: _Writing, messages: Sequence[NewMessage]) -> None:
        try:
            self._producer.append(messages, lambda some, outcome: self._written(writing, some, outcome))
        except StoreBusyError as error:
            writing.error = error
            self._count_done(writing, len(messages))

    def _written(self, writing: _Writing, some: Sequence[NewMessage], outcome: AppendOutcome) -> None:
        missing: Sequence[NewMessage] = ()
        if isinstance(outcome, Stored):
            writing.part(some)
            if some[0] is writing.head:
                writing.head_offset = int(outcome.queue_offsets[0])
        elif isinstance(outcome, Refused):
            writing.error = outcome.error
        else:
            of_topic = Conditions(some[0].topic)
            found = records_in(self._reading, of_topic, outcome.begin, outcome.end, self._max_bytes)
            known = {_content(message): message.queue_offset for message in found}
            missing = [message for message in some if _content(message) not in known]
            if some[0] is writing.head:
                writing.head_offset = known.get(_content(some[0]), -1)
            writing.part([message for message in some if _content(message) in known])
        self._count_done(writing, len(some) - len(missing))
        if missing:
            self._append(writing, missing)

    def _count_done(self, writing: _Writing, count: int) -> None:
        writing.left -= count
        if writing.left:
            return
        self.under_way -= 1
        if writing.error is None:
            writing.stored(writing.head_offset)
        else:
            writing.refused(writing.error)


def _content(message: NewMessage | StoredMessage) -> tuple[object, ...]:
    return bytes(message.body), message.queue_id, message.prepared_transaction_offset, *identity(message)


# Copies of stored messages


def copy_of(message: StoredMessage, topic: str, queue_id: int, own: dict[str, str], times: int) -> NewMessage:
    """Copy of a message for another topic, with its born data and added properties."""
    host, _, port = message.born_host.rpartition(":")
    return NewMessage(
        topic=topic,
        body=message.body,
        properties=properties.encode(dict(message.properties) | own).encode(),
        queue_id=queue_id,
        flag=message.flag,
        sys_flag=message.sys_flag,
        born_timestamp_ms=message.born_timestamp_ms,
        born_host=host_bytes(host.strip("[]"), int(port)),
        reconsume_times=times,
    )


def bare_copy(message: StoredMessage, topic: str, times: int) -> NewMessage:
    """Copy with the original properties only, which had room before; identified by its position."""
    copy = copy_of(message, topic, 0, {}, times)
    return copy._replace(prepared_transaction_offset=mark_of(message.physical_offset))


def has_room(copy: NewMessage) -> bool:
    """Whether the properties of a copy, original and added, fit into any store."""
    return len(copy.properties) <= record.PROPERTIES_SIZE_SURE


def identity(copy: NewMessage | StoredMessage) -> Identity:
    """Identity of a copy: target, origin and attempt."""
    pairs = copy.properties
    if not isinstance(pairs, Mapping):
        pairs = properties.decode(bytes(pairs).decode())
    values = (pairs.get(name, "") for name in _IDENTITY_PROPERTIES)
    return (copy.topic, copy.reconsume_times, copy.prepared_transaction_offset, *values)


def records_in(
    reading: StoreQueries, conditions: Conditions, begin: int, end: int, max_bytes: int
) -> Iterator[StoredMessage]:
    """Messages with records in [begin, end) of the log."""
    at = begin
    while at < end:
        batch = finish(
            reading.scan(conditions, at, max_messages=SCAN_MESSAGES_MAX, max_bytes=max_bytes, max_scan_bytes=end - at)
        )
        for records in batch.records:
            yield from decode_records(records.data)
        if batch.complete:
            return
        at = batch.cursor[0]


def count_copies(words: Words, stored: Sequence[NewMessage]) -> None:
    """Count stored retries and dead letters."""
    dead = sum(copy.topic.startswith(DEAD_LETTER_PREFIX) for copy in stored)
    words.add(control.GROUP_DEAD_LETTERS, dead)
    words.add(control.GROUP_RETRIES, len(stored) - dead)
