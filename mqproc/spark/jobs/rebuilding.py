"""Rebuild ConsumeQueue and Index of a store from its CommitLog, in another folder.

    shares of the log ──scan──▶ units, each written at queue offset × 20: no shuffle, no sort
                        └────▶ runs of units, counts of entries ──▶ fillers between runs
                                                             └──▶ index files, each from the shares with its entries

A record carries its queue offset, so tasks write into the same files without communication, and a repeated task writes
the same bytes. Entries of an index file are chained, so one task builds it; the counts of earlier shares show which
entries it has. The name of an index file depends on the previous one, so files are named last.
"""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark import TaskContext

from mqproc.errors import BadRequestError, CorruptStoreError, MqprocError
from mqproc.io.store_io import StoreIO
from mqproc.kernels.dispatch import IndexEntries, ScanResult
from mqproc.kernels.jit.intrinsics import load_be64
from mqproc.layout.consume_queue import PHYSICAL_OFFSET, UNIT_SIZE
from mqproc.layout.index_file import FIRST_ITEM
from mqproc.paths import StorePaths
from mqproc.spark.jobs.audits import SHARE_BYTES
from mqproc.spark.jobs.output import check_target
from mqproc.spark.jobs.tasks import Row, local_stores, rows_of_each, rows_of_groups, rows_of_tasks
from mqproc.store.access import check_is_store
from mqproc.store.consumequeue.bounds import end_fillers, explained_by
from mqproc.store.consumequeue.files import ConsumeQueueFiles, filler_units
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.index.files import IndexFiles, IndexHeader, next_name
from mqproc.store.index.tags import adopted_index_tags
from mqproc.store.read.reader import settings_of, with_sizes_of_files
from mqproc.store.verify.inventory import Queue
from mqproc.store.verify.log import LogPass, LogScanner, LogShare, WholeLog, join_shares
from mqproc.store.verify.snapshot import Share, Snapshot, cut_into_shares
from mqproc.store.verify.state import known_holes
from mqproc.store.verify.verifier import take_snapshot

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Index files


Entries = tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]
"""Key hashes, log positions and store times."""


@dataclass(frozen=True, slots=True)
class EntryRange:
    """Entries [skip, skip + take) of log positions [begin, end) without `faults`."""

    begin: int
    end: int
    faults: Sequence[tuple[int, int]]
    skip: int
    take: int


def entry_ranges_of_files(shares: Sequence[LogShare], items: int) -> Iterator[list[EntryRange]]:
    """The entry ranges of each index file of `items` items.

    Except in the first file, they begin with the previous file's last entry.
    """
    capacity = items - FIRST_ITEM
    for first in range(0, sum(found.entries for found in shares), capacity):
        before, entry_ranges = 0, []
        for found in shares:
            low, high = max(first - 1, before), min(first + capacity, before + found.entries)
            if low < high and found.begin is not None:
                faults = [(fault.start, fault.stop) for fault in found.faults]
                entry_ranges.append(EntryRange(found.begin, found.end, faults, low - before, high - low))
            before += found.entries
        yield entry_ranges


def build_index_file(
    snapshot: Snapshot, folder: Path, entry_ranges: Sequence[EntryRange], *, is_first: bool
) -> tuple[int, int]:
    """Build one index file in a folder: all ranges, except the previous file's last entry.

    Returns the number of entries, and the first one's store time in ms.
    """
    io, sizes = StoreIO(), snapshot.inventory.sizes
    io.remove_folder(folder)
    previous: IndexHeader | None = None
    count = first_stored_ms = 0
    scanner, files = LogScanner(io, snapshot), IndexFiles(io, folder, sizes.slots, sizes.items)
    with closing(scanner.views), closing(files):
        for hashes, offsets, times in _entries(scanner, entry_ranges):
            at = 0
            if not is_first and previous is None:
                previous = IndexHeader(0, int(times[0]), 0, int(offsets[0]), 0, 0)
                at = 1
            if at == len(hashes):
                continue
            if not count:
                first_stored_ms = int(times[at])
                if previous is not None:
                    files.begin_after(previous, first_stored_ms)
            files.put(hashes[at:], offsets[at:], times[at:], len(hashes) - at)
            count += len(hashes) - at
        files.sync()
    return count, first_stored_ms


def _entries(scanner: LogScanner, entry_ranges: Sequence[EntryRange]) -> Iterator[Entries]:
    for each in entry_ranges:
        skip, left = each.skip, each.take
        for result in scanner.walk(each.begin, each.end, each.faults):
            low, high = min(skip, result.entries), min(skip + left, result.entries)
            if low < high:
                yield result.hashes[low:high], result.offsets[low:high], result.times[low:high]
            skip -= low
            left -= high - low
            if not left:
                break


# ConsumeQueue files


@dataclass(slots=True)
class UnitRun:
    """Units [first, stop), of records in [physical_begin, physical_end) of the log."""

    first: int
    stop: int
    physical_begin: int
    physical_end: int


class UnitWriter:
    """Writes units into files that tasks share, and records the runs of units."""

    def __init__(self, io: StoreIO, folder: Path, snapshot: Snapshot) -> None:
        self._io = io
        self._files = ConsumeQueueFiles(io, folder, snapshot.inventory.sizes.queue_file, write=True)
        self.sync, self.close = self._files.sync, self._files.close
        self._made: set[Path] = set()
        self.runs: dict[Queue, list[UnitRun]] = {}

    def write_scan(self, result: ScanResult, table: QueueTable) -> None:
        """Write the units of a scan."""
        for number, first, count, at, physical_end, _time in result.runs.tolist():
            units = result.units[at : at + count * UNIT_SIZE]
            queue = table.name(number)
            self.write(queue, first, units)
            runs = self.runs.setdefault(queue, [])
            if runs and runs[-1].stop == first:
                runs[-1].stop, runs[-1].physical_end = first + count, physical_end
            else:
                runs.append(UnitRun(first, first + count, load_be64(units, PHYSICAL_OFFSET), physical_end))

    def write(self, queue: Queue, first: int, units: NDArray[np.uint8]) -> None:
        """Write consecutive units, uint8[20 × n], from a queue offset on. Raises OSError."""
        size = self._files.file_bytes
        begin, end = first * UNIT_SIZE, first * UNIT_SIZE + len(units)
        for start in range(begin - begin % size, end, size):
            self._make(self._files.path(*queue, start), size)
        self._files.write_run(*queue, first, units)

    def _make(self, path: Path, size: int) -> None:
        """Give a file its length before anything is written, so that it gets no fillers."""
        if path in self._made:
            return
        self._io.make_folder(path.parent, sync=False)
        with self._io.opened(path, write=True, create=True) as fd:
            if self._io.size(fd) != size:
                self._io.set_size(fd, size)
        self._made.add(path)


class QueueRuns:
    """The runs of all shares by queue, and the fillers between them."""

    def __init__(self, log: WholeLog, snapshot: Snapshot, writer: UnitWriter) -> None:
        self._log = log
        self._holes = log.fault_ranges
        self._segment_size = snapshot.inventory.sizes.segment
        self._units_per_file = snapshot.inventory.sizes.queue_file // UNIT_SIZE
        self._writer = writer

    def of_all(self, table: pa.Table) -> Iterator[Row]:
        """A row for each queue. `table` has runs in any order; shares without runs have no topic."""
        runs = table.filter(pa.compute.is_valid(table.column("topic"))).sort_by(
            [("topic", "ascending"), ("queue_id", "ascending"), ("physical_begin", "ascending")]
        )
        rows = (row for batch in runs.to_batches(max_chunksize=8192) for row in batch.to_pylist())
        for queue, of_queue in itertools.groupby(rows, lambda row: (row.pop("topic"), row.pop("queue_id"))):
            yield self._queue_row(queue, [UnitRun(**row) for row in of_queue])

    def _queue_row(self, queue: Queue, runs: list[UnitRun]) -> Row:
        """Fill the gaps between a queue's runs in log order, as dispatch would; the queue's row."""
        expected, physical_end = 0, 0
        found = {"units": 0, "fillers": 0, "missing": 0, "repeated": 0}
        lost = []
        first = min(run.first for run in runs)
        for run in runs:
            found["units"] += run.stop - run.first
            found["repeated"] += max(0, min(expected, run.stop) - run.first)
            if run.first > expected:
                filled = self._fill(queue, expected, run, physical_end)
                found["fillers"] += filled
                if filled:
                    lost.append({"first_offset": expected, "last_offset": run.first - 1})
                first = min(first, expected) if filled and not expected else first
                found["missing"] += run.first - expected - filled if expected else 0
            expected, physical_end = max(expected, run.stop), run.physical_end
        bounds = {"min_offset": first, "max_offset": expected}
        return {"topic": queue[0], "queue_id": queue[1], **bounds, **found, "lost": lost}

    def _fill(self, queue: Queue, expected: int, run: UnitRun, physical_end: int) -> int:
        """Write fillers for the offsets [expected, run.first); the number that replace lost records.

        Gaps without damage are not filled, except from the start of a file up to its first unit.
        """
        expired = expected == 0 and self._log.begin > 0
        missing = run.first - expected
        damaged_at = None
        if not expired:
            damaged_at = explained_by(self._holes, missing, physical_end, run.physical_begin, self._segment_size)
        if damaged_at is not None:
            self._writer.write(queue, expected, end_fillers(missing, damaged_at, self._segment_size))
            return missing
        start = run.first - run.first % self._units_per_file
        if expected <= start < run.first:
            self._writer.write(queue, start, filler_units(run.first - start))
        return 0


_RUN: Final = [(name, pa.int64()) for name in ("first", "stop", "physical_begin", "physical_end")]
WALKED: Final = pa.schema(
    [("log", pa.int32()), ("share", pa.binary()), ("topic", pa.string()), ("queue_id", pa.int32()), *_RUN]
)
_COUNTED: Final = [
    (name, pa.int64()) for name in ("min_offset", "max_offset", "units", "fillers", "missing", "repeated")
]
JOINED: Final = pa.schema(
    [
        ("topic", pa.string()),
        ("queue_id", pa.int32()),
        *_COUNTED,
        ("lost", pa.list_(pa.struct([("first_offset", pa.int64()), ("last_offset", pa.int64())]))),
        ("file", pa.int32()),
        ("files", pa.int32()),
        ("pieces", pa.binary()),
    ]
)
BUILT: Final = pa.schema(
    [
        *(("log", pa.int32()), ("file", pa.int32()), ("files", pa.int32()), ("attempt", pa.int64())),
        *(("entries", pa.int64()), ("first_stored_ms", pa.int64())),
    ]
)
_NAMED: Final = pa.schema([("name", pa.string()), ("entries", pa.int64())])
_BUILDERS_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A row for each queue and for each index file. Spark persists both until `unpersist`.

    `queues`: topic, queue_id, min_offset, max_offset, units written, fillers for damaged records, missing offsets,
    repeated offsets, of which one record has the unit, and the ranges of lost offsets, from first_offset to
    last_offset. `index`: name, entries.
    """

    queues: DataFrame
    index: DataFrame

    def unpersist(self) -> None:
        """Release the rows in Spark."""
        self.queues.unpersist()
        self.index.unpersist()


def rebuild(
    spark: SparkSession,
    store: str | Path,
    to: str | Path,
    *,
    share_bytes: int = SHARE_BYTES,
    fail_on_data_loss: bool = True,
) -> Rebuilt:
    """Build `to/consumequeue` and `to/index` from the log of the store in a folder.

    `to` is a missing or empty folder at the same path on all executors. ConsumeQueue files have the bytes that dispatch
    would write for this log, and so have index files unless they began before the log does. A running store is built
    up to its published positions.

    Raises StoreAccessError when there is no store, BadRequestError when `to` is not empty; CorruptStoreError for
    damage, unless `fail_on_data_loss` is off: then it is skipped, with fillers for the lost records.
    """
    from pyspark import StorageLevel

    folders = local_stores(str(store))
    if len(folders) > 1:
        raise BadRequestError(f"{store}: matches {len(folders):,} stores; a rebuild takes one")
    job = RebuildJob.of(folders[0], Path(to), share_bytes=share_bytes, fail_on_data_loss=fail_on_data_loss)
    walked = rows_of_tasks(spark, job.snapshot.shares, job.walk, WALKED).persist(StorageLevel.DISK_ONLY)
    joined = rows_of_groups(walked, ["log"], job.join, JOINED, groups=1).persist(StorageLevel.DISK_ONLY)
    files = joined.where("file is not null").select("file", "files", "pieces")
    # An explicit number of partitions, since Spark would put small rows into one task.
    spread = files.repartition(max(1, min(files.count(), _BUILDERS_MAX)), "file")
    built = rows_of_each(spread, job.build, BUILT)
    index = rows_of_groups(built, ["log"], job.name, _NAMED, groups=1).persist(StorageLevel.DISK_ONLY)
    index.count()
    queues = joined.where("file is null").drop("file", "files", "pieces").persist(StorageLevel.DISK_ONLY)
    queues.count()
    walked.unpersist()
    joined.unpersist()
    return Rebuilt(queues, index)


@dataclass(frozen=True, slots=True)
class RebuildJob:
    """The steps of one rebuild; travels to every executor."""

    snapshot: Snapshot
    target: StorePaths
    fail_on_data_loss: bool
    with_index: bool

    @classmethod
    def of(cls, store: Path, to: Path, *, share_bytes: int, fail_on_data_loss: bool) -> RebuildJob:
        """Plan a rebuild and create its target. Raises StoreAccessError, BadRequestError."""
        io, paths, target = StoreIO(), StorePaths(store), StorePaths(to.absolute())
        check_is_store(io, paths)
        check_target(to, [store])
        options = settings_of(io, paths)
        # All of the log is to be dispatched, and no index is compared.
        snapshot = take_snapshot(io, paths, options, share_bytes=share_bytes)
        snapshot.positions = dataclasses.replace(snapshot.positions, dispatched=None)
        snapshot.shares = cut_into_shares(io, snapshot.inventory, snapshot.positions, 1 << 30, share_bytes)
        snapshot.index = []
        tags = adopted_index_tags(io, paths, with_sizes_of_files(io, paths, options))
        snapshot.entries = IndexEntries.KEYS_AND_TAGS if tags else IndexEntries.KEYS
        if io.names(target.root):
            raise BadRequestError(f"{target.root}: not empty; a rebuild needs an empty folder")
        io.make_folder(target.consume_queue)
        io.make_folder(target.index)
        return cls(snapshot, target, fail_on_data_loss, options.message_index_enable)

    @property
    def _store(self) -> Path:
        return self.snapshot.inventory.root

    def walk(self, share: Share) -> Iterator[Row]:
        """Scan a share and write its units; a row for the share and one for each run."""
        io = StoreIO()
        with closing(UnitWriter(io, self.target.consume_queue, self.snapshot)) as writer:
            with closing(LogPass(io, self.snapshot, lambda size: None, writer.write_scan)) as log_pass:
                found = log_pass.run(share)
            writer.sync()
        found.totals = found.totals[:0]
        # `first` of a share's row is its number of runs.
        yield {"log": 0, "share": pickle.dumps(found), "first": sum(map(len, writer.runs.values()))}
        for (topic, queue_id), runs in writer.runs.items():
            for run in runs:
                yield {"log": 0, "topic": topic, "queue_id": queue_id, **dataclasses.asdict(run)}

    def join(self, table: pa.Table) -> Iterator[Row]:
        """Fill the gaps between the runs of all shares, and assign entries to index files."""
        is_share = table.column("share").is_valid()
        shares = [pickle.loads(each) for each in table.column("share").filter(is_share).to_pylist()]
        runs = pa.compute.sum(table.column("first").filter(is_share)).as_py() or 0
        _check_complete("shares of the log", len(shares), len(self.snapshot.shares))
        _check_complete("runs of units", len(table) - len(shares), runs)
        shares.sort(key=lambda found: found.share.number)
        log = self._join_shares(shares)
        io = StoreIO()
        with closing(UnitWriter(io, self.target.consume_queue, self.snapshot)) as writer:
            yield from QueueRuns(log, self.snapshot, writer).of_all(table.drop_columns(["log", "share"]))
            writer.sync()
        files = list(entry_ranges_of_files(shares, self.snapshot.inventory.sizes.items)) if self.with_index else []
        for number, entry_ranges in enumerate(files):
            yield {"file": number, "files": len(files), "pieces": pickle.dumps(entry_ranges)}

    def _join_shares(self, shares: list[LogShare]) -> WholeLog:
        io, paths = StoreIO(), StorePaths(self._store)
        known, _findings = known_holes(io, paths)
        log = join_shares(io, self.snapshot, shares, self._refuse, known)
        unknown = [fault for fault in log.fault_ranges if not any(a <= fault[0] and fault[1] <= b for a, b in known)]
        if unknown and self.fail_on_data_loss:
            start, stop = unknown[0]
            raise CorruptStoreError(
                f"{self._store}: no intact record in [{start:,}, {stop:,}) of the log"
                f"{f', nor in {len(unknown) - 1:,} more ranges' if len(unknown) > 1 else ''}; "
                "without fail_on_data_loss such ranges are skipped"
            )
        return log

    def _refuse(self, share: Share) -> LogShare:
        size = self.snapshot.inventory.sizes.segment
        raise CorruptStoreError(
            f"{self._store}: a record spans {share.start:,}, where a share of the log seemed to begin; bodies "
            f"seem to contain copies of records: rebuild with shares of a segment, {size:,} bytes"
        )

    def build(self, row: Row) -> Iterator[Row]:
        """Build one index file, which has no name yet, in a folder of this attempt."""
        task = TaskContext.get()
        attempt = task.taskAttemptId() if task is not None else 0
        folder, entry_ranges = self._attempt_path(row["file"], attempt), pickle.loads(row["pieces"])
        entries, first_stored_ms = build_index_file(self.snapshot, folder, entry_ranges, is_first=row["file"] == 0)
        built = {"log": 0, "file": row["file"], "files": row["files"], "attempt": attempt}
        yield {**built, "entries": entries, "first_stored_ms": first_stored_ms}

    def name(self, table: pa.Table) -> Iterator[Row]:
        """Name all index files, each after the previous one."""
        _check_complete("index files", len(table), table.column("files")[0].as_py())
        io, name = StoreIO(), ""
        for row in sorted(table.to_pylist(), key=lambda row: int(row["file"])):
            name = next_name(row["first_stored_ms"], name)
            folder = self._attempt_path(row["file"], row["attempt"])
            # A repeated task may have moved the file already.
            for unnamed in io.names(folder):
                io.rename(folder / unnamed, self.target.index / name)
            yield {"name": name, "entries": row["entries"]}
        io.sync_folder(self.target.index)
        io.remove_folder(self._building)

    @property
    def _building(self) -> Path:
        return self.target.root / "index.building"

    def _attempt_path(self, file: int, attempt: int) -> Path:
        return self._building / f"{file}-{attempt}"


def _check_complete(what: str, there: int, expected: int) -> None:
    """Raise MqprocError when a task got only some of its rows, as after a cancellation."""
    if there != expected:
        raise MqprocError(f"{there:,} of {expected:,} {what}: the task was cut off; Spark repeats it")
