"""StoreIO, the only path to storage: files, memory mapping, syncs. Clock, the time.

All reads and writes of the engine are calls of one StoreIO object, which tests replace to record, fail or crash at each
call. Kernels fill buffers for `pwrite`; the few that store into maps use the primitives of
`mqproc.kernels.jit.intrinsics`.

What root creates belongs to the owner of the folder in which it is, so that commands of root leave nothing in another
user's store that its owner may not use.

Errors are OSError with errno and file name; nothing is retried. A failed sync raises FailedSyncError, which is final:
the kernel marks the pages clean, and a second sync would succeed although the data is lost.
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
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from mqproc.io.file_limits import oversized, size_limit
from mqproc.paths import file_type
from mqproc.util.json_text import decode_json

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined,unused-ignore]

T = TypeVar("T")

SYMLINK: Final = "a symlink, through which nothing is written"
REPLACING_SUFFIX: Final = ".tmp"
"""Suffix of a small file's name while its next version is written."""
_FALLOC_FL_ZERO_RANGE: Final = 0x10
_SYNC_FILE_RANGE_WRITE: Final = 2
_ZEROS: Final = bytes(1 << 20)
_BLOCK_BYTES: Final = 512
# Size of `struct statfs`, at most; its first word is the file system's type.
_STATFS_BYTES: Final = 256
_TMPFS_MAGIC: Final = 0x01021994
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
# A process may have 65,530 maps. More pieces than this are rare.
_PIECES_MAX: Final = 256
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.syncfs.argtypes = (ctypes.c_int,)
_libc.fstatfs.argtypes = (ctypes.c_int, ctypes.c_char_p)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_libc.mmap.restype = ctypes.c_void_p


def reason_of(error: OSError) -> str:
    """The cause of a failed call as text, with the limit if a file is too large for ulimit."""
    reason = error.strerror or str(error)
    if error.errno != errno.EFBIG:
        return reason
    limit, _hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    return reason if limit == resource.RLIM_INFINITY else f"{reason}; files are limited to {limit:,} bytes (ulimit -f)"


def _raise_errno(path: str = "") -> None:
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number), path or None)


def _other_owner(folder: Path) -> tuple[int, int] | None:
    """(user, group) of another user's folder if this process is root; else None."""
    if os.geteuid() != 0:
        return None
    try:
        found = folder.stat()
    except OSError:  # Creating the file will report it.
        return None
    return (found.st_uid, found.st_gid) if found.st_uid != 0 else None


def _open(path: Path, flags: int, mode: int) -> int:
    """`os.open`; a file that it creates belongs to the folder's owner."""
    owner = _other_owner(path.parent) if flags & os.O_CREAT else None
    if owner is None:
        return os.open(path, flags, mode)
    try:
        # Only a new file may be given away: an existing one may be a hard link to any file of root.
        fd = os.open(path, flags | os.O_EXCL, mode)
    except FileExistsError:
        return os.open(path, flags & ~os.O_CREAT)
    try:
        os.fchown(fd, *owner)
    except OSError as error:
        os.close(fd)
        path.unlink(missing_ok=True)
        raise _not_given(path, owner, error) from None
    return fd


def _not_given(path: Path, owner: tuple[int, int], error: OSError) -> OSError:
    text = f"{error.strerror}: root cannot give it to the folder's owner, user {owner[0]}; run this as that user"
    return OSError(error.errno, text, str(path))


def _sync_file_system(fd: int) -> None:
    if _libc.syncfs(fd) != 0:
        _raise_errno()


class Clock:
    """Clocks of a role: monotonic time for intervals and heartbeats, Unix time for timestamps."""

    # The function itself, without a call in between: it runs several times per message.
    monotonic_ns = staticmethod(time.monotonic_ns)
    """Nanoseconds that never decrease; the same for all processes of a machine."""

    def time_ms(self) -> int:
        """Unix time in milliseconds. It may jump in both directions, so it orders nothing."""
        return time.time_ns() // 1_000_000

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class FailedSyncError(OSError):
    """Data or names could not be made durable. Final, unlike other errors such as a full disk."""


class OversizedFileError(IsADirectoryError):
    """A file far too long for its name; handled like a folder of that name."""


class Kind(enum.Enum):
    """Type of a folder's entry; symlinks are not followed."""

    FILE = "file"
    FOLDER = "folder"
    SYMLINK = "symlink"
    OTHER = "neither file nor folder"


@dataclass(frozen=True, slots=True)
class FolderEntry:
    """An entry of a folder: `size` in bytes, `uid` of the owner, `modified_ns` since the epoch."""

    name: str
    kind: Kind
    size: int
    uid: int
    modified_ns: int = 0


_KINDS: Final = {stat.S_IFREG: Kind.FILE, stat.S_IFDIR: Kind.FOLDER, stat.S_IFLNK: Kind.SYMLINK}


def _entry(name: str, of: os.stat_result) -> FolderEntry:
    kind = _KINDS.get(stat.S_IFMT(of.st_mode), Kind.OTHER)
    return FolderEntry(name, kind, of.st_size, of.st_uid, of.st_mtime_ns)


class StoreIO:
    """Storage calls of a process. The caller owns and closes descriptors and maps."""

    def __init__(self) -> None:
        self._around_sync: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def wrap_syncs(self, around: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        """Enter `around()` during each sync from now on: on a slow disk one may take many seconds."""
        self._around_sync = around

    def crash_point(self, name: str) -> None:
        """A point at which tests end the process (`fault_injection.CRASH_POINTS`); no effect here."""

    def crash_amid(self, name: str, fd: int, data: Buffer, offset: int) -> None:
        """A point at which tests end the process within the next write; no effect here."""

    # Files by name

    def exists(self, path: Path) -> bool:
        """Whether the path exists. Raises OSError when that cannot be determined."""
        return file_type(path) != 0

    def size_of(self, path: Path) -> int:
        """Size of a file in bytes. Raises FileNotFoundError."""
        return path.stat().st_size

    def allocated_of(self, path: Path) -> int:
        """Bytes allocated to a file, below its size if sparse. Raises FileNotFoundError."""
        return path.stat().st_blocks * _BLOCK_BYTES

    def names(self, folder: Path) -> list[str]:
        """Sorted names in a folder; none if there is no such folder."""
        try:
            return sorted(os.listdir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def entries(self, folder: Path) -> list[FolderEntry]:
        """All entries of a folder, sorted by name; none if there is no such folder."""
        try:
            with os.scandir(folder) as scanned:
                found = sorted(scanned, key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):
            return []
        entries = []
        for entry in found:
            # Deleted meanwhile.
            with contextlib.suppress(FileNotFoundError):
                entries.append(_entry(entry.name, entry.stat(follow_symlinks=False)))
        return entries

    def entry(self, path: Path) -> FolderEntry | None:
        """One entry, or None."""
        try:
            return _entry(path.name, path.lstat())
        except (FileNotFoundError, NotADirectoryError):
            return None

    def make_folder(self, folder: Path, mode: int = 0o755, *, sync: bool = True) -> None:
        """Create a folder and its parents; sync each new name unless `sync` is False."""
        missing = []
        while not self.exists(folder):
            missing.append(folder)
            folder = folder.parent
        for new in reversed(missing):
            self._make_one_folder(new, mode)
            if sync:
                self.sync_folder(new.parent)

    def _make_one_folder(self, folder: Path, mode: int) -> None:
        owner = _other_owner(folder.parent)
        try:
            folder.mkdir(mode=mode)
        except FileExistsError:
            if not folder.is_dir():
                raise
            return
        if owner is None:
            return
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fchown(fd, *owner)
        except OSError as error:
            folder.rmdir()
            raise _not_given(folder, owner, error) from None
        finally:
            os.close(fd)

    def read_file(self, path: Path) -> bytes:
        """Read a small file. Rejects pipes and devices, which would block, as it does folders.

        Raises FileNotFoundError also below a path that is not a folder, as `entry` does, and OversizedFileError.
        """
        try:
            found = path.stat()
        except NotADirectoryError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
        if not stat.S_ISREG(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, "Not a file", str(path))
        if found.st_size > (limit := size_limit(path)):
            text = f"{oversized(found.st_size, limit)}: move it away, or put a good copy in its place"
            raise OversizedFileError(errno.EISDIR, text, str(path))
        try:
            return path.read_bytes()
        except OSError as error:
            error.filename = str(path)
            raise

    def read_json(self, path: Path, kind: type[T]) -> T:
        """Read a small JSON file as a type known to msgspec.

        Raises FileNotFoundError, and msgspec.MsgspecError for invalid contents or a folder.
        """
        try:
            text = self.read_file(path)
        except IsADirectoryError as error:
            raise msgspec.DecodeError(f"{error.strerror}") from None
        return decode_json(text, kind)

    def write_file_atomically(
        self, path: Path, data: bytes, mode: int = 0o644, failed: Callable[[FailedSyncError], object] | None = None
    ) -> None:
        """Replace a small file: temporary file, sync, rename, folder sync. Crash-safe.

        Only the file's owner writes it. The next recovery removes a temporary file left by a crash; errors leave none.
        `failed` is called for a failed sync before that file is removed: this process may be killed then, and another
        process must not sync the file again.
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

    @contextlib.contextmanager
    def new_file(self, path: Path, mode: int = 0o600) -> Iterator[int]:
        """Descriptor of a new file, which replaces that at `path` when the with-block ends.

        Until then it has a temporary name. After an error it is removed, which returns its space to a full disk.
        """
        temporary = path.with_name(path.name + REPLACING_SUFFIX)
        self.unlink(temporary)
        try:
            with self.opened(temporary, write=True, create=True, mode=mode) as fd:
                yield fd
        except OSError:
            self.unlink(temporary)
            raise
        self.rename(temporary, path)

    def rename(self, source: Path, target: Path, between: Callable[[], None] | None = None) -> None:
        """Rename and sync the folders of both names. `between` runs before the rename is durable."""
        self._rename(source, target)
        if between is not None:
            between()
        self.sync_folder(target.parent)
        if source.parent != target.parent:
            self.sync_folder(source.parent)

    def _rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a file if it exists; the caller syncs the folder when the order matters."""
        path.unlink(missing_ok=True)

    def keep_link(self, path: Path, target: Path) -> None:
        """Hard-link a file, so that its bytes outlive the first name. Raises OSError (EXDEV…)."""
        os.link(path, target, follow_symlinks=False)

    def make_link(self, path: Path, target: str) -> None:
        """Create a symlink, perhaps a dangling one."""
        path.symlink_to(target)

    def remove_folder(self, folder: Path) -> None:
        """Remove a folder with its contents, if it exists."""
        shutil.rmtree(folder, ignore_errors=not self.exists(folder))

    def sync_folder(self, folder: Path) -> None:
        """Make the names in a folder durable."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._sync_with(os.fsync, fd)
        finally:
            os.close(fd)

    def disk_usage(self, folder: Path) -> tuple[int, int]:
        """(used, free) bytes of the file system as in `df`; root's reserve is in neither."""
        found = os.statvfs(folder)
        return (found.f_blocks - found.f_bfree) * found.f_frsize, found.f_bavail * found.f_frsize

    # Descriptors

    def open(self, path: Path, *, write: bool = False, create: bool = False, mode: int = 0o644) -> int:
        """Open a file. Raises FileNotFoundError unless `create`, IsADirectoryError for a pipe.

        Nothing is written through a symlink. In place of a next version it is replaced, elsewhere ELOOP is raised.
        """
        if not write and stat.S_ISFIFO(os.stat(path).st_mode):
            raise IsADirectoryError(errno.EISDIR, "Not a file", str(path))
        flags = (os.O_RDWR | os.O_NOFOLLOW if write else os.O_RDONLY) | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        try:
            return _open(path, flags, mode)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
        if not path.name.endswith(REPLACING_SUFFIX):
            raise OSError(errno.ELOOP, SYMLINK, str(path))
        self.unlink(path)
        return _open(path, flags, mode)

    def close(self, fd: int) -> None:
        os.close(fd)

    @contextlib.contextmanager
    def opened(self, path: Path, *, write: bool = False, create: bool = False, mode: int = 0o644) -> Iterator[int]:
        """`open` a file for a with-block and close it afterwards."""
        fd = self.open(path, write=write, create=create, mode=mode)
        try:
            yield fd
        finally:
            self.close(fd)

    def size(self, fd: int) -> int:
        """Bytes of an open file."""
        return os.fstat(fd).st_size

    def leads_to(self, path: Path, fd: int) -> bool:
        """Whether a path still leads to an open file: it was not deleted, moved or replaced."""
        try:
            found = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True  # Such as a folder that is not readable for a moment.
        held = os.fstat(fd)
        return (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino)

    def is_unreachable(self, fd: int) -> bool:
        """Whether a file has no name left and is not open or mapped by other processes.

        False also on file systems without leases.
        """
        if os.fstat(fd).st_nlink:
            return False
        try:
            # A write lease is granted only if there is no other open descriptor or map.
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError:
            return False
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return True

    def path_of(self, fd: int) -> str:
        """Path of an open file, for error texts."""
        return os.readlink(f"/proc/self/fd/{fd}")

    def _name(self, error: OSError, fd: int) -> None:
        """Add the file's name to the kernel's error."""
        with contextlib.suppress(OSError):
            error.filename = self.path_of(fd)

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        """Read up to `size` bytes; fewer at the file's end."""
        try:
            data = os.pread(fd, size, offset)
            # A short read may also precede an unreadable page: continue, and the error is raised.
            while len(data) < size and (more := os.pread(fd, size - len(data), offset + len(data))):
                data += more
            return data
        except OSError as error:
            self._name(error, fd)
            raise

    def pread_into(self, fd: int, buffer: Buffer, offset: int) -> int:
        """Fill a writable buffer; return the bytes read, fewer only at the file's end."""
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
        """Write all of `data`. After an OSError (ENOSPC…) a part may have been written."""
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
        """Make a range read as zeros, with the holes that it has and without extending the file.

        Space for holes may not be available on a full disk.
        """
        stop = min(offset + size, self.size(fd))
        while offset < stop and (data := self.next_data(fd, offset)) is not None and data < stop:
            offset = min(self.next_hole(fd, data), stop)
            self._zero_data(fd, data, offset - data)

    def _zero_data(self, fd: int, offset: int, size: int) -> None:
        while _libc.fallocate(fd, _FALLOC_FL_ZERO_RANGE, offset, size) != 0:
            number = ctypes.get_errno()
            if number in (errno.EOPNOTSUPP, errno.EINVAL):
                for start in range(offset, offset + size, len(_ZEROS)):
                    self.pwrite(fd, memoryview(_ZEROS)[: min(len(_ZEROS), offset + size - start)], start)
                return
            # After EINTR the interpreter runs the signal's handler here.
            if number != errno.EINTR:
                _raise_errno()

    def holes_allocate_on_read(self, fd: int) -> bool:
        """Whether reading a map of a file's holes allocates memory, as on tmpfs, where it may fail."""
        found = os.fstat(fd)
        if found.st_blocks * _BLOCK_BYTES >= found.st_size:
            return False
        statfs = ctypes.create_string_buffer(_STATFS_BYTES)
        if _libc.fstatfs(fd, statfs) != 0:
            _raise_errno(self.path_of(fd))
        return ctypes.c_long.from_buffer(statfs).value == _TMPFS_MAGIC

    def next_data(self, fd: int, offset: int) -> int | None:
        """Offset of the next written byte at or after `offset`, or None.

        Skips allocated, unwritten space, such as the unused tail of a segment.
        """
        try:
            return os.lseek(fd, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return None
            raise

    def next_hole(self, fd: int, offset: int) -> int:
        """End of the written data at or after `offset`; the file's end at the latest."""
        return os.lseek(fd, offset, os.SEEK_HOLE)

    def allocate(self, fd: int, offset: int, size: int) -> None:
        """Reserve disk space: ENOSPC is raised here, not as SIGBUS at a store into a map."""
        try:
            os.posix_fallocate(fd, offset, size)
        except OSError as error:
            text = f"{error.strerror}: {size:,} bytes are needed at {offset:,}"
            raise OSError(error.errno, text, self.path_of(fd)) from None

    def reserve(self, fd: int, offset: int, size: int) -> None:
        """Reserve disk space if the file system has it and can.

        Other processes may write to the range meanwhile: unlike `allocate`, this never writes. A write to space that
        was not reserved reports the error.
        """
        _libc.fallocate(fd, 0, offset, size)

    def set_size(self, fd: int, size: int) -> None:
        """Extend a file (sparse), or truncate one that is not mapped."""
        try:
            os.ftruncate(fd, size)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.path_of(fd)) from None

    def sync(self, fd: int) -> None:
        """Make a file's data durable. Raises FailedSyncError, which is final."""
        self._sync_with(os.fdatasync, fd)

    def start_writeback(self, fd: int, offset: int, size: int) -> None:
        """Start writing back a range's dirty pages, so that a later `sync` is shorter."""
        if _libc.sync_file_range(fd, offset, size, _SYNC_FILE_RANGE_WRITE) != 0:
            _raise_errno(self.path_of(fd))

    def sync_file_system(self, fd: int) -> None:
        """Make the whole file system of `fd` durable: cheaper than many single syncs.

        Raises FailedSyncError for any failed write since `fd` was opened.
        """
        self._sync_with(_sync_file_system, fd)

    def _sync_with(self, call: Callable[[int], None], fd: int) -> None:
        try:
            with self._around_sync():
                call(fd)
        except OSError as error:
            raise FailedSyncError(error.errno, error.strerror, self.path_of(fd)) from error

    def drop_cache(self, fd: int, offset: int, size: int) -> None:
        """Drop clean pages of a range from the page cache. `size` 0 would mean the whole file."""
        assert size > 0
        os.posix_fadvise(fd, offset, size, os.POSIX_FADV_DONTNEED)

    def read_ahead(self, fd: int, offset: int, size: int) -> None:
        """Start reading a range ahead."""
        os.posix_fadvise(fd, offset, size, os.POSIX_FADV_WILLNEED)

    def disable_read_ahead(self, fd: int) -> None:
        """Disable read-ahead for this descriptor."""
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

    # Maps

    def map(self, fd: int, size: int, *, write: bool = False) -> mmap.mmap:
        """Map a file from its start, shared. The map has its own descriptor."""
        return mmap.mmap(fd, size, access=mmap.ACCESS_WRITE if write else mmap.ACCESS_READ)

    def map_without_filling_holes(self, fd: int, size: int) -> mmap.mmap:
        """Map a file for reading; on tmpfs its holes stay zeros without allocating memory."""
        if not self.holes_allocate_on_read(fd):
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
        """Anonymous zeroed memory that forked processes share."""
        return mmap.mmap(-1, size)

    def map_zero_page(self, address: int) -> bool:
        """Map a read-only zero page at an address; return whether that succeeded."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        start = address & -mmap.PAGESIZE
        return bool(_libc.mmap(start, mmap.PAGESIZE, mmap.PROT_READ, flags, -1, 0) == start)

    def advise_page_size(self, mapping: mmap.mmap, offset: int, *, large: bool) -> None:
        """Advise large or small pages from `offset` on, for sequential writes.

        A large page takes fewer faults. A store allocates space for the whole page, which must have been reserved.
        """
        start = offset & -mmap.PAGESIZE
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE if large else mmap.MADV_NOHUGEPAGE, start, len(mapping) - start)

    def release_pages(self, mapping: mmap.mmap, offset: int, size: int) -> None:
        """Release mapped pages from this process's memory; the data stays in the page cache."""
        start = offset & -mmap.PAGESIZE
        stop = min(len(mapping), offset + size)
        if stop > start:
            mapping.madvise(mmap.MADV_DONTNEED, start, stop - start)


# Written ranges of a file: zero those after the valid part, or test that they are readable.

_CHUNK_BYTES = 1 << 20


def dirty_end(io: StoreIO, fd: int, position: int) -> int:
    """End of the last nonzero byte at or after `position`; `position` if none exists.

    Holes are skipped.
    """
    import numpy as np  # Here, so that commands which only read small files start quickly.

    io.disable_read_ahead(fd)
    end = position
    while (written := _next_written(io, fd, position)) is not None:
        data, hole = written
        for start in range(data, hole, _CHUNK_BYTES):
            chunk = np.frombuffer(io.pread(fd, min(_CHUNK_BYTES, hole - start), start), np.uint8)
            if chunk.max(initial=0):
                end = start + len(chunk) - int((chunk[::-1] != 0).argmax())
        position = hole
    return end


def _next_written(io: StoreIO, fd: int, position: int) -> tuple[int, int] | None:
    """Next written range [start, stop) at or after a position; None if none exists.

    Allocated space counts as written while its pages are cached, and reading the end of a log caches the pages that
    follow. So for a long range the clean pages are dropped first: reading them all would take seconds.
    """
    data = io.next_data(fd, position)
    if data is not None and (hole := io.next_hole(fd, data)) - data > _CHUNK_BYTES:
        io.drop_cache(fd, data, hole - data)
        data = io.next_data(fd, position)
    return None if data is None else (data, io.next_hole(fd, data))


def zero_tail(io: StoreIO, fd: int, position: int) -> int:
    """Zero an open file from `position` on, unsynced; returns the length of the cleared content."""
    dirty = dirty_end(io, fd, position)
    if dirty > position:
        io.zero(fd, position, dirty - position)
    return dirty - position


def read_through(io: StoreIO, path: Path) -> None:
    """Read all written bytes of a file. Raises OSError where mapping it would raise SIGBUS."""
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with io.opened(path) as fd:
        position = 0
        while (data := io.next_data(fd, position)) is not None:
            position = io.next_hole(fd, data)
            for start in range(data, position, _CHUNK_BYTES):
                io.pread_into(fd, buffer[: min(_CHUNK_BYTES, position - start)], start)
