"""Verification of ConsumeQueues: unit totals of the files against those of the log.

`QueuePass` sums up the units of each queue and share of the log. `QueueFindings` compares the sums with those of
`LogPass`; where they differ, `UnitComparison` compares unit by unit.
"""

from __future__ import annotations

import enum
import itertools
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mqproc.io.store_io import StoreIO
from mqproc.kernels import verify
from mqproc.kernels.dispatch import ScanResult
from mqproc.kernels.jit.lowering import as_kernel_array
from mqproc.kernels.record_check import stored_at_ms
from mqproc.layout import index_file
from mqproc.layout.consume_queue import FILLER_SIZE, UNIT_SIZE
from mqproc.store.consumequeue.bounds import UNIT_DTYPE, as_units, explained_by, normalize_fillers_in_place
from mqproc.store.consumequeue.files import ConsumeQueueFiles
from mqproc.store.damage import merged
from mqproc.store.recovery.queues import is_implausible
from mqproc.store.verify.findings import Finding, FindingKind
from mqproc.store.verify.inventory import Inventory, Queue
from mqproc.store.verify.log import LogScanner, LogShare, OffsetGap, SegmentViews, WholeLog
from mqproc.store.verify.snapshot import Snapshot
from mqproc.topic_names import MULTI_DISPATCH_PREFIX, SCHEDULE_TOPIC
from mqproc.util.units import DELAY_LEVELS, DELAY_MS_MAX, DELAY_STEP_MS, delays_ms_of

_CHUNK_BYTES = UNIT_SIZE * (1 << 16)
# Indexes after the shares' totals: units below all shares, beyond all shares, and invalid units.
BELOW, BEYOND, NO_UNIT = range(3)
MORE_TOTALS = 3


@dataclass(slots=True)
class QueueTotals:
    """Unit totals of some queues.

    `totals` int64[queues, shares + MORE_TOTALS, TOTAL_COLUMNS], `states` int64[queues, UNITS_SIZE].
    """

    queues: list[Queue]
    totals: NDArray[np.int64]
    states: NDArray[np.int64]


class QueuePass:
    """Sums up the units of queues, one queue after the other."""

    def __init__(self, io: StoreIO, snapshot: Snapshot, advance: Callable[[int], None]) -> None:
        self._io = io
        self._snapshot = snapshot
        self._advance = advance
        self._borders = snapshot.borders

    def run(self, queues: list[Queue]) -> QueueTotals:
        """Sum up the units of these queues."""
        shares = len(self._borders) - 1
        found = QueueTotals(
            queues,
            np.zeros((len(queues), shares + MORE_TOTALS, verify.TOTAL_COLUMNS), np.int64),
            np.zeros((len(queues), verify.UNITS_SIZE), np.int64),
        )
        for index, queue in enumerate(queues):
            self._queue(queue, found.totals[index].reshape(-1), found.states[index])
        return found

    def _queue(self, queue: Queue, totals: NDArray[np.int64], state: NDArray[np.int64]) -> None:
        for name in (verify.LAST_LIVE, verify.FIRST_INNER_ZERO, verify.FIRST_PENDING_ZERO):
            state[name] = -1
        for first, units, count in read_queue(self._io, self._snapshot.inventory, queue):
            if units is None:
                self._zeros(state, first, count)
                continue
            state[verify.NEXT_OFFSET] = first
            verify.add_units(units, count, self._borders, totals, state)
            self._advance(count * UNIT_SIZE)

    @staticmethod
    def _zeros(state: NDArray[np.int64], first: int, count: int) -> None:
        """Count units that were never written."""
        if state[verify.PENDING_ZEROS] == 0:
            state[verify.FIRST_PENDING_ZERO] = first
        state[verify.PENDING_ZEROS] += count
        state[verify.NEXT_OFFSET] = first + count


Chunk = tuple[int, NDArray[np.uint8] | None, int]
"""Queue offset of the first unit, bytes of the units (None: a hole in the file), number of units."""


def read_queue(io: StoreIO, inventory: Inventory, queue: Queue) -> Iterator[Chunk]:
    """Units of a queue's existing files in order; the bytes are valid until the next chunk."""
    buffer = bytearray(_CHUNK_BYTES)
    folder = inventory.paths.queue(*queue)
    for start, size in sorted(inventory.queues.get(queue, {}).items()):
        try:
            with io.opened(folder / f"{start:020d}") as fd:
                yield from _read_file(io, fd, start, min(size, inventory.sizes.queue_file), buffer)
        except FileNotFoundError:
            continue


def _read_file(io: StoreIO, fd: int, start: int, size: int, buffer: bytearray) -> Iterator[Chunk]:
    end = size - size % UNIT_SIZE
    at = 0
    while at < end:
        data = io.next_data(fd, at)
        written = end if data is None else min(end, max(at, data - data % UNIT_SIZE))
        if written > at:
            yield (start + at) // UNIT_SIZE, None, (written - at) // UNIT_SIZE
            at = written
        if data is None or at >= end:
            return
        hole = min(end, -(-io.next_hole(fd, max(at, data)) // UNIT_SIZE) * UNIT_SIZE)
        while at < hole:
            count = io.pread_into(fd, memoryview(buffer)[: hole - at], at) // UNIT_SIZE
            if count == 0:
                return
            normalize_fillers_in_place(buffer, count)
            yield (start + at) // UNIT_SIZE, as_kernel_array(buffer), count
            at += count * UNIT_SIZE


def read_unit(io: StoreIO, inventory: Inventory, queue: Queue, queue_offset: int) -> np.void:
    """Read one unit, which the files of the queue contain."""
    name, place = inventory.queue_name(queue, queue_offset, UNIT_SIZE)
    with io.opened(inventory.root / name) as fd:
        unit: np.void = as_units(io.pread(fd, UNIT_SIZE, place))[0]
    return unit


# Comparison unit by unit

Ranges = list[tuple[int, int]]


class UnitState(enum.IntEnum):
    """Content of the file where a unit is expected."""

    MATCHED = 0
    ZEROS = 1
    FILLER = 2
    WRONG = 3
    # Units without a record
    BEYOND = 4
    IN_HOLE = 5
    NO_UNIT = 6
    DANGLING = 7


@dataclass(slots=True)
class UnitRange:
    """Units [first, stop) of a queue in the same state.

    `physical_offset` and `last_physical_offset` are the log offsets of the first and the last record.
    """

    queue: Queue
    found: UnitState
    first: int
    stop: int
    physical_offset: int
    last_physical_offset: int


@dataclass(frozen=True, slots=True)
class ShareQuery:
    """Compare queues with the records of [begin, end) outside `faults`, split at `dispatched`."""

    begin: int
    end: int
    faults: Ranges
    queues: list[Queue]
    dispatched: int


@dataclass(frozen=True, slots=True)
class ExtraQuery:
    """Find units without a record that point into `ranges` of the log, or outside the log.

    `expected` are the queue offsets of records; `faults` are damaged ranges of the log [log_begin, log_end). All
    ranges ascend.
    """

    queue: Queue
    expected: Ranges
    ranges: Ranges
    faults: Ranges
    log_begin: int
    log_end: int
    last_live: int
    """Last queue offset with a unit: zeros before it are reported too."""


class UnitComparison:
    """Answers queries about the units of one snapshot."""

    def __init__(self, io: StoreIO, snapshot: Snapshot) -> None:
        self._io = io
        self._snapshot = snapshot
        sizes = snapshot.inventory.sizes
        self._files = ConsumeQueueFiles(io, snapshot.inventory.paths.consume_queue, sizes.queue_file)
        self._scanner = LogScanner(io, snapshot)

    def close(self) -> None:
        """Close the files."""
        self._files.close()
        self._scanner.views.close()

    # Units that records imply

    def share(self, query: ShareQuery) -> list[UnitRange]:
        """State of every unit that the share's records imply."""
        found: dict[Queue, list[UnitRange]] = {queue: [] for queue in query.queues}
        for result in self._scanner.walk(query.begin, query.end, query.faults):
            self._compare(result, found, query.dispatched)
        return [each for ranges in found.values() for each in ranges]

    def _compare(self, result: ScanResult, found: dict[Queue, list[UnitRange]], dispatched: int) -> None:
        for number, first, count, offset, _end, _time in result.runs.tolist():
            queue = self._scanner.table.name(number)
            ranges = found.get(queue)
            if ranges is None:
                continue
            expected = as_units(result.units[offset : offset + count * UNIT_SIZE])
            physical = expected["physical_offset"].astype(np.int64)
            codes = _codes(expected, self._units(queue, first, count))
            for each in _ranges(queue, first, codes, physical, dispatched):
                _append_range(ranges, each, dispatched)

    def _units(self, queue: Queue, first: int, count: int) -> NDArray[np.void]:
        """Units of the files; zeros where the files lack them."""
        units = np.zeros(count, UNIT_DTYPE)
        done = 0
        while done < count:
            # After the end of a short or missing file, continue with the next one.
            following = self._files.next_file_offset(first + done) - first
            part = self._units_of_file(queue, first + done, min(count, following) - done)
            units[done : done + len(part)] = part
            done = following
        return units

    def _units_of_file(self, queue: Queue, first: int, count: int) -> NDArray[np.void]:
        """Units within one file, as far as it has them."""
        start = self._files.next_file_offset(first) - self._files.units_per_file
        if self._files.path(*queue, start * UNIT_SIZE) in self._snapshot.inventory.unreadable:
            return as_units(b"")
        try:
            return as_units(self._files.read_units(*queue, first, count))
        except (FileNotFoundError, IsADirectoryError):
            return as_units(b"")

    # Units without a record

    def extras(self, query: ExtraQuery) -> list[UnitRange]:
        """Units of a queue that have no record."""
        found: list[UnitRange] = []
        for first, data, count in read_queue(self._io, self._snapshot.inventory, query.queue):
            units = np.zeros(count, UNIT_DTYPE) if data is None else as_units(data[: count * UNIT_SIZE])
            offsets = first + np.arange(count, dtype=np.int64)
            physical = units["physical_offset"].astype(np.int64)
            size = units["size"].astype(np.int64)
            zeros = units == np.zeros_like(units)
            live = (size != FILLER_SIZE) & ~zeros
            unexpected = ~_within(offsets, query.expected)
            no_unit = (size <= 0) | (physical < 0)
            beyond = ~no_unit & (physical >= query.log_end)
            in_doubt = no_unit | beyond | _within(physical, query.ranges)
            extra = live & in_doubt & unexpected & (no_unit | (physical >= query.log_begin))
            codes = np.full(count, UnitState.MATCHED, np.int64)
            codes[zeros & unexpected & (offsets < query.last_live)] = UnitState.ZEROS
            codes[extra] = UnitState.DANGLING
            codes[extra & _within(physical, query.faults)] = UnitState.IN_HOLE
            codes[extra & beyond] = UnitState.BEYOND
            codes[extra & no_unit] = UnitState.NO_UNIT
            for each in _ranges(query.queue, first, codes, physical, None):
                if each.found is not UnitState.MATCHED:
                    _append_range(found, each, 0)
        return found


def _codes(expected: NDArray[np.void], present: NDArray[np.void]) -> NDArray[np.int64]:
    """`UnitState` of each unit: int64[n]."""
    codes = np.full(len(expected), UnitState.WRONG, np.int64)
    codes[present["size"] == FILLER_SIZE] = UnitState.FILLER
    codes[present == np.zeros_like(present)] = UnitState.ZEROS
    codes[present == expected] = UnitState.MATCHED
    return codes


def _ranges(
    queue: Queue, first: int, codes: NDArray[np.int64], physical: NDArray[np.int64], dispatched: int | None
) -> Iterator[UnitRange]:
    """Ranges of units from `first` on in the same state, split at the log offset `dispatched`."""
    cuts = {0, *(np.flatnonzero(np.diff(codes)) + 1).tolist()}
    if dispatched is not None:
        cuts.add(int(np.searchsorted(physical, dispatched)))
    for start, stop in itertools.pairwise(sorted(cuts | {len(codes)})):
        state, last = UnitState(int(codes[start])), int(physical[stop - 1])
        yield UnitRange(queue, state, first + start, first + stop, int(physical[start]), last)


def _append_range(ranges: list[UnitRange], new: UnitRange, dispatched: int) -> None:
    """Append a range, or extend the last one if they are contiguous."""
    if ranges:
        last = ranges[-1]
        same_side = (last.physical_offset < dispatched) == (new.physical_offset < dispatched)
        if last.found is new.found and last.stop == new.first and same_side:
            last.stop, last.last_physical_offset = new.stop, new.last_physical_offset
            return
    ranges.append(new)


def _within(values: NDArray[np.int64], ranges: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Which values lie in one of the disjoint, ascending ranges [start, stop): bool[n]."""
    # Starts and stops alternate: a value within a range follows an odd number of them.
    borders = np.array(ranges, np.int64).reshape(-1)
    found: NDArray[np.bool_] = np.searchsorted(borders, values, "right") % 2 == 1
    return found


# Comparison of totals, and findings


RunQueries = Callable[[Sequence[Any]], Iterable[tuple[Any, Any]]]
"""Runs queries and yields each with its answer."""

_KINDS: Final = {
    UnitState.ZEROS: (FindingKind.UNIT_MISSING, "zeros"),
    UnitState.FILLER: (FindingKind.UNIT_MISSING, "fillers"),
    UnitState.WRONG: (FindingKind.UNIT_WRONG, "another offset, size or tags code than the record's"),
    UnitState.BEYOND: (FindingKind.UNIT_BEYOND_LOG, ""),
    UnitState.IN_HOLE: (FindingKind.UNIT_IN_HOLE, ""),
    UnitState.NO_UNIT: (FindingKind.UNIT_DANGLING, "invalid log offset or size"),
    UnitState.DANGLING: (FindingKind.UNIT_DANGLING, "no record of this queue and queue offset at that log offset"),
}


@dataclass(slots=True)
class QueueComparison:
    """Totals of log and queue files: int64[queues, shares, TOTAL_COLUMNS], indexed by `queues`.

    `more` int64[queues, MORE_TOTALS, TOTAL_COLUMNS]: units outside all shares. `states` int64[queues, UNITS_SIZE]: as
    add_units left them. Queues of the snapshot come first, then those without files.
    """

    queues: list[Queue]
    log: NDArray[np.int64]
    files: NDArray[np.int64]
    more: NDArray[np.int64]
    states: NDArray[np.int64]
    numbers: dict[Queue, int] = field(default_factory=dict)

    def max_offset(self, queue: Queue) -> int | None:
        """Next offset of a queue according to log and files; None for an unknown queue."""
        number = self.numbers.get(queue)
        if number is None:
            return None
        live = int(self.states[number, verify.LAST_LIVE])
        last = self.log[number, :, verify.LAST_OFFSET].max(initial=-1)
        counted = self.log[number, :, verify.COUNT].any()
        return max(live, int(last) if counted else -1) + 1

    def first_offset(self, queue: Queue) -> int | None:
        """Queue offset of the queue's first record in the log; None without one."""
        rows = self.log[self.numbers[queue]] if queue in self.numbers else self.log[:0]
        return next((int(row[verify.FIRST_OFFSET]) for row in rows if row[verify.COUNT]), None)


def compare_totals(snapshot: Snapshot, shares: Sequence[LogShare], totals: Sequence[QueueTotals]) -> QueueComparison:
    """Combine the totals of log and queue files."""
    queues = snapshot.queues
    numbers = {queue: number for number, queue in enumerate(queues)}
    for found in shares:
        for queue in found.more_queues:
            if queue not in numbers:
                numbers[queue] = len(queues)
                queues.append(queue)
    count = len(snapshot.shares)
    log, files, more = (
        np.zeros((len(queues), columns, verify.TOTAL_COLUMNS), np.int64) for columns in (count, count, MORE_TOTALS)
    )
    states = np.zeros((len(queues), verify.UNITS_SIZE), np.int64)
    both = QueueComparison(queues, log, files, more, states, numbers)
    both.states[:, verify.LAST_LIVE] = -1
    for found in shares:
        known = len(snapshot.inventory.queues)
        both.log[:known, found.share.number] = found.totals[:known]
        for queue, row in zip(found.more_queues, found.totals[known:], strict=True):
            both.log[numbers[queue], found.share.number] = row
    for part in totals:
        rows = [numbers[queue] for queue in part.queues]
        both.files[rows] = part.totals[:, :count]
        both.more[rows] = part.totals[:, count:]
        both.states[rows] = part.states
    uncompared = [share.number for share in snapshot.shares if not share.compared]
    both.log[:, uncompared] = both.files[:, uncompared] = 0
    return both


class QueueFindings:
    """Compares both sides and queries the differences."""

    def __init__(
        self,
        snapshot: Snapshot,
        log: WholeLog,
        shares: Sequence[LogShare],
        both: QueueComparison,
        *,
        may_lag: bool,
        restart_from: int | None,
        topics: set[str] | None,
        unsettled: Container[Queue] = (),
    ) -> None:
        """With `may_lag`, the newest records may lack units after an improper close.

        Those are the records from `restart_from` on if that is known (`Restart`), else those after the last dispatched
        one. `topics` are those of the settings (None: unknown); `unsettled` queues were deleted or created meanwhile.
        """
        self._snapshot = snapshot
        self._log = log
        self._shares = shares
        self._both = both
        self._may_lag = may_lag
        self._restart_from = restart_from
        self._topics = topics
        self._unsettled = unsettled
        self._repeated: dict[Queue, list[tuple[int, int]]] = {}
        self.lost_gaps: list[OffsetGap] = []
        """Gaps because of damaged ranges of the log."""
        # Single records with an implausible queue offset, by queue and queue offset: the gap before each.
        self._too_high: dict[tuple[Queue, int], OffsetGap] = {}
        self.dispatched = self._dispatched_offset()

    def _dispatched_offset(self) -> int:
        """Log offset up to which all records are dispatched, according to units and index."""
        if self._snapshot.positions.dispatched is not None:
            return self._snapshot.positions.dispatched
        ends = [int(self._both.states[:, verify.PHYSICAL_END].max(initial=0))]
        ends += [
            file.header.end_physical_offset + 1
            for file in self._snapshot.index
            if file.header.count > index_file.FIRST_ITEM and 0 <= file.header.end_physical_offset < self._log.end
        ]
        return max(ends) if self._restart_from is None else min(max(ends), self._restart_from)

    def run(self, run_queries: RunQueries) -> list[Finding]:
        """Return all findings about queues."""
        both, findings = self._both, list(self._gap_findings())
        wrong = ((both.log[:, :, verify.COUNT] != both.files[:, :, verify.COUNT])
                 | (both.log[:, :, verify.FINGERPRINT] != both.files[:, :, verify.FINGERPRINT]))  # fmt: skip
        invalid = (
            (both.more[:, BEYOND, verify.COUNT] > 0) & (not self._snapshot.positions.running)
            | (both.more[:, NO_UNIT, verify.COUNT] > 0)
            | (both.states[:, verify.INNER_ZEROS] > 0)
        )
        differing: dict[int, list[int]] = {}
        for number in np.flatnonzero(wrong.any(axis=1) | invalid).tolist():
            queue = both.queues[number]
            if self._is_skipped(queue):
                continue
            if both.states[number, verify.LAST_LIVE] < 0:
                findings += self._empty_queue_findings(number)
            else:
                differing[number] = np.flatnonzero(wrong[number]).tolist()
        return findings + self._differences(differing, run_queries)

    def _is_skipped(self, queue: Queue) -> bool:
        inventory = self._snapshot.inventory
        unchecked = inventory.has_rocksdb_queues or queue[0] in inventory.unchecked_topics
        return unchecked or queue[0].startswith(MULTI_DISPATCH_PREFIX) or queue in self._unsettled

    def _empty_queue_findings(self, number: int) -> Iterable[Finding]:
        """Findings for a queue without units that has records in the log."""
        rows = self._both.log[number]
        rows = rows[rows[:, verify.COUNT] > 0]
        if len(rows):
            queue = self._both.queues[number]
            first, last = int(rows[0, verify.FIRST_OFFSET]), int(rows[-1, verify.LAST_OFFSET])
            physical = int(rows[0, verify.FIRST_PHYSICAL])
            found = UnitRange(queue, UnitState.ZEROS, first, last + 1, physical, int(rows[-1, verify.LAST_PHYSICAL]))
            count = int(rows[:, verify.COUNT].sum())
            if (
                self._topics is not None
                and queue[0] not in self._topics
                and queue not in self._snapshot.inventory.queues
                # A topic created shortly before the kill may be missing from the settings.
                and not (physical >= self.dispatched and self._is_pending())
            ):
                file, offset = self._snapshot.inventory.log_place(physical)
                text = f"{queue[0]} queue {queue[1]}"
                yield Finding(FindingKind.TOPIC_DELETED, file, offset, physical, count=count, text=text)
            else:
                yield self._finding(found, count, "no file has units")

    def _differences(self, differing: dict[int, list[int]], run_queries: RunQueries) -> list[Finding]:
        both = self._both
        by_share: dict[int, list[Queue]] = {}
        for number, shares in differing.items():
            for share in shares:
                by_share.setdefault(share, []).append(both.queues[number])
        queries = [
            ShareQuery(begin, found.end, self._log.fault_ranges, by_share[found.share.number], self.dispatched)
            for found in self._shares
            if found.share.number in by_share and (begin := found.begin) is not None
        ]
        ranges: dict[Queue, list[UnitRange]] = {}
        for _query, answer in run_queries(queries):
            for each in answer:
                ranges.setdefault(each.queue, []).append(each)
        extras = [
            self._extra(number, shares, ranges.get(both.queues[number], [])) for number, shares in differing.items()
        ]
        found = [each for answer in ranges.values() for each in _merge_ranges(answer, self.dispatched)]
        for _query, answer in run_queries(extras):
            found += answer
        found.sort(key=lambda each: (each.queue, each.first))
        return [self._finding(each) for each in found if not self._is_acceptable(each)]

    def _is_acceptable(self, found: UnitRange) -> bool:
        """Whether units are as expected. Records with the same queue offset share one unit."""
        if found.found is not UnitState.WRONG:
            return found.found is UnitState.MATCHED
        return any(first <= found.first and found.stop <= stop for first, stop in self._repeated.get(found.queue, ()))

    def _extra(self, number: int, shares: list[int], ranges: list[UnitRange]) -> ExtraQuery:
        bounds = [self._snapshot.shares[share] for share in shares]
        return ExtraQuery(
            self._both.queues[number],
            merged((each.first, each.stop) for each in ranges),
            merged((share.start, share.stop) for share in bounds),
            self._log.fault_ranges,
            self._log.begin,
            self._log.end if not self._snapshot.positions.running else 1 << 62,
            int(self._both.states[number, verify.LAST_LIVE]),
        )

    def _finding(self, found: UnitRange, count: int = 0, text: str = "") -> Finding:
        file, offset = self._snapshot.inventory.queue_name(found.queue, found.first, UNIT_SIZE)
        kind, usual_text = _KINDS[found.found]
        text = text or usual_text
        place = found.queue, found.first
        if kind is FindingKind.UNIT_MISSING and found.physical_offset >= self.dispatched and self._is_pending():
            kind, text = FindingKind.NOT_DISPATCHED, ""
        elif kind is FindingKind.UNIT_MISSING and found.stop == found.first + 1 and place in self._too_high:
            return self._record_finding(FindingKind.QUEUE_OFFSET_TOO_HIGH, self._too_high[place])
        last = f" to {found.stop - 1:,}" if found.stop - found.first > 1 else ""
        text = f"queue offset {found.first:,}{last}" + (f": {text}" if text else "")
        physical_offset = None if found.found is UnitState.NO_UNIT else found.physical_offset
        return Finding(kind, file, offset, physical_offset, count=count or found.stop - found.first, text=text)

    def _is_pending(self) -> bool:
        """Whether records after `dispatched` may lack units."""
        return self._may_lag and (self._restart_from is not None or self.dispatched > self._log.begin)

    # Gaps between queue offsets

    def _gap_findings(self) -> Iterable[Finding]:
        faults = self._log.fault_ranges
        for gap in sorted(self._gaps(), key=lambda gap: gap.physical_offset):
            if (before := self._too_high.get((gap.queue, gap.expected - 1))) is not None:
                # Ignore the implausible record: continue from its predecessor.
                gap = replace(gap, expected=before.expected, previous=before.previous)
                if gap.found == gap.expected:
                    continue
            if is_implausible(gap.found - gap.expected, gap.physical_offset - gap.previous):
                self._too_high[gap.queue, gap.found] = gap
            if gap.found > gap.expected and any(gap.previous < start < gap.physical_offset for start, _stop in faults):
                missing, size = gap.found - gap.expected, self._snapshot.inventory.sizes.segment
                if explained_by(faults, missing, gap.previous, gap.physical_offset, size) is not None:
                    self.lost_gaps.append(gap)
                continue
            kind = FindingKind.QUEUE_OFFSET_GAP if gap.found > gap.expected else FindingKind.QUEUE_OFFSET_REPEATED
            if kind is FindingKind.QUEUE_OFFSET_REPEATED:
                self._repeated.setdefault(gap.queue, []).append((gap.found, gap.expected))
            yield self._record_finding(kind, gap, max(1, gap.found - gap.expected))

    def _record_finding(self, kind: FindingKind, gap: OffsetGap, count: int = 1) -> Finding:
        """Finding about the record after a gap."""
        text = f"{gap.queue[0]} queue {gap.queue[1]}: queue offset {gap.found:,} after {gap.expected - 1:,}"
        file, offset = self._snapshot.inventory.log_place(gap.physical_offset)
        return Finding(kind, file, offset, gap.physical_offset, count=count, text=text)

    def _gaps(self) -> Iterable[OffsetGap]:
        """Gaps within and between shares."""
        for found in self._shares:
            yield from found.gaps
        log = self._both.log
        last = np.full(len(self._both.queues), -1, np.int64)
        physical = np.zeros(len(self._both.queues), np.int64)
        for share in range(log.shape[1]):
            present = log[:, share, verify.COUNT] > 0
            first = log[:, share, verify.FIRST_OFFSET]
            for number in np.flatnonzero(present & (last >= 0) & (first != last + 1)).tolist():
                expected, offset = int(last[number]) + 1, int(first[number])
                previous, position = int(physical[number]), int(log[number, share, verify.FIRST_PHYSICAL])
                yield OffsetGap(self._both.queues[number], expected, offset, previous, position)
            last[present] = log[present, share, verify.LAST_OFFSET]
            physical[present] = log[present, share, verify.LAST_PHYSICAL]


def _merge_ranges(ranges: list[UnitRange], dispatched: int) -> list[UnitRange]:
    """Merge the ranges of a queue that share borders cut."""
    merged_ranges: list[UnitRange] = []
    for each in sorted(ranges, key=lambda each: each.first):
        _append_range(merged_ranges, each, dispatched)
    return merged_ranges


# Delay levels


_INT32_MAX: Final = 2**31 - 1
_SAMPLE_UNITS: Final = 7


def detect_delays(io: StoreIO, inventory: Inventory, configured: str) -> tuple[int, ...]:
    """Detect the delay of each level in ms: the configured one unless all units contradict it.

    RocketMQ's `messageDelayLevel` is not stored with the store, but the schedule topic's units contain the resulting
    times. Delays that are not whole seconds cannot be configured and are ignored as damage.
    """
    delays = list(delays_ms_of(configured))
    views = SegmentViews(io, inventory)
    for topic, queue_id in sorted(inventory.queues):
        if topic != SCHEDULE_TOPIC or queue_id >= DELAY_LEVELS:
            continue
        found = _sampled_delays(io, inventory, views, (topic, queue_id))
        usual = delays[min(queue_id, len(delays) - 1)]
        if found and usual not in found:
            delays += [delays[-1]] * (queue_id + 1 - len(delays))
            delays[queue_id] = found.most_common(1)[0][0]
    views.close()
    return tuple(delays)


def _sampled_delays(io: StoreIO, inventory: Inventory, views: SegmentViews, queue: Queue) -> Counter[int]:
    """Delays in ms of units sampled across a queue, with their counts."""
    delays: Counter[int] = Counter()
    for _first, data, count in read_queue(io, inventory, queue):
        if data is None:
            continue
        units = as_units(data[: count * UNIT_SIZE])
        timed = units[(units["tags_code"] > _INT32_MAX) & (units["size"] != FILLER_SIZE) & (units["size"] > 0)]
        for index in np.linspace(0, len(timed) - 1, min(_SAMPLE_UNITS, len(timed))).astype(int).tolist():
            physical_offset = int(timed[index]["physical_offset"])
            base = views.start_of(physical_offset)
            view = views.view(base)
            if view is not None:
                stored = int(stored_at_ms(view, physical_offset - base, len(view), physical_offset))
                delay = int(timed[index]["tags_code"]) - stored
                if stored >= 0 and 0 <= delay <= DELAY_MS_MAX and delay % DELAY_STEP_MS == 0:
                    delays[delay] += 1
        if delays:
            break
    return delays
