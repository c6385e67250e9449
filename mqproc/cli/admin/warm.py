"""`mqproc warm`: compile kernels, and cache the classes of Spark, before they are needed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import numba
from numba.core.registry import cpu_target

from mqproc.cli.options import Command, Invocation, pass_invocation
from mqproc.cli.spark.session import needing_spark, session
from mqproc.errors import InternalError
from mqproc.kernels import crc
from mqproc.kernels.jit import compile as jit
from mqproc.kernels.jit.warming import WARMED, warm_all
from mqproc.supervisor import signals as prctl
from mqproc.util.file_lock import wait_for_flock

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from mqproc.spark.runtimes import LoadedClasses

EXIT_NOT_CACHED = 1


@click.command(cls=Command)
@click.option("--spark", is_flag=True, help="Also cache the classes of Spark (200 MB), so that jobs start faster.")
@pass_invocation
def warm(invocation: Invocation, /, spark: bool) -> int:
    """Compile all kernels in advance, so that no start has to.

    The first start of a version on a machine compiles its kernels, which takes up to two minutes. Run this command
    beforehand: after an upgrade, before the old group is stopped, or when an image is built. The exit code is 1 if the
    compiled kernels cannot be cached.

    With --spark Java also archives the classes of Spark, next to the kernels or in ~/.cache/mqproc, so that `mqproc
    spark` and `local_session` start a third faster. The archive is valid for the installed Java and Spark; repeat the
    command after an upgrade of either.
    """

    was_filled, began = is_filled(), time.perf_counter()
    if not was_filled:
        invocation.out.note("compiling")
    make_ready()
    seconds, kept = time.perf_counter() - began, is_cached()
    if was_filled:
        invocation.out.note("everything is compiled already")
    else:
        invocation.out.note(f"compiled in {seconds:.0f} s" + ("" if kept else f", but not cached: {NOT_KEPT}"))
    document: dict[str, Any] = {"compiled": not was_filled, "kept": kept, "seconds": round(seconds, 3)}
    if spark:
        document["spark"] = _warm_spark(invocation)
    if invocation.out.is_json:
        invocation.out.document(document)
    return 0 if kept else EXIT_NOT_CACHED


def _warm_spark(invocation: Invocation) -> dict[str, Any]:

    began, there = time.perf_counter(), class_archive()
    if there is None:
        invocation.out.note("archiving the classes of Spark, which takes a minute or two")
    archive = there or make_class_archive()
    seconds, size = time.perf_counter() - began, archive.stat().st_size
    how = "already exists" if there else f"made in {seconds:.0f} s"
    invocation.out.note(f"class archive {archive} {how}: {size // 1_000_000} MB")
    return {"made": there is None, "file": str(archive), "bytes": size, "seconds": round(seconds, 3)}


# Spark: a session on a small store loads the classes of typical jobs, and Java archives them


_TOPIC: Final = "warm"
_END_TIMEOUT_S: Final = 60


def class_archive() -> Path | None:
    """The archive for the installed Java if it exists.

    Raises ConfigurationError without Java or Spark.
    """
    with needing_spark():
        from mqproc.spark.runtimes import archive_of, find_java
    return archive_of(find_java())


def make_class_archive() -> Path:
    """Make the archive, which takes a minute or two."""
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
    """Classes loaded by a session with typical work, from the list that Java writes at exit."""
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
    """Typical work: SQL rows, counts by windows, an export."""
    from mqproc.spark import jobs

    jobs.counts(spark, store, by=("topic", "tag"), window="1 hour").orderBy("messages").collect()
    spark.read.format("mqproc").load(os.fspath(store)).createOrReplaceTempView("messages")
    spark.sql("SELECT queue_id, sum(length(body)) FROM messages WHERE topic = 'warm' GROUP BY 1").collect()
    jobs.export(spark, store, to)


# Cache of compiled kernels: the first start compiles them, later starts load them.
#
# Memory that the compiler uses would stay in every forked role, so children fill the cache, one module after another. A
# marker file next to it records that the cache is full. Of groups that start at the same time one compiles, and the
# others wait.


# mypy: allow-untyped-calls


NOT_KEPT: Final = (
    "neither the package's folder nor the home folder is writable; NUMBA_CACHE_DIR=DIR in the environment names another"
)
_MARKER: Final = "mqproc-warmed-"
_LOCK: Final = "mqproc-warming.lock"
_CHILDREN_MAX: Final = 4
# Longer than any compilation. After that a second compilation does no harm.
_LOCK_WAIT_S: Final = 300.0
_LOCK_POLL_S: Final = 0.1


def make_ready() -> None:
    """Load every kernel; those that the cache lacks are compiled first.

    Without a cache they are compiled here.
    """
    fill_cache()
    warm_all()


def is_cached() -> bool:
    """Whether compiled kernels can be cached, so that only the first start compiles."""
    return full_cache_marker() is not None


def is_filled() -> bool:
    """Whether every kernel is compiled, so that a start only loads them."""
    marker = full_cache_marker()
    return marker is not None and marker.exists()


def fill_cache() -> None:
    """Compile every kernel that the cache lacks, in other processes."""
    marker = full_cache_marker()
    if marker is not None and not marker.exists():
        with cache_lock(marker.with_name(_LOCK)):
            if not marker.exists() and compile_in_children():
                _write_marker(marker)


def full_cache_marker() -> Path | None:
    """Path of the marker, whose name depends on compiler, processor and sources.

    None if nothing is cached.
    """
    kernel: Any = crc.crc32_update
    folder = getattr(getattr(kernel, "_cache", None), "cache_path", None)
    if folder is None:
        return None
    # numba also compares the modification times of the sources.
    sources = sorted(Path(jit.__file__).parents[1].rglob("*.py"))
    stamps = [(path.name, path.stat().st_mtime_ns) for path in sources]
    processor = cpu_target.target_context.codegen().magic_tuple()
    key = repr((numba.__version__, processor, jit.sources_fingerprint(), stamps))
    return Path(folder) / (_MARKER + hashlib.sha256(key.encode()).hexdigest()[:32])


@contextlib.contextmanager
def cache_lock(lock: Path) -> Iterator[None]:
    """Hold a lock file, which is free when its holder ends; a wait without success ends too."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        # Two compilations at once do no harm.
        yield
        return
    try:
        wait_for_flock(fd, _LOCK_WAIT_S, poll_s=_LOCK_POLL_S)
        yield
    finally:
        os.close(fd)


def compile_in_children() -> bool:
    """Compile all modules, in one child per processor; whether all of them succeeded."""
    work_fd, queue_fd = os.pipe()
    os.write(queue_fd, bytes(range(len(WARMED))))
    os.close(queue_fd)
    children: list[int] = []
    statuses: list[int] = []
    try:
        for _ in range(min(len(os.sched_getaffinity(0)), _CHILDREN_MAX)):
            children.append(_fork_child(work_fd))
        while children:
            statuses.append(os.waitpid(children[-1], 0)[1])
            children.pop()
    finally:
        os.close(work_fd)
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return not any(statuses)


def _fork_child(work_fd: int) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        prctl.die_with_parent()
        while taken := os.read(work_fd, 1):
            WARMED[taken[0]].warm()
        status = 0
    finally:
        # A module that failed fails again in the parent, which reports it.
        os._exit(status)


def _write_marker(marker: Path) -> None:
    """Mark the cache as full and delete markers and code of other sources."""
    with contextlib.suppress(OSError):  # Without a marker the next start checks again.
        for old in marker.parent.glob(f"{_MARKER}*"):
            old.unlink(missing_ok=True)
        for code in marker.parent.glob(f"*{jit.CODE_SUFFIX}"):
            if not code.name.endswith(jit.code_ending()):
                code.unlink(missing_ok=True)
        marker.touch()
