"""A Spark session on this machine, for commands, tests and scripts that have none: Java found, the source registered.

A cluster's own sessions need none of this: there the package is installed and `format("mqproc")` is known.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mqproc.spark import class_archive
from mqproc.spark.java import Java, find_java, without_warnings
from mqproc.spark.python import is_ours, python_program, sockets_beside

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOOKUP_FOLDER: Final = Path(__file__).parent / "lookup"
"""What Spark must have on its Python path to find the source by itself; an installed package has it there anyway."""

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
# Of a driver whose workers are processes of this machine; others must be able to reach it.
_OF_LOCAL: Final[dict[str, str]] = {"spark.driver.host": _HERE, "spark.driver.bindAddress": _HERE}


def prepare_environment(master: str = "local[*]", *, prefer_pypi_java: bool = False, warnings: bool = True) -> Java:
    """Set what the JVM and its Python workers take from the environment. Must come before the first session.

    Without `warnings` Java does not load what it would warn of: vectors, which MLlib computes with. Raises
    ConfigurationError when there is no Java.
    """
    java = find_java(prefer_pypi=prefer_pypi_java)
    java = java if warnings else without_warnings(java)
    os.environ["JAVA_HOME"] = str(java.home)
    if "PYSPARK_PYTHON" not in os.environ:
        # Workers would take the first python3 on PATH. A cluster's machines have no script of ours.
        os.environ["PYSPARK_PYTHON"] = str(python_program()) if is_local(master) else sys.executable
    if is_local(master):
        os.environ.setdefault("SPARK_LOCAL_IP", _HERE)
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(LOOKUP_FOLDER) not in known:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(LOOKUP_FOLDER), *filter(None, known)])
    return java


def is_local(master: str) -> bool:
    """Whether all of Spark's processes run on this machine."""
    return master.startswith("local")


def settings_of(master: str, given: Mapping[str, str], java: Java | None = None) -> dict[str, str]:
    """`DEFAULTS`, what suits a session of ours with this master in this environment, and what was given over both.

    An installation of Spark's own has files for its settings: options that stand there would be replaced by ours.
    """
    settings = DEFAULTS | (_OF_LOCAL | _sockets() if is_local(master) else {}) | dict(given)
    if os.environ.get("SPARK_HOME") or os.environ.get("SPARK_CONF_DIR"):
        return settings
    options = settings.get(_JAVA_OPTIONS, "")
    ours = []
    if not _COLLECTOR.search(options):
        # A start takes a sixth less time than with Java's usual one, a full read a little less.
        ours.append("-XX:+UseParallelGC")
    if _ARROW_CHECKS not in options:
        # Arrow would ask of each value of a batch whether it lies in its buffer: a tenth of Java's part in a full read.
        ours.append(f"-D{_ARROW_CHECKS}=true")
    if "log4j" not in options:
        level = settings["spark.log.level"]
        ours += [f'"-Dlog4j2.configurationFile={LOGGING.as_uri()}"', f"-Dmqproc.log.level={level}"]
    if java is not None:
        ours += class_archive.options_of(java, options)
    return settings | {_JAVA_OPTIONS: " ".join(filter(None, [options, *ours]))}


def _sockets() -> dict[str, str]:
    """Python of ours has what Unix sockets need: workers that end without a word when Java closes them first."""
    program = os.environ.get("PYSPARK_PYTHON", "")
    return sockets_beside(Path(program)) if is_ours(program) else {}


def local_session(
    master: str = "local[*]",
    *,
    name: str = "mqproc",
    settings: Mapping[str, str] | None = None,
    prefer_pypi_java: bool = False,
    warnings: bool = True,
) -> SparkSession:
    """A session with `DEFAULTS` and `settings` over them, the one that runs already if there is one.

    Without `warnings` Java does not load what it would warn of: vectors, which MLlib computes with.
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
    """Make `format("mqproc")` known to a session that has not found it by itself."""
    from mqproc.spark.source import MqprocDataSource

    session.dataSource.register(MqprocDataSource)
