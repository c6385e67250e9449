"""Verification of the timer's files against each other, the log and the timer's queue.

Undelivered messages are in slots from the check's `read_ms` on; units of earlier slots only need a valid form. The
timer log ends where the check says. RocketMQ writes its check before it syncs the units that the check counts, so after
RocketMQ the log ends with its last whole unit. In a running group only units are checked: the rest keeps changing.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mqproc.errors import CorruptStoreError
from mqproc.io.store_io import StoreIO
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.kernels.record_check import VERIFY_NOTHING, checked_size
from mqproc.layout import properties as names
from mqproc.layout import timer_files
from mqproc.layout.consume_queue import FILLER_SIZE, UNIT_SIZE
from mqproc.layout.record import BODY
from mqproc.layout.record_codec import fixed_of, topic_places
from mqproc.layout.timer_files import NO_LOG_POSITION, NO_POSITION, TimerCheck
from mqproc.store.consumequeue.bounds import as_units
from mqproc.store.verify.findings import LISTED_MAX, Finding, FindingKind
from mqproc.store.verify.inventory import Inventory, Queue
from mqproc.store.verify.log import SegmentViews, WholeLog
from mqproc.store.verify.queues import QueueComparison, read_queue
from mqproc.store.verify.snapshot import Snapshot
from mqproc.topic_names import TIMER_TOPIC

# Records of the timer's topic

_TOPIC = TIMER_TOPIC.encode()
_RELEASE_AFTER = 4096


class ParkedTime(NamedTuple):
    """A record of the timer's topic. `out_ms` None: without time or topic, never delivered."""

    size: int
    out_ms: int | None
    cancels: bool


class TimerRecords:
    """Reads records of the timer's topic by log offset."""

    def __init__(self, io: StoreIO, inventory: Inventory) -> None:
        self._views = SegmentViews(io, inventory)
        self._read = 0

    def at(self, physical_offset: int) -> ParkedTime | None:
        """Read the record at a log offset; None if no record of the timer's topic begins there."""
        base = self._views.start_of(physical_offset)
        view = self._views.view(base)
        place = physical_offset - base
        if view is None or place >= len(view):
            return None
        size = int(checked_size(view, place, len(view), physical_offset, VERIFY_NOTHING))
        if size <= 0:
            return None
        self._read += 1
        if self._read % _RELEASE_AFTER == 0:
            self._views.release_all()
        return _parse_parked(bytes(view[place : place + size]))

    def close(self) -> None:
        self._views.close()


def _parse_parked(record: bytes) -> ParkedTime | None:
    """Parse a record whose sizes are valid."""
    fixed = fixed_of(record)
    more = len(fixed[9]) + len(fixed[11]) - 16
    topic, topic_end = topic_places(record, BODY + more + max(0, fixed[14]), fixed[1])
    if record[topic:topic_end] != _TOPIC:
        return None
    pairs = names.decode(record[topic_end + 2 :].decode("utf-8", "replace"))
    out = pairs.get(names.TIMER_OUT_MS, "")
    is_whole = out.isdigit() and pairs.get(names.REAL_TOPIC)
    return ParkedTime(len(record), int(out) if is_whole else None, bool(pairs.get(names.TIMER_DEL_UNIQKEY)))


def first_pending_offset(io: StoreIO, inventory: Inventory, read_ms: int) -> int:
    """First queue offset of a message due at `read_ms` or later; the queue's end without one."""
    records, after = TimerRecords(io, inventory), 0
    try:
        for first, data, count in read_queue(io, inventory, (TIMER_TOPIC, 0)):
            if data is None:
                continue
            units = as_units(data[: count * UNIT_SIZE])
            # Unwritten units would point to the log's first record.
            places = np.where(units["size"] > 0, units["physical_offset"], -1)
            for index, place in enumerate(places.tolist()):
                parked = records.at(place) if place >= 0 else None
                if parked is None:
                    continue
                if parked.out_ms is not None and parked.out_ms >= read_ms:
                    return first + index
                after = first + index + 1
        return after
    finally:
        records.close()


_QUEUE: Final[Queue] = (TIMER_TOPIC, 0)
_CHECK: Final = "config/timercheck"
_WHEEL: Final = "timerwheel"
_MAGICS: Final = frozenset(range(timer_files.MAGIC_DEFAULT, 8, timer_files.MAGIC_ROLL))
# Messages already due when they are filed go into a slot near that time.
_LATE_SLOTS: Final = 2

_Units = NDArray[np.void]
_WAITING = np.dtype(
    [("position", "i8"), ("slot", "i8"), ("enqueued", "i8"), ("previous", "i8"), ("physical_offset", "i8"),
     ("size", "i8"), ("magic", "i8")]
)  # fmt: skip


class TimerFindings:
    """Findings about the timer files of one store. Slots are `precision_ms` wide."""

    def __init__(
        self, io: StoreIO, snapshot: Snapshot, log: WholeLog, both: QueueComparison, precision_ms: int
    ) -> None:
        self._io = io
        self._inventory = snapshot.inventory
        self._paths = snapshot.inventory.paths
        self._running = snapshot.positions.running
        self._log = log
        self._both = both
        self._precision_ms = precision_ms
        self._closed = not self._running and not io.exists(self._paths.abort)
        self._files = snapshot.inventory.timer_log
        self._file_size = snapshot.inventory.timer_log_size
        self._records = TimerRecords(io, snapshot.inventory)
        self._check = TimerCheck()

    def run(self) -> list[Finding]:
        """Return all findings."""
        try:
            data = self._io.read_file(self._paths.timer_check)
        except (FileNotFoundError, IsADirectoryError):
            return list(self._without_check())
        findings = []
        if len(data) != timer_files.CHECK_FILE_SIZE:
            text = f"{len(data):,} bytes; it has {timer_files.CHECK_FILE_SIZE:,}"
            offset = min(len(data), timer_files.CHECK_FILE_SIZE)
            findings.append(Finding(FindingKind.TIMER_FILE_LENGTH, _CHECK, offset, text=text))
        self._check = timer_files.decode_check(data)
        if not self._running:
            findings += self._check_findings()
        end = self._end()
        waiting, filed = self._units(end, findings)
        findings += self._chain_findings(waiting)
        if not self._running:
            findings += self._missing_findings(filed)
            findings += self._wheel_findings(waiting)
        self._records.close()
        return findings

    def _without_check(self) -> Iterator[Finding]:
        if self._running or not any(len(units) for _start, units in self._units_below(1 << 62)):
            return
        # The check is written a second after the first unit.
        yield Finding(FindingKind.TIMER_CHECK_MISSING, _CHECK, text="the timer log has units", as_note=not self._closed)

    def _check_findings(self) -> Iterator[Finding]:
        check, files_end = self._check, max(self._files, default=0) + (self._file_size if self._files else 0)
        if check.timer_log_flushed > files_end:
            text = f"the timer log ends at {files_end:,}; durable is {check.timer_log_flushed:,}"
            yield Finding(FindingKind.TIMER_CHECK_AHEAD, _CHECK, 8, text=text)
        if check.is_ahead(time.time_ns() // 1_000_000):
            text = f"delivered is all that is due before {check.read_ms} ms; it was written at {check.timestamp_ms}"
            yield Finding(FindingKind.TIMER_CHECK_AHEAD, _CHECK, 0, text=text)
        end = self._both.max_offset(_QUEUE) or 0
        if check.queue_offset > end:
            text = f"{TIMER_TOPIC} queue 0 ends at {end:,}; filed is {check.queue_offset:,}"
            yield Finding(FindingKind.TIMER_CHECK_AHEAD, _CHECK, 16, text=text)

    def _end(self) -> int:
        """End of the valid units."""
        flushed = self._check.timer_log_flushed
        if self._is_own_check or self._running:
            return flushed
        ends = (start + len(units) * timer_files.UNIT_SIZE for start, units in self._units_below(1 << 62) if len(units))
        return max(flushed, max(ends, default=0))

    @property
    def _is_own_check(self) -> bool:
        """Whether mqproc wrote the check last, not RocketMQ."""
        return self._check.log != NO_LOG_POSITION

    @property
    def _begin(self) -> int:
        return min(self._files, default=0)

    # Units

    def _units_below(self, end: int) -> Iterator[tuple[int, _Units]]:
        """(start, units before the first invalid one) of each file."""
        for start, data in self._data_below(end):
            units = np.frombuffer(data, timer_files.UNIT_DTYPE, len(data) // timer_files.UNIT_SIZE)
            units = units[: timer_files.units_per_file(self._file_size)]
            others = np.flatnonzero(units["size"] != timer_files.UNIT_SIZE)
            yield start, units[: int(others[0])] if len(others) else units

    def _data_below(self, end: int) -> Iterator[tuple[int, bytes]]:
        for start, size in sorted(self._files.items()):
            if start >= end:
                return
            try:
                with self._io.opened(self._paths.timer_log / f"{start:020d}") as fd:
                    data = self._io.pread(fd, min(size, self._file_size, end - start), 0)
            except FileNotFoundError:
                continue
            yield start, data

    def _units(self, end: int, findings: list[Finding]) -> tuple[NDArray[np.void], NDArray[np.int64]]:
        """(units of undelivered slots by position, sorted log offsets of all units)."""
        waiting, filed = [np.empty(0, _WAITING)], [np.empty(0, np.int64)]
        for start, data in self._data_below(end):
            findings += self._form_findings(start, data)
            count = min(len(data) // timer_files.UNIT_SIZE, timer_files.units_per_file(self._file_size))
            units = np.frombuffer(data, timer_files.UNIT_DTYPE, count)
            positions = start + np.arange(count, dtype=np.int64) * timer_files.UNIT_SIZE
            good = units["size"] == timer_files.UNIT_SIZE
            waiting.append(self._waiting(units[good], positions[good]))
            filed.append(units["physical_offset"][good].astype(np.int64))
        return np.concatenate(waiting), np.unique(np.concatenate(filed))

    def _form_findings(self, start: int, data: bytes) -> Iterator[Finding]:
        """Invalid units below the end, and an invalid end mark of a full file."""
        per_file = timer_files.units_per_file(self._file_size)
        units = np.frombuffer(data, timer_files.UNIT_DTYPE, min(len(data) // timer_files.UNIT_SIZE, per_file))
        bad = np.flatnonzero((units["size"] != timer_files.UNIT_SIZE) | ~np.isin(units["magic"], list(_MAGICS)))
        for first, count in _runs(bad):
            offset = first * timer_files.UNIT_SIZE
            yield Finding(FindingKind.TIMER_UNIT_WRONG, _name(start), offset, count=count, text="no unit")
        at = per_file * timer_files.UNIT_SIZE
        if len(data) == self._file_size:
            stored = timer_files.END.unpack_from(data, at)
            if stored != (self._file_size - at, 0, timer_files.END_MAGIC):
                text = "the end mark of the file is invalid"
                yield Finding(FindingKind.TIMER_UNIT_WRONG, _name(start), at, text=text)

    def _waiting(self, units: _Units, positions: NDArray[np.int64]) -> NDArray[np.void]:
        enqueued = units["enqueued_ms"].astype(np.int64)
        slots = (enqueued + units["delay_ms"]) // self._precision_ms
        chosen = slots >= self._check.read_ms // self._precision_ms
        found = np.empty(int(chosen.sum()), _WAITING)
        found["position"], found["slot"] = positions[chosen], slots[chosen]
        found["enqueued"] = enqueued[chosen] // self._precision_ms
        found["size"] = units["message_size"][chosen]
        for name in ("previous", "physical_offset", "magic"):
            found[name] = units[name][chosen]
        return found

    # Waiting messages against the log and their chains

    def _chain_findings(self, waiting: NDArray[np.void]) -> Iterator[Finding]:
        befores = _previous_positions(waiting)
        # The first unit of a slot has no valid predecessor.
        unchained = (waiting["previous"] != befores) & ((befores != NO_POSITION) | (waiting["previous"] >= self._begin))
        for index in np.flatnonzero(unchained).tolist():
            text = f"the unit before it in its slot is at {befores[index]:,}, not at {waiting['previous'][index]:,}"
            yield self._finding(FindingKind.TIMER_UNIT_WRONG, waiting[index], text)
        for unit in waiting:
            yield from self._record_finding(unit)

    def _record_finding(self, unit: np.void) -> Iterator[Finding]:
        """Check a unit against the record that it points to."""
        physical_offset, magic = int(unit["physical_offset"]), int(unit["magic"])
        parked = self._records.at(physical_offset)
        if parked is None:
            gone = physical_offset < self._log.begin or self._is_damage(physical_offset)
            kind = FindingKind.TIMER_RECORD_GONE if gone else FindingKind.TIMER_UNIT_WRONG
            yield self._finding(kind, unit, "" if gone else f"no record of {TIMER_TOPIC} lies there")
        elif parked.size != unit["size"]:
            text = f"the record has {parked.size:,} bytes, not {int(unit['size']):,}"
            yield self._finding(FindingKind.TIMER_UNIT_WRONG, unit, text)
        elif parked.cancels != bool(magic & timer_files.MAGIC_DELETE):
            text = f"the record {'cancels another' if parked.cancels else 'cancels none'}"
            yield self._finding(FindingKind.TIMER_UNIT_WRONG, unit, text)
        elif parked.out_ms is not None and not self._is_its_slot(unit, parked.out_ms // self._precision_ms):
            slot_ms = int(unit["slot"]) * self._precision_ms
            text = f"its slot is {slot_ms}; the record is due at {parked.out_ms}"
            yield self._finding(FindingKind.TIMER_UNIT_WRONG, unit, text)

    @staticmethod
    def _is_its_slot(unit: np.void, due: int) -> bool:
        """Earlier slots are valid for units to be parked again, later slots for late units."""
        slot = int(unit["slot"])
        if slot < due:
            return bool(int(unit["magic"]) & timer_files.MAGIC_ROLL)
        return slot == due or due <= int(unit["enqueued"]) + _LATE_SLOTS

    def _is_damage(self, physical_offset: int) -> bool:
        return any(start <= physical_offset < stop for start, stop in self._log.fault_ranges)

    def _finding(self, kind: FindingKind, unit: np.void, text: str) -> Finding:
        position = int(unit["position"])
        start = position - position % self._file_size
        return Finding(kind, _name(start), position - start, int(unit["physical_offset"]), text=text)

    # The queue

    def _missing_findings(self, filed: NDArray[np.int64]) -> Iterator[Finding]:
        """Waiting messages that the check counts as filed and that have no unit."""
        if not len(filed):
            return
        read = self._check.read_ms // self._precision_ms
        for first, data, count in read_queue(self._io, self._inventory, _QUEUE):
            if data is None or first >= self._check.queue_offset:
                continue
            units = as_units(data[: min(count, self._check.queue_offset - first) * UNIT_SIZE])
            places = units["physical_offset"].astype(np.int64)
            # Fully delivered files are deleted, with the units of earlier records.
            lost = (units["size"] > 0) & (units["size"] != FILLER_SIZE) & (places >= filed[0]) & ~np.isin(places, filed)
            for index in np.flatnonzero(lost).tolist():
                parked = self._records.at(int(places[index]))
                if parked is not None and parked.out_ms is not None and parked.out_ms // self._precision_ms >= read:
                    text = f"{TIMER_TOPIC} queue offset {first + index:,}, due at {parked.out_ms}"
                    # RocketMQ does not file messages that are due when it reads them.
                    as_note = not self._is_own_check and not self._closed
                    place = int(places[index])
                    file, offset = self._inventory.log_place(place)
                    yield Finding(FindingKind.TIMER_UNIT_MISSING, file, offset, place, text=text, as_note=as_note)

    # The wheel

    def _wheel_findings(self, waiting: NDArray[np.void]) -> Iterator[Finding]:
        """Each slot with units must point to its first and last unit, all others to none."""
        try:
            slots = self._slots()
        except (FileNotFoundError, IsADirectoryError):
            if len(waiting):
                yield self._wheel_finding("it is not there", None, count=len(waiting))
            return
        except CorruptStoreError as error:
            yield self._wheel_finding(str(error), None, FindingKind.TIMER_FILE_LENGTH)
            return
        read = self._check.read_ms // self._precision_ms
        expected = _slots_of(waiting)
        # An unused slot is all zeros; an early `read_ms` of the check would include it.
        is_used = slots["time"] != 0
        for number in np.flatnonzero(is_used & (slots["time"] >= read)).tolist():
            time, first, last, count, _magic = slots[number].tolist()
            stored, correct = (first, last, count), expected.pop(time, None)
            if self._is_own_check and 0 <= first < self._begin:
                lost = _name(first - first % self._file_size)
                text = f"slot {time} begins at {first:,}, the timer log at {self._begin:,}"
                yield self._wheel_finding(text, 0, FindingKind.TIMER_FILE_MISSING, file=lost)
            elif number != time % len(slots) or correct is None:
                text = f"slot {time}: {stored}; no unit of the timer log is of this slot"
                yield self._slot_finding(number, text)
            elif stored[1] != correct[1] or stored[0] > correct[0] or (self._is_own_check and stored != correct):
                text = f"slot {time}: first, last, count are {stored}; the timer log has {correct}"
                yield self._slot_finding(number, text)
        for time, correct in itertools.islice(sorted(expected.items()), LISTED_MAX):
            text = f"slot {time} is empty; the timer log has first, last, count {correct}"
            yield self._slot_finding(time % len(slots), text)

    def _slot_finding(self, number: int, text: str) -> Finding:
        return self._wheel_finding(text, number * timer_files.SLOT_SIZE)

    def _wheel_finding(
        self,
        text: str,
        offset: int | None,
        kind: FindingKind = FindingKind.TIMER_SLOT_WRONG,
        *,
        file: str = _WHEEL,
        count: int = 0,
    ) -> Finding:
        """A finding, only a note unless the store was closed properly: a start rebuilds the wheel."""
        return Finding(kind, file, offset, count=count, text=text, as_note=not self._closed)

    def _slots(self) -> NDArray[np.void]:
        with self._io.opened(self._paths.timer_wheel) as fd:
            size = self._io.size(fd)
            if size != timer_files.WHEEL_FILE_SIZE:
                raise CorruptStoreError(f"{size:,} bytes; a wheel has {timer_files.WHEEL_FILE_SIZE:,}")
            return as_kernel_array(self._io.map_without_filling_holes(fd, size)).view(timer_files.SLOT_DTYPE)


def _previous_positions(waiting: NDArray[np.void]) -> NDArray[np.int64]:
    """Position of each unit's predecessor in its slot; NO_POSITION for the first."""
    order = np.argsort(waiting["slot"], kind="stable")
    slots, positions = waiting["slot"][order], waiting["position"][order]
    found = np.full(len(waiting), NO_POSITION, np.int64)
    same = np.flatnonzero(slots[1:] == slots[:-1]) + 1
    found[order[same]] = positions[same - 1]
    return found


def _slots_of(waiting: NDArray[np.void]) -> dict[int, tuple[int, int, int]]:
    """Expected (first position, last position, count) of each slot."""
    numbers, firsts, inverse = np.unique(waiting["slot"], return_index=True, return_inverse=True)
    lasts = np.zeros(len(numbers), np.int64)
    lasts[inverse] = waiting["position"]
    steps = np.where(waiting["magic"] & timer_files.MAGIC_DELETE, -1, 1)
    counts = np.bincount(inverse, steps, len(numbers)).astype(int)
    first = waiting["position"][firsts]
    columns = (column.tolist() for column in (numbers, first, lasts, counts))
    return {number: (begin, last, count) for number, begin, last, count in zip(*columns, strict=True)}


def _runs(numbers: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """(first, count) of consecutive numbers, ascending."""
    for part in np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1):
        if len(part):
            yield int(part[0]), len(part)


def _name(start: int) -> str:
    return f"timerlog/{start:020d}"
