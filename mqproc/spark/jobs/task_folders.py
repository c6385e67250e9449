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
from typing import IO, TYPE_CHECKING, Any, Final, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark import TaskContext
from pyspark.sql.pandas.types import from_arrow_schema

from mqproc.errors import StoreAccessError
from mqproc.ipc.lock import try_lock
from mqproc.quantities import counted
from mqproc.spark.jobs.parquet_files import Layout, ParquetFiles, telling
from mqproc.spark.jobs.replacing import UNFINISHED, already_there
from mqproc.spark.jobs.tasks import batches_of
from mqproc.store.groups.progress_file import boot_id

if TYPE_CHECKING:
    from mqproc.spark.mapped import BatchRead

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
        with telling(made._path):
            made._path.mkdir(parents=True)
        return made

    @property
    def _path(self) -> Path:
        return self.to / UNFINISHED / self.job

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have other jobs of this machine see whether this one's driver lives, where storage has locks."""
        path = self._path / _DRIVER
        with telling(path):
            driver = path.open("wb", buffering=0)
        with driver:
            with suppress(OSError):
                if try_lock(driver.fileno()):
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
            with telling(own):
                own.mkdir()
                (own / _FILES).mkdir()
            written = write(own / _FILES)
            with telling(own):
                (own / _WRITTEN).write_text(json.dumps(dataclasses.asdict(written)))
                _rename_first(own, whole)
            return _told(whole)
        finally:
            shutil.rmtree(own, ignore_errors=True)

    def place(self) -> int:
        """Give the files of all tasks their places in the target; how many there are."""
        count = 0
        for task in self._path.glob("task-*"):
            source = task / _FILES
            for folder, _folders, names in os.walk(source):
                target = self.to / Path(folder).relative_to(source)
                try:
                    with telling(target):
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

    def take_back(self) -> None:
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
    with telling(to):
        if mode == "overwrite" and to.exists():
            shutil.rmtree(to)
    take_back_dead(to)
    job = JobFolder.new(to)
    try:
        with job.held():
            return _write(read, job, layout)
    except BaseException:
        job.take_back()
        raise


def take_back_dead(to: Path) -> None:
    """Take back what drivers of this machine had in a folder, or were moving there, when they were killed."""
    for path in to.glob(f"{UNFINISHED}/*/{_DRIVER}"):
        # It may be done in this moment, or another user's.
        with telling(path), suppress(FileNotFoundError, PermissionError), path.open("rb+") as driver:
            if driver.read() == _seen_by(driver) and try_lock(driver.fileno()):
                JobFolder(to, path.parent.name).take_back()
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
    placed = job.place()
    if placed != written.files:
        raise StoreAccessError(
            f"{to}: of {counted(written.files, 'file')} that were written {placed:,} came there; {_SHARED}"
        )
    with telling(to):
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
    with telling(path):
        pq.write_table(schema.empty_table().select(layout.columns), path, compression=layout.compression)


def _rename_first(own: Path, whole: Path) -> None:
    """Give an attempt's folder the name of the task's, unless another one has it by now."""
    try:
        own.rename(whole)
    except OSError:
        if not whole.exists():
            raise


def _told(whole: Path) -> Written:
    with telling(whole):
        return Written(**json.loads((whole / _WRITTEN).read_text()))
