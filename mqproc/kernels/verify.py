"""Compare queues with the log by fingerprints, without holding either in memory.

    add_runs     adds the units that dispatch would make from a part of the log
    add_units    adds the units stored in a ConsumeQueue file

Each unit's queue offset, physical offset, size and tags code are mixed into one 64-bit value. A total keeps the count
and the exclusive or of these values, which are equal for equal sets of units, in whatever order and by however many
processes they are added.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from mqproc.kernels.dispatch import RUN_BYTE_OFFSET, RUN_COLUMNS, RUN_COUNT, RUN_FIRST_OFFSET, RUN_QUEUE, Runs
from mqproc.kernels.jit.compile import inlined, kernel
from mqproc.kernels.jit.intrinsics import load_be32, load_be64
from mqproc.kernels.jit.lowering import Bytes, Words, lowering
from mqproc.layout import consume_queue as layout

# Columns of a total, int64[TOTAL_COLUMNS]; all are 0 if the count is.
(
    COUNT,
    FINGERPRINT,
    FIRST_OFFSET,  # queue offsets of the first and the last unit added
    LAST_OFFSET,
    FIRST_PHYSICAL,  # physical offsets of their records
    LAST_PHYSICAL,
) = range(6)
TOTAL_COLUMNS = 6

# Columns of a gap in a queue's offsets, int64[GAP_COLUMNS].
(
    GAP_QUEUE,
    GAP_EXPECTED,
    GAP_FOUND,
    GAP_PREVIOUS,  # position of the record before the gap
    GAP_PHYSICAL,  # position of the record after it
) = range(5)
GAP_COLUMNS = 5

# Results and state of add_units, int64[UNITS_SIZE]. Offsets are queue offsets, −1 = none.
(
    NEXT_OFFSET,  # of the first unit of the next call
    LAST_LIVE,  # last unit that is not zeros
    INNER_ZEROS,  # zero units before LAST_LIVE
    FIRST_INNER_ZERO,
    PENDING_ZEROS,  # zero units after it
    FIRST_PENDING_ZERO,
    FILLERS,
    PHYSICAL_END,  # end of the last record that a unit points to
) = range(8)
UNITS_SIZE = 8

_MASK_64 = (1 << 64) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15
_SEED = 0x243F6A8885A308D3 >> 1


def mix64(value: int, word: int) -> int:
    """Mix a word into a 64-bit value: a bijection in either argument."""
    product = ((value ^ word) & _MASK_64) * _MULTIPLIER & _MASK_64
    product ^= product >> 32
    return product - (1 << 64) if product >> 63 else product


@lowering(mix64)
def _(builder: Any, value: Any, word: Any) -> Any:
    int64 = ir.IntType(64)
    product = builder.mul(builder.xor(value, word), ir.Constant(int64, _MULTIPLIER))
    return builder.xor(product, builder.lshr(product, ir.Constant(int64, 32)))


@inlined
def _unit_value(queue_offset: int, physical_offset: int, size: int, tags_code: int) -> int:
    """Fingerprint of a unit."""
    return mix64(mix64(mix64(mix64(_SEED, physical_offset), tags_code), size), queue_offset)


@inlined
def _add(totals: Words, column: int, value: int, queue_offset: int, physical_offset: int) -> None:
    if totals[column + COUNT] == 0:
        totals[column + FIRST_OFFSET] = queue_offset
        totals[column + FIRST_PHYSICAL] = physical_offset
    totals[column + COUNT] += 1
    totals[column + FINGERPRINT] ^= value
    totals[column + LAST_OFFSET] = queue_offset
    totals[column + LAST_PHYSICAL] = physical_offset


@kernel
def add_runs(units: Bytes, runs: Runs, totals: Words, gaps: Words) -> int:
    """Add the units of a dispatch scan to the totals of their queues.

    Returns the number of gaps found. `units` uint8 and `runs` int64[n, RUN_COLUMNS] are results of the scan; `totals`
    int64[queues × TOTAL_COLUMNS]; `gaps` int64[≥ n × GAP_COLUMNS].
    """
    found = 0
    for run in range(len(runs)):
        number = runs[run, RUN_QUEUE]
        column = number * TOTAL_COLUMNS
        first = runs[run, RUN_FIRST_OFFSET]
        at = int(runs[run, RUN_BYTE_OFFSET])
        if totals[column + COUNT] != 0 and first != totals[column + LAST_OFFSET] + 1:
            row = found * GAP_COLUMNS
            gaps[row + GAP_QUEUE] = number
            gaps[row + GAP_EXPECTED] = totals[column + LAST_OFFSET] + 1
            gaps[row + GAP_FOUND] = first
            gaps[row + GAP_PREVIOUS] = totals[column + LAST_PHYSICAL]
            gaps[row + GAP_PHYSICAL] = load_be64(units, at + layout.PHYSICAL_OFFSET)
            found += 1
        for queue_offset in range(first, first + runs[run, RUN_COUNT]):
            physical_offset = load_be64(units, at + layout.PHYSICAL_OFFSET)
            size = load_be32(units, at + layout.SIZE)
            tags_code = load_be64(units, at + layout.TAGS_CODE)
            value = _unit_value(queue_offset, physical_offset, size, tags_code)
            _add(totals, column, value, queue_offset, physical_offset)
            at += layout.UNIT_SIZE
    return found


@inlined
def bucket_of(borders: Words, physical_offset: int) -> int:
    """Index of the range [borders[b], borders[b + 1]) that contains an offset.

    The number of ranges if the offset is below all of them, one more if it is above. `borders` int64[≥ 1], ascending.
    """
    ranges = borders.size - 1
    if physical_offset < borders[0]:
        return ranges
    if physical_offset >= borders[ranges]:
        return ranges + 1
    low = 0
    high = ranges
    while high - low > 1:
        middle = (low + high) >> 1
        if physical_offset >= borders[middle]:
            low = middle
        else:
            high = middle
    return low


@kernel
def add_units(units: Bytes, count: int, borders: Words, totals: Words, state: Words) -> None:
    """Add `count` units of a queue to the totals of the ranges that they point into.

    `units` uint8[≥ 20 × count] begin at queue offset state[NEXT_OFFSET]; `borders` int64[ranges + 1]; `totals`
    int64[(ranges + 3) × TOTAL_COLUMNS]: the ranges, below, above, and invalid units. Fillers and zeros are in no total.
    `state` int64[UNITS_SIZE] continues from call to call.
    """
    ranges = borders.size - 1
    queue_offset = int(state[NEXT_OFFSET])
    low = 0
    high = -1
    bucket = 0
    at = 0
    for _unit in range(count):
        physical_offset = load_be64(units, at + layout.PHYSICAL_OFFSET)
        size = load_be32(units, at + layout.SIZE)
        tags_code = load_be64(units, at + layout.TAGS_CODE)
        if physical_offset == 0 and size == 0 and tags_code == 0:
            if state[PENDING_ZEROS] == 0:
                state[FIRST_PENDING_ZERO] = queue_offset
            state[PENDING_ZEROS] += 1
        else:
            if state[PENDING_ZEROS] != 0:
                if state[INNER_ZEROS] == 0:
                    state[FIRST_INNER_ZERO] = state[FIRST_PENDING_ZERO]
                state[INNER_ZEROS] += state[PENDING_ZEROS]
                state[PENDING_ZEROS] = 0
            state[LAST_LIVE] = queue_offset
            if size == layout.FILLER_SIZE:
                state[FILLERS] += 1
            else:
                if size <= 0 or physical_offset < 0:
                    bucket = ranges + 2
                    high = -1
                elif physical_offset < low or physical_offset >= high:
                    bucket = bucket_of(borders, physical_offset)
                    high = -1
                    if bucket < ranges:
                        low = int(borders[bucket])
                        high = int(borders[bucket + 1])
                if bucket < ranges:
                    state[PHYSICAL_END] = max(int(state[PHYSICAL_END]), physical_offset + size)
                value = _unit_value(queue_offset, physical_offset, size, tags_code)
                _add(totals, bucket * TOTAL_COLUMNS, value, queue_offset, physical_offset)
        queue_offset += 1
        at += layout.UNIT_SIZE
    state[NEXT_OFFSET] = queue_offset


def warm() -> None:
    """Compile or load these kernels."""
    nothing = np.zeros(0, np.uint8)
    words: NDArray[np.int64] = np.zeros(8 * TOTAL_COLUMNS, np.int64)
    add_runs(nothing, np.zeros((0, RUN_COLUMNS), np.int64), words, words)
    add_units(nothing, 0, words[:2], words, np.zeros(UNITS_SIZE, np.int64))
