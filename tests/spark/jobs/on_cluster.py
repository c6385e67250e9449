"""Program for spark-submit that runs jobs and writes their results to a JSON file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pyspark.sql import SparkSession

from mqproc.spark import jobs
from mqproc.spark.session import register


def main(store: Path, folder: Path, target: Path) -> None:
    spark = SparkSession.builder.getOrCreate()
    register(spark)
    built = jobs.rebuild(spark, store, folder / "built", share_bytes=100_000)
    counted = jobs.counts(spark, store, latencies=False)
    found = {
        "master": spark.sparkContext.master,
        "units": sum(row.units for row in built.queues.collect()),
        "clean": [row.clean for row in jobs.verify(spark, store, share_bytes=100_000).collect()],
        "counts": {row.topic: row.messages for row in counted.collect()},
        "exported": jobs.export(spark, store, folder / "parquet", topic="First").messages,
        "in_files": spark.read.parquet(str(folder / "parquet")).count(),
        "keys": jobs.compact(spark, store, columns=["topic"]).count(),
        "replayed": jobs.replay(spark, store, target, "Replayed", topic="First", streams=2).sent,
        "lag": jobs.lag(spark, store).count(),
    }
    (folder / "found.json").write_text(json.dumps(found))
    spark.stop()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
