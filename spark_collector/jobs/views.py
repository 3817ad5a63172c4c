"""The landed tables as SQL views."""

from typing import TYPE_CHECKING

from brokerless.core.errors import UsageError
from brokerless.spark_collector.jobs.land import read_table
from brokerless.spark_collector.jobs.report import LedgerTable
from brokerless.spark_collector.jobs.stream import SparkInput
from brokerless.spark_collector.table import Table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def make_views(
    spark: "SparkSession",
    *,
    table: str | None = None,
    ledger: str | None = None,
    spools: tuple[str, ...] = (),
) -> list[str]:
    """Make views `events` and `quarantine` of a landed table, `loss` and `counts` of a ledger, `spool` of
    spools.

    Returns the names of those there are. Raises UsageError if a table is not one.
    """
    made = []
    if table is not None:
        if not Table(table).exists():
            raise UsageError(f"{table} is not a landed table")
        for name, path in (("events", table), ("quarantine", f"{table}_quarantine")):
            if Table(path).files():
                read_table(spark, path).createOrReplaceTempView(name)
                made.append(name)
    if ledger is not None:
        if not Table(ledger).exists():
            raise UsageError(f"{ledger} is not a ledger")
        found = LedgerTable.open(ledger)
        found.loss(spark).createOrReplaceTempView("loss")
        found.counts(spark).createOrReplaceTempView("counts")
        made += ["loss", "counts"]
    if spools:
        SparkInput(paths=spools).batch(spark).createOrReplaceTempView("spool")
        made.append("spool")
    return made
