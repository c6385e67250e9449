"""Append a run of frames from a receive buffer without returning to Python between them.

    next frame ──▶ parse options, find template ──▶ check columns ──▶ stage records, write answer

The options of a frame are looked up by their bytes in a hash table of append templates, whose rows and bytes the caller
maintains (store/commitlog/append_templates.py). A frame without a template, or with an error, is left to the caller.
Answers are complete frames (layout/frame.py), to be sent after publication.
"""

from __future__ import annotations

import numpy as np

from mqproc.kernels import append_frame as frame
from mqproc.kernels.append_frame import check_frame, encode_frame
from mqproc.kernels.jit.compile import inlined, kernel
from mqproc.kernels.jit.intrinsics import (
    copy_bytes,
    load_be16,
    load_be32,
    load_be64,
    load_le16,
    load_le32,
    load_le64,
    load_u8,
    store_be64,
    store_le16,
    store_le32,
    store_le64,
    store_release,
)
from mqproc.kernels.jit.lowering import Bytes, Words
from mqproc.layout import control, queue_table, record
from mqproc.layout.frame import (
    ANSWER,
    HEADER_SIZE,
    MAGIC,
    OPERATION_AT,
    OPTIONS_SIZE_AT,
    PAYLOAD_SIZE_AT,
    VERSION,
    VERSION_AT,
    ZERO_AT,
)

# Options of an append frame (AppendRequest in wire), parsed in place.
#
# The options are a MessagePack array. Items that vary between frames of one producer (sizes, ids, times) are returned
# as numbers. The bytes of the other items are the key of the append template.


ITEMS = 31
"""Number of fields of AppendRequest, in wire order; a test compares the item numbers with it."""
(COUNT_ITEM, BODIES_ITEM, KEYS_ITEM, TAGS_ITEM, PROPERTIES_ITEM) = (1, 3, 4, 5, 6)
PREFIX_ITEM, COUNTER_ITEM, BORN_ITEM, SHARDING_ITEM = 11, 12, 13, 30
VARYING_ITEMS = (
    *(COUNT_ITEM, BODIES_ITEM, KEYS_ITEM, TAGS_ITEM, PROPERTIES_ITEM),
    *(PREFIX_ITEM, COUNTER_ITEM, BORN_ITEM, SHARDING_ITEM),
)
"""Items that are not part of the key. The presence of some of them is."""
PREFIX_DIGITS = 28
COUNTERS = 1 << 16
"""Number of unique ids with one prefix; the first counter of a frame is below it."""
KEY_BYTES_MAX = 2048
"""Maximum size of a key; longer options are NOT_READ."""

_VARYING = sum(1 << item for item in VARYING_ITEMS)
_ARRAY_HEAD = 3
_ARRAY16 = 0xDC
_FALSE, _TRUE = 0xC2, 0xC3
_UINT8, _INT8 = 0xCC, 0xD0
_TEXT8, _TEXT16 = 0xD9, 0xDA
_BYTES8, _BYTES16 = 0xC4, 0xC5
NOT_READ = -1


@inlined
def big_endian(buffer: Bytes, at: int, width: int, signed: int) -> int:
    """Parse a big-endian integer of 1, 2, 4 or 8 bytes."""
    if width == 1:
        value = load_u8(buffer, at)
        return value - ((value & 0x80) << 1) if signed else value
    if width == 2:
        value = load_be16(buffer, at) & 0xFFFF
        return value - ((value & 0x8000) << 1) if signed else value
    if width == 4:
        value = load_be32(buffer, at) & 0xFFFF_FFFF
        return value - ((value & 0x8000_0000) << 1) if signed else value
    return load_be64(buffer, at)


@inlined
def _are_hex_digits(buffer: Bytes, at: int) -> bool:
    """Whether a unique-id prefix, PREFIX_DIGITS upper-case hexadecimal digits, lies at `at`."""
    wrong = 0
    for place in range(PREFIX_DIGITS):
        digit = load_u8(buffer, at + place)
        wrong |= int(not (48 <= digit <= 57 or 65 <= digit <= 70))
    return wrong == 0


@kernel
def read_options(buffer: Bytes, at: int, end: int, values: Words, values_at: int, key: Bytes) -> int:
    """Parse the options in [at, end) of `buffer`.

    Returns the size of the key written to `key` uint8[KEY_BYTES_MAX]. `values[values_at + item]` receives the value of
    each varying item; for the unique-id prefix its position in the buffer, −1 if absent. Returns NOT_READ if the bytes
    are not such an array or the key is too long; the full decoder then accepts them or reports the error.
    """
    if end - at < _ARRAY_HEAD or load_u8(buffer, at) != _ARRAY16 or load_be16(buffer, at + 1) != ITEMS:
        return NOT_READ
    at += _ARRAY_HEAD
    size = 0
    for item in range(ITEMS):
        if at >= end:
            return NOT_READ
        first = load_u8(buffer, at)
        varies = (_VARYING >> item) & 1 != 0
        head, width, value = 1, 0, first
        is_number = first < 0x80 or first >= 0xE0
        if first >= 0xE0:
            value = first - 0x100
        elif _UINT8 <= first < _UINT8 + 4 or _INT8 <= first < _INT8 + 4:
            signed = int(first >= _INT8)
            width = 1 << (first - (_INT8 if signed else _UINT8))
            if at + 1 + width > end:
                return NOT_READ
            value = big_endian(buffer, at + 1, width, signed)
            if signed == 0 and value < 0:
                return NOT_READ
            is_number = True
        elif 0xA0 <= first < 0xC0:
            width = first & 0x1F
        elif first in (_TEXT8, _BYTES8):
            head = 2
            if at + head > end:
                return NOT_READ
            width = load_u8(buffer, at + 1)
        elif first in (_TEXT16, _BYTES16):
            head = 3
            if at + head > end:
                return NOT_READ
            width = load_be16(buffer, at + 1) & 0xFFFF
        elif not is_number and first != _FALSE and first != _TRUE:
            return NOT_READ
        stop = at + head + width
        if stop > end:
            return NOT_READ
        if not varies:
            if size + head + width >= KEY_BYTES_MAX:
                return NOT_READ
            copy_bytes(key, size, buffer, at, head + width)
            size += head + width
        elif item == PREFIX_ITEM:
            values[values_at + item] = -1
            if is_number or first < 0xA0 or first >= 0xC0 or (width != 0 and width != PREFIX_DIGITS):
                return NOT_READ
            if width != 0:
                if not _are_hex_digits(buffer, at + head):
                    return NOT_READ
                values[values_at + item] = at + head
        elif is_number:
            values[values_at + item] = value
        else:
            return NOT_READ
        at = stop
    if at != end:
        return NOT_READ
    key[size] = (
        int(values[values_at + PREFIX_ITEM] >= 0)
        | int(values[values_at + KEYS_ITEM] >= 0) << 1
        | int(values[values_at + TAGS_ITEM] >= 0) << 2
        | int(values[values_at + PROPERTIES_ITEM] >= 0) << 3
        | int(values[values_at + SHARDING_ITEM] >= 0) << 4
    )
    return size + 1


# Results of `append_run`. After SEGMENT_FULL and STAGING_FULL a frame is partly encoded: make room and call again.
DONE, SEGMENT_FULL, STAGING_FULL, COMMIT, ANSWERS_FULL, NOT_KNOWN = range(6)
assert (frame.ENCODED, frame.SEGMENT_FULL, frame.STAGING_FULL) == (DONE, SEGMENT_FULL, STAGING_FULL)

# Indices into `run`: the current run, then the table of templates.
(
    AT,  # position of the next or current frame
    END,
    FRAME_END,
    ROW,  # template of the current frame, −1 = no current frame
    STORED_AT_MS,  # store time of the appended records
    COMMIT_BYTES,  # return COMMIT when this much is staged
    ANSWERS_AT,  # end of the written answers
    ANSWER_OPTIONS_SIZE,
    ANSWER_TIME_AT,  # position of the store time, a big-endian word, in an answer's options
    DISPATCH_LAG_MAX,  # bytes that dispatch may lag behind the log
    TOUCHED,  # length of `touched`
    TOUCHED_TOPIC,  # row of a template whose queues are all in `touched`, −1 = none
    FRAMES,  # appended frames
    FOUND,  # results of read_options
) = range(14)
ROWS_MAX = 4096
SLOTS = 2 * ROWS_MAX
SLOTS_AT = FOUND + ITEMS  # hash slots: row number + 1, 0 = free
ROWS_AT = SLOTS_AT + SLOTS
# Words of a row. Positions are bytes of the table.
(
    KEY_AT,
    KEY_SIZE,
    KEY_HASH,
    COLUMNS,
    ANSWERED,  # 0 = one-way
    BEFORE_AT,  # constant properties before the unique-id prefix
    BEFORE_SIZE,
    AFTER_AT,
    AFTER_SIZE,
    ROUND,  # queue number of the topic's first queue, index of its round robin in `rounds`
    CONSTANTS,  # constant words of the frame's state
) = range(11)
ROW_WORDS = CONSTANTS + frame.CONSTANT_WORDS
RUN_WORDS = ROWS_AT + ROWS_MAX * ROW_WORDS
# Bits of COLUMNS.
HAS_BORN, HAS_QUEUES, HAS_FLAGS = 1, 2, 4

# Regions of the table's bytes: scratch for the current frame, the answer's options, templates.
SCRATCH_AT = 0
SCRATCH_BYTES = 4096
OPTIONS_AT = SCRATCH_AT + SCRATCH_BYTES
OPTIONS_BYTES = 256
BYTES_AT = OPTIONS_AT + OPTIONS_BYTES

MESSAGES_MAX = 1 << 20
_HASH_MASK = (1 << 40) - 1


@kernel
def key_hash(key: Bytes, size: int) -> int:
    """FNV-like hash of a key over 16-bit words, limited to 40 bits: no product exceeds 2⁶³."""
    hashed = size
    at = 0
    while at + 2 <= size:
        hashed = ((hashed ^ load_le16(key, at)) * 0x5BD1E9) & _HASH_MASK
        hashed ^= hashed >> 17
        at += 2
    if at < size:
        hashed = ((hashed ^ load_u8(key, at)) * 0x5BD1E9) & _HASH_MASK
    return hashed ^ (hashed >> 21)


@inlined
def is_key(table: Bytes, at: int, key: Bytes, size: int) -> bool:
    """Whether the key of `size` bytes lies at `at` of the table."""
    different = 0
    place = 0
    while place + 8 <= size:
        different |= load_le64(table, at + place) ^ load_le64(key, place)
        place += 8
    while place < size:
        different |= load_u8(table, at + place) ^ load_u8(key, place)
        place += 1
    return different == 0


@kernel
def find_row(run: Words, table: Bytes, key: Bytes, size: int) -> int:
    """Index in `run` of the row with this key, −1 if absent. Linear probing."""
    hashed = key_hash(key, size)
    slot = hashed & (SLOTS - 1)
    while run[SLOTS_AT + slot] != 0:
        row = ROWS_AT + (run[SLOTS_AT + slot] - 1) * ROW_WORDS
        same = run[row + KEY_HASH] == hashed and run[row + KEY_SIZE] == size
        if same and is_key(table, run[row + KEY_AT], key, size):
            return int(row)
        slot = (slot + 1) & (SLOTS - 1)
    return -1


@kernel
def append_run(
    run: Words,
    state: Words,
    table: Bytes,
    key: Bytes,
    queue_numbers: Words,
    rounds: Words,
    next_offsets: Words,
    touched: Words,
    staging: Bytes,
    answers: Bytes,
    buffer: Bytes,
) -> int:
    """Append frames from AT to END of `buffer`; returns DONE or the reason for an early stop.

    `run` int64[RUN_WORDS] and `table` uint8 hold the append templates, `key` uint8[KEY_BYTES_MAX] is scratch,
    `queue_numbers` int64 holds the queue numbers of the templates' topics, `rounds` int64[max_queues] the next queue of
    each topic's round robin. `state`, `next_offsets` and `staging` are as in `encode_frame`. Complete answer frames are
    written to `answers` uint8 from ANSWERS_AT on; `touched` int64[2 × max_queues] receives the numbers of the queues
    whose next offset changed.
    """
    while run[AT] < run[END]:
        if run[ROW] < 0:
            begun = _begin_frame(buffer, run, state, table, key, rounds, touched, answers)
            if begun != DONE:
                return begun
        reason = encode_frame(buffer, state, table, queue_numbers, next_offsets, staging, answers)
        if reason != frame.ENCODED:
            return reason
        _end_frame(buffer, run, state, table, queue_numbers, rounds, touched, answers)
        if state[frame.STAGING_AT] >= run[COMMIT_BYTES]:
            return COMMIT
    return DONE


@kernel
def append_single(
    run: Words,
    state: Words,
    table: Bytes,
    key: Bytes,
    queue_numbers: Words,
    rounds: Words,
    next_offsets: Words,
    touched: Words,
    staging: Bytes,
    answers: Bytes,
    buffer: Bytes,
    at: int,
    store_timestamp_ms: int,
    segment_end: int,
) -> int:
    """Append one frame when nothing is staged and no answer is pending, and reserve log space.

    The arguments are those of `append_run` and `segment_end`, the end of the active segment. Returns the size of the
    staged records, or 0 if the frame needs `append_run`; then nothing has changed.
    """
    if store_timestamp_ms < state[control.WRITTEN_STORE_TIMESTAMP_MS] or not _is_open(run, state):
        return 0
    run[AT] = at
    run[STORED_AT_MS] = store_timestamp_ms
    if _begin_frame(buffer, run, state, table, key, rounds, touched, answers) != DONE:
        return 0
    size_max = state[frame.TOTAL_SIZE]
    if size_max > staging.size or state[control.WRITTEN] + size_max + record.BLANK_SIZE > segment_end:
        run[ROW] = -1
        return 0
    state[frame.STAGING_AT] = 0
    state[frame.PHYSICAL_AT] = state[control.WRITTEN]
    state[frame.SEGMENT_END] = segment_end
    encode_frame(buffer, state, table, queue_numbers, next_offsets, staging, answers)
    _end_frame(buffer, run, state, table, queue_numbers, rounds, touched, answers)
    size = int(state[frame.STAGING_AT])
    end = state[control.WRITTEN] + size
    if end > state[control.RESERVED_END]:
        store_release(state, control.RESERVED_END, end)
    return size


@inlined
def _is_open(run: Words, state: Words) -> bool:
    """Whether no closing word is set and dispatch lags by less than half of the limit."""
    closed = 0
    for word in control.CLOSING_WORDS:
        closed |= state[word]
    return closed == 0 and 2 * (state[control.WRITTEN] - state[control.DISPATCHED]) <= run[DISPATCH_LAG_MAX]


@kernel
def _begin_frame(
    buffer: Bytes, run: Words, state: Words, table: Bytes, key: Bytes, rounds: Words, touched: Words, answers: Bytes
) -> int:
    """Check the frame at AT and make it the current frame; nothing is appended yet."""
    at = int(run[AT])
    options = at + HEADER_SIZE
    payload = options + load_le32(buffer, at + OPTIONS_SIZE_AT)
    end = payload + load_le64(buffer, at + PAYLOAD_SIZE_AT)
    size = read_options(buffer, options, payload, run, FOUND, key)
    if size == NOT_READ:
        return NOT_KNOWN
    row = find_row(run, table, key, size)
    if row < 0:
        return NOT_KNOWN
    count = int(run[FOUND + COUNT_ITEM])
    if count < 1 or count > MESSAGES_MAX or not _place_columns(run, state, int(run[row + COLUMNS]), payload, end):
        return NOT_KNOWN
    prefix = int(run[FOUND + PREFIX_ITEM])
    counter = int(run[FOUND + COUNTER_ITEM]) if prefix >= 0 else -1
    if run[FOUND + COUNTER_ITEM] < 0 or run[FOUND + COUNTER_ITEM] >= COUNTERS:
        return NOT_KNOWN
    answer_size = HEADER_SIZE + run[ANSWER_OPTIONS_SIZE] + frame.ANSWER_BYTES_PER_MESSAGE * count
    if run[ANSWERS_AT] + answer_size > answers.size:
        return ANSWERS_FULL if run[ANSWERS_AT] > 0 else NOT_KNOWN
    if 2 * run[TOUCHED] > touched.size:
        return COMMIT
    state[frame.COUNT] = count
    state[frame.PAYLOAD_SIZE] = end
    state[frame.UNIQUE_COUNTER] = counter
    state[frame.ROTATION] = rounds[run[row + ROUND]]
    state[frame.STORE_TIMESTAMP_MS] = run[STORED_AT_MS]
    state[frame.BORN_TIMESTAMP_MS] = run[FOUND + BORN_ITEM]
    state[frame.NEXT_MESSAGE] = 0
    state[frame.ANSWER_AT] = run[ANSWERS_AT] + HEADER_SIZE + run[ANSWER_OPTIONS_SIZE]
    for word in range(frame.CONSTANT_WORDS):
        state[frame.FIXED_QUEUE + word] = run[row + CONSTANTS + word]
    if check_frame(buffer, state) != frame.FRAME_OK:
        return NOT_KNOWN
    parts = int(state[frame.PARTS_AT])
    before = int(run[row + BEFORE_SIZE])
    copy_bytes(table, parts, table, run[row + BEFORE_AT], before)
    if prefix >= 0:
        copy_bytes(table, parts + before, buffer, prefix, PREFIX_DIGITS)
        before += PREFIX_DIGITS
    copy_bytes(table, parts + before, table, run[row + AFTER_AT], run[row + AFTER_SIZE])
    run[FRAME_END] = end
    run[ROW] = row
    return DONE


@inlined
def _place_columns(run: Words, state: Words, columns: int, at: int, end: int) -> bool:
    """Locate the columns of the payload [at, end); False if they do not fill it exactly."""
    count = run[FOUND + COUNT_ITEM]
    room = end - at
    for item in (BODIES_ITEM, KEYS_ITEM, TAGS_ITEM, PROPERTIES_ITEM, SHARDING_ITEM):
        # Bounded sizes cannot overflow the sums below.
        if run[FOUND + item] < -1 or run[FOUND + item] > room:
            return False
    if run[FOUND + BODIES_ITEM] < 0:
        return False
    for word in range(frame.BODY_LENGTHS, frame.PAYLOAD_SIZE):
        state[word] = -1
    state[frame.BODY_LENGTHS] = at
    state[frame.BODIES] = at + 4 * count
    at = state[frame.BODIES] + run[FOUND + BODIES_ITEM]
    at = _place_texts(run, state, KEYS_ITEM, frame.KEY_LENGTHS, frame.KEYS, at)
    at = _place_texts(run, state, TAGS_ITEM, frame.TAG_LENGTHS, frame.TAGS, at)
    at = _place_texts(run, state, PROPERTIES_ITEM, frame.PROPERTY_LENGTHS, frame.PROPERTIES, at)
    if columns & HAS_BORN:
        state[frame.BORN] = at
        at += 8 * count
    if columns & HAS_QUEUES:
        state[frame.QUEUES] = at
        at += 4 * count
    if columns & HAS_FLAGS:
        state[frame.FLAGS] = at
        at += 4 * count
    at = _place_texts(run, state, SHARDING_ITEM, frame.SHARDING_LENGTHS, frame.SHARDING_KEYS, at)
    return bool(at == end)


@inlined
def _place_texts(run: Words, state: Words, item: int, lengths: int, texts: int, at: int) -> int:
    """Locate a column of lengths and its texts at `at` if the frame has them; returns the end."""
    if run[FOUND + item] < 0:
        return at
    state[lengths] = at
    state[texts] = at + 2 * run[FOUND + COUNT_ITEM]
    return int(state[texts] + run[FOUND + item])


@kernel
def _end_frame(
    buffer: Bytes,
    run: Words,
    state: Words,
    table: Bytes,
    queue_numbers: Words,
    rounds: Words,
    touched: Words,
    answers: Bytes,
) -> None:
    """Finish the current frame after staging: record its queues, write its answer, advance AT."""
    row = run[ROW]
    count = state[frame.COUNT]
    rounds[run[row + ROUND]] = state[frame.ROTATION]
    _touch(run, row, state, queue_numbers, touched, answers)
    if run[row + ANSWERED] != 0:
        at = run[ANSWERS_AT]
        copy_bytes(answers, at, buffer, run[AT], HEADER_SIZE)
        store_le16(answers, at + OPERATION_AT, load_le16(buffer, run[AT] + OPERATION_AT) | ANSWER)
        store_le32(answers, at + OPTIONS_SIZE_AT, run[ANSWER_OPTIONS_SIZE])
        store_le64(answers, at + PAYLOAD_SIZE_AT, frame.ANSWER_BYTES_PER_MESSAGE * count)
        copy_bytes(answers, at + HEADER_SIZE, table, OPTIONS_AT, run[ANSWER_OPTIONS_SIZE])
        store_be64(answers, at + HEADER_SIZE + run[ANSWER_TIME_AT], run[STORED_AT_MS])
        run[ANSWERS_AT] = state[frame.ANSWER_AT] + frame.ANSWER_BYTES_PER_MESSAGE * count
    run[AT] = run[FRAME_END]
    run[ROW] = -1
    run[FRAMES] += 1


@inlined
def _touch(run: Words, row: int, state: Words, queue_numbers: Words, touched: Words, answers: Bytes) -> None:
    """Add the queues of the current frame to `touched`, unless its topic is already complete."""
    if run[TOUCHED_TOPIC] == row:
        return
    noted = run[TOUCHED]
    queues = state[frame.QUEUE_COUNT]
    numbers = state[frame.NUMBERS_AT]
    count = state[frame.COUNT]
    if state[frame.FIXED_QUEUE] >= 0:
        touched[noted] = queue_numbers[numbers + state[frame.FIXED_QUEUE]]
        noted += 1
    elif count < queues:
        queue_ids = state[frame.ANSWER_AT] + 16 * count
        for message in range(count):
            touched[noted] = queue_numbers[numbers + load_le32(answers, queue_ids + 4 * message)]
            noted += 1
    else:
        for queue_id in range(queues):
            touched[noted] = queue_numbers[numbers + queue_id]
            noted += 1
        run[TOUCHED_TOPIC] = row
    run[TOUCHED] = noted


@kernel
def publish_touched(cells: Words, run: Words, own: Words, touched: Words) -> None:
    """Publish the next offsets of the touched queues in the queue table, and clear `touched`.

    `cells` int64 is the queue table, `own` int64[max_queues] holds the writer's next offsets.
    """
    for place in range(run[TOUCHED]):
        number = touched[place]
        entry = queue_table.HEADER_WORDS + number * queue_table.ENTRY_WORDS
        store_release(cells, entry + queue_table.NEXT_OFFSET, own[number])
    run[TOUCHED] = 0
    run[TOUCHED_TOPIC] = -1


# Frames in a receive buffer.


@kernel
def leading_run(buffer: Bytes, at: int, end: int, operation: int, bytes_max: int, limit: Words) -> int:
    """End of the leading complete frames of one operation, none larger than `bytes_max`.

    `buffer` uint8[n] is filled up to `end`. At most `limit[0]` frames are accepted; `limit[0]` is decremented for each.
    The scan stops at the first frame that is incomplete, invalid, or of another operation.
    """
    while limit[0] > 0 and end - at >= HEADER_SIZE:
        if (
            load_le32(buffer, at) != MAGIC
            or load_le16(buffer, at + VERSION_AT) != VERSION
            or load_le16(buffer, at + OPERATION_AT) != operation
            or load_le32(buffer, at + ZERO_AT) != 0
        ):
            break
        rest = HEADER_SIZE + load_le32(buffer, at + OPTIONS_SIZE_AT)
        payload = load_le64(buffer, at + PAYLOAD_SIZE_AT)
        # Compared separately, since the sum may overflow 64 bits.
        if payload < 0 or payload > bytes_max or rest + payload > bytes_max or rest + payload > end - at:
            break
        at += rest + payload
        limit[0] -= 1
    return at


def warm() -> None:
    """Compile or load these kernels."""
    read_options(np.zeros(1, np.uint8), 0, 0, np.zeros(ITEMS, np.int64), 0, np.zeros(KEY_BYTES_MAX, np.uint8))
    nothing, words = np.zeros(1, np.uint8), np.zeros(1, np.int64)
    run, key = np.zeros(RUN_WORDS, np.int64), np.zeros(KEY_BYTES_MAX, np.uint8)
    state = np.zeros(frame.STATE_WORDS, np.int64)
    key_hash(key, 0)
    find_row(run, nothing, key, 0)
    append_run(run, state, nothing, key, words, words, words, words, nothing, nothing, nothing)
    append_single(run, state, nothing, key, words, words, words, words, nothing, nothing, nothing, 0, 0, 0)
    publish_touched(words, run, words, words)
    leading_run(np.zeros(1, np.uint8), 0, 0, 0, 0, np.zeros(1, np.int64))
