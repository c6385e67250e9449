"""Write a job's output: never into or over a store, and as a whole or not at all.

    to            previous content ──────────────────────────────▶ removed ─┐
    to.partial            └── written, all sources read without error ──────┴──▶ to

Spark itself removes a target before it reads the first message, and leaves the folder of a failed write. Messages are
written by the tasks that read them where possible, other rows by Spark.

Tasks that write files themselves commit all of a job's files, each once, or none:

    to/_temporary/job/attempt-3-17/ ──files of the attempt whose result Spark accepted, by the driver──▶ to/

An attempt cannot know that its rows have ended: they also end when their source fails or the task is killed. So its
files count only with its result. Folders of other attempts are removed with the job's folder. Only numbers travel to
the driver. The driver locks a file in the job's folder; the next job rolls back jobs whose driver has died.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, Final, Self, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark import TaskContext
from pyspark.errors import AnalysisException
from pyspark.sql.pandas.types import from_arrow_schema

from mqproc.errors import BadRequestError, CorruptStoreError, StoreAccessError
from mqproc.spark.jobs.parquet_files import Layout, ParquetFiles, file_errors
from mqproc.spark.jobs.tasks import batches_of
from mqproc.spark.options import PathArgument, path_texts
from mqproc.spark.survey import find_stores, survey_store
from mqproc.store.offsets.file import boot_id
from mqproc.util.file_lock import try_lock_byte
from mqproc.util.units import counted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from mqproc.spark.batch_read import BatchRead

T = TypeVar("T")

UNFINISHED: Final = "_temporary"
"""Folder in a target while Spark, or a job that writes files itself, writes there."""
_LOG: Final = "commitlog"
# Hadoop accepts these with and without a host, and with one or three slashes.
_FILE: Final = re.compile(r"file:(?://[^/]*)?", re.IGNORECASE)

# Sources and targets


def check_sources(path: PathArgument, *, fail_on_data_loss: bool = True) -> list[str]:
    """The stores at a path, each surveyed.

    Raises StoreAccessError for a path without a store, CorruptStoreError for damage that is known before the read.
    """
    stores = find_stores(path_texts(path))
    for store in stores:
        with closing(survey_store(store)) as found:
            if found.damage and fail_on_data_loss:
                raise CorruptStoreError(f"{store}: {found.damage}; skipping damage reads the intact records")
    return stores


def check_target(to: str | Path, stores: Iterable[str | Path], *, overwrites: bool = False) -> None:
    """Raise BadRequestError for a target that overlaps one of `stores` or is inside any store.

    With `overwrites` it must not contain any store. An empty name is an error rather than the current folder.
    """
    if not str(to):
        raise BadRequestError("to is empty: name the folder or URL to write to")
    target = _place(str(to))
    for store in stores:
        source = _place(_archive_of(str(store)))
        if source.is_relative_to(target) or target.is_relative_to(source):
            relation = "is" if source == target else "holds" if source.is_relative_to(target) else "lies in"
            raise BadRequestError(f"{to}: {relation} the store {store}, which is read; write to a separate folder")
    if isinstance(target, Path):
        _check_folder(to, target, overwrites)


def _check_folder(to: str | Path, target: Path, overwrites: bool) -> None:
    for folder in (target, *target.parents):
        if (folder / _LOG).is_dir():
            relation = "is" if folder == target else "lies in"
            raise BadRequestError(f"{to}: {relation} the store {folder}; write to a separate folder")
    if not overwrites:
        return
    for below, names, _files in os.walk(target):
        if _LOG in names:
            raise BadRequestError(f"{to}: holds the store {below}, which overwriting would delete")


def _archive_of(store: str) -> str:
    """The path of the archive that contains a store (zip://one::/stores.zip), or the store."""
    return store.rpartition("::")[2] if "://" in store.partition("::")[0] else store


def _place(text: str) -> Path | PurePosixPath:
    """A folder's real path; of a URL the part after its scheme, as s3 and s3a are the same."""
    local = _FILE.sub("", text, count=1) if _FILE.match(text) else text
    if "://" in local:
        return PurePosixPath(local.partition("://")[2].lstrip("/"))
    # Hadoop, too, resolves `..` before links.
    return Path(os.path.realpath(os.path.abspath(local)))


# Writes


def write_parquet(frame: DataFrame, to: str | Path, stores: Sequence[str | Path], *, mode: str) -> None:
    """Write a frame derived from `stores` to `to`, a folder or URL.

    Raises BadRequestError as `check_target`, before anything is written. After a failure the old content is still
    there.
    """

    def write(path: str, mode: str) -> None:
        frame.write.mode(mode).option("compression", "zstd").parquet(path)

    check = functools.partial(check_target, stores=stores, overwrites=mode == "overwrite")
    check(to)
    write_whole(frame.sparkSession, str(to), mode, write, check)


def write_batches(
    read: BatchRead, to: str | Path, stores: Sequence[str | Path], *, mode: str, layout: Layout
) -> Written:
    """Write a read of `stores` to `to`; to a folder without converting batches to Spark's rows.

    Raises as `write_parquet` and `write_folder`.
    """
    session = read.frame.sparkSession

    def write(path: str, mode: str) -> Written:
        folder = folder_of(session, path)
        return _write_rows(read, path, mode, layout) if folder is None else write_folder(read, folder, mode, layout)

    check = functools.partial(check_target, stores=stores, overwrites=mode == "overwrite")
    check(to)
    return write_whole(session, str(to), mode, write, check, removes_own=folder_of(session, str(to)) is not None)


def _write_rows(read: BatchRead, path: str, mode: str, layout: Layout) -> Written:
    from pyspark.sql import Observation
    from pyspark.sql import functions as F

    # Count while writing: a separate count would read everything twice.
    seen = Observation()
    size = F.sum("size") if "size" in read.types else F.lit(0)
    measured = read.rows().observe(seen, F.count(F.lit(1)).alias("messages"), size.alias("size"))
    selected = measured.select(*dict.fromkeys([*layout.columns, *layout.by]))
    selected.write.partitionBy(*layout.by).mode(mode).option("compression", layout.compression).parquet(path)
    return Written(int(seen.get["messages"]), int(seen.get["size"] or 0), 0)


def already_exists_error(to: str | Path) -> BadRequestError:
    """The error of mode `error` for an existing target."""
    return BadRequestError(f"{to}: already exists; mode append adds to it, overwrite replaces it")


class HadoopPath:
    """A folder or URL, in the file system that Spark writes it with."""

    def __init__(self, session: Any, path: Any) -> None:
        self._session = session
        self._files = path.getFileSystem(session._jsc.hadoopConfiguration())
        self._path = self._files.makeQualified(path)
        uri = self._path.toUri()
        self.folder = Path(uri.getPath()) if uri.getScheme() == "file" else None
        """The folder on this machine; None for other storage."""

    @classmethod
    def of(cls, session: SparkSession, to: str) -> Self | None:
        """None with Spark Connect, which has no access to Spark's file systems."""
        jvm: Any = getattr(session, "_jvm", None)
        return cls(session, jvm.org.apache.hadoop.fs.Path(to)) if jvm is not None else None

    def __str__(self) -> str:
        return str(self._path.toString())

    def beside(self, ending: str) -> Self | None:
        """The path with a suffix to its name; None for a root."""
        parent = self._path.getParent()
        if parent is None:
            return None
        return type(self)(self._session, parent.suffix(f"/{self._path.getName()}{ending}"))

    def exists(self) -> bool:
        return bool(self._files.exists(self._path))

    def is_unfinished(self) -> bool:
        """Whether the folder holds only the output of a killed write."""
        names = [str(each.getPath().getName()) for each in self._files.listStatus(self._path)]
        return not names or UNFINISHED in names

    def remove(self) -> bool:
        return bool(self._files.delete(self._path, True))

    def discard(self) -> None:
        """Remove a failed job's output; an interrupt may have ended Java too."""
        with suppress(Exception):
            self.remove()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def remove_empty(self) -> None:
        """Remove the folder if it holds nothing but an empty `UNFINISHED` folder."""
        for each in (self.folder / UNFINISHED, self.folder) if self.folder is not None else ():
            with suppress(OSError):
                each.rmdir()

    def rename(self, to: HadoopPath) -> bool:
        return bool(self._files.rename(self._path, to._path))


def write_whole(
    session: SparkSession,
    to: str,
    mode: str,
    write: Callable[[str, str], T],
    check: Callable[[str], None],
    *,
    removes_own: bool = False,
) -> T:
    """Run `write(path, mode)` for a target whose content stays until everything is written.

    An overwrite is written to `to.partial` first. `check` may reject that path, and it must not exist unless a killed
    write left it. With Spark Connect, for the root of a file system and for dynamic partition overwrite, Spark itself
    overwrites the target.

    When `write` fails, a new folder is removed with its content; with `removes_own`, `write` removes its files, and
    the folder is removed if it is empty.
    """
    target = HadoopPath.of(session, to)
    if target is None or _is_dynamic(session):
        return _write_to(to, mode, write)
    is_there = target.exists()
    partial = target.beside(".partial") if mode == "overwrite" and is_there else None
    if partial is None:
        discard = target.remove_empty if removes_own else target.discard
        return _write_to(to, mode, write, None if is_there else discard)
    check(str(partial))
    if partial.exists() and not partial.is_unfinished():
        raise BadRequestError(f"{partial}: exists and is not an unfinished write; {to} is written there first: move it")
    written = _write_to(str(partial), mode, write, partial.discard)
    if not target.remove() or not partial.rename(target):
        raise BadRequestError(f"{to}: cannot be replaced; the output is in {partial}")
    return written


def folder_of(session: SparkSession, to: str) -> Path | None:
    """The folder of a target that jobs can write without Spark.

    None when only Spark can write it: a URL, the root of a file system, with Spark Connect, and with dynamic partition
    overwrite.
    """
    target = HadoopPath.of(session, to)
    return None if target is None or target.beside("") is None or _is_dynamic(session) else target.folder


def _is_dynamic(session: SparkSession) -> bool:
    """Whether overwriting replaces only the partitions that are written."""
    return str(session.conf.get("spark.sql.sources.partitionOverwriteMode", "static")).lower() == "dynamic"


def _write_to(path: str, mode: str, write: Callable[[str, str], T], discard: Callable[[], object] | None = None) -> T:
    """Write to a path; call `discard` when that fails."""
    try:
        return write(path, mode)
    except BaseException as error:
        if discard is not None:
            discard()
        if isinstance(error, AnalysisException) and error.getCondition() == "PATH_ALREADY_EXISTS":
            raise already_exists_error(path) from None
        raise


# Jobs that write files themselves

_NUMBERS: Final = pa.schema([(name, pa.int64()) for name in ("partition", "attempt", "messages", "size", "files")])
_SUMS: Final = ("messages", "size", "files")
_DRIVER: Final = "driver"
_GONE: Final = ".gone"
_SHARED: Final = "a target must be a folder at the same path for the driver and all executors"


@dataclass(frozen=True, slots=True)
class Written:
    """Messages, bytes of records if batches have `size`, and files (0 if Spark wrote them)."""

    messages: int
    size: int
    files: int


class JobFolder:
    """A job's folder below its target. Tasks never create it, as they may run after its removal."""

    def __init__(self, to: Path, job: str) -> None:
        self.to = to
        self.job = job
        self._path = to / UNFINISHED / job

    @classmethod
    def new(cls, to: Path) -> Self:
        """Create the folder of a new job."""
        made = cls(to, str(uuid.uuid4()))
        with file_errors(made._path):
            made._path.mkdir(parents=True)
        return made

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock that shows other jobs on this machine that this driver is alive."""
        path = self._path / _DRIVER
        with file_errors(path):
            driver = path.open("wb", buffering=0)
        with driver:
            with suppress(OSError):
                if try_lock_byte(driver.fileno()):
                    driver.write(_lock_scope(driver))
            yield

    def name_of(self, partition: int) -> str:
        """Prefix of the file names of a task, unique among all jobs."""
        return f"part-{partition:05d}-{self.job}"

    def write(self, partition: int, attempt: int, write: Callable[[Path], Written]) -> Written:
        """Run an attempt's `write` in a folder of its own.

        Raises StoreAccessError when the job's folder is missing, and errors of `write`, after removing its files.
        """
        folder = self._attempt_folder(partition, attempt)
        if not self._path.exists():
            raise StoreAccessError(f"{self._path}: does not exist; {_SHARED}")
        try:
            with file_errors(folder):
                folder.mkdir()
            return write(folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _attempt_folder(self, partition: int, attempt: int) -> Path:
        return self._path / f"attempt-{partition}-{attempt}"

    def publish(self, attempts: Iterable[tuple[int, int]]) -> int:
        """Move the files of the attempts, (partition, attempt), into the target; their number."""
        count = 0
        for partition, attempt in attempts:
            source = self._attempt_folder(partition, attempt)
            for folder, _folders, names in os.walk(source):
                target = self.to / Path(folder).relative_to(source)
                try:
                    with file_errors(target):
                        if names:
                            target.mkdir(parents=True, exist_ok=True)
                        for name in names:
                            (Path(folder) / name).rename(target / name)
                            count += 1
                except BaseException:
                    self._remove_empty(target)
                    raise
        return count

    def remove(self) -> None:
        """Remove the job's folder, even if attempts are writing there. Ends the rollback."""
        gone = self._path.with_name(f"{self.job}{_GONE}")
        (self._path / _DRIVER).unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            # Attempts do not find the folder by its new name.
            self._path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
        with suppress(OSError):
            # Another job may have its folder there.
            self._path.parent.rmdir()

    def roll_back(self) -> None:
        """Remove published files and folders that become empty, then the job's folder."""
        for folder, _folders, names in os.walk(self.to, topdown=False):
            if own := [Path(folder) / name for name in names if self.job in name]:
                for file in own:
                    file.unlink(missing_ok=True)
                self._remove_empty(Path(folder))
        self.remove()

    def _remove_empty(self, folder: Path) -> None:
        """Remove a folder of the target and its parents there as far as they are empty."""
        for each in (folder, *folder.parents):
            if each == self.to:
                break
            with suppress(OSError):
                each.rmdir()


def write_folder(read: BatchRead, to: Path, mode: str, layout: Layout) -> Written:
    """Write a read to a folder by its tasks, completely or not at all; `mode` as in Spark.

    Raises BadRequestError when the folder exists and must not, StoreAccessError when tasks do not share the folder,
    DiskFullError and MqprocError for errors of the disk; Spark's error for a failed task.
    """
    if mode == "error" and to.exists():
        raise already_exists_error(to)
    with file_errors(to):
        if mode == "overwrite" and to.exists():
            shutil.rmtree(to)
    roll_back_dead_jobs(to)
    job = JobFolder.new(to)
    try:
        with job.locked():
            attempts = _in_tasks(read, job, layout)
            written = Written(*(sum(getattr(each, name) for each in attempts.values()) for name in _SUMS))
            if not written.files and not layout.by:
                # A file without rows shows readers the columns.
                empty = read.arrow_schema().empty_table().select(layout.columns)
                with file_errors(to):
                    pq.write_table(empty, to / layout.file_name(job.name_of(0)), compression=layout.compression)
            if (placed := job.publish(attempts)) != written.files:
                raise StoreAccessError(f"{to}: {placed:,} of {counted(written.files, 'file')} arrived; {_SHARED}")
            with file_errors(to):
                job.remove()
                (to / "_SUCCESS").touch()
            return written
    except BaseException:
        job.roll_back()
        raise


def roll_back_dead_jobs(to: Path) -> None:
    """Roll back jobs in a folder whose drivers on this machine were killed."""
    for path in to.glob(f"{UNFINISHED}/*/{_DRIVER}"):
        # The job may end at this moment, or belong to another user.
        with file_errors(path), suppress(FileNotFoundError, PermissionError), path.open("rb+") as driver:
            if driver.read() == _lock_scope(driver) and try_lock_byte(driver.fileno()):
                JobFolder(to, path.parent.name).roll_back()
    for gone in to.glob(f"{UNFINISHED}/*{_GONE}"):
        # A removal that was interrupted, or is in progress.
        shutil.rmtree(gone, ignore_errors=True)


def _lock_scope(driver: IO[bytes]) -> bytes:
    """Identity of this boot and mount, outside of which the lock may be invisible."""
    return repr((*boot_id(), os.fstat(driver.fileno()).st_dev)).encode()


def _in_tasks(read: BatchRead, job: JobFolder, layout: Layout) -> dict[tuple[int, int], Written]:
    """Files of the accepted attempt of each task, by (partition, attempt)."""
    make = read.read

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task: Any = TaskContext.get()
        partition, attempt = int(task.partitionId()), int(task.taskAttemptId())

        def write(folder: Path) -> Written:
            return _write_files(make(batches), folder, layout, job.name_of(partition))

        written = job.write(partition, attempt, write)
        yield from batches_of(_NUMBERS, [{"partition": partition, "attempt": attempt, **dataclasses.asdict(written)}])

    # Collected, not summed by Spark: a shuffle could lose results, and repeat tasks that are done.
    rows = read.frame.mapInArrow(run, from_arrow_schema(_NUMBERS)).collect()
    return {(row.partition, row.attempt): Written(row.messages, row.size, row.files) for row in rows}


def _write_files(batches: Iterator[pa.RecordBatch], folder: Path, layout: Layout, name: str) -> Written:
    messages = size = 0
    with ParquetFiles(folder, layout, name) as files:
        for batch in batches:
            files.add(batch)
            messages += batch.num_rows
            if "size" in batch.schema.names:
                size += pc.sum(batch.column("size")).as_py() or 0
        files.finish()
    return Written(messages, size, files.files)
