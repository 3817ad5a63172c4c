"""The two data sources side by side in one session: in the JVM as `brokerless`, in Python under another name."""

from typing import TYPE_CHECKING

import pytest

from brokerless.spark_collector.session.jar import PROVIDER, find_jar
from brokerless.spark_collector.session.java import find_java
from brokerless.spark_collector.source.source import BrokerlessSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JVM, PYTHON = "brokerless", "brokerless_python"


class PythonSource(BrokerlessSource):
    """The one for sessions without the jar, under a name of its own."""

    @classmethod
    def name(cls) -> str:
        return PYTHON


def require(spark: "SparkSession", name: str) -> None:
    """Have this one in the session; skip the test where there is no compiler for the one in the JVM."""
    if name == PYTHON:
        spark.dataSource.register(PythonSource)
        # Looked up in the active session of the JVM's thread, which is not always the session that is asked.
        spark._get_j_spark_session_class(spark._jvm).setActiveSession(spark._jsparkSession)  # type: ignore[attr-defined]
        return
    if find_jar(find_java().home) is None:
        pytest.skip("no Java compiler here")
    provider = spark._jvm.java.lang.Class.forName(PROVIDER)  # type: ignore[union-attr]
    assert provider.getName() == PROVIDER, "the session has the jar"
