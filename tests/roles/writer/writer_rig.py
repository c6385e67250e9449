"""A writer on a real socket, stepped by hand, with its clients, faults and results."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from mqproc.client.connection import CallOutcome, Connection, open_socket
from mqproc.client.requests import WRITER, Call
from mqproc.errors import MqprocError
from mqproc.ipc.counters import read_error_counters
from mqproc.layout import control as words_of
from mqproc.layout import histograms
from mqproc.layout import queue_table as table_layout
from mqproc.layout.frame import REFUSAL
from mqproc.roles.writer.role import Writer
from mqproc.store.commitlog.flush import make_segment
from mqproc.store.consumequeue.table import QueueTable
from mqproc.wire.address import listen, remove
from mqproc.wire.codec import FrameOptions
from mqproc.wire.frames import FrameReader, decode_refusal, encode_frame
from mqproc.wire.operations import Operation
from mqproc.wire.operations.log import AppendRequest
from tests.roles.flusher_rig import Rig
from tests.support.faulty_io import FaultyIO

PATIENCE_S = 60.0
BODY_MAX = 50_000
SEGMENTS = 6


class WriterIO(FaultyIO):
    """Fails log writes by `write_errors`: an errno each, 0 for success; half is written.

    Zeroing is not counted as a write.
    """

    def __init__(self) -> None:
        super().__init__()
        self.write_errors: list[int] = []
        self.writes = 0

    def pwrite(self, fd: int, data: Any, offset: int) -> None:
        if "/commitlog/" in self.path_of(fd):
            self.writes += 1
            number = self.write_errors.pop(0) if self.write_errors else 0
            if number:
                view = memoryview(data).cast("B")
                super().pwrite(fd, view[: len(view) // 2], offset)
                raise OSError(number, os.strerror(number))
        super().pwrite(fd, data, offset)

    def zero(self, fd: int, offset: int, size: int) -> None:
        # Not through `pwrite`, whose errors are for other writes.
        errors, self.write_errors = self.write_errors, []
        try:
            super().zero(fd, offset, size)
        finally:
            self.write_errors = errors


@dataclasses.dataclass(frozen=True)
class Left:
    """The results of a writer, which must be equal for two that got the same frames."""

    log: bytes
    """Up to `written`."""
    next_offsets: dict[tuple[str, int], int]
    counts: dict[str, int]


class WriterRig:
    """A store with several segments, and its writer; `runs=False` takes frame by frame."""

    def __init__(self, root: Path, *, runs: bool = True, segments: int = SEGMENTS, **options: object) -> None:
        self.rig = Rig(root, **options)
        self.io = WriterIO()
        self.clock, self.paths, self.options = self.rig.clock, self.rig.paths, self.rig.options
        self.words = self.rig.control.words
        size = self.options.mapped_file_size_commit_log
        self.io.make_folder(self.paths.commit_log)
        for start in range(self.words[words_of.SEGMENTS_READY_END], segments * size, size):
            make_segment(self.io, self.paths, start, size)
            self.words[words_of.SEGMENTS_READY_END] = start + size
        self.io.tried()
        self._runs = runs
        self._clients: list[Client | Connection] = []
        self._killed: list[Writer] = []
        self._listener = listen(self.paths.socket(WRITER))
        self.writer = self._make(1)

    def _make(self, incarnation: int) -> Writer:
        context = self.rig.context(WRITER)
        context = dataclasses.replace(context, io=self.io, sockets={WRITER: self._listener}, incarnation=incarnation)
        writer = Writer(context)
        if not self._runs:
            writer._server._batches = None
        return writer

    def succeed(self) -> None:
        """Kill the writer without notice; another one takes over."""
        self._killed.append(self.writer)
        self.writer = self._make(2)

    def close(self) -> None:
        for client in self._clients:
            client.close()
        for writer in (*self._killed, self.writer):
            writer.close()
        self._listener.close()
        remove(self.paths.socket(WRITER))
        self.rig.control.close()

    def __enter__(self) -> WriterRig:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Steps

    def step(self) -> int:
        return self.writer.do_work()

    def run_until(self, condition: Callable[[], bool]) -> None:
        """Step until a condition holds."""
        end = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end, "nothing happened in time"
            self.step()

    # Clients

    def client(self) -> Client:
        """One that sends bytes."""
        client = Client(self)
        self._clients.append(client)
        return client

    def connect(self) -> Connection:
        """One that sends calls."""
        connection = Connection(open_socket(self.paths.socket(WRITER)))
        self._clients.append(connection)
        return connection

    def outcomes(self, connection: Connection, calls: Iterable[Call[Any]]) -> list[CallOutcome]:
        """Send calls at once, as far as the socket takes them; the answers follow."""
        ids = [
            request_id
            for request_id, oneway in [(connection.submit(call), call.oneway) for call in calls]
            if not oneway
        ]
        end = time.monotonic() + PATIENCE_S
        while not all(request_id in connection.done for request_id in ids):
            assert time.monotonic() < end, "no answer in time"
            connection.flush()
            self.step()
            while connection.receive():
                pass
        return [connection.done.pop(request_id) for request_id in ids]

    # Results

    @property
    def written(self) -> int:
        return self.words[words_of.WRITTEN]

    def log(self, start: int, stop: int) -> bytes:
        """Bytes of the log as its files have them."""
        size, found = self.options.mapped_file_size_commit_log, bytearray()
        while start < stop:
            base = start - start % size
            end = min(stop, base + size)
            found += (self.paths.commit_log / f"{base:020d}").read_bytes()[start - base : end - base]
            start = end
        return bytes(found)

    def next_offsets(self) -> dict[tuple[str, int], int]:
        """The published offsets of each queue."""
        table = QueueTable(self.io, self.paths.queues)
        try:
            column = table.column(table_layout.NEXT_OFFSET).tolist()
            return {(topic, queue_id): column[number] for number, topic, queue_id in table.live()}
        finally:
            table.close()

    def counts(self) -> dict[str, int]:
        """All counters of frames, and the words published with them."""
        names = "written", "table_at", "written_store_timestamp_ms", "appended_frames", "appended_messages"
        found = self.rig.control.snapshot()
        sizes = histograms.MESSAGE_SIZES
        counts = {name: found[name] for name in (*names, "append_rejects")}
        counts |= {f"size {word}": self.words[word] for word in range(sizes.index, sizes.sum_index + 1)}
        return counts | {code: count for code, count in read_error_counters(self.words, WRITER).items() if count}

    def left(self) -> Left:
        return Left(self.log(0, self.written), self.next_offsets(), self.counts())


@dataclasses.dataclass(frozen=True)
class Answer:
    """An answer as it came: its operation with ANSWER and REFUSAL, its options, its payload."""

    operation: int
    options: bytes
    payload: bytes


class Client:
    """A client's end, byte by byte. `answers` by request id, several if answered more than once."""

    def __init__(self, rig: WriterRig) -> None:
        self._rig = rig
        self.sock = open_socket(rig.paths.socket(WRITER))
        self._reader = FrameReader(1 << 30)
        self.answers: dict[int, list[Answer]] = {}

    def send(self, data: bytes, *, steps: int = 0) -> None:
        """Write all of `data`; the writer steps when the socket is full, and as often afterwards."""
        view = memoryview(data)
        while view:
            try:
                view = view[self.sock.send(view) :]
            except BlockingIOError:
                self._rig.step()
                self.read()
        for _ in range(steps):
            self._rig.step()

    def read(self) -> None:
        """Receive the bytes that have arrived."""
        while True:
            try:
                data = self.sock.recv(1 << 20)
            except BlockingIOError:
                break
            if not data:
                break
            self._reader.feed(data)
        while (frame := self._reader.next_frame()) is not None:
            answer = Answer(frame.operation, bytes(frame.options), bytes(frame.payload))
            self.answers.setdefault(frame.request_id, []).append(answer)

    def wait_for(self, request_ids: Iterable[int]) -> None:
        """Step the writer until these are answered."""
        wanted = set(request_ids)

        def answered() -> bool:
            self.read()
            return wanted <= self.answers.keys()

        self._rig.run_until(answered)

    def close(self) -> None:
        self.sock.close()


def frame_bytes(operation: Operation, request_id: int, options: FrameOptions, payload: bytes = b"") -> bytes:
    """A request's frame."""
    return b"".join(map(bytes, encode_frame(operation, request_id, msgspec.msgpack.encode(options), (payload,))))


def append_bytes(request_id: int, request: AppendRequest, *columns: bytes) -> bytes:
    """An append frame."""
    return frame_bytes(Operation.APPEND, request_id, request, b"".join(columns))


def single(request_id: int, topic: str, body: bytes = b"body", **changes: Any) -> bytes:
    """An append frame of one message."""
    request = AppendRequest(topic, 1, bodies_bytes=len(body), born_timestamp_ms=1_700_000_000_000, **changes)
    return append_bytes(request_id, request, len(body).to_bytes(4, "little"), body)


def several(request_id: int, topic: str, bodies: Sequence[bytes], **changes: Any) -> bytes:
    """An append frame of several messages."""
    joined = b"".join(bodies)
    request = AppendRequest(topic, len(bodies), bodies_bytes=len(joined), **changes)
    return append_bytes(request_id, request, b"".join(len(body).to_bytes(4, "little") for body in bodies), joined)


MakeRig = Callable[..., WriterRig]


def error_of(client: Client, request_id: int) -> MqprocError | None:
    """The outcome of a request, which was answered exactly once."""
    (answer,) = client.answers[request_id]
    return decode_refusal(memoryview(answer.options)) if answer.operation & REFUSAL else None


def columns(payload: bytes) -> tuple[list[int], list[int], list[int]]:
    """Physical offsets, queue offsets and queue ids of an answer."""
    count = len(payload) // 20
    return (
        np.frombuffer(payload, "<i8", count).tolist(),
        np.frombuffer(payload, "<i8", count, 8 * count).tolist(),
        np.frombuffer(payload, "<i4", count, 16 * count).tolist(),
    )


def queue_ids(client: Client, request_id: int) -> list[int]:
    return columns(client.answers[request_id][0].payload)[2]


# The same with runs and without
