"""Plans of appends: topic, queues, columns and constant properties of a request.

Consecutive frames of a client mostly differ only in their columns, ids and times. A template that was checked is cached
under the other fields of the request, so that later frames skip these checks.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from mqproc.config.options import SLOT_MESSAGES_MAX, Options
from mqproc.errors import (
    BadLevelError,
    BadMessageError,
    BadPropertyError,
    BadTimeError,
    NoSuchQueueError,
    PropertiesTooLargeError,
)
from mqproc.kernels import append_messages
from mqproc.kernels.append_run import COUNTERS, HAS_BORN, HAS_FLAGS, HAS_QUEUES, MESSAGES_MAX, PREFIX_DIGITS
from mqproc.kernels.hashing import java_hash_utf8, queue_of_hash
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.layout import properties, record
from mqproc.roles.writer.topics import OpenTopic, WriterTopics
from mqproc.store.commitlog.append_templates import AppendPlan, AppendTemplate
from mqproc.store.topics import check_sendable
from mqproc.topic_names import HALF_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC
from mqproc.types import Message
from mqproc.util.units import DELAY_LEVELS, delays_ms_of
from mqproc.wire.operations import COLUMN_ABSENT, QUEUE_ANY, QUEUE_COLUMN, AppendRequest

# Delayed, timed and transactional sends: redirection to a system topic.
#
# As in RocketMQ's broker, `REAL_TOPIC` and `REAL_QID` hold the target, and
#
#     delay_level     SCHEDULE_TOPIC_XXXX, queue level − 1, property DELAY. A level above the store's last one counts as
#                     the last; a level above 18 is refused
#     deliver_at_ms   rmq_sys_wheel_timer, queue 0, properties TIMER_DELIVER_MS and TIMER_OUT_MS, which is rounded down
#                     to the timer's precision. A time in the past sends at once
#     transaction     RMQ_SYS_TRANS_HALF_TOPIC, queue 0, until the producer commits or rolls back
#
# Messages of one frame go to one queue of their topic: the named one, or the next in rotation.

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
        return _redirect(request, HALF_TOPIC, 0, pairs)
    if request.delay_level > 0:
        level = min(request.delay_level, len(delays_ms_of(options.message_delay_level)))
        return _redirect(request, SCHEDULE_TOPIC, level - 1, pairs | {properties.DELAY: str(level)})
    pairs[properties.TIMER_DELIVER_MS] = str(request.deliver_at_ms)
    pairs[properties.TIMER_OUT_MS] = str(_timer_slot_ms(request.deliver_at_ms, options, now_ms))
    return _redirect(request, TIMER_TOPIC, 0, pairs)


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


def _redirect(request: AppendRequest, topic: str, queue_id: int, pairs: dict[str, str]) -> AppendRequest:
    gaps = [request.gap_before_unique, request.gap_before_tag, request.gap_before_keys, request.gap_after_keys]
    if request.properties_bytes >= 0:
        # Append to the given strings; the order does not matter.
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
    return properties.bucket(encoded_pair.partition(_NAME_END)[0].decode("utf-8", "replace"))


def _with_pair(gap: bytes, pair: tuple[str, str]) -> bytes:
    """Insert a property into encoded properties, at its position in RocketMQ's order."""
    new = _pair(pair).encode()
    if not gap:
        return new
    pairs: list[bytes] = [part + _PAIR_END for part in gap.split(_PAIR_END)[:-1]]
    parts: list[bytes] = sorted([*pairs, new], key=_bucket)
    return b"".join(parts)


_UNIQUE_NAME = f"{properties.UNIQ_KEY}{properties.NAME_END}".encode()
_NAME_END = properties.NAME_END.encode()
_PAIR_END = properties.PAIR_END.encode()
_SHARDING_BUCKET = properties.bucket(properties.SHARDING_KEY)
_SEPARATORS = (properties.NAME_END, properties.PAIR_END)
_are_pairs = re.compile(rb"(?:[^\x01\x02]+\x01[^\x01\x02]*\x02)+").fullmatch
gaps_of: Callable[[AppendRequest], tuple[bytes, bytes, bytes, bytes]] = operator.attrgetter(
    "gap_before_unique", "gap_before_tag", "gap_before_keys", "gap_after_keys"
)
# Limits of the cache: templates, and bytes of tag and constant properties of one template.
TEMPLATES_MAX: Final = 4096
TEMPLATE_TEXT_MAX: Final = 512
_SIGNED_FIELDS: Final = (
    *(("flag", 32), ("sys_flag", 32), ("reconsume_times", 32)),
    *(("born_timestamp_ms", 64), ("prepared_transaction_offset", 64)),
)
# Positions among the columns.
_QUEUES, _SHARDING_LENGTHS, _SHARDING_KEYS = 9, 12, 13
# Offsets of the columns after the tags when none of them is present.
_NO_OTHERS: tuple[int, ...] = (-1,) * 8
_is_unique_prefix = re.compile(rf"[0-9A-F]{{{PREFIX_DIGITS}}}").fullmatch
_sizes_of = operator.attrgetter(
    "count", "bodies_bytes", "keys_bytes", "tags_bytes", "properties_bytes", "sharding_bytes"
)
_template_fields = operator.attrgetter(
    *"""
        topic queue_id tag flag sys_flag batch born_host has_born has_queues has_flags has_prepared delay_level
        deliver_at_ms transaction gap_before_unique gap_before_tag gap_before_keys gap_after_keys
    """.split()
)


class ConstantProperties(NamedTuple):
    """Encoded properties around unique id, tag and keys; position of a sharding key."""

    parts: tuple[bytes, bytes, bytes, bytes]
    sharding_at: int


def constant_properties(request: AppendRequest, *, delayed: bool = False) -> ConstantProperties:
    """Check and encode the constant properties of a request, `delayed` for a redirected one.

    To complete property strings only the properties that a delayed message needs are appended.
    Raises BadPropertyError, PropertiesTooLargeError.
    """
    gaps = gaps_of(request)
    before_id, before_tag, before_keys, after_keys = gaps
    if request.properties_bytes >= 0:
        return ConstantProperties((b"", b"", b"", after_keys if delayed else b""), 0)
    for gap in gaps:
        if gap and not _are_pairs(gap):
            raise BadPropertyError(f"properties {gap[:64]!r} are not pairs of name, byte 1, value, byte 2")
    sharding_at = _sharding_at(before_id) if request.sharding_bytes >= 0 else 0
    has_id = request.unique_prefix != ""
    if has_id:
        before_id += _UNIQUE_NAME
        before_tag = _PAIR_END + before_tag
    # A single tag is ignored, whatever its size, when there is a column of tags.
    if request.tag and request.tags_bytes < 0:
        if any(separator in request.tag for separator in _SEPARATORS):
            raise BadPropertyError(f"property {properties.TAGS}: its value has a separator byte (1 or 2)")
        before_tag += f"{properties.TAGS}{properties.NAME_END}{request.tag}{properties.PAIR_END}".encode()
    size = len(before_id) + PREFIX_DIGITS * has_id + len(before_tag) + len(before_keys) + len(after_keys)
    if size > record.PROPERTIES_SIZE_MAX:
        raise PropertiesTooLargeError(f"properties of {size:,} bytes; the limit is {record.PROPERTIES_SIZE_MAX:,}")
    return ConstantProperties((before_id, before_tag, before_keys, after_keys), sharding_at)


def _sharding_at(before_id: bytes) -> int:
    """Offset of a sharding key in RocketMQ's order among the first constant properties."""
    pairs = before_id.split(_PAIR_END)[:-1]
    return sum(len(pair) + 1 for pair in pairs if _bucket(pair) < _SHARDING_BUCKET)


class CheckedTemplate(msgspec.Struct, eq=False):
    """A checked template. `more_columns`: there are columns other than bodies, keys and tags.

    `sizes`: sizes of the last frame's columns and payload. `columns`: offsets of these columns.
    """

    template: AppendTemplate
    topic: OpenTopic
    more_columns: bool
    sizes: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()

    def columns_of(self, request: AppendRequest, payload_size: int) -> tuple[int, ...]:
        """Offsets of a frame's columns. Raises BadMessageError when they do not fill the payload."""
        sizes = *_sizes_of(request), payload_size
        if sizes != self.sizes:
            self.columns = _columns(request, payload_size, self.more_columns)
            self.sizes = sizes
        return self.columns


class AppendPlanner:
    """Plans the appends of one writer."""

    def __init__(self, topics: WriterTopics) -> None:
        self._topics = topics
        self._changes = topics.changes
        self._checked: dict[tuple[Any, ...], CheckedTemplate] = {}

    def plan(
        self, request: AppendRequest, payload: memoryview, now_ms: int, *, own: bool = False
    ) -> tuple[AppendPlan, OpenTopic]:
        """Check a request and plan it; `own` for a request of the group's own roles.

        Also returns the topic whose rotation the plan advances: the requested topic, even for delayed messages. Raises
        BadRequestError and its subclasses, with value and limit.
        """
        if not 1 <= request.count <= MESSAGES_MAX:
            raise BadMessageError(f"count = {request.count:,} is out of range: from 1 to {MESSAGES_MAX:,}")
        _check_numbers(request)
        if own:
            return self._plan_internal(request, payload)
        if self._changes != self._topics.changes:
            self._changes = self._topics.changes
            self._checked.clear()
        key = (
            _template_fields(request),
            request.unique_prefix != "",
            request.tags_bytes >= 0,
            request.properties_bytes >= 0,
            request.sharding_bytes >= 0,
        )
        kept = self._checked.get(key)
        if kept is None:
            return self._plan_new(request, payload, now_ms, key)
        columns, topic = kept.columns_of(request, len(payload)), kept.topic
        return _plan(request, payload, columns, kept.template, topic.rotation), topic

    def _plan_internal(self, request: AppendRequest, payload: memoryview) -> tuple[AppendPlan, OpenTopic]:
        """Plan a request of the group's own roles, which may write to system topics and widen them."""
        _check_host(request)
        constant = constant_properties(request)
        columns = _columns(request, len(payload), _has_more_columns(request))
        topic = self._topics.find_internal(request.topic, _queues_named(request, columns, payload))
        _check_queue(request, topic)
        template = _template(request, constant, topic, request.sys_flag)
        template.copies = True
        template.reconsume_times = request.reconsume_times
        template.prepared_transaction_offset = request.prepared_transaction_offset
        return _plan(request, payload, columns, template, topic.rotation), topic

    def _plan_new(
        self, request: AppendRequest, payload: memoryview, now_ms: int, key: tuple[Any, ...]
    ) -> tuple[AppendPlan, OpenTopic]:
        """Plan a client's request whose template is not cached, and cache it if allowed."""
        check_sendable(request.topic)
        if request.has_prepared:
            raise BadMessageError("has_prepared is for the group's own roles")
        _check_host(request)
        constant = constant_properties(request)
        more_columns = _has_more_columns(request)
        columns = _columns(request, len(payload), more_columns)
        topic = self._topics.find(request.topic)
        self._topics.check_writable(request.topic)
        _check_queue(request, topic)
        has_time = request.delay_level or request.deliver_at_ms or request.transaction
        if has_time and is_delayed(request, payload, now_ms):
            return self._plan_delayed(request, payload, columns, topic, now_ms), topic
        template = _template(request, constant, topic, request.sys_flag & record.SYS_FLAG_BODY)
        if not has_time and _is_cacheable(request):
            if len(self._checked) >= TEMPLATES_MAX:
                self._checked.clear()
            self._checked[key] = CheckedTemplate(template, topic, more_columns)
            template.reusable = True
            template.columns = _column_bits(request)
        if request.deliver_at_ms:
            template.delayed_template = self._waiting_template(request, template)
        return _plan(request, payload, columns, template, topic.rotation), topic

    def _waiting_template(self, request: AppendRequest, template: AppendTemplate) -> AppendTemplate | None:
        """Template under which earlier timed copies are duplicates; None without deduplication."""
        topics = self._topics
        if not topics.options.dedupe_window_messages or topics.topics.get(TIMER_TOPIC) is None:
            return None
        waiting = topics.find_internal(TIMER_TOPIC)
        return msgspec.structs.replace(
            template,
            topic_block=waiting.block,
            queue_numbers=waiting.queue_numbers,
            real_topic=request.topic.encode(),
            real_queues=template.queue_numbers,
        )

    def _plan_delayed(
        self, request: AppendRequest, payload: memoryview, columns: tuple[int, ...], topic: OpenTopic, now_ms: int
    ) -> AppendPlan:
        """Plan a request whose messages wait in a system topic first."""
        topics, queues = self._topics, topic.write_queues
        real_queue_id, rotation = _sharded_queue(request, columns, payload, queues), topic.rotation
        if real_queue_id < 0:
            real_queue_id, rotation = target_queue(request, queues, rotation)
        moved = delayed_request(request, real_queue_id, topics.options, now_ms)
        check_slot(moved, payload, topics.options, now_ms, topics.count_waiting)
        waiting = topics.find_internal(moved.topic)
        template = _template(
            moved, constant_properties(moved, delayed=True), waiting, moved.sys_flag & record.SYS_FLAG_BODY
        )
        template.real_topic, template.real_queues = request.topic.encode(), topic.queue_numbers
        return _plan(moved, payload, columns, template, rotation)


def _check_queue(request: AppendRequest, topic: OpenTopic) -> None:
    queues = len(topic.queue_numbers)
    if not QUEUE_COLUMN <= request.queue_id < queues:
        raise NoSuchQueueError(f"queue id {request.queue_id}; topic has {queues} queues")


def _is_cacheable(request: AppendRequest) -> bool:
    """Whether all fields of the cache key were checked and are short."""
    size = len(request.tag.encode()) + sum(map(len, gaps_of(request)))
    is_unchecked = request.properties_bytes >= 0 or (request.tags_bytes >= 0 and request.tag)
    return size <= (0 if is_unchecked else TEMPLATE_TEXT_MAX)


def _has_more_columns(request: AppendRequest) -> bool:
    """Whether the payload has columns other than bodies, keys and tags."""
    has_numbers = request.has_born or request.has_queues or request.has_flags or request.has_prepared
    return has_numbers or request.properties_bytes >= 0 or request.sharding_bytes >= 0


def _column_bits(request: AppendRequest) -> int:
    bits = (HAS_BORN, request.has_born), (HAS_QUEUES, request.has_queues), (HAS_FLAGS, request.has_flags)
    return sum(bit for bit, is_there in bits if is_there)


def _check_numbers(request: AppendRequest) -> None:
    """Raise BadMessageError for a number outside its stored width or the range of ids."""
    for name, bits in _SIGNED_FIELDS:
        value = getattr(request, name)
        if not -1 << (bits - 1) <= value < 1 << (bits - 1):
            raise BadMessageError(f"{name} = {value} does not fit in {bits} bits")
    if not 0 <= request.unique_counter < COUNTERS:
        raise BadMessageError(f"unique_counter = {request.unique_counter} is out of range: from 0 to {COUNTERS - 1:,}")


def _check_host(request: AppendRequest) -> None:
    if len(request.born_host) not in (record.HOST_V4_SIZE, record.HOST_V6_SIZE):
        raise BadMessageError(f"born_host has {len(request.born_host)} bytes; it takes 8 or 20")


def _template(request: AppendRequest, constant: ConstantProperties, topic: OpenTopic, sys_flag: int) -> AppendTemplate:
    queues = topic.write_queues if request.queue_id == QUEUE_ANY else len(topic.queue_numbers)
    has_prefix = request.unique_prefix != "" and request.properties_bytes < 0
    return AppendTemplate(
        magic=topic.magic,
        topic_block=topic.block,
        queue_numbers=topic.queue_numbers,
        fixed_queue=request.queue_id,
        parts=constant.parts,
        born_host=request.born_host,
        prefix_size=PREFIX_DIGITS if has_prefix else 0,
        sharding_at=constant.sharding_at,
        flag=request.flag,
        sys_flag=sys_flag,
        batch=request.batch,
        queues=queues,
    )


def _plan(
    request: AppendRequest, payload: memoryview, columns: tuple[int, ...], template: AppendTemplate, rotation: int
) -> AppendPlan:
    prefix = request.unique_prefix
    if prefix and template.prefix_size and not _is_unique_prefix(prefix):
        raise BadPropertyError(f"unique_prefix {prefix!r} is not {PREFIX_DIGITS} hex digits")
    return AppendPlan(
        template,
        np.frombuffer(payload, np.uint8),
        request.count,
        columns,
        rotation,
        request.born_timestamp_ms,
        prefix.encode() if template.prefix_size else b"",
        request.unique_counter if prefix else -1,
    )


def _sharded_queue(request: AppendRequest, columns: tuple[int, ...], payload: memoryview, queues: int) -> int:
    """Queue of the common sharding key, −1 without one. Raises BadMessageError."""
    if request.sharding_bytes <= 0:
        return -1
    lengths_at, keys_at = columns[_SHARDING_LENGTHS], columns[_SHARDING_KEYS]
    lengths = np.frombuffer(payload, "<u2", request.count, lengths_at)
    size = int(lengths[0])
    keys = payload[keys_at : keys_at + request.sharding_bytes]
    if (lengths != size).any() or bytes(keys) != bytes(keys[:size]) * request.count:
        raise BadMessageError("delayed messages of a frame must have one sharding key")
    return int(queue_of_hash(java_hash_utf8(np.frombuffer(keys, np.uint8), 0, size, 0), queues))


def _queues_named(request: AppendRequest, columns: tuple[int, ...], payload: memoryview) -> int:
    """Number of queues that the topic needs for the queue ids in the request."""
    if request.queue_id != QUEUE_COLUMN:
        return max(request.queue_id + 1, 1)
    return int(np.frombuffer(payload, "<i4", request.count, columns[_QUEUES]).max()) + 1


def _columns(request: AppendRequest, payload_size: int, more_columns: bool) -> tuple[int, ...]:
    """Offsets of the columns. Raises BadMessageError when they do not fill the payload."""
    sizes = count, bodies_bytes, keys_bytes, tags_bytes, _, _ = _sizes_of(request)
    if bodies_bytes < 0 or min(sizes) < COLUMN_ABSENT:
        raise BadMessageError(f"columns of {sizes[1:]} bytes")
    if request.has_queues != (request.queue_id == QUEUE_COLUMN):
        raise BadMessageError(f"has_queues is {request.has_queues} and the queue id is {request.queue_id}")
    key_lengths = keys = tag_lengths = tags = -1
    end = 4 * count + bodies_bytes
    if keys_bytes >= 0:
        key_lengths, keys = end, end + 2 * count
        end = keys + keys_bytes
    if tags_bytes >= 0:
        tag_lengths, tags = end, end + 2 * count
        end = tags + tags_bytes
    others = _NO_OTHERS
    if more_columns:
        end, others = _other_columns(request, end)
    if end != payload_size:
        raise BadMessageError(f"the columns take {end:,} bytes, the payload has {payload_size:,}")
    return 0, 4 * count, key_lengths, keys, tag_lengths, tags, *others


def _other_columns(request: AppendRequest, at: int) -> tuple[int, tuple[int, ...]]:
    """End of the columns after the tags, and their offsets. Raises BadMessageError."""
    count = request.count
    if request.sharding_bytes >= 0 and request.queue_id != QUEUE_ANY:
        raise BadMessageError("messages have a sharding key or a queue, not both")
    property_lengths = properties_at = born = queues = flags = prepared = sharding_lengths = sharding_keys = -1
    if request.properties_bytes >= 0:
        property_lengths, properties_at = at, at + 2 * count
        at = properties_at + request.properties_bytes
    if request.has_born:
        born, at = at, at + 8 * count
    if request.has_queues:
        queues, at = at, at + 4 * count
    if request.has_flags:
        flags, at = at, at + 4 * count
    if request.has_prepared:
        prepared, at = at, at + 8 * count
    if request.sharding_bytes >= 0:
        sharding_lengths, sharding_keys = at, at + 2 * count
        at = sharding_keys + request.sharding_bytes
    return at, (property_lengths, properties_at, born, queues, flags, prepared, sharding_lengths, sharding_keys)


# Messages in MessagePack

# Columns of frames up to this size are written to one buffer, whose pages stay in memory.
_COLUMNS_BYTES: Final = 4 << 20
_MESSAGE_FIELDS: Final = Message.__struct_fields__
assert len(_MESSAGE_FIELDS) == append_messages.FIELDS
_REASONS: Final = {
    append_messages.NO_ARRAY: "no array of the fields of Message",
    append_messages.TRAILING_BYTES: "followed by further bytes",
    append_messages.MIXED_QUEUES: "it names a queue and others do not, or a queue beside a sharding key",
}


class ColumnWriter:
    """Makes columns of requests whose payload is an array of messages."""

    def __init__(self) -> None:
        self._buffer = np.empty(_COLUMNS_BYTES, np.uint8)
        self._found = np.zeros(append_messages.FOUND_WORDS, np.int64)

    def of(self, request: AppendRequest, payload: memoryview) -> tuple[AppendRequest, memoryview]:
        """The request and payload with columns, valid until the next call. Raises BadMessageError."""
        count, found = request.count, self._found
        if not (1 <= count <= MESSAGES_MAX and count <= len(payload)) or not request.topic:
            raise BadMessageError(f"{count:,} messages for topic {request.topic!r} in {len(payload):,} bytes")
        data, topic = as_kernel_array(payload), as_kernel_array(request.topic.encode())
        refused = append_messages.check_messages(data, len(payload), count, topic, len(topic), found)
        if refused != append_messages.MESSAGES_OK:
            reason = _REASONS.get(refused) or f"{_MESSAGE_FIELDS[refused - append_messages.ANY_FIELD]} needs columns"
            raise BadMessageError(f"message {found[append_messages.FAILED_MESSAGE]}: {reason}")
        size = int(found[append_messages.COLUMNS_SIZE])
        columns = self._buffer if size <= _COLUMNS_BYTES else np.empty(size, np.uint8)
        append_messages.write_columns(data, len(payload), count, request.born_timestamp_ms, found, columns)
        has_queues = bool(found[append_messages.QUEUES_GIVEN])
        changed = msgspec.structs.replace(
            request,
            queue_id=QUEUE_COLUMN if has_queues else QUEUE_ANY,
            bodies_bytes=int(found[append_messages.BODIES_SIZE]),
            keys_bytes=int(found[append_messages.KEYS_SIZE]),
            tags_bytes=int(found[append_messages.TAGS_SIZE]),
            sharding_bytes=int(found[append_messages.SHARDING_SIZE]),
            properties_bytes=COLUMN_ABSENT,
            has_born=bool(found[append_messages.BORN_GIVEN]),
            has_queues=has_queues,
            has_flags=bool(found[append_messages.FLAGS_GIVEN]),
            has_prepared=False,
        )
        return changed, columns[:size].data
