"""The walk for delivery marks: compiled and plain agree on intact and damaged logs."""

from __future__ import annotations

import random

import numpy as np
import pytest

from mqproc.kernels import scan
from mqproc.kernels.jit.compile import plain
from mqproc.kernels.record_check import BAD_MAGIC, BLANK, REACHED_STOP
from mqproc.layout.record_codec import encode_blank
from tests.support.records import encode_record, kernel_bytes

BASE = 1 << 20
HOST = bytes([127, 0, 0, 1, 0, 0, 0, 0])


def log(marks: list[tuple[int, int]]) -> tuple[bytes, list[int]]:
    """A segment of records with (mark, sys flag), and their positions."""
    data, places = b"", []
    for mark, sys_flag in marks:
        places.append(len(data))
        data += encode_record(
            topic="T",
            body=b"body",
            properties="",
            queue_id=0,
            flag=0,
            queue_offset=0,
            physical_offset=BASE + len(data),
            sys_flag=sys_flag,
            born_timestamp_ms=1,
            born_host=HOST if not sys_flag & 0x10 else bytes(20),
            store_timestamp_ms=2,
            store_host=HOST,
            reconsume_times=0,
            prepared_transaction_offset=mark,
        )
    return data + encode_blank(100).ljust(100, b"\xff"), places


def walked(data: bytes, start: int, stop: int, room: int = 64) -> tuple[list[int], int, int]:
    """(marks, stop position, reason); the plain twin must return the same."""
    answers = []
    for kernel in (scan.find_delivery_marks, plain(scan.find_delivery_marks)):
        found = np.zeros(room, np.int64)
        out = np.zeros(scan.MARKS_SIZE, np.int64)
        count = kernel(kernel_bytes(data), start, stop, BASE, found, out)
        assert count == out[scan.COUNT]
        answers.append((found[:count].tolist(), int(out[scan.STOPPED_AT]), int(out[scan.REASON])))
    assert answers[0] == answers[1]
    return answers[0]


def test_walk_finds_deliveries_and_commits_only() -> None:
    data, places = log([(0, 0), (91, 0), (500, 8), (501, 4), (502, 12), (77, 0x10), (1, 0x18)])
    assert walked(data, 0, len(data)) == ([91, 500, 77, 1], len(data) - 100, BLANK)
    assert walked(data, places[2], len(data))[0] == [500, 77, 1]


def test_walk_stops_before_partial_record_or_full_output() -> None:
    data, places = log([(number + 1, 0) for number in range(20)])
    assert walked(data, 0, places[7] + 3) == (list(range(1, 8)), places[7], REACHED_STOP)
    assert walked(data, 0, len(data), room=5) == ([1, 2, 3, 4, 5], places[5], scan.FOUND_FULL)
    assert walked(data, places[5], len(data), room=50)[0] == list(range(6, 21))


@pytest.mark.parametrize("seed", range(8))
def test_walk_stops_at_damage(seed: int) -> None:
    rng = random.Random(seed)
    data, places = log([(number + 1, 0) for number in range(20)])
    broken = rng.randrange(20)
    changed = bytearray(data)
    changed[places[broken] + 4] ^= 0xFF
    assert walked(bytes(changed), 0, len(changed)) == (list(range(1, broken + 1)), places[broken], BAD_MAGIC)
