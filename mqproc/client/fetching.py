"""A consumer's own connection: pulls of many queues and commits under way at once, waited for together."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mqproc.client.core import QUERY, Call
from mqproc.client.outage import Outage
from mqproc.client.retry import ConnectionLost
from mqproc.errors import MqprocError

if TYPE_CHECKING:
    from mqproc.client.lines import Line
    from mqproc.client.sync import Client

Done = Callable[[Any, MqprocError | ConnectionLost | None], None]


class Fetcher:
    """Calls to the query role without waiting for each. Threads use it in turns; any may `wake` it."""

    def __init__(self, client: Client, who: str) -> None:
        """`who` fetches, in words for the log."""
        self._client = client
        self._line: Line | None = None
        self._under_way: dict[int, Done] = {}
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._outage = Outage("mqproc.consumer", f"fetching by {who}", client.retry)
        self._pause_until = 0.0
        self._connected_at = 0.0
        self._over = False
        self.turn = threading.Lock()

    @contextlib.contextmanager
    def in_turn(self, timeout_s: float = -1) -> Iterator[bool]:
        """Be who uses it; False when another does all the time."""
        if not self.turn.acquire(timeout=timeout_s):
            yield False
            return
        try:
            yield True
        finally:
            self.turn.release()
            if self._over:
                self._end()

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def usable(self) -> bool:
        """Whether calls should be started now: after a failure a while passes."""
        return time.monotonic() >= self._pause_until

    def start(self, call: Call[Any], done: Done) -> None:
        """Send a call; `done` gets its value or its error, from `wait`."""
        try:
            line = self._current()
        except (MqprocError, ConnectionLost) as error:
            self._fail_later(error, 0.0)
            done(None, error)
            return
        self._under_way[line.connection.submit(call)] = done

    def _current(self) -> Line:
        if self._line is None:
            self._line = self._client.take_line(QUERY)
            self._connected_at = time.monotonic()
        return self._line

    def wait(self, timeout_s: float) -> int:
        """Wait for an outcome, a `wake` or the time; how many calls have got their outcome."""
        line = self._line
        if line is not None and line.connection.done:
            return self._finish(line)
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        if line is not None:
            connection = line.connection
            if connection.closed:
                return self._finish(line)
            poll.register(connection.fd, select.POLLIN | (select.POLLOUT if connection.sending else 0))
        if self._pause_until:
            timeout_s = min(timeout_s, max(0.0, self._pause_until - time.monotonic()) or timeout_s)
        for fd, event in poll.poll(max(0.0, timeout_s) * 1000):
            if fd == self._bell:
                os.eventfd_read(self._bell)
            elif line is not None:
                if event & select.POLLOUT:
                    line.connection.flush()
                while event & ~select.POLLOUT and line.connection.receive() and not line.connection.closed:
                    if line.connection.done:
                        break
        return self._finish(line) if line is not None else 0

    def _finish(self, line: Line) -> int:
        outcomes, count = line.connection.done, 0
        failure: MqprocError | ConnectionLost | None = None
        while outcomes:
            request_id = next(iter(outcomes))
            outcome = outcomes.pop(request_id)
            done = self._under_way.pop(request_id, None)
            count += 1
            if outcome.error is not None:
                failure = outcome.error
            if done is not None:
                done(outcome.value, outcome.error)
        if line.connection.closed:
            self._line = None
        if failure is not None or line.connection.closed:
            stood_s = time.monotonic() - self._connected_at if line.connection.closed else 0.0
            self._fail_later(failure, stood_s)
        elif count:
            self._outage.over()
            self._pause_until = 0.0
        return count

    def _fail_later(self, error: MqprocError | ConnectionLost | None, stood_s: float) -> None:
        """Have the next calls wait: the longer the more often they failed."""
        self._pause_until = time.monotonic() + self._outage.failed(error, stood_s)

    def wake(self) -> None:
        """End a `wait` of another thread, or the next one."""
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Give up what is under way, as soon as nobody has a turn: this thread may itself, below a signal handler."""
        self.wake()
        self._over = True
        self._end()

    def _end(self) -> None:
        if not self.turn.acquire(blocking=False):
            return
        if self._line is not None:
            self._line.connection.close()
            self._line = None
        self._under_way.clear()
        if self._bell >= 0:
            os.close(self._bell)
            self._bell = -1
        self.turn.release()
