"""A dry run reads back its writes, leaves the files unchanged and lists the exact changes."""

from __future__ import annotations

import errno
import os
import random
import tempfile
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import pytest

from mqproc.errors import StoreAccessError
from mqproc.io.store_io import StoreIO
from mqproc.store.recovery.dry_run import Change, DryRunIO


@pytest.fixture
def dry(tmp_path: Path) -> Iterator[DryRunIO]:
    with DryRunIO(tmp_path) as io:
        yield io


def test_written_file_changes_in_dry_run_only(dry: DryRunIO, tmp_path: Path) -> None:
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


def test_writable_map_shows_writes(dry: DryRunIO, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    fd = dry.open(path, write=True)
    mapping = dry.map(fd, 8192, write=True)
    mapping[4000] = 7
    dry.release_pages(mapping, 0, 8192)
    assert dry.pread(fd, 1, 4000) == b"\x07"
    assert path.read_bytes() == bytes(8192)


def test_create_grow_truncate_rename_unlink(dry: DryRunIO, tmp_path: Path) -> None:
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
    reported = {change.path.name: (change.what, change.was, change.size) for change in dry.changes()}
    assert reported == {
        "made": ("made", 0, 120),
        "grown": ("changed", 10, 15),
        "cut": ("changed", 10, 3),
        "moved": ("moved", 10, 10),
        "removed": ("removed", 10, 0),
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut", "grown", "moved", "removed", "same"]
    assert {path.read_bytes() for path in tmp_path.iterdir()} == {b"0123456789"}


def test_removed_folder_can_be_recreated(dry: DryRunIO, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"x")
    dry.remove_folder(tmp_path / "folder")
    assert not dry.exists(tmp_path / "folder" / "file")
    assert dry.names(tmp_path) == dry.names(tmp_path / "folder") == []
    assert [(change.path.name, change.what, change.was) for change in dry.changes()] == [("file", "removed", 1)]
    assert (tmp_path / "folder" / "file").read_bytes() == b"x"


def test_file_removed_before_its_folder_is_listed_once(dry: DryRunIO, tmp_path: Path) -> None:
    """Its copy keeps the name, so the file must be listed only once."""
    files = [tmp_path / "topic" / queue / "file" for queue in "01"]
    for file in files:
        file.parent.mkdir(parents=True)
        file.write_bytes(b"x")
    dry.unlink(files[0])
    dry.remove_folder(files[1].parent)
    dry.remove_folder(tmp_path / "topic")
    assert [(change.path, change.what) for change in dry.changes()] == [(file, "removed") for file in files]


def test_rename_folder_moves_its_files(dry: DryRunIO, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"x")
    dry.rename(tmp_path / "folder", tmp_path / "aside")
    assert dry.names(tmp_path) == ["aside"]
    (change,) = dry.changes()
    assert (change.path, change.what, change.target) == (tmp_path / "folder", "moved", tmp_path / "aside")


def test_new_folder_is_on_the_stores_disk(dry: DryRunIO, tmp_path: Path) -> None:
    made = tmp_path / "made" / "inside"
    dry.make_folder(made)
    used, free = dry.disk_usage(made)
    assert used > 0
    assert free > 0
    assert not made.exists()


def test_changes_tell_writes_in_place_from_replacements(dry: DryRunIO, tmp_path: Path) -> None:
    """A hard link keeps the bytes of a replaced file; a file written in place needs a copy."""
    for name in ("stored", "replaced", "removed", "stored then removed", "recreated"):
        (tmp_path / name).write_bytes(b"0123456789")
    for name in ("stored", "stored then removed"):
        fd = dry.open(tmp_path / name, write=True)
        dry.pwrite(fd, b"x", 3)
    dry.write_file_atomically(tmp_path / "replaced", b"another")
    for name in ("removed", "stored then removed", "recreated"):
        dry.unlink(tmp_path / name)
    dry.pwrite(dry.open(tmp_path / "recreated", write=True, create=True), b"new", 0)
    assert {change.path.name: change.in_place for change in dry.changes()} == {
        "stored": True,
        "replaced": False,
        "removed": False,
        "stored then removed": True,
        "recreated": False,
    }


def test_no_room_for_dry_run_is_not_a_full_disk(dry: DryRunIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recovery continues on a full disk; a full disk of the dry run must not look the same."""
    fd = dry.open(tmp_path / "made", write=True, create=True)
    monkeypatch.setattr(tempfile, "tempdir", "/no/room")

    def no_room() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", no_room)
    with pytest.raises(StoreAccessError, match=r"/no/room: No space left on device: .* set TMPDIR to another folder"):
        dry.pwrite(fd, b"x", 0)


FILES = [Path(name) for name in ("a", "b", "c", "d", "folder/e", "folder/f", "other/g")]


def test_random_calls_equal_those_of_store_io(tmp_path: Path) -> None:
    """Model test against a StoreIO on a copy: same files, and all changes are listed."""
    rng = random.Random(6)
    for number in range(60):
        roots = [tmp_path / f"{number}-{kind}" for kind in ("dry", "real", "before")]
        for root in roots:
            for path in FILES[:-2]:
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_bytes(random.Random(str(path)).randbytes(30_000))
        real = StoreIO()
        with DryRunIO(roots[0]) as dry:
            for _call in range(30):
                seed = rng.randrange(1 << 30)
                for io, root in ((dry, roots[0]), (real, roots[1])):
                    one_call(io, root, random.Random(seed))
            there = [path for path in FILES if (roots[1] / path).exists()]
            for path in FILES:
                assert dry.exists(roots[0] / path) == (path in there), (number, path)
            for path in there:
                assert dry.read_file(roots[0] / path) == real.read_file(roots[1] / path), (number, path)
                assert dry.size_of(roots[0] / path) == real.size_of(roots[1] / path)
                assert bytes_by_holes(dry, roots[0] / path) == real.read_file(roots[1] / path)
            assert_changes_are_reported(dry.changes(), *roots)
        assert contents(roots[0]) == contents(roots[2])


def contents(root: Path) -> dict[Path, bytes]:
    return {path.relative_to(root): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def bytes_by_holes(io: StoreIO, path: Path) -> bytes:
    """A file's bytes without its holes."""
    fd = io.open(path)
    found = bytearray(io.size(fd))
    at = 0
    while (data := io.next_data(fd, at)) is not None:
        at = io.next_hole(fd, data)
        assert data < at <= len(found)
        found[data:at] = io.pread(fd, at - data, data)
    io.close(fd)
    return bytes(found)


def assert_changes_are_reported(changes: list[Change], dry: Path, real: Path, before: Path) -> None:
    """The listed changes are exactly the changes of the files."""
    was, now = contents(before), contents(real)
    reported = {change.path.relative_to(dry): change for change in changes if change.what != "moved"}
    moved = {change.path.relative_to(dry): change for change in changes if change.what == "moved"}
    targets = {change.target.relative_to(dry) for change in moved.values() if change.target is not None}
    for path in FILES:
        what = reported[path].what if path in reported else None
        if path in was and path in now:
            assert what == (None if was[path] == now[path] else "changed"), path
        elif path in was:
            assert what == (None if path in moved else "removed"), path
        elif path in now:
            assert what == (None if path in targets else "made"), path
        else:
            assert what is None, path
    for path, change in reported.items():
        old, new = was.get(path, b""), now.get(path, b"")
        assert (change.was, change.size) == (len(old), len(new))
        if change.what == "changed":
            differing = [place for place, (one, other) in enumerate(zip_longest(old, new, fillvalue=0)) if one != other]
            assert change.differing == len(differing)
            assert all(change.first <= place < change.stop for place in differing)


def one_call(io: StoreIO, root: Path, rng: random.Random) -> None:
    path, other = (root / rng.choice(FILES) for _ in range(2))
    calls = ("pwrite", "zero", "allocate", "set_size", "unlink", "rename", "replace", "map", "link", "remove_folder")
    kind = rng.choice(calls)
    if kind == "replace":
        io.make_folder(path.parent)
        io.write_file_atomically(path, rng.randbytes(rng.randrange(3000)))
        return
    if kind == "remove_folder":
        if path.parent != root:
            io.remove_folder(path.parent)
        return
    if not io.exists(path):
        return
    if kind == "unlink":
        io.unlink(path)
    elif kind == "rename":
        if path != other:
            io.make_folder(other.parent)
            io.rename(path, other)
    elif kind == "link":
        if not io.exists(other):
            io.make_folder(other.parent)
            # Later writes to one would change the other; a kept link is never written to.
            io.keep_link(path, other)
            io.unlink(path)
    else:
        fd = io.open(path, write=True)
        at, size = rng.randrange(60_000), rng.randrange(1, 12_000)
        if kind == "pwrite":
            io.pwrite(fd, rng.randbytes(size), at)
        elif kind == "zero":
            io.zero(fd, at, size)
        elif kind == "allocate":
            io.allocate(fd, at, size)
        elif kind == "set_size":
            io.set_size(fd, at)
        elif io.size(fd):
            wanted = rng.choice((io.size(fd), max(1, io.size(fd) // 2)))
            mapping = io.map(fd, wanted, write=True)
            assert len(mapping) == wanted
            mapping[wanted // 2] = rng.randrange(256)
        io.close(fd)


def test_truncate_of_sparse_file_does_not_read_holes(tmp_path: Path) -> None:
    """Reading a terabyte of holes would take hours."""
    path, size = tmp_path / "file", 1 << 40
    path.write_bytes(b"x" * 5000)
    os.truncate(path, size)
    with path.open("r+b") as file:
        file.seek(size - 7)
        file.write(b"end")
    with DryRunIO(tmp_path) as dry:
        fd = dry.open(path, write=True)
        dry.set_size(fd, 4000)
        dry.close(fd)
        (change,) = dry.changes()
    assert (change.what, change.was, change.size) == ("changed", size, 4000)
    assert (change.first, change.stop, change.differing) == (4000, size, 1003)
