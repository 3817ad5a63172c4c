"""Spark finds the data source by itself where the package is installed."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent.parent
# What Spark does when a format is asked for that it does not know (pyspark.sql.worker.lookup_data_sources).
_LOOKUP = """
from importlib import import_module
from pkgutil import iter_modules
from pyspark.sql.datasource import DataSource
found = [import_module(m.name) for m in iter_modules() if m.name.startswith("pyspark_")]
sources = [m.DefaultSource for m in found if issubclass(m.DefaultSource, DataSource)]
print([s.name() for s in sources if s.__module__ == "brokerless.spark_collector.source.source"])
"""


def test_spark_finds_the_source_by_its_name(tmp_path: Path) -> None:
    """The top-level module that a wheel installs is found the way Spark looks for it."""
    (tmp_path / "pyspark_brokerless").symlink_to(ROOT / "spark_collector" / "pyspark_brokerless")
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}){_LOOKUP}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert "brokerless" in done.stdout, done.stderr
