"""Slots and items of existing index files are derived from their entries."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mqproc.io.store_io import StoreIO
from mqproc.layout import index_file
from mqproc.store.index.files import IndexFiles, adopted_index_shape
from tests.golden.fixtures import load_fixture

DEFAULTS = (5_000_000, 20_000_000)


def fill(folder: Path, slots: int, items: int, count: int, first_offset: int = 5000) -> None:
    index = IndexFiles(StoreIO(), folder, slots, items)
    hashes = np.arange(count, dtype=np.int32) * 7919
    offsets = first_offset + np.arange(count, dtype=np.int64) * 131
    index.put(hashes, offsets, np.full(count, 1_700_000_000_000, np.int64), count)
    index.close()


@pytest.mark.parametrize(("slots", "items"), [(200, 800), (50, 400), (7, 1000), (1000, 30), (333, 334), (1, 2000)])
def test_adopted_shape_is_derived_from_entries(tmp_path: Path, slots: int, items: int) -> None:
    fill(tmp_path, slots, items, items // 2)
    assert adopted_index_shape(StoreIO(), tmp_path, *DEFAULTS) == (slots, items)
    assert adopted_index_shape(StoreIO(), tmp_path, slots, items) == (slots, items)


def test_adopted_shape_prefers_options_that_fit_the_length(tmp_path: Path) -> None:
    """A file with 20 more slots and 4 fewer items has the same length."""
    fill(tmp_path, 200, 800, 100)
    size = index_file.file_size(200, 800)
    assert index_file.file_size(220, 796) == size
    assert adopted_index_shape(StoreIO(), tmp_path, 220, 796) == (220, 796)


def test_adopted_shape_without_entries_assumes_the_usual_ratio(tmp_path: Path) -> None:
    (tmp_path / "20260101000000000").write_bytes(bytes(index_file.file_size(300, 1200)))
    assert adopted_index_shape(StoreIO(), tmp_path, *DEFAULTS) == (300, 1200)


def test_adopted_shape_without_evidence_returns_options(tmp_path: Path) -> None:
    assert adopted_index_shape(StoreIO(), tmp_path / "gone", *DEFAULTS) == DEFAULTS
    (tmp_path / "20260101000000000").write_bytes(b"12345")
    (tmp_path / "notes.txt").write_bytes(b"x" * 100)
    assert adopted_index_shape(StoreIO(), tmp_path, *DEFAULTS) == DEFAULTS


def test_adopted_shape_of_rocketmq_files(tmp_path: Path) -> None:
    store = load_fixture("a_basic", tmp_path).store
    assert adopted_index_shape(StoreIO(), store / "index", *DEFAULTS) == (200, 800)


@pytest.mark.parametrize(("slots", "items"), [(200, 1642), (50, 400), (1000, 30)])
def test_adopted_shape_records_with_two_keys_at_log_start(tmp_path: Path, slots: int, items: int) -> None:
    """With five slots fewer, item 0 and the second to last item match the header too."""
    index = IndexFiles(StoreIO(), tmp_path, slots, items)
    count = items // 4 * 2
    hashes = np.arange(count, dtype=np.int32) * 7919
    offsets = np.arange(count, dtype=np.int64) // 2 * 131
    index.put(hashes, offsets, np.full(count, 1_700_000_000_000, np.int64), count)
    index.close()
    assert adopted_index_shape(StoreIO(), tmp_path, *DEFAULTS) == (slots, items)


def test_adopted_shape_of_two_lengths_prefers_the_usual(tmp_path: Path) -> None:
    store = load_fixture("f_batch", tmp_path).store
    first, second = sorted((store / "index").iterdir())
    for file in (first, second):
        data = file.read_bytes()
        file.write_bytes(data + bytes(len(data)))
        assert adopted_index_shape(StoreIO(), store / "index", *DEFAULTS) == (200, 800)
        file.write_bytes(data)


@pytest.mark.parametrize("seed", range(40))
def test_adopted_shape_ignores_coincidental_items(tmp_path: Path, seed: int) -> None:
    """Other slot counts fit by chance in a small file of records with many keys."""
    slots, items, keys = 60, 17, 8
    hashes = np.random.default_rng(seed).integers(0, 1 << 31, items - 1, np.int32)
    index = IndexFiles(StoreIO(), tmp_path, slots, items)
    offsets = np.arange(items - 1, dtype=np.int64) // keys * 131
    index.put(hashes, offsets, np.full(items - 1, 1_700_000_000_000, np.int64), items - 1)
    index.close()
    assert adopted_index_shape(StoreIO(), tmp_path, *DEFAULTS) == (slots, items)
