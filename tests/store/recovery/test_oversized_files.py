"""Files of a store that are far too long, such as holes of 1 TiB: quarantined unread."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
import pytest

from mqproc import StoreReader
from mqproc.io.store_io import FILE_BYTES_MAX, OversizedFileError, StoreIO
from tests.support.group import Group
from tests.support.store_builders import FRAME_MESSAGES, NumberedStore
from tests.support.store_checks import recover

LENGTH = 1 << 40
QUARANTINED = (
    "checkpoint",
    "config/consumerOffset.json",
    "config/delayOffset.json",
    "config/subscriptionGroup.json",
    "config/topics.json",
    "mqproc/damage.json",
    "mqproc/marks/commitlog",
    "mqproc/marks/consumequeue",
    "mqproc/marks/index",
    "mqproc/settings.json",
    "mqproc/topics.journal",
)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> NumberedStore:
    store = NumberedStore(tmp_path_factory.mktemp("stopped") / "store")
    store.put("T", 0)
    store.dispatch()
    store.close()
    recover(store.engine.paths.root, store.options)
    return store


def lengthen(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.touch()
    os.truncate(path, LENGTH)


@pytest.mark.parametrize("name", QUARANTINED)
def test_recovery_quarantines_an_oversized_file(stopped: NumberedStore, tmp_path: Path, name: str) -> None:
    root = tmp_path / "store"
    shutil.copytree(stopped.engine.paths.root, root)
    lengthen(root / name)
    recovered = recover(root, stopped.options)
    assert any(f"{LENGTH:,} bytes, at most {FILE_BYTES_MAX:,}" in line and name in line for line in recovered.said)
    with StoreReader(root) as reader:
        assert reader.count("T") == FRAME_MESSAGES


def test_recovery_rebuilds_an_oversized_index_file(stopped: NumberedStore, tmp_path: Path) -> None:
    root = tmp_path / "store"
    shutil.copytree(stopped.engine.paths.root, root)
    (file,) = (root / "index").iterdir()
    lengthen(file)
    recover(root, stopped.options)
    with StoreReader(root) as reader:
        assert len(reader.by_key("T", "key-3")) == 1


def test_group_starts_with_oversized_files(stopped: NumberedStore, tmp_path: Path) -> None:
    root = tmp_path / "store"
    shutil.copytree(stopped.engine.paths.root, root)
    for name in (*QUARANTINED, "mqproc/opened"):
        lengthen(root / name)
    group = Group(root).start()
    try:
        with group.client() as client:
            assert client.count("T") == FRAME_MESSAGES
    finally:
        group.close()


def test_read_file_of_oversized_file_names_length_and_limit(tmp_path: Path) -> None:
    lengthen(tmp_path / "file")
    with pytest.raises(OversizedFileError, match=f"{LENGTH:,} bytes, at most {FILE_BYTES_MAX:,}.*file"):
        StoreIO().read_file(tmp_path / "file")
    with pytest.raises(msgspec.DecodeError, match=f"{LENGTH:,} bytes"):
        StoreIO().read_json(tmp_path / "file", dict[str, int])
