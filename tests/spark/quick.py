"""Settings for sessions that live shortly, and an archive of the classes that Spark loads, which all of them share.

Most of what a small query costs is the start of its JVM, and most of that is to load and check some 20,000 classes.
Java reads them from an archive in a quarter of that time; an archive that does not fit is passed over in silence.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pyspark

from mqproc.spark.java import find_java
from tests.store.stopped_store import StoppedStore

PROJECT = Path(__file__).parents[2]
TRAINING_S = 400
OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:disable"
# The session of one that ends in order: its JVM writes the archive then.
TRAINING = """
import json, sys
from pyspark import SparkContext
from mqproc.spark import local_session, messages
spark = local_session("local[1]", settings=json.loads(sys.argv[2]))
store = sys.argv[1]
messages(spark, store).groupBy("topic").count().collect()
messages(spark, store).write.parquet(store + "/parquet")
messages(spark, store).mapInArrow(lambda batches: batches, messages(spark, store).schema).count()
rows = spark.readStream.format("mqproc").option("startingOffsets", "earliest").load(store)
query = rows.writeStream.format("noop").option("checkpointLocation", store + "/checkpoint").trigger(availableNow=True)
query.start().awaitTermination()
java = SparkContext._gateway.proc
spark.stop()
java.stdin.close()
java.wait(240)
"""


def settings() -> dict[str, str]:
    """Little memory, few partitions, and no compiling, which takes longer than queries that are small."""
    return _settings(java_options())


def _settings(options: str) -> dict[str, str]:
    return {
        "spark.sql.shuffle.partitions": "2",
        "spark.default.parallelism": "2",
        "spark.driver.memory": "1g",
        "spark.driver.maxResultSize": "16m",
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.adaptive.enabled": "false",
        "spark.driver.extraJavaOptions": options,
    }


@functools.cache
def java_options() -> str:
    """What every JVM is started with."""
    java = find_java()
    said = subprocess.run([java.home / "bin" / "java", "-version"], capture_output=True, timeout=60, check=True).stderr
    key = hashlib.sha256(said + f"{pyspark.__version__} {pyspark.__file__}".encode()).hexdigest()[:12]
    archive = Path(tempfile.gettempdir()) / f"mqproc-spark-classes-{os.getuid()}-{key}.jsa"
    if not archive.exists():
        _make(archive)
    return f"{OPTIONS} -XX:SharedArchiveFile={archive}"


def _make(archive: Path) -> None:
    """By a session like those of the tests. A Java that cannot do it leaves none, and does without."""
    with tempfile.TemporaryDirectory() as folder:
        store = StoppedStore(Path(folder) / "store").root
        made = Path(folder) / "classes.jsa"
        given = json.dumps(_settings(f"{OPTIONS} -XX:ArchiveClassesAtExit={made}"))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(PROJECT), os.environ.get("PYTHONPATH", "")])}
        subprocess.run(
            [sys.executable, "-c", TRAINING, str(store), given],
            env=environment, cwd=folder, stdout=subprocess.DEVNULL, timeout=TRAINING_S, check=True,
        )  # fmt: skip
        if made.exists():
            made.replace(archive)
