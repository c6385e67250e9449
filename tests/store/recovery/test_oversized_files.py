"""Files of a store that are far too long, such as holes of 1 TiB: quarantined unread."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
import pytest

from mqproc import StoreReader
from mqproc.io.file_limits import FILE_BYTES_MAX, size_limit
from mqproc.io.store_io import OversizedFileError, StoreIO
from tests.support.command_line import call
from tests.support.group import Group, wait_until
from tests.support.store_builders import FRAME_MESSAGES, NumberedStore
from tests.support.store_checks import flags_of, recover

LENGTH = 1 << 40
SETTINGS = (
    "config/consumerOffset.json",
    "config/deletedTopics.json",
    "config/delayOffset.json",
    "config/subscriptionGroup.json",
    "config/topics.json",
)
"""Quarantined by the roles that read them."""
MAPPED = ("lock", "mqproc/control", "mqproc/errors", "mqproc/progress", "mqproc/queues", "timerwheel")
QUARANTINED = (
    "checkpoint",
    "config/timercheck",
    "mqproc/damage.json",
    "mqproc/marks/commitlog",
    "mqproc/marks/consumequeue",
    "mqproc/marks/index",
    "mqproc/retention.json",
    "mqproc/settings.json",
    "mqproc/topics.journal",
    "mqproc/unconsumed.json",
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
    limit = size_limit(root / name)
    assert limit <= FILE_BYTES_MAX // 4
    assert any(f"{LENGTH:,} bytes, at most {limit:,}" in line and name in line for line in recovered.said)
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
    for name in (
        *QUARANTINED,
        *SETTINGS,
        *MAPPED,
        "abort",
        "mqproc/opened.json",
        "mqproc/log.jsonl",
        f"timerlog/{0:020d}",
    ):
        lengthen(root / name)
    group = Group(root).start()
    try:
        with group.client() as client:
            assert client.count("T") == FRAME_MESSAGES
            client.send("T", b"more", delay_level=1)
            wait_until(lambda: client.count("T") == FRAME_MESSAGES + 1, what="the delayed message is delivered")
        status = call("status", "--store", root)
        assert "consumerOffset.json could not be read" in status.out
        assert "subscriptionGroup.json could not be read" in status.out
    finally:
        group.close()


@pytest.mark.parametrize("name", [*QUARANTINED, *SETTINGS, *MAPPED])
def test_verify_and_repair_of_an_oversized_file(stopped: NumberedStore, tmp_path: Path, name: str) -> None:
    root = tmp_path / "store"
    shutil.copytree(stopped.engine.paths.root, root)
    lengthen(root / name)
    flags = flags_of(stopped.options)
    found = call("store", "verify", root, "--json", *flags).json["findings"]
    if name not in MAPPED and name != "mqproc/settings.json":
        assert any(each["file"] == name and f"{LENGTH:,} bytes" in each["text"] for each in found)
    assert call("store", "repair", root, "--execute", *flags).code == 0
    with StoreReader(root) as reader:
        assert reader.count("T") == FRAME_MESSAGES


@pytest.mark.parametrize("folder", ["commitlog", "consumequeue/T/0"])
def test_recovery_cuts_an_oversized_segment_or_queue_file(stopped: NumberedStore, tmp_path: Path, folder: str) -> None:
    root = tmp_path / "store"
    shutil.copytree(stopped.engine.paths.root, root)
    lengthen(root / folder / f"{0:020d}")
    os.truncate(root / folder / f"{0:020d}", 20 << 36)
    assert recover(root, stopped.options).end == stopped.engine.written
    with StoreReader(root) as reader:
        assert reader.count("T") == FRAME_MESSAGES


def test_read_file_of_oversized_file_names_length_and_limit(tmp_path: Path) -> None:
    lengthen(tmp_path / "file")
    with pytest.raises(OversizedFileError, match=f"{LENGTH:,} bytes, at most {FILE_BYTES_MAX:,}.*move it away.*file"):
        StoreIO().read_file(tmp_path / "file")
    with pytest.raises(msgspec.DecodeError, match=f"{LENGTH:,} bytes"):
        StoreIO().read_json(tmp_path / "file", dict[str, int])
