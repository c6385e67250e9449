"""Files of queues and index that the disk cannot read: a start puts them aside, and makes them again from the log."""

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
from tests.store.bad_sectors import BadSectors
from tests.store.faulty_io import FaultyIO
from tests.store.stopped_store import StoppedStore, assert_whole

NOW = datetime.datetime(2026, 1, 2)


class DyingDisk(BadSectors):
    """What has a name of a queue's cannot be read, however often it is made again."""

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
def test_what_cannot_be_read_is_made_again(
    tmp_path: Path, clean: bool, file_of: Callable[[StoppedStore], Path], page: int
) -> None:
    """Each start ended there, until somebody deleted the file."""
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
        # A start looks at the ends of a queue that was closed in order, and leaves the rest to a repair.
        assert clean


def test_units_that_no_table_knows_of_are_made_again(tmp_path: Path) -> None:
    """After a loss of power the table of queues is older than the files; behind the mark the log may have nothing."""
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


def test_what_the_log_has_lost_is_told_though_all_begins_anew(tmp_path: Path) -> None:
    """What was cut before counted nothing, and that the log was durable further nobody would say."""
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


def test_a_page_of_the_index_is_read_before_it_is_mapped(tmp_path: Path) -> None:
    """A map would end the process: a start after a kill ended by SIGBUS, and each one after it."""
    store = StoppedStore(tmp_path / "store")
    for page in range(3):
        io = BadSectors()
        io.lose(store.index_files()[-1], page)
        found = store.recover(clean=False, io=io)
        assert io.tried == 1
        assert_whole(store, found)


def test_a_disk_that_reads_nothing_ends_the_start(tmp_path: Path) -> None:
    store = StoppedStore(tmp_path / "store")
    store.close_in_order()
    with pytest.raises(OSError, match="Input/output error") as caught:
        store.recover(clean=False, io=DyingDisk())
    assert "/First/2/" in str(caught.value.filename)
    assert not isinstance(caught.value, FailedSyncError)


def test_a_part_of_the_log_that_cannot_be_read_ends_the_start(tmp_path: Path) -> None:
    store = StoppedStore(tmp_path / "store")
    io = BadSectors()
    io.lose(store.segment(store.end), store.end % 65536 // 4096)
    with pytest.raises(OSError, match="Input/output error"):
        store.recover(clean=False, io=io)
    assert not (store.root / "mqproc/aside").exists()


def test_a_failed_sync_of_a_queue_is_final(tmp_path: Path) -> None:
    store = StoppedStore(tmp_path / "store")
    lost = last_queue_file(store)
    lost.unlink()
    io = FaultyIO()
    io.failing["/consumequeue/"] = errno.EIO
    with pytest.raises(FailedSyncError):
        store.recover(io=io)
    assert not (store.root / "mqproc/aside").exists()


class BadDryRun(DryRunIO, BadSectors):
    """A dry run on such a disk."""


def test_a_plan_tells_what_goes_aside_and_what_is_made(tmp_path: Path) -> None:
    """It ended at the comparison of the file that is made with the one that cannot be read."""
    store = StoppedStore(tmp_path / "store")
    store.close_in_order()
    lost = last_queue_file(store)
    with BadDryRun(store.root) as io:
        io.lose(lost, 0)
        store.recover(io=io)
        changes = {(change.path, change.what): change for change in io.changes()}
    assert changes[lost, "moved"].target is not None
    assert (lost, "changed") in changes


def test_a_repair_moves_aside_what_a_verify_could_not_read(tmp_path: Path) -> None:
    """It was left to recovery to come there: it need not, and what it had stored to before could not be copied."""
    store = StoppedStore(tmp_path / "store")
    store.close_in_order()
    io, engine = BadSectors(), store.engine
    lost = {store.queue_file("First", 2), last_queue_file(store), store.index_files()[0]}
    inodes = {path: path.stat().st_ino for path in lost}
    for path in lost:
        io.lose(path, 0)
    job = Repair(engine.paths, engine.options, verify_store(io, engine.paths, engine.options, jobs=1), NOW)
    plan = job.plan()
    assert {(action.path, action.what) for action in plan.actions} == {(path, "move away") for path in lost}
    tried = io.tried
    job.execute(io, plan, lambda line: None)
    assert io.tried == tried
    for path, inode in inodes.items():
        assert (job.kept / "files" / path.relative_to(store.root)).stat().st_ino == inode
    assert verify_store(io, engine.paths, engine.options, jobs=1).clean
    assert_whole(store, store.recover())
