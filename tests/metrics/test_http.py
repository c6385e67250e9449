"""The HTTP server answers, refuses what it must, and is not held up by a client that says nothing."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from mqproc.metrics import http
from mqproc.metrics.http import HttpServer
from mqproc.metrics.pages import TEXT, Page


def page(path: str) -> Page:
    return Page(200, TEXT, f"page {path}".encode()) if path != "/big" else Page(200, TEXT, bytes(8 << 20))


@pytest.fixture
def server() -> Iterator[HttpServer]:
    server = HttpServer("127.0.0.1", 0, page, deadline_s=0.2)
    yield server
    server.close()


def ask(server: HttpServer, request: bytes, polls: int = 200) -> bytes:
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


def test_a_page_is_answered_whole(server: HttpServer) -> None:
    answer = ask(server, b"GET /metrics?x=1 HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"\r\n\r\npage /metrics")
    assert server.connections == 0


def test_a_page_larger_than_the_socket_takes_arrives_whole(server: HttpServer) -> None:
    assert len(ask(server, b"GET /big HTTP/1.1\r\n\r\n", 10_000).partition(b"\r\n\r\n")[2]) == 8 << 20


def test_head_has_no_body(server: HttpServer) -> None:
    answer = ask(server, b"HEAD / HTTP/1.0\r\n\r\n")
    assert answer.endswith(b"\r\n\r\n")
    assert b"Content-Length: 6\r\n" in answer


@pytest.mark.parametrize(
    ("request_", "status"),
    [(b"POST / HTTP/1.1\r\n\r\n", b"405"), (b"nonsense\r\n\r\n", b"400"), (b"x" * 9000, b"400")],
)
def test_what_is_no_get_is_refused(server: HttpServer, request_: bytes, status: bytes) -> None:
    assert ask(server, request_).split(b" ")[1] == status


def test_a_silent_client_is_let_go_and_does_not_hold_up_others(server: HttpServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as silent:
        assert ask(server, b"GET / HTTP/1.1\r\n\r\n").endswith(b"page /")
        for _ in range(100):
            if not server.connections:
                break
            server.poll(0.01)
        assert server.connections == 0
        silent.settimeout(1)
        assert silent.recv(1) == b""


def test_connections_are_bounded(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "CONNECTIONS_MAX", 2)
    clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(4)]
    server.poll(0.05)
    assert server.connections == 2
    for client in clients:
        client.close()
