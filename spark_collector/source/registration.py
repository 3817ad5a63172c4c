"""Telling Spark about `format("brokerless")`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: "SparkSession") -> None:
    """Make `format("brokerless")` known to this session; doing it twice is fine.

    Where the jar of the package is on the session's class path, the JVM has it already, and that one is used.
    """
    from pyspark.errors import AnalysisException

    from brokerless.spark_collector.source.source import BrokerlessSource

    try:
        spark.dataSource.register(BrokerlessSource)
    except AnalysisException as error:
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise
