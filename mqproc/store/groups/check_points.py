"""Check points of messages that were received and not acknowledged yet, as RocketMQ keeps them in its revive topic.

    tag ck     {"so":120,"pt":…,"it":30000,"bm":0,"n":2,"q":3,"t":"orders","c":"billing","ro":0,"d":[0,1],"bn":"mqproc"}
    tag ack    {"ao":121,"so":120,"c":"billing","t":"orders","q":3,"pt":…,"bn":"mqproc"}
    tag bAck   the same with "aol":[120,121] in place of "ao"

so: first queue offset, d: offsets from it. pt: when they were received, in ms; it: how many ms nobody else gets them.
Which check point an acknowledgement is for is told by c, t, q, so and pt.
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
from mqproc.names import RETRY_PREFIX

REVIVE_GROUP: Final = "CID_RMQ_SYS_REVIVE_GROUP"
"""Its progress in the revive topic is where check points begin that may be open."""
HANDLE: Final = "POP_CK"
"""The property that a received message bears its handle in."""
BROKER: Final = "mqproc"
_CHECK_POINT, _ACK, _ACKS = "ck", "ack", "bAck"
_HANDLE_PARTS: Final = 8
_NUMBER: Final = re.compile(r"[0-9]{1,19}")

Key = tuple[str, str, int, int, int]
"""Group, topic, queue id, first queue offset, time of the receive in ms."""


def pop_retry_topic(group: str, topic: str) -> str:
    """Where messages of a topic come again that were received and not acknowledged."""
    return f"{RETRY_PREFIX}{group}_{topic}"


@dataclass(slots=True, eq=False)
class CheckPoint:
    """Messages of one receive. `open`: queue offsets that are not acknowledged."""

    group: str
    topic: str
    queue_id: int
    offsets: tuple[int, ...]
    pop_time_ms: int
    invisible_ms: int
    revive_queue: int
    revive_offset: int = -1
    physical_offset: int = 0
    """None of its messages that are open lies below this position of the log."""
    open: set[int] = field(default_factory=set)
    acking: set[int] = field(default_factory=set)
    """Those of them whose acknowledgement is on its way."""
    reviving: bool = False
    inherited: bool = False
    """It is of an earlier process, which may have begun to send its messages again."""

    @property
    def key(self) -> Key:
        return self.group, self.topic, self.queue_id, self.offsets[0], self.pop_time_ms

    @property
    def due_ms(self) -> int:
        """When what is not acknowledged comes again."""
        return self.pop_time_ms + self.invisible_ms

    @property
    def next_offset(self) -> int:
        return self.offsets[-1] + 1

    def handle(self) -> str:
        """What its messages' handles begin with; a space and the message's queue offset follow."""
        retry = int(self.topic.startswith(RETRY_PREFIX))
        parts = self.offsets[0], self.pop_time_ms, self.invisible_ms, self.revive_queue, retry, BROKER, self.queue_id
        return " ".join(map(str, parts))

    def body(self) -> bytes:
        first = self.offsets[0]
        value: dict[str, Any] = {"so": first, "pt": self.pop_time_ms, "it": self.invisible_ms, "bm": 0}
        value |= {"n": len(self.offsets), "q": self.queue_id, "t": self.topic, "c": self.group, "ro": 0}
        value |= {"d": [offset - first for offset in self.offsets], "bn": BROKER}
        return msgspec.json.encode(value)

    def properties(self) -> bytes:
        return _properties(_CHECK_POINT)

    def ack_body(self, offsets: Sequence[int]) -> bytes:
        """The acknowledgement of some of its messages."""
        what: dict[str, Any] = {"ao": offsets[0]} if len(offsets) == 1 else {"aol": list(offsets)}
        group, topic, queue_id, first, pop_time_ms = self.key
        ours = {"so": first, "c": group, "t": topic, "q": queue_id, "pt": pop_time_ms, "bn": BROKER}
        return msgspec.json.encode(what | ours)

    def ack_properties(self, offsets: Sequence[int]) -> bytes:
        return _properties(_ACK if len(offsets) == 1 else _ACKS)


def _properties(tag: str) -> bytes:
    return properties.encode({properties.TAGS: tag, properties.WAIT: "false"}).encode()


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Messages of the check point `key` that are done."""

    key: Key
    offsets: tuple[int, ...]


def read(message: StoredMessage) -> CheckPoint | Acknowledged | None:
    """What a message of the revive topic says; None when nobody can read it."""
    try:
        value = msgspec.json.decode(message.body)
        group, topic, queue_id, first = str(value["c"]), str(value["t"]), int(value["q"]), int(value["so"])
        pop_time_ms = int(value["pt"])
        if message.tag != _CHECK_POINT:
            done = value["aol"] if "aol" in value else [value["ao"]]
            return Acknowledged((group, topic, queue_id, first, pop_time_ms), tuple(map(int, done)))
        deltas = value.get("d") or range(int(value["n"]))
        acked = int(value.get("bm", 0))
        offsets = tuple(first + int(delta) for delta in deltas)
        found = CheckPoint(group, topic, queue_id, offsets, pop_time_ms, int(value["it"]), message.queue_id)
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        return None
    found.revive_offset = message.queue_offset
    found.open = {offset for place, offset in enumerate(offsets) if not acked >> place & 1}
    found.inherited = True
    return found if offsets else None


def key_of(group: str, topic: str, handle: str) -> tuple[Key, int]:
    """The check point that a message's handle names, and its queue offset. Raises BadRequestError."""
    parts = handle.split(" ")
    numbers = [part for place, part in enumerate(parts) if place != 5]
    if len(parts) != _HANDLE_PARTS or not all(_NUMBER.fullmatch(part) for part in numbers):
        raise BadRequestError(f"{handle[:128]!r} is no handle of a received message (property {HANDLE})")
    return (group, topic, int(parts[6]), int(parts[0]), int(parts[1])), int(parts[7])
