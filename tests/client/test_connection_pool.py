"""Waiting for answers: a thread spins while they are fast, otherwise it sleeps."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqproc.client import requests
from mqproc.client._async.connection import MultiplexedConnection
from mqproc.client._sync.connection_pool import PooledConnection
from mqproc.client.connection import Connection
from mqproc.layout.frame import ANSWER
from mqproc.wire.frames import FrameReader, encode_frame, encode_options
from mqproc.wire.operations import Empty
from tests.support.group import PATIENCE_S

SLOW_S = 0.02
NOWHERE = Path()


class Echo(threading.Thread):
    """Answers every request, each after `pause_s`."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(daemon=True)
        self.pause_s = 0.0
        self._sock = sock

    def run(self) -> None:
        reader = FrameReader(1 << 20)
        while data := self._sock.recv(1 << 16):
            reader.feed(data)
            while (frame := reader.next_frame()) is not None:
                time.sleep(self.pause_s)
                answer = encode_frame(frame.operation | ANSWER, frame.request_id, encode_options(Empty()), ())
                self._sock.sendall(b"".join(answer))


@pytest.fixture
def pair() -> Iterator[tuple[Connection, Echo]]:
    here, there = socket.socketpair()
    here.setblocking(False)
    echo = Echo(there)
    echo.start()
    yield Connection(here), echo
    here.close()
    echo.join(PATIENCE_S)
    there.close()


def ask(line: PooledConnection) -> float:
    """CPU seconds of this thread for one request."""
    began = time.thread_time()
    line.finish(line.connection.submit(requests.ping(requests.WRITER)), time.monotonic() + PATIENCE_S)
    return time.thread_time() - began


def test_slow_answers_are_slept_for(pair: tuple[Connection, Echo]) -> None:
    connection, echo = pair
    line = PooledConnection(connection, NOWHERE, spin_s=SLOW_S / 4)
    echo.pause_s = SLOW_S
    spent = [ask(line) for _ in range(12)]
    assert sum(spent[8:]) < SLOW_S / 4, "it looks for answers that never come so soon"


def test_spin_resumes_when_answers_become_fast(pair: tuple[Connection, Echo]) -> None:
    connection, echo = pair
    line = PooledConnection(connection, NOWHERE, spin_s=SLOW_S / 4)
    echo.pause_s = SLOW_S
    for _ in range(8):
        ask(line)
    assert line.mean_s > SLOW_S / 4
    echo.pause_s = 0.0
    # Some forty are enough when the processor is idle.
    deadline_s = time.monotonic() + PATIENCE_S
    while line.mean_s >= SLOW_S / 4:
        assert time.monotonic() < deadline_s, f"{line.mean_s} s still"
        ask(line)


def test_without_a_spin_it_never_looks(pair: tuple[Connection, Echo]) -> None:
    connection, echo = pair
    line = PooledConnection(connection, NOWHERE, spin_s=0.0)
    echo.pause_s = SLOW_S
    assert sum(ask(line) for _ in range(5)) < SLOW_S


def test_lost_connection_leaves_reused_descriptor_alone() -> None:
    """A role dies: the first reconnection reuses the other connection's descriptor."""

    async def program() -> None:
        ours, theirs = socket.socketpair()
        others, ours_anew = socket.socketpair()
        lost = MultiplexedConnection(Connection(ours), NOWHERE)
        theirs.close()
        while not lost.connection.closed:
            await asyncio.sleep(0)
        fd = os.dup2(ours_anew.fileno(), lost.connection.fd)
        readable = asyncio.Event()
        asyncio.get_running_loop().add_reader(fd, readable.set)
        lost.close()
        others.send(b"x")
        async with asyncio.timeout(PATIENCE_S):
            await readable.wait()
        asyncio.get_running_loop().remove_reader(fd)
        for each in (others, ours_anew):
            each.close()
        os.close(fd)

    asyncio.run(program())
