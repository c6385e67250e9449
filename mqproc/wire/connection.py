"""A server's view of one client: connection, requests, batches of frames."""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from mqproc.errors import MqprocError
from mqproc.kernels.append_run import leading_run
from mqproc.layout.frame import ANSWER, HEADER, HEADER_SIZE
from mqproc.wire.frames import (
    NO_OPTIONS,
    FrameReader,
    OutputQueue,
    decode_request,
    encode_frame,
    encode_options,
    encode_refusal,
)
from mqproc.wire.operations import FrameOptions

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class AnswerSink(Protocol):
    """The server that a connection belongs to."""

    def send(self, connection: ServerConnection, pieces: Sequence[ReadableBuffer], *, owned: bool = True) -> None: ...

    def count_reject(self, code: str) -> None: ...

    def drop(self, connection: ServerConnection) -> None: ...


class Request(msgspec.Struct, eq=False):
    """One request frame. The views are valid until the next `poll`; other fields may be kept."""

    connection: ServerConnection
    operation: int
    request_id: int
    options: memoryview
    payload: memoryview

    def decode(self) -> FrameOptions:
        """Decode the options to the type in `operations.REQUESTS`. Raises BadRequestError."""
        return decode_request(self.operation, self.options)

    def answer(
        self, options: FrameOptions | bytes = NO_OPTIONS, payload: Sequence[ReadableBuffer] = (), *, owned: bool = False
    ) -> None:
        """Answer this request; see `ServerConnection.answer`."""
        self.connection.answer(self.request_id, self.operation, options, payload, owned=owned)

    def refuse(self, error: MqprocError) -> None:
        """Refuse this request; the connection stays open."""
        self.connection.refuse(self.request_id, self.operation, error)


class FrameBatch(msgspec.Struct, eq=False):
    """Consecutive whole frames of one operation in [at, end) of `buffer`, uint8.

    Valid until the next poll.
    """

    connection: ServerConnection
    buffer: NDArray[np.uint8]
    at: int
    end: int
    frames: int

    def request_at(self, at: int) -> tuple[Request, int]:
        """The frame at `at` as a request, and the offset of the next frame."""
        view = self.buffer.data
        _, _, operation, request_id, options_size, _, payload_size = HEADER.unpack_from(view, at)
        options = at + HEADER_SIZE
        payload = options + options_size
        end = payload + payload_size
        return Request(self.connection, operation, request_id, view[options:payload], view[payload:end]), end


@dataclass(slots=True, eq=False)
class ServerConnection:
    """One client of a server. Answers to a closed connection are dropped."""

    _server: AnswerSink
    sock: socket.socket
    fd: int = field(init=False)
    beginning: bytes = b""  # a short partial frame
    reader: FrameReader | None = None  # holds a longer partial frame, or frames that must wait
    output: OutputQueue = field(default_factory=OutputQueue)
    mask: int = select.EPOLLIN
    paused: bool = False
    closed: bool = False
    read_by: float = 0.0  # deadline of a partial frame in monotonic seconds; 0 = none
    write_by: float = 0.0  # deadline of a paused client to read something; 0 = not paused

    def __post_init__(self) -> None:
        self.fd = self.sock.fileno()

    def answer(
        self,
        request_id: int,
        operation: int,
        options: FrameOptions | bytes = NO_OPTIONS,
        payload: Sequence[ReadableBuffer] = (),
        *,
        owned: bool = False,
    ) -> None:
        """Send an answer, or queue the part that the socket does not take.

        Queued parts are copied unless `owned` says that the payload's bytes do not change until they are sent.
        """
        if not self.closed:
            encoded = options if type(options) is bytes else encode_options(options)
            self._server.send(self, encode_frame(operation | ANSWER, request_id, encoded, payload), owned=owned)

    def refuse(self, request_id: int, operation: int, error: MqprocError) -> None:
        """Send a refusal; the connection stays open."""
        if not self.closed:
            self._server.count_reject(error.code)
            self._server.send(self, [encode_refusal(operation, request_id, error)])

    def close(self) -> None:
        """Close the connection."""
        self._server.drop(self)


class FrameBatcher:
    """Finds batches: consecutive frames of one operation.

    A kernel reads a batch without a Python step per frame. Other frames are cut one by one.
    """

    def __init__(self, operation: int, frame_bytes_max: int) -> None:
        self._operation = int(operation)  # An enum member would be another type to a kernel.
        self._frame_bytes_max = frame_bytes_max
        self._limit = np.zeros(1, np.int64)
        self._left = self._limit.data

    def cut(
        self, connection: ServerConnection, buffer: NDArray[np.uint8], at: int, end: int, limit: int
    ) -> FrameBatch | None:
        """Return a batch of at most `limit` frames in [at, end) of `buffer`; None without one."""
        self._left[0] = limit
        stop = leading_run(buffer, at, end, self._operation, self._frame_bytes_max, self._limit)
        if stop == at:
            return None
        return FrameBatch(connection, buffer, at, stop, limit - self._left[0])
