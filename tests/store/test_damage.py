"""The damage file: merging, removal and readers."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqproc.config.options import OnDamage, Options
from mqproc.errors import CorruptStoreError
from mqproc.io.store_io import StoreIO
from mqproc.paths import StorePaths
from mqproc.store.damage import DamageLedger, Hole, KnownHoles, load, merged


@pytest.fixture
def paths(tmp_path: Path) -> StorePaths:
    paths = StorePaths(tmp_path)
    paths.own.mkdir()
    return paths


def ledger_of(paths: StorePaths, lines: list[str], on_damage: OnDamage = OnDamage.SERVE) -> DamageLedger:
    return DamageLedger(StoreIO(), paths, Options(on_damage=on_damage), lines.append)


def test_ledger_known_hole_keeps_time_and_is_not_reported(paths: StorePaths) -> None:
    lines: list[str] = []
    ledger = ledger_of(paths, lines)
    assert ledger.replace([Hole(100, 200, "zeros")], 1) == [Hole(100, 200, "zeros", 1)]
    ledger.mark_filled()
    again = ledger_of(paths, lines)
    fresh = again.replace([Hole(150, 200, "zeros"), Hole(300, 400, "bad size"), Hole(90, 120, "zeros")], 2)
    assert fresh == [Hole(300, 400, "bad size", 2)]
    # Only holes inside a filled hole are filled.
    assert again.holes == [
        Hole(90, 120, "zeros", 1),
        Hole(150, 200, "zeros", 1, filled=True),
        Hole(300, 400, "bad size", 2),
    ]
    assert len(lines) == 2
    assert load(StoreIO(), paths).holes == again.holes


def test_ledger_without_damage_has_no_file(paths: StorePaths) -> None:
    ledger = ledger_of(paths, [])
    ledger.save()
    assert not paths.damage.exists()
    ledger.add(Hole(1, 2, "zeros"), 1)
    assert paths.damage.exists()
    ledger.replace([], 2)
    assert not paths.damage.exists()


def test_ledger_records_the_same_cut_once(paths: StorePaths) -> None:
    lines: list[str] = []
    ledger = ledger_of(paths, lines)
    for _ in range(2):
        ledger.record_cut(100, 200, 1)
    assert lines == ["damage: the log was durable up to 200 and ends at 100"]
    assert len(load(StoreIO(), paths).cuts) == 1
    with pytest.raises(CorruptStoreError, match="up to 200 and ends at 100"):
        ledger_of(paths, lines, OnDamage.REFUSE).record_cut(100, 200, 1)


def test_ledger_is_read_only_while_there_is_damage(paths: StorePaths) -> None:
    ledger = ledger_of(paths, [], OnDamage.READ_ONLY)
    assert not ledger.read_only
    ledger.add(Hole(1, 2, "zeros"), 1)
    assert ledger.read_only
    ledger.replace([], 2)
    assert not ledger.read_only


def test_known_holes_are_found_by_their_filler(paths: StorePaths) -> None:
    """The filler refers to the segment before the hole; its neighbours identify the hole."""
    known = KnownHoles(StoreIO(), paths, 1000)
    assert known.named(1000, 0, 5000) == []
    ledger = ledger_of(paths, [])
    holes = [Hole(900, 950, "zeros"), Hole(2100, 2200, "zeros"), Hole(2500, 2600, "zeros"), Hole(3100, 3200, "zeros")]
    ledger.replace(holes, 1)
    assert [hole.start for hole in known.named(1000, 0, 5000)] == [2100, 2500]
    assert [hole.start for hole in known.named(1000, 2000, 2500)] == [2100]
    assert [hole.start for hole in known.named(0, 0, 5000)] == [900]
    for garbage in (b"garbage", b'{"holes": [{"kind": "\xff"}]}'):
        paths.damage.write_bytes(garbage)
        assert known.named(5000, 0, 9000) == []


def test_merged_joins_touching_ranges() -> None:
    assert merged([(5, 9), (1, 2), (2, 4), (8, 12)]) == [(1, 4), (5, 12)]
