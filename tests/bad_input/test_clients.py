"""Clients that misbehave or ask for what cannot be: the others notice nothing, and what can be answered is."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mqproc import (
    Client,
    DiskFullError,
    FlushFailedError,
    MqprocError,
    NoSuchQueueError,
    OffsetOverflowError,
    PermissionDeniedError,
    StaleOffsetError,
    StoreReadOnlyError,
    TooManyConnectionsError,
    TooManyQueuesError,
)
from mqproc.client.group_steps import ResetTo
from mqproc.layout.control import QUERY, WRITER
from mqproc.message import PullStatus
from mqproc.wire.operations import AppendRequest, Operation, PullRequest
from mqproc.wire.protocol import decode_refusal, encode_frame, encode_options
from tests.bad_input.raw_client import RawClient, rejects
from tests.conftest import Group, wait_until

READ_TIMEOUT_MS = 300
OUTPUT_BYTES = 1 << 20
CONNECTIONS = 24
ROOT_ONLY = pytest.mark.skipif(os.getuid() != 0, reason="needs root")


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """One group with narrow limits for all tests that break nothing in it."""
    started = Group(
        tmp_path_factory.mktemp("clients") / "store",
        max_queues=64,
        max_connections=CONNECTIONS,
        frame_read_timeout_ms=READ_TIMEOUT_MS,
        client_output_bytes=OUTPUT_BYTES,
    ).start()
    yield started
    started.close()


@pytest.fixture
def client(group: Group) -> Iterator[Client]:
    with group.client() as client:
        yield client


def frame() -> bytes:
    """A whole append of one message."""
    options = encode_options(AppendRequest("partial", 1, bodies_bytes=4))
    return b"".join(map(bytes, encode_frame(Operation.APPEND, 1, options, (struct.pack("<I", 4) + b"body",))))


# Frames that do not arrive


@pytest.mark.parametrize("size", [1, 31, 33, -1])
def test_a_frame_that_ends_amid_is_dropped(group: Group, client: Client, size: int) -> None:
    written = group.words()["written"]
    with RawClient(group.paths.socket(WRITER)) as partial:
        partial.send(frame()[:size])
        partial.sock.shutdown(socket.SHUT_WR)
        assert partial.is_closed()
    assert group.words()["written"] == written
    assert client.send("partial", b"whole").queue_offset >= 0


def test_a_frame_that_trickles_in_ends_the_connection(group: Group, client: Client) -> None:
    data = frame()
    with RawClient(group.paths.socket(WRITER)) as slow:
        slow.sock.settimeout(0.1)
        sent = 0
        for byte in data:
            slow.send(bytes([byte]))
            sent += 1
            with contextlib.suppress(TimeoutError):
                found = slow.frame()
                break
        assert sent < len(data), "the whole frame was taken"
        assert found is None or decode_refusal(found.options).code == "TIMEOUT"
    assert client.send("partial", b"whole").queue_offset >= 0


# Clients that take too much


def test_a_client_that_does_not_read_is_let_go(group: Group, client: Client) -> None:
    client.send_batch("large", [b"x" * 100_000] * 40, queue_id=0)
    group.wait_dispatched()
    with RawClient(group.paths.socket(QUERY)) as silent:
        silent.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.sock.settimeout(0.2)
        with contextlib.suppress(TimeoutError):
            for _ in range(40):
                silent.request(Operation.PULL, PullRequest("large", 0, 0))
                assert client.pull("large", 0, 0, 1).status is PullStatus.FOUND, "the others are served meanwhile"
        wait_until(lambda: rejects(group, QUERY)["SLOW_CONSUMER"], 40, "the end of the silent client")
    assert client.pull("large", 0, 0, 1).status is PullStatus.FOUND


def test_there_are_no_more_connections_than_allowed(group: Group) -> None:
    path = group.paths.socket(WRITER)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(RawClient(path)) for _ in range(CONNECTIONS)]
        assert all(each.serves() for each in clients)
        beyond = stack.enter_context(RawClient(path))
        assert isinstance(beyond.refusal(), TooManyConnectionsError)
        assert beyond.is_closed()
        assert all(each.serves() for each in clients)
    with group.client() as client:
        assert client.send("partial", b"there is room again").queue_offset >= 0


AS_ANOTHER = """
import os, socket, sys
os.setuid(65534)
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
sock.settimeout(20)
data = b""
while piece := sock.recv(65536):
    data += piece
sys.stdout.buffer.write(data)
"""


@ROOT_ONLY
def test_another_user_is_refused_before_anything_is_read() -> None:
    with tempfile.TemporaryDirectory(prefix="mqproc-other-") as folder:
        group = Group(Path(folder) / "s").start()
        try:
            path = group.paths.socket(WRITER)
            for each in (*list(path.parents)[:-2], path):
                each.chmod(0o777)
            done = subprocess.run(
                [sys.executable, "-c", AS_ANOTHER, str(path)], capture_output=True, check=True, timeout=60
            )
            assert PermissionDeniedError.code.encode() in done.stdout
        finally:
            group.close()


# What has no place


def test_an_empty_body_is_a_message(group: Group, client: Client) -> None:
    told = client.send("empty", b"")
    group.wait_dispatched()
    assert client.get(told.message_id).body == b""


def test_new_queues_beyond_max_queues_are_refused_and_the_others_go_on(group: Group, client: Client) -> None:
    client.send("old", b"before")
    with pytest.raises(TooManyQueuesError, match="max_queues = 64"):
        client.create_topic("wide", 65)
    assert client.send("old", b"after").queue_offset >= 0


def test_reads_make_no_topics(group: Group, client: Client) -> None:
    before = client.topics()
    for topic, queue_id in (("nobody", 0), ("old", 77), ("old", -1)):
        assert client.pull(topic, queue_id, 0).status is PullStatus.NO_MATCHED_LOGIC_QUEUE
    assert client.topics() == before


def test_pulls_outside_say_where_to_go_on(group: Group, client: Client) -> None:
    client.send_batch("bounds", [b"a", b"b", b"c"], queue_id=0)
    group.wait_dispatched()
    for offset, status, following in (
        (-1, PullStatus.OFFSET_TOO_SMALL, 0),
        (0, PullStatus.FOUND, 3),
        (3, PullStatus.OFFSET_OVERFLOW_ONE, 3),
        (4, PullStatus.OFFSET_OVERFLOW_BADLY, 3),
        (1 << 62, PullStatus.OFFSET_OVERFLOW_BADLY, 3),
    ):
        pulled = client.pull("bounds", 0, offset)
        assert (pulled.status, pulled.next_offset) == (status, following), offset
        assert (pulled.min_offset, pulled.max_offset) == (0, 3)


@pytest.mark.parametrize(("asked", "found"), [(0, 1), (-5, 1), (1_000_000_000, 3)])
def test_numbers_of_messages_are_held_within_limits(group: Group, client: Client, asked: int, found: int) -> None:
    client.create_topic("clamped", 1)
    if not client.queues("clamped")[0].max_offset:
        client.send_batch("clamped", [b"a", b"b", b"c"], queue_id=0)
        group.wait_dispatched()
    assert len(client.pull("clamped", 0, 0, asked).messages) == found


# Progress


def test_progress_beyond_the_end_or_back_is_refused_and_unchanged(group: Group, client: Client) -> None:
    client.create_topic("progress", 1)
    client.send_batch("progress", [b"x"] * 10, queue_id=0)
    group.wait_dispatched()
    groups = client.groups
    groups.commit("careful", "progress", 0, 5)
    with pytest.raises(OffsetOverflowError, match="11"):
        groups.commit("careful", "progress", 0, 11)
    with pytest.raises(StaleOffsetError, match="stands at 5"):
        groups.commit("careful", "progress", 0, 4)
    with pytest.raises(NoSuchQueueError):
        groups.commit("careful", "progress", 1, 0)
    (queue,) = groups.info("careful").queues
    assert queue.offset == 5
    groups.execute("careful", groups.plan_reset("careful", ResetTo(earliest=True)))
    assert groups.info("careful").queues[0].offset == 0


# A disk that is full, a disk that fails


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m,mode=0700", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@ROOT_ONLY
def test_a_full_disk_refuses_sends_and_serves_reads(small_disk: Path) -> None:
    group = Group(small_disk / "store", max_queues=64).start()
    try:
        with group.client() as client:
            kept = client.send("room", b"first")
            refusal, stored = fill(client)
            assert isinstance(refusal, DiskFullError)
            assert client.get(kept.message_id).body == b"first"
            group.wait_dispatched()
            assert client.count("room") == 1 + stored
    finally:
        group.close()


def fill(client: Client) -> tuple[MqprocError, int]:
    """Send until it is refused: with what, and how many messages were stored."""
    for number in range(1000):
        try:
            client.send("room", b"x" * 200_000)
        except MqprocError as error:
            return error, number
    raise AssertionError("the disk has room for everything")


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


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler, to make syncs fail in real processes")
def test_after_a_failed_sync_the_store_is_read_only(
    make_group: Callable[..., Group], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, switch = tmp_path / "failing.so", tmp_path / "fail"
    (tmp_path / "failing.c").write_text(FAILING)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "failing.c", "-ldl"], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("FAIL_SYNC_WHEN", str(switch))
    group = make_group(flush_disk_type="SYNC_FLUSH")
    monkeypatch.delenv("LD_PRELOAD")
    with group.client() as client:
        kept = client.send("disk", b"durable")
        switch.touch()
        with pytest.raises((FlushFailedError, StoreReadOnlyError)):
            client.send("disk", b"not durable")
        with pytest.raises(StoreReadOnlyError, match="repair"):
            client.send("disk", b"refused")
        assert client.get(kept.message_id).body == b"durable"
        assert client.health().read_only
