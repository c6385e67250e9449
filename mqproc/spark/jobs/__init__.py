"""Spark jobs over stores, each a function here and a `mqproc spark …` command.

from mqproc.spark import jobs

jobs.counts(spark, "/stores/*", by=("topic",), window="1 hour").orderBy("window_start").show()
"""

from mqproc.spark.jobs.audits import backlog, duplicates, lag, verify
from mqproc.spark.jobs.copies import compact, export
from mqproc.spark.jobs.counting import counts
from mqproc.spark.jobs.rebuilding import rebuild
from mqproc.spark.jobs.replaying import replay

__all__ = ["backlog", "compact", "counts", "duplicates", "export", "lag", "rebuild", "replay", "verify"]
