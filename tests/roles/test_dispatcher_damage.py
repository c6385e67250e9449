"""The dispatcher at bad records, missing segments, below the minimum, on a full disk."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from mqproc.config.options import OnDamage
from mqproc.errors import CorruptStoreError
from mqproc.io.store_io import StoreIO
from mqproc.layout import control as words_of
from mqproc.layout import queue_table as table_layout
from mqproc.roles import dispatcher as role
from mqproc.roles.dispatcher import Dispatcher
from mqproc.store import damage
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.consumequeue.bounds import as_units
from mqproc.store.consumequeue.files import ConsumeQueueFiles
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.read.queries import StoreQueries
from mqproc.store.read.views import WordsView
from mqproc.types import PullStatus
from tests.roles.rigs import Rig

COUNT = 40


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    """A store whose log holds COUNT messages that no dispatcher has seen."""
    return make_rig(tmp_path)


def make_rig(root: Path, count: int = COUNT, **options: object) -> Rig:
    rig = Rig(root, **options)
    rig.dispatch(count)
    rig.control.store(words_of.DISPATCHED, 0)
    table = QueueTable(rig.io, rig.paths.queues, write=True)
    for word in (table_layout.MAX_OFFSET, table_layout.LAST_PHYSICAL_END, table_layout.LAST_STORE_TIMESTAMP_MS):
        table.store(0, word, 0)
    table.close()
    for folder in (rig.paths.consume_queue, rig.paths.index):
        for path in sorted(folder.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
    for slot in (0, 1):
        rig.control.store(words_of.COMMIT_INDEX_MS[slot], 0)
    return rig


def offsets_of(rig: Rig) -> list[int]:
    """Offsets of the records, and the end of the last one."""
    data = (rig.paths.commit_log / f"{0:020d}").read_bytes()
    offsets = [0]
    while size := int.from_bytes(data[offsets[-1] : offsets[-1] + 4], "big"):
        offsets.append(offsets[-1] + size)
    return offsets


def overwrite(rig: Rig, offset: int, data: bytes) -> None:
    with (rig.paths.commit_log / f"{0:020d}").open("r+b") as file:
        file.seek(offset)
        file.write(data)


def run(rig: Rig, dispatcher: Dispatcher) -> None:
    for _ in range(100):
        if rig.control.load(words_of.DISPATCHED) == rig.control.load(words_of.WRITTEN):
            return
        dispatcher.do_work()
    pytest.fail("dispatch does not reach the end of the log")


def test_dispatch_bad_record_becomes_a_hole(rig: Rig) -> None:
    offsets = offsets_of(rig)
    assert len(offsets) == COUNT + 1
    overwrite(rig, offsets[10] + 4, b"\xff\xff")
    overwrite(rig, offsets[20], bytes(offsets[23] - offsets[20]))
    dispatcher = Dispatcher(rig.context(words_of.DISPATCHER))
    run(rig, dispatcher)
    dispatcher.close()
    holes = damage.load(rig.io, rig.paths).holes
    assert [(hole.start, hole.stop, hole.kind) for hole in holes] == [
        (offsets[10], offsets[11], "bad magic"),
        (offsets[20], offsets[23], "zeros"),
    ]
    assert rig.control.damage_holes == rig.control.load(words_of.DISPATCH_HOLES) == 2
    assert not rig.control.damage_read_only
    files = ConsumeQueueFiles(rig.io, rig.paths.consume_queue, rig.options.consume_queue_file_bytes)
    units = as_units(files.read_units("T", 0, 0, COUNT)).tolist()
    assert [unit[0] for unit in units] == [*offsets[:10], 0, *offsets[11:20], 0, 0, 0, *offsets[23:COUNT]]
    assert [number for number, unit in enumerate(units) if unit[1] == 0x7FFFFFFF] == [10, 20, 21, 22]


def test_pull_skips_a_hole_and_reports_its_range(rig: Rig) -> None:
    offsets = offsets_of(rig)
    overwrite(rig, offsets[20], bytes(offsets[23] - offsets[20]))
    dispatcher = Dispatcher(rig.context(words_of.DISPATCHER))
    run(rig, dispatcher)
    dispatcher.close()
    table = QueueTable(rig.io, rig.paths.queues)
    view = WordsView(rig.control.words, table, sync_flush=False)
    reading = StoreQueries(rig.io, rig.paths, rig.options, view)
    before = reading.pull("T", 0, 0, 100, 1 << 20)
    assert (before.status, before.count, before.next_offset) == (PullStatus.FOUND, 20, 20)
    at = reading.pull("T", 0, 20, 100, 1 << 20)
    assert (at.status, at.next_offset) == (PullStatus.CORRUPT, 23)
    assert f"[{offsets[20]}, {offsets[23]})" in at.detail
    assert "queue offsets [20, 23)" in at.detail
    behind = reading.pull("T", 0, 23, 100, 1 << 20)
    assert (behind.status, behind.count) == (PullStatus.FOUND, COUNT - 23)
    reading.close()
    view.close()


def test_dispatch_bad_last_record_extends_to_the_confirmed_offset(rig: Rig) -> None:
    """Later appends begin at that offset."""
    offsets = offsets_of(rig)
    overwrite(rig, offsets[COUNT - 1], b"\xff" * 8)
    dispatcher = Dispatcher(rig.context(words_of.DISPATCHER))
    run(rig, dispatcher)
    (hole,) = damage.load(rig.io, rig.paths).holes
    assert (hole.start, hole.stop) == (offsets[COUNT - 1], offsets[COUNT])
    dispatcher.close()
    again = Dispatcher(rig.context(words_of.DISPATCHER))
    assert again.do_work() == 0
    again.close()


def test_dispatch_missing_segment_is_a_hole_unless_expired(tmp_path: Path) -> None:
    rig = make_rig(tmp_path, 3 * COUNT, mapped_file_size_commit_log=4096)
    segments = LogSegments(rig.io, rig.paths.commit_log, 4096)
    assert segments.starts()[:3] == [0, 4096, 8192]
    segments.path(4096).unlink()
    dispatcher = Dispatcher(rig.context(words_of.DISPATCHER))
    run(rig, dispatcher)
    dispatcher.close()
    (hole,) = damage.load(rig.io, rig.paths).holes
    assert (hole.start, hole.stop, hole.kind) == (4096, 8192, "missing segment")


def test_dispatch_below_log_minimum_jumps_and_reports_the_gap(tmp_path: Path) -> None:
    rig = make_rig(tmp_path, 3 * COUNT, mapped_file_size_commit_log=4096)
    segments = LogSegments(rig.io, rig.paths.commit_log, 4096)
    segments.path(0).unlink()
    segments.path(4096).unlink()
    rig.control.store(words_of.MIN_PHYSICAL_OFFSET, 8192)
    dispatcher = Dispatcher(rig.context(words_of.DISPATCHER))
    run(rig, dispatcher)
    dispatcher.close()
    assert rig.control.load(words_of.DISPATCH_GAP_BYTES) == 8192
    assert rig.control.damage_holes == 0
    assert rig.control.load(words_of.role_word(words_of.DISPATCHER, "errors")) == 1


def test_on_damage_refuse_exits_with_the_location(tmp_path: Path) -> None:
    rig = make_rig(tmp_path, on_damage=OnDamage.REFUSE)
    overwrite(rig, offsets_of(rig)[3], b"\xff" * 8)
    dispatcher = Dispatcher(rig.context(words_of.DISPATCHER))
    with pytest.raises(CorruptStoreError, match="offset 372") as raised:
        run(rig, dispatcher)
    assert raised.value.exit_code == 6
    dispatcher.close()


def test_on_damage_read_only_sets_the_word(tmp_path: Path) -> None:
    rig = make_rig(tmp_path, on_damage=OnDamage.READ_ONLY)
    overwrite(rig, offsets_of(rig)[3], b"\xff" * 8)
    dispatcher = Dispatcher(rig.context(words_of.DISPATCHER))
    run(rig, dispatcher)
    dispatcher.close()
    assert rig.control.damage_read_only
    assert not rig.control.read_only


def test_dispatcher_restarted_knows_earlier_holes(rig: Rig) -> None:
    offsets = offsets_of(rig)
    overwrite(rig, offsets[5], b"\xff" * 8)
    dispatcher = Dispatcher(rig.context(words_of.DISPATCHER))
    run(rig, dispatcher)
    dispatcher.close()
    rig.control.store(words_of.DISPATCHED, 0)
    again = Dispatcher(rig.context(words_of.DISPATCHER))
    run(rig, again)
    again.close()
    assert rig.control.load(words_of.DISPATCH_HOLES) == 1


def test_dispatch_full_disk_waits_for_space(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(role, "RETRY_NS", 0)
    rig.io.refusing["consumequeue"] = errno.ENOSPC
    dispatcher = Dispatcher(rig.context(words_of.DISPATCHER))
    errors = words_of.role_word(words_of.DISPATCHER, "errors")
    for _ in range(5):
        assert dispatcher.do_work() == 0
    assert rig.control.load(words_of.DISPATCH_ERRNO) == errno.ENOSPC
    assert rig.control.load(words_of.DISPATCHED) == 0
    assert rig.control.load(errors) == 1
    rig.io.refusing.clear()
    run(rig, dispatcher)
    assert rig.control.load(words_of.DISPATCH_ERRNO) == 0
    dispatcher.close()


def test_dispatch_failed_map_waits_and_retries(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(role, "RETRY_NS", 0)

    class NoMaps(StoreIO):
        def map(self, fd: int, size: int, *, write: bool = False) -> object:  # type: ignore[override]
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

    dispatcher = Dispatcher(rig.context(words_of.DISPATCHER))
    segments = dispatcher._segments
    whole, segments.io = segments.io, NoMaps()
    assert dispatcher.do_work() == 0
    assert rig.control.load(words_of.DISPATCH_ERRNO) == errno.ENOMEM
    segments.io = whole
    run(rig, dispatcher)
    assert rig.control.load(words_of.DISPATCH_ERRNO) == 0
    dispatcher.close()
