"""Cancelling a message that waits for its delivery time. No I/O."""

from __future__ import annotations

from mqproc.client import requests, send_requests
from mqproc.client.message_fields import SystemProperties
from mqproc.client.requests import Steps
from mqproc.errors import BadRequestError, BadTimeError, MessageNotFoundError
from mqproc.layout import properties
from mqproc.topic_names import SCHEDULE_TOPIC, TIMER_TOPIC
from mqproc.types import Message, StoredMessage
from mqproc.util.units import format_time, now_ms


def waiting_message(message_id: str) -> Steps[StoredMessage]:
    """A timed message that can be cancelled, by its offset id or unique id.

    Raises MessageNotFoundError when no message with this id waits, BadTimeError when its time has passed,
    BadRequestError for one that waits by a delay level.
    """
    try:
        waiting: StoredMessage = yield requests.get(message_id, TIMER_TOPIC)
    except MessageNotFoundError:
        raise MessageNotFoundError(f"no message {message_id} waits for its delivery time") from None
    pairs = waiting.properties
    if waiting.topic == SCHEDULE_TOPIC:
        raise BadRequestError(f"message {message_id} waits by a delay level; deliver_at and delay can be cancelled")
    if waiting.topic != TIMER_TOPIC or not pairs.get(properties.TIMER_DELIVER_MS) or not waiting.unique_id:
        raise MessageNotFoundError(f"message {message_id} is in topic {waiting.topic} and does not wait")
    deliver_at_ms = int(pairs[properties.TIMER_DELIVER_MS])
    if deliver_at_ms <= now_ms():
        raise BadTimeError(f"message {message_id} was due at {format_time(deliver_at_ms)}")
    return waiting


def cancel(message_id: str) -> Steps[None]:
    """Cancel a timed message. Raises as `waiting_message`."""
    waiting = yield from waiting_message(message_id)
    pairs = waiting.properties
    deliver_at_ms = int(pairs[properties.TIMER_DELIVER_MS])
    own = SystemProperties({properties.TIMER_DEL_UNIQKEY: waiting.unique_id})
    cancelling = Message(pairs[properties.REAL_TOPIC], b"", properties=own, deliver_at_ms=deliver_at_ms)
    yield send_requests.send_system(cancelling)
