"""An ext4 on a loop device that can lose power, fill up, or fail.

A power cut is simulated with FS_IOC_SHUTDOWN without a journal flush. Nothing reaches the device afterwards, and data
that was only in memory is gone after the next mount, including names and lengths whose journal was not written. The
device keeps all accepted writes: write caches that lose data are covered by the simulator.

Unlike in a real power loss the kernel keeps running, and reports success for a sync in progress at that moment. So
clients must not receive answers after the cut.
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
"""_IOR('X', 125, __u32), related to linux/fs.h: EXT4_IOC_SHUTDOWN."""
_WITHOUT_FLUSH: Final = struct.pack("=I", 2)
_CLONE_NEWNS: Final = 0x00020000
_SYNC_FILE_RANGE_ALL: Final = 1 | 2 | 4
_PAGE: Final = 4096
DEVICE_BYTES: Final = 256 << 20
GOING_S: Final = 10.0
"""Time for the kernel to release a disk after its last process has ended."""
MKFS: Final = ("mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def missing() -> str:
    """Why such disks are not available here; empty if they are."""
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
    """Mounts and loop devices of disks below a folder that still exist after a short wait."""
    deadline = time.monotonic() + GOING_S
    while (left := _mounts_and_devices(folder)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def _mounts_and_devices(folder: Path) -> list[str]:
    mounts = [line for line in Path("/proc/mounts").read_text().splitlines() if f"{folder}/" in line]
    found = ((file, _text_of(file)) for file in Path("/sys/block").glob("loop*/loop/backing_file"))
    return mounts + [f"{file.parts[3]} {text}" for file, text in found if text.startswith(f"{folder}/")]


def _text_of(file: Path) -> str:
    """Contents of a file; empty if it disappears."""
    try:
        return file.read_text().strip()
    except FileNotFoundError:
        return ""


def hide_mounts() -> None:
    """Move this process and its children to a private mount namespace, which ends with them."""
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
        """Mount it, which recovers its journal. Its loop device is released by the unmount."""
        _run("mount", "-o", "loop", str(self._image), str(self.folder))
        self._mounted = True

    def unmount(self) -> None:
        """Unmount it, if mounted, as soon as no file is open on it."""
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
        """Cut the power: nothing is written from now on."""
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, _WITHOUT_FLUSH)
        finally:
            os.close(fd)

    def stir(self, chance: random.Random, files: Sequence[Path]) -> None:
        """Write some pages of these files and the journal, as the kernel may do at any time."""
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
        """Use all of its space except `left` bytes."""
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
    """A folder for an image that is larger than its space: writes fail from some point on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        _run("mount", "-t", "tmpfs", "-o", f"size={DEVICE_BYTES}", "tmpfs", str(folder))

    def leave(self, size: int) -> None:
        """Accept this many more bytes."""
        usage = os.statvfs(self.folder)
        used = (usage.f_blocks - usage.f_bfree) * usage.f_frsize
        _run("mount", "-o", f"remount,size={used + size}", str(self.folder))

    def mend(self) -> None:
        """Accept all writes again."""
        self.leave(DEVICE_BYTES)

    def unmount(self) -> None:
        """Unmount everything."""
        _run("umount", str(self.folder))


def _write_back(fd: int, page: int, pages: int) -> None:
    if _libc.sync_file_range(fd, page * _PAGE, pages * _PAGE, _SYNC_FILE_RANGE_ALL) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"sync_file_range: {os.strerror(number)}")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
