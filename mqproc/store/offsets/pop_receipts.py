"""POP checkpoints, acks and message handles in the format of RocketMQ's revive topic.

    tag ck     {"so":120,"pt":…,"it":30000,"bm":0,"n":2,"q":3,"t":"orders","c":"billing","ro":0,"d":[0,1],"bn":"mqproc"}
    tag ack    {"ao":121,"so":120,"c":"billing","t":"orders","q":3,"pt":…,"bn":"mqproc"}
    tag bAck   as ack, with "aol":[120,121] instead of "ao"

A checkpoint (ck) lists the messages of one receive until all are acknowledged. so: first queue offset read; d: queue
offsets relative to it; pt: time of the receive in ms; it: invisible time in ms; bn: broker name. An ack refers to its
checkpoint by c, t, q, so, pt and bn; RocketMQ's broker processes only checkpoints of its own broker name. RocketMQ
reads n as a signed byte and keeps acks in 32 bits, so a checkpoint has at most 32 messages. It derives its revive lag
from the newest TIMER_DELIVER_MS in a queue of the revive topic; ours carry it with the store time.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from mqproc.errors import BadRequestError
from mqproc.layout import properties
from mqproc.layout.properties import REAL_QID, REAL_TOPIC, TIMER_OUT_MS
from mqproc.store.cooperative import Slices
from mqproc.store.offsets.consumer_offset_json import CommittedOffset
from mqproc.store.read.queries import StoreQueries, batches
from mqproc.topic_names import (
    CHECK_POINT_MESSAGES,
    RETRY_PREFIX,
    REVIVE_GROUP,
    REVIVE_TOPIC,
    TIMER_TOPIC,
    dead_letter_topic,
    pop_retry_topic,
    retry_topic,
)
from mqproc.types import StoredMessage

HANDLE: Final = "POP_CK"
"""Property that holds a received message's handle."""
TAGS: Final = "ck", "ack", "bAck"
_CHECK_POINT, _ACK, _ACKS = TAGS
_HANDLE_PARTS: Final = 8
_NUMBER: Final = re.compile(r"[0-9]{1,19}")

NEVER: Final = 1 << 62
"""Larger than every log position."""
Key = tuple[str, str, int, int, int]
"""Group, topic, queue id, `start`, receive time in ms."""


@dataclass(slots=True, eq=False)
class PopCheckPoint:
    """Messages of one receive. `open`: unacknowledged queue offsets; `start`: field `so`."""

    group: str
    topic: str
    queue_id: int
    start: int
    offsets: tuple[int, ...]
    pop_time_ms: int
    invisible_ms: int
    revive_queue: int
    broker: str
    is_local: bool = True
    """Whether its record was written here; RocketMQ's may have been parked in the timer first."""
    revive_offset: int = -1
    physical_offset: int = 0
    """Lower bound of the log positions of its open messages."""
    open: set[int] = field(default_factory=set)
    acking: set[int] = field(default_factory=set)
    """Open offsets whose ack is being stored."""
    reviving: bool = False
    dropped: bool = False
    """Its group was deleted: its messages are not redelivered, nor to a new group of the same name."""
    log_begin: int = 0
    """Lower bound of the log positions of its own record and of redelivered copies of its messages."""
    retry_delay_ms: int = 0
    """Last back-off after its copies were refused for reasons of their own."""
    copied: frozenset[int] = frozenset()
    """Offsets of which this process has stored a copy for redelivery."""

    @property
    def key(self) -> Key:
        return self.group, self.topic, self.queue_id, self.start, self.pop_time_ms

    @property
    def original_topic(self) -> str:
        """Topic of the first delivery, where `topic` may be a retry topic.

        For the group's own retry topic it is in each message's property RETRY_TOPIC.
        """
        return self.topic.removeprefix(pop_retry_topic(self.group, ""))

    @property
    def retry_targets(self) -> tuple[str, str]:
        """Topics for redelivery (the group's own retry topic itself) and for dead letters."""
        own = self.topic == retry_topic(self.group)
        again = self.topic if own else pop_retry_topic(self.group, self.original_topic)
        return again, dead_letter_topic(self.group)

    @property
    def due_ms(self) -> int:
        """Time at which its unacknowledged messages are redelivered."""
        return self.pop_time_ms + self.invisible_ms

    def remaining_ms(self, now_ms: int) -> int:
        """Remaining invisible time; all of it after the clock was set back past the receive."""
        return min(max(0, self.due_ms - now_ms), self.invisible_ms)

    def is_newer(self, other: PopCheckPoint) -> bool:
        """Whether this check point is newer: by log position if possible, as clocks may go back."""
        if self.is_local and other.is_local:
            return self.log_begin > other.log_begin
        return self.pop_time_ms > other.pop_time_ms

    @property
    def next_offset(self) -> int:
        return self.offsets[-1] + 1

    def handle(self) -> str:
        """Common part of its messages' handles; a space and the queue offset follow."""
        retry = int(self.topic.startswith(RETRY_PREFIX))
        parts = self.start, self.pop_time_ms, self.invisible_ms, self.revive_queue, retry, self.broker, self.queue_id
        return " ".join(map(str, parts))

    def body(self) -> bytes:
        value: dict[str, Any] = {"so": self.start, "pt": self.pop_time_ms, "it": self.invisible_ms, "bm": 0}
        value |= {"n": len(self.offsets), "q": self.queue_id, "t": self.topic, "c": self.group, "ro": 0}
        value |= {"d": [offset - self.start for offset in self.offsets], "bn": self.broker}
        return msgspec.json.encode(value)

    def properties(self) -> bytes:
        return _properties(_CHECK_POINT, self.pop_time_ms)

    def ack_body(self, offsets: Sequence[int]) -> bytes:
        """Body of an ack of some of its messages."""
        what: dict[str, Any] = {"ao": offsets[0]} if len(offsets) == 1 else {"aol": list(offsets)}
        group, topic, queue_id, start, pop_time_ms = self.key
        ours = {"so": start, "c": group, "t": topic, "q": queue_id, "pt": pop_time_ms, "bn": self.broker}
        return msgspec.json.encode(what | ours)

    def ack_properties(self, offsets: Sequence[int], time_ms: int) -> bytes:
        return _properties(_ACK if len(offsets) == 1 else _ACKS, time_ms)


def check_points_of_receive(
    place: tuple[str, str, int],
    messages: Sequence[StoredMessage],
    pop_time_ms: int,
    invisible_ms: int,
    revive_queue: int,
    broker: str,
) -> list[PopCheckPoint]:
    """Create the checkpoints of one receive; `place` is group, topic, queue id.

    Each starts where the previous one ends, including offsets that a filter skipped, so that they cover the range
    which the group's committed offset passes.
    """
    points: list[PopCheckPoint] = []
    for begin in range(0, len(messages), CHECK_POINT_MESSAGES):
        offsets = tuple(message.queue_offset for message in messages[begin : begin + CHECK_POINT_MESSAGES])
        start = points[-1].next_offset if points else offsets[0]
        found = PopCheckPoint(*place, start, offsets, pop_time_ms, invisible_ms, revive_queue, broker)
        found.physical_offset = messages[begin].physical_offset
        points.append(found)
    return points


def _properties(tag: str, time_ms: int) -> bytes:
    pairs = {properties.TAGS: tag, properties.WAIT: "false", properties.TIMER_DELIVER_MS: str(time_ms)}
    return properties.encode(pairs).encode()


@dataclass(frozen=True, slots=True)
class PopAck:
    """Acknowledged offsets of the checkpoint `key`."""

    key: Key
    offsets: tuple[int, ...]


def read(message: StoredMessage) -> PopCheckPoint | PopAck | None:
    """Decode a message of the revive topic; None if it is invalid."""
    try:
        value = msgspec.json.decode(message.body)
        group, topic, queue_id, start = str(value["c"]), str(value["t"]), int(value["q"]), int(value["so"])
        pop_time_ms = int(value["pt"])
        if message.tag != _CHECK_POINT:
            done = value["aol"] if "aol" in value else [value["ao"]]
            return PopAck((group, topic, queue_id, start, pop_time_ms), tuple(map(int, done)))
        deltas = value.get("d") or range(int(value["n"]))
        acked = int(value.get("bm", 0))
        offsets = tuple(start + int(delta) for delta in deltas)
        invisible_ms, broker = int(value["it"]), str(value.get("bn", ""))
        found = PopCheckPoint(
            group, topic, queue_id, start, offsets, pop_time_ms, invisible_ms, message.queue_id, broker
        )
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        return None
    found.revive_offset = message.queue_offset
    found.open = {offset for place, offset in enumerate(offsets) if not acked >> place & 1}
    found.log_begin = message.physical_offset
    found.is_local = properties.UNIQ_KEY not in message.properties
    return found if offsets else None


def parse_handle(group: str, topic: str, handle: str) -> tuple[Key, int]:
    """Parse a handle to its checkpoint's key and the queue offset. Raises BadRequestError."""
    parts = handle.split(" ")
    numbers = [part for place, part in enumerate(parts) if place != 5]
    if len(parts) != _HANDLE_PARTS or not all(_NUMBER.fullmatch(part) for part in numbers):
        raise BadRequestError(f"{handle[:128]!r} is no handle of a received message (property {HANDLE})")
    return (group, topic, int(parts[6]), int(parts[0]), int(parts[1])), int(parts[7])


# Open checkpoints, kept in memory by the role that serves them


_FOUND_PER_SLICE: Final = 1024
ACKS_KEPT: Final = 16_384
"""Number of acknowledged messages remembered for each queue of the revive topic."""


class OpenCheckPoints:
    """Checkpoints of one store with unacknowledged messages, by key.

    RocketMQ parks checkpoints and acks in its timer until shortly before they are due. `read` also finds those; their
    later delivery to the revive topic changes nothing.
    """

    def __init__(self) -> None:
        self._open: dict[Key, PopCheckPoint] = {}
        self.parked_until_ms = -1
        """Last timer slot with a parked checkpoint or ack at the time of `read`."""
        self._acknowledged: dict[int, deque[tuple[Key, int]]] = {}
        """Acks read, by queue of the revive topic; the last acks may be unanswered."""
        self._done_before: set[tuple[Key, int]] = set()

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[PopCheckPoint]:
        return iter(self._open.values())

    def get(self, key: Key) -> PopCheckPoint | None:
        """The open checkpoint; None if it is fully acknowledged or unknown."""
        return self._open.get(key)

    def add(self, found: PopCheckPoint) -> None:
        self._open[found.key] = found

    def done(self, found: PopCheckPoint, offsets: Iterable[int]) -> None:
        """Mark messages as acknowledged; drop the checkpoint when none is open."""
        found.open.difference_update(offsets)
        found.acking.difference_update(offsets)
        if not found.open:
            self._open.pop(found.key, None)

    def was_acknowledged(self, key: Key, offset: int) -> bool:
        """Whether the message was acknowledged shortly before `read`."""
        return (key, offset) in self._done_before

    def acknowledged(self, key: Key, offsets: Iterable[int], revive_queue: int) -> None:
        """Remember acks that `read` finds in a queue of the revive topic."""
        kept = self._acknowledged.setdefault(revive_queue, deque(maxlen=ACKS_KEPT))
        kept.extend((key, offset) for offset in offsets)

    @property
    def log_begin(self) -> int:
        """Lower bound of the log positions of all open messages."""
        return min((found.physical_offset for found in self), default=NEVER)

    def oldest_revive_offsets(self) -> dict[int, int]:
        """Offset of the oldest open checkpoint in each queue of the revive topic that has any."""
        first: dict[int, int] = {}
        for found in self:
            first[found.revive_queue] = min(first.get(found.revive_queue, found.revive_offset), found.revive_offset)
        return first

    def read(self, reading: StoreQueries, begins: dict[int, int], timer_read_ms: int) -> Slices[None]:
        """Rebuild from the revive topic from `begins` on and from undelivered timer slots."""
        reader = _ReviveReader(self)
        for queue_id in reading.queues.ids(REVIVE_TOPIC):
            for messages, _next in batches(reading, REVIVE_TOPIC, queue_id, begins.get(queue_id, 0)):
                for message in messages:
                    reader.read(message)
                yield
        for messages, _next in batches(reading, TIMER_TOPIC, 0, 0, TAGS):
            for message in messages:
                if message.properties.get(REAL_TOPIC) == REVIVE_TOPIC:
                    self._add_parked(message, reader, begins, timer_read_ms)
            yield
        self._done_before = set().union(*self._acknowledged.values())
        self._acknowledged.clear()
        for number, found in enumerate(list(self)):
            if number % _FOUND_PER_SLICE == _FOUND_PER_SLICE - 1:
                yield
            bounds = reading.queues.bounds(found.topic, found.queue_id)
            place = found.topic, found.queue_id, min(found.open)
            at = reading.files.position_at(*place, bounds.number) if bounds is not None else None
            found.physical_offset = NEVER if at is None else at

    def _add_parked(
        self, message: StoredMessage, reader: _ReviveReader, begins: dict[int, int], timer_read_ms: int
    ) -> None:
        """Add a parked record that the timer has not delivered to its queue yet."""
        slot, queue = message.properties.get(TIMER_OUT_MS, ""), message.properties.get(REAL_QID, "")
        if slot.isdigit() and queue.isdigit() and int(slot) >= timer_read_ms:
            self.parked_until_ms = max(self.parked_until_ms, int(slot))
            queue_id = int(queue)
            reader.read(msgspec.structs.replace(message, queue_id=queue_id, queue_offset=begins.get(queue_id, 0)))


class _ReviveReader:
    """Combines checkpoints and acks read in any order, possibly more than once."""

    def __init__(self, found: OpenCheckPoints) -> None:
        self._found = found
        self._known: set[Key] = set()
        self._early: dict[Key, set[int]] = {}
        """Acks read before their checkpoints."""
        self._newest: dict[tuple[str, str, int, int], PopCheckPoint] = {}

    def read(self, message: StoredMessage) -> None:
        content = read(message)
        if isinstance(content, PopCheckPoint):
            if content.key not in self._known:
                self._known.add(content.key)
                self._add(content)
                self._found.done(content, self._early.pop(content.key, ()))
        elif content is not None and content.key not in self._known:
            self._early.setdefault(content.key, set()).update(content.offsets)
        elif content is not None and (found := self._found.get(content.key)) is not None:
            # A later ack may be for messages that were already redelivered.
            if message.store_timestamp_ms < found.due_ms:
                self._found.acknowledged(found.key, sorted(found.open.intersection(content.offsets)), message.queue_id)
            self._found.done(found, content.offsets)

    def _add(self, point: PopCheckPoint) -> None:
        """A message belongs to its newest checkpoint; the ack of the older one may be missing."""
        self._found.add(point)
        for offset in point.offsets:
            place = point.group, point.topic, point.queue_id, offset
            before = self._newest.setdefault(place, point)
            if point.is_newer(before):
                self._found.done(before, [offset])
                self._newest[place] = point
            elif before.is_newer(point):
                self._found.done(point, [offset])


def revive_start_offsets(progress: Iterable[CommittedOffset]) -> dict[int, int]:
    """Start of each queue of the revive topic, from the committed offsets of all groups."""
    return {at.queue_id: at.offset for at in progress if (at.group, at.topic) == (REVIVE_GROUP, REVIVE_TOPIC)}
