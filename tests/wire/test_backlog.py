"""Requests that a poll leaves in the receive buffer for the next poll."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence

import pytest

from mqproc.wire.connection import FrameBatch, FrameBatcher, Request
from mqproc.wire.server import BUFFER_BYTES, ServerLimits
from tests.wire.conftest import APPEND, LIMITS, Peer, Server, check_echo, request


def test_requests_above_poll_limit_wait(serve: Server) -> None:
    with Peer(serve(ServerLimits(requests_per_poll=3))) as peer:
        data = b"".join(request(request_id=index) for index in range(1, 11))
        found = [peer.send(data)]
        while sum(map(len, found)) < 10:
            found.append(peer.server.poll(0))
        assert [one.request_id for poll in found for one in poll] == list(range(1, 11))
        assert max(map(len, found)) == 3
        check_echo(peer)


@pytest.mark.parametrize("in_runs", [False, True])
def test_requests_waiting_are_not_overwritten_by_later_reads(serve: Server, in_runs: bool) -> None:
    limits = ServerLimits(requests_per_poll=3)
    payloads = [bytes([65 + index]) * 1000 for index in range(5)] + [b"z" * (BUFFER_BYTES - 1000)]
    data = memoryview(b"".join(request(payload, index + 1) for index, payload in enumerate(payloads)))
    with Peer(serve(limits)) as peer:
        peer.server._runs = FrameBatcher(APPEND, limits.frame_bytes) if in_runs else None
        found: list[bytes] = []
        # The last frame needs the whole buffer, at whose beginning the others are.
        for size in (20_000, 100_000, len(data)):
            part, data = data[:size], data[size:]
            while part:
                with contextlib.suppress(BlockingIOError):
                    part = part[peer.sock.send(part) :]
                found += payloads_of(peer.server.poll_batches(0))
        while requests := peer.server.poll_batches(0.1):
            found += payloads_of(requests)
        assert found == payloads


def payloads_of(requests: Sequence[Request | FrameBatch]) -> list[bytes]:
    """Payloads of requests and of the frames in batches, in order."""
    found = []
    for one in requests:
        if isinstance(one, Request):
            found.append(bytes(one.payload))
            continue
        at = one.at
        while at < one.end:
            inside, at = one.request_at(at)
            found.append(bytes(inside.payload))
    return found


def test_client_reading_no_answers_causes_no_wakeups(serve: Server) -> None:
    with Peer(serve(dataclasses.replace(LIMITS, requests_per_poll=3))) as peer:
        found = peer.send(b"".join(request(request_id=index + 1) for index in range(5)))
        found[0].answer(payload=[bytes(LIMITS.output_bytes * 4)])
        assert found[0].connection.paused
        began_s = time.monotonic()
        assert peer.server.poll(60) == [], "a paused client is not listened to"
        # The server periodically checks for slow clients.
        assert time.monotonic() - began_s > 0.02
        while len(found) < 5:
            peer.read()
            found += peer.server.poll(0.01)
        assert [one.request_id for one in found] == list(range(1, 6))
