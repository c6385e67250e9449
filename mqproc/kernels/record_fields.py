"""Find the properties of a record, and its queue in the queue table.

RocketMQ's rules apply: pairs need a name and a value, the first 0x01 ends the name, and the last pair of a name wins.
Positions are bytes in the buffer. Searched ranges lie inside a valid record, so up to seven bytes before them may be
read.
"""

from __future__ import annotations

import numpy as np

from mqproc.kernels.crc import MASK_32
from mqproc.kernels.jit.compile import inlined, kernel
from mqproc.kernels.jit.intrinsics import load_acquire, load_be32, load_le64, load_u8, trailing_zeros
from mqproc.kernels.jit.lowering import Bytes, Int32s, Words, as_kernel_array
from mqproc.kernels.record_check import has_crc_tail, record_size, store_timestamp_at, topic_of
from mqproc.layout import properties, record
from mqproc.layout import queue_table as layout

# Results of find_tags_and_keys, PLACES_SIZE words; a size is 0 if the property is absent.
TAG_AT, TAG_SIZE, KEYS_AT, KEYS_SIZE = range(4)
PLACES_SIZE = 4

UNIQ_KEY_NAME = as_kernel_array(bytearray(properties.UNIQ_KEY.encode()))
KEYS_NAME = as_kernel_array(bytearray(properties.KEYS.encode()))
TAGS_NAME = as_kernel_array(bytearray(properties.TAGS.encode()))

ABSENT = -1
_SIZE_BITS = 16
_SIZE_MASK = (1 << _SIZE_BITS) - 1
assert record.PROPERTIES_SIZE_MAX <= _SIZE_MASK

# One byte value in each of eight lanes, as signed numbers: an unsigned constant would turn a kernel's sums into floats.
ONES = 0x0101_0101_0101_0101
HIGH_BITS = -0x7F7F_7F7F_7F7F_7F80
_NAME_END = ord(properties.NAME_END)
_PAIR_END = ord(properties.PAIR_END)
_TAGS = int.from_bytes(properties.TAGS.encode(), "big")
_KEYS = int.from_bytes(properties.KEYS.encode(), "big")
assert len(properties.TAGS) == len(properties.KEYS) == 4


@inlined
def same_bytes(a: Bytes, a_at: int, b: Bytes, b_at: int, size: int) -> bool:
    """Whether a[a_at:a_at + size] and b[b_at:b_at + size] are equal."""
    i = 0
    while i + 8 <= size:
        if load_le64(a, a_at + i) != load_le64(b, b_at + i):
            return False
        i += 8
    while i < size:
        if load_u8(a, a_at + i) != load_u8(b, b_at + i):
            return False
        i += 1
    return True


@inlined
def find_byte(buf: Bytes, at: int, stop: int, byte: int) -> int:
    """First position of `byte` in [at, stop), `stop` if absent.

    At least 8 bytes must precede `stop` in the buffer.
    """
    flip = byte * ONES
    while at + 8 <= stop:
        word = load_le64(buf, at) ^ flip
        found = (word - ONES) & ~word & HIGH_BITS
        if found != 0:
            return at + (trailing_zeros(found) >> 3)
        at += 8
    if at < stop:
        word = (load_le64(buf, stop - 8) >> 8 * (8 - (stop - at))) ^ flip
        found = (word - ONES) & ~word & HIGH_BITS
        if found != 0:
            # Bits shifted in may look like the byte.
            return min(stop, at + (trailing_zeros(found) >> 3))
    return stop


@kernel
def properties_at(buf: Bytes, at: int) -> int:
    """Position of the properties of the valid record at `at`."""
    topic, size = topic_of(buf, at)
    return topic + size + 2


@kernel
def properties_end(buf: Bytes, at: int, total: int) -> int:
    """End of the properties of the valid record at `at`, without its CRC pair."""
    return at + total - record.CRC_TAIL_SIZE if has_crc_tail(buf, at, total) else at + total


@kernel
def find_tags_and_keys(buf: Bytes, start: int, stop: int, places: Words, first: int) -> None:
    """Locate TAGS and KEYS in buf[start:stop]: PLACES_SIZE words of `places` at `first`."""
    places[first + TAG_AT] = start
    places[first + TAG_SIZE] = 0
    places[first + KEYS_AT] = start
    places[first + KEYS_SIZE] = 0
    at = start
    while at < stop:
        end = find_byte(buf, at, stop, _PAIR_END)
        # A name of four letters, its separator, and a value of at least one byte.
        if end - at >= 6 and load_u8(buf, at + 4) == _NAME_END:
            word = load_be32(buf, at)
            if word == _TAGS:
                places[first + TAG_AT] = at + 5
                places[first + TAG_SIZE] = end - at - 5
            elif word == _KEYS:
                places[first + KEYS_AT] = at + 5
                places[first + KEYS_SIZE] = end - at - 5
        at = end + 1


@kernel
def find_property(buf: Bytes, start: int, stop: int, name: Bytes) -> int:
    """Locate the value of a property in buf[start:stop]; ABSENT if it is not there.

    `name` uint8[n], without separator. The result packs position and size; `place_at` and `place_size` unpack it.
    """
    size = name.size
    found = ABSENT
    at = start
    while at < stop:
        end = find_byte(buf, at, stop, _PAIR_END)
        if end - at >= size + 2 and load_u8(buf, at + size) == _NAME_END and same_bytes(buf, at, name, 0, size):
            found = (at + size + 1) << _SIZE_BITS | (end - at - size - 1)
        at = end + 1
    return found


@kernel
def place_at(place: int) -> int:
    """Position of a value located by `find_property`."""
    return place >> _SIZE_BITS


@kernel
def place_size(place: int) -> int:
    """Bytes of a value located by `find_property`."""
    return place & _SIZE_MASK


@inlined
def is_one_of(buf: Bytes, at: int, size: int, texts: Bytes, ends: Words) -> bool:
    """Whether buf[at:at + size] equals one of `texts` uint8 with `ends` int64[count]."""
    first = 0
    for number in range(ends.size):
        end = int(ends[number])
        if end - first == size and same_bytes(buf, at, texts, first, size):
            return True
        first = end
    return False


# The queue table. `table` uint8, `cells` int64 and `slots` int32 are its `bytes_view`, `cells` and `slots`.

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

    The topic is buf[topic_at:topic_at + topic_size], `topic_hash` its Java hash.
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


def warm() -> None:
    """Compile or load what Python calls too, of this module and of `record_check`."""
    view = np.zeros(2 * record.FIXED_SIZE_V4, np.uint8)
    store_timestamp_at(view, 0)
    record_size(view, 0, 0)
    topic_of(view, 0)
    properties_at(view, 0)
    properties_end(view, 0, len(view))
    find_property(view, 0, 0, KEYS_NAME)
    place_at(0)
    place_size(0)
