"""Background threads of a client object, and the fetcher of its consumer."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mqproc.client.requests import QUERY, Call
from mqproc.client.retry import ConnectionLost, OutageLog
from mqproc.errors import BadRequestError, MqprocError

if TYPE_CHECKING:
    from mqproc.client._sync.connection_pool import Connections, PooledConnection
    from mqproc.client.connection import Connection

Done = Callable[[Any, MqprocError | ConnectionLost | None], None]


def program_ends(refused: RuntimeError) -> bool:
    """Whether no thread starts, or a thread pool accepts no work, because the program ends.

    The main thread still counts as alive while Python waits for the threads of pools, so only the error says it then. A
    pool with a thread that ended this way reports that it is shut down, without the reason.
    """
    text = str(refused)
    return "interpreter shutdown" in text or "new futures" in text or not threading.main_thread().is_alive()


def start_thread(thread: threading.Thread) -> None:
    """Start a thread. Raises RuntimeError at a limit of threads, or at the program's end."""
    try:
        thread.start()
    except RuntimeError as error:
        if program_ends(error):
            error.add_note(f"{thread.name} needs a thread, and none starts in functions of atexit: begin before")
        raise


class Background:
    """A thread that works for one object until it is asked to stop."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=work, name=name, daemon=True)

    @property
    def stopping(self) -> bool:
        """Whether the thread shall end."""
        return self._stop.is_set()

    def start(self) -> None:
        """Start the thread. Raises RuntimeError at a limit of threads."""
        start_thread(self._thread)

    def pause(self, seconds: float) -> None:
        """Sleep until the stop, at most so long; in the thread."""
        self._stop.wait(seconds)

    def request_stop(self) -> None:
        """Ask the thread to end."""
        self._stop.set()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the thread's end, at most so long."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def stop(self) -> None:
        """Ask the thread to end and wait for it."""
        self.request_stop()
        self.join()


def _transfer(connection: Connection, event: int) -> None:
    """Send and receive as poll's event says, until there is an outcome."""
    if event & select.POLLOUT:
        connection.flush()
    while event & ~select.POLLOUT and connection.receive() and not connection.closed:
        if connection.done:
            break


class Fetcher:
    """Pulls and commits of a consumer in flight at once on its own connection.

    Threads use it in turns; any may `wake` it.
    """

    def __init__(self, client: Connections, name: str) -> None:
        """`name` identifies the consumer in the log."""
        self._client = client
        self._pid = os.getpid()
        self._connection: PooledConnection | None = None
        self._in_flight: dict[int, Done] = {}
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._outage = OutageLog("mqproc.consumer", f"fetching by {name}", client.retry)
        self._pause_until = 0.0
        self._connected_at = 0.0
        self._over = False
        self.turn = threading.Lock()

    def check_owner(self) -> None:
        """Raise BadRequestError in a forked process.

        It has the queues in memory without a membership: both processes would commit, and read each other's answers.
        """
        if os.getpid() != self._pid:
            raise BadRequestError("this consumer is another process's, which this one was forked from: make one here")

    @property
    def is_waited_for(self) -> bool:
        """Whether a thread may wait for `wake`."""
        return self.turn.locked()

    @contextlib.contextmanager
    def in_turn(self, timeout_s: float = -1) -> Iterator[bool]:
        """Use the fetcher alone; False when another thread does all the time."""
        if not self.turn.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
            yield False
            return
        try:
            yield True
        finally:
            self.turn.release()
            if self._over:
                self._end()

    def __len__(self) -> int:
        return len(self._in_flight)

    @property
    def usable(self) -> bool:
        """Whether calls may start now: not during the pause after a failure."""
        return time.monotonic() >= self._pause_until

    def start(self, call: Call[Any], done: Done) -> None:
        """Send a call; `done` gets its value or its error, from `poll` or `wait`."""
        try:
            if self._connection is None:
                self._connection = self._client.take_connection(QUERY)
                self._connected_at = time.monotonic()
        except (MqprocError, ConnectionLost) as error:
            self._fail_later(error, 0.0)
            done(None, error)
            return
        self._in_flight[self._connection.connection.submit(call)] = done

    def poll(self) -> None:
        """Process the outcomes that have arrived."""
        self.wait(0.0)

    def wait(self, timeout_s: float) -> int:
        """Wait for an outcome, a `wake` or the time; returns how many calls have got their outcome."""
        pooled = self._connection
        if pooled is not None and pooled.connection.done:
            return self._finish(pooled)
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        if pooled is not None:
            connection = pooled.connection
            if connection.closed:
                return self._finish(pooled)
            poll.register(connection.fd, select.POLLIN | (select.POLLOUT if connection.sending else 0))
        if self._pause_until:
            timeout_s = min(timeout_s, max(0.0, self._pause_until - time.monotonic()) or timeout_s)
        for fd, event in poll.poll(max(0.0, timeout_s) * 1000):
            if fd == self._bell:
                os.eventfd_read(self._bell)
            elif pooled is not None:
                _transfer(pooled.connection, event)
        return self._finish(pooled) if pooled is not None else 0

    def _finish(self, pooled: PooledConnection) -> int:
        connection = pooled.connection
        outcomes, count = connection.done, 0
        failure: MqprocError | ConnectionLost | None = None
        while outcomes:
            request_id = next(iter(outcomes))
            outcome = outcomes.pop(request_id)
            done = self._in_flight.pop(request_id, None)
            count += 1
            if outcome.error is not None:
                failure = outcome.error
            if done is not None:
                done(outcome.value, outcome.error)
        if connection.closed:
            self._connection = None
        if failure is not None or connection.closed:
            connected_s = time.monotonic() - self._connected_at if connection.closed else 0.0
            self._fail_later(failure, connected_s)
        elif count:
            self._outage.over()
            self._pause_until = 0.0
        return count

    def _fail_later(self, error: MqprocError | ConnectionLost | None, connected_s: float) -> None:
        """Delay the next calls, the longer the more often they failed."""
        self._pause_until = time.monotonic() + self._outage.failed(error, connected_s)

    def wake(self) -> None:
        """End a `wait` of another thread, or the next one."""
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Give up the calls in flight as soon as no thread has a turn."""
        self.wake()
        self._over = True
        self._end()

    def _end(self) -> None:
        if not self.turn.acquire(blocking=False):
            return
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._in_flight.clear()
        if self._bell >= 0:
            os.close(self._bell)
            self._bell = -1
        self.turn.release()
