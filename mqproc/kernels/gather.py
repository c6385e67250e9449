"""Answer a pull: copy records from a mapped segment by their ConsumeQueue units.

    gather(units, view, codes, tags, tag_ends, program, texts, scratch, out, state)
                                                     stops at a limit, an invalid record, or another segment
    gather_sql.gather(…)                             the same with a property filter
    match_units(units, first, stop, codes, matches)  applies the tag filter alone

Each unit passes these checks in order: filler, limits, tag hash, segment, record, tag, time and properties; then its
record is copied. A unit that stops the loop is not consumed and is the first of the next pull. Records are returned
only if magic, size, own offset and CRCs are valid. Delivered messages are counted here, in the control file and the
queue table. The state holds the addresses of these, since another call or two more arrays would cost more than the
counting.
"""

from __future__ import annotations

import numpy as np

from mqproc.kernels.crc import MASK_32
from mqproc.kernels.jit.compile import inlined, kernel
from mqproc.kernels.jit.intrinsics import add_at, copy_bytes, load_be32, load_be64
from mqproc.kernels.jit.lowering import Bytes, Words
from mqproc.kernels.record_check import BAD_SIZE, checked_size, prefetch_bytes, store_timestamp_at
from mqproc.kernels.record_fields import (
    PLACES_SIZE,
    TAG_AT,
    TAG_SIZE,
    find_tags_and_keys,
    is_one_of,
    properties_at,
    properties_end,
)
from mqproc.kernels.sql import FAILS, PASSES
from mqproc.kernels.sql import UNDECIDED as LEFT_TO_PYTHON
from mqproc.layout import consume_queue, control, queue_table, record

# Indices into the state, int64[STATE_SIZE].
(
    UNIT,  # index of the next unit; advanced
    UNIT_STOP,
    BASE,  # physical offset of the view's byte 0
    LOG_STOP,  # records end at or below this physical offset
    SKIP_BELOW,  # units that point below this physical offset are skipped: their segment is deleted
    VERIFY,  # sum of record_check's VERIFY_…
    COPY,  # 0 = only count
    COUNT_LIMIT,
    BYTES_LIMIT,  # of records; the first record may exceed it
    BORN_BEGIN_MS,  # BORN_BEGIN_MS ≤ born time < BORN_END_MS
    BORN_END_MS,
    STORE_BEGIN_MS,  # the same for the store time
    STORE_END_MS,
    QUEUE,  # number in the queue table, possibly with its generation; used only for counting
    COUNTS,  # address of the control file, 0 = do not count
    TABLE,  # address of the queue table, if counting
    # advanced
    OUT_AT,
    COUNT,
    BYTES,
    LAST_FILTERED,  # 1 if the last consumed unit did not match
    SCAN_BUDGET,  # remaining cost of records that do not match: their bytes, plus RECORD_SCAN_COST each
    # decision for one unit
    DECIDED_UNIT,  # 1 + the unit whose properties Python has evaluated
    DECIDED,  # result: 0 or 1
    # results
    DAMAGE,  # record_check's reason for DAMAGED
    PLACES,  # positions of the current record's tag and keys
) = range(25)
STATE_SIZE = PLACES + PLACES_SIZE

# Why a gather stopped; the unit at UNIT is not consumed.
(
    UNITS_DONE,
    COUNT_REACHED,
    BYTES_REACHED,
    OTHER_SEGMENT,  # the record begins outside the view
    DAMAGED,
    FILLER,
    OUT_FULL,  # the record needs a larger buffer
    BUDGET_SPENT,
    UNDECIDED,  # Python has to evaluate the record's properties: kernels/sql.py
) = range(9)

RECORD_SCAN_COST = 1024
"""Cost of examining a record in addition to its bytes."""

# The records of a queue are scattered in the log, so hardware prefetching does not help: prefetch this many bytes of
# the record this many units ahead. (Measured: a third to a half less time per record; 512 instead of 256 bytes saves a
# third for records with a body of 128. A fixed number of lines is faster than one that depends on the record's size.)
AHEAD_UNITS = 8
_AHEAD_BYTES = 512

# No bounds. Born times before 1970 and beyond the calendar are valid, also beyond these.
TIME_MIN = -(1 << 62)
TIME_MAX = 1 << 62

_LOW_CODE = consume_queue.TAGS_CODE + 4


@inlined
def _prefetch_record(units: Bytes, unit: int, unit_stop: int, view: Bytes, base: int) -> None:
    """Prefetch the first lines of the record that a unit points to if it lies in the view."""
    if unit >= unit_stop:
        return
    physical = load_be64(units, consume_queue.UNIT_SIZE * unit)
    prefetch_bytes(view, physical - base, _AHEAD_BYTES)


@inlined
def _has_code(codes: Words, code: int) -> bool:
    """Whether a tag hash (i32) is one of `codes`; an empty `codes` matches all."""
    if codes.size == 0:
        return True
    found = False
    for i in range(codes.size):
        found |= codes[i] == code
    return found


@inlined
def _may_pass(units: Bytes, at: int, codes: Words) -> bool:
    """Whether a unit's tags code allows that its record has one of the tags.

    The code may be an address of a ConsumeQueue extension instead of a hash; such units pass, as in RocketMQ without
    the extension.
    """
    # Evaluate both conditions: a branch on the first is unpredictable.
    by_hash = _has_code(codes, load_be32(units, at + _LOW_CODE))
    return by_hash | (load_be64(units, at + consume_queue.TAGS_CODE) <= consume_queue.EXTENSION_ADDRESS_MAX)


@kernel
def _has_tag(view: Bytes, at: int, total: int, tags: Bytes, tag_ends: Words, state: Words) -> bool:
    """Whether the tag of the record at `at` equals one of `tags`; an empty list matches all."""
    if tag_ends.size == 0:
        return True
    find_tags_and_keys(view, properties_at(view, at), properties_end(view, at, total), state, PLACES)
    return is_one_of(view, int(state[PLACES + TAG_AT]), int(state[PLACES + TAG_SIZE]), tags, tag_ends)


@inlined
def _is_within(time_ms: int, begin_ms: int, end_ms: int) -> bool:
    return (time_ms >= begin_ms or begin_ms <= TIME_MIN) and (time_ms < end_ms or end_ms >= TIME_MAX)


@inlined
def _in_time(view: Bytes, at: int, state: Words) -> bool:
    born = load_be64(view, at + record.BORN_TIMESTAMP)
    if not _is_within(born, int(state[BORN_BEGIN_MS]), int(state[BORN_END_MS])):
        return False
    stored = load_be64(view, store_timestamp_at(view, at))
    return _is_within(stored, int(state[STORE_BEGIN_MS]), int(state[STORE_END_MS]))


@inlined
def passes_properties(
    view: Bytes, at: int, total: int, unit: int, program: Words, texts: Bytes, scratch: Words, state: Words
) -> int:
    """PASSES, as there is no property filter; `gather_sql` has another function here."""
    return PASSES


@kernel
def _count(state: Words, messages: int, size: int, pulls: int) -> None:
    """Add delivered messages, their bytes and pulls to the counters."""
    counts = int(state[COUNTS])
    add_at(counts, control.PULLED_MESSAGES, messages)
    add_at(counts, control.PULLED_BYTES, size)
    add_at(counts, control.PULLS, pulls)
    add_at(counts, control.QUERY_REQUESTS, pulls)
    number = int(state[QUEUE]) & MASK_32
    delivered = queue_table.HEADER_WORDS + number * queue_table.ENTRY_WORDS + queue_table.DELIVERED
    add_at(int(state[TABLE]), delivered, messages)


@kernel
def uncount(state: Words) -> None:
    """Subtract the counts of a gather whose records are not delivered."""
    if state[COUNTS] != 0 and state[COUNT] != 0:
        _count(state, -int(state[COUNT]), -int(state[BYTES]), -1)


@kernel
def gather(
    units: Bytes,
    view: Bytes,
    codes: Words,
    tags: Bytes,
    tag_ends: Words,
    program: Words,
    texts: Bytes,
    scratch: Words,
    out: Bytes,
    state: Words,
) -> int:
    """Copy the records of units[UNIT:UNIT_STOP] into `out` from OUT_AT on.

    Returns the reason for the stop. `units` uint8[20 × n]; `view` uint8 is the segment at BASE; `codes` int64[k] are
    the accepted tag hashes (i32 values, empty = all); `tags` uint8 and `tag_ends` int64[m] are the accepted tags and
    their ends in `tags` (empty = compare hashes only); `program` int64, `texts` uint8 and `scratch` int64 are the
    property filter of `gather_sql` (kernels/sql.py), not used here; `out` uint8. Advances UNIT, OUT_AT, COUNT, BYTES,
    LAST_FILTERED and SCAN_BUDGET in `state`. Updates the counters at COUNTS and TABLE, whose memory the caller keeps
    alive.
    """
    unit = int(state[UNIT])
    unit_stop = int(state[UNIT_STOP])
    base = int(state[BASE])
    limit = min(view.size, int(state[LOG_STOP]) - base)
    timed = (
        state[BORN_BEGIN_MS] > TIME_MIN
        or state[BORN_END_MS] < TIME_MAX
        or state[STORE_BEGIN_MS] > TIME_MIN
        or state[STORE_END_MS] < TIME_MAX
    )
    gathered = int(state[COUNT])
    gathered_bytes = int(state[BYTES])
    reason = UNITS_DONE
    while unit < unit_stop:
        unit_at = consume_queue.UNIT_SIZE * unit
        physical = load_be64(units, unit_at)
        size = load_be32(units, unit_at + consume_queue.SIZE)
        if size == consume_queue.FILLER_SIZE:
            reason = FILLER
            break
        if state[COUNT] >= state[COUNT_LIMIT]:
            reason = COUNT_REACHED
            break
        if state[COUNT] > 0 and state[BYTES] + size > state[BYTES_LIMIT]:
            reason = BYTES_REACHED
            break
        if physical < state[SKIP_BELOW] or not _may_pass(units, unit_at, codes):
            state[LAST_FILTERED] = 1 if physical >= state[SKIP_BELOW] else state[LAST_FILTERED]
            unit += 1
            continue
        _prefetch_record(units, unit + AHEAD_UNITS, unit_stop, view, base)
        at = physical - base
        if at < 0 or at >= view.size:
            reason = OTHER_SEGMENT
            break
        total = checked_size(view, at, limit, physical, int(state[VERIFY]))
        if total != size:
            state[DAMAGE] = -total if total < 0 else BAD_SIZE
            reason = DAMAGED
            break
        passes = FAILS
        if _has_tag(view, at, total, tags, tag_ends, state) and (not timed or _in_time(view, at, state)):
            passes = passes_properties(view, at, total, unit, program, texts, scratch, state)
        if passes == LEFT_TO_PYTHON:
            reason = UNDECIDED
            break
        if passes == FAILS:
            state[LAST_FILTERED] = 1
            state[SCAN_BUDGET] -= total + RECORD_SCAN_COST
            unit += 1
            if state[SCAN_BUDGET] <= 0:
                reason = BUDGET_SPENT
                break
            continue
        if state[COPY] != 0:
            out_at = int(state[OUT_AT])
            if out_at + total > out.size:
                reason = OUT_FULL
                break
            copy_bytes(out, out_at, view, at, total)
            state[OUT_AT] = out_at + total
        state[COUNT] += 1
        state[BYTES] += total
        state[LAST_FILTERED] = 0
        unit += 1
    state[UNIT] = unit
    if state[COUNTS] != 0 and state[COUNT] > gathered and state[COPY] != 0:
        _count(state, int(state[COUNT]) - gathered, int(state[BYTES]) - gathered_bytes, int(gathered == 0))
    return reason


@kernel
def match_units(units: Bytes, first: int, stop: int, codes: Words, matches: Words) -> int:
    """Find the units in [first, stop) that may have one of the tags; returns their number.

    `units` uint8[20 × n], `codes` int64[k] not empty, `matches` int64[≥ stop − first]. Fillers never match.
    """
    found = 0
    if codes.size == 1:
        # Branch-free, since the outcome is unpredictable.
        only = codes[0]
        for unit in range(first, stop):
            at = consume_queue.UNIT_SIZE * unit
            matches[found] = unit
            filler = load_be32(units, at + consume_queue.SIZE) == consume_queue.FILLER_SIZE
            found += (
                int(load_be32(units, at + _LOW_CODE) == only)
                | int(load_be64(units, at + consume_queue.TAGS_CODE) <= consume_queue.EXTENSION_ADDRESS_MAX)
            ) & int(not filler)
        return found
    for unit in range(first, stop):
        at = consume_queue.UNIT_SIZE * unit
        matches[found] = unit
        filler = load_be32(units, at + consume_queue.SIZE) == consume_queue.FILLER_SIZE
        found += int(_may_pass(units, at, codes)) & int(not filler)
    return found


@kernel
def first_at_or_above(units: Bytes, first: int, stop: int, physical_offset: int) -> int:
    """First unit in [first, stop) at or above a physical offset, `stop` without one."""
    for unit in range(first, stop):
        if load_be64(units, consume_queue.UNIT_SIZE * unit) >= physical_offset:
            return unit
    return stop


@kernel
def sum_of_sizes(units: Bytes, first: int, stop: int) -> int:
    """Sum of the record sizes in units [first, stop), without fillers."""
    total = 0
    for unit in range(first, stop):
        size = load_be32(units, consume_queue.UNIT_SIZE * unit + consume_queue.SIZE)
        if 0 < size < consume_queue.FILLER_SIZE:
            total += size
    return total


def warm() -> None:
    """Compile or load these kernels."""
    empty = np.zeros(0, np.uint8)
    sum_of_sizes(empty, 0, 0)
    words = np.zeros(0, np.int64)
    state = np.zeros(STATE_SIZE, np.int64)
    gather(empty, empty, words, empty, words, words, empty, words, empty, state)
    uncount(state)
    match_units(empty, 0, 0, words, words)
    first_at_or_above(empty, 0, 0, 0)
