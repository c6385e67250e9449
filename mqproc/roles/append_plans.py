"""From an append request to a plan for the engine: topic, queues, columns, constant properties.

A client's next frame has most often the shape that its last one had: a shape that was checked is kept, and found again
by what the request has of it. What is left for each frame are its columns, its ids and its times.
"""

from __future__ import annotations

import operator
import re
from typing import Any, Final

import msgspec
import numpy as np

from mqproc.errors import BadMessageError, BadPropertyError, NoSuchQueueError
from mqproc.kernels.append_options import COUNTERS
from mqproc.kernels.append_run import HAS_BORN, HAS_FLAGS, HAS_QUEUES, MESSAGES_MAX
from mqproc.kernels.hashing import java_hash_utf8, queue_of_hash
from mqproc.layout import record
from mqproc.names import TIMER_TOPIC
from mqproc.roles.constant_properties import UNIQUE_PREFIX_DIGITS, ConstantProperties, constant_properties, gaps_of
from mqproc.roles.open_topics import OpenTopic, OpenTopics
from mqproc.roles.parking import check_slot, parked, real_queue, waits
from mqproc.store.frames import AppendPlan, FrameShape
from mqproc.store.topics import check_sendable
from mqproc.wire.operations import COLUMN_ABSENT, QUEUE_ANY, QUEUE_COLUMN, AppendRequest

MESSAGES_PER_FRAME_MAX: Final = MESSAGES_MAX
# Shapes that are kept, and the bytes of tag and constant properties that one of them has at most.
SHAPES_MAX: Final = 4096
SHAPE_TEXT_MAX: Final = 512
_SIGNED_FIELDS: Final = (
    *(("flag", 32), ("sys_flag", 32), ("reconsume_times", 32)),
    *(("born_timestamp_ms", 64), ("prepared_transaction_offset", 64)),
)
# Where these stand among the columns.
_QUEUES, _SHARDING_LENGTHS, _SHARDING_KEYS = 9, 12, 13
# The columns behind the tags' when there is none of them.
_NO_OTHERS: tuple[int, ...] = (-1,) * 8
_is_unique_prefix = re.compile(rf"[0-9A-F]{{{UNIQUE_PREFIX_DIGITS}}}").fullmatch
_sizes_of = operator.attrgetter(
    "count", "bodies_bytes", "keys_bytes", "tags_bytes", "properties_bytes", "sharding_bytes"
)
_shape_fields = operator.attrgetter(
    "topic",
    "queue_id",
    "tag",
    "flag",
    "sys_flag",
    "batch",
    "born_host",
    "has_born",
    "has_queues",
    "has_flags",
    "has_prepared",
    "delay_level",
    "deliver_at_ms",
    "transaction",
    "gap_before_unique",
    "gap_before_tag",
    "gap_before_keys",
    "gap_after_keys",
)


class KeptShape(msgspec.Struct, eq=False):
    """A shape that was checked, with its topic. `more_columns`: the payload has others than bodies, keys and tags.

    `sizes` are those of its last frame's columns and of its payload, `columns` where each of them began.
    """

    shape: FrameShape
    topic: OpenTopic
    more_columns: bool
    sizes: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()

    def columns_of(self, request: AppendRequest, payload_size: int) -> tuple[int, ...]:
        """Where each column of a frame begins. Raises BadMessageError when they do not fill the payload."""
        sizes = *_sizes_of(request), payload_size
        if sizes != self.sizes:
            self.columns = _columns(request, payload_size, self.more_columns)
            self.sizes = sizes
        return self.columns


class AppendPlans:
    """Makes the plans of one writer."""

    def __init__(self, topics: OpenTopics) -> None:
        self._topics = topics
        self._changes = topics.changes
        self._kept: dict[tuple[Any, ...], KeptShape] = {}

    def plan(
        self, request: AppendRequest, payload: memoryview, now_ms: int, *, own: bool = False
    ) -> tuple[AppendPlan, OpenTopic]:
        """Check a request and make its plan; `own` for one of the group's own roles.

        With it comes the topic whose round the plan's rotation is of: the request's, also when its messages wait
        elsewhere first. Raises BadRequestError and its kin naming value and limit.
        """
        if not 1 <= request.count <= MESSAGES_PER_FRAME_MAX:
            raise BadMessageError(f"count = {request.count:,} is out of range: from 1 to {MESSAGES_PER_FRAME_MAX:,}")
        _check_numbers(request)
        if own:
            return self._plan_own(request, payload)
        if self._changes != self._topics.changes:
            self._changes = self._topics.changes
            self._kept.clear()
        key = (
            _shape_fields(request),
            request.unique_prefix != "",
            request.tags_bytes >= 0,
            request.properties_bytes >= 0,
            request.sharding_bytes >= 0,
        )
        kept = self._kept.get(key)
        if kept is None:
            return self._plan_new(request, payload, now_ms, key)
        columns, topic = kept.columns_of(request, len(payload)), kept.topic
        return _plan(request, payload, columns, kept.shape, topic.rotation), topic

    def _plan_own(self, request: AppendRequest, payload: memoryview) -> tuple[AppendPlan, OpenTopic]:
        """The group's own roles may write to the system's topics, which are made as wide as that takes."""
        _check_host(request)
        constant = constant_properties(request)
        columns = _columns(request, len(payload), _has_more_columns(request))
        topic = self._topics.find_own(request.topic, _queues_named(request, columns, payload))
        _check_queue(request, topic)
        shape = _shape(request, constant, topic, request.sys_flag)
        shape.copies = True
        shape.reconsume_times = request.reconsume_times
        shape.prepared_transaction_offset = request.prepared_transaction_offset
        return _plan(request, payload, columns, shape, topic.rotation), topic

    def _plan_new(
        self, request: AppendRequest, payload: memoryview, now_ms: int, key: tuple[Any, ...]
    ) -> tuple[AppendPlan, OpenTopic]:
        """The plan of a client's request whose shape is not kept; then it is, if it may be."""
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
        if has_time and waits(request, payload, now_ms):
            return self._plan_parked(request, payload, columns, topic, now_ms), topic
        shape = _shape(request, constant, topic, request.sys_flag & record.SYS_FLAG_BODY)
        if not has_time and _may_be_kept(request):
            if len(self._kept) >= SHAPES_MAX:
                self._kept.clear()
            self._kept[key] = KeptShape(shape, topic, more_columns)
            shape.lasting = True
            shape.columns = _column_bits(request)
        if request.deliver_at_ms:
            shape.waited = self._waited(request, shape)
        return _plan(request, payload, columns, shape, topic.rotation), topic

    def _waited(self, request: AppendRequest, shape: FrameShape) -> FrameShape | None:
        """The shape of these messages when they were sent before their time; None where nobody looks for repeats."""
        topics = self._topics
        if not topics.options.dedupe_window_messages or topics.topics.get(TIMER_TOPIC) is None:
            return None
        waiting = topics.find_own(TIMER_TOPIC)
        return msgspec.structs.replace(
            shape,
            topic_block=waiting.block,
            queue_numbers=waiting.queue_numbers,
            real_topic=request.topic.encode(),
            real_queues=shape.queue_numbers,
        )

    def _plan_parked(
        self, request: AppendRequest, payload: memoryview, columns: tuple[int, ...], topic: OpenTopic, now_ms: int
    ) -> AppendPlan:
        """The plan of a request whose messages wait in another topic first."""
        topics, queues = self._topics, len(topic.queue_numbers)
        real_queue_id, rotation = _sharded_queue(request, columns, payload, queues), topic.rotation
        if real_queue_id < 0:
            real_queue_id, rotation = real_queue(request, queues, rotation)
        moved = parked(request, real_queue_id, topics.options, now_ms)
        check_slot(moved, payload, topics.options, now_ms, topics.waiting_in)
        waiting = topics.find_own(moved.topic)
        shape = _shape(moved, constant_properties(moved, parked=True), waiting, moved.sys_flag & record.SYS_FLAG_BODY)
        shape.real_topic, shape.real_queues = request.topic.encode(), topic.queue_numbers
        return _plan(moved, payload, columns, shape, rotation)


def _check_queue(request: AppendRequest, topic: OpenTopic) -> None:
    queues = len(topic.queue_numbers)
    if not QUEUE_COLUMN <= request.queue_id < queues:
        raise NoSuchQueueError(f"queue id {request.queue_id}; topic has {queues} queues")


def _may_be_kept(request: AppendRequest) -> bool:
    """Whether all that the shape is found by was checked, and is short."""
    size = len(request.tag.encode()) + sum(map(len, gaps_of(request)))
    is_unchecked = request.properties_bytes >= 0 or (request.tags_bytes >= 0 and request.tag)
    return size <= (0 if is_unchecked else SHAPE_TEXT_MAX)


def _has_more_columns(request: AppendRequest) -> bool:
    """Whether the payload has other columns than those of bodies, keys and tags."""
    has_numbers = request.has_born or request.has_queues or request.has_flags or request.has_prepared
    return has_numbers or request.properties_bytes >= 0 or request.sharding_bytes >= 0


def _column_bits(request: AppendRequest) -> int:
    bits = (HAS_BORN, request.has_born), (HAS_QUEUES, request.has_queues), (HAS_FLAGS, request.has_flags)
    return sum(bit for bit, is_there in bits if is_there)


def _check_numbers(request: AppendRequest) -> None:
    """Raise BadMessageError for a number that has no room where it is stored, or as an id."""
    for name, bits in _SIGNED_FIELDS:
        value = getattr(request, name)
        if not -1 << (bits - 1) <= value < 1 << (bits - 1):
            raise BadMessageError(f"{name} = {value} is no number of {bits} bits")
    if not 0 <= request.unique_counter < COUNTERS:
        raise BadMessageError(f"unique_counter = {request.unique_counter} is out of range: from 0 to {COUNTERS - 1:,}")


def _check_host(request: AppendRequest) -> None:
    if len(request.born_host) not in (record.HOST_V4_SIZE, record.HOST_V6_SIZE):
        raise BadMessageError(f"born_host has {len(request.born_host)} bytes; it takes 8 or 20")


def _shape(request: AppendRequest, constant: ConstantProperties, topic: OpenTopic, sys_flag: int) -> FrameShape:
    has_prefix = request.unique_prefix != "" and request.properties_bytes < 0
    return FrameShape(
        magic=topic.magic,
        topic_block=topic.block,
        queue_numbers=topic.queue_numbers,
        fixed_queue=request.queue_id,
        parts=constant.parts,
        born_host=request.born_host,
        prefix_size=UNIQUE_PREFIX_DIGITS if has_prefix else 0,
        sharding_at=constant.sharding_at,
        flag=request.flag,
        sys_flag=sys_flag,
        batch=request.batch,
    )


def _plan(
    request: AppendRequest, payload: memoryview, columns: tuple[int, ...], shape: FrameShape, rotation: int
) -> AppendPlan:
    prefix = request.unique_prefix
    if prefix and shape.prefix_size and not _is_unique_prefix(prefix):
        raise BadPropertyError(f"unique_prefix {prefix!r} is not {UNIQUE_PREFIX_DIGITS} hex digits")
    return AppendPlan(
        shape,
        np.frombuffer(payload, np.uint8),
        request.count,
        columns,
        rotation,
        request.born_timestamp_ms,
        prefix.encode() if shape.prefix_size else b"",
        request.unique_counter if prefix else -1,
    )


def _sharded_queue(request: AppendRequest, columns: tuple[int, ...], payload: memoryview, queues: int) -> int:
    """The queue of the one sharding key that messages have which wait, −1 without a key. Raises BadMessageError."""
    if request.sharding_bytes <= 0:
        return -1
    lengths_at, keys_at = columns[_SHARDING_LENGTHS], columns[_SHARDING_KEYS]
    lengths = np.frombuffer(payload, "<u2", request.count, lengths_at)
    size = int(lengths[0])
    keys = payload[keys_at : keys_at + request.sharding_bytes]
    if (lengths != size).any() or bytes(keys) != bytes(keys[:size]) * request.count:
        raise BadMessageError("messages of a frame that wait for their time have one sharding key")
    return int(queue_of_hash(java_hash_utf8(np.frombuffer(keys, np.uint8), 0, size, 0), queues))


def _queues_named(request: AppendRequest, columns: tuple[int, ...], payload: memoryview) -> int:
    """How many queues a topic needs that has all that the request names."""
    if request.queue_id != QUEUE_COLUMN:
        return max(request.queue_id + 1, 1)
    return int(np.frombuffer(payload, "<i4", request.count, columns[_QUEUES]).max()) + 1


def _columns(request: AppendRequest, payload_size: int, more_columns: bool) -> tuple[int, ...]:
    """Where each column begins, in the kernel's order. Raises BadMessageError when they do not fill the payload."""
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
    """Where the columns behind the tags end, and where each begins. Raises BadMessageError."""
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
