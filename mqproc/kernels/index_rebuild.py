"""Rebuild the slots and links of an index file from its items, in recovery."""

from __future__ import annotations

import numpy as np

from mqproc.kernels.index import AHEAD_ENTRIES, items_start, slot_of
from mqproc.kernels.jit.compile import kernel
from mqproc.kernels.jit.intrinsics import load_be32, load_be64, prefetch_for_writing, store_be32
from mqproc.kernels.jit.lowering import Bytes, Words
from mqproc.layout import index_file as layout

# Results of `recount_items`.
(
    COUNT,  # number after the last item
    USED,  # slots in use
    FITS,  # 0 if the `previous` of an item is wrong
) = range(3)
STOCK_SIZE = 3


@kernel
def recount_items(
    view: Bytes, slots: int, floor: int, mark: int, header_count: int, expected: Bytes, out: Words
) -> None:
    """Count the items below `mark`, and compute the slots and chains that they form.

    Items count from 1 on while their offsets do not descend, begin at or above `floor`, and stay below `mark`. An item
    of zeros is ambiguous (it may be a key with hash 0 of the record at offset 0): at the end of the items these count
    only below `header_count`. `expected` uint8[4 × slots], initially 0, receives the correct slots; `out`
    int64[STOCK_SIZE] the results. The file is not changed.
    """
    items_at = items_start(slots)
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
            prefetch_for_writing(expected, layout.SLOT_SIZE * (ahead_hash % slots))
        if offset == 0 and key_hash == 0 and item >= header_count:
            continue
        for counted in range(count, item + 1):
            slot_at = (
                slot_of(load_be32(view, items_at + layout.ITEM_SIZE * counted + layout.ITEM_KEY_HASH), slots)
                - layout.HEADER_SIZE
            )
            previous = load_be32(expected, slot_at)
            if previous == 0:
                used += 1
            if load_be32(view, items_at + layout.ITEM_SIZE * counted + layout.ITEM_PREVIOUS) != previous:
                fits = 0
            store_be32(expected, slot_at, counted)
        count = item + 1
    out[COUNT] = count
    out[USED] = used
    out[FITS] = fits


@kernel
def rebuild_links(view: Bytes, slots: int, count: int, expected: Bytes) -> None:
    """Correct the `previous` of each item below `count`.

    Requires that no reader has the file open. `expected` as in `recount_items`. Only differences are stored, so that
    unchanged pages stay clean.
    """
    items_at = items_start(slots)
    for item in range(layout.FIRST_ITEM, count):
        at = items_at + layout.ITEM_SIZE * item
        slot_at = slot_of(load_be32(view, at + layout.ITEM_KEY_HASH), slots) - layout.HEADER_SIZE
        previous = load_be32(expected, slot_at)
        if load_be32(view, at + layout.ITEM_PREVIOUS) != previous:
            store_be32(view, at + layout.ITEM_PREVIOUS, previous)
        store_be32(expected, slot_at, item)


@kernel
def store_slots(view: Bytes, slots: int, expected: Bytes) -> None:
    """Set the slots to `expected`, storing only differences; no reader may have the file open."""
    for slot_at in range(0, layout.SLOT_SIZE * slots, layout.SLOT_SIZE):
        item = load_be32(expected, slot_at)
        if load_be32(view, layout.HEADER_SIZE + slot_at) != item:
            store_be32(view, layout.HEADER_SIZE + slot_at, item)


def warm() -> None:
    """Compile or load these kernels."""
    view = np.zeros(layout.file_size(1, 2), np.uint8)
    expected = np.zeros(layout.SLOT_SIZE, np.uint8)
    recount_items(view, 1, 0, 1, 1, expected, np.zeros(STOCK_SIZE, np.int64))
    rebuild_links(view, 1, 1, expected)
    store_slots(view, 1, expected)
