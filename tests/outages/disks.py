"""An ext4 of its own on a loop device, whose power can be cut, which can be full, and whose device can fail.

A cut is the kernel's own: FS_IOC_SHUTDOWN without a flush of the journal. From then on nothing reaches the device, and
what was only in memory is gone once the file system is mounted again; so are names and lengths whose journal was not
written. What the device has taken it keeps: a write cache of its own that loses data is what the simulator has.

One thing differs from a real one: the kernel goes on, and says of a sync that is under way in that moment that it is
done, though it is not. So nobody may listen any more when the cut comes.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import random
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.outages.group import END_TIMEOUT_S

_SHUTDOWN: Final = (2 << 30) | (4 << 16) | (ord("X") << 8) | 125
"""_IOR('X', 125, __u32), of linux/fs.h's family; EXT4_IOC_SHUTDOWN."""
_WITHOUT_FLUSH: Final = struct.pack("=I", 2)
_CLONE_NEWNS: Final = 0x00020000
_SYNC_FILE_RANGE_ALL: Final = 1 | 2 | 4
_PAGE: Final = 4096
DEVICE_BYTES: Final = 256 << 20
GOING_S: Final = 10.0
"""The kernel takes a moment to let a disk go whose last process has ended."""
MKFS: Final = ("mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def missing() -> str:
    """Why there can be no such disk here; empty when there can."""
    if os.geteuid() != 0:
        return "only root may mount a file system"
    if tool := next((name for name in ("mount", "umount", MKFS[0]) if shutil.which(name) is None), ""):
        return f"{tool} is not installed"
    if not Path("/dev/loop-control").exists():
        return "there are no loop devices"
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", folder],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    return f"nothing can be mounted: {done.stderr.strip()}" if done.returncode else ""


def left_of(folder: Path) -> list[str]:
    """Mounts and loop devices that are still there of disks below a folder, after a while for those that are going."""
    deadline = time.monotonic() + GOING_S
    while (left := _mounts_and_devices(folder)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def _mounts_and_devices(folder: Path) -> list[str]:
    mounts = [line for line in Path("/proc/mounts").read_text().splitlines() if f"{folder}/" in line]
    found = ((file, _text_of(file)) for file in Path("/sys/block").glob("loop*/loop/backing_file"))
    return mounts + [f"{file.parts[3]} {text}" for file, text in found if text.startswith(f"{folder}/")]


def _text_of(file: Path) -> str:
    """What a file says, nothing when it goes meanwhile."""
    try:
        return file.read_text().strip()
    except FileNotFoundError:
        return ""


def hide_mounts() -> None:
    """From now on this process and those that it starts have mounts of their own, which end with the last of them."""
    if _libc.unshare(_CLONE_NEWNS) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"unshare: {os.strerror(number)}")
    _run("mount", "--make-rprivate", "/")


class Disk:
    """An ext4 of `size` bytes in the file `image`, mounted at `folder`."""

    def __init__(self, folder: Path, image: Path, size: int) -> None:
        self.folder = folder
        self._image = image
        self._mounted = False
        folder.mkdir()
        with image.open("wb") as file:
            file.truncate(size)
        _run(*MKFS, str(image))
        self.mount()

    def mount(self) -> None:
        """Mount it, which recovers its journal. Its loop device goes when it is unmounted."""
        _run("mount", "-o", "loop", str(self._image), str(self.folder))
        self._mounted = True

    def unmount(self) -> None:
        """Unmount it if it is mounted, once nobody has anything open there any more."""
        deadline = time.monotonic() + END_TIMEOUT_S
        while self._mounted:
            try:
                _run("umount", str(self.folder))
                self._mounted = False
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def cut(self) -> None:
        """Nothing is written any more, from this moment on."""
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, _WITHOUT_FLUSH)
        finally:
            os.close(fd)

    def stir(self, chance: random.Random, files: Sequence[Path]) -> None:
        """Write some pages of these files, and the journal, as the kernel may do at any time in any order."""
        for path in files:
            try:
                fd = os.open(path, os.O_RDWR)
            except FileNotFoundError:
                continue
            try:
                pages = os.fstat(fd).st_size // _PAGE
                for _ in range(min(pages, chance.randrange(8))):
                    _write_back(fd, chance.randrange(pages), chance.randint(1, 4))
            finally:
                os.close(fd)
        fd = os.open(self.folder / "journal-moves", os.O_RDWR | os.O_CREAT)
        try:
            os.write(fd, b"x")
            os.fsync(fd)
        finally:
            os.close(fd)

    def fill(self, ballast: Path, left: int) -> None:
        """Take all of its room but `left` bytes."""
        usage = os.statvfs(self.folder)
        free = usage.f_bavail * usage.f_frsize - left
        with ballast.open("wb") as file:
            while free > _PAGE:
                try:
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, free)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                free //= 2


class SmallDevice:
    """A folder for an image that takes more than there is memory for: writes to the image fail from some point on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        _run("mount", "-t", "tmpfs", "-o", f"size={DEVICE_BYTES}", "tmpfs", str(folder))

    def leave(self, size: int) -> None:
        """Let it take so many bytes more."""
        usage = os.statvfs(self.folder)
        used = (usage.f_blocks - usage.f_bfree) * usage.f_frsize
        _run("mount", "-o", f"remount,size={used + size}", str(self.folder))

    def mend(self) -> None:
        """Take everything again."""
        self.leave(DEVICE_BYTES)

    def unmount(self) -> None:
        """Let go of everything."""
        _run("umount", str(self.folder))


def _write_back(fd: int, page: int, pages: int) -> None:
    if _libc.sync_file_range(fd, page * _PAGE, pages * _PAGE, _SYNC_FILE_RANGE_ALL) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"sync_file_range: {os.strerror(number)}")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
