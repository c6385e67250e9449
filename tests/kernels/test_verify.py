"""Sums of units in log and files are equal only for equal units; compiled and plain agree."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mqproc.kernels import verify
from mqproc.kernels.dispatch import RUN_COLUMNS
from mqproc.kernels.jit.compile import plain
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.layout.consume_queue import FILLER_SIZE, UNIT_SIZE
from mqproc.store.consumequeue.bounds import UNIT_DTYPE

Unit = tuple[int, int, int]
BORDERS = np.array([100, 200, 500, 1000], np.int64)
BELOW, ABOVE, NO_UNIT = 3, 4, 5


def unit_bytes(units: list[Unit]) -> NDArray[np.uint8]:
    return as_kernel_array(bytearray(np.array(units, UNIT_DTYPE).tobytes()))


def summed_units(units: list[Unit], first: int = 0) -> tuple[list[list[int]], list[int]]:
    """(totals by range, state); the plain twin must return the same."""
    found = []
    for kernel in (verify.add_units, plain(verify.add_units)):
        totals = np.zeros((len(BORDERS) + 2) * verify.TOTAL_COLUMNS, np.int64)
        state = np.zeros(verify.UNITS_SIZE, np.int64)
        state[verify.NEXT_OFFSET] = first
        kernel(unit_bytes(units), len(units), BORDERS, totals, state)
        found.append((totals.reshape(-1, verify.TOTAL_COLUMNS).tolist(), state.tolist()))
    assert found[0] == found[1]
    return found[0]


def summed_runs(units: list[Unit], runs: list[tuple[int, int, int]]) -> tuple[list[list[int]], list]:
    """(totals by queue, gaps) of runs (queue, first offset, count) consecutive in `units`."""
    rows = np.zeros((len(runs), RUN_COLUMNS), np.int64)
    at = 0
    for row, (number, first, count) in zip(rows, runs, strict=True):
        row[:4] = number, first, count, at
        at += count * UNIT_SIZE
    found = []
    for kernel in (verify.add_runs, plain(verify.add_runs)):
        totals = np.zeros(4 * verify.TOTAL_COLUMNS, np.int64)
        gaps = np.zeros(len(runs) * verify.GAP_COLUMNS + 1, np.int64)
        count = kernel(unit_bytes(units), rows, totals, gaps)
        found.append(
            (
                totals.reshape(-1, verify.TOTAL_COLUMNS).tolist(),
                gaps[: count * verify.GAP_COLUMNS].reshape(-1, verify.GAP_COLUMNS).tolist(),
            )
        )
    assert found[0] == found[1]
    return found[0]


UNITS: list[Unit] = [(100 + 7 * number, 91 + number, number * 1_000_003 - 5) for number in range(14)]


def test_sums_of_log_and_files_are_equal() -> None:
    of_files, state = summed_units(UNITS, 40)
    of_log, gaps = summed_runs(UNITS, [(2, 40, 9), (2, 49, 5)])
    assert gaps == []
    assert of_log[2] == of_files[0]
    assert of_log[2][verify.COUNT] == 14
    assert (of_log[2][verify.FIRST_OFFSET], of_log[2][verify.LAST_OFFSET]) == (40, 53)
    assert (of_log[2][verify.FIRST_PHYSICAL], of_log[2][verify.LAST_PHYSICAL]) == (100, 191)
    assert (state[verify.NEXT_OFFSET], state[verify.LAST_LIVE]) == (54, 53)
    assert state[verify.PHYSICAL_END] == UNITS[-1][0] + UNITS[-1][1]


def test_sums_are_independent_of_order_and_parts() -> None:
    whole = summed_units(UNITS)[0][0]
    parts = [summed_units(UNITS[start : start + 5], start)[0][0] for start in (0, 5, 10)]
    assert sum(part[verify.COUNT] for part in parts) == whole[verify.COUNT]
    combined = 0
    for part in parts:
        combined ^= part[verify.FINGERPRINT]
    assert combined == whole[verify.FINGERPRINT]


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 13), st.integers(0, UNIT_SIZE - 1), st.integers(0, 7))
def test_sums_differ_for_any_flipped_bit(number: int, byte: int, bit: int) -> None:
    data = np.array(UNITS, UNIT_DTYPE).view(np.uint8).copy()
    data[number * UNIT_SIZE + byte] ^= 1 << bit
    changed = [tuple(int(value) for value in unit) for unit in data.view(UNIT_DTYPE)]
    assert summed_units(changed)[0] != summed_units(UNITS)[0]


def test_sums_differ_for_units_in_other_places() -> None:
    swapped = [UNITS[1], UNITS[0], *UNITS[2:]]
    assert summed_units(swapped)[0][0][verify.FINGERPRINT] != summed_units(UNITS)[0][0][verify.FINGERPRINT]
    assert summed_units(UNITS, 1)[0][0][verify.FINGERPRINT] != summed_units(UNITS)[0][0][verify.FINGERPRINT]


def test_sums_with_ranges_zeros_fillers_and_invalid_units() -> None:
    units = [
        (99, 1, 0), (100, 1, 0), (199, 1, 0), (200, 1, 0), (0, 0, 0), (999, 1, 0), (1000, 1, 0), (7, FILLER_SIZE, 0),
        (0, 0, 0), (0, 0, 0), (-1, 5, 0), (150, 0, 3), (0, 0, 0),
    ]  # fmt: skip
    totals, state = summed_units(units, 10)
    assert [row[verify.COUNT] for row in totals] == [2, 1, 1, 1, 1, 2]
    assert totals[BELOW][verify.FIRST_PHYSICAL] == 99
    assert totals[ABOVE][verify.FIRST_PHYSICAL] == 1000
    assert totals[NO_UNIT][verify.LAST_OFFSET] == 21
    assert state[verify.FILLERS] == 1
    assert (state[verify.INNER_ZEROS], state[verify.FIRST_INNER_ZERO]) == (3, 14)
    assert (state[verify.PENDING_ZEROS], state[verify.FIRST_PENDING_ZERO]) == (1, 22)
    assert (state[verify.LAST_LIVE], state[verify.PHYSICAL_END]) == (21, 1000)


def test_sums_of_random_units_compiled_and_plain_agree() -> None:
    rng = random.Random(3)
    for _ in range(30):
        units = [
            (rng.randrange(-5, 1100), rng.choice((0, 1, 400, FILLER_SIZE)), rng.randrange(-(1 << 63), 1 << 63))
            for _unit in range(rng.randrange(40))
        ]
        summed_units(units, rng.randrange(1 << 40))


def test_sums_report_positions_of_gaps_and_repeats() -> None:
    _totals, gaps = summed_runs(UNITS, [(1, 5, 3), (3, 0, 2), (1, 9, 4), (1, 12, 5)])
    assert gaps == [[1, 8, 9, 100 + 7 * 2, 100 + 7 * 5], [1, 13, 12, 100 + 7 * 8, 100 + 7 * 9]]


@pytest.mark.parametrize(("offset", "bucket"), [(99, 3), (100, 0), (199, 0), (200, 1), (999, 2), (1000, 4)])
def test_bucket_of_offset(offset: int, bucket: int) -> None:
    assert verify.bucket_of(BORDERS, offset) == plain(verify.bucket_of)(BORDERS, offset) == bucket


def test_bucket_of_single_border() -> None:
    borders = np.zeros(1, np.int64)
    assert (verify.bucket_of(borders, -1), verify.bucket_of(borders, 0)) == (0, 1)


def test_each_kernel_is_compiled_once() -> None:
    verify.warm()
    test_sums_of_log_and_files_are_equal()
    for kernel in (verify.add_runs, verify.add_units):
        assert len(getattr(kernel, "signatures", [0])) == 1
