"""The socket side of a role: lets clients in, cuts frames, sends answers. A step at a time, for a role's own loop.

    server = SocketServer(listener, options…)
    server.register(bell_fd, on_ring)
    while …:
        for request in server.poll(timeout_s):
            request.connection.answer(request.request_id, request.operation, options, payload)

Memory: all connections read into one shared buffer, and one that sends nothing holds none. A frame that has not arrived
whole is kept as a few bytes when only its beginning is there, else in the buffer that it began in, which then belongs
to the connection and is replaced. Answers that a client does not read wait up to `client_output_bytes`; above it the
client is not listened to, and after a grace it is let go.
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

from mqproc.errors import (
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
from mqproc.wire.address import peer_uid
from mqproc.wire.connection import Connection, FrameRun, Request
from mqproc.wire.frames import FrameReader, empty_buffer, encode_refusal
from mqproc.wire.operations import Operation

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from mqproc.wire.connection import Connection, RunCutter

# --- io_timeouts ---
# By when clients of a server must have sent or read something: frames that have begun, answers that wait.


LOOK_EVERY_S: Final = 0.05
"""Times are looked at this often, and only while a client has one."""


class ClientTimes:
    """The clients whose `read_by` or `write_by` runs.

    While a process stands still, stopped by a signal or with its machine, nobody is listened to: that time counts for
    no client.
    """

    __slots__ = ("_clients", "_look_at")

    def __init__(self) -> None:
        self._clients: dict[int, Connection] = {}
        self._look_at = 0.0

    def __len__(self) -> int:
        return len(self._clients)

    def watch(self, client: Connection) -> None:
        """One of the client's times has begun to run."""
        if not self._clients:
            self._look_at = time.monotonic() + LOOK_EVERY_S
        self._clients[client.fd] = client

    def forget(self, client: Connection) -> None:
        """The client is gone."""
        self._clients.pop(client.fd, None)

    def seconds_left(self) -> float:
        """Until the next look; 0 when it is time."""
        return max(0.0, self._look_at - time.monotonic())

    def over(self) -> list[Connection]:
        """Clients one of whose times is over; one that is not listened to must only read."""
        now = time.monotonic()
        late_s = now - self._look_at
        self._look_at = now + LOOK_EVERY_S
        if late_s > LOOK_EVERY_S:
            self._prolong(late_s)
        over = []
        for client in list(self._clients.values()):
            if client.write_by:
                if now >= client.write_by:
                    over.append(client)
            elif not client.read_by:
                self.forget(client)
            elif now >= client.read_by and not client.paused:
                over.append(client)
        return over

    def _prolong(self, seconds: float) -> None:
        for client in self._clients.values():
            client.write_by = client.write_by and client.write_by + seconds
            client.read_by = client.read_by and client.read_by + seconds


# --- acceptor ---
# The door of a role's socket: who comes in, and what those are told who may not.


_ACCEPTS_PER_CALL: Final = 64
_SOCKET_BUFFER_BYTES: Final = MIB


class Door:
    """Accepts from one listening socket, which belongs to whoever made it."""

    def __init__(
        self,
        listener: socket.socket,
        inside: Sized,
        inside_max: int,
        allowed_uids: Container[int],
        count_reject: Callable[[str], None],
    ) -> None:
        """At most `inside_max` clients may be `inside`. `count_reject` gets the code of each refusal."""
        listener.setblocking(False)
        self._listener = listener
        self._inside = inside
        self._inside_max = inside_max
        self._allowed_uids = allowed_uids
        self._count_reject = count_reject
        self._spare_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def fileno(self) -> int:
        """The listener's descriptor."""
        return self._listener.fileno()

    def let_in(self, welcome: Callable[[socket.socket], None]) -> None:
        """Take those who wait, some at a time; `welcome` gets the socket, which does not block, of each who may."""
        for _ in range(_ACCEPTS_PER_CALL):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:
                # No descriptor is left: use the spare one to tell the client so.
                self._turn_away()
                return
            sock.setblocking(False)
            if refusal := self._refusal_of(sock):
                self._send_off(sock, refusal)
                continue
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
            welcome(sock)

    def close(self) -> None:
        """Let nobody in any more."""
        if self._spare_fd >= 0:
            os.close(self._spare_fd)
            self._spare_fd = -1

    def _refusal_of(self, sock: socket.socket) -> MqprocError | None:
        uid = peer_uid(sock)
        if uid not in self._allowed_uids:
            return PermissionDeniedError(f"user {uid} may not use a socket of user {os.getuid()}")
        if len(self._inside) >= self._inside_max:
            return self._too_many("max_connections allows no more")
        return None

    def _too_many(self, why: str) -> TooManyConnectionsError:
        return TooManyConnectionsError(f"{len(self._inside):,} connections are open already; {why}", hint_ms=100)

    def _send_off(self, sock: socket.socket, error: MqprocError) -> None:
        self._count_reject(error.code)
        try:
            sock.send(encode_refusal(0, CONNECTION_ID, error))
        except OSError:
            pass  # It has gone by itself.
        finally:
            sock.close()

    def _turn_away(self) -> None:
        os.close(self._spare_fd)
        try:
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            self._send_off(sock, self._too_many("no file descriptor is left"))
        except OSError:
            pass  # Somebody else took the descriptor; the client waits in the backlog.
        self._spare_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


# --- shared_buffer ---
# The buffer that all clients of a server are read into, and how one that holds part of a frame gets its own.


BUFFER_BYTES: Final = 2 * MIB
_SPARE_BUFFERS_MAX: Final = 4


class SharedBuffer:
    """The buffer that reads of one poll go to, one connection after the other, and spare ones for the next."""

    __slots__ = ("array", "at", "current", "returned", "spare")

    def __init__(self) -> None:
        self.current = empty_buffer(BUFFER_BYTES)
        self.array = np.frombuffer(self.current, np.uint8)
        """The current buffer as a kernel takes it."""
        self.at = 0
        self.spare: list[memoryview] = []
        self.returned: list[memoryview] = []

    def begin(self) -> None:
        """A new poll: the last one's requests are done, so their buffers are free."""
        self.at = 0
        if self.returned:
            self.spare = (self.spare + self.returned)[:_SPARE_BUFFERS_MAX]
            self.returned.clear()

    def take(self) -> memoryview:
        """A free buffer."""
        return self.spare.pop() if self.spare else empty_buffer(BUFFER_BYTES)

    def replace(self) -> None:
        """The current buffer now belongs to a connection."""
        self.current = self.take()
        self.array = np.frombuffer(self.current, np.uint8)
        self.at = 0

    def give_back(self, buffer: memoryview | None) -> None:
        """A connection's buffer, still seen by this poll's requests."""
        if buffer is not None and len(buffer) == BUFFER_BYTES:
            self.returned.append(buffer)


# --- limits ---
# What a server of sockets gives one client.


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client may take. Sizes in bytes, times in seconds.

    `requests_per_poll`: one connection gives at most so many requests a poll; the others wait in its buffer.
    """

    connections: int = 1024
    frame_bytes: int = 64 * MIB
    output_bytes: int = 128 * MIB
    frame_read_s: float = 30.0
    output_grace_s: float = 10.0
    requests_per_poll: int = 4096


# A read into a shared buffer wants at least this much room.
_ROOM_MIN: Final = 256 << 10
_READ_AT_MAX: Final = BUFFER_BYTES - _ROOM_MIN
# The beginning of a frame up to this size is copied away and back; more keeps the buffer that it lies in.
_COPIED_BYTES_MAX: Final = 16 << 10
_READS_PER_POLL: Final = 32
_EVENTS_MAX: Final = 128
_READABLE: Final = select.EPOLLIN
_HEARD: Final = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR

_unpack_header = HEADER.unpack_from


class SocketServer:
    """Clients of one role on an already listening Unix socket. Single-threaded, like the role."""

    def __init__(
        self,
        listener: socket.socket,
        limits: Limits | None = None,
        *,
        operations: Container[int] = frozenset(Operation),
        allowed_uids: Container[int] | None = None,
        on_close: Callable[[Connection], None] | None = None,
        on_reject: Callable[[str], None] | None = None,
        on_partial: Callable[[], None] | None = None,
        runs: RunCutter | None = None,
    ) -> None:
        """With `runs`, frames of one operation come as runs of them, from `poll_runs`."""
        self.limits = limits or Limits()
        self.connections: dict[int, Connection] = {}
        self.rejects: Counter[str] = Counter()
        self.partial_frames = 0
        self.read_timeouts = self.slow_consumers = 0
        self._operations = operations
        self._on_close = on_close
        self._on_reject = on_reject
        self._on_partial = on_partial
        self._runs = runs
        self._shared = SharedBuffer()
        self._times = ClientTimes()
        self._backlog: dict[int, Connection] = {}
        self._bells: dict[int, Callable[[], None]] = {}
        self._holding = False
        self._held: dict[int, tuple[Connection, list[ReadableBuffer]]] = {}
        uids = {os.getuid()} if allowed_uids is None else allowed_uids
        self._door = Door(listener, self.connections, self.limits.connections, uids, self.count_reject)
        self._epoll = select.epoll()
        self._epoll.register(self._door.fileno(), select.EPOLLIN)
        self._accepting = True

    # Set-up and end

    def register(self, fd: int, on_readable: Callable[[], None]) -> None:
        """Wake `poll` for another descriptor too (an eventfd bell); `on_readable` must drain it."""
        self._bells[fd] = on_readable
        self._epoll.register(fd, select.EPOLLIN)

    def stop_accepting(self) -> None:
        """Let in who waits, and nobody else: who comes stays in the listener's backlog for a successor."""
        if self._accepting:
            self._door.let_in(self._welcome)
            self._accepting = False
            self._epoll.unregister(self._door.fileno())

    def drain(self, timeout_s: float) -> None:
        """Send what is queued, for a role that stops."""
        end = time.monotonic() + timeout_s
        while (left := end - time.monotonic()) > 0:
            waiting = [connection for connection in self.connections.values() if connection.output.waiting_bytes]
            if not waiting:
                return
            # Not the epoll: bells and clients that go on sending would wake it all the time.
            room = select.poll()
            for connection in waiting:
                room.register(connection.fd, select.POLLOUT)
            for fd, _ in room.poll(left * 1000):
                self._write(self.connections[fd])

    def hang_up(self) -> None:
        """Let clients send nothing more: what they try to they know as not taken. What they have sent can be read."""
        for connection in self.connections.values():
            with contextlib.suppress(OSError):  # It has gone by itself.
                connection.sock.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Let all clients go. The listener belongs to whoever made it."""
        for connection in list(self.connections.values()):
            self.drop(connection)
        self._door.close()
        self._epoll.close()

    # One step

    def poll(self, timeout_s: float) -> list[Request]:
        """`poll_runs` of a server that gives no runs."""
        assert self._runs is None
        return cast("list[Request]", self.poll_runs(timeout_s))

    def poll_runs(self, timeout_s: float) -> list[Request | FrameRun]:
        """Wait up to `timeout_s` for requests, bells, or room for answers; 0 only looks.

        The requests' views are valid until the next call.
        """
        requests: list[Request | FrameRun] = []
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
                    self._other(fd)
                    continue
                if mask == _READABLE and connection.reader is None and not connection.paused:
                    self._read_shared(connection, requests)
                    continue
                if mask & select.EPOLLOUT:
                    self._write(connection)
                if mask & _HEARD and not connection.closed:
                    self._hear(connection, mask, requests)
        return requests

    def _other(self, fd: int) -> None:
        on_readable = self._bells.get(fd)
        if on_readable is not None:
            on_readable()
        elif self._accepting and fd == self._door.fileno():
            self._door.let_in(self._welcome)

    def _welcome(self, sock: socket.socket) -> None:
        connection = Connection(self, sock)
        self.connections[connection.fd] = connection
        self._epoll.register(connection.fd, select.EPOLLIN)

    def count_reject(self, code: str) -> None:
        """A refusal leaves, or a client is let go, with this code."""
        self.rejects[code] += 1
        if self._on_reject is not None:
            self._on_reject(code)

    # Reading

    def _hear(self, connection: Connection, mask: int, requests: list[Request | FrameRun]) -> None:
        if connection.paused:
            if mask & (select.EPOLLHUP | select.EPOLLERR):
                self._lose(connection)
        elif connection.reader is None:
            self._read_shared(connection, requests)
        elif connection.fd not in self._backlog:
            self._read_own(connection, connection.reader, requests)

    def _read_shared(self, connection: Connection, requests: list[Request | FrameRun]) -> None:
        """Read into the shared buffer: most often exactly one whole frame arrives."""
        shared = self._shared
        at = shared.at
        if at > _READ_AT_MAX:
            return  # The rest of this poll's clients are read in the next one.
        room = shared.current[at:] if at else shared.current
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
            self._lose(connection)
            return
        count += beginning
        if self._runs is not None:
            end = at + count
            run = self._runs.cut(connection, shared.array, at, end, self.limits.requests_per_poll)
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
                payload_start + payload_size == count
                and magic == MAGIC
                and version == VERSION
                and zero == 0
                and count <= self.limits.frame_bytes
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

    def _cut_shared(self, connection: Connection, at: int, count: int, requests: list[Request | FrameRun]) -> None:
        """`count` bytes of a client lie at `at` of the shared buffer: several frames, or not a whole one."""
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
                reader.move_to(shared.take())  # Requests of others lie in this buffer.
            else:
                shared.replace()
            if not taken:
                self._read_own(connection, reader, requests)
                return
        else:
            connection.beginning = bytes(reader.rest())
        self._set_time(connection, reader.waiting_bytes, taken)

    def _read_own(self, connection: Connection, reader: FrameReader, requests: list[Request | FrameRun]) -> None:
        """Read more of a frame that has begun, until it is whole or the socket is empty."""
        taken = 0
        for _ in range(_READS_PER_POLL):
            try:
                count = reader.fill(connection.sock)
            except BlockingIOError:
                break
            except OSError:
                count = 0
            if not count:
                self._lose(connection)
                return
            taken = self._take_frames(connection, reader, requests)
            if connection.closed:
                return
            if taken:
                break  # Their bytes must stay where they are until the next poll.
        self._set_time(connection, reader.waiting_bytes, taken)
        self._release_empty(connection, reader)

    def _read_backlog(self, requests: list[Request | FrameRun]) -> bool:
        """Requests that the last poll left in their buffers; False when clients are to read answers before."""
        ready = [each for each in self._backlog.values() if not each.paused]
        for connection in ready:
            if (reader := connection.reader) is not None:
                taken = self._take_frames(connection, reader, requests)
                if not connection.closed:
                    if taken and reader.waiting_bytes:
                        self._backlog[connection.fd] = connection  # Until the next poll the frames stay where they are.
                    self._set_time(connection, reader.waiting_bytes, taken)
                    self._release_empty(connection, reader)
        return bool(ready)

    def _take_frames(self, connection: Connection, reader: FrameReader, requests: list[Request | FrameRun]) -> int:
        """Turn whole frames into requests; returns how many frames there were."""
        limit, known = self.limits.requests_per_poll, self._operations
        count = 0
        try:
            while count < limit and reader.waiting_bytes:
                if self._runs is not None and (frames := self._take_run(connection, reader, limit - count, requests)):
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
                    error = UnknownCommandError(f"operation {operation} is not known here")
                    connection.refuse(request_id, operation, error)
        except ProtocolError as problem:
            operation, request_id, _ = reader.bad_frame(problem)
            connection.refuse(request_id, operation, problem)
            self.drop(connection)
            return count
        if count == limit and reader.waiting_bytes:
            self._backlog[connection.fd] = connection
        elif self._backlog:
            self._backlog.pop(connection.fd, None)
        return count

    def _take_run(
        self, connection: Connection, reader: FrameReader, limit: int, requests: list[Request | FrameRun]
    ) -> int:
        """Take the run that comes next in a reader; returns how many frames it has."""
        assert self._runs is not None
        buffer, at, end = reader.place()
        run = self._runs.cut(connection, np.frombuffer(buffer, np.uint8), at, end, limit)
        if run is None:
            return 0
        reader.take_to(run.end)
        requests.append(run)
        return run.frames

    def _release_empty(self, connection: Connection, reader: FrameReader) -> None:
        """A connection that has nothing waiting holds no buffer."""
        if reader.waiting_bytes == 0:
            connection.reader = None
            self._shared.give_back(reader.release())

    def _set_time(self, connection: Connection, waiting_bytes: int, taken: int) -> None:
        """A frame that has begun must be whole in time; each frame has its own time."""
        if waiting_bytes == 0:
            connection.read_by = 0.0
        elif taken or not connection.read_by:
            connection.read_by = time.monotonic() + self.limits.frame_read_s
            self._times.watch(connection)

    # Writing

    def hold_answers(self) -> None:
        """From now on keep what is to be sent, until `send_answers`: many answers then cost one call a client."""
        self._holding = True

    def send_answers(self, *, hold: bool = False) -> None:
        """Send what was held; with `hold` what comes next is held again."""
        self._holding = False
        if self._held:
            held, self._held = self._held, {}
            for connection, pieces in held.values():
                if not connection.closed:
                    self.send(connection, pieces)
        self._holding = hold

    def send_one(self, connection: Connection, frame: memoryview) -> None:
        """Send a frame in one piece, whose bytes may change afterwards: at once, when nothing is before it."""
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

    def send(self, connection: Connection, pieces: Sequence[ReadableBuffer], *, owned: bool = True) -> None:
        """Send a whole frame, or keep it behind what waits."""
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

    def _wait_for_room(self, connection: Connection) -> None:
        """The socket has not taken all: the rest leaves when it can, and nothing is read while that is too much."""
        if not connection.paused and connection.output.waiting_bytes > self.limits.output_bytes:
            connection.paused = True
            connection.write_by = time.monotonic() + self.limits.output_grace_s
            self._times.watch(connection)
        self._listen_for(connection)

    def _write(self, connection: Connection) -> None:
        """The socket has room again; a frame of who was not listened to has its time anew."""
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

    def _listen_for(self, connection: Connection) -> None:
        """Tell epoll what a connection waits for, when that has changed."""
        mask = 0 if connection.paused else select.EPOLLIN
        if connection.output.waiting_bytes:
            mask |= select.EPOLLOUT
        if mask != connection.mask:
            connection.mask = mask
            self._epoll.modify(connection.fd, mask)

    # Times and ends

    def _expire(self) -> float:
        """Let those go whose time is over; returns the seconds until the next look."""
        if (left_s := self._times.seconds_left()) > 0:
            return left_s
        for connection in self._times.over():
            if connection.closed:
                continue  # A drop in this look may have done it.
            if connection.write_by:
                self._end_grace(connection)
            else:
                self.read_timeouts += 1
                error = RequestTimeoutError(f"frame not whole after {self.limits.frame_read_s:g} s")
                connection.refuse(CONNECTION_ID, 0, error)
                self.drop(connection)
        return LOOK_EVERY_S

    def _end_grace(self, connection: Connection) -> None:
        """Let a client go that has read nothing. The kernel tells of room late, so it is tried once more."""
        write_by = connection.write_by
        self._write(connection)
        if not connection.closed and connection.write_by == write_by:
            self.slow_consumers += 1
            self.count_reject(SlowConsumerError.code)
            self.drop(connection)

    def _lose(self, connection: Connection) -> None:
        """The client has hung up; a frame that it had begun is counted."""
        reader = connection.reader
        if connection.beginning or (reader is not None and reader.waiting_bytes):
            self.partial_frames += 1
            if self._on_partial is not None:
                self._on_partial()
        self.drop(connection)

    def drop(self, connection: Connection) -> None:
        """Close a connection; a frame that it had begun is forgotten."""
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
        if self._on_close is not None:
            self._on_close(connection)
