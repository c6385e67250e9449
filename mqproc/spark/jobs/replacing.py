"""What a job writes takes its place as a whole: one that fails leaves what was there before it, and nothing else.

    to            what was there ────────────────────────────────▶ removed ─┐
    to.partial            └── written, all of it read and found well ──────┴──▶ to

Spark removes what it overwrites before it reads the first message, and leaves a folder behind a write that failed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from mqproc.errors import BadRequestError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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
        return _write(to, mode, write, None if is_there else give_up)
    check(str(partial))
    if partial.exists() and not partial.is_unfinished():
        raise BadRequestError(f"{partial}: is there, and no unfinished write; {to} is made there first: move it away")
    written = _write(str(partial), mode, write, partial.give_up)
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


def _write(path: str, mode: str, write: Callable[[str, str], T], give_up: Callable[[], None] | None) -> T:
    """Write to a path; when that fails, do what is to be done with one that is new."""
    try:
        return write(path, mode)
    except BaseException:
        if give_up is not None:
            give_up()
        raise
