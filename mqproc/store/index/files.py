"""Index files, writing side: created at the first entry, filled, rolled and repaired.

    index/<17 digits, local time>      header, hash slots, chained items (layout/index_file.py)

The dispatcher is the only writer; `index.lookup` has the reading side. The slots stay mapped while a file is filled; of
the items only those near the end, since resident pages count as the process's memory. Space is allocated before each
store: a full disk is an OSError, never a signal.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from mqproc.errors import CorruptStoreError
from mqproc.io.store_io import Kind, StoreIO, read_through, zero_tail
from mqproc.ipc.control_words import Words
from mqproc.kernels import index as kernels
from mqproc.kernels import index_rebuild
from mqproc.kernels.dispatch_step import SingleRecordBuffers, put_single
from mqproc.kernels.jit.intrinsics import load_be32, load_be64, store_be32, store_be64, store_release_be32
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.layout import control
from mqproc.layout import index_file as layout
from mqproc.paths import index_name, index_name_time_ms
from mqproc.store.sync_guard import SINGLE_SYNCS_MAX, DirtyFiles, Syncing, sync_files
from mqproc.util.units import LARGE_PAGE_BYTES, MIB, PAGE_BYTES

# Names and headers

# The year 9999 in any time zone.
_NAMED_UNTIL_MS: Final = 253_402_000_000_000


class IndexHeader(msgspec.Struct, frozen=True):
    """The header's fields. `count` is the number of the next item; 1 in a file without entries."""

    begin_timestamp_ms: int
    end_timestamp_ms: int
    begin_physical_offset: int
    end_physical_offset: int
    slots_used: int
    count: int


def read_header(view: NDArray[np.uint8]) -> IndexHeader:
    """Read a mapped file's header, the count first, so that it covers nothing newer."""
    fields = np.empty(kernels.HEADER_FIELDS, np.int64)
    kernels.load_header(view, fields)
    return IndexHeader(*fields.tolist())


def index_file_names(io: StoreIO, folder: Path) -> list[str]:
    """Names of the index files, oldest first; other names are ignored."""
    entries = io.entries(folder)
    return [entry.name for entry in entries if entry.kind is Kind.FILE and index_name_time_ms(entry.name) is not None]


def file_ms(name: str) -> int:
    """The time in an index file's name."""
    time_ms = index_name_time_ms(name)
    assert time_ms is not None, name
    return time_ms


def last_offset(io: StoreIO, path: Path) -> int:
    """CommitLog offset of the last record according to a file's header; −1 without entries."""
    with io.opened(path) as fd:
        header = io.pread(fd, layout.HEADER_SIZE, 0)
    if len(header) < layout.HEADER_SIZE:
        return -1
    view = as_kernel_array(header)
    return load_be64(view, layout.END_PHYSICAL_OFFSET) if kernels.published_count(view) > layout.FIRST_ITEM else -1


def next_name(store_timestamp_ms: int, previous: str) -> str:
    """Name of a file by its first entry's store time; it sorts after `previous` ('' = none).

    That is the later of the store time and one millisecond after the previous name. When local time is set back by an
    hour, the previous name counts on. An impossible store time, from a damaged record without its own CRC, counts as
    the earliest.
    """
    name = index_name(store_timestamp_ms if 0 <= store_timestamp_ms < _NAMED_UNTIL_MS else 1)
    if name > previous:
        return name
    moment = datetime.strptime(previous[:14], "%Y%m%d%H%M%S") + timedelta(milliseconds=int(previous[14:]) + 1)
    return f"{moment:%Y%m%d%H%M%S}{moment.microsecond // 1000:03d}"


# Items of a full step are unmapped.
ITEM_STEP_BYTES: Final = 8 * MIB
# A sync writes a changed large page as a whole. That many entries change as many small pages of slots as a large page
# has, which makes large pages for items cheap in comparison; for fewer entries items get small pages.
MANY_ENTRIES: Final = LARGE_PAGE_BYTES // PAGE_BYTES
# Space is allocated one step ahead, then doubling, up to this much.
ALLOCATED_AHEAD_MAX_BYTES: Final = 64 * MIB
# Space ahead of use takes at most this fraction (one in …) of the free space.
AHEAD_OF_FREE: Final = 16


class IndexCommit(msgspec.Struct, frozen=True):
    """State of the index after a step; `file_ms` is the newest file's name as a time, 0 = none."""

    file_ms: int = 0
    count: int = layout.FIRST_ITEM
    slots_used: int = 0
    end_timestamp_ms: int = 0
    end_physical_offset: int = 0


class _MappedIndex:
    """One index file, mapped for writing."""

    def __init__(self, io: StoreIO, path: Path, slots: int, items: int, *, sync_follows: bool = False) -> None:
        self._io = io
        self._sync_follows = sync_follows
        self.name = path.name
        self.file_ms = file_ms(path.name)
        self.slots = slots
        self.items = items
        self._folder = path.parent
        self._fd = io.open(path, write=True)
        try:
            size = io.size(self._fd)
            if size != layout.file_size(slots, items):
                raise CorruptStoreError(f"{path}: {size:,} bytes; expected {layout.file_size(slots, items):,}")
            self.mapping: mmap.mmap = io.map(self._fd, size, write=True)
            self.view = as_kernel_array(self.mapping)
        except BaseException:
            io.close(self._fd)
            raise
        # Items below it may be stored. How much of an existing file is allocated is unknown.
        self._step_items = 0
        self._allocated_end = 0
        self._step_start = self._item_step(self.count)

    @property
    def count(self) -> int:
        return kernels.published_count(self.view)

    def put(
        self,
        hashes: NDArray[np.int32],
        offsets: NDArray[np.int64],
        times: NDArray[np.int64],
        first: int,
        stop: int,
    ) -> int:
        """Put entries until the file is full; returns the first one not put. Raises OSError."""
        while first < stop and (count := self.count) < self.items:
            if self._step_items == 0:
                self.allocate_slots()
            if count >= self._step_items:
                self._begin_step(count, large_pages=stop >= MANY_ENTRIES)
            limit = self._step_items
            first = kernels.put_entries(self.view, self.slots, limit, hashes, offsets, times, first, stop)
        return first

    def put_single(self, found: SingleRecordBuffers, cells: NDArray[np.int64]) -> bool:
        """Put the entries of one record unless space must be allocated; see `kernels.dispatch_step`."""
        entries = found.state, found.hashes, found.offsets, found.times
        return put_single(self.view, self.slots, self._step_items, self.file_ms, *entries, cells)

    def allocate_slots(self) -> None:
        """Allocate header and slots, before any store to them. Raises OSError."""
        self._io.allocate(self._fd, 0, self._whole_pages(layout.items_start(self.slots)))

    def _whole_pages(self, end: int) -> int:
        """Round up to whole large pages: a store to any byte of a page allocates all of it."""
        return min(-(-end // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES, len(self.mapping))

    def write_header(self, header: IndexHeader) -> None:
        """Store all fields, with the count last."""
        view = self.view
        store_be64(view, layout.BEGIN_TIMESTAMP, header.begin_timestamp_ms)
        store_be64(view, layout.BEGIN_PHYSICAL_OFFSET, header.begin_physical_offset)
        self._write_end(header.end_timestamp_ms, header.end_physical_offset, header.slots_used, header.count)

    def roll_back(self, commit: IndexCommit) -> None:
        """Restore the state of a commit of this file, while readers may use it."""
        # The count first: readers ignore the items before their slots are reset.
        self._write_end(commit.end_timestamp_ms, commit.end_physical_offset, commit.slots_used, commit.count)
        if commit.count == layout.FIRST_ITEM:
            # A file without entries begins where the previous one ended.
            store_be64(self.view, layout.BEGIN_TIMESTAMP, commit.end_timestamp_ms)
            store_be64(self.view, layout.BEGIN_PHYSICAL_OFFSET, commit.end_physical_offset)
        kernels.roll_back(self.view, self.slots, commit.count)

    def repair_chains(self, floor: int, mark: int) -> tuple[int, int, bool]:
        """Rebuild slots and `previous` from the items of log range [floor, mark).

        Returns the number after the last item, the slots in use, and whether anything was changed.
        """
        expected = np.zeros(layout.SLOT_SIZE * self.slots, np.uint8)
        stock = np.zeros(index_rebuild.STOCK_SIZE, np.int64)
        index_rebuild.recount_items(self.view, self.slots, floor, mark, self.count, expected, stock)
        count, used, fits = stock.tolist()
        if count == layout.FIRST_ITEM:
            return count, used, False
        if not fits:
            expected[:] = 0
            index_rebuild.rebuild_links(self.view, self.slots, count, expected)
        same = np.array_equal(self.view[layout.HEADER_SIZE : layout.items_start(self.slots)], expected)
        if not same:
            self.allocate_slots()
            index_rebuild.store_slots(self.view, self.slots, expected)
        return count, used, not fits or not same

    def close(self) -> None:
        """Close the file; the mapping ends with its last view."""
        self._io.close(self._fd)

    def _write_end(self, timestamp_ms: int, physical_offset: int, slots_used: int, count: int) -> None:
        view = self.view
        store_be64(view, layout.END_TIMESTAMP, timestamp_ms)
        store_be64(view, layout.END_PHYSICAL_OFFSET, physical_offset)
        store_be32(view, layout.SLOT_COUNT, slots_used)
        store_release_be32(view, layout.ITEM_COUNT, count)

    def _item_step(self, item: int) -> int:
        """Byte offset of the step in which an item begins."""
        start = layout.items_start(self.slots)
        place = layout.item_offset(self.slots, item) - start
        return start + place - place % ITEM_STEP_BYTES

    def _begin_step(self, item: int, *, large_pages: bool) -> None:
        """Allow items of the step in which this item begins, and unmap the pages of earlier steps."""
        start = self._item_step(item)
        stop = min(start + ITEM_STEP_BYTES, len(self.mapping))
        # Items are not aligned to steps: the last one of a step may cross into the next.
        reach = min(stop + layout.ITEM_SIZE, len(self.mapping))
        if reach > self._allocated_end:
            self._allocate(start, reach)
        if start > self._step_start:
            self._io.release_pages(self.mapping, self._step_start, start - self._step_start)
            if self._sync_follows:
                self._io.start_writeback(self._fd, self._step_start, start - self._step_start)
            self._step_start = start
        self._io.advise_page_size(self.mapping, start, large=large_pages)
        whole_items = -(-(stop - layout.items_start(self.slots)) // layout.ITEM_SIZE)
        self._step_items = min(whole_items, self.items)

    def _allocate(self, start: int, reach: int) -> None:
        """Allocate to `reach`, plus as much as the items take while the disk has enough space.

        A call may wait for the file system's journal, which a concurrent sync holds for tenths of a second.
        """
        _used, free = self._io.disk_usage(self._folder)
        ahead = min(start - layout.items_start(self.slots), ALLOCATED_AHEAD_MAX_BYTES, free // AHEAD_OF_FREE)
        end = self._whole_pages(max(reach, start + ahead + layout.ITEM_SIZE))
        self._io.allocate(self._fd, start, end - start)
        self._allocated_end = end


class IndexFiles:
    """The index of one store, for its single writer."""

    def __init__(self, io: StoreIO, folder: Path, slots: int, items: int, *, sync_follows: bool = False) -> None:
        """`slots` and `items` are `max_hash_slot_num` and `max_index_num`.

        `sync_follows`: start writeback of items as soon as they are final, which shortens a later `sync`.

        Raises CorruptStoreError if a file has another length than slots and items give: its slots would be misread.
        """
        self._io = io
        self._folder = folder
        self._slots = slots
        self._items = items
        self._sync_follows = sync_follows
        self._current: _MappedIndex | None = None
        self._dirty_files = DirtyFiles[str](io, folder, folder.__truediv__)
        self.full_files = 0
        self._check_sizes()

    def _check_sizes(self) -> None:
        expected = layout.file_size(self._slots, self._items)
        for name in index_file_names(self._io, self._folder):
            size = self._io.size_of(self._folder / name)
            # A crash during creation leaves an empty file.
            if size not in (0, expected):
                raise CorruptStoreError(
                    f"{self._folder / name}: {size:,} bytes; max_hash_slot_num = {self._slots:,} and "
                    f"max_index_num = {self._items:,} give {expected:,}"
                )

    def commit(self) -> IndexCommit:
        file = self._newest()
        if file is None:
            return IndexCommit()
        end = read_header(file.view)
        return IndexCommit(file.file_ms, end.count, end.slots_used, end.end_timestamp_ms, end.end_physical_offset)

    def put(self, hashes: NDArray[np.int32], offsets: NDArray[np.int64], times: NDArray[np.int64], count: int) -> None:
        """Put the first `count` entries in order, rolling to new files.

        `hashes` int32[n] are index key hashes, `offsets` int64[n] CommitLog offsets, `times` int64[n] store times.
        After an OSError some entries may have been put: `roll_back` before the next try.
        """
        first = 0
        while first < count:
            file = self._newest()
            if file is None:
                file = self._create(int(times[first]), "", None)
            elif file.count >= file.items:
                file = self._create(int(times[first]), file.name, read_header(file.view))
            self._dirty_files.note(file.name)
            first = file.put(hashes, offsets, times, first, count)

    @property
    def has_file(self) -> bool:
        """Whether a file is open for `put_single`."""
        return self._current is not None

    def put_single(self, found: SingleRecordBuffers, cells: NDArray[np.int64]) -> bool:
        """Put one record's entries, and store in `cells` the words that `publish_step` publishes.

        Returns False without a change if more is needed; then use `put` and `commit`.
        """
        file = self._current
        if file is None or not file.put_single(found, cells):
            return False
        self._dirty_files.note(file.name)
        return True

    def begin_after(self, end: IndexHeader, store_timestamp_ms: int) -> None:
        """Create this folder's first file as the successor of a full file elsewhere.

        `store_timestamp_ms` is that of its first entry, which gives it its name.
        """
        self._create(store_timestamp_ms, "", end)

    def roll_back(self, commit: IndexCommit) -> None:
        """Remove all entries put since a commit, deleting newer files.

        Raises CorruptStoreError if the commit's file is missing.
        """
        self.close()
        names = index_file_names(self._io, self._folder)
        for name in reversed(names):
            if file_ms(name) <= commit.file_ms:
                break
            self._unlink(name)
        if commit.file_ms == 0:
            return
        file = self._newest()
        if file is None or file_ms(file.name) != commit.file_ms:
            raise CorruptStoreError(f"{self._folder}: the index file of {commit.file_ms} ms is missing")
        file.roll_back(commit)

    def rebuild(self, mark: int, store_timestamp_ms: Callable[[int], int | None]) -> int:
        """Rebuild slots and counts after a power loss from the items below offset `mark`.

        Items below the mark must be durable; all other content is arbitrary. It works from the newest file back to the
        first that keeps an item; older files were full and durable. Files that keep none are deleted. Items below
        the end of the previous file are invalid: they would keep that file's items above the mark.
        `store_timestamp_ms` returns a record's store time by its offset. The files must not be open elsewhere; `sync`
        makes the result durable. Returns the number of items kept in the newest file.
        """
        self.close()
        names = index_file_names(self._io, self._folder)
        while names:
            name = names.pop()
            floor = max(0, last_offset(self._io, self._folder / names[-1])) if names else 0
            kept = self._rebuild_file(name, floor, mark, store_timestamp_ms)
            if kept:
                return kept
            self._unlink(name)
        return 0

    def sync(self) -> None:
        """Make everything put, repaired or removed here durable: bytes, lengths and names."""
        self._dirty_files.sync()

    def _unlink(self, name: str) -> None:
        self._io.unlink(self._folder / name)
        self._dirty_files.note(name)

    def _newest(self) -> _MappedIndex | None:
        if self._current is None:
            names = index_file_names(self._io, self._folder)
            if names:
                self._current = self._map_file(names[-1])
        return self._current

    def _map_file(self, name: str) -> _MappedIndex:
        path = self._folder / name
        return _MappedIndex(self._io, path, self._slots, self._items, sync_follows=self._sync_follows)

    def _create(self, store_timestamp_ms: int, previous: str, end: IndexHeader | None) -> _MappedIndex:
        """Create a file for an entry of this store time after `previous`, whose header is `end`."""
        name = next_name(store_timestamp_ms, previous)
        self._io.make_folder(self._folder, sync=False)
        with self._io.opened(self._folder / name, write=True, create=True) as fd:
            self._io.set_size(fd, layout.file_size(self._slots, self._items))
        file = self._map_file(name)
        try:
            self._begin(file, end)
        except BaseException:
            file.close()
            raise
        self._io.crash_point("index.roll")
        self.close()
        self._current = file
        return file

    def _begin(self, file: _MappedIndex, end: IndexHeader | None) -> None:
        """Prepare a new file; until its first entry its count is 0, as in RocketMQ."""
        file.allocate_slots()
        if end is None:
            return
        time_ms, offset = end.end_timestamp_ms, end.end_physical_offset
        file.write_header(IndexHeader(time_ms, time_ms, offset, offset, slots_used=0, count=0))
        self.full_files += 1

    def _rebuild_file(self, name: str, floor: int, mark: int, store_timestamp_ms: Callable[[int], int | None]) -> int:
        """Rebuild one file from its items in [floor, mark) if it differs; returns their number."""
        if self._io.size_of(self._folder / name) == 0:
            return 0
        read_through(self._io, self._folder / name)
        file = self._map_file(name)
        try:
            header = read_header(file.view)
            count, used, changed = file.repair_chains(floor, mark)
            if count == layout.FIRST_ITEM:
                return 0
            expected = self._header_of(file.view, header, count, used, store_timestamp_ms)
            if expected != header:
                file.allocate_slots()
                file.write_header(expected)
                changed = True
        finally:
            file.close()
        with self._io.opened(self._folder / name, write=True) as fd:
            # Stale items after the last one would count in a later rebuild.
            changed |= zero_tail(self._io, fd, layout.item_offset(self._slots, count)) > 0
        if changed:
            self._dirty_files.note(name)
        return count - layout.FIRST_ITEM

    def _header_of(
        self,
        view: NDArray[np.uint8],
        header: IndexHeader,
        count: int,
        used: int,
        store_timestamp_ms: Callable[[int], int | None],
    ) -> IndexHeader:
        """Correct header of a file with `count` items; its begin has been durable all the time."""
        last_item = layout.item_offset(self._slots, count - 1)
        end_offset = load_be64(view, last_item + layout.ITEM_PHYSICAL_OFFSET)
        end_ms = store_timestamp_ms(end_offset)
        if end_ms is None and header.end_physical_offset == end_offset:
            end_ms = header.end_timestamp_ms
        elif end_ms is None:
            # Retention has deleted the record: use the item's time, in whole seconds.
            seconds = load_be32(view, last_item + layout.ITEM_TIME_DIFFERENCE)
            end_ms = header.begin_timestamp_ms + 1000 * seconds
        begin_offset = load_be64(view, layout.item_offset(self._slots, layout.FIRST_ITEM) + layout.ITEM_PHYSICAL_OFFSET)
        begin_ms = header.begin_timestamp_ms
        if begin_ms <= 0 or header.begin_physical_offset != begin_offset:
            begin_ms = store_timestamp_ms(begin_offset) or begin_ms
        return IndexHeader(begin_ms, end_ms, begin_offset, end_offset, used, count)

    def close(self) -> None:
        """Close the newest file, which the next use opens again."""
        if self._current is not None:
            self._current.close()
            self._current = None


# Shape: numbers of slots and items
#
# A file of N slots and M items has 40 + 4N + 20M bytes, so many pairs give one length. With the right N the first and
# last items match the header, and the last one is the newest of its slot.


# RocketMQ's default is four items per slot, and most configurations keep it.
_USUAL_ITEMS_PER_SLOT: Final = 4
# N + 5 slots shift the items by 20 bytes: one item.
_STEP: Final = layout.ITEM_SIZE // layout.SLOT_SIZE
_CANDIDATES_AT_ONCE: Final = 1 << 16
_NEWEST_ITEMS: Final = 64


# With the limits of max_hash_slot_num and max_index_num.
_FILE_BYTES_MAX: Final = layout.file_size(1 << 29, 1 << 26)


def adopted_index_shape(io: StoreIO, folder: Path, slots: int, items: int) -> tuple[int, int]:
    """(slots, items) of the files in a folder; the configured numbers if they fit."""
    files = [
        entry
        for entry in io.entries(folder)
        if entry.kind is Kind.FILE and 0 < entry.size <= _FILE_BYTES_MAX and index_name_time_ms(entry.name) is not None
    ]
    sizes = Counter(entry.size for entry in files)
    if not sizes or layout.file_size(slots, items) in sizes:
        return slots, items
    size = max(sizes, key=lambda size: (sizes[size], _usual_shape(size) is not None, size))
    for entry in files:
        if entry.size == size and (found := _shape_of(io, folder / entry.name, size)) is not None:
            return found
    return _usual_shape(size) or (slots, items)


def _shape_of(io: StoreIO, path: Path, size: int) -> tuple[int, int] | None:
    """Shape of one file according to its entries; None if undetermined."""
    if size < layout.file_size(1, 2) or (size - layout.HEADER_SIZE) % layout.SLOT_SIZE:
        return None
    with io.opened(path) as fd:
        mapping = io.map_without_filling_holes(fd, size)
    view = as_kernel_array(mapping)
    header = read_header(view)
    if header.count <= layout.FIRST_ITEM:
        return None
    candidates = _candidates(view, header)
    usual = _usual_shape(size)
    if usual is not None and usual[0] in candidates:
        return usual
    if not len(candidates):
        return None
    chosen = _with_newest_in_their_slots(view, header, candidates)
    return chosen, (size - layout.items_start(chosen)) // layout.ITEM_SIZE


def _with_newest_in_their_slots(view: NDArray[np.uint8], header: IndexHeader, candidates: NDArray[np.int64]) -> int:
    """The most plausible number of slots among the candidates.

    It is the first one with which the slots of the last items lead to them, else one that fits the very last item, else
    the first one. Item 0 is empty and a record may have several items, so an item number that is too low by one looks
    right in a file that begins with the log. In a small file it may match one slot by chance, but not those of all
    previous items.
    """
    last_item = header.count - 1
    words = np.ndarray(len(view) // layout.SLOT_SIZE, ">i4", view.data)
    chosen = None
    for start in range(0, len(candidates), _CANDIDATES_AT_ONCE):
        slots = candidates[start : start + _CANDIDATES_AT_ONCE]
        hashes = words[_word_of_item(slots, last_item)].astype(np.int64)
        fits = (hashes >= 0) & (words[layout.HEADER_SIZE // layout.SLOT_SIZE + hashes % slots] == last_item)
        for fitting in slots[fits].tolist():
            if _are_in_their_slots(words, fitting, last_item):
                return int(fitting)
            chosen = fitting if chosen is None else chosen
    return int(candidates[0]) if chosen is None else int(chosen)


def _are_in_their_slots(words: NDArray[np.int32], slots: int, last_item: int) -> bool:
    """Whether each slot of the last items leads to its newest item."""
    items = np.arange(max(layout.FIRST_ITEM, last_item - _NEWEST_ITEMS + 1), last_item + 1)
    hashes = words[_word_of_item(slots, items)].astype(np.int64)
    newest = dict(zip((hashes % slots).tolist(), items.tolist(), strict=True))
    first_slot = layout.HEADER_SIZE // layout.SLOT_SIZE
    return bool((hashes >= 0).all()) and all(words[first_slot + slot] == item for slot, item in newest.items())


def _word_of_item(slots: Any, item: Any) -> Any:
    """Word number of an item's hash in a file."""
    return (layout.items_start(0) + layout.SLOT_SIZE * slots + layout.ITEM_SIZE * item) // layout.SLOT_SIZE


def _candidates(view: NDArray[np.uint8], header: IndexHeader) -> NDArray[np.int64]:
    """Slot counts with which the first and last items match the header: int64[n], ascending."""
    size = len(view)
    first = (size - layout.HEADER_SIZE) // layout.SLOT_SIZE % _STEP or _STEP
    last_item = header.count - 1
    reach = layout.item_offset(first, last_item) + layout.ITEM_SIZE
    # Five more slots are 20 bytes.
    count = (size - reach) // layout.ITEM_SIZE + 1
    if count <= 0:
        return np.zeros(0, np.int64)

    def offsets_of(item: int) -> NDArray[np.int64]:
        start = layout.item_offset(first, item) + layout.ITEM_PHYSICAL_OFFSET
        return np.ndarray((count,), ">i8", view.data, start, (layout.ITEM_SIZE,))

    fits = (offsets_of(layout.FIRST_ITEM) == header.begin_physical_offset) & (
        offsets_of(last_item) == header.end_physical_offset
    )
    return first + _STEP * np.flatnonzero(fits)


def _usual_shape(size: int) -> tuple[int, int] | None:
    """The shape with four items per slot, None if the length does not fit."""
    slots, rest = divmod(size - layout.HEADER_SIZE, layout.SLOT_SIZE + _USUAL_ITEMS_PER_SLOT * layout.ITEM_SIZE)
    return None if rest or slots < 1 else (slots, _USUAL_ITEMS_PER_SLOT * slots)


# Flush of index files: the index-flusher's part of the engine.
#
# The dispatcher stores entries in another process, so dirty entries follow from the newest file's name and item count,
# which it publishes, and the last synced positions. Read `dispatched` before them: after a `complete` pass all entries
# of records below it are durable.


ITEMS_PER_PAGE: Final = PAGE_BYTES // layout.ITEM_SIZE
# Limit of reads that race with commits.
_TRIES_MAX: Final = 1000
_NOTHING_SYNCED: Final = -1


@dataclass(frozen=True, slots=True)
class IndexState:
    """Name of the newest file as a time (0 = none) and its item count, as published."""

    file_ms: int
    items: int


def committed_state(words: Words) -> IndexState | None:
    """The index at the dispatcher's last committed step; None if reads kept racing with commits.

    Name and count come from one slot of a step. The two words of the newest file could belong to different files, and
    a count that is too high would mark unsynced items as synced.
    """
    for _ in range(_TRIES_MAX):
        sequence = words[control.COMMIT_SEQUENCE]
        slot = sequence & 1
        state = IndexState(words[control.COMMIT_INDEX_MS[slot]], words[control.COMMIT_INDEX_ITEMS[slot]])
        # The slot is reused only after the next step's number has been published.
        if words[control.COMMIT_SEQUENCE] == sequence:
            return state
    return None


@dataclass(frozen=True, slots=True)
class IndexFlushPass:
    """Result of a pass. `complete`: every entry published before it is durable.

    `full_end_ms` is the end time of the newest full file that was synced, 0 for none.
    """

    synced_files: int
    complete: bool
    full_end_ms: int = 0


class IndexFlush:
    """Syncs changed index files.

    A new object does not know what recovery or its predecessor left dirty: its first pass syncs all files. Roles pass
    their SyncGuard as `syncs`; after an OSError the same files are still dirty.
    """

    def __init__(self, io: StoreIO, syncs: Syncing, folder: Path) -> None:
        self._io = io
        self._syncs = syncs
        self._folder = folder
        self._synced = IndexState(_NOTHING_SYNCED, 0)

    def pass_(self, state: IndexState, least_pages: int) -> IndexFlushPass:
        """Sync the due files for a state read before; `least_pages` 0 syncs all. Raises OSError."""
        if state == self._synced or state.file_ms == 0:
            return IndexFlushPass(0, complete=True)
        same_file = state.file_ms == self._synced.file_ms
        pages = (state.items - self._synced.items) // ITEMS_PER_PAGE
        if same_file and pages < least_pages:
            return IndexFlushPass(0, complete=False)
        names = index_file_names(self._io, self._folder)
        changed = [name for name in names if self._synced.file_ms <= file_ms(name) <= state.file_ms]
        if len(changed) > SINGLE_SYNCS_MAX:
            with self._io.opened(self._folder) as fd:
                self._syncs.sync_file_system(fd)
        else:
            sync_files(self._io, self._syncs, [self._folder / name for name in changed])
            if not same_file:
                self._syncs.sync_folder(self._folder)
                self._syncs.sync_folder(self._folder.parent)
        full_end_ms = self._end_ms(changed[-2]) if len(changed) > 1 else 0
        self._synced = state
        return IndexFlushPass(len(changed), complete=True, full_end_ms=full_end_ms)

    def _end_ms(self, name: str) -> int:
        """End time of a full file; 0 if retention has deleted it."""
        try:
            with self._io.opened(self._folder / name) as fd:
                data = self._io.pread(fd, 8, layout.END_TIMESTAMP)
        except FileNotFoundError:
            return 0
        return int.from_bytes(data, "big", signed=True)
