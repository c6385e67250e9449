"""A store's segments as arrays, also those that are shorter than a segment."""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mqproc.io import StoreIO
from mqproc.kernels.views import as_kernel_array
from mqproc.store.log_search import written_ranges
from mqproc.store.verify.inventory import Inventory

_MAPPED_MAX = 16
# So much of a segment is asked for before it is needed.
AHEAD_BYTES = 16 << 20


class LogViews:
    """Segments of one store, mapped read-only, a few at a time."""

    def __init__(self, io: StoreIO, inventory: Inventory) -> None:
        self._io = io
        self._inventory = inventory
        self._maps: OrderedDict[int, tuple[int, mmap.mmap, NDArray[np.uint8]]] = OrderedDict()
        self._asked = 0

    @property
    def segment_size(self) -> int:
        return self._inventory.sizes.segment

    def start_of(self, physical_offset: int) -> int:
        return physical_offset - physical_offset % self.segment_size

    def view(self, start: int) -> NDArray[np.uint8] | None:
        """uint8[≤ segment size] of the segment at `start`; None when it is not there, or has been deleted since."""
        size = self._inventory.segments.get(start)
        if size is None:
            return None
        found = self._maps.get(start)
        if found is None:
            try:
                fd = self._io.open(self._inventory.paths.commit_log / f"{start:020d}")
            except FileNotFoundError:
                return None
            mapping = self._io.map_as_it_is(fd, min(size, self.segment_size))
            self._asked = 0
            while len(self._maps) >= _MAPPED_MAX:
                self._io.close(self._maps.popitem(last=False)[1][0])
            found = self._maps[start] = fd, mapping, as_kernel_array(mapping)
        self._maps.move_to_end(start)
        return found[2]

    def following(self, start: int) -> int | None:
        """The next segment behind one that begins at `start`, whether that is there or not."""
        return min((other for other in self._inventory.segments if other > start), default=None)

    def read_ahead(self, start: int, position: int, stop: int) -> None:
        """Ask for what lies behind a position, below `stop`, in a segment that is being read in order."""
        if position + AHEAD_BYTES > self._asked:
            ahead = max(self._asked, position)
            self._asked = position + 2 * AHEAD_BYTES
            if ahead < stop:
                self._io.will_need(self._maps[start][0], ahead, min(self._asked, stop) - ahead)

    def written_ranges(self, start: int, position: int, stop: int) -> Iterator[tuple[int, int]]:
        """Small ranges of a segment, whose view was asked for, that hold what was ever written of [position, stop).

        Each is let go of when the next one is asked for.
        """
        for first, last in written_ranges(self._io, self._maps[start][0], position, stop):
            yield first, last
            self.let_go(start, first, last - first)

    def let_go(self, start: int, position: int, size: int) -> None:
        """Let go of pages: present ones count as this process's memory."""
        found = self._maps.get(start)
        if found is not None and size > 0:
            self._io.unmap_pages(found[1], position, size)

    def let_go_all(self) -> None:
        """Let go of the pages of all segments."""
        for _fd, mapping, _view in self._maps.values():
            self._io.unmap_pages(mapping, 0, len(mapping))

    def close(self) -> None:
        """Close the files; maps go with their last view."""
        while self._maps:
            self._io.close(self._maps.popitem()[1][0])
