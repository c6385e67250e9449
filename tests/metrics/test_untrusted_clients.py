"""The monitor of a group refuses foreign host names, and serves others beside slow clients."""

from __future__ import annotations

import contextlib
import http.client
import socket
import time
from collections.abc import Callable, Iterator

from mqproc.roles.monitor import CONNECTIONS_MAX, DEADLINE_S
from tests.support.group import PATIENCE_S, Group, assert_below, wait_until

PATHS = ("/", "/events", "/metrics", "/healthz", "/readyz", "/other")
SLOW_CLIENTS = 100
ANSWER_S = 1.0
PARTS_OF_REQUESTS = (b"", b"GET / HT", b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n")


def port_of(group: Group) -> int:
    return int(wait_until(lambda: group.words()["monitor_port"], what="the monitor listens"))


def status(group: Group, host: str, path: str = "/healthz") -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port_of(group), timeout=PATIENCE_S)
    with contextlib.closing(connection):
        connection.putrequest("GET", path, skip_host=True)
        connection.putheader("Host", host)
        connection.endheaders()
        return connection.getresponse().status


def test_foreign_host_names_are_refused_for_every_path(group: Group) -> None:
    own = f"127.0.0.1:{port_of(group)}"
    foreign = ("evil.example", f"evil.example:{port_of(group)}", "127.0.0.1.evil.example", "localhost.evil.example")
    foreign += ("192.0.2.1", "127.0.0.2", "[::1]", "0.0.0.0", "", ":80", "[", f"{own}@evil.example", "EVIL.localhost.")
    for host in foreign:
        assert {path: status(group, host, path) for path in PATHS} == dict.fromkeys(PATHS, 421), host


def test_own_host_names_are_served(group: Group) -> None:
    for host in ("127.0.0.1", f"127.0.0.1:{port_of(group)}", "127.0.0.1:80", "localhost", "LocalHost.:80"):
        assert status(group, host) == 200, host


def test_request_without_host_is_served(group: Group) -> None:
    """Load balancers check with HTTP/1.0; a browser always names the host."""
    with socket.create_connection(("127.0.0.1", port_of(group)), timeout=PATIENCE_S) as client:
        client.sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
        assert b" 200 " in client.recv(100)


def test_monitor_on_all_addresses_serves_every_address(make_group: Callable[..., Group]) -> None:
    group = make_group(metrics_host="0.0.0.0")
    for host in ("127.0.0.1", "localhost", socket.gethostname(), "203.0.113.7:5557", "[2001:db8::1]:5557", "0.0.0.0"):
        assert status(group, host) == 200, host
    assert status(group, "evil.example") == 421


def test_allowed_host_names_are_served(make_group: Callable[..., Group]) -> None:
    group = make_group(metrics_allowed_hosts="mq.example, Other.example")
    for host in ("mq.example", "MQ.example:80", "other.example", "127.0.0.1"):
        assert status(group, host) == 200, host
    assert status(group, "evil.mq.example") == 421


def test_all_host_names_are_served_on_request(make_group: Callable[..., Group]) -> None:
    assert status(make_group(metrics_allowed_hosts="*"), "anything.example") == 200


@contextlib.contextmanager
def slow_clients(port: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        clients = []
        for number in range(SLOW_CLIENTS):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S))
            client.sendall(PARTS_OF_REQUESTS[number % len(PARTS_OF_REQUESTS)])
            clients.append(client)
        yield clients


def is_open(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return bool(client.recv(1))
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False


def test_slow_clients_keep_nobody_waiting(group: Group) -> None:
    status(group, "localhost", "/metrics")

    def answered() -> float:
        began = time.monotonic()
        assert status(group, "localhost", "/metrics") == 200
        return time.monotonic() - began

    with slow_clients(port_of(group)) as clients:
        began = time.monotonic()
        for _ in range(5):
            assert_below(ANSWER_S, answered)
        wait_until(lambda: sum(map(is_open, clients)) <= CONNECTIONS_MAX, what="the limit is kept")
        # Bytes that arrive slowly do not prolong the time.
        while any(open_now := [client for client in clients if is_open(client)]):
            assert time.monotonic() - began < DEADLINE_S + PATIENCE_S
            for client in open_now:
                with contextlib.suppress(OSError):
                    client.send(b"x")
            assert_below(ANSWER_S, answered)
    assert time.monotonic() - began >= DEADLINE_S / 2
