"""Checking index files: items against the entries that the log gives, links against items (layout/index_file.py)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mqproc.kernels.fields import ABSENT, find_byte, find_property, place_at, place_size, properties_at, properties_end
from mqproc.kernels.hashing import index_key_hash, java_hash_utf8
from mqproc.kernels.index import Int32s
from mqproc.kernels.intrinsics import load_be32, load_be64
from mqproc.kernels.jit import kernel
from mqproc.kernels.keyed import KEYS_NAME, UNIQ_KEY_NAME
from mqproc.kernels.primitive import Bytes, Words
from mqproc.kernels.record_check import (
    record_size,
    signed_topic_length,
    store_timestamp_at,
    topic_length_at,
    topic_length_size,
)
from mqproc.layout import index_file as layout
from mqproc.layout import properties, record

# Why match_entries stopped.
ENTRIES_DONE, ITEMS_DONE, DIFFERS = range(3)
# Where: int64[MATCH_SIZE].
MATCH_ITEM, MATCH_ENTRY = range(2)
MATCH_SIZE = 2

# What check_chains says, int64[CHAINS_SIZE]; numbers of items and slots, −1 = none.
(
    USED,  # slots that items make
    BAD_LINKS,
    FIRST_BAD_LINK,
    BAD_SLOTS,
    FIRST_BAD_SLOT,
    DESCENTS,  # items whose offset is below the one's before them
    FIRST_DESCENT,
) = range(7)
CHAINS_SIZE = 7

# What is wrong with an item.
ITEM_FITS, NO_RECORD, OTHER_KEY, OTHER_TIME = range(4)

UNKNOWN_MS = -1
"""In the place of the time at which the file before ended, when that is not known."""

_INT32_MAX = 2**31 - 1
_SECOND_MS = 1000
_SPACE = ord(properties.KEY_SEPARATOR)
_SEPARATOR = ord(layout.KEY_TOPIC_SEPARATOR)


@kernel
def _item_at(slots: int, item: int) -> int:
    return layout.HEADER_SIZE + layout.SLOT_SIZE * slots + layout.ITEM_SIZE * item


@kernel
def _seconds(time_ms: int, begin_ms: int) -> int:
    """The time difference that RocketMQ puts into an item."""
    if begin_ms <= 0:
        return 0
    return min(max(time_ms - begin_ms, 0) // _SECOND_MS, _INT32_MAX)


@kernel
def _time_fits(item: int, seconds: int, time_ms: int, begin_ms: int, previous_end_ms: int) -> bool:
    """Whether an item's seconds are those of a record stored at `time_ms`.

    A file's first item may count from the end of the file before.
    """
    if seconds == _seconds(time_ms, begin_ms):
        return True
    if item != layout.FIRST_ITEM or seconds < 0:
        return False
    return previous_end_ms < 0 or seconds == _seconds(time_ms, previous_end_ms)


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
    """Compare entries [entry, stop) with items [item, stop_item) of a mapped file; ENTRIES_DONE, ITEMS_DONE, DIFFERS.

    `view` uint8[file size]; `hashes` int32, `offsets` and `times` int64 are what a dispatch scan gave. `out`
    int64[MATCH_SIZE] tells how far both are equal.
    """
    begin_ms = load_be64(view, layout.BEGIN_TIMESTAMP)
    reason = ENTRIES_DONE
    at = _item_at(slots, item)
    while entry < stop:
        if item >= stop_item:
            reason = ITEMS_DONE
            break
        seconds = load_be32(view, at + layout.ITEM_TIME_DIFFERENCE)
        if (
            load_be64(view, at + layout.ITEM_PHYSICAL_OFFSET) != offsets[entry]
            or load_be32(view, at + layout.ITEM_KEY_HASH) != hashes[entry]
            or not _time_fits(item, seconds, int(times[entry]), begin_ms, previous_end_ms)
            or (item == layout.FIRST_ITEM and times[entry] != begin_ms)
        ):
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
    """The first item in [1, count) at or above a log position, `count` when there is none, while items ascend."""
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
    """Compare slots and links with what the items below `count` make of them.

    `view` uint8[file size]; `heads` int32[slots], all 0; `out` int64[CHAINS_SIZE]. A slot may lead over items at or
    above `count`, which are being put.
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
        slot = (load_be32(view, at + layout.ITEM_KEY_HASH) & _INT32_MAX) % slots
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
    out[USED] = used
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
    """Whether a property's value is a key of this hash; `place` is what `find_property` found."""
    at = place_at(place)
    return index_key_hash(java_hash_utf8(log, at, at + place_size(place), prefix_hash)) == key_hash


@kernel
def record_has_hash(log: Bytes, at: int, total: int, key_hash: int, uniq_key: Bytes, keys: Bytes) -> bool:
    """Whether the record at `at`, whose sizes hold, has a key of this hash: its unique id, or a word of its keys.

    `uniq_key` and `keys` uint8 are the names of these properties.
    """
    if load_be32(log, at + record.SYS_FLAG) & record.SYS_FLAG_TRANSACTION_MASK == record.SYS_FLAG_ROLLBACK:
        return False
    width = topic_length_size(log, at)
    length_at = topic_length_at(log, at)
    topic = length_at + width
    size = signed_topic_length(log, length_at, width)
    prefix_hash = 31 * java_hash_utf8(log, topic, topic + size, 0) + _SEPARATOR
    first = properties_at(log, at)
    end = properties_end(log, at, total)
    place = find_property(log, first, end, uniq_key)
    if place != ABSENT and _value_has_hash(log, place, prefix_hash, key_hash):
        return True
    place = find_property(log, first, end, keys)
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
    view: Bytes,
    slots: int,
    items: Words,
    previous_end_ms: int,
    log: Bytes,
    base: int,
    uniq_key: Bytes,
    keys: Bytes,
    faults: Bytes,
) -> None:
    """Look up the records of items that point into a segment; what is wrong with each, into `faults` uint8[n].

    `view` uint8[file size]; `items` int64[n] are item numbers; `log` uint8 is the segment, its byte 0 at `base` in the
    log; `uniq_key` and `keys` uint8 are the properties' names.
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
        if not record_has_hash(log, at, total, load_be32(view, place + layout.ITEM_KEY_HASH), uniq_key, keys):
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
    check_items(view, 1, words[:0], UNKNOWN_MS, view, 0, UNIQ_KEY_NAME, KEYS_NAME, view[:0].copy())
