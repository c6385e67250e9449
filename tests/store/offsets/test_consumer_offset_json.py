"""`consumerOffset.json` next to mqproc's offset file: format, save times, damage."""

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
from tests.store.offsets.conftest import OffsetFolder, offsets_of

NOW_MS = 1_800_000_000_000


# RocketMQ's file


def test_save_writes_rocketmqs_format(store: OffsetFolder) -> None:
    store.write_json('{"dataVersion":{"counter":7},"theirs":{"a":[1]},"offsetTable":{"T@g":{0:7,1:8}}}')
    offsets = store.open()
    assert not offsets.unsaved
    offsets.set("g", "A", 3, 1)
    offsets.save(NOW_MS)
    assert store.paths.consumer_offsets.read_text() == (
        '{\n\t"dataVersion":{\n\t\t"counter":8,\n\t\t"stateVersion":0,\n\t\t"timestamp":1800000000000\n\t},\n'
        '\t"groupTopicMap":{\n\t\t"g":["A","T"]\n\t},\n'
        '\t"offsetTable":{\n\t\t"A@g":{3:1\n\t\t},\n\t\t"T@g":{0:7,1:8\n\t\t}\n\t},\n'
        '\t"theirs":{"a":[1]}\n}'
    )
    before = store.paths.consumer_offsets.with_name("consumerOffset.json.bak").read_text()
    assert rocketmq_json.parse(before)["dataVersion"] == {"counter": 7}
    offsets.close()


def test_open_brokers_file_loads_offsets(tmp_path: Path) -> None:
    store = OffsetFolder(load_fixture("i_broker", tmp_path).store)
    offsets = store.open()
    assert offsets.groups() == ["CID_RMQ_SYS_TRANS", "cg_all_LifeTopic", "cg_tagA_LifeTopic"]
    assert offsets_of(offsets, "cg_all_LifeTopic") == {
        ("%RETRY%cg_all_LifeTopic", 0): 8,
        ("LifeTopic", 0): 24,
        ("LifeTopic", 1): 16,
        ("LifeTopic", 2): 15,
        ("LifeTopic", 3): 16,
    }
    before = store.json()
    offsets.set("CID_RMQ_SYS_TRANS", "RMQ_SYS_TRANS_HALF_TOPIC", 0, 22)
    offsets.save(NOW_MS)
    assert store.json() == before | {("CID_RMQ_SYS_TRANS", "RMQ_SYS_TRANS_HALF_TOPIC", 0): 22}
    offsets.close()


def test_save_when_due_every_5_seconds_and_only_if_changed(store: OffsetFolder) -> None:
    offsets = store.open()
    offsets.set("g", "T", 0, 1)
    assert offsets.save_when_due(100, NOW_MS, 0, 0)
    offsets.set("g", "T", 0, 2)
    assert not offsets.save_when_due(100 + SAVE_INTERVAL_NS - 1, NOW_MS, 0, 0)
    assert offsets.save_when_due(100 + SAVE_INTERVAL_NS, NOW_MS, 0, 0)
    assert store.json() == {("g", "T", 0): 2}
    version = rocketmq_json.parse(store.paths.consumer_offsets.read_text())["dataVersion"]["counter"]
    assert not offsets.save_when_due(100 + 9 * SAVE_INTERVAL_NS, NOW_MS, 0, 0)
    offsets.save(NOW_MS)
    assert rocketmq_json.parse(store.paths.consumer_offsets.read_text())["dataVersion"]["counter"] == version == 2
    offsets.close()


def test_save_when_due_waits_for_durable_log_of_its_snapshot(store: OffsetFolder) -> None:
    offsets = store.open()
    offsets.set("g", "T", 0, 1)
    assert not offsets.save_when_due(100, NOW_MS, 5000, 4000)
    for offset, durable in ((2, 4200), (3, 4999)):
        offsets.set("g", "T", 0, offset)
        assert not offsets.save_when_due(100 + offset, NOW_MS, durable + 1000, durable)
        assert store.json() == {}, "the messages before offset 1 may not be on disk"
    assert offsets.save_when_due(200, NOW_MS, 6000, 5000)
    assert store.json() == {("g", "T", 0): 1}, "the messages before offset 3 may not be on disk"
    assert offsets.unsaved
    assert not offsets.save_when_due(99 + SAVE_INTERVAL_NS, NOW_MS, 7000, 7000)
    assert offsets.save_when_due(100 + SAVE_INTERVAL_NS, NOW_MS, 7000, 7000)
    assert store.json() == {("g", "T", 0): 3}
    assert not offsets.unsaved
    offsets.close()


def test_save_discards_pending_older_snapshot(store: OffsetFolder) -> None:
    offsets = store.open()
    offsets.set("g", "T", 0, 1)
    assert not offsets.save_when_due(100, NOW_MS, 5000, 4000)
    offsets.set("g", "T", 0, 0)
    offsets.save(NOW_MS)
    assert not offsets.save_when_due(200, NOW_MS, 5000, 5000)
    assert store.json() == {("g", "T", 0): 0}
    offsets.close()


def test_save_disk_full_is_reported_and_retried(store: OffsetFolder) -> None:
    class FullIO(StoreIO):
        full = True

        def pwrite(self, fd: int, data: Any, offset: int) -> None:
            if self.full and self.path_of(fd).endswith("consumerOffset.json.tmp"):
                raise OSError(28, "No space left on device")
            super().pwrite(fd, data, offset)

    io = FullIO()
    offsets = store.open(io=io)
    offsets.set("g", "T", 0, 1)
    assert offsets.save_when_due(0, NOW_MS, 0, 0)
    assert store.event_names() == ["offsets of consumer groups cannot be saved yet"]
    assert offsets.unsaved
    io.full = False
    assert offsets.save_when_due(1_000_000_000, NOW_MS, 0, 0)
    assert store.json() == {("g", "T", 0): 1}
    offsets.close()


def test_save_failed_sync_raises_once(store: OffsetFolder) -> None:
    class BrokenIO(StoreIO):
        def sync(self, fd: int) -> None:
            raise FailedSyncError(5, "Input/output error", self.path_of(fd))

    offsets = store.open(io=BrokenIO())
    offsets.set("g", "T", 0, 1)
    with pytest.raises(FailedSyncError):
        offsets.save(NOW_MS)
    assert offsets.unsaved
    assert offsets.save_when_due(0, NOW_MS, 0, 0)
    assert not offsets.save_when_due(1 << 50, NOW_MS, 0, 0), "reported once: it is final"
    offsets.close()


# Damage


@pytest.mark.parametrize(
    "text",
    ["{half", '{"offsetTable":[]}', '{"offsetTable":{"T@g":{0:"x"}}}', '{"offsetTable":{"nogroup":{0:1}}}', "[1]"],
)
def test_open_invalid_json_uses_backup_or_quarantines(store: OffsetFolder, text: str) -> None:
    store.write_json(text)
    with pytest.raises(CorruptStoreError, match=r"consumerOffset\.json"):
        committed_offsets(store.io, store.paths)
    copy = store.paths.consumer_offsets.with_name("consumerOffset.json.bak")
    copy.write_text('{"offsetTable":{"T@g":{0:4}}}')
    offsets = store.open()
    assert offsets_of(offsets, "g") == {("T", 0): 4}
    assert store.event_names() == ["consumerOffset.json was read with a remark"]
    offsets.close()
    copy.unlink()
    store.paths.progress.unlink()
    store.events.clear()
    offsets = store.open()
    assert offsets.groups() == []
    assert store.event_names() == ["consumerOffset.json cannot be read"]
    assert (store.paths.quarantine / "config.consumerOffset.json").read_text() == text
    offsets.close()
    store.write_json("{another")
    store.paths.progress.unlink()
    store.open().close()
    kept = {path.name: path.read_text() for path in store.paths.quarantine.iterdir()}
    assert kept == {"config.consumerOffset.json": text, "config.consumerOffset.json.1": "{another"}


def test_save_after_unreadable_json_keeps_backup(store: OffsetFolder) -> None:
    """A power failure between the two renames left the invalid file under its name."""
    store.write_json('{"topicConfigTable":{}}')
    copy = store.paths.consumer_offsets.with_name("consumerOffset.json.bak")
    copy.write_text('{"offsetTable":{"T@g":{0:4}}}')
    offsets = store.open()
    for offset, kept in ((5, 4), (6, 5)):
        offsets.set("g", "T", 0, offset)
        offsets.save(NOW_MS)
        assert rocketmq_json.parse(copy.read_text())["offsetTable"] == {"T@g": {"0": kept}}
    offsets.close()


def test_open_invalid_offsets_are_skipped(store: OffsetFolder) -> None:
    """RocketMQ's offsets may be any 64 bits; recovery lowers those beyond a queue's end."""
    names = ("G" * 300, "T" * 70_000)
    entries = {
        "T@g": f"0:4,1:{(1 << 63) - 1},2:{10**30},3:-1,{1 << 20}:7,{10**30}:7",
        f"T@{names[0]}": "0:7",
        f"{names[1]}@g": "0:7",
    }
    table = ",".join(f'"{name}":{{{pairs}}}' for name, pairs in entries.items())
    store.write_json(f'{{"offsetTable":{{{table}}}}}')
    offsets = store.open()
    assert offsets_of(offsets, "g") == {("T", 0): 4, ("T", 1): layout.OFFSET_MAX, ("T", 2): layout.OFFSET_MAX}
    assert offsets.groups() == ["g"]
    assert [(event, figures["entries"]) for event, figures in store.events] == [("invalid offsets ignored", 5)]
    offsets.lower_to_maxima(lambda _topic, _queue_id: 9)
    offsets.save(NOW_MS)
    assert store.json() == {("g", "T", 0): 4, ("g", "T", 1): 9, ("g", "T", 2): 9}
    offsets.close()


def test_open_invalid_json_with_own_file_keeps_offsets(store: OffsetFolder) -> None:
    offsets = store.open()
    offsets.set("g", "T", 0, 5)
    offsets.save(NOW_MS)
    offsets.close()
    store.write_json("{half")
    store.paths.consumer_offsets.with_name("consumerOffset.json.bak").unlink(missing_ok=True)
    after = store.open()
    assert offsets_of(after, "g") == {("T", 0): 5}
    after.save(NOW_MS)
    assert store.json() == {("g", "T", 0): 5}
    after.close()


def test_open_invalid_own_file_uses_rocketmqs(store: OffsetFolder) -> None:
    store.write_json('{"offsetTable":{"T@g":{0:4}}}')
    store.paths.own.mkdir()
    for content in (b"", b"x" * 5000, bytes(layout.HEADER_SIZE)):
        store.paths.progress.write_bytes(content)
        assert list(committed_offsets(store.io, store.paths)) == [CommittedOffset("g", "T", 0, 4)]
        offsets = store.open()
        assert offsets_of(offsets, "g") == {("T", 0): 4}
        offsets.close()


def test_read_stops_at_torn_block(store: OffsetFolder) -> None:
    offsets = store.open()
    offsets.set("a", "T", 0, 1)
    offsets.set("b", "T", 0, 2)
    offsets.close()
    data = bytearray(store.paths.progress.read_bytes())
    data[data.index(b"bT")] ^= 1
    store.paths.progress.write_bytes(data)
    file = OffsetFile(store.io, store.paths.progress)
    assert list(file.all()) == [CommittedOffset("a", "T", 0, 1)]
    file.close()


def test_committed_offsets_while_file_grows(store: OffsetFolder) -> None:
    offsets = store.open()
    size = os.path.getsize(store.paths.progress)
    for number in range(2000):
        offsets.set(f"group-{number}", "T", 0, number)
    assert os.path.getsize(store.paths.progress) > size
    assert {at.offset for at in committed_offsets(store.io, store.paths)} == set(range(2000))
    offsets.close()
