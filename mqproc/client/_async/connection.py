"""Calls over one connection per role: the base of the asynchronous client."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from mqproc.client import requests, send_requests
from mqproc.client.codecs import CodecArgument
from mqproc.client.connection import (
    FRAME_BYTES_MAX,
    CallOutcome,
    ClientSettings,
    Connection,
    no_answer,
    open_socket,
)
from mqproc.client.own_writes import (
    AFTER_OWN_WRITES,
    OWN_WRITES_POLL_S,
    STATS_PAUSES,
    DispatchPosition,
    OwnWrites,
)
from mqproc.client.requests import NOT_TAKEN, Call, Steps
from mqproc.client.retry import Attempts, ConnectionLost, RetryPolicy
from mqproc.client.send_requests import GroupLimits, NotUniform, StreamGroup
from mqproc.client.send_results import SendResults, SentPart
from mqproc.errors import (
    BadRequestError,
    MessageNotFoundError,
    MqprocError,
    NotRunningError,
    RequestTimeoutError,
    StoreBusyError,
)
from mqproc.types import Message, SendResult
from mqproc.util.arguments import at_least_one

T = TypeVar("T")
OnFailure = Callable[[MqprocError | ConnectionLost], object]

# Requests wait while more than this is waiting for room in the socket.
_OUTPUT_BYTES_MAX: Final = 8 << 20
# How long a cancelled call waits for the server, which ends it at once.
_HAND_BACK_S: Final = 1.0
_clock = time.monotonic


class MultiplexedConnection:
    """A connection that an event loop watches.

    Each request has a future, which gets its outcome.
    """

    def __init__(self, connection: Connection, path: Path) -> None:
        """`path`: of the role's socket."""
        self.connection = connection
        self._path = path
        self.loop = asyncio.get_running_loop()
        self._futures: dict[int, asyncio.Future[CallOutcome]] = {}
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
        """Whether the connection belongs to another event loop that runs in another thread."""
        loop = self.loop
        return not self.connection.inherited and loop is not asyncio.get_running_loop() and loop.is_running()

    async def room(self) -> None:
        """Wait while too many bytes wait to be sent."""
        await self._room.wait()

    def send_oneway(self, call: Call[Any]) -> None:
        """Send a request that has no answer. Raises ConnectionLost."""
        self.connection.submit(call)
        self._process()
        if self.connection.closed:
            raise ConnectionLost("the server closed the connection", taken=False)

    async def ask(self, call: Call[T], deadline: float) -> T:
        """Return a call's value or raise its error.

        Raises RequestTimeoutError when it takes too long.
        """
        timeout_s = max(0.0, deadline - _clock())
        request_id, future = self.begin(call)
        try:
            async with asyncio.timeout(timeout_s):
                outcome = await future
        except TimeoutError:
            raise self.no_answer(timeout_s) from None
        finally:
            if not future.done() or future.cancelled():
                self._futures.pop(request_id, None)
                self.connection.forget(request_id)
        value: T = _value_of(outcome)
        return value

    def begin(self, call: Call[Any]) -> tuple[int, asyncio.Future[CallOutcome]]:
        """Send a call: its request id, and a future that gets its outcome."""
        request_id = self.connection.submit(call)
        future = self._futures[request_id] = self.loop.create_future()
        self._process()
        return request_id, future

    def no_answer(self, waited_s: float) -> RequestTimeoutError:
        """The error of a call that was not answered in time."""
        return no_answer(self._path, waited_s)

    def _on_readable(self) -> None:
        self.connection.receive()
        self._process()

    def _on_writable(self) -> None:
        self.connection.flush()
        self._process()

    def _process(self) -> None:
        """Set the futures of outcomes, and watch the socket for the next events."""
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
        """Whether the loop watches it. Not after a fork, which shares the selector with the parent."""
        return not self.connection.inherited and not self.loop.is_closed()

    def _unwatch(self) -> None:
        """Stop watching, once: the descriptor's number may soon belong to another connection."""
        if self._is_watched and not self._unwatched:
            self._unwatched = True
            self.loop.remove_reader(self.connection.fd)
            self.loop.remove_writer(self.connection.fd)

    def end_requests(self) -> None:
        """Shut down writing: the server closes the connection after its last answer."""
        if self.connection.usable:
            with contextlib.suppress(OSError):  # The server has closed it.
                self.connection.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the connection; requests in flight end with ConnectionLost."""
        self._unwatch()
        self.connection.lose("the client was closed")
        if self._is_watched:
            self._process()


def _value_of(outcome: CallOutcome) -> Any:
    """The value of a call; raises its error."""
    if outcome.error is not None:
        raise outcome.error
    return outcome.value


class AsyncConnections(ClientSettings):
    """Connections to the roles of one store, and calls over them.

    Connects at the first call and again after a loss.
    """

    _internal = frozenset({"deadline_of", "run", "run_all", "send_group", "take_connection"})

    def __init__(
        self,
        store_or_socket: str | Path,
        *,
        timeout: float = requests.TIMEOUT_S,
        retry: RetryPolicy | None = None,
        max_frame_bytes: int = FRAME_BYTES_MAX,
        read_your_writes: bool = True,
        codec: CodecArgument = None,
    ) -> None:
        super().__init__(store_or_socket, timeout, retry, max_frame_bytes, read_your_writes, codec)
        self._connections: dict[str, MultiplexedConnection] = {}
        self._exclusive: list[str] = []
        """Names of idle connections for one call at a time."""
        self._exclusive_count = itertools.count(1)
        self._ever_connected: set[str] = set()
        self._closings = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; ends calls in flight, by default with BadRequestError.

        The client can still be used: it connects again. Example: `await client.close()`
        """
        self._closings += 1
        while self._connections:
            self._connections.popitem()[1].close()

    # Running calls

    def deadline_of(self, call: Call[Any]) -> float:
        """Monotonic time at which a call that starts now times out."""
        return _clock() + self.timeout_s + call.wait_s

    async def run(self, call: Call[T], on_failure: OnFailure | None = None) -> T:
        """Make a call, again when that is safe, and return its value or raise its error.

        `on_failure` gets the error of each failed attempt.
        """
        deadline = _clock() + self.timeout_s + call.wait_s
        own = self._own_writes
        if own is not None and own.last >= own.dispatched and call.operation in AFTER_OWN_WRITES:
            await self._await_own_writes(own, deadline)
        closings = self._closings
        attempts: Attempts | None = None
        while True:
            try:
                return await self._run_once(call, deadline)
            except (MqprocError, ConnectionLost) as error:
                if await self._has_waited(own, error, deadline):
                    continue
                if call.instead is not None and isinstance(error, NOT_TAKEN):
                    return await self.run(call.instead())
                if on_failure is not None:
                    on_failure(error)
                attempts = attempts or Attempts(self.retry, deadline, repeatable=call.repeatable, is_send=call.is_send)
                pause_s = attempts.pause_after(error, _clock())
                call = call.again or call
            if self._closings == closings:
                await asyncio.sleep(pause_s)
            if self._closings != closings:
                # Another attempt would open a connection that is never closed.
                raise attempts.given_up("the client was closed")

    async def _has_waited(self, own: OwnWrites | None, error: Exception, deadline: float) -> bool:
        """After a message was not found: wait for own writes that dispatch has not passed, if any."""
        if own is None or own.last < own.dispatched or not isinstance(error, MessageNotFoundError):
            return False
        await self._await_own_writes(own, deadline)
        return True

    async def _await_own_writes(self, own: OwnWrites, deadline: float) -> None:
        """Wait until dispatch has passed this client's last send. Raises RequestTimeoutError."""
        asked = 0
        while True:
            found, pause_s = own.positions(), OWN_WRITES_POLL_S
            if found is None:
                words = await self.run(requests.stats())
                found, pause_s = DispatchPosition(words["written"], words["dispatched"]), STATS_PAUSES.pause_s(asked)
                asked += 1
            if own.passed(found):
                return
            if (left_s := deadline - _clock()) <= 0:
                raise own.not_passed(found, self.timeout_s)
            await asyncio.sleep(min(pause_s, left_s))

    async def _run_once(self, call: Call[T], deadline: float) -> T:
        if call.hand_back is not None:
            return await self._run_exclusively(call, deadline)
        connection = self._connection(call.role)
        try:
            async with asyncio.timeout(max(0.0, deadline - _clock())):
                await connection.room()
        except TimeoutError:
            raise StoreBusyError("the server did not take the request in time") from None
        if call.oneway:
            connection.send_oneway(call)
            return call.parse(memoryview(b""), memoryview(b""))
        return await connection.ask(call, deadline)

    async def _run_exclusively(self, call: Call[T], deadline: float) -> T:
        """Make a call on its own connection, whose end shows the server that the caller has left."""
        name = self._exclusive.pop() if self._exclusive else f"{call.role} {next(self._exclusive_count)}"
        try:
            connection = self._connection(call.role, name)
            timeout_s = max(0.0, deadline - _clock())
            # No task: the end of the event loop would cancel it with the caller.
            _, answered = connection.begin(call)
            try:
                async with asyncio.timeout(timeout_s):
                    value: T = _value_of(await asyncio.shield(answered))
                    return value
            except asyncio.CancelledError:
                await self._hand_back(call, answered, connection)
                raise
            except TimeoutError:
                connection.close()
                raise connection.no_answer(timeout_s) from None
        finally:
            self._exclusive.append(name)

    async def _hand_back(
        self, call: Call[T], answered: asyncio.Future[CallOutcome], connection: MultiplexedConnection
    ) -> None:
        """Hand back the messages of an answer that arrives after a cancellation."""
        try:
            connection.end_requests()
            await asyncio.wait([answered], timeout=_HAND_BACK_S)
        finally:
            connection.close()
        outcome = await answered
        if outcome.error is None and call.hand_back is not None:
            for each in call.hand_back(outcome.value):
                with contextlib.suppress(MqprocError):  # Its invisible time ends.
                    await self.run(each)

    def _connection(self, role: str, name: str = "") -> MultiplexedConnection:
        connection = self._connections.get(name or role)
        if connection is not None:
            if connection.usable:
                return connection
            if connection.busy_elsewhere:
                raise BadRequestError("the client is in use in another event loop: each loop needs a client of its own")
            connection.close()
        connection = self._connections[name or role] = self.take_connection(role)
        return connection

    def take_connection(self, role: str) -> MultiplexedConnection:
        """Open a connection for the caller alone, which closes it. Raises ConnectionLost."""
        try:
            sock = open_socket(self._paths[role])
        except NotRunningError as error:
            raise ConnectionLost(
                str(error), taken=False, connected=False, ever_connected=role in self._ever_connected
            ) from None
        self._ever_connected.add(role)
        return MultiplexedConnection(Connection(sock, self._frame_bytes_max, self), self._paths[role])

    async def run_all(self, calls: Iterable[Call[T]], in_flight: int) -> AsyncIterator[T]:
        """Make calls, up to `in_flight` at a time; yields the values in order.

        An error gives up the calls in flight.
        """
        in_flight = at_least_one("in_flight", in_flight)
        tasks: deque[asyncio.Task[T]] = deque()
        try:
            for call in calls:
                if len(tasks) >= in_flight:
                    yield await tasks.popleft()
                tasks.append(asyncio.ensure_future(self.run(call)))
                # Sends the frame before the next is made: its bytes may be the caller's own.
                await asyncio.sleep(0)
            while tasks:
                yield await tasks.popleft()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def send_many(
    client: AsyncConnections, messages: Iterable[Message], *, in_flight: int, wait: bool
) -> SendResults:
    """Send a stream of messages in frames of one topic each; see `AsyncClient.send_many`."""
    in_flight = at_least_one("in_flight", in_flight)
    limits = GroupLimits.of_frame(client._frame_bytes_max)
    sent: list[SentPart] = []
    tasks: set[asyncio.Task[None]] = set()
    failures: list[Exception] = []

    async def deliver(group: StreamGroup, call: Call[Sequence[SendResult]]) -> None:
        try:
            sent.append(SentPart(group.places, await client.run(call)))
        except NotUniform:
            await send_again(group)
        except MqprocError as error:
            failures.append(send_requests.at_its_place(error, group.places))

    async def send_again(group: StreamGroup) -> None:
        try:
            for part in group.parts(limits):
                await deliver(part, part.call(wait=wait))
        except BadRequestError as error:  # For an unsendable message.
            failures.append(error)

    try:
        try:
            for group in send_requests.groups_of(messages, limits):
                if failures:
                    break
                tasks.add(asyncio.ensure_future(deliver(group, group.call(wait=wait))))
                await asyncio.sleep(0)
                if len(tasks) >= in_flight:
                    done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()  # Errors that `deliver` does not know.
        except Exception as error:  # Raised by the iterable, or for an unsendable message.
            failures.append(error)
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:  # The caller is cancelled.
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return send_requests.results_or_error(sent, failures)


async def run_steps(run: Callable[[Call[Any]], Awaitable[object]], steps: Steps[T]) -> T:
    """Make each call of `steps` with `run`; return the value of the steps."""
    try:
        call = next(steps)
        while True:
            try:
                value = await run(call)
            except Exception as error:
                call = steps.throw(error)
            else:
                call = steps.send(value)
    except StopIteration as end:
        found: T = end.value
        return found
