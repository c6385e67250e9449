"""Worker processes of a verify: one task at a time, results in order of completion."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_int64
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray
from typing import TYPE_CHECKING, Any, Final, cast

from mqproc.errors import CorruptStoreError, InternalError
from mqproc.io.store_io import StoreIO
from mqproc.kernels import dispatch, index, record_check, scan, verify
from mqproc.store.verify.index import IndexPass, IndexQuery, IndexWalk, ItemComparison
from mqproc.store.verify.inventory import Queue
from mqproc.store.verify.log import LogPass
from mqproc.store.verify.queues import ExtraQuery, QueuePass, ShareQuery, UnitComparison
from mqproc.store.verify.snapshot import IndexFile, Share, Snapshot
from mqproc.util.signals import deferred_signals, reset_signals_in_child

_TICK_S: Final = 0.1

if TYPE_CHECKING:
    _Pipe = Connection[Any, Any]
OnProgress = Callable[[int], None]
"""Called with the number of bytes verified so far."""


@dataclass(frozen=True, slots=True)
class QueueBatch:
    """Queues to sum up in one task."""

    queues: list[Queue]


Task = Share | QueueBatch | IndexFile | ShareQuery | ExtraQuery | IndexQuery


class Worker:
    """Runs tasks on one snapshot; state that a kind of task needs is created on first use."""

    def __init__(self, io: StoreIO, snapshot: Snapshot, advance: Callable[[int], None]) -> None:
        self._io = io
        self._snapshot = snapshot
        self._advance = advance
        self._log: LogPass | None = None
        self._index: IndexPass | None = None
        self._details: UnitComparison | None = None

    def run(self, task: Task) -> Any:
        """Run one task; the type of its result depends on the task."""
        io, snapshot, advance = self._io, self._snapshot, self._advance
        if isinstance(task, Share):
            self._log = self._log or LogPass(io, snapshot, IndexWalk, advance)
            return self._log.run(task)
        if isinstance(task, QueueBatch):
            return QueuePass(io, snapshot, advance).run(task.queues)
        if isinstance(task, IndexFile):
            self._index = self._index or IndexPass(io, snapshot, advance)
            return self._index.run(task)
        if isinstance(task, IndexQuery):
            return ItemComparison(io, snapshot).run(task)
        self._details = self._details or UnitComparison(io, snapshot)
        return self._details.extras(task) if isinstance(task, ExtraQuery) else self._details.share(task)

    def close(self) -> None:
        """Close all files."""
        for part in (self._log, self._index, self._details):
            if part is not None:
                part.close()


class Workers:
    """Runs the tasks of one verify in processes, or in this process if there is little work."""

    def __init__(self, io: StoreIO, snapshot: Snapshot, jobs: int, on_progress: OnProgress) -> None:
        """Fork the processes at once: they inherit compiled kernels, and no thread exists yet."""
        self._on_progress = on_progress
        self._done = RawArray(c_int64, max(1, jobs))
        self._processes: dict[_Pipe, BaseProcess] = {}
        self._running: dict[_Pipe, Task] = {}
        self._local = Worker(io, snapshot, self._advance) if jobs <= 1 else None
        if jobs > 1:
            for module in (scan, dispatch, record_check, verify, index):
                module.warm()
            try:
                for slot in range(jobs):
                    self._start(snapshot, slot)
            except BaseException:
                self.close()
                raise

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Any]]:
        """Yield each task with its result, in order of completion. Raises a task's exception."""
        if self._local is not None:
            for task in tasks:
                yield task, self._local.run(task)
            return
        waiting = list(tasks[::-1])
        for pipe in self._processes:
            self._send(pipe, waiting)
        while self._running:
            for ready in wait(list(self._running), _TICK_S):
                pipe = cast("_Pipe", ready)
                task, result = self._receive(pipe)
                self._send(pipe, waiting)
                yield task, result
            self._on_progress(sum(self._done))

    def close(self) -> None:
        """End the processes, including busy ones."""
        if self._local is not None:
            self._local.close()
        for pipe, process in self._processes.items():
            if pipe in self._running:
                process.terminate()
            pipe.close()
        for process in self._processes.values():
            process.join()

    def _advance(self, size: int) -> None:
        self._done[0] += size
        self._on_progress(self._done[0])

    def _start(self, snapshot: Snapshot, slot: int) -> None:
        here, there = multiprocessing.Pipe()
        others = [*self._processes, here]
        context = multiprocessing.get_context("fork")
        process = context.Process(target=_serve, args=(there, others, snapshot, self._done, slot), daemon=True)
        with deferred_signals(forking=True):
            process.start()
            self._processes[here] = process
        there.close()

    def _send(self, pipe: _Pipe, waiting: list[Task]) -> None:
        if waiting:
            task = waiting.pop()
            self._running[pipe] = task
            pipe.send(task)

    def _receive(self, pipe: _Pipe) -> tuple[Task, Any]:
        task = self._running.pop(pipe)
        try:
            result = pipe.recv()
        except (EOFError, ConnectionResetError):
            process = self._processes[pipe]
            process.join(5)
            if process.exitcode == -signal.SIGBUS:
                raise CorruptStoreError(
                    f"{task}: a page of a file is unreadable: disk error, or the file was truncated during the verify"
                ) from None
            raise InternalError(
                f"verify process {process.pid} exited with {process.exitcode}; fewer --jobs need less memory"
            ) from None
        if isinstance(result, BaseException):
            raise result
        return task, result


def _serve(pipe: _Pipe, others: list[_Pipe], snapshot: Snapshot, done: Any, slot: int) -> None:
    """Main function of a worker: receive tasks, send results or exceptions, until hang-up."""
    # A copy of the parent's end would hide that the parent is gone.
    for other in others:
        other.close()
    reset_signals_in_child()

    def advance(size: int) -> None:
        done[slot] += size

    worker = Worker(StoreIO(), snapshot, advance)
    try:
        while True:
            task = pipe.recv()
            try:
                result = worker.run(task)
            except Exception as error:
                result = error
            pipe.send(result)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        worker.close()


def usable_jobs() -> int:
    """Number of processors available to this process."""
    return len(os.sched_getaffinity(0))
