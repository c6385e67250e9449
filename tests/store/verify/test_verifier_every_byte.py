"""Verify detects and locates a change of any byte of a store, and never fails."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mqproc.layout import index_file, record
from mqproc.layout.consume_queue import UNIT_SIZE
from tests.support.records import check_record
from tests.support.store_builders import ITEMS, SEGMENT, SLOTS, StoppedStore
from tests.support.store_checks import damage_of, flip, overwrite, verify

OPTIONS = {"max_hash_slot_num": SLOTS, "max_index_num": ITEMS}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> StoppedStore:
    store = StoppedStore(tmp_path_factory.mktemp("whole") / "store")
    store.engine.paths.abort.unlink(missing_ok=True)
    return store


@pytest.fixture
def copied(whole: StoppedStore, tmp_path: Path) -> Callable[[], Path]:
    def copy() -> Path:
        target = tmp_path / "copy"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(whole.root, target)
        return target

    return copy


def test_verify_intact_store_is_clean(whole: StoppedStore) -> None:
    found = verify(whole.root, **OPTIONS)
    assert damage_of(found) == []
    assert (found.records, found.units, found.log_end) == (whole.numbers, whole.numbers, whole.end)
    assert found.items == whole.numbers


def record_bytes(whole: StoppedStore, rng: random.Random) -> tuple[str, int]:
    """A byte of a record, or of a BLANK's magic."""
    start = rng.choice(whole.offsets)
    segment = whole.segment(start)
    size = check_record(segment.read_bytes(), start % SEGMENT).size
    return f"commitlog/{segment.name}", start % SEGMENT + rng.randrange(size)


def unit_bytes(whole: StoppedStore, rng: random.Random) -> tuple[str, int]:
    """A byte of a unit."""
    files = [path for path in sorted((whole.root / "consumequeue").rglob("0*")) if path.is_file()]
    path = rng.choice(files)
    used = len(path.read_bytes().rstrip(b"\0"))
    return str(path.relative_to(whole.root)), rng.randrange(-(-used // UNIT_SIZE) * UNIT_SIZE)


def index_bytes(whole: StoppedStore, rng: random.Random) -> tuple[str, int]:
    """A byte of an index header, of a slot, or of an item."""
    path = rng.choice(whole.index_files())
    data = path.read_bytes()
    count = int.from_bytes(data[index_file.ITEM_COUNT : index_file.HEADER_SIZE], "big")
    first = index_file.item_offset(SLOTS, index_file.FIRST_ITEM)
    end = index_file.item_offset(SLOTS, count)
    place = rng.choice((rng.randrange(index_file.items_start(SLOTS)), rng.randrange(first, end)))
    return f"index/{path.name}", place


@pytest.mark.parametrize("choose", [record_bytes, unit_bytes, index_bytes], ids=lambda choose: choose.__name__)
def test_verify_finds_flipped_bit_in_its_file(
    whole: StoppedStore, choose: Callable[[StoppedStore, random.Random], tuple[str, int]]
) -> None:
    rng = random.Random(2024)
    for _ in range(60):
        file, offset = choose(whole, rng)
        bits = 1 << rng.randrange(8)
        flip(whole.root / file, offset, bits)
        try:
            found = verify(whole.root, **OPTIONS)
            damage = damage_of(found)
            assert any(row.file == file for row in damage), (file, offset, bits, damage)
            near = [row.offset for row in damage if row.file == file and row.offset is not None]
            assert near, (file, offset, bits, damage)
        finally:
            flip(whole.root / file, offset, bits)
    assert damage_of(verify(whole.root, **OPTIONS)) == []


def test_verify_finds_truncated_file(whole: StoppedStore, copied: Callable[[], Path]) -> None:
    rng = random.Random(7)
    files = [path for path in sorted(whole.root.rglob("*")) if path.is_file() and path.name.isdigit()]
    for _ in range(25):
        chosen = rng.choice(files).relative_to(whole.root)
        root = copied()
        size = (root / chosen).stat().st_size
        with (root / chosen).open("r+b") as file:
            file.truncate(rng.randrange(size))
        assert any(row.file == str(chosen) for row in damage_of(verify(root, **OPTIONS))), chosen


def test_verify_random_bytes_never_raises(whole: StoppedStore, copied: Callable[[], Path]) -> None:
    rng = random.Random(99)
    files = [path.relative_to(whole.root) for path in sorted(whole.root.rglob("*")) if path.is_file()]
    for _ in range(40):
        root = copied()
        for _change in range(rng.randrange(1, 5)):
            path = root / rng.choice(files)
            size = path.stat().st_size
            length = rng.choice((1, 8, 20, 400, 5000))
            overwrite(path, rng.randrange(max(1, size)), rng.randbytes(length))
        verify(root, **OPTIONS)


def test_verify_blank_with_wrong_size_is_found(whole: StoppedStore, copied: Callable[[], Path]) -> None:
    root = copied()
    segment = root / "commitlog" / f"{0:020d}"
    data = segment.read_bytes()
    at = 0
    while (check := check_record(data, at)).size:
        at += check.size
    assert check.success
    assert int.from_bytes(data[at : at + 4], "big") == SEGMENT - at
    flip(segment, at + record.TOTAL_SIZE + 3)
    assert [(row.kind, row.offset) for row in damage_of(verify(root, **OPTIONS))] == [("blank_size", at)]
