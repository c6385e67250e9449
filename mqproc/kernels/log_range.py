"""Find record boundaries and select records in any range of a CommitLog segment.

    find_boundary(view, start, stop, base, limit, segment_stop, successor, out)
                                        a record boundary, proven by the record and by its successor
    select_positions(view, …, state)    positions of the selected records of view[AT:STOP]
    select_by_unit(view, …, state)      the same for records given by the units of a queue

`view` uint8[n] is a segment or a part of one, `base` the log position of its byte 0. `limit`, the end of the log, and
`segment_stop`, the end of the segment, are positions in the view and may lie beyond it. Readers of two adjacent ranges
find the same boundary between them, whatever part of the segment each has in memory.
"""

from __future__ import annotations

import numpy as np

from mqproc.kernels.hashing import java_hash_utf8
from mqproc.kernels.jit.compile import kernel
from mqproc.kernels.jit.intrinsics import load_be32, load_be64
from mqproc.kernels.jit.lowering import Bytes, Int32s, Words
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
    store_timestamp_at,
    topic_of,
)
from mqproc.kernels.record_fields import (
    KEYS_AT,
    KEYS_SIZE,
    PLACES_SIZE,
    TAG_AT,
    TAG_SIZE,
    UNKNOWN,
    find_byte,
    find_queue,
    find_tags_and_keys,
    is_one_of,
    properties_at,
    properties_end,
    same_bytes,
)
from mqproc.layout import properties, record

# Results of find_boundary in place of a position.
NOWHERE = -1
NEEDS_MORE = -2
"""The view ends too early; out[NEEDED] is the minimum end of a view that decides it."""
NEEDED = 0
BOUNDARY_SIZE = 1

# Reasons of select_positions in addition to record_check's.
FULL = len(REASON_NAMES)
UNKNOWN_QUEUE = FULL + 1
CUT_BY_VIEW = FULL + 2

# Indices into the state, int64[STATE_SIZE].
(
    AT,  # position in the view; advanced
    STOP,  # records that begin below it are examined
    LIMIT,  # end of the log in this segment
    SEGMENT_STOP,
    BASE,
    BEGIN_MS,  # BEGIN_MS ≤ store time < END_MS
    END_MS,
    VERIFY,  # sum of record_check's VERIFY_…, applied to selected records
    VERIFY_UNWANTED,  # the same for the other records
    BYTES_MAX,  # stop after selected records of this size
    FOUND,  # positions written; like FOUND_BYTES accumulated by a continued walk
    FOUND_BYTES,
    SCRATCH,
) = range(13)
STATE_SIZE = SCRATCH + PLACES_SIZE

# Selection by queue, int64[VERDICT_COLUMNS] for each queue of the table.
(
    FIRST_OFFSET,  # FIRST_OFFSET ≤ queue offset < STOP_OFFSET
    STOP_OFFSET,
    DELETED_AT,  # records below both bounds belong to an earlier, deleted queue of this name
    DELETED_NEXT,
) = range(4)
VERDICT_COLUMNS = 4

_HEADER_END = record.PHYSICAL_OFFSET + 8
_SPACE = ord(properties.KEY_SEPARATOR)


@kernel
def _fills_segment(view: Bytes, at: int, segment_stop: int) -> bool:
    """Whether the BLANK at `at` extends exactly to the end of the segment."""
    return load_be32(view, at + record.TOTAL_SIZE) == segment_stop - at


@kernel
def _is_followed(view: Bytes, at: int, base: int, limit: int, segment_stop: int) -> int:
    """1 if the bytes at `at` may follow a record, 0 if not, NEEDS_MORE if the view is too short.

    A header with its own offset, the final BLANK, zeros, or the log's end may follow.
    """
    if at >= limit:
        return 1
    if at + record.BLANK_SIZE > view.size:
        return 0 if at + record.BLANK_SIZE > limit else NEEDS_MORE
    magic = load_be32(view, at + record.MAGIC)
    if magic == record.MAGIC_BLANK:
        return 1 if _fills_segment(view, at, segment_stop) else 0
    if magic == 0:
        return 1 if load_be32(view, at + record.TOTAL_SIZE) == 0 else 0
    if magic != record.MAGIC_V1 and magic != record.MAGIC_V2:
        return 0
    if at + _HEADER_END > view.size:
        return 0 if at + _HEADER_END > limit else NEEDS_MORE
    return 1 if load_be64(view, at + record.PHYSICAL_OFFSET) == base + at else 0


@kernel
def find_boundary(
    view: Bytes, start: int, stop: int, base: int, limit: int, segment_stop: int, successor: int, out: Words
) -> int:
    """First position in view[start:stop] of a valid record or the segment's final BLANK.

    Valid means: magic, own physical offset, sizes and CRCs match, and the record ends at or below `limit`. With
    `successor` ≠ 0 the following bytes must fit too, which rejects a copy of a record inside a body. Returns NOWHERE,
    or NEEDS_MORE with out[NEEDED], if there is no position; `out` is int64[BOUNDARY_SIZE].
    """
    seen = min(stop, view.size - record.BLANK_SIZE + 1)
    for at in range(start, seen):
        magic = load_be32(view, at + record.MAGIC)
        if magic == record.MAGIC_BLANK and _fills_segment(view, at, segment_stop):
            return at
        if magic != record.MAGIC_V1 and magic != record.MAGIC_V2:
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
        out[NEEDED] = min(limit, segment_stop, stop + record.BLANK_SIZE)
        return NEEDS_MORE
    return NOWHERE


@kernel
def has_one_of(view: Bytes, at: int, size: int, texts: Bytes, ends: Words) -> bool:
    """Whether one of the space-separated words of view[at:at + size] is one of `texts`."""
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
    """Whether a valid record has one of the tags and one of the keys; empty lists match all."""
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
    """Whether a record at `at` may extend beyond view[:limit] but not beyond `log_limit`."""
    if limit - at < record.BLANK_SIZE:
        return log_limit - at >= record.BLANK_SIZE
    magic = load_be32(view, at + record.MAGIC)
    total = load_be32(view, at + record.TOTAL_SIZE)
    return (magic in (record.MAGIC_V1, record.MAGIC_V2)) and limit - at < total <= log_limit - at


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
    """Select records that begin in view[AT:STOP]; adds their positions to `positions` int64[n].

    `queues`, `cells`, `slots` are a queue table's `bytes_view`, `cells` and `slots`; `verdicts` int64[VERDICT_COLUMNS ×
    queues] is the selection for each queue. `tags` and `keys` uint8 with their ends int64 restrict it further; empty
    lists match all. Returns the reason for the stop at AT: FULL if more may follow, UNKNOWN_QUEUE for a record of a
    queue that the table lacks, CUT_BY_VIEW if the record extends beyond the view, or a reason of record_check.
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
        # Checked before the topic is trusted.
        if verify_unwanted != 0:
            bad = crc_reason(view, at, total, verify_unwanted)
            if bad != 0:
                reason = bad
                break
        this_topic, this_size = topic_of(view, at)
        this_queue = load_be32(view, at + record.QUEUE_ID)
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
            and load_be32(view, at + record.SYS_FLAG) & record.SYS_FLAG_PREPARED == 0
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


# Selection by units. AT of the state is an index into `listed` here.


OTHER_PLACE = CUT_BY_VIEW + 2
"""Reason of select_by_unit: the record has another queue or queue offset than the unit says."""

# The records are scattered; prefetch this many ahead.
_AHEAD = 8
_AHEAD_BYTES = 256


@kernel
def _prefetch_record(view: Bytes, listed: Words, index: int, base: int) -> None:
    if index < listed.size:
        prefetch_bytes(view, int(listed[index]) - base, _AHEAD_BYTES)


@kernel
def _is_of(view: Bytes, at: int, number: int, queues: Bytes, cells: Words, slots: Int32s) -> bool:
    """Whether the valid record at `at` belongs to the queue with this number in the table."""
    topic, size = topic_of(view, at)
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
    """Write the positions of the selected records among the listed ones to `positions` int64[m].

    `listed` int64[n] are ascending log positions from a queue's units; `numbers` int64[n] are the expected queue
    numbers in the table, `offsets` int64[n] the expected queue offsets. Returns REACHED_STOP if all are examined, FULL
    if more may follow at AT; any other reason says why the record at AT is not the expected one.
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
    select_by_unit(nothing, none, none, none, nothing, words, slots, nothing, none, nothing, none, none, words)
