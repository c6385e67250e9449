"""Connections to a role as threads use them: one waits on its own, and free ones are kept for the next caller."""

from __future__ import annotations

import os
import select
import time
from collections import deque
from pathlib import Path
from typing import Any, TypeVar

from mqproc.client.connection import Connection, open_socket
from mqproc.client.core import Call
from mqproc.client.retry import ConnectionLost
from mqproc.client.unanswered import no_answer
from mqproc.errors import NotRunningError, StoreBusyError

T = TypeVar("T")
_clock = time.monotonic
SPIN_MIN_S = 50e-6
_POLLIN = select.POLLIN
_BOTH_WAYS = select.POLLIN | select.POLLOUT
# Beyond 24 days poll refuses to wait.
_SLEEP_MAX_S = 86_400.0
# The usual time of an answer is a mean in which each new one counts this part.
USUAL_OF = 8


class Line:
    """A connection and how a thread waits on it: it looks about as long as answers usually take, then sleeps.

    Being woken costs more than a short look; where answers take longer than `spin_s` nothing is looked for.
    """

    __slots__ = ("_path", "_poll", "_spin_s", "_watched", "closings", "connection", "usual_s")

    def __init__(self, connection: Connection, path: Path, spin_s: float, closings: int = 0) -> None:
        """`path`: of the role's socket."""
        self.connection = connection
        self._path = path
        self.closings = closings
        """How often its client had been closed when it was made."""
        self._spin_s = spin_s
        self.usual_s = 0.0
        """How long answers have taken lately."""
        self._poll = select.poll()
        self._watched = _POLLIN
        self._poll.register(connection.fd, select.POLLIN)

    def ask(self, call: Call[T], deadline: float) -> T:
        """A call's value on a line that the caller has for itself; raises its error."""
        request_id = self.connection.submit(call)
        self.push(deadline)
        value: T = self.finish(request_id, deadline, spin=False)
        return value

    def push(self, deadline: float) -> None:
        """Return when the socket has taken all that was submitted, reading answers meanwhile."""
        connection = self.connection
        while connection.sending:
            if not self._wait(deadline):
                connection.lose("the server did not take the request in time")
                raise StoreBusyError("the server did not take the request in time")

    def finish(self, request_id: int, deadline: float, spin: bool = True) -> Any:
        """The value of a request; raises its error. Raises RequestTimeoutError when it takes too long."""
        connection = self.connection
        done = connection.done
        if request_id not in done:
            started = _clock()
            if spin and self.usual_s <= self._spin_s:
                self._look(request_id, started + min(self._spin_s, 2 * self.usual_s + SPIN_MIN_S))
            while request_id not in done:
                if not self._wait(deadline):
                    connection.forget(request_id)
                    raise no_answer(self._path, _clock() - started)
            if spin:
                self.usual_s += (_clock() - started - self.usual_s) / USUAL_OF
        outcome = done.pop(request_id)
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    def answered_by(self, request_id: int, moment_s: float) -> bool:
        """Whether there is an outcome of a request by then; returns as soon as there is."""
        done = self.connection.done
        while request_id not in done:
            if not self._wait(moment_s):
                return False
        return True

    def _look(self, request_id: int, end: float) -> None:
        """Look for the answer until `end`; yielding lets the server run on this processor."""
        connection, poll, done = self.connection, self._poll.poll, self.connection.done
        while _clock() < end:
            if poll(0):
                connection.receive()
                if request_id in done or connection.closed:
                    return
            else:
                os.sched_yield()

    def _wait(self, deadline: float) -> bool:
        """Sleep until something can be read or sent, and do it; False when the time is over."""
        connection = self.connection
        if connection.closed:
            return True
        wanted = _BOTH_WAYS if connection.sending else _POLLIN
        if wanted != self._watched:
            self._watched = wanted
            self._poll.modify(connection.fd, wanted)
        left_s = deadline - _clock()
        if left_s <= 0:
            return False
        for _, event in self._poll.poll(min(left_s, _SLEEP_MAX_S) * 1000 + 1):
            if event == _POLLIN:
                connection.receive()
                continue
            if event & select.POLLOUT:
                connection.flush()
            if event & ~select.POLLOUT:
                connection.receive()
        return True


class Lines:
    """The free connections to one role."""

    def __init__(self, path: Path, spin_s: float, frame_bytes_max: int) -> None:
        self._path = path
        self._spin_s = spin_s
        self._frame_bytes_max = frame_bytes_max
        self._free: deque[Line] = deque()
        self._ever_connected = False
        self._closings = 0
        self._gone = ""

    def take(self) -> Line:
        """A free connection, or a new one. Raises ConnectionLost when nobody listens."""
        while self._free:
            try:
                line = self._free.pop()
            except IndexError:
                break  # Another thread was faster.
            if line.connection.usable:
                return line
            line.connection.close()
        try:
            sock = open_socket(self._path)
        except NotRunningError as error:
            was_here = self._ever_connected and not self._gone
            raise ConnectionLost(
                self._gone or str(error), taken=False, connected=False, ever_connected=was_here
            ) from None
        self._ever_connected = True
        return Line(Connection(sock, self._frame_bytes_max), self._path, self._spin_s, self._closings)

    def give(self, line: Line) -> None:
        """Take a connection back, unless something is under way on it, or all were closed meanwhile."""
        if line.connection.free and line.closings == self._closings:
            self._free.append(line)
        else:
            line.connection.close()

    def close(self) -> None:
        """Close the free ones, and each of the others when it is given back."""
        self._closings += 1
        while self._free:
            self._free.pop().connection.close()

    def leave(self, why: str) -> None:
        """From now on a role that does not listen is not waited for, which is told by `why`."""
        self._gone = why
