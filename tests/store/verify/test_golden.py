"""RocketMQ's own stores: whole ones are clean; of each damaged one file, offset, kind and what to do are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mqproc.store.verify import KINDS, Kind
from tests.golden.fixtures import GOLDEN, Directory, directories
from tests.store.verify.looking import Row, damage_of, looked_at, notes_of

ALL = {str(each): each for each in directories(GOLDEN)}
UNDAMAGED = [name for name, each in ALL.items() if not each.damaged]

LOG = "commitlog/{:020d}"
LAST = LOG.format(262144)
QUEUE = "consumequeue/{}/{}/00000000000000000000"
ABORT = Row("not_closed", "abort", None, None)


@pytest.fixture
def unpacked(tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: ALL[name].unpack(tmp_path)


@pytest.mark.parametrize("name", UNDAMAGED)
def test_a_store_as_rocketmq_left_it_is_clean(unpacked: Callable[[str], Path], name: str) -> None:
    found = looked_at(unpacked(name))
    expected = ALL[name].expected
    assert damage_of(found) == []
    assert found.records == (len(expected["records"]) if ALL[name].directory in ("store", "before") else found.records)
    assert (ABORT in notes_of(found)) == (ALL[name].directory == "before")


def test_retention_leaves_notes(unpacked: Callable[[str], Path]) -> None:
    """RocketMQ deletes segments first; queues and index lead below the log until their turn comes."""
    found = looked_at(unpacked("g2_retention_commitlog_only/store"))
    assert notes_of(found) == [
        Row("segments_expired", LOG.format(196608), 0, 262144),
        Row("unit_expired", "consumequeue/Busy/0/00000000000000000000", 0, 103688),
        Row("entry_expired", "index/20261121071852565", 40, 146502),
    ]
    assert found.clean


def test_what_a_kill_left_undispatched_is_a_note(unpacked: Callable[[str], Path]) -> None:
    found = looked_at(unpacked("c2_killed_dispatch_behind/before"))
    kinds = {row.kind for row in notes_of(found)}
    assert (found.clean, kinds) == (True, {"not_closed", "not_dispatched", "not_indexed"})
    expected = ALL["c2_killed_dispatch_behind/before"].expected
    behind = [finding for finding in found.findings.listed if finding.kind is Kind.NOT_DISPATCHED]
    dispatched = sum(finding.count for finding in behind)
    assert found.units + dispatched == len(expected["records"])


TAIL = [
    Row("log_ends_early", LAST, 27772, 289916),
    Row("unit_beyond_log", QUEUE.format("TopicTest", 1), 1100, 289916),
    Row("entry_beyond_log", "index/20261121071939032", 12220, 289916),
    Row("checkpoint_ahead", "checkpoint", 8, None),
]
TORN = [Row("torn_tail", LAST, 27772, 289916), *TAIL]
FIRST_UNITS = [("%RETRY%group_one", 0, 12565), ("OrderTopic", 2, 2667), ("TopicTest", 2, 0)]
NO_QUEUES = [Row("unit_missing", QUEUE.format(topic, queue), 0, at) for topic, queue, at in FIRST_UNITS]
BEYOND = [Row("unit_beyond_log", QUEUE.format(topic, queue), 0, at) for topic, queue, at in FIRST_UNITS]
FIVE_LOST = [
    Row("log_ends_early", LAST, 26673, 288817),
    Row("unit_beyond_log", QUEUE.format("OrderTopic", 1), 1000, 288817),
    Row("checkpoint_ahead", "checkpoint", 8, None),
]
LAST_GONE = [
    Row("segment_missing", LAST, 0, 262144),
    Row("log_ends_early", LAST, 0, 262144),
    Row("unit_beyond_log", QUEUE.format("TopicTest", 1), 940, 262144),
    Row("checkpoint_ahead", "checkpoint", 8, None),
]
FIVE_ZEROED = Row("unit_missing", QUEUE.format("OrderTopic", 0), 1120, 268791)

# What must be named, of all that follows from the damage; and what all damage together must consist of.
TABLE: dict[str, list[Row]] = {
    "d01_zero_tail/before": TORN,
    "d02_garbage_tail/before": TORN,
    "d03_bad_magic/before": TORN,
    "d04_wrong_size/before": TORN,
    "d05_garbage_after_end/before": [Row("torn_tail", LAST, 28152, 290296)],
    "d06_negative_size/before": TORN,
    "d07_body_flip_first_file_abort/before": [Row("record_body_crc", LOG.format(0), 1563, 1563)],
    "d07_body_flip_first_file_clean/clean": [Row("record_body_crc", LOG.format(0), 1563, 1563)],
    "d07_body_flip_last_file_abort/before": [Row("record_body_crc", LAST, 2479, 264623)],
    "d07_body_flip_last_file_clean/clean": [Row("record_body_crc", LAST, 2479, 264623)],
    "d07_body_flip_middle_file_abort/before": [Row("record_body_crc", LOG.format(131072), 2264, 133336)],
    "d07_body_flip_middle_file_clean/clean": [Row("record_body_crc", LOG.format(131072), 2264, 133336)],
    "d07_body_flip_second_last_file_abort/before": [Row("record_body_crc", LOG.format(196608), 2772, 199380)],
    "d07_body_flip_second_last_file_clean/clean": [Row("record_body_crc", LOG.format(196608), 2772, 199380)],
    "d08_no_consumequeue_abort/before": NO_QUEUES,
    "d08_no_consumequeue_clean/clean": NO_QUEUES,
    "d09_no_consumequeue_no_index_abort/before": [*NO_QUEUES, Row("index_missing", "index", None, 0)],
    "d09_no_consumequeue_no_index_clean/clean": [*NO_QUEUES, Row("index_missing", "index", None, 0)],
    "d10_no_index_abort/before": [Row("index_missing", "index", None, 0)],
    "d10_no_index_clean/clean": [Row("index_missing", "index", None, 0)],
    "d11_no_checkpoint_abort/before": [Row("checkpoint_missing", "checkpoint", None, None)],
    "d11_no_checkpoint_clean/clean": [Row("checkpoint_missing", "checkpoint", None, None)],
    "d12_last_file_gone_abort/before": LAST_GONE,
    "d12_last_file_gone_clean/clean": [*LAST_GONE, Row("checkpoint_ahead", "checkpoint", 32, 289916)],
    # The first segments of a log may be gone: that is what retention does, so it is a note only.
    "d13_first_file_gone_abort/before": [],
    "d13_first_file_gone_clean/clean": [],
    "d14_middle_file_gone_abort/before": [Row("segment_missing", LOG.format(131072), 0, 131072)],
    "d14_middle_file_gone_clean/clean": [Row("segment_missing", LOG.format(131072), 0, 131072)],
    "d15_five_records_zeroed_abort/before": FIVE_LOST,
    "d15_five_records_zeroed_clean/clean": [*FIVE_LOST, Row("checkpoint_ahead", "checkpoint", 32, 289916)],
    "d16_short_last_file/before": [Row("segment_short", LAST, 28152, 290296)],
    "d17_empty_next_file/clean": [Row("segment_empty", LOG.format(327680), 0, 327680)],
    "d18_stray_file/clean": [Row("stray_file", "commitlog/notes.txt", None, None)],
    "d19_commitlog_gone/clean": [
        Row("segment_missing", LOG.format(0), 0, 0),
        Row("log_ends_early", LOG.format(0), 0, 0),
        *BEYOND,
        Row("checkpoint_ahead", "checkpoint", 32, 289916),
    ],
    "d20_cq_tail_garbage/before": [Row("unit_wrong", QUEUE.format("OrderTopic", 0), 1180, 285436)],
    "d21_cq_tail_zero/before": [FIVE_ZEROED],
    "d22_cq_tail_zero_clean/clean": [FIVE_ZEROED],
}


def test_every_damaged_store_has_a_row() -> None:
    assert TABLE.keys() == {name for name, each in ALL.items() if each.damaged}


@pytest.mark.parametrize("name", sorted(TABLE))
def test_damage_is_named_with_file_offset_kind_and_what_to_do(unpacked: Callable[[str], Path], name: str) -> None:
    found = looked_at(unpacked(name))
    damage = damage_of(found)
    assert [row for row in TABLE[name] if row not in damage] == []
    assert {row.kind for row in damage} <= {row.kind for row in TABLE[name]} | {"entry_beyond_log"}
    assert found.clean == (not TABLE[name])
    for finding in found.findings.listed:
        about = KINDS[finding.kind]
        assert about.means
        assert about.do
        assert finding.to_json()["do"] == about.do


@pytest.mark.parametrize("name", ["d13_first_file_gone_abort/before", "d13_first_file_gone_clean/clean"])
def test_a_log_that_lost_its_beginning_is_noted(unpacked: Callable[[str], Path], name: str) -> None:
    assert Row("segments_expired", LOG.format(0), 0, 65536) in notes_of(looked_at(unpacked(name)))


@pytest.mark.parametrize("name", [name for name in sorted(TABLE) if name.startswith(("d07", "d14"))])
def test_units_into_damage_are_noted_one_for_each_lost_record(unpacked: Callable[[str], Path], name: str) -> None:
    found = looked_at(unpacked(name))
    directory: Directory = ALL[name]
    lost = len(directory.undamaged["records"]) - found.records
    noted = sum(finding.count for finding in found.findings.listed if finding.kind is Kind.UNIT_IN_HOLE)
    assert noted == lost > 0
