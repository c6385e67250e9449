"""Bytes on their way out of a non-blocking socket. Servers and both clients send through it."""

from __future__ import annotations

import itertools
import operator
import socket
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from _typeshed import ReadableBuffer

# sendmsg takes at most IOV_MAX (1,024) pieces; fewer are enough to fill a socket's buffer.
PIECES_MAX = 256
# More pieces than that are joined while they are no more bytes than this together.
JOINED_BYTES_MAX = 1 << 20

_view: Callable[[ReadableBuffer], memoryview] = memoryview
_nbytes = operator.attrgetter("nbytes")


def size_of(pieces: Sequence[ReadableBuffer]) -> int:
    """Bytes of all pieces."""
    return sum(map(_nbytes, map(_view, pieces)))


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
        if self._pieces or len(pieces) > PIECES_MAX:
            return self._write_behind(sock, pieces, owned)
        # Most often the socket takes all: then nothing is made of the pieces.
        single = pieces[0] if len(pieces) == 1 else None
        size = len(single) if type(single) is bytes else size_of(pieces)
        self.queued_bytes += size
        try:
            sent = sock.sendmsg(pieces) if single is None else sock.send(single)
        except BlockingIOError:
            sent = 0
        if sent == size:
            self.sent_bytes += size
            return True
        count = self._keep(pieces)
        self._took(sent)
        if not owned:
            self._copy_last(count)
        return False

    def _write_behind(self, sock: socket.socket, pieces: Sequence[ReadableBuffer], owned: bool) -> bool:
        """The same of pieces that wait for others, or are many."""
        if len(pieces) > PIECES_MAX and size_of(pieces) <= JOINED_BYTES_MAX:
            return self.write(sock, (b"".join(pieces),))
        count = self.queue(pieces)
        if self.send(sock):
            return True
        if not owned:
            self._copy_last(count)
        return False

    def queue(self, pieces: Sequence[ReadableBuffer]) -> int:
        """Keep pieces for the next `send`; returns how many they are. Their bytes must stay as they are."""
        self.queued_bytes += size_of(pieces)
        return self._keep(pieces)

    def _keep(self, pieces: Sequence[ReadableBuffer]) -> int:
        views = [view.cast("B") for view in map(_view, pieces) if view.nbytes]
        self._pieces.extend(views)
        return len(views)

    def _copy_last(self, count: int) -> None:
        """Replace the newest pieces, as far as they are still here, by copies."""
        pieces = self._pieces
        for index in range(-min(count, len(pieces)), 0):
            pieces[index] = memoryview(bytes(pieces[index]))

    def send(self, sock: socket.socket) -> bool:
        """Send what the socket takes now; True when nothing is left. Raises OSError when the peer is gone."""
        while self._pieces:
            try:
                sent = sock.sendmsg(itertools.islice(self._pieces, PIECES_MAX))
            except BlockingIOError:
                return False
            self._took(sent)
        return True

    def _took(self, count: int) -> None:
        """The socket has taken the oldest `count` bytes."""
        pieces = self._pieces
        self.sent_bytes += count
        while count and pieces:
            first = len(pieces[0])
            if first > count:
                pieces[0] = pieces[0][count:]
                break
            count -= first
            pieces.popleft()

    def clear(self) -> None:
        """Forget what was not sent."""
        self._pieces.clear()
        self.queued_bytes = self.sent_bytes
