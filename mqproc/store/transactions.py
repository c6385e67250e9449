"""Half and op messages of transactions, in the format of RocketMQ's broker.

half message    RMQ_SYS_TRANS_HALF_TOPIC, REAL_TOPIC, REAL_QID, PGROUP, TRAN_MSG=true, __transactionId__
op message      RMQ_SYS_TRANS_OP_HALF_TOPIC, tag d, queue offsets of completed half messages: 12,15,
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from mqproc.layout import properties
from mqproc.types import StoredMessage

TRANSACTION_GROUP: Final = "CID_RMQ_SYS_TRANS"
"""The group whose offsets in the two topics mark the completed messages: all below them."""
QUEUE: Final = 0
OP_PROPERTIES: Final = properties.encode({properties.TAGS: "d", properties.WAIT: "false"}).encode()
_SEPARATOR: Final = ","
_DIGITS_MAX: Final = 18

TransactionKey = tuple[str, str, str]
"""Producer group, topic, transaction id."""


@dataclass(slots=True, eq=False)
class HalfMessage:
    """An open half message, without its body."""

    offset: int
    """Offset in the queue of half messages."""
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
    """Time from its birth during which it is not checked, 0 if not specified."""
    made_from: int
    """Physical offset of the half message of which this is a copy, 0 for an original."""
    requeued: int = -1
    """Queue offset of the original if RocketMQ copied it before the first check; else −1."""
    places: list[int] = field(default_factory=list)
    """Physical offsets of this message and of its predecessors."""
    busy: bool = False
    """Whether its op message or its copy is being written."""
    check_ms: int = 0
    """Time of the next check by its producer."""
    due_ms: int = 0
    """Time of the next action: the check, or an earlier copy."""
    again_ms: int = 0
    """Wait after the last refused check."""

    @property
    def key(self) -> TransactionKey:
        return self.group, self.topic, self.transaction_id

    @property
    def is_copy(self) -> bool:
        """Whether this is a copy of an earlier half message."""
        return bool(self.checks or self.made_from) or self.requeued >= 0

    @property
    def is_whole(self) -> bool:
        """Whether the destination is known; without it the message is ignored."""
        return bool(self.topic)

    def immunity_ms(self, timeout_ms: int) -> int:
        """Time from its birth during which its producer is not asked."""
        return max(self.immunity_s * 1000, timeout_ms)

    def first_due_ms(self, timeout_ms: int, interval_ms: int) -> int:
        """Time of the first check: for a copy, one interval after it was made."""
        if self.checks:
            return self.stored_ms + interval_ms
        return min(self.born_ms, self.stored_ms) + self.immunity_ms(timeout_ms)


def parse_half(message: StoredMessage) -> HalfMessage:
    pairs = message.properties
    return HalfMessage(
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
    """A number ≥ 0; anything else counts as absent."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX else absent


def encode_op_body(offsets: Iterable[int]) -> bytes:
    """Body of an op message for completed half messages."""
    return "".join(f"{offset}{_SEPARATOR}" for offset in offsets).encode()


def decode_op_body(body: bytes) -> list[int]:
    """Queue offsets in the body of an op message; invalid offsets are ignored."""
    parts = body.decode("ascii", "replace").split(_SEPARATOR)
    return [int(part) for part in parts if part.isascii() and part.isdigit() and len(part) <= _DIGITS_MAX]
