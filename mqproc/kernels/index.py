"""Index files: add entries, walk chains, take entries back.

Stores are ordered: an item, its slot (release), then the header, and the count last (release). Readers therefore find a
complete item at every slot, ignore items not yet covered by the count, and follow `previous` past them. Slots and count
can always be rebuilt from the items.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from mqproc.kernels.jit.compile import inlined, kernel
from mqproc.kernels.jit.intrinsics import (
    load_acquire_be32,
    load_be32,
    load_be64,
    prefetch_for_writing,
    store_be32,
    store_be64,
    store_release_be32,
)
from mqproc.kernels.jit.lowering import Bytes, Int32s, Words
from mqproc.layout import index_file as layout

INT32_MAX = 2**31 - 1
_SECOND_MS = 1000

# Slots are accessed randomly in 20 MB: prefetch a slot's cache line this many entries before it is used.
AHEAD_ENTRIES: Final = 24


HEADER_FIELDS = 6


@inlined
def items_start(slots: int) -> int:
    return layout.HEADER_SIZE + layout.SLOT_SIZE * slots


@inlined
def slot_of(key_hash: int, slots: int) -> int:
    return layout.HEADER_SIZE + layout.SLOT_SIZE * (key_hash % slots)


@inlined
def slot_by(key_hash: int, slots: int, reciprocal: int) -> int:
    """`slot_of` without a division, for hashes from 0 to 2³¹ − 1; `reciprocal` is 2³² // slots."""
    # The quotient is exact or one too low, since its error is at most hash / 2³² < 1/2.
    slot = key_hash - (key_hash * reciprocal >> 32) * slots
    if slot >= slots:
        slot -= slots
    return layout.HEADER_SIZE + layout.SLOT_SIZE * slot


@inlined
def seconds_since(time_ms: int, begin_ms: int) -> int:
    """Time difference in seconds that RocketMQ stores in an item."""
    if begin_ms <= 0:
        return 0
    return min(max(time_ms - begin_ms, 0) // _SECOND_MS, INT32_MAX)


@inlined
def published_count(view: Bytes) -> int:
    """Number of the next item, 1 in an empty file; items 1…count−1 are complete."""
    return max(layout.FIRST_ITEM, load_acquire_be32(view, layout.ITEM_COUNT))


@kernel
def load_header(view: Bytes, fields: Words) -> None:
    """Load the six header fields in file order into int64[HEADER_FIELDS], the count first."""
    fields[5] = published_count(view)
    fields[0] = load_be64(view, layout.BEGIN_TIMESTAMP)
    fields[1] = load_be64(view, layout.END_TIMESTAMP)
    fields[2] = load_be64(view, layout.BEGIN_PHYSICAL_OFFSET)
    fields[3] = load_be64(view, layout.END_PHYSICAL_OFFSET)
    fields[4] = load_be32(view, layout.SLOT_COUNT)


@kernel
def put_entries(
    view: Bytes, slots: int, item_limit: int, hashes: Int32s, offsets: Words, times: Words, first: int, stop: int
) -> int:
    """Add entries [first, stop) while item numbers are below `item_limit`.

    Returns the first entry not added. `view` uint8[file size] is the mapped file, allocated up to `item_limit`;
    `hashes` int32[n], `offsets` and `times` (store times in ms) int64[n].
    """
    count = published_count(view)
    stop = min(stop, first + item_limit - count)
    if first >= stop:
        return first
    used = load_be32(view, layout.SLOT_COUNT)
    begin_ms = load_be64(view, layout.BEGIN_TIMESTAMP)
    reciprocal = (1 << 32) // slots
    item_at = items_start(slots) + layout.ITEM_SIZE * count
    for entry in range(first, stop):
        if entry + AHEAD_ENTRIES < stop:
            prefetch_for_writing(view, slot_by(int(hashes[entry + AHEAD_ENTRIES]), slots, reciprocal))
        key_hash = int(hashes[entry])
        slot_at = slot_by(key_hash, slots, reciprocal)
        previous = load_be32(view, slot_at)
        if previous <= 0 or previous > count:
            previous = 0
            used += 1
        store_be32(view, item_at + layout.ITEM_KEY_HASH, key_hash)
        store_be64(view, item_at + layout.ITEM_PHYSICAL_OFFSET, offsets[entry])
        store_be32(view, item_at + layout.ITEM_TIME_DIFFERENCE, seconds_since(times[entry], begin_ms))
        store_be32(view, item_at + layout.ITEM_PREVIOUS, previous)
        store_release_be32(view, slot_at, count)
        if count == layout.FIRST_ITEM:
            # After the first item, whose time counts from the begin time that the file was created with.
            begin_ms = times[entry]
            store_be64(view, layout.BEGIN_TIMESTAMP, begin_ms)
            store_be64(view, layout.BEGIN_PHYSICAL_OFFSET, offsets[entry])
        count += 1
        item_at += layout.ITEM_SIZE
    store_be64(view, layout.END_TIMESTAMP, times[stop - 1])
    store_be64(view, layout.END_PHYSICAL_OFFSET, offsets[stop - 1])
    store_be32(view, layout.SLOT_COUNT, used)
    store_release_be32(view, layout.ITEM_COUNT, count)
    return stop


# Results of `walk_chain` at the end of its `out`.
WALK_NEXT, WALKED = -2, -1


@kernel
def walk_chain(
    view: Bytes,
    slots: int,
    count: int,
    key_hash: int,
    begin_ms: int,
    end_ms: int,
    below: int,
    max_results: int,
    item: int,
    walk_max: int,
    out: Words,
) -> int:
    """Find items by key hash, time in [begin_ms, end_ms], and physical offset under `below`.

    Newest first; returns their number. `view` uint8[file size]; `count` is the published count; `item` is where an
    earlier walk of at most `walk_max` items ended, 0 to begin. `out` int64[max_results + 2 or more] receives the
    offsets, and in its last two words (WALK_NEXT, WALKED) the item at which the next walk begins, 0 at the end of the
    chain, and the number of examined items. Times are whole seconds after the file's begin time. Items at or above
    `count` are skipped, and a chain whose item numbers do not descend ends there.
    """
    out[out.size + WALK_NEXT] = 0
    out[out.size + WALKED] = 0
    if count <= layout.FIRST_ITEM:
        return 0
    items_at = items_start(slots)
    capacity = (view.size - items_at) // layout.ITEM_SIZE
    file_begin_ms = load_be64(view, layout.BEGIN_TIMESTAMP)
    above = min(item + 1, capacity) if item > 0 else capacity
    if item <= 0:
        item = load_acquire_be32(view, slot_of(key_hash, slots))
    found = 0
    walked = 0
    while found < max_results and walked < walk_max and 0 < item < above:
        above = item
        walked += 1
        at = items_at + layout.ITEM_SIZE * item
        item = load_be32(view, at + layout.ITEM_PREVIOUS)
        if above >= count:
            continue
        seconds = load_be32(view, at + layout.ITEM_TIME_DIFFERENCE)
        if seconds < 0:
            item = 0
            break
        time_ms = file_begin_ms + seconds * _SECOND_MS
        if load_be32(view, at + layout.ITEM_KEY_HASH) == key_hash and begin_ms <= time_ms <= end_ms:
            out[found] = load_be64(view, at + layout.ITEM_PHYSICAL_OFFSET)
            found += int(out[found] < below)
        if time_ms < begin_ms:
            item = 0
            break
    out[out.size + WALK_NEXT] = item if 0 < item < above else 0
    out[out.size + WALKED] = walked
    return found


@kernel
def roll_back(view: Bytes, slots: int, committed_count: int) -> int:
    """Reset every slot that names an item ≥ `committed_count` along `previous` to one below it.

    Returns their number. Safe with concurrent readers: each slot changes from one complete chain to a shorter one.
    """
    items_at = items_start(slots)
    capacity = (view.size - items_at) // layout.ITEM_SIZE
    changed = 0
    for slot_at in range(layout.HEADER_SIZE, items_at, layout.SLOT_SIZE):
        item = load_be32(view, slot_at)
        if 0 <= item < committed_count:
            continue
        above = capacity
        while committed_count <= item < above:
            above = item
            item = load_be32(view, items_at + layout.ITEM_SIZE * item + layout.ITEM_PREVIOUS)
        store_release_be32(view, slot_at, item if 0 <= item < committed_count else 0)
        changed += 1
    return changed


def warm() -> None:
    """Compile or load these kernels."""
    view = np.zeros(layout.file_size(1, 2), np.uint8)
    words = np.zeros(7, np.int64)
    load_header(view, np.zeros(HEADER_FIELDS, np.int64))
    put_entries(view, 1, 2, np.zeros(1, np.int32), words, words, 0, 1)
    walk_chain(view, 1, published_count(view), 0, 0, 0, 0, 1, 0, 1, words)
    roll_back(view, 1, 1)
