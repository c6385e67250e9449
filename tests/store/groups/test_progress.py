"""Progress of groups: a word a commit that outlives a kill, RocketMQ's file beside it, and which of the two counts.

A kill is an object that is let go without `save`; a start after it takes everything over from the files.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from mqproc.errors import CorruptStoreError, OffsetOverflowError, StaleOffsetError
from mqproc.io import FailedSyncError, StoreIO
from mqproc.layout import progress as layout
from mqproc.paths import StorePaths
from mqproc.store import rocketmq_json
from mqproc.store.groups import offsets_json, progress_file
from mqproc.store.groups.offsets_json import Progress
from mqproc.store.groups.progress import SAVE_INTERVAL_NS, GroupProgress, all_progress
from mqproc.store.groups.progress_file import ProgressFile
from tests.golden.fixtures import load_fixture

NOW_MS = 1_800_000_000_000


class Store:
    """A store's folder and who writes its progress."""

    def __init__(self, root: Path) -> None:
        self.io = StoreIO()
        self.paths = StorePaths(root)
        self.told: list[tuple[str, dict[str, Any]]] = []

    def open(self, *, successor: bool = False, io: StoreIO | None = None) -> GroupProgress:
        io = io or self.io
        return GroupProgress(io, self.paths, io, self.tell, successor=successor)

    def tell(self, event: str, **figures: Any) -> None:
        self.told.append((event, figures))

    def json(self) -> dict[tuple[str, str, int], int]:
        """What RocketMQ would read."""
        found = offsets_json.load(self.io, self.paths).progress
        return {(at.group, at.topic, at.queue_id): at.offset for at in found}

    def write_json(self, text: str) -> None:
        self.paths.config.mkdir(exist_ok=True, parents=True)
        self.paths.consumer_offsets.write_text(text)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def as_dict(progress: GroupProgress, group: str) -> dict[tuple[str, int], int]:
    return {(at.topic, at.queue_id): at.offset for at in progress.of(group)}


# Commits


def test_a_commit_never_goes_back_and_never_beyond_the_queue(store: Store) -> None:
    progress = store.open()
    assert progress.offset("g", "T", 0) is None
    progress.commit("g", "T", 0, 5, 10)
    with pytest.raises(StaleOffsetError, match="stands at 5"):
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
    assert {(at.group, at.topic, at.queue_id): at.offset for at in all_progress(store.io, store.paths)} == wanted


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
    progress.forget("g")
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
    monkeypatch.setattr("mqproc.store.groups.progress.boot_id", lambda: (1, 2))
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

    assert list(all_progress(SavingIO(), store.paths)) == [Progress("g", "T", 0, 9)]
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
    first = progress.take_epoch()
    progress.close()
    after = store.open()
    assert after.take_epoch() > first
    assert after.take_epoch(above=1000) == 1001
    assert after.take_epoch() == 1002
    after.close()


# RocketMQ's file


def test_the_file_is_written_as_rocketmq_writes_it(store: Store) -> None:
    store.write_json('{"dataVersion":{"counter":7},"theirs":{"a":[1]},"offsetTable":{"T@g":{0:7,1:8}}}')
    progress = store.open()
    assert not progress.unsaved
    progress.set("g", "A", 3, 1)
    progress.save(NOW_MS)
    assert store.paths.consumer_offsets.read_text() == (
        '{\n\t"dataVersion":{\n\t\t"counter":8,\n\t\t"stateVersion":0,\n\t\t"timestamp":1800000000000\n\t},\n'
        '\t"groupTopicMap":{\n\t\t"g":["A","T"]\n\t},\n'
        '\t"offsetTable":{\n\t\t"A@g":{3:1\n\t\t},\n\t\t"T@g":{0:7,1:8\n\t\t}\n\t},\n'
        '\t"theirs":{"a":[1]}\n}'
    )
    before = store.paths.consumer_offsets.with_name("consumerOffset.json.bak").read_text()
    assert rocketmq_json.parse(before)["dataVersion"] == {"counter": 7}
    progress.close()


def test_progress_of_a_real_broker_is_taken_over(tmp_path: Path) -> None:
    store = Store(load_fixture("i_broker", tmp_path).store)
    progress = store.open()
    assert progress.groups() == ["CID_RMQ_SYS_TRANS", "cg_all_LifeTopic", "cg_tagA_LifeTopic"]
    assert as_dict(progress, "cg_all_LifeTopic") == {
        ("%RETRY%cg_all_LifeTopic", 0): 8,
        ("LifeTopic", 0): 24,
        ("LifeTopic", 1): 16,
        ("LifeTopic", 2): 15,
        ("LifeTopic", 3): 16,
    }
    before = store.json()
    progress.set("CID_RMQ_SYS_TRANS", "RMQ_SYS_TRANS_HALF_TOPIC", 0, 22)
    progress.save(NOW_MS)
    assert store.json() == before | {("CID_RMQ_SYS_TRANS", "RMQ_SYS_TRANS_HALF_TOPIC", 0): 22}
    progress.close()


def test_the_file_is_saved_every_5_seconds_and_only_when_it_lacks_something(store: Store) -> None:
    progress = store.open()
    progress.set("g", "T", 0, 1)
    assert progress.save_when_due(100, NOW_MS, 0, 0)
    progress.set("g", "T", 0, 2)
    assert not progress.save_when_due(100 + SAVE_INTERVAL_NS - 1, NOW_MS, 0, 0)
    assert progress.save_when_due(100 + SAVE_INTERVAL_NS, NOW_MS, 0, 0)
    assert store.json() == {("g", "T", 0): 2}
    version = rocketmq_json.parse(store.paths.consumer_offsets.read_text())["dataVersion"]["counter"]
    assert not progress.save_when_due(100 + 9 * SAVE_INTERVAL_NS, NOW_MS, 0, 0)
    progress.save(NOW_MS)
    assert rocketmq_json.parse(store.paths.consumer_offsets.read_text())["dataVersion"]["counter"] == version == 2
    progress.close()


def test_under_steady_changes_what_was_known_at_one_moment_is_saved_when_the_log_is_durable_up_to_it(
    store: Store,
) -> None:
    progress = store.open()
    progress.set("g", "T", 0, 1)
    assert not progress.save_when_due(100, NOW_MS, 5000, 4000)
    for offset, durable in ((2, 4200), (3, 4999)):
        progress.set("g", "T", 0, offset)
        assert not progress.save_when_due(100 + offset, NOW_MS, durable + 1000, durable)
        assert store.json() == {}, "what offset 1 rests on may not be on disk"
    assert progress.save_when_due(200, NOW_MS, 6000, 5000)
    assert store.json() == {("g", "T", 0): 1}, "offset 3 may rest on what lies behind"
    assert progress.unsaved
    assert not progress.save_when_due(99 + SAVE_INTERVAL_NS, NOW_MS, 7000, 7000)
    assert progress.save_when_due(100 + SAVE_INTERVAL_NS, NOW_MS, 7000, 7000)
    assert store.json() == {("g", "T", 0): 3}
    assert not progress.unsaved
    progress.close()


def test_what_is_saved_at_once_is_not_replaced_by_what_was_to_be_saved_before(store: Store) -> None:
    progress = store.open()
    progress.set("g", "T", 0, 1)
    assert not progress.save_when_due(100, NOW_MS, 5000, 4000)
    progress.set("g", "T", 0, 0)
    progress.save(NOW_MS)
    assert not progress.save_when_due(200, NOW_MS, 5000, 5000)
    assert store.json() == {("g", "T", 0): 0}
    progress.close()


def test_what_cannot_be_saved_is_told_and_tried_again(store: Store) -> None:
    class FullIO(StoreIO):
        full = True

        def pwrite(self, fd: int, data: Any, offset: int) -> None:
            if self.full and self.path_of(fd).endswith("consumerOffset.json.tmp"):
                raise OSError(28, "No space left on device")
            super().pwrite(fd, data, offset)

    io = FullIO()
    progress = store.open(io=io)
    progress.set("g", "T", 0, 1)
    assert progress.save_when_due(0, NOW_MS, 0, 0)
    assert [event for event, _ in store.told] == ["progress of consumer groups cannot be saved yet"]
    assert progress.unsaved
    io.full = False
    assert progress.save_when_due(1_000_000_000, NOW_MS, 0, 0)
    assert store.json() == {("g", "T", 0): 1}
    progress.close()


def test_a_failed_sync_is_told_upwards(store: Store) -> None:
    class BrokenIO(StoreIO):
        def sync(self, fd: int) -> None:
            raise FailedSyncError(5, "Input/output error", self.path_of(fd))

    progress = store.open(io=BrokenIO())
    progress.set("g", "T", 0, 1)
    with pytest.raises(FailedSyncError):
        progress.save(NOW_MS)
    assert progress.unsaved
    assert progress.save_when_due(0, NOW_MS, 0, 0)
    assert not progress.save_when_due(1 << 50, NOW_MS, 0, 0), "told once: it is final"
    progress.close()


# Damage


@pytest.mark.parametrize(
    "text",
    ["{half", '{"offsetTable":[]}', '{"offsetTable":{"T@g":{0:"x"}}}', '{"offsetTable":{"nogroup":{0:1}}}', "[1]"],
)
def test_garbage_gives_way_to_the_copy_or_is_moved_aside(store: Store, text: str) -> None:
    store.write_json(text)
    with pytest.raises(CorruptStoreError, match=r"consumerOffset\.json"):
        all_progress(store.io, store.paths)
    copy = store.paths.consumer_offsets.with_name("consumerOffset.json.bak")
    copy.write_text('{"offsetTable":{"T@g":{0:4}}}')
    progress = store.open()
    assert as_dict(progress, "g") == {("T", 0): 4}
    assert [event for event, _ in store.told] == ["consumerOffset.json was read with a remark"]
    progress.close()
    copy.unlink()
    store.paths.progress.unlink()
    store.told.clear()
    progress = store.open()
    assert progress.groups() == []
    assert [event for event, _ in store.told] == ["consumerOffset.json cannot be read"]
    assert (store.paths.aside / "consumerOffset.json").read_text() == text
    progress.close()


def test_numbers_that_no_queue_has_cost_nothing_but_themselves(store: Store) -> None:
    """RocketMQ's offsets may be any 64 bits; ones beyond the queue's end are set back to it by recovery."""
    names = ("G" * 300, "T" * 70_000)
    entries = {
        "T@g": f"0:4,1:{(1 << 63) - 1},2:{10**30},3:-1,{1 << 20}:7,{10**30}:7",
        f"T@{names[0]}": "0:7",
        f"{names[1]}@g": "0:7",
    }
    table = ",".join(f'"{name}":{{{pairs}}}' for name, pairs in entries.items())
    store.write_json(f'{{"offsetTable":{{{table}}}}}')
    progress = store.open()
    assert as_dict(progress, "g") == {("T", 0): 4, ("T", 1): layout.OFFSET_MAX, ("T", 2): layout.OFFSET_MAX}
    assert progress.groups() == ["g"]
    assert [(event, figures["entries"]) for event, figures in store.told] == [("progress that no queue can have", 5)]
    progress.lower_to_maxima(lambda _topic, _queue_id: 9)
    progress.save(NOW_MS)
    assert store.json() == {("g", "T", 0): 4, ("g", "T", 1): 9, ("g", "T", 2): 9}
    progress.close()


def test_garbage_beside_our_own_file_loses_nothing(store: Store) -> None:
    progress = store.open()
    progress.set("g", "T", 0, 5)
    progress.save(NOW_MS)
    progress.close()
    store.write_json("{half")
    store.paths.consumer_offsets.with_name("consumerOffset.json.bak").unlink(missing_ok=True)
    after = store.open()
    assert as_dict(after, "g") == {("T", 0): 5}
    after.save(NOW_MS)
    assert store.json() == {("g", "T", 0): 5}
    after.close()


def test_a_progress_file_that_is_none_gives_way_to_rocketmqs(store: Store) -> None:
    store.write_json('{"offsetTable":{"T@g":{0:4}}}')
    store.paths.own.mkdir()
    for content in (b"", b"x" * 5000, bytes(layout.HEADER_SIZE)):
        store.paths.progress.write_bytes(content)
        assert list(all_progress(store.io, store.paths)) == [Progress("g", "T", 0, 4)]
        progress = store.open()
        assert as_dict(progress, "g") == {("T", 0): 4}
        progress.close()


def test_a_block_that_is_torn_ends_what_is_read(store: Store) -> None:
    progress = store.open()
    progress.set("a", "T", 0, 1)
    progress.set("b", "T", 0, 2)
    progress.close()
    data = bytearray(store.paths.progress.read_bytes())
    data[data.index(b"bT")] ^= 1
    store.paths.progress.write_bytes(data)
    file = ProgressFile(store.io, store.paths.progress)
    assert list(file.all()) == [Progress("a", "T", 0, 1)]
    file.close()


def test_readers_see_what_is_committed_while_the_file_grows(store: Store) -> None:
    progress = store.open()
    size = os.path.getsize(store.paths.progress)
    for number in range(2000):
        progress.set(f"group-{number}", "T", 0, number)
    assert os.path.getsize(store.paths.progress) > size
    assert {at.offset for at in all_progress(store.io, store.paths)} == set(range(2000))
    progress.close()


# Corrections


def test_progress_is_raised_to_minima_and_set_back_to_ends(store: Store) -> None:
    progress = store.open()
    for queue_id, offset in enumerate((2, 7, 12)):
        progress.set("g", "T", queue_id, offset)
    raised = progress.raise_to_minima(lambda topic, queue_id: 5 if topic == "T" else None)
    assert [(each.queue_id, each.messages) for each in raised] == [(0, 3)]
    lowered = progress.lower_to_maxima(lambda topic, queue_id: 10)
    assert lowered == [Progress("g", "T", 2, 12)]
    assert as_dict(progress, "g") == {("T", 0): 5, ("T", 1): 7, ("T", 2): 10}
    progress.close()
