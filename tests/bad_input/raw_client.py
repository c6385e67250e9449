"""A client that sends whatever bytes a test likes to a role of a real group."""

from __future__ import annotations

import socket
from pathlib import Path

from mqproc.control import Control
from mqproc.errors import MqprocError
from mqproc.io import StoreIO
from mqproc.ipc.code_counts import read_code_counts
from mqproc.layout.frame import REFUSAL
from mqproc.wire.address import connect_path
from mqproc.wire.operations import Empty, Operation, Options
from mqproc.wire.protocol import Frame, FrameReader, decode_refusal, encode_frame, encode_options
from tests.conftest import Group

ANSWER_S = 60.0
FRAME_BYTES_MAX = 1 << 30


class RawClient:
    """One connection, byte by byte."""

    def __init__(self, path: Path) -> None:
        self.sock = _connected(path)
        self.sock.settimeout(ANSWER_S)
        self._reader = FrameReader(FRAME_BYTES_MAX)
        self._last_id = 0

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, data: bytes) -> None:
        """Put bytes on the wire; a role that has hung up already is no error."""
        try:
            self.sock.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            return

    def request(self, operation: int, options: Options | bytes, payload: bytes = b"") -> None:
        self._last_id += 1
        self.send(b"".join(map(bytes, encode_frame(operation, self._last_id, encode_options(options), (payload,)))))

    def frame(self) -> Frame | None:
        """The next frame; None when the role has closed the connection."""
        while (found := self._reader.next_frame()) is None:
            try:
                data = self.sock.recv(1 << 20)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._reader.feed(data)
        return Frame(found.operation, found.request_id, memoryview(bytes(found.options)), memoryview(b""))

    def refusal(self) -> MqprocError:
        """The next frame, which must be a refusal."""
        frame = self.frame()
        assert frame is not None, "the connection was closed without an answer"
        assert frame.operation & REFUSAL, "the request was answered, not refused"
        return decode_refusal(frame.options)

    def serves(self) -> bool:
        """Whether a ping is answered on this connection; False when it is closed."""
        self.request(Operation.PING, Empty())
        frame = self.frame()
        return frame is not None and not frame.operation & REFUSAL

    def is_closed(self) -> bool:
        """Whether the role hangs up, in reasonable time, without another word."""
        return self.frame() is None


def _connected(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(connect_path(path)))
    sock.settimeout(ANSWER_S)
    return sock


def rejects(group: Group, role: str) -> dict[str, int]:
    """How often the role has refused since the group started, by code."""
    control = Control.open(StoreIO(), group.paths)
    try:
        return read_code_counts(control.words, role)
    finally:
        control.close()
