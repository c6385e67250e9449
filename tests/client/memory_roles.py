"""Writer and query in memory: real sockets and frames, one thread for both roles.

`behaviour` lets a test make the roles misbehave: a function that is asked before each request is handled and may
answer it itself (then it returns True).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mqproc.errors import MessageNotFoundError, MessageTooLargeError, MqprocError, NoSuchQueueError, TopicNotFoundError
from mqproc.layout import properties
from mqproc.layout.properties import java_hash, queue_of_hash
from mqproc.layout.record_codec import decode_message_id, host_bytes
from mqproc.roles.writer.append_plan import ColumnWriter
from mqproc.types import StoredMessage
from mqproc.wire.address import listen
from mqproc.wire.connection import Request
from mqproc.wire.operations import (
    COLUMN_ABSENT,
    QUEUE_ANY,
    AppendAnswer,
    AppendRequest,
    ByKeyRequest,
    CountAnswer,
    CountRequest,
    CreateTopicRequest,
    DeleteTopicRequest,
    GetRequest,
    HealthAnswer,
    OffsetAnswer,
    OffsetAtRequest,
    Operation,
    PullAnswer,
    PullRequest,
    QueryMessageAnswer,
    QueryMessageRequest,
    QueuesAnswer,
    QueuesRequest,
    RangeRequest,
    RecordsAnswer,
    ScanRequest,
    StatsAnswer,
    TopicsAnswer,
)
from mqproc.wire.server import ServerLimits, SocketServer
from tests.support.records import decode_record, encode_record

# Append frames, decoded in plain Python as the writer's kernel does

SHARDING_BUCKET = properties.bucket("__SHARDINGKEY")


@dataclass
class Row:
    """One message of a frame."""

    body: bytes
    properties: str
    queue_id: int
    flag: int
    born_timestamp_ms: int
    sharding_key: str = ""

    @property
    def pairs(self) -> dict[str, str]:
        return properties.decode(self.properties)


class _Columns:
    def __init__(self, payload: bytes, count: int) -> None:
        self._payload = payload
        self._at = 0
        self._count = count

    def numbers(self, dtype: str) -> list[int]:
        found = np.frombuffer(self._payload, dtype, self._count, self._at)
        self._at += found.nbytes
        return found.tolist()

    def texts(self, size: int, dtype: str) -> list[bytes]:
        lengths = self.numbers(dtype)
        assert sum(lengths) == size
        values = []
        for length in lengths:
            values.append(self._payload[self._at : self._at + length])
            self._at += length
        return values

    def end(self) -> None:
        assert self._at == len(self._payload), "the columns do not fill the payload"


def read_append(options: AppendRequest, payload: bytes) -> list[Row]:
    """The frame's messages, with property strings as the writer would store them."""
    columns = _Columns(payload, options.count)
    bodies = columns.texts(options.bodies_bytes, "<u4")
    keys = columns.texts(options.keys_bytes, "<u2") if options.keys_bytes != COLUMN_ABSENT else None
    tags = columns.texts(options.tags_bytes, "<u2") if options.tags_bytes != COLUMN_ABSENT else None
    whole = columns.texts(options.properties_bytes, "<u2") if options.properties_bytes != COLUMN_ABSENT else None
    born = columns.numbers("<i8") if options.has_born else [options.born_timestamp_ms] * options.count
    queues = columns.numbers("<i4") if options.has_queues else [options.queue_id] * options.count
    flags = columns.numbers("<i4") if options.has_flags else [options.flag] * options.count
    sharding = columns.texts(options.sharding_bytes, "<u2") if options.sharding_bytes != COLUMN_ABSENT else None
    columns.end()
    rows = []
    for index in range(options.count):
        sharding_key = sharding[index].decode() if sharding is not None else ""
        text = (
            whole[index].decode()
            if whole is not None
            else _properties(
                options,
                index,
                tags[index].decode() if tags is not None else options.tag,
                keys[index].decode() if keys is not None else "",
                sharding_key,
            )
        )
        rows.append(Row(bodies[index], text, queues[index], flags[index], born[index], sharding_key))
    return rows


def _properties(options: AppendRequest, index: int, tag: str, keys: str, sharding_key: str) -> str:
    def pair(name: str, value: str) -> str:
        return f"{name}\x01{value}\x02" if value else ""

    unique = f"{options.unique_prefix}{(options.unique_counter + index) % 65536:04X}" if options.unique_prefix else ""
    before = options.gap_before_unique.decode()
    if sharding_key:
        pairs = before.split("\x02")[:-1]
        earlier = [each for each in pairs if properties.bucket(each.partition("\x01")[0]) < SHARDING_BUCKET]
        later = pairs[len(earlier) :]
        before = "".join(f"{each}\x02" for each in (*earlier, f"__SHARDINGKEY\x01{sharding_key}", *later))
    return "".join(
        (
            before,
            pair("UNIQ_KEY", unique),
            options.gap_before_tag.decode(),
            pair("TAGS", tag),
            options.gap_before_keys.decode(),
            pair("KEYS", keys),
            options.gap_after_keys.decode(),
        )
    )


APPENDS = int(Operation.APPEND)

STORE_HOST = host_bytes("192.168.1.2", 10911)
BODY_MAX = 4 << 20
Behaviour = Callable[[Request], bool]


class MemoryRoles:
    """A store in memory behind two sockets. Use as a context manager."""

    def __init__(self, store: Path, limits: ServerLimits | None = None) -> None:
        self.store = store
        self.limits = limits
        self.records: list[bytes] = []
        self.messages: list[StoredMessage] = []
        self.queues: dict[str, list[list[int]]] = {}
        self.frames = 0
        self.behaviour: Behaviour = lambda request: False
        self.servers: list[SocketServer] = []
        self.failure: BaseException | None = None
        self._held: list[tuple[Request, PullRequest, float]] = []
        self._size = 0
        self._rotation = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def __enter__(self) -> MemoryRoles:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        os.close(self._wake_r)
        os.close(self._wake_w)
        if self.failure is not None:
            raise self.failure

    def start(self) -> None:
        self._stop.clear()
        listeners = [listen(self.store / "mqproc" / f"{name}.sock") for name in ("writer", "query")]
        self.servers = [SocketServer(listener, self.limits) for listener in listeners]
        self.servers[0].register(self._wake_r, lambda: os.read(self._wake_r, 64))
        self._thread = threading.Thread(target=self._run, args=(listeners,))
        self._thread.start()

    def stop(self) -> None:
        """As if the processes were killed: all connections break."""
        self._stop.set()
        os.write(self._wake_w, b"x")
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, listeners: list) -> None:
        try:
            while not self._stop.is_set():
                for server in self.servers:
                    for request in server.poll(0.0005):
                        self._handle(request)
                self._answer_held()
        except BaseException as error:
            self.failure = error
        finally:
            for server, listener in zip(self.servers, listeners, strict=True):
                server.close()
                listener.close()
            for name in ("writer", "query"):
                (self.store / "mqproc" / f"{name}.sock").unlink(missing_ok=True)

    def _handle(self, request: Request) -> None:
        if self.behaviour(request):
            return
        try:
            handler = getattr(self, f"_{Operation(request.operation).name.lower()}")
            handler(request, request.decode())
        except MqprocError as error:
            request.refuse(error)

    # Writer

    def _ping(self, request: Request, options: object) -> None:
        request.answer()

    def _create_topic(self, request: Request, options: CreateTopicRequest) -> None:
        queues = self.queues.setdefault(options.topic, [])
        queues.extend([] for _ in range(options.queues - len(queues)))
        request.answer()

    def _delete_topic(self, request: Request, options: DeleteTopicRequest) -> None:
        if self.queues.pop(options.topic, None) is None:
            raise TopicNotFoundError(f"no topic {options.topic!r}")
        request.answer()

    def _append_messages(self, request: Request, options: AppendRequest) -> None:
        options, request.payload = ColumnWriter().of(options, request.payload)
        self._append(request, options)

    def _append(self, request: Request, options: AppendRequest) -> None:
        self.frames += 1
        queues = self.queues.setdefault(options.topic, [[] for _ in range(8)])
        rows = read_append(options, bytes(request.payload))
        for index, row in enumerate(rows):
            if len(row.body) > BODY_MAX:
                raise MessageTooLargeError(f"message {index}: body of {len(row.body):,} bytes exceeds {BODY_MAX:,}")
            if row.queue_id >= len(queues):
                raise NoSuchQueueError(f"topic has {len(queues)} queues")
        now_ms = time.time_ns() // 1_000_000
        answers = []
        for row in rows:
            queue_id = row.queue_id
            if row.sharding_key:
                queue_id = queue_of_hash(java_hash(row.sharding_key), len(queues))
            elif queue_id == QUEUE_ANY:
                queue_id = self._rotation = (self._rotation + 1) % len(queues)
            record = encode_record(
                topic=options.topic,
                body=row.body,
                properties=row.properties,
                queue_id=queue_id,
                flag=row.flag,
                queue_offset=len(queues[queue_id]),
                physical_offset=self._size,
                born_timestamp_ms=row.born_timestamp_ms,
                born_host=options.born_host,
                store_timestamp_ms=now_ms,
                store_host=STORE_HOST,
                append_crc=True,
            )
            answers.append((self._size, len(queues[queue_id]), queue_id))
            queues[queue_id].append(len(self.records))
            self.records.append(record)
            self.messages.append(decode_record(record))
            self._size += len(record)
        if not options.oneway:
            physical, logical, queue_ids = zip(*answers, strict=True)
            columns = [np.array(physical, "<i8"), np.array(logical, "<i8"), np.array(queue_ids, "<i4")]
            request.answer(AppendAnswer(now_ms, STORE_HOST), columns)

    # Query

    def _queues(self, request: Request, options: QueuesRequest) -> None:
        names = [options.topic] if options.topic else sorted(self.queues)
        request.answer(
            QueuesAnswer(
                [
                    (name, queue_id, 0, len(queue))
                    for name in names
                    for queue_id, queue in enumerate(self.queues.get(name, []))
                ]
            )
        )

    def _topics(self, request: Request, options: object) -> None:
        request.answer(
            TopicsAnswer(
                [
                    (name, len(queues), 6, sum(map(len, queues)), {}, len(queues), len(queues))
                    for name, queues in sorted(self.queues.items())
                ]
            )
        )

    def _pull(self, request: Request, options: PullRequest) -> None:
        if not self._answer_pull(request, options, options.timeout_ms == 0):
            self._held.append((request, options, time.monotonic() + options.timeout_ms / 1000))

    @property
    def held_pulls(self) -> int:
        """Pulls that wait for messages now."""
        return len(self._held)

    def _answer_held(self) -> None:
        now = time.monotonic()
        self._held = [
            held
            for held in self._held
            if not held[0].connection.closed and not self._answer_pull(held[0], held[1], now >= held[2])
        ]

    def _answer_pull(self, request: Request, options: PullRequest, now: bool) -> bool:
        queues = self.queues.get(options.topic)
        if queues is None or options.queue_id >= len(queues):
            request.answer(PullAnswer("NO_MATCHED_LOGIC_QUEUE", 0, 0, 0))
            return True
        queue = queues[options.queue_id]
        found = queue[options.offset : options.offset + options.max_messages]
        matching = [index for index in found if not options.tags or self.messages[index].tag in options.tags]
        if not matching and not now:
            return False
        status = "FOUND" if matching else "NO_MATCHED_MESSAGE" if found else "OFFSET_OVERFLOW_ONE"
        answer = PullAnswer(status, options.offset + len(found), 0, len(queue), len(matching))
        request.answer(answer, [self.records[index] for index in matching])
        return True

    def _get(self, request: Request, options: GetRequest) -> None:
        for index, message in enumerate(self.messages):
            if options.message_id == message.unique_id or (
                len(options.message_id) == 32
                and decode_message_id(options.message_id) == (STORE_HOST, message.physical_offset)
            ):
                request.answer(RecordsAnswer(1), [self.records[index]])
                return
        raise MessageNotFoundError(f"no message {options.message_id}")

    def _time(self, message: StoredMessage, born: bool) -> int:
        return message.born_timestamp_ms if born else message.store_timestamp_ms

    def _by_key(self, request: Request, options: ByKeyRequest) -> None:
        found = [
            index
            for index, message in enumerate(self.messages)
            if message.topic == options.topic
            and (message.unique_id == options.key if options.unique else options.key in message.keys)
            and options.begin_ms <= self._time(message, options.born_time) <= options.end_ms
        ][: options.max_messages]
        request.answer(RecordsAnswer(len(found)), [self.records[index] for index in found])

    def _in_range(self, options: RangeRequest | CountRequest) -> list[int]:
        return [
            index
            for index, message in enumerate(self.messages)
            if message.topic == options.topic
            and (not options.tags or message.tag in options.tags)
            and options.begin_ms <= self._time(message, options.born_time) < options.end_ms
        ]

    def _range(self, request: Request, options: RangeRequest) -> None:
        self._page(request, self._in_range(options), options.cursor[0] if options.cursor else 0, options.max_messages)

    def _scan(self, request: Request, options: ScanRequest) -> None:
        found = [
            index
            for index, message in enumerate(self.messages)
            if options.body_contains in message.body
            and (not options.topic or message.topic == options.topic)
            and (not options.property_name or message.properties.get(options.property_name) == options.property_value)
        ]
        self._page(request, found, max(0, options.physical_offset), options.max_messages)

    def _page(self, request: Request, found: list[int], start: int, size: int) -> None:
        page = found[start : start + size]
        end = start + len(page)
        answer = RecordsAnswer(len(page), [end], end >= len(found))
        request.answer(answer, [self.records[index] for index in page])

    def _count(self, request: Request, options: CountRequest) -> None:
        request.answer(CountAnswer(len(self._in_range(options))))

    def _offset_at(self, request: Request, options: OffsetAtRequest) -> None:
        queue = self.queues[options.topic][options.queue_id]
        times = [self.messages[index].store_timestamp_ms for index in queue]
        request.answer(OffsetAnswer(sum(time_ms < options.time_ms for time_ms in times)))

    def _query_message(self, request: Request, options: QueryMessageRequest) -> None:
        found = [index for index, message in enumerate(self.messages) if options.key in message.keys]
        offsets = [self.messages[index].physical_offset for index in found]
        request.answer(QueryMessageAnswer(offsets, 5, 6), [self.records[index] for index in found])

    def _stats(self, request: Request, options: object) -> None:
        request.answer(StatsAnswer({"written": self._size, "dispatched": self._size}))

    def _health(self, request: Request, options: object) -> None:
        request.answer(HealthAnswer(False, True, 12, ["dispatcher does not run"]))


def first(count: int, act: Callable[[Request], None], operation: int = APPENDS) -> Callable[[Request], bool]:
    """A behaviour for the first `count` requests of an operation."""
    left = [count]

    def behave(request: Request) -> bool:
        if request.operation != operation or left[0] == 0:
            return False
        left[0] -= 1
        act(request)
        return True

    return behave
