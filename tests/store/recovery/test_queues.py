"""The queue type of a topic: conflicts of attribute and folder, batch queues, RocksDB."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mqproc.config.options import Options
from mqproc.errors import ConfigurationError, CorruptStoreError, StartError
from mqproc.io.store_io import StoreIO
from mqproc.paths import StorePaths
from mqproc.store.recovery.queues import check_queue_types
from mqproc.store.recovery.repair import run_recovery
from tests.roles.rigs import Rig
from tests.support.store_builders import StoppedStore
from tests.support.store_checks import contents, damage_of, notes_of, verify


def make_topics(root: Path, kinds: dict[str, str]) -> None:
    """Write topics.json with a topic for each queue type; '' = no attribute."""
    table = {topic: {"attributes": {"queue.type": kind} if kind else {}} for topic, kind in kinds.items()}
    path = StorePaths(root).topics
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"topicConfigTable": table}))


def make_store(root: Path, kinds: dict[str, str], queues: list[str]) -> StorePaths:
    """A store with these topics and queue folders."""
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
def test_folder_of_other_queue_type_is_refused(tmp_path: Path, kinds: dict[str, str], queue: str, text: str) -> None:
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
def test_store_without_batch_queues_passes(tmp_path: Path, kinds: dict[str, str], queues: list[str]) -> None:
    check_queue_types(StoreIO(), make_store(tmp_path, kinds, queues))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"topicConfigTable": 5}', '{"topicConfigTable": {"T": 5}}'])
def test_unreadable_topics_file_has_no_queue_types(tmp_path: Path, text: str) -> None:
    paths = make_store(tmp_path, {}, ["consumequeue/T/0"])
    paths.topics.write_text(text)
    check_queue_types(StoreIO(), paths)


@pytest.mark.parametrize("kinds", [{"T": "BatchCQ"}, {"B": "BatchCQ"}])
def test_recovery_with_batch_queues_leaves_store_unchanged(tmp_path: Path, kinds: dict[str, str]) -> None:
    """Otherwise its records would get units where RocketMQ does not accept them."""
    Rig(tmp_path).dispatch(10)
    make_topics(tmp_path, kinds)
    before = contents(tmp_path)
    with pytest.raises((CorruptStoreError, StartError)):
        run_recovery(StoreIO(), StorePaths(tmp_path), Options())
    assert contents(tmp_path) == before


def test_rocksdb_queues_are_refused_store_unchanged(tmp_path: Path) -> None:
    """`storeType = defaultRocksDB`: records have no units; the groups' offsets are in RocksDB."""
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
    found = verify(tmp_path)
    assert not damage_of(found)
    assert ("not_checked", "consumequeue") in [row[:2] for row in notes_of(found)]
    assert found.records == 10


@pytest.mark.parametrize("name", ["rdb", "consumerOffsets"])
def test_rocksdb_offsets_are_refused_store_unchanged(tmp_path: Path, name: str) -> None:
    """`configManagerVersion = v2`: groups would start over, or at old JSON offsets."""
    Rig(tmp_path).dispatch(10)
    paths = StorePaths(tmp_path)
    folder = paths.config / name
    folder.mkdir(parents=True)
    (folder / "CURRENT").write_text("MANIFEST-000005")
    before = contents(tmp_path)
    with pytest.raises(StartError, match="RocksDB has the topics and the progress of groups"):
        run_recovery(StoreIO(), paths, Options())
    assert contents(tmp_path) == before
    found = verify(tmp_path)
    assert not damage_of(found)
    assert ("not_checked", f"config/{name}") in [row[:2] for row in notes_of(found)]


def test_config_folders_without_rocksdb_pass(tmp_path: Path) -> None:
    paths = make_store(tmp_path, {}, ["consumequeue/T/0"])
    (paths.config / "rdb").mkdir()
    (paths.config / "CURRENT").touch()
    check_queue_types(StoreIO(), paths)


def test_rocksdb_folder_next_to_topics_passes(tmp_path: Path) -> None:
    """It may be a second copy (`rocksdbCQDoubleWriteEnable`) or an old one."""
    paths = make_store(tmp_path, {}, ["consumequeue/T/0"])
    (paths.consume_queue / "CURRENT").touch()
    check_queue_types(StoreIO(), paths)


# Queues of topics.json that exceed the queue table


@pytest.fixture
def store(tmp_path: Path) -> StoppedStore:
    return StoppedStore(tmp_path / "store")


def ask_for(store: StoppedStore, queues: int) -> Path:
    """Write a topics.json in which a topic without messages has this many queues."""
    path = store.engine.paths.topics
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"topicConfigTable": {"Wide": {"writeQueueNums": queues}}}))
    return path


def test_topic_with_more_queues_than_max_names_the_number(store: StoppedStore) -> None:
    ask_for(store, 2000)
    text = "max_queues = 1,024: the store has 2,012 queues, .*; set max_queues to 2,012 or more"
    with pytest.raises(ConfigurationError, match=text):
        store.recover()


def test_topic_with_impossible_queue_count_is_reported(store: StoppedStore) -> None:
    path = ask_for(store, 1_000_000_000)
    found = store.recover()
    (line,) = [line for line in found.said if "Wide" in line]
    assert line == "recovery: topics: topic 'Wide': 1,000,000,000 queues; a topic has 65,535 at most"
    assert (len(found.queues()), path.exists()) == (12, True)
