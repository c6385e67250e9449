"""Select records in a pass over the log: by topic, property, text in the body, store time.

    match_records(view, topic, name, value, part, borders, matches, state)    positions of the matching records
    has_key(view, at, total, topic, name, key)                        test of one record
    select_records(…)                                                 copy the records of chosen topics and times
    relocate_records(…)                                               assign new physical offsets to copied records
    last_descent(view, start, stop, previous_ms)                      where store times last step back

Empty conditions match every record. Bodies are searched as stored: compressed bodies are not decompressed.
"""

from __future__ import annotations

import numpy as np

from mqproc.kernels.crc import write_crc_tail
from mqproc.kernels.hashing import java_hash_utf8
from mqproc.kernels.jit.compile import kernel
from mqproc.kernels.jit.intrinsics import copy_bytes, load_be32, load_be64, load_u8, store_be64
from mqproc.kernels.jit.lowering import Bytes, Int32s, Words
from mqproc.kernels.record_check import (
    BAD_OFFSET,
    REACHED_STOP,
    body_length_at,
    has_crc_tail,
    prefetch_stride,
    record_size,
    store_timestamp_at,
    topic_of,
)
from mqproc.kernels.record_fields import (
    ABSENT,
    DELETED,
    UNKNOWN,
    belongs_to_deleted,
    find_byte,
    find_property,
    find_queue,
    place_at,
    place_size,
    properties_at,
    properties_end,
    same_bytes,
)
from mqproc.layout import properties, record

# Indices into the state, int64[STATE_SIZE]. `select_records` uses FILLED in place of MATCHES_MAX.
(
    AT,  # position in the view; advanced
    STOP,  # records that end above it are excluded
    BASE,  # physical offset of the view's byte 0
    BEGIN_MS,  # BEGIN_MS ≤ store time < END_MS
    END_MS,
    MATCHES_MAX,
    # results
    MATCHES,
    RECORDS,  # examined records
) = range(8)
STATE_SIZE = 8

_SPACE = ord(properties.KEY_SEPARATOR)

MATCHES_FULL = 100
"""Reason in addition to record_check's: `matches` has no room for the next match."""


@kernel
def find_borders(part: Bytes, borders: Words) -> None:
    """Store in `borders` int64[part.size] the longest border of each beginning of `part`.

    A border is a shorter beginning that is also the end: 2 of "abcab".
    """
    border = 0
    for end in range(1, part.size):
        byte = load_u8(part, end)
        while border > 0 and load_u8(part, border) != byte:
            border = int(borders[border - 1])
        if load_u8(part, border) == byte:
            border += 1
        borders[end] = border


@kernel
def _holds_part(view: Bytes, start: int, stop: int, part: Bytes, borders: Words) -> bool:
    """Whether `part` (not empty) occurs in view[start:stop]; `start` must be at least 8.

    D. Knuth, J. Morris and V. Pratt, *Fast Pattern Matching in Strings*, 1977: linear time for any bytes.
    """
    last = stop - part.size
    first = load_u8(part, 0)
    at = start
    matched = 0
    while at <= last:
        if matched == 0:
            at = find_byte(view, at, last + 1, first)
            if at > last:
                return False
            matched = 1
        while matched < part.size and load_u8(view, at + matched) == load_u8(part, matched):
            matched += 1
        if matched == part.size:
            return True
        border = int(borders[matched - 1])
        at += matched - border
        matched = border
    return False


@kernel
def _has_topic(view: Bytes, at: int, topic: Bytes) -> bool:
    topic_at, size = topic_of(view, at)
    return size == topic.size and same_bytes(view, topic_at, topic, 0, size)


@kernel
def _has_property(view: Bytes, at: int, total: int, name: Bytes, value: Bytes) -> bool:
    """Whether the record has the property, with this value unless `value` is empty."""
    place = find_property(view, properties_at(view, at), properties_end(view, at, total), name)
    if place == ABSENT:
        return False
    size = place_size(place)
    return value.size == 0 or (size == value.size and same_bytes(view, place_at(place), value, 0, size))


@kernel
def _matches(
    view: Bytes,
    at: int,
    total: int,
    topic: Bytes,
    name: Bytes,
    value: Bytes,
    part: Bytes,
    borders: Words,
    begin_ms: int,
    end_ms: int,
) -> bool:
    stored = load_be64(view, store_timestamp_at(view, at))
    if stored < begin_ms or stored >= end_ms:
        return False
    if topic.size > 0 and not _has_topic(view, at, topic):
        return False
    if name.size > 0 and not _has_property(view, at, total, name, value):
        return False
    if part.size == 0:
        return True
    body = body_length_at(view, at)
    return _holds_part(view, body + 4, body + 4 + load_be32(view, body), part, borders)


@kernel
def match_records(
    view: Bytes, topic: Bytes, name: Bytes, value: Bytes, part: Bytes, borders: Words, matches: Words, state: Words
) -> int:
    """Find the matching records of view[AT:STOP]; positions in `matches` int64[≥ MATCHES_MAX].

    `view`, `topic`, `name` and `value` (of a property), `part` (of a body) uint8; `borders` as `find_borders` stores
    them. Returns MATCHES_FULL or a reason of
    record_check. CRCs are not checked; check those of a match before returning it.
    """
    at = int(state[AT])
    stop = int(state[STOP])
    base = int(state[BASE])
    begin_ms = int(state[BEGIN_MS])
    end_ms = int(state[END_MS])
    found = 0
    records = 0
    last_total = 0
    reason = REACHED_STOP
    while at < stop:
        total = record_size(view, at, view.size)
        if total < 0:
            reason = -total
            break
        if load_be64(view, at + record.PHYSICAL_OFFSET) != base + at:
            reason = BAD_OFFSET
            break
        if at + total > stop:
            break
        prefetch_stride(view, at, total, last_total)
        last_total = total
        if _matches(view, at, total, topic, name, value, part, borders, begin_ms, end_ms):
            if found >= state[MATCHES_MAX]:
                reason = MATCHES_FULL
                break
            matches[found] = at
            found += 1
        records += 1
        at += total
    state[AT] = at
    state[MATCHES] = found
    state[RECORDS] = records
    return reason


@kernel
def has_key(view: Bytes, at: int, total: int, topic: Bytes, name: Bytes, key: Bytes) -> bool:
    """Whether the valid record at `at` has a topic and a key, a word of property `name`.

    `topic`, `name` (KEYS or UNIQ_KEY) and `key` uint8, not empty.
    """
    if not _has_topic(view, at, topic):
        return False
    place = find_property(view, properties_at(view, at), properties_end(view, at, total), name)
    if place == ABSENT:
        return False
    word = place_at(place)
    stop = word + place_size(place)
    while word < stop:
        end = find_byte(view, word, stop, _SPACE)
        if end - word == key.size and same_bytes(view, word, key, 0, key.size):
            return True
        word = end + 1
    return False


@kernel
def has_value(view: Bytes, at: int, total: int, topic: Bytes, name: Bytes, value: Bytes) -> bool:
    """Whether the record at `at` has this topic and a non-empty property `name`; as `has_key`."""
    if not _has_topic(view, at, topic):
        return False
    place = find_property(view, properties_at(view, at), properties_end(view, at, total), name)
    if place == ABSENT or place_size(place) != value.size:
        return False
    return same_bytes(view, place_at(place), value, 0, value.size)


# Copying records of chosen topics, for export and compaction.

FILLED = MATCHES_MAX  # bytes of `out` in use; advanced

CHOSEN_QUEUE = 0
"""Queue id under which the table holds a chosen topic."""


@kernel
def _is_deleted(
    view: Bytes, at: int, topic: int, size: int, topic_hash: int, physical_offset: int, table: Bytes, cells: Words,
    slots: Int32s
) -> bool:  # fmt: skip
    queue_id = load_be32(view, at + record.QUEUE_ID)
    number = find_queue(table, cells, slots, view, topic, size, topic_hash, queue_id)
    if number == UNKNOWN:
        return False
    queue_offset = load_be64(view, at + record.QUEUE_OFFSET)
    return belongs_to_deleted(cells, max(number, DELETED - number), physical_offset, queue_offset)


@kernel
def select_records(
    view: Bytes,
    topics: Bytes,
    topic_cells: Words,
    topic_slots: Int32s,
    deleted: Bytes,
    deleted_cells: Words,
    deleted_slots: Int32s,
    out: Bytes,
    counts: Words,
    state: Words,
) -> bool:
    """Copy the chosen records of view[AT:STOP] into `out` from FILLED on.

    False if the next one does not fit. `view` uint8 is a segment with complete records between AT and STOP. Both tables
    are given as `bytes_view`, `cells` and `slots` of a queue table: the first holds queue CHOSEN_QUEUE of each chosen
    topic, the second the deleted queues. `counts` int64[topics] is incremented at the topic's number.
    """
    at = int(state[AT])
    stop = int(state[STOP])
    filled = int(state[FILLED])
    last_topic = 0
    last_size = -1
    topic_hash = 0
    chosen = -1
    last_total = 0
    room = True
    while at < stop:
        total = record_size(view, at, stop)
        prefetch_stride(view, at, total, last_total)
        last_total = total
        topic, size = topic_of(view, at)
        if size != last_size or not same_bytes(view, topic, view, last_topic, size):
            topic_hash = java_hash_utf8(view, topic, topic + size, 0)
            chosen = find_queue(topics, topic_cells, topic_slots, view, topic, size, topic_hash, CHOSEN_QUEUE)
        last_topic = topic
        last_size = size
        if chosen >= 0:
            stored = load_be64(view, store_timestamp_at(view, at))
            place = state[BASE] + at
            in_time = state[BEGIN_MS] <= stored < state[END_MS]
            if in_time and not _is_deleted(
                view, at, topic, size, topic_hash, place, deleted, deleted_cells, deleted_slots
            ):
                if filled + total > out.size:
                    room = False
                    break
                copy_bytes(out, filled, view, at, total)
                filled += total
                counts[chosen] += 1
        at += total
    state[AT] = at
    state[FILLED] = filled
    return room


@kernel
def relocate_records(records: Bytes, start: int, stop: int, physical_offset: int, room: int) -> int:
    """Give the records in records[start:stop] physical offsets from `physical_offset` on.

    Updates their CRC properties. Stops before a record that would leave less than BLANK_SIZE of `room`; returns the
    position of the stop.
    """
    at = start
    while at < stop:
        total = load_be32(records, at + record.TOTAL_SIZE)
        if at + total + record.BLANK_SIZE > start + room:
            break
        store_be64(records, at + record.PHYSICAL_OFFSET, physical_offset + at - start)
        if has_crc_tail(records, at, total):
            write_crc_tail(records, at, at + total - record.CRC_TAIL_SIZE)
        at += total
    return at


@kernel
def last_descent(view: Bytes, start: int, stop: int, previous_ms: int) -> int:
    """Last record of view[start:stop] stored earlier than the one before it; −1 = none.

    All records are valid. `previous_ms` is the store time of the record before `start`.
    """
    found = -1
    at = start
    while at < stop:
        stored_ms = load_be64(view, store_timestamp_at(view, at))
        if stored_ms < previous_ms:
            found = at
        previous_ms = stored_ms
        at += load_be32(view, at + record.TOTAL_SIZE)
    return found


def warm() -> None:
    """Compile or load these kernels."""
    nothing = np.zeros(0, np.uint8)
    words = np.zeros(STATE_SIZE, np.int64)
    slots = np.zeros(1, np.int32)
    for test in (has_key, has_value):
        test(np.zeros(record.FIXED_SIZE_V4, np.uint8), 0, record.FIXED_SIZE_V4, np.zeros(1, np.uint8), nothing, nothing)
    find_borders(nothing, words)
    match_records(nothing, nothing, nothing, nothing, nothing, words, words, words)
    select_records(nothing, nothing, words, slots, nothing, words, slots, nothing, words, words)
    relocate_records(nothing, 0, 0, 0, 0)
    last_descent(nothing, 0, 0, 0)
