"""Verify index files: items against the log, links and slots against items."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mqproc.kernels.hashing import index_key_hash, java_hash_utf8, tag_seed
from mqproc.kernels.index import INT32_MAX, items_start, seconds_since
from mqproc.kernels.jit.compile import inlined, kernel
from mqproc.kernels.jit.intrinsics import load_be32, load_be64
from mqproc.kernels.jit.lowering import Bytes, Int32s, Words
from mqproc.kernels.record_check import record_size, store_timestamp_at, topic_of
from mqproc.kernels.record_fields import (
    ABSENT,
    KEYS_NAME,
    TAGS_NAME,
    UNIQ_KEY_NAME,
    find_byte,
    find_property,
    place_at,
    place_size,
    properties_at,
    properties_end,
)
from mqproc.layout import index_file as layout
from mqproc.layout import properties, record

# Results of match_entries.
ENTRIES_DONE, ITEMS_DONE, DIFFERS = range(3)
# Position of the stop, int64[MATCH_SIZE].
MATCH_ITEM, MATCH_ENTRY = range(2)
MATCH_SIZE = 2

# Results of check_chains, int64[CHAINS_SIZE]: counts, and numbers of items and slots (−1 = none).
(
    SLOTS_USED,  # slots that the items use
    BAD_LINKS,
    FIRST_BAD_LINK,
    BAD_SLOTS,
    FIRST_BAD_SLOT,
    DESCENTS,  # items whose offset is below that of the previous item
    FIRST_DESCENT,
) = range(7)
CHAINS_SIZE = 7

# Faults of an item.
ITEM_FITS, NO_RECORD, OTHER_KEY, OTHER_TIME = range(4)

UNKNOWN_MS = -1
"""Unknown end time of the previous file."""

_SPACE = ord(properties.KEY_SEPARATOR)
_SEPARATOR = ord(layout.KEY_TOPIC_SEPARATOR)


@inlined
def _item_at(slots: int, item: int) -> int:
    return items_start(slots) + layout.ITEM_SIZE * item


@kernel
def _time_fits(item: int, seconds: int, time_ms: int, begin_ms: int, previous_end_ms: int) -> bool:
    """Whether an item's seconds match a record stored at `time_ms`.

    The first item of a file may count from the end time of the previous file.
    """
    if seconds == seconds_since(time_ms, begin_ms):
        return True
    if item != layout.FIRST_ITEM or seconds < 0:
        return False
    return previous_end_ms < 0 or seconds == seconds_since(time_ms, previous_end_ms)


@kernel
def match_entries(
    view: Bytes,
    slots: int,
    item: int,
    stop_item: int,
    previous_end_ms: int,
    hashes: Int32s,
    offsets: Words,
    times: Words,
    entry: int,
    stop: int,
    out: Words,
) -> int:
    """Compare entries [entry, stop) with items [item, stop_item) of a mapped file.

    ENTRIES_DONE, ITEMS_DONE or DIFFERS. `view` uint8[file size]; `hashes` int32, `offsets` and `times` int64 are
    results of a dispatch scan; entries with a marked hash need no item. `out` int64[MATCH_SIZE] receives the first item
    and entry that are not equal.
    """
    begin_ms = load_be64(view, layout.BEGIN_TIMESTAMP)
    reason = ENTRIES_DONE
    at = _item_at(slots, item)
    while entry < stop:
        if item >= stop_item:
            reason = ITEMS_DONE
            break
        seconds = load_be32(view, at + layout.ITEM_TIME_DIFFERENCE)
        key_hash = int(hashes[entry])
        if (
            load_be64(view, at + layout.ITEM_PHYSICAL_OFFSET) != offsets[entry]
            or load_be32(view, at + layout.ITEM_KEY_HASH) != key_hash & INT32_MAX
            or not _time_fits(item, seconds, int(times[entry]), begin_ms, previous_end_ms)
            or (item == layout.FIRST_ITEM and times[entry] != begin_ms)
        ):
            if key_hash < 0:
                entry += 1
                continue
            reason = DIFFERS
            break
        entry += 1
        item += 1
        at += layout.ITEM_SIZE
    out[MATCH_ITEM] = item
    out[MATCH_ENTRY] = entry
    return reason


@kernel
def first_item_at(view: Bytes, slots: int, count: int, physical_offset: int) -> int:
    """First item in [1, count) at or above a log position, else `count`; item offsets ascend."""
    low = layout.FIRST_ITEM
    high = count
    while low < high:
        middle = (low + high) >> 1
        if load_be64(view, _item_at(slots, middle) + layout.ITEM_PHYSICAL_OFFSET) < physical_offset:
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def check_chains(view: Bytes, slots: int, count: int, heads: Int32s, out: Words) -> None:
    """Compare the slots and links of a file with those that the items below `count` form.

    `view` uint8[file size]; `heads` int32[slots], initially 0; `out` int64[CHAINS_SIZE]. Slots may lead over items at
    or above `count`, which are being added.
    """
    capacity = (view.size - _item_at(slots, 0)) // layout.ITEM_SIZE
    for column in range(CHAINS_SIZE):
        out[column] = 0
    out[FIRST_BAD_LINK] = -1
    out[FIRST_BAD_SLOT] = -1
    out[FIRST_DESCENT] = -1
    last_offset = 0
    used = 0
    at = _item_at(slots, layout.FIRST_ITEM)
    for item in range(layout.FIRST_ITEM, count):
        slot = (load_be32(view, at + layout.ITEM_KEY_HASH) & INT32_MAX) % slots
        head = int(heads[slot])
        if load_be32(view, at + layout.ITEM_PREVIOUS) != head:
            if out[BAD_LINKS] == 0:
                out[FIRST_BAD_LINK] = item
            out[BAD_LINKS] += 1
        if head == 0:
            used += 1
        heads[slot] = item
        offset = load_be64(view, at + layout.ITEM_PHYSICAL_OFFSET)
        if offset < last_offset:
            if out[DESCENTS] == 0:
                out[FIRST_DESCENT] = item
            out[DESCENTS] += 1
        last_offset = offset
        at += layout.ITEM_SIZE
    out[SLOTS_USED] = used
    for slot in range(slots):
        item = load_be32(view, layout.HEADER_SIZE + layout.SLOT_SIZE * slot)
        above = capacity
        while count <= item < above:
            above = item
            item = load_be32(view, _item_at(slots, item) + layout.ITEM_PREVIOUS)
        if item != heads[slot]:
            if out[BAD_SLOTS] == 0:
                out[FIRST_BAD_SLOT] = slot
            out[BAD_SLOTS] += 1


@kernel
def _value_has_hash(log: Bytes, place: int, prefix_hash: int, key_hash: int) -> bool:
    """Whether a value located by `find_property` is a key with this hash."""
    at = place_at(place)
    return index_key_hash(java_hash_utf8(log, at, at + place_size(place), prefix_hash)) == key_hash


@kernel
def tag_hash_of(log: Bytes, at: int, total: int) -> int:
    """Hash of the entry for the tag of the valid record at `at`; −1 without one."""
    if load_be32(log, at + record.SYS_FLAG) & record.SYS_FLAG_TRANSACTION_MASK == record.SYS_FLAG_ROLLBACK:
        return -1
    place = find_property(log, properties_at(log, at), properties_end(log, at, total), TAGS_NAME)
    if place == ABSENT:
        return -1
    topic, size = topic_of(log, at)
    seed = tag_seed(31 * java_hash_utf8(log, topic, topic + size, 0) + _SEPARATOR)
    return index_key_hash(java_hash_utf8(log, place_at(place), place_at(place) + place_size(place), seed))


@kernel
def record_has_hash(log: Bytes, at: int, total: int, key_hash: int) -> bool:
    """Whether the unique id, a key or the tag of the valid record at `at` has this hash."""
    if load_be32(log, at + record.SYS_FLAG) & record.SYS_FLAG_TRANSACTION_MASK == record.SYS_FLAG_ROLLBACK:
        return False
    topic, size = topic_of(log, at)
    prefix_hash = 31 * java_hash_utf8(log, topic, topic + size, 0) + _SEPARATOR
    first = properties_at(log, at)
    end = properties_end(log, at, total)
    place = find_property(log, first, end, UNIQ_KEY_NAME)
    if place != ABSENT and _value_has_hash(log, place, prefix_hash, key_hash):
        return True
    if tag_hash_of(log, at, total) == key_hash:
        return True
    place = find_property(log, first, end, KEYS_NAME)
    if place == ABSENT:
        return False
    word = place_at(place)
    stop = word + place_size(place)
    while word < stop:
        word_end = find_byte(log, word, stop, _SPACE)
        if word_end > word and index_key_hash(java_hash_utf8(log, word, word_end, prefix_hash)) == key_hash:
            return True
        word = word_end + 1
    return False


@kernel
def check_items(
    view: Bytes, slots: int, items: Words, previous_end_ms: int, log: Bytes, base: int, faults: Bytes
) -> None:
    """Check items that point into a segment against their records.

    The fault of each is stored in `faults` uint8[n]. `view` uint8[file size]; `items` int64[n] are item numbers; `log`
    uint8 is the segment, `base` the log position of its byte 0.
    """
    begin_ms = load_be64(view, layout.BEGIN_TIMESTAMP)
    for index in range(items.size):
        item = int(items[index])
        place = _item_at(slots, item)
        at = load_be64(view, place + layout.ITEM_PHYSICAL_OFFSET) - base
        total = record_size(log, at, log.size)
        if total < 0 or load_be64(log, at + record.PHYSICAL_OFFSET) != base + at:
            faults[index] = NO_RECORD
            continue
        if not record_has_hash(log, at, total, load_be32(view, place + layout.ITEM_KEY_HASH)):
            faults[index] = OTHER_KEY
            continue
        time_ms = load_be64(log, store_timestamp_at(log, at))
        seconds = load_be32(view, place + layout.ITEM_TIME_DIFFERENCE)
        faults[index] = ITEM_FITS if _time_fits(item, seconds, time_ms, begin_ms, previous_end_ms) else OTHER_TIME


def warm() -> None:
    """Compile or load these kernels."""
    view = np.zeros(layout.file_size(1, 2), np.uint8)
    words: NDArray[np.int64] = np.zeros(CHAINS_SIZE, np.int64)
    match_entries(view, 1, 1, 1, UNKNOWN_MS, np.zeros(0, np.int32), words, words, 0, 0, words)
    first_item_at(view, 1, 1, 0)
    check_chains(view, 1, 1, np.zeros(1, np.int32), words)
    check_items(view, 1, words[:0], UNKNOWN_MS, view, 0, view[:0].copy())
    log = np.zeros(2 * record.FIXED_SIZE_V4, np.uint8)
    tag_hash_of(log, 0, len(log))
    record_has_hash(log, 0, len(log), 0)
