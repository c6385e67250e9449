"""`consumerOffset.json` beside our own progress file: written as RocketMQ does and when, and what damage costs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from mqproc.errors import CorruptStoreError
from mqproc.io.store_io import FailedSyncError, StoreIO
from mqproc.layout import committed_offsets as layout
from mqproc.store import rocketmq_json
from mqproc.store.offsets.consumer_offset_json import CommittedOffset
from mqproc.store.offsets.file import OffsetFile
from mqproc.store.offsets.offset_store import SAVE_INTERVAL_NS, committed_offsets
from tests.golden.fixtures import load_fixture
from tests.store.groups.progress_store import Store, as_dict

NOW_MS = 1_800_000_000_000


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


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
    assert [event for event, _ in store.told] == ["offsets of consumer groups cannot be saved yet"]
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
        committed_offsets(store.io, store.paths)
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
    assert (store.paths.quarantine / "config.consumerOffset.json").read_text() == text
    progress.close()
    store.write_json("{another")
    store.paths.progress.unlink()
    store.open().close()
    kept = {path.name: path.read_text() for path in store.paths.quarantine.iterdir()}
    assert kept == {"config.consumerOffset.json": text, "config.consumerOffset.json.1": "{another"}


def test_what_could_not_be_read_does_not_replace_the_copy(store: Store) -> None:
    """A loss of power between the two renames left it as both."""
    store.write_json('{"topicConfigTable":{}}')
    copy = store.paths.consumer_offsets.with_name("consumerOffset.json.bak")
    copy.write_text('{"offsetTable":{"T@g":{0:4}}}')
    progress = store.open()
    for offset, kept in ((5, 4), (6, 5)):
        progress.set("g", "T", 0, offset)
        progress.save(NOW_MS)
        assert rocketmq_json.parse(copy.read_text())["offsetTable"] == {"T@g": {"0": kept}}
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
    assert [(event, figures["entries"]) for event, figures in store.told] == [("invalid offsets ignored", 5)]
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
        assert list(committed_offsets(store.io, store.paths)) == [CommittedOffset("g", "T", 0, 4)]
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
    file = OffsetFile(store.io, store.paths.progress)
    assert list(file.all()) == [CommittedOffset("a", "T", 0, 1)]
    file.close()


def test_readers_see_what_is_committed_while_the_file_grows(store: Store) -> None:
    progress = store.open()
    size = os.path.getsize(store.paths.progress)
    for number in range(2000):
        progress.set(f"group-{number}", "T", 0, number)
    assert os.path.getsize(store.paths.progress) > size
    assert {at.offset for at in committed_offsets(store.io, store.paths)} == set(range(2000))
    progress.close()
