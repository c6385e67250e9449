"""A real group with small limits, and actions with bad input; each returns the answer."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from mqproc import (
    Client,
    CorruptStoreError,
    DiskFullError,
    FlushFailedError,
    MqprocError,
    OtherVersionError,
    RetryLaterError,
    StoreReadOnlyError,
    TooManyQueuesError,
)
from mqproc.client import requests as core
from mqproc.client.group_requests import ResetTo
from mqproc.client.retry import NO_RETRY
from mqproc.io.store_io import StoreIO
from mqproc.ipc.control import Control
from mqproc.ipc.counters import read_error_counters
from mqproc.layout import control, record
from mqproc.layout.control import QUERY, ROLES, STATE_RUNNING, WRITER
from mqproc.layout.frame import REFUSAL
from mqproc.paths import StorePaths
from mqproc.types import PullStatus, StoredMessage
from mqproc.wire.address import connect
from mqproc.wire.frames import Frame, FrameReader, decode_refusal, encode_frame, encode_options
from mqproc.wire.operations import AppendRequest, Empty, FrameOptions, Operation, PullAnswer, PullRequest
from tests.golden.fixtures import Fixture, load_fixture
from tests.support.command_line import call
from tests.support.fork_server import run_forked
from tests.support.group import Group, wait_until
from tests.support.store_checks import contents

# The group of the table's rows, and the checks after each row


ANSWER_S = 60.0
FRAME_BYTES_MAX = 1 << 30


class RawClient:
    """A raw connection to a role of a real group."""

    def __init__(self, path: Path) -> None:
        self.sock = _connected(path)
        self.sock.settimeout(ANSWER_S)
        self._reader = FrameReader(FRAME_BYTES_MAX)
        self._last_id = 0

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, data: bytes) -> None:
        """Send bytes; a connection closed by the role is not an error."""
        try:
            self.sock.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            return

    def request(self, operation: int, options: FrameOptions | bytes, payload: bytes = b"") -> None:
        self._last_id += 1
        self.send(b"".join(map(bytes, encode_frame(operation, self._last_id, encode_options(options), (payload,)))))

    def frame(self) -> Frame | None:
        """The next frame; None if the role has closed the connection."""
        while (found := self._reader.next_frame()) is None:
            try:
                data = self.sock.recv(1 << 20)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._reader.feed(data)
        return Frame(found.operation, found.request_id, memoryview(bytes(found.options)), memoryview(b""))

    def refusal(self) -> MqprocError:
        """The next frame, which must be a refusal."""
        frame = self.frame()
        assert frame is not None, "the connection was closed without an answer"
        assert frame.operation & REFUSAL, "the request was answered, not refused"
        return decode_refusal(frame.options)

    def serves(self) -> bool:
        """True if a ping is answered on this connection; False if it is closed."""
        self.request(Operation.PING, Empty())
        frame = self.frame()
        return frame is not None and not frame.operation & REFUSAL

    def is_closed(self) -> bool:
        """True if the role closes the connection within the timeout without sending more."""
        return self.frame() is None


def _connected(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    connect(sock, path)
    sock.settimeout(ANSWER_S)
    return sock


def rejects(group: Group, role: str) -> dict[str, int]:
    """Numbers of refusals by the role since the group started, by code."""
    control = Control.open(StoreIO(), group.paths)
    try:
        return read_error_counters(control.words, role)
    finally:
        control.close()


CONNECTIONS = 24
OPTIONS = {
    "max_queues": 64,
    "max_connections": CONNECTIONS,
    "frame_read_timeout_ms": 1500,
    "client_output_bytes": 1 << 20,
    "max_pull_bytes": 2 << 20,
    "clean_resource_interval": 100,
    "clean_file_forcibly_enable": False,
    "mapped_file_size_timer_log": 1 << 20,
}
DISK_BYTES = 96 << 20
IS_ROOT = os.geteuid() == 0


@dataclass(frozen=True)
class Answer:
    """Result of an action: error code, pull status, `exit N` of a command, or "" for success.

    `closed`: the role has closed the connection.
    """

    code: str
    text: str = ""
    closed: bool = False


class Scene:
    """A running group and a folder for further files of rows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._disk = folder / "disk"
        self._disk.mkdir()
        if IS_ROOT:
            # A separate file system that can be filled.
            options = f"size={DISK_BYTES},mode=0700"
            subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self._disk)], check=True)
        self.group = Group(self._disk / "store", **OPTIONS)
        self._others: list[Group] = []

    def start(self) -> Scene:
        """Start the group and send the rows' data.

        These are the topics `known`, `three` and `large`, and two groups at offset 2.
        """
        self.group.start()
        with self.group.client() as client:
            for topic, queues in (("known", 4), ("three", 1), ("large", 1)):
                client.create_topic(topic, queues)
            client.send("known", b"first", queue_id=0)
            client.groups.change("group")
            client.send_batch("three", [b"a", b"b", b"c"], queue_id=0)
            client.send_batch("large", [b"x" * 100_000] * 40, queue_id=0)
            self.group.wait_dispatched()
            for group in ("careful", "reset"):
                client.groups.commit(group, "three", 0, 2)
        return self

    def close(self) -> None:
        for group in (*self._others, self.group):
            group.close()
        if IS_ROOT:
            subprocess.run(["umount", "--lazy", str(self._disk)], check=True)

    def another(self, group: Group) -> Group:
        """A group for one row, stopped with the scene."""
        self._others.append(group)
        return group

    @property
    def segment_bytes(self) -> int:
        """Size of the log's files."""
        return int(self.group.options["mapped_file_size_commit_log"])

    @property
    def ballast(self) -> Path:
        """The file that fills the disk."""
        return self._disk / "ballast"


@dataclass(frozen=True)
class Row:
    """One bad input: the action and the expected answer.

    `number` is the row's number in the README's table, 0 for rows outside of it. `refused_by` is the role that counts
    the refusal; `restarts` are the roles that the row kills; `stores` is True if messages are stored.
    """

    number: int
    name: str
    does: Callable[[Scene], Answer]
    code: str
    says: str = ""
    closes: bool = False
    refused_by: str = ""
    restarts: Collection[str] = ()
    stores: bool = False
    root_only: bool = False

    def __str__(self) -> str:
        return f"{self.number}-{self.name}"


def check(scene: Scene, row: Row) -> None:
    """Run the row: expect its answer, no other change, and a group that keeps serving."""
    before = _state(scene)
    answer = row.does(scene)
    assert (answer.code, answer.closed) == (row.code, row.closes), answer.text
    assert re.search(row.says, answer.text, re.DOTALL), answer.text
    after = _state(scene)
    assert (after.written > before.written) == row.stores, "the log"
    if not row.restarts:
        assert after.pids == before.pids, "a role has died"
    if row.refused_by:
        counted = {role: _new(after.rejects[role], before.rejects[role]) for role in (WRITER, QUERY)}
        assert counted.pop(row.refused_by) == {row.code: 1}
        assert not any(counted.values()), counted
    _serves(scene)


@dataclass(frozen=True)
class _State:
    written: int
    pids: dict[str, int]
    rejects: dict[str, dict[str, int]]


def _state(scene: Scene) -> _State:
    pids = {role: scene.group.pid(role) for role in ROLES}
    refused = {role: rejects(scene.group, role) for role in (WRITER, QUERY)}
    return _State(scene.group.words()["written"], pids, refused)


def _new(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {code: after[code] - before[code] for code in after if after[code] != before[code]}


def _serves(scene: Scene) -> None:
    """Both roles answer valid frames, and a message can be sent and read."""
    for role in (WRITER, QUERY):
        with RawClient(scene.group.paths.socket(role)) as raw:
            assert raw.serves(), role
    with scene.group.client() as client:
        client.send("service", b"served", queue_id=0)
        scene.group.wait_dispatched()
        assert newest(client, "service").body == b"served"


def newest(client: Client, topic: str) -> StoredMessage:
    """The last message of a topic's first queue."""
    queue = client.queues(topic)[0]
    found: list[StoredMessage] = wait_until(lambda: client.pull(topic, 0, queue.max_offset - 1, 1).messages)
    return found[0]


CROWD, BEYOND = 10_000, 100
SPARE_FILES = 500
AS_ANOTHER = """
import contextlib, os, socket, sys
os.setuid(65534)
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
sock.settimeout(20)
with contextlib.suppress(BrokenPipeError):
    sock.sendall(bytes.fromhex(sys.argv[2]))
# A role that closes without reading all data resets the connection after its answer.
with contextlib.suppress(ConnectionResetError):
    while piece := sock.recv(65536):
        sys.stdout.buffer.write(piece)
"""


def frame() -> bytes:
    """A complete append of one message."""
    options = encode_options(AppendRequest("partial", 1, bodies_bytes=4))
    return b"".join(map(bytes, encode_frame(Operation.APPEND, 1, options, (struct.pack("<I", 4) + b"body",))))


def raised(scene: Scene, act: Callable[[Client], object]) -> Answer:
    """The error that a client call raises."""
    with scene.group.client() as client:
        try:
            return Answer("", repr(act(client)))
        except MqprocError as error:
            return Answer(error.code, str(error))


# Incomplete frames


def ends_amid(scene: Scene) -> Answer:
    """Frames cut in the header, after it, and one byte before the end; each is counted."""
    before = scene.group.words()["writer_partial_frames"]
    sizes = (1, 31, 33, -1)
    closed = True
    for size in sizes:
        with RawClient(scene.group.paths.socket(WRITER)) as partial:
            partial.send(frame()[:size])
            partial.sock.shutdown(socket.SHUT_WR)
            closed &= partial.is_closed()
    return Answer("", f"{scene.group.words()['writer_partial_frames'] - before} partial frames", closed)


def trickles_in(scene: Scene) -> Answer:
    """Send one byte every 100 ms until the role answers; the frame is never complete."""
    data = frame()
    with RawClient(scene.group.paths.socket(WRITER)) as slow:
        slow.sock.settimeout(0.1)
        for byte in data[:-1]:
            slow.send(bytes([byte]))
            with contextlib.suppress(TimeoutError):
                found = slow.frame()
                assert found is not None, "the role has hung up without a word"
                error = decode_refusal(found.options)
                return Answer(error.code, str(error), slow.is_closed())
    return Answer("", "the role waited for the whole frame")


# Clients that use too much


def reads_nothing(scene: Scene) -> Answer:
    """Send requests without reading the answers; other clients are still served."""
    with scene.group.client() as client:
        before = rejects(scene.group, QUERY)["SLOW_CONSUMER"]
        with RawClient(scene.group.paths.socket(QUERY)) as silent:
            silent.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            silent.sock.settimeout(0.2)
            with contextlib.suppress(TimeoutError):
                for _ in range(40):
                    silent.request(Operation.PULL, PullRequest("large", 0, 0))
                    assert client.pull("large", 0, 0, 1).status is PullStatus.FOUND
            wait_until(lambda: rejects(scene.group, QUERY)["SLOW_CONSUMER"] > before, 40, "the end of the silent one")
            silent.sock.settimeout(20)
            return Answer("SLOW_CONSUMER", closed=_ends(silent.sock))


def _ends(sock: socket.socket) -> bool:
    """Send data; True if the connection ends."""
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(1 << 20):
            pass
    return True


def one_connection_more(scene: Scene) -> Answer:
    """All allowed connections are served; one more is refused."""
    path = scene.group.paths.socket(WRITER)
    clients: list[RawClient] = []
    with contextlib.ExitStack() as stack:
        # Another role may have a connection too. The word is correct after the step with the first ping.
        while not clients or scene.group.words()["writer_connections"] < CONNECTIONS:
            clients.append(stack.enter_context(RawClient(path)))
            assert clients[-1].serves()
            assert clients[-1].serves()
        beyond = stack.enter_context(RawClient(path))
        error = beyond.refusal()
        closed = beyond.is_closed()
        assert all(each.serves() for each in clients)
    return Answer(error.code, str(error), closed)


def another_user(role: str, data: bytes = b"") -> Callable[[Scene], Answer]:
    """Connect as another user and send `data`.

    All folders of the path are opened temporarily, so that only the socket's own check remains.
    """

    def does(scene: Scene) -> Answer:
        path = scene.group.paths.socket(role)
        opened = {each: each.stat().st_mode for each in (*list(path.parents)[:-2], path)}
        try:
            for each in opened:
                each.chmod(0o777)
            command = [sys.executable, "-c", AS_ANOTHER, str(path), data.hex()]
            done = subprocess.run(command, capture_output=True, check=True, timeout=60)
        finally:
            for each, mode in opened.items():
                each.chmod(mode & 0o7777)
        return _refused(done.stdout)

    return does


def _refused(data: bytes) -> Answer:
    """The refusal; the connection must end after it."""
    reader = FrameReader(FRAME_BYTES_MAX)
    reader.feed(data)
    found = reader.next_frame()
    assert found is not None, "no answer"
    error = decode_refusal(found.options)
    assert reader.next_frame() is None
    return Answer(error.code, str(error), closed=True)


def ten_thousand(scene: Scene) -> Answer:
    """Open the maximum number of connections: one more is refused until others are closed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < CROWD + BEYOND + SPARE_FILES:
        pytest.skip(f"a process may open {hard:,} files only")
    group = scene.another(Group(scene.folder / "crowded", max_connections=CROWD)).start()
    with contextlib.ExitStack() as stack:
        # The limit applies to this process, which runs other tests afterwards.
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        crowd: list[socket.socket] = []
        while len(crowd) < CROWD + BEYOND:
            crowd.append(stack.enter_context(socket.socket(socket.AF_UNIX)))
            connect(crowd[-1], group.paths.socket(WRITER))
        wait_until(lambda: rejects(group, WRITER)["TOO_MANY_CONNECTIONS"] >= BEYOND, what="those beyond refused")
        away = _readable(crowd)
        # Other roles may have connections too.
        assert BEYOND <= len(away) <= BEYOND + len(ROLES)
        (answer,) = {_refused(_read(sock)) for sock in away}
        for sock in {crowd[0], crowd[CROWD // 2], crowd[CROWD - len(ROLES)]} - away:
            sock.sendall(frame())
            assert sock.recv(1)
        # The word is correct after a step that handled a request.
        wait_until(lambda: group.words()["writer_connections"] == CROWD, what="all places taken")
    with group.client() as late:

        def has_room() -> bool:
            late.run(core.ping(WRITER))
            return group.words()["writer_connections"] < CROWD

        wait_until(has_room, what="room again")
        assert late.send("late", b"served").queue_offset == 0
    group.close()
    return answer


def _readable(socks: list[socket.socket]) -> set[socket.socket]:
    poll = select.poll()
    by_fd = {sock.fileno(): sock for sock in socks}
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    return {by_fd[fd] for fd, _ in poll.poll(0)}


def _read(sock: socket.socket) -> bytes:
    """Read until the peer closes the connection."""
    sock.settimeout(ANSWER_S)
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


# Topics and queues at their limits


def queues_beyond_all(scene: Scene) -> Answer:
    """With a full queue table no send or request creates a topic or queue.

    Existing topics are served.
    """
    group = scene.another(Group(scene.folder / "many", max_queues=32)).start()
    with group.client() as client:
        client.create_topic("first", 1)
        client.send("first", b"before")
        assert _make_topics(client) == "1 more queues exceed max_queues = 32; 0 are left"
        before = {topic.topic: topic.queues for topic in client.topics()}
        for topic in (f"topic{number}" for number in range(3)):
            client.send(topic, b"served")
        with pytest.raises(TooManyQueuesError):
            client.create_topic("first", 2)
        with pytest.raises(TooManyQueuesError) as refused:
            client.send("beyond", b"refused")
        client.send("first", b"after")
        group.wait_dispatched()
        assert [message.body for message in client.pull("first", 0, 0).messages] == [b"before", b"after"]
        assert {topic.topic: topic.queues for topic in client.topics()} == before
    group.close()
    return Answer(refused.value.code, str(refused.value))


def sends_an_empty_body(scene: Scene) -> Answer:
    """The stored body is empty too."""
    with scene.group.client() as client:
        done = client.send("empty", b"")
        scene.group.wait_dispatched()
        return Answer("", f"body {client.get(done.message_id).body!r}")


def _make_topics(client: Client) -> str:
    """Create topics of one queue until one is refused; return the error text."""
    with contextlib.suppress(TooManyQueuesError):
        for number in itertools.count():
            client.create_topic(f"topic{number}", 1)
    try:
        client.create_topic("last", 1)
    except TooManyQueuesError as error:
        return str(error)
    return ""


def pulls_missing_queues(scene: Scene) -> Answer:
    """Pull from a missing topic and a missing queue; neither is created."""
    with scene.group.client() as client:
        before = client.topics()
        places = (("missing", 0), ("known", 77), ("known", -1))
        (status,) = {client.pull(topic, queue_id, 0).status.value for topic, queue_id in places}
        assert client.topics() == before
        return Answer(status)


def pulls_at(offset: int) -> Callable[[Scene], Answer]:
    """Pull at an offset of a queue with three messages."""

    def does(scene: Scene) -> Answer:
        with scene.group.client() as client:
            pulled = client.pull("three", 0, offset)
            bounds = f"[{pulled.min_offset}, {pulled.max_offset})"
            return Answer(pulled.status.value, f"next {pulled.next_offset} of {bounds}")

    return does


def pulls_so_many(asked: int) -> Callable[[Scene], Answer]:
    """Pull a number of messages from a queue of three."""

    def does(scene: Scene) -> Answer:
        with scene.group.client() as client:
            pulled = client.pull("three", 0, 0, asked)
            return Answer(pulled.status.value, f"{len(pulled.messages)} messages")

    return does


def pulls_by_frame(asked: int, max_bytes: int = 1 << 60) -> Callable[[Scene], Answer]:
    """Pull up to 40 messages of 100,000 bytes with limits that mqproc's clients never use."""

    def does(scene: Scene) -> Answer:
        with RawClient(scene.group.paths.socket(QUERY)) as raw:
            raw.request(Operation.PULL, PullRequest("large", 0, 0, asked, max_bytes))
            found = raw.frame()
            assert found is not None
            answer = msgspec.msgpack.decode(found.options, type=PullAnswer)
        assert answer.next_offset == answer.count
        return Answer(answer.status, f"{answer.count} messages of {answer.max_offset}")

    return does


# Committed offsets


def commits(offset: int) -> Callable[[Scene], Answer]:
    """Commit an offset for a group at offset 2 of 3; a refused commit changes nothing."""

    def does(scene: Scene) -> Answer:
        answer = raised(scene, lambda client: client.groups.commit("careful", "three", 0, offset))
        with scene.group.client() as client:
            (queue,) = client.groups.info("careful").queues
            assert queue.offset == 2
        return answer

    return does


def resets_back(scene: Scene) -> Answer:
    """A reset may move back, unlike a commit."""
    with scene.group.client() as client:
        client.groups.execute("reset", client.groups.plan_reset("reset", ResetTo(earliest=True)))
        (queue,) = client.groups.info("reset").queues
        return Answer("", f"offset {queue.offset}")


# Full disk, failing disk, killed writer, damaged log

FAILING = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>
static int fails(void) { const char *path = getenv("FAIL_SYNC_WHEN"); return path && access(path, F_OK) == 0; }
int fdatasync(int fd) {
    if (fails()) { errno = EIO; return -1; }
    return ((int (*)(int)) dlsym(RTLD_NEXT, "fdatasync"))(fd);
}
int fsync(int fd) {
    if (fails()) { errno = EIO; return -1; }
    return ((int (*)(int)) dlsym(RTLD_NEXT, "fsync"))(fd);
}
"""


def sends_to_a_full_disk(scene: Scene) -> Answer:
    """Foreign data fills the disk. Stored messages remain readable."""
    disk = scene.ballast.parent
    with scene.group.client(retry=NO_RETRY) as client:
        with scene.ballast.open("wb") as ballast:
            os.posix_fallocate(ballast.fileno(), 0, _free_bytes(disk) - (64 << 10))
        try:
            # A check during the filling may have reported the disk full with more space than remains at the end.
            wait_until(lambda: _is_seen_full(scene), what="the keeper's look at the disk")
            with pytest.raises(DiskFullError) as refused:
                client.send("known", b"refused")
            assert client.pull("three", 0, 0).status is PullStatus.FOUND
        finally:
            scene.ballast.unlink()
        said = re.search(r"([\d,]+) bytes must be free, ([\d,]+) are", str(refused.value))
        assert said is not None
        needed, there = (int(part.replace(",", "")) for part in said.groups())
        assert there < 1 << 20 < needed
        wait_until(lambda: not scene.group.words()["disk_full"], what="room again")
    return Answer(refused.value.code, str(refused.value))


def _is_seen_full(scene: Scene) -> bool:
    words = scene.group.words()
    return bool(words["disk_full"]) and words["disk_free_bytes"] < 1 << 20


def _free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def sends_after_a_failed_sync(scene: Scene) -> Answer:
    """Sends while syncs begin to fail.

    Durability of the pending send is unknown; the next one is refused.
    """
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler, to make syncs fail in real processes")
    folder = scene.folder / "failing"
    folder.mkdir()
    library, switch = folder / "failing.so", folder / "fail"
    (folder / "failing.c").write_text(FAILING)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, folder / "failing.c", "-ldl"], check=True)
    group = scene.another(Group(folder / "store", flush_disk_type="SYNC_FLUSH"))
    group.environment = {"LD_PRELOAD": str(library), "FAIL_SYNC_WHEN": str(switch)}
    group.start()
    with group.client() as client:
        kept = client.send("disk", b"durable")
        switch.touch()
        with pytest.raises((FlushFailedError, StoreReadOnlyError)):
            client.send("disk", b"not durable")
        with pytest.raises(StoreReadOnlyError) as refused:
            client.send("disk", b"refused")
        assert client.get(kept.message_id).body == b"durable"
        assert client.health().read_only
    group.close()
    return Answer(refused.value.code, str(refused.value))


def sends_to_a_killed_writer(scene: Scene) -> Answer:
    """Without retries a send is refused with a hint and not stored; with retries it is stored."""
    group = scene.group
    with group.client(retry=NO_RETRY) as hasty, group.client() as patient:
        hasty.run(core.ping(WRITER))
        pid, incarnation = group.pid(WRITER), group.words()["writer.incarnation"]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), what="the writer's end")
        with pytest.raises(RetryLaterError) as refused:
            hasty.send("restarts", b"refused")
        assert patient.send("restarts", b"waited", queue_id=0).queue_offset == 0
        wait_until(
            lambda: (
                (group.words()["writer.incarnation"], group.words()["writer.state"]) == (incarnation + 1, STATE_RUNNING)
            ),
            what="the next writer",
        )
        group.wait_dispatched()
        assert patient.count("restarts") == 1
    return Answer(refused.value.code, f"{refused.value}; come back in {refused.value.hint_ms} ms")


def reads_damage(scene: Scene) -> Answer:
    """The second of three messages is damaged until the test restores it."""
    with scene.group.client() as client:
        before, damaged, following = client.pull("three", 0, 0).messages
        start = damaged.physical_offset // scene.segment_bytes * scene.segment_bytes
        segment = scene.group.paths.commit_log / f"{start:020d}"
        place = damaged.physical_offset - start + record.BODY_CRC
        whole = segment.read_bytes()[place : place + 1]
        try:
            _write(segment, place, bytes([whole[0] ^ 0xFF]))
            with pytest.raises(CorruptStoreError) as refused:
                client.get(damaged.message_id)
            pulled = client.pull("three", 0, 1)
            assert [message.body for message in client.pull("three", 0, 0, 1).messages] == [before.body]
            assert [message.body for message in client.pull("three", 0, pulled.next_offset).messages] == [
                following.body
            ]
        finally:
            _write(segment, place, whole)
        extent = f"[{damaged.physical_offset}, {damaged.physical_offset + damaged.size})"
        assert extent in str(refused.value)
        assert extent in pulled.detail
        return Answer(pulled.status.value, pulled.detail)


def _write(path: Path, place: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        file.write(data)


# Stores and options at start: refused with one line, or accepted with a report

SEGMENT_OF_THEIRS = 1 << 16
STRAYS = ("commitlog/notes.txt", "consumequeue/OrderTopic/notes.txt", "index/notes.txt", "config/notes.txt")
COMMANDS = (
    ("status",),
    ("send", "topic", "body"),
    ("message", "key", "topic", "key"),
    ("topic", "list"),
    ("group", "list"),
    ("stat",),
    ("store", "verify"),
    ("store", "info"),
    ("down",),
)
OF_STORES = (("store", "verify"), ("store", "info"), ("store", "repair"), ("store", "recover", "--dry-run"))
"""Those that need no group, so that a folder without one is no store to them."""


def _up(store: Path, *flags: str) -> Answer:
    """Run `mqproc up`, which must exit by itself; return its exit code and single error line."""
    done = run_forked(["mqproc", "up", "--store", str(store), *flags])
    assert "Traceback" not in done.stderr
    lines = done.stderr.splitlines()
    return Answer(f"exit {done.returncode}", done.stderr if len(lines) == 1 else f"{len(lines)} lines: {done.stderr}")


def second_supervisor(scene: Scene) -> Answer:
    """A second `up` on the store of the running group."""
    process = scene.group.process
    assert process is not None
    answer = _up(scene.group.store)
    assert f"is in use by pid {process.pid} since 20" in answer.text
    return answer


def commands_without_a_store(scene: Scene) -> Answer:
    """Run every kind of command on a missing folder: one error line each, nothing is created."""
    missing = scene.folder / "missing"
    answers = {command: call(*command, "--store", missing) for command in COMMANDS}
    assert not missing.exists()
    wrong = {command: done for command, done in answers.items() if done.err.count("\n") != 1 or done.out}
    assert not wrong
    codes = {done.code for done in answers.values()}
    return Answer(f"exit {codes.pop() if len(codes) == 1 else codes}", answers["status",].err)


def a_file(path: Path) -> None:
    path.write_text("mine")


def an_empty_folder(path: Path) -> None:
    path.mkdir()


def commands_on(make: Callable[[Path], None], commands: Sequence[tuple[str, ...]]) -> Callable[[Scene], Answer]:
    """Run commands on a path that is not a store: one error line each, nothing is created."""

    def does(scene: Scene) -> Answer:
        place = scene.folder / make.__name__
        make(place)
        answers = {command: call(*command, "--store", place) for command in commands}
        wrong = {command: done for command, done in answers.items() if done.err.count("\n") != 1 or done.out}
        assert not wrong
        assert place.is_file() or not list(place.iterdir())
        codes = {done.code for done in answers.values()}
        return Answer(f"exit {codes.pop() if len(codes) == 1 else codes}", answers["store", "verify"].err)

    return does


def starts_in_place_of_a_file(scene: Scene) -> Answer:
    """The store's path is a file, which stays unchanged."""
    path = scene.folder / "file"
    path.write_text("mine")
    answer = _up(path)
    assert path.read_text() == "mine"
    return answer


def starts_where_nothing_may_be_written(scene: Scene) -> Answer:
    """A read-only folder; for root, which may write to any folder, a read-only file system."""
    folder = scene.folder / "readonly"
    folder.mkdir(mode=0o500)
    if IS_ROOT:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,mode=0700", "tmpfs", str(folder)], check=True)
    try:
        answer = _up(folder)
        assert not list(folder.iterdir())
    finally:
        if IS_ROOT:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
    return answer


def starts_below_a_missing_folder(scene: Scene) -> Answer:
    """`up` creates only the last part of a path."""
    answer = _up(scene.folder / "missing" / "store")
    assert not (scene.folder / "missing").exists()
    return answer


def starts_in_an_open_folder(scene: Scene) -> Answer:
    """A world-writable folder."""
    folder = scene.folder / "open"
    folder.mkdir()
    folder.chmod(0o777)
    answer = _up(folder)
    assert list(folder.iterdir()) == []
    return answer


def starts_in_anothers_folder(scene: Scene) -> Answer:
    """A folder of another user."""
    folder = scene.folder / "anothers"
    folder.mkdir(mode=0o755)
    os.chown(folder, 65534, 65534)
    answer = _up(folder)
    assert list(folder.iterdir()) == []
    return answer


def _theirs(scene: Scene, name: str) -> Fixture:
    """A copy of a store that RocketMQ created and stopped, with RocketMQ's folder permissions."""
    (scene.folder / name).mkdir()
    fixture = load_fixture("a_basic", scene.folder / name)
    fixture.store.chmod(0o755)
    return fixture


def starts_on_a_symlink(scene: Scene) -> Answer:
    """A segment is a symlink. The store is not modified."""
    store = _theirs(scene, "linked").store
    segment = store / "commitlog" / f"{SEGMENT_OF_THEIRS:020d}"
    segment.rename(scene.folder / "elsewhere")
    segment.symlink_to(scene.folder / "elsewhere")
    return _refused_unchanged(store, segment)


def starts_on_anothers_file(scene: Scene) -> Answer:
    """A segment belongs to another user. The store is not modified."""
    store = _theirs(scene, "owned").store
    segment = store / "commitlog" / f"{SEGMENT_OF_THEIRS:020d}"
    os.chown(segment, 65534, 65534)
    return _refused_unchanged(store, segment)


def _refused_unchanged(store: Path, named: Path) -> Answer:
    """Refused without changes: no `abort` file, which would mark an unclean stop, is left."""

    def theirs() -> dict[str, tuple[int, bytes]]:
        return {name: found for name, found in contents(store).items() if name.partition("/")[0] not in ours}

    ours = ("lock", "mqproc")
    before = theirs()
    answer = _up(store)
    assert str(named) in answer.text
    assert "abort" not in before
    assert theirs() == before
    return answer


def starts_with(option: str) -> Callable[[Scene], Answer]:
    """An invalid option. No folder is created."""

    def does(scene: Scene) -> Answer:
        store = scene.folder / "unmade"
        answer = _up(store, "--set", option)
        assert not store.exists()
        return answer

    return does


def checks(option: str) -> Callable[[Scene], Answer]:
    """The same check by `config check`."""

    def does(_scene: Scene) -> Answer:
        done = call("config", "check", "--set", option)
        return Answer(f"exit {done.code}", done.err)

    return does


class Disordered:
    """A group started on RocketMQ's store with many kinds of unexpected files."""

    def __init__(self, scene: Scene) -> None:
        fixture = _theirs(scene, "disordered")
        store = fixture.store
        self.messages = len(fixture.expected["records"])
        self.end = fixture.expected["maxPhyOffset"]
        for stray in STRAYS:
            (store / stray).parent.mkdir(exist_ok=True)
            (store / stray).write_text("mine")
        segment = store / "commitlog" / f"{1 << 40:020d}"
        segment.mkdir()
        (segment / "precious").write_text("kept")
        paths = StorePaths(store)
        paths.own.mkdir()
        paths.control.write_bytes(b"\xff garbage of another version \xff")
        paths.checkpoint.write_bytes(os.urandom(4096))
        paths.consumer_offsets.write_text('{"offsetTable":{"OrderTopic@billing":{0:')
        copy = paths.consumer_offsets.with_name("consumerOffset.json.bak")
        copy.write_text('{"offsetTable":{"OrderTopic@billing":{0:4}}}')
        self.group = scene.another(Group(store, max_queues=64))
        # RocketMQ's files are smaller than mqproc's.
        self.group.options |= {"mapped_file_size_commit_log": 1 << 20, "max_message_size": SEGMENT_OF_THEIRS // 2}
        self.group.start()
        self.output = self.group.output.read_text()
        self.segment = segment

    def lines(self, *words: str) -> str:
        """The line of the start's output that contains all of these words."""
        return "\n".join(line for line in self.output.splitlines() if all(word in line for word in words))


@functools.cache
def _disordered(scene: Scene) -> Disordered:
    return Disordered(scene)


def starts_on_rocketmqs_open_folder(scene: Scene) -> Answer:
    """RocketMQ's store stays world-readable; `mqproc/` in it is private."""
    group = _disordered(scene).group
    modes = [path.stat().st_mode & 0o777 for path in (group.store, group.paths.own)]
    return Answer("", " ".join(f"{mode:04o}" for mode in modes))


def starts_on_disorder(scene: Scene) -> Answer:
    """Files of another size, stray files, and a folder instead of a segment."""
    found = _disordered(scene)
    store = found.group.store
    left_alone = [stray for stray in STRAYS if (store / stray).read_text() == "mine"]
    assert left_alone == list(STRAYS)
    for stray in STRAYS[:3]:
        assert found.lines(str(store / stray), "left alone"), stray
    aside = found.group.paths.quarantine / f"commitlog.{found.segment.name}"
    assert (aside / "precious").read_text() == "kept"
    assert found.lines(str(found.segment), str(aside))
    return Answer("", found.lines("mapped_file_size_commit_log"))


def starts_on_a_strange_control_file(scene: Scene) -> Answer:
    """The file is replaced: its words are those of this run."""
    group = _disordered(scene).group
    assert group.process is not None
    words = group.words()
    assert words["supervisor_pid"] == group.process.pid
    return Answer("", f"epoch {words['epoch']}")


CONTROL_FILES = {
    "of another version": "from another version of mqproc, layout [0-9]+ instead of [0-9]+: mqproc down .* version$",
    "of another program": "magic at byte .*expected 0x[0-9a-f]+, found 0x[0-9a-f]+$",
    "that is cut": "expected [0-9,]+ bytes, found 4,096$",
    "that is empty": "expected [0-9,]+ bytes, found 0$",
    "with impossible values": "^$",
}
"""By kind of damage: a tool's error message, if it detects the damage."""


def _control_file(what: str, data: bytes) -> bytes:
    words = memoryview(bytearray(data)).cast("q")
    if what == "of another version":
        words[control.HEADER_VERSION] += 1
    elif what == "of another program":
        words[control.HEADER_MAGIC] = 4711
    elif what == "with impossible values":
        for word in control.WORDS.values():
            if word.index not in (control.HEADER_MAGIC, control.HEADER_VERSION):
                words[word.index] = 1 << 40
    else:
        return data[:4096] if what == "that is cut" else b""
    return words.tobytes()


@functools.cache
def _killed(scene: Scene) -> tuple[Group, dict[str, int]]:
    """A killed group with three messages in its log, and its control words at that time."""
    group = scene.another(Group(scene.folder / "controlled", max_queues=64)).start()
    with group.client() as client:
        client.send_batch("three", [b"a", b"b", b"c"], queue_id=0)
        group.wait_dispatched()
    words = group.words()
    group.kill()
    return group, words


def starts_on_a_control_file(what: str) -> Callable[[Scene], Answer]:
    """A tool reports the error in one line; a start replaces the file and ignores its contents."""

    def does(scene: Scene) -> Answer:
        group, before = _killed(scene)
        file = group.paths.control
        whole = file.read_bytes()
        file.write_bytes(_control_file(what, whole))
        done = call("stat", "--store", group.store)
        if done.code:
            kind = OtherVersionError if what == "of another version" else CorruptStoreError
            assert (done.code, done.err.count("\n"), str(file) in done.err) == (kind.exit_code, 1, True)
        group.start()
        words = group.words()
        assert (words["epoch"], words["written"], words["dispatched"]) == (1, before["written"], before["written"])
        with group.client() as client:
            assert [message.body for message in client.pull("three", 0, 0).messages] == [b"a", b"b", b"c"]
        group.kill()
        return Answer("", done.err.rstrip("\n"))

    return does


def second_supervisor_without_words(scene: Scene) -> Answer:
    """The lock shows that the store is in use; the control words only name the holder.

    Both stay unchanged.
    """
    group, _ = _killed(scene)
    group.start()
    file = group.paths.control
    file.rename(aside := file.with_name("control.aside"))
    file.write_bytes(b"garbage")
    try:
        answer = _up(group.store)
        assert file.read_bytes() == b"garbage"
    finally:
        aside.rename(file)
    assert group.process is not None
    assert f"pid {group.process.pid}" in answer.text
    group.kill()
    return answer


def starts_without_a_checkpoint(scene: Scene) -> Answer:
    """Both slots are garbage: the whole log is scanned, and every message is in its queue."""
    found = _disordered(scene)
    with found.group.client() as client:
        messages = sum(topic.message_count for topic in client.topics())
        assert client.send("OrderTopic", b"after").physical_offset >= found.end
    assert messages == found.messages
    return Answer("", found.lines("records from the beginning 0"))


def starts_on_garbled_offsets(scene: Scene) -> Answer:
    """The backup of RocketMQ's file is used."""
    found = _disordered(scene)
    with found.group.client() as client:
        offsets = {queue.queue_id: queue.offset for queue in client.groups.info("billing").queues}
    assert offsets[0] == 4
    return Answer("", found.lines("consumerOffset.json"))
