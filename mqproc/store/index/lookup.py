"""Key lookup in the index, from any process, while the dispatcher fills the newest file.

Results are CommitLog offsets with a matching key hash: callers compare topic and key of the records.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.errors import BadRequestError, CorruptStoreError
from mqproc.io.sigbus import zero_filled_pages
from mqproc.io.store_io import StoreIO
from mqproc.ipc.control_words import Words
from mqproc.kernels import index as kernels
from mqproc.kernels.gather import TIME_MAX, TIME_MIN
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.layout import control
from mqproc.layout import index_file as layout
from mqproc.layout.index_file import index_key_hash_of
from mqproc.store.cooperative import Slices, finish
from mqproc.store.index.files import IndexHeader, index_file_names, read_header
from mqproc.util.units import MIB

LOG_END_MAX: Final = 1 << 62
"""Upper bound of log positions."""
# Range of store times that a damaged record may have.
_FIRST_MS: Final = -(1 << 63)
_LAST_MS: Final = (1 << 63) - 1
MAPPED_FILES_MAX: Final = 32
FILES_PER_SLICE: Final = 64
ITEMS_PER_SLICE = 1 << 17
"""A chain may have millions of items: all of a file whose slots are few, or of one key."""
# Places in a chain: its first item, its end.
_FIRST, _END = 0, -1
# Words of a walk's result after the offsets.
_WALK_RESULTS: Final = 2
# A reader drops its mapped pages when more than this may be resident.
RESIDENT_BYTES_MAX: Final = 32 * MIB


@dataclass(frozen=True, slots=True)
class IndexAnswer:
    """Offsets found, and how far the newest file reaches."""

    offsets: list[int] = field(default_factory=list)
    last_update_timestamp_ms: int = 0
    last_update_physical_offset: int = 0


@dataclass(slots=True)
class LookupCounters:
    """Work of lookups since the last `add_to`."""

    queries: int = 0
    files: int = 0
    """Index files whose chain was followed."""
    items: int = 0
    """Index items read: the total length of the chains."""
    matches: int = 0

    def add_to(self, words: Words) -> None:
        """Add to the query role's words and reset."""
        words.add(control.KEY_QUERIES, self.queries)
        words.add(control.KEY_FILES, self.files)
        words.add(control.KEY_ITEMS, self.items)
        words.add(control.KEY_MATCHES, self.matches)
        self.queries = self.files = self.items = self.matches = 0


class IndexReader:
    """The index files of a store for reading; `refresh` shows new files."""

    def __init__(
        self,
        io: StoreIO,
        folder: Path,
        slots: int,
        items: int,
        results_max: int,
        mapped_max: int = MAPPED_FILES_MAX,
        *,
        enabled: bool = True,
    ) -> None:
        """`slots`, `items`, `results_max`: max_hash_slot_num, max_index_num, max_msgs_num_batch.

        A disabled index lacks messages, so it is not searched.
        """
        self._enabled = enabled
        self._io = io
        self._folder = folder
        self._slots = slots
        self._file_size = layout.file_size(slots, items)
        self._mapped_max = mapped_max
        self._maps: OrderedDict[str, tuple[mmap.mmap, NDArray[np.uint8]]] = OrderedDict()
        self._names: list[str] = []
        self._newest_ms = -1
        self._resident_bytes = 0
        self._found = np.zeros(results_max + _WALK_RESULTS, np.int64)
        self.walks = LookupCounters()
        self.skipped: list[str] = []
        """Files whose length contradicts the options; they are not searched."""

    def refresh(self, newest_ms: int) -> None:
        """List the files again if the newest one's name (INDEX_FILE_MS) has changed."""
        if newest_ms == self._newest_ms:
            return
        self._newest_ms = newest_ms
        self.forget_deleted()
        self.skipped = []

    def forget_deleted(self) -> None:
        """List the files again and unmap deleted files to release their space."""
        self._names = index_file_names(self._io, self._folder)
        for name in [name for name in self._maps if name not in self._names]:
            del self._maps[name]

    def check_enabled(self) -> None:
        """Raise BadRequestError if the index is disabled."""
        if not self._enabled:
            raise BadRequestError(
                f"{self._folder.parent}: message_index_enable is off, so messages are found only by range or scan"
            )

    def query_offset(
        self, topic: str, key: str, max_results: int, begin_ms: int, end_ms: int, below: int = LOG_END_MAX
    ) -> IndexAnswer:
        """Run `look_up` to its end."""
        return finish(self.look_up(topic, key, max_results, begin_ms, end_ms, below))

    def look_up(
        self, topic: str, key: str, max_results: int, begin_ms: int, end_ms: int, below: int = LOG_END_MAX
    ) -> Slices[IndexAnswer]:
        """Offsets for the key hash of `topic#key`, newest file first, as RocketMQ's `queryOffset`.

        Only records `below` a physical offset. TIME_MIN and TIME_MAX are unlimited, since a damaged record may have any
        time. A slice covers a bounded number of files and of index items.
        """
        begin_ms = _FIRST_MS if begin_ms <= TIME_MIN else begin_ms
        end_ms = _LAST_MS if end_ms >= TIME_MAX else end_ms
        self.check_enabled()
        key_hash = index_key_hash_of(topic, key)
        limit = min(max_results, len(self._found) - _WALK_RESULTS)
        self.walks.queries += 1
        offsets: list[int] = []
        newest: IndexHeader | None = None
        for number, name in enumerate(reversed(self._names), 1):
            if number % FILES_PER_SLICE == 0:
                yield
            view = self._view(name)
            if view is None:
                continue
            lost = zero_filled_pages()
            header = read_header(view)
            newest = newest or header
            item = _FIRST if _may_hold(header, begin_ms, end_ms) and header.begin_physical_offset < below else _END
            while item != _END and len(offsets) < limit:
                conditions = key_hash, begin_ms, end_ms, below, limit - len(offsets)
                found, item = self._walk(view, header.count, conditions, item)
                offsets += found
                if item != _END:
                    self._check_readable(name, key, lost)
                    yield
                    lost = zero_filled_pages()
            self._check_readable(name, key, lost)
            if header.begin_timestamp_ms < begin_ms or len(offsets) >= limit:
                break
        if newest is None:
            return IndexAnswer()
        return IndexAnswer(offsets, newest.end_timestamp_ms, newest.end_physical_offset)

    def _check_readable(self, name: str, key: str, lost: int) -> None:
        """Raise CorruptStoreError if a page of a file could not be read since `lost` was counted."""
        if zero_filled_pages() != lost:
            # Unmap: the next lookup must fail, too, or read newly written data.
            self._maps.pop(name, None)
            raise CorruptStoreError(f"{self._folder / name}: a part that leads to the key {key!r} cannot be read")

    def query_message(
        self,
        topic: str,
        key: str,
        max_results: int,
        begin_ms: int,
        end_ms: int,
        exists: Callable[[int], bool],
    ) -> Slices[IndexAnswer]:
        """Ascending offsets of records that still exist, as RocketMQ's `queryMessage`.

        `exists` returns whether the log still has a record. RocketMQ searches up to three rounds, further back each
        time, until one finds an existing record. Retention deletes the oldest records first, so one round gives the
        same answer. As in RocketMQ, an answer without matches does not describe the newest file.
        """
        found = yield from self.look_up(topic, key, max_results, begin_ms, end_ms)
        if not found.offsets:
            return IndexAnswer()
        existing = sorted(offset for offset in found.offsets if exists(offset))
        return IndexAnswer(existing, found.last_update_timestamp_ms, found.last_update_physical_offset)

    @property
    def file_count(self) -> int:
        """Number of files that a lookup may read."""
        return len(self._names)

    def drop_pages(self) -> None:
        """Unmap all resident pages; the mappings stay valid."""
        for mapping, _view in self._maps.values():
            self._io.release_pages(mapping, 0, len(mapping))
        self._resident_bytes = 0

    def close(self) -> None:
        self._maps.clear()

    def _walk(
        self, view: NDArray[np.uint8], count: int, conditions: tuple[int, int, int, int, int], item: int
    ) -> tuple[list[int], int]:
        """Follow a chain for ITEMS_PER_SLICE; returns offsets, and the next item or _END.

        `conditions` are arguments of the kernel.
        """
        found = kernels.walk_chain(view, self._slots, count, *conditions, item, ITEMS_PER_SLICE, self._found)
        self.walks.files += item == _FIRST
        self.walks.items += int(self._found[kernels.WALKED])
        self.walks.matches += found
        # Each item of a chain is likely on its own page; items that did not match are not counted.
        self._resident_bytes += (found + 2) * mmap.PAGESIZE
        if self._resident_bytes > RESIDENT_BYTES_MAX:
            self.drop_pages()
        offsets: list[int] = self._found[:found].tolist()
        return offsets, int(self._found[kernels.WALK_NEXT]) or _END

    def _view(self, name: str) -> NDArray[np.uint8] | None:
        """uint8[file size] of a file; None if it is deleted or has another size."""
        found = self._maps.get(name) or self._map(name)
        if found is None:
            return None
        self._maps.move_to_end(name)
        return found[1]

    def _map(self, name: str) -> tuple[mmap.mmap, NDArray[np.uint8]] | None:
        try:
            with self._io.opened(self._folder / name) as fd:
                if self._io.size(fd) != self._file_size:
                    if name not in self.skipped:
                        self.skipped.append(name)
                    return None
                mapping = self._io.map(fd, self._file_size)
        except FileNotFoundError:
            return None  # Deleted by retention, or by a dispatcher's rollback.
        while len(self._maps) >= self._mapped_max:
            self._maps.popitem(last=False)
        self._maps[name] = mapping, as_kernel_array(mapping)
        return self._maps[name]


def _may_hold(header: IndexHeader, begin_ms: int, end_ms: int) -> bool:
    """Whether a file's times and a range overlap, by RocketMQ's test."""
    first, last = header.begin_timestamp_ms, header.end_timestamp_ms
    return (begin_ms < first and end_ms > last) or first <= begin_ms <= last or first <= end_ms <= last
