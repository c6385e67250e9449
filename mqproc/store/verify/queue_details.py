"""Unit by unit, where a queue differs from the log in a share: which units are missing, wrong, or lead nowhere."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mqproc.io import StoreIO
from mqproc.kernels.dispatch_buffers import ScanResult
from mqproc.layout.consume_queue import FILLER_SIZE
from mqproc.store.consume_queue import UNIT_DTYPE, UNIT_SIZE, ConsumeQueueFiles, as_units
from mqproc.store.verify.inventory import Queue
from mqproc.store.verify.log_pass import Scanner
from mqproc.store.verify.picture import Picture
from mqproc.store.verify.queue_pass import read_queue

Ranges = list[tuple[int, int]]


class Found(enum.IntEnum):
    """What lies in the place of a unit."""

    MATCHED = 0
    ZEROS = 1
    FILLER = 2
    WRONG = 3
    # Units that no record has
    BEYOND = 4
    IN_HOLE = 5
    NO_UNIT = 6
    DANGLING = 7


@dataclass(slots=True)
class UnitRange:
    """Units [first, stop) of a queue that are all the same.

    The record of the first one begins at `physical_offset`, that of the last one at `last_physical_offset`.
    """

    queue: Queue
    found: Found
    first: int
    stop: int
    physical_offset: int
    last_physical_offset: int


@dataclass(frozen=True, slots=True)
class ShareQuestion:
    """Compare these queues with the log's records of [begin, end); none are in `faults`. Ranges end at `dispatched`."""

    begin: int
    end: int
    faults: Ranges
    queues: list[Queue]
    dispatched: int


@dataclass(frozen=True, slots=True)
class ExtraQuestion:
    """Which units of a queue have no record, of those that point into `ranges` of the log, or out of it?

    `expected` are queue offsets that records have; `faults` are damaged ranges of the log [log_begin, log_end). All
    ranges ascend.
    """

    queue: Queue
    expected: Ranges
    ranges: Ranges
    faults: Ranges
    log_begin: int
    log_end: int
    last_live: int
    """The last queue offset at which anything lies: zeros before it are told too."""


class QueueDetails:
    """Answers questions about one picture."""

    def __init__(self, io: StoreIO, picture: Picture) -> None:
        self._io = io
        self._picture = picture
        sizes = picture.inventory.sizes
        self._files = ConsumeQueueFiles(io, picture.inventory.paths.consume_queue, sizes.queue_file)
        self._scanner = Scanner(io, picture)

    def close(self) -> None:
        """Close the files."""
        self._files.close()
        self._scanner.views.close()

    # What records should have

    def share(self, question: ShareQuestion) -> list[UnitRange]:
        """What lies in the place of every unit that the queues should have in a share."""
        found: dict[Queue, list[UnitRange]] = {queue: [] for queue in question.queues}
        for result in self._scanner.walk(question.begin, question.end, question.faults):
            self._compare(result, found, question.dispatched)
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
            for start, stop in _same_runs(codes, int(np.searchsorted(physical, dispatched))):
                _put(
                    ranges,
                    UnitRange(
                        queue,
                        Found(int(codes[start])),
                        first + start,
                        first + stop,
                        int(physical[start]),
                        int(physical[stop - 1]),
                    ),
                    dispatched,
                )

    def _units(self, queue: Queue, first: int, count: int) -> NDArray[np.void]:
        """Units as they lie on disk, zeros where there are none."""
        units = np.zeros(count, UNIT_DTYPE)
        done = 0
        while done < count:
            # Behind a short or a missing file the next one goes on.
            following = self._files.following_file(first + done) - first
            part = self._units_of_file(queue, first + done, min(count, following) - done)
            units[done : done + len(part)] = part
            done = following
        return units

    def _units_of_file(self, queue: Queue, first: int, count: int) -> NDArray[np.void]:
        """Units that one file has, as far as it does."""
        start = self._files.following_file(first) - self._files.units_per_file
        if self._files.path(*queue, start * UNIT_SIZE) in self._picture.inventory.unreadable:
            return as_units(b"")
        try:
            return as_units(self._files.read_units(*queue, first, count))
        except (FileNotFoundError, IsADirectoryError):
            return as_units(b"")

    # What no record has

    def extras(self, question: ExtraQuestion) -> list[UnitRange]:
        """The units of a queue that have no record."""
        found: list[UnitRange] = []
        for first, data, count in read_queue(self._io, self._picture.inventory, question.queue):
            units = np.zeros(count, UNIT_DTYPE) if data is None else as_units(data[: count * UNIT_SIZE])
            offsets = first + np.arange(count, dtype=np.int64)
            physical = units["physical_offset"].astype(np.int64)
            size = units["size"].astype(np.int64)
            zeros = (physical == 0) & (size == 0) & (units["tags_code"] == 0)
            live = (size != FILLER_SIZE) & ~zeros
            unexpected = ~_within(offsets, question.expected)
            no_unit = (size <= 0) | (physical < 0)
            beyond = ~no_unit & (physical >= question.log_end)
            asked = no_unit | beyond | _within(physical, question.ranges)
            extra = live & asked & unexpected & (no_unit | (physical >= question.log_begin))
            codes = np.full(count, Found.MATCHED, np.int64)
            codes[zeros & unexpected & (offsets < question.last_live)] = Found.ZEROS
            codes[extra] = Found.DANGLING
            codes[extra & _within(physical, question.faults)] = Found.IN_HOLE
            codes[extra & beyond] = Found.BEYOND
            codes[extra & no_unit] = Found.NO_UNIT
            for start, stop in _same_runs(codes, 0):
                if codes[start] != Found.MATCHED:
                    _put(
                        found,
                        UnitRange(
                            question.queue,
                            Found(int(codes[start])),
                            first + start,
                            first + stop,
                            int(physical[start]),
                            int(physical[stop - 1]),
                        ),
                        0,
                    )
        return found


def _codes(expected: NDArray[np.void], there: NDArray[np.void]) -> NDArray[np.int64]:
    """What each unit is, as `Found`: int64[n]."""
    same = np.ones(len(expected), bool)
    zeros = np.ones(len(expected), bool)
    for name in UNIT_DTYPE.names or ():
        same &= expected[name] == there[name]
        zeros &= there[name] == 0
    codes = np.full(len(expected), Found.WRONG, np.int64)
    codes[there["size"] == FILLER_SIZE] = Found.FILLER
    codes[zeros] = Found.ZEROS
    codes[same] = Found.MATCHED
    return codes


def _same_runs(codes: NDArray[np.int64], border: int) -> list[tuple[int, int]]:
    """[start, stop) of neighbours that are equal, none over the border."""
    if not len(codes):
        return []
    cuts = set((np.flatnonzero(np.diff(codes)) + 1).tolist())
    if 0 < border < len(codes):
        cuts.add(border)
    starts = [0, *sorted(cuts)]
    return list(zip(starts, [*starts[1:], len(codes)], strict=True))


def _put(ranges: list[UnitRange], new: UnitRange, dispatched: int) -> None:
    """Add a range, to the last one if it goes on there."""
    if ranges:
        last = ranges[-1]
        same_side = (last.physical_offset < dispatched) == (new.physical_offset < dispatched)
        if last.found is new.found and last.stop == new.first and same_side:
            last.stop, last.last_physical_offset = new.stop, new.last_physical_offset
            return
    ranges.append(new)


def _within(values: NDArray[np.int64], ranges: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Which values lie in one of the ranges [start, stop), ascending and apart from each other: bool[n]."""
    if not ranges:
        return np.zeros(len(values), bool)
    starts = np.array([start for start, _stop in ranges], np.int64)
    stops = np.array([stop for _start, stop in ranges], np.int64)
    index = np.searchsorted(starts, values, "right") - 1
    found: NDArray[np.bool_] = (index >= 0) & (values < stops[np.maximum(index, 0)])
    return found
