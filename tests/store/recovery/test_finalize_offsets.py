"""Recovery lowers committed offsets beyond a queue's end, except for undispatched messages."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest

from mqproc.io.store_io import StoreIO
from mqproc.paths import StorePaths
from mqproc.store.offsets.offset_store import OffsetStore, committed_offsets
from tests.support.fakes import NoRoomForQueues
from tests.support.store_builders import SEGMENT, StoppedStore
from tests.support.store_checks import RecordingIO


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> StoppedStore:
    return StoppedStore(tmp_path_factory.mktemp("whole") / "store")


@pytest.fixture
def store(whole: StoppedStore, tmp_path: Path) -> StoppedStore:
    """A copy with 56 messages in each queue of First, the last one at the log's end."""
    copied = copy.copy(whole)
    copied.root = tmp_path / "store"
    shutil.copytree(whole.root, copied.root)
    return copied


def quiet(_event: str, **_figures: Any) -> None:
    pass


def consume(store: StoppedStore, **offsets: int) -> None:
    """Commit a group's offsets in First's queues, in mqproc's and RocketMQ's file."""
    io = StoreIO()
    progress = OffsetStore(io, StorePaths(store.root), io, quiet)
    for queue, offset in offsets.items():
        progress.set("readers", "First", int(queue[1:]), offset)
    progress.set("readers", "Gone", 0, 1_000_000)
    progress.save(1)
    progress.close()


def progress_of(store: StoppedStore) -> dict[tuple[str, int], int]:
    found = committed_offsets(StoreIO(), StorePaths(store.root))
    return {(at.topic, at.queue_id): at.offset for at in found}


def test_offset_beyond_queue_end_is_lowered_and_reported(store: StoppedStore) -> None:
    consume(store, q0=57, q1=56, q2=9)
    found = store.recover()
    told = [line for line in found.said if "readers" in line]
    assert told == ["recovery: group readers: First queue 0: set back from 57 to its end 56"]
    after = {("First", 0): 56, ("First", 1): 56, ("First", 2): 9, ("Gone", 0): 1_000_000}
    assert progress_of(store) == after
    (store.root / "mqproc" / "progress").unlink()
    assert progress_of(store) == after
    assert ",1:56," in (store.root / "config" / "consumerOffset.json").read_text()
    assert "{0:57," in (store.root / "config" / "consumerOffset.json.bak").read_text()


def test_second_recovery_changes_no_offset(store: StoppedStore) -> None:
    consume(store, q0=57)
    store.recover()
    io = RecordingIO()
    store.recover(io=io)
    assert io.lasting_calls == []


def test_offsets_of_cut_tail_are_lowered(store: StoppedStore) -> None:
    """Otherwise the next messages at these offsets would never be consumed."""
    consume(store, q0=56, q3=56)
    for name in ("commitlog", "consumequeue", "index"):
        (store.root / "mqproc" / "marks" / name).unlink()
    first_lost = next(offset for offset in reversed(store.offsets) if offset % SEGMENT == 0)
    with store.segment(first_lost).open("r+b") as file:
        file.write(bytes(SEGMENT))
    found = store.recover(clean=False)
    assert found.end == first_lost
    ends = {queue: end for (topic, queue), (_begin, end) in found.queues().items() if topic == "First"}
    assert ends[0] < 56
    assert progress_of(store) == {("First", 0): ends[0], ("First", 3): ends[3], ("Gone", 0): 1_000_000}


def test_offsets_of_undispatched_messages_stay(store: StoppedStore) -> None:
    """Queues end early on a full disk and are completed later; committed offsets must stay."""
    consume(store, q0=56, q1=57)
    shutil.rmtree(store.root / "consumequeue" / "First")
    for name in ("consumequeue", "index"):
        (store.root / "mqproc" / "marks" / name).unlink()
    (store.root / "mqproc" / "queues").unlink()
    found = store.recover(clean=False, io=NoRoomForQueues())
    assert found.dispatched < found.end
    assert progress_of(store) == {("First", 0): 56, ("First", 1): 56, ("Gone", 0): 1_000_000}


def test_offsets_after_failed_sync_wait_for_repair(store: StoppedStore) -> None:
    consume(store, q0=57)
    (store.root / "mqproc" / "read_only").write_text("commitlog-flusher: Input/output error\n")
    store.recover()
    assert progress_of(store)["First", 0] == 57


def test_unreadable_offset_file_is_reported(store: StoppedStore) -> None:
    config = store.root / "config"
    config.mkdir(exist_ok=True)
    (config / "consumerOffset.json").write_text("{ not json")
    found = store.recover()
    (told,) = [line for line in found.said if "groups" in line]
    assert "consumerOffset.json" in told
    assert told.endswith("they start without offsets")
