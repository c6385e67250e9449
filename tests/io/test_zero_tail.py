"""Bytes after the valid part of a file are found and zeroed without reading holes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mqproc.io.store_io import StoreIO, dirty_end, zero_tail

MIB = 1 << 20
SIZE = 32 * MIB


class ReadingIO(StoreIO):
    """Counts read bytes."""

    read_bytes = 0

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        self.read_bytes += size
        return super().pread(fd, size, offset)


@pytest.fixture
def file(tmp_path: Path) -> int:
    """Allocate a file and write its first 100 bytes."""
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, SIZE)
    os.pwrite(fd, b"x" * 100, 0)
    os.fsync(fd)
    return fd


def test_dirty_end_is_after_the_last_nonzero_byte(file: int) -> None:
    assert dirty_end(StoreIO(), file, 100) == 100
    for place in (5000, 3 * MIB, SIZE - 1):
        os.pwrite(file, b"y", place)
        assert dirty_end(StoreIO(), file, 100) == place + 1
    os.pwrite(file, bytes(MIB), SIZE - MIB)
    assert dirty_end(StoreIO(), file, 100) == 3 * MIB + 1


def test_zero_tail_zeros_dirty_bytes_once(file: int) -> None:
    os.pwrite(file, b"y" * 3 * MIB, 4 * MIB)
    assert zero_tail(StoreIO(), file, 100) == 7 * MIB - 100
    assert os.pread(file, SIZE, 0) == b"x" * 100 + bytes(SIZE - 100)
    assert zero_tail(StoreIO(), file, 100) == 0


def test_dirty_end_does_not_read_clean_cached_pages(file: int) -> None:
    """SEEK_DATA reports cached pages of allocated space as data."""
    os.pread(file, SIZE, 0)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    if os.lseek(file, MIB, os.SEEK_HOLE) != MIB:
        pytest.skip("this file system does not report written ranges, or keeps its pages")
    os.pread(file, SIZE, 0)
    if os.lseek(file, MIB, os.SEEK_HOLE) == MIB:
        pytest.skip("this file system does not report cached pages as data")
    io = ReadingIO()
    assert dirty_end(io, file, 100) == 100
    assert io.read_bytes <= 4 * MIB
