"""Answers to append frames: they wait until what they tell of is published, and leave a client's together.

Frames that were taken one by one have their answers' columns here; those of a run were written by the kernel, whole
frames one behind the other, and are sent from there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from mqproc.errors import MqprocError
from mqproc.store.known_shapes import KnownShapes
from mqproc.wire.connection import Connection, FrameRun, Request
from mqproc.wire.operations import AppendAnswer
from mqproc.wire.server import SocketServer

_encode = msgspec.msgpack.Encoder().encode
# A time as long as any: where it stands in an answer's options the kernel writes the time of each.
_ANY_TIME_MS: Final = 0x0123456789ABCDEF


class _Frame(msgspec.Struct, eq=False):
    """A frame that is encoded: uint8[20 × messages]."""

    request: Request
    answer: NDArray[np.uint8]
    store_timestamp_ms: int
    wait: bool
    oneway: bool


class _Run(msgspec.Struct, eq=False):
    """Frames that are encoded, and whose answers lie in [at, end) of those that the kernel has written."""

    connection: Connection
    at: int
    end: int
    wait: bool = True


class AppendAnswers:
    """What one writer has still to answer. `on_refusal` is called for each frame that is refused in the end."""

    def __init__(
        self, server: SocketServer, known: KnownShapes, store_host: bytes, on_refusal: Callable[[], None]
    ) -> None:
        self._server = server
        self._known = known
        self._store_host = store_host
        self._on_refusal = on_refusal
        self._encoded = b""
        self._encoded_of_ms = -1
        options = self._options(_ANY_TIME_MS)
        known.answer_with(options, options.index(_ANY_TIME_MS.to_bytes(8, "big")))
        self._pending: list[_Frame | _Run] = []
        self._sendable: list[_Run] = []

    def __len__(self) -> int:
        """Frames, or runs of them, whose messages are not published."""
        return len(self._pending)

    def _options(self, store_timestamp_ms: int) -> bytes:
        """An answer's options."""
        if store_timestamp_ms != self._encoded_of_ms:
            self._encoded_of_ms = store_timestamp_ms
            self._encoded = _encode(AppendAnswer(store_timestamp_ms, self._store_host))
        return self._encoded

    def add(
        self, request: Request, answer: NDArray[np.uint8], store_timestamp_ms: int, *, wait: bool, oneway: bool
    ) -> None:
        """A frame is encoded; without `wait` it is answered before a sync."""
        self._pending.append(_Frame(request, answer, store_timestamp_ms, wait, oneway))

    def add_run(self, run: FrameRun, at: int) -> None:
        """Frames of a run are encoded; their answers were written from `at` on."""
        end = self._known.answers_end
        if end > at:
            self._pending.append(_Run(run.connection, at, end))

    def give_unwaited(self) -> None:
        """Answer what need not wait for the sync that comes now."""
        pending = self._pending
        self._pending = [one for one in pending if not one.wait]
        if self._pending:
            self.give()
            self._server.send_answers(hold=True)
        self._pending = [one for one in pending if one.wait]

    def give(self) -> None:
        """Everything is published: answer it. What the kernel has written leaves with `send`."""
        for one in self._pending:
            if isinstance(one, _Run):
                self._sendable.append(one)
            elif not one.oneway:
                one.request.answer(self._options(one.store_timestamp_ms), (one.answer.data,), owned=True)
        self._pending = []

    def send(self) -> None:
        """Send what the kernel has written of given answers, together what a client gets in a row."""
        sendable = self._sendable
        if sendable:
            self._sendable = []
            first = sendable[0]
            connection, at, end = first.connection, first.at, first.end
            for run in sendable[1:]:
                if run.connection is not connection or run.at != end:
                    self._send(connection, at, end)
                    connection, at = run.connection, run.at
                end = run.end
            self._send(connection, at, end)
        if not self._pending:
            self._known.forget_answers()

    def send_alone(self, connection: Connection) -> None:
        """Everything is published, and all that is to be sent are the kernel's answers to a client's run."""
        end = self._known.answers_end
        if end:
            self._server.send_one(connection, self._known.views[:end])
            self._known.forget_answers()

    def _send(self, connection: Connection, at: int, end: int) -> None:
        if not connection.closed:
            self._server.send(connection, (self._known.views[at:end],), owned=False)

    def refuse(self, error: MqprocError) -> None:
        """Nothing that waits was published, nor will be."""
        for one in self._pending:
            if isinstance(one, _Run):
                for operation, request_id in self._known.answered(one.at, one.end):
                    self._on_refusal()
                    one.connection.refuse(request_id, operation, error)
            elif not one.oneway:
                self._on_refusal()
                one.request.refuse(error)
        self._pending = []
