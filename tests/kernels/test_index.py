"""The index kernels against a model of `putKey` and `selectPhyOffset`, compiled and plain.

Also every point at which a writer can crash: the plain twin is stopped at each of its stores in turn, a reader runs,
the slots are rolled back, and the entries are put again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mqproc.kernels import index as kernels
from mqproc.kernels import index_rebuild
from mqproc.kernels.jit.compile import COMPILED, plain
from mqproc.kernels.jit.intrinsics import load_be32, load_be64, observe_stores
from mqproc.layout import index_file as layout
from mqproc.layout.index_file import index_key_hash_of

ROOT = Path(__file__).resolve().parents[2]
T0 = 1_700_000_000_000
FOREVER = 2**63 - 1

Entry = tuple[int, int, int]
"""(key hash, physical offset, store time in ms)"""


@dataclass
class File:
    """An index file in memory."""

    slots: int
    items: int
    twin: bool = False

    def __post_init__(self) -> None:
        self.view = np.zeros(layout.file_size(self.slots, self.items), np.uint8)

    def put(self, entries: list[Entry], first: int = 0, limit: int | None = None) -> int:
        hashes = np.array([entry[0] for entry in entries], np.int32)
        offsets = np.array([entry[1] for entry in entries], np.int64)
        times = np.array([entry[2] for entry in entries], np.int64)
        put = plain(kernels.put_entries) if self.twin else kernels.put_entries
        item_limit = self.items if limit is None else limit
        return int(put(self.view, self.slots, item_limit, hashes, offsets, times, first, len(entries)))

    def select(
        self,
        key_hash: int,
        begin: int = 0,
        end: int = FOREVER,
        most: int = 64,
        below: int = FOREVER,
        walk_max: int = FOREVER,
    ) -> list[int]:
        out = np.zeros(most + 2, np.int64)
        walk = plain(kernels.walk_chain) if self.twin else kernels.walk_chain
        count = kernels.published_count(self.view)
        offsets: list[int] = []
        item = 0
        while True:
            conditions = key_hash, begin, end, below, most - len(offsets)
            found = walk(self.view, self.slots, count, *conditions, item, walk_max, out)
            offsets += [int(offset) for offset in out[:found]]
            item = int(out[kernels.WALK_NEXT])
            assert int(out[kernels.WALKED]) <= walk_max
            if not item or len(offsets) == most:
                return offsets

    @property
    def count(self) -> int:
        return kernels.published_count(self.view)

    def header(self) -> tuple[int, int, int, int, int, int]:
        longs = [load_be64(self.view, at) for at in (0, 8, 16, 24)]
        return (*longs, load_be32(self.view, 32), load_be32(self.view, 36))  # type: ignore[return-value]

    def slot(self, number: int) -> int:
        return load_be32(self.view, layout.HEADER_SIZE + 4 * number)

    def item(self, number: int) -> bytes:
        start = layout.item_offset(self.slots, number)
        return self.view[start : start + layout.ITEM_SIZE].tobytes()


class Model:
    """RocketMQ's `IndexFile`, word by word."""

    def __init__(self, slots: int, items: int) -> None:
        self.slots = [0] * slots
        self.items: list[tuple[int, int, int, int]] = [(0, 0, 0, 0)]
        self.capacity = items
        self.begin = self.end = self.begin_offset = self.end_offset = self.used = 0

    def put(self, key_hash: int, offset: int, time_ms: int) -> bool:
        count = len(self.items)
        if count >= self.capacity:
            return False
        slot = key_hash % len(self.slots)
        previous = self.slots[slot]
        if previous <= 0 or previous > count:
            previous = 0
        seconds = max(0, min((time_ms - self.begin) // 1000, 2**31 - 1)) if self.begin > 0 else 0
        self.items.append((key_hash, offset, seconds, previous))
        self.slots[slot] = count
        if count == 1:
            self.begin_offset, self.begin = offset, time_ms
        self.used += previous == 0
        self.end_offset, self.end = offset, time_ms
        return True

    def select(self, key_hash: int, begin: int, end: int, most: int, below: int) -> list[int]:
        found: list[int] = []
        item = self.slots[key_hash % len(self.slots)]
        while item > 0 and len(found) < most:
            item_hash, offset, seconds, previous = self.items[item]
            time_ms = self.begin + 1000 * seconds
            if item_hash == key_hash and begin <= time_ms <= end and offset < below:
                found.append(offset)
            if time_ms < begin:
                break
            item = previous
        return found

    def encode(self) -> bytes:
        words = [self.begin, self.end, self.begin_offset, self.end_offset]
        data = b"".join(word.to_bytes(8, "big") for word in words)
        data += self.used.to_bytes(4, "big")
        data += (len(self.items) if len(self.items) > 1 else 0).to_bytes(4, "big")
        data += b"".join(slot.to_bytes(4, "big") for slot in self.slots)
        for item_hash, offset, seconds, previous in self.items:
            data += item_hash.to_bytes(4, "big") + offset.to_bytes(8, "big")
            data += seconds.to_bytes(4, "big") + previous.to_bytes(4, "big")
        return data.ljust(layout.file_size(len(self.slots), self.capacity), b"\0")


HASHES = st.one_of(st.integers(0, 30), st.integers(0, 2**31 - 1))
TIMES = st.one_of(st.integers(T0, T0 + 60_000), st.integers(0, 2**62))
ENTRIES = st.lists(st.tuples(HASHES, st.integers(0, 2**62), TIMES), max_size=60)


@settings(max_examples=200 if COMPILED else 50, deadline=None)
@given(ENTRIES, st.integers(1, 9), st.integers(2, 50), st.data())
def test_files_and_results_match_model(entries: list[Entry], slots: int, items: int, data: st.DataObject) -> None:
    model = Model(slots, items)
    stored = [entry for entry in entries if model.put(*entry)]
    for twin in (False, True):
        file = File(slots, items, twin)
        # Put in steps while the allocated space grows.
        done = 0
        while done < len(stored):
            limit = data.draw(st.integers(file.count + 1, items))
            done = file.put(entries, done, limit)
            assert file.count == min(limit, len(stored) + 1)
        assert file.put(entries, done) == len(stored)
        assert file.view.tobytes() == model.encode()
        for key_hash in {entry[0] for entry in entries[:5]} | {7}:
            begin, end = sorted([data.draw(TIMES), data.draw(TIMES)])
            most = data.draw(st.integers(1, 9))
            below = data.draw(st.sampled_from([FOREVER, *(entry[1] for entry in entries[:9])]))
            expected = model.select(key_hash, begin, end, most, below) if stored else []
            assert file.select(key_hash, begin, end, most, below) == expected


def test_full_file_matches_vector() -> None:
    """N = 10 slots, M = 4: three entries fit; the times in the header need not ascend."""
    file = File(10, 4)
    keys = [index_key_hash_of("T", key) for key in ("k1", "k1", "k2")]
    entries = list(zip(keys, (100, 200, 300), (T0, T0 + 5_999, T0 + 4_000), strict=True))
    assert file.put(entries) == 3
    expected = (
        "0000018bcfe56800 0000018bcfe577a0 0000000000000064 000000000000012c 00000002 00000004"
        "00000000 00000000 00000000 00000000 00000000 00000002 00000003 00000000 00000000 00000000"
        "0000000000000000000000000000000000000000"
        "0026bfb5 0000000000000064 00000000 00000000"
        "0026bfb5 00000000000000c8 00000005 00000001"
        "0026bfb6 000000000000012c 00000004 00000000"
    )
    assert file.view.tobytes() == bytes.fromhex(expected)
    assert file.put([(1, 400, T0)]) == 0


def test_file_with_100_slots_and_400_items_takes_399_keys() -> None:
    file = File(100, 400)
    entries = [(index_key_hash_of("", str(number)), number, T0) for number in range(400)]
    assert file.put(entries) == 399
    assert file.select(index_key_hash_of("", "60")) == [60]


def test_long_chain_is_walked_newest_first_up_to_limit() -> None:
    file = File(3, 1000)
    file.put([(5, number, T0 + 1000 * number) for number in range(900)])
    assert file.select(5, most=10) == list(range(899, 889, -1))
    for walk_max in (1, 3, 9, 10, 11):
        assert file.select(5, most=10, walk_max=walk_max) == list(range(899, 889, -1))
    assert file.select(5, T0 + 100_000, T0 + 102_999, 10) == [102, 101, 100]
    assert file.select(8) == []


@pytest.mark.parametrize("slots", [1, 2, 3, 100, 4_999_999, 5_000_000, 2**22, 2**31 - 1])
def test_slot_is_hash_modulo_slots(slots: int) -> None:
    """Modulo without division, at quotients that would be off by one."""
    largest = 2**31 - 1
    whole = [number * slots for number in (0, 1, 2, largest // slots // 2, largest // slots)]
    hashes = {min(max(about + off, 0), largest) for about in (*whole, largest) for off in (-1, 0, 1)}
    hashes |= set(np.random.default_rng(slots).integers(0, 2**31, 2000).tolist())
    for slot_by in (kernels.slot_by, plain(kernels.slot_by)):
        for key_hash in hashes:
            expected = layout.HEADER_SIZE + layout.SLOT_SIZE * (key_hash % slots)
            assert slot_by(key_hash, slots, (1 << 32) // slots) == expected, key_hash


def test_empty_file_returns_nothing_for_any_slots() -> None:
    file = File(1, 10)
    file.view[layout.HEADER_SIZE :] = 1
    assert file.select(0) == []


def test_cyclic_chain_ends() -> None:
    file = File(1, 10)
    file.put([(0, number, T0) for number in range(5)])
    start = layout.item_offset(1, 2) + layout.ITEM_PREVIOUS
    file.view[start + 3] = 4
    assert file.select(0) == [4, 3, 2, 1]


class Stopped(Exception):
    """Simulates a crash of the writer."""


def stop_at(nth: int) -> Any:
    left = nth

    def observer(array: NDArray[Any], position: int, size: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Stopped

    return observer


def test_crash_of_writer_at_any_store_is_recovered() -> None:
    """Readers find the committed entries only; after a rollback the file grows normally."""
    before = [(number % 4, number, T0 + 1000 * number) for number in range(6)]
    after = [(number % 3, 100 + number, T0 + 1000 * number) for number in range(7)]
    whole = File(3, 20, twin=True)
    whole.put(before)
    whole.put(after)
    committed = File(3, 20)
    committed.put(before)
    answers = {key_hash: committed.select(key_hash) for key_hash in range(5)}
    header = committed.header()
    stores = 0
    while True:
        file = File(3, 20, twin=True)
        file.put(before)
        try:
            with observe_stores(stop_at(stores)):
                file.put(after)
            break
        except Stopped:
            stores += 1
        assert file.count == len(before) + 1 or file.view.tobytes() == whole.view.tobytes()
        if file.count == header[5]:
            assert {key_hash: file.select(key_hash) for key_hash in range(5)} == answers
        for twin in (False, True):
            again = File(3, 20, twin)
            again.view[:] = file.view
            again.view[: layout.HEADER_SIZE] = committed.view[: layout.HEADER_SIZE]
            roll_back = plain(kernels.roll_back) if twin else kernels.roll_back
            roll_back(again.view, 3, header[5])
            assert [again.slot(number) for number in range(3)] == [committed.slot(number) for number in range(3)]
            again.put(after)
            assert again.view.tobytes() == whole.view.tobytes()
    # Four stores per item, one per slot, and four of the header.
    assert stores == 5 * len(after) + 4


@settings(max_examples=100 if COMPILED else 30, deadline=None)
@given(st.lists(st.tuples(HASHES, st.integers(0, 1000), TIMES), max_size=30), st.integers(0, 1100), st.data())
def test_slots_are_rebuilt_from_items(entries: list[Entry], mark: int, data: st.DataObject) -> None:
    """After a power loss, items above the mark may be garbage."""
    entries = sorted(entries, key=lambda entry: entry[1])
    kept = [entry for entry in entries if entry[1] < mark]
    model = Model(4, 40)
    for entry in kept:
        model.put(*entry)
    whole = File(4, 40)
    whole.put(entries)
    noise = np.frombuffer(data.draw(st.binary(min_size=16, max_size=16)), np.uint8)
    for twin in (False, True):
        file = File(4, 40)
        file.view[:] = whole.view
        file.view[layout.HEADER_SIZE : layout.HEADER_SIZE + 16] = noise
        recount_items, replay, store_slots = (
            plain(kernel) if twin else kernel
            for kernel in (index_rebuild.recount_items, index_rebuild.rebuild_links, index_rebuild.store_slots)
        )
        wrong = data.draw(st.integers(0, len(kept)))
        if wrong:
            at = layout.item_offset(4, wrong) + layout.ITEM_PREVIOUS
            file.view[at : at + 4] = noise[:4]
        links = [file.item(number)[-4:] for number in range(1, len(kept) + 1)]
        fits = links == [model.items[number][3].to_bytes(4, "big") for number in range(1, len(kept) + 1)]
        before = file.view.tobytes()
        wanted = np.zeros(16, np.uint8)
        stock = np.zeros(index_rebuild.STOCK_SIZE, np.int64)
        recount_items(file.view, 4, 0, mark, whole.count, wanted, stock)
        slots = b"".join(item.to_bytes(4, "big") for item in model.slots)
        assert (stock.tolist(), wanted.tobytes()) == ([len(kept) + 1, model.used, fits], slots)
        assert file.view.tobytes() == before
        wanted[:] = 0
        replay(file.view, 4, len(kept) + 1, wanted)
        assert wanted.tobytes() == slots
        store_slots(file.view, 4, wanted)
        recount_items(file.view, 4, 0, mark, whole.count, np.zeros(16, np.uint8), stock)
        assert stock.tolist() == [len(kept) + 1, model.used, 1]
        assert [file.slot(number) for number in range(4)] == model.slots
        for number in range(1, len(kept) + 1):
            assert file.item(number)[-4:] == model.items[number][3].to_bytes(4, "big")


@pytest.mark.skipif(not COMPILED, reason="plain kernels hold the GIL")
def test_concurrent_readers_find_whole_chains() -> None:
    """A thread puts entries; each lookup must return a whole chain, newest first."""
    file = File(64, 200_000)
    entries = [(1 + number % 97, (1 + number % 97) * (1_000_000 + number), T0) for number in range(199_000)]
    columns = (np.array(column, dtype) for column, dtype in zip(zip(*entries, strict=True), "ill", strict=True))
    hashes, offsets, times = columns

    def write() -> None:
        for first in range(0, len(entries), 500):
            kernels.put_entries(file.view, 64, 200_000, hashes, offsets, times, first, min(first + 500, len(entries)))

    writer = threading.Thread(target=write)
    writer.start()
    looks = 0
    while writer.is_alive() or looks == 0:
        count = file.count
        for key_hash in (1, 50, 97):
            numbers = [offset // key_hash - 1_000_000 for offset in file.select(key_hash, most=100)]
            assert len(numbers) >= min(100, (count - key_hash + 96) // 97)
            assert all(1 + number % 97 == key_hash for number in numbers)
            assert numbers == sorted(numbers, reverse=True)
        looks += 1
    writer.join()


@pytest.mark.skipif(not COMPILED, reason="runs this very file uncompiled")
def test_uncompiled_passes_all_tests() -> None:
    """Run all tests of this file as plain Python."""
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout[-3000:]
