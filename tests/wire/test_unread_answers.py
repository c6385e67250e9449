"""Clients that do not read their answers in time: what the socket server does with what they have sent meanwhile."""

from __future__ import annotations

import dataclasses
import os
import time

from tests.wire.peer import LIMITS, Peer, Server, request


def test_requests_of_a_client_that_is_not_listened_to_do_not_keep_the_server_busy(serve: Server) -> None:
    server = serve(dataclasses.replace(LIMITS, requests_per_poll=3))
    with Peer(server) as peer:
        peer.sock.send(b"".join(request(request_id=index) for index in range(1, 11)))
        first, *_ = server.poll(0)
        payload = os.urandom(5 << 20)
        first.answer(payload=[payload])
        assert first.connection.paused
        polls, end = 0, time.monotonic() + 0.3
        while time.monotonic() < end:
            assert server.poll(0.3) == []
            polls += 1
        assert polls < 30, "it waits, though for times only"
        found: list[int] = []
        while len(found) < 7:
            found += [one.request_id for one in server.poll(0.01)]
            peer.read()
        assert found == list(range(4, 11))
        peer.wait_for(lambda: bool(peer.frames))
        assert peer.frames.pop().payload == payload


def test_the_time_in_which_a_client_is_not_listened_to_is_no_time_of_its_frames(serve: Server) -> None:
    server = serve(dataclasses.replace(LIMITS, frame_read_s=0.3))
    with Peer(server) as peer:
        frame = request(b"hello", 2)
        (found,) = peer.send(request() + frame[:-1])
        found.answer(payload=[bytes(5 << 20)])
        peer.sock.send(frame[-1:])
        end = time.monotonic() + 0.4
        while time.monotonic() < end:
            assert server.poll(0.05) == []
        while found.connection.paused:
            peer.read()
            assert server.poll(0.01) == []
        time.sleep(0.1)  # As a role that is busy: all times are looked at next.
        (late,) = server.poll(1)
        assert late.request_id == 2
        assert server.read_timeouts == 0
