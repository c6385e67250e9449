"""Index files by themselves: header against items, slots and links against what the items make of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mqproc.io import StoreIO
from mqproc.kernels import index_verify as kernels
from mqproc.kernels.intrinsics import load_be32, load_be64
from mqproc.kernels.record_check import stored_at_ms
from mqproc.layout import index_file as layout
from mqproc.store.derived import read_through
from mqproc.store.verify.findings import Finding, Kind
from mqproc.store.verify.index_walk import index_view
from mqproc.store.verify.log_views import LogViews
from mqproc.store.verify.picture import IndexFile, Picture


@dataclass(slots=True)
class IndexChecked:
    """One file's findings, and whether its items ascend, so that they can be walked beside the log."""

    name: str
    findings: list[Finding]
    ascends: bool


class IndexPass:
    """Checks index files, one after the other."""

    def __init__(self, io: StoreIO, picture: Picture, advance: Callable[[int], None]) -> None:
        self._io = io
        self._picture = picture
        self._advance = advance
        self._slots = picture.inventory.sizes.slots
        self._heads = np.zeros(self._slots, np.int32)
        self._out = np.zeros(kernels.CHAINS_SIZE, np.int64)
        self._views = LogViews(io, picture.inventory)

    def close(self) -> None:
        """Close the segments."""
        self._views.close()

    def run(self, file: IndexFile) -> IndexChecked:
        """Check one file."""
        found = IndexChecked(file.name, [], True)
        with contextlib.suppress(FileNotFoundError):
            read_through(self._io, self._picture.inventory.paths.index / file.name)
        view = index_view(self._io, self._picture, file)
        if view is None:
            return found
        self._heads[:] = 0
        kernels.check_chains(view, self._slots, file.header.count, self._heads, self._out)
        out: list[int] = self._out.tolist()
        if out[kernels.DESCENTS]:
            found.ascends = False
            item = out[kernels.FIRST_DESCENT]
            found.findings.append(self._of_item(file, view, Kind.INDEX_ORDER, item, out[kernels.DESCENTS]))
        if out[kernels.BAD_LINKS]:
            item = out[kernels.FIRST_BAD_LINK]
            text = "the item before it in its chain is another one"
            found.findings.append(self._of_item(file, view, Kind.INDEX_LINK, item, out[kernels.BAD_LINKS], text))
        if out[kernels.BAD_SLOTS]:
            slot = out[kernels.FIRST_BAD_SLOT]
            found.findings.append(
                Finding(
                    Kind.INDEX_LINK,
                    f"index/{file.name}",
                    layout.HEADER_SIZE + layout.SLOT_SIZE * slot,
                    count=out[kernels.BAD_SLOTS],
                    text=f"slot {slot:,} does not lead to its newest item",
                )
            )
        found.findings += self._header(file, view, out[kernels.USED])
        self._advance(layout.item_offset(self._slots, file.header.count))
        return found

    def _of_item(
        self, file: IndexFile, view: NDArray[np.uint8], kind: Kind, item: int, count: int, text: str = ""
    ) -> Finding:
        place = layout.item_offset(self._slots, item)
        physical_offset = load_be64(view, place + layout.ITEM_PHYSICAL_OFFSET)
        return Finding(kind, f"index/{file.name}", place, physical_offset, count=count, text=f"item {item:,}: {text}")

    def _header(self, file: IndexFile, view: NDArray[np.uint8], used: int) -> list[Finding]:
        """What of the header contradicts the items; not of a file that is being filled."""
        header = file.header
        said_count = load_be32(view, layout.ITEM_COUNT)
        if said_count > self._picture.inventory.sizes.items or said_count < 0:
            text = f"count is {said_count:,}; the file has room for {self._picture.inventory.sizes.items:,} items"
            return [Finding(Kind.INDEX_HEADER, f"index/{file.name}", layout.ITEM_COUNT, text=text)]
        if header.count == layout.FIRST_ITEM or self._is_filled(file):
            return []
        begin, end = (self._offset_of(view, item) for item in (layout.FIRST_ITEM, header.count - 1))
        words = [
            ("begin offset", layout.BEGIN_PHYSICAL_OFFSET, header.begin_physical_offset, begin),
            ("end offset", layout.END_PHYSICAL_OFFSET, header.end_physical_offset, end),
            ("begin time", layout.BEGIN_TIMESTAMP, header.begin_timestamp_ms, self._stored_at_ms(begin)),
            ("end time", layout.END_TIMESTAMP, header.end_timestamp_ms, self._stored_at_ms(end)),
            ("slots used", layout.SLOT_COUNT, header.slots_used, used),
        ]
        return [
            Finding(Kind.INDEX_HEADER, f"index/{file.name}", place, text=f"{name} is {said}; the items say {is_}")
            for name, place, said, is_ in words
            if is_ is not None and said != is_
        ]

    def _offset_of(self, view: NDArray[np.uint8], item: int) -> int:
        return load_be64(view, layout.item_offset(self._slots, item) + layout.ITEM_PHYSICAL_OFFSET)

    def _stored_at_ms(self, physical_offset: int) -> int | None:
        """Store time of the record at an offset, None when none begins there."""
        base = self._views.start_of(physical_offset)
        view = self._views.view(base)
        if view is None:
            return None
        found = int(stored_at_ms(view, physical_offset - base, len(view), physical_offset))
        return found if found >= 0 else None

    def _is_filled(self, file: IndexFile) -> bool:
        return self._picture.positions.running and file.name == self._picture.inventory.index[-1]
