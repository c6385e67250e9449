"""The monitor's pages as an ASGI application.

    /           the status page: live, for people        /metrics    for Prometheus
    /events     what it shows, once a second             /healthz    alive?    /readyz    serving in full?
                with ?name=… only topics and groups that have this in their names

Alive is not ready: a group that recovers is alive. Both answer 503 when they are not, with the reasons as text.
"""

from __future__ import annotations

import asyncio
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

from mqproc.metrics.collector import GroupState, MetricsCollector
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

    def __init__(self, collector: MetricsCollector, paths: StorePaths, version: str) -> None:
        self._collector = collector
        self._paths = paths
        self._version = version
        self._taken = 0.0
        self._picture: GroupState | None = None
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


class MetricsEndpoint:
    """/metrics as an ASGI application. It imports prometheus_client at the first scrape: starts stay short."""

    def __init__(self, collector: MetricsCollector) -> None:
        self._collector = collector
        self._app: Callable[..., Any] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None:
            from mqproc.metrics.exposition import make_metrics_app

            self._app = make_metrics_app(self._collector.samples)
        await self._app(scope, receive, send)


def make_app(collector: MetricsCollector, paths: StorePaths, version: str) -> Starlette:
    """The application over one running group."""
    feed = StatusFeed(collector, paths, version)
    timeout_ns = collector.options.heartbeat_timeout_ms * 1_000_000

    async def healthz(_request: Request) -> Response:
        return _verdict(alive_problems(collector.control))

    async def readyz(_request: Request) -> Response:
        return _verdict(ready_problems(collector.control, timeout_ns))

    async def events(request: Request) -> Response:
        if feed.streams >= STREAMS_MAX:
            return PlainTextResponse(f"{STREAMS_MAX} look already\n", 503)
        return EventStream(feed, request.query_params.get("name", ""))

    routes = [
        Route("/metrics", MetricsEndpoint(collector), methods=["GET"]),
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
