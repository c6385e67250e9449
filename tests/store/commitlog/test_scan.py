"""Scan of a log: valid records, lost ranges, and written ranges of a sparse file."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from mqproc.config.options import Options
from mqproc.io.store_io import StoreIO
from mqproc.kernels import scan
from mqproc.layout import record
from mqproc.paths import StorePaths
from mqproc.store.commitlog.scan import IntactRecords, LostRange, RecordRun
from mqproc.store.commitlog.segments import find_record_in, written_ranges
from mqproc.store.verify.inventory import take_inventory
from mqproc.store.verify.verifier import sizes_of
from tests.golden.fixtures import load_fixture
from tests.support.records import encode_record
from tests.support.store_builders import Engine, write_at

SEGMENT = 65536
SEGMENTS = 9
MIB = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return load_fixture("a_basic", tmp_path).store


def path_of(store: Path, number: int) -> Path:
    return store / "commitlog" / f"{number * SEGMENT:020d}"


def scan_log(store: Path, end: int | None = None) -> tuple[list[tuple[int, int, int]], list[LostRange]]:
    """Return the runs of valid records, (start, stop, records), and the lost ranges of a log."""
    io, paths = StoreIO(), StorePaths(store)
    log = IntactRecords(io, take_inventory(io, paths, sizes_of(io, paths, Options())), 0, end)
    pieces, lost = [], []
    try:
        for each in log.pieces():
            if isinstance(each, RecordRun):
                pieces.append((each.base + each.start, each.base + each.stop, each.records))
            else:
                lost.append(each)
    finally:
        log.close()
    return pieces, lost


def spans_of(lost: list[LostRange]) -> list[tuple[int, int, str]]:
    return [(each.start, each.stop, each.reason) for each in lost]


def test_scan_intact_log_reports_no_lost_range(store: Path) -> None:
    pieces, lost = scan_log(store)
    assert [start for start, _stop, _records in pieces] == [number * SEGMENT for number in range(SEGMENTS)]
    assert lost == []


def test_scan_missing_and_short_segments_inside_log_are_lost(store: Path) -> None:
    path_of(store, 2).unlink()
    cut = next(stop for start, stop, _records in scan_log(store)[0] if start == 5 * SEGMENT) - 5 * SEGMENT
    with path_of(store, 5).open("r+b") as file:
        file.truncate(cut)
    assert spans_of(scan_log(store)[1]) == [
        (2 * SEGMENT, 3 * SEGMENT, "missing segment"),
        (5 * SEGMENT + cut, 6 * SEGMENT, "short segment"),
    ]


def test_scan_short_last_segment_is_not_lost(store: Path) -> None:
    end = scan_log(store)[0][-1][1]
    with path_of(store, SEGMENTS - 1).open("r+b") as file:
        file.truncate(end - (SEGMENTS - 1) * SEGMENT)
    assert scan_log(store)[1] == []


def test_scan_zeros_before_a_blank_are_lost(store: Path) -> None:
    """A blank proves that the log continued, even in the last segment."""
    for number in range(1, SEGMENTS):
        path_of(store, number).unlink()
    _start, stop, _records = scan_log(store)[0][0]
    data = path_of(store, 0).read_bytes()
    last = max(at for at in range(stop) if data[at + record.PHYSICAL_OFFSET :][:8] == at.to_bytes(8, "big"))
    write_at(path_of(store, 0), last, bytes(stop - last))
    assert spans_of(scan_log(store)[1]) == [(last, stop, "zeros")]


def test_scan_nonzero_bytes_after_last_record_are_lost(store: Path) -> None:
    end = scan_log(store)[0][-1][1]
    last = path_of(store, SEGMENTS - 1)
    at = end - (SEGMENTS - 1) * SEGMENT
    write_at(last, at + 100, b"torn")
    assert spans_of(scan_log(store)[1]) == [(end, end + 104, "zeros")]
    assert scan_log(store, end)[1] == []
    write_at(last, at, b"\0\0\1\0\xda\xa3")
    assert spans_of(scan_log(store)[1]) == [(end, end + 104, "bad magic")]


def test_scan_record_longer_than_a_piece_is_one_record(tmp_path: Path) -> None:
    engine = Engine(tmp_path, mapped_file_size_commit_log=16 * MIB, max_message_size=8 * MIB)
    offsets = engine.append("Large", [b"a" * 100, b"b" * (5 * MIB), b"c" * 100], 1_700_000_000_000).tolist()
    engine.segments.close()
    pieces, lost = scan_log(tmp_path)
    assert [(start, records) for start, _stop, records in pieces] == [(offset, 1) for offset in offsets]
    assert lost == []


def test_written_ranges_excludes_holes(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    write_at(path, 700 * MIB, b"x" * (1 * MIB))
    io = StoreIO()
    fd = io.open(path)
    try:
        ranges = list(written_ranges(io, fd, 5, 1 << 30))
        after_last = list(written_ranges(io, fd, 701 * MIB + 4096, 1 << 30))
    finally:
        io.close(fd)
    assert ranges[0][0] <= 700 * MIB
    assert ranges[-1][1] >= 701 * MIB
    assert all(stop >= start for (_begin, stop), (start, _end) in itertools.pairwise(ranges))
    assert ranges[-1][1] - ranges[0][0] < 2 * MIB
    assert after_last == []


def test_find_record_at_end_of_zeros_returns_it() -> None:
    view = np.zeros(1000, np.uint8)
    found = encode_record(topic="Topic", body=b"x" * 50, physical_offset=500, queue_offset=0)
    view[500 : 500 + len(found)] = np.frombuffer(found, np.uint8)
    out = np.zeros(scan.SCAN_SIZE, np.int64)
    for stop in range(501, 510):
        assert find_record_in([(0, 400), (400, stop)], view, 0, out) == 500
    assert find_record_in([(0, 400), (400, 500)], view, 0, out) == -1
