"""What is written in a dry run is read back in it, and the files stay as they were; changes are told exactly."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqproc.io import StoreIO
from mqproc.store.recovery.dry_run_io import DryRunIO


@pytest.fixture
def dry(tmp_path: Path) -> Iterator[DryRunIO]:
    io = DryRunIO(tmp_path)
    yield io
    io.close_all()


def test_a_changed_file_is_changed_for_this_process_only(dry: DryRunIO, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)) * 100)
    fd = dry.open(path, write=True)
    before = dry.map(dry.open(path), 10_000)
    dry.pwrite(fd, b"changed", 5000)
    assert dry.pread(fd, 9, 4999) == bytes([99]) + b"changed" + bytes([7])
    assert dry.read_file(path)[5000:5007] == b"changed"
    assert before[5000:5007] == b"changed"
    assert path.read_bytes() == bytes(range(100)) * 100
    dry.zero(fd, 0, 10)
    dry.sync(fd)
    change = dry.changes()[0]
    assert (change.path, change.what, change.was, change.size) == (path, "changed", 10_000, 10_000)
    assert (change.first, change.stop, change.differing) == (1, 5007, 9 + 7)


def test_a_map_for_writing_shows_what_is_stored(dry: DryRunIO, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    fd = dry.open(path, write=True)
    mapping = dry.map(fd, 8192, write=True)
    mapping[4000] = 7
    dry.unmap_pages(mapping, 0, 8192)
    assert dry.pread(fd, 1, 4000) == b"\x07"
    assert path.read_bytes() == bytes(8192)


def test_files_are_made_grown_cut_moved_and_removed(dry: DryRunIO, tmp_path: Path) -> None:
    for name in ("grown", "cut", "moved", "removed", "same"):
        (tmp_path / name).write_bytes(b"0123456789")
    with pytest.raises(FileNotFoundError):
        dry.open(tmp_path / "folder" / "made", write=True, create=True)
    dry.make_folder(tmp_path / "folder")
    made = dry.open(tmp_path / "folder" / "made", write=True, create=True)
    dry.set_size(made, 100)
    dry.pwrite(made, b"x", 50)
    dry.allocate(made, 100, 20)
    grown, cut = (dry.open(tmp_path / name, write=True) for name in ("grown", "cut"))
    dry.allocate(grown, 0, 15)
    dry.set_size(cut, 3)
    dry.rename(tmp_path / "moved", tmp_path / "folder" / "moved")
    dry.unlink(tmp_path / "removed")
    dry.write_file_atomically(tmp_path / "same", b"0123456789")
    assert dry.names(tmp_path) == ["cut", "folder", "grown", "same"]
    assert dry.names(tmp_path / "folder") == ["made", "moved"]
    assert dry.read_file(tmp_path / "grown") == b"0123456789" + bytes(5)
    assert (dry.size(cut), dry.read_file(tmp_path / "cut")) == (3, b"012")
    assert dry.read_file(tmp_path / "folder" / "moved") == b"0123456789"
    assert (dry.exists(tmp_path / "removed"), dry.entry(tmp_path / "moved")) == (False, None)
    with pytest.raises(FileNotFoundError):
        dry.open(tmp_path / "removed")
    with pytest.raises(FileNotFoundError):
        dry.size_of(tmp_path / "moved")
    told = {change.path.name: (change.what, change.was, change.size) for change in dry.changes()}
    assert told == {
        "made": ("made", 0, 120),
        "grown": ("changed", 10, 15),
        "cut": ("changed", 10, 3),
        "moved": ("moved", 10, 10),
        "removed": ("removed", 10, 0),
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut", "grown", "moved", "removed", "same"]
    assert {path.read_bytes() for path in tmp_path.iterdir()} == {b"0123456789"}


def test_a_removed_folder_is_gone_and_can_be_made_again(dry: DryRunIO, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"x")
    dry.remove_folder(tmp_path / "folder")
    assert not dry.exists(tmp_path / "folder" / "file")
    assert dry.names(tmp_path) == dry.names(tmp_path / "folder") == []
    assert (tmp_path / "folder" / "file").read_bytes() == b"x"


def test_random_calls_do_what_they_do_for_real(tmp_path: Path) -> None:
    """A model: the same calls on a copy by a real StoreIO; afterwards both read alike."""
    rng = random.Random(6)
    for number in range(25):
        roots = [tmp_path / f"{number}-{kind}" for kind in ("dry", "real")]
        for root in roots:
            root.mkdir()
            for name in "abc":
                (root / name).write_bytes(random.Random(name).randbytes(9000))
        dry, real = DryRunIO(roots[0]), StoreIO()
        for _call in range(30):
            seed = rng.randrange(1 << 30)
            for io, root in ((dry, roots[0]), (real, roots[1])):
                one_call(io, root, random.Random(seed))
        assert dry.names(roots[0]) == real.names(roots[1])
        for name in real.names(roots[1]):
            assert dry.read_file(roots[0] / name) == real.read_file(roots[1] / name), (number, name)
            assert dry.size_of(roots[0] / name) == real.size_of(roots[1] / name)
        for name in "abc":
            assert (roots[0] / name).read_bytes() == random.Random(name).randbytes(9000)
        dry.close_all()


def one_call(io: StoreIO, root: Path, rng: random.Random) -> None:
    path, other = root / rng.choice("abcd"), root / rng.choice("abcde")
    kind = rng.choice(("pwrite", "zero", "allocate", "set_size", "unlink", "rename", "replace", "map"))
    if kind == "replace":
        io.write_file_atomically(path, rng.randbytes(rng.randrange(3000)))
        return
    if not io.exists(path):
        return
    if kind == "unlink":
        io.unlink(path)
    elif kind == "rename":
        if path != other:
            io.rename(path, other)
    else:
        fd = io.open(path, write=True)
        at, size = rng.randrange(9000), rng.randrange(1, 5000)
        if kind == "pwrite":
            io.pwrite(fd, rng.randbytes(size), at)
        elif kind == "zero":
            io.zero(fd, at, size)
        elif kind == "allocate":
            io.allocate(fd, at, size)
        elif kind == "set_size":
            io.set_size(fd, at)
        elif io.size(fd):
            mapping = io.map(fd, io.size(fd), write=True)
            mapping[io.size(fd) // 2] = rng.randrange(256)
        io.close(fd)
