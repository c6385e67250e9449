"""The timer's files as one: what waits for which second, and how far reading and filing have come.

    timercheck   read_ms       slots below it have been delivered
                 queue_offset  units of rmq_sys_wheel_timer below it have been filed
                 flushed       the timer log's durable end
    timerlog     a unit for each filed message, chained by slot
    timerwheel   where each slot's chain begins

The wheel follows from the timer log, and what the timer log lacks at its end follows from the queue. So an opened store
cuts the log where the check says and makes the wheel anew; a kill, or a loss of power, costs a second's filing.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.errors import CorruptStoreError
from mqproc.io import FailedSyncError, StoreIO
from mqproc.layout import timer_check, timer_log
from mqproc.layout.timer_check import NO_LOG_POSITION, TimerCheck
from mqproc.layout.timer_log import NO_POSITION
from mqproc.paths import StorePaths
from mqproc.store.delays.filed import Filed
from mqproc.store.delays.timer_log import TimerLog
from mqproc.store.delays.timer_waiting import saved_check
from mqproc.store.delays.timer_wheel import Slot, TimerWheel
from mqproc.store.final_syncs import Syncing

# A slot's units are read together with what lies between them, if that is no more than this.
SPAN_BYTES_MAX: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class TimerSnapshot:
    """What `write` puts into the check once the log is durable up to `log_end`."""

    check: TimerCheck
    log_end: int


class TimerStore:
    """The three files. One object in one process: the keeper."""

    def __init__(self, io: StoreIO, syncs: Syncing, paths: StorePaths, precision_ms: int, timer_log_bytes: int) -> None:
        self._io = io
        self._paths = paths
        self._syncs = syncs
        self._precision_ms = precision_ms
        self.remark = ""
        """Why something was made anew, "" when nothing was."""
        self._log = TimerLog(io, syncs, paths.timer_log, timer_log_bytes)
        try:
            self._wheel = TimerWheel(io, syncs, paths, precision_ms)
        except CorruptStoreError as error:
            self.remark = str(error)
            io.unlink(paths.timer_wheel)
            self._wheel = TimerWheel(io, syncs, paths, precision_ms)
        self._latest_slots: dict[int, int] = {}  # by timer log file
        self._touched: dict[int, Slot] = {}  # not in the wheel yet
        self._check = TimerCheck()
        self.read_ms = 0
        self.queue_offset = 0
        self.pending = 0
        """Filed messages of slots from `read_ms` on; the caller takes off what is done."""

    @staticmethod
    def exists(io: StoreIO, paths: StorePaths) -> bool:
        """Whether there is anything to open."""
        return io.exists(paths.timer_check) or io.exists(paths.timer_wheel)

    @property
    def log_position(self) -> int:
        """Where the check says that the log is to be walked from, NO_LOG_POSITION when it does not."""
        return self._check.log

    def open(self, now_ms: int, queue_offset_of: Callable[[int], int | None]) -> None:
        """Read the check, and make log and wheel agree with it.

        `queue_offset_of` is the queue offset of the timer topic's record at a physical offset, None when none is there.
        """
        self._check = saved_check(self._io, self._paths)
        is_ahead = self._check.is_ahead(now_ms)
        self.read_ms = self.slot_of(now_ms if is_ahead else self._check.read_ms or now_ms)
        self.queue_offset = self._check.queue_offset
        end = self._check.timer_log_flushed
        known = self._wheel.first_position(self.read_ms)
        if is_ahead:
            end = self._start_over("timercheck counts more as delivered than can have been due when it was written")
        elif self._check.precision_ms not in (0, self._precision_ms):
            # They do not lead along these, and the check does not say what is delivered of one.
            end = self._start_over(f"its slots are {self._check.precision_ms:,} ms wide, not {self._precision_ms:,}")
            # It stands at a slot to come: what is due before that one's begin has a slot of its own now.
            self.read_ms = min(self.read_ms, self.slot_of(now_ms))
        # Files at the beginning go when all of their slots are delivered.
        elif not self._log.is_whole(end) or (known is not None and known < self._log.begin):
            end = self._start_over(f"a file below {end:,} is missing, or has another length")
        elif end > self._log.files_end:
            # From there on the new units would lie behind zeros, which are none.
            end = self._start_over(f"it ends at {self._log.files_end:,}; timercheck says {end:,}")
        elif self._check.log == NO_LOG_POSITION and self._check.counter:
            end = self._follow_rocketmq(end, queue_offset_of)
        self._log.open_at(end)
        if not self._make_wheel():
            self._log.open_at(self._start_over(f"something below {end:,} is no unit"))
            self._make_wheel()

    def _start_over(self, why: str) -> int:
        """What was filed cannot be trusted: all of the queue is filed again, into a new timer log. Returns its end."""
        self.remark = f"{self._paths.timer_log}: {why}"
        self._log.remove_all()
        self._forget_check()
        return 0

    def _forget_check(self) -> None:
        """Before anything is filed again: with what is, the old check would be believed, by whoever follows a crash."""
        self._io.unlink(self._paths.timer_check)
        # After a failed sync nothing is delivered, and a repair makes all of this anew.
        with contextlib.suppress(FailedSyncError, FileNotFoundError):
            self._syncs.sync_folder(self._paths.timer_check.parent)
        self._check = replace(self._check, log=0)
        self.queue_offset = 0

    def slot_of(self, time_ms: int) -> int:
        """The slot that holds a time."""
        return time_ms // self._precision_ms * self._precision_ms

    def put(self, filed: Filed, now_ms: int, topic_hashes: NDArray[np.int32]) -> int:
        """File the first of these messages, up to the end of a file; returns how many.

        They are in the files after `write_out`. Raises OSError; then none is filed.
        """
        count = min(self._log.room(), len(filed))
        filed = filed.chosen(slice(0, count))
        positions = self._log.end + timer_log.UNIT_SIZE * np.arange(count, dtype=np.int64)
        enqueued_ms = np.minimum(self.slot_of(now_ms), filed.slots_ms)
        units = np.empty(count, timer_log.UNIT_DTYPE)
        units["size"] = timer_log.UNIT_SIZE
        units["magic"] = filed.magics
        units["enqueued_ms"] = enqueued_ms
        units["delay_ms"] = filed.slots_ms - enqueued_ms
        units["physical_offset"] = filed.physical_offsets
        units["message_size"] = filed.sizes
        units["topic_hash"] = topic_hashes[:count]
        units["due_ms"] = filed.due_ms
        touched = self._chain(filed, positions, units)
        start = self._log.end - self._log.end % self._log.file_size
        self._log.append(units.tobytes())
        self._touched.update(touched)
        self._latest_slots[start] = max(int(filed.slots_ms.max()), self._latest_slots.get(start, 0))
        self.pending += count
        return count

    def _chain(self, filed: Filed, positions: NDArray[np.int64], units: NDArray[np.void]) -> dict[int, Slot]:
        """Set each unit's previous one of its slot; returns what the slots say with them."""
        order = np.argsort(filed.slots_ms, kind="stable")
        slots_ms, positions = filed.slots_ms[order], positions[order]
        steps = np.where(filed.magics[order] & timer_log.MAGIC_DELETE, -1, 1)
        previous = np.append(np.int64(NO_POSITION), positions[:-1])
        edges = [0, *(np.flatnonzero(slots_ms[1:] != slots_ms[:-1]) + 1).tolist(), len(order)]
        touched: dict[int, Slot] = {}
        for first, stop in itertools.pairwise(edges):
            slot_ms = int(slots_ms[first])
            slot = self._touched.get(slot_ms) or self._wheel.slot(slot_ms)
            previous[first] = slot.last
            begin = int(positions[first]) if slot.first == NO_POSITION else slot.first
            messages = slot.messages + int(steps[first:stop].sum())
            touched[slot_ms] = Slot(slot_ms, begin, int(positions[stop - 1]), messages)
        units["previous"][order] = previous
        return touched

    def write_out(self) -> None:
        """Give everything that was filed to the files. Raises OSError; then the rest is kept for the next call."""
        self._log.write_out()
        while self._touched:
            slot_ms, slot = next(iter(self._touched.items()))
            self._wheel.put(slot_ms, slot.first, slot.last, slot.messages)
            del self._touched[slot_ms]

    def occupied(self, from_ms: int, to_ms: int) -> list[int]:
        """Slots in [from, to) that hold something; all is written out."""
        found: list[int] = []
        wheel_ms = self._wheel.slots * self._precision_ms
        while from_ms < to_ms:
            until_ms = min(to_ms, from_ms + wheel_ms)
            found += self._wheel.occupied(from_ms, until_ms)
            from_ms = until_ms
        return found

    def filed(self, slot_ms: int, part_messages: int) -> Iterator[Filed]:
        """The messages of a slot as it is now, in any order, so many at a time; all is written out.

        Raises CorruptStoreError while they are gone through.
        """
        slot = self._wheel.slot(slot_ms)
        if slot.last == NO_POSITION:
            return iter(())
        if slot.last - slot.first <= SPAN_BYTES_MAX:
            return self._filed_between(slot, part_messages)
        return self._filed_along(slot, part_messages)

    def _filed_between(self, slot: Slot, part_messages: int) -> Iterator[Filed]:
        """All units of the slot between its first and its last one: most of what lies there is the slot's own."""
        for units in self._log.between(max(slot.first, self._log.begin), slot.last):
            times = (units["enqueued_ms"].astype(np.int64) + units["delay_ms"]) // self._precision_ms
            own = units[times == slot.time_ms // self._precision_ms]
            for first in range(0, len(own), part_messages):
                part = own[first : first + part_messages]
                names = ("magic", "physical_offset", "message_size", "due_ms")
                columns = (part[name].astype(np.int64) for name in names)
                yield Filed(np.full(len(part), slot.time_ms, np.int64), *columns)

    def _filed_along(self, slot: Slot, part_messages: int) -> Iterator[Filed]:
        """The units of the slot's chain, one by one, the last one first."""
        rows: list[tuple[int, ...]] = []
        position = slot.last
        try:
            while position != NO_POSITION and position >= self._log.begin:
                _, previous, magic, enqueued_ms, delay_ms, physical_offset, size, _, due_ms = self._log.read(position)
                if previous >= position or self.slot_of(enqueued_ms + delay_ms) != slot.time_ms:
                    raise CorruptStoreError(f"timer log: the unit at {position} is not one of slot {slot.time_ms}")
                rows.append((slot.time_ms, magic, physical_offset, size, due_ms))
                position = previous
                if len(rows) == part_messages:
                    yield _rows(rows)
                    rows = []
        except CorruptStoreError as error:
            # What was found before it counts.
            if rows:
                yield _rows(rows)
            raise error
        if rows:
            yield _rows(rows)

    def sync(self) -> None:
        """Make log and wheel durable. Raises OSError, FailedSyncError."""
        for _ in self.sync_steps():
            pass

    def sync_steps(self) -> Iterator[None]:
        """The same a sync at a time, so that others have a turn in between."""
        self.write_out()
        self._log.sync()
        yield
        self._wheel.sync()

    def picture(self, log: int, log_end: int, now_ms: int) -> TimerSnapshot:
        """What the check is to say of now, once all that is filed by now is synced. Raises OSError.

        `log` is where the log is to be walked from for deliveries that are not counted.
        """
        self.write_out()
        counter = self._check.counter + 1
        words = self.read_ms, self._log.end, self.queue_offset, now_ms, counter, log, self._precision_ms
        check = TimerCheck(*words)
        return TimerSnapshot(check, log_end)

    def snapshot(self, log: int, log_end: int, now_ms: int) -> TimerSnapshot:
        """The same with the timer's own files made durable. Raises OSError, FailedSyncError."""
        found = self.picture(log, log_end, now_ms)
        self.sync()
        return found

    def write(self, snapshot: TimerSnapshot) -> None:
        """Replace the check; the log must be durable up to `snapshot.log_end`. Raises OSError, FailedSyncError."""
        self._io.make_folder(self._paths.timer_check.parent)
        self._syncs.write_file_atomically(self._paths.timer_check, timer_check.encode(snapshot.check))
        self._check = snapshot.check
        done = [start for start, slot_ms in self._latest_slots.items() if slot_ms < snapshot.check.read_ms]
        if done and self._log.delete_below(min(self._latest_slots.keys() - set(done), default=self._log.end)):
            self._latest_slots = {s: slot for s, slot in self._latest_slots.items() if s >= self._log.begin}

    def close(self) -> None:
        self._log.close()
        self._wheel.close()

    def _follow_rocketmq(self, flushed: int, queue_offset_of: Callable[[int], int | None]) -> int:
        """RocketMQ wrote the check before it synced what it counts: the last whole unit tells how far it came."""
        end, last = flushed, None
        for start, units in self._log.units(1 << 62):
            if len(units) and start + len(units) * timer_log.UNIT_SIZE >= flushed:
                end = start + len(units) * timer_log.UNIT_SIZE
                last = int(units[-1]["physical_offset"])
        filed = queue_offset_of(last) if last is not None else None
        if filed is not None:
            self.queue_offset = min(self.queue_offset, filed + 1)
        return end

    def _make_wheel(self) -> bool:
        """Empty the wheel and fill it from the timer log; returns whether that has units wherever it must."""
        self._wheel.clear()
        self._latest_slots.clear()
        self.pending = 0
        slots: dict[int, tuple[int, int, int]] = {}
        whole = True
        for start, units in self._log.units(self._log.end):
            whole &= len(units) == self._log.units_at(start)
            if not len(units):
                continue
            times = (units["enqueued_ms"].astype(np.int64) + units["delay_ms"]) // self._precision_ms
            self._latest_slots[start] = int(times.max()) * self._precision_ms
            positions = start + np.arange(len(units), dtype=np.int64) * timer_log.UNIT_SIZE
            waiting = times >= self.read_ms // self._precision_ms
            steps = np.where(units["magic"] & timer_log.MAGIC_DELETE, -1, 1)
            self._add_to_slots(slots, times[waiting], positions[waiting], steps[waiting])
            self.pending += int(waiting.sum())
        for number, (first, last, count) in slots.items():
            self._wheel.put(number * self._precision_ms, first, last, count)
        return whole

    def _add_to_slots(
        self,
        slots: dict[int, tuple[int, int, int]],
        numbers: NDArray[np.int64],
        positions: NDArray[np.int64],
        steps: NDArray[np.int64],
    ) -> None:
        """Units of one file, ascending by position: each slot's first and last, and its count."""
        found, firsts, inverse = np.unique(numbers, return_index=True, return_inverse=True)
        counts = np.bincount(inverse, steps, len(found))
        lasts = np.zeros(len(found), np.int64)
        lasts[inverse] = positions
        for index, number in enumerate(found.tolist()):
            first, _last, count = slots.get(number, (int(positions[firsts[index]]), 0, 0))
            slots[number] = (first, int(lasts[index]), count + int(counts[index]))


def _rows(rows: list[tuple[int, ...]]) -> Filed:
    return Filed(*np.array(rows, np.int64).T)
