"""ConsumeQueue and Index of a store built from its CommitLog alone, in parallel, in a folder beside it.

    shares of the log ──scanned──▶ units, each written at its own place (queue offset × 20): no shuffle, no sort
                           └────▶ runs, counts of entries ──▶ what lies between runs: fillers
                                                         └──▶ index files, each from the shares with its entries

A record says which place in its queue it has, so tasks write into the same files without talking; done twice, a task
writes the same bytes. An index file is a chain of its entries, so one task builds it, and knows from the counts of the
shares before which entries are its own. Names of index files follow from one another: they come last.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from mqproc.config import Options
from mqproc.errors import BadRequestError, CorruptStoreError
from mqproc.io import StoreIO
from mqproc.paths import StorePaths
from mqproc.spark.jobs.audits import SHARE_BYTES
from mqproc.spark.jobs.folders import local_stores
from mqproc.spark.jobs.index_build import IndexBuild, Piece, pieces_of_files
from mqproc.spark.jobs.queue_build import QueueRuns, UnitWriter
from mqproc.spark.jobs.targets import check_target
from mqproc.spark.jobs.tasks import Row, rows_of_each, rows_of_groups, rows_of_tasks
from mqproc.store.existing import check_is_store
from mqproc.store.index_headers import next_name
from mqproc.store.reads.reader import settings_of
from mqproc.store.verify.log_findings import WholeLog, join_shares
from mqproc.store.verify.log_pass import LogPass, LogShare
from mqproc.store.verify.picture import Picture, Share, cut_into_shares
from mqproc.store.verify.state import known_holes
from mqproc.store.verify.verifier import picture_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_RUN: Final = [(name, pa.int64()) for name in ("first", "stop", "physical_begin", "physical_end")]
WALKED: Final = pa.schema(
    [("log", pa.int32()), ("share", pa.binary()), ("topic", pa.string()), ("queue_id", pa.int32()), *_RUN]
)
_COUNTED: Final = [
    (name, pa.int64()) for name in ("min_offset", "max_offset", "units", "fillers", "missing", "repeated")
]
JOINED: Final = pa.schema(
    [("topic", pa.string()), ("queue_id", pa.int32()), *_COUNTED, ("file", pa.int32()), ("pieces", pa.binary())]
)
BUILT: Final = pa.schema(
    [("log", pa.int32()), ("file", pa.int32()), ("entries", pa.int64()), ("first_stored_ms", pa.int64())]
)
_NAMED: Final = pa.schema([("name", pa.string()), ("entries", pa.int64())])
_BUILDERS_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What was built: a row a queue, and a row an index file. Both are kept by Spark until `unpersist`.

    `queues`: topic, queue_id, min_offset, max_offset, units that were written, fillers for what damage has swallowed,
    offsets that are missing, and such that two records have, of which one has the place. `index`: name, entries.
    """

    queues: DataFrame
    index: DataFrame

    def unpersist(self) -> None:
        """Let Spark forget the rows."""
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
    """Build `to/consumequeue` and `to/index` from the log of the store in the folder `store`, which is only read.

    `to` is an empty folder or none, on a file system that all executors have at the same path. ConsumeQueue files are
    byte for byte what dispatch makes of this log; so is the index but for files that began before the log does. A
    running store is built up to what it has published.

    Raises StoreAccessError when there is no store, BadRequestError when something is in `to`; CorruptStoreError for
    damage, unless `fail_on_data_loss` is off: then it is passed over, with fillers for what it has swallowed.
    """
    from pyspark import StorageLevel

    folders = local_stores(str(store))
    if len(folders) > 1:
        raise BadRequestError(f"{store}: means {len(folders):,} stores; a rebuild is of one")
    job = RebuildJob.of(folders[0], Path(to), share_bytes=share_bytes, fail_on_data_loss=fail_on_data_loss)
    walked = rows_of_tasks(spark, job.picture.shares, job.walk, WALKED).persist(StorageLevel.DISK_ONLY)
    joined = rows_of_groups(walked, ["log"], job.join, JOINED, groups=1).persist(StorageLevel.DISK_ONLY)
    files = joined.where("file is not null").select("file", "pieces")
    # An explicit number, since Spark would put rows this small into one task.
    spread = files.repartition(max(1, min(files.count(), _BUILDERS_MAX)), "file")
    built = rows_of_each(spread, job.build, BUILT)
    index = rows_of_groups(built, ["log"], job.name, _NAMED, groups=1).persist(StorageLevel.DISK_ONLY)
    index.count()
    queues = joined.where("file is null").drop("file", "pieces").persist(StorageLevel.DISK_ONLY)
    queues.count()
    walked.unpersist()
    joined.unpersist()
    return Rebuilt(queues, index)


def _picture(io: StoreIO, paths: StorePaths, options: Options, share_bytes: int) -> Picture:
    """The store with all of its log to be dispatched, and with no index to be compared."""
    picture = picture_of(io, paths, options, share_bytes=share_bytes)
    picture.positions = dataclasses.replace(picture.positions, dispatched=None)
    picture.shares = cut_into_shares(io, picture.inventory, picture.positions, 1 << 30, share_bytes)
    picture.index = []
    return picture


def _make_target(target: StorePaths) -> None:
    io = StoreIO()
    if io.names(target.root):
        raise BadRequestError(f"{target.root}: not empty; what is built needs a folder of its own")
    io.make_folder(target.consume_queue)
    io.make_folder(target.index)


class RebuildJob:
    """The steps of one rebuild; travels to every executor."""

    def __init__(self, picture: Picture, target: StorePaths, fail_on_data_loss: bool, with_index: bool) -> None:
        self.picture = picture
        self._with_index = with_index
        self._target = target
        self._fail_on_data_loss = fail_on_data_loss

    @classmethod
    def of(cls, store: Path, to: Path, *, share_bytes: int, fail_on_data_loss: bool) -> RebuildJob:
        """Plan a rebuild and make its target. Raises StoreAccessError, or BadRequestError where it cannot lie."""
        io, paths, target = StoreIO(), StorePaths(store), StorePaths(to.absolute())
        check_is_store(io, paths)
        check_target(to, [store])
        options = settings_of(io, paths)
        picture = _picture(io, paths, options, share_bytes)
        _make_target(target)
        return cls(picture, target, fail_on_data_loss, options.message_index_enable)

    @property
    def _store(self) -> Path:
        return self.picture.inventory.root

    def walk(self, share: Share) -> Iterator[Row]:
        """Scan a share and write its units; a row for the share, and one for each run of its units."""
        io = StoreIO()
        with closing(UnitWriter(io, self._target.consume_queue, self.picture)) as writer:
            with closing(LogPass(io, self.picture, lambda size: None, writer.take)) as log_pass:
                found = log_pass.run(share)
            writer.sync()
        found.totals = found.totals[:0]
        yield {"log": 0, "share": pickle.dumps(found)}
        for (topic, queue_id), runs in writer.runs.items():
            for run in runs:
                yield {"log": 0, "topic": topic, "queue_id": queue_id, **dataclasses.asdict(run)}

    def join(self, table: pa.Table) -> Iterator[Row]:
        """All shares together: what is missing between runs, and which entries each index file gets."""
        shares = [pickle.loads(each) for each in table.column("share").to_pylist() if each is not None]
        shares.sort(key=lambda found: found.share.number)
        log = self._joined(shares)
        io = StoreIO()
        with closing(UnitWriter(io, self._target.consume_queue, self.picture)) as writer:
            yield from QueueRuns(log, self.picture, writer).of_all(table.drop_columns(["log", "share"]))
            writer.sync()
        files = pieces_of_files(shares, self.picture.inventory.sizes.items) if self._with_index else ()
        for number, pieces in enumerate(files):
            yield {"file": number, "pieces": pickle.dumps(pieces)}

    def _joined(self, shares: list[LogShare]) -> WholeLog:
        io, paths = StoreIO(), StorePaths(self._store)
        known, _findings = known_holes(io, paths)
        log = join_shares(io, self.picture, shares, self._refuse, known)
        unknown = [fault for fault in log.fault_ranges if not any(a <= fault[0] and fault[1] <= b for a, b in known)]
        if unknown and self._fail_on_data_loss:
            start, stop = unknown[0]
            raise CorruptStoreError(
                f"{self._store}: no intact record in [{start:,}, {stop:,}) of the log"
                f"{f', nor in {len(unknown) - 1:,} more ranges' if len(unknown) > 1 else ''}; "
                "without fail_on_data_loss such ranges are passed over"
            )
        return log

    def _refuse(self, share: Share) -> LogShare:
        size = self.picture.inventory.sizes.segment
        raise CorruptStoreError(
            f"{self._store}: a record reaches over {share.start:,}, where a share of the log seemed to begin; bodies "
            f"seem to hold copies of records: rebuild with shares of a segment, {size:,} bytes"
        )

    def build(self, row: Row) -> Iterator[Row]:
        """One index file, which has no name of its own yet."""
        pieces: list[Piece] = pickle.loads(row["pieces"])
        built = IndexBuild(StoreIO(), self.picture, self._unnamed(row["file"])).run(pieces, is_first=row["file"] == 0)
        yield {"log": 0, "file": row["file"], "entries": built.entries, "first_stored_ms": built.first_stored_ms}

    def name(self, table: pa.Table) -> Iterator[Row]:
        """Give all index files their names, each behind the one before."""
        io, name = StoreIO(), ""
        for row in sorted(table.to_pylist(), key=lambda row: int(row["file"])):
            name = next_name(row["first_stored_ms"], name)
            folder = self._unnamed(row["file"])
            # Done again, it may have been moved already.
            for unnamed in io.names(folder):
                io.rename(folder / unnamed, self._target.index / name)
            yield {"name": name, "entries": row["entries"]}
        io.sync_folder(self._target.index)
        io.remove_folder(self._unnamed(0).parent)

    def _unnamed(self, file: int) -> Path:
        return self._target.root / "index.building" / str(file)
