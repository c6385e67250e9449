"""Shared 8-byte words in a mapped file.

Words are native-endian and aligned, and stored by one instruction. Never use `struct.pack_into`: other processes would
see a zero in between. x86-64 keeps stores in order; where the order of a store and a later load matters, `fence` first.
"""

from __future__ import annotations

import mmap


class Words:
    """int64 view of a shared map: `words[i]` loads, `words[i] = value` stores atomically."""

    __slots__ = ("cells", "mapping")

    def __init__(self, mapping: mmap.mmap | bytearray | memoryview) -> None:
        self.mapping = mapping
        self.cells = memoryview(mapping).cast("q")
        """The words as an int64 memoryview, for fast loops and numpy views."""

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
        """Release the view; the map remains open."""
        self.cells.release()
