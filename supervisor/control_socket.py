"""`ctl.sock`: commands to a running supervisor.

Operations: STATUS, RESTART_ROLE, RUN_ROLE, STOP_GROUP, RELOAD. A restart is answered when the role runs again, a stop
when the group has stopped; then the connection is closed, and the store's lock is free. An attached role belongs to the
client until it ends or the client disconnects.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from typing import Final, Protocol

from mqproc.errors import InternalError, MqprocError
from mqproc.roles import role_log
from mqproc.wire.address import peer_pid
from mqproc.wire.connection import Request, ServerConnection
from mqproc.wire.frames import NO_OPTIONS
from mqproc.wire.operations import Operation, RoleRequest, RunAnswer, RunRequest, StatusAnswer, StopAnswer
from mqproc.wire.server import ServerLimits, SocketServer


class Reactor:
    """Epoll with a handler per descriptor; it can be watched by another epoll."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}

    def fileno(self) -> int:
        """Readable while any watched descriptor is."""
        return self._epoll.fileno()

    def watch(self, fd: int, handler: Callable[[], None]) -> None:
        """Call `handler` whenever `fd` is readable."""
        self._handlers[fd] = handler
        self._epoll.register(fd, select.EPOLLIN)

    def forget(self, fd: int) -> None:
        """Stop watching. Call it before closing `fd`: a forked child may still have a copy."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def dispatch(self) -> None:
        """Call the handlers of readable descriptors. Handlers may call `watch` and `forget`."""
        for fd, _ in self._epoll.poll(0):
            handler = self._handlers.get(fd)
            if handler is not None:
                handler()

    def close(self) -> None:
        self._epoll.close()


OPERATIONS: Final = frozenset(
    {
        Operation.PING,
        Operation.STATUS,
        Operation.RESTART_ROLE,
        Operation.RUN_ROLE,
        Operation.STOP_GROUP,
        Operation.RELOAD,
    }
)
# Requests are a few bytes, and clients are few.
LIMITS: Final = ServerLimits(connections=64, frame_bytes=1 << 16, output_bytes=1 << 20, frame_read_s=5.0)
_DRAIN_S: Final = 1.0

Done = Callable[[MqprocError | None], None]
"""Called once, on completion or failure of a command."""
Stopped = Callable[[StopAnswer], None]
"""Called once, when the group has stopped."""
Attached = Callable[[RunAnswer | MqprocError], None]
"""Called once, when an attached role has ended or could not be attached."""
Detach = Callable[[], None]
"""Called when the client of an attached role has disconnected."""


class Commands(Protocol):
    """The supervisor's side of commands. An MqprocError refuses the request."""

    def status(self) -> StatusAnswer: ...

    def restart_role(self, role: str, done: Done) -> None: ...

    def run_role(self, request: RunRequest, caller_pid: int, done: Attached) -> Detach: ...

    def stop_group(self, done: Stopped) -> None: ...

    def reload(self) -> None: ...


class ControlSocket:
    """The supervisor's socket. The supervisor sleeps only in its `poll`."""

    def __init__(self, listener: socket.socket, commands: Commands, reactor: Reactor) -> None:
        self._commands = commands
        self._server = SocketServer(
            listener, LIMITS, operations=OPERATIONS, on_close=self._on_disconnect, on_error=_log_error
        )
        self._attached: dict[ServerConnection, list[Detach]] = {}
        self._server.register(reactor.fileno(), reactor.dispatch)

    def poll(self, timeout_s: float) -> None:
        """Wait for clients and for the reactor's descriptors, and serve both."""
        for request in self._server.poll(timeout_s):
            try:
                self._serve(request)
            except MqprocError as error:
                request.refuse(error)
            except Exception:
                role_log.get_logger().exception("a request failed", operation=request.operation)
                request.refuse(InternalError("unexpected error: see the supervisor's log"))

    def close(self) -> None:
        """Send pending answers, then close all connections."""
        self._server.drain(_DRAIN_S)
        self._server.close()

    def _serve(self, request: Request) -> None:
        options = request.decode()
        match request.operation:
            case Operation.STATUS:
                request.answer(self._commands.status())
            case Operation.RESTART_ROLE:
                assert isinstance(options, RoleRequest)
                self._commands.restart_role(options.role, _answer_to(request))
            case Operation.RUN_ROLE:
                assert isinstance(options, RunRequest)
                connection = request.connection
                detach = self._commands.run_role(options, peer_pid(connection.sock), _answer_to(request))
                self._attached.setdefault(connection, []).append(detach)
            case Operation.STOP_GROUP:
                self._commands.stop_group(_answer_to(request))
            case Operation.RELOAD:
                self._commands.reload()
                request.answer()
            case _:
                request.answer()

    def _on_disconnect(self, connection: ServerConnection) -> None:
        for detach in self._attached.pop(connection, ()):
            detach()


def _log_error(_error: Exception) -> None:
    role_log.get_logger().exception("unexpected error: a client's connection is closed")


def _answer_to(request: Request) -> Callable[[RunAnswer | StopAnswer | MqprocError | None], None]:
    def done(result: RunAnswer | StopAnswer | MqprocError | None) -> None:
        if isinstance(result, MqprocError):
            request.refuse(result)
        else:
            request.answer(NO_OPTIONS if result is None else result)

    return done
