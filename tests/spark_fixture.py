"""One SparkSession per worker process; the marks on the tests keep them in one worker."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# A few hundred rows at a time: compiling plans takes far longer than running them.
SMALL = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.driver.memory": "1g",
}


@pytest.fixture(scope="session")
def spark() -> Iterator["SparkSession"]:
    """An embedded Spark with two cores, as a user gets it from `session()`."""
    from brokerless.spark_collector.session import session, stop

    spark = session("brokerless tests", master="local[2]", shuffle_partitions=1, config=SMALL)
    yield spark
    stop(spark)
