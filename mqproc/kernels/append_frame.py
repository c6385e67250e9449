"""Check an append frame and encode its messages as CommitLog records (layout/record.py).

    payload columns ──check_frame──▶ lengths and bounds verified ──encode_frame──▶ records in a staging buffer

The payload is read in place. Records are written one after the other into the staging buffer, which the caller stores
with one `pwrite`. Fields that are equal in all messages of a frame are rendered once, as an append template: the fixed
part of a record up to its body length, the topic with its length, and constant properties. `encode_frame` copies these
and fills in the rest. It stops when the segment or the staging buffer is full and can be called again to continue.

The state of the frame lies in the control file, so the kernel reaches the message counters, which lie there too,
without a further argument.
"""

from __future__ import annotations

import struct

import numpy as np

from mqproc.kernels.crc import MASK_31, crc32, write_crc_tail
from mqproc.kernels.hashing import java_hash_utf8, queue_of_hash
from mqproc.kernels.jit.compile import inlined, kernel
from mqproc.kernels.jit.intrinsics import (
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
from mqproc.kernels.jit.lowering import Bytes, Words
from mqproc.kernels.record_fields import HIGH_BITS, ONES
from mqproc.layout import control, histograms, record
from mqproc.layout.properties import NAME_END, SHARDING_KEY
from mqproc.layout.properties import PAIR_END as PAIR_END_TEXT

# Message counters in the control file: frames, messages and a histogram of record sizes.
#
# Encoded frames are counted before they are published, and publication may fail. The UNPUBLISHED words hold the counts
# since `written` had the value UNPUBLISHED_FROM; `uncount` subtracts them again.

_SIZES = histograms.MESSAGE_SIZES.index
_SIZES_SUM = histograms.MESSAGE_SIZES.sum_index - _SIZES
_SIZES_WORDS = _SIZES_SUM + 1
_BOUNDS = len(histograms.MESSAGE_SIZES.bounds)
_FIRST_BOUND = histograms.MESSAGE_SIZES.bounds[0]
# Each bound is four times the previous one; `count_size` relies on it.
assert histograms.MESSAGE_SIZES.bounds == tuple(_FIRST_BOUND << 2 * place for place in range(_BOUNDS))

# Indices into the control file's words: the last words of the append state.
UNPUBLISHED_FROM = histograms.APPEND_STATE + histograms.APPEND_STATE_WORDS - 3 - _SIZES_WORDS
UNPUBLISHED_FRAMES = UNPUBLISHED_FROM + 1
UNPUBLISHED_MESSAGES = UNPUBLISHED_FROM + 2
UNPUBLISHED_SIZES = UNPUBLISHED_FROM + 3  # first word of a histogram of sizes with its sum
_STOP = UNPUBLISHED_SIZES + _SIZES_WORDS


@kernel
def begin_counting(cells: Words) -> None:
    """Reset the unpublished counts if `written` has moved: those frames are published."""
    if cells[UNPUBLISHED_FROM] != cells[control.WRITTEN]:
        cells[UNPUBLISHED_FROM] = cells[control.WRITTEN]
        for word in range(UNPUBLISHED_FRAMES, _STOP):
            cells[word] = 0


@kernel
def count_frame(cells: Words) -> None:
    """Count a frame whose messages are all counted."""
    cells[UNPUBLISHED_FRAMES] += 1
    cells[control.APPENDED_FRAMES] += 1


@inlined
def count_size(cells: Words, size: int) -> None:
    """Add a record's size to the histograms."""
    bucket = 0
    while bucket < _BOUNDS and size > _FIRST_BOUND << 2 * bucket:
        bucket += 1
    cells[UNPUBLISHED_SIZES + bucket] += 1
    cells[_SIZES + bucket] += 1


@kernel
def count_messages(cells: Words, messages: int, size: int) -> None:
    """Count messages and the sum of their record sizes in bytes."""
    cells[UNPUBLISHED_MESSAGES] += messages
    cells[UNPUBLISHED_SIZES + _SIZES_SUM] += size
    cells[_SIZES + _SIZES_SUM] += size
    cells[control.APPENDED_MESSAGES] += messages


@kernel
def uncount(cells: Words) -> None:
    """Subtract the counts of frames that were encoded and will not be published."""
    if cells[UNPUBLISHED_FROM] != cells[control.WRITTEN]:
        return
    cells[control.APPENDED_FRAMES] -= cells[UNPUBLISHED_FRAMES]
    cells[control.APPENDED_MESSAGES] -= cells[UNPUBLISHED_MESSAGES]
    for word in range(_SIZES_WORDS):
        cells[_SIZES + word] -= cells[UNPUBLISHED_SIZES + word]
    for word in range(UNPUBLISHED_FRAMES, _STOP):
        cells[word] = 0


# Frame state: indices into the control file's words. Column positions are bytes of the payload, −1 = no such column.
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
    UNIQUE_COUNTER,  # first counter of the unique ids, −1 = no unique ids
    ROTATION,  # next queue of the round robin, kept across frames
    STORE_TIMESTAMP_MS,
    BORN_TIMESTAMP_MS,  # of all messages if there is no column
    NEXT_MESSAGE,  # advanced by encode_frame
    # constant for an append template
    FIXED_QUEUE,  # −1 = round robin, −2 = column
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
    SHARDING_AT,  # position of the sharding key in the first part
    HEAD_AT,  # positions in the template's bytes: fixed part of a record
    TOPIC_AT,  # topic with its length
    TOPIC_SIZE,
    PARTS_AT,  # constant parts of the properties
    NUMBERS_AT,  # index of the topic's first queue number
    # advanced by encode_frame
    STAGING_AT,
    PHYSICAL_AT,
    SEGMENT_END,
    # results of check_frame
    TOTAL_SIZE,
    FAILED_MESSAGE,
    FAILED_VALUE,
    # position of the answer's columns
    ANSWER_AT,
) = range(histograms.APPEND_STATE, histograms.APPEND_STATE + 46)
assert ANSWER_AT < UNPUBLISHED_FROM
# Words that change with each frame, and words that are constant for a template.
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

# Size of "TAGS" or "KEYS" with its separator, and the overhead of such a pair with both separators.
NAME_SIZE = 5
PAIR_OVERHEAD = NAME_SIZE + 1
SHARDING_NAME = np.frombuffer(f"{SHARDING_KEY}{NAME_END}".encode(), np.uint8).copy()
SHARDING_NAME_SIZE = len(SHARDING_NAME)
SHARDING_OVERHEAD = SHARDING_NAME_SIZE + 1
UNIQUE_DIGITS = 4
PAIR_END = ord(PAIR_END_TEXT)
TAIL_SIZE = record.CRC_TAIL_SIZE
# Constants for byte-parallel comparison: one byte value in each of the eight lanes of a word.
_TWOS = 2 * ONES


@inlined
def length16(payload: Bytes, column: int, message: int) -> int:
    if column < 0:
        return 0
    return load_le16(payload, column + 2 * message)


@inlined
def closing_of(payload: Bytes, end: int, size: int) -> int:
    """1 if the property string of `size` bytes before `end` lacks its final separator, else 0."""
    return 1 if size > 0 and payload[end - 1] != PAIR_END else 0


@inlined
def _composed_size(payload: Bytes, state: Words, message: int, key_size: int, tag_size: int) -> int:
    """Size of properties composed from columns and constant parts, without the CRC tail."""
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
    """Sum, maximum and number of non-zero values of a column of u16 lengths; zeros without one."""
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
    """Check every length of a frame; returns FRAME_OK or the first violation.

    `payload` uint8[n], `state` int64[STATE_WORDS]. On a violation FAILED_MESSAGE and FAILED_VALUE are set. TOTAL_SIZE
    is set to an upper bound of the size of all records: it assumes that each property string needs a final separator.
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

    # `fixed` applies to each message; `own` sums the variable parts; `largest` is an upper bound for one message.
    tail = TAIL_SIZE if state[PROPERTY_CRC] != 0 else 0
    fixed = state[PART_3_END] + tail
    if state[PROPERTY_LENGTHS] >= 0:
        own = properties
        largest = largest_properties
        # A separator is added to a string that lacks its last one, if anything is appended to it.
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
        # The bounds combine the largest of each column, which no single message may have: check each message.
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
    """Check the messages one by one; returns as `check_frame`.

    The column sizes must already equal the sums of their lengths.
    """
    tail = TAIL_SIZE if state[PROPERTY_CRC] != 0 else 0
    is_string = state[PROPERTY_LENGTHS] >= 0
    appended = tail + state[PART_3_END]
    string_end = int(state[PROPERTIES])
    for message in range(state[COUNT]):
        body_size = load_le32(payload, state[BODY_LENGTHS] + 4 * message)
        key_size = length16(payload, state[KEY_LENGTHS], message)
        tag_size = length16(payload, state[TAG_LENGTHS], message)
        if is_string:
            size = length16(payload, state[PROPERTY_LENGTHS], message)
            string_end += size
            # The stored size, which includes a missing separator if anything follows the string.
            size += appended + (closing_of(payload, string_end, size) if appended > 0 else 0)
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
    """Whether [start, stop) contains a separator byte, 1 or 2, which would end a property early."""
    found = 0
    at = start
    while at + 8 <= stop:
        # Haszero test of Mycroft on eight bytes at once: subtracting 1 borrows from each lane that is 0.
        first = load_le64(payload, at) ^ ONES
        second = load_le64(payload, at) ^ _TWOS
        found |= (first - ONES) & ~first | (second - ONES) & ~second
        at += 8
    rest = 0
    while at < stop:
        rest |= int(payload[at] == 1) | int(payload[at] == 2)
        at += 1
    return (found & HIGH_BITS) != 0 or rest != 0


@kernel
def _column_size(state: Words, column: int) -> int:
    """Bytes of a data column, up to the next existing column or the end of the payload."""
    start = state[column]
    if start < 0:
        return 0
    for later in range(column + 1, PAYLOAD_SIZE + 1):
        if state[later] >= 0:
            return int(state[later] - start)
    return 0


# Encoding.


ENCODED, SEGMENT_FULL, STAGING_FULL = range(3)
# Columns of an answer, for each message: physical offset i64, queue offset i64, queue id i32.
ANSWER_BYTES_PER_MESSAGE = 20

_TAGS_NAME = np.frombuffer(b"TAGS\x01", np.uint8).copy()
_KEYS_NAME = np.frombuffer(b"KEYS\x01", np.uint8).copy()
# preparedTransactionOffset and bodyLength are the last fields of the fixed part.
_PREPARED_BACK = 12


@inlined
def hex_digit(value: int) -> int:
    """ASCII code of an upper-case hexadecimal digit."""
    return value + 48 if value < 10 else value + 55


@inlined
def _write_property_string(payload: Bytes, at: int, size: int, closing: int, staging: Bytes, to: int) -> int:
    """Copy a property string, with a final separator if `closing` is 1; returns its end."""
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
    """Write constant parts, sharding key, unique id (`number` −1 = none), tag and keys.

    Returns the end position. The parts begin at `parts` in `shape`; `ends` is the frame's state, which holds the end of
    each part.
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
        staging[at] = hex_digit((number >> 12) & 15)
        staging[at + 1] = hex_digit((number >> 8) & 15)
        staging[at + 2] = hex_digit((number >> 4) & 15)
        staging[at + 3] = hex_digit(number & 15)
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
    """Write a property pair.

    `name_size` is constant at each call, so the copy of the name compiles to one or two stores.
    """
    copy_bytes(staging, at, name, 0, name_size)
    at += name_size
    copy_bytes(staging, at, payload, value_at, value_size)
    at += value_size
    staging[at] = PAIR_END
    return at + 1


@kernel
def encode_frame(
    payload: Bytes, state: Words, shape: Bytes, queue_numbers: Words, next_offsets: Words, staging: Bytes, answer: Bytes
) -> int:
    """Encode messages from NEXT_MESSAGE on into `staging`, beginning at STAGING_AT.

    `payload`, `shape` (the template's bytes) and `staging` are uint8. `queue_numbers` int64 maps queue ids to queue
    numbers, beginning at NUMBERS_AT; `next_offsets` int64[max_queues] is indexed by queue number and incremented. The
    three columns of the answer (20 × count bytes) are written to `answer` at ANSWER_AT. Advances NEXT_MESSAGE,
    STAGING_AT, PHYSICAL_AT and the data columns in `state`, and updates the message counters there. Returns ENCODED
    after the last message; SEGMENT_FULL if the next record and a BLANK do not fit below SEGMENT_END; STAGING_FULL if
    the next record does not fit the staging buffer: write the buffer and call again.
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
    is_string = state[PROPERTY_LENGTHS] >= 0
    # The compiler must assume that stores to `staging` alias `state`, so the loop's values are kept in locals.
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
    # After a property string all constant parts follow without a gap.
    constant_size = state[PART_3_END] + (UNIQUE_DIGITS if counter >= 0 and not is_string else 0)
    at = state[STAGING_AT]
    physical = state[PHYSICAL_AT]
    message = state[NEXT_MESSAGE]
    first_message = message
    first_physical = physical
    begin_counting(state)
    reason = ENCODED
    tail_of = -1
    tail_at = -1
    while message < count:
        body_size = load_le32(payload, body_lengths + 4 * message)
        key_size = length16(payload, key_lengths, message)
        tag_size = length16(payload, tag_lengths, message)
        sharding_size = length16(payload, sharding_lengths, message)
        closing = 0
        if is_string:
            string_size = length16(payload, property_lengths, message)
            if property_crc or constant_size > 0:
                closing = closing_of(payload, properties + string_size, string_size)
            properties_size = string_size + closing + constant_size
        else:
            string_size = 0
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
            body_crc = crc32(payload, bodies, bodies + body_size) & MASK_31
        store_be32(staging, at + record.BODY_CRC, body_crc)
        position += body_size
        copy_bytes(staging, position, shape, topic, topic_size)
        position += topic_size
        store_be16(staging, position, properties_size)
        position += 2
        if is_string:
            position = _write_property_string(payload, properties, string_size, closing, staging, position)
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
            # The tail is written one record late: wide CRC loads right after narrow stores to the same bytes would
            # stall.
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
        properties += string_size
        sharding_keys += sharding_size
        count_size(state, total)
        at = position
        physical += total
        message += 1
    if tail_at >= 0:
        write_crc_tail(staging, tail_of, tail_at)
    count_messages(state, message - first_message, physical - first_physical)
    if reason == ENCODED:
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
    uncount(np.zeros(control.FILE_SIZE // control.WORD_SIZE, np.int64))
    check_frame(np.zeros(1, np.uint8), np.zeros(STATE_WORDS, np.int64))
    nothing = np.zeros(1, np.uint8)
    numbers = np.zeros(1, np.int64)
    encode_frame(nothing, np.zeros(STATE_WORDS, np.int64), nothing, numbers, numbers, nothing, nothing)
