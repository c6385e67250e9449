"""The Spark session of a command: options, start, errors, exit on signals, output."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Self

import click
import psutil

from mqproc import errors
from mqproc.cli.options import TIME, Command, Invocation, complete_topic, grouped_options
from mqproc.cli.output import Output, OutputColumn
from mqproc.errors import ConfigurationError, InternalError, MqprocError, StartError
from mqproc.util.units import counted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Exit on signals
#
#     signal ──main thread waits for Java──▶ a thread cancels all jobs ──▶ Java answers ──▶ the command exits
#         │                                          └──after a timeout──▶ Java's process is ended
#         └──it does not wait──────────────▶ raised at once
#
# An exception raised by a handler while the main thread waits for an answer would break the connection to Java, and
# stopping the session would wait for the running job.


_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_AGAIN_S: Final = 0.05
# Time for a job to stop and remove incomplete files, and again for Java to remove its files.
_PATIENCE_S: Final = 2.0


@contextlib.contextmanager
def without_spark_handlers() -> Iterator[None]:
    """Keep Spark from installing its SIGINT handler, which raises during a call to Java."""
    from pyspark.core import context

    sparks: Any = context
    sparks.signal = SimpleNamespace(SIGINT=signal.SIGINT, signal=lambda number, handler: None)
    try:
        yield
    finally:
        sparks.signal = signal


class SignalExit:
    """Handles signals during a session. `owns_java`: this process started Java and ends it."""

    def __init__(self, *, owns_java: bool) -> None:
        self._owns_java = owns_java
        self._spark: SparkSession | None = None
        self._number = 0
        self._left = threading.Event()
        self._handlers: dict[signal.Signals, Any] = {}
        self._others = set(psutil.Process().children())

    @property
    def is_requested(self) -> bool:
        """Whether a signal was received."""
        return self._number != 0

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            found = {number: signal.getsignal(number) for number in _SIGNALS}
            self._handlers = {number: each for number, each in found.items() if each not in (None, signal.SIG_IGN)}
        self._listen()
        return self

    def started(self, spark: SparkSession) -> None:
        """Record the started session."""
        self._spark = spark

    def __exit__(self, *_error: object) -> None:
        """After a signal raise KeyboardInterrupt or SystemExit, not the error of cancelled jobs."""
        self._left.set()
        if self._owns_java and (self._number or self._spark is None):
            self._end_java()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._number == signal.SIGINT:
            raise KeyboardInterrupt from None
        if self._number:
            raise SystemExit(128 + self._number) from None

    def _listen(self) -> None:
        for number in self._handlers:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_first, self._number = not self._number, number
        if is_first:
            self._silence()
            threading.Thread(target=self._stop, daemon=True).start()
        if _waits_for_java(frame):
            return
        handler = self._handlers[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)
        raise SystemExit(128 + number)

    def _silence(self) -> None:
        """Suppress the traces of closed connections."""
        logging.getLogger("py4j").setLevel(logging.CRITICAL + 1)
        server = getattr(getattr(self._spark, "_sc", None), "_accumulatorServer", None)
        if server is not None:
            server.handle_error = lambda request, address: None

    def _stop(self) -> None:
        """Cancel jobs until the main thread has left the block; end Java after a timeout."""
        ends_s = time.monotonic() + (_PATIENCE_S if self._owns_java else math.inf)
        with contextlib.suppress(Exception):
            if self._spark is not None:
                self._spark.sparkContext.setLogLevel("OFF")
                while not self._left.wait(_AGAIN_S) and time.monotonic() < ends_s:
                    self._spark.sparkContext.cancelAllJobs()
        if self._owns_java and not self._left.is_set():
            self._end_java()

    def _end_java(self) -> None:
        """End Java, with time to remove its files, then its Python processes."""
        started = set(psutil.Process().children(recursive=True)) - self._others
        direct = [each for each in psutil.Process().children() if each in started]
        for each in direct:
            _signal(each, signal.SIGTERM)
        psutil.wait_procs(direct, _PATIENCE_S)
        for each in started:
            _signal(each, signal.SIGKILL)
        psutil.wait_procs(list(started), _PATIENCE_S)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def _waits_for_java(frame: FrameType | None) -> bool:
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith("py4j."):
            return True
        frame = frame.f_back
    return False


# Set by spark-submit or Spark Connect, which then own the session.
_SUBMITTED = ("PYSPARK_GATEWAY_PORT", "SPARK_REMOTE")
_OWN_ERROR = re.compile(r"(?:mqproc\.errors\.)(\w+): (.*)")
# The cause in a Java error: it follows "An error occurred while calling o47.parquet" and one more line.
_CAUSE = re.compile(r"(?:Caused by)?: (?:[\w$]+\.)+[\w$]+: (.*\S)")
_MASTER = re.compile(r"yarn|local(\[.+\]|-cluster\[.+\])?|(spark|k8s)://.+")
_LOGGERS = ("DataFrameQueryContextLogger", "SQLQueryContextLogger")
MAX_RESULT_SIZE = "16m"
# The command reports errors; the log of Spark would repeat them.
_QUIET = {"spark.driver.maxResultSize": MAX_RESULT_SIZE, "spark.log.level": "FATAL"}


def _checked_master(context: click.Context, parameter: click.Parameter, value: str) -> str:
    if not _MASTER.fullmatch(value):
        raise click.BadParameter(f"{value!r}; use local, local[2], local[*], yarn, spark://… or k8s://…")
    return value


@dataclass(frozen=True, slots=True)
class SparkJob:
    """The values of `spark_options`: stores, and a session."""

    stores: tuple[str, ...]
    master: str
    conf: tuple[str, ...]
    invocation: Invocation = field(default_factory=lambda: click.get_current_context().ensure_object(Invocation))

    @property
    def out(self) -> Output:
        return self.invocation.out

    def paths(self) -> list[str]:
        """The STORE arguments, else the common store. Raises a usage error for both."""
        if self.stores and self.invocation.store is not None:
            raise click.UsageError(
                f"{' '.join(self.stores)} and --store {self.invocation.store}: name stores either as arguments or by "
                "--store"
            )
        return list(self.stores) or [str(self.invocation.store_path())]

    def checked_sources(self, selection: Mapping[str, Any]) -> list[str]:
        """The stores at the paths. Raises StoreAccessError, CorruptStoreError for damage."""
        from mqproc.spark.jobs.output import check_sources

        return check_sources(self.paths(), fail_on_data_loss=selection["fail_on_data_loss"])

    def session(self) -> contextlib.AbstractContextManager[SparkSession]:
        """See the function `session`."""
        return session(self.master, self.conf)


CONF_OPTION: Final = click.option(
    "--conf", multiple=True, metavar="NAME=VALUE", help="Setting of Spark; may be repeated."
)
spark_options: Final = grouped_options(
    "job",
    lambda stores, master, conf: SparkJob(stores, master, conf),
    click.argument("stores", nargs=-1, metavar="[STORE]..."),
    click.option(
        "--master", default="local[*]", show_default=True, callback=_checked_master, help="Master URL of Spark."
    ),
    CONF_OPTION,
)


def _selection(
    skip_damage: bool,
    topics: tuple[str, ...],
    begin: int | None,
    end: int | None,
    tags: tuple[str, ...],
    keys: tuple[str, ...],
) -> dict[str, Any]:
    return {
        "topic": topics, "begin": begin, "end": end, "tag": tags, "key": keys, "fail_on_data_loss": not skip_damage
    }  # fmt: skip


skip_damage_option: Final = click.option(
    "--skip-damage", is_flag=True, help="Skip damage in the log instead of failing."
)
# The command gets `selection`, the arguments of `mqproc.spark.messages`.
selection_options: Final = grouped_options(
    "selection",
    _selection,
    skip_damage_option,
    click.option(
        "--topic",
        "topics",
        multiple=True,
        shell_complete=complete_topic,
        help="Only messages of this topic; may be repeated.",
    ),
    click.option("--begin", type=TIME, metavar="TIME", help="Only messages stored from this time on."),
    click.option("--end", type=TIME, metavar="TIME", help="Only messages stored before this time."),
    click.option("--tag", "tags", multiple=True, help="Only messages with this tag; may be repeated."),
    click.option("--key", "keys", multiple=True, help="Only messages with this key; may be repeated."),
)


@contextlib.contextmanager
def needing_spark() -> Iterator[None]:
    """Raise ConfigurationError if an import in the block fails: Spark is not installed."""
    try:
        yield
    except ImportError as error:
        raise ConfigurationError(f"{error.name} is not installed: pip install 'mqproc[spark]'") from None


def check_spans(window: float | None, slide: float | None = None) -> None:
    """Refuse invalid windows, in seconds, before Spark is started."""
    if window is None:
        if slide is not None:
            raise click.UsageError("--slide needs a --window")
        return
    with needing_spark():
        from mqproc.spark.jobs.counting import check_windows
    check_windows(round(window, 3), None if slide is None else round(slide, 3))


@contextlib.contextmanager
def session(master: str, conf: Sequence[str]) -> Iterator[SparkSession]:
    """Use spark-submit's session, else start one on this machine for the duration of the block.

    Errors of mqproc inside of Spark are raised as such. Raises ConfigurationError without Spark, StartError if Spark
    does not start with these settings. Signals end the session in order.
    """
    with needing_spark():
        from py4j.protocol import Py4JError  # type: ignore[import-untyped]
        from pyspark.core.context import SparkContext
        from pyspark.errors import PySparkException
        from pyspark.logger import PySparkLogger
        from pyspark.sql import SparkSession

        from mqproc.spark.session import local_session
    settings = dict(setting(each) for each in conf)
    # The session of a notebook or a test is not stopped.
    has_session = SparkSession.getActiveSession() is not None
    submitted = any(os.environ.get(name) for name in _SUBMITTED)
    for name in _LOGGERS:
        # The messages of these loggers are also raised as errors.
        PySparkLogger.getLogger(name).disabled = True
    with SignalExit(owns_java=not submitted and SparkContext._gateway is None) as signal_exit:
        try:
            with without_spark_handlers():
                spark = (
                    _submitted_session(settings)
                    if submitted
                    else local_session(master, settings=_QUIET | settings, warnings=False)
                )
        except (PySparkException, Py4JError) as error:
            raise StartError(f"Spark does not start: {_first_cause(error)}") from error
        signal_exit.started(spark)
        try:
            yield spark
        except (PySparkException, Py4JError) as error:
            raise _mqproc_error(error) from error
        finally:
            if not has_session and not signal_exit.is_requested:
                spark.stop()


def _submitted_session(settings: Mapping[str, str]) -> SparkSession:
    from pyspark.sql import SparkSession

    from mqproc.spark.session import register

    builder = SparkSession.builder
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    register(spark)
    return spark


def setting(text: str) -> tuple[str, str]:
    """Name and value of --conf. Raises a usage error."""
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise click.UsageError(f"--conf {text!r}; write NAME=VALUE")
    return name, value


def _mqproc_error(error: Exception) -> MqprocError:
    """The error of mqproc inside a Spark error, else an InternalError with its text."""
    found = _OWN_ERROR.findall(str(error))
    if found:
        name, message = found[-1]
        kind = getattr(errors, name, InternalError)
        made: MqprocError = kind(message.strip())
        return made
    return InternalError(f"Spark: {_first_cause(error)}")


def _first_cause(error: Exception) -> str:
    """One line of a Spark or Java error: the root cause without Java class names."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    causes = [found[1] for line in lines if (found := _CAUSE.match(line))]
    return causes[-1] if causes else lines[0]


def write_rows(out: Output, frame: DataFrame, to: Path, stores: Sequence[str], *, mode: str = "append") -> None:
    """Write all rows as Parquet. Raises BadRequestError for a target inside one of the stores."""
    from mqproc.spark.jobs.output import write_parquet

    write_parquet(frame, to, stores, mode=mode)
    out.note(f"written to {to}")


def show(out: Output, name: str, columns: Sequence[OutputColumn], frame: DataFrame, limit: int) -> int:
    """Print at most `limit` rows of a frame and return their number. Columns `…_ms` are Unix ms."""
    rows = [row.asDict(recursive=True) for row in frame.limit(limit + 1).collect()]
    out.rows(name, columns, rows[:limit])
    if len(rows) > limit:
        out.note(f"more than {counted(limit, 'row')}; --limit shows more, --to writes all")
    return min(len(rows), limit)


@click.command(cls=Command)
def script() -> None:
    """Print the file to give to spark-submit.

    Example: spark-submit "$(mqproc spark script)" counts '/stores/*' --by topic. The session is then spark-submit's.
    mqproc must be installed for the driver and the executors.
    """
    click.echo(Path(__file__).with_name("script.py"))
