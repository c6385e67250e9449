"""Index files: add entries, walk chains, rebuild slots and links, verify items.

Stores are ordered: an item, its slot (release), then the header, and the count last (release). Readers therefore find a
complete item at every slot, ignore items not yet covered by the count, and follow `previous` past them. Slots and count
can always be rebuilt from the items.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.kernels.hashing import index_key_hash, java_hash_utf8, tag_seed
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

_INT32_MAX = 2**31 - 1
_SECOND_MS = 1000

# Slots are accessed randomly in 20 MB: prefetch a slot's cache line this many entries before it is used.
AHEAD_ENTRIES: Final = 24


HEADER_FIELDS = 6


@inlined
def _items_start(slots: int) -> int:
    return layout.HEADER_SIZE + layout.SLOT_SIZE * slots


@inlined
def _slot_at(key_hash: int, slots: int) -> int:
    return layout.HEADER_SIZE + layout.SLOT_SIZE * (key_hash % slots)


@inlined
def slot_by(key_hash: int, slots: int, reciprocal: int) -> int:
    """`_slot_at` without a division, for hashes from 0 to 2³¹ − 1; `reciprocal` is 2³² // slots."""
    # The quotient is exact or one too low, since its error is at most hash / 2³² < 1/2.
    slot = key_hash - (key_hash * reciprocal >> 32) * slots
    if slot >= slots:
        slot -= slots
    return layout.HEADER_SIZE + layout.SLOT_SIZE * slot


@inlined
def _seconds(time_ms: int, begin_ms: int) -> int:
    """Time difference in seconds that RocketMQ stores in an item."""
    if begin_ms <= 0:
        return 0
    return min(max(time_ms - begin_ms, 0) // _SECOND_MS, _INT32_MAX)


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
    item_at = _items_start(slots) + layout.ITEM_SIZE * count
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
        store_be32(view, item_at + layout.ITEM_TIME_DIFFERENCE, _seconds(times[entry], begin_ms))
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
    items_at = _items_start(slots)
    capacity = (view.size - items_at) // layout.ITEM_SIZE
    file_begin_ms = load_be64(view, layout.BEGIN_TIMESTAMP)
    above = min(item + 1, capacity) if item > 0 else capacity
    if item <= 0:
        item = load_acquire_be32(view, _slot_at(key_hash, slots))
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
            prefetch_for_writing(expected, layout.SLOT_SIZE * (ahead_hash % slots))
        if offset == 0 and key_hash == 0 and item >= header_count:
            continue
        for counted in range(count, item + 1):
            slot_at = (
                _slot_at(load_be32(view, items_at + layout.ITEM_SIZE * counted + layout.ITEM_KEY_HASH), slots)
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
    items_at = _items_start(slots)
    for item in range(layout.FIRST_ITEM, count):
        at = items_at + layout.ITEM_SIZE * item
        slot_at = _slot_at(load_be32(view, at + layout.ITEM_KEY_HASH), slots) - layout.HEADER_SIZE
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


# Verification of items against the log, and of links and slots against items.


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
    return _items_start(slots) + layout.ITEM_SIZE * item


@kernel
def _time_fits(item: int, seconds: int, time_ms: int, begin_ms: int, previous_end_ms: int) -> bool:
    """Whether an item's seconds match a record stored at `time_ms`.

    The first item of a file may count from the end time of the previous file.
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
            or load_be32(view, at + layout.ITEM_KEY_HASH) != key_hash & _INT32_MAX
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
    load_header(view, np.zeros(HEADER_FIELDS, np.int64))
    put_entries(view, 1, 2, np.zeros(1, np.int32), words, words, 0, 1)
    walk_chain(view, 1, published_count(view), 0, 0, 0, 0, 1, 0, 1, words)
    roll_back(view, 1, 1)
    expected = np.zeros(layout.SLOT_SIZE, np.uint8)
    recount_items(view, 1, 0, 1, 1, expected, np.zeros(STOCK_SIZE, np.int64))
    rebuild_links(view, 1, 1, expected)
    store_slots(view, 1, expected)
    view[:] = 0
    match_entries(view, 1, 1, 1, UNKNOWN_MS, np.zeros(0, np.int32), words, words, 0, 0, words)
    first_item_at(view, 1, 1, 0)
    check_chains(view, 1, 1, np.zeros(1, np.int32), words)
    check_items(view, 1, words[:0], UNKNOWN_MS, view, 0, view[:0].copy())
