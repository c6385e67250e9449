"""Worker pools for long tests, and this process's allocator, large pages and open files."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Final

EXIT_INTERRUPTED = 130


def loaded_context() -> ForkServerContext:
    """A fork server context that has preloaded the client and its kernels."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.client_preload"])
    return context


class _Pool(ProcessPoolExecutor):
    """A pool that starts all workers at once.

    Python 3.11 takes ended workers for idle ones, and waits.
    """

    def _adjust_process_count(self) -> None:
        if len(self._processes) < self._max_workers:
            self._spawn_process()


@contextmanager
def worker_pool(
    count: int, tasks_per_worker: int, initializer: Callable[[], None] | None = None
) -> Iterator[ProcessPoolExecutor]:
    """`count` processes, each of which ends after `tasks_per_worker` tasks.

    An exception in the block kills them: an interrupted executor may wait for idle workers forever.
    """
    context = multiprocessing.get_context("spawn")
    with _Pool(count, context, initializer, max_tasks_per_child=tasks_per_worker) as pool:
        try:
            yield pool
        except BaseException:
            for worker in multiprocessing.active_children():
                worker.kill()
            raise


# Allocator

_M_MMAP_THRESHOLD: Final = -3
_MAPPED_FROM_BYTES: Final = 128 << 10


def map_large_blocks() -> None:
    """Have glibc map each large block separately: untouched pages of a new mapping cost nothing.

    By default glibc keeps freed blocks and clears them for the next array of zeros, megabytes for each recovery and
    role: a fifth of the time of a crash test. A process of the product creates such arrays once.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES)


# Large pages

LARGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage").exists()
_HEAD: Final = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ \d+ +(.*)")


def large_page_ranges(path: Path) -> list[tuple[int, int]]:
    """Ranges of a file that this process has mapped with large-page advice (proc(5), smaps)."""
    found: list[tuple[int, int]] = []
    inside: tuple[int, int] | None = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = _HEAD.fullmatch(line)
        if head is not None:
            first, last, offset = (int(number, 16) for number in head.groups()[:3])
            inside = (offset, offset + last - first) if head[4] == str(path) else None
        elif inside is not None and line.startswith("VmFlags:") and "hg" in line.split():
            found.append(inside)
    return sorted(found)


# Open files


def open_below(folder: Path) -> list[str]:
    """Paths of open descriptors below a folder; those of removed files end with " (deleted)"."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        # The descriptor that listed the folder is closed by now.
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [name for name in found if name.startswith(f"{folder}/")]
