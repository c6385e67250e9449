"""The end of the log: torn tails are cut, damage becomes a hole, recovery is idempotent."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqproc.store.damage import Hole
from mqproc.store.durable_marks import DurableMark
from mqproc.store.recovery.log import LogEnd, LogRecovery
from tests.support.store_builders import Engine


def recovered(engine: Engine, *, marked: bool = False) -> LogEnd:
    mark = DurableMark(engine.io, engine.paths.mark("commitlog"), engine.segments)
    recovery = LogRecovery(engine.segments)
    found = recovery.find_end(mark.valid() if marked else None)
    recovery.cut(found)
    return found


def overwrite(engine: Engine, offset: int, data: bytes) -> None:
    base = engine.segments.start_of(offset)
    with engine.segments.path(base).open("r+b") as file:
        file.seek(offset - base)
        file.write(data)


def fill(engine: Engine, messages: int = 100) -> list[int]:
    return [int(engine.append("T", [b"%04d" % n * 250])[0]) for n in range(messages)]


def test_log_intact_ends_at_last_record(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    offsets = fill(engine)
    found = recovered(engine)
    assert (found.end, found.records, found.cut_bytes, found.holes) == (engine.written, 100, 0, [])
    assert found.last_record == offsets[-1]
    assert found.last_store_timestamp_ms == 1_700_000_000_001


def test_log_empty_ends_at_0(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    found = recovered(engine)
    assert (found.start, found.end, found.records) == (0, 0, 0)


@pytest.mark.parametrize("torn", [1, 4, 8, 28, 200, 1000])
def test_log_torn_tail_is_cut_and_zeroed(tmp_path: Path, torn: int) -> None:
    engine = Engine(tmp_path)
    offsets = fill(engine)
    end = engine.written
    overwrite(engine, end - torn, b"\xee" * torn)
    found = recovered(engine)
    assert found.end == offsets[-1]
    assert found.records == 99
    assert found.cut_bytes > 0
    base = engine.segments.start_of(end)
    assert not any(engine.log_bytes(found.end, base + engine.segments.segment_size))
    again = recovered(engine)
    assert (again.end, again.cut_bytes) == (found.end, 0)


def test_log_record_after_cut_is_never_found(tmp_path: Path) -> None:
    """Cut, append a shorter record, cut again: bytes after the first cut must not be found."""
    engine = Engine(tmp_path)
    offsets = fill(engine, 10)
    overwrite(engine, offsets[7] + 100, b"\xff")
    assert recovered(engine).end == offsets[9] + (engine.written - offsets[9])
    mark = DurableMark(engine.io, engine.paths.mark("commitlog"), engine.segments)
    mark.move(offsets[5], 1_700_000_000_001)
    found = recovered(engine, marked=True)
    assert found.end == offsets[7]
    assert not any(engine.log_bytes(found.end, engine.segments.segment_size))


@pytest.mark.parametrize("body", [b"body", b"__CRC32#\x010000000000\x02"])
def test_log_record_without_its_crc_is_torn(tmp_path: Path, body: bytes) -> None:
    engine = Engine(tmp_path, enabled_append_prop_crc=True)
    offsets = [int(engine.append("T", [each])[0]) for each in (b"first", body, b"last")]
    mark = DurableMark(engine.io, engine.paths.mark("commitlog"), engine.segments)
    mark.move(offsets[1], 1_700_000_000_001)
    name = engine.log_bytes(offsets[2], engine.written).index(b"__CRC32#")
    overwrite(engine, offsets[2] + name, b"torn")
    found = LogRecovery(engine.segments).find_end(mark.valid(), record_crcs=True)
    assert (found.end, found.records, found.cut_reason) == (offsets[2], 1, "bad property CRC")


def test_log_below_mark_is_not_scanned(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    offsets = fill(engine)
    mark = DurableMark(engine.io, engine.paths.mark("commitlog"), engine.segments)
    mark.move(offsets[90], 5)
    found = recovered(engine, marked=True)
    assert (found.start, found.end, found.records) == (offsets[90], engine.written, 10)


def test_log_mark_of_another_log_is_ignored(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    offsets = fill(engine)
    mark = DurableMark(engine.io, engine.paths.mark("commitlog"), engine.segments)
    mark.move(offsets[90], 5)
    overwrite(engine, offsets[90] - 20, b"\x00")
    assert DurableMark(engine.io, engine.paths.mark("commitlog"), engine.segments).valid() is None


def test_log_damage_without_mark_is_hole(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    offsets = fill(engine)
    overwrite(engine, offsets[20] + 100, b"\xff\xff")
    overwrite(engine, offsets[70], bytes(offsets[72] - offsets[70]))
    found = recovered(engine)
    assert found.end == engine.written
    assert found.records == 97
    assert found.holes == [
        Hole(offsets[20], offsets[21], "bad body CRC"),
        Hole(offsets[70], offsets[72], "zeros"),
    ]


def test_log_segments_after_end_are_deleted(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    offsets = fill(engine, 200)
    size = engine.segments.segment_size
    assert engine.written > 3 * size
    mark = DurableMark(engine.io, engine.paths.mark("commitlog"), engine.segments)
    mark.move(offsets[10], 5)
    overwrite(engine, offsets[20] + 90, b"\xff")
    found = recovered(engine, marked=True)
    assert found.end == offsets[20]
    assert engine.segments.starts() == [0]


def test_log_missing_segment_is_hole(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    fill(engine, 200)
    size = engine.segments.segment_size
    engine.segments.path(size).unlink()
    engine.segments.close()
    found = recovered(engine)
    assert found.end == engine.written
    assert found.holes == [Hole(size, 2 * size, "missing segment")]


def test_log_missing_segment_above_mark_is_torn_tail(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    offsets = fill(engine, 200)
    mark = DurableMark(engine.io, engine.paths.mark("commitlog"), engine.segments)
    mark.move(offsets[10], 5)
    size = engine.segments.segment_size
    engine.segments.path(size).unlink()
    engine.segments.close()
    found = recovered(engine, marked=True)
    assert (found.end, found.holes, found.cut_reason) == (size, [], "missing segment")
    assert engine.segments.starts() == [0]


def test_log_known_hole_above_mark_does_not_cut(tmp_path: Path) -> None:
    """Dispatch found the hole while the group ran: the records after it are intact."""
    engine = Engine(tmp_path)
    offsets = fill(engine)
    mark = DurableMark(engine.io, engine.paths.mark("commitlog"), engine.segments)
    mark.move(offsets[10], 5)
    overwrite(engine, offsets[20] + 100, b"\xff")
    recovery = LogRecovery(engine.segments)
    found = recovery.find_end(mark.valid(), {offsets[20]})
    assert (found.end, found.holes) == (engine.written, [Hole(offsets[20], offsets[21], "bad body CRC")])
    assert recovery.find_end(mark.valid()).end == offsets[20]


def test_log_known_hole_is_checked_again(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    offsets = fill(engine)
    recovery = LogRecovery(engine.segments)
    assert recovery.examine([(offsets[5], offsets[9])]) == []
    overwrite(engine, offsets[6] + 100, b"\xff")
    overwrite(engine, offsets[8] + 4, b"\xff")
    assert recovery.examine([(offsets[5], offsets[9])]) == [
        Hole(offsets[6], offsets[7], "bad body CRC"),
        Hole(offsets[8], offsets[9], "bad magic"),
    ]


def test_log_continues_after_sealed_segment(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    fill(engine, 10)
    recovery = LogRecovery(engine.segments)
    recovery.seal(engine.written)
    found = recovered(engine)
    assert (found.end, found.records) == (engine.segments.segment_size, 10)


def test_mark_is_newest_valid_slot(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    offsets = fill(engine)
    path = engine.paths.mark("commitlog")
    mark = DurableMark(engine.io, path, engine.segments)
    mark.move(offsets[10], 1)
    mark.move(offsets[20], 2)
    read = DurableMark(engine.io, path, engine.segments).valid()
    assert read is not None
    assert read.offset == offsets[20]
    data = bytearray(path.read_bytes())
    data[(read.sequence & 1) * 4096 + 20] ^= 1
    path.write_bytes(data)
    older = DurableMark(engine.io, path, engine.segments).valid()
    assert older is not None
    assert older.offset == offsets[10]
