"""StoreIO, the only door to storage.

Everything that the engine reads or writes goes through one object of this class, so that a test can record, fail or
crash at each call. Here it is thin. Kernels fill buffers which are then given to `pwrite`; the few that store into a
map do it only by the store primitives of `mqproc.kernels.intrinsics`.

Errors are `OSError` with errno and file name; nothing is retried here. A failed sync is a FailedSyncError and must be
treated as final by the caller: the kernel marks the pages clean, and a second sync would succeed although the data is
lost.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import fcntl
import mmap
import os
import resource
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from mqproc.paths import file_type
from mqproc.util.json_text import decode_json

T = TypeVar("T")

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined,unused-ignore]

REPLACING_SUFFIX: Final = ".tmp"
"""Behind the name of a small file while its next version is written."""
_FALLOC_FL_ZERO_RANGE: Final = 0x10
_SYNC_FILE_RANGE_WRITE: Final = 2
_ZEROS: Final = bytes(1 << 20)
_BLOCK_BYTES: Final = 512
# Of `struct statfs`, whose first word is the file system's kind; it is smaller on every machine.
_STATFS_BYTES: Final = 256
_TMPFS_MAGIC: Final = 0x01021994
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
# A process may have 65,530 maps; what is in more pieces is rare.
_PIECES_MAX: Final = 256
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.syncfs.argtypes = (ctypes.c_int,)
_libc.fstatfs.argtypes = (ctypes.c_int, ctypes.c_char_p)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_libc.mmap.restype = ctypes.c_void_p


def reason_of(error: OSError) -> str:
    """Why a call failed, in words; for a file that may not be so large also the limit, which nobody thinks of."""
    reason = error.strerror or str(error)
    if error.errno != errno.EFBIG:
        return reason
    limit, _most = resource.getrlimit(resource.RLIMIT_FSIZE)
    return reason if limit == resource.RLIM_INFINITY else f"{reason}; files may have {limit:,} bytes here (ulimit -f)"


def _was_interrupted() -> bool:
    return ctypes.get_errno() == errno.EINTR


def _raise_errno(path: str = "") -> None:
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number), path or None)


def _sync_file_system(fd: int) -> None:
    if _libc.syncfs(fd) != 0:
        _raise_errno()


class FailedSyncError(OSError):
    """Data or names could not be made durable: final. Other errors of storage, like a full disk, may pass."""


class Kind(enum.Enum):
    """What a name in a folder stands for; a symlink is not followed."""

    FILE = "file"
    FOLDER = "folder"
    SYMLINK = "symlink"
    OTHER = "neither file nor folder"


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in a folder: `size` in bytes, `uid` of its owner, `modified_ns` since the epoch."""

    name: str
    kind: Kind
    size: int
    uid: int
    modified_ns: int = 0


def _kind(mode: int) -> Kind:
    if stat.S_ISREG(mode):
        return Kind.FILE
    if stat.S_ISDIR(mode):
        return Kind.FOLDER
    return Kind.SYMLINK if stat.S_ISLNK(mode) else Kind.OTHER


def _entry(name: str, of: os.stat_result) -> Entry:
    return Entry(name, _kind(of.st_mode), of.st_size, of.st_uid, of.st_mtime_ns)


class StoreIO:
    """Storage calls of one process. Descriptors and maps belong to the caller, who closes them."""

    def __init__(self) -> None:
        self._around_sync: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def say_when_syncing(self, around: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        """Enter `around()` for the time of each sync from now on: a slow disk may take many seconds for one."""
        self._around_sync = around

    def crash_point(self, name: str) -> None:
        """A place at which tests end the process: see `armed_io.CRASH_POINTS`. Nothing happens here."""

    def crash_amid(self, name: str, fd: int, data: Buffer, offset: int) -> None:
        """A place at which tests end the process amid the write that comes next. Nothing happens here."""

    # Files by name

    def exists(self, path: Path) -> bool:
        """Whether it is there. Raises OSError when that cannot be told."""
        return file_type(path) != 0

    def size_of(self, path: Path) -> int:
        """Bytes of a file; raises FileNotFoundError."""
        return path.stat().st_size

    def allocated_of(self, path: Path) -> int:
        """Bytes that a file takes on disk, fewer than its length where it is sparse; raises FileNotFoundError."""
        return path.stat().st_blocks * _BLOCK_BYTES

    def names(self, folder: Path) -> list[str]:
        """Sorted names in a folder; none when there is no such folder."""
        try:
            return sorted(os.listdir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def entries(self, folder: Path) -> list[Entry]:
        """Everything in a folder by name, sorted; nothing when there is no such folder."""
        try:
            with os.scandir(folder) as scanned:
                found = sorted(scanned, key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):
            return []
        entries = []
        for entry in found:
            # One that is deleted meanwhile is not there any more.
            with contextlib.suppress(FileNotFoundError):
                entries.append(_entry(entry.name, entry.stat(follow_symlinks=False)))
        return entries

    def entry(self, path: Path) -> Entry | None:
        """One name, None when it is not there."""
        try:
            of = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return _entry(path.name, of)

    def make_folder(self, folder: Path, mode: int = 0o755, *, sync: bool = True) -> None:
        """Make a folder and those above it; each new name is synced into its parent unless the caller does it later."""
        missing = []
        while not self.exists(folder):
            missing.append(folder)
            folder = folder.parent
        for new in reversed(missing):
            self._make_one_folder(new, mode)
            if sync:
                self.sync_folder(new.parent)

    def _make_one_folder(self, folder: Path, mode: int) -> None:
        folder.mkdir(mode=mode, exist_ok=True)

    def read_file(self, path: Path) -> bytes:
        """A whole small file. A pipe or a device is refused as a folder is: it would be read for ever.

        Below what is no folder there is no file, as for `entry`.
        """
        try:
            mode = path.stat().st_mode
        except NotADirectoryError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
        if not stat.S_ISREG(mode):
            raise IsADirectoryError(errno.EISDIR, "Not a file", str(path))
        try:
            return path.read_bytes()
        except OSError as error:
            error.filename = str(path)
            raise

    def read_json(self, path: Path, kind: type[T]) -> T:
        """The value of a small JSON file of our own, as a type that msgspec knows.

        Raises FileNotFoundError, and msgspec.MsgspecError for what is none, a folder included.
        """
        try:
            text = self.read_file(path)
        except IsADirectoryError:
            raise msgspec.DecodeError("not a file") from None
        return decode_json(text, kind)

    def write_file_atomically(
        self, path: Path, data: bytes, mode: int = 0o644, failed: Callable[[FailedSyncError], object] | None = None
    ) -> None:
        """Replace a small file: temporary file, sync, rename, folder sync. A crash leaves the old or the new one.

        One process at a time does that to a path: whoever owns the file. What a crash leaves of the temporary file the
        next recovery removes; after an error nothing is left. `failed` is told of a failed sync before that is removed:
        this process may be killed then, and another one would sync the same file again.
        """
        temporary = path.with_name(path.name + REPLACING_SUFFIX)
        fd = self.open(temporary, write=True, create=True, mode=mode)
        try:
            self.set_size(fd, 0)
            self.pwrite(fd, data, 0)
            self.sync(fd)
        except OSError as error:
            if failed is not None and isinstance(error, FailedSyncError):
                failed(error)
            self.unlink(temporary)
            if not isinstance(error, FailedSyncError):
                error.filename = str(path)
            raise
        finally:
            self.close(fd)
        self.rename(temporary, path)

    def rename(self, source: Path, target: Path, between: Callable[[], None] | None = None) -> None:
        """Rename and sync the folders of both names. `between` is called before, when it is not durable yet."""
        self._rename(source, target)
        if between is not None:
            between()
        self.sync_folder(target.parent)
        if source.parent != target.parent:
            self.sync_folder(source.parent)

    def _rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a name if it is there; the caller syncs the folder when the order matters."""
        path.unlink(missing_ok=True)

    def keep_link(self, path: Path, target: Path) -> None:
        """A second name for a file's bytes: they stay when the first one is removed. Raises OSError (EXDEV…)."""
        os.link(path, target, follow_symlinks=False)

    def make_link(self, path: Path, target: str) -> None:
        """Make a symlink; it need not lead anywhere."""
        path.symlink_to(target)

    def remove_folder(self, folder: Path) -> None:
        """Remove a folder with everything in it, if it is there."""
        shutil.rmtree(folder, ignore_errors=not self.exists(folder))

    def sync_folder(self, folder: Path) -> None:
        """Make the names in a folder durable."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._sync_with(os.fsync, fd)
        finally:
            os.close(fd)

    def disk_usage(self, folder: Path) -> tuple[int, int]:
        """(used, free) bytes of the file system, as `df` counts them: what root keeps back is neither."""
        found = os.statvfs(folder)
        return (found.f_blocks - found.f_bfree) * found.f_frsize, found.f_bavail * found.f_frsize

    # Descriptors

    def open(self, path: Path, *, write: bool = False, create: bool = False, mode: int = 0o644) -> int:
        """A descriptor; FileNotFoundError unless `create`, IsADirectoryError for a pipe that nobody may write to."""
        if not write and stat.S_ISFIFO(os.stat(path).st_mode):
            raise IsADirectoryError(errno.EISDIR, "Not a file", str(path))
        flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        return os.open(path, flags, mode)

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, fd: int) -> int:
        """Bytes of an open file."""
        return os.fstat(fd).st_size

    def is_out_of_reach(self, fd: int) -> bool:
        """Whether a file has no name any more and nobody else has it open or mapped.

        Nobody can then come to it again. False also where the file system does not tell (it knows no leases).
        """
        if os.fstat(fd).st_nlink:
            return False
        try:
            # A write lease is given only to the one who alone has a file open; a map counts.
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError:
            return False
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return True

    def path_of(self, fd: int) -> str:
        """Where an open file lies, for the text of an error."""
        return os.readlink(f"/proc/self/fd/{fd}")

    def _name(self, error: OSError, fd: int) -> None:
        """The kernel does not say of which file it could not read or write a part."""
        with contextlib.suppress(OSError):
            error.filename = self.path_of(fd)

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        """Up to `size` bytes; fewer at the file's end."""
        try:
            data = os.pread(fd, size, offset)
            # Fewer come also where the next ones cannot be read: going on from there tells.
            while len(data) < size and (more := os.pread(fd, size - len(data), offset + len(data))):
                data += more
            return data
        except OSError as error:
            self._name(error, fd)
            raise

    def pread_into(self, fd: int, buffer: Buffer, offset: int) -> int:
        """Fill a writable buffer; returns the bytes read, fewer only at the file's end."""
        view = memoryview(buffer).cast("B")
        done = 0
        try:
            while done < len(view) and (count := os.preadv(fd, [view[done:]], offset + done)):
                done += count
        except OSError as error:
            self._name(error, fd)
            raise
        return done

    def pwrite(self, fd: int, data: Buffer, offset: int) -> None:
        """Write all of `data`. Raises OSError (ENOSPC…), after which part of it may be there."""
        try:
            view, done = memoryview(data), os.pwrite(fd, data, offset)
            while done < view.nbytes:
                view = view.cast("B")
                count = os.pwrite(fd, view[done:], offset + done)
                if count == 0:
                    raise OSError(errno.EIO, "pwrite wrote nothing")
                done += count
        except OSError as error:
            self._name(error, fd)
            raise

    def zero(self, fd: int, offset: int, size: int) -> None:
        """Make a range read as zeros without making the file sparse or longer."""
        size = min(size, self.size(fd) - offset)
        if size <= 0:
            return
        # A signal may come amid it; the interpreter runs its handler here.
        while (failed := _libc.fallocate(fd, _FALLOC_FL_ZERO_RANGE, offset, size)) and _was_interrupted():
            pass
        if not failed:
            return
        if ctypes.get_errno() not in (errno.EOPNOTSUPP, errno.EINVAL):
            _raise_errno()
        for start in range(offset, offset + size, len(_ZEROS)):
            self.pwrite(fd, memoryview(_ZEROS)[: min(len(_ZEROS), offset + size - start)], start)

    def holes_take_room(self, fd: int) -> bool:
        """Whether a file has holes that take room once a map of them is read, as on tmpfs: it ends a process there."""
        found = os.fstat(fd)
        if found.st_blocks * _BLOCK_BYTES >= found.st_size:
            return False
        told = ctypes.create_string_buffer(_STATFS_BYTES)
        if _libc.fstatfs(fd, told) != 0:
            _raise_errno(self.path_of(fd))
        return ctypes.c_long.from_buffer(told).value == _TMPFS_MAGIC

    def next_data(self, fd: int, offset: int) -> int | None:
        """Where the next byte that was ever written lies, at or after `offset`; None when there is none.

        Allocated but unwritten space does not count, so an untouched tail of a segment is passed over at once.
        """
        try:
            return os.lseek(fd, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return None
            raise

    def next_hole(self, fd: int, offset: int) -> int:
        """Where written data ends, at or after `offset`; the file's end at the latest."""
        return os.lseek(fd, offset, os.SEEK_HOLE)

    def allocate(self, fd: int, offset: int, size: int) -> None:
        """Reserve space on disk; ENOSPC is raised here instead of at a store into a map, with file and bytes."""
        try:
            os.posix_fallocate(fd, offset, size)
        except OSError as error:
            text = f"{error.strerror}: {size:,} bytes are needed at {offset:,}"
            raise OSError(error.errno, text, self.path_of(fd)) from None

    def set_size(self, fd: int, size: int) -> None:
        """Lengthen a file (sparse), or shorten one that nobody maps."""
        try:
            os.ftruncate(fd, size)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.path_of(fd)) from None

    def sync(self, fd: int) -> None:
        """Make a file's data durable. Raises FailedSyncError, which is final: see the head of the module."""
        self._sync_with(os.fdatasync, fd)

    def start_writing(self, fd: int, offset: int, size: int) -> None:
        """Let the disk begin with what is dirty of a range, so that a later `sync` has less to wait for."""
        if _libc.sync_file_range(fd, offset, size, _SYNC_FILE_RANGE_WRITE) != 0:
            _raise_errno(self.path_of(fd))

    def sync_file_system(self, fd: int) -> None:
        """Make everything on the file system of `fd` durable: cheaper than many single syncs.

        Raises FailedSyncError for any write to it that failed since `fd` was opened.
        """
        self._sync_with(_sync_file_system, fd)

    def _sync_with(self, call: Callable[[int], None], fd: int) -> None:
        try:
            with self._around_sync():
                call(fd)
        except OSError as error:
            raise FailedSyncError(error.errno, error.strerror, self.path_of(fd)) from error

    def drop_cache(self, fd: int, offset: int, size: int) -> None:
        """Let the kernel forget clean pages of a range. `size` must not be 0, which would mean the whole file."""
        assert size > 0
        os.posix_fadvise(fd, offset, size, os.POSIX_FADV_DONTNEED)

    def will_need(self, fd: int, offset: int, size: int) -> None:
        """Ask the kernel to read a range ahead."""
        os.posix_fadvise(fd, offset, size, os.POSIX_FADV_WILLNEED)

    def read_only_what_is_asked(self, fd: int) -> None:
        """No reading ahead through this descriptor."""
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

    # Maps

    def map(self, fd: int, size: int, *, write: bool = False) -> mmap.mmap:
        """Map a file from its start, shared. The map holds a descriptor of its own."""
        return mmap.mmap(fd, size, access=mmap.ACCESS_WRITE if write else mmap.ACCESS_READ)

    def map_as_it_is(self, fd: int, size: int) -> mmap.mmap:
        """Map a file for reading; where holes would take room they are zeros of no file, whatever comes there later."""
        if not self.holes_take_room(fd):
            return self.map(fd, size)
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        at = pieces = 0
        while at < size and (data := self.next_data(fd, at)) is not None and data < size:
            pieces += 1
            at = min(self.next_hole(fd, data), size) if pieces < _PIECES_MAX else size
            flags = mmap.MAP_SHARED | _MAP_FIXED
            if _libc.mmap(address + data, at - data, mmap.PROT_READ, flags, fd, data) == _MAP_FAILED:
                _raise_errno(self.path_of(fd))
        return mapping

    def shared_memory(self, size: int) -> mmap.mmap:
        """Zeros of no file, which this process shares with those that it forks."""
        return mmap.mmap(-1, size)

    def put_zeros(self, address: int) -> bool:
        """Have zeros of no file, to be read only, in the page of an address of a map; whether they are there."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        start = address & -mmap.PAGESIZE
        return bool(_libc.mmap(start, mmap.PAGESIZE, mmap.PROT_READ, flags, -1, 0) == start)

    def choose_pages(self, mapping: mmap.mmap, offset: int, *, large: bool) -> None:
        """Let pages from `offset` on, which are written one behind the other, be large, or small again.

        A fault then brings many at once. It is advice: who does not take it has small ones. A store to a large page
        takes space for all of it, which must have been allocated.
        """
        start = offset & -mmap.PAGESIZE
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE if large else mmap.MADV_NOHUGEPAGE, start, len(mapping) - start)

    def unmap_pages(self, mapping: mmap.mmap, offset: int, size: int) -> None:
        """Let go of mapped pages, which count as memory of this process; the data stays in the page cache."""
        start = offset & -mmap.PAGESIZE
        stop = min(len(mapping), offset + size)
        if stop > start:
            mapping.madvise(mmap.MADV_DONTNEED, start, stop - start)
