"""A connection to a role as an event loop uses it: all tasks share it, each request has a future."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final, TypeVar

from mqproc.client.connection import Connection, Outcome
from mqproc.client.core import Call
from mqproc.client.retry import ConnectionLost
from mqproc.client.unanswered import no_answer

T = TypeVar("T")

# Requests wait while more than this is waiting for room in the socket.
_OUTPUT_BYTES_MAX: Final = 8 << 20


class Line:
    """A connection that an event loop watches. Each request has a future, which gets its outcome."""

    def __init__(self, connection: Connection, path: Path) -> None:
        """`path`: of the role's socket."""
        self.connection = connection
        self._path = path
        self.loop = asyncio.get_running_loop()
        self._futures: dict[int, asyncio.Future[Outcome]] = {}
        self._room = asyncio.Event()
        self._room.set()
        self._writing = False
        self._unwatched = False
        self.loop.add_reader(connection.fd, self._on_readable)

    @property
    def usable(self) -> bool:
        return self.connection.usable and self.loop is asyncio.get_running_loop()

    @property
    def busy_elsewhere(self) -> bool:
        """Whether it is another event loop's that runs now, in another thread."""
        loop = self.loop
        return not self.connection.inherited and loop is not asyncio.get_running_loop() and loop.is_running()

    async def room(self) -> None:
        """Wait while too much waits to be sent."""
        await self._room.wait()

    def tell(self, call: Call[Any]) -> None:
        """Send a request that has no answer. Raises ConnectionLost."""
        self.connection.submit(call)
        self._settle()
        if self.connection.closed:
            raise ConnectionLost("the server closed the connection", taken=False)

    async def ask(self, call: Call[T], timeout_s: float) -> T:
        """A call's value; raises its error. Raises RequestTimeoutError when it takes too long."""
        request_id = self.connection.submit(call)
        future = self._futures[request_id] = self.loop.create_future()
        self._settle()
        try:
            async with asyncio.timeout(timeout_s):
                outcome = await future
        except TimeoutError:
            raise no_answer(self._path, timeout_s) from None
        finally:
            if not future.done() or future.cancelled():
                self._futures.pop(request_id, None)
                self.connection.forget(request_id)
        if outcome.error is not None:
            raise outcome.error
        value: T = outcome.value
        return value

    def _on_readable(self) -> None:
        self.connection.receive()
        self._settle()

    def _on_writable(self) -> None:
        self.connection.flush()
        self._settle()

    def _settle(self) -> None:
        """Hand out outcomes and watch for what the connection waits for now."""
        connection = self.connection
        while connection.done:
            request_id, outcome = connection.done.popitem()
            future = self._futures.pop(request_id, None)
            if future is not None and not future.done():
                future.set_result(outcome)
        if connection.closed:
            self._unwatch()
        elif connection.sending != self._writing:
            self._writing = connection.sending
            if self._writing:
                self.loop.add_writer(connection.fd, self._on_writable)
            else:
                self.loop.remove_writer(connection.fd)
        if connection.closed or connection.waiting_bytes <= _OUTPUT_BYTES_MAX:
            self._room.set()
        else:
            self._room.clear()

    @property
    def _is_watched(self) -> bool:
        """Not after a fork: what a loop watches with is shared then, and the parent would be told of nothing more."""
        return not self.connection.inherited and not self.loop.is_closed()

    def _unwatch(self) -> None:
        """Once: the number of a closed descriptor is soon another's, which the loop may watch for another line."""
        if self._is_watched and not self._unwatched:
            self._unwatched = True
            self.loop.remove_reader(self.connection.fd)
            self.loop.remove_writer(self.connection.fd)

    def close(self) -> None:
        self._unwatch()
        self.connection.lose("the client was closed")
        if self._is_watched:
            self._settle()
