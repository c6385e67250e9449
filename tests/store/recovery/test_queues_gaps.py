"""A record with a wrong, too high queue offset leaves a gap, which later records fill."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import numpy as np
import pytest

from mqproc import StoreReader
from mqproc.io.store_io import StoreIO
from mqproc.layout import queue_table as table_layout
from mqproc.layout import record
from mqproc.layout.consume_queue import FILLER_SIZES
from mqproc.store.consumequeue.bounds import as_units
from mqproc.store.consumequeue.files import ConsumeQueueFiles
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.dispatch import QueueGap, without
from mqproc.store.recovery import queues as queue_recovery
from tests.support.command_line import call
from tests.support.store_builders import FIRST_MS, QUEUE_FILE_BYTES, SEGMENT, StoppedStore, write_at
from tests.support.store_checks import Recovered, Row, damage_in, flags_of


def offsets_in_queues(found: Recovered) -> set[int]:
    """Physical offsets of the queues' units."""
    units = found.units_of(found.queues()).values()
    return {offset for of_queue in units for offset, _size, _code in of_queue.values()}


def raise_queue_offset(store: StoppedStore, at: int, by: int) -> None:
    """Raise the queue offset of the record at a physical offset."""
    place = at % SEGMENT + record.QUEUE_OFFSET
    queue_offset = int.from_bytes(store.segment(at).read_bytes()[place : place + 8], "big")
    write_at(store.segment(at), place, (queue_offset + by).to_bytes(8, "big"))


@pytest.mark.parametrize("too_high", [3, 100])
def test_records_after_gap_keep_their_units(tmp_path: Path, too_high: int) -> None:
    store = StoppedStore(tmp_path / "store", enabled_append_prop_crc=False)
    number = len(store.offsets) // 2
    raise_queue_offset(store, store.offsets[number], too_high)
    # Like a store of RocketMQ that is opened for the first time.
    shutil.rmtree(store.root / "mqproc")
    # Another record may have the same queue offset.
    assert len(offsets_in_queues(store.recover()) & set(store.offsets)) >= len(store.offsets) - 1


def test_queue_lost_is_rebuilt_with_its_gaps(tmp_path: Path) -> None:
    """Zeros there would end the queue for readers."""
    store = StoppedStore(tmp_path / "store", enabled_append_prop_crc=False)
    raise_queue_offset(store, store.offsets[-1], 3)
    shutil.rmtree(store.root / "mqproc")
    store.recover()
    with StoreReader(store.root) as reader:
        last = reader.look(store.offsets[-1])
    assert last is not None
    folder = store.queue_file(last.topic, last.queue_id).parent
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    shutil.rmtree(folder)
    store.recover()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    with StoreReader(store.root) as reader:
        assert reader.pull(last.topic, last.queue_id, last.queue_offset, 1).messages == [last]
        assert reader.max_offset(last.topic, last.queue_id) == last.queue_offset + 1


def test_first_file_lost_is_rebuilt_with_its_gaps(tmp_path: Path) -> None:
    """Zeros are damage for `store verify`, and the end of the queue for RocketMQ."""
    store = StoppedStore(tmp_path / "store", enabled_append_prop_crc=False)
    with StoreReader(store.root) as reader:
        own = [message for message in map(reader.look, store.offsets) if message is not None]
    own = [message for message in own if (message.topic, message.queue_id) == ("Second", 1)]
    for message in own[5:]:
        raise_queue_offset(store, message.physical_offset, 3)
    shutil.rmtree(store.root / "mqproc")
    store.recover()
    first = store.queue_file("Second", 1)
    folder, before = first.parent, first.read_bytes()
    assert len(list(folder.iterdir())) > 1
    first.unlink()
    store.recover()
    assert first.read_bytes() == before
    with StoreReader(store.root) as reader:
        passed = reader.pull("Second", 1, 5, 8)
        assert passed.next_offset == 8
        assert reader.pull("Second", 1, 8, 1).messages == [reader.look(own[5].physical_offset)]


def test_queue_expired_without_first_file_keeps_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table may be older than retention after a power failure. The gap is too long to fill."""
    monkeypatch.setattr(queue_recovery, "FILL_MAX", QUEUE_FILE_BYTES // 20 - 1)
    store = StoppedStore(tmp_path / "store")
    end = store.recover().queues()["Second", 1][1]
    assert end > QUEUE_FILE_BYTES // 20
    expired = store.end
    while store.end < expired + 2 * SEGMENT:
        store.engine.append("Fourth", [bytes(1000)] * 16)
    store.recover()
    for start in range(0, expired, SEGMENT):
        store.segment(start).unlink()
    store.queue_file("Second", 1).unlink()
    for _ in range(2):
        assert store.recover(clean=False).queues()["Second", 1] == (end, end)


def test_fillers_without_hole_do_not_point_beyond_log(tmp_path: Path) -> None:
    """RocketMQ cuts a queue at the first unit that points beyond the log, at each start."""
    store = StoppedStore(tmp_path / "store", enabled_append_prop_crc=False, mapped_file_size_commit_log=16 * SEGMENT)
    place = store.offsets[len(store.offsets) // 2] + record.QUEUE_OFFSET
    segment = store.segment(0)
    queue_offset = int.from_bytes(segment.read_bytes()[place : place + 8], "big")
    write_at(segment, place, (queue_offset + 100).to_bytes(8, "big"))
    shutil.rmtree(store.root / "mqproc")
    found = store.recover()
    files = ConsumeQueueFiles(StoreIO(), found.paths.consume_queue, found.options.consume_queue_file_bytes)
    units = [as_units(files.raw_units(*queue, 0, stop)) for queue, (_start, stop) in found.queues().items()]
    files.close()
    assert sum(int(np.count_nonzero(np.isin(of_queue["size"], FILLER_SIZES))) for of_queue in units) > 0
    assert max(int(of_queue["physical_offset"].max()) for of_queue in units) < found.end


@pytest.mark.parametrize("number", [320, 639], ids=["amid others", "the last"])
def test_single_record_far_beyond_queue_end_is_ignored(tmp_path: Path, number: int) -> None:
    """As the queue's end, with its own file, it would hide all units before missing files."""
    store = StoppedStore(tmp_path / "store", enabled_append_prop_crc=False)
    before = store.first.queues()
    at = store.offsets[number]
    raise_queue_offset(store, at, 1 << 21)
    shutil.rmtree(store.root / "mqproc")
    for _ in range(2):
        found = store.recover()
        assert offsets_in_queues(found) & set(store.offsets) == {*store.offsets} - {at}
        ends = {queue: end for queue, (_start, end) in found.queues().items()}
        lowered = {queue: end for queue, (_start, end) in before.items() if ends[queue] != end}
        assert [end - ends[queue] for queue, end in lowered.items()] == [1] * (number == 639)
    call("store", "repair", store.root, "--execute", *flags_of(store.engine.options))
    with StoreReader(store.root) as reader:
        assert {message.physical_offset for message in reader.messages()} == {*store.offsets} - {at}
    # No repair builds a unit of it or gives its offset to another record.
    again = call("store", "repair", store.root, "--execute", "--json", *flags_of(store.engine.options)).json
    assert (again["executed"], again["changes"]) == (False, [])
    assert damage_in(again) == [Row("queue_offset_too_high", f"commitlog/{at - at % SEGMENT:020d}", at % SEGMENT, at)]


@pytest.mark.parametrize(("number", "queue"), [(320, ("Third", 0)), (639, ("First", 3))], ids=["amid others", "last"])
def test_record_far_beyond_end_is_ignored_in_rebuild(tmp_path: Path, number: int, queue: tuple[str, int]) -> None:
    """The start reads no other record below the marks."""
    store = StoppedStore(tmp_path / "store", enabled_append_prop_crc=False)
    at = store.offsets[number]
    raise_queue_offset(store, at, 1 << 21)
    shutil.rmtree(store.root / "mqproc")
    before = store.recover().queues()
    store.queue_file(*queue).unlink()
    found = store.recover(clean=False)
    assert found.queues() == before
    assert offsets_in_queues(found) & set(store.offsets) == {*store.offsets} - {at}


def test_record_far_beyond_end_is_ignored_with_lost_units(tmp_path: Path) -> None:
    store = StoppedStore(tmp_path / "store", enabled_append_prop_crc=False)
    at = store.offsets[624]
    raise_queue_offset(store, at, 1 << 21)
    shutil.rmtree(store.root / "mqproc")
    store.recover()
    store.offsets += store.engine.append("First", [b"the last one"], FIRST_MS, queues=4).tolist()
    end = publish_one(store, "First", 0)
    store.queue_file("First", 0, QUEUE_FILE_BYTES).unlink()
    found = store.recover(clean=False)
    assert found.queues()["First", 0] == (0, end)
    assert offsets_in_queues(found) & set(store.offsets) == {*store.offsets} - {at}


@pytest.mark.parametrize("exponents", [(21, 24), (24, 21)])
def test_two_records_far_beyond_queue_end_are_ignored(tmp_path: Path, exponents: tuple[int, int]) -> None:
    store = StoppedStore(tmp_path / "store", enabled_append_prop_crc=False)
    harmed = [store.offsets[number] for number in (320, 324)]
    for at, exponent in zip(harmed, exponents, strict=True):
        raise_queue_offset(store, at, 1 << exponent)
    shutil.rmtree(store.root / "mqproc")
    assert offsets_in_queues(store.recover()) & set(store.offsets) == {*store.offsets} - {*harmed}


def test_record_beyond_end_within_log_size_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue's only message above the marks, after a kill: the lost units are rebuilt."""
    monkeypatch.setattr(queue_recovery, "FILL_MAX", 8)
    store = StoppedStore(tmp_path / "store")
    store.offsets += store.engine.append("First", [b"the last one"], FIRST_MS, queues=4).tolist()
    end = publish_one(store, "First", 0)
    store.queue_file("First", 0, QUEUE_FILE_BYTES).unlink()
    found = store.recover(clean=False)
    assert found.queues()["First", 0] == (0, end)
    assert set(store.offsets) <= offsets_in_queues(found)


def publish_one(store: StoppedStore, topic: str, queue_id: int) -> int:
    """Publish the log's last message in the queue table like the dispatcher; return the new end."""
    with contextlib.closing(QueueTable(StoreIO(), store.engine.paths.queues, write=True)) as table:
        number = table.find(topic, queue_id)
        end = table.max_offset(number) + 1
        table.store(number, table_layout.MAX_OFFSET, end)
        table.store(number, table_layout.LAST_PHYSICAL_END, store.end)
    return end


def test_ignored_record_is_reported_with_its_place(tmp_path: Path) -> None:
    store = StoppedStore(tmp_path / "store", enabled_append_prop_crc=False)
    at = store.offsets[-1]
    write_at(store.segment(at), at % SEGMENT + record.QUEUE_OFFSET, (1 << 30).to_bytes(8, "big"))
    shutil.rmtree(store.root / "mqproc")
    (line,) = [line for line in store.recover().said if f"{at:,}" in line]
    said = f"recovery: the record at {at:,} has queue offset 1,073,741,824 of First queue 3, which ends at"
    assert line.startswith(said)


def test_gap_shrinks_by_later_records() -> None:
    gaps = [QueueGap(0, 10, 20, 1, 2), QueueGap(1, 10, 20, 3, 4)]
    assert list(without(gaps, 0, 12, 14)) == [QueueGap(0, 10, 12, 1, 2), QueueGap(0, 14, 20, 1, 2), gaps[1]]
    assert list(without(gaps, 1, 5, 12)) == [gaps[0], QueueGap(1, 12, 20, 3, 4)]
    assert list(without(gaps, 1, 10, 20)) == [gaps[0]]
    assert list(without(gaps, 0, 20, 30)) == gaps
    assert list(without(gaps, 2, 10, 20)) == gaps
