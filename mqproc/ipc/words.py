"""Shared 8-byte words in a mapped file.

A word is native-endian and aligned; it is stored in one go (never by `struct.pack_into`, which other processes see as
a zero in between). x86-64 keeps stores in order; where the order of a store and a later load matters, `fence` first.
"""

from __future__ import annotations

import mmap


class Words:
    """An int64 view of a shared map: `words[index]` loads, `words[index] = value` stores in one go."""

    __slots__ = ("cells", "mapping")

    def __init__(self, mapping: mmap.mmap | bytearray | memoryview) -> None:
        self.mapping = mapping
        self.cells = memoryview(mapping).cast("q")
        """The words as an int64 memoryview, for loops that must be fast and for numpy views."""

    def __getitem__(self, index: int) -> int:
        return self.cells[index]

    def __setitem__(self, index: int, value: int) -> None:
        self.cells[index] = value

    def __len__(self) -> int:
        return len(self.cells)

    def add(self, index: int, value: int) -> None:
        """Add to a word that only this process stores."""
        self.cells[index] += value

    def close(self) -> None:
        """Release the view; the map belongs to whoever made it."""
        self.cells.release()
