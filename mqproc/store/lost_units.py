"""ConsumeQueue files of which the disk cannot read a part: the units there are fillers to who serves the others.

    page │ page that cannot be read │ page            one read of all fails, so each page is read by itself,
    … u u u u f f f f f f f f f f f f u u u …         and each unit that two of them share

They come again with the file, which `mqproc store repair` makes anew from the log.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from mqproc.config import PAGE_BYTES
from mqproc.io import StoreIO, reason_of
from mqproc.store.consume_queue import UNIT_SIZE, ConsumeQueueFiles, fillers

LOST_PLACE: Final = -1
"""What the filler for a unit that cannot be read points to. No other filler points below the log."""


class ServedQueueFiles(ConsumeQueueFiles):
    """The files of all queues for one who reads on: `tell` is called with what is wrong, once for each file."""

    def __init__(self, io: StoreIO, folder: Path, file_bytes: int, tell: Callable[[str], object]) -> None:
        super().__init__(io, folder, file_bytes)
        self._tell = tell
        self._told: set[Path] = set()
        # Of a queue: pages by file and number, with when the file was changed last. A disk may take seconds to say that
        # it cannot read one; but once that is written to it may be whole again.
        self._lost: dict[tuple[str, int], dict[tuple[Path, int], int]] = {}

    def raw_units(self, topic: str, queue_id: int, first: int, count: int, generation: int = 0) -> bytes:
        """Units as they lie on disk, and fillers. Raises FileNotFoundError as that of all files does."""
        if (topic, queue_id) not in self._lost:
            try:
                return super().raw_units(topic, queue_id, first, count, generation)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
        parts: list[bytes] = []
        for offset, run in self._runs(first, count):
            try:
                part = self._run(topic, queue_id, offset, run, generation)
            except FileNotFoundError:
                if not parts:
                    raise
                break
            parts.append(part)
            if len(part) < run * UNIT_SIZE:
                break
        return b"".join(parts)

    def _runs(self, first: int, count: int) -> Iterator[tuple[int, int]]:
        """(queue offset, count) of units that lie in one page, and of each that two share."""
        stop = first + count
        while first < stop:
            place = first * UNIT_SIZE % self.file_bytes
            room = min(PAGE_BYTES - place % PAGE_BYTES, self.file_bytes - place)
            run = max(1, min(stop - first, room // UNIT_SIZE))
            yield first, run
            first += run

    def _run(self, topic: str, queue_id: int, first: int, count: int, generation: int) -> bytes:
        """The units of such a run, fillers when a page of it cannot be read."""
        place = first * UNIT_SIZE % self.file_bytes
        path = self.path(topic, queue_id, first * UNIT_SIZE - place)
        pages = range(place // PAGE_BYTES, (place + count * UNIT_SIZE - 1) // PAGE_BYTES + 1)
        known = self._lost.get((topic, queue_id), {})
        if not any((path, page) in known and known[path, page] == self._changed_ns(path) for page in pages):
            try:
                return super().raw_units(topic, queue_id, first, count, generation)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                self._say(path, place, error)
            if len(pages) == 1:
                self._lost.setdefault((topic, queue_id), {})[path, pages[0]] = self._changed_ns(path)
        return fillers(count, LOST_PLACE).tobytes()

    def _changed_ns(self, path: Path) -> int:
        entry = self._io.entry(path)
        return entry.modified_ns if entry is not None else 0

    def _say(self, path: Path, place: int, error: OSError) -> None:
        if path in self._told:
            return
        self._told.add(path)
        self._tell(
            f"{path}: offset {place:,} cannot be read: {reason_of(error)}; messages that have their unit there are "
            "damaged ones for now; when the group is stopped, mqproc store repair makes the file again from the log"
        )
