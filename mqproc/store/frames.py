"""Append frames as the engine takes them: the shape that frames of one producer have in common, and a frame of it."""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from mqproc.config import Options
from mqproc.kernels import append_frame as frame
from mqproc.layout import record

BODY_SIZE_ANY: Final = (1 << 31) - 1
"""No body is larger."""


class RenderedShape(NamedTuple):
    """What an appender with these options makes of a shape, once.

    `before_id` are the bytes before a unique id's prefix: the fixed part of each record, what differs between records
    as zeros, the topic, and constant properties; `behind_id` are those behind it. `constants` are words of the kernel's
    state.
    """

    options: Options
    before_id: bytes
    behind_id: bytes
    constants: bytes


class FrameShape(msgspec.Struct, eq=False):
    """What depends neither on a frame's messages nor on when it is sent.

    `magic` and `topic_block` are `topic_fields` of the topic; `queue_numbers` int64[queues of the topic]. `fixed_queue`
    is a queue id, −1 = go round, −2 = a column names the queues. `parts` are constant properties: before the unique id,
    between it and the tag, before and behind the keys, see `kernels.append`; the first `prefix_size` characters of a
    unique id are the frame's. `sharding_at` is where in the first part a sharding key stands. `lasting`: frames to come
    may have it too; then `columns` are bits of `kernels.append_run`. `copies`: its messages are made of ones that the
    store has taken, perhaps when `max_message_size` was larger, and are taken again. `real_topic` is the name of the
    topic that messages go to which wait in this one first, `real_queues` its `queue_numbers`; `waited` is the shape
    that messages had whose time has come by now, if they were sent before. `rendered` is the appender's own.
    """

    magic: int
    topic_block: NDArray[np.uint8]
    queue_numbers: NDArray[np.int64]
    fixed_queue: int
    parts: tuple[bytes, bytes, bytes, bytes]
    born_host: bytes
    prefix_size: int = 0
    sharding_at: int = 0
    flag: int = 0
    sys_flag: int = 0
    reconsume_times: int = 0
    prepared_transaction_offset: int = 0
    batch: bool = False
    lasting: bool = False
    copies: bool = False
    columns: int = 0
    real_topic: bytes = b""
    real_queues: NDArray[np.int64] | None = None
    waited: FrameShape | None = None
    rendered: RenderedShape | None = None


class AppendPlan(msgspec.Struct, eq=False):
    """One frame, ready for the kernel: what the writer derives from an append request and its topic.

    `columns` are the positions of the payload's columns in the kernel's order, −1 for an absent one. `rotation` is the
    queue that the first message of a round goes to, and becomes the one behind the last. `unique_prefix` has the
    shape's `prefix_size`; `unique_counter` is −1 without unique ids.
    """

    shape: FrameShape
    payload: NDArray[np.uint8]
    count: int
    columns: tuple[int, ...]
    rotation: int
    born_timestamp_ms: int
    unique_prefix: bytes = b""
    unique_counter: int = -1


def topic_fields(topic: str) -> tuple[int, NDArray[np.uint8]]:
    """(magic, topic with its length as in the record): V2 for more than 127 characters, as RocketMQ chooses."""
    name = topic.encode()
    if len(topic) > record.TOPIC_V1_CHARACTERS_MAX:
        return record.MAGIC_V2, np.frombuffer(len(name).to_bytes(2, "big") + name, np.uint8)
    return record.MAGIC_V1, np.frombuffer(len(name).to_bytes(1, "big") + name, np.uint8)


def rendered_head(shape: FrameShape, store_host: bytes) -> bytes:
    """The fixed part of a record up to its body length, what differs between a frame's records as zeros."""
    sys_flag = shape.sys_flag & ~(record.SYS_FLAG_BORN_HOST_V6 | record.SYS_FLAG_STORE_HOST_V6)
    sys_flag |= record.SYS_FLAG_BORN_HOST_V6 if len(shape.born_host) == record.HOST_V6_SIZE else 0
    sys_flag |= record.SYS_FLAG_STORE_HOST_V6 if len(store_host) == record.HOST_V6_SIZE else 0
    fixed = record.HEAD.pack(0, shape.magic, 0, 0, shape.flag, 0, 0, sys_flag, 0)
    tail = record.TAIL.pack(shape.reconsume_times, shape.prepared_transaction_offset, 0)
    return fixed + shape.born_host + bytes(8) + store_host + tail


def render(shape: FrameShape, options: Options, store_host: bytes, record_size_max: int) -> RenderedShape:
    """The shape for an appender with these options."""
    transaction = shape.sys_flag & record.SYS_FLAG_TRANSACTION_MASK
    born_extra = len(shape.born_host) - record.HOST_V4_SIZE
    store_extra = len(store_host) - record.HOST_V4_SIZE
    first, second, third, fourth = map(len, shape.parts)
    first += shape.prefix_size
    head, topic = rendered_head(shape, store_host), shape.topic_block.tobytes()
    constants = frame.CONSTANTS.pack(
        shape.fixed_queue,
        len(shape.queue_numbers),
        transaction in (0, record.SYS_FLAG_COMMIT),
        BODY_SIZE_ANY if shape.copies else options.max_message_size,
        record_size_max,
        options.enabled_append_prop_crc,
        record.BODY + born_extra + store_extra,
        record.STORE_TIMESTAMP + born_extra,
        first,
        first + second,
        first + second + third,
        first + second + third + fourth,
        shape.sharding_at,
        0,
        len(head),
        len(topic),
        len(head) + len(topic),
        0,
    )
    return RenderedShape(options, head + topic + shape.parts[0], b"".join(shape.parts[1:]), constants)
