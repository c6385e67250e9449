"""A recovered store, its words and a clock by hand, on which roles run step by step."""

from __future__ import annotations

import dataclasses
import os
import struct
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from mqproc.client.connection import CallOutcome, Connection, open_socket
from mqproc.client.requests import WRITER, Call
from mqproc.config.options import Options
from mqproc.errors import MqprocError
from mqproc.io.store_io import StoreIO
from mqproc.ipc.bell import EventBell
from mqproc.ipc.control import Control
from mqproc.ipc.control_words import Words
from mqproc.ipc.counters import read_error_counters
from mqproc.layout import control as words_of
from mqproc.layout import histograms
from mqproc.layout import queue_table as table_layout
from mqproc.layout.frame import REFUSAL
from mqproc.paths import StorePaths
from mqproc.roles.role import Heartbeat, RoleContext
from mqproc.roles.writer.role import Writer
from mqproc.store.commitlog.append import CommitLogAppender
from mqproc.store.commitlog.append_templates import AppendPlan, AppendTemplate, topic_fields
from mqproc.store.commitlog.flush import make_segment
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.consumequeue.files import ConsumeQueueFiles
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.dispatch import Dispatch
from mqproc.store.index.files import IndexFiles
from mqproc.store.recovery.recovery import Recovery
from mqproc.wire.address import listen
from mqproc.wire.frames import FrameReader, decode_refusal, encode_frame
from mqproc.wire.operations import AppendRequest, FrameOptions, Operation
from tests.support.fakes import FaultyIO, ManualClock

# Appends and dispatch by the engine itself


HOST = bytes([127, 0, 0, 1, 0, 0, 0, 9])


def append_and_dispatch(
    io: StoreIO,
    paths: StorePaths,
    options: Options,
    words: Words,
    count: int,
    topic: str = "T",
    properties: bytes = b"",
) -> None:
    """Append, flush (in words) and dispatch `count` messages with one key to queue 0 of a topic."""
    table = QueueTable(io, paths.queues, write=True)
    segments = LogSegments(io, paths.commit_log, options.mapped_file_size_commit_log)

    def next_segment(start: int) -> None:
        if not segments.path(start).exists():
            make_segment(io, paths, start, segments.segment_size)

    appender = CommitLogAppender(io, options, words, table, segments, HOST, next_segment)
    appender.add(plan(table, count, topic, properties), 1_700_000_000_000)
    appender.write_out()
    appender.publish()
    end = words[words_of.WRITTEN]
    words[words_of.FLUSHER_SYNCED] = end
    queues = ConsumeQueueFiles(io, paths.consume_queue, options.consume_queue_file_bytes, write=True)
    index = IndexFiles(io, paths.index, options.max_hash_slot_num, options.max_index_num)
    dispatch = Dispatch(io, options, table, segments, queues, index)
    while (position := words[words_of.DISPATCHED]) < end:
        words[words_of.DISPATCHED] = dispatch.step(position, end).position
    sequence = words[words_of.COMMIT_SEQUENCE] + 1
    words[words_of.COMMIT_INDEX_MS[sequence & 1]] = dispatch.index_commit.file_ms
    words[words_of.COMMIT_INDEX_ITEMS[sequence & 1]] = dispatch.index_commit.count
    words[words_of.COMMIT_SEQUENCE] = sequence
    words.add(words_of.INDEX_FULL_FILES, index.full_files)
    dispatch.close()
    appender.close()


def plan(table: QueueTable, count: int, topic: str, properties: bytes) -> AppendPlan:
    keys = [b"k%d" % number for number in range(count)]
    columns = [struct.pack(f"<{count}I", *[4] * count), b"body" * count]
    columns += [struct.pack(f"<{count}H", *map(len, keys)), b"".join(keys)]
    key_lengths = 8 * count
    magic, topic_block = topic_fields(topic)
    template = AppendTemplate(
        magic=magic,
        topic_block=topic_block,
        queue_numbers=np.array([table.create_queue(topic, 0)], np.int64),
        fixed_queue=0,
        parts=(b"", b"", b"", properties),
        born_host=HOST,
    )
    return AppendPlan(
        template,
        np.frombuffer(bytearray(b"".join(columns)), np.uint8),
        count=count,
        columns=(0, 4 * count, key_lengths, key_lengths + 2 * count, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1),
        rotation=0,
        born_timestamp_ms=1_700_000_000_000,
    )


class Rig:
    """The context of roles; `options` override those of a small store."""

    def __init__(self, root: Path, **options: object) -> None:
        self.io = FaultyIO()
        self.clock = ManualClock()
        self.paths = StorePaths(root)
        self.io.make_folder(self.paths.own, 0o700)
        self.control = Control.create(self.io, self.paths, self.clock, os.getpid())
        sizes = {"mapped_file_size_commit_log": 1 << 20, "max_hash_slot_num": 100, "max_index_num": 2000}
        self.options = Options(**(sizes | options))  # type: ignore[arg-type]
        clean = not self.paths.abort.exists()
        Recovery(self.io, self.paths, self.options, self.control.words, lambda line: None, clean=clean).run()
        self.bells = {role: self._bell(role) for role in words_of.ROLES}
        self.io.tried()

    def _bell(self, role: str) -> EventBell:
        """Close with its last user: a process runs hundreds of tests."""
        bell = EventBell(self.control.cells, words_of.role_word(role, "sleeping"))
        weakref.finalize(bell, os.close, bell.fileno())
        return bell

    def context(self, role: str) -> RoleContext:
        heartbeat = Heartbeat(self.control, role, self.clock)
        return RoleContext(
            role, self.paths, self.options, self.control, self.io, self.clock, self.bells, {}, 1, heartbeat
        )

    def dispatch(self, messages: int) -> None:
        """Store and dispatch messages of one queue, as the writer and the dispatcher would."""
        append_and_dispatch(self.io, self.paths, self.options, self.control.words, messages)

    def pass_seconds(self, seconds: float) -> None:
        self.clock.advance(int(seconds * 1000))

    def taken(self, folder: str) -> int:
        """Count the files of a folder synced since the last call; syncfs counts as one."""
        count = sum(path.endswith("*") or (f"/{folder}/" in path and path[-1] != "/") for path in self.io.synced)
        self.io.synced.clear()
        return count


# A writer on a real socket, stepped by hand, with its clients, faults and results


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
        self.paths.socket(WRITER).unlink(missing_ok=True)
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
