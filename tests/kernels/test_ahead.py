"""Prefetch hints: they do not change the results of a walk and accept any address."""

from __future__ import annotations

import random

import numpy as np
import pytest

from mqproc.kernels import record_check, record_decode, scan
from mqproc.kernels.jit import intrinsics
from mqproc.kernels.jit.compile import COMPILED, kernel, plain
from mqproc.kernels.jit.lowering import Bytes
from tests.support.records import BASE, columns_of, encode_record, kernel_bytes

FAR = 1 << 45


@kernel
def hint(buf: Bytes, at: int) -> int:
    intrinsics.prefetch(buf, at)
    intrinsics.prefetch_for_writing(buf, at)
    record_check.prefetch_bytes(buf, at, 256)
    return at


@pytest.mark.skipif(not COMPILED, reason="a plain hint does nothing")
@pytest.mark.parametrize("at", [0, 99, 100, 1 << 20, -1, -4096, FAR, -FAR])
def test_hint_at_any_address_changes_nothing(at: int) -> None:
    data = random.Random(1).randbytes(100)
    buf = kernel_bytes(data)
    assert hint(buf, at) == at
    assert buf.tobytes() == data


def records_of(sizes: list[int]) -> bytes:
    """Records with bodies of these sizes."""
    data = b""
    for number, size in enumerate(sizes):
        data += encode_record(
            topic="Orders",
            body=bytes([number]) * size,
            properties=f"TAGS\x01Tag{number % 4}\x02KEYS\x01k{number:04}\x02",
            queue_id=0,
            queue_offset=number,
            physical_offset=BASE + len(data),
            store_timestamp_ms=number,
        )
    return data


@pytest.mark.parametrize("count", [1, 2, 5, 9, 40])
@pytest.mark.parametrize("sizes", [(1000,), (400, 1000), (1000, 1000, 5000), (380, 390), (70_000,)])
def test_walks_with_hints_find_records_of_any_size(count: int, sizes: tuple[int, ...]) -> None:
    data = records_of([sizes[number % len(sizes)] for number in range(count)])
    view = kernel_bytes(data)
    starts = []
    for walk in (scan.scan_records, plain(scan.scan_records)):
        out = np.zeros(scan.SCAN_SIZE, np.int64)
        assert walk(view, 0, len(view), BASE, record_check.VERIFY_ALL, out) == record_check.REACHED_STOP
        assert (out[scan.COUNT], out[scan.STOPPED_AT]) == (count, len(data))
        starts.append(int(out[scan.LAST_START]))
    assert starts[0] == starts[1]
    columns = columns_of(data, count, record_decode.ALL_COLUMNS)
    positions = np.asarray(columns["physical_offset"]) - BASE
    places = record_decode.places_at(view, positions, record_decode.rows_of(record_decode.ALL_COLUMNS))
    for name in record_decode.ALL_COLUMNS:
        found, wanted = record_decode.copy_column(view, places, count, name), columns[name]
        assert [np.asarray(each).tolist() for each in found] == [np.asarray(each).tolist() for each in wanted]
        alone = record_decode.copy_column(
            view, record_decode.places_at(view, positions, record_decode.rows_of([name])), count, name
        )
        assert [np.asarray(each).tolist() for each in alone] == [np.asarray(each).tolist() for each in wanted]
