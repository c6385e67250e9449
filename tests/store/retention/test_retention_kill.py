"""A keeper that is killed at any call, and a loss of power between any two: what is left is a store without a gap."""

from __future__ import annotations

import dataclasses
import itertools
import random
import shutil
from pathlib import Path

import pytest

from mqproc.io.store_io import StoreIO
from mqproc.layout import control as words_of
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.read.queries import StoreQueries
from mqproc.store.read.views import WordsView
from tests.store.recovery.recovering import Killed, RecordingIO, Recovered, recover
from tests.store.retention.retaining import ALL_HOURS, NOW_MS, OLD, SEGMENT, YOUNG, Aged, check_minima

POINTS = ("retention.min_stored", "retention.log_unlinked", "retention.cq_unlinked", "retention.index_unlinked")


class KillingIO(RecordingIO):
    """Killed at the n-th call that changes something, or at the n-th passage of a crash point."""

    def __init__(self, kill_at: int = 0, point: str = "", nth: int = 1) -> None:
        super().__init__(kill_at)
        self._point, self._nth = point, nth
        self.passed: list[str] = []

    def crash_point(self, name: str) -> None:
        self.passed.append(name)
        if name == self._point and self.passed.count(name) == self._nth:
            raise Killed(name)

    def sync_folder(self, folder: Path) -> None:
        self._note("sync_folder", folder)
        super().sync_folder(folder)

    def disk_usage(self, folder: Path) -> tuple[int, int]:
        return 10, 90


def filled(root: Path) -> Aged:
    """Three queues over 24 old and 6 young segments; a group that has consumed nothing of one."""
    store = Aged(root, delete_file_batch_max=100)
    for _ in range(4):
        store.fill(3, OLD, "A")
        store.fill(2, OLD, "B")
        store.fill(1, OLD, "quiet")
    store.fill(3, YOUNG, "A")
    store.fill(3, YOUNG, "B")
    store.paths.config.mkdir()
    store.paths.consumer_offsets.write_text('{"offsetTable":{"A@slow":{0:0}}}')
    return store


def run_until_killed(store: Aged, io: KillingIO) -> bool:
    """A keeper's life; whether it was killed."""
    try:
        retention = store.retention(io)
        store.run(retention, 3000)
    except Killed:
        return True
    retention.close()
    return False


def finished(store: Aged) -> tuple[list[int], ...]:
    check_minima(store)
    return (
        store.segments(),
        store.queue_files("A"),
        store.queue_files("B"),
        store.queue_files("quiet"),
        [store.min_offset(topic) for topic in ("A", "B", "quiet")],
        [store.index_files()],
    )


def test_a_successor_finishes_what_was_begun_wherever_its_predecessor_was_killed(tmp_path: Path) -> None:
    whole = filled(tmp_path / "whole")
    io = KillingIO()
    assert not run_until_killed(whole, io)
    wanted = finished(whole)
    assert wanted[0][0] == 24
    assert {*POINTS} <= {*io.passed}
    for kill_at in range(1, len(io.calls) + 1):
        store = filled(tmp_path / str(kill_at))
        assert run_until_killed(store, KillingIO(kill_at)), kill_at
        readable(store)
        # The hour is over: the successor finishes all the same what can be seen from outside.
        store.options = dataclasses.replace(store.options, delete_when="3", disk_max_used_space_ratio=99)
        store.pass_by()
        check_minima(store)
        store.options = whole.options
        store.pass_by(2)
        assert finished(store) == wanted, kill_at
        shutil.rmtree(tmp_path / str(kill_at))


def readable(store: Aged) -> None:
    """Each queue's minimum has a record, whatever was killed; nothing in between is missing."""
    view = WordsView(store.words, store.table, sync_flush=False)
    reading = StoreQueries(StoreIO(), store.paths, store.options, view)
    try:
        for _number, topic, queue_id in store.table.live():
            bounds = reading.queues.bounds(topic, queue_id)
            assert bounds is not None
            pulled = reading.pull(topic, queue_id, bounds.min_offset, 100, 1 << 20)
            assert pulled.count == bounds.max_offset - bounds.min_offset, (topic, pulled)
    finally:
        reading.close()


@pytest.mark.parametrize(
    ("point", "nth"),
    [
        ("retention.min_stored", 1),
        ("retention.log_unlinked", 1),
        ("retention.log_unlinked", 13),
        ("retention.log_unlinked", 24),
        ("retention.cq_unlinked", 1),
        ("retention.cq_unlinked", 2),
        ("retention.index_unlinked", 1),
        ("retention.index_unlinked", 3),
    ],
)
def test_at_every_crash_point_a_restart_of_the_group_finds_a_whole_store(tmp_path: Path, point: str, nth: int) -> None:
    store = filled(tmp_path)
    assert run_until_killed(store, KillingIO(point=point, nth=nth))
    found = recover(tmp_path, store.options, clean=False)
    check_recovered(found)


def check_recovered(found: Recovered) -> None:
    """The log begins with its first segment, has no hole, and each queue has a unit for each of its records."""
    starts = sorted(int(path.name) for path in found.paths.commit_log.iterdir())
    assert found.begin == starts[0]
    assert found.holes == []
    assert all(later == earlier + SEGMENT for earlier, later in itertools.pairwise(starts))
    # Every queue goes on where it stood, also one of which nothing is left.
    ends = {topic: end for (topic, _queue_id), (_first, end) in found.queues().items()}
    assert ends == {"A": 15, "B": 11, "quiet": 4}
    units = [unit for topic in ends for unit in found.units(topic, 0).values()]
    places = sorted(place for place, _size, _code in units)
    assert len(places) == (found.end - found.begin + SEGMENT - 1) // SEGMENT
    assert all(place >= found.begin for place in places)


def test_files_that_come_back_after_a_loss_of_power_do_no_harm(tmp_path: Path) -> None:
    """Deleting queues' and index files is not synced: any of them may be there again, or the last segment may."""
    before = tmp_path / "before"
    filled(before)
    random_ = random.Random(4)
    for life in range(12):
        root = tmp_path / str(life)
        shutil.copytree(before, root)
        store = reopened(root)
        io = KillingIO(point="retention.log_unlinked", nth=life + 1) if life % 2 else KillingIO()
        run_until_killed(store, io)
        gone = [path for path in before.rglob("*") if path.is_file() and not (root / path.relative_to(before)).exists()]
        for path in gone:
            if path.parent.name != "commitlog" and random_.random() < 0.5:
                shutil.copy(path, root / path.relative_to(before))
        segments = sorted(path for path in gone if path.parent.name == "commitlog")
        if life % 2 and segments:
            # The unlink before the sync that was not reached.
            shutil.copy(segments[-1], root / segments[-1].relative_to(before))
        found = recover(root, store.options, clean=False)
        check_recovered(found)


def reopened(root: Path) -> Aged:
    """A store that another process has filled, with words as its group had them."""
    store = Aged.__new__(Aged)
    source = recover(root, Aged(root.with_name(root.name + ".options")).options, clean=False)
    store.io, store.paths = StoreIO(), source.paths
    store.options = dataclasses.replace(source.options, delete_when=ALL_HOURS, delete_file_batch_max=100)
    store.words = source.words
    store.table = QueueTable(store.io, store.paths.queues, write=True)
    for word in (words_of.COMMITLOG_MARK, words_of.CQ_SYNCED, words_of.INDEX_SYNCED):
        store.words[word] = store.words[words_of.WRITTEN]
    store.now_ns, store.now_ms, store.told = 1, NOW_MS, []
    return store


def test_an_expired_queue_goes_on_though_its_folder_is_lost(tmp_path: Path) -> None:
    """A queue that is rebuilt from the log never begins again at 0."""
    before = tmp_path / "before"
    filled(before)
    store = reopened(before)
    run_until_killed(store, KillingIO())
    store.table.close()
    assert store.segments()[0] == 24
    shutil.rmtree(store.paths.consume_queue)
    found = recover(before, store.options, clean=True)
    check_recovered(found)
    assert found.queues()["quiet", 0] == (4, 4)
    again = recover(before, store.options, clean=True)
    assert again.queues()["quiet", 0] == (4, 4)


def test_a_new_group_begins_with_the_first_segment_and_no_aim(tmp_path: Path) -> None:
    store = filled(tmp_path)
    assert not run_until_killed(store, KillingIO())
    found = recover(tmp_path, store.options, clean=True)
    assert (found.begin, found.words[words_of.RETENTION_AIM]) == (24 * SEGMENT, 0)
    check_recovered(found)
