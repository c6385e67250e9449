"""Answers to appends, held back until publication and sent together per client.

Answers to frames that were handled one by one are kept here as columns. Answers to a run of frames are written by the
kernel as consecutive whole frames and are sent from its buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from mqproc.errors import MqprocError
from mqproc.store.commitlog.append_templates import AppendTemplates
from mqproc.wire.connection import FrameBatch, Request, ServerConnection
from mqproc.wire.operations.log import AppendAnswer
from mqproc.wire.server import SocketServer

_encode = msgspec.msgpack.Encoder().encode
# A placeholder as long as any timestamp: the kernel writes the store time of each answer in its place.
_ANY_TIME_MS: Final = 0x0123456789ABCDEF


class _Frame(msgspec.Struct, eq=False):
    """An encoded frame; `answer` is uint8[20 × messages]."""

    request: Request
    answer: NDArray[np.uint8]
    store_timestamp_ms: int
    wait: bool
    oneway: bool


class _Run(msgspec.Struct, eq=False):
    """Encoded frames whose answers lie in [at, end) of the kernel's buffer."""

    connection: ServerConnection
    at: int
    end: int
    wait: bool = True


class AppendAnswers:
    """Pending answers. `on_refusal` is called for each encoded frame that is refused."""

    def __init__(
        self, server: SocketServer, known: AppendTemplates, store_host: bytes, on_refusal: Callable[[], None]
    ) -> None:
        self._server = server
        self._templates = known
        self._store_host = store_host
        self._on_refusal = on_refusal
        self._encoded = b""
        self._encoded_of_ms = -1
        options = self._options(_ANY_TIME_MS)
        known.set_answer_options(options, options.index(_ANY_TIME_MS.to_bytes(8, "big")))
        self._pending: list[_Frame | _Run] = []
        self._sendable: list[_Run] = []

    def __len__(self) -> int:
        """Number of frames, or runs of them, whose messages are not published."""
        return len(self._pending)

    def _options(self, store_timestamp_ms: int) -> bytes:
        """Encoded options of an answer."""
        if store_timestamp_ms != self._encoded_of_ms:
            self._encoded_of_ms = store_timestamp_ms
            self._encoded = _encode(AppendAnswer(store_timestamp_ms, self._store_host))
        return self._encoded

    def add(
        self, request: Request, answer: NDArray[np.uint8], store_timestamp_ms: int, *, wait: bool, oneway: bool
    ) -> None:
        """Add an encoded frame; without `wait` it is answered before the sync."""
        self._pending.append(_Frame(request, answer, store_timestamp_ms, wait, oneway))

    def add_run(self, run: FrameBatch, at: int) -> None:
        """Add encoded frames of a run, whose answers begin at `at`."""
        end = self._templates.answers_end
        if end > at:
            self._pending.append(_Run(run.connection, at, end))

    def answer_without_sync(self) -> None:
        """Answer frames that do not wait for the next sync."""
        pending = self._pending
        self._pending = [one for one in pending if not one.wait]
        if self._pending:
            self.answer_published()
            self._server.send_answers(hold=True)
        self._pending = [one for one in pending if one.wait]

    def answer_published(self) -> None:
        """Answer every pending frame, now published; kernel answers leave with `send`."""
        for one in self._pending:
            if isinstance(one, _Run):
                self._sendable.append(one)
            elif not one.oneway:
                one.request.answer(self._options(one.store_timestamp_ms), (one.answer.data,), owned=True)
        self._pending = []

    def send(self) -> None:
        """Send the kernel's answers, consecutive ones of a client in one piece."""
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
            self._templates.clear_answers()

    def send_single(self, connection: ServerConnection) -> None:
        """Send the kernel's answers to the only run of a step, now published."""
        end = self._templates.answers_end
        if end:
            self._server.send_one(connection, self._templates.views[:end])
            self._templates.clear_answers()

    def _send(self, connection: ServerConnection, at: int, end: int) -> None:
        if not connection.closed:
            self._server.send(connection, (self._templates.views[at:end],), owned=False)

    def refuse(self, error: MqprocError) -> None:
        """Refuse every pending frame: it was not published and never will be."""
        for one in self._pending:
            if isinstance(one, _Run):
                for operation, request_id in self._templates.answers_between(one.at, one.end):
                    self._on_refusal()
                    one.connection.refuse(request_id, operation, error)
            elif not one.oneway:
                self._on_refusal()
                one.request.refuse(error)
        self._pending = []
