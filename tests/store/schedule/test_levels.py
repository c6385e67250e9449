"""A damaged `delayOffset.json`."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqproc.errors import CorruptStoreError
from mqproc.io.store_io import StoreIO
from mqproc.paths import StorePaths
from mqproc.store import rocketmq_json
from mqproc.store.schedule.levels import DelayOffsets, lower_levels, read_levels

WRONG = [b"[]", b"null", b'{"offsetTable":[]}', b'{"offsetTable":{"one":5}}', b'{"offsetTable":{1:"5"}}', b'{"a":1}']


def damaged(folder: Path, wrong: bytes) -> tuple[StorePaths, Path]:
    """Write an unusable file with a valid copy."""
    paths = StorePaths(folder)
    paths.config.mkdir()
    paths.delay_offsets.write_bytes(wrong)
    copy = paths.delay_offsets.with_name("delayOffset.json.bak")
    copy.write_bytes(b'{"offsetTable":{1:12}}')
    return paths, copy


@pytest.mark.parametrize("wrong", WRONG)
def test_delay_offsets_unusable_file_falls_back_to_copy(tmp_path: Path, wrong: bytes) -> None:
    """The next save must not replace the copy with the unusable file."""
    (paths, copy), io = damaged(tmp_path, wrong), StoreIO()
    found = DelayOffsets.load(io, paths)
    assert found.offsets == read_levels(io, paths) == {1: 12}
    assert found.remark.startswith("delayOffset.json: ")
    found.save(io, io, paths, 1)
    assert rocketmq_json.load(io, copy) == ({"offsetTable": {"1": 12}}, "")
    assert DelayOffsets.load(io, paths).remark == ""
    found.save(io, io, paths, 2)
    assert rocketmq_json.load(io, copy)[0]["dataVersion"]["timestamp"] == 1


def test_delay_offsets_lower_levels_of_the_copy(tmp_path: Path) -> None:
    (paths, copy), io = damaged(tmp_path, WRONG[0]), StoreIO()
    before = copy.read_bytes()
    assert lower_levels(io, paths, {1: 12}.get) == {}
    assert lower_levels(io, paths, {1: 7}.get) == {1: 7}
    assert (read_levels(io, paths), copy.read_bytes()) == ({1: 7}, before)


@pytest.mark.parametrize("wrong", WRONG)
def test_delay_offsets_unusable_without_copy_raises(tmp_path: Path, wrong: bytes) -> None:
    paths, copy = damaged(tmp_path, wrong)
    copy.unlink()
    with pytest.raises(CorruptStoreError, match="delayOffset"):
        read_levels(StoreIO(), paths)
