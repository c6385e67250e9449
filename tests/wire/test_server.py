"""The socket server with real sockets: bad clients are disconnected, others unaffected.

A test is both sides: it writes bytes into a client's socket, steps the server, and checks the answers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import socket
import time
from random import Random

import pytest

from mqproc.errors import (
    FrameTooLargeError,
    InternalError,
    MqprocError,
    PermissionDeniedError,
    StoreBusyError,
    TooManyConnectionsError,
    UnknownCommandError,
    UnsupportedVersionError,
)
from mqproc.layout.frame import ANSWER, CONNECTION_ID, HEADER, MAGIC, VERSION
from mqproc.wire.frames import ClientProtocol, FrameReader, decode_refusal, encode_frame, encode_options
from mqproc.wire.operations import Empty, Operation, PullRequest
from mqproc.wire.server import ServerLimits, SocketServer
from tests.wire.conftest import APPEND, IMPATIENT, LIMITS, HandClock, Peer, Server, check_echo, request


def test_server_answers_request(serve: Server) -> None:
    with Peer(serve()) as peer:
        check_echo(peer)


@pytest.mark.parametrize("size", [0, 1, 100_000, (1 << 20) - 200])
def test_server_reads_frames_of_all_sizes(serve: Server, size: int) -> None:
    payload = os.urandom(size)
    with Peer(serve()) as peer:
        data = request(payload)
        found = []
        for start in range(0, len(data), 60_001):
            found += peer.send(data[start : start + 60_001])
        assert [bytes(one.payload) for one in found] == [payload]


def test_server_reads_frames_split_anywhere(serve: Server) -> None:
    with Peer(serve()) as peer:
        data = b"".join(request(b"p" * index, index + 1) for index in range(40))
        found: list[tuple[int, bytes]] = []
        for start in range(0, len(data), 7):
            found += [(one.request_id, bytes(one.payload)) for one in peer.send(data[start : start + 7])]
        assert found == [(index + 1, b"p" * index) for index in range(40)]


def test_server_frees_memory_of_largest_frame(serve: Server) -> None:
    limits = ServerLimits(frame_bytes=64 << 20)
    with Peer(serve(limits)) as peer:
        payload = bytes(range(256)) * (1 << 18)
        payload = payload[: (64 << 20) - 33]
        (found,) = peer.send(request(payload))
        assert found.payload == payload
        peer.server.poll(0)
        assert all(connection.reader is None for connection in peer.server.connections.values())
        check_echo(peer)


def test_server_reads_many_clients_in_one_poll(serve: Server) -> None:
    server = serve()
    peers = [Peer(server) for _ in range(8)]
    sizes = [10, 300_000, 20, 150_000, 90_000, 30, 200_000, 1]
    payloads = [bytes([index]) * size for index, size in enumerate(sizes)]
    frames = [request(payload, index + 1) for index, payload in enumerate(payloads)]
    for peer, frame in zip(peers, frames, strict=True):
        peer.sock.send(frame[: len(frame) // 2])
    found = {one.request_id: bytes(one.payload) for one in server.poll(0.1)}
    for peer, frame in zip(peers, frames, strict=True):
        rest = memoryview(frame)[len(frame) // 2 :]
        while rest:
            with contextlib.suppress(BlockingIOError):
                rest = rest[peer.sock.send(rest) :]
            found |= {one.request_id: bytes(one.payload) for one in server.poll(0)}
    while requests := server.poll(0.05):
        found |= {one.request_id: bytes(one.payload) for one in requests}
    assert found == {index + 1: payload for index, payload in enumerate(payloads)}
    for peer in peers:
        peer.sock.close()


def test_server_views_stay_valid_until_next_poll(serve: Server) -> None:
    server = serve()
    peers = [Peer(server) for _ in range(8)]
    payloads = [bytes([65 + index]) * 150_000 for index in range(8)]
    for peer, payload in zip(peers, payloads, strict=True):
        view = memoryview(request(payload))
        peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        while view:
            view = view[peer.sock.send(view) :]
    seen = []
    while requests := server.poll(0.05):
        texts = [bytes(one.payload) for one in requests]
        assert all(len(set(text)) == 1 for text in texts)
        seen += texts
    assert sorted(seen) == payloads
    for peer in peers:
        peer.sock.close()


def test_server_answers_late_and_in_any_order(serve: Server) -> None:
    with Peer(serve()) as peer:
        first, second = peer.send(request(b"a", 1) + request(b"b", 2))
        for held in (second, first):
            held.connection.answer(held.request_id, held.operation)
        peer.wait_for(lambda: len(peer.frames) == 2)
        assert [frame.request_id for frame in peer.frames] == [2, 1]


def test_server_decodes_options_by_operation(serve: Server) -> None:
    with Peer(serve()) as peer:
        options = PullRequest("orders", 3, 17)
        (found,) = peer.send(b"".join(encode_frame(Operation.PULL, 1, encode_options(options))))
        assert found.decode() == options


def test_server_unknown_command_keeps_connection(serve: Server) -> None:
    with Peer(serve(operations=frozenset({APPEND}))) as peer:
        assert peer.send(request(operation=Operation.PULL)) == []
        assert peer.send(request(operation=4711, request_id=2) + request(operation=APPEND | ANSWER, request_id=3)) == []
        peer.wait_for(lambda: len(peer.frames) == 3)
        assert [frame.request_id for frame in peer.frames] == [1, 2, 3]
        assert {type(decode_refusal(frame.options)) for frame in peer.frames} == {UnknownCommandError}
        peer.frames.clear()
        assert peer.server.rejects["UNKNOWN_COMMAND"] == 3
        check_echo(peer)


def test_server_does_not_read_oversized_frame(serve: Server) -> None:
    with Peer(serve()) as peer:
        header = HEADER.pack(MAGIC, VERSION, APPEND, 5, 0, 0, 100 << 20)
        peer.send(header + bytes(1000))
        assert type(peer.refusal()) is FrameTooLargeError
        assert peer.frames[0].request_id == 5
        assert peer.server.connections == {}


@pytest.mark.parametrize("data", [HEADER.pack(MAGIC, 9, APPEND, 5, 0, 0, 0), b"GET / HTTP/1.1\r\n\r\n"])
def test_server_other_version_is_told_supported_one(serve: Server, data: bytes) -> None:
    with Peer(serve()) as peer:
        peer.send(data)
        error = peer.refusal()
        assert type(error) is UnsupportedVersionError
        assert f"speaks 1..{VERSION}" in str(error)


def test_server_counts_partial_frame(serve: Server) -> None:
    partial: list[None] = []
    server = serve(on_partial=lambda: partial.append(None))
    with Peer(server) as peer:
        peer.send(request(b"hello")[:-1])
    with Peer(server) as peer:
        peer.send(request(bytes(100_000))[:-1])
    with Peer(server):
        pass
    with Peer(server) as peer:
        peer.send(b"GET / HTTP/1.1")
    server.poll(0.01)
    assert server.partial_frames == len(partial) == 2, "a client that sends nothing has no partial frame"
    assert server.connections == {}


def test_server_closes_slow_loris(serve: Server) -> None:
    server = serve(IMPATIENT)
    with Peer(server) as peer, Peer(server) as good:
        with contextlib.suppress(BrokenPipeError):
            for byte in request(b"hello"):
                peer.sock.send(bytes([byte]))
                time.sleep(0.01)
                assert server.poll(0) == []
        assert server.read_timeouts == 1
        check_echo(good)


def test_server_closes_slow_loris_in_large_frame(serve: Server) -> None:
    with Peer(serve(IMPATIENT)) as peer:
        with contextlib.suppress(BrokenPipeError):  # A slow sender is disconnected before the end.
            peer.send(request(bytes(900_000))[:500_000])
        peer.wait_for(lambda: peer.ended)
        assert peer.server.read_timeouts == 1


def test_server_times_each_frame(serve: Server, clock: HandClock) -> None:
    with Peer(serve(dataclasses.replace(LIMITS, frame_read_s=2.0))) as peer:
        frame = request(b"hello")
        peer.send(frame[:-1])
        for _ in range(6):
            clock.advance(peer.server, 0.4)
            assert len(peer.send(frame[-1:] + frame[:-1])) == 1
        assert peer.server.read_timeouts == 0


def test_server_keeps_idle_client(serve: Server) -> None:
    with Peer(serve(IMPATIENT)) as peer:
        check_echo(peer)
        end = time.monotonic() + 0.4
        while time.monotonic() < end:
            peer.server.poll(0.05)
        check_echo(peer)


def test_server_closes_client_that_never_reads(serve: Server) -> None:
    server = serve(IMPATIENT)
    with Peer(server) as silent, Peer(server) as good:
        (found,) = silent.send(request())
        connection = found.connection
        for _ in range(5):
            connection.answer(1, APPEND, payload=[bytes(1 << 20)])
        assert connection.paused
        assert silent.send(request(request_id=2)) == [], "a paused client is not listened to"
        check_echo(good)
        end = time.monotonic() + 60
        while not connection.closed and time.monotonic() < end:
            check_echo(good)
        assert server.slow_consumers == 1
        assert server.rejects["SLOW_CONSUMER"] == 1
        connection.answer(2, APPEND)  # dropped without an error


def test_server_keeps_slow_reader(serve: Server) -> None:
    with Peer(serve()) as peer:
        (found,) = peer.send(request())
        payload = os.urandom(5 << 20)
        found.answer(payload=[payload])
        assert found.connection.paused
        data = b""
        while len(data) < len(payload):
            peer.server.poll(0.02)
            data += peer.sock.recv(100_000)
        assert not found.connection.paused
        peer.reader.feed(data)
        peer.wait_for(lambda: bool(peer.frames))
        assert peer.frames.pop().payload == payload
        check_echo(peer)


def test_server_copies_queued_answer_unless_owned(serve: Server) -> None:
    with Peer(serve(ServerLimits())) as peer:
        (found,) = peer.send(request())
        hot = bytearray(b"a" * (3 << 20))
        found.answer(payload=[hot])
        hot[:] = b"b" * len(hot)
        peer.wait_for(lambda: bool(peer.frames))
        assert set(bytes(peer.frames[0].payload)) == {ord("a")}


def test_server_sends_held_answers_together_in_order(serve: Server) -> None:
    server = serve()
    with Peer(server) as first, Peer(server) as second:
        requests = first.send(b"".join(request(request_id=number) for number in range(1, 6)))
        (other,) = second.send(request(request_id=9))
        server.hold_answers()
        for one in requests[:3]:
            one.answer(Empty(), [b"early"], owned=True)
        other.refuse(StoreBusyError("later"))
        for one in requests[3:]:
            one.answer(Empty(), [b"late"], owned=True)
        first.read()
        second.read()
        assert not first.frames
        assert not second.frames
        server.send_answers()
        first.wait_for(lambda: len(first.frames) == 5)
        assert [frame.request_id for frame in first.frames] == [1, 2, 3, 4, 5]
        second.wait_for(lambda: len(second.frames) == 1)
        assert decode_refusal(second.frames.pop().options).code == StoreBusyError.code
        check_echo(second)


def test_server_unheld_answer_follows_held_ones(serve: Server) -> None:
    server = serve()
    with Peer(server) as peer:
        requests = peer.send(b"".join(request(request_id=number) for number in range(1, 5)))
        server.hold_answers()
        for one in requests[:2]:
            one.answer(Empty(), [b"held"], owned=True)
        requests[2].answer(Empty(), [b"not owned"], owned=False)
        requests[3].answer(Empty(), [b"held again"], owned=True)
        server.send_answers()
        peer.wait_for(lambda: len(peer.frames) == 4)
        assert [frame.request_id for frame in peer.frames] == [1, 2, 3, 4]


def test_server_client_gone_with_held_answers_is_ignored(serve: Server) -> None:
    server = serve()
    with Peer(server) as stays:
        gone = Peer(server)
        (lost,) = gone.send(request(request_id=1))
        (kept,) = stays.send(request(request_id=2))
        server.hold_answers()
        lost.answer(Empty(), [b"x"], owned=True)
        kept.answer(Empty(), [b"y"], owned=True)
        gone.sock.close()
        server.send_answers()
        stays.wait_for(lambda: len(stays.frames) == 1)
        server.poll(0.05)
        assert len(server.connections) == 1


def test_server_refuses_too_many_connections(serve: Server) -> None:
    server = serve()
    peers = [Peer(server) for _ in range(8)]
    with Peer(server) as peer:
        error = peer.refusal()
        assert type(error) is TooManyConnectionsError
        assert error.retryable
        assert error.hint_ms > 0
        assert peer.frames[0].request_id == CONNECTION_ID
    peers.pop().sock.close()
    server.poll(0.05)
    with Peer(server) as peer:
        check_echo(peer)
    for peer in peers:
        peer.sock.close()


def test_server_refuses_other_user(serve: Server) -> None:
    server = serve(allowed_uids={os.getuid() + 1})
    with Peer(server) as peer:
        assert type(peer.refusal()) is PermissionDeniedError


def test_server_without_descriptors_refuses_client(serve: Server) -> None:
    server = serve()
    waiting = [socket.socket(socket.AF_UNIX) for _ in range(2)]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    fillers = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.open(os.devnull, os.O_RDONLY))
        waiting[0].connect(server._acceptor._listener.getsockname().removesuffix(".tmp"))
        server.poll(0.1)
        reader = FrameReader(1 << 20)
        reader.feed(waiting[0].recv(1000))
        frame = reader.next_frame()
        assert frame is not None
        assert type(decode_refusal(frame.options)) is TooManyConnectionsError
    finally:
        for fd in fillers:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    waiting[1].connect(server._acceptor._listener.getsockname().removesuffix(".tmp"))
    server.poll(0.1)
    assert len(server.connections) == 1
    for sock in waiting:
        sock.close()


def test_server_thousand_idle_clients_are_cheap(serve: Server) -> None:
    server = serve(ServerLimits())
    peers = []
    for _ in range(1000):
        peers.append(socket.socket(socket.AF_UNIX))
        peers[-1].connect(server._acceptor._listener.getsockname().removesuffix(".tmp"))
        server.poll(0)
    frame = request(b"hello")
    answered = 0
    for peer in peers:
        peer.send(frame)
        for found in server.poll(0.1):
            found.answer()
            answered += 1
    assert answered == 1000
    assert len(server.connections) == 1000
    assert all(connection.reader is None for connection in server.connections.values())
    for peer in peers:
        peer.close()


def test_server_garbage_does_not_affect_other_clients(serve: Server) -> None:
    server = serve(ServerLimits(frame_bytes=1 << 20))
    random = Random(20261121)
    with Peer(server) as good:
        for _ in range(300):
            data = bytearray(b"".join(request(random.randbytes(random.randrange(300)), index) for index in range(4)))
            for _ in range(random.randrange(8)):
                data[random.randrange(len(data))] = random.randrange(256)
            with Peer(server) as bad, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for found in bad.send(bytes(data[: random.randrange(len(data))])):
                    with contextlib.suppress(MqprocError):
                        found.decode()
                    found.answer()
            check_echo(good)
    server.poll(0.01)
    assert server.connections == {}


def test_server_bell_ends_wait(serve: Server) -> None:
    server = serve()
    bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    rung = []
    server.register(bell, lambda: rung.append(os.eventfd_read(bell)))
    os.eventfd_write(bell, 3)
    start = time.monotonic()
    assert server.poll(60.0) == []
    assert time.monotonic() - start < 30
    assert rung == [3]
    assert server.poll(0) == []
    os.close(bell)


def test_server_reports_client_that_left(serve: Server) -> None:
    left = []
    server = serve(on_close=left.append)
    with Peer(server) as peer:
        (found,) = peer.send(request())
    server.poll(0.05)
    assert left == [found.connection]
    assert found.connection.closed


def test_server_stop_accepting_and_drain_send_the_rest(serve: Server) -> None:
    server = serve()
    with Peer(server) as peer:
        (found,) = peer.send(request())
        server.stop_accepting()
        with Peer(server):
            assert len(server.connections) == 1
        found.answer(payload=[bytes(3 << 20)])
        assert found.connection.output.waiting_bytes > 0
        server.drain(0.05)
        peer.wait_for(lambda: bool(peer.frames))


def test_server_shut_down_client_is_answered_but_not_read(serve: Server) -> None:
    server = serve()
    with Peer(server) as peer:
        peer.sock.sendall(request())
        server.hang_up()
        with pytest.raises(BrokenPipeError):
            peer.sock.sendall(request())
        (found,) = server.poll(0.05)
        found.answer()
        assert server.poll(0.05) == []
        assert found.connection.closed
        assert peer.sock.recv(1000), "the answer"


def test_server_works_with_client_protocol(serve: Server) -> None:
    with Peer(serve()) as peer:
        protocol = ClientProtocol(1 << 20)
        request_id, pieces = protocol.request(APPEND, b"\x90", [b"abc"])
        (found,) = peer.send(b"".join(pieces))
        found.refuse(StoreBusyError("later", hint_ms=9))
        protocol.reader.feed(peer.sock.recv(1000))
        answer = protocol.next_answer()
        assert answer is not None
        assert isinstance(answer.error, StoreBusyError)
        assert (answer.request_id, answer.error.hint_ms) == (request_id, 9)
        assert peer.server.rejects["STORE_BUSY"] == 1


# Unexpected errors


def test_server_unexpected_error_closes_only_that_connection(serve: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Exception] = []
    server = serve(on_error=seen.append)
    other = Peer(server)
    for name in ("_read_shared", "_cut_shared", "_take_frames", "_set_time"):
        with Peer(server) as peer:
            with monkeypatch.context() as patch:
                patch.setattr(SocketServer, name, _fail)
                assert peer.send(request(b"x" * 100)[:50]) == []
            assert isinstance(peer.refusal(), InternalError), name
        check_echo(other)
    assert {type(error) for error in seen} == {RecursionError}
    assert server.rejects[InternalError.code] == len(seen) == 4
    other.sock.close()


def test_server_error_of_a_close_handler_is_reported(serve: Server) -> None:
    seen: list[Exception] = []
    server = serve(on_error=seen.append, on_close=_fail)
    with Peer(server) as other:
        with Peer(server):
            pass
        server.poll(0)
        assert [type(error) for error in seen] == [RecursionError]
        check_echo(other)


def test_server_error_while_accepting_closes_that_client(serve: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Exception] = []
    server = serve(on_error=seen.append)
    with monkeypatch.context() as patch:
        patch.setattr("mqproc.wire.server.peer_uid", _fail)
        with Peer(server) as peer:
            peer.wait_for(lambda: peer.ended)
    assert [type(error) for error in seen] == [RecursionError]
    with Peer(server) as peer:
        check_echo(peer)


def test_server_error_text_that_is_not_utf_8_is_sent(serve: Server) -> None:
    with Peer(serve()) as peer:
        (found,) = peer.send(request())
        found.refuse(StoreBusyError("/data/\udcff is full"))
        peer.wait_for(lambda: bool(peer.frames))
        assert "/data/\\udcff is full" in str(decode_refusal(peer.frames.pop().options))


def _fail(*_: object) -> None:
    raise RecursionError("planted")
