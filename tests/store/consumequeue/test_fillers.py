"""End fillers: RocketMQ sees the end of the queue, mqproc plain fillers."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqproc.layout import record
from mqproc.layout.consume_queue import END_FILLER_SIZE, UNIT_SIZE
from mqproc.store.consumequeue.bounds import (
    as_units,
    end_fillers,
    filler_position,
    normalize_fillers,
    normalize_fillers_in_place,
    put_end_fillers,
)
from mqproc.store.consumequeue.files import filler_units

SEGMENT = 65536
UNITS = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 1 << 40), st.integers(record.FIXED_SIZE_V4, 1 << 30), st.integers(0, 1 << 62)),
        # A tags code that contains the bytes of an end filler's size.
        st.tuples(st.integers(0, 1 << 40), st.just(200), st.just(END_FILLER_SIZE << 24)),
        st.integers(0, 1 << 20).map(lambda number: number * SEGMENT),
    ),
    max_size=30,
)


@given(UNITS, st.binary(max_size=UNIT_SIZE - 1))
def test_normalize_fillers_replaces_end_fillers(units: list[tuple[int, int, int] | int], cut_off: bytes) -> None:
    """An int in `units` is a filler that refers to that position."""
    written, expected = b"", b""
    for unit in units:
        if isinstance(unit, int):
            written += end_fillers(1, unit, SEGMENT).tobytes()
            expected += filler_units(1, unit).tobytes()
        else:
            plain = struct.pack(">qiq", *unit)
            written += plain
            expected += plain
    assert normalize_fillers(written + cut_off) == expected + cut_off
    buffer = bytearray(written + end_fillers(1, 0, SEGMENT).tobytes())
    normalize_fillers_in_place(buffer, len(units))
    assert buffer == expected + end_fillers(1, 0, SEGMENT).tobytes()


def test_put_end_fillers_replaces_plain_fillers() -> None:
    usual = [filler_units(1, 7 * SEGMENT), filler_units(2)]
    units = as_units(np.concatenate([usual[0], np.ones(UNIT_SIZE, np.uint8), usual[1]]))
    put_end_fillers(units, SEGMENT)
    expected = [end_fillers(1, 7 * SEGMENT, SEGMENT), np.ones(UNIT_SIZE, np.uint8), end_fillers(2, 0, SEGMENT)]
    assert units.tobytes() == np.concatenate(expected).tobytes()
    assert normalize_fillers(units[3:].tobytes()) == usual[1][UNIT_SIZE:].tobytes()


@pytest.mark.parametrize("cut", [4, 8, 12, 16])
@pytest.mark.parametrize("place", [0, 7 * SEGMENT, 70_000 * SEGMENT])
@pytest.mark.parametrize("before", [bytes(UNIT_SIZE), struct.pack(">qiq", 8 * SEGMENT + 17, 200, 7)])
def test_normalize_fillers_torn_filler_differs_from_whole(cut: int, place: int, before: bytes) -> None:
    """A torn filler must differ, so that recovery overwrites it with the complete one."""
    whole = end_fillers(1, place, SEGMENT).tobytes()
    for torn in (before[:cut] + whole[cut:], whole[:cut] + before[cut:]):
        assert torn == whole or normalize_fillers(torn) != filler_units(1, place).tobytes()


@pytest.mark.parametrize("hole", [SEGMENT, SEGMENT + 500, 7 * SEGMENT, (1 << 40) + 3])
def test_end_filler_makes_rocketmq_resume_at_the_hole(hole: int) -> None:
    """RocketMQ cannot read the position and continues at the hole's segment."""
    (unit,) = as_units(end_fillers(1, filler_position(hole, SEGMENT), SEGMENT)).tolist()
    place, size, _tags_code = unit
    of_hole = hole - hole % SEGMENT
    assert place % SEGMENT + size > SEGMENT
    assert place - place % SEGMENT + SEGMENT == of_hole
    assert place + size == of_hole + 1
    assert size < record.FIXED_SIZE_V4
