"""Where a command's Spark session comes from, what its errors look like, and how its rows are shown."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mqproc import errors
from mqproc.cli.commands import MOMENT, Command
from mqproc.cli.completing import complete_topic
from mqproc.cli.invocation import Invocation
from mqproc.cli.output import Column, Output
from mqproc.cli.spark_ending import Ending, kept_from_spark
from mqproc.errors import ConfigurationError, InternalError, MqprocError, StartError
from mqproc.quantities import counted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

F = TypeVar("F", bound=Callable[..., Any])

# What spark-submit, or a Spark Connect server, has told this process: the session is theirs.
_SUBMITTED = ("PYSPARK_GATEWAY_PORT", "SPARK_REMOTE")
_OURS = re.compile(r"(?:mqproc\.errors\.)(\w+): (.*)")
# What Java says where Python does not look: "An error occurred while calling o47.parquet", a line, then this one.
_CAUSE = re.compile(r"(?:Caused by)?: (?:[\w$]+\.)+[\w$]+: (.*\S)")
_MASTER = re.compile(r"yarn|local(\[.+\]|-cluster\[.+\])?|(spark|k8s)://.+")
_LOGGERS = ("DataFrameQueryContextLogger", "SQLQueryContextLogger")
MAX_RESULT_SIZE = "16m"
# An error that ends the command is told once, by the command.
_QUIET = {"spark.driver.maxResultSize": MAX_RESULT_SIZE, "spark.log.level": "FATAL"}


def spark_options(function: F) -> F:
    """Adds --master and --conf, and the stores; the command gets `stores`, `master`, `conf`."""
    function = click.option(
        "--conf", multiple=True, metavar="NAME=VALUE", help="A setting of Spark's; may be repeated."
    )(function)
    function = click.option(
        "--master", default="local[*]", show_default=True, callback=_checked_master, help="Where Spark runs."
    )(function)
    return click.argument("stores", nargs=-1, metavar="[STORE]...")(function)


def _checked_master(context: click.Context, parameter: click.Parameter, value: str) -> str:
    if not _MASTER.fullmatch(value):
        raise click.BadParameter(f"{value!r}; there are local, local[2], local[*], yarn, spark://… and k8s://…")
    return value


def selection_options(function: F) -> F:
    """Adds what chooses messages; the command gets `chosen`, which `selection_of` takes."""
    for option in (
        click.option("--key", "keys", multiple=True, help="Only messages with this key; may be repeated."),
        click.option("--tag", "tags", multiple=True, help="Only messages with this tag; may be repeated."),
        click.option("--end", type=MOMENT, metavar="TIME", help="Only messages stored before then."),
        click.option("--begin", type=MOMENT, metavar="TIME", help="Only messages stored from then on."),
        click.option(
            "--topic",
            "topics",
            multiple=True,
            shell_complete=complete_topic,
            help="Only messages of this topic; may be repeated.",
        ),
        click.option("--skip-damage", is_flag=True, help="Pass over damage of the log; otherwise it is an error."),
    ):
        function = option(function)
    return function


def selection_of(chosen: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `mqproc.spark.messages` for the options."""
    return {
        "topic": chosen["topics"],
        "begin": chosen["begin"],
        "end": chosen["end"],
        "tag": chosen["tags"],
        "key": chosen["keys"],
        "fail_on_data_loss": not chosen["skip_damage"],
    }


def paths_of(invocation: Invocation, stores: Sequence[str]) -> list[str]:
    """The stores that were named, else the one of the common options. Raises a usage error for both."""
    if stores and invocation.store is not None:
        raise click.UsageError(f"{' '.join(stores)} and --store {invocation.store}: name stores in one way")
    return list(stores) or [str(invocation.store_path())]


@contextlib.contextmanager
def needing_spark() -> Iterator[None]:
    """Around imports. Raises ConfigurationError where Spark is not installed."""
    try:
        yield
    except ImportError as error:
        raise ConfigurationError(f"{error.name} is not installed: pip install 'mqproc[spark]'") from None


def check_spans(window: float | None, slide: float | None = None) -> None:
    """Refuse windows, in seconds, that cannot be counted by, before Spark is started. It gets milliseconds."""
    if window is None:
        if slide is not None:
            raise click.UsageError("--slide needs a --window")
        return
    with needing_spark():
        from mqproc.spark.jobs.counting import check_windows
    check_windows(round(window, 3), None if slide is None else round(slide, 3))


@contextlib.contextmanager
def session(master: str, conf: Sequence[str]) -> Iterator[SparkSession]:
    """spark-submit's session, else one on this machine that ends with the command.

    What Spark raises because of ours comes out as ours. Raises ConfigurationError without Spark, StartError when it
    does not start with these settings. Signals end it in order.
    """
    with needing_spark():
        from py4j.protocol import Py4JError  # type: ignore[import-untyped]
        from pyspark.core.context import SparkContext
        from pyspark.errors import PySparkException
        from pyspark.logger import PySparkLogger
        from pyspark.sql import SparkSession

        from mqproc.spark.session import local_session
    settings = dict(setting(each) for each in conf)
    # A notebook or a test may have one, which goes on.
    there = SparkSession.getActiveSession() is not None
    submitted = any(os.environ.get(name) for name in _SUBMITTED)
    for name in _LOGGERS:
        # What they print comes as an error too.
        PySparkLogger.getLogger(name).disabled = True
    with Ending(owns_java=not submitted and SparkContext._gateway is None) as ending:
        try:
            with kept_from_spark():
                spark = (
                    _submitted_session(settings)
                    if submitted
                    else local_session(master, settings=_QUIET | settings, warnings=False)
                )
        except (PySparkException, Py4JError) as error:
            raise StartError(f"Spark does not start: {_said(error)}") from error
        ending.started(spark)
        try:
            yield spark
        except (PySparkException, Py4JError) as error:
            raise _ours(error) from error
        finally:
            if not there and not ending.is_asked:
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


def _ours(error: Exception) -> MqprocError:
    """Our error inside of Spark's, else what Spark says."""
    found = _OURS.findall(str(error))
    if found:
        name, message = found[-1]
        kind = getattr(errors, name, InternalError)
        made: MqprocError = kind(message.strip())
        return made
    return InternalError(f"Spark: {_said(error)}")


def _said(error: Exception) -> str:
    """One line of an error of Spark's or Java's: its first cause, without the names of Java's classes."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    causes = [found[1] for line in lines if (found := _CAUSE.match(line))]
    return causes[-1] if causes else lines[0]


def write_rows(out: Output, frame: DataFrame, to: Path, stores: Sequence[str], *, mode: str = "append") -> None:
    """Write all rows of a frame that was made of stores, as Parquet. Raises BadRequestError for a target among them."""
    from mqproc.spark.jobs.targets import write_parquet

    write_parquet(frame, to, stores, mode=mode)
    out.note(f"written to {to}")


def show(out: Output, name: str, columns: Sequence[Column], frame: DataFrame, limit: int) -> int:
    """Print at most `limit` rows of a frame. Times are Unix ms where a column is called `…_ms`.

    Returns how many rows were printed.
    """
    rows = [row.asDict(recursive=True) for row in frame.limit(limit + 1).collect()]
    out.rows(name, columns, rows[:limit])
    if len(rows) > limit:
        out.note(f"more than {counted(limit, 'row')}; --limit shows more, --to writes all")
    return min(len(rows), limit)


@click.command(cls=Command)
def script() -> None:
    """Print the file to give to spark-submit.

    spark-submit "$(mqproc spark script)" counts '/stores/*' --by topic: the session is then spark-submit's. mqproc must
    be installed for driver and executors.
    """
    click.echo(Path(__file__).with_name("spark_script.py"))
