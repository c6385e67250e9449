"""Calls over pooled connections: the base of the synchronous client. Thread-safe.

A thread takes a free connection of the role, or opens one, so a long poll does not delay other threads.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Generic, Self, TypeVar

import msgspec

from mqproc.client import requests, send_requests
from mqproc.client.codecs import CodecArgument
from mqproc.client.connection import FRAME_BYTES_MAX, CallOutcome, ClientSettings, Connection, no_answer, open_socket
from mqproc.client.own_writes import (
    AFTER_OWN_WRITES,
    OWN_WRITES_POLL_S,
    STATS_PAUSES,
    DispatchPosition,
    OwnWrites,
)
from mqproc.client.requests import NOT_TAKEN, TIMEOUT_S, Call, Steps
from mqproc.client.retry import Attempts, ConnectionLost, RetryPolicy
from mqproc.client.send_requests import GroupLimits, NotUniform, StreamGroup
from mqproc.client.send_results import SendResults, SentPart
from mqproc.errors import BadRequestError, MessageNotFoundError, MqprocError, NotRunningError, StoreBusyError
from mqproc.types import Message, SendResult
from mqproc.util.arguments import at_least_one, not_below_zero

T = TypeVar("T")

MAX_SPIN_US = 250
SPIN_MIN_S = 50e-6
_POLLIN = select.POLLIN
_BOTH_WAYS = select.POLLIN | select.POLLOUT
# poll refuses timeouts over 24 days.
_SLEEP_MAX_S = 86_400.0
# Weight of a new answer in the mean answer time: one part in this many.
MEAN_OVER = 8
# Longest wait for the answer of an interrupted receive.
HAND_BACK_S = 1.0
_clock = time.monotonic


class PooledConnection:
    """A connection of one thread at a time.

    The thread spins about as long as answers usually take, then sleeps.

    Waking up takes longer than a short spin; where answers take longer than `spin_s` the thread does not spin.
    """

    __slots__ = ("_path", "_poll", "_spin_s", "_watched", "closings", "connection", "mean_s")

    def __init__(self, connection: Connection, path: Path, spin_s: float, closings: int = 0) -> None:
        """`path`: of the role's socket."""
        self.connection = connection
        self._path = path
        self.closings = closings
        """How often the client had been closed when the connection was opened."""
        self._spin_s = spin_s
        self.mean_s = 0.0
        """Mean time of recent answers."""
        self._poll = select.poll()
        self._watched = _POLLIN
        self._poll.register(connection.fd, select.POLLIN)

    def ask(self, call: Call[T], deadline: float) -> T:
        """Return a call's value or raise its error, on a connection that the caller has for itself."""
        request_id = self.connection.submit(call)
        self.push(deadline)
        value: T = self.finish(request_id, deadline, spin=False)
        return value

    def push(self, deadline: float) -> None:
        """Return when the socket has taken all submitted bytes, reading answers meanwhile."""
        connection = self.connection
        while connection.sending:
            if not self._wait(deadline):
                connection.lose("the server did not take the request in time")
                raise StoreBusyError("the server did not take the request in time")

    def finish(self, request_id: int, deadline: float, spin: bool = True) -> Any:
        """Return the value of a request or raise its error.

        Raises RequestTimeoutError when it takes too long.
        """
        connection = self.connection
        done = connection.done
        if request_id not in done:
            started = _clock()
            if spin and self.mean_s <= self._spin_s:
                self._spin(request_id, started + min(self._spin_s, 2 * self.mean_s + SPIN_MIN_S))
            while request_id not in done:
                if not self._wait(deadline):
                    connection.forget(request_id)
                    raise no_answer(self._path, _clock() - started)
            if spin:
                self.mean_s += (_clock() - started - self.mean_s) / MEAN_OVER
        outcome = done[request_id]
        del done[request_id]  # Unlike a call of pop, it cannot be interrupted by a signal handler afterwards.
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    def last_outcomes(self, deadline: float) -> list[CallOutcome]:
        """Close the connection after the last answer; returns the outcomes not fetched."""
        connection = self.connection
        try:
            if connection.usable:
                with contextlib.suppress(OSError):  # The server has closed it.
                    connection.sock.shutdown(socket.SHUT_WR)
                while not connection.done and self._wait(deadline) and not connection.closed:
                    pass
            return list(connection.done.values())
        finally:
            connection.close()

    def answered_by(self, request_id: int, moment_s: float) -> bool:
        """Whether a request has its outcome by then; returns as soon as it has."""
        done = self.connection.done
        while request_id not in done:
            if not self._wait(moment_s):
                return False
        return True

    def _spin(self, request_id: int, end: float) -> None:
        """Poll for the answer until `end`; yielding lets the server run on this processor."""
        connection, poll, done = self.connection, self._poll.poll, self.connection.done
        while _clock() < end:
            if poll(0):
                connection.receive()
                if request_id in done or connection.closed:
                    return
            else:
                os.sched_yield()

    def _wait(self, deadline: float) -> bool:
        """Sleep until bytes can be read or sent, and do it; False when the time is over."""
        connection = self.connection
        if connection.closed:
            return True
        events = _BOTH_WAYS if connection.sending else _POLLIN
        if events != self._watched:
            self._watched = events
            self._poll.modify(connection.fd, events)
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

    def shut_down(self) -> None:
        """End the wait of another thread on this connection.

        A forked process leaves its parent's connection alone.
        """
        if not self.connection.inherited:
            with contextlib.suppress(OSError):  # The thread has closed it already.
                self.connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()


class ConnectionPool:
    """The free connections to one role."""

    def __init__(self, path: Path, spin_s: float, frame_bytes_max: int, client: ClientSettings | None = None) -> None:
        self._path = path
        self._spin_s = spin_s
        self._frame_bytes_max = frame_bytes_max
        self._client = client
        self._free: deque[PooledConnection] = deque()
        self._ever_connected = False
        self._closings = 0
        self._gone = ""

    def take(self) -> PooledConnection:
        """Take a free connection, or open one. Raises ConnectionLost when the role does not listen."""
        while self._free:
            try:
                pooled = self._free.pop()
            except IndexError:
                break  # Another thread was faster.
            if pooled.connection.usable:
                return pooled
            pooled.connection.close()
        try:
            sock = open_socket(self._path)
        except NotRunningError as error:
            was_here = self._ever_connected and not self._gone
            raise ConnectionLost(
                self._gone or str(error), taken=False, connected=False, ever_connected=was_here
            ) from None
        self._ever_connected = True
        connection = Connection(sock, self._frame_bytes_max, self._client)
        return PooledConnection(connection, self._path, self._spin_s, self._closings)

    def give(self, pooled: PooledConnection) -> None:
        """Return a connection, which is closed when it is busy or all were closed."""
        if pooled.connection.free and pooled.closings == self._closings:
            self._free.append(pooled)
        else:
            pooled.connection.close()

    def close(self) -> None:
        """Close the free connections, and each of the others when it is returned."""
        self._closings += 1
        while self._free:
            self._free.pop().connection.close()

    def fail_fast(self, reason: str) -> None:
        """From now on do not wait for the role's restart; `reason` is the text of the error."""
        self._gone = reason


class Connections(ClientSettings):
    """Connections to the roles of one store, and calls over them.

    Connects at the first call and again after a loss.
    """

    _internal = frozenset(
        {
            *("deadline_of", "give_connection", "pipeline", "register_producer"),
            *("run", "run_again", "run_all", "take_connection"),
        }
    )

    def __init__(
        self,
        store_or_socket: str | Path,
        *,
        timeout: float = TIMEOUT_S,
        retry: RetryPolicy | None = None,
        max_spin_us: float = MAX_SPIN_US,
        max_frame_bytes: int = FRAME_BYTES_MAX,
        read_your_writes: bool = True,
        codec: CodecArgument = None,
    ) -> None:
        super().__init__(
            store_or_socket, timeout, retry, max_frame_bytes, read_your_writes, codec, max_spin_us=max_spin_us
        )
        self._consumers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._producers: weakref.WeakSet[Any] = weakref.WeakSet()
        spin_s = not_below_zero("max_spin_us", max_spin_us) / 1e6
        self._pools = {
            role: ConnectionPool(path, spin_s, self._frame_bytes_max, self) for role, path in self._paths.items()
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections, those that other threads use now when they have finished.

        The client can still be used: it connects again. Example: `client.close()`
        """
        for pool in self._pools.values():
            pool.close()

    def register_producer(self, producer: Any) -> None:
        """Remember a producer, which is flushed before its group is stopped."""
        self._producers.add(producer)

    def _fail_fast(self, reason: str) -> None:
        """From now on a call fails at once, with `reason`, when the group does not run."""
        for pool in self._pools.values():
            pool.fail_fast(reason)

    # Running calls

    def deadline_of(self, call: Call[Any]) -> float:
        """Monotonic time at which a call that starts now times out."""
        return _clock() + self.timeout_s + call.wait_s

    def take_connection(self, role: str) -> PooledConnection:
        """Take a connection for the caller alone, which closes or returns it."""
        return self._pools[role].take()

    def give_connection(self, role: str, pooled: PooledConnection) -> None:
        """Return a connection to the pool."""
        self._pools[role].give(pooled)

    def run(self, call: Call[T]) -> T:
        """Make a call, again when that is safe, and return its value or raise its error."""
        deadline = _clock() + self.timeout_s + call.wait_s
        own = self._own_writes
        if own is not None and own.last >= own.dispatched and call.operation in AFTER_OWN_WRITES:
            self._await_own_writes(own, deadline)
        try:
            return self._run_once(call, deadline)
        except (MqprocError, ConnectionLost) as error:
            failure = error
        if self._has_waited(own, failure, deadline):
            return self.run(call)
        return self.run_again(call, deadline, failure)

    def _has_waited(self, own: OwnWrites | None, error: Exception, deadline: float) -> bool:
        """After a message was not found: wait for own writes that dispatch has not passed, if any."""
        if own is None or own.last < own.dispatched or not isinstance(error, MessageNotFoundError):
            return False
        self._await_own_writes(own, deadline)
        return True

    def _await_own_writes(self, own: OwnWrites, deadline: float) -> None:
        """Wait until dispatch has passed this client's last send. Raises RequestTimeoutError."""
        asked = 0
        while True:
            found, pause_s = own.positions(), OWN_WRITES_POLL_S
            if found is None:
                words = self.run(requests.stats())
                found, pause_s = DispatchPosition(words["written"], words["dispatched"]), STATS_PAUSES.pause_s(asked)
                asked += 1
            if own.passed(found):
                return
            if (left_s := deadline - _clock()) <= 0:
                raise own.not_passed(found, self.timeout_s)
            time.sleep(min(pause_s, left_s))

    def run_again(
        self, call: Call[T], deadline: float, failure: MqprocError | ConnectionLost, *, at_once: bool = False
    ) -> T:
        """Retry a failed call while that is safe; `at_once` skips the first pause."""
        if call.instead is not None and isinstance(failure, NOT_TAKEN):
            return self.run(call.instead())
        attempts = Attempts(self.retry, deadline, repeatable=call.repeatable, is_send=call.is_send)
        call = call.again or call
        while True:
            pause_s = attempts.pause_after(failure, _clock())
            if not at_once:
                time.sleep(pause_s)
            at_once = False
            try:
                return self._run_once(call, deadline)
            except (MqprocError, ConnectionLost) as error:
                failure = error

    def _run_once(self, call: Call[T], deadline: float) -> T:
        pool = self._pools[call.role]
        pooled = pool.take()
        try:
            request_id = pooled.connection.submit(call)
            if pooled.connection.sending:
                pooled.push(deadline)
            if call.oneway:
                # Done once the socket has its bytes.
                if pooled.connection.closed:
                    raise ConnectionLost("the server closed the connection", taken=False)
                return call.parse(memoryview(b""), memoryview(b""))
            value: T = pooled.finish(request_id, deadline, not call.wait_s)
            return value
        except (MqprocError, ConnectionLost):
            raise
        except BaseException:
            # Raised by a signal handler.
            if call.hand_back is not None:
                self._hand_back(call.hand_back, pooled)
            raise
        finally:
            pool.give(pooled)

    def _hand_back(self, hand_back: Callable[[Any], list[Call[Any]]], pooled: PooledConnection) -> None:
        """Hand back the messages of an answer that arrives after an interrupt."""
        for outcome in pooled.last_outcomes(_clock() + HAND_BACK_S):
            for call in hand_back(outcome.value) if outcome.error is None else ():
                with contextlib.suppress(MqprocError):  # Its invisible time ends.
                    self.run(call)

    def pipeline(self) -> Pipeline:
        """Make a pipeline, for several calls to one role in flight at once."""
        return Pipeline(self)

    def run_all(self, calls: Iterable[Call[T]], in_flight: int) -> Iterator[T]:
        """Make calls to one role, up to `in_flight` at a time; yields the values in order.

        An error gives up the calls in flight.
        """
        in_flight = at_least_one("in_flight", in_flight)
        pipeline = Pipeline(self)
        try:
            for call in calls:
                if len(pipeline) >= in_flight:
                    yield pipeline.finish()
                pipeline.start(call)
            while len(pipeline):
                yield pipeline.finish()
        finally:
            pipeline.close()


class _Flight(msgspec.Struct, Generic[T]):
    """A call in flight, or the error that kept it from being sent."""

    call: Call[T]
    started_s: float
    deadline: float
    pooled: PooledConnection | None
    request_id: int
    error: MqprocError | ConnectionLost | None


UNREAD_S: Final = 1.0
"""Time that a pipeline allows for reading an answer whose call has timed out meanwhile."""


class Pipeline:
    """Calls to one role in flight on one connection, finished in order.

    A call that was refused for now, or certainly not carried out, is retried when its turn to finish comes: then it may
    be carried out after later ones. Calls that started before such a retry succeeded need no pause of their own.
    """

    def __init__(self, client: Connections) -> None:
        self._client = client
        self._role = ""
        self._pooled: PooledConnection | None = None
        self._flights: deque[_Flight[Any]] = deque()
        self._retried_s = 0.0
        """Time of the last successful retry."""

    def __len__(self) -> int:
        return len(self._flights)

    def start(self, call: Call[Any]) -> None:
        """Send a call; returns when the socket has its bytes."""
        deadline = self._client.deadline_of(call)
        flight: _Flight[Any] = _Flight(call, time.monotonic(), deadline, None, 0, None)
        self._flights.append(flight)
        try:
            if self._pooled is None or not self._pooled.connection.usable:
                self._role = call.role
                self._pooled = self._client.take_connection(call.role)
            flight.pooled = self._pooled
            flight.request_id = flight.pooled.connection.submit(call)
            flight.pooled.push(deadline)
        except (MqprocError, ConnectionLost) as error:
            flight.error = error

    def answered_by(self, moment_s: float) -> bool:
        """Whether `finish` need not wait by then; returns as soon as it need not."""
        flight = self._flights[0]
        return flight.pooled is None or flight.pooled.answered_by(flight.request_id, moment_s)

    @property
    def usable(self) -> bool:
        """Whether its connection is open, and not a forked process's parent's."""
        return self._pooled is not None and self._pooled.connection.usable

    def is_answered(self) -> bool:
        """Whether `finish` need not wait, after reading the bytes that have arrived."""
        flight = self._flights[0]
        if flight.pooled is None:
            return True
        connection = flight.pooled.connection
        while flight.request_id not in connection.done and connection.usable and connection.receive():
            pass
        return flight.request_id in connection.done

    def finish(self) -> Any:
        """Return the value of the oldest call or raise its error."""
        flight = self._flights.popleft()
        error = flight.error
        if error is None:
            assert flight.pooled is not None
            # The answer may have arrived in time, while the caller did something else.
            deadline = max(flight.deadline, time.monotonic() + min(UNREAD_S, self._client.timeout_s))
            try:
                return flight.pooled.finish(flight.request_id, deadline, spin=False)
            except (MqprocError, ConnectionLost) as problem:
                error = problem
        at_once = flight.started_s < self._retried_s
        value = self._client.run_again(flight.call, flight.deadline, error, at_once=at_once)
        self._retried_s = time.monotonic()
        return value

    def close(self) -> None:
        """Return the connection; calls in flight are given up with an unknown outcome."""
        self._flights.clear()
        if self._pooled is not None:
            self._client.give_connection(self._role, self._pooled)
            self._pooled = None


def send_many(client: Connections, messages: Iterable[Message], *, in_flight: int, wait: bool) -> SendResults:
    """Send a stream of messages in frames of one topic each; see `Client.send_many`."""
    in_flight = at_least_one("in_flight", in_flight)
    limits = GroupLimits.of_frame(client._frame_bytes_max)
    sent: list[SentPart] = []
    in_order: deque[StreamGroup] = deque()
    pipeline = client.pipeline()
    failures: list[Exception] = []

    def finish(group: StreamGroup, results: Callable[[], Sequence[SendResult]]) -> None:
        try:
            sent.append(SentPart(group.places, results()))
        except NotUniform:
            send_again(group)
        except MqprocError as error:
            failures.append(send_requests.at_its_place(error, group.places))

    def send_again(group: StreamGroup) -> None:
        try:
            for part in group.parts(limits):
                finish(part, functools.partial(client.run, part.call(wait=wait)))
        except BadRequestError as error:  # For an unsendable message.
            failures.append(error)

    try:
        try:
            for group in send_requests.groups_of(messages, limits):
                call = group.call(wait=wait)
                # A slow source must not leave answers unread.
                while in_order and (len(pipeline) >= in_flight or pipeline.is_answered()):
                    finish(in_order.popleft(), pipeline.finish)
                if failures:
                    break
                in_order.append(group)
                pipeline.start(call)
        except Exception as error:  # Raised by the iterable, or for an unsendable message.
            failures[:0] = [error]
        while in_order:
            finish(in_order.popleft(), pipeline.finish)
    finally:
        pipeline.close()
    return send_requests.results_or_error(sent, failures)


def run_steps(run: Callable[[Call[Any]], object], steps: Steps[T]) -> T:
    """Make each call of `steps` with `run`; return the value of the steps."""
    try:
        call = next(steps)
        while True:
            try:
                value = run(call)
            except Exception as error:
                call = steps.throw(error)
            else:
                call = steps.send(value)
    except StopIteration as end:
        found: T = end.value
        return found
