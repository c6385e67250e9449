"""Half messages, and the marks that say which of them are done, as RocketMQ's broker writes them.

half message    RMQ_SYS_TRANS_HALF_TOPIC, REAL_TOPIC, REAL_QID, PGROUP, TRAN_MSG=true, __transactionId__
mark            RMQ_SYS_TRANS_OP_HALF_TOPIC, tag d, queue offsets of half messages: 12,15,
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from mqproc.layout import properties
from mqproc.message import StoredMessage

TRANSACTION_GROUP: Final = "CID_RMQ_SYS_TRANS"
"""Its progress in the two topics is below what all is done."""
QUEUE: Final = 0
MARK_PROPERTIES: Final = properties.encode({properties.TAGS: "d", properties.WAIT: "false"}).encode()
_SEPARATOR: Final = ","
_DIGITS_MAX: Final = 18

Key = tuple[str, str, str]
"""Producer group, topic, transaction id."""


@dataclass(slots=True, eq=False)
class Half:
    """An open half message. Its body is left in the log."""

    offset: int
    """In the queue of half messages."""
    physical_offset: int
    size: int
    message_id: str
    group: str
    topic: str
    transaction_id: str
    born_ms: int
    stored_ms: int
    checks: int
    immunity_s: int
    """For how long from its birth it is not to be checked, 0 when it does not say."""
    made_from: int
    """The half message that this is a copy of: its physical offset, 0 for the first."""
    requeued: int = -1
    """Of a copy that RocketMQ made before the first check: the queue offset of the first half message, else −1."""
    places: list[int] = field(default_factory=list)
    """Physical offsets of it and of what it is a copy of."""
    busy: bool = False
    """Its end, or its copy, is on its way."""
    check_ms: int = 0
    """When its producer is asked."""
    due_ms: int = 0
    """When it is looked at: then, or before, to be stored anew."""
    again_ms: int = 0
    """How long it waited when its check was refused last."""

    @property
    def key(self) -> Key:
        return self.group, self.topic, self.transaction_id

    @property
    def is_copy(self) -> bool:
        """Whether it stands for a half message that lay elsewhere before."""
        return bool(self.checks or self.made_from) or self.requeued >= 0

    @property
    def is_whole(self) -> bool:
        """Whether it says where its message goes; what does not is nothing that could be decided, and passed over."""
        return bool(self.topic)

    def immunity_ms(self, timeout_ms: int) -> int:
        """For how long from its birth its producer is not asked."""
        return max(self.immunity_s * 1000, timeout_ms)

    def first_due_ms(self, timeout_ms: int, interval_ms: int) -> int:
        """When it is checked: a copy an interval after it was made."""
        if self.checks:
            return self.stored_ms + interval_ms
        return min(self.born_ms, self.stored_ms) + self.immunity_ms(timeout_ms)


def half_of(message: StoredMessage) -> Half:
    """What a message of the half topic says."""
    pairs = message.properties
    return Half(
        offset=message.queue_offset,
        physical_offset=message.physical_offset,
        size=message.size,
        message_id=message.message_id,
        group=pairs.get(properties.PGROUP, ""),
        topic=pairs.get(properties.REAL_TOPIC, ""),
        transaction_id=pairs.get(properties.TRANSACTION_ID) or message.unique_id or message.message_id,
        born_ms=message.born_timestamp_ms,
        stored_ms=message.store_timestamp_ms,
        checks=_number(pairs.get(properties.TRANSACTION_CHECK_TIMES, "")),
        immunity_s=_number(pairs.get(properties.CHECK_IMMUNITY_TIME, "")),
        made_from=message.prepared_transaction_offset,
        requeued=_number(pairs.get(properties.TRAN_PREPARED_QUEUE_OFFSET, ""), absent=-1),
        places=[message.physical_offset],
    )


def _number(text: str, absent: int = 0) -> int:
    """A number from 0 on; what is none counts as absent."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX else absent


def encode_marks(offsets: Iterable[int]) -> bytes:
    """The text of a mark: half messages that are done."""
    return "".join(f"{offset}{_SEPARATOR}" for offset in offsets).encode()


def decode_marks(body: bytes) -> list[int]:
    """The half messages that a mark names; what is no number is passed over."""
    parts = body.decode("ascii", "replace").split(_SEPARATOR)
    return [int(part) for part in parts if part.isascii() and part.isdigit() and len(part) <= _DIGITS_MAX]
