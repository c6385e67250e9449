"""Replay: sends stored messages again to another topic, each exactly once.

    source      messages of a topic by store time, queue by queue, page by page; or those with a key
    copy        body, tag, keys, properties, born time and flag; a unique id made of the replay's name and the source's
                position, by which the store can look up existing copies
    position    all messages of the source before it are copied; it advances with each answer

A copy's queue is the source's, modulo the number of write queues of the target, so the order within a queue is kept.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import msgspec

from mqproc.client import requests, send_requests
from mqproc.client.dispatch_barrier import OUTCOME_UNKNOWN, PATIENCE_S, check_index, has_index, wait_for_index
from mqproc.client.encoding import encode_messages
from mqproc.client.message_fields import SystemProperties, plain_text, whole_properties
from mqproc.client.requests import WRITER, Call, Page
from mqproc.errors import BadRequestError, MqprocError, PropertiesTooLargeError, ProtocolError, TopicNotFoundError
from mqproc.filters.selection import TIME_MAX_MS, TIME_MIN_MS, chosen
from mqproc.layout import properties, record
from mqproc.layout.properties import KEY_SEPARATOR
from mqproc.paths import is_text
from mqproc.types import Filter, Message, QueueInfo, StoredMessage, TopicInfo
from mqproc.util.arguments import Time, not_below_zero, time_ms, whole_number
from mqproc.wire.operations import AppendRequest, Operation

REPLAYED: Final = "REPLAYED_MESSAGE_ID"
"""Property of a copy with the offset message id of its source."""

PAGE_MESSAGES: Final = 1000
IN_FLIGHT: Final = 4
# Messages that may be copied beyond the position, and a margin.
_WINDOW: Final = (IN_FLIGHT + 1) * PAGE_MESSAGES
_LOOKUPS_IN_FLIGHT: Final = 64
# Frames per second when there is a rate, for an even load.
_FRAMES_PER_SECOND: Final = 20
# Properties that describe a record's own way through delays, transactions, retries and RocketMQ's batches.
OWN_PROPERTIES: Final = frozenset(
    {
        *properties.RESERVED,
        REPLAYED,
    }
)

_T = TypeVar("_T")

_decode_append = msgspec.msgpack.Decoder(AppendRequest).decode
_encode = msgspec.msgpack.Encoder().encode


class ReplayPosition(NamedTuple):
    """A position in the source, by queue, then by offset."""

    queue_id: int = 0
    queue_offset: int = 0


@dataclass(frozen=True, slots=True)
class ReplaySource:
    """Source of a replay: messages of a topic with begin ≤ store time < end.

    Without an end it has the messages that are stored when the replay begins.
    """

    topic: str
    begin: Time = None
    end: Time = None
    key: str = ""
    filter: Filter | None = None


@dataclass(frozen=True, slots=True)
class ReplayProgress:
    """Progress of a replay: copies `sent` by this run or `found`, and the position."""

    sent: int
    found: int
    position: ReplayPosition


class _Client(Protocol):
    """A sync client."""

    store: Path
    pull_bytes_max: int

    def run(self, call: Call[_T]) -> _T: ...

    def run_all(self, calls: Iterable[Call[_T]], in_flight: int) -> Iterator[_T]: ...

    def queues(self, topic: str) -> list[QueueInfo]: ...

    def topics(self) -> list[TopicInfo]: ...

    def create_topic(self, topic: str, queues: int) -> None: ...


class Replay:
    """One replay into one topic.

    Replays of the same `name` between two topics copy no message twice.
    """

    def __init__(
        self,
        client: _Client,
        source: ReplaySource,
        to: str,
        *,
        name: str = "",
        rate: float = 0.0,
        queues: int | None = None,
        is_first: bool = False,
    ) -> None:
        """`rate` in messages a second, 0 for no limit.

        `to` is created with as many queues as the source, or `queues`.

        A replay without a name cannot be continued later. `is_first`: no run of this name is known, so that a store
        without an index need not look up copies. Raises TopicNotFoundError, BadRequestError.
        """
        rate = not_below_zero("rate", rate)
        _check_texts(topic=source.topic, to=to)
        _check_texts(**{each: text for each, text in (("key", source.key), ("name", name)) if text is not None})
        if source.key and source.filter is not None:
            raise BadRequestError("a replay selects by key or by filter, not by both")
        if to == source.topic:
            raise BadRequestError(
                f"a replay of {source.topic!r} to {to!r} would double the topic and copy its own copies; "
                "reset a group to have it consume messages again"
            )
        self._client = client
        self._topic = plain_text(source.topic)
        self._key = plain_text(source.key)
        self._filter = source.filter
        self._begin_ms = time_ms(source.begin, TIME_MIN_MS)
        # Includes messages of this millisecond.
        self._end_ms = time_ms(source.end, time.time_ns() // 1_000_000 + 1)
        self._to = plain_text(to)
        self._rate = rate
        identity = f"{plain_text(name) or uuid.uuid4()}\0{self._topic}\0{self._to}"
        self._family = hashlib.sha256(identity.encode()).hexdigest()[:12]
        self._is_new = not name or (is_first and not has_index(client.store))
        self._anywhere = False
        """Whether copies may exist far beyond the position, after messages without copies."""
        self._queues = self._target(queues)
        self._pending: deque[tuple[ReplayPosition, int]] = deque()
        # Messages beyond the position that are counted as found: a new start from there counts them again.
        self._left: deque[ReplayPosition] = deque()
        self._due_s = 0.0
        self.progress = ReplayProgress(0, 0, ReplayPosition())

    def _target(self, queues: int | None) -> int:
        """Number of queues of the target, which is created when it does not exist."""
        queue_count = len(self._client.queues(self._topic))
        if not queue_count:
            raise TopicNotFoundError(f"no topic {self._topic!r}")
        found = {info.topic: info.write_queues for info in self._client.topics()}.get(self._to)
        if found is None:
            found = queues or queue_count
            self._client.create_topic(self._to, found)
            self._is_new = True
        return found

    def run(
        self, position: ReplayPosition | None = None, told: Callable[[ReplayProgress], None] | None = None
    ) -> ReplayProgress:
        """Copy all messages from a position on, and report the progress after each answer.

        Copies that the earlier run had in flight are looked up and skipped. Without a position all copies are looked
        up: earlier runs may have had another begin or filter, or a source with fewer messages in its first queues.
        """
        self.progress = ReplayProgress(0, 0, begin_of(position, told))
        self._anywhere = position is None and not self._is_new
        failed_at, failed_s = None, time.monotonic()
        stored = self._indexed_copies(failed_s)
        while True:
            try:
                self._send(stored, told or (lambda progress: None))
                return self.progress
            except OUTCOME_UNKNOWN:
                if failed_at != self.progress.position:
                    failed_at, failed_s = self.progress.position, time.monotonic()
                elif time.monotonic() - failed_s > PATIENCE_S:
                    raise
                stored = self._indexed_copies(failed_s)

    # Existing copies

    def _indexed_copies(self, since_s: float) -> frozenset[ReplayPosition]:
        """The stored copies from the position on, once they are all indexed.

        Raises BadRequestError when the store has no index for a replay that is not new.
        """
        is_new, self._is_new = self._is_new, False
        if not is_new:
            check_index(self._client.store)
        self._pending.clear()
        self.progress = replace(self.progress, found=self.progress.found - len(self._left))
        self._left.clear()
        while True:
            try:
                wait_for_index(self._client)
                return frozenset() if is_new else self._stored_copies()
            except MqprocError as error:
                if not isinstance(error, OUTCOME_UNKNOWN) or time.monotonic() - since_s > PATIENCE_S:
                    raise
                time.sleep(0.1)

    def _stored_copies(self) -> frozenset[ReplayPosition]:
        found: set[ReplayPosition] = set()
        # Keeps only their positions: the bodies may be gigabytes.
        at = map(_place, self._messages())
        while places := list(itertools.islice(at, _WINDOW)):
            calls = (requests.by_unique_id(self._to, self._unique_id(place)) for place in places)
            answers = self._client.run_all(calls, _LOOKUPS_IN_FLIGHT)
            there = {place for place, copies in zip(places, answers, strict=True) if copies}
            if not there and not self._anywhere:
                break
            found |= there
        return frozenset(found)

    def _unique_id(self, place: ReplayPosition) -> str:
        return f"{self._family}{place.queue_id:06x}{place.queue_offset:014x}".upper()

    # The source

    def _messages(self) -> Iterator[StoredMessage]:
        """The source from the position on."""
        at = self.progress.position
        if self._key:
            yield from (message for message in self._with_key() if _place(message) >= at)
            return
        max_bytes, selection = self._client.pull_bytes_max, chosen("", self._filter)
        call: Call[Page] | None = requests.range_page(
            self._topic, self._begin_ms, self._end_ms, selection, PAGE_MESSAGES, max_bytes, "store", cursor=at
        )
        while call is not None:
            page = self._client.run(call)
            yield from page.messages
            call = page.next_call

    def _with_key(self) -> list[StoredMessage]:
        """All messages with the key, requested backwards in the log."""
        found: list[StoredMessage] = []
        end_ms, below = min(self._end_ms, TIME_MAX_MS), -1
        complete = end_ms <= self._begin_ms
        while not complete:
            asked = self._topic, self._key, self._begin_ms, end_ms
            call = requests.with_key(*asked, below=below, max_bytes=self._client.pull_bytes_max)
            some, complete = self._client.run(call)
            if not complete and some[0].physical_offset == below:
                raise ProtocolError(f"BY_KEY does not advance below {below}")
            found += some
            below = some[0].physical_offset if some else below
        return sorted(found, key=_place)

    # Sending

    def _send(self, stored: frozenset[ReplayPosition], told: Callable[[ReplayProgress], None]) -> None:
        # With a rate there is time to wait for each answer, so the position is current.
        in_flight = 1 if self._rate else IN_FLIGHT
        for _ in self._client.run_all(self._calls(stored), in_flight):
            following, count = self._pending.popleft()
            while self._left and self._left[0] < following:
                self._left.popleft()
            self.progress = replace(self.progress, sent=self.progress.sent + count, position=following)
            told(self.progress)

    def _calls(self, stored: frozenset[ReplayPosition]) -> Iterator[Call[Any]]:
        size = PAGE_MESSAGES if not self._rate else max(1, min(PAGE_MESSAGES, int(self._rate / _FRAMES_PER_SECOND)))
        messages = self._left_out(self._messages(), stored)
        for _, run in itertools.groupby(messages, key=_same_frame):
            for frame in frames_of(run, size, operator.attrgetter("size")):
                last = _place(frame[-1])
                self._wait_for_turn(len(frame))
                self._pending.append((ReplayPosition(last.queue_id, last.queue_offset + 1), len(frame)))
                yield send_copies([self._copy(message) for message in frame], frame[0].sys_flag)

    def _left_out(
        self, messages: Iterator[StoredMessage], stored: frozenset[ReplayPosition]
    ) -> Iterator[StoredMessage]:
        """Skip messages with stored copies."""
        for message in messages:
            if _place(message) in stored:
                self._left.append(_place(message))
                self.progress = replace(self.progress, found=self.progress.found + 1)
            else:
                yield message

    def _wait_for_turn(self, count: int) -> None:
        """Sleep as the rate requires."""
        if not self._rate:
            return
        now_s = time.monotonic()
        if self._due_s > now_s:
            time.sleep(min(self._due_s - now_s, threading.TIMEOUT_MAX))
        self._due_s = max(self._due_s, now_s) + count / self._rate

    def _copy(self, message: StoredMessage) -> Message:
        return copy_of(message, self._to, message.queue_id % self._queues, self._unique_id(_place(message)))


def _check_texts(**texts: object) -> None:
    """Raise BadRequestError unless the values are valid texts."""
    for name, text in texts.items():
        if not isinstance(text, str) or not is_text(text):
            raise BadRequestError(f"{name} = {repr(text)[:64]} is no text, or none in UTF-8")


def begin_of(position: ReplayPosition | None, told: object) -> ReplayPosition:
    """Check the arguments of a run; a pair, as JSON decodes it, becomes a ReplayPosition.

    Raises BadRequestError for another position, and for a callback that cannot be called: the first answer would fail.
    """
    if told is not None and not callable(told):
        kind = type(told).__name__
        raise BadRequestError(f"`told` must be a function of a ReplayProgress, not {kind}")
    if position is None:
        return ReplayPosition()
    try:
        queue_id, queue_offset = position
    except (TypeError, ValueError):
        raise BadRequestError(f"position = {repr(position)[:64]} is no ReplayPosition") from None
    return ReplayPosition(whole_number("position", queue_id), whole_number("position", queue_offset))


def frames_of(messages: Iterable[_T], count: int, size_of: Callable[[_T], int]) -> Iterator[list[_T]]:
    """Group messages into frames of at most `count` messages and the bytes of a stream's frames.

    A larger message has a frame of its own.
    """
    frame: list[_T] = []
    frame_bytes = 0
    for message in messages:
        size = size_of(message)
        if frame and (len(frame) >= count or frame_bytes + size > send_requests.GROUP_BYTES_MAX):
            yield frame
            frame, frame_bytes = [], 0
        frame.append(message)
        frame_bytes += size
    if frame:
        yield frame


def copy_of(message: StoredMessage, to: str, queue_id: int, unique_id: str) -> Message:
    """Make the copy of a stored message for another topic, with an id of its own."""
    own = SystemProperties({name: value for name, value in message.properties.items() if name not in OWN_PROPERTIES})
    own[REPLAYED] = message.message_id
    if message.tag:
        own[properties.TAGS] = message.tag  # Not checked like a new tag: a RocketMQ producer may send any tag.
    return Message(
        to,
        message.body,
        "",
        message.keys,
        own,
        queue_id,
        message.flag,
        message.born_timestamp_ms,
        unique_id,
    )


def send_copies(copies: list[Message], sys_flag: int) -> Call[Any]:
    """Send copies for one queue in one frame; their sources agree in `sys_flag`'s body bits."""
    flags = sys_flag & record.SYS_FLAG_BODY
    try:
        return _frame_call(copies, flags)
    except PropertiesTooLargeError:
        return _frame_call([_with_room(copy) for copy in copies], flags)


def _with_room(copy: Message) -> Message:
    """A copy without its source's id, which is informational, when there is no room for it.

    Raises PropertiesTooLargeError naming the source.
    """
    source = copy.properties[REPLAYED]
    if _properties_bytes(copy) > record.PROPERTIES_SIZE_MAX:
        own = SystemProperties({name: value for name, value in copy.properties.items() if name != REPLAYED})
        copy = msgspec.structs.replace(copy, properties=own)
    size = _properties_bytes(copy)
    if size > record.PROPERTIES_SIZE_MAX:
        raise PropertiesTooLargeError(
            f"the copy of {source} has properties of {size:,} bytes; the limit is {record.PROPERTIES_SIZE_MAX:,}"
        )
    return copy


def _properties_bytes(message: Message) -> int:
    """Size of a message's properties as stored."""
    keys = KEY_SEPARATOR.join(message.keys)
    return len(whole_properties(message.tag, keys, message.properties, message.unique_id).encode())


def _frame_call(copies: list[Message], flags: int) -> Call[Any]:
    if not flags:
        return send_requests.send_group(copies)
    frame = encode_messages(copies)
    options = _encode(msgspec.structs.replace(_decode_append(frame.options), sys_flag=flags))
    return Call(WRITER, Operation.APPEND, options, frame.payload, lambda found, rows: None, repeatable=False)


def _same_frame(message: StoredMessage) -> tuple[int, int]:
    """Key that is equal for messages of one frame."""
    return message.queue_id, message.sys_flag & record.SYS_FLAG_BODY


def _place(message: StoredMessage) -> ReplayPosition:
    return ReplayPosition(message.queue_id, message.queue_offset)


class _Stopped(Exception):
    """The task that waits for a replay's thread was cancelled."""


async def replay_in_thread(
    make: Callable[[], Replay], position: ReplayPosition | None, told: Callable[[ReplayProgress], None] | None
) -> ReplayProgress:
    """Run a replay in a thread, since it mostly waits for one answer at a time.

    The callback is called in the event loop. A cancelled replay ends after the next answer.
    """
    import asyncio  # The sync client does not import it.

    loop, stopped = asyncio.get_running_loop(), threading.Event()

    def report(progress: ReplayProgress) -> None:
        if stopped.is_set():
            raise _Stopped
        if told is not None:
            loop.call_soon_threadsafe(told, progress)

    try:
        return await asyncio.to_thread(lambda: make().run(position, report))
    except asyncio.CancelledError:
        stopped.set()
        raise
