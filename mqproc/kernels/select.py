"""Taking the records of some topics out of a log, and giving records another place in a log of their own.

select_records     whole records of chosen topics and times, one after the other into a buffer
relocate_records   their physical offsets, and with them the CRC that covers these, for another place
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mqproc.kernels.ahead import prefetch_alike
from mqproc.kernels.crc_tail import write_crc_tail
from mqproc.kernels.hashing import java_hash_utf8
from mqproc.kernels.intrinsics import copy_bytes, load_be32, load_be64, store_be64
from mqproc.kernels.jit import kernel
from mqproc.kernels.primitive import Bytes, Words
from mqproc.kernels.queue_lookup import DELETED, UNKNOWN, belongs_to_deleted, find_queue, same_bytes
from mqproc.kernels.record_check import (
    has_crc_tail,
    record_size,
    signed_topic_length,
    store_timestamp_at,
    topic_length_at,
    topic_length_size,
)
from mqproc.layout import record

# Indices into the state, int64[STATE_SIZE].
(
    AT,  # position in the view; moved
    STOP,  # where the whole records end
    BASE,  # physical offset of the view's byte 0
    BEGIN_MS,  # BEGIN_MS ≤ store time < END_MS
    END_MS,
    FILLED,  # bytes of the buffer that are taken; moved
) = range(6)
STATE_SIZE = 6

CHOSEN_QUEUE = 0
"""The queue id that stands for a chosen topic in the table."""


@kernel
def _is_deleted(
    view: Bytes, at: int, topic: int, size: int, topic_hash: int, physical_offset: int, table: Bytes, cells: Words,
    slots: NDArray[np.int32],
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
    topic_slots: NDArray[np.int32],
    deleted: Bytes,
    deleted_cells: Words,
    deleted_slots: NDArray[np.int32],
    out: Bytes,
    counts: Words,
    state: Words,
) -> bool:
    """Copy the chosen records of view[AT:STOP] into `out` from FILLED on; False when the next one has no room there.

    `view` uint8 is a segment; whole records lie between AT and STOP. The two tables are queue tables' `bytes_view`,
    `cells` and `slots`: one has queue CHOSEN_QUEUE of each chosen topic, the other the queues that have been deleted.
    `counts` int64[topics] counts the records by the topics' numbers.
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
        prefetch_alike(view, at, total, last_total)
        last_total = total
        width = topic_length_size(view, at)
        length_at = topic_length_at(view, at)
        size = signed_topic_length(view, length_at, width)
        topic = length_at + width
        if size != last_size or not same_bytes(view, topic, view, last_topic, size):
            topic_hash = java_hash_utf8(view, topic, topic + size, 0)
            chosen = find_queue(topics, topic_cells, topic_slots, view, topic, size, topic_hash, CHOSEN_QUEUE)
        last_topic = topic
        last_size = size
        if chosen >= 0:
            stored = load_be64(view, store_timestamp_at(view, at))
            place = state[BASE] + at
            wanted = state[BEGIN_MS] <= stored < state[END_MS]
            if wanted and not _is_deleted(
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
    """Give the whole records of records[start:stop] places in a log from `physical_offset` on; where that ended.

    It ends before a record that does not leave 8 bytes of `room`, which a segment's end needs.
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


def warm() -> None:
    """Compile or load these kernels."""
    nothing = np.zeros(0, np.uint8)
    words = np.zeros(STATE_SIZE, np.int64)
    slots = np.zeros(1, np.int32)
    select_records(nothing, nothing, words, slots, nothing, words, slots, nothing, words, words)
    relocate_records(nothing, 0, 0, 0, 0)
