"""After recovery: the last units of queues that still are not what the log says.

Recovery writes over what differs from a record, and fills what damage has swallowed, as far as it can know. Beyond that
every unit of a queue between its first and its last one is looked at here:

    expired …│ record record … no record … record │ behind the end
    garbage there is made     zeros and garbage     recovery has cleared it
    like the unit before it   become fillers
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.config import Options
from mqproc.io import StoreIO
from mqproc.layout.consume_queue import FILLER_SIZE
from mqproc.paths import StorePaths
from mqproc.store import damage
from mqproc.store.consume_queue import UNIT_DTYPE, UNIT_SIZE, ConsumeQueueFiles, as_units, fillers
from mqproc.store.damage import merged
from mqproc.store.end_fillers import put_end_fillers
from mqproc.store.queue_extent import filler_position
from mqproc.store.recovery.queue_recovery import FILL_MAX
from mqproc.store.verify.delays import delays_of
from mqproc.store.verify.deletions import read_deleted
from mqproc.store.verify.inventory import Queue, take_inventory
from mqproc.store.verify.log_pass import Scanner
from mqproc.store.verify.picture import Picture, Positions
from mqproc.store.verify.verifier import sizes_of

_CHUNK_UNITS: Final = 1 << 16


class UnitMender:
    """Mends queues of one stopped store, whose log is [begin, end)."""

    def __init__(self, io: StoreIO, paths: StorePaths, options: Options, begin: int, end: int) -> None:
        self._begin = begin
        self._end = end
        self._holes = merged((hole.start, hole.stop) for hole in damage.load(io, paths).holes)
        sizes = sizes_of(io, paths, options)
        self._segment_size = sizes.segment
        self._files = ConsumeQueueFiles(io, paths.consume_queue, sizes.queue_file, write=True)
        inventory = take_inventory(io, paths, sizes)
        picture = Picture(inventory, Positions(begin, end), delays_of(io, inventory, options.message_delay_level))
        picture.deleted = read_deleted(io, paths, running=False)
        self._scanner = Scanner(io, picture)

    def run(self, queues: Collection[Queue], ends: Mapping[Queue, int]) -> int:
        """Compare every unit of these queues with the log; how many were changed.

        At and behind the queues' `ends`, as recovery has them, it has cleared what it does not believe.
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
        """Make it durable and close the files."""
        self._files.sync()
        self._files.close()
        self._scanner.views.close()

    def _write_if_other(self, queue: Queue, first: int, wanted: NDArray[np.void]) -> int:
        there = self._read(queue, first, len(wanted))
        other = int(np.count_nonzero(there != wanted))
        if other:
            self._files.write_run(*queue, first, wanted.view(np.uint8))
        return other

    def _read(self, queue: Queue, first: int, count: int) -> NDArray[np.void]:
        """Units as they lie on disk, zeros where there are none."""
        units = np.zeros(count, UNIT_DTYPE)
        try:
            found = as_units(self._files.read_units(*queue, first, count))
        except FileNotFoundError:
            return units
        units[: len(found)] = found
        return units

    def _between(self, queue: Queue, records: list[tuple[int, int]]) -> int:
        """What lies before a queue's first record, and where none has a place."""
        starts = self._files.starts(*queue)
        changed = 0
        if starts and self._begin > 0:
            changed += self._expired(queue, starts[0] // UNIT_SIZE, records[0][0])
        elif starts:
            changed += self._fill(queue, starts[0] // UNIT_SIZE, records[0][0], before_all=True)
        for earlier, later in itertools.pairwise(records):
            # Recovery fills no more either: the number is nonsense, and would fill the disk.
            if later[0] - earlier[1] <= FILL_MAX:
                changed += self._fill(queue, earlier[1], later[0])
        return changed

    def _expired(self, queue: Queue, first: int, stop: int) -> int:
        """Units of deleted records must lead below the log, or the queue's minimum is looked for in vain."""
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
        """Fillers where no record has a place, but for units that lead into damage."""
        changed = 0
        for at in range(first, stop, _CHUNK_UNITS):
            units = self._read(queue, at, min(_CHUNK_UNITS, stop - at))
            physical = units["physical_offset"].astype(np.int64)
            good = (units["size"] == FILLER_SIZE) | ((units["size"] > 0) & self._in_holes(physical))
            if good.all():
                continue
            place = 0 if before_all else self._filler_place(queue, at)
            wanted = as_units(fillers(len(units), place))
            wanted[good] = units[good]
            if self._holes:
                # Of a log without any RocketMQ would cut the queue at a unit that points behind the log's end.
                put_end_fillers(wanted, self._segment_size)
            self._files.write_run(*queue, at, wanted.view(np.uint8))
            changed += int(np.count_nonzero(~good))
        return changed

    def _filler_place(self, queue: Queue, queue_offset: int) -> int:
        """What a filler behind the record of the unit before it points to: by the hole that follows, if one does."""
        before = self._read(queue, queue_offset - 1, 1)[0]
        position = int(before["physical_offset"])
        following = next((start for start, _stop in self._holes if start > position), None)
        return 0 if following is None else filler_position(following, self._segment_size)

    def _in_holes(self, physical: NDArray[np.int64]) -> NDArray[np.bool_]:
        found = np.zeros(len(physical), bool)
        for start, stop in self._holes:
            found |= (physical >= start) & (physical < stop)
        return found
