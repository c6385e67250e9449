"""The filler that a queue ends with: for RocketMQ the end of what the queue has, for us a filler like others."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqproc.layout import record
from mqproc.layout.consume_queue import END_FILLER_SIZE, UNIT_SIZE
from mqproc.store.consumequeue.bounds import filler_position
from mqproc.store.consumequeue.files import as_units, filler_units
from mqproc.store.consumequeue.fillers import (
    end_fillers,
    normalize_fillers,
    normalize_fillers_in_place,
    put_end_fillers,
)

SEGMENT = 65536
UNITS = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 1 << 40), st.integers(record.FIXED_SIZE_V4, 1 << 30), st.integers(0, 1 << 62)),
        # A hash that has the bytes of the size.
        st.tuples(st.integers(0, 1 << 40), st.just(200), st.just(END_FILLER_SIZE << 24)),
        st.integers(0, 1 << 20).map(lambda number: number * SEGMENT),
    ),
    max_size=30,
)


@given(UNITS, st.binary(max_size=UNIT_SIZE - 1))
def test_whoever_reads_gets_usual_fillers(units: list[tuple[int, int, int] | int], cut_off: bytes) -> None:
    """A number stands for a filler that points there, at an end."""
    there, wanted = b"", b""
    for unit in units:
        if isinstance(unit, int):
            there += end_fillers(1, unit, SEGMENT).tobytes()
            wanted += filler_units(1, unit).tobytes()
        else:
            plain = struct.pack(">qiq", *unit)
            there += plain
            wanted += plain
    assert normalize_fillers(there + cut_off) == wanted + cut_off
    buffer = bytearray(there + end_fillers(1, 0, SEGMENT).tobytes())
    normalize_fillers_in_place(buffer, len(units))
    assert buffer == wanted + end_fillers(1, 0, SEGMENT).tobytes()


def test_usual_ones_are_made_those_for_holes() -> None:
    usual = [filler_units(1, 7 * SEGMENT), filler_units(2)]
    units = as_units(np.concatenate([usual[0], np.ones(UNIT_SIZE, np.uint8), usual[1]]))
    put_end_fillers(units, SEGMENT)
    wanted = [end_fillers(1, 7 * SEGMENT, SEGMENT), np.ones(UNIT_SIZE, np.uint8), end_fillers(2, 0, SEGMENT)]
    assert units.tobytes() == np.concatenate(wanted).tobytes()
    assert normalize_fillers(units[3:].tobytes()) == usual[1][UNIT_SIZE:].tobytes()


@pytest.mark.parametrize("cut", [4, 8, 12, 16])
@pytest.mark.parametrize("place", [0, 7 * SEGMENT, 70_000 * SEGMENT])
@pytest.mark.parametrize("before", [bytes(UNIT_SIZE), struct.pack(">qiq", 8 * SEGMENT + 17, 200, 7)])
def test_half_of_one_is_none_that_names_the_place(cut: int, place: int, before: bytes) -> None:
    """Else nobody would write the whole one over it."""
    whole = end_fillers(1, place, SEGMENT).tobytes()
    for torn in (before[:cut] + whole[cut:], whole[:cut] + before[cut:]):
        assert torn == whole or normalize_fillers(torn) != filler_units(1, place).tobytes()


@pytest.mark.parametrize("hole", [SEGMENT, SEGMENT + 500, 7 * SEGMENT, (1 << 40) + 3])
def test_what_rocketmq_makes_of_it(hole: int) -> None:
    """It cannot read the place, goes on at the hole's segment, and takes no later record for one that it has."""
    (unit,) = as_units(end_fillers(1, filler_position(hole, SEGMENT), SEGMENT)).tolist()
    place, size, _tags_code = unit
    of_hole = hole - hole % SEGMENT
    assert place % SEGMENT + size > SEGMENT
    assert place - place % SEGMENT + SEGMENT == of_hole
    assert place + size == of_hole + 1
    assert size < record.FIXED_SIZE_V4
