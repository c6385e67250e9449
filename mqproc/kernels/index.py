"""Putting entries into a mapped index file, walking its chains, and mending its slots (layout/index_file.py).

Order of stores: an item, then its slot (release), then the header, and the count last (release). So a reader finds a
whole item behind every slot, ignores items that the count does not cover yet, and follows `previous` past them.
A file's slots and count can always be derived again from its items.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.kernels.ahead import prefetch_for_writing
from mqproc.kernels.intrinsics import (
    load_acquire_be32,
    load_be32,
    load_be64,
    store_be32,
    store_be64,
    store_release_be32,
)
from mqproc.kernels.jit import inlined, kernel
from mqproc.kernels.primitive import Bytes, Words
from mqproc.layout import index_file as layout

Int32s = NDArray[np.int32]

_INT32_MAX = 2**31 - 1
_SECOND_MS = 1000

# A slot is a random one of 20 MB: its line is asked for this many entries before it is needed.
AHEAD_ENTRIES: Final = 24


HEADER_FIELDS = 6


@inlined
def _items_start(slots: int) -> int:
    return layout.HEADER_SIZE + layout.SLOT_SIZE * slots


@inlined
def _slot_at(key_hash: int, slots: int) -> int:
    return layout.HEADER_SIZE + layout.SLOT_SIZE * (key_hash % slots)


@inlined
def _slot_by(key_hash: int, slots: int, reciprocal: int) -> int:
    """`_slot_at` without a division, of a hash from 0 to 2³¹ − 1; `reciprocal` is 2³² // slots."""
    # The quotient is right or one too low: what it lacks is hash / 2³² at most, below a half.
    slot = key_hash - (key_hash * reciprocal >> 32) * slots
    if slot >= slots:
        slot -= slots
    return layout.HEADER_SIZE + layout.SLOT_SIZE * slot


@inlined
def published_count(view: Bytes) -> int:
    """Number of the next item; items 1…count−1 are whole. A file without entries says 0, which counts as 1."""
    return max(layout.FIRST_ITEM, load_acquire_be32(view, layout.ITEM_COUNT))


@kernel
def load_header(view: Bytes, fields: Words) -> None:
    """The header's six fields as int64[HEADER_FIELDS], in the file's order; the count is read first."""
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
    """Put entries [first, stop) as far as their item numbers are below `item_limit`; the first entry not put.

    `view` uint8[file size] is the mapped file, its space below `item_limit` allocated; `hashes` int32[n], `offsets` and
    `times` (store times in ms) int64[n].
    """
    count = published_count(view)
    stop = min(stop, first + item_limit - count)
    if first >= stop:
        return first
    used = load_be32(view, layout.SLOT_COUNT)
    begin_ms = load_be64(view, layout.BEGIN_TIMESTAMP)
    reciprocal = (1 << 32) // slots
    item_at = _items_start(slots) + layout.ITEM_SIZE * count
    for entry in range(first, stop):
        if entry + AHEAD_ENTRIES < stop:
            prefetch_for_writing(view, _slot_by(int(hashes[entry + AHEAD_ENTRIES]), slots, reciprocal))
        key_hash = int(hashes[entry])
        slot_at = _slot_by(key_hash, slots, reciprocal)
        previous = load_be32(view, slot_at)
        if previous <= 0 or previous > count:
            previous = 0
            used += 1
        seconds = 0
        if begin_ms > 0:
            seconds = min(max(times[entry] - begin_ms, 0) // _SECOND_MS, _INT32_MAX)
        store_be32(view, item_at + layout.ITEM_KEY_HASH, key_hash)
        store_be64(view, item_at + layout.ITEM_PHYSICAL_OFFSET, offsets[entry])
        store_be32(view, item_at + layout.ITEM_TIME_DIFFERENCE, seconds)
        store_be32(view, item_at + layout.ITEM_PREVIOUS, previous)
        store_release_be32(view, slot_at, count)
        if count == layout.FIRST_ITEM:
            # Only now: the first item's time counts from the begin that the file was made with.
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
    out: Words,
) -> int:
    """Physical offsets under `below` of the items with a key hash and a time in [begin_ms, end_ms], newest first; their
    number.

    `view` uint8[file size]; `count` is the published count that the reader goes by; `out` int64[> max_results], of
    which the last word takes the number of items that were looked at. Times
    are whole seconds after the file's begin. Items at or above `count` are passed over, and a chain that does not
    descend ends there.
    """
    out[out.size - 1] = 0
    if count <= layout.FIRST_ITEM:
        return 0
    items_at = _items_start(slots)
    capacity = (view.size - items_at) // layout.ITEM_SIZE
    file_begin_ms = load_be64(view, layout.BEGIN_TIMESTAMP)
    item = load_acquire_be32(view, _slot_at(key_hash, slots))
    above = capacity
    found = 0
    walked = 0
    while found < max_results and 0 < item < above:
        above = item
        walked += 1
        at = items_at + layout.ITEM_SIZE * item
        item = load_be32(view, at + layout.ITEM_PREVIOUS)
        if above >= count:
            continue
        seconds = load_be32(view, at + layout.ITEM_TIME_DIFFERENCE)
        if seconds < 0:
            break
        time_ms = file_begin_ms + seconds * _SECOND_MS
        if load_be32(view, at + layout.ITEM_KEY_HASH) == key_hash and begin_ms <= time_ms <= end_ms:
            out[found] = load_be64(view, at + layout.ITEM_PHYSICAL_OFFSET)
            found += int(out[found] < below)
        if time_ms < begin_ms:
            break
    out[out.size - 1] = walked
    return found


@kernel
def roll_back(view: Bytes, slots: int, committed_count: int) -> int:
    """Walk every slot that names an item ≥ `committed_count` back along `previous` below it; how many were changed.

    Readers may look on: each slot goes from one whole chain to a shorter one.
    """
    items_at = _items_start(slots)
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


# What `take_stock` says.
(
    COUNT,  # the number behind the last item
    USED,  # slots in use
    FITS,  # 0 when the `previous` of an item is another than it should be
) = range(3)
STOCK_SIZE = 3


@kernel
def take_stock(view: Bytes, slots: int, floor: int, mark: int, header_count: int, wanted: Bytes, out: Words) -> None:
    """Go through the items of a file that lie below `mark`: how many there are, and what slots and chains they make.

    Items 1… are taken while their offsets do not descend, from `floor` on, and stay below `mark`. An item of zeros
    tells nothing by itself (it may be a key of hash 0 in the record at offset 0): such items at the end count only
    below `header_count`. `wanted` uint8[4 × slots], all 0, takes the slots as they should lie in the file; `out`
    int64[STOCK_SIZE]. Changes nothing in the file.
    """
    items_at = _items_start(slots)
    capacity = (view.size - items_at) // layout.ITEM_SIZE
    count = layout.FIRST_ITEM
    last_offset = floor
    used = 0
    fits = 1
    for item in range(layout.FIRST_ITEM, capacity):
        at = items_at + layout.ITEM_SIZE * item
        offset = load_be64(view, at + layout.ITEM_PHYSICAL_OFFSET)
        key_hash = load_be32(view, at + layout.ITEM_KEY_HASH)
        if offset < last_offset or offset >= mark or key_hash < 0:
            break
        last_offset = offset
        if item + AHEAD_ENTRIES < capacity:
            ahead_hash = load_be32(view, at + layout.ITEM_SIZE * AHEAD_ENTRIES + layout.ITEM_KEY_HASH)
            prefetch_for_writing(wanted, layout.SLOT_SIZE * (ahead_hash % slots))
        if offset == 0 and key_hash == 0 and item >= header_count:
            continue
        for counted in range(count, item + 1):
            slot_at = (
                _slot_at(load_be32(view, items_at + layout.ITEM_SIZE * counted + layout.ITEM_KEY_HASH), slots)
                - layout.HEADER_SIZE
            )
            previous = load_be32(wanted, slot_at)
            if previous == 0:
                used += 1
            if load_be32(view, items_at + layout.ITEM_SIZE * counted + layout.ITEM_PREVIOUS) != previous:
                fits = 0
            store_be32(wanted, slot_at, counted)
        count = item + 1
    out[COUNT] = count
    out[USED] = used
    out[FITS] = fits


@kernel
def replay_items(view: Bytes, slots: int, count: int, wanted: Bytes) -> None:
    """Make each `previous` anew for the items below `count`. Nobody may look on.

    `wanted` as in `take_stock`. Only what differs is stored: other pages need not be written to the disk.
    """
    items_at = _items_start(slots)
    for item in range(layout.FIRST_ITEM, count):
        at = items_at + layout.ITEM_SIZE * item
        slot_at = _slot_at(load_be32(view, at + layout.ITEM_KEY_HASH), slots) - layout.HEADER_SIZE
        previous = load_be32(wanted, slot_at)
        if load_be32(view, at + layout.ITEM_PREVIOUS) != previous:
            store_be32(view, at + layout.ITEM_PREVIOUS, previous)
        store_be32(wanted, slot_at, item)


@kernel
def store_slots(view: Bytes, slots: int, wanted: Bytes) -> None:
    """Let the slots say what `wanted` does; stores only what differs. Nobody may look on."""
    for slot_at in range(0, layout.SLOT_SIZE * slots, layout.SLOT_SIZE):
        item = load_be32(wanted, slot_at)
        if load_be32(view, layout.HEADER_SIZE + slot_at) != item:
            store_be32(view, layout.HEADER_SIZE + slot_at, item)


def warm() -> None:
    """Compile or load these kernels."""
    view = np.zeros(layout.file_size(1, 2), np.uint8)
    words = np.zeros(2, np.int64)
    load_header(view, np.zeros(HEADER_FIELDS, np.int64))
    put_entries(view, 1, 2, np.zeros(1, np.int32), words, words, 0, 1)
    walk_chain(view, 1, published_count(view), 0, 0, 0, 0, 1, words)
    roll_back(view, 1, 1)
    wanted = np.zeros(layout.SLOT_SIZE, np.uint8)
    take_stock(view, 1, 0, 1, 1, wanted, np.zeros(STOCK_SIZE, np.int64))
    replay_items(view, 1, 1, wanted)
    store_slots(view, 1, wanted)
