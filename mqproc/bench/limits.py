"""Limits of this machine, measured in the same run, to compare a benchmark's figures with.

Each measurement takes at most a second or two, and leaves no files.
"""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
import time
import timeit
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

MEMORY_BYTES = 256 << 20
DISK_BYTES = 512 << 20
WRITE_BYTES = 256 << 10
PAGE_CACHE_BYTES = 256 << 20
ECHO_BYTES = 128
ECHOES = 4000
SYNCS = 200
SYNC_BYTES = 4096
BLOCK_BYTES = 1 << 20


def measure_limits(folder: Path) -> dict[str, float]:
    """Measure all limits, with temporary files in `folder`, on the store's file system.

    Rates are in bytes a second, times in µs.
    """
    echo, sync = socket_echo_us(), fdatasync_us(folder)
    found = {
        "memcpy_bytes_per_s": memcpy_rate(),
        "fresh_memory_bytes_per_s": fresh_memory_rate(),
        "pwrite_bytes_per_s": pwrite_rate(folder),
        "disk_bytes_per_s": disk_rate(folder),
        **{f"echo_us_p{p}": float(np.percentile(echo, p)) for p in (50, 99)},
        **{f"fdatasync_us_p{p}": float(np.percentile(sync, p)) for p in (50, 99)},
    }
    return {name: round(value, 1) for name, value in found.items()}


def memcpy_rate() -> float:
    """Bytes per second of copying present pages of memory that exceeds the caches."""
    source = np.ones(MEMORY_BYTES, np.uint8)
    target = np.empty_like(source)
    target[:] = 0
    return MEMORY_BYTES / _best_s(lambda: np.copyto(target, source), 3)


def fresh_memory_rate() -> float:
    """Bytes per second of first stores into pages, which each page of a growing file needs once.

    It bounds appends in a virtual machine whose host reclaims free memory.
    """
    started = time.perf_counter()
    with mmap.mmap(-1, MEMORY_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as fresh:
        np.frombuffer(fresh, np.uint8)[:: mmap.PAGESIZE] = 1
    return MEMORY_BYTES / (time.perf_counter() - started)


def pwrite_rate(folder: Path) -> float:
    """Bytes per second of writing from a cached buffer to pages in the page cache."""
    block = os.urandom(WRITE_BYTES)
    with tempfile.TemporaryFile(dir=folder) as file:

        def write_all() -> None:
            for offset in range(0, PAGE_CACHE_BYTES, WRITE_BYTES):
                os.pwrite(file.fileno(), block, offset)

        write_all()
        return PAGE_CACHE_BYTES / _best_s(write_all, 2)


def disk_rate(folder: Path) -> float:
    """Bytes per second of writing a new file until it is durable."""
    block = os.urandom(1 << 20)
    with tempfile.TemporaryFile(dir=folder) as file:
        started = time.perf_counter()
        for offset in range(0, DISK_BYTES, len(block)):
            os.pwrite(file.fileno(), block, offset)
        os.fdatasync(file.fileno())
        return DISK_BYTES / (time.perf_counter() - started)


def disk_read_rate(path: Path) -> float:
    """Bytes per second of reading the start of a file from the disk."""
    block = bytearray(1 << 20)
    with path.open("rb", buffering=0) as file:
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()
        done = 0
        while done < DISK_BYTES and (count := file.readinto(block)):
            done += count
        return done / (time.perf_counter() - started)


def drop_from_memory(store: Path) -> None:
    """Drop a store's files from the page cache."""
    os.sync()
    for path in store.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def read_rate(store: Path, readers: int = 1) -> float:
    """Bytes per second of reading the log's segments by `readers` threads."""
    segments = sorted((store / "commitlog").iterdir())

    def read(number: int) -> int:
        block, done = bytearray(BLOCK_BYTES), 0
        for path in segments:
            fd = os.open(path, os.O_RDONLY)
            try:
                # Reading a hole does not touch the disk.
                written = os.lseek(fd, 0, os.SEEK_HOLE)
                part = -(-written // readers // BLOCK_BYTES) * BLOCK_BYTES
                for at in range(number * part, min((number + 1) * part, written), BLOCK_BYTES):
                    done += os.preadv(fd, [block], at)
            finally:
                os.close(fd)
        return done

    started = time.perf_counter()
    with ThreadPoolExecutor(readers) as pool:
        done = sum(pool.map(read, range(readers)))
    return done / (time.perf_counter() - started)


def fdatasync_us(folder: Path) -> NDArray[np.float64]:
    """Latencies of a 4 KiB write to allocated space with fdatasync."""
    block = os.urandom(SYNC_BYTES)
    times = np.empty(SYNCS)
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, SYNCS * SYNC_BYTES)
        os.fdatasync(file.fileno())
        for index in range(SYNCS):
            started = time.perf_counter()
            os.pwrite(file.fileno(), block, index * SYNC_BYTES)
            os.fdatasync(file.fileno())
            times[index] = time.perf_counter() - started
    return times * 1e6


def socket_echo_us() -> NDArray[np.float64]:
    """Round trip times of a small message to an echoing process over a Unix stream."""
    here, there = socket.socketpair()
    child = os.fork()
    if child == 0:
        here.close()
        _echo(there)
    there.close()
    message = os.urandom(ECHO_BYTES)
    times = np.empty(ECHOES)
    for index in range(ECHOES):
        started = time.perf_counter()
        here.sendall(message)
        here.recv(ECHO_BYTES)
        times[index] = time.perf_counter() - started
    here.close()
    os.waitpid(child, 0)
    return times[ECHOES // 4 :] * 1e6


def _echo(sock: socket.socket) -> None:
    """Run the child process, which must not return to its parent's frames."""
    try:
        while data := sock.recv(ECHO_BYTES):
            sock.sendall(data)
    finally:
        os._exit(0)


def _best_s(work: Callable[[], None], times: int) -> float:
    return min(timeit.repeat(work, number=1, repeat=times))
