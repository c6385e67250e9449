"""The supervisor's descriptors: whatever a dead flusher may have seen fail is asked for once more, through them."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from mqproc.layout import control as words_of
from mqproc.store.sync_guard import SyncWatch
from tests.open_files import open_below
from tests.store.engine import Engine
from tests.store.faulty_io import FaultyIO

SEGMENT = 65536
# What must be synced after the death of each role, as the end of a path.
PLACES = {
    words_of.WRITER: ["00000000000000000000", "00000000000000065536"],
    words_of.COMMITLOG_FLUSHER: ["00000000000000000000", "00000000000000065536"],
    words_of.CQ_FLUSHER: ["consumequeue*"],
    words_of.INDEX_FLUSHER: ["index*"],
}


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    engine = Engine(tmp_path, io=FaultyIO())
    engine.io.make_folder(engine.paths.consume_queue)
    engine.make_segment(SEGMENT)
    return engine


def opened(engine: Engine) -> tuple[SyncWatch, FaultyIO]:
    io = engine.io
    assert isinstance(io, FaultyIO)
    active = SyncWatch()
    active.open(io, engine.paths, engine.options, engine.words)
    io.tried()
    return active, io


@pytest.mark.parametrize("role", PLACES)
def test_what_a_dead_role_may_have_had_open_is_synced(engine: Engine, role: str) -> None:
    active, io = opened(engine)
    assert active.sync(role) == 0
    assert io.tried() == PLACES[role]


@pytest.mark.parametrize("role", PLACES)
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_failure_is_told(engine: Engine, role: str, number: int) -> None:
    active, io = opened(engine)
    io.failing = {PLACES[role][0]: number}
    assert active.sync(role) == number


@pytest.mark.parametrize("role", PLACES)
def test_the_descriptors_were_open_before(engine: Engine, role: str) -> None:
    """One that is opened afterwards is not told of a failure that somebody else has seen."""
    active, io = opened(engine)
    io.refusing = {str(engine.paths.root): errno.EMFILE}
    assert active.sync(role) == 0
    assert io.tried() == PLACES[role]


def test_a_role_that_syncs_nothing_is_followed_by_nothing(engine: Engine) -> None:
    active, io = opened(engine)
    assert active.sync(words_of.DISPATCHER) == 0
    assert io.tried() == []


def test_descriptors_follow_the_log(engine: Engine) -> None:
    active, io = opened(engine)
    before = len(open_below(engine.paths.root))
    for start in range(2, 6):
        engine.make_segment(start * SEGMENT)
    engine.words[words_of.FLUSHER_SYNCED] = 4 * SEGMENT + 1
    active.follow()
    assert len(open_below(engine.paths.root)) == before
    io.tried()
    active.sync(words_of.COMMITLOG_FLUSHER)
    assert io.tried() == [f"{start * SEGMENT:020d}" for start in (4, 5)]


def test_a_segment_that_goes_while_it_is_looked_for_is_not_held(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flusher that stops takes back what it had made ready; that ended the group."""
    there = engine.io.exists

    def goes(path: Path) -> bool:
        found = there(path)
        if path.name == f"{SEGMENT:020d}":
            path.unlink()
        return found

    monkeypatch.setattr(engine.io, "exists", goes)
    active, io = opened(engine)
    assert active.sync(words_of.COMMITLOG_FLUSHER) == 0
    assert io.tried() == [f"{0:020d}"]


def test_nothing_is_held_before_a_store_is_recovered() -> None:
    active = SyncWatch()
    active.follow()
    assert [active.sync(role) for role in PLACES] == [0, 0, 0, 0]
