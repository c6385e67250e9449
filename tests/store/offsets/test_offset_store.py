"""The offset store: commits survive kills; choice between mqproc's and RocketMQ's file.

A kill is simulated by closing an offset store without `save`; the next one loads everything from the files.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mqproc.errors import OffsetOverflowError, StaleOffsetError
from mqproc.io.fault_injection import FaultInjectionIO
from mqproc.io.store_io import StoreIO
from mqproc.store.offsets import file as offset_file
from mqproc.store.offsets.consumer_offset_json import CommittedOffset
from mqproc.store.offsets.offset_store import committed_offsets
from tests.store.offsets.conftest import OffsetFolder, offsets_of

NOW_MS = 1_800_000_000_000


# Commits


def test_commit_below_committed_or_beyond_queue_raises(store: OffsetFolder) -> None:
    offsets = store.open()
    assert offsets.offset("g", "T", 0) is None
    offsets.commit("g", "T", 0, 5, 10)
    with pytest.raises(StaleOffsetError, match="committed offset 5"):
        offsets.commit("g", "T", 0, 4, 10)
    with pytest.raises(OffsetOverflowError, match="11"):
        offsets.commit("g", "T", 0, 11, 10)
    with pytest.raises(OffsetOverflowError):
        offsets.commit("g", "T", 0, -1, 10)
    offsets.commit("g", "T", 0, 5, 10)
    offsets.commit("g", "T", 0, 10, 10)
    assert offsets.offset("g", "T", 0) == 10
    offsets.set("g", "T", 0, 2)
    assert offsets.offset("g", "T", 0) == 2
    offsets.close()


def test_offset_after_commit_of_0_is_0(store: OffsetFolder) -> None:
    offsets = store.open()
    offsets.commit("g", "T", 0, 0, 0)
    assert offsets.offset("g", "T", 0) == 0
    assert offsets.offset("g", "T", 1) is None
    offsets.close()


def test_committed_offsets_of_many_groups_topics_queues(store: OffsetFolder) -> None:
    offsets = store.open()
    wanted = {}
    for group in range(20):
        for topic in range(20):
            for queue_id in (0, 1, 8, 100):
                wanted[f"g{group}", f"T{topic}", queue_id] = group + topic + queue_id
                offsets.set(f"g{group}", f"T{topic}", queue_id, group + topic + queue_id)
    offsets.set("far", "T", 65_534, 7)
    wanted["far", "T", 65_534] = 7
    offsets.close()
    assert {(at.group, at.topic, at.queue_id): at.offset for at in committed_offsets(store.io, store.paths)} == wanted


# Kills


def test_commit_survives_kill_of_role(store: OffsetFolder) -> None:
    offsets = store.open()
    offsets.set("g", "T", 3, 41)
    offsets.commit("g", "T", 3, 42, 50)
    successor = store.open(successor=True)
    assert offsets_of(successor, "g") == {("T", 3): 42}
    assert successor.unsaved
    successor.close()
    offsets.close()


def test_commit_survives_kill_of_group(store: OffsetFolder) -> None:
    offsets = store.open()
    offsets.set("g", "T", 0, 1)
    offsets.save(NOW_MS)
    offsets.commit("g", "T", 0, 9, 9)
    offsets.commit("h", "U", 2, 3, 9)
    offsets.close()
    assert store.json() == {("g", "T", 0): 1}
    after = store.open()
    assert (offsets_of(after, "g"), offsets_of(after, "h")) == ({("T", 0): 9}, {("U", 2): 3})
    assert after.unsaved
    after.save(NOW_MS)
    assert store.json() == {("g", "T", 0): 9, ("h", "U", 2): 3}
    after.close()


def test_reset_unsaved_survives_kill(store: OffsetFolder) -> None:
    offsets = store.open()
    offsets.set("g", "T", 0, 9)
    offsets.save(NOW_MS)
    offsets.set("g", "T", 0, 2)
    offsets.close()
    after = store.open()
    assert offsets_of(after, "g") == {("T", 0): 2}
    after.close()


def test_delete_group_unsaved_survives_kill(store: OffsetFolder) -> None:
    offsets = store.open()
    offsets.set("g", "T", 0, 9)
    offsets.set("g", "T", 1, 8)
    offsets.save(NOW_MS)
    offsets.delete_group("g")
    assert offsets.groups() == []
    offsets.set("g", "T", 0, 1)
    offsets.close()
    after = store.open()
    assert offsets_of(after, "g") == {("T", 0): 1}
    after.close()


@pytest.mark.parametrize("point", ["offsets.tmp", "offsets.renamed"])
def test_save_killed_keeps_offsets(store: OffsetFolder, point: str) -> None:
    class Killed(Exception):
        pass

    class KillingIO(StoreIO):
        def crash_point(self, name: str) -> None:
            if name == point:
                raise Killed

    offsets = store.open(io=KillingIO())
    offsets.set("g", "T", 0, 5)
    with pytest.raises(Killed):
        offsets.save(NOW_MS)
    offsets.close()
    after = store.open()
    assert offsets_of(after, "g") == {("T", 0): 5}
    after.save(NOW_MS)
    assert store.json() == {("g", "T", 0): 5}
    assert store.event_names() == []
    after.close()


@pytest.mark.parametrize("successor", [False, True])
def test_save_failing_twice_keeps_offsets(store: OffsetFolder, successor: bool) -> None:
    """The file in config is that of the first save; the words are newer."""

    class EndsAt(StoreIO):
        point = "offsets.renamed"

        def crash_point(self, name: str) -> None:
            if name == self.point:
                raise OSError(5, "Input/output error")

    io = EndsAt()
    offsets = store.open(io=io)
    offsets.set("g", "T", 0, 5)
    with pytest.raises(OSError, match="Input/output"):
        offsets.save(NOW_MS)
    if successor:
        offsets.close()
        offsets = store.open(io=io, successor=True)
    io.point = "offsets.tmp"
    offsets.set("g", "T", 0, 7)
    with pytest.raises(OSError, match="Input/output"):
        offsets.save(NOW_MS)
    offsets.close()
    for again in (True, False):
        after = store.open(successor=again)
        assert offsets_of(after, "g") == {("T", 0): 7}
        after.close()


# A reboot, another program


def test_open_after_reboot_uses_saved_file(store: OffsetFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    offsets = store.open()
    offsets.set("g", "T", 0, 5)
    offsets.save(NOW_MS)
    offsets.set("g", "T", 0, 8)
    offsets.close()
    monkeypatch.setattr(offset_file, "boot_id", lambda: (1, 2))
    monkeypatch.setattr("mqproc.store.offsets.offset_store.boot_id", lambda: (1, 2))
    after = store.open()
    assert offsets_of(after, "g") == {("T", 0): 5}
    after.close()


def test_open_file_changed_by_another_program_uses_it(store: OffsetFolder) -> None:
    offsets = store.open()
    offsets.set("g", "T", 0, 5)
    offsets.save(NOW_MS)
    offsets.close()
    store.write_json('{"offsetTable":{"T@g":{0:7},"U@h":{1:3}}}')
    after = store.open()
    assert (offsets_of(after, "g"), offsets_of(after, "h")) == ({("T", 0): 7}, {("U", 1): 3})
    after.close()


def test_committed_offsets_during_save_returns_committed(store: OffsetFolder) -> None:
    """consumerOffset.json is replaced between reading it and reading the words."""
    offsets = store.open()
    offsets.set("g", "T", 0, 5)
    offsets.save(NOW_MS)

    class SavingIO(StoreIO):
        def read_file(self, path: Path) -> bytes:
            found = super().read_file(path)
            if path == store.paths.consumer_offsets:
                offsets.set("g", "T", 0, 9)
                offsets.save(NOW_MS)
            return found

    assert list(committed_offsets(SavingIO(), store.paths)) == [CommittedOffset("g", "T", 0, 9)]
    offsets.close()


def test_open_without_own_files_after_clean_stop_keeps_offsets(store: OffsetFolder) -> None:
    offsets = store.open()
    offsets.set("g", "T", 0, 5)
    offsets.save(NOW_MS)
    offsets.close()
    store.paths.progress.unlink()
    after = store.open()
    assert offsets_of(after, "g") == {("T", 0): 5}
    assert not after.unsaved
    after.close()


def test_epochs_increase_over_restarts(store: OffsetFolder) -> None:
    offsets = store.open()
    first = offsets.allocate_epoch()
    offsets.close()
    after = store.open()
    assert after.allocate_epoch() > first
    assert after.allocate_epoch(above=1000) == 1001
    assert after.allocate_epoch() == 1002
    after.close()


def test_create_disk_full_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        offset_file.OffsetFile.create(FaultInjectionIO(fault="allocate:1:ENOSPC"), tmp_path / "progress", [], 0, 1)
    assert list(tmp_path.iterdir()) == []


# Corrections


def test_raise_to_minima_and_lower_to_maxima(store: OffsetFolder) -> None:
    offsets = store.open()
    for queue_id, offset in enumerate((2, 7, 12)):
        offsets.set("g", "T", queue_id, offset)
    raised = offsets.raise_to_minima(lambda topic, queue_id: 5 if topic == "T" else None)
    assert [(each.queue_id, each.messages) for each in raised] == [(0, 3)]
    lowered = offsets.lower_to_maxima(lambda topic, queue_id: 10)
    assert lowered == [CommittedOffset("g", "T", 2, 12)]
    assert offsets_of(offsets, "g") == {("T", 0): 5, ("T", 1): 7, ("T", 2): 10}
    offsets.close()
