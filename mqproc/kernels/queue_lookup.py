"""Look up the queue of a record in the queue table (layout/queue_table.py)."""

from __future__ import annotations

from mqproc.kernels.jit.compile import kernel
from mqproc.kernels.jit.intrinsics import load_acquire
from mqproc.kernels.jit.lowering import Bytes, Int32s, Words
from mqproc.kernels.record_fields import same_bytes
from mqproc.layout import queue_table as layout

MASK_32 = 0xFFFFFFFF

# Results of find_queue in place of a queue number. A deleted queue is returned as DELETED − number.
UNKNOWN, DELETED = -1, -2


@kernel
def find_queue(
    table: Bytes,
    cells: Words,
    slots: Int32s,
    buf: Bytes,
    topic_at: int,
    topic_size: int,
    topic_hash: int,
    queue_id: int,
) -> int:
    """Number of a live queue, DELETED − number of a deleted one, or UNKNOWN.

    The topic is buf[topic_at:topic_at + topic_size], `topic_hash` its Java hash. `table` uint8, `cells` int64 and
    `slots` int32 are the queue table's `bytes_view`, `cells` and `slots`.
    """
    mask = slots.size - 1
    mixed = (
        (topic_hash & MASK_32) * layout.HASH_MULTIPLIER_TOPIC + (queue_id & MASK_32) * layout.HASH_MULTIPLIER_QUEUE
    ) & MASK_32
    slot = (mixed ^ (mixed >> 15)) & mask
    for _probe in range(slots.size):
        number = int(slots[slot]) - 1
        if number < 0:
            break
        first = layout.HEADER_WORDS + number * layout.ENTRY_WORDS
        if (
            cells[first + layout.QUEUE_ID] == queue_id
            and cells[first + layout.TOPIC_HASH] == topic_hash
            and cells[first + layout.TOPIC_SIZE] == topic_size
            and same_bytes(table, layout.WORD_SIZE * first + layout.TOPIC_OFFSET_BYTES, buf, topic_at, topic_size)
        ):
            # Load the state before the words that it validates.
            live = load_acquire(cells, first + layout.STATE) == layout.STATE_LIVE
            return number if live else DELETED - number
        slot = (slot + 1) & mask
    return UNKNOWN


@kernel
def belongs_to_deleted(cells: Words, number: int, physical_offset: int, queue_offset: int) -> bool:
    """Whether a record of queue `number` was appended before the queue's last deletion.

    Both offsets are compared: another program that appends restarts the queue offsets at 0.
    """
    first = layout.HEADER_WORDS + number * layout.ENTRY_WORDS
    below = physical_offset < cells[first + layout.DELETED_AT] and queue_offset < cells[first + layout.DELETED_NEXT]
    return bool(below)


@kernel
def find_queue_of_record(
    table: Bytes,
    cells: Words,
    slots: Int32s,
    buf: Bytes,
    topic_at: int,
    topic_size: int,
    topic_hash: int,
    queue_id: int,
    physical_offset: int,
    queue_offset: int,
) -> int:
    """`find_queue` that also considers the record's offsets.

    DELETED if it precedes the deletion of its queue. A record appended after a deletion that the table still shows as a
    tombstone is UNKNOWN: re-create the queue first.
    """
    found = find_queue(table, cells, slots, buf, topic_at, topic_size, topic_hash, queue_id)
    if found == UNKNOWN:
        return UNKNOWN
    if belongs_to_deleted(cells, max(found, DELETED - found), physical_offset, queue_offset):
        return DELETED
    return max(found, UNKNOWN)
