"""Range boundaries and record selection: correct from any position, safe on any bytes."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from mqproc.kernels import log_range
from mqproc.kernels.jit.compile import plain
from mqproc.kernels.jit.intrinsics import load_be64
from mqproc.kernels.record_check import BLANK, REACHED_STOP, VERIFY_CRCS
from mqproc.layout import record
from mqproc.spark.options import Offsets, ReadSelection
from mqproc.spark.record_reader import KernelSelection
from tests.support.records import BASE, SmallLog, kernel_bytes, mutated, outcomes_uncompiled, small_log

MUTATIONS = 60


def boundary(log: SmallLog, start: int, *, seen: int | None = None, find: Any = log_range.find_boundary) -> int:
    """The first boundary at or after `start`, in a view that ends at `seen`."""
    size = len(log.segment)
    out = np.zeros(log_range.BOUNDARY_SIZE, np.int64)
    view = kernel_bytes(log.segment[:seen])
    return int(find(view, start, size, BASE, size, size, 1, out))


def select(
    log: bytes, selection: ReadSelection, kernel: Any = log_range.select_positions, *, verify: bool = True
) -> tuple[int, int, list[int]]:
    """(reason, stop position, positions) of a walk over a whole segment, as a reader does it."""
    wanted = KernelSelection(selection, {})
    view = kernel_bytes(log)
    state = np.zeros(log_range.STATE_SIZE, np.int64)
    state[log_range.STOP] = state[log_range.LIMIT] = state[log_range.SEGMENT_STOP] = len(log)
    state[log_range.BASE], state[log_range.BYTES_MAX] = BASE, 500
    state[log_range.BEGIN_MS], state[log_range.END_MS] = selection.begin_ms, selection.end_ms
    state[log_range.VERIFY] = state[log_range.VERIFY_UNWANTED] = VERIFY_CRCS * verify
    positions, found = np.zeros(5, np.int64), []
    while True:
        table = wanted.table
        state[log_range.FOUND] = state[log_range.FOUND_BYTES] = 0
        reason = int(
            kernel(
                view, table.bytes_view, table.cells, table.slots, wanted.verdicts, wanted.tags, wanted.tag_ends,
                wanted.keys, wanted.key_ends, positions, state,
            )
        )  # fmt: skip
        found += positions[: state[log_range.FOUND]].tolist()
        at = int(state[log_range.AT])
        if reason == log_range.UNKNOWN_QUEUE:
            if not wanted.add_queue(view, at):
                return reason, at, found
        elif reason != log_range.FULL:
            return reason, at, found


def test_boundary_after_every_position() -> None:
    log = small_log()
    places = [place for place, _size in log.places]
    borders = [*places, log.end]
    for start in range(len(log.segment)):
        following = next((border for border in borders if border >= start), log_range.NOWHERE)
        assert boundary(log, start) == following, start


def test_boundary_in_short_view_asks_for_more() -> None:
    log = small_log(count=6)
    for start in (0, 1, log.places[2][0] + 3):
        whole = boundary(log, start)
        for seen in range(len(log.segment)):
            assert boundary(log, start, seen=seen) in (log_range.NEEDS_MORE, whole)


@pytest.mark.parametrize("change", ["crc", "offset", "successor"])
def test_boundary_skips_invalid_record(change: str) -> None:
    log = small_log(count=6)
    second, third, fourth = (place for place, _size in log.places[2:5])
    data = bytearray(log.segment)
    if change == "crc":
        data[third - 1] ^= 1
    elif change == "offset":
        data[second + record.PHYSICAL_OFFSET + 7] ^= 1
    else:
        data[third + record.MAGIC] ^= 1
    changed = SmallLog(bytes(data), log.places, log.units)
    assert boundary(changed, second) == (fourth if change == "successor" else third)


def test_select_returns_wanted_records() -> None:
    log = small_log()
    numbers = range(len(log.places))
    places = [place for place, _size in log.places]
    # Prepared records have no queue offset.
    queued = [number for number in numbers if number % 3 != 1]
    tag = [number for number in queued if number % 3 and number % 4 == 2]
    for selection, wanted in (
        (ReadSelection(), queued),
        (ReadSelection(topics=("Orders",)), [n for n in queued if n % 2 == 0 and n % 11 != 10]),
        (ReadSelection(queue_ids=(2,)), [n for n in queued if n % 3 == 2]),
        (ReadSelection(begin_ms=2_000_004, end_ms=2_000_010), [n for n in queued if 4 <= n < 10]),
        (ReadSelection(tags=("Tag2",)), [n for n in tag if n % 7 != 6]),
        (ReadSelection(keys=("k3", "order-5")), [n for n in queued if n % 4 and (n % 7 == 3 or n == 5)]),
        (
            ReadSelection(topics=("Pay",), starting=Offsets(0, {("Pay", 2): 2}), ending=Offsets(-1, {("Pay", 2): 5})),
            [n for n in queued if n % 2 and n % 11 != 10 and (n % 3 != 2 or 2 <= n // 3 < 5)],
        ),
    ):
        for kernel in (log_range.select_positions, plain(log_range.select_positions)):
            reason, at, found = select(log.segment, selection, kernel)
            assert (reason, at) == (BLANK, log.end)
            assert found == [places[number] for number in wanted], selection


def test_boundary_compiled_and_plain_agree() -> None:
    log = small_log(count=4)
    for start in range(0, len(log.segment), 7):
        assert boundary(log, start, find=plain(log_range.find_boundary)) == boundary(log, start)


def outcomes() -> list[Any]:
    """Results for damaged logs."""
    found: list[Any] = []
    for seed in range(MUTATIONS):
        data = mutated(small_log(count=6, seed=seed % 3).segment, random.Random(seed))
        found.append(select(data, ReadSelection(tags=("Tag1",)) if seed % 2 else ReadSelection(), verify=seed % 3 > 0))
        log = SmallLog(data, [(0, 0)], b"")
        found.append([boundary(log, start) for start in range(0, len(data), 97)])
    return found


def test_uncompiled_gives_the_same_within_buffers() -> None:
    assert outcomes_uncompiled(__file__) == json.loads(json.dumps(outcomes()))


def test_select_reaches_end_of_intact_log() -> None:
    log = small_log(count=2)
    assert select(log.records, ReadSelection())[0] == REACHED_STOP
    assert load_be64(kernel_bytes(log.records), record.PHYSICAL_OFFSET) == BASE


if __name__ == "__main__":
    print(json.dumps(outcomes()))
