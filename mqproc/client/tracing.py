"""Trace of one message: where it is, and what became of it.

It uses ordinary requests, so each part is as a consumer would find it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from mqproc.client import group_requests, requests
from mqproc.client.replay import REPLAYED
from mqproc.client.requests import PULL_BYTES, Steps
from mqproc.client.transaction_requests import open_transactions
from mqproc.errors import BadTopicError, GroupNotFoundError, MessageNotFoundError, NoSuchQueueError, TopicNotFoundError
from mqproc.layout import properties, record
from mqproc.topic_names import (
    CHECK_MAX_TIME_TOPIC,
    DEAD_LETTER_PREFIX,
    HALF_TOPIC,
    RETRY_PREFIX,
    SCHEDULE_TOPIC,
    TIMER_TOPIC,
)
from mqproc.types import GroupInfo, QueueInfo, StoredMessage, TopicInfo

TransactionState = Literal["", "open", "committed", "rolled back", "given up", "ended"]
"""`ended`: with an unknown outcome, since the resulting message may have expired, or may not be indexed yet."""

_SEARCHED_MAX: Final = 256
_POLLS_MAX: Final = 64


def transaction_state(message: StoredMessage, half_ids: Sequence[str], page_bytes: int) -> Steps[TransactionState]:
    """State of a message's transaction; "" without a transaction, or without a trace of it.

    `half_ids`: offset message ids of its half messages, including the message itself if it is one.

    A half message that has ended is marked, without the outcome. The delivered or given-up message shows it. Without
    either it was rolled back, but only when a committed message would certainly be found.
    """
    if _is_committed(message):
        return "committed"
    unique_id = message.unique_id
    halves = yield from _halves(half_ids)
    if not halves or not unique_id:
        return ""
    if (yield open_transactions("", [unique_id, *half_ids], 1)):
        return "open"
    # It has ended, so the resulting message is written.
    dispatched = yield from _is_dispatched()
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


def _is_dispatched() -> Steps[bool]:
    """Whether queues and index have all messages written now, or get them within a few polls."""
    written = -1
    for _ in range(_POLLS_MAX):
        words: dict[str, int] = yield requests.stats()
        written = words["written"] if written < 0 else written
        if words["dispatched"] >= written:
            return True
    return False


def _halves(half_ids: Sequence[str]) -> Steps[list[StoredMessage]]:
    """The half messages that still exist, in the order of the log."""
    found: list[StoredMessage] = []
    for message_id in half_ids:
        try:
            found.append((yield requests.get(message_id, "")))
        except MessageNotFoundError:
            continue  # Expired meanwhile.
    return sorted(found, key=lambda each: each.physical_offset)


def _same(topic: str, unique_id: str, page_bytes: int) -> Steps[list[StoredMessage]]:
    try:
        found = yield from requests.all_by_key(topic, unique_id, None, None, _SEARCHED_MAX, True, "store", page_bytes)
    except (TopicNotFoundError, BadTopicError):
        return []  # Deleted since, never created, or a record without a topic.
    return found


def _queue_reaches_back_to(half: StoredMessage) -> Steps[bool]:
    """Whether a half message's target queue still has all messages since."""
    topic, queue_id = half.properties.get(properties.REAL_TOPIC, ""), half.properties.get(properties.REAL_QID, "")
    if not queue_id.isdecimal():
        return False
    try:
        info: QueueInfo = yield requests.queue(topic, int(queue_id))
        if not info.min_offset:
            return True
        place = topic, info.queue_id, info.min_offset, 1, PULL_BYTES
        oldest = yield requests.pull(requests.pull_request(*place))
    except (TopicNotFoundError, BadTopicError, NoSuchQueueError):
        return False
    return bool(oldest.messages) and oldest.messages[0].physical_offset < half.physical_offset


def _is_committed(message: StoredMessage) -> bool:
    return message.sys_flag & record.SYS_FLAG_TRANSACTION_MASK == record.SYS_FLAG_COMMIT


ORIGIN: Final = "ORIGIN_MESSAGE_ID"
"""Property of a copy with the offset message id of the original message."""

CopyKind = Literal["original", "half message", "delayed", "delivered", "retry", "dead letter"]
_WAITING: Final = ("half message", "delayed")
_COPIES_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class TracedKey:
    """A key or the unique id. `indexed`: an index entry of it points to the record.

    None when the answer cannot hold all messages of the same millisecond with the key.
    """

    key: str
    unique: bool
    indexed: bool | None


@dataclass(frozen=True, slots=True)
class TracedProgress:
    """A group's progress in the message's queue.

    `passed`: the message is consumed; `messages_before`: number of unconsumed messages before it. `offset` None: the
    group has no progress here. `member_id` has the queue now.
    """

    group: str
    offset: int | None
    passed: bool
    messages_before: int
    member_id: str


@dataclass(frozen=True, slots=True)
class TracedCopy:
    """Another record of the same message: its source, or a copy of it."""

    kind: CopyKind
    topic: str
    queue_id: int
    queue_offset: int
    message_id: str
    store_timestamp_ms: int
    reconsume_times: int
    real_topic: str
    """Target of a delayed or half message."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Result of a trace.

    `unit`: FOUND when the queue's unit points to the record, else the status of a pull there.

    `transaction`: state of the message's transaction; "" without one, or without a trace of it.
    """

    message: StoredMessage
    unit: str
    keys: tuple[TracedKey, ...]
    progress: tuple[TracedProgress, ...]
    copies: tuple[TracedCopy, ...]
    transaction: TransactionState

    def to_json(self) -> dict[str, Any]:
        """The fields by name, as `--json` prints them. Example: `trace.to_json()["copies"]`"""
        parts = {name: [asdict(part) for part in getattr(self, name)] for name in ("keys", "progress", "copies")}
        return {"message": self.message.to_json(), "unit": self.unit, "transaction": self.transaction, **parts}


def trace(message_id: str, topic: str, page_bytes: int) -> Steps[Trace]:
    """Trace a message with answers of at most `page_bytes`. Raises MessageNotFoundError."""
    message: StoredMessage = yield requests.get(message_id, topic)
    unit = yield from _unit(message)
    keys = yield from _keys(message, page_bytes)
    progress = yield from _progress(message)
    copies = yield from _copies(message, page_bytes)
    halves = [each.message_id for each in copies if each.kind == "half message"]
    halves += [message.message_id] if message.topic == HALF_TOPIC else []
    transaction = yield from transaction_state(message, halves, page_bytes)
    return Trace(message, unit, keys, progress, copies, transaction)


def _unit(message: StoredMessage) -> Steps[str]:
    request = requests.pull_request(message.topic, message.queue_id, message.queue_offset, 1, PULL_BYTES)
    found = yield requests.pull(request)
    if not found.messages:
        return str(found.status)
    if found.messages[0].physical_offset == message.physical_offset:
        return "FOUND"
    return f"ANOTHER RECORD: log {found.messages[0].physical_offset}"


def _keys(message: StoredMessage, page_bytes: int) -> Steps[tuple[TracedKey, ...]]:
    named = [(key, False) for key in message.keys]
    if message.unique_id:
        named.append((message.unique_id, True))
    found = []
    moment = message.store_timestamp_ms
    for key, unique in named:
        call = requests.with_key(message.topic, key, moment, moment + 1, max_bytes=page_bytes, unique=unique)
        hits, complete = yield call
        there = any(hit.physical_offset == message.physical_offset for hit in hits)
        found.append(TracedKey(key, unique, there if there or complete else None))
    return tuple(found)


def _progress(message: StoredMessage) -> Steps[tuple[TracedProgress, ...]]:
    found = []
    for summary in (yield group_requests.groups()):
        try:
            info: GroupInfo = yield group_requests.info(summary.group)
        except GroupNotFoundError:
            continue  # Deleted since.
        found += [
            TracedProgress(
                info.group,
                queue.offset,
                queue.offset is not None and queue.offset > message.queue_offset,
                max(0, message.queue_offset - max(queue.offset or 0, queue.min_offset)),
                queue.member_id,
            )
            for queue in info.queues
            if (queue.topic, queue.queue_id) == (message.topic, message.queue_id)
        ]
    return tuple(sorted(found, key=lambda each: each.group))


def _copies(message: StoredMessage, page_bytes: int) -> Steps[tuple[TracedCopy, ...]]:
    """Records with the same unique id, or without one with the same key and origin.

    They are searched in the topics of copies, and in the target topic of a delayed or half message.
    """
    unique = bool(message.unique_id)
    key = message.unique_id or " ".join(message.keys[:1])
    if not key:
        return ()
    origin = _origin(message)
    found: list[StoredMessage] = []
    if origin != message.message_id:
        found += yield from _original(origin)
    to = _target_topic(message)
    infos: list[TopicInfo] = yield requests.topics()
    for topic in [info.topic for info in infos if info.topic == to or _kind(info.topic)]:
        same = yield from requests.all_by_key(topic, key, None, None, _COPIES_MAX, unique, "store", page_bytes)
        found += (each for each in same if unique or each.properties.get(ORIGIN) == origin)
    others = {each.message_id: each for each in found if each.message_id != message.message_id}
    return tuple(_copy(each, to) for each in sorted(others.values(), key=lambda each: each.physical_offset))


def _origin(message: StoredMessage) -> str:
    """Message id of a copy's source, of another message its own."""
    return message.properties.get(ORIGIN) or message.properties.get(REPLAYED) or message.message_id


def _target_topic(message: StoredMessage) -> str:
    """Topic to which a delayed or half message is delivered, "" for other messages."""
    return message.properties.get(properties.REAL_TOPIC, "") if _kind(message.topic) in _WAITING else ""


def _original(message_id: str) -> Steps[Iterable[StoredMessage]]:
    try:
        found: StoredMessage = yield requests.get(message_id, "")
    except MessageNotFoundError:
        return ()  # Expired meanwhile.
    return (found,)


def _kind(topic: str) -> CopyKind | None:
    if topic.startswith(RETRY_PREFIX):
        return "retry"
    if topic.startswith(DEAD_LETTER_PREFIX):
        return "dead letter"
    if topic in (SCHEDULE_TOPIC, TIMER_TOPIC):
        return "delayed"
    return "half message" if topic == HALF_TOPIC else None


def _copy(message: StoredMessage, delivered_to: str) -> TracedCopy:
    return TracedCopy(
        _kind(message.topic) or ("delivered" if message.topic == delivered_to else "original"),
        message.topic,
        message.queue_id,
        message.queue_offset,
        message.message_id,
        message.store_timestamp_ms,
        message.reconsume_times,
        message.properties.get(properties.REAL_TOPIC, ""),
    )
