"""What Java has read of Spark's classes, kept in a file that later starts map: a third less time and processor.

    mqproc warm --spark     a session works a little and lists its classes, which Java then lays out in a file
    each session of ours    names that file, if it is of this Java and this Spark

Java checks by itself that jars, build and options are those that the file was made with, and reads classes from their
jars where they are not, as without a file ("class data sharing", JEP 310 and JEP 350).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mqproc.errors import InternalError
from mqproc.io import StoreIO
from mqproc.spark.java import Java

DUMP_TIMEOUT_S: Final = 900
_SUFFIX: Final = ".jsa"
_NAMES_IT: Final = ("-XX:SharedArchiveFile", "-Xshare:off")
# Of the options of a session, those that Java wants to be the same.
_KEPT: Final = ("--add-", "--enable-native-access")
# Since then it says "aot" where it said "cds".
_RENAMED_SINCE: Final = 24


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a session has loaded: a file that lists its classes, its options, and where it looked for classes."""

    class_list: Path
    options: Sequence[str]
    class_path: str


def archive_of(java: Java) -> Path | None:
    """The file that is there for this Java and this Spark."""
    for folder in _folders():
        archive = folder / _name()
        with contextlib.suppress(OSError):
            if _note_of(archive).read_text() == _identity(java) and archive.is_file():
                return archive
    return None


def options_of(java: Java, options: str) -> list[str]:
    """Options of Java's that a session has beside these; none where nothing is kept, or they name a file."""
    archive = archive_of(java)
    if archive is None or any(each in options for each in _NAMES_IT) or set(str(archive)) & set('":'):
        return []
    quiet = "cds*=off,aot*=off" if java.version >= _RENAMED_SINCE else "cds*=off"
    return [f'"-XX:SharedArchiveFile={archive}"', f"-Xlog:{quiet}"]


def make_archive(java: Java, loaded: Loaded) -> Path:
    """Have the file made, in place of what another Java or Spark left there. Takes a minute.

    Raises InternalError when Java cannot, or where no folder takes it.
    """
    archive = _folder_that_takes_it() / _name()
    fresh = archive.with_suffix(f".{os.getpid()}{_SUFFIX}")
    command = [
        str(java.home / "bin" / "java"),
        "-Xshare:dump",
        f"-XX:SharedClassListFile={loaded.class_list}",
        f"-XX:SharedArchiveFile={fresh}",
        # What it passes over, classes of old jars above all, is no error.
        "-Xlog:all=error",
        *(each for each in loaded.options if each.startswith(_KEPT)),
        "-cp",
        loaded.class_path,
    ]
    try:
        failure = _failure_of(command)
        if failure or not fresh.exists():
            raise InternalError(f"{command[0]}: no classes are kept: {failure or 'it left no file'}")
        _sync(fresh)
        note = _note_of(archive)
        note.unlink(missing_ok=True)
        fresh.rename(archive)
        note.write_text(_identity(java))
    finally:
        fresh.unlink(missing_ok=True)
    return archive


def _failure_of(command: list[str]) -> str:
    """Run it to its end; why it failed, empty when it did not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DUMP_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"not done within {DUMP_TIMEOUT_S} s"
    except OSError as error:
        return str(error)
    said = (done.stdout + done.stderr).strip().splitlines() or [f"code {done.returncode}"]
    return said[-1] if done.returncode else ""


def _sync(file: Path) -> None:
    """After a power loss Java would map what was never written."""
    io = StoreIO()
    fd = io.open(file)
    try:
        io.sync(fd)
    finally:
        io.close(fd)


def _folders() -> list[Path]:
    """Beside what Python has compiled, which goes when the package does, or else this user's own."""
    folders = [Path(__file__).parent / "__pycache__"]
    with contextlib.suppress(RuntimeError):  # Who has no home, as in a container, has none there.
        folders.append(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mqproc")
    return folders


def _folder_that_takes_it() -> Path:
    for folder in _folders():
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
    raise InternalError(f"no classes are kept: {' and '.join(map(str, _folders()))} cannot be written to")


def _name() -> str:
    """One for each installation of Spark."""
    return f"spark-{hashlib.sha256(str(_spark()).encode()).hexdigest()[:12]}{_SUFFIX}"


def _note_of(archive: Path) -> Path:
    return archive.with_suffix(".txt")


def _identity(java: Java) -> str:
    from pyspark.version import __version__

    return f"PySpark {__version__}\n{java.build}\n"


def _spark() -> Path:
    import pyspark

    return Path(pyspark.__file__).parent
