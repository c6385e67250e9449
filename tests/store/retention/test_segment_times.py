"""When a segment's records were stored: found at its ends, around damage, never from what may change yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.retention.plan import SegmentTimes
from mqproc.util.units import KIB
from tests.store.engine import Engine

SIZE = 256 * KIB
BEGAN_MS = 1_700_000_000_000


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    """Segment 0 is full: records of 1 KiB, each stored a second after the one before it."""
    engine = Engine(tmp_path, mapped_file_size_commit_log=SIZE, max_message_size=SIZE // 2)
    number = 0
    while engine.written < SIZE:
        engine.append("T", [b"x" * 900], BEGAN_MS + 1000 * number)
        number += 1
    return engine


def times_of(engine: Engine) -> SegmentTimes:
    return SegmentTimes(LogSegments(engine.io, engine.paths.commit_log, SIZE))


def last_record(engine: Engine) -> int:
    """Where the last record of segment 0 begins."""
    data = engine.log_bytes(0, SIZE)
    at = 0
    while int.from_bytes(data[at + 4 : at + 8], "big") != 0xCBD43194:
        begin, at = at, at + int.from_bytes(data[at : at + 4], "big")
    return begin


def damage(engine: Engine, at: int, size: int) -> None:
    path = engine.segments.path(0)
    data = bytearray(path.read_bytes())
    data[at : at + size] = b"\xa5" * size
    path.write_bytes(data)


def count_in_first(engine: Engine) -> int:
    data = engine.log_bytes(0, SIZE)
    return data.count(b"x" * 900)


def test_first_and_last_of_a_full_segment(engine: Engine) -> None:
    count = count_in_first(engine)
    assert times_of(engine).full_span(0) == (BEGAN_MS, BEGAN_MS + 1000 * (count - 1))


def test_a_record_that_fills_most_of_the_segment_is_found(tmp_path: Path) -> None:
    engine = Engine(tmp_path, mapped_file_size_commit_log=SIZE, max_message_size=SIZE)
    engine.append("T", [b"first"], BEGAN_MS)
    engine.append("T", [b"x" * (SIZE - 10 * KIB)], BEGAN_MS + 5)
    engine.append("T", [b"x" * (20 * KIB)], BEGAN_MS + 9)
    assert engine.written > SIZE
    assert times_of(engine).full_span(0) == (BEGAN_MS, BEGAN_MS + 5)


def test_a_damaged_last_record_leaves_the_one_before_it(engine: Engine) -> None:
    count = count_in_first(engine)
    damage(engine, last_record(engine) + 100, 50)
    assert times_of(engine).full_span(0) == (BEGAN_MS, BEGAN_MS + 1000 * (count - 2))


def test_damage_at_both_ends_is_looked_around(engine: Engine) -> None:
    damage(engine, 0, 3000)
    damage(engine, SIZE - 70 * KIB, 70 * KIB)
    first, last = times_of(engine).full_span(0) or (0, 0)
    assert BEGAN_MS < first < BEGAN_MS + 6000
    assert first < last


def test_the_last_of_a_segment_whose_clock_went_back_is_its_latest(engine: Engine, tmp_path: Path) -> None:
    other = Engine(tmp_path / "other", mapped_file_size_commit_log=SIZE, max_message_size=SIZE)
    for time_ms in (BEGAN_MS, BEGAN_MS + 7000, BEGAN_MS - 1_000_000):
        other.append("T", [b"x" * 900], time_ms)
    other.append("T", [b"x" * (SIZE - 2000)], BEGAN_MS)
    first, last = times_of(other).full_span(0) or (0, 0)
    assert (first, last) == (BEGAN_MS, BEGAN_MS + 7000)


def test_a_segment_without_an_intact_record_has_no_time(engine: Engine) -> None:
    damage(engine, 0, SIZE)
    times = times_of(engine)
    assert times.full_span(0) is None
    assert times.first_ms(0) is None


def test_a_first_record_that_is_not_there_yet_is_found_later(engine: Engine) -> None:
    times = times_of(engine)
    engine.make_segment(2 * SIZE)
    assert times.first_ms(2 * SIZE) is None
    while engine.written < 2 * SIZE:
        engine.append("T", [b"x" * (100 * KIB)], BEGAN_MS + 77)
    assert times.first_ms(2 * SIZE) == BEGAN_MS + 77


def test_a_missing_segment_is_an_error_and_known_times_need_no_file(engine: Engine) -> None:
    times = times_of(engine)
    known = times.full_span(0)
    engine.segments.path(0).unlink()
    assert times.full_span(0) == known
    times.forget_below(SIZE)
    with pytest.raises(FileNotFoundError):
        SegmentTimes(LogSegments(engine.io, engine.paths.commit_log, SIZE)).full_span(0)
