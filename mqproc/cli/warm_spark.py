"""`mqproc warm --spark`: a session on a small store loads what jobs load, and Java keeps the classes."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mqproc.cli.spark_session import needing_spark, session
from mqproc.errors import InternalError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from mqproc.spark.class_archive import Loaded

_TOPIC: Final = "warm"
_END_TIMEOUT_S: Final = 60


def kept_classes() -> Path | None:
    """The file of the Java that commands start, if it is there. Raises ConfigurationError without Java or Spark."""
    with needing_spark():
        from mqproc.spark.class_archive import archive_of
        from mqproc.spark.java import find_java
    return archive_of(find_java())


def keep_classes() -> Path:
    """Have the file made. Takes a minute or two; see `class_archive.make_archive`."""
    with needing_spark():
        from mqproc.spark.class_archive import make_archive
        from mqproc.spark.java import find_java, without_warnings
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


def _loaded(folder: Path, store: Path) -> Loaded:
    """What a session loads that works a little. Java, which ends its list as it ends itself, has ended."""
    from pyspark.core.context import SparkContext

    from mqproc.spark.class_archive import Loaded

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
    return Loaded(class_list, options, class_path)


def _work(spark: SparkSession, store: Path, to: Path) -> None:
    """What most sessions do: rows by SQL, counts by windows, and files."""
    from mqproc.spark import jobs

    jobs.counts(spark, store, by=("topic", "tag"), window="1 hour").orderBy("messages").collect()
    spark.read.format("mqproc").load(os.fspath(store)).createOrReplaceTempView("messages")
    spark.sql("SELECT queue_id, sum(length(body)) FROM messages WHERE topic = 'warm' GROUP BY 1").collect()
    jobs.export(spark, store, to)
