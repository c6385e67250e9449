"""Repair of ConsumeQueue units that recovery leaves wrong; part of `mqproc store repair`.

Recovery overwrites units that differ from a record, and fills those of damaged records as far as it can. Here every
unit between a queue's first and last one is checked:

    expired …│ record record … no record … record │ after the end
    garbage becomes a         zeros and garbage     cleared by
    copy of the previous unit become fillers        recovery
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.config.options import Options
from mqproc.io.store_io import StoreIO
from mqproc.layout.consume_queue import FILLER_SIZE, UNIT_SIZE
from mqproc.paths import StorePaths
from mqproc.store import damage
from mqproc.store.consumequeue.bounds import filler_position
from mqproc.store.consumequeue.files import UNIT_DTYPE, ConsumeQueueFiles, as_units, filler_units
from mqproc.store.consumequeue.fillers import put_end_fillers
from mqproc.store.damage import merged
from mqproc.store.recovery.queues import FILL_MAX
from mqproc.store.verify.inventory import Queue, take_inventory
from mqproc.store.verify.log import LogScanner
from mqproc.store.verify.queues import detect_delays
from mqproc.store.verify.snapshot import LogPositions, Snapshot, read_deleted
from mqproc.store.verify.verifier import sizes_of

_CHUNK_UNITS: Final = 1 << 16


class UnitRepair:
    """Repairs queues of one stopped store, whose log is [begin, end)."""

    def __init__(self, io: StoreIO, paths: StorePaths, options: Options, begin: int, end: int) -> None:
        self._begin = begin
        self._end = end
        self._holes = merged((hole.start, hole.stop) for hole in damage.load(io, paths).holes)
        sizes = sizes_of(io, paths, options)
        self._segment_size = sizes.segment
        self._files = ConsumeQueueFiles(io, paths.consume_queue, sizes.queue_file, write=True)
        inventory = take_inventory(io, paths, sizes)
        snapshot = Snapshot(
            inventory, LogPositions(begin, end), detect_delays(io, inventory, options.message_delay_level)
        )
        snapshot.deleted = read_deleted(io, paths, running=False)
        self._scanner = LogScanner(io, snapshot)

    def run(self, queues: Collection[Queue], ends: Mapping[Queue, int]) -> int:
        """Compare every unit of these queues with the log; return how many were changed.

        From the queues' `ends` on, recovery has already cleared implausible units.
        """
        chosen = set(queues)
        records: dict[Queue, list[tuple[int, int]]] = {queue: [] for queue in chosen}
        places: dict[Queue, int] = {}
        changed = 0
        for result in self._scanner.walk(self._begin, self._end, self._holes):
            for number, first, count, offset, _end, _time in result.runs.tolist():
                queue = self._scanner.table.name(number)
                if queue in chosen and first < ends.get(queue, 0):
                    wanted = as_units(result.units[offset : offset + count * UNIT_SIZE])
                    changed += self._write_if_other(queue, first, wanted)
                    records[queue].append((first, first + count))
                    places.setdefault(queue, int(wanted["physical_offset"][0]))
        for queue, ranges in records.items():
            if ranges:
                changed += self._between(queue, merged(ranges))
            elif self._begin > 0 and (starts := self._files.starts(*queue)):
                changed += self._expired(queue, starts[0] // UNIT_SIZE, self._files.extent(*queue).max_offset)
        return changed

    def close(self) -> None:
        """Sync and close the files."""
        self._files.sync()
        self._files.close()
        self._scanner.views.close()

    def _write_if_other(self, queue: Queue, first: int, wanted: NDArray[np.void]) -> int:
        current = self._read(queue, first, len(wanted))
        other = int(np.count_nonzero(current != wanted))
        if other:
            self._files.write_run(*queue, first, wanted.view(np.uint8))
        return other

    def _read(self, queue: Queue, first: int, count: int) -> NDArray[np.void]:
        """Units on disk; zeros where the files lack them."""
        units = np.zeros(count, UNIT_DTYPE)
        try:
            found = as_units(self._files.read_units(*queue, first, count))
        except FileNotFoundError:
            return units
        units[: len(found)] = found
        return units

    def _between(self, queue: Queue, records: list[tuple[int, int]]) -> int:
        """Repair the units before a queue's first record and between its records."""
        starts = self._files.starts(*queue)
        changed = 0
        if starts and self._begin > 0:
            changed += self._expired(queue, starts[0] // UNIT_SIZE, records[0][0])
        elif starts:
            changed += self._fill(queue, starts[0] // UNIT_SIZE, records[0][0], before_all=True)
        for earlier, later in itertools.pairwise(records):
            # A longer gap is implausible and would fill the disk; recovery does not fill it either.
            if later[0] - earlier[1] <= FILL_MAX:
                changed += self._fill(queue, earlier[1], later[0])
        return changed

    def _expired(self, queue: Queue, first: int, stop: int) -> int:
        """Let units of deleted records point below the log, for the search of the minimum."""
        changed = 0
        last = np.array([(0, 1, 0)], UNIT_DTYPE)[0]
        for at in range(first, stop, _CHUNK_UNITS):
            units = self._read(queue, at, min(_CHUNK_UNITS, stop - at))
            physical, sizes = units["physical_offset"].astype(np.int64), units["size"]
            wrong = (sizes != FILLER_SIZE) & ((sizes <= 0) | (physical < 0) | (physical >= self._begin))
            wrong &= ~self._in_holes(physical)
            for index in np.flatnonzero(wrong).tolist():
                units[index] = units[index - 1] if index else last
            if wrong.any():
                put_end_fillers(units, self._segment_size)
                self._files.write_run(*queue, at, units.view(np.uint8))
                changed += int(np.count_nonzero(wrong))
            last = units[-1].copy()
        return changed

    def _fill(self, queue: Queue, first: int, stop: int, *, before_all: bool = False) -> int:
        """Write fillers where no record exists, except over units that point into damage."""
        changed = 0
        for at in range(first, stop, _CHUNK_UNITS):
            units = self._read(queue, at, min(_CHUNK_UNITS, stop - at))
            physical = units["physical_offset"].astype(np.int64)
            good = (units["size"] == FILLER_SIZE) | ((units["size"] > 0) & self._in_holes(physical))
            if good.all():
                continue
            place = 0 if before_all else self._filler_place(queue, at)
            wanted = as_units(filler_units(len(units), place))
            wanted[good] = units[good]
            if self._holes:
                # Without damage, RocketMQ would cut the queue at a unit that points beyond the end of the log.
                put_end_fillers(wanted, self._segment_size)
            self._files.write_run(*queue, at, wanted.view(np.uint8))
            changed += int(np.count_nonzero(~good))
        return changed

    def _filler_place(self, queue: Queue, queue_offset: int) -> int:
        """Position for a filler after the unit before it: that of the next hole, if any."""
        before = self._read(queue, queue_offset - 1, 1)[0]
        position = int(before["physical_offset"])
        following = next((start for start, _stop in self._holes if start > position), None)
        return 0 if following is None else filler_position(following, self._segment_size)

    def _in_holes(self, physical: NDArray[np.int64]) -> NDArray[np.bool_]:
        found = np.zeros(len(physical), bool)
        for start, stop in self._holes:
            found |= (physical >= start) & (physical < stop)
        return found
