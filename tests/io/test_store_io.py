"""StoreIO: failed syncs differ from other errors, and advice may be refused."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from mqproc.io import store_io as storage
from mqproc.io.store_io import FailedSyncError, StoreIO
from tests.support.processes import LARGE_PAGES, large_page_ranges


def fail(fd: int) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.fixture
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel whose syncs fail."""
    monkeypatch.setattr(os, "fsync", fail)
    monkeypatch.setattr(os, "fdatasync", fail)


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b'{"a": "b"}', b'{"a\xf6": 1}', b'["\xf6"]', b"\xff\xfe", None])
def test_read_json_invalid_file_raises_one_error(tmp_path: Path, text: bytes | None) -> None:
    file = tmp_path / "file.json"
    with pytest.raises(FileNotFoundError):
        StoreIO().read_json(file, dict[str, int])
    file.mkdir() if text is None else file.write_bytes(text)
    with pytest.raises(msgspec.MsgspecError):
        StoreIO().read_json(file, dict[str, int])


@pytest.mark.usefixtures("no_sync")
@pytest.mark.parametrize("call", ["sync", "sync_folder", "write_file_atomically", "rename"])
def test_failed_sync_names_the_file(tmp_path: Path, call: str) -> None:
    io, file = StoreIO(), tmp_path / "file"
    file.write_bytes(b"")
    fd = io.open(file, write=True)
    calls: dict[str, tuple[Callable[[], None], Path]] = {
        "sync": (lambda: io.sync(fd), file),
        "sync_folder": (lambda: io.sync_folder(tmp_path), tmp_path),
        "write_file_atomically": (lambda: io.write_file_atomically(file, b"x"), tmp_path / "file.tmp"),
        "rename": (lambda: io.rename(file, tmp_path / "new"), tmp_path),
    }
    act, place = calls[call]
    with pytest.raises(FailedSyncError) as caught:
        act()
    io.close(fd)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(place))


def test_syncfs_error_raises_failed_sync(tmp_path: Path) -> None:
    io = StoreIO()
    fd = os.open(tmp_path, os.O_PATH)  # syncfs refuses such a descriptor.
    with pytest.raises(FailedSyncError) as caught:
        io.sync_file_system(fd)
    os.close(fd)
    assert (caught.value.errno, caught.value.filename) == (errno.EBADF, str(tmp_path))


def test_start_writeback_begins_before_sync(tmp_path: Path) -> None:
    io = StoreIO()
    fd = io.open(tmp_path / "file", write=True, create=True)
    io.pwrite(fd, b"x" * 10_000, 0)
    io.start_writeback(fd, 4096, 4096)
    assert io.pread(fd, 10_000, 0) == b"x" * 10_000
    io.close(fd)
    reader, writer = os.pipe()
    with pytest.raises(OSError, match="pipe") as caught:
        io.start_writeback(writer, 0, 1)
    assert caught.value.errno == errno.ESPIPE
    os.close(reader)
    os.close(writer)


@pytest.mark.usefixtures("no_sync")
def test_sync_open_error_is_not_failed_sync(tmp_path: Path) -> None:
    io = StoreIO()
    with pytest.raises(FileNotFoundError):
        io.sync_folder(tmp_path / "missing")
    with pytest.raises(FileNotFoundError):
        io.write_file_atomically(tmp_path / "missing" / "file", b"x")


def test_replace_file_without_space_keeps_old_file_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error does not name the temporary file, which is removed."""
    pwrite = os.pwrite

    def half(fd: int, data: Any, offset: int) -> int:
        pwrite(fd, data[: len(data) // 2], offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "file").write_bytes(b"old")
    monkeypatch.setattr(os, "pwrite", half)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'file'}'"):
        StoreIO().write_file_atomically(tmp_path / "file", b"another")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"old"}


def test_sparse_file_uses_allocated_blocks(tmp_path: Path) -> None:
    path = tmp_path / "file"
    io = StoreIO()
    fd = io.open(path, write=True, create=True)
    io.set_size(fd, 1 << 20)
    assert (io.size_of(path), io.allocated_of(path)) == (1 << 20, 0)
    io.allocate(fd, 0, 8192)
    assert io.allocated_of(path) == 8192
    io.close(fd)


def test_allocate_without_space_names_file_and_bytes(tmp_path: Path) -> None:
    io, path = StoreIO(), tmp_path / "file"
    fd = io.open(path, write=True, create=True)
    with pytest.raises(OSError, match="bytes are needed at 4,096") as caught:
        io.allocate(fd, 4096, 1 << 62)
    io.close(fd)
    assert caught.value.filename == str(path)
    assert f": {1 << 62:,} bytes" in caught.value.strerror


def test_unlinked_file_without_reader_is_unreachable(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 8192)
    io = StoreIO()
    fd = io.open(path, write=True)
    assert not io.is_unreachable(fd)
    io.unlink(path)
    assert io.is_unreachable(fd)
    # Through another descriptor of the same process, and through a map whose descriptor is closed.
    other = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    assert not io.is_unreachable(fd)
    mapping = io.map(other, 8192)
    os.close(other)
    assert not io.is_unreachable(fd)
    mapping.close()
    assert io.is_unreachable(fd)
    io.close(fd)


def test_list_folder_skips_file_removed_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(name.encode())
    scan = os.scandir

    @contextlib.contextmanager
    def scan_and_delete(folder: Path) -> Iterator[list[os.DirEntry[str]]]:
        with scan(folder) as scanned:
            found = list(scanned)
        (tmp_path / "b").unlink(missing_ok=True)
        yield found

    monkeypatch.setattr(os, "scandir", scan_and_delete)
    assert [entry.name for entry in StoreIO().entries(tmp_path)] == ["a", "c"]
    assert StoreIO().entries(tmp_path / "a") == StoreIO().entries(tmp_path / "none") == []


class Interrupted:
    """A kernel whose `fallocate` is first interrupted by signals."""

    def __init__(self, times: int, then: int) -> None:
        self.left = times
        self.then = then
        self.calls = 0

    def fallocate(self, fd: int, mode: int, offset: int, size: int) -> int:
        self.calls += 1
        interrupted = self.left > 0
        self.left -= 1
        ctypes.set_errno(errno.EINTR if interrupted else self.then)
        return -1 if interrupted or self.then else 0


@pytest.mark.parametrize(
    ("then", "content"),
    [(0, b"x" * 4096), (errno.EOPNOTSUPP, bytes(4096)), (errno.EIO, b"x" * 4096)],
    ids=["done", "unknown there", "failed"],
)
def test_zero_range_interrupted_by_signal_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: int, content: bytes
) -> None:
    kernel = Interrupted(3, then)
    monkeypatch.setattr(storage, "_libc", kernel)
    io, file = StoreIO(), tmp_path / "file"
    file.write_bytes(b"x" * 4096)
    fd = io.open(file, write=True)
    with contextlib.nullcontext() if then != errno.EIO else pytest.raises(OSError, match="Input/output"):
        io.zero(fd, 0, 4096)
    io.close(fd)
    assert kernel.calls == 4
    assert file.read_bytes() == content


class _Refusing:
    """A map that rejects advice."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __len__(self) -> int:
        return 8 * mmap.PAGESIZE

    def madvise(self, *_: int) -> None:
        raise OSError(self._number, os.strerror(self._number))


@pytest.mark.skipif(not LARGE_PAGES, reason="this kernel has no large pages")
def test_large_pages_advice_begins_at_page_of_range(tmp_path: Path) -> None:
    io = StoreIO()
    path = tmp_path / "file"
    size = 8 << 20
    path.write_bytes(bytes(size))
    fd = io.open(path, write=True)
    with io.map(fd, size, write=True) as mapping:
        io.advise_page_size(mapping, (2 << 20) + 1000, large=True)
        assert large_page_ranges(path) == [(2 << 20, size)]
        io.advise_page_size(mapping, 4 << 20, large=False)
        assert large_page_ranges(path) == [(2 << 20, 4 << 20)]
        mapping[3 << 20 : (3 << 20) + 4] = b"item"
        assert path.read_bytes()[3 << 20 : (3 << 20) + 4] == b"item"
    io.close(fd)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOMEM, errno.EAGAIN])
def test_large_pages_advice_refused_keeps_small_pages(number: int) -> None:
    StoreIO().advise_page_size(cast(mmap.mmap, _Refusing(number)), 0, large=True)


def test_exists_stat_error_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    io, file = StoreIO(), tmp_path / "abort"
    assert not io.exists(file)
    file.touch()
    assert io.exists(file)
    assert not io.exists(file / "below a file")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        io.exists(tmp_path / "loop")
    # The result on Python 3.14.
    monkeypatch.setattr(Path, "exists", lambda path: os.path.exists(path))
    with pytest.raises(OSError, match=os.strerror(errno.ENAMETOOLONG)):
        io.exists(tmp_path / ("x" * 300))
    for call in (io.make_folder, io.remove_folder):
        with pytest.raises(OSError, match=os.strerror(errno.ENAMETOOLONG)):
            call(tmp_path / ("x" * 300))


def test_open_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for look in (StoreIO().read_file, StoreIO().open):
        with pytest.raises(IsADirectoryError, match=f"Not a file: '{pipe}'"):
            look(pipe)


def test_read_device_is_bounded() -> None:
    with pytest.raises(IsADirectoryError, match="Not a file: '/dev/zero'"):
        StoreIO().read_file(Path("/dev/zero"))


@pytest.mark.parametrize(
    "call",
    [
        lambda io, fd: io.pread(fd, 1, 0),
        lambda io, fd: io.pread_into(fd, bytearray(1), 0),
        lambda io, fd: io.pwrite(fd, b"x", 0),
    ],
)
def test_read_or_write_error_names_file(tmp_path: Path, call: Callable[[StoreIO, int], object]) -> None:
    """The kernel knows no name for a descriptor; its message is only "Input/output error"."""
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(OSError) as caught:
            call(StoreIO(), fd)
    finally:
        os.close(fd)
    assert caught.value.filename == str(tmp_path)


def test_read_error_is_not_end_of_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel returns the part before the error, as at the end of a file."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * 12288)
    read = os.pread

    def pread(fd: int, size: int, offset: int) -> bytes:
        if 4096 <= offset < 8192:
            fail(fd)
        return read(fd, min(size, 4096 - offset) if offset < 4096 else size, offset)

    monkeypatch.setattr(os, "pread", pread)
    io = StoreIO()
    fd = io.open(path)
    try:
        assert (io.pread(fd, 4096, 0), io.pread(fd, 5000, 8192)) == (b"x" * 4096,) * 2
        with pytest.raises(OSError) as caught:
            io.pread(fd, 4097, 0)
    finally:
        io.close(fd)
    assert caught.value.filename == str(path)


def test_read_small_file_error_names_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small").touch()
    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(OSError) as caught:
        StoreIO().read_file(tmp_path / "small")
    assert caught.value.filename == str(tmp_path / "small")


# Files that root creates

OWNER: tuple[int, int] = (65534, 65533)
CREATE = """
import sys
from pathlib import Path
from mqproc.io.store_io import StoreIO
io, folder = StoreIO(), Path(sys.argv[1])
for create in (lambda: io.write_file_atomically(folder / "file", b""), lambda: io.make_folder(folder / "new")):
    try:
        create()
    except OSError as error:
        print(error)
"""


@pytest.fixture
def owned(tmp_path: Path) -> Path:
    """A folder of another user."""
    if os.geteuid() != 0:
        pytest.skip("only root creates files of other users")
    folder = tmp_path / "owned"
    folder.mkdir()
    os.chown(folder, *OWNER)
    return folder


def owner_of(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_uid, found.st_gid


def test_root_creates_files_of_the_owner_of_their_folder(owned: Path) -> None:
    io, below = StoreIO(), owned / "a" / "b"
    io.make_folder(below)
    io.write_file_atomically(below / "small", b"x")
    io.write_file_atomically(below / "small", b"y")
    with io.new_file(below / "new"), io.opened(below / "opened", write=True, create=True):
        pass
    assert {owner_of(path) for path in owned.rglob("*")} == {OWNER}
    assert sorted(path.name for path in below.iterdir()) == ["new", "opened", "small"]
    io.write_file_atomically(owned.parent / "own", b"")
    assert owner_of(owned.parent / "own") == (0, os.getegid())


def test_root_leaves_existing_file_to_its_owner(owned: Path) -> None:
    """A user could link to any file of root, and would get it."""
    file = owned.parent / "file"
    file.write_bytes(b"of root")
    os.link(file, owned / "link")
    with StoreIO().opened(owned / "link", write=True, create=True) as fd:
        assert os.pread(fd, 7, 0) == b"of root"
    assert owner_of(file)[0] == 0


def test_root_creates_nothing_that_it_cannot_give_away(owned: Path) -> None:
    """Root without the capability CAP_CHOWN, as in some containers."""
    command = ["setpriv", "--inh-caps=-chown", "--bounding-set=-chown", sys.executable, "-c", CREATE, str(owned)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    text = f"Operation not permitted: root cannot give it to the folder's owner, user {OWNER[0]}; run this as that user"
    assert done.stdout.splitlines() == [f"[Errno 1] {text}: '{owned / name}'" for name in ("file.tmp", "new")]
    assert list(owned.iterdir()) == []


def test_zero_keeps_holes(tmp_path: Path) -> None:
    """On a full disk there is no space for them."""
    io, file = StoreIO(), tmp_path / "file"
    with file.open("wb") as written:
        written.write(b"x" * 8192)
        written.truncate(1 << 20)
    before = io.allocated_of(file)
    with io.opened(file, write=True) as fd:
        io.zero(fd, 4096, 1 << 20)
    assert file.read_bytes() == b"x" * 4096 + bytes((1 << 20) - 4096)
    assert io.allocated_of(file) <= before
