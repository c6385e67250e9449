"""What clients of a running group may do wrong beside what single frames say."""

from __future__ import annotations

import contextlib
import itertools
import resource
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Callable

import msgspec
import pytest

from mqproc import Client, MqprocError, TooManyQueuesError
from mqproc.client import core
from mqproc.client.group_steps import ResetTo
from mqproc.layout.control import QUERY, ROLES, WRITER
from mqproc.message import PullStatus
from mqproc.wire.address import connect_path
from mqproc.wire.operations import AppendRequest, Operation, PullAnswer, PullRequest
from mqproc.wire.protocol import FrameReader, decode_refusal, encode_frame, encode_options
from tests.bad_input.raw_client import ANSWER_S, FRAME_BYTES_MAX, RawClient, rejects
from tests.bad_input.scene import CONNECTIONS, Answer, Scene
from tests.conftest import Group, wait_until

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
# Whoever hangs up without having read what was sent says so behind the answer.
with contextlib.suppress(ConnectionResetError):
    while piece := sock.recv(65536):
        sys.stdout.buffer.write(piece)
"""


def frame() -> bytes:
    """A whole append of one message."""
    options = encode_options(AppendRequest("partial", 1, bodies_bytes=4))
    return b"".join(map(bytes, encode_frame(Operation.APPEND, 1, options, (struct.pack("<I", 4) + b"body",))))


def raised(scene: Scene, act: Callable[[Client], object]) -> Answer:
    """What a client is told that does this."""
    with scene.group.client() as client:
        try:
            return Answer("", repr(act(client)))
        except MqprocError as error:
            return Answer(error.code, str(error))


# Frames that do not arrive


def ends_amid(scene: Scene) -> Answer:
    """Frames end in the header, behind it, and one byte before their end; each is counted."""
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
    """A byte each 100 ms, until the role answers: the frame is never whole."""
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


# Clients that take too much


def reads_nothing(scene: Scene) -> Answer:
    """It asks and asks; the others are served meanwhile."""
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
    """Whether a connection ends behind what has been sent on it."""
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(1 << 20):
            pass
    return True


def one_connection_more(scene: Scene) -> Answer:
    """All that are allowed are served, with one more turned away."""
    path = scene.group.paths.socket(WRITER)
    clients: list[RawClient] = []
    with contextlib.ExitStack() as stack:
        # Another role may have a connection too. The word is right when the step of the first ping is over.
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
    """All folders on the way are open for once, so that only the socket's own check is left. It sends some bytes."""

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
    """What was answered, and then the connection closed: a refusal, and nothing more."""
    reader = FrameReader(FRAME_BYTES_MAX)
    reader.feed(data)
    found = reader.next_frame()
    assert found is not None, "no answer"
    error = decode_refusal(found.options)
    assert reader.next_frame() is None
    return Answer(error.code, str(error), closed=True)


def ten_thousand(scene: Scene) -> Answer:
    """So many are served at a time, each one more is turned away, and when some have gone others come in."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < CROWD + BEYOND + SPARE_FILES:
        pytest.skip(f"a process may open {hard:,} files only")
    group = scene.another(Group(scene.folder / "crowded", max_connections=CROWD)).start()
    with contextlib.ExitStack() as stack:
        # Of this process, which runs other tests afterwards.
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        crowd: list[socket.socket] = []
        while len(crowd) < CROWD + BEYOND:
            crowd.append(stack.enter_context(socket.socket(socket.AF_UNIX)))
            crowd[-1].connect(str(connect_path(group.paths.socket(WRITER))))
        wait_until(lambda: rejects(group, WRITER)["TOO_MANY_CONNECTIONS"] >= BEYOND, what="those beyond refused")
        away = _readable(crowd)
        # Other roles may have a connection too.
        assert BEYOND <= len(away) <= BEYOND + len(ROLES)
        (answer,) = {_refused(_read(sock)) for sock in away}
        for sock in {crowd[0], crowd[CROWD // 2], crowd[CROWD - len(ROLES)]} - away:
            sock.sendall(frame())
            assert sock.recv(1)
        # The word is right when a step with a request in it is over.
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
    """All that comes until the other side hangs up."""
    sock.settimeout(ANSWER_S)
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


# What has no place, and what has one after all


def queues_beyond_all(scene: Scene) -> Answer:
    """The table is full: no topic is made, by a send or otherwise, and none gets more queues; the others go on."""
    group = scene.another(Group(scene.folder / "many", max_queues=32)).start()
    with group.client() as client:
        client.create_topic("first", 1)
        client.send("first", b"before")
        assert _make_topics(client) == "1 more queues exceed max_queues = 32; 0 are left"
        before = {topic.topic: topic.queues for topic in client.topics()}
        for topic in (f"topic{number}" for number in range(3)):
            client.send(topic, b"goes on")
        with pytest.raises(TooManyQueuesError):
            client.create_topic("first", 2)
        with pytest.raises(TooManyQueuesError) as refused:
            client.send("beyond", b"refused")
        client.send("first", b"behind")
        group.wait_dispatched()
        assert [message.body for message in client.pull("first", 0, 0).messages] == [b"before", b"behind"]
        assert {topic.topic: topic.queues for topic in client.topics()} == before
    group.close()
    return Answer(refused.value.code, str(refused.value))


def sends_an_empty_body(scene: Scene) -> Answer:
    """It comes back as it was."""
    with scene.group.client() as client:
        told = client.send("empty", b"")
        scene.group.wait_dispatched()
        return Answer("", f"body {client.get(told.message_id).body!r}")


def _make_topics(client: Client) -> str:
    """Make topics of one queue until one is refused; what that says."""
    with contextlib.suppress(TooManyQueuesError):
        for number in itertools.count():
            client.create_topic(f"topic{number}", 1)
    try:
        client.create_topic("last", 1)
    except TooManyQueuesError as error:
        return str(error)
    return ""


def pulls_what_is_not_there(scene: Scene) -> Answer:
    """A topic and queues that are not there; none is made."""
    with scene.group.client() as client:
        before = client.topics()
        places = (("nobody", 0), ("known", 77), ("known", -1))
        (status,) = {client.pull(topic, queue_id, 0).status.value for topic, queue_id in places}
        assert client.topics() == before
        return Answer(status)


def pulls_at(offset: int) -> Callable[[Scene], Answer]:
    """A pull of a queue of three messages."""

    def does(scene: Scene) -> Answer:
        with scene.group.client() as client:
            pulled = client.pull("three", 0, offset)
            bounds = f"[{pulled.min_offset}, {pulled.max_offset})"
            return Answer(pulled.status.value, f"next {pulled.next_offset} of {bounds}")

    return does


def pulls_so_many(asked: int) -> Callable[[Scene], Answer]:
    """A pull of a number of messages from a queue of three."""

    def does(scene: Scene) -> Answer:
        with scene.group.client() as client:
            pulled = client.pull("three", 0, 0, asked)
            return Answer(pulled.status.value, f"{len(pulled.messages)} messages")

    return does


def pulls_by_frame(asked: int, most_bytes: int = 1 << 60) -> Callable[[Scene], Answer]:
    """A pull of 40 messages of 100,000 bytes, as no client of ours would ask for it."""

    def does(scene: Scene) -> Answer:
        with RawClient(scene.group.paths.socket(QUERY)) as raw:
            raw.request(Operation.PULL, PullRequest("large", 0, 0, asked, most_bytes))
            found = raw.frame()
            assert found is not None
            answer = msgspec.msgpack.decode(found.options, type=PullAnswer)
        assert answer.next_offset == answer.count
        return Answer(answer.status, f"{answer.count} messages of {answer.max_offset}")

    return does


# Progress


def commits(offset: int) -> Callable[[Scene], Answer]:
    """Progress of a group that stands at 2 of 3; it stands there behind a refusal."""

    def does(scene: Scene) -> Answer:
        answer = raised(scene, lambda client: client.groups.commit("careful", "three", 0, offset))
        with scene.group.client() as client:
            (queue,) = client.groups.info("careful").queues
            assert queue.offset == 2
        return answer

    return does


def resets_back(scene: Scene) -> Answer:
    """What a commit may not, a reset may."""
    with scene.group.client() as client:
        client.groups.execute("reset", client.groups.plan_reset("reset", ResetTo(earliest=True)))
        (queue,) = client.groups.info("reset").queues
        return Answer("", f"stands at {queue.offset}")
