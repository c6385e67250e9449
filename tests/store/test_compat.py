"""Recovery after RocketMQ has used the store: its cuts and appends are kept.

These tests simulate RocketMQ: it rewrites `lock`, stores the last valid record in the checkpoint, appends over invalid
records, and keeps the bytes after its own. `tests/interop` has tests with RocketMQ itself.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mqproc.io.store_io import StoreIO
from mqproc.layout import checkpoint, queue_table
from mqproc.layout import control as words_of
from mqproc.paths import StorePaths
from mqproc.store import compat
from mqproc.store.commitlog.append import CommitLogAppender
from tests.support.store_builders import FIRST_MS, PER_FRAME, STORE_HOST, StoppedStore, assert_whole, write_at
from tests.support.store_checks import RecordingIO, contents

LATER_MS = FIRST_MS + 1_000_000


@pytest.fixture
def store(tmp_path: Path) -> StoppedStore:
    """Build a store with a lock file, stopped cleanly."""
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "lock").write_bytes(b"lock")
    return StoppedStore(tmp_path / "store")


def open_by_rocketmq(store: StoppedStore, last_valid: int) -> None:
    """Simulate a start of RocketMQ: a new lock file, and a checkpoint."""
    lock = store.root / "lock"
    lock.write_bytes(b"lock")
    os.utime(lock, ns=(1, lock.stat().st_mtime_ns + 1))
    write_at(store.root / "checkpoint", checkpoint.CONFIRM_PHYSICAL_OFFSET, last_valid.to_bytes(8, "big"))


def cut_and_append(store: StoppedStore, victim: int, bodies: list[bytes]) -> None:
    """Simulate RocketMQ cutting the log at a message and appending others there."""
    engine = store.engine
    for number in range(victim, store.numbers):
        offset = store.offsets[number]
        queue_offset = int.from_bytes(engine.log_bytes(offset + 20, offset + 28), "big")
        topic = ("First", "Second", "Third")[number // PER_FRAME % 3]
        queue = engine.table.find(topic, int.from_bytes(engine.log_bytes(offset + 12, offset + 16), "big"))
        if engine.table.next_offset(queue) > queue_offset:
            engine.table.store(queue, queue_table.NEXT_OFFSET, queue_offset)
    position = store.offsets[victim]
    for word in (words_of.WRITTEN, words_of.RESERVED_END, words_of.TABLE_AT):
        engine.words[word] = position
    engine.appender = CommitLogAppender(
        engine.io,
        engine.options,
        engine.words,
        engine.table,
        engine.segments,
        STORE_HOST,
        engine.make_segment,
    )
    keys = [f"n{victim + number}" for number in range(len(bodies))]
    topic = ("First", "Second", "Third")[victim // PER_FRAME % 3]
    del store.offsets[victim:]
    store.offsets += engine.append(topic, bodies, LATER_MS, keys=keys, queues=4).tolist()
    store.numbers = victim + len(bodies)


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
@pytest.mark.parametrize("size", [200, 333], ids=["equal sizes", "other sizes"])
def test_recovery_records_cut_by_rocketmq_stay_cut(size: int, clean: bool, store: StoppedStore) -> None:
    """RocketMQ's records end at the start of an older record, or inside one."""
    victim = 500
    old_end = store.end
    open_by_rocketmq(store, store.offsets[victim - 1])
    cut_and_append(store, victim, [b"x" * size] * 5)
    found = store.recover(clean=clean)
    assert found.end == store.end < old_end
    assert found.holes == []
    assert "another program opened the store" in found.said_of("log")
    assert_whole(store, found)


def test_recovery_hole_cut_by_rocketmq_is_forgotten(store: StoppedStore) -> None:
    victim = 500
    store.overwrite(store.offsets[victim] + 100, b"\xff")
    for name in ("commitlog", "consumequeue", "index"):
        (store.root / "mqproc" / "marks" / name).unlink()
    assert len(store.recover().holes) == 1
    open_by_rocketmq(store, store.offsets[victim - 1])
    cut_and_append(store, victim, [b"short"] * 3)
    found = store.recover()
    assert (found.end, found.holes) == (store.end, [])
    assert_whole(store, found)


def test_recovery_scans_appends_of_rocketmq_from_the_mark(store: StoppedStore) -> None:
    last = store.offsets[-1]
    open_by_rocketmq(store, last)
    for _ in range(3):
        store.put()
    found = store.recover()
    assert f"{3 * PER_FRAME} records from the durable mark" in found.said_of("log")
    assert_whole(store, found)
    io = RecordingIO()
    assert "another program" not in store.recover(io=io).said_of("log")
    assert io.lasting_calls == []


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "killed"])
def test_recovery_keeps_appends_of_rocketmq_4(closed: bool, tmp_path: Path) -> None:
    """RocketMQ 4 has no record CRC; if it is killed it stores no time."""
    (tmp_path / "lock").write_bytes(b"lock")
    store = StoppedStore(tmp_path, enabled_append_prop_crc=False)
    store.recover(enabled_append_prop_crc=True)
    os.utime(tmp_path / "lock", ns=(1, 1))
    for _ in range(3):
        store.put()
    if closed:
        write_at(tmp_path / "checkpoint", checkpoint.PHYSIC_TIMESTAMP, LATER_MS.to_bytes(8, "big"))
    found = store.recover(clean=closed, enabled_append_prop_crc=True)
    assert ("another program" in found.said_of("log")) is closed
    store.recover()
    assert_whole(store, found)


def test_recovery_damage_in_appends_of_rocketmq_is_a_hole(store: StoppedStore) -> None:
    """A bad record after the durable mark does not lose the following ones."""
    open_by_rocketmq(store, store.offsets[-1])
    first = store.numbers
    for _ in range(3):
        store.put()
    store.overwrite(store.offsets[first + 20] + 100, b"\xff")
    found = store.recover()
    assert found.end == store.end
    assert [hole[:2] for hole in found.holes] == [(store.offsets[first + 20], store.offsets[first + 21])]
    assert_whole(store, found, lost={first + 20})


def test_recovery_segments_deleted_by_rocketmq_are_not_missing(store: StoppedStore) -> None:
    """RocketMQ may cut whole segments; the log continues at its end."""
    victim = next(n for n, offset in enumerate(store.offsets) if offset > 70_000)
    open_by_rocketmq(store, store.offsets[victim - 1])
    for path in sorted((store.root / "commitlog").iterdir())[2:]:
        path.unlink()
    store.overwrite(store.offsets[victim], bytes(131_072 - store.offsets[victim]))
    end = store.offsets[victim]
    del store.offsets[victim:]
    store.numbers = victim
    found = store.recover()
    assert (found.end, found.holes) == (end, [])
    assert_whole(store, found)


def test_recovery_invalid_checkpoint_scans_the_whole_log(store: StoppedStore) -> None:
    open_by_rocketmq(store, 12345)
    found = store.recover()
    assert "from the beginning 0" in found.said_of("log")
    assert_whole(store, found)


def test_recovery_restored_backup_is_not_taken_for_rocketmq(store: StoppedStore) -> None:
    """Its lock file has another time; damage must not cut the following records."""
    (store.root / "lock").write_bytes(b"lock")
    victim = 30
    store.overwrite(store.offsets[victim] + 100, b"\xff")
    for path in (store.root / "mqproc" / "marks").iterdir():
        if path.name != "commitlog":
            path.unlink()
    found = store.recover()
    assert "another program" not in found.said_of("log")
    assert found.end == store.end


def test_was_opened_elsewhere_compares_the_lock_file(tmp_path: Path) -> None:
    paths = StorePaths(tmp_path)
    paths.own.mkdir()
    assert not compat.was_opened_elsewhere(StoreIO(), paths)
    compat.remember(StoreIO(), paths)
    assert not compat.was_opened_elsewhere(StoreIO(), paths)
    paths.lock.write_bytes(b"lock")
    assert compat.was_opened_elsewhere(StoreIO(), paths)
    compat.remember(StoreIO(), paths)
    before = contents(tmp_path)
    assert not compat.was_opened_elsewhere(StoreIO(), paths)
    compat.remember(StoreIO(), paths)
    assert contents(tmp_path) == before
    paths.opened.write_text("garbage")
    assert not compat.was_opened_elsewhere(StoreIO(), paths)
