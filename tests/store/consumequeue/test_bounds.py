"""Begin and end of a queue's units, with fillers at any place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqproc.layout.consume_queue import FILLER_SIZE, UNIT_SIZE
from mqproc.store.consumequeue.bounds import (
    QueueExtent,
    extent,
    filler_position,
    first_at_or_above,
    last_end,
    leading_fillers,
    record_place,
)

PER_FILE = 8
SIZE = 100
FILLER = None


class MemoryRow:
    """Units in memory from a queue offset on: log positions, or FILLER."""

    units_per_file = PER_FILE

    def __init__(self, places: list[int | None], first: int = 0) -> None:
        self.first = first
        files = -(-max(1, len(places)) // PER_FILE)
        data = b"".join(_unit(place) for place in places)
        self.data = data.ljust(files * PER_FILE * UNIT_SIZE, b"\0")

    def starts(self) -> list[int]:
        return list(range(self.first, self.first + len(self.data) // UNIT_SIZE, PER_FILE))

    def read(self, first: int, count: int) -> bytes:
        at = (first - self.first) * UNIT_SIZE
        return self.data[at : at + count * UNIT_SIZE] if at >= 0 else b""


def _unit(place: int | None) -> bytes:
    size = FILLER_SIZE if place is FILLER else SIZE
    return (place or 0).to_bytes(8, "big") + size.to_bytes(4, "big") + bytes(8)


def below(limit: int, row: MemoryRow) -> QueueExtent:
    return extent(row, lambda at, size: 0 <= at < limit and size > 0)


@given(st.lists(st.booleans(), max_size=40), st.integers(0, 45), st.integers(0, 3))
def test_extent_ends_after_last_unit_below_limit(real: list[bool], cut: int, files_gone: int) -> None:
    """The extent includes the units below the limit and the fillers between them."""
    places: list[int | None] = [1000 + SIZE * n if is_real else FILLER for n, is_real in enumerate(real)]
    first = files_gone * PER_FILE
    found = below(1000 + SIZE * cut, MemoryRow(places, first))
    kept = [n for n, place in enumerate(places) if place is not None and n < cut]
    if not kept:
        assert found.max_offset >= first
        assert found.last_physical_end == 0
        return
    end = kept[-1] + 1
    later = [n for n in range(end, len(places)) if places[n] is not None]
    # Fillers after the last unit belong to the extent, up to a later unit of their file.
    if later:
        assert end <= found.max_offset - first <= later[0]
    else:
        assert found.max_offset - first == len(places)
    assert found.last_physical_end == 1000 + SIZE * kept[-1] + SIZE


def test_leading_fillers_keep_the_queue_offset() -> None:
    row = MemoryRow([FILLER, FILLER, FILLER, 1000, 1100])
    assert leading_fillers(row, 0) == 3
    assert below(2000, row) == QueueExtent(3, 5, 1200)
    assert below(1000, row) == QueueExtent(3, 3, 0)
    assert leading_fillers(MemoryRow([FILLER] * 20), 0) == PER_FILE
    assert leading_fillers(MemoryRow([]), 0) == 0


def test_record_place_of_filler_is_the_next_unit() -> None:
    row = MemoryRow([1000, FILLER, FILLER, 1300, FILLER])
    assert [record_place(row, n) for n in range(6)] == [
        (1000, SIZE),
        (1300, SIZE),
        (1300, SIZE),
        (1300, SIZE),
        (1300, SIZE),
        (0, 0),
    ]
    assert record_place(MemoryRow([FILLER]), 0) is None
    assert [first_at_or_above(row, 0, 5, limit) for limit in (0, 1000, 1001, 1300, 1301)] == [0, 0, 1, 1, 5]
    assert [last_end(row, n) for n in range(6)] == [0, 1100, 1100, 1100, 1400, 1400]


def test_bounds_long_run_of_fillers_is_skipped() -> None:
    row = MemoryRow([1000, *[FILLER] * 2000, 300_000])
    assert record_place(row, 3) == (300_000, SIZE)
    assert last_end(row, 1900) == 1100
    assert below(200_000, row).last_physical_end == 1100


@pytest.mark.parametrize(("hole", "position"), [(0, 0), (99, 0), (100, 0), (250, 100), (999, 800)])
def test_filler_position_is_the_segment_before_the_hole(hole: int, position: int) -> None:
    assert filler_position(hole, 100) == position


class FarRow(MemoryRow):
    """A row with another file, of zeros, a million files after its end."""

    def starts(self) -> list[int]:
        own = super().starts()
        return [*own, own[-1] + 1_000_000 * PER_FILE]

    def read(self, first: int, count: int) -> bytes:
        if first >= self.starts()[-1]:
            return bytes(count * UNIT_SIZE)
        assert first <= super().starts()[-1] + PER_FILE, "reads from a missing file"
        return super().read(first, count)


def test_last_end_reads_existing_files_only() -> None:
    row = FarRow([1000, 1100, FILLER, 1200, *[FILLER] * 12])
    far = row.starts()[-1]
    assert last_end(row, far) == 1200 + SIZE
    assert last_end(row, far // 2) == 1200 + SIZE
