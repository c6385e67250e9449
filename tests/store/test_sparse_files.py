"""Reads preserve holes of sparse files: on a full tmpfs filling a mapped hole raises SIGBUS."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mqproc.errors import DiskFullError
from mqproc.io.store_io import StoreIO
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.store.read.reader import StoreReader
from tests.golden.fixtures import load_fixture
from tests.grafana.scenarios import can_mount
from tests.support.command_line import call
from tests.support.group import SMALL, Group
from tests.support.store_builders import Engine

MIB = 1 << 20
TMPFS = Path("/dev/shm")


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    if not TMPFS.is_dir() or not os.access(TMPFS, os.W_OK):
        pytest.skip("needs /dev/shm")
    with tempfile.TemporaryDirectory(dir=TMPFS) as folder:
        yield Path(folder)


def write_with_holes(path: Path) -> bytes:
    with path.open("wb") as file:
        for place in (0, MIB, 3 * MIB - 5):
            file.seek(place)
            file.write(b"%d" % place)
        file.truncate(4 * MIB)
    return path.read_bytes()


@pytest.mark.parametrize("size", [1, MIB, 2 * MIB, 4 * MIB])
def test_map_without_filling_holes_keeps_holes(tmpfs: Path, tmp_path: Path, size: int) -> None:
    io = StoreIO()
    for path in (tmpfs / "file", tmp_path / "file"):
        data = write_with_holes(path)
        before = io.allocated_of(path)
        fd = io.open(path, write=True)
        mapping = io.map_without_filling_holes(fd, size)
        assert mapping[:] == as_kernel_array(mapping).tobytes() == data[:size]
        io.pwrite(fd, b"later", 1)
        io.close(fd)
        io.release_pages(mapping, 0, size)
        assert mapping[:] == (data[:1] + b"later" + data[6:])[:size]
        assert path.parent != tmpfs or io.allocated_of(path) == before < size + MIB


def test_map_without_filling_holes_many_extents_are_mapped(tmpfs: Path) -> None:
    io, path = StoreIO(), tmpfs / "file"
    with path.open("wb") as file:
        for place in range(0, 8 * MIB, 2 * mmap.PAGESIZE):
            file.seek(place)
            file.write(b"%d" % place)
        file.truncate(8 * MIB)
    fd = io.open(path)
    assert io.map_without_filling_holes(fd, 8 * MIB)[:] == path.read_bytes()
    io.close(fd)


@pytest.fixture
def sparse_store(make_group: Callable[..., Group], tmpfs: Path) -> Path:
    """Build a store whose index file has few items, and holes among its slots."""
    group = make_group()
    with group.client() as client:
        client.send("orders", b"one", keys="order-1")
        client.wait_dispatched()
    assert group.stop() == 0
    subprocess.run(["cp", "-a", "--sparse=always", group.store, tmpfs / "store"], check=True)
    return tmpfs / "store"


def blocks_of(store: Path, folder: str) -> dict[str, int]:
    return {path.name: path.stat().st_blocks for path in (store / folder).iterdir()}


@pytest.mark.parametrize("command", [("verify",), ("repair",), ("recover", "--dry-run")])
def test_commands_keep_holes_of_index_files(sparse_store: Path, command: tuple[str, ...]) -> None:
    before = blocks_of(sparse_store, "index")
    assert max(before.values()) * 512 < 4 * SMALL["max_hash_slot_num"]
    assert call("store", *command, sparse_store).code == 0
    assert blocks_of(sparse_store, "index") == before


@pytest.fixture
def holed_store(tmpfs: Path) -> Path:
    """Build a store of RocketMQ with holes in its log: a page and a whole segment."""
    unpacked = load_fixture("a_basic", tmpfs / "unpacked").store
    store = Path(shutil.copytree(unpacked, tmpfs / "holed"))
    first, second, third, *_others = sorted((store / "commitlog").iterdir())
    for path, kept in ((second, first.stat().st_size - mmap.PAGESIZE), (third, 0)):
        data = path.read_bytes()
        path.write_bytes(data[:kept])
        os.truncate(path, len(data))
    return store


def count_records(store: Path) -> int:
    with StoreReader(store) as reader:
        return sum(1 for _record in reader.scan())


@pytest.mark.parametrize(
    "command",
    [
        lambda store: call("store", "verify", store, "--jobs", "1").code == 1,
        lambda store: call("store", "verify", store, "--jobs", "2").code == 1,
        lambda store: call("store", "repair", store, "--detailed-exitcode").code == 2,
        lambda store: call("store", "recover", "--dry-run", store).code == 0,
        lambda store: call("store", "info", store).code == 0,
        lambda store: call("store", "dump", store).code == 1,
        lambda store: call("store", "dump", *sorted((store / "commitlog").iterdir())[2:3]).code == 0,
        lambda store: (
            call("store", "export", store, "--topic", "OrderTopic", "--to", store.parent / "exported.jsonl").code == 1
        ),
        lambda store: call("store", "retention", "--dry-run", "--store", store).code == 0,
        lambda store: count_records(store) > 100,
    ],
)
def test_commands_keep_holes_of_the_log(holed_store: Path, command: Callable[[Path], bool]) -> None:
    before = blocks_of(holed_store, "commitlog")
    assert sorted(before.values())[0] == 0
    assert command(holed_store)
    assert blocks_of(holed_store, "commitlog") == before


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for the first part of a segment, and a file that can make room for more."""
    if not can_mount(tmp_path):
        pytest.skip("a disk of one's own needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={40 * MIB}", "mqproc-test", disk], check=True)
    try:
        (disk / "ballast").write_bytes(bytes(16 * MIB))
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def test_full_disk_within_a_segment_refuses_sends(full_disk: Path) -> None:
    """The log reads as zeros after its end, and continues there when there is room again."""
    engine = Engine(full_disk / "store", mapped_file_size_commit_log=64 * MIB, max_message_size=MIB)
    sent = 0

    def fill() -> None:
        nonlocal sent
        for _ in range(100):
            engine.append("T", [b"x" * 1_000_000])
            sent += 1

    with pytest.raises(DiskFullError, match="no room for the messages"):
        fill()
    assert 16 < sent < 26
    with engine.segments.path(0).open("rb") as log:
        log.seek(engine.written)
        assert not any(log.read())
    (full_disk / "ballast").unlink()
    before = sent
    with pytest.raises(DiskFullError):
        fill()
    assert sent > before + 10
