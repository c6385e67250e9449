"""Fuzz targets for frames and records, and mutations of bytes.

Frames: the options, the payload or the whole frame of any operation is damaged, and sent to the writer and query roles
of a running group. If only a part is damaged, the header's sizes fit it, so that later checks are reached. Answers are
discarded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

import numpy as np

from mqproc import StoreReader
from mqproc.config.options import Options
from mqproc.errors import CorruptStoreError
from mqproc.io.store_io import StoreIO
from mqproc.kernels.record_check import VERIFY_CRCS, checked_size
from mqproc.kernels.record_decode import ALL_COLUMNS
from mqproc.layout import control as words_of
from mqproc.layout import record
from mqproc.layout.control import QUERY, WRITER
from mqproc.layout.frame import HEADER_SIZE
from mqproc.layout.record_codec import (
    check_record,
    decode_record,
    decode_records,
    encode_record,
    host_bytes,
    lazy_records,
)
from mqproc.paths import StorePaths
from mqproc.store.verify.verifier import verify_store
from mqproc.types import StoredMessage
from mqproc.wire.codec import FrameOptions
from mqproc.wire.frames import encode_frame, encode_options
from mqproc.wire.operations import Empty, Operation, groups, log
from mqproc.wire.operations import groups as pop
from mqproc.wire.operations import groups as transactions
from tests.bad_input.scene import RawClient, rejects
from tests.support.group import Group, wait_until
from tests.support.group_checks import assert_equals_rebuild
from tests.support.records import columns_of
from tests.support.store_checks import recover

# Mutations of bytes, chosen by a seeded random generator.


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


FRAMES_PER_CONNECTION: Final = 50
LOOK_EVERY: Final = 2000
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
        return log.AppendRequest(**given), data + columns

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


VALID_FRAMES: Final[dict[str, list[tuple[Operation, FrameOptions, bytes]]]] = {
    WRITER: [
        *((Operation.APPEND, *append) for append in appends() * 2),
        (Operation.CREATE_TOPIC, log.CreateTopicRequest("made", 4), b""),
        (Operation.DELETE_TOPIC, log.DeleteTopicRequest("made"), b""),
        (Operation.PING, Empty(), b""),
    ],
    QUERY: [
        (Operation.PULL, log.PullRequest("fuzzed", 0, 0, tags=["a"]), b""),
        (Operation.PULL, log.PullRequest("fuzzed", 0, 1 << 40, timeout_ms=50), b""),
        (Operation.PULL, log.PullRequest("fuzzed", 1, 0, sql="a BETWEEN 1 AND 5 OR b IS NOT NULL"), b""),
        (Operation.GET, log.GetRequest("7F000001000000000000000000000000"), b""),
        (Operation.GET, log.GetRequest("0A" * 14 + "0000", "fuzzed"), b""),
        (Operation.BY_KEY, log.ByKeyRequest("fuzzed", "k1", 0, 1 << 60), b""),
        (Operation.RANGE, log.RangeRequest("fuzzed", 0, 1 << 60, ["a"], cursor=[0, 0]), b""),
        (Operation.COUNT, log.CountRequest("fuzzed", sql="a CONTAINS 'x'"), b""),
        (Operation.OFFSET_AT, log.OffsetAtRequest("fuzzed", 0, 1_700_000_000_000), b""),
        (Operation.QUEUES, log.QueuesRequest("fuzzed"), b""),
        (Operation.TOPICS, Empty(), b""),
        (Operation.QUERY_MESSAGE, log.QueryMessageRequest("fuzzed", "k1", 32, 0, 1 << 60), b""),
        (Operation.SCAN, log.ScanRequest("fuzzed", 0, property_name="name", body_contains=b"first"), b""),
        (Operation.STATS, Empty(), b""),
        (Operation.HEALTH, Empty(), b""),
        (Operation.GROUP_JOIN, groups.GroupJoinRequest("group", ["fuzzed"], holding=[("fuzzed", 0, 1)]), b""),
        (Operation.GROUP_HEARTBEAT, groups.GroupHeartbeatRequest("group", "0011223344556677", 1), b""),
        (Operation.GROUP_RELEASE, groups.GroupReleaseRequest("group", "0011223344556677", 1), b""),
        (Operation.GROUP_LEAVE, groups.GroupLeaveRequest("group", "0011223344556677"), b""),
        (Operation.GROUP_COMMIT, groups.GroupCommitRequest("group", [("fuzzed", 0, -1, 1)]), b""),
        (Operation.GROUPS, Empty(), b""),
        (Operation.GROUP_INFO, groups.GroupRequest("group"), b""),
        (Operation.GROUP_RESET, groups.GroupResetRequest("group", [("fuzzed", 0, 1)]), b""),
        (Operation.GROUP_SETTINGS, groups.GroupSettingsRequest("group", 3), b""),
        (Operation.GROUP_DELETE, groups.GroupRequest("other"), b""),
        (Operation.GROUP_NACK, groups.GroupNackRequest("group", [("fuzzed", 0, 0)]), b""),
        (Operation.GROUP_RESEND, groups.GroupResendRequest("group", [0, 1]), b""),
        (Operation.GROUP_RECEIVE, pop.GroupReceiveRequest("group", ["fuzzed"], start="earliest"), b""),
        (Operation.GROUP_ACK, pop.GroupAckRequest("group", [("fuzzed", "0 1 2 3 4 5 6 7")]), b""),
        (Operation.GROUP_INVISIBLE, pop.GroupInvisibleRequest("group", "fuzzed", "0 1 2 3 4 5 6 7", 1000), b""),
        (Operation.TRANSACTION_END, transactions.TransactionEndRequest("group", "fuzzed", "0A", 0, True), b""),
        (Operation.TRANSACTION_POLL, transactions.TransactionPollRequest("group", timeout_ms=50), b""),
        (Operation.TRANSACTIONS, transactions.TransactionsRequest("group", ["0A"]), b""),
        (Operation.TRANSACTION_CHECK, transactions.TransactionCheckRequest([0, 7]), b""),
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
            self._whole_frames(role)

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
        if sent % LOOK_EVERY == LOOK_EVERY - 1:
            self._look()

    def close(self) -> str:
        """Stop the group and check its store."""
        self._look()
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

    def _look(self) -> None:
        """Check that all roles live, none had an unexpected error, and intact frames are served."""
        for role, pid in self._pids.items():
            assert self._group.pid(role) == pid, f"the {role} has died"
        for role in (WRITER, QUERY):
            assert not rejects(self._group, role)["INTERNAL"], f"the {role} says INTERNAL: see its log"
            with RawClient(self._group.paths.socket(role)) as client:
                assert client.serves(), f"the {role} does not serve"
        with self._group.client() as client:
            told = client.send("whole", b"%d" % self._good)
            wait_until(lambda: client.count("whole") == self._good + 1, what="the whole message")
            assert client.get(told.message_id).body == b"%d" % self._good
        self._good += 1

    def _whole_frames(self, role: str) -> None:
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


SEGMENT: Final = 1 << 14
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
FIELDS: Final = [field.name for field in dataclasses.fields(StoredMessage)]


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
            mapped_file_size_commit_log=SEGMENT,
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
        self.look(log, data)
        if seed % STORE_EVERY == 0:
            self.look_in_a_store(log, data)

    def close(self) -> str:
        """Nothing left to check."""
        return ""

    def look(self, log: Log, data: bytes) -> None:
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

    def look_in_a_store(self, log: Log, data: bytes) -> None:
        """Check that a start, a reader and `store verify` agree, and serve the record's neighbours.

        Undetectable damage may claim a neighbour's place in its queue; then only the absence of errors is checked.
        """
        shutil.rmtree(self._store, ignore_errors=True)
        folder = self._store / "commitlog"
        folder.mkdir(parents=True)
        (folder / f"{0:020d}").write_bytes(data.ljust(SEGMENT, b"\0"))
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
    """Compare eager objects, lazy objects, and columns."""
    try:
        (eager,) = decode_records(found)
    except CorruptStoreError:
        _decode_anything(found)
        return
    (lazy,) = lazy_records(found)
    for name in FIELDS:
        assert getattr(lazy, name) == getattr(eager, name), name
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
        for message in lazy_records(found):
            for name in FIELDS:
                with contextlib.suppress(CorruptStoreError):
                    getattr(message, name)
    with contextlib.suppress(CorruptStoreError):
        columns_of(found, -1, ALL_COLUMNS)
