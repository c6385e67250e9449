"""Recovery of killed and damaged golden stores keeps intact records and reports lost ones.

The fixtures contain the result of RocketMQ's own recovery. A record that RocketMQ kept must be kept.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import pytest

from mqproc.io.store_io import StoreIO
from mqproc.layout.consume_queue import FILLER_SIZE
from mqproc.layout.record import SYS_FLAG_COMMIT, SYS_FLAG_TRANSACTION_MASK
from mqproc.store.consumequeue.bounds import filler_position
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.cooperative import finish
from mqproc.store.read.queries import StoreQueries
from mqproc.store.read.views import WordsView
from tests.golden.fixtures import GOLDEN, Directory, directories, options_of
from tests.support.command_line import call
from tests.support.store_checks import Killed, RecordingIO, Recovered, contents, recover

SEGMENT = 65536
STORES = [each for each in directories(GOLDEN) if each.damaged or each.name.startswith(("c", "g"))]

# By name of the damage: holes that must be reported, with their kind.
BODY = "bad body CRC"
HOLES = {
    "d07_body_flip_first_file": [(1563, 1696, BODY)],
    "d07_body_flip_last_file": [(264623, 264903, BODY)],
    "d07_body_flip_middle_file": [(133336, 133547, BODY)],
    "d07_body_flip_second_last_file": [(199380, 199662, BODY)],
    "d14_middle_file_gone": [(2 * SEGMENT, 3 * SEGMENT, "missing segment")],
}
# The end of the log where it differs from RocketMQ's: damage cuts nothing, an ended segment stays ended, and without
# any segment no offset is assigned twice.
ENDS = {
    "d07_body_flip_last_file": 290296,
    "d07_body_flip_middle_file": 290296,
    "d07_body_flip_second_last_file": 290296,
    "d12_last_file_gone": 4 * SEGMENT,
    "d16_short_last_file": 290296,
    "d18_stray_file": 290296,
    "d19_commitlog_gone": 5 * SEGMENT,
}
# A closed log that lost its end: (end, end according to its queues).
CUTS = {
    "d12_last_file_gone_clean": [(4 * SEGMENT, 290296)],
    "d15_five_records_zeroed_clean": [(288817, 290296)],
    "d19_commitlog_gone": [(0, 290296)],
}

Record = dict[str, Any]


def damage_name(name: str) -> str:
    """A damage's name without `_clean` or `_abort`."""
    return name.removesuffix("_abort").removesuffix("_clean")


def intact_records(store: Path, records: list[Record]) -> list[Record]:
    """The records whose bytes are all in the store."""

    @functools.lru_cache(None)
    def segment(start: int) -> bytes:
        path = store / "commitlog" / f"{start:020d}"
        return path.read_bytes() if path.is_file() else b""

    found = []
    for record in records:
        start = record["phyOffset"] // SEGMENT * SEGMENT
        at = record["phyOffset"] - start
        data = segment(start)[at : at + record["size"]]
        if hashlib.sha256(data).hexdigest() == record["recordSha256"]:
            found.append(record)
    return found


def takes_a_queue_place(record: Record) -> bool:
    return record["sysFlag"] & SYS_FLAG_TRANSACTION_MASK in (0, SYS_FLAG_COMMIT)


@pytest.fixture(params=STORES, ids=str)
def store(request: pytest.FixtureRequest) -> Directory:
    found: Directory = request.param
    return found


def test_recovery_keeps_all_intact_records(store: Directory, tmp_path: Path) -> None:
    root = store.unpack(tmp_path)
    records = store.undamaged["records"]
    intact = intact_records(root, records)
    found = recover(root, options_of(store.undamaged))
    check_kept(found, store, intact)
    check_queues(found, records, intact)
    check_reading(found, intact)
    check_reported(found, store)


def check_kept(found: Recovered, store: Directory, intact: list[Record]) -> None:
    """Everything that RocketMQ kept is kept; the log ends at the expected offset."""
    expected = store.expected
    if store.damaged and expected["loadReturned"]:
        kept = {record["phyOffset"] for record in intact}
        assert {offset for offset, _size in expected["recordOffsets"]} <= kept
    end = ENDS.get(damage_name(store.name), expected.get("maxPhyOffset"))
    assert found.end == found.dispatched == end
    assert all(found.begin <= record["phyOffset"] < found.end for record in intact)


def check_queues(found: Recovered, records: list[Record], intact: list[Record]) -> None:
    """A queue has its intact records in order; fillers only for lost records before others."""
    placed = [record for record in intact if takes_a_queue_place(record)]
    lost = {
        (record["topic"], record["queueId"], record["queueOffset"]): record["phyOffset"]
        for record in records
        if record not in intact
    }
    for topic, queue_id in found.queues():
        units = found.units(topic, queue_id)
        mine = [record for record in placed if (record["topic"], record["queueId"]) == (topic, queue_id)]
        for record in mine:
            expected = (record["phyOffset"], record["size"], record["dispatchTagsCode"])
            assert units.pop(record["queueOffset"]) == expected, record
        for queue_offset, (physical_offset, size, tags_code) in units.items():
            assert (size, tags_code) == (FILLER_SIZE, 0)
            place = lost[topic, queue_id, queue_offset]
            (hole,) = [hole for hole in found.holes if hole[0] <= place < hole[1]]
            assert physical_offset == filler_position(hole[0], SEGMENT)
    assert {(record["topic"], record["queueId"]) for record in placed} <= set(found.queues())


def check_reading(found: Recovered, intact: list[Record]) -> None:
    """Every intact record is found by its offset, by its unique id and by its keys."""
    table = QueueTable(StoreIO(), found.paths.queues)
    view = WordsView(found.words, table, sync_flush=False)
    reading = StoreQueries(StoreIO(), found.paths, found.options, view)
    try:
        for record in intact:
            data = reading.record_at(record["phyOffset"])
            assert data is not None
            assert hashlib.sha256(data.tobytes()).hexdigest() == record["recordSha256"]
            for key in {record["uniqKey"], *(record["keys"] or "").split(" ")} - {None, ""}:
                check_key(reading, record, key)
    finally:
        reading.close()
        view.close()


def check_key(reading: StoreQueries, record: Record, key: str) -> None:
    answer = finish(reading.query_message(record["topic"], key, 10_000, 0, 1 << 60))
    if record["phyOffset"] not in answer.offsets:
        # An answer has at most 64 messages: ask for the exact time of this record.
        time_ms = record["storeTimestamp"]
        answer = finish(reading.query_message(record["topic"], key, 10_000, time_ms - 1000, time_ms + 1000))
    assert record["phyOffset"] in answer.offsets, (key, record)


def check_reported(found: Recovered, store: Directory) -> None:
    assert found.holes == HOLES.get(damage_name(store.name), [])
    assert found.cuts == CUTS.get(store.name, [])
    for start, _stop, kind in found.holes:
        segment = f"{start // SEGMENT * SEGMENT:020d}"
        (line,) = [line for line in found.said if line.startswith("damage: ")]
        assert f"{segment}: offset {start % SEGMENT:,}" in line
        assert kind in line


def test_second_recovery_changes_nothing(store: Directory, tmp_path: Path) -> None:
    root = store.unpack(tmp_path)
    options = options_of(store.undamaged)
    first = recover(root, options)
    before = contents(root)
    for clean in (False, True):
        io = RecordingIO()
        again = recover(root, options, clean=clean, io=io)
        assert io.lasting_calls == []
        assert contents(root) == before
        assert (again.end, again.holes, again.queues()) == (first.end, first.holes, first.queues())
        assert "0 records from the durable mark" in again.said_of("log")


@pytest.mark.parametrize(
    ("name", "step"),
    [("d02_garbage_tail", 1), ("d09_no_consumequeue_no_index_abort", 7), ("d14_middle_file_gone_abort", 3)],
)
def test_recovery_killed_at_any_call_ends_the_same(name: str, step: int, tmp_path: Path) -> None:
    """Kill at every modifying call, or at each `step`th of many similar ones."""
    (store,) = [each for each in STORES if each.name == name]
    options = options_of(store.undamaged)
    whole = store.unpack(tmp_path / "whole")
    recover(whole, options)
    wanted = contents(whole)
    kill_at = 1 - step
    while True:
        kill_at += step
        root = store.unpack(tmp_path / f"killed{kill_at}")
        try:
            recover(root, options, io=RecordingIO(kill_at))
            break
        except Killed:
            recover(root, options, clean=False)
        assert_same_store(contents(root), wanted)
    assert kill_at > 20


def assert_same_store(found: dict[str, bytes], wanted: dict[str, bytes]) -> None:
    """Equal except for marks' sequence numbers; a torn tail that was cut leaves the same zeros."""
    assert sorted(found) == sorted(wanted)
    different = [name for name in wanted if found[name] != wanted[name] and not name.startswith("mqproc/marks/")]
    assert not different


def test_recovery_of_cleanly_closed_store_changes_nothing(tmp_path: Path) -> None:
    """Queues and index are compared with the log, not rewritten."""
    for store in STORES:
        if store.damaged or not store.closed or store.name.startswith("g"):
            continue
        root = store.unpack(tmp_path / str(store))
        before = {name: data for name, data in contents(root).items() if name != "checkpoint"}
        recover(root, options_of(store.undamaged))
        after = contents(root)
        assert {name: after[name] for name in before} == before


def test_closed_store_with_unreadable_log_is_quarantined(tmp_path: Path) -> None:
    """Two segments are swapped, and the records that would show it are damaged."""
    store = next(each for each in directories(GOLDEN) if str(each) == "b_transaction/store").unpack(tmp_path)
    first, second = sorted((store / "commitlog").iterdir())
    were = [data[:100] + b"\xff" + data[101:] for data in (first.read_bytes(), second.read_bytes())]
    first.write_bytes(were[1])
    second.write_bytes(were[0])
    done = call("store", "recover", store, "--execute", "--json")
    assert done.code == 1
    assert (done.json["log_begin"], done.json["log_end"]) == (0, 0)
    assert done.json["lost"] == [{"end": 0, "durable_end": 92_712}]
    aside = store / "mqproc" / "aside"
    assert (aside / f"commitlog.{second.name}").read_bytes() == were[0]
    assert (aside / f"commitlog.{first.name}.rest").read_bytes() == were[1].rstrip(b"\0")
    assert call("store", "verify", store).code == 0
