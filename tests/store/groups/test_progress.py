"""Progress of groups: a word a commit that outlives a kill, RocketMQ's file beside it, and which of the two counts.

A kill is an object that is let go without `save`; a start after it takes everything over from the files.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mqproc.errors import OffsetOverflowError, StaleOffsetError
from mqproc.io.fault_injection import FaultInjectionIO
from mqproc.io.store_io import StoreIO
from mqproc.store.offsets import file as progress_file
from mqproc.store.offsets.consumer_offset_json import CommittedOffset
from mqproc.store.offsets.offset_store import committed_offsets
from tests.store.groups.progress_store import Store, as_dict

NOW_MS = 1_800_000_000_000


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


# Commits


def test_a_commit_never_goes_back_and_never_beyond_the_queue(store: Store) -> None:
    progress = store.open()
    assert progress.offset("g", "T", 0) is None
    progress.commit("g", "T", 0, 5, 10)
    with pytest.raises(StaleOffsetError, match="committed offset 5"):
        progress.commit("g", "T", 0, 4, 10)
    with pytest.raises(OffsetOverflowError, match="11"):
        progress.commit("g", "T", 0, 11, 10)
    with pytest.raises(OffsetOverflowError):
        progress.commit("g", "T", 0, -1, 10)
    progress.commit("g", "T", 0, 5, 10)
    progress.commit("g", "T", 0, 10, 10)
    assert progress.offset("g", "T", 0) == 10
    progress.set("g", "T", 0, 2)
    assert progress.offset("g", "T", 0) == 2
    progress.close()


def test_offset_0_is_known(store: Store) -> None:
    progress = store.open()
    progress.commit("g", "T", 0, 0, 0)
    assert progress.offset("g", "T", 0) == 0
    assert progress.offset("g", "T", 1) is None
    progress.close()


def test_many_groups_topics_and_queues_have_room(store: Store) -> None:
    progress = store.open()
    wanted = {}
    for group in range(20):
        for topic in range(20):
            for queue_id in (0, 1, 8, 100):
                wanted[f"g{group}", f"T{topic}", queue_id] = group + topic + queue_id
                progress.set(f"g{group}", f"T{topic}", queue_id, group + topic + queue_id)
    progress.set("far", "T", 65_534, 7)
    wanted["far", "T", 65_534] = 7
    progress.close()
    assert {(at.group, at.topic, at.queue_id): at.offset for at in committed_offsets(store.io, store.paths)} == wanted


# Kills


def test_every_commit_outlives_a_kill_of_the_role(store: Store) -> None:
    progress = store.open()
    progress.set("g", "T", 3, 41)
    progress.commit("g", "T", 3, 42, 50)
    successor = store.open(successor=True)
    assert as_dict(successor, "g") == {("T", 3): 42}
    assert successor.unsaved
    successor.close()
    progress.close()


def test_every_commit_outlives_a_kill_of_the_whole_group(store: Store) -> None:
    progress = store.open()
    progress.set("g", "T", 0, 1)
    progress.save(NOW_MS)
    progress.commit("g", "T", 0, 9, 9)
    progress.commit("h", "U", 2, 3, 9)
    progress.close()
    assert store.json() == {("g", "T", 0): 1}
    after = store.open()
    assert (as_dict(after, "g"), as_dict(after, "h")) == ({("T", 0): 9}, {("U", 2): 3})
    assert after.unsaved
    after.save(NOW_MS)
    assert store.json() == {("g", "T", 0): 9, ("h", "U", 2): 3}
    after.close()


def test_a_reset_outlives_a_kill_before_it_was_saved(store: Store) -> None:
    progress = store.open()
    progress.set("g", "T", 0, 9)
    progress.save(NOW_MS)
    progress.set("g", "T", 0, 2)
    progress.close()
    after = store.open()
    assert as_dict(after, "g") == {("T", 0): 2}
    after.close()


def test_a_deletion_outlives_a_kill_before_it_was_saved(store: Store) -> None:
    progress = store.open()
    progress.set("g", "T", 0, 9)
    progress.set("g", "T", 1, 8)
    progress.save(NOW_MS)
    progress.delete_group("g")
    assert progress.groups() == []
    progress.set("g", "T", 0, 1)
    progress.close()
    after = store.open()
    assert as_dict(after, "g") == {("T", 0): 1}
    after.close()


@pytest.mark.parametrize("point", ["offsets.tmp", "offsets.renamed"])
def test_a_kill_while_the_file_is_saved_loses_nothing(store: Store, point: str) -> None:
    class Killed(Exception):
        pass

    class KillingIO(StoreIO):
        def crash_point(self, name: str) -> None:
            if name == point:
                raise Killed

    progress = store.open(io=KillingIO())
    progress.set("g", "T", 0, 5)
    with pytest.raises(Killed):
        progress.save(NOW_MS)
    progress.close()
    after = store.open()
    assert as_dict(after, "g") == {("T", 0): 5}
    after.save(NOW_MS)
    assert store.json() == {("g", "T", 0): 5}
    assert [event for event, _ in store.told] == []
    after.close()


@pytest.mark.parametrize("successor", [False, True])
def test_a_save_that_was_not_ended_and_another_that_failed_lose_nothing(store: Store, successor: bool) -> None:
    """The file in config is that of the first one then, and the words are beside it all the same."""

    class EndsAt(StoreIO):
        point = "offsets.renamed"

        def crash_point(self, name: str) -> None:
            if name == self.point:
                raise OSError(5, "Input/output error")

    io = EndsAt()
    progress = store.open(io=io)
    progress.set("g", "T", 0, 5)
    with pytest.raises(OSError, match="Input/output"):
        progress.save(NOW_MS)
    if successor:
        progress.close()
        progress = store.open(io=io, successor=True)
    io.point = "offsets.tmp"
    progress.set("g", "T", 0, 7)
    with pytest.raises(OSError, match="Input/output"):
        progress.save(NOW_MS)
    progress.close()
    for again in (True, False):
        after = store.open(successor=again)
        assert as_dict(after, "g") == {("T", 0): 7}
        after.close()


# The machine goes down, another program comes


def test_after_the_machine_went_down_the_saved_file_counts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    progress = store.open()
    progress.set("g", "T", 0, 5)
    progress.save(NOW_MS)
    progress.set("g", "T", 0, 8)
    progress.close()
    monkeypatch.setattr(progress_file, "boot_id", lambda: (1, 2))
    monkeypatch.setattr("mqproc.store.offsets.offset_store.boot_id", lambda: (1, 2))
    after = store.open()
    assert as_dict(after, "g") == {("T", 0): 5}
    after.close()


def test_what_another_program_wrote_counts(store: Store) -> None:
    progress = store.open()
    progress.set("g", "T", 0, 5)
    progress.save(NOW_MS)
    progress.close()
    store.write_json('{"offsetTable":{"T@g":{0:7},"U@h":{1:3}}}')
    after = store.open()
    assert (as_dict(after, "g"), as_dict(after, "h")) == ({("T", 0): 7}, {("U", 1): 3})
    after.close()


def test_a_reader_beside_a_save_sees_what_is_committed(store: Store) -> None:
    """consumerOffset.json is replaced when it has been read and the words beside it have not."""
    progress = store.open()
    progress.set("g", "T", 0, 5)
    progress.save(NOW_MS)

    class SavingIO(StoreIO):
        def read_file(self, path: Path) -> bytes:
            found = super().read_file(path)
            if path == store.paths.consumer_offsets:
                progress.set("g", "T", 0, 9)
                progress.save(NOW_MS)
            return found

    assert list(committed_offsets(SavingIO(), store.paths)) == [CommittedOffset("g", "T", 0, 9)]
    progress.close()


def test_without_our_own_folder_nothing_is_lost_after_a_clean_stop(store: Store) -> None:
    progress = store.open()
    progress.set("g", "T", 0, 5)
    progress.save(NOW_MS)
    progress.close()
    store.paths.progress.unlink()
    after = store.open()
    assert as_dict(after, "g") == {("T", 0): 5}
    assert not after.unsaved
    after.close()


def test_epochs_go_on_over_restarts(store: Store) -> None:
    progress = store.open()
    first = progress.allocate_epoch()
    progress.close()
    after = store.open()
    assert after.allocate_epoch() > first
    assert after.allocate_epoch(above=1000) == 1001
    assert after.allocate_epoch() == 1002
    after.close()


def test_a_file_that_finds_no_room_leaves_none_of_it(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        progress_file.OffsetFile.create(FaultInjectionIO(fault="allocate:1:ENOSPC"), tmp_path / "progress", [], 0, 1)
    assert list(tmp_path.iterdir()) == []


# Corrections


def test_progress_is_raised_to_minima_and_set_back_to_ends(store: Store) -> None:
    progress = store.open()
    for queue_id, offset in enumerate((2, 7, 12)):
        progress.set("g", "T", queue_id, offset)
    raised = progress.raise_to_minima(lambda topic, queue_id: 5 if topic == "T" else None)
    assert [(each.queue_id, each.messages) for each in raised] == [(0, 3)]
    lowered = progress.lower_to_maxima(lambda topic, queue_id: 10)
    assert lowered == [CommittedOffset("g", "T", 2, 12)]
    assert as_dict(progress, "g") == {("T", 0): 5, ("T", 1): 7, ("T", 2): 10}
    progress.close()
