"""A small HTTP server for a role's own loop: non-blocking, one thread, GET and HEAD, one answer a connection.

A slow or silent client costs a descriptor for `deadline_s` at most; beyond `connections_max` new ones are closed at
once. Nothing here waits but `poll`.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable
from http import HTTPStatus

from mqproc.metrics.pages import TEXT, Page

CONNECTIONS_MAX = 64
DEADLINE_S = 10.0
REQUEST_BYTES_MAX = 8192
_BACKLOG = 64
_ACCEPTS_PER_POLL = 16


class _Connection:
    """One client: what it has said, then what it still has to be told."""

    __slots__ = ("deadline", "received", "remaining", "sock")

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self.sock = sock
        self.deadline = deadline
        self.received = b""
        self.remaining = memoryview(b"")


class HttpServer:
    """Answers GET requests with `page(path)`. A step at a time, by `poll`."""

    def __init__(self, host: str, port: int, page: Callable[[str], Page], *, deadline_s: float = DEADLINE_S) -> None:
        """Raises OSError when the port cannot be had."""
        self._page = page
        self._deadline_s = deadline_s
        self._connections: dict[int, _Connection] = {}
        self._listener = socket.create_server((host, port), backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._epoll = select.epoll()
        self._epoll.register(self._listener.fileno(), select.EPOLLIN)
        self._watched: set[int] = set()

    def watch(self, fd: int) -> None:
        """Let `poll` return when this descriptor becomes readable too; its owner drains it."""
        self._watched.add(fd)
        self._epoll.register(fd, select.EPOLLIN)

    @property
    def connections(self) -> int:
        return len(self._connections)

    def poll(self, timeout_s: float) -> int:
        """Wait up to `timeout_s` for something to do and do it; returns the number of requests answered."""
        answered = 0
        for fd, _ in self._epoll.poll(timeout_s):
            if fd == self._listener.fileno():
                self._accept()
            elif connection := self._connections.get(fd):
                answered += self._serve(fd, connection)
        self._drop_late()
        return answered

    def close(self) -> None:
        """Let all clients go and free the port."""
        for fd in list(self._connections):
            self._drop(fd)
        self._epoll.close()
        self._listener.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_POLL):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            if len(self._connections) >= CONNECTIONS_MAX:
                sock.close()
                continue
            sock.setblocking(False)
            self._connections[sock.fileno()] = _Connection(sock, time.monotonic() + self._deadline_s)
            self._epoll.register(sock.fileno(), select.EPOLLIN)

    def _serve(self, fd: int, connection: _Connection) -> int:
        try:
            if connection.remaining:
                self._send(fd, connection)
                return 0
            return self._receive(fd, connection)
        except BlockingIOError:
            return 0
        except OSError:
            self._drop(fd)
            return 0

    def _receive(self, fd: int, connection: _Connection) -> int:
        data = connection.sock.recv(REQUEST_BYTES_MAX)
        connection.received += data
        if not data:
            self._drop(fd)
            return 0
        whole = b"\r\n\r\n" in connection.received
        if not whole and len(connection.received) <= REQUEST_BYTES_MAX:
            return 0
        connection.remaining = memoryview(self._answer(connection.received if whole else b""))
        self._epoll.modify(fd, select.EPOLLOUT)
        self._send(fd, connection)
        return 1

    def _send(self, fd: int, connection: _Connection) -> None:
        count = connection.sock.send(connection.remaining)
        connection.remaining = connection.remaining[count:]
        if not connection.remaining:
            # Told the peer that all is said; closing with unread bytes would reset the connection.
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_WR)
            self._drop(fd)

    def _answer(self, request: bytes) -> bytes:
        line = request.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(line) != 3 or not line[2].startswith("HTTP/1."):
            return _encode(Page(400, TEXT, b"bad request\n"))
        method, target, _ = line
        if method not in ("GET", "HEAD"):
            return _encode(Page(405, TEXT, b"only GET and HEAD\n"))
        return _encode(self._page(target.partition("?")[0]), head_only=method == "HEAD")

    def _drop_late(self) -> None:
        now = time.monotonic()
        for fd in [fd for fd, connection in self._connections.items() if connection.deadline <= now]:
            self._drop(fd)

    def _drop(self, fd: int) -> None:
        connection = self._connections.pop(fd)
        self._epoll.unregister(fd)
        connection.sock.close()


def _encode(page: Page, *, head_only: bool = False) -> bytes:
    head = (
        f"HTTP/1.1 {page.status} {HTTPStatus(page.status).phrase}\r\n"
        f"Content-Type: {page.content_type}\r\nContent-Length: {len(page.body)}\r\n"
        "Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n"
    ).encode("latin-1")
    return head if head_only else head + page.body
