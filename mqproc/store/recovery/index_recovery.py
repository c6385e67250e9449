"""Up to where the index can be believed: file by file, from headers, lengths and the records between two files.

    min ── no key ── file: begin … end ── no key ── file: begin … end ── no key ── limit

Files follow each other without a record in between that has a key; where one has, files are missing, and the index is
made again from that record on. So it is from a file's last record on, when that file and the next one have not all of
its entries. A healthy index costs a look at the few records at and between the ends of its files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from mqproc.config import MIB
from mqproc.io import StoreIO
from mqproc.kernels.fields import ABSENT, find_property, place_at, place_size, properties_at, properties_end
from mqproc.kernels.intrinsics import load_be32, load_be64
from mqproc.kernels.keyed import AT_BLANK, FOUND_SIZE, IS_KEYED, KEYS_NAME, STOPPED_AT, UNIQ_KEY_NAME, find_keyed
from mqproc.kernels.record_check import record_size
from mqproc.kernels.views import as_kernel_array
from mqproc.layout import index_file as layout
from mqproc.layout import properties, record
from mqproc.paths import StorePaths
from mqproc.store.index_headers import IndexHeader, read_header
from mqproc.store.segments import LogSegments

# Of a longer range between two files only so much of its beginning and of its end is looked at: a store whose records
# have no keys must not be read whole at each start.
LOOK_BYTES_MAX: Final = 128 * MIB
_KEY_SEPARATOR: Final = properties.KEY_SEPARATOR.encode()


@dataclass(frozen=True, slots=True)
class _LastRecord:
    """The record that a file ends with, and how many of its entries are not in the files up to there."""

    offset: int
    missing: int


_NO_RECORD: Final = _LastRecord(-1, 0)


class IndexCheck:
    """One look at the index files of a stopped store. All of them have the length that the options give."""

    def __init__(
        self,
        io: StoreIO,
        paths: StorePaths,
        segments: LogSegments,
        slots: int,
        holes: Sequence[tuple[int, int]],
        look_bytes_max: int = LOOK_BYTES_MAX,
    ) -> None:
        """`slots` is `max_hash_slot_num`; `holes` are damaged ranges of the log."""
        self._io = io
        self._folder = paths.index
        self._segments = segments
        self._slots = slots
        self._holes = sorted(holes)
        self._look_bytes_max = look_bytes_max
        self._found = np.zeros(FOUND_SIZE, np.int64)

    def complete_up_to(self, names: Sequence[str], begin: int, limit: int) -> int:
        """The log position below which the index surely has every entry of records from `begin` on; `limit` at most.

        `names` are the files, oldest first; entries at or above `limit` are not looked at.
        """
        at, last = begin, _NO_RECORD
        for number, name in enumerate(names):
            header = self._header(name, newest=number == len(names) - 1)
            if header is None:
                return last.offset if last.missing else min(at, limit)
            if header.count == layout.FIRST_ITEM:
                continue
            if last.missing and not self._goes_on(name, header, last):
                return last.offset
            missing = self._first_keyed(at, min(header.begin_physical_offset, limit))
            if missing is not None:
                return missing
            at = max(at, self._behind(header.end_physical_offset))
            last = self._last_record(name, header, last, begin, limit)
            if at >= limit and not last.missing:
                return limit
        missing = last.offset if last.missing else self._first_keyed(at, limit)
        return limit if missing is None else missing

    def _goes_on(self, name: str, header: IndexHeader, last: _LastRecord) -> bool:
        """Whether a file begins with what the one before it lacks of its last record."""
        begins = self._items_of(name, header, last.offset, backwards=False)
        return begins >= last.missing or (begins > 0 and header.end_physical_offset == last.offset)

    def _last_record(self, name: str, header: IndexHeader, before: _LastRecord, begin: int, limit: int) -> _LastRecord:
        """The record of a file's last item; `before` is that of the file before it."""
        offset = header.end_physical_offset
        if not begin <= offset < limit:
            return _NO_RECORD
        wanted = before.missing if before.offset == offset else self._entries_of(offset)
        return _LastRecord(offset, max(0, wanted - self._items_of(name, header, offset, backwards=True)))

    def _items_of(self, name: str, header: IndexHeader, physical_offset: int, *, backwards: bool) -> int:
        """How many items of a record a file begins with, or ends with."""
        items = range(layout.FIRST_ITEM, header.count)
        with self._opened(name) as fd:
            for number, item in enumerate(reversed(items) if backwards else items):
                if self._offset_of(fd, item) != physical_offset:
                    return number
        return len(items)

    def _entries_of(self, physical_offset: int) -> int:
        """How many entries the record at an offset has, 0 when it is not there."""
        base = self._segments.start_of(physical_offset)
        at = physical_offset - base
        try:
            view = self._segments.view(base)
        except FileNotFoundError:
            return 0
        total = record_size(view, at, len(view))
        if total < 0 or self._behind_hole(physical_offset) != physical_offset:
            return 0
        if load_be32(view, at + record.SYS_FLAG) & record.SYS_FLAG_TRANSACTION_MASK == record.SYS_FLAG_ROLLBACK:
            return 0
        first, end = properties_at(view, at), properties_end(view, at, total)
        unique, keys = (find_property(view, first, end, name) for name in (UNIQ_KEY_NAME, KEYS_NAME))
        text = b"" if keys == ABSENT else view[place_at(keys) : place_at(keys) + place_size(keys)].tobytes()
        return (unique != ABSENT) + sum(map(bool, text.split(_KEY_SEPARATOR)))

    def count_entries(self, names: Sequence[str], begin: int) -> int:
        """Entries of records at or above `begin`. Offsets in the files ascend."""
        return sum(self._count_in(name, begin) for name in names)

    def _count_in(self, name: str, begin: int) -> int:
        with self._opened(name) as fd:
            count = self._header_in(fd).count
            low, high = layout.FIRST_ITEM, count
            while low < high:
                middle = (low + high) // 2
                if self._offset_of(fd, middle) < begin:
                    low = middle + 1
                else:
                    high = middle
        return count - low

    def _header(self, name: str, *, newest: bool) -> IndexHeader | None:
        """The header when it agrees with the first and the last item; None when it does not."""
        with self._opened(name) as fd:
            items = (self._io.size(fd) - layout.items_start(self._slots)) // layout.ITEM_SIZE
            header = self._header_in(fd)
            if header.count == layout.FIRST_ITEM:
                return header if newest else None
            if header.count > items or (header.count < items and not newest):
                return None
            ends = [self._offset_of(fd, item) for item in (layout.FIRST_ITEM, header.count - 1)]
        agrees = ends == [header.begin_physical_offset, header.end_physical_offset] and 0 <= ends[0] <= ends[1]
        return header if agrees else None

    # By calls, not by a map: what cannot be read is an OSError then, and no end of the process

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        fd = self._io.open(self._folder / name)
        try:
            yield fd
        finally:
            self._io.close(fd)

    def _header_in(self, fd: int) -> IndexHeader:
        return read_header(as_kernel_array(self._io.pread(fd, layout.HEADER_SIZE, 0)))

    def _offset_of(self, fd: int, item: int) -> int:
        """The log position that an item names."""
        item_bytes = self._io.pread(fd, layout.ITEM_SIZE, layout.item_offset(self._slots, item))
        return load_be64(as_kernel_array(item_bytes), layout.ITEM_PHYSICAL_OFFSET)

    def _behind(self, physical_offset: int) -> int:
        """Where the record at an offset ends; the offset itself when it is not there."""
        base = self._segments.start_of(physical_offset)
        try:
            view = self._segments.view(base)
        except FileNotFoundError:
            return physical_offset
        return physical_offset + max(0, record_size(view, physical_offset - base, len(view)))

    def _first_keyed(self, start: int, stop: int) -> int | None:
        """The first record in [start, stop) that must have an entry; None when none was found."""
        if stop - start <= 2 * self._look_bytes_max:
            return self._search(start, stop)
        found = self._search(start, start + self._look_bytes_max)
        if found is not None:
            return found
        # Records of the end are reached only from a segment's beginning.
        last = max(start, self._segments.start_of(stop - self._look_bytes_max))
        return self._search(last, stop)

    def _search(self, start: int, stop: int) -> int | None:
        position = start
        while position < stop:
            position = self._behind_hole(position)
            base = self._segments.start_of(position)
            try:
                view = self._segments.view(base)
            except FileNotFoundError:
                position = base + self._segments.segment_size
                continue
            limit = min(len(view), self._next_hole(position, stop) - base)
            find_keyed(view, position - base, limit, base, UNIQ_KEY_NAME, KEYS_NAME, self._found)
            stopped = base + int(self._found[STOPPED_AT])
            self._segments.let_go(base, position - base, stopped - position)
            if self._found[IS_KEYED]:
                return stopped if stopped < stop else None
            if self._found[AT_BLANK] or stopped <= position:
                # Nothing more can be told of this segment.
                stopped = base + self._segments.segment_size
            position = stopped
        return None

    def _behind_hole(self, position: int) -> int:
        for start, stop in self._holes:
            if start <= position < stop:
                position = stop
        return position

    def _next_hole(self, position: int, stop: int) -> int:
        return min((start for start, _stop in self._holes if position < start < stop), default=stop)
