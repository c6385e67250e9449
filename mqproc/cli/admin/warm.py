"""`mqproc warm`: what a start would compile is compiled before, while another version's group still runs."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from mqproc.cli.options import Command, Invocation, pass_invocation
from mqproc.cli.spark.session import needing_spark, session
from mqproc.errors import InternalError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from mqproc.spark.runtimes import LoadedClasses

NOTHING_KEPT = 1


@click.command(cls=Command)
@click.option("--spark", is_flag=True, help="And have Java keep Spark's classes: 200 MB, by which jobs start sooner.")
@pass_invocation
def warm(invocation: Invocation, /, spark: bool) -> int:
    """Compile what this version needs, so that no start waits for it.

    The first start of a version on a machine takes up to a minute or two longer than others, since it compiles. Do it
    beforehand: after an upgrade, before the group of the version before is stopped; in an image, when it is built. The
    exit code is 1 where nothing that is compiled can be kept.

    With --spark a session is started as well, and what Java reads of Spark is kept in a file, beside what is compiled
    or in ~/.cache/mqproc: each start of `mqproc spark` and of a `local_session` takes a third less from then on. It is
    for the Java and the Spark of now; with others, start this command again.
    """
    from mqproc.cli import warm_kernels

    was_filled, began = warm_kernels.is_filled(), time.perf_counter()
    if not was_filled:
        invocation.out.note("compiling")
    warm_kernels.make_ready()
    seconds, kept = time.perf_counter() - began, warm_kernels.are_kept()
    if was_filled:
        invocation.out.note("all is compiled already")
    else:
        invocation.out.note(
            f"compiled in {seconds:.0f} s" + ("" if kept else f", and not kept: {warm_kernels.NOT_KEPT}")
        )
    document: dict[str, Any] = {"compiled": not was_filled, "kept": kept, "seconds": round(seconds, 3)}
    if spark:
        document["spark"] = _warm_spark(invocation)
    if invocation.out.is_json:
        invocation.out.document(document)
    return 0 if kept else NOTHING_KEPT


def _warm_spark(invocation: Invocation) -> dict[str, Any]:

    began, there = time.perf_counter(), kept_classes()
    if there is None:
        invocation.out.note("having Java keep Spark's classes, which takes a minute or two")
    archive = there or keep_classes()
    seconds, size = time.perf_counter() - began, archive.stat().st_size
    how = "already" if there else f"since now, after {seconds:.0f} s"
    invocation.out.note(f"{archive} keeps Spark's classes {how}: {size // 1_000_000} MB")
    return {"made": there is None, "file": str(archive), "bytes": size, "seconds": round(seconds, 3)}


# --- warm_spark ---
# `mqproc warm --spark`: a session on a small store loads what jobs load, and Java keeps the classes.


_TOPIC: Final = "warm"
_END_TIMEOUT_S: Final = 60


def kept_classes() -> Path | None:
    """The file of the Java that commands start, if it is there. Raises ConfigurationError without Java or Spark."""
    with needing_spark():
        from mqproc.spark.runtimes import archive_of, find_java
    return archive_of(find_java())


def keep_classes() -> Path:
    """Have the file made. Takes a minute or two; see `class_archive.make_archive`."""
    with needing_spark():
        from mqproc.spark.runtimes import find_java, make_archive, without_warnings
    with tempfile.TemporaryDirectory(prefix="mqproc-warm-") as folder:
        store = _small_store(Path(folder))
        return make_archive(without_warnings(find_java()), _loaded(Path(folder), store))


def _small_store(folder: Path) -> Path:
    import mqproc

    store = folder / "store"
    with mqproc.open(store) as client:
        client.create_topic(_TOPIC)
        client.send_batch(_TOPIC, [b"warm"] * 100, keys=["key"] * 100, tags=["tag"] * 100)
        client.wait_dispatched()
    return store


def _loaded(folder: Path, store: Path) -> LoadedClasses:
    """What a session loads that works a little. Java, which ends its list as it ends itself, has ended."""
    from pyspark.core.context import SparkContext

    from mqproc.spark.runtimes import LoadedClasses

    class_list = folder / "classes"
    option = f'spark.driver.extraJavaOptions="-XX:DumpLoadedClassList={class_list}"'
    with session("local[*]", [option]) as spark:
        _work(spark, store, folder / "exported")
        gateway: Any = SparkContext._gateway
        lang = gateway.jvm.java.lang
        options = list(lang.management.ManagementFactory.getRuntimeMXBean().getInputArguments())
        class_path = str(lang.System.getProperty("java.class.path"))
    gateway.shutdown()
    gateway.proc.stdin.close()
    try:
        code = gateway.proc.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        gateway.proc.kill()
        raise InternalError(f"Java has not ended within {_END_TIMEOUT_S} s of its session") from None
    if code:
        raise InternalError(f"Java ended with code {code}")
    return LoadedClasses(class_list, options, class_path)


def _work(spark: SparkSession, store: Path, to: Path) -> None:
    """What most sessions do: rows by SQL, counts by windows, and files."""
    from mqproc.spark import jobs

    jobs.counts(spark, store, by=("topic", "tag"), window="1 hour").orderBy("messages").collect()
    spark.read.format("mqproc").load(os.fspath(store)).createOrReplaceTempView("messages")
    spark.sql("SELECT queue_id, sum(length(body)) FROM messages WHERE topic = 'warm' GROUP BY 1").collect()
    jobs.export(spark, store, to)
