"""Walk the CommitLog: end of valid records, resynchronisation, queue offsets, keys, marks.

    scan_records(view, start, stop, base, verify, out)         recovery: the end of the valid records
    find_without_crc(view, start, stop)                        recovery: records that a crash may have torn
    find_record(view, start, stop, base, out)                  after damage: the next valid record or BLANK
    update_next_offsets(view, start, stop, base, table, cells, slots, next_offsets, out)
                                                               takeover by a new writer: next queue offsets
    find_keyed(view, start, stop, base, with_tags, found)      the next record with index entries
    find_delivery_marks(view, start, stop, base, found, out)   records that were made from an earlier record

`view` uint8[n] is one segment (or a part of one) and `base` the physical offset of its byte 0; `start` and `stop` are
positions in it. A record that `stop` cuts is not walked over: the walk ends before it with REACHED_STOP.
"""

from __future__ import annotations

import numpy as np

from mqproc.kernels.hashing import java_hash_utf8
from mqproc.kernels.jit.compile import kernel
from mqproc.kernels.jit.intrinsics import load_be32, load_be64, load_u8
from mqproc.kernels.jit.lowering import Bytes, Int32s, Words
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
    store_timestamp_at,
    topic_of,
)
from mqproc.kernels.record_fields import (
    ABSENT,
    KEYS_NAME,
    TAGS_NAME,
    UNIQ_KEY_NAME,
    find_property,
    find_queue_of_record,
    place_at,
    place_size,
    properties_at,
    properties_end,
)
from mqproc.kernels.record_fields import UNKNOWN as UNKNOWN_QUEUE
from mqproc.layout import consume_queue, record

# Results of a scan, int64[SCAN_SIZE]. find_record and update_next_offsets document the words that they set.
(
    STOPPED_AT,  # position of the first byte after the walked records
    REASON,
    COUNT,  # records walked over
    LAST_START,  # position of the last record, −1 = none
    LAST_SIZE,
    LAST_STORE_TIMESTAMP_MS,
    MAX_STORE_TIMESTAMP_MS,
    UNKNOWN,  # update_next_offsets: records of queues that the table lacks
    FIRST_UNKNOWN,  # position of the first of these, −1 = none
) = range(9)
SCAN_SIZE = 9

# The bit of SYS_FLAG_PREPARED is set in types prepared and rollback, which have no queue offset.
assert record.SYS_FLAG_PREPARED & record.SYS_FLAG_ROLLBACK & ~record.SYS_FLAG_COMMIT == record.SYS_FLAG_PREPARED


@kernel
def _begin(out: Words, start: int) -> None:
    """Reset the results; the reason is REACHED_STOP."""
    out[:SCAN_SIZE] = 0
    out[STOPPED_AT] = start
    out[LAST_START] = -1
    out[FIRST_UNKNOWN] = -1


@kernel
def scan_records(view: Bytes, start: int, stop: int, base: int, verify: int, out: Words) -> int:
    """Walk over the valid records of view[start:stop]; results in `out` int64[SCAN_SIZE].

    Returns the reason for the stop. `verify` is a sum of VERIFY_BODY_CRC and VERIFY_PROPERTY_CRC.
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
    """First record without a CRC property in view[start:stop], which is valid; −1 = none."""
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
    """Next valid record in view[start:stop], or the BLANK that fills `view`; −1 = not found.

    Valid means: magic, own physical offset, sizes and CRCs match. `out` int64[SCAN_SIZE] receives STOPPED_AT, and
    either REASON (REACHED_STOP if nothing was found, or BLANK) or COUNT 1, LAST_START, LAST_SIZE and the store time of
    the record. `view` must extend to the end of the segment, else no BLANK is recognised.
    """
    _begin(out, start)
    last = min(stop, view.size - record.BLANK_SIZE + 1)
    for at in range(start, last):
        magic = load_be32(view, at + record.MAGIC)
        if magic == record.MAGIC_BLANK and load_be32(view, at + record.TOTAL_SIZE) == view.size - at:
            out[STOPPED_AT] = at
            out[REASON] = BLANK
            return at
        if magic != record.MAGIC_V1 and magic != record.MAGIC_V2:
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
    """Raise next_offsets[queue number] to queue offset + 1 of each record with a queue.

    `table` uint8, `cells` int64 and `slots` int32 are the queue table's `bytes_view`, `cells` and `slots`;
    `next_offsets` int64[capacity]. CRCs are not checked, since the range was published. `out` int64[SCAN_SIZE] receives
    the position and reason of the stop, the maximum store time, and the number of records whose queue the table lacks.
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
        if (
            load_be64(view, at + record.PHYSICAL_OFFSET) != base + at
            or not 0 <= queue_offset < consume_queue.QUEUE_OFFSET_LIMIT
        ):
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
        if load_be32(view, at + record.SYS_FLAG) & record.SYS_FLAG_PREPARED == 0:
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
    view: Bytes, at: int, physical_offset: int, queue_offset: int, table: Bytes, cells: Words, slots: Int32s
) -> int:
    topic, size = topic_of(view, at)
    topic_hash = java_hash_utf8(view, topic, topic + size, 0)
    queue_id = load_be32(view, at + record.QUEUE_ID)
    return find_queue_of_record(
        table, cells, slots, view, topic, size, topic_hash, queue_id, physical_offset, queue_offset
    )


# Records with index entries: those with a unique id, keys, or an indexed tag that are not rolled back.

# Results of find_keyed, int64[FOUND_SIZE]: STOPPED_AT, and whether the record there is keyed or is a BLANK.
IS_KEYED, AT_BLANK = 1, 2
FOUND_SIZE = 3


_SPACE = ord(" ")


@kernel
def _has_word(view: Bytes, place: int) -> bool:
    """Whether a value located by `find_property` contains anything but spaces."""
    if place == ABSENT:
        return False
    at = place_at(place)
    end = at + place_size(place)
    while at < end and load_u8(view, at) == _SPACE:
        at += 1
    return at < end


@kernel
def find_keyed(view: Bytes, start: int, stop: int, base: int, with_tags: bool, found: Words) -> None:
    """Walk over records of view[start:stop] to a keyed one, an invalid one, or a BLANK.

    `with_tags`: a record with a tag is keyed, too.
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
            has_id = find_property(view, first, end, UNIQ_KEY_NAME) != ABSENT
            if (
                has_id
                or _has_word(view, find_property(view, first, end, KEYS_NAME))
                or (with_tags and find_property(view, first, end, TAGS_NAME) != ABSENT)
            ):
                found[IS_KEYED] = 1
                break
        at += total
    found[STOPPED_AT] = at


# Delivery marks: a record's `preparedTransactionOffset` names the record that it was made from.
#
# RocketMQ sets it in committed messages to the offset of the half message, and to 0 elsewhere. mqproc also sets it in
# delivered messages to the offset of the scheduled record. After a kill, a role walks the log for these marks to learn
# which of its deliveries were stored.

# Results of find_delivery_marks, int64[MARKS_SIZE]: STOPPED_AT, REASON, COUNT.
MARKS_SIZE = 3
FOUND_FULL = -1
"""Reason: `found` is full; continue at STOPPED_AT."""

# Distance from the field to the body length.
_PREPARED_BACK = record.BODY_LENGTH - record.PREPARED_TRANSACTION_OFFSET


@kernel
def find_delivery_marks(view: Bytes, start: int, stop: int, base: int, found: Words, out: Words) -> int:
    """Walk over records of view[start:stop] and write their delivery marks to `found` int64[n].

    Returns their number. Prepared and rollback records are skipped. `out` receives STOPPED_AT and REASON: REACHED_STOP
    (also if `stop` cuts a record), FOUND_FULL, or the fault of the record there. CRCs are not checked.
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
        origin = load_be64(view, body_length_at(view, at) - _PREPARED_BACK)
        # Types none and commit have this bit clear.
        if origin > 0 and load_be32(view, at + record.SYS_FLAG) & record.SYS_FLAG_PREPARED == 0:
            if count == found.size:
                out[REASON] = FOUND_FULL
                break
            found[count] = origin
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
    find_keyed(np.zeros(8, np.uint8), 0, 0, 0, False, np.zeros(FOUND_SIZE, np.int64))
    find_delivery_marks(view, 0, 0, 0, np.zeros(1, np.int64), np.zeros(MARKS_SIZE, np.int64))
