"""Deliveries that are refused for what they are, not for the state of the store: they wait once more, by themselves.

A message of a deleted topic that there is no room to make again would be refused for ever, and whatever is due behind
it would wait. So it is parked anew where it came from, each time for longer, up to an hour, and then tried
again. That is a delivery as any other: it bears the mark of the record that it was made from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.errors import BadRequestError, MqprocError, TooManyQueuesError
from mqproc.layout import record
from mqproc.layout.properties import (
    DELAY,
    NAME_END,
    PAIR_END,
    REAL_QID,
    REAL_TOPIC,
    TIMER_DELIVER_MS,
    TIMER_OUT_MS,
    TIMER_ROLL_TIMES,
)
from mqproc.names import SCHEDULE_TOPIC, TIMER_TOPIC
from mqproc.roles.message_columns import MessageColumns
from mqproc.roles.property_columns import PropertyColumns

FIRST_WAIT_MS: Final = 2_000
DOUBLINGS_MAX: Final = 11
LONGEST_WAIT_MS: Final = 3_600_000
"""Each wait is a record more; yet who makes room waits so long too. A level for it is no longer, if there is one."""


def is_of_message(error: MqprocError) -> bool:
    """Whether others may well be stored: it is the message, or its topic, that is refused."""
    return isinstance(error, BadRequestError | TooManyQueuesError)


def timed_again(refused: MessageColumns, now_ms: int, precision_ms: int) -> MessageColumns:
    """Messages that were due by the timer, to wait in it for 2 s, or twice as long as before, an hour at most.

    None waits shorter than it is late: some have no room for the count.
    """
    before = _properties_of(refused)
    times = np.maximum(before.numbers(TIMER_ROLL_TIMES), 0)
    due_ms = before.numbers(TIMER_DELIVER_MS)
    late_ms = np.where(due_ms > 0, now_ms - due_ms, 0)
    waits_ms = np.minimum(np.maximum(FIRST_WAIT_MS << np.minimum(times, DOUBLINGS_MAX), late_ms), LONGEST_WAIT_MS)
    out_ms = (now_ms + waits_ms) // precision_ms * precision_ms
    assert refused.queue_ids is not None
    own = zip(out_ms.tolist(), refused.queue_ids.tolist(), (times + 1).tolist(), strict=True)
    pairs = [
        {REAL_TOPIC: refused.topic, REAL_QID: queue_id, TIMER_OUT_MS: at_ms, TIMER_ROLL_TIMES: count}
        for at_ms, queue_id, count in own
    ]
    queue_ids = np.zeros(len(refused), np.int32)
    return _parked(refused, TIMER_TOPIC, queue_ids, _with_pairs(before, pairs))


def delayed_again(refused: MessageColumns, level: int, delays_ms: Sequence[int]) -> MessageColumns:
    """Messages that were due by a delay level, to wait in the next longer one, of an hour at most."""
    before, longer = _properties_of(refused), longer_level(level, delays_ms)
    strings = _with_pairs(before, [{DELAY: longer}] * len(refused))
    if max(map(len, strings)) > record.PROPERTIES_SIZE_SURE:
        longer, strings = level, before.strings()
    return _parked(refused, SCHEDULE_TOPIC, np.full(len(refused), longer - 1, np.int32), strings)


def longer_level(level: int, delays_ms: Sequence[int]) -> int:
    """The next longer level that is not too long; the longest of those where there is none, itself without any."""
    short = [(delay_ms, number) for number, delay_ms in enumerate(delays_ms, 1) if delay_ms <= LONGEST_WAIT_MS]
    own_ms = delays_ms[min(level, len(delays_ms)) - 1]
    longer = [each for each in short if each[0] > own_ms]
    return min(longer)[1] if longer else max(short, default=(0, level))[1]


def _properties_of(columns: MessageColumns) -> PropertyColumns:
    offsets = np.append(0, np.cumsum(columns.property_lengths, dtype=np.int64))
    return PropertyColumns(offsets, columns.properties)


def _with_pairs(before: PropertyColumns, pairs: Sequence[dict[str, object]]) -> list[bytes]:
    """Each string with these pairs behind it, in the place of those of their names; a last one needs room."""
    kept = before.without(*pairs[0]).strings()
    return [_joined(string, own) for string, own in zip(kept, pairs, strict=True)]


def _joined(string: bytes, own: dict[str, object]) -> bytes:
    if string and not string.endswith(PAIR_END.encode()):
        string += PAIR_END.encode()
    new = [f"{name}{NAME_END}{value}{PAIR_END}".encode() for name, value in own.items()]
    longer = string + b"".join(new)
    # The count of the tries, the last of several, only tells how long to wait.
    return longer if len(new) == 1 or len(longer) <= record.PROPERTIES_SIZE_SURE else string + b"".join(new[:-1])


def _parked(refused: MessageColumns, topic: str, queue_ids: NDArray[np.int32], strings: list[bytes]) -> MessageColumns:
    return replace(
        refused,
        topic=topic,
        queue_ids=queue_ids,
        property_lengths=np.fromiter(map(len, strings), np.uint16, len(strings)),
        properties=np.frombuffer(b"".join(strings), np.uint8),
    )
