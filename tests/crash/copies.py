"""Records that the group made itself: of messages that had waited, were committed, or come again; and its notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mqproc.layout import properties
from mqproc.layout.java_hash import java_hash
from mqproc.store.schedule.delivery_marks import mark_of
from mqproc.topic_names import (
    CHECK_MAX_TIME_TOPIC,
    DEAD_LETTER_PREFIX,
    HALF_TOPIC,
    OP_HALF_TOPIC,
    RETRY_PREFIX,
    REVIVE_TOPIC,
    SCHEDULE_TOPIC,
    TIMER_TOPIC,
)
from mqproc.types import StoredMessage
from mqproc.util.units import DELAYS_MS
from tests.crash.placed import Placed, expect
from tests.crash.senders import Senders, Sent

WAITING_TOPICS = (SCHEDULE_TOPIC, TIMER_TOPIC)
PARKED_TOPICS = (*WAITING_TOPICS, HALF_TOPIC, CHECK_MAX_TIME_TOPIC)
# What query remembers in the log: which transactions have ended, what simple consumers have received.
NOTE_TOPICS = (OP_HALF_TOPIC, REVIVE_TOPIC)
OF_GROUPS = (RETRY_PREFIX, DEAD_LETTER_PREFIX)


def tags_code(message: StoredMessage) -> int:
    """What a record's unit bears: its tag's hash, or when it is due."""
    if message.topic == SCHEDULE_TOPIC:
        return message.store_timestamp_ms + DELAYS_MS[message.queue_id]
    return java_hash(message.tag) if message.tag else 0


def goes_to(message: StoredMessage) -> str:
    """The topic that a message is for: its own, or where it goes when it has waited, or is committed."""
    return message.properties.get(properties.REAL_TOPIC, "") if message.topic in PARKED_TOPICS else message.topic


def is_for_group(message: StoredMessage, group: str) -> bool:
    """Whether a message comes to a group again, or is one of its dead letters."""
    topic, again = goes_to(message), RETRY_PREFIX + group
    return topic in (again, DEAD_LETTER_PREFIX + group) or topic.startswith(f"{again}_")


def is_note(placed: Placed) -> bool:
    """Whether a record is none of a message."""
    return placed.message.topic in NOTE_TOPICS


def is_copy(placed: Placed) -> bool:
    """Whether the group made the record, and not a sender."""
    message = placed.message
    return goes_to(message).startswith(OF_GROUPS) or message.prepared_transaction_offset > 0


def sent_of(placed: Placed, senders: Senders) -> Sent:
    """The message that a record was sent as, or made of; raises Broken when nobody sent it."""
    return senders.sent[senders.number_of(placed.message)]


def originals(records: Sequence[Placed], senders: Senders) -> list[tuple[int, Placed]]:
    """(number, record) of every record that a sender made, in the order of the log."""
    found = ((sent_of(placed, senders), placed) for placed in records if not is_note(placed))
    return [(sent.number, placed) for sent, placed in found if not is_copy(placed)]


def check_copies(records: Sequence[Placed], senders: Senders, gone: set[int]) -> None:
    """What waited is delivered to its own topic, once, and never what a crash has taken.

    So it is with half messages: of each one thing is made, and of a copy of it the next.
    """
    made: Counter[int] = Counter()
    for placed in records:
        if is_note(placed) or not is_copy(placed):
            continue
        sent, message = sent_of(placed, senders), placed.message
        expect(sent.number not in gone, f"message {sent.number} was gone, but there is a copy at {placed.offset}")
        if goes_to(message).startswith(OF_GROUPS):
            continue
        expect(
            goes_to(message) == sent.topic, f"message {sent.number} for {sent.topic} was delivered to {message.topic}"
        )
        source = message.prepared_transaction_offset
        made[source] += 1
        expect(made[source] == 1, f"message {sent.number}, parked at {source}, is delivered twice")
        expect(source < placed.offset, f"message {sent.number} at {placed.offset} is made from {source}")


def undelivered(records: Sequence[Placed]) -> list[int]:
    """Offsets of records that wait still."""
    made = {placed.message.prepared_transaction_offset for placed in records if is_copy(placed)}
    return [
        placed.offset
        for placed in records
        if placed.message.topic in WAITING_TOPICS and mark_of(placed.offset) not in made
    ]
