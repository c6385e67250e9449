"""Spark imports top-level packages named pyspark_… to discover sources such as `mqproc`."""

from mqproc.spark.source import MqprocDataSource as DefaultSource

__all__ = ["DefaultSource"]
