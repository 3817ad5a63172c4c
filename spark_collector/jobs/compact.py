"""Many small files into few large ones, without a reader ever seeing a row twice."""

import os
from collections import defaultdict
from typing import TYPE_CHECKING

from brokerless.spark_collector.jobs.ledger import KIND_BEGIN, LEDGER_SCHEMA
from brokerless.spark_collector.schema import KIND_EVENT, KIND_LOST, KIND_SENT, STREAM_KEY
from brokerless.spark_collector.table import File, Table, TableError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from brokerless.spark_collector.jobs.report import LedgerTable

# What Spark reads as one task; Delta and Iceberg aim at the same size.
TARGET_BYTES = 128 * 1024 * 1024
# Rewriting a folder for fewer files than this costs more than it saves.
MIN_FILES = 4


def choose(
    files: list[File], target_bytes: int = TARGET_BYTES, min_files: int = MIN_FILES
) -> list[list[File]]:
    """Groups of files to be put together, each of one folder and of about the target size; pure."""
    folders: dict[str, list[File]] = defaultdict(list)
    for file in files:
        if file.bytes < target_bytes // 2:
            folders[os.path.dirname(file.path)].append(file)
    groups = []
    for small in folders.values():
        group: list[File] = []
        size = 0
        for file in sorted(small, key=lambda f: f.path):
            if group and size + file.bytes > target_bytes:
                groups.append(group)
                group, size = [], 0
            group.append(file)
            size += file.bytes
        groups.append(group)
    return [g for g in groups if len(g) >= min_files]


def compact(
    spark: "SparkSession", table: Table, *, target_bytes: int = TARGET_BYTES, min_files: int = MIN_FILES
) -> int:
    """Put small files together, one commit per folder; returns how many files fewer there are.

    May run while the table's writer does. A group whose rows do not come out the same is left alone.
    """
    saved = 0
    for group in choose(table.files(), target_bytes, min_files):
        paths = [str(table.path / f.path) for f in group]
        rows = spark.read.option("mergeSchema", "true").parquet(*paths)
        staged = table.stage()
        folder = os.path.join(staged, os.path.dirname(group[0].path))
        rows.coalesce(1).write.mode("overwrite").parquet(folder)
        before, after = rows.count(), spark.read.parquet(folder).count()
        if before != after:
            raise TableError(
                folder, f"has {after} rows after compaction, {before} before; nothing was changed"
            )
        table.commit(staged, remove=[f.path for f in group])
        saved += len(group) - 1
    return saved


def merge_ledger(spark: "SparkSession", ledger: "LedgerTable") -> int:
    """Put adjacent islands of different batches together; the loss table stays the same."""
    files = ledger.table.files()
    if len(files) < 2:
        return 0
    rows = spark.read.schema(LEDGER_SCHEMA).parquet(*ledger.table.paths())
    staged = ledger.table.stage()
    merged_rows(rows).coalesce(1).write.mode("overwrite").parquet(staged)
    ledger.table.commit(staged, remove=[f.path for f in files])
    return len(files) - 1


def merged_rows(rows: "DataFrame") -> "DataFrame":
    """Ledger rows with the same meaning and as few as possible."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    columns = [part.strip().split(" ")[0] for part in LEDGER_SCHEMA.split(",")]
    stream = list(STREAM_KEY)
    keys = [*stream, "kind", "late", "slot_low", "slot_high"]
    order = Window.partitionBy(*keys).orderBy("lo", "hi")
    reach = F.max("hi").over(order.rowsBetween(Window.unboundedPreceding, -1))
    events = rows.where(F.col("kind") == KIND_EVENT)
    numbered = events.withColumn("reach", reach).withColumn(
        "island", F.sum(F.expr("if(reach is null or lo > reach + 1, 1, 0)")).over(order)
    )
    islands = numbered.groupBy(*keys, "island").agg(
        F.min("lo").alias("lo"),
        F.max("hi").alias("hi"),
        F.min("off_lo").alias("off_lo"),
        F.max("off_hi").alias("off_hi"),
        F.sum("rows").alias("rows"),
        F.min("seen").alias("seen"),
        F.first("reason").alias("reason"),
    )
    words = (
        rows.where(F.col("kind").isin(KIND_SENT, KIND_BEGIN))
        .groupBy(*stream, "kind", "late", "lo", "hi")
        .agg(
            F.max("slot_low").alias("slot_low"),
            F.min("slot_high").alias("slot_high"),
            F.max("off_lo").alias("off_lo"),
            F.max("off_hi").alias("off_hi"),
            F.sum("rows").alias("rows"),
            F.min("seen").alias("seen"),
            F.first("reason").alias("reason"),
        )
    )
    said = rows.where(F.col("kind") == KIND_LOST).distinct()
    return islands.select(*columns).unionByName(words.select(*columns)).unionByName(said.select(*columns))
