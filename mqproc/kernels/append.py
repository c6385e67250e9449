"""Encoding an append frame into CommitLog records (layout/record.py).

The frame's payload is read in place, records are written one after the other into a staging buffer, and the caller
gives that to one `pwrite`. Two kernels: `check_frame` looks at every length and bound before anything is changed,
`encode_frame` writes as many messages as fit the segment and the staging buffer and can be called again to go on.

Everything that does not differ between a frame's messages is rendered once by the caller: `head` is a record's fixed
part up to its body length, `topic_block` the topic with its length, `parts` the constant properties around the unique
id, tag and keys, or behind property strings that are given whole.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mqproc.kernels.crc import crc32
from mqproc.kernels.intrinsics import (
    copy_bytes,
    load_le16,
    load_le32,
    load_le64,
    store_be16,
    store_be32,
    store_be64,
    store_le32,
    store_le64,
)
from mqproc.kernels.jit import kernel
from mqproc.layout import record

Bytes = NDArray[np.uint8]
Integers = NDArray[np.int64]

# Indices into the frame's state, int64[STATE_SIZE]. Offsets are byte positions in the payload, −1 = no such column.
(
    COUNT,
    BODY_LENGTHS,
    BODIES,
    KEY_LENGTHS,
    KEYS,
    TAG_LENGTHS,
    TAGS,
    PROPERTY_LENGTHS,
    PROPERTIES,
    BORN,
    QUEUES,
    FLAGS,
    PREPARED,
    PAYLOAD_SIZE,
    UNIQUE_COUNTER,  # −1 = no unique ids
    FIXED_QUEUE,  # −1 = go round, −2 = column
    QUEUE_COUNT,
    ROTATION,  # next queue of the round, kept across frames
    TAKES_QUEUE_OFFSET,  # 0 for prepared and rollback records
    BODY_SIZE_MAX,
    RECORD_SIZE_MAX,
    PROPERTY_CRC,
    HEAD_SIZE,
    STORE_TIMESTAMP_AT,
    STORE_TIMESTAMP_MS,
    BORN_TIMESTAMP_MS,  # of all messages when there is no column
    PART_0_END,
    PART_1_END,
    PART_2_END,
    PART_3_END,
    # moved by encode_frame
    NEXT_MESSAGE,
    STAGING_AT,
    PHYSICAL_AT,
    SEGMENT_END,
    # said by check_frame
    TOTAL_SIZE,
    FAILED_MESSAGE,
    FAILED_VALUE,
) = range(37)
STATE_SIZE = 37

OK, SEGMENT_FULL, STAGING_FULL = range(3)
(
    FRAME_OK,
    COLUMNS_MISMATCH,
    BODY_TOO_LARGE,
    PROPERTIES_TOO_LARGE,
    RECORD_TOO_LARGE,
    QUEUE_OUT_OF_RANGE,
    SEPARATOR_BYTE,
) = range(7)

# An answer has three columns: physical offset i64, queue offset i64, queue id i32 a message.
ANSWER_BYTES_PER_MESSAGE = 20

_TAGS_NAME = np.frombuffer(b"TAGS\x01", np.uint8).copy()
_KEYS_NAME = np.frombuffer(b"KEYS\x01", np.uint8).copy()
_CRC_NAME = np.frombuffer(record.CRC_NAME + b"\x01", np.uint8).copy()
_NAME_SIZE = 5
_PAIR_OVERHEAD = _NAME_SIZE + 1
_UNIQUE_DIGITS = 4
# preparedTransactionOffset and bodyLength end a record's fixed part.
_PREPARED_BACK = 12
_PAIR_END = 2
_TAIL_SIZE = record.CRC_TAIL_SIZE
_HALF = 10 ** (record.CRC_DIGITS // 2)


@kernel
def _length16(payload: Bytes, column: int, message: int) -> int:
    if column < 0:
        return 0
    return load_le16(payload, column + 2 * message)


@kernel
def _properties_size(payload: Bytes, state: Integers, message: int, key_size: int, tag_size: int) -> int:
    """Size of a message's properties without the CRC tail."""
    size = state[PART_3_END]
    if state[PROPERTY_LENGTHS] >= 0:
        return int(size + _length16(payload, state[PROPERTY_LENGTHS], message))
    if state[UNIQUE_COUNTER] >= 0:
        size += _UNIQUE_DIGITS
    if tag_size > 0:
        size += _PAIR_OVERHEAD + tag_size
    if key_size > 0:
        size += _PAIR_OVERHEAD + key_size
    return int(size)


@kernel
def check_frame(payload: Bytes, state: Integers, topic_block_size: int) -> int:
    """Check every length of a frame; FRAME_OK or what is wrong, with FAILED_MESSAGE and FAILED_VALUE in `state`.

    `payload` uint8[n], `state` int64[STATE_SIZE]. TOTAL_SIZE becomes the bytes that all records need.
    """
    count = state[COUNT]
    bodies = 0
    keys = 0
    tags = 0
    properties = 0
    total = 0
    tail = _TAIL_SIZE if state[PROPERTY_CRC] != 0 else 0
    for message in range(count):
        body_size = load_le32(payload, state[BODY_LENGTHS] + 4 * message)
        key_size = _length16(payload, state[KEY_LENGTHS], message)
        tag_size = _length16(payload, state[TAG_LENGTHS], message)
        size = _properties_size(payload, state, message, key_size, tag_size)
        bodies += body_size
        keys += key_size
        tags += tag_size
        properties += _length16(payload, state[PROPERTY_LENGTHS], message)
        # One byte more when the last pair of a given string must be closed before what follows.
        closing = 1 if tail + state[PART_3_END] != 0 and state[PROPERTY_LENGTHS] >= 0 else 0
        record_size = state[HEAD_SIZE] + body_size + topic_block_size + 2 + size + tail + closing
        total += record_size
        state[FAILED_MESSAGE] = message
        if body_size > state[BODY_SIZE_MAX]:
            state[FAILED_VALUE] = body_size
            return BODY_TOO_LARGE
        if size + tail > record.PROPERTIES_SIZE_MAX:
            state[FAILED_VALUE] = size + tail
            return PROPERTIES_TOO_LARGE
        if record_size > state[RECORD_SIZE_MAX]:
            state[FAILED_VALUE] = record_size
            return RECORD_TOO_LARGE
        if state[QUEUES] >= 0:
            queue_id = load_le32(payload, state[QUEUES] + 4 * message)
            if queue_id >= state[QUEUE_COUNT]:
                state[FAILED_VALUE] = queue_id
                return QUEUE_OUT_OF_RANGE
    state[TOTAL_SIZE] = total
    state[FAILED_MESSAGE] = -1
    if bodies != _column_size(state, BODIES) or keys != _column_size(state, KEYS):
        return COLUMNS_MISMATCH
    if tags != _column_size(state, TAGS) or properties != _column_size(state, PROPERTIES):
        return COLUMNS_MISMATCH
    if state[KEYS] >= 0 and _has_separator(payload, state[KEYS], state[KEYS] + keys):
        state[FAILED_VALUE] = 0
        return SEPARATOR_BYTE
    if state[TAGS] >= 0 and _has_separator(payload, state[TAGS], state[TAGS] + tags):
        state[FAILED_VALUE] = 1
        return SEPARATOR_BYTE
    return FRAME_OK


@kernel
def _has_separator(payload: Bytes, start: int, stop: int) -> bool:
    """Whether a byte 1 or 2 stands in [start, stop): it would end a property early."""
    found = 0
    for at in range(start, stop):
        found |= int(payload[at] == 1) | int(payload[at] == 2)
    return found != 0


@kernel
def _column_size(state: Integers, column: int) -> int:
    """Bytes of a data column: up to the start of the next column that is there, or the payload's end."""
    start = state[column]
    if start < 0:
        return 0
    for later in range(column + 1, PAYLOAD_SIZE + 1):
        if state[later] >= 0:
            return int(state[later] - start)
    return 0


@kernel
def _hex_digit(value: int) -> int:
    return value + 48 if value < 10 else value + 55


@kernel
def _write_given(payload: Bytes, at: int, size: int, closing: int, staging: Bytes, to: int) -> int:
    """Copy a whole property string; closes its last pair when `closing`. Returns the position behind it."""
    copy_bytes(staging, to, payload, at, size)
    if closing != 0:
        staging[to + size] = _PAIR_END
    return to + size + closing


@kernel
def _write_composed(
    payload: Bytes,
    parts: Bytes,
    ends: Integers,
    number: int,
    tags_at: int,
    tag_size: int,
    keys_at: int,
    key_size: int,
    staging: Bytes,
    at: int,
) -> int:
    """Write constant parts, unique id (`number` −1 = none), tag and keys. Returns the position behind them.

    `ends` is the frame's state: it holds where each part ends.
    """
    first = ends[PART_0_END]
    second = ends[PART_1_END]
    third = ends[PART_2_END]
    fourth = ends[PART_3_END]
    copy_bytes(staging, at, parts, 0, first)
    at += first
    if number >= 0:
        staging[at] = _hex_digit((number >> 12) & 15)
        staging[at + 1] = _hex_digit((number >> 8) & 15)
        staging[at + 2] = _hex_digit((number >> 4) & 15)
        staging[at + 3] = _hex_digit(number & 15)
        at += _UNIQUE_DIGITS
    copy_bytes(staging, at, parts, first, second - first)
    at += second - first
    if tag_size > 0:
        at = _write_pair(staging, at, _TAGS_NAME, payload, tags_at, tag_size)
    if third > second:
        copy_bytes(staging, at, parts, second, third - second)
        at += third - second
    if key_size > 0:
        at = _write_pair(staging, at, _KEYS_NAME, payload, keys_at, key_size)
    if fourth > third:
        copy_bytes(staging, at, parts, third, fourth - third)
        at += fourth - third
    return at


@kernel
def _write_pair(staging: Bytes, at: int, name: Bytes, payload: Bytes, value_at: int, value_size: int) -> int:
    copy_bytes(staging, at, name, 0, _NAME_SIZE)
    at += _NAME_SIZE
    copy_bytes(staging, at, payload, value_at, value_size)
    at += value_size
    staging[at] = _PAIR_END
    return at + 1


@kernel
def _write_crc_tail(staging: Bytes, start: int, at: int) -> None:
    """RocketMQ's `__CRC32#` pair over [start, at): ten decimal digits, least significant first."""
    value = crc32(staging, start, at) & 0x7FFFFFFF
    copy_bytes(staging, at, _CRC_NAME, 0, _TAIL_SIZE - record.CRC_DIGITS - 1)
    at += _TAIL_SIZE - record.CRC_DIGITS - 1
    # Two halves at once: each digit waits for the one before it.
    high = value // _HALF
    low = value - high * _HALF
    for digit in range(record.CRC_DIGITS // 2):
        low_rest = low // 10
        high_rest = high // 10
        staging[at + digit] = 48 + low - low_rest * 10
        staging[at + record.CRC_DIGITS // 2 + digit] = 48 + high - high_rest * 10
        low = low_rest
        high = high_rest
    staging[at + record.CRC_DIGITS] = _PAIR_END


@kernel
def encode_frame(
    payload: Bytes,
    state: Integers,
    head: Bytes,
    topic_block: Bytes,
    parts: Bytes,
    queue_numbers: Integers,
    next_offsets: Integers,
    staging: Bytes,
    answer: Bytes,
) -> int:
    """Encode messages from NEXT_MESSAGE on into `staging` from STAGING_AT on.

    `payload`, `head`, `topic_block`, `parts`, `staging` uint8; `queue_numbers` int64[queues of the topic] gives each
    queue id its number, `next_offsets` int64[max_queues] by number is counted up; `answer` uint8[20 × count] gets the
    three answer columns. Moves NEXT_MESSAGE, STAGING_AT, PHYSICAL_AT and the data columns in `state`. OK when all
    messages are encoded, SEGMENT_FULL when the next record and a BLANK do not fit below SEGMENT_END, STAGING_FULL when
    the next record does not fit the staging buffer: write it out and call again.
    """
    count = state[COUNT]
    head_size = state[HEAD_SIZE]
    topic_size = topic_block.size
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
    constant_size = state[PART_3_END] + (_UNIQUE_DIGITS if counter >= 0 and not given else 0)
    at = state[STAGING_AT]
    physical = state[PHYSICAL_AT]
    message = state[NEXT_MESSAGE]
    reason = OK
    tail_of = -1
    tail_at = -1
    while message < count:
        body_size = load_le32(payload, body_lengths + 4 * message)
        key_size = _length16(payload, key_lengths, message)
        tag_size = _length16(payload, tag_lengths, message)
        closing = 0
        if given:
            given_size = _length16(payload, property_lengths, message)
            if (property_crc or constant_size > 0) and given_size > 0:
                closing = 1 if payload[properties + given_size - 1] != _PAIR_END else 0
            properties_size = given_size + closing + constant_size
        else:
            given_size = 0
            properties_size = constant_size
            if tag_size > 0:
                properties_size += _PAIR_OVERHEAD + tag_size
            if key_size > 0:
                properties_size += _PAIR_OVERHEAD + key_size
        if property_crc:
            properties_size += _TAIL_SIZE
        total = head_size + body_size + topic_size + 2 + properties_size
        if physical + total + record.BLANK_SIZE > segment_end:
            reason = SEGMENT_FULL
            break
        if at + total > staging.size:
            reason = STAGING_FULL
            break

        queue_id = fixed_queue
        if fixed_queue == -1:
            queue_id = rotation
            rotation = rotation + 1 if rotation + 1 < queue_count else 0
        elif fixed_queue == -2:
            queue_id = load_le32(payload, queues + 4 * message)
        queue_offset = 0
        if takes_queue_offset:
            number = queue_numbers[queue_id]
            queue_offset = next_offsets[number]
            next_offsets[number] = queue_offset + 1

        copy_bytes(staging, at, head, 0, head_size)
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
        copy_bytes(staging, position, topic_block, 0, topic_size)
        position += topic_size
        store_be16(staging, position, properties_size)
        position += 2
        if given:
            position = _write_given(payload, properties, given_size, closing, staging, position)
            copy_bytes(staging, position, parts, 0, constant_size)
            position += constant_size
        else:
            number = (counter + message) & 0xFFFF if counter >= 0 else -1
            position = _write_composed(payload, parts, state, number, tags, tag_size, keys, key_size, staging, position)
        if property_crc:
            # One record late: a CRC's wide loads right behind the narrow stores that made the bytes would stall.
            if tail_at >= 0:
                _write_crc_tail(staging, tail_of, tail_at)
            tail_of = at
            tail_at = position
            position += _TAIL_SIZE

        store_le64(answer, 8 * message, physical)
        store_le64(answer, 8 * (count + message), queue_offset)
        store_le32(answer, 16 * count + 4 * message, queue_id)
        bodies += body_size
        keys += key_size
        tags += tag_size
        properties += given_size
        at = position
        physical += total
        message += 1
    if tail_at >= 0:
        _write_crc_tail(staging, tail_of, tail_at)
    state[NEXT_MESSAGE] = message
    state[BODIES] = bodies
    state[KEYS] = keys
    state[TAGS] = tags
    state[PROPERTIES] = properties
    state[ROTATION] = rotation
    state[STAGING_AT] = at
    state[PHYSICAL_AT] = physical
    return reason


def warm() -> None:
    """Compile or load these kernels."""
    nothing = np.zeros(1, np.uint8)
    constant = np.frombuffer(b"\0", np.uint8)
    numbers = np.zeros(1, np.int64)
    state = np.zeros(STATE_SIZE, np.int64)
    check_frame(nothing, state, 0)
    encode_frame(nothing, state, constant, constant, constant, numbers, numbers, nothing, nothing)
