"""Removal of deleted files: unlinked at once, truncated in steps, and readable while open."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mqproc.io.store_io import StoreIO
from mqproc.store.retention.delete import PATIENCE_NS, STEP_BYTES, DeletedFiles
from mqproc.util.units import MIB
from tests.support.processes import open_below

SIZE = 2 * STEP_BYTES + 3 * MIB


class ShorteningIO(StoreIO):
    """Records the lengths to which files are set."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def set_size(self, fd: int, size: int) -> None:
        self.sizes.append(size)
        super().set_size(fd, size)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, SIZE)
    for offset in range(0, SIZE, MIB):
        os.pwrite(fd, b"kept", offset)
    os.fsync(fd)
    os.close(fd)
    return path


def steps(deleted: DeletedFiles, now_ns: int = 0) -> int:
    count = 0
    while deleted.step(now_ns):
        count += 1
    return count


def test_deleted_files_large_file_is_truncated_in_steps(path: Path) -> None:
    io = ShorteningIO()
    deleted = DeletedFiles(io)
    assert deleted.delete(path, 0) >= SIZE
    assert not path.exists()
    assert deleted.pending_bytes == SIZE
    assert steps(deleted) == 3 + 3
    assert io.sizes == [SIZE - STEP_BYTES, SIZE - 2 * STEP_BYTES, 0]
    assert deleted.pending_bytes == 0
    assert open_below(path.parent) == []


def test_deleted_files_small_file_is_removed_at_once(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.write_bytes(b"x" * 5000)
    deleted = DeletedFiles(StoreIO())
    assert deleted.delete(small, 0) == 8192
    assert (deleted.pending_bytes, steps(deleted), small.exists()) == (0, 0, False)


def test_deleted_files_missing_file_is_ignored(tmp_path: Path) -> None:
    assert DeletedFiles(StoreIO()).delete(tmp_path / "none", 0) == 0


@pytest.mark.parametrize("kind", ["map", "descriptor"])
def test_deleted_files_open_in_another_process_is_not_truncated(path: Path, kind: str) -> None:
    reader = subprocess.Popen(
        [sys.executable, "-c", _READER, str(path), kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert reader.stdout is not None
    assert reader.stdin is not None
    assert reader.stdout.readline() == "open\n"
    io = ShorteningIO()
    deleted = DeletedFiles(io)
    deleted.delete(path, 0)
    # Pages are dropped from the cache, but the file is not truncated.
    assert steps(deleted) == 3
    assert (io.sizes, deleted.pending_bytes) == ([], SIZE)
    reader.stdin.write("read\n")
    reader.stdin.flush()
    assert reader.stdout.readline() == f"{SIZE // MIB}\n"
    assert reader.wait(10) == 0
    assert steps(deleted) == 3
    assert deleted.pending_bytes == 0
    reader.stdout.close()
    reader.stdin.close()


_READER = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
if sys.argv[2] == "map":
    data = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
    os.close(fd)
print("open", flush=True)
sys.stdin.readline()
step = 1 << 20
size = len(data) if sys.argv[2] == "map" else os.fstat(fd).st_size
at = (lambda n: data[n : n + 4]) if sys.argv[2] == "map" else (lambda n: os.pread(fd, 4, n))
print(sum(at(n) == b"kept" for n in range(0, size, step)), flush=True)
"""


def test_deleted_files_hard_linked_file_is_never_truncated(path: Path) -> None:
    """A backup of hard links keeps the data that retention deletes."""
    copy = path.with_name("backup")
    os.link(path, copy)
    io = ShorteningIO()
    deleted = DeletedFiles(io)
    deleted.delete(path, 0)
    steps(deleted)
    assert io.sizes == []
    # It is dropped after some time: its space belongs to the other name.
    steps(deleted, PATIENCE_NS + 1)
    assert (deleted.pending_bytes, copy.stat().st_size) == (0, SIZE)
    assert copy.read_bytes()[:4] == b"kept"


def test_deleted_files_file_in_use_does_not_block_the_next(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(bytes(SIZE))
    fd = os.open(path, os.O_RDONLY)
    mapping = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
    os.close(fd)
    deleted = DeletedFiles(StoreIO())
    deleted.delete(path, 0)
    deleted.delete(other, 0)
    assert steps(deleted) == 3 + 3 + 3
    assert deleted.pending_bytes == SIZE
    assert mapping[:4] == b"kept"
    mapping.close()
    assert steps(deleted) == 3
    assert deleted.pending_bytes == 0


def test_deleted_files_close_releases_the_rest(path: Path) -> None:
    deleted = DeletedFiles(StoreIO())
    deleted.delete(path, 0)
    deleted.step(0)
    deleted.close()
    assert (deleted.pending_bytes, open_below(path.parent)) == (0, [])


def test_deleted_files_failed_unlink_closes_the_file(path: Path) -> None:
    class StubbornIO(StoreIO):
        def unlink(self, path: Path) -> None:
            raise PermissionError(1, "Operation not permitted", str(path))

    deleted = DeletedFiles(StubbornIO())
    with pytest.raises(PermissionError):
        deleted.delete(path, 0)
    assert (open_below(path.parent), deleted.pending_bytes, path.stat().st_size) == ([], 0, SIZE)
