"""Saves in parts: one part at a time, one whole at a stop, and what an error leaves."""

from __future__ import annotations

from collections.abc import Iterator

from mqproc.io.clock import Clock
from mqproc.roles.delivery_queue import SAVE_INTERVAL_NS, IncrementalSave


class Saves:
    """Three parts a save; those of `failing` end it."""

    def __init__(self) -> None:
        self.done: list[tuple[int, int]] = []
        self.failing = -1
        self.told: list[OSError] = []
        self.save = IncrementalSave(Clock(), self._steps, self.told.append)

    def _steps(self, durable: int) -> Iterator[None]:
        for part in range(3):
            if part == self.failing:
                raise OSError("no room")
            self.done.append((durable, part))
            if part < 2:
                yield


def test_each_call_does_one_part() -> None:
    saves, before_ns = Saves(), Clock().monotonic_ns()
    for parts in (1, 2, 3):
        saves.save.step()
        assert (saves.done, saves.save.under_way) == ([(0, part) for part in range(parts)], parts < 3)
    assert saves.save.due_ns >= before_ns + SAVE_INTERVAL_NS


def test_a_whole_save_begins_anew() -> None:
    saves = Saves()
    saves.save.step()
    saves.save.save_all(7)
    assert saves.done == [(0, 0), (7, 0), (7, 1), (7, 2)]
    assert not saves.save.under_way


def test_an_error_ends_a_save_and_the_next_one_begins_anew() -> None:
    saves = Saves()
    saves.failing = 1
    saves.save.step()
    saves.save.step()
    assert (len(saves.told), saves.save.under_way) == (1, False)
    saves.failing = -1
    saves.save.save_all(0)
    assert saves.done == [(0, 0), (0, 0), (0, 1), (0, 2)]
