"""Finding a queue's number in the queue table from the bytes of a record (layout/queue_table.py)."""

from __future__ import annotations

from mqproc.kernels.jit.compile import kernel
from mqproc.kernels.jit.intrinsics import load_acquire
from mqproc.kernels.jit.lowering import Bytes, Int32s, Words
from mqproc.kernels.record_fields import same_bytes
from mqproc.layout import queue_table as layout

MASK_32 = 0xFFFFFFFF

# What find_queue returns in place of a number; of a deleted queue DELETED − its number, so DELETED and all below it.
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
    """Number of the live queue (buf[topic_at:topic_at + topic_size], queue_id); DELETED − number of a tombstone that
    bears its name, else UNKNOWN.

    `table` uint8, `cells` int64 and `slots` int32 are the queue table's `bytes_view`, `cells` and `slots`;
    `topic_hash` is the topic's Java hash.
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
            # The state before the words that it makes valid.
            live = load_acquire(cells, first + layout.STATE) == layout.STATE_LIVE
            return number if live else DELETED - number
        slot = (slot + 1) & mask
    return UNKNOWN


@kernel
def belongs_to_deleted(cells: Words, number: int, physical_offset: int, queue_offset: int) -> bool:
    """Whether a record of the queue `number` was appended before the queue was deleted the last time.

    Offsets alone would do while only this program appends: another one begins at 0 again.
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
    """As `find_queue`, by what the record itself says: DELETED when it was appended before its queue was deleted.

    A record of a later life than the table knows of is UNKNOWN: its queue has to be made again first.
    """
    found = find_queue(table, cells, slots, buf, topic_at, topic_size, topic_hash, queue_id)
    if found == UNKNOWN:
        return UNKNOWN
    if belongs_to_deleted(cells, max(found, DELETED - found), physical_offset, queue_offset):
        return DELETED
    return max(found, UNKNOWN)
