"""Reading a range of a CommitLog segment that may begin and end anywhere: where its records begin, which are wanted.

    find_boundary(view, start, stop, base, limit, segment_stop, successor, out)
                                        where a record begins, proven by the record itself and by the one behind it
    select_positions(view, …, state)    the positions of the wanted records of view[AT:STOP]

`view` uint8[n] is a segment or a part of one, `base` the log position of its byte 0. `limit` and `segment_stop` are
positions in it, which may lie behind its end: where the log ends and where the segment does. Whoever reads two
neighbouring ranges comes to the same border in both, whatever part of the segment each of them holds.
"""

from __future__ import annotations

import numpy as np

from mqproc.kernels.hashing import java_hash_utf8
from mqproc.kernels.jit.compile import kernel
from mqproc.kernels.jit.intrinsics import load_be32, load_be64
from mqproc.kernels.jit.lowering import Bytes, Int32s, Words
from mqproc.kernels.queue_lookup import UNKNOWN, find_queue
from mqproc.kernels.record_check import (
    BAD_OFFSET,
    BLANK,
    REACHED_STOP,
    REASON_NAMES,
    VERIFY_ALL,
    checked_size,
    crc_reason,
    prefetch_bytes,
    prefetch_stride,
    record_size,
    signed_topic_length,
    store_timestamp_at,
    topic_length_at,
    topic_length_size,
)
from mqproc.kernels.record_fields import (
    KEYS_AT,
    KEYS_SIZE,
    PLACES_SIZE,
    TAG_AT,
    TAG_SIZE,
    find_byte,
    find_tags_and_keys,
    properties_at,
    properties_end,
    same_bytes,
)
from mqproc.layout import properties, record

# What find_boundary returns in place of a position.
NOWHERE = -1
NEEDS_MORE = -2
"""The answer lies behind the view's end; out[NEEDED] says how far the view must reach at least."""
NEEDED = 0
BOUNDARY_SIZE = 1

# Why select_positions stopped, beside record_check's reasons.
FULL = len(REASON_NAMES)
UNKNOWN_QUEUE = FULL + 1
CUT_BY_VIEW = FULL + 2

# Indices into the state, int64[STATE_SIZE].
(
    AT,  # position in the view; moved
    STOP,  # up to where records are looked at; one that begins before it is looked at whole
    LIMIT,  # where the log ends in this segment
    SEGMENT_STOP,
    BASE,
    BEGIN_MS,  # BEGIN_MS ≤ store time < END_MS
    END_MS,
    VERIFY,  # a sum of record_check's VERIFY_…, looked at in wanted records
    VERIFY_UNWANTED,  # the same, in the others
    BYTES_MAX,  # wanted records of so many bytes are enough for once
    FOUND,  # positions written; with FOUND_BYTES moved, so that a walk that is gone on with adds to them
    FOUND_BYTES,
    SCRATCH,
) = range(13)
STATE_SIZE = SCRATCH + PLACES_SIZE

# What is wanted of a queue, int64[VERDICT_COLUMNS] for each queue of the table.
(
    FIRST_OFFSET,  # FIRST_OFFSET ≤ queue offset < STOP_OFFSET
    STOP_OFFSET,
    DELETED_AT,  # records below both belong to a queue of this name that was deleted
    DELETED_NEXT,
) = range(4)
VERDICT_COLUMNS = 4

_MAGIC_V1 = record.MAGIC_V1
_MAGIC_V2 = record.MAGIC_V2
_MAGIC_BLANK = record.MAGIC_BLANK
_HEADER_END = record.PHYSICAL_OFFSET + 8
_SPACE = ord(properties.KEY_SEPARATOR)
# Prepared and rolled back messages have no place in a queue: none and commit have this bit clear.
_HAS_NO_PLACE = 0x4
assert record.SYS_FLAG_PREPARED & record.SYS_FLAG_ROLLBACK == _HAS_NO_PLACE


@kernel
def _fills_segment(view: Bytes, at: int, segment_stop: int) -> bool:
    """Whether the BLANK at `at` is the one that ends the segment."""
    return load_be32(view, at + record.TOTAL_SIZE) == segment_stop - at


@kernel
def _is_followed(view: Bytes, at: int, base: int, limit: int, segment_stop: int) -> int:
    """1 when what lies at `at` may follow a record: a header of its own place, the right BLANK, zeros, the log's end.

    0 when it may not, NEEDS_MORE when the view ends before that is known.
    """
    if at >= limit:
        return 1
    if at + record.BLANK_SIZE > view.size:
        return 0 if at + record.BLANK_SIZE > limit else NEEDS_MORE
    magic = load_be32(view, at + record.MAGIC)
    if magic == _MAGIC_BLANK:
        return 1 if _fills_segment(view, at, segment_stop) else 0
    if magic == 0:
        return 1 if load_be32(view, at + record.TOTAL_SIZE) == 0 else 0
    if magic != _MAGIC_V1 and magic != _MAGIC_V2:
        return 0
    if at + _HEADER_END > view.size:
        return 0 if at + _HEADER_END > limit else NEEDS_MORE
    return 1 if load_be64(view, at + record.PHYSICAL_OFFSET) == base + at else 0


@kernel
def find_boundary(
    view: Bytes, start: int, stop: int, base: int, limit: int, segment_stop: int, successor: int, out: Words
) -> int:
    """First position in view[start:stop] where an intact record begins, or the BLANK that ends the segment.

    Intact: magic, own physical offset, sizes and CRCs hold, and it ends at or below `limit`; with `successor` ≠ 0 what
    lies behind it must fit too, so that a copy of a record inside of a body is none. NOWHERE, or NEEDS_MORE with
    out[NEEDED], where `out` is int64[BOUNDARY_SIZE].
    """
    seen = min(stop, view.size - record.BLANK_SIZE + 1)
    for at in range(start, seen):
        magic = load_be32(view, at + record.MAGIC)
        if magic == _MAGIC_BLANK and _fills_segment(view, at, segment_stop):
            return at
        if magic != _MAGIC_V1 and magic != _MAGIC_V2:
            continue
        total = load_be32(view, at + record.TOTAL_SIZE)
        if total < record.FIXED_SIZE_V4 or at + total > limit:
            continue
        if at + _HEADER_END <= view.size and load_be64(view, at + record.PHYSICAL_OFFSET) != base + at:
            continue
        if at + total > view.size:
            out[NEEDED] = at + total + _HEADER_END
            return NEEDS_MORE
        if checked_size(view, at, view.size, base + at, VERIFY_ALL) < 0:
            continue
        if successor == 0:
            return at
        followed = _is_followed(view, at + total, base, limit, segment_stop)
        if followed == NEEDS_MORE:
            out[NEEDED] = at + total + _HEADER_END
            return NEEDS_MORE
        if followed != 0:
            return at
    if stop > seen and min(limit, segment_stop) > view.size:
        out[NEEDED] = min(min(limit, segment_stop), stop + record.BLANK_SIZE)
        return NEEDS_MORE
    return NOWHERE


@kernel
def is_one_of(view: Bytes, at: int, size: int, texts: Bytes, ends: Words) -> bool:
    """Whether view[at:at + size] is one of `texts` uint8, whose ends are `ends` int64[count]."""
    first = 0
    for number in range(ends.size):
        end = int(ends[number])
        if end - first == size and same_bytes(view, at, texts, first, size):
            return True
        first = end
    return False


@kernel
def has_one_of(view: Bytes, at: int, size: int, texts: Bytes, ends: Words) -> bool:
    """Whether a word of view[at:at + size], which are separated by spaces, is one of `texts`."""
    stop = at + size
    while at < stop:
        end = find_byte(view, at, stop, _SPACE)
        if end > at and is_one_of(view, at, end - at, texts, ends):
            return True
        at = end + 1
    return False


@kernel
def has_tag_and_key(
    view: Bytes, at: int, total: int, tags: Bytes, tag_ends: Words, keys: Bytes, key_ends: Words, state: Words
) -> bool:
    """Whether the record at `at`, whose sizes hold, has one of the tags and one of the keys; none given means all."""
    if tag_ends.size == 0 and key_ends.size == 0:
        return True
    find_tags_and_keys(view, properties_at(view, at), properties_end(view, at, total), state, SCRATCH)
    tag_at = int(state[SCRATCH + TAG_AT])
    tag_size = int(state[SCRATCH + TAG_SIZE])
    if tag_ends.size > 0 and (tag_size == 0 or not is_one_of(view, tag_at, tag_size, tags, tag_ends)):
        return False
    keys_at = int(state[SCRATCH + KEYS_AT])
    return key_ends.size == 0 or has_one_of(view, keys_at, int(state[SCRATCH + KEYS_SIZE]), keys, key_ends)


@kernel
def _is_cut(view: Bytes, at: int, limit: int, log_limit: int) -> bool:
    """Whether what lies at `at` may be a record that ends behind view[:limit] and within `log_limit`."""
    if limit - at < record.BLANK_SIZE:
        return log_limit - at >= record.BLANK_SIZE
    magic = load_be32(view, at + record.MAGIC)
    total = load_be32(view, at + record.TOTAL_SIZE)
    return (magic in (_MAGIC_V1, _MAGIC_V2)) and limit - at < total <= log_limit - at


@kernel
def select_positions(
    view: Bytes,
    queues: Bytes,
    cells: Words,
    slots: Int32s,
    verdicts: Words,
    tags: Bytes,
    tag_ends: Words,
    keys: Bytes,
    key_ends: Words,
    positions: Words,
    state: Words,
) -> int:
    """Positions of the wanted records that begin in view[AT:STOP] into `positions` int64[n] from FOUND on; why it
    stopped.

    `queues`, `cells`, `slots` are a queue table's `bytes_view`, `cells` and `slots`, and `verdicts`
    int64[VERDICT_COLUMNS × queues] says what is wanted of each; a record of a queue that the table lacks stops the
    walk with UNKNOWN_QUEUE. `tags` and `keys` uint8 with their ends int64: without any, all pass. Where the walk
    stopped is AT, and FULL means that more may follow there. CUT_BY_VIEW: the record at AT ends behind the view.
    """
    at = int(state[AT])
    stop = int(state[STOP])
    base = int(state[BASE])
    begin_ms = int(state[BEGIN_MS])
    end_ms = int(state[END_MS])
    verify = int(state[VERIFY])
    verify_unwanted = int(state[VERIFY_UNWANTED])
    bytes_max = int(state[BYTES_MAX])
    limit = min(int(state[LIMIT]), view.size)
    is_cut = state[LIMIT] > view.size
    found = int(state[FOUND])
    size = int(state[FOUND_BYTES])
    topic = 0
    topic_size = -1
    queue_id = -1
    number = UNKNOWN
    last_total = 0
    reason = REACHED_STOP
    while at < stop:
        total = record_size(view, at, limit)
        if total < 0:
            reason = -total
            if is_cut and _is_cut(view, at, limit, int(state[LIMIT])):
                reason = CUT_BY_VIEW
            break
        if load_be64(view, at + record.PHYSICAL_OFFSET) != base + at:
            reason = BAD_OFFSET
            break
        prefetch_stride(view, at, total, last_total)
        last_total = total
        # Before its topic is believed.
        if verify_unwanted != 0:
            bad = crc_reason(view, at, total, verify_unwanted)
            if bad != 0:
                reason = bad
                break
        width = topic_length_size(view, at)
        length_at = topic_length_at(view, at)
        this_size = signed_topic_length(view, length_at, width)
        this_queue = load_be32(view, at + record.QUEUE_ID)
        this_topic = length_at + width
        if (
            this_queue != queue_id
            or this_size != topic_size
            or not same_bytes(view, this_topic, view, topic, topic_size)
        ):
            topic_hash = java_hash_utf8(view, this_topic, this_topic + this_size, 0)
            number = find_queue(queues, cells, slots, view, this_topic, this_size, topic_hash, this_queue)
            if number == UNKNOWN:
                reason = UNKNOWN_QUEUE
                break
        topic = this_topic
        topic_size = this_size
        queue_id = this_queue
        verdict = number * VERDICT_COLUMNS
        queue_offset = load_be64(view, at + record.QUEUE_OFFSET)
        stored = load_be64(view, store_timestamp_at(view, at))
        if (
            verdicts[verdict + FIRST_OFFSET] <= queue_offset < verdicts[verdict + STOP_OFFSET]
            and begin_ms <= stored < end_ms
            and load_be32(view, at + record.SYS_FLAG) & _HAS_NO_PLACE == 0
            and not (base + at < verdicts[verdict + DELETED_AT] and queue_offset < verdicts[verdict + DELETED_NEXT])
            and has_tag_and_key(view, at, total, tags, tag_ends, keys, key_ends, state)
        ):
            if found == positions.size or (found > 0 and size + total > bytes_max):
                reason = FULL
                break
            if verify != 0 and verify_unwanted == 0:
                bad = crc_reason(view, at, total, verify)
                if bad != 0:
                    reason = bad
                    break
            positions[found] = at
            found += 1
            size += total
        at += total
    if reason == BLANK and not _fills_segment(view, at, int(state[SEGMENT_STOP])):
        reason = BAD_OFFSET
    state[AT] = at
    state[FOUND] = found
    state[FOUND_BYTES] = size
    return reason


# --- listed ---
# Records at places that a queue's units name: which are what they must be, and which of those are wanted.
#
#     select_by_unit(view, listed, numbers, offsets, …, positions, state)
#
# `view` uint8[n] is a segment, BASE the log position of its byte 0. Indices of the state and what `tags` and `keys` mean
# are `log_range`'s; AT is an index into `listed` here.


OTHER_PLACE = CUT_BY_VIEW + 2
"""Why select_by_unit stopped, beside record_check's reasons and FULL: the record is of another place in the queues."""

# Records lie apart, so the processor is told so many ahead where it reads next.
_AHEAD = 8
_AHEAD_BYTES = 256


@kernel
def _prefetch_record(view: Bytes, listed: Words, index: int, base: int) -> None:
    if index < listed.size:
        prefetch_bytes(view, int(listed[index]) - base, _AHEAD_BYTES)


@kernel
def _is_of(view: Bytes, at: int, number: int, queues: Bytes, cells: Words, slots: Int32s) -> bool:
    """Whether the record at `at`, whose sizes hold, is of the queue with that number in the table."""
    width = topic_length_size(view, at)
    length_at = topic_length_at(view, at)
    size = signed_topic_length(view, length_at, width)
    topic = length_at + width
    topic_hash = java_hash_utf8(view, topic, topic + size, 0)
    queue_id = load_be32(view, at + record.QUEUE_ID)
    return find_queue(queues, cells, slots, view, topic, size, topic_hash, queue_id) == number


@kernel
def select_by_unit(
    view: Bytes,
    listed: Words,
    numbers: Words,
    offsets: Words,
    queues: Bytes,
    cells: Words,
    slots: Int32s,
    tags: Bytes,
    tag_ends: Words,
    keys: Bytes,
    key_ends: Words,
    positions: Words,
    state: Words,
) -> int:
    """Positions in the view of the wanted ones of the listed records into `positions` int64[m]; why it stopped.

    `listed` int64[n] are log positions, ascending; `numbers` int64[n] says of which queue of the table each must be,
    `offsets` int64[n] its offset there. REACHED_STOP: all have been looked at; FULL: more may follow at AT; any other
    reason says why the record at AT is not the listed one.
    """
    at = int(state[AT])
    base = int(state[BASE])
    limit = min(int(state[LIMIT]), view.size)
    begin_ms = int(state[BEGIN_MS])
    end_ms = int(state[END_MS])
    verify = int(state[VERIFY])
    bytes_max = int(state[BYTES_MAX])
    found = 0
    size = 0
    reason = REACHED_STOP
    while at < listed.size:
        _prefetch_record(view, listed, at + _AHEAD, base)
        place = int(listed[at]) - base
        total = checked_size(view, place, limit, base + place, verify)
        if total < 0:
            reason = -total
            break
        if load_be64(view, place + record.QUEUE_OFFSET) != offsets[at] or not _is_of(
            view, place, int(numbers[at]), queues, cells, slots
        ):
            reason = OTHER_PLACE
            break
        stored = load_be64(view, store_timestamp_at(view, place))
        if begin_ms <= stored < end_ms and has_tag_and_key(view, place, total, tags, tag_ends, keys, key_ends, state):
            if found == positions.size or (found > 0 and size + total > bytes_max):
                reason = FULL
                break
            positions[found] = place
            found += 1
            size += total
        at += 1
    state[AT] = at
    state[FOUND] = found
    state[FOUND_BYTES] = size
    return reason


def warm() -> None:
    """Compile or load these kernels."""
    nothing = np.zeros(0, np.uint8)
    words = np.zeros(STATE_SIZE, np.int64)
    slots = np.zeros(1, np.int32)
    none = words[:0]
    find_boundary(nothing, 0, 0, 0, 0, 0, 1, words)
    select_positions(nothing, nothing, words, slots, words, nothing, none, nothing, none, none, words)
    nothing = np.zeros(0, np.uint8)
    words = np.zeros(STATE_SIZE, np.int64)
    none = words[:0]
    slots = np.zeros(1, np.int32)
    select_by_unit(nothing, none, none, none, nothing, words, slots, nothing, none, nothing, none, none, words)
