"""One non-blocking connection: requests in, outcomes out.

The sync and the async client differ in how they wait.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from mqproc.client.codecs import codec_of
from mqproc.client.own_writes import OwnWrites
from mqproc.client.requests import WRITER, socket_paths
from mqproc.client.retry import ConnectionLost, RetryPolicy, policy_of
from mqproc.config.options import Options
from mqproc.errors import (
    MqprocError,
    NotRunningError,
    PermissionDeniedError,
    ProtocolError,
    RequestTimeoutError,
    StoreAccessError,
    StoreBusyError,
    TooManyConnectionsError,
    UnknownCommandError,
    UnsupportedVersionError,
)
from mqproc.ipc.health import read_health, saved_options
from mqproc.layout.record_codec import messages_as
from mqproc.paths import StorePaths, checked_path
from mqproc.types import StoredMessage, message_type
from mqproc.util.arguments import above_zero, at_least_one, true_or_false
from mqproc.util.units import MIB
from mqproc.util.user_object import UserObject
from mqproc.wire.address import connect
from mqproc.wire.frames import AnswerFrame, ClientProtocol, OutputQueue

if TYPE_CHECKING:
    from mqproc.client.requests import Call

FRAME_BYTES_MAX: Final = 64 * MIB
ANSWER_BYTES: Final = 1024
"""Room in an answer for its head and options."""
_SOCKET_BUFFER_BYTES: Final = MIB

NO_DESCRIPTOR: Final = frozenset({errno.EMFILE, errno.ENFILE})
"""Errors of a process, or a system, that has no descriptor left."""

# Sent before any request is read, so no request was carried out.
_REFUSED_CONNECTION: Final = (TooManyConnectionsError, PermissionDeniedError, UnsupportedVersionError)

# A forked child must not use its parent's connections: each records the generation of the process that made it.
_generation = 0


def _after_fork() -> None:
    global _generation
    _generation += 1


os.register_at_fork(after_in_child=_after_fork)


def open_socket(path: Path) -> socket.socket:
    """Connect to a role.

    Raises NotRunningError when the role does not listen, StoreBusyError when its backlog is full or this process has no
    descriptor left, StoreAccessError when the socket belongs to another user.
    """
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    except OSError as error:
        raise _no_socket(path, error) from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
        connect(sock, path)
    except BlockingIOError:
        sock.close()
        raise StoreBusyError(f"{path}: too many clients are waiting to connect", hint_ms=10) from None
    except PermissionError as error:
        sock.close()
        raise _out_of_reach(path, error) from None
    except OSError as error:
        sock.close()
        if error.errno in NO_DESCRIPTOR:  # For the folder of a long path.
            raise _no_socket(path, error) from None
        store = path.parent.parent
        raise NotRunningError(
            f"{path}: {error.strerror or error}" if store.is_dir() else f"{store}: no such folder"
        ) from None
    return sock


def _no_socket(path: Path, error: OSError) -> StoreBusyError:
    return StoreBusyError(f"{path}: no socket to connect with: {error.strerror or error}", hint_ms=100)


def _out_of_reach(path: Path, error: OSError) -> StoreAccessError:
    return StoreAccessError(f"{path}: only its owner may ask whether a group runs: {error.strerror}")


def _ends_connection(refusal: MqprocError) -> bool:
    """Whether the server closes the connection after this error."""
    return isinstance(refusal, ProtocolError) and not isinstance(refusal, UnknownCommandError)


class CallOutcome(msgspec.Struct, eq=False):
    """End of a request: `value`, or `error`."""

    value: Any
    error: MqprocError | ConnectionLost | None


class Connection:
    """Requests in flight and outcomes not yet fetched, by request id.

    A ConnectionLost is recorded for all requests at once, and the connection is closed.
    """

    __slots__ = (
        *("_calls", "_ends", "_generation", "_kind", "_output", "_own_writes", "_protocol"),
        *("closed", "done", "fd", "sending", "sock"),
    )

    def __init__(
        self, sock: socket.socket, frame_bytes_max: int = FRAME_BYTES_MAX, client: ClientSettings | None = None
    ) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.closed = False
        self.sending = False
        """Whether bytes wait for room in the socket."""
        self.done: dict[int, CallOutcome] = {}
        self._protocol = ClientProtocol(frame_bytes_max)
        self._output = OutputQueue()
        self._calls: dict[int, Call[Any]] = {}
        self._ends: dict[int, int] = {}  # position in the output at which each request's frame ends
        self._generation = _generation
        self._own_writes = client._own_writes if client is not None else None
        self._kind = client._kind if client is not None else StoredMessage

    @property
    def usable(self) -> bool:
        return not self.closed and self._generation == _generation

    @property
    def inherited(self) -> bool:
        """Whether the connection belongs to the process that this one was forked from."""
        return self._generation != _generation

    @property
    def free(self) -> bool:
        """Whether the connection can be used and has no request in flight."""
        return not (self.closed or self._calls or self.sending) and self._generation == _generation

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait for room in the socket."""
        return self._output.waiting_bytes

    def submit(self, call: Call[Any]) -> int:
        """Send a request, or as much of it as the socket takes now; `flush` sends the rest.

        The payload must not change until all of it is sent. A loss of the connection is recorded as the outcome.
        """
        request_id, pieces = self._protocol.request(call.operation, call.options, call.payload, oneway=call.oneway)
        if not call.oneway:
            self._calls[request_id] = call
        if self.closed:
            self._record_loss("connection is closed")
            return request_id
        output = self._output
        self.sending = True  # Stays set if a signal handler's exception ends the call.
        try:
            self.sending = not output.write(self.sock, pieces)
        except OSError as error:
            # The frame counts as not sent: the server drops part of a frame.
            self._lose_on_send(error)
            return request_id
        if not call.oneway:
            self._ends[request_id] = output.queued_bytes
        return request_id

    def flush(self) -> None:
        """Send waiting bytes, as many as the socket takes now."""
        if self.closed:
            return
        try:
            self.sending = not self._output.send(self.sock)
        except OSError as error:
            self._lose_on_send(error)

    def receive(self) -> bool:
        """Read the available bytes and record outcomes; False when there are no bytes."""
        if self.closed:
            return False
        protocol = self._protocol
        reader = protocol.reader
        try:
            count = reader.fill(self.sock)
        except BlockingIOError:
            return False
        except OSError as error:
            self.lose(str(error.strerror or error))
            return True
        if not count:
            self.lose("the server closed the connection")
            return True
        try:
            while (answer := protocol.next_answer()) is not None:
                self._record(answer)
                if answer.error is not None and _ends_connection(answer.error):
                    # The server closes now: the outcome of a later request would be unknown.
                    self.lose(str(answer.error))
                    break
                if not reader.has_more:
                    break
        except MqprocError as error:
            self._fail(error)
        return True

    def _record(self, answer: AnswerFrame) -> None:
        request_id, value, error = answer.request_id, None, answer.error
        call = self._calls.pop(request_id)
        self._ends.pop(request_id, None)
        if error is None:
            if self._own_writes is not None and call.is_send:
                self._own_writes.sent(answer.payload)
            try:
                if self._kind is StoredMessage:
                    value = call.parse(answer.options, answer.payload)
                else:
                    with messages_as(self._kind):
                        value = call.parse(answer.options, answer.payload)
            except MqprocError as problem:
                error = problem
        self.done[request_id] = CallOutcome(value, error)

    def _lose_on_send(self, error: OSError) -> None:
        """The server has closed the connection, but may have sent the reason before."""
        while not self.closed and self.receive():
            pass
        self.lose(str(error.strerror or error))

    def lose(self, reason: str) -> None:
        """Close the connection and record a ConnectionLost for each open request."""
        if not self.closed:
            self._record_loss(reason)
            self.close()

    def _record_loss(self, reason: str) -> None:
        sent = self._output.sent_bytes
        for request_id in self._calls:
            taken = self._ends.get(request_id, sent + 1) <= sent
            self.done[request_id] = CallOutcome(None, ConnectionLost(reason, taken=taken))
        self._calls.clear()
        self._ends.clear()

    def _fail(self, error: MqprocError) -> None:
        """End the connection after an error of all requests, or invalid bytes."""
        for request_id, call in list(self._calls.items()):
            if call.repeatable or isinstance(error, _REFUSED_CONNECTION):
                self.done[request_id] = CallOutcome(None, error)
                del self._calls[request_id]
        self.lose(str(error))

    def forget(self, request_id: int) -> None:
        """Drop a request whose caller no longer waits."""
        self._calls.pop(request_id, None)
        self._ends.pop(request_id, None)
        self.done.pop(request_id, None)
        self._protocol.forget(request_id)

    def close(self) -> None:
        """Close the socket; recorded outcomes remain."""
        if not self.closed:
            self.closed = True
            self.sending = False
            self._output.clear()
            self.sock.close()


class ClientSettings(UserObject):
    """Settings of a client, sync or async.

    A pickled or copied client is a new one of the same store, unconnected.
    """

    _internal = frozenset({"pull_bytes_max", "retry", "timeout_s"})

    def __init__(
        self,
        store_or_socket: str | Path,
        timeout: float,
        retry: RetryPolicy | None,
        max_frame_bytes: int,
        read_your_writes: bool,
        codec: Any,
        **further: object,
    ) -> None:
        self.store = checked_path(store_or_socket)
        self.timeout_s = above_zero("timeout", timeout)
        self.retry = policy_of(retry)
        self._frame_bytes_max = at_least_one("max_frame_bytes", max_frame_bytes)
        self.pull_bytes_max = max(1, self._frame_bytes_max - ANSWER_BYTES)
        """Message bytes requested at once: a larger message comes alone, and may not fit the frame."""
        reads_own = true_or_false("read_your_writes", read_your_writes)
        self._paths = socket_paths(self.store)
        self._own_writes = OwnWrites(self._paths[WRITER]) if reads_own else None
        self._codec = codec_of(codec)
        self._kind = message_type(self._codec)
        settings: dict[str, Any] = {"timeout": timeout, "retry": retry, **further}
        settings |= {"read_your_writes": reads_own, "codec": codec}
        self._copy = functools.partial(type(self), max_frame_bytes=self._frame_bytes_max, **settings)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({os.fspath(self.store)!r})"

    def __reduce__(self) -> tuple[Callable[[Path], object], tuple[Path]]:
        return self._copy, (self.store,)


class ClientPart(UserObject):
    """An object that a client made, and that uses its connections as `_client`."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({vars(self)['_client']!r})"


def running_options(paths: StorePaths) -> Options:
    """Options of the running group. Raises OSError, ValueError, ConfigurationError."""
    return Options(**saved_options(paths))


# Errors of timed-out requests

# Thousands of requests time out together: reading the control file for each would take longer than they have waited.
_CACHED_FOR_S: Final = 0.2
_cached: dict[Path, tuple[float, list[str]]] = {}


def no_answer(socket: Path, waited_s: float) -> RequestTimeoutError:
    """The error of a request to the role that listens at `socket`."""
    reason = "; ".join(_cached_problems(socket))
    return RequestTimeoutError(f"{socket}: no answer in {round(waited_s, 2):g} s{f', {reason}' if reason else ''}")


def _cached_problems(socket: Path) -> list[str]:
    now_s = time.monotonic()
    until_s, problems = _cached.get(socket, (0.0, []))
    if now_s >= until_s:
        problems = _problems(socket)
        for other, (ended_s, _) in list(_cached.items()):
            if now_s >= ended_s:
                _cached.pop(other, None)
        _cached[socket] = time.monotonic() + _CACHED_FOR_S, problems
    return problems


def _problems(socket: Path) -> list[str]:
    """Problems that the group's control file shows, if it can be read."""
    paths = StorePaths(socket.parent.parent)
    if paths.socket(socket.stem) != socket:
        return []
    with contextlib.suppress(MqprocError, OSError, ValueError):
        return [str(problem) for problem in read_health(paths, running_options(paths)).problems]
    return []
