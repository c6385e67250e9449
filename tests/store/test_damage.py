"""The damage file: what is merged, forgotten, and read by others."""

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


def ledger_of(paths: StorePaths, said: list[str], on_damage: OnDamage = OnDamage.SERVE) -> DamageLedger:
    return DamageLedger(StoreIO(), paths, Options(on_damage=on_damage), said.append)


def test_a_known_hole_keeps_its_first_time_and_is_not_told_again(paths: StorePaths) -> None:
    said: list[str] = []
    ledger = ledger_of(paths, said)
    assert ledger.replace([Hole(100, 200, "zeros")], 1) == [Hole(100, 200, "zeros", 1)]
    ledger.mark_filled()
    again = ledger_of(paths, said)
    fresh = again.replace([Hole(150, 200, "zeros"), Hole(300, 400, "bad size"), Hole(90, 120, "zeros")], 2)
    assert fresh == [Hole(300, 400, "bad size", 2)]
    # Only what lies within a hole that the queues knew is known to them.
    assert again.holes == [
        Hole(90, 120, "zeros", 1),
        Hole(150, 200, "zeros", 1, filled=True),
        Hole(300, 400, "bad size", 2),
    ]
    assert len(said) == 2
    assert load(StoreIO(), paths).holes == again.holes


def test_without_damage_there_is_no_file(paths: StorePaths) -> None:
    ledger = ledger_of(paths, [])
    ledger.save()
    assert not paths.damage.exists()
    ledger.add(Hole(1, 2, "zeros"), 1)
    assert paths.damage.exists()
    ledger.replace([], 2)
    assert not paths.damage.exists()


def test_the_same_cut_is_noted_once(paths: StorePaths) -> None:
    said: list[str] = []
    ledger = ledger_of(paths, said)
    for _ in range(2):
        ledger.record_cut(100, 200, 1)
    assert said == ["damage: the log was durable up to 200 and ends at 100"]
    assert len(load(StoreIO(), paths).cuts) == 1
    with pytest.raises(CorruptStoreError, match="up to 200 and ends at 100"):
        ledger_of(paths, said, OnDamage.REFUSE).record_cut(100, 200, 1)


def test_read_only_lasts_as_long_as_the_damage(paths: StorePaths) -> None:
    ledger = ledger_of(paths, [], OnDamage.READ_ONLY)
    assert not ledger.read_only
    ledger.add(Hole(1, 2, "zeros"), 1)
    assert ledger.read_only
    ledger.replace([], 2)
    assert not ledger.read_only


def test_readers_learn_of_a_hole_when_they_meet_its_filler(paths: StorePaths) -> None:
    """The filler names the start of the segment before the hole's; the units around it tell which hole it is."""
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


def test_ranges_that_touch_are_one() -> None:
    assert merged([(5, 9), (1, 2), (2, 4), (8, 12)]) == [(1, 4), (5, 12)]
