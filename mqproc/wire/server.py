"""Non-blocking server of a role's socket: accept, cut frames, queue answers.

    server = SocketServer(listener, options…)
    server.register(bell_fd, on_ring)
    while …:
        for request in server.poll(timeout_s):
            request.connection.answer(request.request_id, request.operation, options, payload)

All connections read into one shared buffer; an idle connection has no buffer. A partial frame is kept as a few bytes
when it is short, else in the buffer that it began in, which then belongs to the connection and is replaced. Unread
answers wait in memory up to `ServerLimits.output_bytes`; above it the server stops reading from that client, and closes
it after `output_grace_s`. An unexpected error while a connection is served closes that connection alone.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections import Counter
from collections.abc import Callable, Container, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

import numpy as np

from mqproc.config.parse import SocketAccess
from mqproc.errors import (
    InternalError,
    MqprocError,
    PermissionDeniedError,
    ProtocolError,
    RequestTimeoutError,
    SlowConsumerError,
    TooManyConnectionsError,
    UnknownCommandError,
)
from mqproc.layout.frame import CONNECTION_ID, HEADER, HEADER_SIZE, MAGIC, VERSION
from mqproc.util.units import MIB
from mqproc.wire.address import OWNER, is_admitted, peer_uid
from mqproc.wire.connection import FrameBatch, Request, ServerConnection
from mqproc.wire.frames import FrameReader, empty_buffer, encode_refusal
from mqproc.wire.operations import Operation

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from mqproc.wire.connection import FrameBatcher


CHECK_EVERY_S: Final = 0.05
"""Timeouts are checked this often, and only while a client has one."""


class IoTimeouts:
    """Clients with a running `read_by` or `write_by` deadline.

    Time during which the process did not run, stopped by a signal or with its machine, counts for no client.
    """

    __slots__ = ("_check_at", "_clients")

    def __init__(self) -> None:
        self._clients: dict[int, ServerConnection] = {}
        self._check_at = 0.0

    def __len__(self) -> int:
        return len(self._clients)

    def watch(self, client: ServerConnection) -> None:
        """Start watching a client's deadlines."""
        if not self._clients:
            self._check_at = time.monotonic() + CHECK_EVERY_S
        self._clients[client.fd] = client

    def forget(self, client: ServerConnection) -> None:
        """Stop watching a client."""
        self._clients.pop(client.fd, None)

    def seconds_left(self) -> float:
        """Seconds until the next check; 0 when it is due."""
        return max(0.0, self._check_at - time.monotonic())

    def expired(self) -> list[ServerConnection]:
        """Clients past a deadline. A paused client has only its `write_by` deadline."""
        now = time.monotonic()
        late_s = now - self._check_at
        self._check_at = now + CHECK_EVERY_S
        if late_s > CHECK_EVERY_S:
            self._prolong(late_s)
        expired = []
        for client in list(self._clients.values()):
            if client.write_by:
                if now >= client.write_by:
                    expired.append(client)
            elif not client.read_by:
                self.forget(client)
            elif now >= client.read_by and not client.paused:
                expired.append(client)
        return expired

    def _prolong(self, seconds: float) -> None:
        for client in self._clients.values():
            client.write_by = client.write_by and client.write_by + seconds
            client.read_by = client.read_by and client.read_by + seconds


_ACCEPTS_PER_CALL: Final = 64
_SOCKET_BUFFER_BYTES: Final = MIB


class Acceptor:
    """Accepts clients from a listening socket, which its creator closes."""

    def __init__(
        self,
        listener: socket.socket,
        connections: Sized,
        connections_max: int,
        allowed_uids: Container[int],
        access: SocketAccess,
        count_reject: Callable[[str], None],
        report: Callable[[Exception], None],
    ) -> None:
        """Allow `connections_max` in `connections`; `count_reject` gets the code of each refusal.

        `report` is called in the except block of an unexpected error.
        """
        listener.setblocking(False)
        self._listener = listener
        self._connections = connections
        self._connections_max = connections_max
        self._allowed_uids = allowed_uids
        self._access = access
        self._count_reject = count_reject
        self._report = report
        self._spare_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def fileno(self) -> int:
        """The listener's descriptor."""
        return self._listener.fileno()

    def accept_waiting(self, on_accept: Callable[[socket.socket], None]) -> None:
        """Accept waiting clients, some at a time; `on_accept` gets each non-blocking socket."""
        for _ in range(_ACCEPTS_PER_CALL):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:
                # No descriptor is left: use the spare one to report that to the client.
                self._refuse_without_descriptor()
                return
            sock.setblocking(False)
            try:
                if refusal := self._refusal_of(sock):
                    self._refuse(sock, refusal)
                    continue
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
                on_accept(sock)
            except Exception as error:
                sock.close()
                self._report(error)

    def close(self) -> None:
        """Accept no more clients."""
        if self._spare_fd >= 0:
            os.close(self._spare_fd)
            self._spare_fd = -1

    def _refusal_of(self, sock: socket.socket) -> MqprocError | None:
        uid = peer_uid(sock)
        if uid not in self._allowed_uids and not is_admitted(sock, self._access):
            return PermissionDeniedError(f"user {uid} may not use a socket of user {os.getuid()}")
        if len(self._connections) >= self._connections_max:
            return self._too_many("max_connections allows no more")
        return None

    def _too_many(self, why: str) -> TooManyConnectionsError:
        return TooManyConnectionsError(f"{len(self._connections):,} connections are open already; {why}", hint_ms=100)

    def _refuse(self, sock: socket.socket, error: MqprocError) -> None:
        self._count_reject(error.code)
        try:
            sock.send(encode_refusal(0, CONNECTION_ID, error))
        except OSError:
            pass  # The client has closed the connection.
        finally:
            sock.close()

    def _refuse_without_descriptor(self) -> None:
        os.close(self._spare_fd)
        try:
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            self._refuse(sock, self._too_many("no file descriptor is left"))
        except OSError:
            pass  # Another thread or process took the descriptor; the client waits in the backlog.
        self._spare_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


BUFFER_BYTES: Final = 2 * MIB
_SPARE_BUFFERS_MAX: Final = 4


class SharedBuffer:
    """The receive buffer shared by all connections of one poll, and spare buffers."""

    __slots__ = ("array", "at", "current", "returned", "spare")

    def __init__(self) -> None:
        self.current = empty_buffer(BUFFER_BYTES)
        self.array = np.frombuffer(self.current, np.uint8)
        """The current buffer as a uint8 array for kernels."""
        self.at = 0
        self.spare: list[memoryview] = []
        self.returned: list[memoryview] = []

    def begin(self) -> None:
        """Start a poll: the previous poll's requests are done, so their buffers are free."""
        self.at = 0
        if self.returned:
            self.spare = (self.spare + self.returned)[:_SPARE_BUFFERS_MAX]
            self.returned.clear()

    def take(self) -> memoryview:
        """Return a free buffer."""
        return self.spare.pop() if self.spare else empty_buffer(BUFFER_BYTES)

    def replace(self) -> None:
        """Take another buffer: the current one now belongs to a connection."""
        self.current = self.take()
        self.array = np.frombuffer(self.current, np.uint8)
        self.at = 0

    def give_back(self, buffer: memoryview | None) -> None:
        """Return a connection's buffer; this poll's requests still refer to it."""
        if buffer is not None and len(buffer) == BUFFER_BYTES:
            self.returned.append(buffer)


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of one client: sizes in bytes, times in seconds.

    `requests_per_poll`: the most requests that one poll takes from a connection; others wait in its buffer. `access`:
    that of other users.
    """

    connections: int = 1024
    frame_bytes: int = 64 * MIB
    output_bytes: int = 128 * MIB
    frame_read_s: float = 30.0
    output_grace_s: float = 10.0
    requests_per_poll: int = 4096
    access: SocketAccess = OWNER


# A read into a shared buffer wants at least this much room.
_ROOM_MIN: Final = 256 << 10
_READ_AT_MAX: Final = BUFFER_BYTES - _ROOM_MIN
# A partial frame up to this size is copied; a longer one keeps the buffer that it lies in.
_COPIED_BYTES_MAX: Final = 16 << 10
_READS_PER_POLL: Final = 32
_EVENTS_MAX: Final = 128
_READABLE: Final = select.EPOLLIN
_EVENT_MASK: Final = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR

_unpack_header = HEADER.unpack_from
_FRAME_HEAD: Final = (MAGIC, VERSION, 0)


def _raise(error: Exception) -> None:
    raise error


class SocketServer:
    """Serves the clients of a listening Unix socket; single-threaded."""

    def __init__(
        self,
        listener: socket.socket,
        limits: ServerLimits | None = None,
        *,
        operations: Container[int] = frozenset(Operation),
        allowed_uids: Container[int] | None = None,
        on_close: Callable[[ServerConnection], None] | None = None,
        on_reject: Callable[[str], None] | None = None,
        on_partial: Callable[[], None] | None = None,
        on_error: Callable[[Exception], None] | None = None,
        batches: FrameBatcher | None = None,
    ) -> None:
        """With `batches`, `poll_batches` returns whole batches of frames of one operation.

        `on_error` is called in the except block of an unexpected error, which closes its connection; without it the
        error is raised.
        """
        self.limits = limits or ServerLimits()
        self.connections: dict[int, ServerConnection] = {}
        self.rejects: Counter[str] = Counter()
        self.partial_frames = 0
        self.read_timeouts = self.slow_consumers = 0
        self._operations = operations
        self._on_close = on_close
        self._on_reject = on_reject
        self._on_partial = on_partial
        self._report = on_error or _raise
        self._batches = batches
        self._shared = SharedBuffer()
        self._times = IoTimeouts()
        self._backlog: dict[int, ServerConnection] = {}
        self._bells: dict[int, Callable[[], None]] = {}
        self._holding = False
        self._held: dict[int, tuple[ServerConnection, list[ReadableBuffer]]] = {}
        uids = {os.getuid()} if allowed_uids is None else allowed_uids
        self._acceptor = Acceptor(
            listener,
            self.connections,
            self.limits.connections,
            uids,
            self.limits.access,
            self.count_reject,
            self._report,
        )
        self._epoll = select.epoll()
        self._epoll.register(self._acceptor.fileno(), select.EPOLLIN)
        self._accepting = True

    # Set-up and end

    def register(self, fd: int, on_readable: Callable[[], None]) -> None:
        """Make `poll` watch a descriptor, such as an eventfd bell; `on_readable` must drain it."""
        self._bells[fd] = on_readable
        self._epoll.register(fd, select.EPOLLIN)

    def stop_accepting(self) -> None:
        """Accept the clients that wait now; later clients stay in the backlog for a successor."""
        if self._accepting:
            self._acceptor.accept_waiting(self._on_accept)
            self._accepting = False
            self._epoll.unregister(self._acceptor.fileno())

    def drain(self, timeout_s: float) -> None:
        """Send queued answers for up to `timeout_s`, before the role stops."""
        end = time.monotonic() + timeout_s
        while (left := end - time.monotonic()) > 0:
            waiting = [connection for connection in self.connections.values() if connection.output.waiting_bytes]
            if not waiting:
                return
            # epoll is unsuitable: bells and clients that continue to send would wake it constantly.
            room = select.poll()
            for connection in waiting:
                room.register(connection.fd, select.POLLOUT)
            for fd, _ in room.poll(left * 1000):
                connection = self.connections[fd]
                try:
                    self._write(connection)
                except Exception as error:
                    self.fail(connection, error)

    def hang_up(self) -> None:
        """Shut down reading: clients' further requests fail, requests already received can be read."""
        for connection in self.connections.values():
            with contextlib.suppress(OSError):  # The client has closed the connection.
                connection.sock.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Close all connections. The listener belongs to its creator."""
        for connection in list(self.connections.values()):
            self.drop(connection)
        self._acceptor.close()
        self._epoll.close()

    # One step

    def poll(self, timeout_s: float) -> list[Request]:
        """Same as `poll_batches`, for a server without batches."""
        assert self._batches is None
        return cast("list[Request]", self.poll_batches(timeout_s))

    def poll_batches(self, timeout_s: float) -> list[Request | FrameBatch]:
        """Wait up to `timeout_s` for requests, bells or space in sockets; with 0 do not wait.

        The requests' views are valid until the next call.
        """
        requests: list[Request | FrameBatch] = []
        self._shared.begin()
        if self._backlog and self._read_backlog(requests):
            timeout_s = 0.0
        if self._times:
            timeout_s = min(timeout_s, self._expire())
        events = self._epoll.poll(timeout_s, _EVENTS_MAX)
        if events:
            connections = self.connections
            for fd, mask in events:
                connection = connections.get(fd)
                if connection is None:
                    self._on_other_event(fd)
                    continue
                try:
                    if mask == _READABLE and connection.reader is None and not connection.paused:
                        self._read_shared(connection, requests)
                        continue
                    if mask & select.EPOLLOUT:
                        self._write(connection)
                    if mask & _EVENT_MASK and not connection.closed:
                        self._on_event(connection, mask, requests)
                except Exception as error:
                    self.fail(connection, error)
        return requests

    def fail(self, connection: ServerConnection, error: Exception) -> None:
        """Report an unexpected error, send it to the client, and close its connection."""
        self._report(error)
        if connection.closed:
            return
        with contextlib.suppress(Exception):
            connection.refuse(CONNECTION_ID, 0, InternalError(f"unexpected error: {type(error).__name__}: {error}"))
        self.drop(connection)

    def _on_other_event(self, fd: int) -> None:
        on_readable = self._bells.get(fd)
        if on_readable is not None:
            on_readable()
        elif self._accepting and fd == self._acceptor.fileno():
            self._acceptor.accept_waiting(self._on_accept)

    def _on_accept(self, sock: socket.socket) -> None:
        connection = ServerConnection(self, sock)
        self._epoll.register(connection.fd, select.EPOLLIN)
        self.connections[connection.fd] = connection

    def count_reject(self, code: str) -> None:
        """Count a refusal or a closed connection by its error code."""
        self.rejects[code] += 1
        if self._on_reject is not None:
            self._on_reject(code)

    # Reading

    def _on_event(self, connection: ServerConnection, mask: int, requests: list[Request | FrameBatch]) -> None:
        if connection.paused:
            if mask & (select.EPOLLHUP | select.EPOLLERR):
                self._on_hangup(connection)
        elif connection.reader is None:
            self._read_shared(connection, requests)
        elif connection.fd not in self._backlog:
            self._read_own(connection, connection.reader, requests)

    def _read_shared(self, connection: ServerConnection, requests: list[Request | FrameBatch]) -> None:
        """Read into the shared buffer; usually exactly one whole frame arrives."""
        shared = self._shared
        at = shared.at
        if at > _READ_AT_MAX:
            return  # The remaining clients of this poll are read in the next one.
        room = shared.current[at:]
        beginning = len(connection.beginning)
        try:
            if beginning:
                room[:beginning] = connection.beginning
                count = connection.sock.recv_into(room[beginning:])
            else:
                count = connection.sock.recv_into(room)
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if not count:
            self._on_hangup(connection)
            return
        count += beginning
        if self._batches is not None:
            end = at + count
            run = self._batches.cut(connection, shared.array, at, end, self.limits.requests_per_poll)
            if run is not None and run.end == end:
                shared.at = end
                if beginning:
                    connection.beginning = b""
                    connection.read_by = 0.0
                requests.append(run)
                return
        elif count >= HEADER_SIZE:
            magic, version, operation, request_id, options_size, zero, payload_size = _unpack_header(room)
            payload_start = HEADER_SIZE + options_size
            if (
                (magic, version, zero) == _FRAME_HEAD
                and payload_start + payload_size == count <= self.limits.frame_bytes
                and operation in self._operations
            ):
                shared.at = at + count
                if beginning:
                    connection.beginning = b""
                    connection.read_by = 0.0
                requests.append(
                    Request(
                        connection, operation, request_id, room[HEADER_SIZE:payload_start], room[payload_start:count]
                    )
                )
                return
        self._cut_shared(connection, at, count, requests)

    def _cut_shared(
        self, connection: ServerConnection, at: int, count: int, requests: list[Request | FrameBatch]
    ) -> None:
        """Cut `count` bytes at `at` of the shared buffer: several frames, or a partial one."""
        shared = self._shared
        shared.at = at + count
        connection.beginning = b""
        reader = FrameReader(self.limits.frame_bytes)
        reader.adopt(shared.current, at, at + count)
        taken = self._take_frames(connection, reader, requests)
        if connection.closed:
            return
        if reader.waiting_bytes > _COPIED_BYTES_MAX or connection.fd in self._backlog:
            connection.reader = reader
            if at:
                reader.move_to(shared.take())  # Other clients' requests lie in this buffer.
            else:
                shared.replace()
            if not taken:
                self._read_own(connection, reader, requests)
                return
        else:
            connection.beginning = bytes(reader.rest())
        self._set_time(connection, reader.waiting_bytes, taken)

    def _read_own(
        self, connection: ServerConnection, reader: FrameReader, requests: list[Request | FrameBatch]
    ) -> None:
        """Read more of a partial frame, until it is whole or the socket is empty."""
        taken = 0
        for _ in range(_READS_PER_POLL):
            try:
                count = reader.fill(connection.sock)
            except BlockingIOError:
                break
            except OSError:
                count = 0
            if not count:
                self._on_hangup(connection)
                return
            taken = self._take_frames(connection, reader, requests)
            if connection.closed:
                return
            if taken:
                break  # Their bytes must stay in place until the next poll.
        self._set_time(connection, reader.waiting_bytes, taken)
        self._release_empty(connection, reader)

    def _read_backlog(self, requests: list[Request | FrameBatch]) -> bool:
        """Take requests left in buffers by the last poll; return False when all clients are paused."""
        ready = [each for each in self._backlog.values() if not each.paused]
        for connection in ready:
            try:
                self._continue_backlog(connection, requests)
            except Exception as error:
                self.fail(connection, error)
        return bool(ready)

    def _continue_backlog(self, connection: ServerConnection, requests: list[Request | FrameBatch]) -> None:
        reader = connection.reader
        if reader is None:
            return
        taken = self._take_frames(connection, reader, requests)
        if not connection.closed:
            if taken and reader.waiting_bytes:
                self._backlog[connection.fd] = connection  # Until the next poll the frames stay in place.
            self._set_time(connection, reader.waiting_bytes, taken)
            self._release_empty(connection, reader)

    def _take_frames(
        self, connection: ServerConnection, reader: FrameReader, requests: list[Request | FrameBatch]
    ) -> int:
        """Turn whole frames into requests; return their number."""
        limit, known = self.limits.requests_per_poll, self._operations
        count = 0
        try:
            while count < limit and reader.waiting_bytes:
                if self._batches is not None and (
                    frames := self._take_batch(connection, reader, limit - count, requests)
                ):
                    count += frames
                    continue
                frame = reader.next_frame()
                if frame is None:
                    break
                count += 1
                operation, request_id = frame.operation, frame.request_id
                if operation in known:
                    requests.append(Request(connection, operation, request_id, frame.options, frame.payload))
                else:
                    error = UnknownCommandError(f"unknown operation {operation}")
                    connection.refuse(request_id, operation, error)
        except ProtocolError as problem:
            operation, request_id = reader.bad_frame(problem)
            connection.refuse(request_id, operation, problem)
            self.drop(connection)
            return count
        if count == limit and reader.waiting_bytes:
            self._backlog[connection.fd] = connection
        elif self._backlog:
            self._backlog.pop(connection.fd, None)
        return count

    def _take_batch(
        self, connection: ServerConnection, reader: FrameReader, limit: int, requests: list[Request | FrameBatch]
    ) -> int:
        """Take the next batch of a reader; return its number of frames."""
        assert self._batches is not None
        buffer, at, end = reader.place()
        run = self._batches.cut(connection, np.frombuffer(buffer, np.uint8), at, end, limit)
        if run is None:
            return 0
        reader.take_to(run.end)
        requests.append(run)
        return run.frames

    def _release_empty(self, connection: ServerConnection, reader: FrameReader) -> None:
        """Release the buffer of a connection without pending bytes."""
        if reader.waiting_bytes == 0:
            connection.reader = None
            self._shared.give_back(reader.release())

    def _set_time(self, connection: ServerConnection, waiting_bytes: int, taken: int) -> None:
        """Set the deadline of a partial frame; each frame has its own."""
        if waiting_bytes == 0:
            connection.read_by = 0.0
        elif taken or not connection.read_by:
            connection.read_by = time.monotonic() + self.limits.frame_read_s
            self._times.watch(connection)

    # Writing

    def hold_answers(self) -> None:
        """Hold answers until `send_answers`, so that many cost one system call per client."""
        self._holding = True

    def send_answers(self, *, hold: bool = False) -> None:
        """Send held answers; with `hold`, hold the following answers again."""
        self._holding = False
        if self._held:
            held, self._held = self._held, {}
            for connection, pieces in held.values():
                if not connection.closed:
                    try:
                        self.send(connection, pieces)
                    except Exception as error:
                        self.fail(connection, error)
        self._holding = hold

    def send_one(self, connection: ServerConnection, frame: memoryview) -> None:
        """Send a one-piece frame whose bytes may change afterwards, at once if nothing is queued."""
        output = connection.output
        if self._holding or self._held or output.queued_bytes != output.sent_bytes:
            self.send(connection, (frame,), owned=False)
            return
        try:
            if output.write(connection.sock, (frame,), owned=False):
                return
        except OSError:
            self.drop(connection)
            return
        self._wait_for_room(connection)

    def send(self, connection: ServerConnection, pieces: Sequence[ReadableBuffer], *, owned: bool = True) -> None:
        """Send a whole frame, or queue it after earlier frames."""
        if self._holding and owned:
            held = self._held.get(connection.fd)
            if held is None:
                self._held[connection.fd] = connection, list(pieces)
            else:
                held[1].extend(pieces)
            return
        if connection.fd in self._held:
            pieces = [*self._held.pop(connection.fd)[1], *pieces]
        try:
            if connection.output.write(connection.sock, pieces, owned=owned):
                return
        except OSError:
            self.drop(connection)
            return
        self._wait_for_room(connection)

    def _wait_for_room(self, connection: ServerConnection) -> None:
        """Wait for space in the socket; stop reading from the client while too much is queued."""
        if not connection.paused and connection.output.waiting_bytes > self.limits.output_bytes:
            connection.paused = True
            connection.write_by = time.monotonic() + self.limits.output_grace_s
            self._times.watch(connection)
        self._listen_for(connection)

    def _write(self, connection: ServerConnection) -> None:
        """Send queued bytes; a client that is read again gets a new deadline for its partial frame."""
        output = connection.output
        sent_bytes = output.sent_bytes
        try:
            output.send(connection.sock)
        except OSError:
            self.drop(connection)
            return
        if connection.paused and output.waiting_bytes <= self.limits.output_bytes // 2:
            connection.paused = False
            connection.write_by = 0.0
            connection.read_by = connection.read_by and time.monotonic() + self.limits.frame_read_s
        elif connection.paused and output.sent_bytes > sent_bytes:
            connection.write_by = time.monotonic() + self.limits.output_grace_s
        self._listen_for(connection)

    def _listen_for(self, connection: ServerConnection) -> None:
        """Update the epoll mask when it has changed."""
        mask = 0 if connection.paused else select.EPOLLIN
        if connection.output.waiting_bytes:
            mask |= select.EPOLLOUT
        if mask != connection.mask:
            connection.mask = mask
            self._epoll.modify(connection.fd, mask)

    # Deadlines and closing

    def _expire(self) -> float:
        """Close clients past their deadline; return the seconds until the next check."""
        if (left_s := self._times.seconds_left()) > 0:
            return left_s
        for connection in self._times.expired():
            if connection.closed:
                continue  # Closed by an earlier drop in this loop.
            try:
                self._end_late(connection)
            except Exception as error:
                self.fail(connection, error)
        return CHECK_EVERY_S

    def _end_late(self, connection: ServerConnection) -> None:
        """Close a client that is past its deadline."""
        if connection.write_by:
            self._end_grace(connection)
            return
        self.read_timeouts += 1
        error = RequestTimeoutError(f"frame incomplete after {self.limits.frame_read_s:g} s")
        connection.refuse(CONNECTION_ID, 0, error)
        self.drop(connection)

    def _end_grace(self, connection: ServerConnection) -> None:
        """Close a client that has read nothing. Try once more first, since epoll reports space late."""
        write_by = connection.write_by
        self._write(connection)
        if not connection.closed and connection.write_by == write_by:
            self.slow_consumers += 1
            self.count_reject(SlowConsumerError.code)
            self.drop(connection)

    def _on_hangup(self, connection: ServerConnection) -> None:
        """Handle a hang-up; count a partial frame."""
        reader = connection.reader
        if connection.beginning or (reader is not None and reader.waiting_bytes):
            self.partial_frames += 1
            if self._on_partial is not None:
                self._on_partial()
        self.drop(connection)

    def drop(self, connection: ServerConnection) -> None:
        """Close a connection and discard its partial frame."""
        if connection.closed:
            return
        connection.closed = True
        self._held.pop(connection.fd, None)
        reader, connection.reader = connection.reader, None
        if reader is not None:
            self._shared.give_back(reader.release())
        self._times.forget(connection)
        for table in (self.connections, self._backlog):
            table.pop(connection.fd, None)
        connection.output.clear()
        self._epoll.unregister(connection.fd)
        connection.sock.close()
        if self._on_close is None:
            return
        try:
            self._on_close(connection)
        except Exception as error:
            self._report(error)
