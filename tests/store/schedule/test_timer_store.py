"""Timer wheel, timer log and timer store, with the values of RocketMQ's tests."""

from __future__ import annotations

import errno
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from mqproc.errors import CorruptStoreError
from mqproc.io.store_io import StoreIO
from mqproc.layout import timer_files
from mqproc.layout.timer_files import NO_LOG_POSITION, TimerCheck
from mqproc.paths import StorePaths
from mqproc.store.schedule import timer_store
from mqproc.store.schedule.timer_store import EMPTY, TimerLog, TimerStore, TimerUnits, TimerWheel
from tests.support.store_builders import write_at
from tests.support.store_checks import Killed, RecordingIO

IO = StoreIO()
SECOND = 1000
NOW = 1_700_000_000_000


class FullDiskIO(StoreIO):
    """Fails writes to paths that contain `full` with ENOSPC."""

    full = ""

    def pwrite(self, fd: int, data: bytes | bytearray, offset: int) -> None:
        if self.full and self.full in self.path_of(fd):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().pwrite(fd, data, offset)


@pytest.fixture
def paths(tmp_path: Path) -> StorePaths:
    return StorePaths(tmp_path)


def wheel_of(paths: StorePaths, slots: int = 100) -> TimerWheel:
    return TimerWheel(IO, IO, paths, SECOND, slots)


def test_wheel_empty_slot_is_empty(paths: StorePaths) -> None:
    wheel = wheel_of(paths)
    assert wheel.slot(NOW) == EMPTY == (-1, -1, -1, 0, 0)
    wheel.close()


def test_wheel_slot_is_stored_and_read_back(paths: StorePaths) -> None:
    wheel = wheel_of(paths)
    wheel.put(NOW, 1, 2, 3, 4)
    assert wheel.slot(NOW + 999) == (NOW, 1, 2, 3, 4)
    assert wheel.slot(NOW + 100 * SECOND) == EMPTY, "the same slot of another turn of the wheel"
    wheel.close()
    number = NOW // SECOND
    assert paths.timer_wheel.read_bytes()[number % 100 * 32 :][:32] == struct.pack(">qqqii", number, 1, 2, 3, 4)
    again = wheel_of(paths)
    assert again.slot(NOW) == (NOW, 1, 2, 3, 4)
    again.close()


def test_wheel_other_slot_count_raises(paths: StorePaths) -> None:
    wheel_of(paths).close()
    with pytest.raises(CorruptStoreError, match="200 slots have 6,400"):
        wheel_of(paths, 200)
    assert timer_files.WHEEL_FILE_SIZE == 38_707_200


def test_wheel_occupied_wraps_around(paths: StorePaths) -> None:
    wheel = wheel_of(paths)
    begin = NOW - NOW % (100 * SECOND) + 90 * SECOND
    for second in (0, 3, 9, 10, 15, 99):
        wheel.put(begin + second * SECOND, 1, 1, 1)
    wheel.put(begin - 40 * SECOND, 1, 1, 1)  # of this turn, but before the range
    found = wheel.occupied(begin, begin + 20 * SECOND)
    assert found == [begin + second * SECOND for second in (0, 3, 9, 10, 15)]
    assert len(wheel.occupied(begin, begin + 100 * SECOND)) == 6
    wheel.clear()
    assert wheel.occupied(begin - 50 * SECOND, begin + 50 * SECOND) == []
    wheel.close()


def test_wheel_first_position_is_the_lowest_from_a_time(paths: StorePaths) -> None:
    wheel = wheel_of(paths)
    assert wheel.first_position(NOW) is None
    for second, position in ((0, 52), (5, 0), (7, 104), (9, 156)):
        wheel.put(NOW + second * SECOND, position, position + 52, 2)
    first = [wheel.first_position(NOW + second * SECOND) for second in (0, 5, 6, 8, 10)]
    assert first == [0, 0, 104, 156, None]
    assert [wheel.slot(NOW + second * SECOND)[3] for second in (0, 5, 6, 7, 9)] == [2, 2, 0, 2, 2]
    wheel.close()


def test_log_110_units_take_6_files_of_1024_bytes(paths: StorePaths) -> None:
    log = TimerLog(IO, IO, paths.timer_log, 1024)
    log.open_at(0)
    positions = [log.append(timer_files.UNIT.pack(52, number - 1, 1, NOW, 0, number, 9, 7, 0)) for number in range(110)]
    log.write_out()
    assert len(log.starts()) == 6
    assert positions[18:20] == [18 * 52, 1024]
    assert [log.read(position)[5] for position in positions] == list(range(110))
    rest = (paths.timer_log / f"{0:020d}").read_bytes()[19 * 52 :]
    assert rest == struct.pack(">iqi", 36, 0, timer_files.END_MAGIC) + bytes(20)
    assert log.delete_below(2048) == 2
    assert log.delete_below(1 << 40) == 3, "the last file is kept"
    assert log.starts() == [5120]
    log.close()


def test_log_unit_leaves_16_bytes_in_its_file(paths: StorePaths) -> None:
    log = TimerLog(IO, IO, paths.timer_log, 1024)
    log.open_at(0)
    assert [log.append(bytes(512)), log.append(bytes(510)), log.append(b"text")] == [0, 1024, 1534]
    log.write_out()
    assert len(log.starts()) == 2
    log.close()


def test_log_keeps_the_existing_file_size(paths: StorePaths) -> None:
    log = TimerLog(IO, IO, paths.timer_log, 1024)
    log.open_at(0)
    log.append(timer_files.UNIT.pack(52, -1, 1, NOW, 0, 5, 9, 7, 0))
    log.write_out()
    log.close()
    again = TimerLog(IO, IO, paths.timer_log, 4096)
    assert again.file_size == 1024
    again.open_at(0)
    with pytest.raises(CorruptStoreError, match="no unit at 0"):
        again.read(0)
    assert not any((paths.timer_log / f"{0:020d}").read_bytes()), "bytes after the end are zeros"
    again.close()


@pytest.mark.parametrize("kill_at", [1, 2])
def test_log_keeps_its_units_if_an_opening_is_killed(paths: StorePaths, kill_at: int) -> None:
    """The file must not get another size: units per file would change."""
    log = TimerLog(IO, IO, paths.timer_log, 4096)
    log.open_at(0)
    for number in range(40):
        log.append(timer_files.UNIT.pack(52, -1, 1, NOW, 0, number, 9, 7, 0))
    log.write_out()
    log.close()
    end = 30 * timer_files.UNIT_SIZE
    recorded = RecordingIO(kill_at)
    with pytest.raises(Killed):
        TimerLog(recorded, recorded, paths.timer_log, 4096).open_at(end)
    again = TimerLog(IO, IO, paths.timer_log, 4096)
    again.open_at(end)
    assert [len(units) for _start, units in again.units(again.end)] == [30]
    assert again.file_size == 4096
    assert not any((paths.timer_log / f"{0:020d}").read_bytes()[end:])
    again.close()


def test_timer_check_has_rocketmq_words_and_own(paths: StorePaths) -> None:
    page = timer_files.encode_check(TimerCheck(1, 2, 3, 4, 5, 6, 7))
    assert len(page) == 4096
    assert struct.unpack(">7q", page[:56]) == (1, 2, 3, 3, 0, 4, 5)
    assert timer_files.decode_check(page) == TimerCheck(1, 2, 3, 4, 5, 6, 7)
    rocketmq_page = struct.pack(">7q", 1, 2, 3, 2, 0, 4, 6) + page[56:]
    assert timer_files.decode_check(rocketmq_page) == TimerCheck(1, 2, 2, 4, 6, NO_LOG_POSITION), (
        "RocketMQ has run meanwhile"
    )
    assert timer_files.decode_check(b"") == TimerCheck()


class Unit(NamedTuple):
    """A message in the timer."""

    slot_ms: int
    magic: int
    physical_offset: int
    size: int
    due_ms: int = 0


def put(store: TimerStore, slot_ms: int, now_ms: int, physical_offset: int, *rest: int) -> None:
    """Put a message with optional size, topic hash, magic and due time."""
    size, topic_hash, magic, due_ms = (*rest, *(100, 7, timer_files.MAGIC_DEFAULT, 0)[len(rest) :])
    unit = TimerUnits(*np.array([[slot_ms], [magic], [physical_offset], [size], [due_ms]], np.int64))
    assert store.put(unit, now_ms, np.array([topic_hash], np.int32)) == 1


def units_in(store: TimerStore, slot_ms: int, part_messages: int = 7) -> Iterator[Unit]:
    for part in store.units_of(slot_ms, part_messages):
        assert 0 < len(part) <= part_messages
        columns = part.slots_ms, part.magics, part.physical_offsets, part.sizes, part.due_ms
        yield from map(Unit._make, zip(*(column.tolist() for column in columns), strict=True))


def opened(paths: StorePaths) -> TimerStore:
    store = TimerStore(IO, IO, paths, SECOND, 1024)
    store.open(NOW, lambda physical_offset: None, clean=False)
    return store


def test_timer_units_of_a_slot_are_in_order(paths: StorePaths) -> None:
    store = opened(paths)
    for number in range(40):
        put(store, NOW + number % 2 * SECOND, NOW, number, 100, 7, 1, NOW + 5)
    store.write_out()
    assert store.occupied(NOW - 5 * SECOND, NOW + 5 * SECOND) == [NOW, NOW + SECOND]
    assert list(units_in(store, NOW)) == [Unit(NOW, 1, number, 100, NOW + 5) for number in range(0, 40, 2)]
    assert (list(units_in(store, NOW + 2 * SECOND)), store.pending) == ([], 40)
    store.close()


def test_timer_long_chain_is_followed_unit_by_unit(paths: StorePaths, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(paths)
    for number in range(100):
        put(store, NOW + number % 7 * SECOND, NOW, number, 100)
    store.write_out()
    together = [list(units_in(store, NOW + second * SECOND)) for second in range(7)]
    monkeypatch.setattr(timer_store, "SPAN_BYTES_MAX", 0)
    assert [sorted(units_in(store, NOW + second * SECOND)) for second in range(7)] == together
    assert [unit.physical_offset for unit in together[3]] == list(range(3, 100, 7))
    store.close()


def test_timer_write_out_after_full_disk_is_retried(paths: StorePaths) -> None:
    """On a full disk units stay in memory; none is lost or written twice."""
    io = FullDiskIO()
    store = TimerStore(io, io, paths, SECOND, 1024)
    store.open(NOW, lambda physical_offset: None, clean=False)
    put(store, NOW, NOW, 1, 100)
    store.write_out()
    for part in ("timerlog", "timerwheel"):
        io.full = part
        put(store, NOW, NOW, 2 if part == "timerlog" else 3, 100)
        with pytest.raises(OSError, match="No space"):
            store.write_out()
        io.full = ""
        store.write_out()
    assert [unit.physical_offset for unit in units_in(store, NOW)] == [1, 2, 3]
    store.close()


def test_timer_open_restores_units_up_to_the_check(paths: StorePaths) -> None:
    """The wheel is rebuilt from the log; units after the check are reread from the queue."""
    store = opened(paths)
    store.read_ms = NOW + SECOND
    for number in range(50):
        put(store, NOW + number % 3 * SECOND, NOW, number, 100, 7, 1)
    store.queue_offset = 50
    store.write(store.synced_snapshot(log=123, log_end=0, now_ms=NOW))
    put(store, NOW + SECOND, NOW, 99, 100, 7, 1)
    store.write_out()
    store.close()
    paths.timer_wheel.write_bytes(b"\x01" * timer_files.WHEEL_FILE_SIZE)
    again = opened(paths)
    assert (again.read_ms, again.queue_offset, again.log_position) == (NOW + SECOND, 50, 123)
    assert list(units_in(again, NOW + SECOND)) == [Unit(NOW + SECOND, 1, number, 100) for number in range(1, 50, 3)]
    assert again.pending == sum(number % 3 > 0 for number in range(50))
    put(again, NOW + SECOND, NOW, 200, 100, 7, 1)
    again.write_out()
    assert list(units_in(again, NOW + SECOND))[-1].physical_offset == 200
    again.close()


@pytest.mark.parametrize(("precision_ms", "again"), [(SECOND, False), (100, True), (60_000, True)])
def test_timer_other_precision_rereads_the_queue(paths: StorePaths, precision_ms: int, again: bool) -> None:
    """Units of slots with another precision cannot be reused."""
    store = opened(paths)
    put(store, NOW + 3 * SECOND, NOW, 5, 100, 7, 1)
    store.queue_offset = 1
    store.read_ms = NOW + 2 * SECOND
    store.write(store.synced_snapshot(log=123, log_end=0, now_ms=NOW))
    store.close()
    other = TimerStore(IO, IO, paths, precision_ms, 1024)
    other.open(NOW, lambda physical_offset: None, clean=False)
    assert (other.pending, other.queue_offset, other.log_position) == ((0, 0, 0) if again else (1, 1, 123))
    assert bool(other.remark) is again
    assert other.read_ms == (other.slot_of(NOW) if again else NOW + 2 * SECOND)
    other.close()


@pytest.mark.parametrize(("clean", "queue_offset"), [(False, 28), (True, 30)])
def test_timer_open_counts_units_of_rocketmq_after_check(paths: StorePaths, clean: bool, queue_offset: int) -> None:
    """RocketMQ syncs the check before its units; the last valid unit is the end.

    Messages after it may be lost after a crash. If RocketMQ has closed the store, it has delivered them.
    """
    store = opened(paths)
    for number in range(30):
        put(store, NOW + SECOND, NOW, 1000 + number, 100, 7, 1)
    store.queue_offset = 30
    snapshot = store.synced_snapshot(log=0, log_end=0, now_ms=NOW)
    store.close()
    page = struct.pack(">7q", NOW, 10 * 52, 30, 30, 0, NOW, 77)
    paths.config.mkdir()
    paths.timer_check.write_bytes(page.ljust(4096, b"\0"))
    assert snapshot.check.timer_log_flushed == 1024 + 11 * 52
    again = TimerStore(IO, IO, paths, SECOND, 1024)
    again.open(NOW, lambda physical_offset: physical_offset - 1002, clean=clean)
    assert (again.pending, again.queue_offset, again.log_position) == (30, queue_offset, NO_LOG_POSITION)
    again.close()


def test_timer_write_deletes_delivered_files(paths: StorePaths) -> None:
    store = opened(paths)
    for number in range(100):
        put(store, NOW + number * SECOND, NOW, number, 100, 7, 1)
    store.write_out()
    assert len(list(paths.timer_log.iterdir())) == 6
    store.read_ms = NOW + 60 * SECOND
    store.write(store.synced_snapshot(log=0, log_end=0, now_ms=NOW))
    assert len(list(paths.timer_log.iterdir())) == 3
    assert next(units_in(store, NOW + 60 * SECOND)).physical_offset == 60
    store.close()
    again = opened(paths)
    assert again.pending == 40
    again.close()


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / f"{0:020d}").unlink(),
        lambda folder: (folder / f"{1024:020d}").unlink(),
        lambda folder: (folder / f"{1024:020d}").write_bytes(b""),
        lambda folder: os.truncate(folder / f"{0:020d}", 500),
        lambda folder: os.truncate(folder / f"{1024:020d}", 2000),
        lambda folder: (folder / f"{7:020d}").write_bytes(bytes(1024)),
        lambda folder: write_at(folder / f"{1024:020d}", 5 * 52 + 3, b"\x33"),
        lambda folder: write_at(folder / f"{0:020d}", 0, bytes(1024)),
        lambda folder: (folder / f"{3072:020d}").unlink(),
        shutil.rmtree,
    ],
    ids=[
        "first missing",
        "one missing",
        "empty",
        "first short",
        "long",
        "misnamed",
        "invalid unit",
        "zeros",
        "last missing",
        "all missing",
    ],
)
def test_timer_damaged_log_is_rebuilt_from_the_queue(paths: StorePaths, damage: Callable[[Path], None]) -> None:
    """An unreadable unit must not lose later messages."""
    store = opened(paths)
    for number in range(60):
        put(store, NOW + SECOND, NOW, number, 100, 7, 1)
    store.queue_offset = 60
    store.write(store.synced_snapshot(log=0, log_end=0, now_ms=NOW))
    store.close()
    damage(paths.timer_log)
    again = opened(paths)
    assert "timerlog" in again.remark
    assert (again.queue_offset, again.pending, again.log_position, again.read_ms) == (0, 0, 0, NOW)
    for number in range(60):
        put(again, NOW + SECOND, NOW, number, 100, 7, 1)
    again.write_out()
    assert [unit.physical_offset for unit in units_in(again, NOW + SECOND)] == list(range(60))
    assert {path.stat().st_size for path in paths.timer_log.iterdir()} == {1024}
    # Verification would report zeros before the first unit.
    assert sorted(int(path.name) for path in paths.timer_log.iterdir()) == [0, 1024, 2048, 3072]
    assert any((paths.timer_log / f"{0:020d}").read_bytes()[: timer_files.UNIT_SIZE])
    again.close()


@pytest.mark.parametrize("number", [0, 1], ids=["all missing", "last missing"])
def test_timer_damaged_log_removes_the_old_check(paths: StorePaths, number: int) -> None:
    """After a crash the old check would cover units that were put again."""
    store = opened(paths)
    for _ in range(30):
        put(store, NOW, NOW, 100)
    store.write(store.synced_snapshot(log=5_000, log_end=5_000, now_ms=NOW))
    store.close()
    for file in sorted(paths.timer_log.iterdir())[number:]:
        file.unlink()
    again = opened(paths)
    assert "timerlog" in again.remark or "timer log" in again.remark
    assert not paths.timer_check.exists()
    again.close()
