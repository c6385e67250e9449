"""The work of a verify spread over processes: tasks go out one at a time, results come back as they are ready."""

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
from mqproc.io import StoreIO
from mqproc.kernels import dispatch_buffers, index_verify, record_check, scan, verify
from mqproc.store.forking import leave_signals_to_the_parent, signals_held
from mqproc.store.verify.index_details import IndexDetails, IndexQuestion
from mqproc.store.verify.index_pass import IndexPass
from mqproc.store.verify.inventory import Queue
from mqproc.store.verify.log_pass import LogPass
from mqproc.store.verify.picture import IndexFile, Picture, Share
from mqproc.store.verify.queue_details import ExtraQuestion, QueueDetails, ShareQuestion
from mqproc.store.verify.queue_pass import QueuePass

_TICK_S: Final = 0.1

if TYPE_CHECKING:
    _Pipe = Connection[Any, Any]
OnProgress = Callable[[int], None]
"""Told now and then how many bytes have been looked at."""


@dataclass(frozen=True, slots=True)
class QueueGroup:
    """Queues to be summed up together."""

    queues: list[Queue]


Task = Share | QueueGroup | IndexFile | ShareQuestion | ExtraQuestion | IndexQuestion


class Worker:
    """Does tasks of one picture; what a kind of task needs is made when the first one comes."""

    def __init__(self, io: StoreIO, picture: Picture, advance: Callable[[int], None]) -> None:
        self._io = io
        self._picture = picture
        self._advance = advance
        self._log: LogPass | None = None
        self._index: IndexPass | None = None
        self._details: QueueDetails | None = None

    def run(self, task: Task) -> Any:
        """Do one task; its result depends on its kind."""
        io, picture, advance = self._io, self._picture, self._advance
        if isinstance(task, Share):
            self._log = self._log or LogPass(io, picture, advance)
            return self._log.run(task)
        if isinstance(task, QueueGroup):
            return QueuePass(io, picture, advance).run(task.queues)
        if isinstance(task, IndexFile):
            self._index = self._index or IndexPass(io, picture, advance)
            return self._index.run(task)
        if isinstance(task, IndexQuestion):
            return IndexDetails(io, picture).run(task)
        self._details = self._details or QueueDetails(io, picture)
        return self._details.extras(task) if isinstance(task, ExtraQuestion) else self._details.share(task)

    def close(self) -> None:
        """Close what tasks have opened."""
        for part in (self._log, self._index, self._details):
            if part is not None:
                part.close()


class Workers:
    """What does the tasks of one verify: processes, or for little work this one."""

    def __init__(self, io: StoreIO, picture: Picture, jobs: int, on_progress: OnProgress) -> None:
        """Processes are forked at once, so that they find the kernels ready, and before anybody starts a thread."""
        self._on_progress = on_progress
        self._done = RawArray(c_int64, max(1, jobs))
        self._processes: dict[_Pipe, BaseProcess] = {}
        self._at: dict[_Pipe, Task] = {}
        self._here = Worker(io, picture, self._advance) if jobs <= 1 else None
        if jobs > 1:
            for module in (scan, dispatch_buffers, record_check, verify, index_verify):
                module.warm()
            try:
                for slot in range(jobs):
                    self._start(picture, slot)
            except BaseException:
                self.close()
                raise

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Any]]:
        """Each task with its result, in the order in which they are ready. Raises what a task raised."""
        if self._here is not None:
            for task in tasks:
                yield task, self._here.run(task)
            return
        waiting = list(tasks[::-1])
        for pipe in self._processes:
            self._hand(pipe, waiting)
        while self._at:
            for ready in wait(list(self._at), _TICK_S):
                pipe = cast("_Pipe", ready)
                task, result = self._take(pipe)
                self._hand(pipe, waiting)
                yield task, result
            self._on_progress(sum(self._done))

    def close(self) -> None:
        """End the processes, also those that are at work."""
        if self._here is not None:
            self._here.close()
        for pipe, process in self._processes.items():
            if pipe in self._at:
                process.terminate()
            pipe.close()
        for process in self._processes.values():
            process.join()

    def _advance(self, size: int) -> None:
        self._done[0] += size
        self._on_progress(self._done[0])

    def _start(self, picture: Picture, slot: int) -> None:
        here, there = multiprocessing.Pipe()
        others = [*self._processes, here]
        context = multiprocessing.get_context("fork")
        process = context.Process(target=_serve, args=(there, others, picture, self._done, slot), daemon=True)
        with signals_held():
            process.start()
            self._processes[here] = process
        there.close()

    def _hand(self, pipe: _Pipe, waiting: list[Task]) -> None:
        if waiting:
            task = waiting.pop()
            self._at[pipe] = task
            pipe.send(task)

    def _take(self, pipe: _Pipe) -> tuple[Task, Any]:
        task = self._at.pop(pipe)
        try:
            result = pipe.recv()
        except (EOFError, ConnectionResetError):
            process = self._processes[pipe]
            process.join(5)
            if process.exitcode == -signal.SIGBUS:
                raise CorruptStoreError(
                    f"{task}: a page of a file could not be read: the disk failed, or the file was cut meanwhile"
                ) from None
            raise InternalError(
                f"a verifying process (pid {process.pid}) ended with {process.exitcode}; fewer --jobs need less memory"
            ) from None
        if isinstance(result, BaseException):
            raise result
        return task, result


def _serve(pipe: _Pipe, others: list[_Pipe], picture: Picture, done: Any, slot: int) -> None:
    """A process's whole life: tasks in, results or what went wrong out, until the parent hangs up."""
    # A copy of the parent's end would keep this process from seeing that it is gone.
    for other in others:
        other.close()
    leave_signals_to_the_parent()

    def advance(size: int) -> None:
        done[slot] += size

    worker = Worker(StoreIO(), picture, advance)
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
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0))
