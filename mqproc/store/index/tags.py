"""Entries for tags in an index: RocketMQ makes them since 5.4, earlier versions do not.

The newest tagged records of an index show whether the store's writer makes them, the oldest one whether the index has
had them from its beginning. Only a few items are read, at doubling distances from either end.

Long parts are cooperative generators (`store.cooperative`): the query role answers others meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mqproc.config.options import Options
from mqproc.errors import ConfigurationError, CorruptStoreError
from mqproc.io.store_io import Kind, StoreIO
from mqproc.kernels.index_verify import record_has_hash, tag_hash_of
from mqproc.kernels.jit.intrinsics import load_be64
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.kernels.record_check import record_size
from mqproc.layout import index_file as layout
from mqproc.layout import record
from mqproc.paths import StorePaths
from mqproc.store.access import read_values
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.cooperative import Slices, finish
from mqproc.store.damage import unreadable_file
from mqproc.store.durable_marks import read_checkpoint
from mqproc.store.index.files import index_file_names, read_header
from mqproc.store.index.lookup import FILES_PER_SLICE

_WINDOW_ITEMS: Final = 64
# A record's items on both sides of a window; one with more is not looked at.
_AROUND_ITEMS: Final = 256
# RocketMQ stores a record's items one by one, the tag's last: the newest record may lack it after a kill.
_NEWEST_RECORDS: Final = 2
_ITEM: Final = np.dtype([("hash", ">i4"), ("offset", ">i8"), ("seconds", ">i4"), ("previous", ">i4")])
assert _ITEM.itemsize == layout.ITEM_SIZE


class _TaggedRecord(NamedTuple):
    """A record with a tag, and whether an index has an entry for it."""

    physical_offset: int
    is_indexed: bool


class _IndexSample:
    """Reads items of an index, numbered from 0 over all files, and their records."""

    def __init__(self, io: StoreIO, paths: StorePaths, options: Options, without: Container[Path] = ()) -> None:
        """`options` have the sizes of the store's files; files in `without` are not read."""
        self._io = io
        self._slots = options.max_hash_slot_num
        self._segments = LogSegments(io, paths.commit_log, options.mapped_file_size_commit_log, whole=False)
        names = index_file_names(io, paths.index)
        self._paths = [path for name in names if (path := paths.index / name) not in without]
        self._files: list[tuple[Path, int]] = []
        self.count = 0
        self.close = self._segments.close

    def first_in_log(self) -> Slices[int]:
        """Count the items; returns the first of a record that has not expired: item offsets ascend."""
        for number, path in enumerate(self._paths, 1):
            if number % FILES_PER_SLICE == 0:
                yield
            if (count := self._count(path)) > 0:
                self._files.append((path, count))
                self.count += count
        begin = min(self._segments.starts(), default=0)
        low, high = 0, self.count
        while low < high:
            yield
            middle = (low + high) // 2
            if self._items(middle, middle + 1)["offset"][0] < begin:
                low = middle + 1
            else:
                high = middle
        return low

    def tagged(self, first: int, stop: int) -> list[_TaggedRecord]:
        """The tagged records with items in [first, stop), in log order."""
        start, end = max(0, first - _AROUND_ITEMS), min(stop + _AROUND_ITEMS, self.count)
        items = self._items(start, end)
        offsets = items["offset"].astype(np.int64)
        # Items of these records may lie outside.
        cut = {int(offsets[0])} if start > 0 else set()
        cut |= {int(offsets[-1])} if end < self.count else set()
        found = []
        for offset in np.unique(offsets[first - start : stop - start]).tolist():
            hashes = items["hash"][offsets == offset].tolist()
            if offset not in cut and (is_indexed := self._has_tag_entry(offset, hashes)) is not None:
                found.append(_TaggedRecord(offset, is_indexed))
        return found

    def _count(self, path: Path) -> int:
        with self._io.opened(path) as fd:
            room = (self._io.size(fd) - layout.item_offset(self._slots, layout.FIRST_ITEM)) // layout.ITEM_SIZE
            data = self._io.pread(fd, layout.HEADER_SIZE, 0)
        if room <= 0 or len(data) < layout.HEADER_SIZE:
            return 0
        return min(read_header(as_kernel_array(data)).count - layout.FIRST_ITEM, room)

    def _items(self, first: int, stop: int) -> NDArray[np.void]:
        """The items [first, stop) as _ITEM[n]."""
        parts, before = [], 0
        for path, count in self._files:
            low, high = max(first - before, 0), min(stop - before, count)
            before += count
            if low < high:
                place = layout.item_offset(self._slots, layout.FIRST_ITEM + low)
                with self._io.opened(path) as fd:
                    parts.append(np.frombuffer(self._io.pread(fd, layout.ITEM_SIZE * (high - low), place), _ITEM))
        return np.concatenate(parts)

    def _has_tag_entry(self, physical_offset: int, hashes: list[int]) -> bool | None:
        """Whether a record has an item for its tag; None without a tag, or with a foreign item."""
        base = self._segments.start_of(physical_offset)
        entry = self._io.entry(self._segments.path(base)) if base >= 0 else None
        # A folder of that name is not opened: recovery sets it aside later.
        if entry is None or entry.kind is not Kind.FILE:
            return None
        try:
            view = self._segments.view(base)
        except (FileNotFoundError, CorruptStoreError):
            return None
        at = physical_offset - base
        size = int(record_size(view, at, len(view))) if physical_offset >= 0 else 0
        if size <= 0 or load_be64(view, at + record.PHYSICAL_OFFSET) != physical_offset:
            return None
        tag_hash = int(tag_hash_of(view, at, size))
        if tag_hash < 0 or not all(record_has_hash(view, at, size, each) for each in hashes):
            return None
        return tag_hash in hashes


def _distances(extent: int) -> Iterator[int]:
    """0, then doubling distances below `extent`."""
    distance = 0
    while distance < extent:
        yield distance
        distance = max(2 * distance, _WINDOW_ITEMS)


def oldest_is_indexed(io: StoreIO, paths: StorePaths, options: Options) -> bool | None:
    """Whether the oldest tagged record's tag has an entry; None without such a record."""
    with contextlib.closing(_IndexSample(io, paths, options)) as sample:
        return finish(_oldest(sample, finish(sample.first_in_log())))


def newest_is_indexed(io: StoreIO, paths: StorePaths, options: Options, without: Container[Path] = ()) -> bool | None:
    """As `oldest_is_indexed`, of the newest tagged records. Files in `without` are not read."""
    with contextlib.closing(_IndexSample(io, paths, options, without)) as sample:
        return finish(_newest(sample, finish(sample.first_in_log())))


def _oldest(sample: _IndexSample, first: int) -> Slices[bool | None]:
    count = sample.count
    starts = (first + distance for distance in _distances(count - first))
    found = yield from _first_found(sample.tagged(at, min(at + _WINDOW_ITEMS, count)) for at in starts)
    return found[0].is_indexed if found else None


def _newest(sample: _IndexSample, first: int) -> Slices[bool | None]:
    stops = (sample.count - distance for distance in _distances(sample.count - first))
    found = yield from _first_found(sample.tagged(max(first, at - _WINDOW_ITEMS), at) for at in stops)
    return any(each.is_indexed for each in found[-_NEWEST_RECORDS:]) if found else None


def _first_found(windows: Iterable[list[_TaggedRecord]]) -> Slices[list[_TaggedRecord]]:
    for found in windows:
        yield
        if found:
            return found
    return []


def adopted_index_tags(io: StoreIO, paths: StorePaths, options: Options) -> bool:
    """Whether the store's writer makes entries for tags; `options` have the sizes of its files.

    An index without tagged records says nothing. Then RocketMQ since 5.5 is known by its checkpoint, and the option
    of this or of the last group counts. Files that the disk cannot read are left out: recovery rebuilds them.
    """
    unreadable: set[Path] = set()
    while True:
        try:
            return _adopted(io, paths, options, newest_is_indexed(io, paths, options, unreadable))
        except OSError as error:
            if (path := unreadable_file(error, paths)) is None:
                raise
            unreadable.add(path)


def _adopted(io: StoreIO, paths: StorePaths, options: Options, newest: bool | None) -> bool:
    if newest is not None:
        return newest
    if options.message_index_tags or read_checkpoint(io, paths.checkpoint).logics_physical_offset > 0:
        return True
    try:
        return bool(read_values(io, paths).get("message_index_tags"))
    except (OSError, ValueError, ConfigurationError):
        return False


def tags_indexed_from(io: StoreIO, paths: StorePaths, options: Options) -> Slices[int | None]:
    """Log position from which on all tags are indexed; None if the writer does not index them."""
    while True:
        # Retention may delete an index file between two slices: then read those that remain.
        with contextlib.suppress(FileNotFoundError):
            return (yield from _indexed_from(io, paths, options))


def _indexed_from(io: StoreIO, paths: StorePaths, options: Options) -> Slices[int | None]:
    with contextlib.closing(_IndexSample(io, paths, options)) as sample:
        first = yield from sample.first_in_log()
        if not _adopted(io, paths, options, (yield from _newest(sample, first))):
            return None
        if (yield from _oldest(sample, first)) is not False:
            return 0
        found, low, high = 0, first, sample.count
        while low < high:
            middle = (low + high) // 2
            starts = (middle + distance for distance in _distances(high - middle))
            following = yield from _first_found(sample.tagged(at, min(at + _WINDOW_ITEMS, high)) for at in starts)
            if following and not following[0].is_indexed:
                low = middle + 1
            else:
                found, high = following[0].physical_offset if following else found, middle
        return found
