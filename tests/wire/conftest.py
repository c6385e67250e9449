"""A socket server and a peer."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mqproc.errors import MqprocError
from mqproc.layout.frame import ANSWER
from mqproc.wire.address import listen
from mqproc.wire.connection import Request
from mqproc.wire.frames import Frame, FrameReader, decode_refusal, encode_frame
from mqproc.wire.operations import Empty, Operation
from mqproc.wire.server import CHECK_EVERY_S, ServerLimits, SocketServer

APPEND = int(Operation.APPEND)
LIMITS = ServerLimits(connections=8, frame_bytes=1 << 20, output_bytes=1 << 20, frame_read_s=60.0, output_grace_s=60.0)
IMPATIENT = dataclasses.replace(LIMITS, frame_read_s=0.15, output_grace_s=0.15)
"""Of a server whose clients are to be too slow."""

Server = Callable[..., SocketServer]


class HandClock:
    """Replaces the module `time` for the server's client timeouts."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def advance(self, server: SocketServer, seconds: float) -> None:
        """Advance the clock; the server checks its clients at its usual interval."""
        for _ in range(round(seconds / CHECK_EVERY_S)):
            self.now_s += CHECK_EVERY_S
            assert server.poll(0) == []


class Peer:
    """A client's end of a connection: writes bytes, steps the server, reads its answers."""

    def __init__(self, server: SocketServer) -> None:
        self.server = server
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(server._acceptor._listener.getsockname().removesuffix(".tmp"))
        self.sock.setblocking(False)
        self.reader = FrameReader(1 << 30)
        self.frames: list[Frame] = []
        self.ended = False
        server.poll(0)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, data: bytes) -> list[Request]:
        """Write all of `data` while the server reads; return the requests that it parsed."""
        requests = []
        view = memoryview(data)
        while view:
            try:
                view = view[self.sock.send(view) :]
            except BlockingIOError:
                requests += self.server.poll(0)
        return requests + self.server.poll(0)

    def read(self) -> None:
        """Read all available data."""
        while not self.ended:
            try:
                data = self.sock.recv(1 << 20)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            self.ended = not data
            self.reader.feed(data)
        while (frame := self.reader.next_frame()) is not None:
            options, payload = (memoryview(bytes(part)) for part in (frame.options, frame.payload))
            self.frames.append(Frame(frame.operation, frame.request_id, options, payload))

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, "nothing happened in time"
            self.server.poll(0.01)
            self.read()

    def refusal(self) -> MqprocError:
        """The single expected refusal; the connection must end after it."""
        self.wait_for(lambda: self.ended)
        (frame,) = self.frames
        return decode_refusal(frame.options)


def request(payload: bytes = b"", request_id: int = 1, operation: int = APPEND) -> bytes:
    return b"".join(encode_frame(operation, request_id, b"\x90", [payload]))


def check_echo(peer: Peer, payload: bytes = b"hello", request_id: int = 77) -> None:
    """A valid frame is answered."""
    (found,) = peer.send(request(payload, request_id))
    assert bytes(found.payload) == payload
    found.answer(Empty(), [found.payload])
    peer.wait_for(lambda: bool(peer.frames))
    frame = peer.frames.pop()
    assert (frame.operation, frame.request_id, bytes(frame.payload)) == (APPEND | ANSWER, request_id, payload)


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
    """The server's clock for client timeouts, advanced only by the test."""
    made = HandClock()
    monkeypatch.setattr("mqproc.wire.server.time", made)
    return made
