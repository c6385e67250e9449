"""What tasks of a story that are clients share: one call after the other, over the real socket, without waiting."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mqproc.client.connection import CallOutcome, Connection, open_socket
from mqproc.client.requests import Call
from mqproc.client.retry import ConnectionLost
from mqproc.errors import NotRunningError, StoreBusyError
from tests.crash.schedule import Schedule

TRIES = 50


def connect(path: Path) -> Connection | None:
    """None while nobody listens."""
    try:
        return Connection(open_socket(path))
    except (NotRunningError, StoreBusyError):
        return None


def tries(schedule: Schedule) -> Iterator[None]:
    """Now, and a few times more when others have gone on."""
    for _ in range(TRIES):
        yield
        schedule.pause()


class Caller:
    """One client of one role, for one task."""

    def __init__(self, path: Path, schedule: Schedule) -> None:
        self._path = path
        self._schedule = schedule
        self._connection: Connection | None = None

    def call(self, call: Call[Any]) -> CallOutcome:
        """The outcome; while it is not there others run. Without a server nothing was taken."""
        if self._connection is None or self._connection.closed:
            self._connection = connect(self._path)
        if self._connection is None:
            self._schedule.pause()
            return CallOutcome(None, ConnectionLost("nobody listens", taken=False))
        request_id = self._connection.submit(call)
        while (outcome := self._connection.done.pop(request_id, None)) is None:
            self._connection.flush()
            self._schedule.pause()
            self._connection.receive()
        return outcome

    def leave(self, call: Call[Any]) -> None:
        """End amid a call: what it sent is in the socket."""
        if self._connection is not None and not self._connection.closed:
            self._connection.submit(call)
            self._connection.flush()
        self.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
