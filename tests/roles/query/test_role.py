"""The query role over real sockets: operations, long polls, fairness, disconnects.

The test steps the role as the loop does; clients are plain sockets with the wire's codec. The append and dispatch
engines write the store, and dispatch rings the role's bell.
"""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mqproc.errors import BadRequestError, FilterSyntaxError, InternalError, MessageNotFoundError, error_from_wire
from mqproc.io.store_io import Clock, StoreIO
from mqproc.ipc.bell import EventBell
from mqproc.ipc.control import Control
from mqproc.ipc.counters import read_buckets
from mqproc.layout import control as words_of
from mqproc.layout import histograms, queue_table, record
from mqproc.layout.frame import HEADER, HEADER_SIZE, REFUSAL, encode_header
from mqproc.layout.record_codec import decode_records
from mqproc.roles.query import role as query
from mqproc.roles.query.role import Query
from mqproc.roles.role import Heartbeat, RoleContext
from mqproc.store.index.files import IndexFiles
from mqproc.store.read import pull as pulls
from mqproc.store.read.unit_walk import QueueWalk
from mqproc.types import PullStatus
from mqproc.wire.address import listen
from mqproc.wire.operations import (
    ANSWERS,
    ByKeyRequest,
    CountRequest,
    Empty,
    ErrorAnswer,
    FrameOptions,
    GetRequest,
    OffsetAtRequest,
    Operation,
    PullRequest,
    QueryMessageRequest,
    QueuesRequest,
    RangeRequest,
    ScanRequest,
)
from tests.support.records import encode_message_id
from tests.support.store_builders import FIRST_MS, MESSAGE_COUNT, STORE_HOST, NumberedStore

PATIENCE_S = 60.0


class Group:
    """A store, its control file, and the role."""

    def __init__(self, root: Path, io: StoreIO | None = None, incarnation: int = 1) -> None:
        self.store = NumberedStore(root)
        engine = self.store.engine
        self.control = Control.create(engine.io, engine.paths, Clock(), 1)
        # The engine's words become those of the control file.
        engine.use_words(self.control.words)
        self.listener = listen(engine.paths.socket("query"))
        self.bell = EventBell(self.control.cells, words_of.role_word(words_of.QUERY, "sleeping"))
        self.dispatcher_bell = EventBell(self.control.cells, words_of.role_word(words_of.DISPATCHER, "sleeping"))
        heartbeat = Heartbeat(self.control, words_of.QUERY, Clock())
        self.context = RoleContext(
            name=words_of.QUERY,
            paths=engine.paths,
            options=engine.options,
            control=self.control,
            io=io or engine.io,
            clock=Clock(),
            bells={words_of.QUERY: self.bell, words_of.DISPATCHER: self.dispatcher_bell},
            sockets={"query": self.listener},
            incarnation=incarnation,
            heartbeat=heartbeat,
        )
        self.role = Query(self.context)
        self._callers: list[Caller] = []

    def put(self, topic: str, frame: int, **changes: Any) -> None:
        self.store.put(topic, frame, **changes)

    def dispatch(self) -> None:
        self.store.dispatch()
        self.bell.ring()

    def connect(self) -> Caller:
        self._callers.append(Caller(self))
        return self._callers[-1]

    def step(self) -> int:
        return self.role.do_work()

    def restart(self) -> None:
        """Replace the role by its next incarnation, as after a kill."""
        self.role.close()
        self.context = dataclasses.replace(self.context, incarnation=self.context.incarnation + 1)
        self.role = Query(self.context)

    def close(self) -> None:
        for caller in self._callers:
            caller.sock.close()
        self.role.close()
        self.store.close()
        self.listener.close()
        self.bell.close()
        self.dispatcher_bell.close()


class Caller:
    """A client that speaks raw frames."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(str(group.context.paths.socket("query")))
        self.sock.setblocking(False)
        self._data = bytearray()
        self._id = 0

    def ask(self, operation: Operation, options: FrameOptions) -> int:
        self._id += 1
        encoded = msgspec.msgpack.encode(options)
        self.sock.send(encode_header(operation, self._id, len(encoded), 0) + encoded)
        return self._id

    def answer(self) -> tuple[int, Any, bytes] | None:
        """Step the role; return the next (request id, options, payload), or None without answer."""
        for _ in range(3):
            self._group.step()
        try:
            while data := self.sock.recv(1 << 20):
                self._data += data
        except BlockingIOError:
            pass
        if len(self._data) < HEADER_SIZE:
            return None
        _, _, operation, request_id, options_size, _, payload_size = HEADER.unpack_from(self._data)
        size = HEADER_SIZE + options_size + payload_size
        if len(self._data) < size:
            return None
        options = bytes(self._data[HEADER_SIZE : HEADER_SIZE + options_size])
        payload = bytes(self._data[HEADER_SIZE + options_size : size])
        del self._data[:size]
        if operation & REFUSAL:
            error = msgspec.msgpack.decode(options, type=ErrorAnswer)
            raise error_from_wire(error.code, error.message, error.details)
        kind = ANSWERS[Operation(operation & 0x3FFF)]
        return request_id, msgspec.msgpack.decode(options, type=kind), payload

    def call(self, operation: Operation, options: FrameOptions) -> tuple[Any, bytes]:
        """Ask and wait for the answer."""
        request_id = self.ask(operation, options)
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            found = self.answer()
            if found is not None:
                assert found[0] == request_id
                return found[1], found[2]
        raise AssertionError("no answer")


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    made = Group(tmp_path / "store")
    yield made
    made.close()


@pytest.fixture
def filled(group: Group) -> Group:
    for frame in range(40):
        group.put("Orders", frame)
    group.dispatch()
    return group


def offsets_of(payload: bytes) -> list[int]:
    return [message.physical_offset for message in decode_records(payload)]


def test_pull_returns_records(filled: Group) -> None:
    answer, payload = filled.connect().call(Operation.PULL, PullRequest("Orders", 1, 10, max_messages=5))
    assert (answer.status, answer.next_offset, answer.count) == ("FOUND", 15, 5)
    assert [message.queue_offset for message in decode_records(payload)] == list(range(10, 15))
    words = filled.control.words
    assert words[words_of.PULLED_MESSAGES] == 5
    assert words[words_of.PULLED_BYTES] == len(payload)
    table = filled.store.engine.table
    delivered = table.column(queue_table.DELIVERED)
    assert delivered[table.find("Orders", 1)] == delivered.sum() == 5
    assert words[words_of.QUERY_REQUESTS] == 1
    assert words[words_of.QUERY_CONNECTIONS] == 1


def test_query_answers_every_read_request(filled: Group) -> None:
    caller, offsets = filled.connect(), filled.store.offsets
    assert caller.call(Operation.PING, Empty()) == (Empty(), b"")
    answer, payload = caller.call(Operation.GET, GetRequest(encode_message_id(STORE_HOST, offsets[3])))
    assert (answer.count, offsets_of(payload)) == (1, [offsets[3]])
    answer, payload = caller.call(Operation.BY_KEY, ByKeyRequest("Orders", "key-7"))
    assert offsets_of(payload) == [offsets[number] for number in range(7, MESSAGE_COUNT, 100)]
    assert answer.complete
    answer, payload = caller.call(Operation.COUNT, CountRequest("Orders", FIRST_MS + 100, FIRST_MS + 300))
    assert answer.count == 50
    answer, payload = caller.call(Operation.OFFSET_AT, OffsetAtRequest("Orders", 0, FIRST_MS + 1))
    assert answer.offset == 7
    answer, payload = caller.call(Operation.QUEUES, QueuesRequest("Orders"))
    assert answer.queues == [("Orders", queue_id, 0, MESSAGE_COUNT // 4) for queue_id in range(4)]
    answer, payload = caller.call(Operation.TOPICS, Empty())
    assert [row[:4] for row in answer.topics] == [("Orders", 4, 6, MESSAGE_COUNT)]
    answer, payload = caller.call(Operation.QUERY_MESSAGE, QueryMessageRequest("Orders", "n9", 32, 0, (1 << 63) - 1))
    assert offsets[9] in answer.physical_offsets
    assert offsets_of(payload) == answer.physical_offsets
    answer, payload = caller.call(
        Operation.SCAN, ScanRequest("Orders", property_name="KEYS", property_value="key-9 n9")
    )
    assert (offsets_of(payload), answer.complete, answer.cursor) == ([offsets[9]], True, [-1])
    answer, payload = caller.call(Operation.STATS, Empty())
    assert answer.words["written"] == filled.store.engine.written
    answer, payload = caller.call(Operation.HEALTH, Empty())
    assert not answer.ready
    assert answer.problems


def test_by_key_rocketmq_answer_omits_a_damaged_record(filled: Group) -> None:
    caller, numbers = filled.connect(), list(range(7, MESSAGE_COUNT, 100))
    offsets = [filled.store.offsets[number] for number in numbers]
    filled.store.damage(offsets[3], record.BODY + 2, b"\xff")
    request = QueryMessageRequest("Orders", "key-7", 32, 0, (1 << 63) - 1)
    answer, payload = caller.call(Operation.QUERY_MESSAGE, request)
    assert answer.physical_offsets == offsets
    assert offsets_of(payload) == offsets[:3] + offsets[4:]


def test_pull_counters_are_exact_and_immediate(filled: Group) -> None:
    words, caller = filled.control.words, filled.connect()
    table = filled.store.engine.table
    handed_out = 0
    for offset in (0, 5, 10):
        _, payload = caller.call(Operation.PULL, PullRequest("Orders", 1, offset, max_messages=5))
        handed_out += len(payload)
    caller.call(Operation.PULL, PullRequest("Orders", 1, 1 << 40, max_messages=5))
    assert words[words_of.PULLED_MESSAGES] == 15
    assert words[words_of.PULLED_BYTES] == handed_out
    assert (words[words_of.PULLS], words[words_of.EMPTY_PULLS], words[words_of.QUERY_REQUESTS]) == (4, 1, 4)
    delivered = table.column(queue_table.DELIVERED)
    assert delivered[table.entry("Orders", 1)] == delivered.sum() == 15
    # Each was answered at once, and one time may be counted for others.
    assert 1 <= sum(read_buckets(words, histograms.PULL_REQUESTS).counts) <= 4
    filled.role._times.next_ns = 0
    caller.call(Operation.PULL, PullRequest("Orders", 1, 0, max_messages=5))
    assert sum(read_buckets(words, histograms.PULL_REQUESTS).counts) == 5


def test_pull_failing_after_selection_counts_nothing(filled: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    words, caller = filled.control.words, filled.connect()

    def failing(*given: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(QueueWalk, "_account", failing)
        with pytest.raises(InternalError, match="Input/output"):
            caller.call(Operation.PULL, PullRequest("Orders", 1, 0, max_messages=5))
    assert (words[words_of.PULLED_MESSAGES], words[words_of.PULLED_BYTES], words[words_of.PULLS]) == (0, 0, 0)
    assert (words[words_of.QUERY_REQUESTS], words[words_of.QUERY_REJECTS]) == (1, 1)
    assert not filled.store.engine.table.column(queue_table.DELIVERED).any()


def test_range_continues_from_its_cursor(filled: Group) -> None:
    caller, found, cursor = filled.connect(), [], []
    while cursor != [-1]:
        request = RangeRequest("Orders", FIRST_MS, FIRST_MS + 1000, max_messages=64, cursor=cursor)
        answer, payload = caller.call(Operation.RANGE, request)
        found += offsets_of(payload)
        cursor = answer.cursor
    assert sorted(found) == filled.store.offsets[:250]
    assert caller.call(Operation.RANGE, RangeRequest("Orders", 0, 1, cursor=[-1]))[0].count == 0
    assert caller.call(Operation.RANGE, RangeRequest("Orders", FIRST_MS, FIRST_MS + 9, max_bytes=-5))[0].count == 1


def test_query_invalid_requests_keep_the_connection_open(filled: Group) -> None:
    caller = filled.connect()
    with pytest.raises(MessageNotFoundError):
        caller.call(Operation.GET, GetRequest("F" * 32))
    with pytest.raises(BadRequestError):
        caller.call(Operation.BY_KEY, ByKeyRequest("Orders", ""))
    with pytest.raises(FilterSyntaxError):
        caller.call(Operation.PULL, PullRequest("Orders", 0, 0, tags=["x" * 5000]))
    with pytest.raises(BadRequestError):
        caller.call(Operation.PULL, Empty())
    huge = PullRequest("Orders", 0, (1 << 63) - 1, max_messages=1 << 62, max_bytes=(1 << 63) - 1)
    answer, _ = caller.call(Operation.PULL, huge)
    assert answer.status == "OFFSET_OVERFLOW_BADLY"
    assert filled.control.words[words_of.QUERY_REJECTS] == 4


# Long polls


def waiting(group: Group) -> int:
    return group.control.words[words_of.WAITING_PULLS]


def test_long_poll_is_answered_when_its_queue_advances(filled: Group) -> None:
    caller, end = filled.connect(), MESSAGE_COUNT // 4
    caller.ask(Operation.PULL, PullRequest("Orders", 0, end, timeout_ms=30_000))
    assert caller.answer() is None
    assert waiting(filled) == 1
    filled.put("Other", 0)
    filled.dispatch()
    assert caller.answer() is None
    filled.put("Orders", 40)
    assert caller.answer() is None, "written but not dispatched"
    filled.dispatch()
    found = caller.answer()
    assert found is not None
    assert (found[1].status, found[1].count) == ("FOUND", 7)
    assert waiting(filled) == 0


def test_long_poll_waits_at_the_bell(filled: Group) -> None:
    """No busy loop: nothing to do until the bell rings, and then the wait ends at once."""
    caller = filled.connect()
    caller.ask(Operation.PULL, PullRequest("Orders", 0, MESSAGE_COUNT // 4, timeout_ms=30_000))
    assert caller.answer() is None
    assert filled.step() == 0
    filled.bell.announce()
    begun = time.monotonic()
    filled.role.wait(0.05)
    assert time.monotonic() - begun >= 0.04
    filled.put("Orders", 40)
    filled.dispatch()
    begun = time.monotonic()
    filled.role.wait(60)
    assert time.monotonic() - begun < 30
    filled.bell.awake()
    assert caller.answer() is not None


def test_long_poll_ends_at_its_timeout(filled: Group) -> None:
    caller = filled.connect()
    begun = time.monotonic()
    answer, _ = caller.call(Operation.PULL, PullRequest("Orders", 0, MESSAGE_COUNT // 4, timeout_ms=50))
    assert time.monotonic() - begun >= 0.05
    assert (answer.status, answer.next_offset) == (PullStatus.OFFSET_OVERFLOW_ONE, MESSAGE_COUNT // 4)
    assert waiting(filled) == 0


def test_long_poll_waits_for_its_tag(filled: Group) -> None:
    caller, end = filled.connect(), MESSAGE_COUNT // 4
    caller.ask(Operation.PULL, PullRequest("Orders", 0, 0, tags=["new"], timeout_ms=30_000))
    assert caller.answer() is None
    filled.put("Orders", 40)
    filled.dispatch()
    assert caller.answer() is None
    assert waiting(filled) == 1
    filled.put("Orders", 41, tags=["new"] * 25)
    filled.dispatch()
    found = caller.answer()
    assert found is not None
    first = decode_records(found[2])[0]
    assert (first.tag, first.queue_offset) == ("new", end + 7)


def test_long_poll_waits_for_a_property_match(filled: Group) -> None:
    caller = filled.connect()
    caller.ask(Operation.PULL, PullRequest("Orders", 0, 0, sql="KEYS CONTAINS 'wanted'", timeout_ms=30_000))
    assert caller.answer() is None
    filled.put("Orders", 40)
    filled.dispatch()
    assert caller.answer() is None
    filled.put("Orders", 41, keys=["wanted"] * 25)
    filled.dispatch()
    found = caller.answer()
    assert found is not None
    assert decode_records(found[2])[0].keys == ("wanted",)
    caller.ask(Operation.PULL, PullRequest("Orders", 0, 0, sql="KEYS CONTAINS", timeout_ms=30_000))
    with pytest.raises(FilterSyntaxError) as caught:
        caller.answer()
    assert caught.value.position == 13


def test_pull_sql_with_rocketmq_limits_is_rejected(filled: Group) -> None:
    caller = filled.connect()
    with pytest.raises(BadRequestError, match="RocketMQ's limits apply to filters by tags"):
        caller.call(Operation.PULL, PullRequest("Orders", 0, 0, sql="a = 1", rocketmq_limits=True))


def test_long_polls_scanning_much_take_turns(filled: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """No record arrives, and still each advances step by step; other requests are answered."""
    monkeypatch.setattr(pulls, "LOOK_BYTES_MAX", 10_000)
    monkeypatch.setattr(query, "STEP_NS", 0)
    seeking = [filled.connect() for _ in range(3)]
    for caller in seeking:
        caller.ask(Operation.PULL, PullRequest("Orders", 0, 0, sql="KEYS CONTAINS 'n996'", timeout_ms=30_000))
    filled.step()
    answered, steps = 0, 0
    other = filled.connect()
    while answered < len(seeking):
        steps += 1
        assert steps < 1000
        answered += sum(caller.answer() is not None for caller in seeking)
        assert other.call(Operation.PULL, PullRequest("Orders", 0, 0, 1))[0].status == "FOUND"
    assert steps > 3
    assert waiting(filled) == 0


def test_long_poll_accepts_a_queue_that_does_not_exist_yet(filled: Group) -> None:
    caller = filled.connect()
    caller.ask(Operation.PULL, PullRequest("Later", 0, 0, timeout_ms=30_000))
    assert caller.answer() is None
    filled.put("Later", 0)
    filled.dispatch()
    found = caller.answer()
    assert found is not None
    assert found[1].status == "FOUND"
    # An offset that such a queue lacks is answered at once.
    answer, _ = caller.call(Operation.PULL, PullRequest("Never", 0, 7, timeout_ms=30_000))
    assert answer.status == "NO_MATCHED_LOGIC_QUEUE"


def test_long_polls_of_disconnected_client_are_dropped(filled: Group) -> None:
    stays, leaves = filled.connect(), filled.connect()
    for caller in (stays, leaves):
        for _ in range(3):
            caller.ask(Operation.PULL, PullRequest("Orders", 0, MESSAGE_COUNT // 4, timeout_ms=30_000))
    assert stays.answer() is None
    assert waiting(filled) == 6
    leaves.sock.close()
    assert stays.answer() is None
    assert waiting(filled) == 3
    filled.put("Orders", 40)
    filled.dispatch()
    assert [stays.answer() is not None for _ in range(3)] == [True] * 3


def test_long_polls_are_answered_at_stop(filled: Group) -> None:
    caller = filled.connect()
    caller.ask(Operation.PULL, PullRequest("Orders", 0, MESSAGE_COUNT // 4, timeout_ms=30_000))
    assert caller.answer() is None
    assert filled.role.on_stop()
    found = caller.answer()
    assert found is not None
    assert found[1].status == "OFFSET_OVERFLOW_ONE"


def test_stop_does_not_wait_for_a_client_that_reads_nothing(filled: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query, "STOP_SERVE_NS", 50_000_000)
    slow = filled.connect()
    slow.call(Operation.PING, Empty())
    (connection,) = filled.role._server.connections.values()
    connection.paused = True
    slow.ask(Operation.PULL, PullRequest("Orders", 0, 0))
    deadline = time.monotonic() + PATIENCE_S
    while not filled.role.on_stop():
        assert time.monotonic() < deadline


# Fairness


def test_long_scan_does_not_delay_other_requests(filled: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan over tiny slices is still running when another client's request is answered."""
    monkeypatch.setattr("mqproc.store.read.records.SLICE_BYTES", 2048)
    monkeypatch.setattr("mqproc.roles.query.role.STEP_NS", 0)
    scanning, other = filled.connect(), filled.connect()
    scanning.ask(Operation.SCAN, ScanRequest("Orders", body_contains=b"nowhere"))
    filled.step()
    other.ask(Operation.PING, Empty())
    assert other.answer() is not None
    assert scanning.answer() is None
    deadline = time.monotonic() + PATIENCE_S
    while (found := scanning.answer()) is None:
        assert time.monotonic() < deadline
    assert (found[1].count, found[1].complete) == (0, True)


def test_slow_reader_has_its_requests_queued(filled: Group) -> None:
    slow, other = filled.connect(), filled.connect()
    for _ in range(5):
        slow.ask(Operation.PULL, PullRequest("Orders", 0, 0))
    slow_connection = None
    for _ in range(3):
        filled.step()
    slow_connection = next(iter(filled.role._server.connections.values()))
    slow_connection.paused = True
    slow.ask(Operation.PULL, PullRequest("Orders", 0, 0))
    assert other.call(Operation.PING, Empty())[0] == Empty()
    slow_connection.paused = False
    assert sum(slow.answer() is not None for _ in range(8)) == 6


def test_index_files_created_later_are_found(group: Group) -> None:
    caller = group.connect()
    for frame in range(40):
        group.put("Orders", frame)
        group.dispatch()
        number = frame * 25 + 3
        _, payload = caller.call(Operation.BY_KEY, ByKeyRequest("Orders", f"n{number}"))
        assert offsets_of(payload) == [group.store.offsets[number]]
    assert isinstance(group.store.index, IndexFiles)
    assert len(list(group.context.paths.index.iterdir())) > 1
