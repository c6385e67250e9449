"""The module by which Spark discovers `format("mqproc")`: it imports top-level packages named pyspark_…"""

from mqproc.spark.source import MqprocDataSource as DefaultSource

__all__ = ["DefaultSource"]
