"""Spark's Python worker processes: their daemon, and the state kept between tasks.

`session.py` has Spark start this module in place of `pyspark.daemon`, with the same arguments.
"""

from __future__ import annotations

import functools
import gc
import socket
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeVar

from pyspark import daemon

from mqproc.roles.role import keep_freed_memory

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

T = TypeVar("T")

_run_worker = daemon.worker
_CLOSED = (BrokenPipeError, ConnectionResetError)


@functools.cache
def exclude_loaded_from_gc() -> None:
    """Exclude all objects that exist at the first call from garbage collections.

    A worker runs a full collection after each task. Over the objects of Spark, Arrow and numba that takes 0.1 s, longer
    than a small task.
    """
    gc.freeze()


def run_task(results: Iterator[T]) -> Iterator[T]:
    """Yield a task's results; keep freed memory and loaded modules for the next task."""
    keep_freed_memory()
    yield from results
    exclude_loaded_from_gc()


def worker(sock: socket.socket, authenticated: bool) -> int:
    """Run a task as Spark's worker does; 1 after the last task or if Java hung up, else 0.

    Java closes the connection when a query has enough rows (`show()`, a limit) and when a session ends. Spark's own
    worker prints a stack trace then.
    """
    sys.unraisablehook = _report_unraisable
    try:
        return _run_worker(sock, authenticated)
    except _CLOSED:
        return 1


def _report_unraisable(unraisable: UnraisableHookArgs) -> None:
    """Report an error, unless a file could not flush to a closed connection."""
    if not isinstance(unraisable.exc_value, _CLOSED):
        sys.__unraisablehook__(unraisable)


def main() -> None:
    """Fork workers until Java ends this process."""
    daemon.worker = worker
    daemon.manager()


if __name__ == "__main__":
    main()
