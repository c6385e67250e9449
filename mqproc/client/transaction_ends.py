"""What has become of a transaction, as far as the log tells it.

A half message that has ended is marked; the mark does not say how. What was delivered of it does, or what was given up.
Where neither is found it was rolled back, but only when a committed message would surely be found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from mqproc.client import core, key_steps
from mqproc.client.core import PULL_BYTES
from mqproc.client.group_steps import Steps
from mqproc.client.transaction_calls import open_transactions
from mqproc.errors import BadTopicError, MessageNotFoundError, NoSuchQueueError, TopicNotFoundError
from mqproc.layout import properties, record
from mqproc.message import QueueInfo, StoredMessage
from mqproc.names import CHECK_MAX_TIME_TOPIC, HALF_TOPIC

TransactionState = Literal["", "open", "committed", "rolled back", "given up", "ended"]
"""`ended`: how is not known, for what was made of it may be in the log no more, or not yet in the index."""

_LOOKED_AT: Final = 256
_LOOKS_MAX: Final = 64


def transaction_state(message: StoredMessage, half_ids: Sequence[str], page_bytes: int) -> Steps[TransactionState]:
    """Of the transaction that a message is of; "" when it is of none, or nothing tells of it.

    `half_ids`: offset message ids of its half messages, among them the message itself if it is one.
    """
    if _is_committed(message):
        return "committed"
    unique_id = message.unique_id
    halves = yield from _halves(half_ids)
    if not halves or not unique_id:
        return ""
    if (yield open_transactions("", [unique_id, *half_ids], 1)):
        return "open"
    # Ended by now, so what was made of it is written.
    dispatched = yield from _dispatched()
    half = halves[0]
    real_topic = half.properties.get(properties.REAL_TOPIC, "")
    if any(map(_is_committed, (yield from _same(real_topic, unique_id, page_bytes)))):
        return "committed"
    if (yield from _same(CHECK_MAX_TIME_TOPIC, unique_id, page_bytes)):
        return "given up"
    of_its_id = yield from _same(HALF_TOPIC, unique_id, page_bytes)
    indexed = any(each.queue_offset == half.queue_offset for each in of_its_id)
    surely = dispatched and indexed and (yield from _queue_reaches_back_to(half))
    return "rolled back" if surely else "ended"


def _dispatched() -> Steps[bool]:
    """Whether queues and index have what is written now, or come to have it within some looks."""
    written = -1
    for _ in range(_LOOKS_MAX):
        words: dict[str, int] = yield core.stats()
        written = words["written"] if written < 0 else written
        if words["dispatched"] >= written:
            return True
    return False


def _halves(half_ids: Sequence[str]) -> Steps[list[StoredMessage]]:
    """Those that are there still, in the order of the log."""
    found: list[StoredMessage] = []
    for message_id in half_ids:
        try:
            found.append((yield core.get(message_id, "")))
        except MessageNotFoundError:
            continue  # Expired meanwhile.
    return sorted(found, key=lambda each: each.physical_offset)


def _same(topic: str, unique_id: str, page_bytes: int) -> Steps[list[StoredMessage]]:
    try:
        found = yield from key_steps.by_key(topic, unique_id, None, None, _LOOKED_AT, True, "store", page_bytes)
    except (TopicNotFoundError, BadTopicError):
        return []  # Deleted since, never made, or a record that names none.
    return found


def _queue_reaches_back_to(half: StoredMessage) -> Steps[bool]:
    """Whether the queue that a half message is for has everything that was stored there since."""
    topic, queue_id = half.properties.get(properties.REAL_TOPIC, ""), half.properties.get(properties.REAL_QID, "")
    if not queue_id.isdecimal():
        return False
    try:
        info: QueueInfo = yield core.queue(topic, int(queue_id))
        if not info.min_offset:
            return True
        place = topic, info.queue_id, info.min_offset, 1, PULL_BYTES
        oldest = yield core.pull(core.pull_request(*place, "", 0.0, False))
    except (TopicNotFoundError, BadTopicError, NoSuchQueueError):
        return False
    return bool(oldest.messages) and oldest.messages[0].physical_offset < half.physical_offset


def _is_committed(message: StoredMessage) -> bool:
    return message.sys_flag & record.SYS_FLAG_TRANSACTION_MASK == record.SYS_FLAG_COMMIT
