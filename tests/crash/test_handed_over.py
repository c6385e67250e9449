"""What a killed keeper had handed to the writer is not delivered a second time by its successor."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqproc.config.options import FlushDiskType
from mqproc.layout import control as words_of
from tests.crash.disk import Disk, Journal, walk_log
from tests.crash.group import Group, Schedule, SimulatedClock
from tests.crash.levels import options_of
from tests.crash.producers import Senders, Sent, is_copy
from tests.crash.recording_io import Machine
from tests.crash.story import FIRST_MS

TURNS = 400


class OneLater(Senders):
    """Sends one message a frame, each to be delivered a second later."""

    by_level = True

    def make(self, count: int, *, at_once: bool = False) -> list[Sent]:
        return super().make(1, at_once=at_once)

    def _delay(self) -> tuple[int, int]:
        return (1, 0) if self.by_level else (0, self.time_ms + 1000)


@contextlib.contextmanager
def running(root: Path) -> Iterator[tuple[Group, Schedule, SimulatedClock]]:
    root.mkdir()
    machine = Machine(Disk.of(root))
    schedule = Schedule(random.Random(0), Journal())
    machine.between = schedule.pause
    clock = SimulatedClock(schedule, FIRST_MS)
    group = Group(root, options_of(FlushDiskType.ASYNC_FLUSH), machine, schedule, clock)
    try:
        yield group, schedule, clock
    finally:
        group.kill_all()


@pytest.mark.parametrize("by_level", [True, False], ids=["level", "time"])
def test_a_delivery_on_its_way_is_made_once(by_level: bool, tmp_path: Path) -> None:
    with running(tmp_path / "store") as (group, schedule, clock):
        senders = OneLater(random.Random(0))
        senders.by_level = by_level

        def send_and_wait() -> None:
            senders.time_ms = clock.time_ms()
            schedule.add("sender", lambda: senders.run(group.paths, schedule, 1))
            for _ in range(TURNS):
                schedule.turn()
            clock.advance(2000)

        def go_on() -> None:
            for _ in range(2 * TURNS):
                schedule.turn()
                clock.advance(5)

        def keeper_alone() -> None:
            for _ in range(TURNS):
                schedule.turn(words_of.KEEPER)

        send_and_wait()
        go_on()
        send_and_wait()
        # The writer does not come to what the keeper has handed over, until that is killed and a successor is there.
        keeper_alone()
        group.kill(words_of.KEEPER)
        group.start(words_of.KEEPER)
        keeper_alone()
        go_on()
        records = walk_log(group.paths.commit_log)
        assert [placed.message.body for placed in records if is_copy(placed)] == [sent.body for sent in senders.sent]
