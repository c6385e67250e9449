"""A real group with small limits for the rows of the table, and the checks after each row."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from mqproc import Client
from mqproc.errors import MqprocError
from mqproc.io.store_io import StoreIO
from mqproc.ipc.control import Control
from mqproc.ipc.counters import read_error_counters
from mqproc.layout.control import QUERY, ROLES, WRITER
from mqproc.layout.frame import REFUSAL
from mqproc.types import StoredMessage
from mqproc.wire.address import connect_path
from mqproc.wire.codec import FrameOptions
from mqproc.wire.frames import Frame, FrameReader, decode_refusal, encode_frame, encode_options
from mqproc.wire.operations import Empty, Operation
from tests.support.group import Group, wait_until

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
    sock.connect(str(connect_path(path)))
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
        client.send("service", b"goes on", queue_id=0)
        scene.group.wait_dispatched()
        assert newest(client, "service").body == b"goes on"


def newest(client: Client, topic: str) -> StoredMessage:
    """The last message of a topic's first queue."""
    queue = client.queues(topic)[0]
    found: list[StoredMessage] = wait_until(lambda: client.pull(topic, 0, queue.max_offset - 1, 1).messages)
    return found[0]
