"""Calls over one connection a role, shared by all tasks of an event loop: what the asynchronous client stands on.

As `calls`, with futures in the place of threads that wait.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from mqproc.client import core
from mqproc.client.aio_lines import Line
from mqproc.client.amounts import above_zero, at_least_one
from mqproc.client.connection import ANSWER_BYTES, FRAME_BYTES_MAX, Connection, open_socket
from mqproc.client.core import Call
from mqproc.client.retry import Attempts, ConnectionLost, RetryPolicy, policy_of
from mqproc.errors import BadRequestError, MqprocError, NotRunningError, RequestTimeoutError, StoreBusyError
from mqproc.paths import given_path

T = TypeVar("T")
OnFailure = Callable[[MqprocError | ConnectionLost], object]

_clock = time.monotonic


class AsyncCalls:
    """Connections to the roles of one store, and calls over them. Connects at the first call and again after a loss."""

    def __init__(
        self,
        store_or_socket: str | Path,
        *,
        timeout: float = core.TIMEOUT_S,
        retry: RetryPolicy | None = None,
        max_frame_bytes: int = FRAME_BYTES_MAX,
    ) -> None:
        self.store = given_path(store_or_socket)
        self.timeout_s = above_zero("timeout", timeout)
        self.retry = policy_of(retry)
        self._frame_bytes_max = at_least_one("max_frame_bytes", max_frame_bytes)
        self.pull_bytes_max = max(1, self._frame_bytes_max - ANSWER_BYTES)
        """So much of messages is asked for at once: one that is larger comes alone, and may not fit."""
        self._again = functools.partial(type(self), timeout=timeout, retry=retry, max_frame_bytes=self._frame_bytes_max)
        self._paths = core.socket_paths(store_or_socket)
        self._lines: dict[str, Line] = {}
        self._apart: list[str] = []
        """Names of lines for one call at a time that have none under way."""
        self._apart_count = itertools.count(1)
        self._ever_connected: set[str] = set()
        self._closings = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({os.fspath(self.store)!r})"

    def __reduce__(self) -> tuple[Callable[[Path], object], tuple[Path]]:
        """Pickled and copied, as workers are given one, it is a client of the same store that is not connected yet."""
        return self._again, (self.store,)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; calls under way end, with BadRequestError where nothing else is to be told.

        The client can still be used: it connects again.
        """
        self._closings += 1
        while self._lines:
            self._lines.popitem()[1].close()

    # Running calls

    async def run(self, call: Call[T], on_failure: OnFailure | None = None) -> T:
        """Make a call, again when that is safe, and return its value or raise its error.

        `on_failure` is told of each try that failed.
        """
        deadline = _clock() + self.timeout_s + call.wait_s
        closings = self._closings
        attempts: Attempts | None = None
        while True:
            try:
                return await self._run_once(call, deadline)
            except (MqprocError, ConnectionLost) as error:
                if on_failure is not None:
                    on_failure(error)
                attempts = attempts or Attempts(self.retry, deadline, repeatable=call.repeatable, is_send=call.is_send)
                pause_s = attempts.pause_after(error, _clock())
                call = call.again or call
            if self._closings == closings:
                await asyncio.sleep(pause_s)
            if self._closings != closings:
                # Made again, it would open a connection that nobody closes.
                raise attempts.given_up("the client was closed")

    async def _run_once(self, call: Call[T], deadline: float) -> T:
        if call.takes:
            return await self._run_apart(call, deadline)
        line = self._line(call.role)
        try:
            async with asyncio.timeout(max(0.0, deadline - _clock())):
                await line.room()
        except TimeoutError:
            raise StoreBusyError("the server did not take the request in time") from None
        if call.oneway:
            line.tell(call)
            return call.parse(memoryview(b""), memoryview(b""))
        return await line.ask(call, max(0.0, deadline - _clock()))

    async def _run_apart(self, call: Call[T], deadline: float) -> T:
        """On a line of its own, which ends with a caller that does not wait for the answer."""
        name = self._apart.pop() if self._apart else f"{call.role} {next(self._apart_count)}"
        try:
            line = self._line(call.role, name)
            try:
                return await line.ask(call, max(0.0, deadline - _clock()))
            except (asyncio.CancelledError, RequestTimeoutError):
                line.close()
                raise
        finally:
            self._apart.append(name)

    def _line(self, role: str, name: str = "") -> Line:
        line = self._lines.get(name or role)
        if line is not None:
            if line.usable:
                return line
            if line.busy_elsewhere:
                raise BadRequestError("the client is in use in another event loop: each loop needs a client of its own")
            line.close()
        line = self._lines[name or role] = self.new_line(role)
        return line

    def new_line(self, role: str) -> Line:
        """A connection that the caller alone uses and closes. Raises ConnectionLost when nobody listens."""
        try:
            sock = open_socket(self._paths[role])
        except NotRunningError as error:
            raise ConnectionLost(
                str(error), taken=False, connected=False, ever_connected=role in self._ever_connected
            ) from None
        self._ever_connected.add(role)
        return Line(Connection(sock, self._frame_bytes_max), self._paths[role])

    async def run_all(self, calls: Iterable[Call[T]], in_flight: int) -> AsyncIterator[T]:
        """Make calls with up to `in_flight` of them under way; yields the values in order.

        At an error the calls under way are given up.
        """
        in_flight = at_least_one("in_flight", in_flight)
        tasks: deque[asyncio.Task[T]] = deque()
        try:
            for call in calls:
                if len(tasks) >= in_flight:
                    yield await tasks.popleft()
                tasks.append(asyncio.ensure_future(self.run(call)))
                # Let the frame go out before the next is made: its bytes may be the caller's own.
                await asyncio.sleep(0)
            while tasks:
                yield await tasks.popleft()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
