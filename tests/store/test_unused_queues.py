"""Files of queues whose records a power loss has taken: they go, and with them a topic that nothing else knows of.

The files are put beside a log of the engine, as the file system may keep them.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from mqproc.io.store_io import StoreIO
from mqproc.layout.consume_queue import UNIT_SIZE
from mqproc.store.offsets.offset_store import OffsetStore, committed_offsets
from tests.store.test_deleted_topics_recovery import QUEUE_FILE_BYTES, Store, queue

FAR = 1 << 30
BEHIND_THE_END = FAR.to_bytes(8, "big") + (100).to_bytes(4, "big") + bytes(8)
FIRST_FILE = "00000000000000000000"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def put_file(store: Store, topic: str, queue_id: int, data: bytes = bytes(QUEUE_FILE_BYTES)) -> Path:
    path = store.paths.consume_queue / topic / str(queue_id) / FIRST_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def lines_of_removal(store: Store) -> list[str]:
    return [line for line in store.report if "without a record" in line]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(bytes(QUEUE_FILE_BYTES), id="no units"),
        pytest.param(BEHIND_THE_END.ljust(QUEUE_FILE_BYTES, b"\0"), id="units behind the log's end"),
        pytest.param(bytes(60), id="a part of its length"),
        pytest.param(b"", id="nothing but its name"),
    ],
)
def test_a_topic_of_which_only_names_of_files_are_left_is_not_there(store: Store, data: bytes) -> None:
    v = store.append("V", 2)
    store.recover()
    before = store.files()
    put_file(store, "gone", 0, data)
    put_file(store, "gone", 3, data)
    expected = {("V", 0): queue(0, v[:1]), ("V", 1): queue(0, v[1:])}
    assert store.recover(clean=False) == expected
    assert lines_of_removal(store) == ["recovery: queues of 1 topic without a record removed: gone"]
    assert not (store.paths.consume_queue / "gone").exists()
    assert store.files() == before
    assert store.recover(clean=False) == expected
    assert not lines_of_removal(store)


def test_a_topic_that_was_made_stays_and_only_its_empty_files_go(store: Store) -> None:
    store.topics.add("made", 2)
    store.topics.note("made")
    store.topics.commit()
    put_file(store, "made", 0)
    assert store.recover(clean=False) == {("made", 0): queue(0, []), ("made", 1): queue(0, [])}
    assert store.files() == {}
    assert not lines_of_removal(store)


def test_a_topic_that_only_its_records_tell_of_keeps_all_its_queues(store: Store) -> None:
    """As with RocketMQ's files when its topics.json is lost."""
    t = store.engine.append("T", [b"x"] * 3, queues=1).tolist()
    put_file(store, "T", 1)
    expected = {("T", 0): queue(0, t), ("T", 1): queue(0, [])}
    assert store.recover(clean=False) == expected
    assert {name.split("/")[1] for name in store.files()} == {"0"}
    assert not lines_of_removal(store)


def test_a_queue_that_goes_on_where_its_files_name_says_stays(store: Store) -> None:
    """Its records have expired, and no topics.json tells of it."""
    path = put_file(store, "old", 0)
    path.rename(path.with_name(f"{2 * QUEUE_FILE_BYTES:020}"))
    first = 2 * QUEUE_FILE_BYTES // UNIT_SIZE
    assert store.recover(clean=False) == {("old", 0): queue(first, [])}
    assert len(store.files()) == 1


def test_of_a_store_that_was_stopped_nothing_goes(store: Store) -> None:
    store.append("V", 2)
    store.recover()
    put_file(store, "T", 0)
    before = store.files()
    assert store.recover(clean=True)["T", 0] == queue(0, [])
    assert store.files() == before


def test_what_is_no_file_of_ours_stays_where_it_lies(store: Store) -> None:
    note = put_file(store, "gone", 0).with_name("note.txt")
    note.write_text("somebody's")
    assert store.recover(clean=False) == {}
    assert note.read_text() == "somebody's"


def test_who_has_consumed_what_is_gone_begins_with_what_comes_then(store: Store) -> None:
    io = StoreIO()
    store.append("V", 2)
    store.recover()
    put_file(store, "gone", 0)
    progress = OffsetStore(io, store.paths, io, _quiet)
    progress.set("readers", "gone", 0, 5)
    progress.save(1)
    progress.close()
    store.recover(clean=False)
    assert {(at.topic, at.offset) for at in committed_offsets(io, store.paths)} == {("gone", 0)}
    shutil.rmtree(store.paths.consume_queue)
    gone = store.append("gone", 2, queues=1)
    assert store.recover(clean=False)["gone", 0] == queue(0, gone)


def _quiet(_event: str, **_figures: Any) -> None:
    pass
