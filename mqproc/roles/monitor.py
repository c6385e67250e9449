"""The monitor role: /metrics, /healthz, /readyz and a status page, from the control file.

It starts first, before recovery, and stops last. If the port is in use, as by another group, the store runs without it
and the monitor retries.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from operator import itemgetter
from typing import Any, Final

import uvicorn

from mqproc.config.options import Options
from mqproc.ipc.bell import EventBell
from mqproc.layout import control
from mqproc.metrics.app import make_app
from mqproc.metrics.collector import MetricsCollector
from mqproc.roles.role import Role, RoleContext
from mqproc.roles.role_log import get_logger
from mqproc.util.version import installed_version

# A uvicorn server inside a role's own loop.
#
# Its event loop runs only during `AsgiServer.poll`. It uses no threads or signal handlers. Each connection carries one
# request, which must arrive within `deadline_s`; the answer, or each part of a stream, must be read within `deadline_s`
# too. Above `connections_max` the clients that are waited for longest are dropped, so that others are served.


CONNECTIONS_MAX: Final = 64
DEADLINE_S: Final = 10.0
REQUEST_BYTES_MAX: Final = 16 << 10
_BACKLOG: Final = 64
_SEND_BUFFER_BYTES: Final = 64 << 10
_HEADERS: Final = [("connection", "close"), ("cache-control", "no-store"), ("x-content-type-options", "nosniff")]

Application = Callable[[Any, Any, Any], Any]


class AsgiServer:
    """Listens from its creation on; serves during `poll`."""

    def __init__(
        self,
        application: Application,
        host: str,
        port: int,
        *,
        deadline_s: float = DEADLINE_S,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        """Raises OSError when the port cannot be bound."""
        self._deadline_s, self._connections_max = deadline_s, connections_max
        self._waiting_s: dict[tuple[Any, bool], float] = {}
        """Since when a client is waited for, by connection and whether its request has arrived."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        # Accepted sockets inherit it: the kernel ends a connection whose peer reads nothing for so long.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(deadline_s * 1000))
        # They inherit this too: with a larger buffer it would take minutes to detect a stream that is not read.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self.port: int = listener.getsockname()[1]
        config = uvicorn.Config(
            application,
            interface="asgi3",
            lifespan="off",
            http="h11",
            ws="none",
            proxy_headers=False,
            server_header=False,
            date_header=False,
            access_log=False,
            log_config=None,
            h11_max_incomplete_event_size=REQUEST_BYTES_MAX,
            headers=_HEADERS,
        )
        config.load()
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)
        self._state = self._server.server_state
        self._state.default_headers = config.encoded_headers
        self._loop = asyncio.new_event_loop()
        self._woken = asyncio.Event()
        self._loop.run_until_complete(self._server.startup(sockets=[listener]))

    def watch(self, fd: int) -> None:
        """Make `poll` return when this descriptor becomes readable too; its owner drains it."""
        self._loop.add_reader(fd, self._woken.set)

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._state.connections)

    def poll(self, timeout_s: float) -> int:
        """Serve up to `timeout_s`, or until a watched descriptor is readable; count requests."""
        before = self._state.total_requests
        self._woken.clear()
        self._loop.run_until_complete(self._serve(timeout_s))
        return self._state.total_requests - before

    def close(self) -> None:
        """Close all connections and free the port."""
        for listener in self._server.servers:
            listener.close()
        for connection in list(self._state.connections):
            connection.transport.abort()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    async def _serve(self, timeout_s: float) -> None:
        if timeout_s <= 0:
            # Twice: the first turn accepts and reads, the second answers.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        else:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._woken.wait()
            except TimeoutError:
                pass
        if self._drop_connections():
            await asyncio.sleep(0)  # The loop removes them in its next turn.

    def _drop_connections(self) -> int:
        """Abort connections whose clients are late, and above the limit those waited for longest."""
        now_s = time.monotonic()
        open_now: set[Any] = self._state.connections
        # `cycle` is the request that is being answered.
        waiting = [
            (connection, connection.cycle is not None)
            for connection in open_now
            if connection.cycle is None or connection.transport.get_write_buffer_size()
        ]
        self._waiting_s = {key: self._waiting_s.get(key, now_s) for key in waiting}
        above = len(open_now) - self._connections_max
        dropped = [
            connection
            for place, ((connection, _), since_s) in enumerate(sorted(self._waiting_s.items(), key=itemgetter(1)))
            if place < above or now_s - since_s >= self._deadline_s
        ]
        for connection in dropped:
            connection.transport.abort()
        return len(dropped)


RETRY_NS = 5_000_000_000


class Monitor(Role):
    """The monitor. Its bell is an EventBell, which can be polled together with sockets."""

    name = control.MONITOR

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._words = context.control.words
        self._log = get_logger()
        io, paths = context.io, context.paths
        version = installed_version()
        self._collector = MetricsCollector(context.control, io, paths, context.options, version)
        self._app = make_app(self._collector, paths, version)
        self._server: AsgiServer | None = None
        self._retry_ns = 0
        # A killed predecessor may have left its port.
        self._words[control.MONITOR_PORT] = 0
        self._listen()

    def do_work(self) -> int:
        if self._server is None and self._context.clock.monotonic_ns() >= self._retry_ns:
            self._listen()
        return self._poll(0)

    def wait(self, timeout_s: float) -> None:
        if self._server is None:
            self._context.bell.wait(timeout_s)
        else:
            self._poll(timeout_s)

    def reload(self, options: Options) -> None:
        """Apply options that pages show."""
        self._collector.options = options

    def on_stop(self) -> bool:
        return True

    def close(self) -> None:
        self._words[control.MONITOR_PORT] = 0
        if self._server is not None:
            self._server.close()
            self._server = None
        self._collector.close()

    def _poll(self, timeout_s: float) -> int:
        if self._server is None:
            return 0
        answered = self._server.poll(timeout_s)
        self._words.add(control.SCRAPES, answered)
        return answered

    def _listen(self) -> None:
        options = self._context.options
        try:
            server = AsgiServer(self._app, options.metrics_host, options.metrics_port)
        except OSError as error:
            self._retry_ns = self._context.clock.monotonic_ns() + RETRY_NS
            address = f"{options.metrics_host}:{options.metrics_port}"
            self._log.warning(
                "metrics are not offered", address=address, error=error.strerror, remedy="set metrics_port"
            )
            return
        bell = self._context.bell
        if isinstance(bell, EventBell):
            server.watch(bell.fileno())
        self._server = server
        self._words[control.MONITOR_PORT] = server.port
