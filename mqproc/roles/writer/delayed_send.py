"""Delayed, timed and transactional sends: redirection to a system topic.

As in RocketMQ's broker, `REAL_TOPIC` and `REAL_QID` hold the target, and

    delay_level     SCHEDULE_TOPIC_XXXX, queue level − 1, property DELAY. A level above the store's last one counts as
                    the last; a level above 18 is refused
    deliver_at_ms   rmq_sys_wheel_timer, queue 0, properties TIMER_DELIVER_MS and TIMER_OUT_MS, which is rounded down to
                    the timer's precision. A time in the past sends at once
    transaction     RMQ_SYS_TRANS_HALF_TOPIC, queue 0, until the producer commits or rolls back

Messages of one frame go to one queue of their topic: the named one, or the next in rotation.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from mqproc.config.options import SLOT_MESSAGES_MAX, Options
from mqproc.errors import BadLevelError, BadMessageError, BadTimeError
from mqproc.layout import properties
from mqproc.topic_names import HALF_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC
from mqproc.util.units import DELAY_LEVELS, delays_ms_of
from mqproc.wire.operations.log import QUEUE_ANY, QUEUE_COLUMN, AppendRequest

_UNIQUE_BUCKET, _TAG_BUCKET, _KEYS_BUCKET = map(
    properties.bucket, (properties.UNIQ_KEY, properties.TAGS, properties.KEYS)
)
_DELETES = f"{properties.TIMER_DEL_UNIQKEY}{properties.NAME_END}".encode()


def is_delayed(request: AppendRequest, payload: memoryview, now_ms: int) -> bool:
    """Whether the messages must wait. Raises BadLevelError, BadTimeError."""
    if not 0 <= request.delay_level <= DELAY_LEVELS:
        raise BadLevelError(f"delay level {request.delay_level} is out of range: from 0 to {DELAY_LEVELS}")
    if request.deliver_at_ms < 0:
        raise BadTimeError(f"deliver_at_ms = {request.deliver_at_ms} is not a time")
    if request.delay_level > 0 or request.deliver_at_ms > now_ms or request.transaction:
        return True
    if request.deliver_at_ms and _cancels(request, payload):
        raise BadTimeError("the message to cancel is already due")
    return False


def _cancels(request: AppendRequest, payload: memoryview) -> bool:
    gaps = (request.gap_before_unique, request.gap_before_tag, request.gap_before_keys, request.gap_after_keys)
    # Complete property strings are part of the payload.
    return any(_DELETES in part for part in gaps) or (request.properties_bytes > 0 and _DELETES in bytes(payload))


def delayed_request(request: AppendRequest, real_queue_id: int, options: Options, now_ms: int) -> AppendRequest:
    """Redirect a request to the topic where its messages wait; `real_queue_id` is its target.

    Raises BadMessageError, BadTimeError.
    """
    if request.batch:
        raise BadMessageError("delayed messages cannot be a batch")
    if request.delay_level > 0 and request.deliver_at_ms:
        raise BadMessageError("delay_level and deliver_at are both given; use one of them")
    pairs = {properties.REAL_TOPIC: request.topic, properties.REAL_QID: str(real_queue_id)}
    if request.transaction:
        if request.delay_level > 0 or request.deliver_at_ms or request.count != 1:
            raise BadMessageError("a half message must be the only one of its frame, without delay level or deliver_at")
        return _moved(request, HALF_TOPIC, 0, pairs)
    if request.delay_level > 0:
        level = min(request.delay_level, len(delays_ms_of(options.message_delay_level)))
        return _moved(request, SCHEDULE_TOPIC, level - 1, pairs | {properties.DELAY: str(level)})
    pairs[properties.TIMER_DELIVER_MS] = str(request.deliver_at_ms)
    pairs[properties.TIMER_OUT_MS] = str(_timer_slot_ms(request.deliver_at_ms, options, now_ms))
    return _moved(request, TIMER_TOPIC, 0, pairs)


def check_slot(
    request: AppendRequest, payload: memoryview, options: Options, now_ms: int, count_waiting: Callable[[int], int]
) -> None:
    """Raise BadTimeError when the wheel slot of `deliver_at_ms` has no room for the messages.

    `count_waiting` returns the number of messages in the slot of a time in ms; it is called only when there is a limit.
    Cancellations pass.
    """
    limit = options.timer_congest_num_each_slot
    if limit == SLOT_MESSAGES_MAX or request.topic != TIMER_TOPIC:
        return
    slot_ms = _timer_slot_ms(request.deliver_at_ms, options, now_ms)
    waiting = count_waiting(slot_ms)
    if waiting + request.count > limit and not _cancels(request, payload):
        slot = f"the slot of {request.deliver_at_ms} ({options.timer_precision_ms:,} ms wide)"
        raise BadTimeError(f"{slot} holds {waiting:,} messages; timer_congest_num_each_slot = {limit:,}")


def target_queue(request: AppendRequest, queues: int, rotation: int) -> tuple[int, int]:
    """Target queue of the messages, and the next queue in rotation. Raises BadMessageError."""
    if request.queue_id == QUEUE_COLUMN:
        raise BadMessageError("delayed messages of a frame must go to one queue")
    if request.queue_id != QUEUE_ANY:
        return request.queue_id, rotation
    return rotation, (rotation + 1) % queues


def _timer_slot_ms(deliver_at_ms: int, options: Options, now_ms: int) -> int:
    """Time of the wheel slot in which RocketMQ's timer stores a message."""
    limit_s = options.timer_max_delay_sec
    if deliver_at_ms - now_ms > limit_s * 1000:
        ahead_s = (deliver_at_ms - now_ms) / 1000
        raise BadTimeError(f"deliver_at is {ahead_s:,.0f} s ahead; timer_max_delay_sec = {limit_s:,}")
    precision = options.timer_precision_ms
    return (deliver_at_ms - 1) // precision * precision


def _moved(request: AppendRequest, topic: str, queue_id: int, pairs: dict[str, str]) -> AppendRequest:
    gaps = [request.gap_before_unique, request.gap_before_tag, request.gap_before_keys, request.gap_after_keys]
    if request.properties_bytes >= 0:
        # Appended to the given strings, regardless of order.
        gaps = [b"", b"", b"", "".join(map(_pair, pairs.items())).encode()]
    else:
        for pair in sorted(pairs.items(), key=lambda pair: properties.bucket(pair[0])):
            place = properties.bucket(pair[0])
            gap = (place > _UNIQUE_BUCKET) + (place >= _TAG_BUCKET) + (place >= _KEYS_BUCKET)
            gaps[gap] = _with_pair(gaps[gap], pair)
    return msgspec.structs.replace(
        request,
        topic=topic,
        queue_id=queue_id,
        gap_before_unique=gaps[0],
        gap_before_tag=gaps[1],
        gap_before_keys=gaps[2],
        gap_after_keys=gaps[3],
    )


def _pair(pair: tuple[str, str]) -> str:
    return f"{pair[0]}{properties.NAME_END}{pair[1]}{properties.PAIR_END}"


def _bucket(encoded_pair: bytes) -> int:
    return properties.bucket(encoded_pair.partition(properties.NAME_END.encode())[0].decode("utf-8", "replace"))


def _with_pair(gap: bytes, pair: tuple[str, str]) -> bytes:
    """Insert a property into encoded ones at its position in RocketMQ's order."""
    new = _pair(pair).encode()
    if not gap:
        return new
    end = properties.PAIR_END.encode()
    pairs: list[bytes] = [part + end for part in gap.split(end)[:-1]]
    parts = [*pairs, new]
    parts.sort(key=_bucket)
    return b"".join(parts)
