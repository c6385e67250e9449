"""What lies in a buffer that clients are read into stays there while requests are made of it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pytest

from mqproc.wire.connection import FrameRun, Request
from mqproc.wire.limits import Limits
from mqproc.wire.runs import RunCutter
from mqproc.wire.shared_buffer import BUFFER_BYTES
from tests.wire.peer import APPEND, Peer, Server, request


@pytest.mark.parametrize("in_runs", [False, True])
def test_what_is_read_behind_requests_that_waited_is_not_written_over_them(serve: Server, in_runs: bool) -> None:
    limits = Limits(requests_per_poll=3)
    payloads = [bytes([65 + index]) * 1000 for index in range(5)] + [b"z" * (BUFFER_BYTES - 1000)]
    data = memoryview(b"".join(request(payload, index + 1) for index, payload in enumerate(payloads)))
    with Peer(serve(limits)) as peer:
        peer.server._runs = RunCutter(APPEND, limits.frame_bytes) if in_runs else None
        found: list[bytes] = []
        # The last frame needs the whole buffer, at whose begin the others lie.
        for size in (20_000, 100_000, len(data)):
            part, data = data[:size], data[size:]
            while part:
                with contextlib.suppress(BlockingIOError):
                    part = part[peer.sock.send(part) :]
                found += payloads_of(peer.server.poll_runs(0))
        while requests := peer.server.poll_runs(0.1):
            found += payloads_of(requests)
        assert found == payloads


def payloads_of(requests: Sequence[Request | FrameRun]) -> list[bytes]:
    """Those of requests and of the frames of runs, in their order."""
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
