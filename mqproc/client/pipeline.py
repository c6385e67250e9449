"""Several calls of a client under way on one connection, finished in the order they were started."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from mqproc.client.core import Call
from mqproc.client.lines import Line
from mqproc.client.retry import ConnectionLost
from mqproc.errors import MqprocError

if TYPE_CHECKING:
    from mqproc.client.calls import Calls

T = TypeVar("T")


class _Flight(msgspec.Struct, Generic[T]):
    """A call under way, or the error that kept it from getting so far."""

    call: Call[T]
    started_s: float
    deadline: float
    line: Line | None
    request_id: int
    error: MqprocError | ConnectionLost | None


class Pipeline:
    """Several calls to one role under way at once, finished in the order they were started.

    A call that was refused for now, or surely not taken, is made again when its turn to finish comes: then it may be
    carried out after later ones. What one of them has waited for, those that were started before need not wait for too.
    """

    def __init__(self, client: Calls, role: str) -> None:
        self._client = client
        self._role = role
        self._line: Line | None = None
        self._flights: deque[_Flight[Any]] = deque()
        # When a call was made again the last time and went well.
        self._went_well_s = 0.0

    def __len__(self) -> int:
        return len(self._flights)

    def start(self, call: Call[Any]) -> None:
        """Send a call; returns when its bytes are the socket's."""
        deadline = self._client.deadline_of(call)
        flight: _Flight[Any] = _Flight(call, time.monotonic(), deadline, None, 0, None)
        self._flights.append(flight)
        try:
            flight.line = self._current_line()
            flight.request_id = flight.line.connection.submit(call)
            flight.line.push(deadline)
        except (MqprocError, ConnectionLost) as error:
            flight.error = error

    def _current_line(self) -> Line:
        if self._line is None or not self._line.connection.usable:
            self._line = self._client.take_line(self._role)
        return self._line

    def answered_by(self, moment_s: float) -> bool:
        """Whether `finish` need not wait by then; returns as soon as it need not."""
        flight = self._flights[0]
        return flight.line is None or flight.line.answered_by(flight.request_id, moment_s)

    def finish(self) -> Any:
        """The value of the oldest call; raises its error."""
        flight = self._flights.popleft()
        error = flight.error
        if error is None:
            assert flight.line is not None
            try:
                return flight.line.finish(flight.request_id, flight.deadline, spin=False)
            except (MqprocError, ConnectionLost) as problem:
                error = problem
        at_once = flight.started_s < self._went_well_s
        value = self._client.run_again(flight.call, flight.deadline, error, at_once=at_once)
        self._went_well_s = time.monotonic()
        return value

    def close(self) -> None:
        """Give the connection back; what is still under way is given up, its outcome unknown."""
        self._flights.clear()
        if self._line is not None:
            self._client.give_line(self._role, self._line)
            self._line = None
