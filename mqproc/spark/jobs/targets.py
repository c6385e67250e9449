"""Where jobs write files: never into a store or over one, and nothing at all before the sources have been looked at.

Spark empties a target that it overwrites, and makes its folder, before it reads the first message: `replacing` has it
write beside.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from mqproc.errors import BadRequestError, CorruptStoreError
from mqproc.spark.jobs.replacing import write_whole
from mqproc.spark.stores import find_stores, survey

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# As Hadoop understands it: with a host or without, with one slash or three.
_FILE: Final = re.compile(r"file:(?://[^/]*)?", re.IGNORECASE)
_LOG: Final = "commitlog"


def write_parquet(
    frame: DataFrame,
    to: str | Path,
    stores: Sequence[str | Path],
    *,
    mode: str,
    compression: str = "zstd",
    by: Sequence[str] = (),
) -> None:
    """Write what was made of `stores`, those of `check_sources`, to `to`, a folder or URL; a folder for each of `by`.

    Raises BadRequestError as `check_target` does, with nothing written. When the write fails, what was there stays.
    """

    def write(path: str, mode: str) -> None:
        frame.write.partitionBy(*by).mode(mode).option("compression", compression).parquet(path)

    def check(path: str) -> None:
        check_target(path, stores, overwrites=mode == "overwrite")

    check(str(to))
    write_whole(frame.sparkSession, str(to), mode, write, check)


def check_sources(path: str | Path | Sequence[str | Path], *, fail_on_data_loss: bool = True) -> list[str]:
    """The stores that a path means, each looked at.

    Raises StoreAccessError for a path without a store, CorruptStoreError for damage that is seen already now.
    """
    stores = find_stores([str(path)] if isinstance(path, str | Path) else [str(each) for each in path])
    for store in stores:
        with closing(survey(store)) as found:
            if found.trouble and fail_on_data_loss:
                raise CorruptStoreError(f"{store}: {found.trouble}; what is intact is read where damage is passed over")
    return stores


def check_target(to: str | Path, stores: Iterable[str | Path], *, overwrites: bool = False) -> None:
    """Raise BadRequestError for a target that is one of `stores`, holds one, or lies in one or in any other store.

    With `overwrites` no store at all may lie below it.
    """
    target = _place(str(to))
    for store in stores:
        source = _place(str(store))
        if source.is_relative_to(target) or target.is_relative_to(source):
            relation = "is" if source == target else "holds" if source.is_relative_to(target) else "lies in"
            raise BadRequestError(f"{to}: {relation} the store {store}, which is read; write to a folder of its own")
    if isinstance(target, Path):
        _check_folder(to, target, overwrites)


def _check_folder(to: str | Path, target: Path, overwrites: bool) -> None:
    for folder in (target, *target.parents):
        if (folder / _LOG).is_dir():
            relation = "is" if folder == target else "lies in"
            raise BadRequestError(f"{to}: {relation} the store {folder}; write to a folder of its own")
    if not overwrites:
        return
    for below, names, _files in os.walk(target):
        if _LOG in names:
            raise BadRequestError(f"{to}: holds the store {below}, which overwriting would delete")


def _place(text: str) -> Path | PurePosixPath:
    """A folder, however it was spelled; of a URL what follows its scheme, since s3 and s3a are one storage."""
    local = _FILE.sub("", text, count=1) if _FILE.match(text) else text
    if "://" in local:
        return PurePosixPath(local.partition("://")[2].lstrip("/"))
    # Names first, then links: in this order Hadoop takes a path too.
    return Path(os.path.realpath(os.path.abspath(local)))
