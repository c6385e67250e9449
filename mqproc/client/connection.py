"""One non-blocking connection: requests in, outcomes out. How to wait is the sync or the async client's affair."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from mqproc.client.retry import ConnectionLost
from mqproc.config import MIB
from mqproc.errors import (
    MqprocError,
    NotRunningError,
    PermissionDeniedError,
    ProtocolError,
    StoreAccessError,
    StoreBusyError,
    TooManyConnectionsError,
    UnknownCommandError,
    UnsupportedVersionError,
)
from mqproc.wire.address import connect_path
from mqproc.wire.output import OutputQueue
from mqproc.wire.protocol import Answer, ClientProtocol

if TYPE_CHECKING:
    from mqproc.client.core import Call

FRAME_BYTES_MAX: Final = 64 * MIB
ANSWER_BYTES: Final = 1024
"""Room in an answer for all but its messages."""
_SOCKET_BUFFER_BYTES: Final = MIB

# Said before any request is read, so none was carried out.
_TURNED_AWAY: Final = (TooManyConnectionsError, PermissionDeniedError, UnsupportedVersionError)

# A forked child must not talk on its parent's connections: each knows the process generation it was made in.
_generation = 0


def _after_fork() -> None:
    global _generation
    _generation += 1


os.register_at_fork(after_in_child=_after_fork)


def open_socket(path: Path) -> socket.socket:
    """Connect to a role. Raises NotRunningError when nobody listens, StoreBusyError when its backlog is full or this
    process has no descriptor left, StoreAccessError when it is another user's."""
    try:
        target = connect_path(path)
    except NotRunningError:
        _check_reach(path)
        raise
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    except OSError as error:
        raise StoreBusyError(f"{path}: no socket to connect with: {error.strerror or error}", hint_ms=100) from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
        sock.connect(os.fspath(target))
    except BlockingIOError:
        sock.close()
        raise StoreBusyError(f"{path}: too many clients are waiting to connect", hint_ms=10) from None
    except PermissionError as error:
        sock.close()
        raise _out_of_reach(path, error) from None
    except OSError as error:
        sock.close()
        raise NotRunningError(f"{path}: {error.strerror or error}") from None
    return sock


def _check_reach(path: Path) -> None:
    """Raise StoreAccessError when this user cannot see whether somebody listens."""
    try:
        path.lstat()
    except PermissionError as error:
        raise _out_of_reach(path, error) from None
    except OSError:
        return


def _out_of_reach(path: Path, error: OSError) -> StoreAccessError:
    return StoreAccessError(f"{path}: only its owner may ask whether a group runs: {error.strerror}")


def _ends_connection(refusal: MqprocError) -> bool:
    """Whether the server cannot read on behind what it refused so."""
    return isinstance(refusal, ProtocolError) and not isinstance(refusal, UnknownCommandError)


class Outcome(msgspec.Struct, eq=False):
    """How a request ended: `value`, or `error`."""

    value: Any
    error: MqprocError | ConnectionLost | None


class Connection:
    """Requests on their way and outcomes not yet fetched, by request id.

    After a ConnectionLost was recorded for one request it was recorded for all, and the connection is closed.
    """

    __slots__ = ("_calls", "_ends", "_generation", "_output", "_protocol", "closed", "done", "fd", "sending", "sock")

    def __init__(self, sock: socket.socket, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.closed = False
        self.sending = False
        """Whether something waits for room in the socket."""
        self.done: dict[int, Outcome] = {}
        self._protocol = ClientProtocol(frame_bytes_max)
        self._output = OutputQueue()
        self._calls: dict[int, Call[Any]] = {}
        self._ends: dict[int, int] = {}  # position in the output at which each request's frame ends
        self._generation = _generation

    @property
    def usable(self) -> bool:
        return not self.closed and self._generation == _generation

    @property
    def inherited(self) -> bool:
        """Whether it is another process's, which this one was forked from."""
        return self._generation != _generation

    @property
    def free(self) -> bool:
        """Whether it can be used, and nothing is under way on it."""
        return not (self.closed or self._calls or self.sending) and self._generation == _generation

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait for room in the socket."""
        return self._output.waiting_bytes

    def submit(self, call: Call[Any]) -> int:
        """Send a request, or as much of it as the socket takes now; `flush` sends the rest.

        The payload's bytes must stay as they are until all is sent. A loss is recorded as the outcome.
        """
        request_id, pieces = self._protocol.request(call.operation, call.options, call.payload, oneway=call.oneway)
        if not call.oneway:
            self._calls[request_id] = call
        if self.closed:
            self._record_loss("connection is closed")
            return request_id
        output = self._output
        try:
            self.sending = not output.write(self.sock, pieces)
        except OSError as error:
            # The frame counts as not sent: part of a frame is dropped by the server.
            self._lose_on_send(error)
            return request_id
        if not call.oneway:
            self._ends[request_id] = output.queued_bytes
        return request_id

    def flush(self) -> None:
        """Send what waits, as much as the socket takes now."""
        if self.closed:
            return
        try:
            self.sending = not self._output.send(self.sock)
        except OSError as error:
            self._lose_on_send(error)

    def receive(self) -> bool:
        """Read what is there and record outcomes; False when nothing is there."""
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
                    # The server is about to close: what would be sent now could not be known to be refused.
                    self.lose(str(answer.error))
                    break
                if not reader.has_more:
                    break
        except MqprocError as error:
            self._fail(error)
        return True

    def _record(self, answer: Answer) -> None:
        request_id, value, error = answer.request_id, None, answer.error
        call = self._calls.pop(request_id)
        self._ends.pop(request_id, None)
        if error is None:
            try:
                value = call.parse(answer.options, answer.payload)
            except MqprocError as problem:
                error = problem
        self.done[request_id] = Outcome(value, error)

    def _lose_on_send(self, error: OSError) -> None:
        """The server is gone, but may have said why before it closed."""
        while not self.closed and self.receive():
            pass
        self.lose(str(error.strerror or error))

    def lose(self, reason: str) -> None:
        """End the connection; each open request learns whether the server may have taken it."""
        if not self.closed:
            self._record_loss(reason)
            self.close()

    def _record_loss(self, reason: str) -> None:
        sent = self._output.sent_bytes
        for request_id in self._calls:
            taken = self._ends.get(request_id, sent + 1) <= sent
            self.done[request_id] = Outcome(None, ConnectionLost(reason, taken=taken))
        self._calls.clear()
        self._ends.clear()

    def _fail(self, error: MqprocError) -> None:
        """The server turned the connection away, or sends what is no answer: nothing more can be read from it."""
        for request_id, call in list(self._calls.items()):
            if call.repeatable or isinstance(error, _TURNED_AWAY):
                self.done[request_id] = Outcome(None, error)
                del self._calls[request_id]
        self.lose(str(error))

    def forget(self, request_id: int) -> None:
        """Nobody waits for this request any more."""
        self._calls.pop(request_id, None)
        self._ends.pop(request_id, None)
        self.done.pop(request_id, None)
        self._protocol.forget(request_id)

    def close(self) -> None:
        """Close the socket; outcomes already recorded stay."""
        if not self.closed:
            self.closed = True
            self.sending = False
            self._output.clear()
            self.sock.close()
