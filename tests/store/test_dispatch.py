"""Dispatch of what our own writer appended: steps, borders, published words, and every kind of interruption.

What must come out is known from one undisturbed run; full disks, deaths and repeated steps end with the same files.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqproc.io.store_io import StoreIO
from mqproc.kernels.dispatch import StopReason
from mqproc.layout import queue_table as table_layout
from mqproc.layout import record
from mqproc.layout.consume_queue import FILLER_SIZE
from mqproc.store.consumequeue.bounds import filler_position
from mqproc.store.consumequeue.files import ConsumeQueueFiles, as_units
from mqproc.store.dispatch import Dispatch, DispatchResult
from mqproc.store.index.files import IndexCommit, IndexFiles
from mqproc.store.index.lookup import IndexReader
from tests.support.store_builders import Engine

QUEUE_FILE_BYTES = 400
SLOTS, ITEMS = 50, 120


class Dispatched:
    """A dispatcher over an engine's log, with the words that its role would keep."""

    def __init__(self, engine: Engine, folder: Path, io: StoreIO | None = None, **more: Any) -> None:
        self.engine = engine
        self.folder = folder
        self.io = io or StoreIO()
        self.position = 0
        self.commit = IndexCommit()
        self.more = more
        self.start()

    def start(self) -> None:
        """A successor: it knows the position and the commit, nothing else."""
        queues = ConsumeQueueFiles(self.io, self.folder / "consumequeue", QUEUE_FILE_BYTES, write=True, open_max=4)
        index = IndexFiles(self.io, self.folder / "index", SLOTS, ITEMS)
        index.roll_back(self.commit)
        options = self.engine.options
        self.dispatch = Dispatch(self.io, options, self.engine.table, self.engine.segments, queues, index, **self.more)

    def step(self) -> DispatchResult:
        step = self.dispatch.step(self.position, self.engine.written)
        self.commit = self.dispatch.index.commit()
        self.position = step.position
        return step

    def run(self) -> list[DispatchResult]:
        steps = []
        while self.position < self.engine.written:
            steps.append(self.step())
            assert not steps[-1].stuck
        return steps

    def files(self) -> dict[str, bytes]:
        found = {}
        for name in ("consumequeue", "index"):
            for path in sorted((self.folder / name).rglob("*")):
                if path.is_file():
                    found[str(path.relative_to(self.folder))] = path.read_bytes()
        return found

    def units(self, topic: str, queue_id: int) -> list[tuple[int, int, int]]:
        number = self.engine.table.find(topic, queue_id)
        queues = ConsumeQueueFiles(StoreIO(), self.folder / "consumequeue", QUEUE_FILE_BYTES)
        data = queues.read_units(topic, queue_id, 0, self.engine.table.max_offset(number))
        units: list[tuple[int, int, int]] = as_units(data).tolist()
        return units


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return filled_engine(tmp_path)


def filled_engine(root: Path) -> Engine:
    """Several topics over two and a half segments of 64 KiB."""
    engine = Engine(root / "store", max_hash_slot_num=SLOTS, max_index_num=ITEMS)
    for turn in range(30):
        for topic in ("First", "Second"):
            bodies = [bytes(200 + turn)] * 8
            keys = [f"k{turn} k{turn + number}" for number in range(8)]
            engine.append(topic, bodies, 1_700_000_000_000 + 700 * turn, keys=keys, tags=["TagA"] * 8)
    assert engine.written > 2 * engine.segments.segment_size
    return engine


def forget_queues(engine: Engine) -> None:
    """Queue words as before any dispatch."""
    for number in range(engine.table.count):
        for word in (table_layout.MAX_OFFSET, table_layout.LAST_PHYSICAL_END, table_layout.LAST_STORE_TIMESTAMP_MS):
            engine.table.store(number, word, 0)


def test_units_entries_and_words_of_a_whole_log(engine: Engine, tmp_path: Path) -> None:
    dispatched = Dispatched(engine, tmp_path / "out")
    steps = dispatched.run()
    assert dispatched.position == engine.written
    assert sum(step.records for step in steps) == 480
    assert sum(step.entries for step in steps) == 960
    assert steps[-1].store_timestamp_ms == 1_700_000_000_000 + 700 * 29
    table = engine.table
    ends = []
    for number, topic, queue_id in table.live():
        assert table.max_offset(number) == table.next_offset(number) == 60
        units = dispatched.units(topic, queue_id)
        ends.append(table.last_physical_end(number))
        assert ends[-1] == units[-1][0] + units[-1][1]
        for queue_offset, (physical_offset, size, tags_code) in enumerate(units):
            data = engine.log_bytes(physical_offset, physical_offset + size)
            assert int.from_bytes(data[record.QUEUE_OFFSET : record.QUEUE_OFFSET + 8], "big") == queue_offset
            assert int.from_bytes(data[:4], "big") == size
            assert tags_code == 2598919
    assert max(ends) == engine.written
    reader = IndexReader(StoreIO(), tmp_path / "out" / "index", SLOTS, ITEMS, 64)
    reader.refresh(1)
    found = reader.query_offset("First", "k5", 64, 0, 2**63 - 1)
    bodies = [engine.log_bytes(offset, offset + 400) for offset in found.offsets]
    assert all(b"k5" in body for body in bodies)
    # All eight messages of turn 5, the first one twice, and one of each turn before it.
    assert len(found.offsets) == 8 + 1 + 5


def test_a_step_is_bounded(engine: Engine, tmp_path: Path) -> None:
    by_records = Dispatched(engine, tmp_path / "records", step_records=7).run()
    assert {step.records for step in by_records} <= set(range(8))
    assert by_records[0].reason is StopReason.RECORDS
    by_bytes = Dispatched(engine, tmp_path / "bytes", step_bytes=1000)
    assert max(step.records for step in by_bytes.run()) <= 4
    assert by_bytes.files() == dispatch_all(engine, tmp_path / "whole").files()


def test_a_step_takes_more_while_runs_are_short(engine: Engine, tmp_path: Path) -> None:
    """A queue's units of several pieces of the log are one run then."""
    wide = Dispatched(engine, tmp_path / "wide", step_bytes=1000, step_records=10, wide_records=50)
    steps = wide.run()
    assert steps[0].records <= 4
    assert max(step.records for step in steps) > 12
    assert max(step.records for step in steps) <= 50
    assert wide.files() == dispatch_all(engine, tmp_path / "whole").files()


def test_a_step_does_not_take_more_while_runs_are_long(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "store", max_hash_slot_num=SLOTS, max_index_num=ITEMS)
    for turn in range(10):
        engine.append("One", [b"body"] * 100, 1_700_000_000_000 + turn, keys=["k"] * 100, queues=1)
    steps = Dispatched(engine, tmp_path / "out", step_records=50, wide_records=500).run()
    assert max(step.records for step in steps) == 50


def dispatch_all(engine: Engine, folder: Path) -> Dispatched:
    dispatched = Dispatched(engine, folder)
    dispatched.run()
    return dispatched


def test_nothing_at_or_above_confirmed_is_dispatched(engine: Engine, tmp_path: Path) -> None:
    dispatched = Dispatched(engine, tmp_path / "out")
    confirmed = 5 * int.from_bytes(engine.log_bytes(0, 4), "big")
    step = dispatched.dispatch.step(0, confirmed)
    assert (step.position, step.records, step.reason) == (confirmed, 5, StopReason.LIMIT)
    step = dispatched.dispatch.step(confirmed, confirmed)
    assert (step.position, step.records, step.stuck) == (confirmed, 0, False)


def test_a_blank_leads_to_the_next_segment(engine: Engine, tmp_path: Path) -> None:
    step = Dispatched(engine, tmp_path / "out").step()
    assert (step.reason, step.position) == (StopReason.BLANK, engine.segments.segment_size)


def test_dispatching_a_range_again_appends_nothing(engine: Engine, tmp_path: Path) -> None:
    dispatched = dispatch_all(engine, tmp_path / "out")
    before = dispatched.files()
    words = engine.table.cells.copy()
    dispatched.position, dispatched.commit = 0, IndexCommit()
    dispatched.start()
    dispatched.more = {"step_records": 3}
    step = dispatched.step()
    # Repeated steps may be shorter; what was published stays.
    assert np.array_equal(engine.table.cells, words)
    assert step.records > 0
    dispatched.run()
    assert dispatched.files() == before


def test_an_unknown_queue_and_a_bad_record_stop_the_live_path(engine: Engine, tmp_path: Path) -> None:
    engine.append("Third", [b"x"], queues=1)
    number = engine.table.find("Third", 0)
    start = engine.written - int(engine.log_bytes(0, 4)[3])
    slots = engine.table.slots
    place = int(np.flatnonzero(slots == number + 1)[0])
    slots[place] = 0
    dispatched = Dispatched(engine, tmp_path / "out")
    while not (step := dispatched.step()).stuck:
        assert dispatched.position < engine.written
    assert step.reason is StopReason.UNKNOWN_QUEUE
    stopped = step.position
    assert stopped < engine.written
    slots[place] = number + 1
    assert dispatched.step().reason is StopReason.LIMIT
    assert dispatched.position == engine.written
    assert start >= stopped

    path = engine.segments.path(engine.segments.start_of(stopped))
    with path.open("r+b") as file:
        file.seek(stopped % engine.segments.segment_size)
        file.write(b"\xff" * 8)
    dispatched.position = stopped
    step = dispatched.step()
    assert (step.reason, step.position, step.records, step.stuck) == (StopReason.BAD_RECORD, stopped, 0, True)


def test_holes_are_jumped_over(engine: Engine, tmp_path: Path) -> None:
    """Four records, unit 4 of each queue of one topic, are gone; fillers stand for them."""
    whole = dispatch_all(engine, tmp_path / "whole").units("First", 2)
    forget_queues(engine)
    offsets = sorted(unit[0] for queue_id in range(4) for unit in whole_queue(engine, tmp_path, queue_id))
    hole = (offsets[16], offsets[20])
    path = engine.segments.path(0)
    with path.open("r+b") as file:
        file.seek(hole[0])
        file.write(b"\xff" * (hole[1] - hole[0]))
    dispatched = Dispatched(engine, tmp_path / "out", holes=[hole, (engine.written, engine.written + 9)])
    steps = dispatched.run()
    assert steps[0].position == hole[1]
    assert sum(step.records for step in steps) == 480 - 4
    assert dispatched.position == engine.written + 9
    units = dispatched.units("First", 2)
    assert units[4] == (filler_position(hole[0], engine.segments.segment_size), FILLER_SIZE, 0)
    assert units[:4] + units[5:] == whole[:4] + whole[5:]
    queues = ConsumeQueueFiles(StoreIO(), tmp_path / "out" / "consumequeue", QUEUE_FILE_BYTES)
    assert queues.extent("First", 2).max_offset == 60


def test_a_hole_at_the_logs_beginning_swallows_the_queues_first_units(engine: Engine, tmp_path: Path) -> None:
    dispatch_all(engine, tmp_path / "whole")
    forget_queues(engine)
    hole = (0, max(whole_queue(engine, tmp_path, queue_id)[2][0] for queue_id in range(4)))
    dispatched = Dispatched(engine, tmp_path / "out", holes=[hole], step_records=5)
    dispatched.run()
    assert dispatched.units("First", 0)[:3] == [(0, FILLER_SIZE, 0)] * 3
    assert dispatched.units("First", 0)[3:] == whole_queue(engine, tmp_path, 0)[3:]


def whole_queue(engine: Engine, root: Path, queue_id: int) -> list[tuple[int, int, int]]:
    queues = ConsumeQueueFiles(StoreIO(), root / "whole" / "consumequeue", QUEUE_FILE_BYTES)
    units: list[tuple[int, int, int]] = as_units(queues.read_units("First", queue_id, 0, 60)).tolist()
    return units


def test_without_index_there_are_queues_only(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "store", message_index_enable=False)
    engine.append("T", [b"x"] * 4, keys=["a"] * 4)
    dispatched = dispatch_all(engine, tmp_path / "out")
    assert not (tmp_path / "out" / "index").exists()
    assert len(dispatched.files()) == 4


class Died(BaseException):
    """Stands for SIGKILL: nothing catches it."""


class FaultyIO(StoreIO):
    """At the nth storage call fails with a full disk, or dies."""

    def __init__(self, nth: int, fault: type[BaseException]) -> None:
        super().__init__()
        self.left = nth
        self.fault = fault
        self.calls = 0

    def _count(self) -> None:
        self.calls += 1
        self.left -= 1
        if self.left == 0:
            raise self.fault(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def crash_point(self, name: str) -> None:
        if self.fault is Died:
            self._count()

    def pwrite(self, fd: int, data: Any, offset: int) -> None:
        self._count()
        super().pwrite(fd, data, offset)

    def allocate(self, fd: int, offset: int, size: int) -> None:
        self._count()
        super().allocate(fd, offset, size)

    def set_size(self, fd: int, size: int) -> None:
        self._count()
        super().set_size(fd, size)

    def make_folder(self, folder: Path, mode: int = 0o755, *, sync: bool = True) -> None:
        self._count()
        super().make_folder(folder, mode, sync=sync)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, dict[str, bytes]]:
    """An engine, and the files of an undisturbed dispatch of its log."""
    root = tmp_path_factory.mktemp("reference")
    engine = filled_engine(root)
    return engine, dispatch_all(engine, root / "out").files()


@settings(max_examples=60, deadline=None)
@given(
    nth=st.integers(1, 700),
    every=st.sampled_from([OSError, Died]),
    records=st.sampled_from([40, 1000]),
    wide=st.sampled_from([0, 300]),
)
def test_after_a_full_disk_or_a_death_the_files_are_the_same(
    reference: tuple[Engine, dict[str, bytes]],
    tmp_path_factory: pytest.TempPathFactory,
    nth: int,
    every: type[BaseException],
    records: int,
    wide: int,
) -> None:
    engine, expected = reference
    forget_queues(engine)
    folder = tmp_path_factory.mktemp("faulty")
    dispatched = Dispatched(
        engine, folder, FaultyIO(nth, every), step_records=records, wide_records=wide, step_bytes=4000
    )
    while dispatched.position < engine.written:
        before = engine.table.column(table_layout.MAX_OFFSET)
        try:
            dispatched.step()
        except OSError:
            assert np.array_equal(engine.table.column(table_layout.MAX_OFFSET), before)
        except Died:
            dispatched.start()
    assert dispatched.files() == expected
    assert engine.table.column(table_layout.MAX_OFFSET).tolist() == [60] * 8
    dispatched.dispatch.close()
    shutil.rmtree(folder)
