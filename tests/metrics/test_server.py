"""The server runs an ASGI application, rejects invalid requests, is not blocked by clients."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from mqproc.roles.monitor import AsgiServer
from tests.support.group import wait_until


async def application(scope: Any, receive: Any, send: Any) -> None:
    body = bytes(8 << 20) if scope["path"] == "/big" else f"page {scope['path']}".encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
def server() -> Iterator[AsgiServer]:
    server = AsgiServer(application, "127.0.0.1", 0, deadline_s=60, connections_max=3)
    yield server
    server.close()


@pytest.fixture
def impatient() -> Iterator[AsgiServer]:
    server = AsgiServer(application, "127.0.0.1", 0, deadline_s=1.0, connections_max=3)
    yield server
    server.close()


def ask(server: AsgiServer, request: bytes, polls: int = 400) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(request)
        sock.settimeout(0.01)
        answer = b""
        for _ in range(polls):
            server.poll(0.005)
            try:
                data = sock.recv(1 << 20)
            except TimeoutError:
                continue
            if not data:
                break
            answer += data
    return answer


def test_server_sends_page_and_closes_connection(server: AsgiServer) -> None:
    answer = ask(server, b"GET /metrics?x=1 HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"connection: close" in answer
    assert b"page /metrics" in answer
    assert server.connections == 0


def test_server_page_above_socket_buffer_arrives_whole(server: AsgiServer) -> None:
    answer = ask(server, b"GET /big HTTP/1.0\r\nHost: x\r\n\r\n", 10_000)
    assert len(answer.partition(b"\r\n\r\n")[2]) == 8 << 20


@pytest.mark.parametrize("request_", [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\nx: " + b"y" * 40_000])
def test_server_invalid_request_is_refused(server: AsgiServer, request_: bytes) -> None:
    assert ask(server, request_).split(b" ")[1] == b"400"


def test_server_silent_client_is_closed_and_blocks_no_other(impatient: AsgiServer) -> None:
    server = impatient
    with (
        socket.create_connection(("127.0.0.1", server.port)) as silent,
        socket.create_connection(("127.0.0.1", server.port)) as slow,
    ):
        slow.sendall(b"GET / HT")
        assert b"page /" in ask(server, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")

        def let_go() -> bool:
            server.poll(0.01)
            return not server.connections

        wait_until(let_go, what="the end of both")
        for client in (silent, slow):
            client.settimeout(60)
            assert client.recv(1) == b""


def test_server_client_that_reads_nothing_is_closed(impatient: AsgiServer) -> None:
    with socket.socket() as stopped:
        stopped.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stopped.connect(("127.0.0.1", impatient.port))
        stopped.sendall(b"GET /big HTTP/1.1\r\nHost: x\r\n\r\n")

        def let_go() -> bool:
            return not impatient.poll(0.01) and not impatient.connections

        wait_until(lambda: impatient.poll(0.01), what="the request")
        wait_until(let_go, what="the end of the client that does not read")


def test_server_client_that_reads_slowly_is_closed(impatient: AsgiServer) -> None:
    """The kernel keeps such a connection: its client takes some bytes now and then."""
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", impatient.port))
        slow.sendall(b"GET /big HTTP/1.1\r\nHost: x\r\n\r\n")
        wait_until(lambda: impatient.poll(0.01), what="the request")

        def is_dropped() -> bool:
            impatient.poll(0.05)
            with contextlib.suppress(ConnectionResetError):
                slow.recv(1 << 16)
            return not impatient.connections

        # Reading everything would take it twice as long.
        wait_until(is_dropped, 20, "the end of the client that reads slowly")


def test_server_new_client_takes_the_place_of_the_longest_waiting(server: AsgiServer) -> None:
    with contextlib.ExitStack() as stack:
        silent = []
        for _ in range(3):
            silent.append(stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60)))
            wait_until(lambda: server.poll(0.01) or server.connections == len(silent), what="the connection")
        new = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        server.poll(0.05)
        assert server.connections == 3
        assert silent[0].recv(1) == b""
        new.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        wait_until(lambda: server.poll(0.01), what="the answer")
        assert b" 200 " in new.recv(100)


def test_server_connections_are_bounded(server: AsgiServer) -> None:
    clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(6)]
    server.poll(0.05)
    assert server.connections == 3
    for client in clients:
        client.close()


def test_server_watched_descriptor_ends_wait(server: AsgiServer) -> None:
    bell = os.eventfd(1)
    server.watch(bell)
    assert server.poll(30) == 0
    os.close(bell)


def test_server_port_in_use_raises(server: AsgiServer) -> None:
    with pytest.raises(OSError, match="in use"):
        AsgiServer(application, "127.0.0.1", server.port)
