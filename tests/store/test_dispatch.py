"""Dispatch: steps, segment borders, published words, single records and interruptions.

Full disks, kills and repeated steps must give the same files as an undisturbed run.
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqproc.io.store_io import StoreIO
from mqproc.kernels import dispatch_step
from mqproc.kernels.dispatch import StopReason
from mqproc.kernels.jit.compile import plain
from mqproc.layout import control as words_of
from mqproc.layout import queue_table as table_layout
from mqproc.layout import record
from mqproc.layout.consume_queue import FILLER_SIZE
from mqproc.store.consumequeue.bounds import as_units, filler_position
from mqproc.store.consumequeue.files import ConsumeQueueFiles
from mqproc.store.dispatch import Dispatch, DispatchResult, StepLimits
from mqproc.store.index import files as index_files
from mqproc.store.index.files import IndexCommit, IndexFiles
from mqproc.store.index.lookup import IndexReader
from tests.support.store_builders import Engine

QUEUE_FILE_BYTES = 400
SLOTS, ITEMS = 50, 120


class Dispatched:
    """A dispatcher over an engine's log, with the state kept by its role."""

    def __init__(self, engine: Engine, folder: Path, io: StoreIO | None = None, **more: Any) -> None:
        self.engine = engine
        self.folder = folder
        self.io = io or StoreIO()
        self.position = 0
        self.commit = IndexCommit()
        self.more = more
        self.start()

    def start(self) -> None:
        """Start a dispatcher from the position and the index commit."""
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
    """Fill two and a half segments of 64 KiB with messages of two topics."""
    engine = Engine(root / "store", max_hash_slot_num=SLOTS, max_index_num=ITEMS)
    for turn in range(30):
        for topic in ("First", "Second"):
            bodies = [bytes(200 + turn)] * 8
            keys = [f"k{turn} k{turn + number}" for number in range(8)]
            engine.append(topic, bodies, 1_700_000_000_000 + 700 * turn, keys=keys, tags=["TagA"] * 8)
    assert engine.written > 2 * engine.segments.segment_size
    return engine


def forget_queues(engine: Engine) -> None:
    """Reset the queue words to those before any dispatch."""
    for number in range(engine.table.count):
        for word in (table_layout.MAX_OFFSET, table_layout.LAST_PHYSICAL_END, table_layout.LAST_STORE_TIMESTAMP_MS):
            engine.table.store(number, word, 0)


def test_dispatch_whole_log_writes_units_entries_and_words(engine: Engine, tmp_path: Path) -> None:
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
    # The eight messages of turn 5, the first one twice, and one of each earlier turn.
    assert len(found.offsets) == 8 + 1 + 5


def test_dispatch_step_is_bounded(engine: Engine, tmp_path: Path) -> None:
    by_records = Dispatched(engine, tmp_path / "records", limits=StepLimits(piece_records=7)).run()
    assert {step.records for step in by_records} <= set(range(8))
    assert by_records[0].reason is StopReason.RECORDS
    by_bytes = Dispatched(engine, tmp_path / "bytes", limits=StepLimits(piece_bytes=1000))
    assert max(step.records for step in by_bytes.run()) <= 4
    assert by_bytes.files() == dispatch_all(engine, tmp_path / "whole").files()


def test_dispatch_step_grows_while_runs_are_short(engine: Engine, tmp_path: Path) -> None:
    """A queue's units from several parts of the log then form one run."""
    wide = Dispatched(engine, tmp_path / "wide", limits=StepLimits(piece_bytes=1000, piece_records=10, wide_records=50))
    steps = wide.run()
    assert steps[0].records <= 4
    assert max(step.records for step in steps) > 12
    assert max(step.records for step in steps) <= 50
    assert wide.files() == dispatch_all(engine, tmp_path / "whole").files()


def test_dispatch_step_does_not_grow_while_runs_are_long(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "store", max_hash_slot_num=SLOTS, max_index_num=ITEMS)
    for turn in range(10):
        engine.append("One", [b"body"] * 100, 1_700_000_000_000 + turn, keys=["k"] * 100, queues=1)
    steps = Dispatched(engine, tmp_path / "out", limits=StepLimits(piece_records=50, wide_records=500)).run()
    assert max(step.records for step in steps) == 50


def dispatch_all(engine: Engine, folder: Path) -> Dispatched:
    dispatched = Dispatched(engine, folder)
    dispatched.run()
    return dispatched


def test_dispatch_stops_at_confirmed_position(engine: Engine, tmp_path: Path) -> None:
    dispatched = Dispatched(engine, tmp_path / "out")
    confirmed = 5 * int.from_bytes(engine.log_bytes(0, 4), "big")
    step = dispatched.dispatch.step(0, confirmed)
    assert (step.position, step.records, step.reason) == (confirmed, 5, StopReason.LIMIT)
    step = dispatched.dispatch.step(confirmed, confirmed)
    assert (step.position, step.records, step.stuck) == (confirmed, 0, False)


def test_dispatch_blank_continues_at_next_segment(engine: Engine, tmp_path: Path) -> None:
    step = Dispatched(engine, tmp_path / "out").step()
    assert (step.reason, step.position) == (StopReason.BLANK, engine.segments.segment_size)


def test_dispatch_repeated_range_changes_nothing(engine: Engine, tmp_path: Path) -> None:
    dispatched = dispatch_all(engine, tmp_path / "out")
    before = dispatched.files()
    words = engine.table.cells.copy()
    dispatched.position, dispatched.commit = 0, IndexCommit()
    dispatched.start()
    dispatched.more = {"limits": StepLimits(piece_records=3)}
    step = dispatched.step()
    # Repeated steps may be shorter; published words do not change.
    assert np.array_equal(engine.table.cells, words)
    assert step.records > 0
    dispatched.run()
    assert dispatched.files() == before


def test_dispatch_unknown_queue_or_bad_record_is_stuck(engine: Engine, tmp_path: Path) -> None:
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


def test_dispatch_skips_holes_with_fillers(engine: Engine, tmp_path: Path) -> None:
    """Fillers replace four lost records: unit 4 of each queue of a topic."""
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


def test_dispatch_hole_at_log_start_becomes_fillers(engine: Engine, tmp_path: Path) -> None:
    dispatch_all(engine, tmp_path / "whole")
    forget_queues(engine)
    hole = (0, max(whole_queue(engine, tmp_path, queue_id)[2][0] for queue_id in range(4)))
    dispatched = Dispatched(engine, tmp_path / "out", holes=[hole], limits=StepLimits(piece_records=5))
    dispatched.run()
    assert dispatched.units("First", 0)[:3] == [(0, FILLER_SIZE, 0)] * 3
    assert dispatched.units("First", 0)[3:] == whole_queue(engine, tmp_path, 0)[3:]


def whole_queue(engine: Engine, root: Path, queue_id: int) -> list[tuple[int, int, int]]:
    queues = ConsumeQueueFiles(StoreIO(), root / "whole" / "consumequeue", QUEUE_FILE_BYTES)
    units: list[tuple[int, int, int]] = as_units(queues.read_units("First", queue_id, 0, 60)).tolist()
    return units


def test_dispatch_index_disabled_writes_queues_only(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "store", message_index_enable=False)
    engine.append("T", [b"x"] * 4, keys=["a"] * 4)
    dispatched = dispatch_all(engine, tmp_path / "out")
    assert not (tmp_path / "out" / "index").exists()
    assert len(dispatched.files()) == 4


class Died(BaseException):
    """Simulates SIGKILL."""


class InterruptedIO(StoreIO):
    """Raises `fault` at the nth storage call."""

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
    """Return an engine, and the files of an undisturbed dispatch of its log."""
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
def test_dispatch_full_disk_or_kill_gives_the_same_files(
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
    dispatched = Dispatched(engine, folder, InterruptedIO(nth, every), limits=StepLimits(4000, records, wide))
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


# Single records

CALLS_MAX = 60
FIRST_MS = 1_700_000_000_000


class SingleDispatched(Dispatched):
    """A dispatcher that handles one record at a time."""

    def __init__(self, engine: Engine, folder: Path, io: StoreIO | None = None) -> None:
        self.cells = np.zeros(words_of.FILE_SIZE // words_of.WORD_SIZE, np.int64)
        self.taken: list[bool] = []
        super().__init__(engine, folder, io)

    @property
    def end(self) -> int:
        """Return the end of the next record."""
        return self.position + int.from_bytes(self.engine.log_bytes(self.position, self.position + 4))

    def step(self) -> DispatchResult | None:
        """Dispatch one record, and keep the state that the role publishes."""
        end = self.end
        self.taken.append(self.dispatch.step_single(self.position, end, self.cells))
        if not self.taken[-1]:
            step = self.dispatch.step(self.position, end)
            assert not step.stuck
            self.position, self.commit = step.position, self.dispatch.index_commit
            return step
        cells = self.cells.tolist()
        assert (cells[dispatch_step.STEP_END], cells[dispatch_step.STEP_RECORDS]) == (end, 1)
        self.position = end
        self.commit = IndexCommit(
            file_ms=cells[dispatch_step.INDEX_MS],
            count=cells[dispatch_step.INDEX_ITEMS],
            slots_used=cells[dispatch_step.INDEX_SLOTS],
            end_timestamp_ms=cells[dispatch_step.INDEX_END_MS],
            end_physical_offset=cells[dispatch_step.INDEX_END],
        )
        assert self.commit == self.dispatch.index_commit
        return None

    def run(self) -> list[DispatchResult]:
        while self.position < self.engine.written:
            self.step()
        return []


def use_plain_kernels(single: SingleDispatched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the kernels by their uncompiled functions."""
    buffers = single.dispatch.single
    assert buffers.scan.func is dispatch_step.scan_single
    buffers.scan = functools.partial(plain(dispatch_step.scan_single), *buffers.scan.args)
    monkeypatch.setattr(index_files, "put_single", plain(dispatch_step.put_single))


messages = st.lists(
    st.tuples(
        st.sampled_from(["First", "Second", "SCHEDULE_TOPIC_XXXX"]),
        st.integers(0, 9000),
        st.lists(st.sampled_from(["a", "b", "key", "k" * 40]), max_size=5).map(" ".join),
        st.sampled_from(["", "TagA", "TagB"]),
        st.sampled_from([0, 0, 0, record.SYS_FLAG_PREPARED, record.SYS_FLAG_COMMIT, record.SYS_FLAG_ROLLBACK]),
    ),
    min_size=1,
    max_size=60,
)


@settings(max_examples=40, deadline=None)
@given(messages, st.booleans())
def test_dispatch_single_gives_the_same_files_and_words(
    tmp_path_factory: pytest.TempPathFactory, sent: list[tuple[str, int, str, str, int]], plain_kernels: bool
) -> None:
    root = tmp_path_factory.mktemp("single")
    engine = Engine(root / "store", max_hash_slot_num=SLOTS, max_index_num=ITEMS)
    for turn, (topic, size, keys, tag, sys_flag) in enumerate(sent):
        engine.append(topic, [bytes(size)], FIRST_MS + 400 * turn, keys=[keys], tags=[tag], sys_flag=sys_flag)
    single = SingleDispatched(engine, root / "single")
    with pytest.MonkeyPatch.context() as patch:
        if plain_kernels:
            use_plain_kernels(single, patch)
        single.run()
    words = engine.table.cells.copy()
    forget_queues(engine)
    together = dispatch_all(engine, root / "together")
    assert single.files() == together.files()
    assert single.commit == together.commit
    assert np.array_equal(words, engine.table.cells)


def test_dispatch_single_declines_only_at_new_files(tmp_path: Path) -> None:
    """Most records are dispatched by `step_single`."""
    engine = filled_engine(tmp_path)
    single = SingleDispatched(engine, tmp_path / "single")
    single.run()
    others = [place for place, short in enumerate(single.taken) if not short]
    files = len([name for name in single.files() if name.startswith("index/")])
    segments = engine.written // engine.segments.segment_size
    assert files > 3
    assert others[0] == 0
    assert len(others) == files + segments
    words = engine.table.cells.copy()
    forget_queues(engine)
    assert single.files() == dispatch_all(engine, tmp_path / "together").files()
    assert np.array_equal(words, engine.table.cells)


@pytest.fixture
def started(tmp_path: Path) -> SingleDispatched:
    """Return a dispatcher that has dispatched the first of three records."""
    engine = Engine(tmp_path / "store", max_hash_slot_num=SLOTS, max_index_num=ITEMS)
    engine.append("T", [b"body"] * 3, keys=["k"] * 3, queues=1)
    single = SingleDispatched(engine, tmp_path / "out")
    single.step()
    assert single.taken == [False]
    return single


def declines(single: SingleDispatched, stop: int) -> bool:
    """Return whether `step_single` declines the records before `stop` and changes nothing."""
    before, words = single.files(), single.engine.table.cells.copy()
    taken = single.dispatch.step_single(single.position, stop, single.cells)
    return not taken and single.files() == before and np.array_equal(words, single.engine.table.cells)


def test_dispatch_single_declines_more_than_one_record(started: SingleDispatched) -> None:
    assert declines(started, started.engine.written)
    started.run()
    assert started.taken == [False, True, True]


def test_dispatch_single_declines_partial_record(started: SingleDispatched) -> None:
    assert declines(started, started.end - 1)


def test_dispatch_single_declines_while_log_has_holes(started: SingleDispatched) -> None:
    started.dispatch.add_hole(started.engine.written, started.engine.written + 100)
    assert declines(started, started.end)


def test_dispatch_single_declines_unknown_queue(started: SingleDispatched) -> None:
    started.engine.table.slots[:] = 0
    assert declines(started, started.end)


def test_dispatch_single_declines_missing_segment(started: SingleDispatched) -> None:
    segments, end = started.engine.segments, started.end
    segments.close()
    segments.path(0).unlink()
    assert declines(started, end)


def test_dispatch_single_declines_without_index(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "store", message_index_enable=False)
    engine.append("T", [b"x"] * 8, keys=["a"] * 8, queues=2)
    single = SingleDispatched(engine, tmp_path / "out")
    single.run()
    assert not any(single.taken)
    assert not (tmp_path / "out" / "index").exists()
    forget_queues(engine)
    assert single.files() == dispatch_all(engine, tmp_path / "together").files()


def test_dispatch_single_declines_first_record_without_key(tmp_path: Path) -> None:
    """Otherwise each unit would be written twice."""
    engine = Engine(tmp_path / "store", max_hash_slot_num=SLOTS, max_index_num=ITEMS)
    engine.append("T", [b"x"], queues=1)
    engine.append("T", [b"x"] * 2, keys=["a", ""], queues=1)
    single = SingleDispatched(engine, tmp_path / "out")
    assert declines(single, single.end)
    single.run()
    assert single.taken == [False, False, True]


@pytest.mark.parametrize("fault", [OSError, Died])
def test_dispatch_single_full_disk_or_kill_gives_the_same_files(tmp_path: Path, fault: type[BaseException]) -> None:
    """Fails at each storage call in turn."""
    engine = Engine(tmp_path / "store", max_hash_slot_num=SLOTS, max_index_num=12)
    for turn in range(8):
        engine.append("T", [b"body"], FIRST_MS + 700 * turn, keys=[f"a k{turn}"], queues=2)
    expected = dispatch_all(engine, tmp_path / "together").files()
    for nth in range(1, CALLS_MAX):
        forget_queues(engine)
        io = InterruptedIO(nth, fault)
        single = SingleDispatched(engine, tmp_path / str(nth), io)
        while single.position < engine.written:
            try:
                single.step()
            except OSError:
                assert io.left == 0
            except Died:
                single.start()
        assert single.files() == expected, nth
        assert any(single.taken)
        if io.left > 0:
            return
    pytest.fail(f"dispatch has {CALLS_MAX} storage calls or more")
