"""Records that the group itself made of what was sent: deliveries of messages that waited, retries, dead letters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mqproc.kernels.dispatch import DELAY_LEVELS_MS
from mqproc.layout import properties
from mqproc.layout.java_hash import java_hash
from mqproc.message import StoredMessage
from mqproc.names import DEAD_LETTER_PREFIX, RETRY_PREFIX, SCHEDULE_TOPIC, TIMER_TOPIC
from mqproc.store.delays.made_from import mark_of
from tests.crash.placed import Broken, Placed, expect
from tests.crash.senders import Senders, Sent

WAITING_TOPICS = (SCHEDULE_TOPIC, TIMER_TOPIC)
OF_GROUPS = (RETRY_PREFIX, DEAD_LETTER_PREFIX)


def tags_code(message: StoredMessage) -> int:
    """What a record's unit bears: its tag's hash, or when it is due."""
    if message.topic == SCHEDULE_TOPIC:
        return message.store_timestamp_ms + int(DELAY_LEVELS_MS[message.queue_id + 1])
    return java_hash(message.tag) if message.tag else 0


def goes_to(message: StoredMessage) -> str:
    """The topic that a message is for: its own, or where it goes when it has waited."""
    return message.properties.get(properties.REAL_TOPIC, "") if message.topic in WAITING_TOPICS else message.topic


def is_copy(placed: Placed) -> bool:
    """Whether the group made the record, and not a sender."""
    message = placed.message
    return goes_to(message).startswith(OF_GROUPS) or message.prepared_transaction_offset > 0


def sent_of(placed: Placed, senders: Senders) -> Sent:
    """The message that a record was sent as, or made of; raises Broken when nobody sent it."""
    sent = senders.of_body(placed.message.body)
    if sent is None:
        raise Broken(f"the record at {placed.offset} was never sent: {placed.message.body[:40]!r}")
    return sent


def originals(records: Sequence[Placed], senders: Senders) -> list[tuple[int, Placed]]:
    """(number, record) of every record that a sender made, in the order of the log."""
    found = ((sent_of(placed, senders), placed) for placed in records)
    return [(sent.number, placed) for sent, placed in found if not is_copy(placed)]


def check_copies(records: Sequence[Placed], senders: Senders, gone: set[int]) -> None:
    """What waited is delivered to its own topic, once, and never what a crash has taken."""
    made: Counter[int] = Counter()
    for placed in records:
        sent, message = sent_of(placed, senders), placed.message
        if not is_copy(placed):
            continue
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
