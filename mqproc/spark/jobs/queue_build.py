"""ConsumeQueue files that many tasks write at once: units at their places, and fillers where none can be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mqproc.io import StoreIO
from mqproc.kernels.dispatch_buffers import ScanResult
from mqproc.kernels.intrinsics import load_be64
from mqproc.layout.consume_queue import PHYSICAL_OFFSET, UNIT_SIZE
from mqproc.spark.jobs.tasks import Row
from mqproc.store.consume_queue import ConsumeQueueFiles, fillers
from mqproc.store.end_fillers import end_fillers
from mqproc.store.queue_extent import explained_by
from mqproc.store.queue_table import QueueTable
from mqproc.store.verify.inventory import Queue
from mqproc.store.verify.log_findings import WholeLog
from mqproc.store.verify.picture import Picture


@dataclass(slots=True)
class Run:
    """Units of the queue offsets [first, stop); their records lie within [physical_begin, physical_end) of the log."""

    first: int
    stop: int
    physical_begin: int
    physical_end: int


class UnitWriter:
    """Writes units into files that others write to at the same time, and keeps account of the runs."""

    def __init__(self, io: StoreIO, folder: Path, picture: Picture) -> None:
        self._io = io
        self._files = ConsumeQueueFiles(io, folder, picture.inventory.sizes.queue_file, write=True)
        self._made: set[Path] = set()
        self.runs: dict[Queue, list[Run]] = {}

    def take(self, result: ScanResult, table: QueueTable) -> None:
        """Write what a scan has given."""
        for number, first, count, at, physical_end, _time in result.runs.tolist():
            units = result.units[at : at + count * UNIT_SIZE]
            queue = table.name(number)
            self.write(queue, first, units)
            self._note(queue, Run(first, first + count, load_be64(units, PHYSICAL_OFFSET), physical_end))

    def write(self, queue: Queue, first: int, units: NDArray[np.uint8]) -> None:
        """Write consecutive units, uint8[20 × n], from a queue offset on. Raises OSError."""
        size = self._files.file_bytes
        begin, end = first * UNIT_SIZE, first * UNIT_SIZE + len(units)
        for start in range(begin - begin % size, end, size):
            self._make(self._files.path(*queue, start), size)
        self._files.write_run(*queue, first, units)

    def sync(self) -> None:
        """Make all of it durable."""
        self._files.sync()

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def _make(self, path: Path, size: int) -> None:
        """Give a file its length, whoever comes first: one that has it gets no fillers by the way."""
        if path in self._made:
            return
        self._io.make_folder(path.parent, sync=False)
        fd = self._io.open(path, write=True, create=True)
        try:
            if self._io.size(fd) != size:
                self._io.set_size(fd, size)
        finally:
            self._io.close(fd)
        self._made.add(path)

    def _note(self, queue: Queue, run: Run) -> None:
        runs = self.runs.setdefault(queue, [])
        if runs and runs[-1].stop == run.first:
            runs[-1].stop, runs[-1].physical_end = run.stop, run.physical_end
        else:
            runs.append(run)


class QueueRuns:
    """The runs of all shares, queue by queue: what lies between them."""

    def __init__(self, log: WholeLog, picture: Picture, writer: UnitWriter) -> None:
        self._log = log
        self._holes = log.fault_ranges
        self._segment_size = picture.inventory.sizes.segment
        self._units_per_file = picture.inventory.sizes.queue_file // UNIT_SIZE
        self._writer = writer

    def of_all(self, table: pa.Table) -> Iterator[Row]:
        """A row for each queue. `table` has runs in any order: topic (null: none), queue_id, and Run's fields."""
        runs = table.filter(pa.compute.is_valid(table.column("topic"))).sort_by(
            [("topic", "ascending"), ("queue_id", "ascending"), ("physical_begin", "ascending")]
        )
        waiting: list[Run] = []
        of: Queue | None = None
        for batch in runs.to_batches(max_chunksize=8192):
            for row in batch.to_pylist():
                queue = row.pop("topic"), row.pop("queue_id")
                if of is not None and queue != of:
                    yield self._of_queue(of, waiting)
                    waiting = []
                of = queue
                waiting.append(Run(**row))
        if of is not None:
            yield self._of_queue(of, waiting)

    def _of_queue(self, queue: Queue, runs: list[Run]) -> Row:
        """Fill what lies between a queue's runs, in the order of the log, as dispatch would have; its row."""
        expected, physical_end = 0, 0
        found = {"units": 0, "fillers": 0, "missing": 0, "repeated": 0}
        first = min(run.first for run in runs)
        for run in runs:
            found["units"] += run.stop - run.first
            found["repeated"] += max(0, min(expected, run.stop) - run.first)
            if run.first > expected:
                filled = self._fill(queue, expected, run, physical_end)
                found["fillers"] += filled
                first = min(first, expected) if filled and not expected else first
                found["missing"] += run.first - expected - filled if expected else 0
            expected, physical_end = max(expected, run.stop), run.physical_end
        return {"topic": queue[0], "queue_id": queue[1], "min_offset": first, "max_offset": expected, **found}

    def _fill(self, queue: Queue, expected: int, run: Run, physical_end: int) -> int:
        """Fillers for the offsets [expected, run.first); how many stand for lost records.

        Where damage does not explain them, a file that begins in between has fillers up to its first unit.
        """
        expired = expected == 0 and self._log.begin > 0
        missing = run.first - expected
        place = None
        if not expired:
            place = explained_by(self._holes, missing, physical_end, run.physical_begin, self._segment_size)
        if place is not None:
            self._writer.write(queue, expected, end_fillers(missing, place, self._segment_size))
            return missing
        start = run.first - run.first % self._units_per_file
        if expected <= start < run.first:
            self._writer.write(queue, start, fillers(run.first - start))
        return 0
