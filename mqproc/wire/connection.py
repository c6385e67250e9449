"""One client of a role's socket, and a request of its: what a role keeps to answer later."""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from mqproc.errors import MqprocError
from mqproc.kernels.frames import leading_run
from mqproc.layout.frame import ANSWER, HEADER, HEADER_SIZE
from mqproc.wire.codec import Options
from mqproc.wire.frames import (
    NO_OPTIONS,
    FrameReader,
    OutputQueue,
    decode_request,
    encode_frame,
    encode_options,
    encode_refusal,
)

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from mqproc.wire.server import SocketServer


class Request(msgspec.Struct, eq=False):
    """One frame from a client. The views are valid until the next `poll`; the rest may be kept."""

    connection: Connection
    operation: int
    request_id: int
    options: memoryview
    payload: memoryview

    def decode(self) -> Options:
        """The options as the type that `operations.REQUESTS` names. Raises BadRequestError."""
        return decode_request(self.operation, self.options)

    def answer(
        self, options: Options | bytes = NO_OPTIONS, payload: Sequence[ReadableBuffer] = (), *, owned: bool = False
    ) -> None:
        """Answer this request; see `Connection.answer`."""
        self.connection.answer(self.request_id, self.operation, options, payload, owned=owned)

    def refuse(self, error: MqprocError) -> None:
        """Refuse this request; the connection goes on."""
        self.connection.refuse(self.request_id, self.operation, error)


class FrameRun(msgspec.Struct, eq=False):
    """Whole frames of one operation, one behind the other in [at, end) of `buffer` uint8; valid until the next poll."""

    connection: Connection
    buffer: NDArray[np.uint8]
    at: int
    end: int
    frames: int

    def request_at(self, at: int) -> tuple[Request, int]:
        """The frame that begins at `at` as a request, and where the next one begins."""
        view = self.buffer.data
        _, _, operation, request_id, options_size, _, payload_size = HEADER.unpack_from(view, at)
        options = at + HEADER_SIZE
        payload = options + options_size
        end = payload + payload_size
        return Request(self.connection, operation, request_id, view[options:payload], view[payload:end]), end


class Connection:
    """One client. A role keeps it to answer later; answers to a closed one are dropped."""

    __slots__ = (
        "_server",
        "beginning",
        "closed",
        "fd",
        "mask",
        "output",
        "paused",
        "read_by",
        "reader",
        "sock",
        "write_by",
    )

    def __init__(self, server: SocketServer, sock: socket.socket) -> None:
        self._server = server
        self.sock = sock
        self.fd = sock.fileno()
        self.beginning = b""  # of a frame, while it is short
        self.reader: FrameReader | None = None  # holds a longer part of a frame, or frames that must wait
        self.output = OutputQueue()
        self.mask = select.EPOLLIN
        self.paused = False
        self.closed = False
        self.read_by = 0.0  # monotonic seconds by which the frame that has begun must be whole; 0 = none has
        self.write_by = 0.0  # by which a paused client must have read something; 0 = it is not paused

    def answer(
        self,
        request_id: int,
        operation: int,
        options: Options | bytes = NO_OPTIONS,
        payload: Sequence[ReadableBuffer] = (),
        *,
        owned: bool = False,
    ) -> None:
        """Send an answer, or queue what the socket does not take.

        What is queued is copied unless `owned` says that the payload's bytes will not change until they are sent.
        """
        if not self.closed:
            encoded = options if type(options) is bytes else encode_options(options)
            self._server.send(self, encode_frame(operation | ANSWER, request_id, encoded, payload), owned=owned)

    def refuse(self, request_id: int, operation: int, error: MqprocError) -> None:
        """Send a refusal; the connection goes on."""
        if not self.closed:
            self._server.count_reject(error.code)
            self._server.send(self, [encode_refusal(operation, request_id, error)])

    def close(self) -> None:
        """Let the client go."""
        self._server.drop(self)


# --- frame_batches ---
# Frames of one operation that come one behind the other: handed over as a run, with no step of Python's for each.
#
# For a role whose kernel reads frames itself. What is no whole frame of that operation is cut as ever.


class RunCutter:
    """Finds runs of frames of `operation`."""

    def __init__(self, operation: int, frame_bytes_max: int) -> None:
        self._operation = int(operation)  # an enum member would be another type to a kernel
        self._frame_bytes_max = frame_bytes_max
        self._limit = np.zeros(1, np.int64)
        self._left = self._limit.data

    def cut(self, connection: Connection, buffer: NDArray[np.uint8], at: int, end: int, limit: int) -> FrameRun | None:
        """The run of at most `limit` frames at `at` of `buffer`, which is filled up to `end`; None without one."""
        self._left[0] = limit
        stop = leading_run(buffer, at, end, self._operation, self._frame_bytes_max, self._limit)
        if stop == at:
            return None
        return FrameRun(connection, buffer, at, stop, limit - self._left[0])
