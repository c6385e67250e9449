"""An append frame as kernels see it: its state, and the check of every length and bound before anything is changed.

The frame's payload is read in place. The state lies in the control file, so that `encode_frame` (append.py) reaches the
words in which it counts what it encodes.
"""

from __future__ import annotations

import struct

import numpy as np

from mqproc.kernels.append_counts import UNPUBLISHED_FROM
from mqproc.kernels.intrinsics import load_le16, load_le32, load_le64
from mqproc.kernels.jit import inlined, kernel
from mqproc.kernels.primitive import Bytes, Words
from mqproc.layout import control, figures, record
from mqproc.layout.properties import NAME_END, SHARDING_KEY
from mqproc.layout.properties import PAIR_END as PAIR_END_TEXT

# Indices into the control file's words: the frame's state.
# Offsets are byte positions in the payload, −1 = no such column.
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
    SHARDING_LENGTHS,
    SHARDING_KEYS,
    PAYLOAD_SIZE,
    UNIQUE_COUNTER,  # −1 = no unique ids
    ROTATION,  # next queue of the round, kept across frames
    STORE_TIMESTAMP_MS,
    BORN_TIMESTAMP_MS,  # of all messages when there is no column
    NEXT_MESSAGE,  # moved by encode_frame
    # what frames of one shape have in common
    FIXED_QUEUE,  # −1 = go round, −2 = column
    QUEUE_COUNT,
    TAKES_QUEUE_OFFSET,  # 0 for prepared and rollback records
    BODY_SIZE_MAX,
    RECORD_SIZE_MAX,
    PROPERTY_CRC,
    HEAD_SIZE,
    STORE_TIMESTAMP_AT,
    PART_0_END,
    PART_1_END,
    PART_2_END,
    PART_3_END,
    SHARDING_AT,  # where in the first part a sharding key stands
    HEAD_AT,  # where in the shape's bytes a record's fixed part stands,
    TOPIC_AT,  # the topic with its length,
    TOPIC_SIZE,
    PARTS_AT,  # and the constant parts
    NUMBERS_AT,  # where the topic's queue numbers begin
    # moved by encode_frame
    STAGING_AT,
    PHYSICAL_AT,
    SEGMENT_END,
    # said by check_frame
    TOTAL_SIZE,
    FAILED_MESSAGE,
    FAILED_VALUE,
    # where the answer's columns begin
    ANSWER_AT,
) = range(figures.APPEND_STATE, figures.APPEND_STATE + 46)
assert ANSWER_AT < UNPUBLISHED_FROM
# The words of each frame, and those that frames of one shape have in common.
VARIABLE_WORDS, CONSTANT_WORDS = FIXED_QUEUE - COUNT, STAGING_AT - FIXED_QUEUE
VARIABLES, CONSTANTS = struct.Struct(f"={VARIABLE_WORDS}q"), struct.Struct(f"={CONSTANT_WORDS}q")
VARIABLES_AT, CONSTANTS_AT = COUNT * control.WORD_SIZE, FIXED_QUEUE * control.WORD_SIZE
STATE_WORDS = control.FILE_SIZE // control.WORD_SIZE
"""The state's array is the whole control file, as int64."""

(
    FRAME_OK,
    COLUMNS_MISMATCH,
    BODY_TOO_LARGE,
    PROPERTIES_TOO_LARGE,
    RECORD_TOO_LARGE,
    QUEUE_OUT_OF_RANGE,
    SEPARATOR_BYTE,
) = range(7)

# Of properties that are composed: "TAGS" and "KEYS" with the byte behind them, a pair's overhead with its end.
NAME_SIZE = 5
PAIR_OVERHEAD = NAME_SIZE + 1
SHARDING_NAME = np.frombuffer(f"{SHARDING_KEY}{NAME_END}".encode(), np.uint8).copy()
SHARDING_NAME_SIZE = len(SHARDING_NAME)
SHARDING_OVERHEAD = SHARDING_NAME_SIZE + 1
UNIQUE_DIGITS = 4
PAIR_END = ord(PAIR_END_TEXT)
TAIL_SIZE = record.CRC_TAIL_SIZE
# In each lane of a word.
_ONES = 0x0101_0101_0101_0101
_TWOS = 0x0202_0202_0202_0202
_HIGH_BITS = -0x7F7F_7F7F_7F7F_7F80
assert _HIGH_BITS & (1 << 64) - 1 == 0x8080_8080_8080_8080


@inlined
def length16(payload: Bytes, column: int, message: int) -> int:
    if column < 0:
        return 0
    return load_le16(payload, column + 2 * message)


@inlined
def closing_of(payload: Bytes, end: int, size: int) -> int:
    """1 where a given property string of `size` bytes, which ends at `end`, needs an end of its last pair, else 0."""
    return 1 if size > 0 and payload[end - 1] != PAIR_END else 0


@inlined
def _composed_size(payload: Bytes, state: Words, message: int, key_size: int, tag_size: int) -> int:
    """Size of a message's properties that are not given whole, without the CRC tail."""
    size = state[PART_3_END]
    if state[UNIQUE_COUNTER] >= 0:
        size += UNIQUE_DIGITS
    if tag_size > 0:
        size += PAIR_OVERHEAD + tag_size
    if key_size > 0:
        size += PAIR_OVERHEAD + key_size
    sharding_size = length16(payload, state[SHARDING_LENGTHS], message)
    if sharding_size > 0:
        size += SHARDING_OVERHEAD + sharding_size
    return int(size)


@inlined
def _lengths16(payload: Bytes, column: int, count: int) -> tuple[int, int, int]:
    """Of a column of u16 lengths: the sum, the largest, and how many are not 0; all 0 where there is no column."""
    total = 0
    largest = 0
    present = 0
    if column >= 0:
        for message in range(count):
            size = load_le16(payload, column + 2 * message)
            total += size
            largest = max(largest, size)
            present += int(size != 0)
    return total, largest, present


@kernel
def check_frame(payload: Bytes, state: Words) -> int:
    """Check every length of a frame; FRAME_OK or what is wrong, with FAILED_MESSAGE and FAILED_VALUE in `state`.

    `payload` uint8[n], `state` int64[STATE_WORDS]. TOTAL_SIZE becomes the bytes that all records need at most: a
    byte for each message less where given properties are closed.
    """
    count = state[COUNT]
    body_lengths = state[BODY_LENGTHS]
    bodies = 0
    largest_body = 0
    for message in range(count):
        size = load_le32(payload, body_lengths + 4 * message)
        bodies += size
        largest_body = max(largest_body, size)
    keys, largest_key, have_keys = _lengths16(payload, state[KEY_LENGTHS], count)
    tags, largest_tag, have_tags = _lengths16(payload, state[TAG_LENGTHS], count)
    properties, largest_properties, _ = _lengths16(payload, state[PROPERTY_LENGTHS], count)
    sharding_keys, largest_sharding, have_sharding = _lengths16(payload, state[SHARDING_LENGTHS], count)

    # What each message has in any case, and what all of them have besides: their sums and the largest of each kind.
    tail = TAIL_SIZE if state[PROPERTY_CRC] != 0 else 0
    fixed = state[PART_3_END] + tail
    if state[PROPERTY_LENGTHS] >= 0:
        own = properties
        largest = largest_properties
        # One byte more when the last pair of a given string must be closed before what follows.
        fixed += 1 if fixed != 0 else 0
    else:
        fixed += UNIQUE_DIGITS if state[UNIQUE_COUNTER] >= 0 else 0
        own = keys + tags + sharding_keys + PAIR_OVERHEAD * (have_keys + have_tags) + SHARDING_OVERHEAD * have_sharding
        largest = largest_key + largest_tag + largest_sharding + 2 * PAIR_OVERHEAD + SHARDING_OVERHEAD
    head = state[HEAD_SIZE] + state[TOPIC_SIZE] + 2
    state[TOTAL_SIZE] = count * (head + fixed) + bodies + own
    state[FAILED_MESSAGE] = -1
    if bodies != _column_size(state, BODIES) or keys != _column_size(state, KEYS):
        return COLUMNS_MISMATCH
    if tags != _column_size(state, TAGS) or properties != _column_size(state, PROPERTIES):
        return COLUMNS_MISMATCH
    if sharding_keys != _column_size(state, SHARDING_KEYS):
        return COLUMNS_MISMATCH
    if (
        largest_body > state[BODY_SIZE_MAX]
        or fixed + largest > record.PROPERTIES_SIZE_MAX
        or head + largest_body + fixed + largest > state[RECORD_SIZE_MAX]
        or state[QUEUES] >= 0
    ):
        # Perhaps no message has the largest of each.
        found = _check_each(payload, state)
        if found != FRAME_OK:
            return found
    if state[KEYS] >= 0 and _has_separator(payload, state[KEYS], state[KEYS] + keys):
        state[FAILED_VALUE] = 0
        return SEPARATOR_BYTE
    if state[TAGS] >= 0 and _has_separator(payload, state[TAGS], state[TAGS] + tags):
        state[FAILED_VALUE] = 1
        return SEPARATOR_BYTE
    sharding_at = state[SHARDING_KEYS]
    if sharding_at >= 0 and _has_separator(payload, sharding_at, sharding_at + sharding_keys):
        state[FAILED_VALUE] = 2
        return SEPARATOR_BYTE
    return FRAME_OK


@kernel
def _check_each(payload: Bytes, state: Words) -> int:
    """Check message by message: FRAME_OK, or what is wrong with the first one that FAILED_MESSAGE then names.

    The columns have the sizes that their lengths add up to.
    """
    tail = TAIL_SIZE if state[PROPERTY_CRC] != 0 else 0
    given = state[PROPERTY_LENGTHS] >= 0
    behind = tail + state[PART_3_END]
    given_end = int(state[PROPERTIES])
    for message in range(state[COUNT]):
        body_size = load_le32(payload, state[BODY_LENGTHS] + 4 * message)
        key_size = length16(payload, state[KEY_LENGTHS], message)
        tag_size = length16(payload, state[TAG_LENGTHS], message)
        if given:
            size = length16(payload, state[PROPERTY_LENGTHS], message)
            given_end += size
            # As it is stored: a byte more where the last pair must be closed before what follows.
            size += behind + (closing_of(payload, given_end, size) if behind > 0 else 0)
        else:
            size = _composed_size(payload, state, message, key_size, tag_size) + tail
        record_size = state[HEAD_SIZE] + body_size + state[TOPIC_SIZE] + 2 + size
        state[FAILED_MESSAGE] = message
        if body_size > state[BODY_SIZE_MAX]:
            state[FAILED_VALUE] = body_size
            return BODY_TOO_LARGE
        if size > record.PROPERTIES_SIZE_MAX:
            state[FAILED_VALUE] = size
            return PROPERTIES_TOO_LARGE
        if record_size > state[RECORD_SIZE_MAX]:
            state[FAILED_VALUE] = record_size
            return RECORD_TOO_LARGE
        if state[QUEUES] >= 0:
            queue_id = load_le32(payload, state[QUEUES] + 4 * message)
            if queue_id >= state[QUEUE_COUNT]:
                state[FAILED_VALUE] = queue_id
                return QUEUE_OUT_OF_RANGE
    state[FAILED_MESSAGE] = -1
    return FRAME_OK


@kernel
def _has_separator(payload: Bytes, start: int, stop: int) -> bool:
    """Whether a byte 1 or 2 stands in [start, stop): it would end a property early."""
    found = 0
    at = start
    while at + 8 <= stop:
        # Eight bytes at once; subtracting one borrows out of each lane that is 0.
        first = load_le64(payload, at) ^ _ONES
        second = load_le64(payload, at) ^ _TWOS
        found |= (first - _ONES) & ~first | (second - _ONES) & ~second
        at += 8
    rest = 0
    while at < stop:
        rest |= int(payload[at] == 1) | int(payload[at] == 2)
        at += 1
    return (found & _HIGH_BITS) != 0 or rest != 0


@kernel
def _column_size(state: Words, column: int) -> int:
    """Bytes of a data column: up to the start of the next column that is there, or the payload's end."""
    start = state[column]
    if start < 0:
        return 0
    for later in range(column + 1, PAYLOAD_SIZE + 1):
        if state[later] >= 0:
            return int(state[later] - start)
    return 0


def warm() -> None:
    """Compile or load this kernel."""
    check_frame(np.zeros(1, np.uint8), np.zeros(STATE_WORDS, np.int64))
