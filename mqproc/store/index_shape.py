"""How many slots and items an index file has: its length alone does not tell, its header and items do.

A file of N slots and M items has 40 + 4N + 20M bytes, so many pairs give one length. With the right N the first and the
last item lie where the header says that their records lie, and the last one is the newest of its slot.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mqproc.io import Kind, StoreIO
from mqproc.kernels.views import as_kernel_array
from mqproc.layout import index_file as layout
from mqproc.paths import index_name_time_ms
from mqproc.store.index_headers import IndexHeader, read_header

# RocketMQ's defaults are four items a slot, and so are most settings.
_USUAL_ITEMS_PER_SLOT: Final = 4
# N and N + 5 slots leave room for 20 bytes more or less: one item.
_STEP: Final = layout.ITEM_SIZE // layout.SLOT_SIZE
_CANDIDATES_AT_ONCE: Final = 1 << 16
_NEWEST_ITEMS: Final = 64


def adopted_index_shape(io: StoreIO, folder: Path, slots: int, items: int) -> tuple[int, int]:
    """(slots, items) of the files below a folder; the configured ones when they fit, or nothing tells."""
    files = [
        entry
        for entry in io.entries(folder)
        if entry.kind is Kind.FILE and entry.size and index_name_time_ms(entry.name) is not None
    ]
    sizes = Counter(entry.size for entry in files)
    if not sizes or layout.file_size(slots, items) in sizes:
        return slots, items
    size = max(sizes, key=lambda size: (sizes[size], _usual_shape(size) is not None, size))
    for entry in files:
        if entry.size == size:
            found = _shape_of(io, folder / entry.name, size)
            if found is not None:
                return found
    return _usual_shape(size) or (slots, items)


def _shape_of(io: StoreIO, path: Path, size: int) -> tuple[int, int] | None:
    """The shape of one file by its own entries; None when they do not tell."""
    if size < layout.file_size(1, 2) or (size - layout.HEADER_SIZE) % layout.SLOT_SIZE:
        return None
    fd = io.open(path)
    try:
        mapping = io.map_as_it_is(fd, size)
    finally:
        io.close(fd)
    view = as_kernel_array(mapping)
    header = read_header(view)
    if header.count <= layout.FIRST_ITEM:
        return None
    candidates = _candidates(view, header)
    usual = _usual_shape(size)
    if usual is not None and usual[0] in candidates:
        return usual
    if not len(candidates):
        return None
    chosen = _with_newest_in_their_slots(view, header, candidates)
    return chosen, _items(size, chosen)


def _with_newest_in_their_slots(view: NDArray[np.uint8], header: IndexHeader, candidates: NDArray[np.int64]) -> int:
    """The first number of slots with which the last items are where their keys' slots lead; else one that fits the very
    last of them; the first one without any.

    Item 0 is empty, and a record may have several items: one item less before the first looks right in a file that
    begins with the log. In a small file it may also lead to its slot by chance, but not with all of those before it.
    """
    last_item = header.count - 1
    words = np.ndarray(len(view) // layout.SLOT_SIZE, ">i4", view.data)
    chosen = None
    for start in range(0, len(candidates), _CANDIDATES_AT_ONCE):
        slots = candidates[start : start + _CANDIDATES_AT_ONCE]
        hashes = words[_word_of_item(slots, last_item)].astype(np.int64)
        fits = (hashes >= 0) & (words[layout.HEADER_SIZE // layout.SLOT_SIZE + hashes % slots] == last_item)
        for fitting in slots[fits].tolist():
            if _are_in_their_slots(words, fitting, last_item):
                return int(fitting)
            chosen = fitting if chosen is None else chosen
    return int(candidates[0]) if chosen is None else int(chosen)


def _are_in_their_slots(words: NDArray[np.int32], slots: int, last_item: int) -> bool:
    """Whether each slot of the last items leads to the newest of those that are its own."""
    items = np.arange(max(layout.FIRST_ITEM, last_item - _NEWEST_ITEMS + 1), last_item + 1)
    hashes = words[_word_of_item(slots, items)].astype(np.int64)
    newest = dict(zip((hashes % slots).tolist(), items.tolist(), strict=True))
    first_slot = layout.HEADER_SIZE // layout.SLOT_SIZE
    return bool((hashes >= 0).all()) and all(words[first_slot + slot] == item for slot, item in newest.items())


def _word_of_item(slots: Any, item: Any) -> Any:
    """Which word of a file an item's hash is."""
    return (layout.items_start(0) + layout.SLOT_SIZE * slots + layout.ITEM_SIZE * item) // layout.SLOT_SIZE


def _candidates(view: NDArray[np.uint8], header: IndexHeader) -> NDArray[np.int64]:
    """Numbers of slots with which the first and the last item are the header's: int64[n], ascending."""
    size = len(view)
    first = (size - layout.HEADER_SIZE) // layout.SLOT_SIZE % _STEP or _STEP
    last_item = header.count - 1
    reach = layout.item_offset(first, last_item) + layout.ITEM_SIZE
    # Five slots more are 20 bytes further on.
    count = (size - reach) // layout.ITEM_SIZE + 1
    if count <= 0:
        return np.zeros(0, np.int64)

    def offsets_of(item: int) -> NDArray[np.int64]:
        start = layout.item_offset(first, item) + layout.ITEM_PHYSICAL_OFFSET
        return np.ndarray((count,), ">i8", view.data, start, (layout.ITEM_SIZE,))

    fits = (offsets_of(layout.FIRST_ITEM) == header.begin_physical_offset) & (
        offsets_of(last_item) == header.end_physical_offset
    )
    return first + _STEP * np.flatnonzero(fits)


def _usual_shape(size: int) -> tuple[int, int] | None:
    """The shape with four items a slot, None when the length is none of these."""
    slots, rest = divmod(size - layout.HEADER_SIZE, layout.SLOT_SIZE + _USUAL_ITEMS_PER_SLOT * layout.ITEM_SIZE)
    return None if rest or slots < 1 else (slots, _USUAL_ITEMS_PER_SLOT * slots)


def _items(size: int, slots: int) -> int:
    return (size - layout.items_start(slots)) // layout.ITEM_SIZE
