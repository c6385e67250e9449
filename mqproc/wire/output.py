"""Bytes on their way out of a non-blocking socket. Servers and both clients send through it."""

from __future__ import annotations

import socket
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _typeshed import ReadableBuffer

# sendmsg takes at most IOV_MAX (1,024) pieces; fewer are enough to fill a socket's buffer.
PIECES_MAX = 256


class OutputQueue:
    """What a socket has not taken yet, oldest first.

    `queued_bytes` and `sent_bytes` count from the beginning: a frame that was queued when `queued_bytes` reached N
    has surely not been taken by the peer while `sent_bytes` is below N.
    """

    __slots__ = ("_pieces", "queued_bytes", "sent_bytes")

    def __init__(self) -> None:
        self._pieces: deque[memoryview] = deque()
        self.queued_bytes = 0
        self.sent_bytes = 0

    @property
    def waiting_bytes(self) -> int:
        return self.queued_bytes - self.sent_bytes

    def write(self, sock: socket.socket, pieces: Sequence[ReadableBuffer], *, owned: bool = True) -> bool:
        """Send what the socket takes now and keep the rest; True when nothing is left.

        The caller must leave the pieces' bytes alone until they are sent; with `owned` False what is left is copied
        instead. Raises OSError when the peer is gone.
        """
        count = 1
        if len(pieces) == 1 and self.queued_bytes == self.sent_bytes:
            if self._send_single(sock, pieces[0]):
                return True
        else:
            count = self.queue(pieces)
            if self.send(sock):
                return True
        if not owned:
            self._copy_last(count)
        return False

    def queue(self, pieces: Sequence[ReadableBuffer]) -> int:
        """Keep pieces for the next `send`; returns how many they are. Their bytes must stay as they are."""
        views = [memoryview(piece).cast("B") for piece in pieces if memoryview(piece).nbytes]
        self._pieces.extend(views)
        self.queued_bytes += sum(map(len, views))
        return len(views)

    def _send_single(self, sock: socket.socket, piece: ReadableBuffer) -> bool:
        view = memoryview(piece)
        size = view.nbytes
        self.queued_bytes += size
        try:
            count = sock.send(piece)
        except BlockingIOError:
            count = 0
        self.sent_bytes += count
        if count == size:
            return True
        self._pieces.append(view.cast("B")[count:])
        return False

    def _copy_last(self, count: int) -> None:
        """Replace the newest pieces, as far as they are still here, by copies."""
        pieces = self._pieces
        for index in range(-min(count, len(pieces)), 0):
            pieces[index] = memoryview(bytes(pieces[index]))

    def send(self, sock: socket.socket) -> bool:
        """Send what the socket takes now; True when nothing is left. Raises OSError when the peer is gone."""
        pieces = self._pieces
        while pieces:
            try:
                count = sock.sendmsg([pieces[index] for index in range(min(PIECES_MAX, len(pieces)))])
            except BlockingIOError:
                return False
            self.sent_bytes += count
            while count and pieces:
                first = len(pieces[0])
                if first > count:
                    pieces[0] = pieces[0][count:]
                    break
                count -= first
                pieces.popleft()
        return True

    def clear(self) -> None:
        """Forget what was not sent."""
        self._pieces.clear()
        self.queued_bytes = self.sent_bytes
