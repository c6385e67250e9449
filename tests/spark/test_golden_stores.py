"""RocketMQ's own stores, intact and damaged: one row per message, for any split of the log."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqproc.errors import CorruptStoreError
from tests.golden.fixtures import GOLDEN, Directory, directories
from tests.spark.support import comparable, messages_of, offsets_of, row_of, rows_of

ALL = {str(each): each for each in directories(GOLDEN)}
WHOLE = [name for name, each in ALL.items() if not each.damaged and name != "c2_killed_dispatch_behind/before"]
# Damaged stores and the number of their intact messages.
LOST = {
    "d01_zero_tail/before": 799,
    "d07_body_flip_first_file_clean/clean": 799,
    "d07_body_flip_middle_file_abort/before": 799,
    "d12_last_file_gone_clean/clean": 718,
    "d14_middle_file_gone_abort/before": 620,
    "d15_five_records_zeroed_clean/clean": 795,
    "d19_commitlog_gone/clean": 0,
}
# Stores whose log is complete, though queues or index are damaged.
COMPLETE = (
    "d05_garbage_after_end/before",
    "d08_no_consumequeue_clean/clean",
    "d09_no_consumequeue_no_index_abort/before",
    "d11_no_checkpoint_clean/clean",
    "d21_cq_tail_zero/before",
)


@pytest.mark.parametrize("name", WHOLE)
def test_every_message_is_a_row(name: str, tmp_path: Path) -> None:
    store = ALL[name].unpack(tmp_path)
    expected = [row_of(message, store) for message in messages_of(store)]
    assert expected
    assert [comparable(row) for row in rows_of(store, plainBodies=False)] == expected
    places = [row["physical_offset"] for row in expected]
    # A read makes at most 1,000 small partitions.
    smallest = max(333, (places[-1] - places[0]) // 999)
    for split in (65_536, 5_000, smallest):
        assert offsets_of(store, splitBytes=split) == places, split


def test_undispatched_messages_are_read(tmp_path: Path) -> None:
    store = ALL["c2_killed_dispatch_behind/before"].unpack(tmp_path)
    records = [record["phyOffset"] for record in ALL["c2_killed_dispatch_behind/before"].expected["records"]]
    assert len(messages_of(store)) < len(records)
    assert offsets_of(store, splitBytes=5_000) == sorted(records)


@pytest.mark.parametrize("name", LOST)
def test_damage_raises_or_is_skipped(name: str, tmp_path: Path) -> None:
    store = ALL[name].unpack(tmp_path)
    with pytest.raises(CorruptStoreError, match="failOnDataLoss=false"):
        rows_of(store)
    for split in (65_536, 333):
        assert len(rows_of(store, splitBytes=split, failOnDataLoss=False)) == LOST[name]


@pytest.mark.parametrize("name", COMPLETE)
def test_log_alone_is_sufficient(name: str, tmp_path: Path) -> None:
    assert len(rows_of(ALL[name].unpack(tmp_path), splitBytes=5_000)) == 800


def test_short_segment_error_names_file(tmp_path: Path) -> None:
    store = Directory(GOLDEN, "d16_short_last_file", ALL["d16_short_last_file/before"].archive, "before").unpack(
        tmp_path
    )
    with pytest.raises(CorruptStoreError, match="28,152 bytes; a segment has 65,536"):
        rows_of(store)
