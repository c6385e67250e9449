"""Tables of the demo's flights: counts by hour, delays by carrier, and dead letters.

A declarative pipeline of Spark's: each function is a table, and Spark derives their dependencies and updates them.
`mqproc spark pipeline` copies this file into a folder of yours and runs it there.
"""

from __future__ import annotations

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

FLIGHT = (
    "origin string, dest string, carrier string, flight int, tailnum string, distance double, dep_delay double, "
    "arr_delay double, air_time double"
)
LATE_MIN = 15


def stored(**options: str) -> DataFrame:
    """Messages of the store in the pipeline's configuration."""
    spark = SparkSession.active()
    return spark.read.format("mqproc").options(**options).load(spark.conf.get("mqproc.store"))


@dp.materialized_view(comment="Each flight with its scheduled hour, which is its message's born time")
def flights() -> DataFrame:
    found = stored(subscribe="flights", columns="born_timestamp,body")
    flight = F.from_json(F.col("body").cast("string"), FLIGHT).alias("flight")
    return found.select(F.col("born_timestamp").alias("scheduled"), flight).select("scheduled", "flight.*")


@dp.materialized_view(comment="Flights by scheduled hour and airport")
def hourly_counts() -> DataFrame:
    hours = SparkSession.active().read.table("flights").groupBy(F.window("scheduled", "1 hour").alias("hour"), "origin")
    counted = hours.agg(F.count(F.lit(1)).alias("flights"), F.count("dep_delay").alias("departed"))
    return counted.select(F.col("hour.start").alias("hour"), "origin", "flights", "departed")


@dp.materialized_view(comment="Delays in minutes by carrier; a flight without a departure was cancelled")
def carrier_delays() -> DataFrame:
    by_carrier = SparkSession.active().read.table("flights").groupBy("carrier")
    return by_carrier.agg(
        F.count(F.lit(1)).alias("flights"),
        F.count_if(F.col("dep_delay").isNull()).alias("cancelled"),
        F.round(F.avg("dep_delay"), 2).alias("departure_delay_mean"),
        F.percentile_approx("arr_delay", 0.5).alias("arrival_delay_p50"),
        F.percentile_approx("arr_delay", 0.99).alias("arrival_delay_p99"),
        F.round(F.avg((F.col("arr_delay") >= LATE_MIN).cast("int")), 4).alias("late_share"),
    )


@dp.materialized_view(comment="Messages that a consumer group has given up, by group and the topic they came from")
def dead_letters() -> DataFrame:
    found = stored(subscribePattern="%DLQ%.*", columns="topic,tag,properties,reconsume_times,store_timestamp")
    group, origin = F.expr("substring(topic, 6)").alias("group"), F.col("properties")["RETRY_TOPIC"].alias("origin")
    return found.groupBy(group, origin, "tag").agg(
        F.count(F.lit(1)).alias("messages"),
        F.max("reconsume_times").alias("reconsumed_max"),
        F.min("store_timestamp").alias("first"),
        F.max("store_timestamp").alias("last"),
    )
