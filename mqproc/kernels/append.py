"""Encoding an append frame into CommitLog records (layout/record.py).

The frame's payload is read in place, records are written one after the other into a staging buffer, and the caller
gives that to one `pwrite`. `encode_frame` writes as many messages as fit the segment and the staging buffer, and can be
called again to go on. The frame has been checked (append_frame.py).

Everything that does not differ between a frame's messages is rendered once by the caller, as the bytes of its shape: a
record's fixed part up to its body length, the topic with its length, and the constant properties around the unique id,
tag and keys, or behind property strings that are given whole. A sharding key stands inside the first part.
"""

from __future__ import annotations

import numpy as np

from mqproc.kernels.append_counts import begin_counting, count_frame, count_messages, count_size
from mqproc.kernels.append_frame import (
    ANSWER_AT,
    BODIES,
    BODY_LENGTHS,
    BORN,
    BORN_TIMESTAMP_MS,
    COUNT,
    FIXED_QUEUE,
    FLAGS,
    HEAD_AT,
    HEAD_SIZE,
    KEY_LENGTHS,
    KEYS,
    NAME_SIZE,
    NEXT_MESSAGE,
    NUMBERS_AT,
    PAIR_END,
    PAIR_OVERHEAD,
    PART_0_END,
    PART_1_END,
    PART_2_END,
    PART_3_END,
    PARTS_AT,
    PHYSICAL_AT,
    PREPARED,
    PROPERTIES,
    PROPERTY_CRC,
    PROPERTY_LENGTHS,
    QUEUE_COUNT,
    QUEUES,
    ROTATION,
    SEGMENT_END,
    SHARDING_AT,
    SHARDING_KEYS,
    SHARDING_LENGTHS,
    SHARDING_NAME,
    SHARDING_NAME_SIZE,
    SHARDING_OVERHEAD,
    STAGING_AT,
    STATE_WORDS,
    STORE_TIMESTAMP_AT,
    STORE_TIMESTAMP_MS,
    TAG_LENGTHS,
    TAGS,
    TAIL_SIZE,
    TAKES_QUEUE_OFFSET,
    TOPIC_AT,
    TOPIC_SIZE,
    UNIQUE_COUNTER,
    UNIQUE_DIGITS,
    closing_of,
    length16,
)
from mqproc.kernels.crc import crc32
from mqproc.kernels.crc_tail import write_crc_tail
from mqproc.kernels.hashing import java_hash_utf8, queue_of_hash
from mqproc.kernels.intrinsics import (
    copy_bytes,
    load_le32,
    load_le64,
    store_be16,
    store_be32,
    store_be64,
    store_le32,
    store_le64,
)
from mqproc.kernels.jit import inlined, kernel
from mqproc.kernels.primitive import Bytes, Words
from mqproc.layout import record

OK, SEGMENT_FULL, STAGING_FULL = range(3)
# An answer has three columns: physical offset i64, queue offset i64, queue id i32 a message.
ANSWER_BYTES_PER_MESSAGE = 20

_TAGS_NAME = np.frombuffer(b"TAGS\x01", np.uint8).copy()
_KEYS_NAME = np.frombuffer(b"KEYS\x01", np.uint8).copy()
# preparedTransactionOffset and bodyLength end a record's fixed part.
_PREPARED_BACK = 12


@inlined
def _hex_digit(value: int) -> int:
    return value + 48 if value < 10 else value + 55


@inlined
def _write_given(payload: Bytes, at: int, size: int, closing: int, staging: Bytes, to: int) -> int:
    """Copy a whole property string; closes its last pair when `closing`. Returns the position behind it."""
    copy_bytes(staging, to, payload, at, size)
    if closing != 0:
        staging[to + size] = PAIR_END
    return to + size + closing


@inlined
def _write_composed(
    payload: Bytes,
    shape: Bytes,
    parts: int,
    ends: Words,
    number: int,
    tags_at: int,
    tag_size: int,
    keys_at: int,
    key_size: int,
    sharding_at: int,
    sharding_size: int,
    staging: Bytes,
    at: int,
) -> int:
    """Write constant parts, sharding key, unique id (`number` −1 = none), tag and keys; returns the position behind.

    The parts begin at `parts` in `shape`; `ends` is the frame's state: it holds where each part ends.
    """
    first = ends[PART_0_END]
    second = ends[PART_1_END]
    third = ends[PART_2_END]
    fourth = ends[PART_3_END]
    written = 0
    if sharding_size > 0:
        written = ends[SHARDING_AT]
        copy_bytes(staging, at, shape, parts, written)
        at = _write_pair(staging, at + written, SHARDING_NAME, SHARDING_NAME_SIZE, payload, sharding_at, sharding_size)
    copy_bytes(staging, at, shape, parts + written, first - written)
    at += first - written
    if number >= 0:
        staging[at] = _hex_digit((number >> 12) & 15)
        staging[at + 1] = _hex_digit((number >> 8) & 15)
        staging[at + 2] = _hex_digit((number >> 4) & 15)
        staging[at + 3] = _hex_digit(number & 15)
        at += UNIQUE_DIGITS
    copy_bytes(staging, at, shape, parts + first, second - first)
    at += second - first
    if tag_size > 0:
        at = _write_pair(staging, at, _TAGS_NAME, NAME_SIZE, payload, tags_at, tag_size)
    if third > second:
        copy_bytes(staging, at, shape, parts + second, third - second)
        at += third - second
    if key_size > 0:
        at = _write_pair(staging, at, _KEYS_NAME, NAME_SIZE, payload, keys_at, key_size)
    if fourth > third:
        copy_bytes(staging, at, shape, parts + third, fourth - third)
        at += fourth - third
    return at


@inlined
def _write_pair(
    staging: Bytes, at: int, name: Bytes, name_size: int, payload: Bytes, value_at: int, value_size: int
) -> int:
    """`name_size` is a constant of the caller, so that the compiler copies a name by a store or two."""
    copy_bytes(staging, at, name, 0, name_size)
    at += name_size
    copy_bytes(staging, at, payload, value_at, value_size)
    at += value_size
    staging[at] = PAIR_END
    return at + 1


@kernel
def encode_frame(
    payload: Bytes,
    state: Words,
    shape: Bytes,
    queue_numbers: Words,
    next_offsets: Words,
    staging: Bytes,
    answer: Bytes,
) -> int:
    """Encode messages from NEXT_MESSAGE on into `staging` from STAGING_AT on.

    `payload`, `shape`, `staging` uint8; `queue_numbers` int64 gives each queue id its number from NUMBERS_AT on,
    `next_offsets` int64[max_queues] by number is counted up; `answer` gets the three answer columns from ANSWER_AT on,
    20 × count bytes. Moves NEXT_MESSAGE, STAGING_AT, PHYSICAL_AT and the data columns in `state`, and counts there
    what it has encoded. OK when all messages are, SEGMENT_FULL when the next record and a BLANK do not fit below
    SEGMENT_END, STAGING_FULL when the next record does not fit the staging buffer: write it out and call again.
    """
    count = state[COUNT]
    head_size = state[HEAD_SIZE]
    head = state[HEAD_AT]
    topic = state[TOPIC_AT]
    topic_size = state[TOPIC_SIZE]
    parts = state[PARTS_AT]
    numbers = state[NUMBERS_AT]
    answer_at = state[ANSWER_AT]
    property_crc = state[PROPERTY_CRC] != 0
    given = state[PROPERTY_LENGTHS] >= 0
    # Stores to `staging` may alias `state` for all the compiler knows: what the loop uses is kept in locals.
    body_lengths = state[BODY_LENGTHS]
    key_lengths = state[KEY_LENGTHS]
    tag_lengths = state[TAG_LENGTHS]
    property_lengths = state[PROPERTY_LENGTHS]
    bodies = state[BODIES]
    keys = state[KEYS]
    tags = state[TAGS]
    properties = state[PROPERTIES]
    sharding_lengths = state[SHARDING_LENGTHS]
    sharding_keys = state[SHARDING_KEYS]
    flags = state[FLAGS]
    prepared = state[PREPARED]
    born = state[BORN]
    queues = state[QUEUES]
    counter = state[UNIQUE_COUNTER]
    fixed_queue = state[FIXED_QUEUE]
    queue_count = state[QUEUE_COUNT]
    rotation = state[ROTATION]
    takes_queue_offset = state[TAKES_QUEUE_OFFSET] != 0
    store_timestamp_at = state[STORE_TIMESTAMP_AT]
    store_timestamp_ms = state[STORE_TIMESTAMP_MS]
    born_timestamp_ms = state[BORN_TIMESTAMP_MS]
    segment_end = state[SEGMENT_END]
    # Behind a given string the parts follow as a whole.
    constant_size = state[PART_3_END] + (UNIQUE_DIGITS if counter >= 0 and not given else 0)
    at = state[STAGING_AT]
    physical = state[PHYSICAL_AT]
    message = state[NEXT_MESSAGE]
    first_message = message
    first_physical = physical
    begin_counting(state)
    reason = OK
    tail_of = -1
    tail_at = -1
    while message < count:
        body_size = load_le32(payload, body_lengths + 4 * message)
        key_size = length16(payload, key_lengths, message)
        tag_size = length16(payload, tag_lengths, message)
        sharding_size = length16(payload, sharding_lengths, message)
        closing = 0
        if given:
            given_size = length16(payload, property_lengths, message)
            if property_crc or constant_size > 0:
                closing = closing_of(payload, properties + given_size, given_size)
            properties_size = given_size + closing + constant_size
        else:
            given_size = 0
            properties_size = constant_size
            if tag_size > 0:
                properties_size += PAIR_OVERHEAD + tag_size
            if key_size > 0:
                properties_size += PAIR_OVERHEAD + key_size
            if sharding_size > 0:
                properties_size += SHARDING_OVERHEAD + sharding_size
        if property_crc:
            properties_size += TAIL_SIZE
        total = head_size + body_size + topic_size + 2 + properties_size
        if physical + total + record.BLANK_SIZE > segment_end:
            reason = SEGMENT_FULL
            break
        if at + total > staging.size:
            reason = STAGING_FULL
            break

        queue_id = fixed_queue
        if fixed_queue == -1 and sharding_size > 0:
            hashed = java_hash_utf8(payload, sharding_keys, sharding_keys + sharding_size, 0)
            queue_id = queue_of_hash(hashed, queue_count)
        elif fixed_queue == -1:
            queue_id = rotation
            rotation = rotation + 1 if rotation + 1 < queue_count else 0
        elif fixed_queue == -2:
            queue_id = load_le32(payload, queues + 4 * message)
        queue_offset = 0
        if takes_queue_offset:
            number = queue_numbers[numbers + queue_id]
            queue_offset = next_offsets[number]
            next_offsets[number] = queue_offset + 1

        copy_bytes(staging, at, shape, head, head_size)
        store_be32(staging, at + record.TOTAL_SIZE, total)
        store_be32(staging, at + record.QUEUE_ID, queue_id)
        store_be64(staging, at + record.QUEUE_OFFSET, queue_offset)
        store_be64(staging, at + record.PHYSICAL_OFFSET, physical)
        if flags >= 0:
            store_be32(staging, at + record.FLAG, load_le32(payload, flags + 4 * message))
        if prepared >= 0:
            store_be64(staging, at + head_size - _PREPARED_BACK, load_le64(payload, prepared + 8 * message))
        if born >= 0:
            born_timestamp_ms = load_le64(payload, born + 8 * message)
        store_be64(staging, at + record.BORN_TIMESTAMP, born_timestamp_ms)
        store_be64(staging, at + store_timestamp_at, store_timestamp_ms)
        store_be32(staging, at + head_size - 4, body_size)
        position = at + head_size
        copy_bytes(staging, position, payload, bodies, body_size)
        body_crc = 0
        if body_size > 0:
            body_crc = crc32(payload, bodies, bodies + body_size) & 0x7FFFFFFF
        store_be32(staging, at + record.BODY_CRC, body_crc)
        position += body_size
        copy_bytes(staging, position, shape, topic, topic_size)
        position += topic_size
        store_be16(staging, position, properties_size)
        position += 2
        if given:
            position = _write_given(payload, properties, given_size, closing, staging, position)
            copy_bytes(staging, position, shape, parts, constant_size)
            position += constant_size
        else:
            number = (counter + message) & 0xFFFF if counter >= 0 else -1
            position = _write_composed(
                payload,
                shape,
                parts,
                state,
                number,
                tags,
                tag_size,
                keys,
                key_size,
                sharding_keys,
                sharding_size,
                staging,
                position,
            )
        if property_crc:
            # One record late: a CRC's wide loads right behind the narrow stores that made the bytes would stall.
            if tail_at >= 0:
                write_crc_tail(staging, tail_of, tail_at)
            tail_of = at
            tail_at = position
            position += TAIL_SIZE

        store_le64(answer, answer_at + 8 * message, physical)
        store_le64(answer, answer_at + 8 * (count + message), queue_offset)
        store_le32(answer, answer_at + 16 * count + 4 * message, queue_id)
        bodies += body_size
        keys += key_size
        tags += tag_size
        properties += given_size
        sharding_keys += sharding_size
        count_size(state, total)
        at = position
        physical += total
        message += 1
    if tail_at >= 0:
        write_crc_tail(staging, tail_of, tail_at)
    count_messages(state, message - first_message, physical - first_physical)
    if reason == OK:
        count_frame(state)
    state[NEXT_MESSAGE] = message
    state[BODIES] = bodies
    state[KEYS] = keys
    state[TAGS] = tags
    state[PROPERTIES] = properties
    state[SHARDING_KEYS] = sharding_keys
    state[ROTATION] = rotation
    state[STAGING_AT] = at
    state[PHYSICAL_AT] = physical
    return reason


def warm() -> None:
    """Compile or load these kernels."""
    nothing = np.zeros(1, np.uint8)
    numbers = np.zeros(1, np.int64)
    encode_frame(nothing, np.zeros(STATE_WORDS, np.int64), nothing, numbers, numbers, nothing, nothing)
