"""Search for the next intact record after damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqproc.store.damage import Hole
from mqproc.store.recovery.log import Resync
from tests.support.store_builders import Engine

SEGMENT = 65536


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path)


def fill(engine: Engine, count: int, size: int = 300) -> list[int]:
    return [int(engine.append("T", [b"%06d" % n + bytes(size)])[0]) for n in range(count)]


def overwrite(engine: Engine, offset: int, data: bytes) -> None:
    with engine.segments.path(engine.segments.start_of(offset)).open("r+b") as file:
        file.seek(offset % SEGMENT)
        file.write(data)


def test_next_record_is_found_from_any_byte(engine: Engine) -> None:
    offsets = fill(engine, 5)
    resync = Resync(engine.segments)
    for position in range(offsets[1] + 1, offsets[2] + 1):
        assert resync.next_record(position, engine.written) == offsets[2]
    assert resync.next_record(offsets[4] + 1, engine.written) is None
    assert resync.next_record(offsets[1] + 1, offsets[2]) is None


def test_next_record_skips_damaged_and_misplaced_records(engine: Engine) -> None:
    """A copy of a record in another record's body is ignored: it has another offset."""
    offsets = fill(engine, 6)
    copy = engine.log_bytes(offsets[0], offsets[1])
    overwrite(engine, offsets[2], copy)
    overwrite(engine, offsets[3] + 100, b"\xff")
    assert Resync(engine.segments).next_record(offsets[1] + 1, engine.written) == offsets[4]


def test_hole_may_span_segments(engine: Engine) -> None:
    offsets = fill(engine, 500)
    assert offsets[-1] > 2 * SEGMENT
    first = next(n for n, offset in enumerate(offsets) if offset >= SEGMENT)
    second = next(n for n, offset in enumerate(offsets) if offset >= 2 * SEGMENT)
    engine.segments.close()
    engine.segments.path(SEGMENT).unlink()
    overwrite(engine, offsets[first - 1], b"\xff" * 8)
    hole = Resync(engine.segments).hole_at(offsets[first - 1], engine.written)
    assert hole == Hole(offsets[first - 1], offsets[second], "bad magic")
    assert Resync(engine.segments).hole_at(SEGMENT, engine.written).kind == "missing segment"


def test_hole_at_end_reaches_limit(engine: Engine) -> None:
    offsets = fill(engine, 3)
    overwrite(engine, offsets[2], bytes(8))
    assert Resync(engine.segments).hole_at(offsets[2], engine.written) == Hole(offsets[2], engine.written, "zeros")


def test_next_record_may_begin_in_a_file_hole(engine: Engine) -> None:
    """A size begins with zero bytes, which may be in a page that was never written."""
    first = int(engine.append("T", [bytes(100)])[0])
    size = engine.written - first
    # The next record's first two bytes end a page.
    padding = 4096 - 2 - engine.written
    engine.append("T", [bytes(padding - size + 100)])
    offset = engine.written
    assert offset % 4096 == 4094
    engine.append("T", [b"body"])
    path = engine.segments.path(0)
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.truncate(0)
        file.truncate(SEGMENT)
        file.seek(4096)
        file.write(data[4096:8192])
    engine.segments.close()
    assert path.read_bytes()[4094:8192] == data[4094:8192]
    assert Resync(engine.segments).next_record(1, engine.written) == offset
