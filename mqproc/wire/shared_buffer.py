"""The buffer that all clients of a server are read into, and how one that holds part of a frame gets its own."""

from __future__ import annotations

from typing import Final

import numpy as np

from mqproc.config import MIB
from mqproc.wire.protocol import empty_buffer

BUFFER_BYTES: Final = 2 * MIB
_SPARE_BUFFERS_MAX: Final = 4


class SharedBuffer:
    """The buffer that reads of one poll go to, one connection after the other, and spare ones for the next."""

    __slots__ = ("array", "at", "current", "returned", "spare")

    def __init__(self) -> None:
        self.current = empty_buffer(BUFFER_BYTES)
        self.array = np.frombuffer(self.current, np.uint8)
        """The current buffer as a kernel takes it."""
        self.at = 0
        self.spare: list[memoryview] = []
        self.returned: list[memoryview] = []

    def begin(self) -> None:
        """A new poll: the last one's requests are done, so their buffers are free."""
        self.at = 0
        if self.returned:
            self.spare = (self.spare + self.returned)[:_SPARE_BUFFERS_MAX]
            self.returned.clear()

    def take(self) -> memoryview:
        """A free buffer."""
        return self.spare.pop() if self.spare else empty_buffer(BUFFER_BYTES)

    def replace(self) -> None:
        """The current buffer now belongs to a connection."""
        self.current = self.take()
        self.array = np.frombuffer(self.current, np.uint8)
        self.at = 0

    def give_back(self, buffer: memoryview | None) -> None:
        """A connection's buffer, still seen by this poll's requests."""
        if buffer is not None and len(buffer) == BUFFER_BYTES:
            self.returned.append(buffer)
