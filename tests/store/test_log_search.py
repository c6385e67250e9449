"""Looking for a record in ranges of a segment, most of which may be zeros."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest

from mqproc.kernels import scan
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.store.commitlog.segments import find_record_in
from tests.records import BASE, small_log

_SEGMENT = 1 << 16
_RANGE = 4096


def _segment_with_record_at(at: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Zeros, and one record at byte `at`, whose own place is there."""
    log = small_log(1, base=BASE + at)
    place, size = log.places[0]
    assert place == 0
    view = np.zeros(_SEGMENT, np.uint8)
    view[at : at + size] = np.frombuffer(log.segment[:size], np.uint8)
    return as_kernel_array(view)


@pytest.mark.parametrize("at", [0, 1, *range(3 * _RANGE - 8, 3 * _RANGE + 9), _SEGMENT - 2000])
def test_a_record_is_found_wherever_it_begins_among_zeros(at: int) -> None:
    out = np.zeros(scan.SCAN_SIZE, np.int64)
    view = _segment_with_record_at(at)
    ranges = [(start, start + _RANGE) for start in range(0, _SEGMENT, _RANGE)]
    assert find_record_in(ranges, view, BASE, out) == scan.find_record(view, 0, _SEGMENT, BASE, out) == at


def test_in_a_range_of_nothing_is_nothing() -> None:
    out = np.zeros(scan.SCAN_SIZE, np.int64)
    view = _segment_with_record_at(0)
    assert find_record_in([(5, 5), (_SEGMENT, _SEGMENT)], view, BASE, out) == -1


def test_zeros_are_not_looked_at_byte_by_byte() -> None:
    out = np.zeros(scan.SCAN_SIZE, np.int64)
    view = as_kernel_array(np.zeros(_SEGMENT, np.uint8))
    looked = 0

    def find(view: Any, start: int, stop: int, base: int, out: Any) -> int:
        nonlocal looked
        looked += stop - start
        return -1

    with mock.patch.object(scan, "find_record", find):
        assert find_record_in([(0, _SEGMENT // 2), (_SEGMENT // 2, _SEGMENT)], view, BASE, out) == -1
    assert looked < 16
