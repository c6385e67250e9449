"""Index files, the writing side: made at their first entry, filled through a map, rolled when full, mended.

    index/<17 digits, local time>      header, hash slots, chained items (layout/index_file.py)

The dispatcher is the only writer; `index_query` has the reading side. Slots stay mapped while a file is filled; of the
items only those near the end, since present pages count as this process's memory. All space is allocated before a
store goes to it: a full disk is an OSError, never a signal.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from mqproc.config import LARGE_PAGE_BYTES, MIB, PAGE_BYTES
from mqproc.errors import CorruptStoreError
from mqproc.io import StoreIO
from mqproc.kernels import index as kernels
from mqproc.kernels.dispatch_alone import AloneBuffers, put_alone
from mqproc.kernels.intrinsics import load_be32, load_be64, store_be32, store_be64, store_release_be32
from mqproc.kernels.views import as_kernel_array
from mqproc.layout import index_file as layout
from mqproc.store.clearing import clear_behind
from mqproc.store.derived import read_through
from mqproc.store.index_headers import IndexHeader, file_ms, index_file_names, last_offset, next_name, read_header
from mqproc.store.unsynced import Unsynced

# Items are unmapped behind when a step of this size is full.
ITEM_STEP_BYTES: Final = 8 * MIB
# A sync writes a changed large page as a whole. So many entries at once change as many small pages of slots as a large
# page is long, so that this costs little beside them; for fewer, pages of items stay small.
MANY_ENTRIES: Final = LARGE_PAGE_BYTES // PAGE_BYTES
# Space is allocated by the step, then doubling, up to this much at once.
ALLOCATED_AHEAD_MAX_BYTES: Final = 64 * MIB
# No more than one part in so many of what is free is taken before it is needed.
AHEAD_OF_FREE: Final = 16


class IndexCommit(msgspec.Struct, frozen=True):
    """Where the index stood after a dispatch step. `file_ms` is the newest file's name as a time, 0 = no file."""

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
        # Items below it may be put. What is allocated of a file that was there before is not known.
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
        """Put entries until all are put or the file is full; the first entry not put. Raises OSError (ENOSPC…)."""
        while first < stop and (count := self.count) < self.items:
            if self._step_items == 0:
                self.allocate_slots()
            if count >= self._step_items:
                self._begin_step(count, large_pages=stop >= MANY_ENTRIES)
            limit = self._step_items
            first = kernels.put_entries(self.view, self.slots, limit, hashes, offsets, times, first, stop)
        return first

    def put_alone(self, found: AloneBuffers, cells: NDArray[np.int64]) -> bool:
        """Put what one record gives, if nothing must be made ready for it; see `kernels.dispatch_alone`."""
        return put_alone(
            self.view,
            self.slots,
            self._step_items,
            self.file_ms,
            found.state,
            found.hashes,
            found.offsets,
            found.times,
            cells,
        )

    def allocate_slots(self) -> None:
        """Allocate header and slots, which must come before any store to them. Raises OSError."""
        self._io.allocate(self._fd, 0, self._whole_pages(layout.items_start(self.slots)))

    def _whole_pages(self, end: int) -> int:
        """The end of the page that ends there or later: a store to any byte of a page takes space for all of it."""
        return min(-(-end // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES, len(self.mapping))

    def write_header(self, header: IndexHeader) -> None:
        """Store all fields, the count last."""
        view = self.view
        store_be64(view, layout.BEGIN_TIMESTAMP, header.begin_timestamp_ms)
        store_be64(view, layout.BEGIN_PHYSICAL_OFFSET, header.begin_physical_offset)
        self._write_end(header.end_timestamp_ms, header.end_physical_offset, header.slots_used, header.count)

    def roll_back(self, commit: IndexCommit) -> None:
        """Make it what it was at a commit of this very file; readers may look on."""
        # The count goes first, so that a reader leaves out the items before their slots forget them.
        self._write_end(commit.end_timestamp_ms, commit.end_physical_offset, commit.slots_used, commit.count)
        if commit.count == layout.FIRST_ITEM:
            # A file without entries begins where the one before it ended.
            store_be64(self.view, layout.BEGIN_TIMESTAMP, commit.end_timestamp_ms)
            store_be64(self.view, layout.BEGIN_PHYSICAL_OFFSET, commit.end_physical_offset)
        kernels.roll_back(self.view, self.slots, commit.count)

    def mend_chains(self, floor: int, mark: int) -> tuple[int, int, bool]:
        """Make slots and `previous` what the items of a range of the log, [floor, mark), make of them.

        Returns the number behind the last item, slots in use, and whether anything was changed.
        """
        wanted = np.zeros(layout.SLOT_SIZE * self.slots, np.uint8)
        stock = np.zeros(kernels.STOCK_SIZE, np.int64)
        kernels.take_stock(self.view, self.slots, floor, mark, self.count, wanted, stock)
        count, used, fits = stock.tolist()
        if count == layout.FIRST_ITEM:
            return count, used, False
        if not fits:
            wanted[:] = 0
            kernels.replay_items(self.view, self.slots, count, wanted)
        same = np.array_equal(self.view[layout.HEADER_SIZE : layout.items_start(self.slots)], wanted)
        if not same:
            self.allocate_slots()
            kernels.store_slots(self.view, self.slots, wanted)
        return count, used, not fits or not same

    def close(self) -> None:
        """Close the file; the map goes with its last view."""
        self._io.close(self._fd)

    def _write_end(self, timestamp_ms: int, physical_offset: int, slots_used: int, count: int) -> None:
        view = self.view
        store_be64(view, layout.END_TIMESTAMP, timestamp_ms)
        store_be64(view, layout.END_PHYSICAL_OFFSET, physical_offset)
        store_be32(view, layout.SLOT_COUNT, slots_used)
        store_release_be32(view, layout.ITEM_COUNT, count)

    def _item_step(self, item: int) -> int:
        """Byte offset of the step that an item begins in."""
        start = layout.items_start(self.slots)
        place = layout.item_offset(self.slots, item) - start
        return start + place - place % ITEM_STEP_BYTES

    def _begin_step(self, item: int, *, large_pages: bool) -> None:
        """Let items of the step that the item begins in be put, and let go of the pages of steps before it."""
        start = self._item_step(item)
        stop = min(start + ITEM_STEP_BYTES, len(self.mapping))
        # Items are not aligned to steps, so the last one of a step may reach into the next.
        reach = min(stop + layout.ITEM_SIZE, len(self.mapping))
        if reach > self._allocated_end:
            self._allocate(start, reach)
        if start > self._step_start:
            self._io.unmap_pages(self.mapping, self._step_start, start - self._step_start)
            if self._sync_follows:
                self._io.start_writing(self._fd, self._step_start, start - self._step_start)
            self._step_start = start
        self._io.choose_pages(self.mapping, start, large=large_pages)
        whole_items = -(-(stop - layout.items_start(self.slots)) // layout.ITEM_SIZE)
        self._step_items = min(whole_items, self.items)

    def _allocate(self, start: int, reach: int) -> None:
        """Allocate to `reach` at least, and as much again as the items before take while the disk has plenty of room.

        A call may wait for the file system's journal, which a sync elsewhere holds for tenths of a second.
        """
        _used, free = self._io.disk_usage(self._folder)
        ahead = min(start - layout.items_start(self.slots), ALLOCATED_AHEAD_MAX_BYTES, free // AHEAD_OF_FREE)
        end = self._whole_pages(max(reach, start + ahead + layout.ITEM_SIZE))
        self._io.allocate(self._fd, start, end - start)
        self._allocated_end = end


class IndexFiles:
    """The index of one store, for its only writer."""

    def __init__(self, io: StoreIO, folder: Path, slots: int, items: int, *, sync_follows: bool = False) -> None:
        """`slots` and `items` are `max_hash_slot_num` and `max_index_num`.

        With `sync_follows` the disk begins with items as soon as nothing changes them any more: `sync` then has less to
        wait for.

        Raises CorruptStoreError when a file has another length than they give: its slots would be misread, and the
        length alone does not tell how many it has.
        """
        self._io = io
        self._folder = folder
        self._slots = slots
        self._items = items
        self._sync_follows = sync_follows
        self._current: _MappedIndex | None = None
        self._unsynced = Unsynced[str](io, folder, folder.__truediv__)
        self.full_files = 0
        self._check_sizes()

    def _check_sizes(self) -> None:
        expected = layout.file_size(self._slots, self._items)
        for name in index_file_names(self._io, self._folder):
            size = self._io.size_of(self._folder / name)
            # An empty file is one that was being made at a crash.
            if size not in (0, expected):
                raise CorruptStoreError(
                    f"{self._folder / name}: {size:,} bytes; max_hash_slot_num = {self._slots:,} and "
                    f"max_index_num = {self._items:,} give {expected:,}"
                )

    def commit(self) -> IndexCommit:
        """Where the index stands now."""
        file = self._newest()
        if file is None:
            return IndexCommit()
        header = read_header(file.view)
        return IndexCommit(
            file_ms=file.file_ms,
            count=header.count,
            slots_used=header.slots_used,
            end_timestamp_ms=header.end_timestamp_ms,
            end_physical_offset=header.end_physical_offset,
        )

    def put(self, hashes: NDArray[np.int32], offsets: NDArray[np.int64], times: NDArray[np.int64], count: int) -> None:
        """Put the first `count` entries in order, rolling to new files.

        After an OSError some of them may be there: `roll_back` before they are put again.

        `hashes` int32[n] are index key hashes, `offsets` int64[n] CommitLog offsets, `times` int64[n] store times.
        """
        first = 0
        while first < count:
            file = self._newest()
            if file is None:
                file = self._create(int(times[first]), "", None)
            elif file.count >= file.items:
                file = self._create(int(times[first]), file.name, read_header(file.view))
            self._unsynced.note(file.name)
            first = file.put(hashes, offsets, times, first, count)

    @property
    def has_file(self) -> bool:
        """Whether `put_alone` has a file at hand."""
        return self._current is not None

    def put_alone(self, found: AloneBuffers, cells: NDArray[np.int64]) -> bool:
        """Put the entries of one record, and say in the control file's `cells` what `publish_step` is to publish.

        False, and nothing is done, when it takes more than that: `put` and `commit` do it then.
        """
        file = self._current
        if file is None or not file.put_alone(found, cells):
            return False
        self._unsynced.note(file.name)
        return True

    def begin_behind(self, end: IndexHeader, store_timestamp_ms: int) -> None:
        """Make the first file of this folder as one that follows a full file with the header `end`, and lies elsewhere.

        `store_timestamp_ms` is that of its first entry, which names it.
        """
        self._create(store_timestamp_ms, "", end)

    def roll_back(self, commit: IndexCommit) -> None:
        """Forget every entry put since a commit. Files made since are deleted.

        Raises CorruptStoreError when the commit's own file is missing.
        """
        self._let_current_go()
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
        """After a power loss: make slots and counts anew from the items whose physical offset is below `mark`.

        Items below the mark must be durable; all else in the files may be anything. From the newest file back to the
        first that keeps an item; older ones were full and durable. Files that keep none are deleted. An item from
        before the end of the file before is none: it would keep what lies above the mark in that file.
        `store_timestamp_ms` gives a record's store time by its offset. Nobody else may have the files open; `sync`
        makes the result durable. Returns the items kept in the newest file.
        """
        self._let_current_go()
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
        """Make everything durable that was put, mended or removed here: bytes, lengths and names."""
        self._unsynced.sync()

    def _unlink(self, name: str) -> None:
        self._io.unlink(self._folder / name)
        self._unsynced.note(name)

    def close(self) -> None:
        """Close the current file."""
        self._let_current_go()

    def _newest(self) -> _MappedIndex | None:
        if self._current is None:
            names = index_file_names(self._io, self._folder)
            if names:
                self._current = self._mapped(names[-1])
        return self._current

    def _mapped(self, name: str) -> _MappedIndex:
        path = self._folder / name
        return _MappedIndex(self._io, path, self._slots, self._items, sync_follows=self._sync_follows)

    def _create(self, store_timestamp_ms: int, previous: str, end: IndexHeader | None) -> _MappedIndex:
        """A new file for an entry of this store time, named behind `previous`, which has its `end` in its header."""
        name = next_name(store_timestamp_ms, previous)
        path = self._folder / name
        self._io.make_folder(self._folder, sync=False)
        fd = self._io.open(path, write=True, create=True)
        try:
            self._io.set_size(fd, layout.file_size(self._slots, self._items))
        finally:
            self._io.close(fd)
        file = self._mapped(name)
        try:
            self._begin(file, end)
        except BaseException:
            file.close()
            raise
        self._io.crash_point("index.roll")
        self._let_current_go()
        self._current = file
        return file

    def _begin(self, file: _MappedIndex, end: IndexHeader | None) -> None:
        """Make a new file ready for its first entry. Until then its header has a count of 0, as RocketMQ's."""
        file.allocate_slots()
        if end is None:
            return
        file.write_header(
            IndexHeader(
                begin_timestamp_ms=end.end_timestamp_ms,
                end_timestamp_ms=end.end_timestamp_ms,
                begin_physical_offset=end.end_physical_offset,
                end_physical_offset=end.end_physical_offset,
                slots_used=0,
                count=0,
            )
        )
        self.full_files += 1

    def _rebuild_file(self, name: str, floor: int, mark: int, store_timestamp_ms: Callable[[int], int | None]) -> int:
        """Make one file anew from its items in [floor, mark), where it is not so already; the items kept."""
        if self._io.size_of(self._folder / name) == 0:
            return 0
        read_through(self._io, self._folder / name)
        file = self._mapped(name)
        try:
            header = read_header(file.view)
            count, used, changed = file.mend_chains(floor, mark)
            if count == layout.FIRST_ITEM:
                return 0
            wanted = self._header_of(file.view, header, count, used, store_timestamp_ms)
            if wanted != header:
                file.allocate_slots()
                file.write_header(wanted)
                changed = True
        finally:
            file.close()
        if self._clear_behind(self._folder / name, layout.item_offset(self._slots, count)) or changed:
            self._unsynced.note(name)
        return count - layout.FIRST_ITEM

    def _header_of(
        self,
        view: NDArray[np.uint8],
        header: IndexHeader,
        count: int,
        used: int,
        store_timestamp_ms: Callable[[int], int | None],
    ) -> IndexHeader:
        """What a file's header must say when it holds `count` items. Its begin is durable since its first entry."""
        last_item = layout.item_offset(self._slots, count - 1)
        end_offset = load_be64(view, last_item + layout.ITEM_PHYSICAL_OFFSET)
        end_ms = store_timestamp_ms(end_offset)
        if end_ms is None and header.end_physical_offset == end_offset:
            end_ms = header.end_timestamp_ms
        elif end_ms is None:
            # The record is gone by retention: what the item says, in whole seconds.
            seconds = load_be32(view, last_item + layout.ITEM_TIME_DIFFERENCE)
            end_ms = header.begin_timestamp_ms + 1000 * seconds
        begin_offset = load_be64(view, layout.item_offset(self._slots, layout.FIRST_ITEM) + layout.ITEM_PHYSICAL_OFFSET)
        begin_ms = header.begin_timestamp_ms
        if begin_ms <= 0 or header.begin_physical_offset != begin_offset:
            begin_ms = store_timestamp_ms(begin_offset) or begin_ms
        return IndexHeader(begin_ms, end_ms, begin_offset, end_offset, used, count)

    def _clear_behind(self, path: Path, end: int) -> bool:
        """Zero what lies behind the last item, so that a later rebuild cannot take stale items for its own.

        Whether there was anything.
        """
        fd = self._io.open(path, write=True)
        try:
            return clear_behind(self._io, fd, end) > 0
        finally:
            self._io.close(fd)

    def _let_current_go(self) -> None:
        if self._current is not None:
            self._current.close()
            self._current = None
