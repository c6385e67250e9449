"""The monitor's pages as an ASGI application.

    /           status page, live                        /metrics    Prometheus
    /events     its data, once a second                  /healthz    liveness     /readyz    readiness
                with ?name=… only topics and groups whose names contain this

A group that recovers is alive but not ready. Both checks answer 503 with the reasons as text when they fail.
Requests for a host name that is not the monitor's get 421.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import socket
import time
from collections.abc import AsyncIterator
from importlib.resources import files
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from mqproc.config.options import Options
from mqproc.ipc.health import Problem, silent_supervisor
from mqproc.metrics.collector import GroupState, MetricsCollector
from mqproc.metrics.snapshot import as_values
from mqproc.paths import StorePaths

if TYPE_CHECKING:
    from mqproc.metrics.exposition import Exposition

EVENT_EVERY_S: Final = 1.0
STREAMS_MAX: Final = 32
_ALL_ADDRESSES: Final = ("", "0.0.0.0", "::")

_FILES: Final = {
    "/": ("status.html", "text/html; charset=utf-8"),
    "/status.css": ("status.css", "text/css; charset=utf-8"),
    "/status.js": ("status.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
# The page loads nothing from elsewhere, and runs only these files.
_POLICY: Final = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'"


class StatusFeed:
    """Snapshots for all open status pages: at most one per EVENT_EVERY_S, none without pages."""

    def __init__(self, collector: MetricsCollector, paths: StorePaths, version: str) -> None:
        self._collector = collector
        self._paths = paths
        self._version = version
        self._taken = 0.0
        self._state: GroupState | None = None
        self._events: dict[str, bytes] = {}
        self.streams = 0

    def event(self, name: str = "") -> bytes:
        """Latest snapshot as a server-sent event; `name` selects topics and groups by substring."""
        now = time.monotonic()
        if self._state is None or now - self._taken >= EVENT_EVERY_S / 2:
            self._taken = now
            self._state = self._collector.read_state()
            self._events.clear()
        found = self._events.get(name)
        if found is None:
            values = as_values(self._collector, self._paths, self._state, name=name)
            found = b"data: " + msgspec.json.encode({"version": self._version, "name": name, **values}) + b"\n\n"
            self._events[name] = found
        return found

    async def events(self, name: str) -> AsyncIterator[bytes]:
        """Snapshots until the client disconnects."""
        while True:
            yield self.event(name)
            await asyncio.sleep(EVENT_EVERY_S)


class EventStream(StreamingResponse):
    """One client's stream. It counts from its creation: many connect at once after a restart."""

    def __init__(self, feed: StatusFeed, name: str) -> None:
        super().__init__(feed.events(name), headers={"content-type": "text/event-stream"})
        self._feed = feed
        feed.streams += 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._feed.streams -= 1


class HostCheck:
    """Answers 421 to requests for a host name that is not the monitor's.

    A web site whose name resolves to the monitor's address could otherwise read it with a user's browser. A browser
    always sends a `Host` header, so requests without one are answered.
    """

    def __init__(self, app: ASGIApp, collector: MetricsCollector) -> None:
        self._app = app
        self._collector = collector

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host")
        if host is None or _is_own_host(host, scope["server"][0], self._collector.options):
            await self._app(scope, receive, send)
        else:
            text = f"{host[:64]!r} is not a host name of this monitor; metrics_allowed_hosts can add it\n"
            await PlainTextResponse(text, 421)(scope, receive, send)


def _is_own_host(host: str, server: str, options: Options) -> bool:
    """Whether a `Host` header names the monitor; `server` is the connection's local address.

    A monitor that listens on all addresses has every address: clients may use that of a proxy or a container's host.
    """
    names = {each.strip().lower() for each in (options.metrics_host, *options.metrics_allowed_hosts.split(","))}
    if "*" in names:
        return True
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    if not name or name in names:
        return bool(name)
    address, local = _ip_address(name), _ip_address(server)
    if options.metrics_host in _ALL_ADDRESSES:
        return address is not None or name in ("localhost", socket.gethostname().lower())
    if name == "localhost":
        return local is not None and local.is_loopback
    return address is not None and address == local


def _ip_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def make_app(collector: MetricsCollector, paths: StorePaths, version: str) -> Starlette:
    feed = StatusFeed(collector, paths, version)

    @functools.cache
    def exposition() -> Exposition:
        # Imported at the first scrape: prometheus_client takes longer to import than a role to start.
        from mqproc.metrics.exposition import Exposition

        return Exposition(collector.samples)

    async def metrics(request: Request) -> Response:
        return exposition().response(request)

    async def healthz(_request: Request) -> Response:
        return _verdict(silent_supervisor(paths, collector.control.snapshot()))

    async def readyz(_request: Request) -> Response:
        return _verdict(collector.read_health(collector.control.snapshot()).problems)

    async def events(request: Request) -> Response:
        if feed.streams >= STREAMS_MAX:
            return PlainTextResponse(f"{STREAMS_MAX} status pages are open already\n", 503)
        return EventStream(feed, request.query_params.get("name", ""))

    routes = [
        Route("/metrics", metrics),
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Route("/events", events),
        *(_file_route(path, name, kind) for path, (name, kind) in _FILES.items()),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(HostCheck, collector=collector)],
        exception_handlers={HTTPException: _refuse},
    )


def _file_route(path: str, name: str, content_type: str) -> Route:
    body = files("mqproc.metrics").joinpath("page", name).read_bytes()

    async def answer(_request: Request) -> Response:
        return Response(body, headers={"content-type": content_type, "content-security-policy": _POLICY})

    return Route(path, answer)


async def _refuse(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    hint = "; pages are / /metrics /healthz /readyz" if error.status_code == 404 else ""
    return PlainTextResponse(f"{error.detail.lower()}{hint}\n", error.status_code, headers=error.headers)


def _verdict(problems: list[Problem]) -> Response:
    if problems:
        return PlainTextResponse("".join(f"{problem}\n" for problem in problems), 503)
    return PlainTextResponse("ok\n")
