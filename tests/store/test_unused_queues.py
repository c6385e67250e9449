"""Recovery removes queue files and topics whose records were lost in a power loss."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from mqproc.io.store_io import StoreIO
from mqproc.layout.consume_queue import UNIT_SIZE
from mqproc.store.offsets.offset_store import OffsetStore, committed_offsets
from tests.support.store_builders import SMALL_QUEUE_FILE_BYTES, RecoveredStore, recovered_queue

FAR = 1 << 30
AFTER_THE_END = FAR.to_bytes(8, "big") + (100).to_bytes(4, "big") + bytes(8)
FIRST_FILE = "00000000000000000000"


@pytest.fixture
def store(tmp_path: Path) -> RecoveredStore:
    return RecoveredStore(tmp_path / "store")


def put_file(store: RecoveredStore, topic: str, queue_id: int, data: bytes = bytes(SMALL_QUEUE_FILE_BYTES)) -> Path:
    path = store.paths.consume_queue / topic / str(queue_id) / FIRST_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def lines_of_removal(store: RecoveredStore) -> list[str]:
    return [line for line in store.report if "without a record" in line]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(bytes(SMALL_QUEUE_FILE_BYTES), id="no units"),
        pytest.param(AFTER_THE_END.ljust(SMALL_QUEUE_FILE_BYTES, b"\0"), id="units after the log's end"),
        pytest.param(bytes(60), id="short file"),
        pytest.param(b"", id="empty file"),
    ],
)
def test_recovery_topic_without_records_is_removed(store: RecoveredStore, data: bytes) -> None:
    v = store.append("V", 2)
    store.recover()
    before = store.files()
    put_file(store, "lost", 0, data)
    put_file(store, "lost", 3, data)
    expected = {("V", 0): recovered_queue(0, v[:1]), ("V", 1): recovered_queue(0, v[1:])}
    assert store.recover(clean=False) == expected
    assert lines_of_removal(store) == ["recovery: queues of 1 topic without a record removed: lost"]
    assert not (store.paths.consume_queue / "lost").exists()
    assert store.files() == before
    assert store.recover(clean=False) == expected
    assert not lines_of_removal(store)


def test_recovery_created_topic_without_records_is_kept(store: RecoveredStore) -> None:
    store.topics.add("created", 2)
    store.topics.note("created")
    store.topics.commit()
    put_file(store, "created", 0)
    empty = recovered_queue(0, [])
    assert store.recover(clean=False) == {("created", 0): empty, ("created", 1): empty}
    assert store.files() == {}
    assert not lines_of_removal(store)


def test_recovery_topic_known_by_records_keeps_all_queues(store: RecoveredStore) -> None:
    """As for a store of RocketMQ without topics.json."""
    t = store.engine.append("T", [b"x"] * 3, queues=1).tolist()
    put_file(store, "T", 1)
    expected = {("T", 0): recovered_queue(0, t), ("T", 1): recovered_queue(0, [])}
    assert store.recover(clean=False) == expected
    assert {name.split("/")[1] for name in store.files()} == {"0"}
    assert not lines_of_removal(store)


def test_recovery_expired_queue_keeps_offset_of_file_name(store: RecoveredStore) -> None:
    """Its records have expired, and topics.json does not list it."""
    path = put_file(store, "old", 0)
    path.rename(path.with_name(f"{2 * SMALL_QUEUE_FILE_BYTES:020}"))
    first = 2 * SMALL_QUEUE_FILE_BYTES // UNIT_SIZE
    assert store.recover(clean=False) == {("old", 0): recovered_queue(first, [])}
    assert len(store.files()) == 1


def test_recovery_after_clean_stop_removes_no_queue(store: RecoveredStore) -> None:
    store.append("V", 2)
    store.recover()
    put_file(store, "T", 0)
    before = store.files()
    assert store.recover(clean=True)["T", 0] == recovered_queue(0, [])
    assert store.files() == before


def test_recovery_keeps_foreign_files(store: RecoveredStore) -> None:
    note = put_file(store, "lost", 0).with_name("note.txt")
    note.write_text("foreign")
    assert store.recover(clean=False) == {}
    assert note.read_text() == "foreign"


def test_recovery_resets_committed_offset_of_removed_topic(store: RecoveredStore) -> None:
    io = StoreIO()
    store.append("V", 2)
    store.recover()
    put_file(store, "lost", 0)
    offsets = OffsetStore(io, store.paths, io, ignore_event)
    offsets.set("readers", "lost", 0, 5)
    offsets.save(1)
    offsets.close()
    store.recover(clean=False)
    assert {(at.topic, at.offset) for at in committed_offsets(io, store.paths)} == {("lost", 0)}
    shutil.rmtree(store.paths.consume_queue)
    records = store.append("lost", 2, queues=1)
    assert store.recover(clean=False)["lost", 0] == recovered_queue(0, records)


def ignore_event(event: str, **figures: Any) -> None:
    pass
