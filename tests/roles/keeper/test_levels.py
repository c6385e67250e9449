"""Delivery by levels on a RocketMQ store, step by step with a manual clock."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from mqproc.layout import control as words_of
from mqproc.layout.consume_queue import UNIT_SIZE
from mqproc.layout.queue_table import MAX_OFFSET
from mqproc.roles.keeper.role import Keeper
from mqproc.store.consumequeue.bounds import as_units
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.schedule.delivery_marks import DeliveryMarks, mark_of
from mqproc.store.schedule.levels import DelayOffsets
from mqproc.topic_names import SCHEDULE_TOPIC
from tests.golden.fixtures import load_fixture, options_of
from tests.roles.rigs import Rig
from tests.support.fakes import ManualClock

FIRST_DUE_MS = 1_795_245_511_725
"""Of the message at the head of level 1 in the fixture `e_delay`."""
PREEMPTED_MS = 3


class PreemptedClock(ManualClock):
    """The process is preempted after each reading of the clock."""

    def monotonic_ns(self) -> int:
        now_ns = super().monotonic_ns()
        self.advance(PREEMPTED_MS)
        return now_ns

    def time_ms(self) -> int:
        now_ms = super().time_ms()
        self.advance(PREEMPTED_MS)
        return now_ms


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    fixture = load_fixture("e_delay", tmp_path)
    sizes = options_of(fixture.expected)
    return Rig(
        fixture.store,
        mapped_file_size_commit_log=sizes.mapped_file_size_commit_log,
        mapped_file_size_consume_queue=sizes.mapped_file_size_consume_queue,
        max_hash_slot_num=sizes.max_hash_slot_num,
        max_index_num=sizes.max_index_num,
    )


def test_levels_preempted_between_clocks_are_late_never_early(rig: Rig) -> None:
    rig.clock = PreemptedClock(FIRST_DUE_MS - 700)
    keeper = Keeper(rig.context(words_of.KEEPER))
    keeper.do_work()
    left_ms = FIRST_DUE_MS - ManualClock.time_ms(rig.clock)
    held_ms = (keeper._levels._levels[0].due_ns - ManualClock.monotonic_ns(rig.clock)) / 1e6
    assert left_ms <= held_ms <= left_ms + 2 * PREEMPTED_MS
    keeper.close()


def test_levels_clock_moved_back_keeps_predecessor_deliveries(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A keeper whose first message is no longer due at its start records it for the next."""
    file = DelayOffsets.load(rig.io, rig.paths)
    begin = file.log = 100
    file.save(rig.io, rig.io, rig.paths, FIRST_DUE_MS)
    offset = file.offsets.get(1, 0)
    units = as_units((rig.paths.queue(SCHEDULE_TOPIC, 0) / f"{0:020d}").read_bytes()[offset * UNIT_SIZE :])
    monkeypatch.setattr(DeliveryMarks, "marks", lambda self, begin, end: {mark_of(int(units["physical_offset"][0]))})
    rig.clock.set_time_ms(FIRST_DUE_MS - 700)
    keeper = Keeper(rig.context(words_of.KEEPER))
    keeper.do_work()
    level = keeper._levels._levels[0]
    assert (level.offset, level.caught_up, keeper._levels._begin()) == (offset, False, begin)
    rig.clock.advance(701)
    keeper.do_work()
    keeper.do_work()
    assert (level.offset, level.caught_up) == (offset + 1, True)
    keeper.close()


def test_levels_wholly_expired_level_is_reported_lost_and_continues(rig: Rig) -> None:
    table = QueueTable(rig.io, rig.paths.queues, write=True)
    number = table.entry(SCHEDULE_TOPIC, 0)
    waiting = table.max_offset(number)
    table.raise_min_offset(number, waiting)
    rig.clock.set_time_ms(FIRST_DUE_MS - 700)
    keeper = Keeper(rig.context(words_of.KEEPER))
    keeper.do_work()
    assert keeper._levels._levels[0].offset == waiting
    assert rig.control.words[words_of.DELIVERIES_LOST] >= waiting > 0
    keeper.close()
    table.close()


def test_levels_offsets_survive_a_start_without_space_for_queues(rig: Rig) -> None:
    """The offsets were reset to the dispatched end, and messages were delivered twice."""
    with contextlib.closing(QueueTable(rig.io, rig.paths.queues, write=True)) as table:
        number = table.entry(SCHEDULE_TOPIC, 0)
        delivered = table.max_offset(number)
        rig.paths.delay_offsets.write_text(f'{{"offsetTable":{{1:{delivered}}},"mqproc":{{"log":0}}}}')
        table.store(number, MAX_OFFSET, 0)
        dispatched = rig.control.load(words_of.DISPATCHED)
        rig.control.store(words_of.DISPATCHED, 0)
        rig.clock.set_time_ms(FIRST_DUE_MS - 700)
        with contextlib.closing(Keeper(rig.context(words_of.KEEPER))) as keeper:
            keeper.do_work()
            assert rig.control.words[words_of.DELAYED_MESSAGES] == 0, "the number of delayed messages is not known yet"
            keeper._levels.save(rig.control.words[words_of.WRITTEN])
            assert DelayOffsets.load(rig.io, rig.paths).offsets == {1: delivered}
            table.store(number, MAX_OFFSET, delivered)
            rig.control.store(words_of.DISPATCHED, dispatched)
            keeper.do_work()
            assert keeper._levels._levels[0].offset == delivered > 0
