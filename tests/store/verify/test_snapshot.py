"""Verify reports the same for any number of shares of the log and of processes."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from mqproc.config.options import Options
from mqproc.errors import InternalError
from mqproc.io.store_io import StoreIO
from mqproc.layout import record
from mqproc.paths import StorePaths
from mqproc.store.verify.inventory import take_inventory
from mqproc.store.verify.snapshot import LogPositions, Share, cut_into_shares
from mqproc.store.verify.verifier import sizes_of
from tests.golden.fixtures import GOLDEN, directories
from tests.support.records import encode_record
from tests.support.store_builders import BORN_HOST, ITEMS, SEGMENT, SLOTS, STORE_HOST, StoppedStore
from tests.support.store_checks import damage_of, notes_of, overwrite, verify

OPTIONS = {"max_hash_slot_num": SLOTS, "max_index_num": ITEMS}
DAMAGED = [str(each) for each in directories(GOLDEN) if each.damaged and "_abort" not in each.name]
BY_NAME = {str(each): each for each in directories(GOLDEN)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> StoppedStore:
    return StoppedStore(tmp_path_factory.mktemp("whole") / "store")


def cut(store: Path, shares: int) -> list[Share]:
    paths, io = StorePaths(store), StoreIO()
    inventory = take_inventory(io, paths, sizes_of(io, paths, Options(**OPTIONS)))
    return cut_into_shares(io, inventory, LogPositions(inventory.log_begin), shares, 100)


def test_shares_are_contiguous_and_exact_at_segments(whole: StoppedStore) -> None:
    shares = cut(whole.root, 40)
    assert len(shares) > 30
    assert [share.number for share in shares] == list(range(len(shares)))
    assert all(before.stop == after.start for before, after in itertools.pairwise(shares))
    assert (shares[0].start, shares[0].exact) == (0, True)
    assert shares[-1].stop >= whole.end
    assert [share.start for share in shares if share.exact] == [
        share.start for share in shares if share.start % SEGMENT == 0
    ]


@pytest.mark.parametrize("shares", [2, 5, 40, 300])
def test_verify_any_share_count_intact_store_is_clean(whole: StoppedStore, shares: int) -> None:
    found = verify(whole.root, shares=shares, **OPTIONS)
    assert damage_of(found) == []
    assert (found.records, found.units, found.items) == (whole.numbers,) * 3


def test_verify_several_processes_equal_one(whole: StoppedStore) -> None:
    found = verify(whole.root, jobs=3, shares=12, **OPTIONS)
    assert damage_of(found) == []
    assert (found.records, found.units, found.items) == (whole.numbers,) * 3


@pytest.mark.parametrize("name", DAMAGED)
def test_verify_any_share_count_finds_same_damage(tmp_path: Path, name: str) -> None:
    store = BY_NAME[name].unpack(tmp_path)
    whole = verify(store)
    for shares in (7, 100):
        found = verify(store, shares=shares)
        assert damage_of(found) == damage_of(whole)
        assert notes_of(found) == notes_of(whole)
        assert found.records == whole.records


def test_verify_any_share_count_finds_same_random_damage(whole: StoppedStore) -> None:
    rng = random.Random(5)
    for _ in range(15):
        at = rng.randrange(whole.end)
        length = rng.choice((1, 30, 700, 4000))
        segment, place = whole.segment(at), at % SEGMENT
        before = segment.read_bytes()
        overwrite(segment, place, rng.randbytes(min(length, SEGMENT - place)))
        try:
            expected = verify(whole.root, **OPTIONS)
            found = verify(whole.root, shares=rng.choice((3, 20, 200)), **OPTIONS)
            assert damage_of(found) == damage_of(expected), (at, length)
            assert notes_of(found) == notes_of(expected), (at, length)
        finally:
            segment.write_bytes(before)


def test_verify_record_inside_a_body_is_ignored(tmp_path: Path) -> None:
    """A body may contain a valid record with its own offset, and a share may begin inside it."""
    store = StoppedStore(tmp_path / "store")
    for number in range(40):
        place = store.end + record.BODY
        inner = encode_record(
            topic="Inner", body=b"", properties="", queue_id=0, flag=0, queue_offset=number, physical_offset=place,
            sys_flag=0, born_timestamp_ms=1, born_host=BORN_HOST, store_timestamp_ms=1, store_host=STORE_HOST,
        )  # fmt: skip
        store.engine.append("First", [inner + bytes(200)], keys=[f"outer{number}"])
        assert store.segment(place).read_bytes()[place % SEGMENT :].startswith(inner)
    store.recover()
    for shares in (1, 300, 700):
        found = verify(store.root, shares=shares, **OPTIONS)
        assert damage_of(found) == []
        assert found.records == store.numbers + 40


def test_verify_dead_process_raises(whole: StoppedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify must not wait for a dead process."""
    import os

    from mqproc.store.verify import queues as queue_pass

    monkeypatch.setattr(queue_pass.QueuePass, "run", lambda self, queues: os._exit(3))
    with pytest.raises(InternalError, match="exited with 3; fewer --jobs need less memory"):
        verify(whole.root, jobs=2, shares=5, **OPTIONS)
