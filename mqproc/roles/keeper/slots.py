"""State of the timer in memory: heap of due messages, active wheel slots, rolls, backlog.

A slot of the wheel is active from one slot width before it begins. Its messages are loaded into the heap, which orders
them by their exact times.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.config.options import Options
from mqproc.ipc.control_words import Words
from mqproc.layout import control, timer_files
from mqproc.layout.properties import NAME_END, UNIQ_KEY, java_hash
from mqproc.roles.scheduled_records import ScheduledRecords
from mqproc.store.schedule.timer_store import TimerUnits

_NEVER: Final = 1 << 62
topic_hash = functools.lru_cache(4096)(java_hash)
"""Hash of a topic as in the timer log."""
# Dispatch is late when a record has been in the log for longer: it may cancel a message that is due.
LATE_MS: Final = 50
# Polling intervals of dispatch while the end of the backlog is unknown; the shorter one when it has just become late.
POLL_NS: Final = 25_000_000
LATE_POLL_NS: Final = 2_000_000


@dataclass(frozen=True, slots=True)
class HeapEntries:
    """Messages of active slots as columns, int64[n] each."""

    due_ms: NDArray[np.int64]
    physical_offsets: NDArray[np.int64]
    slots_ms: NDArray[np.int64]
    sizes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.due_ms)

    def chosen(self, which: NDArray[np.intp] | NDArray[np.bool_] | slice) -> HeapEntries:
        """Select entries, in the order of `which`."""
        return HeapEntries(self.due_ms[which], self.physical_offsets[which], self.slots_ms[which], self.sizes[which])


_EMPTY: Final = HeapEntries(*[np.zeros(0, np.int64)] * 4)


class TimerHeap:
    """Messages ordered by due time, then by log position.

    They are kept in sorted runs that are merged as they grow, so each message is moved a few times only.
    """

    def __init__(self) -> None:
        self._runs: list[HeapEntries] = []

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    @property
    def first_due_ms(self) -> int:
        """Due time of the first message; far in the future if empty."""
        return min((int(run.due_ms[0]) for run in self._runs), default=_NEVER)

    def add(self, messages: HeapEntries) -> None:
        if not len(messages):
            return
        run = _sort(messages)
        while self._runs and len(self._runs[-1]) <= 2 * len(run):
            run = _sort(_concatenate([self._runs.pop(), run]))
        self._runs.append(run)

    def pop_due(self, until_ms: int, messages_max: int, bytes_max: int) -> HeapEntries:
        """Remove and return the next due messages; the first one may exceed `bytes_max`."""
        due = [part for run in self._runs if len(part := self._due_of(run, until_ms, messages_max))]
        batch = _concatenate(due) if len(due) < 2 else _sort(_concatenate(due))
        count = min(len(batch), messages_max)
        ends = np.cumsum(batch.sizes[:count])
        count = min(count, max(1, int(np.searchsorted(ends, bytes_max, "right"))))
        batch = batch.chosen(slice(0, count))
        # Each sorted run loses its beginning.
        last = (int(batch.due_ms[-1]), int(batch.physical_offsets[-1])) if len(batch) else (-1, -1)
        runs = [run.chosen(slice(_count_up_to(run, *last), None)) for run in self._runs]
        self._runs = [run for run in runs if len(run)]
        return batch

    def _due_of(self, run: HeapEntries, until_ms: int, at_most: int) -> HeapEntries:
        return run.chosen(slice(0, min(at_most, int(np.searchsorted(run.due_ms, until_ms, "right")))))


def _count_up_to(run: HeapEntries, due_ms: int, physical_offset: int) -> int:
    """Number of messages of a run up to and including the given due time and log position."""
    first, stop = (int(np.searchsorted(run.due_ms, due_ms, side)) for side in ("left", "right"))
    return first + int(np.searchsorted(run.physical_offsets[first:stop], physical_offset, "right"))


def _concatenate(parts: list[HeapEntries]) -> HeapEntries:
    if len(parts) == 1:
        return parts[0]
    columns = zip(*((part.due_ms, part.physical_offsets, part.slots_ms, part.sizes) for part in parts), strict=True)
    return HeapEntries(*map(np.concatenate, columns)) if parts else _EMPTY


def _sort(messages: HeapEntries) -> HeapEntries:
    return messages.chosen(np.lexsort((messages.physical_offsets, messages.due_ms)))


@dataclass(slots=True)
class ActiveSlot:
    """An active slot: number of messages without outcome, keys of cancelled messages.

    `open` counts one more while the slot is being loaded. `begin` is a log position at or above which every delivery of
    its messages lies.
    """

    open: int = 0
    cancelled: set[str] = field(default_factory=set)
    begin: int = 1 << 62


@dataclass(slots=True)
class LoadingSlot:
    """An active slot whose messages are being loaded into the heap."""

    slot_ms: int
    units: Iterator[TimerUnits]
    loaded: set[int] = field(default_factory=set)
    """Physical offsets: duplicate units are one message."""

    def new_units(self, units: TimerUnits, early: set[int]) -> TimerUnits:
        """Drop duplicates, and units in `early`, which are in the heap since they were enqueued."""
        offsets = units.physical_offsets.tolist()
        is_new = self.loaded.isdisjoint(offsets) and early.isdisjoint(offsets)
        if is_new and len(set(offsets)) == len(offsets):
            self.loaded.update(offsets)
            return units
        selected = np.zeros(len(offsets), np.bool_)
        for place, offset in enumerate(offsets):
            if offset not in self.loaded:
                self.loaded.add(offset)
                selected[place] = offset not in early
                early.discard(offset)
        return units.chosen(selected)


def slot_counts(slots_ms: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Distinct slots with their counts."""
    if len(slots_ms) and (slots_ms == slots_ms[0]).all():
        return [(int(slots_ms[0]), len(slots_ms))]
    found, counts = np.unique(slots_ms, return_counts=True)
    return list(zip(found.tolist(), counts.tolist(), strict=True))


def wheel_slots(
    slots_ms: NDArray[np.int64], now_ms: int, options: Options
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Wheel slots and magic of units; beyond the roll window an earlier slot and a flag."""
    window_ms = options.timer_roll_window_slot * options.timer_precision_ms
    beyond_ms = slots_ms - now_ms - window_ms
    # Leaves enough time for the next roll.
    wait_ms = np.where(beyond_ms < window_ms // 3, window_ms // 2, window_ms)
    wait_ms -= wait_ms % options.timer_precision_ms
    rolls = beyond_ms >= 0
    magics = timer_files.MAGIC_DEFAULT | np.where(rolls, timer_files.MAGIC_ROLL, 0)
    return np.where(rolls, now_ms + wait_ms, slots_ms), magics


def release_times(units: TimerUnits, rolls: NDArray[np.bool_], precision_ms: int) -> NDArray[np.int64]:
    """Times at which messages leave their slots: their exact time, or the slot's end.

    Rolls leave at the end of the slot, or one slot before the slot of their due time begins, so that a cancellation
    that is rolled is enqueued again before its message is due.
    """
    ends_ms = units.slots_ms + precision_ms
    before_ms = ((units.due_ms - 1) // precision_ms - 1) * precision_ms
    exact_ms = np.where(rolls, np.minimum(ends_ms, before_ms), units.due_ms)
    return np.where(units.due_ms > 0, exact_ms, ends_ms)


def cancelled_mask(records: ScheduledRecords, cancelled: set[str]) -> NDArray[np.bool_]:
    """Mask of cancelled messages.

    RocketMQ 5.3.0 names them by unique id, later releases by topic and unique id. A unique id alone names messages of
    the cancellation's own topic only.
    """
    uniques = (unique.decode("utf-8", "replace") for unique in records.properties.texts(UNIQ_KEY))
    pairs = zip(uniques, records.real_topics, strict=True)
    names = ((cancel_key(topic, unique), topic + unique, f"{topic}+{unique}") for unique, topic in pairs)
    return np.fromiter((not cancelled.isdisjoint(each) for each in names), np.bool_, len(records))


def cancel_key(topic: str, unique: str) -> str:
    """Entry of `ActiveSlot.cancelled` for a unique id in a topic."""
    return f"{topic}{NAME_END}{unique}"


class TimerRolls:
    """Messages beyond the roll window, which go back to the timer's queue.

    A roll may be a cancellation of a message that is due more than a slot later, and a late keeper has both to handle.
    All late rolls are rescheduled together. Rolls that were not due by then wait until these are enqueued again, which
    bounds the work.
    """

    def __init__(self, precision_ms: int) -> None:
        self._precision_ms = precision_ms
        self.heap = TimerHeap()
        self.dispatch_target = 0
        """End of the log after the last rolls were stored; once it is dispatched they can be enqueued."""
        self.returning_from_ms = _NEVER
        """Lower bound of the slots of rolls that are not enqueued again yet."""
        self._until_ms = _NEVER  # Rolls due later wait for those under way.
        self._end = _NEVER  # Queue offset above the rolls under way, once known.
        self._handed_over = False

    @property
    def first_due_ms(self) -> int:
        """Due time of the first roll that may leave; far in the future if none may."""
        first_ms = self.heap.first_due_ms
        return first_ms if first_ms <= self._until_ms else _NEVER

    def next_due_ms(self, messages_ms: int, *, queue_readable: bool) -> int:
        """Due time of the next roll or message; `messages_ms`: due time of the first message.

        Messages that wait for rolls under way are ignored, unless the queue may have them already (`queue_readable`).
        """
        if queue_readable:
            return min(messages_ms, self.heap.first_due_ms)
        return min(messages_ms if messages_ms <= self.safe_until_ms else _NEVER, self.first_due_ms)

    @property
    def safe_until_ms(self) -> int:
        """Messages due later wait, since a roll in the heap or under way may cancel them."""
        return min(self.returning_from_ms, self.heap.first_due_ms + self._precision_ms)

    def pop_due(self, until_ms: int, now_ms: int, messages_max: int, bytes_max: int) -> HeapEntries:
        """Remove and return the next rolls due by `until_ms`, to be rescheduled."""
        batch = self.heap.pop_due(min(until_ms, self._until_ms), messages_max, bytes_max)
        self.returning_from_ms = min(self.returning_from_ms, int(batch.due_ms[0]) + self._precision_ms)
        self._until_ms = min(self._until_ms, now_ms)
        self._end = _NEVER
        self._handed_over = True
        return batch

    def rescheduled(self, written: int) -> None:
        """The last batch is in the log, below `written`."""
        self.dispatch_target = written
        self._handed_over = False

    def update(self, dispatched: int, queue_end: int, enqueued_to: int) -> None:
        """Note the dispatched position, the end of the queue then, and the enqueued offset."""
        if not self._handed_over and dispatched >= self.dispatch_target:
            self._end = min(self._end, queue_end)
        if enqueued_to >= self._end:
            self.returning_from_ms = self._until_ms = _NEVER


class TimerBacklog:
    """Messages in the timer's queue that must be enqueued before anything is delivered.

    The last message of the backlog may cancel the first. A backlog exists when the keeper starts, after a failure to
    enqueue, and when dispatch was late, as on a full disk; then part of it is in the log and not in the queue yet.
    `end` is the queue offset above the backlog, known once everything is dispatched.
    """

    def __init__(self, words: Words) -> None:
        self._words = words
        self.end = 0
        self.is_late = False
        """Whether dispatch was late at the last check."""
        self.until_ms = 0
        """Messages due by then may be delivered despite the backlog: everything in the log by then is enqueued."""
        self._written = 0
        self._began_ms = 0

    @property
    def is_dispatched(self) -> bool:
        return self.end != _NEVER

    def poll_ns(self, now_ns: int, now_ms: int) -> int:
        """When to check again for the end of the backlog."""
        if self._words[control.DISPATCHED] >= self._written:
            return now_ns
        # A dispatcher that waits for disk space, or hangs, may do so for long.
        comes_soon = self.is_late and not self._words[control.DISPATCH_ERRNO] and now_ms < self._began_ms + LATE_MS
        return now_ns + (LATE_POLL_NS if comes_soon else POLL_NS)

    def begin(self, now_ms: int) -> None:
        """Start a backlog that ends at the current end of the log."""
        self._written, self._began_ms, self.end = self._words[control.WRITTEN], now_ms, _NEVER

    def check_dispatch(self, now_ms: int) -> int:
        """Check whether dispatch is late; returns the dispatched position."""
        newest_ms, dispatched = self._words[control.DISPATCHED_STORE_TIMESTAMP_MS], self._words[control.DISPATCHED]
        self.is_late = newest_ms < now_ms - LATE_MS and dispatched < self._words[control.WRITTEN]
        return dispatched

    def update(self, dispatched: int, queue_end: int, enqueued_to: int, now_ms: int) -> None:
        """Note the dispatched position, the end of the queue then, and the enqueued offset.

        While dispatch is late, the end of one backlog begins the next.
        """
        if self.is_late and enqueued_to >= self.end:
            self.until_ms = self._began_ms
            self.begin(now_ms)
        if not self.is_dispatched and dispatched >= self._written:
            self.end = queue_end
