"""ConsumeQueue files: writing, space, reading, cutting and listing."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mqproc.errors import CorruptStoreError
from mqproc.io.store_io import StoreIO
from mqproc.layout.consume_queue import FILLER_SIZE
from mqproc.store.consumequeue.bounds import as_units
from mqproc.store.consumequeue.files import (
    ConsumeQueueFiles,
    adopted_file_bytes,
    allocation_end,
    filler_units,
    queues_on_disk,
)
from mqproc.topic_names import SCHEDULE_TOPIC
from tests.support.processes import open_below

FILE_BYTES = 400  # 20 units
UNITS_PER_FILE = FILE_BYTES // 20


def units(first: int, count: int, size: int = 100) -> NDArray[np.uint8]:
    """Return units of consecutive records of `size` bytes from `first` × size on."""
    packed = b"".join(struct.pack(">qiq", number * size, size, number) for number in range(first, first + count))
    return np.frombuffer(packed, np.uint8)


class FullDiskIO(StoreIO):
    """Fails the nth write with a full disk."""

    def __init__(self, nth: int) -> None:
        super().__init__()
        self.left = nth

    def pwrite(self, fd: int, data: Any, offset: int) -> None:
        self.left -= 1
        if self.left == 0:
            super().pwrite(fd, bytes(data)[:7], offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().pwrite(fd, data, offset)


def open_files(
    root: Path, io: StoreIO | None = None, file_bytes: int = FILE_BYTES, open_max: int = 512
) -> ConsumeQueueFiles:
    return ConsumeQueueFiles(io or StoreIO(), root / "consumequeue", file_bytes, write=True, open_max=open_max)


def row(files: ConsumeQueueFiles, topic: str = "T", queue_id: int = 0) -> dict[int, bytes]:
    return {start: files.path(topic, queue_id, start).read_bytes() for start in files.starts(topic, queue_id)}


def test_extent_below_excludes_unit_ending_above_limit(tmp_path: Path) -> None:
    """A power loss may leave a torn unit after the last unit of a deleted queue."""
    files = open_files(tmp_path)
    files.write_run("T", 0, 0, units(0, 5))
    files.write_run("T", 0, 5, np.frombuffer(struct.pack(">qiq", 500, 39_848_564, -7), np.uint8))
    extent = files.extent_below("T", 0, 800)
    assert (extent.first_offset, extent.max_offset, extent.last_physical_end) == (0, 5, 500)
    assert files.extent_below("T", 0, 500 + 39_848_564).max_offset == 6
    files.close()


def test_write_run_across_files_keeps_queue_offsets(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    files.write_run("T", 0, 0, units(0, 50))
    files.write_run("T", 0, 50, units(50, 3))
    found = row(files)
    assert list(found) == [0, 400, 800]
    assert b"".join(found.values()) == units(0, 53).tobytes().ljust(1200, b"\0")
    assert files.path("T", 0, 400).name == "00000000000000000400"


def test_write_run_first_unit_inside_file_adds_fillers(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    files.write_run("T", 0, 47, units(47, 2))
    assert row(files) == {800: (filler_units(7).tobytes() + units(47, 2).tobytes()).ljust(400, b"\0")}
    assert as_units(filler_units(1)).tolist() == [(0, FILLER_SIZE, 0)]
    assert files.extent("T", 0).first_offset == 47


def test_write_run_same_units_twice_changes_nothing(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    files.write_run("T", 0, 0, units(0, 30))
    before, extent = row(files), files.extent("T", 0)
    files.write_run("T", 0, 10, units(10, 20))
    assert row(files) == before
    assert files.extent("T", 0) == extent


@pytest.mark.parametrize("nth", range(1, 5))
def test_write_run_after_full_disk_can_be_repeated(tmp_path: Path, nth: int) -> None:
    whole = open_files(tmp_path / "whole")
    whole.write_run("T", 0, 5, units(5, 50))
    files = open_files(tmp_path, FullDiskIO(nth))
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        files.write_run("T", 0, 5, units(5, 50))
    files.write_run("T", 0, 5, units(5, 50))
    assert row(files) == row(whole)


@pytest.mark.parametrize("left", [0, 5, 20, 100, 139])
def test_write_run_completes_a_short_file(tmp_path: Path, left: int) -> None:
    whole = open_files(tmp_path / "whole")
    whole.write_run("T", 0, 7, units(7, 2))
    files = open_files(tmp_path)
    path = files.path("T", 0, 0)
    path.parent.mkdir(parents=True)
    path.write_bytes(filler_units(7).tobytes()[:left])
    files.write_run("T", 0, 7, units(7, 2))
    assert row(files) == row(whole)


def test_allocation_end_grows_in_steps(tmp_path: Path) -> None:
    ends = [allocation_end(end, 6_000_000) for end in (1, 4096, 4097, 20_000, 262_144, 262_145, 5_999_999)]
    assert ends == [4096, 4096, 8192, 32_768, 262_144, 524_288, 6_000_000]
    assert allocation_end(1, 400) == 400
    files = open_files(tmp_path, file_bytes=6_000_000)
    for queue_id in range(3):
        files.write_run("T", queue_id, 0, units(0, 1))
    for queue_id in range(3):
        status = files.path("T", queue_id, 0).stat()
        assert status.st_size == 6_000_000
        assert status.st_blocks * 512 <= 8192


class NoRoomIO(StoreIO):
    """Fails allocations and records synced files."""

    def __init__(self) -> None:
        super().__init__()
        self.synced: list[str] = []

    def allocate(self, fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def sync(self, fd: int) -> None:
        self.synced.append(Path(self.path_of(fd)).name)
        super().sync(fd)


def test_sync_includes_a_file_without_room(tmp_path: Path) -> None:
    """The length of a file implies the fillers before its first unit."""
    io = NoRoomIO()
    files = open_files(tmp_path, io=io)
    with pytest.raises(OSError, match="No space left"):
        files.write_run("T", 0, 7, units(7, 2))
    files.sync()
    assert files.path("T", 0, 0).name in io.synced


class WritebackIO(StoreIO):
    """Records the ranges whose writeback is started."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[tuple[str, int]] = []

    def start_writeback(self, fd: int, offset: int, size: int) -> None:
        self.started.append((Path(self.path_of(fd)).name, size))
        super().start_writeback(fd, offset, size)


@pytest.mark.parametrize("sync_follows", [True, False])
def test_write_run_starts_writeback_of_full_file(sync_follows: bool, tmp_path: Path) -> None:
    io = WritebackIO()
    files = ConsumeQueueFiles(io, tmp_path, 400, write=True, sync_follows=sync_follows)
    files.write_run("T", 0, 0, units(0, 19))
    assert io.started == []
    files.write_run("T", 0, 19, units(19, 25))
    names = [f"{start:020d}" for start in (0, 400)]
    assert io.started == [(name, 400) for name in names if sync_follows]
    files.close()


def test_repair_run_does_not_read_own_new_files(tmp_path: Path) -> None:
    """Existing files are compared; reading new ones would load zeros into memory."""

    class NoReads(StoreIO):
        def pread(self, fd: int, size: int, offset: int) -> bytes:
            raise AssertionError(self.path_of(fd))

    files = ConsumeQueueFiles(NoReads(), tmp_path, 400, write=True)
    assert [files.repair_run("T", 0, first, units(first, 5)) for first in (5, 10, 15, 20)] == [5, 5, 5, 5]
    with pytest.raises(AssertionError):
        files.repair_run("T", 0, 24, units(24, 7))
    files.close()
    again = ConsumeQueueFiles(StoreIO(), tmp_path, 400, write=True)
    assert [again.repair_run("T", 0, first, units(first, 5)) for first in (5, 10, 15, 20, 25)] == [0, 0, 0, 0, 5]
    again.close()


def test_repair_run_replaces_impossible_delivery_times(tmp_path: Path) -> None:
    """A unit torn by a power loss may have the right record but an arbitrary time."""
    stored_ms, hour_ms, day_ms = 1_700_000_000_000, 3_600_000, 86_400_000
    expected = as_units(units(0, 7)).copy()
    expected["tags_code"] = stored_ms + hour_ms
    written = expected.copy()
    # Delays are whole seconds.
    impossible_times = [stored_ms + 42 * day_ms, stored_ms + 1, 196_298_010_517_775, -1]
    written["tags_code"][:6] = [stored_ms + 1_000, stored_ms + 39 * day_ms, *impossible_times]
    files = open_files(tmp_path)
    files.write_run(SCHEDULE_TOPIC, 2, 0, written.view(np.uint8))
    assert files.repair_run(SCHEDULE_TOPIC, 2, 0, expected.view(np.uint8)) == 4
    found = as_units(files.read_units(SCHEDULE_TOPIC, 2, 0, 7))["tags_code"].tolist()
    assert found == [*written["tags_code"][:2].tolist(), *[stored_ms + hour_ms] * 5]
    files.close()


def test_repair_run_replaces_invalid_extension_addresses(tmp_path: Path) -> None:
    """Half of all random numbers look like an extension address."""
    lowest, length = -(1 << 63), 100
    expected = as_units(units(0, 4))
    written = expected.copy()
    written["tags_code"] = [lowest, lowest + length - 1, lowest + length, -4_192_517_749_291_376_601]
    for folder, ends in (("without", 0), ("with", 2)):
        files = ConsumeQueueFiles(StoreIO(), tmp_path / folder / "consumequeue", 400, write=True)
        if ends:
            extension = tmp_path / folder / "consumequeue_ext/T/0/00000000000000000000"
            extension.parent.mkdir(parents=True)
            extension.write_bytes(bytes(length))
        files.write_run("T", 0, 0, written.view(np.uint8))
        assert files.repair_run("T", 0, 0, expected.view(np.uint8)) == 4 - ends
        found = as_units(files.read_units("T", 0, 0, 4))["tags_code"]
        assert found.tolist() == [*written["tags_code"][:ends].tolist(), *expected["tags_code"][ends:].tolist()]
        files.close()


def test_files_open_files_are_bounded(tmp_path: Path) -> None:
    files = open_files(tmp_path, open_max=3)
    for turn in range(3):
        for queue_id in range(20):
            files.write_run("T", queue_id, turn, units(turn, 1))
    assert len(open_below(tmp_path)) <= 3
    for queue_id in range(20):
        assert files.read_units("T", queue_id, 0, 9) == units(0, 3).tobytes().ljust(180, b"\0")
    files.close()
    assert open_below(tmp_path) == []


class CountingIO(StoreIO):
    """Counts calls that read a file's length or allocate space."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def size(self, fd: int) -> int:
        self.calls += 1
        return super().size(fd)

    def allocate(self, fd: int, offset: int, size: int) -> None:
        self.calls += 1
        super().allocate(fd, offset, size)


def test_files_reopened_file_is_not_measured_again(tmp_path: Path) -> None:
    io = CountingIO()
    files = open_files(tmp_path, io, open_max=2)
    for turn in range(3):
        for queue_id in range(9):
            files.write_run("T", queue_id, turn, units(turn, 1))
        assert io.calls == 18
    assert all(row(files, queue_id=number) == {0: units(0, 3).tobytes().ljust(400, b"\0")} for number in range(9))
    files.close()


def test_write_run_recreates_a_missing_file(tmp_path: Path) -> None:
    files = open_files(tmp_path, open_max=1)
    for queue_id in (0, 1):
        files.write_run("T", queue_id, 0, units(0, 2))
    files.path("T", 0, 0).unlink()
    files.write_run("T", 0, 2, units(2, 1))
    assert row(files) == {0: (filler_units(2).tobytes() + units(2, 1).tobytes()).ljust(400, b"\0")}


def test_files_remove_forgets_cached_lengths(tmp_path: Path) -> None:
    files = open_files(tmp_path, open_max=1)
    for queue_id in (0, 1):
        files.write_run("T", queue_id, 0, units(0, 2))
    files.remove("T", 0)
    path = files.path("T", 0, 0)
    path.parent.mkdir()
    path.write_bytes(b"")
    files.write_run("T", 0, 0, units(5, 1))
    assert row(files) == {0: units(5, 1).tobytes().ljust(400, b"\0")}


def test_write_run_new_generation_creates_new_file(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    files.write_run("T", 0, 0, units(0, 5), generation=1)
    files.path("T", 0, 0).unlink()
    files.write_run("T", 0, 0, units(9, 1), generation=2)
    assert row(files) == {0: units(9, 1).tobytes().ljust(400, b"\0")}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 70), st.integers(0, 70))
def test_read_units_returns_written_units(tmp_path_factory: pytest.TempPathFactory, first: int, count: int) -> None:
    files = open_files(tmp_path_factory.mktemp("queue"))
    files.write_run("T", 0, 0, units(0, 60))
    if count == 0 or first >= 60:
        return
    found = files.read_units("T", 0, first, count)
    written = units(0, 60).tobytes()
    assert found == written[20 * first : 20 * (first + count)]
    files.close()


@pytest.mark.parametrize("write", [False, True])
def test_read_units_folder_at_path_is_a_missing_file(tmp_path: Path, write: bool) -> None:
    files = open_files(tmp_path)
    files.write_run("T", 0, 0, units(0, 50))
    place = files.path("T", 0, FILE_BYTES)
    files.close()
    place.unlink()
    place.mkdir()
    reading = ConsumeQueueFiles(StoreIO(), tmp_path / "consumequeue", FILE_BYTES, write=write)
    assert reading.read_units("T", 0, 10, 30) == units(10, 10).tobytes()
    with pytest.raises(FileNotFoundError, match=str(place)):
        reading.read_units("T", 0, 20, 5)
    assert reading.read_units("T", 0, 40, 10) == units(40, 10).tobytes()
    reading.close()


def test_read_units_missing_file_raises(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    with pytest.raises(FileNotFoundError):
        files.read_units("T", 0, 0, 1)
    files.write_run("T", 0, 0, units(0, 45))
    files.path("T", 0, 0).unlink()
    reader = ConsumeQueueFiles(StoreIO(), tmp_path / "consumequeue", FILE_BYTES)
    with pytest.raises(FileNotFoundError):
        reader.read_units("T", 0, 5, 30)
    assert reader.read_units("T", 0, 20, 5) == units(20, 5).tobytes()


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 50), st.integers(0, 45), st.integers(0, 60), st.binary(max_size=30))
def test_cut_keeps_exactly_units_below_limit(
    tmp_path_factory: pytest.TempPathFactory, first: int, count: int, kept: int, noise: bytes
) -> None:
    """The cut also removes noise after the last unit, and keeps leading fillers."""
    files = open_files(tmp_path_factory.mktemp("queue"))
    last = first + count
    if count:
        files.write_run("T", 0, first, units(first, count))
        path = files.path("T", 0, files.starts("T", 0)[-1])
        place = 20 * last % FILE_BYTES
        if place:
            data = path.read_bytes()
            path.write_bytes((data[:place] + b"\x7f" * len(noise) + data[place + len(noise) :])[:FILE_BYTES])
    starts = files.starts("T", 0)
    extent = files.cut("T", 0, 100 * kept)
    if not count:
        assert extent.max_offset == 0
        return
    expected = max(first, min(kept, last))
    assert extent.max_offset == expected
    assert extent.last_physical_end == (100 * expected if expected > first else 0)
    data = b"".join(row(files).values())
    kept_bytes = 20 * expected - starts[0]
    whole = filler_units(max(0, first - starts[0] // 20)).tobytes() + units(first, count).tobytes()
    assert data[:kept_bytes] == whole[:kept_bytes]
    assert not data[kept_bytes:].strip(b"\0")
    assert all(len(file) == FILE_BYTES for file in row(files).values())
    again = files.cut("T", 0, 100 * kept)
    assert (again.max_offset, again.changed) == (extent.max_offset, False)
    if expected > first:
        assert files.extent("T", 0).max_offset == expected
    files.sync()
    files.close()


def test_write_run_after_cut_continues(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    files.write_run("T", 0, 0, units(0, 45))
    assert files.cut("T", 0, 2500).max_offset == 25
    files.write_run("T", 0, 25, units(25, 20))
    assert b"".join(row(files).values()) == units(0, 45).tobytes().ljust(1200, b"\0")


def test_cut_everything_keeps_the_first_file(tmp_path: Path) -> None:
    """The name of the first file preserves the queue's offset."""
    files = open_files(tmp_path)
    files.write_run("T", 0, 40, units(40, 45))
    extent = files.cut("T", 0, 0)
    assert (extent.first_offset, extent.max_offset, extent.changed) == (40, 40, True)
    assert row(files) == {800: bytes(400)}


def test_extent_of_many_units(tmp_path: Path) -> None:
    """10,000 units of records of 100 bytes."""
    files = open_files(tmp_path, file_bytes=20 * 3000)
    files.write_run("T", 3, 0, units(0, 10_000))
    extent = files.extent("T", 3)
    assert (extent.first_offset, extent.max_offset, extent.last_physical_end) == (0, 10_000, 1_000_000)
    assert files.extent("T", 4).max_offset == 0


# Queue folders


def test_queues_on_disk_returns_queues_and_strays(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    files.write_run("T", 0, 0, filler_units(1))
    files.write_run("%RETRY%g", 12, 0, filler_units(1))
    folder = tmp_path / "consumequeue"
    (folder / "notes.txt").write_text("stray")
    (folder / "T" / "x1").mkdir()
    (folder / "T" / "01").mkdir()
    (folder / "T" / "2147483648").mkdir()
    queues, strays = queues_on_disk(StoreIO(), folder)
    assert queues == [("%RETRY%g", 12), ("T", 0)]
    assert [path.name for path in strays] == ["01", "2147483648", "x1", "notes.txt"]
    assert queues_on_disk(StoreIO(), tmp_path / "none") == ([], [])


def test_adopted_file_bytes_ignores_a_short_file(tmp_path: Path) -> None:
    """A queue starting at offset 7, with fillers written before the length was set."""
    path = tmp_path / "consumequeue" / "T" / "0" / f"{0:020d}"
    path.parent.mkdir(parents=True)
    path.write_bytes(filler_units(7).tobytes())
    assert adopted_file_bytes(StoreIO(), tmp_path / "consumequeue", 400) == 400


def test_adopted_file_bytes_returns_a_uniform_other_size(tmp_path: Path) -> None:
    folder = tmp_path / "consumequeue"
    assert adopted_file_bytes(StoreIO(), folder, 6_000_000) == 6_000_000
    files = open_files(tmp_path)
    files.write_run("T", 0, 0, filler_units(50))
    assert adopted_file_bytes(StoreIO(), folder, 6_000_000) == FILE_BYTES
    files.path("T", 1, 0).parent.mkdir()
    files.path("T", 1, 0).write_bytes(b"")
    assert adopted_file_bytes(StoreIO(), folder, 6_000_000) == FILE_BYTES
    files.path("T", 1, 0).write_bytes(bytes(800))
    assert adopted_file_bytes(StoreIO(), folder, FILE_BYTES) == FILE_BYTES
    assert adopted_file_bytes(StoreIO(), folder, 6_000_000) == FILE_BYTES
    with pytest.raises(CorruptStoreError, match="expected 400"):
        files.write_run("T", 1, 0, filler_units(1))
