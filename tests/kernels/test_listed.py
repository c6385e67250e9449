"""Selection of records at listed positions: checked, same as plain, safe on any bytes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from mqproc.kernels import log_range
from mqproc.kernels import log_range as kernels
from mqproc.kernels.jit.compile import plain
from mqproc.kernels.record_check import BAD_BODY_CRC, BAD_OFFSET, REACHED_STOP, VERIFY_CRCS
from mqproc.spark.options import ReadSelection
from mqproc.spark.record_reader import KernelSelection
from tests.support.records import BASE, SmallLog, decode_record, kernel_bytes, mutated, small_log

MUTATIONS = 60


def listing(log: SmallLog, wanted: KernelSelection) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions, queue numbers and queue offsets of all records."""
    rows = []
    for place, size in log.places:
        record = decode_record(log.segment[place : place + size], check_crc=False)
        rows.append((BASE + place, wanted.queue_number((record.topic, record.queue_id)), record.queue_offset))
    columns = np.array(rows, np.int64).T
    return tuple(np.ascontiguousarray(column) for column in columns)  # type: ignore[return-value]


def select(log: SmallLog, selection: ReadSelection, kernel: Any, data: bytes | None = None, **changed: Any) -> Any:
    """(reason, index at the stop, positions); errors are skipped."""
    wanted = KernelSelection(selection, {})
    places, numbers, offsets = listing(log, wanted)
    offsets = offsets + changed.get("offsets", 0)
    view = kernel_bytes(data or log.segment)
    state = np.zeros(log_range.STATE_SIZE, np.int64)
    state[log_range.BASE], state[log_range.LIMIT], state[log_range.BYTES_MAX] = BASE, len(log.segment), 500
    state[log_range.BEGIN_MS], state[log_range.END_MS] = selection.begin_ms, selection.end_ms
    state[log_range.VERIFY] = VERIFY_CRCS
    positions = np.zeros(5, np.int64)
    found: list[int] = []
    wrong: list[tuple[int, int]] = []
    while True:
        table = wanted.table
        reason = int(
            kernel(
                view, places, numbers, offsets, table.bytes_view, table.cells, table.slots, wanted.tags,
                wanted.tag_ends, wanted.keys, wanted.key_ends, positions, state,
            )
        )  # fmt: skip
        found += positions[: state[log_range.FOUND]].tolist()
        if reason == REACHED_STOP:
            return found, wrong
        if reason != log_range.FULL:
            wrong.append((int(state[log_range.AT]), reason))
            state[log_range.AT] += 1


KERNELS = (kernels.select_by_unit, plain(kernels.select_by_unit))


def test_select_returns_wanted_records() -> None:
    log = small_log()
    places = [place for place, _size in log.places]
    numbers = range(len(places))
    for selection, wanted in (
        (ReadSelection(), [*numbers]),
        (ReadSelection(begin_ms=2_000_004, end_ms=2_000_010), [n for n in numbers if 4 <= n < 10]),
        (ReadSelection(tags=("Tag2",)), [n for n in numbers if n % 3 and n % 4 == 2 and n % 7 != 6]),
    ):
        for kernel in KERNELS:
            found, wrong = select(log, selection, kernel)
            assert wrong == []
            if selection.tags:
                assert set(found) <= {place for place, n in zip(places, numbers, strict=True) if n % 4 == 2}
            else:
                assert found == [places[number] for number in wanted]


def test_select_reports_other_records() -> None:
    log = small_log(count=6)
    for kernel in KERNELS:
        found, wrong = select(log, ReadSelection(), kernel, offsets=1)
        assert found == []
        assert wrong == [(index, kernels.OTHER_PLACE) for index in range(6)]
        data = bytearray(log.segment)
        data[log.places[2][0] + 28 + 7] ^= 1
        found, wrong = select(log, ReadSelection(), kernel, bytes(data))
        assert wrong == [(2, BAD_OFFSET)]
        assert len(found) == 5
    assert BAD_BODY_CRC != kernels.OTHER_PLACE


def test_select_any_bytes_compiled_and_plain_agree() -> None:
    log = small_log(count=6)
    chance = random.Random(3)
    for _ in range(MUTATIONS):
        data = mutated(log.segment, chance)
        if len(data) == len(log.segment):
            compiled, uncompiled = (select(log, ReadSelection(), kernel, data) for kernel in KERNELS)
            assert compiled == uncompiled
