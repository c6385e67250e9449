"""Check the sources and targets of jobs, and write their files: never into or over a store.

Spark empties a target that it overwrites, and creates its folder, before it reads the first message, so `output_commit`
writes to a sibling folder first. Messages are written by the tasks that read them where possible, other rows by Spark.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final, TypeVar

from mqproc.errors import BadRequestError, CorruptStoreError
from mqproc.spark.jobs.output_commit import Written, already_exists_error, folder_of, write_folder, write_whole
from mqproc.spark.jobs.parquet_files import Layout
from mqproc.spark.options import PathArgument, path_texts
from mqproc.spark.survey import find_stores, survey_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from mqproc.spark.batch_read import BatchRead

T = TypeVar("T")

# Hadoop accepts these with and without a host, and with one or three slashes.
_FILE: Final = re.compile(r"file:(?://[^/]*)?", re.IGNORECASE)
_LOG: Final = "commitlog"
_COMPRESSION: Final = "zstd"
_THERE: Final = "PATH_ALREADY_EXISTS"


def write_parquet(frame: DataFrame, to: str | Path, stores: Sequence[str | Path], *, mode: str) -> None:
    """Write a frame derived from `stores` to `to`, a folder or URL.

    Raises BadRequestError as `check_target`, before anything is written. After a failure the old content is still
    there.
    """

    def write(path: str, mode: str) -> None:
        frame.write.mode(mode).option("compression", _COMPRESSION).parquet(path)

    _write_whole(frame.sparkSession, to, stores, mode, write)


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

    return _write_whole(session, to, stores, mode, write, by_tasks=True)


def _write_rows(read: BatchRead, path: str, mode: str, layout: Layout) -> Written:
    from pyspark.sql import Observation
    from pyspark.sql import functions as F

    # Observed by the write itself, as a separate count would read everything twice.
    seen = Observation()
    size = F.sum("size") if "size" in read.types else F.lit(0)
    measured = read.rows().observe(seen, F.count(F.lit(1)).alias("messages"), size.alias("size"))
    selected = measured.select(*dict.fromkeys([*layout.columns, *layout.by]))
    selected.write.partitionBy(*layout.by).mode(mode).option("compression", layout.compression).parquet(path)
    return Written(int(seen.get["messages"]), int(seen.get["size"] or 0), 0)


def _write_whole(
    session: SparkSession,
    to: str | Path,
    stores: Sequence[str | Path],
    mode: str,
    write: Callable[[str, str], T],
    *,
    by_tasks: bool = False,
) -> T:
    from pyspark.errors import AnalysisException

    def check(path: str) -> None:
        check_target(path, stores, overwrites=mode == "overwrite")

    check(str(to))
    removes_own = by_tasks and folder_of(session, str(to)) is not None
    try:
        return write_whole(session, str(to), mode, write, check, removes_own=removes_own)
    except AnalysisException as error:
        # Raised when Spark itself writes.
        if error.getCondition() != _THERE:
            raise
        raise already_exists_error(to) from None


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
