"""Fuzz targets: frames, records, a stopped store, JSON files, files shared by a group.

Each target checks a damaged input by its seed. Mutations of bytes are shared.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from mqproc import Client, Message, StoreReader
from mqproc.config.options import Options
from mqproc.errors import CorruptStoreError, NotRunningError, StoreAccessError, StoreLockedError
from mqproc.io.store_io import Clock, StoreIO
from mqproc.ipc.control import Control
from mqproc.ipc.store_lock import CONTENT, StoreLock, lock_holder
from mqproc.kernels.pack import packed
from mqproc.kernels.record_check import VERIFY_CRCS, checked_size
from mqproc.kernels.record_decode import ALL_COLUMNS
from mqproc.layout import control as layout
from mqproc.layout import control as words_of
from mqproc.layout import record
from mqproc.layout.consume_queue import FILLER_SIZE
from mqproc.layout.control import QUERY, WRITER
from mqproc.layout.frame import HEADER_SIZE
from mqproc.layout.record_codec import decode_records, host_bytes, messages_of
from mqproc.paths import StorePaths
from mqproc.store import rocketmq_json
from mqproc.store.offsets.settings import check_file
from mqproc.store.schedule.levels import DelayOffsets
from mqproc.store.verify.verifier import verify_store
from mqproc.supervisor.store_folder import prepare_folder
from mqproc.topic_names import HALF_TOPIC, REVIVE_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC
from mqproc.types import StoredMessage
from mqproc.util.procfs import pid_namespace
from mqproc.wire import operations
from mqproc.wire.frames import encode_frame, encode_options
from mqproc.wire.operations import Empty, FrameOptions, Operation
from tests.bad_input.cases import RawClient, rejects
from tests.support.command_line import call
from tests.support.group import Group, assert_equals_rebuild, wait_until
from tests.support.records import check_record, columns_of, decode_record, encode_record
from tests.support.store_checks import RecordingIO, Recovered, contents, recover, written_ranges

# Mutations of bytes, chosen by a seeded random generator


PIECE_MAX = 512
NUMBERS = (
    0,
    1,
    -1,
    2,
    7,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x7FFFFFFF,
    -0x80000000,
    0x7FFFFFFFFFFFFFFF,
    -0x8000000000000000,
    1 << 20,
    1 << 30,
    1 << 40,
)
FORMATS = ("b", "<h", ">h", "<i", ">i", "<q", ">q")


def damage(random: Random, data: bytes, others: Sequence[bytes] = (b"",), most: int = 4) -> bytes:
    """`data` with 1 to `most` mutations, some of which use pieces of `others`."""
    for _ in range(random.randint(1, most)):
        data = random.choice(_DAMAGES)(random, data, random.choice(others))
    return data


def _place(random: Random, data: bytes) -> tuple[int, int]:
    """A range to mutate; the ends of the data are more likely than other places."""
    size = random.randint(0, min(len(data), PIECE_MAX))
    start = random.choice((0, len(data) - size, random.randint(0, len(data) - size)))
    return start, start + size


def _flip(random: Random, data: bytes, _other: bytes) -> bytes:
    if not data:
        return data
    at = random.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]


def _number(random: Random, data: bytes, _other: bytes) -> bytes:
    form = random.choice(FORMATS)
    size = struct.calcsize(form)
    if len(data) < size:
        return data
    at = random.randrange(len(data) - size + 1)
    bits = 8 * size - 1
    value = random.choice(NUMBERS)
    value = ((value + (1 << bits)) % (1 << bits + 1)) - (1 << bits)
    return data[:at] + struct.pack(form, value) + data[at + size :]


def _nudge(random: Random, data: bytes, _other: bytes) -> bytes:
    """Change a number slightly."""
    form = random.choice(FORMATS)
    size = struct.calcsize(form)
    if len(data) < size:
        return data
    at = random.randrange(len(data) - size + 1)
    bits = 8 * size - 1
    value = struct.unpack_from(form, data, at)[0] + random.choice((-8, -4, -1, 1, 4, 8, 20))
    value = ((value + (1 << bits)) % (1 << bits + 1)) - (1 << bits)
    return data[:at] + struct.pack(form, value) + data[at + size :]


def _cut(random: Random, data: bytes, _other: bytes) -> bytes:
    start, end = _place(random, data)
    return data[:start] + data[end:]


def _truncate(random: Random, data: bytes, _other: bytes) -> bytes:
    return data[: random.randint(0, len(data))]


def _repeat(random: Random, data: bytes, _other: bytes) -> bytes:
    start, end = _place(random, data)
    return data[:end] + data[start:end] + data[end:]


def _fill(random: Random, data: bytes, _other: bytes) -> bytes:
    start, end = _place(random, data)
    return data[:start] + bytes([random.choice((0, 0, 0xFF, 0x41))]) * (end - start) + data[end:]


def _scramble(random: Random, data: bytes, _other: bytes) -> bytes:
    start, end = _place(random, data)
    return data[:start] + random.randbytes(end - start) + data[end:]


def _move(random: Random, data: bytes, _other: bytes) -> bytes:
    """Move a piece over another one of the same size."""
    start, end = _place(random, data)
    to = random.randint(0, len(data) - (end - start))
    return data[:to] + data[start:end] + data[to + end - start :]


def _cross(random: Random, data: bytes, other: bytes) -> bytes:
    return data[: random.randint(0, len(data))] + other[random.randint(0, len(other)) :]


_DAMAGES: tuple[Callable[[Random, bytes, bytes], bytes], ...] = (
    _flip,
    _flip,
    _number,
    _number,
    _nudge,
    _nudge,
    _cut,
    _truncate,
    _repeat,
    _fill,
    _scramble,
    _move,
    _cross,
)


# Frames: the options, the payload or the whole frame of any operation is damaged, and sent to the writer and query
# roles of a running group. If only a part is damaged, the header's sizes fit it, so that later checks are reached.
# Answers are discarded.


FRAMES_PER_CONNECTION: Final = 50
CHECK_EVERY: Final = 2000
BODIES: Final = (b"first", b"second body", b"")
LENGTHS: Final = struct.pack("<3I", *map(len, BODIES))
KEYS: Final = struct.pack("<3H", 2, 2, 5) + b"k1k2k3 k4"
TAGS: Final = struct.pack("<3H", 1, 1, 0) + b"ab"
SHARDING: Final = struct.pack("<3H", 2, 0, 3) + b"\xc3\xa9abc"
PROPERTIES: Final = struct.pack("<3H", 8, 8, 8) + b"KEYS\x01k1\x02" * 3
BORN_TIMES: Final = struct.pack("<3q", 1_700_000_000_000, 0, -1)


def appends() -> list[tuple[FrameOptions, bytes]]:
    """Frames of three messages with every kind of column."""
    data = LENGTHS + b"".join(BODIES)
    size = sum(map(len, BODIES))

    def frame(columns: bytes = b"", **changes: Any) -> tuple[FrameOptions, bytes]:
        given: dict[str, Any] = {"topic": "fuzzed", "count": 3, "bodies_bytes": size} | changes
        return operations.AppendRequest(**given), data + columns

    return [
        frame(unique_prefix="0A" * 14, tag="t", gap_after_keys=b"name\x01value\x02"),
        frame(KEYS + TAGS, keys_bytes=9, tags_bytes=2, unique_prefix="0B" * 14),
        frame(PROPERTIES, properties_bytes=24),
        frame(
            BORN_TIMES + struct.pack("<3i", 0, 1, 7) + struct.pack("<3i", 0, -1, 5),
            has_born=True,
            has_queues=True,
            queue_id=-2,
            has_flags=True,
        ),
        frame(batch=True, queue_id=1),
        frame(delay_level=3),
        frame(deliver_at_ms=1 << 45),
        frame(wait=False, born_host=bytes(20)),
        frame(SHARDING, sharding_bytes=5, unique_prefix="0C" * 14, gap_before_unique=b"name\x01value\x02"),
        frame(PROPERTIES + SHARDING, properties_bytes=24, sharding_bytes=5),
    ]


def messages() -> list[tuple[FrameOptions, bytes]]:
    """Frames of messages in MessagePack: with every field that is read, and with fields that are refused."""
    given = (
        [Message("fuzzed", b"first", "tag", ("k1", "k2")), Message("fuzzed", b"second" * 60, keys=["k" * 40])],
        [Message("fuzzed", b"", queue_id=1, flag=-7, born_timestamp_ms=1 << 40), Message("fuzzed", b"x", queue_id=7)],
        [Message("fuzzed", b"", sharding_key="\xe9"), Message("fuzzed", b"", properties={"name": "value"})],
    )
    encode = msgspec.msgpack.Encoder().encode
    return [(operations.AppendRequest("fuzzed", len(each), unique_prefix="0D" * 14), encode(each)) for each in given]


VALID_FRAMES: Final[dict[str, list[tuple[Operation, FrameOptions, bytes]]]] = {
    WRITER: [
        *((Operation.APPEND, *append) for append in appends() * 2),
        *((Operation.APPEND_MESSAGES, *append) for append in messages() * 3),
        (Operation.CREATE_TOPIC, operations.CreateTopicRequest("made", 4), b""),
        (Operation.DELETE_TOPIC, operations.DeleteTopicRequest("made"), b""),
        (Operation.PING, Empty(), b""),
    ],
    QUERY: [
        (Operation.PULL, operations.PullRequest("fuzzed", 0, 0, tags=["a"]), b""),
        (Operation.PULL, operations.PullRequest("fuzzed", 0, 1 << 40, timeout_ms=50), b""),
        (Operation.PULL, operations.PullRequest("fuzzed", 1, 0, sql="a BETWEEN 1 AND 5 OR b IS NOT NULL"), b""),
        (Operation.GET, operations.GetRequest("7F000001000000000000000000000000"), b""),
        (Operation.GET, operations.GetRequest("0A" * 14 + "0000", "fuzzed"), b""),
        (Operation.BY_KEY, operations.ByKeyRequest("fuzzed", "k1", 0, 1 << 60), b""),
        (Operation.BY_TAG, operations.ByTagRequest("fuzzed", "a", 0, 1 << 60), b""),
        (Operation.RANGE, operations.RangeRequest("fuzzed", 0, 1 << 60, ["a"], cursor=[0, 0]), b""),
        (Operation.COUNT, operations.CountRequest("fuzzed", sql="a CONTAINS 'x'"), b""),
        (Operation.OFFSET_AT, operations.OffsetAtRequest("fuzzed", 0, 1_700_000_000_000), b""),
        (Operation.QUEUES, operations.QueuesRequest("fuzzed"), b""),
        (Operation.TOPICS, Empty(), b""),
        (Operation.QUERY_MESSAGE, operations.QueryMessageRequest("fuzzed", "k1", 32, 0, 1 << 60), b""),
        (Operation.SCAN, operations.ScanRequest("fuzzed", 0, property_name="name", body_contains=b"first"), b""),
        (Operation.STATS, Empty(), b""),
        (Operation.HEALTH, Empty(), b""),
        (Operation.GROUP_JOIN, operations.GroupJoinRequest("group", ["fuzzed"], holding=[("fuzzed", 0, 1)]), b""),
        (Operation.GROUP_HEARTBEAT, operations.GroupHeartbeatRequest("group", "0011223344556677", 1), b""),
        (Operation.GROUP_RELEASE, operations.GroupReleaseRequest("group", "0011223344556677", 1), b""),
        (Operation.GROUP_LEAVE, operations.GroupLeaveRequest("group", "0011223344556677"), b""),
        (Operation.GROUP_COMMIT, operations.GroupCommitRequest("group", [("fuzzed", 0, -1, 1)]), b""),
        (Operation.GROUPS, Empty(), b""),
        (Operation.GROUP_INFO, operations.GroupRequest("group"), b""),
        (Operation.GROUP_RESET, operations.GroupResetRequest("group", [("fuzzed", 0, 1)]), b""),
        (Operation.GROUP_SETTINGS, operations.GroupSettingsRequest("group", 3), b""),
        (Operation.GROUP_DELETE, operations.GroupRequest("other"), b""),
        (Operation.GROUP_NACK, operations.GroupNackRequest("group", [("fuzzed", 0, 0)]), b""),
        (Operation.GROUP_RESEND, operations.GroupResendRequest("group", [0, 1]), b""),
        (Operation.GROUP_RECEIVE, operations.GroupReceiveRequest("group", ["fuzzed"], start="earliest"), b""),
        (Operation.GROUP_ACK, operations.GroupAckRequest("group", [("fuzzed", "0 1 2 3 4 5 6 7")]), b""),
        (Operation.GROUP_INVISIBLE, operations.GroupInvisibleRequest("group", "fuzzed", "0 1 2 3 4 5 6 7", 1000), b""),
        (Operation.TRANSACTION_END, operations.TransactionEndRequest("group", "fuzzed", "0A", 0, True), b""),
        (Operation.TRANSACTION_POLL, operations.TransactionPollRequest("group", timeout_ms=50), b""),
        (Operation.TRANSACTIONS, operations.TransactionsRequest("group", ["0A"]), b""),
        (Operation.TRANSACTION_CHECK, operations.TransactionCheckRequest([0, 7]), b""),
    ],
}
ENCODED: Final = {
    role: [(operation, encode_options(options), payload) for operation, options, payload in frames]
    for role, frames in VALID_FRAMES.items()
}
FRAME_PIECES: Final = [
    part for frames in ENCODED.values() for _, options, payload in frames for part in (options, payload)
]


class Frames:
    """A group that receives damaged frames."""

    def __init__(self, folder: Path) -> None:
        self._group = Group(folder / "store", max_queues=4096)
        self._group.start()
        self._pids = {role: self._group.pid(role) for role in words_of.ROLES}
        self._clients: dict[str, RawClient] = {}
        self._sent = itertools.count()
        self._good = 0
        for role in (WRITER, QUERY):
            self._check_intact_frames(role)

    def run(self, seed: int) -> None:
        """Send one frame. Raises on any effect other than an error for this frame."""
        random = Random(seed)
        role = random.choice((WRITER, QUERY))
        client = self._clients.get(role)
        if client is None:
            client = self._clients[role] = RawClient(self._group.paths.socket(role))
            client.sock.setblocking(False)
        sent = next(self._sent)
        gone = not self._exchange(client, damaged(random, role))
        if gone or sent % FRAMES_PER_CONNECTION == FRAMES_PER_CONNECTION - 1:
            self._clients.pop(role).sock.close()
        if sent % CHECK_EVERY == CHECK_EVERY - 1:
            self._check_group()

    def close(self) -> str:
        """Stop the group and check its store."""
        self._check_group()
        for client in self._clients.values():
            client.sock.close()
        self._group.wait_dispatched()
        assert self._group.stop() == 0
        flags = [part for name, value in self._group.options.items() for part in ("--set", f"{name}={value}")]
        command = [sys.executable, "-m", "mqproc", "store", "verify", str(self._group.store), "--json", *flags]
        verified = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        assert verified.returncode == 0, verified.stdout + verified.stderr
        assert_equals_rebuild(self._group)
        return ""

    def _exchange(self, client: RawClient, data: bytes) -> bool:
        """Send a frame and read available answers; False if the role closed the connection."""
        view = memoryview(data)
        with contextlib.suppress(BlockingIOError):
            while view:
                try:
                    view = view[client.sock.send(view) :]
                except (BrokenPipeError, ConnectionResetError):
                    return False
        try:
            while client.sock.recv(1 << 16):
                pass
        except BlockingIOError:
            # An incomplete send leaves the stream inside a frame: the next one needs a new connection.
            return not view
        except ConnectionResetError:
            return False
        return False

    def _check_group(self) -> None:
        """Check that all roles live, none had an unexpected error, and intact frames are served."""
        for role, pid in self._pids.items():
            assert self._group.pid(role) == pid, f"the {role} has died"
        for role in (WRITER, QUERY):
            assert not rejects(self._group, role)["INTERNAL"], f"the {role} says INTERNAL: see its log"
            with RawClient(self._group.paths.socket(role)) as client:
                assert client.serves(), f"the {role} does not serve"
        with self._group.client() as client:
            result = client.send("whole", b"%d" % self._good)
            wait_until(lambda: client.count("whole") == self._good + 1, what="the whole message")
            assert client.get(result.message_id).body == b"%d" % self._good
        self._good += 1

    def _check_intact_frames(self, role: str) -> None:
        """Check that no intact frame of the corpus is rejected as invalid."""
        for operation, options, payload in ENCODED[role]:
            with RawClient(self._group.paths.socket(role)) as client:
                client.request(operation, options, payload)
                assert client.frame() is not None, operation
        found = rejects(self._group, role)
        codes = ("BAD_MESSAGE", "BAD_FRAME", "BAD_PROPERTY", "BAD_FILTER", "UNKNOWN_COMMAND")
        assert not {code: found[code] for code in codes if found[code]}


def damaged(random: Random, role: str) -> bytes:
    """A frame of the corpus with damaged options, payload or bytes."""
    operation, options, payload = random.choice(ENCODED[role])
    way = random.random()
    if way < 0.45:
        options = damage(random, options, FRAME_PIECES)
    elif way < 0.8 and payload:
        payload = damage(random, payload, FRAME_PIECES)
    frame = b"".join(map(bytes, encode_frame(operation, 1, options, (payload,))))
    if way >= 0.9:
        return damage(random, frame[:HEADER_SIZE], FRAME_PIECES) + frame[HEADER_SIZE:]
    return damage(random, frame, FRAME_PIECES) if way >= 0.8 else frame


# Records: one damaged record between two intact ones; readers report damage, or return the stored content.
#
# A record's own CRC covers all of it. If damage removes the property with this CRC, no reader can know that it existed,
# as in records of RocketMQ before 5.1: then the body's CRC protects the body, and nothing protects the rest.


RECORDS_SEGMENT: Final = 1 << 14
STORE_EVERY: Final = 400
TOPIC: Final = "fuzzed"
PAIRS: Final = "KEYS\x01k1 k2\x02UNIQ_KEY\x01" + "0A" * 16 + "\x02TAGS\x01tag\x02"
HOST_V6: Final = host_bytes("2001:db8::1", 10911)
LOG_KINDS: Final[list[dict[str, Any]]] = [
    {"properties": PAIRS, "append_crc": True},
    {"properties": PAIRS},
    {"body": b"", "properties": PAIRS, "append_crc": True},
    {"body": b"", "append_crc": True},
    {"body": b"x"},
    {"topic": "t" * 130, "properties": PAIRS, "born_host": HOST_V6, "store_host": HOST_V6, "append_crc": True},
    {"properties": PAIRS, "store_host": HOST_V6, "sys_flag": 1 << 3, "prepared_transaction_offset": 77},
    {"body": bytes(range(256)) * 12, "properties": "ä\x01€\x02" + PAIRS, "reconsume_times": 3, "append_crc": True},
]


class Log(NamedTuple):
    """A segment without its zeros; the record in [start, stop) is to be damaged."""

    data: bytes
    start: int
    stop: int


def make_log(number: int, kind: dict[str, Any]) -> Log:
    """Three records; the damaged one is at another offset in each log."""
    data = b""
    borders = [0]
    for queue_offset, fields in enumerate(({}, kind, {})):
        given: dict[str, Any] = {"topic": TOPIC, "body": b"body %d" % queue_offset * (9 + number), "append_crc": True}
        if fields:
            given = {"topic": TOPIC, "body": b"the damaged one's body"} | fields
        times = {"born_timestamp_ms": 1_700_000_000_000, "store_timestamp_ms": 1_700_000_000_000 + queue_offset}
        # Queues of their own: queue offsets must not depend on other records.
        place = {"queue_id": queue_offset, "queue_offset": 0, "physical_offset": len(data)}
        data += encode_record(**(given | times | place))
        borders.append(len(data))
    return Log(data, borders[1], borders[2])


LOGS: Final = [make_log(number, kind) for number, kind in enumerate(LOG_KINDS)]
RECORD_PIECES: Final = [log.data[log.start : log.stop] for log in LOGS] + [b"\0" * 64, PAIRS.encode()]


class Records:
    """Damaged records; each `STORE_EVERY`th is in a store that is read, started and verified."""

    def __init__(self, folder: Path) -> None:
        self._store = folder / "store"
        self._options = Options(
            mapped_file_size_commit_log=RECORDS_SEGMENT,
            mapped_file_size_consume_queue=200,
            max_index_num=100,
            max_hash_slot_num=10,
            max_message_size=4096,
            max_queues=64,
        )

    def run(self, seed: int) -> None:
        """Check one damaged record. Raises on a violation."""
        random = Random(seed)
        log = random.choice(LOGS)
        original = log.data[log.start : log.stop]
        found = damage(random, original, RECORD_PIECES)
        # Its neighbours keep their places.
        found = found[: len(original)] + original[len(found) :]
        data = log.data[: log.start] + found + log.data[log.stop :]
        self.check(log, data)
        if seed % STORE_EVERY == 0:
            self.check_in_store(log, data)

    def close(self) -> str:
        """Nothing left to check."""
        return ""

    def check(self, log: Log, data: bytes) -> None:
        """Check that kernel, twin and decoders agree, and that valid records are as stored."""
        found, original = data[log.start : log.stop], log.data[log.start : log.stop]
        view = np.frombuffer(data, np.uint8).copy()
        size = checked_size(view, log.start, len(view), log.start, VERIFY_CRCS)
        check = check_record(data, log.start)
        whole = (
            check.success
            and check_record(data, log.start, check_property_crc=True).success
            and _place_in(found) == log.start
        )
        if size <= 0:
            assert not whole, f"the kernel says {size}"
            assert found != original
            _decode_anything(found)
            return
        assert (check.success, check.size) == (True, size), check
        assert _place_in(found) == log.start
        _is_what_was_stored(data[log.start : log.start + size], original)
        _decoders_agree(data[log.start : log.start + size])

    def check_in_store(self, log: Log, data: bytes) -> None:
        """Check that a start, a reader and `store verify` agree, and serve the record's neighbours.

        Undetectable damage may claim a neighbour's place in its queue; then only the absence of errors is checked.
        """
        shutil.rmtree(self._store, ignore_errors=True)
        folder = self._store / "commitlog"
        folder.mkdir(parents=True)
        (folder / f"{0:020d}").write_bytes(data.ljust(RECORDS_SEGMENT, b"\0"))
        view = np.frombuffer(data, np.uint8).copy()
        served = checked_size(view, log.start, len(view), log.start, VERIFY_CRCS) > 0
        found = recover(self._store, self._options, clean=False)
        units = {offset: queue for queue in found.queues() for offset, size, _ in found.units(*queue).values() if size}
        of_log = self._read(units)
        if not served or data == log.data:
            kept = {0, log.stop} | ({log.start} if served else set())
            assert set(units) >= kept, found.said
            assert {message.physical_offset for message in self._messages} == kept
            assert bool(of_log) != served, (of_log, found.said)

    def _read(self, units: dict[int, tuple[str, int]]) -> list[str]:
        """Compare pulled messages with the log; the findings of `store verify` in the log."""
        self._messages: list[StoredMessage] = []
        with StoreReader(self._store, self._options) as reader:
            for topic, queue_id in set(units.values()):
                with contextlib.suppress(CorruptStoreError):
                    self._messages += reader.pull(topic, queue_id, 0).messages
        data = (self._store / "commitlog" / f"{0:020d}").read_bytes()
        assert all(message == decode_record(data, message.physical_offset) for message in self._messages)
        verified = verify_store(StoreIO(), StorePaths(self._store), self._options, jobs=1, is_mine=True)
        return [finding.file for finding in verified.findings.listed if finding.file.startswith("commitlog/")]


def _place_in(found: bytes) -> int:
    """The physical offset in a record."""
    return int.from_bytes(found[record.PHYSICAL_OFFSET : record.PHYSICAL_OFFSET + 8], "big", signed=True)


def _is_what_was_stored(found: bytes, original: bytes) -> None:
    tail = found[-record.CRC_TAIL_SIZE :]
    if tail.startswith(record.CRC_NAME) and tail.endswith(b"\x02"):
        assert found == original, "another message than the one that was stored"
    else:
        assert decode_record(found).body == decode_record(original).body, "another body than the one that was stored"


def _decoders_agree(found: bytes) -> None:
    """Compare objects decoded here, objects of the kernel, and columns."""
    try:
        (eager,) = decode_records(found)
    except CorruptStoreError:
        _decode_anything(found)
        return
    array = packed([memoryview(found)], 2 * len(found) + 64)
    assert array is None or messages_of(array) == [eager]
    columns = columns_of(found, 1, ALL_COLUMNS)
    for name in ("queue_id", "queue_offset", "physical_offset", "flag", "reconsume_times", "store_timestamp_ms"):
        assert columns[name][0] == getattr(eager, name), name
    offsets, body = columns["body"]
    assert bytes(body[offsets[0] : offsets[1]]) == eager.body


def _decode_anything(found: bytes) -> None:
    """Decode unchecked bytes: a result or reported damage, no other error."""
    with contextlib.suppress(CorruptStoreError):
        decode_records(found)
    with contextlib.suppress(CorruptStoreError):
        messages_of(found)
    if (array := packed([memoryview(found)], 2 * len(found) + 64)) is not None:
        messages_of(array)
    with contextlib.suppress(CorruptStoreError):
        columns_of(found, -1, ALL_COLUMNS)


# Files of a stopped store with every feature: topics, one of them deleted, keys, batches, groups with retries and dead
# letters, messages received by simple consumers, transactions in every state, delayed messages of both kinds, and
# rolled files of every kind.


# Not read by a start, or always recreated. `SharedFiles` covers lock and control.
UNTOUCHED = ("lock", "mqproc/control", "mqproc/errors", "log.jsonl")
BATCH = 40
STORE_SEGMENT = 1 << 17
# Kinds of damage and their frequency: to the bytes of a file, beside it, or in its place.
WAYS = {"bytes": 0.8, "empty": 0.05, "gone": 0.05, "stray": 0.05, "folder": 0.05}
TIMER_LOG_FILE = 4096
DELETED_TOPIC = "deleted"


Harm = tuple[str, Callable[[Path], object]]
"""A pattern below the store's folder, and the damage to the first file that matches."""


class Files:
    """The intact store, and damaged copies of it."""

    def __init__(self, folder: Path) -> None:
        self._copy = folder / "damaged"
        self.root, self.options = make_store(folder / "whole")
        with StoreReader(self.root, self.options) as reader:
            self._messages = list(reader.scan())
        self._bytes = {
            path.name: path.read_bytes() for path in sorted((self.root / "commitlog").iterdir()) if path.is_file()
        }
        self._files = sorted(
            path.relative_to(self.root)
            for path in self.root.rglob("*")
            if path.is_file() and str(path.relative_to(self.root)) not in UNTOUCHED
        )
        self._folders = sorted({path.parent for path in self._files})
        self._reached: set[tuple[Path, str]] = set()

    def run(self, seed: int) -> None:
        """Check one damaged store. Raises on a violation."""
        random = Random(seed)
        self._take_copy()
        for _ in range(random.choice((1, 1, 1, 2, 3))):
            self._harm(random)
        vouched = random.random() < 0.5
        self._check_copy(vouched=vouched, clean=random.random() < 0.5)

    def replay(self, harms: Sequence[Harm], *, vouched: bool, clean: bool) -> None:
        """Check a store with the given damage, each to the first file that matches its pattern."""
        self._take_copy()
        for pattern, harm in harms:
            found = sorted(self._copy.glob(pattern))
            assert found, f"the store has no {pattern}"
            harm(found[0])
        self._check_copy(vouched=vouched, clean=clean)

    def _take_copy(self) -> None:
        shutil.rmtree(self._copy, ignore_errors=True)
        shutil.copytree(self.root, self._copy, copy_function=_copy_sparse)
        self.harms: list[str] = []

    def _check_copy(self, *, vouched: bool, clean: bool) -> None:
        """Read, start, read and start the damaged copy."""
        if not vouched:
            # Without marks for queues and index, each unit and entry is compared with the log.
            shutil.rmtree(self._copy / "mqproc")
        log = {name: self._copy / "commitlog" / name for name in self._bytes}
        harmed = {name: path.read_bytes() if path.is_file() else b"" for name, path in log.items()}
        # A deleted topic must stay deleted, unless damage removed the record of its deletion.
        intact = [
            message for message in self._messages if self._is_intact(message, harmed) and message.topic != DELETED_TOPIC
        ]
        self._read()
        found = recover(self._copy, self.options, clean=clean)
        if not vouched:
            self._check(found, intact)
            self._check_keys(intact, clean=clean)
        self._read()
        self._check_second_recovery()

    def close(self) -> str:
        """Nothing left to check."""
        folders, ways = ({each[at] for each in self._reached} for at in (0, 1))
        return f"files of {len(folders)} of {len(self._folders)} folders, {len(ways)} of {len(WAYS)} ways"

    def _harm(self, random: Random) -> None:
        """Damage a file, each folder equally likely; or cut, empty, remove, copy or misplace it."""
        folder = random.choice(self._folders)
        path = self._copy / random.choice([each for each in self._files if each.parent == folder])
        if not path.is_file():
            return  # Removed by an earlier damage.
        data = path.read_bytes()
        way = random.choices(list(WAYS), list(WAYS.values()))[0]
        self.harms.append(f"{path.relative_to(self._copy)} {way}")
        self._reached.add((folder, way))
        if way == "bytes":
            other = (self.root / random.choice(self._files)).read_bytes()
            path.write_bytes(self._damaged(random, path, data, other))
        elif way == "empty":
            path.write_bytes(b"")
        elif way == "gone":
            path.unlink()
        elif way == "stray":
            shutil.copy(path, path.with_name(random.choice(("stray", "00000000000000000001", f"{path.name}.tmp"))))
        else:
            path.unlink()
            path.mkdir()

    def _damaged(self, random: Random, path: Path, data: bytes, other: bytes) -> bytes:
        """Damage bytes; rarely the length of a mapped file, so that contents are tested too."""
        found = damage(random, data, [other])
        if path.parent.name in ("config", "marks") or random.random() < 0.2:
            return found
        return found[: len(data)] + data[len(found) :]

    def _is_intact(self, message: StoredMessage, harmed: dict[str, bytes]) -> bool:
        """Whether all bytes of a message's record are as stored."""
        for name, data in self._bytes.items():
            at = message.physical_offset - int(name)
            if 0 <= at < len(data):
                return harmed[name][at : at + message.size] == data[at : at + message.size]
        return False

    def _is_record(self, physical_offset: int) -> bool:
        """Whether a record that belongs there begins there, intact by its body's CRC."""
        path = self._copy / "commitlog" / f"{physical_offset // STORE_SEGMENT * STORE_SEGMENT:020d}"
        data = path.read_bytes()[physical_offset % STORE_SEGMENT :] if path.is_file() else b""
        at = record.PHYSICAL_OFFSET
        check = check_record(data)
        return check.success and int.from_bytes(data[at : at + 8], "big") == physical_offset

    def _read(self) -> None:
        """Read the damaged store: only reported damage is allowed."""
        with contextlib.suppress(CorruptStoreError), StoreReader(self._copy, self.options) as reader:
            for queue in reader.queues():
                with contextlib.suppress(CorruptStoreError):
                    reader.pull(queue.topic, queue.queue_id, queue.min_offset, BATCH)
            with contextlib.suppress(CorruptStoreError):
                sum(1 for _ in reader.messages())
            for message in self._messages[::50]:
                if message.keys:
                    with contextlib.suppress(CorruptStoreError):
                        reader.by_key(message.topic, message.keys[0])
        io, paths = StoreIO(), StorePaths(self._copy)
        with contextlib.suppress(CorruptStoreError):
            DelayOffsets.load(io, paths)
        with contextlib.suppress(CorruptStoreError):
            check_file(io, paths)

    def _check(self, found: Recovered, intact: list[StoredMessage]) -> None:
        """Check that exactly the intact records are in their queues."""
        assert found.dispatched == found.end, "dispatch is not at the end"
        units = {
            (topic, queue_id, queue_offset): unit
            for (topic, queue_id), of_queue in found.units_of(found.queues()).items()
            for queue_offset, unit in of_queue.items()
        }
        for message in intact:
            place = message.topic, message.queue_id, message.queue_offset
            assert message.physical_offset < found.end, f"the log ends at {found.end}, before {place}"
            assert units.get(place, (0, 0, 0))[:2] == (message.physical_offset, message.size), f"{place} is not there"
        offsets = {message.physical_offset for message in intact}
        others = [unit for unit in units.values() if unit[1] != FILLER_SIZE and unit[0] not in offsets]
        # Bytes without a checksum may differ.
        strangers = [unit for unit in others if not self._is_record(unit[0])]
        assert not strangers, f"queues have units without a record: {strangers[:3]}"

    def _check_keys(self, intact: list[StoredMessage], *, clean: bool) -> None:
        """Check that intact records are found by their keys.

        After an orderly stop the contents of the index files are trusted: there a report by `store verify` is enough.
        """
        with StoreReader(self._copy, self.options) as reader:
            for message in intact[::20]:
                found_by = [each.physical_offset for key in message.keys for each in reader.by_key(message.topic, key)]
                found = found_by.count(message.physical_offset) == len(message.keys)
                assert found or (clean and self._index_damage()), f"{message.keys} lead to {found_by}"

    def _index_damage(self) -> list[str]:
        verified = verify_store(StoreIO(), StorePaths(self._copy), self.options, jobs=1, is_mine=True)
        return [finding.file for finding in verified.findings.listed if finding.file.startswith("index/")]

    def _check_second_recovery(self) -> None:
        before = contents(self._copy)
        io = RecordingIO()
        recover(self._copy, self.options, clean=True, io=io)
        assert io.lasting_calls == [], "a second recovery changed something"
        assert contents(self._copy) == before, "a second recovery changed something"


def make_store(root: Path) -> tuple[Path, Options]:
    """A stopped store with every feature."""
    group = Group(
        root,
        mapped_file_size_commit_log=STORE_SEGMENT,
        max_index_num=400,
        max_hash_slot_num=50,
        mapped_file_size_consume_queue=800,
        mapped_file_size_timer_log=TIMER_LOG_FILE,
        max_queues=256,
    )
    group.start()
    with group.client() as client:
        for number in range(12):
            keys = [f"k{number}-{each}" for each in range(BATCH)]
            client.send_batch(f"topic-{number % 3}", [b"body %d" % each * 10 for each in range(BATCH)], keys=keys)
        client.send_batch("topic-1", [b"whole", b"batch"], batch=True, queue_id=0)
        for level in (1, 5, 18):
            client.send("topic-0", b"later", delay_level=level)
        client.send("topic-0", b"much later", delay=3600)
        client.send_many([Message("topic-2", b"large" * 2000, keys=["large"]), Message("other", b"")])
        group.wait_dispatched()
        with client.consumer("group", "topic-0", start="earliest") as consumer:
            messages = consumer.receive(20, timeout=10)
            consumer.nack(*messages[:3])
            consumer.nack(messages[3], delay_level=-1)
            consumer.ack(*messages[4:])
        receive_some(client)
        end_some(client)
        client.send_batch(DELETED_TOPIC, [b"gone"] * BATCH, keys=["gone"] * BATCH)
        group.wait_dispatched()
        client.delete_topic(DELETED_TOPIC)
        topics = {topic.topic for topic in client.topics()}
        assert {SCHEDULE_TOPIC, TIMER_TOPIC, HALF_TOPIC, REVIVE_TOPIC} <= topics
        assert DELETED_TOPIC not in topics
        wait_until(lambda: group.words()["delivered_messages"] >= 1, what="the first message whose time comes")
    group.wait_dispatched()
    assert group.stop() == 0
    paths = StorePaths(root)
    assert paths.delay_offsets.exists()
    assert paths.timer_check.exists()
    assert paths.deleted_topics.exists()
    return root, Options(**group.options)


def receive_some(client: Client) -> None:
    """Create check points: open, partly acknowledged, and done."""
    receiver = client.simple_consumer("receivers", "topic-1", start="earliest")
    for done in (0, 2, 5):
        received = receiver.receive(5, 3600, timeout=10)
        assert len(received) == 5
        assert receiver.ack(*received[:done]) == done


def end_some(client: Client) -> None:
    """Create transactions: committed, rolled back, and open."""
    for body in (b"committed", b"rolled back", b"open"):
        message = Message("topic-2", body, keys=["transaction"])
        with client.transaction("producers", message, check_immunity_time=3600) as transaction:
            if body == b"open":
                transaction.leave()
            elif body == b"rolled back":
                transaction.rollback()


def _copy_sparse(source: str, target: str) -> None:
    """Copy a file with its holes: the timer wheel is large and empty."""
    with open(source, "rb") as old, open(target, "wb") as new:
        size = os.fstat(old.fileno()).st_size
        new.truncate(size)
        for start, stop in written_ranges(old.fileno(), size):
            os.pwrite(new.fileno(), os.pread(old.fileno(), stop - start, start), start)
    shutil.copystat(source, target)


# Damaged RocketMQ config files: they are read, or rejected with an error.


VALID_JSON = [
    text.encode()
    for text in (
        '{"offsetTable":{"orders@billing":{0:17,1:4,-2:9},"%RETRY%billing@billing":{0:3}},"dataVersion":'
        '{"counter":5,"stateVersion":0,"timestamp":1700000000000}}',
        '{"offsetTable":{1:10,2:0,18:7}}',
        '{"topicConfigTable":{"orders":{"attributes":{"+message.type":"NORMAL"},"order":false,"perm":6,"readQueueNums":8,'
        '"topicFilterType":"SINGLE_TAG","topicName":"orders","topicSysFlag":0,"writeQueueNums":8}},"dataVersion":{}}',
        '{"subscriptionGroupTable":{"a \\"quoted\\" group":{"groupName":"g","retryMaxTimes":16,"retryQueueNums":1}}}',
        '{"text":"{0:1,2:3}","list":[{0:[1,2,{3:4}]},null,true,-1.5e3],"\\u00e4":"\\\\"}',
    )
]


class JsonFiles:
    """Damaged files in a folder, one after the other."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "consumerOffset.json"
        for data in VALID_JSON:
            self._path.write_bytes(data)
            assert rocketmq_json.load(StoreIO(), self._path)[0], "intact files must be readable"

    def run(self, seed: int) -> None:
        """Check one damaged file. Raises unexpected errors."""
        random = Random(seed)
        data = random.choice((b"[", b'{"a":')) * 100_000 if seed % 1000 == 999 else random.choice(VALID_JSON)
        self.check(damage(random, data, VALID_JSON))

    def check(self, data: bytes) -> None:
        """Read a file with these bytes."""
        self._path.write_bytes(data)
        try:
            rocketmq_json.load(StoreIO(), self._path)
        except CorruptStoreError:
            return

    def close(self) -> str:
        """Nothing left to check."""
        return ""


# Damaged or foreign files in place of `mqproc/control` and `lock`, which the processes of a group share.
#
# Nothing in them is durable. A tool reports in one line their contents, or that it cannot read them. A start recreates
# them, or rejects a non-file in one line.


PID = 4242
READERS = (("stat",), ("stat", "--json"), ("metrics", "--check"))
TOOLS = (
    *READERS,
    ("top", "--once", "--interval", "0.01"),
    ("status",),
    ("status", "--json"),
    ("store", "info"),
    ("store", "retention"),
    ("down",),
)
HEADER = {layout.HEADER_MAGIC: layout.MAGIC, layout.HEADER_VERSION: layout.VERSION}
MADE_WITH = {
    layout.EPOCH,
    layout.STORE_ID,
    layout.SUPERVISOR_PID,
    layout.PID_NAMESPACE,
    layout.GROUP_STARTED_MS,
    layout.SUPERVISOR_HEARTBEAT_NS,
    *HEADER,
}


class SharedFiles:
    """A used store with damaged shared files, both as left by a stop and as left by a kill."""

    def __init__(self, folder: Path) -> None:
        group = Group(folder / "store", max_queues=256).start()
        with group.client() as client:
            client.send_batch("topic", [b"body"] * 10)
            group.wait_dispatched()
        self.paths = group.paths
        killed = self.paths.control.read_bytes()
        assert group.stop() == 0
        self._controls = [self.paths.control.read_bytes(), killed]
        self._elsewhere = folder / "elsewhere"
        self._elsewhere.write_bytes(killed)
        self._reached: set[tuple[str, ...]] = set()

    def run(self, seed: int) -> None:
        """Check one pair of files. Raises on a violation."""
        random = Random(seed)
        self.lay(self.paths.control, self._harmed(random, random.choice(self._controls)))
        self.lay(self.paths.lock, self._harmed(random, CONTENT) if random.random() < 0.3 else _as_file(CONTENT))
        tool = random.choice(TOOLS)
        self._reached.add(tool)
        self.check(tool)

    def close(self) -> str:
        """Nothing left to check."""
        return f"{len(self._reached)} of {len(TOOLS)} tools"

    def lay(self, path: Path, harm: Callable[[Path], object]) -> None:
        """Put the damage in the place of a file."""
        _remove(path)
        harm(path)

    def _harmed(self, random: Random, data: bytes) -> Callable[[Path], None]:
        way = random.random()
        if way < 0.6:
            return _as_file(_words_damaged(random, data))
        if way < 0.9:
            return _as_file(damage(random, data, self._controls))
        return random.choice((_remove, _as_file(b""), Path.mkdir, lambda path: path.symlink_to(self._elsewhere)))

    # Invariants

    def check(self, tool: tuple[str, ...]) -> None:
        """Run a tool, a lock request and a start."""
        can_be_read = self._can_be_read()
        self._call(tool, can_be_read=can_be_read)
        if self._may_start():
            self._lock()
            self._recreate()

    def _may_start(self) -> bool:
        refused = _error_of(StoreAccessError, lambda: prepare_folder(StoreIO(), self.paths))
        odd = [path for path in (self.paths.lock, self.paths.control) if path.is_dir() or path.is_symlink()]
        assert not refused or any(str(path) in refused for path in odd), refused
        assert "\n" not in refused
        return not refused

    def _can_be_read(self) -> bool:
        unreadable = (CorruptStoreError, NotRunningError)
        said = _error_of(unreadable, lambda: Control.open(StoreIO(), self.paths).close())
        assert not said or str(self.paths.control) in said, said
        return not said

    def _call(self, tool: tuple[str, ...], *, can_be_read: bool) -> None:
        done = call(*tool, "--store", self.paths.root)
        assert "Traceback" not in done.err, (tool, done)
        if done.code:
            assert done.err.count("\n") == 1, (tool, done)
        if tool in READERS and not can_be_read:
            assert done.code, (tool, done)
            assert str(self.paths.control) in done.err, (tool, done)

    def _lock(self) -> None:
        """Check that the lock is free whatever it contains, and that its holder is reported."""
        io = StoreIO()
        assert self.paths.lock.is_dir() or lock_holder(io, self.paths) is None
        lock = StoreLock.acquire(io, self.paths)
        try:
            assert self.paths.lock.read_bytes() == CONTENT
            holder = lock_holder(io, self.paths)
            assert holder is not None
            assert str(holder)
            refused = _error_of(StoreLockedError, lambda: StoreLock.acquire(io, self.paths, patience_s=0.0).close())
            assert "is in use by" in refused, "the lock was taken twice"
        finally:
            lock.close()

    def _recreate(self) -> None:
        """Check that only the epoch and the store id are kept, if readable."""
        old = self._identity()
        control = Control.create(StoreIO(), self.paths, Clock(), PID)
        try:
            found = dict(enumerate(memoryview(self.paths.control.read_bytes()).cast("q")))
        finally:
            control.close()
        assert {index: found[index] for index in HEADER} == HEADER
        assert found[layout.SUPERVISOR_PID] == PID
        assert found[layout.PID_NAMESPACE] == pid_namespace()
        assert 0 < found[layout.EPOCH] <= 1 << 31
        assert 0 < found[layout.STORE_ID] < 1 << 62
        if old is not None:
            assert (found[layout.EPOCH], found[layout.STORE_ID]) == (old[0] + 1, old[1])
        others = {index: word for index, word in found.items() if word and index not in MADE_WITH}
        assert not others, f"words were taken over: {others}"
        Control.open(StoreIO(), self.paths).close()
        assert not list(self.paths.own.glob("*.tmp"))

    def _identity(self) -> tuple[int, int] | None:
        """Epoch and store id of an intact file with valid values."""
        if not self._can_be_read():
            return None
        control = Control.open(StoreIO(), self.paths)
        try:
            epoch, store_id = control.load(layout.EPOCH), control.load(layout.STORE_ID)
        finally:
            control.close()
        return (epoch, store_id) if 0 < epoch < 1 << 31 and 0 < store_id < 1 << 62 else None


def _error_of(kinds: type[Exception] | tuple[type[Exception], ...], act: Callable[[], None]) -> str:
    """Text of an error of these kinds; empty without an error."""
    try:
        act()
    except kinds as error:
        return str(error)
    return ""


def _words_damaged(random: Random, data: bytes) -> bytes:
    """Change some words, but not magic, version and length, so that the words are read."""
    words = memoryview(bytearray(data)).cast("q") if len(data) % layout.WORD_SIZE == 0 else None
    if words is None or len(words) < layout.FILE_SIZE // layout.WORD_SIZE:
        return damage(random, data)
    named = [word.index for word in layout.WORDS.values() if word.index not in HEADER]
    for index in random.sample(named, random.choice((1, 3, 20, len(named)))):
        words[index] = random.choice(
            (random.getrandbits(63), -random.getrandbits(63) - 1, -1, 0, 1, random.getrandbits(20))
        )
    return words.tobytes()


def _as_file(data: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(data)

    return write


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
