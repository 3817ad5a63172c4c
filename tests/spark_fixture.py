"""One SparkSession per worker process; the marks on the tests keep them in one worker."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> Iterator["SparkSession"]:
    """An embedded Spark with two cores, as a user gets it from `start_session()`."""
    from brokerless.spark_collector.session.session import QUICK, start_session, stop_session

    spark = start_session("brokerless tests", master="local[2]", shuffle_partitions=1, config=QUICK)
    yield spark
    stop_session(spark)
