"""Verify RocketMQ's stores: intact ones are clean; traces of retention and kills are notes.

`tests/cli/store/test_repair_golden.py` has the findings of the damaged ones.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mqproc.store.verify import FindingKind
from tests.golden.fixtures import GOLDEN, Directory, directories
from tests.support.store_checks import Row, damage_of, notes_of, verify

ALL = {str(each): each for each in directories(GOLDEN)}
UNDAMAGED = [name for name, each in ALL.items() if not each.damaged]

LOG = "commitlog/{:020d}"
ABORT = Row("not_closed", "abort", None, None)


@pytest.fixture
def unpacked(tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: ALL[name].unpack(tmp_path)


@pytest.mark.parametrize("name", UNDAMAGED)
def test_verify_store_of_rocketmq_is_clean(unpacked: Callable[[str], Path], name: str) -> None:
    found = verify(unpacked(name))
    expected = ALL[name].expected
    assert damage_of(found) == []
    assert found.records == (len(expected["records"]) if ALL[name].directory in ("store", "before") else found.records)
    assert (ABORT in notes_of(found)) == (ALL[name].directory == "before")


def test_verify_after_retention_has_notes(unpacked: Callable[[str], Path]) -> None:
    """RocketMQ deletes segments first; queues and index point below the log until later."""
    found = verify(unpacked("g2_retention_commitlog_only/store"))
    assert notes_of(found) == [
        Row("segments_expired", LOG.format(196608), 0, 262144),
        Row("unit_expired", "consumequeue/Busy/0/00000000000000000000", 0, 103688),
        Row("entry_expired", "index/20261121071852565", 40, 146502),
    ]
    assert found.clean


def test_verify_undispatched_after_kill_is_a_note(unpacked: Callable[[str], Path]) -> None:
    found = verify(unpacked("c2_killed_dispatch_behind/before"))
    kinds = {row.kind for row in notes_of(found)}
    assert (found.clean, kinds) == (True, {"not_closed", "not_dispatched", "not_indexed"})
    expected = ALL["c2_killed_dispatch_behind/before"].expected
    behind = [finding for finding in found.findings.listed if finding.kind is FindingKind.NOT_DISPATCHED]
    dispatched = sum(finding.count for finding in behind)
    assert found.units + dispatched == len(expected["records"])


@pytest.mark.parametrize("name", ["d13_first_file_gone_abort/before", "d13_first_file_gone_clean/clean"])
def test_verify_log_without_its_begin_is_a_note(unpacked: Callable[[str], Path], name: str) -> None:
    assert Row("segments_expired", LOG.format(0), 0, 65536) in notes_of(verify(unpacked(name)))


@pytest.mark.parametrize("name", [name for name in ALL if name.startswith(("d07", "d14"))])
def test_verify_units_in_hole_equal_lost_records(unpacked: Callable[[str], Path], name: str) -> None:
    found = verify(unpacked(name))
    directory: Directory = ALL[name]
    lost = len(directory.undamaged["records"]) - found.records
    noted = sum(finding.count for finding in found.findings.listed if finding.kind is FindingKind.UNIT_IN_HOLE)
    assert noted == lost > 0


def test_verify_light_queues_are_noted_as_unchecked(unpacked: Callable[[str], Path]) -> None:
    """Their units point to records of other topics."""
    store = unpacked("i_broker/store")
    for name, queue in (("%LMQ%some", 0), ("%LMQ%other", 1)):
        shutil.copytree(store / "consumequeue" / "LifeTopic" / str(queue), store / "consumequeue" / name / "0")
    found = verify(store)
    assert found.clean
    assert notes_of(found) == [Row("not_checked", "consumequeue/%LMQ%other", None, None)]
    assert [each.text for each in found.findings.in_order()] == ["units of RocketMQ's light queues: 2 such topics"]
