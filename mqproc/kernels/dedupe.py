"""Deduplication window: the newest messages by topic and unique id, for the writer.

    locate_ids(…)         positions of the unique ids of a frame's messages
    hash_ids(…)           hash of topic, real topic and unique id for each message
    lookup(…)             the record in the window with the same hash
    verify_duplicates(…)  compare that record with the message, and fill in the answer for a duplicate
    insert(…)             add records to the window, replacing the oldest
    insert_from_log(…)    the same for the records of a part of the log

The window is a ring of `capacity` entries (hash, physical offset) with a chained hash table over it. Equal hashes only
cause a comparison with the record; no message is dropped because of its hash alone.
"""

from __future__ import annotations

import numpy as np

from mqproc.kernels.append_frame import UNIQUE_DIGITS, hex_digit
from mqproc.kernels.crc import MASK_31, MASK_32
from mqproc.kernels.jit.compile import kernel
from mqproc.kernels.jit.intrinsics import copy_bytes, load_be32, load_be64, load_le32, load_u8, store_le32, store_le64
from mqproc.kernels.jit.lowering import Bytes, Words, as_kernel_array
from mqproc.kernels.record_check import (
    prefetch_stride,
    record_size,
    signed_topic_length,
    topic_length_at,
    topic_length_size,
    topic_of,
)
from mqproc.kernels.record_fields import (
    ABSENT,
    UNIQ_KEY_NAME,
    belongs_to_deleted,
    find_property,
    place_at,
    place_size,
    properties_at,
    properties_end,
    same_bytes,
)
from mqproc.layout import properties, record
from mqproc.topic_names import HALF_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC

# State of the window, int64[WINDOW_SIZE].
(
    NEXT,  # next entry of the ring to write
    COUNT,  # entries in use
) = range(2)
WINDOW_SIZE = 2
# The ring, int64[ENTRY_WORDS × capacity].
(
    HASH,
    PLACE,  # physical offset
    LINK,  # next entry of the chain, NONE at its end
) = range(3)
ENTRY_WORDS = 3
NONE = -1

HALF_NAME = as_kernel_array(bytearray(HALF_TOPIC.encode()))
SCHEDULE_NAME = as_kernel_array(bytearray(SCHEDULE_TOPIC.encode()))
TIMER_NAME = as_kernel_array(bytearray(TIMER_TOPIC.encode()))
REAL_TOPIC_NAME = as_kernel_array(bytearray(properties.REAL_TOPIC.encode()))

NO_ID = 0
"""Hash of a message without a unique id."""

_ROUND_1 = 0x9E3779B1
_ROUND_2 = 0x85EBCA77
_PROPERTIES_SIZE_MIN = 10  # shorter strings hold no unique id, and a search needs 8 bytes before their end


@kernel
def _mixed(seed: int, buf: Bytes, at: int, size: int) -> int:
    """63-bit hash of bytes, continued from `seed`: two lanes of 32 bits."""
    one = (seed >> 31) & MASK_32
    two = seed & MASK_31
    stop = at + size
    while at + 4 <= stop:
        word = load_le32(buf, at) & MASK_32
        one = (((one ^ word) & MASK_32) * _ROUND_1) & MASK_32
        two = (((two ^ word) & MASK_32) * _ROUND_2) & MASK_32
        one ^= one >> 15
        two ^= two >> 13
        at += 4
    while at < stop:
        byte = load_u8(buf, at)
        one = (((one ^ byte) & MASK_32) * _ROUND_1) & MASK_32
        two = (((two ^ byte) & MASK_32) * _ROUND_2) & MASK_32
        at += 1
    one ^= one >> 16
    two ^= two >> 14
    return ((one & MASK_32) << 31) | (two & MASK_31)


@kernel
def _hash_of(topic_seed: int, buf: Bytes, at: int, size: int) -> int:
    found = _mixed(topic_seed, buf, at, size)
    return found if found != NO_ID else 1


@kernel
def locate_ids(
    payload: Bytes, count: int, lengths_at: int, properties: int, counter: int, prefix: Bytes, made: Bytes, ids: Words
) -> None:
    """Locate the unique ids of a frame's messages.

    Position and size in `ids` int64[2 × count], size 0 = none. Ids in property strings (`lengths_at` ≥ 0) are located
    in the payload, but not beyond its end, since the lengths are not verified yet. Otherwise ids are composed from
    `prefix` and a counter (negative = no ids) in `made` uint8[(prefix + UNIQUE_DIGITS) × count] and located there.
    """
    at = properties
    size = prefix.size + UNIQUE_DIGITS
    for i in range(count):
        ids[2 * i] = 0
        ids[2 * i + 1] = 0
        if lengths_at >= 0:
            stop = at + (load_u8(payload, lengths_at + 2 * i) | load_u8(payload, lengths_at + 2 * i + 1) << 8)
            if stop - at >= _PROPERTIES_SIZE_MIN and stop <= payload.size:
                place = find_property(payload, at, stop, UNIQ_KEY_NAME)
                if place != ABSENT:
                    ids[2 * i] = place_at(place)
                    ids[2 * i + 1] = place_size(place)
            at = stop
        elif counter >= 0:
            to = size * i
            number = counter + i
            copy_bytes(made, to, prefix, 0, prefix.size)
            for digit in range(UNIQUE_DIGITS):
                made[to + prefix.size + digit] = hex_digit((number >> 4 * (UNIQUE_DIGITS - 1 - digit)) & 15)
            ids[2 * i] = to
            ids[2 * i + 1] = size


@kernel
def _seed(topic: Bytes, topic_at: int, topic_size: int, real: Bytes, real_at: int, real_size: int) -> int:
    """Initial hash for a topic, including the real topic of messages in a system topic."""
    seed = _mixed(0, topic, topic_at, topic_size)
    return _mixed(seed, real, real_at, real_size) if real_size > 0 else seed


@kernel
def _real_topic(view: Bytes, at: int, total: int) -> int:
    """Locate the real topic of a half, schedule or timer message; 0 for other records."""
    name_at, size = topic_of(view, at)
    if not (
        (size == HALF_NAME.size and same_bytes(view, name_at, HALF_NAME, 0, size))
        or (size == SCHEDULE_NAME.size and same_bytes(view, name_at, SCHEDULE_NAME, 0, size))
        or (size == TIMER_NAME.size and same_bytes(view, name_at, TIMER_NAME, 0, size))
    ):
        return 0
    place = find_property(view, properties_at(view, at), properties_end(view, at, total), REAL_TOPIC_NAME)
    return place if place != ABSENT else 0


@kernel
def hash_ids(texts: Bytes, ids: Words, topic_block: Bytes, real_topic: Bytes, hashes: Words) -> None:
    """Hash topic and unique id of each message into `hashes` int64[count], NO_ID = none.

    `ids` point into `texts`. `real_topic` is the destination of messages that wait in a system topic, empty for others.
    """
    seed = _seed(topic_block, 0, topic_block.size, real_topic, 0, real_topic.size)
    for i in range(hashes.size):
        size = int(ids[2 * i + 1])
        hashes[i] = _hash_of(seed, texts, int(ids[2 * i]), size) if size > 0 else NO_ID


@kernel
def _slot_of(found: int, slots: Words) -> int:
    """Slot of a hash; the number of `slots` is a power of two."""
    return (found ^ (found >> 32)) & (slots.size - 1)


@kernel
def lookup(hashes: Words, ring: Words, slots: Words, places: Words) -> int:
    """Find the newest record with each hash: `places` int64[count]; returns the number found."""
    found = 0
    for i in range(hashes.size):
        key = int(hashes[i])
        places[i] = NONE
        if key == NO_ID:
            continue
        entry = int(slots[_slot_of(key, slots)])
        while entry != NONE:
            if ring[ENTRY_WORDS * entry + HASH] == key:
                places[i] = ring[ENTRY_WORDS * entry + PLACE]
                found += 1
                break
            entry = int(ring[ENTRY_WORDS * entry + LINK])
    return found


@kernel
def verify_duplicates(
    view: Bytes,
    base: int,
    stop: int,
    texts: Bytes,
    ids: Words,
    topic_block: Bytes,
    real_topic: Bytes,
    deleted_at: int,
    queue_numbers: Words,
    cells: Words,
    places: Words,
    answer: Bytes,
) -> int:
    """Compare messages with those records at `places` that lie in the segment, below `stop`.

    If topics and unique id are equal and the record's topic is not deleted, the answer's columns are filled in;
    otherwise the place is set to NONE. Returns the number of duplicates. `queue_numbers` and the queue table's `cells`
    belong to the topic; `deleted_at` is the end of the log at the deletion of the real topic, 0 = not deleted.
    """
    held = 0
    count = places.size
    for i in range(count):
        place = int(places[i])
        if place == NONE or place < base or place >= base + view.size:
            continue
        places[i] = NONE
        if place < deleted_at:
            continue
        at = place - base
        total = record_size(view, at, min(view.size, stop - base))
        if total < 0 or load_be64(view, at + record.PHYSICAL_OFFSET) != place:
            continue
        width = topic_length_size(view, at)
        length_at = topic_length_at(view, at)
        block_size = width + signed_topic_length(view, length_at, width)
        if block_size != topic_block.size or not same_bytes(view, length_at, topic_block, 0, block_size):
            continue
        real = _real_topic(view, at, total)
        size = place_size(real)
        if size != real_topic.size or not same_bytes(view, place_at(real), real_topic, 0, size):
            continue
        found = find_property(view, properties_at(view, at), properties_end(view, at, total), UNIQ_KEY_NAME)
        size = int(ids[2 * i + 1])
        if found == ABSENT or place_size(found) != size:
            continue
        if not same_bytes(view, place_at(found), texts, int(ids[2 * i]), size):
            continue
        queue_id = load_be32(view, at + record.QUEUE_ID)
        queue_offset = load_be64(view, at + record.QUEUE_OFFSET)
        if queue_id < 0 or queue_id >= queue_numbers.size:
            continue
        if belongs_to_deleted(cells, int(queue_numbers[queue_id]), place, queue_offset):
            continue
        places[i] = place
        store_le64(answer, 8 * i, place)
        store_le64(answer, 8 * (count + i), queue_offset)
        store_le32(answer, 16 * count + 4 * i, queue_id)
        held += 1
    return held


@kernel
def _unlink(entry: int, ring: Words, slots: Words) -> None:
    """Remove an entry from its chain."""
    slot = _slot_of(int(ring[ENTRY_WORDS * entry + HASH]), slots)
    following = int(ring[ENTRY_WORDS * entry + LINK])
    at = int(slots[slot])
    if at == entry:
        slots[slot] = following
        return
    while at != NONE:
        link = int(ring[ENTRY_WORDS * at + LINK])
        if link == entry:
            ring[ENTRY_WORDS * at + LINK] = following
            return
        at = link


@kernel
def _put(found: int, place: int, ring: Words, slots: Words, window: Words) -> None:
    """Insert a record, replacing the oldest one if the window is full."""
    capacity = ring.size // ENTRY_WORDS
    entry = int(window[NEXT])
    if window[COUNT] == capacity:
        _unlink(entry, ring, slots)
    else:
        window[COUNT] += 1
    slot = _slot_of(found, slots)
    ring[ENTRY_WORDS * entry + HASH] = found
    ring[ENTRY_WORDS * entry + PLACE] = place
    ring[ENTRY_WORDS * entry + LINK] = slots[slot]
    slots[slot] = entry
    window[NEXT] = entry + 1 if entry + 1 < capacity else 0


@kernel
def insert(hashes: Words, places: Words, ring: Words, slots: Words, window: Words) -> None:
    """Insert the records at `places` int64[count], except those with the hash NO_ID."""
    for i in range(hashes.size):
        if hashes[i] != NO_ID:
            _put(int(hashes[i]), int(places[i]), ring, slots, window)


@kernel
def remove_from(physical_offset: int, ring: Words, slots: Words, window: Words) -> None:
    """Remove the newest records that lie at or above a physical offset."""
    capacity = ring.size // ENTRY_WORDS
    while window[COUNT] > 0:
        last = int(window[NEXT]) - 1 if window[NEXT] > 0 else capacity - 1
        if ring[ENTRY_WORDS * last + PLACE] < physical_offset:
            return
        _unlink(last, ring, slots)
        window[NEXT] = last
        window[COUNT] -= 1


@kernel
def insert_from_log(view: Bytes, start: int, stop: int, base: int, ring: Words, slots: Words, window: Words) -> int:
    """Insert the records of view[start:stop] into the window.

    Returns the number of records with a unique id. `view` is a segment, `base` the log position of its byte 0. Stops at
    the first invalid record. With an empty ring the records are only counted.
    """
    at = start
    remembered = 0
    last_total = 0
    while at < stop:
        total = record_size(view, at, stop)
        if total < 0 or load_be64(view, at + record.PHYSICAL_OFFSET) != base + at:
            break
        prefetch_stride(view, at, total, last_total)
        last_total = total
        found = find_property(view, properties_at(view, at), properties_end(view, at, total), UNIQ_KEY_NAME)
        if found != ABSENT:
            remembered += 1
            if ring.size > 0:
                width = topic_length_size(view, at)
                length_at = topic_length_at(view, at)
                block_size = width + signed_topic_length(view, length_at, width)
                real = _real_topic(view, at, total)
                seed = _seed(view, length_at, block_size, view, place_at(real), place_size(real))
                unique = _hash_of(seed, view, place_at(found), place_size(found))
                _put(unique, base + at, ring, slots, window)
        at += total
    return remembered


def warm() -> None:
    """Compile or load these kernels."""
    nothing = np.zeros(0, np.uint8)
    words = np.zeros(0, np.int64)
    slots = np.full(1, NONE, np.int64)
    window = np.zeros(WINDOW_SIZE, np.int64)
    locate_ids(nothing, 0, -1, 0, -1, nothing, nothing, words)
    hash_ids(nothing, words, nothing, nothing, words)
    lookup(words, words, slots, words)
    verify_duplicates(nothing, 0, 0, nothing, words, nothing, nothing, 0, words, words, words, nothing)
    insert(words, words, words, slots, window)
    remove_from(0, words, slots, window)
    insert_from_log(nothing, 0, 0, 0, words, slots, window)
