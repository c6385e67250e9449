"""What is fetched of a segment that lies elsewhere, and what is unpacked of one in an archive: nothing twice."""

from __future__ import annotations

import zipfile
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from mqproc.spark import reading, segment_bytes
from mqproc.spark.segment_bytes import open_segment
from tests.spark.rows import offsets_of, partitions_of, rows_of
from tests.store.stopped_store import SEGMENT


def test_small_batches_fetch_nothing_twice(rolled_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, fetched = fsspec.filesystem("memory"), 0
    segments = sorted(each for each in (rolled_store / "commitlog").iterdir() if each.name.isdigit())
    for file in segments:
        files.pipe_file(f"/once/store/commitlog/{file.name}", file.read_bytes())
    cat_file = MemoryFileSystem.cat_file

    def counted(self: MemoryFileSystem, path: str, start: int, end: int) -> bytes:
        nonlocal fetched
        fetched += end - start
        return bytes(cat_file(self, path, start=start, end=end))

    monkeypatch.setattr(MemoryFileSystem, "cat_file", counted)
    # Parts end amid records, which then come with the next one.
    monkeypatch.setattr(segment_bytes, "AHEAD_BYTES", 30)
    for part in (20_000, 400, 50):
        monkeypatch.setattr(reading, "_PART_BYTES", part)
        fetched = 0
        assert rows_of("memory://once/store", ["physical_offset", "body"], batchBytes=1000) == rows_of(
            rolled_store, ["physical_offset", "body"]
        )
        # The plan looks at the last segment's begin; behind the last record what follows is looked for.
        assert fetched < (len(segments) + 3) * SEGMENT


def test_what_comes_next_of_an_archive_is_unpacked_from_there_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_segment_in_an_archive_is_of_one_task(rolled_store: Path, tmp_path: Path) -> None:
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
