"""What Spark imports to learn of `format("mqproc")`: it looks for packages called pyspark_…"""

from mqproc.spark.source import MqprocDataSource as DefaultSource

__all__ = ["DefaultSource"]
