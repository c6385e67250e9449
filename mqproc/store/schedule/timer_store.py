"""The timer's files as a unit: delayed messages by slot, and the progress of their delivery.

    timercheck   read_ms       slots below it have been delivered
                 queue_offset  units of rmq_sys_wheel_timer below it have been enqueued
                 flushed       durable end of the timer log
    timerlog     a unit per enqueued message, chained by slot
    timerwheel   head of each slot's chain

The wheel is derived from the timer log, and the end of the timer log from the queue. So opening a store clears the
log from where the check says and rebuilds the wheel; a kill or a power loss costs a second of enqueueing.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mqproc.errors import CorruptStoreError
from mqproc.io.store_io import FailedSyncError, StoreIO, zero_tail
from mqproc.layout import timer_files
from mqproc.layout.timer_files import NO_LOG_POSITION, NO_POSITION, TimerCheck
from mqproc.paths import StorePaths, segment_name, segment_start
from mqproc.store.cooperative import Slices
from mqproc.store.offsets.consumer_offset_json import CommittedOffset
from mqproc.store.sync_guard import Syncing
from mqproc.topic_names import TIMER_TOPIC

# The timer wheel: RocketMQ's `timerwheel` file, derived from the timer log.
#
# Slots are read and written one by one instead of mapped, so that a full disk is an error and not a signal.


class WheelSlot(NamedTuple):
    """A slot; `time_ms`, `first` and `last` are −1 in an empty one."""

    time_ms: int
    first: int
    last: int
    messages: int
    magic: int = 0


EMPTY = WheelSlot(-1, NO_POSITION, NO_POSITION, 0)


def messages_in_slot(io: StoreIO, paths: StorePaths, time_ms: int, precision_ms: int) -> int:
    """Number of messages in the slot of a time, without the keeper; 0 without a file.

    Messages appear there some ms after they are stored. Raises OSError.
    """
    number = time_ms // precision_ms
    try:
        with io.opened(paths.timer_wheel) as fd:
            slots = io.size(fd) // timer_files.SLOT_SIZE
            data = io.pread(fd, timer_files.SLOT_SIZE, number % slots * timer_files.SLOT_SIZE) if slots else b""
    except FileNotFoundError:
        return 0
    return _slot_of(data, number, precision_ms).messages if len(data) == timer_files.SLOT_SIZE else 0


def _slot_of(data: bytes, number: int, precision_ms: int) -> WheelSlot:
    """Decode the slot with this number; EMPTY if it holds another time."""
    time, first, last, count, magic = timer_files.SLOT.unpack(data)
    return WheelSlot(time * precision_ms, first, last, count, magic) if time == number else EMPTY


class TimerWheel:
    """Slots by time. Exactly one object exists, in the keeper."""

    def __init__(
        self, io: StoreIO, syncs: Syncing, paths: StorePaths, precision_ms: int, slots: int = timer_files.SLOTS
    ) -> None:
        """Open or create the file. Raises CorruptStoreError if it has another number of slots."""
        self._io = io
        self._syncs = syncs
        self.precision_ms = precision_ms
        self.slots = slots
        self._fd = io.open(paths.timer_wheel, write=True, create=True)
        found = io.size(self._fd)
        if found == 0:
            io.set_size(self._fd, slots * timer_files.SLOT_SIZE)
        elif found != slots * timer_files.SLOT_SIZE:
            io.close(self._fd)
            raise CorruptStoreError(
                f"{paths.timer_wheel}: {found:,} bytes; {slots:,} slots have {slots * timer_files.SLOT_SIZE:,}"
            )

    def slot(self, time_ms: int) -> WheelSlot:
        """The slot of a time; EMPTY if it has no messages of that time."""
        number = time_ms // self.precision_ms
        data = self._io.pread(self._fd, timer_files.SLOT_SIZE, number % self.slots * timer_files.SLOT_SIZE)
        return _slot_of(data, number, self.precision_ms)

    def put(self, time_ms: int, first: int, last: int, count: int, magic: int = 0) -> None:
        """Set the slot of a time. Raises OSError."""
        number = time_ms // self.precision_ms
        data = timer_files.SLOT.pack(number, first, last, count, magic)
        self._io.pwrite(self._fd, data, number % self.slots * timer_files.SLOT_SIZE)

    def occupied(self, from_ms: int, to_ms: int) -> list[int]:
        """Times of the nonempty slots in [from, to), ascending; the range must not exceed the wheel."""
        low, high = from_ms // self.precision_ms, -(-to_ms // self.precision_ms)
        first, count = low % self.slots, min(high - low, self.slots)
        if count <= 0:
            return []
        cells = self._cells(first, min(count, self.slots - first))
        if len(cells) < count:
            cells = np.concatenate((cells, self._cells(0, count - len(cells))))
        times = cells["time"]
        return [int(time) * self.precision_ms for time in times[(times >= low) & (times < high)].tolist()]

    def first_position(self, from_ms: int) -> int | None:
        """Lowest timer log position at which a slot at or after a time begins; None without any."""
        cells = self._cells(0, self.slots)
        firsts = cells["first"][(cells["time"] >= from_ms // self.precision_ms) & (cells["first"] >= 0)]
        return int(firsts.min()) if len(firsts) else None

    def clear(self) -> None:
        self._io.set_size(self._fd, 0)
        self._io.set_size(self._fd, self.slots * timer_files.SLOT_SIZE)

    def sync(self) -> None:
        """Make the slots durable. Raises FailedSyncError."""
        self._syncs.sync(self._fd)

    def close(self) -> None:
        self._io.close(self._fd)

    def _cells(self, first: int, count: int) -> NDArray[np.void]:
        data = self._io.pread(self._fd, count * timer_files.SLOT_SIZE, first * timer_files.SLOT_SIZE)
        return np.frombuffer(data, timer_files.SLOT_DTYPE)


# The timer log: RocketMQ's `timerlog/` files, to which the keeper appends.


class TimerLog:
    """A row of files of one size; positions count from the first file ever created."""

    def __init__(self, io: StoreIO, syncs: Syncing, folder: Path, file_size: int = timer_files.LOG_FILE_SIZE) -> None:
        self._io = io
        self._syncs = syncs
        self._folder = folder
        self._fds: dict[int, int] = {}
        starts = self.starts()
        # Existing files keep their size.
        found = io.size_of(folder / segment_name(starts[0])) if starts else 0
        self._configured = file_size
        self.file_size = found if found >= timer_files.LOG_FILE_SIZE_MIN else file_size
        self.begin = starts[0] if starts else 0
        self._buffer = bytearray()  # Units up to `end` that are not written yet.
        self.end = self.begin
        """Position after the last unit; set by `open_at` for existing files."""
        self.synced = self.end

    @property
    def files_end(self) -> int:
        """End of the last file; `begin` if none exists."""
        starts = self.starts()
        return starts[-1] + self.file_size if starts else self.begin

    def is_whole(self, end: int) -> bool:
        """Whether the files below `end` are contiguous and have their full length."""
        starts = [start for start in self.starts() if start < end]
        follow = all(later == earlier + self.file_size for earlier, later in itertools.pairwise(starts))
        sizes = {self._io.size_of(self._folder / segment_name(start)) for start in starts}
        return follow and sizes <= {self.file_size} and all(start % self.file_size == 0 for start in starts)

    def remove_all(self) -> None:
        self.close()
        for start in self.starts():
            self._io.unlink(self._folder / segment_name(start))
        self.file_size = self._configured
        self.begin = self.end = self.synced = 0

    def starts(self) -> list[int]:
        """Start positions of the existing files, ascending."""
        found = (segment_start(name) for name in self._io.names(self._folder))
        return sorted(start for start in found if start is not None)

    def open_at(self, end: int) -> None:
        """Continue at `end`, zeroing everything after it."""
        self.end = self.synced = max(end, self.begin)
        for start in self.starts():
            if start + self.file_size > self.end:
                fd = self._fd(start)
                # Not by truncation: after a kill the next start would adopt the shorter size for all files.
                zero_tail(self._io, fd, max(0, self.end - start))
                self._io.set_size(fd, self.file_size)

    def append(self, unit: bytes) -> int:
        """Append a unit, several that fit into one file, or other bytes; returns the position.

        They are buffered until `write_out`. Raises OSError, without a change, if a full file cannot be ended.
        """
        self._roll_for(len(unit))
        at = self.end
        self._buffer += unit
        self.end = at + len(unit)
        return at

    def room(self) -> int:
        """Number of units that fit into the current file. Raises OSError as `append`."""
        self._roll_for(timer_files.UNIT_SIZE)
        return (self.file_size - self.end % self.file_size - timer_files.END_SIZE) // timer_files.UNIT_SIZE

    def _roll_for(self, size: int) -> None:
        """Switch to the next file if these bytes and the end mark do not fit into the current one."""
        start = self.end - self.end % self.file_size
        if self.end + size + timer_files.END_SIZE > start + self.file_size:
            self.write_out()
            rest = start + self.file_size - self.end
            self._io.pwrite(
                self._fd(start), timer_files.END.pack(rest, 0, timer_files.END_MAGIC)[:rest], self.end - start
            )
            self.end = start + self.file_size

    def write_out(self) -> None:
        """Write the buffered units. Raises OSError and keeps them for the next call."""
        if self._buffer:
            begin = self.end - len(self._buffer)
            start = begin - begin % self.file_size
            self._io.pwrite(self._fd(start), self._buffer, begin - start)
            self._buffer.clear()

    def between(self, first: int, last: int) -> Iterator[NDArray[np.void]]:
        """Units from position `first` to position `last`, file by file."""
        while first <= last:
            start = first - first % self.file_size
            stop = min(last + timer_files.UNIT_SIZE, start + self._per_file * timer_files.UNIT_SIZE)
            yield np.frombuffer(self._io.pread(self._fd(start), stop - first, first - start), timer_files.UNIT_DTYPE)
            first = start + self.file_size

    def read(self, position: int) -> tuple[int, ...]:
        """Fields of a unit. Raises CorruptStoreError."""
        start = position - position % self.file_size
        data = self._io.pread(self._fd(start), timer_files.UNIT_SIZE, position - start) if position < self.end else b""
        if len(data) < timer_files.UNIT_SIZE or int.from_bytes(data[:4], "big") != timer_files.UNIT_SIZE:
            raise CorruptStoreError(f"{self._folder / segment_name(start)}: no unit at {position - start}")
        return timer_files.UNIT.unpack(data)

    def units(self, limit: int) -> Iterator[tuple[int, NDArray[np.void]]]:
        """(first position, units) of each file up to `limit`, each up to its first invalid unit."""
        for start in self.starts():
            if start >= limit:
                return
            size = min(self.file_size, limit - start)
            data = self._io.pread(self._fd(start), size - size % timer_files.UNIT_SIZE, 0)
            units = np.frombuffer(data, timer_files.UNIT_DTYPE, min(len(data) // timer_files.UNIT_SIZE, self._per_file))
            others = np.flatnonzero(units["size"] != timer_files.UNIT_SIZE)
            yield start, units[: int(others[0])] if len(others) else units

    def units_at(self, start: int) -> int:
        """Number of units that the file at `start` must have."""
        return min(self._per_file, max(0, self.end - start) // timer_files.UNIT_SIZE)

    @property
    def _per_file(self) -> int:
        return timer_files.units_per_file(self.file_size)

    def sync(self) -> None:
        """Make everything durable. Raises FailedSyncError."""
        self.write_out()
        if self.synced == self.end:
            return
        for start, fd in self._fds.items():
            if start + self.file_size > self.synced:
                self._syncs.sync(fd)
        self._syncs.sync_folder(self._folder)
        self.synced = self.end

    def delete_below(self, position: int) -> int:
        """Delete files that end at or below a position, except the last; returns their number."""
        gone = [start for start in self.starts()[:-1] if start + self.file_size <= position]
        for start in gone:
            if start in self._fds:
                self._io.close(self._fds.pop(start))
            self._io.unlink(self._folder / segment_name(start))
        self.begin = max(self.begin, *(start + self.file_size for start in gone)) if gone else self.begin
        return len(gone)

    def close(self) -> None:
        for fd in self._fds.values():
            self._io.close(fd)
        self._fds.clear()

    def _fd(self, start: int) -> int:
        fd = self._fds.get(start)
        if fd is None:
            self._io.make_folder(self._folder)
            path = self._folder / segment_name(start)
            is_new = not self._io.exists(path)
            fd = self._io.open(path, write=True, create=True)
            if is_new:
                self._io.set_size(fd, self.file_size)
            self._fds[start] = fd
        return fd


@dataclass(frozen=True, slots=True)
class TimerUnits:
    """Columns of enqueued messages, int64[n] each; `due_ms` is 0 if only the record has it."""

    slots_ms: NDArray[np.int64]
    magics: NDArray[np.int64]
    physical_offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    due_ms: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.slots_ms)

    def chosen(self, which: NDArray[np.bool_] | slice) -> TimerUnits:
        """Some of the messages, in the same order."""
        columns = self.slots_ms, self.magics, self.physical_offsets, self.sizes, self.due_ms
        return TimerUnits(*(column[which] for column in columns))


# A slot's units are read in one range, including foreign units, up to this size.
SPAN_BYTES_MAX: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class TimerSnapshot:
    """Content of the check, to be written once the CommitLog is durable up to `log_end`."""

    check: TimerCheck
    log_end: int


class TimerStore:
    """The three files. Exactly one object exists, in the keeper."""

    def __init__(self, io: StoreIO, syncs: Syncing, paths: StorePaths, precision_ms: int, timer_log_bytes: int) -> None:
        self._io = io
        self._paths = paths
        self._syncs = syncs
        self._precision_ms = precision_ms
        self.remark = ""
        """Why files were rebuilt, "" if they were not."""
        self._log = TimerLog(io, syncs, paths.timer_log, timer_log_bytes)
        try:
            self._wheel = TimerWheel(io, syncs, paths, precision_ms)
        except CorruptStoreError as error:
            self.remark = str(error)
            io.unlink(paths.timer_wheel)
            self._wheel = TimerWheel(io, syncs, paths, precision_ms)
        self._latest_slots: dict[int, int] = {}  # By timer log file.
        self._touched: dict[int, WheelSlot] = {}  # Not in the wheel yet.
        self._check = TimerCheck()
        self.read_ms = 0
        self.queue_offset = 0
        self.pending = 0
        """Enqueued messages of slots from `read_ms` on; the caller subtracts delivered messages."""

    @staticmethod
    def exists(io: StoreIO, paths: StorePaths) -> bool:
        """Whether any of the files exists."""
        return io.exists(paths.timer_check) or io.exists(paths.timer_wheel)

    @property
    def log_position(self) -> int:
        """Log position for the scan for deliveries, NO_LOG_POSITION if the check lacks it."""
        return self._check.log

    def open(self, now_ms: int, queue_offset_of: Callable[[int], int | None], *, clean: bool) -> None:
        """Read the check, and make log and wheel consistent with it.

        `queue_offset_of` returns the queue offset of the timer topic's record at a physical offset, None without one.
        `clean`: the last program with this store, mqproc or RocketMQ, has closed it.
        """
        self._check = read_timer_check(self._io, self._paths)
        is_ahead = self._check.is_ahead(now_ms)
        self.read_ms = self.slot_of(now_ms if is_ahead else self._check.read_ms or now_ms)
        self.queue_offset = self._check.queue_offset
        end = self._check.timer_log_flushed
        first = self._wheel.first_position(self.read_ms)
        if is_ahead:
            end = self._start_over("timercheck counts more as delivered than can have been due when it was written")
        elif self._check.precision_ms not in (0, self._precision_ms):
            # Chains follow the old slots, and the check does not say what of a partial slot was delivered.
            end = self._start_over(f"its slots are {self._check.precision_ms:,} ms wide, not {self._precision_ms:,}")
            # Its slot lies ahead: messages due before that slot begins have their own slots now.
            self.read_ms = min(self.read_ms, self.slot_of(now_ms))
        # The first files are deleted when all their slots are delivered.
        elif not self._log.is_whole(end) or (first is not None and first < self._log.begin):
            end = self._start_over(f"a file below {end:,} is missing, or has another length")
        elif end > self._log.files_end:
            # New units would follow zeros, which are not units.
            end = self._start_over(f"it ends at {self._log.files_end:,}; timercheck says {end:,}")
        elif self._check.log == NO_LOG_POSITION and self._check.counter:
            end = self._follow_rocketmq(end, queue_offset_of, clean=clean)
        self._log.open_at(end)
        if not self._rebuild_wheel():
            self._log.open_at(self._start_over(f"something below {end:,} is not a unit"))
            self._rebuild_wheel()

    def _start_over(self, why: str) -> int:
        """Discard the timer log, so that the whole queue is enqueued again; returns its new end."""
        self.remark = f"{self._paths.timer_log}: {why}"
        self._log.remove_all()
        self._forget_check()
        return 0

    def _forget_check(self) -> None:
        """Delete the check before enqueueing again: after a crash it would match the new files."""
        self._io.unlink(self._paths.timer_check)
        # After a failed sync nothing is delivered, and a repair rebuilds all of this.
        with contextlib.suppress(FailedSyncError, FileNotFoundError):
            self._syncs.sync_folder(self._paths.timer_check.parent)
        self._check = replace(self._check, log=0)
        self.queue_offset = 0

    def slot_of(self, time_ms: int) -> int:
        return time_ms // self._precision_ms * self._precision_ms

    def put(self, units: TimerUnits, now_ms: int, topic_hashes: NDArray[np.int32]) -> int:
        """Enqueue the first of these messages, up to the end of a file; returns how many.

        They are in the files after `write_out`. Raises OSError without enqueueing any.
        """
        count = min(self._log.room(), len(units))
        units = units.chosen(slice(0, count))
        positions = self._log.end + timer_files.UNIT_SIZE * np.arange(count, dtype=np.int64)
        enqueued_ms = np.minimum(self.slot_of(now_ms), units.slots_ms)
        rows = np.empty(count, timer_files.UNIT_DTYPE)
        rows["size"] = timer_files.UNIT_SIZE
        rows["magic"] = units.magics
        rows["enqueued_ms"] = enqueued_ms
        rows["delay_ms"] = units.slots_ms - enqueued_ms
        rows["physical_offset"] = units.physical_offsets
        rows["message_size"] = units.sizes
        rows["topic_hash"] = topic_hashes[:count]
        rows["due_ms"] = units.due_ms
        touched = self._chain(units, positions, rows)
        start = self._log.end - self._log.end % self._log.file_size
        self._log.append(rows.tobytes())
        self._touched.update(touched)
        self._latest_slots[start] = max(int(units.slots_ms.max()), self._latest_slots.get(start, 0))
        self.pending += count
        return count

    def _chain(self, units: TimerUnits, positions: NDArray[np.int64], rows: NDArray[np.void]) -> dict[int, WheelSlot]:
        """Link each unit to the previous one of its slot; returns the updated slots."""
        order = np.argsort(units.slots_ms, kind="stable")
        slots_ms, positions = units.slots_ms[order], positions[order]
        steps = np.where(units.magics[order] & timer_files.MAGIC_DELETE, -1, 1)
        previous = np.append(np.int64(NO_POSITION), positions[:-1])
        edges = [0, *(np.flatnonzero(slots_ms[1:] != slots_ms[:-1]) + 1).tolist(), len(order)]
        touched: dict[int, WheelSlot] = {}
        for first, stop in itertools.pairwise(edges):
            slot_ms = int(slots_ms[first])
            slot = self._touched.get(slot_ms) or self._wheel.slot(slot_ms)
            previous[first] = slot.last
            begin = int(positions[first]) if slot.first == NO_POSITION else slot.first
            messages = slot.messages + int(steps[first:stop].sum())
            touched[slot_ms] = WheelSlot(slot_ms, begin, int(positions[stop - 1]), messages)
        rows["previous"][order] = previous
        return touched

    def write_out(self) -> None:
        """Write everything enqueued. Raises OSError and keeps the rest for the next call."""
        self._log.write_out()
        while self._touched:
            slot_ms, slot = next(iter(self._touched.items()))
            self._wheel.put(slot_ms, slot.first, slot.last, slot.messages)
            del self._touched[slot_ms]

    def occupied(self, from_ms: int, to_ms: int) -> list[int]:
        """Nonempty slots in [from, to); requires `write_out`."""
        found: list[int] = []
        wheel_ms = self._wheel.slots * self._precision_ms
        while from_ms < to_ms:
            until_ms = min(to_ms, from_ms + wheel_ms)
            found += self._wheel.occupied(from_ms, until_ms)
            from_ms = until_ms
        return found

    def units_of(self, slot_ms: int, part_messages: int) -> Iterator[TimerUnits]:
        """Messages of a slot as of now, unordered, in parts of that size; requires `write_out`.

        Raises CorruptStoreError during the iteration.
        """
        slot = self._wheel.slot(slot_ms)
        if slot.last == NO_POSITION:
            return iter(())
        if slot.last - slot.first <= SPAN_BYTES_MAX:
            return self._units_between(slot, part_messages)
        return self._units_along(slot, part_messages)

    def _units_between(self, slot: WheelSlot, part_messages: int) -> Iterator[TimerUnits]:
        """The slot's units, from the range between its first and last one."""
        for units in self._log.between(max(slot.first, self._log.begin), slot.last):
            times = (units["enqueued_ms"].astype(np.int64) + units["delay_ms"]) // self._precision_ms
            own = units[times == slot.time_ms // self._precision_ms]
            for first in range(0, len(own), part_messages):
                part = own[first : first + part_messages]
                names = ("magic", "physical_offset", "message_size", "due_ms")
                columns = (part[name].astype(np.int64) for name in names)
                yield TimerUnits(np.full(len(part), slot.time_ms, np.int64), *columns)

    def _units_along(self, slot: WheelSlot, part_messages: int) -> Iterator[TimerUnits]:
        """The slot's units, following its chain backwards."""
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
            # Units found before the error count.
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
        """`sync` one file at a time, for cooperative callers."""
        self.write_out()
        self._log.sync()
        yield
        self._wheel.sync()

    def prepare_snapshot(self, log: int, log_end: int, now_ms: int) -> TimerSnapshot:
        """Content of the check as of now, valid once all enqueued is synced. Raises OSError.

        `log` is the log position for the scan for deliveries that are not counted.
        """
        self.write_out()
        words = self.read_ms, self._log.end, self.queue_offset, now_ms, self._check.counter + 1, log
        return TimerSnapshot(TimerCheck(*words, self._precision_ms), log_end)

    def synced_snapshot(self, log: int, log_end: int, now_ms: int) -> TimerSnapshot:
        """`prepare_snapshot` with the timer's own files synced. Raises OSError, FailedSyncError."""
        found = self.prepare_snapshot(log, log_end, now_ms)
        self.sync()
        return found

    def write(self, snapshot: TimerSnapshot) -> None:
        """Replace the check; the log must be durable to its `log_end`. Raises OSError."""
        self._io.make_folder(self._paths.timer_check.parent)
        self._syncs.write_file_atomically(self._paths.timer_check, timer_files.encode_check(snapshot.check))
        self._check = snapshot.check
        done = [start for start, slot_ms in self._latest_slots.items() if slot_ms < snapshot.check.read_ms]
        if done and self._log.delete_below(min(self._latest_slots.keys() - set(done), default=self._log.end)):
            self._latest_slots = {s: slot for s, slot in self._latest_slots.items() if s >= self._log.begin}

    def close(self) -> None:
        self._log.close()
        self._wheel.close()

    def _follow_rocketmq(self, flushed: int, queue_offset_of: Callable[[int], int | None], *, clean: bool) -> int:
        """Find the end of a log of RocketMQ, which writes the check before it syncs the log.

        After a crash the check may count messages as enqueued whose units are lost; those after the last unit are
        enqueued again. A closed store has all units. RocketMQ delivers a message that is already due without a unit:
        it would itself deliver such messages again at its next start.
        """
        end, last = flushed, None
        for start, units in self._log.units(1 << 62):
            if len(units) and start + len(units) * timer_files.UNIT_SIZE >= flushed:
                end = start + len(units) * timer_files.UNIT_SIZE
                last = int(units[-1]["physical_offset"])
        enqueued = queue_offset_of(last) if last is not None and not clean else None
        if enqueued is not None:
            self.queue_offset = min(self.queue_offset, enqueued + 1)
        return end

    def _rebuild_wheel(self) -> bool:
        """Rebuild the wheel from the timer log; returns whether the log has all its units."""
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
            positions = start + np.arange(len(units), dtype=np.int64) * timer_files.UNIT_SIZE
            waiting = times >= self.read_ms // self._precision_ms
            steps = np.where(units["magic"] & timer_files.MAGIC_DELETE, -1, 1)
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
        """Add units of one file, ascending by position, to first, last and count of their slots."""
        found, firsts, inverse = np.unique(numbers, return_index=True, return_inverse=True)
        counts = np.bincount(inverse, steps, len(found))
        lasts = np.zeros(len(found), np.int64)
        lasts[inverse] = positions
        for index, number in enumerate(found.tolist()):
            first, _last, count = slots.get(number, (int(positions[firsts[index]]), 0, 0))
            slots[number] = (first, int(lasts[index]), count + int(counts[index]))


def _rows(rows: list[tuple[int, ...]]) -> TimerUnits:
    return TimerUnits(*np.array(rows, np.int64).T)


# Read access without the keeper

_UNITS_PER_SLICE: Final = 1 << 14


def read_timer_check(io: StoreIO, paths: StorePaths) -> TimerCheck:
    """The last saved `timercheck`; zeros without one."""
    try:
        return timer_files.decode_check(io.read_file(paths.timer_check))
    except FileNotFoundError:
        return TimerCheck()


def enqueue_progress(check: TimerCheck) -> CommittedOffset:
    """Progress of enqueueing as a committed offset of a group."""
    return CommittedOffset("of the timer", TIMER_TOPIC, 0, check.queue_offset)


def first_pending(io: StoreIO, paths: StorePaths, check: TimerCheck, minimum: int) -> Slices[int | None]:
    """First record at or above log position `minimum` that is enqueued but not delivered.

    Units of the timer log have the order of the log, so the first undelivered unit is that of the first record.
    """
    starts = sorted(start for name in io.names(paths.timer_log) if (start := segment_start(name)) is not None)
    for start in starts:
        # If the keeper has deleted the file, all its slots are delivered.
        with contextlib.suppress(FileNotFoundError), io.opened(paths.timer_log / segment_name(start)) as fd:
            at, end = 0, min(io.size(fd), check.timer_log_flushed - start)
            while at < end:
                size = min(_UNITS_PER_SLICE * timer_files.UNIT_SIZE, end - at)
                data = io.pread(fd, size, at)
                units = np.frombuffer(data, timer_files.UNIT_DTYPE, len(data) // timer_files.UNIT_SIZE)
                places = units["physical_offset"]
                waits = units["enqueued_ms"].astype(np.int64) + units["delay_ms"] >= check.read_ms
                found = np.flatnonzero(waits & (places >= minimum) & (units["size"] == timer_files.UNIT_SIZE))
                if len(found):
                    return int(places[found[0]])
                at += size
                yield
    return None
