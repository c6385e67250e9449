"""`mqproc warm`: compile kernels, and cache the classes of Spark, before they are needed."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from mqproc.cli.options import Invocation, command
from mqproc.cli.spark.session import needing_spark, session
from mqproc.errors import ConfigurationError, InternalError
from mqproc.util.progress import show_progress
from mqproc.util.units import format_bytes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from mqproc.spark.session import LoadedClasses

EXIT_NOT_CACHED = 1


@command()
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path(file_okay=False, path_type=Path))
@click.option("--spark", is_flag=True, help="Also cache the classes of Spark (200 MB), so that jobs start faster.")
def warm(invocation: Invocation, /, folder: Path | None, spark: bool) -> int:
    """Compile all kernels in advance, so that no start has to.

    The first start of a version on a machine compiles its kernels, which takes up to two minutes. Run this command
    beforehand: after an upgrade, before the old group is stopped, or when an image is built. The exit code is 1 if the
    compiled kernels cannot be cached.

    They are cached in ~/.cache/mqproc for all environments of this user. Root also stores them in its installation, for
    all users. With DIR they are stored there: set NUMBA_CACHE_DIR=DIR to use them, even if DIR is read-only. They are
    used on the same type of processor, and only if they belong to root or to the user of the group.

    With --spark Java also archives the classes of Spark, next to the kernels or in ~/.cache/mqproc, so that `mqproc
    spark` and `local_session` start a third faster. The archive is valid for the installed Java and Spark; repeat the
    command after an upgrade of either.
    """
    from mqproc.cli.admin.engine_hooks import make_ready, not_kept
    from mqproc.kernels.jit import cache

    began = time.perf_counter()
    if folder is not None:
        folder = folder.absolute()
        _refuse_unwritable(folder)
        if cache.full_folder() is None:
            cache.use_only(folder)
    was_filled = cache.full_folder() is not None
    if not was_filled:
        invocation.out.note("compiling")
    make_ready(show_progress)
    seconds, kept = time.perf_counter() - began, cache.full_folder()
    if was_filled:
        invocation.out.note("everything is compiled already")
    else:
        invocation.out.note(f"compiled in {seconds:.0f} s" + ("" if kept else f", but not cached: {not_kept()}"))
    if kept is not None:
        kept = _copy_classes(kept, folder / kept.name) if folder else _serve_all_users(kept)
        invocation.out.note(f"compiled kernels are in {kept}")
    document: dict[str, Any] = {"compiled": not was_filled, "kept": kept is not None, "seconds": round(seconds, 3)}
    document["folder"] = None if kept is None else str(kept)
    if spark:
        document["spark"] = _warm_spark(invocation)
    if invocation.out.is_json:
        invocation.out.document(document)
    return EXIT_NOT_CACHED if kept is None else 0


def _refuse_unwritable(folder: Path) -> None:
    from mqproc.kernels.jit import cache

    target = folder / cache.fingerprint()
    if not cache.is_full(target) and (problem := cache.write_problem(target)):
        raise ConfigurationError(problem)


def _serve_all_users(full: Path) -> Path:
    """Copy the code to root's installation, as root; returns the folder that has it."""
    from mqproc.kernels.jit import cache

    target = cache.INSTALLED / full.name
    if full.parent == cache.SHIPPED:
        return full
    is_roots = os.geteuid() == 0 == os.stat(cache.INSTALLED.parents[1]).st_uid
    if not is_roots or os.environ.get("NUMBA_CACHE_DIR") or cache.write_problem(target):
        return full
    copied = _copy_classes(full, target)
    cache.delete_unused(copied)
    return copied


def _copy_classes(full: Path, target: Path) -> Path:
    from mqproc.kernels.jit import cache

    if not cache.is_full(target):
        try:
            cache.copy_code(full, target)
        except OSError as error:
            raise ConfigurationError(f"{target} cannot be written: {error.strerror}") from None
    return target


def _warm_spark(invocation: Invocation) -> dict[str, Any]:
    began, there = time.perf_counter(), class_archive()
    if there is None:
        invocation.out.note("archiving the classes of Spark, which takes a minute or two")
    archive = there or make_class_archive()
    seconds, size = time.perf_counter() - began, archive.stat().st_size
    how = "already exists" if there else f"made in {seconds:.0f} s"
    invocation.out.note(f"class archive {archive} {how}: {format_bytes(size)}")
    return {"made": there is None, "file": str(archive), "bytes": size, "seconds": round(seconds, 3)}


# Spark: a session on a small store loads the classes of typical jobs, and Java archives them


_TOPIC: Final = "warm"
_END_TIMEOUT_S: Final = 60


def class_archive() -> Path | None:
    """The archive for the installed Java, if any. Raises ConfigurationError without Java, Spark."""
    with needing_spark():
        from mqproc.spark.session import archive_of, find_java
    return archive_of(find_java())


def make_class_archive() -> Path:
    """Make the archive, which takes a minute or two."""
    with needing_spark():
        from mqproc.spark.session import find_java, make_archive, without_warnings
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
    """Classes loaded by a session with typical work, from the list that Java writes at exit."""
    from pyspark.core.context import SparkContext

    from mqproc.spark.session import LoadedClasses

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
    """Typical work: SQL rows, counts by windows, an export."""
    from mqproc.spark import jobs

    jobs.counts(spark, store, by=("topic", "tag"), window="1 hour").orderBy("messages").collect()
    spark.read.format("mqproc").load(os.fspath(store)).createOrReplaceTempView("messages")
    spark.sql("SELECT queue_id, sum(length(body)) FROM messages WHERE topic = 'warm' GROUP BY 1").collect()
    jobs.export(spark, store, to)
