"""Worker processes for work that takes long: stories of crashes and outages, fuzzing."""

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
    """For processes of tests that are clients: forked from one that has loaded the client and its kernels."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.client_preload"])
    return context


class _Pool(ProcessPoolExecutor):
    """One that always has all its workers: Python 3.11's takes workers that have ended for idle ones, and waits."""

    def _adjust_process_count(self) -> None:
        if len(self._processes) < self._max_workers:
            self._spawn_process()


@contextmanager
def worker_pool(
    count: int, tasks_per_worker: int, initializer: Callable[[], None] | None = None
) -> Iterator[ProcessPoolExecutor]:
    """So many processes at the same time, each of which ends after so many tasks.

    What ends the block early ends them at once: an executor that is interrupted may wait for its idle workers for ever.
    """
    context = multiprocessing.get_context("spawn")
    with _Pool(count, context, initializer, max_tasks_per_child=tasks_per_worker) as pool:
        try:
            yield pool
        except BaseException:
            for worker in multiprocessing.active_children():
                worker.kill()
            raise


# --- allocator ---
# How this process's allocator gets large blocks, where the arrays of many roles and recoveries are made in one.


_M_MMAP_THRESHOLD: Final = -3
_MAPPED_FROM_BYTES: Final = 128 << 10


def map_large_blocks() -> None:
    """Have glibc map each large block anew, as it does for the first one: pages of it that nobody touches cost nothing.

    By itself it keeps what was freed and clears it for the next array of zeros, megabytes for each recovery and role:
    a fifth of a story of crashes went into that. A process of the product makes such arrays once.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES)


# --- large_pages ---
# Which parts of a file this process has mapped with the advice to use large pages (proc(5), smaps).


LARGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage").exists()
_HEAD: Final = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ \d+ +(.*)")


def large_page_ranges(path: Path) -> list[tuple[int, int]]:
    """[start, stop) of each in bytes of the file, in its order."""
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


# --- open_files ---
# Files that this process has open below a folder.
#
# How many it has in all is nothing to go by: what other tests have left behind may be closed at any time.


def open_below(folder: Path) -> list[str]:
    """A path for each descriptor; one that was removed ends with " (deleted)"."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        # The one that lists them is closed by now.
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [name for name in found if name.startswith(f"{folder}/")]
