"""Items of the index beside the entries that a share of the log gives: both lie in the order of the log."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mqproc.io import StoreIO
from mqproc.kernels import index_verify as kernels
from mqproc.kernels.views import as_kernel_array
from mqproc.layout import index_file as layout
from mqproc.store.verify.picture import IndexFile, Picture, Share


class IndexWalk:
    """Where the items of one share are, and how far they are equal to its entries."""

    def __init__(self, io: StoreIO, picture: Picture, share: Share) -> None:
        self._io = io
        self._picture = picture
        self._slots = picture.inventory.sizes.slots
        self._files = picture.index
        self._out = np.zeros(kernels.MATCH_SIZE, np.int64)
        self._number = -1
        self._view: NDArray[np.uint8] | None = None
        self._end = self._place(share.stop)
        self._at = self._place(share.start)
        self.fits = True

    def match(
        self, hashes: NDArray[np.int32], offsets: NDArray[np.int64], times: NDArray[np.int64], count: int
    ) -> None:
        """Compare the next `count` entries."""
        entry = 0
        while self.fits and entry < count:
            self._step_over_ends()
            number, item = self._at
            if self._at >= self._end:
                self.fits = False
                return
            file = self._files[number]
            stop = self._end[1] if number == self._end[0] else file.header.count
            view = self._open(number)
            if view is None:
                self.fits = False
                return
            reason = kernels.match_entries(
                view, self._slots, item, stop, file.previous_end_ms,
                hashes, offsets, times, entry, count, self._out,
            )  # fmt: skip
            entry = int(self._out[kernels.MATCH_ENTRY])
            self._at = number, int(self._out[kernels.MATCH_ITEM])
            self.fits = reason != kernels.DIFFERS

    def ended(self) -> bool:
        """Whether entries and items were the same to the end."""
        self._step_over_ends()
        return self.fits and self._at >= self._end

    def close(self) -> None:
        """Let the maps go."""
        self._view = None

    def _step_over_ends(self) -> None:
        """From the end of a file to the next one that has items."""
        while self._at[0] < len(self._files) and self._at[1] >= self._files[self._at[0]].header.count:
            self._at = self._at[0] + 1, layout.FIRST_ITEM

    def _place(self, physical_offset: int) -> tuple[int, int]:
        """(file, item) of the first item at or above a log position, behind the last file when there is none."""
        for number, file in enumerate(self._files):
            header = file.header
            if header.count > layout.FIRST_ITEM and header.end_physical_offset >= physical_offset:
                view = self._open(number)
                item = header.count
                if view is not None:
                    item = int(kernels.first_item_at(view, self._slots, header.count, physical_offset))
                if item < header.count:
                    return number, item
        return len(self._files), layout.FIRST_ITEM

    def _open(self, number: int) -> NDArray[np.uint8] | None:
        """A file, mapped, None when it is gone; the last one asked for stays so."""
        if self._number != number:
            self._view = index_view(self._io, self._picture, self._files[number])
            self._number = number
        return self._view


def index_view(io: StoreIO, picture: Picture, file: IndexFile) -> NDArray[np.uint8] | None:
    """A whole index file; None when retention has deleted it since."""
    try:
        fd = io.open(picture.inventory.paths.index / file.name)
    except FileNotFoundError:
        return None
    try:
        return as_kernel_array(io.map_as_it_is(fd, picture.inventory.sizes.index_file))
    finally:
        io.close(fd)
