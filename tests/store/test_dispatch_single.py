"""Records that are dispatched one by one, by the shorter way: files and words are those of all others."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqproc.io.store_io import StoreIO
from mqproc.kernels import dispatch_step
from mqproc.kernels.jit.compile import plain
from mqproc.layout import control as words_of
from mqproc.layout import record
from mqproc.store.dispatch import DispatchResult
from mqproc.store.index import files as index_files
from mqproc.store.index.files import IndexCommit
from tests.store.test_dispatch import (
    ITEMS,
    SLOTS,
    Died,
    Dispatched,
    FaultyIO,
    dispatch_all,
    filled_engine,
    forget_queues,
)
from tests.support.store_builders import Engine

CALLS_MAX = 60
FIRST_MS = 1_700_000_000_000


class Alone(Dispatched):
    """A dispatcher that is given record by record, as one that keeps up with single messages is."""

    def __init__(self, engine: Engine, folder: Path, io: StoreIO | None = None) -> None:
        self.cells = np.zeros(words_of.FILE_SIZE // words_of.WORD_SIZE, np.int64)
        self.ways: list[bool] = []
        super().__init__(engine, folder, io)

    @property
    def end(self) -> int:
        """Where the record ends that comes next."""
        return self.position + int.from_bytes(self.engine.log_bytes(self.position, self.position + 4))

    def step(self) -> DispatchResult | None:
        """One record, of whose words those are kept that its role would publish."""
        end = self.end
        self.ways.append(self.dispatch.step_single(self.position, end, self.cells))
        if not self.ways[-1]:
            step = self.dispatch.step(self.position, end)
            assert not step.stuck
            self.position, self.commit = step.position, self.dispatch.index_commit
            return step
        said = self.cells.tolist()
        assert (said[dispatch_step.STEP_END], said[dispatch_step.STEP_RECORDS]) == (end, 1)
        self.position = end
        self.commit = IndexCommit(
            file_ms=said[dispatch_step.INDEX_MS],
            count=said[dispatch_step.INDEX_ITEMS],
            slots_used=said[dispatch_step.INDEX_SLOTS],
            end_timestamp_ms=said[dispatch_step.INDEX_END_MS],
            end_physical_offset=said[dispatch_step.INDEX_END],
        )
        assert self.commit == self.dispatch.index_commit
        return None

    def run(self) -> list[DispatchResult]:
        while self.position < self.engine.written:
            self.step()
        return []


def uncompiled(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the kernels' plain twins do it."""
    buffers = alone.dispatch._single
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
def test_what_comes_alone_becomes_the_same_files_and_words(
    tmp_path_factory: pytest.TempPathFactory, sent: list[tuple[str, int, str, str, int]], twin: bool
) -> None:
    root = tmp_path_factory.mktemp("alone")
    engine = Engine(root / "store", max_hash_slot_num=SLOTS, max_index_num=ITEMS)
    for turn, (topic, size, keys, tag, sys_flag) in enumerate(sent):
        engine.append(topic, [bytes(size)], FIRST_MS + 400 * turn, keys=[keys], tags=[tag], sys_flag=sys_flag)
    alone = Alone(engine, root / "alone")
    with pytest.MonkeyPatch.context() as patch:
        if twin:
            uncompiled(alone, patch)
        alone.run()
    words = engine.table.cells.copy()
    forget_queues(engine)
    together = dispatch_all(engine, root / "together")
    assert alone.files() == together.files()
    assert alone.commit == together.commit
    assert np.array_equal(words, engine.table.cells)


def test_a_record_goes_the_short_way_but_where_something_begins(tmp_path: Path) -> None:
    """Without this all else here would be true of a dispatcher that has none."""
    engine = filled_engine(tmp_path)
    alone = Alone(engine, tmp_path / "alone")
    alone.run()
    others = [place for place, short in enumerate(alone.ways) if not short]
    files = len([name for name in alone.files() if name.startswith("index/")])
    segments = engine.written // engine.segments.segment_size
    assert files > 3
    assert others[0] == 0
    assert len(others) == files + segments
    words = engine.table.cells.copy()
    forget_queues(engine)
    assert alone.files() == dispatch_all(engine, tmp_path / "together").files()
    assert np.array_equal(words, engine.table.cells)


@pytest.fixture
def begun(tmp_path: Path) -> Alone:
    """A dispatcher behind its first record, of three."""
    engine = Engine(tmp_path / "store", max_hash_slot_num=SLOTS, max_index_num=ITEMS)
    engine.append("T", [b"body"] * 3, keys=["k"] * 3, queues=1)
    alone = Alone(engine, tmp_path / "out")
    alone.step()
    assert alone.ways == [False]
    return alone


def is_left_alone(alone: Alone, stop: int) -> bool:
    """Whether the short way does nothing of what lies before `stop`."""
    before, words = alone.files(), alone.engine.table.cells.copy()
    taken = alone.dispatch.step_single(alone.position, stop, alone.cells)
    return not taken and alone.files() == before and np.array_equal(words, alone.engine.table.cells)


def test_more_than_one_record_is_left_to_the_other_way(begun: Alone) -> None:
    assert is_left_alone(begun, begun.engine.written)
    begun.run()
    assert begun.ways == [False, True, True]


def test_half_of_a_record_is(begun: Alone) -> None:
    assert is_left_alone(begun, begun.end - 1)


def test_so_is_all_while_the_log_has_holes(begun: Alone) -> None:
    begun.dispatch.add_hole(begun.engine.written, begun.engine.written + 100)
    assert is_left_alone(begun, begun.end)


def test_so_is_a_record_whose_queue_nobody_knows(begun: Alone) -> None:
    begun.engine.table.slots[:] = 0
    assert is_left_alone(begun, begun.end)


def test_so_is_one_whose_segment_is_gone(begun: Alone) -> None:
    segments, end = begun.engine.segments, begun.end
    segments.close()
    segments.path(0).unlink()
    assert is_left_alone(begun, end)


def test_so_is_all_without_an_index(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "store", message_index_enable=False)
    engine.append("T", [b"x"] * 8, keys=["a"] * 8, queues=2)
    alone = Alone(engine, tmp_path / "out")
    alone.run()
    assert not any(alone.ways)
    assert not (tmp_path / "out" / "index").exists()
    forget_queues(engine)
    assert alone.files() == dispatch_all(engine, tmp_path / "together").files()


def test_so_is_what_has_no_key_before_there_is_an_index_file(tmp_path: Path) -> None:
    """Each unit was written twice."""
    engine = Engine(tmp_path / "store", max_hash_slot_num=SLOTS, max_index_num=ITEMS)
    engine.append("T", [b"x"], queues=1)
    engine.append("T", [b"x"] * 2, keys=["a", ""], queues=1)
    alone = Alone(engine, tmp_path / "out")
    assert is_left_alone(alone, alone.end)
    alone.run()
    assert alone.ways == [False, False, True]


@pytest.mark.parametrize("fault", [OSError, Died])
def test_after_a_full_disk_or_a_death_the_files_are_the_same(tmp_path: Path, fault: type[BaseException]) -> None:
    """At each storage call in turn."""
    engine = Engine(tmp_path / "store", max_hash_slot_num=SLOTS, max_index_num=12)
    for turn in range(8):
        engine.append("T", [b"body"], FIRST_MS + 700 * turn, keys=[f"a k{turn}"], queues=2)
    expected = dispatch_all(engine, tmp_path / "together").files()
    for nth in range(1, CALLS_MAX):
        forget_queues(engine)
        io = FaultyIO(nth, fault)
        alone = Alone(engine, tmp_path / str(nth), io)
        while alone.position < engine.written:
            try:
                alone.step()
            except OSError:
                assert io.left == 0
            except Died:
                alone.start()
        assert alone.files() == expected, nth
        assert any(alone.ways)
        if io.left > 0:
            return
    pytest.fail(f"dispatch has {CALLS_MAX} storage calls or more")
