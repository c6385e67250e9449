"""An ASGI application on a TCP port, a step at a time, inside a role's own loop.

uvicorn's HTTP protocol over asyncio, whose event loop runs only while the role waits: no thread, no signal handlers.
Each connection is for one request, which must have arrived within `deadline_s`; a client that takes nothing of its
answer for as long is let go, too. Beyond `connections_max` new ones are closed.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Final

from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

CONNECTIONS_MAX: Final = 64
DEADLINE_S: Final = 10.0
REQUEST_BYTES_MAX: Final = 16 << 10
_BACKLOG: Final = 64

Application = Callable[[Any, Any, Any], Any]


class _OneRequest(H11Protocol):
    """uvicorn's protocol for a client that may be slow, silent, or one too many."""

    connections_max = CONNECTIONS_MAX
    deadline_s = DEADLINE_S
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self.connections_max:
            self.transport = transport
            transport.abort()
            return
        super().connection_made(transport)
        # Who takes nothing more, stopped or gone, would have its place for ever: only the kernel sees that.
        sock: socket.socket = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(self.deadline_s * 1000))
        self._late = self.loop.call_later(self.deadline_s, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._late is not None:
            self._late.cancel()
            super().connection_lost(exc)

    def _give_up(self) -> None:
        """The request is not there yet: nothing has been answered, so nobody is cut off."""
        cycle: object | None = self.cycle
        if cycle is None:
            self.transport.abort()


class AsgiServer:
    """Listens from the start; serves during `poll`."""

    def __init__(
        self,
        application: Application,
        host: str,
        port: int,
        *,
        deadline_s: float = DEADLINE_S,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        """Raises OSError when the port cannot be had."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self.port: int = listener.getsockname()[1]
        config = Config(
            application,
            interface="asgi3",
            lifespan="off",
            http=_OneRequest,
            ws="none",
            proxy_headers=False,
            server_header=False,
            date_header=False,
            access_log=False,
            log_config=None,
            h11_max_incomplete_event_size=REQUEST_BYTES_MAX,
            headers=[("connection", "close"), ("cache-control", "no-store"), ("x-content-type-options", "nosniff")],
        )
        config.load()
        self._state = ServerState()
        self._state.default_headers = config.encoded_headers
        self._loop = asyncio.new_event_loop()
        self._woken = asyncio.Event()

        def protocol() -> _OneRequest:
            made = _OneRequest(config, self._state, {}, _loop=self._loop)
            made.deadline_s, made.connections_max = deadline_s, connections_max
            return made

        self._server = self._loop.run_until_complete(self._loop.create_server(protocol, sock=listener))

    def watch(self, fd: int) -> None:
        """Let `poll` return when this descriptor becomes readable too; its owner drains it."""
        self._loop.add_reader(fd, self._woken.set)

    @property
    def connections(self) -> int:
        """Clients connected now."""
        return len(self._state.connections)

    def poll(self, timeout_s: float) -> int:
        """Serve for up to `timeout_s`, or until a watched descriptor is readable; the number of requests begun."""
        before = self._state.total_requests
        self._woken.clear()
        self._loop.run_until_complete(self._wait(timeout_s))
        return self._state.total_requests - before

    def close(self) -> None:
        """Let all clients go and free the port."""
        self._server.close()
        for connection in list(self._state.connections):
            connection.transport.abort()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    async def _wait(self, timeout_s: float) -> None:
        if timeout_s <= 0:
            # Twice: the first turn hears of what has come, the second serves it.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._woken.wait()
        except TimeoutError:
            return
