"""A topic's kind of queues by its attribute and by the folder they lie in: contradictions and batch queues are told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mqproc.config.options import Options
from mqproc.errors import CorruptStoreError, StartError
from mqproc.io.store_io import StoreIO
from mqproc.paths import StorePaths
from mqproc.store.recovery.queues import check_queue_types
from mqproc.store.recovery.repair import run_recovery
from tests.roles.flusher_rig import Rig
from tests.store.recovery.recovering import contents
from tests.store.verify.looking import damage_of, looked_at, notes_of


def make_topics(root: Path, kinds: dict[str, str]) -> None:
    """Write topics.json with a topic for each kind, '' = no attribute."""
    table = {topic: {"attributes": {"queue.type": kind} if kind else {}} for topic, kind in kinds.items()}
    path = StorePaths(root).topics
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"topicConfigTable": table}))


def make_store(root: Path, kinds: dict[str, str], queues: list[str]) -> StorePaths:
    """A store with these topics and folders of queues."""
    make_topics(root, kinds)
    for queue in queues:
        (root / queue).mkdir(parents=True)
    return StorePaths(root)


@pytest.mark.parametrize(
    ("kinds", "queue", "text"),
    [
        ({"T": "SimpleCQ"}, "batchconsumequeue/T/0", "should be SimpleCQ, but is BatchCQ"),
        ({"T": ""}, "batchconsumequeue/T/0", "should be SimpleCQ, but is BatchCQ"),
        ({}, "batchconsumequeue/T/0", "should be SimpleCQ, but is BatchCQ"),
        ({"T": "BatchCQ"}, "consumequeue/T/0", "should be BatchCQ, but is SimpleCQ"),
    ],
)
def test_a_folder_of_the_other_kind_is_refused(tmp_path: Path, kinds: dict[str, str], queue: str, text: str) -> None:
    paths = make_store(tmp_path, kinds, [queue])
    with pytest.raises(CorruptStoreError) as caught:
        check_queue_types(StoreIO(), paths)
    assert str(caught.value).endswith(text)
    assert str(tmp_path / queue).startswith(str(caught.value).split(":")[0])


def test_batch_queues_are_refused_by_name(tmp_path: Path) -> None:
    paths = make_store(tmp_path, {"A": "", "T": "BatchCQ"}, ["consumequeue/A/0", "batchconsumequeue/T/0"])
    with pytest.raises(StartError, match=r"topic 'T' has queue\.type = BatchCQ"):
        check_queue_types(StoreIO(), paths)


@pytest.mark.parametrize(
    ("kinds", "queues"),
    [
        ({}, []),
        ({"T": "SimpleCQ", "U": ""}, ["consumequeue/T/0", "consumequeue/U/1", "consumequeue/Unnamed/0"]),
        ({"T": ""}, ["consumequeue/T/0", "batchconsumequeue"]),
        ({"T": ""}, ["batchconsumequeue/T"]),
    ],
)
def test_stores_without_batch_queues_pass(tmp_path: Path, kinds: dict[str, str], queues: list[str]) -> None:
    check_queue_types(StoreIO(), make_store(tmp_path, kinds, queues))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"topicConfigTable": 5}', '{"topicConfigTable": {"T": 5}}'])
def test_a_file_of_topics_that_nobody_can_read_names_no_kinds(tmp_path: Path, text: str) -> None:
    paths = make_store(tmp_path, {}, ["consumequeue/T/0"])
    paths.topics.write_text(text)
    check_queue_types(StoreIO(), paths)


@pytest.mark.parametrize("kinds", [{"T": "BatchCQ"}, {"B": "BatchCQ"}])
def test_recovery_changes_nothing_of_a_store_with_batch_queues(tmp_path: Path, kinds: dict[str, str]) -> None:
    """Its records would get units where RocketMQ then refuses to find any."""
    Rig(tmp_path).dispatch(10)
    make_topics(tmp_path, kinds)
    before = contents(tmp_path)
    with pytest.raises((CorruptStoreError, StartError)):
        run_recovery(StoreIO(), StorePaths(tmp_path), Options())
    assert contents(tmp_path) == before


def test_queues_of_rocksdb_are_told_and_left_alone(tmp_path: Path) -> None:
    """`storeType = defaultRocksDB`: its records have no units, and what groups have consumed is in RocksDB too."""
    Rig(tmp_path).dispatch(10)
    paths = StorePaths(tmp_path)
    shutil.rmtree(paths.consume_queue)
    paths.consume_queue.mkdir()
    for name in ("CURRENT", "MANIFEST-000005", "000011.sst"):
        (paths.consume_queue / name).write_text("MANIFEST-000005")
    before = contents(tmp_path)
    with pytest.raises(StartError, match="RocksDB has the queues"):
        run_recovery(StoreIO(), paths, Options())
    assert contents(tmp_path) == before
    found = looked_at(tmp_path)
    assert not damage_of(found)
    assert ("not_checked", "consumequeue") in [row[:2] for row in notes_of(found)]
    assert found.records == 10


@pytest.mark.parametrize("name", ["rdb", "consumerOffsets"])
def test_progress_in_rocksdb_is_told_and_left_alone(tmp_path: Path, name: str) -> None:
    """`configManagerVersion = v2`: groups would begin anew, or where a JSON file of an earlier time has them."""
    Rig(tmp_path).dispatch(10)
    paths = StorePaths(tmp_path)
    folder = paths.config / name
    folder.mkdir(parents=True)
    (folder / "CURRENT").write_text("MANIFEST-000005")
    before = contents(tmp_path)
    with pytest.raises(StartError, match="RocksDB has the topics and the progress of groups"):
        run_recovery(StoreIO(), paths, Options())
    assert contents(tmp_path) == before
    found = looked_at(tmp_path)
    assert not damage_of(found)
    assert ("not_checked", f"config/{name}") in [row[:2] for row in notes_of(found)]


def test_folders_in_config_without_rocksdb_pass(tmp_path: Path) -> None:
    paths = make_store(tmp_path, {}, ["consumequeue/T/0"])
    (paths.config / "rdb").mkdir()
    (paths.config / "CURRENT").touch()
    check_queue_types(StoreIO(), paths)


def test_what_lies_beside_topics_is_no_rocksdb(tmp_path: Path) -> None:
    """It may keep a second copy there, `rocksdbCQDoubleWriteEnable`, or have had the queues once."""
    paths = make_store(tmp_path, {}, ["consumequeue/T/0"])
    (paths.consume_queue / "CURRENT").touch()
    check_queue_types(StoreIO(), paths)
