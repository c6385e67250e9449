"""Unreadable queue and index files: a start quarantines and rebuilds them from the log."""

from __future__ import annotations

import datetime
import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from mqproc.io.store_io import FailedSyncError
from mqproc.layout import control as words_of
from mqproc.store import damage
from mqproc.store.recovery.dry_run import DryRunIO
from mqproc.store.recovery.repair import Repair
from mqproc.store.verify.verifier import verify_store
from tests.support.fakes import BadSectors, FaultyIO
from tests.support.store_builders import StoppedStore, assert_whole

NOW = datetime.datetime(2026, 1, 2)


class DyingDisk(BadSectors):
    """A disk on which queue files stay unreadable even after they are recreated."""

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        if "/First/2/" in self.path_of(fd):
            raise OSError(errno.EIO, "Input/output error", self.path_of(fd))
        return super().pread(fd, size, offset)


def last_queue_file(store: StoppedStore) -> Path:
    return sorted((store.root / "consumequeue/First/2").iterdir())[-1]


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize(
    ("file_of", "page"),
    [
        (lambda store: store.queue_file("First", 2), 0),
        (last_queue_file, 0),
        (lambda store: store.index_files()[-1], 0),
        (lambda store: store.index_files()[0], 0),
    ],
    ids=["the first file of a queue", "its last file", "the newest file of the index", "the oldest file of the index"],
)
def test_unreadable_file_is_rebuilt(
    tmp_path: Path, clean: bool, file_of: Callable[[StoppedStore], Path], page: int
) -> None:
    """Without the rebuild each start fails until the file is deleted."""
    store = StoppedStore(tmp_path / "store")
    store.close_in_order()
    io = BadSectors()
    lost = file_of(store)
    io.lose(lost, page)
    if not clean:
        for mark in (store.root / "mqproc/marks").iterdir():
            mark.unlink()
    found = store.recover(clean=clean, io=io)
    aside = store.root / "mqproc/aside" / f"{lost.parent.name}.{lost.name}"
    if io.tried:
        assert f"recovery: {lost}: the disk cannot read it, it is rebuilt, moved to {aside}" in found.said
        assert (aside.stat().st_ino, page) in io.lost
        assert_whole(store, found)
    else:
        # A start reads the ends of a cleanly closed queue, and leaves the rest to a repair.
        assert clean


def test_unreadable_units_missing_from_table_are_rebuilt(tmp_path: Path) -> None:
    """After a power failure the queue table is older than the files."""
    store = StoppedStore(tmp_path / "store")
    store.close_in_order()
    table = store.engine.paths.queues.read_bytes()
    first = last_queue_file(store)
    while last_queue_file(store) == first:
        store.put()
        store.recover()
    store.engine.paths.queues.write_bytes(table)
    io = BadSectors()
    io.lose(last_queue_file(store), 0)
    found = store.recover(clean=False, io=io)
    assert io.tried
    assert_whole(store, found)


def test_lost_log_is_reported_after_unreadable_own_files(tmp_path: Path) -> None:
    """Earlier cuts are included, and so is the end up to which the log was durable."""
    store = StoppedStore(tmp_path / "store")
    store.close_in_order()
    for mark in (store.root / "mqproc/marks").iterdir():
        mark.unlink()
    last = store.offsets[-1]
    store.overwrite(last + 4, b"garbage!")
    io = BadSectors()
    io.lose(last_queue_file(store), 0)
    found = store.recover(io=io)
    assert io.tried
    assert found.end == last
    assert found.words[words_of.RECOVERY_CUT_BYTES] == store.end - last
    assert [(cut.end, cut.durable_end) for cut in damage.load(io, store.engine.paths).cuts] == [(last, store.end)]


def test_index_page_is_read_before_it_is_mapped(tmp_path: Path) -> None:
    """Access through a memory map would end the process by SIGBUS."""
    store = StoppedStore(tmp_path / "store")
    for page in range(3):
        io = BadSectors()
        io.lose(store.index_files()[-1], page)
        found = store.recover(clean=False, io=io)
        # The search for entries of tags, before recovery, also reads the first two pages.
        assert io.tried == (2 if page < 2 else 1)
        assert_whole(store, found)


def test_disk_reading_nothing_stops_start(tmp_path: Path) -> None:
    store = StoppedStore(tmp_path / "store")
    store.close_in_order()
    with pytest.raises(OSError, match="Input/output error") as caught:
        store.recover(clean=False, io=DyingDisk())
    assert "/First/2/" in str(caught.value.filename)
    assert not isinstance(caught.value, FailedSyncError)


def test_unreadable_log_stops_start(tmp_path: Path) -> None:
    store = StoppedStore(tmp_path / "store")
    io = BadSectors()
    io.lose(store.segment(store.end), store.end % 65536 // 4096)
    with pytest.raises(OSError, match="Input/output error"):
        store.recover(clean=False, io=io)
    assert not (store.root / "mqproc/aside").exists()


def test_failed_sync_of_queue_is_final(tmp_path: Path) -> None:
    store = StoppedStore(tmp_path / "store")
    lost = last_queue_file(store)
    lost.unlink()
    io = FaultyIO()
    io.failing["/consumequeue/"] = errno.EIO
    with pytest.raises(FailedSyncError):
        store.recover(io=io)
    assert not (store.root / "mqproc/aside").exists()


class BadDryRun(DryRunIO, BadSectors):
    """A dry run on a disk with bad sectors."""


def test_plan_lists_quarantined_and_rebuilt_files(tmp_path: Path) -> None:
    """The plan compares the rebuilt file with the unreadable one."""
    store = StoppedStore(tmp_path / "store")
    store.close_in_order()
    lost = last_queue_file(store)
    with BadDryRun(store.root) as io:
        io.lose(lost, 0)
        store.recover(io=io)
        changes = {(change.path, change.what): change for change in io.changes()}
    assert changes[lost, "moved"].target is not None
    assert (lost, "changed") in changes


def test_repair_quarantines_files_verify_could_not_read(tmp_path: Path) -> None:
    """Recovery might not reach the file, and could not copy it after writing to it."""
    store = StoppedStore(tmp_path / "store")
    store.close_in_order()
    io, engine = BadSectors(), store.engine
    lost = {store.queue_file("First", 2), last_queue_file(store), store.index_files()[0]}
    inodes = {path: path.stat().st_ino for path in lost}
    for path in lost:
        io.lose(path, 0)
    job = Repair(engine.paths, engine.options, verify_store(io, engine.paths, engine.options, jobs=1), NOW)
    plan = job.plan()
    assert {(action.path, action.what) for action in plan.actions} == {(path, "move aside") for path in lost}
    tried = io.tried
    job.execute(io, plan, lambda line: None)
    assert io.tried == tried
    for path, inode in inodes.items():
        assert (job.kept / "files" / path.relative_to(store.root)).stat().st_ino == inode
    assert verify_store(io, engine.paths, engine.options, jobs=1).clean
    assert_whole(store, store.recover())
