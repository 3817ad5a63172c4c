"""The SPARK_HOME that we make: Spark's Python processes import the installed package, not a zip."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from brokerless.spark_collector.session.spark_home import launching, spark_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SPARK_HOME", raising=False)
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_it_has_what_the_launchers_need_and_no_zip() -> None:
    """Launchers and jars are pyspark's own; the zip is not there; making it twice is fine."""
    import pyspark

    home = spark_home()
    assert (home / "bin" / "spark-submit").samefile(Path(pyspark.__file__).parent / "bin" / "spark-submit")
    assert any((home / "jars").glob("spark-core*.jar"))
    assert not (home / "python").exists()
    assert spark_home() == home


def test_the_users_own_choice_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A SPARK_HOME that is set is used; another interpreter gets pyspark's own directory."""
    import pyspark

    monkeypatch.setenv("PYSPARK_PYTHON", "/usr/bin/another-python")
    assert spark_home() == Path(pyspark.__file__).parent
    monkeypatch.setenv("SPARK_HOME", "/opt/spark")
    assert spark_home() == Path("/opt/spark")


def test_the_environment_is_as_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a JVM that is started within sees it."""
    with launching():
        assert os.environ["SPARK_HOME"] == str(spark_home())
    assert "SPARK_HOME" not in os.environ
    monkeypatch.setenv("SPARK_HOME", "/opt/spark")
    with launching():
        assert os.environ["SPARK_HOME"] == "/opt/spark"
    assert os.environ["SPARK_HOME"] == "/opt/spark"


@pytest.mark.spark
@pytest.mark.xdist_group("spark")
def test_workers_import_the_installed_package(spark: "SparkSession") -> None:
    """A worker's pyspark is that of the driver's interpreter."""
    import pyspark

    def where(batches: Iterator[object]) -> Iterator[object]:
        import pyarrow as pa
        import pyspark as found

        for _ in batches:
            yield pa.RecordBatch.from_pydict({"file": [found.__file__]})

    rows = spark.range(1).mapInArrow(where, "file string").collect()  # type: ignore[arg-type]
    assert rows[0].file == pyspark.__file__
