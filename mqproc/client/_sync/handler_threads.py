"""Threads that run a handler, several at a time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from mqproc.client._sync.background import Background, program_ends
from mqproc.client._sync.handling import Handling
from mqproc.client.local_redelivery import BUSY_S, IDLE_S, STOP_CHECK_S, queue_of
from mqproc.types import StoredMessage

_log = logging.getLogger("mqproc.consumer")


class _CallingThread:
    """Replaces a thread pool that Python has shut down: the submitting thread does the work."""

    def submit(self, work: Callable[..., None], *arguments: object) -> Future[None]:
        future: Future[None] = Future()
        try:
            work(*arguments)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        return future


class HandlerThreads(Handling):
    """A run of a handler by `workers` threads."""

    _is_alone = False
    _idle_s = IDLE_S
    _latest: dict[tuple[str, int], Future[None]]
    """With order: the future that handles each queue."""

    def run(self) -> None:
        """Run until the stop. Raises errors of the consumer and of acknowledging.

        Handlers that run then finish; all other received messages are redelivered.
        """
        if threading.current_thread() is threading.main_thread():
            self._run_in_thread()
        else:
            self._run()

    def _run_in_thread(self) -> None:
        """Run beside the main thread, the only one in which signal handlers raise.

        Python's pools and futures would keep a lock taken, and messages would be lost between two steps.
        """
        self._idle_s = STOP_CHECK_S
        failures: list[BaseException] = []

        def run() -> None:
            try:
                self._run()
            except BaseException as error:
                failures.append(error)

        background = Background("mqproc-handlers", run, daemon=False)
        try:
            background.start()
            background.join()
        except BaseException:
            self._state.broken = True
            background.join()
            raise
        if failures:
            raise failures.pop()

    def _run(self) -> None:
        self._latest = {}
        in_flight: set[Future[None]] = set()
        try:
            with ThreadPoolExecutor(self._workers, thread_name_prefix="mqproc-handler") as pool:
                try:
                    self._fill_pool(pool, in_flight)
                except BaseException:
                    self._state.broken = True
                    raise
            _raise_errors(in_flight)
        finally:
            self._redelivery.leave()
            self._state.give_back()

    def _fill_pool(self, pool: ThreadPoolExecutor, in_flight: set[Future[None]]) -> None:
        most = 2 * self._workers
        while not (self._stop.is_set() or self._state.broken):
            if len(in_flight) >= most:
                wait(in_flight, self._idle_s, FIRST_COMPLETED)
            in_flight -= _raise_errors(in_flight)
            if len(in_flight) < most:
                timeout_s = BUSY_S if in_flight else self._idle_s
                in_flight.update(self._submit_all(pool, self._receive(most, timeout_s)))

    def _submit_all(self, pool: ThreadPoolExecutor, runs: Sequence[list[StoredMessage]]) -> Iterator[Future[None]]:
        """Submit messages to the pool, until the program's main thread has ended.

        That stops the run in a daemon thread. Any other thread, which the program waits for, handles them itself.
        """
        for messages in runs:
            try:
                future = self._submit(pool, messages)
            except RuntimeError as error:
                if not program_ends(error):
                    raise
                if threading.current_thread().daemon:
                    self._state.leave(messages)
                    self._state.broken = True
                    continue
                if not self._is_alone:
                    self._is_alone = True
                    _log.warning("the program's main thread has ended: messages are now handled one by one")
                future = self._submit(_CallingThread(), messages)
                # At once: the futures are inspected only after all of these runs.
                self._state.broken = self._state.broken or future.exception() is not None
            yield future

    def _submit(self, pool: ThreadPoolExecutor | _CallingThread, messages: list[StoredMessage]) -> Future[None]:
        if self._tries_in_order is None:
            return pool.submit(self._handle_each, messages)
        self._state.begin(messages)
        queue = queue_of(messages[0])
        future = self._latest[queue] = pool.submit(self._handle_each_after, self._latest.get(queue), messages)
        return future

    def _handle_each_after(self, before: Future[None] | None, messages: list[StoredMessage]) -> None:
        """Wait for `before`, which the pool has started already."""
        if before is not None:
            wait([before])
        self._handle_each(messages)


def _raise_errors(in_flight: set[Future[None]]) -> set[Future[None]]:
    """The finished futures; raises the error of one that failed."""
    finished = {future for future in in_flight if future.done()}
    for future in finished:
        future.result()
    return finished
