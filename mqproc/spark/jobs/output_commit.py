"""Files that tasks write by themselves: all of a job's are there in the end, each once, or none.

    to/_temporary/job/attempt-3-17/ ──rename, by the first that is done──▶ task-3/ ──each file, by the driver──▶ to/

An attempt that was killed leaves its folder, which goes with the job's. Only sums come to the driver. It has a lock in
the job's folder, which ends with its process: what a killed one leaves, the next job takes back.
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

# --- replacing ---
# What a job writes takes its place as a whole: one that fails leaves what was there before it, and nothing else.
#
#     to            what was there ────────────────────────────────▶ removed ─┐
#     to.partial            └── written, all of it read and found well ──────┴──▶ to
#
# Spark removes what it overwrites before it reads the first message, and leaves a folder behind a write that failed.


T = TypeVar("T")

UNFINISHED: Final = "_temporary"
"""What Spark, and jobs that write by themselves, have in a folder for as long as they write there."""


def already_there(to: str | Path) -> BadRequestError:
    """What a job says in mode `error` of a target that is there."""
    return BadRequestError(f"{to}: already exists; mode append adds to it, overwrite replaces it")


class HadoopPath:
    """A folder or URL, in the file system that Spark writes it with."""

    def __init__(self, session: Any, path: Any) -> None:
        self._session = session
        self._files = path.getFileSystem(session._jsc.hadoopConfiguration())
        self._path = self._files.makeQualified(path)
        uri = self._path.toUri()
        self.folder = Path(uri.getPath()) if uri.getScheme() == "file" else None
        """Where it is on this machine; None for what is not there."""

    @classmethod
    def of(cls, session: SparkSession, to: str) -> Self | None:
        """None where Spark's own file systems are out of reach: with Spark Connect."""
        jvm: Any = getattr(session, "_jvm", None)
        return cls(session, jvm.org.apache.hadoop.fs.Path(to)) if jvm is not None else None

    def __str__(self) -> str:
        return str(self._path.toString())

    def beside(self, ending: str) -> Self | None:
        """The path with an ending to its name; None for a root, which has no name."""
        parent = self._path.getParent()
        if parent is None:
            return None
        return type(self)(self._session, parent.suffix(f"/{self._path.getName()}{ending}"))

    def exists(self) -> bool:
        return bool(self._files.exists(self._path))

    def is_unfinished(self) -> bool:
        """Whether nothing is there but what a write that was killed leaves."""
        names = [str(each.getPath().getName()) for each in self._files.listStatus(self._path)]
        return not names or UNFINISHED in names

    def remove(self) -> bool:
        return bool(self._files.delete(self._path, True))

    def give_up(self) -> None:
        """Remove what a job that failed has written: one that was interrupted may have taken Java with it."""
        with suppress(Exception):
            self.remove()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def remove_empty(self) -> None:
        """Remove the folder, unless something is in it but a folder for jobs without one."""
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
    takes_back: bool = False,
) -> T:
    """What `write(path, mode)` gives, which writes to `to`; what it overwrites is there until all has been written.

    That is written to `to.partial`, which `check` may refuse, as is one that no killed write has left. With Spark
    Connect, to the root of a file system, and where it replaces partitions one by one, Spark itself overwrites.

    When `write` fails, a folder that was not there goes with all that is in it; where it `takes_back` its own files, if
    nothing else is.
    """
    target = HadoopPath.of(session, to)
    if target is None or _is_dynamic(session):
        return write(to, mode)
    is_there = target.exists()
    partial = target.beside(".partial") if mode == "overwrite" and is_there else None
    if partial is None:
        give_up = target.remove_empty if takes_back else target.give_up
        return _write_to(to, mode, write, None if is_there else give_up)
    check(str(partial))
    if partial.exists() and not partial.is_unfinished():
        raise BadRequestError(f"{partial}: is there, and no unfinished write; {to} is made there first: move it away")
    written = _write_to(str(partial), mode, write, partial.give_up)
    if not target.remove() or not partial.rename(target):
        raise BadRequestError(f"{to}: cannot be replaced; what was written is in {partial}")
    return written


def folder_of(session: SparkSession, to: str) -> Path | None:
    """The folder that `to` is, for who writes there without Spark.

    None where Spark alone can or must: for a URL, the root of a file system, with Spark Connect, and where partitions
    are replaced one by one.
    """
    target = HadoopPath.of(session, to)
    return None if target is None or target.beside("") is None or _is_dynamic(session) else target.folder


def _is_dynamic(session: SparkSession) -> bool:
    """Whether partitions stay that are not written again, and the others are replaced when all is written."""
    return str(session.conf.get("spark.sql.sources.partitionOverwriteMode", "static")).lower() == "dynamic"


def _write_to(path: str, mode: str, write: Callable[[str, str], T], give_up: Callable[[], None] | None) -> T:
    """Write to a path; when that fails, do what is to be done with one that is new."""
    try:
        return write(path, mode)
    except BaseException:
        if give_up is not None:
            give_up()
        raise


_NUMBERS: Final = pa.schema([(name, pa.int64()) for name in ("messages", "size", "files")])
_FILES: Final = "files"
_WRITTEN: Final = "written.json"
_DRIVER: Final = "driver"
_GONE: Final = ".gone"
_SHARED: Final = "a target must be a folder that the driver and all executors have at one path"


@dataclass(frozen=True, slots=True)
class Written:
    """What was written: messages, bytes of their records where batches have their `size`; files, 0 for Spark's."""

    messages: int
    size: int
    files: int


@dataclass(frozen=True, slots=True)
class JobFolder:
    """The folder of a job below its target. Tasks make no folder above their own: they may come when it is gone."""

    to: Path
    job: str

    @classmethod
    def new(cls, to: Path) -> Self:
        """Make that of a job which begins."""
        made = cls(to, str(uuid.uuid4()))
        with file_errors(made._path):
            made._path.mkdir(parents=True)
        return made

    @property
    def _path(self) -> Path:
        return self.to / UNFINISHED / self.job

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Have other jobs of this machine see whether this one's driver lives, where storage has locks."""
        path = self._path / _DRIVER
        with file_errors(path):
            driver = path.open("wb", buffering=0)
        with driver:
            with suppress(OSError):
                if try_lock_byte(driver.fileno()):
                    driver.write(_seen_by(driver))
            yield

    def name_of(self, partition: int) -> str:
        """How the names of a task's files begin; no other task of any job has that."""
        return f"part-{partition:05d}-{self.job}"

    def write(self, partition: int, attempt: int, write: Callable[[Path], Written]) -> Written:
        """Have an attempt write below a folder, unless one of the same task has done so; what that has written.

        Raises StoreAccessError where the job's folder is not there, and what `write` raises, with nothing left.
        """
        own, whole = self._path / f"attempt-{partition}-{attempt}", self._path / f"task-{partition}"
        if not self._path.exists():
            raise StoreAccessError(f"{self._path}: is not there; {_SHARED}")
        if whole.exists():
            return _told(whole)
        try:
            with file_errors(own):
                own.mkdir()
                (own / _FILES).mkdir()
            written = write(own / _FILES)
            with file_errors(own):
                (own / _WRITTEN).write_text(json.dumps(dataclasses.asdict(written)))
                _rename_first(own, whole)
            return _told(whole)
        finally:
            shutil.rmtree(own, ignore_errors=True)

    def publish(self) -> int:
        """Give the files of all tasks their places in the target; how many there are."""
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
        """Remove the folder, in which attempts may still write. From here on nothing is taken back."""
        gone = self._path.with_name(f"{self.job}{_GONE}")
        (self._path / _DRIVER).unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            # By this name none of them finds it.
            self._path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
        with suppress(OSError):
            # Another job may have its own there.
            self._path.parent.rmdir()

    def roll_back(self) -> None:
        """Remove the files that have their places, with what they leave empty, and the folder."""
        for folder, _folders, names in os.walk(self.to, topdown=False):
            own = [Path(folder) / name for name in names if self.job in name]
            for file in own:
                file.unlink(missing_ok=True)
            if own:
                self._remove_empty(Path(folder))
        self.remove()

    def _remove_empty(self, folder: Path) -> None:
        """Remove a folder of the target, and those around it there, as far as nothing is in them."""
        for each in (folder, *folder.parents):
            if each == self.to:
                break
            with suppress(OSError):
                each.rmdir()


def write_folder(read: BatchRead, to: Path, mode: str, layout: Layout) -> Written:
    """Have tasks write what they read to files in a folder, all of them or none; `mode` as Spark has it.

    Raises BadRequestError where something is there and may not be, StoreAccessError where the folder is not that of
    all tasks, DiskFullError and MqprocError for what storage says; Spark's error around one of a task's.
    """
    if mode == "error" and to.exists():
        raise already_there(to)
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
    """Take back what drivers of this machine had in a folder, or were moving there, when they were killed."""
    for path in to.glob(f"{UNFINISHED}/*/{_DRIVER}"):
        # It may be done in this moment, or another user's.
        with file_errors(path), suppress(FileNotFoundError, PermissionError), path.open("rb+") as driver:
            if driver.read() == _seen_by(driver) and try_lock_byte(driver.fileno()):
                JobFolder(to, path.parent.name).roll_back()
    for gone in to.glob(f"{UNFINISHED}/*{_GONE}"):
        # Nobody needs it any more, whoever was killed, or is about, removing it.
        shutil.rmtree(gone, ignore_errors=True)


def _seen_by(driver: IO[bytes]) -> bytes:
    """By whom a lock is to be looked at: another machine, which may have the same name, need not see it, nor another
    mount of the same storage, as each container may have."""
    return repr((*boot_id(), os.fstat(driver.fileno()).st_dev)).encode()


def _write(read: BatchRead, job: JobFolder, layout: Layout) -> Written:
    to = job.to
    written = _in_tasks(read, job, layout)
    if not written.files and not layout.by:
        _write_empty(to / layout.file_name(job.name_of(0)), read.arrow_schema(), layout)
    placed = job.publish()
    if placed != written.files:
        raise StoreAccessError(
            f"{to}: of {counted(written.files, 'file')} that were written {placed:,} came there; {_SHARED}"
        )
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
    """Write a file without rows, by which readers know what the columns were to be."""
    with file_errors(path):
        pq.write_table(schema.empty_table().select(layout.columns), path, compression=layout.compression)


def _rename_first(own: Path, whole: Path) -> None:
    """Give an attempt's folder the name of the task's, unless another one has it by now."""
    try:
        own.rename(whole)
    except OSError:
        if not whole.exists():
            raise


def _told(whole: Path) -> Written:
    with file_errors(whole):
        return Written(**json.loads((whole / _WRITTEN).read_text()))
