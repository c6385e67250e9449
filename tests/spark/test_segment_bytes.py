"""Segments on remote storage and in archives: no byte is fetched or unpacked twice."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from mqproc.spark import record_reader, segment_bytes
from mqproc.spark.batches import read_partition
from mqproc.spark.partitions import LogPartition
from mqproc.spark.segment_bytes import open_segment
from tests.spark.support import offsets_of, options_of, partitions_of, rows_of
from tests.support.store_builders import SEGMENT

NAMES = ["physical_offset", "body"]


@pytest.fixture
def url(rolled_store: Path) -> str:
    """URL of the store on remote storage."""
    files = fsspec.filesystem("memory")
    for file in segments_of(rolled_store):
        files.pipe_file(f"/once/store/commitlog/{file.name}", file.read_bytes())
    return "memory://once/store"


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes per fetch. Parts may end inside a record, which is then part of the next fetch."""
    sizes: list[int] = []
    cat_file = MemoryFileSystem.cat_file

    def counted(self: MemoryFileSystem, path: str, start: int, end: int) -> bytes:
        sizes.append(end - start)
        return bytes(cat_file(self, path, start=start, end=end))

    monkeypatch.setattr(MemoryFileSystem, "cat_file", counted)
    monkeypatch.setattr(segment_bytes, "AHEAD_BYTES", 30)
    return sizes


def segments_of(store: Path) -> list[Path]:
    return sorted(each for each in (store / "commitlog").iterdir() if each.name.isdigit())


@pytest.mark.parametrize("part", [20_000, 400, 50])
def test_small_batches_fetch_nothing_twice(
    rolled_store: Path, url: str, fetched: list[int], monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    monkeypatch.setattr(record_reader, "_PART_BYTES", part)
    assert rows_of(url, NAMES, batchBytes=1000) == rows_of(rolled_store, NAMES)
    # The plan reads the start of the last segment; the read checks for data after the last record.
    assert sum(fetched) < (len(segments_of(rolled_store)) + 3) * SEGMENT


@pytest.mark.parametrize("count", [40, 41, 42, 60, 80])
def test_bytes_after_range_are_not_fetched(
    rolled_store: Path, url: str, fetched: list[int], monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Several tasks read one segment; bytes after the range belong to the next task."""
    monkeypatch.setattr(record_reader, "_PART_BYTES", 5000)
    offsets = offsets_of(rolled_store)
    whole = partitions_of(url)[0]
    ((store, of),) = whole.ranges[:1]
    part = LogPartition(whole.stores, [(store, replace(of, stop=offsets[count], exact_stop=True))])
    fetched.clear()
    batches = read_partition(options_of(url), ["physical_offset"], part)
    assert [offset for batch in batches for offset in batch["physical_offset"].to_pylist()] == offsets[:count]
    assert offsets[count] <= sum(fetched) < offsets[count] + 1000


def test_archive_is_unpacked_sequentially(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytes(range(256)) * 4096
    with zipfile.ZipFile(tmp_path / "one.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"commitlog/{0:020d}", data)
    unpacked = 0
    read = zipfile.ZipExtFile._read1  # type: ignore[attr-defined]

    def counted(self: zipfile.ZipExtFile, size: int) -> bytes:
        nonlocal unpacked
        got: bytes = read(self, size)
        unpacked += len(got)
        return got

    monkeypatch.setattr(zipfile.ZipExtFile, "_read1", counted)
    monkeypatch.setattr(segment_bytes, "AHEAD_BYTES", 1000)
    segment = open_segment(f"zip://::{tmp_path}/one.zip", 0, len(data), len(data))
    for start in range(0, len(data), 10_000):
        view, first = segment.part(start, start + 10_000)
        assert view[start - first :][:10_000].tobytes() == data[start : start + 10_000]
    assert unpacked == len(data)
    view, first = segment.part(5, 10)
    assert view[5 - first : 10 - first].tobytes() == data[5:10]
    segment.close()


def test_archive_segment_is_read_by_one_task(rolled_store: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "one.zip", "w") as archive:
        for file in (rolled_store / "commitlog").iterdir():
            archive.write(file, f"commitlog/{file.name}")
    url = f"zip://::{tmp_path}/one.zip"
    for given in ({"splitBytes": 20_000}, {"minPartitions": 100}):
        parts = partitions_of(url, **given)
        assert [len(part.ranges) for part in parts] == [1] * len(list((rolled_store / "commitlog").iterdir()))
        assert offsets_of(url, **given) == offsets_of(rolled_store)
    middle = rows_of(rolled_store, ["store_timestamp"])[300]["store_timestamp"]
    since = {"startingTimestamp": int(middle.timestamp() * 1000), "clockStepMs": 0}
    assert offsets_of(url, **since) == offsets_of(rolled_store, **since)
    assert len(partitions_of(url, splitBytes=SEGMENT, **since)) < len(parts)
