"""Commit a job's output as a whole: after a failure the previous content remains.

    to            previous content ──────────────────────────────▶ removed ─┐
    to.partial            └── written, all sources read without error ──────┴──▶ to

Spark itself removes a target before it reads the first message, and leaves the folder of a failed write.

Tasks that write files themselves commit all of a job's files, each once, or none:

    to/_temporary/job/attempt-3-17/ ──rename by the first attempt that is done──▶ task-3/ ──files, by the driver──▶ to/

The folder of a killed attempt is removed with the job's. Only sums travel to the driver. The driver locks a file in the
job's folder; the next job rolls back jobs whose driver has died.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Self, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark import TaskContext
from pyspark.sql.pandas.types import from_arrow_schema

from mqproc.errors import BadRequestError, StoreAccessError
from mqproc.spark.jobs.parquet_files import Layout, ParquetFiles, file_errors
from mqproc.spark.jobs.tasks import batches_of
from mqproc.store.offsets.file import boot_id
from mqproc.util.file_lock import try_lock_byte
from mqproc.util.units import counted

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from mqproc.spark.batch_read import BatchRead

T = TypeVar("T")

UNFINISHED: Final = "_temporary"
"""Folder in a target while Spark, or a job that writes files itself, writes there."""


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
        """Whether the content is only that of a killed write."""
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

    An overwrite goes to `to.partial` first, which `check` may reject, as is an existing one that no killed write has
    left. With Spark Connect, for the root of a file system and for dynamic partition overwrite, Spark overwrites
    itself.

    When `write` fails, a new folder is removed with its content, or, if `write` removes its own files, when empty.
    """
    target = HadoopPath.of(session, to)
    if target is None or _is_dynamic(session):
        return write(to, mode)
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


def _write_to(path: str, mode: str, write: Callable[[str, str], T], discard: Callable[[], None] | None) -> T:
    """Write to a path; call `discard` when that fails."""
    try:
        return write(path, mode)
    except BaseException:
        if discard is not None:
            discard()
        raise


_NUMBERS: Final = pa.schema([(name, pa.int64()) for name in ("messages", "size", "files")])
_FILES: Final = "files"
_WRITTEN: Final = "written.json"
_DRIVER: Final = "driver"
_GONE: Final = ".gone"
_SHARED: Final = "a target must be a folder at the same path for the driver and all executors"


@dataclass(frozen=True, slots=True)
class Written:
    """Messages, bytes of records if batches have `size`, and files (0 if Spark wrote them)."""

    messages: int
    size: int
    files: int


@dataclass(frozen=True, slots=True)
class JobFolder:
    """A job's folder below its target. Tasks never create it, as they may run after its removal."""

    to: Path
    job: str

    @classmethod
    def new(cls, to: Path) -> Self:
        """Create the folder of a new job."""
        made = cls(to, str(uuid.uuid4()))
        with file_errors(made._path):
            made._path.mkdir(parents=True)
        return made

    @property
    def _path(self) -> Path:
        return self.to / UNFINISHED / self.job

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
        """Run an attempt's `write` unless the task is done; the first attempt's result.

        Raises StoreAccessError when the job's folder is missing, and errors of `write`, after removing its files.
        """
        attempt_folder, task_folder = self._path / f"attempt-{partition}-{attempt}", self._path / f"task-{partition}"
        if not self._path.exists():
            raise StoreAccessError(f"{self._path}: does not exist; {_SHARED}")
        if task_folder.exists():
            return _load_result(task_folder)
        try:
            with file_errors(attempt_folder):
                attempt_folder.mkdir()
                (attempt_folder / _FILES).mkdir()
            written = write(attempt_folder / _FILES)
            with file_errors(attempt_folder):
                (attempt_folder / _WRITTEN).write_text(json.dumps(dataclasses.asdict(written)))
                _rename_first(attempt_folder, task_folder)
            return _load_result(task_folder)
        finally:
            shutil.rmtree(attempt_folder, ignore_errors=True)

    def publish(self) -> int:
        """Move the files of all tasks into the target; their number."""
        count = 0
        for task in self._path.glob("task-*"):
            source = task / _FILES
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
            attempt_folder = [Path(folder) / name for name in names if self.job in name]
            for file in attempt_folder:
                file.unlink(missing_ok=True)
            if attempt_folder:
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
            return _write(read, job, layout)
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


def _write(read: BatchRead, job: JobFolder, layout: Layout) -> Written:
    to = job.to
    written = _in_tasks(read, job, layout)
    if not written.files and not layout.by:
        _write_empty(to / layout.file_name(job.name_of(0)), read.arrow_schema(), layout)
    placed = job.publish()
    if placed != written.files:
        raise StoreAccessError(f"{to}: {placed:,} of {counted(written.files, 'file')} arrived; {_SHARED}")
    with file_errors(to):
        job.remove()
        (to / "_SUCCESS").touch()
    return written


def _in_tasks(read: BatchRead, job: JobFolder, layout: Layout) -> Written:
    make = read.read

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task: Any = TaskContext.get()
        partition = int(task.partitionId())

        def write(folder: Path) -> Written:
            return _write_files(make(batches), folder, layout, job.name_of(partition))

        written = job.write(partition, int(task.taskAttemptId()), write)
        yield from batches_of(_NUMBERS, [dataclasses.asdict(written)])

    rows = read.frame.mapInArrow(run, from_arrow_schema(_NUMBERS))
    (sums,) = rows.groupBy().sum(*_NUMBERS.names).collect()
    return Written(*(int(each or 0) for each in sums))


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


def _write_empty(path: Path, schema: pa.Schema, layout: Layout) -> None:
    """Write a file without rows, which shows readers the columns."""
    with file_errors(path):
        pq.write_table(schema.empty_table().select(layout.columns), path, compression=layout.compression)


def _rename_first(attempt_folder: Path, task_folder: Path) -> None:
    """Rename an attempt's folder to the task's, unless another attempt was first."""
    try:
        attempt_folder.rename(task_folder)
    except OSError:
        if not task_folder.exists():
            raise


def _load_result(task_folder: Path) -> Written:
    with file_errors(task_folder):
        return Written(**json.loads((task_folder / _WRITTEN).read_text()))
