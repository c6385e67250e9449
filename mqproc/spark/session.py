"""A Spark session on this machine: finds Java, sets options, registers the source.

Sessions of a cluster do not need this module: `format("mqproc")` is known where the package is installed.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mqproc.spark.runtimes import (
    Java,
    archive_options,
    find_java,
    is_python_program,
    python_program,
    socket_settings,
    without_warnings,
)

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
    """Set the environment of the JVM and Python workers, before the first session.

    Without `warnings` Java does not load the vector module, which it would warn of and MLlib computes with. Raises
    ConfigurationError when no Java is found.
    """
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


def settings_of(master: str, given: Mapping[str, str], java: Java | None = None) -> dict[str, str]:
    """`DEFAULTS` and settings for this master and environment, overridden by those given.

    Java options are left alone when an installed Spark has settings files, since these would be replaced.
    """
    settings = DEFAULTS | (_OF_LOCAL | _sockets() if is_local(master) else {}) | dict(given)
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


def _sockets() -> dict[str, str]:
    """Settings for Unix sockets, if mqproc's worker daemon handles connections."""
    program = os.environ.get("PYSPARK_PYTHON", "")
    return socket_settings(Path(program)) if is_python_program(program) else {}


def local_session(
    master: str = "local[*]",
    *,
    name: str = "mqproc",
    settings: Mapping[str, str] | None = None,
    prefer_pypi_java: bool = False,
    warnings: bool = True,
) -> SparkSession:
    """Return the running session, or start one with `DEFAULTS` overridden by `settings`.

    Without `warnings` Java does not load the vector module, which it would warn of and MLlib computes with.
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
