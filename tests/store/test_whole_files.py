"""Files that are read whole: on tmpfs their holes stay holes, since without room a read of a mapped one is fatal."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mqproc.io import StoreIO
from mqproc.store.whole_files import view_of
from tests.cli.calling import call
from tests.conftest import SMALL, Group

MIB = 1 << 20
TMPFS = Path("/dev/shm")


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    if not TMPFS.is_dir() or not os.access(TMPFS, os.W_OK):
        pytest.skip("needs /dev/shm")
    with tempfile.TemporaryDirectory(dir=TMPFS) as folder:
        yield Path(folder)


def _with_holes(path: Path) -> bytes:
    with path.open("wb") as file:
        for place in (0, MIB, 3 * MIB - 5):
            file.seek(place)
            file.write(b"%d" % place)
        file.truncate(4 * MIB)
    return path.read_bytes()


@pytest.mark.parametrize("size", [1, MIB, 2 * MIB, 4 * MIB])
def test_a_view_has_the_files_bytes_and_leaves_its_holes(tmpfs: Path, tmp_path: Path, size: int) -> None:
    io = StoreIO()
    for path in (tmpfs / "file", tmp_path / "file"):
        data = _with_holes(path)
        before = io.allocated_of(path)
        fd = io.open(path)
        assert view_of(io, fd, size).tobytes() == data[:size]
        io.close(fd)
        assert path.parent != tmpfs or io.allocated_of(path) == before < size + MIB


@pytest.fixture
def sparse_store(make_group: Callable[..., Group], tmpfs: Path) -> Path:
    """A store whose index file has a few items, among slots that are holes."""
    group = make_group()
    with group.client() as client:
        client.send("orders", b"one", keys="order-1")
        client.wait_dispatched()
    assert group.stop() == 0
    subprocess.run(["cp", "-a", "--sparse=always", group.store, tmpfs / "store"], check=True)
    return tmpfs / "store"


def _blocks(store: Path) -> dict[str, int]:
    return {path.name: path.stat().st_blocks for path in (store / "index").iterdir()}


@pytest.mark.parametrize("command", [("verify",), ("repair",), ("recover", "--dry-run")])
def test_tools_leave_the_holes_of_index_files(sparse_store: Path, command: tuple[str, ...]) -> None:
    before = _blocks(sparse_store)
    assert max(before.values()) * 512 < 4 * SMALL["max_hash_slot_num"]
    assert call("store", *command, sparse_store).code == 0
    assert _blocks(sparse_store) == before
