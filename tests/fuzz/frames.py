"""Frames of every operation, damaged, at the writer and the query role of a running group.

A frame's options, its payload or the whole of it is damaged; where only a part is, the header's sizes fit, so that what
lies behind the first check is reached. Answers are read and thrown away.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any, Final

from mqproc.layout import control as words_of
from mqproc.layout.control import QUERY, WRITER
from mqproc.layout.frame import HEADER_SIZE
from mqproc.wire.codec import FrameOptions
from mqproc.wire.frames import encode_frame, encode_options
from mqproc.wire.operations import Empty, Operation, groups, log
from mqproc.wire.operations import groups as pop
from mqproc.wire.operations import groups as transactions
from tests.bad_input.raw_client import RawClient, rejects
from tests.conftest import Group, wait_until
from tests.fuzz.mutations import damage
from tests.processes.rebuild import assert_equals_rebuild

FRAMES_PER_CONNECTION: Final = 50
LOOK_EVERY: Final = 2000
BODIES: Final = (b"first", b"second body", b"")
LENGTHS: Final = struct.pack("<3I", *map(len, BODIES))
KEYS: Final = struct.pack("<3H", 2, 2, 5) + b"k1k2k3 k4"
TAGS: Final = struct.pack("<3H", 1, 1, 0) + b"ab"
SHARDING: Final = struct.pack("<3H", 2, 0, 3) + b"\xc3\xa9abc"
PROPERTIES: Final = struct.pack("<3H", 8, 8, 8) + b"KEYS\x01k1\x02" * 3
NUMBERS: Final = struct.pack("<3q", 1_700_000_000_000, 0, -1)


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
            NUMBERS + struct.pack("<3i", 0, 1, 7) + struct.pack("<3i", 0, -1, 5),
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


WHOLE: Final[dict[str, list[tuple[Operation, FrameOptions, bytes]]]] = {
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
    for role, frames in WHOLE.items()
}
PIECES: Final = [part for frames in ENCODED.values() for _, options, payload in frames for part in (options, payload)]


class Frames:
    """A group that damaged frames are sent to."""

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
        """One frame. Raises when the group has noticed more than that it is damaged."""
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
        """Stop the group, and look at what it has stored."""
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
        """Send a frame and take what answers are there; False when the role has hung up."""
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
            # What could not be sent whole leaves the stream in the midst of a frame: the next one goes on another.
            return not view
        except ConnectionResetError:
            return False
        return False

    def _look(self) -> None:
        """All roles live, none has met what it does not expect, and whole frames are served."""
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
        """Every frame of the corpus is one: none is refused for what it looks like."""
        for operation, options, payload in ENCODED[role]:
            with RawClient(self._group.paths.socket(role)) as client:
                client.request(operation, options, payload)
                assert client.frame() is not None, operation
        found = rejects(self._group, role)
        codes = ("BAD_MESSAGE", "BAD_FRAME", "BAD_PROPERTY", "BAD_FILTER", "UNKNOWN_COMMAND")
        assert not {code: found[code] for code in codes if found[code]}


def damaged(random: Random, role: str) -> bytes:
    """A frame of the corpus with damage in its options, its payload, or anywhere."""
    operation, options, payload = random.choice(ENCODED[role])
    way = random.random()
    if way < 0.45:
        options = damage(random, options, PIECES)
    elif way < 0.8 and payload:
        payload = damage(random, payload, PIECES)
    frame = b"".join(map(bytes, encode_frame(operation, 1, options, (payload,))))
    if way >= 0.9:
        return damage(random, frame[:HEADER_SIZE], PIECES) + frame[HEADER_SIZE:]
    return damage(random, frame, PIECES) if way >= 0.8 else frame
