"""Delivery by levels on a store of RocketMQ's, step by step with a clock by hand."""

from __future__ import annotations

from pathlib import Path

from mqproc.layout import control as words_of
from mqproc.process.keeper import Keeper
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


def test_a_keeper_that_loses_the_processor_between_two_clocks_is_late_but_never_early(tmp_path: Path) -> None:
    fixture = load_fixture("e_delay", tmp_path)
    sizes = options_of(fixture.expected)
    rig = Rig(
        fixture.store,
        mapped_file_size_commit_log=sizes.mapped_file_size_commit_log,
        mapped_file_size_consume_queue=sizes.mapped_file_size_consume_queue,
        max_hash_slot_num=sizes.max_hash_slot_num,
        max_index_num=sizes.max_index_num,
    )
    rig.clock = PreemptedClock(FIRST_DUE_MS - 700)
    keeper = Keeper(rig.context(words_of.KEEPER))
    keeper.do_work()
    left_ms = FIRST_DUE_MS - ManualClock.time_ms(rig.clock)
    held_ms = (keeper._levels._levels[0].due_ns - ManualClock.monotonic_ns(rig.clock)) / 1e6
    assert left_ms <= held_ms <= left_ms + 2 * PREEMPTED_MS
    keeper.close()
