"""Clients that do not read their answers in time, and the frames they have sent meanwhile."""

from __future__ import annotations

import dataclasses

from tests.wire.conftest import LIMITS, HandClock, Peer, Server, request


def test_frame_time_excludes_time_not_listening(serve: Server, clock: HandClock) -> None:
    server = serve(dataclasses.replace(LIMITS, frame_read_s=0.3))
    with Peer(server) as peer:
        frame = request(b"hello", 2)
        (found,) = peer.send(request() + frame[:-1])
        found.answer(payload=[bytes(5 << 20)])
        peer.sock.send(frame[-1:])
        clock.go_on(server, 0.4)
        while found.connection.paused:
            peer.read()
            assert server.poll(0.01) == []
        clock.now_s += 0.1  # As a role that is busy: all times are looked at next.
        (late,) = server.poll(1)
        assert late.request_id == 2
        assert server.read_timeouts == 0
