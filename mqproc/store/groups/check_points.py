"""Check points of messages that were received and not acknowledged yet, as RocketMQ keeps them in its revive topic.

    tag ck     {"so":120,"pt":…,"it":30000,"bm":0,"n":2,"q":3,"t":"orders","c":"billing","ro":0,"d":[0,1],"bn":"mqproc"}
    tag ack    {"ao":121,"so":120,"c":"billing","t":"orders","q":3,"pt":…,"bn":"mqproc"}
    tag bAck   the same with "aol":[120,121] in place of "ao"

so: the queue offset that was looked from, d: the messages' offsets from it. pt: when they were received, in ms; it: how
many ms nobody else gets them. Which check point an acknowledgement is for is told by c, t, q, so, pt and bn, the name
of the broker, which RocketMQ's broker must have to go on with it. It counts n in a signed byte and acknowledgements in
32 bits, so a check point has 32 messages at most. How late it is RocketMQ takes from the newest TIMER_DELIVER_MS that
it finds in a queue of the revive topic, so ours have it: the time when they are stored.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from mqproc.errors import BadRequestError
from mqproc.layout import properties
from mqproc.message import StoredMessage
from mqproc.names import CHECK_POINT_MESSAGES, RETRY_PREFIX
from mqproc.store.groups.settings import dead_letter_topic, retry_topic

HANDLE: Final = "POP_CK"
"""The property that a received message bears its handle in."""
TAGS: Final = "ck", "ack", "bAck"
_CHECK_POINT, _ACK, _ACKS = TAGS
_HANDLE_PARTS: Final = 8
_NUMBER: Final = re.compile(r"[0-9]{1,19}")

NEVER: Final = 1 << 62
"""Above every position of a log."""
Key = tuple[str, str, int, int, int]
"""Group, topic, queue id, `start`, time of the receive in ms."""


def pop_retry_topic(group: str, topic: str) -> str:
    """Where messages of a topic come again that were received and not acknowledged."""
    return f"{RETRY_PREFIX}{group}_{topic}"


@dataclass(slots=True, eq=False)
class CheckPoint:
    """Messages of one receive. `open`: queue offsets that are not acknowledged; `start`: what `so` says, at most the
    first of `offsets`."""

    group: str
    topic: str
    queue_id: int
    start: int
    offsets: tuple[int, ...]
    pop_time_ms: int
    invisible_ms: int
    revive_queue: int
    broker: str
    is_ours: bool = True
    """Whether it lies in the log where it was made; RocketMQ's may have been parked first."""
    revive_offset: int = -1
    physical_offset: int = 0
    """None of its messages that are open lies below this position of the log."""
    open: set[int] = field(default_factory=set)
    acking: set[int] = field(default_factory=set)
    """Those of them whose acknowledgement is on its way."""
    reviving: bool = False
    dropped: bool = False
    """Its group was deleted: its messages come again to nobody, not to a group that is made by the same name either."""
    log_begin: int = 0
    """Neither it nor copies of its messages, which are sent again, lie below this position of the log."""
    again_ms: int = 0
    """How long it waited when its copies were refused last for their own sake."""
    copied: frozenset[int] = frozenset()
    """Those of its messages of which this process has stored a copy: they come again by that."""

    @property
    def key(self) -> Key:
        return self.group, self.topic, self.queue_id, self.start, self.pop_time_ms

    @property
    def first_topic(self) -> str:
        """Where its messages were for the first time: `topic` may be where they came again.

        Those of the group's own retry topic were in any; their property RETRY_TOPIC says in which.
        """
        return self.topic.removeprefix(pop_retry_topic(self.group, ""))

    @property
    def copied_to(self) -> tuple[str, str]:
        """Where its messages come again, those of a retry topic in that one, and where they are dead letters."""
        own = self.topic == retry_topic(self.group)
        again = self.topic if own else pop_retry_topic(self.group, self.first_topic)
        return again, dead_letter_topic(self.group)

    @property
    def due_ms(self) -> int:
        """When what is not acknowledged comes again."""
        return self.pop_time_ms + self.invisible_ms

    def is_newer(self, other: CheckPoint) -> bool:
        """Whether it was made after another: by the log where that tells, since a clock may have been set back."""
        if self.is_ours and other.is_ours:
            return self.log_begin > other.log_begin
        return self.pop_time_ms > other.pop_time_ms

    @property
    def next_offset(self) -> int:
        return self.offsets[-1] + 1

    def handle(self) -> str:
        """What its messages' handles begin with; a space and the message's queue offset follow."""
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
        """The acknowledgement of some of its messages."""
        what: dict[str, Any] = {"ao": offsets[0]} if len(offsets) == 1 else {"aol": list(offsets)}
        group, topic, queue_id, start, pop_time_ms = self.key
        ours = {"so": start, "c": group, "t": topic, "q": queue_id, "pt": pop_time_ms, "bn": self.broker}
        return msgspec.json.encode(what | ours)

    def ack_properties(self, offsets: Sequence[int], time_ms: int) -> bytes:
        return _properties(_ACK if len(offsets) == 1 else _ACKS, time_ms)


def of_receive(
    place: tuple[str, str, int],
    messages: Sequence[StoredMessage],
    pop_time_ms: int,
    invisible_ms: int,
    revive_queue: int,
    broker: str,
) -> list[CheckPoint]:
    """The check points of what was received of one queue: `place` is group, topic, queue id.

    Each begins where the one before ends, though a filter has left messages out in between: progress goes through all.
    """
    points: list[CheckPoint] = []
    for begin in range(0, len(messages), CHECK_POINT_MESSAGES):
        offsets = tuple(message.queue_offset for message in messages[begin : begin + CHECK_POINT_MESSAGES])
        start = points[-1].next_offset if points else offsets[0]
        found = CheckPoint(*place, start, offsets, pop_time_ms, invisible_ms, revive_queue, broker)
        found.physical_offset = messages[begin].physical_offset
        points.append(found)
    return points


def _properties(tag: str, time_ms: int) -> bytes:
    pairs = {properties.TAGS: tag, properties.WAIT: "false", properties.TIMER_DELIVER_MS: str(time_ms)}
    return properties.encode(pairs).encode()


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Messages of the check point `key` that are done."""

    key: Key
    offsets: tuple[int, ...]


def read(message: StoredMessage) -> CheckPoint | Acknowledged | None:
    """What a message of the revive topic says; None when nobody can read it."""
    try:
        value = msgspec.json.decode(message.body)
        group, topic, queue_id, start = str(value["c"]), str(value["t"]), int(value["q"]), int(value["so"])
        pop_time_ms = int(value["pt"])
        if message.tag != _CHECK_POINT:
            done = value["aol"] if "aol" in value else [value["ao"]]
            return Acknowledged((group, topic, queue_id, start, pop_time_ms), tuple(map(int, done)))
        deltas = value.get("d") or range(int(value["n"]))
        acked = int(value.get("bm", 0))
        offsets = tuple(start + int(delta) for delta in deltas)
        invisible_ms, broker = int(value["it"]), str(value.get("bn", ""))
        found = CheckPoint(group, topic, queue_id, start, offsets, pop_time_ms, invisible_ms, message.queue_id, broker)
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        return None
    found.revive_offset = message.queue_offset
    found.open = {offset for place, offset in enumerate(offsets) if not acked >> place & 1}
    found.log_begin = message.physical_offset
    found.is_ours = properties.UNIQ_KEY not in message.properties
    return found if offsets else None


def key_of(group: str, topic: str, handle: str) -> tuple[Key, int]:
    """The check point that a message's handle names, and its queue offset. Raises BadRequestError."""
    parts = handle.split(" ")
    numbers = [part for place, part in enumerate(parts) if place != 5]
    if len(parts) != _HANDLE_PARTS or not all(_NUMBER.fullmatch(part) for part in numbers):
        raise BadRequestError(f"{handle[:128]!r} is no handle of a received message (property {HANDLE})")
    return (group, topic, int(parts[6]), int(parts[0]), int(parts[1])), int(parts[7])
