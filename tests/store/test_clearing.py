"""What lies behind the valid part of a file is found and zeroed, without reading what was never written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mqproc.io.store_io import StoreIO
from mqproc.store.zero_tail import dirty_end, zero_tail

MIB = 1 << 20
SIZE = 32 * MIB


class ReadingIO(StoreIO):
    """Counts the bytes that are read."""

    read_bytes = 0

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        self.read_bytes += size
        return super().pread(fd, size, offset)


@pytest.fixture
def file(tmp_path: Path) -> int:
    """An allocated file with 100 written bytes at its begin."""
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, SIZE)
    os.pwrite(fd, b"x" * 100, 0)
    os.fsync(fd)
    return fd


def test_the_last_byte_that_is_not_zero_ends_it(file: int) -> None:
    assert dirty_end(StoreIO(), file, 100) == 100
    for place in (5000, 3 * MIB, SIZE - 1):
        os.pwrite(file, b"y", place)
        assert dirty_end(StoreIO(), file, 100) == place + 1
    os.pwrite(file, bytes(MIB), SIZE - MIB)
    assert dirty_end(StoreIO(), file, 100) == 3 * MIB + 1


def test_what_is_there_becomes_zeros_and_the_second_time_nothing_is(file: int) -> None:
    os.pwrite(file, b"y" * 3 * MIB, 4 * MIB)
    assert zero_tail(StoreIO(), file, 100) == 7 * MIB - 100
    assert os.pread(file, SIZE, 0) == b"x" * 100 + bytes(SIZE - 100)
    assert zero_tail(StoreIO(), file, 100) == 0


def test_allocated_space_that_somebody_has_read_is_not_read_again(file: int) -> None:
    """Its pages are in memory then, and count as written."""
    os.pread(file, SIZE, 0)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    if os.lseek(file, MIB, os.SEEK_HOLE) != MIB:
        pytest.skip("this file system does not tell what was written, or keeps its pages")
    os.pread(file, SIZE, 0)
    if os.lseek(file, MIB, os.SEEK_HOLE) == MIB:
        pytest.skip("this file system does not count pages in memory")
    io = ReadingIO()
    assert dirty_end(io, file, 100) == 100
    assert io.read_bytes <= 4 * MIB
