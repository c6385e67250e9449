"""Client timeouts for sending and reading run only while the server checks its clients."""

from __future__ import annotations

import dataclasses
import time

from mqproc.errors import RequestTimeoutError
from tests.wire.conftest import IMPATIENT, LIMITS, HandClock, Peer, Server, request


def stand_still() -> None:
    """Simulate a process that was stopped for longer than the client timeouts."""
    time.sleep(3 * IMPATIENT.frame_read_s)


def test_partial_frame_before_server_stall_is_served_after(serve: Server) -> None:
    with Peer(serve(IMPATIENT)) as peer:
        frame = request(b"hello", 2)
        assert peer.send(frame[:-1]) == []
        stand_still()
        assert peer.server.poll(0) == []
        (found,) = peer.send(frame[-1:])
        assert bytes(found.payload) == b"hello"
        assert peer.server.read_timeouts == 0


def test_partial_frame_times_out_in_listening_time(serve: Server) -> None:
    with Peer(serve(IMPATIENT)) as peer:
        peer.send(request(b"hello")[:-1])
        stand_still()
        assert isinstance(peer.refusal(), RequestTimeoutError)
        assert peer.server.read_timeouts == 1


def test_unread_answers_get_time_of_server_stall(serve: Server) -> None:
    with Peer(serve(IMPATIENT)) as peer:
        (found,) = peer.send(request())
        found.answer(payload=[bytes(5 << 20)])
        assert found.connection.paused
        stand_still()
        peer.server.poll(0)
        assert not found.connection.closed
        peer.wait_for(lambda: bool(peer.frames))
        assert peer.server.slow_consumers == 0


def test_frame_time_excludes_time_not_listening(serve: Server, clock: HandClock) -> None:
    server = serve(dataclasses.replace(LIMITS, frame_read_s=0.3))
    with Peer(server) as peer:
        frame = request(b"hello", 2)
        (found,) = peer.send(request() + frame[:-1])
        found.answer(payload=[bytes(5 << 20)])
        peer.sock.send(frame[-1:])
        clock.advance(server, 0.4)
        while found.connection.paused:
            peer.read()
            assert server.poll(0.01) == []
        clock.now_s += 0.1  # A busy role: all timeouts are checked next.
        (late,) = server.poll(1)
        assert late.request_id == 2
        assert server.read_timeouts == 0
