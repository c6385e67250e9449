"""Folders of ConsumeQueues: which queues they are, and how long their files."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqproc.errors import CorruptStoreError
from mqproc.io.store_io import StoreIO
from mqproc.store.consumequeue.files import ConsumeQueueFiles, adopted_file_bytes, filler_units, queues_on_disk

FILE_BYTES = 400


def open_files(root: Path) -> ConsumeQueueFiles:
    return ConsumeQueueFiles(StoreIO(), root / "consumequeue", FILE_BYTES, write=True)


def test_queues_are_found_on_disk_and_strays_named(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    files.write_run("T", 0, 0, filler_units(1))
    files.write_run("%RETRY%g", 12, 0, filler_units(1))
    folder = tmp_path / "consumequeue"
    (folder / "notes.txt").write_text("stray")
    (folder / "T" / "x1").mkdir()
    (folder / "T" / "01").mkdir()
    (folder / "T" / "2147483648").mkdir()
    queues, strays = queues_on_disk(StoreIO(), folder)
    assert queues == [("%RETRY%g", 12), ("T", 0)]
    assert [path.name for path in strays] == ["01", "2147483648", "x1", "notes.txt"]
    assert queues_on_disk(StoreIO(), tmp_path / "none") == ([], [])


def test_a_file_that_a_crash_left_short_tells_no_size(tmp_path: Path) -> None:
    """A queue that begins at offset 7: fillers were written, the length was not set yet."""
    path = tmp_path / "consumequeue" / "T" / "0" / f"{0:020d}"
    path.parent.mkdir(parents=True)
    path.write_bytes(filler_units(7).tobytes())
    assert adopted_file_bytes(StoreIO(), tmp_path / "consumequeue", 400) == 400


def test_another_uniform_file_size_is_adopted(tmp_path: Path) -> None:
    folder = tmp_path / "consumequeue"
    assert adopted_file_bytes(StoreIO(), folder, 6_000_000) == 6_000_000
    files = open_files(tmp_path)
    files.write_run("T", 0, 0, filler_units(50))
    assert adopted_file_bytes(StoreIO(), folder, 6_000_000) == FILE_BYTES
    files.path("T", 1, 0).parent.mkdir()
    files.path("T", 1, 0).write_bytes(b"")
    assert adopted_file_bytes(StoreIO(), folder, 6_000_000) == FILE_BYTES
    files.path("T", 1, 0).write_bytes(bytes(800))
    assert adopted_file_bytes(StoreIO(), folder, FILE_BYTES) == FILE_BYTES
    assert adopted_file_bytes(StoreIO(), folder, 6_000_000) == FILE_BYTES
    with pytest.raises(CorruptStoreError, match="expected 400"):
        files.write_run("T", 1, 0, filler_units(1))
