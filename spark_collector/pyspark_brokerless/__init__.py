"""Spark looks for top-level modules named `pyspark_*` and registers their `DefaultSource` by itself.

So `spark.read.format("brokerless")` works wherever this package is installed, without a call to `register`.
"""

from brokerless.spark_collector.source.source import BrokerlessSource as DefaultSource

__all__ = ["DefaultSource"]
