"""Index files: names, space, rollback, repair after a power loss, and lookup."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqproc.errors import CorruptStoreError
from mqproc.io.store_io import StoreIO
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.layout import index_file as layout
from mqproc.layout.index_file import index_key_hash_of
from mqproc.paths import index_name, index_name_time_ms
from mqproc.store.cooperative import finish
from mqproc.store.index import files as index_files
from mqproc.store.index.files import IndexCommit, IndexFiles, next_name, read_header
from mqproc.store.index.lookup import IndexReader
from mqproc.util.units import LARGE_PAGE_BYTES, PAGE_BYTES
from tests.support.processes import LARGE_PAGES, large_page_ranges, open_below

T0 = 1_700_000_000_000
FOREVER = 2**63 - 1

Entry = tuple[int, int, int]
"""(key hash, physical offset, store time in ms)"""


def put(index: IndexFiles, entries: list[Entry]) -> None:
    index.put(
        np.array([entry[0] for entry in entries], np.int32),
        np.array([entry[1] for entry in entries], np.int64),
        np.array([entry[2] for entry in entries], np.int64),
        len(entries),
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def keyed(key: str, offset: int, time_ms: int) -> Entry:
    return index_key_hash_of("T", key), offset, time_ms


def reader_of(folder: Path, slots: int, items: int, newest_ms: int = 1) -> IndexReader:
    reader = IndexReader(StoreIO(), folder, slots, items, 64)
    reader.refresh(newest_ms)
    return reader


def test_put_two_files_match_byte_vectors(tmp_path: Path) -> None:
    """10 slots and 4 items: a full file and the next one with one key."""
    index = IndexFiles(StoreIO(), tmp_path, 10, 4)
    put(index, [keyed("k1", 100, T0), keyed("k1", 200, T0 + 5_999), keyed("k2", 300, T0 + 4_000)])
    full = (
        "0000018bcfe56800 0000018bcfe577a0 0000000000000064 000000000000012c 00000002 00000004"
        "00000000 00000000 00000000 00000000 00000000 00000002 00000003 00000000 00000000 00000000"
        "0000000000000000000000000000000000000000"
        "0026bfb5 0000000000000064 00000000 00000000"
        "0026bfb5 00000000000000c8 00000005 00000001"
        "0026bfb6 000000000000012c 00000004 00000000"
    )
    assert list(contents(tmp_path).values()) == [bytes.fromhex(full)]
    put(index, [keyed("k4", 500, T0 + 12_000)])
    second = (
        "0000018bcfe596e0 0000018bcfe596e0 00000000000001f4 00000000000001f4 00000001 00000002"
        "00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000001 00000000"
        "0000000000000000000000000000000000000000"
        "0026bfb8 00000000000001f4 00000008 00000000"
    )
    names = [index_name(T0), index_name(T0 + 12_000)]
    assert contents(tmp_path) == {
        names[0]: bytes.fromhex(full),
        names[1]: bytes.fromhex(second).ljust(160, b"\0"),
    }
    index.close()


class FullDiskIO(StoreIO):
    """Fails allocations with ENOSPC after `left` successful ones."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left

    def allocate(self, fd: int, offset: int, size: int) -> None:
        if self.left == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.left -= 1
        super().allocate(fd, offset, size)


def test_put_next_file_starts_with_end_of_previous(tmp_path: Path) -> None:
    """The disk is full when the space of the first entry is allocated."""
    io = FullDiskIO(left=4)
    index = IndexFiles(io, tmp_path, 10, 4)
    put(index, [keyed("k1", 100, T0), keyed("k1", 200, T0 + 5_999), keyed("k2", 300, T0 + 4_000)])
    before = index.commit()
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        put(index, [keyed("k4", 500, T0 + 12_000)])
    *_first, second = contents(tmp_path).values()
    header = "0000018bcfe577a0 0000018bcfe577a0 000000000000012c 000000000000012c 00000000 00000000"
    assert second == bytes.fromhex(header).ljust(160, b"\0")
    index.roll_back(before)
    assert list(contents(tmp_path)) == [index_name(T0)]
    io.left = 9
    put(index, [keyed("k4", 500, T0 + 12_000)])
    assert list(contents(tmp_path)) == [index_name(T0), index_name(T0 + 12_000)]
    assert index.full_files == 2


def test_put_file_names_ascend_for_any_store_time(tmp_path: Path) -> None:
    index = IndexFiles(StoreIO(), tmp_path, 1, 2)
    for time_ms in (T0, T0, T0 - 5_000, T0 + 1, T0 + 7):
        put(index, [(0, 0, time_ms)])
    names = list(contents(tmp_path))
    assert [index_name_time_ms(name) for name in names] == [T0, T0 + 1, T0 + 2, T0 + 3, T0 + 7]
    assert next_name(0, "20251026025959999") == "20251026030000000"
    assert next_name(T0, "") == index_name(T0)


@pytest.mark.parametrize("time_ms", [-1, -(1 << 63), 253_402_300_800_000, (1 << 63) - 1])
def test_put_store_time_out_of_range_names_a_file(tmp_path: Path, time_ms: int) -> None:
    """A damaged store time in a record without CRC previously made each start fail."""
    index = IndexFiles(StoreIO(), tmp_path, 1, 2)
    for each in (time_ms, T0, time_ms):
        put(index, [(0, 0, each)])
    assert [index_name_time_ms(name) for name in contents(tmp_path)] == [1, T0, T0 + 1]


def test_put_file_is_sparse_after_allocated_items(tmp_path: Path) -> None:
    """In RocketMQ's default file the slots are allocated at once, items in steps."""
    index = IndexFiles(StoreIO(), tmp_path, 5_000_000, 20_000_000)
    put(index, [(1, 0, T0)])
    (path,) = tmp_path.iterdir()
    status = path.stat()
    assert status.st_size == 420_000_040
    allocated = status.st_blocks * 512
    assert layout.items_start(5_000_000) < allocated < layout.items_start(5_000_000) + 2 * index_files.ITEM_STEP_BYTES


@pytest.mark.parametrize(
    ("free", "starts"),
    [
        (1 << 40, [0, 4096, 8192, 16384, 32768, 49152, 65536]),
        (index_files.AHEAD_OF_FREE * 4096, range(0, 5 * 16384, 4096)),
    ],
    ids=["plenty of room", "little room"],
)
def test_put_allocates_in_doubling_steps(
    free: int, starts: Sequence[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call per doubling, because a call may wait for another sync."""
    monkeypatch.setattr(index_files, "ITEM_STEP_BYTES", 4096)
    monkeypatch.setattr(index_files, "ALLOCATED_AHEAD_MAX_BYTES", 16384)
    monkeypatch.setattr(index_files, "LARGE_PAGE_BYTES", 1)
    allocated: list[tuple[int, int]] = []

    class TracedIO(StoreIO):
        def allocate(self, fd: int, offset: int, size: int) -> None:
            allocated.append((offset - layout.items_start(64), size))
            super().allocate(fd, offset, size)

        def disk_usage(self, folder: Path) -> tuple[int, int]:
            return 0, free

    items = 5 * 16384 // layout.ITEM_SIZE
    index = IndexFiles(TracedIO(), tmp_path, slots=64, items=items)
    offsets = np.arange(1, items, dtype=np.int64)
    for first in range(0, len(offsets), 50):
        part = offsets[first : first + 50]
        index.put(np.zeros(len(part), np.int32), part, np.full(len(part), 1_700_000_000_000), len(part))
    index.close()
    steps = [(start, size) for start, size in allocated if start >= 0]
    assert steps[0] == (0, 4096 + layout.ITEM_SIZE)
    assert [start for start, _size in steps] == list(starts)
    assert max(size for _start, size in steps) == max(np.diff(starts)) + layout.ITEM_SIZE


def test_put_allocates_to_the_end_of_large_pages(tmp_path: Path) -> None:
    """Storing to a large page of the page cache without space for all of it raises SIGBUS."""
    ends: list[int] = []

    class TracedIO(StoreIO):
        def allocate(self, fd: int, offset: int, size: int) -> None:
            ends.append(offset + size)
            super().allocate(fd, offset, size)

    slots, items = 1_000_000, 2_000_000
    index = IndexFiles(TracedIO(), tmp_path, slots, items)
    put_many(index, items - 1)
    index.close()
    size = layout.file_size(slots, items)
    assert len(ends) > 3
    assert ends[-1] == size
    assert all(end == size or end % LARGE_PAGE_BYTES == 0 for end in ends)


def put_many(index: IndexFiles, count: int) -> None:
    index.put(np.zeros(count, np.int32), np.arange(count, dtype=np.int64), np.full(count, T0), count)


@pytest.mark.skipif(not LARGE_PAGES, reason="this kernel has no large pages")
def test_put_many_entries_uses_large_pages(tmp_path: Path) -> None:
    slots = 1_000_000
    index = IndexFiles(StoreIO(), tmp_path, slots, 2_000_000)
    put(index, [(1, 0, T0)])
    (path,) = tmp_path.iterdir()
    assert large_page_ranges(path) == []
    put_many(index, 500_000)
    ((start, stop),) = large_page_ranges(path)
    second = layout.items_start(slots) + index_files.ITEM_STEP_BYTES
    assert start == second - second % PAGE_BYTES
    while index.commit().count <= 2 * index_files.ITEM_STEP_BYTES // layout.ITEM_SIZE + 1:
        put_many(index, index_files.MANY_ENTRIES - 1)
    third = second + index_files.ITEM_STEP_BYTES
    assert large_page_ranges(path) == [(start, third - third % PAGE_BYTES)], "few entries use small pages"
    assert third < stop
    index.close()


@pytest.mark.parametrize("sync_follows", [True, False])
def test_put_starts_writeback_of_complete_steps(
    sync_follows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_files, "ITEM_STEP_BYTES", 4096)
    started: list[tuple[int, int]] = []

    class WritebackIO(StoreIO):
        def start_writeback(self, fd: int, offset: int, size: int) -> None:
            started.append((offset, size))
            super().start_writeback(fd, offset, size)

    index = IndexFiles(WritebackIO(), tmp_path, 10, 1000, sync_follows=sync_follows)
    put(index, [(number, number, T0) for number in range(500)])
    start = layout.items_start(10)
    assert started == [(start + 4096 * step, 4096) for step in range(500 * layout.ITEM_SIZE // 4096) if sync_follows]
    index.close()


def test_put_allocates_items_before_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps are not a multiple of an item; each item ends below the allocated end."""
    monkeypatch.setattr(index_files, "ITEM_STEP_BYTES", 4096)
    allocated = [0]

    class CheckedIO(StoreIO):
        def allocate(self, fd: int, offset: int, size: int) -> None:
            assert offset <= allocated[-1]
            allocated.append(max(allocated[-1], offset + size))
            super().allocate(fd, offset, size)

    index = IndexFiles(CheckedIO(), tmp_path, 10, 2000)
    for number in range(1999):
        put(index, [(number, number, T0)])
        assert layout.item_offset(10, index.commit().count) <= allocated[-1]
    assert allocated[-1] == layout.file_size(10, 2000)


ENTRIES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 50), st.integers(T0, T0 + 9_000)), max_size=40)


@settings(max_examples=60, deadline=None)
@given(ENTRIES, st.integers(0, 40), st.integers(2, 20))
def test_roll_back_then_put_gives_the_same_files(
    tmp_path_factory: pytest.TempPathFactory, entries: list[Entry], kept: int, items: int
) -> None:
    whole_folder = tmp_path_factory.mktemp("whole")
    whole = IndexFiles(StoreIO(), whole_folder, 5, items)
    put(whole, entries)
    folder = tmp_path_factory.mktemp("index")
    index = IndexFiles(StoreIO(), folder, 5, items)
    put(index, entries[:kept])
    commit = index.commit()
    put(index, [(hashed + 1, offset, time_ms) for hashed, offset, time_ms in entries[kept:]])
    index.close()
    successor = IndexFiles(StoreIO(), folder, 5, items)
    successor.roll_back(commit)
    assert successor.commit() == commit
    put(successor, entries[kept:])
    assert contents(folder) == contents(whole_folder)
    successor.close()
    whole.close()


def test_roll_back_to_empty_commit_removes_all_files(tmp_path: Path) -> None:
    index = IndexFiles(StoreIO(), tmp_path, 5, 3)
    assert index.commit() == IndexCommit()
    put(index, [(1, 1, T0)] * 7)
    index.roll_back(IndexCommit())
    assert contents(tmp_path) == {}
    with pytest.raises(CorruptStoreError, match="missing"):
        index.roll_back(IndexCommit(file_ms=T0))


@settings(max_examples=60, deadline=None)
@given(ENTRIES, st.integers(0, 60), st.integers(2, 20), st.binary(min_size=4, max_size=4))
def test_rebuild_after_power_loss_keeps_items_below_mark(
    tmp_path_factory: pytest.TempPathFactory, entries: list[Entry], mark: int, items: int, noise: bytes
) -> None:
    """Slots, counts and later items may be arbitrary; the result has exactly the kept entries."""
    entries = sorted((hashed, offset + 1, time_ms) for hashed, offset, time_ms in entries)
    entries.sort(key=lambda entry: entry[1])
    kept = [entry for entry in entries if entry[1] < mark]
    expected_folder = tmp_path_factory.mktemp("expected")
    expected = IndexFiles(StoreIO(), expected_folder, 5, items)
    put(expected, kept)
    folder = tmp_path_factory.mktemp("index")
    index = IndexFiles(StoreIO(), folder, 5, items)
    put(index, kept)
    synced = index.commit()
    put(index, entries[len(kept) :])
    index.close()
    for name in contents(folder):
        if index_files.file_ms(name) < synced.file_ms:
            continue
        data = bytearray((folder / name).read_bytes())
        data[layout.SLOT_COUNT : layout.HEADER_SIZE] = noise + data[layout.ITEM_COUNT : layout.HEADER_SIZE]
        data[layout.HEADER_SIZE : layout.HEADER_SIZE + 4] = noise
        (folder / name).write_bytes(data)
    times = {offset: time_ms for _hashed, offset, time_ms in kept}
    successor = IndexFiles(StoreIO(), folder, 5, items)
    successor.rebuild(mark, times.get)
    assert contents(folder) == contents(expected_folder)
    put(successor, entries[len(kept) :])
    put(expected, entries[len(kept) :])
    assert contents(folder) == contents(expected_folder)


def test_rebuild_removes_file_older_than_its_predecessor(tmp_path: Path) -> None:
    """After a power loss its first item may precede the end of the previous file."""
    entries = [(number, 10 * number, T0 + number) for number in range(1, 5)]
    index = IndexFiles(StoreIO(), tmp_path, 5, 3)
    put(index, entries)
    index.close()
    whole = contents(tmp_path)
    _, newest = whole
    data = bytearray(whole[newest])
    at = layout.item_offset(5, layout.FIRST_ITEM) + layout.ITEM_PHYSICAL_OFFSET
    data[at : at + 8] = (15).to_bytes(8, "big")
    (tmp_path / newest).write_bytes(data)
    successor = IndexFiles(StoreIO(), tmp_path, 5, 3)
    assert successor.rebuild(100, {offset: time_ms for _, offset, time_ms in entries}.get) == 2
    assert newest not in contents(tmp_path)
    put(successor, entries[2:])
    assert contents(tmp_path) == whole


def test_roll_back_and_rebuild_remove_an_incomplete_file(tmp_path: Path) -> None:
    index = IndexFiles(StoreIO(), tmp_path, 5, 4)
    put(index, [(1, 1, T0)])
    commit = index.commit()
    index.close()
    (tmp_path / index_name(T0 + 5)).write_bytes(b"")
    IndexFiles(StoreIO(), tmp_path, 5, 4).roll_back(commit)
    assert list(contents(tmp_path)) == [index_name(T0)]
    (tmp_path / index_name(T0 + 5)).write_bytes(b"")
    assert IndexFiles(StoreIO(), tmp_path, 5, 4).rebuild(2, {1: T0}.get) == 1
    assert list(contents(tmp_path)) == [index_name(T0)]


def test_open_file_of_other_size_is_rejected(tmp_path: Path) -> None:
    put(IndexFiles(StoreIO(), tmp_path, 5, 4), [(1, 1, T0)])
    with pytest.raises(CorruptStoreError, match="140 bytes; max_hash_slot_num = 6"):
        IndexFiles(StoreIO(), tmp_path, 6, 4)
    reader = reader_of(tmp_path, 6, 4)
    assert reader.query_offset("T", "k", 9, 0, FOREVER).offsets == []
    assert reader.skipped == [index_name(T0)]


def test_open_ignores_other_file_names(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("stray")
    (tmp_path / "20251399000000000").write_text("no such month")
    index = IndexFiles(StoreIO(), tmp_path, 5, 4)
    put(index, [(1, 1, T0)])
    assert index.commit().file_ms == T0


def test_put_100_slots_400_items_starts_a_second_file(tmp_path: Path) -> None:
    """399 keys fill a file; the 400th starts the next one."""
    index = IndexFiles(StoreIO(), tmp_path, 100, 400)
    put(index, [keyed(str(number), number, T0) for number in range(399)])
    assert len(contents(tmp_path)) == 1
    put(index, [keyed("399", 399, T0)])
    assert len(contents(tmp_path)) == 2
    assert reader_of(tmp_path, 100, 400).query_offset("T", "60", 64, 0, FOREVER).offsets == [60]


def test_query_maximum_count_allocates_no_buffer(tmp_path: Path) -> None:
    index = IndexFiles(StoreIO(), tmp_path, 10, 1000)
    put(index, [keyed("k", number, T0) for number in range(200)])
    found = reader_of(tmp_path, 10, 1000).query_offset("T", "k", 2**31 - 1, 0, FOREVER)
    assert found.offsets == list(range(199, 135, -1))
    assert (found.last_update_timestamp_ms, found.last_update_physical_offset) == (T0, 199)


def test_query_reads_from_newest_file_back_to_start_time(tmp_path: Path) -> None:
    index = IndexFiles(StoreIO(), tmp_path, 10, 4)
    put(index, [keyed("k", number, T0 + 10_000 * number) for number in range(9)])
    reader = reader_of(tmp_path, 10, 4)
    # Each file has three entries. The first entry of a later file has a later time than stored.
    assert reader.query_offset("T", "k", 9, 0, FOREVER).offsets == [8, 7, 6, 5, 4, 3, 2, 1, 0]
    assert reader.query_offset("T", "k", 4, 0, FOREVER).offsets == [8, 7, 6, 5]
    assert reader.query_offset("T", "k", 9, T0, T0 + 20_000).offsets == [2, 1, 0]
    assert reader.query_offset("T", "k", 9, T0 + 10_000, T0 + 40_000).offsets == [4, 3, 2, 1]
    assert reader.query_offset("T", "k", 9, T0 + 1_000_000, FOREVER).offsets == []
    assert finish(reader.query_message("T", "k", 9, 0, FOREVER, lambda offset: offset > 5)).offsets == [6, 7, 8]
    assert finish(reader.query_message("T", "other", 9, 0, FOREVER, lambda offset: True)).last_update_timestamp_ms == 0


def test_query_sees_new_items_and_new_files_after_refresh(tmp_path: Path) -> None:
    index = IndexFiles(StoreIO(), tmp_path, 10, 4)
    put(index, [keyed("k", 1, T0)])
    reader = reader_of(tmp_path, 10, 4, index.commit().file_ms)
    assert reader.query_offset("T", "k", 9, 0, FOREVER).offsets == [1]
    put(index, [keyed("k", 2, T0)])
    assert reader.query_offset("T", "k", 9, 0, FOREVER).offsets == [2, 1]
    put(index, [keyed("k", number, T0) for number in range(3, 6)])
    assert reader.query_offset("T", "k", 9, 0, FOREVER).offsets == [3, 2, 1]
    reader.refresh(index.commit().file_ms)
    assert reader.query_offset("T", "k", 9, 0, FOREVER).offsets == [5, 4, 3, 2, 1]
    (tmp_path / index_name(T0)).unlink()
    reader.refresh(0)
    assert reader.query_offset("T", "k", 9, 0, FOREVER).offsets == [5, 4]
    reader.drop_pages()
    reader.close()


def test_reader_mapped_files_are_bounded(tmp_path: Path) -> None:
    index = IndexFiles(StoreIO(), tmp_path, 10, 3)
    put(index, [keyed("k", number, T0 + number) for number in range(40)])
    reader = IndexReader(StoreIO(), tmp_path, 10, 3, 64, mapped_max=4)
    reader.refresh(1)
    before = len(open_below(tmp_path))
    assert len(reader.query_offset("T", "k", 64, 0, FOREVER).offsets) == 40
    assert len(open_below(tmp_path)) <= before + 4


def test_read_header_zeros_has_first_item_count() -> None:
    mapping = mmap.mmap(-1, 4096)
    assert read_header(as_kernel_array(mapping)).count == layout.FIRST_ITEM
