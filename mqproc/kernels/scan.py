"""Walking the CommitLog: where whole records end, where they begin again after damage, what they say of their queues.

    scan_records(view, start, stop, base, verify, out)         recovery: the end of the whole records
    find_without_crc(view, start, stop)                        recovery: what a crash may have torn
    find_record(view, start, stop, base, out)                  after damage: where the next whole record or BLANK begins
    update_next_offsets(view, start, stop, base, table, cells, slots, next_offsets, out)
                                                               a writer's successor: next queue offsets

`view` uint8[n] is one segment (or a part of one) and `base` the physical offset of its byte 0; `start` and `stop` are
positions in it. Records must lie inside `view`, so `stop` may cut one: the walk then ends before it with REACHED_STOP.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mqproc.kernels.hashing import java_hash_utf8
from mqproc.kernels.jit.compile import kernel
from mqproc.kernels.jit.intrinsics import load_be32, load_be64, load_u8
from mqproc.kernels.jit.lowering import Bytes, Int32s, Words
from mqproc.kernels.queue_lookup import UNKNOWN as UNKNOWN_QUEUE
from mqproc.kernels.queue_lookup import find_queue_of_record
from mqproc.kernels.record_check import (
    BAD_OFFSET,
    BLANK,
    REACHED_STOP,
    VERIFY_ALL,
    VERIFY_CRCS,
    body_length_at,
    checked_size,
    has_crc_tail,
    prefetch_stride,
    record_size,
    signed_topic_length,
    store_timestamp_at,
    topic_length_at,
    topic_length_size,
)
from mqproc.kernels.record_fields import (
    ABSENT,
    KEYS_NAME,
    UNIQ_KEY_NAME,
    find_property,
    place_at,
    place_size,
    properties_at,
    properties_end,
)
from mqproc.layout import consume_queue, record

# What a scan says, int64[SCAN_SIZE]. The first three also of find_record and update_next_offsets, see there.
(
    STOPPED_AT,  # position of the first byte not walked over
    REASON,
    COUNT,  # records seen
    LAST_START,  # position of the last whole record, −1 = none
    LAST_SIZE,
    LAST_STORE_TIMESTAMP_MS,
    MAX_STORE_TIMESTAMP_MS,
    UNKNOWN,  # update_next_offsets: records of queues that the table does not have
    FIRST_UNKNOWN,  # position of the first of them, −1 = none
) = range(9)
SCAN_SIZE = 9

_MAGIC_V1 = record.MAGIC_V1
_MAGIC_V2 = record.MAGIC_V2
_MAGIC_BLANK = record.MAGIC_BLANK
_TAKES_NO_QUEUE_OFFSET = 0x4  # prepared and rollback; none and commit have this bit clear
_QUEUE_OFFSET_LIMIT = consume_queue.QUEUE_OFFSET_LIMIT
assert record.SYS_FLAG_PREPARED & record.SYS_FLAG_ROLLBACK == _TAKES_NO_QUEUE_OFFSET
assert record.SYS_FLAG_COMMIT & _TAKES_NO_QUEUE_OFFSET == 0


@kernel
def _begin(out: Words, start: int) -> None:
    out[STOPPED_AT] = start
    out[REASON] = REACHED_STOP
    out[COUNT] = 0
    out[LAST_START] = -1
    out[LAST_SIZE] = 0
    out[LAST_STORE_TIMESTAMP_MS] = 0
    out[MAX_STORE_TIMESTAMP_MS] = 0
    out[UNKNOWN] = 0
    out[FIRST_UNKNOWN] = -1


@kernel
def scan_records(view: Bytes, start: int, stop: int, base: int, verify: int, out: Words) -> int:
    """Walk whole records of view[start:stop]; `out` int64[SCAN_SIZE] tells how far and why no further.

    `verify` is a sum of VERIFY_BODY_CRC and VERIFY_PROPERTY_CRC. Returns the reason.
    """
    _begin(out, start)
    at = start
    last = -1
    count = 0
    reason = REACHED_STOP
    size = 0
    latest = 0
    while at < stop:
        total = checked_size(view, at, view.size, base + at, verify)
        if total < 0:
            reason = -total
            break
        if at + total > stop:
            break
        prefetch_stride(view, at, total, size)
        latest = max(latest, load_be64(view, store_timestamp_at(view, at)))
        last = at
        size = total
        at += total
        count += 1
    out[STOPPED_AT] = at
    out[REASON] = reason
    out[COUNT] = count
    out[LAST_START] = last
    out[LAST_SIZE] = size
    out[MAX_STORE_TIMESTAMP_MS] = latest
    if last >= 0:
        out[LAST_STORE_TIMESTAMP_MS] = load_be64(view, store_timestamp_at(view, last))
    return reason


@kernel
def find_without_crc(view: Bytes, start: int, stop: int) -> int:
    """Position of the first record without a CRC of its own in view[start:stop], which are whole records; −1 = none."""
    at = start
    size = 0
    while at < stop:
        total = record_size(view, at, stop)
        if not has_crc_tail(view, at, total):
            return at
        prefetch_stride(view, at, total, size)
        size = total
        at += total
    return -1


@kernel
def find_record(view: Bytes, start: int, stop: int, base: int, out: Words) -> int:
    """Where in view[start:stop] the next intact record begins, or the BLANK that fills `view` to its end; −1 = nowhere.

    Intact: magic, own physical offset, sizes and CRCs hold. `out` int64[SCAN_SIZE] gets STOPPED_AT, and REASON
    REACHED_STOP (nowhere), BLANK, or the record's COUNT 1, LAST_START, LAST_SIZE and store time. `view` must be a
    whole segment from its begin or a part of it up to its end, else no BLANK is recognised.
    """
    _begin(out, start)
    last = min(stop, view.size - record.BLANK_SIZE + 1)
    for at in range(start, last):
        magic = load_be32(view, at + record.MAGIC)
        if magic == _MAGIC_BLANK and load_be32(view, at + record.TOTAL_SIZE) == view.size - at:
            out[STOPPED_AT] = at
            out[REASON] = BLANK
            return at
        if magic != _MAGIC_V1 and magic != _MAGIC_V2:
            continue
        total = checked_size(view, at, view.size, base + at, VERIFY_ALL)
        if total > 0:
            out[STOPPED_AT] = at
            out[COUNT] = 1
            out[LAST_START] = at
            out[LAST_SIZE] = total
            out[LAST_STORE_TIMESTAMP_MS] = load_be64(view, store_timestamp_at(view, at))
            out[MAX_STORE_TIMESTAMP_MS] = out[LAST_STORE_TIMESTAMP_MS]
            return at
    out[STOPPED_AT] = stop
    return -1


@kernel
def update_next_offsets(
    view: Bytes,
    start: int,
    stop: int,
    base: int,
    table: Bytes,
    cells: Words,
    slots: Int32s,
    next_offsets: Words,
    out: Words,
) -> int:
    """Raise next_offsets[queue number] to queue offset + 1 of every record that has a place in its queue.

    `table` uint8, `cells` int64 and `slots` int32 are the queue table's `bytes_view`, `cells` and `slots`;
    `next_offsets` int64[capacity]. CRCs are not looked at: the range was published. `out` int64[SCAN_SIZE] tells how
    far and why no further, the greatest store time, and how many records belong to queues that the table lacks.
    """
    _begin(out, start)
    at = start
    reason = REACHED_STOP
    last_total = 0
    while at < stop:
        total = record_size(view, at, view.size)
        if total < 0:
            reason = -total
            break
        queue_offset = load_be64(view, at + record.QUEUE_OFFSET)
        if load_be64(view, at + record.PHYSICAL_OFFSET) != base + at or not 0 <= queue_offset < _QUEUE_OFFSET_LIMIT:
            reason = BAD_OFFSET
            break
        if at + total > stop:
            break
        prefetch_stride(view, at, total, last_total)
        last_total = total
        store_timestamp = load_be64(view, store_timestamp_at(view, at))
        out[LAST_START] = at
        out[LAST_SIZE] = total
        out[LAST_STORE_TIMESTAMP_MS] = store_timestamp
        out[MAX_STORE_TIMESTAMP_MS] = max(int(out[MAX_STORE_TIMESTAMP_MS]), store_timestamp)
        out[COUNT] += 1
        if load_be32(view, at + record.SYS_FLAG) & _TAKES_NO_QUEUE_OFFSET == 0:
            number = _queue_of(view, at, base + at, queue_offset, table, cells, slots)
            if number >= 0:
                next_offsets[number] = max(int(next_offsets[number]), queue_offset + 1)
            elif number == UNKNOWN_QUEUE:
                out[UNKNOWN] += 1
                if out[FIRST_UNKNOWN] < 0:
                    out[FIRST_UNKNOWN] = at
        at += total
    out[STOPPED_AT] = at
    out[REASON] = reason
    return reason


@kernel
def _queue_of(
    view: Bytes,
    at: int,
    physical_offset: int,
    queue_offset: int,
    table: Bytes,
    cells: Words,
    slots: Int32s,
) -> int:
    width = topic_length_size(view, at)
    length_at = topic_length_at(view, at)
    size = signed_topic_length(view, length_at, width)
    topic = length_at + width
    topic_hash = java_hash_utf8(view, topic, topic + size, 0)
    queue_id = load_be32(view, at + record.QUEUE_ID)
    return find_queue_of_record(
        table, cells, slots, view, topic, size, topic_hash, queue_id, physical_offset, queue_offset
    )


# --- keyed ---
# Looking for records that the index must know: those with a unique id or keys, and not rolled back.


# What a search says, int64[FOUND_SIZE]: where it stopped, and 1 when the record there has an entry in the index.
IS_KEYED, AT_BLANK = 1, 2
FOUND_SIZE = 3


_SPACE = ord(" ")


@kernel
def _has_word(view: Bytes, place: int) -> bool:
    """Whether a value that `find_property` found holds anything but spaces."""
    if place == ABSENT:
        return False
    at = place_at(place)
    end = at + place_size(place)
    while at < end and load_u8(view, at) == _SPACE:
        at += 1
    return at < end


@kernel
def find_keyed(view: Bytes, start: int, stop: int, base: int, uniq_key: Bytes, keys: Bytes, found: Words) -> None:
    """Walk records of view[start:stop] (a segment, its byte 0 at `base` in the log) to the first with a key.

    `uniq_key` and `keys` uint8[n] are the properties' names. Stops at a record with a key, at what is no record, at a
    BLANK, or at `stop`.
    """
    found[IS_KEYED] = 0
    found[AT_BLANK] = 0
    at = start
    last_total = 0
    while at < stop:
        total = record_size(view, at, view.size)
        if total < 0:
            found[AT_BLANK] = 1 if total == -BLANK else 0
            break
        if load_be64(view, at + record.PHYSICAL_OFFSET) != base + at:
            break
        prefetch_stride(view, at, total, last_total)
        last_total = total
        transaction = load_be32(view, at + record.SYS_FLAG) & record.SYS_FLAG_TRANSACTION_MASK
        if transaction != record.SYS_FLAG_ROLLBACK:
            first = properties_at(view, at)
            end = properties_end(view, at, total)
            has_id = find_property(view, first, end, uniq_key) != ABSENT
            if has_id or _has_word(view, find_property(view, first, end, keys)):
                found[IS_KEYED] = 1
                break
        at += total
    found[STOPPED_AT] = at


# --- made_from ---
# Which records of the log say that they were made from an earlier one: deliveries of parked messages, commits.
#
# `preparedTransactionOffset` is where they say it: RocketMQ keeps a committed message's half message there, and 0 in all
# others; we name the parked record of a delivered one too. Walking the log for it is what tells a role, after a kill,
# which of its deliveries were stored.


# What the walk says, int64[MARKS_SIZE].
MARKS_SIZE = 3
FOUND_FULL = -1
"""A reason of its own: `found` has no room for more; go on at STOPPED_AT."""

# Bytes before a record's body length.
_PREPARED_BACK = record.BODY_LENGTH - record.PREPARED_TRANSACTION_OFFSET


@kernel
def find_delivery_marks(view: Bytes, start: int, stop: int, base: int, found: Words, out: Words) -> int:
    """Walk records of view[start:stop] and put what each was made from into `found` int64[n], where it says so.

    `view` uint8 is one segment and `base` the physical offset of its byte 0. Prepared and rollback records are passed
    over. Returns how many were found; `out` tells STOPPED_AT and REASON, which is REACHED_STOP also when `stop` cuts a
    record, FOUND_FULL, or what is wrong with the record there. CRCs are not looked at.
    """
    at = start
    count = 0
    last_total = 0
    out[REASON] = REACHED_STOP
    while at < stop:
        total = checked_size(view, at, view.size, base + at, 0)
        if total < 0:
            out[REASON] = -total
            break
        if at + total > stop:
            break
        prefetch_stride(view, at, total, last_total)
        last_total = total
        made_from = load_be64(view, body_length_at(view, at) - _PREPARED_BACK)
        # None and commit have the bit of prepared and rollback clear.
        if made_from > 0 and load_be32(view, at + record.SYS_FLAG) & record.SYS_FLAG_PREPARED == 0:
            if count == found.size:
                out[REASON] = FOUND_FULL
                break
            found[count] = made_from
            count += 1
        at += total
    out[STOPPED_AT] = at
    out[COUNT] = count
    return count


def warm() -> None:
    """Compile or load these kernels."""
    view = np.zeros(record.BLANK_SIZE, np.uint8)
    out = np.zeros(SCAN_SIZE, np.int64)
    scan_records(view, 0, 0, 0, VERIFY_CRCS, out)
    find_without_crc(view, 0, 0)
    find_record(view, 0, 0, 0, out)
    update_next_offsets(view, 0, 0, 0, view, out, np.zeros(1, np.int32), out.copy(), out)
    find_keyed(np.zeros(8, np.uint8), 0, 0, 0, UNIQ_KEY_NAME, KEYS_NAME, np.zeros(FOUND_SIZE, np.int64))
    nothing: NDArray[np.uint8] = np.zeros(1, np.uint8)
    find_delivery_marks(nothing, 0, 0, 0, np.zeros(1, np.int64), np.zeros(MARKS_SIZE, np.int64))
