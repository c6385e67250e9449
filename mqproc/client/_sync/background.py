"""Background threads of a client object, and the fetcher of its consumer."""

from __future__ import annotations

import _thread
import logging
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from mqproc.client.requests import QUERY, Call
from mqproc.client.retry import ConnectionLost, OutageLog
from mqproc.errors import BadRequestError, MqprocError, StoreBusyError

if TYPE_CHECKING:
    from mqproc.client._sync.connection_pool import Connections, PooledConnection
    from mqproc.client.connection import Connection

T = TypeVar("T")
Done = Callable[[Any, MqprocError | ConnectionLost | None], None]
_log = logging.getLogger("mqproc.consumer")
SIGNAL_S: Final = 0.2
"""Longest wait of the main thread for a lock: Python sees a signal that arrives just before the wait only after it."""


def program_ends(refused: RuntimeError) -> bool:
    """Whether no thread starts, or a thread pool accepts no work, because the program ends.

    The main thread still counts as alive while Python waits for the threads of pools, so only the error says it then. A
    pool with a thread that ended this way reports that it is shut down, without the reason.
    """
    text = str(refused)
    return "interpreter shutdown" in text or "new futures" in text or not threading.main_thread().is_alive()


def start_thread(thread: threading.Thread) -> None:
    """Start a thread. Raises RuntimeError at a limit of threads, or at the program's end.

    A signal handler's exception would leave the lock of Python's event taken, and the thread would wait for it.
    """
    thread._started._cond = Condition()  # type: ignore[attr-defined]
    try:
        thread.start()
    except RuntimeError as error:
        if program_ends(error):
            error.add_note(f"{thread.name} needs a thread, and none starts in functions of atexit: begin before")
        raise


def _acquire(lock: threading.Lock, timeout: float | None) -> bool:
    """Acquire a lock within a time; the main thread wakes up for signals that it would miss."""
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    longest_s = SIGNAL_S if threading.current_thread() is threading.main_thread() else threading.TIMEOUT_MAX
    while (left_s := deadline - time.monotonic()) > 0:
        if lock.acquire(True, min(left_s, longest_s)):
            return True
    return False


class Condition(_thread.RLock):  # type: ignore[misc]  # CPython allows it.
    """A threading.Condition that survives a signal handler's exception at any point.

    Python raises such an exception after a call. C code alone takes and releases the lock, and is not interrupted
    between taking it and entering the block that releases it; the code of Python's own Condition can be interrupted
    there, which leaves the lock taken for ever.
    """

    def __init__(self) -> None:
        self._waiters: deque[threading.Lock] = deque()

    def wait(self, timeout: float | None = None) -> bool:
        """Release the lock, taken once, until `notify_all`; False when the time was over before."""
        waiter, state = threading.Lock(), (1, threading.get_ident())
        waiter.acquire()
        self._waiters.append(waiter)
        released: list[None] = []
        notified = False
        try:
            released += map(_thread.RLock.release, (self,))  # No call: it is recorded as soon as it is done.
            notified = _acquire(waiter, timeout)
        finally:
            if released:
                self._acquire_restore(state)  # type: ignore[attr-defined]  # Not interrupted while it waits.
            if not notified and waiter in self._waiters:
                self._waiters.remove(waiter)
        return notified

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until a condition holds, at most so long; returns whether it holds."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not (holds := predicate()):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            self.wait(None if timeout is None else left_s)
        return holds

    def notify_all(self) -> None:
        """Wake all waiting threads; with the lock."""
        waiters = self._waiters
        while waiters:
            if waiters[0].locked():  # Not so when an exception came between these two steps before.
                waiters[0].release()
            del waiters[0]


class Background:
    """A thread that works for one object until it is asked to stop."""

    def __init__(self, name: str, work: Callable[[], None], *, daemon: bool = True) -> None:
        self.stopping = False
        """Whether the thread shall end."""
        self._changed = Condition()
        self._ended = False
        self._work = work
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name=name, daemon=daemon)

    def _run(self) -> None:
        try:
            self._work()
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def start(self) -> None:
        """Start the thread. Raises RuntimeError at a limit of threads."""
        try:
            start_thread(self._thread)
        except BaseException:
            self.stopping = True  # A signal handler may have raised when it had started.
            raise

    def pause(self, seconds: float) -> None:
        """Sleep until the stop, at most so long; in the thread."""
        with self._changed:
            self._changed.wait_for(lambda: self.stopping, seconds)

    def request_stop(self) -> None:
        """Ask the thread to end."""
        self.stopping = True
        with self._changed:
            self._changed.notify_all()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread's end, at most so long; whether it has ended, or never began.

        Not by its own `join`, nor `is_alive`: after an exception of a signal handler Python 3.11 takes it for ended.
        """
        if self._thread.ident is None or os.getpid() != self._pid:
            return True
        with self._changed:
            return self._changed.wait_for(lambda: self._ended, timeout_s)

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

    def __init__(self, client: Connections, name: str, on_interrupt: Callable[[], None]) -> None:
        """`name` identifies the consumer in the log.

        `on_interrupt` is called before the next turn after an exception from outside a call, such as a signal handler
        raises it at any moment: all calls in flight were given up, and their effect is unknown.
        """
        self._client = client
        self._on_interrupt = on_interrupt
        self._pid = os.getpid()
        self._connection: PooledConnection | None = None
        self._in_flight: dict[int, Done] = {}
        try:
            # No call: an interrupt comes only after the descriptor has its owner.
            [self._bell] = map(os.eventfd, (0,), (os.EFD_NONBLOCK | os.EFD_CLOEXEC,))
        except OSError as error:
            raise StoreBusyError(f"{name}: no descriptor for it: {error.strerror or error}", hint_ms=100) from None
        self._outage = OutageLog(_log, f"fetching by {name}", client.retry)
        self._pause_until = 0.0
        self._connected_at = 0.0
        self._over = False
        self._turn = threading.Lock()
        self._bell_lock = threading.Lock()
        self.interrupted = False
        """Record that an exception interrupted a step, so that its effect is unknown."""

    def check_owner(self) -> None:
        """Raise BadRequestError in a forked process.

        It has the queues in memory without a membership: both processes would commit, and read each other's answers.
        """
        if os.getpid() != self._pid:
            raise BadRequestError("this consumer is another process's, which this one was forked from: make one here")

    def __del__(self) -> None:
        # Of a consumer that an interrupt ended while it was made.
        if getattr(self, "_bell", -1) >= 0:
            os.close(self._bell)

    @property
    def is_waited_for(self) -> bool:
        """Whether a thread may wait for `wake`."""
        return self._turn.locked()

    def in_turn(self, work: Callable[[], T], otherwise: T, timeout_s: float = -1) -> T:
        """Run work that needs the fetcher alone; `otherwise` if another thread keeps it."""
        held: list[bool] = []
        try:
            try:
                # No call: it is recorded as soon as it is done, whenever a signal handler raises.
                held += filter(None, map(self._turn.acquire, (True,), (min(timeout_s, threading.TIMEOUT_MAX),)))
                if not held:
                    return otherwise
                self._recover()
                return work()
            finally:
                if held:
                    self._turn.release()
        except MqprocError:
            raise
        except BaseException:
            self.interrupted = True
            raise
        finally:
            if self._over:
                self._end()

    def _recover(self) -> None:
        """After an exception that came in the middle of anything: begin again where all is known."""
        if self.interrupted:
            self._disconnect()
            self._on_interrupt()
            self.interrupted = False

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
        with self._bell_lock:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Give up the calls in flight as soon as no thread has a turn. May be repeated."""
        self._over = True
        self.wake()
        self._end()

    def _end(self) -> None:
        held: list[bool] = []
        try:
            held += filter(None, map(self._turn.acquire, (False,)))
            if held:
                self._disconnect()
                with self._bell_lock:
                    bell, self._bell = self._bell, -1
                    if bell >= 0:
                        os.close(bell)
        finally:
            if held:
                self._turn.release()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._in_flight.clear()
