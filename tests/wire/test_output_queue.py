"""Outgoing bytes: all are sent in order, however little the socket accepts at a time."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mqproc.wire.frames import JOINED_BYTES_MAX, PIECES_MAX, OutputQueue, size_of


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A nonblocking socket with a small buffer, and its peer."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        ours.setblocking(False)
        theirs.setblocking(False)
        yield ours, theirs


def read(theirs: socket.socket) -> bytes:
    """Read all available data."""
    found = bytearray()
    while True:
        try:
            found += theirs.recv(1 << 16)
        except BlockingIOError:
            return bytes(found)


def emptied(output: OutputQueue, ours: socket.socket, theirs: socket.socket) -> bytes:
    """Send and read until nothing is left; return the data."""
    found = read(theirs)
    while output.waiting_bytes:
        output.send(ours)
        found += read(theirs)
    return found


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(frames=st.lists(st.lists(st.integers(0, 20_000), max_size=5), min_size=1, max_size=6), held=st.booleans())
def test_output_keeps_byte_order(
    ends: tuple[socket.socket, socket.socket], frames: list[list[int]], held: bool
) -> None:
    ours, theirs = ends
    output = OutputQueue()
    random = np.random.default_rng(len(frames))
    expected = found = b""
    for sizes in frames:
        pieces = [random.bytes(size) for size in sizes]
        expected += b"".join(pieces)
        if held:
            output.queue(pieces)
        else:
            done = output.write(ours, pieces)
            assert done == (output.waiting_bytes == 0)
        found += read(theirs)
    found += emptied(output, ours, theirs)
    assert found == expected
    assert output.queued_bytes == output.sent_bytes == len(expected)


@pytest.mark.parametrize("size", [3, 16_384])
def test_output_sends_more_pieces_than_iov_max(ends: tuple[socket.socket, socket.socket], size: int) -> None:
    ours, theirs = ends
    output = OutputQueue()
    pieces = [bytes([index % 256]) * size for index in range(2 * PIECES_MAX)]
    output.write(ours, pieces)
    assert emptied(output, ours, theirs) == b"".join(pieces)


def test_output_sends_large_pieces_without_copy(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    output = OutputQueue()
    pieces = [np.zeros(JOINED_BYTES_MAX // PIECES_MAX, np.uint8) for _ in range(2 * PIECES_MAX)]
    assert not output.write(ours, [piece.data for piece in pieces])
    pieces[-1][:] = 7
    assert emptied(output, ours, theirs)[-pieces[-1].size :] == pieces[-1].tobytes()


def test_output_copies_pieces_not_owned(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    output = OutputQueue()
    columns = [np.full(50_000, number, np.uint32) for number in range(3)]
    expected = b"".join(column.tobytes() for column in columns)
    assert not output.write(ours, [column.data for column in columns], owned=False)
    for column in columns:
        column[:] = 9
    assert emptied(output, ours, theirs) == expected


def test_output_size_of_arrays_is_in_bytes() -> None:
    assert size_of([b"abc", np.zeros(4, np.uint32).data, b""]) == 19


def test_output_closed_peer_raises(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    theirs.close()
    with pytest.raises(BrokenPipeError):
        OutputQueue().write(ours, [b"x"])
