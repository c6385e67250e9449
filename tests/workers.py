"""Worker processes for work that takes long: stories of crashes and outages, fuzzing."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext

EXIT_INTERRUPTED = 130


def loaded_context() -> ForkServerContext:
    """For processes of tests that are clients: forked from one that has loaded the client and its kernels."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.loaded_client"])
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
