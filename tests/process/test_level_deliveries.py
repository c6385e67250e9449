"""Delivery by levels on a store of RocketMQ's, step by step with a clock by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqproc.layout import control as words_of
from mqproc.names import SCHEDULE_TOPIC
from mqproc.process.keeper import Keeper
from mqproc.store.queue_table import QueueTable
from tests.golden.fixtures import load_fixture, options_of
from tests.process.flusher_rig import Rig
from tests.shm.manual_clock import ManualClock

FIRST_DUE_MS = 1_795_245_511_725
"""Of the message at the head of level 1 in the fixture `e_delay`."""
PREEMPTED_MS = 3


class PreemptedClock(ManualClock):
    """The process loses its processor whenever it has asked for the time."""

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


def test_a_keeper_that_loses_the_processor_between_two_clocks_is_late_but_never_early(rig: Rig) -> None:
    rig.clock = PreemptedClock(FIRST_DUE_MS - 700)
    keeper = Keeper(rig.context(words_of.KEEPER))
    keeper.do_work()
    left_ms = FIRST_DUE_MS - ManualClock.time_ms(rig.clock)
    held_ms = (keeper._levels._levels[0].due_ns - ManualClock.monotonic_ns(rig.clock)) / 1e6
    assert left_ms <= held_ms <= left_ms + 2 * PREEMPTED_MS
    keeper.close()


def test_a_level_that_has_wholly_expired_is_told_as_lost_and_waits_for_more(rig: Rig) -> None:
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
