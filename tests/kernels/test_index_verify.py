"""Verification of index items against entries, links and records, compiled and plain."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mqproc.kernels import index as writing
from mqproc.kernels import index_verify as kernels
from mqproc.kernels.dispatch import TAG_MARK
from mqproc.kernels.jit.compile import plain
from mqproc.kernels.jit.intrinsics import load_be32, store_be32, store_be64
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.layout import index_file as layout
from mqproc.layout import record
from mqproc.layout.index_file import index_key_hash_of
from tests.support.records import encode_record, mutated

T0 = 1_700_000_000_000
SLOTS, ITEMS = 7, 50
BASE = 1 << 33


def both(kernel: Any, *arguments: Any, out: NDArray[Any]) -> list[int]:
    """A kernel's result and its output in `out`; the plain twin must return the same."""
    found = []
    for each in (kernel, plain(kernel)):
        filled = out.copy()
        result = each(*arguments, filled)
        found.append([-1 if result is None else int(result), *filled.tolist()])
    assert found[0] == found[1]
    return found[0]


class File:
    """An index file in memory with 30 entries."""

    def __init__(self, previous_end_ms: int = 0) -> None:
        rng = random.Random(1)
        self.view = as_kernel_array(bytearray(layout.file_size(SLOTS, ITEMS)))
        store_be64(self.view, layout.BEGIN_TIMESTAMP, previous_end_ms)
        self.hashes = np.array([rng.randrange(20) for _ in range(30)], np.int32)
        self.offsets = np.array([1000 + entry // 2 * 90 for entry in range(30)], np.int64)
        self.times = np.array([T0 + 700 * entry for entry in range(30)], np.int64)
        writing.put_entries(self.view, SLOTS, ITEMS, self.hashes, self.offsets, self.times, 0, 30)

    def match(self, *, item: int = 1, stop_item: int = 31, entry: int = 0, stop: int = 30, end_ms: int = -1) -> list:
        return both(
            kernels.match_entries, self.view, SLOTS, item, stop_item, end_ms,
            self.hashes, self.offsets, self.times, entry, stop, out=np.zeros(kernels.MATCH_SIZE, np.int64),
        )  # fmt: skip

    def chains(self, count: int = 31) -> list[int]:
        found = []
        for kernel in (kernels.check_chains, plain(kernels.check_chains)):
            out = np.zeros(kernels.CHAINS_SIZE, np.int64)
            kernel(self.view, SLOTS, count, np.zeros(SLOTS, np.int32), out)
            found.append(out.tolist())
        assert found[0] == found[1]
        return found[0]

    def place(self, item: int, field: int) -> int:
        return layout.item_offset(SLOTS, item) + field


def test_items_match_their_entries() -> None:
    file = File()
    assert file.match() == [kernels.ENTRIES_DONE, 31, 30]
    assert file.match(item=5, entry=4, stop=10) == [kernels.ENTRIES_DONE, 11, 10]
    assert file.match(stop_item=9) == [kernels.ITEMS_DONE, 9, 8]


@pytest.mark.parametrize("missing", [{3}, {0, 1, 2}, {29}, {5, 6, 20, 28, 29}])
def test_marked_entries_need_no_item(missing: set[int]) -> None:
    """Items of a file that some of the marked entries lack match all of them."""
    file = File()
    kept = [entry for entry in range(30) if entry not in missing]
    file.view[:] = 0
    columns = (file.hashes[kept], file.offsets[kept], file.times[kept])
    writing.put_entries(file.view, SLOTS, ITEMS, *columns, 0, len(kept))
    assert file.match(stop_item=len(kept) + 1)[0] != kernels.ENTRIES_DONE
    file.hashes[sorted(missing | {4, 21})] += TAG_MARK
    reason, item, entry = file.match(stop_item=len(kept) + 1)
    # Without further items of this file, the rest may lie in the next one.
    assert (item, entry) == (len(kept) + 1, max(kept) + 1)
    assert reason == (kernels.ENTRIES_DONE if entry == 30 else kernels.ITEMS_DONE)


@pytest.mark.parametrize("field", [layout.ITEM_KEY_HASH, layout.ITEM_PHYSICAL_OFFSET, layout.ITEM_TIME_DIFFERENCE])
def test_changed_field_differs_at_its_item(field: int) -> None:
    file = File()
    file.view[file.place(12, field) + 3] ^= 1
    assert file.match() == [kernels.DIFFERS, 12, 11]


def test_first_item_of_rolled_file_is_relative_to_previous_end() -> None:
    file = File(previous_end_ms=T0 - 5000)
    assert load_be32(file.view, file.place(1, layout.ITEM_TIME_DIFFERENCE)) == 5
    assert file.match(end_ms=T0 - 5000)[0] == kernels.ENTRIES_DONE
    assert file.match(end_ms=-1)[0] == kernels.ENTRIES_DONE
    assert file.match(end_ms=T0 - 9000) == [kernels.DIFFERS, 1, 0]


def test_header_begin_is_time_of_first_record() -> None:
    file = File()
    store_be64(file.view, layout.BEGIN_TIMESTAMP, T0 + 1)
    assert file.match() == [kernels.DIFFERS, 1, 0]


def test_first_item_at_offset() -> None:
    file = File()
    for kernel in (kernels.first_item_at, plain(kernels.first_item_at)):
        assert [kernel(file.view, SLOTS, 31, at) for at in (0, 1000, 1001, 1090, 2260, 2261)] == [1, 1, 3, 3, 29, 31]


def test_chains_unchanged_are_valid() -> None:
    file = File()
    out = file.chains()
    assert out[kernels.SLOTS_USED] == load_be32(file.view, layout.SLOT_COUNT)
    assert out[1:] == [0, -1, 0, -1, 0, -1]


def test_chains_of_growing_file_are_valid_up_to_its_count() -> None:
    """Slots point past the reader's count; their links lead back to counted items."""
    assert File().chains(20)[1:] == [0, -1, 0, -1, 0, -1]


def test_chains_changed_link_slot_or_order_is_reported() -> None:
    file = File()
    store_be32(file.view, file.place(9, layout.ITEM_PREVIOUS), 9)
    assert file.chains()[1:3] == [1, 9]
    file = File()
    store_be32(file.view, layout.HEADER_SIZE + layout.SLOT_SIZE * 3, 2)
    assert file.chains()[3:5] == [1, 3]
    file = File()
    store_be64(file.view, file.place(10, layout.ITEM_PHYSICAL_OFFSET), 5)
    assert file.chains()[5:] == [1, 10]


def test_chains_random_changes_compiled_and_plain_agree() -> None:
    rng = random.Random(4)
    for _ in range(100):
        file = File()
        data = bytearray(mutated(bytes(file.view), rng)).ljust(len(file.view), b"\0")
        file.view = as_kernel_array(data)
        file.chains(rng.randrange(1, ITEMS + 1))
        file.match()


LOG = [
    ("Orders", "KEYS\x01k1 k2  k3\x02UNIQ_KEY\x01U1\x02", 0),
    ("Pay", "TAGS\x01x\x02", 0),
    ("Pay", "KEYS\x01 \x02", record.SYS_FLAG_COMMIT),
    ("Orders", "KEYS\x01k1\x02UNIQ_KEY\x01U2\x02TAGS\x01x\x02", record.SYS_FLAG_ROLLBACK),
    ("Zeit", "KEYS\x01schlüssel 😀\x02", 0),
]


def log_bytes() -> tuple[NDArray[np.uint8], list[int]]:
    """A segment with these records, and their positions."""
    data, places = b"", []
    for topic, properties, sys_flag in LOG:
        places.append(len(data))
        data += encode_record(
            topic=topic, body=b"b", properties=properties, sys_flag=sys_flag, physical_offset=BASE + len(data),
            store_timestamp_ms=T0 + 1000 * len(places), append_crc=len(places) % 2 == 0,
        )  # fmt: skip
    return as_kernel_array(bytearray(data)), places


@pytest.mark.parametrize(
    ("number", "key", "fits"),
    [
        (0, "Orders#k1", True), (0, "Orders#k2", True), (0, "Orders#k3", True), (0, "Orders#U1", True),
        (0, "Orders#k4", False), (0, "Pay#k1", False), (0, "Orders#", False), (1, "Pay#x", False), (2, "Pay# ", False),
        (3, "Orders#k1", False), (3, "Orders#U2", False), (4, "Zeit#schlüssel", True), (4, "Zeit#😀", True),
        (1, "Pay#T#x", True), (1, "Pay#T#", False), (1, "Orders#T#x", False), (3, "Orders#T#x", False),
    ],
)  # fmt: skip
def test_a_record_has_its_keys_id_and_tag(number: int, key: str, fits: bool) -> None:
    log, places = log_bytes()
    for kernel in (kernels.record_has_hash, plain(kernels.record_has_hash)):
        size = load_be32(log, places[number])
        assert kernel(log, places[number], size, index_key_hash_of(*key.split("#", 1))) == fits


@pytest.mark.parametrize(("number", "tag"), [(0, ""), (1, "x"), (2, ""), (3, "")])
def test_tag_hash_of_a_record_is_that_of_its_entry(number: int, tag: str) -> None:
    log, places = log_bytes()
    expected = index_key_hash_of(LOG[number][0], layout.tag_key(tag)) if tag else -1
    for kernel in (kernels.tag_hash_of, plain(kernels.tag_hash_of)):
        assert kernel(log, places[number], load_be32(log, places[number])) == expected


def test_items_are_looked_up_in_the_log() -> None:
    log, places = log_bytes()
    view = as_kernel_array(bytearray(layout.file_size(SLOTS, ITEMS)))
    k1, u1 = index_key_hash_of("Orders", "k1"), index_key_hash_of("Orders", "U1")
    rows = [
        (u1, BASE, T0 + 1000),
        (k1, BASE, T0 + 1000),
        (k1, BASE + 1, T0 + 1000),
        (k1 + 100, BASE, T0 + 1000),
        (k1, BASE, T0 + 3000),
        (index_key_hash_of("Zeit", "😀"), BASE + places[4], T0 + 5000),
        (k1, BASE + len(log) - 3, T0 + 5000),
    ]
    hashes, offsets, times = (np.array(column) for column in zip(*rows, strict=True))
    writing.put_entries(view, SLOTS, ITEMS, hashes.astype(np.int32), offsets, times, 0, len(rows))
    items = np.arange(1, len(rows) + 1, dtype=np.int64)
    faults = both(
        kernels.check_items, view, SLOTS, items, -1, log, BASE,
        out=np.zeros(len(rows), np.uint8),
    )[1:]  # fmt: skip
    assert faults == [
        kernels.ITEM_FITS,
        kernels.ITEM_FITS,
        kernels.NO_RECORD,
        kernels.OTHER_KEY,
        kernels.OTHER_TIME,
        kernels.ITEM_FITS,
        kernels.NO_RECORD,
    ]


def test_each_kernel_is_compiled_once() -> None:
    kernels.warm()
    for kernel in (kernels.match_entries, kernels.first_item_at, kernels.check_chains, kernels.check_items):
        assert len(getattr(kernel, "signatures", [0])) == 1
