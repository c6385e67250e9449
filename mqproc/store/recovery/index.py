"""Recovery of the index: finds the position up to which it is complete, and cuts it there.

    min ── no key ── file: begin … end ── no key ── file: begin … end ── no key ── limit

No record between two consecutive files has a key; otherwise files are missing, and the index is rebuilt from that
record on. It is rebuilt from a file's last record on if that file and the next one lack some of its entries. For a
healthy index only the few records at and between the ends of its files are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.kernels.dispatch import IndexEntries
from mqproc.kernels.jit.intrinsics import load_be32, load_be64
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.kernels.record_check import record_size
from mqproc.kernels.record_fields import (
    ABSENT,
    KEYS_NAME,
    TAGS_NAME,
    UNIQ_KEY_NAME,
    find_property,
    place_at,
    place_size,
    properties_at,
    properties_end,
)
from mqproc.kernels.scan import AT_BLANK, FOUND_SIZE, IS_KEYED, STOPPED_AT, find_keyed
from mqproc.layout import index_file as layout
from mqproc.layout import properties, record
from mqproc.store.durable_marks import DurableMark
from mqproc.store.index.files import IndexHeader, index_file_names, last_offset, read_header
from mqproc.store.read.records import LogRecords, Visible
from mqproc.store.recovery.log import OpenStore
from mqproc.util.units import MIB, counted

# Bytes searched at each end of a longer range between two files, so that a start does not read all of a store
# without keys.
SEARCH_BYTES_MAX: Final = 128 * MIB
_KEY_SEPARATOR: Final = properties.KEY_SEPARATOR.encode()


@dataclass(frozen=True, slots=True)
class _LastRecord:
    """Last record of a file, and how many of its entries are missing from the files so far."""

    offset: int
    missing: int


_NO_RECORD: Final = _LastRecord(-1, 0)


class IndexCheck:
    """Checks the index files of a stopped store. All have the length given by the options."""

    def __init__(self, store: OpenStore, required: IndexEntries) -> None:
        """`required`: entries that must exist; other entries may exist."""
        self._io = store.io
        self._with_tags = required is IndexEntries.KEYS_AND_TAGS
        self._folder = store.paths.index
        self._segments = store.segments
        self._slots = store.options.max_hash_slot_num
        self._holes = sorted(store.ledger.ranges)
        self._found = np.zeros(FOUND_SIZE, np.int64)

    def complete_up_to(self, names: Sequence[str], begin: int, limit: int) -> int:
        """Log position, at most `limit`, below which all records have all their index entries.

        `names` are the files, oldest first; entries at or above `limit` are ignored.
        """
        at, last = begin, _NO_RECORD
        for number, name in enumerate(names):
            header = self._header(name, newest=number == len(names) - 1)
            if header is None:
                return last.offset if last.missing else min(at, limit)
            if header.count == layout.FIRST_ITEM:
                continue
            if last.missing and not self._continues(name, header, last):
                return last.offset
            missing = self._first_keyed(at, min(header.begin_physical_offset, limit))
            if missing is not None:
                return missing
            at = max(at, self._record_end(header.end_physical_offset))
            last = self._last_record(name, header, last, begin, limit)
            if at >= limit and not last.missing:
                return limit
        missing = last.offset if last.missing else self._first_keyed(at, limit)
        return limit if missing is None else missing

    def _continues(self, name: str, header: IndexHeader, last: _LastRecord) -> bool:
        """Whether a file begins with the entries that the previous file lacks of its last record."""
        begins = self._items_of(name, header, last.offset, backwards=False)
        return begins >= last.missing or (begins > 0 and header.end_physical_offset == last.offset)

    def _last_record(self, name: str, header: IndexHeader, before: _LastRecord, begin: int, limit: int) -> _LastRecord:
        """Record of a file's last item; `before`: the same of the previous file."""
        offset = header.end_physical_offset
        if not begin <= offset < limit:
            return _NO_RECORD
        expected = before.missing if before.offset == offset else self._entries_of(offset)
        return _LastRecord(offset, max(0, expected - self._items_of(name, header, offset, backwards=True)))

    def _items_of(self, name: str, header: IndexHeader, physical_offset: int, *, backwards: bool) -> int:
        """Number of items of a record at the start or the end of a file."""
        items = range(layout.FIRST_ITEM, header.count)
        with self._open_file(name) as fd:
            for number, item in enumerate(reversed(items) if backwards else items):
                if self._offset_of(fd, item) != physical_offset:
                    return number
        return len(items)

    def _entries_of(self, physical_offset: int) -> int:
        """Number of entries of the record at an offset; 0 if there is no such record."""
        view, at, total = self._record_at(physical_offset)
        if total <= 0 or self._after_hole(physical_offset) != physical_offset:
            return 0
        if load_be32(view, at + record.SYS_FLAG) & record.SYS_FLAG_TRANSACTION_MASK == record.SYS_FLAG_ROLLBACK:
            return 0
        first, end = properties_at(view, at), properties_end(view, at, total)
        unique, keys, tags = (find_property(view, first, end, name) for name in (UNIQ_KEY_NAME, KEYS_NAME, TAGS_NAME))
        text = b"" if keys == ABSENT else view[place_at(keys) : place_at(keys) + place_size(keys)].tobytes()
        count = (unique != ABSENT) + sum(map(bool, text.split(_KEY_SEPARATOR)))
        return count + (self._with_tags and tags != ABSENT)

    def count_entries(self, names: Sequence[str], begin: int) -> int:
        """Number of entries of records at or above `begin`. Offsets in the files ascend."""
        return sum(self._count_in(name, begin) for name in names)

    def _count_in(self, name: str, begin: int) -> int:
        with self._open_file(name) as fd:
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
        """The header if it matches the first and the last item, else None."""
        with self._open_file(name) as fd:
            items = (self._io.size(fd) - layout.items_start(self._slots)) // layout.ITEM_SIZE
            header = self._header_in(fd)
            if header.count == layout.FIRST_ITEM:
                return header if newest else None
            if header.count > items or (header.count < items and not newest):
                return None
            ends = [self._offset_of(fd, item) for item in (layout.FIRST_ITEM, header.count - 1)]
        agrees = ends == [header.begin_physical_offset, header.end_physical_offset] and 0 <= ends[0] <= ends[1]
        return header if agrees else None

    # Files are read, not mapped: an unreadable page then raises OSError instead of ending the process.

    def _open_file(self, name: str) -> AbstractContextManager[int]:
        return self._io.opened(self._folder / name)

    def _header_in(self, fd: int) -> IndexHeader:
        return read_header(as_kernel_array(self._io.pread(fd, layout.HEADER_SIZE, 0)))

    def _offset_of(self, fd: int, item: int) -> int:
        """Log position in an item."""
        item_bytes = self._io.pread(fd, layout.ITEM_SIZE, layout.item_offset(self._slots, item))
        return load_be64(as_kernel_array(item_bytes), layout.ITEM_PHYSICAL_OFFSET)

    def _record_end(self, physical_offset: int) -> int:
        """End of the record at an offset; the offset itself if there is no record."""
        return physical_offset + self._record_at(physical_offset)[2]

    def _record_at(self, physical_offset: int) -> tuple[NDArray[np.uint8], int, int]:
        """(view of the segment, position in it, size) of a record; size 0 without a record."""
        base = self._segments.start_of(physical_offset)
        at = physical_offset - base
        try:
            view = self._segments.view(base)
        except FileNotFoundError:
            return np.empty(0, np.uint8), at, 0
        return view, at, max(0, int(record_size(view, at, len(view))))

    def _first_keyed(self, start: int, stop: int) -> int | None:
        """First record in [start, stop) that must have an entry; None if none is found."""
        if stop - start <= 2 * SEARCH_BYTES_MAX:
            return self._search(start, stop)
        found = self._search(start, start + SEARCH_BYTES_MAX)
        if found is not None:
            return found
        # Records near the end can only be reached from the beginning of a segment.
        return self._search(max(start, self._segments.start_of(stop - SEARCH_BYTES_MAX)), stop)

    def _search(self, start: int, stop: int) -> int | None:
        position = start
        while position < stop:
            position = self._after_hole(position)
            base = self._segments.start_of(position)
            try:
                view = self._segments.view(base)
            except FileNotFoundError:
                position = base + self._segments.segment_size
                continue
            limit = min(len(view), self._next_hole(position, stop) - base)
            find_keyed(view, position - base, limit, base, self._with_tags, self._found)
            stopped = base + int(self._found[STOPPED_AT])
            self._segments.drop_pages(base, position - base, stopped - position)
            if self._found[IS_KEYED]:
                return stopped if stopped < stop else None
            if self._found[AT_BLANK] or stopped <= position:
                # The rest of the segment cannot be read.
                stopped = base + self._segments.segment_size
            position = stopped
        return None

    def _after_hole(self, position: int) -> int:
        for start, stop in self._holes:
            if start <= position < stop:
                position = stop
        return position

    def _next_hole(self, position: int, stop: int) -> int:
        return min((start for start, _stop in self._holes if position < start < stop), default=stop)


# The index's part of recovery


@dataclass(slots=True)
class IndexStep:
    """Cuts the index of one store before dispatch. All its files have the right length.

    `required`: entries of the index; an index that began without tags need not have any.
    """

    store: OpenStore
    mark: DurableMark
    required: IndexEntries
    changed: bool = False

    def run(self, trusted: int | None, *, clean: bool) -> tuple[int, str]:
        """Cut the index; return (log position below which it is complete, report line).

        `trusted` is the log position up to which the index's mark is trusted, None without a valid mark; `clean`: the
        store was closed properly.
        """
        log, names = self.store.log, self._names()
        # RocketMQ has no marks, but an index that it closed is complete as far as its files exist. After cutting the
        # log it does not index the records that it then appends there.
        closed = log.end if log.kept is None else min(log.end, log.kept)
        limit = trusted if trusted is not None else closed if clean else log.begin
        reached = last_offset(self.store.io, self.store.paths.index / names[-1]) if names else -1
        if not clean or reached >= limit or limit < log.end:
            self.cut(limit)
        at = IndexCheck(self.store, self.required).complete_up_to(self._names(), log.begin, limit)
        if at < limit:
            self.cut(at)
        text = f"index: {counted(len(names), 'file')}"
        if log.end > log.begin:
            text += f", complete up to {at:,}" if at > log.begin else ", to be rebuilt"
        if at < limit:
            text += f"; entries from there to {limit:,} were missing or wrong"
        return at, text

    def cut(self, position: int) -> None:
        """Remove the entries of records at or above a log position."""
        log = self.store.log
        records = LogRecords(self.store.segments, lambda: Visible(log.begin, log.end))

        def store_timestamp_ms(offset: int) -> int | None:
            found = records.store_timestamp_ms(offset)
            return found if found >= 0 else None

        self.mark.lower(position)
        self.store.index.rebuild(position, store_timestamp_ms)
        self.changed = True

    def count_entries(self) -> int:
        """Number of entries of records in the log."""
        return IndexCheck(self.store, self.required).count_entries(self._names(), self.store.log.begin)

    def _names(self) -> list[str]:
        return index_file_names(self.store.io, self.store.paths.index)
