"""Slots of the timer's wheel that are up: what is to be held of them, what is open, what is cancelled."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mqproc.config import Options
from mqproc.layout import timer_log
from mqproc.layout.java_hash import java_hash
from mqproc.layout.properties import UNIQ_KEY
from mqproc.roles.released import ParkedRecords
from mqproc.store.delays.filed import Filed


@dataclass(slots=True)
class Slot:
    """A slot that is up: how many of its messages have no outcome, and the keys of those that are cancelled.

    `open` counts one more while messages of it are still to be held. `begin` is a position of the log below which none
    of its messages was delivered.
    """

    open: int = 0
    cancelled: set[str] = field(default_factory=set)
    begin: int = 1 << 62


@dataclass(slots=True)
class Rising:
    """A slot that is up, and those of its messages that are not held yet."""

    slot_ms: int
    filed: Iterator[Filed]
    held: set[int] = field(default_factory=set)
    """By physical offset: a unit that is there twice is one message."""

    def not_held(self, filed: Filed, early: set[int]) -> Filed:
        """What is neither there for the second time nor in `early`, held since it was filed."""
        offsets = filed.physical_offsets.tolist()
        is_new = self.held.isdisjoint(offsets) and early.isdisjoint(offsets)
        if is_new and len(set(offsets)) == len(offsets):
            self.held.update(offsets)
            return filed
        wanted = np.zeros(len(offsets), np.bool_)
        for place, offset in enumerate(offsets):
            if offset not in self.held:
                self.held.add(offset)
                wanted[place] = offset not in early
                early.discard(offset)
        return filed.chosen(wanted)


def counts_of(slots_ms: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Each slot, and how often it is there."""
    if len(slots_ms) and (slots_ms == slots_ms[0]).all():
        return [(int(slots_ms[0]), len(slots_ms))]
    found, counts = np.unique(slots_ms, return_counts=True)
    return list(zip(found.tolist(), counts.tolist(), strict=True))


def with_rolls(
    slots_ms: NDArray[np.int64], now_ms: int, options: Options
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The slots to file under, and the units' magic: further off than the roll window it is an earlier one."""
    window_ms = options.timer_roll_window_slot * options.timer_precision_ms
    beyond_ms = slots_ms - now_ms - window_ms
    # Time enough is left for the next roll too.
    wait_ms = np.where(beyond_ms < window_ms // 3, window_ms // 2, window_ms)
    wait_ms -= wait_ms % options.timer_precision_ms
    rolls = beyond_ms >= 0
    magics = timer_log.MAGIC_DEFAULT | np.where(rolls, timer_log.MAGIC_ROLL, 0)
    return np.where(rolls, now_ms + wait_ms, slots_ms), magics


def leaving_ms(filed: Filed, rolls: NDArray[np.bool_], precision_ms: int) -> NDArray[np.int64]:
    """When messages leave their slots: at their time, or at the slot's end where no exact one is known.

    Those that are parked again do so at its end too, and at the latest a slot before the one of their time begins: so a
    cancellation is back before its message is due.
    """
    ends_ms = filed.slots_ms + precision_ms
    before_ms = ((filed.due_ms - 1) // precision_ms - 1) * precision_ms
    exact_ms = np.where(rolls, np.minimum(ends_ms, before_ms), filed.due_ms)
    return np.where(filed.due_ms > 0, exact_ms, ends_ms)


def are_cancelled(parked: ParkedRecords, cancelled: set[str]) -> NDArray[np.bool_]:
    """RocketMQ 5.3.0 names the message by its unique id alone, later releases by topic and unique id."""
    uniques = (unique.decode("utf-8", "replace") for unique in parked.properties.texts(UNIQ_KEY))
    pairs = zip(uniques, parked.real_topics, strict=True)
    found = (not cancelled.isdisjoint({unique, topic + unique, f"{topic}+{unique}"}) for unique, topic in pairs)
    return np.fromiter(found, np.bool_, len(parked))


topic_hash = functools.lru_cache(4096)(java_hash)
"""A topic's, as the timer log has it."""
