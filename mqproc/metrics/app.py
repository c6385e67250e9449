"""The monitor's pages as an ASGI application.

    /           the status page: live, for people        /metrics    for Prometheus
    /events     what it shows, once a second             /healthz    alive?    /readyz    serving in full?
                with ?name=… only topics and groups that have this in their names

Alive is not ready: a group that recovers is alive. Both answer 503 when they are not, with the reasons as text.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from importlib.resources import files
from typing import Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from mqproc.metrics.collector import Collector, Picture
from mqproc.metrics.exposition import CONTENT_TYPE, render
from mqproc.metrics.health import alive_problems, ready_problems
from mqproc.metrics.snapshot import as_values
from mqproc.paths import StorePaths

EVENT_EVERY_S: Final = 1.0
STREAMS_MAX: Final = 32

_FILES: Final = {
    "/": ("status.html", "text/html; charset=utf-8"),
    "/status.css": ("status.css", "text/css; charset=utf-8"),
    "/status.js": ("status.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
# Nothing of the page comes from elsewhere, and nothing of it may be run that is not in these files.
_POLICY: Final = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'"


class StatusFeed:
    """Snapshots for everybody who looks: taken at most once in EVENT_EVERY_S, and not at all while nobody does."""

    def __init__(self, collector: Collector, paths: StorePaths, version: str) -> None:
        self._collector = collector
        self._paths = paths
        self._version = version
        self._taken = 0.0
        self._picture: Picture | None = None
        self._events: dict[str, bytes] = {}
        self.streams = 0

    def event(self, name: str = "") -> bytes:
        """The newest snapshot as a server-sent event; of topics and groups only those with `name` in theirs."""
        now = time.monotonic()
        if self._picture is None or now - self._taken >= EVENT_EVERY_S / 2:
            self._taken = now
            self._picture = self._collector.picture()
            self._events.clear()
        found = self._events.get(name)
        if found is None:
            values = as_values(self._collector, self._paths, self._picture, name=name)
            found = b"data: " + msgspec.json.encode({"version": self._version, "name": name, **values}) + b"\n\n"
            self._events[name] = found
        return found

    async def events(self, name: str) -> AsyncIterator[bytes]:
        """Snapshots until the client goes."""
        while True:
            yield self.event(name)
            await asyncio.sleep(EVENT_EVERY_S)


class EventStream(StreamingResponse):
    """One client's snapshots. It counts from the moment that it is let in: many come at once after a restart."""

    def __init__(self, feed: StatusFeed, name: str) -> None:
        super().__init__(feed.events(name), headers={"content-type": "text/event-stream"})
        self._feed = feed
        feed.streams += 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._feed.streams -= 1


def make_app(collector: Collector, paths: StorePaths, version: str) -> Starlette:
    """The application over one running group."""
    feed = StatusFeed(collector, paths, version)
    timeout_ns = collector.options.heartbeat_timeout_ms * 1_000_000

    async def metrics(_request: Request) -> Response:
        return Response(render(collector.samples()), headers={"content-type": CONTENT_TYPE})

    async def healthz(_request: Request) -> Response:
        return _verdict(alive_problems(collector.control))

    async def readyz(_request: Request) -> Response:
        return _verdict(ready_problems(collector.control, timeout_ns))

    async def events(request: Request) -> Response:
        if feed.streams >= STREAMS_MAX:
            return PlainTextResponse(f"{STREAMS_MAX} look already\n", 503)
        return EventStream(feed, request.query_params.get("name", ""))

    routes = [
        Route("/metrics", metrics),
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Route("/events", events),
        *(_file_route(path, name, kind) for path, (name, kind) in _FILES.items()),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _refuse})


def _file_route(path: str, name: str, content_type: str) -> Route:
    body = files("mqproc.metrics").joinpath("page", name).read_bytes()

    async def answer(_request: Request) -> Response:
        return Response(body, headers={"content-type": content_type, "content-security-policy": _POLICY})

    return Route(path, answer)


async def _refuse(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    hint = "; there are / /metrics /healthz /readyz" if error.status_code == 404 else ""
    return PlainTextResponse(f"{error.detail.lower()}{hint}\n", error.status_code, headers=error.headers)


def _verdict(problems: list[str]) -> Response:
    if problems:
        return PlainTextResponse("\n".join(problems) + "\n", 503)
    return PlainTextResponse("ok\n")


# --- server ---
# An ASGI application on a TCP port, a step at a time, inside a role's own loop.
#
# uvicorn's HTTP protocol over asyncio, whose event loop runs only while the role waits: no thread, no signal handlers.
# Each connection is for one request, which must have arrived within `deadline_s`; a client that takes nothing of its
# answer for as long is let go, too. Beyond `connections_max` new ones are closed.


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
