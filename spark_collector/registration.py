"""Telling Spark about `format("brokerless")`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: "SparkSession") -> None:
    """Make `format("brokerless")` known to this session; doing it twice is fine."""
    from brokerless.spark_collector.source import BrokerlessSource

    spark.dataSource.register(BrokerlessSource)
