"""StatsD series over time, from the events of the metrics daemon's journal.

Raw, corrected, and between which bounds.
"""

from typing import TYPE_CHECKING

from brokerless.metrics.backends.journal import TOPIC
from brokerless.spark_collector.source.schema import KIND_EVENT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


_ROW = (
    "name string, tags map<string,string>, type string, value double, window array<double>, "
    "corrected double, bound double, grade string"
)
METRIC_COLUMNS = (
    "window", "source", "name", "tags", "type", "value", "corrected", "low", "high", "grade", "flushes",
)  # fmt: skip
# From best to worst: a longer window is as good as the worst flush in it.
_GRADES = "array('exact', 'ledger', 'socket-only', 'unknown')"


def metric_series(rows: "DataFrame", *, window_s: float | None = None) -> "DataFrame":
    """One row per series and window, columns `METRIC_COLUMNS`; each flush counts once however often it came.

    Without `window_s` the windows are the daemon's own flushes. With it counters are summed (their bounds too, so that
    the truth stays between them), sets and timers give their largest flush, gauges the newest. `low` and `high` are
    null where nothing is known.
    """
    from pyspark.sql import functions as F

    wanted = rows.where((F.col("kind") == KIND_EVENT) & (F.col("topic") == TOPIC))
    once = wanted.dropDuplicates(["source", "epoch", "offset"])
    parsed = once.withColumn("m", F.from_json(F.col("data").cast("string"), _ROW)).where("m.name is not null")
    start = F.col("m.window")[0]
    if window_s is None:
        slot = start
    else:
        slot = F.floor(start / F.lit(window_s)) * F.lit(window_s)
    counter = F.col("type") == "counter"
    flat = parsed.select(
        F.timestamp_micros((slot * 1_000_000).cast("bigint")).alias("window"),
        "source",
        "m.name",
        # A map cannot be a key of a group; its sorted text can.
        F.to_json(F.map_from_entries(F.array_sort(F.map_entries("m.tags")))).alias("tag_text"),
        "m.type",
        "m.value",
        F.coalesce("m.corrected", "m.value").alias("corrected"),
        F.col("m.bound").alias("bound"),
        F.coalesce("m.grade", F.lit("unknown")).alias("grade"),
        start.alias("at"),
    )
    keys = ["window", "source", "name", "tag_text", "type"]
    # A bound is only a bound if every flush has one.
    bound = F.when(F.count("bound") == F.count(F.lit(1)), F.sum("bound"))
    grouped = flat.groupBy(*keys).agg(
        F.sum("value").alias("total"),
        F.sum("corrected").alias("total_corrected"),
        F.max("value").alias("largest"),
        F.max_by("value", "at").alias("newest"),
        bound.alias("bound"),
        F.max(F.expr(f"array_position({_GRADES}, grade)")).alias("worst"),
        F.count(F.lit(1)).alias("flushes"),
    )
    value = (
        F.when(counter, F.col("total"))
        .when(F.col("type") == "gauge", F.col("newest"))
        .otherwise(F.col("largest"))
    )
    corrected = F.when(counter, F.col("total_corrected")).otherwise(value)
    return grouped.select(
        "window",
        "source",
        "name",
        F.from_json("tag_text", "map<string,string>").alias("tags"),
        "type",
        value.alias("value"),
        corrected.alias("corrected"),
        F.when(counter, corrected - F.col("bound")).alias("low"),
        F.when(counter, corrected + F.col("bound")).alias("high"),
        F.when(counter, F.expr(f"element_at({_GRADES}, cast(greatest(worst, 1) as int))")).alias("grade"),
        "flushes",
    ).orderBy("window", "name")
