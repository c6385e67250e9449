"""Retention in a keeper that is killed at any call, or that loses power between two calls."""

from __future__ import annotations

import dataclasses
import itertools
import random
import shutil
from pathlib import Path

import pytest

from mqproc.config.options import RetentionGuard
from mqproc.io.store_io import StoreIO
from mqproc.layout import control as words_of
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.read.queries import StoreQueries
from mqproc.store.read.views import WordsView
from tests.support.store_builders import AGED_SEGMENT, ALL_HOURS, NOW_MS, OLD, YOUNG, AgedStore, check_minima
from tests.support.store_checks import Killed, RecordingIO, Recovered, recover

POINTS = ("retention.min_stored", "retention.log_unlinked", "retention.cq_unlinked", "retention.index_unlinked")


class KillingIO(RecordingIO):
    """Raises Killed at the n-th modifying call, or at the n-th pass of a crash point."""

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


def filled_store(root: Path) -> AgedStore:
    """Build three queues over 24 old and 6 young segments; a group has consumed nothing."""
    store = AgedStore(root, delete_file_batch_max=100)
    for _ in range(4):
        store.fill(3, OLD, "A")
        store.fill(2, OLD, "B")
        store.fill(1, OLD, "quiet")
    store.fill(3, YOUNG, "A")
    store.fill(3, YOUNG, "B")
    store.paths.config.mkdir()
    store.paths.consumer_offsets.write_text('{"offsetTable":{"A@slow":{0:0}}}')
    return store


def run_until_killed(store: AgedStore, io: KillingIO) -> bool:
    """Run a keeper; return whether it was killed."""
    try:
        retention = store.retention(io)
        store.run(retention, 3000)
    except Killed:
        return True
    retention.close()
    return False


def state_after_pass(store: AgedStore) -> tuple[list[int], ...]:
    check_minima(store)
    return (
        store.segments(),
        store.queue_files("A"),
        store.queue_files("B"),
        store.queue_files("quiet"),
        [store.min_offset(topic) for topic in ("A", "B", "quiet")],
        [store.index_files()],
    )


def test_retention_keeper_killed_at_any_call_successor_finishes(tmp_path: Path) -> None:
    whole = filled_store(tmp_path / "whole")
    io = KillingIO()
    assert not run_until_killed(whole, io)
    expected = state_after_pass(whole)
    assert expected[0][0] == 24
    assert {*POINTS} <= {*io.passed}
    for kill_at in range(1, len(io.calls) + 1):
        store = filled_store(tmp_path / str(kill_at))
        assert run_until_killed(store, KillingIO(kill_at)), kill_at
        check_readable(store)
        # The successor finishes a visible deletion although the hour is over.
        store.options = dataclasses.replace(store.options, delete_when="3", disk_max_used_space_ratio=99)
        store.run_passes()
        check_minima(store)
        store.options = whole.options
        store.run_passes(2)
        assert state_after_pass(store) == expected, kill_at
        shutil.rmtree(tmp_path / str(kill_at))


def check_readable(store: AgedStore) -> None:
    """Check that each queue can be read without a gap from its minimum on."""
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
def test_retention_crash_point_then_recovery_finds_intact_store(tmp_path: Path, point: str, nth: int) -> None:
    store = filled_store(tmp_path)
    assert run_until_killed(store, KillingIO(point=point, nth=nth))
    found = recover(tmp_path, store.options, clean=False)
    check_recovered(found)


def check_recovered(found: Recovered) -> None:
    """Check that the log has no holes and each record has a unit."""
    starts = sorted(int(path.name) for path in found.paths.commit_log.iterdir())
    assert found.begin == starts[0]
    assert found.holes == []
    assert all(later == earlier + AGED_SEGMENT for earlier, later in itertools.pairwise(starts))
    # Every queue keeps its maximum offset, also an empty one.
    ends = {topic: end for (topic, _queue_id), (_first, end) in found.queues().items()}
    assert ends == {"A": 15, "B": 11, "quiet": 4}
    units = [unit for topic in ends for unit in found.units(topic, 0).values()]
    places = sorted(place for place, _size, _code in units)
    assert len(places) == (found.end - found.begin + AGED_SEGMENT - 1) // AGED_SEGMENT
    assert all(place >= found.begin for place in places)


def test_retention_files_restored_by_power_loss_are_harmless(tmp_path: Path) -> None:
    """Unsynced unlinks: queue and index files and the last segment may reappear."""
    before = tmp_path / "before"
    filled_store(before)
    random_ = random.Random(4)
    for attempt in range(12):
        root = tmp_path / str(attempt)
        shutil.copytree(before, root)
        store = reopened(root)
        io = KillingIO(point="retention.log_unlinked", nth=attempt + 1) if attempt % 2 else KillingIO()
        run_until_killed(store, io)
        deleted = [
            path for path in before.rglob("*") if path.is_file() and not (root / path.relative_to(before)).exists()
        ]
        assert deleted
        for path in deleted:
            if path.parent.name != "commitlog" and random_.random() < 0.5:
                shutil.copy(path, root / path.relative_to(before))
        segments = sorted(path for path in deleted if path.parent.name == "commitlog")
        if attempt % 2 and segments:
            # This unlink was not followed by a sync.
            shutil.copy(segments[-1], root / segments[-1].relative_to(before))
        found = recover(root, store.options, clean=False)
        check_recovered(found)


def reopened(root: Path) -> AgedStore:
    """Open a store that another process filled, with the words of its group."""
    store = AgedStore.__new__(AgedStore)
    source = recover(root, AgedStore(root.with_name(root.name + ".options")).options, clean=False)
    store.io, store.paths = StoreIO(), source.paths
    # Recovery has adopted `groups`, which would keep everything: no group has consumed anything.
    changes = {"delete_when": ALL_HOURS, "delete_file_batch_max": 100, "retention_guard": RetentionGuard.NONE}
    store.options = dataclasses.replace(source.options, **changes)
    store.words = source.words
    store.table = QueueTable(store.io, store.paths.queues, write=True)
    for word in (words_of.COMMITLOG_MARK, words_of.CQ_SYNCED, words_of.INDEX_SYNCED):
        store.words[word] = store.words[words_of.WRITTEN]
    store.now_ns, store.now_ms, store.reported = 1, NOW_MS, []
    return store


def test_retention_expired_queue_without_folder_keeps_its_offset(tmp_path: Path) -> None:
    """A queue that is rebuilt from the log does not restart at 0."""
    before = tmp_path / "before"
    filled_store(before)
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


def test_retention_new_group_starts_at_first_segment(tmp_path: Path) -> None:
    store = filled_store(tmp_path)
    assert not run_until_killed(store, KillingIO())
    found = recover(tmp_path, store.options, clean=True)
    assert (found.begin, found.words[words_of.RETENTION_AIM]) == (24 * AGED_SEGMENT, 0)
    check_recovered(found)
