"""A socket server on a socket of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mqproc.wire.address import listen
from mqproc.wire.server import ServerLimits, SocketServer
from tests.wire.peer import LIMITS, HandClock, Server


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Server]:
    servers = []
    listener = listen(tmp_path / "mqproc" / "x.sock")

    def start(limits: ServerLimits = LIMITS, **options: object) -> SocketServer:
        servers.append(SocketServer(listener, limits, **options))  # type: ignore[arg-type]
        return servers[-1]

    yield start
    for server in servers:
        server.close()
    listener.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    """The time that passes for clients of servers: however long the machine stands still, as much as a test says."""
    made = HandClock()
    monkeypatch.setattr("mqproc.wire.server.time", made)
    return made
