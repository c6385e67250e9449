"""Recovery of stores with durable marks: the parts it skips and the losses it detects.

Each store is written by the append engine, recovered once (which dispatches everything and moves the marks to the end),
then damaged. No intact record may be lost, each loss is reported, and a second recovery changes nothing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mqproc.config.options import Options
from mqproc.io.store_io import StoreIO
from mqproc.layout import index_file
from mqproc.layout.consume_queue import UNIT_SIZE
from mqproc.paths import StorePaths
from mqproc.store.recovery.recovery import adopt_sizes
from tests.golden.fixtures import load_fixture
from tests.support.store_builders import (
    FIRST_MS,
    FRAMES,
    ITEMS,
    PER_FRAME,
    QUEUE_FILE_BYTES,
    SEGMENT,
    SLOTS,
    StoppedStore,
    assert_whole,
    write_at,
)
from tests.support.store_checks import Killed, RecordingIO, contents


@pytest.fixture
def store(tmp_path: Path) -> StoppedStore:
    return StoppedStore(tmp_path / "store")


# Nothing to do


def test_recovery_after_clean_stop_reads_and_writes_nothing(store: StoppedStore) -> None:
    io = RecordingIO()
    found = store.recover(io=io)
    assert io.lasting_calls == []
    assert "0 records from the durable mark" in found.said_of("log")
    assert found.queues() == store.first.queues()
    assert not [line for line in found.said if line.startswith("recovery: dispatch")]
    assert_whole(store, found)


def test_recovery_after_kill_scans_only_above_marks(store: StoppedStore) -> None:
    store.put()
    found = store.recover(clean=False)
    assert f"{PER_FRAME} records from the durable mark" in found.said_of("log")
    assert f"{PER_FRAME} records and {PER_FRAME} index entries" in found.said_of("dispatch")
    assert_whole(store, found)


def test_recovery_mark_of_another_log_is_ignored(store: StoppedStore) -> None:
    """Another program wrote the log: all of it is scanned, and the loss is reported."""
    store.overwrite(store.offsets[-1] + 20, b"\xff")
    found = store.recover()
    assert "from the beginning 0" in found.said_of("log")
    assert found.end == store.offsets[-1]
    assert found.cuts == [(store.offsets[-1], store.end)]
    store.offsets.pop()
    assert_whole(store, found)


def test_adopted_sizes_survive_a_file_that_retention_deletes(tmp_path: Path) -> None:
    """A reload reads the files of a running group."""

    class Deleting(StoreIO):
        deleted: Path | None = None

        def open(self, path: Path, *, write: bool = False, create: bool = False, mode: int = 0o644) -> int:
            if self.deleted is None and path.parent.name == "index":
                self.deleted = path
                path.unlink()
            return super().open(path, write=write, create=create, mode=mode)

    paths, io = StorePaths(load_fixture("f_batch", tmp_path).store), Deleting()
    said: list[str] = []
    adopted = adopt_sizes(io, paths, Options(), said.append)
    assert io.deleted is not None
    again: list[str] = []
    assert adopted == adopt_sizes(StoreIO(), paths, Options(), again.append)
    assert said == again


# Queues that lost units


def remove_folder(store: StoppedStore) -> None:
    shutil.rmtree(store.root / "consumequeue" / "Second" / "1")


def remove_topic(store: StoppedStore) -> None:
    shutil.rmtree(store.root / "consumequeue" / "Second")


def remove_all(store: StoppedStore) -> None:
    shutil.rmtree(store.root / "consumequeue")


def remove_first_file(store: StoppedStore) -> None:
    store.queue_file("Second", 1).unlink()


def remove_last_file(store: StoppedStore) -> None:
    store.queue_file("Second", 1, QUEUE_FILE_BYTES).unlink()


def zero_the_tail(store: StoppedStore) -> None:
    write_at(store.queue_file("Second", 1, QUEUE_FILE_BYTES), 4 * UNIT_SIZE, bytes(20 * UNIT_SIZE))


def garbage_in_the_tail(store: StoppedStore) -> None:
    maximum = store.first.queues()["Second", 1][1]
    place = (maximum - 2) * UNIT_SIZE - QUEUE_FILE_BYTES
    write_at(store.queue_file("Second", 1, QUEUE_FILE_BYTES), place, bytes(range(100, 140)))


def last_unit_of_another_queue(store: StoppedStore) -> None:
    maximum = store.first.queues()["Second", 1][1]
    other = store.queue_file("Second", 0, QUEUE_FILE_BYTES).read_bytes()
    place = (maximum - 1) * UNIT_SIZE - QUEUE_FILE_BYTES
    write_at(store.queue_file("Second", 1, QUEUE_FILE_BYTES), place, other[place : place + UNIT_SIZE])


def units_behind_the_end(store: StoppedStore) -> None:
    data = store.queue_file("Second", 1).read_bytes()[:UNIT_SIZE]
    maximum = store.first.queues()["Second", 1][1]
    write_at(store.queue_file("Second", 1, QUEUE_FILE_BYTES), maximum * UNIT_SIZE - QUEUE_FILE_BYTES, data)


def shorten_first_file(store: StoppedStore) -> None:
    os.truncate(store.queue_file("Second", 1), 5 * UNIT_SIZE + 7)


def cut_a_unit_in_two(store: StoppedStore) -> None:
    """The rest of the file implies another size."""
    os.truncate(store.queue_file("Second", 1), 5 * UNIT_SIZE + 11)


def empty_first_file(store: StoppedStore) -> None:
    os.truncate(store.queue_file("Second", 1), 0)


def lengthen_first_file(store: StoppedStore) -> None:
    with store.queue_file("Second", 1).open("ab") as file:
        file.write(b"\xee" * 400)


def folder_in_place_of_a_file(store: StoppedStore) -> None:
    path = store.queue_file("Second", 1)
    path.unlink()
    path.mkdir()
    (path / "precious").write_text("kept")


QUEUE_LOSSES = [
    remove_folder,
    remove_topic,
    remove_all,
    remove_first_file,
    remove_last_file,
    zero_the_tail,
    garbage_in_the_tail,
    last_unit_of_another_queue,
    units_behind_the_end,
    shorten_first_file,
    cut_a_unit_in_two,
    empty_first_file,
    lengthen_first_file,
    folder_in_place_of_a_file,
]


@pytest.mark.parametrize("clean", [True, False], ids=["clean", "killed"])
@pytest.mark.parametrize("harm", QUEUE_LOSSES)
def test_queue_with_lost_units_is_rebuilt(
    harm: Callable[[StoppedStore], None], clean: bool, store: StoppedStore
) -> None:
    assert store.first.queues()["Second", 1][1] > QUEUE_FILE_BYTES // UNIT_SIZE
    whole = {name: data for name, data in contents(store.root).items() if name.startswith("consumequeue")}
    harm(store)
    if not clean:
        store.put()
    found = store.recover(clean=clean)
    assert_whole(store, found)
    if clean:
        after = {name: data for name, data in contents(store.root).items() if name.startswith("consumequeue")}
        assert after == whole
        assert "records from the durable mark" in found.said_of("log")


@pytest.mark.parametrize("harm", [remove_folder, remove_first_file, remove_last_file])
def test_queue_with_interrupted_rebuild_is_rebuilt(harm: Callable[[StoppedStore], None], tmp_path: Path) -> None:
    """After a kill the files have their full lengths and the last unit, with zeros before it."""
    store = StoppedStore(tmp_path / "store")
    whole = contents(store.root)
    harm(store)
    harmed = tmp_path / "harmed"
    shutil.copytree(store.root, harmed)
    recording = RecordingIO()
    store.recover(io=recording)
    for number, call in enumerate(recording.calls, 1):
        if "consumequeue/Second" not in call:
            continue
        shutil.rmtree(store.root)
        shutil.copytree(harmed, store.root)
        with pytest.raises(Killed):
            store.recover(io=RecordingIO(number))
        store.recover(clean=False)
        after = contents(store.root)
        changed = {name for name in whole.keys() | after.keys() if whole.get(name) != after.get(name)}
        assert changed <= {"mqproc/marks/consumequeue"}, call


def kill_as_it_ends(store: StoppedStore) -> None:
    """Kill recovery after all writes and before the syncs."""
    harmed = store.root.with_name("harmed")
    shutil.copytree(store.root, harmed)
    recording = RecordingIO()
    store.recover(io=recording)
    place = [call.split("/")[-1] for call in recording.calls].index("queues")
    shutil.rmtree(store.root)
    harmed.rename(store.root)
    with pytest.raises(Killed, match="rename"):
        store.recover(io=RecordingIO(place + 1))


def test_rebuilt_queue_losing_unsynced_pages_is_rebuilt(store: StoppedStore) -> None:
    """A power failure may keep the page of a queue's last unit, and none before it."""
    whole = {name: data for name, data in contents(store.root).items() if name.startswith("consumequeue")}
    remove_folder(store)
    kill_as_it_ends(store)
    write_at(store.queue_file("Second", 1), 3 * UNIT_SIZE, bytes(5 * UNIT_SIZE))
    assert_whole(store, store.recover(clean=False))
    assert {name: data for name, data in contents(store.root).items() if name.startswith("consumequeue")} == whole


def test_recovery_without_queue_table_compares_every_unit(store: StoppedStore) -> None:
    (store.root / "mqproc" / "queues").unlink()
    remove_folder(store)
    found = store.recover()
    assert "to be compared with the log" in found.said_of("queues")
    assert_whole(store, found)


@pytest.mark.parametrize(
    "name",
    ["queues", "opened.json", "damage.json", "progress", "topics.journal", "retention.json", "unconsumed.json"],
)
def test_folder_in_place_of_own_file_is_quarantined(name: str, store: StoppedStore) -> None:
    path = store.root / "mqproc" / name
    path.unlink(missing_ok=True)
    path.mkdir()
    (path / "precious").write_text("kept")
    found = store.recover()
    assert not path.is_dir()
    assert (store.root / "mqproc" / "aside" / f"mqproc.{name}" / "precious").read_text() == "kept"
    assert any(f"{path}: folder, moved to" in line for line in found.said)
    assert_whole(store, found)


def test_recovery_invalid_queue_table_is_ignored(store: StoppedStore) -> None:
    write_at(store.root / "mqproc" / "queues", 2 * 8, (1 << 40).to_bytes(8, "little"))
    remove_folder(store)
    assert_whole(store, store.recover())


def test_queue_with_all_records_expired_keeps_its_end(tmp_path: Path) -> None:
    """Its folder and all its records in the log are missing; no offset is reused."""
    store = StoppedStore(tmp_path / "store")
    bounds = store.first.queues()
    for start in (0, SEGMENT):
        store.segment(start).unlink()
    shutil.rmtree(store.root / "consumequeue" / "First")
    found = store.recover()
    assert found.begin == 2 * SEGMENT
    assert {queue: ends[1] for queue, ends in found.queues().items()} == {q: ends[1] for q, ends in bounds.items()}


def test_queue_end_comes_from_log_not_from_empty_file(tmp_path: Path) -> None:
    """A power failure removed the first files and left one whose records are gone too."""
    store = StoppedStore(tmp_path / "store")
    for name in ("commitlog", "consumequeue", "index"):
        (store.root / "mqproc" / "marks" / name).unlink()
    (store.root / "mqproc" / "queues").unlink()
    for start in (0, QUEUE_FILE_BYTES):
        store.queue_file("First", 0, start).unlink()
    store.queue_file("First", 0, 5 * QUEUE_FILE_BYTES).write_bytes(bytes(QUEUE_FILE_BYTES))
    assert_whole(store, store.recover(clean=False))


# Index


def remove_index(store: StoppedStore) -> None:
    shutil.rmtree(store.root / "index")


def remove_index_file(which: int) -> Callable[[StoppedStore], None]:
    def remove(store: StoppedStore) -> None:
        store.index_files()[which].unlink()

    remove.__name__ = f"remove_index_file_{which}"
    return remove


def garble_newest_header(store: StoppedStore) -> None:
    write_at(store.index_files()[-1], index_file.END_PHYSICAL_OFFSET, b"\x01")


def zero_newest_items(store: StoppedStore) -> None:
    path = store.index_files()[-1]
    size = path.stat().st_size - index_file.items_start(SLOTS)
    write_at(path, index_file.items_start(SLOTS) + 40, bytes(size - 40))


def shorten_an_index_file(store: StoppedStore) -> None:
    os.truncate(store.index_files()[0], 100)


def empty_newest_index_file(store: StoppedStore) -> None:
    os.truncate(store.index_files()[-1], 0)


def leave_a_file_half_full_and_garble_the_next(store: StoppedStore) -> None:
    """The newest file's first item seems to be from the beginning of the log."""
    half_full, newest = store.index_files()[-2:]
    write_at(half_full, index_file.ITEM_COUNT, (ITEMS // 2).to_bytes(4, "big"))
    write_at(newest, index_file.ITEM_COUNT, (index_file.FIRST_ITEM).to_bytes(4, "big"))
    write_at(newest, index_file.item_offset(SLOTS, index_file.FIRST_ITEM), bytes(index_file.ITEM_SIZE - 1) + b"\x01")


INDEX_LOSSES = [
    remove_index,
    remove_index_file(0),
    remove_index_file(1),
    remove_index_file(-1),
    garble_newest_header,
    zero_newest_items,
    shorten_an_index_file,
    empty_newest_index_file,
    leave_a_file_half_full_and_garble_the_next,
]


@pytest.mark.parametrize("harm", [remove_index, remove_index_file(0)])
def test_rebuilt_index_losing_unsynced_pages_is_rebuilt(
    harm: Callable[[StoppedStore], None], store: StoppedStore
) -> None:
    """A power failure may keep the page of a file's header, and none of its items."""
    harm(store)
    kill_as_it_ends(store)
    place = index_file.item_offset(SLOTS, ITEMS // 2)
    write_at(store.index_files()[0], place, bytes(20 * index_file.ITEM_SIZE))
    assert_whole(store, store.recover(clean=False))


@pytest.mark.parametrize("clean", [True, False], ids=["clean", "killed"])
@pytest.mark.parametrize("harm", INDEX_LOSSES, ids=lambda harm: harm.__name__)
def test_index_with_lost_entries_is_rebuilt(harm: Callable[[StoppedStore], None], clean: bool, tmp_path: Path) -> None:
    store = StoppedStore(tmp_path / "store")
    for _ in range(FRAMES):
        store.put()
    store.recover(clean=False)
    assert len(store.index_files()) >= 3
    harm(store)
    found = store.recover(clean=clean)
    assert_whole(store, found)


def test_index_records_without_keys_between_files_are_no_loss(tmp_path: Path) -> None:
    store = StoppedStore(tmp_path / "store")
    offsets = store.engine.append("First", [b"no key"] * 100, FIRST_MS + 5000, queues=4)
    store.put()
    store.recover(clean=False)
    io = RecordingIO()
    store.recover(io=io)
    assert io.lasting_calls == []
    assert len(offsets) == 100


def test_index_files_of_other_sizes_keep_them(store: StoppedStore) -> None:
    found = store.recover(max_hash_slot_num=60, max_index_num=500)
    assert (found.options.max_hash_slot_num, found.options.max_index_num) == (SLOTS, 400)
    assert any("max_hash_slot_num: the store's files have 50" in line for line in found.said)
    assert_whole(store, found)


# Records that lost their own CRC


def lose_crc(store: StoppedStore) -> None:
    """Tear the last record's properties, including the CRC of the whole record."""
    store.overwrite(store.end - 30, b"?" * 30)


def test_record_above_mark_without_its_crc_is_torn(store: StoppedStore) -> None:
    """Its body is intact: it reads as a record without a CRC, with wrong properties."""
    store.put()
    lose_crc(store)
    found = store.recover(clean=False)
    assert found.end == store.offsets[-1]
    assert "bad property CRC" in found.said_of("log")
    store.offsets.pop()
    assert_whole(store, found)


def test_records_without_crc_stay_if_last_run_wrote_none(tmp_path: Path) -> None:
    """This run's options do not matter."""
    store = StoppedStore(tmp_path / "store", enabled_append_prop_crc=False)
    store.put()
    found = store.recover(clean=False, enabled_append_prop_crc=True)
    assert found.end == store.end
    assert f"{PER_FRAME} records from the durable mark" in found.said_of("log")
    assert found.dispatched == found.end


def test_record_crcs_are_required_once_written(tmp_path: Path) -> None:
    store = StoppedStore(tmp_path / "store", enabled_append_prop_crc=False)
    store.recover(enabled_append_prop_crc=True)
    store.put()
    found = store.recover(clean=False, enabled_append_prop_crc=True)
    assert found.end == store.offsets[-PER_FRAME], "records that no run has written so"
